"""The tensor that says it is on an accelerator, and holds a tensor of the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Dispatch = Callable[[OpOverload, Args, Kwargs], Any]

META = torch.device("meta")
CPU = torch.device("cpu")

_C: Any = torch._C
_dispatch: Dispatch | None = None  # of the active machine; there is at most one in a process

# What may be asked of a tensor outside a machine: what it is, nothing about its content.
_DESCRIPTIONS = frozenset({
    "__format__", "__hash__", "__len__", "device", "dim", "dtype", "element_size", "grad", "grad_fn", "is_complex",
    "is_contiguous", "is_cuda", "is_floating_point", "is_leaf", "is_meta", "is_sparse", "itemsize", "layout", "name",
    "nbytes", "ndim", "nelement", "numel", "requires_grad", "shape", "size", "storage_offset", "stride",
})  # fmt: skip


class VirtualTensor(torch.Tensor):
    """A tensor on a virtual device: shape, dtype and device of its own, content in ``_inner``.

    ``_inner`` is a plain CPU tensor when values are computed, or a plain meta tensor when only shapes are. A result
    that lands on the host is a plain tensor again, except a shape-only one (its device says cpu, its inner meta).
    """

    _inner: torch.Tensor
    _is_param: bool

    @staticmethod
    def __new__(
        cls: type[VirtualTensor],
        data: torch.Tensor,
        requires_grad: bool = False,
        *,
        device: torch.device | None = None,
        **_state: object,
    ) -> Any:
        """Wrap data. Without a device: a parameter, for accelerate, which rebuilds weights as

        ``type(param)(value, requires_grad=..., **param.__dict__)``, whatever the parameter's type is.
        """
        if device is None:
            return torch.nn.Parameter(data, requires_grad)
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            layout=data.layout,
            device=device,
            requires_grad=False,
        )
        wrapper._inner = data
        return wrapper

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass  # torch.Tensor's own would refuse our arguments

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "shape only" if is_shape_only(self) else "real"
        return f"VirtualTensor({tuple(self.shape)}, {self.dtype}, device={self.device}, {kind})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as an instance method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _dispatch is None:
            raise _left_behind()
        return _dispatch(func, args, kwargs or {})

    # What C++ cannot answer for a wrapper without a storage:

    def data_ptr(self) -> int:
        """Return an address that is equal for aliases and differs otherwise, as accelerate's tied weights need."""
        inner = self._inner
        if inner.device.type != "meta":
            return inner.data_ptr()
        storage: Any = inner.untyped_storage()
        return int(storage._cdata << 4) + int(inner.storage_offset()) * inner.element_size()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the inner tensor."""
        return self._inner.untyped_storage()

    def record_stream(self, stream: object) -> None:
        """Do nothing: nothing runs late here, so memory is never reused too early."""

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array; zeros when there is only a shape.

        Raises: TypeError: when the tensor is on an accelerator and force is not set, like CUDA tensors do.
        """
        if self.device.type != "cpu" and not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        if is_shape_only(self):
            with no_modes():
                dtype = torch.empty(0, dtype=self._inner.dtype).numpy().dtype
            return np.zeros(tuple(self._inner.shape), dtype=dtype)
        return self._inner.detach().numpy()

    def tolist(self) -> Any:
        """Return the values as nested lists of numbers."""
        if is_shape_only(self):
            return self.item() if self.dim() == 0 else [row.tolist() for row in self]
        return self._inner.tolist()

    def __array__(self, dtype: Any = None, *_args: object, **_kwargs: object) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copy: torch.Tensor = self.detach().clone()
            memo[id(self)] = torch.nn.Parameter(copy, self.requires_grad) if is_parameter(self) else copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self._inner, str(self.device), is_parameter(self), self.requires_grad)

    def twin(self) -> Any:
        """Return another tensor with the same content on the same device."""
        return wrapped(self._inner.detach(), self.device)


def wrapped(inner: torch.Tensor, device: torch.device) -> Any:
    """Return inner as a tensor of the virtual device."""
    return VirtualTensor(inner, device=device)


def inner_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor inside, or the tensor itself when it is one."""
    return tensor._inner if isinstance(tensor, VirtualTensor) else tensor


def tensors_in(args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """Return the tensors among arguments, and in lists of them; torch's calls nest no deeper, and pytree is slow."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


def with_tensors(
    convert: Callable[[torch.Tensor], torch.Tensor], args: Args, kwargs: Kwargs
) -> tuple[Args, dict[str, Any]]:
    """Return arguments with each tensor of ``tensors_in`` converted."""

    def converted(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return convert(value)
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            items = [convert(item) if isinstance(item, torch.Tensor) else item for item in value]
            return items if isinstance(value, list) else tuple(items)
        return value

    return tuple([converted(value) for value in args]), {name: converted(value) for name, value in kwargs.items()}


@functools.cache
def is_made_of_others(kind: type) -> bool:
    """Tell whether tensors of a class are made of other tensors, as those of torchao and quanto are.

    Such a class says itself what an operator is on its parts, which may be on a virtual device.
    """
    return hasattr(kind, "__tensor_flatten__")


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that one is made of; of a plain one, itself."""
    if not is_made_of_others(type(tensor)):
        yield tensor
        return
    quantised: Any = tensor
    for name in quantised.__tensor_flatten__()[0]:
        if getattr(tensor, name) is not None:
            yield from parts_of(getattr(tensor, name))


def is_shape_only(tensor: torch.Tensor) -> bool:
    """Tell whether there are no values inside."""
    return inner_of(tensor).device.type == "meta"


def is_parameter(tensor: torch.Tensor) -> bool:
    """Tell whether torch counts the tensor as a module's parameter."""
    return isinstance(tensor, torch.nn.Parameter)


def as_shape(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor of the same geometry without values."""
    if tensor.device.type == "meta":
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)


@contextmanager
def no_modes() -> Iterator[None]:
    """Run torch as if no machine were active; for work on inner tensors."""
    with _C._DisableTorchDispatch(), _C.DisableTorchFunction():
        yield


def install_dispatch(dispatch: Dispatch | None) -> None:
    """Set what runs operators on virtual tensors in this process; None when the machine ends.

    Without a machine, C++ must not see a virtual tensor at all: where gradients are on, it looks for the tensor's
    device guard before it dispatches, finds none, and aborts the process. So the call is refused before. Inside, the
    attribute has the value that makes torch's overriding cost nothing.
    """
    global _dispatch
    _dispatch = dispatch
    overriding: Any = classmethod(_refuse_outside) if dispatch is None else _C._disabled_torch_function_impl
    VirtualTensor.__torch_function__ = overriding  # type: ignore[method-assign]


def _refuse_outside(_cls: type, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
    is_property = getattr(func, "__name__", "") == "__get__"
    name = getattr(func.__self__ if is_property else func, "__name__", "")
    if name not in _DESCRIPTIONS:
        raise _left_behind()
    with _C.DisableTorchFunction():
        return func(*args, **(kwargs or {}))


def _left_behind() -> RuntimeError:
    return RuntimeError(
        "this tensor is on a virtual device, and no VirtualMachine is active; "
        "move what is needed later to the cpu before the machine's block ends"
    )


def installed_dispatch() -> Dispatch | None:
    """Return what runs operators on virtual tensors, or None outside a machine."""
    return _dispatch


def _rebuild(inner: torch.Tensor, device: str, parameter: bool, requires_grad: bool) -> Any:
    tensor = wrapped(inner, torch.device(device))
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor
