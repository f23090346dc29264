"""How a component's weights come to the device it runs on, one class per residency.

Each has ``attach`` (called once, weights on the cpu), ``bring`` (before a call from outside), ``leave`` (after it),
``rest`` (after the pipeline's call) and ``detach`` (weights back on the cpu, no hook left). Components in parts are
in ``split``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate.hooks import attach_align_device_hook, remove_hook_from_module
from diffusers.hooks import HookRegistry, apply_group_offloading

from dmconfig.dispatch.moving import version_of

CPU = torch.device("cpu")
BROUGHT_WHOLE = ["VectorQuantizer"]
"""Classes whose code reads the weights of a layer below without calling it, so all of them come at once.

Source: diffusers models/autoencoders/vq_model.py (its lookups in ``embedding.weight``).
"""
_GROUP_HOOKS = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")
"""All that diffusers' group offloading registers; the last two are for its stream."""


class Weights(Protocol):
    """Owner of one component's weights."""

    def attach(self) -> None:
        """Put the weights where they rest."""

    def bring(self) -> None:
        """Have them on the execution device when the component runs."""

    def leave(self) -> None:
        """Take note that a call from outside is done, also one that raised; never called without ``bring``."""

    def rest(self) -> None:
        """Put them where they rest, after the pipeline's call."""

    def detach(self) -> None:
        """Leave no hook; what rested on the cpu is there, whole."""


class Resident:
    """Weights that stay on their device."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device

    def attach(self) -> None:
        """Move the weights to the device, once. Quantised ones that are there are left alone: some refuse any move."""
        if not (is_quantised(self.module) and all(each.device == self.device for each in self.module.parameters())):
            self.module.to(self.device)

    def bring(self) -> None:
        """Nothing to do: they are there."""

    def leave(self) -> None:
        """Nothing to do: they stay."""

    def rest(self) -> None:
        """Nothing to do: they stay."""

    def detach(self) -> None:
        """Nothing to do: there is no hook, and the weights stay."""


def is_quantised(module: torch.nn.Module) -> bool:
    """Tell whether diffusers or transformers have quantised a component; its parameters are then more than tensors."""
    return bool(getattr(module, "is_quantized", False))


class Turns:
    """The components that use one accelerator in turn: bringing one sends the one before it home."""

    def __init__(self) -> None:
        self.holder: Brought | None = None

    def take(self, component: Brought) -> None:
        """Make component the one on the device."""
        if self.holder is not None and self.holder is not component:
            self.holder.rest()
        self.holder = component


class Brought:
    """Weights that rest on the cpu and are on the device, whole, from the component's first call.

    They go home when another component takes its turn, or, for one without turns (it runs within another's phase),
    when the pipeline's call ends. Home is where they came from: the tensors that rest are kept, often mapped from
    the file, so going home moves nothing. What was written to or cast on the device is copied back instead.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device, turns: Turns | None) -> None:
        self.module, self.device, self.turns = module, device, turns
        self._there = False
        self._home: list[_Home] = []

    def attach(self) -> None:
        """Leave the weights on the cpu."""
        self.module.to(CPU)

    def bring(self) -> None:
        """Move the weights to the device, after the component before went home."""
        if self._there:
            return
        if self.turns is not None:
            self.turns.take(self)
        kept = [] if is_quantised(self.module) else _slots(self.module.modules())  # more than tensors: moved both ways
        resting = [(slot, slot.tensor, slot.tensor.data) for slot in kept]
        self.module.to(self.device)
        self._home = [_Home(slot, tensor, data, version_of(slot.tensor)) for slot, tensor, data in resting]
        self._there = True

    def leave(self) -> None:
        """Nothing to do: they stay until another takes its turn, or the pipeline's call ends."""

    def rest(self) -> None:
        """Put the weights back where they rested."""
        if not self._there:
            return
        for home in self._home:
            home.take_back()
        self.module.to(CPU)  # what is new, was cast or was written to
        self._home.clear()
        self._there = False

    def detach(self) -> None:
        """Move the weights back to the cpu and give up the turn."""
        self.rest()
        if self.turns is not None and self.turns.holder is self:
            self.turns.holder = None


@dataclass(frozen=True, slots=True)
class _Slot:
    """A named place for a parameter or a buffer in one module."""

    tensors: dict[str, Any]  # of a module: its parameters, or its buffers
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        """What stands there now."""
        tensor: torch.Tensor = self.tensors[self.name]
        return tensor


@dataclass(frozen=True, slots=True)
class _Home:
    """What rests while a copy is on the device: the tensor, its data, and the copy's version when it was made."""

    slot: _Slot
    tensor: torch.Tensor
    data: torch.Tensor
    version: int

    def take_back(self) -> None:
        """Put the resting data back, unless the copy has been written to, cast, or replaced since."""
        copy = self.slot.tensors.get(self.slot.name)
        if (
            copy is None
            or copy.dtype != self.data.dtype
            or copy.shape != self.data.shape
            or version_of(copy) != self.version
        ):
            return
        if copy is self.tensor or isinstance(copy, torch.nn.Parameter):
            copy.data = self.data  # a parameter keeps its identity on every move
        else:
            self.slot.tensors[self.slot.name] = self.tensor  # a buffer is another tensor after a module's move


class _Own:
    """What a component holds itself, beside its layers: on the device from its first call until the pipeline's ends."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self._home: list[_Home] = []

    def bring(self) -> None:
        """Have it on the device."""
        for slot in _slots([self.module]):
            tensor, data = slot.tensor, slot.tensor.data
            if data.device != self.device:
                tensor.data = data.to(self.device)
                self._home.append(_Home(slot, tensor, data, version_of(tensor)))

    def rest(self) -> None:
        """Put it back where it rested; what was written to is copied."""
        for home in self._home:
            home.take_back()
        self._home.clear()
        for slot in _slots([self.module]):
            if slot.tensor.device != CPU:
                slot.tensor.data = slot.tensor.data.to(CPU)


def _slots(modules: Iterable[torch.nn.Module]) -> list[_Slot]:
    return [
        _Slot(tensors, name)
        for part in modules
        for tensors in (part._parameters, part._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]


class Grouped:
    """Weights that rest on the cpu; diffusers' group offloading brings them in groups of layers."""

    def __init__(self, module: torch.nn.Module, device: torch.device, options: Mapping[str, Any]) -> None:
        self.module, self.device, self.options = module, device, options
        self._own = _Own(module, device)

    def attach(self) -> None:
        """Hand the weights to diffusers' hooks, with the options of ``apply_group_offloading``."""
        self.module.to(CPU)
        options = dict(self.options)
        if options["offload_type"] == "leaf_level":
            del options["num_blocks_per_group"]
        apply_group_offloading(self.module, onload_device=self.device, offload_device=CPU, **options)

    def bring(self) -> None:
        """Move what the component itself owns to the device, where methods beside ``forward`` read it."""
        if not self.options.get("use_stream"):  # a stream brings them itself, beside the first group
            self._own.bring()

    def leave(self) -> None:
        """Nothing to do: the hooks send each group home."""

    def rest(self) -> None:
        """Send back what the component itself owns, and buffers that the hooks left; they have sent each group home."""
        self._own.rest()
        for part in self.module.modules():
            for buffer in part.buffers(recurse=False):
                if buffer.device != CPU:
                    buffer.data = buffer.data.to(CPU)  # the same tensor: diffusers knows it by identity

    def detach(self) -> None:
        """Take the hooks off, with what they leave behind on each module."""
        registry = HookRegistry.check_if_exists_or_initialize(self.module)
        for name in _GROUP_HOOKS:
            registry.remove_hook(name, recurse=True)
        for part in self.module.modules():
            if not getattr(vars(part).get("_diffusers_hook"), "hooks", True):
                del part._diffusers_hook
                vars(part).pop("forward", None)
        self.module.to(CPU)


class PerLeaf:
    """Weights that rest on the cpu; accelerate's hooks bring each layer's own while that layer runs.

    What pipelines read without calling the component must not be on meta in between: buffers (Flux 2 reads
    ``vae.bn.running_mean``) stay on the device, and what the component itself owns (LTX reads ``vae.latents_mean``)
    rests on the cpu and is on the device from the component's first call until the pipeline's ends.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device, skip_keys: frozenset[str]) -> None:
        self.module, self.device, self.skip_keys = module, device, skip_keys
        self._own = _Own(module, device)
        self._ties: Ties | None = None

    def attach(self) -> None:
        """Hand the weights to hooks. ``skip_keys`` are arguments the model writes into: they must not be copied."""
        self.module.to(CPU)
        self._ties = Ties(self.module)
        weights = dict(self.module.state_dict())
        for name, child in self.module.named_children():
            attach_align_device_hook(
                child,
                execution_device=self.device,
                offload=True,
                weights_map=weights,
                module_name=name,
                skip_keys=sorted(self.skip_keys),
                preload_module_classes=BROUGHT_WHOLE,
            )

    def bring(self) -> None:
        """Move what the component itself owns to the device; the hooks bring each layer."""
        self._own.bring()

    def leave(self) -> None:
        """Nothing to do: the hooks have sent each layer home."""

    def rest(self) -> None:
        """Move what the component itself owns back; the hooks have sent each layer home."""
        self._own.rest()

    def detach(self) -> None:
        """Take the hooks off, which puts the weights back."""
        remove_align_hooks(self.module)
        if self._ties is not None:
            self._ties.restore()
        self.module.to(CPU)


class Ties:
    """Which names of a module share a parameter; hooks that replace parameters make several of one."""

    def __init__(self, module: torch.nn.Module) -> None:
        slots: dict[int, list[_Slot]] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    slots.setdefault(id(parameter), []).append(_Slot(part._parameters, name))
        self._tied = [same for same in slots.values() if len(same) > 1]

    def restore(self) -> None:
        """Have the names share a parameter again: that of the first."""
        for first, *others in self._tied:
            for other in others:
                other.tensors[other.name] = first.tensor


def remove_align_hooks(module: torch.nn.Module) -> None:
    """Take accelerate's hooks off a module and all below it.

    accelerate leaves each module its own ``forward`` as an instance attribute; that goes too.
    """
    remove_hook_from_module(module, recurse=True)
    for part in module.modules():
        if getattr(vars(part).get("forward"), "__func__", None) is type(part).forward:
            del part.forward
