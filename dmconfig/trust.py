"""What a spec may take from where: revisions that move, pickles, files that lead out of their source.

One small function per rule, as in ``check``, which holds them. Nothing is opened here but headers. Code of a source is
granted, or not, where a class is taken from it (``remote_code``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from dmconfig.assembly import Assembly, Component
from dmconfig.checkpoint import loads_from_single_file
from dmconfig.errors import Code, Problem
from dmconfig.paths import ConfigPath
from dmconfig.remote_code import GRANT
from dmconfig.resolve import Resolved
from dmconfig.source import is_commit, is_local, is_within
from dmconfig.spec import REHEARSED, ComponentSpec, PipelineSpec, Spec

_VARIANTS = ("fp16", "bf16", "fp32", "non_ema", "ema")
"""What was a branch once, and is a variant of the weights today."""
_REMOVE = "remove the line"
_PIN = "run `dmconfig pin` on this file, which writes the commit here"


def hub_references(spec: Spec) -> Iterator[tuple[ConfigPath, str, str | None]]:
    """Yield every hub id that a spec names: the path of its key, the text, and the revision beside it."""
    sections: Mapping[ConfigPath, PipelineSpec | ComponentSpec] = {
        ("pipeline",): spec.pipeline,
        **dict(spec.written_components),
    }
    for path, section in sections.items():
        config = section.config if isinstance(section.config, str) else None
        for key, text, revision in (
            ("source", section.source, section.revision),
            ("config", config, section.config_revision),
            ("original_config", section.original_config, section.original_config_revision),
        ):
            if text is not None and not is_local(text):
                yield (*path, key), text, revision
    custom = spec.pipeline.custom_pipeline
    if custom is not None and "/" in custom.source and not is_local(custom.source):
        yield ("pipeline", "custom_pipeline", "source"), custom.source, custom.revision
    for prefix, connected in spec.pipeline.connected.named.items():
        if not is_local(connected.source):
            yield ("pipeline", "connected", prefix, "source"), connected.source, connected.revision
    for path, adapter in spec.adapters.all:
        if not is_local(adapter.source):
            yield (*path, "source"), adapter.source, adapter.revision


def revision_path(path: ConfigPath) -> ConfigPath:
    """Return the path of the revision of what is named at path."""
    return (*path[:-1], "revision" if path[-1] == "source" else f"{path[-1]}_revision")


def moving_revisions(resolved: Resolved, spec: Spec) -> Iterator[Problem]:
    """A branch or a tag may name other files tomorrow, so it needs consent; so does none, where that is asked."""
    for path, text, revision in hub_references(spec):
        at = revision_path(path)
        if revision in _VARIANTS:
            what = f"{revision!r} is no revision of {text} any more, but a variant of its weights"
            fix = f"write variant: {revision} in its place; components without such files load their plain ones"
            yield resolved.problem(Code.MOVING_REVISION, at, what, fix=fix)
        elif spec.allow_moving_revision or is_commit(revision):
            continue
        elif revision is not None:
            what = f"{revision!r} is not a full commit, so what it names may change"
            fix = f"{_PIN}, or add allow_moving_revision: true"
            yield resolved.problem(Code.MOVING_REVISION, at, what, fix=fix)
        elif spec.allow_moving_revision is False:
            what = f"{text} is at no commit, and allow_moving_revision is false"
            yield resolved.problem(Code.MOVING_REVISION, path, what, fix=_PIN)


def moving_places(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """What holds for the sources that the file names holds for those that an index or a model card names."""
    for component in _placed_by_index(spec, assembly):
        source, name = component.source, component.name
        if spec.allow_moving_revision or (source.revision is None and spec.allow_moving_revision is None):
            continue
        at = f"revision {source.revision} of {source.text}" if source.revision else source.text
        what = f"the pipeline's source has {name!r} in {at}, which is no commit, so what it names may change"
        fix = f"give components.{name} that source, with a subfolder and a revision, or add allow_moving_revision: true"
        yield resolved.problem(Code.MOVING_REVISION, component.path, what, fix=fix)


def _placed_by_index(spec: Spec, assembly: Assembly) -> Iterator[Component]:
    """Components in repositories of the hub that the file does not name, at no commit."""
    named = {text for _, text, _ in hub_references(spec)}
    for component in assembly.loaded:
        source = component.source
        is_told = source is assembly.source or source.text in named or component.is_single_file
        if source.hub_id is not None and not is_told and not is_commit(source.revision):
            yield component


def indexed_sources(spec: Spec, assembly: Assembly) -> Iterator[str]:
    """Yield the hub ids at no commit that an index or a model card names, and the file does not."""
    yield from (component.source.text for component in _placed_by_index(spec, assembly))


def unpinned(spec: Spec, indexed: Iterable[str] = ()) -> Iterator[str]:
    """Yield a remark on hub ids without a revision, where the spec does not say that they may move.

    ``indexed`` are those that the spec does not name.
    """
    texts = dict.fromkeys(text for _, text, revision in hub_references(spec) if revision is None)
    texts |= dict.fromkeys(indexed)
    if texts and spec.allow_moving_revision is None:
        named = ", ".join(texts)
        yield f"not pinned, so what it names may change: {named} (dmconfig pin writes the commit into the file)"


def needless_source_keys(resolved: Resolved, spec: Spec) -> Iterator[Problem]:
    """Keys about a source of another kind than the one that is written would mean nothing."""
    sections: list[tuple[ConfigPath, PipelineSpec | ComponentSpec]] = [(("pipeline",), spec.pipeline)]
    sections += spec.written_components
    for path, section in sections:
        if section.config_revision is not None and not isinstance(section.config, str):
            what, fix = "config_revision is the revision of config, which names no hub id", "remove the line"
            yield resolved.problem(Code.CONTRADICTION, (*path, "config_revision"), what, fix=fix, key=True)
        if section.original_config_revision is not None and section.original_config is None:
            what, fix = "original_config_revision is the revision of original_config, which is not given", _REMOVE
            yield resolved.problem(Code.CONTRADICTION, (*path, "original_config_revision"), what, fix=fix, key=True)
        if path[0] == "components" and section.original_config is not None and isinstance(section.config, str):
            what, fix = "the config of this component is named twice, as config and as original_config", "remove one"
            yield resolved.problem(Code.CONTRADICTION, (*path, "original_config"), what, fix=fix, key=True)


def idle_grants(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """Code is trusted where there is some: a grant that opens nothing today would open what comes tomorrow."""
    if len(assembly.components) + len(assembly.absent) < len(assembly.slots):
        return  # what one is lacking for is told, and may be the code
    used = {code.path for code in assembly.own_code}
    hidden = {component.path[:1] for component in assembly.loaded if component.allows_code and component.folder is None}
    sections: list[tuple[ConfigPath, PipelineSpec | ComponentSpec]] = [(("pipeline",), spec.pipeline)]
    sections += spec.written_components
    for path, section in sections:
        at: ConfigPath = (*path, GRANT)
        if section.trust_remote_code is not None and at not in used and not (path == ("pipeline",) and hidden):
            what = "code of this source is trusted, and no class is taken from it"
            yield resolved.problem(Code.CONTRADICTION, at, what, fix="remove the line", key=True)


def rehearsed_reserves(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """Planning runs no code of a source, and a reserve that is rehearsed would."""
    if spec.reserve == REHEARSED and (code := next(assembly.own_code, None)) is not None:
        what = f"a reserve that is rehearsed would run code of {code.origin} for every plan, and plans run none"
        fix = "write the reserve as a size: dmconfig rehearse tells it"
        yield resolved.problem(Code.CONTRADICTION, ("reserve",), what, fix=fix)


def code_notes(assembly: Assembly) -> Iterator[str]:
    """Yield a remark on each file of code that loading runs: of which source, and for which reason."""
    for code in dict.fromkeys(assembly.own_code):
        yield (
            f"loading runs code of {code.origin} ({code.names}) for {code.class_name}, trusted because: {code.reason}; "
            "this plan only read it"
        )


def needless_configs(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """The place of a config is for weights in one file; others have theirs beside them."""
    files = {component.name for component in assembly.loaded if component.is_single_file}
    named: list[tuple[ConfigPath, bool]] = []
    if spec.pipeline.config is not None:
        named.append((("pipeline", "config"), any(component.shares_file for component in assembly.loaded)))
    for path, part in spec.written_components:
        if isinstance(part.config, str):
            named.append(((*path, "config"), path[1] in files))
    yield from _needless_original_configs(resolved, spec, assembly)
    for path, is_of_file in named:
        if not is_of_file:
            what = "config names where the config of a single file is, and the source is no such file"
            fix = "remove the line; values to set are written as a mapping"
            yield resolved.problem(Code.CONTRADICTION, path, what, fix=fix, key=True)


def _needless_original_configs(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """As for configs; one of the pipeline is for the parts of its file whose classes take one."""
    used = {part.original_config.path for part in assembly.loaded if part.original_config is not None}
    sections: list[tuple[ConfigPath, PipelineSpec | ComponentSpec]] = [(("pipeline",), spec.pipeline)]
    sections += spec.written_components
    failed = len(assembly.components) + len(assembly.absent) < len(assembly.slots)
    for path, section in sections:
        at: ConfigPath = (*path, "original_config")
        if section.original_config is not None and at not in used and not failed:
            from dmconfig.original_config import known_classes

            what = "original_config is for one file of weights that is no GGUF, and this source is none"
            fix = f"remove the line; it is for: {', '.join(known_classes())}"
            yield resolved.problem(Code.BAD_ORIGINAL_CONFIG, at, what, fix=fix, key=True)


def single_files(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:  # noqa: ARG001 - as above
    """A single file is of weights, of a class that is loaded from one, and of a dtype that is known."""
    for component in assembly.loaded:
        if not component.is_single_file:
            continue
        path = _source_path(component)
        text = component.source.text
        if not component.is_module:
            what = f"{component.name!r} has no weights, so it cannot come from {text}"
            yield resolved.problem(Code.NOT_A_MODULE, path, what, fix="name a folder")
        elif component.source.is_gguf and not loads_from_single_file(component.facts):
            what = f"diffusers loads no {component.class_name} from a GGUF file"
            fix = f"give components.{component.name} safetensors weights"
            yield resolved.problem(Code.NOT_SUPPORTED_YET, path, what, fix=fix)
        elif component.dtype == "auto" and (component.source.is_gguf or component.source.is_pickle):
            yield undeclared_dtype(resolved, component, text)


def undeclared_dtype(resolved: Resolved, component: Component, file: str) -> Problem:
    """Return the problem of a component whose dtype neither the spec nor its weights tell."""
    what = f"which dtype {component.name!r} is to have is told neither here nor by {file}"
    why = "its weights are decoded as they are used" if component.source.is_gguf else "a pickle is not opened to look"
    own = component.path[0] == "components"
    fix = f"add {f'components.{component.name}' if own else 'pipeline'}.dtype, e.g. bfloat16"
    return resolved.problem(Code.BAD_DTYPE, _source_path(component), what, why=why, fix=fix)


def pickles(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:  # noqa: ARG001 - one of the rules
    """A file that may run code when it is opened is loaded only where the spec says why."""
    for component in assembly.loaded:
        if component.source.is_pickle and not component.allows_pickle:
            yield pickle_refused(resolved, component, component.source.text)


def pickle_refused(resolved: Resolved, component: Component, file: str) -> Problem:
    """Return the problem of a component whose weights are in a pickle."""
    what = f"the weights of {component.name!r} are in a pickle, {file}"
    why = "opening a pickle can run code that its author put there; safetensors holds numbers alone"
    key = "pipeline" if component.path[0] == "pipeline" else f"components.{component.name}"
    fix = f"convert it to safetensors on a machine that may be lost, or write the reason: {key}.allow_pickle: ..."
    return resolved.problem(Code.PICKLE_NOT_TRUSTED, _source_path(component), what, why=why, fix=fix)


def outside_source(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """No subfolder and no link may lead out of the source that the spec names."""
    for place, part in spec.written_components:
        subfolder = PurePosixPath(part.subfolder) if part.subfolder else None
        if subfolder is not None and (subfolder.is_absolute() or ".." in subfolder.parts):
            what = f"{subfolder} leads out of the source"
            path: ConfigPath = (*place, "subfolder")
            yield resolved.problem(Code.OUTSIDE_SOURCE, path, what, fix="name the folder itself as the source")
    for component in assembly.loaded:
        for file in _files_of(component):
            if component.home.folder is not None and not is_within(file, component.home.folder):
                what = f"{file} is a link that leads out of its source, to {file.resolve()}"
                fix = "copy the file there, or name the folder that has it as the component's source"
                yield resolved.problem(Code.OUTSIDE_SOURCE, _source_path(component), what, fix=fix)
        path_of_file = component.source.path
        on_hub = component.source.hub_id is not None and component.source.folder is not None
        if path_of_file is not None and on_hub and not is_within(path_of_file, component.source.folder):  # type: ignore[arg-type]
            what = f"{path_of_file} is a link that leads out of the cache"
            yield resolved.problem(Code.OUTSIDE_SOURCE, _source_path(component), what, fix="download it again")


def _files_of(component: Component) -> list[Path]:
    """The files of a component's folder that are read."""
    folder = component.folder
    if folder is None or not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))


def _source_path(component: Component) -> ConfigPath:
    return component.path if component.path[-1] == "source" else (*component.path, "source")
