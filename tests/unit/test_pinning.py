"""``dmconfig pin``: commits written into specs, with everything else of the text as it was; a hub on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from dmconfig.cli import app
from dmconfig.editing import set_beside
from dmconfig.errors import DocumentError
from dmconfig.pinning import pin
from tests.loopback_hub import Hub, serve

INDEX = {"model_index.json": b"{}"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with two repositories, and an empty cache."""
    with serve() as hub:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        hub.add("a/one", more=INDEX).branches = ("main", "v1")
        hub.add("b/two", more={**INDEX, "x.gguf": b"GGUF"})
        yield hub


@pytest.fixture
def spec(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        file = tmp_path / "pipe.yaml"
        file.write_bytes(text.encode())
        return file

    return write


BEFORE = """\
# our deployment
version: 1
pipeline:
  source: a/one   # the base

  dtype: bfloat16
components:
    vae: {source: 'b/two', dtype: fp16}  # fixed
    unet:
        revision: v1 # was tested
        source: "a/one"
    transformer: {source: b/two/x.gguf, config: a/one}
    text_encoder: {source: ./local}
"""
AFTER = """\
# our deployment
version: 1
pipeline:
  source: a/one   # the base
  revision: ONE

  dtype: bfloat16
components:
    vae: {source: 'b/two', revision: TWO, dtype: fp16}  # fixed
    unet:
        revision: ONE # was tested
        source: "a/one"
    transformer: {source: b/two/x.gguf, revision: TWO, config: a/one, config_revision: ONE}
    text_encoder: {source: ./local}
"""


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_pin_writes_commits_and_nothing_else(hub: Hub, spec: Callable[[str], Path], line_end: str) -> None:
    """Every hub id gets its commit beside it, in block and flow style; comments, quotes and line ends stay."""
    file = spec(BEFORE.replace("\n", line_end))
    pinned = pin(file)
    pinned.write()
    expected = AFTER.replace("ONE", hub.repos["a/one"].commit).replace("TWO", hub.repos["b/two"].commit)
    assert file.read_bytes().decode() == expected.replace("\n", line_end)
    assert [(each.hub_id, each.revision) for each in pinned.pins] == [
        ("a/one", None), ("b/two", None), ("a/one", "v1"), ("b/two", None), ("a/one", None),
    ]  # fmt: skip
    assert pin(file).pins == ()


def test_pin_command_tells_what_it_wrote_and_check_writes_nothing(hub: Hub, spec: Callable[[str], Path]) -> None:
    """``--check`` is for CI: it ends with 2 while something is not pinned, and leaves the file alone."""
    file = spec("version: 1\npipeline: {source: a/one}\n")
    commit = hub.repos["a/one"].commit
    checked = CliRunner().invoke(app, ["pin", str(file), "--check"])
    assert (checked.exit_code, checked.stdout) == (2, f"{file}: a/one main -> {commit}\n")
    assert "revision" not in file.read_text()
    written = CliRunner().invoke(app, ["pin", str(file)])
    assert (written.exit_code, written.stdout) == (0, checked.stdout)
    again = CliRunner().invoke(app, ["pin", str(file), "--check"])
    assert (again.exit_code, again.stdout) == (0, f"{file}: nothing to pin\n")


def test_pin_of_what_is_not_there_changes_nothing(hub: Hub, spec: Callable[[str], Path]) -> None:
    """One repository that cannot be asked leaves the whole file as it was, and is named at its place."""
    text = "version: 1\npipeline: {source: a/one}\ncomponents: {vae: {source: no/such}}\n"
    file = spec(text)
    result = CliRunner().invoke(app, ["pin", str(file)])
    assert result.exit_code == 4
    assert f"error[DM407 download-failed]: {file}:3:28" in result.stderr
    assert file.read_text() == text


def test_pin_offline_takes_what_was_downloaded_last(
    hub: Hub, spec: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where downloads are forbidden the cache tells the commit, and nothing is asked."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "cache" / "models--a--one"
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (found,) = pin(spec("version: 1\npipeline: {source: a/one}\n")).pins
    assert found.commit == COMMIT
    assert hub.requests == []


def test_pin_of_a_shared_mapping_writes_it_once(hub: Hub, spec: Callable[[str], Path]) -> None:
    """An anchor that two components share is one place of the text, and pins both."""
    text = "version: 1\npipeline: {source: ./x}\ncomponents: {vae: &v {source: a/one}, unet: *v}\n"
    file = spec(text)
    commit = hub.repos["a/one"].commit
    assert pin(file).text == text.replace("a/one}", f"a/one, revision: {commit}}}")


def test_set_beside_quotes_what_would_be_a_number() -> None:
    """A commit of digits alone, or that reads as an exponent, stays text."""
    for commit in ("1" * 40, "1" * 20 + "e" + "2" * 19):
        text = set_beside("a: {source: x/y}\n", {("a", "revision"): commit}, after={("a", "revision"): "source"})
        assert text == f'a: {{source: x/y, revision: "{commit}"}}\n'


def test_set_beside_refuses_a_key_it_cannot_find() -> None:
    """What is not in the text, as an override is not, cannot be edited there."""
    with pytest.raises(DocumentError):
        set_beside("a: 1\n", {("b", "revision"): COMMIT}, after={("b", "revision"): "source"})


def test_pin_leaves_what_is_in_another_file_to_that_file(hub: Hub, spec: Callable[[str], Path], tmp_path: Path) -> None:
    """A file that extends another has only its own hub ids pinned."""
    (tmp_path / "base.yaml").write_text("version: 1\npipeline: {source: a/one}\n")
    file = spec("extends: base.yaml\ncomponents: {vae: {source: b/two}}\n")
    assert [each.hub_id for each in pin(file).pins] == ["b/two"]
    assert [each.hub_id for each in pin(tmp_path / "base.yaml").pins] == ["a/one"]
