"""Moving tensors inside values: what has to move does, and what need not stays the same object."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutputWithPooling

from dmconfig.dispatch.moving import to_device
from tests.virtual_devices import MakeMachine

CUDA = torch.device("cuda:1")
Pair = namedtuple("Pair", "left right")


@pytest.fixture(autouse=True)
def _devices(virtual_machine: MakeMachine) -> None:
    virtual_machine()


def ones() -> torch.Tensor:
    """Return a tensor on the cpu."""
    return torch.ones(2, 8, 1, 1)


@pytest.mark.parametrize(
    ("value", "tensor_of"),
    [
        (ones(), lambda v: v),
        ([1, [ones()]], lambda v: v[1][0]),
        ((ones(), "text"), lambda v: v[0]),
        (Pair(1, ones()), lambda v: v.right),
        ({"a": {"b": ones()}}, lambda v: v["a"]["b"]),
        (DecoderOutput(sample=ones()), lambda v: v.sample),
        (BaseModelOutputWithPooling(last_hidden_state=ones(), hidden_states=(ones(), ones())), lambda v: v[1][1]),
        (BatchEncoding({"input_ids": ones()}), lambda v: v.input_ids),
        (AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(ones())), lambda v: v.latent_dist.mean),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_inside_every_kind_of_value_move(value: Any, tensor_of: Any) -> None:
    """Containers, the libraries' outputs and distributions keep their type; their tensors are on the device."""
    moved = to_device(value, CUDA)

    assert type(moved) is type(value) or isinstance(value, torch.Tensor)
    assert tensor_of(moved).device == CUDA
    assert tensor_of(value).device == torch.device("cpu")


def test_a_distribution_moves_whole() -> None:
    """Every tensor a distribution holds is on the device, so that it can be sampled there."""
    moved = to_device(DiagonalGaussianDistribution(ones()), CUDA)

    assert {item.device for item in vars(moved).values() if isinstance(item, torch.Tensor)} == {CUDA}


@pytest.mark.parametrize("value", [[1, "a"], {"cache": [None, None]}, (), None, "text", [[ones().to("meta")]]])
def test_what_need_not_move_is_the_same_object(value: Any) -> None:
    """A list that a model writes into must stay that list; tensors without data are left to their owner."""
    device = torch.device("meta") if isinstance(value, list) and value and isinstance(value[0], list) else CUDA
    assert to_device(value, device) is value


def test_skipped_keys_are_left_alone() -> None:
    """An argument the model writes into is handed on as it is."""
    cache = [ones()]
    moved = to_device({"x": ones(), "feat_cache": cache}, CUDA, skip=frozenset({"feat_cache"}))

    assert moved["feat_cache"] is cache
    assert moved["x"].device == CUDA
