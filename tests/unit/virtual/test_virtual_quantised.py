"""Packed weights on virtual devices: they stay packed on every move, and are decoded to the bits of the host."""

from __future__ import annotations

import copy
from typing import Any

import gguf
import pytest
import torch
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter, dequantize_gguf_tensor

from dmconfig.gguf import LOADABLE_TYPES
from dmconfig.virtual import VirtualMachine, VirtualTensor
from tests.virtual_devices import MakeMachine

PACKED = sorted(LOADABLE_TYPES - {"F32", "F16"})
ROWS, COLUMNS = 4, 512


def parameter(kind: str) -> Any:
    """Return weights of a ggml type, of any bytes."""
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 100, (ROWS, COLUMNS // block * size), dtype=torch.uint8, generator=generator)
    return GGUFParameter(data, quant_type=number)


@pytest.mark.parametrize("kind", PACKED)
def test_packed_weights_are_decoded_on_a_device_to_the_bits_of_the_host(
    kind: str, virtual_machine: MakeMachine
) -> None:
    """Every type that diffusers loads, by its own code; there and back the parameter is what it was."""
    plain = parameter(kind)
    expected = dequantize_gguf_tensor(plain)
    machine = virtual_machine()

    moved = plain.to("cuda:1")

    assert isinstance(moved, GGUFParameter)
    assert isinstance(moved, VirtualTensor)
    assert (moved.quant_type, moved.quant_shape) == (plain.quant_type, (ROWS, COLUMNS))
    assert machine.ledger.live_bytes("cuda:1") == -(-plain.numel() // 512) * 512
    decoded = dequantize_gguf_tensor(moved)
    assert decoded.device == torch.device("cuda", 1)
    assert torch.equal(decoded.cpu().nan_to_num(), expected.nan_to_num())
    back = moved.cpu()
    assert type(back) is GGUFParameter
    assert torch.equal(back.as_tensor(), plain.as_tensor())


@pytest.mark.parametrize("values", [True, False])
def test_a_packed_layer_moves_with_its_module(values: bool) -> None:
    """The parameter of a module, its copy, and a layer that is adopted, are packed wherever they are."""
    layer = GGUFLinear(COLUMNS, ROWS, compute_dtype=torch.bfloat16)
    layer.weight = parameter("Q4_K")
    with VirtualMachine([1 << 20] * 2, values=values) as machine, torch.no_grad():
        machine.adopt(layer)
        layer.to("cuda:0")
        twin = copy.deepcopy(layer)
        states = torch.ones(2, COLUMNS, dtype=torch.bfloat16, device="cuda:0")
        assert layer(states).shape == twin(states).shape == (2, ROWS)
        for each in (layer, twin, layer.to("cpu")):
            assert isinstance(each.weight, GGUFParameter)
            assert each.weight.quant_type == gguf.GGMLQuantizationType.Q4_K
        assert machine.ledger.live_bytes("cuda:0") < 2 * ROWS * COLUMNS * 2


def test_nothing_of_diffusers_stays_replaced() -> None:
    """Outside a machine its class is as it was, and what was left on a device is refused, not computed with."""
    before = dict(vars(GGUFParameter))
    with VirtualMachine([1 << 20]):
        left = parameter("Q8_0").to("cuda:0")
    assert dict(vars(GGUFParameter)) == before
    with pytest.raises(RuntimeError, match="no VirtualMachine is active"):
        left + 1
