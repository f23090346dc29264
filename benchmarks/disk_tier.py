"""What it costs to leave a UNet on disk: bytes copied by its load, and the time of its forward.

In dmconfig ``{execution: cuda:0, offload: model, storage: disk}`` leaves weights in the safetensors file they came in,
memory-mapped. The load therefore has to write nothing, and no parameter may lie in memory of its own.

There need not be an accelerator: ``cuda:0`` is a virtual device here, memory of the host, so bringing weights there is
a real copy and the forward is really computed. What is compared, always within one process, in turns:

- A step with the weights on the device, against the same UNet resident and memory-mapped as ``from_pretrained`` leaves
  it. This is every step of a call but the first under ``offload: model``.
- A step that brings weights (the first under ``model``, every one under ``sequential``), against the same offload of
  a UNet whose weights were read into memory. Both copy all weights to the device, as any offload does; they differ in
  where the copy is made from, and that is the price of the disk tier.
- ``device_map: cpu`` against the resident UNet.
- For scale, without a limit: the steps that bring weights, and accelerate's own ``disk_offload``, which first writes
  every weight to a file of its own, against the resident UNet.

Compared are seconds of processor time on one thread: other programs on the machine do not count, and with a warm page
cache there is nothing else to wait for (what was read from the disk is shown, and so is the time by the clock). The
UNet has the real shapes of Stable Diffusion 1.5, in bfloat16, as few processors compute in float16; the picture is
small, so that the share of the weights is large. The C library is told to keep the memory it has, as the allocators
of accelerators do; else the virtual device would pay for its pages on every step. All sides must give the same bits.

    python benchmarks/disk_tier.py [--size sd15] [--rounds 5] [--latents 16]

Linux only. The exit code is 1 when a load writes or copies anything, a forward takes over 1.1 of what it is compared
with, or the results differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from load import CACHE, SHAPES, make_folder

RATIO_LIMIT = 1.1
NOTES_LIMIT_BYTES = 100_000  # the file system notes when a file is read, which counts as written by the reader
OWN_LIMIT_BYTES = 100_000_000  # the modules themselves take about a third of it, without weights
LOAD_ROUNDS = 2
DEVICE = "cuda:0"
PARTS = ("unet", "vae", "text_encoder")
LOADS = ("model", "sequential", "accelerate")
SPEC = """\
version: 1
pipeline: {{source: ./{folder}}}
components: {{unet: {{source: ./{unet}}}}}
reserve: 0
device_map: cpu
"""
# name, side, what it is held against, whether the limit holds
COMPARED = (
    ("device_map: cpu", "cpu", "resident", True),
    ("offload: model, weights there", "model, disk", "resident", True),
    ("offload: model, bringing them", "model, disk, bringing", "model, memory, bringing", True),
    ("offload: sequential", "sequential, disk", "sequential, memory", True),
    ("offload: model, bringing them", "model, disk, bringing", "resident", False),
    ("offload: sequential", "sequential, disk", "resident", False),
    ("accelerate.disk_offload", "accelerate", "resident", False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load in one process: how long, and every kind of copy it might have made, in bytes."""

    load_s: float
    sent_bytes: int
    """Handed to the system to be written, to files or anything else (``wchar``)."""
    disk_bytes: int
    """Put on disk for this process, also through mapped files (``write_bytes``)."""
    new_files: int
    new_bytes: int
    """By how much the pipeline's folders and the temporary folder have grown."""
    own_bytes: int
    """By how much the process's own memory, which is no part of a file, has grown."""
    unmapped_bytes: int
    """Of the UNet's parameters, those that are not mapped from its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward."""

    processor_s: float
    clock_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwards:
    """The forwards of every side, round by round; what they read from the disk; the sides that differ in a bit."""

    steps: dict[str, list[Step]]
    read_bytes: int
    different: list[str]


# --- the pipeline -----------------------------------------------------------------------------------------------------


def make_pipeline(size: str) -> None:
    """Write the pipeline of ``load.py``, a bfloat16 UNet and a spec of both, unless an earlier run did."""
    folder, unet = make_folder(size), unet_folder(size)
    if not unet.exists():
        print(f"writing {unet}, once", flush=True)
        unfinished = unet.with_name(f"{unet.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        write_unet(folder / "unet", unfinished)
        unfinished.rename(unet)
    spec_file(size).write_text(SPEC.format(folder=folder.name, unet=unet.name))


def unet_folder(size: str) -> Path:
    """Return where the bfloat16 UNet of a size is."""
    return CACHE / f"{size}-unet-bfloat16"


def spec_file(size: str) -> Path:
    """Return where the spec of a size is."""
    return CACHE / f"{size}-disk.yaml"


def write_unet(like: Path, folder: Path) -> None:
    """Write a UNet of the configuration in like, with small random weights in bfloat16."""
    import torch
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(like))
    unet = unet.bfloat16().to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in unet.parameters():
        parameter.data.uniform_(-0.05, 0.05, generator=generator)
    unet.save_pretrained(folder)


def load_placed(size: str, offload: str, storage: str) -> Any:
    """Return the pipeline with every component offloaded so."""
    from dmconfig import load_from_yaml

    place = {"execution": DEVICE, "offload": offload, "storage": storage}
    return load_from_yaml(spec_file(size), {"device_map": dict.fromkeys(PARTS, place)})


def load_plain(size: str) -> Any:
    """Return the UNet as diffusers loads it: memory-mapped."""
    import torch
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel.from_pretrained(unet_folder(size), torch_dtype=torch.bfloat16).eval()


def load_offloaded(size: str) -> Any:
    """Return the UNet as ``accelerate.disk_offload`` leaves it: every weight written to the temporary folder."""
    import accelerate

    unet = load_plain(size)
    accelerate.disk_offload(unet, str(Path(tempfile.gettempdir()) / "offload"), execution_device=DEVICE)
    return unet


# --- one load, in its own process -------------------------------------------------------------------------------------


def measure_load(side: str, size: str) -> Load:
    """Return what a load leaves behind; for a fresh process, whose temporary folder is its own."""
    import accelerate  # noqa: F401 - else the load pays for the import, here and below
    from diffusers import StableDiffusionPipeline  # noqa: F401
    from transformers import CLIPTextModel, CLIPTokenizer  # noqa: F401

    from dmconfig import load_from_yaml  # noqa: F401
    from dmconfig.virtual import VirtualMachine

    folders = (CACHE, Path(tempfile.gettempdir()))
    with VirtualMachine([16 << 30]):
        files, sent, written, own = files_in(*folders), counted("wchar"), counted("write_bytes"), own_bytes()
        start = time.perf_counter()
        loaded = load_offloaded(size) if side == "accelerate" else load_placed(size, side, "disk")
        load_s = time.perf_counter() - start
        own, sent, written = own_bytes() - own, counted("wchar") - sent, counted("write_bytes") - written
        grown = [nbytes - files.get(file, 0) for file, nbytes in files_in(*folders).items()]
        unmapped = 0
        if side != "accelerate":
            loaded.reset_device_map()  # under sequential, the hooks have the weights until then
            unmapped = unmapped_bytes(loaded.unet, unet_folder(size))
    return Load(
        load_s=load_s, sent_bytes=sent, disk_bytes=written, new_files=sum(nbytes != 0 for nbytes in grown),
        new_bytes=sum(grown), own_bytes=own, unmapped_bytes=unmapped,
    )  # fmt: skip


def files_in(*folders: Path) -> dict[Path, int]:
    """Return every file below folders with its size."""
    return {file: file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file()}


def counted(name: str) -> int:
    """Return one of the system's counters of what this process has read and written so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def own_bytes() -> int:
    """Return this process's anonymous memory: that which is no part of a file."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def unmapped_bytes(module: Any, folder: Path) -> int:
    """Return the bytes of a module's parameters that are not mapped from a file in folder."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [line[0].split("-") for line in lines if len(line) == 6 and Path(line[5]).parent == folder]
    ranges = [(int(start, 16), int(end, 16)) for start, end in mapped]
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in module.parameters()
        if not any(start <= tensor.data_ptr() < end for start, end in ranges)
    )


# --- forwards, all sides in one process -------------------------------------------------------------------------------


Side = Callable[[], Iterator[tuple[str, Step, Any]]]
"""Runs a side once, and yields each forward: its name, what it took, and its result on the cpu."""


def measure_forwards(size: str, rounds: int, latents: int) -> Forwards:
    """Return the forwards of every side; who goes first changes every round, and a first round does not count."""
    import torch

    from dmconfig.virtual import VirtualMachine

    torch.set_num_threads(1)
    steps: dict[str, list[Step]] = {}
    different: set[str] = set()
    expected, read = None, 0
    with VirtualMachine([16 << 30]), torch.no_grad():
        sides = make_sides(size, latents)
        for number in range(rounds + 1):
            if number == 1:
                read = counted("read_bytes")
            first = number % len(sides)
            for side in (*sides[first:], *sides[:first]):
                for name, step, result in side():
                    expected = result if expected is None else expected
                    if not torch.equal(result, expected):
                        different.add(name)
                    if number > 0:
                        steps.setdefault(name, []).append(step)
        read = counted("read_bytes") - read
    return Forwards(steps=steps, read_bytes=read, different=sorted(different))


def make_sides(size: str, latents: int) -> list[Side]:
    """Return every side, loaded."""
    from dmconfig import load_from_yaml

    def staying(name: str, unet: Any, device: str) -> Side:
        """The side of a UNet of which every forward is like the one before."""

        def run() -> Iterator[tuple[str, Step, Any]]:
            yield name, *timed_forward(unet, device, latents)

        return run

    def brought(name: str, pipe: Any) -> Side:
        """The side of a UNet that a call's first forward brings, and that is there in the second."""

        def run() -> Iterator[tuple[str, Step, Any]]:
            yield f"{name}, bringing", *timed_forward(pipe.unet, DEVICE, latents)
            yield name, *timed_forward(pipe.unet, DEVICE, latents)
            pipe.maybe_free_model_hooks()  # the end of a call

        return run

    return [
        staying("resident", load_plain(size), "cpu"),
        staying("cpu", load_from_yaml(spec_file(size)).unet, "cpu"),
        brought("model, disk", load_placed(size, "model", "disk")),
        brought("model, memory", with_unet_in_memory(load_placed(size, "model", "cpu"), size)),
        staying("sequential, disk", load_placed(size, "sequential", "disk").unet, DEVICE),
        staying("sequential, memory", with_unet_in_memory(load_placed(size, "sequential", "cpu"), size).unet, DEVICE),
        staying("accelerate", load_offloaded(size), DEVICE),
    ]


def with_unet_in_memory(pipe: Any, size: str) -> Any:
    """Return pipe with a UNet whose weights were read: they rest in memory, and in no file."""
    from dmconfig import swap

    unet = load_plain(size)
    for parameter in unet.parameters():
        parameter.data = parameter.data.clone()
    swap(pipe, "unet", unet)
    return pipe


def timed_forward(unet: Any, device: str, latents: int) -> tuple[Step, Any]:
    """Return what a forward takes, with inputs that are on the device, and its result on the cpu."""
    import torch

    sample = torch.linspace(-2, 2, 4 * latents**2).reshape(1, 4, latents, latents)
    text = torch.linspace(-1, 1, 77 * unet.config.cross_attention_dim).reshape(1, 77, -1)
    arguments = [tensor.bfloat16().to(device) for tensor in (sample, torch.tensor(500.0), text)]
    clock, processor = time.perf_counter(), time.process_time()
    result = unet(*arguments).sample
    step = Step(processor_s=time.process_time() - processor, clock_s=time.perf_counter() - clock)
    return step, result.cpu()


# --- the comparison ---------------------------------------------------------------------------------------------------


def apart(*arguments: str) -> Any:
    """Return what this script, in a process of its own with an empty temporary folder, says to arguments."""
    keep_memory = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0"}
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as scratch:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), *arguments],
            env=os.environ | keep_memory | {"HF_HUB_OFFLINE": "1", "TMPDIR": scratch},
            cwd=scratch, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare_loads(size: str) -> dict[str, list[Load]]:
    """Return the loads of every side, in turns; a load before them, which fills caches, does not count."""
    apart("--load", LOADS[0], "--size", size)
    loads: dict[str, list[Load]] = {side: [] for side in LOADS}
    for _ in range(LOAD_ROUNDS):
        for side in LOADS:
            loads[side].append(Load(**apart("--load", side, "--size", size)))
    return loads


def compare_forwards(size: str, rounds: int, latents: int) -> Forwards:
    """Return the forwards of every side."""
    told = apart("--forwards", "--size", size, "--rounds", str(rounds), "--latents", str(latents))
    steps = {name: [Step(**step) for step in steps] for name, steps in told["steps"].items()}
    return Forwards(steps=steps, read_bytes=told["read_bytes"], different=told["different"])


def report_loads(loads: Mapping[str, list[Load]]) -> bool:
    """Print the table and return whether the loads of dmconfig wrote and copied nothing."""
    names = {"model": "offload: model", "sequential": "offload: sequential", "accelerate": "accelerate.disk_offload"}
    columns = ("load, median", "sent", "to disk", "new files", "their size", "own memory", "unmapped")
    print(f"{'load':24}  " + "  ".join(f"{column:>12}" for column in columns))
    for side, each in loads.items():
        most = {key: max(asdict(load)[key] for load in each) for key in asdict(each[0])}
        load_s = statistics.median(load.load_s for load in each)
        sizes = [most[key] for key in ("new_bytes", "own_bytes", "unmapped_bytes")]
        cells = [f"{load_s:.3f} s", shown(most["sent_bytes"]), shown(most["disk_bytes"]), str(most["new_files"])]
        print(f"{names[side]:24}  " + "  ".join(f"{cell:>12}" for cell in [*cells, *map(shown, sizes)]))
    ours = [load for side, each in loads.items() if side != "accelerate" for load in each]
    nothing = all(load.sent_bytes == load.new_files == load.new_bytes == load.unmapped_bytes == 0 for load in ours)
    notes, own = (max(getattr(load, key) for load in ours) for key in ("disk_bytes", "own_bytes"))
    return nothing and notes <= NOTES_LIMIT_BYTES and own <= OWN_LIMIT_BYTES


def shown(nbytes: int) -> str:
    """Return bytes in words: all of the digits where there are few."""
    return f"{nbytes} B" if nbytes < 100_000 else f"{nbytes / 1e6:.1f} MB"


def report_forwards(forwards: Forwards) -> bool:
    """Print both tables and return whether every ratio with a limit is within it and all results are the same."""
    print(f"\n{'forward, median':24}  {'processor':>12}  {'clock':>12}")
    for name, steps in sorted(forwards.steps.items()):
        processor_s, clock_s = (statistics.median(getattr(s, key) for s in steps) for key in ("processor_s", "clock_s"))
        print(f"{name:24}  {processor_s:10.3f} s  {clock_s:10.3f} s")
    print(f"read from disk meanwhile: {shown(forwards.read_bytes)}\n")
    print(f"{'ratio, median':30}  {'against':24}  {'processor':>9}  {'clock':>9}  limit")
    within = True
    for what, side, against, limited in COMPARED:
        ratio, by_clock = (ratio_of(forwards, side, against, key) for key in ("processor_s", "clock_s"))
        print(f"{what:30}  {against:24}  {ratio:9.3f}  {by_clock:9.3f}  {RATIO_LIMIT if limited else '-'}")
        within &= ratio <= RATIO_LIMIT or not limited
    if forwards.different:
        print("results differ:", *forwards.different, sep="\n  ")
    return within and not forwards.different


def ratio_of(forwards: Forwards, side: str, against: str, key: str) -> float:
    """Return the median of the rounds' own ratios: both were measured within seconds of each other."""
    pairs = zip(forwards.steps[side], forwards.steps[against], strict=True)
    ratio: float = statistics.median(getattr(ours, key) / getattr(theirs, key) for ours, theirs in pairs)
    return ratio


def main() -> None:
    """Compare everything and exit 1 when a limit is broken."""
    parser = argparse.ArgumentParser(description="What it costs to leave a UNet on disk.")
    parser.add_argument("--size", choices=sorted(SHAPES), default="sd15")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latents", type=int, default=16, help="height and width, an eighth of the picture's")
    parser.add_argument("--load", choices=LOADS, help=argparse.SUPPRESS)
    parser.add_argument("--forwards", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(asdict(measure_load(args.load, args.size))))
        return
    if args.forwards:
        print(json.dumps(asdict(measure_forwards(args.size, args.rounds, args.latents))))
        return
    if not sys.platform.startswith("linux"):
        sys.exit("this benchmark reads /proc, which only Linux has")
    make_pipeline(args.size)
    copies_nothing = report_loads(compare_loads(args.size))
    in_time = report_forwards(compare_forwards(args.size, args.rounds, args.latents))
    sys.exit(not (copies_nothing and in_time))


if __name__ == "__main__":
    main()
