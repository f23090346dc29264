"""The switches of a live component: what is on, and with which options, as the file's own keys."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dmconfig.spec import CacheSpec, LayerwiseCastingSpec
from dmconfig.switches import FROM_HUB

_MEMORY_FORMATS = {4: "channels_last", 5: "channels_last_3d"}


def unwrapped(component: Any) -> Any:
    """Return a component without the wrapper that ``torch.compile`` puts around it."""
    return getattr(component, "_orig_mod", component)


def several_in(component: Any) -> list[Any]:
    """Return the models that a component wraps, as several controlnets in one place are; none where it is one."""
    lists = (getattr(component, name, None) for name in ("nets", "adapters"))
    return [model for each in lists if isinstance(each, torch.nn.ModuleList) for model in each]


def switches_of(name: str, module: Any, said: Mapping[str, Any], unknown: list[str]) -> dict[str, Any]:
    """Return the switches that are on, by the names of the file.

    Args:
        name: of the component.
        module: it.
        said: what the file that it was loaded from says of it; empty where there was none, or it is another by now.
        unknown: gathers what cannot be seen.
    """
    model = unwrapped(module)
    found = {
        "attention_backend": _attention_backend(name, model, unknown),
        "attention_slicing": _attention_slicing(name, model, unknown),
        "tiling": _tiling(name, model, unknown),
        "slicing": getattr(model, "use_slicing", False) is True,
        "memory_format": _memory_format(model),
        "layerwise_casting": _layerwise_casting(name, model, said, unknown),
        "cache": _cache(name, model, said, unknown),
        "compile": _compiled(name, module, said, unknown),
    }
    return {switch: value for switch, value in found.items() if value not in (None, False)}


def casting_dtype(module: Any) -> str | None:
    """Return the type in which a module computes whose weights are kept in another, or None where they are not."""
    hook = next((hook for _, hook in _casting_hooks(unwrapped(module))), None)
    return _word(hook.compute_dtype) if hook is not None else None


def _attention_backend(name: str, module: Any, unknown: list[str]) -> str | None:
    found = {_backend(part) for part in module.modules()} - {None}
    if len(found) > 1:
        unknown.append(f"which attention backend {name} has: its layers have {', '.join(sorted(map(str, found)))}")
        return None
    backend = found.pop() if found else None
    if backend is not None and backend.endswith(FROM_HUB):
        unknown.append(f"the attention backend of {name}, {backend}: code from the hub, which a spec cannot name")
        return None
    return backend


def _backend(part: Any) -> str | None:
    backend = getattr(getattr(part, "processor", None), "_attention_backend", None)
    return str(getattr(backend, "value", backend)) if backend is not None else None


def _attention_slicing(name: str, module: Any, unknown: list[str]) -> str | int | None:
    """The word or the number from which ``set_attention_slice`` makes the sizes that the layers have."""
    layers = [part for part in module.modules() if hasattr(part, "sliceable_head_dim")]
    sizes = [getattr(getattr(layer, "processor", None), "slice_size", None) for layer in layers]
    if not any(size is not None for size in sizes):
        return None
    if all(size == 1 for size in sizes):
        return "max"
    if sizes == [layer.sliceable_head_dim // 2 for layer in layers]:
        return "auto"
    if len(set(sizes)) == 1:
        return sizes[0]
    unknown.append(f"how attention of {name} is sliced: its layers have sizes of their own, and a file has one")
    return None


def _tiling(name: str, module: Any, unknown: list[str]) -> bool | dict[str, Any]:
    """Whether it decodes in tiles, and the sizes of these that are not those of its class."""
    if getattr(module, "use_tiling", False) is not True:
        return False
    with torch.device("meta"):
        fresh = type(module).from_config(module.config)
    sizes = {key: value for key, value in vars(module).items() if key.startswith("tile_")}
    changed = {key: value for key, value in sizes.items() if value != getattr(fresh, key, value)}
    taken = inspect.signature(module.enable_tiling).parameters
    foreign = (key for key in changed if key not in taken)
    unknown.extend(f"how to say in a file that {key} of {name} is {changed[key]!r}" for key in foreign)
    return {key: value for key, value in changed.items() if key in taken} or True


def _memory_format(module: Any) -> str | None:
    """The order of convolution weights, where it is not the usual one; ranks with one order only do not tell."""
    for parameter in module.parameters():
        word = _MEMORY_FORMATS.get(parameter.dim())
        if word is not None and not parameter.is_contiguous():
            return word if parameter.is_contiguous(memory_format=getattr(torch, word)) else None
    return None


def _casting_hooks(module: Any) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        registry = getattr(part, "_diffusers_hook", None)
        hook = registry.get_hook("layerwise_casting") if registry is not None else None
        if hook is not None:
            yield path, hook


def _layerwise_casting(
    name: str, module: Any, said: Mapping[str, Any], unknown: list[str]
) -> bool | dict[str, Any] | None:
    hooks = dict(_casting_hooks(module))
    if not hooks:
        return None
    hook = next(iter(hooks.values()))
    seen = {"storage_dtype": _word(hook.storage_dtype), "non_blocking": hook.non_blocking}
    options = {key: value for key, value in seen.items() if value != LayerwiseCastingSpec.model_fields[key].default}
    if hooks.keys() != _cast_by_default(module, hook):
        before = said.get("layerwise_casting")
        pattern = before.get("skip_modules_pattern") if isinstance(before, Mapping) else None
        if pattern is None:
            unknown.append(f"which layers of {name} are left out of layerwise casting: not those that diffusers names")
        else:
            options["skip_modules_pattern"] = pattern
    return options or True


def _cast_by_default(module: Any, hook: Any) -> set[str]:
    """The layers that diffusers casts where no pattern is given."""
    with torch.device("meta"):
        fresh = type(module).from_config(module.config)
    fresh.enable_layerwise_casting(storage_dtype=hook.storage_dtype, compute_dtype=hook.compute_dtype)
    return {path for path, _ in _casting_hooks(fresh)}


def _cache(name: str, module: Any, said: Mapping[str, Any], unknown: list[str]) -> dict[str, Any] | None:
    config = getattr(module, "_cache_config", None)
    if config is None:
        return None
    before = said.get("cache") or {}
    values: dict[str, Any] = {}
    for each in dataclasses.fields(config):
        value, plain = getattr(config, each.name), _plain(getattr(config, each.name))
        if each.name.endswith("_callback") or value == _default(each):
            continue
        if plain is None:
            unknown.append(f"how to say in a file that {each.name} of the cache of {name} is {value!r}")
        else:
            values[each.name] = plain
    class_name = type(config).__name__
    if CacheSpec.model_fields["class_name"].alias in before and before["class"] == class_name:
        values = {key: before.get("config", {}).get(key, value) for key, value in values.items()}
    return {"class": class_name, **({"config": values} if values else {})}


def _default(each: dataclasses.Field[Any]) -> Any:
    factory = each.default_factory
    return each.default if factory is dataclasses.MISSING else factory()


def _plain(value: Any) -> Any:
    """A value of a configuration as a file has it; None for what a file cannot have."""
    if isinstance(value, torch.dtype):
        return _word(value)
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return None if None in items else items
    return value if isinstance(value, (bool, int, float, str)) else None


def _compiled(name: str, module: Any, said: Mapping[str, Any], unknown: list[str]) -> bool | dict[str, Any]:
    """Whether it is compiled, whole or by its repeated blocks; the options leave no trace but in the file."""
    model = unwrapped(module)
    whole = model is not module or _is_compiled(model)
    regional = any(_is_compiled(part) for part in model.modules() if part is not model)
    if not whole and not regional:
        return False
    before = said.get("compile")
    if before and bool(isinstance(before, Mapping) and before.get("regional")) is (regional and not whole):
        return dict(before) if isinstance(before, Mapping) else True
    unknown.append(f"the options with which {name} was compiled")
    return True if whole else {"regional": True}


def _is_compiled(module: Any) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
