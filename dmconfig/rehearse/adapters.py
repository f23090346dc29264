"""Adapters on a pipeline without weights: as many tensors as their headers tell, of the right shapes, without data.

LoRAs that are stacked and IP-Adapters are put on by diffusers' own methods; words that are learned are rows of an
embedding. A fused LoRA changes no shape. What is not on this machine is left out, as in plans, which say so.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from dmconfig.adapters import Adapter, additions_of, apply_adapters, guarded, one_or_all
from dmconfig.assembly import Assembly
from dmconfig.facts import PipelineFacts
from dmconfig.resolve import Resolved
from dmconfig.spec import IpAdapterSpec, LoraSpec, TextualInversionSpec
from dmconfig.virtual.patching import replaced
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
        reading = importlib.import_module("diffusers.loaders.ip_adapter")
        with replaced(reading, {"safe_open": _WithoutData}):
            apply_adapters(resolved, pipe, pictures)


def pictures_for(
    pipe: Any, facts: PipelineFacts, given: Mapping[str, Any], adapters: Sequence[Adapter]
) -> dict[str, Any]:
    """Return what a call still has to be given for IP-Adapters: a black picture each, or its embeddings."""
    looking = _looking_at_pictures(adapters)
    taken = {parameter.name for parameter in facts.call}
    if not looking or taken.isdisjoint(_PICTURES) or not given.keys().isdisjoint(_PICTURES):
        return {}
    if getattr(pipe, "image_encoder", None) is not None:
        return {_PICTURES[0]: one_or_all([_black(pipe)] * len(looking))}
    of_guidance = f"negative_{_PICTURES[1]}"
    if of_guidance in taken:
        return {name: [*_embeddings(pipe, 1)] for name in (_PICTURES[1], of_guidance)}
    return {_PICTURES[1]: [*_embeddings(pipe, 2)]}  # the second row is that of guidance


def _looking_at_pictures(adapters: Sequence[Adapter]) -> list[Adapter]:
    """Return the IP-Adapters that are here."""
    return [each for each in adapters if each.file is not None and isinstance(each.spec, IpAdapterSpec)]


def _black(pipe: Any) -> Any:
    """A picture, or, where nothing makes pixels of one, its pixels."""
    if getattr(pipe, "feature_extractor", None) is None:
        size = pipe.image_encoder.config.image_size
        return torch.zeros(1, 3, size, size)
    from PIL import Image

    return Image.new("RGB", (224, 224))


def _embeddings(pipe: Any, rows: int) -> Iterator[torch.Tensor]:
    denoiser = getattr(pipe, "unet", None) or pipe.transformer
    for projection in denoiser.encoder_hid_proj.image_projection_layers:
        first = next(each for each in projection.modules() if isinstance(each, torch.nn.Linear))
        patches = (1,) if hasattr(projection, "image_embeds") else (1, _PATCHES)
        yield torch.zeros(rows, *patches, first.in_features, dtype=denoiser.dtype)


def _learn_words(pipe: Any, adapter: Adapter) -> None:
    """Give each encoder as many more rows of embeddings as the file has vectors for it."""
    for added in additions_of(adapter, [*pipe.components], ""):
        encoder = getattr(pipe, added.component)
        words = encoder.get_input_embeddings()
        rows, width = words.weight.shape
        more = torch.nn.Embedding(rows + added.elements // width, width, device="meta", dtype=words.weight.dtype)
        encoder.set_input_embeddings(more.requires_grad_(requires_grad=False))


class _WithoutData:
    """A safetensors file, opened as ``safe_open`` opens one, of which only the header is read."""

    def __init__(self, file: str, **_options: Any) -> None:
        self._tensors = {tensor.name: tensor for tensor in read_header(Path(file))}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def keys(self) -> list[str]:
        """Return the names of its tensors."""
        return [*self._tensors]

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of a name, on meta."""
        tensor = self._tensors[name]
        return torch.empty(tensor.shape, dtype=_FLOATS[tensor.dtype], device="meta")
