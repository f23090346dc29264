"""The arguments of a rehearsed call: what the file and the user say, and sensible ones for what a pipeline needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dmconfig.check import COUNTS
from dmconfig.errors import Code, Problem
from dmconfig.facts import CallParameter, PipelineFacts
from dmconfig.inputs import SEED
from dmconfig.plan.calls import FRAMES
from dmconfig.rehearse.scaling import Steps
from dmconfig.rehearse.script import Settings

PROMPT = "a photo of an astronaut riding a horse on the moon, 4k"
MAIN = "scheduler"
"""What pipelines call the scheduler whose steps a user asks for; others have a prefix (``prior_scheduler``)."""
_REHEARSED_STEPS = 2
_STEPS = "num_inference_steps"
_ORDERS = {
    "PNDM": 4, "LMS": 4, "UniPC": 2, "DPMSolver": 2, "CogVideoXDPM": 2, "DEIS": 2, "SASolver": 3,
    "DDPM": 2, "UnCLIP": 2, "LCM": 2, "TCD": 2,
}  # fmt: skip
"""Parts of the names of multistep schedulers, and how many steps back they look where their config does not say.

Those of the second line look back at one, and add noise in all steps but the last, which so is like no other.
"""
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


def steps_of(pipe: Any, facts: PipelineFacts, settings: Settings, defaults: Mapping[str, Any]) -> dict[str, Steps]:
    """Return by the name of each scheduler, the main one always there, how many steps it runs and has in all.

    Enough are run for a multistep solver to reach its order, and one more; the others are like the last.
    """
    asked = {name: _asked(name, facts, settings, defaults) for name in (MAIN, *_other_schedulers(facts))}
    enough = max(_REHEARSED_STEPS, *(_order(getattr(pipe, name, None)) + 1 for name in asked))
    return {name: Steps(each if settings.full else min(each, enough), each) for name, each in asked.items()}


def _other_schedulers(facts: PipelineFacts) -> Iterator[str]:
    """The schedulers whose steps are counted by a parameter of their own."""
    for parameter in facts.call:
        prefix = parameter.name.removesuffix(_STEPS)
        if prefix and parameter.name.endswith(_STEPS):
            yield f"{prefix}{MAIN}"


def _asked(scheduler: str, facts: PipelineFacts, settings: Settings, defaults: Mapping[str, Any]) -> int:
    """How many steps a scheduler has in a whole generation; of a picture that is given, those its strength leaves."""
    chosen = _chosen(_parameter(scheduler), facts, settings, defaults)
    asked = settings.steps if scheduler == MAIN and settings.steps else chosen
    share = _strength(facts, settings, defaults) if scheduler == MAIN else 1.0
    return max(1, int((asked if isinstance(asked, int) else 50) * share))


def _parameter(scheduler: str) -> str:
    return scheduler.removesuffix(MAIN) + _STEPS


def _order(scheduler: Any) -> int:
    """How many steps back a scheduler looks, or has to be looked at."""
    name = type(scheduler).__name__
    known = next((order for part, order in _ORDERS.items() if part in name), 1)
    stated = getattr(getattr(scheduler, "config", None), "solver_order", None)
    return stated if known > 1 and isinstance(stated, int) else known


def meaningless(settings: Settings, facts: PipelineFacts) -> Iterator[Problem]:
    """Yield what is asked of a pipeline that its call has no parameter for, so that nothing is ignored in silence."""
    known = {parameter.name for parameter in facts.call}
    sized, films = _takes_pictures(facts), (*FRAMES, *_FILMS)
    asked = (
        ("--height", settings.height, sized or "height" in known, "draws at a size of its own"),
        ("--width", settings.width, sized or "width" in known, "draws at a size of its own"),
        ("--frames", settings.frames, not known.isdisjoint(films), "makes no film"),
        ("--steps", settings.steps, _STEPS in known, "has no number of steps"),
        ("--batch", settings.batch, not known.isdisjoint((*COUNTS, "prompt")), "makes one picture at once"),
    )
    for origin, value, is_known, what in asked:
        if value is not None and not is_known:
            words = f"{facts.class_name} {what}"
            yield Problem(code=Code.UNKNOWN_CALL_ARGUMENT, what=words, fix=f"leave {origin} out", origin=origin)


def call_of(settings: Settings, facts: PipelineFacts) -> dict[str, int]:
    """Return what is asked beyond the file as arguments that a file can hold under ``call``."""
    known = {parameter.name for parameter in facts.call}
    asked = {
        "height": settings.height,
        "width": settings.width,
        **dict.fromkeys(FRAMES, settings.frames),
        _STEPS: settings.steps,
        **dict.fromkeys(COUNTS, settings.batch),
    }
    return {name: value for name, value in asked.items() if name in known and value is not None}


def arguments(
    pipe: Any, facts: PipelineFacts, settings: Settings, defaults: Mapping[str, Any], steps: Mapping[str, Steps]
) -> dict[str, Any]:
    """Return the arguments of the call. ``defaults`` are those of the file, ``steps`` how many are to run.

    Sizes that the signature states are among them, so that what comes out can be held against what was asked for.
    """
    known = {parameter.name: parameter for parameter in facts.call}
    counts = {_parameter(name): each.run for name, each in steps.items()}
    counts[_STEPS] = math.ceil(counts[_STEPS] / _strength(facts, settings, defaults))
    made = {"generator": torch.Generator("cpu").manual_seed(0), **_texts(known), **_embeddings(pipe, known)}
    if not known.keys().isdisjoint((*FRAMES, *_FILMS)):
        made["output_type"] = "pt"  # else the host would be filled with black frames
    of_file = {name: value for name, value in defaults.items() if name != SEED}
    asked = {**call_of(settings, facts), **settings.call, **counts}
    chosen = _as_batch({**_sizes(known, settings), **made, **of_file, **asked}, known, settings)
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
    asked = {"height": settings.height, "width": settings.width, **dict.fromkeys(FRAMES, settings.frames)}
    stated = {name: known[name].default for name in asked if name in known}
    either = {name: stated.get(name) if value is None else value for name, value in asked.items()}
    return {name: value for name, value in either.items() if isinstance(value, int)}


def _texts(known: Mapping[str, CallParameter]) -> dict[str, str]:
    """The prompt, and what else has to be there of its kind."""
    required = [name for name, parameter in known.items() if parameter.required and name.endswith("prompt")]
    return dict.fromkeys(("prompt", *required), PROMPT)


def _as_batch(call: dict[str, Any], known: Mapping[str, CallParameter], settings: Settings) -> dict[str, Any]:
    """A call for several at once: of one that no parameter tells how many, as many prompts."""
    batch = settings.batch or 1
    if batch == 1 or not known.keys().isdisjoint(COUNTS):
        return call
    return {
        name: [value] * batch if "prompt" in name and isinstance(value, str) else value for name, value in call.items()
    }


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
    stated = next((chosen[name] for name in FRAMES if isinstance(chosen.get(name), int)), None)
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
