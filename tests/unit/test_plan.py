"""Plans through the front door: the text of a spec, a machine, and what comes of it. Sizes are toy GiB."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import pytest

from dmconfig.catalog import find_pipeline, known_ids
from dmconfig.errors import Code, PlanError, Problem
from dmconfig.inventory import Inventory, parse_machine
from dmconfig.measure import measure
from dmconfig.plan import Plan, Residency, make_plan
from dmconfig.units import GIB
from tests.conftest import (
    DIGITS,
    assignment,
    checked_from,
    device_use,
    footprints,
    inventory,
    only_problem,
    plan_from,
)

SIZES = footprints(text_encoder=1, unet=4, vae=2)  # 7 GiB; the largest leaf of each is an eighth of it
FLUX = "version: 1\npipeline: {source: black-forest-labs/FLUX.1-dev, dtype: bfloat16}\n"
ALL = ("text_encoder", "unet", "vae")
CATALOGUE = sorted({pipeline.hub_id for pipeline in map(find_pipeline, known_ids()) if pipeline})
ON_THE_HUB = [hub_id for hub_id in CATALOGUE if "/" in hub_id]


def toy_plan(lines: str, machine: Inventory, *, reserve: str = "0", sizes: Any = SIZES) -> Plan:
    """The plan of the digits pipeline with toy sizes; no reserve unless one is given."""
    return plan_from(f"{DIGITS}reserve: {reserve}\n{lines}\n", machine, sizes)


def places(plan: Plan) -> dict[str, tuple[str, str, str]]:
    return {a.component: (a.execution_device, a.storage_device, a.residency.value) for a in plan.assignments}


def on(device: str) -> tuple[str, str, str]:
    return (device, device, "always")


def brought(device: str, residency: str = "while_running") -> tuple[str, str, str]:
    return (device, "cpu", residency)


def refusals(lines: str, machine: Inventory, *, reserve: str = "0") -> tuple[Problem, ...]:
    with pytest.raises(PlanError) as caught:
        toy_plan(lines, machine, reserve=reserve)
    assert caught.value.exit_code == 3
    return caught.value.problems


def check_plan(plan: Plan, machine: Inventory, components: tuple[str, ...]) -> None:
    """What holds for every plan, added up anew from its assignments."""
    assert [a.component for a in plan.assignments] == list(components)
    assert dict(plan.device_map) == {a.component: a.storage_device for a in plan.assignments}
    assert [use.id for use in plan.devices] == [device.id for device in machine.devices]
    for use, device in zip(plan.devices, machine.devices, strict=True):
        held = sum(a.nbytes for a in plan.assignments if a.storage_device == use.id)
        visiting = [a.peak_bytes for a in plan.assignments if a.execution_device == use.id != a.storage_device]
        assert held + max(visiting, default=0) <= use.used_bytes <= held + sum(visiting)
        assert use.budget_bytes <= device.free_bytes
        assert use.used_bytes + use.reserved_bytes + use.free_bytes == use.budget_bytes
        assert use.free_bytes >= 0
        assert bool(use.reserved_bytes) <= (use.used_bytes > 0)
    for a in plan.assignments:
        assert a.reason
        assert (a.residency is Residency.ALWAYS) == (a.execution_device == a.storage_device)
        assert a.storage_device in {a.execution_device, "cpu"}


# --- device_map ---


@pytest.mark.parametrize("word", ["cuda:1", "1", "'1'", "gpu:1"])
def test_one_device_holds_every_component(word: str) -> None:
    """One device means every component there, and nothing on the other."""
    plan = toy_plan(f"device_map: {word}", inventory(cuda=[24, 24]))
    assert places(plan) == dict.fromkeys(ALL, on("cuda:1"))
    assert plan.execution_device == "cuda:1"
    assert (device_use(plan, "cuda:1").used_bytes, device_use(plan, "cuda:0").used_bytes) == (7 * GIB, 0)
    assert {a.reason for a in plan.assignments} == {"device_map: cuda:1"}
    assert plan.notes == ()


def test_one_device_cpu_holds_every_component() -> None:
    """The cpu is taken at its word though an accelerator is free."""
    plan = toy_plan("device_map: cpu", inventory(cuda=[24]))
    assert places(plan) == dict.fromkeys(ALL, on("cpu"))
    assert plan.execution_device == "cpu"


def test_balanced_keeps_accelerators_even() -> None:
    """7 GiB over two cards of 8: the denoiser's 4 on one, 2 + 1 on the other."""
    plan = toy_plan("", inventory(cuda=[8, 8]))
    assert places(plan) == {"text_encoder": on("cuda:1"), "unet": on("cuda:0"), "vae": on("cuda:1")}
    assert plan.execution_device == "cuda:0"
    assert {a.reason for a in plan.assignments} == {"device_map: balanced: fits, and keeps the accelerators even"}


def test_balanced_tries_every_device_before_it_gives_up() -> None:
    """4, 2 and 1 GiB on cards of 1, 2 and 4: each has one place, and a first miss loses nothing."""
    plan = toy_plan("", inventory(cuda=[1, 2, 4]))
    assert places(plan) == {"text_encoder": on("cuda:0"), "unet": on("cuda:2"), "vae": on("cuda:1")}


def test_balanced_exact_fit_of_the_summed_limits_fits() -> None:
    """4 + 3 GiB of cards hold 7 GiB of weights: no room is set aside for an offload that is not needed."""
    plan = toy_plan("", inventory(cuda=[4, 3]))
    assert [use.free_bytes for use in plan.devices[:2]] == [0, 0]


def test_mapping_is_honoured_exactly() -> None:
    """Every component is where its line says, though all would fit on either card."""
    plan = toy_plan("device_map: {unet: cuda:1, vae: cpu, text_encoder: cuda:0}", inventory(cuda=[24, 24]))
    assert places(plan) == {"text_encoder": on("cuda:0"), "unet": on("cuda:1"), "vae": on("cpu")}
    assert plan.execution_device == "cuda:1"
    assert assignment(plan, "vae").reason == "device_map.vae: cpu"


def test_mapping_order_does_not_matter() -> None:
    """The order of lines in the file changes nothing."""
    entries = ["unet: cuda:0", "vae: cuda:1", "default: balanced"]
    limits = ["0: 6GiB", "1: 5GiB", "cpu: 1GiB"]
    plans = [
        toy_plan(f"device_map: {{{', '.join(lines)}}}\nmax_memory: {{{', '.join(caps)}}}", inventory(cuda=[8, 8]))
        for lines in itertools.permutations(entries)
        for caps in itertools.permutations(limits)
    ]
    assert all(plan == plans[0] for plan in plans)


def test_mapping_default_strategy_works_around_the_pins() -> None:
    """The pin's 2 GiB are paid first: of cuda:0's 5, 3 are left, so the denoiser's 4 go to cuda:1."""
    lines = "device_map: {vae: cuda:0, default: balanced}"
    plan = toy_plan(lines, inventory(cuda=[5, 5]))
    assert places(plan)["unet"] == on("cuda:1")
    assert places(plan)["vae"] == on("cuda:0")
    assert assignment(plan, "vae").reason == "device_map.vae: cuda:0"
    assert assignment(plan, "unet").reason == "device_map.default: balanced: fits, and keeps the accelerators even"


def test_mapping_default_device_takes_the_rest() -> None:
    """A default that is a device holds every component that is not named."""
    plan = toy_plan("device_map: {unet: cuda:0, default: cuda:1}", inventory(cuda=[24, 24]))
    assert places(plan) == {"text_encoder": on("cuda:1"), "unet": on("cuda:0"), "vae": on("cuda:1")}
    assert assignment(plan, "vae").reason == "device_map.default: cuda:1"


@pytest.mark.parametrize(
    ("offload", "residency", "peak", "how"),
    [
        ("model", "while_running", 4 * GIB, ", brought whole while it runs"),
        ("sequential", "per_leaf", GIB // 2, ", brought layer by layer"),  # a leaf of 4 GiB / 8
    ],
)
def test_mapping_entry_with_offload(offload: str, residency: str, peak: int, how: str) -> None:
    """Weights rest on the cpu and come to the device whole, or a leaf at a time."""
    lines = f"device_map: {{unet: {{execution: cuda:0, offload: {offload}}}, default: cuda:1}}"
    plan = toy_plan(lines, inventory(cuda=[8, 8]))
    unet = assignment(plan, "unet")
    assert places(plan)["unet"] == brought("cuda:0", residency)
    assert (unet.peak_bytes, unet.nbytes, unet.reason) == (peak, 4 * GIB, f"device_map.unet{how}")
    assert (device_use(plan, "cuda:0").used_bytes, device_use(plan, "cpu").used_bytes) == (peak, 4 * GIB)
    assert plan.execution_device == "cuda:0"
    assert plan.device_map["unet"] == "cpu"


def test_mapping_entry_without_offload_is_a_pin() -> None:
    """An execution device alone is where the weights rest, too."""
    plan = toy_plan("device_map: {unet: {execution: 1}, default: cuda:0}", inventory(cuda=[8, 8]))
    assert places(plan)["unet"] == on("cuda:1")


@pytest.mark.parametrize("lines", ["", "device_map: balanced", "device_map: {unet: cpu, default: balanced}"])
def test_machine_without_accelerators_has_all_on_the_cpu(lines: str) -> None:
    """Without an accelerator everything is on the cpu, recorded as such, and the plan says why."""
    plan = toy_plan(lines, inventory(cpu=8), reserve="2GiB")
    assert places(plan) == dict.fromkeys(ALL, on("cpu"))
    assert plan.execution_device == "cpu"
    assert assignment(plan, "vae").reason == "no accelerator to use"
    assert device_use(plan, "cpu").reserved_bytes == 0


def test_pin_to_the_cpu_in_the_long_form_has_its_own_reason() -> None:
    """A pin is a pin on any machine."""
    plan = toy_plan("device_map: {vae: {execution: cpu}, default: balanced}", inventory(cpu=8))
    assert assignment(plan, "vae").reason == "device_map.vae"


# --- devices that are not there ---


@pytest.mark.parametrize(
    ("lines", "path", "position", "name"),
    [
        ("device_map: cuda:7", ("device_map",), (4, 13), "cuda:7"),
        ("device_map: {unet: 2, default: balanced}", ("device_map", "unet"), (4, 20), "cuda:2"),
        ("device_map: {default: mps}", ("device_map", "default"), (4, 23), "mps:0"),
        (
            "device_map: {unet: {execution: xpu:1}, default: cpu}",
            ("device_map", "unet", "execution"),
            (4, 32),
            "xpu:1",
        ),
        ("max_memory: {cuda:3: 1GiB}", ("max_memory", "cuda:3"), (4, 22), "cuda:3"),
    ],
)
def test_device_that_is_not_there_is_refused_with_those_that_are(
    lines: str, path: tuple[str, ...], position: tuple[int, int], name: str
) -> None:
    """A device the machine lacks is shown where the file names it, with the devices there are."""
    (problem,) = refusals(lines, inventory(cuda=[24, 24]))
    assert problem.location is not None
    assert (problem.code, problem.path) == (Code.NO_SUCH_DEVICE, path)
    assert (problem.location.line, problem.location.column) == position
    assert problem.what == f"a toy machine has no {name}"
    assert problem.why == "its devices are: cuda:0, cuda:1, cpu"


def test_device_that_is_not_there_all_at_once() -> None:
    """Every absent device is told, before anything about sizes."""
    lines = "device_map: {unet: cuda:4, vae: cuda:5, default: cuda:0}\nmax_memory: {cuda:6: 1GiB}"
    assert [p.code for p in refusals(lines, inventory(cuda=[0.1]))] == [Code.NO_SUCH_DEVICE] * 3


def test_device_that_is_not_there_in_max_memory_is_placed_however_it_is_spelt() -> None:
    """A budget for device 7, written as a number, is shown at that number; an override's at the override."""
    (problem,) = refusals("max_memory: {7: 1GiB}", inventory(cuda=[24]))
    assert problem.path == ("max_memory", "7")
    assert problem.location is not None
    assert (problem.location.line, problem.location.column) == (4, 17)
    with pytest.raises(PlanError) as caught:
        plan_from(DIGITS, inventory(cuda=[24]), SIZES, {"max_memory.7": "1GiB"})
    assert only_problem(caught.value).origin == "overrides['max_memory.7']"


# --- max_memory and reserve ---


@pytest.mark.parametrize(
    ("cap", "budget"),
    [
        # a card of 24 GiB of which 20 are free
        ("10GiB", 10 * GIB),
        ("23GiB", 20 * GIB),  # no more than is free
        ("50%", 12 * GIB),  # of the total
        ("100%", 20 * GIB),
        ("free", 20 * GIB),
        ("free-8GiB", 12 * GIB),
        ("free-30GiB", 0),
        ("0", 0),
        ("10000000000", 10_000_000_000),
    ],
)
def test_max_memory_forms_are_the_budget_in_the_plan(cap: str, budget: int) -> None:
    """Every form of a limit is read back from the plan, never above what is free."""
    machine = inventory(cuda=[24, 24], free={"cuda:0": 20})
    plan = toy_plan(f"max_memory: {{0: {cap}, 1: 24GiB, cpu: 9GiB}}", machine)
    assert device_use(plan, "cuda:0").budget_bytes == budget
    assert device_use(plan, "cpu").budget_bytes == 9 * GIB


def test_max_memory_absent_is_what_is_free() -> None:
    """Without limits each device offers what is free."""
    plan = toy_plan("", inventory(cuda=[24], cpu=64, free={"cuda:0": 20, "cpu": 50}))
    assert [use.budget_bytes for use in plan.devices] == [20 * GIB, 50 * GIB]


def test_max_memory_naming_one_accelerator_excludes_the_others() -> None:
    """What is not named is not used, and the plan says so."""
    plan = toy_plan("max_memory: {1: 8GiB}", inventory(cuda=[24, 24, 24]))
    assert places(plan) == dict.fromkeys(ALL, on("cuda:1"))
    assert [use.budget_bytes for use in plan.devices[:3]] == [0, 8 * GIB, 0]
    assert plan.notes == ("cuda:0, cuda:2 not used: max_memory names other accelerators",)


def test_max_memory_naming_the_cpu_alone_excludes_no_accelerator() -> None:
    """A limit on the cpu is about the cpu."""
    plan = toy_plan("max_memory: {cpu: 1GiB}", inventory(cuda=[24, 24]))
    assert {a.execution_device for a in plan.assignments} == {"cuda:0", "cuda:1"}
    assert plan.notes == ()


@pytest.mark.parametrize("excluded", ["0", "1", "2"])
def test_max_memory_zero_excludes_a_card_from_balance(excluded: str) -> None:
    """A card of no budget takes nothing, and the others share the load; a limit of 0 needs no note."""
    caps = ", ".join(f"{index}: {0 if index == excluded else '8GiB'}" for index in "012")
    plan = toy_plan(f"max_memory: {{{caps}}}", inventory(cuda=[8, 8, 8]))
    used = {use.id: use.used_bytes for use in plan.devices[:3]}
    assert used[f"cuda:{excluded}"] == 0
    assert sorted(used.values()) == [0, 3 * GIB, 4 * GIB]
    assert plan.notes == ()


@pytest.mark.parametrize("low_memory", ["none", "cpu_offload_with_hook"])
def test_max_memory_zero_on_the_only_card_leaves_the_cpu(low_memory: str) -> None:
    """With no accelerator to use, everything is on the cpu."""
    plan = toy_plan(f"max_memory: {{0: 0, cpu: 32GiB}}\nlow_memory: {low_memory}", inventory(cuda=[24]))
    assert places(plan) == dict.fromkeys(ALL, on("cpu"))
    effect = f"low_memory: {low_memory} has no effect: there is no accelerator to use"
    assert plan.notes == (() if low_memory == "none" else (effect,))


def test_max_memory_cpu_lets_what_does_not_fit_be_computed_there() -> None:
    """A budget on the cpu is leave to use it: 4 GiB do not fit a card of 3, 2 + 1 do."""
    plan = toy_plan("max_memory: {0: 3GiB, cpu: 4GiB}", inventory(cuda=[24]))
    assert places(plan) == {"text_encoder": on("cuda:0"), "unet": on("cpu"), "vae": on("cuda:0")}
    assert assignment(plan, "unet").reason == (
        "no accelerator has room for it; computed on the cpu, which max_memory.cpu allows"
    )
    assert plan.execution_device == "cpu"


def test_max_memory_without_cpu_does_not_compute_there() -> None:
    """Nothing spills to the cpu unasked."""
    (problem,) = refusals("max_memory: {0: 3GiB}", inventory(cuda=[24]))
    assert problem.code is Code.DOES_NOT_FIT
    assert problem.what.endswith("; cuda:0 offers 3.0 GiB (max_memory, of 24.0 GiB), 4.0 GiB short")


def test_max_memory_cpu_limit_is_kept() -> None:
    """4 GiB on a cpu of 3 are refused, however much the machine has."""
    lines = "max_memory: {0: 3GiB, cpu: 3GiB}"
    assert refusals(lines, inventory(cuda=[24], cpu=64))[0].code is Code.DOES_NOT_FIT


def test_pin_to_a_card_that_max_memory_excludes_says_so() -> None:
    """The card has room; that another is named under max_memory is why it offers none."""
    lines = "device_map: {unet: cuda:1, default: cuda:0}\nmax_memory: {0: 20GiB}"
    (problem,) = refusals(lines, inventory(cuda=[24, 24]))
    assert problem.what == "on cuda:1: unet 4.0 GiB; cuda:1 offers 0 B (max_memory, of 24.0 GiB), 4.0 GiB short"
    assert problem.fix.startswith("remove max_memory; or place unet on cuda:0")


def test_reserve_is_kept_on_every_accelerator_that_runs_something() -> None:
    """6 GiB hold 4 + 2 of reserve exactly; an idle card reserves nothing, nor does the cpu."""
    plan = toy_plan("device_map: {unet: 0, default: cpu}", inventory(cuda=[6, 6]), reserve="2GiB")
    assert [use.reserved_bytes for use in plan.devices] == [2 * GIB, 0, 0]
    assert [use.free_bytes for use in plan.devices] == [0, 6 * GIB, 61 * GIB]
    assert refusals("device_map: {unet: 0, default: cpu}", inventory(cuda=[5.9]), reserve="2GiB")


def test_reserve_by_default_is_above_zero() -> None:
    """Weights that fill a card exactly do not fit without room for activations."""
    with pytest.raises(PlanError):
        plan_from(DIGITS + "device_map: cuda\n", inventory(cuda=[7]), SIZES)
    assert plan_from(DIGITS + "device_map: cuda\n", inventory(cuda=[8.5]), SIZES).devices[0].free_bytes == 0


# --- low_memory ---


@pytest.mark.parametrize(
    ("word", "residency", "used"),
    [
        ("cpu_offload_with_hook", "while_running", 4 * GIB),  # the largest at a time
        ("sequential_cpu_offload", "per_leaf", GIB // 2),  # its largest leaf
    ],
)
@pytest.mark.parametrize("device_map", ["cuda:0", "cpu"])
def test_low_memory_with_one_device_brings_every_component(
    device_map: str, word: str, residency: str, used: int
) -> None:
    """Weights rest on the cpu, parts come to the device; cpu stands for the first accelerator, as in diffusers."""
    plan = toy_plan(f"device_map: {device_map}\nlow_memory: {word}", inventory(cuda=[4, 4], cpu=7))
    assert places(plan) == dict.fromkeys(ALL, brought("cuda:0", residency))
    assert device_use(plan, "cuda:0").used_bytes == used
    assert (device_use(plan, "cpu").used_bytes, device_use(plan, "cpu").free_bytes) == (7 * GIB, 0)
    assert plan.execution_device == "cuda:0"
    assert set(plan.device_map.values()) == {"cpu"}


def test_low_memory_with_a_strategy_brings_only_what_does_not_fit() -> None:
    """A card of 6: 4 stay and 2 or 1 come: bringing vae and text encoder moves 3 GiB, the denoiser would be 4."""
    plan = toy_plan("low_memory: cpu_offload_with_hook", inventory(cuda=[6]))
    assert places(plan) == {"text_encoder": brought("cuda:0"), "unet": on("cuda:0"), "vae": brought("cuda:0")}
    assert device_use(plan, "cuda:0").used_bytes == 6 * GIB
    assert plan.notes == ()
    assert assignment(plan, "vae").reason == (
        "no accelerator has room for it beside the others, brought whole while it runs"
    )


def test_low_memory_that_is_not_needed_is_noted() -> None:
    """When everything fits everything stays, and the word's idleness is told."""
    plan = toy_plan("low_memory: cpu_offload_with_hook", inventory(cuda=[7]))
    assert places(plan) == dict.fromkeys(ALL, on("cuda:0"))
    note = "low_memory: cpu_offload_with_hook is not needed: every component fits an accelerator"
    assert plan.notes == (note,)


def test_low_memory_acts_on_the_default_and_not_on_pins() -> None:
    """What is named is where the file says; the others come and go."""
    lines = "device_map: {unet: cuda:0, default: cuda:1}\nlow_memory: sequential_cpu_offload"
    plan = toy_plan(lines, inventory(cuda=[4, 4]))
    assert places(plan) == {
        "text_encoder": brought("cuda:1", "per_leaf"),
        "unet": on("cuda:0"),
        "vae": brought("cuda:1", "per_leaf"),
    }
    assert assignment(plan, "vae").reason == "device_map.default: cuda:1, brought layer by layer"


def test_low_memory_needs_room_on_the_cpu() -> None:
    """Weights that are brought rest on the cpu: 7 GiB do not rest in 6, and the problem says which 7."""
    lines = "device_map: cuda:0\nlow_memory: cpu_offload_with_hook"
    (problem,) = refusals(lines, inventory(cuda=[24], cpu=6))
    assert (
        problem.what == "on cpu: vae 2.0 GiB + text_encoder 1.0 GiB + unet 4.0 GiB; cpu offers 6.0 GiB, 1.0 GiB short"
    )
    assert problem.fix == "use device_map: balanced"


def test_low_memory_component_too_large_for_the_cpu_says_what_it_needs_there() -> None:
    """4 GiB do not rest in 3: the number that does not fit is in the message."""
    lines = "device_map: cuda:0\nlow_memory: sequential_cpu_offload"
    (problem,) = refusals(lines, inventory(cuda=[16], cpu=3))
    assert (
        problem.what == "on cpu: vae 2.0 GiB + text_encoder 1.0 GiB + unet 4.0 GiB; cpu offers 3.0 GiB, 4.0 GiB short"
    )


def test_low_memory_on_a_machine_without_accelerators_has_no_effect() -> None:
    """There is nowhere to bring anything to."""
    plan = toy_plan("low_memory: sequential_cpu_offload", inventory(cpu=8))
    assert places(plan) == dict.fromkeys(ALL, on("cpu"))
    assert plan.notes == ("low_memory: sequential_cpu_offload has no effect: there is no accelerator to use",)


def test_low_memory_because_of_the_reserve_says_so() -> None:
    """7 GiB would fit a card of 8; a reserve of 2 is why something is brought."""
    plan = toy_plan("low_memory: cpu_offload_with_hook", inventory(cuda=[8]), reserve="2GiB")
    moved = [a for a in plan.assignments if a.residency is not Residency.ALWAYS]
    assert moved
    assert all("reserve" in a.reason for a in moved) or any("reserve" in note for note in plan.notes)


def test_component_outside_the_offload_order_stays_once_brought() -> None:
    """A safety checker is not in the pipeline's order: with the largest other component it needs 4 + 1.5 GiB."""
    text = "version: 1\npipeline: {source: stable-diffusion-v1-5/stable-diffusion-v1-5}\nreserve: 0\n"
    text += "device_map: cuda:0\nlow_memory: cpu_offload_with_hook\n"
    sizes = footprints(text_encoder=1, unet=4, vae=2, safety_checker=1.5)
    plan = plan_from(text, inventory(cuda=[5.5]), sizes)
    assert device_use(plan, "cuda:0").used_bytes == 11 * GIB // 2
    with pytest.raises(PlanError):
        plan_from(text, inventory(cuda=[5.4]), sizes)


# --- what does not fit, and the advice ---


def test_misfit_of_a_phase_adds_up() -> None:
    """Each sum is what is short and what there is: 2 + 1 + 4 + 0.5 + 2.5 = 10 = 8 + 2; and 2 + 3 > 4."""
    text = f"{DIGITS}reserve: {{vae: 3GiB, default: 512MiB}}\n"
    sizes = footprints(text_encoder=1, unet=4, vae=2)
    with pytest.raises(PlanError) as raised:
        plan_from(f"{text}device_map: 0\n", inventory(cuda=[8]), sizes)
    assert only_problem(raised.value).what == (
        "on cuda:0: vae 2.0 GiB + text_encoder 1.0 GiB + unet 4.0 GiB + 512.0 MiB reserve + 2.5 GiB more while vae "
        "runs; cuda:0 offers 8.0 GiB, 2.0 GiB short"
    )
    with pytest.raises(PlanError) as raised:
        plan_from(
            f"{text}max_memory: {{0: 8GiB, 1: 4GiB}}\ndevice_map: {{unet: 0, vae: 1, default: 0}}\n",
            inventory(cuda=[8, 8]),
            sizes,
        )
    assert only_problem(raised.value).what == (
        "on cuda:1: vae 2.0 GiB + 512.0 MiB reserve + 2.5 GiB more while vae runs; "
        "cuda:1 offers 4.0 GiB (max_memory, of 8.0 GiB), 1.0 GiB short"
    )
    with pytest.raises(PlanError) as raised:
        plan_from(f"{text}device_map: balanced\n", inventory(cuda=[4, 4.5]), sizes)
    assert "vae needs 2.0 GiB + 3.0 GiB reserve; cuda:0 offers 4.0 GiB, cuda:1 offers 4.5 GiB" in str(raised.value)


def test_misfit_names_need_and_offer_of_each_component() -> None:
    """A component that fits nowhere is named with what it needs and what each of its devices offers."""
    problems = refusals("", inventory(cuda=[3, 3.5]), reserve="1.5GiB")
    assert [problem.what for problem in problems] == [
        "unet needs 4.0 GiB + 1.5 GiB reserve; cuda:0 offers 3.0 GiB, cuda:1 offers 3.5 GiB"
    ]
    (problem,) = problems
    assert (problem.code, problem.path) == (Code.DOES_NOT_FIT, ("device_map",))


def test_misfit_of_a_pin_is_at_its_line() -> None:
    """A pinned component that does not fit is shown where it is pinned."""
    (problem,) = refusals("device_map: {unet: cuda:1, default: cuda:0}", inventory(cuda=[8, 2]))
    assert problem.location is not None
    assert (problem.path, problem.location.line, problem.location.column) == (("device_map", "unet"), 4, 20)
    assert problem.what == "on cuda:1: unet 4.0 GiB; cuda:1 offers 2.0 GiB, 2.0 GiB short"


def test_misfit_of_pins_adds_up_what_the_file_puts_there() -> None:
    """When a device is asked to hold more than it has, its components are added up, with the reserve."""
    (problem,) = refusals("device_map: cuda:0", inventory(cuda=[8]), reserve="1.5GiB")
    assert problem.what == (
        "on cuda:0: vae 2.0 GiB + text_encoder 1.0 GiB + unet 4.0 GiB + 1.5 GiB reserve; "
        "cuda:0 offers 8.0 GiB, 512.0 MiB short"
    )


def test_misfit_of_all_together_lists_them() -> None:
    """When each fits alone and nothing is pinned, the sum is the problem, and its parts are listed."""
    (problem,) = refusals("", inventory(cuda=[4, 2.5]))
    assert problem.what == (
        "together the components need 7.0 GiB + 0 B reserve on each accelerator; "
        "cuda:0 offers 4.0 GiB, cuda:1 offers 2.5 GiB"
    )
    assert problem.why == "they are: text_encoder 1.0 GiB, unet 4.0 GiB, vae 2.0 GiB"


def test_misfit_that_nothing_helps_says_so() -> None:
    """Where no change to the file helps, none is promised."""
    problems = refusals("", inventory(cuda=[0.1], cpu=1))
    assert {problem.fix for problem in problems} == {
        "use a machine with more memory, a smaller dtype, or a smaller pipeline"
    }


@pytest.mark.parametrize(
    ("lines", "machine", "fix"),
    [
        ("device_map: cuda", inventory(cuda=[8]), "lower reserve to 1.0 GiB; or use low_memory: cpu_offload_with_hook"),
        ("device_map: cuda", inventory(cuda=[6, 6]), "use device_map: balanced; or use low_memory: cpu"),
        ("device_map: cuda", inventory(cuda=[2]), "use low_memory: group_offload; or use low_memory: sequential_cpu"),
        (
            "device_map: {unet: 0, default: 0}",
            inventory(cuda=[7, 3]),
            "lower reserve to 0 B; or use device_map: balanced with low_memory: cpu_offload_with_hook; or ",
        ),
    ],
)
def test_advice_least_change_first(lines: str, machine: Inventory, fix: str) -> None:
    """The changes that help come in the order of how little they change."""
    problems = refusals(lines, machine, reserve="1.5GiB")
    assert all(problem.fix.startswith(fix) for problem in problems)


def advised(fix: str) -> list[dict[str, Any]]:
    """The changes in a fix, as overrides."""
    if fix.startswith(("use a machine", "name one of these")):
        return []
    changes = []
    for piece in fix.split("; or "):
        if piece.startswith("one more card of"):
            continue  # of the machine, not of the file
        change: dict[str, Any] = dict(re.findall(r"(device_map|low_memory): (\w+)", piece))
        if on_cpu := re.fullmatch(r"use device_map\.(\w+): cpu", piece):
            change[f"device_map.{on_cpu[1]}"] = "cpu"
        if as_map := re.fullmatch(r"use device_map: \{(\w+): cpu, default: (\w+)\}", piece):
            change["device_map"] = {as_map[1]: "cpu", "default": as_map[2]}
        if pin := re.fullmatch(r"place (\w+) on (\S+)", piece):
            change[f"device_map.{pin[1]}"] = pin[2]
        if piece == "remove max_memory":
            change["max_memory"] = {}
        if reserve := re.fullmatch(r"lower reserve to (.+)", piece):
            change["reserve"] = reserve[1]
        assert change, piece
        changes.append(change)
    return changes


MACHINES = ["1x8GiB", "1x24GiB", "2x24GiB", "4x24GiB", "1x80GiB", "16GiB,10GiB", "0"]
MAPS = {
    "balanced": "",
    "cuda:0": "device_map: cuda:0\n",
    "cpu": "device_map: cpu\n",
    "denoiser": "device_map: {DENOISER: cuda:0, default: balanced}\n",
    "capped": "max_memory: {0: 12GiB, cpu: 20GiB}\n",
    "cpu_offload_with_hook": "low_memory: cpu_offload_with_hook\n",
    "sequential_cpu_offload": "low_memory: sequential_cpu_offload\n",
}


@pytest.mark.parametrize("hub_id", ON_THE_HUB)
def test_every_catalogue_pipeline_is_planned_or_refused_with_true_advice(hub_id: str) -> None:
    """On machines small and large, in every form: a plan within all limits, or exit code 3 with advice that helps."""
    for lines in MAPS.values():
        text = f"version: 1\npipeline: {{source: {hub_id}, dtype: bfloat16}}\n"
        denoiser = checked_from(text).assembly.denoiser
        text += lines.replace("DENOISER", denoiser)
        checked = checked_from(text)
        sizes = measure(checked.resolved, checked.assembly)
        components = tuple(part.name for part in checked.assembly.modules)
        for gpus in MACHINES:
            machine = parse_machine(gpus, "64GiB")
            try:
                plans = [make_plan(checked.resolved, checked.spec, checked.assembly, sizes, machine)]
            except PlanError as error:
                fixes = {problem.fix for problem in error.problems}
                plans = [plan_from(text, machine, overrides=each) for fix in fixes for each in advised(fix)]
            for plan in plans:
                check_plan(plan, machine, components)
                assert plan.execution_device == assignment(plan, denoiser).execution_device


def test_catalogue_pipelines_on_the_hub_are_most_of_them() -> None:
    """The catalogue has 29 pipelines; those above are the ones whose id can be a source."""
    assert len(CATALOGUE) == 29
    assert len(ON_THE_HUB) >= 26


# --- known figures ---


def test_flux_on_one_card_of_24_gib_is_brought_in_turn() -> None:
    """The public model in bfloat16: 22.2 GiB of denoiser on a card of 24, all of 31.4 GiB on the cpu."""
    text = FLUX + "device_map: cuda:0\nlow_memory: cpu_offload_with_hook\nreserve: 1GiB\n"
    plan = plan_from(text, parse_machine("24GiB", "64GiB"))
    assert device_use(plan, "cuda:0").used_bytes == 23802816640
    # vae 167639366 + CLIP 246120960 + T5 9524621312 + denoiser 23802816640
    assert device_use(plan, "cpu").used_bytes == 33741198278
    assert {a.measured_from for a in plan.assignments} == {"catalogue"}


def test_flux_on_two_cards_of_24_gib_moves_nothing() -> None:
    """The denoiser has a card to itself, the other 9.3 GiB share the second; latents live with the denoiser."""
    plan = plan_from(FLUX, parse_machine("2x24GiB", "64GiB"))
    assert dict(plan.device_map) == {
        "vae": "cuda:1",
        "text_encoder": "cuda:1",
        "text_encoder_2": "cuda:1",
        "transformer": "cuda:0",
    }
    assert (plan.pipeline, plan.machine, plan.execution_device) == (
        "FluxPipeline",
        "--gpus 2x24GiB --ram 64GiB",
        "cuda:0",
    )


def test_digits_are_planned_from_their_weights() -> None:
    """The trained example has weights on disk: they are what is measured, and no weight is needed elsewhere."""
    plan = plan_from(DIGITS, inventory(cuda=[2]))
    assert {a.measured_from for a in plan.assignments} == {"weights"}
    assert [a.component for a in plan.assignments] == ["vae", "text_encoder", "unet"]
    assert sum(a.nbytes for a in plan.assignments) == device_use(plan, "cuda:0").used_bytes > 0


def test_make_plan_is_a_pure_function() -> None:
    """Nothing given is changed, and planning again gives an equal plan."""
    checked = checked_from(FLUX + "max_memory: {0: 80%, cpu: free-8GiB}\nlow_memory: sequential_cpu_offload\n")
    sizes = dict(measure(checked.resolved, checked.assembly))
    machine = inventory(cuda=[24, 24])
    before = copy.deepcopy((checked.spec, sizes, machine, checked.resolved.data))
    plan = make_plan(checked.resolved, checked.spec, checked.assembly, sizes, machine, notes=("one",))
    assert (checked.spec, sizes, machine, checked.resolved.data) == before
    assert make_plan(checked.resolved, checked.spec, checked.assembly, sizes, machine, notes=("one",)) == plan
    assert plan.notes[0] == "one"
