"""``dmconfig explain``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from dmconfig.cli.options import Format, FormatOption
from dmconfig.cli.printing import exit_on_problems, print_json


def _complete(incomplete: str) -> Iterator[str]:
    """Every key and code that begins so, for the shell."""
    from dmconfig.errors import Code
    from dmconfig.reference import key_docs

    words = [*(doc.path for doc in key_docs()), *map(str, Code)]
    return (word for word in words if word.startswith(incomplete))


def explain(
    word: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY|CODE",
            help="A key (max_memory, device_map.unet) or an error code (DM202); alone: all keys.",
            show_default=False,
            autocompletion=_complete,
        ),
    ] = None,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Explain a key of the file, or an error code: what it means, with an example."""
    from dmconfig.explain import explanation_data, explanation_text, overview_data, overview_text

    with exit_on_problems(format_):
        if format_ is Format.JSON:
            print_json(overview_data() if word is None else explanation_data(word))
        else:
            typer.echo(overview_text() if word is None else explanation_text(word), nl=False)
