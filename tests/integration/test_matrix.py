"""Kinds of pipelines x placements on virtual accelerators: the bits of a plain CPU run, twice, and nothing left behind.

The pipelines are the tiny ones of ``tests.tiny_pipelines``, made of the real classes with the schedulers of the
published ones. Each case is one call over one placement: two generations, the bytes on each device held against the
plan, then where the weights are, then what is left on the devices once the pipeline is gone. What comes out is in
``docs/placements.md``: after a change to ``PLACEMENTS``, ``make placements`` writes it anew.
"""

from __future__ import annotations

import functools
import gc
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import yaml
from diffusers.hooks import apply_group_offloading
from diffusers.models.autoencoders.vae import AutoencoderMixin

from dmconfig import load_from_yaml, plan_from_yaml, report
from dmconfig.errors import SpecError
from dmconfig.plan import Assignment, Part, Plan, Residency
from dmconfig.virtual import Ledger
from tests import placement_table
from tests.tiny_pipelines import CALLS, CLASSES, KINDS, SEEDS, Tiny, class_override, draw
from tests.virtual_devices import MakeMachine

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


def brought(device: str, how: str = "model", storage: str = "cpu") -> Mapping[str, str]:
    """Return the entry of a component that runs on device and whose weights rest on the cpu or on disk."""
    return {"execution": device, "offload": how, "storage": storage}


def all_brought(parts: Parts, how: str = "model", storage: str = "cpu") -> Overrides:
    """Every component brought, in turn to one of two devices."""
    return {"device_map": {name: brought(device, how, storage) for name, device in in_turn(parts.names, 2).items()}}


def spread(parts: Parts, how: str = "none") -> Overrides:
    """Denoisers over both devices; brought by layer where the limits leave too little room, which they then do."""
    device_map = {name: {"execution": ["cuda:0", "cuda:1"], "offload": how} for name in parts.denoisers}
    overrides: Overrides = {"device_map": {**device_map, "default": "cuda:0"}}
    if how == "none":
        return overrides
    denoisers = sum(parts.sizes[name] for name in parts.denoisers)
    others = sum(parts.sizes[name] for name in parts.others)
    return {**overrides, "max_memory": {"cuda:0": others + denoisers * 6 // 10, "cuda:1": denoisers * 2 // 10}}


def tight(parts: Parts, low_memory: str) -> Overrides:
    """Limits that hold the denoiser on cuda:0 but not all others on cuda:1, only one of them at a time."""
    one_at_a_time = max(parts.sizes[name] for name in parts.others if name not in ALONGSIDE)
    at_once = sum(parts.sizes[name] for name in parts.others if name in ALONGSIDE)
    denoiser = max(parts.sizes[name] for name in parts.denoisers)
    limits = {"cuda:0": denoiser * 102 // 100, "cuda:1": (one_at_a_time + at_once) * 102 // 100}
    return {"device_map": "balanced", "low_memory": low_memory, "max_memory": limits}


BY_BLOCKS = {"group_offload": {"offload_type": "block_level", "num_blocks_per_group": 1}}

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
    "all brought, two devices": all_brought,
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
    "denoiser split over two devices": spread,
    "denoiser split, rest streamed": lambda parts: spread(parts, "sequential"),
    "one of each": lambda parts: pinned(
        (parts.denoisers, "cuda:0"),
        (parts.others, brought("cuda:1", "sequential")),
        ([parts.decoder], brought("cuda:0")),
    ),
    "group_offload": lambda parts: {"device_map": "cuda:0", "low_memory": "group_offload"},
    "group_offload by blocks": lambda parts: {"device_map": "cuda:1", "low_memory": "group_offload", **BY_BLOCKS},
    "denoiser in groups": lambda parts: pinned((parts.denoisers, brought("cuda:0", "group")), default="cuda:1"),
    "denoiser in groups of blocks, others brought": lambda parts: {
        **pinned((parts.denoisers, brought("cuda:0", "group")), (parts.others, brought("cuda:1"))),
        **BY_BLOCKS,
    },
    "denoiser stays, others in groups": lambda parts: pinned(
        (parts.denoisers, "cuda:0"), (parts.others, brought("cuda:1", "group"))
    ),
    "all brought from disk": lambda parts: all_brought(parts, "model", "disk"),
    "all by layer from disk": lambda parts: all_brought(parts, "sequential", "disk"),
    "all in groups from disk": lambda parts: all_brought(parts, "group", "disk"),
}
"""A placement is one entry here; it is then a row of the table in the docs."""
ONLY: Mapping[str, Sequence[str]] = {"all in groups from disk": ("sd", "flux", "kandinsky22")}
"""Kinds of a placement that is not for all of them: here one that is refused, and advised to be another placement."""
DEVICES = {"three devices": 3, "balanced over three devices": 3}
"""Devices of a machine where it is not two."""

QUICK = ("denoiser alone", "decoder pinned, rest balanced", "cpu_offload_with_hook", "one of each")
VARIANTS = ("others spread", "text encoders on the cpu", "cpu_offload_with_hook", "sequential_cpu_offload",
            "all brought, two devices", "decoder by layer", "group_offload", "all brought from disk")  # fmt: skip
"""Placements of image-to-image and inpainting calls, which differ in that they enter the VAE twice."""

COLUMNS = (*KINDS, *CLASSES)
"""Of the table in the docs."""
CELLS = tuple(
    [(placement, kind) for kind in KINDS for placement in PLACEMENTS if kind in ONLY.get(placement, KINDS)]
    + [(placement, call) for call in CLASSES for placement in VARIANTS]
)
"""Those of the table for which there is a case: placement and call."""


def cases(calls: Sequence[str]) -> list[Any]:
    """Return the cases of these calls; a UNet and a transformer with T5 in a few placements run every time."""
    cells = [(call, placement) for placement, call in CELLS if call in calls]
    quick = [call in ("sd", "flux") and placement in QUICK for call, placement in cells]
    return [
        pytest.param(*cell, id=": ".join(cell), marks=() if is_quick else pytest.mark.slow)
        for cell, is_quick in zip(cells, quick, strict=True)
    ]


@functools.cache
def parts_of(tiny: Tiny, call: str) -> Parts:
    """Return what a call's pipeline is made of."""
    plan = plan_from_yaml(tiny.spec(call), {"device_map": "cpu", **class_override(call)})
    return Parts(sizes={assignment.component: assignment.nbytes for assignment in plan.assignments})


def staying_on_the_cpu(overrides: Overrides, parts: Parts) -> frozenset[str]:
    """Return the components that are computed on the cpu, with the weights as they were loaded."""
    device_map = overrides["device_map"]
    if isinstance(device_map, str):
        return frozenset(parts.names if device_map == "cpu" else ())
    return frozenset(name for name, place in device_map.items() if place == "cpu")


def resting_devices(pipe: Any, paths: Iterable[str]) -> dict[str, str]:
    """Where the parameters of each component or part of one are, comma-separated.

    What a hook holds back counts as on the cpu. The paths are those of a device map: what a longer one names, such as
    ``unet.mid_block``, belongs to that one alone.
    """
    found: dict[str, set[str]] = {path: set() for path in paths}
    for name, part in pipe.components.items():
        for path, parameter in part.named_parameters() if isinstance(part, torch.nn.Module) else ():
            found[nearest(f"{name}.{path}", found)].add(str(parameter.device).replace("meta", "cpu"))
    return {path: ",".join(sorted(devices)) for path, devices in found.items()}


def nearest(path: str, paths: Iterable[str]) -> str:
    """Return the longest of paths that is the beginning of path."""
    return max((each for each in paths if not each or path.startswith(f"{each}.")), key=len)


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


# Bytes

Place = Assignment | Part
"""Where one component, or one part of a component that is split, runs and rests."""
Tensors = Mapping[str, torch.Tensor]


def allocated_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return what distinct tensors take on an accelerator, which allocates in steps of 512 bytes."""
    return sum(-(-size // 512) * 512 for size in distinct_sizes(tensors))


def distinct_sizes(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the bytes of each tensor, tied ones once."""
    return [tensor.numel() * tensor.element_size() for tensor in {each.data_ptr(): each for each in tensors}.values()]


def every_tensor(module: torch.nn.Module) -> Tensors:
    """Return all parameters and buffers."""
    return dict((*module.named_parameters(), *module.named_buffers()))


def places(plan: Plan, modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[Assignment, Place, Tensors]]:
    """Yield each place of a plan with the tensors that are there: one per component, or one per part of one."""
    for assignment in plan.assignments:
        paths = [part.path for part in assignment.parts] or [""]
        tensors = every_tensor(modules[assignment.component])
        found: tuple[Place, ...] = assignment.parts or (assignment,)
        for path, place in zip(paths, found, strict=True):
            yield assignment, place, {name: each for name, each in tensors.items() if nearest(name, paths) == path}


def resting_bytes(plan: Plan, modules: Mapping[str, torch.nn.Module], device: str) -> int:
    """Return what is on an accelerator while nothing runs, by the plan: what rests there, and what layers leave there.

    Besides what the plan counts there are the buffers in no file (position ids, tables of rotary embeddings).
    """
    rests = (tensors for _, place, tensors in places(plan, modules) if place.storage_device == device)
    return sum(allocated_bytes(tensors.values()) for tensors in rests) + left_bytes(plan, modules, device)


def left_bytes(plan: Plan, modules: Mapping[str, torch.nn.Module], device: str) -> int:
    """Return the bytes of buffers that components brought by layer leave on an accelerator: see ``LayerHooks``.

    Those that are in no file, but what the component itself owns. ``Footprint`` says that they come on top.
    """
    return sum(
        allocated_bytes(unstored_buffers(modules[assignment.component], tensors))
        for assignment, place, tensors in places(plan, modules)
        if place.execution_device == device and place.residency is Residency.PER_LEAF
    )


def unstored_buffers(module: torch.nn.Module, tensors: Tensors) -> Iterator[torch.Tensor]:
    """Yield those of tensors that are buffers of layers and in no file."""
    stored = module.state_dict().keys()
    return (each for name, each in tensors.items() if "." in name and name not in stored and not is_parameter(each))


def copied_bytes(plan: Plan, modules: Mapping[str, torch.nn.Module], device: str) -> int:
    """Return the bytes of tables that a split component's own code may copy to where others are (Wan's last one)."""
    return sum(
        allocated_bytes(each for name, each in every_tensor(modules[a.component]).items() if "." not in name)
        for a in plan.assignments
        if a.parts and device in a.execution_devices[1:]
    )


def is_parameter(tensor: torch.Tensor) -> bool:
    """Tell a parameter from a buffer."""
    return isinstance(tensor, torch.nn.Parameter)


def at_once_bytes(place: Place, tensors: Tensors) -> int:
    """Return the plan's ``peak_bytes`` of a place as an accelerator allocates them, with the buffers in no file."""
    whole = allocated_bytes(tensors.values())
    match place.residency:
        case Residency.PER_LEAF:
            layers = Counter(name.rpartition(".")[0] for name in tensors)
            own = layers.pop("", 0)
            there = (sum(layers[above] for above in layers if f"{layer}.".startswith(f"{above}.")) for layer in layers)
            together = own + max(there, default=0)  # tensors, each rounded up by 511 at most
            return min(whole, place.peak_bytes + 511 * together)
        case Residency.PER_GROUP:
            return min(whole, place.peak_bytes + whole - sum(distinct_sizes(tensors.values())))
        case _:
            return whole


def most_bytes(
    plan: Plan, modules: Mapping[str, torch.nn.Module], device: str, size: Callable[[Place, Tensors], int]
) -> int:
    """Return the most that weights take of an accelerator at once: what stays, and the largest of what takes turns."""
    stays, turns = 0, [0]
    for assignment, place, tensors in places(plan, modules):
        if place.execution_device != device:
            continue
        if place.residency is Residency.ALWAYS or assignment.component in ALONGSIDE:
            stays += size(place, tensors)
        else:
            turns.append(size(place, tensors))
    return stays + max(turns)


def check_bytes(plan: Plan, modules: Mapping[str, torch.nn.Module]) -> None:
    """Check the bytes of a plan: of each component those of its files, tied tensors once, and their sum per device.

    The files of diffusers and transformers hold the parameters and the buffers of ``state_dict``.
    """
    stored = {name: sum(distinct_sizes(module.state_dict().values())) for name, module in modules.items()}
    assert {assignment.component: assignment.nbytes for assignment in plan.assignments} == stored
    used = {device.id: device.used_bytes for device in accelerators(plan)}
    assert used == {device: most_bytes(plan, modules, device, lambda place, _: place.peak_bytes) for device in used}


def accelerators(plan: Plan) -> list[Any]:
    """Return a plan's use of each device that is not the host's."""
    return [device for device in plan.devices if device.id not in ("cpu", "disk")]


@contextmanager
def weight_peaks(ledger: Ledger, devices: Sequence[str]) -> Iterator[Mapping[str, int]]:
    """Give the most bytes of weights that were on each device at one time, of all that came since.

    ``Ledger.peak_bytes`` tells of all bytes together, and how many of those were weights at that moment.
    """
    peaks = Counter(live_bytes(ledger, devices, "weights"))
    record = ledger.record

    def watched(storage: torch.UntypedStorage, device: str, kind: Any = "activations") -> None:
        record(storage, device, kind)
        if kind == "weights":
            peaks[device] = max(peaks[device], ledger.live_bytes(device, kind="weights"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "record", watched)
        yield peaks


# Refusals


def refusals(overrides: Overrides, modules: Mapping[str, torch.nn.Module]) -> list[tuple[str, str]]:
    """Return the components that diffusers cannot bring as a placement asks, each with what is impossible."""
    device_map = overrides["device_map"]
    named = device_map if isinstance(device_map, dict) else {}
    everywhere = overrides.get("low_memory") == "group_offload"
    found = []
    for name, module in modules.items():
        entry = named.get(name)
        entry = entry if isinstance(entry, dict) else {"offload": "group" if everywhere and entry is None else "none"}
        if entry.get("offload") == "group":
            found += [(name, "in groups from disk")] if entry.get("storage") == "disk" else []
            found += [(name, what) for what in impossible(module, by_blocks="group_offload" in overrides)]
    return found


def impossible(module: torch.nn.Module, *, by_blocks: bool) -> Iterator[str]:
    """Yield how diffusers cannot offload a module in groups.

    Its class says so itself; or it is an autoencoder without a list of its blocks: what is in none of them is then
    brought by ``forward``, and pipelines call ``encode`` and ``decode``.
    """
    if not getattr(module, "_supports_group_offloading", True):
        yield "in groups"
    elif by_blocks and isinstance(module, AutoencoderMixin) and not hasattr(module, "_group_offload_block_modules"):
        yield "by blocks"


def outcome(refused: Sequence[tuple[str, str]], names: Collection[str]) -> str:
    """Return a cell of the table: ``refused: vae by blocks``, or ``equal`` when nothing is refused."""
    by_what: dict[str, list[str]] = {}
    for name, what in refused:
        by_what.setdefault(what, []).append(name)
    said = [f"{'all' if len(each) == len(names) else ' and '.join(each)} {what}" for what, each in by_what.items()]
    return f"refused: {', '.join(said)}" if said else "equal"


ADVICE = re.compile(r"write (\w+: (?:\w+|\{.*\}))(?: under device_map)?(?:, or .*)?")


def way_out(
    call: str, overrides: Overrides, refused: Sequence[tuple[str, str]], tiny: Tiny, ledger: Ledger
) -> Overrides:
    """Check that a placement is refused before anything is loaded, for these components, and return what is advised.

    What is advised is a component's entry, or another value for one of its keys.
    """
    asked = {**overrides, **class_override(call)}
    with pytest.raises(SpecError) as planning:
        plan_from_yaml(tiny.spec(call), asked)
    with pytest.raises(SpecError) as loading:
        load_from_yaml(tiny.spec(call), asked)
    assert str(loading.value) == str(planning.value)
    assert ledger.peak_bytes("cpu") == 0
    assert len(loading.value.problems) == len(refused)
    device_map = overrides["device_map"]
    device_map = dict(device_map) if isinstance(device_map, dict) else {"default": device_map}
    advised = set()
    for problem in loading.value.problems:
        advice = ADVICE.fullmatch(problem.fix)
        assert advice is not None
        written = yaml.safe_load(advice[1])
        ((key, value),) = written.items()
        entries = value if key == "device_map" else written if isinstance(value, dict) else {}
        name = next((name for name in entries if name != "default"), str(problem.path[1:2][0]) if not entries else "")
        device_map |= entries or {name: {**device_map[name], key: value}}
        advised.add(name)
    assert advised == {name for name, _ in refused}
    return {**overrides, "device_map": device_map}


# Cases

Tell = Callable[[str, str, str], None]


@pytest.fixture
def tell(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Tell:
    """Give a function to call with what came out of a case, which is held against the table or becomes a new one."""

    def told(placement: str, call: str, cell: str) -> None:
        for name, value in zip(placement_table.PROPERTIES, (placement, call, cell), strict=True):
            record_property(name, value)
        if not request.config.pluginmanager.has_plugin(placement_table.__name__):
            documented = placement_table.read(placement_table.FILE.read_text(encoding="utf-8"))
            assert documented.get((placement, call)) == cell, "make placements writes docs/placements.md anew"

    return told


def check(call: str, placement: str, tiny: Tiny, make_machine: MakeMachine, tell: Tell) -> None:
    """Check one case of the matrix."""
    parts, modules = parts_of(tiny, call), tiny.modules(call)
    overrides = PLACEMENTS[placement](parts)
    expected = tiny.pictures(call, staying=staying_on_the_cpu(overrides, parts))
    devices = [f"cuda:{index}" for index in range(DEVICES.get(placement, 2))]
    machine = make_machine(count=len(devices))
    ledger = machine.ledger
    refused = refusals(overrides, modules)
    if refused:
        overrides = way_out(call, overrides, refused, tiny, ledger)
    pipe: Any = load_from_yaml(tiny.spec(call), {**overrides, **class_override(call)})
    plan = report(pipe).plan
    check_bytes(plan, modules)
    assert live_bytes(ledger, devices) == {device: resting_bytes(plan, modules, device) for device in devices}
    resting = live_bytes(ledger, devices, "weights")

    for seed, picture in zip(SEEDS, expected, strict=True):
        with weight_peaks(ledger, devices) as peaks:
            assert np.array_equal(draw(pipe, call, seed), picture)
        assert live_bytes(ledger, devices, "weights") == resting
        for device in devices:
            most = most_bytes(plan, modules, device, at_once_bytes) + left_bytes(plan, modules, device)
            assert peaks[device] <= most + copied_bytes(plan, modules, device)
            assert (peaks[device] > 0) == (most > 0)

    on_host = {"disk": "cpu"}  # mapped from their files
    resting_places = {path: on_host.get(device, device) for path, device in pipe.hf_device_map.items()}
    assert resting_devices(pipe, resting_places) == resting_places
    assert {path.partition(".")[0] for path in resting_places} == parts.sizes.keys()
    assert "tight" not in placement or "cpu" in resting_places.values()
    pipe.reset_device_map()
    assert set(resting_devices(pipe, parts.names).values()) == {"cpu"}
    assert not hooks_of_ours(pipe)
    del pipe
    gc.collect()
    assert live_bytes(ledger, devices) == dict.fromkeys(devices, 0)
    tell(placement, call, outcome(refused, parts.names))


def live_bytes(ledger: Ledger, devices: Sequence[str], kind: Literal["weights"] | None = None) -> dict[str, int]:
    """Return what is now on each device, of weights alone or in all."""
    return {device: ledger.live_bytes(device, kind=kind) for device in devices}


@pytest.mark.parametrize(("call", "placement"), cases(KINDS))
def test_every_kind_in_every_placement(
    call: str, placement: str, tiny: Tiny, virtual_machine: MakeMachine, tell: Tell
) -> None:
    """Pictures from a prompt: two generations equal the plain run, bytes are as planned, and nothing is left behind."""
    check(call, placement, tiny, virtual_machine, tell)


@pytest.mark.parametrize(("call", "placement"), cases(tuple(CLASSES)))
def test_pictures_from_a_picture(
    call: str, placement: str, tiny: Tiny, virtual_machine: MakeMachine, tell: Tell
) -> None:
    """Image-to-image and inpainting, which encode a picture first: as for pictures from a prompt."""
    check(call, placement, tiny, virtual_machine, tell)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "component", "by_blocks"), [("ltx", "vae", True), ("kandinsky22", "movq", False)])
def test_what_is_refused_fails_in_diffusers_itself(
    call: str, component: str, by_blocks: bool, tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """A component that the matrix takes to be impossible in groups cannot be offloaded so without dmconfig either."""
    virtual_machine()
    pipe = tiny.plain(call)
    modules = [(name, part) for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)]
    for name, part in modules:
        part.to("cpu" if name == component else "cuda:0")

    def offload_and_draw() -> None:
        level = "block_level" if by_blocks else "leaf_level"
        onto = torch.device("cuda:0")
        getattr(pipe, component).enable_group_offload(onto, offload_type=level, num_blocks_per_group=1)
        draw(pipe, call, 0)

    with pytest.raises((ValueError, RuntimeError), match=r"does not support group offloading|same device"):
        offload_and_draw()


@pytest.mark.slow
def test_groups_come_home_copied_in_diffusers_itself(tiny: Tiny, virtual_machine: MakeMachine) -> None:
    """Weights that were mapped from their file are in memory of their own after group offloading: no rest on disk."""
    virtual_machine()
    text_encoder = tiny.plain("sd").text_encoder
    mapped = {parameter.data_ptr() for parameter in text_encoder.parameters()}
    apply_group_offloading(text_encoder, torch.device("cuda:0"), offload_type="leaf_level")

    with torch.no_grad():
        text_encoder(torch.ones(1, 4, dtype=torch.long))

    assert {str(parameter.device) for parameter in text_encoder.parameters()} == {"cpu"}
    assert mapped.isdisjoint(parameter.data_ptr() for parameter in text_encoder.parameters())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped from a file")
@pytest.mark.parametrize("how", ["model", "sequential"])
def test_weights_on_disk_are_there_after_a_call(how: str, tiny: Tiny, virtual_machine: MakeMachine) -> None:
    """What rests in files takes no host memory after a call either: it is mapped, as it was after loading."""
    virtual_machine()
    pipe = load_from_yaml(tiny.spec("sd"), all_brought(parts_of(tiny, "sd"), how, "disk"))

    draw(pipe, "sd", 0)

    assert not report(pipe).problems


def test_calls_are_those_of_kinds_and_their_variants() -> None:
    """No call of the tiny pipelines is left out of the matrix."""
    assert set(CALLS) == {*KINDS, *CLASSES}


def test_the_table_in_the_docs_is_of_this_matrix() -> None:
    """Its rows and columns are those of the matrix, with a good outcome for each case and a dash for the others."""
    table = placement_table.read(placement_table.FILE.read_text(encoding="utf-8"))

    assert [*table] == [(placement, call) for placement in PLACEMENTS for call in COLUMNS]
    good = {cell for cell, outcome in table.items() if outcome == "equal" or outcome.startswith("refused: ")}
    assert good == set(CELLS)
    assert {outcome for cell, outcome in table.items() if cell not in good} == {"-"}
