"""Shapes of results, remembered: the layers of a model are alike, and torch's meta kernels are slow.

An operator that makes new tensors of its arguments makes the same shapes of the same shapes. It is asked once, and what
it made is made again without it. Operators that write to their arguments or return views of them are always run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dmconfig.virtual.tensor import tensors_in

_META = torch.device("meta")
_MOST = 50_000
"""Remembered results at most; what a large pipeline needs is a twentieth of that."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor of meta that has its storage to itself."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self) -> torch.Tensor:
        """Return a new one."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=_META)


_Form = Literal["one"] | type
_known: dict[Hashable, tuple[_Form, tuple[_Shape, ...]]] = {}


def shapes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
    """Return what an operator makes of meta tensors: by ``run``, or as it did before of tensors of these shapes."""
    key = _key(func, args, kwargs) if _makes_new(func) else None
    known = _known.get(key) if key is not None else None
    if known is not None:
        form, shapes = known
        return shapes[0].made() if form == "one" else form(shape.made() for shape in shapes)
    result = run()
    described = _described(result, args, kwargs) if key is not None else None
    if described is not None:
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = described
    return result


@functools.cache
def _makes_new(func: Any) -> bool:
    """Whether an operator neither writes to its arguments nor returns views of them."""
    schema = func._schema
    return all(each.alias_info is None for each in (*schema.arguments, *schema.returns))


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    try:
        key = (func, torch.get_default_dtype(), *map(_part, args), *((name, _part(kwargs[name])) for name in kwargs))
        hash(key)
    except TypeError:
        return None
    return key


def _part(value: Any) -> Hashable:
    """What of an argument decides the shapes; a number beside its type, since 1, 1.0 and True are one key."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta":
            raise TypeError("what it holds may decide the shape")
        return (value.shape, value.stride(), value.storage_offset(), value.dtype, value.requires_grad)
    if isinstance(value, (list, tuple)):
        return tuple(map(_part, value))
    return type(value), value


def _described(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Form, tuple[_Shape, ...]] | None:
    """How to make a result again; None where it is not made of tensors that have their storage to themselves.

    Some operators return a view of an argument, and their schema does not say so (``_unsafe_view``).
    """
    is_one = isinstance(result, torch.Tensor)
    parts = (result,) if is_one else result
    if type(parts) not in {tuple, list} or not all(isinstance(part, torch.Tensor) for part in parts):
        return None
    storages = {part.untyped_storage()._cdata for part in parts}
    taken = {tensor.untyped_storage()._cdata for tensor in tensors_in(args, kwargs)}
    if len(storages) < len(parts) or storages & taken or not all(map(_is_alone, parts)):
        return None
    shapes = tuple(_Shape(tuple(part.shape), part.stride(), part.dtype) for part in parts)
    return ("one" if is_one else type(parts)), shapes


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage, so that a new one of its shape takes as much."""
    if tensor.device.type != "meta" or tensor.requires_grad:
        return False
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    elements = extent if tensor.numel() else 0
    return tensor.untyped_storage().nbytes() == elements * tensor.element_size()
