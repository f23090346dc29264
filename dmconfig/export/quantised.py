"""How the components of a live pipeline are quantised, as the section of the file says it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch

_LOADS = {"load_in_4bit": "bitsandbytes_4bit", "load_in_8bit": "bitsandbytes_8bit"}
_BACKENDS = {"TorchAoConfig": "torchao", "QuantoConfig": "quanto"}


def quantization_of(name: str, module: Any, said: object, unknown: list[str]) -> str | dict[str, Any] | None:
    """Return the entry of a component under ``quantization``, or None where its weights are plain, or of a GGUF file.

    ``said`` is the entry of the file that it was loaded from: of the same backend, its own words are kept.
    """
    config = getattr(getattr(module, "hf_quantizer", None), "quantization_config", None)
    class_name = type(config).__name__
    if config is None or class_name == "GGUFQuantizationConfig":
        return None
    loads = next((word for flag, word in _LOADS.items() if getattr(config, flag, False)), None)
    backend = loads or _BACKENDS.get(class_name)
    if backend is None:
        unknown.append(f"how to say in a file that {name} is quantised with {class_name}")
        return None
    before = said.get("quant_backend") if isinstance(said, Mapping) else said
    if before == backend:
        return dict(said) if isinstance(said, Mapping) else str(said)
    kwargs = _arguments(name, config, unknown)
    return {"quant_backend": backend, "quant_kwargs": kwargs} if kwargs else backend


def _arguments(name: str, config: Any, unknown: list[str]) -> dict[str, Any]:
    """The arguments of a configuration that are not as its class has them."""
    found: dict[str, Any] = {}
    for parameter in inspect.signature(type(config).__init__).parameters.values():
        value = getattr(config, parameter.name, parameter.default)
        is_default = value == parameter.default or (parameter.default is None and value in ([], {}))
        if is_default or parameter.name in ("self", *_LOADS) or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.name == "quant_type":
            found["quant_type"] = _torchao(value)
        elif isinstance(value, torch.dtype):
            found[parameter.name] = str(value).removeprefix("torch.")
        elif isinstance(value, (bool, int, float, str, list)):
            found[parameter.name] = value
        else:
            unknown.append(f"how to say in a file that {parameter.name} of the quantisation of {name} is {value!r}")
    if found.get("bnb_4bit_compute_dtype") == "float32":
        del found["bnb_4bit_compute_dtype"]  # what None stands for
    return found


def _torchao(value: Any) -> str | dict[str, Any]:
    """A configuration of torchao by name, with the values that are not as its class has them."""
    class_name = type(value).__name__
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    changed = {
        each.name: getattr(value, each.name)
        for each in fields
        if isinstance(getattr(value, each.name), (bool, int, float, str)) and getattr(value, each.name) != each.default
    }
    return {"class": class_name, "config": changed} if changed else class_name
