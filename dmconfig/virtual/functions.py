"""Calls caught before they reach C++, which would branch on the device, or look for a storage that is not there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from dmconfig.virtual import rules
from dmconfig.virtual.errors import REFUSALS
from dmconfig.virtual.operators import run_operator
from dmconfig.virtual.quantised import as_parameter
from dmconfig.virtual.state import MachineState
from dmconfig.virtual.tensor import (
    CPU,
    META,
    Args,
    Kwargs,
    VirtualTensor,
    inner_of,
    is_parameter,
    is_shape_only,
    no_modes,
    tensors_in,
    with_tensors,
)
from dmconfig.virtual.whereabouts import running_module

Function = Callable[..., Any]
Handler = Callable[[MachineState, Function, Args, Kwargs], Any]

_aten = torch.ops.aten
_C: Any = torch._C
_torch: Any = torch  # for what torch leaves untyped


class FunctionMode(TorchFunctionMode):
    """Brings every public torch call here first."""

    def __init__(self, state: MachineState) -> None:
        super().__init__()
        self._state = state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return call_function(self._state, func, args, kwargs or {})
        except REFUSALS as refusal:
            refusal.locate(operation=func.__name__, module=running_module(self._state.components))
            raise


def call_function(state: MachineState, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run one public torch call. A device given by name is normalised first.

    C++ must never see a "cuda" without an index: it would ask the borrowed guard for the current device, which
    answers ``meta``, and the tensor would be lost.
    """
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": state.normalise(kwargs["device"])}
    if kwargs.get("generator") is not None:
        # here and not in the operator: C++ hands on a plain generator, which has forgotten its virtual device
        rules.check_generator(kwargs["generator"], _destination(args, kwargs))
    handler = _HANDLERS.get(func)
    return func(*args, **kwargs) if handler is None else handler(state, func, args, kwargs)


def _destination(args: Args, kwargs: Kwargs) -> torch.device:
    """Return where a call puts its result: the device it names, or that of its first tensor, or the host."""
    if kwargs.get("device") is not None:
        device: torch.device = kwargs["device"]
        return device
    return args[0].device if args and isinstance(args[0], torch.Tensor) else CPU


# ---------------------------------------------------------------- devices and moves


def _device(_state: MachineState, func: Function, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 1 and type(args[0]) is int and not kwargs:
        return func("cuda", args[0])  # a bare index means the host's accelerator, which C++ thinks is none
    return func(*args, **kwargs)


def _to(state: MachineState, func: Function, args: Args, kwargs: Kwargs) -> Any:
    tensor, *rest = args
    if is_parameter(tensor):
        state.mark_weights(tensor)  # loaded before the machine began, and now on its way to a device
    if rest and isinstance(rest[0], (int, str, torch.device)):
        rest[0] = state.normalise(rest[0])
    return func(tensor, *rest, **kwargs)


def _cuda(state: MachineState, _func: Function, args: Args, kwargs: Kwargs) -> Any:
    tensor, *rest = args
    device = rest[0] if rest else kwargs.get("device")
    return tensor.to(state.normalise("cuda" if device is None else device))


def _tensor(_state: MachineState, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Make a tensor of numbers, lists and tensors: on the host first, as C++ cannot fill a wrapper."""
    if args and isinstance(args[0], (list, tuple)):
        args = (_as_numbers(args[0]), *args[1:])  # C++ would read tensors inside with dispatch switched off
    device = kwargs.get("device")
    if device is None or device.type != "cuda":
        return func(*args, **kwargs)
    options = {name: value for name, value in kwargs.items() if name != "device"}
    source = args[0] if args else options.get("data")
    if isinstance(source, VirtualTensor):
        return source.to(device, dtype=options.get("dtype"))
    return func(*args, **options).to(device)


def _as_numbers(item: Any) -> Any:
    if type(item) in (list, tuple):
        return type(item)(_as_numbers(element) for element in item)
    return item.tolist() if isinstance(item, VirtualTensor) else item


# ---------------------------------------------------------------- calls that branch on the device in C++


def _whole(state: MachineState, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run a composite whole on the inner tensors.

    group_norm, rms_norm and their like choose their parts by device, so on a device called cuda they would compute
    other bits than on the host whose values we promise.
    """
    tensors = tensors_in(args, kwargs)
    virtual = any(isinstance(tensor, VirtualTensor) for tensor in tensors)
    if not virtual or any(is_shape_only(tensor) for tensor in tensors):
        return func(*args, **kwargs)
    device = rules.agreed_device(tensors)
    args, kwargs = with_tensors(inner_of, args, kwargs)
    with no_modes():
        result = func(*args, **kwargs)
    return state.place(result, device)


def _group_norm(state: MachineState, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run it whole, beside the mean and the deviation of every group, which the kernel returns as well."""
    tensor = args[0]
    if not isinstance(tensor, VirtualTensor) or is_shape_only(tensor):
        return _whole(state, func, args, kwargs)
    rows = tensor.shape[0] * (args[1] if len(args) > 1 else kwargs["num_groups"])
    with no_modes():
        statistics = [torch.empty(rows, dtype=tensor.dtype, device=META) for _ in range(2)]
    for each in statistics:  # on the books until this returns
        state.ledger.record(each.untyped_storage(), str(tensor.device))
    return _whole(state, func, args, kwargs)


def _rms_norm(state: MachineState, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run it whole, as CUDA's kernel does: beside the result it has one float32 number per row, until it returns.

    Without values it would be taken apart, into tensors that no device holds.
    """
    tensor = args[0]
    if not isinstance(tensor, VirtualTensor):
        return _whole(state, func, args, kwargs)
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    with no_modes():
        row_means = torch.empty(tensor.numel() // math.prod(shape), dtype=torch.float32, device=META)
    state.ledger.record(row_means.untyped_storage(), str(tensor.device))
    if not is_shape_only(tensor):
        return _whole(state, func, args, kwargs)
    device = rules.agreed_device(tensors_in(args, kwargs))
    with no_modes():
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=META)
    return state.place(result, device)


def _attention(state: MachineState, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run scaled-dot-product attention whole, with the memory that CUDA's fused kernels take.

    They never hold the scores (N x N): the output, laid out as (B, N, H, D), and one float32 number per row.
    """
    tensors = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor)]
    if not any(isinstance(tensor, VirtualTensor) for tensor in tensors):
        return func(*args, **kwargs)
    device = rules.agreed_device(tensors)
    query, _key, value = _attention_inputs(args, kwargs)
    with no_modes():
        row_sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=META)
        state.ledger.record(row_sums.untyped_storage(), str(device))
        if any(is_shape_only(tensor) for tensor in tensors):
            result = _attention_shape(inner_of(query), inner_of(value))
        else:
            args, kwargs = with_tensors(inner_of, args, kwargs)
            result = func(*args, **kwargs)
    return state.place(result, device)


def _attention_inputs(args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    names = ("query", "key", "value")
    return [args[index] if index < len(args) else kwargs[name] for index, name in enumerate(names)]


def _attention_shape(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    *batch, heads, rows, _width = query.shape
    return torch.empty((*batch, rows, heads, value.shape[-1]), dtype=query.dtype, device=META).transpose(-3, -2)


# ---------------------------------------------------------------- content of a tensor


def _set_data(state: MachineState, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``tensor.data = value`` by exchanging the contents of two tensor objects; what was weights stays weights.

    The object must stay the same one: group offloading keeps its parameters as the keys of a dict.
    """
    tensor, value = args
    if not isinstance(tensor, VirtualTensor) and not isinstance(value, VirtualTensor):
        return func(*args, **kwargs)
    is_weight = is_parameter(tensor) or state.ledger.kind_of(inner_of(tensor).untyped_storage()) == "weights"
    with _C.DisableTorchFunction():
        new = value.twin() if isinstance(value, VirtualTensor) else value.detach()
        if is_parameter(tensor):
            new = as_parameter(new, like=tensor)
        _exchange(tensor, new)
    if is_weight:
        state.mark_weights(tensor)
    return None


def _exchange(tensor: torch.Tensor, new: torch.Tensor) -> None:
    try:
        _torch.utils.swap_tensors(tensor, new)
    except RuntimeError as error:  # raised before anything was exchanged
        raise NotImplementedError(
            "a tensor cannot be moved to or from a virtual device in place while the graph of a run with gradients, "
            "or a view of it, is alive: run under torch.no_grad(), or drop the results first"
        ) from error


def _get_data(_state: MachineState, func: Function, args: Args, kwargs: Kwargs) -> Any:
    tensor = args[0]
    return tensor.twin() if isinstance(tensor, VirtualTensor) else func(*args, **kwargs)


def _get_item(state: MachineState, func: Function, args: Args, kwargs: Kwargs) -> Any:
    tensor, index = args
    if not isinstance(tensor, VirtualTensor):
        return func(*args, **kwargs)
    indices = index if isinstance(index, tuple) else (index,)
    if _has_arrays(indices):
        indices = tuple(_inner_index(tensor, each) for each in indices)
    with no_modes():
        if is_shape_only(tensor):
            indices = tuple(each.to(META) if isinstance(each, torch.Tensor) and each.dtype != torch.bool else each
                            for each in indices)  # fmt: skip
        result = tensor._inner[indices]
    return state.place(result, tensor.device)


def _inner_index(tensor: torch.Tensor, index: Any) -> Any:
    if not isinstance(index, torch.Tensor):
        return index
    if index.dim() == 0 and index.dtype not in (torch.bool, torch.uint8) and not index.is_floating_point():
        return index.item()  # as the C++ binding does, whatever the device
    rules.check_indices(tensor.device, [index])
    if index.dtype == torch.bool and is_shape_only(index):
        raise NotImplementedError("indexing with a mask that has only a shape: the size of the result is unknown")
    return inner_of(index)


def _set_item(state: MachineState, func: Function, args: Args, kwargs: Kwargs) -> Any:
    tensor, index, value = args
    indices = index if isinstance(index, tuple) else (index,)
    if not isinstance(tensor, VirtualTensor) or _has_arrays(indices):
        return func(*args, **kwargs)
    if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device.type == "meta":
        return func(*args, **kwargs)  # raises as it should
    part = _get_item(state, func, (tensor, index), {})
    if isinstance(value, torch.Tensor):
        run_operator(state, _aten.copy_.default, (part, value), {})
    else:
        run_operator(state, _aten.fill_.Scalar, (part, value), {})
    return None


def _has_arrays(indices: tuple[Any, ...]) -> bool:
    return any(isinstance(index, (torch.Tensor, list)) for index in indices)


def _copy_(state: MachineState, func: Function, args: Args, kwargs: Kwargs) -> Any:
    if any(isinstance(arg, VirtualTensor) for arg in args[:2]):
        return run_operator(state, _aten.copy_.default, args[:2], {})
    return func(*args, **kwargs)


def _backward(_state: MachineState, func: Function, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(args[0], VirtualTensor):
        raise NotImplementedError("backward() is not possible on a virtual device")
    return func(*args, **kwargs)


# ---------------------------------------------------------------- what only real accelerators have


def _pin_memory(state: MachineState, _func: Function, args: Args, _kwargs: Kwargs) -> Any:
    tensor = args[0]
    if tensor.device.type != "cpu":
        raise RuntimeError(f"cannot pin '{tensor.device}' only dense CPU tensors can be pinned")
    pinned = tensor.clone()
    if state.ledger.kind_of(inner_of(tensor).untyped_storage()) == "weights":
        state.mark_weights(pinned)
    pinned._virtually_pinned = True
    return pinned


def _is_pinned(_state: MachineState, _func: Function, args: Args, _kwargs: Kwargs) -> bool:
    return getattr(args[0], "_virtually_pinned", False)


_HANDLERS: dict[Any, Handler] = {
    torch.device: _device,
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.tensor: _tensor,
    torch.as_tensor: _tensor,
    torch.asarray: _tensor,
    torch.group_norm: _group_norm,
    F.group_norm: _group_norm,
    torch.instance_norm: _whole,
    F.instance_norm: _whole,
    torch.rms_norm: _rms_norm,
    F.rms_norm: _rms_norm,
    F.scaled_dot_product_attention: _attention,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.data.__get__: _get_data,  # type: ignore[attr-defined]
    torch.Tensor.__getitem__: _get_item,
    torch.Tensor.__setitem__: _set_item,
    torch.Tensor.copy_: _copy_,
    torch.Tensor.backward: _backward,
    torch.Tensor.pin_memory: _pin_memory,
    torch.Tensor.is_pinned: _is_pinned,
}
