"""The models of the file, schema version 1: what a user may write, and the rules that need no other knowledge.

Rules across entries (does that component exist, does it fit) are in ``check``; this module never looks at a
pipeline or a machine. Field descriptions are the documentation that editors show, through ``schema``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from dmconfig.devices import DEVICE_FORMS, parse_device
from dmconfig.errors import Code, Problem, SpecError, nearest
from dmconfig.paths import ROOT, ConfigPath
from dmconfig.resolve import Resolved
from dmconfig.units import BUDGET_FORMS, GIB, SIZE_FORMS, Budget, parse_budget, parse_size

SCHEMA_VERSION = 1
DEFAULT_RESERVE = 3 * GIB // 2
"""1.5 GiB: what decoding one 1024 px image takes in bfloat16 in every AutoencoderKL, more than most denoisers need."""

STRATEGIES = (
    "balanced", "balanced_low_0", "sequential", "balanced_low_memory", "balanced_ultra_low_memory", "auto",
)  # fmt: skip
DTYPES = {
    "float32": "float32", "fp32": "float32", "float16": "float16", "fp16": "float16", "half": "float16",
    "bfloat16": "bfloat16", "bf16": "bfloat16", "float64": "float64", "fp64": "float64", "auto": "auto",
}  # fmt: skip

LowMemory = Literal["none", "cpu_offload_with_hook", "sequential_cpu_offload", "group_offload"]

_HINTS = {
    "torch_dtype": "dtype",
    "device": "device_map",
    "gpu": "device_map",
    "placement": "device_map",
    "execution_device": "execution",
    "cpu_offload": "low_memory: cpu_offload_with_hook",
    "model_cpu_offload": "low_memory: cpu_offload_with_hook",
    "enable_model_cpu_offload": "low_memory: cpu_offload_with_hook",
    "enable_sequential_cpu_offload": "low_memory: sequential_cpu_offload",
    "offload": "low_memory",
    "offload_dir": "offload_folder",
    "model": "pipeline.source",
    "model_id": "pipeline.source",
    "path": "source",
    "repo_id": "source",
    "pretrained_model_name_or_path": "source",
    "type": "class",
    "class_name": "class",
    "steps": "num_inference_steps",
    "inference": "call",
    "memory": "max_memory",
}
"""Words people bring from diffusers, accelerate and other tools: spelling distance would not find these."""


def _word(value: object) -> str:
    """A strategy's name or the full name of a device."""
    if isinstance(value, str) and value in STRATEGIES:
        return value
    try:
        return parse_device(value)
    except ValueError as error:
        meant = nearest(value, STRATEGIES) if isinstance(value, str) else None
        accepted = f"{error}; or a strategy: {', '.join(STRATEGIES)}"
        context = {"fix": f"did you mean {meant!r}?"} if meant else {}
        raise PydanticCustomError("bad_device", "{text}", {"text": accepted, **context}) from None


def _device(value: object) -> str:
    try:
        return parse_device(value)
    except ValueError as error:
        raise PydanticCustomError("bad_device", "{text}", {"text": str(error)}) from None


def _size(value: object) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise PydanticCustomError("bad_size", "{text}", {"text": str(error)}) from None


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
        meant = nearest(text, DTYPES) if text else None
        context = {"fix": f"did you mean {meant!r}?"} if meant else {}
        raise PydanticCustomError("bad_dtype", "{text}", {"text": accepted, **context})
    return DTYPES[text]


def _form(value: object) -> str:
    return "mapping" if isinstance(value, Mapping) else "word"


Device = Annotated[str, BeforeValidator(_device, json_schema_input_type=str | int)]
Size = Annotated[int, BeforeValidator(_size, json_schema_input_type=str | int)]
DeviceBudget = Annotated[
    Budget, BeforeValidator(_budget, json_schema_input_type=str | int), Field(description=BUDGET_FORMS)
]
Dtype = Annotated[str, BeforeValidator(_dtype), Field(json_schema_extra={"enum": list(DTYPES)})]
Word = Annotated[
    str,
    BeforeValidator(_word, json_schema_input_type=str | int),
    Field(description=f"A strategy ({', '.join(STRATEGIES)}) or one device: {DEVICE_FORMS}."),
]


class Model(BaseModel):
    """Base of all models of the file: frozen, and nothing unknown is accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


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


class PlacementSpec(Model):
    """Where a component runs and how its weights get there, when one device does not say it all."""

    execution: Device = Field(description="The device on which the component runs.")
    offload: Literal["none", "model", "sequential", "group"] = Field(
        "none",
        description="none: weights stay there; model: brought whole; sequential: leaf by leaf; group: by blocks.",
    )


DeviceMapEntry = Annotated[
    Annotated[Word, Tag("word")] | Annotated[PlacementSpec, Tag("mapping")], Discriminator(_form)
]
DeviceMap = Annotated[
    Annotated[Word, Tag("word")] | Annotated[dict[str, DeviceMapEntry], Tag("mapping")], Discriminator(_form)
]


class Spec(Model):
    """One deployment of one pipeline."""

    version: Literal[1] = Field(description="Version of this file format.")
    pipeline: PipelineSpec = Field(description="The pipeline and what holds for all of its components.")
    components: dict[str, ComponentSpec | None] = Field(
        default_factory=dict,
        description="Components that differ from the source's own, by name; null leaves an optional one out.",
    )
    device_map: DeviceMap = Field(
        "balanced",
        description="A strategy, one device, or a mapping from component to device; in a mapping, `default` names the "
        "strategy or device of the components that are not named.",
    )
    max_memory: dict[Device, DeviceBudget] = Field(
        default_factory=dict,
        description="The most that may be used of each device, in the units of `reserve`, as 80% of the device, or as "
        "free-2GiB. When any accelerator is named, only those named are used.",
    )
    reserve: Size = Field(
        DEFAULT_RESERVE, description=f"Kept free for activations on every accelerator used: {SIZE_FORMS}."
    )
    low_memory: LowMemory = Field(
        "none",
        description="How components whose weights do not stay on an accelerator get there: cpu_offload_with_hook "
        "brings each whole while it runs, sequential_cpu_offload one layer at a time.",
    )
    offload_folder: str | None = Field(None, description="Folder for weights that rest on disk.")
    call: dict[str, Any] = Field(
        default_factory=dict,
        description="Defaults for the pipeline's call, by parameter name; `seed` makes the generator.",
    )


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
    """Yield a problem per device that max_memory names under two names, such as ``0`` and ``cuda:0``."""
    budgets = resolved.data.get("max_memory")
    seen: dict[str, str] = {}
    for key in budgets if isinstance(budgets, dict) else ():
        try:
            device = parse_device(key)
        except ValueError:
            continue  # the model says so
        if device in seen:
            what = f"{seen[device]!r} and {key!r} are the same device, {device}"
            path = ("max_memory", key)
            yield resolved.problem(Code.DUPLICATE_DEVICE, path, what, fix="keep one of the two", key=True)
        seen[device] = key


_CODES = {
    "bad_device": Code.BAD_DEVICE,
    "bad_size": Code.BAD_SIZE,
    "bad_dtype": Code.BAD_DTYPE,
    "literal_error": Code.BAD_VALUE,
}
_EXPECTED = {
    "string_type": "text",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "list_type": "a list",
}


def _translate(detail: ErrorDetails, resolved: Resolved) -> Problem:
    """Turn one of pydantic's errors into a problem of ours, at a place that exists in the document."""
    path = _path_in(resolved.data, detail["loc"])
    context: Mapping[str, Any] = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_key(path, resolved)
        case "missing":
            name = str(detail["loc"][-1])
            what = f"the key {name!r} is missing"
            fix = {"version": "add 'version: 1' as the first line", "source": "add 'source: ./folder'"}.get(name, "")
            return resolved.problem(Code.MISSING_KEY, path, what, fix=fix, key=True)
        case "literal_error":
            return _not_one_of(path, detail, context, resolved)
        case kind if kind in _CODES:
            is_key = detail["loc"][-1] == "[key]"
            return resolved.problem(_CODES[kind], path, context["text"], fix=context.get("fix", ""), key=is_key)
        case kind:
            return _wrong_type(path, _EXPECTED.get(kind), detail, resolved)


def _path_in(data: Any, loc: tuple[int | str, ...]) -> ConfigPath:
    """Keep the elements of pydantic's loc that are keys of the document: union tags and ``[key]`` are not."""
    path: list[int | str] = []
    for element in loc:
        inside = isinstance(data, dict) and element in data
        listed = isinstance(data, list) and isinstance(element, int) and element < len(data)
        if inside or listed:
            data = data[element]
            path.append(element)
    return tuple(path)


def _unknown_key(path: ConfigPath, resolved: Resolved) -> Problem:
    key = str(path[-1])
    model = _model_at(path[:-1])
    known = [*_aliases(model)]
    fix = ""
    if hint := _HINTS.get(key):
        fix = f"use {hint!r}" if hint in known or "." in hint or ":" in hint else ""
    if not fix and (meant := nearest(key, known)):
        fix = f"did you mean {meant!r}?"
    elsewhere = [] if fix else [place for place, other in _PLACES.items() if key in _aliases(other)]
    if elsewhere:
        fix = f"it belongs under {' or '.join(elsewhere)}"
    why = f"the keys accepted here are: {', '.join(known)}"
    return resolved.problem(Code.UNKNOWN_KEY, path, f"unknown key {key!r}", why=why, fix=fix, key=True)


_VALUE_HINTS = {
    "cpu_offload": "cpu_offload_with_hook",
    "model": "cpu_offload_with_hook",
    "model_cpu_offload": "cpu_offload_with_hook",
    "enable_model_cpu_offload": "cpu_offload_with_hook",
    "sequential": "sequential_cpu_offload",
    "enable_sequential_cpu_offload": "sequential_cpu_offload",
    "group": "group_offload",
    "leaf": "sequential_cpu_offload",
}

_PLACES: dict[str, type[Model]] = {
    "the top level": Spec,
    "'pipeline'": PipelineSpec,
    "'components.<name>'": ComponentSpec,
    "'device_map.<component>'": PlacementSpec,
}


def _model_at(path: ConfigPath) -> type[Model]:
    match path:
        case ():
            return Spec
        case ("pipeline", *_):
            return PipelineSpec
        case ("components", *_):
            return ComponentSpec
        case _:
            return PlacementSpec


def _aliases(model: type[Model]) -> Iterator[str]:
    return (field.alias or name for name, field in model.model_fields.items())


def _not_one_of(path: ConfigPath, detail: ErrorDetails, context: Mapping[str, Any], resolved: Resolved) -> Problem:
    if path[-1:] == ("version",):
        what = f"version is {detail['input']!r}; this dmconfig reads version {SCHEMA_VERSION}"
        fix = f"write 'version: {SCHEMA_VERSION}'"
        return resolved.problem(Code.UNSUPPORTED_VERSION, path, what, fix=fix)
    accepted = [word.strip(" '") for word in str(context["expected"]).replace(" or ", ", ").split(",")]
    given = detail["input"]
    meant = _VALUE_HINTS.get(given) or nearest(given, accepted) if isinstance(given, str) else None
    what = f"{given!r} is not accepted; one of: {', '.join(accepted)}"
    return resolved.problem(Code.BAD_VALUE, path, what, fix=f"did you mean {meant!r}?" if meant in accepted else "")


def _wrong_type(path: ConfigPath, expected: str | None, detail: ErrorDetails, resolved: Resolved) -> Problem:
    given = detail["input"]
    if expected is None:
        return resolved.problem(Code.BAD_VALUE, path, detail["msg"])
    fix = f"quote it: '{given}'" if expected == "text" and isinstance(given, (int, float, bool)) else ""
    what = f"expected {expected}, found {_describe(given)}"
    return resolved.problem(Code.WRONG_TYPE, path, what, fix=fix)


def _describe(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return f"the boolean {str(value).lower()}"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {value!r}"
        case list():
            return "a list"
        case _:
            return "a mapping"
