"""What a file says of components and adapters comes back from a live pipeline: the same keys and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file
from transformers import CLIPVisionModelWithProjection

from dmconfig import DMConfigError, load_from_yaml, to_spec
from dmconfig.checked import check_file
from tests.single_files import WEIGHTS, write_checkpoint, write_gguf
from tests.tiny_adapters import (
    write_controlnet,
    write_image_encoder,
    write_ip_adapter,
    write_lora,
    write_textual_inversion,
    write_textual_inversion_for_two,
)
from tests.tiny_pipelines import SIZE, Tiny, call_arguments

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Path:
    """Tiny pipelines, with what is put on them beside them."""
    root = tmp_path_factory.mktemp("export")
    for kind in ("sd", "sdxl", "flux", "wan"):
        (root / kind).symlink_to(tiny.spec(kind).with_suffix(""))
    unet = DiffusionPipeline.from_pretrained(root / "sd").unet
    write_lora(root / "a.safetensors", unet, "unet")
    write_lora(root / "b.safetensors", unet, "unet", seed=1, layers=("to_k",))
    write_textual_inversion(root / "fox.safetensors")
    write_textual_inversion_for_two(root / "owl.safetensors")
    write_ip_adapter(root / "ip.safetensors", unet)
    write_image_encoder(root / "image_encoder")
    write_controlnet(root / "edges", unet, 1)
    write_controlnet(root / "depth", unet, 2)
    write_checkpoint(root / "sd", root / "whole.safetensors")
    write_gguf(load_file(root / "flux" / "transformer" / WEIGHTS), root / "flux.gguf")
    return root


def spec(folder: Path, kind: str, more: str) -> Path:
    """Return a spec of a kind, on the cpu; one that says itself what its pipeline is has no kind."""
    file = folder / "spec.yaml"
    pipeline = f"pipeline: {{source: ./{kind}}}\n" if kind else ""
    file.write_text(f"version: 1\n{pipeline}device_map: cpu\nreserve: 0\n{more}", encoding="utf-8")
    return file


def reloaded(pipe: Any, folder: Path) -> Any:
    """A pipeline exported into a folder and loaded back; what it was made of is known."""
    export = to_spec(pipe, folder)
    assert export.unknown == ()
    (folder / "again.yaml").write_text(export.text(), encoding="utf-8")
    return load_from_yaml(folder / "again.yaml")


def drawn(pipe: Any, kind: str, **more: Any) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    result = pipe(**{**call_arguments(kind), **more}, generator=torch.Generator().manual_seed(0))
    images: np.ndarray = result.images if hasattr(result, "images") else result.frames
    return images


LORAS = (
    "adapters: {lora: [{source: ./a.safetensors, name: ink, weight: 0.7}, "
    "{source: ./b.safetensors, name: b, weight: 0.2}]}\n"
)
INT8 = "{quant_backend: torchao, quant_kwargs: {quant_type: Int8WeightOnlyConfig}}"
ONE_FILE = (
    "pipeline: {source: ./whole.safetensors, config: ./sd, dtype: float32}\n"
    "components: {scheduler: {config: {beta_start: 0.001}}, vae: {slicing: true}}\n"
)
WORDS = "adapters: {textual_inversion: [{source: ./fox.safetensors, token: <fox>}]}\n"
PICTURES = (
    "components: {image_encoder: {source: ./image_encoder, class: CLIPVisionModelWithProjection}}\n"
    "adapters: {ip_adapter: [{source: ./ip.safetensors, scale: 0.6}]}\n"
)
TILES = "{tile_sample_min_height: 16, tile_sample_min_width: 16, tile_sample_stride_height: 8}"
PYRAMID = (
    "{class: PyramidAttentionBroadcastConfig, config: {spatial_attention_block_skip_range: 2, "
    "spatial_attention_timestep_skip_range: [0, 1000]}}"
)
FILES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "stacked LoRAs": ("sd", LORAS, ("adapters",)),
    "a fused LoRA": (
        "sd", "adapters: {lora: [{source: ./a.safetensors, weight: 0.5, fused: true}]}\n", ("adapters",),
    ),
    "a word": ("sd", WORDS, ("adapters",)),
    "a word of two encoders": ("sdxl", "adapters: {textual_inversion: [{source: ./owl.safetensors, token: <owl>}]}\n",
                               ("adapters",)),
    "pictures": ("sd", PICTURES, ("adapters", "components")),
    "slices": ("sd", "components: {vae: {slicing: true}, unet: {attention_slicing: max}}\n", ("components",)),
    "automatic slices": ("sd", "components: {unet: {attention_slicing: auto}}\n", ("components",)),
    "tiles": ("wan", f"components: {{vae: {{tiling: {TILES}}}}}\n", ("components",)),
    "plain tiles": ("sd", "components: {vae: {tiling: true}}\n", ("components",)),
    "an attention backend": ("flux", "components: {transformer: {attention_backend: _native_math}}\n", ("components",)),
    "an order in memory": (
        "sd", "components: {unet: {memory_format: channels_last}, vae: {memory_format: channels_last}}\n",
        ("components",),
    ),
    "a first-block cache": (
        "flux", "components: {transformer: {cache: {class: FirstBlockCacheConfig, config: {threshold: 10.0}}}}\n",
        ("components",),
    ),
    "a pyramid": ("wan", f"components: {{transformer: {{cache: {PYRAMID}}}}}\n", ("components",)),
    "casting": ("sd", "components: {unet: {layerwise_casting: true}}\n", ("components",)),
    "casting of some layers": (
        "sd",
        "components: {unet: {layerwise_casting: {storage_dtype: float8_e5m2, skip_modules_pattern: [norm, down]}}}\n",
        ("components",),
    ),
    "quanto": ("flux", "quantization: {transformer: {quant_backend: quanto, quant_kwargs: {weights_dtype: int8}}}\n",
               ("quantization",)),
    "torchao": ("flux", f"quantization: {{transformer: {INT8}}}\n", ("quantization",)),
    "a GGUF file": (
        "", "pipeline: {source: ./flux, dtype: bfloat16}\ncomponents: {transformer: {source: ./flux.gguf}}\n",
        ("pipeline", "components"),
    ),
    "one file": ("", ONE_FILE, ("pipeline", "components")),
}  # fmt: skip
"""A spec -> the kind of pipeline, what else it says, and the sections that come back as they are."""


def sections(file: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """Return what a file says in some sections."""
    said = check_file(file).spec.model_dump(by_alias=True, exclude_unset=True)
    return {name: said.get(name) for name in names}


@pytest.mark.parametrize("case", FILES)
def test_what_a_file_puts_on_a_pipeline_comes_back(case: str, folder: Path) -> None:
    """The section is as it was written, and the picture is the same bit for bit."""
    kind, more, names = FILES[case]
    file = spec(folder, kind, more)
    pipe = load_from_yaml(file)
    again = reloaded(pipe, folder)
    assert sections(folder / "again.yaml", names) == sections(file, names)
    kind = {"one file": "sd", "a GGUF file": "flux"}.get(case, kind)
    given = {"ip_adapter_image": Image.new("RGB", (SIZE, SIZE), "red")} if case == "pictures" else {}
    assert np.array_equal(drawn(again, kind, **given), drawn(pipe, kind, **given))


# ---------------------------------------------------------------- made by hand with diffusers


def by_hand(folder: Path, kind: str, **more: Any) -> Any:
    return DiffusionPipeline.from_pretrained(folder / kind, **more)


def _switched(pipe: Any) -> None:
    pipe.vae.enable_tiling()
    pipe.vae.enable_slicing()
    pipe.unet.set_attention_slice("auto")
    pipe.unet.to(memory_format=torch.channels_last)


def _cast(pipe: Any) -> None:
    pipe.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def _cached(pipe: Any) -> None:
    pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=10.0))
    pipe.transformer.set_attention_backend("_native_math")


def _tiled(pipe: Any) -> None:
    pipe.vae.enable_tiling(tile_sample_min_height=16, tile_sample_min_width=16, tile_sample_stride_height=8)


BY_HAND: Mapping[str, tuple[str, Callable[[Any], None], dict[str, Any]]] = {
    "switches": (
        "sd",
        _switched,
        {"vae": {"tiling": True, "slicing": True},
         "unet": {"attention_slicing": "auto", "memory_format": "channels_last"}},
    ),
    "casting": ("sd", _cast, {"unet": {"layerwise_casting": True}}),
    "a cache": (
        "flux",
        _cached,
        {"transformer": {"attention_backend": "_native_math",
                         "cache": {"class": "FirstBlockCacheConfig", "config": {"threshold": 10.0}}}},
    ),
    "tiles": ("wan", _tiled, {"vae": {"tiling": {
        "tile_sample_min_height": 16, "tile_sample_min_width": 16, "tile_sample_stride_height": 8,
    }}}),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_switches_set_by_hand_are_seen_and_load(case: str, folder: Path) -> None:
    """What methods of diffusers have set is read off the components."""
    kind, change, expected = BY_HAND[case]
    pipe = by_hand(folder, kind)
    change(pipe)
    assert to_spec(pipe).data["components"] == expected
    assert np.array_equal(drawn(reloaded(pipe, folder), kind), drawn(pipe, kind))


def test_adapters_put_on_by_hand_are_named_and_their_files_have_to_be_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, scales and words are seen; each file is a variable, and once all are set the picture is the same."""
    pipe = by_hand(folder, "sd")
    pipe.load_lora_weights(str(folder), weight_name="a.safetensors", adapter_name="ink")
    pipe.load_lora_weights(str(folder), weight_name="b.safetensors", adapter_name="off")
    pipe.set_adapters(["ink"], adapter_weights=[0.7])
    pipe.load_textual_inversion(str(folder / "fox.safetensors"))
    export = to_spec(pipe, folder)
    assert export.unknown == (
        "the file of the LoRA ink on unet",
        "the file of the LoRA off on unet",
        "the file of the textual inversion <fox>",
    )
    loras, words = export.plain()["adapters"].values()
    assert [{**each, "source": None} for each in loras] == [
        {"source": None, "name": "ink", "weight": 0.7}, {"source": None, "name": "off", "weight": 0.0},
    ]  # fmt: skip
    assert loras[0]["source"] == "${INK_LORA:?the file of the LoRA ink on unet is not known}"
    assert words == [
        {"source": "${FOX_EMBEDDING:?the file of the textual inversion <fox> is not known}", "token": "<fox>"}
    ]
    (folder / "again.yaml").write_text(export.text(), encoding="utf-8")
    with pytest.raises(DMConfigError, match="the variable INK_LORA is not set"):
        load_from_yaml(folder / "again.yaml")
    for name, file in (("INK_LORA", "a"), ("OFF_LORA", "b"), ("FOX_EMBEDDING", "fox")):
        monkeypatch.setenv(name, f"./{file}.safetensors")
    again = load_from_yaml(folder / "again.yaml")
    assert np.array_equal(drawn(again, "sd", prompt="a <fox>"), drawn(pipe, "sd", prompt="a <fox>"))


def test_ip_adapter_put_on_by_hand_is_named(folder: Path) -> None:
    """With its scale; the processor that diffusers makes for it needs no source."""
    encoder = CLIPVisionModelWithProjection.from_pretrained(folder / "image_encoder")
    pipe = by_hand(folder, "sd", image_encoder=encoder)
    pipe.load_ip_adapter(str(folder), subfolder="", weight_name="ip.safetensors", image_encoder_folder=None)
    pipe.set_ip_adapter_scale(0.6)
    export = to_spec(pipe, folder)
    assert export.unknown == ("the file of the IP-Adapter 1 on unet",)
    source = "${IP_ADAPTER:?the file of the IP-Adapter 1 on unet is not known}"
    assert export.plain()["adapters"] == {"ip_adapter": [{"source": source, "scale": 0.6}]}


def test_what_leaves_no_trace_is_said(folder: Path) -> None:
    """Scales by layer, fused LoRAs, options of compiling, sizes that no argument sets, a type no file can say."""
    pipe = by_hand(folder, "sd")
    pipe.load_lora_weights(str(folder), weight_name="a.safetensors", adapter_name="ink")
    pipe.set_adapters(["ink"], adapter_weights=[{"unet": {"down": 0.5, "mid": 0.2, "up": 0.5}}])
    pipe.vae.enable_tiling()
    pipe.vae.tile_sample_min_size = 16
    pipe.unet.compile()
    pipe.text_encoder.to(torch.float64)
    unknown = to_spec(pipe, folder).unknown
    assert unknown == (
        "how to say in a file that the weights of text_encoder are float64",
        "how to say in a file that tile_sample_min_size of vae is 16",
        "the options with which unet was compiled",
        "the file of the LoRA ink on unet",
        "how much of the LoRA ink is added: its layers have 0.2, 0.5, and a file has one",
    )
    pipe.fuse_lora(adapter_names=["ink"])
    pipe.unload_lora_weights()
    export = to_spec(pipe, folder)
    assert export.unknown[-2:] == (
        "the file of the LoRA ink, fused into the weights", "how much of the LoRA ink was fused; 1 is written",
    )  # fmt: skip
    assert export.plain()["adapters"]["lora"][0].items() >= {"name": "ink", "fused": True}.items()


def test_lora_changed_since_loading_is_exported_as_it_is(folder: Path) -> None:
    """Another weight, one taken off, and one under a known name that is not the file's any more."""
    pipe = load_from_yaml(spec(folder, "sd", LORAS))
    pipe.set_adapters(["ink", "b"], adapter_weights=[0.3, 0.2])
    pipe.delete_adapters("b")
    assert to_spec(pipe, folder).data["adapters"] == {"lora": [
        {"source": "./a.safetensors", "name": "ink", "weight": 0.3},
    ]}  # fmt: skip
    pipe.delete_adapters("ink")
    pipe.load_lora_weights(str(folder), weight_name="b.safetensors", adapter_name="ink")
    assert to_spec(pipe, folder).unknown == ("the file of the LoRA ink on unet",)


def test_several_controlnets_come_back_each_with_its_own(folder: Path) -> None:
    """The wrapper that diffusers puts around them is no class of a file."""
    file = spec(
        folder, "",
        "pipeline: {source: ./sd, class: StableDiffusionControlNetPipeline}\n"
        "components: {controlnet: [{source: ./edges}, {source: ./depth, attention_slicing: max}]}\n",
    )  # fmt: skip
    pipe = load_from_yaml(file)
    again = reloaded(pipe, folder)
    assert sections(folder / "again.yaml", ("components",)) == {"components": {"controlnet": (
        {"source": "./edges", "class": "ControlNetModel"},
        {"source": "./depth", "class": "ControlNetModel", "attention_slicing": "max"},
    )}}  # fmt: skip
    assert type(again.controlnet).__name__ == "MultiControlNetModel"


def test_component_that_is_compiled_keeps_its_own_class_and_options(folder: Path) -> None:
    """Whether by the file, by its own method, or by the wrapper of torch.compile."""
    pipe = load_from_yaml(spec(folder, "sd", "components: {unet: {compile: {dynamic: true}}}\n"))
    export = to_spec(pipe, folder)
    assert (export.data["components"], export.unknown) == ({"unet": {"compile": {"dynamic": True}}}, ())
    wrapped = by_hand(folder, "sd")
    wrapped.unet = torch.compile(wrapped.unet)
    export = to_spec(wrapped, folder)
    assert export.data["components"] == {"unet": {"compile": True}}
    assert export.unknown == ("the options with which unet was compiled",)
