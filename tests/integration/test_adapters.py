"""LoRAs, textual inversions and IP-Adapters from a file: the bits and the bytes of the same put on by hand."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from dmconfig import load_from_yaml, plan_from_yaml
from dmconfig.errors import BuildError, SpecError
from tests.conftest import only_problem
from tests.tiny_adapters import (
    write_flux_ip_adapter,
    write_image_encoder,
    write_ip_adapter,
    write_kohya_lora,
    write_lora,
    write_sd3_ip_adapter,
    write_siglip,
    write_textual_inversion,
    write_textual_inversion_for_two,
)
from tests.tiny_pipelines import SIZE, Tiny, call_arguments
from tests.virtual_devices import MakeMachine

pytestmark = pytest.mark.usefixtures("one_thread")

FOX, OWL = "<fox>", "<owl>"
DENOISERS = {"sd": "unet", "sdxl": "unet", "sd3": "transformer", "flux": "transformer", "wan": "transformer"}
TWO = "device_map: {{{denoiser}: 'cuda:1', default: 'cuda:0'}}\nreserve: 0\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Path:
    """Tiny pipelines, a folder per kind, with adapters beside them."""
    root = tmp_path_factory.mktemp("adapters")
    for kind, denoiser in DENOISERS.items():
        (root / kind).symlink_to(tiny.spec(kind).with_suffix(""))
        module = getattr(DiffusionPipeline.from_pretrained(root / kind), denoiser)
        write_lora(root / f"{kind}-a.safetensors", module, denoiser)
        write_lora(root / f"{kind}-b.safetensors", module, denoiser, seed=1, layers=("to_k",))
    unet = DiffusionPipeline.from_pretrained(root / "sd").unet
    write_kohya_lora(root / "kohya.safetensors", unet)
    write_textual_inversion(root / "fox.safetensors")
    write_textual_inversion_for_two(root / "owl.safetensors")
    write_ip_adapter(root / "sd-ip.safetensors", unet)
    write_ip_adapter(root / "sdxl-ip.safetensors", DiffusionPipeline.from_pretrained(root / "sdxl").unet)
    write_flux_ip_adapter(root / "flux-ip.safetensors", DiffusionPipeline.from_pretrained(root / "flux").transformer)
    write_sd3_ip_adapter(root / "sd3-ip.safetensors", DiffusionPipeline.from_pretrained(root / "sd3").transformer)
    write_image_encoder(root / "image_encoder")
    write_siglip(root / "siglip")
    return root


def spec(folder: Path, kind: str, more: str, place: str | None = None) -> Path:
    """Return a spec of a kind with an adapters section, on two devices unless place says otherwise."""
    file = folder / "spec.yaml"
    place = TWO.format(denoiser=DENOISERS[kind]) if place is None else place
    file.write_text(f"version: 1\npipeline: {{source: ./{kind}}}\n{place}{more}")
    return file


def drawn(pipe: Any, kind: str, **more: Any) -> np.ndarray:
    """Return what a pipeline draws."""
    pipe.set_progress_bar_config(disable=True)
    result = pipe(**{**call_arguments(kind), **more}, generator=torch.Generator().manual_seed(0))
    images: np.ndarray = result.images if hasattr(result, "images") else result.frames
    return images


def by_hand(folder: Path, kind: str, put_on: Callable[[Any], None], **more: Any) -> np.ndarray:
    """Return what the plain pipeline draws with adapters put on by hand.

    Its weights are copied, as a move to a device does: at other addresses than those of a mapped file, the last bits
    may be others.
    """
    pipe = DiffusionPipeline.from_pretrained(folder / kind)
    put_on(pipe)
    for part in pipe.components.values():
        for parameter in part.parameters() if isinstance(part, torch.nn.Module) else ():
            parameter.data = parameter.data.clone()
    return drawn(pipe, kind, **more)


def memory(pipe: Any) -> dict[str, int]:
    """Return the bytes of each component's parameters and stored buffers, each once."""
    found = {}
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            tensors = {id(t): t for t in (*part.parameters(), *part.state_dict(keep_vars=True).values())}
            found[name] = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return found


def planned(file: Path) -> dict[str, int]:
    """Return the planned bytes of each component."""
    return {each.component: each.nbytes for each in plan_from_yaml(file).assignments}


@pytest.mark.parametrize(
    "kind", ["sd", "flux", "wan", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sdxl", "sd3"))]
)
def test_lora_on_two_devices_draws_what_it_does_by_hand(kind: str, folder: Path, virtual_machine: MakeMachine) -> None:
    """Two stacked LoRAs with weights, run twice, equal bit for bit; and every planned byte is a loaded one."""

    def put_on(pipe: Any) -> None:
        pipe.load_lora_weights(str(folder), weight_name=f"{kind}-a.safetensors", adapter_name="a")
        pipe.load_lora_weights(str(folder), weight_name=f"{kind}-b.safetensors", adapter_name="b")
        pipe.set_adapters(["a", "b"], adapter_weights=[0.7, 0.2])

    expected = by_hand(folder, kind, put_on)
    file = spec(
        folder, kind,
        f"adapters: {{lora: [{{source: ./{kind}-a.safetensors, name: a, weight: 0.7}}, "
        f"{{source: ./, weight_name: {kind}-b.safetensors, name: b, weight: 0.2}}]}}\n",
    )  # fmt: skip

    virtual_machine()
    pipe, plan = load_from_yaml(file), planned(file)

    assert pipe.hf_device_map[DENOISERS[kind]] == "cuda:1"
    assert {parameter.device.index for parameter in getattr(pipe, DENOISERS[kind]).parameters()} == {1}
    assert np.array_equal(drawn(pipe, kind), expected)
    assert np.array_equal(drawn(pipe, kind), expected)
    assert not np.array_equal(by_hand(folder, kind, lambda _: None), expected)
    assert memory(pipe) == plan


def test_lora_in_half_precision_takes_the_dtype_of_its_component(folder: Path) -> None:
    """A float32 file on a bfloat16 denoiser weighs half: the plan and the memory agree to the byte."""
    file = spec(folder, "sd", "adapters: {lora: [{source: ./sd-a.safetensors}]}\n", "device_map: cpu\n")
    overrides = {"pipeline.dtype": "bfloat16"}

    loaded = memory(load_from_yaml(file, overrides))
    plan = {each.component: each.nbytes for each in plan_from_yaml(file, overrides).assignments}
    plain = plan_from_yaml(spec(folder, "sd", "", "device_map: cpu\n"), overrides)

    assert loaded == plan
    added = plan["unet"] - next(a.nbytes for a in plain.assignments if a.component == "unet")
    assert added == ((folder / "sd-a.safetensors").stat().st_size - _header(folder / "sd-a.safetensors")) // 2


def _header(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def test_kohya_lora_is_counted_without_its_alphas(folder: Path) -> None:
    """A file in kohya's names is put on, and weighs in memory what was planned."""
    file = spec(folder, "sd", "adapters: {lora: [{source: ./kohya.safetensors}]}\n", "device_map: cpu\n")

    pipe = load_from_yaml(file)

    assert pipe.get_list_adapters() == {"unet": ["kohya"]}
    assert memory(pipe) == planned(file)


def test_fused_lora_leaves_no_layers_and_no_bytes(folder: Path, virtual_machine: MakeMachine) -> None:
    """A fused LoRA below a stacked one: the bits of the same by hand, and only the stacked one weighs anything."""

    def put_on(pipe: Any) -> None:
        pipe.load_lora_weights(str(folder), weight_name="sd-a.safetensors", adapter_name="a")
        pipe.set_adapters(["a"], adapter_weights=[0.5])
        pipe.fuse_lora(components=["unet"], adapter_names=["a"])
        pipe.unload_lora_weights()
        pipe.load_lora_weights(str(folder), weight_name="sd-b.safetensors", adapter_name="b")

    expected = by_hand(folder, "sd", put_on)
    fused = "{source: ./sd-a.safetensors, weight: 0.5, fused: true}"
    more = f"adapters: {{lora: [{{source: ./sd-b.safetensors, name: b}}, {fused}]}}"
    file = spec(folder, "sd", more)

    virtual_machine()
    pipe = load_from_yaml(file)

    assert pipe.get_list_adapters() == {"unet": ["b"]}
    assert np.array_equal(drawn(pipe, "sd"), expected)
    assert memory(pipe) == planned(file)


@pytest.mark.parametrize(
    "unet",
    [
        "unet: {execution: 'cuda:1', offload: model}",
        pytest.param("unet: {execution: 'cuda:1', offload: sequential}", marks=pytest.mark.slow),
        pytest.param("unet: {execution: 'cuda:1', offload: group}", marks=pytest.mark.slow),
        "unet: {execution: 'cuda:1', offload: sequential, storage: disk}",
        "unet.mid_block: 'cuda:1'",
    ],
    ids=["model", "sequential", "group", "disk", "split"],
)
def test_lora_is_brought_with_its_component(unet: str, folder: Path, virtual_machine: MakeMachine) -> None:
    """Whichever way the component comes to its device, its LoRA comes along, twice."""

    def put_on(pipe: Any) -> None:
        pipe.load_lora_weights(str(folder), weight_name="sd-a.safetensors", adapter_name="a")

    expected = by_hand(folder, "sd", put_on)
    place = f"device_map: {{{unet}, default: 'cuda:0'}}\nreserve: 0\n"
    file = spec(folder, "sd", "adapters: {lora: [{source: ./sd-a.safetensors, name: a}]}\n", place)

    virtual_machine()
    pipe = load_from_yaml(file)

    assert np.array_equal(drawn(pipe, "sd"), expected)
    assert np.array_equal(drawn(pipe, "sd"), expected)


def test_parts_of_a_split_component_count_their_lora(folder: Path, virtual_machine: MakeMachine) -> None:
    """The bytes of each part are those of its modules, the LoRA's layers among them."""
    file = spec(
        folder, "flux", "adapters: {lora: [{source: ./flux-a.safetensors, name: a}]}\n",
        "device_map: {transformer.single_transformer_blocks: 'cuda:1', default: 'cuda:0'}\nreserve: 0\n",
    )  # fmt: skip

    virtual_machine()
    plan, pipe = plan_from_yaml(file), load_from_yaml(file)

    (transformer,) = [each for each in plan.assignments if each.component == "transformer"]
    blocks = memory_of(pipe.transformer.single_transformer_blocks)
    assert {part.path: part.nbytes for part in transformer.parts} == {
        "": memory_of(pipe.transformer) - blocks,
        "single_transformer_blocks": blocks,
    }


def memory_of(module: torch.nn.Module) -> int:
    """Return the bytes of a module's parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def test_textual_inversion_adds_words_and_their_bytes(folder: Path, virtual_machine: MakeMachine) -> None:
    """A word of two vectors, used in a prompt, draws what it does by hand and weighs what was planned."""

    def put_on(pipe: Any) -> None:
        pipe.load_textual_inversion(str(folder / "fox.safetensors"), token=FOX)

    prompt = "a <fox>"
    expected = by_hand(folder, "sd", put_on, prompt=prompt)
    file = spec(folder, "sd", "adapters: {textual_inversion: [{source: ./fox.safetensors}]}\n")

    virtual_machine()
    pipe = load_from_yaml(file)

    assert np.array_equal(drawn(pipe, "sd", prompt=prompt), expected)
    assert not np.array_equal(by_hand(folder, "sd", lambda _: None, prompt=prompt), expected)
    assert memory(pipe) == planned(file)


def test_textual_inversion_for_two_encoders_goes_to_each(folder: Path, virtual_machine: MakeMachine) -> None:
    """A file with clip_l and clip_g is learned by both encoders of SDXL, under the token of the file."""

    def put_on(pipe: Any) -> None:
        from safetensors.torch import load_file

        tensors = load_file(folder / "owl.safetensors")
        for name, encoder in (("clip_l", "text_encoder"), ("clip_g", "text_encoder_2")):
            parts = {
                "text_encoder": getattr(pipe, encoder),
                "tokenizer": getattr(pipe, encoder.replace("text_encoder", "tokenizer")),
            }
            pipe.load_textual_inversion(tensors[name], OWL, **parts)

    expected = by_hand(folder, "sdxl", put_on, prompt="an <owl>")
    file = spec(folder, "sdxl", "adapters: {textual_inversion: [{source: ./owl.safetensors, token: <owl>}]}\n")

    virtual_machine()
    pipe = load_from_yaml(file)

    assert np.array_equal(drawn(pipe, "sdxl", prompt="an <owl>"), expected)
    assert memory(pipe) == planned(file)


IMAGE_ENCODERS = {"sd3": ("./siglip", "SiglipVisionModel")}
OF_OTHERS = ("./image_encoder", "CLIPVisionModelWithProjection")


def with_ip_adapter(folder: Path, kind: str, *scales: float) -> str:
    """Return the lines of a spec with a kind's IP-Adapter, once for each scale, and its image encoder."""
    source, class_name = IMAGE_ENCODERS.get(kind, OF_OTHERS)
    adapters = ", ".join(f"{{source: ./{kind}-ip.safetensors, scale: {scale}}}" for scale in scales)
    encoder = f"components: {{image_encoder: {{source: {source}, class: {class_name}}}}}\n"
    return f"{encoder}adapters: {{ip_adapter: [{adapters}]}}\n"


def picture() -> torch.Tensor:
    """Return the picture that is the prompt."""
    return torch.rand(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["sd", "flux", "sd3", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_ip_adapter_looks_through_its_image_encoder(kind: str, folder: Path, virtual_machine: MakeMachine) -> None:
    """A picture as a prompt, on two devices, draws what it does by hand and weighs what was planned."""
    import transformers

    source, class_name = IMAGE_ENCODERS.get(kind, OF_OTHERS)

    def put_on(pipe: Any) -> None:
        pipe.register_modules(image_encoder=getattr(transformers, class_name).from_pretrained(folder / source))
        pipe.load_ip_adapter(str(folder), subfolder="", weight_name=f"{kind}-ip.safetensors")
        pipe.set_ip_adapter_scale(0.6)

    expected = by_hand(folder, kind, put_on, ip_adapter_image=picture())
    assert not np.array_equal(expected, by_hand(folder, kind, lambda _: None)), "the adapter changes nothing"
    file = spec(folder, kind, with_ip_adapter(folder, kind, 0.6))

    virtual_machine()
    pipe = load_from_yaml(file)

    assert np.array_equal(drawn(pipe, kind, ip_adapter_image=picture()), expected)
    assert np.array_equal(drawn(pipe, kind, ip_adapter_image=picture()), expected)
    assert memory(pipe) == planned(file)


@pytest.mark.parametrize("kind", ["sd", "flux"])
def test_two_ip_adapters_each_have_their_scale(kind: str, folder: Path, virtual_machine: MakeMachine) -> None:
    """A picture for each, as by hand."""
    encoder, name = folder / "image_encoder", f"{kind}-ip.safetensors"

    def put_on(pipe: Any) -> None:
        from transformers import CLIPVisionModelWithProjection

        pipe.register_modules(image_encoder=CLIPVisionModelWithProjection.from_pretrained(encoder))
        pipe.load_ip_adapter([str(folder)] * 2, subfolder=[""] * 2, weight_name=[name] * 2)
        pipe.set_ip_adapter_scale([0.6, 0.2])

    pictures = [picture(), 1 - picture()]
    expected = by_hand(folder, kind, put_on, ip_adapter_image=pictures)
    virtual_machine()
    pipe = load_from_yaml(spec(folder, kind, with_ip_adapter(folder, kind, 0.6, 0.2)))
    assert np.array_equal(drawn(pipe, kind, ip_adapter_image=pictures), expected)


def test_second_ip_adapter_of_stable_diffusion_3_is_refused(folder: Path) -> None:
    """Its class holds one."""
    with pytest.raises(SpecError) as error:
        plan_from_yaml(spec(folder, "sd3", with_ip_adapter(folder, "sd3", 0.6, 0.2)))
    problem = only_problem(error.value)
    assert problem.path == ("adapters", "ip_adapter", 1)
    assert problem.what == "StableDiffusion3Pipeline takes one IP-Adapter"


def test_adapter_that_fails_names_its_file_and_leaves_nothing(folder: Path) -> None:
    """A LoRA of another pipeline matches no layer: the load fails with the file, and no pipeline stays in memory."""
    file = spec(
        folder, "sd",
        "adapters: {lora: [{source: ./sd-a.safetensors, name: good}, {source: ./flux-a.safetensors, name: bad}]}\n",
        "device_map: cpu\n",
    )  # fmt: skip
    gc.collect()
    before = _pipelines()

    with pytest.raises(BuildError) as error:
        load_from_yaml(file)

    problem = only_problem(error.value)
    assert problem.path == ("adapters", "lora", 1)
    assert "bad" in problem.what
    assert str(folder / "flux-a.safetensors") in problem.why
    del error
    gc.collect()
    assert _pipelines() == before


def _pipelines() -> int:
    return sum(isinstance(each, DiffusionPipeline) for each in gc.get_objects())


def test_weights_that_adapters_change_do_not_rest_in_files(folder: Path) -> None:
    """A fused LoRA makes new weights, so the file cannot hold them: refused before loading."""
    file = spec(
        folder, "sd", "adapters: {lora: [{source: ./sd-a.safetensors, fused: true}]}\n",
        "device_map: {unet: {execution: 'cuda:1', offload: model, storage: disk}, default: 'cuda:0'}\n",
    )  # fmt: skip

    with pytest.raises(SpecError) as error:
        plan_from_yaml(file)

    assert only_problem(error.value).what == "'unet' cannot be placed so: the LoRA sd-a is fused into it"


def test_lora_for_a_text_encoder_is_counted_there(folder: Path) -> None:
    """Names tell the component; where peft is too old for transformers, that is told before anything is loaded."""
    from packaging.version import Version
    from peft import __version__ as installed
    from transformers.integrations import peft

    encoder = DiffusionPipeline.from_pretrained(folder / "sd").text_encoder
    write_lora(folder / "words.safetensors", encoder, "text_encoder", layers=("q_proj",))
    file = spec(folder, "sd", "adapters: {lora: [{source: ./words.safetensors}]}\n", "device_map: cpu\n")
    plain = planned(spec(folder, "sd", "", "device_map: cpu\n"))
    file = spec(folder, "sd", "adapters: {lora: [{source: ./words.safetensors}]}\n", "device_map: cpu\n")
    added = {name: nbytes - plain[name] for name, nbytes in planned(file).items() if nbytes != plain[name]}
    assert added == {"text_encoder": 2 * (2 * 32 + 32 * 2) * 4}  # two layers, A and B of rank 2 by 32, float32

    if Version(installed) < Version(peft.MIN_PEFT_VERSION):
        with pytest.raises(BuildError) as error:
            load_from_yaml(file)
        assert only_problem(error.value).fix == f"pip install 'peft>={peft.MIN_PEFT_VERSION}'"
    else:
        assert memory(load_from_yaml(file)) == planned(file)
