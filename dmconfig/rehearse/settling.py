"""Planning with rehearsed reserves: plan and rehearsal in turn until they agree; and the largest setting that fits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from dmconfig.errors import PlanError
from dmconfig.inventory import Inventory
from dmconfig.plan import Plan
from dmconfig.rehearse.inputs import Settings
from dmconfig.rehearse.model import Rehearsal
from dmconfig.rehearse.rehearsal import Script, rehearse
from dmconfig.spec import DEFAULT, Spec

Planner = Callable[[Spec, Inventory], Plan]
"""Makes the plan of a spec on a machine. Raises: PlanError: nothing fits."""
MAX_ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A plan and its rehearsal that agree, or the last two where they never did; ``reserve`` is in bytes."""

    plan: Plan
    rehearsal: Rehearsal
    reserve: Mapping[str, int]
    rounds: int
    agrees: bool


def settle(script: Script, planner: Planner, inventory: Inventory, settings: Settings) -> Settled:
    """Return the plan whose reserves are what its own rehearsal says that each phase needs.

    A first plan keeps nothing free; every round keeps what the last rehearsal took beside weights, per component and
    at least what any round has asked for, so that the search ends.

    Raises: PlanError: nothing fits with what the phases need. BuildError, DispatchError: as ``rehearse``.
    """
    reserve: Mapping[str, int] = {DEFAULT: 0}
    settled = _round(script, planner, inventory, settings, reserve)
    while not settled.agrees and settled.rounds < MAX_ROUNDS and settled.reserve != reserve:
        reserve = settled.reserve
        again = _round(script, planner, inventory, settings, reserve)
        settled = replace(again, rounds=settled.rounds + 1)
    return settled


def _round(
    script: Script, planner: Planner, inventory: Inventory, settings: Settings, reserve: Mapping[str, int]
) -> Settled:
    """One plan and its rehearsal; ``reserve`` of the result is what the next plan has to keep."""
    plan = planner(script.spec.model_copy(update={"reserve": reserve}), inventory)
    rehearsal = rehearse(script, plan, inventory, settings, is_enforced=False)
    needed = reserves_of(rehearsal)
    wider = {name: max(needed.get(name, 0), reserve.get(name, 0)) for name in {**reserve, **needed}}
    return Settled(plan=plan, rehearsal=rehearsal, reserve=wider, rounds=1, agrees=wider == reserve and rehearsal.fits)


def reserves_of(rehearsal: Rehearsal) -> dict[str, int]:
    """Return what each component needs of a device while it runs, beside all weights: activations and margins.

    Under ``default``: what a device needs in which nothing of it runs, for what stays there between the phases.
    """
    margins = max((device.margin_bytes for device in rehearsal.devices), default=0)
    reserves: dict[str, int] = {DEFAULT: margins}
    components = {assignment.component for assignment in rehearsal.plan.assignments}
    for device in rehearsal.devices:
        for phase in device.phases:
            name = phase.phase.partition(".")[0]
            key = name if name in components else DEFAULT
            reserves[key] = max(reserves.get(key, 0), phase.activations_bytes + margins)
    return reserves


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One setting of a sweep on one machine: whether it runs there, and the device that comes closest to full."""

    machine: str
    size: int
    batch: int
    fits: bool
    need_bytes: int
    capacity_bytes: int
    why_not: str


def sweep(
    script: Script, planner: Planner, machines: Iterable[Inventory], sizes: Iterable[int], batches: Iterable[int]
) -> Iterator[Tried]:
    """Yield what becomes of every square size and batch on every machine, each planned and rehearsed for itself."""
    for inventory, size, batch in itertools.product(machines, sizes, batches):
        settings = Settings(height=size, width=size, batch=batch)
        try:
            settled = settle(script, planner, inventory, settings)
        except PlanError as error:
            yield Tried(
                machine=inventory.name,
                size=size,
                batch=batch,
                fits=False,
                need_bytes=0,
                capacity_bytes=max((device.total_bytes for device in inventory.accelerators), default=0),
                why_not=error.problems[0].what,
            )
            continue
        fullest = max(settled.rehearsal.devices, key=lambda device: device.need_bytes / device.capacity_bytes)
        failure = settled.rehearsal.failure
        yield Tried(
            machine=inventory.name,
            size=size,
            batch=batch,
            fits=settled.rehearsal.fits,
            need_bytes=fullest.need_bytes,
            capacity_bytes=fullest.capacity_bytes,
            why_not=failure.what if failure else settled.rehearsal.odd_output,
        )
