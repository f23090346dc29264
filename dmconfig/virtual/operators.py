"""Running one operator: check the devices, compute on the inner tensors, put the results where they belong."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from dmconfig.virtual import rules
from dmconfig.virtual.errors import REFUSALS
from dmconfig.virtual.shapes import shapes_of
from dmconfig.virtual.state import MachineState
from dmconfig.virtual.tensor import (
    CPU,
    META,
    Args,
    Kwargs,
    VirtualTensor,
    as_shape,
    inner_of,
    is_made_of_others,
    is_shape_only,
    no_modes,
    tensors_in,
    with_tensors,
)
from dmconfig.virtual.whereabouts import running_module

_aten = torch.ops.aten
_C: Any = torch._C
_torch: Any = torch  # for what torch leaves untyped
_NO_RESIZING = "a tensor on a virtual device cannot be resized in place"
_COMPOSITE = _C.DispatchKey.CompositeImplicitAutograd


@dataclass(frozen=True, slots=True)
class _Signature:
    """What an operator's schema says: what it writes to and which results that is, where tensors go, and the like."""

    written: tuple[tuple[int, str], ...]
    tensors: frozenset[int]
    takes_device: bool
    returns_written: tuple[bool, ...]
    reshapes: bool


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Brings every operator to ``run_operator``, also those on plain tensors and those that only make tensors."""

    def __init__(self, state: MachineState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = state

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_made_of_others(kind) for kind in types):
            return NotImplemented  # its parts come here
        return run_operator(self._state, func, args, kwargs or {})


def run_operator(state: MachineState, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Run one operator of the dispatcher on tensors of a machine; what it refuses names it and the module."""
    try:
        return _run(state, func, args, kwargs)
    except REFUSALS as refusal:
        refusal.locate(operation=rules.name_of(func), module=running_module(state.components))
        raise


def _run(state: MachineState, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    special = _SPECIAL.get(func)
    if special is not None:
        return special(state, func, args, kwargs)
    if _is_composite(func):
        # Under inference_mode nothing has decomposed it yet. Its own kernel is run, so that its parts come here: the
        # Python decompositions that torch also knows would change both values and memory (upsample_nearest2d).
        with DispatchMode(state):
            return func._op_dk(_COMPOSITE, *args, **kwargs)
    return _run_generic(state, func, args, kwargs)


def move(
    state: MachineState,
    tensor: torch.Tensor,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
) -> Any:
    """Return a copy of tensor on device, as another dtype if asked, and count what crossed between devices.

    Raises: NotImplementedError: out of meta, where there is nothing to copy.
    """
    inner = inner_of(tensor)
    if device.type == "meta":
        # A new one always: sharing the inner meta storage would keep the weights on the books after they left.
        return torch.empty_strided(inner.size(), inner.stride(), dtype=dtype or inner.dtype, device=META)
    if tensor.device.type == "meta":
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    kind = state.ledger.kind_of(inner.untyped_storage())
    options = {"dtype": dtype, "memory_format": memory_format}
    copy = _aten._to_copy.default(inner, **{name: value for name, value in options.items() if value is not None})
    if tensor.device != device:
        _count_move(state, tensor, copy, device)
    return state.place(copy, device, kind)


def _count_move(state: MachineState, tensor: torch.Tensor, copy: torch.Tensor, device: torch.device) -> None:
    # torch converts dtypes before the copy, except on the way to the host, where it converts on arrival
    travelling = inner_of(tensor) if device.type == "cpu" else copy
    kind = state.ledger.kind_of(inner_of(tensor).untyped_storage())
    size_bytes = travelling.numel() * travelling.element_size()
    state.ledger.count_move(str(tensor.device), str(device), size_bytes, kind)


# ---------------------------------------------------------------- operators that are not like the others


def _to_copy(state: MachineState, _func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    (tensor,) = args
    wanted = kwargs.get("device")
    device = tensor.device if wanted is None else state.normalise(wanted)
    return move(state, tensor, device, dtype=kwargs.get("dtype"), memory_format=kwargs.get("memory_format"))


def _copy_(state: MachineState, _func: OpOverload, args: Args, _kwargs: Kwargs) -> Any:
    destination, source = args[:2]
    if destination.device != source.device and "meta" not in (destination.device.type, source.device.type):
        _count_move(state, source, inner_of(destination), destination.device)
    if is_shape_only(destination) or is_shape_only(source):
        _torch.broadcast_shapes(destination.shape, source.shape)  # raises as the copy would
    else:
        inner_of(destination).copy_(inner_of(source))
    return destination


def _item(state: MachineState, func: OpOverload, args: Args, _kwargs: Kwargs) -> Any:
    (tensor,) = args
    if is_shape_only(tensor):
        return state.zero_for_unknown("item", tensor.dtype)
    return func(inner_of(tensor))


def _detach(_state: MachineState, func: OpOverload, args: Args, _kwargs: Kwargs) -> Any:
    # Straight to the twin: nn.Parameter insists that detach() returns the very type it was given.
    (tensor,) = args
    return tensor.twin() if isinstance(tensor, VirtualTensor) else func(tensor)


def _resize(state: MachineState, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    # Refused before anything happens: C++ would grow the content and then look for the wrapper's storage (a build
    # with CUDA would even ask the driver for memory).
    tensor, wanted = args[:2]
    if not isinstance(tensor, VirtualTensor):
        return _run_generic(state, func, args, kwargs)
    size = wanted.size() if isinstance(wanted, torch.Tensor) else torch.Size(wanted)
    if func is _aten.set_.source_Tensor or size != tensor.size():
        raise NotImplementedError(_NO_RESIZING)
    return tensor


_SPECIAL = {
    _aten.resize_.default: _resize,
    _aten.resize_as_.default: _resize,
    _aten.set_.source_Tensor: _resize,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy_,
    _aten._local_scalar_dense.default: _item,
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
}


# ---------------------------------------------------------------- and all the others


def _run_generic(state: MachineState, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    signature = _signature(func)
    tensors = tensors_in(args, kwargs)
    written = [args[index] if index < len(args) else kwargs.get(name) for index, name in signature.written]
    common = rules.common_device(func, args, tensors)
    rules.check_written(func, written, common)
    target = _target(state, signature, kwargs, common)
    factory = _is_factory(signature, tensors, target)
    shape_only = target.type == "meta" or (not factory and any(is_shape_only(tensor) for tensor in tensors))
    if factory and signature.takes_device and not state.values and not shape_only:
        shape = _try_shape(func, args, kwargs)
        if shape is not None and shape.numel() > state.small_elements:
            return state.place(shape, target)
    if shape_only:
        args = _with_shaped_numbers(signature, args)
    placed = signature.takes_device and (factory or kwargs.get("device") is not None)
    result = _compute(func, args, kwargs, shape_only=shape_only, placed=placed)
    if signature.reshapes and isinstance(written[0], VirtualTensor):
        _reshape_wrapper(func, args, kwargs)
    return _place_results(state, signature, result, written, target)


def _target(state: MachineState, signature: _Signature, kwargs: Kwargs, common: torch.device | None) -> torch.device:
    if signature.takes_device and kwargs.get("device") is not None:
        return state.normalise(kwargs["device"])
    return CPU if common is None else common


def _is_factory(signature: _Signature, tensors: Sequence[torch.Tensor], target: torch.device) -> bool:
    # zeros_like and new_zeros of a meta tensor, asked for on a real device, make something out of nothing as well
    if not tensors:
        return True
    return signature.takes_device and target.type != "meta" and all(t.device.type == "meta" for t in tensors)


def _try_shape(func: OpOverload, args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    """Run a factory on meta, so that what is too large to keep is never allocated; None where meta cannot."""
    try:
        result = func(*args, **_for_inner(kwargs, META, placed=True))
    except NotImplementedError:
        return None
    return result if isinstance(result, torch.Tensor) else None


def _compute(func: OpOverload, args: Args, kwargs: Kwargs, *, shape_only: bool, placed: bool) -> Any:
    kwargs = _for_inner(kwargs, META if shape_only else CPU, placed=placed)
    convert = _shape_of if shape_only else inner_of
    args, kwargs = with_tensors(convert, args, kwargs)
    if shape_only:
        return shapes_of(func, args, kwargs, lambda: _shaped(func, args, kwargs))
    return func(*args, **kwargs)


def _shaped(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Run an operator on meta tensors; where it has no kernel for them, its parts."""
    try:
        return func(*args, **kwargs)
    except NotImplementedError:
        result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise
        return result


def _with_shaped_numbers(signature: _Signature, args: Args) -> Args:
    """Return args with numbers in place of a tensor made shapes.

    With a plain number, meta kernels give dimensions of one element other strides than real ones do, and torch 2.8
    then copies where it would not have to.
    """
    return tuple(
        _shape_of_number(arg) if index in signature.tensors and type(arg) in (int, float) else arg
        for index, arg in enumerate(args)
    )


def _shape_of_number(number: float) -> torch.Tensor:
    dtype = torch.int64 if isinstance(number, int) else torch.get_default_dtype()
    return torch.empty((), dtype=dtype, device=META)


def _for_inner(kwargs: Kwargs, device: torch.device, *, placed: bool) -> Kwargs:
    """Return kwargs for a run on inner tensors, without what they have not: pinned memory, generators on meta."""
    kwargs = dict(kwargs)
    if placed:
        kwargs["device"] = device
    if device is META and "generator" in kwargs:
        kwargs["generator"] = None
    if "pin_memory" in kwargs:
        kwargs["pin_memory"] = None
    return kwargs


def _place_results(
    state: MachineState, signature: _Signature, result: Any, written: Sequence[Any], target: torch.device
) -> Any:
    if isinstance(result, torch.Tensor):
        if written and signature.returns_written[:1] == (True,):
            return _unchanged(written[0])
        return state.place(result, target)
    if not isinstance(result, (list, tuple)):
        return result
    results, remaining = [], iter(written)
    flags = signature.returns_written if len(signature.returns_written) == len(result) else (False,) * len(result)
    for item, is_written in zip(result, flags, strict=True):
        if not isinstance(item, torch.Tensor):
            results.append(item)
        else:
            results.append(_unchanged(next(remaining)) if is_written else state.place(item, target))
    return type(result)(results) if type(result) in (list, tuple) else tuple(results)


def _reshape_wrapper(func: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """Let squeeze_ and its like, which have reshaped the content, do the same to the wrapper itself."""
    with suppress(NotImplementedError), no_modes():  # what wants a storage: _unchanged tells the caller
        func(*args, **kwargs)


def _unchanged(outer: torch.Tensor) -> torch.Tensor:
    # In-place operators hand back their argument. C++ cannot resize a wrapper that has no storage, so one that grows
    # its argument (resize_, an out= of another size) would leave wrapper and content apart.
    if inner_of(outer).shape != outer.shape:
        raise NotImplementedError(_NO_RESIZING)
    return outer


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return as_shape(inner_of(tensor))


@functools.cache
def _signature(func: OpOverload) -> _Signature:
    schema = func._schema
    return _Signature(
        written=tuple((index, arg.name) for index, arg in enumerate(schema.arguments) if _is_written(arg)),
        tensors=frozenset(index for index, arg in enumerate(schema.arguments) if str(arg.type) == "Tensor"),
        takes_device=any(arg.name == "device" for arg in schema.arguments),
        returns_written=tuple(_is_written(result) for result in schema.returns),
        reshapes=torch.Tag.inplace_view in func.tags,
    )


def _is_written(argument: Any) -> bool:
    return bool(argument.alias_info is not None and argument.alias_info.is_write)


@functools.cache
def _is_composite(func: Any) -> bool:
    # Asks for a C++ kernel. func._can_decompose() would not do: it also counts decompositions written in Python.
    return bool(_C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))
