"""Sizes told before loading against what a load holds, to the byte, for every class of the catalogue made tiny.

The configs are the packaged ones of the public pipelines with other widths and depths, so that what a class does only
for some of them (ties, norms, embeddings, towers within towers) is done here too.
"""

from __future__ import annotations

import functools
import importlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dmconfig.assembly import Assembly, Component
from dmconfig.catalog import find_pipeline, known_ids
from dmconfig.configs import config_folder
from dmconfig.facts import class_facts, pipeline_facts
from dmconfig.footprint import Footprint, measure_configs, measure_tensors
from dmconfig.measure import measure
from dmconfig.source import Source
from dmconfig.weights import find_weights, read_tensors
from tests.conftest import DIGITS, resolved_from

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = ("float32", "float16", "bfloat16")

FIGURES = ("nbytes", "largest_leaf_bytes", "largest_block_bytes", "outside_blocks_bytes")

Config = dict[str, Any]

_CLIP: Config = {
    "vocab_size": 99, "max_position_embeddings": 16, "hidden_size": 32, "intermediate_size": 37,
    "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": 24,
}  # fmt: skip
_CLIP_VISION: Config = {
    "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": 24,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
_T5: Config = {"vocab_size": 99, "d_model": 32, "d_ff": 37, "d_kv": 8, "num_layers": 2, "num_heads": 4}
_LLM: Config = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
_QWEN_VL: Config = {
    **_LLM,
    "text_config": {
        **_LLM, "layer_types": ["full_attention"] * 2,
        "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [1, 1, 2]},
    },
    "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [1, 1, 2]},
    "vision_config": {
        "depth": 2, "fullatt_block_indexes": [1], "hidden_size": 32, "intermediate_size": 37, "num_heads": 4,
        "out_hidden_size": 32,
    },
}  # fmt: skip
_VAE: Config = {"block_out_channels": [8, 8, 16, 16], "norm_num_groups": 4, "sample_size": 32}
_VIDEO_VAE: Config = {"block_out_channels": [8, 8, 16, 16], "norm_num_groups": 4, "layers_per_block": 1}
_WAN_VAE: Config = {"base_dim": 4, "num_res_blocks": 1}
_UNET: Config = {"norm_num_groups": 8, "layers_per_block": 1, "cross_attention_dim": 32}
_WAN: Config = {
    "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 2, "text_dim": 32,
    "freq_dim": 32, "rope_max_seq_len": 32,
}  # fmt: skip
_FLUX: Config = {
    "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
    "joint_attention_dim": 32, "pooled_projection_dim": 32, "in_channels": 16, "axes_dims_rope": [4, 4, 8],
}  # fmt: skip
_FLUX2: Config = {
    "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
    "joint_attention_dim": 48, "in_channels": 16, "axes_dims_rope": [4, 4, 4, 4], "timestep_guidance_channels": 32,
}  # fmt: skip
_SD3: Config = {
    "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32,
    "joint_attention_dim": 48, "pooled_projection_dim": 48, "pos_embed_max_size": 16, "sample_size": 16,
}  # fmt: skip
_KANDINSKY5: Config = {
    "axes_dims": [2, 2, 4], "model_dim": 32, "ff_dim": 48, "in_text_dim": 24, "in_text_dim2": 16, "time_dim": 32,
    "num_text_blocks": 1, "num_visual_blocks": 2,
}  # fmt: skip

SHRUNK: Mapping[str, Config] = {
    "fal/AuraFlow-v0.3 text_encoder": _T5,
    "fal/AuraFlow-v0.3 transformer": {
        "attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 24,
        "num_mmdit_layers": 1, "num_single_dit_layers": 2, "pos_embed_max_size": 64, "sample_size": 16,
    },
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers vae": {
        "attention_head_dim": 4, "encoder_block_out_channels": [8] * 6, "decoder_block_out_channels": [8] * 6,
        "encoder_layers_per_block": [1] * 6, "decoder_layers_per_block": [1] * 6, "latent_channels": 4,
    },
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers transformer": {
        "attention_head_dim": 8, "num_attention_heads": 4, "caption_channels": 24, "cross_attention_dim": 32,
        "cross_attention_head_dim": 16, "num_cross_attention_heads": 2, "num_layers": 2, "in_channels": 4,
        "out_channels": 4,
    },
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers text_encoder": _LLM,
    "black-forest-labs/FLUX.1-dev vae": _VAE,
    "black-forest-labs/FLUX.1-dev transformer": _FLUX,
    "black-forest-labs/FLUX.1-dev text_encoder_2": _T5,
    "black-forest-labs/FLUX.1-schnell transformer": _FLUX,
    "black-forest-labs/FLUX.2-dev vae": {**_VAE, "latent_channels": 4},
    "black-forest-labs/FLUX.2-dev transformer": _FLUX2,
    "black-forest-labs/FLUX.2-klein-4B transformer": _FLUX2,
    "black-forest-labs/FLUX.2-dev text_encoder": {
        "text_config": _LLM,
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
            "image_size": 56,
        },
    },
    "black-forest-labs/FLUX.2-klein-4B text_encoder": _LLM,
    "Tongyi-MAI/Z-Image-Turbo text_encoder": _LLM,
    "Tongyi-MAI/Z-Image-Turbo transformer": {
        "axes_dims": [4, 2, 2], "axes_lens": [32, 32, 32], "cap_feat_dim": 24, "dim": 32, "n_heads": 4,
        "n_kv_heads": 4, "n_layers": 2, "n_refiner_layers": 1,
    },
    "zai-org/CogVideoX-5b vae": {**_VIDEO_VAE, "sample_height": 32, "sample_width": 32},
    "zai-org/CogVideoX-5b transformer": {
        "attention_head_dim": 8, "num_attention_heads": 4, "num_layers": 2, "text_embed_dim": 24, "time_embed_dim": 16,
        "max_text_seq_length": 8, "sample_frames": 5, "sample_height": 4, "sample_width": 4,
    },
    "hunyuanvideo-community/HunyuanVideo text_encoder": _LLM,
    "hunyuanvideo-community/HunyuanVideo transformer": {
        "attention_head_dim": 8, "num_attention_heads": 2, "num_layers": 1, "num_single_layers": 2,
        "num_refiner_layers": 1, "pooled_projection_dim": 24, "text_embed_dim": 24, "rope_axes_dim": [2, 2, 4],
    },
    "hunyuanvideo-community/HunyuanVideo vae": _VIDEO_VAE,
    "Lightricks/LTX-Video vae": {
        "block_out_channels": [8] * 4, "decoder_block_out_channels": [8] * 4, "layers_per_block": [1] * 5,
        "decoder_layers_per_block": [1] * 5, "latent_channels": 8,
    },
    "Lightricks/LTX-Video transformer": {
        "attention_head_dim": 16, "num_attention_heads": 2, "cross_attention_dim": 32, "caption_channels": 24,
        "num_layers": 2, "in_channels": 8, "out_channels": 8,
    },
    "Alpha-VLLM/Lumina-Image-2.0 transformer": {
        "axes_dim_rope": [4, 2, 2], "axes_lens": [32, 32, 32], "cap_feat_dim": 24, "hidden_size": 32, "multiple_of": 8,
        "num_attention_heads": 4, "num_kv_heads": 2, "num_layers": 2, "num_refiner_layers": 1, "sample_size": 16,
    },
    "animatediff-sd15 motion_adapter": {
        "block_out_channels": [8, 8, 16, 16], "motion_norm_num_groups": 4, "motion_num_attention_heads": 2,
        "motion_layers_per_block": 1,
    },
    "animatediff-sd15 vae": _VAE,
    "stable-diffusion-v1-5/stable-diffusion-v1-5 unet": {
        **_UNET, "block_out_channels": [8, 8, 16, 16], "attention_head_dim": 2,
    },
    "stable-diffusion-v1-5/stable-diffusion-v1-5 text_encoder": _CLIP,
    "stable-diffusion-v1-5/stable-diffusion-v1-5 safety_checker": {
        "projection_dim": 24, "text_config": _CLIP, "text_config_dict": None, "vision_config": _CLIP_VISION,
        "vision_config_dict": None,
    },
    "sd15-controlnet-canny controlnet": {
        **_UNET, "block_out_channels": [8, 8, 16, 16], "attention_head_dim": 2,
        "conditioning_embedding_out_channels": [4, 4, 8, 8],
    },
    "stabilityai/stable-diffusion-2-1 unet": {
        **_UNET, "block_out_channels": [8, 8, 16, 16], "attention_head_dim": [1, 1, 2, 2],
    },
    "stabilityai/stable-diffusion-xl-base-1.0 unet": {
        **_UNET, "block_out_channels": [8, 8, 16], "attention_head_dim": [1, 1, 2], "addition_time_embed_dim": 8,
        "transformer_layers_per_block": [1, 1, 2], "projection_class_embeddings_input_dim": 80,
    },
    "stabilityai/stable-diffusion-xl-base-1.0 text_encoder_2": _CLIP,
    "stabilityai/stable-diffusion-3-medium-diffusers transformer": _SD3,
    "stabilityai/stable-diffusion-3.5-large transformer": _SD3,
    "kandinsky-community/kandinsky-2-2-decoder unet": {
        **_UNET, "block_out_channels": [8, 8, 16, 16], "attention_head_dim": 4, "encoder_hid_dim": 24,
    },
    "kandinsky-community/kandinsky-2-2-decoder movq": {
        "block_out_channels": [32] * 4, "layers_per_block": 1, "num_vq_embeddings": 12,
    },
    "kandinsky-community/kandinsky-2-2-prior prior": {
        "num_attention_heads": 2, "attention_head_dim": 12, "embedding_dim": 32, "num_layers": 1, "num_embeddings": 16,
    },
    "kandinsky-community/kandinsky-2-2-prior image_encoder": _CLIP_VISION,
    "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers transformer": _KANDINSKY5,
    "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers transformer": _KANDINSKY5,
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS vae": _VAE,
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS transformer": {
        "attention_head_dim": 8, "num_attention_heads": 4, "caption_channels": 24, "cross_attention_dim": 32,
        "norm_num_groups": 4, "num_layers": 2, "sample_size": 16,
    },
    "Qwen/Qwen-Image vae": _WAN_VAE,
    "Qwen/Qwen-Image transformer": {
        "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 24, "axes_dims_rope": [4, 6, 6],
        "num_layers": 2, "in_channels": 16, "out_channels": 4,
    },
    "Qwen/Qwen-Image text_encoder": _QWEN_VL,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers text_encoder": _T5,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers transformer": _WAN,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers vae": _WAN_VAE,
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers transformer": _WAN,
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers vae": {**_WAN_VAE, "decoder_base_dim": 8},
}  # fmt: skip
"""A component of every class in the catalogue, and one more where pipelines use a class differently: what is less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """A component saved in every dtype, in folders of that name."""

    library: str
    class_name: str
    folder: Path

    @property
    def cls(self) -> Any:
        """Its class."""
        own = self.library not in ("diffusers", "transformers")
        package = f"diffusers.pipelines.{self.library}" if own else self.library
        return getattr(importlib.import_module(package), self.class_name)

    def load(self, stored: str, dtype: str) -> Any:
        """Return it as its own loader loads what was saved in stored."""
        argument = "torch_dtype" if self.library == "diffusers" else "dtype"
        how = {argument: getattr(torch, dtype), "use_safetensors": True}
        module = self.cls.from_pretrained(self.folder / stored, **how)
        assert isinstance(module, torch.nn.Module)
        return module

    def measure(self, stored: str, dtype: str) -> Footprint:
        """Return what a plan is made with: its footprint from what was saved in stored."""
        facts, facts_of_pipeline = class_facts(self.library, self.class_name), pipeline_facts("StableDiffusionPipeline")
        assert facts is not None
        assert facts_of_pipeline is not None
        source = Source(text=f"./{stored}", folder=self.folder)
        component = Component(
            name="part", library=self.library, class_name=self.class_name, facts=facts, source=source,
            folder=self.folder / stored, variant=None, variant_required=False, dtype=dtype, path=("components", "part"),
        )  # fmt: skip
        assembly = Assembly(
            class_name="StableDiffusionPipeline", source=source, facts=facts_of_pipeline, components=(component,),
            absent=(), config={},
        )  # fmt: skip
        return measure(resolved_from(DIGITS), assembly)["part"]


def shrunk(config: Config, less: Config) -> Config:
    """Return config with less in it; objects in it are shrunk alike."""
    nested = {
        key: shrunk(config[key], value)
        for key, value in less.items()
        if isinstance(value, dict) and value and isinstance(config.get(key), dict)
    }
    return {**config, **less, **nested}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """Save a component of ``SHRUNK`` in every dtype, once."""

    @functools.cache
    def save(case: str) -> Tiny:
        hub_id, name = case.split()
        pipeline, source = find_pipeline(hub_id), config_folder(hub_id)
        assert pipeline is not None
        assert source is not None
        part = pipeline.component(name)
        assert part is not None
        made = Tiny(library=part.library, class_name=part.class_name, folder=tmp_path_factory.mktemp("tiny"))
        config = json.loads((source / name / "config.json").read_bytes())
        (made.folder / "config.json").write_text(json.dumps(shrunk(config, SHRUNK[case])))
        module = built(made)
        assert sum(tensor.numel() for tensor in module.state_dict().values()) < 1_000_000
        for dtype in DTYPES:
            module.to(getattr(torch, dtype)).save_pretrained(made.folder / dtype)
        return made

    return save


def built(made: Tiny) -> Any:
    cls = made.cls
    if made.library == "diffusers":
        return cls.from_config(cls.load_config(made.folder))
    return cls(cls.config_class.from_pretrained(made.folder))


def held(module: torch.nn.Module, *, stored_only: bool = True) -> dict[str, torch.Tensor]:
    """Return the tensors that a module holds, each once: parameters, and buffers, those of the file alone if asked."""
    stored = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in stored or not stored_only}
    return {**dict(module.named_parameters()), **buffers}


def bytes_of(tensors: Mapping[str, torch.Tensor], path: str = "") -> int:
    """Return the bytes of the tensors in the module of that path, with all below it."""
    prefix = f"{path}." if path else ""
    return sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(prefix))


def parts_of(module: torch.nn.Module) -> dict[str, int]:
    """Return the largest parts of a loaded module, by walking through its modules."""
    tensors = held(module)
    own = {path: 0 for path, _ in module.named_modules()}
    for name, tensor in tensors.items():
        own[name.rpartition(".")[0]] += tensor.nbytes
    blocks = [
        bytes_of(tensors, f"{name}.{number}")
        for name, child in module.named_children()
        if isinstance(child, torch.nn.ModuleList | torch.nn.Sequential)
        for number in range(len(child))
    ]
    return {
        "nbytes": bytes_of(tensors),
        "largest_leaf_bytes": own.pop("") + max(own.values()),
        "largest_block_bytes": max(blocks, default=0),
        "outside_blocks_bytes": bytes_of(tensors) - sum(blocks),
    }


def figures(measured: Footprint) -> dict[str, int]:
    return {name: getattr(measured, name) for name in FIGURES}


def test_every_class_of_the_catalogue_is_made_tiny() -> None:
    """No class is left out; each is tried."""
    pipelines = [pipeline for pipeline in map(find_pipeline, known_ids()) if pipeline]
    classes = {part.class_name for pipeline in pipelines for part in pipeline.components if part.is_module}
    tried = set()
    for case in SHRUNK:
        hub_id, name = case.split()
        pipeline = find_pipeline(hub_id)
        part = pipeline.component(name) if pipeline else None
        assert part is not None, case
        tried.add(part.class_name)
    assert tried == classes
    assert len(classes) == 39


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SHRUNK)
def test_measure_equals_what_a_load_holds(tiny: Callable[[str], Tiny], case: str, dtype: str) -> None:
    """Whatever dtype the files are in: to the byte what is loaded, its largest layer and its largest block."""
    made = tiny(case)
    for stored in DTYPES:
        measured = made.measure(stored, dtype)
        module = made.load(stored, dtype)
        assert figures(measured) == parts_of(module), stored
        assert (measured.dtype, measured.stored_dtype, measured.measured_from) == (dtype, stored, "weights")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SHRUNK)
def test_measure_configs_equals_what_a_load_holds(
    tiny: Callable[[str], Tiny], case: str, dtype: str, tmp_path: Path
) -> None:
    """Where there are no weights, the config alone gives the bytes of a load, buffers that no file stores included."""
    made = tiny(case)
    shutil.copy(made.folder / "float32" / "config.json", tmp_path)
    measured = measure_configs(tmp_path, made.library, made.class_name, dtype)
    assert measured.nbytes == bytes_of(held(made.load("float32", dtype), stored_only=False))


def test_layers_that_stay_in_float32_are_those_of_four_classes(tiny: Callable[[str], Tiny]) -> None:
    """The exceptions are met here: T5's in float16, two transformers' in both; nothing else takes more than half."""
    more: dict[str, set[str]] = {dtype: set() for dtype in DTYPES}
    for case in SHRUNK:
        made = tiny(case)
        files = find_weights(made.folder / "float32", library=made.library, variant=None)
        assert files is not None
        for dtype in DTYPES:
            plain = measure_tensors(read_tensors(files), dtype=dtype)
            if made.measure("float32", dtype).nbytes > plain.nbytes:
                more[dtype].add(made.class_name)
    transformers = {"WanTransformer3DModel", "Kandinsky5Transformer3DModel"}
    encoders = {"T5EncoderModel", "UMT5EncoderModel"}
    assert more == {"float32": set(), "float16": transformers | encoders, "bfloat16": transformers}
