"""Spreading a component over devices, held against a brute force of its own on made-up layouts of single bytes."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from dmconfig.layout import LaidOutModule, Layout
from dmconfig.plan.model import Residency
from dmconfig.plan.requests import Place
from dmconfig.plan.split import Room, part_loads, part_name, spread

SEEDS = range(300)
DEVICES = ("cuda:0", "cuda:1", "cuda:2")
BROUGHT = Place("cuda:0", Residency.PER_LEAF)


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: Layout
    rooms: tuple[Room, ...]
    brought: Place | None

    def answer(self) -> Mapping[str, Place] | None:
        """What the product answers."""
        return spread(self.layout, self.rooms, self.brought)


# A second reading of the rules, sharing no code with the product


def place_of(path: str, places: Mapping[str, Place]) -> Place:
    """The place of a module: that of the longest path in the map that it is, or is below."""
    words = path.split(".") if path else []
    longest = next(n for n in range(len(words), -1, -1) if ".".join(words[:n]) in places)
    return places[".".join(words[:longest])]


def below(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(f"{ancestor}.") or not ancestor


def units_of(layout: Layout) -> list[list[LaidOutModule]]:
    """What moves as one, in order: a topmost whole module with all below it, and all that shares a weight with it.

    Last comes what stays on the first device: the parents of whole modules, and what shares a weight with those.
    """
    tops: list[str] = []
    for module in layout.modules:
        if module.whole and not any(below(module.path, top) for top in tops):
            tops.append(module.path)
    units: dict[str | None, list[LaidOutModule]] = {top: [] for top in tops}
    units[None] = []
    goes_with: dict[str | None, str | None] = {None: None}
    for module in layout.modules:
        top = next((top for top in tops if below(module.path, top)), None)
        if top not in goes_with:
            inside = [each for each in layout.modules if below(each.path, str(top)) and each.shares_with is not None]
            holder = next((each.shares_with for each in inside if not below(str(each.shares_with), str(top))), None)
            held_by = next((other for other in tops if holder is not None and below(holder, other)), None)
            goes_with[top] = top if holder is None else goes_with[held_by]
        units[goes_with[top]].append(module)
    movable = [unit for top, unit in units.items() if top is not None and size_of(unit)]
    return [*movable, units[None]]


def size_of(unit: Sequence[LaidOutModule]) -> int:
    return sum(module.own_bytes for module in unit)


def least_share(case: Case) -> float | None:
    """The smallest largest share of a room over every way to cut the units in order; None where no cut fits."""
    *units, staying = units_of(case.layout)
    shares = []
    for cuts in itertools.combinations_with_replacement(range(len(units) + 1), len(case.rooms) - 1):
        bounds = [0, *cuts, len(units)]
        held = [sum(map(size_of, units[start:end])) for start, end in itertools.pairwise(bounds)]
        held[0] += size_of(staying)
        if all(nbytes <= room.nbytes for nbytes, room in zip(held, case.rooms, strict=True)):
            shares.append(share_of(held, case.rooms))
    return min(shares, default=None)


def share_of(held: Sequence[int], rooms: Sequence[Room]) -> float:
    return max((nbytes / room.nbytes for nbytes, room in zip(held, rooms, strict=True) if nbytes), default=0)


def held_by(case: Case, places: Mapping[str, Place]) -> list[int]:
    """The bytes that stay on each device."""
    held: Counter[str] = Counter()
    for module in case.layout.modules:
        place = place_of(module.path, places)
        held[place.device] += module.own_bytes if place.residency is Residency.ALWAYS else 0
    return [held[room.device] for room in case.rooms]


def brought_modules(case: Case, places: Mapping[str, Place]) -> list[LaidOutModule]:
    return [each for each in case.layout.modules if each.own_bytes and place_of(each.path, places) == BROUGHT]


# Made-up layouts


def random_case(seed: int) -> Case:
    """A tree of up to three levels; some parents own tensors, some modules are kept whole, some share a weight."""
    rng = random.Random(seed)  # noqa: S311 - toy numbers
    modules = tied(rng, [*random_tree(rng, "", 0)]) if rng.random() < 0.3 else [*random_tree(rng, "", 0)]
    total = sum(module.own_bytes for module in modules)
    count = rng.randint(1, 3)
    rooms = [Room(device, rng.randint(0, max(1, 2 * total // count))) for device in DEVICES[:count]]
    layout = Layout(modules=tuple(modules), can_split=rng.random() < 0.95)
    return Case(layout=layout, rooms=tuple(rooms), brought=rng.choice([None, BROUGHT]))


def random_tree(rng: random.Random, path: str, depth: int) -> Iterator[LaidOutModule]:
    children = rng.randint(1, 4) if depth == 0 else rng.choice([0, 0, 2, 3]) if depth < 3 else 0
    own = rng.choice([0, 0, 0, 1, 2]) if children else rng.choice([0, 1, 2, 3, 4, 5, 8])
    yield LaidOutModule(path, own, whole=not children or (depth > 0 and rng.random() < 0.3))
    for index in range(children):
        yield from random_tree(rng, f"{path}.{index}" if path else str(index), depth + 1)


def tied(rng: random.Random, modules: list[LaidOutModule]) -> list[LaidOutModule]:
    """The modules with the last leaf sharing a weight with another module, and with 0 to 2 bytes beside it."""
    holder = rng.choice(modules[:-1])
    return [*modules[:-1], modules[-1]._replace(own_bytes=rng.randint(0, 2), shares_with=holder.path)]


@pytest.mark.parametrize("seed", SEEDS)
def test_spread_is_as_even_as_cuts_in_order_can_be(seed: int) -> None:
    """There is an answer without bringing anything just where some cut fits, and no cut has a smaller largest share."""
    case = replace(random_case(seed), brought=None)
    case = replace(case, layout=replace(case.layout, can_split=True))

    places = case.answer()

    best = least_share(case)
    assert (places is None) == (best is None)
    if places is not None:
        assert share_of(held_by(case, places), case.rooms) == pytest.approx(best)


@pytest.mark.parametrize("seed", SEEDS)
def test_spread_keeps_every_promise(seed: int) -> None:
    """No room is exceeded, what parents own is on the first device, what moves as one has one place."""
    case = random_case(seed)
    before = copy.deepcopy(case)

    places = case.answer()

    assert case == before
    assert places == case.answer()
    if places is None:
        return
    allowed = {*(Place(room.device) for room in case.rooms), *([BROUGHT] if case.brought else [])}
    assert {*places.values()} <= allowed
    held, brought = held_by(case, places), brought_modules(case, places)
    if brought:
        held[0] += max(module.own_bytes for module in brought)
    assert all(nbytes <= room.nbytes for nbytes, room in zip(held, case.rooms, strict=True))
    *units, staying = units_of(case.layout)
    for unit in units:
        assert len({place_of(module.path, places) for module in unit if module.own_bytes or module.shares_with}) == 1
    if case.layout.can_split:
        parents = [module for module in staying if module.own_bytes or module.shares_with]
        assert {place_of(module.path, places) for module in parents} <= {Place("cuda:0")}


@pytest.mark.parametrize("seed", SEEDS)
def test_spread_deals_devices_out_in_order(seed: int) -> None:
    """A call crosses from each device to the next at most once; what is brought does not count."""
    case = random_case(seed)
    places = case.answer()
    if places is None:
        return
    *units, _ = units_of(case.layout)
    first = [place_of(next(m for m in unit if m.own_bytes).path, places) for unit in units]
    order = [DEVICES.index(place.device) for place in first if place.residency is Residency.ALWAYS]
    assert order == sorted(order)


@pytest.mark.parametrize("seed", SEEDS)
def test_spread_brings_nothing_that_fits(seed: int) -> None:
    """Where a file allows bringing, it gives the answer without it wherever there is one, and else one that brings."""
    case = replace(random_case(seed), brought=BROUGHT)
    without = replace(case, brought=None).answer()
    places = case.answer()
    if without is not None:
        assert places == without
    elif places is not None:
        assert brought_modules(case, places)


@pytest.mark.parametrize("seed", SEEDS)
def test_spread_more_room_is_never_worse(seed: int) -> None:
    """With a larger room there is an answer where there was one; without bringing, at no larger share."""
    case = random_case(seed)
    if case.answer() is None:
        return
    for index, room in enumerate(case.rooms):
        rooms = list(case.rooms)
        rooms[index] = room._replace(nbytes=room.nbytes + 3)
        assert replace(case, rooms=tuple(rooms)).answer() is not None


@pytest.mark.parametrize("seed", SEEDS)
def test_spread_names_no_module_for_nothing(seed: int) -> None:
    """The map is as short as a person would write it: every line but the first changes the place of something."""
    case = random_case(seed)
    places = case.answer() or {}
    for path in places:
        shorter = {other: place for other, place in places.items() if other != path or not path}
        moved = [m for m in case.layout.modules if place_of(m.path, shorter) != place_of(m.path, places)]
        assert not path or any(module.own_bytes or module.shares_with for module in moved)


@pytest.mark.parametrize("seed", SEEDS)
def test_part_loads_count_every_module_once(seed: int) -> None:
    """Each module counts for the longest path above it; what is there at once is what stays and the largest layer."""
    case = random_case(seed)
    rng = random.Random(seed)  # noqa: S311 - toy numbers
    paths = rng.sample([module.path for module in case.layout.modules if module.path], rng.randint(0, 1))
    paths += [module.path for module in case.layout.modules if module.path and rng.random() < 0.3]
    paths = [*dict.fromkeys(paths)]

    loads = part_loads(case.layout, paths, stays=True)

    assert loads.keys() == {"", *paths}
    keys = dict.fromkeys(loads, Place("cuda:0"))
    for path, load in loads.items():
        others = {**keys, path: BROUGHT}
        own = [module for module in case.layout.modules if place_of(module.path, others) == BROUGHT]
        stay = [m for m in own if not m.path or any(below(p, m.path) and p != m.path for p in paths)]
        assert load.nbytes == load.group_bytes == size_of(own)
        moving = [module for module in own if module not in stay]
        layers = [size_of([each for each in moving if below(module.path, each.path)]) for module in moving]
        assert load.peak_bytes(Residency.PER_LEAF) == size_of(stay) + max(layers, default=0)
        assert load.stays


def test_random_cases_are_of_all_kinds() -> None:
    """The cases are neither all hopeless nor all easy: spread, brought, whole and refused are among them."""
    cases = [random_case(seed) for seed in SEEDS]
    answers = [(case, case.answer()) for case in cases]
    assert 0.3 < sum(places is not None for _, places in answers) / len(cases) < 0.9
    assert sum(len({p.device for p in (places or {}).values()}) > 1 for _, places in answers) > 50
    assert sum(bool(places and brought_modules(case, places)) for case, places in answers) > 20
    assert sum(not case.layout.can_split and places is not None for case, places in answers) > 5
    assert sum(any(m.shares_with is not None for m in case.layout.modules) for case in cases) > 40


# By hand


def layout_from(
    *modules: tuple[str, int], whole: Sequence[str] = (), shared: Mapping[str, str] | None = None
) -> Layout:
    """A layout that can be split; modules without any below them are whole."""
    paths = [path for path, _ in modules]
    parents = {path.rpartition(".")[0] for path in paths if path}
    return Layout(
        modules=tuple(
            LaidOutModule(path, nbytes, path in whole or path not in parents, (shared or {}).get(path))
            for path, nbytes in modules
        ),
        can_split=True,
    )


def devices(places: Mapping[str, Place] | None) -> dict[str, str] | None:
    """Path -> device of each part, with a star where it is brought."""
    star = {Residency.ALWAYS: "", Residency.PER_LEAF: "*"}
    return None if places is None else {path: place.device + star[place.residency] for path, place in places.items()}


ROW = layout_from(("", 0), ("blocks", 0), *((f"blocks.{index}", 10) for index in range(4)), ("out", 2))
"""Four blocks of 10 bytes, and 2."""


def rooms(*sizes: int) -> list[Room]:
    return [Room(device, size) for device, size in zip(DEVICES, sizes, strict=False)]


def test_spread_cuts_at_the_middle() -> None:
    """20 | 22 of 100 and 100; the second device of half the size gets half as many: 30 | 12."""
    assert devices(spread(ROW, rooms(100, 100), None)) == {
        "": "cuda:0",
        "blocks.2": "cuda:1",
        "blocks.3": "cuda:1",
        "out": "cuda:1",
    }
    assert devices(spread(ROW, rooms(100, 50), None)) == {"": "cuda:0", "blocks.3": "cuda:1", "out": "cuda:1"}


def test_spread_exact_fit_fits() -> None:
    """22 of 22 and 20 of 20; one byte less on either is too little."""
    assert spread(ROW, rooms(20, 22), None) is not None
    assert spread(ROW, rooms(20, 21), None) is None
    assert spread(ROW, rooms(19, 22), None) is None


def test_spread_leaves_a_device_out_that_holds_no_block() -> None:
    """A device of 5 bytes between two of 30 takes nothing, and is no hindrance."""
    places = spread(ROW, rooms(30, 5, 30), None)
    assert places is not None
    assert {place.device for place in places.values()} == {"cuda:0", "cuda:2"}


def test_spread_all_on_a_later_device_is_one_part() -> None:
    """With no room on the first device, all is on the second; not where the component itself owns something."""
    assert devices(spread(ROW, rooms(0, 50), None)) == {"": "cuda:1"}
    owning = layout_from(("", 1), ("a", 5), ("b", 5))
    assert spread(owning, rooms(0, 50), None) is None
    assert devices(spread(owning, rooms(1, 50), None)) == {"": "cuda:0", "a": "cuda:1", "b": "cuda:1"}


def test_spread_counts_what_parents_own_as_on_the_first_device() -> None:
    """6 that the component owns beside 5 + 5 + 5: 11 and 10 are more even than 6 and 15, which is even of blocks."""
    owning = layout_from(("", 6), ("a", 5), ("b", 5), ("c", 5))
    assert devices(spread(owning, rooms(20, 20), None)) == {"": "cuda:0", "b": "cuda:1", "c": "cuda:1"}
    assert devices(spread(owning, rooms(20, 15), None)) == {"": "cuda:0", "b": "cuda:1", "c": "cuda:1"}


def test_spread_joins_what_is_below_one_parent() -> None:
    """Both layers of a block that may be cut are on one device, so the block is named, not its layers."""
    layout = layout_from(("", 0), ("a", 0), ("a.x", 5), ("a.y", 5), ("b", 0), ("b.x", 5), ("b.y", 5))
    assert devices(spread(layout, rooms(10, 10), None)) == {"": "cuda:0", "b": "cuda:1"}


def test_spread_keeps_a_block_whole() -> None:
    """A block of 6 + 6 that the class keeps whole is not cut at its middle, so 12 | 6 it is."""
    layout = layout_from(("", 0), ("a", 0), ("a.x", 6), ("a.y", 6), ("b", 6), whole=["a"])
    assert devices(spread(layout, rooms(20, 20), None)) == {"": "cuda:0", "b": "cuda:1"}
    assert spread(layout, rooms(9, 9), None) is None


def test_spread_brings_the_last_blocks() -> None:
    """20 hold a block beside a layer of 10 that is brought, 12 another and the last 2: the two between are brought."""
    assert devices(spread(ROW, rooms(20, 12), BROUGHT)) == {
        "": "cuda:0",
        "blocks.1": "cuda:1",
        "blocks.2": "cuda:0*",
        "blocks.3": "cuda:0*",
        "out": "cuda:1",
    }


def test_spread_brings_all_as_one_part() -> None:
    """A first device that holds just one layer: the component is brought layer by layer, as a whole."""
    assert devices(spread(ROW, rooms(10), BROUGHT)) == {"": "cuda:0*"}
    assert spread(ROW, rooms(9), BROUGHT) is None


def test_spread_shared_weight_stays_together() -> None:
    """A head that shares the embedding's weight, with 3 bytes of its own, is where the embedding is, and paid there."""
    layout = layout_from(("", 0), ("embed", 10), ("a", 10), ("b", 10), ("head", 3), shared={"head": "embed"})
    assert devices(spread(layout, rooms(13, 20), None)) == {"": "cuda:0", "a": "cuda:1", "b": "cuda:1"}
    assert spread(layout, rooms(12, 20), None) is None


def test_spread_weight_shared_with_a_parent_is_on_the_first_device() -> None:
    """What shares a weight that the component itself owns is where that is."""
    layout = layout_from(("", 4), ("a", 10), ("b", 10), ("head", 0), shared={"head": ""})
    assert devices(spread(layout, rooms(14, 10), None)) == {"": "cuda:0", "b": "cuda:1"}


def test_spread_of_a_class_that_says_nothing_goes_whole() -> None:
    """Without word of what stays whole, the component goes to the first device with room for all, or is brought."""
    whole = replace(ROW, can_split=False)
    assert devices(spread(whole, rooms(41, 42), None)) == {"": "cuda:1"}
    assert spread(whole, rooms(41, 41), None) is None
    assert devices(spread(whole, rooms(41, 41), BROUGHT)) == {"": "cuda:0*"}
    assert spread(whole, rooms(9, 41), BROUGHT) is None


def test_spread_whole_and_brought_keeps_what_the_component_owns() -> None:
    """3 that the component itself owns are there beside each layer of 10."""
    whole = replace(layout_from(("", 3), ("a", 10), ("b", 10)), can_split=False)
    assert spread(whole, rooms(12), BROUGHT) is None
    assert devices(spread(whole, rooms(13), BROUGHT)) == {"": "cuda:0*"}


def test_spread_of_a_component_without_blocks() -> None:
    """All is owned by parents of layers without weights: it is on the first device, or nowhere."""
    layout = layout_from(("", 5), ("act", 0))
    assert devices(spread(layout, rooms(5, 50), BROUGHT)) == {"": "cuda:0"}
    assert spread(layout, rooms(4, 50), None) is None


def test_part_name_is_the_key_of_a_device_map() -> None:
    """A part is named by component and path; the rest of a component by its name alone."""
    assert part_name("unet", "mid_block") == "unet.mid_block"
    assert part_name("unet", "") == "unet"


def test_part_loads_longest_path_wins() -> None:
    """A part of a part is not counted twice, and ``blocks.1`` is not ``blocks.10``."""
    layout = layout_from(
        ("", 1), ("blocks", 2), ("blocks.1", 0), ("blocks.1.x", 4), ("blocks.1.y", 8), ("blocks.10", 16)
    )
    loads = part_loads(layout, ["blocks", "blocks.1", "blocks.1.x"], stays=False)
    assert {path: load.nbytes for path, load in loads.items()} == {
        "": 1,
        "blocks": 18,
        "blocks.1": 8,
        "blocks.1.x": 4,
    }
