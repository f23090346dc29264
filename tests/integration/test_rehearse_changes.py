"""Rehearsals of what is put on components: weights as planned, and runs as with values, by the pipeline's own code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.quantizers.gguf.utils import GGUFLinear

from dmconfig.assembly import PIPELINE
from dmconfig.checked import check_file
from dmconfig.load import plan_for
from dmconfig.plan import Plan
from dmconfig.rehearse import Rehearsal, Script, Settings, rehearsal_text, rehearse
from dmconfig.rehearse.quantised import QuantisedLinear
from dmconfig.rehearse.skeleton import build_skeletons
from tests.conftest import inventory
from tests.integration.test_rehearse import check_against_values, peaks_of, with_values
from tests.integration.test_rehearse import rehearsed as rehearsed_on_two
from tests.single_files import write_gguf
from tests.tiny_adapters import (
    write_flux_ip_adapter,
    write_image_encoder,
    write_ip_adapter,
    write_lora,
    write_sd3_ip_adapter,
    write_siglip,
    write_textual_inversion,
    write_textual_inversion_for_two,
)
from tests.tiny_pipelines import LENGTH, SIZE, Tiny

MACHINE = inventory(cuda=[1])
INT8 = "{quant_backend: torchao, quant_kwargs: {quant_type: Int8WeightOnlyConfig}}"
SECTIONS = {
    "gguf": "components: {transformer: {source: ./flux.gguf}}",
    "lora": "adapters: {lora: [{source: ./lora.safetensors}]}",
    "fused lora": "adapters: {lora: [{source: ./lora.safetensors, fused: true}]}",
    "layerwise casting": "components: {transformer: {layerwise_casting: true}}",
    "bitsandbytes": "quantization: {transformer: bitsandbytes_4bit, text_encoder_2: bitsandbytes_8bit}",
    "torchao": f"quantization: {{transformer: {INT8}}}",
    "quanto": "quantization: {transformer: quanto, text_encoder: quanto}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, one_thread: None) -> Iterator[Path]:
    """Tiny pipelines, and what is put on them."""
    root = tmp_path_factory.mktemp("rehearse")
    for kind in ("flux", "sd", "sdxl", "sd3"):
        (root / kind).symlink_to(tiny.spec(kind).with_suffix(""))
    transformer = DiffusionPipeline.from_pretrained(root / "flux").transformer
    write_lora(root / "lora.safetensors", transformer, "transformer")
    write_gguf(transformer.state_dict(), root / "flux.gguf")
    write_textual_inversion(root / "fox.safetensors", vectors=20)  # more than a block of the allocator
    write_textual_inversion_for_two(root / "owl.safetensors", vectors=20)
    write_ip_adapter(root / "ip.safetensors", DiffusionPipeline.from_pretrained(root / "sd").unet)
    write_flux_ip_adapter(root / "flux-ip.safetensors", transformer)
    write_sd3_ip_adapter(root / "sd3-ip.safetensors", DiffusionPipeline.from_pretrained(root / "sd3").transformer)
    write_siglip(root / "siglip")
    write_image_encoder(root / "image_encoder")
    return root


def planned(folder: Path, section: str) -> tuple[Script, Plan]:
    """Return what is rehearsed, and its plan with everything on one device."""
    file = folder / "spec.yaml"
    head = "version: 1\npipeline: {source: ./flux, dtype: bfloat16}\nreserve: 0\ndevice_map: cuda:0\n"
    file.write_text(head + section)
    checked = check_file(file)
    script = Script(resolved=checked.resolved, spec=checked.spec, assembly=checked.assembly)
    return script, plan_for(checked, MACHINE)


def rehearsed(folder: Path, section: str, size: int = SIZE) -> Rehearsal:
    """Return the rehearsal of one picture."""
    script, plan = planned(folder, section)
    settings = Settings(height=size, width=size, steps=2, full=True, call={"max_sequence_length": LENGTH})
    return rehearse(script, plan, MACHINE, settings)


@pytest.mark.parametrize("section", SECTIONS)
def test_weights_of_a_rehearsal_are_those_of_the_plan(section: str, folder: Path) -> None:
    """What is put on components runs without failing, and weighs what the plan says, to the byte."""
    script, plan = planned(folder, SECTIONS[section])

    pipes, _ = build_skeletons(
        script.resolved, script.assembly, {each.component: each.dtype for each in plan.assignments}
    )
    pipe = pipes[PIPELINE]

    held = {each.component: _held(getattr(pipe, each.component)) for each in plan.assignments}
    assert held == {each.component: each.nbytes for each in plan.assignments}
    assert rehearsed(folder, SECTIONS[section]).failure is None


def _held(module: torch.nn.Module) -> int:
    """Return the bytes of a module on meta, without buffers that are in no file, which headers do not tell."""
    names = module.state_dict().keys()
    quantised = any(isinstance(layer, (QuantisedLinear, GGUFLinear)) for layer in module.modules())
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    counted = [tensor for name, tensor in tensors.items() if name in names or quantised]
    return sum(tensor.numel() * tensor.element_size() for tensor in counted)


IMAGE_ENCODER = "components: {image_encoder: {source: ./image_encoder, class: CLIPVisionModelWithProjection}}\n"
SIGLIP = "components: {image_encoder: {source: ./siglip, class: SiglipVisionModel}}\n"
TWO_PICTURES = "[{source: ./ip.safetensors}, {source: ./ip.safetensors, scale: 0.3}]"
OTHERS = "pipelines: {again: {class: StableDiffusionImg2ImgPipeline}}\n"
RUNS = {
    "gguf": ("flux", "components: {transformer: {source: ./flux.gguf}}\n", "transformer"),
    "gguf brought": ("flux", "components: {transformer: {source: ./flux.gguf}}\n", "transformer"),
    "words": ("sd", "adapters: {textual_inversion: [{source: ./fox.safetensors}]}\n", "text_encoder"),
    "words for two": ("sdxl", "adapters: {textual_inversion: [{source: ./owl.safetensors}]}\n", "text_encoder_2"),
    "picture": ("sd", f"{IMAGE_ENCODER}adapters: {{ip_adapter: [{{source: ./ip.safetensors}}]}}\n", "image_encoder"),
    "pictures": ("sd", f"{IMAGE_ENCODER}adapters: {{ip_adapter: {TWO_PICTURES}}}\n", "unet"),
    "picture of flux": (
        "flux",
        f"{IMAGE_ENCODER}adapters: {{ip_adapter: [{{source: ./flux-ip.safetensors}}]}}\n",
        "image_encoder",
    ),
    "embeddings of flux": (
        "flux",
        "components: {image_encoder: null}\nadapters: {ip_adapter: [{source: ./flux-ip.safetensors}]}\n",
        "transformer",
    ),
    "picture of sd3": (
        "sd3",
        f"{SIGLIP}adapters: {{ip_adapter: [{{source: ./sd3-ip.safetensors}}]}}\n",
        "image_encoder",
    ),
    "embeddings": (
        "sd",
        "components: {image_encoder: null}\nadapters: {ip_adapter: [{source: ./ip.safetensors}]}\n",
        "unet",
    ),
    "float32 vae": ("flux", "components: {vae: {dtype: float32}}\n", "vae"),
    "another pipeline": ("sd", OTHERS, "unet"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_rehearsal_takes_what_the_same_run_with_values_takes(name: str, folder: Path) -> None:
    """Every peak, in weights and activations, and every move, on two devices; what is decoded on the way included."""
    kind, section, elsewhere = RUNS[name]
    place = f"{{execution: 'cuda:1', offload: {'model' if 'brought' in name else 'none'}}}"
    file = folder / "run.yaml"
    head = f"version: 1\npipeline: {{source: ./{kind}, dtype: bfloat16}}\nreserve: 0\n"
    file.write_text(f"{head}device_map: {{{elsewhere}: {place}, default: cuda:0}}\n{section}")
    own = {"max_sequence_length": LENGTH} if kind in ("flux", "sd3") else {}
    pipeline = "again" if section == OTHERS else PIPELINE
    size = {} if section == OTHERS else {"height": SIZE, "width": SIZE}
    settings = Settings(**size, steps=2, full=True, call=own, pipeline=pipeline)

    rehearsal = check_against_values(check_file(file), settings)

    assert not rehearsal.never_ran
    planned = {each.component: each.nbytes for each in rehearsal.plan.assignments}
    assert planned[elsewhere] > 0


@pytest.mark.parametrize("backend", ["torchao", "quanto"])
def test_quantised_layers_take_what_the_backend_itself_takes(backend: str, folder: Path) -> None:
    """What comes of decoding is that of a run with values; packed weights, but for rests of the allocator's blocks."""
    file = folder / "run.yaml"
    head = "version: 1\npipeline: {source: ./flux, dtype: bfloat16}\nreserve: 0\ndevice_map: cuda:0\n"
    file.write_text(f"{head}quantization: {{transformer: {INT8 if backend == 'torchao' else backend}}}\n")
    settings = Settings(height=8 * SIZE, width=8 * SIZE, steps=2, full=True, call={"max_sequence_length": LENGTH})
    checked = check_file(file)

    rehearsal = rehearsed_on_two(checked, settings)
    peaks, _ = with_values(checked, rehearsal, settings)

    ours, theirs = peaks_of(rehearsal)["cuda:0", "transformer"], peaks["cuda:0", "transformer"]
    assert ours[1] == theirs[1]
    layers = sum(isinstance(each, torch.nn.Linear) for each in _transformer(folder).modules())
    assert 0 <= theirs[0] - ours[0] <= 4 * 512 * layers
    assert rehearsal.by_rule == {"transformer": backend}
    assert f"the weights of transformer are those of {backend}'s rule" in rehearsal_text(rehearsal, 200)


def _transformer(folder: Path) -> torch.nn.Module:
    module: torch.nn.Module = DiffusionPipeline.from_pretrained(folder / "flux").transformer
    return module


def test_tiling_lowers_the_peak_of_decoding(folder: Path) -> None:
    """Tiles are decoded one after the other, and the rehearsal, which runs that code, sees it."""
    tiled = rehearsed(folder, "components: {vae: {tiling: true}}", size=3 * SIZE)
    plain = rehearsed(folder, "", size=3 * SIZE)

    def of_decoding(rehearsal: Rehearsal) -> int:
        (device,) = rehearsal.devices
        return max(phase.activations_bytes for phase in device.phases if phase.phase.startswith("vae"))

    assert tiled.failure is None
    assert of_decoding(tiled) < 0.8 * of_decoding(plain)
