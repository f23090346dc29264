"""Which devices may meet in one operator, as CUDA's own checks have it; who runs the operator adds its name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from dmconfig.virtual.errors import DeviceMismatchError

_aten = torch.ops.aten
_INDEXING: frozenset[OpOverload] = frozenset({
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
})  # fmt: skip
_ANY_DEVICES: frozenset[OpOverload] = frozenset({
    _aten.copy_.default,
    _aten._foreach_copy_.default,
    _aten.is_same_size.default,
    _aten.set_.source_Tensor,
    _aten._has_compatible_shallow_copy_type.default,
})  # fmt: skip


def common_device(func: OpOverload, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> torch.device | None:
    """Return the device that the operator runs on; None when no tensor takes part.

    A host tensor without dimensions may meet any device, as in CUDA. ``meta`` counts as a device like any other:
    tolerating it would hide weights that were never loaded.

    Raises: DeviceMismatchError: naming the first two devices that differ.
    """
    if func in _INDEXING:
        check_indices(args[0].device, args[1])
        tensors = [args[0], *(value for value in args[2:3] if isinstance(value, torch.Tensor))]
    return agreed_device(tensors, tolerant=func in _ANY_DEVICES) if tensors else None


def agreed_device(tensors: Sequence[torch.Tensor], *, tolerant: bool = False) -> torch.device:
    """Return the one device of all tensors (at least one); with tolerant the first one's, whatever the others are.

    Raises: DeviceMismatchError: when they do not agree.
    """
    common = tensors[0].device
    only_scalars = True  # nothing yet but host tensors without dimensions, which follow whatever comes
    for tensor in tensors:
        scalar = tensor.device.type == "cpu" and tensor.dim() == 0
        if tensor.device == common:
            only_scalars = only_scalars and scalar
        elif only_scalars:
            common, only_scalars = tensor.device, False
        elif not scalar and not tolerant:
            raise DeviceMismatchError(_mismatch(common, tensor.device))
    return common


def check_indices(device: torch.device, indices: Iterable[torch.Tensor | None]) -> None:
    """Check that indices are on the host or with the tensor they index.

    Raises: DeviceMismatchError: with CUDA's words.
    """
    for index in indices:
        if index is not None and index.device != device and index.device.type != "cpu":
            raise DeviceMismatchError(
                "indices should be either on cpu or on the same device as the indexed tensor "
                f"({device}), but found one on {index.device}"
            )


def check_written(func: OpOverload, written: Iterable[Any], common: torch.device | None) -> None:
    """Check that what the operator writes to is where it computes; only copies may cross devices.

    Raises: DeviceMismatchError: for example for ``host_scalar.add_(tensor_on_cuda)``.
    """
    if common is None or func in _ANY_DEVICES:
        return
    for tensor in written:
        if isinstance(tensor, torch.Tensor) and tensor.device != common:
            raise DeviceMismatchError(_mismatch(tensor.device, common))


def check_generator(generator: torch.Generator | None, device: torch.device) -> None:
    """Check that random numbers are drawn by a generator of the device they are for.

    Raises: DeviceMismatchError: with CUDA's words.
    """
    if generator is not None and device.type != "meta" and generator.device != device:
        raise DeviceMismatchError(
            f"Expected a '{device.type}' device type for generator but found '{generator.device.type}' "
            f"(the generator is on {generator.device}, the result on {device})"
        )


def name_of(func: OpOverload) -> str:
    """Return an operator's name without its overload: ``aten.add``."""
    return str(func._schema.name).replace("::", ".")


def _mismatch(first: torch.device, second: torch.device) -> str:
    return f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}!"
