"""What would make a pipeline fit: named when it does not, and rehearsed on request; what is said to help has run."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dmconfig.checked import check_file
from dmconfig.errors import Code, MachineError, Problem, RunError, SpecError
from dmconfig.inventory import parse_machine
from dmconfig.load import plan_for
from dmconfig.rehearse import Rehearsal, Settings, apart, rehearsal_text, rehearse
from dmconfig.rehearse.model import Remedy
from dmconfig.rehearse.remedies import Change, changes, remedies
from dmconfig.rehearse.report import rehearsal_data, verdict
from dmconfig.resolve import overrides_from_mapping
from dmconfig.staging import rehearse_file, script_of
from dmconfig.units import MIB
from tests.tiny_pipelines import write_spec

SETTINGS = Settings(height=256, width=256, batch=2, steps=2)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Path]:
    """The spec of a tiny Stable Diffusion."""
    folder = tmp_path_factory.mktemp("remedies")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DMCONFIG_CACHE", str(folder / "cache"))
        yield write_spec("sd", folder)


def rehearsed(file: Path, gpus: str, *, tries: bool, settings: Settings = SETTINGS, **keys: Any) -> Rehearsal:
    overrides = [*overrides_from_mapping(keys)]
    return rehearse_file(
        partial(check_file, file), overrides, parse_machine(gpus, "8GiB"), settings, tries_remedies=tries
    )


ASKED = (
    "reserve: rehearsed, call.height: 256, call.width: 256, call.num_inference_steps: 2, call.num_images_per_prompt: 2"
)
PLACES = {"device_map": {"unet": "cuda:1", "default": "cuda:0"}}


@pytest.fixture(scope="module")
def tight(file: Path) -> str:
    """Two cards, of which one has a little less than decoding such a batch takes."""
    enough = rehearsed(file, "2GiB,2GiB", tries=True, **PLACES)
    assert enough.fits
    assert enough.remedies == ()
    assert enough.devices[0].peak.phase == "vae.decode"
    return f"{enough.devices[0].need_bytes - MIB}B,2GiB"


@pytest.fixture(scope="module")
def tried(file: Path, tight: str) -> Rehearsal:
    """What does not fit on these, and everything that may help, tried."""
    return rehearsed(file, tight, tries=True, **PLACES)


def test_every_remedy_is_tried_and_told(tried: Rehearsal) -> None:
    """Tiles, the other device, offload and a smaller batch are each rehearsed, and some help."""
    assert not tried.fits
    assert {remedy.words: remedy.fits for remedy in tried.remedies} == {
        "set components.vae.tiling: true": True,
        "place vae on cuda:1": True,
        f"set device_map: auto, {ASKED}": True,
        f"set device_map: balanced, low_memory: cpu_offload_with_hook, {ASKED}": True,
        f"set device_map: balanced, low_memory: sequential_cpu_offload, {ASKED}": True,
        "make 1 at once, not 2": True,
    }
    assert all(remedy.verdict for remedy in tried.remedies)


def test_what_is_said_to_help_fits_when_it_is_written_down(tried: Rehearsal, file: Path, tight: str) -> None:
    """The keys of a remedy, set in the file, give a rehearsal that comes to the same."""
    tiles, elsewhere = tried.remedies[:2]
    assert tiles.change == {"components.vae.tiling": True}
    assert elsewhere.change == {"device_map": {**PLACES["device_map"], "vae": "cuda:1"}}
    for remedy in (tiles, elsewhere):
        again = rehearsed(file, tight, tries=False, **{**PLACES, **remedy.change})
        assert again.fits
        assert verdict(again) == remedy.verdict


def test_what_does_not_help_is_told_so(tried: Rehearsal) -> None:
    """A change that cannot be, or that comes to no more room, is reported as that."""

    def refused(_keys: Any, _settings: Settings) -> Rehearsal:
        raise SpecError([Problem(code=Code.BAD_VALUE, what="no such device")])

    change = Change(words="do this", settings=SETTINGS)
    assert remedies((change,), refused) == (Remedy(words="do this", change={}, fits=False, verdict="no such device"),)
    (again,) = remedies((change,), lambda _keys, _settings: tried)
    assert (again.fits, again.verdict) == (False, verdict(tried))


def test_remedies_are_in_the_report(tried: Rehearsal) -> None:
    """The text says what helps and what does not, and how much was missing; the JSON has the keys to set."""
    text = rehearsal_text(tried)
    assert "what would help, each rehearsed:\n" in text
    assert "  helps: make 1 at once, not 2 (fits: " in text
    assert "\n  missing  " in text
    data = rehearsal_data(tried)
    assert [each["words"] for each in data["remedies"]] == [remedy.words for remedy in tried.remedies]
    assert all(each["fits"] is not None for each in data["remedies"])


def test_without_being_asked_nothing_is_tried(tried: Rehearsal, file: Path) -> None:
    """What may help is named, and not said to."""
    checked = check_file(file, overrides_from_mapping(PLACES))
    named = replace(tried, remedies=remedies(changes(script_of(checked), tried, SETTINGS)))
    assert [each.words for each in named.remedies] == [each.words for each in tried.remedies]
    assert all(remedy.fits is None and not remedy.verdict for remedy in named.remedies)
    assert "what may help (--fix rehearses each):\n  set components.vae.tiling: true" in rehearsal_text(named)


# In a process of its own, where real accelerators are


def test_everything_a_rehearsal_is_made_of_survives_another_process(file: Path) -> None:
    """Where real devices are, the rehearsal comes from a process that does not see them, and is the same."""
    checked = check_file(file)
    machine = parse_machine("2GiB", "8GiB")
    arguments = (script_of(checked), plan_for(checked, machine), machine, Settings(steps=2))
    here = rehearse(*arguments)
    assert pickle.loads(apart.pickled(arguments)) == arguments  # noqa: S301 - made here
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apart, "sees_cuda", lambda: True)
        there = apart.apart(rehearse, *arguments)
    assert there == here


def test_problems_of_the_other_process_are_problems_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused there is refused here, of the same kind; a process that dies is an error too."""
    monkeypatch.setattr(apart, "sees_cuda", lambda: True)
    with pytest.raises(MachineError) as refused:
        apart.apart(parse_machine, "2xbig", None)
    assert [problem.origin for problem in refused.value.problems] == ["--gpus"]
    with pytest.raises(RunError) as died:
        apart.apart(sys.exit, 7)
    assert [problem.code for problem in died.value.problems] == [Code.REHEARSAL_FAILED]
    assert "ended with code 7" in str(died.value)
