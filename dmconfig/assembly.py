"""What a pipeline is made of: the spec laid over its source, as one list of components.

An ``Assembly`` is what measuring, planning and building work from. Making one reads small JSON files and the facts
of classes; it reads no weights, asks no machine, and imports neither torch nor diffusers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dmconfig.errors import Code, DMConfigError, Problem, SpecError, nearest
from dmconfig.facts import (
    ClassFacts,
    ComponentSlot,
    PipelineFacts,
    class_facts,
    fits,
    is_module_class,
    is_scheduler_class,
    known_pipelines,
    pipeline_facts,
)
from dmconfig.paths import ConfigPath
from dmconfig.resolve import Resolved
from dmconfig.source import (
    CONFIG_FILES,
    INDEX_FILE,
    Entry,
    PipelineIndex,
    Source,
    locate_source,
    model_class_in,
    read_index,
)
from dmconfig.spec import ComponentSpec, Spec

DENOISER_NAMES = ("transformer", "unet", "prior", "decoder", "dit")
"""What diffusers calls the model that runs once per step, most usual first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One component that will be loaded.

    ``folder`` holds its config and weights, or is None for a hub source of which that is not on this machine yet.
    ``subfolder`` is the one asked for; None leaves it to the kind of source.
    ``variant_required`` tells a variant asked for this component from one asked for the whole pipeline, which
    components without such files do without. ``path`` is where the file speaks of it.
    """

    name: str
    library: str
    class_name: str
    facts: ClassFacts = field(repr=False)
    source: Source
    folder: Path | None
    subfolder: str | None = None
    variant: str | None
    variant_required: bool
    dtype: str
    config: Mapping[str, Any] | None = None
    path: ConfigPath

    @property
    def is_module(self) -> bool:
        """Whether it has weights, and so a place."""
        return is_module_class(self.facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A pipeline class and its components, in the order of its signature; ``absent`` are optional ones left out."""

    class_name: str
    source: Source
    facts: PipelineFacts = field(repr=False)
    components: tuple[Component, ...]
    absent: tuple[str, ...]
    config: Mapping[str, Any]

    @property
    def modules(self) -> tuple[Component, ...]:
        """The components that have weights, and so a place."""
        return tuple(component for component in self.components if component.is_module)

    @property
    def in_turn(self) -> tuple[str, ...]:
        """The components that run one after the other, each done before the next, as the class says of itself.

        Others, such as a controlnet, run within another's phase. A class that says nothing runs all in turn.
        """
        return self.facts.model_cpu_offload_seq or tuple(component.name for component in self.modules)

    @property
    def denoiser(self) -> str:
        """The component that runs once per step: its device is where latents and embeddings live."""
        names = [component.name for component in self.modules]
        return next((name for name in DENOISER_NAMES if name in names), names[-1] if names else "")


def assemble(resolved: Resolved, spec: Spec) -> Assembly:
    """Return what the pipeline of spec is made of.

    Raises: SpecError: the source, the pipeline class, or any component is missing, unknown or unfit; all at once.
    """
    source, index = _pipeline_source(resolved, spec)
    facts = _pipeline_class(resolved, spec, index)
    problems = [*_unknown_components(resolved, spec, facts)]
    components: list[Component] = []
    absent: list[str] = []
    for slot in facts.slots:
        try:
            component = _component(slot, resolved, spec, source, index)
        except DMConfigError as error:
            problems.extend(error.problems)
            continue
        if component is None:
            absent.append(slot.name)
        else:
            problems.extend(_unfit(slot, component, resolved, facts))
            components.append(component)
    if problems:
        raise SpecError(problems)
    config = {name: value for name, value in index.config.items() if name in facts.config_parameters}
    return Assembly(
        class_name=facts.class_name,
        source=source,
        facts=facts,
        components=tuple(components),
        absent=tuple(absent),
        config=config,
    )


def unknown_component(resolved: Resolved, path: ConfigPath, name: str, facts: PipelineFacts) -> Problem:
    """Return the problem of a component name that the pipeline class does not have, found at path."""
    names = [slot.name for slot in facts.slots]
    meant = nearest(name, names)
    what = f"{name!r} is not a component of {facts.class_name}"
    fix = (
        f"did you mean {meant!r}?"
        if meant
        else "remove it, or name the pipeline class that has it under pipeline.class"
    )
    return resolved.problem(
        Code.UNKNOWN_COMPONENT, path, what, why=f"its components are: {', '.join(names)}", fix=fix, key=True
    )


def _pipeline_source(resolved: Resolved, spec: Spec) -> tuple[Source, PipelineIndex]:
    path: ConfigPath = ("pipeline", "source")
    try:
        folder = resolved.folder_of(path)
        source = locate_source(spec.pipeline.source, folder=folder, revision=spec.pipeline.revision)
        return source, read_index(source)
    except DMConfigError as error:
        raise _placed(error, resolved, path) from None


def _pipeline_class(resolved: Resolved, spec: Spec, index: PipelineIndex) -> PipelineFacts:
    asked = spec.pipeline.class_name
    name = asked or index.class_name
    facts = pipeline_facts(name)
    if facts is not None:
        return facts
    path: ConfigPath = ("pipeline", "class") if asked else ("pipeline", "source")
    meant = nearest(name, known_pipelines(), cutoff=0.7)
    what = f"the installed diffusers has no pipeline class {name!r}"
    why = "" if asked else f"{INDEX_FILE} of the source names it"
    fix = f"did you mean {meant!r}?" if meant else "upgrade diffusers, or name another class under pipeline.class"
    raise SpecError([resolved.problem(Code.UNKNOWN_CLASS, path, what, why=why, fix=fix)])


def _unknown_components(resolved: Resolved, spec: Spec, facts: PipelineFacts) -> Iterator[Problem]:
    known = {slot.name for slot in facts.slots}
    for name in spec.components:
        if name not in known:
            yield unknown_component(resolved, ("components", name), name, facts)


def _component(
    slot: ComponentSlot, resolved: Resolved, spec: Spec, source: Source, index: PipelineIndex
) -> Component | None:
    """Return the component for slot, or None where an optional one is left out.

    Raises: DMConfigError: it is required and missing, its source is not there, or its class is unknown.
    """
    named = slot.name in spec.components
    asked = spec.components.get(slot.name)
    listed = index.entries.get(slot.name)
    if asked is None and (named or listed is None):
        if not slot.optional:
            raise SpecError([_missing(slot, resolved, left_out=named)])
        return None
    asked = asked or _AS_THE_PIPELINE
    path: ConfigPath = ("components", slot.name) if named else ("pipeline", "source")
    place, folder = _place_of(slot.name, asked, resolved, source)
    entry = _entry(asked, listed, folder)
    if entry is None:
        what = f"which class {slot.name!r} is cannot be told from its source"
        fix = f"add components.{slot.name}.class"
        raise SpecError([resolved.problem(Code.MISSING_KEY, path, what, fix=fix)])
    facts = class_facts(entry.library, entry.class_name)
    if facts is None:
        raise SpecError([_unknown_class(slot, entry, resolved, path)])
    return Component(
        name=slot.name,
        library=entry.library,
        class_name=entry.class_name,
        facts=facts,
        source=place,
        folder=folder,
        subfolder=asked.subfolder,
        variant=asked.variant or spec.pipeline.variant,
        variant_required=asked.variant is not None,
        dtype=asked.dtype or spec.pipeline.dtype,
        config=asked.config,
        path=path,
    )


_AS_THE_PIPELINE = ComponentSpec()


def _missing(slot: ComponentSlot, resolved: Resolved, *, left_out: bool) -> Problem:
    if left_out:
        path: ConfigPath = ("components", slot.name)
        what, fix = f"{slot.name!r} is null, and the pipeline cannot do without it", "remove the line"
    else:
        path = ("pipeline", "source")
        what = f"the source has no {slot.name!r}, which the pipeline class requires"
        fix = f"add components.{slot.name} with a source and a class"
    return resolved.problem(Code.MISSING_COMPONENT, path, what, fix=fix)


def _place_of(name: str, asked: ComponentSpec, resolved: Resolved, pipeline: Source) -> tuple[Source, Path | None]:
    """Return where a component comes from, and the folder with its config (None when only the hub has it)."""
    if asked.source is None:
        folder = pipeline.folder / (asked.subfolder or name) if pipeline.folder else None
        if folder is not None and not folder.is_dir():
            if pipeline.hub_id:
                return pipeline, None  # to be completed
            fix = "the copy of the pipeline is not whole; copy it again, or give the component a source"
            raise SpecError([_no_folder(name, folder, resolved, ("pipeline", "source"), fix)])
        return pipeline, folder
    path: ConfigPath = ("components", name, "source")
    try:
        source = locate_source(asked.source, folder=resolved.folder_of(path), revision=asked.revision)
    except DMConfigError as error:
        raise _placed(error, resolved, path) from None
    return source, _model_folder(name, asked, source, resolved, path)


def _model_folder(name: str, asked: ComponentSpec, source: Source, resolved: Resolved, path: ConfigPath) -> Path | None:
    if source.folder is None:
        return None
    if asked.subfolder:
        folder = source.folder / asked.subfolder
    elif (source.folder / INDEX_FILE).is_file():
        folder = source.folder / name
    else:
        folder = source.folder
    if any((folder / config).is_file() for config in CONFIG_FILES):
        return folder
    if source.hub_id:
        return None  # to be completed
    fix = "name the folder that holds its config.json, with source and subfolder"
    raise SpecError([_no_folder(name, folder, resolved, path, fix)])


def _no_folder(name: str, folder: Path, resolved: Resolved, path: ConfigPath, fix: str) -> Problem:
    what = f"{folder} does not hold {name!r}"
    return resolved.problem(Code.SOURCE_NOT_FOUND, path, what, fix=fix)


def _entry(asked: ComponentSpec, listed: Entry | None, folder: Path | None) -> Entry | None:
    """Return library and class: as asked, else as the component's own config says, else as the pipeline says."""
    class_name = asked.class_name or (model_class_in(folder) if asked.source and folder else None)
    if class_name is None or (listed is not None and listed.class_name == class_name):
        return listed
    library = next((name for name in ("diffusers", "transformers") if class_facts(name, class_name)), "diffusers")
    return Entry(library=library, class_name=class_name)


def _unknown_class(slot: ComponentSlot, entry: Entry, resolved: Resolved, path: ConfigPath) -> Problem:
    path = (*path, "class") if path[0] == "components" else path
    meant = nearest(entry.class_name, slot.types)
    what = f"neither diffusers nor transformers, as installed, has a class {entry.class_name!r} for {slot.name!r}"
    fix = f"did you mean {meant!r}?" if meant else f"upgrade the library, or give {slot.name!r} another class"
    return resolved.problem(Code.UNKNOWN_CLASS, path, what, fix=fix)


def _unfit(slot: ComponentSlot, component: Component, resolved: Resolved, facts: PipelineFacts) -> Iterator[Problem]:
    """What the file asks of a component that its class cannot be or do."""
    in_components = component.path[0] == "components"
    if not fits(slot, component.facts):
        path = (*component.path, "class") if in_components else component.path
        what = f"{component.class_name} cannot be the {slot.name!r} of {facts.class_name}"
        fix = f"give components.{slot.name} one of these classes"
        yield resolved.problem(Code.CLASS_MISMATCH, path, what, why=f"it takes: {', '.join(slot.types)}", fix=fix)
    if component.config and not is_scheduler_class(component.facts):
        what = f"config values for {slot.name!r} are not supported yet; only a scheduler takes them"
        yield resolved.problem(Code.NOT_SUPPORTED_YET, (*component.path, "config"), what, key=True)
    written = resolved.data["components"][slot.name] if in_components else {}
    for key in ("dtype", "variant"):
        if key in written and not component.is_module:
            what = f"{slot.name!r} has no weights, so {key} means nothing for it"
            yield resolved.problem(Code.NOT_A_MODULE, (*component.path, key), what, fix="remove the line", key=True)


def _placed(error: DMConfigError, resolved: Resolved, path: ConfigPath) -> SpecError:
    """Return error's problems as found at path of the file."""
    location, origin = resolved.place(path)
    return SpecError([replace(p, path=path, location=location, origin=origin) for p in error.problems])
