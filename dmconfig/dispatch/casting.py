"""Casting what enters a component of another dtype than its neighbours', and what it hands back.

What one would write by hand around a float32 VAE: latents are cast before they are decoded, pictures before they are
encoded, and what is drawn from an encoding takes the dtype of the picture, so that the pipeline goes on in it. Numbers
that are not floating, such as token ids and masks of bits, stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dmconfig.dispatch.moving import Move, copy_to

_DRAWS = ("sample", "mode")
"""The methods of a latent distribution by which pipelines take latents from it."""


def moved_and_cast(module: torch.nn.Module) -> Move:
    """Return what moves a tensor to a device and casts it to the dtype that a module has when it is called."""

    def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return cast(copy_to(tensor, device), _dtype_of(module))

    return move


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor in dtype, itself where it is or is not floating."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def dtype_given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype of the first floating tensor among arguments, or None."""
    tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
    return next((each.dtype for each in tensors if each.is_floating_point()), None)


def handed_back(output: Any, dtype: torch.dtype) -> Any:
    """Return what a component made, in dtype: tensors, and what is drawn from distributions, which stay exact."""
    if isinstance(output, torch.Tensor):
        return cast(output, dtype)
    if any(callable(getattr(output, name, None)) for name in _DRAWS):
        return _drawn_in(output, dtype)
    if isinstance(output, Mapping):
        result: Any = copy.copy(output)
        for key, item in output.items():
            result[key] = handed_back(item, dtype)
        return result
    if isinstance(output, (list, tuple)):
        return type(output)(handed_back(item, dtype) for item in output)
    return output


def _drawn_in(distribution: Any, dtype: torch.dtype) -> Any:
    result = copy.copy(distribution)
    for name in _DRAWS:
        draw = getattr(distribution, name, None)
        if callable(draw):
            setattr(result, name, _casting(draw, dtype))
    return result


def _casting(draw: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    return lambda *args, **kwargs: handed_back(draw(*args, **kwargs), dtype)


def _dtype_of(module: Any) -> torch.dtype:
    dtype: torch.dtype = module.dtype
    return dtype
