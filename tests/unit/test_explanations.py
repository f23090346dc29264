"""Every error code is explained, and what the explanations show is what the command says."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dmconfig.cli import app
from dmconfig.errors import Code
from dmconfig.explanations import EXPLANATIONS

SHOWN = [code for code, explanation in EXPLANATIONS.items() if explanation.command]


def test_every_code_has_an_explanation() -> None:
    """No code lacks one, and each says why it comes up, shows it, and tells how to mend it, in sentences."""
    assert set(EXPLANATIONS) == set(Code)
    for code, explanation in EXPLANATIONS.items():
        assert explanation.cause.endswith("."), code
        assert explanation.remedy.endswith("."), code
        assert explanation.example.strip(), code


def test_most_codes_are_shown_by_a_file() -> None:
    """What a file can show is shown by a file, not in words: all of reading, shape and meaning but these."""
    in_words = {code for code in Code if code not in SHOWN and code < "DM600"}
    assert in_words == {
        Code.FILE_UNREADABLE, Code.FILE_NOT_WRITTEN, Code.BAD_COMMAND_LINE,
        Code.LAYER_CONFLICT, Code.INPUT_UNREADABLE, Code.SOURCE_CLASS_DIFFERS,
        Code.WEIGHTS_MISSING, Code.WEIGHTS_CORRUPT, Code.DOWNLOAD_FAILED, Code.CODE_NOT_TRUSTED,
        Code.PICKLE_NOT_TRUSTED, Code.DOWNLOAD_DIFFERS, Code.CONFIG_NOT_FOUND, Code.BAD_CODE,
    }  # fmt: skip


@pytest.mark.parametrize("code", SHOWN, ids=str)
def test_example_has_the_problem_it_explains(code: Code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of an example reports the code that it is the example of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    Path("pipe.yaml").write_text(EXPLANATIONS[code].example, encoding="utf-8")
    command = EXPLANATIONS[code].command
    assert command is not None
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert f"error[{code} {code.slug}]" in result.output
