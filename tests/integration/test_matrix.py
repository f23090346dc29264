"""Kinds of pipelines x placements on virtual accelerators: the bits of a plain CPU run, twice, and nothing left behind.

The pipelines are the tiny ones of ``tests.tiny_pipelines``, made of the real classes with the schedulers of the
published ones. Each case is one call over one placement: two generations, then where the weights are, then what is
left on the devices once the pipeline is gone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from dmconfig import load_from_yaml, plan_from_yaml
from tests.tiny_pipelines import CALLS, CLASSES, KINDS, class_override, draw, kind_of, write_spec
from tests.virtual_devices import MakeMachine

SEEDS = (0, 1)
DENOISERS = ("unet", "transformer", "transformer_2")
DECODERS = ("vae", "movq")
ALONGSIDE = ("safety_checker", "controlnet", "prior_prior")
"""Components outside their pipeline's offload order: brought whole, they stay until the call ends."""

Overrides = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The components of a call's pipeline that have weights, with their bytes, in the pipeline's order."""

    sizes: Mapping[str, int]

    @property
    def names(self) -> Sequence[str]:
        """All of them."""
        return [*self.sizes]

    @property
    def denoisers(self) -> Sequence[str]:
        """Those that run once per step: two in Wan 2.2."""
        return [name for name in self.sizes if name in DENOISERS]

    @property
    def others(self) -> Sequence[str]:
        """All but the denoisers."""
        return [name for name in self.sizes if name not in DENOISERS]

    @property
    def decoder(self) -> str:
        """The one that makes pictures of latents."""
        return next(name for name in self.sizes if name in DECODERS)

    @property
    def text_encoders(self) -> Sequence[str]:
        """Those that read the prompt."""
        return [name for name in self.sizes if "text_encoder" in name]


def pinned(*groups: tuple[Sequence[str], Any], default: str | None = None) -> Overrides:
    """Return a device map with the place of each group for all of its components."""
    device_map = {name: place for names, place in groups for name in names}
    return {"device_map": device_map if default is None else {**device_map, "default": default}}


def in_turn(names: Sequence[str], count: int) -> Mapping[str, str]:
    """Deal devices out to names: the first gets cuda:0, the next cuda:1, and so on, around."""
    return {name: f"cuda:{index % count}" for index, name in enumerate(names)}


def brought(device: str, how: str = "model") -> Mapping[str, str]:
    """Return the entry of a component that runs on device and whose weights rest on the cpu."""
    return {"execution": device, "offload": how}


def tight(parts: Parts, low_memory: str) -> Overrides:
    """Limits that hold the denoiser on cuda:0 but not all others on cuda:1, only one of them at a time."""
    one_at_a_time = max(parts.sizes[name] for name in parts.others if name not in ALONGSIDE)
    at_once = sum(parts.sizes[name] for name in parts.others if name in ALONGSIDE)
    denoiser = max(parts.sizes[name] for name in parts.denoisers)
    limits = {"cuda:0": denoiser * 102 // 100, "cuda:1": (one_at_a_time + at_once) * 102 // 100}
    return {"device_map": "balanced", "low_memory": low_memory, "max_memory": limits}


PLACEMENTS: Mapping[str, Callable[[Parts], Overrides]] = {
    "one device": lambda parts: {"device_map": "cuda:0"},
    "cpu": lambda parts: {"device_map": "cpu"},
    "denoiser alone": lambda parts: pinned((parts.denoisers, "cuda:0"), (parts.others, "cuda:1")),
    "others spread": lambda parts: {
        "device_map": {**in_turn(parts.others, 2), **dict.fromkeys(parts.denoisers, "cuda:1")}
    },
    "decoder alone": lambda parts: pinned(([parts.decoder], "cuda:1"), default="cuda:0"),
    "three devices": lambda parts: {"device_map": in_turn(parts.names, 3)},
    "balanced": lambda parts: {"device_map": "balanced"},
    "balanced over three devices": lambda parts: {"device_map": "balanced"},
    "decoder pinned, rest balanced": lambda parts: pinned(([parts.decoder], "cuda:1"), default="balanced"),
    "text encoders on the cpu": lambda parts: pinned((parts.text_encoders, "cpu"), default="cuda:0"),
    "denoiser on the cpu": lambda parts: pinned((parts.denoisers, "cpu"), default="cuda:1"),
    "cpu_offload_with_hook": lambda parts: {"device_map": "cuda:1", "low_memory": "cpu_offload_with_hook"},
    "sequential_cpu_offload": lambda parts: {"device_map": "cuda:0", "low_memory": "sequential_cpu_offload"},
    "all brought, two devices": lambda parts: {
        "device_map": {name: brought(device) for name, device in in_turn(parts.names, 2).items()}
    },
    "denoiser by layer": lambda parts: pinned((parts.denoisers, brought("cuda:0", "sequential")), default="cuda:1"),
    "decoder by layer": lambda parts: pinned(([parts.decoder], brought("cuda:1", "sequential")), default="cuda:0"),
    "denoiser stays, others brought": lambda parts: pinned(
        (parts.denoisers, "cuda:0"), (parts.others, brought("cuda:1"))
    ),
    "denoiser stays, others brought beside it": lambda parts: pinned(
        (parts.denoisers, "cuda:0"), (parts.others, brought("cuda:0"))
    ),
    "tight, brought whole": lambda parts: tight(parts, "cpu_offload_with_hook"),
    "tight, by layer": lambda parts: tight(parts, "sequential_cpu_offload"),
    "one of each": lambda parts: pinned(
        (parts.denoisers, "cuda:0"),
        (parts.others, brought("cuda:1", "sequential")),
        ([parts.decoder], brought("cuda:0")),
    ),
}
DEVICES = {"three devices": 3, "balanced over three devices": 3}
"""Devices of a machine where it is not two."""

QUICK = ("denoiser alone", "decoder pinned, rest balanced", "cpu_offload_with_hook", "one of each")
VARIANTS = ("others spread", "text encoders on the cpu", "cpu_offload_with_hook", "sequential_cpu_offload",
            "all brought, two devices", "decoder by layer")  # fmt: skip
"""Placements of image-to-image and inpainting calls, which differ in that they enter the VAE twice."""


def cases(calls: Sequence[str], placements: Sequence[str]) -> list[Any]:
    """Return a case per call and placement."""
    return [pytest.param(call, name, id=f"{call}: {name}") for call in calls for name in placements]


@dataclass(slots=True)
class Tiny:
    """The tiny pipelines of this module and their plain pictures, each made when it is first asked for."""

    folder: Path
    _specs: dict[str, Path] = field(default_factory=dict)
    _pictures: dict[tuple[str, frozenset[str]], list[np.ndarray]] = field(default_factory=dict)

    def spec(self, call: str) -> Path:
        """Return the spec file of a call's pipeline."""
        kind = kind_of(call)
        if kind not in self._specs:
            self._specs[kind] = write_spec(kind, self.folder)
        return self._specs[kind]

    def parts(self, call: str) -> Parts:
        """Return what a call's pipeline is made of."""
        plan = plan_from_yaml(self.spec(call), {"device_map": "cpu", **class_override(call)})
        return Parts(sizes={assignment.component: assignment.nbytes for assignment in plan.assignments})

    def pictures(self, call: str, *, staying: frozenset[str]) -> list[np.ndarray]:
        """Return the pictures of a plain cpu run, one per seed.

        ``staying`` are components that the placement leaves on the cpu. The weights of all others are copied first,
        as a move does: diffusers maps the file, at whatever address, and a product of a matrix with one vector gives
        other bits where the matrix is not aligned to 16 bytes.
        """
        key = (call, staying)
        if key not in self._pictures:
            cls = getattr(diffusers, CLASSES[call]) if call in CLASSES else DiffusionPipeline
            pipe = cls.from_pretrained(self.spec(call).with_suffix(""))
            for name, part in pipe.components.items():
                if isinstance(part, torch.nn.Module) and name not in staying:
                    for parameter in part.parameters():
                        parameter.data = parameter.data.clone()
            self._pictures[key] = [draw(pipe, call, seed) for seed in SEEDS]
        return self._pictures[key]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny pipelines, written once for the module."""
    return Tiny(tmp_path_factory.mktemp("tiny"))


def staying_on_the_cpu(overrides: Overrides, parts: Parts) -> frozenset[str]:
    """Return the components that are computed on the cpu, with the weights as they were loaded."""
    device_map = overrides["device_map"]
    if isinstance(device_map, str):
        return frozenset(parts.names if device_map == "cpu" else ())
    return frozenset(name for name, place in device_map.items() if place == "cpu")


def resting_devices(pipe: Any) -> dict[str, str]:
    """Where the parameters of each component are, comma-separated; what a hook holds back counts as on the cpu."""
    found = {}
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            devices = {str(parameter.device) for parameter in part.parameters()}
            found[name] = ",".join(sorted({"cpu" if device == "meta" else device for device in devices}))
    return found


def hooks_of_ours(pipe: Any) -> list[str]:
    """Name what is left in a pipeline's components of a placement: replaced methods, and hooks of ours or accelerate.

    transformers installs hooks of its own when hidden states are first asked for; those are not meant.
    """
    found = []
    for name, part in pipe.components.items():
        for path, module in part.named_modules() if isinstance(part, torch.nn.Module) else ():
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            homes = {getattr(hook, "__module__", "").partition(".")[0] for hook in hooks}
            if (
                homes & {"dmconfig", "accelerate"}
                or {"forward", "encode", "decode", "generate", "_hf_hook"} & vars(module).keys()
            ):
                found.append(f"{name}.{path}")
    return found


def check(call: str, placement: str, tiny: Tiny, make_machine: MakeMachine) -> None:
    """Check one case of the matrix."""
    parts = tiny.parts(call)
    overrides = PLACEMENTS[placement](parts)
    expected = tiny.pictures(call, staying=staying_on_the_cpu(overrides, parts))
    devices = [f"cuda:{index}" for index in range(DEVICES.get(placement, 2))]
    machine = make_machine(count=len(devices))
    pipe = load_from_yaml(tiny.spec(call), {**overrides, **class_override(call)})

    equal = [np.array_equal(draw(pipe, call, seed), picture) for seed, picture in zip(SEEDS, expected, strict=True)]

    assert equal == [True, True]
    assert resting_devices(pipe) == pipe.hf_device_map
    assert pipe.hf_device_map.keys() == parts.sizes.keys()
    assert "tight" not in placement or "cpu" in pipe.hf_device_map.values()
    pipe.reset_device_map()
    assert set(resting_devices(pipe).values()) == {"cpu"}
    assert not hooks_of_ours(pipe)
    del pipe
    gc.collect()
    assert {device: machine.ledger.live_bytes(device) for device in devices} == dict.fromkeys(devices, 0)


@pytest.mark.parametrize(("call", "placement"), cases(("sd", "flux"), QUICK))
def test_two_pipelines_in_a_few_placements(call: str, placement: str, tiny: Tiny, virtual_machine: MakeMachine) -> None:
    """A UNet with a safety checker, and a transformer with T5: the part of the matrix that runs every time."""
    check(call, placement, tiny, virtual_machine)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "placement"), cases(KINDS, tuple(PLACEMENTS)))
def test_every_kind_in_every_placement(call: str, placement: str, tiny: Tiny, virtual_machine: MakeMachine) -> None:
    """Pictures from a prompt: two generations equal the plain run, the map is true, and nothing is left behind."""
    check(call, placement, tiny, virtual_machine)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "placement"), cases(tuple(CLASSES), VARIANTS))
def test_pictures_from_a_picture(call: str, placement: str, tiny: Tiny, virtual_machine: MakeMachine) -> None:
    """Image-to-image and inpainting, which encode a picture first: as for pictures from a prompt."""
    check(call, placement, tiny, virtual_machine)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_weights_brought_whole_take_no_more_than_planned(kind: str, tiny: Tiny, virtual_machine: MakeMachine) -> None:
    """Under cpu_offload_with_hook one component at a time is on the device, beside those within another's phase."""
    machine = virtual_machine()
    pipe = load_from_yaml(tiny.spec(kind), {"device_map": "cuda:0", "low_memory": "cpu_offload_with_hook"})
    sizes = {name: allocated_bytes(part) for name, part in pipe.components.items() if name in pipe.hf_device_map}
    at_once = sum(size for name, size in sizes.items() if name in ALONGSIDE)
    one_at_a_time = max(size for name, size in sizes.items() if name not in ALONGSIDE)
    machine.ledger.reset()

    draw(pipe, kind, 0)

    assert 0 < machine.ledger.peak_bytes("cuda:0", kind="weights") <= one_at_a_time + at_once


def allocated_bytes(module: torch.nn.Module) -> int:
    """Return what a module's tensors take on an accelerator, which allocates in steps of 512 bytes."""
    tensors = {tensor.data_ptr(): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(-(-tensor.numel() * tensor.element_size() // 512) * 512 for tensor in tensors.values())


def test_calls_are_those_of_kinds_and_their_variants() -> None:
    """No call of the tiny pipelines is left out of the matrix."""
    assert set(CALLS) == {*KINDS, *CLASSES}
