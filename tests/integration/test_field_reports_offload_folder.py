"""The offload folder, as people who use it have reported it: one section per report, with what dmconfig guarantees.

The numbers B118 to B128 stand for public reports on accelerate, transformers, diffusers and programs built on them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from rich.console import Console
from safetensors.torch import load_file, save_file

import dmconfig
from dmconfig import DMConfigError, load_from_yaml, plan_from_yaml, report
from dmconfig.errors import Code
from dmconfig.render import plan_text
from dmconfig.units import format_bytes
from tests.conftest import assignment, only_problem
from tests.integration.test_offload_folder import (
    FILE,
    MODES,
    PARTS,
    bits_equal,
    contents,
    draw,
    files_of,
    mapped_files,
    modules_of,
    on_disk,
    plain_pipeline,
    resting_tensors,
    sub_folders,
    weights_of,
    write_spec,
    written_bytes,
)
from tests.integration.test_placements import PIPELINE
from tests.virtual_devices import MakeMachine

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped from a file"),
]

ONE_OF_EACH = {
    "unet": on_disk("cuda:0", "sequential"),
    "vae": on_disk("cuda:1", "model"),
    "text_encoder": on_disk("cuda:0", "sequential"),
}
"""Components of two libraries, brought layer by layer and whole, to two devices."""


@pytest.fixture(scope="module")
def picture(one_thread: None) -> np.ndarray:
    """The picture of a plain cpu run of the cast digits."""
    return draw(plain_pipeline(), 0)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the digits that a test may change."""
    return Path(shutil.copytree(PIPELINE, tmp_path / "copied"))


# B118, B124: a folder that is given reaches nobody, or not every sub-model; and it has two names


def test_one_folder_serves_every_component_and_every_mode(
    tmp_path: Path, virtual_machine: MakeMachine, picture: np.ndarray
) -> None:
    """One key at the top of the file: models of diffusers and transformers, however they are brought."""
    virtual_machine()

    pipe = load_from_yaml(write_spec(tmp_path, ONE_OF_EACH))

    (name,) = sub_folders(tmp_path / "offload")
    for part in PARTS:
        tensors = resting_tensors(pipe, (part,))
        assert tensors.keys() == {f"{part}.{key}" for key, _ in getattr(pipe, part).named_parameters()}
        assert mapped_files(tensors) == {str(tmp_path / "offload" / name / part / FILE)}
    assert {path.name for path in tmp_path.iterdir()} == {"offload", "pipe.yaml"}
    assert np.array_equal(draw(pipe, 0), picture)


@pytest.mark.parametrize("name", ["offload_dir", "offload_directory", "offload_path"])
def test_other_names_of_the_folder_are_refused_with_the_one_there_is(name: str, tmp_path: Path) -> None:
    """There is one name, and no other is taken in silence."""
    spec = write_spec(tmp_path, MODES["model"])
    spec.write_text(spec.read_text().replace("offload_folder:", f"{name}:"))

    with pytest.raises(DMConfigError) as caught:
        plan_from_yaml(spec)

    problem = only_problem(caught.value)
    assert (problem.code, problem.path) == (Code.RENAMED_KEY, (name,))
    assert problem.fix.startswith(f"{name} -> offload_folder")


def test_without_a_folder_what_is_cast_cannot_rest_on_disk(tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """Where a folder is needed and none is named, each component is told at its place, before anything is loaded."""
    virtual_machine()
    spec = write_spec(tmp_path, ONE_OF_EACH)
    spec.write_text(spec.read_text().replace("offload_folder: ./offload\n", ""))

    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(spec)

    told = [(problem.code, problem.path) for problem in caught.value.problems]
    assert told == [(Code.CONTRADICTION, ("device_map", name, "storage")) for name in ONE_OF_EACH]
    assert all("name an offload_folder" in problem.fix for problem in caught.value.problems)


# B119: bfloat16 weights cannot be written


@pytest.mark.parametrize("how", ["model", "sequential"])
def test_bfloat16_weights_are_written_as_they_are(how: str, tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """The file has bfloat16 and no detour through another type: the bits are those that a cast gives."""
    virtual_machine()
    state = dict(plain_pipeline().unet.named_parameters())

    pipe = load_from_yaml(write_spec(tmp_path, {"unet": on_disk("cuda:0", how), "default": "cuda:1"}))

    (file,) = (tmp_path / "offload").rglob(FILE)
    written = load_file(file)
    assert written.keys() == state.keys()
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert all(bits_equal(tensor, state[name]) for name, tensor in written.items())
    dmconfig.unload(pipe)


# B120: float8 weights are planned, and crash when they are to rest on disk


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_float8_weights_rest_on_disk_as_what_they_are_cast_to(
    dtype: str, copied: Path, tmp_path: Path, virtual_machine: MakeMachine
) -> None:
    """Stored in eight bits and loaded in more, they are written in the dtype of the plan, with its bits and bytes."""
    store_as(weights_in(copied), torch.float8_e4m3fn)
    reference = DiffusionPipeline.from_pretrained(copied, dtype=getattr(torch, dtype))
    virtual_machine()
    spec = write_spec(tmp_path, {"unet": on_disk("cuda:0", "sequential"), "default": "cuda:1"}, copied, dtype=dtype)

    pipe = load_from_yaml(spec)

    (file,) = (tmp_path / "offload").rglob(FILE)
    state = dict(reference.unet.named_parameters())
    written = load_file(file)
    assert all(bits_equal(tensor, state[name]) for name, tensor in written.items())
    assert written_bytes(tmp_path / "offload") == {"unet": assignment(report(pipe).plan, "unet").bytes_on_disk}
    del written
    assert np.array_equal(draw(pipe, 0), draw(reference, 0))


def test_float8_is_not_a_dtype_to_load_in(tmp_path: Path) -> None:
    """What no pipeline computes in is refused where it is written."""
    with pytest.raises(DMConfigError) as caught:
        plan_from_yaml(write_spec(tmp_path, MODES["model"], dtype="float8_e4m3fn"))

    assert only_problem(caught.value).code == Code.BAD_DTYPE


def weights_in(pipeline: Path, component: str = "unet") -> Path:
    """Return the weights of a diffusers component in a copy of the digits."""
    return pipeline / weights_of(component).relative_to(PIPELINE)


def store_as(file: Path, dtype: torch.dtype) -> None:
    """Write the tensors of a file anew in another dtype."""
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


# B123: a folder that does not exist gives errors about missing files, and models with a head lose their prefixes


def test_a_folder_that_does_not_exist_is_made(
    tmp_path: Path, virtual_machine: MakeMachine, picture: np.ndarray
) -> None:
    """With all folders above it; the text encoder, whose weights have a prefix, finds every one of them."""
    virtual_machine()
    spec = write_spec(tmp_path, ONE_OF_EACH)
    spec.write_text(spec.read_text().replace("./offload", "./does/not/exist"))

    with dmconfig.loaded(spec) as pipe:
        folder = tmp_path / "does" / "not" / "exist"
        assert contents(folder) == files_of(*PARTS)
        (file,) = folder.glob(f"*/text_encoder/{FILE}")
        assert load_file(file).keys() == {name for name, _ in modules_of(pipe)["text_encoder"].named_parameters()}
        assert np.array_equal(draw(pipe, 0), picture)
    assert not contents(folder)


# B127: quantised tensors cannot go to disk in groups


def quantised(pipeline: Path) -> Path:
    """Let the config of the denoiser in a copy of the digits say that it is quantised, and return the copy."""
    config = pipeline / "unet" / "config.json"
    told = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    config.write_text(json.dumps({**json.loads(config.read_text()), **told}))
    return pipeline


def test_groups_of_quantised_weights_on_disk_are_refused(copied: Path, tmp_path: Path) -> None:
    """As all groups on disk are, before anything is planned or loaded."""
    device_map = {"unet": on_disk("cuda:0", "group"), "default": "cuda:1"}

    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(write_spec(tmp_path, device_map, quantised(copied)))

    problems = {(problem.code, problem.path) for problem in caught.value.problems}
    assert (Code.CONTRADICTION, ("device_map", "unet", "storage")) in problems


@pytest.mark.parametrize("how", ["model", "sequential"])
def test_quantised_weights_that_are_cast_onto_disk_are_refused_before_anything_is_loaded(
    how: str, copied: Path, tmp_path: Path, virtual_machine: MakeMachine
) -> None:
    """A component whose config says that it is quantised has no plain weights to cast and write: planning says so."""
    virtual_machine()
    device_map = {"unet": on_disk("cuda:0", how), "default": "cuda:1"}

    with pytest.raises(DMConfigError, match="quanti"):
        plan_from_yaml(write_spec(tmp_path, device_map, quantised(copied)))


# B128: why is there a second copy on disk


def test_what_is_loaded_as_it_is_stored_has_no_second_copy(tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """It rests in the very file it came in; beside it, only what is cast is written."""
    virtual_machine()

    pipe = load_from_yaml(write_spec(tmp_path, MODES["model"], components={"unet": {"dtype": "auto"}}))

    assert contents(tmp_path / "offload") == files_of("vae", "text_encoder")
    assert mapped_files(resting_tensors(pipe, ("unet",))) == {str(weights_of("unet"))}


def disk_line(spec: Path) -> str:
    """Return what the text of a plan says of the disk."""
    console = Console(width=200)
    with console.capture() as text:
        console.print(plan_text(plan_from_yaml(spec)))
    (line,) = [line for line in text.get().splitlines() if line.startswith("disk ")]
    return line


def test_the_plan_says_that_there_will_be_a_copy(tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """Its text names the folder and the bytes that are to rest on disk, where there will be a copy and only there."""
    virtual_machine()
    cast = write_spec(tmp_path, {"unet": on_disk("cuda:0", "model"), "default": "cuda:1"})
    line = disk_line(cast)

    nbytes = assignment(plan_from_yaml(cast), "unet").bytes_on_disk
    assert f"{format_bytes(nbytes)} weights, " in line
    assert f"{format_bytes(nbytes)} that are cast, in ./offload" in line
    assert "./offload" not in disk_line(write_spec(tmp_path, MODES["model"], dtype="auto"))


def test_the_plan_tells_how_large_the_copy_will_be(tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """Where some of what rests on disk is cast and some is not, the room that is needed is what is cast."""
    virtual_machine()
    spec = write_spec(tmp_path, MODES["model"], components={"unet": {"dtype": "auto"}})
    copies = [each.bytes_on_disk for each in plan_from_yaml(spec).assignments if each.is_written]

    assert len(copies) == 2
    assert format_bytes(sum(copies)) in disk_line(spec)


def test_pickled_weights_are_refused_and_not_copied(copied: Path, tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """Weights in a pickle cannot be mapped, so every one of them would have a copy; safetensors are asked for."""
    file = weights_in(copied)
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()
    virtual_machine()

    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(write_spec(tmp_path, {"unet": on_disk("cuda:0", "model"), "default": "cuda:1"}, copied))

    problem = only_problem(caught.value)
    assert problem.code == Code.PICKLE_NOT_TRUSTED
    assert "safetensors" in f"{problem.what} {problem.why} {problem.fix}"
    assert not (tmp_path / "offload").exists()
