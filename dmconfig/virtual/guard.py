"""A device guard for CUDA in builds that have none, for as long as a virtual machine is active."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# c10::impl::device_guard_impl_registry, an array of pointers, one for each c10::DeviceType (numbers fixed by torch).
_REGISTRY_SYMBOL = "_ZN3c104impl26device_guard_impl_registryE"
_REGISTRY_LENGTH = 20
_CUDA, _META = 1, 14
_LIBRARY_NAMES = {"darwin": "libc10.dylib", "win32": "c10.dll"}


@contextmanager
def noop_cuda_guard() -> Iterator[None]:
    """Let C++ code "switch" to cuda devices without doing anything; the registry is put back at the end.

    Every C++ guard on a tensor whose device says cuda:N looks in this registry. In a CPU-only build the entry is
    null: the call raises, or aborts the process when it comes from a noexcept constructor. The guard of ``meta``
    does nothing, which is what we need; but it reports its device as ``meta``, so C++ must never see a "cuda" without
    an index (it would ask the guard which device is current, and answer with a meta tensor).

    Raises: RuntimeError: when this build of torch has no such registry.
    """
    registry = _registry()
    previous = registry[_CUDA]
    registry[_CUDA] = registry[_META]
    try:
        yield
    finally:
        registry[_CUDA] = previous


def cuda_guard() -> int | None:
    """Return the address of the guard that is registered for cuda devices now; None in a build without CUDA."""
    address: int | None = _registry()[_CUDA]
    return address


def _registry() -> Any:
    library = Path(torch.__file__).parent / "lib" / _LIBRARY_NAMES.get(sys.platform, "libc10.so")
    try:
        registry = (ctypes.c_void_p * _REGISTRY_LENGTH).in_dll(ctypes.CDLL(str(library)), _REGISTRY_SYMBOL)
    except (OSError, ValueError) as error:
        raise RuntimeError(f"virtual devices cannot work with this build of torch ({torch.__version__})") from error
    if not registry[_META]:
        raise RuntimeError(f"torch {torch.__version__} registers no guard for meta devices to borrow")
    return registry
