"""Weights of tiny pipelines as their authors publish them: one file, in the names of before diffusers.

``write_checkpoint(folder, file)`` writes the Stable Diffusion pipeline of a folder so. The names are the inverse of
what diffusers' single-file loaders read; that a loader takes every tensor of them is for the tests to see.
``write_gguf`` writes a component's weights as a GGUF file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "diffusion_pytorch_model.safetensors"
_RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
    "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}  # fmt: skip
_UNET = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
}  # fmt: skip
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def write_checkpoint(folder: Path, file: Path, dtype: torch.dtype | None = None) -> Path:
    """Write the Stable Diffusion pipeline in folder, of one layer per block, as one file; return the file."""
    unet = load_file(folder / "unet" / WEIGHTS)
    vae = load_file(folder / "vae" / WEIGHTS)
    text = load_file(folder / "text_encoder" / "model.safetensors")
    tensors = {f"model.diffusion_model.{_unet_name(name)}": tensor for name, tensor in unet.items()}
    blocks = 1 + max(int(n) for name in vae for n in re.findall(r"^encoder\.down_blocks\.(\d+)", name))
    tensors |= {f"first_stage_model.{name}": tensor for name, tensor in _vae_tensors(vae, blocks)}
    for name, tensor in text.items():
        tensors[f"cond_stage_model.transformer.text_model.{name.removeprefix('text_model.')}"] = tensor
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return file


def _unet_name(name: str) -> str:
    for ours, theirs in _UNET.items():
        if name.startswith(f"{ours}."):
            return name.replace(ours, theirs, 1)
    kind, *rest = name.split(".")
    if kind == "mid_block":
        place = {"resnets.0": 0, "attentions.0": 1, "resnets.1": 2}[".".join(rest[:2])]
        return f"middle_block.{place}.{_layer(rest[0], rest[2:])}"
    block, what, number = int(rest[0]), rest[1], int(rest[2])
    if kind == "down_blocks":
        if what == "downsamplers":
            return f"input_blocks.{2 * (block + 1)}.0.op.{rest[-1]}"
        return f"input_blocks.{2 * block + number + 1}.{int(what == 'attentions')}.{_layer(what, rest[3:])}"
    if what == "upsamplers":
        return f"output_blocks.{2 * block + 1}.{1 if block == 0 else 2}.conv.{rest[-1]}"
    return f"output_blocks.{2 * block + number}.{int(what == 'attentions')}.{_layer(what, rest[3:])}"


def _layer(what: str, rest: list[str]) -> str:
    return f"{_RESNET[rest[0]]}.{rest[1]}" if what == "resnets" else ".".join(rest)


def _vae_tensors(vae: Mapping[str, torch.Tensor], blocks: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in vae.items():
        new = re.sub(r"down_blocks\.(\d+)\.resnets", r"down.\1.block", name)
        new = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", new)
        new = re.sub(r"up_blocks\.(\d+)\.", lambda match: f"up.{blocks - 1 - int(match[1])}.", new)
        new = new.replace(".resnets.", ".block.").replace("upsamplers.0", "upsample")
        new = re.sub(r"mid_block\.block\.(\d)", lambda match: f"mid.block_{int(match[1]) + 1}", new)
        new = new.replace("mid_block.attentions.0", "mid.attn_1")
        new = new.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
        if "attn_1" in new:
            for ours, theirs in _VAE_ATTENTION.items():
                new = new.replace(f"attn_1.{ours}.", f"attn_1.{theirs}.")
        yield new, tensor[:, :, None, None] if "attn_1" in new and tensor.ndim == 2 else tensor


def write_gguf(weights: Mapping[str, torch.Tensor], file: Path, architecture: str = "flux") -> Path:
    """Write weights as a GGUF file: matrices with rows of whole blocks as Q8_0, the rest as float32."""
    writer = gguf.GGUFWriter(file, architecture)
    for name, tensor in weights.items():
        data: np.ndarray[Any, Any] = tensor.to(torch.float32).numpy()
        fits = tensor.ndim == 2 and tensor.shape[-1] % 32 == 0
        kind = gguf.GGMLQuantizationType.Q8_0 if fits else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
