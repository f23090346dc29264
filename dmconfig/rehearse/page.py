"""A rehearsal as a page: one HTML file that needs nothing beside it, no script and no font, light and dark.

The same rehearsal makes the same bytes. The page is well-formed XML too, so that tools can read it. Widths of text are
estimated on the wide side, so that labels keep clear of one another in whatever font a viewer has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, groupby

from dmconfig.rehearse import report
from dmconfig.rehearse.model import DevicePeak, PhasePeak, Rehearsal
from dmconfig.render.words import SOURCES, residency_word, runs_of_parts
from dmconfig.units import GIB, format_bytes
from dmconfig.virtual import OUTSIDE

_LEFT, _RIGHT, _TOP, _HEIGHT = 64, 16, 30, 150  # around and in the curve of one device
_LABELS = 40  # under each curve: names of phases, and how often each ran
_PAGE_WIDTH = 1072  # a curve is at least as wide; a wider one is scrolled
_RUN, _BETWEEN = 56, 18  # widths of a run of a phase, and of what lies between two
_LONGEST = 1400  # wider than this no curve gets by the number of runs alone
_CHAR = 7.4
_MOST_LABELLED = 16  # with more groups than this, only those get a label that have room for one
_HEADROOM = 1.06
_TICKS = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128)
_MOST_TICKS = 7
_BAR = (640, 22)

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --panel: #f6f8fa; --ink: #1f2328; --soft: #59636e;
  --line: #d1d9e0; --weights: #2f6fb3; --activations: #e08214; --margins: #8c959f; --free: #eaeef2;
  --good: #1a7f37; --bad: #cf222e }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --panel: #161b22; --ink: #f0f6fc; --soft: #9198a1;
  --line: #3d444d; --weights: #4d94db; --activations: #f0a04b; --margins: #767e89; --free: #21262d;
  --good: #3fb950; --bad: #ff7b72 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1120px; padding: 28px 24px 48px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif }
h1 { font-size: 24px; line-height: 1.25; margin: 0 }
h2 { font-size: 17px; margin: 36px 0 10px }
p, ul { margin: 6px 0 }
.machine, .note, caption, figcaption { color: var(--soft) }
.verdict { margin: 16px 0; padding: 12px 16px; border-left: 6px solid; background: var(--panel); font-size: 17px;
  font-weight: 600; overflow-wrap: anywhere }
.good { border-color: var(--good) }
.bad { border-color: var(--bad) }
.verdict dl { font-size: 14px; font-weight: 400 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 8px 0 0 }
dt { color: var(--soft) }
dd { margin: 0; overflow-wrap: anywhere }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums }
caption, figcaption { text-align: left; font-size: 13px; padding-bottom: 6px }
th, td { text-align: left; vertical-align: top; padding: 4px 18px 4px 0; border-bottom: 1px solid var(--line) }
thead th { color: var(--soft); font-weight: 600 }
tbody th { font-weight: 600; white-space: nowrap }
.n { text-align: right; white-space: nowrap }
caption { white-space: nowrap }
td.fill { vertical-align: middle; width: 300px }
td.why { min-width: 260px }
.peak { font-weight: 700 }
.over { color: var(--bad); font-weight: 700 }
figure { margin: 0 0 18px }
svg { display: block; height: auto }
rect { shape-rendering: crispEdges }
figure .fit { min-width: 720px; max-width: 100% }
.bar { width: 100%; min-width: 200px }
text { font: 12px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: var(--ink) }
text.soft { fill: var(--soft) }
text.name { font-size: 14px; font-weight: 600 }
text.strong { font-weight: 600 }
.middle { text-anchor: middle }
.end { text-anchor: end }
.weights { fill: var(--weights) }
.activations { fill: var(--activations) }
.margins { fill: var(--margins) }
.free { fill: var(--free) }
.key { display: inline-block; width: 12px; height: 12px; margin: 0 6px 0 14px; vertical-align: -1px }
.key:first-child { margin-left: 0 }
.key.weights { background: var(--weights) }
.key.activations { background: var(--activations) }
.key.margins { background: var(--margins) }
.key.free { background: var(--free) }
.band { fill: var(--panel) }
.grid { stroke: var(--line) }
.axis { stroke: var(--soft) }
.room { stroke: var(--margins); stroke-width: 1.5; stroke-dasharray: 6 4 }
.capacity { stroke: var(--bad); stroke-width: 1.5 }
.bar .capacity { stroke-width: 3; vector-effect: non-scaling-stroke }
@media print { body { max-width: none; padding: 0 } figure, tr { break-inside: avoid } }
"""


def rehearsal_page(rehearsal: Rehearsal) -> str:
    """Return a rehearsal as the text of an HTML file."""
    title = f"{rehearsal.pipeline}: {'fits' if rehearsal.fits else 'does not fit'}"
    sections = (
        _head(rehearsal),
        _section("Memory at the peak", _devices(rehearsal.devices)),
        _section("Memory over a generation", _curves(rehearsal)),
        _section("Peaks by phase", _phases(rehearsal.devices)),
        _section("Moved between devices", _crossings(rehearsal)),
        _section("Where everything is", _places(rehearsal)),
        _section("What the figures stand on", _grounds(rehearsal)),
    )
    body = "\n".join(line for section in sections for line in section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _section(heading: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield a section, or nothing where there is nothing to say."""
    content = list(lines)
    if content:
        yield f"<section>\n<h2>{escape(heading)}</h2>"
        yield from content
        yield "</section>"


def _head(rehearsal: Rehearsal) -> Iterator[str]:
    yield f"<header>\n<h1>{escape(rehearsal.pipeline)}</h1>"
    yield f'<p class="machine">rehearsed on {escape(rehearsal.plan.machine)}, without weights</p>'
    yield f'<div class="verdict {"good" if rehearsal.fits else "bad"}">{escape(report.verdict(rehearsal))}'
    if facts := [*report.failure_facts(rehearsal)]:
        yield from _list(facts)
    yield "</div>"
    heading, *remedies = [*report.remedy_lines(rehearsal)] or [""]
    if remedies:
        yield f"<p>{escape(heading)}</p>\n<ul>"
        yield from (f"<li>{escape(remedy)}</li>" for remedy in remedies)
        yield "</ul>"
    yield "<ul>"
    yield from (f"<li>{escape(fact)}</li>" for fact in report.facts(rehearsal))
    yield "</ul>\n</header>"


# ---------------------------------------------------------------- tables


@dataclass(frozen=True, slots=True)
class _Cell:
    """A cell of a table. ``text`` is escaped unless it is made here, as drawings are."""

    text: str
    kind: str = ""
    is_made: bool = False


_Row = Sequence[_Cell | str]


def _table(headings: _Row, rows: Iterable[_Row], caption: str = "") -> Iterator[str]:
    """Yield a table; the first cell of a row is its heading."""
    yield '<div class="wide"><table>'
    if caption:
        yield f"<caption>{escape(caption)}</caption>"
    columns, row = 'th scope="col"', 'th scope="row"'
    yield f"<thead><tr>{''.join(_cell(heading, columns) for heading in headings)}</tr></thead>\n<tbody>"
    for first, *others in rows:
        yield f"<tr>{_cell(first, row)}{''.join(_cell(other, 'td') for other in others)}</tr>"
    yield "</tbody></table></div>"


def _cell(cell: _Cell | str, tag: str) -> str:
    made = _Cell(cell) if isinstance(cell, str) else cell
    kind = f' class="{made.kind}"' if made.kind else ""
    return f"<{tag}{kind}>{made.text if made.is_made else escape(made.text)}</{tag.partition(' ')[0]}>"


def _number(text: str, kind: str = "") -> _Cell:
    return _Cell(text, f"n {kind}".rstrip())


def _list(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield "<dl>"
    yield from (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    yield "</dl>"


def _devices(devices: Sequence[DevicePeak]) -> Iterator[str]:
    if not devices:
        return
    yield _legend(("weights", "activations", "margins", "free"))
    headings: _Row = ("device", "", *map(_number, ("weights", "activations", "margins", "free", "of")), "peak in")
    yield from _table(headings, [_device_row(device) for device in devices])


def _legend(kinds: Iterable[str]) -> str:
    keys = (f'<span class="key {kind}"></span>{kind}' for kind in kinds)
    return f'<p class="note">{"".join(keys)}</p>'


def _device_row(device: DevicePeak) -> _Row:
    peak = device.peak
    sizes = map(format_bytes, (peak.weights_bytes, peak.activations_bytes, device.margin_bytes))
    free = _number(report.left(device), "" if device.fits else "over")
    phase = report.phase_name(peak.phase) if peak.nbytes else "-"
    return device.id, _bar(device), *map(_number, sizes), free, _number(format_bytes(device.capacity_bytes)), phase


def _bar(device: DevicePeak) -> _Cell:
    """The device as a bar; where more is needed than there is, the bar is as long as the need, with a line at the end
    of the device.
    """
    width, height = _BAR
    scale = width / max(device.capacity_bytes, device.need_bytes, 1)
    peak, start = device.peak, 0.0
    parts = [_rect("free", 0, 0, device.capacity_bytes * scale, height)]
    kinds = (("weights", peak.weights_bytes), ("activations", peak.activations_bytes), ("margins", device.margin_bytes))
    for kind, nbytes in kinds:
        parts.append(_rect(kind, start, 0, nbytes * scale, height))
        start += nbytes * scale
    if not device.fits:
        parts.append(_line("capacity", device.capacity_bytes * scale, 0, device.capacity_bytes * scale, height))
    name = f"{device.id}: {', '.join(f'{format_bytes(nbytes)} {kind}' for kind, nbytes in kinds)}"
    svg = f'<svg class="bar" viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img"'
    return _Cell(f'{svg} aria-label="{escape(name)}">{"".join(parts)}</svg>', "fill", is_made=True)


def _phases(devices: Sequence[DevicePeak]) -> Iterator[str]:
    used = [device for device in devices if device.peak.nbytes]
    if not used:
        return
    caption = "The most at once, and of it activations; the peak of each device is in bold."
    headings: _Row = ("phase", *(_number(text) for device in used for text in (device.id, "activations")))
    rows: list[_Row] = [
        (report.phase_name(phase), *(cell for device in used for cell in _peak_cells(device, phase)))
        for phase in report.phases_of(used)
    ]
    yield from _table(headings, rows, caption)


def _peak_cells(device: DevicePeak, phase: str) -> tuple[_Cell, _Cell]:
    peak = report.peak_in(device, phase)
    if peak is None:
        return _number("-"), _number("-")
    kind = "peak" if peak == device.peak else ""
    return _number(format_bytes(peak.nbytes), kind), _number(format_bytes(peak.activations_bytes), kind)


def _crossings(rehearsal: Rehearsal) -> Iterator[str]:
    if not rehearsal.crossings:
        return
    rehearsed, asked = rehearsal.steps
    caption = f"In a whole generation, scaled from {rehearsed} to {asked} steps; times are {report.ESTIMATE}."
    headings: _Row = ("from", "to", "in", "what", *map(_number, ("bytes", "moves", "takes")))
    rows: list[_Row] = [
        (*cells[:4], *map(_number, cells[4:]))
        for cells in map(report.crossing_cells, report.largest_first(rehearsal.crossings))
    ]
    total: _Row = ("all", "", "", "", *map(_number, report.totals(rehearsal.crossings)))
    yield from _table(headings, [*rows, total], caption)


def _places(rehearsal: Rehearsal) -> Iterator[str]:
    headings: _Row = ("component", "class", "dtype", _number("weights"), "runs on", "rests on", "residency", "why")
    rows: list[_Row] = []
    for each in rehearsal.plan.assignments:
        where = (each.execution_device, each.storage_device, residency_word(each.residency))
        weights = _number(format_bytes(each.nbytes))
        rows.append((each.component, each.class_name, each.dtype, weights, *where, _Cell(each.reason, "why")))
        for name, parts in runs_of_parts(each.parts):
            nbytes, first = sum(part.nbytes for part in parts), parts[0]
            where = (first.execution_device, first.storage_device, residency_word(first.residency))
            rows.append(("", name, "", _number(format_bytes(nbytes)), *where, ""))
    yield from _table(headings, rows, f"The pipeline itself works on {rehearsal.plan.execution_device}.")


def _grounds(rehearsal: Rehearsal) -> Iterator[str]:
    margins = [
        (f"margin {name}", f"{size} on {ids}; {why}") for name, size, ids, why in report.margins(rehearsal.devices)
    ]
    sources = dict.fromkeys(SOURCES[each.measured_from] for each in rehearsal.plan.assignments)
    given = ", ".join(f"{name} = {value!r}" for name, value in report.arguments(rehearsal).items())
    pairs = [
        *margins,
        ("the plan's sizes", f"from {', '.join(sources)}"),
        ("called with", given),
        ("versions", ", ".join(f"{name} {version}" for name, version in report.versions().items())),
        *(("note", note) for note in rehearsal.plan.notes),
    ]
    yield from _list((name, value) for name, value in pairs if value)


# ---------------------------------------------------------------- the curve


@dataclass(frozen=True, slots=True)
class _Span:
    """One run of a phase on the x axis. ``index`` is its place on the curve of every device."""

    index: int
    phase: str
    start: int
    width: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Runs of one phase, one after the other, under one label."""

    phase: str
    spans: tuple[_Span, ...]

    @property
    def middle(self) -> float:
        """Where the label goes."""
        return (self.spans[0].start + self.spans[-1].start + self.spans[-1].width) / 2

    @property
    def width(self) -> int:
        """How much room it has."""
        return self.spans[-1].start + self.spans[-1].width - self.spans[0].start


def _curves(rehearsal: Rehearsal) -> Iterator[str]:
    drawn = [device for device in rehearsal.devices if device.curve and device.peak.nbytes]
    if not drawn:
        return
    groups = _groups([peak.phase for peak in drawn[0].curve])
    yield _legend(("weights", "activations"))
    rehearsed, asked = rehearsal.steps
    steps = "every step" if rehearsed == asked else f"{rehearsed} of {asked} steps"
    text = (
        f"The most at once while each phase ran, one after the other, with {steps}. The solid line is all that the "
        "device has; the dashed one is what its margins leave for weights and activations."
    )
    yield f'<p class="note">{escape(text)}</p>'
    for device in drawn:
        yield f'<figure class="wide">{"".join(_curve(device, groups))}</figure>'


def _groups(phases: Sequence[str]) -> list[_Group]:
    """Lay the runs of phases out on the x axis, over the whole page or more; whole pixels leave no seams."""
    grouped = list(_grouped(phases))
    widths = _widths(phases, grouped)
    wider = max(1.0, (_PAGE_WIDTH - _LEFT - _RIGHT) / sum(widths))
    ends = [round(end * wider) for end in accumulate(widths, initial=0.0)]
    return [
        _Group(phase, tuple(_Span(each, phases[each], ends[each], ends[each + 1] - ends[each]) for each in members))
        for phase, members in grouped
    ]


def _widths(phases: Sequence[str], grouped: Sequence[tuple[str, list[int]]]) -> list[float]:
    """The width of each run: less where there are many, and more where its group's label takes it, if there are few."""
    runs = sum(phase != OUTSIDE for phase in phases)
    shrink = min(1.0, _LONGEST / max(1, runs * (_RUN + _BETWEEN)))
    widths = [shrink * (_BETWEEN if phase == OUTSIDE else _RUN) for phase in phases]
    components = [(phase, members) for phase, members in grouped if phase != OUTSIDE]
    for phase, members in components if len(components) <= _MOST_LABELLED else ():
        needed = _label_width(phase, sum(phases[each] != OUTSIDE for each in members))
        stretch = max(1.0, needed / sum(widths[each] for each in members))
        for each in members:
            widths[each] *= stretch
    return widths


def _grouped(phases: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield the indices of runs of one phase, with what lies between two of them; what lies around them is apart."""
    indices = [index for index, phase in enumerate(phases) if phase != OUTSIDE]
    end = 0
    for phase, members in groupby(indices, key=phases.__getitem__):
        inside = list(members)
        first, last = inside[0], inside[-1]
        if first > end:
            yield OUTSIDE, list(range(end, first))
        yield phase, list(range(first, last + 1))
        end = last + 1
    if end < len(phases):
        yield OUTSIDE, list(range(end, len(phases)))


def _label_width(phase: str, runs: int) -> float:
    return max(len(phase), len(_runs(runs))) * _CHAR + 8


def _runs(count: int) -> str:
    return f"{count} runs" if count > 1 else ""


def _curve(device: DevicePeak, groups: Sequence[_Group]) -> Iterator[str]:
    """The curve of one device: weights, activations on them, and the lines that they must stay below."""
    last = groups[-1].spans[-1]
    width = _LEFT + last.start + last.width + _RIGHT
    height = _TOP + _HEIGHT + _LABELS
    most = max(device.capacity_bytes, device.peak.nbytes) * _HEADROOM
    name = f"{device.id}: {format_bytes(device.peak.nbytes)} of {format_bytes(device.capacity_bytes)} at the peak"

    def y_of(nbytes: float) -> float:
        return _TOP + _HEIGHT * (1 - nbytes / most)

    fits = ' class="fit"' if width <= _PAGE_WIDTH + 1 else ""
    yield f'<svg{fits} viewBox="0 0 {_figure(width)} {height}" width="{_figure(width)}" role="img">'
    yield f"<title>{escape(f'{name}, in {report.phase_name(device.peak.phase)}')}</title>"
    yield _text("name", 0, 14, name)
    yield from _bands(groups)
    yield from _axis(most, width, y_of)
    for group in groups:
        for span in group.spans:
            yield from _columns(span, device.curve[span.index], y_of)
    for kind, nbytes in (("room", device.capacity_bytes - device.margin_bytes), ("capacity", device.capacity_bytes)):
        yield _line(kind, _LEFT, y_of(nbytes), width - _RIGHT, y_of(nbytes))
    yield _line("axis", _LEFT, y_of(0), width - _RIGHT, y_of(0))
    yield "</svg>"


def _bands(groups: Sequence[_Group]) -> Iterator[str]:
    """A shade behind each component's runs, and its name below, where it has room."""
    for group in groups:
        if group.phase == OUTSIDE:
            continue
        yield _rect("band", _LEFT + group.spans[0].start, _TOP, group.width, _HEIGHT)
        count = sum(span.phase != OUTSIDE for span in group.spans)
        if _label_width(group.phase, count) > group.width + 1:
            continue
        yield _text("middle", _LEFT + group.middle, _TOP + _HEIGHT + 16, group.phase)
        if count > 1:
            yield _text("middle soft", _LEFT + group.middle, _TOP + _HEIGHT + 31, _runs(count))


def _axis(most: float, width: float, y_of: Callable[[float], float]) -> Iterator[str]:
    tick = next((each for each in _TICKS if most / GIB / each <= _MOST_TICKS), _TICKS[-1])
    for step in range(int(most / GIB / tick) + 1):
        y = y_of(step * tick * GIB)
        yield _line("grid", _LEFT, y, width - _RIGHT, y)
        yield _text("soft end", _LEFT - 8, y + 4, f"{step * tick:g} GiB")


def _columns(span: _Span, peak: PhasePeak, y_of: Callable[[float], float]) -> Iterator[str]:
    """One run of a phase at its peak: a column of all there is, and before it one of the weights; so no seam shows."""
    figures = f"{format_bytes(peak.weights_bytes)} weights, {format_bytes(peak.activations_bytes)} activations"
    yield f"<g><title>{escape(f'{report.phase_name(span.phase)}: {figures}')}</title>"
    top, middle = y_of(peak.nbytes), y_of(peak.weights_bytes)
    yield _rect("activations", _LEFT + span.start, top, span.width, y_of(0) - top)
    yield _rect("weights", _LEFT + span.start, middle, span.width, y_of(0) - middle)
    yield "</g>"


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    place = " ".join(
        f'{name}="{_figure(value)}"' for name, value in (("x", x), ("y", y), ("width", width), ("height", height))
    )
    return f'<rect class="{kind}" {place}/>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{_figure(x1)}" y1="{_figure(y1)}" x2="{_figure(x2)}" y2="{_figure(y2)}"/>'


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{_figure(x)}" y="{_figure(y)}">{escape(text)}</text>'


def _figure(value: float) -> str:
    """A length as SVG writes it, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")
