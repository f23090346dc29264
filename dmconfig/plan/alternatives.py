"""What else there is: the places one component could have beside the others, and the other strategies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dmconfig.devices import DISK, is_accelerator
from dmconfig.plan.model import Residency
from dmconfig.plan.requests import Place, all_places
from dmconfig.plan.task import Solution, Task
from dmconfig.plan.uses import uses_of
from dmconfig.spec import STRATEGIES
from dmconfig.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One place of a component, all others staying where they are: its price, and why it cannot be, if so."""

    execution_device: str
    storage_device: str
    residency: Residency
    seconds: float
    obstacle: str
    is_chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What one strategy makes of the same machine: ``seconds`` and bytes per device, or nothing where none fits."""

    strategy: str
    fits: bool
    is_chosen: bool
    seconds: float | None = None
    moved_bytes: float | None = None
    bytes_by_device: tuple[tuple[str, int], ...] = ()


def alternatives_of(component: str, solution: Solution, task: Task) -> tuple[Alternative, ...]:
    """Return every whole place of a component beside the others, the cheapest possible one first."""
    found = [*_alternatives(component, solution, task)]
    return tuple(sorted(found, key=lambda each: (bool(each.obstacle), each.seconds)))


def compare(task: Task) -> tuple[Comparison, ...]:
    """Return what each strategy, and each accelerator alone, makes of this machine; pins of the file are kept."""
    return tuple(_compared(word, task) for word in (*STRATEGIES, *task.usable))


def _alternatives(component: str, solution: Solution, task: Task) -> Iterator[Alternative]:
    mine = [name for name in solution.choice if name == component or name.startswith(f"{component}.")]
    others = {name: place for name, place in solution.choice.items() if name not in mine}
    chosen = solution.choice[component] if len(mine) == 1 else None
    load = task.whole_load(component)
    for place in all_places(task.spec, task.usable):
        uses = uses_of({**others, component: place}, {**solution.loads, component: load}, task.limits.budgets)
        lacking = [
            f"{device} would need {format_bytes(use.need)} of {format_bytes(max(0, task.limits.offer(device)))}"
            for device, use in uses.items()
            if device in (place.device, place.storage_device) and not task.limits.holds(device, use)
        ]
        yield Alternative(
            execution_device=place.device,
            storage_device=place.storage_device,
            residency=place.residency,
            seconds=task.prices.seconds(component, place, load.nbytes),
            obstacle="; ".join(lacking) or _not_in_files(component, place, task),
            is_chosen=place == chosen,
        )


def _not_in_files(component: str, place: Place, task: Task) -> str:
    cast = task.footprints[component].needs_cast and task.spec.offload_folder is None
    return "it is cast when it is loaded, and there is no offload_folder" if cast and place.storage == DISK else ""


def _compared(word: str, task: Task) -> Comparison:
    device_map = {**task.spec.placements, "default": word} if task.spec.placements else word
    varied = task.variation(device_map=device_map, low_memory="none")
    is_chosen = word in (task.spec.strategy, task.spec.device_map) and task.spec.low_memory == "none"
    solution = varied.found()
    if solution is None:
        return Comparison(strategy=word, fits=False, is_chosen=is_chosen)
    uses = uses_of(solution.choice, solution.loads, task.limits.budgets)
    return Comparison(
        strategy=word,
        fits=True,
        is_chosen=is_chosen,
        seconds=varied.seconds(solution),
        moved_bytes=varied.moved_bytes(solution),
        bytes_by_device=tuple((d, use.peak) for d, use in uses.items() if use.peak or is_accelerator(d)),
    )
