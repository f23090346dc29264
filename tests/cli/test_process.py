"""The command as a whole process: it ends quickly, and loses nothing by it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dmconfig.cli import app

BAD = "version: 1\npipeline: {source: black-forest-labs/FLUX.1-dev, dtype: bfloat17}\n"


def dmconfig(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """The outcome of a process of its own, its output caught in pipes."""
    return subprocess.run([sys.executable, "-m", "dmconfig", *arguments], capture_output=True, check=False)


def test_output_through_a_pipe_is_whole() -> None:
    """Text of many times a pipe's buffer arrives to its end."""
    done, alone = dmconfig("schema"), CliRunner().invoke(app, ["schema"])
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(done.stdout) > 1 << 16
    assert done.stdout.decode() == alone.stdout


def test_output_into_a_file_is_whole(tmp_path: Path) -> None:
    """What is written into a file, whose buffer is emptied last of all, is there."""
    file = tmp_path / "schema.json"
    with file.open("wb") as stream:
        subprocess.run([sys.executable, "-m", "dmconfig", "schema"], stdout=stream, check=True)
    assert file.read_text(encoding="utf-8") == CliRunner().invoke(app, ["schema"]).stdout


@pytest.mark.parametrize(
    ("text", "exit_code"), [(BAD, 2), (BAD.replace("bfloat17", "bfloat16"), 0)], ids=["wrong", "right"]
)
def test_exit_code_of_the_process_is_that_of_the_command(tmp_path: Path, text: str, exit_code: int) -> None:
    """The code that a verb ends with reaches the shell, and so does all that it says."""
    file = tmp_path / "pipe.yaml"
    file.write_text(text, encoding="utf-8")
    done = dmconfig("validate", str(file))
    assert done.returncode == exit_code
    assert (b"bfloat17" in done.stderr) == bool(exit_code)
    assert (b": valid\n" in done.stdout) != bool(exit_code)


def test_word_that_is_no_command_ends_with_2() -> None:
    """A refusal of typer's own has its code too."""
    assert dmconfig("no-such-verb").returncode == 2


@pytest.mark.skipif(sys.platform == "win32", reason="no shell to close a stream with")
def test_process_without_standard_output_ends_well() -> None:
    """A stream that a daemon's shell has closed is no failure."""
    command = f'"{sys.executable}" -m dmconfig --version >&- 2>&-'
    assert subprocess.run(command, shell=True, check=False).returncode == 0  # noqa: S602 - our own text
