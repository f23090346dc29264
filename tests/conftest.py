"""Builders that tests share: a spec from text, a machine from sizes, footprints from numbers, a plan from all three.

Plain functions, imported where they are used (``from tests.conftest import plan_from``). Sizes are in GiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dmconfig.check import check
from dmconfig.checked import Checked
from dmconfig.document import Document, parse_document
from dmconfig.errors import DMConfigError, Problem
from dmconfig.footprint import Footprint
from dmconfig.inventory import Device, Inventory
from dmconfig.measure import measure
from dmconfig.plan import Assignment, DeviceUse, Plan, make_plan
from dmconfig.resolve import Resolved, overrides_from_mapping, resolve
from dmconfig.spec import Spec, validate_spec
from dmconfig.units import GIB

if TYPE_CHECKING:
    from tests.tiny_pipelines import Tiny

pytest_plugins = ["tests.virtual_devices", "tests.loopback_hub"]

EXAMPLES = Path(__file__).parents[1] / "examples"
DIGITS = "version: 1\npipeline: {source: ./digits/pipeline}\n"
"""The head of a spec of the trained example: components text_encoder, unet and vae have weights; two lines."""


def document_from(text: str, *, name: str = "spec.yaml", folder: Path = EXAMPLES) -> Document:
    """Return the document in text; relative paths in it start in the folder of examples."""
    return parse_document(text, name=name, folder=folder)


def resolved_from(text: str, overrides: Mapping[str, Any] | None = None) -> Resolved:
    """Return text with overrides (dotted key -> value) applied."""
    return resolve(document_from(text), overrides_from_mapping(overrides or {}))


def spec_from(text: str, overrides: Mapping[str, Any] | None = None) -> Spec:
    """Return the validated spec in text."""
    return validate_spec(resolved_from(text, overrides))


def checked_from(text: str, overrides: Mapping[str, Any] | None = None) -> Checked:
    """Return the spec in text after every rule, with what its pipeline is made of."""
    resolved = resolved_from(text, overrides)
    spec = validate_spec(resolved)
    return Checked(resolved=resolved, spec=spec, assembly=check(resolved, spec))


def plan_from(
    text: str,
    machine: Inventory,
    sizes: Mapping[str, Footprint] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Plan:
    """Return the plan of the spec in text on machine, with the pipeline's own sizes or the ones given."""
    checked = checked_from(text, overrides)
    sizes = measure(checked.resolved, checked.assembly) if sizes is None else sizes
    return make_plan(checked.resolved, checked.spec, checked.assembly, sizes, machine)


def inventory(cuda: Sequence[float] = (), cpu: float = 64, *, free: Mapping[str, float] | None = None) -> Inventory:
    """Return a machine: an accelerator per size in cuda, and cpu of host memory; all free but what ``free`` names."""
    free = free or {}

    def device(name: str, size: float) -> Device:
        total = int(size * GIB)
        return Device(id=name, description="toy", total_bytes=total, free_bytes=int(free.get(name, size) * GIB))

    accelerators = tuple(device(f"cuda:{index}", size) for index, size in enumerate(cuda))
    return Inventory(accelerators=accelerators, host=device("cpu", cpu), name="a toy machine")


def footprints(**sizes: float) -> dict[str, Footprint]:
    """Return a footprint per name; of each, the largest leaf is an eighth, a block a quarter."""
    return {
        name: Footprint(
            nbytes=int(size * GIB),
            dtype="float16",
            stored_dtype="float16",
            largest_leaf_bytes=int(size * GIB) // 8,
            largest_block_bytes=int(size * GIB) // 4,
            outside_blocks_bytes=int(size * GIB) // 16,
            needs_cast=False,
            measured_from="weights",
        )
        for name, size in sizes.items()
    }


def assignment(plan: Plan, component: str) -> Assignment:
    """Return the one assignment of component."""
    (found,) = [each for each in plan.assignments if each.component == component]
    return found


def device_use(plan: Plan, device: str) -> DeviceUse:
    """Return the one entry of device."""
    (found,) = [each for each in plan.devices if each.id == device]
    return found


def only_problem(error: DMConfigError) -> Problem:
    """Return the problem of an error that has just one."""
    (problem,) = error.problems
    return problem


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny pipelines, each written once for the session when it is first asked for."""
    # here and not above: tests that show that nothing imports torch run in the same session
    from tests.tiny_pipelines import Tiny

    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run a module's tests with one thread: other numbers may give other bits, and small tensors are slower."""
    # here and not above: tests that show that nothing imports torch run in the same session
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
