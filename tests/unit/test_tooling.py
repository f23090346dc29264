"""What teams put into their tools: the hooks for pre-commit, the workflow for GitHub, and the reports in the README."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dmconfig.cli import app
from dmconfig.cli.verbs import VERBS

ROOT = Path(__file__).resolve().parents[2]
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
WORKFLOW = yaml.safe_load((ROOT / "examples" / "ci" / "github.yml").read_text(encoding="utf-8"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands_of_workflow() -> list[str]:
    """Return the commands of ours that the workflow runs."""
    runs = [step["run"] for step in WORKFLOW["jobs"]["validate"]["steps"] if "run" in step]
    return [run for run in runs if run.startswith("dmconfig")]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook["id"])
def test_hook_is_what_pre_commit_asks_for_and_its_command_runs(hook: dict[str, object], tmp_path: Path) -> None:
    """Each hook has the keys it needs, and its command takes files: right ones pass, wrong ones fail."""
    assert {"id", "name", "entry", "language", "files"} <= hook.keys()
    program, *arguments = shlex.split(str(hook["entry"]))
    assert program == "dmconfig"
    assert re.search(str(hook["files"]), "deploy/sdxl.dmconfig.yaml")
    source = ROOT / "examples" / "digits" / "pipeline"
    right, wrong = tmp_path / "right.yaml", tmp_path / "wrong.yaml"
    right.write_text(f"version: 1\npipeline: {{source: {source}}}\n")
    wrong.write_text(f"version: 1\npipeline: {{source: {source}}}\nreserve: much\n")
    assert CliRunner().invoke(app, [*arguments, str(right), str(right)]).exit_code == 0
    assert CliRunner().invoke(app, [*arguments, str(right), str(wrong)]).exit_code == 2


def test_workflow_runs_commands_that_are_there(tmp_path: Path) -> None:
    """The commands of the workflow take a spec, and what they write is what the next step takes."""
    assert len(commands_of_workflow()) == 3
    example = ROOT / "examples" / "digits.yaml"
    for command in commands_of_workflow():
        arguments = shlex.split(command.split(">")[0].replace("deploy/*.yaml", str(example)))[1:]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, command


def test_every_verb_is_in_the_readme_and_has_help() -> None:
    """Nothing that the command can do is left out of the table."""
    for verb in VERBS:
        assert f"| `dmconfig {verb}" in README, verb
        assert CliRunner().invoke(app, [verb, "--help"]).exit_code == 0


def test_readme_shows_real_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three reports in the README are what the command says of the file in the README, word for word."""
    section = README[README.index("## When a file is wrong") :]
    blocks = re.findall(r"```(?:yaml)?\n(.*?)```", section, re.DOTALL)
    spec, session = blocks[0], blocks[1]
    command, report = session.split("\n", 1)
    assert command == "$ dmconfig validate sdxl.yaml"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    Path("sdxl.yaml").write_text(spec, encoding="utf-8")
    result = CliRunner().invoke(app, shlex.split(command)[2:])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == report
    assert report.count("error[DM") == 3


@pytest.mark.skipif(shutil.which("bash") is None, reason="completes in bash")
def test_bash_completes_verbs_keys_and_words_of_options(tmp_path: Path) -> None:
    """By the script that the command prints, in a shell that knows nothing else of it."""
    program = tmp_path / "dmconfig"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dmconfig "$@"\n')
    program.chmod(0o755)
    lines = ["dmconfig vali", "dmconfig explain max_mem", "dmconfig validate --format gi"]
    asked = "\n".join(
        f"COMP_WORDS=({line}); COMP_CWORD={line.count(' ')}; _dmconfig_completion dmconfig; echo ${{COMPREPLY[0]}}"
        for line in lines
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = f'eval "$(dmconfig --show-completion bash)"\n{asked}\n'
    done = subprocess.run(["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["validate", "max_memory", "github"]
