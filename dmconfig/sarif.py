"""Problems as a SARIF log, version 2.1.0: what code scanning of GitHub and others takes in.

Source: the standard "Static Analysis Results Interchange Format (SARIF) Version 2.1.0" of OASIS.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dmconfig.errors import Code, Edit, Problem
from dmconfig.explanations import EXPLANATIONS
from dmconfig.paths import Location, render_path
from dmconfig.version import __version__

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def sarif_log(verdicts: Iterable[tuple[str, Sequence[Problem]]]) -> dict[str, Any]:
    """Return the log of a run over files, each with its problems; a file without any adds nothing.

    A problem that is nowhere in a file, because an override brought it, is placed at the file's start.
    """
    found = [(file, problem) for file, problems in verdicts for problem in problems]
    rules = {code: index for index, code in enumerate(dict.fromkeys(problem.code for _, problem in found))}
    driver = {"name": "dmconfig", "semanticVersion": __version__, "rules": [_rule(code) for code in rules]}
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(problem, file, rules) for file, problem in found],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(code: Code) -> dict[str, Any]:
    explanation = EXPLANATIONS[code]
    return {
        "id": str(code),
        "name": "".join(word.title() for word in code.slug.split("-")),
        "shortDescription": {"text": code.slug.replace("-", " ")},
        "fullDescription": {"text": explanation.cause},
        "help": {"text": f"{explanation.remedy}\n\ndmconfig explain {code} says more."},
        "defaultConfiguration": {"level": "error"},
    }


def _result(problem: Problem, file: str, rules: Mapping[Code, int]) -> dict[str, Any]:
    location: dict[str, Any] = {"physicalLocation": _physical(problem.location or Location(file, 1, 1))}
    if problem.path:
        location["logicalLocations"] = [{"fullyQualifiedName": render_path(problem.path)}]
    text = ". ".join(part for part in (problem.what, problem.why, problem.fix) if part)
    result = {
        "ruleId": str(problem.code),
        "ruleIndex": rules[problem.code],
        "level": "error",
        "message": {"text": f"{problem.origin}: {text}" if problem.origin else text},
        "locations": [location],
    }
    edits = [edit for edit in problem.edits if isinstance(edit, Edit)]
    is_whole = edits and len(edits) == len(problem.edits)  # where a key moves to is for its file's text to say
    return result | ({"fixes": [_fix(edits)]} if is_whole else {})


def _physical(location: Location) -> dict[str, Any]:
    return {"artifactLocation": _artifact(location.file), "region": _region(location)}


def _region(location: Location) -> dict[str, int]:
    region = {"startLine": location.line, "startColumn": location.column}
    return region | ({"endColumn": location.column + location.length} if location.length else {})


def _fix(edits: Sequence[Edit]) -> dict[str, Any]:
    change = {
        "artifactLocation": _artifact(edits[0].location.file),
        "replacements": [
            {"deletedRegion": _region(edit.location), "insertedContent": {"text": edit.new}} for edit in edits
        ],
    }
    words = ", ".join(f"{edit.old} -> {edit.new}" for edit in edits)
    return {"description": {"text": words}, "artifactChanges": [change]}


def _artifact(file: str) -> dict[str, str]:
    path = Path(file)
    return {"uri": path.as_uri() if path.is_absolute() else quote(path.as_posix())}
