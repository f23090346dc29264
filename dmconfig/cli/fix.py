"""``dmconfig fix``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dmconfig.cli.options import FilesArgument, Format
from dmconfig.cli.printing import print_problems, show


def fix(
    files: FilesArgument,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; end with 2 if a file would change. For CI.")
    ] = False,
) -> None:
    """Rename and move keys that are called something else here, or belong elsewhere; print what changed.

    Words that need quotes get them. What is still wrong is printed too.

    Comments and all other text stay as they are. What a file extends is fixed when it is named itself.
    """
    codes = [_fix(file, check=check) for file in files]
    raise typer.Exit(max(codes))


def _fix(file: Path, *, check: bool) -> int:
    from dmconfig.checked import check_file
    from dmconfig.errors import Code, DMConfigError
    from dmconfig.fixing import fixed, without_offers

    try:
        change = fixed(file)
        if change.edits:
            show(change.diff().removesuffix("\n"))
        if check:
            return 2 if change.edits else 0
        change.write()
        check_file(file)
    except DMConfigError as error:
        still = tuple(problem for problem in error.problems if problem.code is not Code.UNSET_VARIABLE)
        print_problems(still if check else tuple(without_offers(still)), Format.TEXT)
        return error.exit_code if still else 0
    if not change.edits:
        typer.echo(f"{file}: nothing to fix")
    return 0
