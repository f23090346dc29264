"""The values of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from dmconfig.devices import DISK
from dmconfig.footprint import MeasuredFrom
from dmconfig.layout import nearest_ancestor


class Residency(StrEnum):
    """When a component's weights are on its execution device."""

    ALWAYS = "always"
    WHILE_RUNNING = "while_running"
    """They rest on the cpu and are brought whole when the component runs (``cpu_offload_with_hook``)."""
    PER_GROUP = "per_group"
    """They rest on the cpu and are brought in groups of layers (``group_offload``)."""
    PER_LEAF = "per_leaf"
    """They rest on the cpu and are brought one layer at a time (``sequential_cpu_offload``)."""
    SPLIT = "split"
    """Its parts are in places of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The place of one part of a split component: a module path within it, or "" for all that no other part names.

    ``nbytes`` and ``peak_bytes`` are those of an ``Assignment``. Residency is ALWAYS or PER_LEAF.
    """

    path: str
    nbytes: int
    peak_bytes: int
    execution_device: str
    storage_device: str
    residency: Residency


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One component's place: where it runs, where its weights rest, and why. ``nbytes`` are its weights at ``dtype``.

    ``peak_bytes`` is what of it is on the execution device at once; less than ``nbytes`` only per leaf or group.
    ``parts`` are those of a component that is split, the one with the empty path first: its devices are the
    component's own, and its bytes are in ``peak_bytes``. ``is_written``: what of it rests on disk is cast when it is
    loaded, so it is written to the offload folder. ``casts_inputs``: what enters it is cast to its dtype, for its
    neighbours have another. ``calls`` is how often it runs per generation; ``seconds`` and
    ``moved_bytes`` are what its place adds to a generation, estimated: see ``prices``.
    """

    component: str
    class_name: str
    dtype: str
    nbytes: int
    peak_bytes: int
    measured_from: MeasuredFrom
    execution_device: str
    storage_device: str
    residency: Residency
    reason: str
    parts: tuple[Part, ...] = ()
    is_written: bool = False
    casts_inputs: bool = False
    calls: float = 1
    seconds: float = 0.0
    moved_bytes: float = 0.0

    @property
    def bytes_on_disk(self) -> int:
        """How many bytes of it rest on disk."""
        return sum(each.nbytes for each in self.parts or (self,) if each.storage_device == DISK)

    def place_of(self, tensor: str) -> Assignment | Part:
        """Return where a tensor of it, by its name in the component, is: in a part, or in itself where it is whole."""
        paths = {part.path: part for part in self.parts}
        return paths[nearest_ancestor(tensor.rpartition(".")[0], paths)] if paths else self

    @property
    def execution_devices(self) -> tuple[str, ...]:
        """The devices it runs on, its own first."""
        return tuple(dict.fromkeys((self.execution_device, *(part.execution_device for part in self.parts))))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What a plan uses of one device. ``used_bytes`` is the most that weights take of it at one time.

    ``budget_bytes`` is what may be used: the least of the file's limit and what is free. ``reserved_bytes`` is kept
    for activations, on accelerators that run something.
    """

    id: str
    description: str
    total_bytes: int
    budget_bytes: int
    used_bytes: int
    reserved_bytes: int

    @property
    def free_bytes(self) -> int:
        """What is left of the budget; never negative in a plan."""
        return self.budget_bytes - self.used_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the search behind ``auto`` says of its answer.

    ``seconds`` is its price and ``bound_seconds`` what nothing can fall below; ``visited`` places were tried, and
    ``is_complete`` tells whether that was all there was to try. ``runner_up`` is the next best placement it saw, told
    by what is otherwise there, and ``runner_up_seconds`` its price.
    """

    seconds: float
    bound_seconds: float
    visited: int
    is_complete: bool
    runner_up: str = ""
    runner_up_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will happen: an assignment per component that has weights, in the pipeline's order, and use per device.

    ``execution_device`` is the pipeline's own: where latents and embeddings live, the denoiser's device.
    """

    pipeline: str
    machine: str
    execution_device: str
    assignments: tuple[Assignment, ...]
    devices: tuple[DeviceUse, ...]
    notes: tuple[str, ...] = ()
    proof: Proof | None = None

    @property
    def seconds(self) -> float:
        """What moving weights, and computing on the cpu, adds to a generation: an estimate."""
        return sum(assignment.seconds for assignment in self.assignments)

    @property
    def moved_bytes(self) -> float:
        """The bytes of weights that are brought to accelerators per generation."""
        return sum(assignment.moved_bytes for assignment in self.assignments)

    @property
    def device_map(self) -> Mapping[str, str]:
        """Component, or path of a part below one -> the device its weights rest on, as in ``hf_device_map``."""
        rests: dict[str, str] = {}
        for assignment in self.assignments:
            rests[assignment.component] = assignment.storage_device
            rests |= {
                f"{assignment.component}.{part.path}": part.storage_device for part in assignment.parts if part.path
            }
        return rests
