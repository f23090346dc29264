"""What a whole generation moves, told from a few steps: exact sums over routes, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from dmconfig.rehearse.scaling import Steps, noted_steps, whole_generation
from dmconfig.virtual import Ledger, Move, MoveCount

LATENTS = Move("vae.decode", "cuda:0", "cuda:1", "activations")
TIMESTEP = Move("outside", "cpu", "cuda:0", "activations")
LAYER = Move("unet", "cpu", "cuda:0", "weights")
FIRST, SECOND = Move("transformer", "cpu", "cuda:0", "weights"), Move("transformer_2", "cpu", "cuda:0", "weights")


def moved(**routes: int) -> Mapping[Move, MoveCount]:
    """Bytes by route; every copy is of 10."""
    names = {"latents": LATENTS, "timestep": TIMESTEP, "layer": LAYER, "first": FIRST, "second": SECOND}
    return {names[name]: MoveCount(nbytes, nbytes // 10) for name, nbytes in routes.items()}


def whole(end: Mapping[Move, MoveCount], steps: Steps, **shares: float) -> dict[Move, tuple[float, float]]:
    return {move: (nbytes, count) for move, nbytes, count in whole_generation(end, [steps], shares)}


def test_what_every_step_moves_is_counted_for_every_step() -> None:
    """Of 10 steps two are run: what the second moved, eight more move; what is moved once stays once."""
    steps = Steps(2, 10, [moved(timestep=30, layer=100), moved(timestep=40, layer=200)])
    end = moved(timestep=40, layer=200, latents=70)
    # the timestep: 30 up to the first step, of which 20 are of before, 10 in the second, and 8 x 10 more
    assert whole(end, steps) == {TIMESTEP: (120, 12), LAYER: (1000, 100), LATENTS: (70, 7)}


def test_what_is_brought_for_the_first_step_alone_is_brought_once() -> None:
    """A denoiser that is brought whole before its first step stays for the others."""
    steps = Steps(2, 10, [moved(layer=100), moved(layer=100)])
    assert whole(moved(layer=100), steps) == {LAYER: (100, 10)}


@pytest.mark.parametrize("run", [1, 3])
def test_a_generation_that_is_all_run_is_as_it_was(run: int) -> None:
    """Nothing is added where no step is left."""
    steps = Steps(run, run, [moved(layer=100 * (step + 1)) for step in range(run)])
    assert whole(moved(layer=100 * run), steps) == {LAYER: (100 * run, 10 * run)}


def test_a_scheduler_that_is_asked_twice_per_step_counts_both() -> None:
    """Heun's asks twice in every step but the last: of 3 steps, 5 times."""
    noted = [moved(layer=100 * (ask + 1)) for ask in range(5)]
    assert whole(moved(layer=500), Steps(3, 10, noted)) == {LAYER: (500 + 7 * 200, 50 + 7 * 20)}


def test_denoisers_that_take_turns_each_count_for_their_share() -> None:
    """Of 50 steps the first has 16 and the second 34; each moves 10 in its own."""
    noted = [
        moved(first=10), moved(first=20), moved(first=20, second=10), moved(first=20, second=20),
    ]  # fmt: skip
    found = whole(noted[-1], Steps(4, 50, noted), transformer=0.32, transformer_2=0.68)
    assert found[FIRST] == (160, 16)
    assert found[SECOND] == (340, 34)


def test_denoisers_of_a_generation_that_is_all_run_are_as_they_ran() -> None:
    """Whatever share of the steps each is thought to have."""
    noted = [moved(first=10), moved(first=10, second=10)]
    found = whole(noted[-1], Steps(2, 2, noted), transformer=0.32, transformer_2=0.68)
    assert found == {FIRST: (10, 1), SECOND: (10, 1)}


def test_weights_that_came_with_the_first_step_are_not_repeated() -> None:
    """Of a denoiser that ran in the first step alone, weights were brought then; activations come again each time."""
    sent = Move("transformer", "cuda:1", "cuda:0", "activations")
    noted = [{**moved(first=10), sent: MoveCount(10, 1)}, {**moved(first=10, second=10), sent: MoveCount(10, 1)}]
    found = whole(noted[-1], Steps(2, 50, noted), transformer=0.32, transformer_2=0.68)
    assert found[FIRST] == (10, 1)
    assert found[sent] == (160, 16)


class Scheduler:
    """A scheduler whose step does nothing."""

    def step(self, value: int) -> int:
        """Return what was given."""
        return value


class Inherited(Scheduler):
    """One that has its step from its base."""


@pytest.mark.parametrize("cls", [Scheduler, Inherited])
def test_steps_are_noted_and_schedulers_left_as_they_were(cls: Any) -> None:
    """Also those of a copy, which pipelines make; afterwards the class has the step it had."""
    steps = {"scheduler": Steps(2, 10)}
    before = dict(vars(cls))
    with noted_steps(SimpleNamespace(scheduler=cls()), Ledger({}), steps):
        assert cls().step(7) == 7
    assert dict(vars(cls)) == before
    assert steps["scheduler"].noted == [{}]


def test_schedulers_of_one_class_are_told_apart() -> None:
    """The steps of a prior are not those of the decoder."""
    steps = {"scheduler": Steps(2, 10), "prior_scheduler": Steps(2, 5)}
    pipe = SimpleNamespace(scheduler=Scheduler(), prior_scheduler=Scheduler())
    with noted_steps(pipe, Ledger({}), steps):
        pipe.prior_scheduler.step(1)
        pipe.prior_scheduler.step(1)
        pipe.scheduler.step(1)
    assert [len(each.noted) for each in steps.values()] == [1, 2]
