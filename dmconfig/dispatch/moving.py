"""Moving every tensor in a value to a device, and nothing else.

accelerate's ``send_to_device`` rebuilds each list it meets, which breaks models that write into a list they were
given (Wan's VAE keeps its cache so and returned a quarter of the frames). Here a container in which nothing moves
is handed on as it is.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Move = Callable[[torch.Tensor, torch.device], torch.Tensor]
_MAX_DEPTH = 8


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on device, itself where it is there."""
    return tensor if tensor.device == device else tensor.to(device)


def to_device(
    value: Any, device: torch.device, *, skip: frozenset[str] = frozenset(), move: Move = copy_to, depth: int = 0
) -> Any:
    """Return value with its tensors on device; parts without tensors elsewhere are the same objects as before.

    Looks into tuples, lists, mappings (also the libraries' output classes) and plain objects that hold tensors, such
    as a latent distribution. Mapping keys in ``skip`` are left alone. ``move`` moves one tensor.
    """
    if isinstance(value, torch.Tensor):
        return move(value, device)
    if depth > _MAX_DEPTH or value is None or isinstance(value, (str, bytes, int, float, torch.nn.Module)):
        return value
    if isinstance(value, Mapping):
        return _mapping(value, device, skip, move, depth)
    if isinstance(value, (list, tuple)):
        return _sequence(value, device, move, depth)
    return _holder(value, device, move, depth)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy, with how often it and what it was made of had been written to; ``end`` forgets it with its source."""

    tensor: torch.Tensor
    version: int
    source_version: int
    end: weakref.finalize[Any, Any]


class Copies:
    """A ``Move`` that copies a tensor once where it is taken to a device again and again, as a time embedding is.

    A copy is kept as long as what it was made of lives, and is made anew when either has been written to since.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.device], _Copy] = {}

    def __call__(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the tensor on device, a copy of before where there is one."""
        if tensor.device == device:
            return tensor
        key, source_version = (id(tensor), device), version_of(tensor)
        made = self._made.get(key)
        if made is not None and (made.version, made.source_version) == (version_of(made.tensor), source_version):
            return made.tensor
        copied = tensor.to(device)
        if source_version >= 0:  # else nobody would tell us that it has been written to
            if made is not None:
                made.end.detach()
            end = weakref.finalize(tensor, self._made.pop, key, None)
            end.atexit = False
            self._made[key] = _Copy(copied, version_of(copied), source_version, end)
        return copied

    def clear(self) -> None:
        """Let go of every copy."""
        for copied in self._made.values():
            copied.end.detach()
        self._made.clear()


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been written to; -1 for one made under inference_mode, which is not told."""
    return -1 if tensor.is_inference() else tensor._version


def _mapping(value: Mapping[Any, Any], device: torch.device, skip: frozenset[str], move: Move, depth: int) -> Any:
    moved = {
        key: item if key in skip else to_device(item, device, move=move, depth=depth + 1) for key, item in value.items()
    }
    if all(moved[key] is value[key] for key in moved):
        return value
    result: Any = copy.copy(value)
    for key, item in moved.items():
        if item is not value[key]:
            result[key] = item
    return result


def _sequence(value: list[Any] | tuple[Any, ...], device: torch.device, move: Move, depth: int) -> Any:
    moved = [to_device(item, device, move=move, depth=depth + 1) for item in value]
    if all(new is old for new, old in zip(moved, value, strict=True)):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*moved)
    return type(value)(moved)


def _holder(value: Any, device: torch.device, move: Move, depth: int) -> Any:
    """An object whose attributes are tensors: a distribution or an output class that is no mapping."""
    attributes = getattr(value, "__dict__", None)
    if not attributes or not any(isinstance(item, torch.Tensor) for item in attributes.values()):
        return value
    moved = {name: to_device(item, device, move=move, depth=depth + 1) for name, item in attributes.items()}
    if all(moved[name] is attributes[name] for name in moved):
        return value
    result = copy.copy(value)
    result.__dict__.update(moved)
    return result
