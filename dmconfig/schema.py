"""The JSON Schemas of the files, made from the models: what editors complete and check with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from dmconfig.machine import MACHINE_VERSION, MachineFile
from dmconfig.spec import SCHEMA_VERSION, Spec


def schema_text() -> str:
    """Return the JSON Schema of the current file format, as the text of ``schemas/dmconfig-1.schema.json``."""
    return _text(Spec, f"dmconfig spec, version {SCHEMA_VERSION}")


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
