"""What each device holds, block by block and phase by phase: the figures of a picture, without any drawing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dmconfig.plan.model import Assignment, DeviceUse, Part, Plan, Residency
from dmconfig.render.words import BROUGHT, runs_of_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Bytes of one component on one device. ``phase`` is when they are there, None for all the time.

    ``brought`` says how they come, and is empty for those that rest there. ``parts`` are name and bytes of each part
    that a split component has there.
    """

    component: str
    nbytes: int
    phase: int | None = None
    brought: str = ""
    parts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What one device holds: blocks that are always there, then those of single phases; and the phases it runs."""

    device: DeviceUse
    held: tuple[Block, ...]
    visiting: tuple[Block, ...]
    runs: tuple[int, ...]

    @property
    def held_bytes(self) -> int:
        """The bytes that are always there."""
        return sum(block.nbytes for block in self.held)


def phases_of(plan: Plan, in_turn: Sequence[str]) -> tuple[str, ...]:
    """Return the components that run one after the other, in order; each is a phase of a generation."""
    placed = {assignment.component for assignment in plan.assignments}
    return tuple(name for name in in_turn if name in placed)


def stacks_of(plan: Plan, in_turn: Sequence[str]) -> tuple[Stack, ...]:
    """Return what every device holds, in the plan's order of devices and components."""
    phases = phases_of(plan, in_turn)
    return tuple(_stack(device, plan, phases) for device in plan.devices)


def _stack(device: DeviceUse, plan: Plan, phases: Sequence[str]) -> Stack:
    resting = [block for each in plan.assignments for block in _resting(each, device.id)]
    coming = [block for each in plan.assignments for block in _coming(each, device.id, phases)]
    return Stack(
        device=device,
        held=(*resting, *(block for block in coming if block.phase is None)),
        visiting=tuple(block for block in coming if block.phase is not None),
        runs=tuple(
            phases.index(each.component)
            for each in plan.assignments
            if device.id in each.execution_devices and each.component in phases
        ),
    )


def _entries(assignment: Assignment) -> tuple[Assignment | Part, ...]:
    return assignment.parts or (assignment,)


def _resting(assignment: Assignment, device: str) -> Iterator[Block]:
    here = [entry for entry in _entries(assignment) if entry.storage_device == device]
    if nbytes := sum(entry.nbytes for entry in here):
        runs = runs_of_parts(entry for entry in here if isinstance(entry, Part) and entry.nbytes)
        parts = tuple((name, sum(part.nbytes for part in run)) for name, run in runs)
        yield Block(component=assignment.component, nbytes=nbytes, parts=parts)


def _coming(assignment: Assignment, device: str, phases: Sequence[str]) -> Iterator[Block]:
    """What is brought of a component: its parts come one at a time, unless it stays until the call ends."""
    brought = [
        entry
        for entry in _entries(assignment)
        if entry.execution_device == device and entry.residency is not Residency.ALWAYS
    ]
    if not brought:
        return
    peaks = [entry.peak_bytes for entry in brought]
    in_turn = assignment.component in phases
    storages = ", ".join(dict.fromkeys(entry.storage_device for entry in brought))
    yield Block(
        component=assignment.component,
        nbytes=max(peaks) if in_turn else sum(peaks),
        phase=phases.index(assignment.component) if in_turn else None,
        brought=f"{BROUGHT[brought[0].residency]} from {storages}",
    )
