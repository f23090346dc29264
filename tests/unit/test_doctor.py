"""``dmconfig doctor``: everything a bug report needs, nothing secret, and a verdict on copies between devices."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dmconfig import doctor
from dmconfig.cli import app
from dmconfig.doctor import ENVIRONMENT, Examination, examination_data, examination_text, examine
from dmconfig.transfers import TransferFailure
from dmconfig.units import MIB
from dmconfig.version import __version__
from tests.conftest import inventory
from tests.virtual_devices import MakeMachine

ZEROS = TransferFailure(source="cuda:0", destination="cuda:1", wrong_bytes=8, total_bytes=9, all_zero=True)
REFUSED = TransferFailure(
    source="cpu", destination="cuda:1", wrong_bytes=0, total_bytes=0, all_zero=False, error="RuntimeError: no"
)
Fake = Callable[..., Examination]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the variables that are shown is set, and there is no token, unless a test says so."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Give a function that examines a toy machine whose copies fail as told."""

    def make(*failures: TransferFailure, cuda: tuple[float, ...] = (24, 24), cpu: float = 64) -> Examination:
        monkeypatch.setattr(doctor, "probe_machine", lambda: inventory(cuda=cuda, cpu=cpu))
        monkeypatch.setattr(doctor, "check_transfers", lambda _devices: failures)
        return examine()

    return make


def section(text: str, title: str) -> list[str]:
    """Return the lines of one section of the text."""
    (block,) = [block for block in text.split("\n\n") if block.splitlines()[0] == title]
    return [line.strip() for line in block.splitlines()[1:]]


def states(examination: Examination) -> dict[tuple[str, str], str]:
    """Return the state of each way."""
    return {(link.source, link.destination): link.state for link in examination.links}


def set_installed(monkeypatch: pytest.MonkeyPatch, requires: list[str], versions: dict[str, str]) -> None:
    """Have dmconfig require these, and these versions be installed."""

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda _name: requires)
    monkeypatch.setattr(importlib.metadata, "version", version)


def test_a_sound_machine_is_examined_whole(virtual_machine: MakeMachine) -> None:
    """On three devices: their memory, every way between them, versions, disks; and nothing is left on them."""
    machine = virtual_machine(count=3, capacity_bytes=64 * MIB)

    found = examine()

    assert [(device.id, device.total_bytes) for device in found.accelerators] == [
        (f"cuda:{index}", 64 * MIB) for index in range(3)
    ]
    assert found.devices[-1].id == "cpu"
    assert states(found) == dict.fromkeys(doctor.ways([device.id for device in found.devices]), "intact")
    assert len(found.links) == 3 + 6
    installed = {package.name: package.installed for package in found.packages}
    for name in ("torch", "diffusers", "transformers", "accelerate", "huggingface_hub", "safetensors"):
        assert installed[name] == importlib.metadata.version(name)
    assert [disk.purpose for disk in found.disks] == ["working folder", "hub cache"]
    assert found.python.endswith(".".join(map(str, sys.version_info[:3])))
    assert (found.problems, found.exit_code) == ((), 0)
    assert [machine.ledger.live_bytes(device.id) for device in found.accelerators] == [0, 0, 0]


def test_json_has_stable_keys_and_the_text_every_section(examined: Fake) -> None:
    """Both renderings hold all of it; the data is JSON as it stands."""
    found = examined()
    data = json.loads(json.dumps(examination_data(found)))
    assert data.keys() == {
        "ok", "dmconfig", "python", "platform", "torch_build", "driver", "packages", "devices", "disks", "copies",
        "hub_token", "environment", "warnings", "problems",
    }  # fmt: skip
    assert (data["ok"], data["dmconfig"], data["problems"]) == (True, __version__, [])
    assert data["packages"][0].keys() == {"name", "installed", "required", "supported"}
    assert data["devices"][0].keys() == {"id", "description", "total_bytes", "free_bytes"}
    assert data["disks"][0].keys() == {"purpose", "folder", "total_bytes", "free_bytes"}
    assert data["copies"][-1] == {
        "source": "cuda:1", "destination": "cuda:0", "state": "intact", "wrong_bytes": 0, "all_zero": False,
        "error": None,
    }  # fmt: skip

    text = examination_text(found)
    assert text.startswith(f"dmconfig {__version__}, {found.python}, {found.platform}\ntorch built for ")
    assert [block.splitlines()[0] for block in text.split("\n\n")[1:]] == [
        "packages", "devices", "disks", "copies between devices", "hub", "environment", "warnings",
    ]  # fmt: skip
    assert section(text, "devices")[0].split("  ") == ["cuda:0", "24.0 GiB free of 24.0 GiB", "toy"]
    assert section(text, "copies between devices") == [
        "cpu to cuda:0 and back  intact",
        "cpu to cuda:1 and back  intact",
        "cuda:0 to cuda:1        intact",
        "cuda:1 to cuda:0        intact",
    ]
    assert section(text, "hub") == ["token  none"]
    assert section(text, "environment") == ["none"]


def test_bytes_that_do_not_survive_are_the_verdict(examined: Fake) -> None:
    """The way is marked, the problem follows with its remedies, and the exit code is 4."""
    found = examined(ZEROS)
    assert states(found)["cuda:0", "cuda:1"] == "corrupt"
    assert found.exit_code == 4

    text = examination_text(found)
    assert "cuda:0 to cuda:1        corrupt: 8 of 9 bytes wrong, all of them zero" in section(
        text, "copies between devices"
    )
    assert "\nerror[DM606 transfer-failed]\n" in text
    data = examination_data(found)
    assert data["ok"] is False
    assert [(problem["code"], bool(problem["fix"])) for problem in data["problems"]] == [("DM606", True)]
    assert (data["copies"][2]["state"], data["copies"][2]["wrong_bytes"]) == ("corrupt", 8)


def test_pairs_behind_a_failing_device_are_not_called_intact(examined: Fake) -> None:
    """What was not tried says so."""
    found = examined(REFUSED)
    assert states(found) == {
        ("cpu", "cuda:0"): "intact",
        ("cpu", "cuda:1"): "failed",
        ("cuda:0", "cuda:1"): "not compared",
        ("cuda:1", "cuda:0"): "not compared",
    }
    assert found.exit_code == 4


@pytest.mark.parametrize(
    ("cuda", "lines"),
    [((), ["no accelerator: nothing to compare"]), ((24,), ["cpu to cuda:0 and back  intact"])],
    ids=["none", "one"],
)
def test_fewer_than_two_accelerators_have_no_pair(cuda: tuple[float, ...], lines: list[str], examined: Fake) -> None:
    """There is nothing to compare between; one accelerator still has its way from the cpu and back."""
    assert section(examination_text(examined(cuda=cuda)), "copies between devices") == lines


def test_nothing_secret_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the token, nor a password in an address, nor the user's name, nor what is not on the list."""
    monkeypatch.undo()
    home = tmp_path / "jane.doe"
    secrets = {
        "HF_TOKEN": "hf_verysecret",
        "HF_ENDPOINT": "https://jane:passw0rd@hub.example:8080/mirror?key=k3y",
        "HF_HOME": f"{home}/models",
        "XDG_CACHE_HOME": str(home),
        "AWS_SECRET_ACCESS_KEY": "aws-secret",
        "HOME": str(home),
        "USERPROFILE": str(home),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)

    found = examine()

    shown = examination_text(found) + json.dumps(examination_data(found))
    for secret in ("verysecret", "passw0rd", "k3y", "jane", "aws-secret", "HF_TOKEN", "AWS_"):
        assert secret not in shown
    assert found.hub_token is True
    assert section(examination_text(found), "hub") == ["token  present, not shown"]
    assert dict(found.environment) == {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_ENDPOINT": "https://hub.example:8080/mirror",
        "HF_HOME": "~/models",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": "~",
    }
    assert found.disks[-1].folder == str(Path("~/models/hub"))


def test_no_name_on_the_list_sounds_like_a_secret() -> None:
    """A guard for whoever adds one."""
    assert not [name for name in ENVIRONMENT if any(word in name for word in ("TOKEN", "KEY", "SECRET", "PASS"))]


def test_what_is_missing_or_too_old_is_a_warning(monkeypatch: pytest.MonkeyPatch, examined: Fake) -> None:
    """Ranges are those of dmconfig's own metadata; development versions count; extras and optional ones do not."""
    set_installed(
        monkeypatch,
        ["torch>=2.8", "accelerate>=1.10", "diffusers<0.50,>=0.38", 'pytest>=8.4; extra == "test"'],
        {"torch": "2.7.1+cu126", "diffusers": "0.41.0.dev0", "peft": "0.1"},
    )
    found = examined()
    assert found.warnings[:2] == (
        "torch 2.7.1+cu126 is not supported; dmconfig needs >=2.8",
        "accelerate is not installed; dmconfig needs accelerate>=1.10",
    )
    assert section(examination_text(found), "packages") == [
        "torch       2.7.1+cu126  needs >=2.8",
        "accelerate  missing      needs >=1.10",
        "diffusers   0.41.0.dev0  <0.50,>=0.38",
        "peft        0.1",
    ]
    assert found.exit_code == 0


def test_a_dmconfig_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch, examined: Fake) -> None:
    """Run from a bare folder there is no metadata, which is no error."""

    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert "dmconfig is not installed as a package, so what it needs is not known here" in examined().warnings


@pytest.mark.parametrize(
    ("cuda", "file", "built_for", "expected"),
    [
        ((), "nvidia0", None, ["NVIDIA device files are there, but torch {} is built for the cpu only"]),
        ((), "kfd", None, ["AMD device files are there, but torch {} is built for the cpu only"]),
        ((), "nvidia0", "12.8", ["NVIDIA device files are there, but torch sees no accelerator"]),
        ((24,), "nvidia0", "12.8", []),
        ((), "nvidiactl", None, []),
    ],
)
def test_an_accelerator_that_torch_has_no_use_for_is_a_warning(  # noqa: PLR0917 - what is expected is a parameter
    cuda: tuple[float, ...],
    file: str,
    built_for: str | None,
    expected: list[str],
    examined: Fake,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The most common mishap of an installation: a torch for the cpu on a machine with a card."""
    (tmp_path / file).touch()
    monkeypatch.setattr(doctor, "_DEVICES", tmp_path)
    monkeypatch.setattr("torch.version.cuda", built_for)
    warnings = [warning.split(";")[0] for warning in examined(cuda=cuda).warnings if "device files" in warning]
    import torch

    assert warnings == [line.format(torch.__version__) for line in expected]


def test_little_memory_and_little_disk_are_warnings(
    examined: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the host's memory and of the disk under the hub cache, which need not exist."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"total": 100 * MIB, "free": 2 * MIB}))
    found = examined(cpu=2)
    assert found.warnings[-2:] == (
        "only 2.0 GiB of host memory is free; weights pass through it on their way",
        "only 2.0 MiB is free under the hub cache; few pipelines are that small",
    )


def test_a_torch_that_cannot_be_imported_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor is asked when something is broken, and answers all the same."""
    monkeypatch.setitem(sys.modules, "torch", None)
    found = examine()
    assert (found.torch_build, found.devices, found.links, found.exit_code) == ("missing", (), (), 0)
    assert [warning.split(":")[0] for warning in found.warnings[:2]] == [
        "torch cannot be imported",
        "the devices cannot be listed",
    ]
    assert "\ntorch is missing; driver" in examination_text(found)


def test_a_driver_that_answers_with_an_error_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that fell off the bus must not take the report with it."""

    def probe_machine() -> Any:
        raise RuntimeError("CUDA error: unknown error\nand so on")

    monkeypatch.setattr(doctor, "probe_machine", probe_machine)
    assert "the devices cannot be listed: RuntimeError: CUDA error: unknown error" in examine().warnings


def test_the_driver_is_what_the_kernel_and_torch_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own version from the kernel's module, and the CUDA it is made for from a torch that has any."""
    import torch

    (tmp_path / "version").write_text("550.40.07\n")
    monkeypatch.setattr(doctor, "_DRIVERS", (("NVIDIA", str(tmp_path / "version")), ("AMD", str(tmp_path / "none"))))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert doctor._driver(torch) == "NVIDIA 550.40.07"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12040, raising=False)
    assert doctor._driver(torch) == "NVIDIA 550.40.07, for CUDA up to 12.4"


@pytest.mark.parametrize(("failures", "exit_code"), [((), 0), ((ZEROS,), 4)])
def test_the_command_prints_and_exits_by_the_verdict(
    failures: tuple[TransferFailure, ...], exit_code: int, examined: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As text and as JSON; both on stdout, to be pasted whole."""
    found = examined(*failures)
    monkeypatch.setattr(doctor, "examine", lambda: found)
    text = CliRunner().invoke(app, ["doctor"])
    assert (text.exit_code, text.stdout, text.stderr) == (exit_code, examination_text(found), "")
    data = CliRunner().invoke(app, ["doctor", "--format", "json"])
    assert (data.exit_code, json.loads(data.stdout)) == (exit_code, examination_data(found))
