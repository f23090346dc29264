"""What a plan says a pipeline takes, as people have reported it: one section per report.

The numbers B151 to B154 stand for public reports on accelerate and on calculators of memory. What has to load a
pipeline is in ``tests/integration/test_field_reports_estimation.py``.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dmconfig.catalog import find_pipeline, known_ids
from dmconfig.cli import app
from dmconfig.inventory import parse_machine
from dmconfig.plan import Plan
from dmconfig.units import GIB, MIB
from tests.conftest import EXAMPLES, device_use, footprints, inventory, plan_from
from tests.sparse_weights import write_safetensors

PIPELINE = EXAMPLES / "digits" / "pipeline"
SIZES = footprints(text_encoder=1, unet=4, vae=2)
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
LARGE = ("--gpus", "8x80GiB", "--ram", "512GiB")
ON_THE_HUB = sorted(
    {pipeline.hub_id for pipeline in map(find_pipeline, known_ids()) if pipeline and "/" in pipeline.hub_id}
)


def shapes_in(file: Path) -> dict[str, Sequence[int]]:
    """The shape of every tensor in a safetensors file, from its header."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def elements_of(folder: Path) -> int:
    """The numbers that the weights of a component hold."""
    files = [*folder.glob("*.safetensors")]
    return sum(math.prod(shape) for file in files for shape in shapes_in(file).values())


def stored_as(dtype: str, folder: Path) -> Path:
    """A copy of the digits whose headers say that the weights are stored in dtype; their bodies are holes."""
    shutil.copytree(PIPELINE, folder)
    for file in folder.rglob("*.safetensors"):
        tensors = {name: (STORED[dtype], shape) for name, shape in shapes_in(file).items()}
        file.unlink()
        write_safetensors(file, tensors)
    return folder


def digits(source: Path, lines: str = "") -> str:
    """A spec of the digits in a folder."""
    return f"version: 1\npipeline: {{source: {source}{lines}}}\nreserve: 0\n"


def text_of(tmp_path: Path, spec: str, *machine: str) -> str:
    """What ``dmconfig plan`` prints, on a wide terminal."""
    file = tmp_path / "spec.yaml"
    file.write_text(spec, encoding="utf-8")
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan", str(file), *machine])
    assert result.exit_code == 0, result.output
    return result.output


# B151: the stored dtype is applied twice, and half the truth comes out


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", ["auto", *STORED])
def test_b151_sizes_are_those_of_the_target_dtype_whatever_is_stored(stored: str, dtype: str, tmp_path: Path) -> None:
    """Numbers times the bytes of the dtype they are loaded in; ``auto`` is the stored one, applied once."""
    source = stored_as(stored, tmp_path / "digits")
    plan = plan_from(digits(source, f", dtype: {dtype}"), inventory(cuda=[2]))
    loaded = stored if dtype == "auto" else dtype
    for each in plan.assignments:
        assert (each.dtype, each.measured_from) == (loaded, "weights")
        assert each.nbytes == elements_of(PIPELINE / each.component) * BYTES[loaded]


def test_b151_a_component_s_own_dtype_is_its_own() -> None:
    """One component in float32 beside others in bfloat16 takes twice the bytes, and only that one."""
    text = "version: 1\npipeline: {source: Wan-AI/Wan2.1-T2V-1.3B-Diffusers, dtype: bfloat16}\n"
    half, mixed = (plan_from(text + more, inventory(cuda=[80])) for more in ("", "components: {vae: {dtype: fp32}}\n"))
    ratios = {b.component: b.nbytes / a.nbytes for a, b in zip(half.assignments, mixed.assignments, strict=True)}
    assert ratios == {"vae": 2, "text_encoder": 1, "transformer": 1}


@pytest.mark.parametrize("hub_id", ON_THE_HUB)
def test_b151_packaged_figures_follow_the_target_dtype(hub_id: str) -> None:
    """For pipelines that are not here: both 16-bit types take the same bytes or nearly so, and float32 the most."""
    totals = {}
    for dtype in STORED:
        text = f"version: 1\npipeline: {{source: {hub_id}, dtype: {dtype}}}\nreserve: 0\ndevice_map: cpu\n"
        totals[dtype] = sum(each.nbytes for each in plan_from(text, inventory(cpu=4096)).assignments)
    # layers that stay in float32 make the difference
    assert totals["bfloat16"] <= totals["float16"] <= 1.25 * totals["bfloat16"]
    assert 1.6 * totals["float16"] <= totals["float32"] <= 2 * totals["bfloat16"]


# B152: the estimate is far below what a run takes


@pytest.mark.parametrize("lines", ["", "device_map: cuda:0\nlow_memory: sequential_cpu_offload\n"])
def test_b152_figures_are_labelled_as_weights_and_reserve(lines: str, tmp_path: Path) -> None:
    """The column and the bar of a card say that they are of weights; what is kept for activations is told apart."""
    spec = digits(PIPELINE).replace("reserve: 0", "reserve: 3GiB") + lines
    printed = text_of(tmp_path, spec, "--gpus", "24GiB", "--ram", "64GiB").splitlines()
    (header,) = [line for line in printed if line.startswith("component")]
    (card,) = [line for line in printed if line.startswith("cuda:0 ")]
    assert "weights" in header.split()
    assert re.search(r" [KMG]iB weights, +3\.0 GiB reserve, ", card)


def test_b152_the_plan_says_what_is_not_counted(tmp_path: Path) -> None:
    """Who reads the figures alone learns that activations come on top, even where no reserve is kept."""
    printed = text_of(tmp_path, digits(PIPELINE), "--gpus", "24GiB", "--ram", "64GiB")
    assert "activations" in printed


# B153: the weights fit, the run does not; repositories of several parts have no total


@pytest.mark.parametrize("hub_id", ON_THE_HUB)
def test_b153_the_total_is_the_sum_over_all_components(hub_id: str) -> None:
    """What a device holds is every component that the catalogue knows of the pipeline, added up."""
    text = f"version: 1\npipeline: {{source: {hub_id}}}\nreserve: 0\ndevice_map: cuda:0\n"
    plan = plan_from(text, parse_machine("1x2TiB", "64GiB"))
    known = find_pipeline(hub_id)
    assert known is not None
    measured = {part.name: part.footprint(None) for part in known.components if part.is_module}
    parts = {name: size.nbytes for name, size in measured.items() if size is not None}
    assert {each.component: each.nbytes for each in plan.assignments} == parts
    assert device_use(plan, "cuda:0").used_bytes == sum(parts.values())


@pytest.mark.parametrize("where", ["8GiB", "{vae: 8GiB, default: 0}", "{cuda:0: 8GiB, default: 0}"])
def test_b153_an_allowance_for_the_size_of_pictures_counts_before_anything_is_loaded(where: str) -> None:
    """7 GiB on a card of 12 fit; beside what a large picture takes they do not, and some of them is brought instead."""
    text = digits(PIPELINE).replace("reserve: 0", f"reserve: {where}")
    for lines in ("low_memory: cpu_offload_with_hook\n", "device_map: auto\n"):
        small = plan_from(digits(PIPELINE) + lines, inventory(cuda=[12]), SIZES)
        large = plan_from(text + lines, inventory(cuda=[12]), SIZES)
        assert device_use(small, "cuda:0").used_bytes == 7 * GIB
        card = device_use(large, "cuda:0")
        assert card.used_bytes + card.reserved_bytes <= 12 * GIB
        assert "cpu" in {each.storage_device for each in large.assignments}


# B154: only the denoiser is counted, and offloading as if everything were there at once


def peak(plan: Plan) -> int:
    """What weights take of the card at one time."""
    return device_use(plan, "cuda:0").used_bytes


@pytest.mark.parametrize("hub_id", ON_THE_HUB)
def test_b154_a_pipeline_is_more_than_its_denoiser(hub_id: str) -> None:
    """Text encoders and decoder are in the plan of every public pipeline, with their bytes."""
    checked = plan_from(
        f"version: 1\npipeline: {{source: {hub_id}}}\nreserve: 0\ndevice_map: cpu\n", inventory(cpu=4096)
    )
    denoisers = ("transformer", "transformer_2", "unet", "prior", "prior_prior", "decoder")
    others = [each for each in checked.assignments if each.component not in denoisers]
    assert others
    assert all(each.nbytes > MIB for each in others)


@pytest.mark.parametrize("order", [(1, 4, 2), (4, 1, 2), (2, 1, 4), (3, 3, 3)])
def test_b154_what_is_brought_in_turn_takes_its_largest_and_not_its_sum(order: tuple[float, float, float]) -> None:
    """One device: the sum where all stay, the largest component where they take turns, the largest layer by layer."""
    sizes = footprints(**dict(zip(("text_encoder", "unet", "vae"), order, strict=True)))
    text, machine = f"{digits(PIPELINE)}device_map: cuda:0\n", inventory(cuda=[24])
    stays = plan_from(text, machine, sizes)
    whole = plan_from(f"{text}low_memory: cpu_offload_with_hook\n", machine, sizes)
    layers = plan_from(f"{text}low_memory: sequential_cpu_offload\n", machine, sizes)
    assert (peak(stays), peak(whole), peak(layers)) == (
        sum(order) * GIB,
        max(order) * GIB,
        max(order) * GIB // 8,
    )
    assert device_use(whole, "cpu").used_bytes == device_use(layers, "cpu").used_bytes == sum(order) * GIB


def test_b154_what_runs_within_another_s_phase_is_added_to_it() -> None:
    """A safety checker is outside the order in which Stable Diffusion's parts take turns: it stays beside any other."""
    text = "version: 1\npipeline: {source: stable-diffusion-v1-5/stable-diffusion-v1-5}\nreserve: 0\n"
    text += "device_map: cuda:0\nlow_memory: cpu_offload_with_hook\n"
    plan = plan_from(text, inventory(cuda=[24]), footprints(text_encoder=1, unet=4, vae=2, safety_checker=1.5))
    assert peak(plan) == 5.5 * GIB


@pytest.mark.parametrize("hub_id", ON_THE_HUB)
def test_b154_public_pipelines_take_less_of_a_card_when_they_are_brought(hub_id: str) -> None:
    """Layer by layer takes less than whole, whole less than all at once; the host then holds every byte."""
    text = f"version: 1\npipeline: {{source: {hub_id}}}\nreserve: 0\ndevice_map: cuda:0\n"
    machine = parse_machine("1x2TiB", "2TiB")
    stays = plan_from(text, machine)
    whole = plan_from(f"{text}low_memory: cpu_offload_with_hook\n", machine)
    layers = plan_from(f"{text}low_memory: sequential_cpu_offload\n", machine)
    assert 0 < peak(layers) < peak(whole) < peak(stays)
    assert peak(whole) >= max(each.nbytes for each in whole.assignments)
    assert device_use(whole, "cpu").used_bytes == device_use(layers, "cpu").used_bytes == peak(stays)
