"""``dmconfig rehearse``."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmconfig.cli.options import (
    CallOption,
    DiskOption,
    FileArgument,
    Format,
    FormatOption,
    FramesOption,
    GpusOption,
    HubOption,
    MachineOption,
    OverlayOption,
    PipelineOption,
    ProfileOption,
    RamOption,
    SetOption,
    StepsOption,
    call_overrides,
    chosen_machine,
    overrides_of,
    read_all,
)
from dmconfig.cli.printing import TRACEBACK, exit_on_problems, print_json, quiet_libraries, show, terminal_width

if TYPE_CHECKING:
    from dmconfig.rehearse import Rehearsal


def rehearse(
    file: FileArgument,
    overlays: OverlayOption = None,
    profile: ProfileOption = None,
    machine: MachineOption = None,
    gpus: GpusOption = None,
    ram: RamOption = None,
    disk: DiskOption = None,
    pipeline: PipelineOption = None,
    set_: SetOption = None,
    height: Annotated[int | None, typer.Option("--height", min=8, help="Height of the picture in pixels.")] = None,
    width: Annotated[int | None, typer.Option("--width", min=8, help="Width of the picture in pixels.")] = None,
    frames: FramesOption = None,
    steps: StepsOption = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Pictures at once.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Rehearse every step, not only the first ones.")] = False,
    call: CallOption = None,
    hub: HubOption = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Where it does not fit, rehearse what may help, and say what does.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PAGE", help="Also write the report as a page, an .html file.")
    ] = None,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Run the pipeline's own code on virtual accelerators, without weights: will it run, and what does it take?"""
    from dmconfig.assembly import PIPELINE
    from dmconfig.checked import check_file
    from dmconfig.output import check_writable
    from dmconfig.rehearse.reserve import rehearsable
    from dmconfig.rehearse.script import Settings
    from dmconfig.staging import rehearse_file

    quiet_libraries()
    with exit_on_problems(format_):
        _, chosen, overrides, arguments = read_all(
            lambda: check_writable(out, ".html"),
            lambda: rehearsable(chosen_machine(machine, gpus, ram, disk)),
            lambda: overrides_of(set_),
            lambda: [*call_overrides(None, None, call, pipeline)],
        )
        settings = Settings(
            height=height,
            width=width,
            frames=frames,
            steps=steps,
            batch=batch,
            full=full,
            pipeline=pipeline or PIPELINE,
        )
        check = functools.partial(
            check_file, file, overlays=overlays or (), profile=profile, ask_hub=hub, with_configs=hub
        )
        claims = [*overrides, *arguments]
        rehearsal = rehearse_file(check, claims, chosen, settings, tries_remedies=fix, ask_hub=hub)
        _write_page(rehearsal, out)
        _show(rehearsal, out, format_)
    if not rehearsal.fits:
        raise typer.Exit(3)


def _write_page(rehearsal: Rehearsal, out: Path | None) -> None:
    if out is not None:
        from dmconfig.output import write_text
        from dmconfig.rehearse import rehearsal_page
        from dmconfig.secrets import redact

        write_text(redact(rehearsal_page(rehearsal)), out)


def _show(rehearsal: Rehearsal, out: Path | None, format_: Format) -> None:
    from dmconfig.rehearse import rehearsal_data, rehearsal_text
    from dmconfig.secrets import redact

    if rehearsal.failure is not None and TRACEBACK in os.environ:
        typer.echo(redact(rehearsal.failure.trace), err=True)
    if format_ is Format.JSON:
        print_json(rehearsal_data(rehearsal))
        return
    show(rehearsal_text(rehearsal, terminal_width()))
    if out is not None:
        typer.echo(f"wrote {out}")
