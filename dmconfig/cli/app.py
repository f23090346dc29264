"""The command ``dmconfig``: its verbs put together, and how it starts and fails."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from dmconfig.cli.doctor import doctor
from dmconfig.cli.machine import machine
from dmconfig.cli.pin import pin
from dmconfig.cli.plan import plan
from dmconfig.cli.printing import TRACEBACK
from dmconfig.cli.rehearse import rehearse
from dmconfig.cli.run import run
from dmconfig.cli.schema import schema
from dmconfig.cli.validate import validate
from dmconfig.version import __version__

app = typer.Typer(
    name="dmconfig",
    help="Declare a diffusers pipeline and where each part of it lives in a YAML file; check, plan and run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for verb in (validate, plan, rehearse, run, pin, doctor, machine, schema):
    app.command()(verb)


def main() -> None:
    """Run the command line. What is not an expected failure is a fault of ours, and says how to report it."""
    # pydantic looks through every installed package for plugins, which costs more than all of our models
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        app()
    except Exception as error:
        if TRACEBACK in os.environ:
            raise
        typer.echo(f"internal error: {type(error).__name__}: {error}", err=True)
        typer.echo("  This is a fault of dmconfig. Please report it with the output of the same command", err=True)
        typer.echo(f"  run with {TRACEBACK}=1 in the environment.", err=True)
        raise SystemExit(1) from None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dmconfig {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Check, plan and run diffusers pipelines described in YAML."""
