"""What a placement takes beside the weights that its plan counts: what the next plan has to know of a rehearsal."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dmconfig.inventory import Inventory
from dmconfig.plan import Assignment, Part, Plan, Residency
from dmconfig.rehearse.margins import workspace_bytes
from dmconfig.rehearse.model import DevicePeak, Rehearsal
from dmconfig.rehearse.rehearsal import rehearse
from dmconfig.rehearse.remembered import Taken
from dmconfig.rehearse.report import verdict
from dmconfig.rehearse.script import Script, Settings
from dmconfig.spec import DEFAULT


def rehearse_taken(script: Script, plan: Plan, inventory: Inventory, settings: Settings) -> Taken:
    """Return what a placement takes, rehearsed now, with no device ever full.

    Raises: SpecError, BuildError, DispatchError: as ``rehearse``.
    """
    return taken(rehearse(script, plan, inventory, settings, is_enforced=False), script.assembly.in_turn)


def taken(rehearsal: Rehearsal, in_turn: Collection[str]) -> Taken:
    """Return what a rehearsal took.

    Args:
        rehearsal: with its plan.
        in_turn: the components that run one after the other; a plan counts others, once brought, as staying.
    """
    runs = rehearsal.failure is None and not rehearsal.odd_output
    return Taken(
        reserve=reserves_of(rehearsal, in_turn),
        need_bytes={device.id: device.need_bytes for device in rehearsal.devices},
        phases={device.id: device.peak.phase for device in rehearsal.devices},
        wrong="" if runs else verdict(rehearsal),
        output=rehearsal.output,
    )


def reserves_of(rehearsal: Rehearsal, in_turn: Collection[str]) -> dict[str, int]:
    """Return what each component needs of a device while it runs there, beside the weights that the plan counts.

    That is activations and margins, and weights of others that the plan takes to have gone home by then. Under
    ``default``: what any device needs that runs something, for what stays there between the phases.
    """
    reserves: dict[str, int] = {DEFAULT: 0}
    for device in rehearsal.devices:
        for key, nbytes in _needs(device, rehearsal.plan, in_turn):
            reserves[key] = max(reserves.get(key, 0), nbytes)
    return {key: max(nbytes, reserves[DEFAULT]) for key, nbytes in reserves.items()}


def _needs(device: DevicePeak, plan: Plan, in_turn: Collection[str]) -> Iterator[tuple[str, int]]:
    """What each phase needs of one device beside the weights that the plan counts then, by component."""
    always = sum(margin.nbytes for margin in device.margins if margin.name != "workspace")
    entries = [*_entries_on(device.id, plan)]
    held = sum(entry.peak_bytes for name, entry in entries if _stays(name, entry, in_turn))
    brought = {name: entry.peak_bytes for name, entry in entries if not _stays(name, entry, in_turn)}
    running = {name for name, _entry in entries}
    for phase in device.phases:
        name = phase.phase.partition(".")[0]
        counted = held + (brought.get(name, 0) if name in running else max(brought.values(), default=0))
        beyond = max(0, phase.weights_bytes - counted)
        needed = always + phase.activations_bytes + beyond + workspace_bytes(phase, device.description)
        yield (name if name in running else DEFAULT), needed


def _entries_on(device: str, plan: Plan) -> Iterator[tuple[str, Assignment | Part]]:
    """What runs on a device, by component: whole components, and the parts of those that are split."""
    for assignment in plan.assignments:
        for entry in assignment.parts or (assignment,):
            if entry.execution_device == device:
                yield assignment.component, entry


def _stays(component: str, entry: Assignment | Part, in_turn: Collection[str]) -> bool:
    return entry.residency is Residency.ALWAYS or component not in in_turn
