from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmconfig.errors import Code, SourceError
from dmconfig.weights import DTYPE_BITS, TensorInfo, WeightFiles, find_weights, read_header, read_tensors
from tests.sparse_weights import write_safetensors, write_sharded

DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "pipeline"


def safetensors(header: object, body_bytes: int = 0) -> bytes:
    """Return a file of this header, JSON or raw bytes, and a body of zeros."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(body_bytes)


def tensor(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is truncated: a safetensors file has at least 8 bytes, this one has 0"),
    "seven bytes": (bytes(7), "is truncated: a safetensors file has at least 8 bytes, this one has 7"),
    "no header": (bytes(16), "is corrupt: its header is empty"),
    "endless header": (
        struct.pack("<Q", 2**40) + b"{}",
        "is no safetensors file, or corrupt: its header would take 1.0 TiB, the format allows 95.4 MiB",
    ),
    "cut in the header": (
        struct.pack("<Q", 2048) + b"{}",
        "is truncated: its header alone ends at 2.0 KiB, the file holds 10 B",
    ),
    "lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "is a Git LFS pointer, not the weights themselves",
    ),
    "not utf-8": (safetensors(b"\xff"), "is corrupt: its header is not UTF-8 text"),
    "not json": (safetensors(b"{"), "is corrupt: its header is not JSON"),
    "deep json": (safetensors(b"[" * 1_000), "is corrupt: its header is not JSON"),
    "many lists": (
        safetensors(b"[" * 100_000),
        "is corrupt: its header has lists or objects that belong to no tensor",
    ),
    "a list": (safetensors([1]), "is corrupt: its header is not a JSON object"),
    "repeated name": (
        safetensors(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":1}'),
        "is corrupt: its header has the name 'a' twice",
    ),
    "metadata of numbers": (
        safetensors({"__metadata__": {"step": 1}}),
        "is corrupt: __metadata__ in its header is not a map from text to text",
    ),
    "metadata is text": (
        safetensors({"__metadata__": "pt"}),
        "is corrupt: __metadata__ in its header is not a map from text to text",
    ),
    "a number for a tensor": (safetensors({"a": 1}), "is corrupt: tensor 'a' lacks its dtype, shape or data_offsets"),
    "no shape": (
        safetensors({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, 4),
        "is corrupt: tensor 'a' lacks its dtype, shape or data_offsets",
    ),
    "unknown dtype": (
        safetensors({"a": tensor("float32")}, 4),
        "is corrupt: tensor 'a' has the unknown dtype 'float32'",
    ),
    "dtype is no text": (
        safetensors({"a": tensor(["F32"])}, 4),
        "is corrupt: tensor 'a' has the unknown dtype ['F32']",
    ),
    "negative shape": (
        safetensors({"a": tensor(shape=[-1, -1])}, 4),
        "is corrupt: tensor 'a' has the shape [-1, -1], not a list of whole numbers",
    ),
    "true as a number": (
        safetensors({"a": tensor(shape=[True])}, 4),
        "is corrupt: tensor 'a' has the shape [True], not a list of whole numbers",
    ),
    "shape is no list": (
        safetensors({"a": tensor(shape=1)}, 4),
        "is corrupt: tensor 'a' has the shape 1, not a list of whole numbers",
    ),
    "backward offsets": (
        safetensors({"a": tensor(offsets=[4, 0])}, 4),
        "is corrupt: data_offsets of tensor 'a' are [4, 0], not a begin and an end",
    ),
    "three offsets": (
        safetensors({"a": tensor(offsets=[0, 2, 4])}, 4),
        "is corrupt: data_offsets of tensor 'a' are [0, 2, 4], not a begin and an end",
    ),
    "fractional offsets": (
        safetensors({"a": tensor(offsets=[0, 4.0])}, 4),
        "is corrupt: data_offsets of tensor 'a' are [0, 4.0], not a begin and an end",
    ),
    "too few bytes": (
        safetensors({"a": tensor(shape=[2, 2])}, 4),
        "is corrupt: tensor 'a' of dtype F32 and shape [2, 2] takes 16 bytes, its data_offsets give it 4 bytes",
    ),
    "product beyond 64 bits": (
        safetensors({"a": tensor(shape=[2**62, 16])}, 4),
        (
            "is corrupt: tensor 'a' of dtype F32 and shape [4611686018427387904, 16] takes 295147905179352825856 "
            "bytes, its data_offsets give it 4 bytes"
        ),
    ),
    "half a byte": (
        safetensors({"a": tensor("F4", [3], [0, 2])}, 2),
        "is corrupt: tensor 'a' of dtype F4 and shape [3] takes 12 bits, its data_offsets give it 2 bytes",
    ),
    "hole at the start": (
        safetensors({"a": tensor(offsets=[4, 8])}, 8),
        "is corrupt: bytes 0 to 4 of its data belong to no tensor",
    ),
    "hole between": (
        safetensors({"a": tensor(), "b": tensor(offsets=[8, 12])}, 12),
        "is corrupt: bytes 4 to 8 of its data belong to no tensor",
    ),
    "overlap": (
        safetensors({"a": tensor(), "b": tensor(offsets=[2, 6])}, 6),
        "is corrupt: tensor 'b' begins at byte 2, before tensor 'a' ends at 4",
    ),
    "same bytes twice": (
        safetensors({"a": tensor(), "b": tensor()}, 4),
        "is corrupt: tensor 'b' begins at byte 0, before tensor 'a' ends at 4",
    ),
    "one byte short": (
        safetensors({"a": tensor()}, 3),
        "is truncated: its header describes 73 B, the file holds 72 B",
    ),
    "half a megabyte short": (
        safetensors({"a": tensor("U8", [2**20], [0, 2**20])}, 2**19),
        "is truncated: its header describes 1.0 MiB, the file holds 512.1 KiB",
    ),
    "one byte of a megabyte short": (
        safetensors({"a": tensor("U8", [2**20], [0, 2**20])}, 2**20 - 1),
        "is truncated: its header describes 1048656 bytes, the file holds 1048655 bytes",
    ),
    "something behind": (
        safetensors({"a": tensor()}, 5),
        "is corrupt: its header describes 73 B, the file holds 74 B",
    ),
}


@pytest.mark.parametrize(("content", "said"), LIES.values(), ids=LIES.keys())
def test_read_header_lying_file_says_exactly_why(tmp_path: Path, content: bytes, said: str) -> None:
    """Every way of breaking the format is refused with its own sentence, which names the file."""
    file = tmp_path / "vae" / "model.safetensors"
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(SourceError) as raised:
        read_header(file)
    (problem,) = raised.value.problems
    assert problem.code is Code.WEIGHTS_CORRUPT
    assert problem.what == f"weights file vae/model.safetensors {said}"
    assert problem.fix in {"download it again", "run git lfs pull, or download it again"}
    assert problem.origin == str(file)


@pytest.mark.parametrize("content", [content for content, _ in LIES.values()], ids=LIES.keys())
def test_read_header_refuses_only_what_safetensors_refuses(tmp_path: Path, content: bytes) -> None:
    """The library itself reads none of the lying files."""
    safe_open = pytest.importorskip("safetensors").safe_open
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(Exception, match=r"(?i)error|header|file"), safe_open(file, framework="np"):
        pass


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_read_header_every_dtype_of_the_format(tmp_path: Path, dtype: str) -> None:
    """Sixteen elements take twice the bits of the dtype in bytes, also below one byte; the library agrees."""
    safe_open = pytest.importorskip("safetensors").safe_open
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"a": (dtype, (2, 8))})
    assert read_header(file) == (TensorInfo("a", dtype, (2, 8), 2 * DTYPE_BITS[dtype]),)
    with safe_open(file, framework="np") as opened:
        assert opened.keys() == ["a"]


@pytest.mark.parametrize(
    ("header", "body_bytes", "names"),
    [
        ({}, 0, []),
        ({"__metadata__": None}, 0, []),
        (b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}  \n\t', 4, ["a"]),
        ({"b": tensor(offsets=[4, 8]), "a": tensor()}, 8, ["a", "b"]),
        ({"z": tensor(shape=[0], offsets=[0, 0]), "a": tensor(), "e": tensor(shape=[9, 0], offsets=[4, 4])}, 4, "zae"),
    ],
    ids=["nothing", "null metadata", "scalar and padding", "any order", "empty tensors"],
)
def test_read_header_unusual_but_valid(tmp_path: Path, header: object, body_bytes: int, names: list[str]) -> None:
    """What the format allows is read, in the order of the bytes."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(safetensors(header, body_bytes))
    assert [info.name for info in read_header(file)] == list(names)


def test_read_header_absent_file(tmp_path: Path) -> None:
    """A file that cannot be read is missing, not corrupt."""
    with pytest.raises(SourceError) as raised:
        read_header(tmp_path / "gone" / "model.safetensors")
    assert raised.value.problems[0].code is Code.WEIGHTS_MISSING
    assert raised.value.problems[0].what == (
        "weights file gone/model.safetensors cannot be read: No such file or directory"
    )


def test_read_header_equals_what_torch_loads(tmp_path: Path) -> None:
    """A file that safetensors wrote has the names, shapes and bytes of the tensors torch reads from it."""
    torch = pytest.importorskip("torch")
    st = pytest.importorskip("safetensors.torch")
    file = tmp_path / "model.safetensors"
    saved = {
        "w": torch.zeros(3, 5),
        "h": torch.zeros(7, dtype=torch.float16),
        "b": torch.zeros(2, 2, dtype=torch.bfloat16),
        "f8": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "ids": torch.zeros(1, 77, dtype=torch.int64),
        "mask": torch.zeros(5, dtype=torch.bool),
        "scalar": torch.zeros((), dtype=torch.float64),
        "empty": torch.zeros(0, 4),
    }
    st.save_file(saved, file, metadata={"format": "pt"})
    read = {info.name: (info.shape, info.nbytes) for info in read_header(file)}
    assert read == {name: (tuple(value.shape), value.nbytes) for name, value in st.load_file(file).items()}


def test_read_header_real_file_cut_anywhere_is_truncated(tmp_path: Path) -> None:
    """However much of a download arrived, it is called truncated."""
    whole, file = (DIGITS / "vae" / "diffusion_pytorch_model.safetensors").read_bytes(), tmp_path / "m.safetensors"
    for length in (0, 5, 8, 9, 500, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(SourceError, match="is truncated"):
            read_header(file)


# Finding


@pytest.mark.parametrize(
    ("library", "variant", "present", "found"),
    [
        ("diffusers", None, "diffusion_pytorch_model.safetensors", True),
        ("diffusers", "fp16", "diffusion_pytorch_model.fp16.safetensors", True),
        ("diffusers", "fp16", "diffusion_pytorch_model.safetensors", False),
        ("diffusers", None, "diffusion_pytorch_model.fp16.safetensors", False),
        ("diffusers", None, "model.safetensors", False),
        ("diffusers", None, "diffusion_pytorch_model.bin", False),
        ("transformers", None, "model.safetensors", True),
        ("transformers", "fp16", "model.fp16.safetensors", True),
        ("transformers", None, "diffusion_pytorch_model.safetensors", False),
        ("transformers", None, "pytorch_model.bin", False),
        ("stable_diffusion", None, "model.safetensors", True),
        ("stable_diffusion", None, "diffusion_pytorch_model.safetensors", True),
        ("stable_diffusion", None, "model.pt", False),
    ],
)
def test_find_weights_single_file(tmp_path: Path, library: str, variant: str | None, present: str, found: bool) -> None:
    """Only the very file that the library would load counts."""
    (tmp_path / present).write_bytes(b"")
    expected = WeightFiles(tmp_path, (tmp_path / present,), None, variant) if found else None
    assert find_weights(tmp_path, library=library, variant=variant) == expected


@pytest.mark.parametrize(("library", "stem"), [("diffusers", "diffusion_pytorch_model"), ("transformers", "model")])
def test_find_weights_sharded_variant_under_its_real_names(tmp_path: Path, library: str, stem: str) -> None:
    """The variant stands before .json in the index and before the number in the shards."""
    shards = [tmp_path / f"{stem}.fp16-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, shard in enumerate(shards):
        write_safetensors(shard, {f"layer.{number}": ("F16", (4,))})
    index = tmp_path / f"{stem}.safetensors.index.fp16.json"
    weight_map = {"layer.1": shards[1].name, "layer.0": shards[0].name}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    files = find_weights(tmp_path, library=library, variant="fp16")
    assert files == WeightFiles(tmp_path, tuple(shards), index, "fp16")
    assert [info.name for info in read_tensors(files)] == ["layer.0", "layer.1"]
    assert find_weights(tmp_path, library=library, variant=None) is None


@pytest.mark.parametrize(("library", "stem"), [("diffusers", "diffusion_pytorch_model"), ("transformers", "model")])
def test_find_weights_names_are_those_the_libraries_save(tmp_path: Path, library: str, stem: str) -> None:
    """What save_pretrained writes, sharded and with a variant, is found and agrees with itself."""
    make: dict[str, Callable[[], Any]] = {"diffusers": _tiny_vae, "transformers": _tiny_text_encoder}
    make[library]().save_pretrained(tmp_path, variant="fp16", max_shard_size="20KB")
    files = find_weights(tmp_path, library=library, variant="fp16")
    assert files is not None
    assert files.index == tmp_path / f"{stem}.safetensors.index.fp16.json"
    assert len(files.files) > 1
    assert len(read_tensors(files)) > 10


def _tiny_vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=2)


def _tiny_text_encoder() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3)
    return CLIPTextModel(config)


@pytest.mark.parametrize(
    ("library", "file", "index", "found"),
    [
        ("diffusers", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json", "index"),
        ("transformers", "model.safetensors", "model.safetensors.index.json", "file"),
    ],
)
def test_find_weights_both_present_follows_the_library(
    tmp_path: Path, library: str, file: str, index: str, found: str
) -> None:
    """For diffusers the index wins, for transformers the single file."""
    write_safetensors(tmp_path / file, {"a": ("F32", (1,))})
    write_sharded(tmp_path, file.removesuffix(".safetensors"), [{"a": ("F32", (1,))}])
    files = find_weights(tmp_path, library=library, variant=None)
    assert files is not None
    assert files.index == (tmp_path / index if found == "index" else None)


def test_find_weights_absent_shards_are_all_named(tmp_path: Path) -> None:
    """An interrupted download is told with every file it lacks."""
    folder = tmp_path / "transformer"
    folder.mkdir()
    write_sharded(folder, "diffusion_pytorch_model", [{name: ("F32", (1,))} for name in "abc"])
    for number in (1, 3):
        (folder / f"diffusion_pytorch_model-0000{number}-of-00003.safetensors").unlink()
    with pytest.raises(SourceError) as raised:
        find_weights(folder, library="diffusers", variant=None)
    (problem,) = raised.value.problems
    assert problem.code is Code.WEIGHTS_MISSING
    assert problem.what == (
        "weights index transformer/diffusion_pytorch_model.safetensors.index.json lists 2 files that are not there: "
        "diffusion_pytorch_model-00001-of-00003.safetensors, diffusion_pytorch_model-00003-of-00003.safetensors"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is corrupt: its text is not JSON"),
        (b"[]", "is corrupt: its text is not a JSON object"),
        (b"{}", "is corrupt: it has no weight_map from tensors to files"),
        (b'{"metadata": {}, "weight_map": {}}', "is corrupt: it has no weight_map from tensors to files"),
        (b'{"weight_map": {"a": "b"}}', "is corrupt: it has no metadata, which the loaders require"),
        (
            b'{"metadata": {}, "weight_map": {"a": "../secret.safetensors"}}',
            "is corrupt: it places tensor 'a' in '../secret.safetensors', not a file of its folder",
        ),
        (
            b'{"metadata": {}, "weight_map": {"a": 1}}',
            "is corrupt: it places tensor 'a' in 1, not a file of its folder",
        ),
        (b'{"metadata": {}, "weight_map": {"a": "b", "a": "c"}}', "is corrupt: its text has the name 'a' twice"),
    ],
)
def test_find_weights_bad_index_says_exactly_why(tmp_path: Path, content: bytes, said: str) -> None:
    """An index that is not one, or that reaches out of its folder, is refused."""
    folder = tmp_path / "unet"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(SourceError) as raised:
        find_weights(folder, library="transformers", variant=None)
    (problem,) = raised.value.problems
    assert problem.code is Code.WEIGHTS_CORRUPT
    assert problem.what == f"weights index unet/model.safetensors.index.json {said}"


# Reading all files of a component


def test_read_tensors_gathers_the_problems_of_all_files(tmp_path: Path) -> None:
    """Two damaged shards, a shared name and a disagreeing index are told in one go."""
    folder = tmp_path / "unet"
    folder.mkdir()
    write_sharded(folder, "model", [{f"{name}.{i}": ("F32", (2,)) for i in range(7)} for name in "abcd"])
    shard = [folder / f"model-0000{number}-of-00004.safetensors" for number in range(5)]
    shard[1].write_bytes(b"")
    shard[2].write_bytes(shard[2].read_bytes()[:-1])
    write_safetensors(shard[4], {f"c.{i}": ("F32", (2,)) for i in range(7)} | {"d.0": ("F32", (2,))})
    files = find_weights(folder, library="transformers", variant=None)
    assert files is not None
    with pytest.raises(SourceError) as raised:
        read_tensors(files)
    size = shard[2].stat().st_size
    both = "weights files unet/model-00003-of-00004.safetensors and model-00004-of-00004.safetensors"
    index, unlisted = "model.safetensors.index.json", "does not list there"
    unet = "weights file unet/model-0000"
    assert [problem.what for problem in raised.value.problems] == [
        f"{unet}1-of-00004.safetensors is truncated: a safetensors file has at least 8 bytes, this one has 0",
        f"{unet}2-of-00004.safetensors is truncated: its header describes {size + 1} B, the file holds {size} B",
        f"{both} both hold 7 tensors (c.0, c.1, c.2, c.3, c.4 and 2 more)",
        f"{unet}4-of-00004.safetensors lacks 6 tensors (d.1, d.2, d.3, d.4, d.5 and 1 more) that {index} lists there",
        f"{unet}4-of-00004.safetensors holds 7 tensors (c.0, c.1, c.2, c.3, c.4 and 2 more) that {index} {unlisted}",
    ]
    assert {problem.code for problem in raised.value.problems} == {Code.WEIGHTS_CORRUPT}


@pytest.mark.parametrize("component", ["unet", "vae", "text_encoder"])
def test_read_tensors_of_the_digits_pipeline_equal_the_loaded_module(component: str) -> None:
    """The headers add up to the bytes of what the real loaders make of the files."""
    import diffusers
    import transformers
    from torch import float32

    library, class_name = json.loads((DIGITS / "model_index.json").read_text())[component]
    files = find_weights(DIGITS / component, library=library, variant=None)
    assert files is not None
    tensors = read_tensors(files)
    cls = getattr({"diffusers": diffusers, "transformers": transformers}[library], class_name)
    assert {info.dtype for info in tensors} == {"F32"}
    module = cls.from_pretrained(
        DIGITS / component, **{"dtype" if library == "transformers" else "torch_dtype": float32}
    )
    # by shape: transformers 5 renames the tensors of older CLIP files as it loads them
    assert sorted(info.shape for info in tensors) == sorted(tuple(value.shape) for value in module.parameters())
    assert sum(info.nbytes for info in tensors) == sum(parameter.nbytes for parameter in module.parameters())
