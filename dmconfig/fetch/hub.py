"""Asking the hub and downloading from it, both through huggingface_hub."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dmconfig.fetch.checking import check_download
from dmconfig.fetch.failures import FailedError, broken_off, explained, offline
from dmconfig.fetch.files import WEIGHTS_ENDS
from dmconfig.fetch.repository import File, Listing, Repository, Selection, lacks
from dmconfig.source import find_snapshot, hub_cache
from dmconfig.version import __version__


def list_files(repository: Repository, revision: str | None, lacking: Sequence[str]) -> Listing:
    """Return what a repository holds at a revision; ``lacking`` is what it is asked for, in words.

    Raises: FailedError: it cannot be asked.
    """
    _refuse_offline(repository, lacking)
    try:
        info = _api().model_info(repository.hub_id, revision=revision, files_metadata=True)
    except Exception as error:
        raise FailedError(explained(repository, error, lacking)) from error
    return Listing(commit=info.sha, files={each.rfilename: _described(each) for each in info.siblings or ()})


def _described(sibling: Any) -> File:
    lfs = sibling.lfs
    return File(
        name=sibling.rfilename,
        nbytes=sibling.size or 0,
        git_sha1=sibling.blob_id if lfs is None else None,
        sha256=lfs.sha256 if lfs is not None else None,
    )


def download(selection: Selection) -> None:
    """Bring the files of selection into the cache: those without weights first, then all of them, at one commit.

    Raises: FailedError: the download failed, or what came is not what the hub says there is; such a file is removed.
    """
    repository = selection.repository
    texts = [file for file in selection.files if not file.endswith(WEIGHTS_ENDS)]
    try:
        folder = _snapshot(repository, selection.revision, texts)
        check_download(selection, folder)  # before weights: what lacks only a text would pass for whole
        if len(texts) < len(selection.files):
            folder = _snapshot(repository, folder.name, selection.files)
    except FailedError:
        raise
    except Exception as error:
        arrived = find_snapshot(repository.hub_id, selection.commit)
        if arrived is not None:
            check_download(selection, arrived)  # what is here already is not downloaded again
        raise FailedError(explained(repository, error, lacks(repository))) from error
    check_download(selection, folder)
    missing = [file for file in selection.files if not (folder / file).is_file()]
    if missing:  # huggingface_hub before 1.0 returns a part of a snapshot when the connection is lost
        raise FailedError(broken_off(repository, f"not here: {', '.join(missing)}"))


def _snapshot(repository: Repository, revision: str | None, files: Iterable[str]) -> Path:
    # names are patterns here: what is special in them must not be
    patterns = [glob.escape(file) for file in files]
    cache = str(hub_cache())
    api = _api()
    return Path(api.snapshot_download(repository.hub_id, revision=revision, cache_dir=cache, allow_patterns=patterns))


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="dmconfig", library_version=__version__)


def is_offline() -> bool:
    """Tell whether the environment forbids asking the hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _refuse_offline(repository: Repository, lacking: Sequence[str]) -> None:
    if is_offline() or repository.local_only:
        raise FailedError(offline(repository, lacking))


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """Keep huggingface_hub's progress bars, one per file, off the screen: progress is reported once, by us."""
    from huggingface_hub import constants, utils

    if utils.are_progress_bars_disabled() or constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:
        yield  # what the user says about them goes first
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()
