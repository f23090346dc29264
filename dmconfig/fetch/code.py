"""Code that a spec trusts, downloaded with the configs that name it: files of Python alone, at a commit alone.

What is trusted and at no commit is left to checking to refuse; nothing of it is downloaded.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

from dmconfig.errors import Code, DMConfigError, Problem
from dmconfig.facts import class_facts
from dmconfig.fetch.failures import FailedError
from dmconfig.fetch.files import folder_of, needed_files
from dmconfig.fetch.hub import download, list_files, no_bars
from dmconfig.fetch.repository import Listing, Repository, selection_of
from dmconfig.paths import ConfigPath
from dmconfig.remote_code import locate_code, read_code
from dmconfig.resolve import Resolved
from dmconfig.source import CONFIG_FILES, INDEX_FILE, Source, is_commit, locate_source, read_index
from dmconfig.spec import Spec

_SUFFIX = ".py"


def code_steps(resolved: Resolved, spec: Spec) -> Iterator[Callable[[], None]]:
    """Yield what downloads the code that a spec trusts: of its custom pipeline, its source, and its components'."""
    custom, asked = spec.pipeline.custom_pipeline, spec.pipeline
    if custom is not None and custom.trust_remote_code is not None and is_commit(custom.revision):
        path: ConfigPath = ("pipeline", "custom_pipeline", "source")
        try:
            source = locate_code(custom.source, folder=resolved.folder_of(path), revision=custom.revision)
        except DMConfigError:
            return  # checking tells
        if source.hub_id is not None:
            repository = Repository(hub_id=source.hub_id, revision=custom.revision, path=path)
            yield functools.partial(_bring_file, repository, source.file or "")
    if asked.trust_remote_code is not None and is_commit(asked.revision) and asked.config is None:
        repository = Repository(
            hub_id=asked.source, revision=asked.revision, path=("pipeline", "source"), local_only=asked.local_files_only
        )
        yield functools.partial(_bring_of_pipeline, repository)
    for at, part in spec.written_components:
        if part.trust_remote_code is None or part.source is None or not is_commit(part.revision):
            continue
        path = (*at, "source")
        own = part.local_files_only
        source = locate_source(part.source, folder=resolved.folder_of(path), revision=part.revision)
        if source.hub_id is not None and source.file is None:
            repository = Repository(
                hub_id=source.hub_id,
                revision=part.revision,
                path=path,
                local_only=asked.local_files_only if own is None else own,
            )
            yield functools.partial(_bring_of_component, repository, str(at[1]), part.subfolder)


def _bring_file(repository: Repository, file: str) -> None:
    """Download one file of code, and those in its folder, which it may import."""
    folder = PurePosixPath(file).parent
    snapshot = repository.snapshot
    if snapshot is not None and (snapshot / file).is_file() and _is_complete(snapshot / folder):
        return
    listing = list_files(repository, repository.revision, [file])
    if file not in listing.files:
        there = ", ".join(name for name in listing.files if name.endswith(_SUFFIX)) or "none"
        what, fix = f"{repository} has no file {file}", f"its files of Python are: {there}"
        raise FailedError(Problem(code=Code.SOURCE_NOT_FOUND, what=what, fix=fix, path=repository.path))
    _bring(repository, listing, _code_below(str(folder), listing))


def _bring_of_pipeline(repository: Repository) -> None:
    """Download the code of a pipeline's repository, and the configs of components of which no library has the class."""
    snapshot = repository.snapshot
    if snapshot is None or not (snapshot / INDEX_FILE).is_file():
        return  # one of the catalogue, all of installed classes; or the index could not be had
    index = read_index(Source(text=repository.hub_id, folder=snapshot, hub_id=repository.hub_id))
    entries = {name: entry for name, entry in index.entries.items() if entry is not None}
    unknown = {
        name: entry
        for name, entry in entries.items()
        if entry.class_name.startswith("Auto") or class_facts(entry.library, entry.class_name) is None
    }
    here = (any((snapshot / name / config).is_file() for config in CONFIG_FILES) for name in unknown)
    if _is_complete(snapshot) and all(here):
        return
    listing = list_files(repository, repository.revision, ["its code"])
    texts = (
        needed_files([*listing.files], name, library=entry.library, weights=False) for name, entry in unknown.items()
    )
    _bring(repository, listing, (*_code_below(".", listing), *itertools.chain.from_iterable(texts)))


def _bring_of_component(repository: Repository, name: str, subfolder: str | None) -> None:
    """Download the code and configs of a component's own source."""
    snapshot = repository.snapshot
    here = () if snapshot is None else tuple(each.relative_to(snapshot).as_posix() for each in snapshot.rglob("*.*"))
    if snapshot is not None and _is_complete(snapshot / folder_of(name, subfolder, here)):
        return
    listing = list_files(repository, repository.revision, [f"the code of {name}"])
    folder = folder_of(name, subfolder, [*listing.files])
    texts = needed_files([*listing.files], folder, weights=False)
    _bring(repository, listing, (*_code_below(folder or ".", listing), *texts))


def _bring(repository: Repository, listing: Listing, files: Iterable[str]) -> None:
    chosen = tuple(sorted(set(files)))
    if chosen:
        with no_bars():
            download(selection_of(repository, repository.revision, listing, chosen))


def _code_below(folder: str, listing: Listing) -> Iterator[str]:
    return (file for file in listing.files if file.endswith(_SUFFIX) and PurePosixPath(file).is_relative_to(folder))


def _is_complete(folder: Path) -> bool:
    """Whether there is code in folder, with all that it imports relative to itself."""
    files = [*folder.rglob(f"*{_SUFFIX}")] if folder.is_dir() else []
    try:
        for file in files:
            read_code(file.parent, file.stem, within=folder)
    except DMConfigError:
        return False
    return bool(files)
