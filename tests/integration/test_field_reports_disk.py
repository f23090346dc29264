"""Weights that rest in the files they came in, as people who offload to disk have reported it: one section per report.

The numbers B116 to B129 stand for public reports on accelerate, diffusers and safetensors. Those on an offload folder
are in ``test_field_reports_offload_folder``. Pictures are compared bit for bit with those of a plain run.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file

import dmconfig
from dmconfig import DMConfigError, load_from_yaml, plan_from_yaml
from dmconfig.dispatch import dispatch, placement_of
from dmconfig.errors import Code, PlanError
from dmconfig.inventory import Inventory
from dmconfig.units import GIB, KIB
from tests.conftest import DIGITS as DIGITS_TEXT
from tests.conftest import device_use, footprints, inventory, only_problem, plan_from
from tests.integration.test_offload_folder import (
    MODES,
    PARTS,
    anonymous_kib,
    bits_equal,
    mapped_files,
    modules_of,
    on_disk,
    resting_paths,
    resting_tensors,
)
from tests.integration.test_placements import PIPELINE, SEEDS
from tests.integration.test_placements import draw as draw_digit
from tests.virtual_devices import MakeMachine

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not Path("/proc/self/io").exists(), reason="only Linux tells what is mapped and what is written"
    ),
]

over_modes = pytest.mark.parametrize("mode", MODES)
OTHER = {"unet": "cuda:1", "vae": {"execution": "cuda:0", "offload": "model"}, "text_encoder": "cpu"}
"""A placement that has nothing in common with any of the modes."""
SMALLEST_BYTES = 94720
"""The weights of the text encoder, the smallest component."""


@pytest.fixture(scope="module")
def plain(one_thread: None) -> Any:
    """The digits on the cpu."""
    return DiffusionPipeline.from_pretrained(PIPELINE)


@pytest.fixture(scope="module")
def expected(plain: Any) -> list[np.ndarray]:
    """The pictures of a plain cpu run, one per seed."""
    return [draw(plain, seed) for seed in SEEDS]


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A spec file of a copy of the digits, which is beside it, with nothing else around."""
    shutil.copytree(PIPELINE, tmp_path / "source")
    file = tmp_path / "pipe.yaml"
    file.write_text("version: 1\npipeline: {source: ./source}\nreserve: 0\n", encoding="utf-8")
    return file


def draw(pipe: Any, seed: int) -> np.ndarray:
    """Return a seven in two steps: the denoiser is entered again and again all the same."""
    return draw_digit(pipe, seed, steps=2)


def assert_draws(pipe: Any, expected: list[np.ndarray]) -> None:
    """Check that generations in a row have the bits of the plain run."""
    assert [np.array_equal(draw(pipe, seed), picture) for seed, picture in zip(SEEDS, expected, strict=True)] == [
        True
    ] * len(SEEDS)


def files_below(folder: Path) -> dict[str, tuple[int, int]]:
    """Return every file below a folder, with its size and the time of its last change."""
    found = {path.relative_to(folder): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


def weight_files(spec: Path, mode: str) -> set[str]:
    """Return the files that hold the weights of what rests on disk in a mode."""
    names = {path.partition(".")[0] for path in resting_paths(mode)}
    return {str(file) for name in names for file in (spec.parent / "source" / name).glob("*.safetensors")}


def sent_bytes() -> int:
    """Return what this process has handed to the system to be written so far, to files or anything else."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["wchar"])


def weight_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of a module's parameters."""
    return sum(tensor.numel() * tensor.element_size() for tensor in module.parameters())


# B116: offloading to disk copies the whole model to a second folder, and has it in memory first


@over_modes
def test_b116_weights_rest_in_the_files_they_came_in_and_nothing_is_written(
    mode: str, spec: Path, monkeypatch: pytest.MonkeyPatch, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """No file is made or changed, here or in the temporary folder, and no byte of a mapping becomes memory of its own.

    What the load has the system write, wherever that is, is less than the smallest component by far: a line of a log.
    """
    monkeypatch.chdir(spec.parent)
    monkeypatch.setattr(tempfile, "tempdir", str(spec.parent))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    virtual_machine()
    plan_from_yaml(spec)  # what is kept of the installed classes is written once, and not by a load
    before, sent = files_below(spec.parent), sent_bytes()

    pipe = load_from_yaml(spec, {"device_map": MODES[mode]})

    assert sent_bytes() - sent < 20 * KIB < SMALLEST_BYTES // 4
    assert mapped_files(resting_tensors(pipe, resting_paths(mode))) == weight_files(spec, mode)
    assert_draws(pipe, expected)
    assert mapped_files(resting_tensors(pipe, resting_paths(mode))) == weight_files(spec, mode)
    assert {count for file in weight_files(spec, mode) for count in anonymous_kib(file)} == {0}
    assert files_below(spec.parent) == before


@pytest.mark.parametrize("how", ["model", "sequential"])
def test_b116_a_component_in_shards_rests_in_its_shards(
    how: str, spec: Path, plain: Any, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """Each weight is mapped from the shard it came in; the shards are all there is."""
    folder = spec.parent / "source" / "unet"
    shutil.rmtree(folder)
    plain.unet.save_pretrained(folder, max_shard_size="1MB")
    shards = {str(file) for file in folder.glob("*.safetensors")}
    before = files_below(spec.parent)
    virtual_machine()

    pipe = load_from_yaml(spec, {"device_map": {"unet": on_disk("cuda:0", how), "default": "cuda:1"}})

    assert len(shards) > 2
    assert mapped_files(resting_tensors(pipe, ("unet",))) == shards
    assert np.array_equal(draw(pipe, 0), expected[0])
    assert files_below(spec.parent) == before


@over_modes
def test_b116_the_plan_reports_that_nothing_is_written_and_no_host_memory_needed(
    mode: str, spec: Path, virtual_machine: MakeMachine
) -> None:
    """What rests on disk rests in the files it came in, takes nothing of the cpu, and no folder is asked for."""
    virtual_machine()

    plan = plan_from_yaml(spec, {"device_map": MODES[mode]})

    assert device_use(plan, "disk").description == "files the weights came in"
    assert device_use(plan, "disk").used_bytes == sum(each.bytes_on_disk for each in plan.assignments) > 0
    assert device_use(plan, "cpu").used_bytes == 0
    assert not any(each.is_written for each in plan.assignments)


# B117: offloading to disk what is offloaded already crashes


def to_disk(module: torch.nn.Module, folder: Path) -> None:
    accelerate.disk_offload(module, str(folder), execution_device="cuda:0")


def to_cpu(module: torch.nn.Module, folder: Path) -> None:
    accelerate.cpu_offload(module, execution_device="cuda:0")


def half_to_disk(module: torch.nn.Module, folder: Path) -> None:
    """One block of it only."""
    accelerate.disk_offload(module.mid_block, str(folder), execution_device="cuda:0")


OFFLOADS_OF_OTHERS: Mapping[str, Callable[[Any, Path], None]] = {
    "to disk": to_disk, "to the cpu": to_cpu, "in part": half_to_disk,
}  # fmt: skip
over_offloads_of_others = pytest.mark.parametrize("offload", OFFLOADS_OF_OTHERS)


@over_offloads_of_others
def test_b117_a_component_that_others_offloaded_is_not_swapped_in(
    offload: str, spec: Path, tmp_path: Path, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """Refused with the likely cause, whole or in part on meta; the pipeline is as it was."""
    virtual_machine()
    pipe = load_from_yaml(spec, {"device_map": MODES["sequential"]})
    old = pipe.unet
    new = type(old).from_pretrained(PIPELINE / "unet")
    OFFLOADS_OF_OTHERS[offload](new, tmp_path / "theirs")

    with pytest.raises(DMConfigError, match=r"the new unet .* is offloaded") as caught:
        dmconfig.swap(pipe, "unet", new)

    assert "remove others' offload hooks" in only_problem(caught.value).fix
    assert pipe.unet is old
    assert not dmconfig.report(pipe).problems
    assert np.array_equal(draw(pipe, 0), expected[0])


@over_offloads_of_others
def test_b117_a_pipeline_with_a_component_that_others_offloaded_is_refused_by_name(
    offload: str, spec: Path, tmp_path: Path, virtual_machine: MakeMachine
) -> None:
    """Placing says which component is offloaded already; no component is placed then."""
    virtual_machine()
    pipe = DiffusionPipeline.from_pretrained(spec.parent / "source")
    OFFLOADS_OF_OTHERS[offload](pipe.unet, tmp_path / "theirs")

    with pytest.raises(DMConfigError, match=r"unet: .* offloaded"):
        dispatch(pipe, plan_from_yaml(spec, {"device_map": MODES["model"]}))

    assert placement_of(pipe) is None


@pytest.mark.parametrize("switch", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
@over_modes
def test_b117_a_second_offload_of_diffusers_is_refused_or_takes_over(
    mode: str, switch: str, spec: Path, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """A pipeline on disk is offloaded by one of two, never by both: it draws all the same."""
    virtual_machine()
    pipe = load_from_yaml(spec, {"device_map": MODES[mode]})

    try:
        getattr(pipe, switch)()
    except (ValueError, DMConfigError):
        assert not dmconfig.report(pipe).problems
    else:
        assert placement_of(pipe) is None

    assert_draws(pipe, expected)


# B122: no way back from a model that is offloaded to disk


@over_modes
def test_b122_a_pipeline_on_disk_becomes_a_plain_one(
    mode: str, spec: Path, plain: Any, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """Every state dict is whole, nothing is on meta, and the bits are those of the files; others can offload it."""
    virtual_machine()
    pipe = load_from_yaml(spec, {"device_map": MODES[mode]})

    pipe.reset_device_map()

    for name, module in modules_of(pipe).items():
        state = module.state_dict()
        assert {str(tensor.device) for tensor in state.values()} == {"cpu"}
        assert all(bits_equal(state[key], tensor) for key, tensor in getattr(plain, name).state_dict().items())
    pipe.enable_sequential_cpu_offload(device="cuda:0")
    assert np.array_equal(draw(pipe, 0), expected[0])


@over_modes
def test_b122_a_pipeline_on_disk_moves_to_one_device(
    mode: str, spec: Path, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """``to`` needs no step before it: the weights are read from their files, and no hook is left."""
    virtual_machine()
    pipe = load_from_yaml(spec, {"device_map": MODES[mode]})

    pipe.to("cuda:1")

    assert placement_of(pipe) is None
    assert {str(tensor.device) for part in modules_of(pipe).values() for tensor in part.parameters()} == {"cuda:1"}
    assert_draws(pipe, expected)


@over_modes
def test_b122_a_pipeline_on_disk_changes_its_mode(
    mode: str, spec: Path, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """Placed by another plan it leaves the disk, without being loaded again."""
    virtual_machine()
    pipe = load_from_yaml(spec, {"device_map": MODES[mode]})

    dispatch(pipe, plan_from_yaml(spec, {"device_map": OTHER}))

    assert dict(pipe.hf_device_map) == {"unet": "cuda:1", "vae": "cpu", "text_encoder": "cpu"}
    assert not dmconfig.report(pipe).problems
    assert_draws(pipe, expected)


@pytest.mark.parametrize("name", ["saved", "source"])
@over_modes
def test_b122_a_pipeline_on_disk_is_saved_whole(
    mode: str, name: str, spec: Path, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """All weights are in the saved folder, also when it is the one that they rest in; the placement goes on."""
    virtual_machine()
    pipe = load_from_yaml(spec, {"device_map": MODES[mode]})

    pipe.save_pretrained(spec.parent / name)

    assert not dmconfig.report(pipe).problems
    assert np.array_equal(draw(pipe, 0), expected[0])
    for part in PARTS:
        files = [next((folder / part).glob("*.safetensors")) for folder in (spec.parent / name, PIPELINE)]
        saved, original = map(load_file, files)
        assert saved.keys() == original.keys()
        assert all(bits_equal(saved[key], tensor) for key, tensor in original.items())


# B126: what is offloaded to disk in groups is read twice


FORWARDS = 3
ONCE_EACH: Mapping[str, tuple[dict[str, Any], int, int]] = {
    "whole, from its file": (on_disk("cuda:0", "model"), 1, 0),
    "layer by layer, from its file": (on_disk("cuda:0", "sequential"), FORWARDS, 0),
    "in groups, from the cpu": ({"execution": "cuda:0", "offload": "group"}, FORWARDS, FORWARDS),
}
"""How the denoiser is brought, how often in a call of so many forwards, and how often it is copied back."""


@pytest.mark.parametrize("how", ONCE_EACH)
def test_b126_every_weight_is_brought_once(how: str, spec: Path, virtual_machine: MakeMachine) -> None:
    """Once per call, or per forward where it comes in pieces, and not a byte more; what has a file is not copied back.

    Groups are copied back by diffusers' hooks, which is why they have no place on disk.
    """
    entry, times, times_back = ONCE_EACH[how]
    machine = virtual_machine()
    pipe = load_from_yaml(spec, {"device_map": {"unet": entry, "default": "cuda:1"}})
    unet = type(pipe.unet).from_pretrained(PIPELINE / "unet")
    nbytes, count = weight_bytes(unet), len([*unet.parameters()])
    inputs = torch.zeros(1, 4, 8, 8, device="cuda:0"), 1, torch.zeros(1, 16, 32, device="cuda:0")
    machine.ledger.reset()

    with torch.no_grad():
        for _ in range(FORWARDS):
            pipe.unet(*inputs)
    pipe.maybe_free_model_hooks()

    brought = machine.ledger.moved(source="cpu", destination="cuda:0", kind="weights")
    back = machine.ledger.moved(destination="cpu", kind="weights")
    assert (brought.bytes, brought.count) == (times * nbytes, times * count)
    assert (back.bytes, back.count) == (times_back * nbytes, times_back * count)


def test_b126_groups_on_disk_are_refused_with_what_to_use(spec: Path, virtual_machine: MakeMachine) -> None:
    """The hooks copy each group into memory when they send it home, so groups have no place on disk."""
    virtual_machine()

    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(spec, {"device_map": {"unet": on_disk("cuda:0", "group"), "default": "cuda:1"}})

    problem = only_problem(caught.value)
    assert (problem.code, problem.path) == (Code.CONTRADICTION, ("device_map", "unet", "storage"))
    assert "sequential" in problem.fix


# B129: mapping a file and copying out of it takes the memory twice


def test_b129_weights_are_cast_one_component_after_the_other(spec: Path, virtual_machine: MakeMachine) -> None:
    """At most one component is in memory both as it is stored and as it is loaded; nothing is there a third time."""
    machine = virtual_machine()
    stored = {name: weight_bytes(part) for name, part in modules_of(load_from_yaml(spec)).items()}
    machine.ledger.reset()

    pipe = load_from_yaml(spec, {"pipeline.dtype": "bfloat16", "device_map": "cuda:0"})

    cast = sum(weight_bytes(part) for part in modules_of(pipe).values())
    assert cast == sum(stored.values()) // 2
    assert cast < machine.ledger.peak_bytes("cpu") <= cast + max(stored.values()) + 64 * KIB


def test_b129_what_is_not_cast_is_mapped_once_and_copied_to_its_device(
    spec: Path, virtual_machine: MakeMachine
) -> None:
    """The host never has more than the mapping, and nothing of it once the weights are on their device."""
    machine = virtual_machine()

    pipe = load_from_yaml(spec, {"device_map": "cuda:0"})

    nbytes = sum(weight_bytes(part) for part in modules_of(pipe).values())
    assert machine.ledger.peak_bytes("cpu") <= nbytes + 64 * KIB
    assert machine.ledger.live_bytes("cpu") < 64 * KIB
    source = str(spec.parent / "source")
    assert source not in Path("/proc/self/maps").read_text()


SIZES = footprints(text_encoder=1, unet=4, vae=2)


def unified_machine(size: float) -> Inventory:
    """Return a machine with one accelerator, whose memory is the host's own."""
    machine = inventory(cuda=[size], cpu=size)
    accelerators = tuple(replace(device, id="mps:0") for device in machine.accelerators)
    return replace(machine, accelerators=accelerators, unified=("mps:0",))


def unified_plan(device_map: str, size: float) -> Any:
    """Return the plan of toy sizes, of 7 GiB in all, on a unified machine."""
    return plan_from(f"{DIGITS_TEXT}reserve: 0\ndevice_map: {device_map}\n", unified_machine(size), SIZES)


ONE_MEMORY = {
    "apart": ("{unet: mps, default: cpu}", 4 + 3),
    "brought from the cpu": ("{unet: {execution: mps, offload: model}, default: cpu}", 4 + 4 + 3),
    "brought from its file": ("{unet: {execution: mps, offload: model, storage: disk}, default: cpu}", 4 + 3),
}
"""Placements, and the GiB that they take of the one memory: what rests there and the copy that runs."""
over_one_memory = pytest.mark.parametrize("case", ONE_MEMORY)


@over_one_memory
def test_b129_what_fits_a_unified_memory_is_planned(case: str) -> None:
    """All that rests on the cpu and all that is on the accelerator, together, within the one memory."""
    device_map, need = ONE_MEMORY[case]

    plan = unified_plan(device_map, need)

    used = {device: device_use(plan, device).used_bytes / GIB for device in ("mps:0", "cpu")}
    assert used["mps:0"] + used["cpu"] == need


@over_one_memory
def test_b129_what_does_not_fit_a_unified_memory_is_refused(case: str) -> None:
    """A mapped copy that rests and a copy that runs come out of one memory, and are counted both."""
    device_map, need = ONE_MEMORY[case]

    with pytest.raises(PlanError) as caught:
        unified_plan(device_map, need - 1)

    assert {problem.code for problem in caught.value.problems} == {Code.DOES_NOT_FIT}
