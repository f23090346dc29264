"""From a machine file, or a name, to an inventory.

A file of a user's and one of the package's are read alike. Every mistake is a problem at its place in the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from pydantic_core import ErrorDetails

from dmconfig.cards import Card, find_card, unknown_card
from dmconfig.devices import CPU, DISK, parse_device
from dmconfig.document import Document, parse_document, read_document
from dmconfig.errors import Code, MachineError, Problem, nearest
from dmconfig.files import DATA
from dmconfig.inventory import (
    DEFAULT_HOST_BYTES,
    ONE_KIND,
    Device,
    Inventory,
    card_flops,
    card_rates,
    device_of,
    links_of,
    pair,
    parse_machine,
    speeds_of,
    stated,
)
from dmconfig.machine.model import (
    HOST,
    MACHINE_VERSION,
    PAGEABLE,
    PEER,
    AcceleratorEntry,
    DiskEntry,
    HostEntry,
    MachineFile,
    link_of,
)
from dmconfig.paths import ConfigPath
from dmconfig.resolve import Resolved, as_read
from dmconfig.units import format_bytes
from dmconfig.validation import (
    FileKind,
    Model,
    Section,
    keys,
    nearest_key,
    not_one_of,
    path_in,
    refused,
    validated,
    wrong_type,
)

_MACHINES = DATA / "machines"
_SUFFIXES = (".yaml", ".yml", ".json")
_FIXES = {
    "version": f"add 'version: {MACHINE_VERSION}' as the first line",
    "host": "add 'host: {memory: 64GiB}'",
    "memory": "add 'memory: 64GiB'",
    "free": "add 'free: 200GiB'",
}
_BELONGS = {
    "pipeline": "this looks like a pipeline's file; a machine's file has devices, host, disk and links",
    "gpus": "use 'devices'",
    "accelerators": "use 'devices'",
    "cpu": "use 'host'",
    "ram": "write host: {memory: 64GiB}",
    "memory": "write host: {memory: 64GiB}",
    "total": "use 'memory'",
    "vram": "use 'memory'",
    "bandwidth": "write it under 'links', at the top level",
}


def named_machine(text: str, other_flags: Iterable[str] = ()) -> Inventory:
    """Return what ``--machine`` names: a file, a machine of the package, or a card: one of it, and 64 GiB of host.

    What has a folder or ends in .yaml, .yml or .json is a file.

    Args:
        text: the file or the name.
        other_flags: the flags beside it that say what the machine is; any is one too many.

    Raises: DocumentError, MachineError: there is no such machine, the file says something wrong, or flags do as well.
    """
    flags = ", ".join(other_flags)
    if flags:
        what = f"--machine says all of the machine, and {flags} a part of it"
        fix = "keep one; to change a part, write it in a machine file"
        raise MachineError([Problem(code=Code.BAD_COMMAND_LINE, what=what, fix=fix, origin=f"--machine {text}")])
    if os.sep in text or "/" in text or text.endswith(_SUFFIXES):
        return read_machine(text)
    if text in machine_names():
        file = _MACHINES / f"{text}.yaml"
        return _inventory(parse_document(file.read_text(encoding="utf-8"), name=f"{text}.yaml", folder=Path()))
    card = find_card(text)
    if card is not None:
        name = f"{card.name} and {format_bytes(DEFAULT_HOST_BYTES)} of host memory"
        return replace(parse_machine(card.name, None), name=name)
    raise MachineError([_unknown_name(text)])


def machine_names() -> tuple[str, ...]:
    """Return the names of the machines that come with the package."""
    return tuple(sorted(file.stem for file in _MACHINES.glob("*.yaml")))


def read_machine(file: str | Path) -> Inventory:
    """Return the machine in a file.

    Raises: DocumentError: the file is not the YAML we accept. MachineError: everything that it says wrong, at once.
    """
    return _inventory(read_document(file))


# ---------------------------------------------------------------- a file's values, as a machine


def _inventory(document: Document) -> Inventory:
    resolved = as_read(document)
    entries = validated(resolved, _MACHINE_FILE)
    problems = [*_contradictions(entries, resolved)]
    if problems:
        raise MachineError(problems)
    host = _host(entries.host)
    cards = {name: find_card(entry.card) if entry.card else None for name, entry in _in_order(entries)}
    unified = tuple(name for name, entry in _in_order(entries) if _is_unified(entry, cards[name]))
    return Inventory(
        accelerators=tuple(
            _accelerator(name, entry, cards[name], host, unified=name in unified) for name, entry in _in_order(entries)
        ),
        host=host,
        name=entries.name or Path(document.name).name,
        disk=_disk(entries.disk) if entries.disk else None,
        unified=unified,
        links=links_of(_rates(entries, cards)),
        speeds=speeds_of(_flops(entries, cards)),
        pageable_bytes_per_s=entries.links.get(PAGEABLE),
    )


def _in_order(entries: MachineFile) -> list[tuple[str, AcceleratorEntry]]:
    """The accelerators by number: the order in the file does not matter."""
    return sorted(entries.devices.items(), key=lambda item: _kind_and_number(item[0]))


def _kind_and_number(name: str) -> tuple[str, int]:
    kind, _, number = name.partition(":")
    return kind, int(number)


def _host(entry: HostEntry) -> Device:
    return Device(
        id=CPU,
        description=entry.description or "stated",
        total_bytes=entry.memory,
        free_bytes=entry.memory if entry.free is None else entry.free,
    )


def _disk(entry: DiskEntry) -> Device:
    total = entry.free if entry.size is None else entry.size
    return Device(id=DISK, description=entry.description or "stated", total_bytes=total, free_bytes=entry.free)


def _is_unified(entry: AcceleratorEntry, card: Card | None) -> bool:
    return (card is not None and card.shares_host) if entry.unified is None else entry.unified


def _accelerator(name: str, entry: AcceleratorEntry, card: Card | None, host: Device, *, unified: bool) -> Device:
    """One device: the card's figures, with the entry's own in their place."""
    known = device_of(card, name, host) if card else stated(name, host.total_bytes)
    total = known.total_bytes if entry.memory is None else entry.memory
    all_free = min(total, host.free_bytes) if unified else total
    return Device(
        id=name,
        description=entry.description or known.description,
        total_bytes=total,
        free_bytes=all_free if entry.free is None else entry.free,
    )


def _rates(entries: MachineFile, cards: Mapping[str, Card | None]) -> dict[tuple[str, str], int]:
    """The bandwidths that are known: a card's, over it what the file says of all, over it what it says of a pair."""
    rates = card_rates(cards)
    if HOST in entries.links:
        rates |= {pair(CPU, name): entries.links[HOST] for name in cards}
    if PEER in entries.links:
        rates |= {pair(one, other): entries.links[PEER] for one, other in combinations(cards, 2)}
    rates |= {ends: rate for key, rate in entries.links.items() if isinstance(ends := link_of(key), tuple)}
    if entries.disk and entries.disk.read:
        rates[pair(CPU, DISK)] = entries.disk.read
    return rates


def _flops(entries: MachineFile, cards: Mapping[str, Card | None]) -> dict[str, int]:
    """The speeds that are known: a card's, or what the file says."""
    sections: dict[str, AcceleratorEntry | HostEntry] = {**entries.devices, CPU: entries.host}
    return card_flops(cards) | {name: entry.flops for name, entry in sections.items() if entry.flops}


# ---------------------------------------------------------------- what can be wrong


def _unknown_name(text: str) -> Problem:
    near = nearest(text, machine_names())
    known, meant_card = unknown_card(text)
    fix = meant_card or (f"did you mean {near!r}?" if near else f"to name a file, write ./{text} or end it in .yaml")
    if Path(text).is_file():
        fix = f"to name the file, write ./{text}"
    what = f"{text!r} is no machine that dmconfig knows"
    why = f"known machines: {', '.join(machine_names())}; {known}"
    return Problem(code=Code.BAD_MACHINE, what=what, why=why, fix=fix, origin=f"--machine {text}")


def _contradictions(entries: MachineFile, resolved: Resolved) -> Iterator[Problem]:
    """Yield what is wrong across values that are right by themselves."""
    keys = {parse_device(key): key for key in resolved.data.get("devices") or {}}
    for name, entry in entries.devices.items():
        yield from _device_problems(("devices", keys[name]), name, entry, resolved)
    yield from _other_kinds(keys, resolved)
    yield from _missing_numbers(keys, resolved)
    yield from _too_much_free(("host",), entries.host.memory, entries.host.free, resolved)
    if entries.disk and entries.disk.size is not None:
        yield from _too_much_free(("disk",), entries.disk.size, entries.disk.free, resolved)
    yield from _links_to_nowhere(entries, resolved)


def _device_problems(path: ConfigPath, name: str, entry: AcceleratorEntry, resolved: Resolved) -> Iterator[Problem]:
    card = find_card(entry.card) if entry.card else None
    if entry.card and card is None:
        why, fix = unknown_card(entry.card)
        what = f"{entry.card!r} is no card that dmconfig knows"
        yield resolved.problem(
            Code.BAD_MACHINE, (*path, "card"), what, why=why, fix=fix or "leave it out and write its memory"
        )
        return
    kind = name.partition(":")[0]
    if card and card.kind != kind:
        what = f"{card.name} is a device of kind {card.kind}, not {kind}"
        fix = f"name the device {card.kind}:0"
        yield resolved.problem(Code.BAD_MACHINE, (*path, "card"), what, fix=fix)
    memory = entry.memory if entry.memory is not None else card.memory_bytes if card else None
    if memory is None and not entry.unified and not (card and card.shares_host):
        what = f"nothing says how much memory {name} has"
        fix = "write card: rtx-4090, or memory: 24GiB, or unified: true when it uses the host's"
        yield resolved.problem(Code.MISSING_KEY, path, what, fix=fix, key=True)
    if memory is not None:
        yield from _too_much_free(path, memory, entry.free, resolved)


def _other_kinds(keys: dict[str, str], resolved: Resolved) -> Iterator[Problem]:
    """Yield a problem per kind of device after the first: no torch is built for two."""
    kinds = {_kind_and_number(name)[0]: key for name, key in reversed(keys.items())}
    for kind in list(reversed(kinds))[1:]:
        what = f"a device of kind {kind} beside one of another kind"
        yield resolved.problem(Code.BAD_MACHINE, ("devices", kinds[kind]), what, why=ONE_KIND, key=True)


def _missing_numbers(keys: dict[str, str], resolved: Resolved) -> Iterator[Problem]:
    """Yield a problem per accelerator whose number leaves one out: torch counts each kind from zero."""
    for name, key in keys.items():
        kind, number = _kind_and_number(name)
        if number and f"{kind}:{number - 1}" not in keys:
            what = f"there is a {name}, and no {kind}:{number - 1}"
            why = "torch counts the devices of a kind from 0, without gaps"
            yield resolved.problem(Code.BAD_MACHINE, ("devices", key), what, why=why, key=True)


def _too_much_free(path: ConfigPath, total: int, free: int | None, resolved: Resolved) -> Iterator[Problem]:
    if free is not None and free > total:
        what = f"{format_bytes(free)} cannot be free of {format_bytes(total)}"
        yield resolved.problem(Code.BAD_MACHINE, (*path, "free"), what)


def _links_to_nowhere(entries: MachineFile, resolved: Resolved) -> Iterator[Problem]:
    there = (CPU, *entries.devices)
    for key in entries.links:
        ends = link_of(key)
        for name in ends if isinstance(ends, tuple) else ():
            if name not in there:
                what, why = f"the machine has no {name}", f"its devices are: {', '.join(there)}"
                yield resolved.problem(Code.NO_SUCH_DEVICE, ("links", key), what, why=why, key=True)


def _translate(detail: ErrorDetails, resolved: Resolved) -> Problem:
    """Turn one of pydantic's errors into a problem of ours, at a place that exists in the document."""
    path = path_in(resolved.data, detail["loc"])
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_key(path, resolved)
        case "missing":
            name = str(detail["loc"][-1])
            fix = _FIXES.get(name, "")
            return resolved.problem(Code.MISSING_KEY, path, f"the key {name!r} is missing", fix=fix, key=True)
        case "literal_error":
            return not_one_of(path, detail, resolved, version=MACHINE_VERSION)
        case "bad_device" | "bad_size":
            return refused(path, detail, resolved)
        case "bad_link":
            return resolved.problem(Code.BAD_MACHINE, path, str(detail.get("ctx", {})["text"]), key=True)
        case _:
            problem = wrong_type(path, detail, resolved)
            return replace(problem, fix=problem.fix or _whole_section(path, detail["input"]))


def _whole_section(path: ConfigPath, given: Any) -> str:
    """How to write the one figure that stands in a section's place."""
    if not isinstance(given, (str, int)) or isinstance(given, bool):
        return ""
    match path:
        case ("devices", name):
            return (
                f"write {name}: {{memory: {given}}}" if str(given)[:1].isdigit() else f"write {name}: {{card: {given}}}"
            )
        case ("host",):
            return f"write host: {{memory: {given}}}"
        case ("disk",):
            return f"write disk: {{free: {given}}}"
        case _:
            return ""


def _unknown_key(path: ConfigPath, resolved: Resolved) -> Problem:
    key, known = str(path[-1]), [*keys(_model_at(path[:-1]))]
    belongs = _BELONGS.get(key, "")
    useful = belongs if key not in {"memory"} or len(path) == 1 else ""
    fix = useful or nearest_key(key, known)
    why = f"the keys accepted here are: {', '.join(known)}"
    return resolved.problem(Code.UNKNOWN_KEY, path, f"unknown key {key!r}", why=why, fix=fix, key=True)


def _model_at(path: ConfigPath) -> type[Model]:
    sections: dict[Any, type[Model]] = {"devices": AcceleratorEntry, "host": HostEntry, "disk": DiskEntry}
    return sections.get(path[0], MachineFile) if path else MachineFile


_MACHINE_FILE = FileKind(
    model=MachineFile,
    version=MACHINE_VERSION,
    noun="this machine file is of version",
    beginning="'version: 1' and 'host: {memory: 64GiB}'",
    sections=(Section(name="devices", read=parse_device), Section(name="links", read=link_of, word="link")),
    translate=_translate,
    error=MachineError,
)
