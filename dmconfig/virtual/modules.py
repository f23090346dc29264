"""Making a module that was built outside one of a machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from dmconfig.virtual.errors import VirtualOutOfMemoryError
from dmconfig.virtual.quantised import as_parameter
from dmconfig.virtual.state import MachineState
from dmconfig.virtual.tensor import VirtualTensor, as_shape, is_made_of_others, is_parameter, no_modes, wrapped
from dmconfig.virtual.whereabouts import qualified

_MODULE_INTERNALS = frozenset(vars(torch.nn.Module()))


def adopt_module(state: MachineState, module: torch.nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Replace every tensor of the module by one of this machine, recorded as weights on device."""
    adopted: dict[int, Any] = {}  # tied weights stay tied

    def adopt(tensor: Any) -> Any:
        if tensor is None or isinstance(tensor, VirtualTensor):
            return tensor
        if id(tensor) not in adopted:
            adopted[id(tensor)] = _adopted(state, tensor, device, dtype)
        return adopted[id(tensor)]

    with torch.no_grad():
        for path, part in module.named_modules():
            try:
                _adopt_part(part, adopt)
            except VirtualOutOfMemoryError as refusal:
                refusal.locate(operation="adopt", module=qualified(type(module).__name__, path))
                raise


def _adopt_part(module: torch.nn.Module, adopt: Callable[[Any], Any]) -> None:
    for tensors in (module._parameters, module._buffers):
        tensors.update({name: adopt(tensor) for name, tensor in tensors.items()})
    _adopt_attributes(module, adopt)


def _adopt_attributes(module: torch.nn.Module, adopt: Callable[[Any], Any]) -> None:
    # Tensors kept as plain attributes (tables of rotary embeddings) are not moved by .to(), here as on real devices.
    for name, value in list(vars(module).items()):
        if name in _MODULE_INTERNALS or not isinstance(value, (torch.Tensor, list, tuple, dict)):
            continue
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(value)[0]):
            vars(module)[name] = tree_map_only(torch.Tensor, adopt, value)


def _adopted(state: MachineState, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> Any:
    if is_made_of_others(type(tensor)):
        return _adopted_in_parts(state, tensor, device)
    content = tensor.detach()
    if dtype is not None and content.is_floating_point():
        content = content.to(dtype)
    if not state.values and _drops_values(state, tensor):
        content = as_shape(content)
    elif device.type != "cpu":
        with no_modes():  # else the ledger would know the copy as one on the host
            content = content.clone()
    result = _on_device(state, content, device)
    return as_parameter(result, like=tensor).requires_grad_(False) if is_parameter(tensor) else result


def _adopted_in_parts(state: MachineState, tensor: Any, device: torch.device) -> Any:
    names, context = tensor.__tensor_flatten__()
    parts = {
        name: _adopted(state, getattr(tensor, name), device, None)
        for name in names
        if getattr(tensor, name) is not None
    }
    made = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
    return torch.nn.Parameter(made, requires_grad=False) if is_parameter(tensor) else made


def _drops_values(state: MachineState, tensor: torch.Tensor) -> bool:
    # Parameters always, so that nothing is computed with them; of buffers only what is large (timestep tables stay)
    return tensor.device.type == "meta" or is_parameter(tensor) or tensor.numel() > state.small_elements


def _on_device(state: MachineState, inner: torch.Tensor, device: torch.device) -> Any:
    state.ledger.record(inner.untyped_storage(), str(device), "weights")
    on_host = device.type == "cpu" and inner.device.type == "cpu"
    return inner if on_host else wrapped(inner, device)
