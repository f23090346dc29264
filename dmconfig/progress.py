"""Progress as a Protocol: the library reports, the command line shows, and by default nothing is shown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

Item = TypeVar("Item")


class Progress(Protocol):
    """Told what is being done and for how long."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Enter a phase of the work (``plan``, ``load``, ``place``, ``generate``)."""

    def track(self, phase: str, items: Sequence[Item], label: Callable[[Item], str]) -> Iterator[Item]:
        """Yield items one by one, each being worked on until the next is asked for."""

    def transfer(
        self, phase: str, items: Sequence[Item], label: Callable[[Item], str], arrived: Callable[[], int], total: int
    ) -> Iterator[Item]:
        """As ``track``, for what is ``total`` bytes together, of which ``arrived`` tells how many are here so far."""


class NoProgress:
    """Shows nothing."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:  # noqa: ARG002 - the protocol's name
        """Do nothing around the phase."""
        yield

    def track(self, phase: str, items: Sequence[Item], label: Callable[[Item], str]) -> Iterator[Item]:  # noqa: ARG002
        """Yield items as they are."""
        yield from items

    def transfer(
        self,
        phase: str,
        items: Sequence[Item],
        label: Callable[[Item], str],
        arrived: Callable[[], int],  # noqa: ARG002
        total: int,  # noqa: ARG002
    ) -> Iterator[Item]:
        """Yield items as they are."""
        return self.track(phase, items, label)
