"""``dmconfig plan``, and its views: every strategy, one component, a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmconfig.cli.options import (
    DiskOption,
    FileArgument,
    Format,
    FormatOption,
    GpusOption,
    HubOption,
    MachineOption,
    OverlayOption,
    ProfileOption,
    RamOption,
    SetOption,
    chosen_machine,
    exclusive,
    overrides_of,
    read_all,
)
from dmconfig.cli.printing import (
    exit_on_problems,
    print_json,
    print_plan,
    print_problems,
    quiet_libraries,
    show,
    terminal_width,
)

if TYPE_CHECKING:
    from dmconfig.checked import Checked
    from dmconfig.errors import Problem
    from dmconfig.inventory import Inventory
    from dmconfig.plan import Plan
    from dmconfig.resolve import Override


def plan(
    file: FileArgument,
    overlays: OverlayOption = None,
    profile: ProfileOption = None,
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
    hub: HubOption = False,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Reserve what a rehearsal takes beside weights: short for reserve=rehearsed."),
    ] = False,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Show where every component will live on this machine, or on one described by a file, a name or sizes."""
    from dmconfig.checked import check_file
    from dmconfig.output import check_writable

    with exit_on_problems(format_):
        views = {"--explain": explain is not None, "--all": all_, "--out": out is not None}
        *_, chosen, overrides = read_all(
            lambda: check_writable(out, ".svg"),
            lambda: exclusive(views, "are views of their own, and a command shows one"),
            lambda: chosen_machine(machine, gpus, ram, disk),
            lambda: [*overrides_of(set_), *_rehearsed_reserve(rehearse)],
        )
        checked = check_file(file, overrides, overlays=overlays or (), profile=profile, ask_hub=hub)
        if all_:
            _print_comparison(checked, chosen, format_, ask_hub=hub)
        elif explain is not None:
            _print_explanation(explain, checked, chosen, format_, ask_hub=hub)
        else:
            _print_planned(checked, chosen, format_, out, ask_hub=hub)


def _print_planned(checked: Checked, machine: Inventory, format_: Format, out: Path | None, *, ask_hub: bool) -> None:
    """Print the plan, and draw it where a picture is asked for."""
    from dmconfig.load import plan_for

    planned = plan_for(checked, machine, ask_hub=ask_hub)
    if out is not None:
        _draw(planned, checked, out)
    print_plan(planned, format_)
    if out is not None and format_ is Format.TEXT:
        typer.echo(f"wrote {out}")


def _rehearsed_reserve(wanted: bool) -> Iterator[Override]:
    """The override that ``--rehearse`` stands for."""
    from dmconfig.resolve import Override
    from dmconfig.spec import REHEARSED

    if wanted:
        quiet_libraries()
        yield Override(path=("reserve",), value=REHEARSED, origin="--rehearse", folder=Path.cwd())


def _print_explanation(component: str, checked: Checked, machine: Inventory, format_: Format, *, ask_hub: bool) -> None:
    from dmconfig import render
    from dmconfig.load import alternatives_for, plan_for

    alternatives = alternatives_for(checked, machine, component, ask_hub=ask_hub)
    planned = plan_for(checked, machine, ask_hub=ask_hub)
    if format_ is Format.JSON:
        print_json(render.explanation_data(component, planned, alternatives))
    else:
        show(render.explanation_text(component, planned, alternatives, terminal_width()))


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
        print_json(render.comparison_data(pipeline, machine, comparisons, problems))
    else:
        show(render.comparison_text(pipeline, machine.name, comparisons, terminal_width()))
        print_problems(problems, format_)
    if problems:
        raise typer.Exit(PlanError.exit_code)


def _draw(planned: Plan, checked: Checked, out: Path) -> None:
    from dmconfig.output import write_text
    from dmconfig.picture import plan_picture

    write_text(plan_picture(planned, checked.assembly.in_turn), out)
