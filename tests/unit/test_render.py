from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from dmconfig.errors import Code, Problem
from dmconfig.inventory import Inventory
from dmconfig.paths import Location
from dmconfig.plan import Alternative, Comparison, Plan, Residency
from dmconfig.render import (
    comparison_text,
    explanation_data,
    explanation_text,
    plan_data,
    plan_text,
    problem_data,
    problems_data,
    with_own,
)
from dmconfig.render.columns import Column, table_lines, wrapped
from dmconfig.units import GIB
from tests.conftest import DIGITS, footprints, inventory, plan_from

SIZES = footprints(text_encoder=1, unet=4, vae=2)


def words_of(lines: list[str]) -> list[str]:
    """The words of a plan, sorted, but for the heading that goes where reasons are below their rows."""
    return sorted(re.sub("[█▒·]+", "", " ".join(lines).replace("residency  why", "residency")).split())


def render(plan: Plan, width: int | None = None) -> list[str]:
    """The lines of a plan in a terminal of this width."""
    return plan_text(plan, width).splitlines()


@pytest.fixture
def plan() -> Plan:
    """A denoiser brought to a card of 8 GiB from the cpu, the rest on the card, 2 GiB in reserve."""
    lines = "reserve: 2GiB\ndevice_map: {unet: {execution: cuda:0, offload: sequential}, default: cuda:0}\n"
    return plan_from(DIGITS + lines, inventory(cuda=[8], cpu=16), SIZES)


def test_problem_data_has_every_field() -> None:
    """A tool gets the place as numbers, the path as text, and null for what is not known."""
    problem = Problem(
        code=Code.BAD_SIZE,
        what="no size",
        path=("max_memory", "0"),
        fix="write 10GiB",
        location=Location("spec.yaml", 3, 17),
    )
    assert problem_data(problem) == {
        "code": "DM208",
        "name": "bad-size",
        "file": "spec.yaml",
        "line": 3,
        "column": 17,
        "path": "max_memory.0",
        "what": "no size",
        "why": None,
        "fix": "write 10GiB",
        "origin": None,
    }


def test_problem_data_of_an_override_has_no_line() -> None:
    """A value from outside has an origin and no place."""
    data = problem_data(Problem(code=Code.BAD_SIZE, what="no size", origin="--set reserve=x"))
    assert (data["file"], data["line"], data["column"], data["path"]) == (None, None, None, None)
    assert data["origin"] == "--set reserve=x"


def test_problems_data_keeps_the_order() -> None:
    """A failure is marked as one, with its problems as they came."""
    data = problems_data([Problem(code=Code.BAD_SIZE, what="one"), Problem(code=Code.SYNTAX, what="two")])
    assert data["ok"] is False
    assert [problem["what"] for problem in data["problems"]] == ["one", "two"]


def test_plan_data_is_the_plan_in_bytes(plan: Plan) -> None:
    """Every figure of the plan is there, exact, and the whole is JSON."""
    data = plan_data(plan)
    assert json.loads(json.dumps(data)) == data
    assert (data["ok"], data["pipeline"], data["machine"]) == (True, "StableDiffusionPipeline", "a toy machine")
    assert data["execution_device"] == "cuda:0"
    assert data["device_map"] == {"vae": "cuda:0", "text_encoder": "cuda:0", "unet": "cpu"}
    assert data["components"][2] == {
        "component": "unet",
        "class": "UNet2DConditionModel",
        "dtype": "float16",
        "bytes": 4 * GIB,
        "peak_bytes": GIB // 2,
        "measured_from": "weights",
        "execution_device": "cuda:0",
        "storage_device": "cpu",
        "residency": "per_leaf",
        "reason": "device_map.unet, brought layer by layer",
        "parts": [],
        "is_written": False,
        "casts_inputs": False,
        "calls": 50,
        "seconds": pytest.approx(50 * 4 * GIB / 12e9, rel=0.1),
        "moved_bytes": 50 * 4 * GIB,
    }
    # held 2 + 1, brought 0.5, reserve 2 of 8
    assert data["devices"][0] == {
        "id": "cuda:0",
        "description": "toy",
        "total_bytes": 8 * GIB,
        "budget_bytes": 8 * GIB,
        "used_bytes": 7 * GIB // 2,
        "reserved_bytes": 2 * GIB,
        "free_bytes": 5 * GIB // 2,
    }
    assert data["notes"] == []


def test_plan_text_whole(plan: Plan) -> None:
    """What it is and what it costs, a line per component, a bar per device, where the sizes are from."""
    # of 32 cells: 3.5 of 8 GiB are 14, 2 of 8 are 8; on the cpu 4 of 16 are 8
    assert render(plan) == [
        "StableDiffusionPipeline in float16 on a toy machine; latents and embeddings live on cuda:0",
        "moving weights: about 18 s per generation (200.0 GiB moved)",
        "",
        "component     weights  runs on  rests on  residency  why",
        "vae           2.0 GiB  cuda:0   cuda:0    always     device_map.default: cuda:0",
        "text_encoder  1.0 GiB  cuda:0   cuda:0    always     device_map.default: cuda:0",
        "unet          4.0 GiB  cuda:0   cpu       per leaf   device_map.unet, brought layer by layer",
        "",
        f"cuda:0  {'█' * 14}{'▒' * 8}{'·' * 10}  3.5 GiB weights, 2.0 GiB reserve,  2.5 GiB free of  8.0 GiB",
        f"cpu     {'█' * 8}{'·' * 24}  4.0 GiB weights,                  12.0 GiB free of 16.0 GiB",
        "sizes from the headers of the weights; activations have to fit the reserve",
    ]


def test_plan_text_of_what_stays_has_no_columns_and_rows_that_say_nothing() -> None:
    """Where nothing moves, nothing is said of resting; a device that holds nothing is named with its size, once."""
    shown = render(plan_from(f"{DIGITS}reserve: 0\ndevice_map: cuda:0\n", inventory(cuda=[8, 6], cpu=16), SIZES))
    assert shown == [
        "StableDiffusionPipeline in float16 on a toy machine; latents and embeddings live on cuda:0",
        "no weights move during a generation",
        "",
        "component     weights  runs on  why",
        "vae           2.0 GiB  cuda:0   device_map: cuda:0",
        "text_encoder  1.0 GiB  cuda:0   device_map: cuda:0",
        "unet          4.0 GiB  cuda:0   device_map: cuda:0",
        "",
        f"cuda:0  {'█' * 28}{'·' * 4}  7.0 GiB weights, 1.0 GiB free of 8.0 GiB",
        "not used: cuda:1 (6.0 GiB), cpu (16.0 GiB)",
        "sizes from the headers of the weights; activations come on top",
    ]


def test_plan_text_dtypes_that_differ_have_a_column() -> None:
    """A dtype that all share is in the heading; where they differ, each component has its own in its row."""
    sizes = {**SIZES, "vae": replace(SIZES["vae"], dtype="float32")}
    heading, *shown = render(plan_from(f"{DIGITS}device_map: cuda:0\n", inventory(cuda=[24]), sizes))
    assert heading == "StableDiffusionPipeline on a toy machine; latents and embeddings live on cuda:0"
    assert [line.split()[1] for line in shown[2:6]] == ["dtype", "float32", "float16", "float16"]


def test_plan_text_notes_and_sources_of_sizes() -> None:
    """Notes stand at the top, one a line; where sizes come from several sources, each is named once, at the end."""
    sizes = {**SIZES, "unet": replace(SIZES["unet"], measured_from="catalogue")}
    lines = "max_memory: {0: 10GiB}\nlow_memory: cpu_offload_with_hook\n"
    shown = render(plan_from(DIGITS + lines, inventory(cuda=[24, 24]), sizes))
    assert shown[1:5] == [
        "no weights move during a generation",
        "note: low_memory: cpu_offload_with_hook is not needed: every component fits an accelerator",
        "note: cuda:1 not used: max_memory names other accelerators",
        "",
    ]
    sources = "the headers of the weights, the packaged catalogue (no weights on this machine)"
    assert shown[-1] == f"sizes from {sources}; activations have to fit the reserve"


@pytest.mark.parametrize(
    ("machine", "bars"),
    [
        # 7 of 7 GiB: full, and nothing of 8 has no bar; 7 of 1000: a sliver is still seen
        (inventory(cuda=[7, 8]), ["█" * 32]),
        (inventory(cuda=[1000]), ["█" + "·" * 31]),
    ],
)
def test_plan_text_bars_are_whole(machine: Inventory, bars: list[str]) -> None:
    """Every bar has 32 cells, whatever is used of the device."""
    plan = plan_from(f"{DIGITS}reserve: 0\ndevice_map: cuda:0\n", machine, SIZES)
    assert re.findall("[█▒·]+", "\n".join(render(plan))) == bars


def test_plan_text_excluded_device_is_named() -> None:
    """A device without any budget is named as such, and nothing is divided by it."""
    shown = render(plan_from(DIGITS + "max_memory: {0: 0, cpu: 64GiB}\n", inventory(cuda=[8]), SIZES))
    assert "not used: cuda:0 (may not be used)" in shown


def test_plan_text_computing_on_the_cpu_is_not_called_moving() -> None:
    """Where no weight moves, the cost is that of the cpu alone."""
    shown = render(plan_from(DIGITS + "device_map: {unet: cpu, default: cuda:0}\n", inventory(cuda=[8]), SIZES))
    assert re.fullmatch("computing on the cpu: about [0-9]+ min per generation", shown[1])


@pytest.mark.parametrize("width", [68, 80, 100, 140])
def test_plan_text_keeps_to_the_width(plan: Plan, width: int) -> None:
    """No line is longer than the terminal is wide, and every word of the plan is still there."""
    shown = render(plan, width)
    assert max(map(len, shown)) <= width
    assert words_of(shown) == words_of(render(plan))


def test_plan_text_reasons_are_beside_their_rows_or_below_them(plan: Plan) -> None:
    """With room for the reasons they are the last column; without it each is below its row, not in a thin strip."""
    assert "unet          4.0 GiB  cuda:0   cpu       per leaf   device_map.unet, brought layer by" in render(plan, 88)
    narrow = render(plan, 80)
    assert narrow[narrow.index("unet          4.0 GiB  cuda:0   cpu       per leaf") + 1] == (
        "    device_map.unet, brought layer by layer"
    )


def test_wrapped_keeps_a_number_and_its_unit_together() -> None:
    """A line is not broken within a figure."""
    assert wrapped("it takes 12 ms or 4.0 GiB", 11) == ["it takes", "12 ms or", "4.0 GiB"]
    assert wrapped("it takes 12 ms or 4.0 GiB", None) == ["it takes 12 ms or 4.0 GiB"]


def test_table_drops_empty_columns_and_aligns() -> None:
    """A column without a word is left out, with its heading; sizes end under one another; no line ends in blanks."""
    columns = (Column("name"), Column("nothing"), Column("size", right=True), Column("why"))
    assert table_lines(columns, [("a", "", "1 B", "so"), ("long", "", "100 B", "")]) == [
        "name   size  why",
        "a       1 B  so",
        "long  100 B",
    ]
    assert table_lines(columns, [("", "", "", "")]) == []


PLACES = (
    Alternative(
        execution_device="cuda:0", storage_device="cpu", residency=Residency.PER_LEAF, seconds=17.9, obstacle="",
        is_chosen=True,
    ),
    Alternative(
        execution_device="cuda:0", storage_device="cuda:0", residency=Residency.ALWAYS, seconds=0.0,
        obstacle="cuda:0 would need 7.0 GiB of 6.0 GiB", is_chosen=False,
    ),
)  # fmt: skip


def test_explanation_text_whole(plan: Plan) -> None:
    """What a component is, where it goes and why, and a row for each place it could have."""
    how = "brought layer by layer from cpu, 512.0 MiB at once"
    assert explanation_text("unet", plan, PLACES).splitlines() == [
        "unet of StableDiffusionPipeline on a toy machine",
        "  what   UNet2DConditionModel in float16, 4.0 GiB by the headers of the weights; runs 50 times per generation",
        f"  where  runs on cuda:0, {how}; about 18 s per generation (200.0 GiB moved)",
        "  why    device_map.unet, brought layer by layer",
        "",
        "with all other components where they are:",
        "runs on  rests on  residency  per generation  verdict",
        "cuda:0   cpu       per leaf             18 s  chosen",
        "cuda:0   cuda:0    always                0 s  cuda:0 would need 7.0 GiB of 6.0 GiB",
    ]
    assert explanation_text("vae", plan, ()).splitlines()[1:3] == [
        "  what   AutoencoderKL in float16, 2.0 GiB by the headers of the weights; runs once per generation",
        "  where  stays on cuda:0",
    ]


def test_explanation_of_a_place_that_only_the_file_can_ask_for_has_a_row_for_it(plan: Plan) -> None:
    """Where none of the alternatives is the component's place, its own stands first."""
    rows = explanation_text("unet", plan, PLACES[1:]).splitlines()[-2:]
    assert [row.split()[-1] for row in rows] == ["chosen", "GiB"]


def test_explanation_data_is_the_component_and_its_places(plan: Plan) -> None:
    """The component is as in the plan's data; what stands in the way of a place is null where nothing does."""
    data = explanation_data("unet", plan, PLACES)
    assert data["component"] == plan_data(plan)["components"][2]
    assert data["alternatives"][0] == {
        "execution_device": "cuda:0",
        "storage_device": "cpu",
        "residency": "per_leaf",
        "seconds": 17.9,
        "obstacle": None,
        "is_chosen": True,
    }
    assert data["alternatives"][1]["obstacle"] == "cuda:0 would need 7.0 GiB of 6.0 GiB"


FITS = Comparison(
    strategy="auto", fits=True, is_chosen=True, seconds=1.25, moved_bytes=3 * GIB,
    bytes_by_device=(("cuda:0", 2 * GIB), ("cuda:1", 0), ("cpu", GIB)),
)  # fmt: skip
FITS_NOT = Comparison(strategy="balanced", fits=False, is_chosen=False)


def test_comparison_text_is_a_row_per_strategy() -> None:
    """What the file asks for is marked; a strategy that does not fit says so, and has no figures."""
    assert comparison_text("APipeline", "a machine", (FITS_NOT, FITS)).splitlines() == [
        "APipeline on a machine, by strategy; * is what the file asks for",
        "",
        "   strategy  fits  per generation    moved   cuda:0  cuda:1      cpu",
        "   balanced  no",
        "*  auto      yes            1.2 s  3.0 GiB  2.0 GiB       -  1.0 GiB",
    ]


def test_comparison_text_on_a_narrow_terminal_names_the_devices() -> None:
    """Without room for a column per device, each strategy has its devices in words, within the width."""
    shown = comparison_text("APipeline", "a machine", (FITS_NOT, FITS), 64).splitlines()
    assert max(map(len, shown)) <= 64
    assert shown[2:] == [
        "   strategy  fits  per generation    moved",
        "   balanced  no",
        "*  auto      yes            1.2 s  3.0 GiB",
        "    cuda:0 2.0 GiB, cpu 1.0 GiB",
    ]


def test_with_own_adds_the_plan_of_a_file_that_is_no_one_word(plan: Plan) -> None:
    """Where no strategy is the file's, its plan has a row, or a row that says that it has none."""
    assert with_own((FITS,), plan) == (FITS,)
    unfit, own = with_own((FITS_NOT,), plan)
    assert (unfit, own.strategy, own.is_chosen, own.seconds) == (FITS_NOT, "as written", True, plan.seconds)
    assert dict(own.bytes_by_device) == {"cuda:0": 7 * GIB // 2, "cpu": 4 * GIB}
    assert with_own((FITS_NOT,), None)[1] == Comparison(strategy="as written", fits=False, is_chosen=True)
