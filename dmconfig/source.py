"""Where a pipeline or a component is, and what its index says is in it. Reads small JSON files, never weights.

A source is a local folder or a hub id, or one file of weights in either; which of these is told by how it is written,
never by what happens to exist on the machine. A hub id is looked up in the local hub cache and in the packaged
catalogue; fetching is for ``fetch``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dmconfig.catalog import find_pipeline, known_ids
from dmconfig.configs import config_folder
from dmconfig.errors import Code, Problem, SourceError, nearest
from dmconfig.paths import ConfigPath
from dmconfig.weights import TensorInfo

INDEX_FILE = "model_index.json"
MODULAR_INDEX_FILE = "modular_model_index.json"
BLOCKS_FILE = "modular_config.json"
"""Where a repository names blocks of its own code."""
INDEX_FILES = (INDEX_FILE, MODULAR_INDEX_FILE)
MODEL_CARD = "README.md"
CONFIG_FILES = ("config.json", "scheduler_config.json", "preprocessor_config.json", "tokenizer_config.json")

SINGLE_FILES = (".safetensors", ".gguf")
PICKLES = (".ckpt", ".bin", ".pt", ".pth")
"""Ends of the names of files that are pickles: opening one can run what its author put there."""

NO_CODE = "classes are taken from the installed diffusers and transformers; code of a repository is not run"
"""Why a class of another package is refused. Code beside a config, which may be granted, is ``remote_code``'s."""

_ANY_MODEL = frozenset({"AutoModel", "ModelMixin", "PreTrainedModel"})
"""Classes in the index of a modular pipeline that leave it to the model's own config which one it is."""

MAX_JSON_BYTES = 1 << 24
"""More than any index or config takes: the largest published ones have some 100 kB."""

HUB_ID = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
"""What a hub id looks like, as a pattern."""
_HUB_ID = re.compile(HUB_ID)
_HUB_FILE = re.compile(rf"({HUB_ID})/((?:[\w .+()-]+/)*[\w .+()-]+\.(?:safetensors|gguf|ckpt|bin|pt|pth))")
_HUB_PAGE = re.compile(rf"https?://[^/]+/({HUB_ID})(?:/(?:blob|resolve|raw)/([^/]+)/([^?#]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A local folder, or a hub id with the folder of its snapshot when that is on this machine.

    ``file`` names one file of weights in it, where that is the source; ``told`` is what the hub says it holds, where it
    was asked. ``local_only``: the hub is not asked for it.
    """

    text: str
    folder: Path | None
    hub_id: str | None = None
    revision: str | None = None
    file: str | None = None
    local_only: bool = False
    told: tuple[TensorInfo, ...] | None = field(default=None, repr=False)

    @property
    def path(self) -> Path | None:
        """The file of weights, where it is one and on this machine."""
        path = self.folder / self.file if self.folder is not None and self.file is not None else None
        return path if path is not None and path.is_file() else None

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file."""
        return self.file is not None and self.file.lower().endswith(".gguf")

    @property
    def is_pickle(self) -> bool:
        """Whether it is a file that runs code when it is opened without care."""
        return self.file is not None and self.file.lower().endswith(PICKLES)


class Place(NamedTuple):
    """Where a component is, if not where all others are: in a source (None: in the pipeline's), and where in that.

    ``path`` is where the file names that source; None: the pipeline's own index, or its model card, names it.
    """

    source: str | None = None
    subfolder: str | None = None
    revision: str | None = None
    variant: str | None = None
    path: ConfigPath | None = None


class Entry(NamedTuple):
    """One component as an index names it: its library and class, and where it is, if not where all others are.

    The index of a modular pipeline may leave library and class open: they are empty then.
    """

    library: str
    class_name: str
    place: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineIndex:
    """What a pipeline says is in it: its class, its components (None where it leaves one out), its other settings.

    ``blocks`` is the class of a modular pipeline's blocks, as its index names it. ``module`` is the file of Python
    beside the index that has the class, where it is none of diffusers.
    """

    class_name: str
    entries: Mapping[str, Entry | None]
    config: Mapping[str, Any] = field(default_factory=dict)
    blocks: str | None = None
    module: str | None = None


def locate_source(text: str, *, folder: Path, revision: str | None = None, local_only: bool = False) -> Source:
    """Return the source that text names; a relative folder or file starts in ``folder``.

    Raises: SourceError: the folder or file does not exist, or text is neither of these nor a hub id.
    """
    if is_local(text):
        return _local(text, folder)
    hub_file = _HUB_FILE.fullmatch(text)
    hub_id, file = hub_file.groups() if hub_file else (text, None)
    if not _HUB_ID.fullmatch(hub_id) or (file and ".." in file.split("/")):
        what = f"{text!r} is neither a folder nor a hub id"
        raise _error(Code.SOURCE_NOT_FOUND, what, fix=_how_to_write(text))
    if (folder / text).is_file() if file else (folder / text).is_dir():
        kind = "file" if file else "folder"
        why = f"a hub id and a {kind} may have the same name; which is meant must not depend on the machine"
        what = f"{text!r} reads as a {'file on the hub' if file else 'hub id'}, and a {kind} of that name exists"
        raise _error(Code.SOURCE_NOT_FOUND, what, why=why, fix=f"write ./{text} if the {kind} is meant")
    snapshot = find_snapshot(hub_id, revision)
    return Source(text=text, folder=snapshot, hub_id=hub_id, revision=revision, file=file, local_only=local_only)


def _how_to_write(text: str) -> str:
    page = _HUB_PAGE.match(text)
    if page is None:
        return f"write ./{text} for a folder beside the file, or organisation/name for a hub id"
    hub_id, revision, file = page.groups()
    return f"write {hub_id}/{file} with revision: {revision}" if file else f"write the hub id in it: {hub_id}"


def is_commit(revision: str | None) -> bool:
    """Tell whether a revision is a full commit, which names the same files for ever."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def is_within(path: Path, folder: Path) -> bool:
    """Tell whether a path, with all links followed, stays in a folder.

    A snapshot of the hub's cache is made of links into the blobs beside it, which belong to it.
    """
    real, root = path.resolve(), folder.resolve()
    return real.is_relative_to(root) or (
        root.parent.name == "snapshots" and real.is_relative_to(root.parent.parent / "blobs")
    )


def is_local(text: str) -> bool:
    """Tell whether a source is written as a path of this machine; anything else is on the hub."""
    return text.startswith(("./", "../", "/", "~")) or text in (".", "..")


def is_hub_id(text: str) -> bool:
    """Tell whether text has the form of a hub id, organisation/name."""
    return _HUB_ID.fullmatch(text) is not None


def repository_of(text: str) -> str | None:
    """Return the hub id in text, which is one or names a file of code or YAML in it; None where it has another form."""
    named = re.fullmatch(rf"({HUB_ID})(?:/[\w./-]+\.(?:py|ya?ml))?", text)
    return named[1] if named else None


def is_hub_source(text: str) -> bool:
    """Tell whether text names something on the hub: a repository, or a file in one."""
    return not is_local(text) and bool(_HUB_ID.fullmatch(text) or _HUB_FILE.fullmatch(text))


def read_index(source: Source, *, modular: bool = False) -> PipelineIndex:
    """Return what the pipeline at source says is in it; for a hub id not on this machine, from the catalogue.

    Where a folder has both kinds of index, ``modular`` takes that of a modular pipeline.

    Raises: SourceError: no pipeline is there, its index is damaged, or it is on the hub and not known here; or a
        modular pipeline's index says that a component is at a path of somebody's machine.
    """
    if source.folder is not None and (source.hub_id is None or _has_index(source.folder)):
        first, second = (MODULAR_INDEX_FILE, INDEX_FILE) if modular else INDEX_FILES
        name = first if (source.folder / first).is_file() or not (source.folder / second).is_file() else second
        return _modular_index_in(source.folder) if name == MODULAR_INDEX_FILE else _index_in(source.folder)
    known = find_pipeline(source.text)
    if known is None:
        raise _unknown_here(source)
    entries = {part.name: Entry(library=part.library, class_name=part.class_name) for part in known.components}
    packaged = config_folder(known.hub_id)
    config = _index_in(packaged).config if packaged is not None else {}
    return PipelineIndex(class_name=known.class_name, entries=entries, config=config)


def is_whole_pipeline(source: Source) -> bool:
    """Tell whether a source is a pipeline, as far as this machine knows, rather than a single model."""
    if source.folder is not None and _has_index(source.folder):
        return True
    return source.folder is None and source.hub_id is not None and find_pipeline(source.hub_id) is not None


def _has_index(folder: Path) -> bool:
    return any((folder / name).is_file() for name in INDEX_FILES)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises: SourceError: the file is not readable JSON, or holds something else than an object.
    """
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise _error(Code.NOT_A_PIPELINE, f"{file} is larger than a config can be ({MAX_JSON_BYTES >> 20} MiB)")
        value = json.loads(file.read_bytes())
    except RecursionError:
        raise _error(Code.NOT_A_PIPELINE, f"{file} cannot be read as JSON: it is nested too deep") from None
    except (OSError, ValueError) as error:
        raise _error(Code.NOT_A_PIPELINE, f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise _error(Code.NOT_A_PIPELINE, f"{file} does not hold a JSON object")
    return value


def model_class_in(folder: Path) -> str | None:
    """Return the class that a model's own config names, or None."""
    for name in CONFIG_FILES:
        if (folder / name).is_file():
            config = read_json(folder / name)
            architectures = config.get("architectures")
            first = architectures[0] if isinstance(architectures, list) and architectures else None
            named = config.get("_class_name") or first
            return str(named) if named else None
    return None


def _local(text: str, folder: Path) -> Source:
    try:
        path = Path(os.path.normpath(folder / Path(text).expanduser()))
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:  # a name the system cannot hold; the home of nobody
        raise _error(Code.SOURCE_NOT_FOUND, f"{text[:80]} cannot be looked up: {error}") from None
    if is_file:
        return _local_file(text, path)
    if not is_folder:
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        meant = nearest(path.name, siblings)
        fix = f"did you mean {meant!r} in {path.parent}?" if meant else f"check the path; it starts in {folder}"
        raise _error(
            Code.SOURCE_NOT_FOUND,
            f"there is no {'file' if path.suffix in (*SINGLE_FILES, *PICKLES) else 'folder'} {path}",
            fix=fix,
        )
    return Source(text=text, folder=path)


def _local_file(text: str, path: Path) -> Source:
    if path.name in INDEX_FILES:
        raise _error(
            Code.SOURCE_NOT_FOUND, f"{text} is the index of a pipeline", fix=f"write its folder: {path.parent}"
        )
    if not path.name.lower().endswith((*SINGLE_FILES, *PICKLES)):
        what = f"{text} is a file, and not one of weights"
        fix = f"name a folder, or a file that ends in {' or '.join(SINGLE_FILES)}"
        raise _error(Code.SOURCE_NOT_FOUND, what, fix=fix)
    return Source(text=text, folder=path.parent, file=path.name)


def _unknown_here(source: Source) -> SourceError:
    meant = nearest(source.text, known_ids(), cutoff=0.75)
    fix = "load it once with load_from_yaml or dmconfig run, which downloads what it needs"
    return _error(
        Code.SIZES_UNKNOWN,
        f"nothing is known here of {source.text!r}",
        why="it is neither in the local hub cache nor one of the pipelines dmconfig has figures for",
        fix=f"did you mean {meant!r}? Otherwise {fix}" if meant else fix,
    )


def _index_in(folder: Path) -> PipelineIndex:
    file = folder / INDEX_FILE
    if not file.is_file():
        why = f"a pipeline's folder has a {INDEX_FILE}"
        raise _error(Code.NOT_A_PIPELINE, f"{folder} is not a pipeline: it has no {INDEX_FILE}", why=why)
    index = read_json(file)
    class_name, module = _class_named(index, file)
    entries: dict[str, Entry | None] = {}
    config: dict[str, Any] = {}
    for name, value in index.items():
        match value:
            case _ if name.startswith("_"):
                pass  # what the index says of itself
            case [str() as library, str() as class_of]:
                entries[name] = Entry(library=library, class_name=class_of)
            case [None, None]:
                entries[name] = None
            case _:
                config[name] = value
    return PipelineIndex(class_name=class_name, entries=entries, config=config, module=module)


def _class_named(index: Mapping[str, Any], file: Path) -> tuple[str, str | None]:
    """Return the pipeline class of an index, and the file of Python beside it that has it, if it is in one."""
    match index.get("_class_name"):
        case str() as class_name:
            return class_name, None
        case [str() as module, str() as class_name] if re.fullmatch(r"\w+", module):
            return class_name, module
        case _:
            raise _error(Code.NOT_A_PIPELINE, f"{file} does not name a pipeline class (_class_name)")


def _modular_index_in(folder: Path) -> PipelineIndex:
    """Return what the index of a modular pipeline says.

    Source: diffusers modular_pipelines/modular_pipeline.py (ModularPipeline.__init__, _is_local_component): a
    component whose files are in the folder is taken from there, wherever the index has it.
    """
    _refuse_blocks_of_its_own(folder)
    file = folder / MODULAR_INDEX_FILE
    index = read_json(file)
    entries: dict[str, Entry | None] = {}
    config: dict[str, Any] = {}
    for name, value in index.items():
        match value:
            case [_, _, dict() as loading]:
                entries[name] = _modular_entry(name, loading, folder)
            case _ if not name.startswith("_"):
                config[name] = value
    blocks = index.get("_blocks_class_name")
    class_name, module = _class_named(index, file)
    if module is not None:
        what = f"{file} asks for a modular pipeline's class out of the repository's own code"
        fix = "name a class of the installed diffusers under pipeline.class"
        raise _error(Code.CODE_NOT_TRUSTED, what, why=NO_CODE, fix=fix)
    return PipelineIndex(
        class_name=class_name,
        entries=entries,
        config=config,
        blocks=blocks if isinstance(blocks, str) else None,
    )


def _refuse_blocks_of_its_own(folder: Path) -> None:
    file = folder / BLOCKS_FILE
    if file.is_file() and "auto_map" in read_json(file):
        what = f"{file} asks for blocks out of the repository's own code"
        fix = "use a copy without it, whose modular_model_index.json names blocks of diffusers"
        raise _error(Code.CODE_NOT_TRUSTED, what, why=NO_CODE, fix=fix)


def _modular_entry(name: str, loading: Mapping[str, Any], folder: Path) -> Entry | None:
    """One component of a modular pipeline's index: None where it says not where it is, or not of which class.

    Those without a class are what the pipeline lacked when it was saved, whatever place stands beside.
    """
    hint = loading.get("type_hint")
    library, class_name = hint if isinstance(hint, list) and len(hint) == 2 else (None, None)
    if class_name is None:
        return None
    library, class_name = (None, None) if class_name in _ANY_MODEL else (library, class_name)
    text = loading.get("pretrained_model_name_or_path") or loading.get("repo")
    given = {key: loading.get(key) for key in ("subfolder", "revision", "variant")}
    subfolder, revision, variant = (value if isinstance(value, str) and value else None for value in given.values())
    if subfolder is not None and _is_there(folder, subfolder):
        own = subfolder if subfolder != name else None
        place = Place(subfolder=own, variant=variant) if own or variant else None
    elif not isinstance(text, str):
        return None
    else:
        place = Place(source=text, subfolder=subfolder, revision=revision, variant=variant)
    return Entry(library=str(library or ""), class_name=str(class_name or ""), place=place)


def _is_there(folder: Path, subfolder: str) -> bool:
    """Tell whether a component's files are in a folder of the pipeline."""
    inner = folder / subfolder
    return ".." not in Path(subfolder).parts and any((inner / config).is_file() for config in CONFIG_FILES)


def connected_pipeline(folder: Path, prefix: str) -> str | None:
    """Return the pipeline that the model card of a pipeline names for components with a prefix, or None.

    Source: diffusers pipelines/pipeline_loading_utils.py (_update_init_kwargs_with_connected_pipeline). Of the card's
    head, which is YAML, no more is read than the first entry of the list under that key.
    """
    card = folder / MODEL_CARD
    try:
        text = card.read_text(encoding="utf-8") if card.is_file() and card.stat().st_size < MAX_JSON_BYTES else ""
    except (OSError, ValueError):
        return None
    head = text.partition("---\n")[2].partition("\n---")[0] if text.startswith("---\n") else ""
    listed = re.search(rf"^{re.escape(prefix)}:\s*(?:\[\s*|\n\s*-\s+)([^\s,\]]+)", head, re.MULTILINE)
    return listed.group(1).strip("\"'") if listed else None


def find_snapshot(hub_id: str, revision: str | None) -> Path | None:
    """Return the snapshot of a repository in the local hub cache, whole or not, or None.

    Source: the layout of the cache, as huggingface_hub documents it.
    """
    repository = hub_cache() / f"models--{hub_id.replace('/', '--')}"
    revision = revision or "main"
    reference = repository / "refs" / revision
    commit = revision if _COMMIT.fullmatch(revision) else reference.read_text().strip() if reference.is_file() else ""
    snapshot = repository / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def hub_cache() -> Path:
    """Return the folder of the local hub cache, which need not exist."""
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or str(Path(home) / "hub")
    return Path(cache).expanduser()


def _error(code: Code, what: str, *, why: str = "", fix: str = "") -> SourceError:
    return SourceError([Problem(code=code, what=what, why=why, fix=fix)])
