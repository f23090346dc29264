"""The search behind ``auto``: the placement that moves weights for the fewest seconds per generation, proven.

Every component that the file leaves open stays on an accelerator, is brought there whole or layer by layer from the
cpu or the disk, runs on the cpu, or is split: its blocks stay in runs, one run per device and the first on the
component's own, and the blocks after the last run are brought layer by layer. Among placements of the same price the
one over the fewest devices wins, then the most even one.

Branch and bound, largest component first and split ones last, because they take what room is left; a narrow search
first, so that the full one can leave out more. Exact for this choice of places, with one exception: of two components
that are split, the one placed first takes all the room of the devices it is on. Which of several splits of one price is
the most even is not searched, and ties in general only so far.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dmconfig.devices import CPU, DISK, is_accelerator
from dmconfig.layout import Layout
from dmconfig.plan.model import Residency
from dmconfig.plan.preferences import Even, Figures
from dmconfig.plan.prices import Prices
from dmconfig.plan.requests import Place, Request
from dmconfig.plan.split import joined
from dmconfig.plan.uses import Limits, Load, Use, Uses, with_place

MAX_WORK = 300_000
"""What a search may take before it settles for the best it has: about a second. A place counts ``_PLACE``, a set of
devices that is looked at for a split counts 1."""
_PLACE = 16
MAX_TIES = 500
"""Places a search looks at that are at best as fast as the best so far, and over fewer devices or more even."""
_HALVINGS = 30
_EPSILON = 1e-9  # seconds; below it prices are the same

Places = Mapping[str, Place]
"""Of one component: the place of each part by its path, the rest under "" (all of it, where it is not split)."""
Rank = tuple[float, int, Figures]
Ends = tuple[tuple[str, int], ...]
"""Device of each run, and the block at which it ends."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A placement of every component, and its price."""

    places: Mapping[str, Places]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """What the search found: the best, what nothing can fall below, and the next best it has seen.

    ``proven`` is False when it ended before it had seen everything.
    """

    best: Runner
    bound_seconds: float
    runner_up: Runner | None
    visited: int
    proven: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the search is given. ``layouts`` are those of the components that may be split."""

    requests: Mapping[str, Request]
    loads: Mapping[str, Load]
    limits: Limits
    prices: Prices
    layouts: Mapping[str, Layout] = field(default_factory=dict)


def fastest(question: Question) -> Fastest | None:
    """Return the placement with the lowest price, or None when nothing fits. The question is not changed."""
    search, orders = _Search(question), [*_orders(question)]
    for narrow in (True, False):
        for order in orders:
            search.run(order, MAX_WORK // len(orders), narrow=narrow)
    return search.outcome()


def _orders(question: Question) -> Iterator[list[str]]:
    """Pins first, then the largest; those that may be split last, each of them last once."""
    names = sorted(question.requests, key=lambda name: (-question.loads[name].nbytes, name))
    pins = [name for name in names if question.requests[name].pinned]
    split = [name for name in names if name in question.layouts and name not in pins]
    others = [name for name in names if name not in pins and name not in split]
    if not split:
        yield [*pins, *others]
    for last in split:
        yield [*pins, *others, *(name for name in split if name != last), last]


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a component is split: where the run of each device ends, in order, and how the blocks after the last come."""

    ends: Ends
    brought: Place | None


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to place a component: its price, the devices beyond the first, and what devices hold then."""

    seconds: float
    crossings: int
    place: Place | _Cut
    uses: Uses


@dataclass(frozen=True, slots=True)
class _State:
    """A placement of some components."""

    places: Mapping[str, Place | _Cut]
    uses: Uses
    seconds: float
    crossings: int

    def after(self, name: str, option: _Option) -> _State:
        """Return the placement with one more component."""
        return _State(
            {**self.places, name: option.place},
            option.uses,
            self.seconds + option.seconds,
            self.crossings + option.crossings,
        )


class _Search:
    """Depth first, the lowest price first; a branch that cannot beat the best is left."""

    def __init__(self, question: Question) -> None:
        self.question, self.even = question, Even(question.limits.budgets)
        self.accelerators = [d for d in question.limits.budgets if is_accelerator(d) and question.limits.budgets[d]]
        self.offers = {device: max(0, question.limits.offer(device)) for device in self.accelerators}
        self.blocks = {name: _Blocks(layout) for name, layout in question.layouts.items()}
        self._kinds = {device: self._kind(device) for device in question.limits.budgets}
        self.visited, self.proven, self.bound_seconds = 0, True, 0.0
        self._narrow, self._work_left, self._ties_left = False, 0, 0
        self.best: tuple[Rank, _State] | None = None
        self.runner_up: tuple[Rank, _State] | None = None
        self._least = {name: self._least_away(name) for name in question.requests}

    def run(self, order: Sequence[str], work: int, *, narrow: bool) -> None:
        """Search for a better placement than is known, components in this order.

        ``narrow``: of the ways to place a component only the first of each price.
        """
        nothing = _State({}, {device: Use() for device in self.question.limits.budgets}, 0.0, 0)
        self.bound_seconds = self._bound(order, nothing)  # the same in any order
        self._narrow, self._work_left, self._ties_left = narrow, work, MAX_TIES
        self._descend(order, nothing)
        self.proven = self.proven and (narrow or self._work_left > 0)

    def outcome(self) -> Fastest | None:
        """Return what was found."""
        if self.best is None:
            return None
        return Fastest(
            best=self._runner(self.best[1]),
            bound_seconds=self.bound_seconds,
            runner_up=self._runner(self.runner_up[1]) if self.runner_up else None,
            visited=self.visited,
            proven=self.proven,
        )

    def _descend(self, rest: Sequence[str], state: _State) -> None:
        if not rest:
            self._record(state)
            return
        for option in self._options(rest[0], state, is_last=len(rest) == 1):
            after = state.after(rest[0], option)
            if self._work_left <= 0 or not self._can_improve(rest[1:], after):
                continue
            self.visited += 1
            self._descend(rest[1:], after)

    def _record(self, state: _State) -> None:
        rank = (round(state.seconds, 9), state.crossings, self.even.figures(state.uses))
        if self.best is None or rank < self.best[0]:
            self.best, runner_up = (rank, state), self.best
        else:
            runner_up = (rank, state)
        if runner_up is not None and (self.runner_up is None or runner_up[0] < self.runner_up[0]):
            self.runner_up = runner_up

    def _runner(self, state: _State) -> Runner:
        places = {
            name: {"": place} if isinstance(place, Place) else self.blocks[name].places(place.ends, place.brought)
            for name, place in state.places.items()
        }
        return Runner(places, state.seconds)

    # ---------------------------------------------------------------- bounds

    def _can_improve(self, rest: Sequence[str], state: _State) -> bool:
        if self.best is None:
            return True
        seconds, crossings, figures = self.best[0]
        bound = self._bound(rest, state)
        if abs(bound - seconds) > _EPSILON:
            return bound < seconds
        self._ties_left -= 1
        if self._ties_left < 0:
            return False
        must_stay = abs(state.seconds - seconds) <= _EPSILON and all(
            self._least[name].seconds > _EPSILON for name in rest
        )
        more = sum(self.question.loads[name].nbytes for name in rest) if must_stay else 0
        return (state.crossings, self.even.bound(state.uses, more)) < (crossings, figures)

    def _bound(self, rest: Sequence[str], state: _State) -> float:
        """A price that no placement falls below which goes on from here.

        What is left needs room on the accelerators; the bytes for which there is none are at best the cheapest to
        have elsewhere, as if components could be cut anywhere.
        """
        room = sum(max(0, offer - state.uses[device].need) for device, offer in self.offers.items())
        seconds, cheapest = state.seconds, list[tuple[float, int]]()
        for name in rest:
            least, nbytes = self._least[name], self.question.loads[name].nbytes
            if not least.may_stay:
                seconds += least.seconds
                continue
            room -= nbytes
            cheapest.append((least.seconds / nbytes if nbytes else 0.0, nbytes))
        excess = -room
        for price, nbytes in sorted(cheapest):
            if excess <= 0:
                break
            seconds += price * min(nbytes, excess)
            excess -= nbytes
        return seconds

    def _least_away(self, name: str) -> _Least:
        """What a component costs at least when it does not stay, and whether it can stay on an empty machine."""
        request, load, limits = self.question.requests[name], self.question.loads[name], self.question.limits
        roomy = max(self.offers.values(), default=0)
        splits = name in self.blocks and not request.pinned
        stays = [
            place for place in request.places if _stays(place) and load.nbytes <= max(0, limits.offer(place.device))
        ]
        away = [
            self.question.prices.seconds(name, place, load.nbytes)
            for place in request.places
            if not _stays(place) and (load.peak_bytes(place.residency) <= roomy or place.device == CPU)
        ]
        return _Least(min(away, default=float("inf")), may_stay=bool(stays) or splits)

    # ---------------------------------------------------------------- options

    def _options(self, name: str, state: _State, *, is_last: bool) -> list[_Option]:
        """Return the ways to place a component within the limits, the best first."""
        request, load, uses = self.question.requests[name], self.question.loads[name], state.uses
        options = [*self._whole(name, self._distinct(request.places, uses), load, uses)]
        stays = is_last and any(option.seconds == 0 for option in options)  # a split is no faster, over more devices
        if name in self.blocks and not request.pinned and not stays:
            options += self._split(name, state, is_last=is_last)
        self._work_left -= _PLACE * len(options)
        options.sort(key=lambda o: (round(o.seconds, 9), o.crossings, self.even.figures(o.uses)))
        return [*_first_of_each_price(options)] if self._narrow else options

    def _whole(self, name: str, places: Iterable[Place], load: Load, uses: Uses) -> Iterator[_Option]:
        for place in places:
            after = with_place(uses, place, load)
            if self.question.limits.hold(after, {place.device, place.storage_device}):
                yield _Option(self.question.prices.seconds(name, place, load.nbytes), 0, place, after)

    def _distinct(self, places: Sequence[Place], uses: Uses) -> Iterator[Place]:
        """Of accelerators that are alike, and hold the same so far, one is as good as another."""
        seen: set[object] = set()
        for place in places:
            alike = (place.residency, place.storage, self._kinds[place.device], uses[place.device])
            if alike not in seen or len(places) == 1:
                seen.add(alike)
                yield place

    def _kind(self, device: str) -> object:
        """What sets a device apart from others; equal for those that are alike."""
        limits, prices = self.question.limits, self.question.prices
        if not is_accelerator(device):
            return device
        links = [prices.bandwidth(Place(device, Residency.PER_LEAF, storage)) for storage in (CPU, DISK)]
        working = [load.working.get(device, 0) for load in self.question.loads.values()]
        return limits.budgets[device], limits.offer(device), device in limits.unified, *links, *working

    def _split(self, name: str, state: _State, *, is_last: bool) -> Iterator[_Option]:
        """Yield the ways to split a component, the best per first device or, where another is split after it, all."""
        rooms = self._rooms(name, state.uses)
        allowance = self.best[0][0] - state.seconds if self.best is not None else float("inf")
        for first in self._distinct([Place(device) for device in self.accelerators], state.uses):
            others = {device: room for device, room in rooms.items() if device != first.device}
            ways = self._staying(name, first.device, rooms[first.device], others, state.uses)
            staying = [*itertools.islice(ways, 1 if is_last else None)]
            yield from staying
            if not (staying and is_last):
                yield from self._streamed(name, first.device, others, state.uses, allowance, is_last=is_last)

    def _staying(self, name: str, first: str, room: int, rooms: Mapping[str, int], uses: Uses) -> Iterator[_Option]:
        """All blocks stay, evenly over sets of devices of which none could be left out; the smallest sets first."""
        blocks = self.blocks[name]
        if blocks.outside + blocks.total > room + sum(rooms.values()) or blocks.outside > room:
            return
        for runs in self._runs(blocks, room - blocks.outside, rooms):
            if runs[-1][1] == blocks.count and len(runs) > 1:
                over = [(first, room), *((device, rooms[device]) for device, _ in runs[1:])]
                yield from self._option(name, _Cut(blocks.evenly(over), None), uses)

    def _streamed(
        self, name: str, first: str, rooms: Mapping[str, int], uses: Uses, allowance: float, *, is_last: bool
    ) -> Iterator[_Option]:
        """The first blocks stay, in runs over all of a set of devices, and the others are brought."""
        blocks, load, seconds = self.blocks[name], self.question.loads[name], self.question.prices.seconds
        parts = Load(nbytes=0, largest_leaf_bytes=blocks.leaf, group_bytes=0, stays=load.stays, working=load.working)
        with_leaf = with_place(uses, Place(first, Residency.PER_LEAF, first), parts)[first]
        room = self._offer(first, uses) - with_leaf.need - blocks.outside
        least = max(0, blocks.total - max(room, 0) - sum(rooms.values()))
        storages = dict.fromkeys(
            p.storage for p in self.question.requests[name].places if p.residency is Residency.PER_LEAF
        )
        ways = [Place(first, Residency.PER_LEAF, storage) for storage in storages]
        ways = [brought for brought in ways if seconds(name, brought, least) <= allowance + _EPSILON]
        if room < 0 or not ways:
            return
        sets = self._runs(blocks, room, rooms)
        for runs in [max(sets, key=lambda runs: runs[-1][1])] if is_last else sets:
            if runs[-1][1] < blocks.count:  # else all stay: that is the other way, with more room
                for brought in ways:
                    yield from self._option(name, _Cut(((first, runs[0][1]), *runs[1:]), brought), uses)

    def _option(self, name: str, cut: _Cut, uses: Uses) -> Iterator[_Option]:
        blocks, load, after = self.blocks[name], self.question.loads[name], dict(uses)
        held, start = blocks.outside, 0
        for device, end in cut.ends:
            held += blocks.sums[end] - blocks.sums[start]
            after[device] = after[device].with_held(held, load.working.get(device, 0))
            held, start = 0, end
        away, seconds = blocks.total - blocks.sums[start], 0.0
        if cut.brought is not None:
            streamed = replace(load, nbytes=away, largest_leaf_bytes=blocks.leaf, group_bytes=away)
            after = dict(with_place(after, cut.brought, streamed))
            seconds = self.question.prices.seconds(name, cut.brought, away)
        if self.question.limits.hold(after, after):
            yield _Option(seconds, len(cut.ends) - 1, cut, after)

    def _runs(self, blocks: _Blocks, first_room: int, rooms: Mapping[str, int]) -> Iterator[Ends]:
        for runs in blocks.runs(first_room, rooms):
            self._work_left -= 1
            yield runs

    def _rooms(self, name: str, uses: Uses) -> Mapping[str, int]:
        """What the accelerators have left for parts of a component that stay."""
        working = self.question.loads[name].working
        return {
            device: max(0, self._offer(device, uses) - uses[device].with_held(0, working.get(device, 0)).need)
            for device in self.accelerators
        }

    def _offer(self, device: str, uses: Uses) -> int:
        """What weights may take of a device: where its memory is the host's, what that has left for it."""
        limits = self.question.limits
        if device not in limits.unified:
            return limits.offer(device)
        others = sum(uses[d].need + limits.reserve_of(d) for d in limits.unified if d != device and uses[d].peak)
        return min(limits.offer(device), limits.budgets[CPU] - uses[CPU].need - others - limits.reserve_of(device))


@dataclass(frozen=True, slots=True)
class _Least:
    """What not staying costs at least, and whether staying is possible at all."""

    seconds: float
    may_stay: bool


def _first_of_each_price(options: Iterable[_Option]) -> Iterator[_Option]:
    last = None
    for option in options:
        if option.seconds != last:
            yield option
        last = option.seconds


def _stays(place: Place) -> bool:
    return place.residency is Residency.ALWAYS and is_accelerator(place.device)


class _Blocks:
    """The blocks of a layout, with their running sum."""

    def __init__(self, layout: Layout) -> None:
        blocks = layout.blocks()
        self.layout, self.paths, self.count = layout, [block.path for block in blocks], len(blocks)
        self.leaf = max((block.largest_leaf_bytes for block in blocks), default=0)
        self.sums = [0, *itertools.accumulate(block.nbytes for block in blocks)]
        self.total = self.sums[-1]
        self.outside = sum(module.own_bytes for module in layout.modules) - self.total

    def runs(self, first_room: int, rooms: Mapping[str, int]) -> Iterator[Ends]:
        """Yield the runs that hold the most blocks from the start over each set of devices, smaller sets first.

        The first run is on the component's own device, under the name ""; the order of the others is the best there
        is. No run but the first is empty, and where all blocks have a place no more devices are tried. Of devices with
        equal room the first is used first.
        """
        sums, bits = self.sums, _bits(rooms)
        level: dict[int, Ends] = {0: (("", self._end(0, first_room)),)}
        while level:
            yield from level.values()
            wider: dict[int, Ends] = {}
            for used, runs in level.items():
                start = runs[-1][1]
                for device, room, bit, before in bits if start < self.count else ():
                    if used & (bit | before) != before:
                        continue
                    end = bisect.bisect_right(sums, sums[start] + room, start) - 1
                    known = wider.get(used | bit)
                    if end > start and (known is None or end > known[-1][1]):
                        wider[used | bit] = (*runs, (device, end))
            level = wider

    def evenly(self, rooms: Sequence[tuple[str, int]]) -> Ends:
        """Return runs over these devices, in order, that fill the smallest share of each; all blocks have room."""
        low, high, best = 0.0, 1.0, self._filled(rooms, 1.0)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            runs = self._filled(rooms, middle)
            low, high, best = (low, middle, runs) if runs[-1][1] == self.count else (middle, high, best)
        return best

    def places(self, ends: Iterable[tuple[str, int]], brought: Place | None) -> Places:
        """Return the place of each part of a component that is cut so."""
        places, start, first = dict[str, Place](), 0, ""
        for device, end in ends:
            first = first or device
            places |= dict.fromkeys(self.paths[start:end], Place(device))
            start = end
        if brought is not None:
            places |= dict.fromkeys(self.paths[start:], brought)
        return joined(self.layout, places, Place(first))

    def _filled(self, rooms: Sequence[tuple[str, int]], share: float) -> Ends:
        runs, start, taken = list[tuple[str, int]](), 0, self.outside
        for device, room in rooms:
            start, taken = self._end(start, int(room * share) - taken), 0
            runs.append((device, start))
        return tuple(runs)

    def _end(self, start: int, room: int) -> int:
        """Where a run ends that starts there and has so much room."""
        return max(start, bisect.bisect_right(self.sums, self.sums[start] + room) - 1)


def _bits(rooms: Mapping[str, int]) -> list[tuple[str, int, int, int]]:
    """Each device and its room with a bit of its own, and that of the device before it which has as much room."""
    last: dict[int, int] = {}
    bits: list[tuple[str, int, int, int]] = []
    for index, (device, room) in enumerate(rooms.items()):
        bits.append((device, room, 1 << index, last.get(room, 0)))
        last[room] = 1 << index
    return bits
