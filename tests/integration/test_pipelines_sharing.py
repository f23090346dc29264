"""Several pipelines in one file: one home for each component, calls of their own, and the bits of diffusers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.utils import load_image
from PIL import Image
from typer.testing import CliRunner

import dmconfig
from dmconfig import DMConfigError
from dmconfig.checked import check_file
from dmconfig.cli import app
from tests.tiny_pipelines import PROMPT, SIZE, write_picture, write_tiny
from tests.virtual_devices import MakeMachine

SPEC = f"""\
version: 1
pipeline: {{source: ./sd}}
components:
  controlnet: {{source: ./controlnet, subfolder: controlnet}}
pipelines:
  again: {{class: StableDiffusionImg2ImgPipeline, call: {{image: fox.png, strength: 0.7, num_inference_steps: 3}}}}
  guided: {{class: StableDiffusionControlNetPipeline, call: {{image: fox.png}}}}
device_map: {{unet: cuda:0, controlnet: cuda:0, vae: {{execution: cuda:1, offload: model}}, default: cuda:1}}
reserve: 0
call: {{prompt: {PROMPT}, num_inference_steps: 2, output_type: np, height: {SIZE}, width: {SIZE}, seed: 3}}
"""
CONTROLNET = "  controlnet: {source: ./controlnet, subfolder: controlnet}\n"
CLASSES = {
    "pipeline": "StableDiffusionPipeline",
    "again": "StableDiffusionImg2ImgPipeline",
    "guided": "StableDiffusionControlNetPipeline",
}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with three pipelines, beside what it names."""
    folder = tmp_path_factory.mktemp("sharing")
    write_tiny("sd", folder / "sd")
    write_tiny("controlnet", folder / "controlnet")
    write_picture(folder / "fox.png")
    file = folder / "three.yaml"
    file.write_text(SPEC)
    return file


def by_hand(folder: Path, name: str) -> np.ndarray:
    """What diffusers alone makes of the arguments of the file."""
    cls = getattr(diffusers, CLASSES[name])
    more = {}
    if name == "guided":
        more["controlnet"] = diffusers.ControlNetModel.from_pretrained(folder / "controlnet" / "controlnet")
    pipe = cls.from_pretrained(folder / "sd", **more)
    pipe.set_progress_bar_config(disable=True)
    call: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np", "height": SIZE, "width": SIZE}
    if name != "pipeline":
        call["image"] = load_image(str(folder / "fox.png"))
    if name == "again":
        del call["height"], call["width"]
        call |= {"strength": 0.7, "num_inference_steps": 3}
    result: np.ndarray = pipe(PROMPT, generator=torch.Generator().manual_seed(3), **call).images
    return result


def test_pipelines_of_a_file_share_components_and_draw_as_by_hand(spec: Path, virtual_machine: MakeMachine) -> None:
    """Each call twice and in turns; no component is there twice, and after unloading no device holds a byte."""
    machine = virtual_machine()
    pipes = dmconfig.load_pipelines(spec)
    assert {name: type(pipe).__name__ for name, pipe in pipes.items()} == CLASSES
    assert pipes["again"].unet is pipes["guided"].unet is pipes["pipeline"].unet
    for pipe in pipes.values():
        pipe.set_progress_bar_config(disable=True)
    for name in (*pipes, *pipes):
        assert np.array_equal(pipes[name]().images, by_hand(spec.parent, name)), name
    for pipe in pipes.values():
        assert not dmconfig.report(pipe).problems
        assert pipe.hf_device_map["controlnet"] == "cuda:0"
    resting = sum(module.nbytes for module in dmconfig.report(pipes["pipeline"]).plan.assignments) - _bytes_of(
        pipes["pipeline"].vae
    )
    live = sum(machine.ledger.live_bytes(device) for device in ("cuda:0", "cuda:1"))
    assert resting <= live < resting * 1.1  # the allocator rounds each tensor up to 512 bytes
    for pipe in pipes.values():
        dmconfig.unload(pipe)
    del pipe
    pipes.clear()
    assert [machine.ledger.live_bytes(device) for device in ("cuda:0", "cuda:1")] == [0, 0]


def _bytes_of(module: torch.nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))


def test_run_calls_the_pipeline_that_is_asked_for(spec: Path, tmp_path: Path) -> None:
    """Its own arguments come from its section, and those of the command line go there."""
    command = ["run", str(spec), "--set", "device_map=cpu", "--set", "call.output_type=pil", "--pipeline"]
    out = tmp_path / "again.png"
    result = CliRunner().invoke(app, [*command, "again", "--out", str(out), "--call", "strength=0.9"])
    assert result.exit_code == 0, result.output
    assert Image.open(out).size == (SIZE, SIZE)
    result = CliRunner().invoke(app, [*command, "agian", "--out", str(out)])
    assert result.exit_code == 2
    assert "the file has no pipeline 'agian'" in result.output
    assert "did you mean 'again'?" in result.output


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("class: StableDiffusionImg2ImgPipeline", "class: StableDiffusionImg2Img"), "DM304 pipelines.again.class"),
        (("strength: 0.7", "strenght: 0.7"), "DM309 pipelines.again.call.strenght"),
        (("fox.png, strength", "wolf.png, strength"), "DM350 pipelines.again.call.image"),
        ((CONTROLNET, "  safety_checker: null\n"), "DM303 pipelines.guided.class"),
        (("StableDiffusionControlNetPipeline", "StableDiffusion3ControlNetPipeline"), "DM303 pipelines.guided.class"),
        (("  again:", "  pipeline:"), "DM308 pipelines.pipeline"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_another_pipeline_is_told_at_its_place(
    change: tuple[str, str], expected: str, spec: Path
) -> None:
    """Each at the line that says it; what other pipelines need is not asked of the first."""
    file = spec.with_name("wrong.yaml")
    file.write_text(SPEC.replace(*change))
    with pytest.raises(DMConfigError) as raised:
        check_file(file)
    found = [f"{each.code} {'.'.join(map(str, each.path))}" for each in raised.value.problems]
    assert expected in found
    assert all(each.location is not None for each in raised.value.problems)


def test_a_derived_pipeline_takes_the_defaults_that_its_class_knows(spec: Path, virtual_machine: MakeMachine) -> None:
    """``height`` of a text-to-image call is no argument of image-to-image; a report of it names every component."""
    virtual_machine()
    pipe = dmconfig.load_from_yaml(spec)
    derived = dmconfig.derive(pipe, diffusers.StableDiffusionImg2ImgPipeline)
    derived.set_progress_bar_config(disable=True)
    picture = load_image(str(spec.parent / "fox.png"))
    assert np.array_equal(
        derived(image=picture, strength=0.7, num_inference_steps=3).images, by_hand(spec.parent, "again")
    )
    assert "controlnet" in {each.component for each in dmconfig.report(derived).applied}
