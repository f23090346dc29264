"""Forms of a device map and strategies, as people have reported them: one section per report.

The numbers B01 to B20 stand for public reports on diffusers, accelerate, transformers and ComfyUI. All here is
planning, with toy sizes in GiB; what has to load a pipeline is in
``tests/integration/test_field_reports_device_maps.py``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from dmconfig.errors import Code, DMConfigError, PlanError, Problem
from dmconfig.inventory import Inventory, parse_machine
from dmconfig.layout import LaidOutModule, Layout
from dmconfig.load import plan_for
from dmconfig.plan import Plan, Residency, make_plan
from dmconfig.spec import STRATEGIES
from dmconfig.units import GIB, MIB
from tests.conftest import DIGITS, EXAMPLES, assignment, checked_from, device_use, footprints, inventory, plan_from
from tests.sparse_weights import write_safetensors

SIZES = footprints(text_encoder=1, unet=4, vae=2)
NAMES = ("vae", "text_encoder", "unet")
TWO = inventory(cuda=[24, 24])
SMALL = {"balanced_low_memory": [6], "balanced_ultra_low_memory": [3], "auto": [3]}
"""Cards too small for all of it, for the strategies that need no other word to use them."""

over_strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def toy_plan(lines: str, machine: Inventory = TWO) -> Plan:
    """The plan of the digits with toy sizes and no reserve."""
    return plan_from(f"{DIGITS}reserve: 0\n{lines}\n", machine, SIZES)


def real_plan(lines: str, machine: Inventory = TWO) -> Plan:
    """The plan of the digits with their own sizes and modules, and no reserve."""
    return plan_for(checked_from(f"{DIGITS}reserve: 0\n{lines}\n"), machine)


def problems(lines: str, machine: Inventory = TWO) -> tuple[Problem, ...]:
    """What is wrong with a file that is refused; each problem has a place in it."""
    with pytest.raises(DMConfigError) as caught:
        real_plan(lines, machine)
    assert all(problem.location is not None for problem in caught.value.problems)
    return caught.value.problems


def line_of(problem: Problem) -> int:
    """The line that a problem points at; those under test begin with line 4."""
    assert problem.location is not None
    return problem.location.line


def devices_of(plan: Plan) -> dict[str, str]:
    """Where each component runs."""
    return {each.component: each.execution_device for each in plan.assignments}


# B01: only some words and no mapping are accepted, whatever the documentation says


@pytest.mark.parametrize(
    "form",
    [*STRATEGIES, "cuda", "cuda:0", "cuda:1", "gpu:1", "0", "1", "'1'", "cpu", "cpu:0"]
    + [f"{{default: {word}}}" for word in (*STRATEGIES, "cuda:1", "cpu")]
    + ["{unet: cuda:0, vae: cuda:1, text_encoder: cpu}", "{unet: 1, default: auto}"],
)
def test_b01_every_form_of_a_device_map_is_planned(form: str) -> None:
    """A strategy, a device under any of its names, and a mapping are each planned, for every component."""
    plan = toy_plan(f"device_map: {form}")
    assert [*plan.device_map] == [*NAMES]
    assert {*plan.device_map.values()} <= {"cuda:0", "cuda:1", "cpu"}


@pytest.mark.parametrize("kind", ["mps", "xpu", "npu"])
def test_b01_a_device_of_another_vendor_is_a_form_too(kind: str) -> None:
    """A kind without a number is its first device, on any vendor's machine."""
    machine = inventory(cuda=[24])
    machine = replace(machine, accelerators=(replace(machine.accelerators[0], id=f"{kind}:0"),))
    assert {*toy_plan(f"device_map: {kind}", machine).device_map.values()} == {f"{kind}:0"}


@pytest.mark.parametrize("word", ["balancd", "balanced_low_1", "naive", "cuda:x", "meta", "Auto"])
@pytest.mark.parametrize("template", ["device_map: {}", "device_map: {{default: {}}}", "device_map:\n  default: {}"])
def test_b01_an_unknown_word_is_refused_with_all_that_are_accepted(word: str, template: str) -> None:
    """The problem is at the word, and lists every strategy and every way to write a device."""
    (problem,) = problems(template.format(word))
    assert problem.code is Code.BAD_DEVICE
    assert line_of(problem) == 4 + template.count("\n")
    assert problem.what.endswith(f"; or a strategy: {', '.join(STRATEGIES)}")
    assert all(form in problem.what for form in (repr(word), "cpu", "number (0)", "kind (cuda)", "cuda:0"))


@pytest.mark.parametrize("value", ["true", "null", "[]", "[cuda:0]", "2.5", "-1", "''"])
def test_b01_a_value_that_is_no_word_at_all_is_refused_in_the_same_way(value: str) -> None:
    """What YAML makes something else of is an error with the accepted words, never a guess."""
    (problem,) = problems(f"device_map: {value}")
    assert (problem.code, line_of(problem)) == (Code.BAD_DEVICE, 4)
    assert all(word in problem.what for word in ("cuda:0", *STRATEGIES))


# B04: a device per component, by hand


@pytest.mark.parametrize("devices", [*itertools.product(["cuda:0", "cuda:1", "cpu"], repeat=3)])
def test_b04_a_device_per_component_is_honoured_exactly(devices: tuple[str, ...]) -> None:
    """Every one of the 27 ways to place three components by hand is the plan, with latents where the denoiser is."""
    wanted = dict(zip(NAMES, devices, strict=True))
    plan = toy_plan(f"device_map: {{{', '.join(f'{name}: {device}' for name, device in wanted.items())}}}")
    assert devices_of(plan) == dict(plan.device_map) == wanted
    assert plan.execution_device == wanted["unet"]
    assert {each.residency for each in plan.assignments} == {Residency.ALWAYS}


# B05: some by hand, the rest planned


def fits_by_hand(pins: Mapping[str, str], caps: Mapping[str, float], sizes: Mapping[str, float]) -> bool:
    """Tell whether any way to place the components that are not pinned keeps within the limits."""
    free = [name for name in sizes if name not in pins]
    for devices in itertools.product(caps, repeat=len(free)):
        held = dict.fromkeys(caps, 0.0)
        for name, device in {**pins, **dict(zip(free, devices, strict=True))}.items():
            held[device] += sizes[name]
        if all(held[device] <= cap for device, cap in caps.items()):
            return True
    return False


@pytest.mark.parametrize("strategy", ["balanced", "balanced_low_0", "sequential"])
def test_b05_pins_are_kept_and_paid_for_before_the_rest_is_planned(strategy: str) -> None:
    """Over random limits and pins: the pins stand, no limit is broken, and what can be placed around them is."""
    rng = random.Random(5)  # noqa: S311 - toy numbers
    found = set()
    for _ in range(150):
        sizes = {name: rng.randint(1, 6) for name in NAMES}
        caps = {f"cuda:{index}": rng.randint(3, 9) for index in range(rng.randint(1, 3))}
        pins = {name: rng.choice([*caps]) for name in NAMES if rng.random() < 0.4}
        entries = [f"{name}: {device}" for name, device in pins.items()]
        limits = ", ".join(f"{device}: {cap}GiB" for device, cap in caps.items())
        text = f"{DIGITS}reserve: 0\ndevice_map: {{{', '.join([*entries, f'default: {strategy}'])}}}\n"
        machine = inventory(cuda=[24] * len(caps))
        try:
            plan = plan_from(f"{text}max_memory: {{{limits}}}\n", machine, footprints(**sizes))
        except PlanError:
            assert not fits_by_hand(pins, caps, sizes)
            found.add(False)
            continue
        assert pins.items() <= devices_of(plan).items()
        assert all(device_use(plan, device).used_bytes <= cap * GIB for device, cap in caps.items())
        found.add(True)
    assert found == {True, False}


def test_b05_a_pin_leaves_less_of_its_device_to_the_rest() -> None:
    """The vae's 2 GiB are taken off the second card, so the denoiser's 4 have room there, or have not."""
    for caps, unet in (
        ("0: 6GiB, 1: 10GiB", "cuda:1"),  # 6 of 10 are more even than 4 of 6
        ("0: 6GiB, 1: 5.5GiB", "cuda:0"),  # 3.5 are left
        ("0: 3GiB, 1: 6GiB", "cuda:1"),  # an exact fit
    ):
        plan = toy_plan(f"device_map: {{vae: cuda:1, default: balanced}}\nmax_memory: {{{caps}}}")
        assert (devices_of(plan)["vae"], devices_of(plan)["unet"]) == ("cuda:1", unet)


# B06, B19: classes that do not say which of their modules stay whole

BLOCKS = Layout(
    modules=(
        LaidOutModule("", 0, whole=False),
        *(LaidOutModule(f"block_{index}", GIB, whole=True) for index in range(4)),
    ),
    can_split=False,
)
"""A denoiser of four layers of 1 GiB, whose class says nothing."""


def plan_of_a_class_that_says_nothing(device_map: str, machine: Inventory) -> Plan:
    """The plan of the digits with such a denoiser."""
    checked = checked_from(f"{DIGITS}reserve: 0\ndevice_map: {device_map}\n")
    sizes = {**SIZES, "unet": replace(SIZES["unet"], largest_leaf_bytes=GIB)}
    return make_plan(checked.resolved, checked.spec, checked.assembly, sizes, machine, layouts={"unet": BLOCKS})


@pytest.mark.parametrize("device_map", [*STRATEGIES, "cuda:0", "{unet: cuda:1, default: cuda:0}"])
def test_b06_whole_components_need_no_word_of_their_class(device_map: str) -> None:
    """Strategies, devices and pins place a component whole, whatever its class says of splitting."""
    plan = plan_of_a_class_that_says_nothing(device_map, TWO)
    assert {each.residency for each in plan.assignments} == {Residency.ALWAYS}
    assert not assignment(plan, "unet").parts


def test_b06_a_split_that_the_class_rules_out_is_refused_with_its_name() -> None:
    """4 GiB do not go over two cards of 3 when they cannot be split: the message names the component and its class."""
    with pytest.raises(PlanError) as caught:
        plan_of_a_class_that_says_nothing("{unet: {execution: [0, 1]}, default: cpu}", inventory(cuda=[3, 3]))
    (problem,) = caught.value.problems
    text = f"{problem.what} {problem.why}"
    assert problem.path == ("device_map", "unet")
    assert "unet" in text
    assert "UNet2DConditionModel" in text
    assert "split" in text


@pytest.mark.parametrize("offload", ["none", "sequential"])
@pytest.mark.parametrize("cards", [[5, 5], [3, 5]])
def test_b19_a_class_that_says_nothing_is_placed_whole_with_a_note(offload: str, cards: list[float]) -> None:
    """Spread over a list of devices, it goes to the first that has room for all of it, and the plan says why."""
    device_map = f"{{unet: {{execution: [0, 1], offload: {offload}}}, default: cpu}}"
    plan = plan_of_a_class_that_says_nothing(device_map, inventory(cuda=cards))
    unet = assignment(plan, "unet")
    first_with_room = f"cuda:{cards.index(5)}"
    assert (unet.execution_device, unet.residency, unet.parts) == (first_with_room, Residency.ALWAYS, ())
    note = "unet is placed whole: its class does not say which of its modules stay whole (_no_split_modules)"
    assert plan.notes == (note,)


def test_b19_auto_places_a_class_that_says_nothing_whole() -> None:
    """Where two cards of 3 could share the denoiser's 4, it is brought, whole or by layer, and not refused."""
    plan = plan_of_a_class_that_says_nothing("auto", inventory(cuda=[3, 3]))
    unet = assignment(plan, "unet")
    assert not unet.parts
    assert unet.residency is Residency.PER_LEAF


def test_b19_auto_says_that_a_component_could_not_be_split() -> None:
    """The one reason for which weights travel on each step is in the plan: as a note, or beside the component."""
    plan = plan_of_a_class_that_says_nothing("auto", inventory(cuda=[3, 3]))
    assert "split" in " ".join([*plan.notes, assignment(plan, "unet").reason])


# B07: one device for everything


@pytest.mark.parametrize(
    ("form", "device"),
    [("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("1", "cuda:1"), ("gpu:1", "cuda:1"), ("cpu", "cpu"), ("cpu:0", "cpu")],
)
@pytest.mark.parametrize("template", ["{}", "{{default: {}}}"])
def test_b07_one_device_is_for_everything(form: str, device: str, template: str) -> None:
    """Every component with weights is there always, so that nothing moves, and nothing else is used."""
    plan = toy_plan(f"device_map: {template.format(form)}")
    assert {*devices_of(plan).values(), *plan.device_map.values(), plan.execution_device} == {device}
    assert {each.residency for each in plan.assignments} == {Residency.ALWAYS}
    assert {use.id for use in plan.devices if use.used_bytes} == {device}


# B08: loaded on the cpu first, offloaded then


@pytest.mark.parametrize(
    ("word", "residency"),
    [
        ("cpu_offload_with_hook", Residency.WHILE_RUNNING),
        ("sequential_cpu_offload", Residency.PER_LEAF),
        ("group_offload", Residency.PER_GROUP),
    ],
)
@pytest.mark.parametrize("form", ["cpu", "{default: cpu}"])
def test_b08_a_map_of_the_cpu_does_not_stand_in_the_way_of_offloading(
    form: str, word: str, residency: Residency
) -> None:
    """Everything rests on the cpu, as the map says, and runs on the first accelerator, as the word says."""
    plan = toy_plan(f"device_map: {form}\nlow_memory: {word}")
    assert dict(plan.device_map) == dict.fromkeys(NAMES, "cpu")
    assert devices_of(plan) == dict.fromkeys(NAMES, "cuda:0")
    assert {each.residency for each in plan.assignments} == {residency}


# B09: a strategy is expanded before anything is placed


@over_strategies
@pytest.mark.parametrize("template", ["{}", "{{default: {}}}", "{{vae: cuda:0, default: {}}}"])
def test_b09_a_strategy_is_expanded_into_devices(strategy: str, template: str) -> None:
    """What is handed on names a device for every component; the word itself is nowhere in it."""
    for machine in (TWO, inventory(cuda=SMALL.get(strategy, [24])), inventory(cpu=64)):
        if not machine.accelerators and "cuda" in template:
            continue
        plan = toy_plan(f"device_map: {template.format(strategy)}", machine)
        there = {device.id for device in machine.devices}
        assert [*plan.device_map] == [*NAMES]
        assert {*plan.device_map.values(), *devices_of(plan).values(), plan.execution_device} <= there


# B10: keys that are nothing of the pipeline's


@pytest.mark.parametrize(
    ("lines", "key", "meant"),
    [
        ("device_map: {unett: 0, default: cpu}", "unett", "'unet'"),
        ("device_map: {encoder: 0, default: cpu}", "encoder", "'text_encoder'"),
        ("device_map: {unet.mid_blok: 0, default: cpu}", "unet.mid_blok", "'unet.mid_block'"),
        ("device_map: {unet.down_blocks.7: 0, default: cpu}", "unet.down_blocks.7", "'unet.down_blocks.1'"),
        ("device_map: {unet.conv_in.weight: 0, default: cpu}", "unet.conv_in.weight", "'unet.conv_in'"),
        ("device_map: {vay.decoder: 0, default: cpu}", "vay.decoder", "'vae'"),
        ("components: {unett: {dtype: float16}}", "unett", "'unet'"),
        ("calls: {unett: 3}", "unett", "'unet'"),
        ("device_mapp: balanced", "device_mapp", "'device_map'"),
    ],
    ids=lambda value: value if " " not in value else "",
)
def test_b10_a_key_that_matches_nothing_is_refused_with_the_nearest_name(lines: str, key: str, meant: str) -> None:
    """A component, a module, a parameter's name or a key of the file: shown at its line, with what was meant."""
    (problem,) = problems(lines)
    assert problem.path is not None
    assert (problem.path[-1], line_of(problem)) == (key, 4)
    assert meant in problem.fix


def test_b10_keys_that_match_nothing_come_all_at_once() -> None:
    """Three typing errors in one map are three problems."""
    found = problems("device_map:\n  unett: 0\n  vea: 1\n  text_encoder.encodr: 0\n  default: cpu")
    assert [line_of(problem) for problem in sorted(found, key=line_of)] == [5, 6, 7]


# B11: a map that forgets something


@pytest.mark.parametrize("named", [names for n in range(3) for names in itertools.combinations(NAMES, n)])
def test_b11_a_map_that_forgets_components_is_refused_with_their_names(named: tuple[str, ...]) -> None:
    """One problem at the map names every component it lacks, none of their parameters, and the line that helps."""
    (problem,) = problems(f"device_map: {{{', '.join(f'{name}: cpu' for name in named)}}}")
    missing = [name for name in NAMES if name not in named]
    assert (problem.code, line_of(problem)) == (Code.UNPLACED_COMPONENT, 4)
    assert problem.what == f"the map places no {', '.join(missing)}"
    assert problem.fix == "add a line for each, or 'default: balanced'"


def test_b11_a_map_of_parts_alone_forgets_the_rest_of_the_component() -> None:
    """Naming some modules of a component does not place the others, and the problem says that."""
    (problem,) = problems("device_map: {unet.mid_block: 0, unet.conv_in: 1, vae: cpu, text_encoder: cpu}")
    assert problem.what == "the map places no unet; of unet it places only parts"


@pytest.mark.parametrize("word", [*STRATEGIES, "cuda:1", "cpu"])
def test_b11_the_default_takes_what_a_map_does_not_name(word: str) -> None:
    """With a default nothing can be forgotten, neither components nor what is left of one."""
    plan = real_plan(f"device_map: {{unet.mid_block: 0, vae: cpu, default: {word}}}")
    assert {"vae", "text_encoder", "unet", "unet.mid_block"} <= {*plan.device_map}


# B12: components from somewhere else


@over_strategies
def test_b12_a_component_from_another_place_is_sized_and_planned_with_the_others(strategy: str, tmp_path: Path) -> None:
    """A vae of 64 MiB, from a folder of its own, counts as that: cards that held the source's own are too small."""
    (tmp_path / "config.json").write_bytes((EXAMPLES / "digits" / "pipeline" / "vae" / "config.json").read_bytes())
    weights = tmp_path / "diffusion_pytorch_model.safetensors"
    write_safetensors(weights, {f"decoder.up_blocks.{index}.weight": ("F32", [4 * MIB]) for index in range(4)})
    lines = f"device_map: {strategy}\ncomponents: {{vae: {{source: {tmp_path}}}}}"

    plan = real_plan(lines, inventory(cuda=[0.25, 0.25]))
    vae = assignment(plan, "vae")
    assert (vae.nbytes, vae.measured_from, vae.residency) == (64 * MIB, "weights", Residency.ALWAYS)
    assert device_use(plan, vae.execution_device).used_bytes >= 64 * MIB
    half = real_plan(f"{lines[:-2]}, dtype: float16}}}}", inventory(cuda=[0.25, 0.25]))
    assert assignment(half, "vae").nbytes == 32 * MIB

    small = inventory(cuda=[63 / 1024, 63 / 1024])
    assert assignment(real_plan(f"device_map: {strategy}", small), "vae").residency is Residency.ALWAYS
    if strategy in ("balanced_ultra_low_memory", "auto"):
        too_large = assignment(real_plan(lines, small), "vae")
        assert "cpu" in {piece.storage_device for piece in too_large.parts or (too_large,)}
    else:
        assert "vae" in problems(lines, small)[0].what


# B13: the map that is reported has what is below components


@pytest.mark.parametrize(
    "device_map",
    [
        "{unet: 0, unet.mid_block: 1, vae: 0, text_encoder: 0}",
        "{unet: 0, unet.mid_block: cpu, vae: 1, vae.decoder: 0, default: balanced}",
        "{unet: 0, unet.up_blocks: {execution: 1, offload: sequential}, default: auto}",
    ],
)
def test_b13_the_reported_map_has_the_places_within_components(device_map: str) -> None:
    """Every part that the file names is in the map, under its path, beside all components."""
    plan = real_plan(f"device_map: {device_map}")
    checked = checked_from(f"{DIGITS}device_map: {device_map}\n")
    named = {key for key in checked.spec.placements if key != "default"}
    assert {*NAMES, *named} == {*plan.device_map}
    assert {part.path for each in plan.assignments for part in each.parts if part.path} == {
        key.partition(".")[2] for key in named if "." in key
    }


# B14: a device beside the map


@pytest.mark.parametrize("device_map", ["", "device_map: auto\n", "device_map: {unet: cpu, default: cpu}\n"])
@pytest.mark.parametrize("key", ["device", "devices", "device_id", "gpu"])
def test_b14_a_device_beside_the_map_is_refused_and_sent_there(device_map: str, key: str) -> None:
    """There is one place to say where things go; another key for it is named with the one that is meant."""
    (problem,) = problems(f"{device_map}{key}: cuda")
    code = Code.RENAMED_KEY if key in ("device", "gpu") else Code.UNKNOWN_KEY
    assert (problem.code, problem.path, line_of(problem)) == (code, (key,), 4 + bool(device_map))
    assert "device_map" in problem.what + problem.fix
    assert (problem.edits == ()) == (bool(device_map) or code is Code.UNKNOWN_KEY)


@pytest.mark.parametrize(
    ("lines", "key", "fix"),
    [
        ("components: {unet: {device: cuda}}", "device", "it belongs under 'device_map.unet'"),
        ("components: {unet: {device_map: auto}}", "device_map", "it belongs at the top level"),
        ("device_map: {unet: {execution: 0, device: 1}, default: cpu}", "device", "keep one of them"),
    ],
)
def test_b14_a_device_of_a_component_beside_the_map_is_refused_too(lines: str, key: str, fix: str) -> None:
    """A component says where it comes from, the map where it lives."""
    (problem,) = problems(lines)
    code = Code.RENAMED_KEY if lines.startswith("device_map") else Code.UNKNOWN_KEY
    assert (problem.code, problem.path and problem.path[-1]) == (code, key)
    assert problem.fix.partition("; dmconfig fix ")[0] == fix


# B15: the cpu means the cpu


@over_strategies
def test_b15_what_is_pinned_to_the_cpu_runs_there(strategy: str) -> None:
    """With every accelerator empty, a component that the file puts on the cpu is computed on the cpu."""
    plan = toy_plan(f"device_map: {{unet: cpu, vae: {{execution: cpu}}, default: {strategy}}}")
    for name in ("unet", "vae"):
        place = assignment(plan, name)
        assert (place.execution_device, place.storage_device, place.residency) == ("cpu", "cpu", Residency.ALWAYS)
    assert plan.execution_device == "cpu"
    assert device_use(plan, "cpu").used_bytes == 6 * GIB


@pytest.mark.parametrize(
    ("offload", "residency"),
    [
        ("model", Residency.WHILE_RUNNING),
        ("sequential", Residency.PER_LEAF),
        ("group", Residency.PER_GROUP),
    ],
)
def test_b15_resting_on_the_cpu_and_running_elsewhere_has_a_form_of_its_own(offload: str, residency: Residency) -> None:
    """It has to be asked for: an execution device, and how the weights get there."""
    plan = toy_plan(f"device_map: {{unet: {{execution: 1, offload: {offload}}}, default: cuda:0}}")
    unet = assignment(plan, "unet")
    assert (unet.execution_device, unet.storage_device, unet.residency) == ("cuda:1", "cpu", residency)


def test_b15_bringing_weights_to_the_cpu_is_refused() -> None:
    """What runs on the cpu and is to be brought there contradicts itself."""
    (problem,) = problems("device_map: {unet: {execution: cpu, offload: model}, default: cpu}")
    assert (problem.code, line_of(problem)) == (Code.CONTRADICTION, 4)


# B17: a machine with fewer devices than the file names


@pytest.mark.parametrize("cards", [0, 1, 3])
@pytest.mark.parametrize("form", ["3", "cuda:3", "gpu:3"])
@pytest.mark.parametrize(
    "template",
    [
        "device_map: {}",
        "device_map: {{default: {}}}",
        "device_map: {{unet: {}, default: cpu}}",
        "device_map: {{unet.mid_block: {}, default: cpu}}",
        "device_map: {{unet: {{execution: {}, offload: model}}, default: cpu}}",
        "device_map: {{unet: {{execution: [cpu, {}]}}, default: cpu}}",
        "max_memory: {{{}: 1GiB}}",
        "execution_device: {}",
    ],
)
def test_b17_a_device_that_the_machine_lacks_is_refused_with_those_it_has(template: str, form: str, cards: int) -> None:
    """Wherever the file names it and however it spells it: told at its line, with every device there is."""
    machine = inventory(cuda=[24] * cards)
    (problem,) = problems(template.format(form), machine)
    assert (problem.code, line_of(problem)) == (Code.NO_SUCH_DEVICE, 4)
    assert problem.what == "a toy machine has no cuda:3"
    assert problem.why == f"its devices are: {', '.join(device.id for device in machine.devices)}"


@pytest.mark.parametrize("form", ["3", "cuda:3", "mps"])
def test_b17_a_reserve_for_a_device_that_the_machine_lacks_is_refused_too(form: str) -> None:
    """A reserve that is kept nowhere says so, as a budget does."""
    with pytest.raises(PlanError) as caught:
        plan_from(f"{DIGITS}reserve: {{{form}: 2GiB}}\n", inventory(cuda=[24]), SIZES)
    assert [problem.code for problem in caught.value.problems] == [Code.NO_SUCH_DEVICE]


def test_b17_every_other_machine_gets_the_strategy_instead() -> None:
    """A file that names no device is for any machine: one card, none, or those of a packaged machine."""
    machines = (
        inventory(cuda=[24]), inventory(), parse_machine("2x24GiB", "64GiB"), parse_machine("apple-m2", "16GiB"),
    )  # fmt: skip
    for machine, strategy in itertools.product(machines, STRATEGIES):
        assert [*toy_plan(f"device_map: {strategy}", machine).device_map] == [*NAMES]


# B20: no accelerator at all


@pytest.mark.parametrize("form", [*STRATEGIES, *(f"{{default: {word}}}" for word in STRATEGIES), "cpu"])
@pytest.mark.parametrize("low_memory", ["none", "cpu_offload_with_hook", "sequential_cpu_offload"])
def test_b20_a_machine_without_accelerators_has_everything_on_the_cpu(form: str, low_memory: str) -> None:
    """No strategy crashes there: each means the cpu, and the plan records that for every component, with why."""
    word = form.removeprefix("{default: ").removesuffix("}")
    brings = word in ("balanced_low_memory", "balanced_ultra_low_memory", "auto")
    lines = f"device_map: {form}\n" + ("" if brings else f"low_memory: {low_memory}")
    plan = toy_plan(lines, inventory(cpu=8))
    assert dict(plan.device_map) == dict.fromkeys(NAMES, "cpu")
    assert {each.residency for each in plan.assignments} == {Residency.ALWAYS}
    assert (plan.execution_device, device_use(plan, "cpu").used_bytes) == ("cpu", 7 * GIB)
    assert all(each.reason for each in plan.assignments)
