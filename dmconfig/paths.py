"""Where a value stands: its path in the configuration tree, and its line and column in a file.

Small values that every phase shares, so that any problem can be shown at the place its author wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ConfigPath = tuple[str | int, ...]
"""Keys and list indices from the root of the document, e.g. ``("device_map", "unet")``; ``()`` is the root."""

ROOT: ConfigPath = ()


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a text file. Lines and columns count from 1, as editors do."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: a place in a file or, for one from outside all files, the words that set it.

    ``folder`` is where a relative path in the value starts.
    """

    folder: Path
    location: Location | None = None
    words: str = ""

    def __str__(self) -> str:
        return str(self.location) if self.location else self.words


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
            text += f".{element}" if text else element
    return text
