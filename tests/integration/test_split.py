"""Components in parts on virtual accelerators: any cut computes what the whole does, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from diffusers import DiffusionPipeline, FluxTransformer2DModel, ModelMixin, UNet2DConditionModel
from packaging.version import Version

import dmconfig
from dmconfig import DMConfigError, load_from_yaml, report
from dmconfig.dispatch.audit import modules_of, tensors_of
from dmconfig.dispatch.split import Split
from dmconfig.layout import is_within, layout_of
from dmconfig.plan import Part, Residency
from dmconfig.virtual import Ledger
from tests.integration.test_matrix import allocated_bytes, distinct_sizes, hooks_of_ours, places
from tests.integration.test_placements import DIGITS, PIPELINE
from tests.integration.test_placements import draw as draw_digit
from tests.tiny_pipelines import SEEDS, Tiny, call_arguments, copy_weights, draw, modules_in, write_spec
from tests.virtual_devices import MakeMachine

DEVICES = ("cuda:0", "cuda:1")
PLACES: Sequence[Any] = (*DEVICES, "cpu", *({"execution": device, "offload": "sequential"} for device in DEVICES))
"""Where a part may be: it stays on a device, or is brought to one layer by layer."""

QUICK = [("sd", 1), ("flux", 0)]
CUTS = [(kind, seed) for kind in ("sd", "sdxl", "sd3", "flux", "wan", "ltx", "controlnet") for seed in range(3)]


@pytest.fixture(scope="module")
def plain() -> Any:
    """The digits pipeline as diffusers loads it, with copied weights."""
    pipe = DiffusionPipeline.from_pretrained(PIPELINE)
    for module in modules_in(pipe).values():
        copy_weights(module)
    return pipe


@pytest.fixture(scope="module")
def sevens(plain: Any, one_thread: None) -> list[np.ndarray]:
    """The pictures of a plain cpu run of the digits, one per seed."""
    return [draw_digit(plain, seed) for seed in SEEDS]


IS_NEW = Version(transformers.__version__) >= Version("5")
LAYER = f"{'' if IS_NEW else 'text_model.'}encoder.layers.0"
"""A layer of the text encoder; transformers before 5 has them one level deeper."""
DIGIT_PARTS: Mapping[str, Any] = {
    "unet": "cuda:0",
    "unet.mid_block": {"execution": "cuda:1", "offload": "sequential"},
    "unet.up_blocks": "cuda:1",
    "unet.up_blocks.1.resnets": "cuda:0",
    "vae": "cuda:1",
    "vae.decoder.up_blocks.0": "cuda:0",
    "vae.encoder.down_blocks": "cuda:0",
    "text_encoder": "cuda:0",
    f"text_encoder.{LAYER}": "cuda:1",
}


def load_digits(device_map: Mapping[str, Any] = DIGIT_PARTS, **overrides: Any) -> Any:
    """The digits pipeline in parts, without a reserve: the devices here are tiny."""
    return load_from_yaml(DIGITS, {"reserve": 0, "device_map": {**device_map}, **overrides})


def random_parts(modules: Mapping[str, torch.nn.Module], seed: str) -> dict[str, Any]:
    """A map that gives up to four modules of each component a place of their own, at random.

    Modules that share a weight stay together, and one without stored weights has no place.
    """
    rng = random.Random(seed)  # noqa: S311 - toy numbers
    device_map: dict[str, Any] = {}
    for name, module in modules.items():
        device_map[name] = rng.choice(PLACES)
        stored = [key.rpartition(".")[0] for key in module.state_dict()]
        ties = [(each.path, each.shares_with) for each in layout_of(module, "float32").modules if each.shares_with]
        paths = [
            path
            for path, _ in module.named_modules()
            if path
            and any(is_within(each, path) for each in stored)
            and not any(is_within(each, path) for tie in ties for each in tie)
        ]
        device_map |= {f"{name}.{path}": rng.choice(PLACES) for path in rng.sample(paths, rng.randint(1, 4))}
    return device_map


def check_parts(pipe: Any, ledger: Ledger, modules: Mapping[str, torch.nn.Module]) -> None:
    """Check that each part of a pipeline just placed has the bytes and the place of the plan, and devices hold no more.

    The bytes are those of a plain pipeline's modules. Files tell what they store; a component of transformers is laid
    out from its class, with the buffers in no file.
    """
    plan = report(pipe).plan
    for assignment, place, tensors in places(plan, modules):
        module = modules[assignment.component]
        stored = module.state_dict()
        counted = {name: each for name, each in tensors.items() if name in stored or not isinstance(module, ModelMixin)}
        assert place.nbytes == sum(distinct_sizes(counted.values())) or not isinstance(place, Part)
        if isinstance(place, Part) and place.residency is Residency.ALWAYS:
            found = [t for each in modules_of(modules_in(pipe)[assignment.component], assignment, place)
                     for t in tensors_of(each)]  # fmt: skip
            assert {str(tensor.device) for tensor in found} <= {place.storage_device}
            assert allocated_bytes(found) == allocated_bytes(tensors.values())
    on_devices: dict[str, list[torch.Tensor]] = {device: [] for device in DEVICES}
    for module in modules_in(pipe).values():
        for tensor in (*module.parameters(), *module.buffers()):
            on_devices.get(str(tensor.device), []).append(tensor)
    assert [ledger.live_bytes(device) for device in DEVICES] == [
        allocated_bytes(found) for found in on_devices.values()
    ]


def live_bytes(ledger: Ledger) -> list[int]:
    """What is now on each device."""
    gc.collect()
    return [ledger.live_bytes(device) for device in DEVICES]


# Any cut


def check_cut(kind: str, seed: int, tiny: Tiny, make_machine: MakeMachine) -> None:
    """Check one random cut of every component of a kind."""
    modules = tiny.modules(kind)
    device_map = random_parts(modules, f"{kind} {seed}")
    ledger = make_machine().ledger
    expected = tiny.pictures(kind)
    pipe: Any = load_from_yaml(tiny.spec(kind), {"device_map": device_map})
    assert report(pipe).plan.device_map.keys() == device_map.keys()
    check_parts(pipe, ledger, modules)
    resting = [ledger.live_bytes(device, kind="weights") for device in DEVICES]
    for module in modules_in(pipe).values():
        copy_weights(module)  # of parts that are computed on the cpu

    for number, picture in zip(SEEDS, expected, strict=True):
        assert np.array_equal(draw(pipe, kind, number), picture)
        assert [ledger.live_bytes(device, kind="weights") for device in DEVICES] == resting

    assert report(pipe).problems == ()
    pipe.reset_device_map()
    assert not hooks_of_ours(pipe)
    assert {str(t.device) for module in modules_in(pipe).values() for t in module.parameters()} == {"cpu"}
    dmconfig.unload(pipe)
    del pipe
    assert live_bytes(ledger) == [0, 0]


@pytest.mark.parametrize(
    ("kind", "seed"), [pytest.param(*cut, marks=() if cut in QUICK else pytest.mark.slow) for cut in CUTS]
)
def test_a_cut_computes_what_the_whole_does(kind: str, seed: int, tiny: Tiny, virtual_machine: MakeMachine) -> None:
    """Modules of every component, picked at random, on devices picked at random: the bits of a plain run, twice.

    UNets, transformers, their text encoders and autoencoders, with and without a controlnet.
    """
    check_cut(kind, seed, tiny, virtual_machine)


def test_random_cuts_are_of_all_kinds(tiny: Tiny) -> None:
    """Among them every place is used, at the top of a component, below a list of blocks, and deep inside a block."""
    maps = [random_parts(tiny.modules(kind), f"{kind} {seed}") for kind in ("sd", "flux") for seed in range(3)]
    entries = [(path, str(place)) for device_map in maps for path, place in device_map.items()]
    assert {place for path, place in entries if "." in path} == {str(place) for place in PLACES}
    assert {place for path, place in entries if "." not in path} == {str(place) for place in PLACES}
    assert {path.count(".") for path, _ in entries} >= {1, 2, 3, 4, 5}


SPREADS: Mapping[str, Mapping[str, Any]] = {
    "evenly": {"device_map": {"unet": {"execution": ["cuda:0", "cuda:1"]}, "default": "cuda:1"}},
    "the rest brought": {
        "device_map": {"unet": {"execution": ["cuda:0", "cuda:1"], "offload": "sequential"}, "default": "cuda:1"},
        "max_memory": {"cuda:0": "1500KiB", "cuda:1": "1500KiB"},
    },
    "the rest brought from its files": {
        "device_map": {
            "unet": {"execution": ["cuda:0", "cuda:1"], "offload": "sequential", "storage": "disk"},
            "default": "cuda:1",
        },
        "max_memory": {"cuda:0": "1500KiB", "cuda:1": "1500KiB"},
    },
}


@pytest.mark.parametrize("name", SPREADS)
def test_blocks_spread_over_devices_compute_what_the_whole_does(
    name: str, virtual_machine: MakeMachine, plain: Any, sevens: list[np.ndarray]
) -> None:
    """The planner's own cuts give the bits of a plain run, within the limits of the file, and are as planned after."""
    ledger = virtual_machine().ledger
    pipe: Any = load_from_yaml(DIGITS, {"reserve": 0, **SPREADS[name]})
    check_parts(pipe, ledger, modules_in(plain))
    (unet,) = [each for each in report(pipe).plan.assignments if each.component == "unet"]

    assert [np.array_equal(draw_digit(pipe, seed), picture) for seed, picture in zip(SEEDS, sevens, strict=True)] == [
        True,
        True,
    ]
    assert report(pipe).problems == ()
    assert set(unet.execution_devices) == {"cuda:0", "cuda:1"}
    assert ("the rest" in name) == any(part.residency is Residency.PER_LEAF for part in unet.parts)


# Entries


def test_entries_other_than_forward_are_carried_through_the_parts(virtual_machine: MakeMachine, plain: Any) -> None:
    """Decoding and encoding of an autoencoder in parts, and modules of parts called directly: results are at home."""
    virtual_machine()
    pipe = load_digits()
    home = pipe._execution_device
    latents = torch.linspace(-1, 1, 4 * 8 * 8).reshape(1, 4, 8, 8)
    picture = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
    words = torch.linspace(-1, 1, 64).reshape(1, 2, 32)

    def entered(parts: Any, device: torch.device) -> list[torch.Tensor]:
        layer = next(m for m in parts.text_encoder.modules() if type(m).__name__ == "CLIPEncoderLayer")
        norm = next(m for path, m in parts.text_encoder.named_modules() if path.endswith("final_layer_norm"))
        masks = (None,) * (1 if IS_NEW else 2)
        return [
            parts.vae.decode(latents.to(device)).sample,
            parts.vae.encode(picture.to(device)).latent_dist.mean,
            parts.vae.encode(picture.to(device)).latent_dist.mode(),
            parts.unet.mid_block(torch.ones(1, parts.unet.config.block_out_channels[-1], 4, 4, device=device),
                                 torch.ones(1, 4 * parts.unet.config.block_out_channels[0], device=device),
                                 encoder_hidden_states=words.to(device)),
            parts.unet.up_blocks[1].resnets[0].norm2(torch.ones(1, 32, 4, 4, device=device)),
            layer(words.to(device), *masks)[0] if isinstance(layer(words.to(device), *masks), tuple)
            else layer(words.to(device), *masks),
            norm(words.to(device)),
        ]  # fmt: skip

    with torch.no_grad():
        found, expected = entered(pipe, home), entered(plain, torch.device("cpu"))

    assert {tensor.device for tensor in found} == {home}
    assert [torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True)] == [True] * len(found)


@contextlib.contextmanager
def failing(module: torch.nn.Module) -> Iterator[None]:
    """Let a module raise when it is called."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def test_a_call_that_fails_in_a_block_leaves_the_next_one_right(
    virtual_machine: MakeMachine, sevens: list[np.ndarray]
) -> None:
    """A block that raises once, of each part in turn, and an entry that is refused: the next pictures are right."""
    virtual_machine()
    pipe = load_digits()
    for block in (pipe.unet.down_blocks[0], pipe.unet.mid_block.resnets[0], pipe.unet.up_blocks[0], pipe.vae.decoder):
        with failing(block), pytest.raises(ZeroDivisionError):
            draw_digit(pipe, 0)
        with pytest.raises((AttributeError, RuntimeError, TypeError)):
            pipe.unet.mid_block("no tensor")
        assert np.array_equal(draw_digit(pipe, 1), sevens[1])
    assert report(pipe).problems == ()


def test_operations_are_left_alone_outside_a_call(virtual_machine: MakeMachine) -> None:
    """Before, between and after calls, also ones that fail, tensors of two devices do not meet by our doing."""
    virtual_machine()
    pipe = load_digits()
    one, other = torch.ones(2).to("cuda:0"), torch.ones(2).to("cuda:1")
    draw_digit(pipe, 0)
    with pytest.raises((AttributeError, RuntimeError, TypeError)):
        pipe.unet("no tensor", 1, None)

    with pytest.raises(RuntimeError, match="same device"):
        one + other


def test_parts_work_under_inference_mode(virtual_machine: MakeMachine, sevens: list[np.ndarray]) -> None:
    """A caller who turns inference mode on gets the same pictures, in it and after it."""
    virtual_machine()
    pipe = load_digits()

    with torch.inference_mode():
        inside = draw_digit(pipe, 0)

    assert np.array_equal(inside, sevens[0])
    assert np.array_equal(draw_digit(pipe, 1), sevens[1])


# Life


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


@pytest.mark.slow
def test_a_lora_keeps_the_parts(
    virtual_machine: MakeMachine, lora: Path, sevens: list[np.ndarray], one_thread: None
) -> None:
    """With a LoRA on a denoiser in parts the picture is that of a plain pipeline with it, and without it as before."""
    virtual_machine()
    pipe = load_digits()
    before = {path: str(each.device) for path, each in pipe.unet.named_parameters()}
    reference = DiffusionPipeline.from_pretrained(PIPELINE)
    reference.load_lora_weights(lora)
    copy_weights(reference.unet)

    pipe.load_lora_weights(lora)
    assert report(pipe).problems == ()
    assert np.array_equal(draw_digit(pipe, 0), draw_digit(reference, 0))
    assert not np.array_equal(draw_digit(pipe, 0), sevens[0])

    pipe.unload_lora_weights()
    assert report(pipe).problems == ()
    assert {path: str(each.device) for path, each in pipe.unet.named_parameters()} == before
    assert np.array_equal(draw_digit(pipe, 0), sevens[0])
    pipe.reset_device_map()
    assert not hooks_of_ours(pipe)


def test_a_component_swapped_in_takes_the_parts(
    virtual_machine: MakeMachine, plain: Any, sevens: list[np.ndarray]
) -> None:
    """A denoiser of the same class is in the same parts, and computes; the old one is off the devices."""
    ledger = virtual_machine().ledger
    pipe = load_digits()
    torch.manual_seed(5)
    new = UNet2DConditionModel.from_config(plain.unet.config).eval()
    expected = draw_digit(DiffusionPipeline.from_pretrained(PIPELINE, unet=new), 0)
    before = live_bytes(ledger)

    dmconfig.swap(pipe, "unet", new)

    assert live_bytes(ledger) == before
    assert report(pipe).problems == ()
    check_parts(pipe, ledger, modules_in(plain))
    assert np.array_equal(draw_digit(pipe, 0), expected)
    assert not np.array_equal(expected, sevens[0])


def test_a_component_without_the_part_is_not_swapped_in(
    virtual_machine: MakeMachine, plain: Any, sevens: list[np.ndarray]
) -> None:
    """A denoiser of one block less has not the module that is placed by itself: refused, and nothing has changed."""
    virtual_machine()
    pipe = load_digits()
    config = plain.unet.config
    names = ("block_out_channels", "down_block_types", "up_block_types")
    small = UNet2DConditionModel.from_config({**config, **{name: config[name][:1] for name in names}})

    with pytest.raises(DMConfigError, match=r"has no module 'up_blocks\.1\.resnets', which is placed by itself"):
        dmconfig.swap(pipe, "unet", small)

    assert report(pipe).problems == ()
    assert np.array_equal(draw_digit(pipe, 0), sevens[0])


def test_a_pipeline_in_parts_is_saved_whole(
    virtual_machine: MakeMachine, plain: Any, tmp_path: Path, sevens: list[np.ndarray]
) -> None:
    """Wherever its parts are, all weights are in the saved folder, and the placement goes on."""
    virtual_machine()
    pipe = load_digits()

    pipe.save_pretrained(tmp_path)

    assert report(pipe).problems == ()
    assert np.array_equal(draw_digit(pipe, 0), sevens[0])
    saved = modules_in(DiffusionPipeline.from_pretrained(tmp_path))
    for name, module in modules_in(plain).items():
        found, expected = saved[name].state_dict(), module.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())


@pytest.mark.parametrize("fails", [False, True], ids=["after a call", "after a call that failed"])
def test_unloading_frees_every_device(fails: bool, virtual_machine: MakeMachine) -> None:
    """Nothing keeps a part alive: no copy that was made for a meeting, no hook, no failed call."""
    ledger = virtual_machine().ledger
    pipe = load_digits()
    draw_digit(pipe, 0)
    if fails:
        with failing(pipe.unet.up_blocks[1].resnets[0]), pytest.raises(ZeroDivisionError):
            draw_digit(pipe, 0)

    dmconfig.unload(pipe)
    pipe.scheduler = None  # holds the last timesteps

    assert live_bytes(ledger) == [0, 0]


# Hops


def flux_of(single_blocks: int, folder: Path) -> Path:
    """The spec of a tiny FLUX with this many single blocks."""
    spec = write_spec("flux", folder)
    config = FluxTransformer2DModel.load_config(folder / "flux" / "transformer")
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel.from_config({**config, "num_single_layers": single_blocks})
    transformer.save_pretrained(folder / "flux" / "transformer")
    return spec


def hops_per_step(spec: Path, device_map: Mapping[str, Any], ledger: Ledger) -> dict[tuple[str, str], int]:
    """How many tensors go from accelerator to accelerator in one step of a tiny FLUX."""
    pipe: Any = load_from_yaml(spec, {"device_map": device_map})
    pipe.set_progress_bar_config(disable=True)
    counts = []
    for steps in (1, 2):
        ledger.reset()
        arguments = {**call_arguments("flux"), "num_inference_steps": steps, "output_type": "latent"}
        pipe(**arguments, generator=torch.Generator().manual_seed(0))
        counts.append([ledger.moved(source=a, destination=b).count for a, b in (DEVICES, DEVICES[::-1])])
    dmconfig.unload(pipe)
    (there, back), (more, more_back) = counts
    return {DEVICES: more - there, DEVICES[::-1]: more_back - back}


def test_a_run_of_blocks_is_crossed_to_once(virtual_machine: MakeMachine, tmp_path: Path) -> None:
    """Behind one cut, each tensor that blocks need goes over once and one comes back, however many blocks there are.

    A step calls the transformer twice, for the prompt and the negative one. A single block takes the picture, the
    text, the time embedding, and the cosines and sines of its positions; the last one's result is normed at home.
    """
    ledger = virtual_machine().ledger
    cut = {"transformer.single_transformer_blocks": "cuda:1", "default": "cuda:0"}
    hops = [hops_per_step(flux_of(count, tmp_path / str(count)), cut, ledger) for count in (1, 6)]

    assert hops == [{DEVICES: 2 * 5, DEVICES[::-1]: 2 * 1}] * 2


@pytest.mark.slow
def test_a_cut_within_a_list_crosses_as_often_as_one_before_it(virtual_machine: MakeMachine, tmp_path: Path) -> None:
    """Blocks 0 to 2 here and 3 to 5 there: the cost is that of one crossing; a block alone costs another back."""
    ledger = virtual_machine().ledger
    spec = flux_of(6, tmp_path)
    behind = {f"transformer.single_transformer_blocks.{index}": "cuda:1" for index in (3, 4, 5)}
    between = {f"transformer.single_transformer_blocks.{index}": "cuda:1" for index in (2, 3)}

    # the norm after the last block takes the picture alone; a block takes picture and text
    assert hops_per_step(spec, {**behind, "default": "cuda:0"}, ledger) == {DEVICES: 2 * 5, DEVICES[::-1]: 2 * 1}
    assert hops_per_step(spec, {**between, "default": "cuda:0"}, ledger) == {DEVICES: 2 * 5, DEVICES[::-1]: 2 * 2}


# Meetings


@pytest.mark.slow
def test_residuals_of_a_controlnet_meet_a_denoiser_in_parts(virtual_machine: MakeMachine, tiny: Tiny) -> None:
    """A controlnet on one device, itself in parts, and a denoiser whose blocks are on both: the bits of a plain run."""
    virtual_machine()
    expected = tiny.pictures("controlnet")
    device_map = {
        "controlnet": "cuda:1",
        "controlnet.mid_block": "cuda:0",
        "unet": "cuda:0",
        "unet.down_blocks.1": "cuda:1",
        "unet.mid_block": "cuda:1",
        "unet.up_blocks.0": "cuda:1",
        "default": "cuda:0",
    }
    pipe: Any = load_from_yaml(tiny.spec("controlnet"), {"device_map": device_map})

    assert [np.array_equal(draw(pipe, "controlnet", seed), picture) for seed, picture in enumerate(expected)] == [
        True,
        True,
    ]
    assert report(pipe).problems == ()


def test_tied_embeddings_are_placed_together(virtual_machine: MakeMachine, tiny: Tiny) -> None:
    """T5's embeddings are one weight of two names: in one place they work, brought or not; in two they are refused."""
    virtual_machine()
    expected = tiny.pictures("flux")
    for place in ("cuda:1", {"execution": "cuda:1", "offload": "sequential"}):
        names = {"text_encoder_2.shared": place, "text_encoder_2.encoder": place}
        pipe: Any = load_from_yaml(tiny.spec("flux"), {"device_map": {**names, "default": "cuda:0"}})
        assert np.array_equal(draw(pipe, "flux", 0), expected[0])
        assert report(pipe).problems == ()
        pipe.reset_device_map()
        assert (
            pipe.text_encoder_2.shared.weight.data_ptr() == pipe.text_encoder_2.encoder.embed_tokens.weight.data_ptr()
        )
        assert not hooks_of_ours(pipe)

    with pytest.raises(DMConfigError, match="are one weight, and are given two places"):
        load_from_yaml(tiny.spec("flux"), {"device_map": {"text_encoder_2.encoder": "cuda:1", "default": "cuda:0"}})


class Toy(torch.nn.Module):
    """Blocks on either side, with code between them that joins what both return."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.between = between
        self.near, self.far = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.scale = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, value: torch.Tensor) -> Any:
        """Return what ``between`` makes of both."""
        return self.between(self.near(value), self.far(value), self.scale)


JOINS: Mapping[str, Any] = {
    "sum": lambda near, far, _: near + far,
    "sum, the other way round": lambda near, far, _: far + near,
    "in place": lambda near, far, _: near.add_(far),
    "concatenated": lambda near, far, _: torch.cat([far, near], dim=1),
    "stacked from a tuple": lambda near, far, _: torch.stack((near, far)),
    "chosen": lambda near, far, _: torch.where(near > far, near, far),
    "assigned": lambda near, far, _: near.index_put_((torch.tensor([0]),), far[0]),
    "picked by an index from elsewhere": lambda near, far, _: near[:, far[0].argsort()],
    "a number of the component's own": lambda near, far, scale: far * scale + near,
    "a number that is a sum": lambda near, far, _: (near * far.sum(), far / near.mean()),
    "numbers alone": lambda near, far, scale: torch.stack([near.sum(), far.sum(), scale]) * far.mean(),
    "a number first": lambda near, far, scale: (scale + far, near.sum() - far),
    "written to out": lambda near, far, _: (torch.add(far, 1, out=near), near),
    "a number on the cpu": lambda near, far, _: (near * torch.tensor(2.0), far * torch.tensor(2.0)),
}


def split_toy(toy: torch.nn.Module, **places: tuple[str, Residency]) -> Split:
    """A module with some of its parts elsewhere, attached."""
    everywhere = {"": ("cuda:0", Residency.ALWAYS), **{path.replace("__", "."): at for path, at in places.items()}}
    parts = [
        Part(
            path=path,
            nbytes=0,
            peak_bytes=0,
            execution_device=device,
            storage_device=device if residency is Residency.ALWAYS else "cpu",
            residency=residency,
        )
        for path, (device, residency) in everywhere.items()
    ]
    split = Split(toy, parts, frozenset())
    split.attach()
    return split


@pytest.fixture
def entered() -> Iterator[list[Split]]:
    """A list of split modules that are left again when the test ends."""
    splits: list[Split] = []
    yield splits
    for split in splits:
        split.leave()


@pytest.mark.parametrize("name", JOINS)
def test_what_parts_return_meets_on_one_device(name: str, virtual_machine: MakeMachine, entered: list[Split]) -> None:
    """Code between parts may join tensors of several devices in any way: it gives what it gives of the whole."""
    virtual_machine()
    value = torch.linspace(-1, 1, 6).reshape(2, 3)
    with torch.no_grad():
        expected = Toy(JOINS[name])(value)
        toy = Toy(JOINS[name])
        entered.append(split_toy(toy, far=("cuda:1", Residency.ALWAYS)))
        entered[0].bring()
        found = toy(value.to("cuda:0"))

    flat = [found] if isinstance(found, torch.Tensor) else found
    wanted = [expected] if isinstance(expected, torch.Tensor) else expected
    assert [torch.equal(one.cpu(), other) for one, other in zip(flat, wanted, strict=True)] == [True] * len(flat)


def test_an_input_that_is_written_to_is_copied_anew(virtual_machine: MakeMachine, entered: list[Split]) -> None:
    """A tensor that goes over twice goes once, unless it has been written to in between."""
    ledger = virtual_machine().ledger
    toy = Toy(lambda near, far, scale: (near, far, scale))
    entered.append(split_toy(toy, far=("cuda:1", Residency.ALWAYS)))
    entered[0].bring()
    ledger.reset()
    with torch.no_grad():
        value = torch.ones(1, 3).to("cuda:0")
        first, again = toy.far(value), toy.far(value)
        once = ledger.moved(source="cuda:0", destination="cuda:1").count
        value.mul_(2)
        doubled = toy.far(value)

    assert once == 1
    assert ledger.moved(source="cuda:0", destination="cuda:1").count == 2
    assert torch.equal(first.cpu(), again.cpu())
    assert torch.equal(doubled.cpu(), toy.far.to("cpu")(torch.full((1, 3), 2.0)))


@pytest.mark.parametrize("residency", [Residency.ALWAYS, Residency.PER_LEAF])
@pytest.mark.parametrize("holder", [torch.nn.Sequential, lambda *layers: torch.nn.ModuleList(layers)])
def test_a_module_in_two_places_is_one_weight(holder: Any, residency: Residency, virtual_machine: MakeMachine) -> None:
    """T5's encoder held the model's own embeddings before transformers 5: brought and sent home as one."""
    virtual_machine()
    torch.manual_seed(0)
    toy: Any = torch.nn.Module()
    toy.shared = torch.nn.Embedding(5, 3)
    toy.encoder = holder(toy.shared, torch.nn.Linear(3, 3))
    ids = torch.tensor([[0, 3]])

    def run(device: str) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = toy.encoder[1](toy.encoder[0](ids.to(device)))
        return result.cpu()

    expected = run("cpu")
    split = split_toy(toy, shared=("cuda:1", residency), encoder=("cuda:1", residency))
    split.bring()
    assert torch.equal(run("cuda:0"), expected)
    split.leave()

    split.detach()
    toy.to("cpu")
    assert torch.equal(run("cpu"), expected)
    assert toy.encoder[0] is toy.shared
    assert not [each for each in toy.modules() if each._forward_hooks or each._forward_pre_hooks]
    assert not [each for each in toy.modules() if "_hf_hook" in vars(each)]


def test_a_part_that_is_no_module_is_an_error(virtual_machine: MakeMachine) -> None:
    """A component that lacks a part is not placed by halves."""
    virtual_machine()
    toy = Toy(None)

    with pytest.raises(ValueError, match="Toy has no module 'fat'"):
        split_toy(toy, fat=("cuda:1", Residency.ALWAYS))

    assert {str(each.device) for each in toy.parameters()} == {"cpu"}


@pytest.mark.parametrize("caps", [(0.9, 0.75), (1.1, 0.5)])
def test_auto_cuts_what_has_no_room_and_computes_the_same(
    virtual_machine: MakeMachine, plain: Any, sevens: list[np.ndarray], caps: Sequence[float]
) -> None:
    """Of 3.6 MiB on less, some blocks stay on each card and others are brought, of the decoder too: the same pictures.

    Each part is where the plan says, with its bytes.
    """
    machine = virtual_machine()
    limits = {index: f"{int(cap * 1024)}KiB" for index, cap in enumerate(caps)}
    pipe = load_from_yaml(DIGITS, {"reserve": 0, "device_map": "auto", "max_memory": {**limits, "cpu": "1GiB"}})
    cut = {found.component: found.parts for found in report(pipe).plan.assignments if found.parts}
    assert {*cut} >= {"unet", "vae"}
    assert {part.residency for part in cut["vae"]} == {Residency.ALWAYS, Residency.PER_LEAF}
    assert {part.execution_device for part in cut["unet"] if part.residency is Residency.ALWAYS} == {*DEVICES}
    check_parts(pipe, machine.ledger, modules_in(plain))
    assert np.array_equal(draw_digit(pipe, 0), sevens[0])
    assert np.array_equal(draw_digit(pipe, 1), sevens[1])
    assert report(pipe).problems == ()
