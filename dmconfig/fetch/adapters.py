"""Adapters that a spec takes from the hub: each one a file by name, and nothing else of its repository."""

from __future__ import annotations

from dmconfig.adapters import Adapter
from dmconfig.assembly import Assembly
from dmconfig.errors import Code, Problem
from dmconfig.fetch.failures import FailedError, build_error, collect
from dmconfig.fetch.hub import download, list_files, no_bars
from dmconfig.fetch.repository import Repository, Selection
from dmconfig.progress import Progress
from dmconfig.resolve import Resolved


def fetch_adapters(assembly: Assembly, progress: Progress, resolved: Resolved | None = None) -> None:
    """Download the files of adapters that are not here; ask nothing when all are.

    Raises: BuildError: DOWNLOAD_FAILED, or BAD_ADAPTER where a repository has no such file; one problem per adapter.
    """
    missing = [adapter for adapter in assembly.adapters if adapter.file is None]
    selections, failures = collect(_select, missing)
    if failures:
        raise build_error(failures, resolved)
    with no_bars():
        for selection in progress.track("download", selections, str):
            try:
                download(selection)
            except FailedError as failure:
                raise build_error([failure], resolved) from failure.__cause__


def _select(adapter: Adapter) -> Selection:
    name = adapter.name_in_repository
    path = (*adapter.path, "source")
    repository = Repository(hub_id=adapter.hub_id or "", revision=adapter.spec.revision, path=path)
    listing = list_files(repository, repository.revision, [name])
    if name not in listing.files:
        there = ", ".join(file for file in listing.files if file.endswith(".safetensors")) or "none"
        what, fix = f"{adapter.hub_id} has no file {name}", f"its .safetensors files are: {there}"
        raise FailedError(Problem(code=Code.BAD_ADAPTER, what=what, fix=fix, path=path))
    return Selection(
        repository=repository,
        revision=repository.revision,
        commit=listing.commit,
        files=(name,),
        missing=(listing.files[name],),
    )
