"""The models of the file, schema version 1: what a user may write, and the rules that need no other knowledge.

Rules across entries (does that component exist, does it fit) are in ``check``; this module never looks at a
pipeline or a machine. Field descriptions are the documentation that editors show, through ``schema``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from dmconfig.devices import DEVICE_FORMS, DISK, device_or_none, nearest_device, parse_device
from dmconfig.errors import Code, Problem, SpecError, nearest
from dmconfig.hints import key_hint
from dmconfig.paths import ROOT, ConfigPath
from dmconfig.resolve import Resolved
from dmconfig.units import BUDGET_FORMS, GIB, SIZE_FORMS, Budget, parse_budget
from dmconfig.validation import (
    CODES,
    Model,
    Size,
    keys,
    nearest_key,
    not_one_of,
    path_in,
    refused,
    wrong_type,
)

SCHEMA_VERSION = 1
DEFAULT_RESERVE = 3 * GIB // 2
"""1.5 GiB: what decoding one 1024 px image takes in bfloat16 in every AutoencoderKL, more than most denoisers need."""

STRATEGIES = (
    "balanced", "balanced_low_0", "sequential", "balanced_low_memory", "balanced_ultra_low_memory", "auto",
)  # fmt: skip
DEFAULT = "default"
"""The key of a device map that stands for every component it does not name."""
DTYPES = {
    "float32": "float32", "fp32": "float32", "float16": "float16", "fp16": "float16", "half": "float16",
    "bfloat16": "bfloat16", "bf16": "bfloat16", "auto": "auto",
}  # fmt: skip

LowMemory = Literal["none", "cpu_offload_with_hook", "sequential_cpu_offload", "group_offload"]


def _version(value: object) -> object:
    """Only the whole number: what merely equals 1 in Python (true, 1.0) is another value in a file."""
    if type(value) is not int:
        raise PydanticCustomError("literal_error", "", {"expected": str(SCHEMA_VERSION)})
    return value


def _word(value: object) -> str:
    """A strategy's name or the full name of a device."""
    return value if isinstance(value, str) and value in STRATEGIES else _device(value)


def _device(value: object) -> str:
    try:
        return parse_device(value)
    except ValueError as error:
        raise PydanticCustomError("bad_device", "{text}", {"text": str(error)}) from None


def _devices(value: object) -> object:
    """A list of the file as the tuple that is kept."""
    return tuple(value) if isinstance(value, list) else value


def _device_or_list(value: object) -> str:
    return "(list)" if isinstance(value, (list, tuple)) else "(device)"


def _budget(value: object) -> Budget:
    if isinstance(value, Budget):
        return value
    try:
        return parse_budget(value)
    except ValueError as error:
        raise PydanticCustomError("bad_size", "{text}", {"text": str(error)}) from None


def _dtype(value: object) -> str:
    text = value.removeprefix("torch.") if isinstance(value, str) else None
    if text not in DTYPES:
        accepted = f"{value!r} is not a dtype; accepted are {', '.join(DTYPES)}"
        meant = nearest(text or f"float{value}", DTYPES)
        context = {"fix": f"did you mean {meant!r}?"} if meant else {}
        raise PydanticCustomError("bad_dtype", "{text}", {"text": accepted, **context})
    return DTYPES[text]


def _reason(value: object) -> object:
    """A reason in words, not a mere yes."""
    if not isinstance(value, str) or len(value.split()) < 2:
        context = {"text": "a reason is expected, in a few words", "fix": "write why, and who made the file"}
        raise PydanticCustomError("bad_reason", "{text}", context)
    return value


def _form(value: object) -> str:
    """The tag of a union's branch; written so that no key of a file is likely to be the same."""
    return "(mapping)" if isinstance(value, Mapping) else "(word)"


Device = Annotated[str, BeforeValidator(_device, json_schema_input_type=str | int)]
Devices = Annotated[tuple[Device, ...], BeforeValidator(_devices), Field(min_length=1)]
Execution = Annotated[
    Annotated[Device, Tag("(device)")] | Annotated[Devices, Tag("(list)")], Discriminator(_device_or_list)
]
DeviceBudget = Annotated[
    Budget, BeforeValidator(_budget, json_schema_input_type=str | int), Field(description=BUDGET_FORMS)
]
Dtype = Annotated[str, BeforeValidator(_dtype), Field(json_schema_extra={"enum": list(DTYPES)})]
Word = Annotated[
    str,
    BeforeValidator(_word, json_schema_input_type=str | int),
    Field(description=f"A strategy ({', '.join(STRATEGIES)}) or one device: {DEVICE_FORMS}."),
]


REVISION = (
    "Of a hub id: a commit, 40 hexadecimal digits, which `dmconfig pin` writes here. Branches and tags move, so they "
    "need allow_moving_revision: true. Default: the main branch, which is remarked on."
)
ALLOW_PICKLE = (
    "Load pickles (.bin, .ckpt, .pt) where the source has no safetensors: the reason, in words. They are opened with "
    "torch's safe loader all the same. Default: refused."
)
VariantMissing = Literal["error", "default"]
Reason = Annotated[str, BeforeValidator(_reason)]
ComponentConfig = Annotated[
    Annotated[str, Tag("(word)")] | Annotated[dict[str, Any], Tag("(mapping)")], Discriminator(_form)
]


class PipelineSpec(Model):
    """The pipeline: where it comes from and what holds for all of its components."""

    source: str = Field(
        description="Where the pipeline is: a folder in the diffusers layout, written ./folder, ../folder, /folder or "
        "~/folder and relative to this file; otherwise a hub id such as stabilityai/stable-diffusion-xl-base-1.0. Or "
        "one file with all weights: ./model.safetensors, or organisation/name/model.safetensors on the hub."
    )
    revision: str | None = Field(None, description=REVISION)
    config: str | None = Field(
        None,
        description="For a source that is one file: the folder or hub id of a pipeline with the configs and tokenizers "
        "of its components. Default: the one that the names of its weights tell, if they tell one.",
    )
    config_revision: str | None = Field(None, description="Revision of config, when it is a hub id.")
    local_files_only: bool = Field(False, description="Never ask the hub for this source: what is here must be whole.")
    allow_pickle: Reason | None = Field(None, description=ALLOW_PICKLE)
    class_name: str | None = Field(
        None, alias="class", description="Pipeline class of diffusers. Default: the one the source names."
    )
    variant: str | None = Field(None, description="Weights variant, e.g. fp16 for model.fp16.safetensors.")
    variant_missing: VariantMissing = Field(
        "default",
        description="What a component without weights of the variant does: default: load its plain ones, which the "
        "plan says; error: refuse.",
    )
    dtype: Dtype = Field(
        "auto", description="Floating-point type of all components. auto keeps each component's stored type."
    )


class ComponentSpec(Model):
    """One component: what differs from the pipeline's own. Everything left out comes from the pipeline."""

    source: str | None = Field(
        None,
        description="Folder of a model or of a pipeline that has this component, or a hub id, or one file of weights "
        "(.safetensors, .gguf) in either; default: the pipeline's.",
    )
    subfolder: str | None = Field(
        None, description="Folder inside the source. Default: the component's name where the source is a pipeline."
    )
    revision: str | None = Field(None, description=REVISION)
    local_files_only: bool | None = Field(
        None, description="Never ask the hub for this component's source. Default: as under pipeline."
    )
    allow_pickle: Reason | None = Field(None, description=ALLOW_PICKLE)
    class_name: str | None = Field(None, alias="class", description="Class to load. Default: what the source names.")
    variant: str | None = Field(None, description="Weights variant. Default: the pipeline's.")
    variant_missing: VariantMissing | None = Field(
        None, description="As under pipeline. Default: error where this component names a variant, else the pipeline's."
    )
    dtype: Dtype | None = Field(None, description="Floating-point type. Default: the pipeline's.")
    config: ComponentConfig | None = Field(
        None,
        description="A mapping: config values set on top of the source's own; for schedulers. Text, for a source that "
        "is one file: the folder or hub id of the model, or of a pipeline with this component, whose config it has. "
        "Default for such a source: the pipeline's own config of the component.",
    )
    config_revision: str | None = Field(None, description="Revision of config, when it is a hub id.")

    @property
    def config_values(self) -> dict[str, Any] | None:
        """The values set on top of the source's own config."""
        return self.config if isinstance(self.config, dict) else None

    @property
    def config_source(self) -> str | None:
        """Where the config of a single file is."""
        return self.config if isinstance(self.config, str) else None


class GroupOffloadSpec(Model):
    """How group offload cuts components: the options of diffusers' ``apply_group_offloading``, by the same names."""

    offload_type: Literal["leaf_level", "block_level"] = Field(
        "leaf_level", description="leaf_level: one layer at a time; block_level: the blocks of a model in groups."
    )
    num_blocks_per_group: int = Field(1, ge=1, description="Blocks brought together, at block_level.")
    use_stream: bool = Field(
        False, description="Bring the next group while one is computing: faster, takes two groups, needs CUDA or XPU."
    )
    non_blocking: bool = Field(False, description="Copy without waiting; needs pinned host memory to help.")
    record_stream: bool = Field(False, description="With use_stream: do not wait for it when freeing.")
    low_cpu_mem_usage: bool = Field(
        False, description="With use_stream: pin host memory group by group, not all of it at once."
    )


class PlacementSpec(Model):
    """Where a component, or a part of one, runs and how its weights get there, when one device does not say it all."""

    execution: Execution = Field(
        description="The device on which the component runs, or a list of devices over which its blocks are spread, in "
        "order. With offload: sequential, what does not fit these is brought layer by layer to the first."
    )
    offload: Literal["none", "model", "sequential", "group"] = Field(
        "none",
        description="none: weights stay there; model: brought whole; sequential: layer by layer; group: in groups of "
        "layers, as group_offload says. Parts of a component stay, or are brought layer by layer.",
    )
    storage: Literal["cpu", "disk"] = Field(
        "cpu",
        description="Where offloaded weights rest. disk: in their own safetensors files, read when they are needed; "
        "nothing is copied, and no host memory is planned for them. Weights that are cast rest in offload_folder.",
    )

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices it runs on; more than one only where it is spread."""
        return (self.execution,) if isinstance(self.execution, str) else self.execution

    @property
    def is_spread(self) -> bool:
        """Whether its blocks are spread over a list of devices."""
        return not isinstance(self.execution, str)


DeviceMapEntry = Annotated[
    Annotated[Word, Tag("(word)")] | Annotated[PlacementSpec, Tag("(mapping)")], Discriminator(_form)
]
Reserve = Annotated[Annotated[Size, Tag("(word)")] | Annotated[dict[str, Size], Tag("(mapping)")], Discriminator(_form)]
DeviceMap = Annotated[
    Annotated[Word, Tag("(word)")] | Annotated[dict[str, DeviceMapEntry], Tag("(mapping)")], Discriminator(_form)
]


class Spec(Model):
    """One deployment of one pipeline."""

    version: Annotated[Literal[1], BeforeValidator(_version)] = Field(description="Version of this file format.")
    pipeline: PipelineSpec = Field(description="The pipeline and what holds for all of its components.")
    allow_moving_revision: bool | None = Field(
        None,
        description="Whether hub ids may be left at a branch or a tag, which may name other files tomorrow. true: yes; "
        "false: every hub id needs a commit. Default: a branch or tag is refused where it is written, and a revision "
        "left out is remarked on.",
    )
    components: dict[str, ComponentSpec | None] = Field(
        default_factory=dict,
        description="Components that differ from the source's own, by name; null leaves an optional one out.",
    )
    device_map: DeviceMap = Field(
        "balanced",
        description="A strategy, one device, or a mapping from component, or module path below one "
        "(transformer.single_transformer_blocks), to device; in a mapping, `default` names the strategy or device of "
        "what is not named.",
    )
    execution_device: Device | None = Field(
        None,
        description="Where the pipeline itself works: latents and embeddings live there. Default: the denoiser's "
        "device, which is right unless something else is entered on every step.",
    )
    max_memory: dict[Device, DeviceBudget] = Field(
        default_factory=dict,
        description="The most that may be used of each device, in the units of `reserve`, as 80% of the device, or as "
        "free-2GiB. When any accelerator is named, only those named are used. A budget of disk lets what low_memory "
        "offloads rest in its files when the cpu has no room.",
    )
    reserve: Reserve = Field(
        DEFAULT_RESERVE,
        description=f"Kept free for activations on every accelerator used: {SIZE_FORMS}. Or a mapping: for a device, "
        "for the phase in which a component runs, and under `default` for the others.",
    )
    low_memory: LowMemory = Field(
        "none",
        description="How components whose weights do not stay on an accelerator get there: cpu_offload_with_hook "
        "brings each whole while it runs, sequential_cpu_offload one layer at a time, group_offload in groups.",
    )
    group_offload: GroupOffloadSpec = Field(
        default_factory=GroupOffloadSpec, description="How group offload cuts components, where it is used."
    )
    offload_folder: str | None = Field(
        None,
        description="Folder for weights that rest on disk and are in no file as they are loaded, because they are "
        "cast; what is written there is removed when the pipeline is unloaded. Relative to this file. Naming it lets "
        "what low_memory offloads rest on disk when the cpu has no room.",
    )
    calls: dict[str, Annotated[float, Field(gt=0, strict=False)]] = Field(
        default_factory=dict,
        description="How often a component runs per generation, by name: what the times of plans and the strategy auto "
        "go by. Default: as its class does, a denoiser once per step.",
    )
    call: dict[str, Any] = Field(
        default_factory=dict,
        description="Defaults for the pipeline's call, by parameter name; `seed` makes the generator.",
    )

    def reserve_of(self, component: str, device: str) -> int:
        """Return the bytes kept free on an accelerator while a component runs there."""
        if isinstance(self.reserve, int):
            return self.reserve
        by_device = {device_or_none(key): size for key, size in self.reserve.items()}
        default = self.reserve.get(DEFAULT, DEFAULT_RESERVE)
        return self.reserve.get(component, by_device.get(device, default))

    @property
    def words(self) -> Mapping[str, str | PlacementSpec]:
        """The entries of the device map by key; where it is one word, that word under an empty key."""
        return self.device_map if isinstance(self.device_map, dict) else {"": self.device_map}

    @property
    def placements(self) -> Mapping[str, str | PlacementSpec]:
        """The entries of the device map; none where it is one word."""
        return self.device_map if isinstance(self.device_map, dict) else {}

    @property
    def strategy(self) -> str | None:
        """The strategy that places what no entry of the device map names, or None where there is none."""
        word = self.words.get("", self.words.get(DEFAULT))
        return word if isinstance(word, str) and word in STRATEGIES else None

    def splits(self, component: str) -> bool:
        """Tell whether the device map has a component in parts, or spread over a list of devices."""
        entry = self.placements.get(component)
        return bool(self.parts_of(component)) or (isinstance(entry, PlacementSpec) and entry.is_spread)

    def may_split(self, component: str) -> bool:
        """Tell whether the strategy may split a component: it is ``auto``, and no entry names the component."""
        return self.strategy == "auto" and component not in self.placements and not self.parts_of(component)

    def parts_of(self, component: str) -> tuple[str, ...]:
        """Return the keys of the device map that name parts of a component."""
        return tuple(key for key in self.placements if key.startswith(f"{component}."))

    @property
    def may_rest_on_disk(self) -> bool:
        """Whether the file allows offloaded weights to rest on disk: it gives a budget or a folder for it."""
        budget = self.max_memory.get(DISK)
        return self.offload_folder is not None if budget is None else budget.amount > 0


def validate_spec(resolved: Resolved) -> Spec:
    """Return the spec in resolved data.

    Raises: SpecError: every problem at once, each at its place. A file of a newer schema version says so first,
        and only that: its other keys may well be right there.
    """
    data = resolved.data
    if not isinstance(data, dict):
        what = "the file is empty" if data is None else "the file is not a mapping"
        fix = "start it with 'version: 1' and 'pipeline: {source: ./folder}'"
        raise SpecError([resolved.problem(Code.MISSING_KEY, ROOT, what, fix=fix)])
    version = data.get("version")
    if type(version) is int and version > SCHEMA_VERSION:
        what = f"this file is of schema version {version}; this dmconfig reads version {SCHEMA_VERSION}"
        fix = "upgrade dmconfig: pip install --upgrade dmconfig"
        raise SpecError([resolved.problem(Code.UNSUPPORTED_VERSION, ("version",), what, fix=fix)])
    problems = [*_devices_named_twice(resolved)]
    try:
        spec = Spec.model_validate(data)
    except ValidationError as error:
        problems += [_translate(detail, resolved) for detail in error.errors(include_url=False)]
        raise SpecError(problems) from None
    if problems:
        raise SpecError(problems)
    return spec


def _devices_named_twice(resolved: Resolved) -> Iterator[Problem]:
    """Yield a problem per device that a section names under two names, such as ``0`` and ``cuda:0``."""
    for section in ("max_memory", "reserve"):
        yield from _named_twice_in(section, resolved)


def _named_twice_in(section: str, resolved: Resolved) -> Iterator[Problem]:
    entries = resolved.data.get(section)
    seen: dict[str, str] = {}
    for key in entries if isinstance(entries, dict) else ():
        device = device_or_none(key)
        if device is None:
            continue  # no device; where it has to be one the model says so
        if device in seen:
            what = f"{seen[device]!r} and {key!r} are the same device, {device}"
            path = (section, key)
            fix = "keep one of the two; an override has to spell the device as the file does"
            yield resolved.problem(Code.DUPLICATE_DEVICE, path, what, fix=fix, key=True)
        seen[device] = key


def _translate(detail: ErrorDetails, resolved: Resolved) -> Problem:
    """Turn one of pydantic's errors into a problem of ours, at a place that exists in the document."""
    path = path_in(resolved.data, detail["loc"])
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_key(path, resolved)
        case "missing":
            return _missing_key(path, str(detail["loc"][-1]), resolved)
        case "literal_error":
            return not_one_of(path, detail, resolved, version=SCHEMA_VERSION)
        case kind if kind in CODES:
            return refused(path, detail, resolved, _device_advice)
        case _:
            return wrong_type(path, detail, resolved, _type_advice)


def _missing_key(path: ConfigPath, name: str, resolved: Resolved) -> Problem:
    fix = {
        "version": "add 'version: 1' as the first line",
        "pipeline": "add 'pipeline: {source: ./folder}'",
        "source": "add 'source: ./folder'",
        "execution": "add 'execution: cuda:0'",
    }.get(name, "")
    return resolved.problem(Code.MISSING_KEY, path, f"the key {name!r} is missing", fix=fix, key=True)


def _unknown_key(path: ConfigPath, resolved: Resolved) -> Problem:
    key, model = str(path[-1]), _model_at(path[:-1])
    known = [*keys(model)]
    fix = key_hint(path) or nearest_key(key, known) or _where_it_belongs(key)
    why = f"the keys accepted here are: {', '.join(known)}"
    return resolved.problem(Code.UNKNOWN_KEY, path, f"unknown key {key!r}", why=why, fix=fix, key=True)


def _model_at(path: ConfigPath) -> type[Model]:
    match path:
        case ():
            return Spec
        case ("pipeline", *_):
            return PipelineSpec
        case ("components", *_):
            return ComponentSpec
        case ("group_offload", *_):
            return GroupOffloadSpec
        case _:
            return PlacementSpec


def _where_it_belongs(key: str) -> str:
    places: dict[str, type[Model]] = {
        "at the top level": Spec,
        "under 'pipeline'": PipelineSpec,
        "under 'components.<name>'": ComponentSpec,
    }
    found = [place for place, model in places.items() if key in keys(model)]
    return f"it belongs {' or '.join(found)}" if found else ""


def _device_advice(path: ConfigPath, given: Any, what: str) -> tuple[str, str]:
    """Add what else is accepted at path, and what was most likely meant."""
    takes_strategy = path in (("device_map",), ("device_map", DEFAULT))
    if takes_strategy:
        what += f"; or a strategy: {', '.join(STRATEGIES)}"
    if not isinstance(given, str):
        return what, ""
    meant = (nearest(given, STRATEGIES) if takes_strategy else None) or nearest_device(given)
    if meant:
        return what, f"did you mean {meant!r}?"
    key = str(path[-1])
    if path[:1] == ("device_map",) and len(path) == 2 and ":" in key:
        return what, f"the component comes first: write {given}: {key}"
    return what, ""


def _type_advice(path: ConfigPath, expected: str, given: Any) -> str:
    if expected != "a mapping" or not isinstance(given, (str, int)) or isinstance(given, bool):
        return ""
    match path:
        case ("pipeline",):
            return f"write pipeline: {{source: {given}}}"
        case ("components", name):
            return f"write {name}: {{class: {given}}} or {name}: {{source: {given}}}"
        case ("max_memory",):
            return f"name the device: max_memory: {{0: {given}}}"
        case _:
            return ""
