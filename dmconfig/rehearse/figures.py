"""The figures of a rehearsal, from the books of the virtual machine that it ran on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dmconfig.devices import CPU, DISK
from dmconfig.inventory import Device, Inventory
from dmconfig.plan import Plan
from dmconfig.rehearse.margins import margins_of
from dmconfig.rehearse.model import Crossing, DevicePeak, PhasePeak
from dmconfig.rehearse.scaling import Steps, whole_generation
from dmconfig.virtual import Ledger
from dmconfig.virtual.ledger import Peak

_NOWHERE = PhasePeak(phase="", weights_bytes=0, activations_bytes=0)


def device_peak(ledger: Ledger, card: Device) -> DevicePeak:
    """Return what was on one accelerator in each phase, and its margins."""
    phases = _phase_peaks(ledger, card.id)
    highest = max(peak.nbytes for peak in phases)
    reserved = max(0, ledger.peak_reserved_bytes(card.id) - highest)
    rounding = max(0, ledger.peak_allocated_bytes(card.id) - highest)
    return DevicePeak(
        id=card.id,
        description=card.description,
        capacity_bytes=card.total_bytes,
        phases=phases,
        margins=margins_of(phases, reserved, rounding_bytes=rounding, card=card.description),
        curve=tuple(_curve(ledger, card.id)),
    )


def _phase_peaks(ledger: Ledger, device: str) -> tuple[PhasePeak, ...]:
    """The peaks of the phases in which anything was there; never none."""
    peaks = [
        PhasePeak(
            phase=phase,
            weights_bytes=ledger.peak_bytes(device, phase=phase, kind="weights"),
            activations_bytes=ledger.peak_bytes(device, phase=phase, kind="activations"),
        )
        for phase in ledger.phases
    ]
    return tuple(peak for peak in peaks if peak.nbytes) or tuple(peaks[:1]) or (_NOWHERE,)


def _curve(ledger: Ledger, device: str) -> Iterator[PhasePeak]:
    for stretch in ledger.timeline:
        peak = stretch.peaks.get(device, Peak())
        activations_bytes = peak.total_bytes - peak.weights_bytes
        yield PhasePeak(phase=stretch.phase, weights_bytes=peak.weights_bytes, activations_bytes=activations_bytes)


def crossings_of(ledger: Ledger, steps: Sequence[Steps], plan: Plan, inventory: Inventory) -> Iterator[Crossing]:
    """Yield what moves in a whole generation, route by route, with the time that it takes."""
    for move, nbytes, count in whole_generation(ledger.moves, steps, _shares(plan)):
        yield Crossing(
            phase=move.phase,
            source=move.source,
            destination=move.destination,
            kind=move.kind,
            nbytes=nbytes,
            count=count,
            seconds=_seconds(nbytes, move.source, move.destination, inventory),
        )


def _seconds(nbytes: float, source: str, destination: str, inventory: Inventory) -> float:
    """How long bytes take over a link; nothing within the host."""
    if source == destination or {source, destination} == {CPU, DISK}:
        return 0.0
    return nbytes / inventory.bandwidth(source, destination)


def _shares(plan: Plan) -> Mapping[str, float]:
    """Of two denoisers that take turns, as Wan 2.2 has them, the share of the steps that each runs in."""
    calls = {assignment.component: assignment.calls for assignment in plan.assignments}
    pairs = [(name, f"{name}_2") for name in calls if "encoder" not in name and f"{name}_2" in calls]
    return {name: calls[name] / (calls[one] + calls[two]) for one, two in pairs for name in (one, two)}
