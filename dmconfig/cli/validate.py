"""``dmconfig validate``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from dmconfig.cli.options import (
    FilesArgument,
    Format,
    OverlayOption,
    ProfileOption,
    ReportFormat,
    ReportFormatOption,
    SetOption,
    overrides_of,
)
from dmconfig.cli.printing import exit_on_problems, print_json, show

if TYPE_CHECKING:
    from dmconfig.errors import Problem

    Verdict = tuple[str, tuple[Problem, ...]]


def validate(
    files: FilesArgument,
    overlays: OverlayOption = None,
    profile: ProfileOption = None,
    set_: SetOption = None,
    format_: ReportFormatOption = ReportFormat.TEXT,
) -> None:
    """Check specs: everything that can be known without a machine and without reading weights.

    Ends with 2 when any file is wrong; the others are checked nevertheless.
    """
    with exit_on_problems(Format.JSON if format_ is ReportFormat.JSON else Format.TEXT):
        overrides = overrides_of(set_)
    from dmconfig.checked import problems_of_file

    verdicts = (
        (str(file), problems_of_file(file, overrides, overlays=overlays or (), profile=profile)) for file in files
    )
    raise typer.Exit(_report(verdicts, format_))


def _report(verdicts: Iterator[Verdict], format_: ReportFormat) -> int:
    """Print what was found, and return the exit code: 2 when anything was, else 0."""
    if format_ in (ReportFormat.JSON, ReportFormat.SARIF):
        found = [*verdicts]
        print_json(_as_data(found) if format_ is ReportFormat.JSON else _as_sarif(found))
        return 2 if any(problems for _, problems in found) else 0
    exit_code = 0
    for file, problems in verdicts:
        _print(file, problems, format_)
        exit_code = 2 if problems else exit_code
    return exit_code


def _print(file: str, problems: tuple[Problem, ...], format_: ReportFormat) -> None:
    from dmconfig.reports import github_annotation, problem_blocks, problem_line

    match format_:
        case ReportFormat.LINE:
            for problem in problems:
                show(problem_line(problem, file))
        case ReportFormat.GITHUB:
            for problem in problems:
                show(github_annotation(problem, file))
        case _ if not problems:
            typer.echo(f"{file}: valid")
        case _:
            for block in problem_blocks(problems):
                typer.echo(block, err=True)


def _as_data(verdicts: Sequence[Verdict]) -> list[dict[str, object]]:
    from dmconfig.render import problem_data

    return [
        {"file": file, "ok": not problems, "problems": [problem_data(problem) for problem in problems]}
        for file, problems in verdicts
    ]


def _as_sarif(verdicts: Sequence[Verdict]) -> dict[str, object]:
    from dmconfig.sarif import sarif_log

    return sarif_log(verdicts)
