"""The models of a machine file, version 1: what may be written in one. Rules across entries are in ``reading``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from dmconfig.devices import CPU, DISK, is_accelerator, parse_device
from dmconfig.inventory import (
    CPU_FLOPS_PER_S,
    DISK_BYTES_PER_S,
    HOST_BYTES_PER_S,
    PAGEABLE_BYTES_PER_S,
    PEER_BYTES_PER_S,
    pair,
)
from dmconfig.rates import (
    BANDWIDTH_FORMS,
    FLOPS_FORMS,
    format_bandwidth,
    format_flops,
    parse_bandwidth,
    parse_flops,
)
from dmconfig.units import SIZE_FORMS
from dmconfig.validation import Model, Size, file_version

MACHINE_VERSION = 1
HOST, PEER, PAGEABLE = "host", "peer", "pageable"
LINK_WORDS = (HOST, PEER, PAGEABLE)
LINK_FORMS = f"{', '.join(LINK_WORDS)}, or two devices: cuda:0-cuda:1, cpu-cuda:0"


def _accelerator(value: object) -> str:
    try:
        name = parse_device(value)
    except ValueError as error:
        raise PydanticCustomError("bad_device", "{text}", {"text": str(error)}) from None
    if not is_accelerator(name):
        raise PydanticCustomError("bad_device", "{text}", {"text": f"{name} has a section of its own, beside devices"})
    return name


def link_of(key: str) -> str | tuple[str, str]:
    """Return what a key of ``links`` means: one of its words, or a pair of devices.

    Raises: ValueError: with a sentence that says what is accepted.
    """
    if key in LINK_WORDS:
        return key
    try:
        ends = pair(*map(parse_device, key.split("-")))
    except (TypeError, ValueError):
        raise ValueError(f"{key!r} is no link; accepted are {LINK_FORMS}") from None
    if DISK in ends:
        raise ValueError("the bandwidth of the disk is not a link; it is disk.read")
    return ends


def _link(key: str) -> str:
    try:
        link_of(key)
    except ValueError as error:
        raise PydanticCustomError("bad_link", "{text}", {"text": str(error)}) from None
    return key


def _bandwidth(value: object) -> int:
    try:
        return parse_bandwidth(value)
    except ValueError as error:
        raise PydanticCustomError("bad_size", "{text}", {"text": str(error)}) from None


def _flops(value: object) -> int:
    try:
        return parse_flops(value)
    except ValueError as error:
        raise PydanticCustomError("bad_size", "{text}", {"text": str(error)}) from None


Accelerator = Annotated[str, BeforeValidator(_accelerator, json_schema_input_type=str)]
LinkKey = Annotated[str, BeforeValidator(_link, json_schema_input_type=str)]
Bandwidth = Annotated[
    int, BeforeValidator(_bandwidth, json_schema_input_type=str), Field(description=f"{BANDWIDTH_FORMS}.")
]
Flops = Annotated[int, BeforeValidator(_flops, json_schema_input_type=str | float)]


class AcceleratorEntry(Model):
    """One accelerator: a card by name, or its figures; figures beside a card replace the card's."""

    card: str | None = Field(None, description="A card that dmconfig knows, e.g. rtx-4090: its memory and speeds.")
    description: str | None = Field(None, description="What the device is, as the plan shows it.")
    memory: Size | None = Field(None, description=f"All of its memory: {SIZE_FORMS}. Needed unless a card says it.")
    free: Size | None = Field(None, description="What may be used of it. Default: all.")
    flops: Flops | None = Field(
        None, description=f"Dense 16-bit operations a second: {FLOPS_FORMS}. Default: the card's, or a modest one."
    )
    unified: bool | None = Field(
        None, description="true: its memory is the host's own. Default: the card's, otherwise false."
    )


class HostEntry(Model):
    """The host: its memory, and its cpu as a device."""

    description: str | None = Field(None, description="What the host is.")
    memory: Size = Field(description=f"Host memory, or the container's share of it: {SIZE_FORMS}.")
    free: Size | None = Field(None, description="What may be used of it. Default: all.")
    flops: Flops | None = Field(
        None,
        description=f"Operations of the cpu a second: {FLOPS_FORMS}. Default: {format_flops(CPU_FLOPS_PER_S)}.",
    )


class DiskEntry(Model):
    """The disk on which weights may rest."""

    description: str | None = Field(None, description="What the disk is.")
    size: Size | None = Field(None, description="The whole disk. Default: what is free.")
    free: Size = Field(description=f"What may be used of it: {SIZE_FORMS}.")
    read: Bandwidth | None = Field(
        None, description=f"From disk to host memory. Default: {format_bandwidth(DISK_BYTES_PER_S)}."
    )


class MachineFile(Model):
    """One machine."""

    version: Annotated[Literal[1], file_version(MACHINE_VERSION)] = Field(description="Version of this file format.")
    name: str | None = Field(None, description="What a plan calls the machine. Default: the file's name.")
    devices: dict[Accelerator, AcceleratorEntry] = Field(
        default_factory=dict, description="Its accelerators, by device: cuda:0, mps, xpu:1. Default: none."
    )
    host: HostEntry = Field(description="Host memory and cpu.")
    disk: DiskEntry | None = Field(None, description="Default: nothing is known of it, and it limits nothing.")
    links: dict[LinkKey, Bandwidth] = Field(
        default_factory=dict,
        description=f"Bandwidths, either way. {HOST}: page-locked host memory to each accelerator, "
        f"{format_bandwidth(HOST_BYTES_PER_S)} when nothing says more; {PEER}: between any two accelerators, "
        f"{format_bandwidth(PEER_BYTES_PER_S)}; {PAGEABLE}: the most that leaves ordinary host memory, half of {HOST} "
        f"and at most {format_bandwidth(PAGEABLE_BYTES_PER_S)}; {CPU}-cuda:0 or cuda:0-cuda:1: between these two.",
    )
