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
from dmconfig.layers import FILE_KEYS
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


def _form(value: object) -> str:
    """The tag of a union's branch; written so that no key of a file is likely to be the same."""
    return "(mapping)" if isinstance(value, (Mapping, Model)) else "(word)"


def _word_or_number(value: object) -> str:
    return "(number)" if isinstance(value, int) else "(word)"


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


Names = Annotated[tuple[str, ...], BeforeValidator(_devices)]
"""A list of words of the file."""


class PipelineSpec(Model):
    """The pipeline: where it comes from and what holds for all of its components."""

    source: str = Field(
        description="Where the pipeline is: a folder in the diffusers layout, written ./folder, ../folder, /folder or "
        "~/folder and relative to this file; otherwise a hub id such as stabilityai/stable-diffusion-xl-base-1.0."
    )
    revision: str | None = Field(None, description="Commit, tag or branch of a hub id. Write a commit for deployments.")
    class_name: str | None = Field(
        None, alias="class", description="Pipeline class of diffusers. Default: the one the source names."
    )
    variant: str | None = Field(None, description="Weights variant, e.g. fp16 for model.fp16.safetensors.")
    dtype: Dtype = Field(
        "auto", description="Floating-point type of all components. auto keeps each component's stored type."
    )


class LayerwiseCastingSpec(Model):
    """Weights kept in a small type and cast to another, layer by layer, while they compute: ``layerwise_casting``."""

    storage_dtype: Literal["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"] = Field(
        "float8_e4m3fn", description="The type in which the weights of linear and convolution layers are kept."
    )
    compute_dtype: Dtype = Field("auto", description="The type in which they compute. Default: the component's dtype.")
    skip_modules_pattern: Names | None = Field(
        None, description="Patterns of module names that are left as they are, instead of diffusers' own list."
    )
    non_blocking: bool = Field(False, description="Cast without waiting.")


class CompileSpec(Model):
    """Options of ``torch.compile``, by its own names, and which part of the component is compiled."""

    regional: bool = Field(
        False, description="Compile only the repeated blocks (compile_repeated_blocks): a fraction of the waiting."
    )
    fullgraph: bool = Field(False, description="Refuse what would break the graph, instead of going on without.")
    dynamic: bool | None = Field(None, description="Whether sizes may differ from call to call; null: found out.")
    backend: str = Field("inductor", description="The compiler.")
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = Field(
        None, description="What to spend compile time on."
    )
    options: dict[str, Any] | None = Field(None, description="Options of the backend; not together with mode.")


class CacheSpec(Model):
    """A cache of diffusers, which computes some blocks anew only where their result changes enough."""

    class_name: str = Field(
        alias="class", description="Its configuration class in diffusers, e.g. FirstBlockCacheConfig."
    )
    config: dict[str, Any] = Field(default_factory=dict, description="Values of its fields, e.g. {threshold: 0.08}.")


Switch = Annotated[Annotated[bool, Tag("(word)")] | Annotated[dict[str, Any], Tag("(mapping)")], Discriminator(_form)]
Slicing = Annotated[
    Annotated[Literal["auto", "max"], Tag("(word)")] | Annotated[int, Tag("(number)"), Field(ge=1)],
    Discriminator(_word_or_number),
]
LayerwiseCasting = Annotated[
    Annotated[bool, Tag("(word)")] | Annotated[LayerwiseCastingSpec, Tag("(mapping)")], Discriminator(_form)
]
Compile = Annotated[Annotated[bool, Tag("(word)")] | Annotated[CompileSpec, Tag("(mapping)")], Discriminator(_form)]


class ComponentSpec(Model):
    """One component: what differs from the pipeline's own. Everything left out comes from the pipeline."""

    source: str | None = Field(
        None,
        description="Folder of a model or of a pipeline that has this component, or a hub id; default: the pipeline's.",
    )
    subfolder: str | None = Field(
        None, description="Folder inside the source. Default: the component's name where the source is a pipeline."
    )
    revision: str | None = Field(None, description="Commit, tag or branch, when source is a hub id.")
    class_name: str | None = Field(None, alias="class", description="Class to load. Default: what the source names.")
    variant: str | None = Field(None, description="Weights variant. Default: the pipeline's.")
    dtype: Dtype | None = Field(None, description="Floating-point type. Default: the pipeline's.")
    config: dict[str, Any] | None = Field(
        None, description="Config values set on top of the source's own; for schedulers."
    )
    attention_backend: str | None = Field(
        None, description="What computes attention: a word of diffusers' set_attention_backend, e.g. flash or native."
    )
    attention_slicing: Slicing | None = Field(
        None, description="Compute attention in slices, for less memory: auto, max, or a slice size."
    )
    tiling: Switch = Field(
        False, description="Decode in tiles, for less memory: true, or the arguments of the class's enable_tiling."
    )
    slicing: bool = Field(False, description="Decode a batch one picture after another, for less memory.")
    memory_format: Literal["channels_last", "channels_last_3d"] | None = Field(
        None, description="Order of convolution weights in memory; channels_last is often faster on GPUs."
    )
    layerwise_casting: LayerwiseCasting = Field(
        False, description="Keep weights in float8 and cast each layer while it computes: true, or options."
    )
    cache: CacheSpec | None = Field(
        None, description="A cache between steps, e.g. {class: FirstBlockCacheConfig, config: {threshold: 0.08}}."
    )
    compile: Compile = Field(
        False, description="Compile the component with torch.compile once it is placed: true, or options."
    )


Several = Annotated[tuple[ComponentSpec, ...], BeforeValidator(_devices)]
ComponentEntry = Annotated[
    Annotated[ComponentSpec, Tag("(device)")] | Annotated[Several, Tag("(list)")], Discriminator(_device_or_list)
]
QuantizationBackend = Literal["bitsandbytes_4bit", "bitsandbytes_8bit", "torchao", "quanto", "gguf"]


class QuantizationSpec(Model):
    """How a component's weights are quantised while they are loaded, in the words of PipelineQuantizationConfig."""

    quant_backend: QuantizationBackend = Field(description="The library that quantises, and in how many bits.")
    quant_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the backend's configuration class, e.g. {bnb_4bit_quant_type: nf4}; types of torch "
        "and configurations of torchao by name, e.g. {quant_type: Int8WeightOnlyConfig}.",
    )


Quantization = Annotated[
    Annotated[QuantizationBackend, Tag("(word)")] | Annotated[QuantizationSpec, Tag("(mapping)")], Discriminator(_form)
]


class AdapterSpec(Model):
    """What all adapters have: the file."""

    source: str = Field(description="A safetensors file, or a folder or hub id in which weight_name is the file.")
    subfolder: str | None = Field(None, description="Folder inside the source.")
    weight_name: str | None = Field(None, description="The file inside the source.")
    revision: str | None = Field(None, description="Commit, tag or branch, when source is a hub id.")


class LoraSpec(AdapterSpec):
    """A LoRA."""

    name: str | None = Field(None, description="Its name, for set_adapters. Default: the file's name.")
    weight: float = Field(1.0, strict=False, description="How much of it is added.")
    fused: bool = Field(
        False, description="Add it to the weights and let go of it: as fast as without, and fixed from then on."
    )


class TextualInversionSpec(AdapterSpec):
    """Words that a text encoder has learned."""

    token: str | None = Field(None, description="The word that stands for it in prompts. Default: the one in the file.")


class IpAdapterSpec(AdapterSpec):
    """An IP-Adapter: pictures as prompts. Its image encoder is the component image_encoder."""

    scale: float = Field(1.0, strict=False, description="How much of the picture is followed.")


class AdaptersSpec(Model):
    """What is put on the components before they are placed. LoRAs are stacked in the order written."""

    lora: Annotated[tuple[LoraSpec, ...], BeforeValidator(_devices)] = Field((), description="LoRAs.")
    textual_inversion: Annotated[tuple[TextualInversionSpec, ...], BeforeValidator(_devices)] = Field(
        (), description="Words that text encoders have learned."
    )
    ip_adapter: Annotated[tuple[IpAdapterSpec, ...], BeforeValidator(_devices)] = Field((), description="IP-Adapters.")

    @property
    def all(self) -> tuple[tuple[ConfigPath, AdapterSpec], ...]:
        """Every adapter with its place in the file."""
        kinds = {"lora": self.lora, "textual_inversion": self.textual_inversion, "ip_adapter": self.ip_adapter}
        return tuple(
            (("adapters", kind, index), adapter)
            for kind, listed in kinds.items()
            for index, adapter in enumerate(listed)
        )


class SharingSpec(Model):
    """One more pipeline on the same components: each of them has one home, whichever pipelines it takes part in."""

    class_name: str = Field(alias="class", description="Pipeline class of diffusers.")
    call: dict[str, Any] = Field(
        default_factory=dict,
        description="Defaults for its call, on top of those of the top-level `call` that its class takes.",
    )


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
    components: dict[str, ComponentEntry | None] = Field(
        default_factory=dict,
        description="Components that differ from the source's own, by name; null leaves an optional one out, and a "
        "list stands for several models in one place, such as controlnets.",
    )
    quantization: dict[str, Quantization] = Field(
        default_factory=dict,
        description="Components whose weights are quantised while they are loaded, by name: a backend, or a mapping.",
    )
    adapters: AdaptersSpec = Field(
        default_factory=AdaptersSpec, description="LoRAs, textual inversions and IP-Adapters, put on before placing."
    )
    pipelines: dict[str, SharingSpec] = Field(
        default_factory=dict,
        description="More pipelines on the same components, by a name of your own. What a class needs beyond the "
        "pipeline's components, such as a controlnet, stands under components.",
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
        description="Defaults for the pipeline's call, by parameter name. Pictures and masks by path, relative to this "
        "file; films as an animated picture, a folder of frames or a list of them; `seed` makes the generator, as a "
        "list one for each picture.",
    )

    @property
    def written_components(self) -> Iterator[tuple[ConfigPath, ComponentSpec]]:
        """The components that the file describes, each with its place; those of a list one by one."""
        for name, entry in self.components.items():
            if isinstance(entry, tuple):
                yield from ((("components", name, index), each) for index, each in enumerate(entry))
            elif entry is not None:
                yield ("components", name), entry

    def quantization_of(self, component: str) -> QuantizationSpec | None:
        """Return how a component is quantised, or None."""
        entry = self.quantization.get(component)
        return QuantizationSpec(quant_backend=entry) if isinstance(entry, str) else entry

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
    known = [*keys(model), *(FILE_KEYS if model is Spec else ())]
    fix = key_hint(path) or nearest_key(key, known) or _where_it_belongs(key)
    why = f"the keys accepted here are: {', '.join(known)}"
    return resolved.problem(Code.UNKNOWN_KEY, path, f"unknown key {key!r}", why=why, fix=fix, key=True)


def _model_at(path: ConfigPath) -> type[Model]:
    match path:
        case ():
            return Spec
        case ("pipeline", *_):
            return PipelineSpec
        case ("components", *_, "layerwise_casting"):
            return LayerwiseCastingSpec
        case ("components", *_, "compile"):
            return CompileSpec
        case ("components", *_, "cache"):
            return CacheSpec
        case ("components", *_):
            return ComponentSpec
        case ("quantization", *_):
            return QuantizationSpec
        case ("adapters",):
            return AdaptersSpec
        case ("adapters", kind, *_):
            kinds: dict[str, type[Model]] = {"textual_inversion": TextualInversionSpec, "ip_adapter": IpAdapterSpec}
            return kinds.get(str(kind), LoraSpec)
        case ("group_offload", *_):
            return GroupOffloadSpec
        case ("pipelines", *_):
            return SharingSpec
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
