"""The corpus of spec files: what the command prints for each, word for word.

Adding a case is adding a file. ``cases/invalid/NAME.yaml`` is a wrong spec, ``cases/valid/NAME.yaml`` a right one, and
``NAME.txt`` beside it is what a user sees, with the exit code as its last line. Comments in a spec change how it is
run: ``# plan: --gpus 2x24GiB --ram 64GiB`` plans it for that machine instead of validating it, and
``# config: --provenance`` prints it with all of its layers; each ``# set: key=value`` is passed as ``--set``, each
``# overlay: file`` of ``cases/layers`` as ``--overlay``, ``# profile: name`` as ``--profile``, and each
``# env: NAME=value`` is a variable of the environment. The root of the repository is written ``<root>``.

After a wanted change of texts, write them anew and read the difference:

    DMCONFIG_UPDATE_CASES=1 pytest tests/test_cases.py && git diff tests/cases
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dmconfig.cli import app

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests" / "cases"
INVALID = sorted((CASES / "invalid").glob("*.yaml"))
VALID = sorted((CASES / "valid").glob("*.yaml"))
UPDATE = bool(os.environ.get("DMCONFIG_UPDATE_CASES"))
PLAIN = {"FORCE_COLOR": None, "TTY_COMPATIBLE": None, "DMCONFIG_TRACEBACK": None, "DMCONFIG_PROFILE": None}

_OPTION = re.compile(r"^# (plan|config|set|overlay|profile|env):(.*)$", re.MULTILINE)
LAYERS = "tests/cases/layers"


def arguments_of(file: Path) -> list[str]:
    """Return the command line that a case asks for in its comments."""
    options = options_of(file)
    verb = next((name for name, _ in options if name in ("plan", "config")), "validate")
    own = [word for name, text in options if name == verb for word in shlex.split(text)]
    overrides = [word for name, text in options if name == "set" for word in ("--set", text)]
    overlays = [word for name, text in options if name == "overlay" for word in ("--overlay", f"{LAYERS}/{text}")]
    profile = [word for name, text in options if name == "profile" for word in ("--profile", text)]
    return [verb, file.relative_to(ROOT).as_posix(), *own, *overrides, *overlays, *profile]


def options_of(file: Path) -> list[tuple[str, str]]:
    """Return the comments of a case that change how it is run."""
    found = _OPTION.findall(file.read_text(encoding="utf-8", errors="replace"))
    return [(name, text.strip()) for name, text in found]


def printed_for(file: Path) -> str:
    """Return what the command prints for a case, and its exit code."""
    variables = dict(text.split("=", 1) for name, text in options_of(file) if name == "env")
    result = CliRunner(env=PLAIN | variables).invoke(app, arguments_of(file))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    lines = [line.rstrip() for line in result.output.replace(str(ROOT), "<root>").splitlines()]
    return "\n".join([*lines, f"exit {result.exit_code}", ""])


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run in the repository's root, as if nothing had ever been downloaded."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize("file", [*INVALID, *VALID], ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_case_command_prints_recorded_text(file: Path) -> None:
    """The text and the exit code of a case are exactly the recorded ones."""
    recorded = file.with_suffix(".txt")
    printed = printed_for(file)
    if UPDATE:
        recorded.write_text(printed, encoding="utf-8")
    assert "Traceback" not in printed
    assert printed == recorded.read_text(encoding="utf-8")


@pytest.mark.parametrize("file", INVALID, ids=lambda file: file.stem)
def test_invalid_case_begins_with_what_is_wrong_and_is_refused(file: Path) -> None:
    """A wrong spec says in its first line what is wrong with it, and ends with exit 2 or 3 and at least one problem."""
    recorded = file.with_suffix(".txt").read_text(encoding="utf-8")
    assert file.read_bytes().startswith(b"# ")
    assert recorded.splitlines()[-1] in ("exit 2", "exit 3")
    assert "error[DM" in recorded


@pytest.mark.parametrize("file", VALID, ids=lambda file: file.stem)
def test_valid_case_begins_with_what_it_shows_and_is_planned(file: Path) -> None:
    """A right spec says in its first line what it shows, and is planned without a problem."""
    recorded = file.with_suffix(".txt").read_text(encoding="utf-8")
    assert file.read_bytes().startswith(b"# ")
    assert recorded.splitlines()[-1] == "exit 0"
    assert "error" not in recorded


def test_corpus_is_large_and_has_no_text_without_a_spec() -> None:
    """There are at least 50 wrong specs and 10 right ones, and every recorded text belongs to one."""
    texts = {file.with_suffix("") for file in CASES.glob("*valid/*.txt")}
    assert len(INVALID) >= 50
    assert len(VALID) >= 10
    assert texts == {file.with_suffix("") for file in [*INVALID, *VALID]}
