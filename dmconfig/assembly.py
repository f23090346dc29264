"""What a pipeline is made of: the spec laid over its source, as one list of components.

An ``Assembly`` is what measuring, planning and building work from. Making one reads small JSON files and the facts
of classes; it reads no weights, asks no machine, and imports neither torch nor diffusers.
"""

from __future__ import annotations

import itertools
import re
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
    known_modular_pipelines,
    known_pipelines,
    known_schedulers,
    own_class_facts,
    pipeline_facts,
)
from dmconfig.inputs import SEED, Argument, arguments_at
from dmconfig.original_config import OriginalConfig, original_config, takes_original_config
from dmconfig.paths import ConfigPath, render_path
from dmconfig.quantization import refused_by_backend
from dmconfig.remote_code import (
    Asking,
    OwnCode,
    code_of_component,
    granted,
    pipeline_code,
    read_code,
    refused_by_code,
    require_commit,
)
from dmconfig.resolve import Resolved
from dmconfig.source import (
    CONFIG_FILES,
    INDEX_FILE,
    MODULAR_INDEX_FILE,
    NO_CODE,
    Entry,
    PipelineIndex,
    Place,
    Source,
    connected_pipeline,
    is_hub_source,
    is_local,
    is_whole_pipeline,
    locate_source,
    model_class_in,
    read_index,
)
from dmconfig.spec import ComponentSpec, QuantizationSpec, Spec
from dmconfig.switches import refused_by_switches

LIBRARIES = ("diffusers", "transformers")

MODULAR_BASE = "ModularPipeline"
"""The class that all modular pipelines are of, and by whose name theirs end."""

PIPELINE = "pipeline"
"""What the pipeline of the file is called beside those of ``pipelines``."""
DENOISER_NAMES = ("transformer", "unet", "prior", "decoder", "dit")
"""What diffusers calls the model that runs once per step, most usual first."""
_ENCODING = ("text_encoder", "image_encoder", "text_encoder_2", "notes_encoder", "continuous_encoder", "vae_encoder")
_DECODING = ("vae", "vq", "movq", "vocoder", "melgan")
"""What components are called that run before the denoiser, and after it."""
_MOTION_ADAPTER = "motion_adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One component that will be loaded.

    ``folder`` holds its config and weights, or is None for a hub source of which that is not on this machine yet.
    ``subfolder`` is the one asked for; None leaves it to the kind of source. Where ``source`` is one file of weights,
    ``config_source`` is where its config comes from, and ``folder`` holds that; ``shares_file``: the file is the
    pipeline's, with the weights of others. ``code``: its class is in code of its source, which the file grants.
    ``original_config``: its config is made from that of the model's authors, and ``folder`` is None.
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
    allows_code: bool = False
    code: OwnCode | None = field(default=None, repr=False)
    original_config: OriginalConfig | None = field(default=None, repr=False)

    @property
    def home(self) -> Source:
        """Where its config comes from."""
        return self.config_source or self.source

    @property
    def name_there(self) -> str:
        """What it is called where it comes from: the folder that it is in there."""
        return self.subfolder or self.name

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
class Made:
    """A component that the blocks of a modular pipeline make, of the class and with the values that the file gives.

    ``class_name`` is None for the class that the blocks have.
    """

    name: str
    class_name: str | None
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A pipeline class and its components, in the order of its signature; ``absent`` are optional ones left out.

    ``sharing`` are the other pipelines made of them; components that only those have come last. ``made`` are those
    that a modular pipeline makes itself and the file changes. ``code``: the class is in code of a source, which the
    file grants.
    """

    class_name: str
    source: Source
    facts: PipelineFacts = field(repr=False)
    components: tuple[Component, ...]
    absent: tuple[str, ...]
    config: Mapping[str, Any]
    sharing: tuple[Sharing, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    made: tuple[Made, ...] = ()
    code: OwnCode | None = field(default=None, repr=False)

    @property
    def own_code(self) -> Iterator[OwnCode]:
        """The code that its sources bring along: that of the pipeline's class, then those of components."""
        yield from (each for each in (self.code, *(part.code for part in self.loaded)) if each is not None)

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

        Others, such as a controlnet, run within another's phase. A class that says nothing is taken to run all of
        them, in ``assumed_order``.
        """
        return self.facts.model_cpu_offload_seq or assumed_order(component.name for component in self.modules)

    @property
    def denoiser(self) -> str:
        """The component that runs once per step: its device is where latents and embeddings live."""
        names = [component.name for component in self.modules]
        return next((name for name in DENOISER_NAMES if name in names), names[-1] if names else "")


def assumed_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return components in the order in which they are taken to run where their pipeline's class does not say.

    A prior comes before what it is for; what encodes before the denoiser, and that before what decodes. Within these
    they keep their order.
    """

    def rank(name: str) -> tuple[bool, int]:
        own = name.removeprefix("prior_")
        is_encoder = own.endswith(_ENCODING) or own.startswith(_ENCODING)
        return not name.startswith("prior_"), 0 if is_encoder else 2 if own.startswith(_DECODING) else 1

    return tuple(sorted(names, key=rank))


def order_notes(assembly: Assembly) -> Iterator[str]:
    """Yield a remark on the order of the components, where it is assumed."""
    if assembly.facts.model_cpu_offload_seq is None and len(assembly.in_turn) > 1:
        order = ", ".join(assembly.in_turn)
        yield f"{assembly.class_name} does not say in which order its components run; taken to be: {order}"


def assemble(resolved: Resolved, spec: Spec, hub: FileHeaders | None = None) -> tuple[Assembly, tuple[Problem, ...]]:
    """Return what the pipeline of spec is made of, and what is wrong with its components.

    A component that is missing, unknown or cannot be located is among the problems and not in the assembly, so that
    other rules can be held against the rest. ``hub`` is asked what files of weights hold that are not here.

    Raises: SpecError: the source or the pipeline class is missing or unknown.
    """
    source, file, index = _pipeline_source(resolved, spec, hub)
    facts, code = _pipeline_class(resolved, spec, source, index)
    index = _with_connected(resolved, spec, source, index, facts)
    sharing, problems = _sharing(resolved, spec)
    class_path: ConfigPath = ("pipeline", "class" if spec.pipeline.class_name else "source")
    classes: dict[ConfigPath, PipelineFacts] = {
        class_path: facts,
        **{("pipelines", each.name, "class"): each.facts for each in sharing},
    }
    problems += _unknown_components(resolved, spec, *classes.values())
    assemblers = [_Assembler(resolved, spec, source, file, index, each, path, hub) for path, each in classes.items()]
    found, unfit = _components(assemblers)
    made, unmade = _made(resolved, spec, facts)
    known = own_class_facts(code.files, code.class_name) if code else class_facts("diffusers", facts.class_name)
    adapters, wrong = locate_adapters(resolved, spec, facts, known.ancestors if known else frozenset())
    assembly = Assembly(
        class_name=facts.class_name,
        source=source,
        facts=facts,
        components=tuple(component for component in found.values() if component is not None),
        absent=tuple(name for name, component in found.items() if component is None),
        config={name: value for name, value in index.config.items() if name in facts.config_parameters},
        sharing=sharing,
        adapters=adapters,
        made=made,
        code=code,
    )
    if not wrong:
        wrong = [*_unplaceable(resolved, spec, assembly)]
        assembly = _with_changes(assembly)
    return assembly, (*problems, *unfit, *unmade, *wrong)


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


def _is_made(facts: PipelineFacts, spec: Spec, name: str) -> bool:
    """Tell whether a modular pipeline makes a component itself: its blocks do, and the file gives it no source."""
    asked = spec.components.get(name)
    return name in facts.made and not (isinstance(asked, ComponentSpec) and (asked.source or asked.subfolder))


def _made(resolved: Resolved, spec: Spec, facts: PipelineFacts) -> tuple[tuple[Made, ...], list[Problem]]:
    """Return what the file changes of the components that a modular pipeline makes itself, and what it may not."""
    made: list[Made] = []
    problems: list[Problem] = []
    for name, asked in spec.components.items():
        if not _is_made(facts, spec, name):
            continue
        slot = next(slot for slot in facts.slots if slot.name == name)
        wrong = [*_unmakeable(resolved, slot, asked)]
        if isinstance(asked, ComponentSpec) and not wrong:
            made.append(Made(name=name, class_name=asked.class_name, config=asked.config_values or {}))
        problems += wrong
    return tuple(made), problems


def _unmakeable(
    resolved: Resolved, slot: ComponentSlot, asked: ComponentSpec | tuple[ComponentSpec, ...] | None
) -> Iterator[Problem]:
    """What blocks cannot make: nothing, several, another kind of thing, or one with values that its class has not."""
    path: ConfigPath = ("components", slot.name)
    if not isinstance(asked, ComponentSpec):
        what = f"{slot.name!r} is made by the pipeline's blocks, which cannot do without it"
        yield resolved.problem(Code.UNFIT_FOR_MODULAR, path, what, fix="remove the line", key=True)
        return
    for key in asked.model_fields_set - {"class_name", "config"}:
        what = f"{slot.name!r} is made by the pipeline's blocks and loaded from nowhere, so {key} means nothing for it"
        fix = "remove the line, or give it a source; class and config change what is made"
        yield resolved.problem(Code.UNFIT_FOR_MODULAR, (*path, key), what, fix=fix, key=True)
    name = asked.class_name or next(iter(slot.types), "")
    facts = class_facts("diffusers", name)
    if facts is None or "ConfigMixin" not in facts.ancestors:
        what = f"diffusers makes no {name!r} of values in a config"
        yield resolved.problem(Code.UNFIT_FOR_MODULAR, path, what, fix=f"give components.{slot.name} a source")
    else:
        yield from unknown_config_values(resolved, (*path, "config"), asked.config_values, facts)


def left_out_notes(assembly: Assembly) -> Iterator[str]:
    """Yield a remark on what a modular pipeline is loaded without: which of its parts a call needs, the call tells."""
    names = [name for name in assembly.absent if name not in assembly.facts.made]
    if assembly.facts.is_modular and names:
        yield f"without {', '.join(names)}, for which the source names nothing: a call that needs one will fail"


def unknown_config_values(
    resolved: Resolved, path: ConfigPath, config: Mapping[str, Any] | None, facts: ClassFacts
) -> Iterator[Problem]:
    """Yield config values that a class does not know; upstream drops them in silence."""
    known = facts.init_parameters
    for key in config or ():
        if key not in known:
            meant = nearest(key, known)
            what = f"{facts.class_name} has no config value {key!r}"
            fix = f"did you mean {meant!r}?" if meant else f"it has: {', '.join(known)}"
            yield resolved.problem(Code.UNKNOWN_KEY, (*path, key), what, fix=fix, key=True)


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
        return home, file, read_index(home, modular=is_modular_class(asked.class_name))
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


def _pipeline_class(
    resolved: Resolved, spec: Spec, source: Source, index: PipelineIndex
) -> tuple[PipelineFacts, OwnCode | None]:
    own = pipeline_code(resolved, spec, source, index)
    if own is not None:
        return own
    asked = spec.pipeline.class_name
    name = asked or index.class_name
    facts = pipeline_facts(name, index.blocks if name == index.class_name else None)
    path: ConfigPath = ("pipeline", "class") if asked else ("pipeline", "source")
    if facts is not None and (asked or index.blocks in (None, facts.blocks)):
        return facts, None
    is_known = facts is not None or name in (MODULAR_BASE, *known_modular_pipelines())
    if index.blocks is not None and not asked and is_known:
        raise SpecError([_unknown_blocks(resolved, path, name, index.blocks, facts)])
    why = "" if asked else f"{MODULAR_INDEX_FILE if is_modular_class(name) else INDEX_FILE} of the source names it"
    raise SpecError([_unknown_pipeline(resolved, path, name, why)])


def _unknown_pipeline(resolved: Resolved, path: ConfigPath, name: str, why: str = "") -> Problem:
    known = known_modular_pipelines() if "Modular" in name else known_pipelines()
    meant = nearest(name, known, cutoff=0.7)
    what = f"the installed diffusers has no pipeline class {name!r}"
    if name.startswith("AutoPipelineFor"):
        what = f"{name} is no class of pipelines of its own: it chooses one by the class that a source names"
        return resolved.problem(
            Code.UNKNOWN_CLASS, path, what, fix="name the class that it chooses, or remove the line"
        )
    otherwise = "upgrade diffusers, or name another class" if why else "name a pipeline's class, or remove the line"
    fix = f"did you mean {meant!r}?" if meant else otherwise
    return resolved.problem(Code.UNKNOWN_CLASS, path, what, why=why, fix=fix)


def _unknown_blocks(
    resolved: Resolved, path: ConfigPath, name: str, blocks: str, facts: PipelineFacts | None
) -> Problem:
    """Blocks that cannot be had are not replaced by others without a word, as diffusers does."""
    what = f"the blocks of this {name} are {blocks}, of which the installed diffusers has none"
    why = "blocks that were put together in code are not in the folder"
    otherwise = "name a modular pipeline of diffusers under pipeline.class, whose own blocks are used then"
    fix = f"write class: {name} under pipeline, which takes its own, {facts.blocks}" if facts else otherwise
    return resolved.problem(Code.UNFIT_FOR_MODULAR, path, what, why=why, fix=fix)


def _with_connected(
    resolved: Resolved, spec: Spec, source: Source, index: PipelineIndex, facts: PipelineFacts
) -> PipelineIndex:
    """Return the index with the components of the pipelines that the class is made of beside its own.

    Raises: SpecError: one of them is needed and not named, or not there; or one is named that the class has not.
    """
    if unknown := [prefix for prefix in spec.pipeline.connected.named if prefix not in facts.connected]:
        raise SpecError([_not_connected(resolved, facts, prefix) for prefix in unknown])
    entries = dict(index.entries)
    for prefix in connected_parts(spec, index, facts):
        entries |= _entries_of(resolved, spec, source, facts, prefix)
    return replace(index, entries=entries)


def connected_parts(spec: Spec, index: PipelineIndex, facts: PipelineFacts) -> tuple[str, ...]:
    """Return which connected pipelines are needed: those that the file names, and those that nothing stands in for.

    A component that the source's own index has, or that the file gives, is not missing.
    """
    given = {*spec.components, *(name for name, entry in index.entries.items() if entry is not None)}
    missing = [slot.name for slot in facts.slots if not slot.optional and slot.name not in given]
    named = spec.pipeline.connected.named
    return tuple(each for each in facts.connected if each in named or any(n.startswith(f"{each}_") for n in missing))


def _entries_of(
    resolved: Resolved, spec: Spec, source: Source, facts: PipelineFacts, prefix: str
) -> dict[str, Entry | None]:
    """The components of a connected pipeline, under the names that they have here."""
    place = connected_place(spec, source, prefix)
    if place is None:
        what = f"{facts.class_name} has a {prefix} pipeline, and where that comes from is not told"
        why = f"neither by the file nor by the README.md of {spec.pipeline.source}"
        fix = f"add pipeline.connected: {{{prefix}: {{source: ...}}}} with its folder or hub id"
        raise SpecError([resolved.problem(Code.CONNECTED_NOT_TOLD, ("pipeline", "source"), what, why=why, fix=fix)])
    path = place.path or ("pipeline", "source")
    text, folder, local_only = place.source or "", resolved.folder_of(path), spec.pipeline.local_files_only
    if place.path is None and not is_hub_source(text):
        raise SpecError([_not_followed(resolved, f"the {prefix} pipeline", text, f"pipeline.connected.{prefix}")])
    if place.revision is not None and is_local(text):
        raise SpecError([_needless_revision(resolved, (*path[:-1], "revision"), text)])
    try:
        there = read_index(locate_source(text, folder=folder, revision=place.revision, local_only=local_only))
    except DMConfigError as error:
        raise SpecError(resolved.located(error.problems, path)) from None
    return {
        f"{prefix}_{name}": replace(entry, place=replace(place, subfolder=name)) if entry else None
        for name, entry in there.entries.items()
    }


def connected_place(spec: Spec, source: Source, prefix: str) -> Place | None:
    """Return where a connected pipeline is: as the file names it, else as the source's model card does."""
    asked = spec.pipeline.connected.named.get(prefix)
    if asked is not None:
        return Place(source=asked.source, revision=asked.revision, path=("pipeline", "connected", prefix, "source"))
    named = connected_pipeline(source.folder, prefix) if source.folder is not None else None
    return Place(source=named) if named else None


def _not_connected(resolved: Resolved, facts: PipelineFacts, prefix: str) -> Problem:
    what = f"{facts.class_name} has no connected pipeline {prefix!r}"
    fix = f"it has: {', '.join(facts.connected)}" if facts.connected else "remove it, or name a class that has one"
    return resolved.problem(Code.CONNECTED_NOT_TOLD, ("pipeline", "connected", prefix), what, fix=fix, key=True)


def _not_followed(resolved: Resolved, what_is: str, text: str, key: str) -> Problem:
    what = f"the pipeline's source has {what_is} at {text!r}, which is no hub id"
    why = "a path in a pipeline's files is one of the machine that wrote them, and is not followed"
    return resolved.problem(Code.OUTSIDE_SOURCE, ("pipeline", "source"), what, why=why, fix=f"give {key} a source")


def is_modular_class(name: str | None) -> bool:
    """Tell whether a name is one of a modular pipeline's class, by how diffusers names them."""
    return name is not None and name.endswith(MODULAR_BASE)


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


_SEVERAL = re.compile(r"Multi[A-Z]")
"""In the name of a class that wraps several models; ``MultilingualCLIP`` is one model."""


def _wrappers(slot: ComponentSlot) -> tuple[str, ...]:
    """The classes of a slot that wrap several models of another of its classes: ``MultiControlNetModel``."""
    return tuple(name for name in slot.types if len(slot.types) > 1 and _SEVERAL.search(name))


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a component's weights are, the folder with its config, and where that is, if somewhere else."""

    source: Source
    folder: Path | None
    config_source: Source | None
    shares_file: bool = False

    @property
    def home(self) -> Source:
        """Where the config is, and the code that it may name."""
        return self.config_source or self.source


def _class_at(name: str, origin: _Origin) -> str | None:
    """Return the class that a component's own config names, or the one that the catalogue knows."""
    if origin.folder is not None:
        return model_class_in(origin.folder)
    home = origin.home
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
        if listed is None and _is_made(self.facts, self.spec, name):
            return None
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
        place = listed.place if listed is not None and asked.source is None else None
        placed = self._placed(asked, place)
        origin = self._origin(name, placed, listed, place)
        entry = self._entry(name, asked, listed, origin)
        facts = class_facts(entry.library, entry.class_name)
        code = self._code(name, asked, entry, origin, is_known=facts is not None)
        if code is not None:
            facts = self._facts_of_code(name, code)
            entry = Entry(library=facts.library, class_name=code.class_name)
        if facts is None:
            raise SpecError([self._unknown_class(slot, entry, asked, origin)])
        if self.file is not None and placed.source is None and is_module_class(facts):
            if not self._is_in_file(name, facts):
                if slot.optional and asked == ComponentSpec():
                    return None  # as diffusers leaves the safety checker out
                raise SpecError([self._not_in_file(name)])
            origin = _Origin(self.file, origin.folder, self.source, shares_file=True)
        component = self._with_original_config(self._component(name, placed, entry, facts, origin))
        if code is None:
            return component
        return replace(component, code=code, refused={**refused_by_code(facts), **component.refused})

    def _code(
        self, name: str, asked: ComponentSpec, entry: Entry, origin: _Origin, *, is_known: bool
    ) -> OwnCode | None:
        """Return the code that a component's class is in, where it is in code of its source, and that is granted.

        Raises: SpecError: it is not; or, of what is on the hub, it is at no commit, or not on this machine.
        """
        home, asking = origin.home, self._asking(name, asked, origin)
        try:
            reference = code_of_component(entry, origin.folder, is_known=is_known)
            if reference is None and not is_known and origin.folder is None and asking.reason is not None:
                require_commit(self.resolved, asking, home)
                raise SpecError([self._code_not_here(name, entry, home)])
            if reference is None or origin.folder is None or not (reference.is_needed or asking.reason):
                return None
            folder, within = origin.folder, home.folder or origin.folder
            asking = replace(asking, class_name=reference.class_name)
            module = reference.module
            return granted(self.resolved, asking, home, module, lambda: read_code(folder, module, within=within))
        except SpecError:
            raise
        except DMConfigError as error:
            raise SpecError(self.resolved.located(error.problems, asking.path)) from None

    def _with_original_config(self, component: Component) -> Component:
        """The component, with the config of its authors where the file names one for it, or for the pipeline's file."""
        asked, path = component.asked, component.path
        text, revision = asked.original_config, asked.original_config_revision
        if text is None and component.shares_file and takes_original_config(component.facts):
            path = ("pipeline",)
            text, revision = self.spec.pipeline.original_config, self.spec.pipeline.original_config_revision
        if text is None or not component.is_single_file or component.source.is_gguf or not component.is_module:
            return component
        original = original_config(self.resolved, (*path, "original_config"), text, revision, component.facts)
        return replace(component, original_config=original, folder=None)

    def _asking(self, name: str, asked: ComponentSpec, origin: _Origin) -> Asking:
        """Who would run code of a component's source, and what would grant it: its own key, or the pipeline's."""
        is_pipelines = origin.home is self.source
        is_named = asked.trust_remote_code is not None or not is_pipelines
        section: ConfigPath = self._path(name) if is_named else ("pipeline",)
        of_config = self.file is not None if is_pipelines else origin.config_source is not None
        pinned = ("pipeline",) if is_pipelines else section
        return Asking(
            who=repr(name),
            class_name="",
            section=section,
            path=self._path(name) if is_pipelines else (*section, "config" if of_config else "source"),
            reason=asked.trust_remote_code or (self.spec.pipeline.trust_remote_code if is_pipelines else None),
            revision=(*pinned, "config_revision" if of_config else "revision"),
            otherwise=f"or give components.{name} a class of diffusers or transformers, and a source",
        )

    def _facts_of_code(self, name: str, code: OwnCode) -> ClassFacts:
        facts = own_class_facts(code.files, code.class_name)
        if facts is None:
            what = f"{code.names} has no class {code.class_name} that diffusers or transformers could load as {name!r}"
            why = "it is to be on ModelMixin, SchedulerMixin, ConfigMixin, PreTrainedModel or PreTrainedTokenizerBase"
            raise SpecError([self._problem(Code.BAD_CODE, name, what, "class", "source", why=why)])
        return facts

    def _code_not_here(self, name: str, entry: Entry, home: Source) -> Problem:
        what = f"{name!r} is {entry.class_name}, code of {home.text} that is not on this machine"
        fix = "load it once with load_from_yaml or dmconfig run, which download what they need"
        return self._problem(Code.SOURCE_NOT_FOUND, name, what, "source", fix=fix)

    def _placed(self, asked: ComponentSpec, place: Place | None) -> ComponentSpec:
        """What is asked of a component, with where the index has it; its own repository is the pipeline's source."""
        if place is None:
            return asked
        is_here = place.path is None and place.source == self.source.hub_id and place.revision is None
        source = None if is_here else place.source
        given = {"source": source, "subfolder": place.subfolder, "variant": place.variant}
        given |= {"revision": place.revision} if source else {}
        update = {key: value for key, value in given.items() if value and getattr(asked, key) is None}
        return asked.model_copy(update=update)

    def _component(
        self,
        name: str,
        asked: ComponentSpec,
        entry: Entry,
        facts: ClassFacts,
        origin: _Origin,
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
            refused={
                **refused_by_switches(asked),
                **refused_by_backend(self.spec.quantization_of(name)),
            },
            config_source=origin.config_source,
            shares_file=origin.shares_file,
            allows_pickle=reason is not None,
            allows_code=self._asking(name, asked, origin).reason is not None,
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
        yield from unknown_config_values(self.resolved, path, component.config, component.facts)

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

    def _origin(self, name: str, asked: ComponentSpec, listed: Entry | None, place: Place | None) -> _Origin:
        """Return where a component comes from, and the folder with its config (None when only the hub has it)."""
        source = self.source if asked.source is None else self._own_source(name, asked, place)
        if source.file is not None:
            home = self._home(name, asked, listed)
            has_config = asked.original_config is None or listed is not None
            return _Origin(source, self._folder(name, asked, home) if has_config else None, home)
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
        is_told = asked.original_config is not None and asked.class_name is not None
        if not is_told and (listed is None or asked.class_name not in (None, listed.class_name)):
            what = f"the pipeline's source has no config of {name!r} for the weights in {asked.source}"
            fix = f"add components.{name}.config with the folder or hub id of a model that has the same config"
            raise SpecError([self._problem(Code.CONFIG_NOT_FOUND, name, what, "source", fix=fix)])
        return self.source

    def _local_only(self, asked: ComponentSpec) -> bool:
        own = asked.local_files_only
        return self.spec.pipeline.local_files_only if own is None else own

    def _own_source(self, name: str, asked: ComponentSpec, place: Place | None) -> Source:
        path: ConfigPath = (*self._path(name), "source")
        if place is not None:
            path = place.path or ("pipeline", "source")
        text = asked.source or ""
        if place is not None and place.path is None and not is_hub_source(text):
            raise SpecError([_not_followed(self.resolved, repr(name), text, f"components.{name}")])
        if asked.revision is not None and is_local(text):
            raise SpecError([_needless_revision(self.resolved, (*path[:-1], "revision"), text)])
        try:
            folder, local_only = self.resolved.folder_of(path), self._local_only(asked)
            source = locate_source(text, folder=folder, revision=asked.revision, local_only=local_only)
            return asked_of_hub(source, self.hub)
        except DMConfigError as error:
            raise SpecError(self.resolved.located(error.problems, path)) from None

    def _entry(self, name: str, asked: ComponentSpec, listed: Entry | None, origin: _Origin) -> Entry:
        """Return library and class: as asked, else as the component's own config says, else as the pipeline says."""
        listed = listed if listed is not None and listed.class_name else None
        elsewhere = asked.source is not None or asked.subfolder is not None or listed is None
        class_name = asked.class_name or (_class_at(asked.subfolder or name, origin) if elsewhere else None)
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

    def _unknown_class(self, slot: ComponentSlot, entry: Entry, asked: ComponentSpec, origin: _Origin) -> Problem:
        if entry.library not in LIBRARIES:
            what = f"the source asks for {entry.library}.{entry.class_name} as {slot.name!r}"
            fix = f"give components.{slot.name} a class of diffusers or transformers, and a source"
            if origin.folder is None and origin.home.hub_id is not None:
                key = render_path(self._asking(slot.name, asked, origin).grant)
                fix = f"{fix}; or, where it is code of the source, read it, pin the source and write the reason: {key}"
            return self._problem(Code.CODE_NOT_TRUSTED, slot.name, what, "class", why=NO_CODE, fix=fix)
        known = known_schedulers() if "scheduler" in slot.name else slot.types
        meant = nearest(entry.class_name, known)
        what = f"neither diffusers nor transformers, as installed, has a class {entry.class_name!r} for {slot.name!r}"
        fix = f"did you mean {meant!r}?" if meant else f"upgrade the library, or give {slot.name!r} another class"
        return self._problem(Code.UNKNOWN_CLASS, slot.name, what, "class", fix=fix)
