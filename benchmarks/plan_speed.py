"""Time a plan: ``dmconfig plan`` of FLUX.1-dev as a whole process, and the search behind ``auto`` alone.

FLUX.1-dev is planned from true headers and from the packaged catalogue. The headers are those of all its tensors, with
their real names, shapes and shards; the files' bodies are holes, so 34 GB take some hundred kilobytes of disk. They are
written to a temporary folder. Each round is a process of its own, and the median counts.

The search is timed on every pipeline of the catalogue and the machines of ``placement_quality.py`` with 64 GiB of host
memory, and on twenty times eight random components on eight unequal devices: once whole, once with the denoisers open
to be split, and once with all but the VAE. Of three runs of each search the quickest counts; one of over a second is
not repeated.

Limits hold for processor time, which other programs on the machine change little. The exit code is 1 when one is
broken, or when a command fails.

    python benchmarks/plan_speed.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from placement_quality import HEADINGS, MACHINES, catalogue_ids, configs_of, read_figures, task_of, write_spec
from processes import DMCONFIG, ROOT, Took, installed_environment, medians, run_process

from dmconfig.catalog import CatalogPipeline, find_pipeline
from dmconfig.footprint import Footprint, build_on_meta
from dmconfig.inventory import parse_machine
from dmconfig.layout import LaidOutModule, Layout
from dmconfig.plan.calls import DECODER, DENOISER, TOKENS, Runs, role_of
from dmconfig.plan.fastest import Fastest, Question, fastest
from dmconfig.plan.prices import Prices
from dmconfig.plan.requests import Request, all_places
from dmconfig.plan.task import Task
from dmconfig.plan.uses import Limits, Load
from dmconfig.spec import Spec
from dmconfig.units import GIB

FLUX = "black-forest-labs/FLUX.1-dev"
FLUX_MACHINES = ("2x24GiB", "16GiB,12GiB")
HOST = "64GiB"
PLAN_LIMIT_S, CATALOGUE_LIMIT_S, RANDOM_LIMIT_S = 0.2, 0.05, 1.0
SEARCHES = 3
SEEDS = range(20)
COMPONENTS = (
    "transformer", "transformer_2", "controlnet", "text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder",
    "vae",
)  # fmt: skip
OPEN_TO_SPLIT = {"whole": (), "3 may be split": (DENOISER,), "7 may be split": {*TOKENS} - {DECODER}}
BLOCKS = 40
RESERVE = 3 * GIB // 2


@dataclass(frozen=True, slots=True)
class Searched:
    """One search: what it took, where, and what it says of its answer."""

    subject: str
    took: Took
    found: Fastest | None


# --- whole processes --------------------------------------------------------------------------------------------------


def write_headers(pipeline: CatalogPipeline, folder: Path) -> Path:
    """Return a spec beside the pipeline's files: true headers, and holes for bodies. Imports torch."""
    spec, configs = write_spec(pipeline, folder), configs_of(pipeline.hub_id)
    for component in pipeline.components:
        if component.is_module:
            module = build_on_meta(configs / component.name, component.library, component.class_name, "bfloat16")
            is_diffusers = component.library == "diffusers"
            stem, shard_bytes = ("diffusion_pytorch_model", 10 * 10**9) if is_diffusers else ("model", 5 * 10**9)
            write_weights(folder / configs.name / component.name, stem, shard_bytes, stored_shapes(module))
    return spec


def stored_shapes(module: Any) -> Mapping[str, Sequence[int]]:
    """Return the shape of every tensor that is stored, tied ones once."""
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items() if name in names}


def write_weights(folder: Path, stem: str, shard_bytes: int, shapes: Mapping[str, Sequence[int]]) -> None:
    """Write safetensors files in bfloat16 of at most so many bytes, with an index where there are several."""
    sys.path.insert(0, str(ROOT))
    from tests.sparse_weights import write_safetensors, write_sharded

    shards: list[dict[str, tuple[str, Sequence[int]]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        nbytes = 2 * math.prod(shape)
        if filled + nbytes > shard_bytes:
            shards.append({})
            filled = 0
        filled += nbytes
        shards[-1][name] = ("BF16", shape)
    if len(shards) == 1:
        write_safetensors(folder / f"{stem}.safetensors", shards[0])
    else:
        write_sharded(folder, stem, shards)


def flux_specs(folder: Path) -> Mapping[str, Path]:
    """Return two specs in folder: one that is planned from headers, and one from the catalogue."""
    pipeline = find_pipeline(FLUX)
    if pipeline is None:
        raise RuntimeError(f"{FLUX} is not in the catalogue")
    catalogued = folder / "flux.yaml"
    catalogued.write_text(f"version: 1\npipeline: {{source: {FLUX}, dtype: bfloat16}}\ndevice_map: auto\n")
    return {"headers": write_headers(pipeline, folder), "catalogue": catalogued}


def plan_flux(rounds: int) -> Iterator[tuple[str, Took]]:
    """Yield what ``dmconfig plan`` takes from headers and from the catalogue; a run that warms the caches is not in."""
    with tempfile.TemporaryDirectory() as folder:
        environment = installed_environment(Path(folder)) | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": folder}
        for name, spec in flux_specs(Path(folder)).items():
            for gpus in FLUX_MACHINES:
                command = [*DMCONFIG, "plan", str(spec), "--gpus", gpus, "--ram", HOST]
                _, exit_code = run_process(command, environment)
                if exit_code:
                    raise RuntimeError(f"{' '.join(command)} ended with {exit_code}")
                yield f"{name}, {gpus}", medians([run_process(command, environment)[0] for _ in range(rounds)])


# --- the search alone -------------------------------------------------------------------------------------------------


def timed_search(subject: str, search: Callable[[], Fastest | None]) -> Searched:
    """Return the quickest of some searches for the same; a slow one is not repeated."""
    runs: list[Took] = []
    found = None
    while len(runs) < SEARCHES and sum(took.processor_s for took in runs) < RANDOM_LIMIT_S:
        processor, clock = time.process_time(), time.perf_counter()
        found = search()
        runs.append(Took(time.process_time() - processor, time.perf_counter() - clock))
    return Searched(subject, min(runs, key=lambda took: took.processor_s), found)


def search_catalogue() -> Iterator[Searched]:
    """Yield the search for every pipeline on every machine."""
    for figures in read_figures(catalogue_ids()):
        for heading, gpus in zip(HEADINGS, MACHINES, strict=True):
            task = task_of(figures, parse_machine(gpus, HOST))
            yield timed_search(f"{figures.hub_id} on {heading}", functools.partial(search, task))


def search(task: Task) -> Fastest | None:
    """Return what the search behind ``auto`` says."""
    solution = task.found()
    return None if solution is None else solution.fastest


def search_random(roles: Collection[str]) -> Iterator[Searched]:
    """Yield the search for random components on random devices; those of these roles may be split."""
    for seed in SEEDS:
        question = random_question(seed)
        layouts = {name: layout for name, layout in question.layouts.items() if role_of(name) in roles}
        yield timed_search(f"seed {seed}", functools.partial(fastest, replace(question, layouts=layouts)))


def random_question(seed: int) -> Question:
    """Return eight components on eight devices of different sizes, from half empty to a third too small."""
    choose = random.Random(seed)  # noqa: S311 - nothing is kept secret
    sizes = choose.sample(range(8, 49), 8)
    inventory = parse_machine(",".join(f"{size}GiB" for size in sizes), HOST)
    shares = {name: choose.uniform(0.05, 1) ** 2 for name in COMPONENTS}
    total = choose.uniform(0.5, 1.3) * sum(size * GIB - RESERVE for size in sizes)
    weights = {name: int(share / sum(shares.values()) * total) for name, share in shares.items()}
    runs = {name: Runs(50 if role_of(name) == DENOISER else 1, TOKENS[role_of(name)]) for name in COMPONENTS}
    spec = Spec.model_validate({"version": 1, "pipeline": {"source": FLUX}, "device_map": "auto"})
    places = all_places(spec, tuple(device.id for device in inventory.accelerators))
    budgets = {device.id: device.total_bytes for device in inventory.devices} | {"disk": 1 << 60}
    return Question(
        requests=dict.fromkeys(COMPONENTS, Request(places, "auto")),
        loads={name: load_of(nbytes) for name, nbytes in weights.items()},
        limits=Limits(budgets=budgets, reserve=RESERVE),
        prices=Prices(
            inventory=inventory, runs=runs, footprints={name: footprint_of(weights[name]) for name in COMPONENTS}
        ),
        layouts={name: layout_of(weights[name]) for name in COMPONENTS},
    )


def load_of(nbytes: int) -> Load:
    """Return the load of a component of equal blocks of eight layers."""
    return Load(nbytes=nbytes, largest_leaf_bytes=nbytes // BLOCKS // 8, group_bytes=nbytes // BLOCKS)


def footprint_of(nbytes: int) -> Footprint:
    """Return the size of such a component."""
    return Footprint(
        nbytes=nbytes, dtype="bfloat16", stored_dtype="bfloat16", largest_leaf_bytes=nbytes // BLOCKS // 8,
        largest_block_bytes=nbytes // BLOCKS, outside_blocks_bytes=0, needs_cast=False, measured_from="catalogue",
    )  # fmt: skip


def layout_of(nbytes: int) -> Layout:
    """Return the layout of such a component, its blocks as one layer each."""
    blocks = (LaidOutModule(f"blocks.{number}", nbytes // BLOCKS, whole=True) for number in range(BLOCKS))
    rest = nbytes - nbytes // BLOCKS * BLOCKS
    return Layout(modules=(LaidOutModule("", rest, whole=False), *blocks), can_split=True)


# --- the table --------------------------------------------------------------------------------------------------------


def report_plans(plans: Sequence[tuple[str, Took]]) -> bool:
    """Print what whole processes took; return whether all are within the limit."""
    print(f"{'dmconfig plan of FLUX.1-dev, median':44}  {'processor':>9}  {'clock':>7}  limit")
    for name, took in plans:
        verdict = "" if took.processor_s <= PLAN_LIMIT_S else "  too slow"
        print(f"{name:44}  {took.processor_s:7.3f} s  {took.clock_s:5.3f} s  {PLAN_LIMIT_S}{verdict}")
    return all(took.processor_s <= PLAN_LIMIT_S for _, took in plans)


def report_searches(name: str, searches: Sequence[Searched], limit_s: float) -> bool:
    """Print what searches took, the slowest by name; return whether all are within the limit."""
    times = [searched.took.processor_s for searched in searches]
    slow = sorted((s for s in searches if s.took.processor_s > limit_s), key=lambda s: -s.took.processor_s)
    worst = max(searches, key=lambda searched: searched.took.processor_s)
    cut = sum(searched.found is not None and not searched.found.proven for searched in searches)
    print(f"{name:44}  {len(times):5}  {statistics.median(times) * 1e3:7.1f} ms  {max(times) * 1e3:7.1f} ms", end="")
    print(f"  {limit_s * 1e3:5.0f} ms  {len(slow):5}  {cut:8}  {worst.subject}")
    for searched in slow[:10]:
        visited = 0 if searched.found is None else searched.found.visited
        print(f"    too slow: {searched.took.processor_s:.3f} s, {visited} places: {searched.subject}")
    return not slow


def main() -> None:
    """Time everything, print the tables, and exit 1 when a limit is broken."""
    parser = argparse.ArgumentParser(description="Time dmconfig plan, and the search behind auto.")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    print(f"{'search, processor time':44}  {'count':>5}  {'median':>10}  {'slowest':>10}  {'limit':>8}  ", end="")
    print(f"{'above':>5}  {'unproven':>8}  slowest of all")
    within = [report_searches("catalogue", [*search_catalogue()], CATALOGUE_LIMIT_S)]
    for name, roles in OPEN_TO_SPLIT.items():
        searches = [*search_random(roles)]
        within.append(report_searches(f"8 components on 8 devices, {name}", searches, RANDOM_LIMIT_S))
    print()
    # last: it imports torch to write headers, and Python's garbage collector would slow the searches down
    within.append(report_plans([*plan_flux(args.rounds)]))
    sys.exit(not all(within))


if __name__ == "__main__":
    main()
