"""What quantised weights take, by each backend's rule, and what the section may say."""

from __future__ import annotations

from typing import Any

import pytest

from dmconfig.errors import SpecError
from dmconfig.quantization import (
    LinearShape,
    _converts_before_5,
    bitsandbytes_4bit_bytes,
    bitsandbytes_8bit_bytes,
    quanto_bytes,
    torchao_bytes,
)
from dmconfig.spec import QuantizationBackend
from tests.conftest import DIGITS, checked_from, inventory, only_problem, plan_from

DOUBLE = {"bnb_4bit_use_double_quant": True}
INT8 = {"quant_type": "Int8WeightOnlyConfig"}


@pytest.mark.parametrize(
    ("rows", "columns", "kwargs", "nbytes"),
    [
        # data, float32 scales per 64, a table of 16 float32: as bitsandbytes 0.50.2 makes them
        (48, 128, {}, 3072 + 4 * 96 + 64),
        (48, 96, {}, 2304 + 4 * 72 + 64),
        (1024, 1024, {}, 524_288 + 4 * 16_384 + 64),
        # scales in a byte, float32 scales of those per 256, a table of 256 float32, an offset
        (48, 128, DOUBLE, 3072 + 96 + 4 * 1 + 1024 + 4 + 64),
        (1024, 1024, DOUBLE, 524_288 + 16_384 + 4 * 64 + 1024 + 4 + 64),
    ],
)
def test_bitsandbytes_4bit_counts_data_scales_and_tables(
    rows: int, columns: int, kwargs: dict[str, Any], nbytes: int
) -> None:
    """The figures are those of the library's own quantised weights, tensor by tensor."""
    assert bitsandbytes_4bit_bytes(LinearShape(rows, columns, 2), kwargs) == nbytes


def test_bitsandbytes_8bit_counts_data_and_a_scale_per_row() -> None:
    """As Int8Params of bitsandbytes 0.50.2: int8 data, SCB in float32."""
    assert bitsandbytes_8bit_bytes(LinearShape(48, 128, 2), {}) == 48 * 128 + 48 * 4


def test_torchao_counts_what_it_knows_and_no_less_for_the_rest() -> None:
    """int8 keeps a float32 scale and an int8 zero point per row; unknown configurations count as not quantised."""
    shape = LinearShape(48, 128, 2)

    assert torchao_bytes(shape, INT8) == 48 * 128 + 48 * 5
    assert torchao_bytes(shape, {"quant_type": {"class": "Int8WeightOnlyConfig"}}) == 48 * 128 + 48 * 5
    assert torchao_bytes(shape, {"quant_type": "IntxWeightOnlyConfig"}) == 48 * 128 * 2
    grouped = {"quant_type": {"class": "Int8WeightOnlyConfig", "config": {"group_size": 32}}}
    assert torchao_bytes(shape, grouped) == 48 * 128 * 2


def test_quanto_packs_groups_and_pads_the_last() -> None:
    """Below 8 bits, groups of up to 128 columns share a scale and a shift, and are packed several in a byte."""
    assert quanto_bytes(LinearShape(48, 128, 2), {}) == 48 * 128 + 48 * 2 + 2 * 2
    assert quanto_bytes(LinearShape(48, 128, 2), {"weights_dtype": "int4"}) == 24 * 128 + 2 * 48 * 2 + 2 * 2
    assert quanto_bytes(LinearShape(37, 32, 2, True), {"weights": "int4"}) == 19 * 32 + 2 * 37 * 2 + 2 * 4
    assert quanto_bytes(LinearShape(48, 256, 4), {"weights_dtype": "int2"}) == 24 * 128 + 2 * 96 * 4 + 2 * 4


@pytest.mark.parametrize("backend", ["bitsandbytes_4bit", "bitsandbytes_8bit", "torchao", "quanto"])
@pytest.mark.parametrize("offload", ["sequential", "group"])
def test_quantised_weights_are_not_brought_layer_by_layer_or_in_groups(backend: str, offload: str) -> None:
    """Every backend refuses both, before loading, at the word that asks for it."""
    entry = f"{{quant_backend: {backend}, quant_kwargs: {INT8 if backend == 'torchao' else {}}}}"
    place = f"device_map: {{unet: {{execution: 0, offload: {offload}}}, default: 0}}"
    text = f"{DIGITS}quantization: {{unet: {entry}}}\n{place}"

    with pytest.raises(SpecError) as error:
        checked_from(text)

    problem = only_problem(error.value)
    assert problem.path == ("device_map", "unet", "offload")
    assert problem.fix


def test_b102_8bit_and_model_offload_is_refused_with_advice() -> None:
    """8-bit weights cannot go back to the cpu: told with what can, and 4-bit is accepted in its place."""
    text = DIGITS + "quantization: {unet: bitsandbytes_8bit}\nlow_memory: cpu_offload_with_hook\ndevice_map: cuda:0\n"

    with pytest.raises(SpecError) as error:
        checked_from(text)

    problem = only_problem(error.value)
    assert problem.path == ("low_memory",)
    assert "bitsandbytes_4bit" in problem.fix
    assert checked_from(text.replace("8bit", "4bit"))


def test_b104_one_section_serves_both_libraries() -> None:
    """Parts of diffusers and of transformers stand in one section, each held against its own library's class."""
    with pytest.raises(SpecError) as error:
        checked_from(
            DIGITS + "quantization: {unet: {quant_backend: quanto, quant_kwargs: {weights: int8}}, "
            "text_encoder: {quant_backend: quanto, quant_kwargs: {weights_dtype: int8}}}"
        )

    assert [problem.what for problem in error.value.problems] == [
        "QuantoConfig of diffusers takes no 'weights'",
        "QuantoConfig of transformers takes no 'weights_dtype'",
    ]
    assert [problem.fix for problem in error.value.problems] == [
        "did you mean 'weights_dtype'?",
        "did you mean 'weights'?",
    ]
    section = "quantization: {unet: quanto, text_encoder: bitsandbytes_8bit}"
    assert [c.quantization is not None for c in checked_from(DIGITS + section).assembly.modules].count(True) == 2


def test_b105_8bit_weights_on_the_cpu_are_refused() -> None:
    """A map that puts an 8-bit component on the cpu is told at the map."""
    with pytest.raises(SpecError) as error:
        checked_from(DIGITS + "quantization: {unet: bitsandbytes_8bit}\ndevice_map: {unet: cpu, default: 0}")

    problem = only_problem(error.value)
    assert problem.path == ("device_map", "unet")
    assert "accelerator" in problem.what


def test_b105_auto_leaves_8bit_weights_where_they_are_allowed() -> None:
    """Where the file leaves the choice, only places that the backend allows are taken."""
    text = DIGITS + "quantization: {unet: bitsandbytes_8bit}\ndevice_map: auto\nreserve: 0\n"

    plan = plan_from(text, inventory(cuda=[0.002, 0.004]))

    (unet,) = [each for each in plan.assignments if each.component == "unet"]
    assert unet.residency.value == "always"
    assert unet.execution_device != "cpu"


@pytest.mark.parametrize(
    ("backend", "name", "is_converted"),
    [
        ("bitsandbytes_4bit", "block.0.wo", False),
        ("bitsandbytes_4bit", "block.0.wo_2", True),
        ("bitsandbytes_8bit", "lm_head", False),
        ("bitsandbytes_8bit", "wo.inner", False),
        ("torchao", "block.0.wo.weight", False),
        ("torchao", "block.0.two.weight", False),  # its rule looks for "wo." anywhere
        ("torchao", "block.0.wi.weight", True),
        ("quanto", "block.0.wo_2", False),  # and quanto's for "wo"
        ("quanto", "block.0.wi", True),
    ],
)
def test_transformers_before_5_converts_by_a_rule_of_each_backend(
    backend: QuantizationBackend, name: str, is_converted: bool
) -> None:
    """What transformers 4.57 leaves alone of a component that keeps ``wo`` and ``lm_head``."""
    assert _converts_before_5(backend, name, ["wo", "lm_head"]) is is_converted
