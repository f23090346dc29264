"""The search behind ``balanced``: an exact choice of one place per component, by branch and bound.

A pipeline has at most a dozen components, so the best choice can be found rather than approximated, and the answer
depends on the input alone. A limit on the steps keeps contrived cases short; ``Found.proven`` says when it was met.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dmconfig.devices import CPU, DISK, is_accelerator
from dmconfig.plan.model import Residency
from dmconfig.plan.requests import Place, Request

Choice = Mapping[str, Place]
_Cost = tuple[int, int, float, float]
_ROUNDING = 1e-12

MAX_STEPS = 5_000
"""Placements tried before the search settles for the best it has: a fraction of a second."""
MAX_STEPS_WITHOUT = 4 * MAX_STEPS
"""The same while it has found none that fits: a tight packing is worth a longer look than a more even one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A component's weights: all of them, what is on the execution device per leaf or group, and when they leave.

    ``stays`` is True for a component outside the pipeline's offload order (a controlnet): brought whole, it stays
    until the call ends, because it runs within another component's phase.
    """

    nbytes: int
    largest_leaf_bytes: int
    group_bytes: int
    stays: bool = False

    def peak_bytes(self, residency: Residency) -> int:
        """Return what of it is on the execution device at once."""
        match residency:
            case Residency.PER_LEAF:
                return self.largest_leaf_bytes
            case Residency.PER_GROUP:
                return self.group_bytes
            case _:
                return self.nbytes


@dataclass(frozen=True, slots=True)
class Use:
    """What one device holds: bytes that are always there, and the largest of those that come and go one at a time."""

    held: int = 0
    brought: int = 0

    @property
    def peak(self) -> int:
        """The most that is there at one time."""
        return self.held + self.brought


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Budget per device in bytes, and the bytes kept free on an accelerator that runs something."""

    budgets: Mapping[str, int]
    reserve: int

    def offer(self, device: str) -> int:
        """Return the bytes that weights may take of a device."""
        return self.budgets[device] - (self.reserve if is_accelerator(device) else 0)

    def holds(self, device: str, use: Use) -> bool:
        """Tell whether a device has room for this use; an unused device always has."""
        return use.peak == 0 or use.peak <= self.offer(device)


Uses = Mapping[str, Use]


def uses_of(choice: Choice, loads: Mapping[str, Load], devices: Iterable[str]) -> Uses:
    """Return what each device holds under a choice."""
    uses: Uses = {device: Use() for device in devices}
    for name, place in choice.items():
        uses = _with(uses, place, loads[name])
    return uses


@dataclass(frozen=True, slots=True)
class Found:
    """A choice of a place per component; ``proven`` is False when the search ended before it had seen everything."""

    choice: Choice
    proven: bool


def best_choice(requests: Mapping[str, Request], loads: Mapping[str, Load], limits: Limits) -> Found | None:
    """Return the best choice of a place per component within the limits, or None when none was found.

    Best: the fewest bytes that do not stay on an accelerator; then the fewest on disk; then the lowest share of its
    budget on the fullest accelerator; then the least sum of squared shares. The order of the input does not matter,
    and it is not changed. Up to ``MAX_STEPS`` placements are tried, which is enough to prove the answer for every
    pipeline of the catalogue on 8 unequal accelerators; after that the best found is returned. While none is found,
    ``MAX_STEPS_WITHOUT`` are tried, so a very tight packing of many components on many accelerators may be missed.
    """
    order = sorted(requests, key=lambda name: (len(requests[name].places) > 1, -loads[name].nbytes, name))
    search = _Search(requests, loads, limits)
    search.descend(order, {}, {device: Use() for device in limits.budgets}, 0)
    return None if search.best is None else Found(search.best, proven=search.steps < MAX_STEPS)


class _Search:
    """Depth first, largest component first, cheapest place first; a branch that cannot beat the best is left."""

    def __init__(self, requests: Mapping[str, Request], loads: Mapping[str, Load], limits: Limits) -> None:
        self.requests, self.loads, self.limits = requests, loads, limits
        self.best: Choice | None = None
        self.steps = 0
        self._best_cost: _Cost | None = None
        budgets = [budget for device, budget in limits.budgets.items() if is_accelerator(device)]
        self._total, self._total_squared = sum(budgets), sum(budget * budget for budget in budgets)
        self._open_to = {device: self._components_open_to(device) for device in limits.budgets}

    def descend(self, rest: Sequence[str], choice: Choice, uses: Uses, away: int) -> None:
        if not rest:
            cost = (away, _on_disk(uses), *self._shares(uses))
            if self._best_cost is None or cost < self._best_cost:
                self.best, self._best_cost = choice, cost
            return
        name = rest[0]
        for _, place, after, moved in self._steps(name, uses):
            if self._is_spent or not self._can_improve(rest[1:], after, away + moved):
                continue
            self.steps += 1
            self.descend(rest[1:], {**choice, name: place}, after, away + moved)

    @property
    def _is_spent(self) -> bool:
        return self.steps >= (MAX_STEPS_WITHOUT if self.best is None else MAX_STEPS)

    def _steps(self, name: str, uses: Uses) -> list[tuple[_Cost, Place, Uses, int]]:
        """The places within the limits that a component can take now, cheapest first; ties in the request's order."""
        load = self.loads[name]
        steps: list[tuple[_Cost, Place, Uses, int]] = []
        for place in self._distinct(self.requests[name].places, uses):
            after = _with(uses, place, load)
            if all(self.limits.holds(device, after[device]) for device in {place.device, place.storage_device}):
                moved = 0 if is_accelerator(place.storage_device) else load.nbytes
                steps.append(((moved, _on_disk(after), *self._shares(after)), place, after, moved))
        return sorted(steps, key=lambda step: step[0])

    def _can_improve(self, rest: Sequence[str], uses: Uses, away: int) -> bool:
        """Tell whether anything below may cost less than the best: a lower bound of its cost is compared."""
        if self._best_cost is None:
            return True
        fullest, squares = self._shares(uses)
        if away == self._best_cost[0] and self._total:
            # nothing more may go away, so all that is left has to go on the accelerators, at best evenly
            held = sum(use.held for device, use in uses.items() if is_accelerator(device))
            held += sum(self.loads[name].nbytes for name in rest)
            fullest = max(fullest, held / self._total)
            squares = max(squares, held * held / self._total_squared)
        return (away, _on_disk(uses), fullest + _ROUNDING, squares + _ROUNDING) < self._best_cost

    def _shares(self, uses: Uses) -> tuple[float, float]:
        """The share of its budget used on the fullest accelerator, and the sum of squared shares."""
        budgets = self.limits.budgets
        shares = [
            use.peak / budgets[device] for device, use in uses.items() if is_accelerator(device) and budgets[device]
        ]
        return max(shares, default=0.0), sum(share * share for share in shares)

    def _components_open_to(self, device: str) -> frozenset[object]:
        return frozenset(
            (name, place.residency)
            for name, request in self.requests.items()
            for place in request.places
            if place.device == device and not request.pinned
        )

    def _distinct(self, places: Sequence[Place], uses: Uses) -> Iterator[Place]:
        """Of accelerators with the same budget and use, open to the same components, one is as good as another."""
        seen: set[object] = set()
        for place in places:
            device = place.device
            kind = (place.residency, place.storage_device if not is_accelerator(place.storage_device) else "")
            alike = (self.limits.budgets[device], uses[device], self._open_to[device], kind, device == CPU)
            if alike not in seen or len(places) == 1:
                seen.add(alike)
                yield place


def _on_disk(uses: Uses) -> int:
    return uses[DISK].held if DISK in uses else 0


def _with(uses: Uses, place: Place, load: Load) -> Uses:
    """Return uses after one more component; a device's use never shrinks."""
    result = dict(uses)
    use = result[place.device]
    peak = load.peak_bytes(place.residency)
    if place.residency is Residency.ALWAYS or load.stays:
        result[place.device] = Use(use.held + peak, use.brought)
    else:
        result[place.device] = Use(use.held, max(use.brought, peak))
    if place.storage_device != place.device:
        storage = result[place.storage_device]
        result[place.storage_device] = Use(storage.held + load.nbytes, storage.brought)
    return result
