"""Variables of the environment in the text of a file: ``${NAME}``, ``${NAME:-default}``, ``${NAME:?message}``, ``$$``.

A default may hold variables itself; what a variable holds is taken as it is, and never looked through again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from dmconfig.errors import Code

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FORMS = "${NAME}, ${NAME:-default} or ${NAME:?message}"


class InterpolationError(ValueError):
    """Text that cannot be expanded: a ``code``, what is wrong, why, and how to mend it."""

    def __init__(self, code: Code, what: str, *, why: str = "", fix: str = "") -> None:
        self.code, self.what, self.why, self.fix = code, what, why, fix
        super().__init__(what)


class Expansion(NamedTuple):
    """Text with its variables replaced, and the names of those that gave it something."""

    text: str
    variables: tuple[str, ...]


def expand(text: str, environ: Mapping[str, str]) -> Expansion:
    """Return text with every variable replaced by its value; an empty variable counts as one that is not set.

    Raises: InterpolationError: a variable is not set and has no default, or ``$`` stands where it means nothing.

    Example:
        >>> expand("${HOST:-here}: $$5", {}).text
        'here: $5'
    """
    expander = _Expander(text, environ)
    expanded = expander.until("")
    return Expansion(text=expanded, variables=tuple(dict.fromkeys(expander.used)))


def escape(text: str) -> str:
    """Return text as it is written in a file, so that none of it is a variable."""
    return text.replace("$", "$$")


class _Expander:
    """Reads one text from left to right."""

    def __init__(self, text: str, environ: Mapping[str, str]) -> None:
        self.text, self.environ = text, environ
        self.used: list[str] = []
        self._at = 0

    def until(self, end: str, *, wanted: bool = True) -> str:
        """Return what stands before ``end``, expanded; text that is not wanted is read, and its variables may be unset.

        An empty ``end`` is the end of the text.
        """
        parts: list[str] = []
        while (special := self._next_special(end)) < len(self.text):
            parts.append(self.text[self._at : special])
            self._at = special
            if end and self.text.startswith(end, special):
                self._at += len(end)
                return "".join(parts)
            parts.append(self._dollar(wanted=wanted))
        if end:
            raise self._malformed("a ${ is never closed", f"write {_FORMS}")
        return "".join([*parts, self.text[self._at :]])

    def _next_special(self, end: str) -> int:
        places = (self.text.find(mark, self._at) for mark in ("$", end) if mark)
        return min((place for place in places if place >= 0), default=len(self.text))

    def _dollar(self, *, wanted: bool) -> str:
        if self.text.startswith("${", self._at):
            return self._variable(wanted=wanted)
        self._refuse_bare_name()
        self._at += 2 if self.text.startswith("$$", self._at) else 1
        return "$"

    def _variable(self, *, wanted: bool) -> str:
        start = self._at
        name = _NAME.match(self.text, start + 2)
        if name is None:
            raise self._malformed("${ is not followed by the name of a variable", f"write {_FORMS}, or $$ for a $")
        self._at = name.end()
        for operator, read in (("}", self._required), (":-", self._defaulted), (":?", self._demanded)):
            if self.text.startswith(operator, self._at):
                self._at += len(operator)
                return read(name.group(), wanted=wanted)
        more = self.text[self._at : self._at + 2]
        what = f"{self.text[start : self._at]} is followed by {more!r}" if more else "a ${ is never closed"
        raise self._malformed(what, f"write {_FORMS}")

    def _required(self, name: str, *, wanted: bool) -> str:
        return self._value(name, "") if wanted else ""

    def _defaulted(self, name: str, *, wanted: bool) -> str:
        is_set = bool(self.environ.get(name))
        default = self.until("}", wanted=wanted and not is_set)
        return self._value(name, "") if wanted and is_set else default

    def _demanded(self, name: str, *, wanted: bool) -> str:
        end = self.text.find("}", self._at)
        if end < 0:
            raise self._malformed("a ${ is never closed", f"write {_FORMS}")
        message = self.text[self._at : end]
        self._at = end + 1
        return self._value(name, message) if wanted else ""

    def _value(self, name: str, message: str) -> str:
        value = self.environ.get(name, "")
        if value:
            self.used.append(name)
            return value
        state = "empty" if name in self.environ else "not set"
        fix = f"set {name}, or write ${{{name}:-default}}"
        raise InterpolationError(Code.UNSET_VARIABLE, f"the variable {name} is {state}", why=message, fix=fix)

    def _refuse_bare_name(self) -> None:
        name = _NAME.match(self.text, self._at + 1)
        if name:
            what = f"${name.group()} is neither a variable nor text"
            raise self._malformed(what, f"write ${{{name.group()}}} for the variable, or $${name.group()} for the text")

    def _malformed(self, what: str, fix: str) -> InterpolationError:
        return InterpolationError(Code.BAD_INTERPOLATION, what, fix=fix)
