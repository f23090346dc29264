"""``dmconfig init``: a first spec for a pipeline, planned for a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from dmconfig.cli import app
from dmconfig.inventory import parse_machine
from dmconfig.load import plan_from_yaml
from dmconfig.starter import device_map_of

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "digits" / "pipeline"
FLUX = "black-forest-labs/FLUX.1-dev"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def init(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["init", *map(str, arguments)])


def machine(gpus: str, ram: str) -> tuple[str, ...]:
    return ("--gpus", gpus, "--ram", ram)


@pytest.mark.parametrize("source", [DIGITS, DIGITS / "model_index.json"], ids=["folder", "index"])
def test_init_writes_a_spec_of_a_folder_relative_to_the_file(source: Path, tmp_path: Path) -> None:
    """A folder, or its index, becomes a relative path, and what is written is valid, also from elsewhere."""
    (tmp_path / "deep").mkdir()
    result = init(source, "--out", "deep/spec.yaml", *machine("24GiB", "64GiB"))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "wrote deep/spec.yaml\n", "")
    text = Path("deep/spec.yaml").read_text()
    assert "\n  source: ../" in text
    assert str(tmp_path) not in text
    assert "\ndevice_map: cuda:0\n" in text
    assert CliRunner().invoke(app, ["validate", "deep/spec.yaml"]).exit_code == 0


def test_init_relative_folder_starts_in_the_current_folder(tmp_path: Path) -> None:
    """The source is what a shell completes; in the file it starts where the file is."""
    (tmp_path / "model").symlink_to(DIGITS)
    assert init("model", *machine("24GiB", "64GiB")).exit_code == 0
    assert "\n  source: ./model\n" in Path("pipe.yaml").read_text()


def test_init_of_a_hub_id_explains_itself(tmp_path: Path) -> None:
    """The whole text: what it is for, where everything goes and how large it is, and what to change next."""
    assert init(FLUX, *machine("2x24GiB", "64GiB")).exit_code == 0
    assert Path("pipe.yaml").read_text() == (
        "# FluxPipeline on --gpus 2x24GiB --ram 64GiB: a first spec, to be changed at will.\n"
        "#\n"
        "#   dmconfig plan pipe.yaml\n"
        "#   dmconfig run pipe.yaml --prompt ... --out picture.png\n"
        "#   dmconfig explain KEY\n"
        "version: 1\n"
        "\n"
        "pipeline:\n"
        "  source: black-forest-labs/FLUX.1-dev\n"
        "  # dtype: bfloat16                   # default: as stored, bfloat16\n"
        "  # revision: <commit>                # dmconfig pin writes it; for deployments\n"
        "\n"
        "# Planned with balanced: no weights move during a generation.\n"
        "# device_map: balanced plans anew on whatever machine the file is used.\n"
        "device_map:\n"
        "  vae: cuda:1             # 159.9 MiB\n"
        "  text_encoder: cuda:1    # 234.7 MiB\n"
        "  text_encoder_2: cuda:1  # 8.9 GiB\n"
        "  transformer: cuda:0     # 22.2 GiB\n"
        "\n"
        "# max_memory: {cuda:0: 90%}           # the most that may be used of a device\n"
        "# reserve: 1.5GiB                     # kept free for activations; larger pictures need more\n"
        "# low_memory: cpu_offload_with_hook   # with balanced: what does not fit is brought to run\n"
        "# call:\n"
        "#   num_inference_steps: 28\n"
        "#   guidance_scale: 3.5\n"
        "#   seed: 0\n"
    )


@pytest.mark.parametrize(
    ("gpus", "ram"),
    [
        ("80GiB", "64GiB"),
        ("2x24GiB", "64GiB"),
        ("16GiB,12GiB", "64GiB"),
        ("24GiB", "64GiB"),
        ("8GiB", "64GiB"),
        ("0", "128GiB"),
    ],
)
def test_init_leads_to_the_plan_that_it_found(gpus: str, ram: str) -> None:
    """On the machine it was written for, the spec is planned, and as fast as the strategy auto has it at best."""
    assert init(FLUX, *machine(gpus, ram)).exit_code == 0
    here = parse_machine(gpus, ram)
    plan = plan_from_yaml("pipe.yaml", inventory=here)
    best = plan_from_yaml("pipe.yaml", {"device_map": "auto"}, inventory=here)
    assert plan.seconds <= best.seconds * 1.001


def test_device_map_of_a_plan_says_what_the_plan_decided() -> None:
    """Components that stay, are brought in any way, rest on disk or are split are written as a file would say it."""
    given = {
        "vae": "cpu",
        "text_encoder": {"execution": "cuda:1", "offload": "model"},
        "text_encoder_2": {"execution": "cuda:0", "offload": "sequential", "storage": "disk"},
        "transformer": "cuda:0",
        "transformer.single_transformer_blocks": "cuda:1",
        "transformer.norm_out": {"execution": "cuda:0", "offload": "sequential"},
    }
    Path("spec.yaml").write_text(yaml.safe_dump({"version": 1, "pipeline": {"source": FLUX}, "device_map": given}))
    plan = plan_from_yaml("spec.yaml", inventory=parse_machine("2x24GiB", "64GiB", disk="100GiB"))
    assert device_map_of(plan) == given


def test_device_map_of_a_plan_on_one_device_is_that_device() -> None:
    """Where everything stays on one device, that is all there is to say."""
    Path("spec.yaml").write_text(yaml.safe_dump({"version": 1, "pipeline": {"source": FLUX}}))
    assert device_map_of(plan_from_yaml("spec.yaml", inventory=parse_machine("80GiB", "64GiB"))) == "cuda:0"


def test_init_does_not_overwrite_without_being_told_to() -> None:
    """A file that is there stays as it is, before anything is planned; --force replaces it."""
    Path("pipe.yaml").write_text("mine\n")
    result = init(FLUX, *machine("80GiB", "64GiB"))
    assert (result.exit_code, Path("pipe.yaml").read_text()) == (2, "mine\n")
    assert result.stderr == (
        "error[DM107 file-not-written]: --out\n"
        "  what pipe.yaml is not written: it exists\n"
        "  fix  name another file with --out, or replace it with --force\n"
    )
    assert init(FLUX, "--force", *machine("80GiB", "64GiB")).exit_code == 0
    assert Path("pipe.yaml").read_text().startswith("# FluxPipeline")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (("nowhere", *machine("24GiB", "64GiB")), 2, "'nowhere' is neither a folder nor a hub id"),
        (("./nowhere", *machine("24GiB", "64GiB")), 2, "there is no folder"),
        ((f"{FLUX[:-1]}", *machine("24GiB", "64GiB")), 2, "did you mean 'black-forest-labs/FLUX.1-dev'?"),
        ((FLUX, *machine("many", "64GiB")), 2, "error[DM502 bad-machine]"),
        ((FLUX, "--disk", "0GiB", *machine("4GiB", "4GiB")), 3, "error[DM503 does-not-fit]"),
    ],
    ids=["word", "folder", "misspelt", "machine", "too-small"],
)  # fmt: skip
def test_init_that_cannot_be_writes_nothing(arguments: tuple[str, ...], exit_code: int, says: str) -> None:
    """No pipeline, no machine, no room: a report, placed at the command, and no file."""
    result = init(*arguments)
    assert (result.exit_code, Path("pipe.yaml").exists()) == (exit_code, False)
    assert says in result.stderr
    assert "pipe.yaml:" not in result.stderr


def test_init_makes_the_folder_of_the_file() -> None:
    """As every verb that writes a file does."""
    assert init(FLUX, "--out", "new/spec.yaml", *machine("80GiB", "64GiB")).exit_code == 0
    assert Path("new/spec.yaml").is_file()


def test_init_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    """A file where the folder would be is no traceback."""
    Path("taken").write_text("")
    result = init(FLUX, "--out", "taken/spec.yaml", *machine("80GiB", "64GiB"))
    assert (result.exit_code, Path("taken").read_text()) == (2, "")
    assert "error[DM107 file-not-written]: --out" in result.stderr
