"""A rehearsal as an operator reads it and as JSON: two renderings of the same data. Nothing here prints.

The page is in ``page``. The records below say what the JSON holds; the published schema is made from them.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field
from typing_extensions import TypedDict  # pydantic makes no schema of typing's own before Python 3.12

from dmconfig.plan import Assignment, Residency
from dmconfig.rehearse.model import Crossing, DevicePeak, Failure, FailureKind, PhasePeak, Rehearsal, Remedy
from dmconfig.render import plan_data
from dmconfig.render.columns import Column, table_lines, wrapped
from dmconfig.render.data import Device, PlanData, ProblemsData
from dmconfig.render.words import BROUGHT
from dmconfig.schema import printed_schema_text
from dmconfig.units import format_bytes, format_seconds
from dmconfig.version import __version__
from dmconfig.virtual import OUTSIDE, Kind

REHEARSAL_VERSION: Final = 1
ESTIMATE = "an estimate from the machine's link speeds"

_LIBRARIES = ("torch", "diffusers", "transformers", "accelerate")
_WEIGHTS, _ACTIVATIONS, _MARGINS, _FREE = "█▓▒·"
_BAR_WIDTH, _LEAST_BAR = 32, 8
_MARK, _NO_MARK, _NOTHING = " *", "  ", "-"
_SHOWN = 12  # crossings in the text; JSON and page have all
_LABEL = len("  devices  ")
_DEVICES = (
    Column("device"),
    Column(""),
    Column(f"{_WEIGHTS} weights", right=True),
    Column(f"{_ACTIVATIONS} activations", right=True),
    Column(f"{_MARGINS} margins", right=True),
    Column(f"{_FREE} free", right=True),
    Column("of", right=True),
    Column("peak in"),
)
_CROSSINGS = (
    Column("from"),
    Column("to"),
    Column("in"),
    Column("what"),
    Column("bytes", right=True),
    Column("moves", right=True),
    Column("about", right=True),
)


# ---------------------------------------------------------------- words that the text and the page share


def verdict(rehearsal: Rehearsal) -> str:
    """Return in one sentence whether it fits, and if not what is in the way."""
    if rehearsal.failure is not None:
        return _failed(rehearsal.failure)
    over = [device for device in rehearsal.devices if not device.fits]
    if over:
        return f"does not fit: {'; '.join(map(_too_much, over))}"
    if rehearsal.odd_output:
        return f"runs, but {rehearsal.odd_output}"
    tightest = min(rehearsal.devices, key=free_bytes, default=None)
    if tightest is None:
        return "runs; there is no accelerator to fill"
    so_far = f" as far as it ran ({', '.join(rehearsal.never_ran)} never did)" if rehearsal.never_ran else ""
    least = format_bytes(free_bytes(tightest))
    return f"fits{so_far}: {least} or more is left on every device, the least on {tightest.id}"


def _failed(failure: Failure) -> str:
    place = failure.module or phase_name(failure.phase)
    devices = " and ".join(failure.devices) or "a device"
    match failure.kind:
        case "out of memory":
            return f"does not fit: {devices} is full in {place}"
        case "wrong device":
            return f"does not run: tensors on {devices} meet in {place}"
        case "error":
            return f"does not run: an error in {place}"
        case _:
            return f"cannot be rehearsed: {failure.kind} in {place}"


def _too_much(device: DevicePeak) -> str:
    need, have = format_bytes(device.need_bytes), format_bytes(device.capacity_bytes)
    return f"{device.id} needs {need} in {phase_name(device.peak.phase)} and has {have}"


def failure_facts(rehearsal: Rehearsal) -> Iterator[tuple[str, str]]:
    """Yield what is known of why it does not run or fit: a word for it, and the fact."""
    if rehearsal.failure is not None:
        yield from _failure_facts(rehearsal.failure)
    for device in rehearsal.devices:
        if not device.fits and (rehearsal.failure is None or rehearsal.failure.kind == "out of memory"):
            where = f"on {device.id} in {phase_name(device.peak.phase)}"
            yield "missing", f"{format_bytes(-free_bytes(device))} {where}, margins included"


def _failure_facts(failure: Failure) -> Iterator[tuple[str, str]]:
    operation = f" ({failure.operation})" if failure.operation else ""
    yield "phase", phase_name(failure.phase)
    if failure.module or operation:
        yield "where", (failure.module or "the pipeline itself") + operation
    if failure.devices:
        yield "devices", " and ".join(failure.devices)
    yield "what", failure.what
    if failure.fix:
        yield "fix", failure.fix


def remedy_lines(rehearsal: Rehearsal) -> Iterator[str]:
    """Yield what would make it fit, a line each under a heading; nothing where nothing is known."""
    if not rehearsal.remedies:
        return
    tried = any(remedy.fits is not None for remedy in rehearsal.remedies)
    yield "what would help, each rehearsed:" if tried else "what may help (--fix rehearses each):"
    for remedy in rehearsal.remedies:
        helps = "" if remedy.fits is None else "helps: " if remedy.fits else "does not help: "
        yield f"{helps}{remedy.words}{f' ({remedy.verdict})' if remedy.verdict else ''}"


def facts(rehearsal: Rehearsal) -> Iterator[str]:
    """Yield what a reader has to know of a rehearsal beside the verdict, a sentence each."""
    rehearsed, asked = rehearsal.steps
    rest = "" if rehearsed == asked else ", and the others taken to be as these"
    came_out = f"what came out is {' x '.join(map(str, rehearsal.output))}; " if rehearsal.output else ""
    yield f"{came_out}{rehearsed} of {asked} steps rehearsed{rest}"
    yield moving(rehearsal)
    if rehearsal.failure is not None and rehearsal.failure.kind == "out of memory":
        yield "all figures are of a run in which no device is ever full"
    elif rehearsal.failure is not None:
        yield "all figures are of what ran before the failure"
    if rehearsal.never_ran:
        yield f"never ran, so what it takes is not known: {', '.join(rehearsal.never_ran)}"
    if rehearsal.stand_ins:
        yield f"not on this machine, so stand-ins took their place: {', '.join(rehearsal.stand_ins)}"
    for name, backend in rehearsal.by_rule.items():
        yield f"the weights of {name} are those of {backend}'s rule, decoded whole, layer by layer; it did not run"
    if rehearsal.guesses:
        guesses = ", ".join(f"{name} ({_times(count)})" for name, count in rehearsal.guesses.items())
        yield f"values that were asked for, do not exist, and were answered with zero: {guesses}"


def moving(rehearsal: Rehearsal) -> str:
    """Return what travels between devices in a whole generation, and for how long."""
    if not rehearsal.crossings:
        return "nothing moves between devices"
    nbytes, moves, seconds = totals(rehearsal.crossings)
    return f"{nbytes} in {moves} moves between devices per generation, {seconds}: {ESTIMATE}"


def totals(crossings: Sequence[Crossing]) -> tuple[str, str, str]:
    """Return bytes, moves and seconds of crossings together, in words."""
    nbytes, count = sum(c.nbytes for c in crossings), sum(c.count for c in crossings)
    return format_bytes(round(nbytes)), str(round(count)), about(sum(c.seconds for c in crossings))


def largest_first(crossings: Sequence[Crossing]) -> list[Crossing]:
    """Return crossings in the order of their bytes; those of as many stay as they ran."""
    return sorted(crossings, key=lambda crossing: -crossing.nbytes)


def crossing_cells(crossing: Crossing) -> tuple[str, ...]:
    """Return a crossing as the cells of a table: from, to, phase, kind, bytes, moves, seconds."""
    ends = (crossing.source, crossing.destination, phase_name(crossing.phase), crossing.kind)
    return (*ends, *totals([crossing]))


def about(seconds: float) -> str:
    """Return a time of which only the size matters; what takes less than a millisecond is not told apart."""
    return "no time" if not seconds else "under 1 ms" if seconds < 0.001 else f"about {format_seconds(seconds)}"


def phase_name(phase: str) -> str:
    """Return a phase as it is shown: a component, a way of entering one, or what the pipeline does between them."""
    return "the pipeline itself" if phase in (OUTSIDE, "") else phase


def phases_of(devices: Sequence[DevicePeak]) -> list[str]:
    """Return the phases in which anything was on a device, in the order they ran."""
    return list(dict.fromkeys(peak.phase for device in devices for peak in device.phases if peak.nbytes))


def peak_in(device: DevicePeak, phase: str) -> PhasePeak | None:
    """Return a device's peak in a phase; None where nothing was on it."""
    return next((peak for peak in device.phases if peak.phase == phase and peak.nbytes), None)


def free_bytes(device: DevicePeak) -> int:
    """Return what is left beside the peak and the margins; negative where they do not fit."""
    return device.capacity_bytes - device.need_bytes


def left(device: DevicePeak) -> str:
    """Return in words what is left, or how much is missing."""
    free = free_bytes(device)
    return format_bytes(free) if free >= 0 else f"{format_bytes(-free)} over"


def margins(devices: Sequence[DevicePeak]) -> list[tuple[str, str, str, str]]:
    """Return each margin once: its name, its size, the devices that have it, and what it is.

    Of one that adds nothing, the figure of each device stands in the JSON alone.
    """
    where: dict[tuple[str, int, str], list[str]] = {}
    for device in devices:
        for margin in device.margins:
            why = margin.why if margin.nbytes else margin.why.partition(" (")[0]
            where.setdefault((margin.name, margin.nbytes, why), []).append(device.id)
    return [
        (name, format_bytes(nbytes) if nbytes else "nothing added", ", ".join(ids), why)
        for (name, nbytes, why), ids in where.items()
    ]


def place(assignment: Assignment) -> str:
    """Return where a component is, in a few words."""
    devices = " and ".join(assignment.execution_devices)
    if assignment.residency in BROUGHT:
        return f"on {devices}, {BROUGHT[assignment.residency]} from {assignment.storage_device}"
    return f"{'split over' if assignment.residency is Residency.SPLIT else 'on'} {devices}"


def versions() -> Mapping[str, str]:
    """Return the versions of this package and of the libraries whose code a rehearsal runs."""
    return {"dmconfig": __version__, **{name: importlib.metadata.version(name) for name in _LIBRARIES}}


def arguments(rehearsal: Rehearsal) -> Mapping[str, object]:
    """Return the arguments of the call, but for the number of steps, of which ``facts`` tells."""
    return {name: value for name, value in rehearsal.arguments.items() if not name.endswith("num_inference_steps")}


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# ---------------------------------------------------------------- text


def rehearsal_text(rehearsal: Rehearsal, width: int | None = None) -> str:
    """Return a rehearsal in lines of at most a width, where that is possible; no width breaks no line."""
    plan, devices = rehearsal.plan, rehearsal.devices
    blocks = [
        [*wrapped(verdict(rehearsal), width), *_failure_lines(rehearsal, width)],
        _remedy_lines(rehearsal, width),
        [
            line
            for text in (f"{rehearsal.pipeline} on {plan.machine}", *facts(rehearsal))
            for line in wrapped(text, width)
        ],
        _device_lines(devices, width),
        _phase_lines(devices, width),
        _crossing_lines(rehearsal.crossings, width),
        [line for text in _fine_print(rehearsal) for line in wrapped(text, width)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _failure_lines(rehearsal: Rehearsal, width: int | None) -> list[str]:
    lines: list[str] = []
    for label, fact in failure_facts(rehearsal):
        first, *more = wrapped(fact, None if width is None else width - _LABEL)
        lines += [f"  {label}".ljust(_LABEL) + first, *(" " * _LABEL + line for line in more)]
    return lines


def _remedy_lines(rehearsal: Rehearsal, width: int | None) -> list[str]:
    heading, *remedies = [*remedy_lines(rehearsal)] or [""]
    indented = None if width is None else width - 2
    lines = [f"  {line}" for remedy in remedies for line in wrapped(remedy, indented)]
    return [*wrapped(heading, width), *lines] if remedies else []


def _device_lines(devices: Sequence[DevicePeak], width: int | None) -> list[str]:
    """A line per device: its memory at its highest peak. Bars are as long as there is room for."""
    lines: list[str] = []
    for bar_width in range(_BAR_WIDTH, _LEAST_BAR - 1, -1):
        lines = table_lines(_DEVICES, [_device_row(device, bar_width) for device in devices])
        if width is None or max(map(len, lines), default=0) <= width:
            break
    return lines


def _device_row(device: DevicePeak, bar_width: int) -> tuple[str, ...]:
    peak = device.peak
    sizes = (peak.weights_bytes, peak.activations_bytes, device.margin_bytes)
    free, has = left(device), format_bytes(device.capacity_bytes)
    phase = phase_name(peak.phase) if peak.nbytes else _NOTHING
    return device.id, _bar(device, bar_width), *map(format_bytes, sizes), free, has, phase


def _bar(device: DevicePeak, width: int) -> str:
    """All of the bar is what the device has; more than that does not show, the figure beside it says it."""
    ends = (device.peak.weights_bytes, device.peak.nbytes, device.need_bytes)
    cells = [min(width, -(-end * width // max(device.capacity_bytes, 1))) for end in ends]
    used = _WEIGHTS * cells[0] + _ACTIVATIONS * (cells[1] - cells[0]) + _MARGINS * (cells[2] - cells[1])
    return used.ljust(width, _FREE)


def _phase_lines(devices: Sequence[DevicePeak], width: int | None) -> list[str]:
    used = [device for device in devices if device.peak.nbytes]
    heading = "the most at once in each phase, weights and activations; * is the device's peak"
    return [*wrapped(heading, width), *_phase_tables(used, phases_of(used), width)] if used else []


def _phase_tables(devices: Sequence[DevicePeak], phases: Sequence[str], width: int | None) -> list[str]:
    """The peaks by phase, in one table or, where that is too wide, in several of fewer devices."""
    columns = (Column("phase"), *(Column(device.id + _NO_MARK, right=True) for device in devices))
    rows = [(phase_name(phase), *(_peak_cell(device, phase) for device in devices)) for phase in phases]
    lines = table_lines(columns, rows)
    if width is None or len(devices) == 1 or max(map(len, lines)) <= width:
        return lines
    half = -(-len(devices) // 2)
    return [*_phase_tables(devices[:half], phases, width), *_phase_tables(devices[half:], phases, width)]


def _peak_cell(device: DevicePeak, phase: str) -> str:
    peak = peak_in(device, phase)
    if peak is None:
        return _NOTHING + _NO_MARK
    return format_bytes(peak.nbytes) + (_MARK if peak == device.peak else _NO_MARK)


def _crossing_lines(crossings: Sequence[Crossing], width: int | None) -> list[str]:
    if not crossings:
        return []
    shown, others = largest_first(crossings)[:_SHOWN], largest_first(crossings)[_SHOWN:]
    lines = [
        *wrapped(f"what moves between devices in a whole generation; times are {ESTIMATE}", width),
        *table_lines(_CROSSINGS, [crossing_cells(crossing) for crossing in shown]),
    ]
    if others:
        nbytes, moves, seconds = totals(others)
        lines.append(f"and {len(others)} more: {nbytes} in {moves} moves, {seconds}")
    return lines


def _fine_print(rehearsal: Rehearsal) -> Iterator[str]:
    for name, size, devices, why in margins(rehearsal.devices):
        yield f"margin {name}: {size} on {devices}; {why}"
    places = [f"{each.component} {place(each)}" for each in rehearsal.plan.assignments]
    yield f"placed: {'; '.join(places)}"
    given = ", ".join(f"{name}={value!r}" for name, value in arguments(rehearsal).items())
    if given:
        yield f"called with {given}"
    yield f"by {', '.join(f'{name} {version}' for name, version in versions().items())}"


# ---------------------------------------------------------------- JSON

Phase = Annotated[
    str,
    Field(description="A component, a way of entering one such as vae.decode, or 'outside' for the pipeline itself."),
]
Bytes = Annotated[int, Field(ge=0, description="In bytes.")]


class MarginData(TypedDict):
    """What a device takes beyond tensors."""

    name: Annotated[str, Field(description="Its kind in a word, e.g. context.")]
    bytes: Annotated[int, Field(ge=0, description="How much is added for it, in bytes; 0 where it is only told of.")]
    why: Annotated[str, Field(description="What it is.")]


class PeakData(TypedDict):
    """The most that was on a device at one time, and what it was at that moment."""

    phase: Phase
    peak_bytes: Annotated[int, Field(ge=0, description="Weights and activations together, in bytes.")]
    weights_bytes: Bytes
    activations_bytes: Bytes


class DeviceData(TypedDict):
    """One accelerator. Its peak, its margins and what is free add up to its capacity."""

    id: Device
    capacity_bytes: Bytes
    peak: Annotated[PeakData, Field(description="The highest of its peaks.")]
    margin_bytes: Annotated[int, Field(ge=0, description="All margins together, in bytes.")]
    need_bytes: Annotated[int, Field(ge=0, description="The highest peak and the margins, in bytes.")]
    free_bytes: Annotated[int, Field(description="What is left, in bytes; negative by what is missing.")]
    fits: Annotated[bool, Field(description="Whether it has what is needed.")]
    margins: list[MarginData]
    phases: Annotated[list[PeakData], Field(description="Its peak in each phase, in the order they ran.")]
    curve: Annotated[
        list[PeakData],
        Field(description="Its peak in every single run of a phase and between them, in order, as long on each device"),
    ]


class CrossingData(TypedDict):
    """What went over one link in one phase, scaled to all steps."""

    phase: Phase
    source: Device
    destination: Device
    kind: Kind
    bytes: Annotated[int, Field(ge=0, description="In all, in bytes.")]
    moves: Annotated[int, Field(ge=0, description="In how many copies.")]
    seconds: Annotated[float, Field(ge=0, description=f"How long that takes, {ESTIMATE}.")]


class FailureData(TypedDict):
    """Why the pipeline did not run to its end."""

    kind: FailureKind
    phase: Phase
    module: Annotated[str | None, Field(description="The path of the innermost module, from its component on.")]
    operation: Annotated[str | None, Field(description="What it asked of torch, e.g. aten.addmm.")]
    devices: Annotated[list[str], Field(description="The devices that met, or the one that was full.")]
    what: Annotated[str, Field(description="The words of the error.")]
    fix: Annotated[str | None, Field(description="What to do about it.")]


class RemedyData(TypedDict):
    """A change that may make it fit."""

    words: Annotated[str, Field(description="What to do.")]
    change: Annotated[dict[str, Any], Field(description="Keys of the file, dotted, and what to set them to.")]
    fits: Annotated[bool | None, Field(description="Whether it fits then, by a rehearsal; null where none was made.")]
    verdict: Annotated[str | None, Field(description="What that rehearsal came to.")]


class StepsData(TypedDict):
    """How many steps there are."""

    rehearsed: Annotated[int, Field(ge=0, description="How many were run.")]
    asked: Annotated[int, Field(ge=0, description="How many a whole generation has.")]


class RehearsalData(TypedDict):
    """A rehearsal: a pipeline's own code run for a machine without weights, and what it took."""

    version: Literal[1]
    ok: Annotated[bool, Field(description="Whether it ran, returned what was asked for, and fits with its margins.")]
    verdict: Annotated[str, Field(description="That in a sentence.")]
    pipeline: Annotated[str, Field(description="The pipeline's class.")]
    machine: Annotated[str, Field(description="The machine that it was rehearsed for, in words.")]
    steps: StepsData
    arguments: Annotated[
        dict[str, str | int | float | bool], Field(description="Arguments of the call, those that are text or numbers.")
    ]
    output: Annotated[list[int], Field(description="The shape of what came out; empty when it failed.")]
    odd_output: Annotated[str | None, Field(description="Where that is not what was asked for.")]
    failure: FailureData | None
    remedies: Annotated[list[RemedyData], Field(description="What may help, the least first; empty where it fits.")]
    devices: Annotated[list[DeviceData], Field(description="The accelerators.")]
    crossings: Annotated[list[CrossingData], Field(description="What moved between devices, in order of appearance.")]
    moved_bytes: Annotated[int, Field(ge=0, description="All crossings together, in bytes.")]
    seconds: Annotated[float, Field(ge=0, description=f"All crossings together, {ESTIMATE}.")]
    never_ran: Annotated[list[str], Field(description="Components with weights that the pipeline did not enter.")]
    stand_ins: Annotated[list[str], Field(description="Parts that were not on this machine, and were stood in for.")]
    by_rule: Annotated[
        dict[str, str], Field(description="Component -> backend whose rule its weights were counted by, without it.")
    ]
    guesses: Annotated[
        dict[str, int], Field(description="Operation -> how often a value that does not exist was taken to be zero.")
    ]
    versions: Annotated[dict[str, str], Field(description="Package -> its version.")]
    plan: Annotated[PlanData, Field(description="The plan that placed it.")]


def rehearsal_data(rehearsal: Rehearsal) -> RehearsalData:
    """Return a rehearsal as JSON data; ``rehearsal_schema`` describes it."""
    rehearsed, asked = rehearsal.steps
    crossings = [_crossing_data(crossing) for crossing in rehearsal.crossings]
    return {
        "version": REHEARSAL_VERSION,
        "ok": rehearsal.fits,
        "verdict": verdict(rehearsal),
        "pipeline": rehearsal.pipeline,
        "machine": rehearsal.plan.machine,
        "steps": {"rehearsed": rehearsed, "asked": asked},
        "arguments": dict(rehearsal.arguments),
        "output": list(rehearsal.output),
        "odd_output": rehearsal.odd_output or None,
        "failure": None if rehearsal.failure is None else _failure_data(rehearsal.failure),
        "remedies": [_remedy_data(remedy) for remedy in rehearsal.remedies],
        "devices": [_device_data(device) for device in rehearsal.devices],
        "crossings": crossings,
        "moved_bytes": sum(crossing["bytes"] for crossing in crossings),
        "seconds": sum(crossing["seconds"] for crossing in crossings),
        "never_ran": list(rehearsal.never_ran),
        "stand_ins": list(rehearsal.stand_ins),
        "by_rule": dict(rehearsal.by_rule),
        "guesses": dict(rehearsal.guesses),
        "versions": dict(versions()),
        "plan": plan_data(rehearsal.plan),
    }


def rehearsal_schema() -> str:
    """Return the JSON Schema of what ``rehearse`` prints as JSON, as the text of ``schemas/rehearsal-1.schema.json``.

    That is a rehearsal, or problems.
    """
    return printed_schema_text(RehearsalData | ProblemsData, f"dmconfig rehearsal, version {REHEARSAL_VERSION}")


def _device_data(device: DevicePeak) -> DeviceData:
    return {
        "id": device.id,
        "capacity_bytes": device.capacity_bytes,
        "peak": _peak_data(device.peak),
        "margin_bytes": device.margin_bytes,
        "need_bytes": device.need_bytes,
        "free_bytes": free_bytes(device),
        "fits": device.fits,
        "margins": [{"name": each.name, "bytes": each.nbytes, "why": each.why} for each in device.margins],
        "phases": [_peak_data(peak) for peak in device.phases],
        "curve": [_peak_data(peak) for peak in device.curve],
    }


def _peak_data(peak: PhasePeak) -> PeakData:
    return {
        "phase": peak.phase,
        "peak_bytes": peak.nbytes,
        "weights_bytes": peak.weights_bytes,
        "activations_bytes": peak.activations_bytes,
    }


def _crossing_data(crossing: Crossing) -> CrossingData:
    return {
        "phase": crossing.phase,
        "source": crossing.source,
        "destination": crossing.destination,
        "kind": crossing.kind,
        "bytes": round(crossing.nbytes),
        "moves": round(crossing.count),
        "seconds": crossing.seconds,
    }


def _failure_data(failure: Failure) -> FailureData:
    return {
        "kind": failure.kind,
        "phase": failure.phase,
        "module": failure.module or None,
        "operation": failure.operation or None,
        "devices": list(failure.devices),
        "what": failure.what,
        "fix": failure.fix or None,
    }


def _remedy_data(remedy: Remedy) -> RemedyData:
    return {
        "words": remedy.words,
        "change": dict(remedy.change),
        "fits": remedy.fits,
        "verdict": remedy.verdict or None,
    }
