"""Code that a source brings along: what of it would be run, read here and never run, and whether the file grants it.

An index, a component's config, or the file itself under ``pipeline.custom_pipeline``, may name a class in a file of
Python. That file, and what it imports relative to itself, however far, out of its own folder alone, is read as text;
its classes' facts are taken from that, as those of the installed libraries are. ``importing`` runs it, for loading and
rehearsing, and runs these very texts.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from dmconfig.errors import Code, DMConfigError, Problem, SourceError, SpecError
from dmconfig.facts import (
    ClassFacts,
    CodeFile,
    CodeFiles,
    PipelineFacts,
    class_facts,
    is_module_class,
    own_pipeline_facts,
    own_pipelines,
)
from dmconfig.paths import ConfigPath, render_path
from dmconfig.resolve import Resolved
from dmconfig.source import (
    CONFIG_FILES,
    HUB_ID,
    Entry,
    PipelineIndex,
    Source,
    find_snapshot,
    is_commit,
    is_local,
    is_within,
    read_json,
)
from dmconfig.spec import PipelineSpec, Spec

if TYPE_CHECKING:  # what reads code is imported where there is some
    import ast

CUSTOM_PIPELINE_FILE = "pipeline.py"
"""The file of a folder or repository that is named as ``custom_pipeline``, as diffusers calls it."""
GRANT = "trust_remote_code"
MAX_FILE_BYTES = 1 << 20
MAX_FILES = 256

_LIBRARIES = ("diffusers", "transformers")
_MODULE = re.compile(r"[A-Za-z_][\w-]*")
_ON_HUB = re.compile(rf"({HUB_ID})(?:/((?:[\w-]+/)*[\w-]+\.py))?")
_CONFIGS = (*CONFIG_FILES, "processor_config.json")
_WHY = "it would run with your rights, and code is run only where the file says why it is trusted"
_FORBIDS = "DIFFUSERS_DISABLE_REMOTE_CODE"
_YES = ("1", "ON", "YES", "TRUE")


class OwnCode(NamedTuple):
    """A class in code that a source brings along and that the file grants to be run.

    ``origin`` is the source as it is written, ``reason`` what the file says of it, at ``path``.
    """

    files: CodeFiles
    class_name: str
    origin: str
    reason: str
    path: ConfigPath

    @property
    def names(self) -> str:
        """The files that may be run, as they are called in their folder."""
        return _names(self.files)


class Asking(NamedTuple):
    """Who asks for which class in code: in words, the section that may grant it, and where the file names the source.

    ``revision`` is the path of the key that pins the source; ``otherwise`` what else may be done, beginning with or.
    """

    who: str
    class_name: str
    section: ConfigPath
    path: ConfigPath
    reason: str | None
    revision: ConfigPath
    otherwise: str

    @property
    def grant(self) -> ConfigPath:
        """The path of the key that grants it."""
        return (*self.section, GRANT)


def granted(resolved: Resolved, asking: Asking, source: Source, module: str, read: Callable[[], CodeFiles]) -> OwnCode:
    """Return code that the file grants to be run.

    Args:
        resolved: the spec's document.
        asking: who asks for it.
        source: where it is.
        module: the dotted name of the module in it.
        read: reads the code, as ``read_code``.

    Raises: SpecError: CODE_NOT_TRUSTED: it is not granted, or the environment forbids it. MOVING_REVISION: the source
        is on the hub, and at no commit. What ``read`` raises.
    """
    if asking.reason is None:
        raise SpecError([_not_granted(resolved, asking, source, module, read)])
    if os.environ.get(_FORBIDS, "").upper() in _YES:
        what = f"{asking.who} is code of its source, {source.text}"
        why, fix = f"{_FORBIDS} is set, which forbids it on this machine", f"unset it, {asking.otherwise}"
        raise SpecError([resolved.problem(Code.CODE_NOT_TRUSTED, asking.grant, what, why=why, fix=fix)])
    require_commit(resolved, asking, source)
    return OwnCode(
        files=read(), class_name=asking.class_name, origin=source.text, reason=asking.reason, path=asking.grant
    )


def _not_granted(
    resolved: Resolved, asking: Asking, source: Source, module: str, read: Callable[[], CodeFiles]
) -> Problem:
    file = f"{module.replace('.', '/')}.py"
    what = f"{asking.who} is {asking.class_name}{', ' * bool(asking.class_name)}code that its source brings along"
    names = file
    with contextlib.suppress(DMConfigError):
        names = _names(read())
    is_pinned = source.hub_id is None or is_commit(source.revision)
    also = "" if is_pinned else f", and the commit: {render_path(asking.revision)}: ..."
    fix = f"read {names}, then write why it may be run: {render_path(asking.grant)}: ...{also}; {asking.otherwise}"
    return resolved.problem(Code.CODE_NOT_TRUSTED, asking.path, f"{what} ({source.text}: {file})", why=_WHY, fix=fix)


def require_commit(resolved: Resolved, asking: Asking, source: Source) -> None:
    """Check that code of the hub is at a commit.

    Raises: SpecError: MOVING_REVISION: it is not, whatever the file says of revisions that move.
    """
    if source.hub_id is None or is_commit(source.revision):
        return
    at = f"{source.revision!r} is not a full commit" if source.revision else "it is at no commit"
    what = f"code of {source.text} is trusted, and {at}"
    why = "what was read may be other code tomorrow; allow_moving_revision does not reach code"
    fix = "run `dmconfig pin` on this file, which writes the commit here, and read the code at that commit"
    raise SpecError([resolved.problem(Code.MOVING_REVISION, asking.revision, what, why=why, fix=fix)])


# The pipeline's class


def pipeline_code(
    resolved: Resolved, spec: Spec, source: Source, index: PipelineIndex
) -> tuple[PipelineFacts, OwnCode] | None:
    """Return the pipeline class that is code of its own, with its facts; None where it is one of diffusers.

    That of ``custom_pipeline``, else the one that the source's index names in a file beside it, unless the file asks
    for another.

    Raises: SpecError: it is not granted, not pinned or not there; or the file has no such class, or several.
    """
    asked = spec.pipeline
    if asked.custom_pipeline is not None:
        asking = _asking_for_custom(asked)
        source = _located(resolved, asked, asking)
        file = PurePosixPath(source.file or "")
    elif index.module is not None and asked.class_name in (None, index.class_name):
        asking = _asking_for_index(asked, index.class_name)
        file = PurePosixPath(f"{index.module}.py")
    else:
        return None
    within = source.folder or Path()
    try:
        code = granted(
            resolved, asking, source, file.stem, lambda: read_code(within / file.parent, file.stem, within=within)
        )
        return _pipeline_in(code)
    except SpecError:
        raise
    except DMConfigError as error:
        raise SpecError(resolved.located(error.problems, asking.path)) from None


def _pipeline_in(code: OwnCode) -> tuple[PipelineFacts, OwnCode]:
    name = code.class_name or _only_pipeline(code.files)
    facts = own_pipeline_facts(code.files, name) if name.isidentifier() else None
    if facts is None:
        what = f"{code.files.files[0].path.name} has no pipeline class {name!r}"
        raise _bad(what, fix=_has(own_pipelines(code.files)))
    return facts, code._replace(class_name=name)


def _asking_for_custom(asked: PipelineSpec) -> Asking:
    section: ConfigPath = ("pipeline", "custom_pipeline")
    custom = asked.custom_pipeline
    return Asking(
        who="the pipeline",
        class_name=asked.class_name or "",
        section=section,
        path=(*section, "source"),
        reason=custom.trust_remote_code if custom is not None else None,
        revision=(*section, "revision"),
        otherwise="or remove custom_pipeline",
    )


def _asking_for_index(asked: PipelineSpec, class_name: str) -> Asking:
    return Asking(
        who="the pipeline",
        class_name=class_name,
        section=("pipeline",),
        path=("pipeline", "source"),
        reason=asked.trust_remote_code,
        revision=("pipeline", "revision" if asked.config is None else "config_revision"),
        otherwise="or name a class of the installed diffusers as pipeline.class",
    )


def _located(resolved: Resolved, asked: PipelineSpec, asking: Asking) -> Source:
    """Where a custom pipeline is: on this machine, or else not granted, which is told without looking into it."""
    custom = asked.custom_pipeline
    assert custom is not None  # noqa: S101 - the caller has looked
    if custom.revision is not None and is_local(custom.source):
        what, fix = f"a revision is given, and {custom.source} is local", "remove the line, or name a hub id"
        raise SpecError([resolved.problem(Code.CONTRADICTION, asking.revision, what, fix=fix, key=True)])
    try:
        source = locate_code(custom.source, folder=resolved.folder_of(asking.path), revision=custom.revision)
    except DMConfigError as error:
        raise SpecError(resolved.located(error.problems, asking.path)) from None
    if source.folder is None and asking.reason is not None:
        require_commit(resolved, asking, source)
        what = f"the code of {custom.source} is not on this machine, so nothing is known of the pipeline"
        fix = "load it once with load_from_yaml or dmconfig run, which download what they need"
        raise SpecError([resolved.problem(Code.SOURCE_NOT_FOUND, asking.path, what, fix=fix)])
    return source


def locate_code(text: str, *, folder: Path, revision: str | None = None) -> Source:
    """Return where a custom pipeline is: ``file`` is the one with its class, ``folder`` the folder or snapshot.

    Raises: SourceError: there is no such file, or text is no path and no hub id. The bare names by which diffusers
        fetches community pipelines are refused: it takes them from a place that has no commits to pin.
    """
    if is_local(text):
        path = Path(os.path.normpath(folder / Path(text).expanduser()))
        file = path / CUSTOM_PIPELINE_FILE if path.is_dir() else path
        if not file.is_file() or file.suffix != ".py":
            raise SourceError([Problem(code=Code.SOURCE_NOT_FOUND, what=f"there is no file of Python {file}")])
        return Source(text=text, folder=file.parent, file=file.name)
    on_hub = _ON_HUB.fullmatch(text)
    if on_hub is None:
        raise SourceError([_community(text)])
    hub_id, name = on_hub.groups()
    snapshot = find_snapshot(hub_id, revision)
    here = snapshot if snapshot is not None and (snapshot / (name or CUSTOM_PIPELINE_FILE)).is_file() else None
    return Source(text=text, folder=here, hub_id=hub_id, revision=revision, file=name or CUSTOM_PIPELINE_FILE)


def _community(text: str) -> Problem:
    if not _MODULE.fullmatch(text):
        what = f"{text!r} is neither a file, nor a folder, nor a hub id"
        fix = "write ./pipeline.py for a file beside this one, or organisation/name for a hub id"
        return Problem(code=Code.SOURCE_NOT_FOUND, what=what, fix=fix)
    what = f"{text!r} is the name of a community pipeline, which diffusers fetches from where it is at no commit"
    why = "what it names may be other code tomorrow"
    fix = f"download {text}.py from the examples/community of diffusers, read it, and write ./{text}.py"
    return Problem(code=Code.CODE_NOT_TRUSTED, what=what, why=why, fix=fix)


def _only_pipeline(files: CodeFiles) -> str:
    names = own_pipelines(files)
    if len(names) != 1:
        several = f"it has {', '.join(names)}" if names else "none is found by reading it"
        fix = "name one as pipeline.class" if names else "name a file with a class on DiffusionPipeline"
        raise _bad(f"{files.files[0].path.name} is to have one pipeline class, and {several}", fix=fix)
    return names[0]


# Components' classes


class Reference(NamedTuple):
    """A class in a file beside a component's config. ``is_needed``: no installed class stands for it."""

    module: str
    class_name: str
    is_needed: bool = True


def code_of_component(entry: Entry, folder: Path | None, *, is_known: bool) -> Reference | None:
    """Return the code that a component's index entry or config asks for, or None.

    Args:
        entry: its library and class.
        folder: where its config is; None: nothing is here to look into.
        is_known: whether the installed libraries have that class. It is taken then, unless it is an ``Auto`` class.

    Raises: SourceError: the code is in another repository, which no grant of this one reaches.
    """
    if folder is None or not entry.class_name.isidentifier():
        return None
    if not is_known and _MODULE.fullmatch(entry.library) and entry.library not in _LIBRARIES:
        file = folder / f"{entry.library}.py"
        return Reference(entry.library, entry.class_name) if file.is_file() else None
    for config in _configs_in(folder):
        for kind, text in _auto_map(config):
            module, _, class_name = text.rpartition(".")
            is_auto = entry.class_name.startswith("Auto") and kind == entry.class_name
            if not is_auto and (is_known or class_name != entry.class_name):
                continue
            if "--" in module:
                raise _elsewhere(text)
            if _is_module(module) and class_name.isidentifier():
                return Reference(module, class_name, is_needed=not (is_auto and _is_installed(config)))
    return None


def _configs_in(folder: Path) -> Iterator[Mapping[str, Any]]:
    for name in _CONFIGS:
        if (folder / name).is_file():
            yield read_json(folder / name)


def _auto_map(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each ``Auto`` class that a config maps, and ``module.Class``; of two tokenizers the fast one comes first."""
    named = config.get("auto_map")
    for kind, value in named.items() if isinstance(named, dict) else ():
        for each in reversed(value) if isinstance(value, list) else (value,):
            if isinstance(each, str):
                yield kind, each


def _is_installed(config: Mapping[str, Any]) -> bool:
    """Whether a config names a class that the installed libraries have, which an ``Auto`` class loads then."""
    architectures = config.get("architectures")
    named = [config.get(key) for key in ("tokenizer_class", "processor_class", "image_processor_type", "_class_name")]
    named += architectures if isinstance(architectures, list) else []
    return any(class_facts(library, str(name)) for name in named if name for library in _LIBRARIES)


def _is_module(text: str) -> bool:
    return all(_MODULE.fullmatch(word) for word in text.split("."))


def _elsewhere(text: str) -> SourceError:
    repository, _, name = text.partition("--")
    what = f"a config names {name}, code of another repository, {repository}"
    why = "what it names there is at no commit, and trusting this source does not reach another"
    fix = f"copy the code of {repository} beside the config, and name it there without {repository}--"
    return SourceError([Problem(code=Code.CODE_NOT_TRUSTED, what=what, why=why, fix=fix)])


def refused_by_code(facts: ClassFacts) -> Mapping[str, str]:
    """Return the ways of placing that a component whose class is code of its source does not allow, each with why."""
    if facts.library != "transformers" or not is_module_class(facts):
        return {}
    return {"split": "how its own code is laid out cannot be known without running it"}


# Reading


def read_code(folder: Path, module: str, *, within: Path) -> CodeFiles:
    """Return a file of code and what it imports relative to itself, as text. Nothing is run.

    Args:
        folder: where the file is, and what relative imports start in; they cannot lead out of it.
        module: its dotted name below folder.
        within: the source; no link may lead out of it.

    Raises: SourceError: BAD_CODE: a file is missing, too large, or no Python; or an import leads out of the folder.
        OUTSIDE_SOURCE: a link does.
    """
    found: dict[str, CodeFile] = {}
    todo = [(module, True)]
    while todo:
        name, is_needed = todo.pop(0)
        path = _file_of(folder, name)
        if name in found or (path is None and (not is_needed or (folder / name.replace(".", "/")).is_dir())):
            continue
        if path is None:
            asked = "" if name == module else ", which it imports"
            raise _bad(f"{folder} has no {name.replace('.', '/')}.py{asked}")
        found[name] = file = _read(name, path, within)
        todo += _imported(file)
        if len(found) > MAX_FILES:
            raise _bad(f"{folder / module}.py imports more than {MAX_FILES} files")
    return CodeFiles(_package(folder, found), tuple(found.values()))


def _file_of(folder: Path, module: str) -> Path | None:
    path = folder.joinpath(*module.split("."))
    choices = (path / "__init__.py", path.parent / f"{path.name}.py")
    return next((choice for choice in choices if choice.is_file()), None)


def _read(module: str, path: Path, within: Path) -> CodeFile:
    if not is_within(path, within):
        what = f"{path} is a link that leads out of its source, to {path.resolve()}"
        raise SourceError([Problem(code=Code.OUTSIDE_SOURCE, what=what, fix="copy the file there")])
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _bad(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
        return CodeFile(module, path, path.read_bytes())
    except OSError as error:
        raise _bad(f"{path} cannot be read: {error.strerror or error}") from None


def _imported(file: CodeFile) -> Iterator[tuple[str, bool]]:
    """Yield the modules that a file may import relative to itself, each with whether it must be there.

    What is tried (``try: from .fast import attention``) may be missing; so may a name that is no module.
    """
    import ast

    try:
        tree = ast.parse(file.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _bad(f"{file.path} cannot be read as Python: {error}") from None
    tried = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = _base_of(file, node)
            parents = ["", *(".".join(base[: depth + 1]) for depth in range(len(base)))]
            yield from ((parent, False) for parent in parents[1:-1])
            if base:
                yield parents[-1], id(node) not in tried
            yield from ((".".join([*base, alias.name]), False) for alias in node.names if alias.name != "*")


def _base_of(file: CodeFile, node: ast.ImportFrom) -> list[str]:
    parts = file.module.split(".")
    keep = len(parts) - node.level + file.is_package
    if keep < 0:
        raise _bad(f"line {node.lineno} of {file.path} imports from outside the folder that its code is in")
    return [*parts[:keep], *(node.module.split(".") if node.module else [])]


def _package(folder: Path, files: Mapping[str, CodeFile]) -> str:
    """A name that no other code has: of the folder and every text."""
    import hashlib

    digest = hashlib.sha256(str(folder).encode(errors="surrogateescape"))
    for name, file in sorted(files.items()):
        digest.update(f"\0{name}\0{len(file.text)}\0".encode() + file.text)
    return f"remote_code_{digest.hexdigest()[:24]}"


def _names(files: CodeFiles) -> str:
    return ", ".join(f"{each.module.replace('.', '/')}{'/__init__' * each.is_package}.py" for each in files.files)


def _has(names: tuple[str, ...]) -> str:
    return f"it has: {', '.join(names)}" if names else "name a file that has it"


def _bad(what: str, fix: str = "") -> SourceError:
    return SourceError([Problem(code=Code.BAD_CODE, what=what, fix=fix)])
