"""Overrides on top of a document: collect, check for conflicts, apply, and remember who set what.

Collecting before applying makes the result independent of the order of overrides. This module knows trees and
paths, not what the keys mean; an override of a key that does not exist is found by ``spec``, at its origin.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from dmconfig.document import Document, parse_document
from dmconfig.errors import Code, DocumentError, Problem, ResolveError
from dmconfig.paths import ROOT, ConfigPath, Location, render_path

DOTTED_KEYS = {"device_map": ("execution", "offload", "storage")}
"""Mappings whose keys may hold dots (module paths), and the keys of their entries.

What follows their name in an override is one key, but for a key of an entry at its end.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A value set from outside the file. ``origin`` is how its author wrote it; relative paths start in ``folder``."""

    path: ConfigPath
    value: Any
    origin: str
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The document with all overrides applied, and where each value came from."""

    data: Any
    document: Document
    overrides: tuple[Override, ...] = ()

    def override_of(self, path: ConfigPath) -> Override | None:
        """Return the override that set path or one of its parents, or None when the file (or nothing) did."""
        return next((o for o in self.overrides if _is_in(path, o.path)), None)

    def folder_of(self, path: ConfigPath) -> Path:
        """Return the folder in which a relative file name at path starts."""
        override = self.override_of(path)
        return override.folder if override else self.document.folder

    def place(self, path: ConfigPath, *, key: bool = False) -> tuple[Location | None, str]:
        """Return (location in the file, "") or, for a value from outside it, (None, the override's origin).

        A mapping that exists only because an override set something inside it is from outside too.
        """
        inside = (
            None if path in self.document.values else next((o for o in self.overrides if _is_in(o.path, path)), None)
        )
        override = self.override_of(path) or inside
        if override:
            return None, override.origin
        return self.document.locate(path, key=key), ""

    def problem(
        self, code: Code, path: ConfigPath, what: str, *, why: str = "", fix: str = "", key: bool = False
    ) -> Problem:
        """Return a problem placed where path was set; ``key`` points at the key rather than its value."""
        location, origin = self.place(path, key=key)
        return Problem(code=code, path=path, what=what, why=why, fix=fix, location=location, origin=origin)

    def located(self, problems: Iterable[Problem], path: ConfigPath | None = None) -> list[Problem]:
        """Return problems found without the file, each at the place of path, or, for None, of its own path."""
        return [self._located(problem, problem.path if path is None else path) for problem in problems]

    def _located(self, problem: Problem, path: ConfigPath) -> Problem:
        location, origin = self.place(path)
        return replace(problem, path=path, location=location, origin=origin)


def resolve(document: Document, overrides: Iterable[Override] = ()) -> Resolved:
    """Return document with overrides applied; the document is not changed.

    Raises: ResolveError: two overrides set the same value, or one sets a value inside another's; an override goes
        below something that is not a mapping. All of them at once.
    """
    claims = tuple(overrides)
    problems = [*_conflicts(claims)]
    data = document.data
    for claim in claims:
        try:
            data = _with_value(data, claim, claim.path)
        except ResolveError as error:
            problems.extend(error.problems)
    if problems:
        raise ResolveError(problems)
    return Resolved(data=data, document=document, overrides=claims)


def override_from_text(assignment: str, flag: str = "--set") -> Override:
    """Return the override in ``key.path=value``; the value is YAML, and relative paths start in the current folder.

    Raises: ResolveError: no ``=``, an empty part of the key, or a value that is not YAML.
    """
    key, separator, text = assignment.partition("=")
    origin = f"{flag} {assignment}"
    if not separator or not all(part.strip() for part in key.split(".")):
        fix = f"write {flag} device_map.unet=cuda:0"
        raise ResolveError([_bad(f"{assignment!r} is not of the form key.path=value", origin, fix)])
    try:
        value = parse_document(text, name=origin, folder=Path.cwd()).data
    except DocumentError as error:
        raise ResolveError([_bad(problem.what, origin, problem.fix) for problem in error.problems]) from None
    return Override(path=_split(key.strip()), value=value, origin=origin, folder=Path.cwd())


def overrides_from_mapping(overrides: Mapping[str, Any]) -> tuple[Override, ...]:
    """Return the overrides of a Python mapping from dotted key to value.

    Values may be Python objects: numbers, text, None, paths, enums, ``torch.dtype``, ``torch.device``, and lists or
    mappings of those. Relative paths start in the current folder.

    Raises: ResolveError: for a value of any other type, naming it.
    """
    problems: list[Problem] = []
    result: list[Override] = []
    for key, value in overrides.items():
        origin = f"overrides[{key!r}]"
        try:
            plain = _plain(value)
        except TypeError as error:
            problems.append(_bad(str(error), origin, "give text, a number, a path, a torch.dtype or a torch.device"))
            continue
        result.append(Override(path=_split(str(key)), value=plain, origin=origin, folder=Path.cwd()))
    if problems:
        raise ResolveError(problems)
    return tuple(result)


def _is_in(path: ConfigPath, parent: ConfigPath) -> bool:
    """Tell whether path is parent or lies below it."""
    return path[: len(parent)] == parent


def _split(key: str) -> ConfigPath:
    first, _, rest = key.partition(".")
    if first in DOTTED_KEYS and rest:
        entry, _, last = rest.rpartition(".")
        return (first, entry, last) if entry and last in DOTTED_KEYS[first] else (first, rest)
    return tuple(key.split("."))


def _plain(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, os.PathLike):
        return _path_text(os.fspath(value))
    if isinstance(value, Mapping):
        plain = {str(name): _plain(item) for name, item in value.items()}
        if len(plain) < len(value):
            raise TypeError(f"two of the keys {', '.join(map(repr, value))} are the same in a spec")
        return plain
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return [_plain(item) for item in value]
    raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__} cannot be written in a spec")


def _path_text(path: str | bytes) -> str:
    """A path object is certainly a path; the ``./`` keeps a relative one from reading as a hub id."""
    text = os.fsdecode(path)
    return text if text.startswith((".", "/", "~")) else f"./{text}"


def _conflicts(claims: Sequence[Override]) -> Iterable[Problem]:
    for index, claim in enumerate(claims):
        for earlier in claims[:index]:
            shorter, longer = sorted((earlier.path, claim.path), key=len)
            if _is_in(longer, shorter):
                what = f"{claim.origin} and {earlier.origin} both set {render_path(shorter)}"
                yield Problem(
                    code=Code.OVERRIDE_CONFLICT, path=claim.path, what=what, fix="keep one", origin=claim.origin
                )


def _with_value(data: Any, claim: Override, rest: ConfigPath) -> Any:
    if not rest:
        return claim.value
    if data is None:
        data = {}
    if not isinstance(data, dict):
        above = claim.path[: len(claim.path) - len(rest)]
        what = f"{render_path(above)} is {data!r}, not a mapping, so {render_path(claim.path)} cannot be set in it"
        whole = str(claim.value)
        for key in reversed(rest):
            whole = f"{{{key}: {whole}}}"
        fix = f"set the whole of it: {render_path(above)}={whole.removesuffix('}')}, ...}}"
        raise ResolveError([_bad(what, claim.origin, fix, claim.path)])
    key = str(rest[0])
    return {**data, key: _with_value(data.get(key), claim, rest[1:])}


def _bad(what: str, origin: str, fix: str, path: ConfigPath = ROOT) -> Problem:
    return Problem(code=Code.BAD_OVERRIDE, path=path, what=what, fix=fix, origin=origin)
