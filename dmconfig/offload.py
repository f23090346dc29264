"""The offload folder: weights that are cast when they are loaded and rest on disk have no file, so one is written.

Each pipeline has a sub-folder of its own, which is removed with it. Beside the sub-folder lies a lock file, locked as
long as the process lives: one that can be locked is what a killed process left behind, and the next pipeline that
uses the folder removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmconfig.devices import DISK
from dmconfig.errors import Code, DispatchError, Problem
from dmconfig.units import format_bytes

if TYPE_CHECKING:
    import torch
    from filelock import BaseFileLock

    from dmconfig.plan import Assignment

_PREFIX, _SUFFIX = "dmconfig-", ".lock"
_LOCK_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{8}}\{_SUFFIX}")
"""Only what can be ours is ever removed: a ``dmconfig-notes.lock`` is somebody else's."""
_FILE = "weights.safetensors"
_SPARE_BYTES = 1 << 20
"""For headers and the folders themselves."""
_TRIES = 100
"""At most so many sub-folders can be taken for left-overs while they are made; a folder that has no locks has none."""


class OffloadFolder:
    """A sub-folder of the offload folder, for the weights of one pipeline.

    Removed by ``close``, and at the latest when the process ends. Weights that are still mapped then stay readable on
    systems that let files be removed while they are open; where they are needed on, ``bring_back`` first.
    """

    def __init__(self, folder: Path, *, needed_bytes: int) -> None:
        """Make the sub-folder, and the folder if there is none; left-overs of killed processes are removed first.

        Raises: DispatchError: BAD_OFFLOAD_FOLDER when it cannot be made or written to, or has no room for
            ``needed_bytes``. No sub-folder is left behind then.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder)
            self.folder, self._lock = _claim(folder)
        except OSError as error:
            what = f"{folder} cannot be written to: {error.strerror or error}"
            raise _bad(what, "name a folder that this user can write to") from error
        self._close = weakref.finalize(self, _remove_own, self.folder, self._lock, os.getpid())
        self._taken: set[str] = set()
        free = shutil.disk_usage(folder).free
        if free < needed_bytes + _SPARE_BYTES:
            self.close()
            what = f"{format_bytes(needed_bytes)} are to rest in {folder}, where {format_bytes(free)} are free"
            raise _bad(what, "name a folder on a larger disk, or load in the dtype that is stored, which needs no copy")

    def take(self, component: str, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Write parameters to a file of the component and map them from there: they take no memory from then on.

        Raises: DispatchError: BAD_OFFLOAD_FOLDER when writing fails; the parameters are as they were.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file, save_file

        named = dict(parameters)
        file = self.folder / component / _FILE
        part = file.with_suffix(".part")
        try:
            file.parent.mkdir()
            save_file({name: parameter.data.contiguous() for name, parameter in named.items()}, part)
            part.replace(file)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(file.parent, ignore_errors=True)
            raise _bad(f"{component} cannot be written to {self.folder}: {error}", "see that it has room") from error
        for name, tensor in load_file(file).items():
            named[name].data = tensor
        self._taken.add(component)

    def has(self, component: str) -> bool:
        """Tell whether weights of a component are here."""
        return component in self._taken

    def beside(self, needed_bytes: int) -> OffloadFolder:
        """Return another sub-folder of the same folder. Raises: DispatchError: as for a new one."""
        return OffloadFolder(self.folder.parent, needed_bytes=needed_bytes)

    def bring_back(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Copy parameters into memory; those that share a weight share its copy."""
        copies: dict[tuple[Any, ...], torch.Tensor] = {}
        for parameter in parameters:
            key = (parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride())
            if key not in copies:
                copies[key] = parameter.data.clone()
            parameter.data = copies[key]

    def close(self) -> None:
        """Remove the sub-folder and all that is in it. May be called twice."""
        self._close()


def resting_on_disk(module: torch.nn.Module, assignment: Assignment) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of a component that rest on disk, each once: all of them, or those of the parts that do."""
    for name, parameter in module.named_parameters():
        if assignment.place_of(name).storage_device == DISK:
            yield name, parameter


def remove_leftovers(folder: Path) -> tuple[Path, ...]:
    """Remove what killed processes left in an offload folder, and return it. What a living process uses stays."""
    removed = []
    for file in sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}")):
        if _LOCK_NAME.fullmatch(file.name):
            lock = _lock(file)
            with contextlib.suppress(OSError):  # another process has it, or has removed it at this moment
                lock.acquire(timeout=0)
                if _remove(file.with_suffix(""), lock):
                    removed.append(file.with_suffix(""))
    return tuple(removed)


def _claim(folder: Path) -> tuple[Path, BaseFileLock]:
    """Make a sub-folder under a lock of our own; a lock file that somebody took for a left-over is tried anew.

    Raises: OSError: no file can be made there, or none can be locked.
    """
    from filelock import Timeout

    for _ in range(_TRIES):
        path = folder / (_PREFIX + secrets.token_hex(4))
        lock = _lock(path.with_suffix(_SUFFIX))
        try:
            lock.acquire(timeout=0)
            if path.with_suffix(_SUFFIX).exists():
                path.mkdir()
                return path, lock
        except Timeout:
            continue
        except OSError:
            _remove(path, lock)
            raise
        lock.release()
    raise OSError("no file in it can be locked")


def _lock(file: Path) -> BaseFileLock:
    """A lock of the process: the thread that unloads a pipeline need not be the one that loaded it."""
    from filelock import FileLock

    return FileLock(file, thread_local=False)


def _remove_own(folder: Path, lock: BaseFileLock, owner: int) -> None:
    """Remove a sub-folder, but not from a forked child: the folder is still its parent's."""
    if os.getpid() == owner:
        _remove(folder, lock)


def _remove(folder: Path, lock: BaseFileLock) -> bool:
    """Remove a sub-folder and its lock file, and tell whether it is gone; else its lock file stays to tell of it."""
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()  # first: some systems do not remove a file that is open
    is_gone = not folder.exists()
    if is_gone:
        with contextlib.suppress(OSError):
            Path(lock.lock_file).unlink()
    return is_gone


def _bad(what: str, fix: str) -> DispatchError:
    return DispatchError([Problem(code=Code.BAD_OFFLOAD_FOLDER, what=what, path=("offload_folder",), fix=fix)])
