"""Planning with rehearsed reserves: plan and rehearsal agree, what is known is not rehearsed again, and sweeps."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dmconfig.checked import check_file
from dmconfig.errors import PlanError
from dmconfig.inventory import Inventory, parse_machine
from dmconfig.load import plan_for, plan_of
from dmconfig.plan import Plan
from dmconfig.rehearse import Rehearsal, Script, Settings, rehearse, remembered, settling
from dmconfig.rehearse.margins import workspace_bytes
from dmconfig.rehearse.remembered import Taken
from dmconfig.rehearse.settling import Settled, settle
from dmconfig.rehearse.sweeping import Tried, largest, sweep
from dmconfig.rehearse.taken import reserves_of, taken
from dmconfig.resolve import overrides_from_mapping
from dmconfig.spec import DEFAULT, RehearsedReserve
from dmconfig.staging import script_of
from dmconfig.units import GIB, MIB
from tests.tiny_pipelines import write_spec

SETTINGS = Settings(steps=2)
TWO = parse_machine("2x2GiB", "8GiB")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Path]:
    """The spec of a tiny Stable Diffusion, balanced; what its placements take is remembered for this module."""
    folder = tmp_path_factory.mktemp("settling")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DMCONFIG_CACHE", str(folder / "cache"))
        yield write_spec("sd", folder)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder in which nothing is remembered."""
    monkeypatch.setenv("DMCONFIG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rehearsals"


def settled(file: Path, machine: Inventory, settings: Settings = SETTINGS, **overrides: Any) -> Settled:
    """Settle the spec in a file on a machine."""
    checked = check_file(file, overrides_from_mapping(overrides))
    return settle(script_of(checked), functools.partial(plan_of, checked, False), machine, settings)


def test_plan_and_rehearsal_agree(file: Path) -> None:
    """The reserve that is kept is what the rehearsal of that very plan takes, and every device has room for it."""
    result = settled(file, TWO)

    assert result.agrees
    script = script_of(check_file(file))
    again = rehearse(script, result.plan, TWO, SETTINGS)
    assert again.fits
    needed = reserves_of(again, script.assembly.in_turn)
    assert all(result.reserve[name] >= nbytes for name, nbytes in needed.items())
    assert result.reserve["vae"] > result.reserve[DEFAULT] > 0
    for device in again.devices:
        (use,) = [each for each in result.plan.devices if each.id == device.id]
        assert use.used_bytes + use.reserved_bytes >= device.need_bytes


def test_workspace_is_kept_only_for_the_phase_that_takes_it(file: Path) -> None:
    """What cuDNN takes while the VAE decodes is no reason to keep as much for the text encoder."""
    checked = check_file(file)
    plan = plan_for(checked, parse_machine("2GiB", "8GiB"))
    rehearsal = rehearse(
        script_of(checked), plan, parse_machine("2GiB", "8GiB"), replace(SETTINGS, height=128, width=128)
    )
    (device,) = rehearsal.devices
    always = sum(margin.nbytes for margin in device.margins if margin.name != "workspace")
    phases = {phase.phase: phase for phase in device.phases}
    reserves = reserves_of(rehearsal, checked.assembly.in_turn)

    decode, encode = phases["vae.decode"], phases["text_encoder"]
    assert workspace_bytes(decode) > 0
    always += decode.weights_bytes - sum(each.nbytes for each in plan.assignments)  # blocks of 512 bytes
    assert reserves["vae"] == always + decode.activations_bytes + workspace_bytes(decode)
    least = phases["outside"].activations_bytes
    assert reserves["text_encoder"] == always + max(least, encode.activations_bytes)


def test_weights_that_are_still_there_are_kept_room_for(file: Path) -> None:
    """A component whose predecessor has not gone home needs room for that too, which the plan takes to be free."""
    checked = check_file(file, overrides_from_mapping({"device_map": "cuda:0", "low_memory": "cpu_offload_with_hook"}))
    machine = parse_machine("2GiB", "8GiB")
    plan = plan_for(checked, machine)
    rehearsal = rehearse(script_of(checked), plan, machine, SETTINGS)
    (device,) = rehearsal.devices
    (encode,) = [phase for phase in device.phases if phase.phase == "text_encoder"]
    stays_too = replace(
        device,
        phases=tuple(
            replace(phase, weights_bytes=phase.weights_bytes + MIB) if phase.phase == "text_encoder" else phase
            for phase in device.phases
        ),
    )
    in_turn = checked.assembly.in_turn
    before = reserves_of(rehearsal, in_turn)["text_encoder"]
    after = reserves_of(replace(rehearsal, devices=(stays_too,)), in_turn)["text_encoder"]

    # the plan counts the encoder, and the safety checker, which has no turn; the last is not there yet
    counted = sum(each.nbytes for each in plan.assignments if each.component in ("text_encoder", "safety_checker"))
    always = sum(margin.nbytes for margin in device.margins if margin.name != "workspace")
    assert encode.weights_bytes < counted
    assert after == always + encode.activations_bytes + encode.weights_bytes + MIB - counted > before


@pytest.mark.parametrize("size", [32, 128])
def test_what_decoding_takes_is_kept_where_it_decodes(size: int, file: Path) -> None:
    """A larger picture needs more, and the plan keeps more for it."""
    sized = settled(file, TWO, replace(SETTINGS, height=size, width=size))
    assert (sized.reserve["vae"] > settled(file, TWO).reserve["vae"]) == (size > 32)


def test_what_is_too_small_for_the_activations_is_refused_with_them(file: Path) -> None:
    """A card that holds all weights but not the decoding is told what the rehearsal took, and no lower reserve."""
    with pytest.raises(PlanError) as refused:
        settled(file, parse_machine("600MiB", "8GiB"), replace(SETTINGS, height=512, width=512))
    (problem,) = refused.value.problems
    assert problem.why.startswith("beside weights, a rehearsal took unet 779.0 MiB, vae 620.0 MiB, ")
    assert "lower reserve" not in problem.fix


def test_a_pipeline_that_does_not_run_never_agrees(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with the run itself is told, and no further round is gone through."""
    failing = Taken(reserve={DEFAULT: 0, "vae": 5}, need_bytes={}, phases={}, wrong="does not run: x", output=())
    monkeypatch.setattr(settling, "taken_by", lambda *_args: failing)
    result = settled(file, TWO)
    assert (result.agrees, result.rounds, result.wrong) == (False, 1, "does not run: x")


def test_a_reserve_that_never_settles_is_not_taken_for_one_that_does(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every plan asks for more than the last, the search ends and says so."""
    monkeypatch.setattr(settling, "places_of", lambda plan: ((str(plan.devices),),))

    def ever_more(_script: Script, plan: Plan, *_args: Any) -> Taken:
        more = plan.devices[0].reserved_bytes + MIB
        return Taken(reserve={DEFAULT: more, "unet": more}, need_bytes={}, phases={}, wrong="", output=())

    monkeypatch.setattr(settling, "taken_by", ever_more)
    result = settled(file, TWO)
    assert result.rounds == settling.MAX_ROUNDS
    assert result.wrong == "after 6 rounds, each plan asks for another reserve"


# Remembered


def rehearsals_counted(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Return the plans that are rehearsed from now on."""
    from dmconfig.rehearse import taken as rehearsing

    plans: list[Plan] = []

    def counted(script: Script, plan: Plan, *args: Any, **options: Any) -> Rehearsal:
        plans.append(plan)
        return rehearse(script, plan, *args, **options)

    monkeypatch.setattr(rehearsing, "rehearse", counted)
    return plans


def test_what_a_placement_takes_is_rehearsed_once(
    file: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time it is remembered, also on a machine with more memory; another call is rehearsed anew."""
    plans = rehearsals_counted(monkeypatch)
    first = settled(file, TWO)
    assert first.rounds == 2
    assert len(plans) == 1
    assert settled(file, TWO) == first
    assert settled(file, parse_machine("2x3GiB", "8GiB")).reserve == first.reserve
    assert len(plans) == 1
    settled(file, TWO, **{"call.guidance_scale": 1.0})
    assert len(plans) == 2
    settled(file, TWO, device_map="cuda:1")
    assert len(plans) == 3
    settled(file, TWO, replace(SETTINGS, batch=2))
    assert len([*empty_cache.glob("*.json")]) == len(plans) == 4


def test_a_damaged_cache_is_no_error(file: Path, empty_cache: Path) -> None:
    """A file that is not what was written is made anew."""
    script, plan = script_of(check_file(file)), plan_for(check_file(file), TWO)
    remembering = empty_cache / f"{remembered._key(script, plan, TWO, SETTINGS)}.json"
    empty_cache.mkdir(parents=True)
    for damage in (b"", b"{", b"[]", b'{"reserve": {"vae": "much"}}'):
        remembering.write_bytes(damage)
        assert remembered._read(remembering) is None

    first = remembered.taken_by(script, plan, TWO, SETTINGS)

    assert remembered._read(remembering) == first
    assert first == taken(rehearse(script, plan, TWO, SETTINGS), script.assembly.in_turn)


def test_a_remembered_reserve_needs_no_torch(file: Path) -> None:
    """A file whose reserve is rehearsed is planned the second time as fast as any other."""
    machine = "parse_machine('2x2GiB', '8GiB')"
    code = (
        "import sys; from dmconfig import plan_from_yaml; from dmconfig.inventory import parse_machine; "
        f"plan = plan_from_yaml({str(file)!r}, {{'reserve': 'rehearsed'}}, inventory={machine}); "
        "print('torch' in sys.modules, *plan.notes)"
    )
    (note,) = plan_for(check_file(file, overrides_from_mapping({"reserve": "rehearsed"})), TWO).notes
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert second.stdout == f"False {note}\n"
    assert note.startswith("the reserve is what a rehearsal of this plan took beside weights, for 1 x 32 x 32: unet ")


# In the file


def test_a_file_may_leave_its_reserve_to_a_rehearsal(file: Path) -> None:
    """Such a plan keeps what settling comes to, with the call of the file, and says where the reserve came from."""
    keys = {"reserve": "rehearsed", "call.height": 64, "call.width": 64}
    checked = check_file(file, overrides_from_mapping(keys))
    plan = plan_for(checked, TWO)

    wanted = settled(file, TWO, Settings(), **{"call.height": 64, "call.width": 64})
    assert wanted.plan.devices == plan.devices
    assert [note for note in plan.notes if "for 1 x 64 x 64: " in note] == [*plan.notes]
    assert isinstance(wanted.reserve, (dict, RehearsedReserve))


def test_a_machine_without_accelerators_reserves_nothing(file: Path) -> None:
    """There is nothing to rehearse on, and that is said."""
    checked = check_file(file, overrides_from_mapping({"reserve": "rehearsed"}))
    plan = plan_for(checked, parse_machine("0", "8GiB"))
    assert "there is no accelerator, so no reserve was rehearsed" in plan.notes


# Sweeps


@pytest.fixture(scope="module")
def swept(file: Path) -> dict[str, list[Tried]]:
    """What becomes of two sizes and two batches on three machines: one that holds all, one hardly any, one none."""
    checked = check_file(file)
    planner = functools.partial(plan_of, checked, False)
    machines = [parse_machine(size, "8GiB") for size in ("2GiB", "650MiB", "64MiB")]
    grid = [(256, 1), (32, 1), (32, 2), (256, 2)]
    return {
        machine.name.split()[1]: [*sweep(script_of(checked), planner, machine, grid, SETTINGS)] for machine in machines
    }


def test_sweep_tries_the_smallest_first(swept: dict[str, list[Tried]]) -> None:
    """Every setting is told of, in order, and none is tried that is larger than one that does not fit."""
    for tried in swept.values():
        assert [(each.size, each.batch) for each in tried] == [(32, 1), (32, 2), (256, 1), (256, 2)]
    assert [each.fits for each in swept["2GiB"]] == [True] * 4
    assert [each.is_tried for each in swept["64MiB"]] == [True, False, False, False]
    assert swept["64MiB"][3].why_not == "not tried: 32 px, batch 1 does not fit"


def test_sweep_tells_the_largest_setting_that_fits(swept: dict[str, list[Tried]]) -> None:
    """Of the largest size that fits, the most at once; what fits fits with its margins, and what does not says why."""
    best = {machine: largest(tried) for machine, tried in swept.items()}
    assert best["2GiB"] == swept["2GiB"][-1]
    assert best["64MiB"] is None
    small = best["650MiB"]
    assert small is not None
    assert (small.size, small.batch) == (256, 1)
    for tried in swept.values():
        needs = [each.need_bytes for each in tried if each.fits]
        assert needs == sorted(needs)
        assert all(each.need_bytes <= each.capacity_bytes for each in tried if each.fits)
        assert all(each.fits or each.why_not for each in tried)


def test_sweep_agrees_with_a_rehearsal_of_its_own(file: Path, swept: dict[str, list[Tried]]) -> None:
    """What a sweep says that a setting needs is what a rehearsal with such a file says."""
    checked = check_file(file, overrides_from_mapping({"call.height": 256, "call.width": 256, "reserve": "rehearsed"}))
    machine = parse_machine("2GiB", "8GiB")
    rehearsal = rehearse(script_of(checked), plan_for(checked, machine), machine, Settings(steps=2))
    (tried,) = [each for each in swept["2GiB"] if (each.size, each.batch) == (256, 1)]
    assert tried.need_bytes == rehearsal.devices[0].need_bytes
    assert tried.capacity_bytes == 2 * GIB
