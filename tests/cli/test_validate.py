"""``dmconfig validate``: what it says of right and wrong files, where it says it, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dmconfig.cli import app

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
DIGITS = ROOT / "examples" / "digits.yaml"
PROBLEM_KEYS = {"code", "name", "file", "line", "column", "path", "what", "why", "fix", "origin"}


def validate(*arguments: str | Path) -> Result:
    """Run ``dmconfig validate`` in this process."""
    return CliRunner().invoke(app, ["validate", *map(str, arguments)])


def spec_in(folder: Path, text: str, name: str = "spec.yaml") -> Path:
    """Write a spec of the digits pipeline with more lines at its end, and return the file."""
    file = folder / name
    source = ROOT / "examples" / "digits" / "pipeline"
    file.write_text(f"version: 1\npipeline:\n  source: {source}\n{text}")
    return file


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_validate_example_is_valid(file: Path) -> None:
    """Every example is valid, and says so on stdout alone."""
    result = validate(file)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{file}: valid\n", "")


def test_validate_wrong_file_speaks_on_stderr_and_exits_2(tmp_path: Path) -> None:
    """Problems go to stderr, with file, line and column, and nothing is written to stdout."""
    file = spec_in(tmp_path, "device_map: balaned\n")
    result = validate(file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(
        f"error[DM206 bad-device]: {file}:4:13\n"
        "    4 | device_map: balaned\n"
        "      |             ^^^^^^^\n"
        "  at   device_map\n"
    )


def test_validate_several_files_one_broken_hides_no_other(tmp_path: Path) -> None:
    """A broken file in the middle changes nothing for the files around it."""
    broken = spec_in(tmp_path, "a: [\n")
    wrong = spec_in(tmp_path, "gpu: 0\n", "wrong.yaml")
    missing = tmp_path / "missing.yaml"
    result = validate(EXAMPLES[0], broken, missing, wrong, EXAMPLES[1])
    assert result.exit_code == 2
    assert result.stdout == f"{EXAMPLES[0]}: valid\n{EXAMPLES[1]}: valid\n"
    heads = [line for line in result.stderr.splitlines() if line.startswith("error[")]
    assert heads == [
        f"error[DM102 syntax]: {broken}:5:1",
        f"error[DM101 file-unreadable]: {missing}",
        f"error[DM210 renamed-key]: {wrong}:4:1",
    ]


def test_validate_json_has_stable_keys_and_one_entry_per_file(tmp_path: Path) -> None:
    """JSON is a list with an entry per file, in the order given; each problem has the same keys."""
    wrong = spec_in(tmp_path, "devise_map: balanced\ncall: 3\n")
    result = validate(DIGITS, wrong, "--format", "json")
    right, refused = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (2, "")
    assert right == {"file": str(DIGITS), "ok": True, "problems": []}
    assert (refused["file"], refused["ok"], len(refused["problems"])) == (str(wrong), False, 2)
    assert all(problem.keys() == PROBLEM_KEYS for problem in refused["problems"])
    assert refused["problems"][0] == {
        "code": "DM202",
        "name": "unknown-key",
        "file": str(wrong),
        "line": 4,
        "column": 1,
        "path": "devise_map",
        "what": "unknown key 'devise_map'",
        "why": "the keys accepted here are: version, pipeline, allow_moving_revision, components, quantization, "
        "adapters, pipelines, device_map, execution_device, max_memory, reserve, low_memory, group_offload, "
        "offload_folder, calls, call, extends, profiles",
        "fix": "did you mean 'device_map'?",
        "origin": None,
    }


def test_validate_line_is_a_line_for_each_problem_on_stdout(tmp_path: Path) -> None:
    """What editors and hooks read: a place, a code, and all there is to say; right files say nothing."""
    wrong = spec_in(tmp_path, "gpu: 0\nreserve: much\n")
    missing = tmp_path / "missing.yaml"
    result = validate(DIGITS, wrong, missing, "--format", "line")
    assert (result.exit_code, result.stderr) == (2, "")
    renamed, size, gone = result.stdout.splitlines()
    assert renamed == (
        f"{wrong}:4:1: error DM210: gpu: 'gpu' is called 'device_map' here; gpu -> device_map; "
        f"dmconfig fix {wrong} writes it"
    )
    assert size.startswith(
        f"{wrong}:5:10: error DM208: reserve: 'much' is not a size; expected a whole number of bytes"
    )
    assert gone == (
        f"{missing}:1:1: error DM101: {missing}: there is no file {missing}; "
        "check the path; it is relative to the current folder"
    )


def test_validate_github_is_an_annotation_for_each_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a workflow prints is shown beside the line; files are named as GitHub names them."""
    monkeypatch.chdir(tmp_path)
    spec_in(tmp_path, "gpu: 0\n")
    result = validate("spec.yaml", "--format", "github")
    assert (result.exit_code, result.stderr) == (2, "")
    assert result.stdout == (
        "::error file=spec.yaml,line=4,col=1,title=DM210 renamed-key::"
        "gpu: 'gpu' is called 'device_map' here; gpu -> device_map; dmconfig fix spec.yaml writes it\n"
    )


def test_validate_sarif_is_one_log_of_all_files(tmp_path: Path) -> None:
    """Code scanning takes one log, with results of all files, and the exit code still says whether any is wrong."""
    wrong = spec_in(tmp_path, "gpu: 0\n")
    result = validate(DIGITS, wrong, "--format", "sarif")
    (run,) = json.loads(result.stdout)["runs"]
    assert (result.exit_code, result.stderr) == (2, "")
    (found,) = run["results"]
    assert (found["ruleId"], found["level"]) == ("DM210", "error")
    assert found["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == wrong.as_uri()
    assert validate(DIGITS, "--format", "sarif").exit_code == 0


def test_validate_set_changes_a_key_for_all_files() -> None:
    """``--set`` is applied before the check, and its problems are placed at the flag."""
    result = validate(DIGITS, "--set", "pipeline.dtype=float16", "--set", "device_map=cuda:1")
    assert result.exit_code == 0
    result = validate(DIGITS, "--set", "pipeline.dtype=flaot16", "--format", "json")
    [verdict] = json.loads(result.stdout)
    [problem] = verdict["problems"]
    assert result.exit_code == 2
    assert (problem["file"], problem["origin"]) == (None, "--set pipeline.dtype=flaot16")


def test_validate_relative_source_starts_at_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder means the same from whichever folder the command is run."""
    monkeypatch.chdir(tmp_path)
    assert validate(DIGITS).exit_code == 0
    assert validate(os.path.relpath(DIGITS, tmp_path)).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate"],
        ["validate", "x.yaml", "--sett", "a=b"],
        ["validate", "x.yaml", "--format", "xml"],
        ["check", "x"],
    ],
    ids=["no-file", "unknown-option", "unknown-format", "unknown-verb"],
)
def test_usage_error_exits_2_without_traceback(arguments: list[str]) -> None:
    """A wrong command line ends with exit 2, a usage line on stderr, and no traceback."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage:" in result.stderr
    assert "Traceback" not in result.output


def test_validate_as_a_program_imports_no_torch() -> None:
    """Validating all examples in a fresh process imports neither torch nor diffusers nor transformers."""
    script = (
        "import sys\nfrom dmconfig.cli import app\n"
        f"try:\n    app(['validate', *{[str(file) for file in EXAMPLES]!r}])\n"
        "except SystemExit as end:\n    print(end.code, {'torch', 'diffusers', 'transformers'} & sys.modules.keys())\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "0 set()"


def codes_of(result: Result) -> list[str]:
    """The codes of the problems on stderr, with their lines."""
    heads = [line for line in result.stderr.splitlines() if line.startswith("error[")]
    return [f"{head[6:11]} {head.rpartition(':')[0].rpartition(':')[2]}" for head in heads]


@pytest.mark.parametrize(
    ("line", "code"),
    [("group_offload: {use_stream: true}", "DM308"), ("group_offload: {type: leaf_level}", "DM210")],
    ids=["rule", "shape"],
)
def test_validate_tells_missing_weights_beside_what_else_is_wrong(tmp_path: Path, line: str, code: str) -> None:
    """Weights that are not there and something wrong elsewhere in the file are two problems of one run."""
    folder = tmp_path / "pipeline"
    shutil.copytree(ROOT / "examples" / "digits" / "pipeline", folder)
    for weights in (folder / "unet").glob("*.safetensors"):
        weights.unlink()
    file = tmp_path / "spec.yaml"
    file.write_text(f"version: 1\npipeline:\n  source: {folder}\n{line}\n")
    result = validate(file)
    assert result.exit_code == 2
    assert codes_of(result) == ["DM404 3", f"{code} 4"]


def test_validate_tells_a_wrong_profile_beside_a_wrong_file_and_nothing_twice(tmp_path: Path) -> None:
    """A profile's problem waits for no other; one of the file itself, which every profile has too, is told once."""
    file = spec_in(
        tmp_path, "device_map: balaned\nreserve: 2 gigs\nprofiles:\n  a: {device_map: cpu:1}\n  b: {low_memory: much}\n"
    )
    result = validate(file)
    assert (result.exit_code, sorted(codes_of(result))) == (2, sorted(codes_of(result)))
    lines = [code.partition(" ")[2] for code in codes_of(result)]
    assert sorted(lines) == ["4", "5", "7", "8"]
    assert result.stderr.count("with profile ") == 2
