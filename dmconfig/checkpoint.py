"""What a single file of weights holds: which pipeline's it is, and which of its tensors belong to which component.

Both are told by the names and shapes in its header alone, by the rules of diffusers' own single-file loaders, so that
a file can be checked and planned before any of its weights is read. Loading it is for ``build``.

Source: diffusers loaders/single_file_utils.py (CHECKPOINT_KEY_NAMES, infer_diffusers_model_type,
DIFFUSERS_DEFAULT_PIPELINE_PATHS) and loaders/single_file.py (load_single_file_sub_model).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dmconfig.facts import ClassFacts
from dmconfig.source import Source
from dmconfig.weights import TensorInfo, read_header

_DENOISER = "model.diffusion_model."
_SINGLE_FILE_MODEL = "FromOriginalModelMixin"
_CLIP = ("CLIPTextModel", "CLIPTextModelWithProjection")
_T5 = "T5EncoderModel"

_TEXT_ENCODERS = {
    "text_encoder": ("cond_stage_model.", "conditioner.embedders.0.", "text_encoders.clip_l."),
    "text_encoder_2": ("conditioner.embedders.1.", "text_encoders.clip_g."),
    "text_encoder_3": ("text_encoders.t5xxl.",),
}
"""How the names of each text encoder begin; in a refiner, whose only one is text_encoder_2, as those of the first."""
_VAES = {"vae": ("first_stage_model.", "vae."), "audio_vae": ("audio_vae.",)}
_OTHERS = (
    "cond_stage_model.",
    "conditioner.",
    "text_encoders.",
    "first_stage_model.",
    "vae.",
    "audio_vae.",
    "model_ema.",
)

FileHeaders = Callable[[Source], "tuple[TensorInfo, ...] | None"]
"""The tensors of a file of weights on the hub, or None where it is not to be looked into."""

_Shapes = Mapping[str, tuple[int, ...]]
_Rule = tuple[str, Callable[[_Shapes], bool]]


def _has(*names: str) -> Callable[[_Shapes], bool]:
    """A rule that asks for any of some names, in front of which a pipeline's file may have another."""
    return lambda shapes: any(name in shapes or _DENOISER + name in shapes for name in names)


def _size(shapes: _Shapes, name: str, dimension: int) -> int | None:
    shape = shapes.get(name) or shapes.get(_DENOISER + name)
    return shape[dimension] if shape and -len(shape) <= dimension < len(shape) else None


def _all(*rules: Callable[[_Shapes], bool]) -> Callable[[_Shapes], bool]:
    return lambda shapes: all(rule(shapes) for rule in rules)


def _is(name: str, dimension: int, size: int) -> Callable[[_Shapes], bool]:
    return lambda shapes: _size(shapes, name, dimension) == size


_INPUT = "input_blocks.0.0.weight"
_V2 = "input_blocks.2.1.transformer_blocks.0.attn2.to_k.weight"
_XL = "conditioner.embedders.1.model.transformer.resblocks.9.mlp.c_proj.bias"
_REFINER = "conditioner.embedders.0.model.transformer.resblocks.9.mlp.c_proj.bias"
_FLUX = "double_blocks.0.img_attn.norm.key_norm.scale"
_GUIDED = "guidance_in.in_layer.bias"
_WAN = "head.modulation"
_PATCHES = "patch_embedding.weight"

_PIPELINES: Sequence[_Rule] = (
    ("stabilityai/stable-diffusion-2-inpainting", _all(_is(_INPUT, 1, 9), _is(_V2, -1, 1024))),
    ("diffusers/stable-diffusion-xl-1.0-inpainting-0.1", _all(_is(_INPUT, 1, 9), _has(_XL))),
    ("stable-diffusion-v1-5/stable-diffusion-inpainting", _is(_INPUT, 1, 9)),
    ("stabilityai/stable-diffusion-2-1", _is(_V2, -1, 1024)),
    ("playgroundai/playground-v2.5-1024px-aesthetic", _has("edm_mean")),
    ("stabilityai/stable-diffusion-xl-base-1.0", _has(_XL)),
    ("stabilityai/stable-diffusion-xl-refiner-1.0", _has(_REFINER)),
    (
        "stabilityai/stable-diffusion-3-medium-diffusers",
        _all(_is("joint_blocks.0.context_block.adaLN_modulation.1.bias", -1, 9216), _is("pos_embed", 1, 36864)),
    ),
    ("stabilityai/stable-diffusion-3.5-large", _has("joint_blocks.37.x_block.mlp.fc1.weight")),
    ("black-forest-labs/FLUX.2-dev", _has("single_stream_modulation.lin.weight")),
    ("lodestones/Chroma1-HD", _has("distilled_guidance_layer.in_proj.bias")),
    ("black-forest-labs/FLUX.1-Fill-dev", _all(_has(_FLUX), _has(_GUIDED), _is("img_in.weight", 1, 384))),
    ("black-forest-labs/FLUX.1-Depth-dev", _all(_has(_FLUX), _has(_GUIDED), _is("img_in.weight", 1, 128))),
    ("black-forest-labs/FLUX.1-dev", _all(_has(_FLUX), _has(_GUIDED))),
    ("black-forest-labs/FLUX.1-schnell", _has(_FLUX)),
    ("hunyuanvideo-community/HunyuanVideo", _has("txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1.bias")),
    ("fal/AuraFlow-v0.3", _all(*map(_has, ("double_layers.0.attn.w2q.weight", "cond_seq_linear.weight")))),
    ("timbrooks/instruct-pix2pix", _is(_INPUT, 1, 8)),
    ("Tongyi-MAI/Z-Image-Turbo", _has("layers.0.adaLN_modulation.0.weight")),
    ("Alpha-VLLM/Lumina-Image-2.0", _has("cap_embedder.0.weight")),
    ("Efficient-Large-Model/Sana_1600M_1024px_diffusers", _has("blocks.0.cross_attn.q_linear.weight")),
    ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", _all(_has(_WAN), _is(_PATCHES, 0, 1536))),
    ("Wan-AI/Wan2.1-T2V-14B-Diffusers", _all(_has(_WAN), _is(_PATCHES, 0, 5120), _is(_PATCHES, 1, 16))),
    ("stable-diffusion-v1-5/stable-diffusion-v1-5", _has("output_blocks.11.0.skip_connection.weight")),
)
"""Hub id of a pipeline, and what a file of its weights has: the first that holds. Kinds that share names come last."""


def read_single_file(file: Path) -> tuple[TensorInfo, ...]:
    """Return the tensors of a safetensors or GGUF file, from its header alone.

    Raises: SourceError: the file is damaged or cannot be read.
    """
    if not file.name.lower().endswith(".gguf"):
        return read_header(file)
    from dmconfig.gguf import read_gguf

    return read_gguf(file)


def tensors_of(source: Source) -> tuple[TensorInfo, ...] | None:
    """Return what a file of weights holds: the one on this machine, else as the hub has told; None where neither is.

    Raises: SourceError: the file is damaged or cannot be read.
    """
    if source.is_pickle:
        return None
    return read_single_file(source.path) if source.path is not None else source.told


def asked_of_hub(source: Source, hub: FileHeaders | None) -> Source:
    """Return a source with what the hub says of its file, if it is one that is not here and the hub may be asked."""
    if hub is None or source.hub_id is None or source.file is None or source.path is not None:
        return source
    return replace(source, told=hub(source))


def pipeline_told_by(tensors: Sequence[TensorInfo]) -> str | None:
    """Return the hub id of the pipeline whose weights these are, of all or of its denoiser; None where none is told."""
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    return next((hub_id for hub_id, holds in _PIPELINES if holds(shapes)), None)


def loads_from_single_file(facts: ClassFacts) -> bool:
    """Tell whether diffusers loads the class from a file in the names of the model's authors."""
    return _SINGLE_FILE_MODEL in facts.ancestors


def part_of(component: str, facts: ClassFacts, tensors: Sequence[TensorInfo]) -> tuple[TensorInfo, ...]:
    """Return the tensors of a pipeline's file that one of its components is loaded from; none where it is not in it.

    Args:
        component: its name in the pipeline.
        facts: its class.
        tensors: all of the file.
    """
    if component in _TEXT_ENCODERS:
        in_file = facts.class_name in (*_CLIP, _T5)
        return _starting(_beginnings(component, tensors), tensors) if in_file else ()
    if not loads_from_single_file(facts):
        return ()
    if component in _VAES:
        return _starting(_VAES[component], tensors)
    of_denoiser = _starting((_DENOISER,), tensors)
    return of_denoiser or tuple(tensor for tensor in tensors if not tensor.name.startswith(_OTHERS))


def _beginnings(text_encoder: str, tensors: Sequence[TensorInfo]) -> tuple[str, ...]:
    own = _TEXT_ENCODERS[text_encoder]
    is_refiner = any(tensor.name == _REFINER for tensor in tensors)
    return _TEXT_ENCODERS["text_encoder"] if is_refiner and text_encoder == "text_encoder_2" else own


def _starting(beginnings: tuple[str, ...], tensors: Sequence[TensorInfo]) -> tuple[TensorInfo, ...]:
    return tuple(tensor for tensor in tensors if tensor.name.startswith(beginnings))
