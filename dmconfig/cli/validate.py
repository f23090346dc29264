"""``dmconfig validate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dmconfig.cli.options import FilesArgument, Format, FormatOption, SetOption, overrides_of
from dmconfig.cli.printing import exit_on_problems, print_json, print_problems

if TYPE_CHECKING:
    from dmconfig.errors import Problem


def validate(files: FilesArgument, set_: SetOption = None, format_: FormatOption = Format.TEXT) -> None:
    """Check specs: everything that can be known without a machine and without reading weights."""
    from dmconfig.check import check_weights
    from dmconfig.errors import DMConfigError
    from dmconfig.load import check_file
    from dmconfig.trust import unpinned

    results: list[dict[str, Any]] = []
    exit_code = 0
    with exit_on_problems(format_):
        overrides = overrides_of(set_)
    for file in files:
        problems: tuple[Problem, ...] = ()
        notes: list[str] = []
        try:
            checked = check_file(file, overrides)
            check_weights(checked.resolved, checked.assembly)
            notes = [*unpinned(checked.spec)]
        except DMConfigError as error:
            problems, exit_code = error.problems, max(exit_code, error.exit_code)
        results.append(_verdict(file, problems, notes, format_))
    if format_ is Format.JSON:
        print_json(results)
    raise typer.Exit(exit_code)


def _verdict(file: Path, problems: tuple[Problem, ...], notes: list[str], format_: Format) -> dict[str, Any]:
    if format_ is Format.TEXT:
        if problems:
            print_problems(problems, format_)
        else:
            typer.echo(f"{file}: valid")
            for note in notes:
                typer.echo(f"  note: {note}")
        return {}
    from dmconfig.render import problems_data

    return {
        "file": str(file),
        **(problems_data(problems) if problems else {"ok": True, "problems": [], "notes": notes}),
    }
