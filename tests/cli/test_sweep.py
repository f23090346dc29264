"""``dmconfig sweep``: the whole command, on a pipeline small enough to be quick."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from dmconfig.cli import app
from dmconfig.rehearse.table import sweep_schema

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits.yaml"
SCHEMA = ROOT / "schemas" / "sweep-1.schema.json"
GRID = ("--ram", "8GiB", "--sizes", "64,32", "--batches", "2,1")


def sweep(*arguments: str | Path) -> tuple[int, str, str]:
    """Run the command; return exit code, output and errors."""
    result = CliRunner().invoke(app, ["sweep", str(DIGITS), *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_sweep_shows_the_largest_setting_of_every_machine() -> None:
    """A line per machine first, then what each setting needs, smallest first, and why the others do not fit."""
    code, output, errors = sweep("--gpus", "2GiB", "--gpus", "100MiB", *GRID)

    assert (code, errors) == (3, "")
    lines = [line.split("  ") for line in output.splitlines()]
    assert lines[0][0] == "machine"
    assert output.splitlines()[1].startswith("--gpus 2GiB --ram 8GiB    64 px, batch 2")
    assert output.splitlines()[2].startswith("--gpus 100MiB --ram 8GiB  none")
    table = output.partition("what the fullest device needs")[2].splitlines()
    assert [cell.strip() for cell in table[1].split("  ") if cell.strip()] == ["machine", "size", "batch 1", "batch 2"]
    assert [line.split()[4:6] for line in table[2:6]] == [["32", "px"], ["64", "px"]] * 2
    assert [line.split()[6:] for line in table[4:6]] == [["no", "-"], ["-", "-"]]
    assert "--gpus 100MiB --ram 8GiB, 32 px, batch 1: " in output


def test_sweep_json_is_of_its_schema() -> None:
    """With ``--format json`` the output is one JSON object, of the published schema."""
    code, output, _ = sweep("--gpus", "2GiB", *GRID, "--format", "json")
    data = json.loads(output)
    assert code == 0
    jsonschema.validate(data, json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert (data["ok"], len(data["machines"])) == (True, 1)
    assert data["machines"][0]["largest"] == data["machines"][0]["tried"][-1]


def test_the_published_schema_of_sweeps_is_the_records() -> None:
    """The file in ``schemas`` was written after the last change of the records."""
    assert SCHEMA.read_text(encoding="utf-8") == sweep_schema()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--sizes", "big"), "--sizes takes whole numbers from 8 on, with commas, and not 'big'"),
        (("--sizes", "512,4"), "not '4'"),
        (("--sizes", "512", "--batches", "0"), "--batches takes whole numbers from 1 on"),
        (("--sizes", "512", "--gpus", "0"), "no accelerator to rehearse on"),
        (("--sizes", "512", "--machine", "apple-m1"), "what is rehearsed are CUDA devices"),
        (("--sizes", "512", "--gpus", "2GiB", "--frames", "9"), "makes no film"),
        (("--sizes", "512", "--gpus", "2GiB", "--call", "no_such_argument=1"), "takes no argument"),
    ],
)
def test_sweep_mistakes_are_problems(arguments: tuple[str, ...], told: str) -> None:
    """What is wrong with the options is told with a code."""
    code, output, errors = sweep(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith("error[DM")
    assert told in errors
