"""From spec, assembly, footprints and machine to a plan: pure, torch-free, the same answer for the same input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dmconfig.assembly import Assembly
from dmconfig.devices import CPU, DISK, is_accelerator
from dmconfig.errors import Code, PlanError, Problem
from dmconfig.footprint import Footprint
from dmconfig.inventory import Device, Inventory
from dmconfig.paths import ConfigPath
from dmconfig.plan.model import Assignment, DeviceUse, Plan, Residency
from dmconfig.plan.placement import Choice, Limits, Load, best_choice, uses_of
from dmconfig.plan.requests import Place, Request, requests_of
from dmconfig.resolve import Resolved
from dmconfig.spec import PlacementSpec, Spec
from dmconfig.units import GIB, MIB, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """Everything a plan is made from; a variation of it answers "what if"."""

    spec: Spec
    assembly: Assembly
    footprints: Mapping[str, Footprint]
    inventory: Inventory

    @property
    def limits(self) -> Limits:
        budgets = {device.id: _budget(device, self.spec) for device in self.inventory.devices}
        return Limits(budgets=budgets, reserve=self.spec.reserve)

    @property
    def usable(self) -> tuple[str, ...]:
        """The accelerators with any budget, in the machine's order."""
        budgets = self.limits.budgets
        return tuple(device.id for device in self.inventory.accelerators if budgets[device.id] > 0)

    @property
    def requests(self) -> Mapping[str, Request]:
        return requests_of(self.spec, tuple(part.name for part in self.assembly.modules), self.usable)

    @property
    def loads(self) -> Mapping[str, Load]:
        in_turn = self.assembly.in_turn
        return {
            name: Load(nbytes=size.nbytes, largest_leaf_bytes=size.largest_leaf_bytes, stays=name not in in_turn)
            for name, size in self.footprints.items()
        }

    def choice(self) -> Choice | None:
        return best_choice(self.requests, self.loads, self.limits)

    def variation(self, **changes: object) -> _Task:
        spec = self.spec.model_copy(update=changes)
        return _Task(spec=spec, assembly=self.assembly, footprints=self.footprints, inventory=self.inventory)


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
    missing = [*_missing_devices(resolved, spec, inventory)]
    if missing:
        raise PlanError(missing)
    task = _Task(spec=spec, assembly=assembly, footprints=footprints, inventory=inventory)
    choice = task.choice()
    if choice is None:
        raise PlanError([*_misfits(resolved, task)])
    return Plan(
        pipeline=assembly.class_name,
        machine=inventory.name,
        execution_device=choice[assembly.denoiser].device if choice else CPU,
        assignments=tuple(_assignment(part.name, choice[part.name], task) for part in assembly.modules),
        devices=tuple(_device_use(device, choice, task) for device in inventory.devices),
        notes=(*notes, *_notes(choice, task)),
    )


def _budget(device: Device, spec: Spec) -> int:
    """A device's limit: what is free, or less where the file says so. Naming one accelerator excludes the others."""
    limit = spec.max_memory.get(device.id)
    if limit is not None:
        wanted = limit.bytes_of(total_bytes=device.total_bytes, free_bytes=device.free_bytes)
        return min(wanted, device.free_bytes)
    names_accelerators = any(is_accelerator(name) for name in spec.max_memory)
    return 0 if is_accelerator(device.id) and names_accelerators else device.free_bytes


def _missing_devices(resolved: Resolved, spec: Spec, inventory: Inventory) -> Iterator[Problem]:
    there = [device.id for device in inventory.devices]
    for path, name in _named_devices(spec):
        if name not in there:
            what = f"{inventory.name} has no {name}"
            why = f"its devices are: {', '.join(there)}"
            fix = "name one of these, or plan for another machine with --gpus"
            yield resolved.problem(Code.NO_SUCH_DEVICE, path, what, why=why, fix=fix)


def _named_devices(spec: Spec) -> Iterator[tuple[ConfigPath, str]]:
    """Every device the file names, and where. ``disk`` and strategies are not devices of a machine."""
    device_map = spec.device_map if isinstance(spec.device_map, dict) else {"": spec.device_map}
    for name, entry in device_map.items():
        path: ConfigPath = ("device_map", name) if name else ("device_map",)
        if isinstance(entry, PlacementSpec):
            yield (*path, "execution"), entry.execution
        elif entry == CPU or ":" in entry:
            yield path, entry
    for name in spec.max_memory:
        if name != DISK:
            yield ("max_memory", name), name


def _assignment(name: str, place: Place, task: _Task) -> Assignment:
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
        reason=_reason(place, task.requests[name]),
    )


_BROUGHT = {
    Residency.ALWAYS: "",
    Residency.WHILE_RUNNING: ", brought whole while it runs",
    Residency.PER_LEAF: ", brought layer by layer",
}


def _reason(place: Place, request: Request) -> str:
    """Why a component is there: what the file says, or what the search found."""
    if request.pinned:
        return f"{request.origin}{_BROUGHT[place.residency]}"
    if place.residency is not Residency.ALWAYS:
        return f"no accelerator has room for it beside the others{_BROUGHT[place.residency]}"
    if place.device == CPU:
        return "no accelerator has room for it; computed on the cpu, which max_memory.cpu allows"
    return f"{request.origin}: fits, and keeps the accelerators even"


def _device_use(device: Device, choice: Choice, task: _Task) -> DeviceUse:
    limits = task.limits
    used = uses_of(choice, task.loads, limits.budgets)[device.id].peak
    runs = is_accelerator(device.id) and used > 0
    return DeviceUse(
        id=device.id,
        description=device.description,
        total_bytes=device.total_bytes,
        budget_bytes=limits.budgets[device.id],
        used_bytes=used,
        reserved_bytes=limits.reserve if runs else 0,
    )


def _notes(choice: Choice, task: _Task) -> Iterator[str]:
    if task.spec.low_memory != "none" and all(place.residency is Residency.ALWAYS for place in choice.values()):
        if task.usable:
            yield f"low_memory: {task.spec.low_memory} is not needed: every component fits an accelerator"
        else:
            yield f"low_memory: {task.spec.low_memory} has no effect: there is no accelerator to use"
    unused = [d.id for d in task.inventory.accelerators if d.id not in task.usable and d.id not in task.spec.max_memory]
    if unused and task.usable:
        yield f"{', '.join(unused)} not used: max_memory names other accelerators"


def _misfits(resolved: Resolved, task: _Task) -> Iterator[Problem]:
    """What does not fit: each pinned or free component that no place can hold, or else all of them together."""
    fix = _advice(task)
    alone = [name for name in task.requests if not _fits_alone(name, task)]
    for name in alone:
        path: ConfigPath = ("device_map",)
        if isinstance(task.spec.device_map, dict) and name in task.spec.device_map:
            path = ("device_map", name)
        what = f"{name} {_need(name, task)}; {_offers(task.requests[name].places, task)}"
        yield resolved.problem(Code.DOES_NOT_FIT, path, what, fix=fix)
    if not alone:
        total = sum(load.nbytes for load in task.loads.values())
        reserve = f" + {format_bytes(task.spec.reserve)} reserve on each accelerator" if task.usable else ""
        places = tuple(dict.fromkeys(place for request in task.requests.values() for place in request.places))
        parts = ", ".join(f"{name} {format_bytes(load.nbytes)}" for name, load in task.loads.items())
        what = f"together the components need {format_bytes(total)}{reserve}; {_offers(places, task)}"
        yield resolved.problem(Code.DOES_NOT_FIT, ("device_map",), what, why=f"they are: {parts}", fix=fix)


def _fits_alone(name: str, task: _Task) -> bool:
    return best_choice({name: task.requests[name]}, task.loads, task.limits) is not None


def _need(name: str, task: _Task) -> str:
    places = task.requests[name].places
    least = min(task.loads[name].peak_bytes(place.residency) for place in places)
    reserve = f" + {format_bytes(task.spec.reserve)} reserve" if any(is_accelerator(p.device) for p in places) else ""
    return f"needs {format_bytes(least)}{reserve}"


def _offers(places: tuple[Place, ...], task: _Task) -> str:
    devices = dict.fromkeys(device for place in places for device in (place.device, place.storage_device))
    budgets = task.limits.budgets
    return ", ".join(f"{device} offers {format_bytes(budgets[device])}" for device in devices)


def _advice(task: _Task) -> str:
    """The changes that help, least first, each of them planned; or what is missing when none does."""
    found = [text for text, variation in _variations(task) if variation.choice() is not None]
    if found:
        return "; or ".join(found[:3])
    return "use a machine with more memory, a smaller dtype, or a smaller pipeline"


def _variations(task: _Task) -> Iterator[tuple[str, _Task]]:
    for reserve in (GIB, GIB // 2, 256 * MIB, 0):
        if reserve < task.spec.reserve and task.variation(reserve=reserve).choice() is not None:
            yield f"lower reserve to {format_bytes(reserve)}", task.variation(reserve=reserve)
            break
    if task.spec.device_map != "balanced":
        yield "use device_map: balanced", task.variation(device_map="balanced")
    for word in ("cpu_offload_with_hook", "sequential_cpu_offload"):
        yield f"use low_memory: {word}", task.variation(low_memory=word)
        if task.spec.device_map != "balanced":
            text = f"use device_map: balanced with low_memory: {word}"
            yield text, task.variation(device_map="balanced", low_memory=word)
