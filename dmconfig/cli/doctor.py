"""``dmconfig doctor``."""

from __future__ import annotations

import typer

from dmconfig.cli.options import Format, FormatOption
from dmconfig.cli.printing import print_json


def doctor(format_: FormatOption = Format.TEXT) -> None:
    """Examine this machine: versions, devices, free space, and whether bytes survive copies between devices."""
    from dmconfig.doctor import examination_data, examination_text, examine

    examination = examine()
    if format_ is Format.JSON:
        print_json(examination_data(examination))
    else:
        typer.echo(examination_text(examination), nl=False)
    raise typer.Exit(examination.exit_code)
