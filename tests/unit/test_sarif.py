"""SARIF logs against the standard: its objects as far as we write them, and no key that it does not have there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from dmconfig.cli import app

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "tests" / "cases" / "invalid").glob("*.yaml"))[::6]


def closed(required: str = "", **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these keys and no other."""
    return {
        "type": "object", "properties": properties, "required": required.split(), "additionalProperties": False,
    }  # fmt: skip


def listed(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


TEXT = {"type": "string"}
FROM_ONE = {"type": "integer", "minimum": 1}
LEVEL = {"enum": ["none", "note", "warning", "error"]}
MESSAGE = closed("text", text=TEXT)
ARTIFACT = closed(uri={"type": "string", "pattern": r"^[!#-;=?-\[\]_a-z~%]+$"})
REGION = closed(startLine=FROM_ONE, startColumn=FROM_ONE, endLine=FROM_ONE, endColumn=FROM_ONE)
PHYSICAL = closed("artifactLocation", artifactLocation=ARTIFACT, region=REGION)
LOGICAL = closed(name=TEXT, fullyQualifiedName=TEXT, kind=TEXT)
LOCATION = closed(physicalLocation=PHYSICAL, logicalLocations=listed(LOGICAL, uniqueItems=True))
REPLACEMENT = closed("deletedRegion", deletedRegion=REGION, insertedContent=closed(text=TEXT))
CHANGE = closed(
    "artifactLocation replacements", artifactLocation=ARTIFACT, replacements=listed(REPLACEMENT, minItems=1)
)
FIX = closed("artifactChanges", description=MESSAGE, artifactChanges=listed(CHANGE, minItems=1, uniqueItems=True))
RULE = closed(
    "id", id=TEXT, name=TEXT, shortDescription=MESSAGE, fullDescription=MESSAGE, help=MESSAGE,
    defaultConfiguration=closed(level=LEVEL),
)  # fmt: skip
RESULT = closed(
    "message", ruleId=TEXT, ruleIndex={"type": "integer", "minimum": -1}, level=LEVEL, message=MESSAGE,
    locations=listed(LOCATION), fixes=listed(FIX, uniqueItems=True),
)  # fmt: skip
DRIVER = closed("name", name=TEXT, semanticVersion=TEXT, rules=listed(RULE, uniqueItems=True))
RUN = closed(
    "tool", tool=closed("driver", driver=DRIVER), results=listed(RESULT),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
)  # fmt: skip
LOG = closed("version runs", **{"$schema": TEXT}, version={"const": "2.1.0"}, runs=listed(RUN))
"""Source: OASIS, "Static Analysis Results Interchange Format (SARIF) Version 2.1.0 Plus Errata 01", section 3."""


def test_log_of_many_wrong_files_is_what_the_standard_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every sixth wrong case in one run: the objects of the standard, rules that are there, and places that are."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    names = [str(file.relative_to(ROOT)) for file in FILES]
    result = CliRunner().invoke(app, ["validate", *names, "--format", "sarif"])
    log = json.loads(result.stdout)
    jsonschema.Draft202012Validator(LOG).validate(log)
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert len(run["results"]) > len(FILES) // 2
    assert any("fixes" in each for each in run["results"])
    for each in run["results"]:
        assert rules[each["ruleIndex"]]["id"] == each["ruleId"]
        place = each["locations"][0]["physicalLocation"]
        lines = (ROOT / place["artifactLocation"]["uri"].replace("%20", " ")).read_bytes().count(b"\n") + 1
        assert place["region"]["startLine"] <= lines
        assert place["region"].get("endColumn", 10**6) > place["region"]["startColumn"]
