"""What users reported of dtypes, variants and wrapped components, each shown on a small pipeline of real classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from dmconfig import load_from_yaml, plan_from_yaml
from dmconfig.dispatch import swap
from dmconfig.errors import DispatchError, SourceError, SpecError
from tests.conftest import only_problem
from tests.tiny_pipelines import Tiny, draw, write_tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Path:
    """Tiny pipelines of several kinds."""
    root = tmp_path_factory.mktemp("dtypes")
    for kind in ("sdxl", "flux"):
        (root / kind).symlink_to(tiny.spec(kind).with_suffix(""))
    return root


def spec(folder: Path, kind: str, pipeline: str = "", more: str = "") -> Path:
    """Return a spec of a kind on the cpu."""
    file = folder / "spec.yaml"
    file.write_text(f"version: 1\npipeline: {{source: ./{kind}{pipeline}}}\ndevice_map: cpu\n{more}")
    return file


def dtypes(module: torch.nn.Module) -> set[torch.dtype]:
    """Return the dtypes of a module's parameters."""
    return {parameter.dtype for parameter in module.parameters()}


def test_b91_auto_is_the_stored_dtype_and_words_are_never_float32_in_silence(folder: Path, tmp_path: Path) -> None:
    """``auto`` loads as stored; ``float16`` as text is float16."""
    write_tiny("sdxl", tmp_path / "sdxl", dtype="bfloat16")

    assert dtypes(load_from_yaml(spec(tmp_path, "sdxl", ", dtype: auto")).unet) == {torch.bfloat16}
    assert dtypes(load_from_yaml(spec(folder, "sdxl", ", dtype: float16")).unet) == {torch.float16}


def test_b94_the_other_spelling_is_named_where_it_stands(folder: Path) -> None:
    """``torch_dtype`` is answered with ``dtype``, alone and beside it: one spelling, nothing ignored."""
    for written in (", torch_dtype: float16", ", dtype: float16, torch_dtype: float16"):
        with pytest.raises(SpecError) as error:
            plan_from_yaml(spec(folder, "sdxl", written))
        problem = only_problem(error.value)
        assert problem.path == ("pipeline", "torch_dtype")
        assert "'torch_dtype' is called 'dtype' here" in problem.what


def test_b95_t5_is_cast_while_it_is_loaded_and_keeps_its_layers_in_float32(folder: Path) -> None:
    """In float16 the output projections of T5 stay float32, as its own loader has them."""
    encoder = load_from_yaml(spec(folder, "flux", more="components: {text_encoder_2: {dtype: float16}}")).text_encoder_2

    kept = {name.rpartition(".wo.")[1] for name, p in encoder.named_parameters() if p.dtype == torch.float32}
    assert kept == {".wo."}
    assert dtypes(encoder) == {torch.float16, torch.float32}


def test_b96_saved_and_loaded_again_in_float16_passes_the_audit(folder: Path, tmp_path: Path) -> None:
    """Mixed precision on purpose is right, also of a copy that was saved so."""
    load_from_yaml(spec(folder, "flux", ", dtype: float16")).save_pretrained(tmp_path / "flux")

    again = load_from_yaml(spec(tmp_path, "flux", ", dtype: float16"))

    assert dtypes(again.text_encoder_2) == {torch.float16, torch.float32}


def test_b97_a_controlnet_of_another_dtype_than_the_denoiser_is_refused(tiny: Tiny) -> None:
    """Both add to one another on every step: told before loading, where the dtype stands; with one dtype, it runs."""
    file = tiny.spec("controlnet")
    half = {"pipeline.dtype": "bfloat16", "device_map": "cpu"}

    with pytest.raises(SpecError) as error:
        plan_from_yaml(file, {**half, "components.controlnet.dtype": "float32"})

    assert "controlnet" in only_problem(error.value).what
    pipe = load_from_yaml(file, half)
    assert dtypes(pipe.controlnet) == dtypes(pipe.unet) == {torch.bfloat16}
    draw(pipe, "controlnet", 0)


def test_b98_a_component_of_another_source_has_the_dtype_of_the_file(folder: Path) -> None:
    """Wherever a component comes from, the pipeline's dtype, or its own, is its dtype."""
    own = "components: {unet: {source: ./sdxl/unet}, vae: {source: ./sdxl, dtype: bfloat16}}"

    pipe = load_from_yaml(spec(folder, "sdxl", ", dtype: bfloat16", own))

    assert dtypes(pipe.unet) == {torch.bfloat16}
    assert dtypes(pipe.vae) == {torch.bfloat16}


def test_b99_dtypes_after_a_call_are_those_before(folder: Path) -> None:
    """The VAE of SDXL is cast up while it decodes; two calls later everything has the dtype it had."""
    pipe = load_from_yaml(spec(folder, "sdxl", ", dtype: float16"))
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    before = {name: dtypes(module) for name, module in modules.items()}

    for seed in (0, 1):
        draw(pipe, "sdxl", seed)

    assert {name: dtypes(module) for name, module in modules.items()} == before
    assert pipe.dtype == torch.float16


def test_b100_variant_says_which_components_have_it(folder: Path, tmp_path: Path) -> None:
    """Weights of a variant are chosen by ``variant``; the plan names the components that do without."""
    pipe = DiffusionPipeline.from_pretrained(folder / "sdxl", dtype=torch.float16)
    pipe.save_pretrained(tmp_path / "sdxl")
    pipe.unet.save_pretrained(tmp_path / "sdxl" / "unet", variant="fp16")

    notes = plan_from_yaml(spec(tmp_path, "sdxl", ", variant: fp16")).notes

    assert "vae has no fp16 weights; its plain ones are used" in notes
    assert not any(note.startswith("unet ") for note in notes)
    with pytest.raises(SourceError) as error:
        load_from_yaml(spec(tmp_path, "sdxl", ", variant: fp8"))
    assert only_problem(error.value).path == ("pipeline", "variant")


def test_b100_the_old_word_for_a_variant_is_explained(folder: Path) -> None:
    """``revision: fp16`` is answered on the line where it stands: a folder has no revisions."""
    with pytest.raises(SpecError) as error:
        plan_from_yaml(spec(folder, "sdxl", ", revision: fp16"))

    problem = only_problem(error.value)
    assert problem.path == ("pipeline", "revision")
    assert "local folder" in problem.what


def test_b107_a_wrapper_that_is_no_module_is_not_placed(folder: Path) -> None:
    """An object that wraps a model is no torch module, so it cannot take a place: refused, nothing changed."""

    class Wrapper:
        def __init__(self, wrapped: Any) -> None:
            self.wrapped = wrapped

    pipe = load_from_yaml(spec(folder, "sdxl"))
    unet = pipe.unet

    with pytest.raises(DispatchError) as error:
        swap(pipe, "unet", Wrapper(unet))

    assert "Wrapper" in only_problem(error.value).what
    assert pipe.unet is unet
