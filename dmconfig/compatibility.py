"""Do the parts of a pipeline fit together? Told by their configs, where upstream tells by failing in the first step.

Each rule is a statement about numbers in two configs, or about two dtypes; a number that a config does not have is not
guessed, and the rule is silent. Configs are those on this machine, or the packaged ones. Which class fits which
component is in ``facts``; who may be missing, in ``assembly``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dmconfig.assembly import Assembly, Component
from dmconfig.catalog import find_pipeline
from dmconfig.errors import Code, Problem
from dmconfig.facts import PipelineFacts
from dmconfig.paths import ConfigPath
from dmconfig.resolve import Resolved
from dmconfig.spec import Spec
from dmconfig.stored import AUTO, config_of_home, model_config, stored_dtype

Configs = Mapping[str, Mapping[str, Any]]

_SD, _XL = "StableDiffusion", "StableDiffusionXL"


def _latent(channels: int) -> tuple[int, ...]:
    return (channels,)


def _masked(channels: int) -> tuple[int, ...]:
    """Latents alone, or with those of the masked picture and the mask beside them."""
    return (channels, 2 * channels + 1)


def _packed(channels: int) -> tuple[int, ...]:
    return (4 * channels,)


_INPUTS: Mapping[Callable[[int], tuple[int, ...]], Sequence[str]] = {
    _latent: (
        "StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionControlNetPipeline",
        "StableDiffusionControlNetImg2ImgPipeline", "StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline",
        "StableDiffusionXLControlNetPipeline", "StableDiffusionXLControlNetImg2ImgPipeline", "AnimateDiffPipeline",
        "StableDiffusion3Pipeline", "StableDiffusion3Img2ImgPipeline", "StableDiffusion3ControlNetPipeline",
        "WanPipeline", "LTXPipeline",
    ),
    _masked: (
        "StableDiffusionInpaintPipeline", "StableDiffusionControlNetInpaintPipeline",
        "StableDiffusionXLInpaintPipeline", "StableDiffusion3InpaintPipeline",
    ),
    _packed: (
        "FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline", "FluxControlNetPipeline", "FluxKontextPipeline",
    ),
    lambda channels: (2 * channels,): ("StableDiffusionInstructPix2PixPipeline",),
    lambda channels: (channels + 3,): ("StableDiffusionUpscalePipeline",),
    lambda channels: (channels + 1,): ("StableDiffusionDepth2ImgPipeline",),
    lambda channels: (8 * channels + 256,): ("FluxFillPipeline",),
    lambda channels: (8 * channels,): ("FluxControlPipeline", "FluxControlImg2ImgPipeline"),
}  # fmt: skip
"""How many channels the denoiser of a pipeline class is given, from those of the VAE's latents.

Source: the ``prepare_latents`` of each class, and its call of the denoiser.
"""

_WIDTHS: Mapping[str, Sequence[tuple[str, Sequence[tuple[str, str]]]]] = {
    "FluxTransformer2DModel": (
        ("joint_attention_dim", [("text_encoder_2", "d_model")]),
        ("pooled_projection_dim", [("text_encoder", "hidden_size")]),
    ),
    "SD3Transformer2DModel": (
        ("joint_attention_dim", [("text_encoder_3", "d_model")]),
        ("pooled_projection_dim", [("text_encoder", "projection_dim"), ("text_encoder_2", "projection_dim")]),
    ),
    "WanTransformer3DModel": (("text_dim", [("text_encoder", "d_model")]),),
    "LTXVideoTransformer3DModel": (("caption_channels", [("text_encoder", "d_model")]),),
    "CogVideoXTransformer3DModel": (("text_embed_dim", [("text_encoder", "d_model")]),),
    "PixArtTransformer2DModel": (("caption_channels", [("text_encoder", "d_model")]),),
    "AuraFlowTransformer2DModel": (("joint_attention_dim", [("text_encoder", "d_model")]),),
}
"""Of a denoiser's class: a number of its config, and the encoders whose numbers it is the sum of."""

_SAME: Mapping[str, Sequence[str]] = {
    "ControlNetModel": ("cross_attention_dim", "block_out_channels", "layers_per_block"),
    "FluxControlNetModel": ("joint_attention_dim", "attention_head_dim", "num_attention_heads", "in_channels"),
    "SD3ControlNetModel": ("joint_attention_dim", "attention_head_dim", "num_attention_heads"),
    "MotionAdapter": ("block_out_channels",),
}
"""Of a class that adds to a denoiser layer by layer: what it must have in common with it."""

_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


def incompatible_parts(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:  # noqa: ARG001
    """Every pair of components whose configs rule out that one can work on what the other gives."""
    if assembly.code is not None:
        return  # what its own code makes of its components, no rule knows
    configs = {part.name: model_config(part) if part.code is None else {} for part in assembly.components}
    denoisers = [component for component in assembly.modules if component.name in ("unet", "transformer")]
    for denoiser in denoisers:
        for what, why, blamed in (
            *_channels(assembly, denoiser, configs),
            *_widths(denoiser, configs),
            *_additions(assembly, denoiser, configs),
        ):
            yield _problem(resolved, assembly, (denoiser.name, *blamed), what, why)
    for what, why in _scheduler(assembly, configs):
        yield _problem(resolved, assembly, ("scheduler",), what, why)


def _channels(assembly: Assembly, denoiser: Component, configs: Configs) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    vae = configs.get("vae", {})
    latent, given = vae.get("latent_channels", vae.get("z_dim")), configs[denoiser.name].get("in_channels")
    rule = next((rule for rule, classes in _INPUTS.items() if assembly.class_name in classes), None)
    if rule is None or not _are_numbers(latent, given):
        return
    accepted = rule(latent)
    if given not in accepted:
        what = f"{denoiser.name!r} takes {given} channels, and {assembly.class_name} gives it {_or(accepted)}"
        yield what, f"the latents of its VAE have {latent}", ("vae",)
    elif (
        _are_numbers(made := configs[denoiser.name].get("out_channels")) and denoiser.name == "unet" and made != latent
    ):
        what = f"{denoiser.name!r} makes {made} channels, and 'vae' decodes latents of {latent}"
        yield what, "", ("vae",)


def _widths(denoiser: Component, configs: Configs) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    own = configs[denoiser.name]
    for key, encoders in (*_WIDTHS.get(denoiser.class_name, ()), *_unet_widths(denoiser, own, configs)):
        numbers: list[Any] = [configs.get(name, {}).get(number) for name, number in encoders]
        if _are_numbers(own.get(key), *numbers) and own[key] != sum(numbers):
            names = " and ".join(repr(name) for name, _ in encoders)
            width = f"{sum(numbers)} wide" if len(numbers) == 1 else f"{' + '.join(map(str, numbers))} wide together"
            what = (
                f"{denoiser.name!r} takes text of width {own[key]}, and {names} {'is' if len(numbers) == 1 else 'are'}"
            )
            yield f"{what} {width}", f"{key} of {denoiser.class_name}", tuple(name for name, _ in encoders)


def _unet_widths(
    denoiser: Component, own: Mapping[str, Any], configs: Configs
) -> Iterator[tuple[str, Sequence[tuple[str, str]]]]:
    """The rule for UNets whose text goes into cross-attention as the encoders give it."""
    if denoiser.class_name == "UNet2DConditionModel" and not own.get("encoder_hid_dim_type"):
        present = [name for name in _ENCODERS[:2] if configs.get(name)]
        if present and (len(present) == 1 or own.get("addition_embed_type") == "text_time"):
            yield "cross_attention_dim", [(name, "hidden_size") for name in present]


def _additions(assembly: Assembly, denoiser: Component, configs: Configs) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    own = configs[denoiser.name]
    for part in assembly.modules:
        for key in _SAME.get(part.class_name, ()):
            theirs = configs[part.name].get(key)
            if theirs is not None and own.get(key) is not None and theirs != own[key]:
                what = f"{part.name!r} was made for another model than {denoiser.name!r}: its {key} is {theirs}"
                yield what, f"that of {denoiser.name!r} is {own[key]}", (part.name,)
                break


def _scheduler(assembly: Assembly, configs: Configs) -> Iterator[tuple[str, str]]:
    part = next((each for each in assembly.components if each.name == "scheduler"), None)
    slot = next((each for each in assembly.facts.slots if each.name == "scheduler"), None)
    if part is None or slot is None:
        return
    own = {**configs["scheduler"], **(part.config or {})}
    predicts = own.get("prediction_type")
    is_flow = part.class_name.startswith("FlowMatch") or predicts == "flow_prediction" or own.get("use_flow_sigmas")
    if slot.types == ("FlowMatchEulerDiscreteScheduler",) and own and not is_flow:
        yield f"{assembly.class_name} matches flows, and {part.class_name} does not, as it is configured", ""
    elif "KarrasDiffusionSchedulers" in slot.types and part.class_name.startswith("FlowMatch"):
        yield f"{part.class_name} matches flows, and the denoiser of {assembly.class_name} predicts noise", ""
    elif predicts not in (None, "epsilon") and "prediction_type" not in part.facts.init_parameters:
        yield f"the denoiser predicts {predicts}, and {part.class_name} knows epsilon alone", ""
    trained = config_of_home(assembly.source, "scheduler").get("prediction_type")
    if part.home is not assembly.source and "prediction_type" not in (part.config or {}) and None not in (
        trained, predicts
    ) and trained != predicts:  # fmt: skip
        what = f"the scheduler takes what the denoiser predicts for {predicts}, and it was trained for {trained}"
        yield what, "as the scheduler beside it says; pictures would be noise"


# Dtypes

_MEET: Mapping[str, Sequence[Sequence[str]]] = {
    "stable_diffusion": (("text_encoder", "unet", "vae"),),
    "stable_diffusion_xl": (("text_encoder_2", "unet"),),
    "controlnet": (("text_encoder", "unet", "vae"),),
    "stable_diffusion_3": (("transformer", "vae"),),
    "flux": (("text_encoder", "text_encoder_2", "transformer", "vae"),),
    "ltx": (("text_encoder", "transformer"),),
    "kandinsky2_2": (("unet", "movq"), ("prior_prior", "prior_text_encoder")),
}
"""Of the pipelines in a package of diffusers: components that hand on what they make in the dtype it is in.

Source: runs of all pairs of dtypes, which the tests repeat.
"""
_EVERYWHERE = (("unet", "controlnet"), ("transformer", "controlnet"), ("transformer", "transformer_2"))


AUTOENCODERS = ("vae", "movq")
"""Components that are given one thing in one place, latents or pictures, so that a cast there is all that is needed."""


def casting_inputs(assembly: Assembly, dtypes: Mapping[str, str]) -> Iterator[str]:
    """Yield the autoencoders of another dtype than what meets them: what enters them is cast, and nothing refused."""
    for name in AUTOENCODERS:
        groups = (group for group in _groups(assembly) if name in group)
        others = {dtypes[each] for group in groups for each in group if each in dtypes}
        if name in dtypes and others - {dtypes[name]}:
            yield name


def incompatible_dtypes(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:  # noqa: ARG001
    """Components that meet in one operation, and are told to be of two dtypes: torch refuses that in the first step."""
    dtypes = {component.name: component.dtype for component in assembly.modules if component.dtype != AUTO}
    for known in _meetings(assembly, dtypes):
        what = f"what these hand to each other must be of one dtype: {_each(known)}"
        fix = f"write one dtype for {' and '.join(known)}, or pipeline.dtype for all"
        yield resolved.problem(Code.INCOMPATIBLE_DTYPES, _dtype_path(resolved, known), what, fix=fix)
        return


def dtype_notes(assembly: Assembly) -> Iterator[str]:
    """Yield a sentence per group of components that are stored in two dtypes, meet in one operation, and fail there.

    And one per component to whose dtype what enters it is cast.
    """
    dtypes = {component.name: dtype for component in assembly.modules if (dtype := _dtype_of(component))}
    for name in casting_inputs(assembly, dtypes):
        yield f"what {name} decodes is cast to its {dtypes[name]} first, and what it encodes is cast back"
    for known in _meetings(assembly, dtypes):
        yield f"will fail in its first call, because one dtype is needed where these meet: {_each(known)}; write dtype"
        return


def _meetings(assembly: Assembly, dtypes: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Yield the groups that have two dtypes among them, in a place where nothing is cast."""
    for group in (*_groups(assembly), *_EVERYWHERE):
        known = {name: dtypes[name] for name in group if name in dtypes and name not in AUTOENCODERS}
        if len(set(known.values())) > 1:
            yield known


def _each(dtypes: Mapping[str, str]) -> str:
    return ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())


def _groups(assembly: Assembly) -> Iterator[Sequence[str]]:
    """The groups of all pipelines of an assembly; what own code makes of its components, no rule knows."""
    own = () if assembly.code is not None else (assembly.facts,)
    for facts in (*own, *(each.facts for each in assembly.sharing)):
        yield from _groups_of(facts)


def _groups_of(facts: PipelineFacts) -> Iterator[Sequence[str]]:
    package = facts.module.split(".")[2]
    is_xl = facts.class_name.startswith(_XL)
    yield from _MEET.get("stable_diffusion_xl" if is_xl else package, ())
    if is_xl and not any(word in facts.class_name for word in ("Img2Img", "Inpaint")):
        yield ("unet", "vae")  # those that are given a picture cast what they hand to the VAE


def _dtype_of(component: Component) -> str | None:
    if component.dtype != AUTO:
        return component.dtype
    stored = stored_dtype(component)
    if stored is None and component.folder is None and component.home.hub_id and not component.is_single_file:
        known = find_pipeline(component.home.hub_id)
        part = known.component(component.name_there) if known else None
        stored = part.stored_dtype if part else None
    return stored


def _dtype_path(resolved: Resolved, names: Mapping[str, str]) -> ConfigPath:
    """Where the file says the dtype of one of these, or where they come from."""
    written = resolved.data.get("components") or {}
    for name in names:
        if "dtype" in (written.get(name) or {}):
            return ("components", name, "dtype")
    return ("pipeline", "dtype") if "dtype" in resolved.data["pipeline"] else ("pipeline", "source")


# Words


def _are_numbers(*values: object) -> bool:
    return bool(values) and all(type(value) is int for value in values)


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


def _problem(resolved: Resolved, assembly: Assembly, names: Sequence[str], what: str, why: str) -> Problem:
    """A problem at the first of these components that the file gives a source or class, or at the pipeline's class."""
    paths = {component.name: component.path for component in assembly.components}
    own = next((paths[name] for name in names if paths.get(name, ("pipeline",))[0] == "components"), None)
    by_class = ("pipeline", "class") if "class" in resolved.data["pipeline"] else ("pipeline", "source")
    fix = f"give {' or '.join(f'components.{name}' for name in dict.fromkeys(names))} a source that fits"
    if own is None:
        fix = f"{fix}, or name the pipeline's class that is made for these weights under pipeline.class"
    return resolved.problem(Code.INCOMPATIBLE_PARTS, own or by_class, what, why=why, fix=fix)
