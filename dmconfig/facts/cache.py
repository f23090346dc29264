"""What was read from source, kept between runs in the user's cache folder.

One file per class, in a folder per state of the installed packages. A file carries the full key and a
checksum, so that a stale, foreign or damaged file is not used. No trouble here is ever an error: without
the cache the same facts are read from source, only slower.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any
from zlib import crc32

from dmconfig.facts.installed import Library, state_key
from dmconfig.files import replacing

FORMAT = 10
"""Raised whenever what is stored, or how it is read from source, changes."""


def cache_folder() -> Path | None:
    """Return dmconfig's cache folder, which need not exist; None when the user has no home.

    ``DMCONFIG_CACHE`` names it; else it is ``dmconfig`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
    """
    if chosen := os.environ.get("DMCONFIG_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if Path(base).is_absolute():  # the XDG specification says to ignore a relative one
        return Path(base, "dmconfig")
    try:
        return Path.home() / ".cache" / "dmconfig"
    except RuntimeError:
        return None


def read_cached(libraries: tuple[Library, ...], entry: str) -> Any:
    """Return what ``write_cached`` stored as entry for this state of the libraries, or None."""
    key = _key(libraries)
    if (path := _path(key, entry)) is None:
        return None
    try:
        head, _, body = path.read_bytes().partition(b"\n")
        return json.loads(body) if head == _head(key, entry, body) else None
    except (OSError, ValueError):
        return None


def write_cached(libraries: tuple[Library, ...], entry: str, data: Any) -> None:
    """Store data, whole or not at all; does nothing where the folder cannot be written."""
    key = _key(libraries)
    if (path := _path(key, entry)) is None:
        return
    body = json.dumps(data, separators=(",", ":")).encode()
    with contextlib.suppress(OSError), replacing(path) as draft:
        draft.write_bytes(_head(key, entry, body) + b"\n" + body)


def _key(libraries: tuple[Library, ...]) -> bytes:
    return f"dmconfig facts {FORMAT}; {state_key(libraries)}".encode(errors="backslashreplace")


def _path(key: bytes, entry: str) -> Path | None:
    """Return the file of entry; the folder's name is short, the key inside the file is what counts."""
    folder = cache_folder()
    return None if folder is None else folder / "facts" / f"{crc32(key):08x}" / entry


def _head(key: bytes, entry: str, body: bytes) -> bytes:
    """Return the first line of a file. It repeats entry: some file systems take ``A`` and ``a`` for the same name."""
    return b"%08x %s; %s" % (crc32(body), entry.encode(), key.replace(b"\n", b" "))
