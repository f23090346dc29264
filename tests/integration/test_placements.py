"""Every placement on virtual accelerators, with real values: the same bits as a plain CPU run, twice in a row."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmconfig import DMConfigError, load_from_yaml
from dmconfig.units import KIB, MIB
from tests.virtual_devices import MakeMachine

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits.yaml"
PIPELINE = ROOT / "examples" / "digits" / "pipeline"
SEEDS = (0, 1)
STEPS = 3

# unet 3.0 MiB, vae 0.4 MiB, text encoder 0.1 MiB
PLACEMENTS: dict[str, dict[str, Any]] = {
    "one device": {"device_map": "cuda:0"},
    "second device by number": {"device_map": 1},
    "cpu": {"device_map": "cpu"},
    "explicit": {"device_map": {"unet": "cuda:0", "vae": "cuda:1", "text_encoder": "cuda:1"}},
    "explicit, the other way round": {"device_map": {"unet": 1, "vae": 0, "text_encoder": 0}},
    "text encoder computed on the cpu": {"device_map": {"text_encoder": "cpu", "default": "cuda:0"}},
    "denoiser computed on the cpu": {"device_map": {"unet": "cpu", "default": "cuda:1"}},
    "balanced": {"device_map": "balanced"},
    "mixed": {"device_map": {"vae": "cuda:0", "default": "balanced"}},
    "cpu_offload_with_hook": {"device_map": "cuda:0", "low_memory": "cpu_offload_with_hook"},
    "cpu_offload_with_hook from the cpu": {"device_map": "cpu", "low_memory": "cpu_offload_with_hook"},
    "sequential_cpu_offload": {"device_map": "cuda:1", "low_memory": "sequential_cpu_offload"},
    "group_offload": {"device_map": "cuda:0", "low_memory": "group_offload"},
    "group_offload by blocks": {
        "device_map": "cuda:1",
        "low_memory": "group_offload",
        "group_offload": {"offload_type": "block_level", "num_blocks_per_group": 1},
    },
    "group_offload with a stream, beside a resident denoiser": {
        "device_map": {
            "unet": "cuda:0",
            "vae": {"execution": "cuda:1", "offload": "group"},
            "text_encoder": {"execution": "cuda:0", "offload": "group"},
        },
        "group_offload": {"use_stream": True, "record_stream": True, "low_cpu_mem_usage": True},
    },
    "the pipeline works elsewhere": {
        "device_map": {"unet": "cuda:0", "vae": "cuda:1", "text_encoder": "cpu"},
        "execution_device": "cuda:1",
    },
    "weights rest in their files": {
        "device_map": {
            "unet": {"execution": "cuda:0", "offload": "model", "storage": "disk"},
            "vae": {"execution": "cuda:1", "offload": "sequential", "storage": "disk"},
            "text_encoder": {"execution": "cuda:0", "offload": "sequential", "storage": "disk"},
        }
    },
    "the cpu has no room, the disk has": {
        "device_map": "cuda:0",
        "low_memory": "cpu_offload_with_hook",
        "max_memory": {"cuda:0": "100%", "cpu": 0, "disk": "1GiB"},
    },
    "what does not fit is brought whole": {
        "device_map": "balanced",
        "low_memory": "cpu_offload_with_hook",
        "max_memory": {"cuda:0": 3400 * KIB, "cuda:1": 100 * KIB},
    },
    "brought to two devices": {
        "device_map": {
            "unet": {"execution": "cuda:0", "offload": "model"},
            "vae": {"execution": "cuda:1", "offload": "model"},
            "text_encoder": {"execution": "cuda:1", "offload": "model"},
        }
    },
    "one of each kind": {
        "device_map": {
            "unet": {"execution": "cuda:0", "offload": "sequential"},
            "vae": {"execution": "cuda:1", "offload": "model"},
            "text_encoder": "cpu",
        }
    },
}


def draw(pipe: Any, seed: int, steps: int = STEPS, **more: Any) -> np.ndarray:
    """Return one picture [1, 32, 32, 3] of a seven, as floats."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    images: np.ndarray = pipe(
        "seven", num_inference_steps=steps, guidance_scale=3.0, generator=generator, output_type="np", **more
    ).images
    return images


@pytest.fixture(scope="module")
def plain() -> Any:
    """The pipeline as diffusers loads it, on the cpu."""
    from diffusers import DiffusionPipeline

    return DiffusionPipeline.from_pretrained(PIPELINE)


@pytest.fixture(scope="module")
def expected(plain: Any) -> list[np.ndarray]:
    """The pictures of a plain cpu run, one per seed, computed with one thread as the virtual devices do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [draw(plain, seed) for seed in SEEDS]
    finally:
        torch.set_num_threads(threads)


def load(placement: Mapping[str, Any]) -> Any:
    """Return the digits pipeline under a placement, without a reserve: the devices here are tiny."""
    return load_from_yaml(DIGITS, {"reserve": 0, **placement})


def resting_devices(pipe: Any) -> dict[str, set[str]]:
    """Where the parameters of each component are; those that hooks hold back count as on the cpu."""
    found = {}
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            devices = {str(tensor.device) for tensor in component.parameters()}
            found[name] = {"cpu" if device == "meta" else device for device in devices}
    return found


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_placement_gives_the_bits_of_a_plain_run_twice_and_is_undone(
    name: str, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """Two generations in a row equal the plain run bit for bit, and the reported map is where the weights are.

    After a reset all weights are on the cpu, no hook is left, and the pipeline draws there as a plain one does.
    """
    virtual_machine()
    pipe = load(PLACEMENTS[name])

    pictures = [draw(pipe, seed) for seed in SEEDS]

    assert all(np.array_equal(picture, reference) for picture, reference in zip(pictures, expected, strict=True))
    on_host = {"disk": "cpu"}  # mapped from their files, which the audit at loading has checked
    assert resting_devices(pipe) == {part: {on_host.get(to, to)} for part, to in pipe.hf_device_map.items()}
    assert set(pipe.hf_device_map) == {"unet", "vae", "text_encoder"}

    pipe.reset_device_map()
    pipe.reset_device_map()

    assert pipe.hf_device_map is None
    for component in (pipe.unet, pipe.vae, pipe.text_encoder):
        for module in component.modules():
            assert not {"forward", "encode", "decode", "_hf_hook"} & set(vars(module))
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
        assert {str(tensor.device) for tensor in component.parameters()} == {"cpu"}
    assert np.array_equal(draw(pipe, 0), expected[0])


@pytest.mark.parametrize("name", ["explicit", "balanced", "mixed", "text encoder computed on the cpu"])
def test_latents_stay_with_the_denoiser(name: str, virtual_machine: MakeMachine) -> None:
    """Latents are on the denoiser's device after every step, and more steps move not one tensor more."""
    machine = virtual_machine()
    pipe = load(PLACEMENTS[name])
    denoiser = torch.device(pipe.hf_device_map["unet"])
    seen: list[torch.device] = []

    def watch(_pipe: Any, _step: int, _timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        seen.append(values["latents"].device)
        return values

    moves = []
    for steps in (2, 6):
        machine.ledger.reset()
        draw(pipe, 0, steps=steps, callback_on_step_end=watch)
        moves.append({(move.source, move.destination): count.count for move, count in machine.ledger.moves.items()})

    assert set(seen) == {denoiser}
    assert len(seen) == 2 + 6
    assert moves[0] == moves[1]


def test_an_explicit_map_makes_only_the_hops_it_must(virtual_machine: MakeMachine) -> None:
    """Ids go to the text encoder and two outputs back, twice for guidance; latents go to the VAE, a picture back."""
    machine = virtual_machine()
    pipe = load(PLACEMENTS["explicit"])
    machine.ledger.reset()

    draw(pipe, 0)

    between = {
        (move.source, move.destination): count.count
        for move, count in machine.ledger.moves.items()
        if "cpu" not in (move.source, move.destination)
    }
    assert between == {("cuda:0", "cuda:1"): 2 + 1, ("cuda:1", "cuda:0"): 2 * 2 + 1}


def test_weights_brought_whole_take_the_device_one_at_a_time(virtual_machine: MakeMachine) -> None:
    """The peak under cpu_offload_with_hook is the largest component and its activations, far below all of them."""
    machine = virtual_machine()
    pipe = load(PLACEMENTS["cpu_offload_with_hook"])
    machine.ledger.reset()
    draw(pipe, 0)
    brought = machine.ledger.peak_bytes("cuda:0")
    pipe.reset_device_map()

    resident = load(PLACEMENTS["one device"])
    machine.ledger.reset()
    draw(resident, 0)

    smaller = sum(p.numel() * 4 for part in (resident.vae, resident.text_encoder) for p in part.parameters())
    assert machine.ledger.peak_bytes("cuda:0") - brought >= smaller


def test_weights_brought_by_layer_never_hold_a_component(virtual_machine: MakeMachine) -> None:
    """Under sequential_cpu_offload the device never holds as much as the denoiser's weights alone."""
    machine = virtual_machine()
    pipe = load(PLACEMENTS["sequential_cpu_offload"])
    machine.ledger.reset()

    draw(pipe, 0)

    assert 0 < machine.ledger.peak_bytes("cuda:1") < 1 * MIB


@pytest.mark.parametrize("name", ["explicit", "brought to two devices", "sequential_cpu_offload"])
def test_a_submodule_called_directly_is_an_entry_too(name: str, virtual_machine: MakeMachine, plain: Any) -> None:
    """Pipelines call parts of a component, such as a text encoder's last norm: carried there and back like a call."""
    virtual_machine()
    pipe = load(PLACEMENTS[name])
    home = torch.device(pipe._execution_device)
    value = torch.linspace(-1, 1, 64).reshape(2, 32)
    norm = next(part for part in pipe.text_encoder.modules() if isinstance(part, torch.nn.LayerNorm))
    reference = next(part for part in plain.text_encoder.modules() if isinstance(part, torch.nn.LayerNorm))

    result = norm(value.to(home))

    assert result.device == home
    assert torch.equal(result.cpu(), reference(value))


@pytest.mark.parametrize("name", ["explicit", "brought to two devices", "one of each kind"])
def test_encoding_a_picture_is_carried_like_decoding_one(name: str, virtual_machine: MakeMachine, plain: Any) -> None:
    """Image-to-image enters the VAE through encode, whose result is a distribution, and gives the plain run's bits."""
    from diffusers import StableDiffusionImg2ImgPipeline

    virtual_machine()
    picture = torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
    pipe = load({**PLACEMENTS[name], "pipeline.class": "StableDiffusionImg2ImgPipeline"})
    assert isinstance(pipe, StableDiffusionImg2ImgPipeline)

    reference = StableDiffusionImg2ImgPipeline(**plain.components, requires_safety_checker=False)
    arguments: dict[str, Any] = {"image": picture, "strength": 0.8, "steps": 5}
    assert np.array_equal(draw(pipe, 0, **arguments), draw(reference, 0, **arguments))


def test_one_device_leaves_no_hook(virtual_machine: MakeMachine) -> None:
    """On one device the components are as diffusers made them: no wrapped method, no hook of anyone."""
    virtual_machine()
    pipe = load(PLACEMENTS["one device"])

    for component in (pipe.unet, pipe.vae, pipe.text_encoder):
        for module in component.modules():
            assert "forward" not in vars(module)
            assert not hasattr(module, "_hf_hook")
            assert not module._forward_hooks
            assert not module._forward_pre_hooks


def test_a_placement_that_breaks_off_leaves_nothing_behind(virtual_machine: MakeMachine) -> None:
    """When a device runs out while placing, the error says so and what had been placed is taken back."""
    machine = virtual_machine(capacity_bytes=2 * MIB)

    with pytest.raises(DMConfigError) as caught:
        load({"device_map": {"unet": {"execution": "cuda:0", "offload": "model"}, "default": "cuda:1"},
              "max_memory": {"cuda:0": "100%"}})  # fmt: skip

    assert caught.value.exit_code == 3  # known before anything was loaded
    assert machine.ledger.live_bytes("cuda:1") == 0


def test_an_exception_in_a_call_does_not_confuse_the_next(
    virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """After a call that failed inside a component, the next call gives the right picture."""
    virtual_machine()
    pipe = load(PLACEMENTS["brought to two devices"])

    with pytest.raises(RuntimeError):
        pipe.unet(torch.zeros(1, 7, 8, 8), 1, torch.zeros(1, 16, 32))  # seven channels instead of four
    with pytest.raises((RuntimeError, TypeError)):
        pipe.unet.conv_in("no tensor")

    assert np.array_equal(draw(pipe, 0), expected[0])


def test_the_picture_of_a_seven_is_a_seven(virtual_machine: MakeMachine) -> None:
    """With the file's own settings, on two devices, the judge takes each digit for what its prompt names."""
    spec = importlib.util.spec_from_file_location("judge", ROOT / "examples" / "digits" / "judge.py")
    assert spec is not None
    assert spec.loader is not None
    judge_module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(judge_module)
    judge = judge_module.Judge.trained()
    virtual_machine()
    pipe = load(PLACEMENTS["explicit"])
    pipe.set_progress_bar_config(disable=True)

    for seed, (number, word) in enumerate([(7, "seven"), (2, "two"), (0, "zero")]):
        picture = pipe(word, generator=torch.Generator().manual_seed(seed)).images[0]
        assert judge.digit_of(picture) == number


def test_weights_brought_whole_go_home_without_a_copy(virtual_machine: MakeMachine) -> None:
    """Weights travel to the device only: what rests on the cpu stays there, mapped from the file."""
    machine = virtual_machine()
    pipe = load(PLACEMENTS["cpu_offload_with_hook"])
    resting = {tensor: tensor.data_ptr() for tensor in pipe.unet.parameters()}
    machine.ledger.reset()

    draw(pipe, 0)

    assert {move.destination for move in machine.ledger.moves if move.kind == "weights"} == {"cuda:0"}
    assert {tensor: tensor.data_ptr() for tensor in pipe.unet.parameters()} == resting


def test_what_a_call_writes_to_weights_comes_home(virtual_machine: MakeMachine) -> None:
    """Weights written to, or cast, while they are on the device are copied back instead of forgotten."""
    virtual_machine()
    pipe = load(PLACEMENTS["cpu_offload_with_hook"])

    def write(_pipe: Any, _step: int, _timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            pipe.unet.conv_out.bias.fill_(0.5)
        pipe.unet.conv_in.to(torch.float64).to(torch.float32)
        return values

    draw(pipe, 0, callback_on_step_end=write)

    assert pipe.unet.conv_out.bias.device == torch.device("cpu")
    assert torch.equal(pipe.unet.conv_out.bias, torch.full((4,), 0.5))
    assert pipe.unet.conv_in.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["cpu_offload_with_hook", "one of each kind", "group_offload"])
def test_placements_work_under_inference_mode(
    name: str, virtual_machine: MakeMachine, expected: list[np.ndarray]
) -> None:
    """A caller who turns inference mode on gets the same pictures, in it and after it."""
    virtual_machine()
    pipe = load(PLACEMENTS[name])

    with torch.inference_mode():
        inside = draw(pipe, 0)

    assert np.array_equal(inside, expected[0])
    assert np.array_equal(draw(pipe, 1), expected[1])
