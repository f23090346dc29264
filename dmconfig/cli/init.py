"""``dmconfig init``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dmconfig.cli.options import DiskOption, Format, GpusOption, MachineOption, RamOption, chosen_machine
from dmconfig.cli.printing import exit_on_problems


def init(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A pipeline: its folder, its model_index.json, or a hub id such as black-forest-labs/FLUX.1-dev.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The spec to write; its folder is made.")] = Path(
        "pipe.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    machine: MachineOption = None,
    gpus: GpusOption = None,
    ram: RamOption = None,
    disk: DiskOption = None,
    hub: Annotated[bool, typer.Option("--hub", help="Ask the hub for what is not known here of the pipeline.")] = False,
) -> None:
    """Write a first spec for a pipeline, with a device map planned for this machine or for the one described."""
    from dmconfig.starter import refuse_existing, starter

    with exit_on_problems(Format.TEXT):
        refuse_existing(out, force=force)
        here = chosen_machine(machine, gpus, ram, disk)
        begun = starter(source, out, here, ask_hub=hub)
        begun.write(force=force)
    typer.echo(f"wrote {out}")
