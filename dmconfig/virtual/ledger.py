"""The books of a virtual machine: bytes that live on each device, their peaks, and what was moved between devices."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any, Literal

import torch

from dmconfig.virtual import allocator
from dmconfig.virtual.allocator import CachingAllocator
from dmconfig.virtual.errors import VirtualOutOfMemoryError

Kind = Literal["weights", "activations"]

OUTSIDE = "outside"  # the phase of everything that happens in no phase
HOST_DEVICES = ("cpu", "disk")


@dataclass(frozen=True, slots=True)
class Move:
    """A route: which kind of tensors went from where to where, in which phase."""

    phase: str
    source: str
    destination: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class MoveCount:
    """What went over a route: bytes in all, and in how many copies."""

    bytes: int
    count: int


@dataclass(slots=True)
class _Block:
    """One storage on the books. The reference must be kept: its callback is how we learn that the storage died."""

    reference: weakref.ref[torch.UntypedStorage]
    device: str
    size_bytes: int
    kind: Kind
    allocation: allocator.Block | None  # on accelerators


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that was on a device, and how much of it was weights at that moment."""

    total_bytes: int = 0
    weights_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time in which one phase ran: from where it was entered, or gone back to, to the next change.

    A device that nothing was on has no peak.
    """

    phase: str
    peaks: dict[str, Peak]


class Ledger:
    """Counts storages, so views and aliases cost nothing, as on a real device.

    Sizes on accelerators are rounded up to 512 bytes, as CUDA's allocator does. What its cache holds beyond them is
    told as reserved bytes, which come of a model (see ``allocator``) and limit nothing: the capacity is what live
    bytes may fill. What is counted for ``cpu`` is what torch was seen to allocate while the machine was active, not
    everything that the process holds.
    """

    def __init__(self, capacities_bytes: Mapping[str, int], *, enforce_capacity: bool = True) -> None:
        self._capacities = dict(capacities_bytes)
        self._enforce_capacity = enforce_capacity
        self._allocators = {
            device: CachingAllocator(capacity if enforce_capacity else None)
            for device, capacity in capacities_bytes.items()
        }
        self._blocks: dict[int, _Block] = {}
        self._live: Counter[tuple[str, Kind]] = Counter()
        self._peaks: dict[tuple[str | None, str], Peak] = {}
        self._moved_bytes: Counter[Move] = Counter()
        self._moved_count: Counter[Move] = Counter()
        self._phases = [OUTSIDE]
        self._timeline = [Stretch(OUTSIDE, {})]
        self._died: deque[int] = deque()
        self._lock = threading.RLock()

    def live_bytes(self, device: str, *, kind: Kind | None = None) -> int:
        """Return the bytes now on a device, of one kind or in all. Raises: ValueError: for an unknown device."""
        self._check_device(device)
        with self._lock:
            self._settle()
            if kind is not None:
                return self._live[device, kind]
            return self._live[device, "weights"] + self._live[device, "activations"]

    def peak_bytes(self, device: str, *, phase: str | None = None, kind: Kind | None = None) -> int:
        """Return the most bytes ever live on a device, since the last reset, in one phase or at all.

        With a kind: how many of those bytes were of that kind at that moment (not the kind's own peak). A phase that
        never ran has a peak of 0. Raises: ValueError: for an unknown device.
        """
        self._check_device(device)
        peak = self._peaks.get((phase, device), Peak())
        match kind:
            case None:
                return peak.total_bytes
            case "weights":
                return peak.weights_bytes
            case "activations":
                return peak.total_bytes - peak.weights_bytes

    def free_bytes(self, device: str) -> int:
        """Return what an accelerator has left of its capacity; never negative."""
        return max(0, self._capacities[device] - self.live_bytes(device))

    def reserved_bytes(self, device: str) -> int:
        """Return what PyTorch's allocator would now hold of an accelerator, its cache included: a modelled figure.

        Raises: ValueError: for a device that has no such allocator.
        """
        with self._lock:
            self._settle()
            return self._allocator(device).reserved_bytes

    def peak_reserved_bytes(self, device: str) -> int:
        """Return the most that was reserved since the last reset. Raises: ValueError: see ``reserved_bytes``."""
        return self._allocator(device).peak_reserved_bytes

    def peak_allocated_bytes(self, device: str) -> int:
        """Return the most that was in blocks in use since the last reset: what ``torch.cuda`` calls allocated.

        Beyond the peak of live bytes it has the rests of blocks that were not worth splitting off. A modelled figure,
        as ``reserved_bytes``. Raises: ValueError: see there.
        """
        return self._allocator(device).peak_allocated_bytes

    def allocation_retries(self, device: str) -> int:
        """Return how often the cache had to be given back because a new segment would not have fitted beside it.

        Raises: ValueError: see ``reserved_bytes``.
        """
        return self._allocator(device).retries

    def release_cached(self) -> None:
        """Give back what is reserved and unused, on every device."""
        with self._lock:
            self._settle()
            for each in self._allocators.values():
                each.release_cached()

    @property
    def moves(self) -> Mapping[Move, MoveCount]:
        """Everything moved since the last reset, route by route, as a snapshot."""
        with self._lock:
            return {route: MoveCount(self._moved_bytes[route], count) for route, count in self._moved_count.items()}

    def moved(
        self,
        *,
        phase: str | None = None,
        source: str | None = None,
        destination: str | None = None,
        kind: Kind | None = None,
    ) -> MoveCount:
        """Return the sum of all moves since the last reset that are of this phase, link and kind; None is any."""
        wanted = (phase, source, destination, kind)
        counts = [
            count
            for move, count in self.moves.items()
            if all(asked in (None, given) for asked, given in zip(wanted, astuple(move), strict=True))
        ]
        return MoveCount(sum(count.bytes for count in counts), sum(count.count for count in counts))

    @property
    def phases(self) -> Sequence[str]:
        """Every phase in which something lived on a device or moved since the last reset, in order of appearance."""
        with self._lock:
            peaks = [phase for phase, _device in self._peaks if phase is not None]
            return tuple(dict.fromkeys((*peaks, *(move.phase for move in self._moved_count))))

    @property
    def timeline(self) -> Sequence[Stretch]:
        """Every run of a phase since the last reset, in order, with what lies between them as ``OUTSIDE``; a snapshot.

        Those in which nothing is on any device are there too.
        """
        with self._lock:
            return tuple(Stretch(stretch.phase, dict(stretch.peaks)) for stretch in self._timeline)

    @property
    def current_phase(self) -> str:
        """The innermost phase that is running."""
        return self._phases[-1]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute peaks and moves to name. Phases nest; the innermost one counts."""
        with self._lock:
            depth = len(self._phases)
            self.enter_phase(name)
        try:
            yield
        finally:
            with self._lock:
                del self._phases[depth:]  # also those that an exception left open inside
                self._start_stretch()

    def enter_phase(self, name: str) -> None:
        """Start a phase, for callers that cannot use ``phase`` (hooks). What is live already counts for its peak."""
        with self._lock:
            self._settle()
            self._phases.append(name)
            self._start_stretch()
            for device in {device for device, _kind in self._live}:
                self._raise_peaks(device, name)

    def exit_phase(self) -> None:
        """End the phase started last."""
        with self._lock:
            if len(self._phases) > 1:
                self._phases.pop()
                self._start_stretch()

    def reset(self) -> None:
        """Forget moves, peaks and the timeline. What is live stays on the books; peaks start from it again."""
        with self._lock:
            self._moved_bytes.clear()
            self._moved_count.clear()
            self._timeline.clear()
            self._start_stretch()
            self.reset_peaks()

    def reset_peaks(self, device: str | None = None) -> None:
        """Lower the peaks (of one device, or all) to what is live; the moves stay."""
        with self._lock:
            self._settle()
            self._peaks = {key: peak for key, peak in self._peaks.items() if device not in (None, key[1])}
            for each in self._allocators.values() if device is None else [self._allocator(device)]:
                each.reset_peak()
            for name in {name for name, _kind in self._live} if device is None else {device}:
                self._raise_peaks(name, None, self.current_phase)

    def record(self, storage: torch.UntypedStorage, device: str, kind: Kind = "activations") -> None:
        """Put a storage on the books until it dies. One that is there already only has its kind raised to weights.

        Raises: VirtualOutOfMemoryError: when the device has not that much left.
        """
        key = _key(storage)
        with self._lock:
            self._settle()
            if key in self._blocks:
                self._promote(self._blocks[key], kind)
                return
            if storage.nbytes() == 0:
                return
            size_bytes, allocation = self._allocate(storage.nbytes(), device)
            reference = weakref.ref(storage, functools.partial(self._note_death, key))
            self._blocks[key] = _Block(reference, device, size_bytes, kind, allocation)
            self._live[device, kind] += size_bytes
            self._raise_peaks(device, None, self.current_phase)

    def kind_of(self, storage: torch.UntypedStorage) -> Kind:
        """Return what a storage was recorded as; activations when it is not on the books."""
        with self._lock:
            self._settle()
            block = self._blocks.get(_key(storage))
            return block.kind if block else "activations"

    def device_of(self, storage: torch.UntypedStorage) -> str | None:
        """Return where a storage was recorded to be; None when it is not on the books."""
        with self._lock:
            self._settle()
            block = self._blocks.get(_key(storage))
            return block.device if block else None

    def count_move(self, source: str, destination: str, size_bytes: int, kind: Kind) -> None:
        """Count one copy from device to device."""
        with self._lock:
            route = Move(self.current_phase, source, destination, kind)
            self._moved_bytes[route] += size_bytes
            self._moved_count[route] += 1

    def _note_death(self, key: int, _reference: object) -> None:
        # Runs whenever the collector likes, also between the read and the write of a += above, in this very thread:
        # so it changes no figures, it only leaves a note (appending to a deque is atomic) for the next _settle.
        self._died.append(key)

    def _settle(self) -> None:
        while self._died:
            block = self._blocks.pop(self._died.popleft())
            self._live[block.device, block.kind] -= block.size_bytes
            if block.allocation is not None:
                self._allocators[block.device].free(block.allocation)

    def _promote(self, block: _Block, kind: Kind) -> None:
        if kind == "weights" and block.kind != "weights":
            self._live[block.device, block.kind] -= block.size_bytes
            self._live[block.device, "weights"] += block.size_bytes
            block.kind = "weights"

    def _allocate(self, size_bytes: int, device: str) -> tuple[int, allocator.Block | None]:
        if device in HOST_DEVICES:
            return size_bytes, None
        size_bytes = allocator.rounded(size_bytes)
        self._check_capacity(device, size_bytes)
        return size_bytes, self._allocators[device].allocate(size_bytes)

    def _allocator(self, device: str) -> CachingAllocator:
        if device not in self._allocators:
            raise ValueError(f"{device!r} is not an accelerator of this machine; it has {', '.join(self._allocators)}")
        return self._allocators[device]

    def _check_capacity(self, device: str, size_bytes: int) -> None:
        if not self._enforce_capacity:
            return
        free_bytes = self.free_bytes(device)
        if size_bytes > free_bytes:
            raise VirtualOutOfMemoryError(
                device_index=int(device.partition(":")[2]),
                wanted_bytes=size_bytes,
                capacity_bytes=self._capacities[device],
                free_bytes=free_bytes,
            )

    def _raise_peaks(self, device: str, *phases: str | None) -> None:
        """Raise the peaks of phases (None: of all time), and of the stretch that runs, to what is live on a device."""
        weights_bytes = self._live[device, "weights"]
        live = Peak(weights_bytes + self._live[device, "activations"], weights_bytes)
        for phase in phases:
            if live.total_bytes > self._peaks.get((phase, device), Peak()).total_bytes:
                self._peaks[phase, device] = live
        peaks = self._timeline[-1].peaks
        if live.total_bytes > peaks.get(device, Peak()).total_bytes:
            peaks[device] = live

    def _start_stretch(self) -> None:
        """Begin the next part of the timeline, from what is live."""
        self._settle()
        self._timeline.append(Stretch(self.current_phase, {}))
        for device in {device for device, _kind in self._live}:
            self._raise_peaks(device)

    def _check_device(self, device: str) -> None:
        if device not in self._capacities and device not in HOST_DEVICES:
            known = ", ".join((*self._capacities, *HOST_DEVICES))
            raise ValueError(f"{device!r} is not a device of this machine; it has {known}")


def _key(storage: Any) -> int:
    # The address of the C++ storage. Python's object for it lives exactly as long (torch keeps it alive and hands the
    # same one out again), which is why a weak reference to it tells when the memory is freed.
    return int(storage._cdata)
