"""What a spec needs of the hub and this machine lacks: chosen file by file, then downloaded by huggingface_hub.

Which files those are is decided here, from a repository's own list of files; how they travel, and where in the
cache they come to rest, is huggingface_hub's business. Reading the cache is for ``source``.

Small files are downloaded before weights, so that a component whose weights are here is whole; a repository that is
whole is never asked for. One that lacks something is brought to what its revision names today, as every tool of the
hub does; where only a variant may be lacking, the hub is asked about the commit that is here.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from dmconfig.assembly import Assembly, Component
from dmconfig.catalog import find_pipeline, known_ids
from dmconfig.errors import BuildError, Code, DMConfigError, Problem, nearest
from dmconfig.measure import component_weights
from dmconfig.paths import ROOT, ConfigPath
from dmconfig.progress import Progress
from dmconfig.resolve import Resolved
from dmconfig.source import CONFIG_FILES, INDEX_FILE, Source, find_snapshot, hub_cache, locate_source
from dmconfig.spec import Spec
from dmconfig.units import format_bytes
from dmconfig.version import __version__
from dmconfig.weights import find_weights, weight_names

_TEXT_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".spm", ".tiktoken"})
"""Configs, vocabularies, merges, sentencepiece models, chat templates: what is not weights, and not code."""

_WEIGHTS_SUFFIX = ".safetensors"
_WEIGHTS_INDEX = re.compile(r".*\.index(\.[\w-]+)?\.json")
_UNREACHABLE = ("Connect", "Timeout", "Proxy")
"""Parts of the names of what httpx and requests raise when nothing answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repository:
    """A repository of the hub at a revision, and what is wanted of it; ``path`` is where the file names it."""

    hub_id: str
    revision: str | None = None
    components: tuple[Component, ...] = ()
    is_pipeline: bool = False
    path: ConfigPath = ROOT

    @property
    def snapshot(self) -> Path | None:
        """Its folder in the cache, whole or not."""
        return find_snapshot(self.hub_id, self.revision)

    def __str__(self) -> str:
        return f"{self.hub_id!r} (revision {self.revision})" if self.revision else repr(self.hub_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """The files of a repository that are needed, and how many of them, of how many bytes, are not here."""

    repository: _Repository
    revision: str | None
    commit: str = ""
    files: tuple[str, ...]
    missing_files: int = 0
    missing_bytes: int = 0

    @property
    def is_here(self) -> bool:
        """Whether all of it is in the cache, and the revision leads there."""
        if not self.files:
            return True
        snapshot = find_snapshot(self.repository.hub_id, self.revision)
        return snapshot is not None and snapshot.name == self.commit and not self.missing_files

    def __str__(self) -> str:
        files = "1 file" if self.missing_files == 1 else f"{self.missing_files} files"
        return f"{self.repository.hub_id} ({files}, {format_bytes(self.missing_bytes)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """What the hub says is in a repository: the bytes of every file, at a commit."""

    commit: str
    sizes: Mapping[str, int]


class _FailedError(Exception):
    """Carries a problem and the exception behind it out of the steps below; never leaves this module."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.what)


def is_whole(assembly: Assembly) -> bool:
    """Return whether everything that assembly needs is on this machine, so that the hub need not be asked."""
    return not any(_lacks(each) or _may_lack(each) for each in _repositories(assembly))


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
    wanted = [each for each in _repositories(assembly) if _lacks(each) or _may_lack(each)]
    selections, failures = _collect(_select, wanted)
    if not failures:
        failures = [*_variant_nowhere(assembly, selections), *_disk_full(selections)]
    if failures:
        raise _build_error(failures, resolved)
    incomplete = [each for each in selections if not each.is_here]
    with _bars_on_terminals_only():
        for selection in progress.track("download", incomplete, str):
            try:
                _download(selection)
            except _FailedError as failure:
                raise _build_error([failure], resolved) from failure.__cause__


def fetch_index(hub_id: str, revision: str | None) -> None:
    """Download the ``model_index.json`` of a pipeline on the hub, unless it is here.

    Raises: BuildError: DOWNLOAD_FAILED, or NOT_A_PIPELINE when the repository has no index.
    """
    repository = _Repository(hub_id=hub_id, revision=revision, is_pipeline=True)
    try:
        _bring_index(repository)
    except _FailedError as failure:
        raise _build_error([failure]) from failure.__cause__


def fetch_indexes(resolved: Resolved, spec: Spec) -> None:
    """Download what checking a spec reads of the hub: the index of its pipeline, configs of models from elsewhere.

    The index of a pipeline that dmconfig has figures for is not needed for checking. A source that cannot be located
    is left to checking to report.

    Raises: BuildError: as ``fetch_index``; one problem per repository, each at its place in the file.
    """
    steps = [*_index_steps(resolved, spec), *_config_steps(resolved, spec)]
    _, failures = _collect(lambda step: step(), steps)
    if failures:
        raise _build_error(failures, resolved)


def needed_files(
    files: Sequence[str],
    folder: str = "",
    *,
    library: str = "diffusers",
    variant: str | None = None,
    variant_required: bool = False,
    weights: bool = True,
) -> tuple[str, ...]:
    """Return the files of a repository that one component of it needs, sorted; pure.

    Args:
        files: the names of all files of the repository.
        folder: the component's folder in it; empty for a repository that is one model.
        library: whose loader reads it, which decides the names of weights.
        variant: weights variant; where the component has none of it, its plain weights are taken.
        variant_required: take no plain weights in place of a variant.
        weights: whether the component has weights; never more than one set of them is taken.

    Example:
        >>> needed_files(["vae/config.json", "vae/model.fp16.safetensors", "vae/model.safetensors", "vae/m.bin"],
        ...              "vae", library="transformers", variant="fp16")
        ('vae/config.json', 'vae/model.fp16.safetensors')
    """
    prefix = f"{folder}/" if folder else ""
    names = {file.removeprefix(prefix) for file in files if file.startswith(prefix)}
    names = {name for name in names if "/" not in name}
    chosen = {name for name in names if _is_text(name)}
    if weights:
        variants = [variant] if variant_required or variant is None else [variant, None]
        sets = (_weights_among(names, library, each) for each in variants)
        chosen.update(next(filter(None, sets), ()))
    return tuple(sorted(prefix + name for name in chosen))


def _is_text(name: str) -> bool:
    return PurePosixPath(name).suffix in _TEXT_SUFFIXES and not _WEIGHTS_INDEX.fullmatch(name)


def _weights_among(names: set[str], library: str, variant: str | None) -> tuple[str, ...]:
    """One set of weights, chosen as ``find_weights`` chooses: a file, or an index and its shards."""
    for name in weight_names(library, variant):
        if name not in names:
            continue
        if name.endswith(_WEIGHTS_SUFFIX):
            return (name,)
        shards = _shards_among(names, name.partition(_WEIGHTS_SUFFIX)[0], variant)
        if shards:
            return (name, *shards)
    return ()


def _shards_among(names: set[str], stem: str, variant: str | None) -> tuple[str, ...]:
    # two forms for a variant: older versions of both libraries wrote it at the end
    number, stem = r"-\d+-of-\d+", re.escape(stem)
    forms = [stem + number] if variant is None else [f"{stem}.{variant}{number}", f"{stem}{number}.{variant}"]
    shard = re.compile(rf"({'|'.join(forms)})\.safetensors")
    return tuple(name for name in names if shard.fullmatch(name))


# What is wanted, and what of it is here


def _repositories(assembly: Assembly) -> list[_Repository]:
    """The repositories that assembly is made from, with all it takes from each."""
    found: dict[tuple[str, str | None], _Repository] = {}

    def add(source: Source, path: ConfigPath, *components: Component) -> None:
        if source.hub_id is None:
            return
        key = (source.hub_id, source.revision)
        known = found.get(key) or _Repository(hub_id=key[0], revision=key[1], path=path)
        is_pipeline = known.is_pipeline or source is assembly.source
        found[key] = replace(known, components=(*known.components, *components), is_pipeline=is_pipeline)

    add(assembly.source, ("pipeline", "source"))
    for component in assembly.components:
        own = component.source is not assembly.source
        add(component.source, (*component.path, "source") if own else ("pipeline", "source"), component)
    return list(found.values())


def _lacks(repository: _Repository) -> list[str]:
    """What must be downloaded before the pipeline can be loaded, in words."""
    index_here = repository.snapshot is not None and (repository.snapshot / INDEX_FILE).is_file()
    lacking = [INDEX_FILE] if repository.is_pipeline and not index_here else []
    for component in repository.components:
        if component.folder is None:
            lacking.append(component.name)
        elif component.is_module and not _is_whole_module(component, component.folder):
            wanted = component.variant if component.variant_required else None
            lacking.append(
                f"the {wanted} weights of {component.name}" if wanted else f"the weights of {component.name}"
            )
    return lacking


def _is_whole_module(component: Component, folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file() and component_weights(component) is not None
    except DMConfigError:  # an index without its files
        return False


def _may_lack(repository: _Repository) -> bool:
    """Whether the hub may have weights of the pipeline's variant where this machine has plain ones."""
    inheriting = [each for each in repository.components if each.is_module and _inherits_variant(each)]
    return any(not _has_variant(each) for each in inheriting)


def _inherits_variant(component: Component) -> bool:
    return component.variant is not None and not component.variant_required


def _has_variant(component: Component) -> bool:
    if component.folder is None:
        return False
    try:
        return find_weights(component.folder, library=component.library, variant=component.variant) is not None
    except DMConfigError:
        return False


# Choosing


def _select(repository: _Repository) -> _Selection:
    """Choose what to download of a repository; nothing of one that cannot be asked, if it can be loaded as it is."""
    lacking = _lacks(repository)
    snapshot = repository.snapshot
    revision = snapshot.name if snapshot is not None and not lacking else repository.revision
    try:
        listing = _list(repository, revision, lacking)
    except _FailedError:
        if lacking:
            raise
        return _Selection(repository=repository, revision=revision, files=())
    return _selection(repository, revision, listing, _files_of(repository, tuple(listing.sizes)))


def _files_of(repository: _Repository, files: Sequence[str]) -> tuple[str, ...]:
    chosen = {INDEX_FILE} & set(files)
    if repository.is_pipeline and not chosen:
        raise _FailedError(_not_a_pipeline(repository))
    for component in repository.components:
        of_it = _files_of_component(repository, component, files)
        if not of_it:
            raise _FailedError(_no_component(repository, component))
        if component.is_module and not any(file.endswith(_WEIGHTS_SUFFIX) for file in of_it):
            raise _FailedError(_no_weights(repository, component))
        chosen.update(of_it)
    return tuple(sorted(chosen))


def _files_of_component(repository: _Repository, component: Component, files: Sequence[str]) -> tuple[str, ...]:
    return needed_files(
        files,
        _folder_of(component.name, component.subfolder, files, is_pipeline=repository.is_pipeline),
        library=component.library,
        variant=component.variant,
        variant_required=component.variant_required,
        weights=component.is_module,
    )


def _folder_of(name: str, subfolder: str | None, files: Sequence[str], *, is_pipeline: bool = False) -> str:
    """Return where in a repository a component is, by the rule of ``assembly``: as asked, by its name, or the root."""
    if subfolder:
        return subfolder.strip("/")
    return name if is_pipeline or INDEX_FILE in files else ""


def _selection(repository: _Repository, revision: str | None, listing: _Listing, files: tuple[str, ...]) -> _Selection:
    here = find_snapshot(repository.hub_id, listing.commit)
    missing = [file for file in files if here is None or not (here / file).is_file()]
    return _Selection(
        repository=repository,
        revision=revision,
        commit=listing.commit,
        files=files,
        missing_files=len(missing),
        missing_bytes=sum(listing.sizes[file] for file in missing),
    )


def _variant_nowhere(assembly: Assembly, selections: Sequence[_Selection]) -> Iterator[_FailedError]:
    """Refuse a variant asked of the whole pipeline that none of its components has, before plain weights are taken."""
    inheriting = [each for each in assembly.modules if _inherits_variant(each)]
    asked = [each for each in inheriting if any(each in one.repository.components for one in selections if one.files)]
    if not asked or any(_has_variant(each) for each in inheriting):
        return
    variant = asked[0].variant
    weights = [file for one in selections for file in one.files if file.endswith(_WEIGHTS_SUFFIX)]
    if not any(f".{variant}" in PurePosixPath(file).name for file in weights):
        what = f"no component has weights of variant {variant!r}"
        yield _FailedError(
            Problem(code=Code.WEIGHTS_MISSING, what=what, path=("pipeline", "variant"), fix="remove the line")
        )


def _disk_full(selections: Sequence[_Selection]) -> Iterator[_FailedError]:
    """Refuse a download that the disk of the cache has no room for."""
    needed = sum(selection.missing_bytes for selection in selections)
    partial = sum(_partial_bytes(selection.repository.hub_id) for selection in selections)
    free = shutil.disk_usage(_existing_parent(hub_cache())).free
    largest = max(selections, key=lambda selection: selection.missing_bytes, default=None)
    if largest is not None and needed - partial > free:
        yield _FailedError(_no_space(largest.repository, f"{format_bytes(needed)} are to be downloaded", free))


def _partial_bytes(hub_id: str) -> int:
    """Bytes of files that an earlier version of huggingface_hub left half downloaded, and resumes."""
    blobs = hub_cache() / f"models--{hub_id.replace('/', '--')}" / "blobs"
    return sum(file.stat().st_size for file in blobs.glob("*.incomplete"))


def _existing_parent(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.exists())


# Indexes and configs ahead of everything else


def _index_steps(resolved: Resolved, spec: Spec) -> Iterator[Callable[[], None]]:
    path: ConfigPath = ("pipeline", "source")
    repository = _named(resolved, path, spec.pipeline.source, spec.pipeline.revision)
    if repository is not None and find_pipeline(repository.hub_id) is None:
        yield functools.partial(_bring_index, replace(repository, is_pipeline=True))


def _config_steps(resolved: Resolved, spec: Spec) -> Iterator[Callable[[], None]]:
    for name, component in spec.components.items():
        if component is None or component.source is None:
            continue
        repository = _named(resolved, ("components", name, "source"), component.source, component.revision)
        if repository is not None:
            yield functools.partial(_bring_config, repository, name, component.subfolder)


def _named(resolved: Resolved, path: ConfigPath, text: str, revision: str | None) -> _Repository | None:
    try:
        source = locate_source(text, folder=resolved.folder_of(path), revision=revision)
    except DMConfigError:
        return None
    return _Repository(hub_id=source.hub_id, revision=revision, path=path) if source.hub_id else None


def _bring_index(repository: _Repository) -> None:
    if not _lacks(repository):
        return
    listing = _list(repository, repository.revision, [INDEX_FILE])
    if INDEX_FILE not in listing.sizes:
        raise _FailedError(_not_a_pipeline(repository))
    with _bars_on_terminals_only():
        _download(_selection(repository, repository.revision, listing, (INDEX_FILE,)))


def _bring_config(repository: _Repository, name: str, subfolder: str | None) -> None:
    """Download the config of one model, and the index of the pipeline it is in, if it is in one."""
    if repository.snapshot is not None and _configs_among(_files_in(repository.snapshot), name, subfolder):
        return
    listing = _list(repository, repository.revision, [f"the config of {name}"])
    files = _configs_among(tuple(listing.sizes), name, subfolder)
    if not files:
        raise _FailedError(_no_config(repository, name))
    index = (INDEX_FILE,) if INDEX_FILE in listing.sizes else ()
    with _bars_on_terminals_only():
        _download(_selection(repository, repository.revision, listing, (*index, *files)))


def _configs_among(files: Sequence[str], name: str, subfolder: str | None) -> tuple[str, ...]:
    folder = _folder_of(name, subfolder, files)
    prefix = f"{folder}/" if folder else ""
    return tuple(prefix + config for config in CONFIG_FILES if prefix + config in files)


def _files_in(folder: Path) -> tuple[str, ...]:
    return tuple(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


# Asking the hub


def _list(repository: _Repository, revision: str | None, lacking: Sequence[str]) -> _Listing:
    _refuse_offline(repository, lacking)
    try:
        info = _api().model_info(repository.hub_id, revision=revision, files_metadata=True)
    except Exception as error:
        raise _FailedError(_explained(repository, error, lacking)) from error
    return _Listing(commit=info.sha, sizes={each.rfilename: each.size or 0 for each in info.siblings or ()})


def _download(selection: _Selection) -> None:
    """Bring the files of selection into the cache: those without weights first, then all of them, at one commit."""
    repository = selection.repository
    texts = [file for file in selection.files if not file.endswith(_WEIGHTS_SUFFIX)]
    try:
        folder = _snapshot(repository, selection.revision, texts)
        if len(texts) < len(selection.files):
            folder = _snapshot(repository, folder.name, selection.files)
    except Exception as error:
        raise _FailedError(_explained(repository, error, _lacks(repository))) from error
    missing = [file for file in selection.files if not (folder / file).is_file()]
    if missing:  # huggingface_hub before 1.0 returns a part of a snapshot when the connection is lost
        raise _FailedError(_broken_off(repository, f"not here: {', '.join(missing)}"))


def _snapshot(repository: _Repository, revision: str | None, files: Iterable[str]) -> Path:
    # names are patterns here: what is special in them must not be
    patterns = [glob.escape(file) for file in files]
    cache = str(hub_cache())
    api = _api()
    return Path(api.snapshot_download(repository.hub_id, revision=revision, cache_dir=cache, allow_patterns=patterns))


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="dmconfig", library_version=__version__)


def _refuse_offline(repository: _Repository, lacking: Sequence[str]) -> None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise _FailedError(_offline(repository, lacking))


@contextlib.contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Keep huggingface_hub's progress bars out of logs; what the user said about them goes first."""
    from huggingface_hub import constants, utils

    silence = not sys.stderr.isatty() and not utils.are_progress_bars_disabled()
    if not silence or constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


# Failures


def _collect(step: Callable[[Any], Any], items: Iterable[Any]) -> tuple[list[Any], list[_FailedError]]:
    """Return the results of step for all items, and the failures."""
    results: list[Any] = []
    failures: list[_FailedError] = []
    for item in items:
        try:
            results.append(step(item))
        except _FailedError as failure:
            failures.append(failure)
    return results, failures


def _build_error(failures: Sequence[_FailedError], resolved: Resolved | None = None) -> BuildError:
    problems = [failure.problem for failure in failures]
    if resolved is not None:
        places = [resolved.place(problem.path) for problem in problems]
        problems = [
            replace(problem, location=location, origin=origin)
            for problem, (location, origin) in zip(problems, places, strict=True)
        ]
    error = BuildError(problems)
    error.__cause__ = failures[0].__cause__
    return error


def _explained(repository: _Repository, error: Exception, lacking: Sequence[str]) -> Problem:
    """Return what an exception of huggingface_hub means for the user."""
    from huggingface_hub import errors

    chain = list(_causes(error))
    match = next((each for each in chain if isinstance(each, errors.HfHubHTTPError)), None)
    if isinstance(match, errors.GatedRepoError):
        return _gated(repository)
    if isinstance(match, errors.RepositoryNotFoundError):
        return _no_repository(repository)
    if isinstance(match, errors.RevisionNotFoundError):
        return _no_revision(repository)
    if match is not None:
        return _refused(repository, match)
    if isinstance(error, errors.HFValidationError):
        what = f"{repository.hub_id!r} is not a hub id"
        return _problem(repository, what, why=_sentence(error), code=Code.SOURCE_NOT_FOUND)
    if any(isinstance(each, errors.OfflineModeIsEnabled) for each in chain):
        return _offline(repository, lacking)
    if any(isinstance(each, OSError) and each.errno == errno.ENOSPC for each in chain):
        free = shutil.disk_usage(_existing_parent(hub_cache())).free
        return _no_space(repository, "the disk is full", free)
    unreachable = next((each for each in chain if any(part in type(each).__name__ for part in _UNREACHABLE)), None)
    if unreachable is not None:
        return _no_connection(repository, unreachable, lacking)
    return _broken_off(repository, _sentence(chain[-1]))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _no_repository(repository: _Repository) -> Problem:
    meant = nearest(repository.hub_id, known_ids(), cutoff=0.75)
    fix = f"did you mean {meant!r}? " if meant else "check the name. "
    return _problem(
        repository,
        f"the hub has no model repository {repository.hub_id!r}",
        why="or it is private, and you are not logged in with access to it",
        fix=f"{fix}For a private one, log in with: hf auth login",
    )


def _no_revision(repository: _Repository) -> Problem:
    what = f"{repository.hub_id!r} has no revision {repository.revision or 'main'!r} on the hub"
    return _problem(repository, what, fix="name one of its branches, tags or full commits")


def _gated(repository: _Repository) -> Problem:
    from huggingface_hub import constants

    return _problem(
        repository,
        f"{repository.hub_id!r} may be downloaded only after its licence was accepted",
        why="you are not logged in, or your account has not accepted it",
        fix=f"accept it at {constants.ENDPOINT}/{repository.hub_id} and log in with: hf auth login",
    )


def _refused(repository: _Repository, error: BaseException) -> Problem:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    what = f"the hub answered with an error when asked for {repository}"
    fix = "log in anew with: hf auth login" if status in (401, 403) else "try again later"
    return _problem(repository, what, why=_sentence(error), fix=fix)


def _no_connection(repository: _Repository, error: BaseException, lacking: Sequence[str]) -> Problem:
    return _problem(
        repository,
        f"the hub cannot be reached, and {repository} is not whole in the local hub cache",
        why=f"lacking are: {', '.join(lacking)} ({_sentence(error)})",
        fix="check the connection and try again; what is in the cache is kept",
    )


def _offline(repository: _Repository, lacking: Sequence[str]) -> Problem:
    return _problem(
        repository,
        f"{repository} is not whole in the local hub cache, and HF_HUB_OFFLINE forbids downloads",
        why=f"lacking are: {', '.join(lacking)}",
        fix="unset HF_HUB_OFFLINE, or copy the cache of a machine on which this spec was loaded",
    )


def _broken_off(repository: _Repository, reason: str) -> Problem:
    fix = "run it again: files that are whole are kept, only the others are downloaded"
    return _problem(repository, f"the download of {repository} broke off", why=reason, fix=fix)


def _no_space(repository: _Repository, why: str, free: int) -> Problem:
    return _problem(
        repository,
        f"there is no room for {repository} on the disk of the local hub cache, {hub_cache()}",
        why=f"{why}, {format_bytes(free)} are free",
        fix="free some space (hf cache ls shows what is there), or set HF_HUB_CACHE to a folder on another disk",
    )


def _not_a_pipeline(repository: _Repository) -> Problem:
    what = f"{repository} is not a pipeline: it has no {INDEX_FILE}"
    fix = "name a repository in the diffusers layout; a single model goes under components"
    return _problem(repository, what, fix=fix, code=Code.NOT_A_PIPELINE)


def _no_component(repository: _Repository, component: Component) -> Problem:
    what = f"{repository} has no folder with {component.name!r}"
    fix = f"name the folder under components.{component.name}.subfolder, or give the component another source"
    return _problem(repository, what, fix=fix, code=Code.SOURCE_NOT_FOUND)


def _no_config(repository: _Repository, name: str) -> Problem:
    what = f"{repository} has no folder with a config of {name!r}"
    fix = "name the folder that holds its config.json, with source and subfolder"
    return _problem(repository, what, fix=fix, code=Code.SOURCE_NOT_FOUND)


def _no_weights(repository: _Repository, component: Component) -> Problem:
    variant = component.variant if component.variant_required else None
    named = f" of variant {variant!r}" if variant else ""
    what = f"{repository} has no safetensors weights{named} of {component.name!r}"
    why = "" if variant else "dmconfig does not load pickles (.bin, .ckpt)"
    fix = f"remove variant from components.{component.name}" if variant else "give the component another source"
    return _problem(repository, what, why=why, fix=fix, code=Code.WEIGHTS_MISSING)


def _problem(
    repository: _Repository, what: str, *, why: str = "", fix: str = "", code: Code = Code.DOWNLOAD_FAILED
) -> Problem:
    return Problem(code=code, what=what, path=repository.path, why=why, fix=fix)


def _sentence(error: BaseException) -> str:
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {textwrap.shorten(first[0], 200)}" if first else type(error).__name__
