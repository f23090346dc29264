"""Which pipeline's weights a file has: held against diffusers' own rules, on made-up files of every kind."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from diffusers.loaders.single_file_utils import fetch_diffusers_config

from dmconfig.checkpoint import part_of, pipeline_told_by
from dmconfig.facts import class_facts
from dmconfig.weights import TensorInfo

P = "model.diffusion_model."
SD_PARTS = {"first_stage_model.encoder.conv_in.weight": (128, 3, 3, 3), "cond_stage_model.x.weight": (4, 4)}
FLUX = {"double_blocks.0.img_attn.norm.key_norm.scale": (128,), "img_in.weight": (3072, 64)}
GUIDED = {"guidance_in.in_layer.bias": (3072,)}
WAN = {"head.modulation": (1, 2, 8)}
AURA = {
    "double_layers.0.attn.w2q.weight": (8, 8), "double_layers.0.attn.w1q.weight": (8, 8),
    "cond_seq_linear.weight": (8, 8), "t_embedder.mlp.0.weight": (8, 8),
}  # fmt: skip
V1 = {f"{P}output_blocks.11.0.skip_connection.weight": (320, 640, 1, 1)}
V2 = {f"{P}input_blocks.2.1.transformer_blocks.0.attn2.to_k.weight": (320, 1024)}
XL = {"conditioner.embedders.1.model.transformer.resblocks.9.mlp.c_proj.bias": (1280,)}

FILES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "sd 1.5": {**V1, **SD_PARTS, f"{P}input_blocks.0.0.weight": (320, 4, 3, 3)},
    "sd 1.5 inpainting": {**V1, f"{P}input_blocks.0.0.weight": (320, 9, 3, 3)},
    "sd 2.1": {**V1, **V2, f"{P}input_blocks.0.0.weight": (320, 4, 3, 3)},
    "sd 2 inpainting": {**V1, **V2, f"{P}input_blocks.0.0.weight": (320, 9, 3, 3)},
    "sdxl": {**XL, f"{P}input_blocks.0.0.weight": (320, 4, 3, 3)},
    "sdxl inpainting": {**XL, f"{P}input_blocks.0.0.weight": (320, 9, 3, 3)},
    "sdxl refiner": {"conditioner.embedders.0.model.transformer.resblocks.9.mlp.c_proj.bias": (1280,)},
    "playground": {**XL, "edm_mean": (4,)},
    "sd3": {
        f"{P}joint_blocks.0.context_block.adaLN_modulation.1.bias": (9216,),
        f"{P}pos_embed": (1, 36864, 1536),
    },
    "sd3.5 large": {f"{P}joint_blocks.37.x_block.mlp.fc1.weight": (9728, 2432)},
    "flux dev": {**FLUX, **GUIDED},
    "flux schnell": FLUX,
    "flux dev, prefixed": {P + name: shape for name, shape in {**FLUX, **GUIDED}.items()},
    "flux fill": {**FLUX, **GUIDED, "img_in.weight": (3072, 384)},
    "flux depth": {**FLUX, **GUIDED, "img_in.weight": (3072, 128)},
    "flux 2": {"single_stream_modulation.lin.weight": (8, 8), **FLUX},
    "chroma": {"distilled_guidance_layer.in_proj.bias": (8,), **FLUX},
    "hunyuan video": {"txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1.bias": (8,)},
    "auraflow": AURA,
    "pix2pix": {f"{P}input_blocks.0.0.weight": (320, 8, 3, 3)},
    "z-image": {"layers.0.adaLN_modulation.0.weight": (8, 8)},
    "lumina 2": {"cap_embedder.0.weight": (8,)},
    "sana": {"blocks.0.cross_attn.q_linear.weight": (8, 8)},
    "wan 1.3B": {**WAN, "patch_embedding.weight": (1536, 16, 1, 2, 2)},
    "wan 14B": {**WAN, "patch_embedding.weight": (5120, 16, 1, 2, 2)},
}  # fmt: skip


def infos(shapes: Mapping[str, tuple[int, ...]]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(name, "F16", shape, 2) for name, shape in shapes.items())


@pytest.mark.parametrize("kind", FILES)
def test_pipeline_told_by_is_the_one_diffusers_takes(kind: str) -> None:
    """Names and shapes alone tell what diffusers tells from the weights."""
    meta = {name: torch.empty(shape, device="meta") for name, shape in FILES[kind].items()}
    assert pipeline_told_by(infos(FILES[kind])) == fetch_diffusers_config(meta)["pretrained_model_name_or_path"]


@pytest.mark.parametrize("shapes", [{}, {"x.weight": (1,)}, {"encoder.conv_in.weight": (1,)}])
def test_pipeline_told_by_tells_nothing_of_what_it_does_not_know(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Diffusers takes every unknown file for Stable Diffusion 1.5; here one is asked."""
    assert pipeline_told_by(infos(shapes)) is None


def test_part_of_takes_each_component_s_own() -> None:
    """A pipeline's file is shared among its components by the beginnings of names."""
    names = {
        f"{P}out.2.bias": "unet", "first_stage_model.encoder.conv_in.bias": "vae",
        "conditioner.embedders.0.transformer.x": "text_encoder", "conditioner.embedders.1.model.x": "text_encoder_2",
        "model_ema.decay": None,
    }  # fmt: skip
    classes = {
        "unet": ("diffusers", "UNet2DConditionModel"), "vae": ("diffusers", "AutoencoderKL"),
        "text_encoder": ("transformers", "CLIPTextModel"),
        "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
        "image_encoder": ("transformers", "CLIPVisionModelWithProjection"),
    }  # fmt: skip
    tensors = infos(dict.fromkeys(names, (1,)))
    for component, (library, class_name) in classes.items():
        facts = class_facts(library, class_name)
        assert facts is not None
        held = [tensor.name for tensor in part_of(component, facts, tensors)]
        assert held == [name for name, owner in names.items() if owner == component]
