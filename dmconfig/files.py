"""Files: where those are that come with the package, reading one once, and writing one whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

DATA = Path(__file__).parent / "data"
"""What comes with the package: facts of cards, machines and published pipelines."""


def read_once(read: Callable[[Path], T]) -> Callable[[Path], T]:
    """Return read with its latest answers kept: a file is read again when its size or its time has changed.

    What it raises is not kept. What it returns is shared, so it must not be changed.
    """

    @functools.lru_cache(maxsize=64)
    def kept(file: Path, size: int, mtime_ns: int) -> T:  # noqa: ARG001 - what tells one state of a file from another
        return read(file)

    @functools.wraps(read)
    def once(file: Path) -> T:
        try:
            state = file.stat()
        except OSError:
            return read(file)  # which says what is wrong with it
        return kept(file, state.st_size, state.st_mtime_ns)

    return once


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
