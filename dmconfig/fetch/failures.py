"""What can go wrong with a download, as problems: what happened, why, and what to do."""

from __future__ import annotations

import errno
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from dmconfig.assembly import Component
from dmconfig.catalog import known_ids
from dmconfig.errors import BuildError, Code, Problem, nearest
from dmconfig.fetch.repository import Repository, existing_parent
from dmconfig.resolve import Resolved
from dmconfig.source import INDEX_FILE, PICKLES, SINGLE_FILES, hub_cache
from dmconfig.units import format_bytes

_UNREACHABLE = ("Connect", "Timeout", "Proxy")
"""Parts of the names of what httpx and requests raise when nothing answers."""


class FailedError(Exception):
    """Carries a problem and the exception behind it out of the steps below; never leaves this module."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.what)


def collect(step: Callable[[Any], Any], items: Iterable[Any]) -> tuple[list[Any], list[FailedError]]:
    """Return the results of step for all items, and the failures."""
    results: list[Any] = []
    failures: list[FailedError] = []
    for item in items:
        try:
            results.append(step(item))
        except FailedError as failure:
            failures.append(failure)
    return results, failures


def build_error(failures: Sequence[FailedError], resolved: Resolved | None = None) -> BuildError:
    """Return the error that carries all failures, placed in the document where it is given."""
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


def is_gated(error: BuildError) -> bool:
    """Whether the hub gives files only to those who accepted a licence."""
    from huggingface_hub.errors import GatedRepoError

    return isinstance(error.__cause__, GatedRepoError)


def explained(repository: Repository, error: Exception, lacking: Sequence[str]) -> Problem:
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
        return offline(repository, lacking)
    if any(isinstance(each, OSError) and each.errno == errno.ENOSPC for each in chain):
        free = shutil.disk_usage(existing_parent(hub_cache())).free
        return no_space(repository, "the disk is full", free)
    unreachable = next((each for each in chain if any(part in type(each).__name__ for part in _UNREACHABLE)), None)
    if unreachable is not None:
        return _no_connection(repository, unreachable, lacking)
    return broken_off(repository, _sentence(chain[-1]))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _no_repository(repository: Repository) -> Problem:
    meant = nearest(repository.hub_id, known_ids(), cutoff=0.75)
    fix = f"did you mean {meant!r}? " if meant else "check the name. "
    return _problem(
        repository,
        f"the hub has no model repository {repository.hub_id!r}",
        why="or it is private, and you are not logged in with access to it",
        fix=f"{fix}For a private one, log in with: hf auth login",
    )


def _no_revision(repository: Repository) -> Problem:
    what = f"{repository.hub_id!r} has no revision {repository.revision or 'main'!r} on the hub"
    return _problem(repository, what, fix="name one of its branches, tags or full commits")


def _gated(repository: Repository) -> Problem:
    from huggingface_hub import constants

    return _problem(
        repository,
        f"{repository.hub_id!r} may be downloaded only after its licence was accepted",
        why="you are not logged in, or your account has not accepted it",
        fix=f"accept it at {constants.ENDPOINT}/{repository.hub_id} and log in with: hf auth login",
    )


def _refused(repository: Repository, error: BaseException) -> Problem:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    what = f"the hub answered with an error when asked for {repository}"
    fix = "log in anew with: hf auth login" if status in (401, 403) else "try again later"
    return _problem(repository, what, why=_sentence(error), fix=fix)


def _no_connection(repository: Repository, error: BaseException, lacking: Sequence[str]) -> Problem:
    return _problem(
        repository,
        f"the hub cannot be reached, and {repository} is not whole in the local hub cache",
        why=f"lacking are: {', '.join(lacking)} ({_sentence(error)})",
        fix="check the connection and try again; what is in the cache is kept",
    )


def offline(repository: Repository, lacking: Sequence[str]) -> Problem:
    """The repository is not whole here, and downloads are forbidden."""
    forbids = "local_files_only" if repository.local_only else "HF_HUB_OFFLINE"
    lift = f"remove {forbids}" if repository.local_only else f"unset {forbids}"
    return _problem(
        repository,
        f"{repository} is not whole in the local hub cache, and {forbids} forbids downloads",
        why=f"lacking are: {', '.join(lacking)}",
        fix=f"{lift}, or copy the cache of a machine on which this spec was loaded",
    )


def broken_off(repository: Repository, reason: str) -> Problem:
    """The download ended before everything was here."""
    fix = "run it again: files that are whole are kept, only the others are downloaded"
    return _problem(repository, f"the download of {repository} broke off", why=reason, fix=fix)


def no_space(repository: Repository, why: str, free: int) -> Problem:
    """The disk of the cache has no room."""
    return _problem(
        repository,
        f"there is no room for {repository} on the disk of the local hub cache, {hub_cache()}",
        why=f"{why}, {format_bytes(free)} are free",
        fix="free some space (hf cache ls shows what is there), or set HF_HUB_CACHE to a folder on another disk",
    )


def not_a_pipeline(repository: Repository) -> Problem:
    """The repository has no index."""
    what = f"{repository} is not a pipeline: it has no {INDEX_FILE}"
    fix = "name a repository in the diffusers layout; a single model goes under components"
    return _problem(repository, what, fix=fix, code=Code.NOT_A_PIPELINE)


def no_component(repository: Repository, component: Component) -> Problem:
    """The repository has no folder for a component."""
    what = f"{repository} has no folder with {component.name!r}"
    fix = f"name the folder under components.{component.name}.subfolder, or give the component another source"
    return _problem(repository, what, fix=fix, code=Code.SOURCE_NOT_FOUND)


def no_file(repository: Repository, file: str, files: Sequence[str]) -> Problem:
    """The repository has no such file of weights."""
    there = [name for name in files if name.endswith((*SINGLE_FILES, *PICKLES))]
    meant = nearest(file, there)
    fix = f"did you mean {repository.hub_id}/{meant}?" if meant else f"its weights are: {', '.join(there) or 'none'}"
    return _problem(repository, f"{repository} has no file {file}", fix=fix, code=Code.SOURCE_NOT_FOUND)


def no_config(repository: Repository, name: str) -> Problem:
    """The repository has no config for a component."""
    what = f"{repository} has no folder with a config of {name!r}"
    fix = "name the folder that holds its config.json, with source and subfolder"
    return _problem(repository, what, fix=fix, code=Code.SOURCE_NOT_FOUND)


def no_weights(repository: Repository, component: Component) -> Problem:
    """The repository has no safetensors weights for a component."""
    variant = component.variant if component.variant_required else None
    named = f" of variant {variant!r}" if variant else ""
    what = f"{repository} has no safetensors weights{named} of {component.name!r}"
    why = "" if variant else "dmconfig does not load pickles (.bin, .ckpt)"
    fix = f"remove variant from components.{component.name}" if variant else "give the component another source"
    return _problem(repository, what, why=why, fix=fix, code=Code.WEIGHTS_MISSING)


def _problem(
    repository: Repository, what: str, *, why: str = "", fix: str = "", code: Code = Code.DOWNLOAD_FAILED
) -> Problem:
    return Problem(code=code, what=what, path=repository.path, why=why, fix=fix)


def _sentence(error: BaseException) -> str:
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {textwrap.shorten(first[0], 200)}" if first else type(error).__name__
