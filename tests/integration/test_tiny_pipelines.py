"""The tiny pipelines are what they say, and ``load_from_yaml`` gives on the cpu what diffusers gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from dmconfig import load_from_yaml, plan_from_yaml
from tests.tiny_pipelines import CALLS, CLASSES, KINDS, class_override, draw, kind_of, write_spec, write_tiny

DTYPES = ("float32", "float16", "bfloat16")
UNUSED = frozenset({"safety_checker"})
"""Components that look at a picture and, with thresholds that are never reached, leave it as it is."""

KEPT_IN_FLOAT32 = [
    ("flux", "text_encoder_2", "float16"),
    ("sd3", "text_encoder_3", "float16"),
    ("wan", "text_encoder", "float16"),
    ("wan", "transformer", "float16"),
    ("wan", "transformer", "bfloat16"),
    ("wan22", "transformer_2", "bfloat16"),
]
"""Kind, component and dtype of loads in which some tensors stay float32: T5's ``wo``, norms of Wan's transformer."""


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A spec per kind, each beside its pipeline's folder."""
    folder = tmp_path_factory.mktemp("tiny")
    return {kind: write_spec(kind, folder) for kind in KINDS}


def source_of(spec: Path) -> Path:
    """Return the folder of a spec's pipeline."""
    return spec.with_suffix("")


def plain(spec: Path, call: str, **options: Any) -> Any:
    """Return the pipeline of a call as diffusers loads it."""
    cls = getattr(diffusers, CLASSES[call]) if call in CLASSES else DiffusionPipeline
    return cls.from_pretrained(source_of(spec), **options)


def modules_of(pipe: Any) -> dict[str, torch.nn.Module]:
    """Return the components that have weights, by name."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def stored_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of a module's parameters and stored buffers, tied ones once."""
    tensors = {tensor.data_ptr(): tensor for tensor in module.state_dict().values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def test_writing_twice_gives_the_same_files(specs: dict[str, Path], tmp_path: Path) -> None:
    """Every file of a kind, weights and configs alike, is the same in a second folder, and small."""
    for kind in KINDS:
        first, second = source_of(specs[kind]), write_tiny(kind, tmp_path / kind)
        names = sorted(file.relative_to(first) for file in first.rglob("*") if file.is_file())
        assert names == sorted(file.relative_to(second) for file in second.rglob("*") if file.is_file())
        different = [str(name) for name in names if (first / name).read_bytes() != (second / name).read_bytes()]
        assert not different
        assert sum((first / name).stat().st_size for name in names) < 3 * 2**20


@pytest.mark.parametrize("call", CALLS)
def test_on_the_cpu_the_picture_is_the_one_of_diffusers(call: str, specs: dict[str, Path]) -> None:
    """A plain pipeline draws something finite and not flat, and the one of a spec draws the same bits."""
    spec = specs[kind_of(call)]
    expected = draw(plain(spec, call), call, 0)
    assert np.isfinite(expected).all()
    assert expected.std() > 0.05

    pipe = load_from_yaml(spec, {"device_map": "cpu", **class_override(call)})

    assert np.array_equal(draw(pipe, call, 0), expected)
    assert not np.array_equal(draw(pipe, call, 1), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_every_component_takes_part_in_the_picture(kind: str, specs: dict[str, Path]) -> None:
    """Weights of any one component that are a little different give another picture."""
    pipe = plain(specs[kind], kind)
    expected = draw(pipe, kind, 0)

    for name, module in modules_of(pipe).items():
        before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.05)
        assert np.array_equal(draw(pipe, kind, 0), expected) == (name in UNUSED), name
        module.load_state_dict(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_diffusers_and_as_many_bytes_as_planned(
    kind: str, dtype: str, specs: dict[str, Path]
) -> None:
    """At every dtype each tensor has the dtype and values that diffusers loads, and the plan knew the bytes."""
    overrides = {"device_map": "cpu", "pipeline.dtype": dtype}
    expected = modules_of(plain(specs[kind], kind, dtype=getattr(torch, dtype)))

    plan, loaded = plan_from_yaml(specs[kind], overrides), modules_of(load_from_yaml(specs[kind], overrides))

    assert loaded.keys() == expected.keys() == plan.device_map.keys()
    assert {a.component: a.nbytes for a in plan.assignments} == {n: stored_bytes(m) for n, m in loaded.items()}
    for name, module in loaded.items():
        tensors, reference = module.state_dict(), expected[name].state_dict()
        assert tensors.keys() == reference.keys()
        different = [
            key
            for key, tensor in tensors.items()
            if tensor.dtype != reference[key].dtype or not torch.equal(tensor, reference[key])
        ]
        assert not different, name


@pytest.mark.parametrize(("kind", "component", "dtype"), KEPT_IN_FLOAT32)
def test_the_matrix_has_tensors_that_stay_float32(
    kind: str, component: str, dtype: str, specs: dict[str, Path]
) -> None:
    """The planned bytes above are those of mixed components, not of ones that are wholly in the dtype asked for."""
    pipe = load_from_yaml(specs[kind], {"device_map": "cpu", "pipeline.dtype": dtype})

    dtypes = {parameter.dtype for parameter in getattr(pipe, component).parameters()}

    assert dtypes == {torch.float32, getattr(torch, dtype)}


@pytest.mark.parametrize("kind", ["sdxl", "flux", "wan"])
def test_weights_stored_in_half_precision_keep_it(kind: str, tmp_path: Path) -> None:
    """Without a dtype in the file each component is loaded as it is stored, in as many bytes as planned."""
    spec = write_spec(kind, tmp_path)
    write_tiny(kind, source_of(spec), dtype="bfloat16")

    plan, pipe = plan_from_yaml(spec, {"device_map": "cpu"}), load_from_yaml(spec, {"device_map": "cpu"})

    assert {assignment.dtype for assignment in plan.assignments} == {"bfloat16"}
    assert {a.component: a.nbytes for a in plan.assignments} == {
        n: stored_bytes(m) for n, m in modules_of(pipe).items()
    }
