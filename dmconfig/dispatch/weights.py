"""How a component's weights come to the device it runs on, one class per residency.

Each has ``attach`` (called once, weights on the cpu), ``bring`` (before a call from outside), ``leave`` (after it),
``rest`` (after the pipeline's call) and ``detach`` (weights back on the cpu, no hook left). Components in parts are
in ``split``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from accelerate.utils.memory import clear_device_cache
from diffusers.hooks import HookRegistry, apply_group_offloading

from dmconfig.dispatch.homes import CPU, Guests, Home, slots_of
from dmconfig.dispatch.layers import LayerHooks, Ties, brought_whole, come_and_go, parameters_by_path
from dmconfig.dispatch.moving import version_of

GROUP_HOOKS = frozenset({"group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"})
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
    the file, so going home moves nothing. What was written to or cast on the device is copied back instead. The
    memory is then given back to the device, as accelerate does, so that the next one is not laid beside its holes.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device, turns: Turns | None) -> None:
        self.module, self.device, self.turns = module, device, turns
        self._there = False
        self._home: list[Home] = []

    def attach(self) -> None:
        """Leave the weights on the cpu."""
        self.module.to(CPU)

    def bring(self) -> None:
        """Move the weights to the device, after the component before went home."""
        if self._there:
            return
        if self.turns is not None:
            self.turns.take(self)
        kept = (
            [] if is_quantised(self.module) else slots_of(self.module.modules())
        )  # more than tensors: moved both ways
        resting = [(slot, slot.tensor, slot.tensor.data) for slot in kept]
        self.module.to(self.device)
        self._home = [Home(slot, tensor, data, version_of(slot.tensor)) for slot, tensor, data in resting]
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
        clear_device_cache()

    def detach(self) -> None:
        """Move the weights back to the cpu and give up the turn."""
        self.rest()
        if self.turns is not None and self.turns.holder is self:
            self.turns.holder = None


class Grouped:
    """Weights that rest on the cpu; diffusers' group offloading brings them in groups of layers."""

    def __init__(self, module: torch.nn.Module, device: torch.device, options: Mapping[str, Any]) -> None:
        self.module, self.device, self.options = module, device, options
        self._own = own_of(module, device)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def attach(self) -> None:
        """Hand the weights to diffusers' hooks, with the options of ``apply_group_offloading``.

        Its groups of single layers leave out what a layer reads of those below it without calling them.
        """
        self.module.to(CPU)
        options = dict(self.options)
        if options["offload_type"] == "leaf_level":
            del options["num_blocks_per_group"]
        apply_group_offloading(self.module, onload_device=self.device, offload_device=CPU, **options)
        for part in brought_whole(self.module):
            below = [each for each in part.modules() if each is not part]
            self._handles += come_and_go(part, slots_of(below), self.device)

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
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        registry = HookRegistry.check_if_exists_or_initialize(self.module)
        for name in GROUP_HOOKS:
            registry.remove_hook(name, recurse=True)
        for part in self.module.modules():
            if not getattr(vars(part).get("_diffusers_hook"), "hooks", True):
                del part._diffusers_hook
                vars(part).pop("forward", None)
        self.module.to(CPU)


class PerLeaf:
    """Weights that rest on the cpu; hooks bring each layer's own while that layer runs: see ``LayerHooks``.

    What the component itself owns rests on the cpu, not on meta, because pipelines read it without calling the
    component (LTX: ``vae.latents_mean``); it is on the device from the component's first call until the pipeline's
    ends.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device, skip_keys: frozenset[str]) -> None:
        self.module, self.device, self.skip_keys = module, device, skip_keys
        self._own = own_of(module, device)
        self._hooks: list[LayerHooks] = []
        self._ties: Ties | None = None

    def attach(self) -> None:
        """Hand the weights to hooks. ``skip_keys`` are arguments the model writes into: they must not be copied."""
        self.module.to(CPU)
        self._ties = Ties(self.module)
        weights = parameters_by_path(self.module)
        for name, child in self.module.named_children():
            hooks = LayerHooks(child)
            self._hooks.append(hooks)
            hooks.attach(self.device, weights, name=name, skip_keys=self.skip_keys)

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
        for hooks in self._hooks:
            hooks.detach()
        self._hooks.clear()
        if self._ties is not None:
            self._ties.restore()
        self.module.to(CPU)


def own_of(module: torch.nn.Module, device: torch.device) -> Guests:
    """Return what a component holds itself, beside its layers, as guests of a device."""
    return Guests(lambda: slots_of([module]), device)
