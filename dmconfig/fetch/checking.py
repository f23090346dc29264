"""What was downloaded, held against what the hub says there is: size and hash. huggingface_hub looks at sizes alone."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from dmconfig.errors import Code, Problem
from dmconfig.fetch.failures import FailedError
from dmconfig.fetch.repository import File, Repository, Selection
from dmconfig.units import format_bytes

_PIECE_BYTES = 1 << 22


def check_download(selection: Selection, folder: Path) -> None:
    """Check the files that were missing before and are in folder, a snapshot, now.

    Raises: FailedError: DOWNLOAD_DIFFERS for the first that is not what the hub describes; it is removed.
    """
    for file in selection.missing:
        path = folder / file.name
        if path.is_file() and (difference := _difference(file, path)):
            _remove(path)
            raise FailedError(_differs(selection.repository, file, difference))


def _difference(file: File, path: Path) -> str:
    """How a file differs from its description, or nothing."""
    held = path.stat().st_size
    if file.nbytes and held != file.nbytes:
        return f"it has {held} bytes, the hub says {file.nbytes}"
    for name, wanted, hashed in (
        ("SHA-256", file.sha256, hashlib.sha256()),
        ("git hash", file.git_sha1, hashlib.sha1(b"blob %d\0" % held, usedforsecurity=False)),
    ):
        if wanted is not None and (found := _hash_of(path, hashed)) != wanted:
            return f"its {name} is {found}, the hub says {wanted}"
    return ""


def _hash_of(path: Path, hashed: Any) -> str:
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            hashed.update(piece)
    return str(hashed.hexdigest())


def _remove(path: Path) -> None:
    blob = path.resolve()
    path.unlink(missing_ok=True)
    blob.unlink(missing_ok=True)


def _differs(repository: Repository, file: File, difference: str) -> Problem:
    return Problem(
        code=Code.DOWNLOAD_DIFFERS,
        path=repository.path,
        what=f"{file.name} of {repository} is not what the hub describes: {difference}",
        why=f"it was damaged or changed on its way; its {format_bytes(file.nbytes)} were removed",
        fix="run it again; if it happens again, look at the proxy or mirror in between",
    )
