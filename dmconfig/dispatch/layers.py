"""Weights that come layer by layer: accelerate's hooks, and what they leave out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.hooks import attach_align_device_hook, remove_hook_from_module

from dmconfig.dispatch.homes import Guests, Slot, stored_buffers_of

BROUGHT_WHOLE = ("VectorQuantizer", "AttentionPooling", "MiniMaxH3AudioCausalAttention", "MultiheadAttention")
"""Classes whose code reads the weights of a layer below without calling it, so all of them come at once.

Source: diffusers models/autoencoders/vq_model.py (its lookups in ``embedding.weight``), models/embeddings.py, models/
autoencoders/autoencoder_kl_minimax_h3_audio.py; torch nn/modules/activation.py, which SigLIP's last layer is made of.
"""


class LayerHooks:
    """Hooks on a module and all below it, each of which brings the weights of its own layer while that layer runs.

    Buffers that are stored with the weights come and go with them. accelerate would leave them on the device, as it
    still does with those that are in no file, or else on meta in between, where pipelines that read them (Flux 2:
    ``vae.bn.running_mean``) would find nothing: here they rest on the cpu.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def attach(
        self,
        device: torch.device,
        weights: Mapping[str, torch.Tensor],
        *,
        name: str = "",
        skip_keys: Collection[str] = (),
    ) -> None:
        """Hand the weights to hooks; ``weights`` has them by their paths, which begin with ``name``.

        ``skip_keys`` are arguments that the model writes into: they must not be copied.
        """
        layers = [(layer, stored_buffers_of(modules)) for layer, modules in _layers_of(self.module)]
        resting = [(slot, slot.tensor) for _, slots in layers for slot in slots]
        attach_align_device_hook(
            self.module,
            execution_device=device,
            offload=True,
            weights_map=weights,
            module_name=name,
            skip_keys=sorted(skip_keys),
            preload_module_classes=list(BROUGHT_WHOLE),
        )
        for slot, tensor in resting:
            slot.put(tensor)  # accelerate has put a copy there
        for layer, slots in layers:
            if slots:
                self._handles += come_and_go(layer, slots, device)

    def detach(self) -> None:
        """Take the hooks off, which puts the weights back.

        accelerate leaves each module its own ``forward`` as an instance attribute; that goes too.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        remove_hook_from_module(self.module, recurse=True)
        for part in self.module.modules():
            if getattr(vars(part).get("forward"), "__func__", None) is type(part).forward:
                del part.forward


def come_and_go(
    layer: torch.nn.Module, slots: Sequence[Slot], device: torch.device
) -> list[torch.utils.hooks.RemovableHandle]:
    """Have what is in slots on a device while a layer runs, and return the hooks that see to it."""
    guests = Guests(lambda: slots, device)

    def bring(*_: Any) -> None:
        guests.bring()

    def rest(*_: Any) -> None:
        guests.rest()

    return [layer.register_forward_pre_hook(bring), layer.register_forward_hook(rest, always_call=True)]


def brought_whole(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules in a module, or itself, that read the weights of layers below them: see ``BROUGHT_WHOLE``."""
    return (part for part in module.modules() if type(part).__name__ in BROUGHT_WHOLE)


def parameters_by_path(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a module stores but its buffers: those keep their place."""
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in buffers}


def _layers_of(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, list[torch.nn.Module]]]:
    """Each module that is entered by itself, with the modules that come with it: itself, or all below it too."""
    if type(module).__name__ in BROUGHT_WHOLE:
        yield module, [*module.modules()]
        return
    yield module, [module]
    for child in module.children():
        yield from _layers_of(child)


class Ties:
    """Which names of a module share a parameter; hooks that replace parameters make several of one."""

    def __init__(self, module: torch.nn.Module) -> None:
        slots: dict[int, list[Slot]] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    slots.setdefault(id(parameter), []).append(Slot(part._parameters, name))
        self._tied = [same for same in slots.values() if len(same) > 1]

    def restore(self) -> None:
        """Have the names share a parameter again: that of the first."""
        for first, *others in self._tied:
            for other in others:
                other.put(first.tensor)
