"""Single models on accelerators that have less room than they need, with maps of the product's own making.

Each model is loaded from its own files by ``from_pretrained``, spread by ``spread`` over rooms of 0.3, 0.5, 0.7 and 0.9
of its size, and placed by ``Placement``. Then every parameter is where the map says, no device ever holds more weights
than its room, and the output has the bits of the plain model's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.models.embeddings import AttentionPooling

from dmconfig import load_from_yaml, plan_from_yaml, report
from dmconfig.devices import DISK
from dmconfig.dispatch import Placement
from dmconfig.dispatch.audit import audit
from dmconfig.dispatch.placement import DEFAULT_GROUPS
from dmconfig.dispatch.weights import Grouped, PerLeaf, Weights
from dmconfig.layout import Layout, lay_out, layout_of, nearest_ancestor
from dmconfig.offload import OffloadFolder
from dmconfig.plan import Assignment, Part, Plan, Residency
from dmconfig.plan.requests import Place
from dmconfig.plan.split import Room, part_loads, spread
from tests.integration.test_matrix import weight_peaks
from tests.tiny_pipelines import Tiny, draw, in_dtype
from tests.virtual_devices import MakeMachine

SHARES = (0.3, pytest.param(0.5, marks=pytest.mark.slow), 0.7, pytest.param(0.9, marks=pytest.mark.slow))
"""The room of an accelerator, of the model's size."""
DEVICES = ("cuda:0", "cuda:1")
ALLOCATED_BYTES = 512
"""Accelerators allocate in steps of this."""

Inputs = Mapping[str, torch.Tensor]


def _numbers(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, int(torch.tensor(shape).prod())).reshape(shape)


def _unet() -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(16, 32, 32), layers_per_block=1, norm_num_groups=8, cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=4,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip


def _autoencoder() -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16, 16), latent_channels=4, norm_num_groups=4, sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
    )  # fmt: skip


def _transformer_2d() -> Any:
    return diffusers.Transformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=8, out_channels=8, num_layers=6, norm_num_groups=4,
        cross_attention_dim=32,
    )  # fmt: skip


def _flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=3, num_single_layers=5, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8], guidance_embeds=True,
    )  # fmt: skip


def _clip_text() -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=80, max_position_embeddings=16, hidden_size=32, intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return transformers.CLIPTextModel(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """How a tiny model is made, and what it is called with."""

    make: Callable[[], Any]
    inputs: Inputs


MODELS: Mapping[str, Model] = {
    "UNet2DConditionModel": Model(
        make=_unet,
        inputs={
            "sample": _numbers(2, 4, 16, 16),
            "timestep": torch.tensor(7),
            "encoder_hidden_states": _numbers(2, 5, 32),
        },
    ),
    "AutoencoderKL": Model(make=_autoencoder, inputs={"sample": _numbers(2, 3, 32, 32)}),
    "Transformer2DModel": Model(
        make=_transformer_2d,
        inputs={"hidden_states": _numbers(2, 8, 8, 8), "encoder_hidden_states": _numbers(2, 5, 32)},
    ),
    "FluxTransformer2DModel": Model(
        make=_flux,
        inputs={
            "hidden_states": _numbers(1, 9, 16),
            "encoder_hidden_states": _numbers(1, 5, 32),
            "pooled_projections": _numbers(1, 32),
            "timestep": torch.tensor([0.5]),
            "guidance": torch.tensor([3.5]),
            "txt_ids": torch.zeros(5, 3),
            "img_ids": torch.arange(27.0).reshape(9, 3) % 3,
        },
    ),
    "CLIPTextModel": Model(make=_clip_text, inputs={"input_ids": torch.tensor([[0, 5, 9, 70, 1], [0, 3, 3, 1, 1]])}),
}


def copy_weights(model: Any) -> None:
    """Copy weights as a move does: those mapped from a file may be at an address that gives other bits."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two results are the same bit for bit."""
    return torch.equal(found.cpu(), expected)


@dataclass(slots=True)
class Saved:
    """The models of this module, each with random weights in a folder, and what is known of them; made when asked."""

    root: Path
    _layouts: dict[tuple[str, str], Layout] = field(default_factory=dict)
    _expected: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def folder(self, name: str) -> Path:
        """Return a model's folder; no parameter in it is left at the constant of its constructor."""
        folder = self.root / name
        if not folder.exists():
            torch.manual_seed(0)
            model = MODELS[name].make()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            model.save_pretrained(folder)
        return folder

    def load(self, name: str, dtype: str = "float32") -> Any:
        """Return a model as its class loads it."""
        wanted: torch.dtype = getattr(torch, dtype)
        if hasattr(diffusers, name):
            return getattr(diffusers, name).from_pretrained(self.folder(name), **in_dtype(wanted)).eval()
        return getattr(transformers, name).from_pretrained(self.folder(name), dtype=wanted).eval()

    def layout(self, name: str, dtype: str = "float32") -> Layout:
        """Return how a model is laid out, as its folder tells it."""
        if (name, dtype) not in self._layouts:
            library = "diffusers" if hasattr(diffusers, name) else "transformers"
            self._layouts[name, dtype] = lay_out(self.folder(name), library, name, dtype)
        return self._layouts[name, dtype]

    def expected(self, name: str, dtype: str = "float32") -> torch.Tensor:
        """Return what the plain model makes of its inputs on the cpu."""
        if (name, dtype) not in self._expected:
            model = self.load(name, dtype)
            copy_weights(model)
            self._expected[name, dtype] = outcome(model, name, "cpu", dtype)
        return self._expected[name, dtype]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The models, saved once for the module."""
    return Saved(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Other numbers of threads may give other bits."""


def outcome(model: Any, name: str, device: str, dtype: str = "float32") -> torch.Tensor:
    """What a model makes of its inputs, which are on device."""
    inputs = {key: value.to(device) for key, value in MODELS[name].inputs.items()}
    cast = {
        key: value.to(getattr(torch, dtype)) if value.is_floating_point() else value for key, value in inputs.items()
    }
    with torch.no_grad():
        result: torch.Tensor = model(**cast)[0]
    return result


# Placing one model


def assignment_of(layout: Layout, places: Mapping[str, Place]) -> Assignment:
    """The assignment of a component that is spread, as the planner makes it."""
    loads = part_loads(layout, places, stays=False)
    parts = tuple(
        Part(
            path=path,
            nbytes=loads[path].nbytes,
            peak_bytes=loads[path].peak_bytes(place.residency),
            execution_device=place.device,
            storage_device=place.storage_device,
            residency=place.residency,
        )
        for path, place in places.items()
    )
    rest = parts[0]
    return Assignment(
        component="model",
        class_name="",
        dtype="float32",
        nbytes=sum(part.nbytes for part in parts),
        peak_bytes=rest.peak_bytes,
        measured_from="weights",
        execution_device=rest.execution_device,
        storage_device=rest.storage_device,
        residency=Residency.SPLIT if len(parts) > 1 else rest.residency,
        reason="",
        parts=parts if len(parts) > 1 else (),
    )


def placed(model: Any, assignment: Assignment) -> Placement:
    """Place one model, which is checked as a pipeline's components are."""
    plan = Plan(
        pipeline="", machine="", execution_device=assignment.execution_device, assignments=(assignment,), devices=()
    )
    placement = Placement(plan, in_turn=("model",), group_options={})
    placement.place(model, assignment)
    return placement


def check(name: str, saved: Saved, rooms: Sequence[Room], brought: Place | None, make_machine: MakeMachine) -> set[str]:
    """Check a model in these rooms, and return the places its parameters have: devices, and "a hook".

    Beside what the map counts, a device holds the rounding of each tensor, and buffers in no file of what is brought.
    """
    layout, expected = saved.layout(name), saved.expected(name)
    ledger = make_machine().ledger
    places = spread(layout, rooms, brought)
    assert places is not None
    model = saved.load(name)
    assignment = assignment_of(layout, places)
    with weight_peaks(ledger, DEVICES) as peaks:
        placement = placed(model, assignment)
        assert not [*audit(placement.modules, placement.plan)]
        found = check_map_is_respected(model, places)
        for _ in range(2):
            assert same(outcome(model, name, assignment.execution_device), expected)
        placement.rest()
        assert check_map_is_respected(model, places) == found
        assert not [*audit(placement.modules, placement.plan)]
    for room in rooms:
        assert peaks[room.device] <= room.nbytes + rounding(model, places, room.device)
    placement.release()
    assert {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    copy_weights(model)
    assert same(outcome(model, name, "cpu"), expected)
    del model, placement
    gc.collect()
    assert [ledger.live_bytes(room.device) for room in rooms] == [0] * len(rooms)
    return found


def check_map_is_respected(model: Any, places: Mapping[str, Place]) -> set[str]:
    """Check that every parameter is where the map says, or held back by a hook where it is brought."""
    owning = {path for path, module in model.named_modules() if any(is_below(other, path) for other in places)}
    found = set()
    for name, parameter in model.named_parameters():
        module = name.rpartition(".")[0]
        place = places[nearest_ancestor(module, places)]
        held_back = place.residency is Residency.PER_LEAF and module not in owning
        assert str(parameter.device) == ("meta" if held_back else place.device), name
        found.add("a hook" if held_back else place.device)
    return found


def is_below(path: str, ancestor: str) -> bool:
    """Whether a path is below another, and not that itself; the component itself is above all."""
    return path.startswith(f"{ancestor}.") if ancestor else True


def rounding(model: Any, places: Mapping[str, Place], device: str) -> int:
    """The most that a device holds of weights beside the bytes in the map."""
    extra, stored = 0, model.state_dict().keys()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        place = places[nearest_ancestor(name.rpartition(".")[0], places)]
        stays = place.residency is Residency.ALWAYS or (
            name not in stored and not isinstance(tensor, torch.nn.Parameter)
        )
        if place.device == device and stays:
            extra += -tensor.numel() * tensor.element_size() % ALLOCATED_BYTES
            extra += tensor.numel() * tensor.element_size() * (place.residency is Residency.PER_LEAF)
    return extra + 2 * ALLOCATED_BYTES  # weight and bias of the layer that is brought


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", MODELS)
def test_what_one_accelerator_has_no_room_for_is_brought_from_the_cpu(
    name: str, share: float, saved: Saved, virtual_machine: MakeMachine
) -> None:
    """Part of the model stays, the rest rests on the cpu and comes layer by layer."""
    brought = Place("cuda:0", Residency.PER_LEAF)
    found = check(name, saved, [Room("cuda:0", int(size_of(saved.layout(name)) * share))], brought, virtual_machine)
    assert found == {"cuda:0", "a hook"}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", MODELS)
def test_what_one_accelerator_has_no_room_for_is_brought_from_its_files(
    name: str, share: float, saved: Saved, virtual_machine: MakeMachine
) -> None:
    """The same from the safetensors files that the model was loaded from: what rests is mapped, not copied."""
    brought = Place("cuda:0", Residency.PER_LEAF, DISK)
    found = check(name, saved, [Room("cuda:0", int(size_of(saved.layout(name)) * share))], brought, virtual_machine)
    assert found == {"cuda:0", "a hook"}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_spread_over_two_accelerators(
    name: str, share: float, saved: Saved, virtual_machine: MakeMachine
) -> None:
    """The first has this share of the model's size, the second twice: both are used, and nothing is brought."""
    size = size_of(saved.layout(name))
    rooms = [Room("cuda:0", int(size * share)), Room("cuda:1", 2 * size)]
    assert check(name, saved, rooms, None, virtual_machine) == {"cuda:0", "cuda:1"}


@pytest.mark.parametrize("share", [0.3, 0.4])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_spread_over_two_accelerators_and_the_cpu(
    name: str, share: float, saved: Saved, virtual_machine: MakeMachine
) -> None:
    """Two accelerators that have no room for all of it together: the rest is brought to the first."""
    nbytes = int(size_of(saved.layout(name)) * share)
    rooms = [Room("cuda:0", nbytes), Room("cuda:1", nbytes)]
    found = check(name, saved, rooms, Place("cuda:0", Residency.PER_LEAF), virtual_machine)
    assert found == {"cuda:0", "cuda:1", "a hook"}


@pytest.mark.parametrize("share", [0.7, 0.9])
@pytest.mark.parametrize("name", MODELS)
def test_two_accelerators_with_room_for_all_bring_nothing(
    name: str, share: float, saved: Saved, virtual_machine: MakeMachine
) -> None:
    """Where two hold it together, nothing is brought, though it might be."""
    nbytes = int(size_of(saved.layout(name)) * share)
    rooms = [Room("cuda:0", nbytes), Room("cuda:1", nbytes)]
    found = check(name, saved, rooms, Place("cuda:0", Residency.PER_LEAF), virtual_machine)
    assert found == {"cuda:0", "cuda:1"}


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_may_not_be_brought_is_refused(name: str, share: float, saved: Saved) -> None:
    """On one accelerator without room for it, and on two with 0.3 each, there is no map; in its own size there is."""
    layout = saved.layout(name)
    size = size_of(layout)
    assert spread(layout, [Room("cuda:0", int(size * share))], None) is None
    assert spread(layout, [Room("cuda:0", int(size * 0.3)), Room("cuda:1", int(size * 0.3))], None) is None
    assert spread(layout, [Room("cuda:0", size - 1)], None) is None
    assert spread(layout, [Room("cuda:0", size)], None) == {"": Place("cuda:0")}


@pytest.mark.parametrize("share", [0.3, 0.7])
@pytest.mark.parametrize("name", MODELS)
def test_weights_that_are_cast_are_brought_from_an_offload_folder(
    name: str, share: float, saved: Saved, virtual_machine: MakeMachine, tmp_path: Path
) -> None:
    """Loaded in another dtype, what rests on disk is written there first: the bits of the plain model in that dtype."""
    dtype = "bfloat16"
    layout, expected = saved.layout(name, dtype), saved.expected(name, dtype)
    ledger = virtual_machine().ledger
    room = Room("cuda:0", int(size_of(layout) * share))
    places = spread(layout, [room], Place("cuda:0", Residency.PER_LEAF, DISK))
    assert places is not None
    model = saved.load(name, dtype)
    files = OffloadFolder(tmp_path, needed_bytes=size_of(layout))
    on_disk = {
        name: parameter
        for name, parameter in model.named_parameters()
        if places[nearest_ancestor(name.rpartition(".")[0], places)].storage_device == DISK
    }
    files.take("model", on_disk.items())

    with weight_peaks(ledger, DEVICES) as peaks:
        placement = placed(model, assignment_of(layout, places))
        check_map_is_respected(model, places)
        assert not [each for each in audit(placement.modules, placement.plan) if "was planned in" not in each.what]
        assert same(outcome(model, name, "cuda:0", dtype), expected)

    assert peaks["cuda:0"] <= room.nbytes + rounding(model, places, "cuda:0")
    written = sum(file.stat().st_size for file in files.folder.rglob("*.safetensors"))
    assert written >= sum(tensor.numel() * tensor.element_size() for tensor in on_disk.values()) > 0
    placement.release()
    files.close()
    assert not [*tmp_path.iterdir()]


def size_of(layout: Layout) -> int:
    """The bytes of all modules."""
    return sum(module.own_bytes for module in layout.modules)


# What reads the weights of a layer below it without calling that


def _siglip() -> Any:
    config = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=37, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8
    )  # fmt: skip
    return transformers.SiglipVisionModel(config)


READERS: Mapping[str, tuple[Callable[[], Any], torch.Tensor]] = {
    "the image encoder of FLUX Redux": (_siglip, _numbers(1, 3, 32, 32)),
    "pooled text of DeepFloyd": (lambda: torch.nn.Sequential(AttentionPooling(4, 32)), _numbers(2, 5, 32)),
}


@pytest.mark.parametrize("way", ["by layer", "in groups"])
@pytest.mark.parametrize("name", READERS)
def test_a_layer_that_reads_the_weights_of_another_finds_them(
    name: str, way: str, virtual_machine: MakeMachine
) -> None:
    """The weights below it are there while it runs, and at home before and after."""
    make, given = READERS[name]
    torch.manual_seed(0)
    model, device = make().eval(), torch.device("cuda:0")
    with torch.no_grad():
        expected = last_of(model(given))
        ledger = virtual_machine().ledger
        by_layer = way == "by layer"
        weights: Weights = (
            PerLeaf(model, device, frozenset()) if by_layer else Grouped(model, device, {**DEFAULT_GROUPS})
        )
        weights.attach()
        for _ in range(2):
            weights.bring()
            assert same(last_of(model(given.to(device))), expected)
            weights.rest()
            assert {tensor.device.type for tensor in model.parameters()} == {"meta" if by_layer else "cpu"}
    weights.detach()
    assert same(last_of(model(given)), expected)
    assert ledger.live_bytes("cuda:0") <= ALLOCATED_BYTES


def last_of(result: Any) -> torch.Tensor:
    """The last tensor that a model returns."""
    last: torch.Tensor = result if isinstance(result, torch.Tensor) else result[-1]
    return last


# What cannot be split


def test_a_model_whose_class_says_nothing_goes_whole(saved: Saved) -> None:
    """With ``_no_split_modules`` of None, the same modules go to the first accelerator with room for all of them."""
    model = saved.load("FluxTransformer2DModel")
    model._no_split_modules = None
    layout = layout_of(model, "float32")
    size = size_of(layout)
    brought = Place("cuda:0", Residency.PER_LEAF)

    assert spread(layout, [Room("cuda:0", size - 1), Room("cuda:1", size)], brought) == {"": Place("cuda:1")}
    assert spread(layout, [Room("cuda:0", size - 1), Room("cuda:1", size - 1)], brought) == {"": brought}
    assert spread(layout, [Room("cuda:0", size - 1), Room("cuda:1", size - 1)], None) is None


def test_a_pipeline_s_plan_tells_what_could_not_be_split(tiny: Tiny, virtual_machine: MakeMachine) -> None:
    """LTX's transformer does not say which of its modules stay whole: it is placed whole, and the plan notes it."""
    spec = tiny.spec("ltx")
    overrides = {"device_map": {"transformer": {"execution": ["cuda:0", "cuda:1"]}, "default": "cuda:1"}}
    virtual_machine()

    plan = plan_from_yaml(spec, overrides)
    (transformer,) = [each for each in plan.assignments if each.component == "transformer"]

    note = "transformer is placed whole: its class does not say which of its modules stay whole (_no_split_modules)"
    assert note in plan.notes
    assert not transformer.parts
    assert transformer.execution_device == "cuda:0"
    assert transformer.reason == "cannot be split: its class does not say which of its modules stay whole"
    pipe: Any = load_from_yaml(spec, overrides)
    assert {str(each.device) for each in pipe.transformer.parameters()} == {"cuda:0"}
    draw(pipe, "ltx", 0)
    assert report(pipe).problems == ()
