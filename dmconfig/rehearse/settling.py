"""Planning with rehearsed reserves: plan and rehearsal in turn until they agree. Knows no torch: see ``remembered``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dmconfig.errors import DMConfigError, PlanError
from dmconfig.inventory import Inventory
from dmconfig.plan import DeviceUse, Plan
from dmconfig.rehearse.remembered import Taken, places_of, taken_by
from dmconfig.rehearse.script import Script, Settings
from dmconfig.spec import DEFAULT, RehearsedReserve, Spec
from dmconfig.units import format_bytes

Planner = Callable[[Spec, Inventory], Plan]
"""Makes the plan of a spec on a machine. Raises: PlanError: nothing fits."""
MAX_ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A plan and what it takes; ``reserve`` is what the plan keeps free, and ``needed`` what the next one has to keep.

    Both are in bytes by component, and ``needed`` is at least ``reserve``. ``rounds`` were gone through.
    """

    plan: Plan
    taken: Taken
    reserve: Mapping[str, int]
    needed: Mapping[str, int]
    rounds: int

    @property
    def wrong(self) -> str:
        """What is in the way: the run itself, a device that is too small, or that another plan would follow."""
        if self.taken.wrong:
            return self.taken.wrong
        for device in self.plan.devices:
            need = self.taken.need_bytes.get(device.id, 0)
            if need > device.total_bytes:
                has = format_bytes(device.total_bytes)
                return f"{device.id} needs {format_bytes(need)} in {self.taken.phases[device.id]} and has {has}"
        if self.needed != self.reserve:
            return f"after {self.rounds} rounds, each plan asks for another reserve"
        return ""

    @property
    def agrees(self) -> bool:
        """Whether it runs, everything fits, and the plan keeps what its own rehearsal says that it needs."""
        return not self.wrong

    @property
    def fullest(self) -> DeviceUse:
        """The accelerator that comes closest to full."""
        need = self.taken.need_bytes
        rehearsed = (device for device in self.plan.devices if device.id in need)
        return max(rehearsed, key=lambda device: need[device.id] / device.total_bytes)


def settle(script: Script, planner: Planner, inventory: Inventory, settings: Settings) -> Settled:
    """Return the plan whose reserves are what its own rehearsal says that each phase needs, and what it takes.

    A first plan keeps nothing free; every round keeps what the last plan took beside the weights that it counts, per
    component, and at least what any round has asked for, so that the search ends. What a placement takes does not
    depend on the reserve, so each is rehearsed once.

    Raises: PlanError: nothing fits with what the phases need. SpecError, BuildError, DispatchError, RunError: as
        ``taken_by``.
    """
    seen: dict[tuple[tuple[str, ...], ...], Taken] = {}

    def settled(reserve: Mapping[str, int], rounds: int) -> Settled:
        plan = planner(script.spec.model_copy(update={"reserve": RehearsedReserve(reserve)}), inventory)
        places = places_of(plan)
        taken = seen[places] = seen.get(places) or taken_by(script, plan, inventory, settings)
        needed = {key: max(taken.reserve.get(key, 0), reserve.get(key, 0)) for key in {**reserve, **taken.reserve}}
        return Settled(plan=plan, taken=taken, reserve=reserve, needed=needed, rounds=rounds)

    last = settled({DEFAULT: 0}, 1)
    while last.rounds < MAX_ROUNDS and last.needed != last.reserve and not last.taken.wrong:
        try:
            last = settled(last.needed, last.rounds + 1)
        except PlanError as error:
            raise PlanError([replace(problem, why=_beside(last.needed)) for problem in error.problems]) from error
    return last


def _beside(reserve: Mapping[str, int]) -> str:
    return f"beside weights, a rehearsal took {reserve_words(reserve)}"


def reserve_words(reserve: Mapping[str, int]) -> str:
    """Return a reserve in words: by component, the most first, and what anything else takes."""
    named = sorted(((nbytes, name) for name, nbytes in reserve.items() if name != DEFAULT), reverse=True)
    words = [f"{name} {format_bytes(nbytes)}" for nbytes, name in named]
    return ", ".join([*words, f"otherwise {format_bytes(reserve.get(DEFAULT, 0))}"])


def told(error: DMConfigError) -> str:
    """Return an error in a sentence: its first problem, and why that is one."""
    problem = error.problems[0]
    return f"{problem.what}; {problem.why}" if problem.why else problem.what
