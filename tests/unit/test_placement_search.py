"""The search against a brute force of its own, on made-up cases with sizes of single bytes."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from dmconfig.plan.model import Residency
from dmconfig.plan.placement import MAX_STEPS, best_choice
from dmconfig.plan.requests import Place, Request
from dmconfig.plan.uses import Choice, Limits, Load, Use, uses_of

ALWAYS, WHOLE = Residency.ALWAYS, Residency.WHILE_RUNNING
GROUP, LEAF = Residency.PER_GROUP, Residency.PER_LEAF
CPU = "cpu"
SEEDS = range(300)
WORK = 32 * MAX_STEPS  # a step asks for up to 16 places, about two devices each


@dataclass(frozen=True, kw_only=True)
class Case:
    requests: dict[str, Request]
    loads: dict[str, Load]
    limits: Limits

    def choice(self) -> Choice | None:
        """What the search answers."""
        found = best_choice(self.requests, self.loads, self.limits)
        return None if found is None else found.choice

    def cost(self, choice: Choice) -> tuple[int, float, float] | None:
        """What a choice costs; None where it does not fit."""
        return cost_of(choice, self.loads, self.limits.budgets, self.limits.reserve)


def cost_of(
    choice: Choice, loads: Mapping[str, Load], budgets: Mapping[str, int], reserve: int
) -> tuple[int, float, float] | None:
    """Bytes that do not stay on an accelerator, fullest share, sum of squared shares; None: more than there is.

    A second reading of the rules, sharing no code with the search: weights that stay on a device add up, of those
    that come and go the largest counts, a component outside the offload order stays once brought, and what is
    brought rests on the cpu. The reserve is kept on every accelerator that has any weights.
    """
    held, visiting = dict.fromkeys(budgets, 0), dict.fromkeys(budgets, 0)
    away = 0
    for name, place in choice.items():
        load = loads[name]
        parts = {LEAF: load.largest_leaf_bytes, GROUP: load.group_bytes}
        there = parts.get(place.residency, load.nbytes)
        if place.residency is ALWAYS or load.stays:
            held[place.device] += there
        else:
            visiting[place.device] = max(visiting[place.device], there)
        if place.residency is not ALWAYS:
            held[CPU] += load.nbytes
        if place.residency is not ALWAYS or place.device == CPU:
            away += load.nbytes
    peaks = {device: held[device] + visiting[device] for device in budgets}
    if any(peak and peak + (0 if device == CPU else reserve) > budgets[device] for device, peak in peaks.items()):
        return None
    shares = [peaks[device] / budget for device, budget in budgets.items() if device != CPU and budget]
    return away, round(max(shares, default=0), 9), round(sum(share**2 for share in shares), 9)


def brute_force(case: Case) -> tuple[int, float, float] | None:
    """The least cost over every combination of places."""
    names = list(case.requests)
    every = itertools.product(*(case.requests[name].places for name in names))
    costs = (case.cost(dict(zip(names, places, strict=True))) for places in every)
    return min((cost for cost in costs if cost is not None), default=None)


def random_case(seed: int) -> Case:
    """Up to five components, up to three accelerators, of all residencies; some pins, some budgets of nothing."""
    rng = random.Random(seed)  # noqa: S311 - toy numbers
    accelerators = [f"cuda:{index}" for index in range(rng.randint(1, 3))]
    budgets = {device: rng.choice([0, 5, 10, 10, 15, 20]) for device in accelerators}
    budgets[CPU] = rng.choice([0, 10, 30, 100])
    residencies = rng.choice([[ALWAYS], [ALWAYS, WHOLE], [ALWAYS, LEAF], [WHOLE], [LEAF]])
    free = [Place(device, residency) for residency in residencies for device in accelerators]
    if residencies == [ALWAYS] and rng.random() < 0.5:
        free.append(Place(CPU))
    everywhere = [Place(device, each) for device in accelerators for each in (ALWAYS, WHOLE, GROUP, LEAF)]
    everywhere += [Place(CPU)]
    requests: dict[str, Request] = {}
    loads: dict[str, Load] = {}
    for index in range(rng.randint(1, 5 if len(free) <= 4 else 4)):
        size = rng.choice([0, 1, 2, 3, 4, 5, 7, 8, 10, 12, 20])
        name = f"part_{index}"
        loads[name] = Load(
            nbytes=size,
            largest_leaf_bytes=rng.randint(0, size),
            group_bytes=rng.randint(0, size),
            stays=rng.random() < 0.2,
        )
        pinned = rng.random() < 0.2
        requests[name] = Request((rng.choice(everywhere),) if pinned else tuple(free), "toy")
    return Case(requests=requests, loads=loads, limits=Limits(budgets=budgets, reserve=rng.choice([0, 0, 1, 3, 6])))


def toy(
    sizes: Sequence[int],
    budgets: Mapping[str, int],
    *,
    residencies: Sequence[Residency] = (ALWAYS,),
    on_cpu: bool = False,
    pins: Mapping[str, Place] | None = None,
    stays: Sequence[str] = (),
    reserve: int = 0,
) -> Case:
    """A case of components a, b, c, ... of these sizes in bytes, whose largest leaf is a tenth of each."""
    names = "abcdefghij"[: len(sizes)]
    accelerators = [device for device in budgets if device != CPU]
    free = tuple(Place(device, residency) for residency in residencies for device in accelerators)
    free += (Place(CPU),) if on_cpu else ()
    pins = pins or {}
    return Case(
        requests={name: Request((pins[name],) if name in pins else free, "toy") for name in names},
        loads={
            name: Load(nbytes=size, largest_leaf_bytes=size // 10, group_bytes=size // 2, stays=name in stays)
            for name, size in zip(names, sizes, strict=True)
        },
        limits=Limits(budgets={CPU: 0, **budgets}, reserve=reserve),
    )


def devices(choice: Choice | None) -> dict[str, str] | None:
    return None if choice is None else {name: place.device for name, place in sorted(choice.items())}


def residencies(choice: Choice | None) -> dict[str, Residency]:
    assert choice is not None
    return {name: place.residency for name, place in sorted(choice.items())}


@pytest.mark.parametrize("seed", SEEDS)
def test_best_choice_equals_brute_force(seed: int) -> None:
    """There is a choice just where some combination fits, and it costs as little as the cheapest combination."""
    case = random_case(seed)
    choice = case.choice()
    assert (None if choice is None else case.cost(choice)) == brute_force(case)


def test_random_cases_are_of_all_kinds() -> None:
    """The cases that the search is held against are neither all hopeless nor all easy."""
    cases = [random_case(seed) for seed in SEEDS]
    choices = [case.choice() for case in cases]
    found = [choice for choice in choices if choice]
    assert 0.3 < len(found) / len(cases) < 0.9
    used = {(place.residency, place.device == CPU) for choice in found for place in choice.values()}
    assert used == {(ALWAYS, False), (WHOLE, False), (GROUP, False), (LEAF, False), (ALWAYS, True)}
    assert sum(len({place.device for place in choice.values()}) > 1 for choice in found) > 50


@pytest.mark.parametrize("seed", SEEDS)
def test_best_choice_keeps_every_promise(seed: int) -> None:
    """Each component once and in a place it asked for, no budget exceeded, nothing given is changed."""
    case = random_case(seed)
    before = copy.deepcopy(case)
    choice = case.choice()
    assert case == before
    if choice is None:
        return
    assert set(choice) == set(case.requests)
    assert all(choice[name] in request.places for name, request in case.requests.items())
    uses = uses_of(choice, case.loads, case.limits.budgets)
    assert set(uses) == set(case.limits.budgets)
    for device, use in uses.items():
        reserve = case.limits.reserve if device != CPU and use.peak else 0
        assert use.peak + reserve <= case.limits.budgets[device] or use.peak == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_best_choice_is_a_function_of_its_input(seed: int) -> None:
    """The same input has the same answer, in whatever order its mappings are."""
    case = random_case(seed)
    choice = case.choice()
    assert case.choice() == choice
    rng = random.Random(seed)  # noqa: S311 - toy numbers

    def shuffled(mapping: Mapping[str, Any]) -> dict[str, Any]:
        return dict(rng.sample(list(mapping.items()), len(mapping)))

    limits = Limits(budgets=shuffled(case.limits.budgets), reserve=case.limits.reserve)
    again = Case(requests=shuffled(case.requests), loads=shuffled(case.loads), limits=limits)
    assert again.choice() == choice


@pytest.mark.parametrize("seed", SEEDS)
def test_best_choice_more_memory_is_never_worse(seed: int) -> None:
    """A larger budget, or a smaller reserve, keeps a feasible case feasible and brings no more bytes."""
    case = random_case(seed)
    choice = case.choice()
    if choice is None:
        return
    before = case.cost(choice)
    assert before is not None
    for device, budget in case.limits.budgets.items():
        larger = replace(case, limits=replace(case.limits, budgets={**case.limits.budgets, device: budget + 5}))
        found = larger.choice()
        assert found is not None
        after = larger.cost(found)
        assert after is not None
        assert after[0] <= before[0]
    if case.limits.reserve:
        assert replace(case, limits=replace(case.limits, reserve=0)).choice() is not None


def test_best_choice_no_components_is_an_empty_choice() -> None:
    """Nothing to place is placed."""
    assert toy([], {"cuda:0": 10}).choice() == {}


def test_best_choice_exact_fit_fits() -> None:
    """15 bytes in 10 + 5: what fits to the byte is not refused, and one byte less is."""
    assert devices(toy([10, 5], {"cuda:0": 10, "cuda:1": 5}).choice()) == {"a": "cuda:0", "b": "cuda:1"}
    assert toy([10, 5], {"cuda:0": 10, "cuda:1": 4}).choice() is None


def test_best_choice_finds_what_greedy_filling_misses() -> None:
    """6+5+4 and 8+7 fill 15 and 15; the largest first into the emptiest leaves 8+6, 7+5 and no room for 4."""
    assert toy([8, 7, 6, 5, 4], {"cuda:0": 15, "cuda:1": 15}).choice() is not None


def test_best_choice_large_part_does_not_spill_small_ones() -> None:
    """160 of 180 bytes fit nowhere but on the cpu; the two of 10 still go to the accelerator of 30."""
    choice = toy([160, 10, 10], {"cuda:0": 30, CPU: 1000}, on_cpu=True).choice()
    assert devices(choice) == {"a": CPU, "b": "cuda:0", "c": "cuda:0"}


def test_best_choice_every_part_on_the_cpu_is_kept() -> None:
    """Two parts too large for the accelerator both rest on the cpu: none is lost."""
    choice = toy([24, 18, 1, 1], {"cuda:0": 10, CPU: 100}, on_cpu=True).choice()
    assert devices(choice) == {"a": CPU, "b": CPU, "c": "cuda:0", "d": "cuda:0"}


def test_best_choice_fewest_bytes_away_comes_first() -> None:
    """Of 10+6+5 with 11 bytes of room, 6+5 stay and 10 leave: fewer bytes than the 11 that would leave otherwise."""
    choice = toy([10, 6, 5], {"cuda:0": 11, CPU: 100}, on_cpu=True).choice()
    assert devices(choice) == {"a": CPU, "b": "cuda:0", "c": "cuda:0"}


@pytest.mark.parametrize("excluded", ["cuda:0", "cuda:1", "cuda:2"])
def test_best_choice_device_of_no_budget_is_not_used(excluded: str) -> None:
    """An excluded card takes nothing and does not count when use is kept even: 8 and 8 on the other two."""
    budgets = {f"cuda:{index}": 10 for index in range(3)} | {excluded: 0}
    choice = toy([8, 8], budgets).choice()
    assert choice is not None
    assert {place.device for place in choice.values()} == set(budgets) - {excluded}


def test_best_choice_all_budgets_zero() -> None:
    """With no room on any accelerator all is on the cpu where that is allowed, and else there is no choice."""
    assert devices(toy([3, 2], {"cuda:0": 0, CPU: 5}, on_cpu=True).choice()) == {"a": CPU, "b": CPU}
    assert toy([3, 2], {"cuda:0": 0, CPU: 5}).choice() is None


def test_best_choice_pins_are_paid_first() -> None:
    """The pin takes 3 of cuda:0's 10, so the part of 8 goes to cuda:1, though alone it would go to cuda:0."""
    budgets = {"cuda:0": 10, "cuda:1": 10}
    assert devices(toy([8], budgets).choice()) == {"a": "cuda:0"}
    assert devices(toy([8, 3], budgets, pins={"b": Place("cuda:0")}).choice()) == {"a": "cuda:1", "b": "cuda:0"}


def test_best_choice_pin_is_honoured_where_it_is_worse() -> None:
    """Both pinned to one card stay there though another is empty; a pin that does not fit is no choice."""
    pins = {"a": Place("cuda:0"), "b": Place("cuda:0")}
    assert devices(toy([4, 4], {"cuda:0": 10, "cuda:1": 10}, pins=pins).choice()) == {"a": "cuda:0", "b": "cuda:0"}
    assert toy([8, 4], {"cuda:0": 10, "cuda:1": 10}, pins=pins).choice() is None


def test_best_choice_shares_are_of_the_budget() -> None:
    """4 of 10 is fuller than 6 of 20: the larger card takes the larger part, and both to it would be 10 of 20."""
    assert devices(toy([6, 4], {"cuda:0": 10, "cuda:1": 20}).choice()) == {"a": "cuda:1", "b": "cuda:0"}


def test_best_choice_even_beyond_the_fullest() -> None:
    """With 8 of 10 on one card whatever is done, 2+2 are spread over the other two: 0.8, 0.2, 0.2."""
    choice = toy([8, 2, 2], {"cuda:0": 10, "cuda:1": 10, "cuda:2": 10}).choice()
    assert devices(choice) == {"a": "cuda:0", "b": "cuda:1", "c": "cuda:2"}


def test_best_choice_tie_goes_to_the_earlier_place() -> None:
    """Two equal cards: the larger part is on the first; of equal parts, the one whose name comes first."""
    assert devices(toy([5, 6], {"cuda:0": 10, "cuda:1": 10}).choice()) == {"a": "cuda:1", "b": "cuda:0"}
    assert devices(toy([5, 5], {"cuda:0": 10, "cuda:1": 10}).choice()) == {"a": "cuda:0", "b": "cuda:1"}


def test_best_choice_reserve_is_kept_on_used_accelerators_only() -> None:
    """7 + 3 fill 10; a card of 2, less than the reserve, is no hindrance while unused; the cpu keeps no reserve."""
    assert toy([7], {"cuda:0": 10, "cuda:1": 2}, reserve=3).choice() is not None
    assert toy([8], {"cuda:0": 10, "cuda:1": 2}, reserve=3).choice() is None
    assert toy([8], {"cuda:0": 10, CPU: 8}, reserve=3, on_cpu=True).choice() is not None


def test_best_choice_component_without_bytes_needs_no_room() -> None:
    """A component of no bytes has a place even where there is no room."""
    assert devices(toy([0], {"cuda:0": 1}, reserve=5).choice()) == {"a": "cuda:0"}


def test_best_choice_brought_whole_one_at_a_time() -> None:
    """10, 6 and 5 brought whole need 10 on the card and 21 on the cpu; one byte less of either is too little."""
    assert toy([10, 6, 5], {"cuda:0": 10, CPU: 21}, residencies=[WHOLE]).choice() is not None
    assert toy([10, 6, 5], {"cuda:0": 9, CPU: 21}, residencies=[WHOLE]).choice() is None
    assert toy([10, 6, 5], {"cuda:0": 10, CPU: 20}, residencies=[WHOLE]).choice() is None


def test_best_choice_what_stays_is_not_shared() -> None:
    """A part outside the order stays beside what comes after: 10 and the 5 that stays need 15."""
    assert toy([10, 6, 5], {"cuda:0": 15, CPU: 21}, residencies=[WHOLE], stays="c").choice() is not None
    assert toy([10, 6, 5], {"cuda:0": 14, CPU: 21}, residencies=[WHOLE], stays="c").choice() is None


def test_best_choice_leaf_by_leaf_needs_the_largest_leaf() -> None:
    """Of 100 and 60, leaves of 10 and 6 come one at a time; with one that stays both are there."""
    assert toy([100, 60], {"cuda:0": 10, CPU: 160}, residencies=[LEAF]).choice() is not None
    assert toy([100, 60], {"cuda:0": 9, CPU: 160}, residencies=[LEAF]).choice() is None
    assert toy([100, 60], {"cuda:0": 16, CPU: 160}, residencies=[LEAF], stays="b").choice() is not None
    assert toy([100, 60], {"cuda:0": 15, CPU: 160}, residencies=[LEAF], stays="b").choice() is None


def test_best_choice_brings_only_what_does_not_fit() -> None:
    """20 bytes: 10 is brought, 6 stay beside it and 4 too. Bringing the 6 and 4 would need 10 more for the 10."""
    choice = toy([10, 6, 4], {"cuda:0": 20, CPU: 100}, residencies=[ALWAYS, WHOLE]).choice()
    assert residencies(choice) == {"a": ALWAYS, "b": ALWAYS, "c": ALWAYS}
    choice = toy([10, 6, 5], {"cuda:0": 20, CPU: 100}, residencies=[ALWAYS, WHOLE]).choice()
    # held 10 + brought 6 = 16: 11 bytes away; held 10 + 5, brought 6 = 21 > 20; held 10 + 6, brought 5 = 21 > 20
    assert residencies(choice) == {"a": ALWAYS, "b": WHOLE, "c": WHOLE}


def test_best_choice_equal_accelerators_that_other_requests_tell_apart() -> None:
    """One part may go to 0 or 1, the other to 0 or the small 2: the first on 1 and the second on 0 fits."""
    requests = {
        "a": Request((Place("cuda:0"), Place("cuda:1")), "toy"),
        "b": Request((Place("cuda:0"), Place("cuda:2")), "toy"),
    }
    loads = {name: Load(nbytes=10, largest_leaf_bytes=1, group_bytes=5) for name in requests}
    limits = Limits(budgets={"cuda:0": 10, "cuda:1": 10, "cuda:2": 1, CPU: 0}, reserve=0)
    found = best_choice(requests, loads, limits)
    assert found is not None
    assert devices(found.choice) == {"a": "cuda:1", "b": "cuda:0"}


def questions(case: Case, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the search asks whether something fits: its work, however fast the machine."""
    asked = 0
    holds = Limits.holds

    def count(limits: Limits, device: str, use: Use) -> bool:
        nonlocal asked
        asked += 1
        assert asked < WORK
        return holds(limits, device, use)

    monkeypatch.setattr(Limits, "holds", count)
    case.choice()
    return asked


def test_best_choice_tie_between_components_goes_to_the_first() -> None:
    """One of two equal parts leaves the card whichever it is: the first by name has the first place and stays."""
    choice = toy([5, 5, 5], {"cuda:0": 10, CPU: 5}, on_cpu=True).choice()
    assert devices(choice) == {"a": "cuda:0", "b": "cuda:0", "c": CPU}


@pytest.mark.parametrize("budget", [100, 60, 40, 5])
@pytest.mark.parametrize("mode", [(ALWAYS,), (ALWAYS, WHOLE), (ALWAYS, LEAF)], ids=lambda mode: mode[-1].value)
def test_best_choice_work_on_identical_accelerators_is_bounded(
    budget: int, mode: tuple[Residency, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight components on eight equal cards, where all fit, some or none: a few thousand questions for 8^8 choices."""
    budgets = {f"cuda:{index}": budget for index in range(8)} | {CPU: 10_000}
    case = toy([80, 71, 63, 54, 45, 36, 27, 18], budgets, residencies=mode)
    assert 0 < questions(case, monkeypatch) < WORK


@pytest.mark.parametrize("mode", [(ALWAYS,), (ALWAYS, WHOLE), (LEAF,)], ids="_".join)
def test_best_choice_work_on_nearly_equal_accelerators_is_bounded(
    mode: tuple[Residency, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight cards of one kind have a little more or less that is free: it must not cost 8^8 steps to see it."""
    budgets = {f"cuda:{index}": 100 + index for index in range(8)} | {CPU: 10_000}
    case = toy([80, 71, 63, 54, 45, 36, 27, 18], budgets, residencies=mode)
    assert 0 < questions(case, monkeypatch) < WORK


def test_best_choice_even_on_unequal_accelerators() -> None:
    """With 8 of 10 and 6 of 20 the shares are 0.8 and 0.3; the other way round, 0.6 and 0.4, is the more even."""
    assert devices(toy([8, 6], {"cuda:0": 10, "cuda:1": 20}).choice()) == {"a": "cuda:1", "b": "cuda:0"}
