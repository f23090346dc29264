"""What the file asks for each component: one fixed place, or a free choice among several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dmconfig.devices import CPU, DISK, is_accelerator
from dmconfig.plan.model import Residency
from dmconfig.spec import STRATEGIES, PlacementSpec, Spec

_OFFLOAD = {
    "none": Residency.ALWAYS,
    "model": Residency.WHILE_RUNNING,
    "sequential": Residency.PER_LEAF,
    "group": Residency.PER_GROUP,
}
_LOW_MEMORY = {
    "none": Residency.ALWAYS,
    "cpu_offload_with_hook": Residency.WHILE_RUNNING,
    "sequential_cpu_offload": Residency.PER_LEAF,
    "group_offload": Residency.PER_GROUP,
}
_BRINGING = {
    "balanced_low_memory": Residency.WHILE_RUNNING,
    "balanced_ultra_low_memory": Residency.PER_LEAF,
}
"""Strategies that say themselves how what does not fit is brought."""
AUTO = "auto"


class Place(NamedTuple):
    """Where a component runs, when its weights are there, and where they rest in between."""

    device: str
    residency: Residency = Residency.ALWAYS
    storage: str = CPU

    @property
    def storage_device(self) -> str:
        """Where the weights rest: for those that are always there, the device itself."""
        return self.device if self.residency is Residency.ALWAYS else self.storage


class Request(NamedTuple):
    """The places a component may have, most wanted first; a single one is a pin. ``origin`` says what asks for it."""

    places: tuple[Place, ...]
    origin: str

    @property
    def pinned(self) -> bool:
        """Tell whether there is nothing to choose."""
        return len(self.places) == 1


def requests_of(spec: Spec, components: tuple[str, ...], usable: tuple[str, ...]) -> Mapping[str, Request]:
    """Return the request of every component, given the accelerators that may be used, in order.

    A component pinned by name is where the file says and nowhere else; ``low_memory`` acts on the others. One device
    with a low_memory word means: weights rest on the cpu, the component runs on that device (``cpu`` then stands for
    the first accelerator, as in diffusers, where one loads on the cpu and turns offloading on).
    """
    if not isinstance(spec.device_map, dict):
        shared = _shared(spec.device_map, _LOW_MEMORY[spec.low_memory], spec, usable, "device_map")
        return dict.fromkeys(components, shared)
    result: dict[str, Request] = {}
    for name in components:
        parts = spec.parts_of(name)
        for key in (name, *parts):
            entry = spec.placements.get(key)
            if entry is None:
                result[key] = _default(spec, usable, in_parts=bool(parts))
            elif isinstance(entry, str) or not entry.is_spread:
                result[key] = _pin(key, entry)
    return result


def allowed(request: Request, refused: Mapping[str, str]) -> Request:
    """Return a request without the places that a component does not allow; ``refused`` are words of the file.

    One without any place left stays as it is: that is a problem to be told.
    """
    places = tuple(place for place in request.places if refusal(place, refused) is None)
    return Request(places, request.origin) if places else request


def refusal(place: Place, refused: Mapping[str, str]) -> str | None:
    """Return why a component does not allow a place, or None."""
    if place.residency is not Residency.ALWAYS and place.storage == DISK and DISK in refused:
        return refused[DISK]
    ways = {residency: word for word, residency in _OFFLOAD.items()}
    return refused.get(ways.get(place.residency, "")) or (refused.get(CPU) if place.device == CPU else None)


def spread_components(spec: Spec, components: tuple[str, ...]) -> Mapping[str, PlacementSpec]:
    """Return the entries of the components that are spread over a list of devices; they take what others leave."""
    entries = {name: spec.placements.get(name) for name in components}
    return {name: entry for name, entry in entries.items() if isinstance(entry, PlacementSpec) and entry.is_spread}


def brought_place(entry: PlacementSpec) -> Place | None:
    """Return the place of what does not fit the devices over which a component is spread, where the file allows one."""
    return None if entry.offload == "none" else Place(entry.devices[0], _OFFLOAD[entry.offload], entry.storage)


def _pin(name: str, entry: str | PlacementSpec) -> Request:
    if isinstance(entry, str):
        return Request((Place(entry),), f"device_map.{name}: {entry}")
    place = Place(entry.devices[0], _OFFLOAD[entry.offload], entry.storage)
    return Request((place,), f"device_map.{name}")


def _default(spec: Spec, usable: tuple[str, ...], *, in_parts: bool) -> Request:
    """The request of a component that the map does not name, or of the rest of one of which it names parts.

    Beside parts that stay, the rest is not brought whole or in groups.
    """
    word = spec.placements["default"]
    assert isinstance(word, str)  # noqa: S101 - check refuses anything else
    request = _shared(word, _LOW_MEMORY[spec.low_memory], spec, usable, "device_map.default")
    if not in_parts:
        return request
    places = (place for place in request.places if place.residency in (Residency.ALWAYS, Residency.PER_LEAF))
    return Request(tuple(places), request.origin)


def _shared(word: str, low_memory: Residency, spec: Spec, usable: tuple[str, ...], origin: str) -> Request:
    """The request of components that share one word: a device, or a strategy."""
    origin = f"{origin}: {word}"
    low_memory = _BRINGING.get(word, low_memory)
    brought = low_memory is not Residency.ALWAYS
    if not usable and (word in STRATEGIES or (brought and not is_accelerator(word))):
        return Request((Place(CPU),), "no accelerator to use")
    if word == AUTO:
        return Request(all_places(spec, usable), origin)
    # group offload copies what it sends home into host memory
    storages = (CPU, DISK) if spec.may_rest_on_disk and low_memory is not Residency.PER_GROUP else (CPU,)
    if word not in STRATEGIES:
        device = word if is_accelerator(word) or not brought else usable[0]
        return Request(
            tuple(Place(device, low_memory, storage) for storage in (storages if brought else (CPU,))), origin
        )
    places = [Place(device) for device in usable]
    if brought:
        places += [Place(device, low_memory, storage) for storage in storages for device in usable]
    elif CPU in spec.max_memory:
        places.append(Place(CPU))
    return Request(tuple(places), origin)


def all_places(spec: Spec, usable: tuple[str, ...]) -> tuple[Place, ...]:
    """Return every place there is: every tier of the machine, but for what a budget of nothing forbids."""
    disk = spec.max_memory.get(DISK)
    storages = (CPU,) if disk is not None and disk.amount == 0 else (CPU, DISK)
    brought = (Residency.WHILE_RUNNING, Residency.PER_LEAF)
    away = (Place(device, how, storage) for how in brought for storage in storages for device in usable)
    return (*(Place(device) for device in usable), *away, Place(CPU))
