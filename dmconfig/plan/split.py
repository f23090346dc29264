"""Components that are in parts: what each part weighs, and how blocks are spread over devices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dmconfig.layout import Block, Layout, chain_bytes, nearest_ancestor
from dmconfig.plan.requests import Place
from dmconfig.plan.uses import Load

_HALVINGS = 40


def part_name(component: str, path: str) -> str:
    """Return the key of a device map that names a part."""
    return f"{component}.{path}" if path else component


def part_loads(
    layout: Layout, paths: Iterable[str], *, stays: bool, working: Mapping[str, int] | None = None
) -> Mapping[str, Load]:
    """Return what each part weighs: every module counts for the longest path it is within, "" for the rest.

    What the component itself owns, and a module with parts below it, is on the device also while the rest is brought
    layer by layer.
    """
    moving: dict[str, dict[str, int]] = {path: {} for path in ("", *paths)}
    staying: Counter[str] = Counter()
    parents = {"", *(path[: dot.start()] for path in moving for dot in re.finditer(r"\.", path))}
    for module in layout.modules:
        part = nearest_ancestor(module.path, moving)
        if module.path in parents:
            staying[part] += module.own_bytes
        else:
            moving[part][module.path] = module.own_bytes
    return {
        path: Load(
            nbytes=staying[path] + sum(own.values()),
            largest_leaf_bytes=staying[path] + max(chain_bytes(own).values(), default=0),
            group_bytes=staying[path] + sum(own.values()),
            stays=stays,
            working=working or {},
        )
        for path, own in moving.items()
    }


class Room(NamedTuple):
    """The bytes that a device has left."""

    device: str
    nbytes: int


def spread(layout: Layout, rooms: Sequence[Room], brought: Place | None) -> Mapping[str, Place] | None:
    """Return the place of each part so that the component fits the rooms, or None when it does not.

    Blocks go to the devices in order, so that a call crosses from each to the next once, and as evenly as the rooms
    allow. With ``brought``, a place on the first device, the devices are filled as far as there is room, and the last
    blocks are brought. A layout that cannot be split goes whole to the first device with room. What parents of blocks
    hold themselves is on the first device; modules that share a weight stay together.
    """
    if not layout.can_split:
        return _whole(layout, rooms, brought)
    blocks, first, own = layout.blocks(), rooms[0], layout.outside_blocks_bytes
    places = evenly(blocks, rooms, own)
    leaf = max((block.largest_leaf_bytes for block in blocks), default=0)
    if places is None and brought is not None:
        places = _filled(blocks, rooms, own + leaf, 1.0, brought)
    return None if places is None else joined(layout, places, Place(first.device))


def _whole(layout: Layout, rooms: Sequence[Room], brought: Place | None) -> Mapping[str, Place] | None:
    load = part_loads(layout, (), stays=False)[""]
    device = next((room.device for room in rooms if room.nbytes >= load.nbytes), None)
    if device is not None:
        return {"": Place(device)}
    return {"": brought} if brought is not None and load.largest_leaf_bytes <= rooms[0].nbytes else None


def evenly(blocks: Sequence[Block], rooms: Sequence[Room], taken: int) -> Mapping[str, Place] | None:
    """Fill the same share of every room, the smallest that holds all blocks."""
    best = _filled(blocks, rooms, taken, 1.0, None)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS if best is not None else 0):
        middle = (low + high) / 2
        found = _filled(blocks, rooms, taken, middle, None)
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    return best


def _filled(
    blocks: Sequence[Block], rooms: Sequence[Room], taken: int, share: float, otherwise: Place | None
) -> dict[str, Place] | None:
    """Deal blocks out in order, to each device up to this share of its room; what is left goes elsewhere, if it may.

    ``taken`` is what the first device holds beside them.
    """
    holders = holders_of(blocks)
    weights: Counter[str | None] = Counter()
    for block in blocks:
        weights[holders[block.path]] += block.nbytes
    left = [int(room.nbytes * share) for room in rooms]
    left[0] -= taken + weights[None]
    if left[0] < 0:
        return None
    places: dict[str | None, Place] = {None: Place(rooms[0].device)}
    current = 0
    for path in (block.path for block in blocks if holders[block.path] == block.path):
        index = next((index for index in range(current, len(rooms)) if weights[path] <= left[index]), None)
        if index is not None:
            current, places[path] = index, Place(rooms[index].device)
            left[index] -= weights[path]
        elif otherwise is not None:
            places[path] = otherwise
        else:
            return None
    return {path: places[holder] for path, holder in holders.items()}


def holders_of(blocks: Sequence[Block]) -> Mapping[str, str | None]:
    """Return the block that each goes with: itself, or the one that shares a weight and comes first.

    None: a parent of blocks holds that weight.
    """
    holders: dict[str, str | None] = {}
    for block in blocks:
        shared = block.shares_with
        holders[block.path] = block.path if shared is None else holders.get(nearest_ancestor(shared, holders))
    return holders


def joined(layout: Layout, places: Mapping[str, Place], first: Place) -> Mapping[str, Place]:
    """Return the place of each part, a parent named once where all below it share one: the map one would write."""
    whole = _whole_places(layout, places, first)
    joined: dict[str, Place] = {"": first}
    for module in layout.modules:
        place = whole[module.path]
        if place is not None and place != joined[nearest_ancestor(module.path, joined)]:
            joined[module.path] = place
    return joined


def _whole_places(layout: Layout, places: Mapping[str, Place], first: Place) -> Mapping[str, Place | None]:
    """The place that all of a module has, or None where it has several, or no weights."""
    whole: dict[str, Place | None] = {}
    below: dict[str, set[Place | None]] = {}
    for module in reversed(layout.modules):  # children before their parents
        path = module.path
        whole[path] = places.get(path)
        if path not in places:
            if path not in below:
                continue  # within a block, or without weights
            shared = below[path]
            (only,) = shared if len(shared) == 1 else {None}
            whole[path] = only if only == first or not module.own_bytes else None
        if path:
            below.setdefault(path.rpartition(".")[0], set()).add(whole[path])
    return whole
