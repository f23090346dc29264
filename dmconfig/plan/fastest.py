"""The search behind ``auto``: the placement that moves weights for the fewest seconds per generation, proven.

Every component that the file leaves open stays on an accelerator, is brought there whole or layer by layer from the
cpu or the disk, runs on the cpu, or is split. Of one that is split, blocks stay in runs, one run per device and the
first on the component's own; what follows the last run, and blocks over some size, are brought layer by layer: from
the cpu as far as it has room, and then from disk. Among placements of the same price the one over the fewest devices
wins, then the most even one.

Branch and bound, largest component first; a narrow search first, so that the full one can leave out more. A component
is split only where it has no room whole beside all that are not split, and takes its room after those: the one that
is dearest to bring first, on the fewest devices that hold all of it, or else on all there are. For one component that
is split the search is exact; where several are, what is left of a device by less than a block may go unused. Which of
several splits of one price is the most even is not searched, and ties in general only so far.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from dmconfig.devices import CPU, DISK, is_accelerator
from dmconfig.layout import Layout
from dmconfig.plan.cuts import Blocks, Cut, Ends, Row
from dmconfig.plan.model import Residency
from dmconfig.plan.preferences import Even, Figures
from dmconfig.plan.prices import Prices
from dmconfig.plan.requests import Place, Request
from dmconfig.plan.uses import Limits, Load, Use, Uses, kind_of, with_place

MAX_WORK = 300_000
"""What a search may take before it settles for the best it has: about a second. A place counts ``_PLACE``, a set of
devices that is looked at for a split counts 1."""
_PLACE = 16
MAX_TIES = 500
"""Places a search looks at that are at best as fast as the best so far, and over fewer devices or more even."""
_LITTLE = 1000
"""A component is not split to keep less than this part of it."""
_EPSILON = 1e-9  # seconds; below it prices are the same

Places = Mapping[str, Place]
"""Of one component: the place of each part by its path, the rest under "" (all of it, where it is not split)."""
Rank = tuple[float, int, Figures]


class Runner(NamedTuple):
    """A placement of every component, and its price."""

    places: Mapping[str, Places]
    seconds: float


class Fastest(NamedTuple):
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
    """What the search is given. ``layouts`` are those of the components that may be split.

    What stays of those that are ``together`` is on their own device.
    """

    requests: Mapping[str, Request]
    loads: Mapping[str, Load]
    limits: Limits
    prices: Prices
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    together: frozenset[str] = frozenset()


def fastest(question: Question) -> Fastest | None:
    """Return the placement with the lowest price, or None when nothing fits. The question is not changed."""
    search = _Search(question)
    search.run(narrow=True)
    search.run(narrow=False)
    return search.outcome()


def _order(question: Question) -> list[str]:
    """Pins first, then the largest."""
    requests, loads = question.requests, question.loads
    return sorted(requests, key=lambda name: (not requests[name].pinned, -loads[name].nbytes, name))


class _Option(NamedTuple):
    """One way to place a component: its price, the devices beyond the first, and what devices hold then.

    Without a place the component is split, after all that are not.
    """

    seconds: float
    crossings: int
    place: Place | Cut | None
    uses: Uses


class _State(NamedTuple):
    """A placement of some components; ``pending`` are those that are to be split."""

    places: Mapping[str, Place | Cut]
    pending: tuple[str, ...]
    uses: Uses
    seconds: float
    crossings: int

    def after(self, name: str, option: _Option) -> _State:
        """Return the placement with one more component."""
        if option.place is None:
            return _State(self.places, (*self.pending, name), self.uses, self.seconds, self.crossings)
        return _State(
            {**self.places, name: option.place},
            tuple(each for each in self.pending if each != name),
            option.uses,
            self.seconds + option.seconds,
            self.crossings + option.crossings,
        )


class _Least(NamedTuple):
    """What not staying costs at least, brought whole or otherwise, and whether staying is possible at all."""

    nbytes: int
    whole_s: float
    in_layers_s: float
    may_stay: bool

    @property
    def seconds(self) -> float:
        """What it costs at least, however."""
        return min(self.whole_s, self.in_layers_s)


class _Search:
    """Depth first, the lowest price first; a branch that cannot beat the best is left."""

    def __init__(self, question: Question) -> None:
        self.question, self.even, self.order = question, Even(question.limits.budgets), _order(question)
        self.accelerators = [d for d in question.limits.budgets if is_accelerator(d) and question.limits.budgets[d]]
        self.offers = {device: max(0, question.limits.offer(device)) for device in self.accelerators}
        layouts = {name: layout for name, layout in question.layouts.items() if not question.requests[name].pinned}
        self.blocks = {name: Blocks(layout) for name, layout in layouts.items()}
        self._kinds = {device: self._kind(device) for device in question.limits.budgets}
        self.visited, self.proven = 0, True
        self._narrow, self._work_left, self._ties_left = False, 0, 0
        self.best: tuple[Rank, _State] | None = None
        self.runner_up: tuple[Rank, _State] | None = None
        self._prices_at = {name: self._prices_of(name) for name in self.blocks}
        self._prices = {name: min(prices.values(), default=inf) for name, prices in self._prices_at.items()}
        self._ways = {
            name: {home: [place for place in prices if place.device == home] for home in self.accelerators}
            for name, prices in self._prices_at.items()
        }
        self._stays_at = {name: [p for p in request.places if _stays(p)] for name, request in question.requests.items()}
        self._seconds = {
            name: {place: question.prices.seconds(name, place, question.loads[name].nbytes) for place in request.places}
            for name, request in question.requests.items()
        }
        self._least = {name: self._least_away(name) for name in question.requests}
        self._in_parts = {name: self._least[name]._replace(whole_s=inf) for name in self.blocks}
        self._nothing = _State({}, (), {device: Use() for device in question.limits.budgets}, 0.0, 0)

    def run(self, *, narrow: bool) -> None:
        """Search for a better placement than is known. ``narrow``: of the ways to place a component only the first of
        each price.
        """
        self._narrow, self._work_left, self._ties_left = narrow, MAX_WORK, MAX_TIES
        self._descend(self.order, self._nothing)
        self.proven = narrow or self._work_left > 0

    def outcome(self) -> Fastest | None:
        """Return what was found."""
        if self.best is None:
            return None
        for state in [*self._one_apart(self.best[1])]:
            self._record(state)
        return Fastest(
            best=self._runner(self.best[1]),
            bound_seconds=self._bound(self.order, self._nothing),
            runner_up=self._runner(self.runner_up[1]) if self.runner_up else None,
            visited=self.visited,
            proven=self.proven,
        )

    def _descend(self, rest: Sequence[str], state: _State) -> None:
        """Place what is left, whole or to be split."""
        if not rest:
            self._split_next(state)
            return
        for option in self._options(rest[0], state):
            self._go_on(rest[0], option, rest[1:], state, self._descend)

    def _split_next(self, state: _State) -> None:
        """Split what is to be split, the dearest to bring first, the last two in either order."""
        if not state.pending:
            self._record(state)
            return
        names = sorted(state.pending, key=lambda name: (-self._prices[name], -self.question.loads[name].nbytes, name))
        for name in names if len(names) == 2 and not self._narrow else names[:1]:
            if self._has_room(name, state.uses):
                continue  # whole it takes no more, and costs nothing
            for option in self._cuts(name, state, is_last=len(names) == 1):
                self._go_on(name, option, (), state, lambda _, after: self._split_next(after))

    def _go_on(
        self,
        name: str,
        option: _Option,
        rest: Sequence[str],
        state: _State,
        go_on: Callable[[Sequence[str], _State], None],
    ) -> None:
        after = state.after(name, option)
        if self._work_left > 0 and self._can_improve(rest, after):
            self.visited += 1
            go_on(rest, after)

    def _one_apart(self, state: _State) -> Iterator[_State]:
        """Yield the placements in which one component is elsewhere, whole: those that a search need not look at."""
        for name, here in state.places.items():
            uses = self._uses_without(name, state)
            seconds = state.seconds - (self._seconds[name][here] if isinstance(here, Place) else here.seconds)
            crossings = state.crossings - (0 if isinstance(here, Place) else len(here.ends) - 1)
            places = {other: place for other, place in state.places.items() if other != name}
            for place in self._distinct(self.question.requests[name].places, uses):
                after = with_place(uses, place, self.question.loads[name])
                if place != here and self.question.limits.hold(after, {place.device, place.storage_device}):
                    price = seconds + self._seconds[name][place]
                    yield _State({**places, name: place}, (), after, price, crossings)

    def _uses_without(self, name: str, state: _State) -> Uses:
        uses: Uses = self._nothing.uses
        for other, place in state.places.items():
            if other == name:
                continue
            if isinstance(place, Place):
                uses = with_place(uses, place, self.question.loads[other])
            else:
                uses = self._with_parts(other, place.home, place.held, place.layer, uses)
        return uses

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
            name: {"": place} if isinstance(place, Place) else self.blocks[name].places(place)
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
        left = (*rest, *state.pending)
        must_stay = abs(state.seconds - seconds) <= _EPSILON and all(
            self._least[name].seconds > _EPSILON for name in left
        )
        more = sum(self.question.loads[name].nbytes for name in left) if must_stay else 0
        # one that is split and stays is over two devices or more
        further = len(state.pending) if must_stay else 0
        return (state.crossings + further, self.even.bound(state.uses, more)) < (crossings, figures)

    def _bound(self, rest: Sequence[str], state: _State) -> float:
        """A price that no placement falls below which goes on from here.

        What is left needs room on the accelerators; the bytes for which there is none are at best the cheapest to
        have elsewhere, as if components could be cut anywhere.
        """
        room = turn = 0
        for device, offer in self.offers.items():
            use = state.uses[device]
            room += max(0, offer - use.need)
            turn = max(turn, use.need - use.held)
        seconds, staying = state.seconds, [self._in_parts[name] for name in state.pending]
        room -= sum(least.nbytes for least in staying)
        for name in rest:
            least = self._least[name]
            if least.may_stay:
                room -= least.nbytes
                staying.append(least)
            else:
                seconds += least.seconds
                turn = max(turn, least.nbytes)
        return seconds if room >= 0 else seconds + _in_turns(-room, staying, turn)

    def _least_away(self, name: str) -> _Least:
        """What a component costs at least when it does not stay, and whether it can stay on an empty machine."""
        request, load, limits = self.question.requests[name], self.question.loads[name], self.question.limits
        roomy = max(self.offers.values(), default=0)
        splits = name in self.blocks
        stays = [place for place in self._stays_at[name] if load.nbytes <= max(0, limits.offer(place.device))]
        away = [
            place
            for place in request.places
            if not _stays(place)
            and (load.peak_bytes(place.residency) <= roomy or place.device == CPU or (splits and _is_brought(place)))
        ]
        seconds = self._seconds[name]
        whole = [seconds[place] for place in away if place.residency is Residency.WHILE_RUNNING]
        others = [seconds[place] for place in away if place.residency is not Residency.WHILE_RUNNING]
        return _Least(
            nbytes=load.nbytes,
            whole_s=min(whole, default=inf),
            in_layers_s=min(others, default=inf),
            may_stay=bool(stays) or splits,
        )

    # ---------------------------------------------------------------- whole components

    def _options(self, name: str, state: _State) -> list[_Option]:
        """Return the ways to place a component within the limits, the best first; to split it is the last resort of
        those that may be for nothing.
        """
        options = sorted(self._whole(name, state), key=self._rank)
        self._work_left -= _PLACE * len(options)
        if self._narrow:
            options = [*_first_of_each_price(options)]
        if name in self.blocks:
            free = sum(option.seconds <= _EPSILON for option in options)
            options.insert(free, _Option(0.0, 0, None, state.uses))
        return options

    def _rank(self, option: _Option) -> Rank:
        return round(option.seconds, 9), option.crossings, self.even.figures(option.uses)

    def _whole(self, name: str, state: _State) -> Iterator[_Option]:
        load, seconds = self.question.loads[name], self._seconds[name]
        most = inf if self.best is None else self.best[0][0] - state.seconds + _EPSILON
        for place in self._distinct(self.question.requests[name].places, state.uses):
            if seconds[place] <= most:
                after = with_place(state.uses, place, load)
                if self.question.limits.hold(after, {place.device, place.storage_device}):
                    yield _Option(seconds[place], 0, place, after)

    def _has_room(self, name: str, uses: Uses) -> bool:
        """Tell whether a component can stay whole somewhere."""
        load, limits = self.question.loads[name], self.question.limits
        stays = self._stays_at[name]
        return any(load.nbytes <= limits.room(place.device, uses, load.working.get(place.device, 0)) for place in stays)

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
        kind = kind_of(device, limits, self.question.loads)
        if not is_accelerator(device):
            return kind
        return kind, *(prices.bandwidth(Place(device, Residency.PER_LEAF, storage)) for storage in (CPU, DISK))

    # ---------------------------------------------------------------- components in parts

    def _prices_of(self, name: str) -> Mapping[Place, float]:
        """What a byte of a component costs that is brought in layers, by the way it comes; the cheapest first.

        What rests in the host's memory stays as well on an accelerator that shares it.
        """
        request, price, unified = (
            self.question.requests[name],
            self.question.prices.seconds,
            self.question.limits.unified,
        )
        ways = (p for p in request.places if _is_brought(p) and not (p.storage == CPU and p.device in unified))
        prices = {place: price(name, place, 1) for place in ways}
        return dict(sorted(prices.items(), key=lambda each: (each[1], each[0].storage)))

    def _cuts(self, name: str, state: _State, *, is_last: bool) -> list[_Option]:
        """Return the ways to split a component, the best first: those that keep all of it, or else those that bring
        some.
        """
        homes = [place.device for place in self._distinct([Place(d) for d in self.accelerators], state.uses)]
        rooms, only_best = self._rooms(name, state.uses), is_last or self._narrow
        cuts: list[_Option] = []
        if name not in self.question.together:
            cuts = [cut for home in homes for cut in self._staying(name, home, rooms, state.uses, only_best=only_best)]
        else:
            rooms = {}
        most = inf if self.best is None else self.best[0][0] - state.seconds + _EPSILON
        for beside in () if cuts else sorted({0, self._largest_layer(name, state.pending)}):
            for home in homes:
                others = {device: room for device, room in rooms.items() if device != home}
                for cut in self._streamed(name, home, others, state.uses, beside=beside, most=most):
                    cuts.append(cut)
                    most = min(most, cut.seconds + _EPSILON) if only_best else most
        self._work_left -= _PLACE * (len(cuts) + len(homes))
        ranked = sorted(cuts, key=self._rank) if len(cuts) > 1 else cuts
        return ranked[:1] if only_best else ranked

    def _staying(
        self, name: str, home: str, rooms: Mapping[str, int], uses: Uses, *, only_best: bool
    ) -> Iterator[_Option]:
        """All blocks stay, over the fewest devices that hold them: evenly, or as far as each has room."""
        blocks, room = self.blocks[name], rooms[home]
        row, others = blocks.rows[0], {device: more for device, more in rooms.items() if device != home}
        if blocks.outside + blocks.total > sum(rooms.values()) or blocks.outside > room:
            return
        fewest = len(rooms)
        for runs in self._runs(row, room - blocks.outside, others):
            if len(runs) > fewest:
                return
            if runs[-1][1] == row.count:
                fewest = len(runs)
                over = [(device, rooms[device]) for device in (home, *(device for device, _ in runs[1:]))]
                ways = [row.evenly(over, blocks.outside)]
                if not only_best:
                    ways.append(((home, runs[0][1]), *runs[1:]))  # what is left is on the last one
                options = (self._option(name, home, row, ends, uses) for ends in ways)
                yield from (option for option in options if option is not None)
                if only_best:
                    return

    def _largest_layer(self, name: str, pending: Sequence[str]) -> int:
        """The room that those that are split later need somewhere, if all of them is brought."""
        return max((self.blocks[other].rows[0].leaves[0] for other in pending if other != name), default=0)

    def _streamed(
        self, name: str, home: str, rooms: Mapping[str, int], uses: Uses, *, beside: int, most: float
    ) -> Iterator[_Option]:
        """The first blocks stay, of all or of those up to some size, and the others are brought: as few as can be.

        ``rooms`` are those of other devices that may hold some; ``beside`` is left for a layer of another component
        that comes to the same device. Splits that cost more than ``most`` are left out.
        """
        uses = {**uses, home: uses[home].with_brought(beside)} if beside else uses
        price = self._prices[name]
        for row in self.blocks[name].rows:
            if row.aside_bytes > most / price:
                return
            runs = self._longest(name, home, row, rooms, uses, most=most / price)
            if runs is None or row.away_bytes(runs[-1][1]) > most / price:
                continue
            option = self._option(name, home, row, ((home, runs[0][1]), *runs[1:]), uses)
            if option is not None:
                most = min(most, option.seconds + _EPSILON)
                yield option

    def _longest(
        self, name: str, home: str, row: Row, rooms: Mapping[str, int], uses: Uses, *, most: float
    ) -> Ends | None:
        """Return the runs that hold the most, beside room on their own device for the largest layer that is brought.

        Which layers are brought depends on the room, and the room on them: the smallest that comes out is the one.
        None where no device has the room, or more than ``most`` is brought.
        """
        outside, others, layer = self.blocks[name].outside, sum(rooms.values()), 0
        room = self._room_beside(name, home, 0, uses) - outside
        layer = row.layer_beside(room + others)
        while True:
            room = self._room_beside(name, home, layer, uses) - outside
            if room < 0 or row.aside_bytes + row.total - room - others > most:
                return None
            runs = max(self._runs(row, room, rooms), key=lambda runs: runs[-1][1]) if rooms else row.alone(room)
            if row.leaves[runs[-1][1]] <= layer:
                return runs
            layer = row.leaves[runs[-1][1]]

    def _room_beside(self, name: str, home: str, layer: int, uses: Uses) -> int:
        """What a device has left beside a layer of a component that comes and goes."""
        working = self.question.loads[name].working.get(home, 0)
        return self.question.limits.room(home, self._with_parts(name, home, {}, layer, uses), working)

    def _option(self, name: str, home: str, row: Row, ends: Ends, uses: Uses) -> _Option | None:
        """Return the split with these runs, what is brought resting where there is room; None where there is none."""
        blocks, start = self.blocks[name], 0
        held = {home: blocks.outside}
        for device, end in ends:
            held[device] = held.get(device, 0) + row.sums[end] - row.sums[start]
            start = end
        layer, seconds, sums = row.leaves[start], 0.0, row.away_sums(start)
        after = self._with_parts(name, home, held, layer, uses)
        resting: list[tuple[Place, int]] = []
        for place, count, nbytes in self._resting(name, home, sums, after):
            held[place.storage] = nbytes
            after[place.storage] = after[place.storage].with_held(nbytes)
            seconds += nbytes * self._prices_at[name][place]
            resting.append((place, count))
        keeps_little = len(resting) == 1 and row.sums[start] * _LITTLE < blocks.total
        if keeps_little or sum(count for _, count in resting) + 1 < len(sums):
            return None  # what is brought as a whole is tried as a place
        if not self.question.limits.hold(after, held):
            return None
        return _Option(seconds, len(ends) - 1, Cut(home, row, ends, tuple(resting), held, layer, seconds), after)

    def _with_parts(self, name: str, home: str, held: Mapping[str, int], layer: int, uses: Uses) -> dict[str, Use]:
        """Return uses after a component that holds so much on each device, and of which a layer comes to its own."""
        load, after = self.question.loads[name], dict(uses)
        for device, nbytes in held.items():
            after[device] = after[device].with_held(nbytes, load.working.get(device, 0))
        if layer and load.stays:
            after[home] = after[home].with_held(layer, load.working.get(home, 0))
        elif layer:
            after[home] = after[home].with_brought(layer, load.working.get(home, 0))
        return after

    def _resting(self, name: str, home: str, sums: Sequence[int], uses: Uses) -> Iterator[tuple[Place, int, int]]:
        """Yield where blocks rest, how many, and their bytes: as many as there is room for on the fastest, then on the
        next. ``sums`` are the running sum of their bytes.
        """
        start = 0
        for place in self._ways[name][home]:
            room = self.question.limits.room(place.storage, uses)
            end = bisect.bisect_right(sums, sums[start] + room, start) - 1
            if end > start:
                yield place, end - start, sums[end] - sums[start]
            start = end

    def _runs(self, row: Row, first_room: int, rooms: Mapping[str, int]) -> Iterator[Ends]:
        for runs in row.runs(first_room, rooms):
            self._work_left -= 1
            yield runs

    def _rooms(self, name: str, uses: Uses) -> dict[str, int]:
        """What the accelerators have left for parts of a component that stay."""
        working, limits = self.question.loads[name].working, self.question.limits
        return {device: limits.room(device, uses, working.get(device, 0)) for device in self.accelerators}


def _in_turns(excess: int, staying: Sequence[_Least], turn: int) -> float:
    """What it costs at least that so many bytes do not stay, of components that otherwise would.

    The largest that is brought whole takes as much room as if it stayed, but for what comes in ``turn`` with it: it
    makes room for smaller ones only.
    """
    bounds = [_relief(excess, [(least.in_layers_s, least.nbytes) for least in staying])]
    for largest in staying:
        if largest.whole_s < bounds[0]:
            others = [
                (least.seconds if least.nbytes <= largest.nbytes else least.in_layers_s, least.nbytes)
                for least in staying
                if least is not largest
            ]
            bounds.append(largest.whole_s + _relief(excess - turn, others))
    return min(bounds)


def _relief(excess: int, ways: Iterable[tuple[float, int]]) -> float:
    """What it costs at least that so many bytes do not stay, given the price and the bytes of each that may not."""
    if excess <= 0:
        return 0.0
    seconds = 0.0
    for price, nbytes in sorted((price / nbytes if nbytes else 0.0, nbytes) for price, nbytes in ways):
        seconds += price * min(nbytes, excess)
        excess -= nbytes
        if excess <= 0:
            return seconds
    return inf


def _first_of_each_price(options: Iterable[_Option]) -> Iterator[_Option]:
    last = None
    for option in options:
        if option.seconds != last:
            yield option
        last = option.seconds


def _stays(place: object) -> bool:
    return isinstance(place, Place) and place.residency is Residency.ALWAYS and is_accelerator(place.device)


def _is_brought(place: object) -> bool:
    return isinstance(place, Place) and place.residency is Residency.PER_LEAF
