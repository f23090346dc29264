from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dmconfig import inventory as module
from dmconfig.errors import Code, MachineError
from dmconfig.inventory import Device, Inventory, parse_machine, probe_machine
from dmconfig.units import GIB
from tests.conftest import inventory, only_problem


def sizes(machine: Inventory) -> list[tuple[str, int, int]]:
    return [(device.id, device.total_bytes, device.free_bytes) for device in machine.devices]


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ("24GiB", [24 * GIB]),
        ("1x24GiB", [24 * GIB]),
        ("2x24GiB", [24 * GIB] * 2),
        ("2 x 24GiB", [24 * GIB] * 2),
        ("2x24GiB,12GiB", [24 * GIB, 24 * GIB, 12 * GIB]),
        (" 12GiB , 2x24GB ", [12 * GIB, 24 * 10**9, 24 * 10**9]),
        ("0", []),
        ("none", []),
        ("", []),
        ("0x24GiB", []),
    ],
)
def test_parse_machine_groups_of_accelerators(gpus: str, expected: list[int]) -> None:
    """Groups are counted on in their own order; all of a stated device is free."""
    machine = parse_machine(gpus, "64GiB")
    accelerators = [(f"cuda:{index}", size, size) for index, size in enumerate(expected)]
    assert sizes(machine) == [*accelerators, ("cpu", 64 * GIB, 64 * GIB)]
    assert machine.name == f"--gpus {gpus} --ram 64GiB"


@pytest.mark.parametrize(
    ("gpus", "ram", "flag", "what"),
    [
        ("2x24Gb", None, "--gpus", "unit 'Gb' is not accepted"),
        ("2x", None, "--gpus", "'x' is not a unit of memory"),
        ("x24GiB", None, "--gpus", "'x24GiB' is not a size"),
        ("-1x24GiB", None, "--gpus", "'-1x24GiB' is not a size"),
        ("24GiB,", None, "--gpus", "'' is not a group of accelerators"),
        ("80%", None, "--gpus", "'80%' is not a size"),
        ("a100", None, "--gpus", "'a100' is not a size"),
        ("24GiB", "lots", "--ram", "'lots' is not a size"),
        ("24GiB", "80%", "--ram", "'80%' is not a size"),
        (None, "-1GiB", "--ram", "'-1GiB' is not a size"),
    ],
)
def test_parse_machine_refused_names_the_flag(gpus: str | None, ram: str | None, flag: str, what: str) -> None:
    """What cannot be read is shown at its flag, with a way to write it."""
    with pytest.raises(MachineError) as caught:
        parse_machine(gpus, ram)
    problem = only_problem(caught.value)
    assert (problem.code, problem.origin, caught.value.exit_code) == (Code.BAD_MACHINE, flag, 2)
    assert problem.what.startswith(what)
    assert problem.fix.startswith(f"write {flag}")


@pytest.mark.parametrize("gpus", ["2", "2x24", "24GiB,8"])
def test_parse_machine_number_without_unit_is_refused(gpus: str) -> None:
    """Two accelerators, or 24 of something, are meant; no accelerator has 2 or 24 bytes."""
    with pytest.raises(MachineError, match="has a count or a size without a unit"):
        parse_machine(gpus, None)


def test_parse_machine_too_many_accelerators_are_refused_at_once() -> None:
    """A count with too many digits does not fill memory with devices; as many as a machine has are fine."""
    assert len(parse_machine("64x1GiB", None).accelerators) == 64
    for gpus in ("65x1GiB", "999999999x1GiB", "60x1GiB,5x2GiB"):
        with pytest.raises(MachineError, match="more than one machine has"):
            parse_machine(gpus, None)


def test_parse_machine_both_flags_are_told_at_once() -> None:
    """Two flags that cannot be read are two problems."""
    with pytest.raises(MachineError) as caught:
        parse_machine("lots", "much")
    assert [problem.origin for problem in caught.value.problems] == ["--gpus", "--ram"]


def test_parse_machine_what_is_not_stated_is_this_machine() -> None:
    """One flag alone changes that much of the machine one has; without one, none and 64 GiB."""
    here = inventory(cuda=[8], cpu=16, free={"cuda:0": 7})
    assert sizes(parse_machine("24GiB", None, this_machine=here)) == [
        ("cuda:0", 24 * GIB, 24 * GIB),
        ("cpu", 16 * GIB, 16 * GIB),
    ]
    assert sizes(parse_machine(None, "32GiB", this_machine=here)) == [
        ("cuda:0", 8 * GIB, 7 * GIB),
        ("cpu", 32 * GIB, 32 * GIB),
    ]
    assert sizes(parse_machine(None, None)) == [("cpu", 64 * GIB, 64 * GIB)]
    assert parse_machine("0", None, this_machine=here).accelerators == ()


def cgroup(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, limit: str | None, use: str | None, stat: str | None = None
) -> None:
    """Make the control group's files say this; None: there is no such file."""
    tables = (("limit", "_CGROUP_LIMITS", limit), ("use", "_CGROUP_USE", use), ("stat", "_CGROUP_STAT", stat))
    for name, table, content in tables:
        file = folder / name
        if content is not None:
            file.write_text(content)
        monkeypatch.setattr(module, table, (str(folder / "not there"), str(file)))


def host(monkeypatch: pytest.MonkeyPatch, *, total: int, available: int) -> Device:
    memory = SimpleNamespace(total=total * GIB, available=available * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return probe_machine().host


@pytest.mark.parametrize(
    ("limit", "use", "offer"),
    [
        # the host has 64 GiB, of which 40 are available
        (None, None, (64, 40)),
        ("max\n", "1073741824\n", (64, 40)),
        ("9223372036854771712\n", "1073741824\n", (64, 40)),  # version 1 says "no limit" like this
        (f"{64 * GIB}\n", f"{60 * GIB}\n", (64, 40)),  # a limit of all there is limits nothing
        (f"{16 * GIB}\n", f"{6 * GIB}\n", (16, 10)),
        (f"{48 * GIB}\n", f"{2 * GIB}\n", (48, 40)),  # 46 within the limit, and the host has 40
        (f"{16 * GIB}\n", f"{17 * GIB}\n", (16, 0)),  # never negative
        (f"{16 * GIB}\n", None, (16, 16)),
    ],
)
def test_probe_machine_container_limit_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str | None, use: str | None, offer: tuple[int, int]
) -> None:
    """Host memory is the container's where that is less; what it uses already is not free."""
    cgroup(monkeypatch, tmp_path, limit=limit, use=use)
    found = host(monkeypatch, total=64, available=40)
    assert (found.total_bytes, found.free_bytes) == (offer[0] * GIB, offer[1] * GIB)


def test_probe_machine_agrees_with_psutil(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a container, host memory is what psutil says, within what other programs do meanwhile."""
    cgroup(monkeypatch, tmp_path, limit=None, use=None)
    found = probe_machine().host
    assert found.total_bytes == psutil.virtual_memory().total
    assert abs(found.free_bytes - psutil.virtual_memory().available) < GIB


def test_probe_machine_is_consistent() -> None:
    """On this machine, whatever it is: nothing has more free than in all, and the cpu comes last."""
    machine = probe_machine()
    assert machine.name == "this machine"
    assert machine.devices[-1].id == "cpu"
    assert all(0 <= device.free_bytes <= device.total_bytes for device in machine.devices)


def accelerator(kind: str | None, count: int) -> SimpleNamespace:
    return SimpleNamespace(
        is_available=lambda: kind is not None,
        current_accelerator=lambda: SimpleNamespace(type=kind) if kind else None,
        device_count=lambda: count,
    )


def test_probe_machine_accelerators_as_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device of torch's accelerator is listed, with its own name and its own free memory."""
    cuda = SimpleNamespace(
        get_device_name=lambda index: f"Toy {index}", mem_get_info=lambda index: ((20 + index) * GIB, 24 * GIB)
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(accelerator=accelerator("cuda", 2), cuda=cuda))
    assert probe_machine().accelerators == (
        Device(id="cuda:0", description="Toy 0", total_bytes=24 * GIB, free_bytes=20 * GIB),
        Device(id="cuda:1", description="Toy 1", total_bytes=24 * GIB, free_bytes=21 * GIB),
    )


def test_probe_machine_backend_without_memory_shares_the_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An accelerator that cannot tell its memory (mps) has the host's."""
    cgroup(monkeypatch, tmp_path, limit=None, use=None)
    fake = SimpleNamespace(accelerator=accelerator("mps", 1), mps=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch", fake)
    found = host(monkeypatch, total=32, available=20)
    (device,) = probe_machine().accelerators
    assert device == Device(id="mps:0", description="mps", total_bytes=found.total_bytes, free_bytes=found.free_bytes)


def test_probe_machine_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that finds none gives none."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(accelerator=accelerator(None, 0)))
    assert probe_machine().accelerators == ()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has device files to look at")
def test_probe_machine_without_a_sign_of_one_imports_no_torch() -> None:
    """Where no device file hints at an accelerator, torch is not imported to find none."""
    code = (
        "import sys, dmconfig.inventory as inventory\n"
        "inventory._DEVICE_FILES = ('no such device*',)\n"
        "assert inventory.probe_machine().accelerators == ()\n"
        "assert not {'torch', 'diffusers', 'transformers', 'accelerate'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has device files to look at")
def test_probe_machine_with_a_sign_of_one_asks_torch() -> None:
    """Where a device file is there, torch is asked: /dev/null stands for one here."""
    code = (
        "import sys, dmconfig.inventory as inventory\n"
        "inventory._DEVICE_FILES = ('null',)\n"
        "inventory.probe_machine()\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("word", ["inactive_file", "total_inactive_file"])
def test_probe_machine_cached_files_do_not_count_as_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """Of 16 GiB, 10 are in use, 8 of them pages of files read before, which give way: 14 are free."""
    stat = f"anon {2 * GIB}\nfile {8 * GIB}\n{word} {8 * GIB}\n"
    cgroup(monkeypatch, tmp_path, limit=str(16 * GIB), use=str(10 * GIB), stat=stat)
    offer = host(monkeypatch, total=64, available=60)
    assert (offer.total_bytes, offer.free_bytes) == (16 * GIB, 14 * GIB)
