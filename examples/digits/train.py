"""Train a tiny but real Stable Diffusion pipeline that draws the digit its prompt names.

Data: the 1797 real 8x8 handwritten digits that ship inside scikit-learn, bicubically upsampled to 32x32 RGB.
Nothing is downloaded. Three steps, all on the CPU:

1. write a CLIP byte-pair vocabulary by hand (every word below is one token);
2. train an AutoencoderKL, 3x32x32 image <-> 4x8x8 latent;
3. train a UNet2DConditionModel and a CLIPTextModel jointly to predict the noise that DDPMScheduler.add_noise put on
   the latents, and keep a moving average of their weights.

The result is an ordinary diffusers folder: ``DiffusionPipeline.from_pretrained(OUT)``. How well it draws is for
``judge.py`` to say.

    python examples/digits/train.py [OUT, default the folder pipeline/ beside this file] [--force]

The order in which random numbers are drawn is part of the result: whoever moves a line here gets other weights.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

DEFAULT_OUT = Path(__file__).with_name("pipeline")

SEED = 0
IMAGE_SIZE = 32  # pixels, height and width
PROMPT_LENGTH = 16  # tokens, start, end and padding included
BATCH = 64  # images
VAE_STEPS, UNET_STEPS = 1200, 4000  # optimizer steps
WARMUP_STEPS = 100
VAE_LR, UNET_LR = 2e-3, 1e-3  # peak learning rates, cosine decay to zero
KL_WEIGHT = 1e-3  # on the mean KL per latent value; the reconstruction loss is a mean per pixel
EMPTY_PROMPT_RATE = 0.1  # share of prompts replaced by "", for classifier-free guidance
EMPTY_PROMPT = 10  # the eleventh "digit"

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
OTHER_WORDS = ["the", "digit", "number", "handwritten"]
TEMPLATES = ["{}", "{}", "a {}", "the digit {}", "the number {}", "a handwritten {}"]
NOISE_SCHEDULE: dict[str, Any] = {
    "num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
}  # fmt: skip


@dataclass
class Progress:
    """The running mean of a loss, printed with the time taken every 200 steps."""

    name: str
    steps: int
    start_s: float = field(default_factory=time.monotonic)
    mean: float | None = None

    def record(self, step: int, loss: float) -> None:
        """Take the loss of step (counted from 1) into the mean."""
        self.mean = loss if self.mean is None else 0.98 * self.mean + 0.02 * loss
        if step % 200 == 0 or step == self.steps:
            seconds = time.monotonic() - self.start_s
            print(f"{self.name:<4} {step:5d}/{self.steps}  loss {self.mean:.4f}  {seconds:5.0f} s", flush=True)


def load_images() -> tuple[Tensor, Tensor]:
    """Return (images, labels): float32 [1797, 3, 32, 32] in -1..1 (ink is +1), int64 [1797] in 0..9."""
    digits = load_digits()
    small = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # 0..16 -> -1..1
    large = functional.interpolate(small, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bicubic", align_corners=False)
    return large.clamp(-1, 1).expand(-1, 3, -1, -1).contiguous(), torch.tensor(digits.target)


def make_vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Return (tokens, merges): printable ASCII without capitals (CLIP lower-cases), and each known word as one token.

    A character stands alone or ends a word ("</w>"); one merge per letter joins a known word from left to right.
    """
    characters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    tokens = characters + [character + "</w>" for character in characters]
    merges: list[tuple[str, str]] = []
    for word in WORDS + OTHER_WORDS:
        pieces = [*word[:-1], word[-1] + "</w>"]
        for i in range(1, len(pieces)):
            merge = ("".join(pieces[:i]), pieces[i])
            if merge not in merges:
                merges.append(merge)
                tokens.append("".join(merge))
    return [*tokens, "<|startoftext|>", "<|endoftext|>"], merges


def make_tokenizer(folder: Path) -> CLIPTokenizer:
    """Write vocab.json and merges.txt into folder and return the tokenizer over them."""
    tokens, merges = make_vocabulary()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    return CLIPTokenizer.from_pretrained(folder, model_max_length=PROMPT_LENGTH)


def make_models(tokenizer: CLIPTokenizer) -> tuple[AutoencoderKL, CLIPTextModel, UNet2DConditionModel]:
    """Return the untrained models; their order here is the order in which their weights are drawn."""
    vae = AutoencoderKL(
        sample_size=IMAGE_SIZE, latent_channels=4, block_out_channels=(8, 16, 24), layers_per_block=1,
        down_block_types=["DownEncoderBlock2D"] * 3, up_block_types=["UpDecoderBlock2D"] * 3, norm_num_groups=4,
    )  # fmt: skip
    text_encoder = CLIPTextModel(CLIPTextConfig(
        vocab_size=len(tokenizer), max_position_embeddings=PROMPT_LENGTH, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, projection_dim=32, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    ))  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=IMAGE_SIZE // 4, in_channels=4, out_channels=4, block_out_channels=(32, 64), layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32, attention_head_dim=4, norm_num_groups=8,
    )  # fmt: skip
    return vae, text_encoder, unet


def make_optimizer(
    parameters: Sequence[nn.Parameter], learning_rate: float, steps: int
) -> tuple[Optimizer, SequentialLR]:
    """Return (AdamW, its schedule): a linear warm-up over 100 steps, then a cosine decay to zero."""
    optimizer = AdamW(parameters, lr=learning_rate, weight_decay=1e-4)
    warmup = LinearLR(optimizer, start_factor=0.01, total_iters=WARMUP_STEPS)
    cosine = CosineAnnealingLR(optimizer, T_max=steps - WARMUP_STEPS)
    return optimizer, SequentialLR(optimizer, [warmup, cosine], milestones=[WARMUP_STEPS])


def vae_loss(vae: AutoencoderKL, batch: Tensor) -> Tensor:
    """Return the mean squared error of batch [n, 3, 32, 32] there and back, plus the weighted KL of its latents."""
    posterior = vae.encode(batch).latent_dist
    reconstruction = functional.mse_loss(vae.decode(posterior.sample()).sample, batch)
    return reconstruction + KL_WEIGHT * posterior.kl().mean() / posterior.mean[0].numel()


def train_vae(vae: AutoencoderKL, images: Tensor) -> None:
    """Fit vae to images [n, 3, 32, 32] in -1..1, then set its scaling factor to 1 / (standard deviation of latents)."""
    optimizer, schedule = make_optimizer([*vae.parameters()], VAE_LR, VAE_STEPS)
    progress = Progress("vae", VAE_STEPS)
    for step in range(1, VAE_STEPS + 1):
        loss = vae_loss(vae, images[torch.randint(len(images), (BATCH,))])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress.record(step, loss.item())
    with torch.no_grad():
        latents = vae.eval().encode(images).latent_dist.sample()
    vae.register_to_config(scaling_factor=round(1 / latents.std().item(), 5))


def tokenize_prompts(tokenizer: CLIPTokenizer) -> list[Tensor]:
    """Return, for each digit and at last for the empty prompt, the token ids [forms, 16] of every way to ask for it."""
    prompts = [[form.format(name) for form in TEMPLATES for name in (word, str(n))] for n, word in enumerate(WORDS)]
    prompts.append([""])
    return [
        tokenizer(forms, padding="max_length", max_length=PROMPT_LENGTH, return_tensors="pt").input_ids
        for forms in prompts
    ]


@dataclass(frozen=True)
class Denoising:
    """What the UNet and the text encoder learn together: which noise was put on the latents of which digit."""

    unet: UNet2DConditionModel
    text_encoder: CLIPTextModel
    noise_scheduler: DDPMScheduler
    means: Tensor  # [n, 4, 8, 8], of the latents
    deviations: Tensor  # [n, 4, 8, 8]
    scaling_factor: float
    labels: Tensor  # [n]
    prompt_ids: list[Tensor]

    def loss(self) -> Tensor:
        """Return the mean squared error of the noise predicted for one random batch."""
        index = torch.randint(len(self.labels), (BATCH,))
        tokens = self._draw_prompts(self.labels[index])
        latents = self.means[index] + self.deviations[index] * torch.randn(BATCH, *self.means.shape[1:])
        latents = latents * self.scaling_factor
        noise = torch.randn_like(latents)
        timesteps = torch.randint(self.noise_scheduler.config.num_train_timesteps, (BATCH,))
        noisy = self.noise_scheduler.add_noise(latents, noise, timesteps)
        text = self.text_encoder(tokens).last_hidden_state  # [BATCH, 16, 32]
        return functional.mse_loss(self.unet(noisy, timesteps, text).sample, noise)

    def _draw_prompts(self, labels: Tensor) -> Tensor:
        prompts = torch.where(torch.rand(BATCH) < EMPTY_PROMPT_RATE, EMPTY_PROMPT, labels).tolist()
        drawn = []
        for prompt in prompts:
            forms = self.prompt_ids[prompt]
            drawn.append(forms[torch.randint(len(forms), ()).item()])
        return torch.stack(drawn)  # [BATCH, 16]


def train_unet(denoising: Denoising) -> None:
    """Fit the UNet and the text encoder; both end as the moving average of their weights."""
    parameters = [*denoising.unet.parameters(), *denoising.text_encoder.parameters()]
    optimizer, schedule = make_optimizer(parameters, UNET_LR, UNET_STEPS)
    average = EMAModel(parameters, decay=0.998, use_ema_warmup=True, power=0.8)
    progress = Progress("unet", UNET_STEPS)
    for step in range(1, UNET_STEPS + 1):
        loss = denoising.loss()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        average.step(parameters)
        progress.record(step, loss.item())
    average.copy_to(parameters)


def prefix_text_encoder(path: Path) -> None:
    """Name the text encoder's tensors in the safetensors file path ``text_model.*``, as published checkpoints do.

    transformers 5 saves them bare but reads both; transformers 4 reads only the prefixed names.
    """
    tensors = {"text_model." + name.removeprefix("text_model."): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def train_pipeline(tokenizer: CLIPTokenizer) -> StableDiffusionPipeline:
    """Return the trained pipeline over tokenizer."""
    images, labels = load_images()
    vae, text_encoder, unet = make_models(tokenizer)
    for name, model in (("vae", vae), ("text_encoder", text_encoder), ("unet", unet)):
        print(f"{name}: {sum(parameter.numel() for parameter in model.parameters())} parameters")
    train_vae(vae.train(), images)
    with torch.no_grad():
        posterior = vae.encode(images).latent_dist
    train_unet(Denoising(
        unet=unet.train(), text_encoder=text_encoder.train(),
        noise_scheduler=DDPMScheduler(**NOISE_SCHEDULE, prediction_type="epsilon"),
        means=posterior.mean, deviations=posterior.std, scaling_factor=vae.config.scaling_factor,
        labels=labels, prompt_ids=tokenize_prompts(tokenizer),
    ))  # fmt: skip
    scheduler = DDIMScheduler(**NOISE_SCHEDULE, clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    return StableDiffusionPipeline(
        vae=vae, text_encoder=text_encoder.eval(), tokenizer=tokenizer, unet=unet.eval(), scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def write_pipeline(out: Path) -> None:
    """Train everything and save it as the pipeline folder out."""
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)  # the sums, and so the weights, depend on the number of threads
    start_s = time.monotonic()
    train_pipeline(make_tokenizer(out / "tokenizer")).save_pretrained(out)
    prefix_text_encoder(out / "text_encoder" / "model.safetensors")
    print(f"saved {out} after {time.monotonic() - start_s:.0f} s")


def main() -> None:
    """Read the command line; an existing folder is only written over when ``--force`` says so."""
    parser = argparse.ArgumentParser(description="Train the digits pipeline (about ten minutes on two cores).")
    parser.add_argument("out", nargs="?", type=Path, default=DEFAULT_OUT, metavar="OUT", help="folder to write")
    parser.add_argument("--force", action="store_true", help="write over OUT when it exists")
    args = parser.parse_args()
    if args.out.exists() and not args.force:
        parser.error(f"{args.out} exists; name another folder, or write over it with --force")
    write_pipeline(args.out)


if __name__ == "__main__":
    main()
