"""Where the components of a live pipeline are: from the placement, where it is ours, else from hooks and tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dmconfig.devices import CPU, DISK, parse_device
from dmconfig.dispatch import placement_of
from dmconfig.plan import Assignment, Part, Residency
from dmconfig.spec import GroupOffloadSpec
from dmconfig.writing import Verbatim

_OFFLOAD = {
    Residency.WHILE_RUNNING: "model",
    Residency.PER_GROUP: "group",
    Residency.PER_LEAF: "sequential",
}
Entry = str | dict[str, str] | Verbatim


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The sections of a file that say where things are, and what of it cannot be known."""

    device_map: Mapping[str, Entry]
    execution_device: str
    group_offload: Mapping[str, Any] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


def places_of(pipe: Any, modules: Mapping[str, torch.nn.Module]) -> Places:
    """Return where the modules of a pipeline are."""
    placement = placement_of(pipe)
    if placement is not None:
        entries = dict(entry for each in placement.plan.assignments for entry in _planned(each))
        in_groups = any(each.residency is Residency.PER_GROUP for each in placement.plan.assignments)
        return Places(
            device_map=entries,
            execution_device=str(placement.home),
            group_offload=_unlike_defaults(placement.group_options) if in_groups else {},
        )
    seen = _Seen()
    entries = dict(entry for name, module in modules.items() for entry in seen.entries(name, module))
    return Places(
        device_map=entries,
        execution_device=_full(pipe._execution_device),
        group_offload=_unlike_defaults(seen.group_options),
        unknown=tuple(seen.unknown),
    )


def _planned(assignment: Assignment) -> Iterator[tuple[str, Entry]]:
    """The entries of one component: itself, and its parts where it is split."""
    name = assignment.component
    for each in assignment.parts or (assignment,):
        yield f"{name}.{each.path}" if isinstance(each, Part) and each.path else name, _entry(each)


def _entry(each: Assignment | Part) -> Entry:
    if each.residency not in _OFFLOAD:
        return each.execution_device
    return _offloaded(each.execution_device, _OFFLOAD[each.residency], on_disk=each.storage_device == DISK)


def _offloaded(device: str, how: str, *, on_disk: bool = False) -> Entry:
    entry = {"execution": device, "offload": how}
    return entry | ({"storage": DISK} if on_disk else {})


def _unlike_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    defaults = GroupOffloadSpec().model_dump()
    return {name: value for name, value in options.items() if name in defaults and value != defaults[name]}


def _full(device: object) -> str:
    return parse_device(device if isinstance(device, int) else str(device))


@dataclass(slots=True)
class _Seen:
    """What is seen on components that others have placed."""

    group_options: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def entries(self, name: str, module: torch.nn.Module) -> Iterator[tuple[str, Entry]]:
        """Yield the entries of one component, by its hooks; without any, by where its tensors are."""
        from accelerate.hooks import CpuOffload

        hooks = [*_hooks(module)]
        if (grouped := _group_config(module)) is not None:
            yield name, self._in_groups(name, grouped)
        elif whole := next((hook for hook in hooks if isinstance(hook, CpuOffload)), None):
            yield name, _offloaded(_full(whole.execution_device), "model")
        elif leaf := next((hook for hook in hooks if getattr(hook, "offload", False)), None):
            yield name, _offloaded(_full(leaf.execution_device), "sequential", on_disk=_rests_on_disk(leaf))
            self._told_apart(name, hooks)
        else:
            yield from self._resting(name, module)

    def _in_groups(self, name: str, config: Any) -> Entry:
        options = {
            "offload_type": str(getattr(config.offload_type, "value", config.offload_type)),
            "num_blocks_per_group": config.num_blocks_per_group or 1,
            "use_stream": config.stream is not None,
            "non_blocking": config.non_blocking,
            "record_stream": config.record_stream,
            "low_cpu_mem_usage": config.low_cpu_mem_usage,
        }
        if self.group_options and options != self.group_options:
            self.unknown.append(f"{name} is offloaded in other groups than the components before; a file has one way")
        self.group_options = self.group_options or options
        if config.offload_to_disk_path:
            self.unknown.append(f"{name} is offloaded in groups to disk, which a file cannot say")
        return _offloaded(_full(config.onload_device), "group")

    def _told_apart(self, name: str, hooks: list[Any]) -> None:
        devices = {_full(hook.execution_device) for hook in hooks if getattr(hook, "offload", False)}
        if len(devices) > 1:
            self.unknown.append(f"{name} is brought layer by layer to {', '.join(sorted(devices))}; one is written")

    def _resting(self, name: str, module: torch.nn.Module) -> Iterator[tuple[str, Entry]]:
        devices = {_full(t.device) for t in (*module.parameters(), *module.buffers()) if t.device.type != "meta"}
        mapped = getattr(module, "hf_device_map", None)
        if len(devices) == 1:
            yield name, devices.pop()
        elif isinstance(mapped, Mapping) and devices:
            main = (
                _full(next(_hooks(module)).execution_device)
                if [*_hooks(module)]
                else _full(next(iter(mapped.values())))
            )
            yield name, main
            yield from ((f"{name}.{path}", _mapped(device, main)) for path, device in mapped.items() if path)
        else:
            self.unknown.append(f"where {name} is: its tensors are on {', '.join(sorted(devices)) or 'no device'}")
            variable = f"{name.upper()}_DEVICE"
            yield name, Verbatim(f"${{{variable}:?the device of {name} is not known}}", is_text=True)


def _mapped(device: object, main: str) -> Entry:
    """An entry of a map of accelerate's: what is under cpu or disk is brought to the main device layer by layer."""
    name = _full(device)
    return _offloaded(main, "sequential", on_disk=name == DISK) if name in (CPU, DISK) and main != CPU else name


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    """The hooks of accelerate's on a module and on those below it, those that it keeps in a sequence each."""
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        yield from getattr(hook, "hooks", [hook] if hook is not None else [])


def _group_config(module: torch.nn.Module) -> Any:
    for part in module.modules():
        registry = getattr(part, "_diffusers_hook", None)
        hook = registry.get_hook("group_offloading") if registry is not None else None
        if hook is not None:
            return hook.config
    return None


def _rests_on_disk(hook: Any) -> bool:
    weights = getattr(hook, "weights_map", None)
    dataset = getattr(weights, "dataset", weights)
    return bool(getattr(dataset, "index", None))
