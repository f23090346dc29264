"""Rules across the entries of a spec, one small function per rule; all problems come out together.

What is refused here is everything that can be known without a machine and without weights: whatever passes, the
planner and the loader do not refuse for a reason of this kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dmconfig.assembly import Assembly, assemble, unknown_component
from dmconfig.devices import CPU, DISK
from dmconfig.errors import Code, DMConfigError, Problem, SourceError, SpecError, nearest
from dmconfig.paths import ConfigPath
from dmconfig.resolve import Resolved
from dmconfig.spec import STRATEGIES, PlacementSpec, Spec
from dmconfig.weights import find_weights

DEFAULT = "default"
SUPPORTED_STRATEGIES = frozenset({"balanced"})
SEED = "seed"
"""The one key under ``call`` that is ours: it becomes the generator."""

OWNED_ARGUMENTS = frozenset({"generator"})
"""Parameters of a pipeline's call that a file cannot hold, with what to write instead in ``call_arguments``."""


def check(resolved: Resolved, spec: Spec) -> Assembly:
    """Return what the pipeline is made of, after every rule.

    Raises: SpecError: all problems found, of all rules.
    """
    problems = [*not_supported_yet(resolved, spec), *needless_revisions(resolved, spec)]
    try:
        assembly = assemble(resolved, spec)
    except DMConfigError as error:
        raise SpecError([*problems, *error.problems]) from None
    for rule in (device_map_names, unplaced_components, idle_low_memory, call_arguments):
        problems.extend(rule(resolved, spec, assembly))
    if problems:
        raise SpecError(problems)
    return assembly


def check_weights(resolved: Resolved, assembly: Assembly) -> None:
    """Check that every module's weights are where its config is; those of a hub source are ``fetch``'s to see to.

    Planning works without weights; validating and loading do not.

    Raises: SourceError: every component without safetensors weights, or without the variant asked for it.
    """
    problems: list[Problem] = []
    for component in assembly.modules:
        if component.folder is None or component.source.hub_id:
            continue
        variant = component.variant if component.variant_required else None
        if find_weights(component.folder, library=component.library, variant=variant) is None:
            named = f"variant {variant!r} of the " if variant else ""
            what = f"{component.folder} has no safetensors files with {named}weights of {component.name!r}"
            fix = "fetch the folder again, or save the pipeline with save_pretrained (safetensors)"
            problems.append(resolved.problem(Code.WEIGHTS_MISSING, component.path, what, fix=fix))
    problems.extend(_variant_nowhere(resolved, assembly))
    if problems:
        raise SourceError(problems)


def not_supported_yet(resolved: Resolved, spec: Spec) -> Iterator[Problem]:
    """What version 1 of the file may say and this version of dmconfig cannot do: refused by name, never ignored."""

    def refuse(path: ConfigPath, thing: str, fix: str) -> Problem:
        return resolved.problem(Code.NOT_SUPPORTED_YET, path, f"{thing} is not supported yet", fix=fix)

    entries = spec.device_map if isinstance(spec.device_map, dict) else {None: spec.device_map}
    for name, entry in entries.items():
        path: ConfigPath = ("device_map",) if name is None else ("device_map", name)
        if isinstance(entry, PlacementSpec):
            if entry.offload == "group":
                yield refuse((*path, "offload"), "group offload", "use model or sequential")
            if entry.execution == DISK:
                yield refuse((*path, "execution"), "disk", "nothing can run on disk; name an accelerator or cpu")
        elif entry in STRATEGIES and entry not in SUPPORTED_STRATEGIES:
            yield refuse(path, f"strategy {entry!r}", "use balanced, with low_memory for what does not fit")
        elif entry == DISK:
            yield refuse(path, "disk", "name an accelerator or cpu")
        if name is not None and "." in name:
            what = f"placing a part of a component ({name})"
            yield refuse(path, what, f"place the whole component: {name.partition('.')[0]}")
    if spec.low_memory == "group_offload":
        yield refuse(("low_memory",), "group_offload", "use cpu_offload_with_hook or sequential_cpu_offload")
    if spec.offload_folder is not None:
        yield refuse(("offload_folder",), "offloading to disk", "remove the line")
    disk = spec.max_memory.get(DISK)
    if disk is not None and (disk.kind != "fixed" or disk.amount > 0):
        yield refuse(("max_memory", DISK), "a budget on disk", "remove it, or write 0")


def needless_revisions(resolved: Resolved, spec: Spec) -> Iterator[Problem]:
    """A component's revision or subfolder without a source of its own would mean nothing."""
    for name, component in spec.components.items():
        if component is not None and component.revision is not None and component.source is None:
            what = f"revision is given for {name!r}, which has no source of its own"
            path = ("components", name, "revision")
            yield resolved.problem(Code.CONTRADICTION, path, what, fix="add source, or use pipeline.revision", key=True)


def device_map_names(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """Every key of the map is a component that is loaded and has weights, and names one device."""
    if not isinstance(spec.device_map, dict):
        return
    slots = {slot.name for slot in assembly.facts.slots}
    modules = {component.name for component in assembly.modules}
    for name, entry in spec.device_map.items():
        path: ConfigPath = ("device_map", name)
        if name == DEFAULT:
            if isinstance(entry, PlacementSpec):
                what, fix = "default takes a strategy or one device", "write 'default: cuda:0' and a low_memory word"
                yield resolved.problem(Code.BAD_VALUE, path, what, fix=fix)
        elif "." in name:
            continue  # refused by name elsewhere
        elif name not in slots:
            yield unknown_component(resolved, path, name, assembly.facts)
        elif name in assembly.absent:
            what, fix = f"{name!r} is left out of this pipeline, so it has no place", "remove the line"
            yield resolved.problem(Code.NOT_A_MODULE, path, what, fix=fix, key=True)
        elif name not in modules:
            what, fix = f"{name!r} has no weights, so it has no place", "remove the line"
            yield resolved.problem(Code.NOT_A_MODULE, path, what, fix=fix, key=True)
        elif isinstance(entry, str) and entry in STRATEGIES:
            what = f"{entry!r} places whole pipelines, not one component"
            yield resolved.problem(Code.BAD_VALUE, path, what, fix=f"write 'default: {entry}' or a device")
        elif isinstance(entry, PlacementSpec) and entry.execution == CPU and entry.offload != "none":
            what = f"{name!r} runs on the cpu, so its weights need not be brought anywhere"
            fix = "remove offload, or name an accelerator under execution"
            yield resolved.problem(Code.CONTRADICTION, (*path, "offload"), what, fix=fix)


def unplaced_components(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """A map without a default names every component that has weights."""
    device_map = spec.device_map
    if not isinstance(device_map, dict) or DEFAULT in device_map:
        return
    missing = [component.name for component in assembly.modules if component.name not in device_map]
    if missing:
        what = f"the map places no {', '.join(missing)}"
        fix = "add a line for each, or 'default: balanced'"
        yield resolved.problem(Code.UNPLACED_COMPONENT, ("device_map",), what, fix=fix, key=True)


def idle_low_memory(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """A low_memory word acts on what the map does not pin; when everything is pinned it would be ignored."""
    device_map = spec.device_map
    if spec.low_memory == "none" or not isinstance(device_map, dict):
        return
    if all(component.name in device_map for component in assembly.modules):
        what = f"{spec.low_memory} acts on components that device_map does not pin, and it pins all of them"
        fix = "write {execution: cuda:0, offload: model} for the components to offload, or remove one of the two"
        yield resolved.problem(Code.CONTRADICTION, ("low_memory",), what, fix=fix)


def call_arguments(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """Every name under ``call`` is a parameter of the pipeline's call that a file can hold."""
    yield from unknown_arguments(resolved, ("call",), spec.call, assembly)


def unknown_arguments(
    resolved: Resolved, path: ConfigPath, arguments: Mapping[str, object], assembly: Assembly
) -> Iterator[Problem]:
    """Yield a problem per argument that the pipeline's call does not take."""
    facts = assembly.facts
    names = [parameter.name for parameter in facts.call]
    for name, value in arguments.items():
        if name == SEED:
            if type(value) is not int or value < 0:
                what = f"a seed is a whole number from 0 up, not {value!r}"
                yield resolved.problem(Code.WRONG_TYPE, (*path, name), what)
            elif "generator" not in names:
                what = f"{facts.class_name} takes no generator, so a seed means nothing"
                yield resolved.problem(Code.UNKNOWN_CALL_ARGUMENT, (*path, name), what, fix="remove it", key=True)
        elif name in OWNED_ARGUMENTS:
            what = f"{name} cannot be written in a file"
            yield resolved.problem(Code.UNKNOWN_CALL_ARGUMENT, (*path, name), what, fix=f"use {SEED}", key=True)
        elif name not in names:  # also where the call takes **kwargs: pipelines drop what they do not know in silence
            meant = nearest(name, [*names, SEED])
            what = f"{facts.class_name} takes no argument {name!r}"
            fix = f"did you mean {meant!r}?" if meant else f"it takes: {', '.join(sorted(names))}"
            yield resolved.problem(Code.UNKNOWN_CALL_ARGUMENT, (*path, name), what, fix=fix, key=True)


def _variant_nowhere(resolved: Resolved, assembly: Assembly) -> Iterator[Problem]:
    """A variant asked of the whole pipeline must exist for one of its components at least."""
    inheriting = [c for c in assembly.modules if c.variant and not c.variant_required and c.folder]
    if not inheriting:
        return
    variant = inheriting[0].variant
    if not any(c.folder and find_weights(c.folder, library=c.library, variant=variant) for c in inheriting):
        what = f"no component has weights of variant {variant!r}"
        yield resolved.problem(Code.WEIGHTS_MISSING, ("pipeline", "variant"), what, fix="remove the line")
