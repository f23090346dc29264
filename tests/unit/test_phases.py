"""All problems at once: what later rules say of the rest of a file that is wrong elsewhere, and nothing false."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dmconfig.check import check
from dmconfig.document import parse_document
from dmconfig.errors import DMConfigError, Problem, ResolveError, SpecError
from dmconfig.paths import ConfigPath
from dmconfig.phases import told_with_rest, told_with_values
from dmconfig.resolve import resolve
from dmconfig.spec import validate_spec
from dmconfig.writing import Verbatim, as_yaml

ROOT = Path(__file__).resolve().parents[2]
CASES = [
    case
    for case in sorted((ROOT / "tests" / "cases" / "valid").glob("*.yaml"))
    if not re.search(
        r"^(# (overlay|profile|env|set):|extends:|profiles:)|\$", case.read_text(encoding="utf-8"), re.MULTILINE
    )
]
"""The right specs that are one file alone."""
BREAKS_PER_FILE = 60
RULES = functools.partial(check, with_weights=True)


def entries(data: Any, path: ConfigPath = ()) -> Iterator[ConfigPath]:
    """Yield the path of every entry of a document below mappings."""
    for key, value in data.items() if isinstance(data, dict) else ():
        yield (*path, key)
        yield from entries(value, (*path, key))


def broken(data: Any, path: ConfigPath, value: Any) -> Any:
    """Return data with another value at a path."""
    if not path:
        return value
    return {**data, path[0]: broken(data[path[0]], path[1:], value)}


def renamed(data: Any, path: ConfigPath, name: str) -> Any:
    """Return data with another name for the key at a path."""
    if len(path) == 1:
        return {name if key == path[0] else key: value for key, value in data.items()}
    return {**data, path[0]: renamed(data[path[0]], path[1:], name)}


def problems_of(text: str, folder: Path) -> tuple[Problem, ...]:
    """Return all that is wrong with a file of this text in a folder."""
    try:
        resolved = resolve(parse_document(text, name="spec.yaml", folder=folder), environ={})
    except ResolveError as error:
        return told_with_values(error, RULES).problems
    try:
        spec = validate_spec(resolved)
    except SpecError as error:
        return told_with_rest(error, resolved, RULES).problems
    try:
        RULES(resolved, spec)
    except DMConfigError as error:
        return error.problems
    return ()


def related(one: ConfigPath, other: ConfigPath) -> bool:
    """Tell whether one path leads to the other."""
    size = min(len(one), len(other))
    return one[:size] == other[:size]


@pytest.mark.parametrize("kind", ["value", "key", "variable"])
def test_what_is_broken_in_one_place_is_told_there_and_nowhere_else(kind: str) -> None:
    """A right file with one thing wrong: whatever is left out of it for the other rules, none of them complains."""
    chance, told = random.Random(4), 0  # noqa: S311 - the same places on every run
    for case in CASES:
        document = parse_document(case.read_text(encoding="utf-8"), name=case.name, folder=case.parent, tagged=True)
        data = resolve(document, environ={}).data
        paths = [path for path in entries(data) if kind != "key" or path[0] not in ("call", "calls", "device_map")]
        for path in chance.sample(paths, min(BREAKS_PER_FILE, len(paths))):
            name = f"{path[-1]}{chance.choice('xz')}x"
            value: Any = [[[]]] if kind == "value" else Verbatim("${NOT_SET}", is_text=True)
            wrong = renamed(data, path, name) if kind == "key" else broken(data, path, value)
            problems = problems_of(as_yaml(wrong), case.parent)
            at = path[:-1] if kind == "key" else path
            strange = [problem for problem in problems if not related(problem.path, at)]
            assert not strange, (case.name, path, strange)
            told += bool(problems)
    assert told > 2 * len(CASES)
