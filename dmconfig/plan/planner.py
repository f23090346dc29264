"""From spec, assembly, footprints and machine to a plan: pure, torch-free, the same answer for the same input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dmconfig.assembly import Assembly, Component
from dmconfig.check import unknown_module
from dmconfig.devices import CPU, DISK, is_accelerator, parse_device
from dmconfig.errors import Code, PlanError, Problem
from dmconfig.footprint import Footprint
from dmconfig.inventory import Device, Inventory
from dmconfig.layout import Layout, nearest_ancestor
from dmconfig.paths import ConfigPath
from dmconfig.plan.misfits import misfits
from dmconfig.plan.model import Assignment, DeviceUse, Part, Plan, Residency
from dmconfig.plan.task import UNLIMITED, Solution, Task
from dmconfig.plan.uses import uses_of
from dmconfig.resolve import Resolved
from dmconfig.spec import PlacementSpec, Spec
from dmconfig.units import format_bytes


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
    layouts = layouts or {}
    wrong = [
        *_missing_devices(resolved, spec, inventory),
        *_cast_on_disk(resolved, spec, footprints),
        *wrong_parts(resolved, spec, assembly, layouts),
    ]
    if wrong:
        raise PlanError(wrong)
    task = Task(spec=spec, assembly=assembly, footprints=footprints, inventory=inventory, layouts=layouts)
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
    )


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
        limit = min(task.limits.budgets[DISK], UNLIMITED)
        size = sum(solution.loads[name].nbytes for name in resting) if limit == UNLIMITED else limit
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


def _assignment(part: Component, solution: Solution, task: Task) -> Assignment:
    name, size = part.name, task.footprints[part.name]
    place, load = solution.choice[name], solution.loads[name]
    parts = tuple(_parts(name, solution))
    layout = task.layouts.get(name)
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
        reason=_spread_reason(layout, parts) if name in task.spread_components else _reason(name, solution, task),
        parts=parts,
        is_written=size.needs_cast and name in _on_disk(solution),
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


def _spread_reason(layout: Layout | None, parts: tuple[Part, ...]) -> str:
    if layout is not None and not layout.can_split:
        return "cannot be split: its class does not say which of its modules stay whole"
    if any(part.residency is Residency.PER_LEAF for part in parts):
        return "spread over the devices of the file; what they have no room for is brought layer by layer"
    return "spread over the devices of the file" if parts else "the first device of the file has room for all of it"


_BROUGHT = {
    Residency.ALWAYS: "",
    Residency.WHILE_RUNNING: ", brought whole while it runs",
    Residency.PER_GROUP: ", brought in groups of layers",
    Residency.PER_LEAF: ", brought layer by layer",
}


def _reason(name: str, solution: Solution, task: Task) -> str:
    """Why a component is there: what the file says, or what the search found."""
    place, request, reserve = solution.choice[name], task.requests[name], task.spec.reserve
    rest = "; rests on disk, because the cpu has no room" if place.storage == DISK and not request.pinned else ""
    if len({(choice.device, choice.residency) for choice in request.places}) == 1:
        parts = "; its parts where the file says" if task.spec.parts_of(name) else ""
        return f"{request.origin}{_BROUGHT[place.residency]}{rest}{parts}"
    if place.residency is not Residency.ALWAYS:
        beside = f"the others and the reserve of {format_bytes(reserve)}" if reserve else "the others"
        return f"no accelerator has room for it beside {beside}{_BROUGHT[place.residency]}{rest}"
    if place.device == CPU:
        return "no accelerator has room for it; computed on the cpu, which max_memory.cpu allows"
    return f"{request.origin}: fits, and keeps the accelerators even"


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
    used = uses_of(solution.choice, solution.loads, limits.budgets)[device.id].peak
    runs = is_accelerator(device.id) and used > 0
    return DeviceUse(
        id=device.id,
        description=device.description,
        total_bytes=device.total_bytes,
        budget_bytes=min(limits.budgets[device.id], device.total_bytes),
        used_bytes=used,
        reserved_bytes=limits.reserve if runs else 0,
    )


def _notes(solution: Solution, task: Task) -> Iterator[str]:
    choice = solution.choice
    if not solution.proven:
        yield "there are very many ways to place this; a more even one than the one found may exist"
    if task.spec.low_memory != "none" and all(place.residency is Residency.ALWAYS for place in choice.values()):
        if task.usable:
            yield f"low_memory: {task.spec.low_memory} is not needed: every component fits an accelerator"
        else:
            no_device = f"there is no accelerator to use{_remark(task.inventory)}"
            yield f"low_memory: {task.spec.low_memory} has no effect: {no_device}"
    for name in task.spread_components:
        if not task.layouts[name].can_split:
            yield f"{name} is placed whole: its class does not say which of its modules stay whole (_no_split_modules)"
    if task.spec.offload_folder is not None and not _written_bytes(solution, task):
        yield "offload_folder is not needed: nothing that is cast rests on disk, so nothing is written to it"
    unused = [d.id for d in task.inventory.accelerators if d.id not in task.usable and d.id not in task.spec.max_memory]
    if unused and task.usable:
        yield f"{', '.join(unused)} not used: max_memory names other accelerators"
