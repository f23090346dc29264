"""What devices hold under a placement: loads, budgets and the arithmetic that both searches share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dmconfig.devices import CPU, is_accelerator
from dmconfig.plan.model import Residency
from dmconfig.plan.requests import Place

Choice = Mapping[str, Place]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A component's weights: all of them, what is on the execution device per leaf or group, and when they leave.

    ``stays`` is True for a component outside the pipeline's offload order (a controlnet): brought whole, it stays
    until the call ends, because it runs within another component's phase. ``working`` are the bytes that it needs of a
    device while it runs there, beyond the device's reserve.
    """

    nbytes: int
    largest_leaf_bytes: int
    group_bytes: int
    stays: bool = False
    working: Mapping[str, int] = field(default_factory=dict)

    def peak_bytes(self, residency: Residency) -> int:
        """Return what of it is on the execution device at once."""
        match residency:
            case Residency.PER_LEAF:
                return self.largest_leaf_bytes
            case Residency.PER_GROUP:
                return self.group_bytes
            case _:
                return self.nbytes


class Use(NamedTuple):  # a search makes tens of thousands, and compares them: tuples are the quickest
    """What one device holds: bytes that are always there, and the largest of those that come and go one at a time.

    ``visiting`` is the most that comes with one component: its weights where they are brought, and its working bytes.
    """

    held: int = 0
    brought: int = 0
    visiting: int = 0

    @property
    def peak(self) -> int:
        """The most that weights take at one time."""
        return self.held + self.brought

    @property
    def need(self) -> int:
        """The most that is needed at one time, beyond the device's reserve."""
        return self.held + max(self.brought, self.visiting)

    def with_held(self, nbytes: int, working: int = 0) -> Use:
        """Return the use with more that is always there, and what works on it."""
        return Use(self.held + nbytes, self.brought, max(self.visiting, working))

    def with_brought(self, nbytes: int, working: int = 0) -> Use:
        """Return the use with more that comes and goes, and what works on it."""
        return Use(self.held, max(self.brought, nbytes), max(self.visiting, nbytes + working))


Uses = Mapping[str, Use]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Budget per device in bytes, and the bytes kept free on an accelerator that runs something.

    ``reserves`` are those of devices that differ from ``reserve``. ``unified`` are accelerators whose memory is the
    host's: what they and the cpu hold together has to fit the cpu's budget.
    """

    budgets: Mapping[str, int]
    reserve: int
    reserves: Mapping[str, int] = field(default_factory=dict)
    unified: tuple[str, ...] = ()
    _offers: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def reserve_of(self, device: str) -> int:
        """Return the bytes kept free on a device, where it runs something."""
        return self.reserves.get(device, self.reserve) if is_accelerator(device) else 0

    def offer(self, device: str) -> int:
        """Return the bytes that weights may take of a device."""
        if device not in self._offers:  # asked thousands of times by a search
            self._offers[device] = self.budgets[device] - self.reserve_of(device)
        return self._offers[device]

    def room(self, device: str, uses: Uses, working: int = 0) -> int:
        """Return the bytes that a device has left for weights that stay and work with so many bytes beside them.

        Where its memory is the host's, that is no more than what the host has left.
        """
        use = uses[device]
        need = use.held + max(use.brought, use.visiting, working)
        room = self.offer(device) - need
        if device in self.unified or (device == CPU and self.unified):
            others = sum(uses[d].need + self.reserve_of(d) for d in self.unified if d != device and uses[d].peak)
            host = 0 if device == CPU else uses[CPU].need + self.reserve_of(device)
            room = min(room, self.budgets[CPU] - need - others - host)
        return max(0, room)

    def holds(self, device: str, use: Use) -> bool:
        """Tell whether a device has room for this use; an unused device always has."""
        return use.peak == 0 or use.need <= self.offer(device)

    def hold(self, uses: Uses, devices: Iterable[str]) -> bool:
        """Tell whether these devices have room for their uses, and the host for all that is in its memory."""
        if not all(self.holds(device, uses[device]) for device in devices):
            return False
        shared = sum(uses[device].need + self.reserve_of(device) for device in self.unified if uses[device].peak)
        return not shared or shared + uses[CPU].need <= self.budgets[CPU]


def kind_of(device: str, limits: Limits, loads: Mapping[str, Load]) -> object:
    """Return what sets a device apart from others under these limits; equal for those that are alike."""
    if not is_accelerator(device):
        return device
    working = [load.working.get(device, 0) for load in loads.values()]
    return limits.budgets[device], limits.offer(device), device in limits.unified, *working


def uses_of(choice: Choice, loads: Mapping[str, Load], devices: Iterable[str]) -> Uses:
    """Return what each device holds under a choice; parts of one component that are brought come one at a time."""
    uses: Uses = {device: Use() for device in devices}
    brought: dict[tuple[str, str], int] = {}
    for name, place in choice.items():
        there = name.partition(".")[0], place.device
        uses = with_place(uses, place, loads[name], brought.get(there, 0))
        if place.residency is not Residency.ALWAYS:
            brought[there] = max(brought.get(there, 0), loads[name].peak_bytes(place.residency))
    return uses


def with_place(uses: Uses, place: Place, load: Load, there: int = 0) -> Uses:
    """Return uses after one more component or part; a device's use never shrinks.

    ``there`` is the room that a part which is brought shares with those of its component that are in uses already.
    """
    result = dict(uses)
    use, working = result[place.device], load.working.get(place.device, 0)
    peak = load.peak_bytes(place.residency)
    if place.residency is Residency.ALWAYS:
        result[place.device] = use.with_held(peak, working)
    elif load.stays:
        result[place.device] = use.with_held(max(0, peak - there), working)
    else:
        result[place.device] = use.with_brought(peak, working)
    if place.storage_device != place.device:
        result[place.storage_device] = result[place.storage_device].with_held(load.nbytes)
    return result
