"""The plan as an operator reads it: what it costs and what is to be known first, then what is where, then the proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dmconfig.devices import DISK
from dmconfig.plan.model import Assignment, DeviceUse, Part, Plan, Proof, Residency
from dmconfig.render.columns import GAP, Column, table_lines, wrapped
from dmconfig.render.words import SOURCES, estimate, placing, residency_word, runs_of_parts
from dmconfig.units import format_bytes, format_seconds

_COLUMNS = (
    Column("component"),
    Column("dtype"),
    Column("weights", right=True),
    Column("runs on"),
    Column("rests on"),
    Column("residency"),
    Column("why"),
)
_BAR_WIDTH, _LEAST_BAR = 32, 8
_USED, _RESERVED, _FREE = "█", "▒", "·"
_SAME_SECONDS = 1e-9


def plan_text(plan: Plan, width: int | None = None) -> str:
    """Return plan in lines of at most a width, where that is possible; no width breaks no line.

    A column that would say the same in every row is left out, and so is what holds nothing.
    """
    lines = [
        *_wrapped(_heading(plan), width),
        "",
        *table_lines(_COLUMNS, _components(plan), width),
        "",
        *_devices(plan, width),
        *_wrapped(_fine_print(plan), width),
    ]
    return "\n".join(lines)


def _wrapped(texts: Sequence[str], width: int | None) -> Iterator[str]:
    for text in texts:
        yield from wrapped(text, width)


def _heading(plan: Plan) -> list[str]:
    dtypes = _dtypes(plan)
    kind = f"{plan.pipeline} in {dtypes[0]}" if len(dtypes) == 1 else plan.pipeline
    costs = estimate(plan)
    return [f"{kind} {placing(plan)}", *([costs] if costs else []), *(f"note: {note}" for note in plan.notes)]


def _dtypes(plan: Plan) -> list[str]:
    return [*dict.fromkeys(assignment.dtype for assignment in plan.assignments)]


def _components(plan: Plan) -> list[tuple[str, ...]]:
    mixed = len(_dtypes(plan)) > 1
    moves = any(each.residency is not Residency.ALWAYS for each in plan.assignments)
    rows: list[tuple[str, ...]] = []
    for each in plan.assignments:
        rows.append((each.component, each.dtype if mixed else "", *_where(each, each.nbytes, moves), each.reason))
        for name, parts in runs_of_parts(each.parts):
            if nbytes := sum(part.nbytes for part in parts):
                rows.append((f"  {name}", "", *_where(parts[0], nbytes, moves), ""))
    return rows


def _where(entry: Assignment | Part, nbytes: int, moves: bool) -> tuple[str, ...]:
    """Size, where it runs and rests, and when it is there; the last two say nothing where all of the plan stays."""
    when = (entry.storage_device, residency_word(entry.residency)) if moves else ("", "")
    return format_bytes(nbytes), entry.execution_device, *when


def _devices(plan: Plan, width: int | None) -> list[str]:
    """A line per device that holds something: what of its budget is used, reserved and free; then the others."""
    used = [device for device in plan.devices if device.used_bytes]
    texts = _figures(used)
    ids = _aligned([device.id for device in used], str.ljust)
    longest = max((len(name) + len(text) for name, text in zip(ids, texts, strict=True)), default=0)
    room = _BAR_WIDTH if width is None else min(_BAR_WIDTH, width - longest - 2 * len(GAP))
    bars = [_bar(device, room) + GAP if room >= _LEAST_BAR else "" for device in used]
    lines = [f"{name}{GAP}{bar}{text}" for name, bar, text in zip(ids, bars, texts, strict=True)]
    unused = [f"{device.id} ({_offer(device)})" for device in plan.devices if not device.used_bytes]
    return [*lines, *([f"not used: {', '.join(unused)}"] if unused else [])]


def _figures(devices: Sequence[DeviceUse]) -> list[str]:
    """The sizes of each device in words, those of one kind ending under one another."""
    weights = _aligned([f"{format_bytes(device.used_bytes)} weights," for device in devices], str.rjust)
    reserves = _aligned([_reserve(device) for device in devices], str.rjust)
    limited = [device for device in devices if device.id != DISK]
    free = _aligned([f"{format_bytes(device.free_bytes)} free" for device in limited], str.rjust)
    budgets = _aligned([format_bytes(device.budget_bytes) for device in limited], str.rjust)
    rests = [f"{reserve}{left} of {budget}" for reserve, left, budget in zip(reserves, free, budgets, strict=False)]
    rests += [_disk(device) for device in devices if device.id == DISK]
    return [f"{weight} {rest}" for weight, rest in zip(weights, rests, strict=True)]


def _offer(device: DeviceUse) -> str:
    return format_bytes(device.budget_bytes) if device.budget_bytes else "may not be used"


def _reserve(device: DeviceUse) -> str:
    return f"{format_bytes(device.reserved_bytes)} reserve, " if device.reserved_bytes else ""


def _disk(device: DeviceUse) -> str:
    budget = format_bytes(device.budget_bytes)
    free = f", {format_bytes(device.free_bytes)} free of {budget}" if device.free_bytes else ""
    return f"in the {device.description}{free}"


def _aligned(cells: Sequence[str], justify: Callable[[str, int], str]) -> list[str]:
    width = max(map(len, cells), default=0)
    return [justify(cell, width) for cell in cells]


def _bar(device: DeviceUse, width: int) -> str:
    budget = max(device.budget_bytes, 1)
    used = min(width, -(-device.used_bytes * width // budget))
    reserved = min(width - used, -(-device.reserved_bytes * width // budget))
    return _USED * used + _RESERVED * reserved + _FREE * (width - used - reserved)


def _fine_print(plan: Plan) -> list[str]:
    sources = ", ".join(dict.fromkeys(SOURCES[a.measured_from] for a in plan.assignments))
    is_kept_free = any(device.reserved_bytes for device in plan.devices)
    activations = "activations have to fit the reserve" if is_kept_free else "activations come on top"
    return [*(_proof(plan.proof) if plan.proof else ()), f"sizes from {sources}; {activations}"]


def _proof(proof: Proof) -> Iterator[str]:
    if not proof.is_complete:
        least = format_seconds(proof.bound_seconds)
        yield f"the best of {proof.visited} steps; nothing that auto tries takes less than {least}"
    elif proof.seconds:
        yield f"searched to the end in {proof.visited} steps: nothing else that auto tries takes less"
    if proof.runner_up and proof.runner_up_seconds is not None:
        more = proof.runner_up_seconds - proof.seconds
        lost = f"{format_seconds(more)} more" if more > _SAME_SECONDS else "as fast, and less even or over more devices"
        yield f"next best: {proof.runner_up} ({lost})"
