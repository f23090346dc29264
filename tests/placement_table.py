"""A pytest plugin: the table in ``docs/placements.md``, written from what came out of the matrix of placements.

``make placements`` loads it (``-p tests.placement_table``). Each case of ``tests/integration/test_matrix.py`` records
one cell as properties of its report, which pytest-xdist brings here from whichever process ran it. When every case has
run and none failed, the table is written anew; what stands above it in the file stays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path

import pytest

PROPERTIES = ("placement", "call", "outcome")
"""Of the report of a case."""
FILE = Path(__file__).parents[1] / "docs" / "placements.md"

_CORNER = "placement"
_cells: dict[tuple[str, str], str] = {}


def render(cells: Mapping[tuple[str, str], str], rows: Collection[str], columns: Collection[str]) -> str:
    """Return the table, with a dash where there is no cell."""
    lines = [[_CORNER, *columns], ["---"] * (len(columns) + 1)]
    lines += [[row, *(cells.get((row, column), "-") for column in columns)] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def read(text: str) -> dict[tuple[str, str], str]:
    """Return the cells of the table in text, by row and column, in its order; dashes too."""
    lines = [line.strip("| ").split(" | ") for line in text[_start(text) :].splitlines()]
    columns = lines[0][1:]
    return {(row, column): cell for row, *cells in lines[2:] for column, cell in zip(columns, cells, strict=True)}


def _start(text: str) -> int:
    """Return where in text the table begins; it ends with the text."""
    return text.index(f"| {_CORNER} |")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the cell of a case that has passed."""
    values = dict(report.user_properties)
    if report.when == "call" and report.passed and values.keys() >= {*PROPERTIES}:
        placement, call, outcome = (str(values[name]) for name in PROPERTIES)
        _cells[placement, call] = outcome


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Write the table, or say why it is left as it is."""
    matrix = import_module("tests.integration.test_matrix")  # which imports this module
    missing = len(set(matrix.CELLS) - _cells.keys())
    if exitstatus or missing:
        why = "tests failed" if exitstatus else f"{missing} cases of the matrix did not run"
        terminalreporter.write_line(f"{FILE.name} is left as it was: {why}")
        return
    text = FILE.read_text(encoding="utf-8")
    FILE.write_text(text[: _start(text)] + render(_cells, matrix.PLACEMENTS, matrix.COLUMNS), encoding="utf-8")
    terminalreporter.write_line(f"wrote {FILE}")
