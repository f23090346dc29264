"""The JSON Schemas of the files, made from the models: what editors complete and check with."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from dmconfig.layers import EXTENDS, PROFILES, VERSION
from dmconfig.spec import SCHEMA_VERSION, Spec


def schema_text() -> str:
    """Return the JSON Schema of the current file format, as the text of ``schemas/dmconfig-1.schema.json``."""
    return _schema_text(file_schema(Spec.model_json_schema()), f"dmconfig spec, version {SCHEMA_VERSION}")


def file_schema(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of one file of a spec, from that of a whole spec.

    A file may be one of several layers, so nothing is required of one that extends another or has neither a version
    nor a source. It may have profiles; and where a number or a word is expected, a variable may stand.
    """
    schema: dict[str, Any] = copy.deepcopy(dict(spec))
    for model in (schema, *schema["$defs"].values()):
        model.pop("required", None)
        keys = model["properties"]
        model["properties"] = {name: each if name == VERSION else _or_variable(each) for name, each in keys.items()}
    profile = {key: each for key, each in schema["properties"].items() if key != VERSION}
    schema["$defs"]["Profile"] = {
        "additionalProperties": False,
        "description": PROFILE_MEANING,
        "properties": profile,
        "type": "object",
    }
    schema["properties"] |= FILE_KEY_SCHEMAS
    return schema | {"allOf": [_together(_HAS_VERSION, _HAS_SOURCE), _together(_HAS_SOURCE, _HAS_VERSION)]}


_HAS_VERSION: dict[str, Any] = {"required": [VERSION]}
_HAS_SOURCE: dict[str, Any] = {"required": ["pipeline"], "properties": {"pipeline": {"required": ["source"]}}}


def _together(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What has one has the other too, unless it extends a file."""
    return {"if": one | {"not": {"required": [EXTENDS]}}, "then": other}


PROFILE_MEANING = "The keys of the file that differ with this profile."
FILE_KEY_SCHEMAS: dict[str, dict[str, Any]] = {
    EXTENDS: {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
        "description": "A file, or several, that this one is over: what is not said here is as it is there. Relative "
        "to this file.",
        "examples": ["base.yaml", ["base.yaml", "../site.yaml"]],
        "title": "Extends",
    },
    PROFILES: {
        "additionalProperties": {"anyOf": [{"$ref": "#/$defs/Profile"}, {"type": "null"}]},
        "description": "Named sets of keys over this file, of which --profile or DMCONFIG_PROFILE chooses one.",
        "examples": [{"small": {"device_map": "cuda:0", "low_memory": "cpu_offload_with_hook"}}],
        "title": "Profiles",
        "type": "object",
    },
}
"""The schemas of the keys that are of a file, not of the spec in it."""

_VARIABLE = {"pattern": "\\$\\{", "type": "string"}


def _or_variable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that takes text with a variable wherever it takes a scalar, but not any text."""
    whole = dict(schema)
    for inner in ("additionalProperties", "items"):
        if isinstance(whole.get(inner), dict):
            whole[inner] = _or_variable(whole[inner])
    if "properties" in whole:
        whole["properties"] = {name: _or_variable(each) for name, each in whole["properties"].items()}
    for union in ("anyOf", "oneOf"):
        if union in whole:
            forms = [dict(form) if _is_closed(form) else _or_variable(form) for form in whole[union]]
            return whole | {union: [*forms, _VARIABLE] if any(map(_is_closed, forms)) else forms}
    if not _is_closed(whole):
        return whole
    kept = {key: value for key, value in whole.items() if key in ("default", "description", "examples", "title")}
    return kept | {"anyOf": [{key: value for key, value in whole.items() if key not in kept}, _VARIABLE]}


def _is_closed(schema: Mapping[str, Any]) -> bool:
    """Whether a schema is of scalars, and not of any text."""
    return bool({"enum", "const", "pattern"} & schema.keys()) or schema.get("type") in ("integer", "number", "boolean")


def machine_schema_text() -> str:
    """Return the JSON Schema of machine files, as the text of ``schemas/machine-1.schema.json``."""
    from dmconfig.machine import MACHINE_VERSION, MachineFile

    return _text(MachineFile, f"dmconfig machine, version {MACHINE_VERSION}")


def plan_schema_text() -> str:
    """Return the JSON Schema of what ``plan`` prints as JSON, as the text of ``schemas/plan-1.schema.json``.

    That is a plan, one component explained, all strategies, or problems.
    """
    from dmconfig.render.data import PLAN_VERSION, ComparisonData, ExplanationData, PlanData, ProblemsData

    printed = PlanData | ExplanationData | ComparisonData | ProblemsData
    return printed_schema_text(printed, f"dmconfig plan, version {PLAN_VERSION}")


def printed_schema_text(printed: Any, title: str) -> str:
    """Return the JSON Schema of what a verb prints as JSON: a type of dictionaries, with no keys but those it names."""
    from pydantic import TypeAdapter

    return _schema_text(_closed(TypeAdapter(printed).json_schema()), title)


def _closed(schema: Any) -> Any:
    """A schema in which no object has keys that are not named."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if "properties" in schema and "type" in schema else {}
    return closed | {key: _closed(value) for key, value in schema.items()}


def _text(model: type[BaseModel], title: str) -> str:
    return _schema_text(model.model_json_schema(), title)


def _schema_text(body: Mapping[str, Any], title: str) -> str:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **{key: value for key, value in body.items() if key != "title"},
    }
    return json.dumps(schema, indent=2) + "\n"
