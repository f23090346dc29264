"""What a pipeline is made of: the spec laid over its source, as one list of components.

An ``Assembly`` is what measuring, planning and building work from. Making one reads small JSON files and the facts
of classes; it reads no weights, asks no machine, and imports neither torch nor diffusers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dmconfig.adapters import Adapter, changed_components, locate_adapters, unplaceable_adapters
from dmconfig.catalog import find_pipeline
from dmconfig.checkpoint import FileHeaders, asked_of_hub, part_of, pipeline_told_by, tensors_of
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
    known_schedulers,
    pipeline_facts,
)
from dmconfig.inputs import SEED, Argument, arguments_at
from dmconfig.paths import ConfigPath
from dmconfig.quantization import refused_by_backend
from dmconfig.resolve import Resolved
from dmconfig.source import (
    CONFIG_FILES,
    INDEX_FILE,
    NO_CODE,
    Entry,
    PipelineIndex,
    Source,
    is_local,
    is_whole_pipeline,
    locate_source,
    model_class_in,
    read_index,
)
from dmconfig.spec import ComponentSpec, QuantizationSpec, Spec
from dmconfig.switches import refused_by_switches

LIBRARIES = ("diffusers", "transformers")

PIPELINE = "pipeline"
"""What the pipeline of the file is called beside those of ``pipelines``."""
DENOISER_NAMES = ("transformer", "unet", "prior", "decoder", "dit")
"""What diffusers calls the model that runs once per step, most usual first."""
_MOTION_ADAPTER = "motion_adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One component that will be loaded.

    ``folder`` holds its config and weights, or is None for a hub source of which that is not on this machine yet.
    ``subfolder`` is the one asked for; None leaves it to the kind of source. Where ``source`` is one file of weights,
    ``config_source`` is where its config comes from, and ``folder`` holds that; ``shares_file``: the file is the
    pipeline's, with the weights of others.
    ``variant_required`` tells a variant asked for this component from one asked for the whole pipeline, which
    components without such files do without. ``path`` is where the file speaks of it. ``takes_in`` is another
    component whose weights the pipeline's constructor copies into this one.
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
    asked: ComponentSpec = field(default_factory=ComponentSpec, repr=False)
    quantization: QuantizationSpec | None = None
    parts: tuple[Component, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    takes_in: str | None = None
    config_source: Source | None = None
    shares_file: bool = False
    allows_pickle: bool = False

    @property
    def home(self) -> Source:
        """Where its config comes from."""
        return self.config_source or self.source

    @property
    def is_single_file(self) -> bool:
        """Whether its weights are in one file, by itself or with those of others, and not beside its config."""
        return self.source.file is not None

    @property
    def is_module(self) -> bool:
        """Whether it has weights, and so a place."""
        return is_module_class(self.facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """One more pipeline on the components of an assembly."""

    name: str
    facts: PipelineFacts = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A pipeline class and its components, in the order of its signature; ``absent`` are optional ones left out.

    ``sharing`` are the other pipelines made of them; components that only those have come last.
    """

    class_name: str
    source: Source
    facts: PipelineFacts = field(repr=False)
    components: tuple[Component, ...]
    absent: tuple[str, ...]
    config: Mapping[str, Any]
    sharing: tuple[Sharing, ...] = ()
    adapters: tuple[Adapter, ...] = ()

    def facts_of(self, pipeline: str) -> PipelineFacts:
        """Return the facts of one of its pipelines: ``PIPELINE`` or the name of another."""
        return next((each.facts for each in self.sharing if each.name == pipeline), self.facts)

    def call_of(self, spec: Spec, pipeline: str) -> dict[str, Argument]:
        """Return the arguments that the file gives to the call of one of its pipelines.

        Of another than the first: its own, and those of the first that its class takes.
        """
        first = arguments_at(("call",), spec.call)
        if pipeline == PIPELINE:
            return first
        taken = {SEED, *(parameter.name for parameter in self.facts_of(pipeline).call)}
        own = arguments_at(("pipelines", pipeline, "call"), spec.pipelines[pipeline].call)
        return {**{name: argument for name, argument in first.items() if name in taken}, **own}

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of components that its pipelines can have."""
        classes = (self.facts, *(each.facts for each in self.sharing))
        return tuple(dict.fromkeys(slot.name for facts in classes for slot in facts.slots))

    @property
    def loaded(self) -> Iterator[Component]:
        """What is loaded one by one: the components, and of those that are several models each of them."""
        for component in self.components:
            yield from component.parts or (component,)

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


def assemble(resolved: Resolved, spec: Spec, hub: FileHeaders | None = None) -> tuple[Assembly, tuple[Problem, ...]]:
    """Return what the pipeline of spec is made of, and what is wrong with its components.

    A component that is missing, unknown or cannot be located is among the problems and not in the assembly, so that
    other rules can be held against the rest. ``hub`` is asked what files of weights hold that are not here.

    Raises: SpecError: the source or the pipeline class is missing or unknown.
    """
    source, file, index = _pipeline_source(resolved, spec, hub)
    facts = _pipeline_class(resolved, spec, index)
    sharing, problems = _sharing(resolved, spec)
    class_path: ConfigPath = ("pipeline", "class" if spec.pipeline.class_name else "source")
    classes: dict[ConfigPath, PipelineFacts] = {
        class_path: facts,
        **{("pipelines", each.name, "class"): each.facts for each in sharing},
    }
    problems += _unknown_components(resolved, spec, *classes.values())
    assemblers = [_Assembler(resolved, spec, source, file, index, each, path, hub) for path, each in classes.items()]
    found, unfit = _components(assemblers)
    adapters, wrong = locate_adapters(resolved, spec, facts)
    assembly = Assembly(
        class_name=facts.class_name,
        source=source,
        facts=facts,
        components=tuple(component for component in found.values() if component is not None),
        absent=tuple(name for name, component in found.items() if component is None),
        config={name: value for name, value in index.config.items() if name in facts.config_parameters},
        sharing=sharing,
        adapters=adapters,
    )
    if not wrong:
        wrong = [*_unplaceable(resolved, spec, assembly)]
        assembly = _with_changes(assembly)
    return assembly, (*problems, *unfit, *wrong)


def _unplaceable(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """What adapters are put on must be there; an image encoder that the file leaves out by name is left out."""
    names = [component.name for component in assembly.modules]
    without = [name for name, asked in spec.components.items() if asked is None]
    types = {slot.name: slot.types for slot in assembly.facts.slots}
    image_encoder = next(iter(types.get("image_encoder", ())), "CLIPVisionModelWithProjection")
    yield from unplaceable_adapters(
        resolved, assembly.adapters, names, assembly.denoiser, without=without, image_encoder=image_encoder
    )


def _with_changes(assembly: Assembly) -> Assembly:
    """The assembly, with components that adapters change kept from resting in their files."""
    names = [component.name for component in assembly.modules]
    changed = dict(changed_components(assembly.adapters, names, assembly.denoiser))
    components = (
        replace(each, refused={**each.refused, "disk": changed[each.name]}) if each.name in changed else each
        for each in assembly.components
    )
    return replace(assembly, components=tuple(_with_motion(components)))


def _with_motion(components: Iterable[Component]) -> Iterator[Component]:
    """The components, with a UNet for pictures that is to make films known as what it becomes.

    Source: constructors of diffusers' AnimateDiff pipelines, which put a ``UNetMotionModel`` in its place, made of
    copies of it and of the motion adapter (``from_unet2d``). That class does not say which of its modules stay whole.
    """
    components = [*components]
    adapted = any(each.name == _MOTION_ADAPTER for each in components)
    why = f"its pipeline makes another UNet of it and {_MOTION_ADAPTER}"
    for each in components:
        if adapted and each.name == "unet" and each.class_name == "UNet2DConditionModel":
            refused = {**each.refused, "disk": f"{why}, which no file holds", "split": f"{why}, which stays whole"}
            yield replace(each, takes_in=_MOTION_ADAPTER, refused=refused)
        else:
            yield each


def _components(assemblers: Iterable[_Assembler]) -> tuple[dict[str, Component | None], list[Problem]]:
    """Return the components of all classes, each once, None where it is left out; and what is wrong with them."""
    found: dict[str, Component | None] = {}
    problems: list[Problem] = []
    tried: set[str] = set()
    for assembler in assemblers:
        for slot in assembler.facts.slots:
            try:
                if slot.name not in tried:
                    tried.add(slot.name)
                    found[slot.name] = component = assembler.component(slot)
                    problems += assembler.unfit(slot, component) if component else ()
                elif slot.name in found:
                    problems += assembler.unshared(slot, found[slot.name])
            except DMConfigError as error:
                problems += error.problems
    return found, problems


def unknown_component(resolved: Resolved, path: ConfigPath, facts: PipelineFacts, *more: str) -> Problem:
    """Return the problem of a component name that the pipeline class does not have; ``more`` are other known words."""
    name = str(path[-1]).partition(".")[0]  # a key of a device map may name a part
    names = [slot.name for slot in facts.slots]
    meant = nearest(name, [*names, *more])
    what = f"{name!r} is not a component of {facts.class_name}"
    why = f"its components are: {', '.join(names)}"
    fix = f"did you mean {meant!r}?" if meant else "remove it, or name the class that has it under pipeline.class"
    return resolved.problem(Code.UNKNOWN_COMPONENT, path, what, why=why, fix=fix, key=True)


def _pipeline_source(
    resolved: Resolved, spec: Spec, hub: FileHeaders | None
) -> tuple[Source, Source | None, PipelineIndex]:
    """Return where the pipeline's index and configs are, the one file of its weights if it is that, and the index."""
    path: ConfigPath = ("pipeline", "source")
    asked = spec.pipeline
    if asked.revision is not None and is_local(asked.source):
        raise SpecError([_needless_revision(resolved, ("pipeline", "revision"), asked.source)])
    try:
        folder, local_only = resolved.folder_of(path), asked.local_files_only
        source = locate_source(asked.source, folder=folder, revision=asked.revision, local_only=local_only)
        file = asked_of_hub(source, hub) if source.file is not None else None
        home = source if file is None else _home_of(file, resolved, spec)
        return home, file, read_index(home)
    except SpecError:
        raise
    except DMConfigError as error:
        raise SpecError(resolved.located(error.problems, path)) from None


def _home_of(file: Source, resolved: Resolved, spec: Spec) -> Source:
    """Return the pipeline whose configs and tokenizers go with a file of all weights: as asked, else as they tell."""
    asked, path = spec.pipeline, ("pipeline", "config")
    if file.is_gguf:
        what = f"{file.text} holds the weights of one component, not a pipeline"
        fix = (
            "name the pipeline here, and the file as the source of one of its components: components.transformer.source"
        )
        raise SpecError([resolved.problem(Code.NOT_A_PIPELINE, ("pipeline", "source"), what, fix=fix)])
    if asked.config is not None:
        return locate_config(resolved, path, asked.config, asked.config_revision, local_only=asked.local_files_only)
    tensors = tensors_of(file)
    told = pipeline_told_by(tensors) if tensors is not None else None
    if told is None:
        what = f"which pipeline the weights in {file.text} are of cannot be told from their names"
        fix = "add pipeline.config with the folder or hub id of a pipeline with the same configs and tokenizers"
        raise SpecError([resolved.problem(Code.CONFIG_NOT_FOUND, ("pipeline", "source"), what, fix=fix)])
    return locate_source(told, folder=resolved.folder_of(path), local_only=asked.local_files_only)


def locate_config(resolved: Resolved, path: ConfigPath, text: str, revision: str | None, *, local_only: bool) -> Source:
    """Return the folder or repository with the configs of a single file; ``path`` is where the spec names it.

    Raises: SpecError: it is not there, or is itself a file.
    """
    if revision is not None and is_local(text):
        raise SpecError([_needless_revision(resolved, (*path[:-1], "config_revision"), text)])
    try:
        source = locate_source(text, folder=resolved.folder_of(path), revision=revision, local_only=local_only)
    except DMConfigError as error:
        raise SpecError(resolved.located(error.problems, path)) from None
    if source.file is not None:
        what, fix = f"{text} is a file of weights, and a folder with configs is expected", "name its folder"
        raise SpecError([resolved.problem(Code.CONFIG_NOT_FOUND, path, what, fix=fix)])
    return source


def _needless_revision(resolved: Resolved, path: ConfigPath, source: str) -> Problem:
    what, fix = f"a revision is given, and {source} is a local folder", "remove the line, or name a hub id"
    return resolved.problem(Code.CONTRADICTION, path, what, fix=fix, key=True)


def _pipeline_class(resolved: Resolved, spec: Spec, index: PipelineIndex) -> PipelineFacts:
    asked = spec.pipeline.class_name
    name = asked or index.class_name
    facts = pipeline_facts(name)
    if facts is not None:
        return facts
    path: ConfigPath = ("pipeline", "class") if asked else ("pipeline", "source")
    why = "" if asked else f"{INDEX_FILE} of the source names it"
    raise SpecError([_unknown_pipeline(resolved, path, name, why)])


def _unknown_pipeline(resolved: Resolved, path: ConfigPath, name: str, why: str = "") -> Problem:
    meant = nearest(name, known_pipelines(), cutoff=0.7)
    what = f"the installed diffusers has no pipeline class {name!r}"
    otherwise = "upgrade diffusers, or name another class" if why else "name a pipeline's class, or remove the line"
    fix = f"did you mean {meant!r}?" if meant else otherwise
    return resolved.problem(Code.UNKNOWN_CLASS, path, what, why=why, fix=fix)


def _sharing(resolved: Resolved, spec: Spec) -> tuple[tuple[Sharing, ...], list[Problem]]:
    """Return the other pipelines of the file, and a problem for each whose class is not known."""
    sharing, problems = [], []
    for name, each in spec.pipelines.items():
        facts = pipeline_facts(each.class_name)
        if name == PIPELINE:
            what, fix = f"{name} is what the pipeline above is called", "give this one another name"
            problems.append(resolved.problem(Code.CONTRADICTION, ("pipelines", name), what, fix=fix, key=True))
        elif facts is None:
            problems.append(_unknown_pipeline(resolved, ("pipelines", name, "class"), each.class_name))
        else:
            sharing.append(Sharing(name=name, facts=facts))
    return tuple(sharing), problems


def _unknown_components(resolved: Resolved, spec: Spec, *classes: PipelineFacts) -> Iterator[Problem]:
    known = {slot.name for facts in classes for slot in facts.slots}
    for name in spec.components:
        if name not in known:
            yield unknown_component(resolved, ("components", name), classes[0], *known)


def _wrappers(slot: ComponentSlot) -> tuple[str, ...]:
    """The classes of a slot that wrap several models of another of its classes: ``MultiControlNetModel``."""
    return tuple(name for name in slot.types if "Multi" in name)


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a component's weights are, the folder with its config, and where that is, if somewhere else."""

    source: Source
    folder: Path | None
    config_source: Source | None
    shares_file: bool = False


def _class_at(name: str, origin: _Origin) -> str | None:
    """Return the class that a component's own config names, or the one that the catalogue knows."""
    if origin.folder is not None:
        return model_class_in(origin.folder)
    home = origin.config_source or origin.source
    known = find_pipeline(home.hub_id) if home.hub_id else None
    part = known.component(name) if known else None
    return part.class_name if part else None


@dataclass(frozen=True, slots=True)
class _Assembler:
    """Makes the components of one pipeline, each from what the file asks and what the source lists.

    ``place`` is that of a model in the list of those that are several in one place.
    """

    resolved: Resolved
    spec: Spec
    source: Source
    file: Source | None
    index: PipelineIndex
    facts: PipelineFacts
    class_path: ConfigPath
    hub: FileHeaders | None = None
    place: int | None = None

    def component(self, slot: ComponentSlot) -> Component | None:
        """Return the component for slot, or None where an optional one is left out.

        Raises: DMConfigError: it is required and missing, its source is not there, or its class is unknown.
        """
        name = slot.name
        listed = self.index.entries.get(name)
        asked = self.spec.components.get(name)
        left_out = name in self.spec.components and asked is None
        if left_out or (asked is None and listed is None):
            if not slot.optional:
                raise SpecError([self._missing(name, left_out=left_out)])
            return None
        asked = asked or ComponentSpec()
        if listed is not None and asked == ComponentSpec() and listed.class_name in _wrappers(slot):
            asked = self._saved_together(name)
        if isinstance(asked, tuple):
            return self._several(slot, asked)
        return self._one(slot, asked, listed)

    def _one(self, slot: ComponentSlot, asked: ComponentSpec, listed: Entry | None) -> Component | None:
        name = slot.name
        if listed is None and asked.source is None and not asked.subfolder:
            raise SpecError([self._nothing_listed(name)])
        origin = self._origin(name, asked, listed)
        entry = self._entry(name, asked, listed, origin)
        facts = class_facts(entry.library, entry.class_name)
        if facts is None:
            raise SpecError([self._unknown_class(slot, entry)])
        if self.file is not None and asked.source is None and is_module_class(facts):
            if not self._is_in_file(name, facts):
                if slot.optional and asked == ComponentSpec():
                    return None  # as diffusers leaves the safety checker out
                raise SpecError([self._not_in_file(name)])
            origin = _Origin(self.file, origin.folder, self.source, shares_file=True)
        return self._component(name, asked, entry, facts, origin)

    def _component(
        self, name: str, asked: ComponentSpec, entry: Entry, facts: ClassFacts, origin: _Origin
    ) -> Component:
        pipeline = self.spec.pipeline
        missing = asked.variant_missing or ("error" if asked.variant is not None else pipeline.variant_missing)
        reason = asked.allow_pickle or (pipeline.allow_pickle if asked.source is None else None)
        return Component(
            name=name,
            library=entry.library,
            class_name=entry.class_name,
            facts=facts,
            source=origin.source,
            folder=origin.folder,
            subfolder=asked.subfolder,
            variant=asked.variant or pipeline.variant,
            variant_required=missing == "error",
            dtype=asked.dtype or pipeline.dtype,
            config=asked.config_values,
            path=self._path(name),
            asked=asked,
            quantization=self.spec.quantization_of(name),
            refused={**refused_by_switches(asked), **refused_by_backend(self.spec.quantization_of(name))},
            config_source=origin.config_source,
            shares_file=origin.shares_file,
            allows_pickle=reason is not None,
        )

    def _several(self, slot: ComponentSlot, asked: tuple[ComponentSpec, ...]) -> Component:
        """Return the component that wraps several models, as the pipeline class makes it of a list.

        Raises: SpecError: the class takes one model only; or, of the models, as for one.
        """
        wrapper = next(iter(_wrappers(slot)), None)
        facts = class_facts("diffusers", wrapper) if wrapper else None
        if wrapper is None or facts is None or not asked:
            what = f"{self.facts.class_name} takes one {slot.name!r}, not a list"
            if wrapper is not None:
                what = f"the list of {slot.name!r} is empty"
            raise SpecError([self._problem(Code.WRONG_TYPE, slot.name, what, fix="name one model")])
        parts: list[Component] = []
        problems: list[Problem] = []
        listed = self.index.entries.get(slot.name)
        listed = None if listed is not None and listed.class_name == wrapper else listed
        for place, each in enumerate(asked):
            try:
                part = replace(self, place=place)._one(slot, each, listed)
                parts += [part] if part is not None else []
            except DMConfigError as error:
                problems.extend(error.problems)
        if problems:
            raise SpecError(problems)
        refused = {way: reason for part in parts for way, reason in part.refused.items()}
        return replace(
            parts[0],
            class_name=wrapper,
            library="diffusers",
            facts=facts,
            folder=None,
            path=self._path(slot.name),
            asked=ComponentSpec(),
            parts=tuple(parts),
            refused=refused,
        )

    def _saved_together(self, name: str) -> ComponentSpec | tuple[ComponentSpec, ...]:
        """What a pipeline saved with several models in one place has: folders ``controlnet``, ``controlnet_1``, ..."""
        folder = self.source.folder
        if folder is None:
            return ComponentSpec()
        names = [name, *(f"{name}_{index}" for index in range(1, len(list(folder.iterdir()))))]
        there = itertools.takewhile(lambda each: (folder / each).is_dir(), names)
        return tuple(ComponentSpec(subfolder=each) for each in there)

    def _is_in_file(self, name: str, facts: ClassFacts) -> bool:
        """Tell whether the pipeline's one file has weights of a component; what cannot be looked into has all."""
        tensors = tensors_of(self.file) if self.file is not None else None
        return tensors is None or bool(part_of(name, facts, tensors))

    def unshared(self, slot: ComponentSlot, component: Component | None) -> Iterator[Problem]:
        """Yield why this class cannot have a component that another one has, or does without."""
        if component is not None:
            yield from self._mismatch(slot, component)
        elif not slot.optional:
            yield self._missing(slot.name, left_out=slot.name in self.spec.components)

    def unfit(self, slot: ComponentSlot, component: Component) -> Iterator[Problem]:
        """Yield what the file asks of a component that its class cannot be or do."""
        name = component.name
        for place, part in enumerate(component.parts):
            yield from replace(self, place=place).unfit(slot, part)
        if component.parts:
            return
        mismatches = [*self._mismatch(slot, component)]
        yield from mismatches
        if not mismatches and self._holds_another_class(component):
            held = model_class_in(component.folder) if component.folder else ""
            what = f"the source of {name!r} holds {held}, and {component.class_name} is asked for"
            fix = f"give components.{name} the source of one, or remove class"
            yield self._problem(Code.SOURCE_CLASS_DIFFERS, name, what, "class", fix=fix)
        yield from self._config_names(component)
        for key in ("dtype", "variant"):
            if not component.is_module and key in self._written(name):
                what = f"{name!r} has no weights, so {key} means nothing for it"
                yield self._problem(Code.NOT_A_MODULE, name, what, key, fix="remove the line", key=True)

    def _mismatch(self, slot: ComponentSlot, component: Component) -> Iterator[Problem]:
        """Yield a problem when a component's class is none that the pipeline's class takes there."""
        name = component.name
        if not fits(slot, component.facts):
            what = f"{component.class_name} cannot be the {name!r} of {self.facts.class_name}"
            types = "any scheduler" if "scheduler" in name else ", ".join(slot.types)
            fix = f"give components.{name} another class or source"
            yield self._problem(Code.CLASS_MISMATCH, name, what, "class", "source", why=f"it takes: {types}", fix=fix)

    def _config_names(self, component: Component) -> Iterator[Problem]:
        """Only a scheduler takes config values, and only those its class knows; upstream drops others in silence."""
        path = (*component.path, "config")
        if component.config and not is_scheduler_class(component.facts):
            what = f"config values for {component.name!r} are not supported yet; only a scheduler takes them"
            yield self.resolved.problem(Code.NOT_SUPPORTED_YET, path, what, fix="remove them", key=True)
            return
        known = component.facts.init_parameters
        for key in component.config or ():
            if key not in known:
                meant = nearest(key, known)
                what = f"{component.class_name} has no config value {key!r}"
                fix = f"did you mean {meant!r}?" if meant else f"it has: {', '.join(known)}"
                yield self.resolved.problem(Code.UNKNOWN_KEY, (*path, key), what, fix=fix, key=True)

    def _holds_another_class(self, component: Component) -> bool:
        """Tell whether a diffusers model of one class is to be loaded from a folder of another.

        Schedulers are made for it, and a transformers config names the class that was trained, of which others
        share the weights (T5ForConditionalGeneration for T5EncoderModel).
        """
        if component.library != "diffusers" or not component.is_module or component.folder is None:
            return False
        held = model_class_in(component.folder)
        facts = class_facts("diffusers", held) if held else None
        return (
            facts is not None and held not in component.facts.ancestors and component.class_name not in facts.ancestors
        )

    def _origin(self, name: str, asked: ComponentSpec, listed: Entry | None) -> _Origin:
        """Return where a component comes from, and the folder with its config (None when only the hub has it)."""
        source = self.source if asked.source is None else self._own_source(name, asked)
        if source.file is not None:
            home = self._home(name, asked, listed)
            return _Origin(source, self._folder(name, asked, home), home)
        return _Origin(source, self._folder(name, asked, source), None)

    def _folder(self, name: str, asked: ComponentSpec, home: Source) -> Path | None:
        """Return the folder of a component in the source of its config."""
        if home.folder is None:
            return None
        in_pipeline = home is self.source or is_whole_pipeline(home)
        folder = home.folder / (asked.subfolder or (name if in_pipeline else ""))
        if any((folder / config).is_file() for config in CONFIG_FILES):
            return folder
        if home.hub_id:
            return None  # fetch completes it
        if asked.source is None and folder.is_dir():
            return folder  # a tokenizer without a config of its own
        raise SpecError([self._not_in(home.folder, folder, name)])

    def _home(self, name: str, asked: ComponentSpec, listed: Entry | None) -> Source:
        """Return where the config of a single file is: as asked, else the pipeline's own, else as its weights tell."""
        if asked.config_source is not None:
            path: ConfigPath = (*self._path(name), "config")
            text, local_only = asked.config_source, self._local_only(asked)
            return locate_config(self.resolved, path, text, asked.config_revision, local_only=local_only)
        if listed is None or asked.class_name not in (None, listed.class_name):
            what = f"the pipeline's source has no config of {name!r} for the weights in {asked.source}"
            fix = f"add components.{name}.config with the folder or hub id of a model that has the same config"
            raise SpecError([self._problem(Code.CONFIG_NOT_FOUND, name, what, "source", fix=fix)])
        return self.source

    def _local_only(self, asked: ComponentSpec) -> bool:
        own = asked.local_files_only
        return self.spec.pipeline.local_files_only if own is None else own

    def _own_source(self, name: str, asked: ComponentSpec) -> Source:
        path: ConfigPath = (*self._path(name), "source")
        text = asked.source or ""
        if asked.revision is not None and is_local(text):
            raise SpecError([_needless_revision(self.resolved, (*self._path(name), "revision"), text)])
        try:
            folder, local_only = self.resolved.folder_of(path), self._local_only(asked)
            source = locate_source(text, folder=folder, revision=asked.revision, local_only=local_only)
            return asked_of_hub(source, self.hub)
        except DMConfigError as error:
            raise SpecError(self.resolved.located(error.problems, path)) from None

    def _entry(self, name: str, asked: ComponentSpec, listed: Entry | None, origin: _Origin) -> Entry:
        """Return library and class: as asked, else as the component's own config says, else as the pipeline says."""
        elsewhere = asked.source is not None or asked.subfolder is not None
        class_name = asked.class_name or (_class_at(name, origin) if elsewhere else None)
        if listed is not None and class_name in (None, listed.class_name):
            return listed
        if class_name is None:
            what, fix = f"which class {name!r} is cannot be told from its source", f"add components.{name}.class"
            raise SpecError([self._problem(Code.MISSING_KEY, name, what, "source", fix=fix)])
        library = next((name for name in LIBRARIES if class_facts(name, class_name)), "diffusers")
        return Entry(library=library, class_name=class_name)

    # places and problems
    def _written(self, name: str) -> Mapping[str, Any]:
        """The keys that the file, or an override, writes for a component."""
        written = (self.resolved.data.get("components") or {}).get(name) or {}
        if isinstance(written, list):
            written = {} if self.place is None else written[self.place]
        return written if isinstance(written, dict) else {}

    def _path(self, name: str) -> ConfigPath:
        if name not in self.spec.components:
            return ("pipeline", "source")
        return ("components", name) if self.place is None else ("components", name, self.place)

    def _problem(
        self, code: Code, name: str, what: str, *keys: str, why: str = "", fix: str = "", key: bool = False
    ) -> Problem:
        """A problem at the first of keys that is written for the component, or where the component comes from."""
        written = next((word for word in keys if word in self._written(name)), None)
        path = (*self._path(name), written) if written else self._path(name)
        return self.resolved.problem(code, path, what, why=why, fix=fix, key=key)

    def _missing(self, name: str, *, left_out: bool) -> Problem:
        if left_out:
            what, fix = f"{name!r} is null, and the pipeline cannot do without it", "remove the line"
            return self._problem(Code.MISSING_COMPONENT, name, what, fix=fix)
        what = f"the source has no {name!r}, which {self.facts.class_name} requires"
        fix = f"add components.{name} with a source"
        return self.resolved.problem(Code.MISSING_COMPONENT, self.class_path, what, fix=fix)

    def _not_in_file(self, name: str) -> Problem:
        file = self.file.text if self.file is not None else ""
        what = f"{file} has no weights of {name!r}, which {self.facts.class_name} requires"
        fix = f"add components.{name} with a source of its own"
        path: ConfigPath = ("components", name) if name in self.spec.components else ("pipeline", "source")
        return self.resolved.problem(Code.MISSING_COMPONENT, path, what, fix=fix)

    def _nothing_listed(self, name: str) -> Problem:
        what = f"the pipeline's source leaves {name!r} out, so it needs a source of its own"
        return self._problem(Code.SOURCE_NOT_FOUND, name, what, fix=f"add source to components.{name}, or remove it")

    def _not_in(self, here: Path, folder: Path, name: str) -> Problem:
        what = f"{folder} is not there" if not folder.is_dir() else f"{folder} has no config of {name!r}"
        meant = nearest(folder.name, [entry.name for entry in here.iterdir() if entry.is_dir()])
        fix = f"did you mean {meant!r}?" if meant and meant != folder.name else "check source and subfolder"
        if not self._written(name).keys() & {"source", "subfolder"}:
            fix = f"the copy of the pipeline is not whole: copy it again, or give components.{name} a source"
        return self._problem(Code.SOURCE_NOT_FOUND, name, what, "subfolder", "source", fix=fix)

    def _unknown_class(self, slot: ComponentSlot, entry: Entry) -> Problem:
        if entry.library not in LIBRARIES:
            what = f"the source asks for {entry.library}.{entry.class_name} as {slot.name!r}"
            fix = f"give components.{slot.name} a class of diffusers or transformers, and a source"
            return self._problem(Code.CODE_NOT_TRUSTED, slot.name, what, "class", why=NO_CODE, fix=fix)
        known = known_schedulers() if "scheduler" in slot.name else slot.types
        meant = nearest(entry.class_name, known)
        what = f"neither diffusers nor transformers, as installed, has a class {entry.class_name!r} for {slot.name!r}"
        fix = f"did you mean {meant!r}?" if meant else f"upgrade the library, or give {slot.name!r} another class"
        return self._problem(Code.UNKNOWN_CLASS, slot.name, what, "class", fix=fix)
