"""``dmconfig schema``."""

from __future__ import annotations

from typing import Annotated

import typer

from dmconfig.cli.options import Format, exclusive
from dmconfig.cli.printing import exit_on_problems


def schema(
    plan_: Annotated[
        bool, typer.Option("--plan", help="Print the schema of what `plan --format json` prints.")
    ] = False,
    rehearsal: Annotated[
        bool, typer.Option("--rehearsal", help="Print the schema of what `rehearse --format json` prints.")
    ] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Print the schema of what `sweep --format json` prints.")
    ] = False,
) -> None:
    """Print the JSON Schema of the file format, for editors and other tools."""
    with exit_on_problems(Format.TEXT):
        exclusive({"--plan": plan_, "--rehearsal": rehearsal, "--sweep": sweep}, "are schemas of their own")
    typer.echo(_text(plan=plan_, rehearsal=rehearsal, sweep=sweep), nl=False)


def _text(*, plan: bool, rehearsal: bool, sweep: bool) -> str:
    from dmconfig.schema import plan_schema_text, schema_text

    if rehearsal:
        from dmconfig.rehearse import rehearsal_schema

        return rehearsal_schema()
    if sweep:
        from dmconfig.rehearse.table import sweep_schema

        return sweep_schema()
    return plan_schema_text() if plan else schema_text()
