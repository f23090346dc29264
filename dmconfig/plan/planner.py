"""From spec, assembly, footprints and machine to a plan: pure, torch-free, the same answer for the same input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dmconfig.assembly import Assembly
from dmconfig.devices import CPU, DISK, is_accelerator, parse_device
from dmconfig.errors import Code, PlanError, Problem
from dmconfig.footprint import Footprint
from dmconfig.inventory import Device, Inventory
from dmconfig.paths import ConfigPath
from dmconfig.plan.misfits import misfits
from dmconfig.plan.model import Assignment, DeviceUse, Plan, Residency
from dmconfig.plan.placement import Choice, Found, uses_of
from dmconfig.plan.requests import Place, Request
from dmconfig.plan.task import UNLIMITED, Task
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
    notes: tuple[str, ...] = (),
) -> Plan:
    """Return where every component of assembly goes on the machine.

    Every component with weights is assigned exactly once; no device holds more than its budget less the reserve;
    pins are honoured exactly and paid for first. Arguments are not changed. ``notes`` are added to the plan's own.

    Raises: PlanError: the file names a device the machine lacks, or no placement fits, with need and have and
        changes that help, each verified by planning it.
    """
    missing = [*_missing_devices(resolved, spec, inventory), *_cast_on_disk(resolved, spec, footprints)]
    if missing:
        raise PlanError(missing)
    task = Task(spec=spec, assembly=assembly, footprints=footprints, inventory=inventory)
    found = task.found()
    if found is None:
        raise PlanError([*misfits(resolved, task)])
    choice = found.choice
    return Plan(
        pipeline=assembly.class_name,
        machine=inventory.name,
        execution_device=spec.execution_device or (choice[assembly.denoiser].device if choice else CPU),
        assignments=tuple(_assignment(part.name, choice[part.name], task) for part in assembly.modules),
        devices=tuple(_device_use(device, choice, task) for device in (*inventory.devices, *_disk(choice, task))),
        notes=(*notes, *_notes(found, task)),
    )


def _cast_on_disk(resolved: Resolved, spec: Spec, footprints: Mapping[str, Footprint]) -> Iterator[Problem]:
    """Weights that are cast when they are loaded are in no file any more."""
    for name, entry in spec.device_map.items() if isinstance(spec.device_map, dict) else ():
        size = footprints.get(name)
        if isinstance(entry, PlacementSpec) and entry.storage == DISK and size is not None and size.needs_cast:
            what = f"{name} is stored as {size.stored_dtype} and loaded as {size.dtype}, so it cannot rest in its files"
            fix = "set its dtype to auto, or use storage: cpu"
            yield resolved.problem(Code.CONTRADICTION, ("device_map", name, "storage"), what, fix=fix)


def _disk(choice: Choice, task: Task) -> Iterator[Device]:
    """The disk, where something rests on it: as large as the file allows, else as large as what rests there."""
    resting = sum(task.loads[name].nbytes for name, place in choice.items() if place.storage_device == DISK)
    if resting:
        limit = min(task.limits.budgets[DISK], UNLIMITED)
        size = resting if limit == UNLIMITED else limit
        yield Device(id=DISK, description="the files the weights came in", total_bytes=size, free_bytes=size)


def _missing_devices(resolved: Resolved, spec: Spec, inventory: Inventory) -> Iterator[Problem]:
    there = [device.id for device in inventory.devices]
    for path, name in _named_devices(resolved, spec):
        if name not in there:
            what = f"{inventory.name} has no {name}"
            why = f"its devices are: {', '.join(there)}"
            fix = "name one of these, or plan for another machine with --gpus"
            yield resolved.problem(Code.NO_SUCH_DEVICE, path, what, why=why, fix=fix)


def _named_devices(resolved: Resolved, spec: Spec) -> Iterator[tuple[ConfigPath, str]]:
    """Every device the file names, and where. ``disk`` and strategies are not devices of a machine."""
    device_map = spec.device_map if isinstance(spec.device_map, dict) else {"": spec.device_map}
    for name, entry in device_map.items():
        path: ConfigPath = ("device_map", name) if name else ("device_map",)
        if isinstance(entry, PlacementSpec):
            yield (*path, "execution"), entry.execution
        elif entry == CPU or ":" in entry:
            yield path, entry
    if spec.execution_device is not None:
        yield ("execution_device",), spec.execution_device
    for key in resolved.data.get("max_memory") or ():
        if (name := parse_device(key)) != DISK:
            yield ("max_memory", key), name


def _assignment(name: str, place: Place, task: Task) -> Assignment:
    part = next(part for part in task.assembly.modules if part.name == name)
    size, load = task.footprints[name], task.loads[name]
    return Assignment(
        component=name,
        class_name=part.class_name,
        dtype=size.dtype,
        nbytes=size.nbytes,
        peak_bytes=load.peak_bytes(place.residency),
        measured_from=size.measured_from,
        execution_device=place.device,
        storage_device=place.storage_device,
        residency=place.residency,
        reason=_reason(place, task.requests[name], task.spec.reserve),
    )


_BROUGHT = {
    Residency.ALWAYS: "",
    Residency.WHILE_RUNNING: ", brought whole while it runs",
    Residency.PER_GROUP: ", brought in groups of layers",
    Residency.PER_LEAF: ", brought layer by layer",
}


def _reason(place: Place, request: Request, reserve: int) -> str:
    """Why a component is there: what the file says, or what the search found."""
    rest = "; rests on disk, because the cpu has no room" if place.storage == DISK and not request.pinned else ""
    if len({(choice.device, choice.residency) for choice in request.places}) == 1:
        return f"{request.origin}{_BROUGHT[place.residency]}{rest}"
    if place.residency is not Residency.ALWAYS:
        beside = f"the others and the reserve of {format_bytes(reserve)}" if reserve else "the others"
        return f"no accelerator has room for it beside {beside}{_BROUGHT[place.residency]}{rest}"
    if place.device == CPU:
        return "no accelerator has room for it; computed on the cpu, which max_memory.cpu allows"
    return f"{request.origin}: fits, and keeps the accelerators even"


def _device_use(device: Device, choice: Choice, task: Task) -> DeviceUse:
    limits = task.limits
    used = uses_of(choice, task.loads, limits.budgets)[device.id].peak
    runs = is_accelerator(device.id) and used > 0
    return DeviceUse(
        id=device.id,
        description=device.description,
        total_bytes=device.total_bytes,
        budget_bytes=min(limits.budgets[device.id], device.total_bytes),
        used_bytes=used,
        reserved_bytes=limits.reserve if runs else 0,
    )


def _notes(found: Found, task: Task) -> Iterator[str]:
    choice = found.choice
    if not found.proven:
        yield "there are very many ways to place this; a more even one than the one found may exist"
    if task.spec.low_memory != "none" and all(place.residency is Residency.ALWAYS for place in choice.values()):
        if task.usable:
            yield f"low_memory: {task.spec.low_memory} is not needed: every component fits an accelerator"
        else:
            yield f"low_memory: {task.spec.low_memory} has no effect: there is no accelerator to use"
    unused = [d.id for d in task.inventory.accelerators if d.id not in task.usable and d.id not in task.spec.max_memory]
    if unused and task.usable:
        yield f"{', '.join(unused)} not used: max_memory names other accelerators"
