"""Parts that do not fit together, told by their configs: every rule on configs that are here, no false alarm on any."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmconfig.catalog import known_ids
from dmconfig.check import check
from dmconfig.compatibility import casting_inputs, dtype_notes, incompatible_dtypes, incompatible_parts
from dmconfig.configs import config_folder
from dmconfig.document import parse_document
from dmconfig.errors import Code, DMConfigError, Problem
from dmconfig.resolve import resolve
from dmconfig.spec import validate_spec
from tests.conftest import checked_from

SD = "stable-diffusion-v1-5/stable-diffusion-v1-5"
XL = "stabilityai/stable-diffusion-xl-base-1.0"


def packaged(hub_id: str) -> Path:
    folder = config_folder(hub_id)
    assert folder is not None
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Path]:
    """Copy the packaged configs of a pipeline, with values of one component's config changed."""

    def make(hub_id: str, component: str = "", **values: Any) -> Path:
        folder = tmp_path / "pipeline"
        shutil.copytree(packaged(hub_id), folder)
        tokenizers = [n for n, v in json.loads((folder / "model_index.json").read_text()).items() if "token" in n]
        for name in (*tokenizers, "feature_extractor"):
            (folder / name).mkdir(exist_ok=True)  # of which nothing is packaged
        if component:
            name = "scheduler_config.json" if component == "scheduler" else "config.json"
            file = folder / component / name
            file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
        return folder

    return make


def problems(folder: Path, more: str = "", head: str = "") -> tuple[Problem, ...]:
    text = f"version: 1\npipeline: {{source: ./pipeline{head}}}\n{more}"
    resolved = resolve(parse_document(text, name="pipe.yaml", folder=folder.parent))
    try:
        check(resolved, validate_spec(resolved))
    except DMConfigError as error:
        return error.problems
    return ()


def said(folder: Path, more: str = "", head: str = "") -> str:
    """Return the what of the one problem there is, which is about parts that do not fit."""
    (problem,) = problems(folder, more, head)
    assert problem.code is Code.INCOMPATIBLE_PARTS
    return problem.what


@pytest.mark.parametrize("hub_id", [each for each in known_ids() if "/" in each])
def test_published_pipelines_fit(hub_id: str) -> None:
    """No rule speaks of a pipeline as it is published."""
    checked = checked_from(f"version: 1\npipeline: {{source: {hub_id}}}\n")
    arguments = (checked.resolved, checked.spec, checked.assembly)
    assert [*incompatible_parts(*arguments), *incompatible_dtypes(*arguments)] == []


def test_a_plain_pipeline_fits_itself(copy: Callable[..., Path]) -> None:
    """The folders of these tests are right before they are changed."""
    assert problems(copy(SD)) == ()


def test_channels_of_a_text_to_image_pipeline(copy: Callable[..., Path]) -> None:
    """Weights for inpainting in a class that does not inpaint."""
    folder = copy(SD, "unet", in_channels=9)
    assert said(folder) == "'unet' takes 9 channels, and StableDiffusionPipeline gives it 4"
    assert problems(folder, head=", class: StableDiffusionInpaintPipeline") == ()


def test_channels_of_other_classes(copy: Callable[..., Path]) -> None:
    """Plain weights in a class that puts a picture beside the latents; inpainting takes plain ones too."""
    folder = copy(SD)
    given = said(folder, head=", class: StableDiffusionInstructPix2PixPipeline")
    assert given == "'unet' takes 4 channels, and StableDiffusionInstructPix2PixPipeline gives it 8"
    assert problems(folder, head=", class: StableDiffusionInpaintPipeline") == ()


def test_channels_of_the_vae(copy: Callable[..., Path]) -> None:
    """A VAE of another family."""
    what = said(copy(SD, "vae", latent_channels=16))
    assert what == "'unet' takes 4 channels, and StableDiffusionPipeline gives it 16"


def test_channels_that_a_unet_makes(copy: Callable[..., Path]) -> None:
    """A UNet that makes what the VAE does not decode."""
    assert said(copy(SD, "unet", out_channels=8)) == "'unet' makes 8 channels, and 'vae' decodes latents of 4"


def test_channels_of_flux(copy: Callable[..., Path]) -> None:
    """FLUX packs four latents into one; its Fill has the mask and the picture beside them."""
    folder = copy("black-forest-labs/FLUX.1-dev", "transformer", in_channels=384)
    assert said(folder) == "'transformer' takes 384 channels, and FluxPipeline gives it 64"
    fill = problems(folder, head=", class: FluxFillPipeline")
    assert not [problem for problem in fill if problem.code is Code.INCOMPATIBLE_PARTS]


@pytest.mark.parametrize(
    ("hub_id", "component", "values", "what"),
    [
        (SD, "text_encoder", {"hidden_size": 1024}, "takes text of width 768, and 'text_encoder' is 1024 wide"),
        (
            XL, "text_encoder_2", {"hidden_size": 1024},
            "takes text of width 2048, and 'text_encoder' and 'text_encoder_2' are 768 + 1024 wide together",
        ),
        (
            "black-forest-labs/FLUX.1-dev", "text_encoder_2", {"d_model": 2048},
            "takes text of width 4096, and 'text_encoder_2' is 2048 wide",
        ),
        (
            "stabilityai/stable-diffusion-3-medium-diffusers", "text_encoder_3", {"d_model": 768},
            "takes text of width 4096, and 'text_encoder_3' is 768 wide",
        ),
        (
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "text_encoder", {"d_model": 768},
            "takes text of width 4096, and 'text_encoder' is 768 wide",
        ),
    ],
)  # fmt: skip
def test_widths_of_text(copy: Callable[..., Path], hub_id: str, component: str, values: Any, what: str) -> None:
    """An encoder of another width than the denoiser's cross-attention."""
    assert what in said(copy(hub_id, component, **values))


def test_a_controlnet_of_another_family(copy: Callable[..., Path]) -> None:
    """One that was made for another UNet."""
    folder = copy("stable-diffusion-v1-5/stable-diffusion-v1-5")
    controlnet = folder.parent / "canny"
    shutil.copytree(config_of_controlnet(), controlnet)
    text = "components: {controlnet: {source: ./canny}}\n"
    head = ", class: StableDiffusionControlNetPipeline"
    assert problems(folder, text, head) == ()
    config = json.loads((controlnet / "config.json").read_text())
    (controlnet / "config.json").write_text(json.dumps({**config, "cross_attention_dim": 1024}))
    assert said(folder, text, head) == (
        "'controlnet' was made for another model than 'unet': its cross_attention_dim is 1024"
    )


def config_of_controlnet() -> Path:
    return packaged(SD).parent / "sd15-controlnet-canny" / "controlnet"


def test_a_scheduler_that_matches_flows(copy: Callable[..., Path]) -> None:
    """Flow matching where noise is predicted."""
    what = said(copy(SD), "components: {scheduler: {class: FlowMatchEulerDiscreteScheduler}}\n")
    assert what.startswith("FlowMatchEulerDiscreteScheduler matches flows")


def test_a_scheduler_that_matches_no_flow(copy: Callable[..., Path]) -> None:
    """Another solver may match flows too, if it is told to."""
    flux = copy("black-forest-labs/FLUX.1-dev")
    assert "does not, as it is configured" in said(flux, "components: {scheduler: {class: EulerDiscreteScheduler}}\n")
    more = "components: {scheduler: {class: DPMSolverMultistepScheduler, config: {use_flow_sigmas: true}}}\n"
    assert problems(flux, more) == ()


def test_prediction_type_of_a_scheduler_from_elsewhere(copy: Callable[..., Path]) -> None:
    """A scheduler of another pipeline reads the denoiser's output as another thing, until the file says which."""
    folder = copy(SD)
    other = folder.parent / "v-scheduler"
    shutil.copytree(folder / "scheduler", other)
    config = json.loads((other / "scheduler_config.json").read_text())
    (other / "scheduler_config.json").write_text(json.dumps({**config, "prediction_type": "v_prediction"}))
    own = folder / "scheduler" / "scheduler_config.json"
    own.write_text(json.dumps({**json.loads(own.read_text()), "prediction_type": "epsilon"}))
    what = said(folder, "components: {scheduler: {source: ./v-scheduler}}\n")
    assert what == "the scheduler takes what the denoiser predicts for v_prediction, and it was trained for epsilon"
    more = "components: {scheduler: {source: ./v-scheduler, config: {prediction_type: epsilon}}}\n"
    assert problems(folder, more) == ()


@pytest.mark.parametrize(
    ("head", "more", "names"),
    [
        (", dtype: fp16", "text_encoder: {dtype: fp32}", "text_encoder is float32, unet is float16"),
        (
            ", dtype: fp16",
            "unet: {dtype: bf16}, vae: {dtype: fp32}",
            "text_encoder is float16, unet is bfloat16",
        ),
    ],
)
def test_dtypes_that_cannot_meet(copy: Callable[..., Path], head: str, more: str, names: str) -> None:
    """Told at the dtype of one of them, with all that meet there."""
    (problem,) = problems(copy(SD), f"components: {{{more}}}\n", head)
    assert (problem.code, problem.what) == (
        Code.INCOMPATIBLE_DTYPES, f"what these hand to each other must be of one dtype: {names}",
    )  # fmt: skip


def test_an_autoencoder_of_another_dtype_is_cast_to(copy: Callable[..., Path]) -> None:
    """It is given one thing in one place, so nothing is refused, and the plan says what will be done."""
    assert problems(copy(SD), "components: {vae: {dtype: float32}}\n", ", dtype: float16") == ()
    text = f"version: 1\npipeline: {{source: {SD}, dtype: float16}}\ncomponents: {{vae: {{dtype: float32}}}}\n"
    assert [*dtype_notes(checked_from(text).assembly)] == [
        "what vae decodes is cast to its float32 first, and what it encodes is cast back"
    ]
    sharing = "pipelines: {again: {class: StableDiffusionImg2ImgPipeline}}\n"
    assembly = checked_from(f"{text}{sharing}").assembly
    assert [*casting_inputs(assembly, {"unet": "float16", "vae": "float32"})] == ["vae"]
    assert [*casting_inputs(assembly, {"unet": "float16", "vae": "float16", "safety_checker": "float32"})] == []


def test_dtypes_that_meet_nowhere_are_fine(copy: Callable[..., Path]) -> None:
    """The safety checker is given pictures; Wan casts what it hands on."""
    assert problems(copy(SD), "components: {safety_checker: {dtype: float32}}\n", ", dtype: float16") == ()
    wan = "version: 1\npipeline: {source: Wan-AI/Wan2.1-T2V-1.3B-Diffusers, dtype: bf16}\n"
    assert checked_from(f"{wan}components: {{vae: {{dtype: fp32}}}}\n")


def test_stored_dtypes_that_cannot_meet_are_remarked_on() -> None:
    """What nobody wrote is not refused, but the plan says what will happen, and what to write."""
    checked = checked_from(f"version: 1\npipeline: {{source: {SD}}}\ncomponents: {{unet: {{dtype: bfloat16}}}}\n")
    cast, note = dtype_notes(checked.assembly)
    assert cast == "what vae decodes is cast to its float32 first, and what it encodes is cast back"
    assert note == (
        "will fail in its first call, because one dtype is needed where these meet: "
        "text_encoder is float32, unet is bfloat16; write dtype"
    )
