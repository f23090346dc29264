"""What a spec needs of the hub and this machine lacks: chosen file by file, then downloaded by huggingface_hub.

Which files those are is decided here, from a repository's own list of files; how they travel, and where in the
cache they come to rest, is huggingface_hub's business. Reading the cache is for ``source``.

Small files are downloaded before weights, so that a component whose weights are here is whole; a repository that is
whole is never asked for. One that lacks something is brought to what its revision names today, as every tool of the
hub does; where only a variant may be lacking, the hub is asked about the commit that is here.

    checking    what came, held against what the hub describes
    files       which files of a repository a component needs
    repository  what is wanted, and what of it is here
    failures    what can go wrong, as problems
    hub         asking and downloading, through huggingface_hub
    adapters    files of adapters
    code        files of code that the spec trusts
    headers     what weights hold, from their headers, without downloading them
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from dmconfig.assembly import Assembly, Component
from dmconfig.catalog import find_pipeline
from dmconfig.checkpoint import FileHeaders, asked_of_hub, pipeline_told_by, tensors_of
from dmconfig.errors import BuildError, Code, DMConfigError, Problem
from dmconfig.facts import pipeline_facts
from dmconfig.fetch.adapters import fetch_adapters
from dmconfig.fetch.code import code_steps
from dmconfig.fetch.failures import (
    FailedError,
    build_error,
    collect,
    is_gated,
    no_component,
    no_config,
    no_file,
    no_space,
    no_weights,
    not_a_pipeline,
)
from dmconfig.fetch.files import WEIGHTS_ENDS, WEIGHTS_SUFFIX, folder_of, needed_files
from dmconfig.fetch.headers import file_headers, remote_tensors
from dmconfig.fetch.hub import download, is_offline, list_files, no_bars
from dmconfig.fetch.repository import (
    Repository,
    Selection,
    existing_parent,
    has_variant,
    inherits_variant,
    lacks,
    may_lack,
    repositories,
    selection_of,
    size_of,
)
from dmconfig.paths import ConfigPath
from dmconfig.pipelines import connected_parts, connected_place
from dmconfig.progress import Progress
from dmconfig.resolve import Resolved
from dmconfig.source import (
    BLOCKS_FILE,
    CONFIG_FILES,
    INDEX_FILE,
    INDEX_FILES,
    MODEL_CARD,
    SINGLE_FILES,
    Source,
    find_snapshot,
    hub_cache,
    is_hub_source,
    locate_source,
    read_index,
)
from dmconfig.spec import Spec
from dmconfig.units import format_bytes

__all__ = [
    "commits_of",
    "fetch",
    "fetch_adapters",
    "fetch_index",
    "fetch_indexes",
    "file_headers",
    "is_gated",
    "is_whole",
    "needed_files",
    "remote_tensors",
]


def is_whole(assembly: Assembly) -> bool:
    """Return whether everything that assembly needs is on this machine, so that the hub need not be asked."""
    return not any(lacks(each) or may_lack(each) for each in repositories(assembly))


def fetch(assembly: Assembly, progress: Progress, resolved: Resolved | None = None) -> None:
    """Download what assembly needs and this machine lacks, and nothing else; ask nothing when nothing is lacking.

    Of a pipeline's repository: its index, and of every component that is used its configs and tokenizer files, and
    the safetensors weights of its variant, or its plain ones where there are none and the variant was asked of the
    whole pipeline. All repositories are asked what they hold before the first file is downloaded.

    Args:
        assembly: what a checked spec is made of.
        progress: told which repository is being downloaded.
        resolved: the spec's document, to place problems in it; None leaves them with their path alone.

    Raises: BuildError: DOWNLOAD_FAILED, or WEIGHTS_MISSING or SOURCE_NOT_FOUND when a repository does not have what
        is needed; one problem per repository.
    """
    wanted = [each for each in repositories(assembly) if lacks(each) or may_lack(each)]
    selections, failures = collect(_select, wanted)
    if not failures:
        failures = [*_variant_nowhere(assembly, selections), *_disk_full(selections)]
    if failures:
        raise build_error(failures, resolved)
    incomplete = [each for each in selections if not each.is_here]
    before = sum(map(_cached_bytes, incomplete))
    total = sum(selection.missing_bytes for selection in incomplete)
    with no_bars():
        for selection in progress.transfer(
            "download", incomplete, str, lambda: sum(map(_cached_bytes, incomplete)) - before, total
        ):
            try:
                download(selection)
            except FailedError as failure:
                raise build_error([failure], resolved) from failure.__cause__


def fetch_index(hub_id: str, revision: str | None) -> None:
    """Download the ``model_index.json`` of a pipeline on the hub, unless it is here.

    Raises: BuildError: DOWNLOAD_FAILED, or NOT_A_PIPELINE when the repository has no index.
    """
    repository = Repository(hub_id=hub_id, revision=revision, is_pipeline=True)
    try:
        _bring_index(repository)
    except FailedError as failure:
        raise build_error([failure]) from failure.__cause__


def fetch_indexes(
    resolved: Resolved, spec: Spec, headers: FileHeaders | None = None, *, with_configs: bool = False
) -> None:
    """Download what checking a spec reads of the hub: its pipeline's index, configs from elsewhere, code it trusts.

    ``headers`` tells what a file of weights on the hub holds, where that says which pipeline's index it goes with.
    ``with_configs``: the configs of all that is in the pipeline too.

    The index of a pipeline that dmconfig has figures for is not needed for checking. A source that cannot be located
    is left to checking to report.

    Raises: BuildError: as ``fetch_index``; one problem per repository, each at its place in the file.
    """
    steps = [*_index_steps(resolved, spec, headers, with_configs), *_config_steps(resolved, spec)]
    # what is connected, and what is code, is told by the first index
    for more in (steps, _connected_steps(resolved, spec), code_steps(resolved, spec)):
        _, failures = collect(lambda step: step(), [*more])
        if failures:
            raise build_error(failures, resolved)


def commits_of(
    resolved: Resolved, references: Sequence[tuple[ConfigPath, str, str | None]]
) -> dict[tuple[str, str | None], str]:
    """Return the commit that each hub id and revision names now; where downloads are forbidden, in the local cache.

    Args:
        resolved: the spec's document, to place problems in it.
        references: the path in the file, the hub id, and the revision, None for the main branch.

    Raises: BuildError: the hub cannot be asked; one problem per repository.
    """
    found: dict[tuple[str, str | None], str] = {}

    def ask(reference: tuple[ConfigPath, str, str | None]) -> None:
        path, hub_id, revision = reference
        repository = Repository(hub_id=hub_id, revision=revision, path=path)
        if (hub_id, revision) in found:
            return
        if is_offline() and (snapshot := repository.snapshot) is not None:
            found[hub_id, revision] = snapshot.name
        else:
            found[hub_id, revision] = list_files(repository, revision, ["its commit"]).commit

    _, failures = collect(ask, references)
    if failures:
        raise build_error(failures, resolved)
    return found


def _select(repository: Repository) -> Selection:
    """Choose what to download of a repository; nothing of one that cannot be asked, if it can be loaded as it is."""
    lacking = lacks(repository)
    snapshot = repository.snapshot
    revision = snapshot.name if snapshot is not None and not lacking else repository.revision
    try:
        listing = list_files(repository, revision, lacking)
    except FailedError:
        if lacking:
            raise
        return Selection(repository=repository, revision=revision, files=())
    return selection_of(repository, revision, listing, _files_of(repository, tuple(listing.files)))


def _files_of(repository: Repository, files: Sequence[str]) -> tuple[str, ...]:
    chosen = set(_indexes_among(files))
    if repository.is_pipeline and not chosen:
        raise FailedError(not_a_pipeline(repository))
    for component in repository.components:
        of_it = _files_of_component(repository, component, files)
        if not of_it:
            raise FailedError(no_component(repository, component))
        if component.is_module and not any(file.endswith(WEIGHTS_ENDS) for file in of_it):
            raise FailedError(no_weights(repository, component))
        chosen.update(of_it)
    for file in repository.files:
        if file not in files:
            raise FailedError(no_file(repository, file, files))
        chosen.add(file)
    for component in repository.configured:
        chosen.update(_files_of_component(repository, component, files, weights=False))
    return tuple(sorted(chosen))


def _files_of_component(
    repository: Repository, component: Component, files: Sequence[str], *, weights: bool = True
) -> tuple[str, ...]:
    return needed_files(
        files,
        folder_of(component.name, component.subfolder, files, is_pipeline=repository.is_pipeline),
        library=component.library,
        variant=component.variant,
        variant_required=component.variant_required,
        weights=weights and component.is_module,
        pickled=component.allows_pickle,
    )


def _variant_nowhere(assembly: Assembly, selections: Sequence[Selection]) -> Iterator[FailedError]:
    """Refuse a variant asked of the whole pipeline that none of its components has, before plain weights are taken."""
    inheriting = [each for each in assembly.modules if inherits_variant(each)]
    asked = [each for each in inheriting if any(each in one.repository.components for one in selections if one.files)]
    if not asked or any(has_variant(each) for each in inheriting):
        return
    variant = asked[0].variant
    weights = [file for one in selections for file in one.files if file.endswith(WEIGHTS_SUFFIX)]
    if not any(f".{variant}" in PurePosixPath(file).name for file in weights):
        what = f"no component has weights of variant {variant!r}"
        yield FailedError(
            Problem(code=Code.WEIGHTS_MISSING, what=what, path=("pipeline", "variant"), fix="remove the line")
        )


def _disk_full(selections: Sequence[Selection]) -> Iterator[FailedError]:
    """Refuse a download that the disk of the cache has no room for."""
    needed = sum(selection.missing_bytes for selection in selections)
    partial = sum(_partial_bytes(selection.repository.hub_id) for selection in selections)
    free = shutil.disk_usage(existing_parent(hub_cache())).free
    largest = max(selections, key=lambda selection: selection.missing_bytes, default=None)
    if largest is not None and needed - partial > free:
        yield FailedError(no_space(largest.repository, f"{format_bytes(needed)} are to be downloaded", free))


def _cached_bytes(selection: Selection) -> int:
    """The bytes of a repository that are in the cache, half downloaded files too."""
    blobs = hub_cache() / f"models--{selection.repository.hub_id.replace('/', '--')}" / "blobs"
    return sum(size_of(file) for file in blobs.glob("*"))


def _partial_bytes(hub_id: str) -> int:
    """Bytes of files that an earlier version of huggingface_hub left half downloaded, and resumes."""
    blobs = hub_cache() / f"models--{hub_id.replace('/', '--')}" / "blobs"
    return sum(file.stat().st_size for file in blobs.glob("*.incomplete"))


def _index_steps(
    resolved: Resolved, spec: Spec, headers: FileHeaders | None, with_configs: bool
) -> Iterator[Callable[[], None]]:
    path, text, revision = _home_of(resolved, spec, headers)
    repository = _unpackaged_home(resolved, spec, path, text, revision)
    if repository is not None:
        yield functools.partial(_bring_index, repository, with_configs=with_configs or path == ("pipeline", "config"))


def _connected_steps(resolved: Resolved, spec: Spec) -> Iterator[Callable[[], None]]:
    """Bring the indexes of the pipelines that the class is made of: those that the file names, or the model card."""
    asked = spec.pipeline
    try:
        folder = resolved.folder_of(("pipeline", "source"))
        source = locate_source(asked.source, folder=folder, revision=asked.revision)
        index = read_index(source)
        facts = pipeline_facts(asked.class_name or index.class_name)
    except DMConfigError:
        return  # checking tells
    for prefix in connected_parts(spec, index, facts) if facts is not None else ():
        yield functools.partial(_bring_connected, resolved, spec, source, prefix)


def _bring_connected(resolved: Resolved, spec: Spec, source: Source, prefix: str) -> None:
    local_only = spec.pipeline.local_files_only
    if prefix not in spec.pipeline.connected.named and source.hub_id is not None:
        _bring_card(Repository(hub_id=source.hub_id, revision=source.revision, local_only=local_only))
    source = replace(source, folder=source.folder or find_snapshot(source.hub_id or "", source.revision))
    place = connected_place(spec, source, prefix)
    if place is None or place.source is None or not is_hub_source(place.source):
        return
    path = place.path or ("pipeline", "source")
    repository = _named(resolved, path, place.source, place.revision, local_only=local_only)
    if repository is not None and find_pipeline(repository.hub_id) is None:
        _bring_index(replace(repository, is_pipeline=True))


def _bring_card(repository: Repository) -> None:
    """Download the model card of a repository, where it has one, unless that is here."""
    repository = replace(repository, path=("pipeline", "source"))
    if repository.snapshot is not None and (repository.snapshot / MODEL_CARD).is_file():
        return
    listing = list_files(repository, repository.revision, [MODEL_CARD])
    if MODEL_CARD in listing.files:
        with no_bars():
            download(selection_of(repository, repository.revision, listing, (MODEL_CARD,)))


def _unpackaged_home(
    resolved: Resolved, spec: Spec, path: ConfigPath, text: str | None, revision: str | None
) -> Repository | None:
    """The repository of the pipeline's index and configs; None where these are here or packaged."""
    if text is None:
        return None
    repository = _named(resolved, path, text, revision, local_only=spec.pipeline.local_files_only)
    if repository is None or find_pipeline(repository.hub_id) is not None:
        return None
    return replace(repository, is_pipeline=True)


def _home_of(resolved: Resolved, spec: Spec, headers: FileHeaders | None) -> tuple[ConfigPath, str | None, str | None]:
    """Where the pipeline's index is: its source, or, of a single file, its config as asked or as its weights tell."""
    asked, path = spec.pipeline, ("pipeline", "source")
    try:
        source = locate_source(
            asked.source, folder=resolved.folder_of(path), revision=asked.revision, local_only=asked.local_files_only
        )
        if source.file is None:
            return path, asked.source, asked.revision
        if asked.config is None and not source.is_gguf:
            tensors = tensors_of(asked_of_hub(source, headers))
            return path, pipeline_told_by(tensors) if tensors is not None else None, None
    except BuildError as error:
        raise BuildError(resolved.located(error.problems, path)) from error
    except DMConfigError:
        return path, None, None  # checking tells
    return ("pipeline", "config"), asked.config, asked.config_revision


def _config_steps(resolved: Resolved, spec: Spec) -> Iterator[Callable[[], None]]:
    for path, component in spec.written_components:
        local_only = component.local_files_only
        local_only = spec.pipeline.local_files_only if local_only is None else local_only
        for key, text, revision in (
            ("source", component.source, component.revision),
            ("config", component.config_source, component.config_revision),
        ):
            at = (*path, key)
            repository = _named(resolved, at, text, revision, local_only=local_only) if text is not None else None
            if repository is not None:
                yield functools.partial(_bring_config, repository, str(path[1]), component.subfolder)
        if component.config_source is None and component.source is not None and component.source.endswith(SINGLE_FILES):
            home = _unpackaged_home(
                resolved, spec, ("pipeline", "source"), spec.pipeline.source, spec.pipeline.revision
            )
            if home is not None:
                yield functools.partial(_bring_config, home, str(path[1]), component.subfolder, required=False)


def _named(
    resolved: Resolved, path: ConfigPath, text: str, revision: str | None, *, local_only: bool
) -> Repository | None:
    """The repository that a source names, unless it is none, or names one file of weights, which has no config."""
    try:
        source = locate_source(text, folder=resolved.folder_of(path), revision=revision)
    except DMConfigError:
        return None
    if source.hub_id is None or source.file is not None:
        return None
    return Repository(hub_id=source.hub_id, revision=revision, path=path, local_only=local_only)


def _bring_index(repository: Repository, *, with_configs: bool = False) -> None:
    """Download the index of a pipeline; ``with_configs`` the configs of what is in it too."""
    snapshot = repository.snapshot
    here = [] if snapshot is None else _of_components(_files_in(snapshot))
    if not lacks(repository) and (here or not with_configs):
        return
    listing = list_files(repository, repository.revision, [INDEX_FILE])
    indexes = _indexes_among(tuple(listing.files))
    if not indexes:
        raise FailedError(not_a_pipeline(repository))
    files = (*indexes, *(_of_components(tuple(listing.files)) if with_configs else ()))
    with no_bars():
        download(selection_of(repository, repository.revision, listing, files))


def _indexes_among(files: Sequence[str]) -> tuple[str, ...]:
    """The indexes of a pipeline, and where it names blocks of its own code; of none, nothing."""
    indexes = tuple(name for name in INDEX_FILES if name in files)
    return (*indexes, *(name for name in (BLOCKS_FILE,) if indexes and name in files))


def _of_components(files: Iterable[str]) -> list[str]:
    """The configs among the files of a pipeline, of its models and schedulers."""
    names = CONFIG_FILES[:2]
    return [file for file in files if PurePosixPath(file).name in names and file.count("/") == 1]


def _bring_config(repository: Repository, name: str, subfolder: str | None, *, required: bool = True) -> None:
    """Download the config of one model, and the index of the pipeline it is in, if it is in one."""
    if repository.snapshot is not None and _configs_among(_files_in(repository.snapshot), name, subfolder):
        return
    listing = list_files(repository, repository.revision, [f"the config of {name}"])
    files = _configs_among(tuple(listing.files), name, subfolder)
    if not files and not required:
        return  # checking tells
    if not files:
        raise FailedError(no_config(repository, name))
    index = _indexes_among(tuple(listing.files))
    with no_bars():
        download(selection_of(repository, repository.revision, listing, (*index, *files)))


def _configs_among(files: Sequence[str], name: str, subfolder: str | None) -> tuple[str, ...]:
    folder = folder_of(name, subfolder, files)
    prefix = f"{folder}/" if folder else ""
    return tuple(prefix + config for config in CONFIG_FILES if prefix + config in files)


def _files_in(folder: Path) -> tuple[str, ...]:
    return tuple(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
