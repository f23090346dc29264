"""The JSON Schemas of the files, made from the models: what editors complete and check with."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from dmconfig.layers import EXTENDS, PROFILES, VERSION
from dmconfig.machine import MACHINE_VERSION, MachineFile
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
        model["properties"] = {name: _or_variable(name, each) for name, each in model["properties"].items()}
    profile = {key: each for key, each in schema["properties"].items() if key != VERSION}
    schema["$defs"]["Profile"] = {
        "additionalProperties": False,
        "description": "The keys of the file that differ with this profile.",
        "properties": profile,
        "type": "object",
    }
    schema["properties"] |= _FILE_KEYS
    return schema | {"allOf": [_together(_HAS_VERSION, _HAS_SOURCE), _together(_HAS_SOURCE, _HAS_VERSION)]}


_HAS_VERSION: dict[str, Any] = {"required": [VERSION]}
_HAS_SOURCE: dict[str, Any] = {"required": ["pipeline"], "properties": {"pipeline": {"required": ["source"]}}}


def _together(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What has one has the other too, unless it extends a file."""
    return {"if": one | {"not": {"required": [EXTENDS]}}, "then": other}


_FILE_KEYS = {
    EXTENDS: {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
        "description": "A file, or several, that this one is over: what is not said here is as it is there. Relative "
        "to this file.",
        "title": "Extends",
    },
    PROFILES: {
        "additionalProperties": {"anyOf": [{"$ref": "#/$defs/Profile"}, {"type": "null"}]},
        "description": "Named sets of keys over this file, of which --profile or DMCONFIG_PROFILE chooses one.",
        "title": "Profiles",
        "type": "object",
    },
}
_VARIABLE = {"pattern": "\\$\\{", "type": "string"}


def _or_variable(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that also takes text with a variable, where it would not take any text."""
    if isinstance(schema.get("additionalProperties"), dict):
        return schema | {"additionalProperties": _or_variable(name, schema["additionalProperties"])}
    if name == VERSION or _takes_text(schema):
        return schema
    kept = {key: value for key, value in schema.items() if key in ("default", "description", "title")}
    return kept | {"anyOf": [{key: value for key, value in schema.items() if key not in kept}, _VARIABLE]}


def _takes_text(schema: Mapping[str, Any]) -> bool:
    """Whether any text is right for a schema, or no scalar at all is."""
    if "anyOf" in schema:
        return any(map(_takes_text, schema["anyOf"]))
    is_closed = "enum" in schema or "const" in schema
    return not is_closed and schema.get("type") not in ("integer", "number", "boolean", "null")


def machine_schema_text() -> str:
    """Return the JSON Schema of machine files, as the text of ``schemas/machine-1.schema.json``."""
    return _text(MachineFile, f"dmconfig machine, version {MACHINE_VERSION}")


def plan_schema_text() -> str:
    """Return the JSON Schema of what ``plan`` prints as JSON, as the text of ``schemas/plan-1.schema.json``.

    That is a plan, one component explained, all strategies, or problems.
    """
    from pydantic import TypeAdapter

    from dmconfig.render.data import PLAN_VERSION, ComparisonData, ExplanationData, PlanData, ProblemsData

    printed = TypeAdapter[Any](PlanData | ExplanationData | ComparisonData | ProblemsData)
    return _schema_text(_closed(printed.json_schema()), f"dmconfig plan, version {PLAN_VERSION}")


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
