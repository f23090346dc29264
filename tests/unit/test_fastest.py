"""The search behind ``auto`` against a brute force of its own: made-up components of single bytes, on made-up machines.

The brute force shares the prices (they have tests of their own) and the values of the question with the search, and
nothing else: what a placement holds, whether it fits, and every way to cut a component are written anew.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmconfig.footprint import Footprint
from dmconfig.inventory import Device, Inventory, links_of, pair, speeds_of
from dmconfig.layout import LaidOutModule, Layout
from dmconfig.plan.calls import Runs
from dmconfig.plan.fastest import Fastest, Places, Question, fastest
from dmconfig.plan.model import Residency
from dmconfig.plan.prices import Prices
from dmconfig.plan.requests import Place, Request
from dmconfig.plan.uses import Limits, Load
from tests.seeds import over_seeds

ALWAYS, WHOLE = Residency.ALWAYS, Residency.WHILE_RUNNING
GROUP, LEAF = Residency.PER_GROUP, Residency.PER_LEAF
CPU, DISK = "cpu", "disk"
SEEDS = range(300)
TWO_SPLIT = range(60)

Cost = tuple[float, int, float, float]
"""Seconds, crossings from device to device, the fullest share, the sum of squared shares."""


# --- a second reading of the rules ---


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One way to place one component: what it adds to each device, and what it costs.

    ``held`` is there at all times; ``visits`` are the devices it runs on, with what is brought there and what is
    needed there beside what is held.
    """

    seconds: float
    crossings: int
    held: tuple[tuple[str, int], ...]
    visits: tuple[tuple[str, int, int], ...]


def whole_piece(name: str, place: Place, question: Question) -> Piece:
    """A component in one place."""
    load, working = question.loads[name], question.loads[name].working.get(place.device, 0)
    there = {LEAF: load.largest_leaf_bytes, GROUP: load.group_bytes}.get(place.residency, load.nbytes)
    held, brought = [(place.device, there)], 0
    if place.residency is not ALWAYS:
        if not load.stays:
            held, brought = [], there
        held.append((place.storage, load.nbytes))
    seconds = question.prices.seconds(name, place, load.nbytes)
    return Piece(seconds=seconds, crossings=0, held=(*held,), visits=((place.device, brought, brought + working),))


@dataclass(frozen=True)
class Cut:
    """A split: where each block stays, in order, or what it is brought from to the first device, ``home``."""

    home: str
    blocks: tuple[str, ...]

    @property
    def brought(self) -> list[int]:
        """The blocks that are brought."""
        return [index for index, place in enumerate(self.blocks) if place in (CPU, DISK)]


def cut_piece(name: str, cut: Cut, question: Question) -> Piece:
    """A component in parts: parents' own tensors at home, room for the largest layer of those that are brought."""
    load, layout = question.loads[name], question.layouts[name]
    blocks, outside = blocks_of(layout)
    devices = [cut.home, *dict.fromkeys(d for d in cut.blocks if d not in (CPU, DISK, cut.home))]
    held = [(cut.home, outside), *((d, sum(block)) for d, block in zip(cut.blocks, blocks, strict=True))]
    visits = [(d, 0, load.working.get(d, 0)) for d in devices]
    seconds = 0.0
    if cut.brought:
        layer = max(max(blocks[index]) for index in cut.brought)
        if load.stays:
            held.append((cut.home, layer))
        else:
            visits.append((cut.home, layer, layer + load.working.get(cut.home, 0)))
        for storage in (CPU, DISK):
            away = sum(sum(blocks[index]) for index in cut.brought if cut.blocks[index] == storage)
            seconds += question.prices.seconds(name, Place(cut.home, LEAF, storage), away)
    return Piece(seconds=seconds, crossings=len(devices) - 1, held=(*held,), visits=(*visits,))


def blocks_of(layout: Layout) -> tuple[list[list[int]], int]:
    """The bytes of the layers of each block that holds any, in order, and what the parents of blocks hold."""
    tops: dict[str, list[int]] = {}
    for module in layout.modules:
        if module.whole and not any(module.path.startswith(f"{top}.") for top in tops):
            tops[module.path] = []
    outside = 0
    for module in layout.modules:
        top = next((top for top in tops if f"{module.path}.".startswith(f"{top}.")), None)
        if top is None:
            outside += module.own_bytes
        else:
            tops[top].append(module.own_bytes)
    return [layers for layers in tops.values() if sum(layers)], outside


def cuts(name: str, question: Question) -> Iterator[Cut]:
    """Every split: runs of any lengths over devices in any order, the own device's first and maybe empty.

    What is brought rests on the cpu as to its first blocks, and as to the others on disk, or the other way around where
    that is faster; never in memory that the accelerator has itself.
    """
    blocks = blocks_of(question.layouts[name])[0]
    places = {place.storage: place for place in question.requests[name].places if place.residency is LEAF}
    storages = [
        each
        for each in sorted(places, key=lambda each: question.prices.seconds(name, places[each], 1))
        if not (each == CPU and question.limits.unified)
    ]
    for staying in rows_of(blocks):
        longest = 1 if name in question.together else len(accelerators_of(question))
        for devices in orders(accelerators_of(question), longest):
            for ends in itertools.combinations_with_replacement(range(len(staying) + 1), len(devices)):
                lengths = [end - start for start, end in itertools.pairwise((0, *ends))]
                if 0 in lengths[1:]:
                    continue  # the same as without that device
                places = [d for d, length in zip(devices, lengths, strict=True) for _ in range(length)]
                there = dict(zip(staying, places, strict=False))
                away = [index for index in range(len(blocks)) if index not in there]
                for resting in rests(len(away), storages):
                    if there or len({*resting}) == 2:  # all brought from one place is no split
                        where = there | dict(zip(away, resting, strict=True))
                        yield Cut(devices[0], tuple(where[index] for index in range(len(blocks))))


def rows_of(blocks: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """The blocks that may stay: all, or without those that are at least twice as large as all others."""
    sizes = [sum(block) for block in blocks]
    yield [*range(len(blocks))]
    for most in {*sizes} - {max(sizes, default=0)}:
        if min(size for size in sizes if size > most) >= 2 * most:
            yield [index for index, size in enumerate(sizes) if size <= most]


def rests(count: int, storages: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every way to have the first of so many blocks rest in one place and all others in the next."""
    first_counts = range(count + 1) if len(storages) > 1 else [count] if storages or not count else []
    for first in first_counts:
        yield (*storages[:1] * first, *storages[1:] * (count - first))


def orders(devices: Sequence[str], longest: int) -> Iterator[tuple[str, ...]]:
    for size in range(1, min(longest, len(devices)) + 1):
        yield from itertools.permutations(devices, size)


def accelerators_of(question: Question) -> list[str]:
    return [device for device, budget in question.limits.budgets.items() if device not in (CPU, DISK) and budget]


def total(pieces: Sequence[Piece], limits: Limits) -> Cost | None:
    """What pieces cost together; None where they do not fit."""
    held, brought, visiting = (dict.fromkeys(limits.budgets, 0) for _ in range(3))
    for piece in pieces:
        for device, nbytes in piece.held:
            held[device] += nbytes
        for device, nbytes, need in piece.visits:
            brought[device] = max(brought[device], nbytes)
            visiting[device] = max(visiting[device], need)
    shared = 0
    for device, budget in limits.budgets.items():
        reserve = 0 if device in (CPU, DISK) else limits.reserves.get(device, limits.reserve)
        if held[device] + brought[device] == 0:
            continue
        need = held[device] + max(brought[device], visiting[device]) + reserve
        if need > budget:
            return None
        shared += need if device in limits.unified else 0
    if shared and shared + held[CPU] > limits.budgets[CPU]:
        return None
    budgets = {device: budget for device, budget in limits.budgets.items() if device not in (CPU, DISK) and budget}
    shares = [(held[device] + brought[device]) / budget for device, budget in budgets.items()]
    return (
        round(sum(piece.seconds for piece in pieces), 9),
        sum(piece.crossings for piece in pieces),
        round(max(shares, default=0), 9),
        round(sum(share**2 for share in shares), 9),
    )


def pieces_of(name: str, question: Question, *, split: bool = True) -> list[Piece]:
    """Every way to place a component."""
    request = question.requests[name]
    pieces = [whole_piece(name, place, question) for place in request.places]
    if split and name in question.layouts and len(request.places) > 1:
        pieces += [cut_piece(name, cut, question) for cut in cuts(name, question)]
    return not_worse(pieces)


def not_worse(pieces: Sequence[Piece]) -> list[Piece]:
    """The cheapest of those that hold and need the same, over the fewest devices."""
    best: dict[object, Piece] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.seconds, piece.crossings)):
        held: dict[str, int] = {}
        for device, nbytes in piece.held:
            held[device] = held.get(device, 0) + nbytes
        best.setdefault((frozenset(held.items()), frozenset(piece.visits)), piece)
    return [*best.values()]


def brute_force(question: Question, *, split: Sequence[str] | None = None) -> Cost | None:
    """The least cost over every combination; only these components may be split, or all that have a layout.

    What does not fit, or costs more already, is not gone on with: neither gets better by more components.
    """
    may_split = question.layouts if split is None else split
    every = [pieces_of(name, question, split=name in may_split) for name in question.requests]
    best: Cost | None = None

    def go_on(pieces: list[Piece]) -> None:
        nonlocal best
        cost = total(pieces, question.limits)
        if cost is None or (best is not None and cost[:2] > best[:2]):
            return
        if len(pieces) == len(every):
            best = cost if best is None else min(best, cost)
            return
        for piece in every[len(pieces)]:
            go_on([*pieces, piece])

    go_on([])
    return best


# --- reading an answer ---


def cost_of(places: Mapping[str, Places], question: Question) -> Cost | None:
    """What an answer costs by the rules above; None where it does not fit. Asserts that every part is a legal one."""
    return total([piece_of(name, parts, question) for name, parts in places.items()], question.limits)


def piece_of(name: str, parts: Places, question: Question) -> Piece:
    if len(parts) == 1:
        place = parts[""]
        # a component whose blocks are all brought, and whose parents own nothing, is one that is brought
        assert place in question.requests[name].places
        return whole_piece(name, place, question)
    return cut_piece(name, cut_of(parts, question.layouts[name]), question)


def cut_of(parts: Places, layout: Layout) -> Cut:
    """The split that a map of parts is: runs in order, each device once, and the brought ones last or set aside."""
    home = parts[""]
    assert home.residency is ALWAYS
    places: dict[str, Place] = {}
    for module in layout.modules:
        top = next((path for path in places if module.path.startswith(f"{path}.")), None)
        place = place_of(module.path, parts)
        if top is not None:
            assert place == places[top]
        elif module.whole:
            places[module.path] = place
        elif module.own_bytes:
            assert place == home
    held = [path for path in places if any(m.own_bytes for m in layout.modules if f"{m.path}.".startswith(f"{path}."))]
    for path in held:
        assert places[path].residency in (ALWAYS, LEAF)
        assert places[path].residency is ALWAYS or places[path].device == home.device
    cut = Cut(home.device, tuple(places[path].storage_device for path in held))
    runs = [device for device, _ in itertools.groupby(place for place in cut.blocks if place not in (CPU, DISK))]
    assert len({*runs}) == len(runs)
    assert home.device not in runs[1:]
    resting = [cut.blocks[index] for index in cut.brought]
    assert len([*itertools.groupby(resting)]) <= 2
    staying = [index for index in range(len(held)) if index not in cut.brought]
    assert any(staying == row[: len(staying)] for row in rows_of(blocks_of(layout)[0]))
    return cut


def place_of(path: str, parts: Places) -> Place:
    words = path.split(".") if path else []
    longest = next(n for n in range(len(words), -1, -1) if ".".join(words[:n]) in parts)
    return parts[".".join(words[:longest])]


# --- made-up cases ---


@functools.cache
def random_case(seed: int, *, splits: int | None = None) -> Question:
    """A case that is always the same for a seed."""
    return made_up_case(random.Random(seed), splits)  # noqa: S311 - toy numbers


def made_up_case(rng: random.Random, splits: int | None = None) -> Question:
    """Up to five components, four accelerators, cpu and disk; some pins, budgets of nothing, reserves that differ."""
    splits = rng.choice([0, 0, 1, 1, 1]) if splits is None else splits
    count = rng.randint(1, 4)
    unified = count == 1 and rng.random() < 0.25
    accelerators = ["mps:0"] if unified else [f"cuda:{index}" for index in range(count)]
    budgets = {device: rng.choice([0, 6, 10, 10, 10, 15, 20]) for device in accelerators}
    budgets |= {CPU: rng.choice([0, 10, 20, 40, 100]), DISK: rng.choice([0, 0, 15, 1000])}
    limits = Limits(
        budgets=budgets,
        reserve=rng.choice([0, 0, 1, 3]),
        reserves={device: rng.choice([0, 1, 2, 4]) for device in accelerators if rng.random() < 0.2},
        unified=("mps:0",) if unified else (),
    )
    parts = rng.randint(max(1, splits), 5)
    layouts = {f"part_{index}": random_layout(rng) for index in range(splits)}
    usable = [device for device in accelerators if budgets[device]]
    everywhere = all_places(accelerators, [CPU, DISK]) + [Place(device, GROUP) for device in accelerators]
    names = [f"part_{index}" for index in range(parts)]
    loads = {name: random_load(rng, layouts.get(name), accelerators) for name in names}
    requests: dict[str, Request] = {}
    for name in names:
        storages = [CPU, DISK] if budgets[DISK] and rng.random() < 0.7 else [CPU]
        is_pin = name not in layouts and rng.random() < 0.15
        places = [rng.choice(everywhere)] if is_pin else all_places(usable, storages)
        requests[name] = Request(tuple(places), "toy")
    prices = random_prices(rng, accelerators, budgets, names)
    together = frozenset(name for name in layouts if rng.random() < 0.2)
    return Question(requests=requests, loads=loads, limits=limits, prices=prices, layouts=layouts, together=together)


def all_places(accelerators: Sequence[str], storages: Sequence[str]) -> list[Place]:
    away = [Place(d, how, storage) for how in (WHOLE, LEAF) for storage in storages for d in accelerators]
    return [*(Place(device) for device in accelerators), *away, Place(CPU)]


def random_load(rng: random.Random, layout: Layout | None, accelerators: Sequence[str]) -> Load:
    size = rng.choice([0, 1, 2, 3, 4, 5, 7, 8, 10, 12, 20])
    leaf = rng.randint(min(1, size), size)
    if layout is not None:
        size = sum(module.own_bytes for module in layout.modules)
        leaf = max(module.own_bytes for module in layout.modules)
    works = rng.random() < 0.3
    return Load(
        nbytes=size,
        largest_leaf_bytes=leaf,
        group_bytes=rng.randint(leaf, size),
        stays=rng.random() < 0.2,
        working={device: rng.choice([1, 2, 3]) for device in accelerators if works and rng.random() < 0.8},
    )


def random_layout(rng: random.Random) -> Layout:
    """Two to five blocks of one or two layers; some parents own something."""
    modules = [LaidOutModule("", rng.choice([0, 0, 1]), False)]
    if rng.random() < 0.4:
        modules.append(LaidOutModule("embed", rng.randint(1, 3), True))
    modules.append(LaidOutModule("blocks", rng.choice([0, 0, 0, 2]), False))
    same = [rng.randint(1, 5) for _ in range(rng.randint(1, 2))]
    for index in range(rng.randint(2, 4)):
        layers = same if rng.random() < 0.6 else [rng.randint(1, 6)]
        modules.append(LaidOutModule(f"blocks.{index}", 0, True))
        modules += [LaidOutModule(f"blocks.{index}.{name}", layer, True) for name, layer in enumerate(layers)]
    return Layout(modules=tuple(modules), can_split=True)


def random_prices(
    rng: random.Random, accelerators: Sequence[str], budgets: Mapping[str, int], names: Sequence[str]
) -> Prices:
    """Links and speeds of which each way of bringing is sometimes the best."""
    same = rng.choice([4_000, 8_000])
    rates = {pair(CPU, device): same if rng.random() < 0.7 else rng.choice([2_000, 16_000]) for device in accelerators}
    machine = Inventory(
        accelerators=tuple(device_of(device, budgets[device]) for device in accelerators),
        host=device_of(CPU, budgets[CPU]),
        name="toy",
        unified=tuple(device for device in accelerators if device.startswith("mps")),
        links=links_of({**rates, pair(CPU, DISK): rng.choice([1_000, 3_000, 100_000])}),
        speeds=speeds_of({CPU: rng.choice([10**4, 10**5, 10**6])}),
        pageable_bytes_per_s=rng.choice([4_000, 100_000]),
    )
    size = Footprint(
        nbytes=0,
        dtype="float16",
        stored_dtype="float16",
        largest_leaf_bytes=0,
        largest_block_bytes=0,
        outside_blocks_bytes=0,
        needs_cast=False,
        measured_from="weights",
    )
    runs = {name: Runs(rng.choice([1, 1, 2, 3, 20]), rng.choice([1, 10, 100])) for name in names}
    return Prices(inventory=machine, runs=runs, footprints=dict.fromkeys(names, size))


def device_of(name: str, size: int) -> Device:
    return Device(id=name, description="toy", total_bytes=size, free_bytes=size)


@functools.cache
def found_for(seed: int) -> tuple[Fastest | None, Cost | None]:
    return answer(random_case(seed))


def answer(question: Question) -> tuple[Fastest | None, Cost | None]:
    """What the search answers, and what that costs by the rules above."""
    found = fastest(question)
    return found, None if found is None else cost_of(found.best.places, question)


def same(one: Cost | None, other: Cost | None, figures: int = 4) -> bool:
    """Whether costs are the same in so many figures."""
    if one is None or other is None:
        return one is other
    return one[0] == pytest.approx(other[0], abs=1e-8) and one[1:figures] == other[1:figures]


def with_budget(question: Question, device: str, nbytes: int) -> Question:
    budgets = {**question.limits.budgets, device: nbytes}
    return replace(question, limits=replace(question.limits, budgets=budgets))


def seconds_of(question: Question) -> float:
    return seconds_in(fastest(question))


def seconds_in(found: Fastest | None) -> float:
    return float("inf") if found is None else found.best.seconds


# --- held against the brute force ---


@over_seeds(SEEDS)
def test_fastest_equals_brute_force(seed: int) -> None:
    """There is an answer just where something fits; it takes as few seconds, over as few devices, as anything does.

    Of whole components it is also as even as anything of that price.
    """
    question, (found, cost) = random_case(seed), found_for(seed)
    best = brute_force(question)
    assert same(cost, best, figures=2 if question.layouts else 4)
    assert found is None or found.proven


@given(st.randoms(use_true_random=False))
@settings(max_examples=150, derandomize=True, database=None, deadline=None)
def test_fastest_equals_brute_force_whatever_the_case(rng: random.Random) -> None:
    """The same of cases that are looked for, and that shrink to the smallest that fails."""
    question = made_up_case(rng)
    found, cost = answer(question)
    assert same(cost, brute_force(question), figures=2 if question.layouts else 4)
    assert found is None or found.proven


@functools.cache
def best_of_two(seed: int) -> Cost | None:
    return brute_force(random_case(seed, splits=2))


@over_seeds(TWO_SPLIT)
def test_fastest_of_two_that_may_be_split(seed: int) -> None:
    """Never better than everything there is, and never worse than anything that splits at most one of the two."""
    question = random_case(seed, splits=2)
    found, cost = answer(question)
    everything = best_of_two(seed)
    one = min(filter(None, (brute_force(question, split=[name]) for name in question.layouts)), default=None)
    if everything is None:
        assert found is None
        return
    if cost is not None:
        assert found is not None
        assert cost[0] >= everything[0] - 1e-8
        assert found.bound_seconds <= everything[0] + 1e-8
    if one is not None:
        assert cost is not None
        assert cost[0] <= one[0] + 1e-8


def test_fastest_of_two_that_may_be_split_splits_both_where_it_must() -> None:
    """The restriction costs little: nearly every case of two is as fast as the best there is."""
    answers = [(answer(random_case(seed, splits=2))[1], best_of_two(seed)) for seed in TWO_SPLIT]
    feasible = [(cost, best) for cost, best in answers if best is not None]
    assert sum(same(cost, best, figures=2) for cost, best in feasible) > 0.95 * len(feasible)


def test_random_cases_are_of_all_kinds() -> None:
    """The cases are neither all hopeless nor all easy: every way to have a component is among the answers."""
    answers = [(random_case(seed), found_for(seed)[0]) for seed in SEEDS]
    found = [(case, each.best.places) for case, each in answers if each is not None]
    assert 0.5 < len(found) / len(answers) < 0.9
    free = [
        (places[name], case)
        for case, places in found
        for name, request in case.requests.items()
        if not request.pinned and case.loads[name].nbytes
    ]
    whole = [parts[""] for parts, _ in free if len(parts) == 1]
    ways = {(place.residency, place.device == CPU, place.storage) for place in whole}
    assert ways == {
        (ALWAYS, False, CPU), (ALWAYS, True, CPU), (WHOLE, False, CPU), (WHOLE, False, DISK), (LEAF, False, CPU),
        (LEAF, False, DISK),
    }  # fmt: skip
    split = [(parts, case) for parts, case in free if len(parts) > 1]
    assert len(split) > 25
    assert sum(all(place.residency is ALWAYS for place in parts.values()) for parts, _ in split) > 5
    assert {place.storage for parts, _ in split for place in parts.values() if place.residency is LEAF} == {CPU, DISK}
    assert sum(bool(case.limits.unified) for case, _ in found) > 5
    assert max(len({place.device for place in parts.values()}) for parts, _ in split) >= 3


# --- what holds for every answer ---


@over_seeds(SEEDS)
def test_fastest_keeps_every_promise(seed: int) -> None:
    """Every component once, pins where they are, the price is that of the places; the question is not changed."""
    question = random_case(seed)
    before = copy.deepcopy(question)
    found, cost = answer(question)
    assert question == before
    if found is None:
        return
    assert found.best.places.keys() == question.requests.keys()
    assert cost is not None
    assert found.best.seconds == pytest.approx(cost[0], abs=1e-8)
    assert found.bound_seconds <= found.best.seconds + 1e-9
    assert found.visited >= len(question.requests)
    for name, request in question.requests.items():
        assert not request.pinned or found.best.places[name] == {"": request.places[0]}


@over_seeds(SEEDS)
def test_fastest_runner_up_is_another_placement_and_no_better(seed: int) -> None:
    """The next best is one that fits, differs, and has no lower price."""
    question, (found, _) = random_case(seed), found_for(seed)
    if found is None or found.runner_up is None:
        return
    runner_up = cost_of(found.runner_up.places, question)
    assert runner_up is not None
    assert found.runner_up.places != found.best.places
    assert found.runner_up.seconds == pytest.approx(runner_up[0], abs=1e-8)
    assert found.runner_up.seconds >= found.best.seconds - 1e-9


def test_random_cases_have_runners_up() -> None:
    """The test above is not about nothing."""
    assert sum(bool((found := found_for(seed)[0]) and found.runner_up) for seed in SEEDS) > 30


@over_seeds(SEEDS)
def test_fastest_is_a_function_of_its_input(seed: int) -> None:
    """The same question has the same answer, in whatever order its components are.

    With its devices in another order, it costs as much.
    """
    question, (found, _) = random_case(seed), found_for(seed)
    assert fastest(question) == found
    rng = random.Random(seed)  # noqa: S311 - toy numbers

    def shuffled(mapping: Mapping[str, Any]) -> dict[str, Any]:
        return dict(rng.sample(list(mapping.items()), len(mapping)))

    again = replace(
        question,
        requests=shuffled(question.requests),
        loads=shuffled(question.loads),
        layouts=shuffled(question.layouts),
    )
    assert fastest(again) == found
    turned = replace(again, limits=replace(again.limits, budgets=shuffled(again.limits.budgets)))
    assert same(answer(turned)[1], None if found is None else cost_of(found.best.places, question), figures=2)


@over_seeds(SEEDS)
def test_fastest_renaming_devices_renames_the_answer(seed: int) -> None:
    """Nothing depends on what an accelerator is called: only on its place among the others."""
    question = random_case(seed)
    names = {device: f"xpu:{9 - index}" for index, device in enumerate(question.limits.budgets)}
    names |= {CPU: CPU, DISK: DISK}
    found, renamed = found_for(seed)[0], fastest(rename(question, names))
    if found is None or renamed is None:
        assert renamed is found
        return
    assert renamed.best.seconds == found.best.seconds
    assert renamed.best.places == {
        name: {path: rename_place(place, names) for path, place in parts.items()}
        for name, parts in found.best.places.items()
    }


def rename(question: Question, names: Mapping[str, str]) -> Question:
    limits, machine = question.limits, question.prices.inventory
    links = {pair(names[link.devices[0]], names[link.devices[1]]): link.bytes_per_s for link in machine.links}
    return replace(
        question,
        requests={
            name: Request(tuple(rename_place(place, names) for place in request.places), request.origin)
            for name, request in question.requests.items()
        },
        loads={
            name: replace(load, working={names[device]: nbytes for device, nbytes in load.working.items()})
            for name, load in question.loads.items()
        },
        limits=replace(
            limits,
            budgets={names[device]: budget for device, budget in limits.budgets.items()},
            reserves={names[device]: reserve for device, reserve in limits.reserves.items()},
            unified=tuple(names[device] for device in limits.unified),
        ),
        prices=replace(
            question.prices,
            inventory=replace(
                machine,
                accelerators=tuple(replace(device, id=names[device.id]) for device in machine.accelerators),
                unified=tuple(names[device] for device in machine.unified),
                links=links_of(links),
            ),
            _bandwidths={},
        ),
    )


def rename_place(place: Place, names: Mapping[str, str]) -> Place:
    return Place(names[place.device], place.residency, names[place.storage])


@over_seeds(SEEDS)
def test_fastest_more_memory_is_never_worse(seed: int) -> None:
    """A larger budget of any device in use, or no reserve, makes nothing infeasible and nothing slower."""
    question = random_case(seed)
    before = seconds_in(found_for(seed)[0])
    for device, budget in question.limits.budgets.items():
        if budget:
            assert seconds_of(with_budget(question, device, budget + 5)) <= before + 1e-9
    assert seconds_of(replace(question, limits=replace(question.limits, reserve=0, reserves={}))) <= before + 1e-9


@over_seeds(SEEDS)
def test_fastest_faster_links_are_never_worse(seed: int) -> None:
    """A faster way to any device makes nothing slower."""
    question = random_case(seed)
    machine = question.prices.inventory
    before = seconds_in(found_for(seed)[0])
    for link in machine.links:
        rates = {each.devices: each.bytes_per_s * (2 if each == link else 1) for each in machine.links}
        faster = replace(question.prices, inventory=replace(machine, links=links_of(rates)), _bandwidths={})
        assert seconds_of(replace(question, prices=faster)) <= before + 1e-9


# --- by hand ---


def toy(
    sizes: Mapping[str, int],
    budgets: Mapping[str, int],
    *,
    calls: Mapping[str, int] | None = None,
    layouts: Mapping[str, Layout] | None = None,
    pins: Mapping[str, Place] | None = None,
    working: Mapping[str, Mapping[str, int]] | None = None,
    **limits: Any,
) -> Question:
    """Components of these sizes; cpu and accelerators 1000 bytes a second apart, the disk four times as far.

    The largest layer of each is a tenth of it, and the cpu takes a second for a byte.
    """
    calls, layouts, pins, working = calls or {}, layouts or {}, pins or {}, working or {}
    budgets = {CPU: 100, DISK: 0, **budgets}
    accelerators = [device for device in budgets if device not in (CPU, DISK)]
    places = all_places(accelerators, [CPU, DISK] if budgets[DISK] else [CPU])
    machine = Inventory(
        accelerators=tuple(device_of(device, budgets[device]) for device in accelerators),
        host=device_of(CPU, budgets[CPU]),
        name="toy",
        unified=limits.get("unified", ()),
        links=links_of({pair(CPU, device): 1_000 for device in accelerators} | {pair(CPU, DISK): 333}),
        speeds=speeds_of({CPU: 1}),
        pageable_bytes_per_s=1_000,
    )
    size = random_prices(random.Random(0), [], {CPU: 0}, ["any"]).footprints["any"]  # noqa: S311 - toy numbers
    return Question(
        requests={name: Request((pins[name],) if name in pins else tuple(places), "toy") for name in sizes},
        loads={
            name: Load(
                nbytes=nbytes,
                largest_leaf_bytes=max(m.own_bytes for m in layouts[name].modules) if name in layouts else nbytes // 10,
                group_bytes=nbytes,
                working=working.get(name, {}),
            )
            for name, nbytes in sizes.items()
        },
        limits=Limits(budgets=budgets, reserve=limits.pop("reserve", 0), **limits),
        prices=Prices(
            inventory=machine,
            runs={name: Runs(calls.get(name, 1), 1) for name in sizes},
            footprints=dict.fromkeys(sizes, size),
        ),
        layouts=layouts,
    )


def row(*blocks: int, own: int = 0) -> Layout:
    """A layout of blocks of one layer each, beside what the component itself holds."""
    modules = [LaidOutModule("", own, False), *(LaidOutModule(str(i), size, True) for i, size in enumerate(blocks))]
    return Layout(modules=tuple(modules), can_split=True)


def told(question: Question) -> dict[str, str]:
    """The answer in words: component -> place, parts by their path."""
    found = fastest(question)
    assert found is not None
    how = {ALWAYS: "{0}", WHOLE: "{0} whole from {1}", LEAF: "{0} by layer from {1}"}
    return {
        name: ", ".join(
            f"{path}{': ' if path else ''}{how[place.residency].format(place.device, place.storage)}"
            for path, place in parts.items()
        )
        for name, parts in found.best.places.items()
    }


def test_fastest_nothing_to_place() -> None:
    """A pipeline without weights is placed, for nothing."""
    found = fastest(toy({}, {"cuda:0": 10}))
    assert found is not None
    assert (found.best.places, found.best.seconds, found.bound_seconds, found.proven) == ({}, 0, 0, True)


def test_fastest_what_runs_often_stays() -> None:
    """10 and 10 on 15: the one of 20 calls stays, the other is brought by layers, 1 byte beside the 10."""
    question = toy({"a": 10, "b": 10}, {"cuda:0": 15}, calls={"b": 20})
    assert told(question) == {"a": "cuda:0 by layer from cpu", "b": "cuda:0"}
    assert seconds_of(question) == pytest.approx(0.01)


def test_fastest_whole_beats_layers_where_it_runs_often() -> None:
    """What fits beside nothing else is brought once, whole, rather than on each of 20 calls."""
    question = toy({"a": 10, "b": 10}, {"cuda:0": 10}, calls={"a": 20, "b": 20})
    assert sorted(told(question).values()) == ["cuda:0 whole from cpu", "cuda:0 whole from cpu"]
    assert seconds_of(question) == pytest.approx(0.02)


def test_fastest_rests_on_disk_what_the_cpu_has_no_room_for() -> None:
    """Of 10 and 6 beside what stays, the cpu holds the 10: the 6 come at 249 bytes a second, not at 1000."""
    question = toy({"a": 10, "b": 6, "c": 12}, {"cuda:0": 13, CPU: 11, DISK: 100}, pins={"c": Place("cuda:0")})
    assert told(question) == {"a": "cuda:0 by layer from cpu", "b": "cuda:0 by layer from disk", "c": "cuda:0"}
    assert seconds_of(question) == pytest.approx(10 / 1000 + 6 / 249)


def test_fastest_splits_over_the_fewest_devices_and_evenly() -> None:
    """Eight blocks of 2 fit 16 + 4, and 10 + 10 + 4; the even half of 10 and 10 wins."""
    question = toy({"a": 16}, {"cuda:0": 4, "cuda:1": 10, "cuda:2": 10}, layouts={"a": row(*[2] * 8)})
    found = fastest(question)
    assert found is not None
    devices = {place.device for place in found.best.places["a"].values()}
    assert devices == {"cuda:1", "cuda:2"}
    cost = cost_of(found.best.places, question)
    assert cost == (0, 1, 0.8, 1.28)


def test_fastest_streams_the_last_blocks() -> None:
    """5 blocks of 4 on 12 and 4: 2 beside room for one that comes, 1 on the other, the last 2 on each of 3 calls."""
    question = toy({"a": 20}, {"cuda:0": 12, "cuda:1": 4}, calls={"a": 3}, layouts={"a": row(*[4] * 5)})
    assert told(question) == {"a": "cuda:0, 2: cuda:1, 3: cuda:0 by layer from cpu, 4: cuda:0 by layer from cpu"}
    assert seconds_of(question) == pytest.approx(3 * 8 / 1000)


def test_fastest_order_of_runs_is_the_best_there_is() -> None:
    """Blocks of 3, 3 and 5 fit rooms of 5 and 6 in one order only: 6 first."""
    question = toy({"a": 11}, {"cuda:0": 5, "cuda:1": 6}, layouts={"a": row(3, 3, 5)})
    assert told(question) == {"a": "cuda:1, 2: cuda:0"}
    assert seconds_of(question) == 0


def test_fastest_equal_cards_with_unequal_reserves_are_not_alike() -> None:
    """Of two cards of 10 the first keeps 4 free: 8 stay on the second."""
    question = toy({"a": 8}, {"cuda:0": 10, "cuda:1": 10}, reserves={"cuda:0": 4})
    assert told(question) == {"a": "cuda:1"}
    question = toy({"a": 8}, {"cuda:0": 10, "cuda:1": 10}, working={"a": {"cuda:0": 4}})
    assert told(question) == {"a": "cuda:1"}


def test_fastest_pin_to_a_device_without_a_budget() -> None:
    """A pin to a card that may not be used does not fit, unless it has no bytes; that is no error."""
    pins = {"a": Place("cuda:1")}
    assert fastest(toy({"a": 8}, {"cuda:0": 10, "cuda:1": 0}, pins=pins)) is None
    found = fastest(toy({"a": 0, "b": 5}, {"cuda:0": 10, "cuda:1": 0}, pins=pins))
    assert found is not None
    assert found.bound_seconds == found.best.seconds == 0


def test_fastest_in_one_memory_splits_as_far_as_the_host_has_room() -> None:
    """20 of one memory, of which 6 are the host's: 10 stay beside the 4 that come from disk, though mps offers 20."""
    pins = {"b": Place(CPU)}
    question = toy(
        {"a": 20, "b": 6},
        {"mps:0": 20, CPU: 20, DISK: 100},
        layouts={"a": row(*[2] * 6, 4, 4)},
        pins=pins,
        unified=("mps:0",),
    )
    found = fastest(question)
    assert found is not None
    assert cost_of(found.best.places, question) is not None
    assert told(question)["a"] == ", ".join(["mps:0", *(f"{index}: mps:0 by layer from disk" for index in (5, 6, 7))])


def test_fastest_ends_and_says_so_where_there_is_too_much_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that may do little finds something that fits, says that there may be better, and is not random."""
    sizes = {f"part_{index}": 90 + 7 * index for index in range(8)}
    budgets = {f"cuda:{index}": 100 + 11 * index for index in range(6)} | {CPU: 1_000}
    question = toy(sizes, budgets, calls={name: 2 + index % 5 for index, name in enumerate(sizes)})
    best = seconds_of(question)
    monkeypatch.setattr("dmconfig.plan.fastest.MAX_WORK", 2_000)
    found, cost = answer(question)
    assert found is not None
    assert cost is not None
    assert not found.proven
    assert found.bound_seconds <= best <= found.best.seconds
    assert fastest(question) == found
