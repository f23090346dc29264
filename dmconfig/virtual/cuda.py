"""torch.cuda and torch.accelerator of a virtual machine: the functions that torch's own are replaced with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from dmconfig.virtual.state import MachineState

Device = int | str | torch.device | None
Functions = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    """The fields of ``torch.cuda.get_device_properties`` that libraries read."""

    name: str
    total_memory: int
    major: int
    minor: int
    multi_processor_count: int = 80
    is_integrated: bool = False


def cuda_functions(state: MachineState) -> Functions:
    """Return the replacements for attributes of ``torch.cuda``."""
    return {**_presence(state), **_properties(state), **_memory(state), **_streams(state), **_random()}


def accelerator_functions(state: MachineState) -> Functions:
    """Return the replacements for attributes of ``torch.accelerator``."""
    memory = _memory(state)
    shared = (
        "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats",
        "reset_peak_memory_stats", "empty_cache",
    )  # fmt: skip
    return {
        "is_available": _always(True),
        "current_accelerator": _always(torch.device("cuda")),
        "device_count": lambda: len(state.capacities_bytes),
        "current_device_index": lambda: state.current_index,
        "current_device_idx": lambda: state.current_index,
        "set_device_index": _set_device(state),
        "set_device_idx": _set_device(state),
        "synchronize": _always(None),
        "get_memory_info": memory["mem_get_info"],
        **{name: memory[name] for name in shared},
    }


def _presence(state: MachineState) -> Functions:
    return {
        "_lazy_init": _always(None),
        "is_available": _always(True),
        "is_initialized": _always(True),
        "device_count": lambda: len(state.capacities_bytes),
        "current_device": lambda: state.current_index,
        "set_device": _set_device(state),
        "device": _device_context(state),
        "can_device_access_peer": _always(True),
        "is_bf16_supported": _always(state.capability >= (8, 0)),
    }


def _properties(state: MachineState) -> Functions:
    def get_device_properties(device: Device = None) -> DeviceProperties:
        index = _index(state, device)
        major, minor = state.capability
        total_bytes = state.capacities_bytes[index]
        return DeviceProperties(name=f"Virtual GPU {index}", total_memory=total_bytes, major=major, minor=minor)

    return {
        "get_device_properties": get_device_properties,
        "get_device_name": lambda device=None: get_device_properties(device).name,
        "get_device_capability": _always(state.capability),
    }


def _memory(state: MachineState) -> Functions:
    def live(device: Device = None) -> int:
        return state.ledger.live_bytes(_name(state, device))

    def peak(device: Device = None) -> int:
        return state.ledger.peak_bytes(_name(state, device))

    def reserved(device: Device = None) -> int:
        return state.ledger.reserved_bytes(_name(state, device))

    def peak_reserved(device: Device = None) -> int:
        return state.ledger.peak_reserved_bytes(_name(state, device))

    def mem_get_info(device: Device = None) -> tuple[int, int]:
        name = _name(state, device)
        return state.ledger.free_bytes(name), state.capacities_bytes[_index(state, device)]

    def memory_stats(device: Device = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": live(device),
            "allocated_bytes.all.peak": peak(device),
            "reserved_bytes.all.current": reserved(device),
            "reserved_bytes.all.peak": peak_reserved(device),
            "num_alloc_retries": state.ledger.allocation_retries(_name(state, device)),
        }

    return {
        "mem_get_info": mem_get_info,
        "memory_allocated": live,
        "max_memory_allocated": peak,
        "memory_reserved": reserved,
        "max_memory_reserved": peak_reserved,
        "memory_stats": memory_stats,
        "reset_peak_memory_stats": lambda device=None: state.ledger.reset_peaks(_name(state, device)),
        "empty_cache": state.ledger.release_cached,
        "ipc_collect": _always(None),
    }


def _streams(state: MachineState) -> Functions:
    class Stream(_Stream):
        machine = state

    return {
        "Stream": Stream,
        "Event": _Event,
        "current_stream": Stream,
        "default_stream": Stream,
        "stream": lambda _stream: nullcontext(),
        "synchronize": _always(None),
    }


def _random() -> Functions:
    # Virtual devices draw from the host's generator, which torch.manual_seed sets: nothing is left to seed.
    return {
        "manual_seed": _always(None),
        "manual_seed_all": _always(None),
        "seed_all": _always(None),
        "get_rng_state": lambda _device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, _device="cuda": torch.set_rng_state(state),
    }


class _Stream:
    """A stream on which everything has always happened already."""

    machine: ClassVar[MachineState]
    cuda_stream = 0

    def __init__(self, device: Device = None, priority: int = 0, **_options: object) -> None:
        self.device = self.machine.normalise("cuda" if device is None else device)
        self.priority = priority

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass


class _Event:
    """An event that has always happened."""

    def __init__(self, *_args: object, **_options: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: _Event) -> float:
        return 0.0


def _device_context(state: MachineState) -> type:
    class Context:
        """``with torch.cuda.device(1): ...`` makes that device the current one."""

        def __init__(self, device: Device) -> None:
            self._index = _index(state, device)
            self._previous = state.current_index

        def __enter__(self) -> None:
            self._previous, state.current_index = state.current_index, self._index

        def __exit__(self, *_exception: object) -> None:
            state.current_index = self._previous

    return Context


def _set_device(state: MachineState) -> Callable[[Device], None]:
    def set_device(device: Device) -> None:
        state.current_index = _index(state, device)

    return set_device


def _index(state: MachineState, device: Device) -> int:
    return int(state.normalise("cuda" if device is None else device).index)


def _name(state: MachineState, device: Device) -> str:
    return f"cuda:{_index(state, device)}"


def _always(answer: object) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: answer
