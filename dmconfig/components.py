"""Each component of a pipeline, made of what the file asks and what the source lists: its class, and where it is."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from dmconfig.assembly import Component
from dmconfig.catalog import find_pipeline
from dmconfig.checkpoint import FileHeaders, asked_of_hub, part_of, tensors_of
from dmconfig.errors import Code, DMConfigError, Problem, SpecError, nearest
from dmconfig.facts import (
    ClassFacts,
    ComponentSlot,
    PipelineFacts,
    class_facts,
    fits,
    is_module_class,
    is_scheduler_class,
    known_schedulers,
    own_class_facts,
)
from dmconfig.paths import ConfigPath, render_path
from dmconfig.pipelines import locate_config, needless_revision, not_followed
from dmconfig.quantization import refused_by_backend
from dmconfig.remote_code import Asking, OwnCode, code_of_component, granted, read_code, refused_by_code, require_commit
from dmconfig.resolve import Resolved
from dmconfig.source import (
    CONFIG_FILES,
    NO_CODE,
    Entry,
    PipelineIndex,
    Place,
    Source,
    is_hub_source,
    is_local,
    is_whole_pipeline,
    locate_source,
    model_class_in,
)
from dmconfig.spec import ComponentSpec, Spec
from dmconfig.switches import refused_by_switches

LIBRARIES = ("diffusers", "transformers")


def is_made(facts: PipelineFacts, spec: Spec, name: str) -> bool:
    """Tell whether a modular pipeline makes a component itself: its blocks do, and the file gives it no source."""
    asked = spec.components.get(name)
    return name in facts.made and not (isinstance(asked, ComponentSpec) and (asked.source or asked.subfolder))


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


_SEVERAL = re.compile(r"Multi[A-Z]")
"""In the name of a class that wraps several models; ``MultilingualCLIP`` is one model."""

_NOTHING_ASKED = ComponentSpec.model_construct()
"""Of a component that the file says nothing of."""


def _wrappers(slot: ComponentSlot) -> tuple[str, ...]:
    """The classes of a slot that wrap several models of another of its classes: ``MultiControlNetModel``."""
    return tuple(name for name in slot.types if len(slot.types) > 1 and _SEVERAL.search(name))


class _Origin(NamedTuple):
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
class Assembler:
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
        if listed is None and is_made(self.facts, self.spec, name):
            return None
        left_out = name in self.spec.components and asked is None
        if left_out or (asked is None and listed is None):
            if not slot.optional:
                raise SpecError([self._missing(name, left_out=left_out)])
            return None
        asked = asked or _NOTHING_ASKED
        if listed is not None and asked == _NOTHING_ASKED and listed.class_name in _wrappers(slot):
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
                if slot.optional and asked == _NOTHING_ASKED:
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
            asking = asking._replace(class_name=reference.class_name)
            module = reference.module
            return granted(self.resolved, asking, home, module, lambda: read_code(folder, module, within=within))
        except SpecError:
            raise
        except DMConfigError as error:
            raise SpecError(self.resolved.located(error.problems, asking.path)) from None

    def _with_original_config(self, component: Component) -> Component:
        """The component, with the config of its authors where the file names one for it, or for the pipeline's file."""
        if not component.is_single_file or component.source.is_gguf or not component.is_module:
            return component
        from dmconfig.original_config import original_config, takes_original_config

        asked, path = component.asked, component.path
        text, revision = asked.original_config, asked.original_config_revision
        if text is None and component.shares_file and takes_original_config(component.facts):
            path = ("pipeline",)
            text, revision = self.spec.pipeline.original_config, self.spec.pipeline.original_config_revision
        if text is None:
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
            asked=_NOTHING_ASKED,
            parts=tuple(parts),
            refused=refused,
        )

    def _saved_together(self, name: str) -> ComponentSpec | tuple[ComponentSpec, ...]:
        """What a pipeline saved with several models in one place has: folders ``controlnet``, ``controlnet_1``, ..."""
        folder = self.source.folder
        if folder is None:
            return _NOTHING_ASKED
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
            raise SpecError([not_followed(self.resolved, repr(name), text, f"components.{name}")])
        if asked.revision is not None and is_local(text):
            raise SpecError([needless_revision(self.resolved, (*path[:-1], "revision"), text)])
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
