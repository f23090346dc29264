"""Entering a machine's modes: in the thread that starts it, and in the workers that loaders start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from dmconfig.virtual.functions import FunctionMode
from dmconfig.virtual.operators import DispatchMode
from dmconfig.virtual.patching import replaced
from dmconfig.virtual.state import MachineState
from dmconfig.virtual.tensor import installed_dispatch

_C: Any = torch._C
_entered = threading.local()


@contextmanager
def modes_of(state: MachineState) -> Iterator[None]:
    """Send this thread's torch calls to the machine; a thread that is there already stays as it is."""
    if getattr(_entered, "state", None) is state:
        yield
        return
    _entered.state = state
    # torch.tensor(..., device="cuda") would initialise CUDA; with this flag it builds on the host and then moves
    lifts_only_cpu = _C._only_lift_cpu_tensors()
    _C._set_only_lift_cpu_tensors(True)
    try:
        with DispatchMode(state), FunctionMode(state):
            yield
    finally:
        _C._set_only_lift_cpu_tensors(lifts_only_cpu)
        _entered.state = None


@contextmanager
def modes_in_workers(state: MachineState) -> Iterator[None]:
    """Enter the modes around every task of a thread pool.

    Modes belong to a thread, and transformers materialises weights in a pool: without this they would be made on the
    host's real devices, and ``.to("cuda")`` would fail in the worker.
    """
    submit = ThreadPoolExecutor.submit

    def submit_inside(pool: ThreadPoolExecutor, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return submit(pool, _inside, state, task, args, kwargs)

    with replaced(ThreadPoolExecutor, {"submit": submit_inside}):
        yield


def _inside(state: MachineState, task: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if installed_dispatch() is None:  # the machine ended while the task waited
        return task(*args, **kwargs)
    with modes_of(state):
        return task(*args, **kwargs)
