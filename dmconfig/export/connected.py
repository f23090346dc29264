"""The pipelines that a live pipeline is made of beside its source, told by where their components came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dmconfig.export.sources import Home, home_of, index_of, noted_home
from dmconfig.facts import pipeline_facts
from dmconfig.source import PipelineIndex


def connected_homes(pipe: Any) -> dict[str, Home]:
    """Return where the connected pipelines of a combined one are, by the prefix of their components.

    That is where a component with the prefix lies under the name that it has without it, in a folder that is a
    pipeline.
    """
    facts = pipeline_facts(type(pipe).__name__)
    prefixes = facts.connected if facts is not None else ()
    found = ((prefix, next(_homes(pipe, prefix), None)) for prefix in prefixes)
    return {prefix: home for prefix, home in found if home is not None}


def _homes(pipe: Any, prefix: str) -> Iterator[Home]:
    for name, component in pipe.components.items():
        home = noted_home(component) if name.startswith(f"{prefix}_") else None
        if home is not None and f"{prefix}_{home.folder.name}" == name:
            above = home_of(str(home.folder.parent))
            if above is not None and index_of(above) is not None:
                yield above


def with_connected(index: PipelineIndex | None, homes: Mapping[str, Home]) -> PipelineIndex | None:
    """Return an index with the components of connected pipelines, under the names that they have in it."""
    if index is None:
        return None
    entries = dict(index.entries)
    for prefix, home in homes.items():
        there = index_of(home)
        entries |= {f"{prefix}_{name}": entry for name, entry in there.entries.items()} if there else {}
    return replace(index, entries=entries)
