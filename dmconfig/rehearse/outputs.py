"""What came out of a rehearsed call, held against what was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dmconfig.check import COUNTS
from dmconfig.plan.calls import FRAMES

_MADE = ("images", "videos", "frames", "audio", "latents")
"""What modular pipelines call what they make, the last step's first."""
_CHANNELS: Mapping[str, int] = {"pt": -3, "np": -1}
"""Where arrays have their channels; pictures have none."""


def shape_of_result(result: Any) -> tuple[int, ...]:
    """Return the shape of what a pipeline returned: pictures, frames or embeddings."""
    if isinstance(result, (list, tuple)):
        return _shape_of(result[0])
    if isinstance(result.values, Mapping):  # the state of a modular pipeline, with all that its blocks made
        return _shape_of(next(result.values[name] for name in _MADE if result.values.get(name) is not None))
    return _shape_of(next(iter(result.values())))


def _shape_of(value: Any) -> tuple[int, ...]:
    if hasattr(value, "shape"):
        return tuple(int(size) for size in value.shape)
    if isinstance(value, (list, tuple)):
        return (len(value), *_shape_of(value[0])) if value else (0,)
    width, height = value.size  # a picture
    return (height, width)


def oddity(output: tuple[int, ...], given: Mapping[str, Any]) -> str:
    """Return where what came out is not what was asked for; nothing where latents were asked for."""
    kind = given.get("output_type", "pil")
    sizes = [*output]
    if kind not in ("pil", *_CHANNELS) or len(sizes) < 3:
        return ""
    if kind in _CHANNELS:
        del sizes[_CHANNELS[kind]]
    came_out = " x ".join(map(str, output))
    for asked, came, what in _compared(sizes, given):
        if asked != came:
            return f"{asked} {what} were asked for, and what came out is {came_out}"
    return ""


def _compared(sizes: list[int], given: Mapping[str, Any]) -> Iterator[tuple[int, int, str]]:
    """What was asked for, what came, and of what: pictures, frames, rows and columns, those that were asked for."""
    frames = next((given[name] for name in FRAMES if isinstance(given.get(name), int)), None)
    counts = [given[name] for name in COUNTS if isinstance(given.get(name), int)]
    if frames is not None and len(sizes) > 3:
        yield frames, sizes[-3], "frames"
    elif frames is not None and frames > 1:
        yield frames, 1, "frames"
    for name, place, what in (("height", -2, "rows"), ("width", -1, "columns")):
        if isinstance(given.get(name), int):
            yield given[name], sizes[place], what
    if counts:
        prompts = given.get("prompt")
        yield counts[0] * (len(prompts) if isinstance(prompts, list) else 1), sizes[0], "pictures"
