"""The arguments of a rehearsed call: what the file and the user say, and sensible ones for what a pipeline needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dmconfig.facts import PipelineFacts

PROMPT = "a photo of an astronaut riding a horse on the moon, 4k"
REHEARSED_STEPS = 2
_SOLVERS_OF_ORDER_3 = ("UniPC", "DPMSolver", "DEIS", "LMS", "PNDM")
_PICTURES = ("image", "mask_image", "control_image", "conditioning_image")
_DEFAULT_SIDE = 512
_TAKING_PICTURES = (
    "Img2Img", "Inpaint", "ControlNet", "ImageToVideo", "Image2Video", "InstructPix2Pix", "Upscale", "Edit", "Kontext",
    "Fill", "Redux", "Depth", "Control", "I2V", "I2I", "Inpainting", "VideoDiffusion",
)  # fmt: skip


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
    """Return how many steps a whole generation has."""
    by_default = next((p.default for p in facts.call if p.name == "num_inference_steps"), None)
    asked = settings.steps or settings.call.get("num_inference_steps", defaults.get("num_inference_steps", by_default))
    return asked if isinstance(asked, int) else 50


def steps_rehearsed(scheduler: Any, asked: int, settings: Settings) -> int:
    """Return how many steps are run: enough for a multistep solver to reach its order, the others are like the last."""
    name = type(scheduler).__name__
    order = 3 if any(solver in name for solver in _SOLVERS_OF_ORDER_3) else 1
    return asked if settings.full else min(asked, max(REHEARSED_STEPS, order + 1))


def arguments(
    pipe: Any, facts: PipelineFacts, settings: Settings, defaults: Mapping[str, Any], steps: int
) -> dict[str, Any]:
    """Return the arguments of the call. ``defaults`` are those of the file."""
    known = [parameter.name for parameter in facts.call]
    given: dict[str, Any] = {"num_inference_steps": steps, "prior_num_inference_steps": steps}
    sizes = {"height": settings.height, "width": settings.width, "num_frames": settings.frames}
    given |= {name: value for name, value in sizes.items() if value is not None}
    if settings.batch > 1:
        given |= dict.fromkeys(("num_images_per_prompt", "num_videos_per_prompt"), settings.batch)
    given["generator"] = torch.Generator("cpu").manual_seed(0)
    if "prompt" in known:
        given["prompt"] = PROMPT
    if facts.class_name == "KandinskyV22Pipeline":
        embeds = torch.zeros(1, pipe.unet.config.encoder_hid_dim, dtype=pipe.unet.dtype, device=pipe._execution_device)
        given |= {"image_embeds": embeds, "negative_image_embeds": embeds.clone()}
    if any(word in facts.class_name for word in _TAKING_PICTURES):
        given |= dict.fromkeys(_PICTURES, _picture(settings))
    if "num_frames" in known or "video_length" in known:
        given["output_type"] = "pt"  # else the host would be filled with black frames
    own = {name: value for name, value in defaults.items() if name not in ("seed", "num_inference_steps")}
    chosen = {**given, **own, **{n: v for n, v in settings.call.items() if n != "num_inference_steps"}}
    return {name: value for name, value in chosen.items() if name in known}


def _picture(settings: Settings) -> Any:
    from PIL import Image

    return Image.new("RGB", (settings.width or _DEFAULT_SIDE, settings.height or _DEFAULT_SIDE))
