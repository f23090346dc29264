"""``dmconfig rehearse``: the whole command, on a pipeline small enough to be quick."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from dmconfig.cli import app

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits.yaml"
SCHEMA = ROOT / "schemas" / "rehearsal-1.schema.json"
MACHINE = ("--gpus", "2x2GiB", "--ram", "8GiB")


def rehearse(*arguments: str | Path) -> tuple[int, str, str]:
    """Run the command; return exit code, output and errors."""
    result = CliRunner().invoke(app, ["rehearse", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_rehearse_says_what_it_takes_and_writes_a_page(tmp_path: Path) -> None:
    """The verdict first, the phases of the pipeline's own code, and the page where it was asked for."""
    page = tmp_path / "reports" / "digits.html"

    code, output, errors = rehearse(DIGITS, *MACHINE, "--steps", "4", "--out", page)

    assert (code, errors) == (0, "")
    assert output.startswith("fits")
    assert all(phase in output for phase in ("text_encoder", "unet", "vae.decode"))
    assert output.rstrip().endswith(f"wrote {page}")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_rehearse_json_is_of_its_schema() -> None:
    """With ``--format json`` the output is one JSON object, of the published schema."""
    code, output, _ = rehearse(DIGITS, *MACHINE, "--format", "json", "--batch", "2")
    data = json.loads(output)
    assert code == 0
    jsonschema.validate(data, json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert data["ok"] is True


def test_rehearse_what_does_not_fit_exits_with_three() -> None:
    """A card with room for the weights, but not for what comes on top, is told so."""
    code, output, _ = rehearse(DIGITS, "--gpus", "200MiB", "--ram", "8GiB", "--set", "reserve=0")
    assert code == 3
    assert not output.startswith("fits")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--gpus", "0", "--ram", "8GiB"), "no accelerator to rehearse on"),
        (("--machine", "apple-m1"), ""),
        ((*MACHINE, "--out", "page.txt"), "does not end in .html"),
        ((*MACHINE, "--call", "no_such_argument=1"), "takes no argument"),
        ((*MACHINE, "--pipeline", "again"), "the file has no pipeline 'again'"),
    ],
)
def test_rehearse_mistakes_are_told_before_anything_runs(arguments: tuple[str, ...], told: str) -> None:
    """What is wrong with the options is a problem with a code, and nothing is rehearsed."""
    code, output, errors = rehearse(DIGITS, *arguments)
    assert (code, output) == (2, "")
    assert errors.startswith("error[DM")
    assert told in errors


def test_rehearse_fix_tries_what_may_help() -> None:
    """Of a batch that is too large, the command says what helps; without the option only what may."""
    card = (
        "--gpus",
        "600MiB",
        "--ram",
        "8GiB",
        "--set",
        "reserve=0",
        "--batch",
        "4",
        "--height",
        "512",
        "--width",
        "512",
    )
    code, output, errors = rehearse(DIGITS, *card, "--fix", "--format", "json")
    assert (code, errors) == (3, "")
    remedies = json.loads(output)["remedies"]
    assert [each["fits"] for each in remedies if each["words"].startswith("make ")]
    assert all(isinstance(each["fits"], bool) for each in remedies)


def test_rehearse_shows_no_traceback_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pipeline's own code raises is a verdict with exit code 3; where it was stands behind a variable."""
    odd = (*MACHINE, "--height", "33", "--width", "33")
    code, output, errors = rehearse(DIGITS, *odd)
    assert (code, errors) == (3, "")
    assert output.startswith("does not run: an error in the pipeline itself\n")
    assert "  what     ValueError: `height` and `width` have to be divisible by 8" in output
    assert "  fix      if the arguments of the call are as they should be" in output
    monkeypatch.setenv("DMCONFIG_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in rehearse(DIGITS, *odd)[2]


def test_plan_rehearse_keeps_what_a_rehearsal_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``plan --rehearse`` is short for a rehearsed reserve, and the plan says where its reserve came from."""
    monkeypatch.setenv("DMCONFIG_CACHE", str(tmp_path))
    plans = [
        CliRunner().invoke(app, ["plan", str(DIGITS), *MACHINE, *arguments])
        for arguments in (["--rehearse"], ["--set", "reserve=rehearsed"], [])
    ]
    assert [plan.exit_code for plan in plans] == [0, 0, 0]
    assert plans[0].stdout == plans[1].stdout
    assert "note: the reserve is what a rehearsal of this plan took beside weights, for 1 x " in plans[0].stdout
    assert "rehearsal" not in plans[2].stdout


def test_what_libraries_remark_while_they_are_imported_is_not_shown() -> None:
    """With torchao installed, diffusers and torch remark on kernels that a machine lacks; a report is not the place."""
    command = [sys.executable, "-m", "dmconfig", "rehearse", str(DIGITS), "--gpus", "2x24GiB", "--ram", "64GiB"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr == ""


@pytest.mark.slow
def test_the_pages_show_the_rehearsal_that_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README and the page on rehearsals have the same one, up to where each breaks off."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    spec = "examples/flux-auto.yaml --gpus 2x24GiB --ram 64GiB"
    monkeypatch.chdir(ROOT)
    printed = CliRunner().invoke(app, ["rehearse", *spec.split()]).stdout
    for page in (ROOT / "README.md", ROOT / "docs" / "rehearsal.md"):
        shown = page.read_text(encoding="utf-8").partition(f"$ dmconfig rehearse {spec}")[2].partition("\n")[2]
        shown = shown.partition("```")[0].partition("...\n")[0]
        assert shown.count("\n") > 10
        assert printed.startswith(shown), page


def test_rehearse_another_pipeline_of_the_file(tmp_path: Path) -> None:
    """The call is that of the pipeline named, with a picture of its own; arguments on the line are for it."""
    file = tmp_path / "two.yaml"
    file.write_text(
        f"version: 1\npipeline: {{source: {ROOT / 'examples' / 'digits' / 'pipeline'}}}\n"
        "pipelines: {again: {class: StableDiffusionImg2ImgPipeline, call: {strength: 0.5}}}\n"
    )
    code, output, errors = rehearse(
        file, *MACHINE, "--pipeline", "again", "--call", "num_inference_steps=8", "--format", "json"
    )
    assert (code, errors) == (0, "")
    data = json.loads(output)
    assert data["steps"] == {"rehearsed": 2, "asked": 4}
    assert data["pipeline"] == "StableDiffusionImg2ImgPipeline"
    assert data["arguments"]["strength"] == 0.5
    assert any(peak["phase"] == "vae.encode" for device in data["devices"] for peak in device["phases"])
