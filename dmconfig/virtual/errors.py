"""What a real machine would have refused, raised with CUDA's own wording where CUDA has one.

These derive from torch's and Python's exceptions, not from ``DMConfigError``: code that runs on a virtual machine
must be able to catch them exactly as it catches the real ones.
"""

from __future__ import annotations

import torch

from dmconfig.units import format_bytes


class DeviceMismatchError(RuntimeError):
    """Tensors of different devices met in one operator."""


class VirtualOutOfMemoryError(torch.OutOfMemoryError):
    """A virtual accelerator was asked for more bytes than its stated capacity has left."""

    def __init__(self, *, device_index: int, wanted_bytes: int, capacity_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"CUDA out of memory. Tried to allocate {format_bytes(wanted_bytes)}. GPU {device_index} has a total "
            f"capacity of {format_bytes(capacity_bytes)} of which {format_bytes(free_bytes)} is free."
        )


class UnknownValueError(RuntimeError):
    """Shape-only mode: the program asked what is inside a tensor that has only a shape."""
