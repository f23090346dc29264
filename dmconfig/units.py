"""Sizes of memory as people write them, and back: bytes are integers everywhere else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_BYTES_PER_UNIT = {
    "": 1, "B": 1,
    "K": 10**3, "KB": 10**3, "KiB": KIB,
    "M": 10**6, "MB": 10**6, "MiB": MIB,
    "G": 10**9, "GB": 10**9, "GiB": GIB,
    "T": 10**12, "TB": 10**12, "TiB": TIB,
}  # fmt: skip
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")
_UNITS = "|".join(unit for unit in _BYTES_PER_UNIT if unit)
_SIZE_TEXT = rf"([0-9]+|[0-9]+(\.[0-9]+)?\s*({_UNITS}))"
SIZE_PATTERN = rf"^\s*{_SIZE_TEXT}\s*$"
"""What ``parse_size`` accepts of texts, as a pattern for other tools."""
BUDGET_PATTERN = rf"^\s*({_SIZE_TEXT}|0*(100(\.0+)?|[0-9]{{1,2}}(\.[0-9]+)?)\s*%|free(-{_SIZE_TEXT})?)\s*$"
"""What ``parse_budget`` accepts of texts, as a pattern for other tools."""
SIZE_FORMS = "a whole number of bytes, or a number and a unit: 20GiB, 24GB, 512MiB, 1.5TB"
BUDGET_FORMS = f"{SIZE_FORMS}; for a budget also 80% (of the device) or free-2GiB"


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on one device, before the device is known.

    ``amount`` is bytes for ``fixed``, percent of the device's total for ``percent``, and bytes left out of what
    is free for ``free_minus``.
    """

    kind: Literal["fixed", "percent", "free_minus"]
    amount: Decimal

    def bytes_of(self, *, total_bytes: int, free_bytes: int) -> int:
        """Return the limit in bytes on a device of this size; never negative."""
        match self.kind:
            case "fixed":
                return int(self.amount)
            case "percent":
                return int(total_bytes * self.amount / 100)
            case "free_minus":
                return max(0, free_bytes - int(self.amount))


def parse_size(value: object) -> int:
    """Return a size in bytes. GiB is 2^30, GB and G are 10^9; a unit with a small b (bits) is refused.

    Raises: ValueError: with a sentence that says what is accepted.
    """
    return _bytes_of(value, SIZE_FORMS)


def parse_budget(value: object) -> Budget:
    """Return a limit: a size, ``80%`` of the device, or ``free-2GiB``.

    Raises: ValueError: with a sentence that says what is accepted.
    """
    if isinstance(value, str):
        text = value.strip()
        if match := _PERCENT.fullmatch(text):
            percent = Decimal(match.group(1))
            if percent > 100:
                raise ValueError(f"{text} is more than the device has; at most 100%")
            return Budget("percent", percent)
        if text == "free":
            return Budget("free_minus", Decimal(0))
        if text.startswith("free-") and _SIZE.fullmatch(text.removeprefix("free-")):
            return Budget("free_minus", Decimal(_bytes_of(text.removeprefix("free-"), BUDGET_FORMS)))
        if _SIZE.fullmatch(text) is None:
            raise ValueError(f"{value!r} is not a budget; expected {BUDGET_FORMS}")
    return Budget("fixed", Decimal(_bytes_of(value, BUDGET_FORMS)))


def format_bytes(count: int) -> str:
    """Return a size with at most one decimal in the largest binary unit it fills: ``22.2 GiB``, ``512 B``."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def format_seconds(seconds: float) -> str:
    """Return a time as people read it: ``0 s``, ``85 ms``, ``3.2 s``, ``12 min``."""
    if seconds == 0:
        return "0 s"
    if seconds < 1:
        return f"{max(1, round(seconds * 1000))} ms"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _bytes_of(value: object, forms: str) -> int:
    """The bytes that value means; ``forms`` says what is accepted in its place."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"expected {forms}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError("a size cannot be negative")
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not a size; expected {forms}")
    number, unit = match.groups()
    if unit not in _BYTES_PER_UNIT:
        raise ValueError(_unit_message(number, unit, forms))
    if not unit and "." in number:
        raise ValueError(f"{value!r} is no whole number of bytes; its unit is missing: {number}GiB")
    return int(Decimal(number) * _BYTES_PER_UNIT[unit])


def _unit_message(number: str, unit: str, forms: str) -> str:
    by_lower = {known.lower(): known for known in _BYTES_PER_UNIT if known}
    meant = by_lower.get(unit.lower())
    if meant is None:
        return f"{unit!r} is not a unit of memory; expected {forms}"
    bits = " (a small b reads as bits; sizes are bytes)" if unit.endswith("b") and not unit.islower() else ""
    return f"unit {unit!r} is not accepted{bits}; write {number}{meant}"
