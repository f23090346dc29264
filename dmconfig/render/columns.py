"""Tables as lines of text: columns as wide as their widest cell, the last one wrapped to what is left of a width."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

GAP = "  "
LEAST_LAST = 32
"""A last column narrower than this is no longer read as one; it goes below its row instead."""
_BELOW = " " * 4
_FIGURE = re.compile(r"(\d) (?=([KMGT]i)?B\b|m?s\b|min\b)")


class Column(NamedTuple):
    """A column's heading, and whether its cells end under one another, as sizes do."""

    heading: str
    right: bool = False


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Return a table with its headings. Columns in which every cell is empty are left out; no width breaks no line."""
    kept = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    if not kept:
        return []
    headings = [columns[index].heading for index in kept]
    cells = [[row[index] for index in kept] for row in rows]
    right = [columns[index].right for index in kept]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    left = sum(widths[:-1]) + len(GAP) * (len(kept) - 1)
    beside = width is None or width - left >= min(LEAST_LAST, widths[-1])
    lines = [_line(headings if beside else headings[:-1], widths, right)]
    for row in cells:
        if not beside:
            lines += [_line(row[:-1], widths, right), *wrapped(row[-1], width, _BELOW)]
            continue
        first, *more = wrapped(row[-1], None if width is None else width - left) or [""]
        lines += [_line([*row[:-1], first], widths, right), *(" " * left + line for line in more)]
    return lines


def wrapped(text: str, width: int | None, indent: str = "") -> list[str]:
    """Return text in lines of at most a width, broken between words but for a number and its unit.

    No width breaks no line.
    """
    if width is None:
        return [indent + text] if text else []
    lines = textwrap.wrap(
        _FIGURE.sub("\\1\N{NO-BREAK SPACE}", text),
        max(width, len(indent) + 1),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = (
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(cells, widths, right, strict=False)
    )
    return GAP.join(padded).rstrip()
