"""What people met when hooks move data between devices, report by report: each must not happen here.

A test bears the number of the report that it answers. All run on virtual accelerators with tiny pipelines of the real
classes, and what is computed is compared bit for bit with diffusers alone on the cpu.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import accelerate.hooks
import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, PriorTransformer
from diffusers.hooks import FirstBlockCacheConfig, HookRegistry, ModelHook, apply_layerwise_casting
from safetensors.torch import save_file

import dmconfig
from dmconfig.condition import Applied
from tests.integration.test_matrix import DENOISERS
from tests.tiny_pipelines import LENGTH, PROMPT, SIZE, WIDTH, Tiny, call_arguments, class_override, kind_of
from tests.virtual_devices import MakeMachine

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array:DeprecationWarning"),  # some schedulers hand tensors to numpy
]

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
Overrides = dict[str, Any]


def case(*values: Any, marks: Any = ()) -> Any:
    """Return a parameter set with a short name: without quotes, braces, and what is the same in nearly all of them."""
    name = "-".join(str(value) for value in values).replace(", 'storage': 'cpu'", "")
    return pytest.param(*values, id=re.sub(r"[{}']|(?<=[:,]) ", "", name), marks=marks)


def slow(*values: Any) -> Any:
    """Return a parameter set for full runs only: further pipelines in which a rule holds."""
    return case(*values, marks=pytest.mark.slow)


# Pipelines and what they draw


MORE_CLASSES: Mapping[str, str] = {
    "flux-img2img": "FluxImg2ImgPipeline",
    "sd3-img2img": "StableDiffusion3Img2ImgPipeline",
    "ltx-img2video": "LTXImageToVideoPipeline",
}
"""Further classes that begin with a picture, over the folder of the kind before the hyphen."""


def arguments_of(call: str) -> dict[str, Any]:
    """Return the arguments of a call, of the tiny pipelines' own or of a class named above."""
    if call not in MORE_CLASSES:
        return call_arguments(call)
    picture = call_arguments("sd-img2img")["image"]
    if call == "ltx-img2video":
        return {**call_arguments("ltx"), "image": picture}
    return {**call_arguments(kind_of(call)), "image": picture, "strength": 0.7, "num_inference_steps": 3}


def class_of(call: str) -> Overrides:
    """Return the override that names a call's pipeline class, where it is not that of the folder."""
    return {"pipeline.class": MORE_CLASSES[call]} if call in MORE_CLASSES else class_override(call)


def paint(pipe: Any, call: str, **more: Any) -> np.ndarray:
    """Return what a pipeline makes of a call with one seed: pictures or frames, as floats."""
    pipe.set_progress_bar_config(disable=True)
    arguments = {"generator": torch.Generator().manual_seed(0), **arguments_of(call), **more}
    result = pipe(**arguments)
    pictures: np.ndarray = result.images if hasattr(result, "images") else result.frames
    return pictures


def plain(tiny: Tiny, call: str, *, staying: Sequence[str] = ()) -> Any:
    """Return the pipeline of a call as diffusers loads it on the cpu.

    All weights but those of the components in ``staying`` are copied, as moving them does: where the file that
    diffusers maps is not aligned, products may have other bits.
    """
    name = class_of(call).get("pipeline.class")
    pipe = (getattr(diffusers, name) if name else DiffusionPipeline).from_pretrained(tiny.spec(call).with_suffix(""))
    for part_name, part in modules_of(pipe).items():
        for parameter in part.parameters() if part_name not in staying else ():
            parameter.data = parameter.data.clone()
    return pipe


def modules_of(pipe: Any) -> dict[str, torch.nn.Module]:
    """Return the components that have weights."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def load(tiny: Tiny, call: str, device_map: Any, **more: Any) -> Any:
    """Return the pipeline of a call, placed; ``more`` are further overrides."""
    return dmconfig.load_from_yaml(tiny.spec(call), {"device_map": device_map, **class_of(call), **more})


def brought(device: str, how: str, storage: str = "cpu") -> dict[str, str]:
    """Return the entry of a component that runs on device and rests elsewhere."""
    return {"execution": device, "offload": how, "storage": storage}


def home_of(pipe: Any) -> torch.device:
    """Return where the pipeline itself works, as its plan says."""
    return torch.device(dmconfig.report(pipe).plan.execution_device)


def applied(pipe: Any) -> dict[str, Applied]:
    """Return what is true of each component, after having found that all is as planned."""
    condition = dmconfig.report(pipe)
    assert condition.problems == ()
    return {each.component: each for each in condition.applied}


def hooks_and_places(pipe: Any) -> dict[str, tuple[Mapping[str, int], set[str]]]:
    """Return the hooks of each component, by kind and number, and the devices of its weights."""
    return {name: (each.hooks, set(each.bytes_by_device)) for name, each in applied(pipe).items()}


def watch_steps(pipe: Any) -> list[set[torch.device]]:
    """Return a list to which each step of the scheduler adds the devices of all tensors it is given."""
    step, seen = pipe.scheduler.step, []

    @functools.wraps(step)  # pipelines look at its signature
    def watched(*args: Any, **kwargs: Any) -> Any:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.dim())
        seen.append({tensor.device for tensor in tensors})
        return step(*args, **kwargs)

    pipe.scheduler.step = watched
    return seen


def token_ids(device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the token ids of a prompt, for any of the tiny text encoders."""
    return torch.arange(2, 2 + LENGTH, device=device)[None]


def on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the cpu, having found it on device."""
    assert tensor.device == device
    return tensor.cpu()


# B50, B51, B54 to B56: results come back, whichever way a component is entered


@pytest.mark.parametrize(
    ("call", "device_map"),
    [
        case("sd-img2img", "balanced"),
        case("sd-inpaint", {"vae": brought("cuda:1", "sequential"), "default": "cuda:0"}),
        case("flux-img2img", {"vae": "cuda:0", "default": "cuda:1"}),
        slow("ltx-img2video", {"vae": "cuda:1", "default": "cuda:0"}),
        slow("sd-inpaint", {"vae": "cuda:0", "default": "cuda:1"}),
        slow("sdxl-img2img", {"vae": "cuda:1", "default": "cuda:0"}),
        slow("sdxl-inpaint", {"vae": brought("cuda:1", "group"), "default": "cuda:0"}),
        slow("sd3-img2img", {"vae": brought("cuda:1", "model"), "default": "cuda:0"}),
    ],
)
def test_b50_what_the_vae_encodes_comes_back_to_the_denoiser(
    call: str, device_map: Any, tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """A picture encoded on another device than the noise is made on ends up beside the noise, where it is added."""
    expected = paint(plain(tiny, call), call)
    virtual_machine()
    pipe = load(tiny, call, device_map)

    assert np.array_equal(paint(pipe, call), expected)

    planned = dmconfig.report(pipe).plan.assignments
    assert home_of(pipe) not in {torch.device(each.execution_device) for each in planned if each.component == "vae"}
    values = torch.linspace(-1, 1, 3 * SIZE * SIZE, device=home_of(pipe)).reshape(1, 3, SIZE, SIZE)
    with torch.no_grad():
        encoded = pipe.vae.encode(values[:, :, None] if call.startswith("ltx") else values).latent_dist
    assert {encoded.mean.device, encoded.mode().device} == {home_of(pipe)}
    assert encoded.sample(torch.Generator().manual_seed(0)).device == home_of(pipe)


@pytest.mark.parametrize(
    ("call", "device_map", "more"),
    [
        case("flux", "balanced", {}),
        case("sd", {"unet": "cuda:1", "default": "cuda:0"}, {"execution_device": "cuda:0"}),
        case("wan22", {"transformer": "cuda:0", "transformer_2": "cuda:1", "default": "cpu"}, {}),
        slow("sd", {"unet": "cuda:1", "default": "cuda:0"}, {}),
        slow("sd", {"unet": brought("cuda:1", "sequential"), "default": "cuda:0"}, {"execution_device": "cuda:0"}),
        slow("sdxl", {"unet": brought("cuda:1", "group"), "default": "cuda:0"}, {"execution_device": "cuda:0"}),
    ],
)
def test_b51_the_scheduler_finds_sample_and_prediction_on_one_device(
    call: str, device_map: Any, more: Overrides, tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """What a denoiser returns is where its latents are, also with two denoisers, or a pipeline that works elsewhere."""
    staying = ["text_encoder", "vae"] if call == "wan22" else []
    expected = paint(plain(tiny, call, staying=staying), call)
    virtual_machine()
    pipe = load(tiny, call, device_map, **more)
    seen = watch_steps(pipe)

    assert np.array_equal(paint(pipe, call), expected)

    assert seen
    assert all(devices == {home_of(pipe)} for devices in seen)


VAES: Mapping[str, tuple[str, Sequence[int], Mapping[str, Any]]] = {
    "sd": ("vae", (1, 4, 4, 4), {}),
    "flux": ("vae", (1, 4, 4, 4), {}),
    "wan": ("vae", (1, 16, 1, 4, 4), {}),
    "ltx": ("vae", (1, 8, 1, 4, 4), {}),
    "kandinsky22": ("movq", (1, 4, 4, 4), {"force_not_quantize": True}),  # as its pipeline calls it
}
"""The decoder of each kind, a shape that it decodes, and how pipelines ask it to."""


@pytest.mark.parametrize(
    ("call", "how"),
    [
        *(("sd", how) for how in ("model", "sequential", "group")),
        *(slow(call, how) for call in VAES if call != "sd" for how in ("model", "sequential")),
        *(slow(call, "group") for call in ("flux", "wan", "ltx")),
    ],
)
def test_b54_a_vae_that_is_only_decoded_with_has_its_weights(
    call: str, how: str, tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """Decoding, entered directly and first of all, finds weights that rest on disk brought as ``forward`` would."""
    name, shape, arguments = VAES[call]
    latents = torch.linspace(-1, 1, math.prod(shape)).reshape(*shape)
    with torch.no_grad():
        expected = getattr(plain(tiny, call), name).decode(latents, **arguments).sample
    virtual_machine()
    storage = "cpu" if how == "group" else "disk"
    pipe = load(tiny, call, {name: brought("cuda:1", how, storage), "default": "cuda:0"})

    with torch.no_grad():
        pictures = [getattr(pipe, name).decode(latents.to(FIRST), **arguments).sample for _ in range(2)]

    assert all(torch.equal(on(FIRST, picture), expected) for picture in pictures)


@pytest.mark.parametrize("how", ["model", "sequential"])
def test_b54_what_was_brought_for_decoding_rests_in_its_files_again(
    how: str, tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """Weights that rest on disk are mapped from their files after a call as before it, not copied to host memory."""
    virtual_machine()
    pipe = load(tiny, "sd", {"vae": brought("cuda:1", how, "disk"), "default": "cuda:0"})

    paint(pipe, "sd")

    assert dmconfig.report(pipe).problems == ()


def test_b54_a_table_that_a_layer_reads_without_calling_it_is_there(tiny: Tiny, virtual_machine: MakeMachine) -> None:
    """A quantizing VAE looks codes up in the weights of an embedding it never calls: by layer, too, they come."""
    latents = torch.linspace(-1, 1, 64).reshape(1, 4, 4, 4)
    with torch.no_grad():
        expected = plain(tiny, "kandinsky22").movq.decode(latents).sample
    virtual_machine()
    pipe = load(tiny, "kandinsky22", {"movq": brought("cuda:1", "sequential"), "default": "cuda:0"})

    with torch.no_grad():
        picture = pipe.movq.decode(latents.to(FIRST)).sample

    assert torch.equal(on(FIRST, picture), expected)


class PriorOfOldReleases(PriorTransformer):  # type: ignore[misc]
    """The prior as it was before diffusers moved its raw parameters itself (huggingface/diffusers#14695)."""

    def post_process_latents(self, prior_latents: torch.Tensor) -> torch.Tensor:
        """Scale and shift by parameters of the component itself, wherever they are."""
        processed: torch.Tensor = (prior_latents * self.clip_std) + self.clip_mean
        return processed


@pytest.fixture(scope="module")
def prior(tiny: Tiny) -> Path:
    """A spec of the pipeline that makes image embeddings, alone; its prior owns parameters that it reads late."""
    folder = tiny.folder / "prior"
    plain(tiny, "kandinsky22").prior_pipe.save_pretrained(folder)
    file = tiny.folder / "prior.yaml"
    file.write_text("version: 1\npipeline: {source: ./prior}\nreserve: 0\n", encoding="utf-8")
    return file


def embed(pipe: Any) -> torch.Tensor:
    """Return the image embeddings that a prior pipeline makes of the prompt."""
    pipe.set_progress_bar_config(disable=True)
    result = pipe(PROMPT, num_inference_steps=2, generator=torch.Generator().manual_seed(0))
    embeddings: torch.Tensor = result.image_embeds
    return embeddings


@pytest.mark.parametrize(
    ("how", "release"),
    [
        slow("model", "of old releases"),
        case("sequential", "of old releases"),
        case("group", "of old releases"),
        case("group", "as installed"),
        slow("model", "as installed"),
        slow("sequential", "as installed"),
    ],
)
def test_b55_parameters_read_after_forward_are_where_they_are_needed(
    how: str, release: str, tiny: Tiny, prior: Path, virtual_machine: MakeMachine
) -> None:
    """The prior's post-processing, called when ``forward`` has sent its weights home, has them all the same."""
    reference = plain(tiny, "kandinsky22").prior_pipe
    expected = embed(reference)
    virtual_machine()
    overrides = {"device_map": {"prior": brought("cuda:1", how), "default": "cuda:0"}}
    pipe: Any = dmconfig.load_from_yaml(prior, overrides)
    if release == "of old releases":
        old = PriorOfOldReleases.from_config(reference.prior.config)
        old.load_state_dict(reference.prior.state_dict())
        dmconfig.swap(pipe, "prior", old.eval())

    assert torch.equal(on(home_of(pipe), embed(pipe)), expected)
    assert torch.equal(on(home_of(pipe), embed(pipe)), expected)


def test_b55_a_prior_swapped_into_a_combined_pipeline_is_the_one_that_runs(
    tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """A combined pipeline hands its components to pipelines inside it, under other names: they get the new one too."""
    call = "kandinsky22"
    reference = plain(tiny, call)
    torch.manual_seed(7)
    new = PriorTransformer.from_config(reference.prior_prior.config).eval()
    reference.prior_pipe.prior = reference.prior_prior = new
    expected = paint(reference, call)
    virtual_machine()
    pipe = load(tiny, call, {"prior_prior": "cuda:1", "default": "cuda:0"})

    dmconfig.swap(pipe, "prior_prior", new)

    assert pipe.prior_pipe.prior is new
    assert np.array_equal(paint(pipe, call), expected)


@pytest.mark.parametrize(
    ("call", "component"),
    [
        ("sd", "text_encoder"),
        ("kandinsky22", "prior_image_encoder"),
        slow("sd", "safety_checker"),
        slow("sd", "vae"),
        slow("sdxl", "text_encoder_2"),
        slow("flux", "text_encoder_2"),
        slow("wan", "text_encoder"),
        slow("controlnet", "controlnet"),
    ],
)
def test_b56_a_component_computed_on_the_cpu_is_brought_its_inputs(
    call: str, component: str, tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """One component on the cpu and the rest on an accelerator give the plain picture, twice."""
    expected = paint(plain(tiny, call, staying=[component]), call)
    virtual_machine(count=1)
    pipe = load(tiny, call, {component: "cpu", "default": "cuda:0"})

    assert np.array_equal(paint(pipe, call), expected)
    assert np.array_equal(paint(pipe, call), expected)
    assert {name: each for name, each in pipe.hf_device_map.items() if each != "cuda:0"} == {component: "cpu"}


@pytest.mark.parametrize(
    "place", [case("cpu"), case(brought("cuda:1", "model")), slow("cuda:1"), slow(brought("cuda:1", "group"))]
)
def test_b56_inputs_are_carried_from_whatever_device_they_are_on(
    place: Any, tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """Ids on the cpu, on the pipeline's device or on a third one: the text encoder computes, and answers at home."""
    staying = ["text_encoder"] if place == "cpu" else []
    with torch.no_grad():
        expected = plain(tiny, "sd", staying=staying).text_encoder(token_ids()).last_hidden_state
    virtual_machine(count=3)
    pipe = load(tiny, "sd", {"text_encoder": place, "default": "cuda:0"})

    with torch.no_grad():
        results = [pipe.text_encoder(token_ids(f"cuda:{index}")) for index in range(3)] + [
            pipe.text_encoder(token_ids())
        ]

    assert all(torch.equal(on(FIRST, result.last_hidden_state), expected) for result in results)
    assert {result.pooler_output.device for result in results} == {FIRST}


# B52: schedulers


SCHEDULERS: Mapping[str, Mapping[str, Any]] = {
    "UniPCMultistepScheduler": {},
    "DPMSolverMultistepScheduler": {"use_karras_sigmas": True, "algorithm_type": "sde-dpmsolver++"},
    "DPMSolverSinglestepScheduler": {},
    "DEISMultistepScheduler": {},
    "SASolverScheduler": {},
    "EulerDiscreteScheduler": {"timestep_spacing": "trailing"},
    "EulerAncestralDiscreteScheduler": {},
    "HeunDiscreteScheduler": {},
    "KDPM2DiscreteScheduler": {},
    "LMSDiscreteScheduler": {},
    "PNDMScheduler": {},
    "DDIMScheduler": {},
    "DDPMScheduler": {},
    "LCMScheduler": {},
    "TCDScheduler": {},
}
FLOW_SCHEDULERS: Mapping[str, Mapping[str, Any]] = {
    "UniPCMultistepScheduler": {"use_flow_sigmas": True, "prediction_type": "flow_prediction"},
    "FlowMatchEulerDiscreteScheduler": {"time_shift_type": "linear"},
    "DPMSolverMultistepScheduler": {"use_flow_sigmas": True, "prediction_type": "flow_prediction"},
}
QUICK_SCHEDULERS = (
    "UniPCMultistepScheduler", "DPMSolverMultistepScheduler", "EulerDiscreteScheduler", "HeunDiscreteScheduler",
    "PNDMScheduler",
)  # fmt: skip
OFFLOADS: Mapping[str, Overrides] = {
    "cpu_offload_with_hook": {"device_map": "cuda:0", "low_memory": "cpu_offload_with_hook"},
    "explicit": {"device_map": {"unet": "cuda:1", "default": "cuda:0"}},
}


@pytest.mark.parametrize(
    ("names", "placement"),
    [
        pytest.param(QUICK_SCHEDULERS, "cpu_offload_with_hook", id="a few, offloaded"),
        pytest.param([*SCHEDULERS], "cpu_offload_with_hook", id="all, offloaded", marks=pytest.mark.slow),
        pytest.param([*SCHEDULERS], "explicit", id="all, split", marks=pytest.mark.slow),
    ],
)
def test_b52_schedulers_take_their_steps_where_the_sample_is(
    names: Sequence[str], placement: str, tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """A scheduler keeps some of its numbers on the cpu; its steps give the plain bits, put in by ``swap``."""
    reference = plain(tiny, "sd")
    config, expected = reference.scheduler.config, {}
    for name in names:
        reference.scheduler = getattr(diffusers, name).from_config(config, **SCHEDULERS[name])
        expected[name] = paint(reference, "sd", num_inference_steps=3)
    virtual_machine()
    pipe = dmconfig.load_from_yaml(tiny.spec("sd"), OFFLOADS[placement])

    pictures = {}
    for name in names:
        dmconfig.swap(pipe, "scheduler", getattr(diffusers, name).from_config(config, **SCHEDULERS[name]))
        pictures[name] = paint(pipe, "sd", num_inference_steps=3)

    assert [name for name in names if not np.array_equal(pictures[name], expected[name])] == []
    assert len({picture.tobytes() for picture in pictures.values()}) > len(names) // 2


@pytest.mark.parametrize("name", ["UniPCMultistepScheduler", *map(slow, [*FLOW_SCHEDULERS][1:])])
def test_b52_a_scheduler_named_in_the_file_works_offloaded(name: str, tiny: Tiny, virtual_machine: MakeMachine) -> None:
    """A scheduler that the file puts in the place of the source's own works where weights are brought as needed."""
    settings = FLOW_SCHEDULERS[name]
    reference = plain(tiny, "flux")
    reference.scheduler = getattr(diffusers, name).from_config(reference.scheduler.config, **settings)
    expected = paint(reference, "flux")
    virtual_machine()
    scheduler = {"class": name, "config": dict(settings)}
    pipe = load(tiny, "flux", "cuda:0", low_memory="sequential_cpu_offload", **{"components.scheduler": scheduler})

    assert type(pipe.scheduler) is getattr(diffusers, name)
    assert np.array_equal(paint(pipe, "flux"), expected)


# B53, B57, B58, B66: what a placed pipeline says of itself


@pytest.mark.parametrize("call", ["wan", slow("wan22"), slow("ltx")])
def test_b53_a_film_over_three_devices_has_a_report_of_every_component(
    call: str, tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """A balanced video pipeline films as a plain one does, and one text holds all that a bug report has to say."""
    expected = paint(plain(tiny, call), call)
    virtual_machine(count=3)
    pipe = load(tiny, call, "balanced")

    assert np.array_equal(paint(pipe, call), expected)

    condition = dmconfig.report(pipe)
    data, text = condition.data(), condition.text()
    names = modules_of(pipe).keys()
    assert len(set(pipe.hf_device_map.values())) == 3
    assert {each["component"] for each in data["applied"]} == names
    assert {each["component"] for each in data["planned"]["components"]} == names
    for name, place in pipe.hf_device_map.items():
        assert f"{name} ({type(getattr(pipe, name)).__name__})" in text
        assert f"runs on {place}, rests on {place}, always, float32" in text
    for package, version in data["versions"].items():
        assert f"{package} {version}" in text
    assert {"dmconfig", "torch", "diffusers", "transformers", "accelerate"} <= data["versions"].keys()
    assert data["asked"] == {"reserve": 0, "device_map": "balanced"}
    home = str(home_of(pipe))
    assert all(each.hooks == ({} if home in each.bytes_by_device else {"carried": 1}) for each in condition.applied)


@pytest.mark.parametrize(
    ("call", "device_map", "home"),
    [
        case("sd", {"text_encoder": "cpu", "default": "cuda:1"}, "cuda:1"),
        case("sd", {"unet": "cpu", "default": "cuda:0"}, "cpu"),
        case("sd", {"unet": brought("cuda:1", "sequential"), "default": "cpu"}, "cuda:1"),
        slow("flux", {"vae": "cpu", "text_encoder": "cuda:0", "default": "cuda:1"}, "cuda:1"),
        slow("wan22", {"transformer": "cuda:1", "default": "cpu"}, "cuda:1"),
        slow("kandinsky22", {"unet": "cuda:1", "default": "cpu"}, "cuda:1"),
    ],
)
def test_b57_a_split_pipeline_names_the_device_its_latents_are_on(
    call: str, device_map: Any, home: str, tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """``pipe.device`` is not that of the first component, nor of the first off the cpu: it is the plan's."""
    virtual_machine()
    plan = dmconfig.plan_from_yaml(tiny.spec(call), {"device_map": device_map})
    pipe = load(tiny, call, device_map)
    seen = watch_steps(pipe)

    paint(pipe, call)

    assert plan.execution_device == home
    assert dmconfig.report(pipe).plan.execution_device == home
    assert f"working on {home}\n" in dmconfig.report(pipe).text()
    assert pipe.device == torch.device(home)
    assert seen
    assert all(devices == {torch.device(home)} for devices in seen)


def test_b58_a_vae_alone_on_the_accelerator_does_not_pass_for_the_whole_pipeline(
    tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """Each component has a place of its own in the map and in the report; the denoiser's decides for the pipeline."""
    expected = paint(plain(tiny, "sd", staying=["unet", "text_encoder", "safety_checker"]), "sd")
    virtual_machine()
    pipe = load(tiny, "sd", {"vae": "cuda:0", "default": "cpu"})

    assert pipe.hf_device_map == {"vae": "cuda:0", "text_encoder": "cpu", "unet": "cpu", "safety_checker": "cpu"}
    assert {name: set(each.bytes_by_device) for name, each in applied(pipe).items()} == {
        "vae": {"cuda:0"}, "text_encoder": {"cpu"}, "unet": {"cpu"}, "safety_checker": {"cpu"},
    }  # fmt: skip
    assert pipe.device == CPU
    assert np.array_equal(paint(pipe, "sd"), expected)


def test_b58_the_one_component_that_is_elsewhere_is_named(tiny: Tiny, virtual_machine: MakeMachine) -> None:
    """While ``pipe.device`` says nothing of it, the report names the component somebody moved, whichever it is."""
    virtual_machine()
    pipe = load(tiny, "sd", "cuda:0")

    for name, part in modules_of(pipe).items():
        part.to("cpu")
        assert pipe.device == FIRST
        assert [problem.what for problem in dmconfig.report(pipe).problems] == [
            f"{name} was planned on cuda:0 and is on cpu"
        ]
        part.to("cuda:0")
    assert dmconfig.report(pipe).problems == ()


def test_b58_a_component_that_is_on_an_accelerator_already_goes_where_it_belongs(
    tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """A VAE loaded ahead, on another device, takes the place of the old one and not the one it came with."""
    reference = plain(tiny, "sd")
    expected, new = paint(reference, "sd"), reference.vae
    virtual_machine()
    pipe = load(tiny, "sd", {"vae": brought("cuda:0", "model"), "default": "cuda:0"})

    dmconfig.swap(pipe, "vae", new.to("cuda:1"))

    assert hooks_and_places(pipe)["vae"] == ({"carried": 1}, {"cpu"})
    assert np.array_equal(paint(pipe, "sd"), expected)


@pytest.mark.parametrize(
    ("place", "device"),
    [
        case(brought("cuda:1", "sequential"), "cuda:1"),
        slow(brought("cuda:1", "model"), "cuda:1"),
        case("cpu", "cpu"),
        slow("cuda:1", "cuda:1"),
        slow(brought("cuda:0", "group"), "cuda:0"),
        slow(brought("cuda:1", "model", "disk"), "cuda:1"),
    ],
)
def test_b66_a_component_s_execution_device_is_told_wherever_its_weights_rest(
    place: Any, device: str, tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """Prompt tools that call a text encoder themselves ask where it runs; its own parameters may be on meta."""
    staying = ["text_encoder"] if place == "cpu" else []
    with torch.no_grad():
        expected = plain(tiny, "sd", staying=staying).text_encoder(token_ids()).last_hidden_state
    virtual_machine()
    pipe = load(tiny, "sd", {"text_encoder": place, "default": "cuda:0"})

    told = dmconfig.execution_device_of(pipe, "text_encoder")
    with torch.no_grad():
        embeddings = pipe.text_encoder(token_ids(told)).last_hidden_state

    assert told == torch.device(device)
    assert dmconfig.execution_device_of(pipe, "unet") == FIRST
    assert torch.equal(on(FIRST, embeddings), expected)
    assert dmconfig.execution_device_of(pipe, "text_encoder") == told  # also after it has run


# B59 to B62: LoRAs and other extras leave the placement, and the hooks of others, as they were


@pytest.fixture(scope="module")
def lora(tiny: Tiny) -> Callable[[str], Path]:
    """Give a function that writes a LoRA of a kind's denoiser, strong enough to change every picture."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    @functools.cache
    def write(kind: str) -> Path:
        pipe = plain(tiny, kind)
        name = next(name for name in modules_of(pipe) if name in DENOISERS)
        denoiser = getattr(pipe, name)
        torch.manual_seed(3)
        denoiser.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
        layers = {f"{name}_lora_layers": get_peft_model_state_dict(denoiser)}
        pipe.save_lora_weights(tiny.folder / f"{kind}-lora", **layers)
        return tiny.folder / f"{kind}-lora"

    return write


@pytest.mark.parametrize(
    ("call", "device_map"),
    [
        slow("sd", {"unet": "cuda:0", "default": "cuda:1"}),
        case("flux", {"transformer": "cuda:1", "text_encoder": "cpu", "default": "cuda:0"}),
        slow("sdxl", {"unet": "cuda:1", "vae": brought("cuda:0", "sequential"), "default": "cuda:0"}),
        slow("wan", {"transformer": "cuda:0", "default": "cuda:1"}),
    ],
)
def test_b59_a_lora_leaves_every_component_in_its_place_and_mode(
    call: str, device_map: Any, lora: Callable[[str], Path], tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """With a LoRA, an explicit map has the hooks and devices it had before: nothing became sequential offload."""
    staying = [name for name, place in device_map.items() if place == "cpu"]
    reference = plain(tiny, call, staying=staying)
    reference.load_lora_weights(lora(call))
    expected = paint(reference, call)
    virtual_machine()
    pipe = load(tiny, call, device_map)
    before, planned = hooks_and_places(pipe), pipe.hf_device_map

    pipe.load_lora_weights(lora(call))

    assert hooks_and_places(pipe) == before
    assert pipe.hf_device_map == planned
    assert np.array_equal(paint(pipe, call), expected)
    assert hooks_and_places(pipe) == before


@pytest.mark.parametrize("low_memory", ["none", slow("cpu_offload_with_hook"), slow("sequential_cpu_offload")])
def test_b60_a_lora_and_a_new_word_turn_no_offload_on(
    low_memory: str, lora: Callable[[str], Path], tiny: Tiny, virtual_machine: MakeMachine, tmp_path: Path
) -> None:
    """Loaded onto a balanced or offloaded pipeline, both change pictures and neither changes places or hooks."""
    save_file({"<fox>": torch.linspace(-2, 2, WIDTH)}, tmp_path / "word.safetensors")
    pictures = []

    def extend(pipe: Any) -> None:
        pictures.append(paint(pipe, "sd", prompt="a <fox>"))
        pipe.load_textual_inversion(tmp_path, weight_name="word.safetensors", token="<fox>")  # noqa: S106 - a word
        pictures.append(paint(pipe, "sd", prompt="a <fox>"))
        pipe.load_lora_weights(lora("sd"))
        pictures.append(paint(pipe, "sd", prompt="a <fox>"))

    extend(plain(tiny, "sd"))
    virtual_machine()
    pipe = load(tiny, "sd", "balanced" if low_memory == "none" else "cuda:1", low_memory=low_memory)
    before, planned = hooks_and_places(pipe), pipe.hf_device_map
    extend(pipe)

    after = hooks_and_places(pipe)
    assert [np.array_equal(pictures[index], pictures[index + 3]) for index in range(3)] == [True] * 3
    assert len({picture.tobytes() for picture in pictures}) == 3
    assert pipe.hf_device_map == planned
    assert {name: (set(hooks), places) for name, (hooks, places) in after.items()} == {
        name: (set(hooks), places) for name, (hooks, places) in before.items()
    }
    pipe.unload_lora_weights()
    assert hooks_and_places(pipe) == before


@pytest.fixture(scope="module")
def sharded(tiny: Tiny) -> Path:
    """A spec of a pipeline whose denoiser is in several files, as large checkpoints are."""
    folder = tiny.folder / "sharded"
    plain(tiny, "sd").save_pretrained(folder, max_shard_size="100KB")
    assert len([*(folder / "unet").glob("*.safetensors")]) > 1
    file = tiny.folder / "sharded.yaml"
    file.write_text("version: 1\npipeline: {source: ./sharded}\nreserve: 0\n", encoding="utf-8")
    return file


@pytest.mark.parametrize(
    "place",
    [
        case(brought("cuda:0", "model")),
        slow(brought("cuda:0", "sequential", "disk")),
        slow(brought("cuda:0", "model", "disk")),
        slow(brought("cuda:0", "sequential")),
        slow(brought("cuda:0", "group")),
    ],
)
def test_b61_a_checkpoint_in_shards_is_offloaded_like_any_other(
    place: dict[str, str],
    sharded: Path,
    lora: Callable[[str], Path],
    tiny: Tiny,
    virtual_machine: MakeMachine,
) -> None:
    """Weights of several files rest where they should, before and after a LoRA, and give the plain pictures."""
    reference = plain(tiny, "sd")
    expected = [paint(reference, "sd")]
    reference.load_lora_weights(lora("sd"))
    expected.append(paint(reference, "sd"))
    virtual_machine()
    pipe: Any = dmconfig.load_from_yaml(sharded, {"device_map": {"unet": place, "default": "cuda:0"}})

    assert pipe.hf_device_map["unet"] == place["storage"]
    assert np.array_equal(paint(pipe, "sd"), expected[0])
    assert dmconfig.report(pipe).problems == ()
    pipe.load_lora_weights(lora("sd"))
    assert np.array_equal(paint(pipe, "sd"), expected[1])


@pytest.mark.parametrize("how", ["model", slow("sequential"), slow("group")])
def test_b61_a_component_with_a_map_of_its_own_is_offloaded_all_the_same(
    how: str, sharded: Path, tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """A denoiser that bears the device map diffusers loaded it with takes the old one's place, and is offloaded."""
    expected = paint(plain(tiny, "sd"), "sd")
    virtual_machine()
    pipe = load(tiny, "sd", {"unet": brought("cuda:1", how), "default": "cuda:0"})
    new = diffusers.UNet2DConditionModel.from_pretrained(
        sharded.with_suffix(""), subfolder="unet", device_map={"": "cpu"}
    )
    assert new.hf_device_map == {"": "cpu"}
    before = applied(pipe)["unet"].hooks

    dmconfig.swap(pipe, "unet", new)

    assert applied(pipe)["unet"].hooks == before
    assert np.array_equal(paint(pipe, "sd"), expected)


class Counting(ModelHook):  # type: ignore[misc]
    """A hook of diffusers' own kind that counts the calls of its module."""

    calls = 0

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Count, and hand on what came."""
        self.calls += 1
        return args, kwargs


def counted(module: torch.nn.Module) -> Counting:
    """Return a hook that counts the calls of a module from now on."""
    hook = Counting()
    HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, "counting")
    return hook


@pytest.mark.parametrize("how", ["group", slow("sequential"), slow("model")])
@pytest.mark.parametrize("where", ["on a block", "on the component itself"])
def test_b62_hooks_of_others_outlive_a_lora(
    where: str, how: str, lora: Callable[[str], Path], tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """A torch hook and one in diffusers' registry, put on after loading, still count after a LoRA came and went."""
    virtual_machine()
    pipe = load(tiny, "flux", {"transformer": brought("cuda:0", how), "default": "cuda:1"}, execution_device="cuda:1")
    module = pipe.transformer if where == "on the component itself" else pipe.transformer.transformer_blocks[0]
    hook, calls = counted(module), []
    module.register_forward_hook(lambda *_: calls.append(1))

    counts = []
    for change in (lambda: None, lambda: pipe.load_lora_weights(lora("flux")), pipe.unload_lora_weights):
        change()
        hook.calls = 0
        calls.clear()
        paint(pipe, "flux")
        counts.append((hook.calls, len(calls)))

    assert counts == [(4, 4)] * 3  # two steps, each with and without guidance


@pytest.mark.parametrize("how", ["group", slow("model")])  # accelerate's hooks put back what casting has cast
def test_b62_layerwise_casting_and_a_block_cache_outlive_a_lora(
    how: str, lora: Callable[[str], Path], tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """Casting and caching by diffusers, switched on for a placed component, work on with the LoRA's bits."""

    def draw_thrice(pipe: Any) -> list[np.ndarray]:
        apply_layerwise_casting(pipe.transformer, storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.2))
        pictures = [paint(pipe, "flux")]
        pipe.load_lora_weights(lora("flux"))
        pictures.append(paint(pipe, "flux"))
        pipe.unload_lora_weights()
        return [*pictures, paint(pipe, "flux")]

    uncast = paint(plain(tiny, "flux"), "flux")
    expected = draw_thrice(plain(tiny, "flux"))
    virtual_machine()
    pipe = load(tiny, "flux", {"transformer": brought("cuda:0", how), "default": "cuda:0"})

    pictures = draw_thrice(pipe)

    assert [np.array_equal(one, other) for one, other in zip(pictures, expected, strict=True)] == [True] * 3
    assert not np.array_equal(pictures[0], uncast)
    assert not np.array_equal(pictures[0], pictures[1])


# B64, B65, B67: chains of hooks, seeds, inputs


@pytest.mark.parametrize(
    ("call", "how"),
    [
        case("kandinsky22", "sequential"),
        case("wan", "group"),
        *(slow("kandinsky22", how) for how in ("model", "group")),
        *(slow("wan", how) for how in ("model", "sequential")),
        *(slow("ltx", how) for how in ("model", "sequential", "group")),
    ],
)
def test_b64_modules_that_own_parameters_beside_their_layers_are_brought(
    call: str, how: str, tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """A block's own table, a prior's own embedding: parameters of modules that are no leaves arrive with the rest."""
    name = "prior_prior" if call == "kandinsky22" else "transformer"
    reference = plain(tiny, call)
    parents = [part for part in getattr(reference, name).modules() if [*part.children()]]
    assert any([*part.parameters(recurse=False)] for part in parents)
    expected = paint(reference, call)
    virtual_machine()
    pipe = load(tiny, call, {name: brought("cuda:1", how), "default": "cuda:0"})

    assert np.array_equal(paint(pipe, call), expected)
    assert np.array_equal(paint(pipe, call), expected)


class Doubling(accelerate.hooks.ModelHook):  # type: ignore[misc]
    """A hook of accelerate's kind that doubles what its module returns."""

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """Return twice the output."""
        return 2 * output


@pytest.mark.parametrize("how", ["sequential", slow("model"), slow("group")])
def test_b64_a_second_hook_chains_with_the_one_that_brings_weights(
    how: str, tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """A hook that somebody appends to a layer acts on its output, and the weights of the layer still arrive."""

    def append(pipe: Any) -> None:
        accelerate.hooks.add_hook_to_module(pipe.unet.conv_in, Doubling(), append=True)

    reference = plain(tiny, "sd")
    undoubled = paint(reference, "sd")
    append(reference)
    expected = paint(reference, "sd")
    virtual_machine()
    pipe = load(tiny, "sd", {"unet": brought("cuda:1", how), "default": "cuda:0"})
    append(pipe)

    assert np.array_equal(paint(pipe, "sd"), expected)
    assert not np.array_equal(expected, undoubled)


MODES: Mapping[str, Overrides] = {
    "cpu": {"device_map": "cpu"},
    "one device": {"device_map": "cuda:0"},
    "split": {"device_map": {"unet": "cuda:1", "default": "cuda:0"}},
    "model": {"device_map": "cuda:0", "low_memory": "cpu_offload_with_hook"},
    "sequential": {"device_map": "cuda:0", "low_memory": "sequential_cpu_offload"},
    "group": {"device_map": "cuda:0", "low_memory": "group_offload"},
}


@pytest.mark.parametrize("mode", ["model", "group", *map(slow, ("cpu", "one device", "split", "sequential"))])
def test_b65_a_seed_gives_one_picture_in_every_mode(mode: str, tiny: Tiny, virtual_machine: MakeMachine) -> None:
    """The file's seed draws what a plain pipeline draws with a generator of the cpu, at every call."""
    staying = ["unet", "vae", "text_encoder", "safety_checker"] if mode == "cpu" else []
    expected = paint(plain(tiny, "sd", staying=staying), "sd", generator=torch.Generator().manual_seed(11))
    virtual_machine()
    pipe = dmconfig.load_from_yaml(tiny.spec("sd"), {**MODES[mode], "call": {"seed": 11}})
    pipe.set_progress_bar_config(disable=True)
    prepare_latents = pipe.prepare_latents
    seen: list[torch.device] = []

    def watched(*args: Any) -> Any:
        seen.extend(value.device for value in args if isinstance(value, torch.Generator))
        return prepare_latents(*args)

    pipe.prepare_latents = watched

    pictures = [pipe(**arguments_of("sd")).images for _ in range(2)]

    assert [np.array_equal(picture, expected) for picture in pictures] == [True, True]
    assert seen == [CPU, CPU]  # a generator of a real accelerator would draw other numbers


@pytest.mark.parametrize("mode", ["model", slow("sequential"), slow("group")])
def test_b65_a_generator_of_the_accelerator_serves_an_offloaded_pipeline(
    mode: str, tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """Though all weights rest on the cpu, noise is made on the accelerator, with a generator of that device too."""
    virtual_machine()
    resident = load(tiny, "sd", "cuda:0")
    expected = paint(resident, "sd", generator=torch.Generator("cuda:0").manual_seed(5))
    dmconfig.unload(resident)
    pipe = dmconfig.load_from_yaml(tiny.spec("sd"), MODES[mode])

    assert np.array_equal(paint(pipe, "sd", generator=torch.Generator(pipe.device).manual_seed(5)), expected)


@pytest.mark.parametrize(
    ("call", "encoder", "place"),
    [
        case("sd", "text_encoder", brought("cuda:1", "model")),
        slow("sd", "text_encoder", brought("cuda:1", "sequential")),
        case("flux", "text_encoder_2", brought("cuda:1", "group")),
        slow("flux", "text_encoder_2", brought("cuda:1", "sequential")),
        slow("sd3", "text_encoder_3", brought("cuda:1", "model")),
        slow("wan", "text_encoder", brought("cuda:1", "model", "disk")),
    ],
)
def test_b67_inputs_put_where_the_parameters_rest_follow_the_weights(
    call: str, encoder: str, place: dict[str, str], tiny: Tiny, virtual_machine: MakeMachine
) -> None:
    """Ids and mask on the cpu, where the parameters say they are, meet the weights on the accelerator."""
    mask = (torch.arange(LENGTH) < LENGTH // 2).long()[None]
    with torch.no_grad():
        expected = getattr(plain(tiny, call), encoder)(token_ids(), attention_mask=mask).last_hidden_state
    virtual_machine()
    pipe = load(tiny, call, {encoder: place, "default": "cuda:0"})
    module = getattr(pipe, encoder)
    assert {parameter.device.type for parameter in module.parameters()} <= {"cpu", "meta"}

    with torch.no_grad():
        results = [
            module(token_ids(), attention_mask=mask),
            module(input_ids=token_ids(), attention_mask=mask.to(FIRST)),
        ]

    assert all(torch.equal(on(FIRST, result.last_hidden_state), expected) for result in results)
