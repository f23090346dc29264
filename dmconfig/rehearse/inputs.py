"""The arguments of a rehearsed call: what the file and the user say, and sensible ones for what a pipeline needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dmconfig.facts import CallParameter, PipelineFacts

PROMPT = "a photo of an astronaut riding a horse on the moon, 4k"
REHEARSED_STEPS = 2
_SOLVERS_OF_ORDER_3 = ("UniPC", "DPMSolver", "DEIS", "LMS", "PNDM")
_STEPS = ("num_inference_steps", "prior_num_inference_steps")
_COUNTS = ("num_images_per_prompt", "num_videos_per_prompt")
_FRAMES = ("num_frames", "video_length", "frames")  # what pipelines call the length of a film
_PICTURES = (
    "image", "mask_image", "control_image", "control_mask", "conditioning_image",
    "reference_image", "example_image", "original_image",
)  # fmt: skip
_FILMS = ("video", "control_video", "conditioning_frames", "pose_video", "face_video")
_TAKING_PICTURES = (
    "Img2Img", "Inpaint", "ControlNet", "ImageToVideo", "Image2Video", "VideoToVideo", "InstructPix2Pix", "Upscale",
    "SuperResolution", "Edit", "Kontext", "Fill", "Redux", "Depth", "Control", "I2V", "I2I", "VideoDiffusion",
    "Adapter", "Variation", "Refiner",
)  # fmt: skip
"""Parts of the names of classes that need a picture or film and let it be None all the same."""
_DEFAULT_SIDE = 512
_DEFAULT_FRAMES = 17  # of a film that is given: 4 n + 1 and 8 n + 1, as video VAEs have it


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a rehearsal is asked for beyond the file; None leaves it to the pipeline. ``full`` runs every step."""

    height: int | None = None
    width: int | None = None
    frames: int | None = None
    steps: int | None = None
    batch: int = 1
    full: bool = False
    call: Mapping[str, Any] = field(default_factory=dict)


def steps_asked(facts: PipelineFacts, settings: Settings, defaults: Mapping[str, Any]) -> int:
    """Return how many steps a whole generation has; of a picture that is given, those that its strength leaves."""
    asked = settings.steps or _chosen("num_inference_steps", facts, settings, defaults)
    return max(1, int((asked if isinstance(asked, int) else 50) * _strength(facts, settings, defaults)))


def steps_rehearsed(scheduler: Any, asked: int, settings: Settings) -> int:
    """Return how many steps are run: enough for a multistep solver to reach its order, the others are like the last."""
    name = type(scheduler).__name__
    order = 3 if any(solver in name for solver in _SOLVERS_OF_ORDER_3) else 1
    return asked if settings.full else min(asked, max(REHEARSED_STEPS, order + 1))


def arguments(
    pipe: Any, facts: PipelineFacts, settings: Settings, defaults: Mapping[str, Any], steps: int
) -> dict[str, Any]:
    """Return the arguments of the call. ``defaults`` are those of the file, ``steps`` how many are to run.

    Sizes that the signature states are among them, so that what comes out can be held against what was asked for.
    """
    known = {parameter.name: parameter for parameter in facts.call}
    given = dict.fromkeys(_STEPS, math.ceil(steps / _strength(facts, settings, defaults)))
    given |= _sizes(known, settings) | (dict.fromkeys(_COUNTS, settings.batch) if settings.batch > 1 else {})
    made = {"generator": torch.Generator("cpu").manual_seed(0), **_texts(known), **_embeddings(pipe, known)}
    if not known.keys().isdisjoint((*_FRAMES, *_FILMS)):
        made["output_type"] = "pt"  # else the host would be filled with black frames
    own = {name: value for name, value in {**defaults, **settings.call}.items() if name not in ("seed", *_STEPS)}
    chosen = {**given, **made, **own}
    missing = {name: value for name, value in _pictures(pipe, facts, chosen, settings) if name not in chosen}
    return {name: value for name, value in {**chosen, **missing}.items() if name in known}


def _chosen(name: str, facts: PipelineFacts, settings: Settings, defaults: Mapping[str, Any]) -> Any:
    """What is asked of a parameter: by the user, by the file, or by the signature."""
    signature = next((parameter.default for parameter in facts.call if parameter.name == name), None)
    return settings.call.get(name, defaults.get(name, signature))


def _strength(facts: PipelineFacts, settings: Settings, defaults: Mapping[str, Any]) -> float:
    """The share of the steps that are run on a picture that is given."""
    strength = _chosen("strength", facts, settings, defaults)
    is_share = isinstance(strength, (int, float)) and 0 < strength < 1
    return float(strength) if is_share and _takes_pictures(facts) else 1.0


def _takes_pictures(facts: PipelineFacts) -> bool:
    required = {parameter.name for parameter in facts.call if parameter.required}
    return not required.isdisjoint((*_PICTURES, *_FILMS)) or any(word in facts.class_name for word in _TAKING_PICTURES)


def _sizes(known: Mapping[str, CallParameter], settings: Settings) -> dict[str, int]:
    """Height, width and frames: as asked, else as the signature has them."""
    asked = {"height": settings.height, "width": settings.width, **dict.fromkeys(_FRAMES, settings.frames)}
    stated = {name: known[name].default for name in asked if name in known}
    either = {name: stated.get(name) if value is None else value for name, value in asked.items()}
    return {name: value for name, value in either.items() if isinstance(value, int)}


def _texts(known: Mapping[str, CallParameter]) -> dict[str, str]:
    """The prompt, and what else has to be there of its kind."""
    required = [name for name, parameter in known.items() if parameter.required and name.endswith("prompt")]
    return dict.fromkeys(("prompt", *required), PROMPT)


def _embeddings(pipe: Any, known: Mapping[str, CallParameter]) -> dict[str, torch.Tensor]:
    """Embeddings of a picture, where a pipeline cannot do without: Kandinsky's decoders."""
    names = [name for name in ("image_embeds", "negative_image_embeds") if name in known and known[name].required]
    if not names:
        return {}
    size = (1, pipe.unet.config.encoder_hid_dim)
    return {name: torch.zeros(size, dtype=pipe.unet.dtype, device=pipe._execution_device) for name in names}


def _pictures(
    pipe: Any, facts: PipelineFacts, chosen: Mapping[str, Any], settings: Settings
) -> Iterator[tuple[str, Any]]:
    """Black pictures and films of the size that is drawn, for a class that needs some."""
    if not _takes_pictures(facts):
        return
    from PIL import Image

    natural = _natural_size(pipe)
    size = (chosen.get("width") or natural[0], chosen.get("height") or natural[1])
    picture = Image.new("RGB", size)
    yield from dict.fromkeys(_PICTURES, picture).items()
    stated = next((chosen[name] for name in _FRAMES if isinstance(chosen.get(name), int)), None)
    yield from dict.fromkeys(_FILMS, [picture] * (settings.frames or stated or _DEFAULT_FRAMES)).items()


def _natural_size(pipe: Any) -> tuple[int, int]:
    """Width and height of what a pipeline draws when it is not told: its denoiser's sample, decoded."""
    denoiser = getattr(pipe, "unet", None) or getattr(pipe, "transformer", None)
    trained = getattr(getattr(denoiser, "config", None), "sample_size", None)
    sample = getattr(pipe, "default_sample_size", None) or trained
    height, width = sample if isinstance(sample, (list, tuple)) else (sample, sample)
    if not (isinstance(height, int) and isinstance(width, int)):
        return _DEFAULT_SIDE, _DEFAULT_SIDE
    scale = getattr(pipe, "vae_scale_factor", 1)
    return width * scale, height * scale
