"""Films from a pipeline of pictures: AnimateDiff makes another UNet of its UNet and a motion adapter; plans say so."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import AnimateDiffPipeline, DiffusionPipeline, MotionAdapter, UNetMotionModel

from dmconfig import load_from_yaml, plan_from_yaml
from dmconfig.errors import Code, DMConfigError
from dmconfig.facts import known_pipelines, pipeline_facts
from tests.conftest import only_problem
from tests.tiny_pipelines import PROMPT, SIZE, write_tiny
from tests.virtual_devices import MakeMachine

pytestmark = pytest.mark.usefixtures("one_thread")

CALL = {"prompt": PROMPT, "num_frames": 2, "height": SIZE, "width": SIZE, "num_inference_steps": 2, "output_type": "np"}
TWO = "device_map: {unet: 'cuda:0', default: 'cuda:1'}"
BROUGHT = "device_map: {unet: {execution: 'cuda:0', offload: HOW}, default: 'cuda:1'}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of pictures, and a motion adapter for its UNet of which no weight is zero."""
    root = tmp_path_factory.mktemp("motion")
    config = DiffusionPipeline.from_pretrained(write_tiny("sd", root / "sd")).unet.config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapter = MotionAdapter(
            block_out_channels=config.block_out_channels, motion_layers_per_block=config.layers_per_block,
            motion_norm_num_groups=config.norm_num_groups, motion_num_attention_heads=4,
        )  # fmt: skip
        with torch.no_grad():
            for parameter in adapter.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        adapter.save_pretrained(root / "motion")
    return root


def spec(folder: Path, more: str) -> Path:
    """Return a spec of the pipeline with the motion adapter beside it."""
    file = folder / "film.yaml"
    components = "components: {motion_adapter: {source: ./motion, class: MotionAdapter}}"
    file.write_text(
        f"version: 1\npipeline: {{source: ./sd, class: AnimateDiffPipeline}}\n{components}\nreserve: 0\n{more}\n"
    )
    return file


def drawn(pipe: Any) -> np.ndarray:
    """Return the film that a pipeline draws."""
    pipe.set_progress_bar_config(disable=True)
    frames: np.ndarray = pipe(**CALL, generator=torch.Generator().manual_seed(0)).frames
    return frames


@pytest.fixture(scope="module")
def by_hand(folder: Path) -> np.ndarray:
    """The film of the same pipeline made by diffusers alone, its weights copied as a move to a device does."""
    adapter = MotionAdapter.from_pretrained(folder / "motion")
    pipe = AnimateDiffPipeline.from_pretrained(folder / "sd", motion_adapter=adapter)
    for part in pipe.components.values():
        for parameter in part.parameters() if isinstance(part, torch.nn.Module) else ():
            parameter.data = parameter.data.clone()
    return drawn(pipe)


def stored_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of a module's parameters and stored buffers, each once."""
    tensors = {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@pytest.mark.parametrize("place", [TWO, *(BROUGHT.replace("HOW", how) for how in ("model", "group", "sequential"))])
def test_film_on_two_devices_is_that_by_hand(
    place: str, folder: Path, by_hand: np.ndarray, virtual_machine: MakeMachine
) -> None:
    """Drawn twice with the bits of diffusers alone; the UNet in memory weighs what was planned, motion and all."""
    file = spec(folder, place)
    virtual_machine()
    planned = {each.component: each.nbytes for each in plan_from_yaml(file).assignments}
    pipe = load_from_yaml(file)
    assert isinstance(pipe.unet, UNetMotionModel)
    assert np.array_equal(drawn(pipe), by_hand)
    assert np.array_equal(drawn(pipe), by_hand)
    if place == TWO:
        assert planned["unet"] == stored_bytes(pipe.unet)
        assert planned["motion_adapter"] == stored_bytes(pipe.motion_adapter)


def test_auto_leaves_the_adapter_itself_on_the_cpu(
    folder: Path, by_hand: np.ndarray, virtual_machine: MakeMachine
) -> None:
    """Once it is copied nothing runs it; the plan says which component has its bytes."""
    file = spec(folder, "device_map: auto")
    virtual_machine()
    plan = plan_from_yaml(file)
    places = {each.component: (each.execution_device, each.reason) for each in plan.assignments}
    assert places["motion_adapter"] == ("cpu", "it never runs")
    assert plan.seconds == 0
    assert "AnimateDiffPipeline copies motion_adapter into unet, which has its bytes too" in plan.notes
    assert np.array_equal(drawn(load_from_yaml(file)), by_hand)


WHY = "its pipeline makes another UNet of it and motion_adapter"
QUANTISED = "quantization: {unet: {quant_backend: quanto, quant_kwargs: {weights_dtype: int8}}}"


@pytest.mark.parametrize(
    ("more", "code", "what"),
    [
        (
            "device_map: {unet: {execution: ['cuda:0', 'cuda:1']}, default: 'cuda:0'}",
            Code.PLACE_REFUSED,
            f"'unet' cannot be placed so: {WHY}, which stays whole",
        ),
        (
            "device_map: {unet: {execution: 'cuda:0', offload: model, storage: disk}, default: 'cuda:0'}",
            Code.PLACE_REFUSED,
            f"'unet' cannot be placed so: {WHY}, which no file holds",
        ),
        (QUANTISED, Code.BAD_QUANTIZATION, "AnimateDiffPipeline cannot take a quantised 'unet'"),
        (
            "pipelines: {picture: {class: StableDiffusionPipeline}}",
            Code.CONTRADICTION,
            "'unet' cannot be shared with AnimateDiffPipeline or another such pipeline",
        ),
    ],
)
def test_what_cannot_be_done_with_such_a_unet_is_told_before_loading(
    more: str, code: Code, what: str, folder: Path
) -> None:
    """Its class has no blocks, no file holds it, and other pipelines go on with the UNet that it was made of."""
    with pytest.raises(DMConfigError) as caught:
        plan_from_yaml(spec(folder, more))
    problem = only_problem(caught.value)
    assert (problem.code, problem.what) == (code, what)


def test_pipelines_with_a_motion_adapter_are_those_that_copy_it() -> None:
    """Every class with such a component makes another UNet in its constructor, and no other class does."""
    copying = set()
    for name in known_pipelines():
        cls = getattr(diffusers, name, None)
        if inspect.isclass(cls) and issubclass(cls, DiffusionPipeline) and "from_unet2d" in inspect.getsource(cls):
            copying.add(name)
    known = ((name, pipeline_facts(name)) for name in known_pipelines())
    having = {name for name, facts in known if facts and any(slot.name == "motion_adapter" for slot in facts.slots)}
    assert having == copying
