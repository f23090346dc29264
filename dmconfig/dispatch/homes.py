"""Tensors that are away from home for a while: copies on a device, and the way back without a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dmconfig.dispatch.moving import version_of

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Slot:
    """A named place for a parameter or a buffer in one module."""

    tensors: dict[str, Any]  # of a module: its parameters, or its buffers
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        """What stands there now."""
        tensor: torch.Tensor = self.tensors[self.name]
        return tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Have tensor stand there."""
        self.tensors[self.name] = tensor


@dataclass(frozen=True, slots=True)
class Home:
    """What rests while a copy is on the device: the tensor, its data, and the copy's version when it was made."""

    slot: Slot
    tensor: torch.Tensor
    data: torch.Tensor
    version: int

    def take_back(self) -> None:
        """Put the resting data back, unless the copy has been written to, cast, or replaced since."""
        copy = self.slot.tensors.get(self.slot.name)
        if (
            copy is None
            or copy.dtype != self.data.dtype
            or copy.shape != self.data.shape
            or version_of(copy) != self.version
        ):
            return
        if copy is self.tensor or isinstance(copy, torch.nn.Parameter):
            copy.data = self.data  # a parameter keeps its identity on every move
        else:
            self.slot.put(self.tensor)  # a buffer is another tensor after a module's move


class Guests:
    """The tensors in some slots, on a device from ``bring`` until ``rest``; ``find`` is asked for the slots each time.

    They are the same tensors all the time, with other data. What was written to on the device is copied home.
    """

    def __init__(self, find: Callable[[], Sequence[Slot]], device: torch.device) -> None:
        self.find, self.device = find, device
        self._homes: list[Home] = []

    def bring(self) -> None:
        """Have them on the device."""
        for slot in self.find():
            tensor, data = slot.tensor, slot.tensor.data
            if data.device != self.device:
                tensor.data = data.to(self.device)
                self._homes.append(Home(slot, tensor, data, version_of(tensor)))

    def rest(self) -> None:
        """Put them back where they rested."""
        for home in self._homes:
            home.take_back()
        self._homes.clear()
        for slot in self.find():
            if slot.tensor.device != CPU:
                slot.tensor.data = slot.tensor.data.to(CPU)


def slots_of(modules: Iterable[torch.nn.Module]) -> list[Slot]:
    """Return the slots of the parameters and buffers that modules hold themselves."""
    return [
        Slot(tensors, name)
        for part in modules
        for tensors in (part._parameters, part._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]


def stored_buffers_of(modules: Iterable[torch.nn.Module]) -> list[Slot]:
    """Return the slots of the buffers that modules hold themselves and that are saved with the weights."""
    return [
        Slot(part._buffers, name)
        for part in modules
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]
