"""What a plan says a pipeline takes, held against what it takes, as people have reported it: one section per report.

The numbers B151 to B154 stand for public reports on accelerate and on calculators of memory; what needs no pipeline is
in ``tests/unit/test_field_reports_estimation.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from dmconfig import load_from_yaml, plan_from_yaml
from dmconfig.units import KIB
from tests.conftest import device_use
from tests.integration.test_matrix import weight_peaks
from tests.integration.test_placements import PIPELINE, draw
from tests.virtual_devices import MakeMachine

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDING = 256 * KIB
"""What an allocator that deals in steps of 512 bytes may take more than the few hundred tensors of the digits hold."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A spec of the digits per dtype in which their weights are stored."""
    specs = {}
    for dtype in ("float32", "float16", "bfloat16"):
        folder = tmp_path_factory.mktemp(dtype)
        pipe = DiffusionPipeline.from_pretrained(PIPELINE)
        pipe.to(getattr(torch, dtype)).save_pretrained(folder / "pipeline")
        specs[dtype] = folder / "spec.yaml"
        specs[dtype].write_text("version: 1\npipeline: {source: ./pipeline}\nreserve: 0\n", encoding="utf-8")
    return specs


# B151: the stored dtype is applied twice


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("written", ["float32", "float16", "bfloat16"])
def test_b151_planned_bytes_are_those_of_the_loaded_tensors(written: str, dtype: str, stored: dict[str, Path]) -> None:
    """Whatever is stored and whatever is asked for: to the byte what parameters and stored buffers take once loaded."""
    overrides = {"pipeline.dtype": dtype, "device_map": "cpu"}
    plan = plan_from_yaml(stored[written], overrides)
    pipe: Any = load_from_yaml(stored[written], overrides)
    for each in plan.assignments:
        held = getattr(pipe, each.component).state_dict().values()
        assert each.nbytes == sum(tensor.nbytes for tensor in held)
        assert each.dtype == (written if dtype == "auto" else dtype)


# B152, B154: what a generation has on the card


@pytest.mark.parametrize(
    ("word", "dtype"),
    [("none", "float32"), ("cpu_offload_with_hook", "bfloat16"), ("sequential_cpu_offload", "float32")],
)
def test_b154_the_most_weights_that_a_generation_has_on_the_card_were_planned(
    word: str, dtype: str, stored: dict[str, Path], virtual_machine: MakeMachine
) -> None:
    """All of them, the largest component, or the largest layer: neither more nor, by much, less than the plan says."""
    machine = virtual_machine()
    pipe: Any = load_from_yaml(stored[dtype], {"device_map": "cuda:0", "low_memory": word})
    planned = device_use(plan_from_yaml(stored[dtype], {"device_map": "cuda:0", "low_memory": word}), "cuda:0")
    machine.ledger.reset()
    with weight_peaks(machine.ledger, ["cuda:0"]) as peaks:
        draw(pipe, 0, steps=1)
    assert planned.used_bytes <= peaks["cuda:0"] <= planned.used_bytes + ROUNDING
    assert machine.ledger.peak_bytes("cuda:0") > peaks["cuda:0"]  # activations come on top: the reserve is for them
