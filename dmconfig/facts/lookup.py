"""Facts by name: from this process's memory, else from the cache folder, else from source."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from dmconfig.facts.cache import read_cached, write_cached
from dmconfig.facts.installed import Library, installed_libraries
from dmconfig.facts.records import (
    ClassFacts,
    PipelineFacts,
    class_from_data,
    class_to_data,
    pipeline_from_data,
    pipeline_to_data,
)

if TYPE_CHECKING:  # a warm cache never needs ast, whose import costs as much as ten lookups
    from dmconfig.facts.source import Sources


def pipeline_facts(class_name: str) -> PipelineFacts | None:
    """Return what the installed diffusers' pipeline class says of itself; None when it exports no such pipeline."""
    return _pipeline(installed_libraries(), class_name) if class_name.isidentifier() else None


def class_facts(library: str, class_name: str) -> ClassFacts | None:
    """Return what a component's class says of itself; None when diffusers would not find it either.

    Args:
        library: as in model_index.json: ``diffusers``, ``transformers``, or a folder of diffusers' pipelines
            such as ``stable_diffusion``.
        class_name: a class that the library exports; former names that transformers still serves are followed.
    """
    if not (library.isidentifier() and class_name.isidentifier()):
        return None
    return _class(installed_libraries(), library, class_name)


def known_pipelines() -> tuple[str, ...]:
    """Return the names of all pipelines the installed diffusers exports, sorted; empty when it is not installed."""
    return _known(installed_libraries())


@cache
def _pipeline(libraries: tuple[Library, ...], class_name: str) -> PipelineFacts | None:
    entry = f"pipeline.{class_name}"
    if (data := read_cached(libraries, entry)) is not None:
        return pipeline_from_data(data)
    from dmconfig.facts.reading import read_pipeline

    if (facts := read_pipeline(_sources(libraries), class_name)) is not None:
        write_cached(libraries, entry, pipeline_to_data(facts))
    return facts


@cache
def _class(libraries: tuple[Library, ...], library: str, class_name: str) -> ClassFacts | None:
    entry = f"class.{library}.{class_name}"
    if (data := read_cached(libraries, entry)) is not None:
        return class_from_data(data)
    from dmconfig.facts.reading import read_class

    if (facts := read_class(_sources(libraries), library, class_name)) is not None:
        write_cached(libraries, entry, class_to_data(facts))
    return facts


@cache
def _known(libraries: tuple[Library, ...]) -> tuple[str, ...]:
    if (data := read_cached(libraries, "known_pipelines")) is not None:
        return tuple(data)
    from dmconfig.facts.reading import read_known_pipelines

    names = read_known_pipelines(_sources(libraries))
    write_cached(libraries, "known_pipelines", list(names))
    return names


@cache
def _sources(libraries: tuple[Library, ...]) -> Sources:
    """Return the parsed source shared by all cold lookups of this process."""
    from dmconfig.facts.source import Sources

    return Sources(libraries)
