"""Weights of GGUF files on virtual devices: diffusers' own class for them, around a wrapper.

diffusers makes a ``GGUFParameter``, which remembers its ggml type, of whatever an operator returns on one. It asks C++
for that, which takes no wrapper, so here one is made that is of both classes. Decoding is diffusers' own code.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from dmconfig.virtual.patching import replaced
from dmconfig.virtual.tensor import VirtualTensor, installed_dispatch, wrapped

_MODULE = "diffusers.quantizers.gguf.utils"


@contextmanager
def gguf_parameters() -> Iterator[None]:
    """Have diffusers make parameters of GGUF files on virtual devices; nothing where its package is missing."""
    if find_spec("gguf") is None:
        yield
        return
    plain: Any = importlib.import_module(_MODULE).GGUFParameter
    create = plain.__new__

    def made(cls: type, data: Any, requires_grad: bool = False, quant_type: Any = None, **state: Any) -> Any:
        if isinstance(data, VirtualTensor):
            return _virtual_class()(data, quant_type=quant_type)
        del state  # what accelerate hands on beside the type: it is made anew
        return create(cls, data, requires_grad, quant_type)

    with replaced(plain, {"__new__": staticmethod(made)}):
        yield


def as_parameter(tensor: torch.Tensor, like: torch.Tensor) -> torch.nn.Parameter:
    """Return tensor as a parameter of the kind that another is: of a GGUF file, with its type, or a plain one."""
    if hasattr(like, "quant_type"):
        parameter: torch.nn.Parameter = importlib.import_module(_MODULE).GGUFParameter(
            tensor, quant_type=like.quant_type
        )
        return parameter
    return torch.nn.Parameter(tensor, requires_grad=like.requires_grad)


@functools.cache
def _virtual_class() -> Any:
    utils: Any = importlib.import_module(_MODULE)
    plain: Any = utils.GGUFParameter

    class VirtualGGUFParameter(VirtualTensor, plain):  # type: ignore[misc]
        """A ``GGUFParameter`` on a virtual device; one of the host again where an operator's result is there."""

        def __new__(cls, data: Any, requires_grad: bool = False, quant_type: Any = None, **_state: Any) -> Any:
            if not isinstance(data, VirtualTensor):
                return plain(data, requires_grad, quant_type)
            made = VirtualTensor.__new__(cls, data._inner, device=data.device)
            block_size, type_size = utils.GGML_QUANT_SIZES[quant_type]
            made.quant_type = quant_type
            made.quant_shape = utils._quant_shape_from_byte_shape(data._inner.shape, type_size, block_size)
            return made

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kind: Any = VirtualTensor if installed_dispatch() is None else plain
            return kind.__torch_function__.__func__(cls, func, types, args, kwargs)

        def as_tensor(self) -> Any:
            return wrapped(self._inner, self.device)

        def twin(self) -> Any:
            return type(self)(wrapped(self._inner.detach(), self.device), quant_type=self.quant_type)

    return VirtualGGUFParameter
