"""Several controlnets in one place: sizes, plan, placement, loading and pictures, as those of a list by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ControlNetModel, DiffusionPipeline, StableDiffusionControlNetPipeline

from dmconfig import load_from_yaml, plan_from_yaml
from dmconfig.errors import SpecError
from tests.conftest import assignment, only_problem
from tests.tiny_adapters import write_controlnet
from tests.tiny_pipelines import Tiny, call_arguments
from tests.virtual_devices import MakeMachine

pytestmark = pytest.mark.usefixtures("one_thread")

HEAD = "version: 1\npipeline: {source: ./sd, class: StableDiffusionControlNetPipeline}\nreserve: 0\n"
TWO_NETS = "components: {controlnet: [{source: ./canny}, {source: ./depth}]}\n"
PLACES = {
    "two devices": "device_map: {controlnet: 'cuda:1', default: 'cuda:0'}\n",
    "one each": "device_map: {controlnet.nets.0: 'cuda:0', controlnet.nets.1: 'cuda:1', default: 'cuda:0'}\n",
    "whole": "device_map: {controlnet: {execution: 'cuda:1', offload: model}, default: 'cuda:0'}\n",
    "by layer from disk": (
        "device_map: {controlnet: {execution: 'cuda:1', offload: sequential, storage: disk}, default: 'cuda:0'}\n"
    ),
    "in groups": "device_map: {controlnet: {execution: 'cuda:1', offload: group}, default: 'cuda:0'}\n",
}

SLOW = ("whole", "in groups")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Path:
    """A tiny pipeline and two controlnets for its denoiser."""
    root = tmp_path_factory.mktemp("controlnets")
    (root / "sd").symlink_to(tiny.spec("sd").with_suffix(""))
    unet = DiffusionPipeline.from_pretrained(root / "sd").unet
    write_controlnet(root / "canny", unet, seed=1)
    write_controlnet(root / "depth", unet, seed=2)
    return root


def by_hand(folder: Path) -> StableDiffusionControlNetPipeline:
    """Return the pipeline with a list of controlnets, assembled by hand."""
    nets = [ControlNetModel.from_pretrained(folder / name) for name in ("canny", "depth")]
    pipe: StableDiffusionControlNetPipeline = StableDiffusionControlNetPipeline.from_pretrained(
        folder / "sd", controlnet=nets
    )
    return pipe


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    """What the pipeline assembled by hand draws, with its weights copied as a move does."""
    pipe = by_hand(folder)
    for part in pipe.components.values():
        for parameter in part.parameters() if isinstance(part, torch.nn.Module) else ():
            parameter.data = parameter.data.clone()
    return drawn(pipe)


def drawn(pipe: Any) -> np.ndarray:
    """Return what two controlnets, with weights of their own, make of a picture each."""
    pipe.set_progress_bar_config(disable=True)
    arguments = call_arguments("controlnet")
    arguments |= {"image": [arguments["image"], 1 - arguments["image"]], "controlnet_conditioning_scale": [0.8, 0.4]}
    images: np.ndarray = pipe(**arguments, generator=torch.Generator().manual_seed(0)).images
    return images


def spec(folder: Path, more: str) -> Path:
    """Return a spec of the pipeline."""
    file = folder / "spec.yaml"
    file.write_text(HEAD + more)
    return file


@pytest.mark.parametrize(
    "place", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in PLACES]
)
def test_several_controlnets_in_a_place_draw_what_they_do_by_hand(
    place: str, folder: Path, expected: np.ndarray, virtual_machine: MakeMachine
) -> None:
    """Each placement draws the same bits, twice; the plan knows the bytes of both together."""
    file = spec(folder, TWO_NETS + PLACES[place])
    virtual_machine()

    plan, pipe = plan_from_yaml(file), load_from_yaml(file)

    both = sum((folder / name / "diffusion_pytorch_model.safetensors").stat().st_size for name in ("canny", "depth"))
    planned = assignment(plan, "controlnet").nbytes
    assert planned == sum(p.numel() * p.element_size() for p in by_hand(folder).controlnet.parameters())
    assert planned == pytest.approx(both, rel=0.2)  # the files have headers
    assert type(pipe.controlnet).__name__ == "MultiControlNetModel"
    assert np.array_equal(drawn(pipe), expected)
    assert np.array_equal(drawn(pipe), expected)


def test_each_controlnet_has_its_own_dtype_no_more_than_the_first(folder: Path) -> None:
    """Models in one place have one dtype: that of the first, where none is asked for."""
    overrides = {"pipeline.dtype": "bfloat16"}

    pipe = load_from_yaml(spec(folder, TWO_NETS + "device_map: cpu\n"), overrides)

    assert {parameter.dtype for parameter in pipe.controlnet.parameters()} == {torch.bfloat16}


def test_pipeline_saved_with_several_controlnets_loads_as_it_was(folder: Path, tmp_path: Path) -> None:
    """What save_pretrained writes of several models, folders with numbers, is found again without being named."""
    by_hand(folder).save_pretrained(tmp_path / "saved")
    file = tmp_path / "spec.yaml"
    file.write_text("version: 1\npipeline: {source: ./saved}\ndevice_map: cpu\n")

    pipe = load_from_yaml(file)

    assert len(pipe.controlnet.nets) == 2
    assert np.array_equal(drawn(pipe), drawn(by_hand(folder)))


def test_one_controlnet_beside_a_denoiser_on_another_device(folder: Path, virtual_machine: MakeMachine) -> None:
    """A single one, of a class that the source lacks, is a component like any other."""
    net = ControlNetModel.from_pretrained(folder / "canny")
    pipe = StableDiffusionControlNetPipeline.from_pretrained(folder / "sd", controlnet=net)
    for part in pipe.components.values():
        for parameter in part.parameters() if isinstance(part, torch.nn.Module) else ():
            parameter.data = parameter.data.clone()

    def draw_one(pipe: Any) -> np.ndarray:
        pipe.set_progress_bar_config(disable=True)
        images: np.ndarray = pipe(**call_arguments("controlnet"), generator=torch.Generator().manual_seed(0)).images
        return images

    wanted = draw_one(pipe)
    virtual_machine()
    loaded = load_from_yaml(spec(folder, "components: {controlnet: {source: ./canny}}\n" + PLACES["two devices"]))

    assert np.array_equal(draw_one(loaded), wanted)
    assert np.array_equal(draw_one(loaded), wanted)


def test_list_for_a_component_that_is_one_model_is_refused(folder: Path) -> None:
    """Only where the pipeline class wraps several models itself is a list understood."""
    with pytest.raises(SpecError) as error:
        plan_from_yaml(spec(folder, "components: {controlnet: {source: ./canny}, vae: [{source: ./sd}]}\n"))

    problem = only_problem(error.value)
    assert problem.what == "StableDiffusionControlNetPipeline takes one 'vae', not a list"
    assert problem.location is not None


def test_wrong_model_in_a_list_is_named_by_its_place(folder: Path) -> None:
    """What is wrong with the second of two is told at the second."""
    with pytest.raises(SpecError) as error:
        plan_from_yaml(spec(folder, "components: {controlnet: [{source: ./canny}, {source: ./dept, tiling: true}]}\n"))

    problem = only_problem(error.value)
    assert problem.path == ("components", "controlnet", 1, "source")
    assert "did you mean 'depth'" in problem.fix
