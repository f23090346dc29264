"""``dmconfig config``, and profiles and overlays on every verb, through the command itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dmconfig import secrets
from dmconfig.checked import resolve_file
from dmconfig.cli import app
from dmconfig.load import plan_from_yaml
from dmconfig.provenance import config_data
from dmconfig.resolve import override_from_text
from dmconfig.spec import Spec, validate_spec
from tests.conftest import inventory

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
PIPELINE = ROOT / "examples" / "digits" / "pipeline"
TOKEN = "hf_" + "abcDEF0123456789xyz"

FILES = {
    "conf/base.yaml": """\
version: 1
pipeline:
  source: ../models/digits
call:
  num_inference_steps: ${STEPS:-20}
  negative_prompt: "by ${HF_TOKEN:-nobody}, for $$5"
device_map: {unet: cuda:0, default: balanced}
profiles:
  prod: {reserve: 2GiB}
""",
    "pipe.yaml": "extends: conf/base.yaml\noffload_folder: ./offload\nprofiles: {prod: {reserve: 3MiB}}\n",
    "boxes/gpu.yaml": "device_map: {vae: cuda:1}\ncomponents: {vae: {source: ./vae}}\n",
}


def command(*arguments: object, **environ: str) -> Result:
    return CliRunner(env={"DMCONFIG_TRACEBACK": None, **environ}).invoke(app, [*map(str, arguments)])


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the files, with the digits pipeline where they say it is, and return the main one, by its short name."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "digits").symlink_to(PIPELINE)
    (tmp_path / "boxes" / "vae").symlink_to(PIPELINE / "vae")
    monkeypatch.chdir(tmp_path)
    for name in ("STEPS", "HF_TOKEN", "DMCONFIG_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(secrets, "_remembered", set())
    return Path("pipe.yaml")


def test_config_prints_one_file(files: Path) -> None:
    """All layers as one, relative paths from where the file named first is."""
    result = command("config", files, "-f", "boxes/gpu.yaml", "--profile", "prod", "--set", "call.seed=3", STEPS="12")
    assert (result.exit_code, result.stderr) == (0, "")
    assert (
        result.stdout
        == """\
version: 1
pipeline:
  source: ./models/digits
components:
  vae:
    source: ./boxes/vae
device_map:
  unet: cuda:0
  default: balanced
  vae: cuda:1
reserve: 3MiB
offload_folder: ./offload
call:
  num_inference_steps: 12
  negative_prompt: by nobody, for $$5
  seed: 3
"""
    )


def test_config_provenance_tells_where_each_value_is_from(files: Path) -> None:
    """File and line, --set, or default; and the variable that gave it something."""
    options = ("-f", "boxes/gpu.yaml", "--profile", "prod", "--set", "call.seed=3", "--provenance")
    printed = command("config", files, *options, STEPS="12").stdout
    told = {}
    for line in printed.splitlines():
        value, _, comment = line.partition("  # ")
        told[value.strip()] = comment.strip()
    assert told["version: 1"] == "conf/base.yaml:1"
    assert told["source: ./boxes/vae"] == "boxes/gpu.yaml:2"
    assert told["vae: cuda:1"] == "boxes/gpu.yaml:1"
    assert told["reserve: 3MiB"] == "pipe.yaml:3"
    assert told["num_inference_steps: 12"] == "conf/base.yaml:5, from STEPS"
    assert told["seed: 3"] == "--set call.seed=3"
    assert told["low_memory: none"] == "default"
    mappings = {line for line, comment in told.items() if not comment}
    assert mappings == {"pipeline:", "components:", "vae:", "device_map:", "group_offload:", "call:"}


def spec_of(file: Path, *overlays: str, **given: Any) -> Spec:
    return validate_spec(resolve_file(file, overlays=overlays, **given))


@pytest.mark.parametrize("more", [(), ("--provenance",), ("--format", "json"), ("--provenance", "--format", "json")])
def test_config_loads_back_to_the_same_spec_and_plan(files: Path, more: tuple[str, ...]) -> None:
    """As text and as data; with defaults written out, too."""
    options = ("-f", "boxes/gpu.yaml", "--profile", "prod", "--set", "call.seed=3")
    printed = command("config", files, *options, *more, STEPS="12").stdout
    if len(more) == 3:
        printed = json.dumps(json.loads(printed)["config"])
    Path("printed.yaml").write_text(printed, encoding="utf-8")
    overlays, claims = ["boxes/gpu.yaml"], [override_from_text("call.seed=3")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPS", "12")
        expected = validate_spec(resolve_file(files, claims, overlays=overlays, profile="prod"))
        plan = plan_from_yaml(files, {"call.seed": 3}, overlays=overlays, profile="prod", inventory=inventory([1, 1]))
    again = spec_of(Path("printed.yaml"))
    sources = {"pipeline": again.pipeline.source, "vae": again.components["vae"]}
    assert sources["pipeline"] == "./models/digits"
    moved = {"pipeline": again.pipeline, "components": again.components}  # folders are written from another place
    assert expected.model_copy(update=moved) == again
    assert plan_from_yaml("printed.yaml", inventory=inventory([1, 1])) == plan


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_config_of_every_example_loads_back(file: Path, tmp_path: Path) -> None:
    """With and without what is default; printed files are beside the examples, so paths are as they were."""
    for more in ((), ("--provenance",)):
        text = command("config", file, *more).stdout
        copy = tmp_path / f"copy{len(more)}.yaml"
        copy.write_text(text, encoding="utf-8")
        assert spec_of(copy) == spec_of(file)


def test_config_as_json_for_tools(files: Path) -> None:
    """The data alone, or with a list of where each value is from."""
    data = json.loads(command("config", files, "--format", "json").stdout)
    assert data["pipeline"] == {"source": "./models/digits"}
    told = json.loads(command("config", files, "--set", "reserve=1GiB", "--provenance", "--format", "json").stdout)
    assert told["config"]["reserve"] == "1GiB"
    by_key = {value["key"]: value for value in told["provenance"]}
    assert by_key["pipeline.source"] == {
        "path": ["pipeline", "source"], "key": "pipeline.source", "value": "./models/digits", "from": "file",
        "file": "conf/base.yaml", "line": 3, "column": 11,
    }  # fmt: skip
    assert by_key["reserve"]["from"] == "override"
    assert by_key["reserve"]["origin"] == "--set reserve=1GiB"
    assert by_key["pipeline.dtype"] == {
        "path": ["pipeline", "dtype"], "key": "pipeline.dtype", "value": "auto", "from": "default",
    }  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ("config",),
        ("config", "--provenance"),
        ("config", "--format", "json"),
        ("config", "--provenance", "--format", "json"),
        ("plan",),
        ("plan", "--format", "json"),
        ("validate", "--set", "reserve=$"),
        ("validate", "--set", "pipeline.dtype=$"),
        ("validate", "--set", "device_map=$"),
        ("validate", "--set", "low_memory=$"),
        ("validate", "--set", "$=1"),
        ("validate", "--set", "call.eta=$"),
        ("validate", "--set", "pipeline.source=./$", "--format", "json"),
        ("plan", "--set", "pipeline.source=$/$"),
    ],
    ids=" ".join,
)
def test_no_secret_is_printed(files: Path, arguments: tuple[str, ...]) -> None:
    """Neither one from a variable that is named like one, nor a token in plain text, in results or errors."""
    verb, *options = (argument.replace("$", "hunter2-secret") for argument in arguments)
    for secret in ("hunter2-secret", TOKEN):
        shown = [option.replace("hunter2-secret", secret) for option in options]
        result = command(verb, files, *shown, HF_TOKEN=secret)
        assert secret not in result.output + result.stderr
    literal = command(verb, files, *options, "--set", f"call.prompt=by {TOKEN}")
    assert TOKEN not in literal.output + literal.stderr


def test_secret_of_a_value_that_is_refused_is_not_printed(files: Path) -> None:
    """An error shows the value it refuses; of a secret it shows that there is one."""
    Path("over.yaml").write_text("low_memory: ${MY_PASSWORD}\n", encoding="utf-8")
    result = command("validate", files, "-f", "over.yaml", MY_PASSWORD="correct horse")  # noqa: S106 - a toy
    assert result.exit_code == 2
    assert "correct horse" not in result.output + result.stderr
    assert "(secret)" in result.stderr


def test_config_shows_a_secret_as_its_variable_and_loads_back(files: Path) -> None:
    """The file that is handed on asks for the secret where it is used."""
    text = command("config", files, HF_TOKEN="hunter2-secret").stdout  # noqa: S106 - a toy
    assert '  negative_prompt: "by ${HF_TOKEN:-nobody}, for $$5"\n' in text
    Path("printed.yaml").write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hunter2-secret")
        assert spec_of(Path("printed.yaml")).call["negative_prompt"] == "by hunter2-secret, for $5"


def test_config_leaves_a_secret_in_plain_text_out_and_says_so(files: Path) -> None:
    """It cannot be handed on; what to write instead stands beside it."""
    text = command("config", files, "--set", f"call.prompt=by {TOKEN}").stdout
    assert "  prompt: (secret)" in text
    assert "# secret; write it as a variable: ${NAME}\n" in text


def test_config_of_the_documentation_prints_what_is_printed_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page on layers shows a file and what becomes of it, word for word."""
    page = (ROOT / "docs" / "layers.md").read_text(encoding="utf-8")
    spec = page.partition("```yaml\n")[2].partition("```")[0]
    line, _, shown = page.partition("\n$ STEPS=12 dmconfig ")[2].partition("```")[0].partition("\n")
    (tmp_path / "conf").mkdir()
    (tmp_path / "pipe.yaml").write_text(spec, encoding="utf-8")
    base = "version: 1\npipeline: {source: ../models/digits}\n"
    (tmp_path / "conf" / "base.yaml").write_text(base, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert command(*line.split(), STEPS="12").stdout == shown


def test_config_refuses_what_is_wrong(files: Path) -> None:
    """A spec that is not right is not printed."""
    result = command("config", files, "--set", "reserve=much")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error[DM208 bad-size]: --set reserve=much\n")


@pytest.mark.parametrize("verb", ["validate", "plan", "config"])
def test_every_verb_takes_profiles_and_overlays(files: Path, verb: str) -> None:
    """Also from the environment; an unknown profile or a missing overlay is told by all of them."""
    machine = ("--gpus", "2x1GiB", "--ram", "4GiB") if verb == "plan" else ()
    assert command(verb, files, "--profile", "prod", "--overlay", "boxes/gpu.yaml", *machine).exit_code == 0
    assert command(verb, files, *machine, DMCONFIG_PROFILE="prod").exit_code == 0
    for options in (("--profile", "pord"), ("-f", "boxes/cpu.yaml")):
        result = command(verb, files, *options)
        assert (result.exit_code, result.output.count("error[")) == (2, 1)


@pytest.mark.parametrize("verb", ["validate", "plan", "config", "rehearse", "run"])
def test_every_verb_documents_its_layers(verb: str) -> None:
    """The options are the same everywhere."""
    text = command(verb, "--help", COLUMNS="200").output
    assert "--profile" in text
    assert "--overlay" in text
    assert "-f" in text


def test_validate_checks_the_profiles_that_are_not_chosen(files: Path) -> None:
    """Their shape, on any machine: each problem with the profile's name; unset variables are for elsewhere."""
    profiles = "profiles:\n  prod: {low_memory: off-load}\n  other: {low_memry: none}\n  far: {reserve: '${FAR}'}\n"
    files.write_text(f"extends: conf/base.yaml\n{profiles}", encoding="utf-8")
    result = command("validate", files)
    told = [line[:57] for line in result.stderr.splitlines() if line.startswith(("error", "  what"))]
    assert (result.exit_code, told) == (
        2,
        [
            "error[DM205 bad-value]: pipe.yaml:3:22",
            "  what with profile prod: 'off-load' is not accepted; one",
            "error[DM202 unknown-key]: pipe.yaml:4:11",
            "  what with profile other: unknown key 'low_memry'",
        ],
    )


def test_validate_tells_a_problem_of_several_profiles_once(files: Path) -> None:
    """What is wrong in a place is wrong there, whichever profile shows it."""
    text = "extends: conf/base.yaml\nprofiles:\n  one: &same {reserve: much}\n  two: *same\n"
    files.write_text(text, encoding="utf-8")
    assert command("validate", files).stderr.count("error[") == 1


def test_paths_of_adapters_and_of_several_models_start_where_the_printed_file_is(tmp_path: Path) -> None:
    """Like every other path of a file that is extended: wherever it stands in the spec."""
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "base.yaml").write_text(
        "version: 1\npipeline: {source: ./one.safetensors, config: ./sd}\n"
        "components: {controlnet: [{source: ./edges}], vae: {source: ./vae.safetensors, config: ./vae}}\n"
        "adapters: {lora: [{source: ./ink.safetensors}, {source: me/ink, weight_name: ./a}]}\n"
    )
    file = tmp_path / "spec.yaml"
    file.write_text("version: 1\nextends: shared/base.yaml\n")
    data = config_data(resolve_file(file), tmp_path)
    assert data["pipeline"] == {"source": "./shared/one.safetensors", "config": "./shared/sd"}
    assert data["components"] == {
        "controlnet": [{"source": "./shared/edges"}],
        "vae": {"source": "./shared/vae.safetensors", "config": "./shared/vae"},
    }
    assert data["adapters"]["lora"] == [
        {"source": "./shared/ink.safetensors"}, {"source": "me/ink", "weight_name": "./a"},
    ]  # fmt: skip
