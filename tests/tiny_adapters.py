"""Small adapters for the tiny pipelines, in the formats in which they are published, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import ControlNetModel, FluxTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import IPAdapterTimeImageProjection
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection, SiglipVisionConfig, SiglipVisionModel

from tests.tiny_pipelines import SIZE, WIDTH

RANK = 2


def write_lora(
    file: Path, module: torch.nn.Module, component: str, *, seed: int = 0, layers: tuple[str, ...] = ("to_q", "to_v")
) -> Path:
    """Write a LoRA, in peft's names, for the attention layers of a component; its weights are float32."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear) and path.rpartition(".")[2] in layers:
            tensors[f"{component}.{path}.lora_A.weight"] = torch.randn(RANK, layer.in_features, generator=generator)
            tensors[f"{component}.{path}.lora_B.weight"] = torch.randn(layer.out_features, RANK, generator=generator)
    return _write(file, tensors)


def write_kohya_lora(file: Path, module: torch.nn.Module) -> Path:
    """Write a LoRA for a UNet in the names of kohya's trainer, alphas among them."""
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, torch.Tensor] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear) and path.rpartition(".")[2] == "to_q":
            name = f"lora_unet_{path.replace('.', '_')}"
            tensors[f"{name}.lora_down.weight"] = torch.randn(RANK, layer.in_features, generator=generator)
            tensors[f"{name}.lora_up.weight"] = torch.randn(layer.out_features, RANK, generator=generator)
            tensors[f"{name}.alpha"] = torch.tensor(float(RANK))
    return _write(file, tensors)


def write_textual_inversion(file: Path, word: str = "<fox>", vectors: int = 2, width: int = WIDTH) -> Path:
    """Write a learned word of some vectors, in the format of diffusers."""
    return _write(file, {word: torch.randn(vectors, width, generator=torch.Generator().manual_seed(3))})


def write_textual_inversion_for_two(file: Path, width: int = WIDTH, vectors: int = 1) -> Path:
    """Write a learned word for two encoders, as SDXL has them."""
    generator = torch.Generator().manual_seed(4)
    return _write(file, {name: torch.randn(vectors, width, generator=generator) for name in ("clip_l", "clip_g")})


def write_ip_adapter(file: Path, unet: UNet2DConditionModel) -> Path:
    """Write an IP-Adapter for a UNet: a projection of image embeddings, and keys and values for cross-attention."""
    generator = torch.Generator().manual_seed(5)
    width = unet.config.cross_attention_dim

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors: dict[str, torch.Tensor] = {
        "image_proj.proj.weight": random(4 * width, WIDTH),
        "image_proj.proj.bias": random(4 * width),
        "image_proj.norm.weight": random(width),
        "image_proj.norm.bias": random(width),
    }
    number = 1
    for name in unet.attn_processors:
        if name.endswith("attn2.processor"):
            hidden = unet.get_submodule(name.removesuffix(".processor")).to_q.in_features
            tensors[f"ip_adapter.{number}.to_k_ip.weight"] = random(hidden, width)
            tensors[f"ip_adapter.{number}.to_v_ip.weight"] = random(hidden, width)
            number += 2
    return _write(file, tensors)


def write_flux_ip_adapter(file: Path, transformer: FluxTransformer2DModel) -> Path:
    """Write an IP-Adapter for FLUX, with the names of the published one."""
    generator = torch.Generator().manual_seed(7)
    width, inner = transformer.config.joint_attention_dim, transformer.inner_dim

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {
        "ip_adapter_proj_model.proj.weight": random(4 * width, WIDTH),
        "ip_adapter_proj_model.proj.bias": random(4 * width),
        "ip_adapter_proj_model.norm.weight": random(width),
        "ip_adapter_proj_model.norm.bias": random(width),
    }
    for number in range(transformer.config.num_layers):
        for letter in "kv":
            name = f"double_blocks.{number}.processor.ip_adapter_double_stream_{letter}_proj"
            tensors |= {f"{name}.weight": random(inner, width), f"{name}.bias": random(inner)}
    return _write(file, tensors)


def write_sd3_ip_adapter(file: Path, transformer: SD3Transformer2DModel) -> Path:
    """Write an IP-Adapter for Stable Diffusion 3: a projection that knows the time, and processors of attention."""
    config = transformer.config
    inner = config.attention_head_dim * config.num_attention_heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        projection = IPAdapterTimeImageProjection(
            embed_dim=WIDTH, output_dim=inner, hidden_dim=64, depth=4, dim_head=64, heads=1, num_queries=4,
            timestep_in_dim=32,
        )  # fmt: skip
        tensors = {f"image_proj.{name}": tensor for name, tensor in projection.state_dict().items()}
        for number in range(config.num_layers):
            processor = SD3IPAdapterJointAttnProcessor2_0(
                hidden_size=inner, ip_hidden_states_dim=inner, head_dim=config.attention_head_dim, timesteps_emb_dim=64
            )
            tensors |= {f"ip_adapter.{number}.{name}": tensor for name, tensor in processor.state_dict().items()}
    return _write(file, {name: tensor.clone() for name, tensor in tensors.items()})


def write_siglip(folder: Path) -> Path:
    """Write the image encoder that the IP-Adapter of Stable Diffusion 3 looks through."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        config = SiglipVisionConfig(
            hidden_size=WIDTH, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, image_size=SIZE,
            patch_size=8,
        )  # fmt: skip
        SiglipVisionModel(config).save_pretrained(folder)
    return folder


def write_image_encoder(folder: Path) -> Path:
    """Write the image encoder that IP-Adapters look through."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        config = CLIPVisionConfig(
            hidden_size=WIDTH, intermediate_size=37, projection_dim=WIDTH, num_hidden_layers=2, num_attention_heads=4,
            image_size=SIZE, patch_size=8,
        )  # fmt: skip
        CLIPVisionModelWithProjection(config).save_pretrained(folder)
    return folder


def write_controlnet(folder: Path, unet: UNet2DConditionModel, seed: int, **options: Any) -> Path:
    """Write a controlnet for a UNet, of which no weight is zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 16), **options)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        net.save_pretrained(folder)
    return folder


def _write(file: Path, tensors: dict[str, torch.Tensor]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file)
    return file
