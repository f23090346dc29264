"""Problems and plans as text and as JSON: two renderings of the same data. Nothing here prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dmconfig.devices import CPU, DISK, is_accelerator
from dmconfig.errors import Problem
from dmconfig.paths import render_path
from dmconfig.plan.model import Assignment, DeviceUse, Part, Plan, Proof
from dmconfig.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

_BAR_WIDTH = 32
_USED, _RESERVED, _FREE = "█", "▒", "·"
_HEADERS = ("component", "class", "dtype", "weights", "runs on", "rest on", "residency", "why")
_RIGHT = "weights"
_SAME_SECONDS = 1e-9


def problem_data(problem: Problem) -> dict[str, Any]:
    """Return problem as JSON data: code, name, file, line, column, path, what, why, fix, origin."""
    place = problem.location
    return {
        "code": problem.code.value,
        "name": problem.code.slug,
        "file": place.file if place else None,
        "line": place.line if place else None,
        "column": place.column if place else None,
        "path": render_path(problem.path) if problem.path else None,
        "what": problem.what,
        "why": problem.why or None,
        "fix": problem.fix or None,
        "origin": problem.origin or None,
    }


def problems_data(problems: Iterable[Problem]) -> dict[str, Any]:
    """Return the JSON data of a failure."""
    return {"ok": False, "problems": [problem_data(problem) for problem in problems]}


def plan_data(plan: Plan) -> dict[str, Any]:
    """Return plan as JSON data; sizes in bytes."""
    return {
        "ok": True,
        "pipeline": plan.pipeline,
        "machine": plan.machine,
        "execution_device": plan.execution_device,
        "device_map": dict(plan.device_map),
        "components": [_assignment_data(assignment) for assignment in plan.assignments],
        "devices": [_device_data(device) for device in plan.devices],
        "seconds": plan.seconds,
        "moved_bytes": round(plan.moved_bytes),
        "proof": None if plan.proof is None else asdict(plan.proof),
        "notes": list(plan.notes),
    }


def plan_text(plan: Plan) -> RenderableType:
    """Return plan as a table of components and a bar per device, for a rich console."""
    from rich.console import Group
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in _HEADERS:
        last = header == _HEADERS[-1]
        table.add_column(header, justify="right" if header == _RIGHT else "left", overflow="fold", no_wrap=not last)
    for assignment in plan.assignments:
        table.add_row(*_row(assignment))
        for name, parts in _runs(assignment.parts):
            table.add_row(*_part_row(name, parts))
    heading = f"{plan.pipeline} on {plan.machine}; latents and embeddings live on {plan.execution_device}"
    sources = ", ".join(dict.fromkeys(_SOURCES[a.measured_from] for a in plan.assignments))
    notes = [f"note: {note}" for note in plan.notes]
    bars = [_bar(device, plan) for device in plan.devices]
    return Group(heading, "", table, "", *bars, *_estimate(plan), f"sizes from {sources}", *notes)


def _estimate(plan: Plan) -> Iterator[str]:
    """What a generation takes beside computing, and what the search says of it."""
    if not any(is_accelerator(device.id) for device in plan.devices):
        return
    if not plan.seconds:
        yield "no weights move during a generation"
    else:
        computed = any(a.execution_device == CPU for a in plan.assignments)
        what = "moving weights and computing on the cpu" if computed else "moving weights"
        amount = format_bytes(round(plan.moved_bytes))
        yield f"{what}: about {format_seconds(plan.seconds)} per generation ({amount} moved)"
    if plan.proof is not None:
        yield from _proof(plan.proof)


def _proof(proof: Proof) -> Iterator[str]:
    if not proof.is_complete:
        least = format_seconds(proof.bound_seconds)
        yield f"the best of {proof.visited} steps; no placement takes less than {least}"
    elif proof.seconds:
        yield f"proven in {proof.visited} steps: no placement takes less"
    if proof.runner_up and proof.runner_up_seconds is not None:
        more = proof.runner_up_seconds - proof.seconds
        lost = f"{format_seconds(more)} more" if more > _SAME_SECONDS else "as fast, and less even or over more devices"
        yield f"next best: {proof.runner_up} ({lost})"


_SOURCES = {
    "weights": "the headers of the weights",
    "catalogue": "the packaged catalogue (no weights on this machine)",
    "configs": "the configs (no weights there)",
}


def _row(assignment: Assignment) -> tuple[str, ...]:
    return (
        assignment.component,
        assignment.class_name,
        assignment.dtype,
        format_bytes(assignment.nbytes),
        assignment.execution_device,
        assignment.storage_device,
        assignment.residency.value.replace("_", " "),
        assignment.reason,
    )


def _runs(parts: Iterable[Part]) -> Iterator[tuple[str, list[Part]]]:
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


def _part_row(name: str, parts: Sequence[Part]) -> tuple[str, ...]:
    device, storage, residency = _place(parts[0])
    size = format_bytes(sum(part.nbytes for part in parts))
    return f"  {name}", "", "", size, device, storage, residency.replace("_", " "), ""


def _bar(device: DeviceUse, plan: Plan) -> str:
    """One line: what of a device's budget is used, reserved and free."""
    width = max(len(other.id) for other in plan.devices)
    budget = max(device.budget_bytes, 1)
    used = min(_BAR_WIDTH, -(-device.used_bytes * _BAR_WIDTH // budget))
    reserved = min(_BAR_WIDTH - used, -(-device.reserved_bytes * _BAR_WIDTH // budget))
    bar = _USED * used + _RESERVED * reserved + _FREE * (_BAR_WIDTH - used - reserved)
    parts = [f"{format_bytes(device.used_bytes)} weights"]
    if device.id == DISK:
        parts.append(f"in the {device.description}")
    if device.reserved_bytes:
        parts.append(f"{format_bytes(device.reserved_bytes)} reserve")
    if device.id != DISK or device.free_bytes:
        parts.append(f"{format_bytes(device.free_bytes)} free of {format_bytes(device.budget_bytes)}")
    return f"{device.id:<{width}}  {bar}  {', '.join(parts)}"


def _assignment_data(assignment: Assignment) -> dict[str, Any]:
    return {
        "component": assignment.component,
        "class": assignment.class_name,
        "dtype": assignment.dtype,
        "bytes": assignment.nbytes,
        "peak_bytes": assignment.peak_bytes,
        "measured_from": assignment.measured_from,
        "execution_device": assignment.execution_device,
        "storage_device": assignment.storage_device,
        "residency": assignment.residency.value,
        "reason": assignment.reason,
        "parts": [_part_data(part) for part in assignment.parts],
        "is_written": assignment.is_written,
        "calls": assignment.calls,
        "seconds": assignment.seconds,
        "moved_bytes": round(assignment.moved_bytes),
    }


def _part_data(part: Part) -> dict[str, Any]:
    return {
        "path": part.path,
        "bytes": part.nbytes,
        "peak_bytes": part.peak_bytes,
        "execution_device": part.execution_device,
        "storage_device": part.storage_device,
        "residency": part.residency.value,
    }


def _device_data(device: DeviceUse) -> dict[str, Any]:
    return {
        "id": device.id,
        "description": device.description,
        "total_bytes": device.total_bytes,
        "budget_bytes": device.budget_bytes,
        "used_bytes": device.used_bytes,
        "reserved_bytes": device.reserved_bytes,
        "free_bytes": device.free_bytes,
    }
