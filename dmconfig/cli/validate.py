"""``dmconfig validate``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
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
    from dmconfig.resolve import Override

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
    verdicts = ((str(file), _problems_of(file, overlays or (), profile, overrides)) for file in files)
    raise typer.Exit(_report(verdicts, format_))


def _problems_of(
    file: Path, overlays: Sequence[Path], profile: str | None, overrides: Sequence[Override]
) -> tuple[Problem, ...]:
    from dmconfig.check import check_weights
    from dmconfig.checked import check_file, check_profiles
    from dmconfig.errors import DMConfigError

    try:
        checked = check_file(file, overrides, overlays=overlays, profile=profile)
        check_weights(checked.resolved, checked.assembly)
        if checked.resolved.profiles:
            check_profiles(checked.resolved.profiles, file, overrides, overlays=overlays)
    except DMConfigError as error:
        return error.problems
    return ()


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
