"""The condition of a placed pipeline: what the file asked, what was planned, and what is true, beside each other."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dmconfig.dispatch import placement_of
from dmconfig.dispatch.audit import audit
from dmconfig.dispatch.placement import PlacedComponent, Placement
from dmconfig.errors import Code, DispatchError, Problem, render_problem
from dmconfig.plan import Assignment, Plan
from dmconfig.render import plan_data, problem_data
from dmconfig.units import format_bytes
from dmconfig.version import __version__

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "peft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What is true of one component now: bytes per device and per dtype, and hooks per kind."""

    component: str
    class_name: str
    bytes_by_device: Mapping[str, int]
    bytes_by_dtype: Mapping[str, int]
    hooks: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A placed pipeline beside what was asked and planned; ``problems`` are the differences."""

    asked: Mapping[str, Any]
    plan: Plan
    applied: tuple[Applied, ...]
    problems: tuple[Problem, ...]
    versions: Mapping[str, str]

    def data(self) -> dict[str, Any]:
        """Return the condition as JSON data."""
        return {
            "asked": dict(self.asked),
            "planned": plan_data(self.plan),
            "applied": [_applied_data(each) for each in self.applied],
            "problems": [problem_data(problem) for problem in self.problems],
            "versions": dict(self.versions),
        }

    def text(self) -> str:
        """Return the condition as text, fit to paste into a bug report."""
        planned = {assignment.component: assignment for assignment in self.plan.assignments}
        lines = [f"{self.plan.pipeline} on {self.plan.machine}, working on {self.plan.execution_device}"]
        lines += [f"asked    {key}: {value}" for key, value in self.asked.items()]
        lines += [line for each in self.applied for line in _component_lines(each, planned[each.component])]
        lines += [render_problem(problem) for problem in self.problems] or ["everything is as planned"]
        lines.append(", ".join(f"{name} {version}" for name, version in self.versions.items()))
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.text()


def report(pipe: Any) -> Condition:
    """Return the condition of a pipeline that dmconfig placed. Looks only; call it when nothing is running.

    Raises: DispatchError: the pipeline is not placed by dmconfig, or not any more.
    """
    placement = placement_of(pipe)
    if placement is None:
        what = f"{type(pipe).__name__} is not placed by dmconfig"
        raise DispatchError([Problem(code=Code.PLACEMENT_DIFFERS, what=what, fix="load it with load_from_yaml")])
    applied = (_applied(placed) for placed in placement.components.values())
    return Condition(
        asked=placement.asked,
        plan=placement.plan,
        applied=tuple(applied),
        problems=(*_exchanged(pipe, placement), *audit(placement.modules, placement.plan)),
        versions=dict(_versions()),
    )


def _exchanged(pipe: Any, placement: Placement) -> Iterator[Problem]:
    """Yield the components that somebody has put in another's place by hand: the placement does not know them."""
    for name, placed in placement.components.items():
        if name in pipe.components and pipe.components[name] is not placed.module:
            what = f"the {name} of the pipeline is not the one that was placed"
            fix = f'put a new one in with dmconfig.swap(pipe, "{name}", component)'
            yield Problem(code=Code.PLACEMENT_DIFFERS, what=what, fix=fix, path=("components", name))


def _applied(placed: PlacedComponent) -> Applied:
    module = placed.module
    devices, dtypes, hooks = Counter[str](), Counter[str](), Counter[str](carried=int(placed.carrier is not None))
    for tensor in (*module.parameters(), *module.buffers()):
        nbytes = tensor.numel() * tensor.element_size()
        devices["a hook" if tensor.device.type == "meta" else str(tensor.device)] += nbytes
        dtypes[str(tensor.dtype).removeprefix("torch.")] += nbytes
    for part in module.modules():
        own = vars(part)
        hooks["accelerate"] += "_hf_hook" in own
        hooks["diffusers"] += bool(getattr(own.get("_diffusers_hook"), "hooks", None))
    return Applied(
        component=placed.assignment.component,
        class_name=type(module).__name__,
        bytes_by_device=dict(devices),
        bytes_by_dtype=dict(dtypes),
        hooks={kind: count for kind, count in hooks.items() if count},
    )


def _versions() -> Iterator[tuple[str, str]]:
    yield "dmconfig", __version__
    for package in PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue


def _component_lines(applied: Applied, planned: Assignment) -> Iterator[str]:
    places = f"runs on {planned.execution_device}, rests on {planned.storage_device}"
    yield f"{applied.component} ({applied.class_name})"
    yield f"  planned  {places}, {planned.residency.value.replace('_', ' ')}, {planned.dtype}"
    for part in planned.parts:
        places = f"{format_bytes(part.nbytes)} on {part.execution_device}, rests on {part.storage_device}"
        yield f"           {part.path or '(the rest)'}: {places}, {part.residency.value.replace('_', ' ')}"
    yield f"  applied  {_amounts(applied.bytes_by_device)}; {_amounts(applied.bytes_by_dtype)}; {_hooks(applied.hooks)}"
    yield f"  because  {planned.reason}"


def _amounts(amounts: Mapping[str, int]) -> str:
    return ", ".join(f"{format_bytes(nbytes)} {name}" for name, nbytes in amounts.items())


def _hooks(hooks: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind} hooks" for kind, count in hooks.items()) or "no hooks"


def _applied_data(applied: Applied) -> dict[str, Any]:
    return {
        "component": applied.component,
        "class": applied.class_name,
        "bytes_by_device": dict(applied.bytes_by_device),
        "bytes_by_dtype": dict(applied.bytes_by_dtype),
        "hooks": dict(applied.hooks),
    }
