"""From a plan to loaded components and a diffusers pipeline, on the host: each component by its own class's loader.

The libraries' loaders rename old keys, tie weights and keep float32 layers, and over a matching dtype they map the
file rather than copy it; what is added here is the plan's dtype, safetensors only, no network, and no garbage
collection in the middle (it is more than half of a first load). Placing is for ``dispatch``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from dmconfig.adapters import apply_adapters, missing_peft
from dmconfig.assembly import Assembly, Component, Made, Sharing
from dmconfig.errors import BuildError, Code, DispatchError
from dmconfig.facts import PipelineFacts
from dmconfig.garbage import gc_paused
from dmconfig.loaders import class_of, load_module, load_other, make_pipeline
from dmconfig.offload import OffloadFolder, resting_on_disk
from dmconfig.paths import ConfigPath
from dmconfig.plan import Assignment, Plan
from dmconfig.progress import Progress
from dmconfig.quantization import missing_backends, missing_gguf
from dmconfig.remote_code import OwnCode
from dmconfig.resolve import Resolved
from dmconfig.spec import Spec
from dmconfig.switches import apply_switches, missing_attention_packages


def build_pipelines(
    resolved: Resolved, assembly: Assembly, plan: Plan, progress: Progress, files: OffloadFolder | None = None
) -> list[Any]:
    """Return the pipelines of assembly, its own first, with every component loaded once, in the dtypes of the plan.

    What the plan lets rest on disk is mapped: from its own files, or, where it was cast, from ``files``, to which it
    is written as soon as it is loaded, so that no two such components are in memory at once.

    Raises: BuildError: the first component that its own loader refuses, with the loader's reason. DispatchError: one
        could not be written.
    """
    assignments = {assignment.component: assignment for assignment in plan.assignments}
    with gc_paused(), _quiet_loaders():
        parts: dict[str, Any] = dict.fromkeys(assembly.absent)
        for component in progress.track("load", assembly.components, lambda component: component.name):
            assignment = assignments.get(component.name)
            parts[component.name] = part = _load_all(resolved, component, assignment)
            if files is not None and assignment is not None and assignment.is_written:
                _write(resolved, files, part, assignment)
        pipe = _construct(resolved, assembly, parts)
        apply_adapters(resolved, pipe, assembly.adapters)
        for component in assembly.modules:
            apply_switches(resolved, component, parts[component.name], assignments[component.name].dtype)
        return [pipe, *(_share(resolved, each, parts) for each in assembly.sharing)]


def require_packages(resolved: Resolved, spec: Spec, assembly: Assembly) -> None:
    """Check that what the file asks for beside the pipeline itself is installed, before anything is loaded.

    Raises: BuildError: PACKAGE_MISSING, one problem per package that is missing, and where it is asked for.
    """
    problems = [
        *missing_backends(resolved, spec),
        *missing_gguf(resolved, assembly),
        *missing_attention_packages(resolved, assembly),
        *missing_peft(resolved, assembly.adapters, [component.name for component in assembly.modules]),
    ]
    if problems:
        raise BuildError(problems)


def _write(resolved: Resolved, files: OffloadFolder, module: Any, assignment: Assignment) -> None:
    try:
        files.take(assignment.component, resting_on_disk(module, assignment))
    except DispatchError as error:
        raise DispatchError(resolved.located(error.problems)) from error


def _load_all(resolved: Resolved, component: Component, assignment: Assignment | None) -> Any:
    """A component, or the wrapper of the models that are several in its place."""
    if not component.parts:
        return _load(resolved, component, assignment)
    return class_of(component)([_load(resolved, part, assignment) for part in component.parts]).eval()


def _load(resolved: Resolved, component: Component, assignment: Assignment | None) -> Any:
    try:
        cls = class_of(component)
        return load_other(cls, component) if assignment is None else load_module(cls, component, assignment)
    except Exception as error:
        what = f"{component.name!r} ({component.class_name}) could not be loaded: {_sentence(error)}"
        why = f"from {component.source.path or component.folder}"
        problem = resolved.problem(Code.COMPONENT_NOT_LOADED, component.path, what, why=why)
        raise BuildError([problem]) from error


def _construct(resolved: Resolved, assembly: Assembly, parts: Mapping[str, Any]) -> Any:
    own = {slot.name: parts[slot.name] for slot in assembly.facts.slots}
    path: ConfigPath = ("pipeline",)
    settings, made = assembly.config, assembly.made
    pipe = _pipeline(resolved, path, assembly.facts, own, settings=settings, made=made, code=assembly.code)
    pipe.register_to_config(_name_or_path=str(assembly.source.folder))
    return pipe


def _share(resolved: Resolved, sharing: Sharing, parts: Mapping[str, Any]) -> Any:
    """One more pipeline on the same components."""
    own = {slot.name: parts[slot.name] for slot in sharing.facts.slots}
    return _pipeline(resolved, ("pipelines", sharing.name), sharing.facts, own)


def _pipeline(
    resolved: Resolved,
    path: ConfigPath,
    facts: PipelineFacts,
    parts: Mapping[str, Any],
    *,
    settings: Mapping[str, Any] = MappingProxyType({}),
    made: tuple[Made, ...] = (),
    code: OwnCode | None = None,
) -> Any:
    try:
        return make_pipeline(facts, settings, parts, made, code=code)
    except Exception as error:
        what = f"{facts.class_name} refuses its components: {_sentence(error)}"
        raise BuildError([resolved.problem(Code.COMPONENT_NOT_LOADED, path, what)]) from error


@contextlib.contextmanager
def _quiet_loaders() -> Iterator[None]:
    """Keep transformers' own progress bars off the screen: progress is reported once, by us."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


def _sentence(error: Exception) -> str:
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
