"""``dmconfig machine``: this machine as a file, in text and JSON, and the schema of such files."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from dmconfig import inventory
from dmconfig.cli import app
from dmconfig.inventory import Inventory, probe_machine
from dmconfig.machine import read_machine

ROOT = Path(__file__).resolve().parents[2]


def machine(*arguments: str) -> Result:
    """Run ``dmconfig machine`` in this process."""
    return CliRunner().invoke(app, ["machine", *arguments])


def still(found: Inventory) -> Inventory:
    """Return a machine without what changes from one moment to the next, and what is said of the probe alone."""
    places = [replace(device, free_bytes=0) for device in (*found.accelerators, found.host)]
    disk = replace(found.disk, free_bytes=0) if found.disk else None
    return replace(found, accelerators=tuple(places[:-1]), host=places[-1], disk=disk, remark="")


@pytest.mark.parametrize("format_", ["text", "json"])
def test_machine_output_is_a_machine_file_of_this_machine(format_: str, tmp_path: Path) -> None:
    """What is printed, saved and read back is the machine that the probe finds."""
    result = machine("--format", format_)
    assert (result.exit_code, result.stderr) == (0, "")
    file = tmp_path / "machine.yaml"
    file.write_text(result.stdout)
    assert still(read_machine(file)) == still(probe_machine())


def test_machine_json_and_text_have_the_same_keys() -> None:
    """The JSON form is the file's own, so that either can be passed on."""
    text, data = yaml.safe_load(machine().stdout), json.loads(machine("--format", "json").stdout)
    assert text.keys() == data.keys()
    assert text["host"].keys() == data["host"].keys() == {"description", "memory", "free"}


def test_machine_plan_for_the_written_file_is_the_plan_for_this_machine(tmp_path: Path) -> None:
    """A plan for the printed file gives the devices that a plan for this machine has."""
    file = tmp_path / "machine.yaml"
    file.write_text(machine().stdout)
    spec = str(ROOT / "examples" / "digits.yaml")
    plans = [
        json.loads(CliRunner().invoke(app, ["plan", spec, "--format", "json", *arguments]).stdout)
        for arguments in ((), ("--machine", str(file)))
    ]
    assert plans[0]["device_map"] == plans[1]["device_map"]
    assert [device["id"] for device in plans[0]["devices"]] == [device["id"] for device in plans[1]["devices"]]


def test_machine_schema_prints_the_published_file() -> None:
    """``--schema`` prints ``schemas/machine-1.schema.json`` byte for byte, on stdout alone."""
    result = machine("--schema")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (ROOT / "schemas" / "machine-1.schema.json").read_text(encoding="utf-8")


@pytest.mark.skipif(inventory._may_have_accelerators(), reason="where there may be one, torch is asked")
def test_machine_without_accelerators_loads_neither_torch_nor_cards() -> None:
    """On such a machine the command is as quick as one that only looks."""
    code = (
        "import sys\n"
        "from dmconfig.cli import app\n"
        "from dmconfig import cards\n"
        "app(['machine'], standalone_mode=False)\n"
        "assert not {'torch', 'diffusers', 'transformers', 'accelerate'} & set(sys.modules)\n"
        "assert cards._cards.cache_info().currsize == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
