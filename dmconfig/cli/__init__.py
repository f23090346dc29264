"""The command ``dmconfig``: a module per verb. The only package that prints, and the only one that exits.

Exit codes: 0 fine, 2 bad input, 3 no feasible plan, 4 build, dispatch or call failed; 1 is a fault of dmconfig itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dmconfig.cli.verbs import main

if TYPE_CHECKING:
    import typer

    app: typer.Typer

__all__ = ["app", "main"]


def __getattr__(name: str) -> Any:
    """The whole command is ``app``, made when it is first asked for."""
    if name == "app":
        from dmconfig.cli.verbs import whole_command_line

        return whole_command_line()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
