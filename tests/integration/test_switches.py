"""Speed and memory switches from a file: what they set, the bits and the bytes of the same set by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from dmconfig import load_from_yaml, plan_from_yaml
from dmconfig.errors import BuildError
from tests.conftest import assignment, only_problem
from tests.tiny_pipelines import Tiny, call_arguments
from tests.virtual_devices import MakeMachine

pytestmark = pytest.mark.usefixtures("one_thread")

Hand = Callable[[Any], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Path:
    """Tiny pipelines, a folder per kind."""
    root = tmp_path_factory.mktemp("switches")
    for kind in ("sd", "flux", "wan"):
        (root / kind).symlink_to(tiny.spec(kind).with_suffix(""))
    return root


def spec(folder: Path, kind: str, components: str, more: str = "") -> Path:
    """Return a spec of a kind with switches on its components, the denoiser on a device of its own."""
    file = folder / "spec.yaml"
    denoiser = "unet" if kind == "sd" else "transformer"
    place = more or f"device_map: {{{denoiser}: 'cuda:1', default: 'cuda:0'}}\n"
    file.write_text(f"version: 1\npipeline: {{source: ./{kind}}}\nreserve: 0\n{place}components: {components}\n")
    return file


def drawn(pipe: Any, kind: str, **more: Any) -> np.ndarray:
    """Return what a pipeline draws."""
    pipe.set_progress_bar_config(disable=True)
    result = pipe(**{**call_arguments(kind), **more}, generator=torch.Generator().manual_seed(0))
    images: np.ndarray = result.images if hasattr(result, "images") else result.frames
    return images


def by_hand(folder: Path, kind: str, switch_on: Hand, dtype: torch.dtype = torch.float32, **more: Any) -> np.ndarray:
    """Return what the plain pipeline draws with switches set by hand, its weights copied as a move does."""
    pipe = DiffusionPipeline.from_pretrained(folder / kind, dtype=dtype)
    switch_on(pipe)
    for part in pipe.components.values():
        for parameter in part.parameters() if isinstance(part, torch.nn.Module) else ():
            parameter.data = parameter.data.clone()
    return drawn(pipe, kind, **more)


def _tile(pipe: Any) -> None:
    pipe.vae.enable_tiling()


def _tile_wan(pipe: Any) -> None:
    pipe.vae.enable_tiling(tile_sample_min_height=16, tile_sample_min_width=16, tile_sample_stride_height=8)


def _slice(pipe: Any) -> None:
    pipe.vae.enable_slicing()


def _slice_attention(pipe: Any) -> None:
    pipe.unet.set_attention_slice("max")


def _native(pipe: Any) -> None:
    pipe.transformer.set_attention_backend("_native_math")


def _channels_last(pipe: Any) -> None:
    pipe.unet.to(memory_format=torch.channels_last)
    pipe.vae.to(memory_format=torch.channels_last)


def _first_block(pipe: Any) -> None:
    pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=10.0))


def _pyramid(pipe: Any) -> None:
    config = diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1000),
        current_timestep_callback=lambda: pipe.current_timestep,
    )
    pipe.transformer.enable_cache(config)


def _cast(pipe: Any) -> None:
    pipe.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


PYRAMID = (
    "{transformer: {cache: {class: PyramidAttentionBroadcastConfig, config: {spatial_attention_block_skip_range: 2, "
    "spatial_attention_timestep_skip_range: [0, 1000]}}}}"
)
CASES: dict[str, tuple[str, str, Hand]] = {
    "slicing": ("sd", "{vae: {slicing: true}}", _slice),
    "tiling with arguments": (
        "wan",
        "{vae: {tiling: {tile_sample_min_height: 16, tile_sample_min_width: 16, tile_sample_stride_height: 8}}}",
        _tile_wan,
    ),
    "attention slicing": ("sd", "{unet: {attention_slicing: max}}", _slice_attention),
    "attention backend": ("flux", "{transformer: {attention_backend: _native_math}}", _native),
    "channels last": (
        "sd",
        "{unet: {memory_format: channels_last}, vae: {memory_format: channels_last}}",
        _channels_last,
    ),
    "first-block cache": (
        "flux",
        "{transformer: {cache: {class: FirstBlockCacheConfig, config: {threshold: 10.0}}}}",
        _first_block,
    ),
    "pyramid attention broadcast": (
        "wan",
        PYRAMID,
        _pyramid,
    ),
    "layerwise casting": ("sd", "{unet: {layerwise_casting: true}}", _cast),
}
"""A switch -> the kind of pipeline, the components of the file, and the same by hand."""


@pytest.mark.parametrize("case", CASES)
def test_switch_on_two_devices_draws_what_it_does_by_hand(
    case: str, folder: Path, virtual_machine: MakeMachine
) -> None:
    """Each switch of the file gives the bits of the same switch set by hand, twice."""
    kind, components, switch_on = CASES[case]
    steps = {"num_inference_steps": 4}
    expected = by_hand(folder, kind, switch_on, **steps)

    virtual_machine()
    pipe = load_from_yaml(spec(folder, kind, components))

    assert np.array_equal(drawn(pipe, kind, **steps), expected)
    assert np.array_equal(drawn(pipe, kind, **steps), expected)


@pytest.mark.parametrize("case", ["tiling with arguments", "first-block cache", "layerwise casting"])
def test_switch_that_changes_the_picture_does(case: str, folder: Path) -> None:
    """Without it the picture is another, so the equality above means something."""
    kind, _, switch_on = CASES[case]
    steps = {"num_inference_steps": 4}

    assert not np.array_equal(by_hand(folder, kind, switch_on, **steps), by_hand(folder, kind, lambda _: None, **steps))


def test_switches_are_set_on_the_component_itself(folder: Path) -> None:
    """What leaves no trace in a picture is there on the component."""
    components = "{vae: {tiling: true, slicing: true, memory_format: channels_last}, unet: {attention_slicing: 2}}"

    pipe = load_from_yaml(spec(folder, "sd", components, "device_map: cpu\n"))

    assert pipe.vae.use_tiling
    assert pipe.vae.use_slicing
    assert pipe.vae.decoder.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    assert "Sliced" in type(next(iter(pipe.unet.attn_processors.values()))).__name__


def test_layerwise_casting_weighs_what_is_planned(folder: Path, virtual_machine: MakeMachine) -> None:
    """Linear and convolution layers are kept in a byte an element; the plan knows which, to the byte."""
    file = spec(folder, "flux", "{transformer: {layerwise_casting: {storage_dtype: float8_e5m2}}}")
    overrides = {"pipeline.dtype": "bfloat16"}
    virtual_machine()

    plan, pipe = plan_from_yaml(file, overrides), load_from_yaml(file, overrides)

    kept = {name: p.numel() * p.element_size() for name, p in pipe.transformer.named_parameters()}
    plain = plan_from_yaml(spec(folder, "flux", "{}"), overrides)
    assert assignment(plan, "transformer").nbytes == sum(kept.values())
    assert sum(kept.values()) < 0.7 * assignment(plain, "transformer").nbytes
    assert assignment(plan, "transformer").dtype == "bfloat16"
    assert "transformer is kept in float8_e5m2 and cast layer by layer while it computes" in plan.notes


@pytest.mark.parametrize("offload", ["model", "group"])
def test_layerwise_casting_goes_with_offloading(offload: str, folder: Path, virtual_machine: MakeMachine) -> None:
    """Weights kept in float8 are brought whole or in groups, and cast where they compute."""
    expected = by_hand(folder, "sd", _cast)
    place = f"device_map: {{unet: {{execution: 'cuda:1', offload: {offload}}}, default: 'cuda:0'}}\n"
    virtual_machine()

    pipe = load_from_yaml(spec(folder, "sd", "{unet: {layerwise_casting: true}}", place))

    assert np.array_equal(drawn(pipe, "sd"), expected)
    assert np.array_equal(drawn(pipe, "sd"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["{backend: eager}", "{backend: eager, regional: true}"])
def test_compiling_comes_after_placing_and_draws_what_it_does_without(options: str, folder: Path) -> None:
    """The whole component, or its repeated blocks, run compiled: with a backend that changes nothing, the same bits."""
    from torch._dynamo.utils import counters

    expected = drawn(DiffusionPipeline.from_pretrained(folder / "flux"), "flux")
    torch._dynamo.reset()
    counters.clear()

    pipe = load_from_yaml(spec(folder, "flux", f"{{transformer: {{compile: {options}}}}}", "device_map: cpu\n"))

    compiled = [module for module in pipe.transformer.modules() if module._compiled_call_impl is not None]
    blocks = len(pipe.transformer.transformer_blocks) + len(pipe.transformer.single_transformer_blocks)
    assert len(compiled) == (blocks if "regional" in options else 1)
    assert np.array_equal(drawn(pipe, "flux"), expected)
    assert counters["frames"]["ok"] > 0
    torch._dynamo.reset()


def test_switch_that_the_class_refuses_when_it_is_set_names_the_place(folder: Path) -> None:
    """What only the library itself knows comes as a problem at the switch, and nothing stays loaded."""
    components = "{unet: {attention_slicing: 64}}"

    with pytest.raises(BuildError) as error:
        load_from_yaml(spec(folder, "sd", components, "device_map: cpu\n"))

    problem = only_problem(error.value)
    assert problem.path == ("components", "unet", "attention_slicing")
    assert "size 64 has to be smaller or equal to 4" in problem.what


def test_missing_package_of_an_attention_backend_is_told_before_loading(folder: Path) -> None:
    """A backend that is not installed here is an error that says what to install; planning goes on without."""
    file = spec(folder, "flux", "{transformer: {attention_backend: sage}}", "device_map: cpu\n")

    assert plan_from_yaml(file)
    with pytest.raises(BuildError) as error:
        load_from_yaml(file)

    assert only_problem(error.value).fix == "pip install sageattention"
