"""Planning with rehearsed reserves: plan and rehearsal agree, and what is known is not rehearsed again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dmconfig.inventory import Inventory, parse_machine
from dmconfig.load import Checked, check_file, plan_for
from dmconfig.plan import Plan
from dmconfig.rehearse import Script, Settings, remembered
from dmconfig.rehearse.remembered import rehearsed_reserve
from dmconfig.rehearse.settling import reserves_of, settle, sweep
from dmconfig.spec import DEFAULT, Spec
from tests.tiny_pipelines import write_spec

SETTINGS = Settings(steps=2)


class Stage:
    """A tiny pipeline in a spec, and how it is planned."""

    def __init__(self, file: Path) -> None:
        self.checked: Checked = check_file(file)
        checked = self.checked
        self.script = Script(resolved=checked.resolved, spec=checked.spec, assembly=checked.assembly)
        self.planned = 0

    def plan(self, spec: Spec, inventory: Inventory) -> Plan:
        """Plan, and count it."""
        self.planned += 1
        return plan_for(replace(self.checked, spec=spec), inventory)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """Stable Diffusion, tiny, balanced."""
    return Stage(write_spec("sd", tmp_path))


def test_plan_and_rehearsal_agree(stage: Stage) -> None:
    """The reserve that is kept is what the rehearsal of that very plan takes, and every device has room for it."""
    machine = parse_machine("2x2GiB", "8GiB")

    settled = settle(stage.script, stage.plan, machine, SETTINGS)

    assert settled.agrees
    assert settled.rehearsal.plan == settled.plan
    needed = reserves_of(settled.rehearsal)
    assert all(settled.reserve[name] >= nbytes for name, nbytes in needed.items())
    assert settled.reserve["vae"] > settled.reserve[DEFAULT] > 0
    assert settled.rounds == stage.planned


def test_what_decoding_takes_is_kept_where_it_decodes(stage: Stage) -> None:
    """A larger picture needs more, and the plan keeps more for it."""
    machine = parse_machine("2x2GiB", "8GiB")
    reserves = [
        settle(stage.script, stage.plan, machine, replace(SETTINGS, height=size, width=size)).reserve["vae"]
        for size in (32, 128)
    ]
    assert reserves[0] < reserves[1]


def test_reserve_is_rehearsed_once(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time it comes from the cache; another machine, setting or file is rehearsed anew."""
    monkeypatch.setenv("DMCONFIG_CACHE", str(tmp_path / "cache"))
    machine = parse_machine("2x2GiB", "8GiB")
    first = rehearsed_reserve(stage.script, stage.plan, machine, SETTINGS)
    rounds = stage.planned
    assert rehearsed_reserve(stage.script, stage.plan, machine, SETTINGS) == first
    assert stage.planned == rounds
    rehearsed_reserve(stage.script, stage.plan, machine, replace(SETTINGS, height=64, width=64))
    rehearsed_reserve(stage.script, stage.plan, parse_machine("2x1GiB", "8GiB"), SETTINGS)
    assert len([*(tmp_path / "cache" / "rehearsals").glob("*.json")]) == 3
    assert stage.planned > rounds


def test_a_damaged_cache_is_no_error(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is not what was written is made anew."""
    monkeypatch.setenv("DMCONFIG_CACHE", str(tmp_path / "cache"))
    machine = parse_machine("2x2GiB", "8GiB")
    first = rehearsed_reserve(stage.script, stage.plan, machine, SETTINGS)
    (file,) = (tmp_path / "cache" / "rehearsals").glob("*.json")
    file.write_bytes(b"{")

    assert rehearsed_reserve(stage.script, stage.plan, machine, SETTINGS) == first
    assert remembered._read(file) is not None


def test_sweep_tells_the_largest_setting_that_fits(stage: Stage) -> None:
    """Every machine, size and batch is tried; what fits at a size fits below it, and a card too small fits nothing."""
    machines = [parse_machine("660MiB", "8GiB"), parse_machine("2GiB", "8GiB"), parse_machine("64MiB", "8GiB")]

    tried = [*sweep(stage.script, stage.plan, machines, (32, 512), (1, 2))]

    assert len(tried) == 12
    by_setting = {(each.machine, each.size, each.batch): each for each in tried}
    for (machine, size, batch), each in by_setting.items():
        assert not each.fits or by_setting[machine, 32, 1].fits, (machine, size, batch)
        assert each.fits or each.why_not or each.need_bytes > each.capacity_bytes
    assert by_setting["--gpus 2GiB --ram 8GiB", 512, 2].fits
    assert not any(each.fits for each in tried if "64MiB" in each.machine)
