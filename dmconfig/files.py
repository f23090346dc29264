"""The files that come with the package, and writing files whole or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

DATA = Path(__file__).parent / "data"
"""What comes with the package: facts of cards, machines and published pipelines."""


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Give the path of a draft beside file, which takes its place at the end of the block; its folder is made.

    A block that raises leaves file as it was, and no draft. Two threads or processes do not share a draft.

    Raises: OSError: the folder cannot be made, or the draft cannot be put in the file's place.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.stem}-{os.getpid()}-{threading.get_ident()}{file.suffix}")
    try:
        yield draft
        draft.replace(file)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def write_whole(file: Path, content: bytes) -> None:
    """Write a file whole or not at all; one that is there keeps its mode, and a link to it stays one.

    Raises: OSError: it cannot be written; it is as it was then.
    """
    target = file.resolve()
    mode = target.stat().st_mode & 0o7777 if target.exists() else None
    with replacing(target) as draft:
        draft.write_bytes(content)
        if mode is not None:
            draft.chmod(mode)
