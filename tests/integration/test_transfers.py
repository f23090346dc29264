"""Copies between virtual accelerators: sound ones pass, each kind of damage is found, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from dmconfig import load_from_yaml, transfers
from dmconfig.errors import Code, DispatchError
from dmconfig.transfers import TransferFailure, check_transfers, checked_once, transfer_problems, ways
from dmconfig.units import MIB
from dmconfig.virtual import VirtualMachine, operators
from dmconfig.virtual.tensor import inner_of
from tests.conftest import only_problem
from tests.virtual_devices import MakeMachine

DIGITS = Path(__file__).parents[2] / "examples" / "digits.yaml"
SPLIT = {"device_map": {"unet": "cuda:0", "vae": "cuda:1", "text_encoder": "cuda:1"}, "reserve": 0}
TWO = ("cuda:0", "cuda:1")
THREE = (*TWO, "cuda:2")
PARCELS = 7
SENT_BYTES = 3 + 6 + 4099 + 8198 + 4100 + 2 * MIB + 4 * MIB
"""What goes over each way: 3, 4099 and 2 MiB elements of one and of two bytes, and every other of 4099."""

Damage = Callable[[torch.Tensor], object]
BreakLink = Callable[[str, str, Damage], None]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What one test found of its devices must not count for another's, which have the same names."""
    transfers._checked.cache_clear()
    yield
    transfers._checked.cache_clear()


@pytest.fixture
def break_link(monkeypatch: pytest.MonkeyPatch) -> BreakLink:
    """Give a function that has whatever arrives from one device at another damaged, without a word."""

    def make(source: str, destination: str, damage: Damage) -> None:
        move = operators.move

        def moved(state: Any, tensor: torch.Tensor, device: torch.device, **options: Any) -> Any:
            arrived = move(state, tensor, device, **options)
            if (str(tensor.device), str(device)) == (source, destination):
                damage(inner_of(arrived))
            return arrived

        monkeypatch.setattr(operators, "move", moved)

    return make


def flip_last_bit(tensor: torch.Tensor) -> None:
    """Change the smallest thing that can be changed."""
    tensor.view(torch.uint8)[-1] ^= 1


class Stale:
    """A copy that does nothing: what an earlier one of the same size has left is still there."""

    def __init__(self) -> None:
        self.left: dict[int, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> None:
        """Leave what was there before, and take the new for the next."""
        content = tensor.clone()
        if tensor.nbytes in self.left:
            tensor.copy_(self.left[tensor.nbytes])
        self.left[tensor.nbytes] = content


def live_bytes(machine: VirtualMachine) -> list[int]:
    """Return what is live on each device."""
    return [machine.ledger.live_bytes(f"cuda:{index}") for index in range(len(machine.capacities_bytes))]


def test_ways_are_the_cpu_with_each_and_every_ordered_pair() -> None:
    """Both directions of a pair are ways of their own; the cpu, the disk and repetitions add none."""
    assert ways(["cuda:0", "cpu", "cuda:1", "disk", "cuda:0"]) == (
        ("cpu", "cuda:0"),
        ("cpu", "cuda:1"),
        ("cuda:0", "cuda:1"),
        ("cuda:1", "cuda:0"),
    )
    assert ways(["cpu"]) == ()


def test_sound_devices_pass_over_every_way_and_are_left_empty(virtual_machine: MakeMachine) -> None:
    """Of three devices every ordered pair is used with all that is to be sent, and every byte is freed."""
    machine = virtual_machine(count=3)

    assert check_transfers(THREE) == ()

    sent: dict[tuple[str, str], int] = {}
    for move, count in machine.ledger.moves.items():
        way = (move.source, move.destination)
        sent[way] = sent.get(way, 0) + count.bytes
    assert {way: size for way, size in sent.items() if "cpu" not in way} == dict.fromkeys(
        permutations(THREE, 2), SENT_BYTES
    )
    assert live_bytes(machine) == [0, 0, 0]


def test_zeros_over_one_way_are_found(virtual_machine: MakeMachine, break_link: BreakLink) -> None:
    """A link that delivers zeros is named with its direction; every byte of the pattern counts as wrong."""
    machine = virtual_machine(count=3)
    break_link("cuda:0", "cuda:1", torch.Tensor.zero_)

    assert check_transfers(THREE) == (
        TransferFailure(
            source="cuda:0", destination="cuda:1", wrong_bytes=SENT_BYTES, total_bytes=SENT_BYTES, all_zero=True
        ),
    )
    assert live_bytes(machine) == [0, 0, 0]


def test_a_single_bit_in_each_parcel_is_found(virtual_machine: MakeMachine, break_link: BreakLink) -> None:
    """The comparison is of bits, also where the halves of a float16 are no number."""
    virtual_machine()
    break_link("cuda:1", "cuda:0", flip_last_bit)

    (failure,) = check_transfers(TWO)

    assert (failure.source, failure.destination) == ("cuda:1", "cuda:0")
    assert (failure.wrong_bytes, failure.total_bytes, failure.all_zero) == (PARCELS, SENT_BYTES, False)


def test_memory_with_an_earlier_parcel_is_not_taken_for_a_copy(
    virtual_machine: MakeMachine, break_link: BreakLink
) -> None:
    """A copy that does not happen shows, although its destination holds what another device sent there before."""
    virtual_machine(count=3)
    stale = Stale()
    break_link("cuda:0", "cuda:2", stale)
    break_link("cuda:1", "cuda:2", stale)

    (failure,) = check_transfers(THREE)

    assert (failure.source, failure.destination) == ("cuda:1", "cuda:2")
    assert failure.wrong_bytes > 0.99 * SENT_BYTES


def test_each_way_and_size_has_a_pattern_of_its_own(virtual_machine: MakeMachine, break_link: BreakLink) -> None:
    """No two parcels begin alike, so that each leaves other bytes in memory than those before it."""
    virtual_machine(count=3)
    seen: list[bytes] = []
    for source, destination in permutations(THREE, 2):
        break_link(source, destination, lambda tensor: seen.append(tensor.view(torch.uint8)[:3].numpy().tobytes()))

    check_transfers(THREE)

    assert len(seen) == PARCELS * 6
    assert len(set(seen)) == len(seen)
    assert not any(0 in start for start in seen)


def test_a_bad_way_from_the_cpu_is_not_blamed_on_pairs(virtual_machine: MakeMachine, break_link: BreakLink) -> None:
    """A device that does not give back what it was given is reported as that, and no pair is tried."""
    machine = virtual_machine(count=3)
    break_link("cpu", "cuda:1", flip_last_bit)

    (failure,) = check_transfers(THREE)

    assert (failure.source, failure.destination) == ("cpu", "cuda:1")
    assert all("cpu" in (move.source, move.destination) for move in machine.ledger.moves)
    (problem,) = transfer_problems([failure])
    assert "PCI" not in problem.fix
    assert "the device is faulty" in problem.fix


def test_a_copy_that_raises_is_a_failure_with_what_it_said(virtual_machine: MakeMachine, break_link: BreakLink) -> None:
    """A link that refuses is told apart from one that lies, and nothing stays on the devices."""
    machine = virtual_machine()

    def refuse(_tensor: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: peer access is not supported\nmore of it")

    break_link("cuda:0", "cuda:1", refuse)

    (failure,) = check_transfers(TWO)

    assert (failure.wrong_bytes, failure.all_zero) == (0, False)
    assert failure.error == "RuntimeError: CUDA error: peer access is not supported"
    assert live_bytes(machine) == [0, 0]
    (problem,) = transfer_problems([failure])
    assert problem.what == (
        "copies between devices fail: cuda:0 to cuda:1: RuntimeError: CUDA error: peer access is not supported"
    )


def test_devices_with_little_room_are_tried_with_what_fits(virtual_machine: MakeMachine, break_link: BreakLink) -> None:
    """Small parcels show the fault as well; no room for any is a failure, since nothing is known then."""
    virtual_machine(capacity_bytes=MIB)
    assert check_transfers(TWO) == ()
    break_link("cuda:0", "cuda:1", torch.Tensor.zero_)
    (failure,) = check_transfers(TWO)
    assert (failure.wrong_bytes, failure.all_zero, failure.error) == (3 + 6 + 4099 + 8198 + 4100, True, "")


def test_no_room_at_all_is_a_failure(virtual_machine: MakeMachine) -> None:
    """A full device is not called sound."""
    virtual_machine(capacity_bytes=0)
    assert [failure.error.split(":")[0] for failure in check_transfers(TWO)] == ["VirtualOutOfMemoryError"] * 2


def test_a_rehearsal_of_shapes_has_nothing_to_compare(virtual_machine: MakeMachine) -> None:
    """Without values no byte can be wrong, and none is asked for."""
    machine = virtual_machine(values=False)
    assert check_transfers(TWO) == ()
    assert live_bytes(machine) == [0, 0]


def test_the_random_state_is_left_alone(virtual_machine: MakeMachine) -> None:
    """Pictures do not depend on whether the check has run."""
    virtual_machine()
    before = torch.get_rng_state()
    check_transfers(TWO)
    assert torch.equal(torch.get_rng_state(), before)


def test_checked_once_tries_each_set_of_accelerators_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the order nor repetitions nor the cpu make another set; a single accelerator is not tried."""
    tried: list[tuple[str, ...]] = []
    monkeypatch.setattr(transfers, "check_transfers", lambda devices: tried.append(devices) or ())

    for devices in (TWO, ("cuda:1", "cpu", "cuda:0", "cuda:1"), ("cuda:0", "cpu"), (), THREE, TWO):
        checked_once(devices)

    assert tried == [TWO, THREE]


def test_checked_once_refuses_with_what_happened_and_the_remedies(
    virtual_machine: MakeMachine, break_link: BreakLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal names the way, and stays when asked again."""
    virtual_machine()
    monkeypatch.setattr("sys.platform", "linux")
    break_link("cuda:0", "cuda:1", torch.Tensor.zero_)

    for _ in range(2):
        with pytest.raises(DispatchError) as caught:
            checked_once(TWO)

    assert caught.value.exit_code == 4
    problem = only_problem(caught.value)
    assert problem.code is Code.TRANSFER_FAILED
    assert str(caught.value) == (
        "error[DM606 transfer-failed]\n"
        "  what bytes do not survive copies between devices: "
        f"cuda:0 to cuda:1: {SENT_BYTES} of {SENT_BYTES} bytes wrong, all of them zero\n"
        "  why  the driver reports these copies as done; a pipeline split over the devices would compute with the "
        "wrong values, draw black or noise, and say nothing\n"
        "  fix  upgrade the NVIDIA driver (GeForce RTX 40 cards need 550.40.07 or later); set the IOMMU to passthrough "
        "(kernel parameter iommu=pt) or turn it off in the BIOS, and PCI ACS with it; until then place everything on "
        "one accelerator (device_map: cuda:0); NCCL_P2P_DISABLE does not help, plain copies do not go through NCCL"
    )


@pytest.mark.parametrize(("hip", "kind"), [("6.4", "cuda"), (None, "xpu")])
def test_other_makes_get_no_advice_for_nvidia(hip: str | None, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm devices are called cuda too; away from Linux nothing is said of kernel parameters."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr("sys.platform", "win32")
    failure = TransferFailure(source=f"{kind}:0", destination=f"{kind}:1", wrong_bytes=1, total_bytes=3, all_zero=False)
    (problem,) = transfer_problems([failure])
    assert problem.fix == (
        f"upgrade the driver of the accelerators; until then place everything on one accelerator (device_map: {kind}:0)"
    )


def test_load_refuses_a_split_over_devices_that_lose_bytes(
    virtual_machine: MakeMachine, break_link: BreakLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded; on one of the devices the same pipeline loads."""
    machine = virtual_machine()
    break_link("cuda:0", "cuda:1", torch.Tensor.zero_)
    with monkeypatch.context() as patch:
        patch.setattr("dmconfig.build.build_pipelines", lambda *_: pytest.fail("something was loaded"))
        with pytest.raises(DispatchError, match="cuda:0 to cuda:1"):
            load_from_yaml(DIGITS, SPLIT)
    assert live_bytes(machine) == [0, 0]

    load_from_yaml(DIGITS, {"device_map": "cuda:0", "reserve": 0})
