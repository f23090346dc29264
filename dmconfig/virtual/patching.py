"""Replacing attributes for a while, and putting back exactly what was there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

_ABSENT = object()


@contextmanager
def replaced(owner: object, replacements: Mapping[str, object]) -> Iterator[None]:
    """Set attributes of a module or class; at the end each is as it was, absent ones are absent again."""
    with ExitStack() as undo:
        for name, value in replacements.items():
            undo.callback(_restore, owner, name, vars(owner).get(name, _ABSENT))
            setattr(owner, name, value)
        yield


def _restore(owner: object, name: str, original: object) -> None:
    if original is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, original)
