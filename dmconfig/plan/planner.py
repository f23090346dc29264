"""From spec, assembly, footprints and machine to a plan: pure, torch-free, the same answer for the same input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dmconfig.assembly import Assembly, Component
from dmconfig.check import unknown_module
from dmconfig.devices import CPU, DISK, device_or_none, is_accelerator, parse_device
from dmconfig.errors import Code, PlanError, Problem
from dmconfig.footprint import Footprint
from dmconfig.inventory import Device, Inventory
from dmconfig.layout import Layout, nearest_ancestor
from dmconfig.paths import ConfigPath
from dmconfig.plan.calls import frames_of
from dmconfig.plan.fastest import Places
from dmconfig.plan.misfits import misfits
from dmconfig.plan.model import Assignment, DeviceUse, Part, Plan, Proof, Residency
from dmconfig.plan.reasons import reason_of
from dmconfig.plan.requests import Place, refusal
from dmconfig.plan.task import Solution, Task
from dmconfig.plan.uses import uses_of
from dmconfig.resolve import Resolved
from dmconfig.spec import DEFAULT_RESERVE, PlacementSpec, Spec
from dmconfig.units import format_bytes

RESERVED_PIXELS = 1024 * 1024
"""The picture for which the default reserve is enough, in bfloat16."""


def make_plan(
    resolved: Resolved,
    spec: Spec,
    assembly: Assembly,
    footprints: Mapping[str, Footprint],
    inventory: Inventory,
    *,
    layouts: Mapping[str, Layout] | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """Return where every component of assembly goes on the machine.

    Every component with weights is assigned exactly once; no device holds more than its budget less the reserve;
    pins are honoured exactly and paid for first. Arguments are not changed. ``layouts`` are those of the components
    that the file splits. ``notes`` are added to the plan's own.

    Raises: PlanError: the file names a device the machine lacks or a module that a component lacks, or no placement
        fits, with need and have and changes that help, each verified by planning it.
    """
    task = make_task(resolved, spec, assembly, footprints, inventory, layouts=layouts)
    solution = task.found()
    if solution is None:
        raise PlanError([*misfits(resolved, task)])
    choice = solution.choice
    return Plan(
        pipeline=assembly.class_name,
        machine=inventory.name,
        execution_device=spec.execution_device or (choice[assembly.denoiser].device if choice else CPU),
        assignments=tuple(_assignment(component, solution, task) for component in assembly.modules),
        devices=tuple(_device_use(device, solution, task) for device in (*inventory.devices, *_disk(solution, task))),
        notes=(*notes, *_notes(solution, task)),
        proof=_proof(solution),
    )


def make_task(
    resolved: Resolved,
    spec: Spec,
    assembly: Assembly,
    footprints: Mapping[str, Footprint],
    inventory: Inventory,
    *,
    layouts: Mapping[str, Layout] | None = None,
) -> Task:
    """Return what a plan is made from, for questions beside the plan itself.

    Raises: PlanError: the file names a device the machine lacks or a module that a component lacks, or lets weights
        that are cast rest in their files.
    """
    layouts = layouts or {}
    wrong = [
        *_missing_devices(resolved, spec, inventory),
        *_cast_on_disk(resolved, spec, footprints),
        *wrong_parts(resolved, spec, assembly, layouts),
    ]
    task = Task(spec=spec, assembly=assembly, footprints=footprints, inventory=inventory, layouts=layouts)
    wrong = wrong or [*_nowhere_allowed(resolved, task)]
    if wrong:
        raise PlanError(wrong)
    return task


def _nowhere_allowed(resolved: Resolved, task: Task) -> Iterator[Problem]:
    """A component that what is asked of it allows nowhere on this machine: on the cpu, where there is nothing else."""
    for component in task.assembly.modules:
        request = task.requests.get(component.name) if component.refused else None
        reason = refusal(request.places[0], component.refused) if request is not None else None
        if reason is not None:
            what = f"{component.name!r} has no place on {task.inventory.name}: {reason}"
            path: ConfigPath = ("quantization", component.name) if component.quantization else component.path
            fix = "plan for a machine with an accelerator, or change what is asked of the component"
            yield resolved.problem(Code.PLACE_REFUSED, path, what, fix=fix)


def _proof(solution: Solution) -> Proof | None:
    found = solution.fastest
    if found is None:
        return None
    runner_up = found.runner_up
    return Proof(
        seconds=found.best.seconds,
        bound_seconds=found.bound_seconds,
        visited=found.visited,
        is_complete=found.proven,
        runner_up="; ".join(_otherwise(found.best.places, runner_up.places)) if runner_up else "",
        runner_up_seconds=runner_up.seconds if runner_up else None,
    )


def _otherwise(best: Mapping[str, Places], other: Mapping[str, Places]) -> Iterator[str]:
    """What is otherwise in another placement, component by component."""
    for name, places in other.items():
        if places == best[name]:
            continue
        if len(places) > 1:
            devices = dict.fromkeys(place.device for place in places.values())
            streamed = any(place.residency is Residency.PER_LEAF for place in places.values())
            rest = ", the rest brought layer by layer" if streamed else ""
            yield f"{name} split over {', '.join(devices)}{rest}"
        else:
            place = places[""]
            how = {Residency.WHILE_RUNNING: "brought whole to", Residency.PER_LEAF: "brought layer by layer to"}
            yield f"{name} {how.get(place.residency, 'on')} {place.device}"


def wrong_parts(resolved: Resolved, spec: Spec, assembly: Assembly, layouts: Mapping[str, Layout]) -> Iterator[Problem]:
    """Yield a problem per part of the map that is no module of its component, or would part a shared weight."""
    for name, layout in layouts.items():
        places = {key.removeprefix(f"{name}."): key for key in spec.parts_of(name)}
        for path, key in places.items():
            if not layout.has(path):
                class_name = next(part.class_name for part in assembly.modules if part.name == name)
                yield unknown_module(resolved, key, class_name, [module.path for module in layout.modules])
        for module in layout.modules if places else ():
            here, there = (nearest_ancestor(path, places) for path in (module.path, module.shares_with or module.path))
            if here != there and spec.placements.get(places.get(here, name)) != spec.placements.get(
                places.get(there, name)
            ):
                what = f"{module.path} and {module.shares_with} of {name!r} are one weight, and are given two places"
                fix = f"give {name}.{module.shares_with} and {name}.{module.path} the same place"
                at: ConfigPath = ("device_map", places.get(here) or places[there])
                yield resolved.problem(Code.CONTRADICTION, at, what, fix=fix)


def _cast_on_disk(resolved: Resolved, spec: Spec, footprints: Mapping[str, Footprint]) -> Iterator[Problem]:
    """Weights that are cast when they are loaded are in no file any more."""
    for name, entry in spec.device_map.items() if isinstance(spec.device_map, dict) else ():
        size = footprints.get(name.partition(".")[0])
        if spec.offload_folder is not None or not isinstance(entry, PlacementSpec) or entry.storage != DISK:
            continue
        if size is not None and size.needs_cast:
            what = f"{name} is stored as {size.stored_dtype} and loaded as {size.dtype}, so it cannot rest in its files"
            fix = "set its dtype to auto, name an offload_folder to write it to, or use storage: cpu"
            yield resolved.problem(Code.CONTRADICTION, ("device_map", name, "storage"), what, fix=fix)


def _disk(solution: Solution, task: Task) -> Iterator[Device]:
    """The disk, where something rests on it: as large as the file allows, else as large as what rests there."""
    resting = [name for name, place in solution.choice.items() if place.storage_device == DISK]
    if resting:
        size = sum(solution.loads[name].nbytes for name in resting)
        if DISK in task.spec.max_memory:
            size = task.limits.budgets[DISK]
        description = "files the weights came in"
        if written := _written_bytes(solution, task):
            description += f", but {format_bytes(written)} that are cast, in {task.spec.offload_folder}"
        yield Device(id=DISK, description=description, total_bytes=size, free_bytes=size)


def _missing_devices(resolved: Resolved, spec: Spec, inventory: Inventory) -> Iterator[Problem]:
    there = [device.id for device in inventory.devices]
    for path, name in _named_devices(resolved, spec):
        if name not in there:
            what = f"{inventory.name} has no {name}"
            why = f"its devices are: {', '.join(there)}{_remark(inventory)}"
            fix = "name one of these, or plan for another machine with --gpus"
            yield resolved.problem(Code.NO_SUCH_DEVICE, path, what, why=why, fix=fix)


def _remark(inventory: Inventory) -> str:
    return f"; {inventory.remark}" if inventory.remark else ""


def _named_devices(resolved: Resolved, spec: Spec) -> Iterator[tuple[ConfigPath, str]]:
    """Every device the file names, and where. ``disk`` and strategies are not devices of a machine."""
    for name, entry in spec.words.items():
        path: ConfigPath = ("device_map", name) if name else ("device_map",)
        if isinstance(entry, PlacementSpec):
            if not entry.is_spread:
                yield (*path, "execution"), entry.devices[0]
            else:
                yield from (((*path, "execution", index), device) for index, device in enumerate(entry.devices))
        elif entry == CPU or ":" in entry:
            yield path, entry
    if spec.execution_device is not None:
        yield ("execution_device",), spec.execution_device
    for key in resolved.data.get("max_memory") or ():
        if (name := parse_device(key)) != DISK:
            yield ("max_memory", key), name
    for key in spec.reserve if isinstance(spec.reserve, dict) else ():
        if (device := device_or_none(key)) is not None:
            yield ("reserve", key), device


def _assignment(part: Component, solution: Solution, task: Task) -> Assignment:
    name, size = part.name, task.footprints[part.name]
    place, load = solution.choice[name], solution.loads[name]
    parts = tuple(_parts(name, solution))
    return Assignment(
        component=name,
        class_name=part.class_name,
        dtype=size.dtype,
        nbytes=sum(part.nbytes for part in parts) or size.nbytes,
        peak_bytes=load.peak_bytes(place.residency),
        measured_from=size.measured_from,
        execution_device=place.device,
        storage_device=place.storage_device,
        residency=Residency.SPLIT if parts else place.residency,
        reason=reason_of(name, solution, task, parts),
        parts=parts,
        is_written=size.needs_cast and name in _on_disk(solution),
        casts_inputs=name in task.casting,
        calls=task.prices.runs[name].calls,
        seconds=task.seconds(solution, name),
        moved_bytes=task.moved_bytes(solution, name),
    )


def _parts(component: str, solution: Solution) -> Iterator[Part]:
    """The parts of a component that has several, the one that is all the rest first."""
    keys = [key for key in solution.choice if key == component or key.startswith(f"{component}.")]
    for key in sorted(keys, key=lambda key: key != component) if len(keys) > 1 else ():
        place, load = solution.choice[key], solution.loads[key]
        yield Part(
            path=key[len(component) + 1 :],
            nbytes=load.nbytes,
            peak_bytes=load.peak_bytes(place.residency),
            execution_device=place.device,
            storage_device=place.storage_device,
            residency=place.residency,
        )


def _on_disk(solution: Solution) -> frozenset[str]:
    """The components of which something rests on disk."""
    return frozenset(name.partition(".")[0] for name, place in solution.choice.items() if place.storage_device == DISK)


def _written_bytes(solution: Solution, task: Task) -> int:
    """The bytes that rest on disk and are in no file as they are loaded."""
    return sum(
        solution.loads[name].nbytes
        for name, place in solution.choice.items()
        if place.storage_device == DISK and task.footprints[name.partition(".")[0]].needs_cast
    )


def _device_use(device: Device, solution: Solution, task: Task) -> DeviceUse:
    limits = task.limits
    use = uses_of(solution.choice, solution.loads, limits.budgets)[device.id]
    runs = is_accelerator(device.id) and use.peak > 0
    return DeviceUse(
        id=device.id,
        description=device.description,
        total_bytes=device.total_bytes,
        budget_bytes=min(limits.budgets[device.id], device.total_bytes),
        used_bytes=use.peak,
        reserved_bytes=limits.reserve_of(device.id) + use.need - use.peak if runs else 0,
    )


def _large_calls(task: Task) -> Iterator[str]:
    """The reserve by default is for a picture of so many pixels: larger ones, and films, take more."""
    spec = task.spec
    if "reserve" in spec.model_fields_set or not task.usable:
        return
    frames = frames_of(spec, task.assembly.facts)
    height, width = (spec.call.get(side) for side in ("height", "width"))
    pixels = height * width if isinstance(height, int) and isinstance(width, int) else 0
    if frames is not None:
        kept = format_bytes(DEFAULT_RESERVE)
        yield f"the reserve of {kept} is for one picture, and a film of {frames} takes more; set reserve, or rehearse"
    elif pixels > RESERVED_PIXELS:
        about = format_bytes(int(DEFAULT_RESERVE * pixels / RESERVED_PIXELS))
        yield f"no room is kept for activations of {height} x {width}: about {about}; set reserve, or rehearse"


def _not_split(choice: Mapping[str, Place], task: Task) -> Iterator[str]:
    """What auto brings, and had no way to split."""
    for component in task.assembly.modules:
        name, layout = component.name, task.layouts.get(component.name)
        tried = task.usable and task.spec.may_split(name) and task.is_worth_a_split(name)
        if not tried or choice[name].residency is Residency.ALWAYS:
            continue
        if "split" in component.refused:
            yield f"{name} is not split: {component.refused['split']}"
        elif layout is None:
            yield f"{name} is not split: how its class lays it out is not known without building it"
        elif not layout.can_split:
            yield f"{name} is not split: its class does not say which of its modules stay whole (_no_split_modules)"


def _notes(solution: Solution, task: Task) -> Iterator[str]:
    choice = solution.choice
    if not solution.proven:
        better = "faster" if solution.fastest else "more even"
        yield f"there are very many ways to place this; a {better} one than the one found may exist"
    if task.spec.low_memory != "none" and all(place.residency is Residency.ALWAYS for place in choice.values()):
        if task.usable:
            yield f"low_memory: {task.spec.low_memory} is not needed: every component fits an accelerator"
        else:
            no_device = f"there is no accelerator to use{_remark(task.inventory)}"
            yield f"low_memory: {task.spec.low_memory} has no effect: {no_device}"
    yield from _large_calls(task)
    for name in task.spread_components:
        if not task.layouts[name].can_split:
            yield f"{name} is placed whole: its class does not say which of its modules stay whole (_no_split_modules)"
    yield from _not_split(choice, task)
    if DISK in task.spec.max_memory and task.limits.budgets[DISK] and not _on_disk(solution):
        yield "max_memory.disk is not needed: nothing rests on disk"
    if task.spec.offload_folder is not None and not _written_bytes(solution, task):
        yield "offload_folder is not needed: nothing that is cast rests on disk, so nothing is written to it"
    unused = [d.id for d in task.inventory.accelerators if d.id not in task.usable and d.id not in task.spec.max_memory]
    if unused and task.usable:
        yield f"{', '.join(unused)} not used: max_memory names other accelerators"
