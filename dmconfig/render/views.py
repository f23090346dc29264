"""What lies behind a plan: one component with all it could do instead, and all strategies side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dmconfig.devices import is_accelerator
from dmconfig.plan import Alternative, Assignment, Comparison, Plan, Residency
from dmconfig.render.columns import Column, table_lines, wrapped
from dmconfig.render.words import BROUGHT, SOURCES, residency_word
from dmconfig.units import format_bytes, format_seconds

AS_WRITTEN = "as written"
"""In place of a strategy's name: the plan of a file that is more than one word."""
_PLACES = (
    Column("runs on"),
    Column("rests on"),
    Column("residency"),
    Column("per generation", right=True),
    Column("verdict"),
)
_STRATEGIES = (
    Column(""),
    Column("strategy"),
    Column("fits"),
    Column("per generation", right=True),
    Column("moved", right=True),
)
_MARK, _NOTHING = "*", "-"
_LABEL = len("  where  ")


def explanation_text(component: str, plan: Plan, alternatives: Sequence[Alternative], width: int | None = None) -> str:
    """Return what a component is, where it goes and why, and every place it could have, the cheapest first."""
    assignment = next(each for each in plan.assignments if each.component == component)
    facts = (("what", _what(assignment)), ("where", _where(assignment)), ("why", assignment.reason))
    lines = [*wrapped(f"{component} of {plan.pipeline} on {plan.machine}", width)]
    for label, text in facts:
        first, *more = wrapped(text, width if width is None else width - _LABEL) or [""]
        lines += [f"  {label}".ljust(_LABEL) + first, *(" " * _LABEL + line for line in more)]
    rows = [_place_row(alternative) for alternative in alternatives]
    if not any(alternative.is_chosen for alternative in alternatives):
        rows.insert(0, _chosen_row(assignment))
    return "\n".join([*lines, "", "with all other components where they are:", *table_lines(_PLACES, rows, width)])


def _what(assignment: Assignment) -> str:
    size = f"{format_bytes(assignment.nbytes)} by {SOURCES[assignment.measured_from]}"
    return f"{assignment.class_name} in {assignment.dtype}, {size}; runs {_times(assignment.calls)} per generation"


def _times(calls: float) -> str:
    return "once" if calls == 1 else "twice" if calls == 2 else f"{calls:g} times"


def _where(assignment: Assignment) -> str:
    devices, rests = ", ".join(assignment.execution_devices), ", ".join(_storage_devices(assignment))
    if assignment.residency is Residency.ALWAYS:
        place = f"stays on {devices}"
    elif assignment.residency is Residency.SPLIT:
        place = f"split: runs on {devices}, rests on {rests}"
    else:
        peak = f", {format_bytes(assignment.peak_bytes)} at once" if assignment.peak_bytes < assignment.nbytes else ""
        place = f"runs on {devices}, {BROUGHT[assignment.residency]} from {rests}{peak}"
    if not assignment.seconds:
        return place
    moved = f" ({format_bytes(round(assignment.moved_bytes))} moved)" if assignment.moved_bytes else ""
    return f"{place}; about {format_seconds(assignment.seconds)} per generation{moved}"


def _storage_devices(assignment: Assignment) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.storage_device for each in assignment.parts or (assignment,)))


def _chosen_row(assignment: Assignment) -> tuple[str, ...]:
    """The row of a place that is no whole one, or one that only the file can ask for."""
    runs, rests = ", ".join(assignment.execution_devices), ", ".join(_storage_devices(assignment))
    return runs, rests, residency_word(assignment.residency), format_seconds(assignment.seconds), "chosen"


def _place_row(alternative: Alternative) -> tuple[str, ...]:
    return (
        alternative.execution_device,
        alternative.storage_device,
        residency_word(alternative.residency),
        format_seconds(alternative.seconds),
        "chosen" if alternative.is_chosen else alternative.obstacle or "possible",
    )


def with_own(comparisons: Sequence[Comparison], plan: Plan | None) -> tuple[Comparison, ...]:
    """Return comparisons with one of them the file's own: where none is, its plan is added, or that it has none."""
    if any(comparison.is_chosen for comparison in comparisons):
        return tuple(comparisons)
    own = Comparison(strategy=AS_WRITTEN, fits=plan is not None, is_chosen=True)
    if plan is not None:
        own = replace(
            own,
            seconds=plan.seconds,
            moved_bytes=plan.moved_bytes,
            bytes_by_device=tuple(
                (device.id, device.used_bytes)
                for device in plan.devices
                if device.used_bytes or is_accelerator(device.id)
            ),
        )
    return (*comparisons, own)


def comparison_text(pipeline: str, machine: str, comparisons: Sequence[Comparison], width: int | None = None) -> str:
    """Return a line per strategy: whether it fits, what it costs, and what it keeps on each device."""
    devices = [*dict.fromkeys(device for each in comparisons for device, _ in each.bytes_by_device)]
    columns = (*_STRATEGIES, *(Column(device, right=True) for device in devices))
    lines = table_lines(columns, [(*_figures(each), *_held(each, devices)) for each in comparisons])
    if width is not None and max(map(len, lines)) > width:
        rows = [(*_figures(each), ", ".join(_named(each))) for each in comparisons]
        lines = table_lines((*_STRATEGIES, Column("weights on")), rows, width)
    heading = f"{pipeline} on {machine}, by strategy; {_MARK} is what the file asks for"
    return "\n".join([*wrapped(heading, width), "", *lines])


def _figures(comparison: Comparison) -> tuple[str, ...]:
    mark = _MARK if comparison.is_chosen else ""
    if comparison.seconds is None or comparison.moved_bytes is None:
        return mark, comparison.strategy, "no", "", ""
    moved = format_bytes(round(comparison.moved_bytes)) if comparison.moved_bytes else _NOTHING
    return mark, comparison.strategy, "yes", format_seconds(comparison.seconds), moved


def _held(comparison: Comparison, devices: Sequence[str]) -> Iterator[str]:
    held = dict(comparison.bytes_by_device)
    for device in devices:
        yield (format_bytes(held[device]) if held.get(device) else _NOTHING) if comparison.fits else ""


def _named(comparison: Comparison) -> Iterator[str]:
    yield from (f"{device} {format_bytes(nbytes)}" for device, nbytes in comparison.bytes_by_device if nbytes)
