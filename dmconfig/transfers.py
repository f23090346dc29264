"""Whether bytes survive a copy between devices: patterns are sent over every way, brought back and compared.

On some machines a copy from one accelerator to another reports success and delivers something else, most often zeros.
A pipeline that is split over them then draws black or noise, and nothing says why. torch takes the direct way between
two accelerators wherever the driver claims there is one, so asking the driver does not help: one has to try.

Source: pytorch#84803 (zeros with the IOMMU on), NVIDIA/open-gpu-kernel-modules#1257 (also with recent drivers and
workstation cards), pytorch ``aten/src/ATen/native/cuda/Copy.cu`` (which copies go directly). Nothing is imported here
but torch, and that where it is needed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

from dmconfig.devices import CPU, is_accelerator
from dmconfig.errors import Code, DispatchError, Problem
from dmconfig.units import MIB

if TYPE_CHECKING:
    import torch

RTX40_DRIVER = "550.40.07"
"""The first NVIDIA driver trusted with copies between GeForce RTX 40 cards.

Source: accelerate ``utils/environment.py:check_cuda_p2p_ib_support``.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFailure:
    """A way over which bytes did not come through, summed over all that was sent over it.

    The way from ``cpu`` means there and back. ``all_zero``: every wrong byte arrived as zero. ``error`` is what was
    raised when the copy did not even pretend to succeed; nothing more was sent then.
    """

    source: str
    destination: str
    wrong_bytes: int
    total_bytes: int
    all_zero: bool
    error: str = ""

    @property
    def details(self) -> str:
        """What happened, in words."""
        zero = ", all of them zero" if self.all_zero else ""
        return self.error or f"{self.wrong_bytes} of {self.total_bytes} bytes wrong{zero}"


@dataclass(frozen=True, slots=True)
class _Parcel:
    """What is sent: so many elements, of which every ``step``-th goes on to the destination."""

    dtype: str
    elements: int
    step: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What became of a parcel; ``all_zero``: no wrong byte is anything but zero."""

    wrong_bytes: int
    total_bytes: int
    all_zero: bool


_PARCELS = (  # small ones first: they also fit where little is free
    _Parcel("uint8", 3),
    _Parcel("float16", 3),
    _Parcel("uint8", 4099),
    _Parcel("float16", 4099),
    _Parcel("float16", 4099, step=2),  # what has gaps is not copied by the driver but by a kernel that reads the peer
    _Parcel("uint8", 2 * MIB),
    _Parcel("float16", 2 * MIB),
)
_ITEM_BYTES = {"uint8": 1, "float16": 2}
_LARGEST_BYTES = 4 * MIB


def ways(devices: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return what there is to compare: the cpu with each accelerator, then every ordered pair of accelerators."""
    accelerators = _accelerators(devices)
    return (*((CPU, device) for device in accelerators), *permutations(accelerators, 2))


def check_transfers(devices: Sequence[str]) -> tuple[TransferFailure, ...]:
    """Return the ways between devices over which bytes do not come through bit for bit, in the order of ``ways``.

    Pairs are tried only when every accelerator's own way from the cpu and back is sound; a bad one would be blamed on
    each of its pairs. What is sent differs each time, so memory that still holds an earlier parcel does not pass for
    a copy. A parcel for which there is no room is left out when smaller ones came through. Takes a few MiB of each
    device, and gives them back. Where tensors have no values (a rehearsal of shapes) nothing can be wrong.

    Args: devices: full names; the cpu and the disk are passed over.
    """
    found: list[TransferFailure] = []
    numbered = [*enumerate(ways(devices))]
    patterns = _patterns(len(numbered))
    if patterns is None:
        return ()
    try:
        for number, (source, destination) in numbered:
            if source != CPU and any(failure.source == CPU for failure in found):
                break
            failure = _try_way(source, destination, patterns[number * len(_PARCELS) :])
            if failure is not None:
                found.append(failure)
    finally:
        _empty_caches(devices)
    return tuple(found)


def checked_once(devices: Iterable[str]) -> None:
    """Refuse devices between which bytes do not survive. Tried once per process for each set of accelerators.

    Fewer than two accelerators have nothing to send each other, and are not looked at.

    Raises: DispatchError: with the ways, what happened and the remedies.
    """
    accelerators = tuple(sorted(_accelerators(devices)))
    if len(accelerators) < 2:
        return
    problems = transfer_problems(_checked(accelerators))
    if problems:
        raise DispatchError(problems)


def transfer_problems(failures: Sequence[TransferFailure]) -> list[Problem]:
    """Return the problems that failures amount to: one for copies that raise, one for those that come out wrong."""
    raised = [failure for failure in failures if failure.error]
    wrong = [failure for failure in failures if not failure.error]
    return [*_problem_of_raised(raised), *_problem_of_wrong(wrong)]


@functools.cache
def _checked(accelerators: tuple[str, ...]) -> tuple[TransferFailure, ...]:
    return check_transfers(accelerators)


def _accelerators(devices: Iterable[str]) -> list[str]:
    return [*dict.fromkeys(device for device in devices if is_accelerator(device))]


def _patterns(number_of_ways: int) -> torch.Tensor | None:
    """Return bytes without a zero among them, long enough that every parcel starts somewhere else; None: no values."""
    import torch

    length = _LARGEST_BYTES + number_of_ways * len(_PARCELS)
    generator = torch.Generator("cpu").manual_seed(0)
    patterns = torch.randint(1, 256, (length,), dtype=torch.uint8, device=CPU, generator=generator)
    # tensors that have only a shape are of a class of their own
    return patterns if type(patterns) is torch.Tensor else None


def _try_way(source: str, destination: str, patterns: torch.Tensor) -> TransferFailure | None:
    """Send every parcel from source to destination, each with the pattern that starts at its number."""
    import torch

    outcomes: list[_Outcome] = []
    error = ""
    for number, parcel in enumerate(_PARCELS):
        try:
            outcomes.append(_send(parcel, patterns[number:], source, destination))
        except RuntimeError as raised:  # torch's own, of which running out of memory is one
            if not (isinstance(raised, torch.OutOfMemoryError) and outcomes):
                error = f"{type(raised).__name__}: {str(raised).splitlines()[0] if str(raised) else ''}"
            break
    wrong_bytes = sum(outcome.wrong_bytes for outcome in outcomes)
    if not wrong_bytes and not error:
        return None
    return TransferFailure(
        source=source,
        destination=destination,
        wrong_bytes=wrong_bytes,
        total_bytes=sum(outcome.total_bytes for outcome in outcomes),
        all_zero=wrong_bytes > 0 and all(outcome.all_zero for outcome in outcomes),
        error=error,
    )


def _send(parcel: _Parcel, patterns: torch.Tensor, source: str, destination: str) -> _Outcome:
    """Send one parcel from the cpu over source and destination back to the cpu."""
    import torch

    size = parcel.elements * _ITEM_BYTES[parcel.dtype]
    pattern = patterns[:size].clone().view(getattr(torch, parcel.dtype))
    sent = _as_bytes(pattern[:: parcel.step])
    arrived = _as_bytes(pattern.to(source)[:: parcel.step].to(destination).to(CPU))
    differs = arrived != sent
    return _Outcome(
        wrong_bytes=int(differs.count_nonzero()), total_bytes=sent.numel(), all_zero=not bool(arrived[differs].any())
    )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of tensor: as numbers, a NaN would differ from itself."""
    import torch

    return tensor.contiguous().view(torch.uint8)


def _empty_caches(devices: Iterable[str]) -> None:
    """Give what the allocators keep for later back to the devices; the pipeline's weights want it."""
    import torch

    for kind in {device.split(":")[0] for device in _accelerators(devices)}:
        empty = getattr(getattr(torch, kind, None), "empty_cache", None)
        if empty is not None:
            empty()


def _problem_of_raised(failures: Sequence[TransferFailure]) -> Iterable[Problem]:
    if failures:
        what = f"copies between devices fail: {_listed(failures)}"
        fix = "see that the devices have free memory and are healthy, or leave them out of the device_map"
        yield Problem(code=Code.TRANSFER_FAILED, what=what, fix=fix)


def _problem_of_wrong(failures: Sequence[TransferFailure]) -> Iterable[Problem]:
    if not failures:
        return
    what = f"bytes do not survive copies between devices: {_listed(failures)}"
    if failures[0].source == CPU:
        why = "what a device is given is not what it gives back, so nothing computed there can be trusted"
        fix = f"{_newer_driver(failures)}; if that does not help, the device is faulty: leave it out of the device_map"
    else:
        why = "the driver reports these copies as done; a pipeline split over the devices would compute with the "
        why += "wrong values, draw black or noise, and say nothing"
        fix = "; ".join(_remedies(failures))
    yield Problem(code=Code.TRANSFER_FAILED, what=what, why=why, fix=fix)


def _remedies(failures: Sequence[TransferFailure]) -> Iterable[str]:
    """Yield what mends copies between accelerators, the likeliest first.

    Source: accelerate's driver check (drivers); pytorch#84803, CUDA programming guide "IOMMU on Linux", NCCL user
    guide "PCI Access Control Services", intel/compute-runtime#942 (passthrough also for other makes).
    """
    yield _newer_driver(failures)
    if sys.platform.startswith("linux"):
        yield "set the IOMMU to passthrough (kernel parameter iommu=pt) or turn it off in the BIOS, and PCI ACS with it"
    yield f"until then place everything on one accelerator (device_map: {failures[0].source})"
    if _is_nvidia(failures):
        yield "NCCL_P2P_DISABLE does not help, plain copies do not go through NCCL"


def _newer_driver(failures: Sequence[TransferFailure]) -> str:
    if _is_nvidia(failures):
        return f"upgrade the NVIDIA driver (GeForce RTX 40 cards need {RTX40_DRIVER} or later)"
    return "upgrade the driver of the accelerators"


def _is_nvidia(failures: Sequence[TransferFailure]) -> bool:
    import torch

    return failures[0].destination.startswith("cuda:") and getattr(torch.version, "hip", None) is None


def _listed(failures: Sequence[TransferFailure]) -> str:
    return "; ".join(f"{failure.source} to {failure.destination}: {failure.details}" for failure in failures)
