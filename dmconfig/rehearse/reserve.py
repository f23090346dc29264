"""The reserve of a file that leaves it to a rehearsal: remembered, or rehearsed now, and what a plan says of it."""

from __future__ import annotations

from dmconfig.errors import Code, MachineError, PlanError, Problem
from dmconfig.inventory import Inventory
from dmconfig.rehearse.script import Script, Settings
from dmconfig.rehearse.settling import Planner, Settled, reserve_words, settle
from dmconfig.resolve import Resolved
from dmconfig.spec import DEFAULT, RehearsedReserve

_PATH = ("reserve",)


def reserve_for(
    script: Script, planner: Planner, inventory: Inventory, settings: Settings
) -> tuple[RehearsedReserve, str]:
    """Return the reserve that plan and rehearsal of a checked spec agree on, and a sentence on where it came from.

    A machine without accelerators keeps nothing free.

    Raises: PlanError: no plan fits, or none agrees with its rehearsal. MachineError: the accelerators are not CUDA's.
        SpecError, BuildError, DispatchError, RunError: as ``settle``.
    """
    if not inventory.accelerators:
        return RehearsedReserve({DEFAULT: 0}), "there is no accelerator, so no reserve was rehearsed"
    if wrong := unfit(inventory):
        fix = "write the reserve as a size"
        raise MachineError([script.resolved.problem(Code.BAD_MACHINE, _PATH, wrong, fix=fix)])
    settled = settle(script, planner, inventory, settings)
    if not settled.agrees:
        raise PlanError([_disagreement(script.resolved, settled)])
    return RehearsedReserve(settled.reserve), _origin(settled)


def unfit(inventory: Inventory) -> str:
    """Return why a machine's accelerators cannot be rehearsed; nothing where they can."""
    others = [device.id for device in inventory.accelerators if not device.id.startswith("cuda:")]
    return f"{inventory.name} has {', '.join(others)}; what is rehearsed are CUDA devices" if others else ""


def rehearsable(inventory: Inventory, origin: str = "--gpus") -> Inventory:
    """Return a machine that has accelerators of the kind that virtual ones stand for.

    Raises: MachineError: it has others, or none.
    """
    if wrong := unfit(inventory):
        fix = "name CUDA devices of the same sizes with --gpus"
        raise MachineError([Problem(code=Code.BAD_MACHINE, what=wrong, fix=fix, origin=origin)])
    if not inventory.accelerators:
        what, fix = f"{inventory.name} has no accelerator to rehearse on", "name a machine that has: --gpus 24GiB"
        raise MachineError([Problem(code=Code.BAD_MACHINE, what=what, fix=fix, origin=origin)])
    return inventory


def _disagreement(resolved: Resolved, settled: Settled) -> Problem:
    what = f"no plan agrees with its own rehearsal: {settled.wrong}"
    why = "with the reserve that the rehearsal of the last plan asks for, the plan is another one, or does not fit"
    fix = "write the reserve as a size, or see what dmconfig rehearse says"
    return resolved.problem(Code.REHEARSAL_DISAGREES, _PATH, what, why=why, fix=fix)


def _origin(settled: Settled) -> str:
    shape = " x ".join(map(str, settled.taken.output))
    words = reserve_words(settled.reserve)
    return f"the reserve is what a rehearsal of this plan took beside weights, for {shape}: {words}"
