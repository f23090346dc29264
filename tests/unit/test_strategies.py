"""Every strategy word through the front door: specs as text, made-up machines, and what holds for each of their plans.

What a plan holds is added up anew from the plan alone, phase by phase; what a strategy prefers is held against every
placement there is. Sizes are small whole GiB.
"""

from __future__ import annotations

import functools
import itertools
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dmconfig.checked import Checked
from dmconfig.configs import config_folder
from dmconfig.devices import is_accelerator
from dmconfig.errors import PlanError, SpecError
from dmconfig.footprint import Footprint
from dmconfig.inventory import Inventory
from dmconfig.layout import LaidOutModule, Layout
from dmconfig.plan import Assignment, Part, Plan, Residency, make_plan, make_task
from dmconfig.plan.misfits import variations
from dmconfig.plan.task import Task
from dmconfig.spec import STRATEGIES
from dmconfig.units import GIB
from tests.conftest import assignment, checked_from, device_use, footprints, inventory, only_problem
from tests.seeds import over_seeds

ALWAYS, WHOLE, LEAF, SPLIT = Residency.ALWAYS, Residency.WHILE_RUNNING, Residency.PER_LEAF, Residency.SPLIT
SEEDS = range(150)

SOURCES = {
    "digits": ("./digits/pipeline", ("vae", "text_encoder", "unet"), "unet"),
    "flux": ("black-forest-labs/FLUX.1-dev", ("vae", "text_encoder", "text_encoder_2", "transformer"), "transformer"),
    # its safety checker is in nobody's turn: once brought it stays until the call ends
    "sd15": (
        "stable-diffusion-v1-5/stable-diffusion-v1-5",
        ("vae", "text_encoder", "unet", "safety_checker"),
        "unet",
    ),
}
STAYS = ("safety_checker",)


@functools.cache
def checked(kind: str, lines: str) -> Checked:
    return checked_from(f"version: 1\npipeline: {{source: {SOURCES[kind][0]}}}\n{lines}\n")


def planned(
    kind: str,
    lines: str,
    machine: Inventory,
    sizes: Mapping[str, Footprint],
    layouts: Mapping[str, Layout] | None = None,
) -> Plan:
    spec = checked(kind, lines)
    return make_plan(spec.resolved, spec.spec, spec.assembly, sizes, machine, layouts=layouts)


def make_task_of(kind: str, lines: str, machine: Inventory, sizes: Mapping[str, Footprint]) -> Task:
    spec = checked(kind, lines)
    return make_task(spec.resolved, spec.spec, spec.assembly, sizes, machine)


def row(nbytes: int, blocks: int) -> Layout:
    """A layout of equal blocks of one layer each."""
    sizes = [nbytes // blocks] * (blocks - 1)
    sizes.append(nbytes - sum(sizes))
    inner = (LaidOutModule(f"blocks.{index}", size, True) for index, size in enumerate(sizes))
    return Layout(modules=(LaidOutModule("", 0, False), LaidOutModule("blocks", 0, False), *inner), can_split=True)


# --- made-up cases ---


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline with sizes, a machine, and what a file says beside its strategy; reserves in GiB."""

    kind: str
    sizes: Mapping[str, Footprint]
    machine: Inventory
    lines: str
    layouts: Mapping[str, Layout]
    reserves: Mapping[str, float]
    caps: Mapping[str, float]
    disk: bool

    def plan(self, device_map: str) -> Plan | None:
        """The plan of this strategy, or whatever stands for the device map; None where nothing fits."""
        try:
            return planned(self.kind, f"device_map: {device_map}\n{self.lines}", self.machine, self.sizes, self.layouts)
        except PlanError:
            return None

    def reserve(self, component: str, device: str) -> float:
        """What is kept free on a device while a component runs there."""
        default = self.reserves.get("default", 1.5)
        return self.reserves.get(component, self.reserves.get(device, default)) * GIB

    def budget(self, device: str) -> float:
        """What may be used of a device."""
        total = next((each.free_bytes for each in self.machine.devices if each.id == device), 1 << 60)
        if device in self.caps:
            return min(self.caps[device] * GIB, total)
        return 0 if is_accelerator(device) and any(map(is_accelerator, self.caps)) else total

    @property
    def accelerators(self) -> list[str]:
        """Those with any budget."""
        return [device.id for device in self.machine.accelerators if self.budget(device.id) > 0]


@functools.cache
def plan_for(seed: int, word: str) -> Plan | None:
    """What a strategy makes of a case."""
    return random_case(seed).plan(word)


@functools.cache
def random_case(seed: int) -> Case:
    rng = random.Random(seed)  # noqa: S311 - toy numbers
    kind = rng.choice([*SOURCES])
    _, names, denoiser = SOURCES[kind]
    sizes = footprints(**{name: rng.choice([0.5, 1, 2, 3, 5, 8]) for name in names})
    count = rng.randint(0, 4) if rng.random() < 0.9 else 0
    cards = [rng.choice([2, 4, 6, 6, 8, 12]) for _ in range(count)]
    machine = inventory(cuda=cards, cpu=rng.choice([2, 8, 32]))
    reserves: dict[str, float] = {"default": rng.choice([0, 0.5, 1])}
    if rng.random() < 0.4:
        reserves |= {f"cuda:{index}": rng.choice([0, 1, 2]) for index in range(count) if rng.random() < 0.5}
        reserves |= {name: rng.choice([0, 1, 2]) for name in names if rng.random() < 0.4}
    caps: dict[str, float] = {}
    if count and rng.random() < 0.3:
        caps |= {f"cuda:{index}": rng.choice([0, 3, 5, 10]) for index in range(count) if rng.random() < 0.6}
    caps |= {"cpu": rng.choice([1, 4, 20])} if rng.random() < 0.3 else {}
    caps |= {"disk": rng.choice([0, 4, 100])} if rng.random() < 0.4 else {}
    lines = f"reserve: {{{', '.join(f'{key}: {size}GiB' for key, size in reserves.items())}}}\n"
    if caps:
        lines += f"max_memory: {{{', '.join(f'{key}: {size}GiB' for key, size in caps.items())}}}\n"
    layouts = {denoiser: row(sizes[denoiser].nbytes, 8)} if rng.random() < 0.7 else {}
    return Case(
        kind=kind,
        sizes=sizes,
        machine=machine,
        lines=lines,
        layouts=layouts,
        reserves=reserves,
        caps=caps,
        disk=caps.get("disk", 0) > 0,
    )


# --- a plan, added up anew ---


def pieces(found: Assignment) -> Sequence[Assignment | Part]:
    return found.parts or (found,)


def held_on(plan: Plan, device: str) -> float:
    """What is on a device at all times: what stays there, and what rests there."""
    return sum(piece.nbytes for found in plan.assignments for piece in pieces(found) if piece.storage_device == device)


def brought_to(found: Assignment, device: str) -> float:
    """What of a component comes to a device at once, one part after the other."""
    there = [p.peak_bytes for p in pieces(found) if p.execution_device == device != p.storage_device]
    return max(there, default=0)


def phases(plan: Plan, case: Case, device: str) -> Iterator[tuple[float, float]]:
    """What weights take of a device while each component runs, and what is needed with its reserve."""
    held = held_on(plan, device)
    held += sum(brought_to(found, device) for found in plan.assignments if found.component in STAYS)
    for found in plan.assignments:
        visiting = 0.0 if found.component in STAYS else brought_to(found, device)
        runs = is_accelerator(device) and device in found.execution_devices
        yield held + visiting, held + visiting + (case.reserve(found.component, device) if runs else 0)


def check_plan(plan: Plan, case: Case) -> None:
    """What holds for the plan of every strategy."""
    names = SOURCES[case.kind][1]
    assert sorted(found.component for found in plan.assignments) == sorted(names)
    for found in plan.assignments:
        assert sum(piece.nbytes for piece in pieces(found)) == found.nbytes == case.sizes[found.component].nbytes
        assert found.reason
        assert (found.residency is SPLIT) == bool(found.parts)
        for piece in pieces(found):
            assert (piece.residency is ALWAYS) == (piece.execution_device == piece.storage_device)
            assert piece.storage_device in {piece.execution_device, "cpu", "disk"}
            assert case.budget(piece.execution_device) > 0
        assert plan.device_map[found.component] == found.storage_device
        assert all(plan.device_map[f"{found.component}.{p.path}"] == p.storage_device for p in found.parts if p.path)
    assert len(plan.device_map) == sum(len(pieces(found)) for found in plan.assignments)
    assert plan.execution_device == assignment(plan, SOURCES[case.kind][2]).execution_device
    used = ["disk"] if held_on(plan, "disk") else []
    assert [use.id for use in plan.devices] == [*(device.id for device in case.machine.devices), *used]
    for use in plan.devices:
        weights, need = (max(each) for each in zip(*phases(plan, case, use.id), strict=True))
        assert use.used_bytes == weights
        assert need <= case.budget(use.id)
        assert use.free_bytes >= 0
        assert use.used_bytes + use.reserved_bytes >= need
        assert use.budget_bytes <= case.budget(use.id)


@over_seeds(SEEDS)
def test_strategies_keep_every_budget_in_every_phase(seed: int) -> None:
    """Each component once, each byte in one place, no device over its budget while anything runs; the same twice."""
    case = random_case(seed)
    for word in STRATEGIES:
        plan = plan_for(seed, word)
        if plan is not None:
            check_plan(plan, case)
            check_price(plan, searched=word == "auto" and bool(case.accelerators))
            assert seed % 5 or case.plan(word) == plan


def check_price(plan: Plan, *, searched: bool) -> None:
    moved = sum(found.moved_bytes for found in plan.assignments)
    assert plan.seconds == pytest.approx(sum(found.seconds for found in plan.assignments))
    assert plan.moved_bytes == moved
    assert (plan.proof is not None) == searched
    if plan.proof is not None:
        assert plan.proof.seconds == pytest.approx(plan.seconds)
        assert plan.proof.is_complete
        assert plan.proof.bound_seconds <= plan.seconds + 1e-9


def test_random_cases_are_of_all_kinds() -> None:
    """Every strategy has cases that fit and cases that do not, and every place of components is among the plans."""
    for word in STRATEGIES:
        fits = sum(plan_for(seed, word) is not None for seed in SEEDS) / len(SEEDS)
        assert 0.25 < fits < 0.95
    auto = [plan for seed in SEEDS if (plan := plan_for(seed, "auto")) is not None]
    ways = {(piece.residency, piece.storage_device) for plan in auto for a in plan.assignments for piece in pieces(a)}
    assert {(WHOLE, "cpu"), (WHOLE, "disk"), (LEAF, "cpu"), (LEAF, "disk"), (ALWAYS, "cpu")} <= ways
    assert sum(any(found.parts for found in plan.assignments) for plan in auto) > 10


@over_seeds(SEEDS)
def test_auto_is_never_slower_than_another_strategy(seed: int) -> None:
    """Whatever any strategy does, auto may do too: it fits wherever one of them fits, and costs no more."""
    auto = plan_for(seed, "auto")
    for word in STRATEGIES:
        plan = plan_for(seed, word)
        if plan is not None:
            assert auto is not None
            assert auto.seconds <= plan.seconds + 1e-6


@over_seeds(SEEDS[::3])
def test_strategies_more_memory_never_makes_it_infeasible(seed: int) -> None:
    """With two GiB more of any device that may be used, there is a plan wherever there was one."""
    case = random_case(seed)
    words = [word for word in STRATEGIES if plan_for(seed, word) is not None]
    for index, device in enumerate(case.machine.accelerators):
        more = [
            replace(each, total_bytes=each.total_bytes + 2 * GIB, free_bytes=each.free_bytes + 2 * GIB)
            if index == other
            else each
            for other, each in enumerate(case.machine.accelerators)
        ]
        larger = replace(case, machine=replace(case.machine, accelerators=tuple(more)))
        for word in words:
            assert larger.plan(word) is not None, (word, device.id)


# --- what each strategy prefers, against every placement there is ---


def whole_placements(case: Case) -> Iterator[Mapping[str, str]]:
    """Every way to keep each component whole on an accelerator, within the budgets."""
    names = SOURCES[case.kind][1]
    for devices in itertools.product(case.accelerators, repeat=len(names)):
        choice = dict(zip(names, devices, strict=True))
        if all(fits(choice, case, device) for device in case.accelerators):
            yield choice


def fits(choice: Mapping[str, str], case: Case, device: str) -> bool:
    here = [name for name, place in choice.items() if place == device]
    reserve = max((case.reserve(name, device) for name in here), default=0)
    return not here or bytes_on(choice, case, device) + reserve <= case.budget(device)


def bytes_on(choice: Mapping[str, str], case: Case, device: str) -> int:
    return sum(case.sizes[name].nbytes for name, place in choice.items() if place == device)


def devices_of(plan: Plan) -> dict[str, str]:
    return {found.component: found.execution_device for found in plan.assignments}


WHOLE_WORDS = ("balanced", "balanced_low_0", "sequential")


@over_seeds(SEEDS)
def test_whole_strategies_stay_on_accelerators_wherever_that_is_possible(seed: int) -> None:
    """Where each component fits whole, nothing is on the cpu, nothing is brought, and nothing costs anything."""
    case = random_case(seed)
    possible = any(True for _ in whole_placements(case))
    if not case.accelerators:
        return
    for word in STRATEGIES:
        plan = plan_for(seed, word)
        if possible:
            assert plan is not None
            assert plan.seconds == 0
        if possible and word != "auto":
            assert all(is_accelerator(found.storage_device) for found in plan.assignments) if plan else False
        if not possible and word in WHOLE_WORDS and plan is not None:
            assert "cpu" in case.caps
            assert any(found.execution_device == "cpu" for found in plan.assignments)


@over_seeds(SEEDS)
def test_balanced_has_the_emptiest_fullest_device(seed: int) -> None:
    """No placement of whole components has a lower share of its budget on its fullest accelerator."""
    case = random_case(seed)
    placements = [*whole_placements(case)]
    if not placements:
        return

    def fullest(choice: Mapping[str, str]) -> float:
        return max(bytes_on(choice, case, device) / case.budget(device) for device in case.accelerators)

    plan = plan_for(seed, "balanced")
    assert plan is not None
    assert fullest(devices_of(plan)) == pytest.approx(min(map(fullest, placements)))


@over_seeds(SEEDS)
def test_balanced_low_0_empties_the_first_device(seed: int) -> None:
    """No placement has fewer bytes on the first accelerator; of those with as few, the others are as even as can be."""
    case = random_case(seed)
    placements = [*whole_placements(case)]
    if not placements:
        return
    first, *others = case.accelerators

    def figures(choice: Mapping[str, str]) -> tuple[float, float]:
        shares = [bytes_on(choice, case, device) / case.budget(device) for device in others]
        return bytes_on(choice, case, first), round(max(shares, default=0), 9)

    plan = plan_for(seed, "balanced_low_0")
    assert plan is not None
    assert figures(devices_of(plan)) == min(map(figures, placements))


@over_seeds(SEEDS)
def test_sequential_fills_the_first_devices_first(seed: int) -> None:
    """No placement has fewer bytes on the last accelerator, then on the one before it, and so on."""
    case = random_case(seed)
    placements = [*whole_placements(case)]
    if not placements:
        return

    def figures(choice: Mapping[str, str]) -> list[int]:
        return [bytes_on(choice, case, device) for device in reversed(case.accelerators)][:-1]

    plan = plan_for(seed, "sequential")
    assert plan is not None
    assert figures(devices_of(plan)) == min(map(figures, placements))


BRINGING = {"balanced_low_memory": "cpu_offload_with_hook", "balanced_ultra_low_memory": "sequential_cpu_offload"}


@over_seeds(SEEDS)
def test_bringing_strategies_are_balanced_with_their_word(seed: int) -> None:
    """The strategy that brings whole, or by layers, has the places of balanced with the low_memory word for it."""
    case = random_case(seed)
    for word, low_memory in BRINGING.items():
        plan = plan_for(seed, word)
        longer = replace(case, lines=f"{case.lines}low_memory: {low_memory}\n").plan("balanced")
        assert (plan is None) == (longer is None)
        if plan is None or longer is None:
            continue
        assert plan.devices == longer.devices
        for one, other in zip(plan.assignments, longer.assignments, strict=True):
            assert replace(one, reason="") == replace(other, reason="")


# --- the disk ---


@over_seeds(SEEDS)
def test_disk_is_used_only_where_the_file_lets_it(seed: int) -> None:
    """A budget of nothing keeps everything off the disk; without any only auto goes there."""
    case = random_case(seed)
    for word in STRATEGIES:
        plan = plan_for(seed, word)
        if plan is not None and held_on(plan, "disk"):
            assert case.caps.get("disk", 1) > 0
            assert word == "auto" or case.disk


@pytest.mark.parametrize("word", STRATEGIES)
def test_disk_of_nothing_is_no_disk(word: str) -> None:
    """8 GiB on a card of 6 with 1 GiB of host memory: from disk or not at all."""
    sizes = footprints(text_encoder=1, unet=8, vae=1)
    machine = inventory(cuda=[6], cpu=1)
    with pytest.raises(PlanError):
        planned("digits", f"device_map: {word}\nmax_memory: {{disk: 0}}\nreserve: 0", machine, sizes)
    if word in ("balanced_ultra_low_memory", "auto"):
        plan = planned("digits", f"device_map: {word}\nmax_memory: {{disk: 20GiB}}\nreserve: 0", machine, sizes)
        assert assignment(plan, "unet").storage_device == "disk"
        assert device_use(plan, "disk").budget_bytes == 20 * GIB


@pytest.mark.parametrize("word", ["balanced_ultra_low_memory", "auto"])
def test_disk_weights_that_are_cast_need_a_folder(word: str) -> None:
    """No file holds them as they are loaded: without an offload folder they never rest on disk."""
    sizes = {
        name: replace(size, needs_cast=True, stored_dtype="float32")
        for name, size in footprints(text_encoder=1, unet=8, vae=1).items()
    }
    machine = inventory(cuda=[6], cpu=1)
    lines = f"device_map: {word}\nmax_memory: {{disk: 20GiB}}\nreserve: 0"
    with pytest.raises(PlanError):
        planned("digits", lines, machine, sizes)
    plan = planned("digits", f"{lines}\noffload_folder: ./offload", machine, sizes)
    unet = assignment(plan, "unet")
    assert (unet.storage_device, unet.is_written) == ("disk", True)


@over_seeds(SEEDS[::2])
def test_disk_never_holds_what_is_cast_without_a_folder(seed: int) -> None:
    """Also where some components are cast and others are not."""
    case = random_case(seed)
    cast = {*random.Random(seed).sample([*case.sizes], 2)}  # noqa: S311 - toy numbers
    sizes = {name: replace(size, needs_cast=name in cast) for name, size in case.sizes.items()}
    for word in STRATEGIES:
        plan = replace(case, sizes=sizes).plan(word)
        if plan is not None:
            assert not any(found.bytes_on_disk for found in plan.assignments if found.component in cast)


# --- the reserve ---

TOY = footprints(text_encoder=1, unet=4, vae=2)


@pytest.mark.parametrize("word", STRATEGIES)
def test_reserve_of_a_device_is_kept_there(word: str) -> None:
    """Of two cards of 8 the first keeps 6 free: the denoiser's 4 go to the second, whichever the strategy."""
    plan = planned("digits", f"device_map: {word}\nreserve: {{0: 6GiB, default: 0}}", inventory(cuda=[8, 8]), TOY)
    assert assignment(plan, "unet").execution_device == "cuda:1"


@pytest.mark.parametrize("word", WHOLE_WORDS)
def test_reserve_of_a_device_sets_equal_cards_apart(word: str) -> None:
    """Two cards of 8 of which either keeps 6 free: 7 GiB fit on the other, whichever it is."""
    for first, second in ((6, 0), (0, 6)):
        lines = f"device_map: {word}\nreserve: {{0: {first}GiB, 1: {second}GiB}}"
        plan = planned("digits", lines, inventory(cuda=[8, 8]), TOY)
        assert assignment(plan, "unet").execution_device == ("cuda:1" if first else "cuda:0")


@pytest.mark.parametrize("word", STRATEGIES)
def test_reserve_of_a_phase_is_kept_where_that_component_runs(word: str) -> None:
    """The decoder needs 3 GiB beside its 2: on cards of 8 and 5 each strategy finds room for it."""
    lines = f"device_map: {word}\nreserve: {{vae: 3GiB, default: 0}}"
    plan = planned("digits", lines, inventory(cuda=[8, 5]), TOY)
    vae = assignment(plan, "vae").execution_device
    use = device_use(plan, vae)
    assert use.used_bytes + 3 * GIB <= use.budget_bytes
    assert use.reserved_bytes == 3 * GIB
    other = device_use(plan, "cuda:1" if vae == "cuda:0" else "cuda:0")
    assert other.reserved_bytes == 0


def test_reserve_default_is_for_what_no_key_names() -> None:
    """Named: the decoder's phase and a card; the default is what is left, 1.5 GiB where the file gives none."""
    machine = inventory(cuda=[8, 8])
    plan = planned("digits", "device_map: {unet: 0, default: 1}\nreserve: {vae: 3GiB}", machine, TOY)
    assert device_use(plan, "cuda:0").reserved_bytes == 3 * GIB // 2
    assert device_use(plan, "cuda:1").reserved_bytes == 3 * GIB


@pytest.mark.parametrize(
    ("reserve", "key"),
    [
        ("{cpu: 1GiB}", "cpu"),
        ("{disk: 1GiB}", "disk"),
        ("{unett: 1GiB}", "unett"),
        ("{scheduler: 1GiB}", "scheduler"),
    ],
)
def test_reserve_of_what_needs_none_is_refused(reserve: str, key: str) -> None:
    """A key that is no accelerator and no component with weights is named."""
    with pytest.raises(SpecError) as caught:
        checked("digits", f"reserve: {reserve}")
    problem = only_problem(caught.value)
    assert problem.path == ("reserve", key)
    assert key in problem.what or "accelerators" in problem.what


# --- auto ---


def test_auto_goes_by_the_calls_of_the_file() -> None:
    """4 and 3 on a card of 5: what runs 50 times stays; told otherwise, it is the other that stays."""
    sizes = footprints(text_encoder=3, unet=4, vae=0.25)
    machine = inventory(cuda=[5])
    lines = "device_map: auto\nreserve: 0\n"
    usual = planned("digits", lines, machine, sizes)
    turned = planned("digits", f"{lines}calls: {{unet: 1, text_encoder: 300}}", machine, sizes)
    assert assignment(usual, "unet").residency is ALWAYS
    assert assignment(usual, "text_encoder").residency is not ALWAYS
    assert assignment(turned, "text_encoder").residency is ALWAYS
    assert assignment(turned, "unet").residency is not ALWAYS
    assert (assignment(turned, "unet").calls, assignment(turned, "text_encoder").calls) == (1, 300)


def test_auto_splits_what_fits_no_card() -> None:
    """8 GiB in eight blocks over cards of 6, 4 and 6: the fewest cards that hold them, and nothing moves."""
    sizes = footprints(text_encoder=1, unet=8, vae=1)
    plan = planned(
        "digits", "device_map: auto\nreserve: 0", inventory(cuda=[6, 4, 6]), sizes, {"unet": row(8 * GIB, 8)}
    )
    unet = assignment(plan, "unet")
    assert unet.residency is SPLIT
    assert len(unet.execution_devices) == 2
    assert plan.seconds == 0
    assert plan.proof is not None
    assert plan.proof.is_complete


def test_auto_splits_text_encoders_and_no_decoder() -> None:
    """What fits no card is over two of them, but for a decoder: what it cannot keep is brought to the same card."""
    big, other = row(8 * GIB, 8), row(GIB, 8)
    lines, machine = "device_map: auto\nreserve: 0", inventory(cuda=[6, 6])
    sizes = footprints(text_encoder=8, unet=1, vae=1)
    plan = planned("digits", lines, machine, sizes, {"text_encoder": big, "unet": other, "vae": other})
    assert {*assignment(plan, "text_encoder").execution_devices} == {"cuda:0", "cuda:1"}
    assert plan.seconds == 0
    sizes = footprints(text_encoder=1, unet=1, vae=8)
    plan = planned("digits", lines, machine, sizes, {"text_encoder": other, "unet": other, "vae": big})
    vae = assignment(plan, "vae")
    assert (vae.residency, len(vae.execution_devices)) == (SPLIT, 1)
    assert vae.moved_bytes == 3 * GIB


def test_auto_small_components_are_on_one_device() -> None:
    """Less than a twentieth of all weights is not worth a second device: of 0.5 GiB some blocks are brought."""
    sizes = footprints(text_encoder=0.5, unet=11, vae=0.5)
    layouts = {"text_encoder": row(GIB // 2, 8), "unet": row(11 * GIB, 22)}
    plan = planned("digits", "device_map: auto\nreserve: 0", inventory(cuda=[6, 5.75]), sizes, layouts)
    assert len(assignment(plan, "unet").execution_devices) == 2
    assert len(assignment(plan, "text_encoder").execution_devices) == 1
    assert plan.seconds > 0


def test_auto_rests_blocks_on_disk_for_which_the_cpu_has_no_room() -> None:
    """Of 8 GiB in eight blocks on a card of 4, three stay beside a layer of the others; the cpu takes 3, the disk 2."""
    sizes = footprints(text_encoder=0.5, unet=8, vae=0.25)
    machine = inventory(cuda=[4], cpu=3.9)
    plan = planned("digits", "device_map: auto\nreserve: 0", machine, sizes, {"unet": row(8 * GIB, 8)})
    unet = assignment(plan, "unet")
    rests = {device: sum(part.nbytes for part in unet.parts if part.storage_device == device) / GIB
             for device in ("cuda:0", "cpu", "disk")}  # fmt: skip
    assert rests == {"cuda:0": 3, "cpu": 3, "disk": 2}
    assert "come 3.0 GiB from cpu and 2.0 GiB from disk on each of" in unet.reason


@over_seeds(SEEDS)
def test_auto_honours_pins(seed: int) -> None:
    """What the file names is where the file says; the rest is as fast as it can be beside it."""
    case = random_case(seed)
    names = SOURCES[case.kind][1]
    device = random.Random(seed).choice([*(each.id for each in case.machine.devices)])  # noqa: S311 - toy numbers
    plan = case.plan(f"{{{names[0]}: {device}, default: auto}}")
    if plan is None:
        return
    if case.budget(device) > 0:
        check_plan(plan, case)
    pinned = assignment(plan, names[0])
    assert (pinned.execution_device, pinned.residency) == (device, ALWAYS)
    whole = plan_for(seed, "auto")
    assert whole is not None
    assert whole.seconds <= plan.seconds + 1e-6


def test_auto_pin_to_a_card_that_may_not_be_used_is_refused() -> None:
    """The card is there, and max_memory names another one: the pin does not fit, and nothing else is wrong."""
    with pytest.raises(PlanError) as caught:
        planned("digits", "device_map: {vae: 1, default: auto}\nmax_memory: {0: 8GiB}", inventory(cuda=[24, 24]), TOY)
    assert only_problem(caught.value).path == ("device_map", "vae")


@pytest.mark.parametrize(
    ("max_memory", "budgets"),
    [
        ("{0: 6GiB}", {"cuda:0": 6, "cuda:1": 0, "cpu": 64}),
        ("{0: 50%, 1: 25%}", {"cuda:0": 4, "cuda:1": 2, "cpu": 64}),
        ("{1: free-2GiB}", {"cuda:0": 0, "cuda:1": 6, "cpu": 64}),
        ("{cpu: 4GiB}", {"cuda:0": 8, "cuda:1": 8, "cpu": 4}),
        ("{0: 0, cpu: free-60GiB}", {"cuda:0": 0, "cuda:1": 0, "cpu": 4}),
        ("{0: 100GiB}", {"cuda:0": 8, "cuda:1": 0, "cpu": 64}),
    ],
)
def test_auto_keeps_max_memory_in_all_its_forms(max_memory: str, budgets: Mapping[str, int]) -> None:
    """Bytes, shares, what is left of what is free, nothing, and more than there is."""
    lines = f"device_map: auto\nreserve: 0\nmax_memory: {max_memory}"
    sizes = footprints(text_encoder=1, unet=2, vae=1)
    plan = planned("digits", lines, inventory(cuda=[8, 8]), sizes)
    assert {use.id: use.budget_bytes for use in plan.devices} == {name: b * GIB for name, b in budgets.items()}
    assert all(use.used_bytes <= use.budget_bytes for use in plan.devices)


# --- machines ---


@pytest.mark.parametrize("word", STRATEGIES)
def test_machine_without_accelerators_has_all_on_the_cpu(word: str) -> None:
    """Every strategy then means the cpu, and says why; nothing is proven, because there was no choice."""
    plan = planned("digits", f"device_map: {word}", inventory(cpu=8), TOY)
    assert {(found.execution_device, found.residency) for found in plan.assignments} == {("cpu", ALWAYS)}
    assert {found.reason for found in plan.assignments} == {"no accelerator to use"}
    assert plan.execution_device == "cpu"
    assert plan.proof is None
    with pytest.raises(PlanError):
        planned("digits", f"device_map: {word}", inventory(cpu=6), TOY)


def shared_memory(size: float, *, free: float | None = None) -> Inventory:
    """A machine whose accelerator has the host's memory."""
    host = inventory(cpu=size, free={"cpu": size if free is None else free}).host
    return replace(
        inventory(cpu=size), accelerators=(replace(host, id="mps:0"),), host=host, unified=("mps:0",), name="one memory"
    )


@pytest.mark.parametrize("word", STRATEGIES)
def test_one_memory_counts_once(word: str) -> None:
    """7 GiB and 1 of reserve in 8; with a byte less nothing stays whole, and nothing that is brought takes less."""
    lines = f"device_map: {word}\nreserve: 1GiB"
    plan = planned("digits", lines, shared_memory(8), TOY)
    assert {found.storage_device for found in plan.assignments} == {"mps:0"}
    if word != "auto":  # auto may let a part of it rest on disk
        with pytest.raises(PlanError):
            planned("digits", lines, shared_memory(8, free=7.99), TOY)


@over_seeds(SEEDS)
def test_one_memory_is_never_promised_twice(seed: int) -> None:
    """What the accelerator and the cpu need together is in the one memory there is."""
    rng = random.Random(seed)  # noqa: S311 - toy numbers
    sizes = footprints(**{name: rng.choice([0.5, 1, 2, 4, 6]) for name in TOY})
    size, pin = rng.choice([4, 6, 8, 12]), rng.choice(["cpu", "mps:0"])
    for word in STRATEGIES:
        lines = f"device_map: {{vae: {pin}, default: {word}}}\nreserve: 1GiB\nmax_memory: {{disk: 100GiB}}"
        layouts = {"unet": row(sizes["unet"].nbytes, 8)}
        try:
            plan = planned("digits", lines, shared_memory(size), sizes, layouts)
        except PlanError:
            continue
        accelerator, cpu = device_use(plan, "mps:0"), device_use(plan, "cpu")
        assert accelerator.used_bytes + accelerator.reserved_bytes + cpu.used_bytes <= size * GIB


def test_one_memory_spread_over_a_list_leaves_the_host_its_part() -> None:
    """8 GiB of one memory, 2 of them the host's and 1 the reserve: of 6 GiB, 4 stay beside one of 0.75 from disk."""
    unet = "{execution: [mps:0], offload: sequential, storage: disk}"
    lines = f"device_map: {{unet: {unet}, default: cpu}}\nreserve: 1GiB"
    sizes = footprints(text_encoder=1, unet=6, vae=1)
    plan = planned("digits", lines, shared_memory(8), sizes, {"unet": row(6 * GIB, 8)})
    staying = [part for part in assignment(plan, "unet").parts if part.residency is ALWAYS]
    assert sum(part.nbytes for part in staying) == 15 * GIB // 4
    accelerator, cpu = device_use(plan, "mps:0"), device_use(plan, "cpu")
    assert accelerator.used_bytes + accelerator.reserved_bytes + cpu.used_bytes <= 8 * GIB


# --- notes ---


def test_notes_of_strategies() -> None:
    """A plan says which accelerators are left out, and nothing where there is nothing to say."""
    lines = "device_map: {}\nreserve: 0\n"
    for word in STRATEGIES:
        assert planned("digits", lines.format(word), inventory(cuda=[8]), TOY).notes == ()
        capped = planned("digits", f"{lines.format(word)}max_memory: {{1: 8GiB}}", inventory(cuda=[8, 8]), TOY)
        assert capped.notes == ("cuda:0 not used: max_memory names other accelerators",)


def test_notes_of_a_call_that_is_larger_than_the_reserve_is_for() -> None:
    """1.5 GiB are for 1024 px: four times as many pixels take about four times as much, unless the file knows."""
    lines = "device_map: balanced\ncall: {height: 2048, width: 2048}\n"
    note = "no room is kept for activations of 2048 x 2048: about 6.0 GiB; set reserve, or rehearse"
    assert planned("digits", lines, inventory(cuda=[16]), TOY).notes == (note,)
    assert planned("digits", f"{lines}reserve: 6GiB", inventory(cuda=[16]), TOY).notes == ()
    small = lines.replace("2048", "1024")
    assert planned("digits", small, inventory(cuda=[16]), TOY).notes == ()


@pytest.mark.parametrize(
    ("call", "frames"),
    [("", 81), ("call: {num_frames: 33}", 33), ("call: {num_frames: 1}", None), ("reserve: 8GiB", None)],
)
def test_notes_of_a_film_whose_reserve_is_that_of_a_picture(call: str, frames: int | None) -> None:
    """How many frames a film has is told by the file, or by the class; one frame is a picture."""
    note = f"the reserve of 1.5 GiB is for one picture, and a film of {frames} takes more; set reserve, or rehearse"
    sizes = footprints(text_encoder=1, transformer=2, vae=1)
    checked_wan = checked_from(f"version: 1\npipeline: {{source: Wan-AI/Wan2.1-T2V-1.3B-Diffusers}}\n{call}\n")
    notes = make_plan(checked_wan.resolved, checked_wan.spec, checked_wan.assembly, sizes, inventory(cuda=[24])).notes
    assert [each for each in notes if "film" in each] == ([note] if frames else [])


@pytest.mark.parametrize(
    ("cards", "fix"),
    [
        # 1 + 4 + 2 beside 1 of reserve
        ([7.5], "use device_map: {text_encoder: cpu, default: sequential}"),
        ([5.25], "one more card of 5.2 GiB"),
    ],
)
def test_misfit_names_the_change_that_helps(cards: Sequence[float], fix: str) -> None:
    """Each change is planned: one component on the cpu, or one more card of the same size."""
    with pytest.raises(PlanError) as caught:
        planned("digits", "device_map: sequential\nreserve: 1GiB", inventory(cuda=cards), TOY)
    task = make_task_of("digits", "device_map: sequential\nreserve: 1GiB", inventory(cuda=cards), TOY)
    offered = {text: varied for text, varied in variations(task) if varied.found() is not None}
    assert fix in offered
    assert only_problem(caught.value).fix.split("; or ") == [*offered][:3]


# --- components that run within another's phase ---


def test_component_in_nobody_s_turn_keeps_its_layer_there() -> None:
    """The safety checker's layer of 1 GiB stays for the call, beside the 1.5 GiB of the others."""
    sizes = footprints(text_encoder=0.5, unet=0.5, vae=0.5, safety_checker=8)
    plan = planned("sd15", "device_map: balanced_ultra_low_memory\nreserve: 0", inventory(cuda=[2.75]), sizes)
    checker = assignment(plan, "safety_checker")
    assert (checker.residency, checker.peak_bytes) == (LEAF, GIB)
    assert device_use(plan, "cuda:0").used_bytes == 5 * GIB // 2


def test_component_in_nobody_s_turn_that_is_split_keeps_one_layer_there(tmp_path: Path) -> None:
    """A controlnet of 8 blocks of 1 GiB: 5 stay and the last 3 come one after the other, 6 GiB at once and not 8."""
    folder = config_folder("sd15-controlnet-canny")
    assert folder is not None
    shutil.copytree(folder, tmp_path / "pipeline")
    for name in ("tokenizer", "feature_extractor"):  # not packaged
        (tmp_path / "pipeline" / name).mkdir()
    lines = f"version: 1\npipeline: {{source: {tmp_path / 'pipeline'}}}\ndevice_map: auto\nreserve: 0\n"
    spec = checked_from(f"{lines}max_memory: {{disk: 0}}\n")
    sizes = footprints(text_encoder=0.5, unet=0.5, vae=0.5, safety_checker=0.1, controlnet=8)
    layouts = {"controlnet": row(8 * GIB, 8)}
    plan = make_plan(spec.resolved, spec.spec, spec.assembly, sizes, inventory(cuda=[6.5]), layouts=layouts)
    assert assignment(plan, "controlnet").residency is SPLIT
    assert all(use.free_bytes >= 0 for use in plan.devices)
