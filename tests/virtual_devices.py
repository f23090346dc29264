"""A pytest plugin: virtual CUDA devices in any test, on any host.

Loaded by ``pytest_plugins = ["tests.virtual_devices"]`` in the main conftest. A test that asks for
``virtual_machine`` gets a function that makes a machine and enters it:

    def test_something(virtual_machine):
        machine = virtual_machine(count=2, capacity_bytes=16 * MIB)
        torch.ones(3).to("cuda:1")
        assert machine.ledger.live_bytes("cuda:1") == 512

The machine is left at teardown, also when the test fails. Machines do not nest, so a test makes one; a test that
needs to look at torch after the machine uses ``with VirtualMachine(...)`` itself. Values are those of a plain CPU run
bit for bit when both use as many threads; the fixture sets one, and puts the number back.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import pytest

from dmconfig.units import MIB

if TYPE_CHECKING:
    from dmconfig.virtual import VirtualMachine


class MakeMachine(Protocol):
    """What the fixture hands to a test."""

    def __call__(self, count: int = 2, capacity_bytes: int = 64 * MIB, values: bool = True) -> VirtualMachine:
        """Return an entered machine of count devices with this capacity each."""


@pytest.fixture
def virtual_machine() -> Iterator[MakeMachine]:
    """Give a function that makes and enters a ``VirtualMachine``, which is left when the test ends."""
    # here and not above: tests that show that nothing imports torch run in the same session
    import torch

    from dmconfig.virtual import VirtualMachine

    with ExitStack() as stack:

        def make(count: int = 2, capacity_bytes: int = 64 * MIB, values: bool = True) -> VirtualMachine:
            return stack.enter_context(VirtualMachine([capacity_bytes] * count, values=values))

        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        yield make
    # what is left belongs to the session: each collection of garbage in the tests would look through all of it
    gc.collect()
    gc.freeze()
