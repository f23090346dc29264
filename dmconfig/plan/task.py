"""What a plan is made from, as one value: a variation of it answers "what if"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dmconfig.assembly import Assembly
from dmconfig.devices import DISK, is_accelerator
from dmconfig.footprint import Footprint
from dmconfig.inventory import Device, Inventory
from dmconfig.plan.placement import Found, Limits, Load, best_choice
from dmconfig.plan.requests import Request, requests_of
from dmconfig.spec import GroupOffloadSpec, Spec

UNLIMITED = 1 << 60
"""Bytes of disk when the file sets no limit: weights rest in the files they came in, so nothing is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Spec, assembly, footprints and machine, and what follows from them."""

    spec: Spec
    assembly: Assembly
    footprints: Mapping[str, Footprint]
    inventory: Inventory

    @property
    def limits(self) -> Limits:
        """The budget of every device, and the reserve."""
        budgets = {device.id: _budget(device, self.spec) for device in self.inventory.devices}
        disk = self.spec.max_memory.get(DISK)
        budgets[DISK] = UNLIMITED if disk is None else disk.bytes_of(total_bytes=UNLIMITED, free_bytes=UNLIMITED)
        return Limits(budgets=budgets, reserve=self.spec.reserve)

    @property
    def usable(self) -> tuple[str, ...]:
        """The accelerators with any budget, in the machine's order."""
        budgets = self.limits.budgets
        return tuple(device.id for device in self.inventory.accelerators if budgets[device.id] > 0)

    @property
    def requests(self) -> Mapping[str, Request]:
        """What the file asks for each component."""
        requests = requests_of(self.spec, tuple(part.name for part in self.assembly.modules), self.usable)
        return {name: _in_files(request, self.footprints.get(name)) for name, request in requests.items()}

    @property
    def loads(self) -> Mapping[str, Load]:
        """What each component weighs, and whether it gives way to others."""
        in_turn = self.assembly.in_turn
        return {
            name: Load(
                nbytes=size.nbytes,
                largest_leaf_bytes=size.largest_leaf_bytes,
                group_bytes=_group_bytes(size, self.spec.group_offload),
                stays=name not in in_turn,
            )
            for name, size in self.footprints.items()
        }

    def found(self) -> Found | None:
        """Return the best place for each component, or None when nothing fits."""
        return best_choice(self.requests, self.loads, self.limits)

    def variation(self, **changes: object) -> Task:
        """Return the same task with other values of the spec."""
        return replace(self, spec=self.spec.model_copy(update=changes))


def _in_files(request: Request, size: Footprint | None) -> Request:
    """The request without a choice of disk for weights that are cast when they are loaded: no file holds them."""
    if size is None or not size.needs_cast or request.pinned:
        return request
    return Request(tuple(place for place in request.places if place.storage != DISK), request.origin)


def _group_bytes(size: Footprint, options: GroupOffloadSpec) -> int:
    """The most of a component that group offload has on the device: a stream holds the next group beside this one."""
    groups = 2 if options.use_stream else 1
    if options.offload_type == "leaf_level":
        return min(size.nbytes, groups * size.largest_leaf_bytes)
    blocks = groups * options.num_blocks_per_group * size.largest_block_bytes
    return min(size.nbytes, size.outside_blocks_bytes + blocks)


def _budget(device: Device, spec: Spec) -> int:
    """A device's limit: what is free, or less where the file says so. Naming one accelerator excludes the others."""
    limit = spec.max_memory.get(device.id)
    if limit is not None:
        wanted = limit.bytes_of(total_bytes=device.total_bytes, free_bytes=device.free_bytes)
        return min(wanted, device.free_bytes)
    names_accelerators = any(is_accelerator(name) for name in spec.max_memory)
    return 0 if is_accelerator(device.id) and names_accelerators else device.free_bytes
