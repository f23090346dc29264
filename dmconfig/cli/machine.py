"""``dmconfig machine``."""

from __future__ import annotations

from typing import Annotated

import typer

from dmconfig.cli.options import Format, FormatOption
from dmconfig.cli.printing import print_json


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
        print_json(machine_data(here))
    else:
        typer.echo(machine_text(here), nl=False)
