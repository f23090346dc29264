"""The table of components that must be of one dtype, held against runs of every pair on the tiny pipelines.

An autoencoder of another dtype is cast to, where it is entered: the pictures are those of casting by hand.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline

from dmconfig.compatibility import casting_inputs, incompatible_dtypes
from dmconfig.dispatch import placement_of, swap, unload
from dmconfig.load import load_from_yaml
from tests.conftest import checked_from
from tests.tiny_pipelines import CALLS, CLASSES, Tiny, call_arguments, class_override, draw, kind_of, write_tiny
from tests.virtual_devices import MakeMachine


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_verdicts_are_those_of_running(call: str, root: Path, one_thread: None) -> None:
    """With one component in float32 beside others in bfloat16: what is refused fails, and what passes runs."""
    folder = root / kind_of(call)
    if not folder.exists():
        write_tiny(kind_of(call), folder)
    cls = getattr(diffusers, CLASSES[call]) if call in CLASSES else DiffusionPipeline
    pipe = cls.from_pretrained(folder, dtype=torch.bfloat16)
    head = f"version: 1\npipeline: {{source: {folder}, dtype: bfloat16"
    named = f", class: {class_override(call)['pipeline.class']}" if call in CLASSES else ""
    checked = checked_from(f"{head}{named}}}\n")
    for component in checked.assembly.modules:
        parts = [replace(c, dtype="float32" if c is component else c.dtype) for c in checked.assembly.components]
        assembly = replace(checked.assembly, components=tuple(parts))
        refused = [*incompatible_dtypes(checked.resolved, checked.spec, assembly)]
        is_cast = bool([*casting_inputs(assembly, {part.name: part.dtype for part in parts})])
        module = getattr(pipe, component.name)
        stored = {name: tensor.dtype for name, tensor in module.named_parameters()}
        module.float()
        try:
            draw(pipe, call, 0)
            runs = True
        except RuntimeError:
            runs = False
        for name, tensor in module.named_parameters():
            tensor.data = tensor.data.to(stored[name])
        for buffer in module.buffers():
            buffer.data = buffer.data.to(torch.bfloat16) if buffer.is_floating_point() else buffer.data
        if refused or is_cast:
            assert not runs, component.name
        elif call != "sd3":  # which joins its texts, so that the widest dtype decides: more fails than is refused
            assert runs, component.name


# A float32 autoencoder beside bfloat16


def decoded_by_hand(tiny: Tiny, kind: str, seed: int) -> np.ndarray:
    """Draw with diffusers alone up to the latents, and decode these in float32: plain calls, and no hook."""
    folder = tiny.spec(kind).with_suffix("")
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    vae = AutoencoderKL.from_pretrained(folder / "vae")
    for module in (vae, *(part for part in pipe.components.values() if isinstance(part, torch.nn.Module))):
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()  # at the addresses of memory, not of a mapped file
    pipe.set_progress_bar_config(disable=True)
    arguments = {**call_arguments(kind), "output_type": "latent"}
    latents = pipe(**arguments, generator=torch.Generator().manual_seed(seed)).images
    if kind == "flux":
        latents = pipe._unpack_latents(latents, arguments["height"], arguments["width"], pipe.vae_scale_factor)
    latents = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0)
    with torch.no_grad():
        picture = vae.decode(latents.to(torch.float32), return_dict=False)[0]
    drawn: np.ndarray = pipe.image_processor.postprocess(picture, output_type="np")
    return drawn


@pytest.mark.parametrize("device_map", ["cuda:0", {"vae": "cuda:1", "default": "cuda:0"}], ids=str)
@pytest.mark.parametrize("kind", ["sd", "flux", pytest.param("sdxl", marks=pytest.mark.slow), "sd3"])
def test_latents_are_cast_for_a_float32_vae(
    kind: str, device_map: object, tiny: Tiny, one_thread: None, virtual_machine: MakeMachine
) -> None:
    """Twice the bits of decoding by hand, and not those of a bfloat16 one; nothing of it stays on what is unloaded."""
    expected = [decoded_by_hand(tiny, kind, seed) for seed in (0, 1)]
    virtual_machine()
    overrides = {"pipeline.dtype": "bfloat16", "components.vae.dtype": "float32", "device_map": device_map}
    if kind == "sd":
        overrides["components.safety_checker"] = None
    pipe = load_from_yaml(tiny.spec(kind), overrides)
    plan = placement_of(pipe).plan  # type: ignore[union-attr]
    assert {each.component for each in plan.assignments if each.casts_inputs} == {"vae"}
    assert "what vae decodes is cast to its float32 first, and what it encodes is cast back" in plan.notes
    for seed, picture in zip((0, 1), expected, strict=True):
        assert np.array_equal(draw(pipe, kind, seed), picture)
    vae = pipe.vae
    unload(pipe)
    assert "decode" not in vars(vae)


class ByHand:
    """An autoencoder that one wrote around a float32 one: it draws in float32, and hands on what came."""

    def __init__(self, vae: Any) -> None:
        self._vae = vae

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vae, name)

    def encode(self, picture: torch.Tensor) -> Any:
        """Return an encoding whose draws are of the picture's dtype."""
        distribution = self._vae.encode(picture.float()).latent_dist

        def sample(generator: Any = None) -> torch.Tensor:
            drawn: torch.Tensor = distribution.sample(generator).to(picture.dtype)
            return drawn

        return SimpleNamespace(latent_dist=SimpleNamespace(sample=sample))

    def decode(self, latents: torch.Tensor, **options: Any) -> Any:
        """Return the picture, in float32."""
        options.pop("generator", None)
        return self._vae.decode(latents.float(), **options)


@pytest.mark.parametrize("call", ["sd-img2img", "sd-inpaint"])
def test_pictures_are_encoded_in_float32_and_go_on_in_bfloat16(
    call: str, tiny: Tiny, one_thread: None, virtual_machine: MakeMachine
) -> None:
    """What is drawn from an encoding is exact, and then of the dtype that came: as one would write it oneself."""
    folder = tiny.spec(call).with_suffix("")
    cls = getattr(diffusers, CLASSES[call])
    pipe = cls.from_pretrained(folder, dtype=torch.bfloat16, safety_checker=None)
    pipe.vae = ByHand(AutoencoderKL.from_pretrained(folder / "vae"))
    for module in (pipe.vae._vae, pipe.unet, pipe.text_encoder):
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
    expected = draw(pipe, call, 0)
    virtual_machine()
    overrides = {
        **class_override(call),
        "pipeline.dtype": "bfloat16",
        "components.vae.dtype": "float32",
        "components.safety_checker": None,
        "device_map": {"vae": {"execution": "cuda:1", "offload": "model"}, "default": "cuda:0"},
    }
    placed = load_from_yaml(tiny.spec("sd"), overrides)
    assert np.array_equal(draw(placed, call, 0), expected)
    assert np.array_equal(draw(placed, call, 0), expected)


def test_a_float32_vae_that_is_swapped_in_is_cast_to(
    tiny: Tiny, one_thread: None, virtual_machine: MakeMachine
) -> None:
    """A swap by hand is no reason to fail in decode."""
    expected = decoded_by_hand(tiny, "flux", 0)
    virtual_machine()
    pipe = load_from_yaml(tiny.spec("flux"), {"pipeline.dtype": "bfloat16", "device_map": "cuda:0"})
    swap(pipe, "vae", AutoencoderKL.from_pretrained(tiny.spec("flux").with_suffix("") / "vae").eval())
    assert np.array_equal(draw(pipe, "flux", 0), expected)
