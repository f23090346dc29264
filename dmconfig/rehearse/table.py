"""A sweep as a table and as JSON: per machine, the largest setting that fits, and what each of the others takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Final, Literal

from pydantic import Field
from typing_extensions import TypedDict  # pydantic makes no schema of typing's own before Python 3.12

from dmconfig.rehearse.report import about
from dmconfig.rehearse.sweeping import Tried, largest
from dmconfig.render.columns import Column, table_lines, wrapped
from dmconfig.render.data import ProblemsData
from dmconfig.schema import printed_schema_text
from dmconfig.units import format_bytes

SWEEP_VERSION: Final = 1
Sweep = Mapping[str, Sequence[Tried]]
"""What was tried, by machine."""
_LARGEST = (
    Column("machine"),
    Column("largest that fits"),
    Column("needs", right=True),
    Column("of", right=True),
    Column("moving weights", right=True),
)
_NOT_TRIED, _TOO_LARGE = "-", "no"


def sweep_text(sweep: Sweep, width: int | None = None) -> str:
    """Return a sweep in lines of at most a width, where that is possible; no width breaks no line."""
    blocks = [
        table_lines(_LARGEST, [_largest_row(machine, tried) for machine, tried in sweep.items()], width),
        _grid_lines(sweep, width),
        [line for text in _reasons(sweep) for line in wrapped(text, width)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _largest_row(machine: str, tried: Sequence[Tried]) -> tuple[str, ...]:
    best = largest(tried)
    if best is None:
        return machine, "none", "", "", ""
    on = f"{format_bytes(best.capacity_bytes)} on {best.device}"
    return machine, _setting(best), format_bytes(best.need_bytes), on, about(best.seconds) if best.seconds else "none"


def _grid_lines(sweep: Sweep, width: int | None) -> list[str]:
    """What the fullest device needs in every setting that fits: sizes down, batches across."""
    batches = sorted({each.batch for tried in sweep.values() for each in tried})
    across = (Column(f"batch {each}", right=True) for each in batches)
    heading = f"what the fullest device needs; {_TOO_LARGE}: does not fit; {_NOT_TRIED}: larger than that, not tried"
    rows = [row for machine, tried in sweep.items() for row in _grid_rows(machine, tried, batches)]
    return [*wrapped(heading, width), *table_lines((Column("machine"), Column("size", right=True), *across), rows)]


def _grid_rows(machine: str, tried: Sequence[Tried], batches: Sequence[int]) -> Iterator[tuple[str, ...]]:
    cells = {(each.size, each.batch): _cell(each) for each in tried}
    for size in sorted({each.size for each in tried}):
        yield machine, f"{size} px", *(cells[size, batch] for batch in batches)


def _cell(tried: Tried) -> str:
    if tried.fits:
        return format_bytes(tried.need_bytes)
    return _TOO_LARGE if tried.is_tried else _NOT_TRIED


def _reasons(sweep: Sweep) -> Iterator[str]:
    """Why each setting does not fit that was tried and does not."""
    for machine, tried in sweep.items():
        for each in tried:
            if each.is_tried and not each.fits:
                yield f"{machine}, {_setting(each)}: {each.why_not}"
    yield "each setting is planned with the reserve that its own rehearsal asks for: reserve: rehearsed in the file"


def _setting(tried: Tried) -> str:
    return f"{tried.size} px, batch {tried.batch}"


# ---------------------------------------------------------------- JSON


class TriedData(TypedDict):
    """One setting on one machine."""

    size: Annotated[int, Field(description="Height and width, in pixels.")]
    batch: Annotated[int, Field(description="Pictures at once.")]
    fits: bool
    is_tried: Annotated[bool, Field(description="Whether it was rehearsed: what is larger than a misfit is not.")]
    device: Annotated[str | None, Field(description="The accelerator that comes closest to full.")]
    need_bytes: Annotated[int | None, Field(description="What that has to have, in bytes; null where it is not known.")]
    capacity_bytes: Annotated[int | None, Field(description="What it has, in bytes.")]
    seconds: Annotated[
        float, Field(ge=0, description="What moving weights adds to a generation, in seconds, an estimate.")
    ]
    why_not: Annotated[str | None, Field(description="Why it does not fit; null where it does.")]


class MachineData(TypedDict):
    """One machine of a sweep."""

    machine: Annotated[str, Field(description="The machine, in words.")]
    largest: Annotated[TriedData | None, Field(description="Of the largest size that fits, the most at once.")]
    tried: Annotated[list[TriedData], Field(description="Every setting, the smallest first.")]


class SweepData(TypedDict):
    """What becomes of sizes and batches on machines, as `dmconfig sweep --format json` prints it."""

    version: Literal[1]
    ok: Annotated[bool, Field(description="Whether every machine has a setting that fits.")]
    machines: list[MachineData]


def sweep_data(sweep: Sweep) -> SweepData:
    """Return a sweep as JSON data; ``sweep_schema`` describes it."""
    machines = [_machine_data(machine, tried) for machine, tried in sweep.items()]
    return {"version": SWEEP_VERSION, "ok": fits_everywhere(sweep), "machines": machines}


def fits_everywhere(sweep: Sweep) -> bool:
    """Tell whether something fits each machine."""
    return all(largest(tried) is not None for tried in sweep.values())


def sweep_schema() -> str:
    """Return the JSON Schema of what ``sweep`` prints as JSON, as the text of ``schemas/sweep-1.schema.json``."""
    return printed_schema_text(SweepData | ProblemsData, f"dmconfig sweep, version {SWEEP_VERSION}")


def _machine_data(machine: str, tried: Sequence[Tried]) -> MachineData:
    best = largest(tried)
    return {
        "machine": machine,
        "largest": None if best is None else _tried_data(best),
        "tried": [_tried_data(each) for each in tried],
    }


def _tried_data(tried: Tried) -> TriedData:
    return {
        "size": tried.size,
        "batch": tried.batch,
        "fits": tried.fits,
        "is_tried": tried.is_tried,
        "device": tried.device or None,
        "need_bytes": tried.need_bytes or None,
        "capacity_bytes": tried.capacity_bytes or None,
        "seconds": tried.seconds,
        "why_not": tried.why_not or None,
    }
