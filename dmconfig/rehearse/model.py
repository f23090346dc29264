"""The values of a rehearsal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dmconfig.plan import Plan
from dmconfig.virtual import Kind

FailureKind = Literal["out of memory", "wrong device", "unknown value", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """What a device takes beyond tensors, by name: ``why`` says what it is and where the figure comes from."""

    name: str
    nbytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """The most that was on a device in a phase: a component, or a way of entering one (``vae.decode``)."""

    phase: str
    weights_bytes: int
    activations_bytes: int

    @property
    def nbytes(self) -> int:
        """Weights and activations at the moment of the peak."""
        return self.weights_bytes + self.activations_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """One device: its peak in each phase, in the order they ran, and what comes on top.

    ``curve`` has a peak for every run of a phase, one after the other, and for what lies between them; it is as long
    for every device of a rehearsal. ``description`` is the name that torch has for the card, or its size.
    """

    id: str
    capacity_bytes: int
    phases: tuple[PhasePeak, ...]
    margins: tuple[Margin, ...]
    curve: tuple[PhasePeak, ...] = ()
    description: str = ""

    @property
    def peak(self) -> PhasePeak:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.nbytes)

    @property
    def margin_bytes(self) -> int:
        """All margins together."""
        return sum(margin.nbytes for margin in self.margins)

    @property
    def need_bytes(self) -> int:
        """What the device has to have: the highest peak and the margins."""
        return self.peak.nbytes + self.margin_bytes

    @property
    def fits(self) -> bool:
        """Whether it has that."""
        return self.need_bytes <= self.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """What went from one device to another in a phase, scaled to a whole generation; ``seconds`` is an estimate."""

    phase: str
    source: str
    destination: str
    kind: Kind
    nbytes: float
    count: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why the pipeline did not run to its end: in which phase, and the words of the error.

    ``module`` is the path of the innermost module that ran, from its component on, and ``operation`` what it asked of
    torch; ``devices`` are those that met, or the one that was full. ``fix`` says what to do, and ``trace`` where in
    the code it came from, of an ``error``: one that is not of the virtual machine. Each may be empty.
    """

    kind: FailureKind
    phase: str
    what: str
    module: str = ""
    operation: str = ""
    devices: tuple[str, ...] = ()
    fix: str = ""
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change that may make it fit, in words; ``change`` are the keys of the file that it sets.

    ``verdict`` is what a rehearsal with it came to, and ``fits`` whether it fits then; None where none was made.
    """

    words: str
    change: Mapping[str, Any]
    fits: bool | None = None
    verdict: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """A run of the pipeline's own code without weights.

    ``pipeline`` is the class that was called: the plan's, or that of another on the same components. ``steps`` is
    (rehearsed, asked). ``output`` is the shape of what came out, empty when it failed; ``odd_output`` says where it is
    not what was asked for. ``stand_ins`` are parts that were not on this machine; ``by_rule`` are components whose
    weights weigh what a backend's rule says, and the backend, which was not run; ``guesses`` counts values that were
    asked for and do not exist, by operation. ``remedies`` are changes that may make it fit.
    """

    plan: Plan
    pipeline: str
    steps: tuple[int, int]
    arguments: Mapping[str, Any]
    devices: tuple[DevicePeak, ...]
    crossings: tuple[Crossing, ...]
    output: tuple[int, ...]
    odd_output: str
    stand_ins: tuple[str, ...]
    guesses: Mapping[str, int]
    failure: Failure | None
    by_rule: Mapping[str, str] = field(default_factory=dict)
    remedies: tuple[Remedy, ...] = ()

    @property
    def never_ran(self) -> tuple[str, ...]:
        """Components with weights that the pipeline did not enter, so nothing is known of what they take.

        Where it failed, or there is no accelerator to keep books of, that is not known.
        """
        if self.failure is not None or not self.devices:
            return ()
        ran = {peak.phase.partition(".")[0] for peak in self.devices[0].curve}
        return tuple(each.component for each in self.plan.assignments if each.component not in ran)

    @property
    def fits(self) -> bool:
        """Whether it ran, returned what was asked for, and every device has room for its peak and margins."""
        return self.failure is None and not self.odd_output and all(device.fits for device in self.devices)
