"""Data written as YAML: what is read back is the same, to the type."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dmconfig.document import parse_document
from dmconfig.provenance import as_json
from dmconfig.resolve import resolve
from dmconfig.writing import Verbatim, as_yaml, json_text
from tests.conftest import document_from

TEXTS = [
    "plain", "cuda:0", "./models/sdxl", "a b", "", " ", " a", "a ", "off", "no", "y", "null", "~", "true", "12", "1.5",
    "0123", "0o17", "0x1f", "1e9", "1_000", "12:30", "2024-01-01", ".inf", "- a", "a: b", "a:", "#", "a #b", "a#b",
    "[a]", "{a}", "*a", "&a", "!a", "!append", "|", ">", "%", "@a", "`a`", "'", '"', "it's", 'say "hi"', "a\\b", "a\nb",
    "a\tb", "\n", "a\r\nb", "---", "...", "--- a", "?", "? a", "<<", "=", "é", "日本", "🦊", "\x7f", "\x85", "\u2028",
    "\ufeff", "\u200b", "$", "$$", "${X}", "$X", "$5", "a, b", "key", "1" * 70, "+1", "-", "--", "1.", ".5", "1e-5",
]  # fmt: skip
NUMBERS = [0, -1, 20, 10**18, 0.5, -2.0, 1e-5, 1e20, 1.5e-7, 1e16, 123456.789, math.inf, -math.inf, True, False, None]


def read_back(data: dict[str, Any]) -> Any:
    """Return what a spec of this text says."""
    return resolve(document_from(as_yaml(data)), environ={}).data


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("value", [*TEXTS, *NUMBERS], ids=repr)
def test_as_yaml_scalar_comes_back(value: Any) -> None:
    """As a value, in a list and, for text, as a key."""
    data: dict[str, Any] = {"a": value, "b": [value, {"c": value}]}
    if isinstance(value, str) and "${" not in value:  # which no key may hold
        data |= {value: 1}
    assert same(read_back(data), data)


def random_value(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(4 if depth < 3 else 2):
        case 0:
            return rng.choice(TEXTS)
        case 1:
            return rng.choice(NUMBERS)
        case 2:
            return [random_value(rng, depth + 1) for _ in range(rng.randrange(3))]
        case _:
            return {rng.choice(TEXTS): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}


@pytest.mark.parametrize("seed", range(50))
def test_as_yaml_any_data_comes_back(seed: int) -> None:
    """Nested lists and mappings of all that is awkward."""
    rng = random.Random(seed)  # noqa: S311 - toy data
    data = {"a": random_value(rng), "b": random_value(rng)}
    assert same(read_back(data), data)


def test_as_yaml_means_the_same_to_a_reader_of_yaml_1_1() -> None:
    """PyYAML's own loader, which reads 1.1, finds the same values."""
    data = {"a": [text for text in TEXTS if "$" not in text], "b": [n for n in NUMBERS if n is not None]}
    loaded = yaml.safe_load(as_yaml(data))
    assert same(loaded, data)


def test_as_yaml_is_what_one_would_write() -> None:
    """Blocks, no needless quotes, and comments beside values."""
    data = {
        "version": 1,
        "pipeline": {"source": "./x"},
        "e": {},
        "l": [],
        "d": {"u": ["cuda:0", {"a": None}]},
        "t": "off",
    }
    assert as_yaml(data, {("version",): "one.yaml:1", ("d", "u", 0): "two\nlines"}) == (
        "version: 1     # one.yaml:1\n"
        "pipeline:\n"
        "  source: ./x\n"
        "e: {}\n"
        "l: []\n"
        "d:\n"
        "  u:\n"
        "    - cuda:0   # two lines\n"
        "    -\n"
        "      a: null\n"
        't: "off"\n'
    )


@pytest.mark.parametrize(
    ("text", "is_text"), [("${X}", False), ("${X:-2}GiB", False), ("${X:-a: b}", True), ("${X:-a: b}", False)]
)
def test_as_yaml_leaves_variables_as_they_were_written(text: str, is_text: bool) -> None:
    """What was plain stays plain where it can, what was quoted stays quoted."""
    document = parse_document(as_yaml({"a": Verbatim(text, is_text=is_text)}), name="", folder=Path())
    assert document.data == {"a": text}
    assert (("a",) in document.quoted) == (is_text or ": " in text)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**60), 10**60) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b c", "1e5", "é"]), inner),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(value=JSON_VALUES)
def test_data_comes_back_from_both_formats(value: Any) -> None:
    """What is written as YAML, or as JSON, is the same data to our reader, and the JSON also to a tool for JSON."""
    data = {"call": {"x": value}}
    text = json_text(as_json(data))
    assert same(read_back(data), data)
    assert same(resolve(document_from(text), environ={}).data, data)
    assert same(json.loads(text), as_json(data))


@pytest.mark.parametrize("value", [1e-05, 1e22, -1e-300, 5e-324, 1.5e300])
def test_small_and_large_numbers_of_json_are_numbers_to_yaml_1_1_too(value: float) -> None:
    """PyYAML's own loader takes 1e-05 for text."""
    assert yaml.safe_load(json_text([value, "1e-05"])) == [value, "1e-05"]
