"""Why each component is where it is, in words: what the file says, or what the search found."""

from __future__ import annotations

from collections.abc import Iterable

from dmconfig.devices import CPU, DISK, is_accelerator
from dmconfig.plan.model import Part, Residency
from dmconfig.plan.requests import AUTO, Place
from dmconfig.plan.task import Solution, Task
from dmconfig.units import format_bytes, format_seconds

_BROUGHT = {
    Residency.ALWAYS: "",
    Residency.WHILE_RUNNING: ", brought whole while it runs",
    Residency.PER_GROUP: ", brought in groups of layers",
    Residency.PER_LEAF: ", brought layer by layer",
}
_PREFERS = {
    "balanced_low_0": "keeps the first accelerator as empty as it can be",
    "sequential": "fills the accelerators in their order",
}


def reason_of(name: str, solution: Solution, task: Task, parts: tuple[Part, ...]) -> str:
    """Return why a component is there."""
    if name in task.spread_components:
        return _spread(name, task, parts)
    if task.spec.strategy == AUTO and not task.requests[name].pinned:
        return _fastest(name, solution, task, parts)
    return _placed(name, solution.choice[name], task)


def _spread(name: str, task: Task, parts: tuple[Part, ...]) -> str:
    layout = task.layouts.get(name)
    if layout is not None and not layout.can_split:
        return "cannot be split: its class does not say which of its modules stay whole"
    if any(part.residency is Residency.PER_LEAF for part in parts):
        return "spread over the devices of the file; what they have no room for is brought layer by layer"
    return "spread over the devices of the file" if parts else "the first device of the file has room for all of it"


def _placed(name: str, place: Place, task: Task) -> str:
    request, reserve = task.requests[name], task.spec.reserve_of(name, place.device)
    rest = "; rests on disk, because the cpu has no room" if place.storage == DISK and not request.pinned else ""
    if len({(choice.device, choice.residency) for choice in request.places}) == 1:
        parts = "; its parts where the file says" if task.spec.parts_of(name) else ""
        return f"{request.origin}{_BROUGHT[place.residency]}{rest}{parts}"
    if place.residency is not Residency.ALWAYS:
        beside = f"the others and the reserve of {format_bytes(reserve)}" if reserve else "the others"
        return f"no accelerator has room for it beside {beside}{_BROUGHT[place.residency]}{rest}"
    if place.device == CPU:
        beside = f" beside the reserve of {format_bytes(reserve)}" if reserve else ""
        return f"no accelerator has room for it{beside}; computed on the cpu, which max_memory.cpu allows"
    return f"{request.origin}: fits, and {_PREFERS.get(task.spec.strategy or '', 'keeps the accelerators even')}"


def _fastest(name: str, solution: Solution, task: Task, parts: tuple[Part, ...]) -> str:
    place, calls = solution.choice[name], task.prices.runs[name].calls
    seconds = format_seconds(task.seconds(solution, name))
    if parts:
        away = [part for part in parts if part.residency is Residency.PER_LEAF]
        stay = _listed(part.execution_device for part in parts if part.residency is Residency.ALWAYS)
        if not away:
            return f"{_no_room(name, task)}; its blocks stay on {stay}"
        storages = sorted({part.storage_device for part in away})
        amounts = [format_bytes(sum(p.nbytes for p in away if p.storage_device == storage)) for storage in storages]
        come = " and ".join(f"{amount} from {storage}" for amount, storage in zip(amounts, storages, strict=True))
        often = f" on each of {calls:g} calls" if calls != 1 else ""
        return f"{_no_room(name, task)}; what fits stays on {stay}, and layer by layer come {come}{often}: {seconds}"
    if place.residency is Residency.ALWAYS and is_accelerator(place.device):
        return "fits, so nothing of it moves"
    if place.device == CPU:
        return f"{_no_room(name, task)}; computed on the cpu: {seconds}" if calls else "it never runs"
    how = "brought whole" if place.residency is Residency.WHILE_RUNNING else "brought layer by layer"
    often = "" if place.residency is Residency.WHILE_RUNNING or calls == 1 else f" on each of {calls:g} calls"
    return f"{_no_room(name, task)}; {how} from {place.storage}{often}: {seconds}"


def _no_room(name: str, task: Task) -> str:
    """Why a component does not stay: too large for any device, or for what the others leave."""
    nbytes, limits = task.footprints[name].nbytes, task.limits
    largest = max((limits.offer(device) for device in task.usable), default=0)
    if nbytes > largest:
        reserve = max((task.spec.reserve_of(name, device) for device in task.usable), default=0)
        beside = f" beside the reserve of {format_bytes(reserve)}" if reserve else ""
        offer = format_bytes(max(0, largest))
        return f"{format_bytes(nbytes)} are more than the {offer} that any accelerator offers{beside}"
    reserve = max((task.spec.reserve_of(name, device) for device in task.usable), default=0)
    beside = f", beside the reserve of {format_bytes(reserve)}," if reserve else ""
    return f"its room{beside} is worth more to the others"


def _listed(devices: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(devices))
