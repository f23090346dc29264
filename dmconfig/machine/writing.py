"""From an inventory to a machine file: what is read back is the same inventory.

Sizes are written in full, with a comment in round figures; speeds that are only defaults are left out, and said to
be, so that a figure in a file is one that somebody knows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from dmconfig.devices import CPU, DISK
from dmconfig.inventory import (
    DISK_BYTES_PER_S,
    PEER_BYTES_PER_S,
    Device,
    Inventory,
    pair,
)
from dmconfig.machine.model import HOST, MACHINE_VERSION, PAGEABLE, PEER
from dmconfig.rates import format_bandwidth, format_flops
from dmconfig.units import GIB, MIB, TIB, format_bytes

_UNITS = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB))


def machine_data(machine: Inventory) -> dict[str, Any]:
    """Return the values of a machine file."""
    rates = {link.devices: link.bytes_per_s for link in machine.links}
    data: dict[str, Any] = {
        "version": MACHINE_VERSION,
        "name": machine.name,
        "devices": {device.id: _device_data(device, machine) for device in machine.accelerators},
        "host": _device_data(machine.host, machine),
    }
    if machine.disk:
        read = rates.get(pair(CPU, DISK))
        data["disk"] = {
            "description": machine.disk.description,
            "size": _size(machine.disk.total_bytes),
            "free": _size(machine.disk.free_bytes),
            **({"read": format_bandwidth(read)} if read else {}),
        }
    links = dict(_links(machine, rates))
    return data | ({"links": links} if links else {})


def machine_text(machine: Inventory) -> str:
    """Return a machine file, as YAML with comments."""
    head = ["# Plan for this machine anywhere: dmconfig plan SPEC --machine THIS_FILE"]
    return "\n".join([*head, *_lines(machine_data(machine)), *_assumptions(machine)]) + "\n"


def _device_data(device: Device, machine: Inventory) -> dict[str, Any]:
    flops = next((speed.flops_per_s for speed in machine.speeds if speed.device == device.id), None)
    return {
        "description": device.description,
        "memory": _size(device.total_bytes),
        "free": _size(device.free_bytes),
        **({"flops": format_flops(flops)} if flops else {}),
        **({"unified": True} if device.id in machine.unified else {}),
    }


def _links(machine: Inventory, rates: Mapping[tuple[str, str], int]) -> Iterator[tuple[str, str]]:
    """Yield the entries of ``links``: one for all where all are the same."""
    names = [device.id for device in machine.accelerators]
    yield from _together(HOST, [pair(CPU, name) for name in names], rates)
    yield from _together(PEER, [pair(one, other) for one, other in combinations(names, 2)], rates)
    if machine.pageable_bytes_per_s:
        yield PAGEABLE, format_bandwidth(machine.pageable_bytes_per_s)


def _together(
    word: str, ends: list[tuple[str, str]], rates: Mapping[tuple[str, str], int]
) -> Iterator[tuple[str, str]]:
    if len({rates.get(each) for each in ends}) == 1 and ends[0] in rates:
        yield word, format_bandwidth(rates[ends[0]])
        return
    yield from (("-".join(each), format_bandwidth(rates[each])) for each in ends if each in rates)


def _size(count: int) -> str | int:
    """A size in a unit that writes it in full, or in bytes."""
    unit, size = next(((unit, size) for unit, size in _UNITS if count and count % size == 0), ("", 0))
    return f"{count // size}{unit}" if size else count


def _lines(data: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{key}: {_scalar(key, value)}"


def _scalar(key: str, value: Any) -> str:
    """A value as YAML; text that people choose is quoted, so that none of it means anything to YAML."""
    if key in {"name", "description"} or not isinstance(value, (str, int)) or isinstance(value, bool):
        return json.dumps(value)
    return f"{value}  # {format_bytes(value)}" if isinstance(value, int) and key != "version" else str(value)


def _assumptions(machine: Inventory) -> Iterator[str]:
    """Yield comments on the speeds that a plan has to assume."""
    known = {*(link.devices for link in machine.links), *(speed.device for speed in machine.speeds)}
    names = [device.id for device in machine.accelerators]
    speeds = [device.id for device in machine.devices if device.id not in known]
    assumed = [f"{name} {format_flops(machine.flops_per_s(name))}" for name in speeds]
    links = [name for name in names if pair(CPU, name) not in known]
    assumed += [f"{CPU}-{name} {format_bandwidth(machine.bandwidth(CPU, name, pinned=True))}" for name in links]
    if any(pair(*ends) not in known for ends in combinations(names, 2)):
        assumed.append(f"{PEER} {format_bandwidth(PEER_BYTES_PER_S)}")
    if machine.disk and pair(CPU, DISK) not in known:
        assumed.append(f"disk.read {format_bandwidth(DISK_BYTES_PER_S)}")
    if assumed:
        yield f"# Assumed, until the file says better: {', '.join(assumed)}"
