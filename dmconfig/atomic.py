"""Files written whole or not at all: whatever happens meanwhile, what was there stays until all of the new is."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_NEW_FILE_MODE = 0o644


def write_whole(path: Path, content: bytes) -> None:
    """Write a file: beside its place first, then moved there. One that is replaced keeps its mode; a link is followed.

    Raises: OSError: it cannot be written; nothing is left behind.
    """
    target = path.resolve()
    mode = target.stat().st_mode & 0o7777 if target.exists() else _NEW_FILE_MODE
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=target.suffix)
    draft = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        draft.chmod(mode)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
