"""The command ``dmconfig``: a module per verb. The only package that prints, and the only one that exits.

Exit codes: 0 fine, 2 bad input, 3 no feasible plan, 4 build, dispatch or call failed; 1 is a fault of dmconfig itself.
"""

from dmconfig.cli.app import app, main

__all__ = ["app", "main"]
