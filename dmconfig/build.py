"""From a plan to loaded components and a diffusers pipeline, on the host: each component by its own class's loader.

The libraries' loaders rename old keys, tie weights and keep float32 layers, and over a matching dtype they map the
file rather than copy it; what is added here is the plan's dtype, safetensors only, no network, and no garbage
collection in the middle (it is more than half of a first load). Placing is for ``dispatch``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from dmconfig.assembly import Assembly, Component, Sharing
from dmconfig.errors import BuildError, Code, DispatchError
from dmconfig.garbage import gc_paused
from dmconfig.loaders import class_of, load_module, load_other
from dmconfig.offload import OffloadFolder, resting_on_disk
from dmconfig.paths import ConfigPath
from dmconfig.plan import Assignment, Plan
from dmconfig.progress import Progress
from dmconfig.resolve import Resolved


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
            parts[component.name] = part = _load(resolved, component, assignment.dtype if assignment else None)
            if files is not None and assignment is not None and assignment.is_written:
                _write(resolved, files, part, assignment)
        return [_construct(resolved, assembly, parts), *(_share(resolved, each, parts) for each in assembly.sharing)]


def _write(resolved: Resolved, files: OffloadFolder, module: Any, assignment: Assignment) -> None:
    try:
        files.take(assignment.component, resting_on_disk(module, assignment))
    except DispatchError as error:
        raise DispatchError(resolved.located(error.problems)) from error


def _load(resolved: Resolved, component: Component, dtype: str | None) -> Any:
    try:
        cls = class_of(component)
        if dtype is not None:
            return load_module(cls, component, dtype)
        return load_other(cls, component)
    except Exception as error:
        what = f"{component.name!r} ({component.class_name}) could not be loaded: {_sentence(error)}"
        why = f"from {component.source.path or component.folder}"
        problem = resolved.problem(Code.COMPONENT_NOT_LOADED, component.path, what, why=why)
        raise BuildError([problem]) from error


def _construct(resolved: Resolved, assembly: Assembly, parts: Mapping[str, Any]) -> Any:
    own = {slot.name: parts[slot.name] for slot in assembly.facts.slots}
    pipe = _pipeline(resolved, ("pipeline",), assembly.class_name, {**assembly.config, **own})
    pipe.register_to_config(_name_or_path=str(assembly.source.folder))
    return pipe


def _share(resolved: Resolved, sharing: Sharing, parts: Mapping[str, Any]) -> Any:
    """One more pipeline on the same components."""
    own = {slot.name: parts[slot.name] for slot in sharing.facts.slots}
    return _pipeline(resolved, ("pipelines", sharing.name), sharing.facts.class_name, own)


def _pipeline(resolved: Resolved, path: ConfigPath, class_name: str, arguments: Mapping[str, Any]) -> Any:
    import diffusers

    try:
        return getattr(diffusers, class_name)(**arguments)
    except Exception as error:
        what = f"{class_name} refuses its components: {_sentence(error)}"
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
