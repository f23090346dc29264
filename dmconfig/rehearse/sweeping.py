"""The largest setting of a pipeline that fits a machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dmconfig.errors import PlanError
from dmconfig.inventory import Inventory
from dmconfig.rehearse.script import Script, Settings
from dmconfig.rehearse.settling import Planner, settle, told


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One setting of a sweep on one machine: whether it runs there, and the device that comes closest to full.

    ``why_not`` is empty where it fits. One that is larger than another that does not fit is not tried. Where no plan
    was found, or it was not tried, nothing is known of what it needs, and ``device`` is empty. ``seconds`` is what
    moving weights, and computing on the cpu, adds to a generation: an estimate.
    """

    machine: str
    size: int
    batch: int
    fits: bool
    is_tried: bool = True
    why_not: str = ""
    device: str = ""
    need_bytes: int = 0
    capacity_bytes: int = 0
    seconds: float = 0.0


def sweep(
    script: Script, planner: Planner, inventory: Inventory, grid: Iterable[tuple[int, int]], settings: Settings
) -> Iterator[Tried]:
    """Yield what becomes of every square size and batch on a machine, each planned and rehearsed for itself.

    ``grid`` has pairs of both; ``settings`` has what is the same for all. The smallest come first: a larger picture, or
    more at once, never take less, so that what is at least as large in both as one that does not fit is not tried.

    Raises: SpecError, BuildError, DispatchError: as ``rehearse``.
    """
    failed: list[Tried] = []
    for size, batch in sorted(set(grid)):
        smaller = next((each for each in failed if each.size <= size and each.batch <= batch), None)
        if smaller is None:
            tried = _tried(script, planner, inventory, replace(settings, height=size, width=size, batch=batch))
        else:
            why = f"not tried: {smaller.size} px, batch {smaller.batch} does not fit"
            tried = Tried(machine=inventory.name, size=size, batch=batch, fits=False, is_tried=False, why_not=why)
        failed += [] if tried.fits else [tried]
        yield tried


def largest(tried: Iterable[Tried]) -> Tried | None:
    """Return the largest setting that fits: of the largest size, the one with the most at once; None: none fits."""
    return max((each for each in tried if each.fits), key=lambda each: (each.size, each.batch), default=None)


def _tried(script: Script, planner: Planner, inventory: Inventory, settings: Settings) -> Tried:
    size, batch = settings.height or 0, settings.batch or 1
    try:
        settled = settle(script, planner, inventory, settings)
    except PlanError as error:
        return Tried(machine=inventory.name, size=size, batch=batch, fits=False, why_not=told(error))
    device = settled.fullest
    return Tried(
        machine=inventory.name,
        size=size,
        batch=batch,
        fits=settled.agrees,
        why_not=settled.wrong,
        device=device.id,
        need_bytes=settled.taken.need_bytes[device.id],
        capacity_bytes=device.total_bytes,
        seconds=settled.plan.seconds,
    )
