"""``dmconfig init``: a first spec for a pipeline on a machine, with a device map that is planned and proven to fit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dmconfig.assembly import Assembly
from dmconfig.check import check
from dmconfig.checked import Checked
from dmconfig.devices import DISK
from dmconfig.document import parse_document
from dmconfig.errors import Code, DMConfigError, DocumentError, PlanError, Problem
from dmconfig.files import write_whole
from dmconfig.inventory import Inventory
from dmconfig.load import plan_for
from dmconfig.paths import ConfigPath
from dmconfig.plan import Assignment, Part, Plan, Residency
from dmconfig.resolve import resolve
from dmconfig.source import INDEX_FILES
from dmconfig.spec import DEFAULT_RESERVE, SCHEMA_VERSION, validate_spec
from dmconfig.units import format_bytes, format_seconds
from dmconfig.writing import as_yaml

_STRATEGIES = ("balanced", "auto")
"""What is tried, the plainer first."""
_OFFLOADS = {
    Residency.WHILE_RUNNING: "model",
    Residency.PER_LEAF: "sequential",
    Residency.PER_GROUP: "group",
}
_MOST_ENTRIES = 12
"""A device map of more entries says less than the strategy that made it."""
_CALL_PARAMETERS = ("num_inference_steps", "guidance_scale", "height", "width", "num_frames")


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """The text of a first spec, where it is to be written, and the plan that it leads to."""

    file: Path
    text: str
    plan: Plan

    def write(self, *, force: bool = False) -> None:
        """Write the spec, whole or not at all. A file that is there is replaced only with ``force``.

        Raises: DocumentError: there is a file already, or it cannot be written.
        """
        refuse_existing(self.file, force=force)
        try:
            write_whole(self.file, self.text.encode())
        except OSError as error:
            raise _not_written(
                self.file, str(error.strerror or error), "name a file that this user can write"
            ) from error


def refuse_existing(file: Path, *, force: bool) -> None:
    """Raise unless a spec may be written to file.

    Raises: DocumentError: there is something already, and nobody said that it may be replaced.
    """
    if file.exists() and not force:
        raise _not_written(file, "it exists", "name another file with --out, or replace it with --force")


def starter(source: str, file: Path, machine: Inventory, *, ask_hub: bool = False) -> Starter:
    """Return a first spec for a pipeline on a machine, to be written to file.

    ``source`` is a pipeline's folder or its ``model_index.json``, relative to the current folder, or a hub id. The
    device map is written out, component by component, where that leads to the plan that was found; else as the
    strategy that found it.

    Raises: DMConfigError: there is no such pipeline, a size cannot be known, or nothing fits the machine.
    """
    pipeline = {"source": _source_text(source, file)}
    try:
        checked, plan, strategy = _planned(pipeline, file, machine, ask_hub=ask_hub)
    except DMConfigError as error:  # the draft that they are placed in is nowhere
        raise type(error)(replace(each, location=None, origin=f"init {source}") for each in error.problems) from None
    draft = _Draft(file=file, assembly=checked.assembly, pipeline=pipeline, plan=plan, strategy=strategy)
    device_map = device_map_of(plan)
    text = draft.text(device_map or strategy)
    if not _leads_to(plan, text, file, machine, ask_hub=ask_hub):
        text = draft.text(strategy)
    return Starter(file=file, text=text, plan=plan)


def _leads_to(plan: Plan, text: str, file: Path, machine: Inventory, *, ask_hub: bool) -> bool:
    """Tell whether a spec is planned as a plan that is there already."""
    try:
        return _places(plan_for(_checked(text, file, ask_hub=ask_hub), machine, ask_hub=ask_hub)) == _places(plan)
    except DMConfigError:
        return False


def _source_text(source: str, file: Path) -> str:
    """The source as the file has to write it: a folder relative to it, or a hub id."""
    given = Path(source).expanduser()
    folder = given.parent if given.name in INDEX_FILES else given
    if not folder.is_dir() and not source.startswith((".", "/", "~")):
        return source
    relative = Path(os.path.relpath(folder, file.absolute().parent)).as_posix()
    return relative if relative.startswith("..") else f"./{relative}"


def _planned(
    pipeline: Mapping[str, str], file: Path, machine: Inventory, *, ask_hub: bool
) -> tuple[Checked, Plan, str]:
    """The plan of the first strategy that fits, and its name."""
    problems: tuple[Problem, ...] = ()
    for strategy in _STRATEGIES:
        draft = as_yaml({"version": SCHEMA_VERSION, "pipeline": pipeline, "device_map": strategy})
        checked = _checked(draft, file, ask_hub=ask_hub)
        try:
            return checked, plan_for(checked, machine, ask_hub=ask_hub), strategy
        except PlanError as error:
            problems = error.problems
    raise PlanError(problems)


def _checked(text: str, file: Path, *, ask_hub: bool) -> Checked:
    document = parse_document(text, name=str(file), folder=file.absolute().parent)
    resolved = resolve(document, environ={})
    spec = validate_spec(resolved)
    if ask_hub:
        from dmconfig.fetch import fetch_indexes

        fetch_indexes(resolved, spec)
    return Checked(resolved=resolved, spec=spec, assembly=check(resolved, spec))


# ---------------------------------------------------------------- a plan as a device map


def device_map_of(plan: Plan) -> Any:
    """Return the device map that says what a plan decided: one device where that is all, else an entry for each place.

    None where there would be too many of them to read.
    """
    places = {(each.execution_device, each.residency) for each in plan.assignments}
    if len(places) == 1 and not any(each.parts for each in plan.assignments):
        device, residency = places.pop()
        if residency is Residency.ALWAYS:
            return device
    entries = {key: value for each in plan.assignments for key, value in _entries(each)}
    return entries if len(entries) <= _MOST_ENTRIES else None


def _entries(assignment: Assignment) -> Iterator[tuple[str, Any]]:
    name = assignment.component
    if not assignment.parts:
        yield name, _entry(assignment)
    for part in assignment.parts:
        yield f"{name}.{part.path}" if part.path else name, _entry(part)


def _entry(place: Assignment | Part) -> Any:
    if place.residency is Residency.ALWAYS:
        return place.execution_device
    entry = {"execution": place.execution_device, "offload": _OFFLOADS[place.residency]}
    return entry | ({"storage": DISK} if place.storage_device == DISK else {})


def _places(plan: Plan) -> set[tuple[object, ...]]:
    """Where everything of a plan runs and rests."""
    places: set[tuple[object, ...]] = set()
    for each in plan.assignments:
        places.add((each.component, each.execution_device, each.storage_device, each.residency))
        places |= {(each.component, p.path, p.execution_device, p.storage_device, p.residency) for p in each.parts}
    return places


# ---------------------------------------------------------------- the text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """What a first spec is made from."""

    file: Path
    assembly: Assembly
    pipeline: Mapping[str, str]
    plan: Plan
    strategy: str

    def text(self, device_map: Any) -> str:
        """Return the whole spec with a device map."""
        lines = [
            f"# {self.assembly.class_name} on {self.plan.machine}: a first spec, to be changed at will.",
            "#",
            f"#   dmconfig plan {self.file}",
            f"#   dmconfig run {self.file} --prompt ... --out picture.png",
            "#   dmconfig explain KEY",
            f"version: {SCHEMA_VERSION}",
            "",
            *self._pipeline(),
            "",
            *self._device_map(device_map),
            "",
            *self._others(),
            *self._call(),
        ]
        return "\n".join(lines) + "\n"

    def _pipeline(self) -> Iterator[str]:
        yield as_yaml({"pipeline": self.pipeline}).rstrip("\n")
        stored = ", ".join(dict.fromkeys(each.dtype for each in self.plan.assignments))
        yield _remark("  # dtype: bfloat16", f"default: as stored, {stored}")
        if self.assembly.source.hub_id is not None:
            yield _remark("  # revision: <commit>", "dmconfig pin writes it; for deployments")

    def _device_map(self, device_map: Any) -> Iterator[str]:
        plan, strategy = self.plan, self.strategy
        moved = f"moving weights takes about {format_seconds(plan.seconds)} per generation" if plan.moved_bytes else ""
        yield f"# Planned with {strategy}: {moved or 'no weights move during a generation'}."
        if device_map != strategy:
            yield f"# device_map: {strategy} plans anew on whatever machine the file is used."
        yield as_yaml({"device_map": device_map}, _sizes(plan)).rstrip("\n")

    def _others(self) -> Iterator[str]:
        """Keys that people reach for next, as comments; the offload folder for what is cast and rests on disk."""
        if any(each.is_written for each in self.plan.assignments):
            yield _remark("offload_folder: ./offload", "for weights that are cast and rest on disk")
        used = next((device.id for device in self.plan.devices if device.reserved_bytes), "cuda:0")
        reserve = format_bytes(DEFAULT_RESERVE).replace(" ", "")
        yield _remark(f"# max_memory: {{{used}: 90%}}", "the most that may be used of a device")
        yield _remark(f"# reserve: {reserve}", "kept free for activations; larger pictures need more")
        yield _remark("# low_memory: cpu_offload_with_hook", "with balanced: what does not fit is brought to run")

    def _call(self) -> Iterator[str]:
        """The defaults of the pipeline's call that are worth a look, as comments."""
        known = {parameter.name: parameter.default for parameter in self.assembly.facts.call}
        yield "# call:"
        yield from (f"#   {name}: {known[name]}" for name in _CALL_PARAMETERS if known.get(name) is not None)
        yield "#   seed: 0"


def _remark(text: str, remark: str) -> str:
    return f"{text:<36}  # {remark}"


def _sizes(plan: Plan) -> dict[ConfigPath, str]:
    """What each entry of the device map takes, as comments."""
    comments: dict[ConfigPath, str] = {}
    for each in plan.assignments:
        comments["device_map", each.component] = format_bytes(each.nbytes)
        for part in each.parts:
            name = f"{each.component}.{part.path}" if part.path else each.component
            comments["device_map", name] = format_bytes(part.nbytes)
    return comments


def _not_written(file: Path, reason: str, fix: str) -> DocumentError:
    what = f"{file} is not written: {reason}"
    return DocumentError([Problem(code=Code.FILE_NOT_WRITTEN, what=what, fix=fix, origin="--out")])
