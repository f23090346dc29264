"""Device maps and strategies on loaded pipelines, as people have reported them: one section per report.

The numbers B02 to B20 stand for public reports on diffusers, accelerate, transformers and ComfyUI; those on planning
alone are in ``tests/unit/test_field_reports_device_maps.py``. Pictures are compared bit for bit with those of a plain
run on the cpu.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionImg2ImgPipeline

import dmconfig
from dmconfig import DMConfigError, load_from_yaml, report
from dmconfig.dispatch.weights import Resident
from dmconfig.errors import Code
from dmconfig.load import load_plan, plan_for
from dmconfig.progress import NoProgress
from dmconfig.spec import STRATEGIES
from dmconfig.virtual import Ledger
from tests.conftest import DIGITS as DIGITS_TEXT
from tests.conftest import checked_from, inventory
from tests.integration.test_placements import DIGITS, PIPELINE, SEEDS
from tests.integration.test_placements import draw as draw_digit
from tests.tiny_pipelines import draw, write_spec
from tests.virtual_devices import MakeMachine

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("vae", "text_encoder", "unet")
Item = TypeVar("Item")


@dataclass
class Heard:
    """Progress that keeps what it is told."""

    phases: list[str] = field(default_factory=list)
    items: list[tuple[str, str]] = field(default_factory=list)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Keep the name of a phase."""
        self.phases.append(name)
        yield

    def track(self, phase: str, items: Sequence[Item], label: Callable[[Item], str]) -> Iterator[Item]:
        """Keep the label of every item."""
        for item in items:
            self.items.append((phase, label(item)))
            yield item


@pytest.fixture(scope="module")
def plain(one_thread: None) -> Any:
    """The digits on the cpu, as diffusers loads them."""
    return DiffusionPipeline.from_pretrained(PIPELINE)


@pytest.fixture(scope="module")
def expected(plain: Any) -> list[np.ndarray]:
    """The pictures of a plain cpu run, one per seed."""
    return [sketch(plain, seed) for seed in SEEDS]


def sketch(pipe: Any, seed: int) -> np.ndarray:
    """A seven in two steps: enough to enter the denoiser again and again."""
    return draw_digit(pipe, seed, steps=2)


def load(device_map: object, **more: Any) -> Any:
    """The digits under a device map, without a reserve: the devices here are tiny."""
    return load_from_yaml(DIGITS, {"reserve": 0, "device_map": device_map, **more})


def draws(pipe: Any, expected: Sequence[np.ndarray]) -> list[bool]:
    """Whether generations in a row have the bits of the plain run."""
    return [np.array_equal(sketch(pipe, seed), picture) for seed, picture in enumerate(expected)]


def weights_moved(ledger: Ledger) -> Counter[tuple[str, str]]:
    """The bytes of weights that have travelled, by way."""
    moved = Counter[tuple[str, str]]()
    for move, count in ledger.moves.items():
        if move.kind == "weights":
            moved[move.source, move.destination] += count.bytes
    return moved


def devices_of(module: torch.nn.Module) -> set[str]:
    """The devices of a module's parameters and buffers."""
    return {str(tensor.device) for tensor in (*module.parameters(), *module.buffers())}


def hooked(module: torch.nn.Module) -> bool:
    """Whether anything stands before a module or what is below it."""
    return any(
        hasattr(part, "_hf_hook") or part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part)
        for part in module.modules()
    )


# B02: the whole pipeline goes through host memory first


@pytest.mark.parametrize("form", ["auto", "balanced", "cuda:1", {"unet": "cuda:1", "default": "cuda:0"}])
def test_b02_the_plan_comes_first_and_each_component_is_loaded_and_moved_once(
    form: object, virtual_machine: MakeMachine
) -> None:
    """Plan, load, place, in this order; no component is loaded twice, and each travels once, to where it stays."""
    machine = virtual_machine()
    heard = Heard()
    pipe: Any = load_from_yaml(DIGITS, {"reserve": 0, "device_map": form}, progress=heard)

    assert heard.phases == ["plan", "load", "place"]
    loaded = [name for phase, name in heard.items if phase == "load"]
    assert len(loaded) == len({*loaded})
    assert {*NAMES} <= {*loaded}
    placed = Counter[tuple[str, str]]()
    for name, device in pipe.hf_device_map.items():
        module = getattr(pipe, name)
        placed["cpu", device] += sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
    assert weights_moved(machine.ledger) == placed


@pytest.mark.parametrize("form", ["cuda:0", {"unet": "cuda:1", "vae": "cuda:0", "text_encoder": "cuda:0"}])
def test_b02_a_pipeline_that_does_not_fit_is_refused_before_it_is_loaded(
    form: object, virtual_machine: MakeMachine
) -> None:
    """With the plan alone it is known: nothing is read, and nothing reaches the device."""
    machine = virtual_machine(capacity_bytes=300 * 1024)
    heard = Heard()
    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(DIGITS, {"reserve": 0, "device_map": form}, progress=heard)
    assert {problem.code for problem in caught.value.problems} == {Code.DOES_NOT_FIT}
    assert heard.phases == ["plan"]
    assert not heard.items
    assert not machine.ledger.moves


# B03: latents and embeddings on two cards


@pytest.mark.parametrize("devices", [*itertools.permutations(("cuda:0", "cuda:1", "cpu"))])
def test_b03_components_on_any_devices_draw_the_same(
    devices: Sequence[str], virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """However three components are dealt out to three devices by hand, the pipeline runs, with the plain bits."""
    virtual_machine()
    pipe = load(dict(zip(NAMES, devices, strict=True)))
    assert draws(pipe, expected[:1]) == [True]
    assert str(pipe._execution_device) == devices[NAMES.index("unet")]


# B04, B06: components beside the usual ones


@pytest.fixture(scope="module")
def controlnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The spec of a tiny Stable Diffusion with a ControlNet, whose class does not say how it can be split."""
    return write_spec("controlnet", tmp_path_factory.mktemp("controlnet"))


@pytest.fixture(scope="module")
def controlled(controlnet: Path, one_thread: None) -> np.ndarray:
    """The picture of a plain run of it."""
    return draw(DiffusionPipeline.from_pretrained(controlnet.with_suffix("")), "controlnet", 0)


@pytest.mark.parametrize(
    "device_map",
    [
        {"unet": "cuda:0", "controlnet": "cuda:1", "vae": "cuda:1", "text_encoder": "cpu", "safety_checker": "cuda:0"},
        {"controlnet": "cuda:1", "default": "balanced"},
    ],
)
def test_b04_an_extra_component_is_placed_by_hand_like_the_others(
    device_map: Mapping[str, str], controlnet: Path, controlled: np.ndarray, virtual_machine: MakeMachine
) -> None:
    """A controlnet is where its line says, its weights are there, and the picture is that of a plain run."""
    virtual_machine()
    pipe: Any = load_from_yaml(controlnet, {"device_map": device_map})
    named = {name: device for name, device in device_map.items() if name != "default"}
    assert named.items() <= pipe.hf_device_map.items()
    assert {name: devices_of(getattr(pipe, name)) for name in named} == {name: {at} for name, at in named.items()}
    assert np.array_equal(draw(pipe, "controlnet", 0), controlled)


@pytest.mark.parametrize("strategy", ["balanced", "sequential", "auto"])
def test_b06_every_strategy_places_a_class_that_says_nothing_of_splitting(
    strategy: str, controlnet: Path, virtual_machine: MakeMachine
) -> None:
    """No list of modules to keep whole is needed for a component that is placed whole."""
    virtual_machine()
    pipe: Any = load_from_yaml(controlnet, {"device_map": strategy})
    assert type(pipe.controlnet)._no_split_modules is None
    assert {"controlnet", "unet", "vae", "text_encoder", "safety_checker"} == {*pipe.hf_device_map}
    assert devices_of(pipe.controlnet) == {pipe.hf_device_map["controlnet"]} != {"cpu"}
    assert report(pipe).problems == ()


def test_b06_a_class_that_says_nothing_is_not_spread(controlnet: Path, virtual_machine: MakeMachine) -> None:
    """Asked for two devices, it is whole on the first, and its name is in a note of the plan."""
    virtual_machine()
    entry = {"execution": ["cuda:0", "cuda:1"]}
    pipe: Any = load_from_yaml(controlnet, {"device_map": {"controlnet": entry, "default": "cuda:1"}})
    assert devices_of(pipe.controlnet) == {"cuda:0"}
    assert any(note.startswith("controlnet is placed whole: ") for note in report(pipe).plan.notes)


# B07, B13: one device


@pytest.mark.parametrize(
    ("form", "device"),
    [
        ("cuda", "cuda:0"),
        ("cuda:1", "cuda:1"),
        (1, "cuda:1"),
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        (dict.fromkeys(NAMES, "cuda:1"), "cuda:1"),
        ({"default": "cuda:0"}, "cuda:0"),
        ({"default": "cpu"}, "cpu"),
    ],
)
def test_b07_one_device_has_every_module_and_leaves_no_hook(
    form: object, device: str, virtual_machine: MakeMachine
) -> None:
    """Every parameter and buffer is there, what has none is as it was, and nothing stands before a module."""
    virtual_machine()
    pipe = load(form)
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    assert {name: devices_of(module) for name, module in modules.items()} == {name: {device} for name in NAMES}
    assert not any(hooked(module) for module in modules.values())
    assert pipe.tokenizer("seven").input_ids
    assert pipe.hf_device_map == dict.fromkeys(NAMES, device)


@pytest.mark.parametrize("form", ["cuda:0", "cpu", {"unet": "cuda:0", "default": "cuda:1"}])
def test_b13_moving_a_pipeline_of_resident_components_is_no_sequential_offload(
    form: object, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """``to`` moves everything, raises nothing, and leaves nothing behind, whatever map it was loaded with."""
    virtual_machine()
    pipe = load(form)
    pipe.to("cuda:1")
    assert all(devices_of(getattr(pipe, name)) == {"cuda:1"} for name in NAMES)
    assert not any(hooked(getattr(pipe, name)) for name in NAMES)
    assert draws(pipe, expected[:1]) == [True]


def test_b13_the_pipelines_map_has_the_places_within_components(virtual_machine: MakeMachine) -> None:
    """A component with a map of its own shows it in the one map of the pipeline, and it is true."""
    virtual_machine()
    pipe = load({"unet": "cuda:0", "unet.mid_block": "cuda:1", "vae.decoder": "cuda:0", "default": "cuda:1"})
    assert pipe.hf_device_map == {
        "vae": "cuda:1",
        "vae.decoder": "cuda:0",
        "text_encoder": "cuda:1",
        "unet": "cuda:0",
        "unet.mid_block": "cuda:1",
    }
    assert devices_of(pipe.unet.mid_block) == {"cuda:1"}
    assert devices_of(pipe.unet.down_blocks) == devices_of(pipe.vae.decoder) == {"cuda:0"}


# B08: loaded on the cpu first, offloaded then


@pytest.mark.parametrize("word", ["cpu_offload_with_hook", "sequential_cpu_offload", "group_offload"])
def test_b08_a_map_of_the_cpu_and_offloading_go_together(
    word: str, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """Weights rest on the cpu, calls run on the accelerator, and the map says where they rest."""
    machine = virtual_machine()
    pipe = load("cpu", low_memory=word)
    assert pipe.hf_device_map == dict.fromkeys(NAMES, "cpu")
    assert str(pipe._execution_device) == "cuda:0"
    assert draws(pipe, expected[:1]) == [True]
    assert weights_moved(machine.ledger)["cpu", "cuda:0"]


# B09, B20: a strategy is a plan by the time anything is placed


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cards", [[1, 1], []], ids=["two cards", "no card"])
def test_b09_no_strategy_is_handed_on_as_a_word(
    strategy: str, cards: list[float], virtual_machine: MakeMachine
) -> None:
    """What is placed, and what the pipeline reports, are devices; a pipeline without accelerators reports the cpu."""
    checked = checked_from(f"{DIGITS_TEXT}reserve: 0\ndevice_map: {strategy}\n")
    plan = plan_for(checked, inventory(cuda=cards))
    if cards:
        virtual_machine(count=len(cards))
    pipe: Any = load_plan(checked, plan, NoProgress())["pipeline"]
    assert {*pipe.hf_device_map} == {*NAMES}
    assert {*pipe.hf_device_map.values()} <= ({f"cuda:{index}" for index in range(len(cards))} or {"cpu"})
    assert report(pipe).problems == ()


# B12: a component that was loaded apart


@pytest.mark.parametrize(
    ("strategy", "name"), [*(("balanced", name) for name in NAMES), ("balanced_low_0", "unet"), ("auto", "unet")]
)
def test_b12_a_component_that_was_loaded_apart_takes_its_place(
    strategy: str, name: str, virtual_machine: MakeMachine, plain: Any, expected: list[np.ndarray]
) -> None:
    """A ready module put into a placed pipeline is moved, in the map, and carried to like the one before it."""
    virtual_machine()
    pipe = load(strategy)
    other = type(getattr(plain, name)).from_pretrained(PIPELINE / name)
    dmconfig.swap(pipe, name, other)
    assert getattr(pipe, name) is other
    assert devices_of(other) == {pipe.hf_device_map[name]} != {"cpu"}
    assert report(pipe).problems == ()
    assert draws(pipe, expected[:1]) == [True]


# B16: a component that two pipelines share


def test_b16_two_files_never_share_a_component(virtual_machine: MakeMachine, expected: list[np.ndarray]) -> None:
    """Loaded from one source with different maps, each pipeline has its own; moving one leaves the other in place."""
    virtual_machine()
    here, there = load("cuda:0"), load({"vae": "cuda:0", "default": "cuda:1"})
    assert not any(getattr(here, name) is getattr(there, name) for name in NAMES)
    assert draws(there, expected[:1]) == draws(here, expected[:1]) == [True]
    here.to("cpu")
    assert there.hf_device_map == {"vae": "cuda:0", "text_encoder": "cuda:1", "unet": "cuda:1"}
    assert report(there).problems == ()
    assert draws(there, expected[:1]) == [True]


@pytest.mark.parametrize("device_map", [{"vae": "cuda:0", "default": "cuda:1"}, "cuda:0"])
def test_b16_a_shared_component_has_one_home(
    device_map: object, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """A second pipeline on the same components shares their one placement: neither moves them under the other."""
    virtual_machine()
    pipe = load(device_map)
    derived: Any = dmconfig.derive(pipe, StableDiffusionImg2ImgPipeline)
    assert derived.vae is pipe.vae
    assert derived.hf_device_map == pipe.hf_device_map
    picture = torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
    draw_digit(derived, 0, image=picture, strength=0.8, steps=3)
    assert draws(pipe, expected[:1]) == [True]
    assert report(pipe).problems == report(derived).problems == ()

    derived.to("cuda:1")  # one pipeline's move is the other's too
    assert all(devices_of(getattr(pipe, name)) == {"cuda:1"} for name in NAMES)
    assert pipe.hf_device_map is derived.hf_device_map is None


# B17: fewer devices than the file names


@pytest.mark.parametrize(
    "overrides",
    [
        {"device_map": "cuda:3"},
        {"device_map": {"unet": 3, "default": "cpu"}},
        {"device_map": {"unet": {"execution": ["cuda:0", "cuda:3"]}, "default": "cpu"}},
        {"device_map": "cpu", "max_memory": {3: "1GiB"}},
        {"device_map": "cpu", "execution_device": "gpu:3"},
    ],
)
def test_b17_a_device_that_is_not_there_is_found_before_anything_is_loaded(
    overrides: dict[str, Any], virtual_machine: MakeMachine
) -> None:
    """A file written on a larger machine is refused with the devices there are, and no component is read."""
    virtual_machine(count=1)
    heard = Heard()
    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(DIGITS, overrides, progress=heard)
    assert [problem.code for problem in caught.value.problems] == [Code.NO_SUCH_DEVICE]
    assert "its devices are: cuda:0, cpu" in caught.value.problems[0].why
    assert heard.phases == ["plan"]


# B18: a device that was chosen and not used


@pytest.mark.parametrize("name", NAMES)
def test_b18_a_component_that_did_not_get_to_its_device_is_found_at_once(
    name: str, virtual_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader that leaves one component on the cpu does not return a pipeline: planned and actual device are told."""
    machine = virtual_machine()
    attach = Resident.attach

    def ignored(self: Resident) -> None:
        if type(self.module).__name__ != classes[name]:
            attach(self)

    classes = {"vae": "AutoencoderKL", "text_encoder": "CLIPTextModel", "unet": "UNet2DConditionModel"}
    monkeypatch.setattr(Resident, "attach", ignored)
    with pytest.raises(DMConfigError) as caught:
        load({"unet": "cuda:1", "vae": "cuda:0", "text_encoder": "cuda:1"})
    (problem,) = caught.value.problems
    planned = "cuda:0" if name == "vae" else "cuda:1"
    assert (problem.code, problem.what) == (
        Code.PLACEMENT_DIFFERS,
        f"{name} was planned on {planned} and is on cpu",
    )
    assert not any(machine.ledger.live_bytes(device) for device in ("cuda:0", "cuda:1"))


@pytest.mark.parametrize(
    ("name", "device"), [("vae", "cuda:1"), ("text_encoder", "cpu"), ("unet", "cpu"), ("unet", "meta")]
)
def test_b18_a_component_that_was_moved_behind_the_placements_back_is_reported(
    name: str, device: str, virtual_machine: MakeMachine
) -> None:
    """Later on the report compares too, and names the one component that is elsewhere."""
    virtual_machine()
    pipe = load("cuda:0")
    assert report(pipe).problems == ()
    getattr(pipe, name).to(device)
    (problem,) = report(pipe).problems
    assert problem.what.startswith(f"{name} was planned on cuda:0 and is on {device}")
