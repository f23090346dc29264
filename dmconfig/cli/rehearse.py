"""``dmconfig rehearse``."""

from __future__ import annotations

import sys
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
    MachineOption,
    OverlayOption,
    ProfileOption,
    RamOption,
    SetOption,
    call_overrides,
    chosen_machine,
    overrides_of,
    read_all,
)
from dmconfig.cli.printing import exit_on_problems, print_json, quiet_libraries, show, terminal_width

if TYPE_CHECKING:
    from dmconfig.inventory import Inventory


def rehearse(
    file: FileArgument,
    overlays: OverlayOption = None,
    profile: ProfileOption = None,
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

    with exit_on_problems(format_):
        _, chosen, overrides, arguments = read_all(
            lambda: _check_page(out),
            lambda: _rehearsable(chosen_machine(machine, gpus, ram, disk)),
            lambda: overrides_of(set_),
            lambda: [*call_overrides(None, None, call)],
        )
        from dmconfig.virtual.hidden import sees_cuda

        if sees_cuda():
            raise typer.Exit(_rehearse_hidden(chosen))
        checked = check_file(file, [*overrides, *arguments], overlays=overlays or (), profile=profile)
        planned = plan_for(checked, chosen)
        quiet_libraries()
        from dmconfig.rehearse import Script, Settings, rehearsal_data, rehearsal_page, rehearsal_text
        from dmconfig.rehearse import rehearse as run_through

        script = Script(resolved=checked.resolved, spec=checked.spec, assembly=checked.assembly)
        settings = Settings(height=height, width=width, frames=frames, steps=steps, batch=batch, full=full)
        rehearsal = run_through(script, planned, chosen, settings)
        if out is not None:
            from dmconfig.output import write_text
            from dmconfig.secrets import redact

            write_text(redact(rehearsal_page(rehearsal)), out)
        if format_ is Format.JSON:
            print_json(rehearsal_data(rehearsal))
        else:
            show(rehearsal_text(rehearsal, terminal_width()))
            if out is not None:
                typer.echo(f"wrote {out}")
    if not rehearsal.fits:
        raise typer.Exit(3)


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
