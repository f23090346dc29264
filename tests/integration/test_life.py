"""The life of a placed pipeline: saved, moved, extended, shared, swapped, taken apart; each leaves no loose end."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules
from diffusers import AutoencoderKL, DiffusionPipeline, EulerDiscreteScheduler, StableDiffusionImg2ImgPipeline
from diffusers.hooks import HookRegistry, apply_group_offloading

import dmconfig
from dmconfig import DMConfigError
from dmconfig.dispatch import dispatch, placement_of
from dmconfig.dispatch.audit import audit
from dmconfig.offload import OffloadFolder
from dmconfig.units import KIB, MIB, format_bytes
from tests.integration.test_placements import DIGITS, PIPELINE, PLACEMENTS, draw, load
from tests.tiny_pipelines import in_dtype
from tests.virtual_devices import MakeMachine

PER_LEAF, GROUPS = ({"execution": "cuda:0", "offload": how} for how in ("sequential", "group"))
PARTS = ("text_encoder", "unet", "vae")
linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped from a file")
MIXES = ["explicit", "cpu_offload_with_hook", "sequential_cpu_offload", "one of each kind"]


@pytest.fixture(scope="module")
def plain() -> Any:
    """The pipeline as diffusers loads it, on the cpu."""
    return DiffusionPipeline.from_pretrained(PIPELINE)


@pytest.fixture(scope="module")
def seven(plain: Any, one_thread: None) -> np.ndarray:
    """The picture of a plain cpu run."""
    return draw(plain, 0)


def is_as_planned(pipe: Any) -> bool:
    """Whether every weight is where the plan says."""
    placement = placement_of(pipe)
    assert placement is not None
    return not [*audit(placement.modules, placement.plan)]


@pytest.mark.parametrize("name", MIXES)
def test_a_placed_pipeline_is_saved_whole(
    name: str, virtual_machine: MakeMachine, tmp_path: Path, plain: Any, seven: np.ndarray
) -> None:
    """Wherever weights rest, all of them are in the saved folder, and the placement goes on."""
    virtual_machine()
    pipe = load(PLACEMENTS[name])

    pipe.save_pretrained(tmp_path)

    assert is_as_planned(pipe)
    assert np.array_equal(draw(pipe, 0), seven)
    saved = DiffusionPipeline.from_pretrained(tmp_path)
    for part in ("unet", "vae", "text_encoder"):
        expected = getattr(plain, part).state_dict()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in getattr(saved, part).state_dict().items())


@pytest.mark.parametrize("name", MIXES)
def test_moving_the_whole_pipeline_undoes_the_placement(
    name: str, virtual_machine: MakeMachine, seven: np.ndarray
) -> None:
    """``pipe.to(device)`` means it: afterwards everything is there, without hooks."""
    virtual_machine()
    pipe = load(PLACEMENTS[name])
    draw(pipe, 0)

    pipe.to("cuda:1")

    assert placement_of(pipe) is None
    assert {str(p.device) for part in (pipe.unet, pipe.vae, pipe.text_encoder) for p in part.parameters()} == {"cuda:1"}
    assert np.array_equal(draw(pipe, 0), seven)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_unloading_frees_every_device(name: str, virtual_machine: MakeMachine) -> None:
    """After unloading, each device is at zero and no component is alive, also when a call has failed before."""
    machine = virtual_machine()
    pipe = load(PLACEMENTS[name])
    draw(pipe, 0, steps=1)

    def fail(*_: Any) -> dict[str, Any]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        draw(pipe, 0, steps=1, callback_on_step_end=fail)
    parts = [weakref.ref(part) for part in (pipe.unet, pipe.vae, pipe.text_encoder)]

    dmconfig.unload(pipe)
    dmconfig.unload(pipe)
    pipe.scheduler = None  # holds the last timesteps
    gc.collect()

    assert [machine.ledger.live_bytes(device) for device in ("cuda:0", "cuda:1")] == [0, 0]
    assert [part() for part in parts] == [None, None, None]


def test_loaded_frees_also_after_an_exception(virtual_machine: MakeMachine) -> None:
    """The with block lets go of the pipeline come what may."""
    machine = virtual_machine()
    overrides = {"reserve": 0, **PLACEMENTS["brought to two devices"]}

    def draw_and_fail() -> None:
        with dmconfig.loaded(DIGITS, overrides) as pipe:
            draw(pipe, 0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        draw_and_fail()
    gc.collect()
    assert [machine.ledger.live_bytes(device) for device in ("cuda:0", "cuda:1")] == [0, 0]


def test_placing_again_changes_only_what_differs(virtual_machine: MakeMachine, seven: np.ndarray) -> None:
    """Placing by the same plan is nothing; by another, the pipeline moves and draws the same."""
    machine = virtual_machine()
    pipe = load(PLACEMENTS["explicit"])
    first = placement_of(pipe)
    assert first is not None
    machine.ledger.reset()

    dispatch(pipe, first.plan)
    assert placement_of(pipe) is first
    assert not machine.ledger.moves

    other = dmconfig.plan_from_yaml(DIGITS, {"reserve": 0, **PLACEMENTS["one of each kind"]})
    derived = dmconfig.derive(pipe, StableDiffusionImg2ImgPipeline)
    dispatch(pipe, other)
    assert placement_of(derived) is placement_of(pipe)
    assert pipe.hf_device_map == derived.hf_device_map == other.device_map
    assert is_as_planned(pipe)
    assert np.array_equal(draw(pipe, 0), seven)


def disk_plan() -> Any:
    """The plan of a placement in which every component rests in files."""
    return dmconfig.plan_from_yaml(DIGITS, {"reserve": 0, **PLACEMENTS["weights rest in their files"]})


@linux
def test_placing_again_from_devices_to_files_is_refused_with_the_way_out(
    virtual_machine: MakeMachine, seven: np.ndarray
) -> None:
    """Weights that have been on devices are in no file: where nobody says where to write them, nothing changes."""
    virtual_machine()
    pipe = load({**PLACEMENTS["explicit"], "call": {"num_inference_steps": 2}})
    before = dmconfig.report(pipe).data()

    with pytest.raises(DMConfigError) as caught:
        dispatch(pipe, disk_plan())

    (problem,) = caught.value.problems
    assert problem.what == "vae, text_encoder, unet: to rest on disk, without a file to rest in"
    assert problem.fix == "load the pipeline anew with load_from_yaml, or give dispatch an OffloadFolder as files"
    assert dmconfig.report(pipe).data() == before
    assert np.array_equal(draw(pipe, 0), seven)


@linux
def test_placing_again_from_devices_to_a_folder_writes_there(
    virtual_machine: MakeMachine, seven: np.ndarray, tmp_path: Path
) -> None:
    """Given a folder, the weights are written, mapped and used; they come back to memory, and the folder goes."""
    ledger = virtual_machine().ledger
    pipe = load({**PLACEMENTS["explicit"], "call": {"guidance_scale": 3.0}})

    dispatch(pipe, disk_plan(), files=OffloadFolder(tmp_path, needed_bytes=4 * MIB))

    assert {file.parent.name for file in tmp_path.rglob("*.safetensors")} == {"text_encoder", "unet", "vae"}
    assert max(ledger.live_bytes(device) for device in ("cuda:0", "cuda:1")) <= 512  # position ids, in no file
    assert dmconfig.report(pipe).problems == ()
    assert pipe._call == {"guidance_scale": 3.0}
    assert np.array_equal(draw(pipe, 0), seven)
    pipe.reset_device_map()
    assert not [*tmp_path.iterdir()]
    assert np.array_equal(draw(pipe, 0), seven)


def test_placing_again_from_files_to_files_writes_nothing(virtual_machine: MakeMachine, seven: np.ndarray) -> None:
    """What has stayed mapped from its own files goes on so, in another way of being brought."""
    virtual_machine()
    pipe = load(PLACEMENTS["weights rest in their files"])
    other = {"device_map": {part: {"execution": "cuda:1", "offload": "model", "storage": "disk"} for part in PARTS}}

    dispatch(pipe, dmconfig.plan_from_yaml(DIGITS, {"reserve": 0, **other}))

    assert dmconfig.report(pipe).problems == ()
    assert np.array_equal(draw(pipe, 0), seven)


@pytest.mark.parametrize("name", MIXES)
def test_a_swapped_component_takes_the_others_place(name: str, virtual_machine: MakeMachine, plain: Any) -> None:
    """The new VAE is where the old one was, in use, and the old one is free."""
    virtual_machine()
    pipe = load(PLACEMENTS[name])
    draw(pipe, 0)
    old = weakref.ref(pipe.vae)
    torch.manual_seed(5)
    new = AutoencoderKL.from_config(plain.vae.config).eval()
    reference = DiffusionPipeline.from_pretrained(PIPELINE, vae=new)
    expected = draw(reference, 0)

    dmconfig.swap(pipe, "vae", new)
    gc.collect()

    assert pipe.vae is new
    assert old() is None
    assert is_as_planned(pipe)
    assert np.array_equal(draw(pipe, 0), expected)


@pytest.mark.parametrize("name", ["one device", "cpu_offload_with_hook", "what does not fit is brought whole"])
def test_a_swap_needs_room_for_one(name: str, virtual_machine: MakeMachine, plain: Any, seven: np.ndarray) -> None:
    """On devices with room for one denoiser the new one takes the old one's place; that is on the cpu, and works."""
    ledger = virtual_machine(capacity_bytes=4600 * KIB).ledger  # all three take 3.5 MiB, two denoisers 6
    pipe = load(PLACEMENTS[name])
    before = [ledger.live_bytes(device) for device in ("cuda:0", "cuda:1")]
    old, new = pipe.unet, type(plain.unet).from_config(plain.unet.config).eval()
    new.load_state_dict(plain.unet.state_dict())
    used = dmconfig.report(pipe).plan.devices

    dmconfig.swap(pipe, "unet", new)

    assert [ledger.live_bytes(device) for device in ("cuda:0", "cuda:1")] == before
    assert {str(each.device) for each in (*old.parameters(), *old.buffers())} == {"cpu"}
    assert dmconfig.report(pipe).plan.devices == used
    assert is_as_planned(pipe)
    assert np.array_equal(draw(pipe, 0), seven)


def test_a_swap_for_which_a_device_has_no_room_is_undone(
    virtual_machine: MakeMachine, plain: Any, seven: np.ndarray
) -> None:
    """Somebody else has taken the memory that the plan counts on: the old denoiser is back, and draws."""
    ledger = virtual_machine(capacity_bytes=6 * MIB).ledger
    pipe = load(PLACEMENTS["one device"])
    wide = {**plain.unet.config, "block_out_channels": (40, 80)}
    old, new = pipe.unet, type(plain.unet).from_config(wide).eval()
    assert 4 * MIB < sum(4 * each.numel() for each in new.parameters()) < 5 * MIB
    others = torch.zeros(384 * KIB, device="cuda:0")  # 1.5 MiB
    before = ledger.live_bytes("cuda:0"), dmconfig.report(pipe).data()

    with pytest.raises(torch.OutOfMemoryError):
        dmconfig.swap(pipe, "unet", new)
    gc.collect()

    assert pipe.unet is old
    assert (ledger.live_bytes("cuda:0"), dmconfig.report(pipe).data()) == before
    assert {str(each.device) for each in new.parameters()} == {"cpu"}
    del others
    assert np.array_equal(draw(pipe, 0), seven)


def test_what_goes_home_gives_its_memory_back(virtual_machine: MakeMachine) -> None:
    """Nothing stays reserved for weights that have left: neither when the next component comes, nor after the call."""
    ledger = virtual_machine().ledger
    pipe = load(PLACEMENTS["cpu_offload_with_hook"])
    reserved = []

    with torch.no_grad():
        for _ in range(2):
            pipe.vae.decode(torch.zeros(1, 4, 1, 1))
            reserved.append(ledger.reserved_bytes("cuda:0"))
            pipe.unet(torch.zeros(1, 4, 8, 8), 1, torch.zeros(1, 16, 32))
            reserved.append(ledger.reserved_bytes("cuda:0"))
    pipe.maybe_free_model_hooks()

    assert reserved[:2] == reserved[2:]
    assert reserved[0] < reserved[1]
    assert ledger.reserved_bytes("cuda:0") == 0


def test_a_swap_that_cannot_be_changes_nothing(virtual_machine: MakeMachine, plain: Any, seven: np.ndarray) -> None:
    """A class that does not fit, a name that does not exist, a module too large: each is refused before anything."""
    virtual_machine()
    pipe = load({**PLACEMENTS["explicit"], "max_memory": {"cuda:0": "4MiB", "cuda:1": "1MiB"}})
    wide = {**plain.vae.config, "block_out_channels": (16, 32, 48)}

    for name, component, said in [
        ("vae", plain.unet, "UNet2DConditionModel cannot be the 'vae'"),
        ("vay", plain.vae, "has no component 'vay'"),
        ("vae", AutoencoderKL.from_config(wide), "with the new vae, cuda:1 needs .* it offers 1.0 MiB"),
    ]:
        with pytest.raises(DMConfigError, match=said):
            dmconfig.swap(pipe, name, component)
        assert is_as_planned(pipe)
    assert np.array_equal(draw(pipe, 0), seven)


def test_a_component_swapped_into_a_file_s_place_rests_on_the_cpu(
    virtual_machine: MakeMachine, plain: Any, seven: np.ndarray
) -> None:
    """A module that came in no file cannot rest on disk: plan, map and report say where it rests instead."""
    virtual_machine()
    pipe = load(PLACEMENTS["weights rest in their files"])
    assert pipe.hf_device_map["unet"] == "disk"
    new = type(plain.unet).from_config(plain.unet.config)
    new.load_state_dict(plain.unet.state_dict())

    dmconfig.swap(pipe, "unet", new.eval())

    assert pipe.hf_device_map == {"unet": "cpu", "vae": "disk", "text_encoder": "disk"}
    assert dmconfig.report(pipe).problems == ()
    assert np.array_equal(draw(pipe, 0), seven)


def test_a_component_too_large_for_where_it_runs_is_not_swapped_in(
    virtual_machine: MakeMachine, plain: Any, seven: np.ndarray
) -> None:
    """A component that rests on the cpu has to fit the device that it is brought to as well."""
    virtual_machine()
    limits = {"max_memory": {"cuda:0": "3200KiB"}}  # the unet's 3097 KiB and a little
    pipe = load({**PLACEMENTS["cpu_offload_with_hook"], **limits})
    wide = {**plain.unet.config, "block_out_channels": (64, 128)}

    with pytest.raises(DMConfigError, match=r"with the new unet, cuda:0 needs .* it offers 3\.1 MiB"):
        dmconfig.swap(pipe, "unet", type(plain.unet).from_config(wide))

    assert np.array_equal(draw(pipe, 0), seven)


def test_a_component_without_weights_is_just_swapped(virtual_machine: MakeMachine) -> None:
    """A scheduler has no place; it is exchanged."""
    virtual_machine()
    pipe = load(PLACEMENTS["explicit"])

    dmconfig.swap(pipe, "scheduler", EulerDiscreteScheduler.from_config(pipe.scheduler.config))

    assert isinstance(pipe.scheduler, EulerDiscreteScheduler)
    assert draw(pipe, 0).shape == (1, 32, 32, 3)


ON_A_PICTURE: Mapping[str, Any] = {
    "image": torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32), "strength": 0.8, "steps": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def halves(one_thread: None) -> list[np.ndarray]:
    """What plain pipelines in half precision make of a picture, and of nothing but the prompt."""
    half = DiffusionPipeline.from_pretrained(PIPELINE, **in_dtype(torch.float16))
    on_a_picture = StableDiffusionImg2ImgPipeline(**half.components, requires_safety_checker=False)
    return [draw(on_a_picture, 0, **ON_A_PICTURE), draw(half, 0)]


@pytest.mark.parametrize("name", MIXES)
def test_a_derived_pipeline_shares_the_components(
    name: str, virtual_machine: MakeMachine, halves: list[np.ndarray]
) -> None:
    """Image-to-image on the same parts: none is copied, cast or moved, and both pipelines draw what they should."""
    machine = virtual_machine()
    pipe = load({**PLACEMENTS[name], "pipeline.dtype": "float16"})
    machine.ledger.reset()

    derived = dmconfig.derive(pipe, StableDiffusionImg2ImgPipeline)

    assert not machine.ledger.moves
    assert isinstance(derived, StableDiffusionImg2ImgPipeline)
    assert derived.unet is pipe.unet
    assert derived.hf_device_map == pipe.hf_device_map
    assert derived._execution_device == pipe._execution_device
    assert np.array_equal(draw(derived, 0, **ON_A_PICTURE), halves[0], equal_nan=True)
    assert np.array_equal(draw(pipe, 0), halves[1], equal_nan=True)
    assert is_as_planned(pipe)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a LoRA of the digits' denoiser, strong enough to change every picture."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    folder = tmp_path_factory.mktemp("lora")
    pipe = DiffusionPipeline.from_pretrained(PIPELINE)
    torch.manual_seed(3)
    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    pipe.save_lora_weights(folder, unet_lora_layers=get_peft_model_state_dict(pipe.unet))
    return folder


@pytest.fixture(scope="module")
def seven_with_lora(lora: Path, one_thread: None) -> np.ndarray:
    """The picture of a plain cpu run with that LoRA."""
    pipe = DiffusionPipeline.from_pretrained(PIPELINE)
    pipe.load_lora_weights(lora)
    return draw(pipe, 0)


@pytest.mark.parametrize("name", [*MIXES, "group_offload"])
def test_a_lora_is_loaded_and_taken_off_through_diffusers_own_methods(
    name: str, virtual_machine: MakeMachine, lora: Path, seven: np.ndarray, seven_with_lora: np.ndarray
) -> None:
    """With the LoRA the picture is that of a plain pipeline with it, without it again that of a plain one."""
    virtual_machine()
    pipe = load(PLACEMENTS[name])

    pipe.load_lora_weights(lora)
    assert is_as_planned(pipe)
    assert np.array_equal(draw(pipe, 0), seven_with_lora)
    assert not np.array_equal(seven_with_lora, seven)

    pipe.unload_lora_weights()
    assert is_as_planned(pipe)
    assert np.array_equal(draw(pipe, 0), seven)


@pytest.mark.parametrize("name", [*MIXES, "group_offload"])
def test_an_extra_that_cannot_be_loaded_leaves_everything_as_it_was(
    name: str, virtual_machine: MakeMachine, lora: Path, seven: np.ndarray, tmp_path: Path
) -> None:
    """A LoRA of which the text encoder's part is damaged: the denoiser's part is taken off again."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(lora / "pytorch_lora_weights.safetensors")
    for end, shape in (("lora_A.weight", (2, 99)), ("lora_B.weight", (99, 2))):
        tensors[f"text_encoder.text_model.encoder.layers.0.self_attn.q_proj.{end}"] = torch.ones(shape)
    save_file(tensors, tmp_path / "bad.safetensors", metadata={"format": "pt"})
    virtual_machine()
    pipe = load(PLACEMENTS[name])

    with pytest.raises((RuntimeError, ValueError)):
        pipe.load_lora_weights(tmp_path, weight_name="bad.safetensors")

    assert not any(pipe.get_list_adapters().values())
    assert is_as_planned(pipe)
    assert np.array_equal(draw(pipe, 0), seven)


def test_the_report_shows_asked_planned_and_applied(virtual_machine: MakeMachine) -> None:
    """Each component's plan stands beside where its bytes are, in which dtype, behind which hooks."""
    virtual_machine()
    pipe = load({**PLACEMENTS["one of each kind"], "pipeline.dtype": "float16"})

    condition = dmconfig.report(pipe)
    data = condition.data()

    assert condition.problems == ()
    assert data["asked"]["pipeline.dtype"] == "float16"
    assert data["asked"]["device_map"]["text_encoder"] == "cpu"
    applied = {each["component"]: each for each in data["applied"]}
    planned = {each["component"]: each for each in data["planned"]["components"]}
    assert set(applied) == set(planned) == {"unet", "vae", "text_encoder"}
    assert set(applied["vae"]["bytes_by_device"]) == {"cpu"}
    assert applied["vae"]["hooks"] == {"carried": 1}
    assert applied["unet"]["bytes_by_device"]["a hook"] == planned["unet"]["bytes"]
    assert applied["unet"]["hooks"]["accelerate"] > 100
    assert sum(applied["unet"]["bytes_by_dtype"].values()) == planned["unet"]["bytes"]
    assert {"torch", "diffusers", "dmconfig"} <= data["versions"].keys()
    assert "everything is as planned" in condition.text()
    assert f"applied  {format_bytes(planned['vae']['bytes'])} cpu; " in condition.text()


def test_the_report_finds_hooks_and_components_that_were_exchanged(virtual_machine: MakeMachine, plain: Any) -> None:
    """Hooks that others took off or put on, and a component put in by hand, are named."""
    virtual_machine()
    pipe = load(
        {**PLACEMENTS["one of each kind"], "device_map": {"unet": PER_LEAF, "vae": GROUPS, "default": "cuda:0"}}
    )
    remove_hook_from_submodules(pipe.unet)
    HookRegistry.check_if_exists_or_initialize(pipe.vae).remove_hook("group_offloading", recurse=True)
    apply_group_offloading(pipe.text_encoder, torch.device("cuda:0"), offload_type="leaf_level")
    old, pipe.vae = pipe.vae, copy.deepcopy(plain.vae)

    said = [problem.what for problem in dmconfig.report(pipe).problems]

    assert said == [
        "the vae of the pipeline is not the one that was placed",
        "vae is to be brought by the hooks of diffusers' group offloading, and has none",
        "text_encoder was planned on cuda:0 and is on cpu",
        "text_encoder has hooks of diffusers' group offloading, and was not planned with any",
        "unet is to be brought by the hooks of accelerate, and has none",
    ]
    pipe.vae = old


def test_a_derived_pipeline_with_fewer_components_has_a_report(virtual_machine: MakeMachine, plain: Any) -> None:
    """The report is that of the placement, also where the pipeline asked for it lacks one of the components."""
    virtual_machine()
    pipe = load(PLACEMENTS["explicit"])
    derived = dmconfig.derive(pipe, OnlyDecodes)

    assert not hasattr(derived, "unet")
    assert dmconfig.report(derived).data() == dmconfig.report(pipe).data()


class OnlyDecodes(DiffusionPipeline):  # type: ignore[misc]
    """A pipeline of one component."""

    def __init__(self, vae: AutoencoderKL) -> None:
        super().__init__()
        self.register_modules(vae=vae)


def test_the_report_finds_what_was_moved_behind_our_back(virtual_machine: MakeMachine) -> None:
    """A component that somebody moved or cast by hand is named, with both places."""
    virtual_machine()
    pipe = load(PLACEMENTS["explicit"])
    pipe.vae.to("cuda:0")
    pipe.text_encoder.to(torch.float16)

    said = [problem.what for problem in dmconfig.report(pipe).problems]

    assert said == [
        "vae was planned on cuda:1 and is on cuda:0",
        "text_encoder was planned in float32 and is in float16",
    ]
    assert "vae was planned on cuda:1" in str(dmconfig.report(pipe))


def test_a_pipeline_that_is_not_ours_has_no_report(plain: Any) -> None:
    """The report of a plain pipeline says how to get one."""
    with pytest.raises(DMConfigError, match="not placed by dmconfig"):
        dmconfig.report(plain)
