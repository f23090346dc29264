"""What devices a machine has, how much memory each offers and how fast it is, as data: probed here, or stated.

A machine file (``machine``) and the flags of the command line make the same value as the probe. What nobody stated or
knows of a machine's speeds has a default per kind of device, below; the memory of a device never has one.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from dmconfig.cards import Card, card_reported_as, find_card, unknown_card
from dmconfig.devices import CPU, DISK
from dmconfig.errors import Code, MachineError, Problem
from dmconfig.units import GIB, parse_size

HOST_BYTES_PER_S = 25 * 10**9
"""From page-locked host memory to an accelerator and back: what arrives of PCIe 4.0 x16, 31.5 GB/s on the wire."""
PAGEABLE_BYTES_PER_S = 12 * 10**9
"""The same from ordinary host memory, at most: it is copied to page-locked memory first, by one core."""
UNIFIED_BYTES_PER_S = 30 * 10**9
"""A copy within one memory that both share: half of the 68 GB/s of an M1, which reads and writes it."""
PEER_BYTES_PER_S = 20 * 10**9
"""From one accelerator to another over PCIe."""
DISK_BYTES_PER_S = 3 * 10**9
"""From disk to host memory: an NVMe drive of PCIe 3.0."""
ACCELERATOR_FLOPS_PER_S = 25 * 10**12
"""16-bit operations of an accelerator nothing is known of: an RTX 3060; most do more."""
MPS_FLOPS_PER_S = 26 * 10**11
"""16-bit operations of the least of the M-series, an M1."""
CPU_FLOPS_PER_S = 5 * 10**11
"""Operations of the cpu, float32 or bfloat16: 8 cores with AVX2, of which matrix products get about half."""

DEFAULT_HOST_BYTES = 64 * GIB
"""Host memory of a machine of which only the accelerators are stated."""
MAX_ACCELERATORS = 64
ONE_KIND = "a build of torch drives accelerators of one kind"

_GROUP = re.compile(r"(?:(\d{1,9})\s*x\s*)?(.+)")
_CARD_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_CGROUP_STAT = ("/sys/fs/cgroup/memory.stat", "/sys/fs/cgroup/memory/memory.stat")
_CACHED_FILES = ("inactive_file", "total_inactive_file")
_CGROUP_USE = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
_DEVICE_FILES = (
    "nvidia[0-9]*", "dxg", "kfd", "dri/renderD*", "accel/accel*", "accel[0-9]*", "davinci[0-9]*", "cambricon*",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device: its full name, what it is, and its memory in bytes; ``free_bytes`` is what may be used now."""

    id: str
    description: str
    total_bytes: int
    free_bytes: int


class Link(NamedTuple):
    """How fast bytes travel between two devices, either way; ``devices`` is in the order of ``pair``."""

    devices: tuple[str, str]
    bytes_per_s: int


class Speed(NamedTuple):
    """How fast a device computes: floating-point operations a second, of an accelerator in 16 bits."""

    device: str
    flops_per_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The accelerators of a machine, in their own order, its host memory and its disk; and how fast it all is.

    ``disk`` is None when nothing is known of it, which limits nothing. ``unified`` names the accelerators whose memory
    is the host's own. ``links`` and ``speeds`` are the ones that are known, in order; ``bandwidth`` and
    ``flops_per_s`` answer for all. ``pageable_bytes_per_s`` is the most that leaves ordinary host memory. ``remark``
    may say why it has no accelerators.
    """

    accelerators: tuple[Device, ...]
    host: Device
    name: str
    disk: Device | None = None
    unified: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    speeds: tuple[Speed, ...] = ()
    pageable_bytes_per_s: int | None = None
    remark: str = ""

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices that compute: accelerators first, then the cpu."""
        return (*self.accelerators, self.host)

    def flops_per_s(self, device: str) -> int:
        """Return the speed of a device in 16-bit operations a second, known or by default.

        Raises: KeyError: the machine has no such device.
        """
        self._check(device)
        known = next((speed.flops_per_s for speed in self.speeds if speed.device == device), None)
        defaults = {CPU: CPU_FLOPS_PER_S, "mps": MPS_FLOPS_PER_S}
        return known or defaults.get(device.partition(":")[0], ACCELERATOR_FLOPS_PER_S)

    def bandwidth(self, source: str, destination: str, *, pinned: bool = False) -> int:
        """Return how many bytes a second travel between two different devices, known or by default.

        Between the cpu and an accelerator it is what leaves ordinary host memory, unless it is ``pinned``
        (page-locked). Between disk and an accelerator bytes go through the host, one way after the other.

        Raises: KeyError: the machine has no such device.
        """
        ends = pair(source, destination)
        if DISK in ends and CPU not in ends:
            (accelerator,) = set(ends) - {DISK}
            return _in_turn(self.bandwidth(CPU, DISK), self.bandwidth(CPU, accelerator, pinned=pinned))
        known = next((link.bytes_per_s for link in self.links if link.devices == ends), None)
        if DISK in ends:
            return known or DISK_BYTES_PER_S
        self._check(*ends)
        if CPU not in ends:
            return known or PEER_BYTES_PER_S
        if not {*ends}.isdisjoint(self.unified):
            return known or UNIFIED_BYTES_PER_S
        locked = known or HOST_BYTES_PER_S
        if pinned:
            return locked
        return min(locked, self.pageable_bytes_per_s or min(locked // 2, PAGEABLE_BYTES_PER_S))

    def _check(self, *names: str) -> None:
        for name in names:
            if all(device.id != name for device in self.devices):
                raise KeyError(name)


def pair(one: str, other: str) -> tuple[str, str]:
    """Return two devices in the order in which a link names them.

    Raises: ValueError: they are the same; nothing travels.
    """
    if one == other:
        raise ValueError(f"{one} has no link to itself")
    first, second = sorted((one, other))
    return first, second


def links_of(rates: Mapping[tuple[str, str], int]) -> tuple[Link, ...]:
    """Return the links that have these bandwidths, in order."""
    return tuple(Link(devices=ends, bytes_per_s=rates[ends]) for ends in sorted(rates))


def speeds_of(flops: Mapping[str, int]) -> tuple[Speed, ...]:
    """Return the speeds of these devices, in order."""
    return tuple(Speed(device=name, flops_per_s=flops[name]) for name in sorted(flops))


def card_rates(cards: Mapping[str, Card | None]) -> dict[tuple[str, str], int]:
    """Return the bandwidths that are known of a machine with these cards, by the device each one is."""
    rates = {pair(CPU, name): card.host_bytes_per_s for name, card in cards.items() if card and card.host_bytes_per_s}
    for (one, card), (other, same) in combinations(cards.items(), 2):
        if card is not None and card is same and card.peer_bytes_per_s:
            rates[pair(one, other)] = card.peer_bytes_per_s
    return rates


def card_flops(cards: Mapping[str, Card | None]) -> dict[str, int]:
    """Return the speeds that are known of these cards, by the device each one is."""
    return {name: card.flops_per_s for name, card in cards.items() if card and card.flops_per_s}


def device_of(card: Card, name: str, host: Device) -> Device:
    """Return a card as the device of this name; all its memory is free, and a shared one is the host's."""
    total, free = (card.memory_bytes, card.memory_bytes) if card.memory_bytes else (host.total_bytes, host.free_bytes)
    return Device(id=name, description=card.reported[0], total_bytes=total, free_bytes=free)


def parse_machine(
    gpus: str | None, ram: str | None, *, disk: str | None = None, this_machine: Inventory | None = None
) -> Inventory:
    """Return a machine one does not have: ``2x24GiB,rtx-4090`` of accelerators, so much host memory and free disk.

    What is not stated is taken from ``this_machine``; without one, no accelerators, 64 GiB of host memory, and a disk
    of which nothing is known.

    Raises: MachineError: what cannot be read of any flag.
    """
    here = this_machine or Inventory(accelerators=(), host=stated(CPU, DEFAULT_HOST_BYTES), name="the machine")
    problems: list[Problem] = []
    members: list[int | Card] | None = None
    host, free_disk = here.host, here.disk
    try:
        members = None if gpus is None else _members(gpus)
    except ValueError as error:
        problems.append(_unreadable("--gpus", error, "write --gpus 2x24GiB,1xrtx-4090, or --gpus 0 for none"))
    try:
        host = host if ram is None else stated(CPU, parse_size(ram))
    except ValueError as error:
        problems.append(_unreadable("--ram", error, "write --ram 64GiB"))
    try:
        free_disk = free_disk if disk is None else stated(DISK, parse_size(disk))
    except ValueError as error:
        problems.append(_unreadable("--disk", error, "write --disk 200GiB"))
    if problems:
        raise MachineError(problems)
    flags = (("--gpus", gpus), ("--ram", ram), ("--disk", disk))
    name = " ".join(f"{flag} {value}" for flag, value in flags if value is not None) or "the machine"
    machine = replace(_with_host(here, host), disk=free_disk, name=name)
    return machine if members is None else _with_accelerators(machine, members)


def probe_machine(folder: Path | None = None) -> Inventory:
    """Return this machine as it is now. Imports torch only where something hints at an accelerator.

    Args:
        folder: whose disk is meant; it need not exist yet. Default: the current folder.
    """
    host = _probe_host()
    found = _probe_accelerators(host) if "torch" in sys.modules or _may_have_accelerators() else {}
    # what a device is called is worth a look at the cards; without devices their file is not read
    cards = {device.id: card_reported_as(device.description) for device in found}
    return Inventory(
        accelerators=tuple(found),
        host=host,
        name="this machine",
        disk=_probe_disk(folder),
        unified=tuple(device.id for device, shares_host in found.items() if shares_host),
        links=links_of(card_rates(cards)),
        speeds=speeds_of(card_flops(cards)),
        remark="" if found else _cpu_build(),
    )


def _cpu_build() -> str:
    """Why torch may see no accelerator that is there: the wheels for the cpu say so in their version."""
    from importlib.metadata import PackageNotFoundError, version  # takes longer than all else here

    try:
        installed = version("torch")
    except PackageNotFoundError:
        return ""
    return f"the installed torch {installed} is a build for the cpu alone" if installed.endswith("+cpu") else ""


def stated(name: str, size: int) -> Device:
    """Return a device of which only the size is known; all of it is free."""
    return Device(id=name, description="stated", total_bytes=size, free_bytes=size)


def _in_turn(first: int, second: int) -> int:
    """The bandwidth of two ways, one after the other."""
    return first * second // (first + second)


def _with_host(machine: Inventory, host: Device) -> Inventory:
    """The machine with this host, also under the accelerators that use its memory."""
    accelerators = (
        replace(each, total_bytes=host.total_bytes, free_bytes=host.free_bytes) if each.id in machine.unified else each
        for each in machine.accelerators
    )
    return replace(machine, host=host, accelerators=tuple(accelerators))


def _with_accelerators(machine: Inventory, members: Sequence[int | Card]) -> Inventory:
    """The machine with these accelerators in place of its own, and nothing left that was said of those."""
    kinds = [member.kind if isinstance(member, Card) else "cuda" for member in members]
    named = {f"{kind}:{index}": member for index, (kind, member) in enumerate(zip(kinds, members, strict=True))}
    cards = {name: member for name, member in named.items() if isinstance(member, Card)}
    rates = {link.devices: link.bytes_per_s for link in machine.links if DISK in link.devices}
    flops = {speed.device: speed.flops_per_s for speed in machine.speeds if speed.device == CPU}
    return replace(
        machine,
        accelerators=tuple(
            device_of(member, name, machine.host) if isinstance(member, Card) else stated(name, member)
            for name, member in named.items()
        ),
        unified=tuple(name for name, card in cards.items() if card.shares_host),
        links=links_of(rates | card_rates(cards)),
        speeds=speeds_of(flops | card_flops(cards)),
    )


def _members(text: str) -> list[int | Card]:
    """What ``--gpus`` names, one by one."""
    groups = [] if text.strip() in ("0", "none", "") else text.split(",")
    members = [member for group in groups for member in _group(group.strip())]
    if len(members) > MAX_ACCELERATORS:
        raise ValueError(f"{len(members)} accelerators are more than one machine has ({MAX_ACCELERATORS})")
    kinds = {member.kind if isinstance(member, Card) else "cuda" for member in members}
    if len(kinds) > 1:
        raise ValueError(f"{text!r} has devices of kind {' and '.join(sorted(kinds))}; {ONE_KIND}")
    return members


def _group(text: str) -> list[int | Card]:
    """The members of one group: so many sizes, or so many cards."""
    match = _GROUP.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a group of accelerators")
    count, what = match.groups()
    if what.strip().isdigit():
        raise ValueError(f"{text!r} has a count or a size without a unit")
    return [_size_or_card(what.strip())] * min(int(count or 1), MAX_ACCELERATORS + 1)


def _size_or_card(text: str) -> int | Card:
    if _CARD_NAME.fullmatch(text) is None:
        return parse_size(text)
    card = find_card(text)
    if card is None:
        known, meant = unknown_card(text)
        raise ValueError(f"{text!r} is not a size such as 24GiB, and no card; {meant or known}")
    return card


def _may_have_accelerators() -> bool:
    """Tell whether torch might find one: a device file on Linux, and always on other systems."""
    if not sys.platform.startswith("linux"):
        return True
    return any(any(Path("/dev").glob(pattern)) for pattern in _DEVICE_FILES)


def _probe_accelerators(host: Device) -> dict[Device, bool]:
    """The accelerators that torch has, in its order, and whether each shares the host's memory."""
    import torch

    if not torch.accelerator.is_available():
        return {}
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return {}
    backend = getattr(torch, kind.type, None)
    return dict(_probe_device(backend, kind.type, index, host) for index in range(torch.accelerator.device_count()))


def _probe_device(backend: Any, kind: str, index: int, host: Device) -> tuple[Device, bool]:
    """One accelerator, and whether it shares the host's memory: one that cannot tell its own (mps) does."""
    memory = _device_memory(backend, kind, index)
    free, total = memory or (host.free_bytes, host.total_bytes)
    device = Device(
        id=f"{kind}:{index}",
        description=_device_name(backend, kind, index),
        total_bytes=total,
        free_bytes=min(free, total),  # integrated GPUs of AMD may call more free than they say there is
    )
    return device, memory is None


def _device_name(backend: Any, kind: str, index: int) -> str:
    if hasattr(backend, "get_device_name"):
        return str(backend.get_device_name(index))
    # mps has its name elsewhere, and since torch 2.9 only
    named = getattr(getattr(getattr(sys.modules["torch"], "backends", None), kind, None), "get_name", None)
    return str(named()) if named else kind


def _device_memory(backend: Any, kind: str, index: int) -> tuple[int, int] | None:
    """What is free and the total of a device with memory of its own, or None."""
    if not hasattr(backend, "mem_get_info"):
        return None
    try:
        free, total = backend.mem_get_info(index)
    except RuntimeError:
        if kind != "xpu":
            raise
        # some drivers of Intel's cards do not tell what is free
        total = free = backend.get_device_properties(index).total_memory
    return int(free), int(total)


def _probe_disk(folder: Path | None) -> Device | None:
    """The disk that holds a folder, or would hold it; None where the system does not say."""
    try:
        place = Path.cwd() if folder is None else folder.absolute()
        usage = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists()))
    except (OSError, StopIteration):
        return None
    return Device(id=DISK, description="disk", total_bytes=usage.total, free_bytes=usage.free)


def _probe_host() -> Device:
    """Host memory, or the container's share of it where that is smaller."""
    import psutil

    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    limit = _first_number(_CGROUP_LIMITS)
    if limit is not None and limit < total:
        total, free = limit, min(free, max(0, limit - _container_use()))
    return Device(id=CPU, description="host memory", total_bytes=total, free_bytes=free)


def _container_use() -> int:
    """What a container uses and cannot give back: cached files, such as weights read before, do not count."""
    used = _first_number(_CGROUP_USE) or 0
    for file in _CGROUP_STAT:
        try:
            lines = Path(file).read_text().splitlines()
        except OSError:
            continue
        cached = next((int(line.split()[1]) for line in lines if line.split()[0] in _CACHED_FILES), 0)
        return max(0, used - cached)
    return used


def _first_number(files: tuple[str, ...]) -> int | None:
    for file in files:
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def _unreadable(flag: str, error: ValueError, fix: str) -> Problem:
    return Problem(code=Code.BAD_MACHINE, what=str(error), fix=fix, origin=flag)
