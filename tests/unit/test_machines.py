"""Machine files: what they may say, what is wrong in one and where, names of cards and machines, and writing one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dmconfig import cards
from dmconfig.devices import DEVICE_FORMS
from dmconfig.document import parse_document
from dmconfig.errors import Code, DocumentError, MachineError
from dmconfig.inventory import Device, Inventory, Link, Speed, parse_machine
from dmconfig.machine import machine_data, machine_names, machine_text, named_machine, read_machine
from dmconfig.rates import (
    BANDWIDTH_FORMS,
    FLOPS_FORMS,
    format_bandwidth,
    format_flops,
    parse_bandwidth,
    parse_flops,
)
from dmconfig.units import GIB
from tests.conftest import only_problem

GB = 10**9
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "machines").glob("*.yaml"))
DOCS = ROOT / "docs" / "machines.md"
HOST = "version: 1\nhost: {memory: 64GiB}\n"


def device(name: str, description: str, size: int, *, free: int | None = None) -> Device:
    """Return a device; all of it is free unless ``free`` says less."""
    return Device(id=name, description=description, total_bytes=size, free_bytes=size if free is None else free)


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Read a machine from text; its places name ``machine.yaml``."""
    monkeypatch.chdir(tmp_path)

    def read_text(text: str) -> Inventory:
        Path("machine.yaml").write_text(text)
        return read_machine("machine.yaml")

    return read_text


# ---------------------------------------------------------------- what a file may say


def test_read_machine_every_key(read: Any) -> None:
    """Each figure of the file is in the inventory: sizes, what is free, speeds, and links from the general to one."""
    machine = read(
        "version: 1\n"
        "name: two mixed cards\n"
        "devices:\n"
        "  cuda:1: {memory: 12GiB, free: 11GiB, description: RTX 3060}\n"
        "  cuda:0: {card: rtx-4090, free: 20GiB}\n"
        "  cuda:2: {card: rtx-4090, memory: 48GiB, flops: 160Tflop/s}\n"
        "host: {memory: 64GiB, free: 58GiB, flops: 0.6Tflop/s, description: a Ryzen}\n"
        "disk: {size: 1TiB, free: 200GiB, read: 7GB/s}\n"
        "links: {host: 24GB/s, peer: 20GB/s, cuda:1-cuda:0: 40GB/s, cpu-cuda:2: 50GB/s, pageable: 10GB/s}\n"
    )
    assert machine == Inventory(
        accelerators=(
            device("cuda:0", "NVIDIA GeForce RTX 4090", int(23.5 * GIB), free=20 * GIB),
            device("cuda:1", "RTX 3060", 12 * GIB, free=11 * GIB),
            device("cuda:2", "NVIDIA GeForce RTX 4090", 48 * GIB),
        ),
        host=device("cpu", "a Ryzen", 64 * GIB, free=58 * GIB),
        name="two mixed cards",
        disk=device("disk", "stated", 1024 * GIB, free=200 * GIB),
        links=(
            Link(devices=("cpu", "cuda:0"), bytes_per_s=24 * GB),
            Link(devices=("cpu", "cuda:1"), bytes_per_s=24 * GB),
            Link(devices=("cpu", "cuda:2"), bytes_per_s=50 * GB),
            Link(devices=("cpu", "disk"), bytes_per_s=7 * GB),
            Link(devices=("cuda:0", "cuda:1"), bytes_per_s=40 * GB),
            Link(devices=("cuda:0", "cuda:2"), bytes_per_s=20 * GB),
            Link(devices=("cuda:1", "cuda:2"), bytes_per_s=20 * GB),
        ),
        speeds=(
            Speed(device="cpu", flops_per_s=6 * 10**11),
            Speed(device="cuda:0", flops_per_s=1652 * 10**11),
            Speed(device="cuda:2", flops_per_s=160 * 10**12),
        ),
        pageable_bytes_per_s=10 * GB,
    )


def test_read_machine_least_file(read: Any) -> None:
    """Host memory is all a file has to say: the rest is nothing, or not known."""
    machine = read(HOST)
    assert machine == Inventory(accelerators=(), host=device("cpu", "stated", 64 * GIB), name="machine.yaml")


def test_read_machine_unified_memory_is_what_the_host_has_free(read: Any) -> None:
    """A chip that shares the host's memory offers no more than is free of that."""
    for entry in ("{card: apple-m2}", "{unified: true}"):
        machine = read(f"version: 1\ndevices: {{mps: {entry}}}\nhost: {{memory: 32GiB, free: 20GiB}}")
        (chip,) = machine.accelerators
        assert (chip.id, chip.total_bytes, chip.free_bytes) == ("mps:0", 32 * GIB, 20 * GIB)
        assert machine.unified == ("mps:0",)


def test_read_machine_order_in_the_file_does_not_matter(read: Any) -> None:
    """Accelerators are in the order of their numbers, ten after nine."""
    numbers = [10, 3, 0, 1, 2, 9, 8, 7, 6, 5, 4]
    entries = ", ".join(f"cuda:{number}: {{memory: {number + 1}GiB}}" for number in numbers)
    machine = read(f"{HOST}devices: {{{entries}}}")
    assert [each.total_bytes // GIB for each in machine.accelerators] == list(range(1, 12))


# ---------------------------------------------------------------- what can be wrong


@pytest.mark.parametrize(
    ("text", "code", "place", "what", "fix"),
    [
        ("", Code.MISSING_KEY, "1:1", "the file is empty", "start it with 'version: 1' and 'host: {memory: 64GiB}'"),
        ("version: 1", Code.MISSING_KEY, "1:1", "the key 'host' is missing", "add 'host: {memory: 64GiB}'"),
        ("version: 1\nhost: {}", Code.MISSING_KEY, "2:1", "the key 'memory' is missing", "add 'memory: 64GiB'"),
        (
            "version: 2\nhots: 1",
            Code.UNSUPPORTED_VERSION, "1:10",
            "this machine file is of version 2; this dmconfig reads version 1",
            "upgrade dmconfig: pip install --upgrade dmconfig",
        ),
        (
            "version: true\nhost: {memory: 1GiB}",
            Code.UNSUPPORTED_VERSION, "1:10", "version is true; this dmconfig reads version 1", "write 'version: 1'",
        ),
        (f"{HOST}link: {{}}", Code.UNKNOWN_KEY, "3:1", "unknown key 'link'", "did you mean 'links'?"),
        (f"{HOST}gpus: 2", Code.UNKNOWN_KEY, "3:1", "unknown key 'gpus'", "use 'devices'"),
        (
            f"{HOST}pipeline: {{}}",
            Code.UNKNOWN_KEY, "3:1", "unknown key 'pipeline'",
            "this looks like a pipeline's file; a machine's file has devices, host, disk and links",
        ),
        (f"{HOST}devices: {{0: {{vram: 1GiB}}}}", Code.UNKNOWN_KEY, "3:15", "unknown key 'vram'", "use 'memory'"),
        (
            f"{HOST}devices: {{0: {{memory: 24Gb}}}}",
            Code.BAD_SIZE, "3:23",
            "unit 'Gb' is not accepted (a small b reads as bits; sizes are bytes); write 24GB", "",
        ),
        (
            f"{HOST}devices: {{cuda0: {{memory: 24GiB}}}}",
            Code.BAD_DEVICE, "3:11",
            f"'cuda0' is not a device; accepted are {DEVICE_FORMS}",
            "did you mean 'cuda:0'?",
        ),
        (
            f"{HOST}devices: {{cpu: {{memory: 24GiB}}}}",
            Code.BAD_DEVICE, "3:11", "cpu has a section of its own, beside devices", "did you mean 'cpu'?",
        ),
        (
            f"{HOST}devices:\n  0: {{memory: 1GiB}}\n  cuda:0: {{memory: 1GiB}}",
            Code.DUPLICATE_DEVICE, "5:3", "'0' and 'cuda:0' are the same device, cuda:0", "keep one of the two",
        ),
        (
            f"{HOST}devices:\n  0: {{memory: 1GiB}}\n  cuda:2: {{memory: 1GiB}}",
            Code.BAD_MACHINE, "5:3", "there is a cuda:2, and no cuda:1", "",
        ),
        (
            f"{HOST}devices:\n  0: {{memory: 1GiB}}\n  xpu: {{memory: 1GiB}}",
            Code.BAD_MACHINE, "5:3", "a device of kind xpu beside one of another kind", "",
        ),
        (
            f"{HOST}devices: {{0: 24GiB}}",
            Code.WRONG_TYPE, "3:14", "expected a mapping, found the text '24GiB'", "write 0: {memory: 24GiB}",
        ),
        (
            f"{HOST}devices: {{0: t4}}",
            Code.WRONG_TYPE, "3:14", "expected a mapping, found the text 't4'", "write 0: {card: t4}",
        ),
        (
            "version: 1\nhost: 64GiB",
            Code.WRONG_TYPE, "2:7", "expected a mapping, found the text '64GiB'", "write host: {memory: 64GiB}",
        ),
        (
            f"{HOST}disk: 1TiB",
            Code.WRONG_TYPE, "3:7", "expected a mapping, found the text '1TiB'", "write disk: {free: 1TiB}",
        ),
        (
            f"{HOST}devices: {{0: {{card: rtx-4900}}}}",
            Code.BAD_MACHINE, "3:21", "'rtx-4900' is no card that dmconfig knows", "did you mean 'rtx-4090'?",
        ),
        (
            f"{HOST}devices: {{0: {{card: apple-m1}}}}",
            Code.BAD_MACHINE, "3:21", "apple-m1 is a device of kind mps, not cuda", "name the device mps:0",
        ),
        (
            f"{HOST}devices: {{0: {{description: mine}}}}",
            Code.MISSING_KEY, "3:11", "nothing says how much memory cuda:0 has",
            "write card: rtx-4090, or memory: 24GiB, or unified: true when it uses the host's",
        ),
        (
            f"{HOST}devices: {{0: {{card: t4, free: 15GiB}}}}",
            Code.BAD_MACHINE, "3:31", "15.0 GiB cannot be free of 14.5 GiB", "",
        ),
        (
            "version: 1\nhost: {memory: 1GiB, free: 2GiB}",
            Code.BAD_MACHINE, "2:28", "2.0 GiB cannot be free of 1.0 GiB", "",
        ),
        (
            f"{HOST}disk: {{size: 1GiB, free: 2GiB}}",
            Code.BAD_MACHINE, "3:26", "2.0 GiB cannot be free of 1.0 GiB", "",
        ),
        (
            f"{HOST}links: {{host: 25Gb/s}}",
            Code.BAD_SIZE, "3:15",
            f"'25Gb/s' is not a bandwidth; expected {BANDWIDTH_FORMS}", "",
        ),
        (
            f"{HOST}links: {{hots: 25GB/s}}",
            Code.BAD_MACHINE, "3:9",
            "'hots' is no link; accepted are host, peer, pageable, or two devices: cuda:0-cuda:1, cpu-cuda:0", "",
        ),
        (
            f"{HOST}links: {{cpu-disk: 3GB/s}}",
            Code.BAD_MACHINE, "3:9", "the bandwidth of the disk is not a link; it is disk.read", "",
        ),
        (
            f"{HOST}links: {{cpu-cuda:0: 3GB/s}}",
            Code.NO_SUCH_DEVICE, "3:9", "the machine has no cuda:0", "",
        ),
        (
            f"{HOST}devices: {{0: {{memory: 1GiB}}}}\nlinks: {{cpu-0: 3GB/s, cuda:0-cpu: 3GB/s}}",
            Code.DUPLICATE_DEVICE, "4:23", "'cpu-0' and 'cuda:0-cpu' are the same link", "keep one of the two",
        ),
        (
            "version: 1\nhost: {memory: 1GiB, flops: 600}",
            Code.BAD_SIZE, "2:29",
            f"600 is too few operations a second; expected {FLOPS_FORMS}", "",
        ),
    ],
)  # fmt: skip
def test_read_machine_mistake_is_told_at_its_place(
    read: Any, text: str, code: Code, place: str, *, what: str, fix: str
) -> None:
    """Every mistake has a code, its place in the file, what is wrong, and a fix where one can be known."""
    with pytest.raises(MachineError) as caught:
        read(text)
    problem = only_problem(caught.value)
    assert (problem.code, str(problem.location), problem.what, problem.fix) == (
        code, f"machine.yaml:{place}", what, fix,
    )  # fmt: skip
    assert caught.value.exit_code == 2


def test_read_machine_mistakes_come_together_in_the_order_of_the_file(read: Any) -> None:
    """All mistakes of a kind are told at once."""
    with pytest.raises(MachineError) as caught:
        read("version: 1\nhosts: {}\ndevices:\n  0: {memory: much, fre: 1}\nlinks: {peer: fast}\n")
    found = [(str(problem.location), problem.code) for problem in caught.value.problems]
    assert found == [
        ("machine.yaml:1:1", Code.MISSING_KEY),
        ("machine.yaml:2:1", Code.UNKNOWN_KEY),
        ("machine.yaml:4:15", Code.BAD_SIZE),
        ("machine.yaml:4:21", Code.UNKNOWN_KEY),
        ("machine.yaml:5:15", Code.BAD_SIZE),
    ]


def test_read_machine_number_that_readers_disagree_on_is_refused(read: Any) -> None:
    """A machine file is as strict YAML as a spec; the fix it names is then accepted, and so is a bare exponent."""
    with pytest.raises(DocumentError) as caught:
        read("version: 1\nhost: {memory: 64_000_000_000}")
    problem = only_problem(caught.value)
    assert problem.code is Code.AMBIGUOUS_SCALAR
    assert problem.fix.endswith("or write 64000000000 for a number")
    assert read("version: 1\nhost: {memory: 64000000000, flops: 0.6e12}").flops_per_s("cpu") == 6 * 10**11


def test_read_machine_missing_file_is_told() -> None:
    """A file that is not there is one problem."""
    with pytest.raises(DocumentError, match=r"there is no file nowhere\.yaml"):
        read_machine("nowhere.yaml")


# ---------------------------------------------------------------- names


def test_named_machine_card_is_one_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The name of a card, in capitals or not, is a machine with one, and 64 GiB of host memory."""
    machine = named_machine("L40S")
    assert machine.accelerators == parse_machine("l40s", None).accelerators
    assert (machine.host.total_bytes, machine.name) == (64 * GIB, "l40s and 64.0 GiB of host memory")


@pytest.mark.parametrize("name", machine_names())
def test_named_machine_every_packaged_machine_is_sound(name: str) -> None:
    """Each machine of the package can be read and is called by its own name."""
    machine = named_machine(name)
    assert machine.name == name
    assert machine.accelerators


def test_named_machine_nvlink_joins_all_of_a_dgx() -> None:
    """Eight cards have 28 links to one another."""
    machine = named_machine("dgx-h100")
    peers = [link for link in machine.links if "cpu" not in link.devices]
    assert (len(machine.accelerators), len(peers), {link.bytes_per_s for link in peers}) == (8, 28, {450 * GB})


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("rtx-409", "did you mean 'rtx-4090'?"),
        ("v100", "did you mean 'v100-16gb' or 'v100-32gb'?"),
        ("dgx-h10", "did you mean 'dgx-h100'?"),
        ("something else", "to name a file, write ./something else or end it in .yaml"),
        ("mine", "to name the file, write ./mine"),
    ],
)
def test_named_machine_unknown_name_says_what_was_meant(
    name: str, fix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A name that is none comes with the nearest one, or with how to name a file."""
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text(HOST)
    with pytest.raises(MachineError) as caught:
        named_machine(name)
    problem = only_problem(caught.value)
    assert (problem.code, problem.origin, problem.fix) == (Code.BAD_MACHINE, f"--machine {name}", fix)
    assert problem.why.startswith("known machines: dgx-a100, dgx-h100; known cards: a10, ")
    assert named_machine("./mine").name == "mine"


def test_cards_are_plausible_and_named_once() -> None:
    """Each card has a name torch gives it, that no other has, and figures within what such things have."""
    known = [cards.find_card(name) for name in cards.card_names()]
    reported = [name for card in known if card for name in card.reported]
    assert len(set(reported)) == len(reported) >= len(known) >= 30
    for card in known:
        assert card is not None
        assert card.kind in ("cuda", "mps", "xpu")
        assert card.shares_host == (card.kind == "mps")
        assert card.memory_bytes is None or 8 * GIB < card.memory_bytes < 256 * GIB
        assert card.flops_per_s is None or 10**12 < card.flops_per_s < 10**16
        assert card.host_bytes_per_s in (None, 12 * GB, 25 * GB, 50 * GB)
        assert cards.card_reported_as(card.reported[0]) is card
    assert cards.card_reported_as("Toy 1") is None


def test_cards_have_no_key_that_nobody_reads() -> None:
    """A misspelt key in the packaged table would silently be a figure less."""
    text = (ROOT / "dmconfig" / "data" / "cards.yaml").read_text(encoding="utf-8")
    keys = {key for facts in parse_document(text, name="cards.yaml", folder=ROOT).data.values() for key in facts}
    assert keys == {"reported", "kind", "memory", "flops", "host", "peer"}


def test_documentation_lists_every_card_with_its_memory() -> None:
    """The table of the documentation is the packaged one."""
    rows = {
        line.split("|")[1].strip(" `"): line for line in DOCS.read_text(encoding="utf-8").splitlines() if "|" in line
    }
    for name in cards.card_names():
        card = cards.find_card(name)
        assert card is not None
        size = "the host's" if card.memory_bytes is None else f"{card.memory_bytes / GIB:.1f} GiB"
        speed = "not published" if card.flops_per_s is None else f"{card.flops_per_s / 10**12:g}"
        assert [cell.strip() for cell in rows[name].split("|")[2:4]] == [size, speed], name


# ---------------------------------------------------------------- writing

PROBED = Inventory(
    accelerators=(
        device("cuda:0", 'a "card": #1', 25_250_627_584, free=23 * GIB - 1),
        device("cuda:1", "Toy", 24 * GIB, free=0),
        device("cuda:2", "Toy", 24 * GIB),
    ),
    host=device("cpu", "host memory", 64 * GIB + 1, free=58 * GIB),
    name="this machine",
    disk=device("disk", "disk", 10**12, free=10**11 + 7),
    unified=("cuda:2",),
    speeds=(Speed(device="cpu", flops_per_s=10**9), Speed(device="cuda:0", flops_per_s=123_456_789_012_345)),
    links=(
        Link(devices=("cpu", "cuda:0"), bytes_per_s=25 * GB),
        Link(devices=("cpu", "cuda:1"), bytes_per_s=12_345_678_901),
        Link(devices=("cpu", "disk"), bytes_per_s=3 * GB),
        Link(devices=("cuda:0", "cuda:1"), bytes_per_s=300 * GB),
    ),
    pageable_bytes_per_s=11 * GB,
)


@pytest.mark.parametrize(
    "machine",
    [
        PROBED,
        parse_machine("0", "64GiB"),
        parse_machine("2xh200", "1TiB", disk="3TiB"),
        parse_machine("apple-m1-pro", "32GiB"),
        parse_machine("11x24GiB", "64GiB"),
        *map(named_machine, machine_names()),
        *map(read_machine, EXAMPLES),
    ],
    ids=lambda machine: machine.name,
)
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_written_machine_reads_back_as_the_same(machine: Inventory, suffix: str, tmp_path: Path) -> None:
    """What is written, as YAML or as JSON, is read back as an equal inventory, to the byte."""
    file = tmp_path / f"machine.{suffix}"
    file.write_text(machine_text(machine) if suffix == "yaml" else json.dumps(machine_data(machine)))
    assert read_machine(file) == machine


def test_machine_text_is_this() -> None:
    """The file is short, says sizes in round figures beside exact ones, and names what is only assumed."""
    machine = replace(
        parse_machine("2xrtx-4090", None),
        host=device("cpu", "host memory", 67_401_580_544, free=60 * GIB),
        name="this machine",
        disk=device("disk", "disk", 1024 * GIB, free=200 * GIB),
    )
    assert machine_text(machine) == (
        "# Plan for this machine anywhere: dmconfig plan SPEC --machine THIS_FILE\n"
        "version: 1\n"
        'name: "this machine"\n'
        "devices:\n"
        "  cuda:0:\n"
        '    description: "NVIDIA GeForce RTX 4090"\n'
        "    memory: 24064MiB\n"
        "    free: 24064MiB\n"
        "    flops: 165.2Tflop/s\n"
        "  cuda:1:\n"
        '    description: "NVIDIA GeForce RTX 4090"\n'
        "    memory: 24064MiB\n"
        "    free: 24064MiB\n"
        "    flops: 165.2Tflop/s\n"
        "host:\n"
        '  description: "host memory"\n'
        "  memory: 67401580544  # 62.8 GiB\n"
        "  free: 60GiB\n"
        "disk:\n"
        '  description: "disk"\n'
        "  size: 1TiB\n"
        "  free: 200GiB\n"
        "links:\n"
        "  host: 25GB/s\n"
        "# Assumed, until the file says better: cpu 500Gflop/s, peer 20GB/s, disk.read 3GB/s\n"
    )


def test_machine_text_means_the_same_to_another_reader() -> None:
    """PyYAML, which reads YAML 1.1, finds the values of the JSON form."""
    assert yaml.safe_load(machine_text(PROBED)) == machine_data(PROBED)


# ---------------------------------------------------------------- bandwidths and speeds


@pytest.mark.parametrize(
    ("text", "rate"),
    [("25GB/s", 25 * GB), ("1.5 GiB/s", 3 * GIB // 2), ("900MB/s", 9 * 10**8), ("1.8TB/s", 18 * 10**11), ("7B/s", 7)],
)
def test_parse_bandwidth(text: str, rate: int) -> None:
    """A bandwidth is whole bytes a second."""
    assert parse_bandwidth(text) == rate


@pytest.mark.parametrize(
    "value", ["25GB", "200Gb/s", "25", "GB/s", "-1GB/s", "25G/s", "0GB/s", "", 25, 2.5, True, None]
)
def test_parse_bandwidth_refuses(value: object) -> None:
    """Bits, bare numbers, sizes and nothing at all are no bandwidths."""
    with pytest.raises(ValueError, match="expected a number, a unit of bytes and /s"):
        parse_bandwidth(value)


@pytest.mark.parametrize(
    ("value", "speed"),
    [
        ("165.2Tflop/s", 1652 * 10**11),
        ("600 GFLOPS", 6 * 10**11),
        ("1.307Pflop/s", 1307 * 10**12),
        (6 * 10**11, 6 * 10**11),
        (6.0e11, 6 * 10**11),
    ],
)
def test_parse_flops(value: object, speed: int) -> None:
    """A speed is whole operations a second, with a unit or in full."""
    assert parse_flops(value) == speed


@pytest.mark.parametrize(
    "value", ["165T", "165.2", "0Tflop/s", "-1Tflop/s", 165, -1, 0, True, None, float("nan"), float("inf")]
)
def test_parse_flops_refuses(value: object) -> None:
    """Numbers that lack their unit, and what is no number, are no speeds."""
    with pytest.raises(ValueError, match="expected a number, a unit and flop/s"):
        parse_flops(value)


@pytest.mark.parametrize("number", [1, 999, 10**6, 25 * GB, 12_345_678_901, 18 * 10**11, 10**12 + 10**9, 3 * GIB])
def test_format_bandwidth_is_read_back(number: int) -> None:
    """No digit is lost in writing."""
    assert parse_bandwidth(format_bandwidth(number)) == number


@pytest.mark.parametrize("number", [10**9, 10**9 + 1, 6 * 10**11, 1652 * 10**11, 123_456_789_012_345, 1307 * 10**12])
def test_format_flops_is_read_back(number: int) -> None:
    """No digit is lost in writing."""
    assert parse_flops(format_flops(number)) == number


def test_formats_are_short() -> None:
    """Round numbers are written as people write them."""
    assert [format_bandwidth(25 * GB), format_bandwidth(18 * 10**11), format_bandwidth(9 * 10**8)] == [
        "25GB/s", "1.8TB/s", "900MB/s",
    ]  # fmt: skip
    assert [format_flops(1652 * 10**11), format_flops(5 * 10**11)] == ["165.2Tflop/s", "500Gflop/s"]
