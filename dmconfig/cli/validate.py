"""``dmconfig validate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dmconfig.cli.options import (
    FilesArgument,
    Format,
    FormatOption,
    OverlayOption,
    ProfileOption,
    SetOption,
    overrides_of,
)
from dmconfig.cli.printing import exit_on_problems, print_json, print_problems

if TYPE_CHECKING:
    from dmconfig.errors import Problem


def validate(
    files: FilesArgument,
    overlays: OverlayOption = None,
    profile: ProfileOption = None,
    set_: SetOption = None,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Check specs: everything that can be known without a machine and without reading weights."""
    from dmconfig.check import check_weights
    from dmconfig.errors import DMConfigError
    from dmconfig.load import check_file, check_profiles

    results: list[dict[str, Any]] = []
    exit_code = 0
    with exit_on_problems(format_):
        overrides = overrides_of(set_)
    for file in files:
        problems: tuple[Problem, ...] = ()
        try:
            checked = check_file(file, overrides, overlays=overlays or (), profile=profile)
            check_weights(checked.resolved, checked.assembly)
            if checked.resolved.profiles:
                check_profiles(checked.resolved.profiles, file, overrides, overlays=overlays or ())
        except DMConfigError as error:
            problems, exit_code = error.problems, max(exit_code, error.exit_code)
        results.append(_verdict(file, problems, format_))
    if format_ is Format.JSON:
        print_json(results)
    raise typer.Exit(exit_code)


def _verdict(file: Path, problems: tuple[Problem, ...], format_: Format) -> dict[str, Any]:
    if format_ is Format.TEXT:
        if problems:
            print_problems(problems, format_)
        else:
            typer.echo(f"{file}: valid")
        return {}
    from dmconfig.render import problems_data

    return {"file": str(file), **(problems_data(problems) if problems else {"ok": True, "problems": []})}
