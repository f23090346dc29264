"""What devices a machine has and how much memory each offers, as data: probed here, or stated for another machine."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from dmconfig.devices import CPU
from dmconfig.errors import Code, MachineError, Problem
from dmconfig.units import GIB, parse_size

_GROUP = re.compile(r"(?:(\d{1,9})\s*x\s*)?(.+)")
MAX_ACCELERATORS = 64
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The accelerators of a machine, in their own order, and its host memory."""

    accelerators: tuple[Device, ...]
    host: Device
    name: str

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices that can hold weights: accelerators first, then the cpu."""
        return (*self.accelerators, self.host)


def parse_machine(gpus: str | None, ram: str | None, *, this_machine: Inventory | None = None) -> Inventory:
    """Return a machine one does not have: ``2x24GiB,12GiB`` of accelerators and so much host memory.

    What is not stated is taken from ``this_machine``; without one, no accelerators and 64 GiB of host memory.

    Raises: MachineError: what cannot be read of either flag.
    """
    accelerators = this_machine.accelerators if this_machine else ()
    host = this_machine.host if this_machine else _host(64 * GIB)
    problems: list[Problem] = []
    try:
        accelerators = accelerators if gpus is None else _accelerators(gpus)
    except ValueError as error:
        problems.append(_unreadable("--gpus", error, "write --gpus 2x24GiB,1x12GiB, or --gpus 0 for none"))
    try:
        host = host if ram is None else _host(parse_size(ram))
    except ValueError as error:
        problems.append(_unreadable("--ram", error, "write --ram 64GiB"))
    if problems:
        raise MachineError(problems)
    stated = [f"{flag} {value}" for flag, value in (("--gpus", gpus), ("--ram", ram)) if value is not None]
    return Inventory(accelerators=accelerators, host=host, name=" ".join(stated) or "the machine")


def probe_machine() -> Inventory:
    """Return this machine as it is now. Imports torch only where something hints at an accelerator."""
    accelerators = _probe_accelerators() if "torch" in sys.modules or _may_have_accelerators() else ()
    return Inventory(accelerators=accelerators, host=_probe_host(), name="this machine")


def _accelerators(text: str) -> tuple[Device, ...]:
    if text.strip() in ("0", "none", ""):
        return ()
    sizes = [size for group in text.split(",") for size in _group(group.strip())]
    if len(sizes) > MAX_ACCELERATORS:
        raise ValueError(f"{len(sizes)} accelerators are more than one machine has ({MAX_ACCELERATORS})")
    return tuple(
        Device(id=f"cuda:{index}", description="stated", total_bytes=size, free_bytes=size)
        for index, size in enumerate(sizes)
    )


def _group(text: str) -> list[int]:
    match = _GROUP.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a group of accelerators")
    count, size = match.groups()
    if size.strip().isdigit():
        raise ValueError(f"{text!r} has a count or a size without a unit")
    return [parse_size(size)] * min(int(count or 1), MAX_ACCELERATORS + 1)


def _host(size: int) -> Device:
    return Device(id=CPU, description="stated", total_bytes=size, free_bytes=size)


def _may_have_accelerators() -> bool:
    """Tell whether torch might find one: a device file on Linux, and always on other systems."""
    if not sys.platform.startswith("linux"):
        return True
    return any(any(Path("/dev").glob(pattern)) for pattern in _DEVICE_FILES)


def _probe_accelerators() -> tuple[Device, ...]:
    import torch

    if not torch.accelerator.is_available():
        return ()
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return ()
    backend = getattr(torch, kind.type, None)
    return tuple(_probe_device(backend, kind.type, index) for index in range(torch.accelerator.device_count()))


def _probe_device(backend: object, kind: str, index: int) -> Device:
    """One accelerator. A backend that cannot tell its memory (mps) shares the host's."""
    name = getattr(backend, "get_device_name", lambda _: kind)(index)
    if hasattr(backend, "mem_get_info"):
        free, total = backend.mem_get_info(index)
    else:
        host = _probe_host()
        free, total = host.free_bytes, host.total_bytes
    return Device(id=f"{kind}:{index}", description=str(name), total_bytes=int(total), free_bytes=int(free))


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
