"""Moving every tensor in a value to a device, and nothing else.

accelerate's ``send_to_device`` rebuilds each list it meets, which breaks models that write into a list they were
given (Wan's VAE keeps its cache so and returned a quarter of the frames). Here a container in which nothing moves
is handed on as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

_MAX_DEPTH = 8


def to_device(value: Any, device: torch.device, *, skip: frozenset[str] = frozenset(), depth: int = 0) -> Any:
    """Return value with its tensors on device; parts without tensors elsewhere are the same objects as before.

    Looks into tuples, lists, mappings (also the libraries' output classes) and plain objects that hold tensors, such
    as a latent distribution. Mapping keys in ``skip`` are left alone.
    """
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    if depth > _MAX_DEPTH or value is None or isinstance(value, (str, bytes, int, float, torch.nn.Module)):
        return value
    if isinstance(value, Mapping):
        return _mapping(value, device, skip, depth)
    if isinstance(value, (list, tuple)):
        return _sequence(value, device, depth)
    return _holder(value, device, depth)


def _mapping(value: Mapping[Any, Any], device: torch.device, skip: frozenset[str], depth: int) -> Any:
    moved = {key: item if key in skip else to_device(item, device, depth=depth + 1) for key, item in value.items()}
    if all(moved[key] is value[key] for key in moved):
        return value
    result: Any = copy.copy(value)
    for key, item in moved.items():
        if item is not value[key]:
            result[key] = item
    return result


def _sequence(value: list[Any] | tuple[Any, ...], device: torch.device, depth: int) -> Any:
    moved = [to_device(item, device, depth=depth + 1) for item in value]
    if all(new is old for new, old in zip(moved, value, strict=True)):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*moved)
    return type(value)(moved)


def _holder(value: Any, device: torch.device, depth: int) -> Any:
    """An object whose attributes are tensors: a distribution or an output class that is no mapping."""
    attributes = getattr(value, "__dict__", None)
    if not attributes or not any(isinstance(item, torch.Tensor) for item in attributes.values()):
        return value
    moved = {name: to_device(item, device, depth=depth + 1) for name, item in attributes.items()}
    if all(moved[name] is attributes[name] for name in moved):
        return value
    result = copy.copy(value)
    result.__dict__.update(moved)
    return result
