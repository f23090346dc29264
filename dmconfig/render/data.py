"""Problems and plans as JSON data. The records say what the JSON holds; the published schema is made from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal, cast

from pydantic import Field
from typing_extensions import TypedDict  # pydantic makes no schema of typing's own before Python 3.12

from dmconfig.errors import Problem
from dmconfig.footprint import MeasuredFrom
from dmconfig.inventory import Inventory
from dmconfig.paths import render_path
from dmconfig.plan import Alternative, Assignment, Comparison, DeviceUse, Part, Plan, Proof, Residency

PLAN_VERSION = 1

Device = Annotated[str, Field(description="The full name of a device: cpu, disk, or an accelerator such as cuda:0.")]
Seconds = Annotated[float, Field(ge=0, description="Seconds per generation, an estimate.")]


class ProblemData(TypedDict):
    """One finding: where it is, what is wrong, why that is a problem, and how to mend it."""

    code: Annotated[str, Field(pattern="^DM[0-9]{3}$", description="The stable code, e.g. DM503.")]
    name: Annotated[str, Field(description="The kind in words, e.g. does-not-fit.")]
    file: Annotated[str | None, Field(description="The file it is in, where it is in one.")]
    line: Annotated[int | None, Field(description="The line in the file, from 1.")]
    column: Annotated[int | None, Field(description="The column in the line, from 1.")]
    path: Annotated[str | None, Field(description="The key in the file, e.g. device_map.unet.")]
    what: Annotated[str, Field(description="What is wrong.")]
    why: Annotated[str | None, Field(description="Why that is a problem.")]
    fix: Annotated[str | None, Field(description="What to write instead.")]
    origin: Annotated[str | None, Field(description="The override or option that it came from, where it did.")]


class ProblemsData(TypedDict):
    """What a command prints in place of its result when it fails."""

    ok: Literal[False]
    problems: Annotated[list[ProblemData], Field(description="All problems of the first phase that has any.")]


class PartData(TypedDict):
    """The place of one part of a split component."""

    path: Annotated[str, Field(description="A module path within the component; empty for all that no other names.")]
    bytes: Annotated[int, Field(ge=0, description="Its weights at the component's dtype, in bytes.")]
    peak_bytes: Annotated[int, Field(ge=0, description="The most of it on its execution device at once, in bytes.")]
    execution_device: Device
    storage_device: Device
    residency: Residency


_ComponentNames = TypedDict(
    "_ComponentNames",
    {
        "component": Annotated[str, Field(description="Its name in the pipeline, e.g. text_encoder_2.")],
        "class": Annotated[str, Field(description="Its class, e.g. T5EncoderModel.")],
    },
)


class ComponentData(_ComponentNames):
    """One component's place: where it runs, where its weights rest, and why."""

    dtype: Annotated[str, Field(description="The dtype that its weights are loaded in.")]
    bytes: Annotated[int, Field(ge=0, description="All of its weights at that dtype, in bytes.")]
    peak_bytes: Annotated[
        int,
        Field(ge=0, description="The most on its execution device at once, in bytes. Of a split one: of the rest."),
    ]
    measured_from: Annotated[MeasuredFrom, Field(description="What the size was read from.")]
    execution_device: Annotated[Device, Field(description="Where it runs.")]
    storage_device: Annotated[Device, Field(description="Where its weights rest.")]
    residency: Residency
    reason: Annotated[str, Field(description="Why it is there.")]
    parts: Annotated[list[PartData], Field(description="Its parts, where it is split; the rest comes first.")]
    is_written: Annotated[
        bool, Field(description="Whether what rests on disk is cast, and so is written to the offload folder.")
    ]
    casts_inputs: Annotated[
        bool, Field(description="Whether what enters it is cast to its dtype, because its neighbours have another.")
    ]
    calls: Annotated[float, Field(ge=0, description="How often it runs per generation.")]
    seconds: Annotated[Seconds, Field(description="What its place adds to a generation, in seconds, an estimate.")]
    moved_bytes: Annotated[int, Field(ge=0, description="What is brought of it per generation, in bytes.")]


class DeviceData(TypedDict):
    """What a plan uses of one device. Used, reserved and free bytes add up to the budget."""

    id: Device
    description: Annotated[str, Field(description="What the device is, in words.")]
    total_bytes: Annotated[int, Field(ge=0, description="All of its memory, in bytes.")]
    budget_bytes: Annotated[int, Field(ge=0, description="What may be used: the least of limit and free, in bytes.")]
    used_bytes: Annotated[int, Field(ge=0, description="The most that weights take of it at one time, in bytes.")]
    reserved_bytes: Annotated[int, Field(ge=0, description="Kept for activations, where something runs, in bytes.")]
    free_bytes: Annotated[int, Field(ge=0, description="What is left of the budget, in bytes.")]


class ProofData(TypedDict):
    """What the search behind the strategy auto says of its answer."""

    seconds: Annotated[Seconds, Field(description="The price of the plan, in seconds per generation.")]
    bound_seconds: Annotated[Seconds, Field(description="What no placement falls below, in seconds per generation.")]
    visited: Annotated[int, Field(ge=0, description="How many places were tried.")]
    is_complete: Annotated[bool, Field(description="Whether that was all there was to try: the plan is the best.")]
    runner_up: Annotated[str, Field(description="The next best placement, by what is otherwise there; may be empty.")]
    runner_up_seconds: Annotated[float | None, Field(description="Its price, in seconds per generation.")]


class PlanData(TypedDict):
    """A plan, as `dmconfig plan --format json` prints it."""

    ok: Literal[True]
    pipeline: Annotated[str, Field(description="The pipeline's class.")]
    machine: Annotated[str, Field(description="The machine that the plan is for, in words.")]
    execution_device: Annotated[Device, Field(description="Where the pipeline works: latents are there.")]
    device_map: Annotated[
        dict[str, Device],
        Field(description="Component, or path of a part below one -> where its weights rest."),
    ]
    components: Annotated[list[ComponentData], Field(description="Those with weights, in the pipeline's order.")]
    devices: Annotated[list[DeviceData], Field(description="Accelerators first, then the cpu, then the disk if used.")]
    seconds: Annotated[
        Seconds,
        Field(description="What moving weights and computing on the cpu add to a generation, in seconds, an estimate."),
    ]
    moved_bytes: Annotated[int, Field(ge=0, description="Weights brought to accelerators per generation, in bytes.")]
    proof: Annotated[ProofData | None, Field(description="Of the strategy auto only.")]
    notes: Annotated[list[str], Field(description="What else there is to know, a sentence each.")]


class AlternativeData(TypedDict):
    """One place that a component could have, all others staying where they are."""

    execution_device: Annotated[Device, Field(description="Where it would run.")]
    storage_device: Annotated[Device, Field(description="Where its weights would rest.")]
    residency: Residency
    seconds: Annotated[Seconds, Field(description="What the place would add to a generation, in seconds, an estimate.")]
    obstacle: Annotated[str | None, Field(description="Why it cannot be there; null where it can.")]
    is_chosen: Annotated[bool, Field(description="Whether this is its place in the plan. None is, where it is split.")]


class ExplanationData(TypedDict):
    """One component of a plan and its alternatives, as `dmconfig plan --explain` prints it."""

    ok: Literal[True]
    pipeline: Annotated[str, Field(description="The pipeline's class.")]
    machine: Annotated[str, Field(description="The machine that the plan is for, in words.")]
    component: ComponentData
    alternatives: Annotated[list[AlternativeData], Field(description="The cheapest possible one first.")]


class StrategyData(TypedDict):
    """What one strategy makes of the machine."""

    strategy: Annotated[
        str,
        Field(description="A strategy, one accelerator for all, or 'as written' for a file that says neither."),
    ]
    fits: bool
    is_chosen: Annotated[bool, Field(description="Whether the file asks for this one.")]
    seconds: Annotated[Seconds | None, Field(description="What it adds to a generation, in seconds; null if unfit.")]
    moved_bytes: Annotated[int | None, Field(description="Weights brought per generation, in bytes; null if unfit.")]
    bytes_by_device: Annotated[
        dict[str, int], Field(description="Device -> the most that weights take of it at one time, in bytes.")
    ]


class ComparisonData(TypedDict):
    """All strategies side by side on one machine, as `dmconfig plan --all` prints them."""

    ok: Annotated[bool, Field(description="Whether the file's own plan fits.")]
    pipeline: Annotated[str, Field(description="The pipeline's class.")]
    machine: Annotated[str, Field(description="The machine that the plans are for, in words.")]
    strategies: list[StrategyData]
    problems: Annotated[list[ProblemData], Field(description="Why the file's own plan does not fit; else empty.")]


def problem_data(problem: Problem) -> ProblemData:
    """Return problem as JSON data."""
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


def problems_data(problems: Iterable[Problem]) -> ProblemsData:
    """Return the JSON data of a failure."""
    return {"ok": False, "problems": [problem_data(problem) for problem in problems]}


def plan_data(plan: Plan) -> PlanData:
    """Return plan as JSON data."""
    return {
        "ok": True,
        "pipeline": plan.pipeline,
        "machine": plan.machine,
        "execution_device": plan.execution_device,
        "device_map": dict(plan.device_map),
        "components": [_component_data(assignment) for assignment in plan.assignments],
        "devices": [_device_data(device) for device in plan.devices],
        "seconds": plan.seconds,
        "moved_bytes": round(plan.moved_bytes),
        "proof": None if plan.proof is None else _proof_data(plan.proof),
        "notes": list(plan.notes),
    }


def explanation_data(component: str, plan: Plan, alternatives: Iterable[Alternative]) -> ExplanationData:
    """Return one component of a plan, and the places it could have, as JSON data."""
    assignment = next(each for each in plan.assignments if each.component == component)
    return {
        "ok": True,
        "pipeline": plan.pipeline,
        "machine": plan.machine,
        "component": _component_data(assignment),
        "alternatives": [_alternative_data(alternative) for alternative in alternatives],
    }


def comparison_data(
    pipeline: str, machine: Inventory, comparisons: Iterable[Comparison], problems: Sequence[Problem]
) -> ComparisonData:
    """Return what all strategies make of a machine, and why the file's own does not fit, as JSON data."""
    return {
        "ok": not problems,
        "pipeline": pipeline,
        "machine": machine.name,
        "strategies": [_strategy_data(comparison) for comparison in comparisons],
        "problems": [problem_data(problem) for problem in problems],
    }


def _component_data(assignment: Assignment) -> ComponentData:
    return {
        "component": assignment.component,
        "class": assignment.class_name,
        "dtype": assignment.dtype,
        "bytes": assignment.nbytes,
        "peak_bytes": assignment.peak_bytes,
        "measured_from": assignment.measured_from,
        "execution_device": assignment.execution_device,
        "storage_device": assignment.storage_device,
        "residency": assignment.residency,
        "reason": assignment.reason,
        "parts": [_part_data(part) for part in assignment.parts],
        "is_written": assignment.is_written,
        "casts_inputs": assignment.casts_inputs,
        "calls": assignment.calls,
        "seconds": assignment.seconds,
        "moved_bytes": round(assignment.moved_bytes),
    }


def _part_data(part: Part) -> PartData:
    return cast("PartData", _fields_of(part))


def _device_data(device: DeviceUse) -> DeviceData:
    return cast("DeviceData", {**_fields_of(device), "free_bytes": device.free_bytes})


def _fields_of(record: Part | DeviceUse) -> dict[str, Any]:
    """The fields of a record, a size under the name that JSON has for it."""
    return {"bytes" if name == "nbytes" else name: value for name, value in asdict(record).items()}


def _proof_data(proof: Proof) -> ProofData:
    return cast("ProofData", asdict(proof))


def _alternative_data(alternative: Alternative) -> AlternativeData:
    return {
        "execution_device": alternative.execution_device,
        "storage_device": alternative.storage_device,
        "residency": alternative.residency,
        "seconds": alternative.seconds,
        "obstacle": alternative.obstacle or None,
        "is_chosen": alternative.is_chosen,
    }


def _strategy_data(comparison: Comparison) -> StrategyData:
    return {
        "strategy": comparison.strategy,
        "fits": comparison.fits,
        "is_chosen": comparison.is_chosen,
        "seconds": comparison.seconds,
        "moved_bytes": None if comparison.moved_bytes is None else round(comparison.moved_bytes),
        "bytes_by_device": dict(comparison.bytes_by_device),
    }
