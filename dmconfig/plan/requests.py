"""What the file asks for each component: one fixed place, or a free choice among several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a component runs, when its weights are there, and where they rest in between."""

    device: str
    residency: Residency = Residency.ALWAYS
    storage: str = CPU

    @property
    def storage_device(self) -> str:
        """Where the weights rest: for those that are always there, the device itself."""
        return self.device if self.residency is Residency.ALWAYS else self.storage


@dataclass(frozen=True, slots=True)
class Request:
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
    low_memory = _LOW_MEMORY[spec.low_memory]
    if not isinstance(spec.device_map, dict):
        shared = _shared(spec.device_map, low_memory, spec, usable, "device_map")
        return dict.fromkeys(components, shared)
    named: Mapping[str, str | PlacementSpec] = spec.device_map
    result: dict[str, Request] = {}
    for name in components:
        match named.get(name):
            case None:
                word = named["default"]
                assert isinstance(word, str)  # noqa: S101 - check refuses anything else
                result[name] = _shared(word, low_memory, spec, usable, "device_map.default")
            case str() as device:
                result[name] = Request((Place(device),), f"device_map.{name}: {device}")
            case placement:
                place = Place(placement.execution, _OFFLOAD[placement.offload], placement.storage)
                result[name] = Request((place,), f"device_map.{name}")
    return result


def _shared(word: str, low_memory: Residency, spec: Spec, usable: tuple[str, ...], origin: str) -> Request:
    """The request of components that share one word: a device, or the strategy ``balanced``."""
    origin = f"{origin}: {word}"
    brought = low_memory is not Residency.ALWAYS
    if not usable and (word in STRATEGIES or (brought and not is_accelerator(word))):
        return Request((Place(CPU),), "no accelerator to use")
    if word not in STRATEGIES:
        device = word if is_accelerator(word) or not brought else usable[0]
        storages = (CPU, DISK) if brought and spec.may_rest_on_disk else (CPU,)
        return Request(tuple(Place(device, low_memory, storage) for storage in storages), origin)
    places = [Place(device) for device in usable]
    if brought:
        places += [Place(device, low_memory) for device in usable]
        if spec.may_rest_on_disk:
            places += [Place(device, low_memory, DISK) for device in usable]
    elif CPU in spec.max_memory:
        places.append(Place(CPU))
    return Request(tuple(places), origin)
