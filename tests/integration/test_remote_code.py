"""Code that a source brings along: never run without a grant, run as diffusers runs it with one, and nothing else."""

from __future__ import annotations

import json
import pickle
import py_compile
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import dynamic_modules_utils
from huggingface_hub import constants
from transformers import AutoModel, AutoTokenizer, dynamic_module_utils
from typer.testing import CliRunner

import dmconfig
from dmconfig import DMConfigError, load_from_yaml, plan_from_yaml, to_spec
from dmconfig.checked import check_file
from dmconfig.cli import app
from dmconfig.errors import Code, Problem
from dmconfig.load import plan_for
from dmconfig.pinning import pin
from dmconfig.rehearse import Script, Settings, rehearse
from dmconfig.rehearse.apart import pickled
from dmconfig.units import MIB
from tests.conftest import EXAMPLES, inventory, only_problem
from tests.loopback_hub import Hub
from tests.tiny_pipelines import call_arguments, draw, write_tiny
from tests.virtual_devices import MakeMachine

PIPELINE = """
import os
os.makedirs({owned!r}, exist_ok=True)
from diffusers import StableDiffusionPipeline
from .gains import gained

class DimPipeline(StableDiffusionPipeline):
    def __call__(self, *args, gain: float = 0.5, **kwargs):
        result = super().__call__(*args, **kwargs)
        result.images = gained(result.images, gain)
        return result
"""
GAINS = "from .deeper.numbers import one\n\ndef gained(images, gain):\n    return images * (gain * one())\n"
NUMBERS = "def one():\n    return 1.0\n"
UNET = """
import os
os.makedirs({owned!r}, exist_ok=True)
from diffusers import UNet2DConditionModel
from .halves import half

class MyUNet(UNet2DConditionModel):
    def forward(self, *args, **kwargs):
        return (half(super().forward(*args, **kwargs)[0]),)
"""
HALVES = "def half(value):\n    return value / 2\n"
ENCODER = """
import os
os.makedirs({owned!r}, exist_ok=True)
from transformers import CLIPTextModel
from .configuration_mine import MyConfig

class MyTextModel(CLIPTextModel):
    config_class = MyConfig
"""
CONFIGURATION = """
from transformers import CLIPTextConfig

class MyConfig(CLIPTextConfig):
    model_type = "my_clip"
"""
WEIGHTS = "diffusion_pytorch_model.safetensors"
UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH
CALL = "call: {prompt: a red fox, height: 32, width: 32, num_inference_steps: 2, output_type: np}\n"
STYLED = "call: {style: bold}\n"
LOCAL = "custom_pipeline: {source: ./code, trust_remote_code: written by this test}"
GRANT = "trust_remote_code: written by this test"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Stable Diffusion pipeline."""
    return write_tiny("sd", tmp_path_factory.mktemp("remote-code") / "sd")


@pytest.fixture
def sd(made: Path, tmp_path: Path) -> Path:
    """A copy of it, ``./sd`` beside the specs, that a test may change."""
    shutil.copytree(made, tmp_path / "sd")
    return tmp_path / "sd"


@pytest.fixture
def owned(tmp_path: Path) -> Path:
    """The folder that every file of code here makes when it is run."""
    return tmp_path / "owned"


@pytest.fixture
def code(tmp_path: Path, owned: Path) -> Path:
    """A pipeline class in a folder of its own, with what it imports, one folder deeper too."""
    folder = tmp_path / "code"
    (folder / "deeper").mkdir(parents=True)
    (folder / "pipeline.py").write_text(PIPELINE.format(owned=str(owned)))
    (folder / "gains.py").write_text(GAINS)
    (folder / "deeper" / "numbers.py").write_text(NUMBERS)
    return folder


@pytest.fixture
def with_unet(sd: Path, owned: Path) -> Path:
    """The pipeline, whose UNet is of a class in a file beside its config."""
    (sd / "unet" / "my_unet.py").write_text(UNET.format(owned=str(owned)))
    (sd / "unet" / "halves.py").write_text(HALVES)
    edit_json(sd / "model_index.json", unet=["my_unet", "MyUNet"])
    return sd


@pytest.fixture
def with_encoder(sd: Path, owned: Path) -> Path:
    """The pipeline, whose text encoder is of a class that its config maps (``auto_map``)."""
    folder = sd / "text_encoder"
    (folder / "modeling_mine.py").write_text(ENCODER.format(owned=str(owned)))
    (folder / "configuration_mine.py").write_text(CONFIGURATION)
    mapped = {"AutoConfig": "configuration_mine.MyConfig", "AutoModel": "modeling_mine.MyTextModel"}
    edit_json(folder / "config.json", model_type="my_clip", architectures=["MyTextModel"], auto_map=mapped)
    edit_json(sd / "model_index.json", text_encoder=["transformers", "MyTextModel"])
    return sd


@pytest.fixture
def spec(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        file = tmp_path / "pipe.yaml"
        file.write_text(f"version: 1\nreserve: 0\n{text}")
        return file

    return write


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Load with diffusers alone, its copies of code in a folder of this test."""
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("diffusers_modules", "transformers_modules"):
            monkeypatch.delitem(sys.modules, name)

    def load(folder: Path, **arguments: Any) -> Any:
        return DiffusionPipeline.from_pretrained(folder, trust_remote_code=True, **arguments)

    return load


def edit_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def problem_of(file: Path) -> Problem:
    """Return the one problem for which a spec is neither validated, planned, nor loaded."""
    seen = []
    for verb in (check_file, plan_from_yaml, load_from_yaml):
        with pytest.raises(DMConfigError) as caught:
            verb(file)
        seen.append(only_problem(caught.value))
    assert len(set(seen)) == 1
    return seen[0]


# Without a grant


def test_a_custom_pipeline_is_not_run_without_a_grant(
    sd: Path, code: Path, owned: Path, spec: Callable[[str], Path]
) -> None:
    """What would be run is told, every file of it, with the key that grants it; nothing has run."""
    problem = problem_of(spec("pipeline: {source: ./sd, custom_pipeline: {source: ./code}}\n"))
    assert (problem.code, problem.path) == (Code.CODE_NOT_TRUSTED, ("pipeline", "custom_pipeline", "source"))
    assert problem.what == "the pipeline is code that its source brings along (./code: pipeline.py)"
    assert problem.fix == (
        "read pipeline.py, gains.py, deeper/numbers.py, then write why it may be run: "
        "pipeline.custom_pipeline.trust_remote_code: ...; or remove custom_pipeline"
    )
    assert not owned.exists()


def test_a_component_s_code_is_not_run_without_a_grant(
    with_unet: Path, owned: Path, spec: Callable[[str], Path]
) -> None:
    """A class that an index names in a file beside the component's config."""
    problem = problem_of(spec("pipeline: {source: ./sd}\n"))
    assert (problem.code, problem.what) == (
        Code.CODE_NOT_TRUSTED,
        "'unet' is MyUNet, code that its source brings along (./sd: my_unet.py)",
    )
    assert "read my_unet.py, halves.py, then write why it may be run: pipeline.trust_remote_code: ..." in problem.fix
    assert not owned.exists()


def test_a_mapped_class_of_transformers_is_not_run_without_a_grant(
    with_encoder: Path, owned: Path, spec: Callable[[str], Path]
) -> None:
    """A class that a config maps and that no installed library has."""
    problem = problem_of(spec("pipeline: {source: ./sd}\n"))
    assert (problem.code, "MyTextModel" in problem.what) == (Code.CODE_NOT_TRUSTED, True)
    assert "read modeling_mine.py, configuration_mine.py, then" in problem.fix
    assert not owned.exists()


def test_a_pipeline_of_its_source_s_own_code_needs_the_source_s_grant(
    sd: Path, code: Path, owned: Path, spec: Callable[[str], Path], by_hand: Callable[..., Any]
) -> None:
    """An index may name a class in a file beside it: refused without a grant, with one as diffusers loads it."""
    shutil.copytree(code, sd, dirs_exist_ok=True)
    edit_json(sd / "model_index.json", _class_name=["pipeline", "DimPipeline"])
    problem = problem_of(spec("pipeline: {source: ./sd}\n"))
    assert (problem.code, problem.path) == (Code.CODE_NOT_TRUSTED, ("pipeline", "source"))
    assert not owned.exists()
    pipe = load_from_yaml(spec(f"pipeline: {{source: ./sd, {GRANT}}}\n"))
    (sd / "gains.py").write_text(GAINS.replace(".deeper.numbers", ".numbers"))  # which is as deep as diffusers copies
    (sd / "numbers.py").write_text(NUMBERS)
    (sd / "pipeline.py").write_text(PIPELINE.format(owned=str(owned)) + "from .numbers import one\n")
    assert np.array_equal(draw(pipe, "sd", 0), draw(by_hand(sd), "sd", 0))


@pytest.mark.parametrize("grants", ["pipeline", "vae"])
def test_a_grant_for_one_source_does_not_open_another(
    *, grants: str, with_unet: Path, code: Path, owned: Path, tmp_path: Path, spec: Callable[[str], Path]
) -> None:
    """Neither the pipeline's nor a component's reaches a UNet from elsewhere, nor a custom pipeline."""
    shutil.copytree(with_unet / "unet", tmp_path / "elsewhere")
    mapped = {"AutoModel": "my_unet.MyUNet"}
    edit_json(tmp_path / "elsewhere" / "config.json", _class_name="MyUNet", auto_map=mapped)
    edit_json(with_unet / "model_index.json", unet=["diffusers", "UNet2DConditionModel"])
    pipeline = f", {GRANT}" if grants == "pipeline" else ""
    vae = f"vae: {{source: ./sd, {GRANT}}}" if grants == "vae" else ""
    text = f"pipeline: {{source: ./sd{pipeline}}}\ncomponents: {{unet: {{source: ./elsewhere}}, {vae}}}\n"
    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(spec(text))
    (problem,) = (each for each in caught.value.problems if each.code is Code.CODE_NOT_TRUSTED)
    assert problem.path == ("components", "unet", "source")
    assert "components.unet.trust_remote_code: ..." in problem.fix
    both = f"pipeline: {{source: ./sd, {GRANT}, custom_pipeline: {{source: ./code}}}}\n"
    assert problem_of(spec(both)).code is Code.CODE_NOT_TRUSTED
    assert not owned.exists()


def test_a_custom_pipeline_as_a_word_says_how_it_is_granted(sd: Path, code: Path, spec: Callable[[str], Path]) -> None:
    """As diffusers takes it, a word: it is told where the reason goes."""
    problem = problem_of(spec("pipeline: {source: ./sd, custom_pipeline: ./code}\n"))
    assert (problem.code, problem.path) == (Code.CODE_NOT_TRUSTED, ("pipeline", "custom_pipeline"))
    assert problem.fix == "read it, then write custom_pipeline: {source: ./code, trust_remote_code: <why>}"


def test_a_mere_yes_is_no_reason(sd: Path, code: Path, spec: Callable[[str], Path]) -> None:
    """As for pickles."""
    problem = problem_of(spec("pipeline: {source: ./sd, trust_remote_code: true}\n"))
    assert (problem.code, problem.fix) == (Code.BAD_VALUE, "write why, and who read it")


def test_a_community_pipeline_by_name_is_refused(sd: Path, spec: Callable[[str], Path]) -> None:
    """Diffusers fetches those from where no commit pins them, so a grant cannot be for what was read."""
    problem = problem_of(
        spec(f"pipeline: {{source: ./sd, custom_pipeline: {{source: lpw_stable_diffusion, {GRANT}}}}}\n")
    )
    assert problem.code is Code.CODE_NOT_TRUSTED
    assert "at no commit" in problem.what
    assert problem.fix.endswith("read it, and write ./lpw_stable_diffusion.py")


def test_the_environment_forbids_what_a_file_grants(
    sd: Path, code: Path, owned: Path, spec: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The switch by which diffusers forbids it on a machine holds here too."""
    monkeypatch.setenv("DIFFUSERS_DISABLE_REMOTE_CODE", "1")
    problem = problem_of(spec(f"pipeline: {{source: ./sd, custom_pipeline: {{source: ./code, {GRANT}}}}}\n"))
    assert (problem.code, problem.path[-1]) == (Code.CODE_NOT_TRUSTED, "trust_remote_code")
    assert problem.why == "DIFFUSERS_DISABLE_REMOTE_CODE is set, which forbids it on this machine"
    assert not owned.exists()


def test_a_grant_that_opens_nothing_is_refused(sd: Path, spec: Callable[[str], Path]) -> None:
    """It would open what comes tomorrow."""
    problem = problem_of(spec(f"pipeline: {{source: ./sd, {GRANT}}}\n"))
    assert (problem.code, problem.path) == (Code.CONTRADICTION, ("pipeline", "trust_remote_code"))


# With a grant


def test_a_custom_pipeline_runs_as_diffusers_runs_it(
    sd: Path, code: Path, owned: Path, spec: Callable[[str], Path], by_hand: Callable[..., Any]
) -> None:
    """Its facts are read, not run, for a plan; loaded, it draws what the pipeline loaded by diffusers draws."""
    (code / "gains.py").write_text(
        GAINS.replace("from .deeper.numbers import one\n", "") + "def one():\n    return 1.0\n"
    )
    file = spec(f"pipeline: {{source: ./sd, custom_pipeline: {{source: ./code, {GRANT}}}}}\ncall: {{gain: 0.25}}\n")
    plan = plan_from_yaml(file)
    assert plan.pipeline == "DimPipeline"
    assert plan.notes[0] == (
        "loading runs code of ./code (pipeline.py, gains.py) for DimPipeline, trusted because: written by this test; "
        "this plan only read it"
    )
    assert not owned.exists()
    pipe = load_from_yaml(file)
    assert owned.is_dir()
    expected = by_hand(sd, custom_pipeline=str(code))
    assert type(pipe).__name__ == type(expected).__name__ == "DimPipeline"
    picture = pipe(**call_arguments("sd"), generator=torch.Generator().manual_seed(0)).images
    by_them = expected(**call_arguments("sd"), gain=0.25, generator=torch.Generator().manual_seed(0)).images
    assert np.array_equal(picture, by_them)
    assert picture.max() <= 0.25


def test_files_of_code_are_run_as_they_were_read_and_no_others(
    sd: Path, code: Path, owned: Path, tmp_path: Path, spec: Callable[[str], Path]
) -> None:
    """Files of one name in two folders are two, however deep; byte code beside them is not run, nor is any written."""
    other = tmp_path / "other"
    shutil.copytree(code, other)
    (other / "deeper" / "numbers.py").write_text("def one():\n    return 0.0\n")
    cached = code / "deeper" / "__pycache__" / f"numbers.{sys.implementation.cache_tag}.pyc"
    py_compile.compile(str(other / "deeper" / "numbers.py"), str(cached), invalidation_mode=UNCHECKED)
    written = "pipeline: {{source: ./sd, custom_pipeline: {{source: ./{}, trust_remote_code: written by this test}}}}\n"
    first, second = (load_from_yaml(spec(written.format(name))) for name in ("code", "other"))
    assert draw(first, "sd", 0).max() > 0
    assert draw(second, "sd", 0).max() == 0
    assert [each for each in tmp_path.rglob("*.pyc") if each != cached] == []


def test_a_file_that_was_not_told_of_is_not_run(
    sd: Path, code: Path, tmp_path: Path, spec: Callable[[str], Path]
) -> None:
    """A module that only running names is not found, although it lies in the folder of what is trusted."""
    (code / "hidden.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'hidden')!r})\n")
    file = code / "pipeline.py"
    file.write_text(f"from importlib import import_module\nimport_module('.hidden', __package__)\n{file.read_text()}")
    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(spec(f"pipeline: {{source: ./sd, {LOCAL}}}\n"))
    problem = only_problem(caught.value)
    assert (problem.code, "ModuleNotFoundError" in problem.what) == (Code.COMPONENT_NOT_LOADED, True)
    assert not (tmp_path / "hidden").exists()


def test_a_component_s_code_runs_and_is_placed(
    with_unet: Path,
    owned: Path,
    spec: Callable[[str], Path],
    by_hand: Callable[..., Any],
    virtual_machine: MakeMachine,
) -> None:
    """It draws what diffusers draws with it, on one device, split over two, and brought layer by layer."""
    expected = draw(by_hand(with_unet), "sd", 0)
    shutil.rmtree(owned)
    file = spec(f"pipeline: {{source: ./sd, {GRANT}}}\ndevice_map: {{unet: 'cuda:1', default: 'cuda:0'}}\n")
    machine = inventory([1, 1])
    for value in ({"device_map.unet": "cuda:0"}, {"device_map.unet": {"execution": ["cuda:0", "cuda:1"]}}):
        assert plan_from_yaml(file, value, inventory=machine).assignments
    assert not owned.exists()
    virtual_machine(2, 64 * MIB)
    for place in ("cuda:1", {"execution": "cuda:1", "offload": "sequential"}, {"execution": ["cuda:0", "cuda:1"]}):
        pipe = load_from_yaml(file, {"device_map.unet": place})
        assert type(pipe.unet).__name__ == "MyUNet"
        assert np.array_equal(draw(pipe, "sd", 0), expected)
        dmconfig.unload(pipe)
    assert owned.is_dir()


def test_a_mapped_class_of_transformers_runs(
    with_encoder: Path, owned: Path, spec: Callable[[str], Path], by_hand: Callable[..., Any]
) -> None:
    """It has the weights that transformers' own ``AutoModel`` gives it, and is not split: only running it tells how."""
    file = spec(f"pipeline: {{source: ./sd, {GRANT}}}\n")
    assert plan_from_yaml(file).assignments
    assert not owned.exists()
    pipe = load_from_yaml(file)
    by_hand  # noqa: B018 - keeps transformers' copies of code in this test's folder
    expected = AutoModel.from_pretrained(with_encoder / "text_encoder", trust_remote_code=True)
    assert type(pipe.text_encoder).__name__ == type(expected).__name__ == "MyTextModel"
    theirs = expected.state_dict()
    assert pipe.text_encoder.state_dict().keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in pipe.text_encoder.state_dict().items())
    split = {"device_map": {"text_encoder": {"execution": ["cuda:0", "cuda:1"]}, "default": "cuda:0"}}
    with pytest.raises(DMConfigError) as caught:
        plan_from_yaml(file, split, inventory=inventory([1, 1]))
    assert "cannot be known without running it" in only_problem(caught.value).what


def test_a_tokenizer_s_code_runs_with_a_grant_alone(
    sd: Path, owned: Path, spec: Callable[[str], Path], by_hand: Callable[..., Any]
) -> None:
    """Where an installed class stands for it, that is taken without a grant; where none does, it is refused."""
    text = f"import os\nos.makedirs({str(owned)!r}, exist_ok=True)\nfrom transformers import CLIPTokenizer\n"
    (sd / "tokenizer" / "mine.py").write_text(f"{text}class MyTokenizer(CLIPTokenizer):\n    pass\n")
    config = sd / "tokenizer" / "tokenizer_config.json"
    edit_json(config, auto_map={"AutoTokenizer": ["mine.MyTokenizer", None]})
    edit_json(sd / "model_index.json", tokenizer=["transformers", "AutoTokenizer"])
    assert type(load_from_yaml(spec("pipeline: {source: ./sd}\n")).tokenizer).__module__.startswith("transformers.")
    edit_json(config, tokenizer_class="MyTokenizer")
    assert problem_of(spec("pipeline: {source: ./sd}\n")).code is Code.CODE_NOT_TRUSTED
    assert not owned.exists()
    pipe = load_from_yaml(spec(f"pipeline: {{source: ./sd, {GRANT}}}\n"))
    expected = AutoTokenizer.from_pretrained(sd / "tokenizer", trust_remote_code=True)
    assert type(pipe.tokenizer).__name__ == type(expected).__name__ == "MyTokenizer"
    assert pipe.tokenizer("a red fox").input_ids == expected("a red fox").input_ids


def test_a_rehearsal_runs_code_that_is_granted(
    with_unet: Path, code: Path, owned: Path, spec: Callable[[str], Path]
) -> None:
    """It is the pipeline's own code that is rehearsed, so there it runs; its plan does not."""
    file = spec(f"pipeline: {{source: ./sd, {GRANT}, custom_pipeline: {{source: ./code, {GRANT}}}}}\n{CALL}")
    checked, machine = check_file(file), inventory([1])
    plan = plan_for(checked, machine)
    assert not owned.exists()
    script = Script(resolved=checked.resolved, spec=checked.spec, assembly=checked.assembly)
    script = pickle.loads(pickled(script))  # noqa: S301 - where there are real accelerators, another process rehearses it
    assert not owned.exists()
    rehearsal = rehearse(script, plan, machine, Settings())
    assert owned.is_dir()
    assert rehearsal.failure is None


def test_a_rehearsed_reserve_is_refused_where_code_would_run_for_a_plan(
    with_unet: Path, owned: Path, spec: Callable[[str], Path]
) -> None:
    """``plan`` never runs code, not even through the reserve."""
    text = f"pipeline: {{source: ./sd, {GRANT}}}\n"
    file = spec(text)
    file.write_text(file.read_text().replace("reserve: 0", "reserve: rehearsed"))
    problem = problem_of(file)
    assert (problem.code, problem.path) == (Code.CONTRADICTION, ("reserve",))
    result = CliRunner().invoke(app, ["plan", "--rehearse", "--gpus", "1GiB", str(spec(f"{text}{CALL}"))])
    assert (result.exit_code, "would run code of ./sd" in result.output) == (2, True)
    assert not owned.exists()


def test_sizes_that_only_running_tells_are_not_told(with_unet: Path, owned: Path, spec: Callable[[str], Path]) -> None:
    """Without headers a size comes of building the class, which for such a class a plan does not."""
    (with_unet / "unet" / WEIGHTS).unlink()
    with pytest.raises(DMConfigError) as caught:
        plan_from_yaml(spec(f"pipeline: {{source: ./sd, {GRANT}}}\n"))
    problem = only_problem(caught.value)
    assert (problem.code, problem.what) == (
        Code.SIZES_UNKNOWN,
        "how large 'unet' (MyUNet) is cannot be known without running its own code",
    )
    assert not owned.exists()


def test_an_exported_spec_keeps_its_grants(
    with_unet: Path, code: Path, tmp_path: Path, spec: Callable[[str], Path]
) -> None:
    """It loads again; a live pipeline that no file granted anything is exported without, and that is said."""
    file = spec(f"pipeline: {{source: ./sd, {GRANT}, custom_pipeline: {{source: ./code, {GRANT}}}}}\n")
    pipe = load_from_yaml(file)
    again = tmp_path / "again.yaml"
    again.write_text(to_spec(pipe, tmp_path).text())
    assert np.array_equal(draw(load_from_yaml(again), "sd", 0), draw(pipe, "sd", 0))
    del pipe._loaded_as
    assert sorted(word for line in to_spec(pipe).unknown for word in ("DimPipeline", "MyUNet") if word in line) == [
        "DimPipeline",
        "MyUNet",
    ]


def test_the_pipeline_class_of_the_examples_runs(spec: Callable[[str], Path]) -> None:
    """It is that of the recipes: the style is put behind the prompt."""
    source = f"source: {EXAMPLES / 'digits' / 'pipeline'}"
    styled = load_from_yaml(
        spec(f"pipeline: {{{source}, custom_pipeline: {{source: {EXAMPLES / 'styled.py'}, {GRANT}}}}}\n{STYLED}")
    )
    plain = load_from_yaml(spec(f"pipeline: {{{source}}}\n"))
    drawn = [
        pipe(prompt, num_inference_steps=2, output_type="np", generator=torch.Generator().manual_seed(0)).images
        for pipe, prompt in ((styled, "seven"), (plain, "seven bold"))
    ]
    assert np.array_equal(*drawn)


# What cannot be used


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("pipeline.py", "from ..secrets import key\n", "imports from outside the folder that its code is in"),
        ("pipeline.py", "class Pipeline(:\n", "cannot be read as Python"),
        ("pipeline.py", "from .missing import part\n", "has no missing.py, which it imports"),
        ("pipeline.py", "x = 1\n", "is to have one pipeline class, and none is found by reading it"),
        ("gains.py", "(" * 5000, "cannot be read as Python"),
        ("gains.py", " " * (1 << 20) + "x", "is larger than 1 MiB"),
    ],
)
def test_code_that_cannot_be_used_is_told_before_it_is_run(
    *, name: str, text: str, what: str, sd: Path, code: Path, owned: Path, spec: Callable[[str], Path]
) -> None:
    """By reading it."""
    (code / name).write_text(text)
    problem = problem_of(spec(f"pipeline: {{source: ./sd, custom_pipeline: {{source: ./code, {GRANT}}}}}\n"))
    assert (problem.code, what in problem.what) == (Code.BAD_CODE, True)
    assert not owned.exists()


def test_one_of_several_classes_is_named(sd: Path, code: Path, spec: Callable[[str], Path]) -> None:
    """By ``pipeline.class``."""
    file = code / "pipeline.py"
    file.write_text(f"{file.read_text()}\nclass Other(DimPipeline):\n    pass\n")
    custom = f"custom_pipeline: {{source: ./code/pipeline.py, {GRANT}}}"
    problem = problem_of(spec(f"pipeline: {{source: ./sd, {custom}}}\n"))
    assert (problem.code, problem.fix) == (Code.BAD_CODE, "name one as pipeline.class")
    assert type(load_from_yaml(spec(f"pipeline: {{source: ./sd, {custom}, class: Other}}\n"))).__name__ == "Other"
    assert problem_of(spec(f"pipeline: {{source: ./sd, {custom}, class: Third}}\n")).fix == (
        "it has: DimPipeline, Other"
    )


@pytest.mark.parametrize("name", ["pipeline.py", "gains.py"])
def test_a_link_out_of_the_folder_of_code_is_refused(
    *, name: str, sd: Path, code: Path, tmp_path: Path, owned: Path, spec: Callable[[str], Path]
) -> None:
    """What a folder of code runs is in it."""
    shutil.move(code / name, tmp_path / name)
    (code / name).symlink_to(tmp_path / name)
    problem = problem_of(spec(f"pipeline: {{source: ./sd, custom_pipeline: {{source: ./code, {GRANT}}}}}\n"))
    assert problem.code is Code.OUTSIDE_SOURCE
    assert not owned.exists()


def test_code_of_another_repository_is_refused(with_encoder: Path, owned: Path, spec: Callable[[str], Path]) -> None:
    """A config may point to code elsewhere; the grant of its own source does not reach there."""
    edit_json(with_encoder / "text_encoder" / "config.json", auto_map={"AutoModel": "org/other--mine.MyTextModel"})
    problem = problem_of(spec(f"pipeline: {{source: ./sd, {GRANT}}}\n"))
    assert (problem.code, problem.what) == (
        Code.CODE_NOT_TRUSTED,
        "a config names mine.MyTextModel, code of another repository, org/other",
    )
    assert not owned.exists()


# On the hub


def test_code_of_the_hub_runs_at_a_commit_alone(
    *, hub: Hub, sd: Path, code: Path, owned: Path, spec: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch is refused, and nothing of it fetched; ``pin`` writes the commit, and then it runs, offline too."""
    commit = hub.add("org/code", code, {"README.md": b"text", "weights.bin": b"no code"}).commit
    custom = f"custom_pipeline: {{source: org/code, {GRANT}}}"
    for branch in ("", ", revision: main"):
        moving = f"custom_pipeline: {{source: org/code{branch}, {GRANT}}}"
        problem = problem_of(spec(f"pipeline: {{source: ./sd, {moving}}}\nallow_moving_revision: true\n"))
        assert (problem.code, problem.path) == (
            Code.MOVING_REVISION,
            ("pipeline", "custom_pipeline", "revision"),
        )
    assert hub.downloaded("org/code") == []
    file = spec(f"pipeline:\n  source: ./sd\n  {custom}\n")
    pin(file).write()
    assert commit in file.read_text()
    pipe = load_from_yaml(file)
    assert hub.downloaded("org/code") == ["deeper/numbers.py", "gains.py", "pipeline.py"]
    assert owned.is_dir()
    assert np.array_equal(
        draw(pipe, "sd", 0), draw(load_from_yaml(spec(f"pipeline: {{source: ./sd, {LOCAL}}}\n")), "sd", 0)
    )
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    pin_free = file.with_name("again.yaml")
    pin_free.write_text(f"version: 1\nreserve: 0\npipeline: {{source: ./sd, {custom[:-1]}, revision: {commit}}}}}\n")
    load_from_yaml(pin_free)
    assert hub.requests == []


def test_code_of_the_hub_is_not_fetched_without_a_grant(
    hub: Hub, sd: Path, code: Path, spec: Callable[[str], Path]
) -> None:
    """Where there is no grant, nothing of the repository is asked for."""
    commit = hub.add("org/code", code).commit
    problem = problem_of(
        spec(f"pipeline: {{source: ./sd, custom_pipeline: {{source: org/code, revision: {commit}}}}}\n")
    )
    assert problem.code is Code.CODE_NOT_TRUSTED
    assert hub.requests == []


def test_a_pipeline_of_the_hub_with_code_of_its_own_is_loaded(
    *,
    hub: Hub,
    with_unet: Path,
    with_encoder: Path,
    owned: Path,
    spec: Callable[[str], Path],
    by_hand: Callable[..., Any],
) -> None:
    """Its component's and its encoder's code, and no more of it than that; granted to the source, at its commit."""
    commit = hub.add("dm/sd", with_unet).commit
    pinned = f"pipeline: {{source: dm/sd, revision: {commit}"
    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(spec(f"{pinned}}}\n"))
    assert {problem.code for problem in caught.value.problems} <= {Code.CODE_NOT_TRUSTED, Code.UNKNOWN_CLASS}
    assert not [name for name in hub.downloaded("dm/sd") if name.endswith(".py")]
    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(spec(f"pipeline: {{source: dm/sd, {GRANT}}}\nallow_moving_revision: true\n"))
    assert Code.MOVING_REVISION in {problem.code for problem in caught.value.problems}
    assert not owned.exists()
    pipe = load_from_yaml(spec(f"{pinned}, {GRANT}}}\n"))
    assert owned.is_dir()
    # diffusers follows no auto_map of a component
    edit_json(with_unet / "model_index.json", text_encoder=["modeling_mine", "MyTextModel"])
    assert np.array_equal(draw(pipe, "sd", 0), draw(by_hand(with_unet), "sd", 0))


def test_a_component_of_the_hub_with_code_of_its_own_is_loaded(
    *, hub: Hub, sd: Path, with_unet: Path, tmp_path: Path, owned: Path, spec: Callable[[str], Path]
) -> None:
    """From a repository of one model, whose config maps its class; the grant is the component's own."""
    edit_json(with_unet / "unet" / "config.json", _class_name="MyUNet", auto_map={"AutoModel": "my_unet.MyUNet"})
    edit_json(sd / "model_index.json", unet=["diffusers", "UNet2DConditionModel"])
    commit = hub.add("dm/unet", with_unet / "unet").commit
    unet = f"components: {{unet: {{source: dm/unet, revision: {commit}"
    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(spec(f"pipeline: {{source: ./sd}}\n{unet}}}}}\n"))
    assert only_problem(caught.value).code in (Code.CODE_NOT_TRUSTED, Code.UNKNOWN_CLASS)
    pipe = load_from_yaml(spec(f"pipeline: {{source: ./sd}}\n{unet}, {GRANT}}}}}\n"))
    assert type(pipe.unet).__name__ == "MyUNet"
    assert owned.is_dir()
