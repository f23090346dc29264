"""The command ``dmconfig``: one function per verb. The only module that prints, and the only one that exits.

Exit codes: 0 fine, 2 bad input, 3 no feasible plan, 4 build, dispatch or call failed; 1 is a fault of dmconfig itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmconfig.version import __version__

if TYPE_CHECKING:
    from dmconfig.console import ConsoleProgress
    from dmconfig.errors import Problem
    from dmconfig.inventory import Inventory
    from dmconfig.load import Checked
    from dmconfig.plan import Plan
    from dmconfig.resolve import Override


TRACEBACK = "DMCONFIG_TRACEBACK"
"""With this in the environment, failures show where in the code they come from."""


class Format(StrEnum):
    """How to show a result."""

    TEXT = "text"
    JSON = "json"


app = typer.Typer(
    name="dmconfig",
    help="Declare a diffusers pipeline and where each part of it lives in a YAML file; check, plan and run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The spec.", show_default=False)]
FilesArgument = Annotated[list[Path], typer.Argument(metavar="FILE...", help="The specs.", show_default=False)]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the file, e.g. device_map=cuda:1.")
]
FormatOption = Annotated[Format, typer.Option("--format", help="How to show the result.")]
GpusOption = Annotated[
    str | None,
    typer.Option("--gpus", metavar="SIZES", help="Plan for these accelerators, e.g. 2x24GiB,rtx-4090; 0: none."),
]
RamOption = Annotated[str | None, typer.Option("--ram", metavar="SIZE", help="Plan for this much host memory.")]
DiskOption = Annotated[str | None, typer.Option("--disk", metavar="SIZE", help="Plan for this much free disk.")]
MachineOption = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="FILE|NAME",
        help="Plan for the machine in this file, or of this name, e.g. rtx-4090; instead of --gpus, --ram and --disk.",
    ),
]


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


@app.command()
def validate(files: FilesArgument, set_: SetOption = None, format_: FormatOption = Format.TEXT) -> None:
    """Check specs: everything that can be known without a machine and without reading weights."""
    from dmconfig.check import check_weights
    from dmconfig.errors import DMConfigError
    from dmconfig.load import check_file

    results: list[dict[str, Any]] = []
    exit_code = 0
    with _exit_on_problems(format_):
        overrides = _overrides(set_)
    for file in files:
        problems: tuple[Problem, ...] = ()
        try:
            checked = check_file(file, overrides)
            check_weights(checked.resolved, checked.assembly)
        except DMConfigError as error:
            problems, exit_code = error.problems, max(exit_code, error.exit_code)
        results.append(_verdict(file, problems, format_))
    if format_ is Format.JSON:
        _print_json(results)
    raise typer.Exit(exit_code)


@app.command()
def plan(
    file: FileArgument,
    machine: MachineOption = None,
    gpus: GpusOption = None,
    ram: RamOption = None,
    disk: DiskOption = None,
    set_: SetOption = None,
    explain: Annotated[
        str | None,
        typer.Option(
            "--explain", metavar="COMPONENT", help="Show one component: what it is, where and why, what else."
        ),
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Show every strategy, and each accelerator alone, side by side.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="PICTURE", help="Also draw the plan, as an .svg; its folder is made."),
    ] = None,
    hub: Annotated[
        bool, typer.Option("--hub", help="Ask the hub for the headers of weights that are not on this machine.")
    ] = False,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Show where every component will live on this machine, or on one described by a file, a name or sizes."""
    from dmconfig.load import check_file, plan_for

    with _exit_on_problems(format_):
        _, chosen, overrides = _read_all(
            lambda: _check_views(explain, all_, out),
            lambda: _machine(machine, gpus, ram, disk),
            lambda: _overrides(set_),
        )
        checked = check_file(file, overrides, ask_hub=hub)
        if all_:
            _print_comparison(checked, chosen, format_, ask_hub=hub)
        elif explain is not None:
            _print_explanation(explain, checked, chosen, format_, ask_hub=hub)
        else:
            planned = plan_for(checked, chosen, ask_hub=hub)
            if out is not None:
                _draw(planned, checked, out)
            _print_plan(planned, format_)
            if out is not None and format_ is Format.TEXT:
                typer.echo(f"wrote {out}")


@app.command()
def rehearse(
    file: FileArgument,
    machine: MachineOption = None,
    gpus: GpusOption = None,
    ram: RamOption = None,
    disk: DiskOption = None,
    set_: SetOption = None,
    height: Annotated[int | None, typer.Option("--height", min=8, help="Height of the picture in pixels.")] = None,
    width: Annotated[int | None, typer.Option("--width", min=8, help="Width of the picture in pixels.")] = None,
    frames: Annotated[int | None, typer.Option("--frames", min=1, help="Frames of a film.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Steps of a whole generation.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Pictures at once.")] = 1,
    full: Annotated[bool, typer.Option("--full", help="Rehearse every step, not only the first ones.")] = False,
    call: Annotated[
        list[str] | None, typer.Option("--call", metavar="KEY=VALUE", help="Set an argument of the pipeline's call.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PAGE", help="Also write the report as a page, an .html file.")
    ] = None,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Run the pipeline's own code on virtual accelerators, without weights: will it run, and what does it take?"""
    from dmconfig.load import check_file, plan_for

    with _exit_on_problems(format_):
        _, chosen, overrides, arguments = _read_all(
            lambda: _check_page(out),
            lambda: _rehearsable(_machine(machine, gpus, ram, disk)),
            lambda: _overrides(set_),
            lambda: [*_call_overrides(None, None, call)],
        )
        from dmconfig.virtual.hidden import sees_cuda

        if sees_cuda():
            raise typer.Exit(_rehearse_hidden(chosen))
        checked = check_file(file, [*overrides, *arguments])
        planned = plan_for(checked, chosen)
        _quiet_libraries()
        from dmconfig.rehearse import Script, Settings, rehearsal_data, rehearsal_page, rehearsal_text
        from dmconfig.rehearse import rehearse as run_through

        script = Script(resolved=checked.resolved, spec=checked.spec, assembly=checked.assembly)
        settings = Settings(height=height, width=width, frames=frames, steps=steps, batch=batch, full=full)
        rehearsal = run_through(script, planned, chosen, settings)
        if out is not None:
            from dmconfig.output import write_text

            write_text(rehearsal_page(rehearsal), out)
        if format_ is Format.JSON:
            _print_json(rehearsal_data(rehearsal))
        else:
            typer.echo(rehearsal_text(rehearsal, _width()))
            if out is not None:
                typer.echo(f"wrote {out}")
    if not rehearsal.fits:
        raise typer.Exit(3)


@app.command()
def run(
    file: FileArgument,
    out: Annotated[Path, typer.Option("--out", metavar="IMAGE", help="Where to write it; its folder is made.")],
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="What to draw.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Same seed, same picture.")] = None,
    call: Annotated[
        list[str] | None, typer.Option("--call", metavar="KEY=VALUE", help="An argument of the pipeline's call.")
    ] = None,
    set_: SetOption = None,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Load the pipeline as planned, call it once, and write the picture."""
    _quiet_libraries()
    from dmconfig.check import check_weights
    from dmconfig.console import ConsoleProgress
    from dmconfig.inventory import probe_machine
    from dmconfig.load import check_file, fetched, load_plan, plan_for
    from dmconfig.output import check_output, save

    progress = ConsoleProgress()
    with _exit_on_problems(format_):
        check_output(out)
        overrides = (*_overrides(set_), *_call_overrides(prompt, seed, call))
        with progress.phase("plan"):
            checked = fetched(check_file(file, overrides, ask_hub=True), progress)
            _check_runnable(checked, out)
            check_weights(checked.resolved, checked.assembly)
            planned = plan_for(checked, probe_machine())
        if format_ is Format.TEXT:
            _print_plan(planned, format_)
        pipe = load_plan(checked, planned, progress)
        with progress.phase("generate"):
            result = _call(pipe, progress)
        with progress.phase("save"):
            files = save(result, out)
        _report_run(files, planned, progress, format_)


@app.command()
def doctor(format_: FormatOption = Format.TEXT) -> None:
    """Examine this machine: versions, devices, free space, and whether bytes survive copies between devices."""
    from dmconfig.doctor import examination_data, examination_text, examine

    examination = examine()
    if format_ is Format.JSON:
        _print_json(examination_data(examination))
    else:
        typer.echo(examination_text(examination), nl=False)
    raise typer.Exit(examination.exit_code)


@app.command()
def machine(
    schema_: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of machine files instead.")] = False,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Print this machine as a machine file: devices, memory, disk and known speeds, for `plan --machine` elsewhere."""
    if schema_:
        from dmconfig.schema import machine_schema_text

        typer.echo(machine_schema_text(), nl=False)
        return
    from dmconfig.inventory import probe_machine
    from dmconfig.machine import machine_data, machine_text

    here = probe_machine()
    if format_ is Format.JSON:
        _print_json(machine_data(here))
    else:
        typer.echo(machine_text(here), nl=False)


@app.command()
def schema(
    plan_: Annotated[
        bool, typer.Option("--plan", help="Print the schema of what `plan --format json` prints.")
    ] = False,
) -> None:
    """Print the JSON Schema of the file format, for editors and other tools."""
    from dmconfig.schema import plan_schema_text, schema_text

    typer.echo(plan_schema_text() if plan_ else schema_text(), nl=False)


def _read_all(*readers: Callable[[], Any]) -> list[Any]:
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


def _check_views(explain: str | None, all_: bool, out: Path | None) -> None:
    """Check that one view is asked for, and that a picture can be written where it is to go.

    Raises: SpecError: with all that is wrong.
    """
    from dmconfig.errors import Code, Problem, SpecError

    problems: list[Problem] = []
    if out is not None:
        from dmconfig.output import file_problems

        problems += file_problems(out, ".svg")
    flags = (("--explain", explain is not None), ("--all", all_), ("--out", out is not None))
    given = [flag for flag, is_given in flags if is_given]
    if len(given) > 1:
        what = f"{', '.join(given[:-1])} and {given[-1]} are views of their own, and a command shows one"
        problems.append(Problem(code=Code.BAD_COMMAND_LINE, what=what, fix="keep one of them", origin=given[0]))
    if problems:
        raise SpecError(problems)


def _print_explanation(component: str, checked: Checked, machine: Inventory, format_: Format, *, ask_hub: bool) -> None:
    from dmconfig import render
    from dmconfig.load import alternatives_for, plan_for

    alternatives = alternatives_for(checked, machine, component, ask_hub=ask_hub)
    planned = plan_for(checked, machine, ask_hub=ask_hub)
    if format_ is Format.JSON:
        _print_json(render.explanation_data(component, planned, alternatives))
    else:
        typer.echo(render.explanation_text(component, planned, alternatives, _width()))


def _print_comparison(checked: Checked, machine: Inventory, format_: Format, *, ask_hub: bool) -> None:
    """Print all strategies; then, where the file's own plan does not fit, why, and exit as ``plan`` does."""
    from dmconfig import render
    from dmconfig.errors import PlanError
    from dmconfig.load import compare_strategies, plan_for

    comparisons = compare_strategies(checked, machine, ask_hub=ask_hub)
    problems: tuple[Problem, ...] = ()
    planned = None
    try:
        planned = plan_for(checked, machine, ask_hub=ask_hub)
    except PlanError as error:
        problems = error.problems
    comparisons = render.with_own(comparisons, planned)
    pipeline = checked.assembly.class_name
    if format_ is Format.JSON:
        _print_json(render.comparison_data(pipeline, machine, comparisons, problems))
    else:
        typer.echo(render.comparison_text(pipeline, machine.name, comparisons, _width()))
        _print_problems(problems, format_)
    if problems:
        raise typer.Exit(PlanError.exit_code)


def _draw(planned: Plan, checked: Checked, out: Path) -> None:
    from dmconfig.output import write_text
    from dmconfig.picture import plan_picture

    write_text(plan_picture(planned, checked.assembly.in_turn), out)


def _machine(name: str | None, gpus: str | None, ram: str | None, disk: str | None) -> Inventory:
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


def _rehearsable(machine: Inventory) -> Inventory:
    """Raise unless a machine has accelerators, of the kind that virtual ones stand for."""
    from dmconfig.errors import Code, MachineError, Problem

    others = [device.id for device in machine.accelerators if not device.id.startswith("cuda:")]
    if others:
        what = f"{machine.name} has {', '.join(others)}; what is rehearsed are CUDA devices"
        fix = "name CUDA devices of the same sizes with --gpus"
        raise MachineError([Problem(code=Code.BAD_MACHINE, what=what, fix=fix, origin="--machine")])
    if not machine.accelerators:
        what, fix = f"{machine.name} has no accelerator to rehearse on", "name a machine that has: --gpus 24GiB"
        raise MachineError([Problem(code=Code.BAD_MACHINE, what=what, fix=fix, origin="--gpus")])
    return machine


def _rehearse_hidden(machine: Inventory) -> int:
    """Run this very command in a process that sees no real device, on the machine as it was found here."""
    import tempfile

    from dmconfig.machine import machine_text
    from dmconfig.virtual import run_hidden

    arguments = [*_without_machine(sys.argv[1:])]
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder, "machine.yaml")
        described.write_text(machine_text(machine), encoding="utf-8")
        return run_hidden(["-m", "dmconfig", *arguments, "--machine", str(described)]).returncode


def _without_machine(arguments: list[str]) -> Iterator[str]:
    """The arguments but for those that name the machine."""
    flags = ("--machine", "--gpus", "--ram", "--disk")
    skipped = False
    for argument in arguments:
        if skipped or argument.startswith(tuple(f"{flag}=" for flag in flags)):
            skipped = False
        elif argument in flags:
            skipped = True
        else:
            yield argument


def _check_page(out: Path | None) -> None:
    """Raise when a page cannot be written there."""
    from dmconfig.errors import SpecError
    from dmconfig.output import file_problems

    if out is not None and (problems := [*file_problems(out, ".html")]):
        raise SpecError(problems)


def _overrides(assignments: list[str] | None, flag: str = "--set") -> list[Override]:
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


def _call_overrides(prompt: str | None, seed: int | None, call: list[str] | None) -> Iterator[Override]:
    """The arguments of the call are values of the file's ``call`` section, set from outside like any other."""
    from dataclasses import replace

    from dmconfig.resolve import Override

    for name, value in (("prompt", prompt), ("seed", seed)):
        if value is not None:
            yield Override(path=("call", name), value=value, origin=f"--{name}", folder=Path.cwd())
    for override in _overrides(call, "--call"):
        yield replace(override, path=("call", *override.path))


def _check_runnable(checked: Checked, out: Path) -> None:
    """Check, before anything is loaded, that the call can be made and that what it returns can be written to out.

    Raises: SpecError: an argument is missing, or the call would return something that is no picture.
    """
    from dmconfig.check import uncallable
    from dmconfig.errors import Code, Problem, SpecError
    from dmconfig.output import MOVING

    spec, facts = checked.spec, checked.assembly.facts
    problems = [*uncallable(checked.resolved, spec, checked.assembly)]
    makes_film = any(parameter.name == "num_frames" for parameter in facts.call) and spec.call.get("num_frames") != 1
    if makes_film and out.suffix.lower() not in MOVING:
        what = f"{facts.class_name} makes a film, and {out.suffix} holds one picture"
        fix = f"name a file that ends in {' or '.join(sorted(MOVING))}"
        problems.append(Problem(code=Code.BAD_COMMAND_LINE, what=what, fix=fix, origin="--out"))
    if problems:
        raise SpecError(problems)


def _call(pipe: Any, progress: ConsoleProgress) -> Any:
    from dmconfig.errors import Code, Problem, RunError

    pipe.set_progress_bar_config(disable=not progress.console.is_terminal)
    try:
        return pipe()
    except Exception as error:
        what = f"the call of {type(pipe).__name__} failed: {type(error).__name__}: {error}"
        raise RunError([Problem(code=Code.CALL_FAILED, what=what)]) from error


def _quiet_libraries() -> None:
    """Keep the libraries' remarks at import off the screen; what matters of them is an error here."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")


@contextlib.contextmanager
def _exit_on_problems(format_: Format) -> Iterator[None]:
    from dmconfig.errors import DMConfigError

    try:
        yield
    except DMConfigError as error:
        if TRACEBACK in os.environ:
            raise
        _print_problems(error.problems, format_)
        raise typer.Exit(error.exit_code) from None


def _print_problems(problems: tuple[Problem, ...], format_: Format) -> None:
    from dmconfig.errors import render_problem

    if format_ is Format.JSON:
        from dmconfig.render import problems_data

        _print_json(problems_data(problems))
        return
    for problem in problems:
        typer.echo(render_problem(problem), err=True)


def _verdict(file: Path, problems: tuple[Problem, ...], format_: Format) -> dict[str, Any]:
    if format_ is Format.TEXT:
        if problems:
            _print_problems(problems, format_)
        else:
            typer.echo(f"{file}: valid")
        return {}
    from dmconfig.render import problems_data

    return {"file": str(file), **(problems_data(problems) if problems else {"ok": True, "problems": []})}


def _print_plan(planned: Plan, format_: Format) -> None:
    from dmconfig import render

    if format_ is Format.JSON:
        _print_json(render.plan_data(planned))
    else:
        typer.echo(render.plan_text(planned, _width()))


def _width() -> int | None:
    """The columns of the terminal; None where there is none, so that no line is broken for a tool that reads it."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _report_run(files: list[Path], planned: Plan, progress: ConsoleProgress, format_: Format) -> None:
    if format_ is Format.JSON:
        from dmconfig.render import plan_data

        timings = {name: round(value, 3) for name, value in progress.seconds.items()}
        _print_json({**plan_data(planned), "files": [str(file) for file in files], "timings": timings})
        return
    typer.echo(f"took {progress.timings()}")
    for file in files:
        typer.echo(f"wrote {file}")


def _print_json(data: Any) -> None:
    import json

    typer.echo(json.dumps(data, indent=2))
