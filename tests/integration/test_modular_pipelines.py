"""Modular pipelines: planned without importing them, loaded, placed, called, rehearsed and written back as any other.

The reference is ``ModularPipeline.from_pretrained`` of diffusers on the cpu, its weights copied as a move does.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ComponentSpec, ModularPipeline
from diffusers.guiders import PerturbedAttentionGuidance

import dmconfig
from dmconfig.checked import check_file
from dmconfig.dispatch import dispatch, placement_of
from dmconfig.errors import Code, DispatchError, SourceError, SpecError
from dmconfig.load import plan_for
from dmconfig.output import save
from dmconfig.rehearse import rehearse
from dmconfig.rehearse.script import Script, Settings
from dmconfig.starter import starter
from tests.conftest import inventory, only_problem
from tests.loopback_hub import Hub
from tests.tiny_pipelines import LENGTH, PROMPT, SIZE, Tiny, copy_weights, modules_in
from tests.virtual_devices import MakeMachine

SMALL: Mapping[str, Any] = {"num_inference_steps": 2, "height": SIZE, "width": SIZE, "output_type": "np"}
CALLS: Mapping[str, Mapping[str, Any]] = {
    "sdxl": SMALL,
    "flux": {**SMALL, "max_sequence_length": LENGTH},
    "sd3": {**SMALL, "max_sequence_length": LENGTH},
    "ltx": {**SMALL, "max_sequence_length": LENGTH, "num_frames": 9},
}
CLASSES = {
    "sdxl": "StableDiffusionXLModularPipeline",
    "flux": "FluxModularPipeline",
    "sd3": "StableDiffusion3ModularPipeline",
    "ltx": "LTXModularPipeline",
}
WAYS = {
    "two devices": "device_map: {default: cuda:1, vae: cuda:0}",
    "model": "device_map: cuda:1\nlow_memory: cpu_offload_with_hook",
    "sequential": "device_map: cuda:1\nlow_memory: sequential_cpu_offload",
    "group": "device_map: cuda:1\nlow_memory: group_offload",
}
QUICK = [("sdxl", way) for way in WAYS] + [("flux", "two devices"), ("sd3", "model"), ("ltx", "two devices")]


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    """All pictures are made by one thread, so that they are the same bit for bit."""


class Modular:
    """Folders as ``ModularPipeline.save_pretrained`` writes them, and what diffusers makes of them."""

    def __init__(self, tiny: Tiny, root: Path) -> None:
        self.tiny, self.root = tiny, root
        self._pictures: dict[str, np.ndarray] = {}

    def folder(self, kind: str) -> Path:
        """The folder of a kind."""
        folder = self.root / kind
        if not folder.exists():
            pipe = self._loaded(self.tiny.spec(kind).with_suffix(""))
            pipe.save_pretrained(str(folder), overwrite_modular_index=True)
        return folder

    def plain(self, kind: str) -> Any:
        """The pipeline as diffusers loads it from the folder."""
        pipe = self._loaded(self.folder(kind))
        for module in modules_in(pipe).values():
            copy_weights(module)
        return pipe

    def picture(self, kind: str) -> np.ndarray:
        """What the plain pipeline draws."""
        if kind not in self._pictures:
            self._pictures[kind] = draw(self.plain(kind), kind)
        return self._pictures[kind]

    @staticmethod
    def _loaded(folder: Path) -> Any:
        pipe = ModularPipeline.from_pretrained(str(folder))
        pipe.load_components(dtype=torch.float32)
        return pipe


@pytest.fixture(scope="module")
def modular(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Modular:
    """Modular folders, each written when it is first asked for."""
    return Modular(tiny, tmp_path_factory.mktemp("modular"))


def draw(pipe: Any, kind: str, **more: Any) -> np.ndarray:
    """What a modular pipeline makes of the same prompt."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    output = "videos" if kind == "ltx" else "images"
    return np.asarray(pipe(prompt=PROMPT, generator=generator, output=output, **{**CALLS[kind], **more}))


def write_spec(folder: Path, source: Path | str, rest: str = "device_map: cpu", more: str = "") -> Path:
    """A spec in folder; ``more`` are lines of its pipeline."""
    file = folder / "pipe.yaml"
    file.write_text(f"version: 1\npipeline:\n  source: {source}\n{more}reserve: 0\n{rest}\n")
    return file


@pytest.mark.parametrize(("kind", "way"), QUICK)
def test_modular_pipeline_placed_in_any_way_draws_as_plain(
    kind: str, way: str, modular: Modular, virtual_machine: MakeMachine, tmp_path: Path
) -> None:
    """Two runs have the bits of diffusers' own; in between, nothing that was brought stays."""
    expected = modular.picture(kind)
    file = write_spec(tmp_path, modular.folder(kind), WAYS[way])
    virtual_machine()

    pipe = dmconfig.load_from_yaml(file)

    assert type(pipe).__name__ == CLASSES[kind]
    for _ in range(2):
        assert np.array_equal(draw(pipe, kind), expected)
        assert dmconfig.report(pipe).problems == ()
    if way == "model":
        assert {str(each.device) for part in modules_in(pipe).values() for each in part.parameters()} == {"cpu"}
    assert str(pipe._execution_device) == placement_of(pipe).plan.execution_device  # type: ignore[union-attr]
    dmconfig.unload(pipe)


def test_modular_pipeline_is_validated_and_planned_without_torch(modular: Modular, tmp_path: Path) -> None:
    """Facts of blocks are read from source; the plan has the components that run and those that are not there."""
    file = write_spec(tmp_path, modular.folder("sdxl"), "device_map: cuda:0")
    code = (
        "import sys\n"
        "from dmconfig.cli import app\n"
        f"app(['plan', {str(file)!r}, '--gpus', '8GiB', '--format', 'json'], standalone_mode=False)\n"
        "raise SystemExit(len({'torch', 'diffusers', 'transformers', 'accelerate'} & set(sys.modules)))\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    plan = json.loads(done.stdout)
    components = {each["component"]: each["calls"] for each in plan["components"]}
    assert components == {"text_encoder": 1, "text_encoder_2": 1, "unet": 50, "vae": 1}
    assert any(note.startswith("without image_encoder, controlnet") for note in plan["notes"])


def test_call_of_the_file_holds_where_neither_the_caller_nor_the_state_says(modular: Modular, tmp_path: Path) -> None:
    """Defaults are the file's; a state that is gone on with keeps what it holds."""
    call = f"device_map: cpu\ncall: {{num_inference_steps: 2, height: {SIZE}, width: {SIZE}, output_type: np, seed: 0}}"
    pipe = dmconfig.load_from_yaml(write_spec(tmp_path, modular.folder("sdxl"), call))
    pipe.set_progress_bar_config(disable=True)

    state = pipe(prompt=PROMPT)

    assert np.allclose(state.images, modular.picture("sdxl"), atol=1e-5)
    assert state.num_inference_steps == 2
    as_tensors = pipe(prompt=PROMPT, output_type="pt")
    assert isinstance(pipe(state=as_tensors, output="images"), torch.Tensor)
    assert save(state, tmp_path / "fox.png") == [tmp_path / "fox.png"]


def test_file_changes_what_blocks_make(modular: Modular, tmp_path: Path) -> None:
    """A guider of another class, and values over those that blocks have; the exported spec says the same again."""
    guider = "{class: PerturbedAttentionGuidance, config: {guidance_scale: 3.0, perturbed_guidance_layers: [0]}}"
    rest = f"device_map: cpu\ncomponents:\n  guider: {guider}\n  mask_processor: {{config: {{do_normalize: true}}}}"
    expected = modular.plain("sdxl")
    config = {"guidance_scale": 3.0, "perturbed_guidance_layers": [0]}
    made = ComponentSpec("guider", PerturbedAttentionGuidance, config=config, default_creation_method="from_config")
    expected.update_components(guider=made.create())

    pipe = dmconfig.load_from_yaml(write_spec(tmp_path, modular.folder("sdxl"), rest))

    assert type(pipe.guider) is PerturbedAttentionGuidance
    assert (pipe.mask_processor.config.do_normalize, pipe.mask_processor.config.do_binarize) == (True, True)
    assert np.allclose(draw(pipe, "sdxl"), draw(expected, "sdxl"), atol=1e-5)
    data = dmconfig.to_spec(pipe).plain()
    assert data["components"]["mask_processor"] == {"config": {"do_normalize": True}}
    assert data["components"]["guider"]["class"] == "PerturbedAttentionGuidance"
    assert data["components"]["guider"]["config"]["guidance_scale"] == 3.0
    assert set(data["components"]) == {"guider", "mask_processor"}


def test_modular_class_over_a_folder_of_the_other_kind(
    modular: Modular, tiny: Tiny, virtual_machine: MakeMachine, tmp_path: Path
) -> None:
    """``class`` makes a modular pipeline of a folder with a model_index.json, as diffusers does."""
    expected = modular.picture("flux")
    folder = tiny.spec("flux").with_suffix("")
    file = write_spec(tmp_path, folder, WAYS["two devices"], "  class: FluxModularPipeline\n")
    virtual_machine()

    pipe = dmconfig.load_from_yaml(file)

    assert np.array_equal(draw(pipe, "flux"), expected)


def test_to_spec_of_a_live_modular_pipeline_loads_the_same(modular: Modular, tmp_path: Path) -> None:
    """One that diffusers loaded, too: where its components came from is noted on each."""
    live = modular.plain("sdxl")
    export = dmconfig.to_spec(live)
    file = tmp_path / "live.yaml"
    file.write_text(export.text())

    assert export.unknown == ()
    assert export.plain()["pipeline"]["source"] == str(modular.folder("sdxl"))
    assert np.allclose(draw(dmconfig.load_from_yaml(file), "sdxl"), draw(live, "sdxl"), atol=1e-5)


def test_modular_pipeline_that_somebody_else_loaded_is_dispatched(
    modular: Modular, virtual_machine: MakeMachine, tmp_path: Path
) -> None:
    """A live pipeline is placed by a plan, and given back when it is released."""
    expected = modular.picture("flux")
    file = write_spec(tmp_path, modular.folder("flux"), "device_map: cuda:1\nlow_memory: cpu_offload_with_hook")
    live = modular.plain("flux")
    virtual_machine()

    dispatch(live, dmconfig.plan_from_yaml(file))
    assert np.array_equal(draw(live, "flux"), expected)

    live.reset_device_map()
    assert placement_of(live) is None
    assert np.array_equal(draw(live, "flux"), expected)


def test_rehearsal_of_a_modular_pipeline_is_of_its_own_code(modular: Modular, tmp_path: Path) -> None:
    """It is called on virtual devices without weights, and what comes out is of the size asked for."""
    checked = check_file(write_spec(tmp_path, modular.folder("sdxl"), WAYS["two devices"]))
    script = Script(resolved=checked.resolved, spec=checked.spec, assembly=checked.assembly)
    machine = inventory(cuda=(8, 8))

    told = rehearse(script, plan_for(checked, machine), machine, Settings(height=64, width=64))

    assert told.failure is None
    assert (told.output, told.odd_output, told.steps) == ((1, 64, 64), "", (2, 50))
    assert {device.peak.phase for device in told.devices} == {"unet", "vae.decode"}


@pytest.mark.parametrize("file", ["", "modular_model_index.json"])
def test_first_spec_of_a_modular_folder_is_planned(file: str, modular: Modular, tmp_path: Path) -> None:
    """``dmconfig init`` on the folder, or on its index, writes a spec that is accepted."""
    made = starter(str(modular.folder("flux") / file), tmp_path / "first.yaml", inventory(cuda=(8, 8)))
    made.write()

    assert made.text.startswith("# FluxModularPipeline on a toy machine")
    assert check_file(tmp_path / "first.yaml").assembly.class_name == "FluxModularPipeline"


def test_modular_pipeline_shares_components_with_another(
    modular: Modular, tiny: Tiny, virtual_machine: MakeMachine, tmp_path: Path
) -> None:
    """Under ``pipelines``, over a folder of either kind: one placement, and both draw."""
    expected = modular.picture("flux")
    more = f"{WAYS['two devices']}\npipelines: {{blocks: {{class: FluxModularPipeline}}}}"
    file = write_spec(tmp_path, tiny.spec("flux").with_suffix(""), more)
    virtual_machine()

    pipes = dmconfig.load_pipelines(file)

    assert np.array_equal(draw(pipes["blocks"], "flux"), expected)
    assert pipes["blocks"].transformer is pipes["pipeline"].transformer
    assert placement_of(pipes["blocks"]) is placement_of(pipes["pipeline"])


# The index


def rewritten(modular: Modular, kind: str, folder: Path, **changes: Any) -> Path:
    """A copy of a modular folder's index, with other entries, in folder; the components stay where they are."""
    index = json.loads((modular.folder(kind) / "modular_model_index.json").read_text())
    folder.mkdir(exist_ok=True)
    (folder / "modular_model_index.json").write_text(json.dumps({**index, **changes}))
    return folder


def entry(source: str | None, subfolder: str, kind: tuple[str, str], **more: Any) -> list[Any]:
    """An entry of a modular index."""
    return [*kind, {"pretrained_model_name_or_path": source, "subfolder": subfolder, "type_hint": list(kind), **more}]


@pytest.fixture
def elsewhere(modular: Modular, tmp_path: Path) -> Path:
    """The index of the tiny FLUX alone, with everything in a repository of another name."""
    index = json.loads((modular.folder("flux") / "modular_model_index.json").read_text())
    moved = {
        name: entry("tiny/base", name, tuple(value[2]["type_hint"]))
        for name, value in index.items()
        if isinstance(value, list)
    }
    return rewritten(modular, "flux", tmp_path / "index", **moved)


def test_components_of_other_repositories_are_fetched_from_there(
    modular: Modular, elsewhere: Path, hub: Hub, virtual_machine: MakeMachine, tmp_path: Path
) -> None:
    """The index of one repository names another for its components; of both, only what is needed is downloaded."""
    hub.add("tiny/modular", elsewhere)
    hub.add("tiny/base", modular.folder("flux"), {"transformer/other.bin": b"not needed", "demo.png": b"nor this"})
    expected = modular.picture("flux")
    virtual_machine()

    pipe = dmconfig.load_from_yaml(write_spec(tmp_path, "tiny/modular", WAYS["two devices"]))

    assert np.array_equal(draw(pipe, "flux"), expected)
    assert hub.downloaded("tiny/modular") == ["modular_model_index.json"]
    assert not {"demo.png", "transformer/other.bin"} & set(hub.downloaded("tiny/base"))


def test_index_that_names_its_own_repository_means_the_revision_of_the_file(
    modular: Modular, elsewhere: Path, hub: Hub, tmp_path: Path
) -> None:
    """A pinned pipeline takes its components from the same commit, as the index names no other."""
    index = json.loads((elsewhere / "modular_model_index.json").read_text())
    commit = hub.add(
        "tiny/base", modular.folder("flux"), {"modular_model_index.json": json.dumps(index).encode()}
    ).commit
    file = write_spec(tmp_path, "tiny/base", "allow_moving_revision: false\ndevice_map: cpu", f"  revision: {commit}\n")

    assembly = check_file(file, ask_hub=True).assembly

    assert {component.source.revision for component in assembly.components} == {commit}


def test_branch_in_an_index_needs_consent(modular: Modular, elsewhere: Path, tmp_path: Path) -> None:
    """What an index names may move as what a file names; the file can name it in its place."""
    vae = entry("tiny/base", "vae", ("diffusers", "AutoencoderKL"), revision="fp16-fix")
    index = json.loads((elsewhere / "modular_model_index.json").read_text())
    (elsewhere / "modular_model_index.json").write_text(json.dumps({**index, "vae": vae}))

    with pytest.raises(SpecError) as caught:
        check_file(write_spec(tmp_path, elsewhere))

    problem = only_problem(caught.value)
    assert problem.code is Code.MOVING_REVISION
    assert "'vae' in revision fp16-fix of tiny/base" in problem.what
    check_file(write_spec(tmp_path, elsewhere, "allow_moving_revision: true\ndevice_map: cpu"))


def test_component_of_the_file_goes_over_that_of_the_index(modular: Modular, elsewhere: Path, tmp_path: Path) -> None:
    """A source in the file wins, whatever place the index has for it."""
    own = f"device_map: cpu\ncomponents:\n  vae: {{source: {modular.folder('flux')}, subfolder: vae}}"

    assembly = check_file(write_spec(tmp_path, elsewhere, own)).assembly

    (vae,) = [each for each in assembly.components if each.name == "vae"]
    assert (vae.folder, vae.class_name) == (modular.folder("flux") / "vae", "AutoencoderKL")


def test_component_without_a_class_in_the_index_is_left_out(modular: Modular, tmp_path: Path) -> None:
    """As diffusers writes what the pipeline lacked when it was saved; of one that is an AutoModel its config tells."""
    hint = {"pretrained_model_name_or_path": "tiny/base", "subfolder": "image_encoder", "type_hint": [None, None]}
    index = {"vae": entry(None, "vae", ("diffusers", "AutoModel")), "image_encoder": [None, None, hint]}
    folder = tmp_path / "index"
    shutil.copytree(modular.folder("sdxl"), folder)
    rewritten(modular, "sdxl", folder, **index)

    assembly = check_file(write_spec(tmp_path, folder)).assembly

    assert "image_encoder" in assembly.absent
    assert [each.class_name for each in assembly.components if each.name == "vae"] == ["AutoencoderKL"]


# What is refused


def refused(file: Path) -> Any:
    with pytest.raises(SpecError) as caught:
        check_file(file)
    return only_problem(caught.value)


def test_path_in_an_index_is_not_followed(modular: Modular, tmp_path: Path) -> None:
    """The folder on the machine that wrote it is no source: what is not in the folder is asked for."""
    there = entry(str(modular.folder("flux")), "vae", ("diffusers", "AutoencoderKL"))
    others = {name: entry(None, name, ("x", "y")) for name in ("transformer", "text_encoder", "text_encoder_2")}
    more = {name: entry(None, name, ("x", "y")) for name in ("tokenizer", "tokenizer_2", "scheduler")}

    problem = refused(write_spec(tmp_path, rewritten(modular, "flux", tmp_path / "index", vae=there, **others, **more)))

    assert problem.code is Code.OUTSIDE_SOURCE
    assert problem.what.startswith("the pipeline's source has 'vae' at '/")
    assert problem.fix == "give components.vae a source"


@pytest.mark.parametrize("blocks", ["MyBlocks", "SequentialPipelineBlocks"])
def test_blocks_that_diffusers_has_not_are_refused_and_not_replaced(
    blocks: str, modular: Modular, tmp_path: Path
) -> None:
    """Diffusers would put the default blocks in their place; here the file has to say so."""
    folder = rewritten(modular, "flux", tmp_path / "index", _blocks_class_name=blocks)

    problem = refused(write_spec(tmp_path, folder))

    assert problem.code is Code.UNFIT_FOR_MODULAR
    assert problem.what.startswith(f"the blocks of this FluxModularPipeline are {blocks}")
    assert problem.fix == "write class: FluxModularPipeline under pipeline, which takes its own, FluxAutoBlocks"


def test_blocks_of_a_repository_are_code_and_refused(modular: Modular, tmp_path: Path) -> None:
    """``modular_config.json`` leads to Python files, which are not run."""
    folder = rewritten(modular, "flux", tmp_path / "index")
    auto_map = {"ModularPipelineBlocks": "block.MyBlocks"}
    (folder / "modular_config.json").write_text(json.dumps({"auto_map": auto_map}))
    (folder / "block.py").write_text("raise SystemExit('run')\n")

    problem = refused(write_spec(tmp_path, folder))

    assert problem.code is Code.CODE_NOT_TRUSTED
    assert problem.what.endswith("asks for blocks out of the repository's own code")


@pytest.mark.parametrize(
    ("index", "code", "what"),
    [
        ({"_class_name": "FluxModulrPipeline"}, Code.UNKNOWN_CLASS, "no pipeline class 'FluxModulrPipeline'"),
        ({"_class_name": "NoModularPipeline"}, Code.UNKNOWN_CLASS, "no pipeline class 'NoModularPipeline'"),
        ({"_class_name": ["pipeline", "Mine"]}, Code.CODE_NOT_TRUSTED, "out of the repository's own code"),
        ({"_class_name": None}, Code.NOT_A_PIPELINE, "does not name a pipeline class"),
        ({"vae": [None, None, {"type_hint": ["os", "system"]}]}, None, ""),
        ({"vae": [None, None, {"type_hint": 3}]}, None, ""),
    ],
)
def test_damaged_index_is_a_problem_and_never_a_traceback(
    index: dict[str, Any], code: Code | None, what: str, modular: Modular, tmp_path: Path
) -> None:
    """What the index says of classes is looked up, and nothing of it is run."""
    file = write_spec(tmp_path, rewritten(modular, "flux", tmp_path / "index", **index))
    with pytest.raises(SpecError) as caught:
        check_file(file)
    if code is not None:
        assert (only_problem(caught.value).code, what in only_problem(caught.value).what) == (code, True)


@pytest.mark.parametrize(
    ("guider", "what"),
    [
        ("null", "'guider' is made by the pipeline's blocks, which cannot do without it"),
        (
            "{dtype: float16}",
            "'guider' is made by the pipeline's blocks and loaded from nowhere, so dtype means",
        ),
        ("{config: {guidance_scal: 3}}", "ClassifierFreeGuidance has no config value 'guidance_scal'"),
        ("{class: CLIPTextModel}", "diffusers makes no 'CLIPTextModel' of values in a config"),
    ],
)
def test_what_blocks_make_is_changed_by_class_and_config_alone(
    guider: str, what: str, modular: Modular, tmp_path: Path
) -> None:
    """Each is told at its own place."""
    rest = f"device_map: cpu\ncomponents: {{guider: {guider}}}"
    problem = refused(write_spec(tmp_path, modular.folder("sdxl"), rest))
    assert problem.what.startswith(what)
    assert problem.path[:2] == ("components", "guider")


def test_argument_that_no_block_takes_is_refused(modular: Modular, tmp_path: Path) -> None:
    """Diffusers warns and goes on; the names are those of the blocks, not of ``__call__``."""
    rest = "device_map: cpu\ncall: {num_inference_step: 2}"
    problem = refused(write_spec(tmp_path, modular.folder("flux"), rest))
    assert problem.code is Code.UNKNOWN_CALL_ARGUMENT
    assert "num_inference_steps" in problem.fix


def test_deriving_a_modular_pipeline_is_refused(modular: Modular, tmp_path: Path) -> None:
    """There is another way, which the refusal names."""
    pipe = dmconfig.load_from_yaml(write_spec(tmp_path, modular.folder("flux")))
    with pytest.raises(DispatchError, match="update_components"):
        dmconfig.derive(pipe, type(pipe).__mro__[2])


def test_weights_that_are_missing_are_told_before_loading(modular: Modular, tmp_path: Path) -> None:
    """A copy of the folder without the transformer's weights."""
    folder = tmp_path / "copy"
    shutil.copytree(modular.folder("flux"), folder)
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()

    with pytest.raises(SourceError) as caught:
        dmconfig.load_from_yaml(write_spec(tmp_path, folder))

    assert "no safetensors weights of 'transformer'" in str(caught.value)
