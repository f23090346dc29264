"""The command ``dmconfig``: its verbs put together, and how it starts and fails."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

from dmconfig.cli.printing import TRACEBACK
from dmconfig.version import __version__

VERBS = (
    "init", "validate", "fix", "pin", "config", "explain", "plan", "rehearse", "sweep", "run", "doctor", "machine",
    "schema",
)  # fmt: skip
"""Each is a module of this package with a function of the same name."""


def run_command_line() -> None:
    """Run the command line. What is not an expected failure is a fault of ours, and says how to report it."""
    # pydantic looks through every installed package for plugins, which costs more than all of our models
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        command = command_line([verb]) if verb in VERBS else whole_command_line()
        command(prog_name="dmconfig")  # also as python -m dmconfig, whose name no shell could complete
    except Exception as error:
        if TRACEBACK in os.environ:
            raise
        from dmconfig.secrets import redact

        typer.echo(redact(f"internal error: {type(error).__name__}: {error}"), err=True)
        typer.echo("  This is a fault of dmconfig. Please report it with the output of the same command", err=True)
        typer.echo(f"  run with {TRACEBACK}=1 in the environment.", err=True)
        raise SystemExit(1) from None


def command_line(verbs: Iterable[str]) -> typer.Typer:
    """Return the command with these verbs; typer looks at every option of every one, which takes its time."""
    app = typer.Typer(
        name="dmconfig",
        help="Declare a diffusers pipeline and where each part of it lives in a YAML file; check, plan and run it.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    for verb in verbs:
        app.command()(getattr(import_module(f"dmconfig.cli.{verb}"), verb))
    return app


@functools.cache
def whole_command_line() -> typer.Typer:
    """Return the command with all of its verbs."""
    return command_line(VERBS)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dmconfig {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Check, plan and run diffusers pipelines described in YAML."""
