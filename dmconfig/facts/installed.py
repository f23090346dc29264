"""Where diffusers and transformers are installed, found without importing them."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

LIBRARIES = ("diffusers", "transformers")
"""The packages whose classes have facts."""

_VERSION = re.compile(rb"""^__version__ = ["']([^"']+)["']""", re.MULTILINE)


class Library(NamedTuple):
    """An installed package: its folder, its version, and when its ``__init__.py`` was last written."""

    name: str
    folder: Path
    version: str
    mtime_ns: int


@cache
def installed_libraries() -> tuple[Library, ...]:
    """Return those of LIBRARIES that are installed; looked up once per process."""
    return tuple(library for name in LIBRARIES if (library := find_library(name)) is not None)


def find_library(name: str) -> Library | None:
    """Return the package called name, or None when it is not installed or not readable as source."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: a stand-in without __spec__ in sys.modules
        return None
    if spec is None or spec.origin is None:
        return None
    init = Path(spec.origin)
    try:
        text, mtime_ns = init.read_bytes(), init.stat().st_mtime_ns
    except OSError:
        return None
    return Library(name, init.parent, _version(name, text), mtime_ns)


def state_key(libraries: tuple[Library, ...]) -> str:
    """Return one line that differs whenever the installed source may differ."""
    return "; ".join(f"{each.name} {each.version} {each.mtime_ns} {each.folder}" for each in libraries)


def _version(name: str, init_text: bytes) -> str:
    """Return the version: from the package's own text, because importlib.metadata alone costs 20 ms to import."""
    if match := _VERSION.search(init_text):
        return match[1].decode()
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
