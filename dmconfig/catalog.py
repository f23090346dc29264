"""Sizes and classes of well-known pipelines, packaged, so that one can plan a pipeline that is not on this disk.

The figures and where they come from stand in ``data/catalog.json`` (its key ``about``). Weights that are on disk
are always measured instead; a pipeline that is not here has no size until it is downloaded.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from dmconfig.files import DATA

if TYPE_CHECKING:
    from dmconfig.footprint import Footprint


class CatalogComponent(NamedTuple):
    """One entry of a pipeline's model_index.json.

    The sizes are those of ``Footprint``, by dtype (``float32``, ``float16``, ``bfloat16``), and empty for what has no
    weights (schedulers, tokenizers), whose ``stored_dtype`` is None.
    """

    name: str
    library: str
    class_name: str
    stored_dtype: str | None
    bytes_by_dtype: Mapping[str, int]
    largest_leaf_bytes: Mapping[str, int]
    largest_block_bytes: Mapping[str, int]
    outside_blocks_bytes: Mapping[str, int]

    @property
    def is_module(self) -> bool:
        """Whether it has weights to place."""
        return self.stored_dtype is not None

    def footprint(self, dtype: str | None) -> Footprint | None:
        """Return its footprint at dtype (None: as stored); None when the catalogue has no figure for it."""
        if self.stored_dtype is None:
            return None
        target = dtype or self.stored_dtype
        if target not in self.bytes_by_dtype:
            return None
        from dmconfig.footprint import Footprint

        return Footprint(
            nbytes=self.bytes_by_dtype[target],
            dtype=target,
            stored_dtype=self.stored_dtype,
            largest_leaf_bytes=self.largest_leaf_bytes[target],
            largest_block_bytes=self.largest_block_bytes[target],
            outside_blocks_bytes=self.outside_blocks_bytes[target],
            needs_cast=target != self.stored_dtype,
            measured_from="catalogue",
        )


class CatalogPipeline(NamedTuple):
    """One pipeline: its canonical hub id, the other ids it is known by, its class, its components by name.

    Entries that the public model_index.json leaves empty (``image_encoder: [null, null]``) are not among them.
    """

    hub_id: str
    aliases: tuple[str, ...]
    class_name: str
    components: tuple[CatalogComponent, ...]

    def component(self, name: str) -> CatalogComponent | None:
        """Return the component of this name, or None."""
        return next((part for part in self.components if part.name == name), None)


def find_pipeline(hub_id: str) -> CatalogPipeline | None:
    """Return the pipeline of this hub id or alias, in the hub's own spelling; None when the catalogue has none."""
    canonical = _canonical_ids().get(hub_id)
    return None if canonical is None else _pipeline(canonical)


def known_ids() -> tuple[str, ...]:
    """Return every id that ``find_pipeline`` answers to, aliases too, sorted."""
    return tuple(sorted(_canonical_ids()))


@functools.cache
def _entries() -> dict[str, Any]:
    text = (DATA / "catalog.json").read_text(encoding="utf-8")
    pipelines: dict[str, Any] = json.loads(text)["pipelines"]
    return pipelines


@functools.cache
def _canonical_ids() -> dict[str, str]:
    entries = _entries()
    aliases = {alias: hub_id for hub_id, entry in entries.items() for alias in entry["aliases"]}
    return aliases | {hub_id: hub_id for hub_id in entries}


@functools.cache
def _pipeline(hub_id: str) -> CatalogPipeline:
    entry = _entries()[hub_id]
    components = tuple(_component(name, facts) for name, facts in entry["components"].items())
    return CatalogPipeline(
        hub_id=hub_id,
        aliases=tuple(entry["aliases"]),
        class_name=entry["class"],
        components=components,
    )


def _component(name: str, facts: dict[str, Any]) -> CatalogComponent:
    return CatalogComponent(
        name=name,
        library=facts["library"],
        class_name=facts["class"],
        stored_dtype=facts.get("stored_dtype"),
        bytes_by_dtype=MappingProxyType(facts.get("bytes", {})),
        largest_leaf_bytes=MappingProxyType(facts.get("largest_leaf_bytes", {})),
        largest_block_bytes=MappingProxyType(facts.get("largest_block_bytes", {})),
        outside_blocks_bytes=MappingProxyType(facts.get("outside_blocks_bytes", {})),
    )
