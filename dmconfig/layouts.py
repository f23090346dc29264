"""Layouts of well-known components, packaged, so that one can plan how to split what is not on this disk.

One file per pipeline under ``data/layouts``, read when it is asked for, as trees of element counts:
``{"transformer_blocks": {"repeat": 19, "of": {"norm1.linear": 28320768}}}``. Of two counts in a list the first stays
float32 at any dtype. They are made of the packaged configs by ``make layouts``, and a test holds them against these.

Components of transformers, whose weights' names are not those of their modules, stand in one file by what their config
says, whichever pipeline they are of: so one that is on this disk is known too, if its config is one of these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dmconfig.catalog import find_pipeline
from dmconfig.files import DATA
from dmconfig.footprint import kept_in_fp32
from dmconfig.layout import Layout, layout_of_tensors

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
BY_CONFIG = "by-config.json"
_SAYS_NOTHING = ("_name_or_path", "_commit_hash", "architectures", "dtype", "torch_dtype", "transformers_version")
"""Entries of a config that do not change what is built of it."""


def packaged_layout(hub_id: str, component: str, class_name: str, dtype: str) -> Layout | None:
    """Return the layout of a pipeline's diffusers component at dtype.

    None where none is packaged for that class and dtype.
    """
    pipeline = find_pipeline(hub_id)
    if pipeline is None or dtype not in _BYTES:
        return None
    entry = _read(file_name(pipeline.hub_id)).get(component)
    return _layout(entry, dtype) if entry is not None and entry["class"] == class_name else None


def layout_by_config(
    config: Mapping[str, Any], class_name: str, dtype: str, *, members: Collection[str], keep_in_fp32: tuple[str, ...]
) -> Layout | None:
    """Return the layout at dtype of a component of transformers with this config, or None where none is packaged.

    Args:
        members: those of the installed class; where they are others than those of the layout, it is not of this
            version of transformers.
        keep_in_fp32: what ``fp32_patterns`` returned for the class and dtype.
    """
    entry = _read(BY_CONFIG).get(fingerprint(config, class_name)) if dtype in _BYTES else None
    if entry is None or not {*entry["modules"], ""} <= {*members, ""}:
        return None
    return _layout(entry, dtype, keep_in_fp32)


def fingerprint(config: Mapping[str, Any], class_name: str) -> str:
    """Return the same for configs of which a class builds the same."""
    text = json.dumps([class_name, _telling(config)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _telling(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _telling(inner) for key, inner in value.items() if key not in _SAYS_NOTHING}


def _read(name: str) -> Mapping[str, Any]:
    file = DATA / "layouts" / name
    try:
        entries: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return entries


def _layout(entry: Mapping[str, Any], dtype: str, keep_in_fp32: tuple[str, ...] = ()) -> Layout:
    counts = [*unfold(entry["modules"])]
    sizes = [(f"{path}.weight" if path else "weight", count) for path, count in counts]
    order = dict.fromkeys(path.split(".")[0] for path, _ in counts)
    return layout_of_tensors(
        ((name, _bytes(count, "float32" if kept_in_fp32(name, keep_in_fp32) else dtype)) for name, count in sizes),
        order=[*order],
        can_split=entry["can_split"],
        ties=entry.get("ties", {}),
        whole=entry.get("whole", ()),
    )


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
