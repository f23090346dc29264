"""What people write who know diffusers, accelerate or another tool, and what it is called here.

Spelling distance finds typing errors; these are other words for the same thing, which it would not find. All of it
is data: a word is added when somebody has been seen to use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmconfig.paths import ConfigPath

_SOURCE = dict.fromkeys(
    ("path", "repo", "repo_id", "model", "model_id", "model_path", "pretrained_model_name_or_path"), "source"
)
_CLASS = dict.fromkeys(("type", "class_name", "_class_name", "cls", "architecture"), "class")
_DTYPE = dict.fromkeys(("torch_dtype", "precision", "data_type"), "dtype")

RENAMED: Mapping[str, Mapping[str, str]] = {
    "": {
        "schema_version": "version",
        "device": "device_map",
        "gpu": "device_map",
        "placement": "device_map",
        "max_mem": "max_memory",
        "memory": "max_memory",
        "offload_dir": "offload_folder",
        "offload_directory": "offload_folder",
        "offload_path": "offload_folder",
        "disk_offload_dir": "offload_folder",
        "inference": "call",
        "generation": "call",
        "call_kwargs": "call",
    },
    "pipeline": _SOURCE | _CLASS | _DTYPE,
    "components": {
        **_SOURCE,
        **_CLASS,
        **_DTYPE,
        **dict.fromkeys(("enable_tiling", "vae_tiling"), "tiling"),
        **dict.fromkeys(("enable_slicing", "vae_slicing"), "slicing"),
        **dict.fromkeys(("enable_layerwise_casting", "fp8"), "layerwise_casting"),
        **dict.fromkeys(("set_attention_backend",), "attention_backend"),
        **dict.fromkeys(("torch_compile",), "compile"),
    },
    "pipelines": _CLASS,
    "adapters": {
        **_SOURCE,
        **dict.fromkeys(("strength", "lora_scale", "adapter_weight"), "weight"),
        "adapter_name": "name",
        **dict.fromkeys(("fuse", "fuse_lora"), "fused"),
        **dict.fromkeys(("file", "filename"), "weight_name"),
    },
    "group_offload": {
        "type": "offload_type",
        "num_blocks": "num_blocks_per_group",
        "blocks_per_group": "num_blocks_per_group",
        "stream": "use_stream",
    },
    "device_map": dict.fromkeys(
        ("device", "devices", "device_id", "gpu", "gpus", "gpu_id", "execution_device", "run", "runs_on"), "execution"
    ),
}
"""By section, other names of its keys: the value stays as it is, so ``dmconfig fix`` changes the one for the other.

A key of the file that gets another name is entered here with its old one.
"""

_OFFLOAD_WHOLE = "write low_memory: cpu_offload_with_hook at the top level"
_OFFLOAD_LEAVES = "write low_memory: sequential_cpu_offload at the top level"
_OFFLOAD_GROUPS = "write low_memory: group_offload at the top level"
_QUANTISE = "write quantization: {<component>: bitsandbytes_4bit}"
_DEVICE = ("device", "devices", "device_id", "gpu", "gpus", "gpu_id", "placement")
_CALL = (
    "prompt", "negative_prompt", "num_inference_steps", "steps", "guidance_scale", "seed", "height", "width",
    "num_frames", "num_images_per_prompt", "strength",
)  # fmt: skip
_COMPONENTS = (
    "scheduler", "unet", "transformer", "transformer_2", "vae", "text_encoder", "text_encoder_2", "text_encoder_3",
    "tokenizer", "controlnet", "safety_checker", "image_encoder", "feature_extractor",
)  # fmt: skip

_NO_CODE = "it belongs to the source that brings the code: 'pipeline', 'pipeline.custom_pipeline' or a component"
_CUSTOM = "write pipeline.custom_pipeline: {source: ..., revision: ..., trust_remote_code: <why>}"
_NOT_IN_THE_FILE = {
    **dict.fromkeys(("custom_pipeline", "custom_revision"), _CUSTOM),
    "trust_remote_code": _NO_CODE,
    "token": "leave it out: a spec holds no secrets; set HF_TOKEN in the environment",
    "use_auth_token": "leave it out: a spec holds no secrets; set HF_TOKEN in the environment",
    "cache_dir": "leave it out: set HF_HUB_CACHE in the environment",
    "use_safetensors": "leave it out: safetensors are all that is read, unless allow_pickle says why",
    "low_cpu_mem_usage": "leave it out: weights are always loaded straight from their files",
}
_OFFLOADING = {
    "cpu_offload": _OFFLOAD_WHOLE,
    "model_cpu_offload": _OFFLOAD_WHOLE,
    "enable_model_cpu_offload": _OFFLOAD_WHOLE,
    "cpu_offload_with_hook": _OFFLOAD_WHOLE,
    "enable_sequential_cpu_offload": _OFFLOAD_LEAVES,
    "sequential_cpu_offload": _OFFLOAD_LEAVES,
    "enable_group_offload": _OFFLOAD_GROUPS,
}

_WAYS = {
    key: advice.removeprefix("write low_memory: ").removesuffix(" at the top level")
    for key, advice in _OFFLOADING.items()
}
"""Switches of others -> the value of low_memory that they are."""
_LISTS = {
    **dict.fromkeys(("lora", "loras", "lora_weights"), "lora"),
    **dict.fromkeys(("textual_inversion", "textual_inversions"), "textual_inversion"),
    **dict.fromkeys(("ip_adapter", "ip_adapters"), "ip_adapter"),
}
"""Lists of adapters, by the words of others, and their keys under ``adapters``."""

_ON_COMPONENTS = {
    **dict.fromkeys(("lora", "loras", "lora_weights"), "it belongs under 'adapters.lora'"),
    **dict.fromkeys(("textual_inversion", "textual_inversions", "embeddings"), "it belongs under 'adapters'"),
    **dict.fromkeys(("ip_adapter", "ip_adapters"), "it belongs under 'adapters.ip_adapter'"),
    **dict.fromkeys(("quantization_config", "quantisation", "quantize", "load_in_8bit", "load_in_4bit"), _QUANTISE),
    **dict.fromkeys(("compile", "torch_compile"), "it belongs under 'components.<name>.compile'"),
    **dict.fromkeys(("vae_tiling", "enable_vae_tiling", "tiling"), "write components.vae: {tiling: true}"),
    **dict.fromkeys(("vae_slicing", "enable_vae_slicing", "slicing"), "write components.vae: {slicing: true}"),
    **dict.fromkeys(("attention_slicing", "enable_attention_slicing"), "it belongs under 'components.<denoiser>'"),
    "attention_backend": "it belongs under 'components.<denoiser>'",
    "layerwise_casting": "it belongs under 'components.<name>'",
    "controlnets": "write components.controlnet, with a list",
}
"""What is put on components, by the words of others."""

_AT_TOP = {
    **dict.fromkeys(_DTYPE, "write it as pipeline.dtype"),
    "dtype": "write it as pipeline.dtype",
    **dict.fromkeys(_SOURCE, "write it as pipeline.source"),
    **dict.fromkeys(_DEVICE, "use 'device_map'"),
    **dict.fromkeys(_CALL, "it belongs under 'call'"),
    **dict.fromkeys(_COMPONENTS, "it belongs under 'components'"),
    **_OFFLOADING,
    **_ON_COMPONENTS,
    "execution": "it belongs under 'device_map.<component>'",
    "offload": "use 'low_memory'",
    **_NOT_IN_THE_FILE,
}
_IN_PIPELINE = {
    **dict.fromkeys(_DEVICE, "write it as device_map, at the top level"),
    **_OFFLOADING,
    "offload": "write it as low_memory, at the top level",
    **_ON_COMPONENTS,
    **_NOT_IN_THE_FILE,
}
_IN_COMPONENT = {
    **dict.fromkeys(("enable_attention_slicing", "slice_size"), "use 'attention_slicing'"),
    "attention": "use 'attention_backend'",
    **dict.fromkeys(("enable_cache", "cache_config"), "use 'cache'"),
    **dict.fromkeys(("channels_last",), "write memory_format: channels_last"),
}
_IN_PLACEMENT = {
    "low_memory": "use 'offload'",
    "cpu_offload": "write offload: model",
    "mode": "use 'offload'",
}
_AS_CALL_ARGUMENT = {
    "steps": "num_inference_steps",
    "num_steps": "num_inference_steps",
    "guidance": "guidance_scale",
    "cfg": "guidance_scale",
    "cfg_scale": "guidance_scale",
    "negative": "negative_prompt",
    "frames": "num_frames",
    "num_images": "num_images_per_prompt",
    "batch_size": "num_images_per_prompt",
    "generator": "seed",
}

VALUE_HINTS = {
    "cpu_offload": ("cpu_offload_with_hook", "model"),
    "model_cpu_offload": ("cpu_offload_with_hook", "model"),
    "enable_model_cpu_offload": ("cpu_offload_with_hook", "model"),
    "cpu_offload_with_hook": ("model",),
    "model": ("cpu_offload_with_hook",),
    "true": ("cpu_offload_with_hook", "model"),
    "enable_sequential_cpu_offload": ("sequential_cpu_offload", "sequential"),
    "sequential_cpu_offload": ("sequential",),
    "sequential": ("sequential_cpu_offload",),
    "leaf": ("sequential_cpu_offload", "sequential"),
    "group": ("group_offload",),
    "group_offload": ("group",),
    "off": ("none",),
    "no": ("none",),
    "false": ("none",),
    "null": ("none",),
    "": ("none",),
}
"""A value that is not accepted -> what it may mean, the first that is accepted where it stands."""


def section_of(path: ConfigPath) -> str:
    """Return the section whose keys stand at the level of path's last element; ``device_map`` also for its entries."""
    match path[:-1]:
        case ():
            return ""
        case (str() as section, *_):
            return section
        case _:
            return "device_map"


def renamed_key(path: ConfigPath) -> str | None:
    """Return what the key at path is called here, where it is another name for the same thing."""
    return RENAMED.get(section_of(path), {}).get(str(path[-1]))


def destination(path: ConfigPath, value: Any) -> tuple[ConfigPath, str] | None:
    """Return where a key belongs that is unknown at path, and what its value is there; None where that is a choice.

    The value is empty where it stays as it is.
    """
    key, is_one, where = str(path[-1]), not isinstance(value, (dict, list)) and value is not None, path[:-1]
    if where in ((), ("pipeline",)) and key in _WAYS and value is True:
        return ("low_memory",), _WAYS[key]
    if where in ((), ("pipeline",)) and key in _LISTS and isinstance(value, list):
        return ("adapters", _LISTS[key]), ""
    match where:
        case () if key in _DTYPE or key == "dtype":
            target: ConfigPath | None = ("pipeline", "dtype")
        case () if key in _SOURCE and is_one:
            target = ("pipeline", "source")
        case () if key in _CALL:
            target = ("call", key)
        case () if key in _COMPONENTS and isinstance(value, (dict, list)):
            target = ("components", key)
        case ("pipeline",) if key in _DEVICE and not isinstance(value, list):
            target = ("device_map",)
        case ("components", str() as name) if key in _DEVICE and is_one:
            target = ("device_map", name)
        case _:
            target = None
    return (target, "") if target is not None else None


def key_hint(path: ConfigPath) -> str:
    """Return what to do with an unknown key at path, or nothing when only its spelling can tell."""
    key = str(path[-1])
    match path[:-1]:
        case ():
            return _AT_TOP.get(key, "")
        case ("pipeline",):
            return _IN_PIPELINE.get(key, "")
        case ("pipelines", _):
            return "it belongs under its 'call'" if key in _CALL else _NOT_IN_THE_FILE.get(key, "")
        case ("components", name):
            if key in _DEVICE or key == "devise":
                return f"it belongs under 'device_map.{name}'"
            if key in ("offload", "low_memory", "cpu_offload"):
                return f"write device_map.{name}: {{execution: cuda:0, offload: model}}"
            if key in ("quantization", "quantization_config", "load_in_8bit", "load_in_4bit"):
                return f"write quantization: {{{name}: bitsandbytes_4bit}}"
            return _IN_COMPONENT.get(key) or _NOT_IN_THE_FILE.get(key) or _ON_COMPONENTS.get(key, "")
        case ("quantization", _):
            return "it belongs under 'quant_kwargs'" if key.startswith("bnb_") else ""
        case _:
            return _IN_PLACEMENT.get(key, "")


_TEXTS = {"source", "revision", "class", "variant", "subfolder", "offload_folder"}
_YES_OR_NO = {"y": "true", "yes": "true", "on": "true", "n": "false", "no": "false", "off": "false"}


def plain_word(path: ConfigPath, text: str) -> str | None:
    """Return what is meant by a word at path that is a boolean to some readers of YAML, where that is known."""
    meant = _YES_OR_NO.get(text.lower())
    match path:
        case ("low_memory",) | ("device_map", _, "offload") if meant == "false":
            return "none"
        case ("group_offload", str()) if meant:
            return meant
        case (*_, key) if key in _TEXTS and path[:1] != ("call",):
            return f"'{text}'"
        case _:
            return None


def no_boolean(path: ConfigPath, text: str) -> str | None:
    """Return what to do about a yes or no where the key takes words, devices or sizes of its own; else None."""
    path = path[2:] if path[:1] == ("profiles",) else path
    match path:
        case _ if text.lower() not in _YES_OR_NO or path[:1] == ("call",):
            return None
        case (*_, "dtype" | "variant_missing" | "execution_device") | ("device_map" | "max_memory" | "reserve", *_):
            return f"it is no switch: dmconfig explain {'.'.join(map(str, path))} tells what it takes"
        case _:
            return None


def newer_version(noun: str, found: int, known: int) -> tuple[str, str]:
    """Return what is said of a file whose version is newer than the one that is known, and what to do about it."""
    return f"{noun} {found}; this dmconfig reads version {known}", "upgrade dmconfig: pip install --upgrade dmconfig"


def call_hint(name: str) -> str | None:
    """Return the usual parameter of a pipeline's call that name is another word for, or None."""
    return _AS_CALL_ARGUMENT.get(name)
