"""The command ``dmconfig``: a module per verb. The only package that prints, and the only one that exits.

Exit codes: 0 fine, 2 bad input, 3 no feasible plan, 4 build, dispatch or call failed; 1 is a fault of dmconfig itself.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import typer

    app: typer.Typer

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line, as the whole process that it is."""
    # Importing makes many objects and no garbage: looking for it would take a tenth of what most verbs take.
    gc.set_threshold(100_000)
    from dmconfig.cli.verbs import run_command_line

    try:
        run_command_line()
    except SystemExit as end:
        if "torch" not in sys.modules and isinstance(end.code, int):
            _end_process(end.code)
        raise


def _end_process(exit_code: int) -> NoReturn:
    """End without taking every module apart, as mypy does: that takes Python a fifth of what most verbs take.

    Libraries that hold something outside this process have handlers of their own, so this isn't for when one is loaded.
    """
    print(end="", flush=True)
    print(end="", flush=True, file=sys.stderr)
    os._exit(exit_code)


def __getattr__(name: str) -> Any:
    """The whole command is ``app``, made when it is first asked for."""
    if name == "app":
        from dmconfig.cli.verbs import whole_command_line

        return whole_command_line()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
