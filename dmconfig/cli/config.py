"""``dmconfig config``."""

from __future__ import annotations

from typing import Annotated

import typer

from dmconfig.cli.options import (
    FileArgument,
    Format,
    FormatOption,
    OverlayOption,
    ProfileOption,
    SetOption,
    overrides_of,
)
from dmconfig.cli.printing import exit_on_problems, print_json, show


def config(
    file: FileArgument,
    overlays: OverlayOption = None,
    profile: ProfileOption = None,
    set_: SetOption = None,
    provenance: Annotated[
        bool, typer.Option("--provenance", help="Show where each value came from, and the defaults too.")
    ] = False,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Print a spec with all of its layers as one file: what it extends, its profile, overlays, variables, --set.

    Save it beside FILE: relative paths in it start there.
    """
    from dmconfig.checked import resolve_file
    from dmconfig.errors import SpecError
    from dmconfig.provenance import as_json, config_data, config_text, not_in_json, provenance_data, values_of
    from dmconfig.spec import validate_spec

    with exit_on_problems(format_):
        resolved = resolve_file(file, overrides_of(set_), overlays=overlays or (), profile=profile)
        spec = validate_spec(resolved)
        folder = file.absolute().parent
        told = spec if provenance else None
        if format_ is Format.TEXT:
            show(config_text(resolved, folder, told).removesuffix("\n"))
            return
        if problems := [*not_in_json(resolved)]:
            raise SpecError(problems)
        data = as_json(config_data(resolved, folder, told))
        values = [provenance_data(value) for value in values_of(resolved, folder, spec)] if provenance else []
        print_json({"config": data, "provenance": values} if provenance else data)
