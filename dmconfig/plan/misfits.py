"""Why nothing fits, as problems with need and have, and the changes that help, each of them planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dmconfig.devices import CPU, DISK, is_accelerator
from dmconfig.errors import Code, Problem
from dmconfig.inventory import Device
from dmconfig.paths import ConfigPath
from dmconfig.plan.calls import DENOISER, role_of
from dmconfig.plan.model import Residency
from dmconfig.plan.placement import best_choice
from dmconfig.plan.requests import Place
from dmconfig.plan.task import UNLIMITED, Solution, Task
from dmconfig.plan.uses import Use, uses_of
from dmconfig.resolve import Resolved
from dmconfig.spec import DEFAULT_RESERVE, PlacementSpec, RehearsedReserve
from dmconfig.units import GIB, MIB, format_bytes

_RESERVES = (DEFAULT_RESERVE, GIB, GIB // 2, 256 * MIB, 0)


def misfits(resolved: Resolved, task: Task) -> Iterator[Problem]:
    """Yield why no placement fits: a reserve no device has, pins too big for a device, components that fit nowhere
    even alone, or else all of them together.
    """
    fix = _advice(task)
    budgets = task.limits.budgets
    if task.usable and all(task.reserve_on(device) >= budgets[device] for device in task.usable):
        reserve = format_bytes(min(task.reserve_on(device) for device in task.usable))
        what = f"the reserve of {reserve} leaves no room; {_offers(task.usable, task)}"
        yield resolved.problem(Code.DOES_NOT_FIT, ("reserve",), what, fix=fix)
        return
    beside = task.beside()
    if beside is not None:  # all others have a place
        yield _too_large_to_spread(resolved, task, *task.spread_over(beside), fix)
        return
    pinned = [*_overfull(resolved, task, fix)]
    yield from pinned
    alone = [] if pinned else [name for name in task.requests if not _fits_alone(name, task)]
    for name in alone:
        what = f"{name} {_need(name, task)}; {_offers(_devices_of(task.requests[name].places), task)}"
        yield resolved.problem(Code.DOES_NOT_FIT, _path_of(name, task), what, fix=fix)
    if not pinned and not alone:
        yield _together(resolved, task, fix)


def _too_large_to_spread(resolved: Resolved, task: Task, solution: Solution, name: str | None, fix: str) -> Problem:
    assert name is not None  # noqa: S101 - a task whose components all have a place is no misfit
    rooms = task.rooms(name, solution)
    offers = ", ".join(f"{room.device} {format_bytes(room.nbytes)}" for room in rooms)
    need = format_bytes(task.footprints[name].nbytes)
    what = f"{name} needs {need}; beside the others and the reserve there is room on {offers}"
    layout = task.layouts[name]
    if not layout.can_split:
        class_name = next(part.class_name for part in task.assembly.modules if part.name == name)
        what += f"; {class_name} cannot be split, because it does not say which of its modules stay whole"
    else:
        largest = max((block.nbytes for block in layout.blocks()), default=0)
        what += f"; its largest block has {format_bytes(largest)}"
        own = layout.outside_blocks_bytes
        what += f", and {format_bytes(own)} of its own go to {rooms[0].device}" if own else ""
    return resolved.problem(Code.DOES_NOT_FIT, ("device_map", name), what, fix=fix)


def _overfull(resolved: Resolved, task: Task, fix: str) -> Iterator[Problem]:
    """A problem per device on which the file itself puts more than there is."""
    limits, loads = task.limits, task.loads
    pins = {name: request.places[0] for name, request in task.requests.items() if request.pinned}
    uses = uses_of(pins, loads, limits.budgets)
    for device, use in uses.items():
        if limits.holds(device, use):
            continue
        names = [name for name, place in pins.items() if device in (place.device, place.storage_device)]
        parts = " + ".join(f"{name} {format_bytes(_bytes_on(device, name, pins[name], task))}" for name in names)
        one_at_a_time = " (of those brought in turn, the largest counts)" if use.brought and len(names) > 1 else ""
        short = format_bytes(use.need - limits.offer(device))
        needs = f"{parts}{_reserve_on(device, task)}{_beyond_reserve(device, use, pins, task)}{one_at_a_time}"
        what = f"on {device}: {needs}; {_offers((device,), task)}, {short} short"
        yield resolved.problem(Code.DOES_NOT_FIT, _path_of(names[0], task), what, fix=fix)


def _beyond_reserve(device: str, use: Use, pins: Mapping[str, Place], task: Task) -> str:
    """What the component that needs most needs of a device while it runs there, beyond the reserve of all of them."""
    more = use.need - use.peak
    if not more:
        return ""

    def visiting(name: str) -> int:
        brought = _bytes_on(device, name, pins[name], task) if pins[name].residency is not Residency.ALWAYS else 0
        return brought + task.loads[name].working.get(device, 0)

    busiest = max((name for name, place in pins.items() if place.device == device), key=visiting)
    return f" + {format_bytes(more)} more while {busiest} runs"


def _bytes_on(device: str, name: str, place: Place, task: Task) -> int:
    load = task.loads[name]
    return load.peak_bytes(place.residency) if device == place.device else load.nbytes


def _together(resolved: Resolved, task: Task, fix: str) -> Problem:
    total = sum(load.nbytes for load in task.loads.values())
    places = [place for request in task.requests.values() for place in request.places]
    reserves = {task.reserve_on(device) for device in task.usable}
    reserve = f" + {format_bytes(min(reserves))} reserve on each accelerator" if reserves else ""
    more = max((nbytes for load in task.loads.values() for nbytes in load.working.values()), default=0)
    reserve += f", up to {format_bytes(more)} more while one of them runs" if more else ""
    parts = ", ".join(f"{name} {format_bytes(load.nbytes)}" for name, load in task.loads.items())
    what = f"together the components need {format_bytes(total)}{reserve}; {_offers(_devices_of(places), task)}"
    return resolved.problem(Code.DOES_NOT_FIT, ("device_map",), what, why=f"they are: {parts}", fix=fix)


def _path_of(name: str, task: Task) -> ConfigPath:
    named = isinstance(task.spec.device_map, dict) and name in task.spec.device_map
    return ("device_map", name) if named else ("device_map",)


def _fits_alone(name: str, task: Task) -> bool:
    return best_choice({name: task.requests[name]}, task.loads, task.limits) is not None


def _need(name: str, task: Task) -> str:
    places = task.requests[name].places
    least = min(task.loads[name].peak_bytes(place.residency) for place in places)
    device = places[0].device
    return f"needs {format_bytes(least)}{_reserve_on(device, task, task.loads[name].working.get(device, 0))}"


def _reserve_on(device: str, task: Task, working: int = 0) -> str:
    reserve = task.reserve_on(device) + working if is_accelerator(device) else 0
    return f" + {format_bytes(reserve)} reserve" if reserve else ""


def _devices_of(places: list[Place] | tuple[Place, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(device for place in places for device in (place.device, place.storage_device)))


def _offers(devices: tuple[str, ...], task: Task) -> str:
    limit = task.limits.budgets[DISK]
    disk = Device(id=DISK, description="", total_bytes=limit, free_bytes=limit)
    by_id = {device.id: device for device in (*task.inventory.devices, disk)}
    shown = [device for device in devices if device != DISK or limit < UNLIMITED]
    return ", ".join(_offer(by_id[device], task) for device in shown)


def _offer(device: Device, task: Task) -> str:
    budget = task.limits.budgets[device.id]
    text = f"{device.id} offers {format_bytes(budget)}"
    if budget < device.free_bytes:
        return f"{text} (max_memory, of {format_bytes(device.free_bytes)})"
    return text if device.free_bytes == device.total_bytes else f"{text} (free of {format_bytes(device.total_bytes)})"


def _advice(task: Task) -> str:
    """The changes that help, least first, each of them planned."""
    found = [text for text, variation in variations(task) if variation.found() is not None]
    return "; or ".join(found[:3]) or "use a machine with more memory, a smaller dtype, or a smaller pipeline"


def variations(task: Task) -> Iterator[tuple[str, Task]]:
    """Yield changes of the file, and of the machine, in words and as tasks, the least first; not all of them help."""
    for reserve in () if isinstance(task.spec.reserve, RehearsedReserve) else _RESERVES:
        lower = task.variation(reserve=reserve)
        if reserve < _largest_reserve(task) and lower.found() is not None:
            yield f"lower reserve to {format_bytes(reserve)}", lower
            break
    if task.spec.max_memory:
        yield "remove max_memory", task.variation(max_memory={})
    yield from _streamed(task)
    yield from _other_pins(task)
    balanced = task.variation(device_map="balanced")
    if task.spec.device_map != "balanced":
        yield "use device_map: balanced", balanced
    for word in ("cpu_offload_with_hook", "group_offload", "sequential_cpu_offload"):
        alone = task.variation(low_memory=word)
        if word != task.spec.low_memory and alone.found() is not None:
            yield f"use low_memory: {word}", alone
        elif balanced.found() is None:
            text = f"use device_map: balanced with low_memory: {word}"
            yield text, task.variation(device_map="balanced", low_memory=word)
    yield from _on_the_cpu(task)
    yield from _one_more(task)


def _on_the_cpu(task: Task) -> Iterator[tuple[str, Task]]:
    """One component on the cpu that is not there, the one that costs least; not a denoiser, which would take hours."""
    if task.spec.strategy is None or not task.usable:
        return
    free = [name for name in task.names if name not in task.spec.placements and role_of(name) != DENOISER]
    for name in sorted(free, key=lambda name: task.prices.seconds(name, Place(CPU), task.footprints[name].nbytes)):
        strategy = task.spec.strategy
        varied = task.variation(device_map={**task.spec.placements, "default": strategy, name: CPU})
        if varied.found() is not None:
            in_map = f"device_map.{name}: {CPU}"
            as_map = f"device_map: {{{name}: {CPU}, default: {strategy}}}"
            yield f"use {in_map if task.spec.placements else as_map}", varied
            return


def _one_more(task: Task) -> Iterator[tuple[str, Task]]:
    """The machine with one more of its largest accelerators."""
    if task.usable:
        accelerators = task.inventory.accelerators
        largest = max(accelerators, key=lambda device: device.total_bytes)
        another = replace(largest, id=f"{largest.id.partition(':')[0]}:{len(accelerators)}")
        machine = replace(task.inventory, accelerators=(*accelerators, another))
        yield f"one more card of {format_bytes(largest.total_bytes)}", replace(task, inventory=machine)


def _largest_reserve(task: Task) -> int:
    spec = task.spec
    return max((spec.reserve_of(name, device) for name in task.names for device in task.usable), default=0)


def _streamed(task: Task) -> Iterator[tuple[str, Task]]:
    """What is spread, with the blocks that do not fit brought layer by layer."""
    for name, entry in task.spread_components.items():
        if entry.offload == "none":
            streamed = entry.model_copy(update={"offload": "sequential"})
            varied = task.variation(device_map={**task.spec.placements, name: streamed})
            yield f"add offload: sequential to device_map.{name}", varied


def _other_pins(task: Task) -> Iterator[tuple[str, Task]]:
    """One pinned component on another accelerator."""
    device_map = task.spec.device_map
    if not isinstance(device_map, dict):
        return
    for name, entry in device_map.items():
        here = entry.devices if isinstance(entry, PlacementSpec) else (entry,)
        for device in task.usable if name in task.requests and CPU not in here else ():
            if device not in here:
                yield f"place {name} on {device}", task.variation(device_map={**device_map, name: device})
