"""What people write who know diffusers, accelerate or another tool, and what it is called here.

Spelling distance finds typing errors; these are other words for the same thing, which it would not find. All of it
is data: a word is added when somebody has been seen to use it.
"""

from __future__ import annotations

from dmconfig.paths import ConfigPath

_OFFLOAD_WHOLE = "write low_memory: cpu_offload_with_hook at the top level"
_OFFLOAD_LEAVES = "write low_memory: sequential_cpu_offload at the top level"
_SOURCE = dict.fromkeys(("path", "repo", "repo_id", "model", "model_id", "pretrained_model_name_or_path"), "source")
_CLASS = dict.fromkeys(("type", "class_name", "_class_name", "cls", "architecture"), "class")
_DEVICE = ("device", "devices", "device_id", "gpu", "gpus", "gpu_id", "placement")
_CALL = (
    "prompt", "negative_prompt", "num_inference_steps", "steps", "guidance_scale", "seed", "height", "width",
    "num_frames", "num_images_per_prompt", "strength",
)  # fmt: skip
_COMPONENTS = (
    "scheduler", "unet", "transformer", "transformer_2", "vae", "text_encoder", "text_encoder_2", "text_encoder_3",
    "tokenizer", "controlnet", "safety_checker", "image_encoder", "feature_extractor",
)  # fmt: skip

_NO_CODE = "no code of a repository is run; name a class of the installed diffusers under pipeline.class"
_LOG_IN = "a token is never written in a file: set HF_TOKEN, or log in with hf auth login"
_TRUST = {
    **dict.fromkeys(("custom_pipeline", "custom_revision", "trust_remote_code"), _NO_CODE),
    **dict.fromkeys(("token", "use_auth_token", "hf_token", "api_key"), _LOG_IN),
    "use_safetensors": "safetensors are always used; where there are none, allow_pickle takes the reason",
}
_AT_TOP = {
    **_TRUST,
    "torch_dtype": "write it as pipeline.dtype",
    "dtype": "write it as pipeline.dtype",
    **dict.fromkeys(_SOURCE, "write it as pipeline.source"),
    **dict.fromkeys(_DEVICE, "use 'device_map'"),
    **dict.fromkeys(_CALL, "it belongs under 'call'"),
    **dict.fromkeys(_COMPONENTS, "it belongs under 'components'"),
    "cpu_offload": _OFFLOAD_WHOLE,
    "model_cpu_offload": _OFFLOAD_WHOLE,
    "enable_model_cpu_offload": _OFFLOAD_WHOLE,
    "enable_sequential_cpu_offload": _OFFLOAD_LEAVES,
    "sequential_cpu_offload": _OFFLOAD_LEAVES,
    "execution": "it belongs under 'device_map.<component>'",
    "offload": "use 'low_memory'",
    "offload_dir": "use 'offload_folder'",
    "memory": "use 'max_memory'",
    "inference": "use 'call'",
    "generation": "use 'call'",
}
_IN_PIPELINE = {
    **_TRUST,
    "torch_dtype": "use 'dtype'",
    **{word: f"use '{meant}'" for word, meant in (_SOURCE | _CLASS).items()},
    **dict.fromkeys(_DEVICE, "write it as device_map, at the top level"),
    "offload": "write it as low_memory, at the top level",
}
_IN_PLACEMENT = {
    **dict.fromkeys((*_DEVICE, "execution_device", "run", "runs_on"), "use 'execution'"),
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
    "": ("none",),
}
"""A value that is not accepted -> what it may mean, the first that is accepted where it stands."""


def key_hint(path: ConfigPath) -> str:
    """Return what to do with an unknown key at path, or nothing when only its spelling can tell."""
    key = str(path[-1])
    match path[:-1]:
        case ():
            return _AT_TOP.get(key, "")
        case ("pipeline",):
            return _IN_PIPELINE.get(key, "")
        case ("components", name):
            if key in _DEVICE or key == "devise":
                return f"it belongs under 'device_map.{name}'"
            if key in ("offload", "low_memory", "cpu_offload"):
                return f"write device_map.{name}: {{execution: cuda:0, offload: model}}"
            return _IN_PIPELINE.get(key, "")
        case _:
            return _IN_PLACEMENT.get(key, "")


def call_hint(name: str) -> str | None:
    """Return the usual parameter of a pipeline's call that name is another word for, or None."""
    return _AS_CALL_ARGUMENT.get(name)
