"""``dmconfig plan``: the plan as text and JSON, on this machine and on one stated, without torch."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner, Result

from dmconfig.cli import app
from dmconfig.units import format_bytes
from tests import test_cases
from tests.sparse_weights import write_sparse_pipeline

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "digits.yaml"
MIXED = ROOT / "examples" / "machines" / "two-mixed-cards.yaml"
FLUX = "black-forest-labs/FLUX.1-dev"
FLUX_COMPONENTS = ["vae", "text_encoder", "text_encoder_2", "transformer"]
TWO_LARGE = ("--gpus", "2x24GiB", "--ram", "64GiB")
GIB = 1 << 30
SCHEMA = ROOT / "schemas" / "plan-1.schema.json"
VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))


def plan(*arguments: str | Path) -> Result:
    """Run ``dmconfig plan`` in this process."""
    return CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None}).invoke(app, ["plan", *map(str, arguments)])


def plan_data(*arguments: str | Path) -> dict[str, Any]:
    """Return the JSON data of a plan that succeeds."""
    result = plan(*arguments, "--format", "json")
    assert (result.exit_code, result.stderr) == (0, "")
    data: dict[str, Any] = json.loads(result.stdout)
    VALIDATOR.validate(data)
    return data


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spec of FLUX at its true size: real headers, and bodies that take no disk."""
    folder = tmp_path_factory.mktemp("flux")
    write_sparse_pipeline(folder / "FLUX.1-dev", FLUX)
    spec = folder / "flux.yaml"
    spec.write_text("version: 1\npipeline:\n  source: ./FLUX.1-dev\n  dtype: bfloat16\n")
    return spec


def test_plan_json_has_stable_keys() -> None:
    """The JSON of a plan says what goes where with the same keys for every component and device."""
    data = plan_data(DIGITS, *TWO_LARGE)
    assert data.keys() == {
        "ok", "pipeline", "machine", "execution_device", "device_map", "components", "devices", "seconds",
        "moved_bytes", "proof", "notes",
    }  # fmt: skip
    assert (data["ok"], data["pipeline"]) == (True, "StableDiffusionPipeline")
    assert data["machine"] == "--gpus 2x24GiB --ram 64GiB"
    assert all(
        component.keys()
        == {
            "component", "class", "dtype", "bytes", "peak_bytes", "measured_from", "execution_device",
            "storage_device", "residency", "reason", "parts", "is_written", "casts_inputs", "calls", "seconds",
            "moved_bytes",
        }
        for component in data["components"]
    )  # fmt: skip
    assert all(
        device.keys()
        == {
            "id", "description", "total_bytes", "budget_bytes", "used_bytes", "reserved_bytes", "free_bytes",
        }
        for device in data["devices"]
    )  # fmt: skip
    assert [device["id"] for device in data["devices"]] == ["cuda:0", "cuda:1", "cpu"]


def test_plan_flux_on_two_large_gpus_names_every_component_once(flux: Path) -> None:
    """FLUX from true headers fits two 24 GiB devices: each component once, within every budget."""
    data = plan_data(flux, *TWO_LARGE)
    assert [component["component"] for component in data["components"]] == FLUX_COMPONENTS
    assert {component["measured_from"] for component in data["components"]} == {"weights"}
    assert {component["residency"] for component in data["components"]} == {"always"}
    assert list(data["device_map"]) == FLUX_COMPONENTS
    for device in data["devices"]:
        held = [part["bytes"] for part in data["components"] if part["storage_device"] == device["id"]]
        assert device["used_bytes"] == sum(held)
        assert device["used_bytes"] + device["reserved_bytes"] + device["free_bytes"] == device["budget_bytes"]
        assert device["free_bytes"] >= 0


def test_plan_flux_text_has_one_row_per_component(flux: Path) -> None:
    """The table has one row for each component and a bar for each device in use, and goes to stdout."""
    result = plan(flux, *TWO_LARGE)
    first_words = [line.split(" ")[0] for line in result.stdout.splitlines()]
    assert (result.exit_code, result.stderr) == (0, "")
    assert [word for word in first_words if word in FLUX_COMPONENTS] == FLUX_COMPONENTS
    assert [word for word in first_words if word in ("cuda:0", "cuda:1", "cpu")] == ["cuda:0", "cuda:1"]
    assert "not used: cpu (64.0 GiB)" in result.stdout
    assert "sizes from the headers of the weights" in result.stdout


def test_plan_flux_from_headers_equals_plan_from_catalogue(flux: Path, tmp_path: Path) -> None:
    """A pipeline that is not on this disk gets the plan it would get if it were."""
    spec = tmp_path / "hub.yaml"
    spec.write_text(f"version: 1\npipeline: {{source: {FLUX}, dtype: bfloat16}}\n")
    here, packaged = plan_data(flux, *TWO_LARGE), plan_data(spec, *TWO_LARGE)
    assert here["device_map"] == packaged["device_map"]
    assert [part["bytes"] for part in here["components"]] == [part["bytes"] for part in packaged["components"]]


def test_plan_flux_on_two_small_gpus_exits_3_with_need_and_have(flux: Path) -> None:
    """What fits nowhere is refused on stderr: what it needs, what each device offers, and a change that helps."""
    result = plan(flux, "--gpus", "2x12GiB", "--ram", "64GiB")
    assert (result.exit_code, result.stdout) == (3, "")
    [what] = [line for line in result.stderr.splitlines() if line.startswith("  what ")]
    assert what == (
        "  what transformer needs 22.2 GiB + 1.5 GiB reserve; cuda:0 offers 12.0 GiB, cuda:1 offers 12.0 GiB"
    )
    assert "fix  use low_memory: group_offload; or use low_memory: sequential_cpu_offload" in result.stderr


def test_plan_flux_advice_taken_is_feasible(flux: Path) -> None:
    """The change that a refusal advises makes the same plan feasible."""
    small = ("--gpus", "2x12GiB", "--ram", "64GiB")
    data = plan_data(flux, *small, "--set", "low_memory=sequential_cpu_offload")
    by_name = {part["component"]: part for part in data["components"]}
    assert by_name["transformer"]["residency"] == "per_leaf"
    assert by_name["transformer"]["storage_device"] == "cpu"


def test_plan_refusal_as_json_is_valid_and_exits_3(flux: Path) -> None:
    """With ``--format json`` a refusal is JSON on stdout too."""
    result = plan(flux, "--gpus", "12GiB", "--ram", "64GiB", "--format", "json")
    data = json.loads(result.stdout)
    VALIDATOR.validate(data)
    assert (result.exit_code, result.stderr, data["ok"]) == (3, "", False)
    assert [problem["name"] for problem in data["problems"]] == ["does-not-fit"]


def test_plan_truncated_weights_exit_2_and_are_named(tmp_path: Path) -> None:
    """A weights file shorter than its header says is an error that names it, not a plan."""
    folder = tmp_path / "FLUX.1-dev"
    write_sparse_pipeline(folder, FLUX)
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1)
    spec = tmp_path / "spec.yaml"
    spec.write_text("version: 1\npipeline: {source: ./FLUX.1-dev}\n")
    result = plan(spec, *TWO_LARGE)
    assert (result.exit_code, result.stdout) == (2, "")
    assert str(file) in result.stderr
    assert "Traceback" not in result.stderr


def test_plan_order_in_the_file_does_not_matter(tmp_path: Path) -> None:
    """The same entries in another order give the same plan."""
    head = f"pipeline: {{source: {FLUX}, dtype: bfloat16}}\n"
    one, other = tmp_path / "one.yaml", tmp_path / "other.yaml"
    one.write_text(
        f"version: 1\n{head}device_map: {{vae: cuda:1, text_encoder: cpu, default: balanced}}\n"
        "max_memory: {cuda:0: 23GiB, cuda:1: 24GiB, cpu: 32GiB}\nreserve: 512MiB\n"
    )
    other.write_text(
        "reserve: 512MiB\nmax_memory: {cpu: 32GiB, 1: 24GiB, 0: 23GiB}\n"
        f"device_map: {{default: balanced, text_encoder: cpu, vae: 1}}\n{head}version: 1\n"
    )
    assert plan_data(one, *TWO_LARGE) == plan_data(other, *TWO_LARGE)


def test_plan_budget_in_the_file_shows_in_the_plan() -> None:
    """Every limit given is read back from the plan."""
    budgets = "max_memory={cuda:0: 10GiB, cuda:1: 50%, cpu: 8GiB}"
    data = plan_data(DIGITS, *TWO_LARGE, "--set", budgets, "--set", "reserve=1GiB")
    assert {device["id"]: device["budget_bytes"] for device in data["devices"]} == {
        "cuda:0": 10 * GIB,
        "cuda:1": 12 * GIB,
        "cpu": 8 * GIB,
    }
    assert {device["reserved_bytes"] for device in data["devices"] if device["used_bytes"]} == {1 * GIB}


def test_plan_set_overrides_the_file() -> None:
    """``--set`` wins over the file's value."""
    data = plan_data(DIGITS, *TWO_LARGE, "--set", "device_map=cuda:1", "--set", "pipeline.dtype=float16")
    assert set(data["device_map"].values()) == {"cuda:1"}
    assert {part["dtype"] for part in data["components"]} == {"float16"}
    assert data["execution_device"] == "cuda:1"


def test_plan_without_flags_is_for_this_machine() -> None:
    """Without flags the plan is for the machine at hand, whatever it has."""
    data = plan_data(DIGITS)
    assert data["machine"] == "this machine"
    assert data["devices"][-1]["id"] == "cpu"
    assert list(data["device_map"]) == ["vae", "text_encoder", "unet"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--gpus", "2x24Gb"),
        ("--gpus", "lots"),
        ("--gpus", "24GiB,,"),
        ("--gpus", "-1"),
        ("--ram", "much"),
        ("--ram", ""),
        ("--disk", "much"),
    ],
)
def test_plan_unreadable_machine_exits_2_at_the_flag(flag: str, value: str) -> None:
    """A machine that cannot be read is refused at its flag, with the form to write."""
    machine = {"--gpus": "24GiB", "--ram": "64GiB", flag: value}
    result = plan(DIGITS, *[f"{name}={text}" for name, text in machine.items()])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error[DM502 bad-machine]: {flag}\n")
    assert f"  fix  write {flag} " in result.stderr


@pytest.mark.parametrize("arguments", [[], ["a.yaml", "b.yaml"], ["a.yaml", "--gpu", "1"]], ids=str)
def test_plan_usage_error_exits_2_without_traceback(arguments: list[str]) -> None:
    """A wrong command line ends with exit 2 and no traceback."""
    result = plan(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


def test_plan_of_a_hub_id_needs_no_torch(tmp_path: Path) -> None:
    """Planning a catalogued pipeline imports neither torch nor diffusers, and no hub client."""
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"version: 1\npipeline: {{source: {FLUX}, dtype: bfloat16}}\n")
    command = [sys.executable, "-X", "importtime", "-m", "dmconfig", "plan", str(spec), *TWO_LARGE]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "dmconfig.plan.planner" in imported
    assert not imported & {"torch", "diffusers", "transformers", "accelerate", "safetensors", "huggingface_hub"}
    assert "transformer " in result.stdout


def test_plan_machine_file_is_the_machine() -> None:
    """``--machine FILE`` plans for the devices in the file, with what is free of them, by the file's own name."""
    data = plan_data(DIGITS, "--machine", MIXED)
    assert data["machine"] == "two mixed cards"
    assert [(device["id"], device["total_bytes"], device["budget_bytes"]) for device in data["devices"]] == [
        ("cuda:0", int(23.5 * GIB), int(23.5 * GIB)),
        ("cuda:1", 12 * GIB, 11 * GIB),
        ("cpu", 64 * GIB, 58 * GIB),
    ]


def test_plan_machine_name_is_a_card_or_a_packaged_machine() -> None:
    """A name stands for one such card beside 64 GiB, or for a whole machine."""
    data = plan_data(DIGITS, "--machine", "h200")
    assert data["machine"] == "h200 and 64.0 GiB of host memory"
    assert [(device["id"], device["description"]) for device in data["devices"]] == [
        ("cuda:0", "NVIDIA H200"), ("cpu", "stated"),
    ]  # fmt: skip
    assert len(plan_data(DIGITS, "--machine", "dgx-a100")["devices"]) == 9


def test_plan_gpus_may_be_cards() -> None:
    """``--gpus`` takes sizes and cards in one list; ``--disk`` belongs to the machine's name too."""
    data = plan_data(DIGITS, "--gpus", "2xrtx-4090,1x12GiB", "--ram", "64GiB", "--disk", "200GiB")
    assert data["machine"] == "--gpus 2xrtx-4090,1x12GiB --ram 64GiB --disk 200GiB"
    assert [device["total_bytes"] for device in data["devices"]] == [
        int(23.5 * GIB), int(23.5 * GIB), 12 * GIB, 64 * GIB,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "flags", [["--gpus", "24GiB"], ["--ram", "1GiB"], ["--disk", "1GiB"], list(TWO_LARGE)], ids=str
)
def test_plan_machine_excludes_the_flags_of_its_parts(flags: list[str]) -> None:
    """``--machine`` beside a flag that says a part of the machine is refused, and names that flag."""
    result = plan(DIGITS, "--machine", "t4", *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "error[DM310 bad-command-line]: --machine t4\n"
        f"  what --machine says all of the machine, and {', '.join(flags[::2])} a part of it\n"
        "  fix  keep one; to change a part, write it in a machine file\n"
    )


def test_plan_machine_file_with_a_mistake_exits_2_at_its_place(tmp_path: Path) -> None:
    """A mistake in the machine's file is told as one in a spec is, in text and as JSON."""
    file = tmp_path / "box.yaml"
    file.write_text("version: 1\nhost: {memory: 64GiB}\ndevices:\n  cuda:0: {memroy: 24GiB, card: t4}\n")
    result = plan(DIGITS, "--machine", file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error[DM202 unknown-key]: {file}:4:12\n"
        "    4 |   cuda:0: {memroy: 24GiB, card: t4}\n"
        "      |            ^^^^^^\n"
        "  at   devices.cuda:0.memroy\n"
        "  what unknown key 'memroy'\n"
        "  why  the keys accepted here are: card, description, memory, free, flops, unified\n"
        "  fix  did you mean 'memory'?\n"
    )
    data = json.loads(plan(DIGITS, "--machine", file, "--format", "json").stdout)
    assert [(problem["line"], problem["column"], problem["path"]) for problem in data["problems"]] == [
        (4, 12, "devices.cuda:0.memroy")
    ]


def test_plan_unknown_machine_exits_2_with_what_there_is() -> None:
    """A name that is no machine comes with the nearest one."""
    result = plan(DIGITS, "--machine", "rtx-490")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error[DM502 bad-machine]: --machine rtx-490\n")
    assert result.stderr.endswith("  fix  did you mean 'rtx-4090'?\n")


PLANNED = [file for file in test_cases.VALID if test_cases.arguments_of(file)[0] == "plan"]


@pytest.mark.parametrize("file", PLANNED, ids=lambda file: file.stem)
def test_plan_of_every_case_matches_the_schema(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A validator that is not ours accepts the JSON of every plan that the corpus has."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert plan_data(*test_cases.arguments_of(file)[1:])["ok"] is True


@pytest.mark.parametrize(
    "change",
    [
        {"more": 1},
        {"seconds": -1.0},
        {"moved_bytes": 0.5},
        {"devices": [{"id": "cuda:0"}]},
        {"ok": False},
        {"proof": {}},
    ],
    ids=str,
)
def test_plan_schema_refuses_what_is_no_plan(change: dict[str, Any]) -> None:
    """A key that is not described, a missing one, and a size below zero or in parts are no plan."""
    data = plan_data(DIGITS, *TWO_LARGE)
    assert not VALIDATOR.is_valid(data | change)
    assert not VALIDATOR.is_valid({key: value for key, value in data.items() if key != "notes"})


def test_plan_schema_command_prints_the_published_file() -> None:
    """``dmconfig schema --plan`` prints ``schemas/plan-1.schema.json`` byte for byte, on stdout alone."""
    result = CliRunner().invoke(app, ["schema", "--plan"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == SCHEMA.read_text(encoding="utf-8")


def test_plan_explain_shows_the_component_and_its_alternatives(flux: Path) -> None:
    """One of the places is the chosen one, each other is possible or says what it lacks."""
    machine = ("--gpus", "16GiB,12GiB", "--ram", "64GiB", "--set", "device_map=auto")
    result = plan(flux, *machine, "--explain", "text_encoder_2")
    lines = result.stdout.splitlines()
    assert (result.exit_code, result.stderr) == (0, "")
    assert lines[:2] == [
        "text_encoder_2 of FluxPipeline on --gpus 16GiB,12GiB --ram 64GiB",
        "  what   T5EncoderModel in bfloat16, 8.9 GiB by the headers of the weights; runs once per generation",
    ]
    assert re.fullmatch("  where  runs on cuda:., brought layer by layer from cpu, .* GiB moved[)]", lines[2])
    data = plan_data(flux, *machine, "--explain", "text_encoder_2")
    whole, component, places = plan_data(flux, *machine), data["component"], data["alternatives"]
    assert component == whole["components"][2]
    here = {key: component[key] for key in ("execution_device", "storage_device", "residency", "seconds")}
    assert [place for place in places if place["is_chosen"]] == [{**here, "obstacle": None, "is_chosen": True}]
    assert len(lines) == 7 + len(places)
    # it is the only one that comes and goes, so to stay it needs its room beside all that is held
    (device,) = [device for device in whole["devices"] if device["id"] == component["execution_device"]]
    need = device["used_bytes"] - component["peak_bytes"] + component["bytes"]
    offer = device["budget_bytes"] - device["reserved_bytes"]
    (resident,) = [place for place in places if place["storage_device"] == device["id"]]
    assert resident["obstacle"] == f"{device['id']} would need {format_bytes(need)} of {format_bytes(offer)}"
    assert any(line.endswith(resident["obstacle"]) for line in lines)


def test_plan_explain_of_a_split_component_has_its_own_place_first(flux: Path) -> None:
    """A component in parts is at no whole place; the table begins with the one that it has."""
    result = plan(
        flux, "--gpus", "16GiB,12GiB", "--ram", "64GiB", "--set", "device_map=auto", "--explain", "transformer"
    )
    first, *others = result.stdout.splitlines()[7:]
    assert first.split()[-4:] == ["split", "0", "s", "chosen"]
    assert others
    assert not any("chosen" in line for line in others)


def test_plan_explain_unknown_component_exits_2_with_what_is_meant(flux: Path) -> None:
    """A name that is no component comes with the nearest one."""
    result = plan(flux, *TWO_LARGE, "--explain", "transfromer")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "error[DM302 unknown-component]: --explain\n"
        "  what 'transfromer' is not a component with weights\n"
        "  fix  did you mean 'transformer'?\n"
    )


def test_plan_explain_where_nothing_fits_exits_3(flux: Path) -> None:
    """Without a plan there is no place to explain; why is told as for the plan."""
    result = plan(flux, "--gpus", "12GiB", "--ram", "64GiB", "--explain", "vae")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == plan(flux, "--gpus", "12GiB", "--ram", "64GiB").stderr


def test_plan_all_has_a_row_per_strategy_and_marks_the_files_own(flux: Path) -> None:
    """Every strategy and each accelerator alone is there; the figures of the file's own are its plan's."""
    machine = ("--gpus", "24GiB,16GiB", "--ram", "64GiB")
    data, own = plan_data(flux, *machine, "--all"), plan_data(flux, *machine)
    rows = {row["strategy"]: row for row in data["strategies"]}
    assert list(rows) == [
        "balanced", "balanced_low_0", "sequential", "balanced_low_memory", "balanced_ultra_low_memory", "auto",
        "cuda:0", "cuda:1",
    ]  # fmt: skip
    assert [name for name, row in rows.items() if row["is_chosen"]] == ["balanced"]
    assert rows["balanced"]["bytes_by_device"] == {
        device["id"]: device["used_bytes"] for device in own["devices"] if device["id"] != "cpu"
    }
    assert (rows["balanced"]["seconds"], rows["balanced"]["moved_bytes"]) == (own["seconds"], own["moved_bytes"])
    assert rows["cuda:1"] == {
        "strategy": "cuda:1", "fits": False, "is_chosen": False, "seconds": None, "moved_bytes": None,
        "bytes_by_device": {},
    }  # fmt: skip
    result = plan(flux, *machine, "--all")
    assert (result.exit_code, result.stderr) == (0, "")
    marked = [line.split() for line in result.stdout.splitlines() if line.startswith("* ")]
    assert marked == [["*", "balanced", "yes", "0", "s", "-", "22.2", "GiB", "9.3", "GiB"]]


def test_plan_all_of_a_file_that_does_not_fit_exits_3_after_the_table(flux: Path) -> None:
    """The table is there all the same; the problems are those of the plan."""
    machine = ("--gpus", "16GiB,12GiB", "--ram", "64GiB")
    result = plan(flux, *machine, "--all")
    assert result.exit_code == 3
    assert result.stderr == plan(flux, *machine).stderr
    assert [line.split()[:3] for line in result.stdout.splitlines() if line.startswith("* ")] == [
        ["*", "balanced", "no"]
    ]
    as_json = plan(flux, *machine, "--all", "--format", "json")
    data = json.loads(as_json.stdout)
    VALIDATOR.validate(data)
    assert (as_json.exit_code, as_json.stderr, data["ok"]) == (3, "", False)
    assert [problem["name"] for problem in data["problems"]] == ["does-not-fit"]
    assert [row["strategy"] for row in data["strategies"] if row["fits"]] == ["balanced_ultra_low_memory", "auto"]


def test_plan_all_of_a_file_that_is_no_strategy_has_a_row_of_its_own() -> None:
    """A map of pins is compared as written."""
    pins = ("--set", "device_map={unet: 0, vae: 1, text_encoder: 1}")
    data, own = plan_data(DIGITS, *TWO_LARGE, *pins, "--all"), plan_data(DIGITS, *TWO_LARGE, *pins)
    (row,) = [row for row in data["strategies"] if row["is_chosen"]]
    assert row["strategy"] == "as written"
    assert row["bytes_by_device"] == {each["id"]: each["used_bytes"] for each in own["devices"] if each["id"] != "cpu"}


def test_plan_out_draws_the_plan_beside_the_text(tmp_path: Path) -> None:
    """The picture is written whole, its folder is made, the text is as without it, and JSON stays JSON."""
    file = tmp_path / "pictures" / "plan.svg"
    result = plan(DIGITS, *TWO_LARGE, "--out", file)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{plan(DIGITS, *TWO_LARGE).stdout}wrote {file}\n"
    first = file.read_bytes()
    assert b"StableDiffusionPipeline" in first
    assert plan_data(DIGITS, *TWO_LARGE, "--out", file) == plan_data(DIGITS, *TWO_LARGE)
    assert file.read_bytes() == first
    assert [*file.parent.iterdir()] == [file]


def test_plan_out_of_what_does_not_fit_writes_nothing(flux: Path, tmp_path: Path) -> None:
    """Without a plan there is no picture, and no folder for it."""
    result = plan(flux, "--gpus", "12GiB", "--ram", "64GiB", "--out", tmp_path / "new" / "plan.svg")
    assert (result.exit_code, result.stdout) == (3, "")
    assert [*tmp_path.iterdir()] == []


def test_plan_options_that_are_wrong_are_told_all_at_once(tmp_path: Path) -> None:
    """Before the file is even read, every option that cannot be used is named, each with its code."""
    wrong = tmp_path / "plan.png"
    result = plan(
        tmp_path / "missing.yaml", "--machine", "t4", "--gpus", "24GiB", "--set", "reserve", "--out", wrong, "--all",
        "--explain", "vae",
    )  # fmt: skip
    assert (result.exit_code, result.stdout) == (2, "")
    assert [line for line in result.stderr.splitlines() if line.startswith(("error", "  what"))] == [
        "error[DM310 bad-command-line]: --out",
        f"  what {wrong} does not end in .svg",
        "error[DM310 bad-command-line]: --explain",
        "  what --explain, --all and --out are views of their own, and a command shows one",
        "error[DM310 bad-command-line]: --machine t4",
        "  what --machine says all of the machine, and --gpus a part of it",
        "error[DM151 bad-override]: --set reserve",
        "  what 'reserve' is not of the form key.path=value",
    ]


DOCS = ROOT / "docs" / "planning.md"
SHOWN = re.compile(r"^```\n\$ dmconfig (plan .*)\n(?:.*\n)*?```$", re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "flags"), [(DOCS, ("--all", "--explain", "--out plan.svg")), (ROOT / "README.md", ("2x24GiB", "16GiB,12"))]
)
def test_plan_documentation_shows_what_the_command_prints(
    page: Path, flags: Sequence[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each command of a page, for every view, prints what stands below it; its picture is the one there.

    They are written anew as the corpus of cases is.
    """
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    drawn, picture = tmp_path / "plan.svg", page.with_suffix(".svg")

    def printed(command: str) -> str:
        result = plan(*(drawn if word == "plan.svg" else word for word in shlex.split(command)[1:]))
        return f"```\n$ dmconfig {command}\n{result.output.replace(str(drawn), drawn.name)}```"

    text = page.read_text(encoding="utf-8")
    anew = SHOWN.sub(lambda shown: printed(shown[1]), text)
    if test_cases.UPDATE:
        page.write_text(anew, encoding="utf-8")
        if drawn.exists():
            picture.write_bytes(drawn.read_bytes())
    commands = [shown[1] for shown in SHOWN.finditer(text)]
    assert all(any(flag in command for command in commands) for flag in flags)
    assert anew == page.read_text(encoding="utf-8")
    assert drawn.exists() == picture.exists()
    assert not drawn.exists() or drawn.read_bytes() == picture.read_bytes()
