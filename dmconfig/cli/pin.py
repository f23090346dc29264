"""``dmconfig pin``."""

from __future__ import annotations

from typing import Annotated

import typer

from dmconfig.cli.options import FilesArgument, Format
from dmconfig.cli.printing import exit_on_problems


def pin(
    files: FilesArgument,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; end with 2 if a hub id is at no commit. For CI.")
    ] = False,
) -> None:
    """Write the commit of every hub id into the specs, in place of branches; comments and all else stay."""
    from dmconfig.pinning import pin as pinned

    moving = 0
    for file in files:
        with exit_on_problems(Format.TEXT):
            result = pinned(file)
            if not check:
                result.write()
        moving += len(result.pins)
        for each in result.pins:
            typer.echo(f"{file}: {each.hub_id} {each.revision or 'main'} -> {each.commit}")
        if not result.pins:
            typer.echo(f"{file}: nothing to pin")
    raise typer.Exit(2 if check and moving else 0)
