"""What devices hold under a placement: loads, budgets and the arithmetic that both searches share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dmconfig.devices import is_accelerator
from dmconfig.plan.model import Residency
from dmconfig.plan.requests import Place

Choice = Mapping[str, Place]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A component's weights: all of them, what is on the execution device per leaf or group, and when they leave.

    ``stays`` is True for a component outside the pipeline's offload order (a controlnet): brought whole, it stays
    until the call ends, because it runs within another component's phase.
    """

    nbytes: int
    largest_leaf_bytes: int
    group_bytes: int
    stays: bool = False

    def peak_bytes(self, residency: Residency) -> int:
        """Return what of it is on the execution device at once."""
        match residency:
            case Residency.PER_LEAF:
                return self.largest_leaf_bytes
            case Residency.PER_GROUP:
                return self.group_bytes
            case _:
                return self.nbytes


@dataclass(frozen=True, slots=True)
class Use:
    """What one device holds: bytes that are always there, and the largest of those that come and go one at a time."""

    held: int = 0
    brought: int = 0

    @property
    def peak(self) -> int:
        """The most that is there at one time."""
        return self.held + self.brought


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Budget per device in bytes, and the bytes kept free on an accelerator that runs something."""

    budgets: Mapping[str, int]
    reserve: int

    def offer(self, device: str) -> int:
        """Return the bytes that weights may take of a device."""
        return self.budgets[device] - (self.reserve if is_accelerator(device) else 0)

    def holds(self, device: str, use: Use) -> bool:
        """Tell whether a device has room for this use; an unused device always has."""
        return use.peak == 0 or use.peak <= self.offer(device)


Uses = Mapping[str, Use]


def uses_of(choice: Choice, loads: Mapping[str, Load], devices: Iterable[str]) -> Uses:
    """Return what each device holds under a choice."""
    uses: Uses = {device: Use() for device in devices}
    for name, place in choice.items():
        uses = with_place(uses, place, loads[name])
    return uses


def with_place(uses: Uses, place: Place, load: Load) -> Uses:
    """Return uses after one more component; a device's use never shrinks."""
    result = dict(uses)
    use = result[place.device]
    peak = load.peak_bytes(place.residency)
    if place.residency is Residency.ALWAYS or load.stays:
        result[place.device] = Use(use.held + peak, use.brought)
    else:
        result[place.device] = Use(use.held, max(use.brought, peak))
    if place.storage_device != place.device:
        storage = result[place.storage_device]
        result[place.storage_device] = Use(storage.held + load.nbytes, storage.brought)
    return result
