"""The whole way, as a table of contents: read, resolve, validate, check, measure, plan, build, dispatch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmconfig.assembly import PIPELINE, Component, left_out_notes, order_notes
from dmconfig.catalog import find_pipeline
from dmconfig.check import check, check_weights
from dmconfig.checked import Checked, check_file
from dmconfig.compatibility import dtype_notes
from dmconfig.errors import BuildError, Code, DispatchError, Problem, SpecError, nearest
from dmconfig.garbage import gc_paused
from dmconfig.inputs import call_with_files
from dmconfig.layers import Files
from dmconfig.measure import cast_notes, change_notes, lay_out_split, measure, variant_notes
from dmconfig.paths import render_path
from dmconfig.progress import NoProgress, Progress
from dmconfig.resolve import overrides_from_mapping
from dmconfig.spec import REHEARSED, Spec
from dmconfig.stored import Headers
from dmconfig.trust import code_notes, indexed_sources, unpinned

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from dmconfig.inventory import Inventory
    from dmconfig.offload import OffloadFolder
    from dmconfig.plan import Alternative, Comparison, Plan
    from dmconfig.plan.task import Task
    from dmconfig.rehearse.script import Settings


def plan_for(
    checked: Checked,
    inventory: Inventory,
    *,
    ask_hub: bool = False,
    settings: Settings | None = None,
    to_load: bool = False,
) -> Plan:
    """Return the plan of a checked spec on a machine. Reads headers, never weights.

    ``ask_hub`` lets the hub be asked for the headers of weights that are not on this machine. Where the file's reserve
    is to be rehearsed, that is done first, unless it is remembered from an earlier time; ``settings`` are what the
    call is asked for beyond the file. ``to_load``: the plan is for loading now, so it remarks on sources that may be
    others next time.

    Raises: SourceError: a size cannot be known. PlanError: no placement fits the machine, or none agrees with its
        rehearsal. BuildError: the hub was to be asked, and it failed; or what is to be rehearsed cannot be built.
    """
    from dmconfig.plan import make_plan

    checked = with_reserve(checked, inventory, ask_hub=ask_hub, settings=settings)
    resolved, spec, assembly = checked.resolved, checked.spec, checked.assembly
    hub = _hub_headers() if ask_hub else None
    footprints = measure(resolved, assembly, hub)
    layouts = lay_out_split(resolved, spec, assembly, footprints, hub)
    remarks = unpinned(spec, indexed_sources(spec, assembly)) if to_load else ()
    own = (*variant_notes(assembly), *change_notes(assembly), *cast_notes(footprints), *dtype_notes(assembly))
    told = (*code_notes(assembly), *left_out_notes(assembly), *order_notes(assembly))
    notes = (*checked.notes, *told, *own, *remarks)
    return make_plan(resolved, spec, assembly, footprints, inventory, layouts=layouts, notes=notes)


def with_reserve(
    checked: Checked, inventory: Inventory, *, ask_hub: bool = False, settings: Settings | None = None
) -> Checked:
    """Return checked with the reserve that a rehearsal on a machine asks for, where the file leaves it to that.

    Raises: PlanError, BuildError, DispatchError, SpecError: see ``rehearse.remembered``. MachineError: the machine's
        accelerators cannot be rehearsed.
    """
    if checked.spec.reserve != REHEARSED:
        return checked
    from dmconfig.rehearse.reserve import reserve_for
    from dmconfig.rehearse.script import Script, Settings

    planner = functools.partial(plan_of, checked, ask_hub)
    script = Script(resolved=checked.resolved, spec=checked.spec, assembly=checked.assembly)
    reserve, note = reserve_for(script, planner, inventory, settings or Settings())
    spec = checked.spec.model_copy(update={"reserve": reserve})
    return replace(checked, spec=spec, notes=(*checked.notes, note))


def plan_of(checked: Checked, ask_hub: bool, spec: Spec, inventory: Inventory) -> Plan:
    """Return the plan of a checked spec with other values on a machine; see ``plan_for``."""
    return plan_for(replace(checked, spec=spec), inventory, ask_hub=ask_hub)


def _hub_headers() -> Headers:
    """Headers on the hub, each asked for once."""
    from dmconfig.fetch import file_headers, is_gated, remote_tensors

    of_file = file_headers()

    @functools.cache
    def of(repo: str, revision: str | None, folder: str, library: str, variant: str | None) -> Any:
        return remote_tensors(repo, revision, folder, library, variant)

    def headers(component: Component) -> Any:
        source = component.source
        if component.is_single_file:
            return of_file(source)
        if source.hub_id is None:
            return None
        where = (source.hub_id, source.revision, _folder_in_repository(component), component.library)
        try:
            found = of(*where, component.variant)
        except BuildError as error:
            if is_gated(error) and find_pipeline(source.hub_id) is not None:
                return None  # its figures are in the catalogue, as the plan says
            raise
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
    from dmconfig.plan import compare

    return compare(_task(checked, inventory, ask_hub=ask_hub))


def alternatives_for(
    checked: Checked, inventory: Inventory, component: str, *, ask_hub: bool = False
) -> tuple[Alternative, ...]:
    """Return the places that a component of the plan could have, all others staying where they are.

    Raises: SourceError, PlanError: as ``plan_for``. SpecError: there is no such component with weights.
    """
    from dmconfig.plan import alternatives_of

    task = _task(checked, inventory, ask_hub=ask_hub)
    if component not in task.names:
        meant = nearest(component, task.names)
        what = f"{component!r} is not a component with weights"
        fix = f"did you mean {meant!r}?" if meant else f"its components are: {', '.join(task.names)}"
        raise SpecError([Problem(code=Code.UNKNOWN_COMPONENT, what=what, fix=fix, origin="--explain")])
    solution = task.found()
    return () if solution is None else alternatives_of(component, solution, task)


def _task(checked: Checked, inventory: Inventory, *, ask_hub: bool) -> Task:
    from dmconfig.plan import make_task

    checked = with_reserve(checked, inventory, ask_hub=ask_hub)
    resolved, spec, assembly = checked.resolved, checked.spec, checked.assembly
    hub = _hub_headers() if ask_hub else None
    footprints = measure(resolved, assembly, hub)
    layouts = lay_out_split(resolved, spec, assembly, footprints, hub, as_auto=True)
    return make_task(resolved, spec, assembly, footprints, inventory, layouts=layouts)


def plan_from_yaml(
    file: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    overlays: Files = (),
    profile: str | None = None,
    inventory: Inventory | None = None,
) -> Plan:
    """Return the plan of the spec in file, on this machine or on the one given; layers as for ``load_from_yaml``.

    Raises: DMConfigError: as ``check_file`` and ``plan_for``.
    """
    from dmconfig.inventory import probe_machine

    checked = check_file(file, overrides_from_mapping(overrides or {}), overlays=overlays, profile=profile)
    return plan_for(checked, inventory or probe_machine())


def load_from_yaml(
    file: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    overlays: Files = (),
    profile: str | None = None,
    progress: Progress | None = None,
) -> DiffusionPipeline:
    """Return the pipeline of the spec in file: loaded, placed as planned for this machine, ready to call.

    ``pipe.hf_device_map`` names every component that has weights and where they rest. The defaults under ``call``
    hold for every call and give way to arguments.

    Args:
        file: the YAML spec.
        overrides: dotted key -> value on top of the file, e.g. ``{"device_map": "cuda:1", "pipeline.dtype":
            torch.float16}``; an override of something that does not exist is an error.
        overlays: files over the file, such as one per machine; their order does not matter.
        profile: the profile of the files to use; None: the one that ``DMCONFIG_PROFILE`` names, if any.
        progress: told what is being loaded and placed; None shows nothing.

    Raises: DMConfigError: every problem of the first phase that has any; nothing is loaded before all checks pass.
    """
    return load_pipelines(file, overrides, overlays=overlays, profile=profile, progress=progress)[PIPELINE]


def load_pipelines(
    file: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    overlays: Files = (),
    profile: str | None = None,
    progress: Progress | None = None,
) -> dict[str, DiffusionPipeline]:
    """Return every pipeline of the spec in file: the first as ``pipeline``, those under ``pipelines`` by their names.

    They share their components, and one placement: each component is loaded once and has one home. Otherwise as
    ``load_from_yaml``.

    Raises: DMConfigError: as ``load_from_yaml``.
    """
    from dmconfig.inventory import probe_machine

    progress = progress or NoProgress()
    with progress.phase("plan"):
        claims = overrides_from_mapping(overrides or {})
        checked = fetched(check_file(file, claims, overlays=overlays, profile=profile, ask_hub=True), progress)
        check_weights(checked.resolved, checked.assembly)
        plan = plan_for(checked, probe_machine(), to_load=True)
    return load_plan(checked, plan, progress)


@contextlib.contextmanager
def loaded(
    file: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    overlays: Files = (),
    profile: str | None = None,
    progress: Progress | None = None,
) -> Iterator[DiffusionPipeline]:
    """Load as ``load_from_yaml`` does, for the length of a with block; afterwards the memory is free, come what may.

    Example:
        with dmconfig.loaded("pipe.yaml") as pipe:
            pipe("a lighthouse").images[0].save("lighthouse.png")
    """
    pipe = load_from_yaml(file, overrides, overlays=overlays, profile=profile, progress=progress)
    try:
        yield pipe
    finally:
        from dmconfig.dispatch import unload

        unload(pipe)


def load_plan(checked: Checked, plan: Plan, progress: Progress) -> dict[str, DiffusionPipeline]:
    """Return the pipelines of a checked spec by name, loaded and placed by a plan; see ``load_pipelines``.

    Raises: BuildError: a component could not be loaded. DispatchError: one could not be placed; or, before anything is
        loaded, bytes do not survive copies between the accelerators of the plan, or the offload folder cannot be used.
    """
    from dmconfig.build import build_pipelines, require_packages
    from dmconfig.switches import apply_after_placing
    from dmconfig.transfers import checked_once

    require_packages(checked.resolved, checked.spec, checked.assembly)
    checked_once([plan.execution_device, *(d for assignment in plan.assignments for d in assignment.execution_devices)])
    files = _offload_folder(checked, plan)
    with gc_paused(), contextlib.ExitStack() as undo:
        if files is not None:
            undo.callback(files.close)
        with progress.phase("load"):
            pipes = build_pipelines(checked.resolved, checked.assembly, plan, progress, files)
        with progress.phase("place"):
            from dmconfig.dispatch import dispatch, unload

            names = (PIPELINE, *checked.spec.pipelines)
            calls = [call_with_files(checked.resolved, checked.call_of(name)) for name in names]
            dispatch(
                pipes[0],
                plan,
                call=calls[0],
                sharing=zip(pipes[1:], calls[1:], strict=True),
                in_turn=checked.assembly.in_turn,
                group_options=checked.spec.group_offload.model_dump(),
                asked=_asked(checked),
                files=files,
                progress=progress,
            )
            for pipe in pipes:
                undo.callback(unload, pipe)
            apply_after_placing(checked.resolved, pipes, checked.assembly)
            from dmconfig.export.remembered import loaded_as

            for name, pipe in zip(names, pipes, strict=True):  # for to_spec: what cannot be seen on a pipeline
                pipe._loaded_as = loaded_as(pipe, name, checked.resolved, checked.spec, checked.assembly)
        undo.pop_all()
    return dict(zip(names, pipes, strict=True))


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
        raise DispatchError(checked.resolved.located(error.problems)) from error


_PLACING = ("device_map", "execution_device", "max_memory", "reserve", "low_memory", "group_offload")
"""The sections of a file that say where things go."""


def _asked(checked: Checked) -> dict[str, Any]:
    """What the file says of places and dtypes, as it is written there."""
    data = checked.resolved.data
    asked = {key: data[key] for key in _PLACING if key in data}
    dtypes = {"pipeline.dtype": data["pipeline"].get("dtype")}
    for path, _ in checked.spec.written_components:
        written = functools.reduce(lambda value, key: value[key], path, data)
        dtypes[render_path((*path, "dtype"))] = (written or {}).get("dtype")
    return asked | {key: value for key, value in dtypes.items() if value is not None}


def fetched(checked: Checked, progress: Progress) -> Checked:
    """Return checked with every hub source on this machine, fetching what is not.

    Raises: BuildError: a download failed.
    """
    from dmconfig.fetch import fetch_adapters, is_whole

    if any(adapter.file is None for adapter in checked.assembly.adapters):
        fetch_adapters(checked.assembly, progress, checked.resolved)
        assembly = check(checked.resolved, checked.spec)
        checked = Checked(resolved=checked.resolved, spec=checked.spec, assembly=assembly)
    if is_whole(checked.assembly):
        return checked
    checked = _completed(checked, progress)
    if any(component.folder is None for component in checked.assembly.loaded):
        # the index, now that it is here, names components that the catalogue did not
        checked = _completed(checked, progress)
    return checked


def _completed(checked: Checked, progress: Progress) -> Checked:
    from dmconfig.fetch import fetch

    fetch(checked.assembly, progress, checked.resolved)
    assembly = check(checked.resolved, checked.spec)
    return Checked(resolved=checked.resolved, spec=checked.spec, assembly=assembly)
