"""Pictures by path and seeds per picture, from the file into real pipelines on two devices; and into a rehearsal."""

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

from dmconfig import load_from_yaml
from dmconfig.checked import check_file
from dmconfig.cli import app
from dmconfig.load import plan_for
from dmconfig.rehearse import Script, Settings, rehearse
from tests.conftest import inventory
from tests.tiny_pipelines import CLASSES, PROMPT, SIZE, kind_of, write_picture, write_tiny
from tests.virtual_devices import MakeMachine

PLACES = "device_map: {vae: cuda:1, default: cuda:0}\nreserve: 0\n"
CASES = {
    "sd-img2img": "{image: ./fox.png, strength: 0.7}",
    "sd-inpaint": "{image: ./fox.png, mask_image: ./mask.png, height: 32, width: 32}",
    "controlnet": "{image: ./fox.png}",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pipelines, two pictures and a spec for each case."""
    folder = tmp_path_factory.mktemp("inputs")
    write_picture(folder / "fox.png")
    Image.fromarray(np.where(np.arange(SIZE) < SIZE // 2, 0, 255).astype(np.uint8)[None].repeat(SIZE, 0)).save(
        folder / "mask.png"
    )
    for call, inputs in CASES.items():
        if not (folder / kind_of(call)).exists():
            write_tiny(kind_of(call), folder / kind_of(call))
        chosen = f", class: {CLASSES[call]}" if call in CLASSES else ""
        (folder / f"{call}.yaml").write_text(
            f"version: 1\npipeline: {{source: ./{kind_of(call)}{chosen}}}\n{PLACES}"
            f"call: {{prompt: {PROMPT}, num_inference_steps: 3, output_type: np, {inputs[1:]}\n"
        )
    return folder


def by_hand(folder: Path, call: str, **arguments: Any) -> np.ndarray:
    """What diffusers alone makes of the same pictures."""
    cls = getattr(diffusers, CLASSES.get(call, "DiffusionPipeline"))
    pipe = cls.from_pretrained(folder / kind_of(call))
    pipe.set_progress_bar_config(disable=True)
    images = {"image": load_image(str(folder / "fox.png"))}
    if call == "sd-inpaint":
        images |= {"mask_image": load_image(str(folder / "mask.png")).convert("L"), "height": SIZE, "width": SIZE}
    strength = {"strength": 0.7} if call == "sd-img2img" else {}
    result: np.ndarray = pipe(PROMPT, num_inference_steps=3, output_type="np", **images, **strength, **arguments).images
    return result


@pytest.mark.parametrize("call", CASES)
def test_pictures_of_the_file_reach_the_pipeline(call: str, tiny: Path, virtual_machine: MakeMachine) -> None:
    """Two calls on two devices have the bits of diffusers' own run on the same pictures."""
    virtual_machine()
    pipe = load_from_yaml(tiny / f"{call}.yaml")
    pipe.set_progress_bar_config(disable=True)
    drawn = [pipe(generator=torch.Generator().manual_seed(seed)).images for seed in (1, 2)]
    for seed, picture in zip((1, 2), drawn, strict=True):
        assert np.array_equal(picture, by_hand(tiny, call, generator=torch.Generator().manual_seed(seed)))


def test_a_seed_for_each_picture(tiny: Path, virtual_machine: MakeMachine) -> None:
    """Each picture of a batch is the one that its seed gives, in a list of generators as by hand."""
    virtual_machine()
    pipe = load_from_yaml(tiny / "sd-img2img.yaml", {"call.seed": [5, 6], "call.num_images_per_prompt": 2})
    pipe.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    expected = by_hand(tiny, "sd-img2img", generator=generators, num_images_per_prompt=2)
    assert np.array_equal(pipe().images, expected)
    assert not np.array_equal(expected[0], expected[1])


def test_run_takes_a_picture_from_where_the_command_is_given(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path in the file starts beside the file, one after --call in the current folder."""
    Image.new("RGB", (SIZE, SIZE), (255, 0, 0)).save(tmp_path / "red.png")
    monkeypatch.chdir(tmp_path)
    outputs = []
    for out, more in (("a.png", ()), ("b.png", ("--call", "image=red.png"))):
        command = ["run", str(tiny / "sd-img2img.yaml"), "--out", out, "--seed", "1", "--set", "call.output_type=pil"]
        result = CliRunner().invoke(app, [*command, "--set", "device_map=cpu", *more])
        assert result.exit_code == 0, result.output
        outputs.append(np.asarray(Image.open(out)))
    assert not np.array_equal(*outputs)


def test_a_rehearsal_takes_the_same_pictures(tiny: Path) -> None:
    """The picture of the file decides what is drawn in a rehearsal: half as wide, half as much to decode."""
    Image.new("RGB", (SIZE // 2, SIZE)).save(tiny / "narrow.png")
    shapes = []
    for name in ("fox.png", "narrow.png"):
        text = (tiny / "sd-img2img.yaml").read_text().replace("fox.png", name).replace("output_type: np, ", "")
        (tiny / "other.yaml").write_text(text)
        checked = check_file(tiny / "other.yaml")
        machine = inventory(cuda=(1, 1))
        script = Script(resolved=checked.resolved, spec=checked.spec, assembly=checked.assembly)
        shapes.append(rehearse(script, plan_for(checked, machine), machine, Settings()).output)
    assert [shape[-2:] if shape[-1] != 3 else shape[-3:-1] for shape in shapes] == [(SIZE, SIZE), (SIZE, SIZE // 2)]
