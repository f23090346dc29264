"""What moves in a whole generation, told from a few of its steps.

What has moved is noted after every step of the scheduler. What the last step but one moved, or the last of two, every
step that is not run is taken to move as well: some schedulers add noise in all steps but the last. What came before the
first step and what comes after the last are counted once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from dmconfig.virtual import Ledger, Move, MoveCount
from dmconfig.virtual.patching import replaced

Moves = Mapping[Move, MoveCount]
NOTHING = MoveCount(0, 0)


@dataclass(frozen=True, slots=True)
class Steps:
    """What had moved after each step of one scheduler; ``run`` of ``asked`` steps were run.

    A scheduler may be asked more than once per step, as Heun's is.
    """

    run: int
    asked: int
    noted: list[Moves] = field(default_factory=list)

    @property
    def per_step(self) -> int:
        """How often the scheduler is asked in a step."""
        return max(1, round(len(self.noted) / max(self.run, 1)))


@contextmanager
def noted_steps(pipe: Any, ledger: Ledger, steps: Mapping[str, Steps]) -> Iterator[None]:
    """Note in ``steps``, by the names of a pipeline's schedulers, what has moved after each of their steps."""
    schedulers = {name: getattr(pipe, name) for name in steps if hasattr(getattr(pipe, name, None), "step")}
    with ExitStack() as stack:
        for cls in {type(scheduler) for scheduler in schedulers.values()}:
            # the class and not the object, since pipelines copy their schedulers
            own = {name: scheduler for name, scheduler in schedulers.items() if type(scheduler) is cls}
            stack.enter_context(replaced(cls, {"step": _noting(cls.step, own, steps, ledger)}))
        yield


def _noting(
    step: Callable[..., Any], schedulers: Mapping[str, Any], steps: Mapping[str, Steps], ledger: Ledger
) -> Callable[..., Any]:
    """Return a scheduler's step that notes what has moved; of a copy, for the first scheduler of its class."""

    @functools.wraps(step)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        name = next((name for name, scheduler in schedulers.items() if scheduler is self), next(iter(schedulers)))
        steps[name].noted.append(ledger.moves)
        return result

    return noting


def whole_generation(
    moves: Moves, steps: Sequence[Steps], shares: Mapping[str, float]
) -> Iterator[tuple[Move, float, float]]:
    """Yield every route with its bytes and copies in a whole generation.

    Args:
        moves: what has moved at the end of the call.
        steps: the steps of each scheduler.
        shares: of components that run in some steps only, the share of the steps in which each does.
    """
    for move, counted in moves.items():
        nbytes, count = float(counted.bytes), float(counted.count)
        share = shares.get(move.phase.partition(".")[0])
        for each in steps:
            last, more = _repeated(move, each, share)
            nbytes, count = nbytes + more * last.bytes, count + more * last.count
        yield move, nbytes, count


def _repeated(move: Move, steps: Steps, share: float | None) -> tuple[MoveCount, float]:
    """What one more step moves over a route, and how many more steps there are."""
    marks = steps.noted[:: -steps.per_step][::-1]
    moved = [_between(before, after, move) for before, after in itertools.pairwise(marks)]
    if share is None or not moved:
        return _typical(moved), steps.asked - steps.run
    # it did not run in every step: those tell in which it did, but of weights not the first, which brings them
    first = _between({}, marks[0], move)
    ran = sum(each.count > 0 for each in (first, *moved))
    telling = [each for each in (*([] if move.kind == "weights" else [first]), *moved) if each.count]
    return _typical(telling), min(max(0.0, steps.asked * share - ran), steps.asked - steps.run)


def _typical(moved: Sequence[MoveCount]) -> MoveCount:
    """What the last step but one moved; of one, that; of none, nothing."""
    return moved[-2:][0] if moved else NOTHING


def _between(before: Moves, after: Moves, move: Move) -> MoveCount:
    one, other = before.get(move, NOTHING), after.get(move, NOTHING)
    return MoveCount(other.bytes - one.bytes, other.count - one.count)
