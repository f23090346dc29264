"""Phrases that several views of a plan share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dmconfig.devices import CPU, is_accelerator
from dmconfig.footprint import MeasuredFrom
from dmconfig.plan.model import Part, Plan, Residency
from dmconfig.units import format_bytes, format_seconds

SOURCES: dict[MeasuredFrom, str] = {
    "weights": "the headers of the weights",
    "catalogue": "the packaged catalogue (no weights on this machine)",
    "configs": "the configs (no weights there)",
    "hub": "the headers of the weights on the hub",
}
BROUGHT = {
    Residency.WHILE_RUNNING: "brought whole",
    Residency.PER_GROUP: "brought in groups of layers",
    Residency.PER_LEAF: "brought layer by layer",
}


def estimate(plan: Plan) -> str:
    """Return what a generation takes beside computing; nothing where there is no accelerator to compare with."""
    if not any(is_accelerator(device.id) for device in plan.devices):
        return ""
    if not plan.seconds:
        return "no weights move during a generation"
    takes = f"about {format_seconds(plan.seconds)} per generation"
    computed = any(a.execution_device == CPU and a.seconds for a in plan.assignments)
    if not plan.moved_bytes:
        return f"computing on the cpu: {takes}"
    what = "moving weights and computing on the cpu" if computed else "moving weights"
    return f"{what}: {takes} ({format_bytes(round(plan.moved_bytes))} moved)"


def placing(plan: Plan) -> str:
    """Return for which machine a plan is, and where the pipeline itself works."""
    return f"on {plan.machine}; latents and embeddings live on {plan.execution_device}"


def residency_word(residency: Residency) -> str:
    """Return a residency as it is shown."""
    return residency.value.replace("_", " ")


def runs_of_parts(parts: Iterable[Part]) -> Iterator[tuple[str, list[Part]]]:
    """Yield parts under the name to show: those that are members of a list, one after the other, as one range."""
    runs: list[list[Part]] = []
    for part in parts:
        if runs and _follows(runs[-1][-1], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    for run in runs:
        name = run[0].path or "(the rest)"
        yield (f"{name}-{run[-1].path.rpartition('.')[2]}" if len(run) > 1 else name), run


def _follows(one: Part, other: Part) -> bool:
    """Tell whether a part is the next member of the list that another is in, at the same place."""
    (above, _, index), (above_other, _, next_index) = one.path.rpartition("."), other.path.rpartition(".")
    numbered = index.isdigit() and next_index.isdigit() and int(next_index) == int(index) + 1
    return numbered and above == above_other and _place(one) == _place(other)


def _place(part: Part) -> tuple[str, str, str]:
    return part.execution_device, part.storage_device, part.residency
