"""Layouts of well-known components, packaged, so that one can plan how to split what is not on this disk.

One file per pipeline under ``data/layouts``, read when it is asked for, as trees of element counts:
``{"transformer_blocks": {"repeat": 19, "of": {"norm1.linear": 28320768}}}``. Of two counts in a list the first stays
float32 at any dtype. They are made of the packaged configs by ``make layouts``, and a test holds them against these.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterator, Mapping
from typing import Any

from dmconfig.catalog import find_pipeline
from dmconfig.layout import Layout, layout_of_tensors

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def packaged_layout(hub_id: str, component: str, class_name: str, dtype: str) -> Layout | None:
    """Return the layout of a pipeline's component at dtype, or None where none is packaged for that class and dtype."""
    pipeline = find_pipeline(hub_id)
    if pipeline is None or dtype not in _BYTES:
        return None
    file = importlib.resources.files("dmconfig").joinpath(f"data/layouts/{file_name(pipeline.hub_id)}")
    try:
        entry = json.loads(file.read_text(encoding="utf-8")).get(component)
    except FileNotFoundError:
        return None
    if entry is None or entry["class"] != class_name:
        return None
    counts = [*unfold(entry["modules"])]
    sizes = ((f"{path}.weight" if path else "weight", _bytes(count, dtype)) for path, count in counts)
    order = dict.fromkeys(path.split(".")[0] for path, _ in counts)
    return layout_of_tensors(sizes, order=[*order], can_split=entry["can_split"])


def file_name(hub_id: str) -> str:
    """Return the file of a pipeline's layouts: ``owner--name.json``."""
    return f"{hub_id.replace('/', '--')}.json"


def unfold(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | list[int]]]:
    """Yield the path of every module with weights, and its count of elements."""
    for name, value in tree.items():
        path = f"{prefix}.{name}" if prefix and name else prefix or name
        if not isinstance(value, Mapping):
            yield path, value
        elif "repeat" in value:
            for index in range(value["repeat"]):
                yield from unfold(value["of"], f"{path}.{index}")
        else:
            yield from unfold(value, path)


def fold(counts: Mapping[str, int | list[int]]) -> dict[str, Any]:
    """Return the tree of counts by path; the inverse of ``unfold``."""
    inner: dict[str, dict[str, int | list[int]]] = {}
    for path, count in counts.items():
        first, _, rest = path.partition(".")
        inner.setdefault(first, {})[rest] = count
    return {name: _folded(below) for name, below in inner.items()}


def _folded(counts: dict[str, int | list[int]]) -> Any:
    if [*counts] == [""]:
        return counts[""]
    below = fold(counts)
    members = [*below.values()]
    numbered = [*below] == [str(index) for index in range(len(below))]
    if numbered and len(members) > 1 and isinstance(members[0], dict) and all(m == members[0] for m in members):
        return {"repeat": len(members), "of": members[0]}
    return below


def _bytes(count: int | list[int], dtype: str) -> int:
    kept, cast = count if isinstance(count, list) else (0, count)
    return kept * 4 + cast * _BYTES[dtype]
