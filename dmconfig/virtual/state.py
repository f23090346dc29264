"""What one machine is: its devices, its ledger, and how an inner tensor becomes a tensor on one of its devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dmconfig.virtual.errors import UnknownValueError
from dmconfig.virtual.ledger import Kind, Ledger
from dmconfig.virtual.tensor import CPU, META, as_shape, inner_of, parts_of, wrapped

UnknownValues = Literal["raise", "zero"]
_MODELLED_TYPES = ("cpu", "cuda", "meta")


@dataclass(slots=True, kw_only=True)
class MachineState:
    """The part of a machine that operators and patches work on; ``VirtualMachine`` documents the options."""

    capacities_bytes: Sequence[int]
    values: bool
    small_elements: int
    unknown_values: UnknownValues
    zero_phases: Collection[str]
    capability: tuple[int, int]
    ledger: Ledger
    current_index: int = 0
    guesses: Counter[str] = field(default_factory=Counter)
    components: dict[str, torch.nn.Module] = field(default_factory=dict)  # tracked now, for names in errors

    def normalise(self, device: int | str | torch.device) -> torch.device:
        """Return the device with its index, in torch's form: 0, "cuda" and "cuda:0" are the same one.

        Raises: RuntimeError: when this machine has no such device.
        """
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if wanted.type not in _MODELLED_TYPES:
            raise RuntimeError(f"a virtual machine has no {wanted.type} devices")
        if wanted.type == "cpu":
            return CPU
        if wanted.type == "meta":
            return META
        index = self.current_index if wanted.index is None else wanted.index
        if index >= len(self.capacities_bytes):
            raise RuntimeError(
                f"CUDA error: invalid device ordinal (cuda:{index}; this machine has {len(self.capacities_bytes)})"
            )
        return torch.device("cuda", index)

    def place(self, inner: torch.Tensor, device: torch.device, kind: Kind = "activations") -> Any:
        """Return inner as a tensor on device, recorded in the ledger.

        The host's own tensors stay plain, which keeps every library's fast path and its ``type(t) is Tensor`` checks.
        """
        if device.type == "meta":
            return inner
        if not self.values and inner.numel() > self.small_elements:
            inner = as_shape(inner)
        self.ledger.record(inner.untyped_storage(), str(device), kind)
        if device.type == "cpu" and inner.device.type == "cpu":
            return inner
        return wrapped(inner, device)

    def mark_weights(self, tensor: torch.Tensor) -> None:
        """Record the memory of tensor as weights, wherever it is."""
        for part in parts_of(tensor):
            if part.device.type in ("cpu", "cuda"):
                self.ledger.record(inner_of(part).untyped_storage(), str(part.device), "weights")

    def zero_for_unknown(self, operation: str, dtype: torch.dtype) -> bool | int | float:
        """Answer for a value that does not exist, and count the guess.

        Raises: UnknownValueError: unless the machine, or the phase that runs, was declared free to guess.
        """
        if self.unknown_values == "raise" and self.ledger.current_phase not in self.zero_phases:
            raise UnknownValueError(f"{operation} asks for the value of a tensor that has only a shape")
        self.guesses[operation] += 1
        if dtype == torch.bool:
            return False
        return 0.0 if dtype.is_floating_point else 0
