"""How often each component runs per generation, and how much it computes: what moving weights is priced by.

Most follows from a component's role and the steps of the call. What a class does otherwise, no class says of itself;
it was read from the pipelines' code and stands in two tables. The file's ``calls`` overrules both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dmconfig.assembly import DENOISER_NAMES, Assembly
from dmconfig.facts import PipelineFacts
from dmconfig.spec import Spec

DEFAULT_STEPS = 50
_STEPS = "num_inference_steps"
_PER_STEP = (*DENOISER_NAMES, "controlnet")

CALLS_PER_STEP: Mapping[str, float] = {
    **dict.fromkeys(
        ("Kandinsky5T2IPipeline", "Kandinsky5I2IPipeline", "Kandinsky5T2VPipeline", "Kandinsky5I2VPipeline"), 2
    ),
    **dict.fromkeys(("Lumina2Pipeline", "Lumina2Text2ImgPipeline"), 2),
    **dict.fromkeys(("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline", "WanVACEPipeline"), 2),
}
"""Pipelines that call their denoiser apart for the prompt and for the negative one; others do both in one batch."""

SHARE_OF_FIRST = 0.32
"""Of the steps of a pipeline with two denoisers (Wan 2.2), those of the first: 16 of 50 with its own scheduler."""

ONE_TEXT_CALL = frozenset(
    {"FluxPipeline", "HunyuanVideoPipeline", "QwenImagePipeline", "StableDiffusionXLPipeline", "Flux2Pipeline",
     "Flux2KleinPipeline"}
)  # fmt: skip
"""Pipelines with a negative prompt and guidance that by default encode no negative prompt."""

FRAMES = ("num_frames", "video_length", "frames")
"""What pipelines call the length of a film."""

DENOISER, DECODER = "denoiser", "decoder"
TOKENS = {DENOISER: 4096, "text encoder": 512, "image encoder": 257, DECODER: 16384}
"""How many vectors a call takes through the weights, roughly: a 1024 px image in latent patches, a full prompt."""


class Runs(NamedTuple):
    """How often a component runs per generation, and how many vectors go through its weights each time."""

    calls: float
    tokens: int


def runs_of(spec: Spec, assembly: Assembly) -> Mapping[str, Runs]:
    """Return how every component with weights runs, as the file says or as its class does by default.

    One that was copied into another never does.
    """
    names = [component.name for component in assembly.modules]
    copied = {component.takes_in for component in assembly.modules}
    runs = {name: _runs(name, names, spec, assembly.facts) for name in names}
    return {name: Runs(0, each.tokens) if name in copied - {*spec.calls} else each for name, each in runs.items()}


def _runs(name: str, names: list[str], spec: Spec, facts: PipelineFacts) -> Runs:
    role = role_of(name)
    if name in spec.calls:
        return Runs(spec.calls[name], TOKENS[role])
    if role == DENOISER:
        return Runs(_steps(name, spec, facts) * _per_step(name, names, facts.class_name), TOKENS[role])
    return Runs(_text_calls(facts) if role == "text encoder" else 1, TOKENS[role])


def frames_of(spec: Spec, facts: PipelineFacts) -> int | None:
    """Return how many frames the call's film has, as the file says or by default; None for a picture, or untold."""
    given = {parameter.name: spec.call.get(parameter.name, parameter.default) for parameter in facts.call}
    frames = next((given[name] for name in FRAMES if name in given), None)
    return frames if isinstance(frames, int) and frames > 1 else None


def role_of(name: str) -> str:
    """Return what a component of this name does: one of the keys of ``TOKENS``."""
    bare = name.removeprefix("prior_").removeprefix("decoder_")
    if any(bare.startswith(word) for word in _PER_STEP):
        return DENOISER
    if "text_encoder" in name:
        return "text encoder"
    return "image encoder" if "image_encoder" in name or "safety_checker" in name else DECODER


def _steps(name: str, spec: Spec, facts: PipelineFacts) -> float:
    own = [f"{prefix}{_STEPS}" for prefix in ("prior_", "decoder_") if name.startswith(prefix)]
    defaults = {parameter.name: parameter.default for parameter in facts.call}
    for key in (*own, _STEPS):
        value = spec.call.get(key, defaults.get(key))
        if isinstance(value, int):
            return value
    return DEFAULT_STEPS


def _per_step(name: str, names: list[str], class_name: str) -> float:
    per_step = CALLS_PER_STEP.get(class_name, 1)
    second = f"{name.removesuffix('_2')}_2"
    if second not in names or second.removesuffix("_2") not in names:
        return per_step
    return per_step * (1 - SHARE_OF_FIRST if name == second else SHARE_OF_FIRST)


def _text_calls(facts: PipelineFacts) -> int:
    """Two where the negative prompt is encoded apart, as by default it is wherever guidance is on."""
    parameters = {parameter.name: parameter.default for parameter in facts.call}
    guidance = parameters.get("guidance_scale")
    guided = isinstance(guidance, (int, float)) and guidance > 1
    negative = any(name.startswith("negative_prompt") for name in parameters)
    return 2 if negative and guided and facts.class_name not in ONE_TEXT_CALL else 1
