"""``dmconfig fix``: keys renamed and moved, in place, with everything else as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dmconfig.cli import app
from dmconfig.document import parse_document
from dmconfig.fixing import fixed

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "examples" / "digits" / "pipeline"
OLD = f"""\
# a comment first
version: 1
pipeline:
  "repo_id":   {SOURCE}   # where it is
  torch_dtype: float16    # torch_dtype, in words
device: {{unet: {{'device': cuda:0}}, default: cpu}}   # two of them

components: {{vae: {{torch_dtype: float16}}}}
profiles:
  small:
    gpu: cpu
call: {{prompt: "torch_dtype: x"}}
"""
NEW = f"""\
# a comment first
version: 1
pipeline:
  "source":   {SOURCE}   # where it is
  dtype: float16    # torch_dtype, in words
device_map: {{unet: {{'execution': cuda:0}}, default: cpu}}   # two of them

components: {{vae: {{dtype: float16}}}}
profiles:
  small:
    device_map: cpu
call: {{prompt: "torch_dtype: x"}}
"""


def fix(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["fix", *map(str, arguments)])


def write(folder: Path, content: str | bytes) -> Path:
    file = folder / "spec.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte-order-mark"])
def test_fix_renames_keys_and_keeps_everything_else(end: str, mark: str, tmp_path: Path) -> None:
    """Comments, spacing, quotes, line ends and a byte order mark stay; what is below a renamed key is renamed too."""
    file = write(tmp_path, mark + OLD.replace("\n", end))
    result = fix(file)
    assert (result.exit_code, result.stderr) == (0, "")
    assert file.read_bytes().decode() == mark + NEW.replace("\n", end)


def test_fix_prints_the_difference(tmp_path: Path) -> None:
    """What changed is printed as a patch of the file."""
    file = write(tmp_path, f"version: 1\npipeline: {{source: {SOURCE}}}\ngpu: 0\n")
    assert fix(file).stdout == (
        f"--- {file}\n+++ {file}\n@@ -1,3 +1,3 @@\n version: 1\n pipeline: {{source: {SOURCE}}}\n"
        "-gpu: 0\n+device_map: 0\n"
    )


def test_fix_twice_changes_nothing_more(tmp_path: Path) -> None:
    """A fixed file has nothing to fix, and is not touched."""
    file = write(tmp_path, OLD)
    fix(file)
    os.utime(file, (1, 1))
    result = fix(file)
    assert (result.exit_code, result.stdout) == (0, f"{file}: nothing to fix\n")
    assert file.stat().st_mtime == 1


def test_fix_check_writes_nothing_and_exits_2(tmp_path: Path) -> None:
    """For CI: the difference is shown, the file is not touched, and the exit code says that there is one."""
    file = write(tmp_path, OLD)
    result = fix("--check", file)
    assert (result.exit_code, file.read_text()) == (2, OLD)
    assert "+  dtype: float16" in result.stdout
    assert fix("--check", write(tmp_path, NEW)).exit_code == 0


def test_fix_leaves_what_it_cannot_decide_and_says_so(tmp_path: Path) -> None:
    """Of two names for one key it renames none; other mistakes stay, and are reported after what was fixed."""
    text = f"version: 1\npipeline: {{source: {SOURCE}, torch_dtype: float16}}\ngpu: 0\nplacement: 1\nreserve: much\n"
    file = write(tmp_path, text)
    result = fix(file)
    assert result.exit_code == 2
    assert file.read_text() == text.replace("torch_dtype", "dtype")
    heads = [line.split("]")[0] for line in result.stderr.splitlines() if line.startswith("error[")]
    assert heads == ["error[DM210 renamed-key", "error[DM210 renamed-key", "error[DM208 bad-size"]


def test_fix_of_what_cannot_be_read_writes_nothing(tmp_path: Path) -> None:
    """A syntax error is reported, and the file is as it was."""
    file = write(tmp_path, "gpu: [\n")
    result = fix(file)
    assert (result.exit_code, file.read_text()) == (2, "gpu: [\n")
    assert "DM102" in result.stderr
    assert fix(tmp_path / "none.yaml").exit_code == 2
    assert fix(write(tmp_path, b"gpu: \xff\n")).exit_code == 2


def test_fix_beside_words_that_need_quotes(tmp_path: Path) -> None:
    """What is not clear in one line does not keep the others from being mended."""
    file = write(tmp_path, f"version: 1\npipeline: {{source: {SOURCE}, torch_dtype: float16}}\ncall: {{prompt: off}}\n")
    assert fix(file).exit_code == 2
    assert "{source: " + str(SOURCE) + ", dtype: float16}" in file.read_text()


def test_fix_keeps_the_mode_and_follows_a_link(tmp_path: Path) -> None:
    """The file behind a link is written, with the rights that it had, and nothing is left beside it."""
    file = write(tmp_path, OLD)
    file.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(file)
    fix(link)
    assert (link.is_symlink(), file.read_text(), file.stat().st_mode & 0o777) == (True, NEW, 0o640)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link.yaml", "spec.yaml"]


def test_fix_of_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    """What somebody else has written since is not lost."""
    file = write(tmp_path, OLD)
    change = fixed(file)
    file.write_text("version: 1\n")
    with pytest.raises(Exception, match="changed meanwhile"):
        change.write()
    assert file.read_text() == "version: 1\n"


def test_fix_changes_keys_only(tmp_path: Path) -> None:
    """By the word of the reader: the same values under the new keys, and nothing else."""
    before = parse_document(OLD, name="", folder=tmp_path).data
    after = parse_document(fixed(write(tmp_path, OLD)).after, name="", folder=tmp_path).data
    assert after == {
        "version": 1,
        "pipeline": {"source": before["pipeline"]["repo_id"], "dtype": "float16"},
        "device_map": {"unet": {"execution": "cuda:0"}, "default": "cpu"},
        "components": {"vae": {"dtype": "float16"}},
        "profiles": {"small": {"device_map": "cpu"}},
        "call": before["call"],
    }


MISPLACED = f"""\
version: 1
pipeline:
  source: {SOURCE}
  variant: no         # text
  # for the small card
  enable_model_cpu_offload: true  # slower
torch_dtype: float16  # half
vae:
  fp8: true
components: {{}}
profiles:
  small:
    prompt: x
"""
PLACED = f"""\
version: 1
pipeline:
  source: {SOURCE}
  variant: 'no'         # text
  dtype: float16  # half
# for the small card
low_memory: cpu_offload_with_hook  # slower
components:
  vae:
    layerwise_casting: true
profiles:
  small:
    call:
      prompt: x
"""


def test_fix_moves_keys_and_quotes_words(tmp_path: Path) -> None:
    """Each where its report says that it belongs, with its comments, also in a profile."""
    file = write(tmp_path, MISPLACED)
    fix(file)
    assert file.read_text() == PLACED


def test_fix_moves_nothing_over_what_is_there_and_does_not_offer_it(tmp_path: Path) -> None:
    """The key stays where it is, and its report says where it belongs, and nothing of this command."""
    text = f"version: 1\npipeline: {{source: {SOURCE}, dtype: bf16}}\ntorch_dtype: float16\ndevice_map: cpu\n"
    file = write(tmp_path, text + "components: {vae: {gpu: 0}}\n")
    result = fix(file)
    assert (result.exit_code, file.read_text()) == (2, text + "components: {vae: {gpu: 0}}\n")
    assert "fix  write it as pipeline.dtype\n" in result.stderr
    assert "fix  it belongs under 'device_map.vae'\n" in result.stderr


def test_fix_says_what_it_offered_and_could_not_do(tmp_path: Path) -> None:
    """A block cannot be put into braces that have entries; its report no longer says that this command does it."""
    text = f"version: 1\npipeline: {{source: {SOURCE}}}\nvae:\n  dtype: float32\ncomponents: {{unet: {{}}}}\n"
    file = write(tmp_path, text)
    result = fix(file)
    assert (result.exit_code, file.read_text()) == (2, text)
    assert "fix  it belongs under 'components'\n" in result.stderr


def test_fix_does_not_show_a_secret_and_leaves_it(tmp_path: Path) -> None:
    """What is under a key named like a secret is in no edit that is printed."""
    file = write(tmp_path, f"version: 1\npipeline: {{source: {SOURCE}}}\nprompt: hf_{'a1B2' * 6}\n")
    result = fix(file)
    assert "a1B2" not in result.output
