"""``load_from_yaml`` on the trained digits pipeline, on the cpu: what it returns and what it refuses."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, EulerDiscreteScheduler, StableDiffusionPipeline
from safetensors.torch import load_file, save_file

from dmconfig import DMConfigError, load_from_yaml, plan_from_yaml
from tests.virtual_devices import MakeMachine

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits.yaml"
PIPELINE = ROOT / "examples" / "digits" / "pipeline"
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the digits pipeline that a test may damage."""
    folder = tmp_path / "pipeline"
    shutil.copytree(PIPELINE, folder)
    return folder


def write_spec(folder: Path, text: str) -> Path:
    """Return a spec file beside folder."""
    file = folder.parent / "pipe.yaml"
    file.write_text(f"version: 1\n{text}\n", encoding="utf-8")
    return file


def picture(pipe: Any, *args: Any, **more: Any) -> np.ndarray:
    """Return one picture as floats, with few steps."""
    pipe.set_progress_bar_config(disable=True)
    images: np.ndarray = pipe(*args, output_type="np", **{"num_inference_steps": 2, **more}).images
    return images


def parameter_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of a module's parameters."""
    return sum(tensor.numel() * tensor.element_size() for tensor in module.parameters())


def test_a_real_pipeline_comes_back() -> None:
    """What is returned is the diffusers pipeline of the source, ready to call, with a complete map."""
    pipe = load_from_yaml(DIGITS)

    assert isinstance(pipe, DiffusionPipeline)
    assert isinstance(pipe, StableDiffusionPipeline)
    assert type(pipe).__name__ == "StableDiffusionPipeline"
    assert pipe.hf_device_map == {"unet": "cpu", "vae": "cpu", "text_encoder": "cpu"}
    assert picture(pipe, "seven").shape == (1, 32, 32, 3)


def test_planned_bytes_are_loaded_bytes() -> None:
    """The plan's sizes, read from headers, are those of the parameters once loaded, at every dtype."""
    for dtype in ("auto", "float16", "bfloat16", "float32"):
        overrides = {"pipeline.dtype": dtype}
        plan, pipe = plan_from_yaml(DIGITS, overrides), load_from_yaml(DIGITS, overrides)
        for assignment in plan.assignments:
            assert assignment.nbytes == parameter_bytes(getattr(pipe, assignment.component))


def test_overrides_take_python_values(virtual_machine: MakeMachine, tmp_path: Path) -> None:
    """An int, a torch.device, a torch.dtype and a path are as good as their text."""
    virtual_machine()
    by_number = load_from_yaml(DIGITS, {"device_map": 1, "reserve": 0, "pipeline.source": PIPELINE})
    by_device = load_from_yaml(
        DIGITS, {"device_map": torch.device("cuda", 1), "reserve": 0, "pipeline.dtype": torch.float16}
    )

    assert set(by_number.hf_device_map.values()) == {"cuda:1"}
    assert by_number.hf_device_map == by_device.hf_device_map
    assert by_device.unet.dtype == torch.float16


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ({"devicemap": 0}, "DM202"),
        ({"device_map": {"unett": 0, "default": "cpu"}}, "DM302"),
        ({"components.vay.dtype": "float16"}, "DM302"),
        ({"call.steps": 3}, "DM309"),
        ({"pipeline.dtype": torch.int8}, "DM209"),
        ({"device_map": object()}, "DM151"),
        ({"device_map": -1}, "DM206"),
    ],
)
def test_an_override_that_matches_nothing_is_refused(override: dict[str, Any], code: str) -> None:
    """A key or a value that does not exist is an error that names the override, never ignored."""
    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(DIGITS, override)

    problem = caught.value.problems[0]
    assert problem.code == code
    assert problem.origin == f"overrides[{next(iter(override))!r}]"


def test_the_calls_defaults_hold_and_give_way() -> None:
    """Defaults of the file are used when the caller says nothing, for arguments by name and by position."""
    pipe = load_from_yaml(DIGITS, {"call": {"num_inference_steps": 2, "height": 16, "width": 16, "seed": 3}})
    plain = DiffusionPipeline.from_pretrained(PIPELINE)
    pipe.set_progress_bar_config(disable=True)

    small = pipe("seven", output_type="np").images
    wide = pipe("seven", 32, output_type="np").images  # height is the second parameter
    seeded = picture(plain, "seven", height=16, width=16, generator=torch.Generator().manual_seed(3))

    assert small.shape == (1, 16, 16, 3)
    assert wide.shape == (1, 32, 16, 3)
    assert np.array_equal(small, seeded)
    assert np.array_equal(small, pipe("seven", output_type="np").images)


def test_components_can_differ_from_the_source(copied: Path) -> None:
    """A component from another folder, in its own dtype, and a scheduler of another class with its own settings."""
    shutil.move(copied / "vae", copied.parent / "my-vae")
    file = write_spec(
        copied,
        "pipeline: {source: ./pipeline, dtype: float32}\n"
        "components:\n"
        "  vae: {source: ./my-vae, dtype: float16}\n"
        "  unet: {dtype: float16}\n"
        "  text_encoder: {dtype: half}\n"
        "  scheduler: {class: EulerDiscreteScheduler, config: {timestep_spacing: trailing}}\n",
    )

    pipe = load_from_yaml(file)

    assert (pipe.unet.dtype, pipe.vae.dtype, pipe.text_encoder.dtype) == (torch.float16,) * 3
    assert isinstance(pipe.scheduler, EulerDiscreteScheduler)
    assert pipe.scheduler.config.timestep_spacing == "trailing"
    assert pipe.scheduler.config.beta_schedule == "scaled_linear"  # the source's own stays


def test_auto_keeps_what_is_stored(copied: Path) -> None:
    """Weights stored in half precision stay so: nothing is widened to float32 in silence."""
    DiffusionPipeline.from_pretrained(copied).to(torch.float16).save_pretrained(copied)

    pipe = load_from_yaml(write_spec(copied, "pipeline: {source: ./pipeline}"))

    assert {part.dtype for part in (pipe.unet, pipe.vae, pipe.text_encoder)} == {torch.float16}


def test_a_variant_is_used_where_there_is_one(copied: Path) -> None:
    """The asked variant is loaded; a component without it uses its plain weights, and the plan says so."""
    half = DiffusionPipeline.from_pretrained(copied).to(torch.float16).unet
    half.save_pretrained(copied / "unet", variant="fp16")
    file = write_spec(copied, "pipeline: {source: ./pipeline, variant: fp16}")

    plan = plan_from_yaml(file)

    assert {a.component: a.dtype for a in plan.assignments} == {
        "unet": "float16", "vae": "float32", "text_encoder": "float32",
    }  # fmt: skip
    assert "vae has no fp16 weights; its plain ones are used" in plan.notes
    assert load_from_yaml(file).unet.dtype == torch.float16


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("conv_in.weight"), "its weights lack conv_in.weight"),
        (lambda tensors: tensors.update({"conv_in.bias": torch.zeros(5)}), "conv_in.bias"),
    ],
    ids=["missing", "misshapen"],
)
def test_weights_that_do_not_fit_the_config_are_refused(copied: Path, change: Any, said: str) -> None:
    """A tensor that is missing or of another shape is an error, not random numbers and a warning."""
    tensors = load_file(copied / "unet" / WEIGHTS)
    change(tensors)
    save_file(tensors, copied / "unet" / WEIGHTS, metadata={"format": "pt"})

    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(write_spec(copied, "pipeline: {source: ./pipeline}"))

    assert caught.value.exit_code == 4
    assert caught.value.problems[0].code == "DM601"
    assert "'unet' (UNet2DConditionModel)" in caught.value.problems[0].what
    assert said in caught.value.problems[0].what
    assert caught.value.__cause__ is not None


def test_everything_missing_is_listed_before_anything_is_loaded(copied: Path) -> None:
    """Weights that are not there are found by the check, all of them at once."""
    (copied / "unet" / WEIGHTS).unlink()
    (copied / "vae" / WEIGHTS).unlink()

    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(write_spec(copied, "pipeline: {source: ./pipeline}"))

    assert [problem.code for problem in caught.value.problems] == ["DM404", "DM404"]


def test_a_saved_copy_is_a_plain_pipeline(tmp_path: Path) -> None:
    """What the returned pipeline saves names the diffusers class and loads without dmconfig."""
    load_from_yaml(DIGITS).save_pretrained(tmp_path)

    index = json.loads((tmp_path / "model_index.json").read_text(encoding="utf-8"))
    assert index["_class_name"] == "StableDiffusionPipeline"
    assert type(DiffusionPipeline.from_pretrained(tmp_path)) is StableDiffusionPipeline


def test_loading_leaves_the_process_as_it_was() -> None:
    """Garbage collection and the libraries' progress bars are as before, also after a failure."""
    from transformers.utils import logging

    for overrides in ({}, {"call": {"seed": "x"}}):
        try:
            load_from_yaml(DIGITS, overrides)
        except DMConfigError:
            assert overrides
        assert gc.isenabled()
        assert logging.is_progress_bar_enabled()
