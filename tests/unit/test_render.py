from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from dmconfig.errors import Code, Problem
from dmconfig.footprint import Footprint
from dmconfig.inventory import Inventory
from dmconfig.paths import Location
from dmconfig.plan import Plan
from dmconfig.render import plan_data, plan_text, problem_data, problems_data
from dmconfig.units import GIB
from tests.conftest import DIGITS, footprints, inventory, plan_from

SIZES = footprints(text_encoder=1, unet=4, vae=2)


def render(plan: Plan, width: int = 200) -> list[str]:
    """The lines a terminal of this width shows, without trailing blanks."""
    screen = io.StringIO()
    Console(file=screen, width=width, color_system=None).print(plan_text(plan), markup=False)
    return [line.rstrip() for line in screen.getvalue().splitlines()]


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
    """A heading, a line per component, a bar per device, where the sizes are from."""
    # of 32 cells: 3.5 of 8 GiB are 14, 2 of 8 are 8; on the cpu 4 of 16 are 8
    reason = "device_map.unet, brought layer by layer"
    assert render(plan) == [
        "StableDiffusionPipeline on a toy machine; latents and embeddings live on cuda:0",
        "",
        "component     class                 dtype    weights  runs on  rest on  residency  why",
        "vae           AutoencoderKL         float16  2.0 GiB  cuda:0   cuda:0   always     device_map.default: cuda:0",
        "text_encoder  CLIPTextModel         float16  1.0 GiB  cuda:0   cuda:0   always     device_map.default: cuda:0",
        "unet          UNet2DConditionModel  float16  4.0 GiB  cuda:0   cpu      per leaf   " + reason,
        "",
        f"cuda:0  {'█' * 14}{'▒' * 8}{'·' * 10}  3.5 GiB weights, 2.0 GiB reserve, 2.5 GiB free of 8.0 GiB",
        f"cpu     {'█' * 8}{'·' * 24}  4.0 GiB weights, 12.0 GiB free of 16.0 GiB",
        "moving weights: about 18 s per generation (200.0 GiB moved)",
        "sizes from the headers of the weights",
    ]


def test_plan_text_notes_and_sources_of_sizes() -> None:
    """Notes come last, one a line; where sizes come from several sources, each is named once."""
    unet = footprints(unet=4)["unet"]
    catalogued = Footprint(
        nbytes=unet.nbytes,
        dtype=unet.dtype,
        stored_dtype=unet.stored_dtype,
        largest_leaf_bytes=unet.largest_leaf_bytes,
        largest_block_bytes=unet.largest_block_bytes,
        outside_blocks_bytes=unet.outside_blocks_bytes,
        needs_cast=False,
        measured_from="catalogue",
    )
    lines = "max_memory: {0: 10GiB}\nlow_memory: cpu_offload_with_hook\n"
    shown = render(plan_from(DIGITS + lines, inventory(cuda=[24, 24]), {**SIZES, "unet": catalogued}))
    assert shown[-3:] == [
        "sizes from the headers of the weights, the packaged catalogue (no weights on this machine)",
        "note: low_memory: cpu_offload_with_hook is not needed: every component fits an accelerator",
        "note: cuda:1 not used: max_memory names other accelerators",
    ]


@pytest.mark.parametrize(
    ("machine", "bars"),
    [
        # 7 of 7 GiB: full; nothing of 8: empty; 7 of 1000: a sliver is still seen
        (inventory(cuda=[7, 8]), ["█" * 32, "·" * 32, "·" * 32]),
        (inventory(cuda=[1000]), ["█" + "·" * 31, "·" * 32]),
    ],
)
def test_plan_text_bars_are_whole(machine: Inventory, bars: list[str]) -> None:
    """Every bar has 32 cells, whatever is used of the device."""
    plan = plan_from(f"{DIGITS}reserve: 0\ndevice_map: cuda:0\n", machine, SIZES)
    assert re.findall("[█▒·]+", "\n".join(render(plan))) == bars


def test_plan_text_excluded_device_has_a_bar(plan: Plan) -> None:
    """A device without any budget is shown, and nothing is divided by it."""
    shown = render(plan_from(DIGITS + "max_memory: {0: 0, cpu: 64GiB}\n", inventory(cuda=[8]), SIZES))
    assert any(line.startswith("cuda:0  ") and line.endswith("0 B weights, 0 B free of 0 B") for line in shown)


def test_plan_text_narrow_screen_loses_no_name(plan: Plan) -> None:
    """On 80 columns the reasons are wrapped; every component's name and devices are still whole."""
    text = "\n".join(render(plan, width=80))
    assert all(name in text for name in ("text_encoder", "unet", "vae", "cuda:0"))
