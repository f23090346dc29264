"""Components quantised from a file: the bits of the same quantised by hand, and the bytes that were planned.

torchao and quanto compute on the cpu, so they run for real. bitsandbytes does not run in diffusers without an
accelerator; its sizes are held against figures of the library itself, see ``tests/unit/test_quantization.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers import DiffusionPipeline
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dmconfig import load_from_yaml, plan_from_yaml
from dmconfig.errors import BuildError, PlanError
from tests.conftest import only_problem
from tests.tiny_pipelines import Tiny, call_arguments
from tests.virtual_devices import MakeMachine

pytestmark = pytest.mark.usefixtures("one_thread")

INT8 = "{quant_backend: torchao, quant_kwargs: {quant_type: Int8WeightOnlyConfig}}"
SECTIONS = {
    "torchao int8": f"{{transformer: {INT8}, text_encoder_2: {INT8}}}",
    "torchao float8": "{transformer: {quant_backend: torchao, quant_kwargs: {quant_type: Float8WeightOnlyConfig}}}",
    "torchao but for some": (
        "{transformer: {quant_backend: torchao, quant_kwargs: {quant_type: {class: Int8WeightOnlyConfig}, "
        "modules_to_not_convert: [x_embedder, single_transformer_blocks.0]}}}"
    ),
    "quanto int8": "{transformer: quanto, text_encoder_2: quanto}",
}
"""Not quanto's int4: on a CPU its library compiles an extension first, into the user's home."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Path:
    """A tiny pipeline with a transformer of diffusers and encoders of transformers."""
    root = tmp_path_factory.mktemp("quantization")
    (root / "flux").symlink_to(tiny.spec("flux").with_suffix(""))
    return root


def spec(folder: Path, section: str, place: str = "device_map: cpu") -> Path:
    """Return a spec in bfloat16, which is what int8 kernels are for."""
    file = folder / "spec.yaml"
    head = f"version: 1\npipeline: {{source: ./flux, dtype: bfloat16}}\nreserve: 0\n{place}\n"
    file.write_text(head + f"quantization: {section}\n")
    return file


def drawn(pipe: Any) -> np.ndarray:
    """Return what a pipeline draws."""
    pipe.set_progress_bar_config(disable=True)
    images: np.ndarray = pipe(**call_arguments("flux"), generator=torch.Generator().manual_seed(0)).images
    return images


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, or of those that a quantised one is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.numel() * tensor.element_size()
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return sum(nbytes(each) for each in inner if each is not None)


def held(module: torch.nn.Module) -> int:
    """Return the bytes that a plan counts: all of a quantised module, or what a plain one has in its files."""
    if getattr(module, "is_quantized", False):
        return sum(nbytes(tensor) for tensor in (*module.parameters(), *module.buffers()))
    return sum(nbytes(tensor) for tensor in {t.data_ptr(): t for t in module.state_dict().values()}.values())


@pytest.mark.parametrize("section", SECTIONS)
def test_planned_bytes_of_quantised_components_are_those_in_memory(section: str, folder: Path) -> None:
    """By the backend's rule, from the config alone: to the byte, for parts of both libraries."""
    file = spec(folder, SECTIONS[section])

    plan, pipe = plan_from_yaml(file), load_from_yaml(file)

    planned = {each.component: each.nbytes for each in plan.assignments}
    assert planned == {name: held(getattr(pipe, name)) for name in planned}
    plain = {each.component: each.nbytes for each in plan_from_yaml(spec(folder, "{}")).assignments}
    smaller = {name for name in planned if planned[name] < plain[name]}
    assert smaller == {name for name in planned if getattr(getattr(pipe, name), "is_quantized", False)}
    assert smaller


PLACES = {
    "cpu": "{transformer: cpu, text_encoder_2: cpu, default: 'cuda:1'}",
    "two devices": "{transformer: 'cuda:0', text_encoder_2: 'cuda:1', default: 'cuda:1'}",
    "brought": "{transformer: {execution: 'cuda:0', offload: model}, default: 'cuda:1'}",
}


@pytest.mark.parametrize("place", PLACES)
def test_torchao_draws_what_it_does_by_hand(place: str, folder: Path, virtual_machine: MakeMachine) -> None:
    """An int8 denoiser and encoder, beside others on an accelerator or on one: the bits of diffusers' own, twice."""
    from torchao.quantization import Int8WeightOnlyConfig

    transformer = diffusers.FluxTransformer2DModel.from_pretrained(
        folder / "flux" / "transformer",
        quantization_config=diffusers.TorchAoConfig(Int8WeightOnlyConfig()),
        dtype=torch.bfloat16,
    )
    encoder = transformers.T5EncoderModel.from_pretrained(
        folder / "flux" / "text_encoder_2",
        quantization_config=transformers.TorchAoConfig(Int8WeightOnlyConfig()),
        dtype=torch.bfloat16,
    )
    by_hand = DiffusionPipeline.from_pretrained(
        folder / "flux", transformer=transformer, text_encoder_2=encoder, dtype=torch.bfloat16
    )
    expected = drawn(by_hand)

    virtual_machine()
    pipe = load_from_yaml(spec(folder, SECTIONS["torchao int8"], f"device_map: {PLACES[place]}"))

    weight = pipe.transformer.transformer_blocks[0].attn.to_q.weight
    assert np.array_equal(drawn(pipe), expected)
    assert type(weight).__name__ == "Int8Tensor"
    assert str(weight.qdata.device) == ("cuda:0" if place == "two devices" else "cpu")
    assert np.array_equal(drawn(pipe), expected)


@pytest.mark.parametrize("how", ["", "model"])
def test_quanto_on_two_devices_draws_what_it_does_by_hand(how: str, folder: Path, virtual_machine: MakeMachine) -> None:
    """Packed weights stay packed on their device, and draw the bits of the cpu, twice."""
    transformer = diffusers.FluxTransformer2DModel.from_pretrained(
        folder / "flux" / "transformer",
        quantization_config=diffusers.QuantoConfig(weights_dtype="int8"),
        dtype=torch.bfloat16,
    )
    by_hand = DiffusionPipeline.from_pretrained(folder / "flux", transformer=transformer, dtype=torch.bfloat16)
    expected = drawn(by_hand)

    virtual_machine()
    unet = f"{{execution: 'cuda:1', offload: {how}}}" if how else "'cuda:1'"
    place = f"device_map: {{transformer: {unet}, default: 'cuda:0'}}"
    pipe = load_from_yaml(spec(folder, "{transformer: quanto}", place))

    weight = pipe.transformer.transformer_blocks[0].attn.to_q.weight
    assert np.array_equal(drawn(pipe), expected)
    assert type(weight).__name__ == "WeightQBytesTensor"
    assert str(weight._data.device) == ("cpu" if how else "cuda:1")
    assert np.array_equal(drawn(pipe), expected)


def test_unknown_torchao_configuration_is_told_by_the_library(folder: Path) -> None:
    """A name that torchao does not have is a problem of the component, not a traceback."""
    section = "{transformer: {quant_backend: torchao, quant_kwargs: {quant_type: Int9WeightOnlyConfig}}}"

    with pytest.raises(BuildError) as error:
        load_from_yaml(spec(folder, section))

    assert "Int9WeightOnlyConfig" in only_problem(error.value).what


def test_backend_that_is_not_installed_is_told_before_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading needs the package and says how to get it; planning for another machine does not."""
    monkeypatch.setattr("dmconfig.quantization.importlib.util.find_spec", lambda _: None)
    file = spec(folder, "{transformer: quanto}")

    assert plan_from_yaml(file)
    with pytest.raises(BuildError) as error:
        load_from_yaml(file)

    problem = only_problem(error.value)
    assert problem.what == "quantising transformer takes optimum-quanto, which is not installed"
    assert problem.fix == "pip install optimum-quanto"


def test_bitsandbytes_without_an_accelerator_is_refused_by_the_plan(folder: Path) -> None:
    """On a machine without one there is no place: told with the reason, not by the library's own error."""
    with pytest.raises(PlanError) as error:
        plan_from_yaml(spec(folder, "{transformer: bitsandbytes_4bit}", "device_map: balanced"))

    assert "bitsandbytes quantises while weights are moved to an accelerator" in only_problem(error.value).what


def test_b106_components_beside_a_quantised_one_run_with_it(folder: Path) -> None:
    """Only the denoiser is quantised and no placement is given: the others are on an accelerator too."""
    from tests.conftest import inventory

    plan = plan_from_yaml(spec(folder, "{transformer: bitsandbytes_4bit}", ""), inventory=inventory(cuda=[8]))

    assert {each.execution_device for each in plan.assignments} == {"cuda:0"}
