"""``offload_folder`` on real pipelines: what is cast and rests on disk is written there, mapped, and gone at the end.

Pictures are compared bit for bit with those of a plain CPU run of the cast pipeline. Processes that are killed are
real ones, and the test waits for a line of theirs.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from diffusers import AutoencoderKL, DiffusionPipeline, StableDiffusionImg2ImgPipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dmconfig
from dmconfig import DMConfigError, load_from_yaml, plan_from_yaml, report
from dmconfig.dispatch import dispatch, placement_of
from dmconfig.errors import Code, PlanError, Problem, SpecError
from dmconfig.plan import Plan
from dmconfig.progress import NoProgress
from dmconfig.units import MIB
from tests.conftest import assignment, device_use, only_problem
from tests.integration.test_placements import PIPELINE, SEEDS
from tests.integration.test_placements import draw as draw_digit
from tests.tiny_pipelines import draw as draw_tiny
from tests.tiny_pipelines import write_tiny
from tests.unit.test_offload import files_at_most
from tests.virtual_devices import MakeMachine

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped from a file"),
]

ROOT = Path(__file__).parents[2]
PARTS = ("vae", "text_encoder", "unet")
"""The components of the digits that have weights, in the order in which they are loaded."""
FILE = "weights.safetensors"

Overrides = dict[str, Any]


def on_disk(device: str, how: str) -> Overrides:
    """Return the entry of a component that runs on device and whose weights rest on disk."""
    return {"execution": device, "offload": how, "storage": "disk"}


def all_on_disk(how: str) -> Overrides:
    """Return a map with every component of the digits on disk, over two devices."""
    return {"unet": on_disk("cuda:0", how), "vae": on_disk("cuda:1", how), "text_encoder": on_disk("cuda:0", how)}


MODES: Mapping[str, Overrides] = {
    "model": all_on_disk("model"),
    "sequential": all_on_disk("sequential"),
    "parts": {
        "unet": "cuda:0",
        "unet.mid_block": on_disk("cuda:1", "sequential"),
        "unet.up_blocks": on_disk("cuda:0", "sequential"),
        "default": "cuda:1",
    },
}
WRITTEN = {"model": PARTS, "sequential": PARTS, "parts": ("unet",)}
"""The components that have a file in the folder."""
over_modes = pytest.mark.parametrize("mode", MODES)

HOLD = """
import sys
from dmconfig import load_from_yaml
from dmconfig.virtual import VirtualMachine
with VirtualMachine([1 << 26] * 2):
    pipe = load_from_yaml(sys.argv[1])
    print("loaded", flush=True)
    sys.stdin.readline()
"""
"""A process that holds a pipeline until it is told to end, or is killed, and does not unload it."""


def write_spec(folder: Path, device_map: Overrides, source: Path = PIPELINE, **more: Any) -> Path:
    """Return a spec file in folder, in bfloat16 unless told otherwise; its third line names the offload folder."""
    dtype = more.pop("dtype", "bfloat16")
    entries = {"reserve": 0, "device_map": device_map, **more}
    head = f"version: 1\npipeline: {{source: {source}, dtype: {dtype}}}\noffload_folder: ./offload\n"
    file = folder / "pipe.yaml"
    file.write_text(head + yaml.safe_dump(entries, sort_keys=False), encoding="utf-8")
    return file


def plain_pipeline(source: Path = PIPELINE, dtype: torch.dtype = torch.bfloat16, **components: Any) -> Any:
    """Return the cast pipeline as diffusers loads it, with weights copied out of the file as a move does."""
    pipe = DiffusionPipeline.from_pretrained(source, dtype=dtype, **components)
    for part in modules_of(pipe).values():
        for parameter in part.parameters():
            parameter.data = parameter.data.clone()
    return pipe


def modules_of(pipe: Any) -> dict[str, torch.nn.Module]:
    """Return the components that have weights."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def draw(pipe: Any, seed: int, **more: Any) -> np.ndarray:
    """Return a seven in two steps: the denoiser is entered again and again all the same."""
    return draw_digit(pipe, seed, **{"steps": 2, **more})


@pytest.fixture(scope="module")
def plain(one_thread: None) -> Any:
    """The cast digits on the cpu."""
    return plain_pipeline()


@pytest.fixture(scope="module")
def expected(plain: Any) -> list[np.ndarray]:
    """The pictures of a plain cpu run of the cast digits, one per seed."""
    return [draw(plain, seed) for seed in SEEDS]


def is_drawn(pipe: Any, expected: list[np.ndarray]) -> bool:
    """Whether generations in a row, as many as are expected, have the bits of the plain run."""
    return all(np.array_equal(draw(pipe, seed), picture) for seed, picture in enumerate(expected))


def contents(folder: Path) -> set[str]:
    """Return what is in a folder and below it; the name of a sub-folder, which is random, as SUB."""
    names = {path.name for path in folder.glob("dmconfig-????????")}
    found = set()
    for path in folder.rglob("*"):
        first, *rest = path.relative_to(folder).parts
        found.add("/".join(["SUB" + first[17:] if first[:17] in names else first, *rest]))
    return found


def files_of(*components: str) -> set[str]:
    """Return all that is in an offload folder that holds these components of one pipeline."""
    inside = {f"SUB/{name}" for name in components} | {f"SUB/{name}/{FILE}" for name in components}
    return {"SUB", "SUB.lock"} | inside


def sub_folders(folder: Path) -> set[str]:
    """Return the names of the sub-folders, each with its lock beside it."""
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    assert {path.name for path in folder.iterdir()} == names | {f"{name}.lock" for name in names}
    return names


def resting_tensors(pipe: Any, paths: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return the parameters of components and parts where they rest: on the cpu, or held back by a hook."""
    found = {}
    for name, part in modules_of(pipe).items():
        for path, module in part.named_modules():
            held: Any = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
            full = f"{name}.{path}".rstrip(".")
            if any(f"{full}.".startswith(f"{each}.") for each in paths):
                for key, parameter in module.named_parameters(recurse=False):
                    found[f"{full}.{key}"] = held[key] if parameter.device.type == "meta" else parameter
    return found


def mapped_files(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the files that tensors are mapped from; memory of their own is "" here."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in span.split("-"))
        ranges.append((begin, end, name if name.startswith("/") else ""))
    return {
        next(name for begin, end, name in ranges if begin <= tensor.data_ptr() < end) for tensor in tensors.values()
    }


def anonymous_kib(file: str) -> list[int]:
    """Return, per mapping of a file in this process, how much of it has become memory of its own."""
    found, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            inside = line.endswith(file)
        elif inside and first == "Anonymous:":
            found.append(int(line.split()[1]))
    return found


def resting_paths(mode: str) -> tuple[str, ...]:
    """Return the components and parts of a mode that rest on disk."""
    return tuple(path for path, place in MODES[mode].items() if isinstance(place, dict))


# Written, mapped, drawn


@over_modes
def test_cast_weights_are_written_and_mapped_and_draw_the_plain_picture(
    mode: str, tmp_path: Path, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """In an own sub-folder, one file per component and nothing else; mapped from there without memory of their own."""
    virtual_machine()
    pipe = load_from_yaml(write_spec(tmp_path, MODES[mode]))
    folder = tmp_path / "offload"
    (name,) = sub_folders(folder)
    files = {str(folder / name / component / FILE) for component in WRITTEN[mode]}

    assert contents(folder) == files_of(*WRITTEN[mode])
    tensors = resting_tensors(pipe, resting_paths(mode))
    assert len(tensors) > 50
    assert mapped_files(tensors) == files
    assert not report(pipe).problems
    del tensors
    assert is_drawn(pipe, expected)
    assert contents(folder) == files_of(*WRITTEN[mode])
    assert mapped_files(resting_tensors(pipe, resting_paths(mode))) == files
    assert {file: set(anonymous_kib(file)) for file in files} == {file: {0} for file in files}


def test_parts_that_stay_are_not_written(tmp_path: Path, virtual_machine: MakeMachine, plain: Any) -> None:
    """The file of a component in parts holds those that rest on disk, each weight once, and no other."""
    virtual_machine()
    pipe = load_from_yaml(write_spec(tmp_path, MODES["parts"]))

    (file,) = (tmp_path / "offload").rglob(FILE)
    with safe_open(file, "pt") as written:
        names = set(written.keys())
    assert names == {name for name, _ in plain.unet.named_parameters() if name.startswith(("mid_block.", "up_blocks."))}
    dmconfig.unload(pipe)


def test_each_component_is_written_before_the_next_is_loaded(tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """No two cast components are in memory at once, and no file is there under its name before it is whole."""
    seen: list[set[str]] = []

    class Watch(NoProgress):
        def track(self, phase: str, items: Any, label: Any) -> Iterator[Any]:
            for item in items:
                if phase == "load" and item.name in PARTS:
                    seen.append({path.name for path in (tmp_path / "offload").glob("*/*")})
                yield item

    virtual_machine()
    pipe = load_from_yaml(write_spec(tmp_path, MODES["model"]), progress=Watch())

    assert seen == [set(PARTS[:count]) for count in range(len(PARTS))]
    assert contents(tmp_path / "offload") == files_of(*PARTS)
    dmconfig.unload(pipe)


@pytest.mark.parametrize(("stored", "loaded"), itertools.permutations(("float32", "float16", "bfloat16"), 2))
def test_every_dtype_survives_the_disk_bit_for_bit(
    stored: str, loaded: str, tmp_path: Path, virtual_machine: MakeMachine
) -> None:
    """What comes back from the folder has the bits that diffusers casts to, whatever was stored."""
    source = tmp_path / "stored"
    DiffusionPipeline.from_pretrained(PIPELINE, dtype=getattr(torch, stored)).save_pretrained(source)
    dtype = getattr(torch, loaded)
    reference = DiffusionPipeline.from_pretrained(source, dtype=dtype)
    components = {name: {"dtype": loaded} for name in PARTS}
    virtual_machine()

    pipe = load_from_yaml(write_spec(tmp_path, MODES["model"], source, components=components))

    assert contents(tmp_path / "offload") == files_of(*PARTS)
    for name, part in modules_of(pipe).items():
        state = getattr(reference, name).state_dict()
        assert {tensor.dtype for tensor in part.parameters()} == {dtype}
        assert all(bits_equal(tensor, state[key]) for key, tensor in part.state_dict().items())


def bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.detach().reshape(-1).view(torch.uint8), other.detach().reshape(-1).view(torch.uint8))


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny FLUX pipeline, whose T5 ties its embeddings."""
    return write_tiny("flux", tmp_path_factory.mktemp("flux") / "flux")


@pytest.mark.parametrize(("how", "dtype"), [("model", "float16"), ("sequential", "bfloat16")])
def test_tied_weights_stay_tied_and_are_written_once(
    how: str, dtype: str, tmp_path: Path, virtual_machine: MakeMachine, flux: Path
) -> None:
    """T5's two names for one table are one tensor in the file and in memory; kept float32 layers keep their dtype."""
    reference = plain_pipeline(flux, getattr(torch, dtype))
    picture = draw_tiny(reference, "flux", 0)
    virtual_machine()

    pipe = load_from_yaml(write_spec(tmp_path, t5_on_disk(how), flux, dtype=dtype))

    (file,) = (tmp_path / "offload").rglob(FILE)
    written = load_file(file)
    state = dict(reference.text_encoder_2.named_parameters())
    assert written.keys() == state.keys()
    assert "encoder.embed_tokens.weight" not in written
    assert all(bits_equal(tensor, state[name]) for name, tensor in written.items())
    assert any(tensor.dtype == torch.float32 for tensor in written.values()) == (dtype == "float16")
    del written
    assert np.array_equal(draw_tiny(pipe, "flux", 0), picture)
    pipe.reset_device_map()
    tied = pipe.text_encoder_2.shared.weight, pipe.text_encoder_2.encoder.embed_tokens.weight
    assert tied[0].data_ptr() == tied[1].data_ptr()
    assert tied[0] is tied[1] or how == "sequential"
    assert not contents(tmp_path / "offload")
    assert str(tmp_path / "offload") not in Path("/proc/self/maps").read_text()


def test_tied_weights_brought_by_layer_are_one_parameter_afterwards(
    tmp_path: Path, virtual_machine: MakeMachine, flux: Path
) -> None:
    """After a reset they are tied as diffusers has them, and not two parameters over one weight."""
    virtual_machine()
    pipe = load_from_yaml(write_spec(tmp_path, t5_on_disk("sequential"), flux))

    pipe.reset_device_map()

    assert pipe.text_encoder_2.shared.weight is pipe.text_encoder_2.encoder.embed_tokens.weight


def t5_on_disk(how: str) -> Overrides:
    """Return a map of FLUX with its T5 on disk."""
    return {"text_encoder_2": on_disk("cuda:1", how), "default": "cuda:0"}


# The end


def ended(pipe: Any, how: str) -> None:
    """End a placement in one of the ways there are."""
    match how:
        case "unload":
            dmconfig.unload(pipe)
        case "reset_device_map":
            pipe.reset_device_map()
        case "to another device":
            pipe.to("cuda:1")
        case _:
            pipe.to("cpu")


ENDS = [
    *(("unload", mode) for mode in MODES),
    *(("reset_device_map", mode) for mode in MODES),
    *(("to the cpu", mode) for mode in ("model", "sequential")),
    *(("to another device", mode) for mode in ("sequential", "parts")),
]


@pytest.mark.parametrize(("how", "mode"), ENDS, ids=[f"{how}, {mode}" for how, mode in ENDS])
def test_files_go_with_the_placement(
    how: str, mode: str, tmp_path: Path, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """However it ends: the folder is empty, nothing is mapped from it, and a pipeline that lives on draws the same."""
    virtual_machine()
    pipe = load_from_yaml(write_spec(tmp_path, MODES[mode]))
    draw(pipe, 0, steps=1)
    placement = placement_of(pipe)  # held here: the files do not wait for the last reference

    ended(pipe, how)

    assert placement is not None
    assert not contents(tmp_path / "offload")
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    parts = modules_of(pipe).values()
    assert not any(tensor.device.type == "meta" for part in parts for tensor in part.parameters())
    assert how == "unload" or is_drawn(pipe, expected[:1])


def test_a_component_that_somebody_keeps_outlives_its_file(
    tmp_path: Path, virtual_machine: MakeMachine, plain: Any
) -> None:
    """Unloading removes the file; who still holds the denoiser can read it, and its file is gone with it."""
    virtual_machine()
    pipe = load_from_yaml(write_spec(tmp_path, MODES["sequential"]))
    unet = pipe.unet

    dmconfig.unload(pipe)

    assert not contents(tmp_path / "offload")
    assert all(bits_equal(tensor, plain.unet.state_dict()[key]) for key, tensor in unet.state_dict().items())


def test_a_pipeline_that_nobody_holds_takes_its_files_along(tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """Without unload: the files go when the pipeline does, and leaving a with block unloads."""
    virtual_machine()
    spec = write_spec(tmp_path, MODES["model"])
    pipe = load_from_yaml(spec)
    assert contents(tmp_path / "offload") == files_of(*PARTS)

    del pipe
    gc.collect()

    assert not contents(tmp_path / "offload")
    with dmconfig.loaded(spec):
        assert contents(tmp_path / "offload") == files_of(*PARTS)
    assert not contents(tmp_path / "offload")


def hold(spec: Path) -> subprocess.Popen[str]:
    """Start a process that holds the pipeline of a spec."""
    command = [sys.executable, "-c", HOLD, str(spec)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


@contextmanager
def two_processes(spec: Path) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """Give two processes that have each loaded the pipeline of a spec; they are gone afterwards."""
    processes = hold(spec), hold(spec)
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "loaded\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_processes_share_a_folder_and_a_killed_one_is_cleaned_up_after(
    tmp_path: Path, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """Three at once do not meet. One ends and takes its files along; one is killed, and the next load removes its."""
    spec, folder = write_spec(tmp_path, MODES["model"]), tmp_path / "offload"
    virtual_machine()
    with two_processes(spec) as (ending, killed):
        theirs = sub_folders(folder)
        assert len(theirs) == 2
        pipe = load_from_yaml(spec)
        (ours,) = sub_folders(folder) - theirs

        ending.communicate("\n")
        assert ending.returncode == 0
        (left,) = sub_folders(folder) - {ours}
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert sub_folders(folder) == {ours, left}

        other = load_from_yaml(spec)

        assert len(sub_folders(folder)) == 2
        assert ours in sub_folders(folder)
        assert left not in sub_folders(folder)
        assert is_drawn(pipe, expected[:1])
        assert is_drawn(other, expected[:1])
    for each in (pipe, other):
        dmconfig.unload(each)
    assert not contents(folder)


def test_two_pipelines_of_one_process_share_a_folder(
    tmp_path: Path, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """Each has its own sub-folder; unloading one leaves the other's files and pictures."""
    virtual_machine()
    one = load_from_yaml(write_spec(tmp_path, MODES["model"]))
    (first,) = sub_folders(tmp_path / "offload")
    other = load_from_yaml(write_spec(tmp_path, MODES["sequential"]))
    (second,) = sub_folders(tmp_path / "offload") - {first}

    dmconfig.unload(one)

    assert sub_folders(tmp_path / "offload") == {second}
    assert is_drawn(other, expected[:1])
    dmconfig.unload(other)
    assert not contents(tmp_path / "offload")


def test_what_others_put_into_the_folder_is_not_touched(tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """Neither loading nor unloading removes what is not dmconfig's, also where it is called alike."""
    folder = tmp_path / "offload"
    for name in ("unet", "dmconfig-notes"):
        (folder / name).mkdir(parents=True)
        (folder / name / FILE).write_text("mine")
    (folder / "dmconfig-notes.lock").write_text("mine")
    before = {path: path.read_text() for path in folder.rglob("*") if path.is_file()}
    virtual_machine()

    pipe = load_from_yaml(write_spec(tmp_path, MODES["model"]))
    dmconfig.unload(pipe)

    assert {path: path.read_text() for path in folder.rglob("*") if path.is_file()} == before


# Loads that fail


def damaged(folder: Path) -> Path:
    """Return a copy of the digits whose denoiser, the last to be loaded, lacks a tensor."""
    DiffusionPipeline.from_pretrained(PIPELINE).save_pretrained(folder)
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["conv_out.bias"]
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def test_a_component_with_damaged_weights_leaves_no_file(tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """The components before it had been written; the load fails, and the folder is empty."""
    seen: set[str] = set()

    class Watch(NoProgress):
        def track(self, phase: str, items: Any, label: Any) -> Iterator[Any]:
            for item in items:
                seen.update(contents(tmp_path / "offload"))
                yield item

    source = damaged(tmp_path / "damaged")
    machine = virtual_machine()
    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(write_spec(tmp_path, MODES["model"], source), progress=Watch())

    assert only_problem(caught.value).code == Code.COMPONENT_NOT_LOADED
    assert f"SUB/vae/{FILE}" in seen
    assert not contents(tmp_path / "offload")
    assert machine.ledger.live_bytes("cuda:0") == machine.ledger.live_bytes("cuda:1") == 0


def test_a_device_that_has_become_too_small_leaves_no_file(tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """Somebody else takes the device's memory between plan and placement: placing stops, and the folder is empty."""
    taken: list[torch.Tensor] = []

    class Take(NoProgress):
        @contextmanager
        def phase(self, name: str) -> Iterator[None]:
            if name == "place":
                assert contents(tmp_path / "offload") == files_of("unet")
                taken.append(torch.ones(15 * MIB // 8 // 4, device="cuda:1"))
            yield

    device_map = {"unet": on_disk("cuda:0", "model"), "default": "cuda:1"}
    virtual_machine(capacity_bytes=2 * MIB)
    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(write_spec(tmp_path, device_map), progress=Take())

    assert only_problem(caught.value).code == Code.PLACEMENT_DIFFERS
    assert "memory" in only_problem(caught.value).what
    assert not contents(tmp_path / "offload")


def load_onto_a_full_disk(folder: Path) -> Problem:
    """Load where the denoiser's file, the last one, finds no room, and return what is said."""
    with files_at_most(MIB), pytest.raises(DMConfigError) as caught:
        load_from_yaml(write_spec(folder, MODES["model"]))
    return only_problem(caught.value)


def test_a_disk_that_becomes_full_while_loading_leaves_no_file(tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """Somebody else takes the room between the look at it and the writing: the load fails, and the folder is empty."""
    virtual_machine()

    problem = load_onto_a_full_disk(tmp_path)

    assert problem.code == Code.BAD_OFFLOAD_FOLDER
    assert problem.what.startswith(f"unet cannot be written to {tmp_path / 'offload'}")
    assert not contents(tmp_path / "offload")


def test_a_disk_that_becomes_full_is_told_at_the_folders_place(tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """As every other problem of the folder."""
    virtual_machine()

    problem = load_onto_a_full_disk(tmp_path)

    assert str(problem.location) == f"{tmp_path / 'pipe.yaml'}:3:17"


def test_a_plan_that_does_not_fit_makes_no_folder(tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """What is known before anything is loaded is said before the folder is made."""
    virtual_machine(capacity_bytes=MIB)

    with pytest.raises(PlanError):
        load_from_yaml(write_spec(tmp_path, MODES["model"]))

    assert not (tmp_path / "offload").exists()


class NothingLoaded(NoProgress):
    """Fails the test when anything is loaded."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Allow planning alone."""
        assert name == "plan"
        yield


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("pipe.yaml", "File exists"),
        ("pipe.yaml/below", "Not a directory"),
        ("/proc/offload", "No such file or directory"),
        ("/proc", "no file in it can be locked"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_at_its_place(
    folder: str, reason: str, tmp_path: Path, virtual_machine: MakeMachine
) -> None:
    """A file, below a file, where no file can be made, not even by root: said before anything is loaded."""
    machine = virtual_machine()
    spec = write_spec(tmp_path, MODES["model"])
    spec.write_text(spec.read_text().replace("./offload", folder))

    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(spec, progress=NothingLoaded())

    assert caught.value.exit_code == 4
    assert str(caught.value) == (
        f"error[DM605 bad-offload-folder]: {spec}:3:17\n"
        "  at   offload_folder\n"
        f"  what {tmp_path / folder} cannot be written to: {reason}\n"
        "  fix  name a folder that this user can write to"
    )
    assert machine.ledger.peak_bytes("cuda:0") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["pipe.yaml"]


def test_a_folder_without_room_is_refused_at_its_place(tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """Weights larger than what is free, by their headers alone: said before anything is loaded or written."""
    source = tmp_path / "large"
    DiffusionPipeline.from_pretrained(PIPELINE).save_pretrained(source)
    nbytes = grow(source / "unet" / "diffusion_pytorch_model.safetensors", tmp_path)
    device_map = {"unet": on_disk("cuda:0", "model"), "default": "cuda:1"}
    virtual_machine(capacity_bytes=2 * nbytes)
    spec = write_spec(tmp_path, device_map, source)

    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(spec, progress=NothingLoaded())

    problem = only_problem(caught.value)
    assert (problem.code, str(problem.location)) == (Code.BAD_OFFLOAD_FOLDER, f"{spec}:3:17")
    assert f"are to rest in {tmp_path / 'offload'}, where " in problem.what
    assert problem.fix == "name a folder on a larger disk, or load in the dtype that is stored, which needs no copy"
    assert not contents(tmp_path / "offload")


def grow(file: Path, disk: Path) -> int:
    """Give a weights file a tensor, all of it a hole, of twice what a disk has free in 16 bits; return those bytes."""
    statistics = os.statvfs(disk)
    count = 2 * statistics.f_bavail * statistics.f_frsize // 2
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header["conv_large.weight"] = {"dtype": "F32", "shape": [count], "data_offsets": [len(body), len(body) + 4 * count]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text + body)
        stream.truncate(8 + len(text) + len(body) + 4 * count)
    return 2 * count


# The life of a pipeline with written components


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a LoRA of the digits' denoiser, strong enough to change every picture."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    folder = tmp_path_factory.mktemp("lora")
    pipe = DiffusionPipeline.from_pretrained(PIPELINE)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    pipe.save_lora_weights(folder, unet_lora_layers=get_peft_model_state_dict(pipe.unet))
    return folder


@over_modes
def test_a_lora_goes_on_and_off_a_written_component(
    mode: str, tmp_path: Path, virtual_machine: MakeMachine, expected: list[np.ndarray], lora: Path
) -> None:
    """With it the picture is a plain pipeline's with it, without it the plain one; the files are as before."""
    reference = plain_pipeline()
    reference.load_lora_weights(lora)
    with_lora = draw(reference, 0)
    assert not np.array_equal(with_lora, expected[0])
    virtual_machine()
    pipe = load_from_yaml(write_spec(tmp_path, MODES[mode]))
    before = {file: file.read_bytes() for file in tmp_path.rglob(FILE)}

    pipe.load_lora_weights(lora)
    assert is_drawn(pipe, [with_lora])
    pipe.unload_lora_weights()

    assert is_drawn(pipe, expected[:1])
    assert {file: file.read_bytes() for file in tmp_path.rglob(FILE)} == before
    assert not report(pipe).problems


def test_a_lora_on_a_written_component_is_no_fault(tmp_path: Path, virtual_machine: MakeMachine, lora: Path) -> None:
    """What a LoRA adds came from its file into memory; the component's weights are where they were."""
    virtual_machine()
    pipe = load_from_yaml(write_spec(tmp_path, MODES["model"]))

    pipe.load_lora_weights(lora)

    assert not report(pipe).problems


@over_modes
def test_a_written_component_is_saved_whole(
    mode: str, tmp_path: Path, virtual_machine: MakeMachine, plain: Any
) -> None:
    """All cast weights are in the saved folder; the placement and its files are as before."""
    virtual_machine()
    pipe = load_from_yaml(write_spec(tmp_path, MODES[mode]))

    pipe.save_pretrained(tmp_path / "saved")

    assert not report(pipe).problems
    saved = DiffusionPipeline.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    for name in PARTS:
        state = getattr(plain, name).state_dict()
        stored = getattr(saved, name).state_dict()
        assert stored.keys() == state.keys()
        assert all(bits_equal(tensor, state[key]) for key, tensor in stored.items())
    assert contents(tmp_path / "offload") == files_of(*WRITTEN[mode])


@pytest.mark.parametrize("mode", ["model", "parts"])
def test_a_component_swapped_for_a_written_one_rests_in_memory(
    mode: str, tmp_path: Path, virtual_machine: MakeMachine, plain: Any
) -> None:
    """The new denoiser came in no file; the plan says so, the picture is that of a plain pipeline with it."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        new = type(plain.unet).from_config(plain.unet.config).to(torch.bfloat16).eval()
    reference = DiffusionPipeline.from_pretrained(PIPELINE, dtype=torch.bfloat16, vae=plain.vae)
    reference.text_encoder = plain.text_encoder
    reference.unet = type(new).from_config(new.config).to(torch.bfloat16).eval()
    reference.unet.load_state_dict(new.state_dict())
    picture = draw(reference, 0)
    virtual_machine()
    pipe = load_from_yaml(write_spec(tmp_path, MODES[mode]))

    dmconfig.swap(pipe, "unet", new)

    swapped = {path: where for path, where in pipe.hf_device_map.items() if path.split(".")[0] == "unet"}
    assert "disk" not in swapped.values()
    assert not report(pipe).problems
    assert is_drawn(pipe, [picture])
    pipe.reset_device_map()
    assert is_drawn(pipe, [picture])
    assert not contents(tmp_path / "offload")


@pytest.mark.parametrize(("before", "after"), [("model", "sequential"), ("sequential", "parts")])
def test_what_is_placed_anew_is_written_anew_beside_it(
    before: str, after: str, tmp_path: Path, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """By another plan, cast weights rest in a sub-folder of the same folder, and the one before is gone."""
    virtual_machine()
    pipe = load_from_yaml(write_spec(tmp_path, MODES[before]))
    (former,) = sub_folders(tmp_path / "offload")

    dispatch(pipe, plan_from_yaml(write_spec(tmp_path, MODES[after])))

    assert contents(tmp_path / "offload") == files_of(*WRITTEN[after])
    assert former not in sub_folders(tmp_path / "offload")
    assert not report(pipe).problems
    assert is_drawn(pipe, expected[:1])
    pipe.reset_device_map()
    assert is_drawn(pipe, expected[:1])
    assert not contents(tmp_path / "offload")


@pytest.mark.parametrize("mode", ["model", "sequential"])
def test_a_derived_pipeline_shares_written_components(
    mode: str, tmp_path: Path, virtual_machine: MakeMachine, plain: Any, expected: list[np.ndarray]
) -> None:
    """Image-to-image on the same files: nothing is written again, and the files go when either is released."""
    virtual_machine()
    pipe = load_from_yaml(write_spec(tmp_path, MODES[mode]))
    reference = StableDiffusionImg2ImgPipeline(**plain.components, requires_safety_checker=False)
    arguments = {"image": torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32), "strength": 0.8, "steps": 3}

    derived = dmconfig.derive(pipe, StableDiffusionImg2ImgPipeline)

    assert len(sub_folders(tmp_path / "offload")) == 1
    assert np.array_equal(draw(derived, 0, **arguments), draw(reference, 0, **arguments))
    assert is_drawn(pipe, expected[:1])
    derived.reset_device_map()
    assert placement_of(pipe) is None
    assert not contents(tmp_path / "offload")
    assert all(
        bits_equal(tensor, getattr(plain, name).state_dict()[key])
        for name, part in modules_of(pipe).items()
        for key, tensor in part.state_dict().items()
    )


# What the file says


def test_a_relative_folder_starts_where_the_file_is(
    tmp_path: Path, virtual_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the current folder; an override starts there, as relative paths on a command line do."""
    (tmp_path / "here").mkdir()
    (tmp_path / "specs").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    spec = write_spec(tmp_path / "specs", MODES["model"])
    virtual_machine()

    with dmconfig.loaded(spec):
        assert len(sub_folders(tmp_path / "specs" / "offload")) == 1
        assert not contents(tmp_path / "here")
    with dmconfig.loaded(spec, {"offload_folder": "other"}):
        assert len(sub_folders(tmp_path / "here" / "other")) == 1


def test_a_home_folder_is_understood(
    tmp_path: Path, virtual_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``~`` is the user's home, as in a shell."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    virtual_machine()

    with dmconfig.loaded(write_spec(tmp_path, MODES["model"]), {"offload_folder": "~/offload"}):
        assert len(sub_folders(tmp_path / "home" / "offload")) == 1


NOT_NEEDED = "offload_folder is not needed: nothing that is cast rests on disk, so nothing is written to it"


@pytest.mark.parametrize(
    ("dtype", "device_map"),
    [("auto", MODES["model"]), ("float32", MODES["model"]), ("bfloat16", {"default": "cuda:0"})],
    ids=["as stored", "the stored dtype by name", "nothing on disk"],
)
def test_a_folder_that_is_not_needed_is_noted(
    dtype: str, device_map: Overrides, tmp_path: Path, virtual_machine: MakeMachine
) -> None:
    """What is not cast rests in its own files, and what stays on a device rests nowhere: nothing will be written."""
    virtual_machine()

    plan = plan_from_yaml(write_spec(tmp_path, device_map, dtype=dtype))

    assert NOT_NEEDED in plan.notes
    assert not any(each.is_written for each in plan.assignments)


def test_a_folder_that_is_not_needed_is_not_made(tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """Loading what rests in its own files leaves no trace where the folder would be."""
    virtual_machine()

    with dmconfig.loaded(write_spec(tmp_path, MODES["model"], dtype="auto")) as pipe:
        assert mapped_files(resting_tensors(pipe, ("unet",))) == {str(weights_of("unet").resolve())}
        assert not (tmp_path / "offload").exists()


def weights_of(component: str) -> Path:
    """Return the file in which a diffusers component of the digits came."""
    return PIPELINE / component / "diffusion_pytorch_model.safetensors"


def test_a_folder_that_is_needed_is_not_noted(tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """The note is there only where it is true."""
    virtual_machine()

    assert NOT_NEEDED not in plan_from_yaml(write_spec(tmp_path, MODES["parts"])).notes


def test_a_folder_and_no_disk_contradict_each_other(tmp_path: Path) -> None:
    """``disk: 0`` lets nothing rest there, so a folder for it is refused at its place, before any plan."""
    spec = write_spec(tmp_path, {"default": "cuda:0"}, max_memory={"disk": 0})

    with pytest.raises(SpecError) as caught:
        load_from_yaml(spec)

    problem = only_problem(caught.value)
    assert (problem.code, problem.path) == (Code.CONTRADICTION, ("offload_folder",))
    assert problem.location is not None
    assert problem.location.line == 3


@pytest.mark.parametrize("how", ["named", "low_memory"])
def test_groups_do_not_rest_in_a_folder(how: str, tmp_path: Path) -> None:
    """What is brought in groups comes home into host memory, so a folder for it is refused before any plan."""
    spec = write_spec(tmp_path, {"unet": on_disk("cuda:0", "group"), "default": "cuda:0"})
    whole = {"device_map": "cuda:0", "low_memory": "group_offload"}

    with pytest.raises(SpecError) as caught:
        load_from_yaml(spec, whole if how == "low_memory" else {})

    problem = only_problem(caught.value)
    at = ("offload_folder",) if how == "low_memory" else ("device_map", "unet", "storage")
    assert (problem.code, problem.path) == (Code.CONTRADICTION, at)
    assert problem.what.startswith("group offload copies weights into host memory")
    assert not (tmp_path / "offload").exists()


@pytest.mark.parametrize("mode", ["model", "parts"])
def test_the_plan_tells_the_bytes_on_disk(mode: str, tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """Planning writes nothing, and says how much will rest on disk: what the files then hold."""
    virtual_machine()
    spec = write_spec(tmp_path, MODES[mode])

    plan = plan_from_yaml(spec)

    assert not (tmp_path / "offload").exists()
    assert {each.component for each in plan.assignments if each.is_written} == set(WRITTEN[mode])
    assert "./offload" in device_use(plan, "disk").description
    with dmconfig.loaded(spec) as pipe:
        written = written_bytes(tmp_path / "offload")
        assert device_use(plan, "disk").used_bytes == sum(written.values())
        assert {name: assignment(plan, name).bytes_on_disk for name in WRITTEN[mode]} == written
        assert planned(report(pipe).plan) == planned(plan)


def written_bytes(folder: Path) -> dict[str, int]:
    """Return the bytes of the tensors in the files of each component."""
    return {
        file.parent.name: sum(tensor.numel() * tensor.element_size() for tensor in load_file(file).values())
        for file in folder.rglob(FILE)
    }


def planned(plan: Plan) -> dict[str, tuple[int, bool]]:
    """Return what of each component rests on disk, and whether it is written there."""
    return {each.component: (each.bytes_on_disk, each.is_written) for each in plan.assignments}


def test_what_the_cpu_has_no_room_for_is_written(
    tmp_path: Path, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """Naming a folder lets what ``low_memory`` offloads rest on disk, cast or not, without naming a component."""
    virtual_machine()
    spec = write_spec(tmp_path, {"default": "cuda:0"}, low_memory="cpu_offload_with_hook", max_memory={"cpu": "300KiB"})
    spec.write_text(spec.read_text().replace("device_map:\n  default: cuda:0", "device_map: cuda:0"))

    pipe = load_from_yaml(spec, {"max_memory": {"cpu": "300KiB", "cuda:0": "100%"}})

    assert pipe.hf_device_map == {"unet": "disk", "vae": "cpu", "text_encoder": "cpu"}
    assert contents(tmp_path / "offload") == files_of("unet")
    assert is_drawn(pipe, expected[:1])


def test_an_autoencoder_keeps_its_own_tensors(tmp_path: Path, virtual_machine: MakeMachine) -> None:
    """A component given by ``components`` is written as well as one of the pipeline's source."""
    folder = tmp_path / "vae"
    vae = AutoencoderKL.from_pretrained(PIPELINE / "vae")
    with torch.no_grad():
        vae.decoder.conv_out.bias.add_(0.25)
    vae.save_pretrained(folder)
    reference = plain_pipeline(vae=AutoencoderKL.from_pretrained(folder, torch_dtype=torch.bfloat16))
    picture = draw(reference, 0)
    virtual_machine()
    spec = write_spec(tmp_path, MODES["sequential"], components={"vae": {"source": str(folder)}})

    with dmconfig.loaded(spec) as pipe:
        assert np.array_equal(draw(pipe, 0), picture)
        assert contents(tmp_path / "offload") == files_of(*PARTS)
