"""Names of devices: many ways to write one, one way to store it."""

from __future__ import annotations

import re

ACCELERATOR_KINDS = ("cuda", "mps", "xpu", "npu", "mlu", "hpu", "musa")
CPU, DISK = "cpu", "disk"
DEVICE_FORMS = "cpu, or an accelerator by number (0), kind (cuda) or full name (cuda:0, xpu:1, mps)"

_RUNS = rf"[0-9]{{1,3}}|({'|'.join((*ACCELERATOR_KINDS, 'gpu'))})(:[0-9]{{1,3}})?|cpu(:0)?"
RUNS_PATTERN = rf"^\s*({_RUNS})\s*$"
DEVICE_PATTERN = rf"^\s*({_RUNS}|disk)\s*$"
"""What ``parse_device`` accepts of texts, as a pattern for other tools; and of those what something can run on."""

_INDEX = re.compile(r"[0-9]{1,3}")
_FULL = re.compile(r"([a-z]+)(?::([0-9]{1,3}))?")


def parse_device(value: object) -> str:
    """Return the full name of a device: ``cpu``, ``disk`` or ``<kind>:<index>``.

    ``0``, ``"0"``, ``cuda``, ``gpu:0`` and ``cuda:0`` name the same device; an accelerator without an index is the
    first of its kind.

    Raises: ValueError: for a negative index or a name that is no device, saying what is accepted.

    Example:
        >>> [parse_device(name) for name in (0, "gpu:1", "cuda", "cpu")]
        ['cuda:0', 'cuda:1', 'cuda:0', 'cpu']
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"expected a device: {DEVICE_FORMS}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"device index {value} is negative; accepted are {DEVICE_FORMS}")
        return f"cuda:{value}"
    text = value.strip()
    if _INDEX.fullmatch(text):
        return f"cuda:{int(text)}"
    if text in (CPU, "cpu:0"):
        return CPU
    if text == DISK:
        return DISK
    match = _FULL.fullmatch(text)
    kind = "cuda" if match and match.group(1) == "gpu" else match.group(1) if match else ""
    if match is None or kind not in ACCELERATOR_KINDS:
        raise ValueError(f"{value!r} is not a device; accepted are {DEVICE_FORMS}")
    return f"{kind}:{int(match.group(2) or 0)}"


def device_or_none(value: object) -> str | None:
    """Return what ``parse_device`` does, or None where it raises."""
    try:
        return parse_device(value)
    except ValueError:
        return None


def nearest_device(text: str) -> str | None:
    """Return the device that a misspelt name most likely means (``cuda0``, ``GPU``, ``CUDA: 1``), or None."""
    letters = re.fullmatch(r"([a-z]+)[:_ ]*(\d{1,3})?", text.strip().lower())
    if letters is None:
        return None
    kind, index = letters.groups()
    kind = {"gpu": "cuda", "nvidia": "cuda", "vga": "cuda", "host": CPU, "ram": CPU}.get(kind, kind)
    if kind == CPU:
        return CPU
    return f"{kind}:{int(index or 0)}" if kind in ACCELERATOR_KINDS else None


def is_accelerator(device: str) -> bool:
    """Tell whether a full device name means an accelerator, as opposed to the host's cpu or disk."""
    return device not in (CPU, DISK)
