"""The corpus of spec files: what the command prints for each, word for word.

Adding a case is adding a file. ``cases/invalid/NAME.yaml`` is a wrong spec, ``cases/valid/NAME.yaml`` a right one, and
``NAME.txt`` beside it is what a user sees, with the exit code as its last line. What ``dmconfig config`` makes of a
right one is ``cases/resolved/NAME.yaml``. Comments in a spec change how it is run:
``# plan: --gpus 2x24GiB --ram 64GiB`` plans it for that machine instead of validating it, ``# config: --provenance``
prints it with all of its layers; each ``# set: key=value`` is passed as ``--set``, each ``# overlay: file`` of
``cases/layers`` as ``--overlay``, ``# profile: name`` as ``--profile``, and each ``# env: NAME=value`` is a variable of
the environment. The root of the repository is written ``<root>``.

After a wanted change of texts, write them anew and read the difference:

    DMCONFIG_UPDATE_CASES=1 pytest tests/test_cases.py && git diff tests/cases
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dmconfig.checked import resolve_file
from dmconfig.cli import app
from dmconfig.document import parse_document
from dmconfig.resolve import override_from_text, resolve
from dmconfig.spec import validate_spec

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
    verb = next((name for name, _ in options_of(file) if name in ("plan", "config")), "validate")
    own = [word for text in texts_of(file, verb) for word in shlex.split(text)]
    return [verb, file.relative_to(ROOT).as_posix(), *own, *layers_of(file)]


def layers_of(file: Path) -> list[str]:
    """Return the options of a case that say what is laid over it."""
    overrides = [word for text in texts_of(file, "set") for word in ("--set", text)]
    overlays = [word for text in texts_of(file, "overlay") for word in ("--overlay", f"{LAYERS}/{text}")]
    profile = [word for text in texts_of(file, "profile") for word in ("--profile", text)]
    return [*overrides, *overlays, *profile]


def texts_of(file: Path, option: str) -> list[str]:
    """Return what the comments of one kind in a case say."""
    return [text for name, text in options_of(file) if name == option]


def options_of(file: Path) -> list[tuple[str, str]]:
    """Return the comments of a case that change how it is run."""
    found = _OPTION.findall(file.read_text(encoding="utf-8", errors="replace"))
    return [(name, text.strip()) for name, text in found]


def run(arguments: list[str], file: Path) -> Result:
    """Run the command, with the variables that a case asks for; it never ends in a traceback."""
    result = CliRunner(env=PLAIN | variables_of(file)).invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def variables_of(file: Path) -> dict[str, str]:
    """Return the variables of the environment that a case asks for."""
    return dict(text.split("=", 1) for text in texts_of(file, "env"))


def printed_for(file: Path) -> str:
    """Return what the command prints for a case, and its exit code."""
    result = run(arguments_of(file), file)
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


@pytest.mark.parametrize("file", VALID, ids=lambda file: file.stem)
def test_valid_case_is_resolved_as_recorded_and_means_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolved form of a right spec is exactly the recorded one, and beside the file it is the same spec."""
    resolved = run(["config", file.relative_to(ROOT).as_posix(), *layers_of(file)], file)
    assert resolved.exit_code == 0
    recorded = CASES / "resolved" / file.name
    if UPDATE:
        recorded.parent.mkdir(exist_ok=True)
        recorded.write_text(resolved.stdout, encoding="utf-8")
    assert resolved.stdout == recorded.read_text(encoding="utf-8")
    again = parse_document(resolved.stdout, name=file.name, folder=file.parent, tagged=True)
    for name, value in variables_of(file).items():
        monkeypatch.setenv(name, value)
    claims = [override_from_text(text) for text in texts_of(file, "set")]
    overlays = [ROOT / LAYERS / text for text in texts_of(file, "overlay")]
    profile = next(iter(texts_of(file, "profile")), None)
    whole = resolve_file(file, claims, overlays=overlays, profile=profile)
    monkeypatch.delenv("DMCONFIG_PROFILE", raising=False)
    assert validate_spec(resolve(again)) == validate_spec(whole)


def test_corpus_is_large_and_has_no_text_without_a_spec() -> None:
    """There are at least 150 wrong specs and 60 right ones, and every recorded text belongs to one."""
    texts = {file.with_suffix("") for file in CASES.glob("*valid/*.txt")}
    assert len(INVALID) >= 150
    assert len(VALID) >= 60
    assert {file.stem for file in CASES.glob("resolved/*")} == {file.stem for file in VALID}
    assert texts == {file.with_suffix("") for file in [*INVALID, *VALID]}
