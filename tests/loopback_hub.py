"""A hub on 127.0.0.1 for the real client: serves repositories made from folders, notes what is asked, fails on demand.

It answers what huggingface_hub asks when it lists and downloads a model: info, tree, and resolve with HEAD, GET and
byte ranges, or a redirect to another host. Uploads and Xet storage are left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


@dataclass(kw_only=True)
class Repo:
    """One repository at one commit.

    ``failure`` is what happens to its files: ``gated`` refuses them (listing stays open, as on the hub), ``error``
    answers 500 to everything, ``truncated`` breaks each body off in the middle, ``truncated-once`` only the first
    of each file. The files in ``broken_files`` are refused with 500; a ``private`` repository, as on the hub, reads
    like one that is not there; the bodies of ``tampered_files`` have another last byte than the hub describes. Weights
    are kept in LFS, as on the hub, and described by their SHA-256. With ``ignores_ranges`` a part of a file is
    answered with all of it; with ``kept_at``, the URL of another hub, files are kept there and one is sent to them, as
    for large files of the hub.
    """

    files: dict[str, bytes]
    branches: tuple[str, ...] = ("main",)
    failure: str = ""
    broken_files: frozenset[str] = frozenset()
    private: bool = False
    tampered_files: frozenset[str] = frozenset()
    ignores_ranges: bool = False
    kept_at: str = ""

    @property
    def commit(self) -> str:
        """The hash of its names and contents, so that a change of either is a new commit."""
        content = hashlib.sha1(usedforsecurity=False)
        for name, data in sorted(self.files.items()):
            content.update(name.encode() + b"\0" + data)
        return content.hexdigest()


@dataclass(kw_only=True)
class Hub:
    """The repositories, and every request in order (``GET name/of/repo file``).

    ``sent`` counts the bytes of the bodies that were sent, per repository and file; ``tokens`` are those it was shown.
    """

    url: str
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    broken_off: set[str] = field(default_factory=set)
    sent: dict[str, int] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)

    def add(self, hub_id: str, folder: Path | None = None, more: Mapping[str, bytes] | None = None) -> Repo:
        """Serve the files of folder, and more, as hub_id."""
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in _files(folder)} if folder else {}
        self.repos[hub_id] = Repo(files={**files, **(more or {})})
        return self.repos[hub_id]

    def downloaded(self, hub_id: str) -> list[str]:
        """Return the files of hub_id that were sent, sorted; one that was sent twice is listed twice."""
        prefix = f"GET {hub_id} "
        return sorted(request.removeprefix(prefix) for request in self.requests if request.startswith(prefix))


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    """Run a hub without repositories in a thread of its own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = Hub(url=f"http://127.0.0.1:{server.server_address[1]}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub of this test alone, an empty cache, no token, no waiting between the client's tries."""
    with serve() as hub:
        ask(hub, monkeypatch, tmp_path / "home")
        yield hub


def ask(hub: Hub, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Have the real client ask this hub alone, with an empty cache, no token and no waiting between its tries."""
    from huggingface_hub import constants, file_download

    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(home))
    # the client read its settings when it was imported
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for module in (constants, file_download):  # the latter has a copy of it before version 1
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", ".bin"))


def _etag(name: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if _is_large(name) else _blob_id(data)


def _lfs(key: str, name: str, data: bytes) -> dict[str, Any]:
    """What the hub says of a file in LFS; its two interfaces name the hash differently."""
    if not _is_large(name):
        return {}
    return {"lfs": {key: hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        return hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass

    def _answer(self) -> None:
        self.hub.tokens.update(self.headers.get_all("Authorization", []))
        match unquote(urlsplit(self.path).path).strip("/").split("/"):
            case ["api", "models", owner, name, *rest]:
                self._api(f"{owner}/{name}", rest)
            case [owner, name, "resolve", revision, *parts]:
                self._file(f"{owner}/{name}", revision, "/".join(parts))
            case _:
                self._refuse(404, "EntryNotFound")

    def _api(self, hub_id: str, rest: list[str]) -> None:
        self.hub.requests.append(f"API {hub_id} {'/'.join(rest[:1]) or 'info'}")
        match rest:
            case []:
                kind, revision = "info", "main"
            case ["revision", *parts]:
                kind, revision = "info", "/".join(parts)
            case ["tree", revision, *_]:
                kind = "tree"
            case _:
                self._refuse(404, "EntryNotFound")
                return
        repo = self._repo(hub_id, revision)
        if repo is not None:
            self._json(_info(hub_id, repo) if kind == "info" else _tree(repo))

    def _repo(self, hub_id: str, revision: str) -> Repo | None:
        repo = self.hub.repos.get(hub_id)
        if repo is None:
            self._refuse(404, "RepoNotFound")
        elif repo.private:
            self._refuse(401, "RepoNotFound")
        elif repo.failure == "error":
            self._refuse(500, "")
        elif revision not in (*repo.branches, repo.commit):
            self._refuse(404, "RevisionNotFound")
        else:
            return repo
        return None

    def _file(self, hub_id: str, revision: str, name: str) -> None:
        self.hub.requests.append(f"{self.command} {hub_id} {name}")
        repo = self._repo(hub_id, revision)
        if repo is None:
            return
        if repo.failure == "gated":
            self._refuse(403, "GatedRepo")
        elif name in repo.broken_files:
            self._refuse(500, "")
        elif name not in repo.files:
            self._refuse(404, "EntryNotFound")
        elif repo.kept_at:
            self._redirect(f"{repo.kept_at}/{hub_id}/resolve/{revision}/{name}?signature=x")
        else:
            self._send(hub_id, repo, name)

    def _send(self, hub_id: str, repo: Repo, name: str) -> None:
        data = repo.files[name]
        etag = _etag(name, data)
        if name in repo.tampered_files:
            data = data[:-1] + bytes([data[-1] ^ 1])
        asked = self.headers.get("Range") if not repo.ignores_ranges else None
        first, _, last = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(data)) + 1, len(data))
        if asked and start >= len(data):
            self._refuse(416, "", {"Content-Range": f"bytes */{len(data)}"})
            return
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", repo.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if repo.failure == "truncated" or (repo.failure == "truncated-once" and name not in self.hub.broken_off):
            self.hub.broken_off.add(name)
            self._write(hub_id, name, data[start : (start + end) // 2])
            self.close_connection = True
            return
        self._write(hub_id, name, data[start:end])

    def _write(self, hub_id: str, name: str, data: bytes) -> None:
        """Send data piece by piece, and count it; a client that has enough hangs up."""
        key = f"{hub_id} {name}"
        self.hub.sent.setdefault(key, 0)
        for begin in range(0, len(data), 2**16):
            piece = data[begin : begin + 2**16]
            self.hub.sent[key] += len(piece)  # before the client can have it, and look
            try:
                self.wfile.write(piece)
            except OSError:
                self.close_connection = True
                return

    def _redirect(self, url: str) -> None:
        self.send_response(302)
        self.send_header("Location", url)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, code: str, more: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (more or {}).items():
            self.send_header(name, value)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _info(hub_id: str, repo: Repo) -> dict[str, Any]:
    siblings = [
        {"rfilename": name, "size": len(data), "blobId": _blob_id(data), **_lfs("sha256", name, data)}
        for name, data in sorted(repo.files.items())
    ]
    return {"id": hub_id, "modelId": hub_id, "sha": repo.commit, "private": False, "tags": [], "siblings": siblings}


def _tree(repo: Repo) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": name, "size": len(data), "oid": _blob_id(data), **_lfs("oid", name, data)}
        for name, data in sorted(repo.files.items())
    ]
