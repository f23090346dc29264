from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch

from dmconfig.units import MIB
from dmconfig.virtual import OUTSIDE, Ledger, Move, MoveCount, VirtualMachine
from tests.virtual_devices import MakeMachine


def test_live_bytes_follow_tensors_and_return_to_zero(virtual_machine: MakeMachine) -> None:
    """Each storage counts once, rounded up to 512 bytes, on its own device, until its last alias is gone."""
    ledger = virtual_machine().ledger
    first = torch.ones(1000, device="cuda:0")  # 4000 bytes
    second = torch.ones(1, device="cuda:1")
    view = first[10:20]
    assert (ledger.live_bytes("cuda:0"), ledger.live_bytes("cuda:1")) == (4096, 512)
    del first
    gc.collect()
    assert ledger.live_bytes("cuda:0") == 4096, "the view keeps the memory alive"
    del view, second
    gc.collect()
    assert (ledger.live_bytes("cuda:0"), ledger.live_bytes("cuda:1")) == (0, 0)
    assert (ledger.peak_bytes("cuda:0"), ledger.peak_bytes("cuda:1")) == (4096, 512)


def test_host_bytes_are_exact(virtual_machine: MakeMachine) -> None:
    """The host is counted too, without rounding."""
    ledger = virtual_machine().ledger
    before = ledger.live_bytes("cpu")
    tensor = torch.empty(1001, dtype=torch.uint8)
    assert ledger.live_bytes("cpu") - before == tensor.numel()


def test_temporaries_count_for_the_peak_only(virtual_machine: MakeMachine) -> None:
    """An intermediate result raises the peak and is gone from what is live."""
    ledger = virtual_machine().ledger
    tensor = torch.zeros(MIB // 4, device="cuda:0")
    tensor = (tensor + 1).sum()
    assert tensor.item() == MIB // 4
    assert ledger.live_bytes("cuda:0") == 512
    assert ledger.peak_bytes("cuda:0") == 2 * MIB + 512


def test_weights_are_told_from_activations(virtual_machine: MakeMachine) -> None:
    """Parameters and buffers are weights wherever they go; everything else is activations."""
    ledger = virtual_machine().ledger
    layer = torch.nn.BatchNorm1d(256, eps=0.0)  # two parameters and two buffers of 1 KiB, and a counter
    assert ledger.live_bytes("cpu", kind="weights") == 4 * 1024 + 8
    layer.eval().to("cuda:1")
    with torch.no_grad():
        result = layer(torch.ones(2, 256, device="cuda:1"))
    gc.collect()
    assert ledger.live_bytes("cuda:1", kind="weights") == 4 * 1024 + 512
    assert ledger.live_bytes("cuda:1", kind="activations") == 2 * 1024 == result.numel() * 4
    assert ledger.live_bytes("cpu", kind="weights") == 0
    assert ledger.peak_bytes("cuda:1", kind="weights") == 4 * 1024 + 512
    assert ledger.peak_bytes("cuda:1", kind="activations") == ledger.peak_bytes("cuda:1") - (4 * 1024 + 512)


def test_weights_loaded_before_the_machine_are_weights(virtual_machine: MakeMachine) -> None:
    """A module that was built outside is recognised when it moves to a device."""
    layer = torch.nn.Linear(16, 16, bias=False)
    ledger = virtual_machine().ledger
    layer.to("cuda:0")
    assert ledger.live_bytes("cuda:0", kind="weights") == 1024
    assert ledger.moves == {Move(OUTSIDE, "cpu", "cuda:0", "weights"): MoveCount(1024, 1)}


@pytest.mark.parametrize("values", [True, False])
def test_adopted_weights_are_where_they_were_adopted(virtual_machine: MakeMachine, values: bool) -> None:
    """A module that was built outside and put on a device whole counts there, and its copy not on the host."""
    layer = torch.nn.Linear(16, 16, bias=False)
    machine = virtual_machine(values=values)
    machine.adopt(layer, "cuda:1")
    assert str(layer.weight.device) == "cuda:1"
    assert machine.ledger.live_bytes("cuda:1", kind="weights") == 1024
    assert machine.ledger.live_bytes("cpu") == 0


@pytest.mark.parametrize("values", [True, False])
def test_group_norm_takes_its_statistics_too(values: bool) -> None:
    """A kernel's mean and deviation, 4 bytes for each of 2 x 2 groups, live beside input and output."""
    with VirtualMachine([MIB], values=values, small_elements=8) as machine:
        image = torch.ones(2, 8, 8, 8, device="cuda:0")  # 4096 bytes
        result = torch.nn.functional.group_norm(image, 2)
        assert machine.ledger.peak_bytes("cuda:0") == 4096 + 4096 + 2 * 512
        assert machine.ledger.live_bytes("cuda:0") == 4096 + result.numel() * 4


def test_moves_are_counted_by_route_phase_and_kind(virtual_machine: MakeMachine) -> None:
    """Each copy between devices counts once, with its exact bytes, under the innermost phase."""
    ledger = virtual_machine().ledger
    layer = torch.nn.Linear(4, 2).to("cuda:0")
    with ledger.phase("outer"), ledger.phase("unet"):
        for _ in range(3):
            torch.ones(5, 4).to("cuda:0").to("cuda:1")
        torch.zeros(8, device="cuda:1").copy_(torch.zeros(8))
    layer.to("cpu")
    torch.ones(2).to("cpu")
    torch.ones(2, device="cuda:0").to("cuda:0")
    assert ledger.moves == {
        Move(OUTSIDE, "cpu", "cuda:0", "weights"): MoveCount(bytes=40, count=2),
        Move("unet", "cpu", "cuda:0", "activations"): MoveCount(bytes=240, count=3),
        Move("unet", "cuda:0", "cuda:1", "activations"): MoveCount(bytes=240, count=3),
        Move("unet", "cpu", "cuda:1", "activations"): MoveCount(bytes=32, count=1),
        Move(OUTSIDE, "cuda:0", "cpu", "weights"): MoveCount(bytes=40, count=2),
    }


def test_moves_with_a_change_of_dtype_count_what_travels(virtual_machine: MakeMachine) -> None:
    """Torch converts on the host: towards an accelerator the new dtype travels, on the way back the old one."""
    ledger = virtual_machine().ledger
    half = torch.ones(100).to("cuda:0", torch.float16)
    half.to("cpu", torch.float32)
    assert ledger.moves == {
        Move(OUTSIDE, "cpu", "cuda:0", "activations"): MoveCount(200, 1),
        Move(OUTSIDE, "cuda:0", "cpu", "activations"): MoveCount(200, 1),
    }


def test_phases_have_their_own_peaks(virtual_machine: MakeMachine) -> None:
    """A phase's peak starts at what is live when it starts, and later phases do not raise it."""
    ledger = virtual_machine().ledger
    kept = torch.ones(256, device="cuda:0")
    with ledger.phase("text_encoder"):
        torch.ones(256, device="cuda:0")
    with ledger.phase("unet"):
        pass
    torch.ones(1024, device="cuda:0")
    assert ledger.peak_bytes("cuda:0", phase="text_encoder") == 2048
    assert ledger.peak_bytes("cuda:0", phase="unet") == 1024 == kept.numel() * 4
    assert ledger.peak_bytes("cuda:0", phase="never ran") == 0
    assert ledger.peak_bytes("cuda:0") == 1024 + 4096


def test_phases_end_with_their_block_after_an_exception(virtual_machine: MakeMachine) -> None:
    """An exception leaves no phase open, nor any that was entered inside by a hook."""
    ledger = virtual_machine().ledger

    def fail() -> None:
        with ledger.phase("unet"):
            ledger.enter_phase("inner")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert ledger.current_phase == OUTSIDE


def test_reset_keeps_what_is_live(virtual_machine: MakeMachine) -> None:
    """After a reset there are no moves, and peaks start again from what lives."""
    ledger = virtual_machine().ledger
    kept = torch.ones(256).to("cuda:0")
    torch.ones(1024, device="cuda:0")
    ledger.reset()
    assert ledger.moves == {}
    assert ledger.peak_bytes("cuda:0") == ledger.live_bytes("cuda:0") == 1024 == kept.numel() * 4


def test_out_of_memory_at_capacity(virtual_machine: MakeMachine) -> None:
    """The stated capacity can be filled to the last byte; one more block raises torch's own exception."""
    ledger = virtual_machine(capacity_bytes=4 * MIB).ledger
    first = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda:1")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2 * MIB, dtype=torch.uint8, device="cuda:1")
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 2.0 MiB. GPU 1 has a total capacity of 4.0 MiB "
        "of which 1.0 MiB is free. (op aten.empty)"
    )
    second = torch.empty(MIB, dtype=torch.uint8, device="cuda:1")
    with pytest.raises(torch.OutOfMemoryError, match="of which 0 B is free"):
        torch.empty(1, dtype=torch.uint8, device="cuda:1")
    del first
    gc.collect()
    assert ledger.live_bytes("cuda:1") == MIB == second.numel()
    torch.empty(3 * MIB, dtype=torch.uint8, device="cuda:1")


def test_out_of_memory_in_a_move(virtual_machine: MakeMachine) -> None:
    """Moving a tensor to a device that has no room raises and leaves nothing there."""
    ledger = virtual_machine(capacity_bytes=MIB).ledger
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(MIB).to("cuda:0")
    gc.collect()
    assert ledger.live_bytes("cuda:0") == 0


def test_cuda_answers_from_the_ledger(virtual_machine: MakeMachine) -> None:
    """torch.cuda's memory functions tell the ledger's figures for every way to name the device."""
    virtual_machine(capacity_bytes=64 * MIB)
    kept = torch.ones(MIB, device="cuda:1")
    torch.ones(MIB, device="cuda:1")
    assert kept.numel() * 4 == 4 * MIB
    assert torch.cuda.mem_get_info(1) == torch.cuda.mem_get_info("cuda:1") == (60 * MIB, 64 * MIB)
    assert torch.cuda.mem_get_info() == torch.cuda.mem_get_info("cuda") == (64 * MIB, 64 * MIB)
    assert torch.cuda.memory_allocated(torch.device("cuda:1")) == 4 * MIB
    assert torch.accelerator.memory_allocated(1) == 4 * MIB
    assert torch.cuda.max_memory_allocated(1) == 8 * MIB
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated(1) == 4 * MIB


def test_unknown_device_is_refused() -> None:
    """A ledger asked about a device it does not keep says which ones it does."""
    with pytest.raises(ValueError, match="'cuda' is not a device of this machine; it has cuda:0, cpu, disk"):
        Ledger({"cuda:0": MIB}).live_bytes("cuda")


def test_deaths_during_an_update_are_not_lost(virtual_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that the garbage collector frees between the read and the write of a figure leaves the books too."""
    ledger = virtual_machine().ledger
    victims = [torch.ones(1, device="cuda:0") for _ in range(20)]

    class FreesWhenRead(Counter[Any]):
        def __getitem__(self, key: Any) -> int:
            value = super().__getitem__(key)
            if victims:
                victims.pop()
            return value

    monkeypatch.setattr(ledger, "_live", FreesWhenRead(ledger._live))
    kept = torch.ones(1, device="cuda:0")
    assert 0 < len(victims) < 20
    victims.clear()
    assert ledger.live_bytes("cuda:0") == 512
    del kept
    assert ledger.live_bytes("cuda:0") == 0


def test_timeline_has_every_run_of_a_phase_in_order(virtual_machine: MakeMachine) -> None:
    """Each run has a peak of its own, from what is live when it starts; what lies between two is there as well."""
    ledger = virtual_machine().ledger
    layer = torch.nn.Linear(16, 16, bias=False).to("cuda:0")  # 1024 bytes
    ledger.reset()
    for size in (256, 1024):
        with ledger.phase("unet"):
            torch.ones(size, device="cuda:0")
    with ledger.phase("vae"):
        kept = torch.ones(128, device="cuda:1")
    on_first = [(run.phase, run.peaks["cuda:0"].total_bytes) for run in ledger.timeline]
    assert on_first == [
        (OUTSIDE, 1024),
        ("unet", 1024 + 1024),
        (OUTSIDE, 1024),
        ("unet", 1024 + 4096),
        (OUTSIDE, 1024),
        ("vae", 1024),
        (OUTSIDE, 1024),
    ]
    assert {run.peaks["cuda:0"].weights_bytes for run in ledger.timeline} == {1024 * layer.in_features // 16}
    assert [run.peaks["cuda:1"].total_bytes for run in ledger.timeline if "cuda:1" in run.peaks] == [512, 512]
    assert kept.numel() == 128


def test_timeline_goes_back_to_the_phase_around(virtual_machine: MakeMachine) -> None:
    """A phase within another parts it in two runs, also where an exception ends it."""
    ledger = virtual_machine().ledger

    def fail() -> None:
        with ledger.phase("outer"):
            ledger.enter_phase("inner")
            torch.ones(256, device="cuda:0")
            ledger.exit_phase()
            torch.ones(128, device="cuda:0")
            ledger.enter_phase("broken")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    found = [(run.phase, run.peaks["cuda:0"].total_bytes) for run in ledger.timeline if "cuda:0" in run.peaks]
    assert found == [("inner", 1024), ("outer", 512)]
    assert [run.phase for run in ledger.timeline] == [OUTSIDE, "outer", "inner", "outer", "broken", OUTSIDE]


def test_timeline_starts_anew_with_a_reset_and_with_nothing_else(virtual_machine: MakeMachine) -> None:
    """A reset forgets what was; lowering the peaks alone, as torch.cuda can be asked to, does not."""
    ledger = virtual_machine().ledger
    kept = torch.ones(256, device="cuda:0")
    with ledger.phase("unet"):
        pass
    torch.cuda.reset_peak_memory_stats(0)
    assert [run.phase for run in ledger.timeline] == [OUTSIDE, "unet", OUTSIDE]
    ledger.reset()
    (run,) = ledger.timeline
    assert (run.phase, run.peaks["cuda:0"].total_bytes) == (OUTSIDE, 1024)
    assert kept.numel() == 256
