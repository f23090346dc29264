"""Facts by name: from this process's memory, else from the cache folder, else from source."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from dmconfig.facts.cache import read_cached, write_cached
from dmconfig.facts.installed import Library, installed_libraries
from dmconfig.facts.records import (
    CallParameter,
    ClassFacts,
    CodeFiles,
    Json,
    PipelineFacts,
    class_from_data,
    class_to_data,
    pipeline_from_data,
    pipeline_to_data,
)

if TYPE_CHECKING:  # what reads source is imported only when the cache has no answer
    from dmconfig.facts.source import Sources


def pipeline_facts(class_name: str, blocks: str | None = None) -> PipelineFacts | None:
    """Return what the installed diffusers' pipeline class says of itself; None when it exports no such pipeline.

    ``blocks`` is the class of a modular pipeline's blocks; None, or one that diffusers has no blocks of: the
    pipeline's default.
    """
    if not class_name.isidentifier():
        return None
    if class_name.endswith("ModularPipeline"):
        return _modular(installed_libraries(), class_name, blocks if blocks and blocks.isidentifier() else None)
    return _pipeline(installed_libraries(), class_name)


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


def own_pipeline_facts(code: CodeFiles, class_name: str) -> PipelineFacts | None:
    """Return what a pipeline class in code of no library says of itself; read, not run. None: there is none."""

    def read() -> Json:
        from dmconfig.facts.reading import read_own_pipeline

        facts = read_own_pipeline(_sources_with(libraries, code), code.module, class_name)
        return None if facts is None else pipeline_to_data(facts)

    libraries = installed_libraries()
    data = _remembered(libraries, f"own.pipeline.{code.package}.{code.files[0].module}.{class_name}", read)
    return None if data is None else pipeline_from_data(data)


def own_class_facts(code: CodeFiles, class_name: str) -> ClassFacts | None:
    """Return what a component's class in code of no library says of itself; read, not run. None: there is none."""

    def read() -> Json:
        from dmconfig.facts.reading import read_own_class

        facts = read_own_class(_sources_with(libraries, code), code.module, class_name)
        return None if facts is None else class_to_data(facts)

    libraries = installed_libraries()
    data = _remembered(libraries, f"own.class.{code.package}.{code.files[0].module}.{class_name}", read)
    return None if data is None else class_from_data(data)


def own_method_parameters(code: CodeFiles, class_name: str, method: str) -> tuple[CallParameter, ...] | None:
    """Return the named parameters of a method, as ``method_parameters``, of a class in code of no library."""
    from dmconfig.facts.reading import read_own_method

    return read_own_method(_sources_with(installed_libraries(), code), code.module, class_name, method)


def own_pipelines(code: CodeFiles) -> tuple[str, ...]:
    """Return the names of the pipeline classes that the first file of code defines, in the order written."""

    def read() -> Json:
        from dmconfig.facts.reading import pipelines_of_module

        return [*pipelines_of_module(_sources_with(libraries, code), code.module)]

    libraries = installed_libraries()
    return tuple(_remembered(libraries, f"own.pipelines.{code.package}.{code.files[0].module}", read))


def known_pipelines() -> tuple[str, ...]:
    """Return the names of all pipelines the installed diffusers exports, sorted; empty when it is not installed."""
    return _known(installed_libraries(), "DiffusionPipeline")


def known_modular_pipelines() -> tuple[str, ...]:
    """Return the names of all modular pipelines the installed diffusers exports, sorted."""
    return _known_modular(installed_libraries())


def known_schedulers() -> tuple[str, ...]:
    """Return the names of all schedulers the installed diffusers exports, sorted; empty when it is not installed."""
    return _known(installed_libraries(), "SchedulerMixin")


def method_parameters(library: str, class_name: str, method: str) -> tuple[CallParameter, ...] | None:
    """Return the named parameters of a method of a component's class; None when it has no such method."""
    if not all(word.isidentifier() for word in (library, class_name, method)):
        return None
    return _method(installed_libraries(), library, class_name, method)


def dataclass_fields(class_name: str) -> tuple[CallParameter, ...] | None:
    """Return the fields of a dataclass that diffusers exports; None when there is none of this name."""
    return _fields(installed_libraries(), class_name) if class_name.isidentifier() else None


def known_attention_backends() -> tuple[str, ...]:
    """Return the words that ``set_attention_backend`` of the installed diffusers takes, as written there."""
    return _backends(installed_libraries())


def classes_with_original_config() -> tuple[str, ...]:
    """Return the classes that the installed diffusers makes a config for from one of the model's authors, sorted."""
    return _mapped(installed_libraries())


@cache
def _mapped(libraries: tuple[Library, ...]) -> tuple[str, ...]:
    def read() -> Json:
        from dmconfig.facts.reading import read_mapped_classes

        return [*read_mapped_classes(_sources(libraries))]

    return tuple(_remembered(libraries, "original_config", read))


@cache
def _method(
    libraries: tuple[Library, ...], library: str, class_name: str, method: str
) -> tuple[CallParameter, ...] | None:
    def read() -> Json:
        from dmconfig.facts.reading import read_method

        return _listed(read_method(_sources(libraries), library, class_name, method))

    return _parameters(_remembered(libraries, f"method.{library}.{class_name}.{method}", read))


@cache
def _fields(libraries: tuple[Library, ...], class_name: str) -> tuple[CallParameter, ...] | None:
    def read() -> Json:
        from dmconfig.facts.reading import read_fields

        return _listed(read_fields(_sources(libraries), class_name))

    return _parameters(_remembered(libraries, f"fields.{class_name}", read))


@cache
def _backends(libraries: tuple[Library, ...]) -> tuple[str, ...]:
    def read() -> Json:
        from dmconfig.facts.reading import read_members

        return [*read_members(_sources(libraries), "diffusers.models.attention_dispatch", "AttentionBackendName")]

    return tuple(_remembered(libraries, "attention_backends", read))


def _listed(parameters: tuple[CallParameter, ...] | None) -> Json:
    return None if parameters is None else [[each.name, each.required, each.default] for each in parameters]


def _parameters(data: Any) -> tuple[CallParameter, ...] | None:
    return None if data is None else tuple(CallParameter(*each) for each in data)


@cache
def _pipeline(libraries: tuple[Library, ...], class_name: str) -> PipelineFacts | None:
    data = _remembered(libraries, f"pipeline.{class_name}", lambda: _read_pipeline(libraries, class_name))
    return None if data is None else pipeline_from_data(data)


@cache
def _modular(libraries: tuple[Library, ...], class_name: str, blocks: str | None) -> PipelineFacts | None:
    entry = f"modular.{class_name}.{blocks or ''}"
    data = _remembered(libraries, entry, lambda: _read_modular(libraries, class_name, blocks))
    return None if data is None else pipeline_from_data(data)


@cache
def _known_modular(libraries: tuple[Library, ...]) -> tuple[str, ...]:
    def read() -> Json:
        from dmconfig.facts.modular import known_modular

        return [*known_modular(_sources(libraries))]

    return tuple(_remembered(libraries, "known.modular", read))


@cache
def _class(libraries: tuple[Library, ...], library: str, class_name: str) -> ClassFacts | None:
    data = _remembered(libraries, f"class.{library}.{class_name}", lambda: _read_class(libraries, library, class_name))
    return None if data is None else class_from_data(data)


@cache
def _known(libraries: tuple[Library, ...], base: str) -> tuple[str, ...]:
    return tuple(_remembered(libraries, f"known.{base}", lambda: _read_known(libraries, base)))


def _remembered(libraries: tuple[Library, ...], entry: str, read: Callable[[], Json]) -> Any:
    """Return the cached entry, else what read returns, which is cached: that there is no such class, too."""
    if (cached := read_cached(libraries, entry)) is not None:
        return cached["found"]
    found = read()
    write_cached(libraries, entry, {"found": found})
    return found


def _read_pipeline(libraries: tuple[Library, ...], class_name: str) -> Json:
    from dmconfig.facts.reading import read_pipeline

    facts = read_pipeline(_sources(libraries), class_name)
    return None if facts is None else pipeline_to_data(facts)


def _read_modular(libraries: tuple[Library, ...], class_name: str, blocks: str | None) -> Json:
    from dmconfig.facts.modular import read_modular

    facts = read_modular(_sources(libraries), class_name, blocks, class_facts)
    return None if facts is None else pipeline_to_data(facts)


def _read_class(libraries: tuple[Library, ...], library: str, class_name: str) -> Json:
    from dmconfig.facts.reading import read_class

    facts = read_class(_sources(libraries), library, class_name)
    return None if facts is None else class_to_data(facts)


def _read_known(libraries: tuple[Library, ...], base: str) -> Json:
    from dmconfig.facts.reading import read_exported_descendants

    return [*read_exported_descendants(_sources(libraries), base)]


@lru_cache(maxsize=16)
def _sources_with(libraries: tuple[Library, ...], code: CodeFiles) -> Sources:
    """Return the parsed source of the libraries and of code beside them."""
    from dmconfig.facts.source import SourcesWithCode

    return SourcesWithCode(_sources(libraries), code)


@cache
def _sources(libraries: tuple[Library, ...]) -> Sources:
    """Return the parsed source shared by all cold lookups of this process."""
    from dmconfig.facts.source import Sources

    return Sources(libraries)
