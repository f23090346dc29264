"""A plan as a picture: devices as columns, components as blocks, the phases of a generation side by side.

One SVG text that needs nothing beside it, no script and no font, and is the same for the same plan. Sizes of text are
estimated, on the wide side, so that labels keep clear of one another in whatever font a viewer has.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dmconfig.devices import is_accelerator
from dmconfig.plan.model import Plan
from dmconfig.render.stacks import Block, Stack, phases_of, stacks_of
from dmconfig.render.words import estimate, placing
from dmconfig.units import format_bytes

SUFFIX = ".svg"
_GREY = "#7a7a7a"
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#e69f00", _GREY)
"""Apart for every kind of eyes, and visible on white and on black."""
_RESERVE = "url(#dm-reserve)"
_PAD, _GAP, _BESIDE = 24, 36, 12
_STACK, _PHASE = 104, 16  # width of a column, and the least of a phase in it
_LINE, _CHAR, _SIZE_CHARS = 16, 7.2, 10  # height of a label, width of a letter, letters of a size
_NAME = 24  # height of a device's name and budget
_MARKS = 26  # height of the numbers of the phases
_LEAST_HEIGHT, _LEAST_WIDTH, _LEAST_BLOCK = 300, 640, 3
_PER_ROW = 4
_ONE_SCALE = 5  # devices of budgets further apart than this are drawn to a scale each
_LONGEST_NAME, _LEAST_CHARS = 36, 18
_SWATCH = 16
_STYLE = """
svg { color-scheme: light dark }
text { font: 12px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #1f2328 }
.title { font-size: 18px; font-weight: 600 }
.name { font-weight: 600 }
.soft { fill: #59636e }
.mark { font-size: 10px; text-anchor: middle }
.end { text-anchor: end }
.paper { fill: #ffffff }
.frame { fill: none; stroke: #59636e }
.edge { stroke: #ffffff }
.phase { stroke: #d1d9e0; stroke-dasharray: 2 3 }
.dot { fill: #59636e }
.on { fill: #1f2328 }
.off { fill: none; stroke: #59636e }
.inside { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .soft, .dot { fill: #9198a1 }
  .paper { fill: #0d1117 }
  .frame, .off { stroke: #9198a1 }
  .edge { stroke: #0d1117 }
  .phase { stroke: #3d444d }
  .on { fill: #f0f6fc }
  .inside { fill: #0d1117 }
}
"""


def plan_picture(plan: Plan, in_turn: Sequence[str]) -> str:
    """Return a plan as the text of an SVG file. ``in_turn`` are the components that run one after the other."""
    return _Picture(plan, in_turn).text()


@dataclass(frozen=True, slots=True)
class _Label:
    """What stands beside a column for one of its bands: a line with a swatch, and lines below it."""

    middle: float
    swatch: str
    name: str
    size: str
    below: tuple[tuple[str, str], ...] = ()
    is_component: bool = False

    @property
    def height(self) -> int:
        return _LINE * (1 + len(self.below))


class _Picture:
    """The measures that all parts of one picture share, and the parts."""

    def __init__(self, plan: Plan, in_turn: Sequence[str]) -> None:
        self.plan = plan
        self.phases = phases_of(plan, in_turn)
        self.stacks = stacks_of(plan, in_turn)
        self.names = [assignment.component for assignment in plan.assignments]
        self.stack_width = max(_STACK, _PHASE * len(self.phases))
        self.height = _LEAST_HEIGHT
        labels = [self._labels(stack, 0) for stack in self.stacks]
        self.height = max([_LEAST_HEIGHT, *(sum(label.height for label in column) for column in labels)])
        self.label_width = _width_of(label for column in labels for label in column)
        self.head = _NAME + (_LINE if any(map(_description, self.stacks)) else 0)
        self.rows = math.ceil(len(self.stacks) / _PER_ROW)
        self.per_row = math.ceil(len(self.stacks) / self.rows)
        self.panel_width = self.stack_width + _BESIDE + self.label_width
        self.panel_height = self.head + self.height + _MARKS
        self.width = max(_LEAST_WIDTH, self.per_row * (self.panel_width + _GAP) - _GAP) + 2 * _PAD

    def text(self) -> str:
        """The whole file."""
        heading, top = self._heading()
        panels: list[str] = []
        for index, stack in enumerate(self.stacks):
            row, column = divmod(index, self.per_row)
            x, y = _PAD + column * (self.panel_width + _GAP), top + row * (self.panel_height + _GAP)
            panels += self._device(stack, x, y)
        legend, height = self._legend(top + self.rows * (self.panel_height + _GAP) - _GAP + _BESIDE)
        lines = [
            _opening(self.width, height),
            f'<title id="dm-title">{_escaped(f"Plan of {self.plan.pipeline} on {self.plan.machine}")}</title>',
            f'<desc id="dm-desc">{_escaped(self._in_words())}</desc>',
            f"<style>{_STYLE}</style>",
            *self._patterns(),
            f'<rect class="paper" width="{_n(self.width)}" height="{_n(height)}"/>',
            *heading,
            *panels,
            *legend,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def _heading(self) -> tuple[list[str], float]:
        """What the picture is of, in lines that keep to its width, and where the devices begin below it."""
        plan, numbered = self.plan, [f"{index} {name}" for index, name in enumerate(self.phases, 1)]
        within = [name for name in self.names if name not in self.phases]
        sentences = [placing(plan), estimate(plan)]
        sentences += [f"phases of a generation: {', '.join(numbered)}"] if numbered else []
        sentences += [f"within others: {', '.join(within)}"] if within else []
        room = int((self.width - 2 * _PAD) / _CHAR)
        lines = [line for sentence in sentences for line in textwrap.wrap(sentence, room)]
        y = _PAD + 14.0
        texts = [_text(_PAD, y, plan.pipeline, "title")]
        for line in lines:
            y += _LINE + 2
            texts.append(_text(_PAD, y, line, "soft"))
        return texts, y + 28

    def _device(self, stack: Stack, x: float, y: float) -> Iterator[str]:
        """One device: its name and budget, its column, the numbers of the phases, and labels beside it."""
        device, right = stack.device, x + self.panel_width
        floor = y + self.head + self.height
        top = floor - self._column_height(stack)
        yield f"<g><title>{_escaped(_sentence(stack))}</title>"
        yield _text(x, y + 12, device.id, "name")
        yield _text(right, y + 12, format_bytes(device.budget_bytes), "name end")
        if description := _description(stack):
            yield _text(x, y + 12 + _LINE, _shortened(description, int(self.panel_width / _CHAR)), "soft")
        if device.budget_bytes:
            yield from self._column(stack, x, floor)
        yield f'<rect class="frame" x="{_n(x)}" y="{_n(top)}" width="{self.stack_width}" height="{_n(floor - top)}"/>'
        yield from self._marks(stack, x, floor)
        yield from self._placed(self._labels(stack, floor), x + self.stack_width + _BESIDE, right, floor)
        yield "</g>"

    def _column(self, stack: Stack, x: float, floor: float) -> Iterator[str]:
        scale, width = self._scale(stack), self.stack_width
        height = stack.device.reserved_bytes * scale
        if height:
            top = floor - self._column_height(stack)
            yield _Box(x, top, width, height).drawn(_RESERVE, f"reserve {_size(stack.device.reserved_bytes)}")
        y = floor
        for block in stack.held:
            y -= block.nbytes * scale
            yield from self._block(block, x, y, width, scale)
        share = width / max(1, len(self.phases))
        for block in stack.visiting:
            at = x + share * (block.phase or 0)
            yield from self._block(block, at, y - block.nbytes * scale, share, scale)
        top = floor - self._column_height(stack) + height
        for index in range(1, len(self.phases)) if stack.runs else ():
            yield _line("phase", (x + share * index, top), (x + share * index, y))

    def _block(self, block: Block, x: float, y: float, width: float, scale: float) -> Iterator[str]:
        yield _Box(x, y, width, block.nbytes * scale).drawn(self._fill(block), _told(block))
        for _, nbytes in block.parts[:-1]:
            y += nbytes * scale
            yield _line("edge", (x, y), (x + width, y))

    def _marks(self, stack: Stack, x: float, floor: float) -> Iterator[str]:
        """The numbers of the phases below a column, filled where the device runs that phase's component."""
        share = self.stack_width / max(1, len(self.phases))
        for index in range(len(self.phases)) if stack.runs else ():
            runs, at = index in stack.runs, x + share * (index + 0.5)
            yield f'<circle class="{"on" if runs else "off"}" cx="{_n(at)}" cy="{_n(floor + 15)}" r="7"/>'
            yield _text(at, floor + 18.5, str(index + 1), f"mark {'inside' if runs else 'soft'}")

    def _labels(self, stack: Stack, floor: float) -> list[_Label]:
        """The labels of a column from the top down, each beside the middle of its band."""
        scale, device = self._scale(stack), stack.device
        held_top = floor - stack.held_bytes * scale
        top, peak = floor - self._column_height(stack), floor - device.used_bytes * scale
        low = top + device.reserved_bytes * scale
        labels: list[_Label] = []
        if device.reserved_bytes:
            labels.append(_Label((top + low) / 2, _RESERVE, "reserve", _size(device.reserved_bytes)))
        if not device.budget_bytes:
            labels.append(_Label(floor, "none", "may not be used", ""))
        if device.free_bytes:
            labels.append(_Label((low + peak) / 2, "none", "free", _size(device.free_bytes)))
        tallest_first = sorted(stack.visiting, key=lambda block: -block.nbytes)
        labels += [self._label(block, held_top - block.nbytes * scale / 2) for block in tallest_first]
        y = held_top
        for block in reversed(stack.held):
            labels.append(self._label(block, y + block.nbytes * scale / 2))
            y += block.nbytes * scale
        return labels

    def _label(self, block: Block, middle: float) -> _Label:
        below = [(_shortened(name, _LONGEST_NAME), _size(nbytes)) for name, nbytes in block.parts]
        if block.brought:
            below.append((block.brought, ""))
        name = _shortened(block.component, _LONGEST_NAME)
        return _Label(middle, self._fill(block), name, _size(block.nbytes), tuple(below), is_component=True)

    def _placed(self, labels: Sequence[_Label], x: float, right: float, floor: float) -> Iterator[str]:
        """Labels at their places: beside their bands where there is room, and never over one another."""
        for label, y in zip(labels, _spread(labels, floor - self.height, floor), strict=True):
            yield _swatch(x, y + 3, label.swatch)
            yield _text(x + _SWATCH, y + 12, label.name, "name" if label.is_component else "")
            yield _text(right, y + 12, label.size, "end")
            for index, (name, size) in enumerate(label.below, 1):
                yield _text(x + _SWATCH, y + 12 + _LINE * index, name, "soft")
                if size:
                    yield _text(right, y + 12 + _LINE * index, size, "soft end")

    def _legend(self, y: float) -> tuple[list[str], float]:
        """What the fillings mean, and the scale; also returns the height of the whole picture."""
        blocks = [block for stack in self.stacks for block in (*stack.held, *stack.visiting)]
        shown = [(_GREY, "there all the time")]
        shown += [("url(#dm-brought)", "brought, in its phase")] if any(block.brought for block in blocks) else []
        reserved = any(stack.device.reserved_bytes for stack in self.stacks)
        shown += [(_RESERVE, "kept for activations")] if reserved else []
        shown += [("none", "free")]
        x, texts = float(_PAD), []
        for fill, name in shown:
            texts += [_swatch(x, y, fill), _text(x + _SWATCH, y + 9, name, "soft")]
            x += _SWATCH + len(name) * _CHAR + 20
        one_scale = "accelerators are drawn to one scale, others each to their own"
        scale = one_scale if self._one_scale() else "each device is drawn to its own scale"
        y += 13
        for sentence in (scale, "filled numbers: the device runs that phase"):
            y += _LINE
            texts.append(_text(_PAD, y, sentence, "soft"))
        return texts, y + _PAD

    def _patterns(self) -> Iterator[str]:
        yield "<defs>"
        for index in range(min(len(self.names), len(_COLOURS))):
            yield _hatching(f"dm-brought-{index}", _COLOURS[index])
        yield _hatching("dm-brought", _GREY)
        yield (
            '<pattern id="dm-reserve" width="5" height="5" patternUnits="userSpaceOnUse">'
            '<rect class="paper" width="5" height="5"/><circle class="dot" cx="2" cy="2" r="0.8"/></pattern>'
        )
        yield "</defs>"

    def _fill(self, block: Block) -> str:
        index = self.names.index(block.component) % len(_COLOURS)
        return f"url(#dm-brought-{index})" if block.brought else _COLOURS[index]

    def _budgets(self) -> list[int]:
        return [s.device.budget_bytes for s in self.stacks if is_accelerator(s.device.id) and s.device.budget_bytes]

    def _one_scale(self) -> bool:
        budgets = self._budgets()
        return bool(budgets) and max(budgets) <= _ONE_SCALE * min(budgets)

    def _scale(self, stack: Stack) -> float:
        """Pixels per byte."""
        own = is_accelerator(stack.device.id) and self._one_scale()
        return self.height / max(1, max(self._budgets()) if own else stack.device.budget_bytes)

    def _column_height(self, stack: Stack) -> float:
        return stack.device.budget_bytes * self._scale(stack)

    def _in_words(self) -> str:
        return "; ".join(filter(None, [estimate(self.plan), *map(_sentence, self.stacks)]))


def _width_of(labels: Iterable[_Label]) -> float:
    """The width that labels need: swatch, name and size, or swatch and a line below."""
    rows = [(name, size) for label in labels for name, size in ((label.name, label.size), *label.below)]
    chars = max((len(name) + (_SIZE_CHARS if size else 0) for name, size in rows), default=0)
    return _SWATCH + max(chars, _LEAST_CHARS) * _CHAR


def _description(stack: Stack) -> str:
    """What a device is, where that says more than its name."""
    return "" if stack.device.description == "stated" else stack.device.description


def _spread(labels: Sequence[_Label], top: float, bottom: float) -> list[float]:
    """Where each label begins: as near to its band as the order and the others allow, within top and bottom."""
    places: list[float] = []
    y = top
    for label in labels:
        y = max(y, label.middle - _LINE / 2)
        places.append(y)
        y += label.height
    for index in range(len(labels) - 1, -1, -1):
        places[index] = min(places[index], bottom - labels[index].height)
        bottom = places[index]
    return places


def _sentence(stack: Stack) -> str:
    device = stack.device
    held = [_told(block) for block in (*stack.held, *stack.visiting)]
    rest = [(device.reserved_bytes, "reserve"), (device.free_bytes, "free")]
    more = [f"{_size(nbytes)} {word}" for nbytes, word in rest if nbytes]
    return f"{device.id} of {_size(device.budget_bytes)}: {', '.join([*held, *more]) or 'nothing'}"


def _told(block: Block) -> str:
    phase = f" in phase {block.phase + 1}" if block.phase is not None else ""
    return f"{block.component} {_size(block.nbytes)}{f', {block.brought}{phase}' if block.brought else ''}"


def _opening(width: float, height: float) -> str:
    size = f'width="{_n(width)}" height="{_n(height)}" viewBox="0 0 {_n(width)} {_n(height)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="dm-title dm-desc" lang="en">'


def _hatching(name: str, colour: str) -> str:
    return (
        f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect class="paper" width="6" height="6"/><rect width="3" height="6" fill="{colour}"/></pattern>'
    )


@dataclass(frozen=True, slots=True)
class _Box:
    """A rectangle by its upper left corner."""

    x: float
    y: float
    width: float
    height: float

    def drawn(self, fill: str, title: str) -> str:
        """Return it filled; ``title`` is what a pointer over it shows. What is too flat to be seen is drawn taller."""
        height = max(self.height, _LEAST_BLOCK)
        y = self.y + self.height - height
        place = f'x="{_n(self.x)}" y="{_n(y)}" width="{_n(self.width)}" height="{_n(height)}"'
        return f'<rect class="edge" {place} fill="{fill}"><title>{_escaped(title)}</title></rect>'


def _swatch(x: float, y: float, fill: str) -> str:
    return f'<rect class="frame" x="{_n(x)}" y="{_n(y)}" width="10" height="10" style="fill:{fill}"/>'


def _line(kind: str, start: tuple[float, float], end: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line class="{kind}" x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"/>'


def _text(x: float, y: float, words: str, kind: str) -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text{kind} x="{_n(x)}" y="{_n(y)}">{_escaped(words)}</text>'


def _escaped(words: str) -> str:
    """Words as text of an XML file, which holds no control characters."""
    return html.escape("".join(letter if letter.isprintable() else " " for letter in words))


def _shortened(words: str, length: int) -> str:
    """Words with an ellipsis in their middle where they are longer than so many letters."""
    if len(words) <= length:
        return words
    return f"{words[: length // 2]}…{words[len(words) - (length - 1 - length // 2) :]}"


def _size(nbytes: int) -> str:
    return format_bytes(nbytes)


def _n(number: float) -> str:
    """A number of pixels, with a tenth at most."""
    return f"{round(number, 1):g}"
