from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dmconfig.dispatch import carrier
from dmconfig.units import MIB
from dmconfig.virtual import OUTSIDE, DeviceMismatchError, Move, MoveCount, UnknownValueError, VirtualMachine
from dmconfig.virtual.tracking import ENTRY_METHODS
from tests.virtual_devices import MakeMachine


class Autoencoder(torch.nn.Module):
    """Entered by methods, like those of diffusers; each layer has weights of 1 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
        self.decoder = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        """Enter one half."""
        return self.encoder(image)

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """Enter the other, where it is."""
        return self.decoder(latent.to(self.decoder[0].weight.device))

    def get_image_features(self, image: torch.Tensor) -> torch.Tensor:
        """Enter both, by methods that are entries themselves."""
        return self.decode(self.encode(image))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Run all of it."""
        return self.decode(self.encode(image))


class Wrapper(torch.nn.Module):
    """A component that calls another one."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.others = [inner]  # not a submodule

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Run all of it."""
        return self.others[0](image.to("cuda:0"))


def image() -> torch.Tensor:
    return torch.ones(1, 16, device="cuda:0")


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    ("enter", "phase"),
    [
        (lambda vae: vae(image()), "vae"),
        (lambda vae: vae.encode(image()), "vae.encode"),
        (lambda vae: vae.decode(image()), "vae.decode"),
        (lambda vae: vae.get_image_features(image()), "vae.get_image_features"),
        (lambda vae: vae.decoder[0](image()), "vae.decoder.0"),
    ],
)
def test_every_entry_of_a_component_is_a_phase(
    virtual_machine: MakeMachine, enter: Callable[[Autoencoder], torch.Tensor], phase: str
) -> None:
    """What a component calls of itself belongs to the entry by which it was entered, and no other phase appears."""
    machine = virtual_machine()
    vae = Autoencoder().to("cuda:0")
    with machine.track({"vae": vae, "scheduler": object()}):
        machine.ledger.reset()
        enter(vae)
        assert machine.ledger.current_phase == OUTSIDE
    assert set(machine.ledger.phases) == {phase, OUTSIDE}
    assert machine.ledger.peak_bytes("cuda:0", phase=phase, kind="weights") == 2048
    assert machine.ledger.peak_bytes("cuda:0", phase=phase, kind="activations") >= 1024, "input and output"


def test_moves_are_summed_by_link_and_phase(virtual_machine: MakeMachine) -> None:
    """A move inside an entry counts for its phase; sums ask for any part of a route."""
    machine = virtual_machine()
    vae = Autoencoder()
    vae.encoder.to("cuda:0")
    vae.decoder.to("cuda:1")
    with machine.track({"vae": vae}):
        machine.ledger.reset()
        for _ in range(3):
            vae.decode(image())
        vae(image()).cpu()
    ledger = machine.ledger
    assert ledger.moves == {
        Move("vae.decode", "cuda:0", "cuda:1", "activations"): MoveCount(3 * 64, 3),
        Move("vae", "cuda:0", "cuda:1", "activations"): MoveCount(64, 1),
        Move(OUTSIDE, "cuda:1", "cpu", "activations"): MoveCount(64, 1),
    }
    assert ledger.moved() == MoveCount(5 * 64, 5)
    assert ledger.moved(source="cuda:0") == MoveCount(4 * 64, 4)
    assert ledger.moved(phase="vae", destination="cuda:1", kind="activations") == MoveCount(64, 1)
    assert ledger.moved(kind="weights") == MoveCount(0, 0)


def test_component_that_calls_another_has_its_own_phase(virtual_machine: MakeMachine) -> None:
    """The innermost component counts."""
    machine = virtual_machine()
    vae = Autoencoder().to("cuda:0")
    vae.decoder.to("cuda:1")
    wrapper = Wrapper(vae)
    with machine.track({"wrapper": wrapper, "vae": vae}):
        machine.ledger.reset()
        wrapper(torch.ones(1, 16))
    ledger = machine.ledger
    assert ledger.moves == {
        Move("wrapper", "cpu", "cuda:0", "activations"): MoveCount(64, 1),
        Move("vae", "cuda:0", "cuda:1", "activations"): MoveCount(64, 1),
    }


@pytest.mark.parametrize("enter", [lambda vae: vae(None), lambda vae: vae.encode(None), lambda vae: vae.decoder(None)])
def test_entry_that_fails_ends_its_phase(
    virtual_machine: MakeMachine, enter: Callable[[Autoencoder], torch.Tensor]
) -> None:
    """After an exception the next entry is a phase again."""
    machine = virtual_machine()
    vae = Autoencoder().to("cuda:0")
    with machine.track({"vae": vae}):
        with pytest.raises((TypeError, AttributeError)):
            enter(vae)
        assert machine.ledger.current_phase == OUTSIDE
        vae.encode(image())
    assert "vae.encode" in machine.ledger.phases


def test_entry_refused_by_another_hook_ends_its_phase(virtual_machine: MakeMachine) -> None:
    """Also when a hook that stands before the call raises."""

    def refuse(*_args: object) -> None:
        raise KeyError

    machine = virtual_machine()
    vae = Autoencoder().to("cuda:0")
    for part in (vae, vae.encoder):
        part.register_forward_pre_hook(refuse)
    with machine.track({"vae": vae}):
        for enter in (vae, vae.encoder):
            with pytest.raises(KeyError):
                enter(image())
            assert machine.ledger.current_phase == OUTSIDE


def test_tracking_leaves_nothing_behind(virtual_machine: MakeMachine) -> None:
    """After the block there are no hooks, no wrapped methods and no names."""
    machine = virtual_machine()
    vae = Autoencoder().to("cuda:0")
    before = set(vars(vae))
    with machine.track({"vae": vae}):
        assert set(vars(vae)) - before == {"encode", "decode", "get_image_features"}
    assert set(vars(vae)) == before
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in vae.modules())
    vae.to("cuda:1")
    with pytest.raises(DeviceMismatchError, match=r"\(op aten\.mm in Autoencoder\.encoder\.0\)$"):
        vae(image())


def test_tracking_brings_no_hook_back(virtual_machine: MakeMachine) -> None:
    """A method that a placement had replaced, and gave back while tracking went on, is the class's own again."""
    machine = virtual_machine()
    vae = Autoencoder()
    kept, dropped = vae.encode, vae.decode
    vars(vae).update(encode=kept, decode=dropped)
    with machine.track({"vae": vae}):
        del vars(vae)["decode"]
    assert vars(vae)["encode"] is kept
    assert "decode" not in vars(vae)


def test_entries_are_those_of_dispatch() -> None:
    """The phases have an entry for everything that placements stand before."""
    assert set(carrier.ENTRY_METHODS) <= {"forward", *ENTRY_METHODS}


def failing_whole(vae: Autoencoder) -> None:
    vae.encoder.append(torch.nn.GroupNorm(1, 16))
    vae.encoder[0].to("cuda:0")
    vae.encode(image())


@pytest.mark.parametrize(
    ("enter", "where"),
    [
        (lambda vae: vae.encode(image()), "(op aten.mm in vae.encoder.0)"),
        (lambda vae: vae(image()), "(op aten.mm in vae.encoder.0)"),
        (lambda vae: vae.to("meta").encode(image()), "(op aten.mm in vae.encoder.0)"),
        (failing_whole, "(op group_norm in vae.encoder.1)"),
        (lambda vae: vae.get_image_features(image()) + 1, "(op aten.mm in vae.encoder.0)"),
        (lambda vae: image() + torch.ones(2, device="cuda:1"), "(op aten.add)"),
    ],
)
def test_mismatch_names_module_and_operation(
    virtual_machine: MakeMachine, enter: Callable[[Autoencoder], object], where: str
) -> None:
    """The error ends with the operation and the qualified name of the module it ran in, if it ran in one."""
    machine = virtual_machine()
    vae = Autoencoder().to("cuda:1")
    with machine.track({"vae": vae}), pytest.raises(DeviceMismatchError) as caught:
        enter(vae)
    assert str(caught.value).startswith("Expected all tensors to be on the same device, but found at least two devices")
    assert str(caught.value).endswith(where)


def test_mismatch_outside_a_tracked_component_names_the_class(virtual_machine: MakeMachine) -> None:
    """Without names the outermost module's class stands in."""
    virtual_machine()
    vae = Autoencoder().to("cuda:1")
    with pytest.raises(DeviceMismatchError) as caught:
        vae(image())
    assert (caught.value.operation, caught.value.module) == ("aten.mm", "Autoencoder.encoder.0")


@pytest.mark.parametrize(
    ("enter", "where"),
    [
        (lambda vae: vae.to("cuda:0"), "(op aten._to_copy in vae.encoder.0)"),
        (lambda vae: vae.encode(torch.ones(1 << 16, 16)), "(op aten.empty in vae.encoder.1)"),
    ],
)
def test_out_of_memory_names_module_and_operation(enter: Callable[[Autoencoder], object], where: str) -> None:
    """An allocation that does not fit says where it was asked for, in a move as in a run."""

    class Scratch(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return torch.empty(MIB, device="cuda:0")

    vae = Autoencoder()
    vae.encoder.append(Scratch())
    with (
        VirtualMachine([512]) as machine,
        machine.track({"vae": vae}),
        pytest.raises(torch.OutOfMemoryError) as caught,
    ):
        enter(vae)
    assert str(caught.value).startswith("CUDA out of memory. Tried to allocate")
    assert str(caught.value).endswith(f"is free. {where}")


def test_adopting_what_does_not_fit_names_the_part() -> None:
    """A module that is put on a device whole says which part was too much."""
    vae = Autoencoder()
    with VirtualMachine([1024]) as machine, pytest.raises(torch.OutOfMemoryError) as caught:
        machine.adopt(vae, "cuda:0")
    assert str(caught.value).endswith("(op adopt in Autoencoder.decoder.0)")


def test_unknown_value_names_module_and_operation() -> None:
    """Shape-only: the module that asks for a value is named too."""

    class Asks(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> bool:
            return bool(image.sum() > 0)

    with VirtualMachine([64 * MIB], values=False, small_elements=4) as machine:
        checker = Asks()
        with machine.track({"safety_checker": checker}), pytest.raises(UnknownValueError) as caught:
            checker(image())
    assert str(caught.value).endswith("only a shape (op aten._local_scalar_dense in safety_checker)")
