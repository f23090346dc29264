"""Offload modes, as people who use them have reported them: one section per report, with what dmconfig guarantees.

The numbers B68 to B90 stand for public reports on diffusers, accelerate and programs built on them. Each test is of
the report's kind, over the modes of the file and mixtures of them, and compares pictures bit for bit with a plain run.
Most use the tiny LTX pipeline, the quickest one that has a model with parameters of its own.
"""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    CogView4Pipeline,
    CogView4Transformer2DModel,
    ControlNetModel,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    LTXImageToVideoPipeline,
    LTXPipeline,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    StableDiffusionControlNetPipeline,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2Model,
    GlmConfig,
    GlmModel,
    PreTrainedTokenizerFast,
    T5EncoderModel,
)

import dmconfig
from dmconfig import DMConfigError, load_from_yaml, plan_from_yaml
from dmconfig.inventory import Device, Inventory, parse_machine
from dmconfig.plan import Residency
from dmconfig.units import GIB
from dmconfig.virtual import VirtualMachine
from tests.conftest import only_problem
from tests.integration import test_placements as digits
from tests.tiny_pipelines import KINDS, LENGTH, PROMPT, SEEDS, SIZE, Tiny, call_arguments, draw
from tests.virtual_devices import MakeMachine

pytestmark = pytest.mark.usefixtures("one_thread")

Overrides = dict[str, Any]
PARTS = ("text_encoder", "transformer", "vae")


def brought(device: str, how: str, storage: str = "cpu") -> Overrides:
    """Return the entry of a component that runs on device and whose weights rest elsewhere."""
    return {"execution": device, "offload": how, "storage": storage}


WHOLE: Mapping[str, Overrides] = {
    "cpu_offload_with_hook": {"device_map": "cuda:1", "low_memory": "cpu_offload_with_hook"},
    "sequential_cpu_offload": {"device_map": "cuda:1", "low_memory": "sequential_cpu_offload"},
    "group_offload": {"device_map": "cuda:1", "low_memory": "group_offload"},
    "group_offload with a stream": {
        "device_map": "cuda:1",
        "low_memory": "group_offload",
        "group_offload": {"use_stream": True, "record_stream": True, "low_cpu_mem_usage": True},
    },
}
"""The modes for all components of any pipeline; the device is not the one that everything takes by default."""
MIXED: Mapping[str, Overrides] = {
    "one mode each": {
        "device_map": {
            "transformer": brought("cuda:0", "sequential"),
            "vae": brought("cuda:1", "model"),
            "text_encoder": brought("cuda:1", "group"),
        }
    },
    "beside a resident denoiser": {
        "device_map": {
            "transformer": "cuda:1",
            "vae": brought("cuda:0", "group"),
            "text_encoder": brought("cuda:1", "model"),
        }
    },
    "by blocks": {
        "device_map": {
            "transformer": brought("cuda:1", "group"),
            "vae": brought("cuda:1", "sequential"),
            "text_encoder": "cpu",
        },
        "group_offload": {"offload_type": "block_level"},
    },
}
"""Mixtures for the components of LTX."""
OFFLOADS: Mapping[str, Overrides] = {**WHOLE, **MIXED}
QUICK = ("cpu_offload_with_hook", "sequential_cpu_offload", "group_offload", "one mode each")
FEW = ("sequential_cpu_offload", "one mode each")


def over(offloads: Iterable[str], quick: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrise a test over modes; those that are not quick are left to a full run."""
    return pytest.mark.parametrize(
        "offload", [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in offloads]
    )


over_whole_modes = over(WHOLE, QUICK)
over_all_modes = over(OFFLOADS, QUICK)
over_all_modes_slowly = over(OFFLOADS, FEW)
"""For tests of several pipelines or calls: a quick run has the mode that is most often broken, and the mixture."""


@pytest.fixture(scope="module")
def ltx(tiny: Tiny) -> Path:
    """The spec file of the tiny LTX pipeline; its folder is beside it."""
    return tiny.spec("ltx")


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[np.ndarray]:
    """The films of a plain cpu run, one per seed."""
    return tiny.pictures("ltx")


def plain_pipeline(spec: Path, **components: Any) -> Any:
    """Return the pipeline beside a spec as diffusers loads it, with weights copied out of the file as a move does."""
    pipe = DiffusionPipeline.from_pretrained(spec.with_suffix(""), **components)
    for name in pipe.components:
        copy_weights(getattr(pipe, name))
    return pipe


def copy_weights(part: Any) -> None:
    """Give a module's parameters memory of their own: at another alignment a product may have other bits."""
    for parameter in part.parameters() if isinstance(part, torch.nn.Module) else ():
        parameter.data = parameter.data.clone()


def film(pipe: Any, seed: int = 0, **more: Any) -> Any:
    """Return the frames that an LTX pipeline makes of the tiny call: an array, or a tensor of latents if so asked."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    return pipe(**{**call_arguments("ltx"), **more}, generator=generator).frames


def assert_draws(pipe: Any, expected: list[np.ndarray]) -> None:
    """Check that two generations in a row have the bits of the plain run."""
    equal = [np.array_equal(film(pipe, seed), picture) for seed, picture in zip(SEEDS, expected, strict=True)]
    assert equal == [True, True]


def assert_as_planned(pipe: Any) -> None:
    """Check that every weight is where the plan says."""
    assert [problem.what for problem in dmconfig.report(pipe).problems] == []


def is_placed(pipe: Any) -> bool:
    """Whether dmconfig answers for a pipeline; when not, diffusers does."""
    try:
        dmconfig.report(pipe)
    except DMConfigError:
        return False
    return True


# B68: model offload turned on twice


@over_all_modes_slowly
def test_b68_loading_one_file_twice_gives_two_pipelines_that_keep_apart(
    offload: str, virtual_machine: MakeMachine, ltx: Path, expected: list[np.ndarray]
) -> None:
    """Two pipelines of one file, called in turn, each draw what they should, and the end of one is not the other's."""
    virtual_machine()
    first, second = load_from_yaml(ltx, OFFLOADS[offload]), load_from_yaml(ltx, OFFLOADS[offload])

    assert np.array_equal(film(first), expected[0])
    assert np.array_equal(film(second), expected[0])
    assert np.array_equal(film(first, 1), expected[1])
    dmconfig.unload(first)
    assert np.array_equal(film(second, 1), expected[1])
    assert_as_planned(second)


SWITCHES: Mapping[str, Callable[[Any], object]] = {
    "enable_model_cpu_offload": lambda pipe: pipe.enable_model_cpu_offload(device="cuda:1"),
    "enable_sequential_cpu_offload": lambda pipe: pipe.enable_sequential_cpu_offload(device="cuda:1"),
    "enable_group_offload": lambda pipe: pipe.enable_group_offload(
        onload_device=torch.device("cuda:1"), offload_type="leaf_level"
    ),
}
"""diffusers' own switches."""


@pytest.mark.parametrize(
    ("offload", "switch"),
    [(offload, switch) for offload in QUICK for switch in SWITCHES],
)
def test_b68_diffusers_own_switch_is_refused_or_takes_over(
    offload: str, switch: str, virtual_machine: MakeMachine, ltx: Path, expected: list[np.ndarray]
) -> None:
    """A second offload never lands on top of the first: nothing has changed, or the placement is undone before."""
    virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])
    before = dmconfig.report(pipe).data()

    for _ in range(2):
        try:
            SWITCHES[switch](pipe)
        except (ValueError, DMConfigError):
            assert is_placed(pipe)

    assert not is_placed(pipe) or dmconfig.report(pipe).data() == before
    assert np.array_equal(film(pipe), expected[0])


@over_all_modes_slowly
def test_b68_after_a_reset_diffusers_modes_can_be_turned_on_twice(
    offload: str, virtual_machine: MakeMachine, ltx: Path, expected: list[np.ndarray]
) -> None:
    """``reset_device_map`` leaves a pipeline on which diffusers' own offloading works as on a new one."""
    virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])
    film(pipe)

    pipe.reset_device_map()
    pipe.enable_sequential_cpu_offload(device="cuda:1")
    pipe.enable_model_cpu_offload(device="cuda:1")
    pipe.enable_model_cpu_offload(device="cuda:1")

    assert pipe._execution_device == torch.device("cuda:1")
    assert np.array_equal(film(pipe), expected[0])


# B69: a second pipeline made from the components of an offloaded one


@over_all_modes_slowly
def test_b69_pipelines_on_the_same_components_have_one_owner(
    offload: str, virtual_machine: MakeMachine, ltx: Path, expected: list[np.ndarray]
) -> None:
    """A pipeline derived from one, and one derived from that, draw in turn; undoing one placement undoes them all."""
    virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])
    second = dmconfig.derive(pipe, LTXPipeline)
    third = dmconfig.derive(second, LTXPipeline)

    assert np.array_equal(film(pipe), expected[0])
    assert np.array_equal(film(second), expected[0])
    assert np.array_equal(film(third, 1), expected[1])
    assert np.array_equal(film(pipe, 1), expected[1])

    second.reset_device_map()
    assert [is_placed(each) for each in (pipe, second, third)] == [False] * 3
    again = LTXPipeline(**pipe.components)
    again.enable_model_cpu_offload(device="cuda:0")
    assert np.array_equal(film(again), expected[0])


# B71: the device of the offload forgotten after the first call


@over_all_modes
def test_b71_the_offload_device_of_the_file_is_kept_through_calls(
    offload: str, virtual_machine: MakeMachine, ltx: Path, expected: list[np.ndarray]
) -> None:
    """The second call brings the same to the same devices as the first: those of the file, and no default."""
    machine = virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])
    plan = dmconfig.report(pipe).plan
    journeys = []

    for seed, picture in zip(SEEDS, expected, strict=True):
        machine.ledger.reset()
        assert np.array_equal(film(pipe, seed), picture)
        journeys.append({(move.source, move.destination): count.count for move, count in machine.ledger.moves.items()})
        assert str(pipe.device) == str(pipe._execution_device) == plan.execution_device
        assert_as_planned(pipe)

    assert journeys[0] == journeys[1]
    used = {device for journey in journeys for hop in journey for device in hop} - {"cpu"}
    assert used == {assignment.execution_device for assignment in plan.assignments} - {"cpu"}


@pytest.mark.parametrize(
    "how",
    [
        "model",
        "sequential",
    ],
)
def test_b71_weights_go_back_to_their_files(how: str, virtual_machine: MakeMachine, ltx: Path) -> None:
    """Weights that rest in their files rest there after a call as before it, not in host memory nobody planned."""
    virtual_machine()
    pipe = load_from_yaml(ltx, {"device_map": {part: brought("cuda:1", how, "disk") for part in PARTS}})

    film(pipe)

    assert_as_planned(pipe)


# B73: a text encoder from elsewhere, and components on meta


@over_whole_modes
def test_b73_a_text_encoder_from_elsewhere_is_offloaded_like_the_others(
    offload: str, virtual_machine: MakeMachine, ltx: Path, tmp_path: Path
) -> None:
    """A T5 of another folder takes part in every mode: no tensor of it is left on meta, and its weights are used."""
    text_encoder = T5EncoderModel.from_pretrained(ltx.with_suffix("") / "text_encoder")
    with torch.no_grad():
        text_encoder.shared.weight.add_(0.1)
    text_encoder.save_pretrained(tmp_path / "t5")
    reference = film(plain_pipeline(ltx, text_encoder=text_encoder))
    virtual_machine()

    pipe = load_from_yaml(ltx, {**OFFLOADS[offload], "components": {"text_encoder": {"source": str(tmp_path / "t5")}}})

    assert_as_planned(pipe)
    assert np.array_equal(film(pipe), reference)


@over_all_modes
def test_b73_a_component_on_meta_is_not_swapped_in(
    offload: str, virtual_machine: MakeMachine, ltx: Path, expected: list[np.ndarray]
) -> None:
    """A module without data cannot take a place: the swap fails, and the pipeline is as it was."""
    virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])
    old = pipe.vae

    with pytest.raises((DMConfigError, NotImplementedError)):
        dmconfig.swap(pipe, "vae", on_meta(old))

    assert pipe.vae is old
    assert_as_planned(pipe)
    assert np.array_equal(film(pipe), expected[0])


@pytest.mark.parametrize("offload", ["cpu_offload_with_hook", "sequential_cpu_offload"])
def test_b73_a_component_on_meta_is_refused_by_name(offload: str, virtual_machine: MakeMachine, ltx: Path) -> None:
    """The refusal says which component has no data."""
    virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])

    with pytest.raises(DMConfigError, match="vae"):
        dmconfig.swap(pipe, "vae", on_meta(pipe.vae))


def on_meta(module: Any) -> Any:
    """Return a module of the same config without data."""
    with torch.device("meta"):
        return type(module).from_config(module.config)


# B74 and B75: pipelines on which sequential offload failed


_SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of one token per character."""
    words = [*_SPECIAL.values(), *"abcdefghijklmnopqrstuvwxyz "]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=256, **_SPECIAL)


_SMALL_DECODER: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


def small_vae() -> AutoencoderKL:
    """A decoder of pictures for both pipelines."""
    return AutoencoderKL(
        block_out_channels=(8, 16), latent_channels=4, norm_num_groups=4, sample_size=SIZE,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        scaling_factor=0.3611, shift_factor=0.1159,
    )  # fmt: skip


def cogview4() -> CogView4Pipeline:
    """A tiny CogView4: its text encoder is GLM."""
    tokenizer = character_tokenizer()
    return CogView4Pipeline(
        tokenizer=tokenizer,
        text_encoder=GlmModel(GlmConfig(vocab_size=len(tokenizer), **_SMALL_DECODER)),
        vae=small_vae(),
        transformer=CogView4Transformer2DModel(
            patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=4, num_attention_heads=4,
            text_embed_dim=32, time_embed_dim=8, condition_dim=4,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="linear"),
    )  # fmt: skip


def lumina2() -> Lumina2Pipeline:
    """A tiny Lumina 2: its text encoder is Gemma 2."""
    tokenizer = character_tokenizer()
    return Lumina2Pipeline(
        tokenizer=tokenizer,
        text_encoder=Gemma2Model(Gemma2Config(vocab_size=len(tokenizer), **_SMALL_DECODER)),
        vae=small_vae(),
        transformer=Lumina2Transformer2DModel(
            sample_size=4, patch_size=2, in_channels=4, hidden_size=8, num_layers=2, num_attention_heads=1,
            num_kv_heads=1, multiple_of=16, scaling_factor=1.0, axes_dim_rope=[4, 2, 2], axes_lens=[300, 32, 32],
            cap_feat_dim=32,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )  # fmt: skip


@pytest.fixture(scope="module")
def by_language_models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Spec files of the two pipelines whose text encoders are language models."""
    folder = tmp_path_factory.mktemp("language")
    specs = {}
    for name, make in (("cogview4", cogview4), ("lumina2", lumina2)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            make().save_pretrained(folder / name)
        specs[name] = folder / f"{name}.yaml"
        specs[name].write_text(f"version: 1\npipeline: {{source: ./{name}}}\nreserve: 0\n", encoding="utf-8")
    return specs


def picture(pipe: Any) -> np.ndarray:
    """Return what CogView4 or Lumina 2 makes of a prompt."""
    pipe.set_progress_bar_config(disable=True)
    images: np.ndarray = pipe(
        prompt=PROMPT, negative_prompt="blurry", num_inference_steps=2, guidance_scale=5.0, height=SIZE, width=SIZE,
        max_sequence_length=LENGTH, output_type="np", generator=torch.Generator().manual_seed(0),
    ).images  # fmt: skip
    return images


@pytest.mark.parametrize(
    ("kind", "offload"),
    [
        pytest.param(kind, offload, marks=() if offload == "sequential_cpu_offload" else pytest.mark.slow)
        for kind in ("cogview4", "lumina2")
        for offload in WHOLE
    ],
)
def test_b74_b75_text_encoders_that_are_language_models_run_in_every_mode(
    kind: str, offload: str, virtual_machine: MakeMachine, by_language_models: Mapping[str, Path]
) -> None:
    """CogView4 and Lumina 2, on which sequential offload once failed, draw the plain picture in every mode, twice."""
    spec = by_language_models[kind]
    reference = picture(plain_pipeline(spec))
    assert np.isfinite(reference).all()
    virtual_machine()

    pipe = load_from_yaml(spec, OFFLOADS[offload])

    assert [np.array_equal(picture(pipe), reference) for _ in SEEDS] == [True, True]


def test_b75_buffers_brought_by_a_stream_go_home(
    virtual_machine: MakeMachine, by_language_models: Mapping[str, Path]
) -> None:
    """After a call nothing that rests on the cpu is left behind, also not the scale of Gemma's embedding."""
    virtual_machine()
    pipe = load_from_yaml(by_language_models["lumina2"], WHOLE["group_offload with a stream"])

    picture(pipe)

    assert_as_planned(pipe)


@over_all_modes
def test_b75_what_a_component_itself_owns_can_be_read_between_calls(
    offload: str, virtual_machine: MakeMachine, ltx: Path
) -> None:
    """Pipelines read such values without calling the component; they are never on meta, before a call and after."""
    virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])
    plain = plain_pipeline(ltx)

    def values(each: Any) -> list[float]:
        owned = (each.vae.latents_mean, each.vae.latents_std, each.transformer.scale_shift_table)
        return [tensor.flatten()[0].item() for tensor in owned]

    before = values(pipe)
    film(pipe)

    assert before == values(pipe) == values(plain)


# B76: a new version of a pipeline broke the modes


@over_all_modes
def test_b76_ltx_draws_the_same_in_every_mode(
    offload: str, virtual_machine: MakeMachine, ltx: Path, expected: list[np.ndarray]
) -> None:
    """The pipeline of the report, in every mode and mixture, also from a prompt given as embeddings."""
    virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])

    names = ("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask")
    prompts = {"prompt": PROMPT, "negative_prompt": "blurry", "max_sequence_length": LENGTH}
    with torch.no_grad():
        embeddings = dict(zip(names, pipe.encode_prompt(**prompts), strict=True))

    assert np.array_equal(film(pipe, prompt=None, negative_prompt=None, **embeddings), expected[0])
    assert_as_planned(pipe)


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["group_offload", "group_offload with a stream"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "kandinsky22"])  # its VQModel refuses groups
def test_b76_every_kind_draws_the_same_in_groups(
    kind: str, offload: str, virtual_machine: MakeMachine, tiny: Tiny
) -> None:
    """Groups are tried on each kind of pipeline, as ``test_matrix`` does with the other modes."""
    reference = tiny.pictures(kind)
    virtual_machine()

    pipe = load_from_yaml(tiny.spec(kind), WHOLE[offload])

    assert [np.array_equal(draw(pipe, kind, seed), reference[seed]) for seed in SEEDS] == [True, True]
    assert_as_planned(pipe)


def test_b76_the_report_names_the_versions(virtual_machine: MakeMachine, ltx: Path) -> None:
    """A mode that a new library breaks can be told from the report: it has the version of each library."""
    import accelerate
    import diffusers
    import transformers

    virtual_machine()
    versions = dmconfig.report(load_from_yaml(ltx, WHOLE["group_offload"])).data()["versions"]

    for library in (accelerate, diffusers, transformers):
        assert versions[library.__name__] == library.__version__
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert versions["dmconfig"] == dmconfig.__version__


# B77: a custom pipeline that asks for a device


class AsksThePipeline(LTXPipeline):  # type: ignore[misc]
    """Encodes on the pipeline's device, which diffusers says is meta under sequential offload."""

    def encode_prompt(self, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        """Return embeddings, without regard to the device that the caller named."""
        return super().encode_prompt(*args, device=self.device, **kwargs)


class AsksTheComponent(LTXPipeline):  # type: ignore[misc]
    """Encodes on the device that the text encoder says it is on."""

    def encode_prompt(self, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        """Return embeddings on the device that the caller named."""
        embeds = super().encode_prompt(*args, device=self.text_encoder.device, **kwargs)
        return [value if value is None else value.to(device) for value in embeds]


@over_all_modes
def test_b77_a_custom_pipeline_that_asks_for_its_own_device_is_told_a_real_one(
    offload: str, virtual_machine: MakeMachine, ltx: Path, expected: list[np.ndarray]
) -> None:
    """``pipe.device`` is where latents live, in every mode; a pipeline that encodes there draws the same."""
    virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])

    custom = dmconfig.derive(pipe, AsksThePipeline)

    assert custom.device == pipe.device == torch.device(dmconfig.report(pipe).plan.execution_device)
    assert np.array_equal(film(custom), expected[0])


@pytest.mark.parametrize(
    "offload",
    [name for name in WHOLE if name != "sequential_cpu_offload"],
)
def test_b77_a_custom_pipeline_that_asks_a_component_for_its_device_is_told_a_real_one(
    offload: str, virtual_machine: MakeMachine, ltx: Path, expected: list[np.ndarray]
) -> None:
    """Whatever a component says of its device, tensors sent there arrive: only one brought by layer says meta."""
    virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])

    assert np.array_equal(film(dmconfig.derive(pipe, AsksTheComponent)), expected[0])


# B78: models that own parameters themselves


@over_all_modes
def test_b78_a_model_that_owns_parameters_is_offloaded_with_them(
    offload: str, virtual_machine: MakeMachine, ltx: Path, expected: list[np.ndarray]
) -> None:
    """No mode leaves such a model out, and none leaves its own parameter behind: it is with the model while it runs."""
    virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])
    plan = {assignment.component: assignment for assignment in dmconfig.report(pipe).plan.assignments}["transformer"]
    own = dict(pipe.transformer.named_parameters(recurse=False))
    seen: set[str] = set()
    pipe.transformer.transformer_blocks[0].register_forward_hook(
        lambda *_: seen.update(str(parameter.device) for parameter in own.values())
    )

    assert own.keys() == {"scale_shift_table"}
    assert {str(parameter.device) for parameter in own.values()} == {plan.storage_device}
    assert np.array_equal(film(pipe), expected[0])
    assert seen <= {plan.execution_device, plan.storage_device}
    assert plan.residency is Residency.PER_GROUP or seen == {plan.execution_device}
    assert {str(parameter.device) for parameter in own.values()} == {plan.storage_device}
    assert (plan.residency is Residency.ALWAYS) == (offload == "beside a resident denoiser")


# B79: offloading without an accelerator

NO_ACCELERATOR = parse_machine("0", "16GiB")
WORDS = ("cpu_offload_with_hook", "sequential_cpu_offload", "group_offload")


@pytest.mark.parametrize("low_memory", WORDS)
@pytest.mark.parametrize("device_map", ["balanced", "cpu"])
def test_b79_without_an_accelerator_offloading_is_noted_and_left_out(
    device_map: str, low_memory: str, ltx: Path
) -> None:
    """The plan says that the word has no effect and why, and puts everything on the cpu."""
    plan = plan_from_yaml(ltx, {"device_map": device_map, "low_memory": low_memory}, inventory=NO_ACCELERATOR)

    assert plan.notes == (f"low_memory: {low_memory} has no effect: there is no accelerator to use",)
    assert {(each.execution_device, each.residency) for each in plan.assignments} == {("cpu", Residency.ALWAYS)}


@pytest.mark.parametrize("low_memory", WORDS)
def test_b79_the_file_of_an_offloaded_pipeline_runs_without_an_accelerator(low_memory: str, ltx: Path) -> None:
    """On a machine that has none, the same file loads and draws on the cpu instead of raising."""
    reference = film(DiffusionPipeline.from_pretrained(ltx.with_suffix("")))

    with VirtualMachine([]):
        pipe = load_from_yaml(ltx, {"device_map": "balanced", "low_memory": low_memory})
        result = film(pipe)

    assert set(pipe.hf_device_map.values()) == {"cpu"}
    assert np.array_equal(result, reference)


@over_all_modes
def test_b79_an_accelerator_that_is_not_there_is_refused_with_what_is(offload: str, ltx: Path) -> None:
    """A file that names an accelerator is refused before anything is loaded; the error lists the devices found."""
    with pytest.raises(DMConfigError) as caught:
        plan_from_yaml(ltx, OFFLOADS[offload], inventory=NO_ACCELERATOR)

    assert caught.value.exit_code == 3
    for problem in caught.value.problems:
        assert problem.code == "DM501"
        assert re.fullmatch(r"--gpus 0 --ram 16GiB has no cuda:[01]", problem.what)
        assert problem.why == "its devices are: cpu"
        assert problem.path[0] == "device_map"


@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="torch has an accelerator")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("device_map", ["balanced", "cuda:0"])
def test_b79_a_torch_built_for_the_cpu_is_named_as_the_likely_cause(device_map: str, ltx: Path) -> None:
    """Where this machine shows no accelerator because torch has no code for any, the note or the error says so."""
    overrides = {"device_map": device_map, "low_memory": "cpu_offload_with_hook"}
    try:
        said = " ".join(plan_from_yaml(ltx, overrides).notes)
    except DMConfigError as error:
        said = str(error)

    assert re.search(r"torch .*(built|build|cpu)", said)


# B80: offloading to other kinds of accelerators


def machine_of(kind: str) -> Inventory:
    """Return a machine with one accelerator of a kind."""
    accelerator = Device(id=f"{kind}:0", description="stated", total_bytes=GIB, free_bytes=GIB)
    host = Device(id="cpu", description="stated", total_bytes=GIB, free_bytes=GIB)
    return Inventory(accelerators=(accelerator,), host=host, name=f"a machine with {kind}")


@pytest.mark.parametrize("kind", ["mps", "xpu", "cuda"])
@pytest.mark.parametrize("low_memory", WORDS)
def test_b80_the_device_of_an_offload_is_checked_against_the_machine(kind: str, low_memory: str, ltx: Path) -> None:
    """Any kind of accelerator may be named with any mode; a machine that has it takes it, another says what it has."""
    overrides = {"device_map": kind, "low_memory": low_memory}
    other = machine_of("xpu" if kind == "mps" else "mps")

    plan = plan_from_yaml(ltx, overrides, inventory=machine_of(kind))
    with pytest.raises(DMConfigError) as caught:
        plan_from_yaml(ltx, overrides, inventory=other)

    assert {each.execution_device for each in plan.assignments} == {f"{kind}:0"}
    assert set(plan.device_map.values()) == {"cpu"}
    problem = only_problem(caught.value)
    assert problem.what == f"{other.name} has no {kind}:0"
    assert problem.why == f"its devices are: {other.accelerators[0].id}, cpu"


# B81: pipelines derived from an offloaded one run out of memory


def painting() -> torch.Tensor:
    """A colourful picture [1, 3, SIZE, SIZE] in 0..1."""
    rows = torch.linspace(0, 1, SIZE)
    return torch.stack([rows[:, None].expand(SIZE, SIZE), rows.expand(SIZE, SIZE), rows[:, None] * rows])[None]


@over_all_modes_slowly
def test_b81_a_derived_pipeline_inherits_the_mode(offload: str, virtual_machine: MakeMachine, ltx: Path) -> None:
    """A film from a picture, on the parts of an offloaded pipeline: the same plan, and no more memory than it says."""
    machine = virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])
    reference = film(LTXImageToVideoPipeline(**plain_pipeline(ltx).components), image=painting())
    machine.ledger.reset()

    derived = dmconfig.derive(pipe, LTXImageToVideoPipeline)

    assert np.array_equal(film(derived, image=painting()), reference)
    plan = dmconfig.report(derived).plan
    assert plan == dmconfig.report(pipe).plan
    rounding = 512 * sum(len([*getattr(pipe, part).parameters()]) for part in PARTS)  # an allocation's smallest step
    for device in plan.devices[:2]:
        assert device.used_bytes < sum(assignment.nbytes for assignment in plan.assignments)
        assert machine.ledger.peak_bytes(device.id, kind="weights") <= device.used_bytes + rounding
    assert_as_planned(derived)


# B82: LoRAs after group offloading


@pytest.fixture(scope="module")
def loras(ltx: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders, each with a LoRA of the tiny LTX's denoiser."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    folders = []
    for seed in (3, 4):
        pipe = DiffusionPipeline.from_pretrained(ltx.with_suffix(""))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
        folders.append(tmp_path_factory.mktemp("lora"))
        pipe.save_lora_weights(folders[-1], transformer_lora_layers=get_peft_model_state_dict(pipe.transformer))
    return folders[0], folders[1]


def latents_while_loras_come_and_go(pipe: Any, loras: tuple[Path, Path]) -> list[torch.Tensor]:
    """Return what the denoiser makes without a LoRA, with two mixed, with one of them deleted, and with none again."""

    def latents() -> torch.Tensor:
        result: torch.Tensor = film(pipe, output_type="latent").cpu()
        return result

    made = [latents()]
    for name, folder in zip(("one", "two"), loras, strict=True):
        pipe.load_lora_weights(folder, adapter_name=name)
    pipe.set_adapters(["one", "two"], [0.5, 0.7])
    made.append(latents())
    pipe.delete_adapters("one")
    made.append(latents())
    pipe.unload_lora_weights()
    return [*made, latents()]


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
@over(OFFLOADS, ("group_offload", "one mode each"))
def test_b82_loras_come_and_go_in_every_mode(
    offload: str, virtual_machine: MakeMachine, ltx: Path, loras: tuple[Path, Path]
) -> None:
    """After a call, two LoRAs are loaded, mixed, one deleted, and both taken off: always the plain bits."""
    reference = latents_while_loras_come_and_go(plain_pipeline(ltx), loras)
    virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])

    made = latents_while_loras_come_and_go(pipe, loras)

    assert [torch.equal(one, other) for one, other in zip(made, reference, strict=True)] == [True] * 4
    assert [torch.equal(each, made[0]) for each in made] == [True, False, False, True]
    assert_as_planned(pipe)


# B83: group offloading of a VAE that works in tiles


@over_all_modes_slowly
def test_b83_a_vae_that_works_in_tiles_is_offloaded_like_any(
    offload: str, virtual_machine: MakeMachine, ltx: Path, expected: list[np.ndarray]
) -> None:
    """With tiling the bits are those of a plain run in tiles, and with it off again those without."""
    plain = plain_pipeline(ltx)
    in_tiles(plain.vae)
    reference = film(plain)
    assert not np.array_equal(reference, expected[0])
    virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])

    in_tiles(pipe.vae)
    assert np.array_equal(film(pipe), reference)
    pipe.vae.disable_tiling()
    assert np.array_equal(film(pipe), expected[0])
    assert_as_planned(pipe)


def in_tiles(vae: Any) -> None:
    """Let a VAE decode a tiny film in several tiles."""
    vae.enable_tiling(
        tile_sample_min_height=SIZE // 2, tile_sample_min_width=SIZE // 2,
        tile_sample_stride_height=SIZE // 4, tile_sample_stride_width=SIZE // 4,
    )  # fmt: skip


def test_b83_a_vae_can_stay_resident_beside_groups(
    virtual_machine: MakeMachine, ltx: Path, expected: list[np.ndarray]
) -> None:
    """The mode is a choice per component: a pinned VAE keeps its weights on the device while the others come and go."""
    virtual_machine()
    pipe = load_from_yaml(ltx, {"device_map": {"vae": "cuda:0", "default": "cuda:1"}, "low_memory": "group_offload"})

    assert pipe.hf_device_map == {"vae": "cuda:0", "text_encoder": "cpu", "transformer": "cpu"}
    assert np.array_equal(film(pipe), expected[0])
    assert_as_planned(pipe)


# B84: layers of unlisted types that own weights


class ScaledNorm(torch.nn.Module):
    """A normalisation of nobody's library, with weights, between a layer it owns and the next one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, width))
        self.mix = torch.nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden, normalised over its last dimension, mixed, scaled and shifted."""
        result: torch.Tensor = self.mix(hidden / hidden.std(-1, keepdim=True)) * self.scale + self.shift
        return result


@over_all_modes_slowly
def test_b84_a_layer_of_an_unknown_type_computes_with_its_own_weights(
    offload: str, virtual_machine: MakeMachine, ltx: Path, expected: list[np.ndarray]
) -> None:
    """A denoiser with such layers between those the libraries know has the plain bits in every mode, twice."""
    plain = plain_pipeline(ltx)
    width = plain.transformer.config.num_attention_heads * plain.transformer.config.attention_head_dim
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        for block in plain.transformer.transformer_blocks:
            block.ff = torch.nn.Sequential(block.ff, ScaledNorm(width))
    denoiser = copy.deepcopy(plain.transformer)
    reference = [film(plain, seed) for seed in SEEDS]
    virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])

    dmconfig.swap(pipe, "transformer", denoiser)

    assert not np.array_equal(reference[0], expected[0])
    assert_draws(pipe, reference)
    assert_as_planned(pipe)


# B85: streams that race


def test_b85_groups_are_brought_without_a_stream_unless_the_file_asks(virtual_machine: MakeMachine, ltx: Path) -> None:
    """By default every group waits for its copy: no stream, nothing recorded, no copy that is not waited for."""
    virtual_machine()
    plain = load_from_yaml(ltx, WHOLE["group_offload"])
    streaming = load_from_yaml(ltx, WHOLE["group_offload with a stream"])

    assert group_settings(plain) == {(False, False, False)}
    assert (True, True, True) in group_settings(streaming)


def group_settings(pipe: Any) -> set[tuple[bool, bool, bool]]:
    """Return of every group of a pipeline: has it a stream, is the stream recorded, are copies not waited for."""
    registries = (vars(module).get("_diffusers_hook") for part in PARTS for module in getattr(pipe, part).modules())
    hooks = [hook for registry in registries if registry for hook in registry.hooks.values()]
    groups = [hook.group for hook in hooks if hasattr(hook, "group")]
    return {(group.stream is not None, bool(group.record_stream), bool(group.non_blocking)) for group in groups}


@pytest.mark.parametrize("option", ["record_stream", "low_cpu_mem_usage"])
def test_b85_an_option_of_streams_without_one_is_refused(option: str, ltx: Path) -> None:
    """Half of the unsafe setting is not taken for the whole, or for nothing."""
    with pytest.raises(DMConfigError, match=f"{option} is for use_stream, which is off"):
        plan_from_yaml(ltx, {**WHOLE["group_offload"], "group_offload": {option: True}})


# B86: the wrong device when groups are offloaded


@pytest.mark.parametrize("grouped", [("vae",), ("text_encoder", "vae"), PARTS], ids=["vae", "the others", "all"])
def test_b86_the_execution_device_is_the_denoisers_whatever_is_grouped(
    grouped: tuple[str, ...], virtual_machine: MakeMachine, ltx: Path, expected: list[np.ndarray]
) -> None:
    """Components in groups on another device do not draw the pipeline there; also not a pipeline derived from it."""
    virtual_machine()
    devices = {"text_encoder": "cuda:0", "transformer": "cuda:1", "vae": "cuda:0"}
    entries = {part: brought(device, "group") if part in grouped else device for part, device in devices.items()}
    seen = set()

    def watch(_pipe: Any, _step: int, _timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        seen.add(str(values["latents"].device))
        return values

    pipe = load_from_yaml(ltx, {"device_map": entries})
    derived = dmconfig.derive(pipe, LTXPipeline)

    for each in (pipe, derived):
        assert each._execution_device == each.device == torch.device("cuda:1")
        assert np.array_equal(film(each, callback_on_step_end=watch), expected[0])
    assert seen == {"cuda:1"}


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["group_offload", "group_offload with a stream"])
def test_b86_a_modular_pipeline_runs_on_components_in_groups(
    offload: str, virtual_machine: MakeMachine, tiny: Tiny
) -> None:
    """The modular pipeline of SDXL, given components that dmconfig brings in groups, finds where they run."""
    from diffusers import StableDiffusionXLAutoBlocks

    def modular(pipe: Any) -> Any:
        blocks = StableDiffusionXLAutoBlocks().init_pipeline()
        names = ("unet", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler")
        blocks.update_components(**{name: pipe.components[name] for name in names})
        blocks.set_progress_bar_config(disable=True)
        return blocks

    def painted(blocks: Any) -> np.ndarray:
        generator = torch.Generator().manual_seed(0)
        arguments = {"num_inference_steps": 2, "height": SIZE, "width": SIZE, "output_type": "np"}
        return np.asarray(blocks(prompt=PROMPT, generator=generator, output="images", **arguments))

    spec = tiny.spec("sdxl")
    reference = painted(modular(plain_pipeline(spec)))
    virtual_machine()

    blocks = modular(load_from_yaml(spec, OFFLOADS[offload]))

    assert blocks._execution_device == torch.device("cuda:1")
    assert np.array_equal(painted(blocks), reference)


# B88: another dtype for an offloaded pipeline


@over_all_modes_slowly
def test_b88_casting_an_offloaded_pipeline_undoes_the_placement_first(
    offload: str, virtual_machine: MakeMachine, ltx: Path
) -> None:
    """``pipe.to(dtype)`` casts all weights, none is lost on meta, and the pipeline draws as a plain one so cast."""
    reference = film(plain_pipeline(ltx).to(torch.bfloat16))
    virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])
    film(pipe)

    pipe.to("cpu", torch.bfloat16)

    assert not is_placed(pipe)
    tensors = [tensor for part in PARTS for tensor in getattr(pipe, part).parameters()]
    assert {(str(tensor.device), tensor.dtype) for tensor in tensors} == {("cpu", torch.bfloat16)}
    assert np.array_equal(film(pipe), reference)


@over_all_modes_slowly
def test_b88_an_offloaded_pipeline_moves_and_saves(
    offload: str, virtual_machine: MakeMachine, ltx: Path, expected: list[np.ndarray], tmp_path: Path
) -> None:
    """Saving after a call writes every weight, and ``pipe.to("cpu")`` brings them all home: none is on meta."""
    virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])
    film(pipe)

    pipe.save_pretrained(tmp_path)
    assert_as_planned(pipe)
    pipe.to("cpu")

    assert {str(tensor.device) for part in PARTS for tensor in getattr(pipe, part).parameters()} == {"cpu"}
    assert np.array_equal(film(pipe), expected[0])
    source = DiffusionPipeline.from_pretrained(ltx.with_suffix(""))
    saved = DiffusionPipeline.from_pretrained(tmp_path)
    for part in PARTS:
        weights = getattr(source, part).state_dict()
        assert all(torch.equal(tensor, weights[key]) for key, tensor in getattr(saved, part).state_dict().items())


@over_all_modes
def test_b88_a_component_cast_by_hand_is_named_in_the_report(
    offload: str, virtual_machine: MakeMachine, ltx: Path
) -> None:
    """A cast behind dmconfig's back does not crash the report: it says which component, from what and to what."""
    virtual_machine()
    pipe = load_from_yaml(ltx, OFFLOADS[offload])

    pipe.vae.to(torch.bfloat16)

    said = [problem.what for problem in dmconfig.report(pipe).problems]
    assert said == ["vae was planned in float32 and is in bfloat16"]


# B89: another kind of pipeline with sequential offload on


@pytest.mark.parametrize("low_memory", WORDS)
def test_b89_a_controlnet_joins_an_offloaded_pipeline(low_memory: str, virtual_machine: MakeMachine) -> None:
    """A pipeline with a ControlNet on the parts of an offloaded one: nothing of them is moved, and both draw right."""
    plain = DiffusionPipeline.from_pretrained(digits.PIPELINE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        controlnet = ControlNetModel.from_unet(plain.unet, conditioning_embedding_out_channels=(8, 16, 16)).eval()
        for parameter in controlnet.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    arguments: dict[str, Any] = {"image": painting(), "steps": 1}
    guided = StableDiffusionControlNetPipeline(
        **plain.components, controlnet=copy.deepcopy(controlnet), requires_safety_checker=False
    )
    reference = [digits.draw(guided, 0, **arguments), digits.draw(plain, 0, steps=1)]
    machine = virtual_machine()
    pipe = digits.load({"device_map": "cuda:1", "low_memory": low_memory})
    controlnet.to(pipe.device)
    machine.ledger.reset()

    derived = dmconfig.derive(pipe, StableDiffusionControlNetPipeline, controlnet=controlnet)

    assert not machine.ledger.moves
    assert np.array_equal(digits.draw(derived, 0, **arguments), reference[0])
    assert np.array_equal(digits.draw(pipe, 0, steps=1), reference[1])
    assert not np.array_equal(reference[0], reference[1])
    assert_as_planned(pipe)


# B90: memory that is not freed when pipelines are exchanged


@over_all_modes_slowly
def test_b90_an_unloaded_pipeline_is_gone_before_the_next_is_loaded(
    offload: str, virtual_machine: MakeMachine, ltx: Path, expected: list[np.ndarray]
) -> None:
    """Loaded and called in a worker thread, unloaded here: no component lives on, no byte stays, the next one runs."""
    machine = virtual_machine()
    with ThreadPoolExecutor(1) as pool:
        pipe, first = pool.submit(load_and_draw, ltx, OFFLOADS[offload]).result()
    parts = [weakref.ref(getattr(pipe, part)) for part in PARTS]

    dmconfig.unload(pipe)

    assert [part() for part in parts] == [None] * 3
    del pipe
    gc.collect()
    assert [machine.ledger.live_bytes(device) for device in ("cuda:0", "cuda:1")] == [0, 0]
    with dmconfig.loaded(ltx, OFFLOADS[offload]) as following:
        assert np.array_equal(film(following, SEEDS[1]), expected[1])
    assert np.array_equal(first, expected[0])


def load_and_draw(spec: Path, overrides: Overrides) -> tuple[Any, np.ndarray]:
    """Return a pipeline that has been called, and its film; what the thread has in its locals holds the pipeline."""
    pipe = load_from_yaml(spec, overrides)
    return pipe, film(pipe)


@pytest.mark.slow
def test_b90_one_pipeline_after_the_other_takes_no_more_than_one(
    virtual_machine: MakeMachine, ltx: Path, expected: list[np.ndarray]
) -> None:
    """The third pipeline in a row has the peak of the first: nothing of those before it is on the device."""
    machine = virtual_machine()
    peaks = []

    for overrides in ({"device_map": "cuda:0"}, WHOLE["group_offload"], {"device_map": "cuda:0"}):
        machine.ledger.reset()
        with dmconfig.loaded(ltx, overrides) as pipe:
            assert np.array_equal(film(pipe), expected[0])
        peaks.append(machine.ledger.peak_bytes("cuda:0"))
        del pipe

    assert peaks[0] == peaks[2] > 0
