from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dmconfig import inventory as module
from dmconfig.errors import Code, MachineError
from dmconfig.inventory import Device, Inventory, Link, Speed, pair, parse_machine, probe_machine
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
        ("2xrtx-409", None, "--gpus", "'rtx-409' is not a size such as 24GiB, and no card; did you mean 'rtx-4090'?"),
        ("h100", None, "--gpus", "'h100' is not a size such as 24GiB, and no card; did you mean 'h100-pcie-80gb' or"),
        ("rtx-4090,apple-m1", None, "--gpus", "'rtx-4090,apple-m1' has devices of kind cuda and mps; a build of torch"),
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
    assert device == Device(
        id="mps:0",
        description="mps",
        total_bytes=found.total_bytes,
        free_bytes=found.free_bytes,
    )
    assert probe_machine().unified == ("mps:0",)


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


GB = 10**9


def test_parse_machine_names_of_cards_bring_memory_and_speeds() -> None:
    """A card's name stands where a size may; NVLink joins those cards only that have it."""
    machine = parse_machine("2xa100-sxm-40gb,1x12GiB,RTX-3090", "64GiB")
    assert [(device.id, device.total_bytes) for device in machine.devices] == [
        ("cuda:0", int(39.3 * GIB)),
        ("cuda:1", int(39.3 * GIB)),
        ("cuda:2", 12 * GIB),
        ("cuda:3", int(23.5 * GIB)),
        ("cpu", 64 * GIB),
    ]
    assert machine.speeds == (
        Speed(device="cuda:0", flops_per_s=312 * 10**12),
        Speed(device="cuda:1", flops_per_s=312 * 10**12),
        Speed(device="cuda:3", flops_per_s=71 * 10**12),
    )
    assert machine.links == (
        Link(devices=("cpu", "cuda:0"), bytes_per_s=25 * GB),
        Link(devices=("cpu", "cuda:1"), bytes_per_s=25 * GB),
        Link(devices=("cpu", "cuda:3"), bytes_per_s=25 * GB),
        Link(devices=("cuda:0", "cuda:1"), bytes_per_s=300 * GB),
    )


def test_parse_machine_card_with_unified_memory_has_the_hosts() -> None:
    """An Apple chip has as much memory as the host that is stated beside it."""
    machine = parse_machine("apple-m1-max", "32GiB")
    assert sizes(machine) == [("mps:0", 32 * GIB, 32 * GIB), ("cpu", 32 * GIB, 32 * GIB)]
    assert machine.unified == ("mps:0",)


def test_parse_machine_other_host_memory_is_that_of_a_unified_device_too() -> None:
    """``--ram`` on a machine whose accelerator uses the host's memory states the memory of both."""
    mac = parse_machine("apple-m1", "32GiB")
    assert sizes(parse_machine(None, "16GiB", this_machine=mac)) == [
        ("mps:0", 16 * GIB, 16 * GIB),
        ("cpu", 16 * GIB, 16 * GIB),
    ]


def test_parse_machine_disk() -> None:
    """``--disk`` states what is free; without it the disk is this machine's, or nothing is known of it."""
    here = probe_machine()
    machine = parse_machine("24GiB", "64GiB", disk="200GiB")
    assert machine.disk == Device(id="disk", description="stated", total_bytes=200 * GIB, free_bytes=200 * GIB)
    assert machine.name == "--gpus 24GiB --ram 64GiB --disk 200GiB"
    assert parse_machine("24GiB", "64GiB").disk is None
    assert parse_machine("24GiB", None, this_machine=here).disk == here.disk
    with pytest.raises(MachineError) as caught:
        parse_machine("24GiB", None, disk="much")
    assert (only_problem(caught.value).origin, only_problem(caught.value).fix) == ("--disk", "write --disk 200GiB")


def test_parse_machine_other_accelerators_leave_the_links_of_these_behind() -> None:
    """A link of this machine's accelerators says nothing of the stated ones; the disk's link still holds."""
    links = (
        Link(devices=("cpu", "cuda:0"), bytes_per_s=50 * GB),
        Link(devices=("cpu", "disk"), bytes_per_s=7 * GB),
    )
    speeds = (Speed(device="cpu", flops_per_s=10**12), Speed(device="cuda:0", flops_per_s=10**14))
    here = replace(inventory(cuda=[8], cpu=16), links=links, speeds=speeds, unified=("cuda:0",))
    other, same = parse_machine("24GiB", None, this_machine=here), parse_machine(None, "8GiB", this_machine=here)
    assert (other.links, other.speeds, other.unified) == (links[1:], speeds[:1], ())
    assert (same.links, same.speeds, same.unified) == (links, speeds, ("cuda:0",))


def test_the_disk_is_not_among_the_devices() -> None:
    """What holds for every device (it computes, it has a budget) does not reach the disk."""
    assert [device.id for device in parse_machine("24GiB", "64GiB", disk="1TiB").devices] == ["cuda:0", "cpu"]


def test_bandwidth_defaults_of_each_kind() -> None:
    """A machine of which only sizes are stated has the documented speeds."""
    machine = parse_machine("2x24GiB", "64GiB")
    assert machine.bandwidth("cpu", "cuda:0", pinned=True) == 25 * GB
    assert machine.bandwidth("cuda:0", "cpu", pinned=True) == 25 * GB
    assert machine.bandwidth("cpu", "cuda:0") == 12 * GB
    assert machine.bandwidth("cuda:1", "cuda:0") == 20 * GB
    assert machine.bandwidth("disk", "cpu") == 3 * GB
    assert machine.bandwidth("disk", "cuda:0") == int(2.4 * GB)  # a byte takes 1/3 ns to the host, then 1/12 ns: 5/12
    assert (machine.flops_per_s("cuda:1"), machine.flops_per_s("cpu")) == (25 * 10**12, 5 * 10**11)
    mac = parse_machine("apple-silicon", "16GiB")
    assert (mac.bandwidth("cpu", "mps:0"), mac.flops_per_s("mps:0")) == (30 * GB, 26 * 10**11)


def test_bandwidth_of_ordinary_memory_follows_the_link() -> None:
    """Ordinary host memory is half as fast as the link and at most 12 GB/s, until the machine says otherwise."""
    slow, fast = parse_machine("t4", "64GiB"), parse_machine("h200", "64GiB")
    assert (slow.bandwidth("cpu", "cuda:0", pinned=True), slow.bandwidth("cpu", "cuda:0")) == (12 * GB, 6 * GB)
    assert (fast.bandwidth("cpu", "cuda:0", pinned=True), fast.bandwidth("cpu", "cuda:0")) == (50 * GB, 12 * GB)
    stated = replace(fast, links=(), pageable_bytes_per_s=40 * GB)
    assert stated.bandwidth("cpu", "cuda:0") == 25 * GB  # no more than the link


def test_bandwidth_of_what_is_not_there_is_refused() -> None:
    """A link to itself, or of a device that the machine has not, is a mistake of the caller."""
    machine = parse_machine("24GiB", "64GiB")
    with pytest.raises(ValueError, match="no link to itself"):
        machine.bandwidth("cuda:0", "cuda:0")
    for ends in (("cpu", "cuda:1"), ("cuda:0", "cuda:1"), ("disk", "cuda:1")):
        with pytest.raises(KeyError, match="cuda:1"):
            machine.bandwidth(*ends)
    with pytest.raises(KeyError, match="cuda:1"):
        machine.flops_per_s("cuda:1")
    assert pair("cuda:0", "cpu") == ("cpu", "cuda:0")


def test_probe_machine_disk_is_that_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is the current folder's or the given one's, which need not exist yet."""
    asked: list[Path] = []

    def disk_usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(total=100 * GIB, free=40 * GIB)

    monkeypatch.setattr(module.shutil, "disk_usage", disk_usage)
    monkeypatch.chdir(tmp_path)
    disk = Device(id="disk", description="disk", total_bytes=100 * GIB, free_bytes=40 * GIB)
    assert probe_machine().disk == probe_machine(tmp_path / "not" / "there").disk == disk
    assert asked == [tmp_path, tmp_path]


def test_probe_machine_disk_agrees_with_the_system(tmp_path: Path) -> None:
    """Without any change to it, the probe finds the disk that is there."""
    disk = probe_machine(tmp_path).disk
    assert disk is not None
    assert disk.total_bytes == psutil.disk_usage(str(tmp_path)).total
    assert 0 <= disk.free_bytes <= disk.total_bytes


def test_probe_machine_without_a_current_folder_knows_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder that was removed is no reason to fail."""

    def cwd() -> Path:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "cwd", cwd)
    assert probe_machine().disk is None


def test_probe_machine_known_cards_have_their_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card is recognised by the name torch gives it; its memory is what torch says, not what the table says."""
    cuda = SimpleNamespace(
        get_device_name=lambda index: "NVIDIA A100-SXM4-80GB", mem_get_info=lambda index: (70 * GIB, 80 * GIB)
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(accelerator=accelerator("cuda", 2), cuda=cuda))
    machine = probe_machine()
    assert [device.total_bytes for device in machine.accelerators] == [80 * GIB] * 2
    assert machine.flops_per_s("cuda:1") == 312 * 10**12
    assert machine.bandwidth("cuda:0", "cuda:1") == 300 * GB


def test_probe_machine_no_device_has_more_free_than_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """An integrated GPU that calls more free than its total (seen on Strix Halo: 120 of 62 GiB) has its total."""
    cuda = SimpleNamespace(
        get_device_name=lambda index: "Radeon 8060S", mem_get_info=lambda index: (120 * GIB, 62 * GIB)
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(accelerator=accelerator("cuda", 1), cuda=cuda))
    (device,) = probe_machine().accelerators
    assert (device.total_bytes, device.free_bytes) == (62 * GIB, 62 * GIB)


def test_probe_machine_apple_chip_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Apple chip tells its name under backends, where other kinds tell nothing."""
    backends = SimpleNamespace(mps=SimpleNamespace(get_name=lambda: "Apple M1 Pro"))
    fake = SimpleNamespace(accelerator=accelerator("mps", 1), mps=SimpleNamespace(), backends=backends)
    monkeypatch.setitem(sys.modules, "torch", fake)
    machine = probe_machine()
    assert machine.accelerators[0].description == "Apple M1 Pro"
    assert (machine.flops_per_s("mps:0"), machine.unified) == (52 * 10**11, ("mps:0",))


def test_probe_machine_xpu_that_does_not_tell_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some drivers of Intel's cards answer only with the total; on cuda an error stays an error."""

    def refuse(index: int) -> tuple[int, int]:
        raise RuntimeError("the device does not support querying the available free memory")

    backend = SimpleNamespace(
        get_device_name=lambda index: "Intel(R) Arc(TM) B580 Graphics",
        mem_get_info=refuse,
        get_device_properties=lambda index: SimpleNamespace(total_memory=12 * GIB),
    )
    fake = SimpleNamespace(accelerator=accelerator("xpu", 1), xpu=backend, cuda=backend)
    monkeypatch.setitem(sys.modules, "torch", fake)
    (device,) = probe_machine().accelerators
    assert (device.id, device.total_bytes, device.free_bytes) == ("xpu:0", 12 * GIB, 12 * GIB)
    fake.accelerator = accelerator("cuda", 1)
    with pytest.raises(RuntimeError, match="does not support"):
        probe_machine()


def test_probe_machine_without_accelerators_reads_no_cards() -> None:
    """The table of cards is for names; a machine that has none, and sizes, do without it."""
    code = (
        "import dmconfig.inventory as inventory, dmconfig.cards as cards\n"
        "inventory._DEVICE_FILES = ('no such device*',)\n"
        "inventory.sys.platform = 'linux'\n"
        "inventory.probe_machine()\n"
        "inventory.parse_machine('2x24GiB', '64GiB')\n"
        "assert cards._cards.cache_info().currsize == 0\n"
        "inventory.parse_machine('t4', '64GiB')\n"
        "assert cards._cards.cache_info().currsize == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
