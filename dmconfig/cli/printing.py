"""What several verbs print: problems, plans and data; and how a verb ends when something is wrong."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from dmconfig.cli.options import Format

if TYPE_CHECKING:
    from dmconfig.errors import Problem
    from dmconfig.plan import Plan

TRACEBACK = "DMCONFIG_TRACEBACK"
"""With this in the environment, failures show where in the code they come from."""


@contextlib.contextmanager
def exit_on_problems(format_: Format) -> Iterator[None]:
    """Print what is found wrong inside the block, and end the command with the exit code of its kind."""
    from dmconfig.errors import DMConfigError

    try:
        yield
    except DMConfigError as error:
        if TRACEBACK in os.environ:
            raise
        print_problems(error.problems, format_)
        raise typer.Exit(error.exit_code) from None


def show(text: str) -> None:
    """Print text that may hold values of a spec; secrets are left out of it."""
    from dmconfig.secrets import redact

    typer.echo(redact(text))


def print_problems(problems: tuple[Problem, ...], format_: Format) -> None:
    """Print problems: as text to standard error, as data to standard output."""
    if format_ is Format.JSON:
        from dmconfig.render import problems_data

        print_json(problems_data(problems))
        return
    from dmconfig.reports import problem_blocks

    for block in problem_blocks(problems):
        typer.echo(block, err=True)


def print_plan(planned: Plan, format_: Format) -> None:
    """Print a plan, as the text an operator reads or as data."""
    from dmconfig import render

    if format_ is Format.JSON:
        print_json(render.plan_data(planned))
    else:
        show(render.plan_text(planned, terminal_width()))


def print_json(data: Any) -> None:
    """Print data as JSON, without the secrets in it."""
    from dmconfig.writing import json_text

    show(json_text(data))


def terminal_width() -> int | None:
    """The columns of the terminal; None where there is none, so that no line is broken for a tool that reads it."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def quiet_libraries() -> None:
    """Keep the libraries' remarks at import off the screen; what matters of them is an error here."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    from dmconfig.footprint import quiet_imports

    quiet_imports()
