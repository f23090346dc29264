"""The whole way, as a table of contents: read, resolve, validate, check, measure, plan, build, dispatch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmconfig.assembly import Assembly, Component
from dmconfig.check import check, check_weights
from dmconfig.compatibility import dtype_notes
from dmconfig.document import read_document
from dmconfig.errors import Code, DispatchError, Problem, SpecError, nearest
from dmconfig.inventory import Inventory, probe_machine
from dmconfig.measure import Headers, cast_notes, lay_out_split, measure, variant_notes
from dmconfig.plan import Alternative, Comparison, Plan, alternatives_of, compare, make_plan, make_task
from dmconfig.plan.task import Task
from dmconfig.progress import NoProgress, Progress
from dmconfig.resolve import Override, Resolved, overrides_from_mapping, resolve
from dmconfig.spec import Spec, validate_spec
from dmconfig.trust import moving_revisions, unpinned

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from dmconfig.offload import OffloadFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A spec that passed every rule, and what its pipeline is made of."""

    resolved: Resolved
    spec: Spec
    assembly: Assembly


def check_file(file: str | Path, overrides: Iterable[Override] = (), *, ask_hub: bool = False) -> Checked:
    """Return the spec in file with overrides applied, after every rule that needs no machine and no weights.

    ``ask_hub`` lets the hub be asked what a pipeline is made of that nothing is known of here.

    Raises: DocumentError, ResolveError, SpecError: all problems of the first phase that has any.
        BuildError: the hub was to be asked, and a download failed.
    """
    resolved = resolve(read_document(file), overrides)
    spec = validate_spec(resolved)
    if ask_hub:
        from dmconfig.fetch import fetch_indexes

        if problems := [*moving_revisions(resolved, spec)]:
            raise SpecError(problems)  # before anything is fetched at one
        fetch_indexes(resolved, spec)
    return Checked(resolved=resolved, spec=spec, assembly=check(resolved, spec))


def plan_for(checked: Checked, inventory: Inventory, *, ask_hub: bool = False, to_load: bool = False) -> Plan:
    """Return the plan of a checked spec on a machine. Reads headers, never weights.

    ``ask_hub`` lets the hub be asked for the headers of weights that are not on this machine. ``to_load``: the plan is
    for loading now, so it remarks on sources that may be others next time.

    Raises: SourceError: a size cannot be known. PlanError: no placement fits the machine. BuildError: the hub was to
        be asked, and it failed.
    """
    resolved, spec, assembly = checked.resolved, checked.spec, checked.assembly
    hub = _hub_headers() if ask_hub else None
    footprints = measure(resolved, assembly, hub)
    layouts = lay_out_split(resolved, spec, assembly, footprints, hub)
    remarks = unpinned(spec) if to_load else ()
    notes = (*variant_notes(assembly), *cast_notes(footprints), *dtype_notes(assembly), *remarks)
    return make_plan(resolved, spec, assembly, footprints, inventory, layouts=layouts, notes=notes)


def _hub_headers() -> Headers:
    """Headers on the hub, each asked for once."""
    from dmconfig.fetch import remote_tensors

    @functools.cache
    def of(repo: str, revision: str | None, folder: str, library: str, variant: str | None) -> Any:
        return remote_tensors(repo, revision, folder, library, variant)

    def headers(component: Component) -> Any:
        source = component.source
        if source.hub_id is None or component.is_single_file:
            return None
        where = (source.hub_id, source.revision, _folder_in_repository(component), component.library)
        found = of(*where, component.variant)
        plain = found is None and component.variant is not None and not component.variant_required
        return of(*where, None) if plain else found

    return headers


def _folder_in_repository(component: Component) -> str:
    """The folder of a component in its repository on the hub."""
    here, snapshot = component.folder, component.source.folder
    if here is not None and snapshot is not None:
        return here.relative_to(snapshot).as_posix().removeprefix(".")
    return component.subfolder or component.name


def compare_strategies(checked: Checked, inventory: Inventory, *, ask_hub: bool = False) -> tuple[Comparison, ...]:
    """Return what every strategy, and each accelerator alone, makes of a machine; pins of the file are kept.

    Raises: SourceError, PlanError: as ``plan_for``, but not where nothing fits.
    """
    return compare(_task(checked, inventory, ask_hub=ask_hub))


def alternatives_for(
    checked: Checked, inventory: Inventory, component: str, *, ask_hub: bool = False
) -> tuple[Alternative, ...]:
    """Return the places that a component of the plan could have, all others staying where they are.

    Raises: SourceError, PlanError: as ``plan_for``. SpecError: there is no such component with weights.
    """
    task = _task(checked, inventory, ask_hub=ask_hub)
    if component not in task.names:
        meant = nearest(component, task.names)
        what = f"{component!r} is not a component with weights"
        fix = f"did you mean {meant!r}?" if meant else f"its components are: {', '.join(task.names)}"
        raise SpecError([Problem(code=Code.UNKNOWN_COMPONENT, what=what, fix=fix, origin="--explain")])
    solution = task.found()
    return () if solution is None else alternatives_of(component, solution, task)


def _task(checked: Checked, inventory: Inventory, *, ask_hub: bool) -> Task:
    resolved, spec, assembly = checked.resolved, checked.spec, checked.assembly
    hub = _hub_headers() if ask_hub else None
    footprints = measure(resolved, assembly, hub)
    layouts = lay_out_split(resolved, spec, assembly, footprints, hub, as_auto=True)
    return make_task(resolved, spec, assembly, footprints, inventory, layouts=layouts)


def plan_from_yaml(
    file: str | Path, overrides: Mapping[str, Any] | None = None, *, inventory: Inventory | None = None
) -> Plan:
    """Return the plan of the spec in file, on this machine or on the one given.

    Raises: DMConfigError: as ``check_file`` and ``plan_for``.
    """
    checked = check_file(file, overrides_from_mapping(overrides or {}))
    return plan_for(checked, inventory or probe_machine())


def load_from_yaml(
    file: str | Path, overrides: Mapping[str, Any] | None = None, *, progress: Progress | None = None
) -> DiffusionPipeline:
    """Return the pipeline of the spec in file: loaded, placed as planned for this machine, ready to call.

    ``pipe.hf_device_map`` names every component that has weights and where they rest. The defaults under ``call``
    hold for every call and give way to arguments.

    Args:
        file: the YAML spec.
        overrides: dotted key -> value on top of the file, e.g. ``{"device_map": "cuda:1", "pipeline.dtype":
            torch.float16}``; an override of something that does not exist is an error.
        progress: told what is being loaded and placed; None shows nothing.

    Raises: DMConfigError: every problem of the first phase that has any; nothing is loaded before all checks pass.
    """
    progress = progress or NoProgress()
    with progress.phase("plan"):
        checked = fetched(check_file(file, overrides_from_mapping(overrides or {}), ask_hub=True), progress)
        check_weights(checked.resolved, checked.assembly)
        plan = plan_for(checked, probe_machine(), to_load=True)
    return load_plan(checked, plan, progress)


@contextlib.contextmanager
def loaded(
    file: str | Path, overrides: Mapping[str, Any] | None = None, *, progress: Progress | None = None
) -> Iterator[DiffusionPipeline]:
    """Load as ``load_from_yaml`` does, for the length of a with block; afterwards the memory is free, come what may.

    Example:
        with dmconfig.loaded("pipe.yaml") as pipe:
            pipe("a lighthouse").images[0].save("lighthouse.png")
    """
    pipe = load_from_yaml(file, overrides, progress=progress)
    try:
        yield pipe
    finally:
        from dmconfig.dispatch import unload

        unload(pipe)


def load_plan(checked: Checked, plan: Plan, progress: Progress) -> DiffusionPipeline:
    """Return the pipeline of a checked spec, loaded and placed by a plan.

    Raises: BuildError: a component could not be loaded. DispatchError: one could not be placed; or, before anything is
        loaded, bytes do not survive copies between the accelerators of the plan, or the offload folder cannot be used.
    """
    from dmconfig.build import build_pipeline, gc_paused
    from dmconfig.transfers import checked_once

    checked_once([plan.execution_device, *(d for assignment in plan.assignments for d in assignment.execution_devices)])
    files = _offload_folder(checked, plan)
    with gc_paused(), contextlib.ExitStack() as undo:
        if files is not None:
            undo.callback(files.close)
        with progress.phase("load"):
            pipe = build_pipeline(checked.resolved, checked.assembly, plan, progress, files)
        with progress.phase("place"):
            from dmconfig.dispatch import dispatch

            placed: DiffusionPipeline = dispatch(
                pipe,
                plan,
                call=checked.spec.call,
                in_turn=checked.assembly.in_turn,
                group_options=checked.spec.group_offload.model_dump(),
                asked=_asked(checked),
                files=files,
                progress=progress,
            )
        undo.pop_all()
    return placed


def _offload_folder(checked: Checked, plan: Plan) -> OffloadFolder | None:
    """The folder for what is cast and rests on disk, or None when the plan has nothing of the kind.

    Raises: DispatchError: it cannot be written to, or has no room.
    """
    needed = sum(assignment.bytes_on_disk for assignment in plan.assignments if assignment.is_written)
    if not needed or checked.spec.offload_folder is None:
        return None
    from dmconfig.offload import OffloadFolder

    folder = checked.resolved.folder_of(("offload_folder",)) / Path(checked.spec.offload_folder).expanduser()
    try:
        return OffloadFolder(folder, needed_bytes=needed)
    except DispatchError as error:
        located = (checked.resolved.problem(p.code, ("offload_folder",), p.what, fix=p.fix) for p in error.problems)
        raise DispatchError(located) from error


_PLACING = ("device_map", "execution_device", "max_memory", "reserve", "low_memory", "group_offload")
"""The sections of a file that say where things go."""


def _asked(checked: Checked) -> dict[str, Any]:
    """What the file says of places and dtypes, as it is written there."""
    data = checked.resolved.data
    asked = {key: data[key] for key in _PLACING if key in data}
    dtypes = {"pipeline.dtype": data["pipeline"].get("dtype")}
    dtypes |= {
        f"components.{name}.dtype": (part or {}).get("dtype") for name, part in data.get("components", {}).items()
    }
    return asked | {key: value for key, value in dtypes.items() if value is not None}


def fetched(checked: Checked, progress: Progress) -> Checked:
    """Return checked with every hub source on this machine, fetching what is not.

    Raises: BuildError: a download failed.
    """
    from dmconfig.fetch import is_whole

    if is_whole(checked.assembly):
        return checked
    checked = _completed(checked, progress)
    if any(component.folder is None for component in checked.assembly.components):
        # the index, now that it is here, names components that the catalogue did not
        checked = _completed(checked, progress)
    return checked


def _completed(checked: Checked, progress: Progress) -> Checked:
    from dmconfig.fetch import fetch

    fetch(checked.assembly, progress, checked.resolved)
    assembly = check(checked.resolved, checked.spec)
    return Checked(resolved=checked.resolved, spec=checked.spec, assembly=assembly)
