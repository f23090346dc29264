"""The search behind ``balanced`` and its relatives: an exact choice of one place per component, by branch and bound.

A pipeline has at most a dozen components, so the best choice can be found rather than approximated, and the answer
depends on the input alone. A limit on the steps keeps contrived cases short; ``Found.proven`` says when it was met.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dmconfig.devices import CPU, DISK, is_accelerator
from dmconfig.plan.preferences import Even, Preference
from dmconfig.plan.requests import Place, Request
from dmconfig.plan.uses import Choice, Limits, Load, Use, Uses, kind_of, with_place

_Cost = tuple[float, ...]
_DIGITS = 9
"""Shares that differ by less are the same: what is a sum of floats depends on their order."""

MAX_STEPS = 5_000
"""Placements tried before the search settles for the best it has: a fraction of a second."""
MAX_STEPS_WITHOUT = 4 * MAX_STEPS
"""The same while it has found none that fits: a tight packing is worth a longer look than a more even one."""


class Found(NamedTuple):
    """A choice of a place per component; ``proven`` is False when the search ended before it had seen everything."""

    choice: Choice
    proven: bool


def best_choice(
    requests: Mapping[str, Request], loads: Mapping[str, Load], limits: Limits, preference: Preference | None = None
) -> Found | None:
    """Return the best choice of a place per component within the limits, or None when none was found.

    Best: the fewest bytes that do not stay on an accelerator; then the fewest on disk; then what the preference says
    (``Even`` by default). The order of the input does not matter, and it is not changed.
    Up to ``MAX_STEPS`` placements are tried, which is enough to prove the answer for every
    pipeline of the catalogue on 8 unequal accelerators; after that the best found is returned. While none is found,
    ``MAX_STEPS_WITHOUT`` are tried, so a very tight packing of many components on many accelerators may be missed.
    """
    order = sorted(requests, key=lambda name: (len(requests[name].places) > 1, -loads[name].nbytes, name))
    search = _Search(requests, loads, limits, preference or Even(limits.budgets))
    search.descend(order, {}, {device: Use() for device in limits.budgets}, 0)
    return None if search.best is None else Found(search.best, proven=search.steps < MAX_STEPS)


class _Search:
    """Depth first, largest component first, cheapest place first; a branch that cannot beat the best is left."""

    def __init__(
        self, requests: Mapping[str, Request], loads: Mapping[str, Load], limits: Limits, preference: Preference
    ) -> None:
        self.requests, self.loads, self.limits, self.preference = requests, loads, limits, preference
        self.best: Choice | None = None
        self.steps = 0
        self._best_cost: _Cost | None = None
        self._open_to = {device: self._components_open_to(device) for device in limits.budgets}
        self._kinds = {device: kind_of(device, limits, loads) for device in limits.budgets}

    def descend(self, rest: Sequence[str], choice: Choice, uses: Uses, away: int) -> None:
        if not rest:
            cost = _rounded(away, _on_disk(uses), *self.preference.figures(uses))
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
            after = with_place(uses, place, load)
            if self.limits.hold(after, {place.device, place.storage_device}):
                moved = 0 if is_accelerator(place.storage_device) else load.nbytes
                steps.append((_rounded(moved, _on_disk(after), *self.preference.figures(after)), place, after, moved))
        return sorted(steps, key=lambda step: step[0])

    def _can_improve(self, rest: Sequence[str], uses: Uses, away: int) -> bool:
        """Tell whether anything below may cost less than the best: a lower bound of its cost is compared."""
        if self._best_cost is None:
            return True
        if away == self._best_cost[0]:  # nothing more may go away, so all that is left goes on the accelerators
            figures = self.preference.bound(uses, sum(self.loads[name].nbytes for name in rest))
        else:
            figures = self.preference.figures(uses)
        return _rounded(away, _on_disk(uses), *figures) < self._best_cost

    def _components_open_to(self, device: str) -> frozenset[object]:
        return frozenset(
            (name, place.residency)
            for name, request in self.requests.items()
            for place in request.places
            if place.device == device and not request.pinned
        )

    def _distinct(self, places: Sequence[Place], uses: Uses) -> Iterator[Place]:
        """Of accelerators that are alike and hold the same, open to the same components, one is as good as another."""
        seen: set[object] = set()
        for place in places:
            device = place.device
            kind = (place.residency, place.storage_device if not is_accelerator(place.storage_device) else "")
            apart = device == CPU or self.preference.kind(device)
            alike = (self._kinds[device], uses[device], self._open_to[device], kind, apart)
            if alike not in seen or len(places) == 1:
                seen.add(alike)
                yield place


def _rounded(*figures: float) -> _Cost:
    return tuple(round(figure, _DIGITS) for figure in figures)


def _on_disk(uses: Uses) -> int:
    return uses[DISK].held if DISK in uses else 0
