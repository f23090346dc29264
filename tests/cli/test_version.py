"""``dmconfig --version`` and the help."""

from __future__ import annotations

import subprocess
import sys

from typer.testing import CliRunner

from dmconfig import __version__
from dmconfig.cli import app


def test_version_option_prints_the_version() -> None:
    """The version is printed on stdout and nothing else happens."""
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"dmconfig {__version__}\n", "")


def test_version_as_a_module_is_the_same() -> None:
    """``python -m dmconfig`` is the same program."""
    command = [sys.executable, "-m", "dmconfig", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == (f"dmconfig {__version__}\n", "")


def test_help_names_every_verb() -> None:
    """The help lists all verbs."""
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(verb in result.stdout for verb in ("validate", "plan", "run", "schema"))
