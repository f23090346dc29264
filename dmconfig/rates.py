"""Bandwidths and speeds of computing as people write them, and back: whole bytes and operations a second elsewhere.

Reading and writing are exact: what is written is read back as the same number.
"""

from __future__ import annotations

import re
from decimal import Decimal

from dmconfig.units import parse_size

BANDWIDTH_FORMS = "a number, a unit of bytes and /s: 25GB/s, 900MB/s, 1.5GiB/s"
FLOPS_FORMS = "a number, a unit and flop/s: 165.2Tflop/s, 600Gflop/s, 1.3Pflop/s"
LEAST_FLOPS = 10**9
"""Less than any processor does in a second: a smaller number lacks its unit."""

_BANDWIDTH = re.compile(r"([0-9]+(?:\.[0-9]+)?\s*[KMGT]?i?B)\s*/\s*s")
_FLOPS = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([GTP]?)flop(?:/s|s)", re.IGNORECASE)
_PREFIXES = (("P", 10**15), ("T", 10**12), ("G", 10**9))


def parse_bandwidth(value: object) -> int:
    """Return bytes a second: ``25GB/s`` is 25 000 000 000. Bits (``200Gb/s``) and bare numbers are refused.

    Raises: ValueError: with a sentence that says what is accepted.
    """
    if not isinstance(value, str):
        raise ValueError(f"expected {BANDWIDTH_FORMS}")
    match = _BANDWIDTH.fullmatch(value.strip())
    try:
        rate = parse_size(match.group(1)) if match else 0
    except ValueError:
        rate = 0
    if not rate:
        raise ValueError(f"{value!r} is not a bandwidth; expected {BANDWIDTH_FORMS}")
    return rate


def parse_flops(value: object) -> int:
    """Return floating-point operations a second: ``165.2Tflop/s``, or the number itself.

    Raises: ValueError: with a sentence that says what is accepted.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"expected {FLOPS_FORMS}")
    speed = _operations(value)
    if speed is None:
        raise ValueError(f"{value!r} is not a speed; expected {FLOPS_FORMS}")
    if speed < LEAST_FLOPS:
        raise ValueError(f"{value} is too few operations a second; expected {FLOPS_FORMS}")
    return speed


def format_bandwidth(rate: int) -> str:
    """Return a bandwidth as ``parse_bandwidth`` reads it, in the largest unit that writes it in full: ``25GB/s``."""
    for unit, size in (("TB/s", 10**12), ("GB/s", 10**9), ("MB/s", 10**6)):
        if rate >= size and rate % (size // 1000) == 0:
            return f"{_decimal(rate, size)}{unit}"
    return f"{rate}B/s"


def format_flops(speed: int) -> str:
    """Return a speed as ``parse_flops`` reads it, in the largest unit that writes it in full: ``165.2Tflop/s``."""
    for prefix, size in _PREFIXES:
        if speed >= size and speed % (size // 1000) == 0:
            return f"{_decimal(speed, size)}{prefix}flop/s"
    return f"{speed}flop/s"


def _operations(value: float | str) -> int | None:
    if isinstance(value, str):
        match = _FLOPS.fullmatch(value.strip())
        sizes = {"": 1, **dict(_PREFIXES)}
        return int(Decimal(match.group(1)) * sizes[match.group(2).upper()]) if match else None
    # nan and infinity are numbers of YAML, and no speed
    return int(value) if value == value and abs(value) != float("inf") else None  # noqa: PLR0124


def _decimal(value: int, size: int) -> str:
    return format((Decimal(value) / size).normalize(), "f")
