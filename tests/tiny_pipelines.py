"""Tiny pipelines of the real classes, with random weights, in the diffusers layout: what a matrix of tests loads.

``write_tiny(kind, folder)`` writes one in a second or less; two runs write equal weights. No parameter is left at a
constant, as constructors leave zero convolutions and norms, so that every weight takes part in the picture. The
schedulers are those of the published pipelines. ``call_arguments(kind)`` are arguments for the pipeline's call: two
steps, a small size, guidance on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers import (
    AutoencoderKL,
    AutoencoderKLLTXVideo,
    AutoencoderKLWan,
    ControlNetModel,
    DDPMScheduler,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    KandinskyV22CombinedPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    PNDMScheduler,
    PriorTransformer,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UnCLIPScheduler,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
    VQModel,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
from packaging.version import Version
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

SEED = 0
SEEDS = (0, 1)  # of two generations
SIZE = 32  # pixels, height and width of every picture
WIDTH = 32  # of every text embedding
LENGTH = 16  # tokens, of every prompt
PROMPT, NEGATIVE_PROMPT = "a red fox", "blurry"

_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789,."
_NOISE: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def write_tiny(kind: str, folder: Path, dtype: str = "float32") -> Path:
    """Write the tiny pipeline of a kind into folder, with weights of dtype, and return folder.

    Raises: KeyError: there is no such kind; they are in ``KINDS``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        pipe: DiffusionPipeline = _MAKERS[kind](folder / "tokenizers")
        modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
        for module in modules:
            fill(module)
            module.to(getattr(torch, dtype))
    pipe.save_pretrained(folder)
    _name_as_published(folder / "model_index.json")
    return folder


def call_arguments(kind: str) -> dict[str, Any]:
    """Return arguments for the call of a kind, or of an image-to-image or inpainting class over it (``sd-img2img``).

    They are new objects each time; the generator is the caller's. The kinds are those of ``CALLS``.
    """
    return dict(CALLS[kind]())


def draw(pipe: Any, call: str, seed: int) -> np.ndarray:
    """Return what a pipeline makes of ``call_arguments(call)``: pictures or frames in 0..1, as floats."""
    pipe.set_progress_bar_config(disable=True)
    result = pipe(**call_arguments(call), generator=torch.Generator().manual_seed(seed))
    images: np.ndarray = result.images if hasattr(result, "images") else result.frames
    return images


def write_spec(kind: str, folder: Path) -> Path:
    """Write the tiny pipeline of a kind into a folder of its name in folder, and return a spec file beside it."""
    write_tiny(kind, folder / kind)
    file = folder / f"{kind}.yaml"
    file.write_text(f"version: 1\npipeline: {{source: ./{kind}}}\nreserve: 0\n", encoding="utf-8")
    return file


def in_dtype(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the argument with which diffusers, as installed, loads in a dtype."""
    return {"dtype" if Version(diffusers.__version__) >= Version("0.42") else "torch_dtype": dtype}


def write_picture(file: Path) -> Path:
    """Write a picture of SIZE, dark on the left and bright on the right, and return file."""
    rows = np.linspace(0, 255, SIZE, dtype=np.uint8)
    Image.fromarray(np.stack([np.broadcast_to(rows, (SIZE, SIZE))] * 3, -1)).save(file)
    return file


def kind_of(call: str) -> str:
    """Return the kind whose folder a call is for: ``sd`` for ``sd-img2img``."""
    return call.partition("-")[0]


def class_override(call: str) -> dict[str, Any]:
    """Return the override that names the pipeline class of a call, if it is not the one of the folder."""
    return {"pipeline.class": CLASSES[call]} if call in CLASSES else {}


@dataclass(slots=True, eq=False)
class Tiny:
    """The tiny pipelines in a folder, and what plain runs of them give; each made when it is first asked for.

    One is shared by all tests of a session (the fixture ``tiny``): what it hands out, but ``plain``, stays as it is.
    """

    folder: Path
    _specs: dict[str, Path] = field(default_factory=dict)
    _pictures: dict[tuple[str, frozenset[str]], list[np.ndarray]] = field(default_factory=dict)
    _modules: dict[str, Mapping[str, torch.nn.Module]] = field(default_factory=dict)

    def spec(self, call: str) -> Path:
        """Return the spec file of a call's pipeline; the pipeline is in the folder of its name beside it."""
        kind = kind_of(call)
        if kind not in self._specs:
            self._specs[kind] = write_spec(kind, self.folder)
        return self._specs[kind]

    def plain(self, call: str) -> Any:
        """Return a call's pipeline as diffusers loads it, on the cpu: a new one each time."""
        cls = getattr(diffusers, CLASSES[call]) if call in CLASSES else DiffusionPipeline
        return cls.from_pretrained(self.spec(call).with_suffix(""))

    def modules(self, call: str) -> Mapping[str, torch.nn.Module]:
        """Return the components of a plain pipeline that have weights: what the bytes of a plan are held against."""
        if call not in self._modules:
            self._modules[call] = modules_in(self.plain(call))
        return self._modules[call]

    def pictures(self, call: str, *, staying: frozenset[str] = frozenset()) -> list[np.ndarray]:
        """Return the pictures of a plain cpu run, one per seed, computed with one thread.

        ``staying`` are components that the placement leaves on the cpu. The weights of all others are copied first,
        as a move does.
        """
        key = (call, staying)
        if key not in self._pictures:
            pipe, threads = self.plain(call), torch.get_num_threads()
            for name, module in modules_in(pipe).items():
                if name not in staying:
                    copy_weights(module)
            torch.set_num_threads(1)
            self._pictures[key] = [draw(pipe, call, seed) for seed in SEEDS]
            torch.set_num_threads(threads)
        return self._pictures[key]


def modules_in(pipe: Any) -> dict[str, torch.nn.Module]:
    """Return the components of a pipeline that have weights."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def copy_weights(module: torch.nn.Module) -> None:
    """Copy the weights that are on the cpu, as a move does.

    diffusers maps the file, at whatever address, and a product of a matrix with one vector gives other bits where the
    matrix is not aligned to 16 bytes.
    """
    for parameter in module.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def _picture() -> torch.Tensor:
    """A colourful picture [1, 3, SIZE, SIZE] in 0..1, the same one each time."""
    rows = torch.linspace(0, 1, SIZE)
    return torch.stack([rows[:, None].expand(SIZE, SIZE), rows.expand(SIZE, SIZE), rows[:, None] * rows])[None]


def _mask() -> torch.Tensor:
    """A mask [1, 1, SIZE, SIZE]: the right half is to be painted."""
    mask = torch.zeros(1, 1, SIZE, SIZE)
    mask[..., SIZE // 2 :] = 1
    return mask


def _image_call(**more: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPT, "negative_prompt": NEGATIVE_PROMPT, "num_inference_steps": 2, "guidance_scale": 5.0,
        "height": SIZE, "width": SIZE, "output_type": "np", **more,
    }  # fmt: skip


def _on_a_picture(**more: Any) -> dict[str, Any]:
    """Arguments of an image-to-image call: the picture has the size, and strength leaves two of the steps."""
    arguments = _image_call(image=_picture(), strength=0.7, **more)
    del arguments["height"], arguments["width"]
    return {**arguments, "num_inference_steps": 3}


def _inpaint() -> dict[str, Any]:
    return {**_on_a_picture(mask_image=_mask()), "height": SIZE, "width": SIZE}


def _video_call() -> dict[str, Any]:
    return _image_call(num_frames=5, max_sequence_length=LENGTH)


def _prior_and_image_call() -> dict[str, Any]:
    """Arguments without a negative prompt: its place is then taken by what the image encoder makes of nothing."""
    arguments = _image_call(prior_num_inference_steps=2)
    del arguments["negative_prompt"]
    return arguments


CALLS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "sd": _image_call,
    "sd-img2img": _on_a_picture,
    "sd-inpaint": _inpaint,
    "sdxl": _image_call,
    "sdxl-img2img": _on_a_picture,
    "sdxl-inpaint": _inpaint,
    "sd3": lambda: _image_call(max_sequence_length=LENGTH),
    "flux": lambda: _image_call(max_sequence_length=LENGTH, true_cfg_scale=2.0),
    "wan": _video_call,
    "wan22": _video_call,
    "ltx": _video_call,
    "controlnet": lambda: _image_call(image=_picture(), controlnet_conditioning_scale=0.8),
    "kandinsky22": _prior_and_image_call,
}
CLASSES: Mapping[str, str] = {
    "sd-img2img": "StableDiffusionImg2ImgPipeline",
    "sd-inpaint": "StableDiffusionInpaintPipeline",
    "sdxl-img2img": "StableDiffusionXLImg2ImgPipeline",
    "sdxl-inpaint": "StableDiffusionXLInpaintPipeline",
}
"""Calls that need another class over the folder of the kind before the hyphen, under ``pipeline.class``."""


# Weights


def fill(module: torch.nn.Module) -> None:
    """Give every parameter that a constructor left constant some spread around that constant."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter) * 0.1)
        if isinstance(module, StableDiffusionSafetyChecker):  # thresholds that no cosine reaches: nothing is blackened
            module.concept_embeds_weights.fill_(2)
            module.special_care_embeds_weights.fill_(2)


# Tokenizers


def clip_tokenizer(folder: Path) -> CLIPTokenizer:
    """A CLIP tokenizer that knows letters, digits, comma and stop."""
    tokens = [*_CHARACTERS, *(f"{character}</w>" for character in _CHARACTERS), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(folder, model_max_length=LENGTH)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    return tokenizer


def _t5_tokenizer() -> Any:
    """A T5 tokenizer over the same characters, one token each."""
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((char, -3.0) for char in _CHARACTERS)]
    if Version(transformers.__version__) >= Version("5"):
        return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=LENGTH)
    tokenizer = Tokenizer(Unigram(vocab, unk_id=2))  # what later releases make of the vocabulary themselves
    tokenizer.pre_tokenizer = Metaspace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.T5TokenizerFast(tokenizer_object=tokenizer, extra_ids=0, model_max_length=LENGTH)


def _name_as_published(index: Path) -> None:
    """Write the class names that published pipelines have where transformers now saves others for the same thing."""
    text = index.read_text().replace('"T5Tokenizer"', '"T5TokenizerFast"')
    index.write_text(text.replace('"CLIPImageProcessorPil"', '"CLIPImageProcessor"'))


# Components


def clip(tokenizer: CLIPTokenizer, *, projected: bool = False) -> CLIPTextModel | CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), max_position_embeddings=LENGTH, hidden_size=WIDTH, intermediate_size=37,
        num_hidden_layers=2, num_attention_heads=4, projection_dim=WIDTH, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return CLIPTextModelWithProjection(config) if projected else CLIPTextModel(config)


def clip_vision_config() -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=37, projection_dim=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        image_size=SIZE, patch_size=8,
    )  # fmt: skip


def clip_image_processor() -> CLIPImageProcessor:
    return CLIPImageProcessor(crop_size={"height": SIZE, "width": SIZE}, size={"shortest_edge": SIZE})


def _t5(tokenizer: Any) -> T5EncoderModel:
    return T5EncoderModel(T5Config(**_t5_config(tokenizer)))


def _umt5(tokenizer: Any) -> UMT5EncoderModel:
    return UMT5EncoderModel(UMT5Config(**_t5_config(tokenizer)))


def _t5_config(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer), "d_model": WIDTH, "d_ff": 37, "d_kv": 8, "num_layers": 2, "num_heads": 4,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    }  # fmt: skip


def _vae(channels: int, **more: Any) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 16), latent_channels=channels, norm_num_groups=4, sample_size=SIZE,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **more,
    )  # fmt: skip


def _wan_vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )


def _wan_transformer() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16,
        text_dim=WIDTH, freq_dim=64, ffn_dim=32, num_layers=2, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip


_UNET_BLOCKS: dict[str, Any] = {
    "block_out_channels": (16, 32), "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "norm_num_groups": 8,
    "layers_per_block": 1, "cross_attention_dim": WIDTH, "attention_head_dim": 4,
}  # fmt: skip


def _sd_parts(tokenizers: Path) -> dict[str, Any]:
    tokenizer = clip_tokenizer(tokenizers)
    vision = clip_vision_config().to_dict()
    text = CLIPTextConfig(hidden_size=WIDTH, intermediate_size=37, num_hidden_layers=1, num_attention_heads=4).to_dict()
    return {
        "vae": _vae(4),
        "text_encoder": clip(tokenizer),
        "tokenizer": tokenizer,
        "unet": UNet2DConditionModel(
            sample_size=SIZE // 2, up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **_UNET_BLOCKS
        ),
        "scheduler": PNDMScheduler(**_NOISE, skip_prk_steps=True, set_alpha_to_one=False, steps_offset=1),
        "safety_checker": StableDiffusionSafetyChecker(
            CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH)
        ),
        "feature_extractor": clip_image_processor(),
    }


# Pipelines


def _sd(tokenizers: Path) -> StableDiffusionPipeline:
    return StableDiffusionPipeline(**_sd_parts(tokenizers))


def _controlnet(tokenizers: Path) -> StableDiffusionControlNetPipeline:
    controlnet = ControlNetModel(conditioning_embedding_out_channels=(8, 16), **_UNET_BLOCKS)
    return StableDiffusionControlNetPipeline(**_sd_parts(tokenizers), controlnet=controlnet)


def _sdxl(tokenizers: Path) -> StableDiffusionXLPipeline:
    tokenizer = clip_tokenizer(tokenizers)
    unet = UNet2DConditionModel(
        sample_size=SIZE // 2, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4), use_linear_projection=True, transformer_layers_per_block=(1, 2),
        addition_embed_type="text_time", addition_time_embed_dim=8, cross_attention_dim=2 * WIDTH,
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
    )  # fmt: skip
    return StableDiffusionXLPipeline(
        vae=_vae(4, scaling_factor=0.13025, force_upcast=True),
        text_encoder=clip(tokenizer),
        text_encoder_2=clip(tokenizer, projected=True),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet,
        scheduler=EulerDiscreteScheduler(**_NOISE, timestep_spacing="leading", steps_offset=1),
        add_watermarker=False,
    )


def _sd3(tokenizers: Path) -> StableDiffusion3Pipeline:
    tokenizer, t5_tokenizer = clip_tokenizer(tokenizers), _t5_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=SIZE // 2, patch_size=2, in_channels=16, out_channels=16, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, caption_projection_dim=WIDTH, joint_attention_dim=2 * WIDTH,
        pooled_projection_dim=2 * WIDTH, pos_embed_max_size=16, qk_norm="rms_norm",
    )  # fmt: skip
    t5 = T5EncoderModel(T5Config(**{**_t5_config(t5_tokenizer), "d_model": 2 * WIDTH}))
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(16, use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=clip(tokenizer, projected=True),
        tokenizer=tokenizer,
        text_encoder_2=clip(tokenizer, projected=True),
        tokenizer_2=tokenizer,
        text_encoder_3=t5,
        tokenizer_3=t5_tokenizer,
    )


def _flux(tokenizers: Path) -> FluxPipeline:
    tokenizer, t5_tokenizer = clip_tokenizer(tokenizers), _t5_tokenizer()
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=[4, 4, 8], guidance_embeds=True,
    )  # fmt: skip
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256,
            max_image_seq_len=4096,
        ),
        vae=_vae(4, use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=clip(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=_t5(t5_tokenizer),
        tokenizer_2=t5_tokenizer,
        transformer=transformer,
    )  # fmt: skip


def _wan(tokenizers: Path, **more: Any) -> WanPipeline:
    tokenizer = _t5_tokenizer()
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=_umt5(tokenizer),
        vae=_wan_vae(),
        scheduler=UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction"),
        transformer=_wan_transformer(),
        **more,
    )


def _wan22(tokenizers: Path) -> WanPipeline:
    return _wan(tokenizers, transformer_2=_wan_transformer(), boundary_ratio=0.875)


def _ltx(tokenizers: Path) -> LTXPipeline:
    tokenizer = _t5_tokenizer()
    vae = AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1), patch_size=1,
        spatio_temporal_scaling=(True, True, False, False), decoder_spatio_temporal_scaling=(True, True, False, False),
    )  # fmt: skip
    transformer = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=WIDTH,
        num_layers=2, caption_channels=WIDTH,
    )  # fmt: skip
    return LTXPipeline(
        tokenizer=tokenizer,
        text_encoder=_t5(tokenizer),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=True, shift_terminal=0.1),
        transformer=transformer,
    )


def _kandinsky22(tokenizers: Path) -> KandinskyV22CombinedPipeline:
    tokenizer = clip_tokenizer(tokenizers)
    unet = UNet2DConditionModel(
        sample_size=SIZE // 2, in_channels=4, out_channels=8, block_out_channels=(16, 32), layers_per_block=1,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"), norm_num_groups=8,
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"), attention_head_dim=4,
        mid_block_type="UNetMidBlock2DSimpleCrossAttn", cross_attention_dim=WIDTH, encoder_hid_dim=WIDTH,
        encoder_hid_dim_type="image_proj", addition_embed_type="image", resnet_time_scale_shift="scale_shift",
    )  # fmt: skip
    movq = VQModel(
        block_out_channels=(32, 32), latent_channels=4, layers_per_block=1, norm_type="spatial",
        num_vq_embeddings=12, vq_embed_dim=4, down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
    )  # fmt: skip
    prior = PriorTransformer(
        num_attention_heads=2, attention_head_dim=12, embedding_dim=WIDTH, num_layers=1, num_embeddings=LENGTH
    )
    return KandinskyV22CombinedPipeline(
        unet=unet,
        scheduler=DDPMScheduler(
            beta_start=0.00085, beta_end=0.012, clip_sample=False, steps_offset=1, variance_type="learned_range"
        ),
        movq=movq,
        prior_prior=prior,
        prior_image_encoder=CLIPVisionModelWithProjection(clip_vision_config()),
        prior_text_encoder=clip(tokenizer, projected=True),
        prior_tokenizer=tokenizer,
        prior_scheduler=UnCLIPScheduler(
            clip_sample_range=5.0, prediction_type="sample", variance_type="fixed_small_log"
        ),
        prior_image_processor=clip_image_processor(),
    )


_MAKERS: Mapping[str, Callable[[Path], DiffusionPipeline]] = {
    "sd": _sd,
    "sdxl": _sdxl,
    "sd3": _sd3,
    "flux": _flux,
    "wan": _wan,
    "wan22": _wan22,
    "ltx": _ltx,
    "controlnet": _controlnet,
    "kandinsky22": _kandinsky22,
}
KINDS = tuple(_MAKERS)
