"""The machine itself: what is entered, and everything that happens on the way in and out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import TracebackType
from typing import Self

import torch

from dmconfig.virtual.disk import remembered_files
from dmconfig.virtual.environment import virtual_environment
from dmconfig.virtual.guard import noop_cuda_guard
from dmconfig.virtual.ledger import Ledger
from dmconfig.virtual.modules import adopt_module
from dmconfig.virtual.operators import run_operator
from dmconfig.virtual.state import MachineState, UnknownValues
from dmconfig.virtual.tensor import install_dispatch, installed_dispatch
from dmconfig.virtual.threads import modes_in_workers, modes_of
from dmconfig.virtual.tracking import tracked_components

_REAL_CUDA = (
    "this process sees real CUDA devices, and virtual ones would be mixed up with them; "
    'run it with CUDA_VISIBLE_DEVICES="" in the environment, or from here with dmconfig.virtual.run_hidden'
)


class VirtualMachine:
    """A machine with virtual CUDA devices ``cuda:0``, ``cuda:1``, ... of the given capacities in bytes.

    While it is entered, torch and the libraries above it see these devices and no others. With ``values`` everything
    is computed for real on the host, and results equal a plain CPU run bit for bit. Without, tensors of more than
    ``small_elements`` elements have only a shape, so a pipeline of any size is rehearsed in seconds; asking for the
    value of one raises ``UnknownValueError``, or is answered with zero when ``unknown_values`` is "zero" or the phase
    is one of ``zero_phases`` (counted in ``guesses``).

    An allocation that exceeds a capacity raises ``torch.OutOfMemoryError``, unless ``enforce_capacity`` is off: then
    the ledger tells how much it would have taken. One machine can be active in a process; whatever way the block
    ends, nothing stays patched. Tensors made inside keep their content, but cannot be computed with outside.

    Example:
        >>> machine = VirtualMachine([64 << 20, 64 << 20])
        >>> with machine:
        ...     weights = torch.ones(1000).to("cuda:1")
        >>> machine.ledger.live_bytes("cuda:1")
        4096
    """

    def __init__(
        self,
        capacities_bytes: Sequence[int],
        *,
        values: bool = True,
        small_elements: int = 1 << 16,  # less broke schedulers that search their sigma tables (DPM, KDPM2, DEIS)
        unknown_values: UnknownValues = "raise",
        zero_phases: Collection[str] = (),
        enforce_capacity: bool = True,
        capability: tuple[int, int] = (8, 6),
    ) -> None:
        named = {f"cuda:{index}": capacity for index, capacity in enumerate(capacities_bytes)}
        self.ledger = Ledger(named, enforce_capacity=enforce_capacity)
        self._state = MachineState(
            capacities_bytes=tuple(capacities_bytes),
            values=values,
            small_elements=small_elements,
            unknown_values=unknown_values,
            zero_phases=frozenset(zero_phases),
            capability=capability,
            ledger=self.ledger,
        )
        self._exit = ExitStack()

    @property
    def capacities_bytes(self) -> Sequence[int]:
        """The capacity of each device, in the order of their indices."""
        return self._state.capacities_bytes

    @property
    def values(self) -> bool:
        """Whether values are computed, as opposed to shapes only."""
        return self._state.values

    @property
    def guesses(self) -> Counter[str]:
        """Shape-only: how often a value that does not exist was answered with zero, by operation."""
        return self._state.guesses

    def __enter__(self) -> Self:
        """Make this the machine that torch sees. Raises: RuntimeError: inside another, or where CUDA is real."""
        if installed_dispatch() is not None:
            raise RuntimeError("a VirtualMachine is active already; they do not nest")
        if torch.cuda.is_available():
            raise RuntimeError(_REAL_CUDA)
        with ExitStack() as stack:
            stack.enter_context(noop_cuda_guard())
            stack.enter_context(virtual_environment(self._state))
            if not self.values:
                stack.enter_context(remembered_files(self._state))
            stack.callback(install_dispatch, None)
            install_dispatch(partial(run_operator, self._state))
            stack.enter_context(modes_in_workers(self._state))
            stack.enter_context(modes_of(self._state))
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exit.__exit__(kind, exception, traceback)

    def adopt(
        self, module: torch.nn.Module, device: int | str | torch.device = "cpu", *, dtype: torch.dtype | None = None
    ) -> None:
        """Make a module built outside (also on ``meta``) one of this machine, in place, as weights on device.

        In shape-only mode its parameters lose their values; a module on ``meta`` can only be adopted there.
        """
        adopt_module(self._state, module, self._state.normalise(device), dtype)

    def track(self, components: Mapping[str, object]) -> AbstractContextManager[None]:
        """Make each entry of a component a phase of the ledger, for the length of a with block.

        Takes a pipeline's ``components``; what is not a module is ignored. A component that is called is the phase
        ``unet``; one entered by a method or a submodule is ``vae.decode``, ``text_encoder.text_model``. Errors inside
        name modules by the same names.
        """
        return tracked_components(self._state, components)
