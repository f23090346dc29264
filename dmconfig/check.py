"""Rules across the entries of a spec, one small function per rule; all problems come out together.

What is refused here is everything that can be known without a machine and without weights: whatever passes, the
planner and the loader do not refuse for a reason of this kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dmconfig.assembly import Assembly, Component, assemble, unknown_component
from dmconfig.devices import CPU, DISK
from dmconfig.errors import Code, DMConfigError, Problem, SourceError, SpecError, nearest
from dmconfig.facts import CallParameter, PipelineFacts
from dmconfig.hints import call_hint
from dmconfig.measure import component_weights
from dmconfig.paths import ConfigPath
from dmconfig.resolve import Resolved
from dmconfig.spec import DEFAULT, STRATEGIES, SUPPORTED_STRATEGIES, GroupOffloadSpec, PlacementSpec, Spec
from dmconfig.weights import find_weights, variants_in

SEED = "seed"
"""The one key under ``call`` that is ours: it becomes the generator."""

OWNED_ARGUMENTS = frozenset({"generator"})
"""Parameters of a pipeline's call that a file cannot hold."""


def check(resolved: Resolved, spec: Spec) -> Assembly:
    """Return what the pipeline is made of, after every rule.

    Raises: SpecError: all problems found, of all rules.
    """
    problems = [*not_supported_yet(resolved, spec), *needless_revisions(resolved, spec)]
    try:
        assembly, unfit = assemble(resolved, spec)
    except DMConfigError as error:  # without a pipeline there is nothing to hold the other rules against
        raise SpecError([*problems, *error.problems]) from None
    problems.extend(unfit)
    for rule in (device_map_names, unplaced_components, idle_low_memory, group_offload, call_arguments):
        problems.extend(rule(resolved, spec, assembly))
    if problems:
        raise SpecError(problems)
    return assembly


def check_weights(resolved: Resolved, assembly: Assembly) -> None:
    """Check that every module's weights are where its config is; those of a hub source are ``fetch``'s to see to.

    Planning works without weights; validating and loading do not.

    Raises: SourceError: every component without safetensors weights, or without the variant asked for it.
    """
    local = [component for component in assembly.modules if component.folder and not component.source.hub_id]
    problems = [problem for component in local for problem in _missing_weights(resolved, component)]
    problems.extend(_variant_nowhere(resolved, assembly))
    if problems:
        raise SourceError(problems)


def _missing_weights(resolved: Resolved, component: Component) -> Iterator[Problem]:
    folder, library = component.folder, component.library
    assert folder is not None  # noqa: S101 - the caller has looked
    if component.variant_required and find_weights(folder, library=library, variant=component.variant) is None:
        there = variants_in(folder)
        what = f"{component.name!r} has no weights of variant {component.variant!r} in {folder}"
        fix = f"remove the line, or name one that is there: {', '.join(there)}" if there else "remove the line"
        yield resolved.problem(Code.WEIGHTS_MISSING, (*component.path, "variant"), what, fix=fix)
    elif component_weights(component) is None:
        what = f"{folder} has no safetensors weights of {component.name!r}"
        fix = "copy the folder again, or save the pipeline with save_pretrained, which writes safetensors"
        yield resolved.problem(Code.WEIGHTS_MISSING, component.path, what, fix=fix)


def not_supported_yet(resolved: Resolved, spec: Spec) -> Iterator[Problem]:
    """What version 1 of the file may say and this version of dmconfig cannot do: refused by name, never ignored."""

    def refuse(path: ConfigPath, thing: str, fix: str) -> Problem:
        return resolved.problem(Code.NOT_SUPPORTED_YET, path, f"{thing} is not supported yet", fix=fix)

    entries = spec.device_map if isinstance(spec.device_map, dict) else {None: spec.device_map}
    for name, entry in entries.items():
        path: ConfigPath = ("device_map",) if name is None else ("device_map", name)
        if isinstance(entry, PlacementSpec):
            if entry.execution == DISK:
                yield refuse((*path, "execution"), "disk", "nothing can run on disk; name an accelerator or cpu")
        elif entry in STRATEGIES and entry not in SUPPORTED_STRATEGIES:
            yield refuse(path, f"strategy {entry!r}", "use balanced, with low_memory for what does not fit")
        elif entry == DISK:
            fix = "write {execution: cuda:0, offload: sequential, storage: disk}"
            yield refuse(path, "disk alone, without a device to run on,", fix)
        if name is not None and "." in name:
            what = f"placing a part of a component ({name})"
            yield refuse(path, what, f"place the whole component: {name.partition('.')[0]}")
    if spec.execution_device == DISK:
        yield refuse(("execution_device",), "disk", "nothing can run on disk; name an accelerator or cpu")
    if spec.offload_folder is not None:
        fix = "remove the line: with storage: disk, weights rest in the files they came in"
        yield refuse(("offload_folder",), "writing weights to a folder", fix)


def needless_revisions(resolved: Resolved, spec: Spec) -> Iterator[Problem]:
    """A component's revision without a source of its own would mean nothing."""
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
    for name, entry in spec.device_map.items():
        path = ("device_map", name)
        if name == DEFAULT:
            if isinstance(entry, PlacementSpec):
                what, fix = "default takes a strategy or one device", "write 'default: cuda:0' and a low_memory word"
                yield resolved.problem(Code.BAD_VALUE, path, what, fix=fix)
        elif name == "":
            what, fix = "an empty name stands for no component", f"write device_map: {entry} for all of them"
            yield resolved.problem(Code.UNKNOWN_COMPONENT, path, what, fix=fix, key=True)
        elif "." in name:
            continue  # refused by name elsewhere
        elif name not in slots:
            yield unknown_component(resolved, path, assembly.facts, DEFAULT)
        else:
            yield from _unfit_place(resolved, path, entry, assembly)


def _unfit_place(
    resolved: Resolved, path: tuple[str, str], entry: str | PlacementSpec, assembly: Assembly
) -> Iterator[Problem]:
    """What is wrong with giving a component, one that the pipeline class knows, this place."""
    name = path[1]
    component = next((component for component in assembly.components if component.name == name), None)
    if name in assembly.absent:
        what = f"{name!r} is left out of this pipeline, so it has no place"
        yield resolved.problem(Code.NOT_A_MODULE, path, what, fix="remove the line", key=True)
    elif component is not None and not component.is_module:
        what = f"{name!r} has no weights, so it has no place"
        yield resolved.problem(Code.NOT_A_MODULE, path, what, fix="remove the line", key=True)
    elif isinstance(entry, str) and entry in STRATEGIES:
        what = f"{entry!r} places whole pipelines, not one component"
        yield resolved.problem(Code.BAD_VALUE, path, what, fix=f"write 'default: {entry}', or name a device")
    elif isinstance(entry, PlacementSpec) and entry.storage == DISK and entry.offload == "none":
        what = f"the weights of {name!r} stay on {entry.execution}, so they do not rest on disk"
        fix = "add offload: model or offload: sequential, or remove storage"
        yield resolved.problem(Code.CONTRADICTION, (*path, "storage"), what, fix=fix)
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


def group_offload(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """Group offload is for classes that allow it; its options are for files that use it, and for each other."""
    path: ConfigPath = ("group_offload",)
    entries = spec.device_map if isinstance(spec.device_map, dict) else {}
    named = [name for name, entry in entries.items() if isinstance(entry, PlacementSpec) and entry.offload == "group"]
    everywhere = spec.low_memory == "group_offload"
    if spec.group_offload != GroupOffloadSpec() and not named and not everywhere:
        what, fix = "nothing is offloaded in groups, so these options mean nothing", "add low_memory: group_offload"
        yield resolved.problem(Code.CONTRADICTION, path, what, fix=fix, key=True)
    on_disk = any(isinstance(entry, PlacementSpec) and entry.storage == DISK for entry in entries.values())
    if spec.group_offload.use_stream and (on_disk or spec.may_rest_on_disk):
        what = "use_stream pins weights in host memory, so they cannot rest on disk"
        yield resolved.problem(Code.CONTRADICTION, (*path, "use_stream"), what, fix="remove use_stream", key=True)
    for option in ("record_stream", "low_cpu_mem_usage"):
        if getattr(spec.group_offload, option) and not spec.group_offload.use_stream:
            what = f"{option} is for use_stream, which is off"
            yield resolved.problem(Code.CONTRADICTION, (*path, option), what, fix="add use_stream: true", key=True)
    by_blocks = spec.group_offload.offload_type == "block_level"
    for component in assembly.modules:
        unpinned = everywhere and component.name not in entries
        refusal = _group_offload_refusal(component, by_blocks=by_blocks) if unpinned or component.name in named else ""
        if refusal:
            at: ConfigPath = ("low_memory",) if unpinned else ("device_map", component.name, "offload")
            fix = f"write device_map.{component.name}: {{execution: cuda:0, offload: model}}"
            yield resolved.problem(Code.CONTRADICTION, at, f"{component.name!r}: {refusal}", fix=fix)


def _group_offload_refusal(component: Component, *, by_blocks: bool) -> str:
    """Why a component cannot be offloaded in groups, or nothing."""
    facts = component.facts
    if not facts.supports_group_offloading:
        return f"diffusers does not offload {component.class_name} in groups"
    if by_blocks and "AutoencoderMixin" in facts.ancestors and not facts.group_offload_block_modules:
        # upstream brings what is outside its blocks on forward, and pipelines enter an autoencoder through decode
        return f"{component.class_name} can be offloaded at leaf_level, not at block_level"
    return ""


def call_arguments(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """Every name under ``call`` is a parameter of the pipeline's call that a file can hold."""
    yield from unknown_arguments(resolved, ("call",), spec.call, assembly)


def unknown_arguments(
    resolved: Resolved, path: ConfigPath, arguments: Mapping[str, object], assembly: Assembly
) -> Iterator[Problem]:
    """Yield a problem per argument that the pipeline's call does not take, or whose value is of another kind."""
    facts = assembly.facts
    parameters = {parameter.name: parameter for parameter in facts.call}
    for name, value in arguments.items():
        at = (*path, name)
        if name == SEED:
            yield from _bad_seed(resolved, at, value, facts)
        elif name in parameters and name not in OWNED_ARGUMENTS:
            yield from _bad_argument(resolved, at, value, parameters[name])
        else:  # also where the call takes **kwargs: pipelines drop what they do not know in silence
            accepted = sorted({*parameters, SEED} - OWNED_ARGUMENTS)
            hint = call_hint(name)
            meant = hint if hint in accepted else nearest(name, accepted)
            what = f"{facts.class_name} takes no argument {name!r}"
            if name in OWNED_ARGUMENTS:
                what = f"{name} cannot be written in a file"
            fix = f"did you mean {meant!r}?" if meant else f"it takes: {', '.join(accepted)}"
            yield resolved.problem(Code.UNKNOWN_CALL_ARGUMENT, at, what, fix=fix, key=True)


def uncallable(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """Yield why the pipeline cannot be called with the file's arguments alone, or would not return pictures."""
    facts, call = assembly.facts, spec.call
    missing = [parameter.name for parameter in facts.call if parameter.required and parameter.name not in call]
    wants_prompt = any(parameter.name == "prompt" for parameter in facts.call[:1])
    if wants_prompt and "prompt" not in missing and not any(name.startswith("prompt") for name in call):
        missing.append("prompt")
    if missing:
        what = f"{facts.class_name} cannot be called without {', '.join(missing)}"
        fix = f"add --{'prompt' if missing[0] == 'prompt' else f'call {missing[0]}='}..., or {missing[0]} under call"
        yield resolved.problem(Code.MISSING_KEY, ("call",), what, fix=fix)
    for name, value in (("output_type", "latent"), ("return_dict", False)):
        if name in call and call[name] == value:
            what = f"with this {name} the pipeline returns no pictures that could be written"
            yield resolved.problem(Code.BAD_VALUE, ("call", name), what, fix="remove it")


def _bad_seed(resolved: Resolved, path: ConfigPath, value: object, facts: PipelineFacts) -> Iterator[Problem]:
    if type(value) is not int or not 0 <= value < 2**64:
        what = f"a seed is a whole number from 0 to 2^64 - 1, not {value!r}"
        yield resolved.problem(Code.WRONG_TYPE, path, what)
    elif all(parameter.name != "generator" for parameter in facts.call):
        what = f"{facts.class_name} takes no generator, so a seed means nothing"
        yield resolved.problem(Code.UNKNOWN_CALL_ARGUMENT, path, what, fix="remove it", key=True)


def _bad_argument(resolved: Resolved, path: ConfigPath, value: object, parameter: CallParameter) -> Iterator[Problem]:
    """A word where the parameter's default is a number, or the reverse, fails minutes later, inside the loop."""
    name, default = parameter.name, parameter.default
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a word"}
    given, wanted = kinds.get(type(value)), kinds.get(type(default))
    if given and wanted and given != wanted:
        shown = str(default).lower() if isinstance(default, bool) else default
        what = f"{name} is {wanted} (by default {shown}), not {value!r}"
        yield resolved.problem(Code.WRONG_TYPE, path, what)


def _variant_nowhere(resolved: Resolved, assembly: Assembly) -> Iterator[Problem]:
    """A variant asked of the whole pipeline must exist for one of its components at least."""
    inheriting = [c for c in assembly.modules if c.variant and not c.variant_required and c.folder]
    if not inheriting:
        return
    variant = inheriting[0].variant
    if not any(c.folder and find_weights(c.folder, library=c.library, variant=variant) for c in inheriting):
        what = f"no component has weights of variant {variant!r}"
        yield resolved.problem(Code.WEIGHTS_MISSING, ("pipeline", "variant"), what, fix="remove the line")
