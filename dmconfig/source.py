"""Where a pipeline or a component is, and what its index says is in it. Reads small JSON files, never weights.

A source is a local folder or a hub id; which of the two is told by how it is written, never by what happens to
exist on the machine. A hub id is looked up in the local hub cache and in the packaged catalogue; fetching is for
``fetch``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dmconfig.catalog import find_pipeline, known_ids
from dmconfig.configs import config_folder
from dmconfig.errors import Code, Problem, SourceError, nearest

INDEX_FILE = "model_index.json"
CONFIG_FILES = ("config.json", "scheduler_config.json", "preprocessor_config.json", "tokenizer_config.json")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_PAGE = re.compile(r"https?://[^/]+/([A-Za-z0-9][\w.-]*/[\w.-]+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A local folder, or a hub id with the folder of its snapshot when that is on this machine."""

    text: str
    folder: Path | None
    hub_id: str | None = None
    revision: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One component as an index names it: its library and class."""

    library: str
    class_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineIndex:
    """What a pipeline says is in it: its class, its components (None where it leaves one out), its other settings."""

    class_name: str
    entries: Mapping[str, Entry | None]
    config: Mapping[str, Any] = field(default_factory=dict)


def locate_source(text: str, *, folder: Path, revision: str | None = None) -> Source:
    """Return the source that text names; a relative folder starts in ``folder``.

    Raises: SourceError: the folder does not exist, or text is neither a folder nor a hub id.
    """
    if is_local(text):
        return _local(text, folder)
    if not _HUB_ID.fullmatch(text):
        page = _HUB_PAGE.match(text)
        fix = f"write ./{text} for a folder beside the file, or organisation/name for a hub id"
        fix = f"write the hub id in it: {page.group(1)}" if page else fix
        raise _error(Code.SOURCE_NOT_FOUND, f"{text!r} is neither a folder nor a hub id", fix=fix)
    if (folder / text).is_dir():
        why = "a hub id and a folder may have the same name; which is meant must not depend on the machine"
        what = f"{text!r} reads as a hub id, and a folder of that name exists"
        raise _error(Code.SOURCE_NOT_FOUND, what, why=why, fix=f"write ./{text} if the folder is meant")
    return Source(text=text, folder=find_snapshot(text, revision), hub_id=text, revision=revision)


def is_local(text: str) -> bool:
    """Tell whether a source is written as a folder; anything else is a hub id."""
    return text.startswith(("./", "../", "/", "~")) or text in (".", "..")


def is_hub_id(text: str) -> bool:
    """Tell whether text has the form of a hub id, organisation/name."""
    return _HUB_ID.fullmatch(text) is not None


def read_index(source: Source) -> PipelineIndex:
    """Return what the pipeline at source says is in it; for a hub id not on this machine, from the catalogue.

    Raises: SourceError: no pipeline is there, its index is damaged, or it is on the hub and not known here.
    """
    if source.folder is not None and (source.hub_id is None or (source.folder / INDEX_FILE).is_file()):
        return _index_in(source.folder)
    known = find_pipeline(source.text)
    if known is None:
        raise _unknown_here(source)
    entries = {part.name: Entry(library=part.library, class_name=part.class_name) for part in known.components}
    packaged = config_folder(known.hub_id)
    config = _index_in(packaged).config if packaged is not None else {}
    return PipelineIndex(class_name=known.class_name, entries=entries, config=config)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises: SourceError: the file is not readable JSON, or holds something else than an object.
    """
    try:
        value = json.loads(file.read_bytes())
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
            architectures = config.get("architectures") or [None]
            named = config.get("_class_name") or architectures[0]
            return str(named) if named else None
    return None


def _local(text: str, folder: Path) -> Source:
    try:
        path = Path(os.path.normpath(folder / Path(text).expanduser()))
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:  # a name the system cannot hold; the home of nobody
        raise _error(Code.SOURCE_NOT_FOUND, f"{text[:80]} cannot be looked up: {error}") from None
    if is_file:
        what = f"{text} is a file; single-file checkpoints are not supported yet"
        raise _error(Code.NOT_SUPPORTED_YET, what, fix="convert it to a diffusers folder")
    if not is_folder:
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        meant = nearest(path.name, siblings)
        fix = f"did you mean {meant!r} in {path.parent}?" if meant else f"check the path; it starts in {folder}"
        raise _error(Code.SOURCE_NOT_FOUND, f"there is no folder {path}", fix=fix)
    return Source(text=text, folder=path)


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
    class_name = index.get("_class_name")
    if not isinstance(class_name, str):
        raise _error(Code.NOT_A_PIPELINE, f"{file} does not name a pipeline class (_class_name)")
    entries: dict[str, Entry | None] = {}
    config: dict[str, Any] = {}
    for name, value in index.items():
        match value:
            case [str() as library, str() as class_of]:
                entries[name] = Entry(library=library, class_name=class_of)
            case [None, None]:
                entries[name] = None
            case _ if not name.startswith("_"):
                config[name] = value
    return PipelineIndex(class_name=class_name, entries=entries, config=config)


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
