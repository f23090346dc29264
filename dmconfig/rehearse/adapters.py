"""Adapters on a pipeline without weights: as many tensors as their headers tell, of the right shapes, without data.

LoRAs that are stacked and IP-Adapters are put on by diffusers' own methods; words that are learned are rows of an
embedding. A fused LoRA changes no shape. What is not on this machine is left out, as in plans, which say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dmconfig.adapters import Adapter, additions_of, apply_adapters, guarded
from dmconfig.assembly import Assembly
from dmconfig.facts import PipelineFacts
from dmconfig.resolve import Resolved
from dmconfig.spec import IpAdapterSpec, LoraSpec, TextualInversionSpec
from dmconfig.weights import read_header

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PICTURES = ("ip_adapter_image", "ip_adapter_image_embeds")
_PATCHES = 257  # of a picture of 224 pixels, in CLIP's larger encoders, which IP-Adapters of the plus kind look at


def put_on(resolved: Resolved, pipe: Any, assembly: Assembly) -> None:
    """Put the adapters that are here on a pipeline that is on meta.

    Raises: BuildError: diffusers refuses one.
    """
    here = [adapter for adapter in assembly.adapters if adapter.file is not None]
    stacked = [each for each in here if isinstance(each.spec, LoraSpec) and not each.is_fused]
    apply_adapters(resolved, pipe, stacked)
    for part in pipe.components.values():
        if stacked and isinstance(part, torch.nn.Module):
            part.to("meta")
    for adapter in here:
        if isinstance(adapter.spec, TextualInversionSpec):
            guarded(resolved, adapter, lambda each: _learn_words(pipe, each))
    if pictures := _looking_at_pictures(here):
        guarded(resolved, pictures[-1], lambda _: _look_at_pictures(pipe, pictures))


def _looking_at_pictures(adapters: Sequence[Adapter]) -> list[Adapter]:
    """Return the IP-Adapters that are here."""
    return [each for each in adapters if each.file is not None and isinstance(each.spec, IpAdapterSpec)]


def pictures_for(
    pipe: Any, facts: PipelineFacts, given: Mapping[str, Any], adapters: Sequence[Adapter]
) -> dict[str, Any]:
    """Return what a call still has to be given for IP-Adapters: a black picture each, or its embeddings.

    Embeddings come in two rows, the second for guidance, where the pipeline has no encoder to make them.
    """
    looking = _looking_at_pictures(adapters)
    taken = {parameter.name for parameter in facts.call} & set(_PICTURES)
    if not looking or not taken or not given.keys().isdisjoint(_PICTURES):
        return {}
    if getattr(pipe, "image_encoder", None) is not None:
        from PIL import Image

        return {_PICTURES[0]: [Image.new("RGB", (224, 224))] * len(looking)}
    return {_PICTURES[1]: [*_embeddings(pipe)]}


def _embeddings(pipe: Any) -> Iterator[torch.Tensor]:
    denoiser = getattr(pipe, "unet", None) or pipe.transformer
    for projection in denoiser.encoder_hid_proj.image_projection_layers:
        first = next(each for each in projection.modules() if isinstance(each, torch.nn.Linear))
        rows = (1,) if hasattr(projection, "image_embeds") else (1, _PATCHES)
        yield torch.zeros(2, *rows, first.in_features, dtype=denoiser.dtype)


def _learn_words(pipe: Any, adapter: Adapter) -> None:
    """Give each encoder as many more rows of embeddings as the file has vectors for it."""
    for added in additions_of(adapter, [*pipe.components], ""):
        encoder = getattr(pipe, added.component)
        words = encoder.get_input_embeddings()
        rows, width = words.weight.shape
        more = torch.nn.Embedding(rows + added.elements // width, width, device="meta", dtype=words.weight.dtype)
        encoder.set_input_embeddings(more.requires_grad_(requires_grad=False))


def _look_at_pictures(pipe: Any, adapters: Sequence[Adapter]) -> None:
    empty: list[str] = [""] * len(adapters)
    tensors = [_by_part(adapter) for adapter in adapters]
    pipe.load_ip_adapter(tensors, subfolder=empty, weight_name=empty, image_encoder_folder=None)


def _by_part(adapter: Adapter) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of an IP-Adapter as diffusers reads them of its file, without data."""
    parts: dict[str, dict[str, torch.Tensor]] = {"image_proj": {}, "ip_adapter": {}}
    for tensor in read_header(adapter.file) if adapter.file is not None else ():
        part, _, name = tensor.name.partition(".")
        if part in parts:
            parts[part][name] = torch.empty(tensor.shape, dtype=_FLOATS[tensor.dtype], device="meta")
    return parts
