"""What several verbs take: their arguments and options, and what those mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dmconfig.errors import Problem
    from dmconfig.inventory import Inventory
    from dmconfig.resolve import Override


class Format(StrEnum):
    """How to show a result."""

    TEXT = "text"
    JSON = "json"


class ReportFormat(StrEnum):
    """How to show what is wrong with files."""

    TEXT = "text"
    LINE = "line"
    JSON = "json"
    GITHUB = "github"
    SARIF = "sarif"


FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The spec.", show_default=False)]
FilesArgument = Annotated[list[Path], typer.Argument(metavar="FILE...", help="The specs.", show_default=False)]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the file, e.g. device_map=cuda:1.")
]
OverlayOption = Annotated[
    list[Path] | None,
    typer.Option("--overlay", "-f", metavar="FILE", help="Lay a file over the spec; may be given several times."),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="Use this profile of the files; otherwise the one that DMCONFIG_PROFILE names, if any.",
    ),
]
FormatOption = Annotated[Format, typer.Option("--format", help="How to show the result.")]
ReportFormatOption = Annotated[
    ReportFormat,
    typer.Option(
        "--format",
        help="text: with the lines of the file; line: one line each, for editors; json; github: annotations; sarif.",
    ),
]
GpusOption = Annotated[
    str | None,
    typer.Option("--gpus", metavar="SIZES", help="Plan for these accelerators, e.g. 2x24GiB,rtx-4090; 0: none."),
]
RamOption = Annotated[str | None, typer.Option("--ram", metavar="SIZE", help="Plan for this much host memory.")]
DiskOption = Annotated[str | None, typer.Option("--disk", metavar="SIZE", help="Plan for this much free disk.")]
CallOption = Annotated[
    list[str] | None, typer.Option("--call", metavar="KEY=VALUE", help="Set an argument of the pipeline's call.")
]
FramesOption = Annotated[int | None, typer.Option("--frames", min=1, help="Frames of a film.")]
StepsOption = Annotated[int | None, typer.Option("--steps", min=1, help="Steps of a whole generation.")]
PipelineOption = Annotated[
    str | None, typer.Option("--pipeline", metavar="NAME", help="One of the file's pipelines; default: the first.")
]
HubOption = Annotated[
    bool,
    typer.Option(
        "--hub", help="Ask the hub for headers and configs of what is not on this machine, never for weights."
    ),
]
MachineOption = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="FILE|NAME",
        help="Plan for the machine in this file, or of this name, e.g. rtx-4090; instead of --gpus, --ram and --disk.",
    ),
]


def read_all(*readers: Callable[[], Any]) -> list[Any]:
    """What each reader returns; what is wrong with the options of any of them is reported together."""
    from dmconfig.errors import DMConfigError, SpecError

    results: list[Any] = []
    problems: list[Problem] = []
    for read in readers:
        try:
            results.append(read())
        except DMConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise SpecError(problems)
    return results


def exclusive(flags: Mapping[str, bool], what: str) -> None:
    """Check that at most one of these flags is given; ``what`` says why not more.

    Raises: SpecError: naming all that are given.
    """
    from dmconfig.errors import Code, Problem, SpecError

    given = [flag for flag, is_given in flags.items() if is_given]
    if len(given) > 1:
        both = f"{', '.join(given[:-1])} and {given[-1]} {what}"
        raise SpecError([Problem(code=Code.BAD_COMMAND_LINE, what=both, fix="keep one of them", origin=given[0])])


def chosen_machine(name: str | None, gpus: str | None, ram: str | None, disk: str | None) -> Inventory:
    """The machine of a file or a name, or of the flags, with what they leave open from the one at hand."""
    from dmconfig.inventory import parse_machine, probe_machine

    flags = [flag for flag, value in (("--gpus", gpus), ("--ram", ram), ("--disk", disk)) if value is not None]
    if name is not None:
        from dmconfig.machine import named_machine

        return named_machine(name, flags)
    here = None if gpus is not None and ram is not None else probe_machine()
    if here is not None and not flags:
        return here
    return parse_machine(gpus, ram, disk=disk, this_machine=here)


def overrides_of(assignments: list[str] | None, flag: str = "--set") -> list[Override]:
    """The overrides of all flags of a kind; what cannot be read of any is reported together."""
    from dmconfig.errors import ResolveError
    from dmconfig.resolve import override_from_text

    overrides: list[Override] = []
    problems: list[Problem] = []
    for assignment in assignments or []:
        try:
            overrides.append(override_from_text(assignment, flag))
        except ResolveError as error:
            problems.extend(error.problems)
    if problems:
        raise ResolveError(problems)
    return overrides


def call_overrides(
    prompt: str | None, seed: int | None, call: list[str] | None, pipeline: str | None = None
) -> Iterator[Override]:
    """The arguments of a call are values of its section of the file, set from outside like any other."""
    from dmconfig.resolve import Override

    section = ("call",) if pipeline is None else ("pipelines", pipeline, "call")
    for name, value in (("prompt", prompt), ("seed", seed)):
        if value is not None:
            yield Override(path=(*section, name), value=value, origin=f"--{name}", folder=Path.cwd())
    for override in overrides_of(call, "--call"):
        yield override._replace(path=(*section, *override.path))
