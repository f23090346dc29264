from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

import pytest

from dmconfig.units import GIB, KIB, MIB, TIB, Budget, format_bytes, parse_budget, parse_size


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (0, 0),
        (1024, 1024),
        ("1024", 1024),
        ("0", 0),
        ("512B", 512),
        ("1K", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("10M", 10**7),
        ("10MB", 10**7),
        ("512MiB", 512 * MIB),
        ("24G", 24 * 10**9),
        ("24GB", 24 * 10**9),
        ("20GiB", 20 * GIB),
        ("20 GiB", 20 * GIB),
        ("  20GiB  ", 20 * GIB),
        ("1T", 10**12),
        ("1.5TB", 15 * 10**11),
        ("1TiB", TIB),
        ("8.5GiB", 17 * GIB // 2),
        ("0.1GiB", 107374182),  # 0.1 * 2^30 = 107374182.4
        ("22.7GiB", 24373939404),  # 22.7 * 2^30 = 24373939404.8: no float in between
    ],
)
def test_parse_size_accepted_is_bytes(written: object, expected: int) -> None:
    """Whole numbers are bytes; G and GB are decimal, GiB binary; a part of a byte is cut off."""
    assert parse_size(written) == expected


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (-1, "a size cannot be negative"),
        ("10Gb", "unit 'Gb' is not accepted (a small b reads as bits; sizes are bytes); write 10GB"),
        ("10Gib", "unit 'Gib' is not accepted (a small b reads as bits; sizes are bytes); write 10GiB"),
        ("10gb", "unit 'gb' is not accepted; write 10GB"),
        ("1.5tib", "unit 'tib' is not accepted; write 1.5TiB"),
        ("64000MiBGiB", "'MiBGiB' is not a unit of memory; expected "),
        ("3 apples", "'apples' is not a unit of memory; expected "),
        ("", "'' is not a size; expected "),
        ("GiB", "'GiB' is not a size; expected "),
        ("-1GiB", "'-1GiB' is not a size; expected "),
        ("1,5GiB", "'1,5GiB' is not a size; expected "),
        ("1e9", "'1e9' is not a size; expected "),
        ("80%", "'80%' is not a size; expected "),
        ("0x10", "'0x10' is not a size; expected "),
        (True, "expected a whole number of bytes"),
        (2.5, "expected a whole number of bytes"),
        (None, "expected a whole number of bytes"),
        ([], "expected a whole number of bytes"),
    ],
)
def test_parse_size_refused_says_what_is_accepted(written: object, message: str) -> None:
    """A value that is no size is refused with a sentence; a wrong unit comes with the right one."""
    with pytest.raises(ValueError, match=r"^.") as caught:
        parse_size(written)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("written", ["1.5", "0.5"])
def test_parse_size_fraction_without_unit_is_refused(written: str) -> None:
    """Half a byte is a forgotten unit, also in a budget."""
    with pytest.raises(ValueError, match="is no whole number of bytes; its unit is missing"):
        parse_budget(written)
    with pytest.raises(ValueError, match="is no whole number of bytes; its unit is missing"):
        parse_size(written)


@pytest.mark.parametrize(
    ("written", "kind", "amount", "limit"),
    [
        # on a device of 24 GiB of which 20 are free
        ("20GiB", "fixed", 20 * GIB, 20 * GIB),
        (0, "fixed", 0, 0),
        ("80%", "percent", 80, 20615843020),  # 24 * 2^30 * 0.8 = 20615843020.8
        ("12.5 %", "percent", Decimal("12.5"), 3 * GIB),
        ("100%", "percent", 100, 24 * GIB),
        ("0%", "percent", 0, 0),
        ("free", "free_minus", 0, 20 * GIB),
        ("free-2GiB", "free_minus", 2 * GIB, 18 * GIB),
        ("free-21GiB", "free_minus", 21 * GIB, 0),  # never negative
    ],
)
def test_parse_budget_forms_give_a_limit(written: object, kind: str, amount: int | Decimal, limit: int) -> None:
    """A budget is a size, a share of the device's total, or what is free less a size."""
    budget = parse_budget(written)
    assert (budget.kind, budget.amount) == (kind, amount)
    assert budget.bytes_of(total_bytes=24 * GIB, free_bytes=20 * GIB) == limit


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("120%", "120% is more than the device has; at most 100%"),
        ("-5%", "'-5%' is not a budget; expected "),
        ("free-", "'free-' is not a budget; expected "),
        ("free-80%", "'free-80%' is not a budget; expected "),
        ("free+2GiB", "'free+2GiB' is not a budget; expected "),
        ("half", "'half' is not a budget; expected "),
        ("10Gb", "unit 'Gb' is not accepted"),
        (2.5, "expected a whole number of bytes"),
        (None, "expected a whole number of bytes"),
        (False, "expected a whole number of bytes"),
        (-1, "a size cannot be negative"),
    ],
)
def test_parse_budget_refused_says_what_is_accepted(written: object, message: str) -> None:
    """A value that is no budget is refused with a sentence."""
    with pytest.raises(ValueError, match=r"^.") as caught:
        parse_budget(written)
    assert str(caught.value).startswith(message)


def test_parse_budget_size_is_the_same_as_parse_size() -> None:
    """Every size is a budget of as many bytes."""
    for text in ("1", "3KB", "7MiB", "1.25GiB", "2T"):
        assert parse_budget(text) == Budget("fixed", Decimal(parse_size(text)))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (KIB - 1, "1023 B"),
        (KIB, "1.0 KiB"),
        (3 * GIB // 2, "1.5 GiB"),
        (23802816640, "22.2 GiB"),  # FLUX's transformer in bfloat16
        (2 * TIB, "2.0 TiB"),
        (5000 * TIB, "5000.0 TiB"),
        (-3 * MIB, "-3.0 MiB"),
    ],
)
def test_format_bytes_largest_unit_filled(count: int, text: str) -> None:
    """A size is shown in the largest binary unit it fills, with one decimal."""
    assert format_bytes(count) == text


def test_format_bytes_is_readable_by_parse_size() -> None:
    """What is shown can be written in a file: an advice such as "lower reserve to 1.0 GiB" can be followed."""
    rng = random.Random(7)  # noqa: S311 - toy numbers
    for _ in range(200):
        count = rng.randrange(10 ** rng.randrange(1, 14))
        assert abs(parse_size(format_bytes(count)) - count) <= count * 0.05


def test_budget_is_a_value() -> None:
    """Equal budgets are equal, and none can be changed."""
    assert parse_budget("80%") == parse_budget("80.0 %")
    budget: Any = parse_budget("80%")
    with pytest.raises(AttributeError):
        budget.amount = 1
