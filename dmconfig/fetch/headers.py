"""What weights on the hub hold, from their headers alone: a few range requests per file, never a weight.

A safetensors header says first how long it is. That of a GGUF file does not, so it is asked for piece by piece, each
twice as long as the one before: what it holds beside tensors, such as a tokenizer, takes up to some megabytes.

The client's session, token, endpoint and errors are huggingface_hub's; what is asked for, and that no more comes, is
decided here. The rules of the format and their words are those of ``weights``: headers read from afar are held to the
same length, coverage and index as files on this machine.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from dmconfig.checkpoint import FileHeaders
from dmconfig.errors import Code, Problem, SourceError
from dmconfig.fetch.failures import FailedError, broken_off, build_error, explained, no_file
from dmconfig.fetch.files import WEIGHTS_SUFFIX, needed_files
from dmconfig.fetch.hub import list_files
from dmconfig.fetch.repository import Listing, Repository
from dmconfig.gguf import gguf_problem, parse_gguf
from dmconfig.source import Source
from dmconfig.version import __version__
from dmconfig.weights import (
    LENGTH,
    MAX_HEADER_BYTES,
    BadFileError,
    TensorInfo,
    TruncatedError,
    check_file_length,
    check_header_length,
    corrupt,
    index_differences,
    parse_header,
    parse_weight_map,
    repeated_names,
)

_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")
_NOT_SATISFIABLE = 416
_PARTIAL = 206
_ASK = "ask its authors, or name another revision"
_FIRST_RANGE_BYTES, _LONGEST_RANGE_BYTES = 2**16, 2**22


def remote_tensors(
    repo_id: str, revision: str | None, folder: str, library: str, variant: str | None
) -> tuple[TensorInfo, ...] | None:
    """Return the tensors of one component of a repository on the hub; None when it has no safetensors weights there.

    Exact as ``find_weights`` and ``read_tensors`` are: with a variant only files of that variant count, an index is
    held against its files, and every file is as long as its header says. Of a file only its header travels, of an
    index all; everything is read at one commit.

    Args:
        repo_id: the repository's id.
        revision: a branch, tag or commit; None is the main branch.
        folder: the component's folder in it; empty for a repository that is one model.
        library: whose loader would read it, which decides the names of weights.
        variant: weights variant; None for the plain weights.

    Raises: BuildError: DOWNLOAD_FAILED or SOURCE_NOT_FOUND when the hub cannot be asked or does not answer range
        requests. SourceError: WEIGHTS_MISSING when an index lists files that are absent, WEIGHTS_CORRUPT when a file
        breaks the format, with the problems of all files together.
    """
    repository = Repository(hub_id=repo_id, revision=revision)
    lacking = [f"the headers of the weights of {folder or repo_id}"]
    try:
        listing = list_files(repository, revision, lacking)
        return _tensors(_Remote(repository, listing, folder, lacking), library, variant)
    except FailedError as failure:
        raise build_error([failure]) from failure.__cause__


def remote_file(source: Source) -> tuple[TensorInfo, ...] | None:
    """Return the tensors of one file of weights on the hub; None for a source that is none, or is a pickle.

    As ``checkpoint.read_single_file`` returns them of the same file on this machine. Only its header travels.

    Raises: BuildError: DOWNLOAD_FAILED or SOURCE_NOT_FOUND when the hub cannot be asked, does not answer range
        requests, or has no such file. SourceError: WEIGHTS_CORRUPT when it breaks its format.
    """
    if source.hub_id is None or source.file is None or source.is_pickle:
        return None
    repository = Repository(hub_id=source.hub_id, revision=source.revision, local_only=source.local_only)
    lacking = [f"the header of {source.file}"]
    try:
        listing = list_files(repository, source.revision, lacking)
        if source.file not in listing.files:
            raise FailedError(no_file(repository, source.file, tuple(listing.files)))
        tensors, problem = _read_file(_Remote(repository, listing, "", lacking), source.file)
    except FailedError as failure:
        raise build_error([failure]) from failure.__cause__
    if problem is not None:
        raise SourceError([_from_the_hub(problem)])
    return tensors


def file_headers() -> FileHeaders:
    """Return ``remote_file`` that asks for each file once."""
    return functools.cache(remote_file)


@dataclass(frozen=True, slots=True)
class _Remote:
    """The folder of a component on the hub, at a commit; ``lacking`` is what is wanted of it, in words."""

    repository: Repository
    listing: Listing
    folder: str
    lacking: list[str]

    def name_of(self, file: str) -> str:
        """Return the file's name in the repository."""
        return f"{self.folder}/{file}" if self.folder else file

    def place_of(self, file: str) -> Path:
        """Return a path of the file, for reading by people: no such file is on this machine."""
        return Path(self.repository.hub_id, self.name_of(file))

    def url_of(self, file: str) -> str:
        from huggingface_hub import hf_hub_url

        return str(hf_hub_url(self.repository.hub_id, self.name_of(file), revision=self.listing.commit))


def _tensors(remote: _Remote, library: str, variant: str | None) -> tuple[TensorInfo, ...] | None:
    chosen = needed_files(
        tuple(remote.listing.files),
        remote.folder,
        library=library,
        variant=variant,
        variant_required=variant is not None,
    )
    names = [PurePosixPath(file).name for file in chosen]
    files = tuple(name for name in names if name.endswith(WEIGHTS_SUFFIX))
    index = next((name for name in names if f"{WEIGHTS_SUFFIX}.index." in name), None)
    if not files:
        return None
    if index is None:
        return _read(remote, files, None, b"")
    text = _whole(remote, index)
    return _read(remote, _shards(remote, index, text), index, text)


def _read(remote: _Remote, files: tuple[str, ...], index: str | None, text: bytes) -> tuple[TensorInfo, ...]:
    problems: list[Problem] = []
    by_file: dict[Path, tuple[TensorInfo, ...]] = {}
    for file in files:
        tensors, problem = _read_file(remote, file)
        if problem is None:
            by_file[remote.place_of(file)] = tensors
        else:
            problems.append(problem)
    problems += repeated_names(by_file)
    if index is not None:
        problems += index_differences(remote.place_of(index), parse_weight_map(text), by_file)
    if problems:
        raise SourceError(_from_the_hub(problem) for problem in problems)
    return tuple(tensor for tensors in by_file.values() for tensor in tensors)


def _read_file(remote: _Remote, file: str) -> tuple[tuple[TensorInfo, ...], Problem | None]:
    """Return the tensors of a file, and what is wrong with it, which nobody has begun to download."""
    place, is_gguf = remote.place_of(file), file.lower().endswith(".gguf")
    try:
        return (_gguf_header if is_gguf else _header)(remote, file), None
    except BadFileError as error:
        return (), replace(gguf_problem(place, error) if is_gguf else corrupt(place, error), why="")


def _shards(remote: _Remote, index: str, text: bytes) -> tuple[str, ...]:
    place = remote.place_of(index)
    try:
        names = sorted(set(parse_weight_map(text).values()))
    except BadFileError as error:
        raise SourceError([_from_the_hub(corrupt(place, error, kind="weights index"))]) from error
    absent = [name for name in names if remote.name_of(name) not in remote.listing.files]
    if absent:
        what = f"weights index {place} lists files that are not on the hub: {', '.join(absent)}"
        raise SourceError([Problem(code=Code.WEIGHTS_MISSING, what=what, fix=_ASK, origin=str(place))])
    return tuple(names)


def _from_the_hub(problem: Problem) -> Problem:
    """The problem of a file that is damaged on the hub itself: downloading it again is no remedy."""
    return replace(problem, fix=_ASK)


# The header of one file


def _header(remote: _Remote, file: str) -> tuple[TensorInfo, ...]:
    start, file_bytes = _range(remote, file, 0, LENGTH.size)
    if len(start) < LENGTH.size:
        raise TruncatedError(f"is truncated: a safetensors file has at least 8 bytes, this one has {file_bytes}")
    (header_bytes,) = LENGTH.unpack(start)
    check_header_length(header_bytes, file_bytes)
    text, _ = _range(remote, file, LENGTH.size, header_bytes)
    tensors = parse_header(text)
    check_file_length(LENGTH.size + header_bytes + sum(tensor.nbytes for tensor in tensors), file_bytes)
    return tensors


def _gguf_header(remote: _Remote, file: str) -> tuple[TensorInfo, ...]:
    ranges = _Ranges(remote, file)
    return parse_gguf(ranges, ranges.file_bytes)


class _Ranges:
    """A file on the hub as a stream that is read forwards. What is stepped over does not travel, but for read-ahead."""

    def __init__(self, remote: _Remote, file: str) -> None:
        self._remote, self._file = remote, file
        self._length = _FIRST_RANGE_BYTES
        self._held, self.file_bytes = _range(remote, file, 0, self._length)
        self._at = 0  # in what is held
        self._end = len(self._held)  # of it, in the file

    def read(self, count: int, /) -> bytes:
        """Return the next count bytes, which the file must have."""
        if self._at + count > len(self._held):
            self._ask(count)
        begin, self._at = self._at, self._at + count
        return self._held[begin : self._at]

    def seek(self, count: int, whence: int, /) -> int:  # noqa: ARG002 - always from where it is
        """Step over count bytes."""
        self._at += count
        return self._end - len(self._held) + self._at

    def _ask(self, count: int) -> None:
        """Hold what follows, in a range of at least count bytes."""
        kept = self._held[self._at :]
        begin = self._end + max(0, self._at - len(self._held))
        self._length = min(2 * self._length, _LONGEST_RANGE_BYTES)
        more, _ = _range(self._remote, self._file, begin, max(self._length, count - len(kept)))
        self._held, self._at, self._end = kept + more, 0, begin + len(more)


def _range(remote: _Remote, file: str, begin: int, count: int) -> tuple[bytes, int]:
    """Return count bytes of a file from begin, fewer where it ends before, and the length of the file."""
    with _answer(remote, file, {"Range": f"bytes={begin}-{begin + count - 1}"}) as response:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if match is None or response.status_code not in (_PARTIAL, _NOT_SATISFIABLE):
            raise FailedError(_no_ranges(remote, file))
        file_bytes = int(match[3])
        if response.status_code == _NOT_SATISFIABLE:  # the file ends before begin
            return b"", file_bytes
        end = min(begin + count, file_bytes)
        if (match[1], match[2]) != (str(begin), str(end - 1)):
            raise FailedError(_no_ranges(remote, file))
        return _body(remote, response, end - begin), file_bytes


def _whole(remote: _Remote, file: str) -> bytes:
    with _answer(remote, file, {}) as response:
        return _body(remote, response, None)


def _body(remote: _Remote, response: Any, count: int | None) -> bytes:
    """Return the body of a response, of count bytes if that is known; no more is taken than a header may have."""
    pieces = getattr(response, "iter_bytes", None) or functools.partial(response.iter_content, 2**16)
    body = bytearray()
    for piece in pieces():
        body += piece
        if len(body) > (MAX_HEADER_BYTES if count is None else count):
            break
    if count is not None and len(body) != count:
        raise FailedError(broken_off(remote.repository, f"{count} bytes were asked for, {len(body)} came"))
    return bytes(body)


@contextlib.contextmanager
def _answer(remote: _Remote, file: str, headers: Mapping[str, str]) -> Iterator[Any]:
    """Ask for a file, wherever the hub keeps it, and hand out the response before its body is read.

    Raises: FailedError: the hub refuses, or nothing answers.
    """
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    ours = build_hf_headers(library_name="dmconfig", library_version=__version__)
    # a packed body would have another length
    asked = {**ours, "Accept-Encoding": "identity", **headers}
    try:
        with _get(remote.url_of(file), asked) as response:
            if response.status_code != _NOT_SATISFIABLE:
                hf_raise_for_status(response)
            yield response
    except (FailedError, BadFileError):
        raise
    except Exception as error:
        raise FailedError(explained(remote.repository, error, remote.lacking)) from error


def _get(url: str, headers: Mapping[str, str]) -> contextlib.AbstractContextManager[Any]:
    """A streamed GET with the session of huggingface_hub, which is one of requests before its version 1."""
    from huggingface_hub import constants, get_session

    session: Any = get_session()
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    if callable(getattr(session, "stream", None)):
        stream: contextlib.AbstractContextManager[Any] = session.stream(
            "GET", url, headers=headers, timeout=timeout, follow_redirects=True
        )
        return stream
    response: contextlib.AbstractContextManager[Any] = session.get(url, headers=headers, timeout=timeout, stream=True)
    return response


def _no_ranges(remote: _Remote, file: str) -> Problem:
    return Problem(
        code=Code.DOWNLOAD_FAILED,
        what=f"the header of {remote.place_of(file)} cannot be read from afar: range requests are not answered",
        why="the server, or a proxy before it, sends whole files only, or another part than the one asked for",
        fix="load it once with load_from_yaml or dmconfig run, which downloads what it needs",
    )
