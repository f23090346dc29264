from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, attach_align_device_hook
from diffusers import DiffusionPipeline
from diffusers.hooks import apply_group_offloading

from dmconfig.units import MIB
from dmconfig.virtual import DeviceMismatchError, UnknownValueError, VirtualMachine
from tests.virtual_devices import MakeMachine

DIGITS = Path(__file__).parents[3] / "examples" / "digits" / "pipeline"
MODULES = ("text_encoder", "unet", "vae")
PHASES = ("text_encoder", "unet", "vae.decode")
UNET_BYTES, TEXT_ENCODER_BYTES, VAE_BYTES = 3_209_728, 103_424, 495_104


def load() -> Any:
    pipeline = DiffusionPipeline.from_pretrained(DIGITS)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: Any, steps: int = 3) -> np.ndarray[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    result = pipeline("seven", num_inference_steps=steps, guidance_scale=3.0, generator=generator, output_type="np")
    images: np.ndarray[Any, Any] = result.images
    return images


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plain_image(one_thread: None) -> np.ndarray[Any, Any]:
    """The image of a plain run on the CPU."""
    return draw(load())


@pytest.fixture(scope="module")
def plain_image_of_one_step(one_thread: None) -> np.ndarray[Any, Any]:
    """The same after one step only."""
    return draw(load(), steps=1)


def to_one(pipeline: Any) -> None:
    pipeline.to("cuda:1")


def to_index_less(pipeline: Any) -> None:
    pipeline.to("cuda")


def modules_apart_with_hooks(pipeline: Any) -> None:
    dispatch_model(pipeline.text_encoder, {"": 1}, force_hooks=True)
    dispatch_model(pipeline.unet, {"": "cuda:0"}, force_hooks=True)
    dispatch_model(pipeline.vae, {"": "cuda:1"}, force_hooks=True)


def unet_cut_in_two(pipeline: Any) -> None:
    dispatch_model(pipeline.text_encoder, {"": 1}, force_hooks=True)
    dispatch_model(pipeline.vae, {"": "cuda:1"}, force_hooks=True)
    children = [name for name, _ in pipeline.unet.named_children()]
    devices = {name: f"cuda:{index % 2}" for index, name in enumerate(children)}
    dispatch_model(pipeline.unet, devices, main_device="cuda:0", force_hooks=True)


def leaves_offloaded(pipeline: Any) -> None:
    for name in MODULES:
        cpu_offload(getattr(pipeline, name), execution_device=torch.device("cuda:0"), offload_buffers=True)


def one_leaves_offloaded(pipeline: Any) -> None:
    pipeline.to("cuda:0")
    device = torch.device("cuda:1")
    add_hook_to_module(pipeline.unet, AlignDevicesHook(io_same_device=True, execution_device=device), append=True)
    attach_align_device_hook(pipeline.unet, execution_device=device, offload=True)


def modules_offloaded(pipeline: Any) -> None:
    hook = None
    for name in MODULES:
        _, hook = cpu_offload_with_hook(getattr(pipeline, name), "cuda:1", prev_module_hook=hook)


def groups_offloaded(pipeline: Any) -> None:
    pipeline.enable_group_offload(
        onload_device=torch.device("cuda:0"),
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
        use_stream=True,
    )


@pytest.mark.parametrize(
    "place",
    [
        to_one, to_index_less, modules_apart_with_hooks, unet_cut_in_two, leaves_offloaded, one_leaves_offloaded,
        modules_offloaded, groups_offloaded,
    ],
)  # fmt: skip
def test_values_equal_a_plain_run(
    virtual_machine: MakeMachine, plain_image: np.ndarray[Any, Any], place: Callable[[Any], None]
) -> None:
    """However the pipeline is placed, its image is that of a plain CPU run, bit for bit, and no memory is left."""
    machine = virtual_machine()
    pipeline = load()
    place(pipeline)
    assert np.array_equal(draw(pipeline), plain_image)
    used = [machine.ledger.peak_bytes(f"cuda:{index}") for index in range(2)]
    assert max(used) > 400_000, "it ran on the devices"
    del pipeline
    gc.collect()
    assert [machine.ledger.live_bytes(f"cuda:{index}") for index in range(2)] == [0, 0]


GROUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "non-blocking": {"non_blocking": True},
    "stream": {"use_stream": True},
    "stream recorded": {"use_stream": True, "record_stream": True},
    "stream, pinned when needed": {"use_stream": True, "low_cpu_mem_usage": True},
    "disk": {"offload_to_disk_path": "a folder"},
    "disk, stream recorded": {"offload_to_disk_path": "a folder", "use_stream": True, "record_stream": True},
}


@pytest.mark.parametrize("level", ["leaf_level", "block_level"])
@pytest.mark.parametrize("name", GROUPS)
def test_group_offloading_runs_unmodified(
    virtual_machine: MakeMachine,
    plain_image_of_one_step: np.ndarray[Any, Any],
    tmp_path: Path,
    name: str,
    level: str,
) -> None:
    """Diffusers' group offloading, with every option, gives the bits of a plain run and takes little of the device.

    The VAE is always offloaded by leaves: by blocks, diffusers brings its rest only when ``forward`` is called.
    """
    machine = virtual_machine()
    pipeline = load()
    for component in MODULES:
        options = dict(GROUPS[name])
        if "offload_to_disk_path" in options:  # by component: the files are named after the path in the component
            options["offload_to_disk_path"] = str(tmp_path / component)
        by_blocks = level == "block_level" and component != "vae"
        apply_group_offloading(
            getattr(pipeline, component),
            onload_device=torch.device("cuda:0"),
            offload_type="block_level" if by_blocks else "leaf_level",
            num_blocks_per_group=1 if by_blocks else None,
            **options,
        )
    machine.ledger.reset()
    with machine.track(pipeline.components):
        for _ in range(2):  # the first traces in which order, with streams the second fetches ahead
            assert np.array_equal(draw(pipeline, steps=1), plain_image_of_one_step)
    moved = machine.ledger.moved(phase="unet", source="cpu", destination="cuda:0")
    assert moved.bytes > 2 * 3_000_000, "the UNet's weights, once a step"
    assert machine.ledger.peak_bytes("cuda:0", phase="unet") > 0
    assert machine.ledger.peak_bytes("cuda:0", phase="unet", kind="weights") < UNET_BYTES
    assert bool(list(tmp_path.rglob("*.safetensors"))) == name.startswith("disk")


def test_components_are_where_they_were_put(virtual_machine: MakeMachine) -> None:
    """Each component's weights are on its own device, with the bytes they have there."""
    ledger = virtual_machine().ledger
    pipeline = load()
    pipeline.unet.to("cuda:0")
    pipeline.vae.to("cuda:1")
    pipeline.text_encoder.to("cuda:1")
    gc.collect()
    assert str(pipeline.unet.device) == "cuda:0"
    assert str(pipeline.vae.device) == "cuda:1"
    assert ledger.live_bytes("cuda:0", kind="weights") == UNET_BYTES == aligned_bytes(pipeline.unet)
    expected = aligned_bytes(pipeline.vae) + aligned_bytes(pipeline.text_encoder)
    assert ledger.live_bytes("cuda:1", kind="weights") == expected


def test_components_apart_without_a_bridge_raise(virtual_machine: MakeMachine) -> None:
    """Two devices and nothing that carries tensors between them fail as on real ones, where the first two meet."""
    machine = virtual_machine()
    pipeline = load()
    pipeline.unet.to("cuda:0")
    pipeline.text_encoder.to("cuda:1")
    pipeline.vae.to("cuda:1")
    message = r"found at least two devices, cuda:0 and cuda:1! \(op aten\.\w+ in unet\.time_embedding\.linear_1\)$"
    with machine.track(pipeline.components), pytest.raises(DeviceMismatchError, match=message):
        draw(pipeline)


def test_leaf_offload_needs_little_memory(virtual_machine: MakeMachine) -> None:
    """Leaf-wise offloading holds one leaf at a time, and moves the denoiser's weights once a step."""
    machine = virtual_machine(capacity_bytes=MIB)  # less than the UNet's 3 MiB
    pipeline = load()
    leaves_offloaded(pipeline)
    machine.ledger.reset()
    with machine.track(pipeline.components):
        draw(pipeline)
    unet_bytes = sum(tensor.numel() * tensor.element_size() for tensor in load().unet.parameters())
    moved = {move: count for move, count in machine.ledger.moves.items() if move.phase == "unet"}
    weights = {count.bytes for move, count in moved.items() if move.kind == "weights"}
    assert weights == {3 * unet_bytes}
    assert 0 < machine.ledger.peak_bytes("cuda:0", phase="unet", kind="weights") < unet_bytes / 8


def test_tracking_ends_with_its_block(virtual_machine: MakeMachine) -> None:
    """After the block the components are as they were: no hooks, no wrapped methods, no phase open."""
    machine = virtual_machine()
    pipeline = load()
    before = {name: set(vars(getattr(pipeline, name))) for name in MODULES}
    with machine.track(pipeline.components):
        assert "decode" in vars(pipeline.vae)
        draw(pipeline)
    assert {name: set(vars(getattr(pipeline, name))) for name in MODULES} == before
    assert not any(pipeline.unet._forward_hooks.values())
    assert not any(pipeline.unet._forward_pre_hooks.values())
    assert machine.ledger.current_phase == "outside"


def test_pipeline_too_large_for_its_device_raises(virtual_machine: MakeMachine) -> None:
    """A device smaller than the weights runs out of memory while they move."""
    virtual_machine(capacity_bytes=3 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"GPU 0 has a total capacity of 3\.0 MiB"):
        load().to("cuda:0")


def test_loader_threads_are_on_the_machine(virtual_machine: MakeMachine) -> None:
    """Transformers loads straight onto a virtual device, which it does in a pool of threads."""
    from transformers import CLIPTextModel

    ledger = virtual_machine().ledger
    model = CLIPTextModel.from_pretrained(DIGITS, subfolder="text_encoder", device_map={"": "cuda:1"})
    gc.collect()
    assert str(model.device) == "cuda:1"
    assert ledger.live_bytes("cuda:1", kind="weights") == aligned_bytes(model)


def test_diffusers_places_with_a_device_map(virtual_machine: MakeMachine, plain_image: np.ndarray[Any, Any]) -> None:
    """Diffusers' own balanced device map is computed from the virtual memory and runs."""
    virtual_machine()
    pipeline = DiffusionPipeline.from_pretrained(DIGITS, device_map="balanced", max_memory={0: "2MiB", 1: "60MiB"})
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.hf_device_map["unet"] == 1
    assert np.array_equal(draw(pipeline), plain_image)


def rehearse(place: Callable[[Any], None], *, values: bool) -> VirtualMachine:
    with VirtualMachine([64 * MIB] * 2, values=values, small_elements=4096) as machine:
        pipeline = load()
        for name in MODULES:
            machine.adopt(getattr(pipeline, name))
        place(pipeline)
        with machine.track(pipeline.components):
            draw(pipeline)
    return machine


@pytest.mark.parametrize("place", [to_one, unet_cut_in_two, leaves_offloaded, groups_offloaded])
def test_shapes_alone_predict_the_same_memory_and_moves(place: Callable[[Any], None]) -> None:
    """A shape-only run has every component's peak on every device, and every move, that a real run has."""
    real, shape_only = rehearse(place, values=True).ledger, rehearse(place, values=False).ledger
    peaks = {
        (phase, device): (real.peak_bytes(device, phase=phase), shape_only.peak_bytes(device, phase=phase))
        for phase in PHASES
        for device in ("cuda:0", "cuda:1")
    }
    assert {key: pair for key, pair in peaks.items() if pair[0] != pair[1]} == {}
    assert all(max(peaks[phase, "cuda:0"][0], peaks[phase, "cuda:1"][0]) > 10_000 for phase in PHASES)
    assert [real.peak_reserved_bytes(f"cuda:{index}") for index in range(2)] == [
        shape_only.peak_reserved_bytes(f"cuda:{index}") for index in range(2)
    ]
    assert moves_between(real) == moves_between(shape_only)


def moves_between(ledger: Any) -> dict[Any, Any]:
    return {move: count for move, count in ledger.moves.items() if "cuda" in move.source + move.destination}


def test_shape_only_offload_to_disk_writes_nothing(tmp_path: Path) -> None:
    """Without values, weights offloaded to disk are remembered, counted when they are read, and never written."""
    with VirtualMachine([64 * MIB], values=False, small_elements=4096) as machine:
        pipeline = load()
        for name in MODULES:
            machine.adopt(getattr(pipeline, name))
        pipeline.to("cuda:0")
        on_disk = {name: "disk" for name, _ in pipeline.unet.named_children()}
        dispatch_model(pipeline.unet, on_disk, main_device=0, offload_dir=str(tmp_path), force_hooks=True)
        with machine.track(pipeline.components):
            draw(pipeline)
    read = [count.bytes for move, count in machine.ledger.moves.items() if move.source == "disk"]
    assert sum(read) >= 3 * 3_000_000
    assert sum(path.stat().st_size for path in tmp_path.iterdir() if path.suffix == ".dat") == 0


def test_shape_only_refuses_to_invent_values() -> None:
    """Asking for a value that does not exist raises, unless the machine or the phase was declared free to guess."""
    options: dict[str, Any] = {"values": False, "small_elements": 16}
    with VirtualMachine([64 * MIB], **options) as machine, pytest.raises(UnknownValueError, match="only a shape"):
        torch.ones(64, device="cuda:0").sum().item()
    with VirtualMachine([64 * MIB], **options, zero_phases=["safety_checker"]) as machine:
        tensor = torch.ones(64, device="cuda:0").sum()
        with machine.ledger.phase("safety_checker"):
            assert tensor.item() == 0.0
        with pytest.raises(UnknownValueError):
            tensor.item()
    assert machine.guesses == {"item": 1}
    with VirtualMachine([64 * MIB], **options, unknown_values="zero"):
        assert torch.ones(64, device="cuda:0").any().item() is False


@pytest.mark.parametrize("number", [2, 2.0])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float16, torch.float32, torch.float64])
def test_shapes_meet_numbers_as_values_do(dtype: torch.dtype, number: float) -> None:
    """Arithmetic with a number gives the same dtype and the same strides."""

    def results(*, values: bool) -> list[object]:
        with VirtualMachine([64 * MIB], values=values, small_elements=4):
            tensor = torch.ones(1, 8, 8, 24, device="cuda:0", dtype=dtype).permute(0, 3, 1, 2)
            tensor = tensor.as_strided(tensor.shape, (24, *tensor.stride()[1:]))  # as a view of one image has it
            made = [operator(tensor, number) for operator in (torch.add, torch.sub, torch.mul, torch.div)]
            return [(result.dtype, result.stride()) for result in made]

    assert results(values=False) == results(values=True)


def test_shape_only_never_allocates_what_is_large() -> None:
    """A model of any size is adopted from meta and run without its memory."""
    with torch.device("meta"):
        layer = torch.nn.Linear(200_000, 200_000, dtype=torch.float16)  # 80 GB
    with VirtualMachine([1 << 40], values=False) as machine, torch.no_grad():
        machine.adopt(layer, "cuda:0")
        result = layer(torch.zeros(4, 200_000, dtype=torch.float16, device="cuda:0"))
        assert result.shape == (4, 200_000)
        assert machine.ledger.live_bytes("cuda:0", kind="weights") >= 80_000_000_000


def test_capacity_can_be_a_wish() -> None:
    """Without enforcement the ledger says how much a placement would have taken."""
    with VirtualMachine([MIB], enforce_capacity=False) as machine:
        load().to("cuda:0")
        assert torch.cuda.mem_get_info(0)[0] >= 0
    assert machine.ledger.peak_bytes("cuda:0") > 3 * MIB


def aligned_bytes(module: torch.nn.Module) -> int:
    """The bytes of a module's parameters and buffers on an accelerator, each rounded up to 512."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(-(-tensor.numel() * tensor.element_size() // 512) * 512 for tensor in tensors)
