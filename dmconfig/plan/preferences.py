"""What a strategy prefers among placements that keep equally much on the accelerators.

A preference is a tuple of figures that is the smaller the better, and that no further component makes smaller: so
what is true of a part of a placement bounds the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from dmconfig.devices import is_accelerator
from dmconfig.plan.uses import Uses

Figures = tuple[float, ...]


class Preference(Protocol):
    """The order among placements."""

    def figures(self, uses: Uses) -> Figures:
        """Return the figures of what devices hold so far."""

    def bound(self, uses: Uses, more_bytes: int) -> Figures:
        """Return figures that no placement falls below which holds so many more bytes on the accelerators."""

    def kind(self, device: str) -> object:
        """Return what sets a device apart from others of the same size and use; equal for those that are alike."""


class Even:
    """``balanced``: the lowest share of its budget on the fullest accelerator; then the least sum of squared shares."""

    def __init__(self, budgets: Mapping[str, int]) -> None:
        self.budgets = {device: budget for device, budget in budgets.items() if is_accelerator(device) and budget}
        self._total = sum(self.budgets.values())
        self._total_squared = sum(budget * budget for budget in self.budgets.values())

    def figures(self, uses: Uses) -> Figures:
        """Return the fullest share, and the sum of squared shares."""
        shares = [uses[device].peak / budget for device, budget in self.budgets.items()]
        return max(shares, default=0.0), sum(share * share for share in shares)

    def bound(self, uses: Uses, more_bytes: int) -> Figures:
        """Return the figures as if all that is left could be spread evenly."""
        fullest, squares = self.figures(uses)
        if not self._total:
            return fullest, squares
        held = sum(uses[device].held for device in self.budgets) + more_bytes
        return max(fullest, held / self._total), max(squares, held * held / self._total_squared)

    def kind(self, device: str) -> object:  # noqa: ARG002 - all are alike
        """Return the same for all."""
        return None


class FirstEmpty:
    """``balanced_low_0``: the fewest bytes on the first accelerator; the others even."""

    def __init__(self, budgets: Mapping[str, int], first: str) -> None:
        self.first = first
        self._others = Even({device: budget for device, budget in budgets.items() if device != first})

    def figures(self, uses: Uses) -> Figures:
        """Return the bytes on the first, and how even the others are."""
        return float(uses[self.first].peak), *self._others.figures(uses)

    def bound(self, uses: Uses, more_bytes: int) -> Figures:  # noqa: ARG002 - they may all go elsewhere
        """Return the figures so far."""
        return self.figures(uses)

    def kind(self, device: str) -> object:
        """Tell the first from the others."""
        return device == self.first


class InOrder:
    """``sequential``: the fewest bytes on the last accelerator, then on the one before, and so on: the first fills."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(reversed(devices[1:]))

    def figures(self, uses: Uses) -> Figures:
        """Return the bytes on each but the first, the last one's first."""
        return tuple(float(uses[device].peak) for device in self.devices)

    def bound(self, uses: Uses, more_bytes: int) -> Figures:  # noqa: ARG002 - they may all go on the first
        """Return the figures so far."""
        return self.figures(uses)

    def kind(self, device: str) -> object:
        """Tell each from the others."""
        return device
