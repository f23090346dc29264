"""How one component can be cut: its blocks, and the runs of them that devices have room for."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dmconfig.layout import Layout
from dmconfig.plan.requests import Place
from dmconfig.plan.split import holders_of, joined

_HALVINGS = 12
_LARGE = 2
"""Blocks are large that are so many times as large as the largest of the others."""

Ends = tuple[tuple[str, int], ...]
"""Device of each run, and the place in the row at which it ends."""


class _Item(NamedTuple):
    """Blocks that stay together: one, and those that share a weight with it."""

    paths: tuple[str, ...]
    nbytes: int
    leaf: int


class Row:
    """The blocks of a component that may stay, in order: all, or those that are not larger than some size.

    The others are ``aside``.
    """

    def __init__(self, items: Sequence[_Item], largest: int) -> None:
        self.items = [index for index, item in enumerate(items) if item.nbytes <= largest]
        self.aside = [index for index, item in enumerate(items) if item.nbytes > largest]
        self.count = len(self.items)
        self.sums = [0, *itertools.accumulate(items[index].nbytes for index in self.items)]
        self.total = self.sums[-1]
        self.aside_bytes = sum(items[index].nbytes for index in self.aside)
        leaf = max((items[index].leaf for index in self.aside), default=0)
        leaves = [leaf]
        for index in reversed(self.items):
            leaves.append(max(leaves[-1], items[index].leaf))
        self.leaves = leaves[::-1]
        """The largest layer of what is brought, by the place at which the last run ends."""
        self._sizes = [item.nbytes for item in items]
        self._away_sums: dict[int, list[int]] = {}

    def away(self, end: int) -> list[int]:
        """Return the items that are brought when the last run ends there, in order."""
        return sorted([*self.aside, *self.items[end:]])

    def away_sums(self, end: int) -> list[int]:
        """Return the running sum of their bytes, from 0."""
        if end not in self._away_sums:
            self._away_sums[end] = [0, *itertools.accumulate(self._sizes[index] for index in self.away(end))]
        return self._away_sums[end]

    def away_bytes(self, end: int) -> int:
        """Return their bytes."""
        return self.aside_bytes + self.total - self.sums[end]

    def layer_beside(self, room: int) -> int:
        """Return the largest layer of what is brought at least, where all devices have so much room together."""
        return self.leaves[max(0, bisect.bisect_right(self.sums, room) - 1)]

    def runs(self, first_room: int, rooms: Mapping[str, int]) -> Iterator[Ends]:
        """Yield the runs that hold the most blocks from the start over each set of devices, smaller sets first.

        The first run is on the component's own device, under the name ""; the order of the others is the best there
        is. No run but the first is empty, and where all blocks have a place no more devices are tried. Of devices with
        equal room the first is used first.
        """
        sums, bits = self.sums, _bits(rooms)
        level: dict[int, Ends] = {0: self.alone(first_room)}
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

    def alone(self, room: int) -> Ends:
        """Return the run that holds the most blocks from the start on the component's own device."""
        return (("", self._end(0, room)),)

    def evenly(self, rooms: Sequence[tuple[str, int]], taken: int) -> Ends:
        """Return runs over these devices, in order, that fill the smallest share of each; all blocks have room.

        ``taken`` is what the first device holds beside them.
        """
        low, high, best = 0.0, 1.0, self._filled(rooms, 1.0, taken)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            runs = self._filled(rooms, middle, taken)
            low, high, best = (low, middle, runs) if runs[-1][1] == self.count else (middle, high, best)
        return best

    def _filled(self, rooms: Sequence[tuple[str, int]], share: float, taken: int) -> Ends:
        runs, start = list[tuple[str, int]](), 0
        for device, room in rooms:
            start, taken = self._end(start, int(room * share) - taken), 0
            runs.append((device, start))
        return tuple(runs)

    def _end(self, start: int, room: int) -> int:
        """Where a run ends that starts there and has so much room."""
        return max(start, bisect.bisect_right(self.sums, self.sums[start] + room) - 1)


class Cut(NamedTuple):
    """A component in parts: what parents of blocks hold is on ``home``, the blocks of the row stay up to the last end.

    ``resting`` are the places of all others, in order, each for so many of them. ``held`` are the bytes of the
    component on each device at all times; ``layer`` those that come to its own one after the other; ``seconds`` the
    price of the whole.
    """

    home: str
    row: Row
    ends: Ends
    resting: tuple[tuple[Place, int], ...]
    held: Mapping[str, int]
    layer: int
    seconds: float


class Blocks:
    """The blocks of a layout, those that share a weight as one."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        groups: dict[str, list[str]] = {}
        blocks = {block.path: block for block in layout.blocks()}
        holders = holders_of([*blocks.values()])
        self._at_home = [path for path, holder in holders.items() if holder is None]
        for path, holder in holders.items():
            if holder is not None:
                groups.setdefault(holder, []).append(path)
        self.items = [
            _Item(
                tuple(paths),
                sum(blocks[path].nbytes for path in paths),
                max(blocks[path].largest_leaf_bytes for path in paths),
            )
            for paths in groups.values()
        ]
        self.total = sum(item.nbytes for item in self.items)
        self.outside = sum(module.own_bytes for module in layout.modules) - self.total
        sizes = sorted({item.nbytes for item in self.items}, reverse=True) or [0]
        steps = (size for larger, size in itertools.pairwise(sizes) if larger >= _LARGE * size)
        self.rows = [Row(self.items, size) for size in (sizes[0], *steps)]
        """All blocks, then without those that are twice as large as the others, or more, and so on."""

    def places(self, cut: Cut) -> Mapping[str, Place]:
        """Return the place of each part of a component that is cut so."""
        home, start = Place(cut.home), 0
        by_path = dict.fromkeys(self._at_home, home)
        for device, end in cut.ends:
            by_path |= dict.fromkeys(self._paths(cut.row.items[start:end]), Place(device))
            start = end
        away = cut.row.away(start)
        for place, count in cut.resting:
            by_path |= dict.fromkeys(self._paths(away[:count]), place)
            away = away[count:]
        return joined(self.layout, by_path, home)

    def _paths(self, items: Sequence[int]) -> Iterator[str]:
        return (path for index in items for path in self.items[index].paths)


def _bits(rooms: Mapping[str, int]) -> list[tuple[str, int, int, int]]:
    """Each device and its room with a bit of its own, and that of the device before it which has as much room."""
    last: dict[int, int] = {}
    bits: list[tuple[str, int, int, int]] = []
    for index, (device, room) in enumerate(rooms.items()):
        bits.append((device, room, 1 << index, last.get(room, 0)))
        last[room] = 1 << index
    return bits
