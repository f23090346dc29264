"""Shape-only mode: weights that are offloaded to disk are remembered, not written; there are no values to write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from dmconfig.virtual.patching import replaced
from dmconfig.virtual.state import MachineState
from dmconfig.virtual.tensor import META, no_modes, wrapped

_Shape = tuple[tuple[int, ...], torch.dtype]


@contextmanager
def remembered_files(state: MachineState) -> Iterator[None]:
    """Stand in for what diffusers (safetensors) and accelerate (.dat files) offload with."""
    with ExitStack() as stack:
        stack.enter_context(replaced(import_module("safetensors.torch"), _safetensors_functions(state)))
        stack.enter_context(replaced(import_module("accelerate.utils.offload"), _accelerate_functions(state)))
        yield


def _safetensors_functions(state: MachineState) -> dict[str, object]:
    files: dict[Path, dict[str, _Shape]] = {}
    load_real_file = import_module("safetensors.torch").load_file

    def save_file(tensors: Mapping[str, torch.Tensor], filename: str | Path, metadata: object = None) -> None:  # noqa: ARG001
        files[Path(filename).resolve()] = {name: _shape(tensor) for name, tensor in tensors.items()}
        Path(filename).touch()

    def load_file(filename: str | Path, device: Any = "cpu") -> dict[str, torch.Tensor]:
        shapes = files.get(Path(filename).resolve())
        if shapes is None:
            return dict(load_real_file(filename, device=device))
        return {name: _read(state, shape, device) for name, shape in shapes.items()}

    return {"save_file": save_file, "load_file": load_file}


def _accelerate_functions(state: MachineState) -> dict[str, object]:
    files: dict[Path, _Shape] = {}
    load_real_weight = import_module("accelerate.utils.offload").load_offloaded_weight

    def offload_weight(
        weight: torch.Tensor, weight_name: str, offload_folder: str, index: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        files[(Path(offload_folder) / f"{weight_name}.dat").resolve()] = _shape(weight)
        if index is not None:
            index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
        return index

    def load_offloaded_weight(weight_file: str, weight_info: dict[str, Any]) -> Any:
        shape = files.get(Path(weight_file).resolve())
        return load_real_weight(weight_file, weight_info) if shape is None else _read(state, shape, "cpu")

    return {"offload_weight": offload_weight, "load_offloaded_weight": load_offloaded_weight}


def _shape(tensor: torch.Tensor) -> _Shape:
    return tuple(tensor.shape), tensor.dtype


def _read(state: MachineState, shape: _Shape, device: Any) -> torch.Tensor:
    destination = state.normalise(device)
    with no_modes():
        inner = torch.empty(shape[0], dtype=shape[1], device=META)
    state.ledger.count_move("disk", str(destination), inner.numel() * inner.element_size(), "weights")
    state.ledger.record(inner.untyped_storage(), str(destination), "weights")
    tensor: torch.Tensor = wrapped(inner, destination)
    return tensor
