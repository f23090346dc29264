"""What a placement costs: the seconds per generation that it adds to the computing, by an estimate stated here.

Weights that stay on an accelerator cost nothing. Weights that rest elsewhere cost their bytes over the bandwidth of
the way, once when they are brought whole, and once per call when they are brought in parts. A component on the cpu
costs its operations, two per weight and vector, over the speed of the cpu. Computing on accelerators and activations
between them are left out: they are much the same in every placement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dmconfig.devices import is_accelerator
from dmconfig.footprint import Footprint
from dmconfig.inventory import Inventory
from dmconfig.plan.calls import Runs
from dmconfig.plan.model import Residency
from dmconfig.plan.requests import Place

_BYTES_PER_WEIGHT = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of places on one machine. ``pinned``: weights are brought from page-locked memory, as by a stream."""

    inventory: Inventory
    runs: Mapping[str, Runs]
    footprints: Mapping[str, Footprint]
    pinned: bool = False
    _bandwidths: dict[Place, int] = field(default_factory=dict, repr=False, compare=False)

    def seconds(self, name: str, place: Place, nbytes: int) -> float:
        """Return what so many bytes of a component, or of a part of one, cost at a place per generation."""
        component = name.partition(".")[0]
        runs = self.runs[component]
        if not is_accelerator(place.device):
            weights = nbytes / _BYTES_PER_WEIGHT.get(self.footprints[component].dtype, 2)
            return runs.calls * 2 * weights * runs.tokens / self.inventory.flops_per_s(place.device)
        return self.moved_bytes(name, place, nbytes) / self.bandwidth(place) if self._is_brought(place) else 0.0

    def moved_bytes(self, name: str, place: Place, nbytes: int) -> float:
        """Return the bytes of weights that come to the device per generation."""
        if not self._is_brought(place):
            return 0
        times = 1 if place.residency is Residency.WHILE_RUNNING else self.runs[name.partition(".")[0]].calls
        return nbytes * times

    def bandwidth(self, place: Place) -> int:
        """Return the bytes a second that come from where weights rest to where they are used."""
        if place not in self._bandwidths:  # asked thousands of times by a search
            pinned = self.pinned and place.residency is Residency.PER_GROUP
            self._bandwidths[place] = self.inventory.bandwidth(place.storage, place.device, pinned=pinned)
        return self._bandwidths[place]

    def _is_brought(self, place: Place) -> bool:
        return is_accelerator(place.device) and place.residency is not Residency.ALWAYS
