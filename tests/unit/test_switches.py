"""Switches held against the installed libraries: what a release renames is an error with a hint, not a silence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dmconfig.errors import Code, SpecError
from dmconfig.facts import lookup
from dmconfig.facts.installed import find_library, installed_libraries
from tests.conftest import checked_from, only_problem

FLUX = "version: 1\npipeline: {source: black-forest-labs/FLUX.1-dev}\n"


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str], None]]:
    """Give a function that installs a diffusers in which one file has other words: file, words, other words."""
    library = find_library("diffusers")
    assert library is not None
    lookups = (lookup._class, lookup._method, lookup._fields, lookup._backends, lookup._sources, installed_libraries)

    def install(file: str, old: str, new: str) -> None:
        _link_but(library.folder, tmp_path / "site" / "diffusers", Path(file).parts)
        text = (library.folder / file).read_text()
        assert old in text
        (tmp_path / "site" / "diffusers" / file).write_text(text.replace(old, new))
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        monkeypatch.delitem(sys.modules, "diffusers", raising=False)
        monkeypatch.setenv("DMCONFIG_CACHE", str(tmp_path / "cache"))
        for each in lookups:
            each.cache_clear()

    yield install
    for each in lookups:
        each.cache_clear()


def _link_but(source: Path, target: Path, way: tuple[str, ...]) -> None:
    """Link all of a folder but the file at the end of the way."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name != way[0]:
            (target / entry.name).symlink_to(entry)
        elif len(way) > 1:
            _link_but(entry, target / entry.name, way[1:])


def test_argument_that_a_release_renames_is_told_with_its_new_name(release: Callable[[str, str, str], None]) -> None:
    """A threshold that is called otherwise in the installed version: the place, and what it takes now."""
    text = FLUX + "components: {transformer: {cache: {class: FirstBlockCacheConfig, config: {threshold: 0.1}}}}"
    assert checked_from(text)
    release("hooks/first_block_cache.py", "threshold: float", "residual_threshold: float")

    with pytest.raises(SpecError) as error:
        checked_from(text)

    problem = only_problem(error.value)
    assert problem.path == ("components", "transformer", "cache", "config", "threshold")
    assert problem.what == "FirstBlockCacheConfig, as installed, takes no 'threshold'"
    assert problem.fix == "did you mean 'residual_threshold'?"


def test_option_of_group_offload_that_a_release_renames_is_told(release: Callable[[str, str, str], None]) -> None:
    """The options of group offload are diffusers' own; one that is gone is told with what is there."""
    text = (
        FLUX + "low_memory: group_offload\ndevice_map: cuda:0\ngroup_offload: {use_stream: true, record_stream: true}"
    )
    assert checked_from(text)
    release("models/modeling_utils.py", "record_stream: bool", "record_streams: bool")

    with pytest.raises(SpecError) as error:
        checked_from(text)

    problem = only_problem(error.value)
    assert problem.path == ("group_offload", "record_stream")
    assert problem.fix == "did you mean 'record_streams'?"


def test_attention_backend_that_a_release_drops_is_told(release: Callable[[str, str, str], None]) -> None:
    """A word that the installed version does not have any more."""
    text = FLUX + "components: {transformer: {attention_backend: xformers}}"
    assert checked_from(text)
    release("models/attention_dispatch.py", 'XFORMERS = "xformers"', 'XFORMERS = "xformers_2"')

    with pytest.raises(SpecError) as error:
        checked_from(text)

    assert only_problem(error.value).fix == "did you mean 'xformers_2'?"


@pytest.mark.parametrize(
    ("backend", "fix"),
    [
        ("flash_hub", "install the package of 'flash' and write that"),
        ("sage_blackwell_hub", "write another, e.g. native"),
    ],
)
def test_attention_backend_that_would_be_fetched_and_run_is_refused(backend: str, fix: str) -> None:
    """Compiled code of a repository, of a version that moves, is code like any other; others are offered instead."""
    with pytest.raises(SpecError) as error:
        checked_from(FLUX + f"components: {{transformer: {{attention_backend: {backend}}}}}")
    problem = only_problem(error.value)
    assert problem.code is Code.CODE_NOT_TRUSTED
    assert problem.what == f"{backend!r} is compiled code, which diffusers would fetch from the hub at no commit"
    assert problem.fix == fix


@pytest.mark.parametrize(
    ("switches", "place", "path"),
    [
        ("compile: true", "{execution: 0, offload: sequential}", "offload"),
        ("compile: true", "{execution: ['cuda:0', 'cuda:1']}", "execution"),
        ("compile: {fullgraph: true}", "{execution: 0, offload: group}", "offload"),
        ("layerwise_casting: true", "{execution: 0, offload: model, storage: disk}", "storage"),
        ("memory_format: channels_last", "{execution: 0, offload: model, storage: disk}", "storage"),
    ],
)
def test_switches_and_places_that_do_not_go_together_are_refused(switches: str, place: str, path: str) -> None:
    """Told before loading, at the place, with the reason."""
    text = f"{FLUX}components: {{transformer: {{{switches}}}}}\ndevice_map: {{transformer: {place}, default: 0}}"

    with pytest.raises(SpecError) as error:
        checked_from(text)

    assert only_problem(error.value).path == ("device_map", "transformer", path)


@pytest.mark.parametrize("offload", ["none", "model", "group"])
def test_compiling_goes_with_what_upstream_says_it_does(offload: str) -> None:
    """A compiled component may stay, or be brought whole or in groups."""
    place = f"{{execution: 0, offload: {offload}}}"

    assert checked_from(
        f"{FLUX}components: {{transformer: {{compile: true}}}}\ndevice_map: {{transformer: {place}, default: 0}}"
    )
