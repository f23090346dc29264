"""Field reports of component identity, sources, reproducibility and security: each by what it shows."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from huggingface_hub import constants
from safetensors.torch import load_file

from dmconfig import DMConfigError, load_from_yaml, plan_from_yaml
from dmconfig.errors import Code, Problem
from tests.conftest import only_problem
from tests.single_files import WEIGHTS, write_checkpoint
from tests.tiny_pipelines import draw, write_tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Stable Diffusion pipeline."""
    return write_tiny("sd", tmp_path_factory.mktemp("reports") / "sd")


@pytest.fixture
def copied(tiny: Path, tmp_path: Path) -> Path:
    """A copy of it, ``./sd`` beside the specs, that a test may change."""
    shutil.copytree(tiny, tmp_path / "sd")
    return tmp_path / "sd"


@pytest.fixture
def spec(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        file = tmp_path / "pipe.yaml"
        file.write_text(f"version: 1\nreserve: 0\n{text}")
        return file

    return write


def refused(file: Path) -> Problem:
    """Return the one problem for which a spec is not loaded."""
    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(file)
    return only_problem(caught.value)


def edit_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


# Component identity and sources


def test_b109_weights_of_another_task_are_refused_by_their_channels(copied: Path, spec: Callable[[str], Path]) -> None:
    """A UNet for inpainting in a text-to-image class, and a plain one where more channels are given."""
    head = "pipeline: {source: ./sd, class: StableDiffusionInstructPix2PixPipeline}\n"
    problem = refused(spec(head))
    assert (problem.code, problem.what) == (
        Code.INCOMPATIBLE_PARTS,
        "'unet' takes 4 channels, and StableDiffusionInstructPix2PixPipeline gives it 8",
    )
    edit_json(copied / "unet" / "config.json", in_channels=9)
    assert refused(spec("pipeline: {source: ./sd}\n")).code is Code.INCOMPATIBLE_PARTS


def test_b110_a_required_component_that_the_index_leaves_empty(copied: Path, spec: Callable[[str], Path]) -> None:
    """It is named, and that it needs a source."""
    edit_json(copied / "model_index.json", vae=[None, None])
    problem = refused(spec("pipeline: {source: ./sd}\n"))
    assert (problem.code, problem.what, problem.fix) == (
        Code.MISSING_COMPONENT,
        "the source has no 'vae', which StableDiffusionPipeline requires",
        "add components.vae with a source",
    )


def test_b111_a_misspelt_component_is_not_loaded_by_default(copied: Path, spec: Callable[[str], Path]) -> None:
    """The nearest name is suggested, at the place of the wrong one."""
    problem = refused(spec("pipeline: {source: ./sd}\ncomponents:\n  unett: {dtype: float16}\n"))
    assert (problem.code, problem.fix) == (Code.UNKNOWN_COMPONENT, "did you mean 'unet'?")
    assert problem.location is not None
    assert problem.location.line == 5


def test_b112_a_single_file_offline_says_what_it_needs(
    copied: Path, tmp_path: Path, spec: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configs and tokenizers that lack are told before anything is loaded; with a folder of them nothing lacks."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    write_checkpoint(copied, tmp_path / "model.safetensors")
    hub_id = "stable-diffusion-v1-5/stable-diffusion-v1-5"
    problem = refused(spec(f"pipeline: {{source: ./model.safetensors, config: {hub_id}}}\n"))
    assert (problem.code, problem.path) == (Code.DOWNLOAD_FAILED, ("pipeline", "config"))
    assert problem.why == "lacking are: model_index.json, tokenizer, scheduler, feature_extractor"
    assert load_from_yaml(spec("pipeline: {source: ./model.safetensors, config: ./sd}\n"))


def test_b113_the_config_of_a_single_file_can_be_given(
    copied: Path, tmp_path: Path, spec: Callable[[str], Path]
) -> None:
    """``config`` is a key of the file, for pipelines and for components."""
    shutil.copy(copied / "unet" / WEIGHTS, tmp_path / "unet.safetensors")
    shutil.copytree(copied / "unet", tmp_path / "my-config")
    (tmp_path / "my-config" / WEIGHTS).unlink()
    text = "components: {unet: {source: ./unet.safetensors, config: ./my-config}}\n"
    pipe = load_from_yaml(spec(f"pipeline: {{source: ./sd}}\n{text}"))
    expected = UNet2DConditionModel.from_pretrained(copied / "unet").state_dict()
    assert all(torch.equal(pipe.unet.state_dict()[name], tensor) for name, tensor in expected.items())


def test_b114_offline_a_pinned_revision_is_named_with_its_repository(
    tmp_path: Path, copied: Path, spec: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the cache at that commit is loaded, every part of it; at another it is missing, with id and commit."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    shutil.copytree(copied, tmp_path / "cache" / "models--dm--sd" / "snapshots" / COMMIT)
    pipe = load_from_yaml(spec(f"pipeline: {{source: dm/sd, revision: '{COMMIT}'}}\n"))
    assert draw(pipe, "sd", 0).shape == (1, 32, 32, 3)
    other = "f" * 40
    problem = refused(spec(f"pipeline: {{source: dm/sd, revision: '{other}'}}\n"))
    assert problem.what.startswith(f"'dm/sd' (revision {other}) is not whole in the local hub cache")


def test_b115_no_component_falls_back_to_a_pickle(copied: Path, spec: Callable[[str], Path]) -> None:
    """Safetensors only reaches every component, encoders of transformers too, and a grant is per source."""
    for name, file in (("text_encoder", "model.safetensors"), ("unet", WEIGHTS)):
        weights = copied / name / file
        pickled = "pytorch_model.bin" if name == "text_encoder" else "diffusion_pytorch_model.bin"
        torch.save(load_file(weights), copied / name / pickled)
        weights.unlink()
    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(spec("pipeline: {source: ./sd}\n"))
    assert [problem.code for problem in caught.value.problems] == [Code.PICKLE_NOT_TRUSTED] * 2
    pipe = load_from_yaml(spec("pipeline: {source: ./sd, dtype: float32, allow_pickle: saved by this test}\n"))
    assert draw(pipe, "sd", 0).shape == (1, 32, 32, 3)


# Reproducibility and security


def test_b159_code_beside_a_pipeline_is_never_run(copied: Path, tmp_path: Path, spec: Callable[[str], Path]) -> None:
    """Neither a pipeline's own code nor that of a component, nor what a tokenizer's config points to."""
    owned = tmp_path / "owned"
    payload = f"import os\nos.mkdir({str(owned)!r})\nclass MyPipeline: pass\nclass MyTokenizer: pass\n"
    for place in ("pipeline.py", "unet/my_unet.py", "tokenizer/mine.py", "sd.py"):
        (copied / place).write_text(payload)
    edit_json(copied / "model_index.json", unet=["my_unet", "MyUNet"])
    assert refused(spec("pipeline: {source: ./sd}\n")).code is Code.CODE_NOT_TRUSTED
    edit_json(copied / "model_index.json", unet=["diffusers", "UNet2DConditionModel"])
    edit_json(copied / "tokenizer" / "tokenizer_config.json", auto_map={"AutoTokenizer": ["mine.MyTokenizer", None]})
    edit_json(copied / "model_index.json", tokenizer=["transformers", "AutoTokenizer"])
    pipe = load_from_yaml(spec("pipeline: {source: ./sd}\n"))  # the library's own class, as the config names it too
    assert type(pipe.tokenizer).__module__.startswith("transformers.")
    for custom in ("./sd", "{source: ./sd}", "{source: ./sd/sd.py}"):
        problem = refused(spec(f"pipeline: {{source: ./sd, custom_pipeline: {custom}}}\n"))
        assert (problem.code, "read " in problem.fix) == (Code.CODE_NOT_TRUSTED, True)
    assert not owned.exists()


def test_b158_an_unpinned_custom_pipeline_is_not_fetched(copied: Path, spec: Callable[[str], Path]) -> None:
    """A name that diffusers looks up at no commit, and a repository at none: refused, trusted or not."""
    trusted = "trust_remote_code: read by this test"
    for source, code in (("lpw_stable_diffusion", Code.CODE_NOT_TRUSTED), ("org/code", Code.MOVING_REVISION)):
        moving = f"allow_moving_revision: {str(source == 'org/code').lower()}"
        problem = refused(
            spec(f"{moving}\npipeline: {{source: ./sd, custom_pipeline: {{source: {source}, {trusted}}}}}\n")
        )
        assert problem.code is code
        assert "may be other code tomorrow" in problem.why


class Payload:
    """What an attacker pickles: unpickling it makes a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("place", ["sd/unet/diffusion_pytorch_model.bin", "unet.ckpt"])
def test_b160_a_pickle_with_other_objects_is_refused_even_where_pickles_are_allowed(
    copied: Path, tmp_path: Path, spec: Callable[[str], Path], place: str
) -> None:
    """Torch's safe loader opens what is granted, so code in it never runs; that it was in there is told."""
    owned = tmp_path / "owned"
    (copied / "unet" / WEIGHTS).unlink()
    weights = {"conv_in.weight": torch.zeros(1), "extra": Payload(owned)}
    torch.save(weights, tmp_path / place, pickle_module=pickle)
    source = "" if place.startswith("sd/") else "source: ./unet.ckpt, "
    text = f"components: {{unet: {{{source}allow_pickle: an old file of ours}}}}\n"
    problem = refused(spec(f"pipeline: {{source: ./sd, dtype: float32}}\n{text}"))
    assert problem.code is Code.COMPONENT_NOT_LOADED
    assert not owned.exists()
    refusal = refused(
        spec(f"pipeline: {{source: ./sd, dtype: float32}}\ncomponents: {{unet: {{{source}dtype: fp32}}}}\n")
    )
    assert refusal.code is Code.PICKLE_NOT_TRUSTED
    assert "convert it to safetensors" in refusal.fix


def test_b161_safetensors_are_taken_where_both_are_there(copied: Path, spec: Callable[[str], Path]) -> None:
    """A pickle beside safetensors is not looked at, granted or not."""
    (copied / "unet" / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Payload(copied / "owned")))
    for grant in ("", ", allow_pickle: old files of ours"):
        assert load_from_yaml(spec(f"pipeline: {{source: ./sd{grant}}}\n"))
    assert not (copied / "owned").exists()


# Dtypes of sources


def test_b98_a_component_from_config_and_weights_has_the_spec_s_dtype(
    copied: Path, tmp_path: Path, spec: Callable[[str], Path]
) -> None:
    """A UNet from a file of its own is in the dtype of the others, not in float32."""
    shutil.copy(copied / "unet" / WEIGHTS, tmp_path / "unet.safetensors")
    text = "pipeline: {source: ./sd, dtype: float16}\ncomponents: {unet: {source: ./unet.safetensors}}\n"
    pipe = load_from_yaml(spec(text))
    assert {part.dtype for part in (pipe.unet, pipe.vae, pipe.text_encoder)} == {torch.float16}
    plan = plan_from_yaml(spec(text))
    assert {each.dtype for each in plan.assignments} == {"float16"}
    assert "cast from float32 to float16 while loading" in plan.notes[0]


def test_b100_a_variant_written_as_a_revision_is_explained(spec: Callable[[str], Path]) -> None:
    """What was a branch in old repositories is a variant today."""
    problem = refused(spec("pipeline: {source: stabilityai/stable-diffusion-2-1, revision: fp16}\n"))
    assert (problem.code, problem.path) == (Code.MOVING_REVISION, ("pipeline", "revision"))
    assert problem.fix == ("write variant: fp16 in its place; components without such files load their plain ones")


def test_variant_missing_error_refuses_where_default_takes_plain_weights(
    copied: Path, spec: Callable[[str], Path]
) -> None:
    """The policy is the file's: told per component, and in the plan where plain weights are taken."""
    shutil.move(copied / "unet" / WEIGHTS, copied / "unet" / WEIGHTS.replace(".safe", ".fp16.safe"))
    plan = plan_from_yaml(spec("pipeline: {source: ./sd, variant: fp16, dtype: float32}\n"))
    assert "vae has no fp16 weights; its plain ones are used" in plan.notes
    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(spec("pipeline: {source: ./sd, variant: fp16, variant_missing: error}\n"))
    names = {problem.what.split("'")[1] for problem in caught.value.problems}
    assert names == {"vae", "text_encoder", "safety_checker"}
    assert {problem.path for problem in caught.value.problems} == {("pipeline", "variant")}
