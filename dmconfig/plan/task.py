"""What a plan is made from, as one value: a variation of it answers "what if"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from dmconfig.assembly import Assembly
from dmconfig.compatibility import casting_inputs
from dmconfig.devices import DISK, is_accelerator
from dmconfig.footprint import Footprint
from dmconfig.inventory import Device, Inventory
from dmconfig.layout import Layout
from dmconfig.plan.calls import DECODER, role_of, runs_of
from dmconfig.plan.fastest import Fastest, Question, fastest
from dmconfig.plan.model import Residency
from dmconfig.plan.placement import best_choice
from dmconfig.plan.preferences import Even, FirstEmpty, InOrder, Preference
from dmconfig.plan.prices import Prices
from dmconfig.plan.requests import AUTO, Place, Request, allowed, brought_place, requests_of, spread_components
from dmconfig.plan.split import Room, part_loads, part_name, spread
from dmconfig.plan.uses import Limits, Load, uses_of
from dmconfig.spec import GroupOffloadSpec, PlacementSpec, Spec

_SMALL = 20
"""A component is small that has less than this part of all weights."""
UNLIMITED = 1 << 60
"""Bytes of disk when the file sets no limit: weights rest in the files they came in, so nothing is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Spec, assembly, footprints and machine, and what follows from them. ``layouts`` are those of split components."""

    spec: Spec
    assembly: Assembly
    footprints: Mapping[str, Footprint]
    inventory: Inventory
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The components that have weights."""
        return tuple(part.name for part in self.assembly.modules)

    @property
    def casting(self) -> tuple[str, ...]:
        """The components of another dtype than their neighbours', to which what enters them is cast."""
        return tuple(casting_inputs(self.assembly, {name: size.dtype for name, size in self.footprints.items()}))

    @property
    def limits(self) -> Limits:
        """The budget of every device, and the reserves."""
        budgets = {device.id: _budget(device, self.spec) for device in self.inventory.devices}
        disk = self.spec.max_memory.get(DISK)
        size = self.inventory.disk.total_bytes if self.inventory.disk is not None else UNLIMITED
        budgets[DISK] = size if disk is None else disk.bytes_of(total_bytes=size, free_bytes=size)
        reserves = {device: self.reserve_on(device) for device in budgets}
        return Limits(budgets=budgets, reserve=0, reserves=reserves, unified=self.inventory.unified)

    def reserve_on(self, device: str) -> int:
        """Return the bytes kept free on a device whatever runs there: the least of all components' reserves."""
        return min((self.spec.reserve_of(name, device) for name in self.names), default=0)

    def working(self, component: str) -> Mapping[str, int]:
        """Return the bytes that a component needs of each device beyond that while it runs there."""
        beyond = {
            device.id: self.spec.reserve_of(component, device.id) - self.reserve_on(device.id)
            for device in self.inventory.accelerators
        }
        return {device: nbytes for device, nbytes in beyond.items() if nbytes}

    @property
    def usable(self) -> tuple[str, ...]:
        """The accelerators with any budget, in the machine's order."""
        budgets = self.limits.budgets
        return tuple(device.id for device in self.inventory.accelerators if budgets[device.id] > 0)

    @property
    def requests(self) -> Mapping[str, Request]:
        """What the file asks for each component, and for each part it names; not for those that are spread."""
        requests = requests_of(self.spec, self.names, self.usable)
        refused = {part.name: part.refused for part in self.assembly.modules if part.refused}
        requests = {name: allowed(request, refused.get(name, {})) for name, request in requests.items()}
        requests = {name: _as_a_whole(request, self.footprints.get(name)) for name, request in requests.items()}
        if self.spec.offload_folder is not None:
            return requests
        return {name: _in_files(request, self.footprints.get(name)) for name, request in requests.items()}

    @property
    def spread_components(self) -> Mapping[str, PlacementSpec]:
        """The components that are spread over a list of devices."""
        return spread_components(self.spec, self.names)

    @property
    def loads(self) -> Mapping[str, Load]:
        """What each component weighs, and each part that the file names, and whether it gives way to others."""
        loads: dict[str, Load] = {}
        for name in self.footprints:
            stays = name not in self.assembly.in_turn
            if paths := [key.removeprefix(f"{name}.") for key in self.spec.parts_of(name)]:
                parts = part_loads(self.layouts[name], paths, stays=stays, working=self.working(name))
                loads |= {part_name(name, path): load for path, load in parts.items()}
                continue
            loads[name] = self.whole_load(name)
        return loads

    def whole_load(self, component: str) -> Load:
        """Return what a component weighs as a whole."""
        size = self.footprints[component]
        return Load(
            nbytes=size.nbytes,
            largest_leaf_bytes=size.largest_leaf_bytes,
            group_bytes=_group_bytes(size, self.spec.group_offload),
            stays=component not in self.assembly.in_turn,
            working=self.working(component),
        )

    @property
    def preference(self) -> Preference:
        """What the strategy prefers among placements that keep equally much on the accelerators."""
        budgets = self.limits.budgets
        match self.spec.strategy:
            case "balanced_low_0" if self.usable:
                return FirstEmpty(budgets, self.usable[0])
            case "sequential":
                return InOrder(self.usable)
            case _:
                return Even(budgets)

    @property
    def prices(self) -> Prices:
        """What places cost on this machine."""
        return Prices(
            inventory=self.inventory,
            runs=runs_of(self.spec, self.assembly),
            footprints=self.footprints,
            pinned=self.spec.group_offload.use_stream,
        )

    def seconds(self, solution: Solution, component: str = "") -> float:
        """Return the price of a solution, or of one component of it, in seconds per generation."""
        prices = self.prices
        return sum(prices.seconds(name, place, nbytes) for name, place, nbytes in solution.entries(component))

    def moved_bytes(self, solution: Solution, component: str = "") -> float:
        """Return the bytes of weights that a solution, or one component of it, brings per generation."""
        prices = self.prices
        return sum(prices.moved_bytes(name, place, nbytes) for name, place, nbytes in solution.entries(component))

    def found(self) -> Solution | None:
        """Return the best place for each component and part, or None when nothing fits."""
        beside = self.beside()
        if beside is None:
            return None
        solution, too_large = self.spread_over(beside)
        return solution if too_large is None else None

    def beside(self) -> Solution | None:
        """Return the best place for all but the components that are spread over a list, which take what is left."""
        if self.spec.strategy == AUTO and self.usable:
            return self._fastest()
        found = best_choice(self.requests, self.loads, self.limits, self.preference)
        return None if found is None else Solution(found.choice, self.loads, found.proven)

    def _fastest(self) -> Solution | None:
        layouts = {
            name: layout for name, layout in self.layouts.items() if self.spec.may_split(name) and layout.can_split
        }
        question = Question(
            requests=self.requests,
            loads=self.loads,
            limits=self.limits,
            prices=self.prices,
            layouts=layouts,
            together=frozenset(name for name in layouts if not self.is_worth_a_split(name)),
        )
        found = fastest(question)
        if found is None:
            return None
        choice: dict[str, Place] = {}
        loads = dict(self.loads)
        for name, places in found.best.places.items():
            choice |= {part_name(name, path): place for path, place in places.items()}
            if len(places) > 1:
                load = self.loads[name]
                parts = part_loads(self.layouts[name], places, stays=load.stays, working=load.working)
                loads |= {part_name(name, path): load for path, load in parts.items()}
        return Solution(choice, loads, found.proven, found)

    def is_worth_a_split(self, component: str) -> bool:
        """Tell whether ``auto`` tries a component on several devices.

        Not a decoder, whose activations are the largest there are; nor what is small beside the rest, which is quickly
        brought.
        """
        total = sum(size.nbytes for size in self.footprints.values())
        return role_of(component) != DECODER and self.footprints[component].nbytes * _SMALL >= total

    def spread_over(self, solution: Solution) -> tuple[Solution, str | None]:
        """Spread the components that take what the others leave, in the pipeline's order, as far as they fit.

        Also returns the first that does not.
        """
        for name, entry in self.spread_components.items():
            places = spread(self.layouts[name], self.rooms(name, solution), brought_place(entry))
            if places is None:
                return solution, name
            stays, working = name not in self.assembly.in_turn, self.working(name)
            loads = part_loads(self.layouts[name], places, stays=stays, working=working)
            wider = solution._replace(
                choice={**solution.choice, **{part_name(name, path): place for path, place in places.items()}},
                loads={**solution.loads, **{part_name(name, path): load for path, load in loads.items()}},
            )
            uses = uses_of(wider.choice, wider.loads, self.limits.budgets)
            if not self.limits.hold(uses, uses):
                return solution, name  # what is brought has no room to rest
            solution = wider
        return solution, None

    def rooms(self, component: str, solution: Solution) -> tuple[Room, ...]:
        """Return what the devices of a spread component have left, in its order."""
        limits, working = self.limits, self.working(component)
        uses = uses_of(solution.choice, solution.loads, limits.budgets)
        devices = self.spread_components[component].devices
        return tuple(Room(device, limits.room(device, uses, working.get(device, 0))) for device in devices)

    def variation(self, **changes: object) -> Task:
        """Return the same task with other values of the spec."""
        return replace(self, spec=self.spec.model_copy(update=changes))


class Solution(NamedTuple):
    """A place per component and part, and what each weighs; ``proven``: none better exists.

    ``fastest`` is what the search behind ``auto`` says of it.
    """

    choice: Mapping[str, Place]
    loads: Mapping[str, Load]
    proven: bool
    fastest: Fastest | None = None

    def entries(self, component: str = "") -> Iterator[tuple[str, Place, int]]:
        """Yield name, place and bytes of every component and part, or of those of one component."""
        for name, place in self.choice.items():
            if not component or name == component or name.startswith(f"{component}."):
                yield name, place, self.loads[name].nbytes


def _as_a_whole(request: Request, size: Footprint | None) -> Request:
    """The request without a choice that would take apart what comes whole."""
    if size is None or not size.comes_whole or request.pinned:
        return request
    places = (place for place in request.places if place.residency is not Residency.PER_LEAF and place.storage != DISK)
    return Request(tuple(places), request.origin)


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
