"""The published schema against the command: what the one refuses the other refuses, as far as a schema can say it.

Files are read by PyYAML's safe loader, as an editor reads them, and checked by a validator that is not ours.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dmconfig.devices import DEVICE_PATTERN, DISK, RUNS_PATTERN, device_or_none
from dmconfig.reference import key_docs
from dmconfig.units import BUDGET_PATTERN, SIZE_PATTERN, parse_budget, parse_size

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "schemas" / "dmconfig-1.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
CASES = ROOT / "tests" / "cases"
RIGHT = [*sorted((ROOT / "examples").glob("*.yaml")), *sorted((CASES / "valid").glob("*.yaml"))]
OF_SHAPE = re.compile(r"error\[DM(20[1-69]|208|210) ")
"""The codes of what a schema can say: keys, types, words, devices, sizes. One device twice (DM207) is none of it."""

BEYOND = {
    "placement-without-execution",  # a layer may say of a placement only what differs
    "version-and-source-missing",  # and leave out what other layers have
    "several-in-one-place",  # of which component a class takes several is not in the file
    "layers-stale-config",  # what a class takes is not in the file
    "variable-secret-refused",  # what a variable has is not in the file
}
"""Wrong cases of shape that a schema of one file cannot refuse."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader, with the tags of ours as editors take them: the value behind them."""


def _untagged(loader: Any, _suffix: str, node: yaml.Node) -> Any:
    return (
        loader.construct_sequence(node, deep=True)
        if isinstance(node, yaml.SequenceNode)
        else loader.construct_mapping(node, deep=True)
    )


_Loader.add_multi_constructor("!", _untagged)


def as_json(data: Any) -> Any:
    """Data as a validator of JSON takes it: every key is text."""
    if isinstance(data, dict):
        return {str(key): as_json(value) for key, value in data.items()}
    return [as_json(item) for item in data] if isinstance(data, list) else data


def read(file: Path) -> Any:
    """What an editor makes of a file."""
    return as_json(yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader))  # noqa: S506 - a safe loader


def expressible() -> list[Path]:
    """Return the wrong cases whose only problems are of a kind that a schema can say, and of the file alone."""
    found = []
    for file in sorted((CASES / "invalid").glob("*.yaml")):
        report = file.with_suffix(".txt").read_text(encoding="utf-8")
        heads = [line for line in report.splitlines() if line.startswith("error[")]
        if (
            file.stem not in BEYOND
            and all(OF_SHAPE.match(head) for head in heads)
            and f"{file.name}:" in "".join(heads)
        ):
            found.append(file)
    return found


@pytest.mark.parametrize("file", RIGHT, ids=lambda file: file.stem)
def test_schema_accepts_what_the_command_accepts(file: Path) -> None:
    """No editor marks a file that is right."""
    VALIDATOR.validate(read(file))


@pytest.mark.parametrize("file", expressible(), ids=lambda file: file.stem)
def test_schema_refuses_what_the_command_refuses(file: Path) -> None:
    """An editor marks every mistake of keys, types, words, devices and sizes that the command reports."""
    assert not VALIDATOR.is_valid(read(file))


def test_most_wrong_cases_of_shape_are_expressible() -> None:
    """The rule above leaves a corpus worth the name."""
    assert len(expressible()) >= 70


def _described(schema: Any, path: str = "") -> list[str]:
    """The properties in a schema that have no description."""
    if isinstance(schema, list):
        return [missing for each in schema for missing in _described(each, path)]
    if not isinstance(schema, dict):
        return []
    bare = [
        f"{path}.{name}"
        for name, each in schema.get("properties", {}).items()
        if "description" not in each and "required" not in each
    ]
    return bare + [
        missing
        for name, each in schema.items()
        if name not in ("examples", "default")
        for missing in _described(each, f"{path}.{name}")
    ]


def test_schema_describes_every_key() -> None:
    """Whatever key an editor completes, it has something to say of it."""
    assert _described(SCHEMA) == []


def test_schema_shows_an_example_of_every_key() -> None:
    """Every key of the file comes with an example, and every example is right by the schema."""
    for doc in key_docs():
        assert doc.description, doc.path
        example = {"version": 1, "pipeline": {"source": "./x"}} | copy.deepcopy(dict(doc.example))
        if "pipeline" in doc.example:
            example["pipeline"] = {"source": "./x"} | dict(doc.example["pipeline"])
        if doc.path.startswith("device_map.<component>.") and not doc.path.endswith("execution"):
            example["device_map"]["vae"]["execution"] = 0
        VALIDATOR.validate(as_json(example))


def _accepts(read_text: Any, text: str) -> bool:
    try:
        read_text(text)
    except ValueError:
        return False
    return True


LIKE_SIZES = st.from_regex(r"\A(free-?)?[0-9]{0,4}([.,][0-9]{1,2})?[ \t]?(%|[KMGTPkmgt]i?[Bb]?|B|b)?\Z") | st.text(
    max_size=6
)
LIKE_DEVICES = st.from_regex(r"\A ?(cuda|gpu|cpu|disk|mps|xpu|hpu|CUDA|c)?:?[0-9]{0,4} ?\Z") | st.text(max_size=6)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(LIKE_SIZES)
def test_patterns_of_sizes_are_what_the_command_reads(text: str) -> None:
    """The pattern of a size, and of a budget, accepts a text exactly when the command does."""
    assert bool(re.search(SIZE_PATTERN, text)) == _accepts(parse_size, text)
    assert bool(re.search(BUDGET_PATTERN, text)) == _accepts(parse_budget, text)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(LIKE_DEVICES)
def test_pattern_of_devices_is_what_the_command_reads(text: str) -> None:
    """The pattern of a device accepts a text exactly when the command does; nothing runs on disk."""
    device = device_or_none(text)
    assert bool(re.search(DEVICE_PATTERN, text)) == (device is not None)
    assert bool(re.search(RUNS_PATTERN, text)) == (device not in (None, DISK))
