"""Where a value stands: its path in the configuration tree, and its line and column in a file.

Small values that every phase shares, so that any problem can be shown at the place its author wrote.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ConfigPath = tuple[str | int, ...]
"""Keys and list indices from the root of the document, e.g. ``("device_map", "unet")``; ``()`` is the root."""

ROOT: ConfigPath = ()

_LINE_END = re.compile("\r\n|[\r\n\x85\u2028\u2029]")


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a text file. Lines and columns count from 1, as editors do.

    ``length`` is how many characters of the line what stands there takes, 0 where nothing does: a place that stands
    for the whole file. Places are the same whatever it is.
    """

    file: str
    line: int
    column: int
    length: int = field(default=0, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class Origin(NamedTuple):
    """Where a value came from: a place in a file or, for one from outside all files, the words that set it.

    ``folder`` is where a relative path in the value starts.
    """

    folder: Path
    location: Location | None = None
    words: str = ""

    def __str__(self) -> str:
        return str(self.location) if self.location else self.words


def lines_of(text: str) -> list[str]:
    """Return the lines of a text as YAML counts them, without their ends; never an empty list."""
    return _LINE_END.split(text)


def offset_of(text: str, location: Location) -> int:
    """Return where in a text the character at a location is."""
    starts = [0, *(end.end() for end in _LINE_END.finditer(text))]
    return starts[location.line - 1] + location.column - 1


def render_path(path: ConfigPath) -> str:
    """Return path as one writes it: ``components.vae.dtype``, ``items[2]``; the root is ``(whole file)``.

    Example:
        >>> render_path(("device_map", "unet"))
        'device_map.unet'
    """
    if not path:
        return "(whole file)"
    text = ""
    for element in path:
        if isinstance(element, int):
            text += f"[{element}]"
        else:
            shown = element if element.isprintable() else repr(element)[1:-1]
            text += f".{shown}" if text else shown
    return text
