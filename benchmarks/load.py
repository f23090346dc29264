"""Compare ``dmconfig.load_from_yaml`` with ``DiffusionPipeline.from_pretrained`` on one and the same folder.

Each measurement is a fresh process, the two sides take turns, and medians are compared. The clock runs over the load
alone: torch, diffusers, the pipeline's classes and, on our side, dmconfig have been imported before it starts. The
peak is the whole process's, imports included. Both sides have to end with the same components, parameters and dtypes.

The pipeline is made here once, under ``build/bench``: a Stable Diffusion 1.5 in its real shapes and in float16, with
whatever the memory held for weights, since loading does not look at them.

    python benchmarks/load.py [--size sd15] [--rounds 7]

The exit code is 1 when dmconfig needs over 0.9 of the plain time or over 1.05 of the plain memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

CACHE = Path(__file__).resolve().parent.parent / "build" / "bench"
TIME_LIMIT, PEAK_LIMIT = 0.9, 1.05  # ours / plain
SIDES = ("plain", "dmconfig")
SPEC = """\
version: 1
pipeline: {{source: ./{folder}, dtype: float16}}
device_map: cpu
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes in which the pipelines of this benchmark differ."""

    unet_channels: tuple[int, int, int, int]
    vae_channels: tuple[int, int, int, int]
    text_width: int
    text_layers: int


SHAPES = {
    "sd15": Shape(  # 2.13 GB in float16
        unet_channels=(320, 640, 1280, 1280), vae_channels=(128, 256, 512, 512), text_width=768, text_layers=12
    ),
    "small": Shape(  # 27 MB, with as many tensors in UNet and VAE
        unet_channels=(32, 64, 128, 128), vae_channels=(32, 32, 64, 64), text_width=64, text_layers=2
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One load in one process."""

    load_s: float
    peak_bytes: int
    content: dict[str, list[Any]]
    """For each torch component: its number of parameters and their dtypes."""


# --- the pipeline -----------------------------------------------------------------------------------------------------


def make_folder(size: str) -> Path:
    """Return the folder of the named pipeline, written now unless an earlier run did."""
    folder = CACHE / size
    if not folder.exists():
        print(f"writing {folder}, once", flush=True)
        unfinished = CACHE / f"{size}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        # In another process: on Linux, one started from here begins with our memory as its peak.
        writer = multiprocessing.get_context("spawn").Process(target=write_pipeline, args=(unfinished, SHAPES[size]))
        writer.start()
        writer.join()
        if writer.exitcode != 0:
            sys.exit("the pipeline could not be written")
        unfinished.rename(folder)
    return folder


def write_pipeline(folder: Path, shape: Shape) -> None:
    """Write a float16 Stable Diffusion pipeline of this shape into folder."""
    import torch
    from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    tokenizer = write_tokenizer(folder / "tokenizer")
    with torch.device("meta"):
        unet = UNet2DConditionModel(
            sample_size=64, block_out_channels=shape.unet_channels, cross_attention_dim=shape.text_width
        )
        vae = AutoencoderKL(
            sample_size=512, latent_channels=4, block_out_channels=shape.vae_channels, layers_per_block=2,
            down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
        )  # fmt: skip
        text_encoder = CLIPTextModel(CLIPTextConfig(
            hidden_size=shape.text_width, intermediate_size=4 * shape.text_width, projection_dim=shape.text_width,
            num_hidden_layers=shape.text_layers, num_attention_heads=shape.text_width // 64,
        ))  # fmt: skip
    unet, vae, text_encoder = (model.half().to_empty(device="cpu") for model in (unet, vae, text_encoder))
    StableDiffusionPipeline(
        unet=unet, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer,
        scheduler=PNDMScheduler(beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip


def write_tokenizer(folder: Path) -> Any:
    """Return a CLIPTokenizer of the real one's size, 49408 tokens, over made-up merges of two characters each."""
    from transformers import CLIPTokenizer

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(code) for code in [*printable, *range(256, 512 - len(printable))]]  # one per byte, as in GPT-2
    merges = [(a, b) for a in alphabet for b in alphabet][: 49408 - 2 * len(alphabet) - 2]
    tokens = [*alphabet, *(character + "</w>" for character in alphabet), *(a + b for a, b in merges)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    return CLIPTokenizer.from_pretrained(folder, model_max_length=77)


# --- one measurement, in its own process ------------------------------------------------------------------------------


def measure(side: str, folder: Path, spec: Path) -> Measurement:
    """Return what loading folder costs here; for a fresh process, where nothing has been loaded before."""
    import torch
    from diffusers import AutoencoderKL, DiffusionPipeline, StableDiffusionPipeline, UNet2DConditionModel  # noqa: F401
    from transformers import CLIPTextModel, CLIPTokenizer  # noqa: F401 - else the first load pays for the import

    if side == "plain":
        start = time.perf_counter()
        pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float16)
    else:
        from dmconfig import load_from_yaml

        start = time.perf_counter()
        pipe = load_from_yaml(spec)
    load_s = time.perf_counter() - start
    return Measurement(load_s=load_s, peak_bytes=peak_bytes(), content=content_of(pipe))


def peak_bytes() -> int:
    """Return the most memory this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def content_of(pipe: DiffusionPipeline) -> dict[str, list[Any]]:
    """Return, for each torch component by name, [number of parameters, its dtypes]."""
    import torch

    modules = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    return {
        name: [
            sum(parameter.numel() for parameter in module.parameters()),
            sorted({str(parameter.dtype) for parameter in module.parameters()}),
        ]
        for name, module in sorted(modules.items())
    }


def measure_apart(side: str, folder: Path, spec: Path) -> Measurement:
    """Return the same from a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", side, str(folder), str(spec)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{side} failed:\n{done.stderr}")
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


# --- the comparison ---------------------------------------------------------------------------------------------------


def compare(folder: Path, rounds: int) -> dict[str, list[Measurement]]:
    """Return the measurements of both sides; who goes first changes every round, and a first round does not count."""
    spec = folder.with_suffix(".yaml")
    spec.write_text(SPEC.format(folder=folder.name))
    measured: dict[str, list[Measurement]] = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        for side in SIDES if number % 2 else reversed(SIDES):
            measurement = measure_apart(side, folder, spec)
            if number > 0:
                measured[side].append(measurement)
    return measured


def report(measured: dict[str, list[Measurement]]) -> bool:
    """Print the table and return whether dmconfig is within both limits."""
    load_s = {side: statistics.median(each.load_s for each in measured[side]) for side in SIDES}
    peak_mb = {side: statistics.median(each.peak_bytes for each in measured[side]) / 1e6 for side in SIDES}
    print(f"{'':10}  {'load, median':>12}  {'fastest':>9}  {'slowest':>9}  {'peak RSS':>9}")
    for side in SIDES:
        loads = [each.load_s for each in measured[side]]
        times = f"{load_s[side]:10.3f} s  {min(loads):7.3f} s  {max(loads):7.3f} s"
        print(f"{side:10}  {times}  {peak_mb[side]:6.0f} MB")
    time_ratio, peak_ratio = (value["dmconfig"] / value["plain"] for value in (load_s, peak_mb))
    print(f"time: {time_ratio:.3f} of plain (at most {TIME_LIMIT}); peak: {peak_ratio:.3f} (at most {PEAK_LIMIT})")
    return time_ratio <= TIME_LIMIT and peak_ratio <= PEAK_LIMIT


def same_content(measured: dict[str, list[Measurement]]) -> bool:
    """Return whether every process ended with the same pipeline; say so when not."""
    contents = {json.dumps(each.content) for side in SIDES for each in measured[side]}
    if len(contents) > 1:
        print("the pipelines differ:", *contents, sep="\n  ")
    return len(contents) == 1


def main() -> None:
    """Compare both sides and exit 1 when dmconfig is over a limit."""
    parser = argparse.ArgumentParser(description="Compare loading through dmconfig with plain diffusers.")
    parser.add_argument("--size", choices=sorted(SHAPES), default="sd15")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--measure", nargs=3, metavar=("SIDE", "FOLDER", "SPEC"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        side, folder, spec = args.measure
        print(json.dumps(asdict(measure(side, Path(folder), Path(spec)))))
        return
    measured = compare(make_folder(args.size), args.rounds)
    within_limits = report(measured)
    sys.exit(not (same_content(measured) and within_limits))


if __name__ == "__main__":
    main()
