"""What is true of a placed pipeline, held against its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from dmconfig.devices import DISK
from dmconfig.dispatch.weights import GROUP_HOOKS
from dmconfig.errors import Code, Problem
from dmconfig.layout import nearest_ancestor
from dmconfig.plan import Assignment, Part, Plan, Residency

_MAPS = Path("/proc/self/maps")
_SHOWN = 3
_HOOKS = {Residency.PER_LEAF: "accelerate", Residency.PER_GROUP: "diffusers' group offloading"}
"""Whose hooks bring weights in pieces."""
NOBODY = "meta, with nobody to bring it"


def audit(modules: Mapping[str, torch.nn.Module], plan: Plan, *, is_mapped: bool = True) -> Iterator[Problem]:
    """Yield a problem per component, by name, whose weights are not where, or not of the dtype, the plan says.

    Looks at every parameter and buffer, when nothing is running. A tensor on meta is right only where a hook owns it;
    float32 is right beside any dtype, because classes keep some of their layers so. What is to be brought in pieces
    has the hooks for it, and nothing else has them. ``is_mapped``: what rests on disk has to be mapped from files.
    """
    for assignment in plan.assignments:
        module = modules[assignment.component]
        for each in assignment.parts or (assignment,):
            yield from _misplaced(module, assignment, each, is_mapped=is_mapped)
        yield from _unhooked(module, assignment)
        dtypes = {str(dtype).removeprefix("torch.") for dtype in _dtypes(module)}
        if other := sorted(dtypes - {assignment.dtype, "float32"}):
            what = f"{assignment.component} was planned in {assignment.dtype} and is in {', '.join(other)}"
            yield Problem(code=Code.PLACEMENT_DIFFERS, what=what, path=("components", assignment.component))


def _dtypes(root: torch.nn.Module) -> Iterator[torch.dtype]:
    """The floating dtypes of a component's weights, but for layers that layerwise casting keeps as it says."""
    for module in root.modules():
        registry = getattr(module, "_diffusers_hook", None)
        casting = registry.get_hook("layerwise_casting") if registry is not None else None
        for tensor in module.parameters(recurse=False):
            if tensor.is_floating_point() and (casting is None or tensor.dtype != casting.storage_dtype):
                yield tensor.dtype


def modules_of(root: torch.nn.Module, assignment: Assignment, each: Assignment | Part) -> list[torch.nn.Module]:
    """Return the modules of a component whose own tensors are where ``each``, itself or a part of it, is."""
    if isinstance(each, Assignment):
        return [*root.modules()]
    paths = {part.path: part for part in assignment.parts}
    return [module for path, module in root.named_modules() if nearest_ancestor(path, paths) == each.path]


def _misplaced(
    root: torch.nn.Module, assignment: Assignment, each: Assignment | Part, *, is_mapped: bool
) -> Iterator[Problem]:
    modules = modules_of(root, assignment, each)
    name = f"{assignment.component}.{each.path}" if isinstance(each, Part) and each.path else assignment.component
    owned = _owned(modules)
    found = {_place(tensor, owned=module in owned) for module in modules for tensor in tensors_of(module)}
    wrong = sorted(found - _right_places(each))
    if wrong:
        what = f"{name} was planned on {each.storage_device} and is on {', '.join(wrong)}"
        empty = _empty_tensors(root, modules, owned) if NOBODY in wrong else []
        why = f"without data: {', '.join(empty[:_SHOWN])}" if empty else ""  # there may be one among thousands
        why += f" and {len(empty) - _SHOWN} more" if len(empty) > _SHOWN else ""
        yield Problem(code=Code.PLACEMENT_DIFFERS, what=what, why=why, path=("device_map",))
    elif is_mapped and each.storage_device == DISK and (count := count_in_memory(modules)):
        what = f"{name} was planned to rest in files; {count} of its tensors are in memory"
        yield Problem(code=Code.PLACEMENT_DIFFERS, what=what, path=("device_map",))


def _unhooked(module: torch.nn.Module, assignment: Assignment) -> Iterator[Problem]:
    """Yield where hooks that bring weights in pieces are missing, or are there and were not planned."""
    planned = {_HOOKS.get(each.residency, "") for each in assignment.parts or (assignment,) if each.nbytes}
    found = {kind for part in module.modules() for kind in _hooks_on(part)}
    if not any(_holds_tensors(child) for child in module.children()):
        found |= planned  # no layer below that a hook could be on
    for kind in sorted(planned - found - {""}):
        what = f"{assignment.component} is to be brought by the hooks of {kind}, and has none"
        yield Problem(code=Code.PLACEMENT_DIFFERS, what=what, path=("device_map",))
    for kind in sorted(found - planned):
        what = f"{assignment.component} has hooks of {kind}, and was not planned with any"
        yield Problem(code=Code.PLACEMENT_DIFFERS, what=what, path=("device_map",))


def _hooks_on(part: torch.nn.Module) -> Iterator[str]:
    if "_hf_hook" in vars(part):
        yield _HOOKS[Residency.PER_LEAF]
    if not GROUP_HOOKS.isdisjoint(getattr(vars(part).get("_diffusers_hook"), "hooks", ())):
        yield _HOOKS[Residency.PER_GROUP]


def _holds_tensors(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _empty_tensors(root: torch.nn.Module, modules: Sequence[torch.nn.Module], owned: set[torch.nn.Module]) -> list[str]:
    """The tensors on meta that no hook owns, by their paths in the component."""
    return [
        f"{path}.{name}" if path else name
        for path, module in root.named_modules()
        if module in modules
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if _place(tensor, owned=module in owned) == NOBODY
    ]


def _right_places(assignment: Assignment | Part) -> set[str]:
    if assignment.residency is Residency.PER_LEAF:
        # buffers stay on the device, and what the component itself owns rests on the cpu: see PerLeaf
        return {"a hook", assignment.execution_device, _host(assignment.storage_device)}
    return {_host(assignment.storage_device)}


def _host(device: str) -> str:
    """Weights that rest on disk are tensors on the cpu, mapped from their file."""
    return "cpu" if device == DISK else device


def _place(tensor: torch.Tensor, *, owned: bool) -> str:
    if tensor.device.type == "meta":
        return "a hook" if owned else NOBODY
    return str(tensor.device)


def count_in_memory(modules: Sequence[torch.nn.Module]) -> int:
    """Return how many parameters are in memory of their own: on an accelerator, or not mapped from a file.

    Of those on the cpu some systems do not tell, and then they do not count. Adapters that peft has put beside layers
    do not either: they came of another file.
    """
    adapters = _adapters(modules)
    tensors = [tensor for module in modules if module not in adapters for tensor in _resting(module)]
    on_accelerators = sum(tensor.device.type != "cpu" for tensor in tensors)
    if not _MAPS.exists():
        return on_accelerators
    ranges = _mapped_files()
    addresses = {tensor.data_ptr() for tensor in tensors if tensor.numel() and tensor.device.type == "cpu"}
    return on_accelerators + sum(not any(start <= each < end for start, end in ranges) for each in addresses)


def _adapters(modules: Sequence[torch.nn.Module]) -> set[torch.nn.Module]:
    """What peft has put beside layers: it came of another file, and stays in memory."""
    held = (getattr(layer, name, None) for layer in modules for name in getattr(layer, "adapter_layer_names", ()))
    return {part for adapter in held if isinstance(adapter, torch.nn.Module) for part in adapter.modules()}


def _resting(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """A module's own parameters; where a hook holds them back, those the hook has."""
    weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
    for name, tensor in module.named_parameters(recurse=False):
        if tensor.device.type != "meta":
            yield tensor
        elif weights is not None:
            yield weights[name]


def _mapped_files() -> list[tuple[int, int]]:
    """The address ranges of this process that are parts of files (Linux)."""
    lines = (line.split(maxsplit=5) for line in _MAPS.read_text().splitlines())
    ranges = (line[0].split("-") for line in lines if len(line) == 6 and line[5].startswith("/"))
    return [(int(start, 16), int(end, 16)) for start, end in ranges]


def _owned(modules: Sequence[torch.nn.Module]) -> set[torch.nn.Module]:
    """The modules whose weights a hook holds: their own, or one above them that brings all below it."""
    hooked = [module for module in modules if hasattr(module, "_hf_hook")]
    return {part for m in hooked for part in (m.modules() if getattr(m._hf_hook, "place_submodules", False) else [m])}


def tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers that a module holds itself."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
