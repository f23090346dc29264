"""Quantised components without weights: layers that weigh what the backend's do, and compute as they do."""

from __future__ import annotations

from typing import Any

import torch

from dmconfig.quantization import converted_layers, layer_bytes
from dmconfig.spec import QuantizationSpec


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
