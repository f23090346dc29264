"""Weights that are shared, owned by parents or on meta, and buffers, as people have reported them: one section each.

The numbers B28 to B42 stand for public reports on accelerate and transformers; those on planning alone are in
``tests/unit/test_field_reports_capacity.py``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config

from dmconfig import DMConfigError, load_from_yaml, plan_from_yaml, report
from dmconfig.dispatch.audit import audit
from dmconfig.errors import Code
from dmconfig.layout import Layout, layout_of, nearest_ancestor
from dmconfig.plan import Assignment, Plan, make_plan
from dmconfig.virtual import VirtualMachine
from tests.conftest import DIGITS as DIGITS_TEXT
from tests.conftest import assignment, checked_from, device_use, footprints, inventory
from tests.integration.test_matrix import weight_peaks
from tests.integration.test_placements import DIGITS
from tests.tiny_pipelines import draw, write_spec
from tests.virtual_devices import MakeMachine

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("vae", "text_encoder", "unet")
WIDTH = 8
LINEAR = 4 * (WIDTH * WIDTH + WIDTH)
"""Bytes of one layer with a bias, in float32."""


class Model(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """A model of diffusers, built of what ``parts`` says."""

    _no_split_modules: Sequence[str] = ()

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self) -> None:
        super().__init__()


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(WIDTH, WIDTH)


class Scaled(torch.nn.Module):
    """A layer that owns a scalar, a buffer, and another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.register_buffer("steps", torch.zeros(3))
        self.inner = linear()


def owning() -> Any:
    """Two parameters of the component's own, of 4 kB each, and one layer below it."""
    model = Model()
    model.weight, model.bias = (torch.nn.Parameter(torch.ones(1024)) for _ in range(2))
    model.child = linear()
    return model


def tied_twice() -> Any:
    """Weight and bias of the first of three layers are those of the last, too."""
    model = Model()
    model.layer1, model.between, model.layer2 = linear(), linear(), linear()
    model.layer2.weight, model.layer2.bias = model.layer1.weight, model.layer1.bias
    return model


def tied_under_a_longer_name() -> Any:
    """A parameter ``w``, and a layer ``w_sub`` that shares it."""
    model = Model()
    model.w_sub, model.other = linear(), linear()
    model.w = model.w_sub.weight
    return model


def one_module_twice() -> Any:
    """A layer that stands under two names."""
    model = Model()
    model.first, model.middle = linear(), linear()
    model.second = model.first
    return model


def scaled() -> Any:
    """Layers that own a scalar and a buffer beside their children."""
    model = Model()
    model.layers = torch.nn.ModuleList(Scaled() for _ in range(3))
    return model


MODELS = (owning, tied_twice, tied_under_a_longer_name, one_module_twice, scaled)


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of a model, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def bytes_of(found: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in found.values())


def plan_of(layout: Layout, device_map: str, **caps: int) -> Plan:
    """The plan of the digits with a denoiser that is laid out so; limits are in bytes, the others' sizes are tiny."""
    limits = ", ".join(f"{device.replace('_', ':')}: {cap}" for device, cap in caps.items())
    checked = checked_from(f"{DIGITS_TEXT}reserve: 0\ndevice_map: {device_map}\nmax_memory: {{{limits}}}\n")
    sizes = footprints(text_encoder=0, vae=0, unet=0)
    own = next(module.own_bytes for module in layout.modules if not module.path)
    leaf = max((module.own_bytes for module in layout.modules if module.path), default=0)
    nbytes = sum(module.own_bytes for module in layout.modules)
    sizes["unet"] = replace(sizes["unet"], nbytes=nbytes, largest_leaf_bytes=own + leaf)
    machine = inventory(cuda=[1] * sum(device.startswith("cuda") for device in caps))
    return make_plan(checked.resolved, checked.spec, checked.assembly, sizes, machine, layouts={"unet": layout})


def place_of(name: str, unet: Assignment) -> tuple[str, str]:
    """Where a tensor of the denoiser runs and rests, by the part that it is in."""
    parts = {part.path: (part.execution_device, part.storage_device) for part in unet.parts}
    if not parts:
        return unet.execution_device, unet.storage_device
    return parts[nearest_ancestor(name.rpartition(".")[0], parts)]


# B28: parameters that the component holds itself


@pytest.mark.parametrize(
    ("device_map", "caps"),
    [
        ("{unet: {execution: [0, 1]}, default: cpu}", {"cuda_0": 8192, "cuda_1": LINEAR}),
        ("{unet: {execution: [0], offload: sequential}, default: cpu}", {"cuda_0": 8192 + LINEAR}),
        ("{unet: cpu, default: cpu}", {"cpu": 8192 + LINEAR}),
        ("auto", {"cuda_0": 8192, "cuda_1": LINEAR}),
        ("auto", {"cuda_0": 4096, "cuda_1": 4096}),
    ],
)
def test_b28_parameters_of_the_component_itself_are_one_piece(device_map: str, caps: Mapping[str, int]) -> None:
    """They are together wherever they are, the plan covers every byte, and nothing goes to disk for them."""
    model = owning()
    plan = plan_of(layout_of(model, "float32"), device_map, **caps)
    unet = assignment(plan, "unet")
    assert place_of("weight", unet) == place_of("bias", unet)
    assert sum(part.nbytes for part in unet.parts) or unet.nbytes == bytes_of(tensors(model))
    assert "disk" not in {each.storage_device for each in plan.assignments}


# B29, B30: weights that are one


@pytest.mark.parametrize(
    ("make", "shared"),
    [
        (tied_twice, ("layer1.weight", "layer2.weight")),
        (tied_twice, ("layer1.bias", "layer2.bias")),
        (tied_under_a_longer_name, ("w", "w_sub.weight")),
        (one_module_twice, ("first.weight", "second.weight")),
    ],
)
def test_b29_shared_weights_count_once_and_stay_together(make: Any, shared: tuple[str, str]) -> None:
    """By identity, whatever the names are: over every pair of rooms, both names are in one place, or it is refused."""
    model = make()
    layout = layout_of(model, "float32")
    total = bytes_of(tensors(model))
    assert sum(module.own_bytes for module in layout.modules) == total
    placed = 0
    for first, second in itertools.product(range(0, total + 1, LINEAR // 2), repeat=2):
        try:
            plan = plan_of(layout, "{unet: {execution: [0, 1]}, default: cpu}", cuda_0=first, cuda_1=second)
        except DMConfigError:
            continue
        unet = assignment(plan, "unet")
        assert place_of(shared[0], unet) == place_of(shared[1], unet)
        assert device_use(plan, "cuda:0").used_bytes + device_use(plan, "cuda:1").used_bytes == total
        placed += 1
    assert placed > 2


@pytest.mark.parametrize("here", ["text_encoder_2.encoder", "text_encoder_2.shared"])
@pytest.mark.parametrize("place", ["cuda:1", {"execution": "cuda:0", "offload": "sequential"}])
def test_b29_shared_weights_are_not_parted_by_hand(place: object, here: str, tmp_path: Path) -> None:
    """T5's embeddings are one weight of two names: a map that gives them two places is refused, and names both."""
    overrides = {"device_map": {here: place, "default": "cuda:0"}}
    with pytest.raises(DMConfigError) as caught:
        plan_from_yaml(write_spec("flux", tmp_path), overrides, inventory=inventory(cuda=[1, 1]))
    (problem,) = caught.value.problems
    assert problem.code is Code.CONTRADICTION
    assert problem.what.startswith("encoder.embed_tokens and shared of 'text_encoder_2' are one weight")
    assert problem.fix == "give text_encoder_2.shared and text_encoder_2.encoder.embed_tokens the same place"


def test_b30_a_tie_is_found_by_identity_and_not_by_name() -> None:
    """Layers of equal names and shapes that share nothing may be apart; what shares a tensor under any name may not."""
    apart = tied_under_a_longer_name()
    apart.w = torch.nn.Parameter(apart.w_sub.weight.detach().clone())
    shares = {module.path: module.shares_with for module in layout_of(tied_under_a_longer_name(), "float32").modules}
    assert shares == {"": None, "w_sub": "", "other": None}
    assert {module.shares_with for module in layout_of(apart, "float32").modules} == {None}


# B31: tensors that no part of the map covers


@pytest.mark.parametrize("make", MODELS)
def test_b31_every_tensor_is_in_one_part(make: Any) -> None:
    """Scalars, buffers and parameters of parents: over cards of all sizes, two of four at zero, nothing is left out."""
    model = make()
    layout = layout_of(model, "float32")
    everything = tensors(model)
    total = bytes_of(everything)
    kinds = set()
    for percent in (20, 40, 60, 80, 120):
        room = total * percent // 100
        for device_map in ("auto", "{unet: {execution: [0, 2], offload: sequential}, default: cpu}"):
            try:
                plan = plan_of(layout, device_map, cuda_0=room, cuda_1=0, cuda_2=room, cuda_3=0, cpu=10**9)
            except DMConfigError:
                continue
            unet = assignment(plan, "unet")
            kinds.add(unet.residency)
            assert unet.nbytes == total
            for part in unet.parts or (unet,):
                path = getattr(part, "path", "")
                paths = dict.fromkeys([each.path for each in unet.parts] or [""])
                inside = {n: t for n, t in everything.items() if nearest_ancestor(n.rpartition(".")[0], paths) == path}
                assert bytes_of(inside) == part.nbytes
            assert device_use(plan, "cuda:1").used_bytes == device_use(plan, "cuda:3").used_bytes == 0
    assert len(kinds) > 1


@pytest.mark.parametrize(
    "device_map",
    ["balanced", {"unet": {"execution": ["cuda:0", "cuda:1"]}, "default": "cpu"}, {"unet.mid_block": 1, "default": 0}],
)
def test_b31_what_was_planned_is_checked_tensor_by_tensor(device_map: object, virtual_machine: MakeMachine) -> None:
    """On the real denoiser: the plan's bytes are the model's, and after loading every tensor is where its part is."""
    virtual_machine()
    pipe: Any = load_from_yaml(DIGITS, {"reserve": 0, "device_map": device_map})
    unet = assignment(report(pipe).plan, "unet")
    assert unet.nbytes == bytes_of(tensors(pipe.unet))
    assert {name: str(tensor.device) for name, tensor in tensors(pipe.unet).items()} == {
        name: place_of(name, unet)[1] for name in tensors(pipe.unet)
    }


# B32: tensors that were left on meta


@contextlib.contextmanager
def emptied(module: torch.nn.Module, name: str) -> Iterator[None]:
    """Have one parameter of a module on meta for a while, as a loader that forgets it leaves it."""
    path, _, own = name.rpartition(".")
    parameters = module.get_submodule(path)._parameters
    before = parameters[own]
    assert before is not None
    parameters[own] = torch.nn.Parameter(before.detach().to("meta"), requires_grad=False)
    yield
    parameters[own] = before


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, "cuda:0") for name in NAMES),
        ("text_encoder", "cpu"),
        ("text_encoder", {"execution": "cuda:0", "offload": "model"}),
    ],
)
def test_b32_a_tensor_without_data_is_found(name: str, place: object, virtual_machine: MakeMachine) -> None:
    """Whichever tensor was never filled, and wherever its component rests: the audit says whose it is."""
    virtual_machine()
    pipe: Any = load_from_yaml(DIGITS, {"reserve": 0, "device_map": {name: place, "default": "cuda:1"}})
    plan = report(pipe).plan
    module = getattr(pipe, name)
    for parameter in [*dict(module.named_parameters())][::5]:
        with emptied(module, parameter):
            (problem,) = audit(pipe.components, plan)
        assert problem.code is Code.PLACEMENT_DIFFERS
        assert problem.what.startswith(f"{name} was planned on ")
        assert problem.what.endswith("meta, with nobody to bring it")
    assert not [*audit(pipe.components, plan)]


def test_b32_a_tensor_without_data_is_named(virtual_machine: MakeMachine) -> None:
    """Of the hundreds of tensors of a component the message names the one that is empty."""
    virtual_machine()
    pipe: Any = load_from_yaml(DIGITS, {"reserve": 0, "device_map": "cpu"})
    with emptied(pipe.unet, "mid_block.resnets.0.conv1.weight"):
        (problem,) = audit(pipe.components, report(pipe).plan)
    assert "mid_block.resnets.0.conv1.weight" in f"{problem.what} {problem.why}"


@pytest.mark.parametrize("storage", ["cpu", "disk"])
def test_b32_tensors_that_a_hook_holds_are_right_on_meta(storage: str, virtual_machine: MakeMachine) -> None:
    """Layer by layer, weights are on meta between calls: that is what is planned, and the audit is content."""
    virtual_machine()
    entry = {"execution": "cuda:0", "offload": "sequential", "storage": storage}
    pipe: Any = load_from_yaml(DIGITS, {"reserve": 0, "device_map": {"unet": entry, "default": "cuda:1"}})
    assert "meta" in {str(parameter.device) for parameter in pipe.unet.parameters()}
    assert report(pipe).problems == ()


# B42: buffers


@pytest.fixture(scope="module")
def positioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spec of a tiny Stable Diffusion 3 whose table of positions, a buffer, outweighs all of its parameters."""
    from diffusers import SD3Transformer2DModel

    file = write_spec("sd3", tmp_path_factory.mktemp("sd3"))
    folder = file.with_suffix("") / "transformer"
    wide = {"pos_embed_max_size": 112, "num_attention_heads": 16, "caption_projection_dim": 128}
    model = SD3Transformer2DModel.from_config({**SD3Transformer2DModel.load_config(folder), **wide})
    sizes = [sum(each.nbytes for each in kind) for kind in (model.buffers(), model.parameters())]
    assert sizes[0] > sizes[1]
    model.save_pretrained(folder)
    return file


@pytest.mark.parametrize("form", ["cuda:0", "balanced", {"transformer": "cuda:1", "default": "cuda:0"}])
def test_b42_buffers_count_where_they_live(form: object, positioned: Path, virtual_machine: MakeMachine) -> None:
    """A component that stays takes its parameters and its buffers: to the byte what the plan says."""
    virtual_machine()
    plan = plan_from_yaml(positioned, {"device_map": form})
    pipe: Any = load_from_yaml(positioned, {"device_map": form})
    transformer = assignment(plan, "transformer")
    found = tensors(pipe.transformer)
    assert transformer.nbytes == bytes_of(found)
    assert {str(tensor.device) for tensor in found.values()} == {transformer.storage_device}


@pytest.mark.parametrize("cap", [0.4, 0.9])
def test_b42_a_limit_that_only_parameters_would_keep_is_not_taken_for_enough(cap: float, positioned: Path) -> None:
    """A card with room for the parameters, but not for the buffers beside them, is too small."""
    whole = assignment(plan_from_yaml(positioned, {"device_map": "cpu"}, inventory=inventory()), "transformer").nbytes
    overrides = {"device_map": {"transformer": 0, "default": "cpu"}, "max_memory": {0: int(whole * cap)}}
    with pytest.raises(DMConfigError) as caught:
        plan_from_yaml(positioned, overrides, inventory=inventory(cuda=[1]))
    assert caught.value.problems[0].code is Code.DOES_NOT_FIT


def most_beyond_the_plan(word: str, positioned: Path, machine: VirtualMachine) -> int:
    """The bytes of weights and buffers that a generation has on a card at most, less those that were planned."""
    pipe: Any = load_from_yaml(positioned, {"device_map": "cuda:0", "low_memory": word})
    planned = device_use(report(pipe).plan, "cuda:0").used_bytes
    # buffers that accelerate has moved are no weights to the ledger; they are there before the call and after it
    buffers = machine.ledger.live_bytes("cuda:0") - machine.ledger.live_bytes("cuda:0", kind="weights")
    with weight_peaks(machine.ledger, ["cuda:0"]) as peaks:
        draw(pipe, "sd3", 0)
    return buffers + peaks["cuda:0"] - planned


SMALL_BUFFERS = 64 * 1024
"""What the buffers that are in no file take here, position ids and the like, and an allocator's steps of 512 bytes."""


def test_b42_buffers_of_what_is_brought_whole_come_with_it(positioned: Path, virtual_machine: MakeMachine) -> None:
    """A generation has no more weights and buffers on the card than the plan says."""
    assert most_beyond_the_plan("cpu_offload_with_hook", positioned, virtual_machine()) <= SMALL_BUFFERS


def test_b42_buffers_of_a_layer_come_and_go_with_it(positioned: Path, virtual_machine: MakeMachine) -> None:
    """The same layer by layer: a buffer is not on the card at all times, beside whatever layer runs."""
    assert most_beyond_the_plan("sequential_cpu_offload", positioned, virtual_machine()) <= SMALL_BUFFERS
