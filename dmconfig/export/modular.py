"""What a live modular pipeline makes itself, and what of that a spec has to say."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from dmconfig.facts import pipeline_facts
from dmconfig.source import PipelineIndex


def is_modular(pipe: Any) -> bool:
    """Tell whether a pipeline is made of blocks."""
    return "_blocks_class_name" in pipe.config


def blocks_make(pipe: Any) -> frozenset[str]:
    """Return the names of the components that its blocks made; of any other pipeline, none."""
    return frozenset(pipe.config_component_names) if is_modular(pipe) else frozenset()


def changes_of_made(pipe: Any, made: Collection[str]) -> dict[str, Any]:
    """Return class and config values of what blocks make and somebody has made otherwise since, as in a spec."""
    first = {spec.name: spec for spec in pipe.blocks.expected_components if spec.name in made} if made else {}
    return {name: keys for name, spec in first.items() if (keys := _changes(getattr(pipe, name), spec.create()))}


def _changes(live: Any, first: Any) -> dict[str, Any]:
    if not hasattr(live, "config"):
        return {}
    is_same = type(live) is type(first)
    before = dict(first.config) if is_same else {}
    values = {key: value for key, value in live.config.items() if not key.startswith("_")}
    changed = {key: value for key, value in values.items() if before.get(key, ...) != value}
    keys = {} if is_same else {"class": type(live).__name__}
    return keys | ({"config": changed} if changed else {})


def unknown_blocks(pipe: Any, index: PipelineIndex | None) -> Iterator[str]:
    """Blocks that a spec cannot name: they are neither those of the source's index nor the pipeline's own."""
    if not is_modular(pipe):
        return
    blocks = pipe.config["_blocks_class_name"]
    facts = pipeline_facts(type(pipe).__name__)
    own = facts.blocks if facts is not None else None
    if blocks not in (own, index.blocks if index is not None else None):
        yield f"how to say in a file that the blocks are {blocks}: those of {type(pipe).__name__} are {own}"
