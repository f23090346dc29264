from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dmconfig.errors import Code, SourceError
from dmconfig.footprint import (
    Footprint,
    dominant_dtype,
    fp32_patterns,
    group_sizes,
    kept_in_fp32,
    measure_configs,
    measure_tensors,
)
from dmconfig.weights import TensorInfo, find_weights, read_tensors

KIB = 1024


def tensor(name: str, dtype: str = "F32", elements: int = KIB, nbytes: int | None = None) -> TensorInfo:
    sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "I8": 1, "BOOL": 1, "F4": 0.5, "C64": 8}
    return TensorInfo(name, dtype, (elements,), int(elements * sizes[dtype]) if nbytes is None else nbytes)


# Casting


@pytest.mark.parametrize(
    ("stored", "dtype", "nbytes"),
    [
        ("F32", "float32", 4 * KIB),
        ("F32", "float16", 2 * KIB),
        ("F16", "float32", 4 * KIB),
        ("BF16", "float16", 2 * KIB),
        ("F64", "bfloat16", 2 * KIB),
        ("F8_E4M3", "bfloat16", 2 * KIB),
        ("F32", "float8_e4m3fn", KIB),
        ("F4", "float16", 2 * KIB),
        ("F4", None, KIB // 2),
        ("F16", None, 2 * KIB),
        ("I64", "float16", 8 * KIB),
        ("I8", "float32", KIB),
        ("BOOL", "float16", KIB),
        ("C64", "float16", 8 * KIB),
    ],
)
def test_measure_tensors_casts_floats_only(stored: str, dtype: str | None, nbytes: int) -> None:
    """1024 floating elements take the bytes of the target dtype; what is not floating stays as stored."""
    assert measure_tensors([tensor("a.weight", stored)], dtype=dtype).nbytes == nbytes


def test_measure_tensors_whole_footprint() -> None:
    """Two layers, one integer buffer: every field worked out by hand."""
    tensors = [
        tensor("up.weight", "F16", 1000),
        tensor("up.bias", "F16", 10),
        tensor("up.inner.weight", "F32", 300),
        tensor("ids", "I64", 4),
    ]
    # as stored the dominant dtype is float16: 2020 bytes of it, 1200 of float32
    assert measure_tensors(tensors, dtype=None) == Footprint(
        nbytes=2 * 1310 + 32,
        dtype="float16",
        stored_dtype="float16",
        largest_leaf_bytes=2 * 1010 + 32,  # ids is the component's own
        largest_block_bytes=0,
        outside_blocks_bytes=2 * 1310 + 32,
        needs_cast=True,  # of what is stored in float32
        measured_from="weights",
    )
    assert measure_tensors(tensors, dtype="float32") == Footprint(
        nbytes=4 * 1310 + 32,
        dtype="float32",
        stored_dtype="float16",
        largest_leaf_bytes=4 * 1010 + 32,
        largest_block_bytes=0,
        outside_blocks_bytes=4 * 1310 + 32,
        needs_cast=True,
        measured_from="weights",
    )


def test_measure_tensors_of_nothing() -> None:
    """A component without tensors takes nothing, in the libraries' default dtype."""
    assert measure_tensors([], dtype=None) == Footprint(
        nbytes=0,
        dtype="float32",
        stored_dtype="float32",
        largest_leaf_bytes=0,
        largest_block_bytes=0,
        outside_blocks_bytes=0,
        needs_cast=False,
        measured_from="weights",
    )


def test_group_sizes_blocks_are_members_of_lists_directly_under_the_component() -> None:
    """Lists further down belong to their block; what is in no list is outside; each tensor counts once."""
    sizes = group_sizes([
        ("blocks.0.attn.weight", 10), ("blocks.0.layers.3.weight", 5), ("blocks.1.attn.weight", 12),
        ("encoder.layers.0.weight", 7), ("norm.weight", 2), ("table", 1),
    ])  # fmt: skip
    assert sizes == {
        "nbytes": 37,
        "largest_leaf_bytes": 1 + 12,
        "largest_block_bytes": 10 + 5,
        "outside_blocks_bytes": 7 + 2 + 1,
    }


def test_measure_tensors_refuses_a_dtype_that_is_not_floating() -> None:
    """Loading in an integer dtype is nothing the libraries do."""
    with pytest.raises(ValueError, match="'int8' is not a floating dtype; expected one of float64, float32, float16"):
        measure_tensors([tensor("a")], dtype="int8")


@pytest.mark.parametrize(
    ("tensors", "dtype"),
    [
        ([], "float32"),
        ([tensor("a", "I64")], "float32"),
        ([tensor("a", "F16", 10), tensor("b", "I64")], "float16"),
        ([tensor("a", "F16", 3), tensor("b", "F32", 2)], "float32"),  # 6 bytes against 8
        ([tensor("a", "F8_E4M3"), tensor("b", "BF16", 16)], "float8_e4m3fn"),
    ],
)
def test_dominant_dtype_is_by_bytes_of_floats(tensors: list[TensorInfo], dtype: str) -> None:
    """The floating dtype with most bytes; float32 when there is none."""
    assert dominant_dtype(tensors) == dtype


# Ties


@pytest.mark.parametrize(
    ("names", "tied", "counted"),
    [
        (("shared.weight", "encoder.embed_tokens.weight"), ("encoder.embed_tokens.weight",), 1),
        (("shared.weight", "encoder.embed_tokens.weight"), (), 2),
        (("encoder.embed_tokens.weight",), ("encoder.embed_tokens.weight",), 1),
        (("head.0.weight", "head.1.weight", "head.2.weight"), (r"head\.(?![0])\d+\.weight",), 1),
        (("w", "w_sub.weight"), ("w",), 1),
        (("embed.weight", "lm_head.weight", "x.lm_head.weight"), ("lm_head.weight",), 2),
    ],
    ids=["both stored", "not tied", "only the second name", "pattern", "shorter name", "whole names only"],
)
def test_measure_tensors_counts_ties_once(names: tuple[str, ...], tied: tuple[str, ...], counted: int) -> None:
    """A second name costs nothing as long as the first is there too."""
    assert measure_tensors([tensor(name) for name in names], dtype=None, tied=tied).nbytes == counted * 4 * KIB


def test_measure_tensors_a_tie_of_another_shape_is_none() -> None:
    """A tensor that can be no copy of anything stored has memory of its own."""
    tensors = [tensor("embed.weight"), tensor("lm_head.weight", elements=2 * KIB)]
    assert measure_tensors(tensors, dtype=None, tied=("lm_head.weight",)).nbytes == 12 * KIB


# The float32 exceptions, as rules


@pytest.mark.parametrize(
    ("library", "dtype", "name", "kept"),
    [
        ("diffusers", "float16", "blocks.0.norm1.weight", True),
        ("diffusers", "bfloat16", "blocks.0.norm1.weight", True),
        ("diffusers", "bfloat16", "norm1", True),
        ("diffusers", "bfloat16", "blocks.0.norm12.weight", False),  # one part must equal the entry
        ("diffusers", "bfloat16", "blocks.0.my_norm1.weight", False),
        ("transformers", "float16", "blocks.0.norm12.weight", True),  # an entry may stand anywhere
        ("transformers", "bfloat16", "blocks.0.norm1.weight", False),  # keep is for float16 only
        ("transformers", "bfloat16", "blocks.0.strict.weight", True),
        ("transformers", "float16", "blocks.0.strict.weight", True),
        ("transformers", "float32", "blocks.0.strict.weight", False),
        ("transformers", "float16", "indexer.3.weights", True),  # * matches anything
        ("stable_diffusion", "float16", "blocks.0.norm12.weight", True),
    ],
)
def test_fp32_patterns_follow_each_library(library: str, dtype: str, name: str, kept: bool) -> None:
    """diffusers: equal parts at every dtype. transformers: found anywhere, and strict or float16 only."""
    patterns = fp32_patterns(library=library, dtype=dtype, keep=["norm1", "indexer.*.weights"], keep_strict=["strict"])
    assert kept_in_fp32(name, patterns) is kept


def test_fp32_patterns_without_any() -> None:
    """A class without exceptions keeps nothing."""
    assert fp32_patterns(library="diffusers", dtype="float16", keep=None, keep_strict=None) == ()


# Against the real loaders


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny T5 encoder, saved by transformers: float32, tied embedding, `wo` kept in float32 in float16."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    from transformers import T5Config, T5EncoderModel

    folder = tmp_path_factory.mktemp("t5")
    config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    T5EncoderModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Wan transformer, saved by diffusers: norms, tables and time embedder are kept in float32."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    from diffusers import WanTransformer3DModel

    folder = tmp_path_factory.mktemp("wan")
    WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    ).save_pretrained(folder)
    return folder


def load(library: str, class_name: str, folder: Path, dtype: str) -> Any:
    """Load with the real loader, as dmconfig does."""
    import diffusers
    import torch
    import transformers

    cls = getattr({"diffusers": diffusers, "transformers": transformers}[library], class_name)
    key = "dtype" if library == "transformers" else "torch_dtype"
    return cls.from_pretrained(folder, **{key: getattr(torch, dtype)})


def loaded_bytes(module: Any, *, stored_only: bool) -> int:
    """Return bytes of parameters and buffers, tied ones once; without the unstored buffers if asked."""
    stored = module.state_dict().keys()
    buffers = [buffer for name, buffer in module.named_buffers() if name in stored or not stored_only]
    return sum(value.nbytes for value in (*module.parameters(), *buffers))


CASES = [("transformers", "T5EncoderModel", "t5"), ("diffusers", "WanTransformer3DModel", "wan")]
DTYPES = ["float32", "float16", "bfloat16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("library", "class_name", "saved"), CASES)
def test_measure_tensors_equals_the_real_loader(
    request: pytest.FixtureRequest, library: str, class_name: str, saved: str, dtype: str
) -> None:
    """Headers and the class's exceptions give the very bytes that from_pretrained leaves in memory."""
    folder = request.getfixturevalue(saved)
    module = load(library, class_name, folder, dtype)
    files = find_weights(folder, library=library, variant=None)
    assert files is not None
    patterns = fp32_patterns(
        library=library,
        dtype=dtype,
        keep=type(module)._keep_in_fp32_modules,
        keep_strict=getattr(type(module), "_keep_in_fp32_modules_strict", None),
    )
    measured = measure_tensors(read_tensors(files), dtype=dtype, keep_in_fp32=patterns)
    assert measured.nbytes == loaded_bytes(module, stored_only=True)
    plain = measure_tensors(read_tensors(files), dtype=dtype)
    has_exceptions = (saved, dtype) in {("t5", "float16"), ("wan", "float16"), ("wan", "bfloat16")}
    assert (measured.nbytes > plain.nbytes) is has_exceptions


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_measure_configs_equals_the_real_loader(
    request: pytest.FixtureRequest, case: tuple[str, str, str], dtype: str, tmp_path: Path
) -> None:
    """The config alone gives the same bytes, buffers that are not stored included."""
    library, class_name, saved = case
    folder = request.getfixturevalue(saved)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    measured = measure_configs(tmp_path, library, class_name, dtype)
    module = load(library, class_name, folder, dtype)
    assert measured.nbytes == loaded_bytes(module, stored_only=False)
    assert measured.dtype == dtype
    assert measured.measured_from == "configs"
    own, *leaves = (sum(value.nbytes for value in part.parameters(recurse=False)) for part in module.modules())
    assert measured.largest_leaf_bytes == own + max(leaves)


def test_measure_tensors_t5_stored_with_both_names_counts_the_embedding_once(t5: Path, tmp_path: Path) -> None:
    """Old checkpoints hold the shared embedding twice; the loaded model has it once."""
    st = pytest.importorskip("safetensors.torch")
    values = st.load_file(t5 / "model.safetensors")
    names = {"shared.weight", "encoder.embed_tokens.weight"}
    (present,) = names & values.keys()
    values |= {name: values[present].clone() for name in names}
    st.save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((t5 / "config.json").read_bytes())
    files = find_weights(tmp_path, library="transformers", variant=None)
    assert files is not None
    module = load("transformers", "T5EncoderModel", tmp_path, "float32")
    measured = measure_tensors(read_tensors(files), dtype="float32", tied=tuple(type(module)._tied_weights_keys))
    assert measured.nbytes == loaded_bytes(module, stored_only=True)


def test_measure_configs_pipelines_own_module(tmp_path: Path) -> None:
    """A class of a pipeline's own folder is found under the short name model_index.json uses."""
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(vision_config=vision | {"image_size": 8, "patch_size": 4}, projection_dim=8)
    config.save_pretrained(tmp_path)
    module = StableDiffusionSafetyChecker(config)
    measured = measure_configs(tmp_path, "stable_diffusion", "StableDiffusionSafetyChecker", None)
    assert measured.nbytes == loaded_bytes(module, stored_only=False)
    assert measured.dtype == "float32"


def test_measure_configs_reads_the_dtype_of_the_config(t5: Path, tmp_path: Path) -> None:
    """Without a dtype the one that the config claims is taken."""
    config = json.loads((t5 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    measured = measure_configs(tmp_path, "transformers", "T5EncoderModel", None)
    assert (measured.dtype, measured.stored_dtype) == ("float16", "float16")
    assert measured.nbytes == measure_configs(t5, "transformers", "T5EncoderModel", "float16").nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("claimed", DTYPES)
def test_measure_configs_asked_dtype_wins_in_sub_models(tmp_path: Path, claimed: str, dtype: str) -> None:
    """A model made of others, each with a config that claims a dtype, is measured at the one asked for."""
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text, vision = tower | {"vocab_size": 32}, tower | {"image_size": 8, "patch_size": 4}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    for part in (saved, saved["text_config"], saved["vision_config"]):
        part["dtype"] = claimed
    (tmp_path / "config.json").write_text(json.dumps(saved))
    module = load("transformers", "CLIPModel", tmp_path, dtype)
    measured = measure_configs(tmp_path, "transformers", "CLIPModel", dtype)
    assert measured.nbytes == loaded_bytes(module, stored_only=False)
    assert (measured.dtype, measured.stored_dtype) == (dtype, claimed)


@pytest.mark.parametrize(
    ("config", "library", "class_name", "why"),
    [
        ("{}", "transformers", "NoSuchModel", "AttributeError: module transformers has no attribute NoSuchModel"),
        (
            "{}",
            "no_such_library",
            "Model",
            "ModuleNotFoundError: No module named 'diffusers.pipelines.no_such_library'",
        ),
        ("{", "diffusers", "AutoencoderKL", "OSError: "),
        (None, "transformers", "T5EncoderModel", "there is no such file"),
    ],
    ids=["class", "library", "config", "no config"],
)
def test_measure_configs_says_why_it_cannot(
    tmp_path: Path, config: str | None, library: str, class_name: str, why: str
) -> None:
    """A component that cannot be built has no known size, and the library's own words say why."""
    folder = tmp_path / "vae"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config)
    with pytest.raises(SourceError) as raised:
        measure_configs(folder, library, class_name, "float16")
    (problem,) = raised.value.problems
    assert problem.code is Code.SIZES_UNKNOWN
    assert problem.what == f"the size of vae is unknown: {class_name} cannot be built from its config.json"
    assert problem.why.startswith(why)


def test_measuring_weights_imports_no_torch() -> None:
    """Importing the module and measuring tensors stays light."""
    code = (
        "import sys; from dmconfig.footprint import measure_tensors; measure_tensors([], dtype='float16')\n"
        "assert not {'torch', 'diffusers', 'transformers', 'accelerate', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
