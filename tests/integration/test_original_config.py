"""Single files with the config of the model's authors: made, planned, rehearsed and loaded as diffusers makes it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel
from huggingface_hub import constants
from safetensors.torch import load_file

import dmconfig
from dmconfig import DMConfigError, load_from_yaml, plan_from_yaml
from dmconfig.checked import check_file
from dmconfig.errors import Code, Problem
from dmconfig.footprint import bits_of
from dmconfig.load import plan_for
from dmconfig.pinning import pin
from dmconfig.rehearse import Script, Settings, rehearse
from dmconfig.units import MIB
from tests.conftest import assignment, inventory, only_problem
from tests.loopback_hub import Hub
from tests.single_files import write_checkpoint
from tests.tiny_pipelines import draw, write_tiny
from tests.virtual_devices import MakeMachine

CHANNELS = (32, 64)  # as many as the 32 groups of norms, of which such a config says nothing, can share
UNET: dict[str, Any] = {
    "in_channels": 4, "out_channels": 4, "model_channels": 32, "attention_resolutions": [1], "num_res_blocks": 1,
    "channel_mult": [1, 2], "num_heads": 2, "transformer_depth": 1, "context_dim": 32,
}  # fmt: skip
VAE: dict[str, Any] = {"ch": 32, "ch_mult": [1, 2], "in_channels": 3, "out_ch": 3, "z_channels": 4, "num_res_blocks": 1}
ORIGINAL: dict[str, Any] = {
    "model": {
        "params": {
            "scale_factor": 0.18215,
            "unet_config": {"params": UNET},
            "first_stage_config": {"params": {"ddconfig": VAE}},
        }
    }
}


FROM_FOLDER = "pipeline: {source: ./sd}\ncomponents: {"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline as a folder, as one file, and the config of its authors; and a folder with other configs."""
    folder = tmp_path_factory.mktemp("original-config")
    shutil.copytree(write_tiny("sd", folder / "sd"), folder / "other")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        UNet2DConditionModel(
            sample_size=16, block_out_channels=CHANNELS, layers_per_block=1, cross_attention_dim=32,
            attention_head_dim=2, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ).save_pretrained(folder / "sd" / "unet")  # fmt: skip
        AutoencoderKL(
            block_out_channels=CHANNELS, layers_per_block=1, latent_channels=4, sample_size=512,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        ).save_pretrained(folder / "sd" / "vae")  # fmt: skip
    write_checkpoint(folder / "sd", folder / "model.safetensors")
    (folder / "v1.yaml").write_text(yaml.safe_dump(ORIGINAL))
    return folder


@pytest.fixture
def spec(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Write a spec beside links to what is made."""
    for each in made.iterdir():
        (tmp_path / each.name).symlink_to(each)

    def write(text: str) -> Path:
        file = tmp_path / "pipe.yaml"
        file.write_text(f"version: 1\nreserve: 0\n{text}")
        return file

    return write


def problem_of(file: Path) -> Problem:
    """Return the one problem for which a spec is neither planned nor loaded."""
    for verb in (plan_from_yaml, load_from_yaml):
        with pytest.raises(DMConfigError) as caught:
            verb(file)
    return only_problem(caught.value)


def test_a_file_of_a_pipeline_has_the_config_of_its_authors(
    made: Path, spec: Callable[[str], Path], virtual_machine: MakeMachine
) -> None:
    """Its UNet and VAE draw as from their folder and are as diffusers makes them, split over two devices too."""
    text = "pipeline: {source: ./model.safetensors, config: ./other, original_config: ./v1.yaml}\n"
    expected = draw(load_from_yaml(spec("pipeline: {source: ./sd}\n")), "sd", 0)
    plan = plan_from_yaml(spec(text))
    pipe = load_from_yaml(spec(text))
    for name, cls in (("unet", UNet2DConditionModel), ("vae", AutoencoderKL)):
        by_hand = cls.from_single_file(made / "model.safetensors", original_config=str(made / "v1.yaml"))
        part = getattr(pipe, name)
        assert dict(part.config) == dict(by_hand.config)
        assert all(torch.equal(tensor, by_hand.state_dict()[key]) for key, tensor in part.state_dict().items())
        nbytes = sum(tensor.numel() for tensor in part.state_dict().values()) * bits_of("float32") // 8
        assert assignment(plan, name).nbytes == nbytes
    assert np.array_equal(draw(pipe, "sd", 0), expected)
    virtual_machine(2, 64 * MIB)
    placed = load_from_yaml(
        spec(f"{text}device_map: {{unet: {{execution: ['cuda:0', 'cuda:1']}}, default: 'cuda:0'}}\n")
    )
    assert np.array_equal(draw(placed, "sd", 0), expected)
    dmconfig.unload(placed)


def test_a_component_has_the_config_of_its_authors(made: Path, spec: Callable[[str], Path]) -> None:
    """Of a file of its own, or of a pipeline's, whatever the pipeline's own config of it is; rehearsed too."""
    text = (
        "pipeline: {source: ./other}\ncomponents:\n"
        "  unet: {source: ./model.safetensors, original_config: ./v1.yaml}\n"
        "call: {prompt: a red fox, height: 32, width: 32, num_inference_steps: 2}\n"
    )
    pipe = load_from_yaml(spec(text))
    assert pipe.unet.config.block_out_channels == list(CHANNELS)
    checked, machine = check_file(spec(text)), inventory([1])
    script = Script(resolved=checked.resolved, spec=checked.spec, assembly=checked.assembly)
    assert rehearse(script, plan_for(checked, machine), machine, Settings()).failure is None


def test_an_old_pickle_with_the_config_of_its_authors_is_loaded(
    made: Path, tmp_path: Path, spec: Callable[[str], Path]
) -> None:
    """As models were published once: the size of the plan is that of the config, for the pickle is not looked into."""
    torch.save({"state_dict": load_file(made / "model.safetensors")}, tmp_path / "old.ckpt")
    unet = "source: ./old.ckpt, original_config: ./v1.yaml, allow_pickle: saved by this test, dtype: float32"
    file = spec(f"pipeline: {{source: ./other}}\ncomponents: {{unet: {{{unet}}}}}\n")
    loaded = load_from_yaml(file).unet
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in loaded.state_dict().values())
    assert assignment(plan_from_yaml(file), "unet").nbytes == nbytes
    expected = UNet2DConditionModel.from_pretrained(made / "sd" / "unet").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize(
    ("text", "code", "what"),
    [
        ("pipeline: {source: ./sd, original_config: ./v1.yaml}", Code.BAD_ORIGINAL_CONFIG, "this source is none"),
        (
            f"{FROM_FOLDER}text_encoder: {{source: ./model.safetensors, original_config: ./v1.yaml}}}}",
            Code.BAD_ORIGINAL_CONFIG,
            "CLIPTextModel takes no original_config",
        ),
        (
            f"{FROM_FOLDER}unet: {{source: ./model.safetensors, config: ./sd, original_config: ./v1.yaml}}}}",
            Code.CONTRADICTION,
            "named twice",
        ),
        (
            f"{FROM_FOLDER}unet: {{source: ./model.safetensors, original_config: 'https://example.org/v1.yaml'}}}}",
            Code.BAD_ORIGINAL_CONFIG,
            "neither a YAML file beside this one nor one on the hub",
        ),
        (
            "pipeline: {source: ./sd}\ncomponents: {unet: {source: ./model.safetensors, original_config: ./v2.yaml}}",
            Code.SOURCE_NOT_FOUND,
            "there is no YAML file",
        ),
        ("pipeline: {source: ./sd, original_config_revision: main}", Code.CONTRADICTION, "which is not given"),
    ],
)
def test_an_original_config_where_none_is_taken_is_refused(
    text: str, code: Code, what: str, spec: Callable[[str], Path]
) -> None:
    """With what is taken there instead."""
    problem = problem_of(spec(f"{text}\n"))
    assert (problem.code, what in problem.what) == (code, True)
    assert problem.path[-1] in ("original_config", "original_config_revision")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("- a\n", "holds no mapping"),
        ("a: [\n", "cannot be read as YAML"),
        ("a: &a [1]\nb: *a\n", "has aliases"),
        ("[" * 5000, "cannot be read as YAML"),
        ("# " + "x" * (1 << 16), "is larger than 64 KiB"),
        ("a: !!python/object/apply:os.mkdir [owned]\n", "cannot be read as YAML"),
        ("model: {params: {unet_config: 1}}\n", "has no model.params.unet_config.params"),
        (
            yaml.safe_dump({"model": {"params": {"unet_config": {"params": UNET}}}}),
            "has no model.params.first_stage_config.params.ddconfig",
        ),
    ],
)
def test_an_original_config_that_is_none_is_refused(
    text: str, what: str, tmp_path: Path, spec: Callable[[str], Path]
) -> None:
    """Bounded, no more than YAML, and with what diffusers reads of it without asking."""
    file = spec(
        "pipeline: {source: ./sd}\ncomponents: {unet: {source: ./model.safetensors, original_config: ./mine.yaml}}\n"
    )
    (tmp_path / "mine.yaml").write_text(text)
    problem = problem_of(file)
    assert (problem.code, what in problem.what) == (Code.BAD_ORIGINAL_CONFIG, True)


def test_a_config_that_diffusers_makes_no_model_of_is_told_with_its_place(
    tmp_path: Path, spec: Callable[[str], Path]
) -> None:
    """What diffusers stumbles on inside of it."""
    file = spec(
        "pipeline: {source: ./sd}\ncomponents: {unet: {source: ./model.safetensors, original_config: ./mine.yaml}}\n"
    )
    lame = json.loads(json.dumps(ORIGINAL))
    del lame["model"]["params"]["unet_config"]["params"]["channel_mult"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(lame))
    problem = problem_of(file)
    assert (problem.code, problem.why) == (Code.SIZES_UNKNOWN, "KeyError: 'channel_mult'")


def test_a_controlnet_s_original_config_still_fails_in_diffusers(made: Path) -> None:
    """It is refused here because of that; where this fails, it can be taken."""
    params = {**ORIGINAL["model"]["params"], "control_stage_config": {"params": {**UNET, "hint_channels": 3}}}
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'checkpoint'"):
        ControlNetModel.from_single_file(made / "model.safetensors", original_config={"model": {"params": params}})


def test_an_original_config_of_the_hub_is_pinned_fetched_and_kept(
    hub: Hub, made: Path, spec: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file of its repository; offline, what is not here is told, and nothing is asked."""
    commit = hub.add("dm/configs", None, {"v1.yaml": (made / "v1.yaml").read_bytes(), "v2.yaml": b""}).commit
    file = spec(
        "pipeline: {source: ./sd}\ncomponents:\n  unet:\n    source: ./model.safetensors\n"
        "    original_config: dm/configs/v1.yaml\n"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    problem = problem_of_loading(file)
    assert (problem.code, problem.path) == (Code.DOWNLOAD_FAILED, ("components", "unet", "original_config"))
    assert hub.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    pin(file).write()
    assert f"original_config_revision: {commit}" in file.read_text()
    assert load_from_yaml(file).unet.config.block_out_channels == list(CHANNELS)
    assert hub.downloaded("dm/configs") == ["v1.yaml"]
    hub.requests.clear()
    load_from_yaml(file)
    assert hub.requests == []


def problem_of_loading(file: Path) -> Problem:
    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(file)
    return only_problem(caught.value)
