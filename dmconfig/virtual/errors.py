"""What a real machine would have refused, raised with CUDA's own wording where CUDA has one.

These derive from torch's and Python's exceptions, not from ``DMConfigError``: code that runs on a virtual machine
must be able to catch them exactly as it catches the real ones. Unlike the real ones they say where they happened.
"""

from __future__ import annotations

import torch

from dmconfig.units import format_bytes


class Located:
    """The part of an error that says where: the operation, and the module whose code asked for it."""

    operation: str | None = None
    module: str | None = None

    def locate(self, *, operation: str, module: str | None) -> None:
        """Note where the error happened; the first to say, which is the innermost operation, is right."""
        if self.operation is None:
            self.operation, self.module = operation, module

    def __str__(self) -> str:
        message = super().__str__()
        if self.operation is None:
            return message
        return f"{message} (op {self.operation}{f' in {self.module}' if self.module else ''})"


class DeviceMismatchError(Located, RuntimeError):
    """Tensors of different devices met in one operator."""


class VirtualOutOfMemoryError(Located, torch.OutOfMemoryError):
    """A virtual accelerator was asked for more bytes than its stated capacity has left."""

    def __init__(self, *, device_index: int, wanted_bytes: int, capacity_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"CUDA out of memory. Tried to allocate {format_bytes(wanted_bytes)}. GPU {device_index} has a total "
            f"capacity of {format_bytes(capacity_bytes)} of which {format_bytes(free_bytes)} is free."
        )


class UnknownValueError(Located, RuntimeError):
    """Shape-only mode: the program asked what is inside a tensor that has only a shape."""


REFUSALS = (DeviceMismatchError, VirtualOutOfMemoryError, UnknownValueError)
"""Everything above, for one except clause: what is caught to be told where it happened, and raised again."""
