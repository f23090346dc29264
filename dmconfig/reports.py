"""Problems for those who read them: a block with the line of the file, a line for editors, annotations for CI.

The forms are renderings of the same data. JSON is beside the other JSON, in ``render``; SARIF in ``sarif``.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from dmconfig.errors import Problem, problem_head, problem_lines
from dmconfig.paths import Location, lines_of, render_path
from dmconfig.secrets import redact, without_values

WIDTH = 100
"""The most columns shown of a line of the file; of a longer one, those around the place."""

_GITHUB_ESCAPES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_GITHUB_PROPERTY_ESCAPES = {**_GITHUB_ESCAPES, ":": "%3A", ",": "%2C"}


def problem_blocks(problems: Iterable[Problem]) -> Iterator[str]:
    """Yield a block of text for each problem, with the line of the file and a mark under the place.

    A file that cannot be read again has no lines to show; each is read once.
    """
    lines: dict[str, list[str]] = {}
    for problem in problems:
        excerpt = _excerpt(problem, problem.location, lines) if problem.location else []
        yield "\n".join([problem_head(problem), *excerpt, *problem_lines(problem)])


def problem_line(problem: Problem, file: str) -> str:
    """Return a problem as one line, ``file:line:column: error DM202: ...``, which editors know how to jump from.

    ``file`` is the file that was looked at, for a problem that is nowhere in it; its place is the file's start.
    """
    place = problem.location or Location(file, 1, 1)
    return f"{place}: error {problem.code}: {_sentence(problem)}".replace("\n", " ")


def github_annotation(problem: Problem, file: str) -> str:
    """Return a problem as the line that makes GitHub show it beside the line of the file; see ``problem_line``."""
    place = problem.location or Location(file, 1, 1)
    properties = {
        "file": Path(place.file).as_posix(),
        "line": str(place.line),
        "col": str(place.column),
        "title": f"{problem.code} {problem.code.slug}",
    }
    escaped = ",".join(f"{name}={_escaped(text, _GITHUB_PROPERTY_ESCAPES)}" for name, text in properties.items())
    return f"::error {escaped}::{_escaped(_sentence(problem), _GITHUB_ESCAPES)}"


def _sentence(problem: Problem) -> str:
    """What is wrong, where and how to mend it, in one line."""
    subject = render_path(problem.path) if problem.path else problem.origin
    text = f"{subject}: {problem.what}" if subject else problem.what
    return f"{text}; {problem.fix}" if problem.fix else text


def _escaped(text: str, escapes: dict[str, str]) -> str:
    return "".join(escapes.get(character, character) for character in text)


def _excerpt(problem: Problem, location: Location, lines: dict[str, list[str]]) -> list[str]:
    """The line at a place, and a mark under what stands there."""
    if location.file not in lines:
        lines[location.file] = _lines_of(location.file)
    known = lines[location.file]
    if not location.length or location.line > len(known):
        return []
    line = known[location.line - 1].rstrip()
    line = _printable(redact(line if problem.path[:2] == ("adapters", "textual_inversion") else without_values(line)))
    start = location.column - 1
    marked = line[start : start + location.length]
    text, column = _around(line, start)
    number = f"{location.line:>5}"
    mark = " " * _columns(text[:column]) + "^" * max(1, min(_columns(marked), _columns(text[column:])))
    return [f"{number} | {text}".rstrip(), f"{'':>5} | {mark}"]


def _lines_of(file: str) -> list[str]:
    """The lines of a file as YAML counts them; none when it cannot be read."""
    try:
        return lines_of(Path(file).read_bytes().decode("utf-8-sig", errors="replace"))
    except OSError:
        return []


def _printable(text: str) -> str:
    """The text as it can be shown: what moves the cursor or turns the direction of writing does not."""
    shown = text.replace("\t", "\N{RIGHTWARDS ARROW}")
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in shown)


def _around(text: str, column: int) -> tuple[str, int]:
    """The part of a long line around a column, and the column in it."""
    if len(text) <= WIDTH:
        return text, column
    start = max(0, min(column - WIDTH // 2, len(text) - WIDTH))
    head, tail = "..." if start else "", "..." if start + WIDTH < len(text) else ""
    return f"{head}{text[start : start + WIDTH]}{tail}", column - start + len(head)


def _columns(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )
