"""``dmconfig schema``."""

from __future__ import annotations

from typing import Annotated

import typer


def schema(
    plan_: Annotated[
        bool, typer.Option("--plan", help="Print the schema of what `plan --format json` prints.")
    ] = False,
) -> None:
    """Print the JSON Schema of the file format, for editors and other tools."""
    from dmconfig.schema import plan_schema_text, schema_text

    typer.echo(plan_schema_text() if plan_ else schema_text(), nl=False)
