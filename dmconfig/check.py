"""Rules across the entries of a spec, one small function per rule; all problems come out together.

What is refused here is everything that can be known without a machine and without weights: whatever passes, the
planner and the loader do not refuse for a reason of this kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dmconfig.assembling import assemble, unknown_component
from dmconfig.assembly import Assembly, Component
from dmconfig.checkpoint import FileHeaders
from dmconfig.compatibility import incompatible_dtypes, incompatible_parts
from dmconfig.devices import CPU, DISK, parse_device
from dmconfig.errors import Code, DMConfigError, Problem, SourceError, SpecError, nearest
from dmconfig.facts import CallParameter, PipelineFacts, method_parameters
from dmconfig.hints import call_hint
from dmconfig.inputs import BY_PATH, SEED, Argument, arguments_at, unreadable_inputs
from dmconfig.paths import ConfigPath
from dmconfig.quantization import advice_for, quantised_parts
from dmconfig.resolve import Resolved
from dmconfig.spec import DEFAULT, STRATEGIES, GroupOffloadSpec, PlacementSpec, Spec
from dmconfig.stored import component_weights, model_config
from dmconfig.switches import unfit_switches
from dmconfig.trust import (
    idle_grants,
    moving_places,
    moving_revisions,
    needless_configs,
    needless_source_keys,
    outside_source,
    pickle_refused,
    pickles,
    rehearsed_reserves,
    single_files,
    undeclared_dtype,
)
from dmconfig.weights import find_weights, pickles_in, read_tensors, variants_in

COUNTS = ("num_images_per_prompt", "num_videos_per_prompt")
"""Parameters of pipelines' calls for how many pictures, or films, are made of a prompt."""

OWNED_ARGUMENTS = frozenset({"generator"})
"""Parameters of a pipeline's call that a file cannot hold."""


def check(resolved: Resolved, spec: Spec, hub: FileHeaders | None = None, *, with_weights: bool = False) -> Assembly:
    """Return what the pipeline is made of, after every rule. ``hub`` tells what files hold that are not here.

    ``with_weights``: the weights have to be there too, see ``check_weights``.

    Raises: SpecError: all problems found, of all rules.
    """
    problems = [
        *strategies_that_bring(resolved, spec),
        *nothing_runs_on_disk(resolved, spec),
        *needless_revisions(resolved, spec),
        *moving_revisions(resolved, spec),
        *needless_source_keys(resolved, spec),
        *idle_offload_folder(resolved, spec),
    ]
    try:
        assembly, unfit = assemble(resolved, spec, hub)
    except DMConfigError as error:  # without a pipeline there is nothing to hold the other rules against
        raise SpecError([*problems, *error.problems]) from None
    problems.extend(unfit)
    for rule in (
        moving_places,
        needless_configs,
        single_files,
        pickles,
        idle_grants,
        rehearsed_reserves,
        outside_source,
        incompatible_parts,
        incompatible_dtypes,
        other_runtimes,
        quantised_components,
        quantised_parts,
        copied_components,
        switches,
        refused_places,
        device_map_names,
        split_components,
        unplaced_components,
        idle_low_memory,
        group_offload,
        group_options,
        gguf_places,
        calls_of_components,
        reserves,
        call_arguments,
    ):
        problems.extend(rule(resolved, spec, assembly))
    if with_weights:
        problems.extend(missing_weights(resolved, assembly))
    if problems:
        raise SpecError(problems)
    return assembly


def check_weights(resolved: Resolved, assembly: Assembly) -> None:
    """Check that every module's weights are where its config is; those of a hub source are ``fetch``'s to see to.

    Planning works without weights; validating and loading do not.

    Raises: SourceError: every component without safetensors weights, or without the variant asked for it.
    """
    if problems := [*missing_weights(resolved, assembly)]:
        raise SourceError(problems)


def missing_weights(resolved: Resolved, assembly: Assembly) -> Iterator[Problem]:
    """Every component whose weights are not where its config is, or not of the variant asked for."""
    modules = [component for component in assembly.loaded if component.is_module]
    folders = [component for component in modules if component.folder and not component.is_single_file]
    local = [component for component in folders if not component.source.hub_id]
    for component in local:
        yield from _missing_weights(resolved, component)
    yield from _variant_nowhere(resolved, assembly)


def _missing_weights(resolved: Resolved, component: Component) -> Iterator[Problem]:
    folder, library = component.folder, component.library
    assert folder is not None  # noqa: S101 - the caller has looked
    if (
        component.variant_required
        and component.variant
        and find_weights(folder, library=library, variant=component.variant) is None
    ):
        there = variants_in(folder)
        what = f"{component.name!r} has no weights of variant {component.variant!r} in {folder}"
        fix = f"remove the line, or name one that is there: {', '.join(there)}" if there else "remove the line"
        path: ConfigPath = ("pipeline", "variant") if component.path[0] == "pipeline" else (*component.path, "variant")
        yield resolved.problem(Code.WEIGHTS_MISSING, path, what, fix=fix)
    elif component_weights(component) is None and (pickled := pickles_in(folder)):
        yield pickle_refused(resolved, component, str(pickled[0]))
    elif component_weights(component) is None:
        what = f"{folder} has no safetensors weights of {component.name!r}"
        fix = "copy the folder again, or save the pipeline with save_pretrained, which writes safetensors"
        yield resolved.problem(Code.WEIGHTS_MISSING, component.path, what, fix=fix)
    elif component.dtype == "auto" and (files := component_weights(component)) is not None and files.is_pickle:
        yield undeclared_dtype(resolved, component, files.files[0].name)


def strategies_that_bring(resolved: Resolved, spec: Spec) -> Iterator[Problem]:
    """Some strategies say themselves how weights are brought, so a low_memory word beside them is one too many."""
    words = {
        "balanced_low_memory": "it brings what does not fit whole",
        "balanced_ultra_low_memory": "it brings what does not fit layer by layer",
        "auto": "it chooses how what does not fit is brought",
    }
    if spec.low_memory != "none" and spec.strategy in words:
        what = f"device_map says {spec.strategy}, and {words[spec.strategy]}; low_memory says {spec.low_memory}"
        fix = "remove low_memory, or use device_map: balanced with it"
        yield resolved.problem(Code.CONTRADICTION, ("low_memory",), what, fix=fix, key=True)


def nothing_runs_on_disk(resolved: Resolved, spec: Spec) -> Iterator[Problem]:
    """Weights may rest on disk, but what they belong to runs somewhere else."""
    for name, entry in spec.words.items():
        path: ConfigPath = ("device_map", name) if name else ("device_map",)
        if isinstance(entry, PlacementSpec) and DISK in entry.devices:
            fix = "name an accelerator under execution, and write storage: disk"
            yield resolved.problem(Code.BAD_DEVICE, (*path, "execution"), "nothing can run on disk", fix=fix)
        elif entry == DISK:
            fix = "write {execution: cuda:0, offload: sequential, storage: disk}"
            if not name or name == DEFAULT:
                fix = "name an accelerator, with low_memory and a budget of disk in max_memory"
            yield resolved.problem(Code.BAD_DEVICE, path, "nothing can run on disk", fix=fix)
    if spec.execution_device == DISK:
        path, fix = ("execution_device",), "name an accelerator or cpu"
        yield resolved.problem(Code.BAD_DEVICE, path, "nothing can run on disk", fix=fix)


def other_runtimes(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:  # noqa: ARG001
    """Models that another runtime than torch loads and places itself are not for a device map."""
    for component in assembly.loaded:
        if "OnnxRuntimeModel" in component.facts.ancestors:
            what = f"{component.name!r} is an ONNX model, which onnxruntime loads and places itself"
            fix = "name the same pipeline with torch weights, and a class without Onnx in its name"
            yield resolved.problem(Code.NOT_SUPPORTED_YET, component.path, what, fix=fix)


def quantised_components(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:  # noqa: ARG001
    """Weights that are stored quantised are loaded by libraries with rules of their own for placing them."""
    for component in assembly.loaded:
        config = model_config(component) if component.is_module else {}
        method = config.get("quantization_config")
        if method is not None:
            name = method.get("quant_method", "") if isinstance(method, dict) else ""
            what = f"{component.name!r} is stored quantised{f' ({name})' if name else ''}, which is not supported yet"
            fix = f"give components.{component.name} a source with plain weights"
            yield resolved.problem(Code.NOT_SUPPORTED_YET, component.path, what, fix=fix)


def switches(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:  # noqa: ARG001 - one of several
    """Every switch is one that the component's class, as installed, has, with the arguments it takes."""
    yield from unfit_switches(resolved, assembly)


def copied_components(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:  # noqa: ARG001
    """What a pipeline's constructor makes another component of is not quantised, and is that pipeline's alone."""
    for component in assembly.modules:
        if component.takes_in is None:
            continue
        why = f"its constructor makes another UNet of {component.name!r} and {component.takes_in!r}"
        if component.quantization is not None:
            what = f"{assembly.class_name} cannot take a quantised {component.name!r}"
            path: ConfigPath = ("quantization", component.name)
            yield resolved.problem(Code.BAD_QUANTIZATION, path, what, why=why, fix="quantise other components")
        for each in assembly.sharing:
            what = f"{component.name!r} cannot be shared with {assembly.class_name} or another such pipeline"
            path = ("pipelines", each.name, "class")
            yield resolved.problem(Code.CONTRADICTION, path, what, why=why, fix="write a file for each pipeline")


def refused_places(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """No component is placed in a way that what is asked of it does not allow.

    Where the file leaves a choice, the planner takes an allowed one; here is what the file itself says.
    """
    for component in assembly.modules:
        for path, way in _ways(spec, component.name) if component.refused else ():
            reason = component.refused.get(way)
            if reason is not None:
                what = f"{component.name!r} cannot be placed so: {reason}"
                quantised = component.quantization
                fix = advice_for(way, quantised) if quantised else "keep it whole on an accelerator, or change either"
                yield resolved.problem(Code.PLACE_REFUSED, path, what, fix=fix)


_LOW_MEMORY_WAYS = {
    "cpu_offload_with_hook": "model", "sequential_cpu_offload": "sequential", "group_offload": "group",
}  # fmt: skip


def _ways(spec: Spec, name: str) -> Iterator[tuple[ConfigPath, str]]:
    """The ways of placing a component that the file asks for, each with its place."""
    entry = spec.placements.get(name)
    if isinstance(entry, PlacementSpec):
        yield ("device_map", name, "offload"), entry.offload
        yield ("device_map", name, "storage"), DISK if entry.storage == DISK else ""
        yield ("device_map", name, "execution"), "split" if entry.is_spread else entry.devices[0]
    elif entry is not None:
        yield ("device_map", name), entry
    for key in spec.parts_of(name):
        yield ("device_map", key), "split"
    word = spec.words.get("", spec.words.get(DEFAULT))
    if entry is None and not spec.parts_of(name) and isinstance(word, str) and word not in STRATEGIES:
        path: ConfigPath = ("device_map", DEFAULT) if spec.placements else ("device_map",)
        way = _LOW_MEMORY_WAYS.get(spec.low_memory)
        yield (("low_memory",), way) if way else (path, word)
    elif entry is None and word in STRATEGIES and spec.low_memory == "group_offload":
        yield ("low_memory",), "group"


def group_options(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:  # noqa: ARG001 - one of several
    """Every option of group offload is one that diffusers, as installed, takes."""
    parameters = method_parameters("diffusers", "ModelMixin", "enable_group_offload")
    known = [parameter.name for parameter in parameters or ()]
    for name in spec.group_offload.model_fields_set:
        if name not in known:
            what = f"group offloading of diffusers, as installed, takes no {name!r}"
            meant = nearest(name, known)
            fix = f"did you mean {meant!r}?" if meant else f"it takes: {', '.join(known)}"
            yield resolved.problem(Code.UNKNOWN_SWITCH, ("group_offload", name), what, fix=fix, key=True)


def idle_offload_folder(resolved: Resolved, spec: Spec) -> Iterator[Problem]:
    """A folder for weights that rest on disk, and a budget that lets none rest there."""
    budget = spec.max_memory.get(DISK)
    if spec.offload_folder is not None and budget is not None and budget.amount == 0:
        what = "offload_folder is where weights rest on disk, and max_memory.disk lets none rest there"
        yield resolved.problem(Code.CONTRADICTION, ("offload_folder",), what, fix="remove one of the two", key=True)


def needless_revisions(resolved: Resolved, spec: Spec) -> Iterator[Problem]:
    """A component's revision without a source of its own would mean nothing."""
    for path, component in spec.written_components:
        if component.revision is not None and component.source is None:
            what = f"revision is given for {path[1]!r}, which has no source of its own"
            yield resolved.problem(
                Code.CONTRADICTION, (*path, "revision"), what, fix="add source, or use pipeline.revision", key=True
            )


def device_map_names(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """Every key of the map is a component that is loaded and has weights, and names one device."""
    if not isinstance(spec.device_map, dict):
        return
    for name, entry in spec.device_map.items():
        path = ("device_map", name)
        if name == DEFAULT:
            if isinstance(entry, PlacementSpec):
                what, fix = "default takes a strategy or one device", "write 'default: cuda:0' and a low_memory word"
                yield resolved.problem(Code.BAD_VALUE, path, what, fix=fix)
        elif name == "":
            what, fix = "an empty name stands for no component", f"write device_map: {entry} for all of them"
            yield resolved.problem(Code.UNKNOWN_COMPONENT, path, what, fix=fix, key=True)
        elif name.partition(".")[0] not in assembly.slots:
            yield unknown_component(resolved, path, assembly.facts, DEFAULT, *assembly.slots)
        else:
            yield from _unfit_place(resolved, path, entry, assembly)


def _unfit_place(
    resolved: Resolved, path: tuple[str, str], entry: str | PlacementSpec, assembly: Assembly
) -> Iterator[Problem]:
    """What is wrong with giving a component, one that the pipeline class knows, this place."""
    name = path[1].partition(".")[0]
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
        what = f"the weights of {path[1]!r} stay on {', '.join(entry.devices)}, so they do not rest on disk"
        fix = "add offload: model or offload: sequential, or remove storage"
        yield resolved.problem(Code.CONTRADICTION, (*path, "storage"), what, fix=fix)
    elif isinstance(entry, PlacementSpec) and entry.devices[0] == CPU and entry.offload != "none":
        what = f"{name!r} runs on the cpu, so its weights need not be brought anywhere"
        fix = "remove offload, or name an accelerator under execution"
        yield resolved.problem(Code.CONTRADICTION, (*path, "offload"), what, fix=fix)


def split_components(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """Parts of a component stay on a device or are brought layer by layer, and so is all the rest of it."""
    for component in assembly.modules:
        name = component.name
        entry, parts = spec.placements.get(name), spec.parts_of(name)
        spread = entry if isinstance(entry, PlacementSpec) and entry.is_spread else None
        if spread and parts:
            what = f"{name} is spread over a list of devices, and {parts[0]} is given a place of its own"
            yield resolved.problem(Code.CONTRADICTION, ("device_map", parts[0]), what, fix="keep one of the two")
        if spread:
            yield from _spread_over(resolved, ("device_map", name), spread)
        for key in (name, *parts) if parts or spread else ():
            how = spec.placements.get(key)
            if isinstance(how, PlacementSpec) and how.offload in ("model", "group"):
                what = f"{name} is in parts, which stay or are brought layer by layer, not with offload: {how.offload}"
                path = ("device_map", key, "offload")
                yield resolved.problem(Code.CONTRADICTION, path, what, fix="write offload: sequential, or remove it")
        if parts:
            yield from _unsplit_rest(resolved, spec, name)
            yield from _unknown_modules(resolved, component, parts)


def _spread_over(resolved: Resolved, path: ConfigPath, entry: PlacementSpec) -> Iterator[Problem]:
    twice = [device for index, device in enumerate(entry.devices) if device in entry.devices[:index]]
    if twice:
        what = f"{twice[0]} is in the list twice"
        yield resolved.problem(Code.DUPLICATE_DEVICE, (*path, "execution"), what, fix="name each device once")


def _unsplit_rest(resolved: Resolved, spec: Spec, name: str) -> Iterator[Problem]:
    """What the map's default says of the rest of a component must be possible beside its parts."""
    word = spec.placements.get(DEFAULT)
    whole = spec.low_memory in ("cpu_offload_with_hook", "group_offload")
    if name not in spec.placements and isinstance(word, str) and word not in STRATEGIES and whole:
        what = f"parts of {name} have a place of their own, so the rest is not brought with {spec.low_memory}"
        fix = f"add device_map.{name} with the device of the rest"
        yield resolved.problem(Code.CONTRADICTION, ("device_map",), what, fix=fix, key=True)


def _unknown_modules(resolved: Resolved, component: Component, parts: tuple[str, ...]) -> Iterator[Problem]:
    """Parts that are in none of the names in the weights, where those are here; the planner asks the class itself.

    Old files name modules with more or fewer words in front, so a path counts as known wherever it occurs.
    """
    files = component_weights(component)
    names = [f".{tensor.name}" for tensor in read_tensors(files)] if files is not None else []
    for key in parts if names else ():
        path = key.partition(".")[2]
        if not any(f".{path}." in name for name in names):
            modules = dict.fromkeys(name[1:].rpartition(".")[0] for name in names)
            yield unknown_module(resolved, key, component.class_name, [*modules])


def unknown_module(resolved: Resolved, key: str, class_name: str, modules: Sequence[str]) -> Problem:
    """Return the problem of a key of the device map that is no module; ``modules`` are the paths there are."""
    component, _, path = key.partition(".")
    known = dict.fromkeys(".".join(module.split(".")[: path.count(".") + 1]) for module in modules if module)
    what = f"{class_name} has no module {path!r} with weights"
    why = f"its modules are: {', '.join(dict.fromkeys(module.split('.')[0] for module in modules if module))}"
    meant = nearest(path, known)
    fix = f"did you mean '{component}.{meant}'?" if meant else "name a module, or place the whole component"
    return resolved.problem(Code.UNKNOWN_MODULE, ("device_map", key), what, why=why, fix=fix, key=True)


def unplaced_components(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """A map without a default names every component that has weights."""
    device_map = spec.device_map
    if not isinstance(device_map, dict) or DEFAULT in device_map:
        return
    missing = [component.name for component in assembly.modules if component.name not in device_map]
    if missing:
        in_parts = [name for name in missing if spec.parts_of(name)]
        what = f"the map places no {', '.join(missing)}"
        what += f"; of {', '.join(in_parts)} it places only parts" if in_parts else ""
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
    if spec.group_offload != GroupOffloadSpec.model_construct() and not named and not everywhere:
        what, fix = "nothing is offloaded in groups, so these options mean nothing", "add low_memory: group_offload"
        yield resolved.problem(Code.CONTRADICTION, path, what, fix=fix, key=True)
    yield from _groups_on_disk(resolved, spec, named)
    for option in ("record_stream", "low_cpu_mem_usage"):
        if getattr(spec.group_offload, option) and not spec.group_offload.use_stream:
            what = f"{option} is for use_stream, which is off"
            yield resolved.problem(Code.CONTRADICTION, (*path, option), what, fix="add use_stream: true", key=True)
    by_blocks = spec.group_offload.offload_type == "block_level"
    for component in assembly.modules:
        unpinned = everywhere and component.name not in entries and not spec.parts_of(component.name)
        refusal = _group_offload_refusal(component, by_blocks=by_blocks) if unpinned or component.name in named else ""
        if refusal:
            at: ConfigPath = ("low_memory",) if unpinned else ("device_map", component.name, "offload")
            fix = _other_offload(component.name, spec, by_blocks=by_blocks)
            yield resolved.problem(Code.CONTRADICTION, at, f"{component.name!r}: {refusal}", fix=fix)


def _other_offload(name: str, spec: Spec, *, by_blocks: bool) -> str:
    """How to write that a component is brought whole instead, in a map that says so of the others too."""
    entry = spec.placements.get(name)
    word = spec.words.get("", spec.words.get(DEFAULT, "cuda:0"))
    device = entry.devices[0] if isinstance(entry, PlacementSpec) else word
    device = device if isinstance(device, str) and device not in STRATEGIES and device != CPU else "cuda:0"
    whole = f"{name}: {{execution: {device}, offload: model}}"
    fix = f"write {whole} under device_map" if spec.placements else f"write device_map: {{{whole}, default: {word}}}"
    return f"{fix}, or offload_type: leaf_level" if by_blocks else fix


def _groups_on_disk(resolved: Resolved, spec: Spec, named: Sequence[str]) -> Iterator[Problem]:
    """What is offloaded in groups does not rest on disk."""
    what = "group offload copies weights into host memory when it sends them home, so they cannot rest on disk"
    on_disk = [n for n, entry in spec.placements.items() if isinstance(entry, PlacementSpec) and entry.storage == DISK]
    for name in on_disk:
        if name in named:
            path: ConfigPath = ("device_map", name, "storage")
            yield resolved.problem(Code.CONTRADICTION, path, what, fix="write offload: sequential, or storage: cpu")
    if spec.low_memory == "group_offload" and spec.may_rest_on_disk and not on_disk:
        path = ("offload_folder",) if spec.offload_folder is not None else ("max_memory", DISK)
        fix = "use low_memory: sequential_cpu_offload, or remove the line"
        yield resolved.problem(Code.CONTRADICTION, path, what, fix=fix, key=True)


def _group_offload_refusal(component: Component, *, by_blocks: bool) -> str:
    """Why a component cannot be offloaded in groups, or nothing."""
    facts = component.facts
    if not facts.supports_group_offloading:
        return f"diffusers does not offload {component.class_name} in groups"
    if by_blocks and "AutoencoderMixin" in facts.ancestors and not facts.group_offload_block_modules:
        # upstream brings what is outside its blocks on forward, and pipelines enter an autoencoder through decode
        return f"{component.class_name} can be offloaded at leaf_level, not at block_level"
    return ""


def gguf_places(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """Weights that stay quantised as GGUF has them stay whole, and in memory: hooks on layers lose their type."""
    for component in assembly.modules:
        name = component.name
        entry = spec.placements.get(name)
        unpinned = name not in spec.placements
        if not component.source.is_gguf:
            continue
        if spec.splits(name):
            key = next(iter(spec.parts_of(name)), name)
            what, fix = f"{name!r} is from a GGUF file, and is not placed in parts yet", "give it one device"
            yield resolved.problem(
                Code.NOT_SUPPORTED_YET, ("device_map", key), what, fix="give it one device", key=True
            )
        elif unpinned and (spec.low_memory == "sequential_cpu_offload" or spec.strategy == "balanced_ultra_low_memory"):
            what = f"{name!r} is from a GGUF file, and is not brought layer by layer"
            path: ConfigPath = ("low_memory",) if spec.low_memory == "sequential_cpu_offload" else ("device_map",)
            fix = f"write {name}: {{execution: cuda:0, offload: model}} under device_map"
            yield resolved.problem(Code.CONTRADICTION, path, what, fix=fix)
        elif isinstance(entry, PlacementSpec) and (entry.offload == "sequential" or entry.storage == DISK):
            what = f"{name!r} is from a GGUF file, and is brought whole, from memory"
            key = "offload" if entry.offload == "sequential" else "storage"
            fix = "write offload: model, and no storage"
            yield resolved.problem(Code.CONTRADICTION, ("device_map", name, key), what, fix=fix)


def calls_of_components(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """Every name under ``calls`` is a component that is loaded and has weights."""
    known = [component.name for component in assembly.modules]
    for name in spec.calls:
        if name not in known:
            what = f"{name!r} is not a component with weights"
            meant = nearest(name, known)
            fix = f"did you mean {meant!r}?" if meant else f"its components are: {', '.join(known)}"
            yield resolved.problem(Code.UNKNOWN_COMPONENT, ("calls", name), what, fix=fix, key=True)


def reserves(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """Every key under ``reserve`` is an accelerator, a component with weights, or ``default``."""
    known = [component.name for component in assembly.modules]
    for key in spec.reserve if isinstance(spec.reserve, dict) else ():
        if key in (DEFAULT, *known):
            continue
        path = ("reserve", key)
        try:
            device = parse_device(key)
        except ValueError:
            meant = nearest(key, [*known, DEFAULT])
            what, fix = f"{key!r} is neither a device nor a component with weights", f"did you mean {meant!r}?"
            yield resolved.problem(Code.UNKNOWN_COMPONENT, path, what, fix=fix if meant else "remove it", key=True)
        else:
            if device in (CPU, DISK):
                what = f"the reserve is kept on accelerators; the {device} needs none"
                yield resolved.problem(Code.BAD_DEVICE, path, what, fix="limit it under max_memory", key=True)


def call_arguments(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """Every name under ``call`` is a parameter of the pipeline's call that a file can hold."""
    yield from unfit_call(resolved, ("call",), spec.call, assembly.facts)
    for each in assembly.sharing:
        yield from unfit_call(resolved, ("pipelines", each.name, "call"), spec.pipelines[each.name].call, each.facts)


def unfit_call(
    resolved: Resolved, path: ConfigPath, call: Mapping[str, Any], facts: PipelineFacts
) -> Iterator[Problem]:
    """Yield what is wrong with a pipeline's arguments: unknown, of another kind, or a picture that cannot be read."""
    yield from unknown_arguments(resolved, path, call, facts)
    known = {parameter.name for parameter in facts.call}
    taken = {name: argument for name, argument in arguments_at(path, call).items() if name in known}
    yield from unreadable_inputs(resolved, taken)
    yield from _one_seed_too_many(resolved, path, call, facts)


def unknown_arguments(
    resolved: Resolved, path: ConfigPath, arguments: Mapping[str, object], facts: PipelineFacts
) -> Iterator[Problem]:
    """Yield a problem per argument that the pipeline's call does not take, or whose value is of another kind."""
    parameters = {parameter.name: parameter for parameter in facts.call}
    for name, value in arguments.items():
        at = (*path, name)
        if name == SEED:
            yield from _bad_seed(resolved, at, value, facts)
        elif name in parameters and name in BY_PATH:
            continue  # what may stand there are paths, see unreadable_inputs
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


def uncallable(resolved: Resolved, call: Mapping[str, Argument], facts: PipelineFacts) -> Iterator[Problem]:
    """Yield why a pipeline cannot be called with the file's arguments alone, or would not return pictures."""
    missing = [parameter.name for parameter in facts.call if parameter.required and parameter.name not in call]
    wants_prompt = any(parameter.name == "prompt" for parameter in facts.call[:1])
    if wants_prompt and "prompt" not in missing and not any(name.startswith("prompt") for name in call):
        missing.append("prompt")
    if missing:
        what = f"{facts.class_name} cannot be called without {', '.join(missing)}"
        fix = f"add --{'prompt' if missing[0] == 'prompt' else f'call {missing[0]}='}..., or {missing[0]} under call"
        yield resolved.problem(Code.MISSING_KEY, ("call",), what, fix=fix)
    for name, value in (("output_type", "latent"), ("return_dict", False)):
        if name in call and call[name].value == value:
            what = f"with this {name} the pipeline returns no pictures that could be written"
            yield resolved.problem(Code.BAD_VALUE, call[name].path, what, fix="remove it")


def _bad_seed(resolved: Resolved, path: ConfigPath, value: object, facts: PipelineFacts) -> Iterator[Problem]:
    seeds = value if isinstance(value, list) and value else [value]
    wrong = [(index, seed) for index, seed in enumerate(seeds) if type(seed) is not int or not 0 <= seed < 2**64]
    for index, seed in wrong:
        what = f"a seed is a whole number from 0 to 2^64 - 1, not {seed!r}"
        at = (*path, index) if seeds is value else path
        yield resolved.problem(Code.WRONG_TYPE, at, what)
    if not wrong and all(parameter.name != "generator" for parameter in facts.call):
        what = f"{facts.class_name} takes no generator, so a seed means nothing"
        yield resolved.problem(Code.UNKNOWN_CALL_ARGUMENT, path, what, fix="remove it", key=True)


def _one_seed_too_many(
    resolved: Resolved, path: ConfigPath, call: Mapping[str, Any], facts: PipelineFacts
) -> Iterator[Problem]:
    """A list of seeds has one for each picture, which pipelines only tell once they draw the first latents."""
    seeds, prompt = call.get(SEED), call.get("prompt")
    count = next((call[name] for name in COUNTS if name in call), 1)
    if not isinstance(seeds, list) or prompt is None or type(count) is not int:
        return
    pictures = count * (len(prompt) if isinstance(prompt, list) else 1)
    if len(seeds) != pictures:
        what = f"there are {len(seeds)} seeds, and the call of {facts.class_name} makes {pictures} pictures"
        fix = "write one seed for each picture, or one for all"
        yield resolved.problem(Code.CONTRADICTION, (*path, SEED), what, fix=fix, key=True)


def _bad_argument(resolved: Resolved, path: ConfigPath, value: object, parameter: CallParameter) -> Iterator[Problem]:
    """A word where the parameter's default is a number, or the reverse, fails minutes later, inside the loop."""
    name, default = parameter.name, parameter.default
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a word"}
    given, wanted = kinds.get(type(value)), kinds.get(type(default))
    if given and wanted and given != wanted:
        shown = str(default).lower() if isinstance(default, bool) else default
        what = f"{name} is {wanted} (by default {shown}), not {value!r}"
        yield resolved.problem(Code.WRONG_TYPE, path, what)


def _is_folder(component: Component) -> bool:
    return component.folder is not None and not component.is_single_file


def _variant_nowhere(resolved: Resolved, assembly: Assembly) -> Iterator[Problem]:
    """A variant asked of the whole pipeline must exist for one of its components at least."""
    modules = [component for component in assembly.loaded if component.is_module]
    inheriting = [c for c in modules if c.variant and not c.variant_required and _is_folder(c)]
    if not inheriting:
        return
    variant = inheriting[0].variant
    if not any(c.folder and find_weights(c.folder, library=c.library, variant=variant) for c in inheriting):
        what = f"no component has weights of variant {variant!r}"
        yield resolved.problem(Code.WEIGHTS_MISSING, ("pipeline", "variant"), what, fix="remove the line")
