"""Tiny pipelines that are made of two, each in a folder of its own: what ``_load_connected_pipes`` brings together.

``write_combined(kind, folder)`` writes ``folder/decoder`` and ``folder/prior``; ``CLASSES`` are the combined classes
over each kind, ``by_hand`` makes one of them as diffusers would. Sizes and seeds are those of ``tiny_pipelines``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DDPMWuerstchenScheduler,
    DiffusionPipeline,
    KandinskyPipeline,
    KandinskyPriorPipeline,
    KandinskyV22Pipeline,
    KandinskyV22PriorPipeline,
    PriorTransformer,
    StableCascadeDecoderPipeline,
    StableCascadePriorPipeline,
    StableCascadeUNet,
    UnCLIPScheduler,
    UNet2DConditionModel,
    VQModel,
    WuerstchenDecoderPipeline,
    WuerstchenPriorPipeline,
)
from diffusers.pipelines import kandinsky
from diffusers.pipelines.deprecated import wuerstchen
from diffusers.pipelines.deprecated.wuerstchen import PaellaVQModel, WuerstchenDiffNeXt, WuerstchenPrior
from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP
from PIL import Image
from transformers import CLIPVisionModelWithProjection

from tests import tiny_pipelines as tiny
from tests.tiny_pipelines import LENGTH, PROMPT, SEED, SIZE, WIDTH

CLASSES: Mapping[str, tuple[str, ...]] = {
    "kandinsky": ("KandinskyCombinedPipeline", "KandinskyImg2ImgCombinedPipeline"),
    "kandinsky-inpaint": ("KandinskyInpaintCombinedPipeline",),
    "kandinsky22": ("KandinskyV22CombinedPipeline", "KandinskyV22Img2ImgCombinedPipeline"),
    "kandinsky22-inpaint": ("KandinskyV22InpaintCombinedPipeline",),
    "cascade": ("StableCascadeCombinedPipeline",),
    "wuerstchen": ("WuerstchenCombinedPipeline",),
}


def write_combined(kind: str, folder: Path) -> Path:
    """Write the decoder and the prior of a kind into folder, in float32, and return folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        decoder, prior = _MAKERS[kind.removesuffix("-inpaint")](folder / "tokenizers")
        if kind.endswith("-inpaint"):  # latents, a mask, and the latents beneath it
            decoder.register_modules(unet=UNet2DConditionModel.from_config({**decoder.unet.config, "in_channels": 9}))
        for name, pipe in (("decoder", decoder), ("prior", prior)):
            for part in pipe.components.values():
                if isinstance(part, torch.nn.Module):
                    tiny.fill(part)
            pipe.save_pretrained(folder / name)
            _name_as_published(folder / name / "model_index.json")
    return folder


def _name_as_published(index: Path) -> None:
    """Name the package of Würstchen's models as published indexes do; what diffusers writes, it cannot load itself."""
    data = json.loads(index.read_text())
    for value in data.values():
        if isinstance(value, list) and str(value[1]).startswith(("Paella", "WuerstchenD", "WuerstchenP")):
            value[0] = "wuerstchen"
    index.write_text(json.dumps(data))


def by_hand(class_name: str, folder: Path) -> Any:
    """Return the combined pipeline of the two in folder, as ``_load_connected_pipes`` makes it, on the cpu.

    Weights are copied out of their files, as a move to a device does.
    """
    prior = {f"prior_{name}": part for name, part in _parts_in(folder / "prior").items()}
    return getattr(diffusers, class_name)(**_parts_in(folder / "decoder"), **prior)


def _parts_in(folder: Path) -> dict[str, Any]:
    """The components in a folder, each by its class: diffusers does not find all of their packages any more."""
    places = {"diffusers": diffusers, "transformers": transformers, "wuerstchen": wuerstchen, "kandinsky": kandinsky}
    parts: dict[str, Any] = {}
    for name, value in json.loads((folder / "model_index.json").read_text()).items():
        if isinstance(value, list):
            parts[name] = getattr(places[value[0]], value[1]).from_pretrained(folder / name) if value[0] else None
            if isinstance(parts[name], torch.nn.Module):
                tiny.copy_weights(parts[name].eval())
    return parts


def draw_combined(pipe: Any) -> np.ndarray:
    """Return what a combined pipeline of any class makes of the same prompt, in two steps."""
    pipe.set_progress_bar_config(disable=True)
    name = type(pipe).__name__
    is_kandinsky = name.startswith("Kandinsky")
    size = SIZE if is_kandinsky else 128
    more: dict[str, Any] = {"height": size, "width": size, "prior_num_inference_steps": 2, "num_inference_steps": 2}
    if "Img2Img" in name or "Inpaint" in name:
        more["image"] = Image.fromarray(np.arange(SIZE * SIZE * 3, dtype=np.uint8).reshape(SIZE, SIZE, 3))
    if "Img2Img" in name:
        more["strength"] = 0.6  # one of two steps
    if "Inpaint" in name:
        more["mask_image"] = np.eye(SIZE, dtype=np.float32)
    generator = torch.Generator().manual_seed(0)
    return np.asarray(pipe(prompt=PROMPT, generator=generator, output_type="np", **more).images)


def _prior_parts(tokenizers: Path) -> dict[str, Any]:
    tokenizer = tiny.clip_tokenizer(tokenizers)
    return {
        "prior": PriorTransformer(
            num_attention_heads=2, attention_head_dim=12, embedding_dim=WIDTH, num_layers=1, num_embeddings=LENGTH
        ),
        "image_encoder": CLIPVisionModelWithProjection(tiny.clip_vision_config()),
        "text_encoder": tiny.clip(tokenizer, projected=True),
        "tokenizer": tokenizer,
        "scheduler": UnCLIPScheduler(clip_sample_range=5.0, prediction_type="sample", variance_type="fixed_small_log"),
        "image_processor": tiny.clip_image_processor(),
    }


def _unet(**more: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=SIZE // 2, in_channels=4, out_channels=8, block_out_channels=(16, 32), layers_per_block=1,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"), norm_num_groups=8,
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"), attention_head_dim=4,
        mid_block_type="UNetMidBlock2DSimpleCrossAttn", cross_attention_dim=WIDTH, encoder_hid_dim=WIDTH,
        resnet_time_scale_shift="scale_shift", **more,
    )  # fmt: skip


def _movq() -> VQModel:
    return VQModel(
        block_out_channels=(32, 32), latent_channels=4, layers_per_block=1, norm_type="spatial",
        num_vq_embeddings=12, vq_embed_dim=4, down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
    )  # fmt: skip


def _kandinsky(tokenizers: Path) -> tuple[DiffusionPipeline, DiffusionPipeline]:
    tokenizer = tiny.clip_tokenizer(tokenizers)
    config = MCLIPConfig(
        transformerDimSize=WIDTH, imageDimSize=WIDTH, hidden_size=WIDTH, intermediate_size=32, num_attention_heads=2,
        num_hidden_layers=1, vocab_size=len(tokenizer), pad_token_id=1, max_position_embeddings=LENGTH * 8,
    )  # fmt: skip
    decoder = KandinskyPipeline(
        text_encoder=MultilingualCLIP(config),
        tokenizer=tokenizer,
        unet=_unet(encoder_hid_dim_type="text_image_proj", addition_embed_type="text_image"),
        scheduler=DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1, prediction_type="epsilon"),
        movq=_movq(),
    )
    return decoder, KandinskyPriorPipeline(**_prior_parts(tokenizers))


def _kandinsky22(tokenizers: Path) -> tuple[DiffusionPipeline, DiffusionPipeline]:
    decoder = KandinskyV22Pipeline(
        unet=_unet(encoder_hid_dim_type="image_proj", addition_embed_type="image"),
        scheduler=DDPMScheduler(clip_sample=False, steps_offset=1, variance_type="learned_range"),
        movq=_movq(),
    )
    return decoder, KandinskyV22PriorPipeline(**_prior_parts(tokenizers))


def _cascade(tokenizers: Path) -> tuple[DiffusionPipeline, DiffusionPipeline]:
    tokenizer = tiny.clip_tokenizer(tokenizers)
    text = {"clip_text_pooled_in_channels": WIDTH, "conditioning_dim": 32, "dropout": (0.0, 0.0)}
    both = {"block_out_channels": (16, 32), "down_num_layers_per_block": (1, 1), "up_num_layers_per_block": (1, 1)}
    prior = StableCascadeUNet(
        **text, **both, num_attention_heads=(2, 2), switch_level=(False,), clip_image_in_channels=WIDTH,
        clip_text_in_channels=WIDTH,
    )  # fmt: skip
    decoder = StableCascadeUNet(
        **text, **both, in_channels=4, out_channels=4, num_attention_heads=(-1, 2), effnet_in_channels=16,
        patch_size=2, timestep_conditioning_type=("sca",), block_types_per_layer=(
            ("SDCascadeResBlock", "SDCascadeTimestepBlock"),
            ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
        ),
    )  # fmt: skip
    text_encoder = tiny.clip(tokenizer, projected=True)
    return (
        StableCascadeDecoderPipeline(
            decoder=decoder, tokenizer=tokenizer, text_encoder=text_encoder, scheduler=DDPMWuerstchenScheduler(),
            vqgan=PaellaVQModel(bottleneck_blocks=1, num_vq_embeddings=2, embed_dim=16),
        ),
        StableCascadePriorPipeline(
            prior=prior, tokenizer=tokenizer, text_encoder=tiny.clip(tokenizer, projected=True),
            scheduler=DDPMWuerstchenScheduler(),
        ),
    )  # fmt: skip


def _wuerstchen(tokenizers: Path) -> tuple[DiffusionPipeline, DiffusionPipeline]:
    tokenizer = tiny.clip_tokenizer(tokenizers)
    decoder = WuerstchenDiffNeXt(
        c_cond=WIDTH, c_hidden=[32], nhead=[-1], blocks=[1], level_config=["CT"], clip_embd=WIDTH, c_r=16,
        inject_effnet=[False], dropout=[0.0],
    )  # fmt: skip
    return (
        WuerstchenDecoderPipeline(
            tokenizer=tokenizer, text_encoder=tiny.clip(tokenizer), decoder=decoder,
            scheduler=DDPMWuerstchenScheduler(),
            vqgan=PaellaVQModel(bottleneck_blocks=1, num_vq_embeddings=2, embed_dim=16),
        ),
        WuerstchenPriorPipeline(
            tokenizer=tokenizer, text_encoder=tiny.clip(tokenizer), scheduler=DDPMWuerstchenScheduler(),
            prior=WuerstchenPrior(c_in=16, c=16, depth=1, c_cond=WIDTH, c_r=16, nhead=2),
        ),
    )  # fmt: skip


_MAKERS: Mapping[str, Callable[[Path], tuple[DiffusionPipeline, DiffusionPipeline]]] = {
    "kandinsky": _kandinsky,
    "kandinsky22": _kandinsky22,
    "cascade": _cascade,
    "wuerstchen": _wuerstchen,
}
