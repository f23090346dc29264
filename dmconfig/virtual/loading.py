"""torch.load and storages: what cannot be done with a virtual device, refused in words instead of failing in C++."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dmconfig.virtual.state import MachineState

_NO_LOADING = (
    "torch.load cannot put tensors straight on a virtual device: load them with map_location='cpu', then move them"
)
_STORAGE_REFUSED = "Storage device not recognized"  # how a build without CUDA says it


def refusing_load() -> Callable[..., Any]:
    """Return a ``torch.load`` that says so when tensors would have to land on an accelerator."""
    load = torch.load

    def load_on_host(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _names_accelerator(map_location):
            raise NotImplementedError(_NO_LOADING)
        try:
            return load(f, map_location, *args, **kwargs)
        except RuntimeError as error:  # a function for map_location, or what was saved on an accelerator
            if _STORAGE_REFUSED in str(error) or isinstance(error, torch.AcceleratorError):
                raise NotImplementedError(_NO_LOADING) from error
            raise

    return load_on_host


def refusing_resize(state: MachineState) -> Callable[..., Any]:
    """Return an ``UntypedStorage.resize_`` that leaves what is on a virtual device alone."""
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def resize_on_host(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if state.ledger.device_of(storage) not in (None, "cpu"):
            raise NotImplementedError("the storage of a tensor on a virtual device cannot be resized")
        return resize(storage, *args, **kwargs)

    return resize_on_host


def _names_accelerator(map_location: Any) -> bool:
    if isinstance(map_location, Mapping):
        return any(_names_accelerator(destination) for destination in map_location.values())
    if isinstance(map_location, (str, torch.device)):
        return torch.device(map_location).type == "cuda"
    return False
