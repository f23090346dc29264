"""Quantised components without weights: layers that weigh what the backend's do, and compute as they do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dmconfig.gguf import GGML_TYPES
from dmconfig.quantization import converted_layers, layer_bytes
from dmconfig.spec import QuantizationSpec
from dmconfig.weights import TensorInfo

_PLAIN = {"F32": torch.float32, "F16": torch.float16}
"""The ggml types that diffusers takes as they are; what is of another stays packed, as bytes."""


class QuantisedLinear(torch.nn.Module):
    """A linear layer whose weight is so many bytes, and is made whole again, in the dtype of its input, to compute."""

    def __init__(self, layer: torch.nn.Linear, nbytes: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        # int8: the one type that T5 does not cast its input to
        weight = torch.empty(nbytes, dtype=torch.int8, device=layer.weight.device)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return what the layer makes of states, shape [..., in_features]."""
        weight = torch.empty(self.out_features, self.in_features, dtype=states.dtype, device=states.device)
        return torch.nn.functional.linear(states, weight, self.bias)


def quantised(module: Any, asked: QuantizationSpec) -> Any:
    """Put stand-ins in the place of the layers of a component that a backend would convert; return the component."""
    for path, layer in [*converted_layers(module, asked)]:
        parent, _, name = path.rpartition(".")
        nbytes = layer_bytes(module, layer, asked, layer.weight.element_size())
        setattr(module.get_submodule(parent), name, QuantisedLinear(layer, nbytes))
    return module


def module_of_gguf(cls: Any, tensors: Sequence[TensorInfo], config: Path, dtype: str) -> Any:
    """Return a model of diffusers as its own loader makes it of a GGUF file with these tensors, on meta.

    Its layers decode their packed weights, in the dtype, whenever they run, by diffusers' own code.

    Raises: what the loader raises.
    """
    from diffusers import GGUFQuantizationConfig

    compute = getattr(torch, dtype)
    return cls.from_single_file(
        dict(_packed(tensors)),
        config=str(config),
        quantization_config=GGUFQuantizationConfig(compute_dtype=compute),
        local_files_only=True,
        torch_dtype=compute,
        device="meta",
    )


def _packed(tensors: Sequence[TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as diffusers reads them of a file, without values: rows of bytes, which know their type."""
    from diffusers.quantizers.gguf.utils import GGUFParameter
    from gguf import GGMLQuantizationType

    blocks = {name: (elements, nbytes) for name, elements, nbytes in GGML_TYPES.values()}
    for tensor in tensors:
        if tensor.dtype in _PLAIN:
            yield tensor.name, torch.empty(tensor.shape, dtype=_PLAIN[tensor.dtype], device="meta")
            continue
        elements, nbytes = blocks[tensor.dtype]
        shape = (*tensor.shape[:-1], tensor.shape[-1] // elements * nbytes)
        data = torch.empty(shape, dtype=torch.uint8, device="meta")
        yield tensor.name, GGUFParameter(data, quant_type=GGMLQuantizationType[tensor.dtype])
