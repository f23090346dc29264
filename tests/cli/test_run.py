"""``dmconfig run``: from a file to a picture, and what stays untouched when it does not get there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dmconfig import load
from dmconfig.cli import app

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "digits.yaml"
FEW_STEPS = ("--call", "num_inference_steps=3", "--set", "device_map=cpu")


def run(out: Path, *arguments: str, file: Path = DIGITS) -> Result:
    """Draw a seven with ``dmconfig run`` in this process, in three steps on the cpu."""
    command = ["run", str(file), "--prompt", "seven", "--out", str(out), *FEW_STEPS, *arguments]
    return CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None}).invoke(app, command)


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test when a pipeline would be loaded."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("a pipeline is loaded")

    monkeypatch.setattr(load, "load_plan", refuse)


@pytest.mark.slow
def test_run_picture_equals_plain_from_pretrained(tmp_path: Path) -> None:
    """The picture of ``--seed 5`` has the same pixels as one drawn by diffusers alone."""
    import torch
    from diffusers import DiffusionPipeline
    from PIL import Image

    out = tmp_path / "new" / "folder" / "seven.png"
    result = run(out, "--seed", "5")
    assert result.exit_code == 0, result.output
    plain = DiffusionPipeline.from_pretrained(ROOT / "examples" / "digits" / "pipeline")
    plain.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(5)
    [expected] = plain("seven", num_inference_steps=3, guidance_scale=3.0, generator=generator).images
    with Image.open(out) as picture:
        assert picture.format == "PNG"
        assert picture.tobytes() == expected.tobytes()
    assert [file.name for file in out.parent.iterdir()] == ["seven.png"]


@pytest.mark.slow
def test_run_text_shows_plan_times_and_file(tmp_path: Path) -> None:
    """The output has the plan, the time of each phase and the file; progress is on stderr."""
    out = tmp_path / "seven.png"
    result = run(out, "--seed", "0")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert lines[0].startswith("StableDiffusionPipeline in float32 on this machine")
    assert lines[-1] == f"wrote {out}"
    assert lines[-2].startswith("took plan ")
    assert all(phase in lines[-2] for phase in ("load", "place", "generate", "save"))
    assert all(f"{phase} ..." in result.stderr for phase in ("plan", "load", "place", "generate", "save"))


@pytest.mark.slow
def test_run_json_is_the_plan_with_files_and_timings(tmp_path: Path) -> None:
    """With ``--format json`` stdout is one JSON object, whatever is shown on stderr."""
    out = tmp_path / "seven.png"
    result = run(out, "--seed", "0", "--format", "json")
    data = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (data["ok"], data["files"]) == (True, [str(out)])
    assert data["device_map"] == {"vae": "cpu", "text_encoder": "cpu", "unet": "cpu"}
    assert list(data["timings"]) == ["plan", "load", "place", "generate", "save"]


@pytest.mark.slow
def test_run_several_images_get_numbered_files(tmp_path: Path) -> None:
    """Of several pictures each goes to a file of its own, and none to the bare name."""
    result = run(tmp_path / "seven.png", "--seed", "0", "--call", "num_images_per_prompt=3")
    names = ["seven-1.png", "seven-2.png", "seven-3.png"]
    assert result.exit_code == 0, result.output
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    assert result.stdout.splitlines()[-3:] == [f"wrote {tmp_path / name}" for name in names]


@pytest.mark.slow
def test_run_failed_call_leaves_an_existing_file_alone(tmp_path: Path) -> None:
    """When the pipeline's call fails, the file that was there stays as it was and nothing is added."""
    out = tmp_path / "seven.png"
    out.write_bytes(b"yesterday's")
    result = run(out, "--call", "height=7", "--call", "width=7")
    assert result.exit_code == 4
    assert result.stderr.splitlines()[-1].startswith("  what the call of StableDiffusionPipeline failed: ValueError:")
    assert "Traceback" not in result.output
    assert out.read_bytes() == b"yesterday's"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("name", ["seven.txt", "seven", "folder.png", "file.png/seven.png"])
def test_run_bad_out_is_refused_before_anything_is_loaded(tmp_path: Path, name: str) -> None:
    """An ending that is no picture's, a folder, or a place in a file is refused with exit 2 at the flag."""
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file.png").write_bytes(b"")
    before = sorted(tmp_path.iterdir())
    result = run(tmp_path / name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error[DM310 bad-command-line]: --out\n")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("arguments", "origin"),
    [
        (["--call", "steps"], "--call steps"),
        (["--call", "generator=3"], "--call generator=3"),
        (["--call", "seed=soon"], "--call seed=soon"),
        (["--seed", "-1"], "--seed"),
        (["--seed", "1", "--call", "seed=2"], "--call seed=2"),
        (["--set", "pipeline.dtype=flaot16"], "--set pipeline.dtype=flaot16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_run_bad_argument_is_refused_at_its_flag(tmp_path: Path, arguments: list[str], origin: str) -> None:
    """A wrong value of the command line is refused before loading, and the place is the flag that gave it."""
    result = run(tmp_path / "seven.png", *arguments)
    heads = [line for line in result.stderr.splitlines() if line.startswith("error[")]
    assert (result.exit_code, result.stdout) == (2, "")
    assert [head.partition(": ")[2] for head in heads] == [origin]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("nothing_is_loaded")
def test_run_wrong_spec_as_json_exits_2(tmp_path: Path) -> None:
    """With ``--format json`` problems are JSON on stdout."""
    result = run(tmp_path / "seven.png", "--set", "zebra=0", "--format", "json")
    data = json.loads(result.stdout)
    assert (result.exit_code, data["ok"]) == (2, False)
    assert [problem["name"] for problem in data["problems"]] == ["unknown-key"]


def test_run_bad_out_as_a_program_imports_no_torch(tmp_path: Path) -> None:
    """A wrong ``--out`` is refused in a fresh process before torch is imported."""
    command = ["run", str(DIGITS), "--prompt", "seven", "--out", str(tmp_path / "seven.txt")]
    script = (
        f"import sys\nfrom dmconfig.cli import app\ntry:\n    app({command!r})\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "2 False\n"


@pytest.mark.parametrize("missing", ["--out", "FILE"])
def test_run_usage_error_exits_2_without_traceback(missing: str) -> None:
    """Without a file or a place for the picture the command ends with exit 2 and no traceback."""
    given = {"FILE": [str(DIGITS)], "--prompt": ["--prompt", "seven"], "--out": ["--out", "seven.png"]}
    words = [word for name, words in given.items() if name != missing for word in words]
    result = CliRunner().invoke(app, ["run", *words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.output
