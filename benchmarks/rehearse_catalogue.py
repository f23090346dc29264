"""Rehearse every pipeline of the catalogue from the command line, at its own size: does it run, and what does it take?

Each is a process of its own, ``dmconfig rehearse``, with the denoisers on one device of 80 GiB and all else on another.
What comes out is held against what each pipeline returns by default, and the peaks against those of a former study
(``STUDY``), whose placements were made by accelerate's hooks. The exit code is 1 when one fails, returns something
else (a film that is too short, above all), is off by more than 2 % without an explanation here, or when FLUX takes more
processor time or memory than its limits.

    python benchmarks/rehearse_catalogue.py [ID ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmconfig.catalog import CatalogPipeline, find_pipeline
from dmconfig.configs import config_folder
from dmconfig.units import GIB, MIB

DMCONFIG = Path(sys.executable).with_name("dmconfig")
MACHINE = ("--gpus", "2x80GiB", "--ram", "256GiB")
DENOISERS = ("unet", "transformer", "transformer_2", "prior")
TOLERANCE = 0.02
FLUX, FLUX_LIMIT_S, FLUX_LIMIT_BYTES, FLUX_TRIES = "black-forest-labs/FLUX.1-dev", 8.0, 600 * MIB, 3

SD15, PRIOR = "stable-diffusion-v1-5/stable-diffusion-v1-5", "kandinsky-community/kandinsky-2-2-prior"
ELSEWHERE: Mapping[str, str] = {
    "animatediff-sd15": f"tokenizer: {{source: {SD15}}}",
    "sd15-controlnet-canny": f"tokenizer: {{source: {SD15}}}, feature_extractor: {{source: {SD15}}}",
    "kandinsky22-combined": f"prior_tokenizer: {{source: {PRIOR}, subfolder: tokenizer}}, "
    f"prior_image_processor: {{source: {PRIOR}, subfolder: image_processor}}",
}
"""Ids that are no ids on the hub: their packaged folder is the source, and what it lacks comes from these."""

BUILT_IN = ("motion_adapter",)
"""Components that never run themselves: AnimateDiff's pipeline makes a UNet of its own with it."""
TWICE = "its VAE keeps what it computed in lists that the study's hooks copied, so that there nothing was kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a pipeline returns by default, and the peaks in GiB of the former study; ``why`` the peaks differ, if so."""

    dtype: str = "bfloat16"
    output: tuple[int, ...]
    denoisers_gib: float
    others_gib: float
    why: str = ""


def picture(denoisers_gib: float, others_gib: float, side: int = 1024, dtype: str = "bfloat16") -> Expected:
    """Return what is expected of a pipeline that draws one square picture."""
    return Expected(dtype=dtype, output=(1, side, side), denoisers_gib=denoisers_gib, others_gib=others_gib)


def film(denoisers_gib: float, others_gib: float, size: tuple[int, int, int], dtype: str = "bfloat16") -> Expected:
    """Return what is expected of a pipeline that makes one film of so many frames, rows and columns."""
    output = (1, size[0], 3, *size[1:])
    return Expected(dtype=dtype, output=output, denoisers_gib=denoisers_gib, others_gib=others_gib)


STUDY: Mapping[str, Expected] = {
    "Alpha-VLLM/Lumina-Image-2.0": picture(5.33, 6.53),
    "animatediff-sd15": film(4.42, 7.17, (16, 512, 512), "float16"),
    "black-forest-labs/FLUX.1-dev": picture(22.62, 10.76),
    "black-forest-labs/FLUX.1-schnell": picture(22.61, 10.76),
    "black-forest-labs/FLUX.2-dev": picture(61.16, 46.40),
    "black-forest-labs/FLUX.2-klein-4B": picture(7.79, 9.16),
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers": picture(3.11, 7.08),
    "fal/AuraFlow-v0.3": picture(13.43, 6.07, dtype="float16"),
    "hunyuanvideo-community/HunyuanVideo": film(36.26, 49.27, (129, 720, 1280)),
    "kandinsky-community/kandinsky-2-2-decoder": picture(2.42, 0.75, 512, "float16"),
    "kandinsky-community/kandinsky-2-2-prior": Expected(
        dtype="float16", output=(1, 1280), denoisers_gib=1.92, others_gib=4.74
    ),
    "kandinsky22-combined": picture(2.42, 7.39, 512, "float16"),
    "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers": picture(12.62, 17.33),
    "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers": film(6.37, 30.85, (121, 512, 768)),
    "Lightricks/LTX-Video": film(4.49, 15.08, (161, 512, 704)),
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS": picture(1.37, 10.54),
    "Qwen/Qwen-Image": Expected(output=(1, 1024, 1024), denoisers_gib=38.41, others_gib=17.37, why=TWICE),
    "sd15-controlnet-canny": picture(1.76, 2.03, 512, "float16"),
    "stabilityai/stable-diffusion-2-1": picture(1.90, 1.64, 768, "float16"),
    "stabilityai/stable-diffusion-3-medium-diffusers": picture(4.20, 13.94, dtype="float16"),
    "stabilityai/stable-diffusion-3.5-large": picture(15.67, 12.06),
    "stabilityai/stable-diffusion-xl-base-1.0": picture(5.09, 4.84, dtype="float16"),
    "stable-diffusion-v1-5/stable-diffusion-v1-5": picture(1.73, 1.33, 512, "float16"),
    "Tongyi-MAI/Z-Image-Turbo": picture(12.40, 9.16),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": film(4.16, 14.82, (81, 480, 832)),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": film(30.16, 14.82, (81, 480, 832)),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": film(56.83, 14.82, (81, 480, 832)),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": film(10.87, 16.12, (81, 480, 832)),
    "zai-org/CogVideoX-5b": film(13.02, 24.04, (49, 480, 720)),
}
"""Torch 2.13, diffusers 0.42.1, two steps of each pipeline; all on virtual devices, none on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one process came to: seconds of wall time and of processor, its highest memory, and what is wrong."""

    hub_id: str
    seconds: float
    processor_s: float
    rss_bytes: int
    output: tuple[int, ...] = ()
    peaks_gib: tuple[float, ...] = ()
    why: str = ""
    complaints: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """``ok``, everything that is wrong, or why a figure differs."""
        return "; ".join(self.complaints) or (f"ok: {self.why}" if self.why else "ok")


def spec_of(pipeline: CatalogPipeline, dtype: str) -> str:
    """Return the text of a spec: the denoisers on one device, the rest on another."""
    components = [part.name for part in pipeline.components if part.is_module]
    places = {name: "cuda:0" if name in DENOISERS else "cuda:1" for name in components}
    source = pipeline.hub_id if "/" in pipeline.hub_id else config_folder(pipeline.hub_id)
    device_map = ", ".join(f"{name}: {device}" for name, device in places.items())
    lines = ["version: 1", f"pipeline: {{source: {source}, dtype: {dtype}}}", f"device_map: {{{device_map}}}"]
    more = ELSEWHERE.get(pipeline.hub_id)
    return "\n".join([*lines, "reserve: 0", *([f"components: {{{more}}}"] if more else [])]) + "\n"


def rehearsed(hub_id: str, folder: Path) -> Row:
    """Return what rehearsing one pipeline came to."""
    pipeline, expected = find_pipeline(hub_id), STUDY[hub_id]
    if pipeline is None:
        raise KeyError(hub_id)
    file = folder / "spec.yaml"
    file.write_text(spec_of(pipeline, expected.dtype), encoding="utf-8")
    out = folder / "out.json"
    start = time.perf_counter()
    with out.open("w", encoding="utf-8") as stdout:
        command = [str(DMCONFIG), "rehearse", str(file), *MACHINE, "--format", "json"]
        process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.DEVNULL)
        _pid, _status, usage = os.wait4(process.pid, 0)
    taken: dict[str, Any] = {
        "seconds": time.perf_counter() - start,
        "processor_s": usage.ru_utime + usage.ru_stime,
        "rss_bytes": usage.ru_maxrss * 1024,
    }
    try:
        result = json.loads(out.read_text(encoding="utf-8"))
    except ValueError:
        return Row(hub_id=hub_id, **taken, complaints=("no result",))
    return judged(hub_id, result, expected, taken)


def judged(hub_id: str, result: Mapping[str, Any], expected: Expected, taken: Mapping[str, Any]) -> Row:
    """Return a row, with what is wrong in what the command printed."""
    if "devices" not in result:
        return Row(hub_id=hub_id, **taken, complaints=(f"refused: {result['problems'][0]['what']}",))
    output = tuple(result["output"])
    peaks = tuple(device["peak"]["peak_bytes"] / GIB for device in result["devices"])
    complaints = [] if result["failure"] is None else [f"failed: {result['failure']['what']}"]
    if result["odd_output"]:
        complaints.append(result["odd_output"])
    if output != expected.output:
        complaints.append(f"returned {output} and not {expected.output}")
    idle = [name for name in result["never_ran"] if name not in BUILT_IN]
    if idle:
        complaints.append(f"never ran: {', '.join(idle)}")
    former = (expected.denoisers_gib, expected.others_gib)
    off = [abs(now / then - 1) > TOLERANCE for now, then in zip(peaks, former, strict=True)]
    if any(off) and not expected.why:
        complaints.append(f"peaks were {former[0]} and {former[1]} GiB")
    why = expected.why if any(off) else ""
    return Row(hub_id=hub_id, **taken, output=output, peaks_gib=peaks, why=why, complaints=tuple(complaints))


def flux_limits(folder: Path) -> str:
    """Return what is wrong with the best of a few runs of FLUX: other programs slow some down, and make none fast.

    Judged is processor time: it runs in one thread, so on an idle machine the clock is hardly behind it, and on a busy
    one the clock tells of the others. Both are printed.
    """
    rows = [rehearsed(FLUX, folder) for _ in range(FLUX_TRIES)]
    best = min(row.processor_s for row in rows)
    most = max(row.rss_bytes for row in rows)
    clock = min(row.seconds for row in rows)
    print(
        f"FLUX: {best:.1f} s of processor time ({clock:.1f} s by the clock) of at most {FLUX_LIMIT_S:g}, "
        f"{most / MIB:.0f} MiB of at most {FLUX_LIMIT_BYTES // MIB}"
    )
    return "FLUX is over its limits" if best > FLUX_LIMIT_S or most > FLUX_LIMIT_BYTES else ""


HEAD = ("pipeline", "wall s", "cpu s", "MiB", "what came out", "cuda:0 GiB", "cuda:1 GiB", "")


def cells(row: Row) -> tuple[str, ...]:
    """Return a row as text, cell by cell."""
    numbers = (f"{row.seconds:.1f}", f"{row.processor_s:.1f}", f"{row.rss_bytes / MIB:.0f}")
    peaks = [f"{peak:.2f}" for peak in row.peaks_gib] or ["-", "-"]
    return (row.hub_id, *numbers, "x".join(map(str, row.output)) or "-", *peaks, row.verdict)


def print_line(line: Sequence[str]) -> None:
    """Print one line of the table, as soon as it is known."""
    widths = (53, 6, 6, 4, 18, 10, 10, 0)
    print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def main() -> None:
    """Rehearse everything, print the table, and exit 1 when something is not as it should be."""
    parser = argparse.ArgumentParser(description="Rehearse the catalogue's pipelines, each in a process of its own.")
    parser.add_argument("ids", nargs="*", metavar="ID", help="default: all of them")
    ids = parser.parse_args().ids or list(STUDY)
    unknown = [each for each in ids if each not in STUDY]
    if unknown:
        parser.error(f"not in the catalogue: {', '.join(unknown)}")
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rehearsed(SD15, folder)  # fills the caches
        print_line(HEAD)
        for each in ids:
            row = rehearsed(each, folder)
            print_line(cells(row))
            wrong += bool(row.complaints)
        if FLUX in ids and (too_much := flux_limits(folder)):
            print(too_much)
            wrong += 1
    print(f"{len(ids) - min(wrong, len(ids))} of {len(ids)} as they should be")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
