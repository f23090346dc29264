"""Running a pipeline's own code on virtual accelerators, without weights, and noting what it takes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dmconfig.assembly import Assembly
from dmconfig.devices import CPU
from dmconfig.dispatch import dispatch
from dmconfig.inputs import arguments_at, call_with_files, opened
from dmconfig.inventory import Device, Inventory
from dmconfig.plan import Plan
from dmconfig.rehearse.inputs import Settings, arguments, steps_asked, steps_rehearsed
from dmconfig.rehearse.margins import margins_of
from dmconfig.rehearse.model import Crossing, DevicePeak, Failure, FailureKind, PhasePeak, Rehearsal, devices_named_in
from dmconfig.rehearse.skeleton import build_skeleton
from dmconfig.resolve import Resolved
from dmconfig.spec import Spec
from dmconfig.virtual import DeviceMismatchError, UnknownValueError, VirtualMachine, VirtualOutOfMemoryError
from dmconfig.virtual.ledger import Ledger, Peak, Stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What is rehearsed: a checked spec, and what its pipeline is made of."""

    resolved: Resolved
    spec: Spec
    assembly: Assembly


_READ_VALUES = ("safety_checker",)
"""Components that look at values to decide something: they are told zeros, for which they flag nothing."""


def rehearse(
    script: Script, plan: Plan, inventory: Inventory, settings: Settings, *, is_enforced: bool = True
) -> Rehearsal:
    """Return what a generation takes on a machine, placed by a plan.

    Nothing is read but configs, nothing computed but shapes. Must run where no real CUDA device is visible. With
    ``is_enforced`` a device that is full fails as a real one does; without, it is noted how much it would have taken.

    Raises: BuildError: a component cannot be built from its config. DispatchError: one cannot be placed.
    """
    torch.set_num_threads(1)
    resolved, spec, assembly = script.resolved, script.spec, script.assembly
    dtypes = {assignment.component: assignment.dtype for assignment in plan.assignments}
    with _quiet():
        pipe, stand_ins = build_skeleton(resolved, assembly, dtypes)
    asked = steps_asked(assembly.facts, settings, spec.call)
    steps = steps_rehearsed(getattr(pipe, "scheduler", None), asked, settings)
    capacities = [device.total_bytes for device in inventory.accelerators]
    machine = VirtualMachine(capacities, values=False, zero_phases=_READ_VALUES, enforce_capacity=is_enforced)
    failure: Failure | None = None
    output: tuple[int, ...] = ()
    given: dict[str, Any] = {}
    with machine, _quiet(), torch.no_grad():
        phase = "placing"
        try:
            for part in pipe.components.values():
                if isinstance(part, torch.nn.Module):
                    machine.adopt(part)
            dispatch(
                pipe,
                plan,
                in_turn=assembly.in_turn,
                group_options=spec.group_offload.model_dump(),
                is_mapped=False,
            )
            machine.ledger.reset()
            defaults = opened(call_with_files(resolved, arguments_at(("call",), spec.call)))
            given = arguments(pipe, assembly.facts, settings, defaults, steps)
            with machine.track(pipe.components):
                try:
                    output = _shape(pipe(**given))
                finally:
                    phase = machine.ledger.current_phase
        except (VirtualOutOfMemoryError, DeviceMismatchError, UnknownValueError) as error:
            failure = _failure(error, phase, machine.ledger.timeline)
        devices = tuple(_device_peak(machine, device) for device in inventory.accelerators)
        crossings = tuple(_crossings(machine, inventory, plan, asked / steps))
    return Rehearsal(
        plan=plan,
        steps=(steps, asked),
        arguments={name: value for name, value in given.items() if isinstance(value, (str, int, float))},
        devices=devices,
        crossings=crossings,
        output=output,
        odd_output="" if failure else _odd(output, given),
        stand_ins=stand_ins,
        guesses=dict(machine.guesses),
        failure=failure,
    )


_KINDS: Mapping[type[Exception], FailureKind] = {
    VirtualOutOfMemoryError: "out of memory",
    DeviceMismatchError: "wrong device",
    UnknownValueError: "unknown value",
}


_Refusal = VirtualOutOfMemoryError | DeviceMismatchError | UnknownValueError


def _failure(error: _Refusal, phase: str, timeline: Sequence[Stretch]) -> Failure:
    """What happened, in the last run of the component it happened in: its phase has ended when the error arrives."""
    what = str(error).splitlines()[0].partition(" (op ")[0]
    component = (error.module or "").partition(".")[0]
    ended = (stretch.phase for stretch in reversed(timeline) if stretch.phase.partition(".")[0] == component)
    return Failure(
        kind=_KINDS[type(error)],
        phase=next(ended, phase),
        what=what,
        module=error.module or "",
        operation=error.operation or "",
        devices=devices_named_in(what),
    )


def _device_peak(machine: VirtualMachine, card: Device) -> DevicePeak:
    ledger, device = machine.ledger, card.id
    peaks = tuple(
        PhasePeak(
            phase=phase,
            weights_bytes=ledger.peak_bytes(device, phase=phase, kind="weights"),
            activations_bytes=ledger.peak_bytes(device, phase=phase, kind="activations"),
        )
        for phase in ledger.phases
    )
    shown = tuple(peak for peak in peaks if peak.nbytes) or peaks[:1]
    shown = shown or (PhasePeak(phase="", weights_bytes=0, activations_bytes=0),)
    highest = max(peak.nbytes for peak in shown)
    reserved = max(0, ledger.peak_reserved_bytes(device) - highest)
    rounding = max(0, ledger.peak_allocated_bytes(device) - highest)
    return DevicePeak(
        id=device,
        capacity_bytes=card.total_bytes,
        phases=shown,
        margins=margins_of(shown, reserved, rounding_bytes=rounding, card=card.description),
        curve=tuple(_curve(ledger, device)),
    )


def _curve(ledger: Ledger, device: str) -> Iterator[PhasePeak]:
    for stretch in ledger.timeline:
        peak = stretch.peaks.get(device, Peak())
        activations_bytes = peak.total_bytes - peak.weights_bytes
        yield PhasePeak(phase=stretch.phase, weights_bytes=peak.weights_bytes, activations_bytes=activations_bytes)


def _crossings(machine: VirtualMachine, inventory: Inventory, plan: Plan, scale: float) -> Iterator[Crossing]:
    """What moved, phase by phase; what a component that runs once per step moved is scaled to all steps."""
    per_step = {a.component for a in plan.assignments if a.calls > 2}  # text encoders run once or twice
    for move, moved in machine.ledger.moves.items():
        times = scale if move.phase.partition(".")[0] in per_step else 1.0
        ends = {move.source, move.destination}
        seconds = 0.0
        if len(ends) == 2 and ends != {CPU, "disk"}:
            seconds = moved.bytes * times / inventory.bandwidth(move.source, move.destination)
        yield Crossing(
            phase=move.phase,
            source=move.source,
            destination=move.destination,
            kind=move.kind,
            nbytes=moved.bytes * times,
            count=moved.count * times,
            seconds=seconds,
        )


def _shape(result: Any) -> tuple[int, ...]:
    """The shape of what a pipeline returned: pictures, frames or embeddings."""
    found = result[0] if isinstance(result, tuple) else next(iter(result.values()))
    return _shape_of(found)


def _shape_of(value: Any) -> tuple[int, ...]:
    if hasattr(value, "shape"):
        return tuple(int(size) for size in value.shape)
    if isinstance(value, (list, tuple)):
        return (len(value), *_shape_of(value[0])) if value else (0,)
    width, height = value.size  # a picture
    return (height, width)


def _odd(output: tuple[int, ...], given: Mapping[str, Any]) -> str:
    """Where what came out is not what was asked for."""
    for name, what in (("num_frames", "frames"), ("height", "rows"), ("width", "columns")):
        asked = given.get(name)
        if isinstance(asked, int) and asked not in output:
            return f"{asked} {what} were asked for, and what came out is {' x '.join(map(str, output))}"
    return ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries' warnings off the screen: they speak of a run that does not take place."""
    import diffusers
    import transformers

    levels = diffusers.logging.get_verbosity(), transformers.logging.get_verbosity()
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        diffusers.logging.set_verbosity(levels[0])
        transformers.logging.set_verbosity(levels[1])
