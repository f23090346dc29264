"""What a source can be: single files, components from elsewhere, classes that the source lacks.

Every kind is loaded, placed on two virtual devices and run twice; the pictures are those of the same pipeline put
together by hand with diffusers, and the planned bytes are the loaded ones.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    FluxPipeline,
    FluxTransformer2DModel,
    GGUFQuantizationConfig,
    StableDiffusionControlNetPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel

from dmconfig import DMConfigError, load_from_yaml, plan_from_yaml
from dmconfig.checked import check_file
from dmconfig.errors import Code
from dmconfig.inventory import parse_machine
from dmconfig.load import plan_for
from dmconfig.rehearse import Settings
from dmconfig.staging import rehearse_file
from tests.conftest import only_problem
from tests.loopback_hub import ask, serve
from tests.single_files import WEIGHTS, write_checkpoint, write_gguf
from tests.tiny_pipelines import draw, write_tiny
from tests.virtual_devices import MakeMachine

SEEDS = (0, 1)
GGUF_IN_FLUX = "pipeline: {source: ./flux, dtype: bf16}\ncomponents: {transformer: {source: ./flux.gguf}}\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tiny pipelines ``sd``, ``controlnet``, ``flux`` and ``wan``; ``sd.safetensors`` and ``flux.gguf``."""
    folder = tmp_path_factory.mktemp("sources")
    for kind in ("sd", "controlnet", "flux", "wan"):
        write_tiny(kind, folder / kind)
    write_checkpoint(folder / "sd", folder / "sd.safetensors")
    write_gguf(load_file(folder / "flux" / "transformer" / WEIGHTS), folder / "flux.gguf")
    return folder


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Pictures are compared bit for bit, and virtual devices compute with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def spec(root: Path) -> Iterator[Callable[[str], Path]]:
    """Write a spec beside the pipelines."""
    file = root / "pipe.yaml"

    def write(text: str) -> Path:
        file.write_text(f"version: 1\nreserve: 0\n{text}")
        return file

    yield write
    file.unlink(missing_ok=True)


def refused(file: Path) -> Any:
    """Return the one problem of a spec."""
    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(file)
    return only_problem(caught.value)


def loaded_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of parameters and buffers that are stored."""
    stored = module.state_dict(keep_vars=True).values()
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in stored}.values())


def assert_as_by_hand(file: Path, hand: Any, kind: str, machine: MakeMachine, device_map: Any) -> Any:
    """Load on two virtual devices, run twice, and compare pictures and bytes; return what was loaded."""
    for part in hand.components.values():
        for parameter in part.parameters() if isinstance(part, torch.nn.Module) else ():
            parameter.data = parameter.data.clone()  # out of the file, as a move does: other addresses, other bits
    expected = [draw(hand, kind, seed) for seed in SEEDS]
    machine()
    overrides = {"device_map": device_map}
    plan, pipe = plan_from_yaml(file, overrides), load_from_yaml(file, overrides)
    for seed, picture in zip(SEEDS, expected, strict=True):
        assert np.array_equal(draw(pipe, kind, seed), picture), seed
    for each in plan.assignments:
        module = getattr(pipe, each.component)
        assert abs(each.nbytes - loaded_bytes(module)) <= 8 * 16, each.component  # position ids, not stored
    return pipe


TWO = {"unet": "cuda:0", "default": "cuda:1"}


# One file


def test_a_pipeline_in_one_file(root: Path, spec: Callable[[str], Path], virtual_machine: MakeMachine) -> None:
    """All weights come from the file, by the classes' own loaders; configs and tokenizers from the folder named."""
    hand = StableDiffusionPipeline.from_single_file(
        str(root / "sd.safetensors"), config=str(root / "sd"), local_files_only=True
    )
    file = spec("pipeline: {source: ./sd.safetensors, config: ./sd}\n")
    pipe = assert_as_by_hand(file, hand, "sd", virtual_machine, TWO)
    assert pipe.safety_checker is None  # as diffusers leaves it out of a single file


def test_a_pipeline_in_one_file_is_the_pipeline_it_was_made_from(root: Path, spec: Callable[[str], Path]) -> None:
    """Every tensor of the file arrives: the picture is that of the folder."""
    pipe = load_from_yaml(spec("pipeline: {source: ./sd.safetensors, config: ./sd}\n"))
    folder = StableDiffusionPipeline.from_pretrained(root / "sd", safety_checker=None)
    assert np.array_equal(draw(pipe, "sd", 0), draw(folder, "sd", 0))


def test_a_pipeline_in_one_file_with_one_part_from_elsewhere(root: Path, spec: Callable[[str], Path]) -> None:
    """A component with a source of its own is not taken from the file; one that the file lacks needs one."""
    tensors = load_file(root / "sd.safetensors")
    without = {name: tensor for name, tensor in tensors.items() if not name.startswith("first_stage_model.")}
    save_file(without, root / "no-vae.safetensors")
    text = "pipeline: {source: ./no-vae.safetensors, config: ./sd}\n"
    problem = refused(spec(text))
    assert (problem.code, problem.what, problem.fix) == (
        Code.MISSING_COMPONENT,
        "./no-vae.safetensors has no weights of 'vae', which StableDiffusionPipeline requires",
        "add components.vae with a source of its own",
    )
    pipe = load_from_yaml(spec(f"{text}components: {{vae: {{source: ./sd}}}}\n"))
    folder = StableDiffusionPipeline.from_pretrained(root / "sd", safety_checker=None)
    assert np.array_equal(draw(pipe, "sd", 0), draw(folder, "sd", 0))


def test_a_pipeline_in_one_file_without_its_config_says_what_is_needed(spec: Callable[[str], Path]) -> None:
    """Weights that tell no known pipeline need a folder or hub id, and nothing is fetched to guess."""
    problem = refused(spec("pipeline: {source: ./sd.safetensors}\n"))
    assert (problem.code, problem.path) == (Code.CONFIG_NOT_FOUND, ("pipeline", "source"))
    assert problem.fix.startswith("add pipeline.config with the folder or hub id")


@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16"])
def test_dtypes_of_one_file(root: Path, spec: Callable[[str], Path], dtype: str) -> None:
    """``auto`` is the dtype that the file has, and never float32 in silence; others are cast to as they are loaded."""
    write_checkpoint(root / "sd", root / "half.safetensors", torch.float16)
    pipe = load_from_yaml(spec(f"pipeline: {{source: ./half.safetensors, config: ./sd, dtype: {dtype}}}\n"))
    wanted = torch.float16 if dtype == "auto" else getattr(torch, dtype)
    assert {part.dtype for part in (pipe.unet, pipe.vae, pipe.text_encoder)} == {wanted}


def test_a_single_file_keeps_the_class_s_float32_layers(root: Path, spec: Callable[[str], Path]) -> None:
    """Diffusers' single-file loader casts every layer; from a folder it does not, and here neither."""
    text = "pipeline: {source: ./wan, dtype: bfloat16}\n"
    shutil.copy(root / "wan" / "transformer" / WEIGHTS, root / "wan.safetensors")
    one = load_from_yaml(spec(f"{text}components: {{transformer: {{source: ./wan.safetensors}}}}\n")).transformer
    other = WanTransformer3DModel.from_pretrained(root / "wan" / "transformer", dtype=torch.bfloat16)
    ours, theirs = one.state_dict(), other.state_dict()
    assert {tensor.dtype for tensor in theirs.values()} == {torch.bfloat16, torch.float32}
    assert all(ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor) for name, tensor in theirs.items())


# A component in one file


def test_a_component_in_one_file_has_the_pipeline_s_config(
    root: Path, spec: Callable[[str], Path], virtual_machine: MakeMachine
) -> None:
    """A UNet in its authors' names, from a file of its own."""
    tensors = load_file(root / "sd.safetensors")
    prefix = "model.diffusion_model."
    save_file({name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}, root / "u.safetensors")
    unet = UNet2DConditionModel.from_single_file(str(root / "u.safetensors"), config=str(root / "sd" / "unet"))
    hand = StableDiffusionPipeline.from_pretrained(root / "sd", unet=unet)
    file = spec("pipeline: {source: ./sd}\ncomponents: {unet: {source: ./u.safetensors}}\n")
    assert_as_by_hand(file, hand, "sd", virtual_machine, TWO)


@pytest.mark.parametrize("name", ["text_encoder", "vae"])
def test_a_component_given_as_config_and_weights(root: Path, spec: Callable[[str], Path], name: str) -> None:
    """A config in one place and weights in another, in the library's own names, of transformers and of diffusers."""
    weights = root / "sd" / name / ("model.safetensors" if name == "text_encoder" else WEIGHTS)
    shutil.copytree(root / "sd" / name, root / "configs" / name, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(weights, root / f"{name}.safetensors")
    text = f"components: {{{name}: {{source: ./{name}.safetensors, config: ./configs/{name}}}}}\n"
    pipe = load_from_yaml(spec(f"pipeline: {{source: ./sd, dtype: float16}}\n{text}"))
    cls = CLIPTextModel if name == "text_encoder" else AutoencoderKL
    other = cls.from_pretrained(root / "sd" / name, dtype=torch.float16).state_dict()
    ours = getattr(pipe, name).state_dict()
    assert ours.keys() == other.keys()
    assert all(torch.equal(ours[key], tensor) for key, tensor in other.items())


def test_a_single_file_that_lacks_tensors_is_not_filled_with_noise(root: Path, spec: Callable[[str], Path]) -> None:
    """A file that lacks some of a model is an error that names what is lacking, before anything is placed."""
    tensors = load_file(root / "sd" / "vae" / WEIGHTS)
    tensors.pop("decoder.conv_in.weight")
    save_file(tensors, root / "broken.safetensors")
    problem = refused(spec("pipeline: {source: ./sd}\ncomponents: {vae: {source: ./broken.safetensors}}\n"))
    assert problem.code is Code.COMPONENT_NOT_LOADED
    assert "decoder.conv_in" in problem.what


# GGUF


def by_hand_gguf(root: Path, dtype: torch.dtype) -> Any:
    """Return the tiny FLUX pipeline with its GGUF transformer, as one would write it with diffusers."""
    transformer = FluxTransformer2DModel.from_single_file(
        str(root / "flux.gguf"),
        config=str(root / "flux" / "transformer"),
        quantization_config=GGUFQuantizationConfig(compute_dtype=dtype),
        dtype=dtype,
    )
    return FluxPipeline.from_pretrained(root / "flux", transformer=transformer, dtype=dtype)


@pytest.mark.parametrize("place", ["cpu", "cuda:0", {"execution": "cuda:0", "offload": "model"}], ids=str)
def test_gguf_is_planned_by_its_header_and_runs(
    root: Path, spec: Callable[[str], Path], virtual_machine: MakeMachine, place: object
) -> None:
    """Quantised weights stay as stored: the plan has their bytes, and the picture is that of diffusers' own loader."""
    file = spec("pipeline: {source: ./flux, dtype: bfloat16}\ncomponents: {transformer: {source: ./flux.gguf}}\n")
    hand = by_hand_gguf(root, torch.bfloat16)
    plain = FluxTransformer2DModel.from_pretrained(root / "flux" / "transformer", dtype=torch.bfloat16)
    pipe = assert_as_by_hand(file, hand, "flux", virtual_machine, {"transformer": place, "default": "cuda:1"})
    assert loaded_bytes(pipe.transformer) < 0.75 * loaded_bytes(plain)
    packed = [parameter for parameter in pipe.transformer.parameters() if hasattr(parameter, "quant_type")]
    assert packed
    assert {str(parameter.device) for parameter in packed} == {"cuda:0" if place == "cuda:0" else "cpu"}


@pytest.mark.parametrize(
    ("text", "code", "what"),
    [
        ("pipeline: {source: ./flux.gguf}\n", Code.NOT_A_PIPELINE, "holds the weights of one component"),
        (
            "pipeline: {source: ./flux}\ncomponents: {transformer: {source: ./flux.gguf}}\n",
            Code.BAD_DTYPE,
            "which dtype 'transformer' is to have",
        ),
        (
            "pipeline: {source: ./flux, dtype: bf16}\ncomponents: {text_encoder: {source: ./flux.gguf}}\n",
            Code.NOT_SUPPORTED_YET,
            "diffusers loads no CLIPTextModel from a GGUF file",
        ),
        (
            GGUF_IN_FLUX + "device_map: {transformer: {execution: cuda:0, offload: sequential}, default: cuda:0}\n",
            Code.CONTRADICTION,
            "is brought whole, from memory",
        ),
        (
            GGUF_IN_FLUX + "device_map: cuda:0\nlow_memory: sequential_cpu_offload\n",
            Code.CONTRADICTION,
            "is not brought layer by layer",
        ),
        (
            GGUF_IN_FLUX + "device_map: {transformer: {execution: [cuda:0, cuda:1]}, default: cuda:0}\n",
            Code.NOT_SUPPORTED_YET,
            "is not placed in parts yet",
        ),
    ],
)
def test_gguf_where_it_cannot_be(spec: Callable[[str], Path], text: str, code: Code, what: str) -> None:
    """What diffusers does not load, and placements that lose how the weights are read, are told before loading."""
    problem = refused(spec(text))
    assert problem.code is code
    assert what in problem.what


def test_gguf_without_its_package_is_told_before_loading(
    spec: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning needs no package, and loading says which."""
    file = spec(GGUF_IN_FLUX)
    monkeypatch.setattr("dmconfig.quantization.importlib.util.find_spec", lambda _: None)
    assert plan_from_yaml(file)
    problem = refused(file)
    assert (problem.code, problem.fix) == (Code.PACKAGE_MISSING, "pip install gguf")
    assert problem.what == "loading transformer from ./flux.gguf takes gguf, which is not installed"


# From elsewhere


def test_a_component_from_another_pipeline_and_one_that_the_source_lacks(
    root: Path, spec: Callable[[str], Path], virtual_machine: MakeMachine
) -> None:
    """A ControlNet beside a plain pipeline, with ``class``; a VAE out of another pipeline; the checker left out."""
    shutil.copytree(root / "controlnet" / "controlnet", root / "canny", dirs_exist_ok=True)
    controlnet = ControlNetModel.from_pretrained(root / "canny")
    vae = AutoencoderKL.from_pretrained(root / "controlnet" / "vae")
    hand = StableDiffusionControlNetPipeline.from_pretrained(
        root / "sd", controlnet=controlnet, vae=vae, safety_checker=None
    )
    file = spec(
        "pipeline: {source: ./sd, class: StableDiffusionControlNetPipeline}\n"
        "components:\n"
        "  controlnet: {source: ./canny, class: ControlNetModel}\n"
        "  vae: {source: ./controlnet}\n"
        "  safety_checker: null\n"
    )
    assert_as_by_hand(file, hand, "controlnet", virtual_machine, {**TWO, "controlnet": "cuda:1"})


# On the hub


@pytest.mark.parametrize(
    ("text", "home", "config"),
    [
        ("pipeline: {source: dm/files/sd.safetensors, config: dm/sd}\n", "sd", "unet/config.json"),
        (
            "pipeline: {source: dm/flux, dtype: bfloat16}\ncomponents: {transformer: {source: dm/files/flux.gguf}}\n",
            "flux",
            "transformer/config.json",
        ),
        (
            "pipeline: {source: dm/sd}\ncomponents: {unet: {source: dm/files/u.safetensors}}\n",
            "sd",
            "unet/config.json",
        ),
    ],
    ids=["pipeline", "gguf", "component"],
)
def test_single_files_on_the_hub_are_planned_by_their_headers(  # noqa: PLR0917 - fixtures among them
    root: Path, spec: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, text: str, home: str, config: str
) -> None:
    """The plan is that of the same files on this machine, to the byte; headers and configs travel, and no weights."""
    tensors = load_file(root / "sd.safetensors")
    denoiser = {name: tensor for name, tensor in tensors.items() if name.startswith("model.diffusion_model.")}
    save_file(denoiser, root / "u.safetensors")
    machine = parse_machine("1GiB", "1GiB")
    local = text.replace("dm/files/", "./").replace("dm/", "./")
    expected = plan_for(check_file(spec(local)), machine)
    with serve() as hub:
        ask(hub, monkeypatch, root / "home")
        files = {name: (root / name).read_bytes() for name in ("sd.safetensors", "flux.gguf", "u.safetensors")}
        hub.add("dm/files", more=files)
        for kind in ("sd", "flux"):
            hub.add(f"dm/{kind}", root / kind)
        planned = plan_for(check_file(spec(text), ask_hub=True), machine, ask_hub=True)
        sent = hub.sent
    shutil.rmtree(root / "home", ignore_errors=True)
    for ours, theirs in zip(planned.assignments, expected.assignments, strict=True):
        assert replace(ours, measured_from="weights") == replace(theirs, measured_from="weights")
    of_files = {name: size for name, size in sent.items() if name.startswith("dm/files ")}
    (name,) = of_files
    assert of_files[name] <= (2**16 if "gguf" in name else len(files[name.partition(" ")[2]]) / 2)
    assert {f"dm/{home} {file}" for file in ("model_index.json", config)} <= sent.keys()


def test_a_pipeline_on_the_hub_is_rehearsed_without_its_weights(
    root: Path, spec: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configs are downloaded and headers looked at: the peaks are those of the same files on this machine."""
    text = "pipeline: {source: dm/flux, dtype: bfloat16}\ncomponents: {transformer: {source: dm/files/flux.gguf}}\n"
    machine, settings = parse_machine("2x1GiB", "1GiB"), Settings(height=32, width=32, call={"max_sequence_length": 16})
    local = spec(text.replace("dm/files/", "./").replace("dm/", "./"))
    expected = rehearse_file(functools.partial(check_file, local), [], machine, settings)
    with serve() as hub:
        ask(hub, monkeypatch, root / "rehearsed")
        hub.add("dm/files", more={"flux.gguf": (root / "flux.gguf").read_bytes()})
        hub.add("dm/flux", root / "flux")
        check = functools.partial(check_file, spec(text), ask_hub=True, with_configs=True)
        rehearsal = rehearse_file(check, [], machine, settings, ask_hub=True)
        here = {file.name for file in (root / "rehearsed").rglob("*") if file.is_file()}
    shutil.rmtree(root / "rehearsed")
    assert rehearsal.failure is None
    assert {"config.json", "scheduler_config.json", "model_index.json"} <= here
    assert not [name for name in here if name.endswith((".safetensors", ".gguf"))]
    assert set(rehearsal.stand_ins) == {"tokenizer", "tokenizer_2"}
    assert [device.peak.weights_bytes for device in rehearsal.devices] == [
        device.peak.weights_bytes for device in expected.devices
    ]
