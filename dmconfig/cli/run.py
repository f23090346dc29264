"""``dmconfig run``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmconfig.cli.options import (
    CallOption,
    FileArgument,
    Format,
    FormatOption,
    OverlayOption,
    PipelineOption,
    ProfileOption,
    SetOption,
    call_overrides,
    overrides_of,
)
from dmconfig.cli.printing import exit_on_problems, print_json, print_plan, quiet_libraries

if TYPE_CHECKING:
    from dmconfig.checked import Checked
    from dmconfig.console import ConsoleProgress
    from dmconfig.plan import Plan


def run(
    file: FileArgument,
    out: Annotated[Path, typer.Option("--out", metavar="IMAGE", help="Where to write it; its folder is made.")],
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="What to draw.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Same seed, same picture.")] = None,
    call: CallOption = None,
    overlays: OverlayOption = None,
    profile: ProfileOption = None,
    pipeline: PipelineOption = None,
    set_: SetOption = None,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Load the pipeline as planned, call it once, and write the picture."""
    quiet_libraries()
    from dmconfig.check import check_weights
    from dmconfig.checked import check_file
    from dmconfig.console import ConsoleProgress
    from dmconfig.inventory import probe_machine
    from dmconfig.load import fetched, load_plan, plan_for
    from dmconfig.output import check_output, save

    progress = ConsoleProgress()
    with exit_on_problems(format_):
        check_output(out)
        overrides = (*overrides_of(set_), *call_overrides(prompt, seed, call, pipeline))
        with progress.phase("plan"):
            given = check_file(file, overrides, overlays=overlays or (), profile=profile, ask_hub=True)
            checked = fetched(given, progress)
            name = checked.pipeline_named(pipeline)
            _check_runnable(checked, name, out)
            check_weights(checked.resolved, checked.assembly)
            planned = plan_for(checked, probe_machine(), to_load=True)
        if format_ is Format.TEXT:
            print_plan(planned, format_)
        pipe = load_plan(checked, planned, progress)[name]
        with progress.phase("generate"):
            result = _call(pipe, progress)
        with progress.phase("save"):
            files = save(result, out)
        _report_run(files, planned, progress, format_)


def _check_runnable(checked: Checked, name: str, out: Path) -> None:
    """Check, before anything is loaded, that the call can be made and that what it returns can be written to out.

    Raises: SpecError: an argument is missing, or the call would return something that is no picture.
    """
    from dmconfig.check import uncallable
    from dmconfig.errors import Code, Problem, SpecError
    from dmconfig.output import MOVING

    call, facts = checked.call_of(name), checked.assembly.facts_of(name)
    problems = [*uncallable(checked.resolved, call, facts)]
    is_still = "num_frames" in call and call["num_frames"].value == 1
    makes_film = any(parameter.name == "num_frames" for parameter in facts.call) and not is_still
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


def _report_run(files: list[Path], planned: Plan, progress: ConsoleProgress, format_: Format) -> None:
    if format_ is Format.JSON:
        from dmconfig.render import plan_data

        timings = {name: round(value, 3) for name, value in progress.seconds.items()}
        print_json({**plan_data(planned), "files": [str(file) for file in files], "timings": timings})
        return
    typer.echo(f"took {progress.timings()}")
    for file in files:
        typer.echo(f"wrote {file}")
