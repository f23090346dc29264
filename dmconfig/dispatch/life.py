"""The life of a placed pipeline after loading: a component swapped, a second pipeline on the same parts, the end."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache

from dmconfig.compatibility import AUTOENCODERS
from dmconfig.devices import CPU, DISK
from dmconfig.dispatch.audit import modules_of, tensors_of
from dmconfig.dispatch.placement import Placement, has_empty_tensors, placement_of
from dmconfig.errors import Code, DispatchError, Problem
from dmconfig.facts import class_facts, fits, pipeline_facts
from dmconfig.inputs import SEED
from dmconfig.plan import Assignment, DeviceUse, Part, Residency
from dmconfig.units import format_bytes


def unload(pipe: Any) -> None:
    """Take a pipeline apart: no hook is left, it holds no component, and memory nobody else holds is free.

    Components that other code or another pipeline holds live on, where they are. Calling the pipeline afterwards
    fails. Unloading twice is fine.
    """
    placement = placement_of(pipe)
    if placement is not None:
        placement.discard()
    for name in pipe.components:
        setattr(pipe, name, None)
    gc.collect()
    clear_device_cache()


def swap(pipe: Any, name: str, component: Any) -> None:
    """Put component in the place of the one called name: same device, same residency, its own dtype.

    The old one is on the cpu afterwards, where it goes first: devices need room for one of them. When the new one does
    not fit the pipeline or the device, nothing has changed.

    Raises: DispatchError: the pipeline is not placed or has no such component; the class does not fit; there is no
        room.
    """
    placement = placement_of(pipe)
    if placement is None:
        raise _refused(f"{type(pipe).__name__} is not placed by dmconfig", "load it with load_from_yaml")
    _check_class(pipe, name, component)
    if name not in placement.components:
        setattr(pipe, name, component)  # a scheduler or tokenizer has no place
        return
    if not isinstance(component, torch.nn.Module):
        what = f"the new {name} is a {type(component).__name__}, which is no torch module, so it cannot be placed"
        raise _refused(what, "give the module itself, not an object around it")
    if has_empty_tensors(component):
        what = f"the new {name} ({type(component).__name__}) has tensors on meta: it was never loaded, or is offloaded"
        raise _refused(what, "load it with its weights, and remove others' offload hooks from it")
    assignment = _assignment_for(component, placement.components[name].assignment)
    _check_room(placement, assignment)
    old = placement.components[name].module
    placement.swap(name, component, assignment)
    placement.plan = replace(placement.plan, devices=tuple(_devices(placement)))
    for each in placement.pipes:
        each.hf_device_map = dict(placement.plan.device_map)
        for slot, part in each.components.items():
            if part is old:  # an inner pipeline may have it under another name
                setattr(each, slot, component)


def execution_device_of(pipe: Any, component: str) -> torch.device:
    """Return the device on which a component of a placed pipeline runs: where to send what one calls it with by hand.

    Its parameters do not tell: they may rest elsewhere, or on meta. Of a component in parts, it is where it is entered.

    Raises: DispatchError: the pipeline is not placed, or has no such component with weights.
    """
    placement = placement_of(pipe)
    if placement is None:
        raise _refused(f"{type(pipe).__name__} is not placed by dmconfig", "load it with load_from_yaml")
    if component not in placement.components:
        known = ", ".join(placement.components)
        raise _refused(f"{type(pipe).__name__} has no component {component!r} with weights", f"it has: {known}")
    return torch.device(placement.components[component].assignment.execution_device)


def derive(pipe: Any, cls: type, **components: Any) -> Any:
    """Return a pipeline of another class on the components of a placed one: nothing is copied, cast or moved.

    Both pipelines then share one placement, until one of them is moved or released. ``components`` are those the
    class needs and the pipeline lacks; they stay where they are. Of the defaults of the call, those hold that the
    class takes.

    Raises: DispatchError: the pipeline is not placed, or the class needs more components.
    """
    placement = placement_of(pipe)
    if placement is None:
        raise _refused(f"{type(pipe).__name__} is not placed by dmconfig", "use the class's own from_pipe")
    if not hasattr(cls, "_get_signature_keys"):
        what = f"{cls.__name__} is made of blocks, not derived from another pipeline"
        fix = "make it, and give it the components of this one with update_components"
        raise _refused(what, fix, Code.UNFIT_FOR_MODULAR)
    expected, optional = cls._get_signature_keys(cls)
    parts = {name: part for name, part in {**pipe.components, **components}.items() if name in expected}
    missing = sorted(expected - parts.keys() - set(cls._optional_components))  # type: ignore[attr-defined]
    if missing:
        raise _refused(f"{cls.__name__} also needs {', '.join(missing)}", "give them as arguments")
    settings = {name: value for name, value in pipe.config.items() if name in optional and name not in parts}
    derived = cls(**{**dict.fromkeys(expected - parts.keys()), **parts, **settings})
    taken = inspect.signature(cls.__call__).parameters
    placement.adopt(derived, {name: value for name, value in pipe._call.items() if name in {*taken, SEED}})
    return derived


def _check_class(pipe: Any, name: str, component: Any) -> None:
    facts = pipeline_facts(type(pipe).__name__, pipe.config.get("_blocks_class_name"))
    slot = next((slot for slot in facts.slots if slot.name == name), None) if facts else None
    if slot is None:
        raise _refused(f"{type(pipe).__name__} has no component {name!r}", f"it has: {', '.join(pipe.components)}")
    library, class_name = type(component).__module__.split(".")[0], type(component).__name__
    known = class_facts(library, class_name)
    if known is not None and not fits(slot, known):
        raise _refused(
            f"{class_name} cannot be the {name!r} of {type(pipe).__name__}", f"it takes: {', '.join(slot.types)}"
        )


def _assignment_for(module: torch.nn.Module, old: Assignment) -> Assignment:
    """The old one's place for a new module: same devices, same residency, same parts.

    Raises: DispatchError: the module has not the parts that the old one is in.
    """
    tensors = [*module.parameters(), *module.buffers()]
    nbytes = _bytes_of(tensors)
    floating = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    dtype = str(max(set(floating), key=floating.count)).removeprefix("torch.") if floating else old.dtype
    parts = tuple(_part_for(module, old, part) for part in old.parts)
    own = parts[0].peak_bytes if parts else nbytes
    in_turns = old.residency in (Residency.PER_LEAF, Residency.PER_GROUP)
    return replace(
        old,
        class_name=type(module).__name__,
        dtype=dtype,
        nbytes=nbytes,
        peak_bytes=min(old.peak_bytes, nbytes) if in_turns else own,
        storage_device=CPU if old.storage_device == DISK else old.storage_device,  # it came in no file
        reason="swapped in",
        parts=parts,
        is_written=False,
        casts_inputs=old.casts_inputs or (old.component in AUTOENCODERS and dtype != old.dtype),
    )


def _part_for(module: torch.nn.Module, old: Assignment, part: Part) -> Part:
    if part.path not in dict(module.named_modules()):
        what = f"{type(module).__name__} has no module {part.path!r}, which is placed by itself"
        raise _refused(what, "plan again with the new component in the file")
    nbytes = _bytes_of(tensor for each in modules_of(module, old, part) for tensor in tensors_of(each))
    return replace(
        part,
        nbytes=nbytes,
        peak_bytes=nbytes if part.residency is Residency.ALWAYS else min(part.peak_bytes, nbytes),
        storage_device=CPU if part.storage_device == DISK else part.storage_device,
    )


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _check_room(placement: Placement, new: Assignment) -> None:
    """Refuse a component for which there is no room where it runs or where it rests.

    Raises: DispatchError: naming what is needed beside the others and what the device offers.
    """
    others = [each for each in placement.plan.assignments if each.component != new.component]
    for device in placement.plan.devices:
        here = any(device.id in (each.execution_device, each.storage_device) for each in new.parts or (new,))
        need = _need((*others, new), device.id, placement.in_turn)
        offer = device.budget_bytes - device.reserved_bytes
        if here and need > offer:
            what = (
                f"with the new {new.component}, {device.id} needs {format_bytes(need)}; it offers {format_bytes(offer)}"
            )
            raise _refused(what, "plan again with the new component in the file", Code.DOES_NOT_FIT)


def _devices(placement: Placement) -> Iterator[DeviceUse]:
    """The use of each device, by what is placed now."""
    for device in placement.plan.devices:
        yield replace(device, used_bytes=_need(placement.plan.assignments, device.id, placement.in_turn))


def _need(assignments: Iterable[Assignment], device: str, in_turn: Collection[str]) -> int:
    """The most that weights take of a device: those that stay, and the largest of those that take turns."""
    stay, turns = 0, [0]
    for assignment in assignments:
        for each in assignment.parts or (assignment,):
            if each.storage_device == device:
                stay += each.nbytes
            elif each.execution_device == device and assignment.component in in_turn:
                turns.append(each.peak_bytes)
            elif each.execution_device == device:
                stay += each.peak_bytes
    return stay + max(turns)


def _refused(what: str, fix: str, code: Code = Code.PLACEMENT_DIFFERS) -> DispatchError:
    return DispatchError([Problem(code=code, what=what, fix=fix)])
