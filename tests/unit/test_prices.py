"""What places cost, by hand; and how often the components of well-known pipelines run, against known counts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from dmconfig.catalog import find_pipeline, known_ids
from dmconfig.configs import config_folder
from dmconfig.footprint import Footprint
from dmconfig.inventory import Inventory, links_of, pair, parse_machine, speeds_of
from dmconfig.plan import Residency
from dmconfig.plan.calls import TOKENS, Runs, role_of, runs_of
from dmconfig.plan.prices import Prices
from dmconfig.plan.requests import Place
from tests.conftest import DIGITS, checked_from, footprints, inventory

ALWAYS, WHOLE = Residency.ALWAYS, Residency.WHILE_RUNNING
GROUP, LEAF = Residency.PER_GROUP, Residency.PER_LEAF
SourceOf = Callable[[str], str | Path]
GB = 10**9
TB = 10**12

MACHINE = replace(
    inventory(cuda=[24, 24]),
    links=links_of({pair("cpu", "cuda:0"): 20 * GB, pair("cpu", "cuda:1"): 10 * GB, pair("cpu", "disk"): 2 * GB}),
    speeds=speeds_of({"cpu": 500 * GB, "cuda:0": 100 * TB}),
    pageable_bytes_per_s=8 * GB,
)
"""A machine with two cards, the second on half the lanes; ordinary memory gives 8 GB/s at most."""

# Of each pipeline with its class's defaults: steps, and how often each component runs per generation. The counts are
# of the entries into the modules, read from the pipelines' code and counted.
KNOWN: Mapping[str, tuple[int, Mapping[str, float]]] = {
    "Alpha-VLLM/Lumina-Image-2.0": (30, {"text_encoder": 2, "transformer": 60, "vae": 1}),
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers": (20, {"text_encoder": 2, "transformer": 20, "vae": 1}),
    "Lightricks/LTX-Video": (50, {"text_encoder": 2, "transformer": 50, "vae": 1}),
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS": (20, {"text_encoder": 2, "transformer": 20, "vae": 1}),
    "Qwen/Qwen-Image": (50, {"text_encoder": 1, "transformer": 50, "vae": 1}),
    "Tongyi-MAI/Z-Image-Turbo": (50, {"text_encoder": 2, "transformer": 50, "vae": 1}),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (50, {"text_encoder": 2, "transformer": 100, "vae": 1}),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": (50, {"text_encoder": 2, "transformer": 100, "vae": 1}),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": (50, {"text_encoder": 2, "transformer": 32, "transformer_2": 68, "vae": 1}),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (50, {"text_encoder": 2, "transformer": 100, "vae": 1}),
    "animatediff-sd15": (50, {"motion_adapter": 0, "text_encoder": 2, "unet": 50, "vae": 1}),
    "black-forest-labs/FLUX.1-dev": (28, {"text_encoder": 1, "text_encoder_2": 1, "transformer": 28, "vae": 1}),
    "black-forest-labs/FLUX.1-schnell": (28, {"text_encoder": 1, "text_encoder_2": 1, "transformer": 28, "vae": 1}),
    "black-forest-labs/FLUX.2-dev": (50, {"text_encoder": 1, "transformer": 50, "vae": 1}),
    "black-forest-labs/FLUX.2-klein-4B": (50, {"text_encoder": 1, "transformer": 50, "vae": 1}),
    "fal/AuraFlow-v0.3": (50, {"text_encoder": 2, "transformer": 50, "vae": 1}),
    "hunyuanvideo-community/HunyuanVideo": (
        50,
        {"text_encoder": 1, "text_encoder_2": 1, "transformer": 50, "vae": 1},
    ),
    "kandinsky-community/kandinsky-2-2-decoder": (100, {"unet": 100, "movq": 1}),
    "kandinsky-community/kandinsky-2-2-prior": (25, {"image_encoder": 1, "prior": 25, "text_encoder": 2}),
    "kandinsky22-combined": (
        100,
        {"unet": 100, "movq": 1, "prior_prior": 25, "prior_image_encoder": 1, "prior_text_encoder": 2},
    ),
    "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers": (
        50,
        {"text_encoder": 2, "text_encoder_2": 2, "transformer": 100, "vae": 1},
    ),
    "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers": (
        50,
        {"text_encoder": 2, "text_encoder_2": 2, "transformer": 100, "vae": 1},
    ),
    "zai-org/CogVideoX-5b": (50, {"text_encoder": 2, "transformer": 50, "vae": 1}),
    "sd15-controlnet-canny": (
        50,
        {"controlnet": 51, "safety_checker": 1, "text_encoder": 2, "unet": 51, "vae": 1},
    ),
    "stable-diffusion-v1-5/stable-diffusion-v1-5": (
        50,
        {"safety_checker": 1, "text_encoder": 2, "unet": 51, "vae": 1},
    ),
    "stabilityai/stable-diffusion-2-1": (50, {"text_encoder": 2, "unet": 50, "vae": 1}),
    "stabilityai/stable-diffusion-3-medium-diffusers": (
        28,
        {"text_encoder": 2, "text_encoder_2": 2, "text_encoder_3": 2, "transformer": 28, "vae": 1},
    ),
    "stabilityai/stable-diffusion-3.5-large": (
        28,
        {"text_encoder": 2, "text_encoder_2": 2, "text_encoder_3": 2, "transformer": 28, "vae": 1},
    ),
    "stabilityai/stable-diffusion-xl-base-1.0": (50, {"text_encoder": 1, "text_encoder_2": 1, "unet": 50, "vae": 1}),
}
ESTIMATED: Mapping[str, Mapping[str, float]] = {
    # its scheduler (PNDM) takes one step more than is asked for, which the class of the pipeline does not say
    "sd15-controlnet-canny": {"controlnet": 50, "unet": 50},
    "stable-diffusion-v1-5/stable-diffusion-v1-5": {"unet": 50},
}
"""Where the plan's figures are not those that are known, and why."""


def prices(*, pinned: bool = False, machine: Inventory = MACHINE, **runs: Runs) -> Prices:
    """Prices of components that take 1 GiB as float16, and run as told."""
    return Prices(inventory=machine, runs=runs, footprints=footprints(**dict.fromkeys(runs, 1.0)), pinned=pinned)


# --- seconds ---


def test_seconds_what_stays_costs_nothing() -> None:
    """Weights that are on their accelerator do not move, however often they are used."""
    ours = prices(unet=Runs(50, 4096))
    assert ours.seconds("unet", Place("cuda:0"), 8 * GB) == 0
    assert ours.moved_bytes("unet", Place("cuda:0"), 8 * GB) == 0


@pytest.mark.parametrize(
    ("place", "seconds", "moved"),
    [
        # ordinary memory gives 8 GB/s, the second card's link 10 is not what limits it
        (Place("cuda:0", WHOLE), 1.0, 8 * GB),
        (Place("cuda:1", WHOLE), 1.0, 8 * GB),
        # on each of 50 calls
        (Place("cuda:0", LEAF), 50.0, 400 * GB),
        (Place("cuda:0", GROUP), 50.0, 400 * GB),
        # 2 GB/s from disk and 8 after it: 1.6 together
        (Place("cuda:0", WHOLE, "disk"), 5.0, 8 * GB),
        (Place("cuda:1", LEAF, "disk"), 250.0, 400 * GB),
        # 2 operations for each of 4G weights and 4096 vectors, 50 times, at 500 GFLOP/s
        (Place("cpu"), 50 * 2 * 4 * 4096 / 500, 0),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_seconds_of_each_place(place: Place, seconds: float, moved: int) -> None:
    """8 GB of a denoiser that runs 50 times."""
    ours = prices(unet=Runs(50, 4096))
    assert ours.seconds("unet", place, 8 * GB) == pytest.approx(seconds)
    assert ours.moved_bytes("unet", place, 8 * GB) == moved


def test_seconds_page_locked_memory_is_for_groups() -> None:
    """With a stream groups come at the speed of the link, 20 GB/s; what is brought otherwise does not."""
    ours = prices(pinned=True, unet=Runs(50, 4096))
    assert ours.seconds("unet", Place("cuda:0", GROUP), 8 * GB) == pytest.approx(20.0)
    assert ours.seconds("unet", Place("cuda:1", GROUP), 8 * GB) == pytest.approx(40.0)
    assert ours.seconds("unet", Place("cuda:0", LEAF), 8 * GB) == pytest.approx(50.0)
    assert ours.seconds("unet", Place("cuda:0", WHOLE), 8 * GB) == pytest.approx(1.0)


def test_seconds_of_a_slow_link() -> None:
    """A link slower than ordinary memory is what limits: 4 GB/s for 8 GB."""
    slow = replace(MACHINE, links=links_of({pair("cpu", "cuda:0"): 4 * GB}))
    assert prices(machine=slow, vae=Runs(1, 1)).seconds("vae", Place("cuda:0", WHOLE), 8 * GB) == pytest.approx(2.0)


def test_seconds_on_a_machine_of_which_nothing_is_known() -> None:
    """By default 12 GB/s from memory, half of what a link gives; from disk 3, so 12 * 3 / 15 = 2.4 together."""
    ours = prices(machine=parse_machine("24GiB", "64GiB"), vae=Runs(1, 16384))
    assert ours.seconds("vae", Place("cuda:0", WHOLE), 12 * GB) == pytest.approx(1.0)
    assert ours.seconds("vae", Place("cuda:0", WHOLE, "disk"), 12 * GB) == pytest.approx(5.0)
    assert ours.seconds("vae", Place("cpu"), 2 * GB) == pytest.approx(2 * 16384 / 500)


def test_seconds_of_one_memory() -> None:
    """Where the accelerator's memory is the host's, a copy is at the speed of that memory, page-locked or not."""
    shared = replace(inventory(cuda=[64]).accelerators[0], id="mps:0")
    machine = replace(inventory(), accelerators=(shared,), unified=("mps:0",))
    for pinned in (False, True):
        ours = prices(machine=machine, pinned=pinned, vae=Runs(1, 1))
        assert ours.seconds("vae", Place("mps:0", WHOLE), 30 * GB) == pytest.approx(1.0)
        assert ours.seconds("vae", Place("mps:0", GROUP), 30 * GB) == pytest.approx(1.0)


@pytest.mark.parametrize(("dtype", "weights"), [("float32", 1), ("float16", 2), ("bfloat16", 2), ("Q4_0", 2)])
def test_seconds_on_the_cpu_go_by_weights(dtype: str, weights: int) -> None:
    """Of 4 GB at float32 there are half as many weights to compute as at 16 bits; unknown types count as those."""
    size: Footprint = replace(footprints(unet=1)["unet"], dtype=dtype)
    ours = Prices(inventory=MACHINE, runs={"unet": Runs(1, 1000)}, footprints={"unet": size})
    assert ours.seconds("unet", Place("cpu"), 4 * GB) == pytest.approx(2 * weights * GB * 1000 / (500 * GB))


def test_seconds_of_a_part_are_its_component_s() -> None:
    """A part runs as often as its component: half the bytes cost half, and both halves as much as all."""
    ours = prices(unet=Runs(50, 4096), vae=Runs(1, 16384))
    for place in (Place("cuda:0", LEAF), Place("cpu"), Place("cuda:0", LEAF, "disk")):
        whole = ours.seconds("unet", place, 8 * GB)
        assert 2 * ours.seconds("unet.down_blocks.1", place, 4 * GB) == pytest.approx(whole)


def test_bandwidth_of_a_place_is_that_of_the_machine() -> None:
    """From where the weights rest to where they are used."""
    ours = prices(unet=Runs(1, 1))
    assert ours.bandwidth(Place("cuda:1", LEAF)) == MACHINE.bandwidth("cpu", "cuda:1") == 8 * GB
    assert ours.bandwidth(Place("cuda:1", LEAF, "disk")) == MACHINE.bandwidth("disk", "cuda:1") == 1_600_000_000


# --- how often components run ---


def runs_in(lines: str, source: str | Path = "stabilityai/stable-diffusion-xl-base-1.0") -> Mapping[str, Runs]:
    checked = checked_from(f"version: 1\npipeline: {{source: {source}}}\n{lines}\n")
    return runs_of(checked.spec, checked.assembly)


def calls_in(lines: str, source: str | Path = "stabilityai/stable-diffusion-xl-base-1.0") -> dict[str, float]:
    return {name: runs.calls for name, runs in runs_in(lines, source).items()}


@pytest.fixture
def source_of(tmp_path: Path) -> SourceOf:
    """What a spec writes for a pipeline of the catalogue: its id, or a folder where it is a composition."""

    def source(hub_id: str) -> str | Path:
        if "/" in hub_id:
            return hub_id
        folder = config_folder(hub_id)
        assert folder is not None
        copy = tmp_path / hub_id
        shutil.copytree(folder, copy)
        index = json.loads((copy / "model_index.json").read_bytes())
        for name in (name for name, value in index.items() if isinstance(value, list) and value[0]):
            (copy / name).mkdir(exist_ok=True)  # tokenizers are not packaged
        return copy

    return source


@pytest.mark.parametrize("hub_id", KNOWN)
def test_runs_of_well_known_pipelines(hub_id: str, source_of: SourceOf) -> None:
    """With the defaults of its class, every component runs as often as it is known to."""
    _, calls = KNOWN[hub_id]
    found = calls_in("", source_of(hub_id))
    assert found == pytest.approx({**calls, **ESTIMATED.get(hub_id, {})})


def test_known_figures_are_of_the_whole_catalogue() -> None:
    """No pipeline of the catalogue is left out, and the estimates that differ are near."""
    assert KNOWN.keys() == {pipeline.hub_id for pipeline in map(find_pipeline, known_ids()) if pipeline}
    for hub_id, calls in ESTIMATED.items():
        assert all(abs(value - KNOWN[hub_id][1][name]) <= 1 for name, value in calls.items())


@pytest.mark.parametrize("hub_id", [hub_id for hub_id in KNOWN if "/" in hub_id])
def test_steps_of_the_call_are_those_of_the_denoiser(hub_id: str) -> None:
    """With four steps asked for, the denoisers run in proportion, and nothing else does."""
    steps, calls = KNOWN[hub_id]
    calls = {**calls, **ESTIMATED.get(hub_id, {})}
    found = calls_in("call: {num_inference_steps: 4}", hub_id)
    denoisers = {name for name in calls if name.startswith(("transformer", "unet", "prior"))}
    assert {name: found[name] for name in denoisers} == pytest.approx(
        {name: calls[name] * 4 / steps for name in denoisers}
    )
    assert {name: found[name] for name in calls.keys() - denoisers} == {
        name: calls[name] for name in calls.keys() - denoisers
    }


def test_steps_of_a_combined_pipeline_have_names_of_their_own(source_of: SourceOf) -> None:
    """A prior inside another pipeline has its own steps; the shared key is not theirs."""
    found = calls_in("call: {prior_num_inference_steps: 5, num_inference_steps: 7}", source_of("kandinsky22-combined"))
    assert (found["prior_prior"], found["unet"]) == (5, 7)


def test_two_denoisers_share_the_steps() -> None:
    """16 of 50 steps are of the first, two calls each; together both run as often as one would."""
    found = calls_in("call: {num_inference_steps: 100}", "Wan-AI/Wan2.2-T2V-A14B-Diffusers")
    assert found["transformer"] == pytest.approx(64)
    assert found["transformer_2"] == pytest.approx(136)


def test_second_denoiser_that_is_left_out_leaves_the_steps_to_the_first() -> None:
    """Wan 2.1 has the slot of a second denoiser and nothing in it: all 50 steps are of the first."""
    assert calls_in("", "Wan-AI/Wan2.1-T2V-14B-Diffusers")["transformer"] == 100


def test_calls_of_the_file_overrule() -> None:
    """What the file says of a component holds for it alone, also against the steps of the call."""
    found = calls_in("calls: {unet: 56, vae: 2.5}\ncall: {num_inference_steps: 30}")
    assert found == {"text_encoder": 1, "text_encoder_2": 1, "unet": 56, "vae": 2.5}
    assert runs_in("calls: {unet: 56}")["unet"] == Runs(56, 4096)


def test_runs_of_the_trained_example() -> None:
    """The steps are those of the file, and else the default of the class, which is 50."""
    one, two = (checked_from(DIGITS + lines) for lines in ("", "call: {num_inference_steps: 9}\n"))
    assert runs_of(one.spec, one.assembly)["unet"].calls == 50
    assert runs_of(two.spec, two.assembly)["unet"].calls == 9


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("unet", "denoiser"),
        ("transformer_2", "denoiser"),
        ("prior_prior", "denoiser"),
        ("controlnet", "denoiser"),
        ("text_encoder", "text encoder"),
        ("prior_text_encoder", "text encoder"),
        ("image_encoder", "image encoder"),
        ("prior_image_encoder", "image encoder"),
        ("safety_checker", "image encoder"),
        ("vae", "decoder"),
        ("movq", "decoder"),
        ("anything", "decoder"),
    ],
)
def test_role_of_a_component_by_its_name(name: str, role: str) -> None:
    """What a component does, and so how many vectors go through it."""
    assert role_of(name) == role
    assert role in TOKENS
