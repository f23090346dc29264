"""Which pipelines a spec is of: source and class of the first, those it is made of, and those that share its parts."""

from __future__ import annotations

from dataclasses import replace

from dmconfig.assembly import PIPELINE, Sharing
from dmconfig.checkpoint import FileHeaders, asked_of_hub, pipeline_told_by, tensors_of
from dmconfig.errors import Code, DMConfigError, Problem, SpecError, nearest
from dmconfig.facts import PipelineFacts, known_modular_pipelines, known_pipelines, pipeline_facts
from dmconfig.paths import ConfigPath
from dmconfig.remote_code import OwnCode, pipeline_code
from dmconfig.resolve import Resolved
from dmconfig.source import (
    INDEX_FILE,
    MODULAR_INDEX_FILE,
    Entry,
    PipelineIndex,
    Place,
    Source,
    connected_pipeline,
    is_hub_source,
    is_local,
    locate_source,
    read_index,
)
from dmconfig.spec import Spec

MODULAR_BASE = "ModularPipeline"
"""The class that all modular pipelines are of, and by whose name theirs end."""


def pipeline_source(
    resolved: Resolved, spec: Spec, hub: FileHeaders | None
) -> tuple[Source, Source | None, PipelineIndex]:
    """Return where the pipeline's index and configs are, the one file of its weights if it is that, and the index."""
    path: ConfigPath = ("pipeline", "source")
    asked = spec.pipeline
    if asked.revision is not None and is_local(asked.source):
        raise SpecError([needless_revision(resolved, ("pipeline", "revision"), asked.source)])
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
        raise SpecError([needless_revision(resolved, (*path[:-1], "config_revision"), text)])
    try:
        source = locate_source(text, folder=resolved.folder_of(path), revision=revision, local_only=local_only)
    except DMConfigError as error:
        raise SpecError(resolved.located(error.problems, path)) from None
    if source.file is not None:
        what, fix = f"{text} is a file of weights, and a folder with configs is expected", "name its folder"
        raise SpecError([resolved.problem(Code.CONFIG_NOT_FOUND, path, what, fix=fix)])
    return source


def needless_revision(resolved: Resolved, path: ConfigPath, source: str) -> Problem:
    """Return the problem of a revision of what is local."""
    what, fix = f"a revision is given, and {source} is a local folder", "remove the line, or name a hub id"
    return resolved.problem(Code.CONTRADICTION, path, what, fix=fix, key=True)


def pipeline_class(
    resolved: Resolved, spec: Spec, source: Source, index: PipelineIndex
) -> tuple[PipelineFacts, OwnCode | None]:
    """Return the facts of the pipeline's class, and the code that it is, where it is none of diffusers.

    Raises: SpecError: the installed diffusers has no such class, or not its blocks; or its code is not granted.
    """
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


def with_connected(
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
        raise SpecError([not_followed(resolved, f"the {prefix} pipeline", text, f"pipeline.connected.{prefix}")])
    if place.revision is not None and is_local(text):
        raise SpecError([needless_revision(resolved, (*path[:-1], "revision"), text)])
    try:
        there = read_index(locate_source(text, folder=folder, revision=place.revision, local_only=local_only))
    except DMConfigError as error:
        raise SpecError(resolved.located(error.problems, path)) from None
    return {
        f"{prefix}_{name}": entry._replace(place=place._replace(subfolder=name)) if entry else None
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


def not_followed(resolved: Resolved, what_is: str, text: str, key: str) -> Problem:
    """Return the problem of a path in a pipeline's own files."""
    what = f"the pipeline's source has {what_is} at {text!r}, which is no hub id"
    why = "a path in a pipeline's files is one of the machine that wrote them, and is not followed"
    return resolved.problem(Code.OUTSIDE_SOURCE, ("pipeline", "source"), what, why=why, fix=f"give {key} a source")


def is_modular_class(name: str | None) -> bool:
    """Tell whether a name is one of a modular pipeline's class, by how diffusers names them."""
    return name is not None and name.endswith(MODULAR_BASE)


def sharing_pipelines(resolved: Resolved, spec: Spec) -> tuple[tuple[Sharing, ...], list[Problem]]:
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
