"""The models of the file, schema version 1: what a user may write, and the rules that need no other knowledge.

Rules across entries (does that component exist, does it fit) are in ``check``; this module never looks at a
pipeline or a machine. Field descriptions are the documentation that editors show, through ``schema``.

Annotations are not postponed here: pydantic would compile every one of them at each start.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, PlainValidator, Tag
from pydantic_core import ErrorDetails, PydanticCustomError

from dmconfig.devices import (
    DEVICE_FORMS,
    DEVICE_PATTERN,
    DISK,
    RUNS_PATTERN,
    device_or_none,
    nearest_device,
    parse_device,
)
from dmconfig.errors import Code, Edit, Move, Problem, SpecError, nearest
from dmconfig.hints import VALUE_HINTS, destination, key_hint, renamed_key
from dmconfig.layers import FILE_KEYS, FILE_VERSION, OF_VERSION
from dmconfig.paths import ConfigPath
from dmconfig.resolve import Resolved
from dmconfig.units import (
    BUDGET_FORMS,
    BUDGET_PATTERN,
    GIB,
    SIZE_FORMS,
    SIZE_PATTERN,
    Budget,
    format_bytes,
    parse_budget,
    parse_size,
)
from dmconfig.validation import (
    CODES,
    FileKind,
    Model,
    Section,
    Size,
    file_version,
    keys,
    nearest_key,
    not_one_of,
    path_in,
    refused,
    text_or_number,
    validated,
    value_at,
    written_as,
    wrong_type,
)

SCHEMA_VERSION = FILE_VERSION
DEFAULT_RESERVE = 3 * GIB // 2
"""1.5 GiB: what decoding one 1024 px image takes in bfloat16 in every AutoencoderKL, more than most denoisers need."""
REHEARSED = "rehearsed"
"""The reserve that is what a rehearsal of the plan takes beside weights."""

STRATEGY_MEANINGS = {
    "balanced": "Each component whole on one accelerator, the fullest one as empty as can be",
    "balanced_low_0": "As balanced, with the first accelerator as empty as can be",
    "sequential": "The first accelerator is filled before the next",
    "balanced_low_memory": "As balanced; what does not fit is brought whole while it runs",
    "balanced_ultra_low_memory": "As balanced; what does not fit is brought layer by layer",
    "auto": "The placement that moves weights for the least time per generation",
}
STRATEGIES = tuple(STRATEGY_MEANINGS)
DEFAULT = "default"
"""The key of a device map that stands for every component it does not name."""
DTYPES = {
    "float32": "float32", "fp32": "float32", "float16": "float16", "fp16": "float16", "half": "float16",
    "bfloat16": "bfloat16", "bf16": "bfloat16", "auto": "auto",
}  # fmt: skip


class RehearsedReserve(dict[str, int]):
    """A reserve by component, in bytes, that was rehearsed: less of it would not do."""


LowMemory = Literal["none", "cpu_offload_with_hook", "sequential_cpu_offload", "group_offload"]
_OFFLOADS = ("model", "sequential", "group")  # the same ways, as a placement of one component has them


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


def _reason(value: object, fix: str = "write why, and who made the file") -> object:
    """A reason in words, not a mere yes."""
    if not isinstance(value, str) or len(value.split()) < 2:
        context = {"text": "a reason is expected, in a few words", "fix": fix}
        raise PydanticCustomError("bad_reason", "{text}", context)
    return value


def _reason_for_code(value: object) -> object:
    return _reason(value, "write why, and who read it")


def _reserve(value: object) -> object:
    """The one word that a reserve may be, or a size in bytes."""
    if value == REHEARSED:
        return value
    try:
        return parse_size(value)
    except ValueError as error:
        context = {"fix": f"did you mean {REHEARSED!r}?"} if nearest(str(value), [REHEARSED]) else {}
        text = f"{error}, or {REHEARSED}" if str(error).endswith(SIZE_FORMS) else str(error)
        raise PydanticCustomError("bad_size", "{text}", {"text": text, **context}) from None


def _form(value: object) -> str:
    """The tag of a union's branch; written so that no key of a file is likely to be the same."""
    return "(mapping)" if isinstance(value, (Mapping, Model)) else "(word)"


def _word_or_number(value: object) -> str:
    return "(number)" if isinstance(value, int) else "(word)"


_LOADABLE = [*DTYPES, *(f"torch.{name}" for name in ("float32", "float16", "bfloat16"))]
_DEVICE_SCHEMA = text_or_number(RUNS_PATTERN, f"A device: {DEVICE_FORMS}.")
_DEVICES_SCHEMA = {"type": "array", "items": _DEVICE_SCHEMA, "minItems": 1}
_BUDGET_SCHEMA = text_or_number(BUDGET_PATTERN, f"The most that may be used: {BUDGET_FORMS}.")
_WORD_SCHEMA = {
    "anyOf": [
        *({"const": name, "description": f"{text}."} for name, text in STRATEGY_MEANINGS.items()),
        *_DEVICE_SCHEMA["anyOf"],
    ]
}
"""A strategy or a device; each strategy with what it does, for editors to show."""
_SEED_SCHEMA: dict[str, Any] = {
    "description": "Makes the generator: same seed, same picture. A list has one for each picture.",
    "examples": [0],
    "anyOf": [
        {"type": "integer", "minimum": 0},
        {"type": "array", "items": {"type": "integer", "minimum": 0}},
        {"type": "null"},
    ],
}


def _default_apart(schema: dict[str, Any]) -> None:
    """Say in the schema of a device map that strategies are for its default, and mappings for all others."""
    _, mapping = schema["oneOf"]
    word, placement = mapping["additionalProperties"]["oneOf"]
    about = "What is not named: one device, or the strategy that plans it."
    mapping["properties"] = {DEFAULT: word | {"description": about, "examples": ["balanced"]}}
    device = {**_DEVICE_SCHEMA, "description": f"One device: {DEVICE_FORMS}."}
    mapping["additionalProperties"] = {"oneOf": [device, placement]}


Device = Annotated[str, BeforeValidator(_device, json_schema_input_type=written_as(_DEVICE_SCHEMA))]
Devices = Annotated[
    tuple[Device, ...],
    Field(min_length=1),
    BeforeValidator(_devices, json_schema_input_type=written_as(_DEVICES_SCHEMA)),
]
Execution = Annotated[
    Annotated[Device, Tag("(device)")] | Annotated[Devices, Tag("(list)")], Discriminator(_device_or_list)
]
DeviceBudget = Annotated[Budget, PlainValidator(_budget, json_schema_input_type=written_as(_BUDGET_SCHEMA))]
Dtype = Annotated[str, BeforeValidator(_dtype), Field(json_schema_extra={"enum": _LOADABLE})]
Word = Annotated[
    str,
    BeforeValidator(_word, json_schema_input_type=written_as(_WORD_SCHEMA)),
    Field(description=f"One device: {DEVICE_FORMS}; or, for all that is not named, a strategy."),
]


Names = Annotated[tuple[str, ...], BeforeValidator(_devices)]
"""A list of words of the file."""
COMMIT = "462165984030d82259a11f4367a4eed129e94a7b"
"""A commit, for examples."""
REVISION = (
    "Of a hub id: a commit, 40 hexadecimal digits, which `dmconfig pin` writes here. Branches and tags move, so they "
    "need allow_moving_revision: true. Default: the main branch, which is remarked on."
)
ALLOW_PICKLE = (
    "Load pickles (.bin, .ckpt, .pt) where the source has no safetensors: the reason, in words. They are opened with "
    "torch's safe loader all the same. Default: refused."
)
TRUST_REMOTE_CODE = (
    "Run code that the source brings along, a class in a file of Python beside its config: the reason, in words. Of a "
    "hub id it needs a commit as revision. Nothing is run for validate and plan. Default: refused."
)
ORIGINAL_CONFIG = (
    "For a source that is one file: the YAML file of the model's authors that its config is made from, of classes for "
    "which diffusers does so, such as a UNet2DConditionModel: a path, or a file on the hub."
)
VariantMissing = Literal["error", "default"]
Reason = Annotated[str, BeforeValidator(_reason)]
ReasonForCode = Annotated[str, BeforeValidator(_reason_for_code)]
ComponentConfig = Annotated[
    Annotated[str, Tag("(word)")] | Annotated[dict[str, Any], Tag("(mapping)")], Discriminator(_form)
]


class CustomPipelineSpec(Model):
    """A pipeline class in a file of Python, in the place of the one that the source names."""

    source: str = Field(
        description="The file, ./my_pipeline.py; a folder or hub id with a pipeline.py; or a file in a repository, "
        "organisation/name/my_pipeline.py. Relative to this file.",
        examples=["./my_pipeline.py", "organisation/pipelines"],
    )
    revision: str | None = Field(
        None,
        description="Of a hub id: a commit, 40 hexadecimal digits, which `dmconfig pin` writes here. Code is run at a "
        "commit alone.",
        examples=[COMMIT],
    )
    trust_remote_code: ReasonForCode | None = Field(
        None,
        description="Why this code may be run, in words. Without it, it is not.",
        examples=["read at this commit by our security team"],
    )


class ConnectedPipelineSpec(Model):
    """A pipeline that is part of another: where its components come from."""

    source: str = Field(
        description="Folder or hub id of the connected pipeline, written as pipeline.source.",
        examples=["kandinsky-community/kandinsky-2-2-prior", "./models/prior"],
    )
    revision: str | None = Field(None, description=REVISION, examples=[COMMIT])


class ConnectedSpec(Model):
    """The pipelines that a class is made of beside its source, by the prefix of their components."""

    prior: ConnectedPipelineSpec | None = Field(
        None,
        description="The pipeline whose components are called prior_...: prior_text_encoder is its text_encoder.",
        examples=[{"source": "kandinsky-community/kandinsky-2-2-prior"}],
    )

    @property
    def named(self) -> dict[str, ConnectedPipelineSpec]:
        """Those that the file names."""
        return {} if self.prior is None else {"prior": self.prior}


class PipelineSpec(Model):
    """The pipeline: where it comes from and what holds for all of its components."""

    source: str = Field(
        description="Where the pipeline is: a folder in the diffusers layout, written ./folder, ../folder, /folder or "
        "~/folder and relative to this file; otherwise a hub id such as stabilityai/stable-diffusion-xl-base-1.0. Or "
        "one file with all weights: ./model.safetensors, or organisation/name/model.safetensors on the hub.",
        examples=["./models/sdxl", "stabilityai/stable-diffusion-xl-base-1.0", "./sdxl.safetensors"],
    )
    revision: str | None = Field(None, description=REVISION, examples=[COMMIT])
    config: str | None = Field(
        None,
        description="For a source that is one file: the folder or hub id of a pipeline with the configs and tokenizers "
        "of its components. Default: the one that the names of its weights tell, if they tell one.",
        examples=["./models/sdxl", "stabilityai/stable-diffusion-xl-base-1.0"],
    )
    config_revision: str | None = Field(None, description="Revision of config, when it is a hub id.", examples=[COMMIT])
    original_config: str | None = Field(
        None, description=ORIGINAL_CONFIG, examples=["./v1-inference.yaml", "organisation/name/v1-inference.yaml"]
    )
    original_config_revision: str | None = Field(
        None, description="Revision of original_config, when it is on the hub.", examples=[COMMIT]
    )
    local_files_only: bool = Field(
        False, description="Never ask the hub for this source: what is here must be whole.", examples=[True]
    )
    allow_pickle: Reason | None = Field(None, description=ALLOW_PICKLE, examples=["our own export of 2022"])
    trust_remote_code: ReasonForCode | None = Field(
        None, description=TRUST_REMOTE_CODE, examples=["read at this commit by our security team"]
    )
    custom_pipeline: CustomPipelineSpec | None = Field(
        None,
        description="A pipeline class of your own, or of another repository than the source. Default: the class that "
        "the source names.",
        examples=[{"source": "./my_pipeline.py", "trust_remote_code": "written by our team"}],
    )
    class_name: str | None = Field(
        None,
        alias="class",
        description="Pipeline class of diffusers; with custom_pipeline, the class in its file, where that has several. "
        "Default: the one the source names.",
        examples=["StableDiffusionXLPipeline"],
    )
    connected: ConnectedSpec = Field(
        default_factory=ConnectedSpec.model_construct,
        description="For a class that is made of several pipelines, such as KandinskyV22CombinedPipeline: where the "
        "others come from. Default: as the source's README.md says.",
        examples=[{"prior": {"source": "kandinsky-community/kandinsky-2-2-prior"}}],
    )
    variant: str | None = Field(
        None, description="Weights variant, e.g. fp16 for model.fp16.safetensors.", examples=["fp16"]
    )
    variant_missing: VariantMissing = Field(
        "default",
        description="What a component without weights of the variant does: default: load its plain ones, which the "
        "plan says; error: refuse.",
        examples=["error"],
    )
    dtype: Dtype = Field(
        "auto",
        description="Floating-point type of all components. auto keeps each component's stored type.",
        examples=["bfloat16"],
    )


class LayerwiseCastingSpec(Model):
    """Weights kept in a small type and cast to another, layer by layer, while they compute: ``layerwise_casting``."""

    storage_dtype: Literal["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"] = Field(
        "float8_e4m3fn",
        description="The type in which the weights of linear and convolution layers are kept.",
        examples=["float8_e4m3fn"],
    )
    compute_dtype: Dtype = Field(
        "auto",
        description="The type in which they compute. Default: the component's dtype.",
        examples=["bfloat16"],
    )
    skip_modules_pattern: Names | None = Field(
        None,
        description="Patterns of module names that are left as they are, instead of diffusers' own list.",
        examples=[["norm", "proj_out"]],
    )
    non_blocking: bool = Field(False, description="Cast without waiting.", examples=[True])


class CompileSpec(Model):
    """Options of ``torch.compile``, by its own names, and which part of the component is compiled."""

    regional: bool = Field(
        False,
        description="Compile only the repeated blocks (compile_repeated_blocks): a fraction of the waiting.",
        examples=[True],
    )
    fullgraph: bool = Field(
        False,
        description="Refuse what would break the graph, instead of going on without.",
        examples=[True],
    )
    dynamic: bool | None = Field(
        None,
        description="Whether sizes may differ from call to call; null: found out.",
        examples=[False],
    )
    backend: str = Field(
        "inductor",
        description="The compiler.",
        examples=["inductor"],
    )
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = Field(
        None,
        description="What to spend compile time on.",
        examples=["max-autotune"],
    )
    options: dict[str, Any] | None = Field(
        None,
        description="Options of the backend; not together with mode.",
        examples=[{"triton.cudagraphs": True}],
    )


class CacheSpec(Model):
    """A cache of diffusers, which computes some blocks anew only where their result changes enough."""

    class_name: str = Field(
        alias="class", description="Its configuration class in diffusers.", examples=["FirstBlockCacheConfig"]
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="Values of its fields.", examples=[{"threshold": 0.08}]
    )


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
        description="Folder of a model or of a pipeline that has this component, or a hub id, or one file of weights "
        "(.safetensors, .gguf) in either; default: the pipeline's.",
        examples=["./models/vae-fix", "madebyollin/sdxl-vae-fp16-fix", "./flux1-dev-Q4_K_S.gguf"],
    )
    subfolder: str | None = Field(
        None,
        description="Folder inside the source. Default: the component's name where the source is a pipeline.",
        examples=["vae"],
    )
    revision: str | None = Field(None, description=REVISION, examples=[COMMIT])
    local_files_only: bool | None = Field(
        None, description="Never ask the hub for this component's source. Default: as under pipeline.", examples=[True]
    )
    allow_pickle: Reason | None = Field(None, description=ALLOW_PICKLE, examples=["our own export of 2022"])
    trust_remote_code: ReasonForCode | None = Field(
        None, description=TRUST_REMOTE_CODE, examples=["read at this commit by our security team"]
    )
    class_name: str | None = Field(
        None,
        alias="class",
        description="Class to load. Default: what the source names.",
        examples=["EulerDiscreteScheduler"],
    )
    variant: str | None = Field(None, description="Weights variant. Default: the pipeline's.", examples=["fp16"])
    variant_missing: VariantMissing | None = Field(
        None,
        description="As under pipeline. Default: error where this component names a variant, else the pipeline's.",
        examples=["default"],
    )
    dtype: Dtype | None = Field(None, description="Floating-point type. Default: the pipeline's.", examples=["float32"])
    config: ComponentConfig | None = Field(
        None,
        description="A mapping: config values set on top of the source's own; for schedulers. Text, for a source that "
        "is one file: the folder or hub id of the model, or of a pipeline with this component, whose config it has. "
        "Default for such a source: the pipeline's own config of the component.",
        examples=[{"timestep_spacing": "trailing"}, "./models/vae-fix"],
    )
    config_revision: str | None = Field(None, description="Revision of config, when it is a hub id.", examples=[COMMIT])
    original_config: str | None = Field(
        None, description=ORIGINAL_CONFIG, examples=["./v1-inference.yaml", "organisation/name/v1-inference.yaml"]
    )
    original_config_revision: str | None = Field(
        None, description="Revision of original_config, when it is on the hub.", examples=[COMMIT]
    )
    attention_backend: str | None = Field(
        None,
        description="What computes attention: a word of diffusers' set_attention_backend, e.g. flash or native.",
        examples=["flash"],
    )
    attention_slicing: Slicing | None = Field(
        None,
        description="Compute attention in slices, for less memory: auto, max, or a slice size.",
        examples=["auto", 4],
    )
    tiling: Switch = Field(
        False,
        description="Decode in tiles, for less memory: true, or the arguments of the class's enable_tiling.",
        examples=[True, {"tile_sample_min_height": 512}],
    )
    slicing: bool = Field(
        False,
        description="Decode a batch one picture after another, for less memory.",
        examples=[True],
    )
    memory_format: Literal["channels_last", "channels_last_3d"] | None = Field(
        None,
        description="Order of convolution weights in memory; channels_last is often faster on GPUs.",
        examples=["channels_last"],
    )
    layerwise_casting: LayerwiseCasting = Field(
        False,
        description="Keep weights in float8 and cast each layer while it computes: true, or options.",
        examples=[True, {"storage_dtype": "float8_e5m2"}],
    )
    cache: CacheSpec | None = Field(
        None,
        description="A cache between steps, e.g. {class: FirstBlockCacheConfig, config: {threshold: 0.08}}.",
        examples=[{"class": "FirstBlockCacheConfig", "config": {"threshold": 0.08}}],
    )
    compile: Compile = Field(
        False,
        description="Compile the component with torch.compile once it is placed: true, or options.",
        examples=[True, {"regional": True}],
    )

    @property
    def config_values(self) -> dict[str, Any] | None:
        """The values set on top of the source's own config."""
        return self.config if isinstance(self.config, dict) else None

    @property
    def config_source(self) -> str | None:
        """Where the config of a single file is."""
        return self.config if isinstance(self.config, str) else None


Several = Annotated[
    tuple[ComponentSpec, ...],
    BeforeValidator(_devices),
    Field(description="Several models in one place, which the pipeline's class wraps itself, such as controlnets."),
]
ComponentEntry = Annotated[
    Annotated[ComponentSpec, Tag("(device)")] | Annotated[Several, Tag("(list)")], Discriminator(_device_or_list)
]
QuantizationBackend = Literal["bitsandbytes_4bit", "bitsandbytes_8bit", "torchao", "quanto", "gguf"]


class QuantizationSpec(Model):
    """How a component's weights are quantised while they are loaded, in the words of PipelineQuantizationConfig."""

    quant_backend: QuantizationBackend = Field(
        description="The library that quantises, and in how many bits.",
        examples=["bitsandbytes_4bit"],
    )
    quant_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the backend's configuration class, e.g. {bnb_4bit_quant_type: nf4}; types of torch "
        "and configurations of torchao by name, e.g. {quant_type: Int8WeightOnlyConfig}.",
        examples=[{"bnb_4bit_quant_type": "nf4"}, {"quant_type": "Int8WeightOnlyConfig"}],
    )


Quantization = Annotated[
    Annotated[QuantizationBackend, Tag("(word)")] | Annotated[QuantizationSpec, Tag("(mapping)")], Discriminator(_form)
]


class AdapterSpec(Model):
    """What all adapters have: the file."""

    source: str = Field(
        description="A safetensors file, or a folder or hub id in which weight_name is the file.",
        examples=["./loras/ink.safetensors", "nerijs/pixel-art-xl"],
    )
    subfolder: str | None = Field(None, description="Folder inside the source.", examples=["models"])
    weight_name: str | None = Field(
        None,
        description="The file inside the source.",
        examples=["pixel-art-xl.safetensors"],
    )
    revision: str | None = Field(None, description="Commit, tag or branch, when source is a hub id.", examples=["main"])


class LoraSpec(AdapterSpec):
    """A LoRA."""

    name: str | None = Field(
        None,
        description="Its name, for set_adapters. Default: the file's name.",
        examples=["ink"],
    )
    weight: float = Field(
        1.0,
        strict=False,
        description="How much of it is added.",
        examples=[0.8],
    )
    fused: bool = Field(
        False,
        description="Add it to the weights and let go of it: as fast as without, and fixed from then on.",
        examples=[True],
    )


class TextualInversionSpec(AdapterSpec):
    """Words that a text encoder has learned."""

    token: str | None = Field(
        None,
        description="The word that stands for it in prompts. Default: the one in the file.",
        examples=["<fox>"],
    )


class IpAdapterSpec(AdapterSpec):
    """An IP-Adapter: pictures as prompts. Its image encoder is the component image_encoder."""

    scale: float = Field(
        1.0,
        strict=False,
        description="How much of the picture is followed.",
        examples=[0.6],
    )


class AdaptersSpec(Model):
    """What is put on the components before they are placed. LoRAs are stacked in the order written."""

    lora: Annotated[tuple[LoraSpec, ...], BeforeValidator(_devices)] = Field(
        (),
        description="LoRAs.",
        examples=[[{"source": "./loras/ink.safetensors", "weight": 0.8}]],
    )
    textual_inversion: Annotated[tuple[TextualInversionSpec, ...], BeforeValidator(_devices)] = Field(
        (),
        description="Words that text encoders have learned.",
        examples=[[{"source": "./words/fox.safetensors", "token": "<fox>"}]],
    )
    ip_adapter: Annotated[tuple[IpAdapterSpec, ...], BeforeValidator(_devices)] = Field(
        (),
        description="IP-Adapters.",
        examples=[[{"source": "./ip-adapter_sd15.safetensors", "scale": 0.6}]],
    )

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

    class_name: str = Field(
        alias="class", description="Pipeline class of diffusers.", examples=["StableDiffusionXLInpaintPipeline"]
    )
    call: dict[str, Any] = Field(
        default_factory=dict,
        description="Defaults for its call, on top of those of the top-level `call` that its class takes.",
        examples=[{"strength": 0.8}],
    )


class GroupOffloadSpec(Model):
    """How group offload cuts components: the options of diffusers' ``apply_group_offloading``, by the same names."""

    offload_type: Literal["leaf_level", "block_level"] = Field(
        "leaf_level",
        description="leaf_level: one layer at a time; block_level: the blocks of a model in groups.",
        examples=["block_level"],
    )
    num_blocks_per_group: int = Field(1, ge=1, description="Blocks brought together, at block_level.", examples=[2])
    use_stream: bool = Field(
        False,
        description="Bring the next group while one is computing: faster, takes two groups, needs CUDA or XPU.",
        examples=[True],
    )
    non_blocking: bool = Field(
        False, description="Copy without waiting; needs pinned host memory to help.", examples=[True]
    )
    record_stream: bool = Field(False, description="With use_stream: do not wait for it when freeing.", examples=[True])
    low_cpu_mem_usage: bool = Field(
        False,
        description="With use_stream: pin host memory group by group, not all of it at once.",
        examples=[True],
    )


class PlacementSpec(Model):
    """Where a component, or a part of one, runs and how its weights get there, when one device does not say it all."""

    execution: Execution = Field(
        description="The device on which the component runs, or a list of devices over which its blocks are spread, in "
        "order. With offload: sequential, what does not fit these is brought layer by layer to the first.",
        examples=["cuda:0", ["cuda:0", "cuda:1"]],
    )
    offload: Literal["none", "model", "sequential", "group"] = Field(
        "none",
        description="none: weights stay there; model: brought whole; sequential: layer by layer; group: in groups of "
        "layers, as group_offload says. Parts of a component stay, or are brought layer by layer.",
        examples=["model"],
    )
    storage: Literal["cpu", "disk"] = Field(
        "cpu",
        description="Where offloaded weights rest. disk: in their own safetensors files, read when they are needed; "
        "nothing is copied, and no host memory is planned for them. Weights that are cast rest in offload_folder.",
        examples=["disk"],
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
Calls = Annotated[float, Field(gt=0, strict=False, description="Times that it runs in one generation.")]
_RESERVE_FORMS = text_or_number(SIZE_PATTERN, f"A size: {SIZE_FORMS}.")["anyOf"]
ReserveWord = Annotated[
    int | Literal["rehearsed"],
    BeforeValidator(_reserve, json_schema_input_type=written_as({"anyOf": [*_RESERVE_FORMS, {"enum": [REHEARSED]}]})),
]
Reserve = Annotated[
    Annotated[ReserveWord, Tag("(word)")] | Annotated[dict[str, Size], Tag("(mapping)")], Discriminator(_form)
]
DeviceMap = Annotated[
    Annotated[Word, Tag("(word)")] | Annotated[dict[str, DeviceMapEntry], Tag("(mapping)")], Discriminator(_form)
]


class Spec(Model):
    """One deployment of one pipeline."""

    version: Annotated[Literal[1], file_version(SCHEMA_VERSION)] = Field(
        description="Version of this file format.", examples=[SCHEMA_VERSION]
    )
    pipeline: PipelineSpec = Field(
        description="The pipeline and what holds for all of its components.",
        examples=[{"source": "stabilityai/stable-diffusion-xl-base-1.0", "variant": "fp16", "dtype": "float16"}],
    )
    allow_moving_revision: bool | None = Field(
        None,
        description="Whether hub ids may be left at a branch or a tag, which may name other files tomorrow. true: yes; "
        "false: every hub id needs a commit. Default: a branch or tag is refused where it is written, and a revision "
        "left out is remarked on.",
        examples=[True],
    )
    components: dict[str, ComponentEntry | None] = Field(
        default_factory=dict,
        description="Components that differ from the source's own, by name; null leaves an optional one out, and a "
        "list stands for several models in one place, such as controlnets.",
        examples=[{"vae": {"dtype": "float32"}, "safety_checker": None}],
    )
    quantization: dict[str, Quantization] = Field(
        default_factory=dict,
        description="Components whose weights are quantised while they are loaded, by name: a backend, or a mapping.",
        examples=[{"transformer": "bitsandbytes_4bit"}],
    )
    adapters: AdaptersSpec = Field(
        default_factory=AdaptersSpec.model_construct,
        description="LoRAs, textual inversions and IP-Adapters, put on before placing.",
        examples=[{"lora": [{"source": "./loras/ink.safetensors", "weight": 0.8}]}],
    )
    pipelines: dict[str, SharingSpec] = Field(
        default_factory=dict,
        description="More pipelines on the same components, by a name of your own. What a class needs beyond the "
        "pipeline's components, such as a controlnet, stands under components.",
        examples=[{"repaint": {"class": "StableDiffusionXLInpaintPipeline", "call": {"strength": 0.8}}}],
    )
    device_map: DeviceMap = Field(
        "balanced",
        description="A strategy, one device, or a mapping from component, or module path below one "
        "(transformer.single_transformer_blocks), to device; in a mapping, `default` names the strategy or device of "
        "what is not named.",
        examples=["balanced", 0, {"unet": "cuda:0", "default": "cuda:1"}],
        json_schema_extra=_default_apart,
    )
    execution_device: Device | None = Field(
        None,
        description="Where the pipeline itself works: latents and embeddings live there. Default: the denoiser's "
        "device, which is right unless something else is entered on every step.",
        examples=["cuda:0"],
    )
    max_memory: dict[Device, DeviceBudget] = Field(
        default_factory=dict,
        description="The most that may be used of each device, in the units of `reserve`, as 80% of the device, or as "
        "free-2GiB. When any accelerator is named, only those named are used. A budget of disk lets what low_memory "
        "offloads rest in its files when the cpu has no room.",
        examples=[{"cuda:0": "20GiB", "cuda:1": "80%", "cpu": "free-8GiB"}],
        json_schema_extra={"propertyNames": {"pattern": DEVICE_PATTERN}},
    )
    reserve: Reserve = Field(
        DEFAULT_RESERVE,
        description=f"Kept free for activations on every accelerator used: {SIZE_FORMS}. Or a mapping: for a device, "
        "for the phase in which a component runs, and under `default` for the others. Or `rehearsed`: what a rehearsal "
        "of the plan takes beside weights, with the arguments under `call`; the two are repeated until they agree.",
        examples=["3GiB", {"vae": "4GiB", "cuda:1": "1GiB", "default": "2GiB"}, "rehearsed"],
        json_schema_extra={"default": format_bytes(DEFAULT_RESERVE).replace(" ", "")},
    )
    low_memory: LowMemory = Field(
        "none",
        description="How components whose weights do not stay on an accelerator get there: cpu_offload_with_hook "
        "brings each whole while it runs, sequential_cpu_offload one layer at a time, group_offload in groups.",
        examples=["cpu_offload_with_hook"],
    )
    group_offload: GroupOffloadSpec = Field(
        default_factory=GroupOffloadSpec.model_construct,
        description="How group offload cuts components, where it is used.",
        examples=[{"offload_type": "block_level", "num_blocks_per_group": 2}],
    )
    offload_folder: str | None = Field(
        None,
        description="Folder for weights that rest on disk and are in no file as they are loaded, because they are "
        "cast; what is written there is removed when the pipeline is unloaded. Relative to this file. Naming it lets "
        "what low_memory offloads rest on disk when the cpu has no room.",
        examples=["./offload"],
    )
    calls: dict[str, Calls] = Field(
        default_factory=dict,
        description="How often a component runs per generation, by name: what the times of plans and the strategy auto "
        "go by. Default: as its class does, a denoiser once per step.",
        examples=[{"transformer": 56}],
    )
    call: dict[str, Any] = Field(
        default_factory=dict,
        description="Defaults for the pipeline's call, by parameter name. Pictures and masks by path, relative to this "
        "file; films as an animated picture, a folder of frames or a list of them; `seed` makes the generator, as a "
        "list one for each picture.",
        examples=[{"num_inference_steps": 30, "guidance_scale": 5.0, "seed": 1}],
        json_schema_extra={"properties": {"seed": _SEED_SCHEMA}},
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
        """Return the bytes kept free on an accelerator while a component runs there.

        Raises: TypeError: they are to be rehearsed, and have not been.
        """
        if isinstance(self.reserve, int):
            return self.reserve
        if isinstance(self.reserve, str):
            raise TypeError("a reserve that is to be rehearsed is not known before that")  # see load.plan_for
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
    return validated(resolved, _SPEC_FILE)


def _ungranted_pipeline(path: ConfigPath, source: str, resolved: Resolved) -> Problem:
    """A word alone says which code, and not why it may be run."""
    what = f"the pipeline is code of {source}, and nothing says why it may be run"
    first = ""
    if source.isidentifier():  # a community pipeline, by its name alone
        first, source = f"download {source}.py from the examples/community of diffusers, ", f"./{source}.py"
    commit = "" if source.startswith((".", "/", "~")) else "revision: <commit>, "
    fix = f"{first}read it, then write custom_pipeline: {{source: {source}, {commit}trust_remote_code: <why>}}"
    return resolved.problem(Code.CODE_NOT_TRUSTED, path, what, fix=fix)


def _translate(detail: ErrorDetails, resolved: Resolved) -> Problem | None:
    """Turn one of pydantic's errors into a problem of ours, at a place that exists in the document.

    None for what another problem tells already.
    """
    path = path_in(resolved.data, detail["loc"])
    match path:
        case ("device_map" | "components" as section, str() as name, *_) if name in keys(Spec):
            what, fix = f"{name!r} is no component", "it belongs at the top level"
            problem = resolved.problem(Code.UNKNOWN_KEY, (section, name), what, fix=fix, key=True)
            return _with_edits(problem, resolved, ((name,), ""))
    if path == ("pipeline", "custom_pipeline") and isinstance(detail["input"], str):
        return _ungranted_pipeline(path, detail["input"], resolved)
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


def _missing_key(path: ConfigPath, name: str, resolved: Resolved) -> Problem | None:
    """The problem of a key that is not there; None where an unknown key is there in its place, which says so."""
    known = [*keys(_model_at(path))]
    others = [key for key in value_at(resolved.data, path) if key not in known]
    if any(name in (renamed_key((*path, key)), nearest(key, known)) for key in others):
        return None
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
    new = renamed_key(path)
    if new is not None:
        return _renamed_key(path, new, resolved)
    places = _places_of(key)
    fix = key_hint(path) or _where_it_belongs(places) or nearest_key(key, known)
    strange = next((character for character in key if not character.isascii()), None)
    if strange:
        fix = f"{fix} The" if fix else "the"
        fix += f" character U+{ord(strange):04X} in it may only look like another"
    why = f"the keys accepted here are: {', '.join(known)}"
    problem = resolved.problem(Code.UNKNOWN_KEY, path, f"unknown key {key!r}", why=why, fix=fix, key=True)
    is_of_all = path[:-1] in ((), ("pipeline",))  # what is said of one component is not said of all for certain
    sure = _SURE.get(places[0]) if is_of_all and len(places) == 1 and not key_hint(path) else None
    target = destination(path, value_at(resolved.data, path)) or (((*sure, key), "") if sure is not None else None)
    return problem if target is None else _with_edits(problem, resolved, target)


def _with_edits(problem: Problem, resolved: Resolved, target: tuple[ConfigPath, str]) -> Problem:
    """A problem of a key at the wrong level with what moves it, unless something is in the way."""
    path, (there, value) = problem.path, target
    if problem.location is None or not _is_free(resolved.data, there):
        return problem
    move = Move(location=problem.location, path=path, target=there, value=value)
    return replace(problem, fix=f"{problem.fix}; dmconfig fix {problem.location.file} does it", edits=(move,))


def _is_free(data: Any, path: ConfigPath) -> bool:
    """Whether a key can be put at a path: it is not there, and what is to hold it is a mapping or not there either."""
    for key in path[:-1]:
        data = data.get(key, {})
        if not isinstance(data, dict):
            return False
    return path[-1] not in data


def _renamed_key(path: ConfigPath, new: str, resolved: Resolved) -> Problem:
    """The problem of a key that is called something else here; an edit mends it, unless that is there as well."""
    old, beside = str(path[-1]), value_at(resolved.data, path[:-1])
    rivals = [key for key in beside if key != old and new in (key, renamed_key((*path[:-1], key)))]
    what = f"{old!r} is called {new!r} here"
    if rivals:
        what = f"{what}, {'which is there as well' if new in rivals else f'and so is {rivals[0]!r}'}"
        return resolved.problem(Code.RENAMED_KEY, path, what, fix="keep one of them", key=True)
    problem = resolved.problem(Code.RENAMED_KEY, path, what, fix=f"{old} -> {new}", key=True)
    if problem.location is None:
        return problem
    edit = Edit(location=problem.location, old=old, new=new)
    return replace(problem, fix=f"{problem.fix}; dmconfig fix {problem.location.file} writes it", edits=(edit,))


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


_PLACES: Mapping[str, type[Model]] = {
    "at the top level": Spec,
    "under 'pipeline'": PipelineSpec,
    "under 'components.<name>'": ComponentSpec,
    "under 'device_map.<component>'": PlacementSpec,
    "under 'group_offload'": GroupOffloadSpec,
}
_SURE: Mapping[str, ConfigPath] = {
    "at the top level": (), "under 'pipeline'": ("pipeline",), "under 'group_offload'": ("group_offload",),
}  # fmt: skip
"""The places that are one mapping of a file."""


def _places_of(key: str) -> list[str]:
    return [place for place, model in _PLACES.items() if key in keys(model)]


def _where_it_belongs(places: list[str]) -> str:
    return f"it belongs {' or '.join(places)}" if places else ""


def _device_advice(path: ConfigPath, given: Any, what: str) -> tuple[str, str]:
    """Add what else is accepted at path, and what was most likely meant."""
    takes_strategy = path in (("device_map",), ("device_map", DEFAULT))
    if takes_strategy:
        what += f"; or a strategy: {', '.join(STRATEGIES)}"
    if isinstance(given, list):
        return what, _list_advice(path, given)
    if not isinstance(given, str):
        return what, ""
    if path[:1] == ("device_map",) and (advice := _offload_advice(path, given)):
        return what, advice
    meant = (nearest(given, STRATEGIES) if takes_strategy else None) or nearest_device(given)
    if meant:
        return what, f"did you mean {meant!r}?"
    key = str(path[-1])
    if path[:1] == ("device_map",) and len(path) == 2 and ":" in key:
        return what, f"the component comes first: write {given}: {key}"
    return what, ""


def _offload_advice(path: ConfigPath, word: str) -> str:
    """How to write a way of offloading, where it stands in place of a device."""
    ways = (*VALUE_HINTS.get(word, ()), word)
    if len(path) == 2 and path[1] != DEFAULT:
        way = next((each for each in ways if each in _OFFLOADS), None)
        return f"write {{execution: cuda:0, offload: {way}}}" if way else ""
    low = next((each for each in ways if each in get_args(LowMemory) and each != "none"), None)
    return f"name a device here, such as cuda:0, and write low_memory: {low}" if low else ""


def _list_advice(path: ConfigPath, given: list[Any]) -> str:
    """How to write a list of devices, in place of one."""
    devices = ", ".join(map(str, given)) if all(isinstance(each, (str, int)) for each in given) else "cuda:0, cuda:1"
    if path == ("device_map",):
        return "leave device_map: balanced, and name the devices under max_memory; or map each component to a device"
    return f"write {{execution: [{devices}]}} to spread it over them" if path[:1] == ("device_map",) else ""


def _type_advice(path: ConfigPath, expected: str, given: Any) -> str:
    if expected != "a mapping" or isinstance(given, bool):
        return ""
    if isinstance(given, list):
        numbered = ", ".join(f"{index}: {each}" for index, each in enumerate(given))
        return (
            f"name the devices: max_memory: {{{numbered}}}"
            if path == ("max_memory",)
            else "write keys and values in place of the list"
        )
    if not isinstance(given, (str, int)):
        return ""
    match path:
        case ("pipeline",):
            return f"write pipeline: {{source: {given}}}"
        case ("components", name):
            return f"write {name}: {{class: {given}}} or {name}: {{source: {given}}}"
        case ("max_memory",):
            return f"name the device: max_memory: {{0: {given}}}"
        case ("call",) if isinstance(given, str):
            return f"name the argument: call: {{prompt: {given}}}"
        case _:
            return ""


_SPEC_FILE = FileKind(
    model=Spec,
    version=SCHEMA_VERSION,
    noun=OF_VERSION,
    beginning="'version: 1' and 'pipeline: {source: ./folder}'",
    sections=(Section(name="max_memory", read=parse_device), Section(name="reserve", read=parse_device)),
    translate=_translate,
    error=SpecError,
)
