"""What placements cost: ours (``auto``), diffusers' ``balanced`` and accelerate's ``infer_auto_device_map``.

Every pipeline of the catalogue, in bfloat16, is placed on twelve machines with three sizes of host memory by all three,
and each placement is priced by the model in ``dmconfig.plan.prices``: seconds that moving weights, and computing on the
cpu, add to one generation. Nothing is loaded or timed; the same input gives the same table. All three are given the
same sizes, and the same budgets: the memory of each device less dmconfig's default reserve. Disk has no limit.

- ``balanced`` is ``diffusers.pipelines.pipeline_loading_utils._get_final_device_map``, called with the components built
  on the meta device. As diffusers loads them then (``load_sub_model``), what it puts on "cpu" rests there and is
  brought layer by layer to the first accelerator on every call. What it loses (its map has no entry; diffusers leaves
  it on the cpu without hooks, where the pipeline stops with an error) is marked, and priced as the cheapest way to run
  what rests on the cpu in the room that is left. Pipelines for which diffusers takes no device_map are asked for too.
- ``accelerate`` is called once per component, with what the ones before have left and the blocks that a class says stay
  whole; a class that says nothing is not split. Components come in the pipeline's own order, and largest first as in
  diffusers: the better of the two counts. What it puts on cpu or disk is brought layer by layer on every call to the
  first of the component's accelerators; where there is none, to the first accelerator that has room for a layer.
- A placement that cannot be (weights, the largest layer brought and the reserve over what a device has, or more resting
  in host memory than there is) would not run, and has no price.

The exit code is 1 when ``auto`` costs more than another placement anywhere, or finds none where another does.

    python benchmarks/placement_quality.py [PIPELINE ...]
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmconfig.catalog import CatalogPipeline, find_pipeline, known_ids
from dmconfig.checked import Checked, check_file
from dmconfig.configs import config_folder
from dmconfig.footprint import Footprint, build_on_meta, module_bytes
from dmconfig.inventory import Inventory, parse_machine
from dmconfig.layout import Layout, nearest_ancestor
from dmconfig.layouts import packaged_layout
from dmconfig.measure import known_by_config
from dmconfig.plan import Residency, make_task
from dmconfig.plan.fastest import Fastest
from dmconfig.plan.requests import Place
from dmconfig.plan.task import Task
from dmconfig.plan.uses import Load, uses_of

MACHINES = (
    "8GiB", "12GiB", "16GiB", "24GiB", "2x12GiB", "2x24GiB", "16GiB,12GiB", "24GiB,12GiB", "4x16GiB", "4x24GiB",
    "8x24GiB", "48GiB,40GiB,32GiB,24GiB,20GiB,16GiB,12GiB,8GiB",
)  # fmt: skip
HEADINGS = ("8", "12", "16", "24", "2x12", "2x24", "16+12", "24+12", "4x16", "4x24", "8x24", "48..8")
HOST_GIB = (32, 64, 128)
DTYPE = "bfloat16"
SIDES = ("auto", "balanced", "accelerate")
EQUAL_S = 1e-6
"""Prices that differ by less are the same."""
NOTABLE_S = 0.5
"""Ratios are of cells where ours costs at least this much: next to nothing, any price is many times more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the plans of one pipeline of the catalogue are made from."""

    hub_id: str
    checked: Checked
    footprints: Mapping[str, Footprint]
    layouts: Mapping[str, Layout]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The price of one placement, None where it would not run, and the components it lost."""

    seconds: float | None
    lost: tuple[str, ...] = ()

    def rank(self) -> float:
        """Return the price, beyond all others where it would not run."""
        return float("inf") if self.seconds is None else self.seconds

    def __str__(self) -> str:
        """Return the price in at most six characters: ``-`` where it would not run, and ``!`` where it lost some."""
        if self.seconds is None:
            return "-"
        digits = "0" if self.seconds < EQUAL_S else f"{self.seconds:.{2 if self.seconds < 10 else 0}f}"
        return digits + "!" * bool(self.lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One pipeline on one machine: what each side makes of it, and what our search says of its answer."""

    hub_id: str
    heading: str
    host_gib: int
    outcomes: Mapping[str, Outcome]
    found: Fastest | None

    @property
    def is_worse(self) -> bool:
        """Tell whether the placement of another side runs and costs less than ours."""
        return self.outcomes["auto"].rank() > min(self.outcomes[side].rank() for side in SIDES[1:]) + EQUAL_S


# --- what is placed ---------------------------------------------------------------------------------------------------


def catalogue_ids() -> list[str]:
    """Return the ids of all pipelines of the catalogue, without aliases."""
    return list(dict.fromkeys(pipeline.hub_id for pipeline in map(find_pipeline, known_ids()) if pipeline))


def read_figures(hub_ids: Sequence[str]) -> Iterator[Figures]:
    """Yield what plans of these pipelines are made from: packaged configs, sizes and layouts. Imports no torch."""
    with tempfile.TemporaryDirectory() as folder:
        for hub_id in hub_ids:
            catalogued = find_pipeline(hub_id)
            if catalogued is None:
                sys.exit(f"{hub_id} is not in the catalogue")
            yield figures_of(catalogued, check_file(write_spec(catalogued, Path(folder))))


def figures_of(catalogued: CatalogPipeline, checked: Checked) -> Figures:
    """Return the figures of one pipeline."""
    footprints, layouts = {}, {}
    for part in checked.assembly.modules:
        component = catalogued.component(part.name)
        footprint = component.footprint(DTYPE) if component else None
        if footprint is None:
            raise RuntimeError(f"the catalogue has no {part.name} of {catalogued.hub_id}")
        footprints[part.name] = footprint
        is_diffusers = part.library == "diffusers"
        layout = (
            packaged_layout(catalogued.hub_id, part.name, part.class_name, DTYPE)
            if is_diffusers
            else known_by_config(part, DTYPE)
        )
        if layout is not None:
            layouts[part.name] = layout
    return Figures(hub_id=catalogued.hub_id, checked=checked, footprints=footprints, layouts=layouts)


def task_of(figures: Figures, inventory: Inventory) -> Task:
    """Return what a plan of the pipeline on a machine is made from."""
    checked = figures.checked
    return make_task(
        checked.resolved, checked.spec, checked.assembly, figures.footprints, inventory, layouts=figures.layouts
    )


def configs_of(hub_id: str) -> Path:
    """Return the folder of a pipeline's packaged configs."""
    folder = config_folder(hub_id)
    if folder is None:
        raise RuntimeError(f"there are no configs of {hub_id}")
    return folder


def write_spec(pipeline: CatalogPipeline, folder: Path) -> Path:
    """Return a spec of the pipeline in folder, beside a copy of its configs with folders for what has none."""
    configs = configs_of(pipeline.hub_id)
    source = folder / configs.name
    shutil.copytree(configs, source)
    for component in pipeline.components:
        (source / component.name).mkdir(exist_ok=True)
    file = folder / f"{configs.name}.yaml"
    file.write_text(f"version: 1\npipeline: {{source: ./{configs.name}, dtype: {DTYPE}}}\ndevice_map: auto\n")
    return file


def build_modules(figures: Figures, built: dict[tuple[str, bytes], Any]) -> Mapping[str, Any]:
    """Return the components on the meta device, in the pipeline's order; what is in built already is taken from there.

    Every tensor has the dtype it has once loaded, so that all sides are given the same sizes.
    """
    modules = {}
    for component in figures.checked.assembly.modules:
        folder = configs_of(figures.hub_id) / component.name
        key = component.class_name, (folder / "config.json").read_bytes()
        if key not in built:
            built[key] = as_loaded(build_on_meta(folder, component.library, component.class_name, DTYPE))
        modules[component.name] = built[key]
    return modules


def as_loaded(module: Any) -> Any:
    """Return the module with every tensor in the dtype it has once loaded: some layers stay in float32."""
    import torch

    sizes = dict(module_bytes(module, DTYPE))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and tensor.nbytes != sizes[name]:
            tensor.data = tensor.data.to(torch.float32 if tensor.element_size() == 2 else torch.bfloat16)
    return module


# --- the three sides --------------------------------------------------------------------------------------------------


def measure(figures: Figures, modules: Mapping[str, Any], machine: tuple[str, str], host_gib: int) -> Cell:
    """Return what all sides make of one machine, given by its heading and its accelerators."""
    task = task_of(figures, parse_machine(machine[1], f"{host_gib}GiB"))
    solution = task.found()
    ours = Outcome(None if solution is None else task.seconds(solution))
    orders = list(modules), sorted(modules, key=lambda name: -task.loads[name].nbytes)
    greedy = [accelerate({name: modules[name] for name in order}, task) for order in orders]
    return Cell(
        hub_id=figures.hub_id,
        heading=machine[0],
        host_gib=host_gib,
        outcomes={"auto": ours, "balanced": balanced(modules, task), "accelerate": min(greedy, key=Outcome.rank)},
        found=None if solution is None else solution.fastest,
    )


def balanced(modules: Mapping[str, Any], task: Task) -> Outcome:
    """Return the price of diffusers' own ``balanced``."""
    import diffusers
    from diffusers.pipelines.pipeline_loading_utils import _get_final_device_map

    parts = task.assembly.modules
    device_map = _get_final_device_map(
        device_map="balanced",
        pipeline_class=getattr(diffusers, task.assembly.class_name),
        passed_class_obj=dict(modules),
        init_dict={part.name: (part.library, part.class_name) for part in parts},
        library=diffusers,
        max_memory={index: max(0, task.limits.offer(device)) for index, device in enumerate(task.usable)},
    )
    layer_by_layer = Place(task.usable[0], Residency.PER_LEAF)
    choice = {
        name: layer_by_layer if device == "cpu" else Place(task.usable[device]) for name, device in device_map.items()
    }
    lost = tuple(part.name for part in parts if part.name not in choice)
    for name in lost:
        place = cheapest_from_cpu(name, choice, task)
        if place is None:
            return Outcome(None, lost)
        choice[name] = place
    return Outcome(price(choice, task.loads, task), lost)


def cheapest_from_cpu(name: str, choice: Mapping[str, Place], task: Task) -> Place | None:
    """Return the cheapest way to run what rests on the cpu, beside what is placed already."""
    how = (Residency.WHILE_RUNNING, Residency.PER_LEAF)
    places = [Place("cpu"), *(Place(device, residency) for residency in how for device in task.usable)]
    possible = [place for place in places if runs({**choice, name: place}, task.loads, task)]
    return min(possible, key=lambda place: task.prices.seconds(name, place, task.loads[name].nbytes), default=None)


def accelerate(modules: Mapping[str, Any], task: Task) -> Outcome:
    """Return the price of accelerate's maps, made for one component after the other, in the order of modules."""
    choice: dict[str, Place] = {}
    loads: dict[str, Load] = {}
    for name, module in modules.items():
        device_map = infer(module, rooms(choice, loads, task), task)
        home = next((device for device in device_map.values() if device in task.usable), None)
        covering = {"": home or "cpu", **device_map}  # a map may miss a buffer; it goes where the component does
        for device, load in loads_by_device(module, covering, task.loads[name]).items():
            key = f"{name}.{device}"
            loads[key] = load
            executing = [home] if home is not None else task.usable
            brought = [Place(each, Residency.PER_LEAF, device) for each in executing]
            places = [Place(device)] if device in task.usable else brought
            place = next((place for place in places if runs({**choice, key: place}, loads, task)), None)
            if place is None:
                return Outcome(None)
            choice[key] = place
    return Outcome(price(choice, loads, task))


def infer(module: Any, room: Mapping[str, int], task: Task) -> Mapping[str, str]:
    """Return accelerate's map of one component, with our names of devices; paths begin with ``whole.``."""
    import torch
    from accelerate import infer_auto_device_map

    keys = {device: index for index, device in enumerate(task.usable)}
    whole = torch.nn.ModuleDict({"whole": module})  # so that what is not split is seen as one
    found = infer_auto_device_map(
        whole,
        max_memory={keys.get(device, device): nbytes for device, nbytes in room.items()},
        no_split_module_classes=sorted(module._no_split_modules or [type(module).__name__]),
    )
    return {path: task.usable[device] if isinstance(device, int) else device for path, device in found.items()}


def rooms(choice: Mapping[str, Place], loads: Mapping[str, Load], task: Task) -> Mapping[str, int]:
    """Return what every device has left beside a part of a placement; the disk always has room."""
    uses = uses_of(choice, loads, task.limits.budgets)
    return {device: max(0, task.limits.offer(device) - uses[device].need) for device in (*task.usable, "cpu")}


def loads_by_device(module: Any, device_map: Mapping[str, str], whole: Load) -> Mapping[str, Load]:
    """Return what of a component each device gets, and its largest layer."""
    layers: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for name, nbytes in module_bytes(module, DTYPE):
        path = f"whole.{name}"
        layers[device_map[nearest_ancestor(path, device_map)]][path.rpartition(".")[0]] += nbytes
    return {
        device: Load(
            nbytes=sum(sizes.values()),
            largest_leaf_bytes=max(sizes.values()),
            group_bytes=sum(sizes.values()),
            stays=whole.stays,
            working=whole.working,
        )
        for device, sizes in layers.items()
    }


def price(choice: Mapping[str, Place], loads: Mapping[str, Load], task: Task) -> float | None:
    """Return the price of a placement, None where it would not run."""
    if not runs(choice, loads, task):
        return None
    return sum(task.prices.seconds(name, place, loads[name].nbytes) for name, place in choice.items())


def runs(choice: Mapping[str, Place], loads: Mapping[str, Load], task: Task) -> bool:
    """Tell whether every device has room for a placement, or for a part of one."""
    uses = uses_of(choice, loads, task.limits.budgets)
    return task.limits.hold(uses, uses)


# --- the table --------------------------------------------------------------------------------------------------------


def print_prices(cells: Sequence[Cell]) -> None:
    """Print the prices, one table per size of host memory."""
    width = max(len(cell.hub_id) for cell in cells)
    for host_gib in HOST_GIB:
        print(f"{f'{host_gib} GiB of host memory':{width + 12}}" + "".join(f"{heading:>7}" for heading in HEADINGS))
        here = [cell for cell in cells if cell.host_gib == host_gib]
        for hub_id in dict.fromkeys(cell.hub_id for cell in here):
            row = [cell for cell in here if cell.hub_id == hub_id]
            for side in SIDES:
                name = hub_id if side == SIDES[0] else ""
                print(f"{name:{width}}  {side:10}" + "".join(f"{cell.outcomes[side]!s:>7}" for cell in row))
        print()


def print_ratios(cells: Sequence[Cell]) -> None:
    """Print what the search says of its answers and what the other two lose against them, by machine and in all."""
    print(f"{'':7}{'auto':>29}  {'balanced':>35}  {'accelerate':>35}")
    theirs = "".join(f"{column:>7}" for column in ("no run", "loses", "moves", "median", "worst"))
    print(f"{'':7}" + "".join(f"{c:>7}" for c in ("cells", "0 s", "proven", "bound")) + f"   {theirs}  {theirs}")
    for heading in (*HEADINGS, "all"):
        here = [cell for cell in cells if heading in (cell.heading, "all")]
        ours = (len(here), *searched(here))
        columns = [f"{figure:>7}" for figure in (*ours, *compared(here, "balanced"), *compared(here, "accelerate"))]
        print(f"{heading:7}" + "".join(columns[:4]) + "   " + "".join(columns[4:9]) + "  " + "".join(columns[9:]))
    print(
        "0 s: nothing moves; proven: the search ended; bound: the price is what no placement can fall below.\n"
        "no run: does not fit; loses: a component has no place; moves: where ours moves nothing.\n"
        f"median, worst: their price over ours, where theirs runs, loses none, and ours is at least {NOTABLE_S} s."
    )


def searched(cells: Iterable[Cell]) -> tuple[int, int, int]:
    """Return in how many cells nothing moves, the search ended, and its price is its lower bound."""
    found = [cell.found for cell in cells if cell.found is not None]
    return (
        sum(each.best.seconds < EQUAL_S for each in found),
        sum(each.proven for each in found),
        sum(each.best.seconds - each.bound_seconds < EQUAL_S for each in found),
    )


def compared(cells: Iterable[Cell], side: str) -> tuple[str, ...]:
    """Return in how many cells a side does not run, loses something, moves where nothing need move; and its ratios."""
    pairs = [(cell.outcomes["auto"], cell.outcomes[side]) for cell in cells]
    runs = [(ours, theirs) for ours, theirs in pairs if theirs.seconds is not None and not theirs.lost]
    ratios = [theirs.rank() / ours.rank() for ours, theirs in runs if ours.rank() >= NOTABLE_S]
    return (
        str(sum(theirs.seconds is None for _, theirs in pairs)),
        str(sum(bool(theirs.lost) for _, theirs in pairs)),
        str(sum(ours.rank() < EQUAL_S <= theirs.rank() for ours, theirs in runs)),
        f"{statistics.median(ratios):.2f}" if ratios else "-",
        f"{max(ratios):.1f}" if ratios else "-",
    )


def print_worse(cells: Sequence[Cell]) -> bool:
    """Print the cells where ours is not the best; return whether there is any."""
    worse = [cell for cell in cells if cell.is_worse]
    for cell in worse:
        prices = ", ".join(f"{side} {cell.outcomes[side]}" for side in SIDES)
        print(f"worse: {cell.hub_id} on {cell.heading} with {cell.host_gib} GiB: {prices}")
    print(f"\ncells where auto is worse than another: {len(worse)} of {len(cells)}")
    return bool(worse)


def quiet() -> None:
    """Keep what the libraries say of devices and configs out of the table."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    warnings.filterwarnings("ignore")
    diffusers_logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)


def main() -> None:
    """Place everything everywhere, print the tables, and exit 1 when ours is worse anywhere."""
    parser = argparse.ArgumentParser(description="What placements cost: auto, diffusers' balanced, accelerate.")
    parser.add_argument("pipelines", nargs="*", metavar="PIPELINE", help="hub ids; default: the whole catalogue")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    quiet()
    built: dict[tuple[str, bytes], Any] = {}
    cells = [
        measure(figures, modules, machine, host_gib)
        for figures in read_figures(args.pipelines or catalogue_ids())
        for modules in [build_modules(figures, built)]
        for host_gib in HOST_GIB
        for machine in zip(HEADINGS, MACHINES, strict=True)
    ]
    print_prices(cells)
    print_ratios(cells)
    sys.exit(print_worse(cells))


if __name__ == "__main__":
    main()
