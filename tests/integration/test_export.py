"""A spec from a live pipeline: loaded back, it gives the same components in the same places, and the same pictures."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, EulerDiscreteScheduler, StableDiffusionImg2ImgPipeline

import dmconfig
from dmconfig import DMConfigError, load_from_yaml, to_spec
from dmconfig.checked import check_file, resolve_file
from dmconfig.devices import parse_device
from dmconfig.dispatch import placement_of
from dmconfig.plan import Assignment, Residency
from dmconfig.spec import validate_spec
from dmconfig.units import KIB
from tests.integration.test_placements import DIGITS, PIPELINE, PLACEMENTS, draw, load
from tests.tiny_pipelines import KINDS, write_spec, write_tiny
from tests.virtual_devices import MakeMachine


def placed(pipe: Any) -> dict[str, Any]:
    """Everything a placement says of where components are: devices, how they are brought, parts, dtypes, groups."""
    placement = placement_of(pipe)
    assert placement is not None
    return _placed(str(placement.home), placement.plan.assignments, dict(placement.group_options))


def _placed(home: str, assignments: Sequence[Assignment], group_options: dict[str, Any]) -> dict[str, Any]:
    in_groups = any(assignment.residency is Residency.PER_GROUP for assignment in assignments)
    return {
        "home": home,
        "groups": group_options if in_groups else {},
        "components": {
            a.component: (
                a.class_name, a.dtype, a.execution_device, a.storage_device, a.residency,
                [(p.path, p.execution_device, p.storage_device, p.residency) for p in a.parts],
            )
            for a in assignments
        },
    }  # fmt: skip


def planned_again(pipe: Any, file: Path) -> dict[str, Any]:
    """Export a pipeline to a file, and return what is planned for it on the same machine."""
    file.write_text(to_spec(pipe, file.parent).text(), encoding="utf-8")
    plan = dmconfig.plan_from_yaml(file)
    spec = validate_spec(resolve_file(file))
    return _placed(plan.execution_device, plan.assignments, spec.group_offload.model_dump())


def checked_call(file: Path) -> Mapping[str, Any]:
    """What a file says of the pipeline's call, its variables replaced."""
    return validate_spec(resolve_file(file)).call


def reloaded(pipe: Any, file: Path) -> Any:
    """Export a pipeline to a file, and load that."""
    export = to_spec(pipe, file.parent)
    file.write_text(export.text(), encoding="utf-8")
    return load_from_yaml(file)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_placement_of_ours_comes_back(name: str, virtual_machine: MakeMachine, tmp_path: Path) -> None:
    """Whatever the file said, and whoever chose, the exported file says where everything is."""
    virtual_machine()
    pipe = load(PLACEMENTS[name])
    assert to_spec(pipe).unknown == ()
    assert planned_again(pipe, tmp_path / "again.yaml") == placed(pipe)


def test_placement_of_ours_is_loaded_back_as_it_is_planned(virtual_machine: MakeMachine, tmp_path: Path) -> None:
    """The whole way round once: one component stays, one is brought by layer, one computes on the cpu."""
    virtual_machine()
    pipe = load(PLACEMENTS["one of each kind"])
    again = reloaded(pipe, tmp_path / "again.yaml")
    assert placed(again) == placed(pipe)
    assert np.array_equal(draw(again, 0), draw(pipe, 0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tiny_pipelines_come_back(kind: str, virtual_machine: MakeMachine, tmp_path: Path) -> None:
    """Every kind of pipeline, spread over two devices with one component brought by layer."""
    virtual_machine()
    file = write_spec(kind, tmp_path)
    modules = [a.component for a in dmconfig.plan_from_yaml(file).assignments]
    last = {modules[-1]: {"execution": "cuda:1", "offload": "sequential"}}
    pipe = load_from_yaml(file, {"device_map": {**last, "default": "balanced"}})
    assert to_spec(pipe).unknown == ()
    assert planned_again(pipe, tmp_path / "again.yaml") == placed(pipe)
    assembly = check_file(tmp_path / "again.yaml").assembly
    live = {name: type(part).__name__ for name, part in pipe.components.items() if part is not None}
    assert {part.name for part in assembly.components} == live.keys()
    assert {part.name: part.class_name for part in assembly.modules} == {
        name: live[name] for name in live if isinstance(pipe.components[name], torch.nn.Module)
    }


def test_split_component_comes_back(virtual_machine: MakeMachine, tmp_path: Path) -> None:
    """Parts are named one by one."""
    virtual_machine()
    parts = {"unet.up_blocks": "cuda:1", "unet.mid_block": {"execution": "cuda:0", "offload": "sequential"}}
    pipe = load({"device_map": {"unet": "cuda:0", **parts, "default": "cuda:1"}})
    assert planned_again(pipe, tmp_path / "again.yaml") == placed(pipe)


def test_dtypes_sources_and_what_the_file_says_of_calls_come_back(
    virtual_machine: MakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A component from elsewhere, one in another dtype, the call's defaults, and a secret as its variable."""
    virtual_machine()
    monkeypatch.setenv("MY_TOKEN", "hunter2-secret")
    shutil.copytree(write_tiny("wan", tmp_path / "wan") / "vae", tmp_path / "models" / "vae")
    file = tmp_path / "pipe.yaml"
    file.write_text(
        "version: 1\npipeline: {source: ./wan, dtype: float16}\nreserve: 1MiB\nmax_memory: {0: 90%, 1: 90%}\n"
        "components: {vae: {source: ./models/vae, dtype: float32}}\n"
        'call: {num_inference_steps: 3, seed: 5, negative_prompt: "${MY_TOKEN}"}\n',
        encoding="utf-8",
    )
    pipe = load_from_yaml(file)
    export = to_spec(pipe, tmp_path)
    assert export.data["components"] == {"vae": {"source": "./models/vae", "dtype": "float32"}}
    assert export.data["pipeline"]["dtype"] == "float16"
    assert "hunter2" not in export.text()
    again = reloaded(pipe, tmp_path / "again.yaml")
    assert placed(again) == placed(pipe)
    assert checked_call(tmp_path / "again.yaml") == checked_call(file)
    assert {key: export.data[key] for key in ("reserve", "max_memory")} == {
        "reserve": "1MiB", "max_memory": {"0": "90%", "1": "90%"},
    }  # fmt: skip


def test_what_was_changed_since_loading_is_what_is_exported(virtual_machine: MakeMachine, tmp_path: Path) -> None:
    """A scheduler put in, a component swapped: the file is that of the pipeline now."""
    virtual_machine()
    pipe = load(PLACEMENTS["explicit"])
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config, timestep_spacing="trailing")
    shutil.copytree(PIPELINE / "vae", tmp_path / "other")
    dmconfig.swap(pipe, "vae", type(pipe.vae).from_pretrained(tmp_path / "other"))
    export = to_spec(pipe, tmp_path)
    assert export.data["components"] == {
        "vae": {"source": "./other"},
        "scheduler": {"class": "EulerDiscreteScheduler", "config": {"timestep_spacing": "trailing"}},
    }
    again = reloaded(pipe, tmp_path / "again.yaml")
    assert placed(again) == placed(pipe)
    settings = [{k: v for k, v in each.scheduler.config.items() if k[0] != "_"} for each in (again, pipe)]
    assert settings[0] == settings[1]
    assert np.array_equal(draw(again, 0), draw(pipe, 0))


def test_a_pipeline_of_ours_that_was_moved_is_exported_where_it_is(
    virtual_machine: MakeMachine, tmp_path: Path
) -> None:
    """Once released, the tensors tell."""
    virtual_machine()
    pipe = load(PLACEMENTS["explicit"])
    pipe.to("cuda:1")
    assert to_spec(pipe).data["device_map"] == "cuda:1"


# ---------------------------------------------------------------- made by hand with diffusers


def by_hand(**more: Any) -> Any:
    pipe = DiffusionPipeline.from_pretrained(PIPELINE, **more)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _whole() -> Any:
    pipe = by_hand()
    pipe.enable_model_cpu_offload(gpu_id=1)
    return pipe


def _by_leaf() -> Any:
    pipe = by_hand()
    pipe.enable_sequential_cpu_offload()
    return pipe


def _in_groups() -> Any:
    pipe = by_hand()
    pipe.unet.enable_group_offload(
        onload_device=torch.device("cuda:1"), offload_type="block_level", num_blocks_per_group=2
    )
    pipe.vae.to("cuda:0")
    pipe.text_encoder.to("cuda:0")
    return pipe


def _apart() -> Any:
    pipe = by_hand()
    pipe.unet.to("cuda:1")
    return pipe


WHOLE = {"execution": "cuda:1", "offload": "model"}
LEAF = {"execution": "cuda:0", "offload": "sequential"}
HAND_MADE: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "on the cpu": (by_hand, {"device_map": "cpu"}),
    "on one device": (lambda: by_hand().to("cuda:1"), {"device_map": "cuda:1"}),
    "in half precision": (
        lambda: by_hand(dtype=torch.float16).to("cuda"),
        {"device_map": "cuda:0", "pipeline": {"source": str(PIPELINE), "dtype": "float16"}},
    ),
    "brought whole": (_whole, {"device_map": dict.fromkeys(("vae", "text_encoder", "unet"), WHOLE)}),
    "brought by layer": (_by_leaf, {"device_map": dict.fromkeys(("vae", "text_encoder", "unet"), LEAF)}),
    "in groups": (
        _in_groups,
        {
            "device_map": {
                "vae": "cuda:0", "text_encoder": "cuda:0", "unet": {"execution": "cuda:1", "offload": "group"},
            },
            "group_offload": {"offload_type": "block_level", "num_blocks_per_group": 2},
        },
    ),
    "apart": (
        _apart,
        {"device_map": {"vae": "cpu", "text_encoder": "cpu", "unet": "cuda:1"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HAND_MADE)
def test_placement_made_by_hand_is_seen_and_loads(name: str, virtual_machine: MakeMachine, tmp_path: Path) -> None:
    """What diffusers has done is read off its hooks and tensors; loaded back by us, it is so again."""
    virtual_machine()
    make, expected = HAND_MADE[name]
    pipe = make()
    export = to_spec(pipe)
    assert export.unknown == ()
    assert dict(export.data) == {
        "version": 1, "pipeline": {"source": str(PIPELINE), "dtype": "float32"}, "reserve": 0, **expected,
    }  # fmt: skip
    again = planned_again(pipe, tmp_path / "again.yaml")
    assert again["home"] == parse_device(str(pipe._execution_device))


def test_a_map_of_diffusers_own_is_seen_and_loads(virtual_machine: MakeMachine, tmp_path: Path) -> None:
    """``device_map="balanced"`` of diffusers: its map is the expectation; loaded by us it draws the same."""
    virtual_machine()
    pipe = by_hand(device_map="balanced", max_memory={0: 3400 * KIB, 1: 3400 * KIB})
    assert {0, 1} <= {*pipe.hf_device_map.values()}
    export = to_spec(pipe)
    assert export.data["device_map"] == {name: f"cuda:{index}" for name, index in pipe.hf_device_map.items()}
    again = reloaded(pipe, tmp_path / "again.yaml")
    assert to_spec(again).data["device_map"] == export.data["device_map"]
    assert np.array_equal(draw(again, 0), draw(pipe, 0))


def test_what_cannot_be_known_is_said_and_has_to_be_told(virtual_machine: MakeMachine, tmp_path: Path) -> None:
    """A component made from nothing has no source: the file does not load until somebody says where it is."""
    virtual_machine()
    pipe = by_hand()
    config = {name: value for name, value in pipe.unet.config.items() if not name.startswith("_")}
    pipe.unet = type(pipe.unet)(**config)
    export = to_spec(pipe)
    assert export.unknown == ("where unet (UNet2DConditionModel) came from",)
    assert export.text().startswith("# not known: where unet (UNet2DConditionModel) came from\nversion: 1\n")
    file = tmp_path / "again.yaml"
    file.write_text(export.text(), encoding="utf-8")
    with pytest.raises(DMConfigError, match="the variable UNET_SOURCE is not set\n  why  where unet came from is not"):
        load_from_yaml(file)
    pipe.unet.save_pretrained(tmp_path / "unet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNET_SOURCE", str(tmp_path / "unet"))
        again = load_from_yaml(file)
    assert np.array_equal(draw(again, 0), draw(pipe, 0))


def test_a_component_on_two_devices_is_said_to_be_unknown(virtual_machine: MakeMachine) -> None:
    """Without a map on it, nothing tells which part goes with which device."""
    virtual_machine()
    pipe = by_hand()
    pipe.unet.mid_block.to("cuda:1")
    export = to_spec(pipe)
    assert export.unknown == ("where unet is: its tensors are on cpu, cuda:1",)
    assert 'unet: "${UNET_DEVICE:?the device of unet is not known}"' in export.text()


def test_a_pipeline_of_another_class_names_it(virtual_machine: MakeMachine, tmp_path: Path) -> None:
    """The class of the source's index is not always the class in use."""
    virtual_machine()
    pipe = StableDiffusionImg2ImgPipeline.from_pretrained(PIPELINE)
    assert to_spec(pipe, tmp_path).data["pipeline"]["class"] == "StableDiffusionImg2ImgPipeline"
    assert planned_again(pipe, tmp_path / "again.yaml")["home"] == "cpu"
    ours = load(PLACEMENTS["explicit"])
    derived = dmconfig.derive(ours, StableDiffusionImg2ImgPipeline)
    assert to_spec(derived).data["pipeline"]["class"] == "StableDiffusionImg2ImgPipeline"
    assert to_spec(derived).data["device_map"] == to_spec(ours).data["device_map"]


def test_pipelines_that_share_components_come_back_together_or_one_by_one(
    virtual_machine: MakeMachine, tmp_path: Path
) -> None:
    """The first has the others with it; another is exported by itself, with the arguments that hold for it."""
    virtual_machine()
    file = tmp_path / "pipe.yaml"
    file.write_text(
        f"version: 1\npipeline: {{source: {PIPELINE}}}\nreserve: 0\n"
        "pipelines: {edit: {class: StableDiffusionImg2ImgPipeline, call: {strength: 0.5}}}\n"
        "call: {num_inference_steps: 7, height: 32}\n",
        encoding="utf-8",
    )
    first, edit = dmconfig.load_pipelines(file).values()
    export = to_spec(first, tmp_path)
    assert export.data["pipelines"] == {"edit": {"class": "StableDiffusionImg2ImgPipeline", "call": {"strength": 0.5}}}
    assert planned_again(first, tmp_path / "again.yaml") == placed(first)
    alone = to_spec(edit)
    assert alone.data["pipeline"]["class"] == "StableDiffusionImg2ImgPipeline"
    assert alone.data["call"] == {"num_inference_steps": 7, "strength": 0.5}
    assert "pipelines" not in alone.data


def test_a_pipeline_of_the_hub_is_exported_by_its_id_and_commit(
    virtual_machine: MakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot in the local cache names its repository and commit."""
    virtual_machine()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--me--digits"
    shutil.copytree(PIPELINE, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    pipe = DiffusionPipeline.from_pretrained(repository / "snapshots" / commit, variant=None)
    export = to_spec(pipe)
    assert export.data["pipeline"] == {"source": "me/digits", "revision": commit, "dtype": "float32"}
    assert export.unknown == ()
    assert planned_again(pipe, tmp_path / "again.yaml")["home"] == "cpu"


def test_to_spec_is_plain_data_too(virtual_machine: MakeMachine) -> None:
    """For tools: the same as JSON data."""
    virtual_machine()
    export = to_spec(load(PLACEMENTS["explicit"]))
    assert export.plain()["device_map"] == {"vae": "cuda:1", "text_encoder": "cuda:1", "unet": "cuda:0"}
    assert str(export) == export.text()
    assert str(DIGITS.parent) in export.plain()["pipeline"]["source"]
