"""The JSON Schemas of the files, made from the models: what editors complete and check with."""

from __future__ import annotations

import json

from pydantic import BaseModel

from dmconfig.machine import MACHINE_VERSION, MachineFile
from dmconfig.spec import SCHEMA_VERSION, Spec


def schema_text() -> str:
    """Return the JSON Schema of the current file format, as the text of ``schemas/dmconfig-1.schema.json``."""
    return _text(Spec, f"dmconfig spec, version {SCHEMA_VERSION}")


def machine_schema_text() -> str:
    """Return the JSON Schema of machine files, as the text of ``schemas/machine-1.schema.json``."""
    return _text(MachineFile, f"dmconfig machine, version {MACHINE_VERSION}")


def _text(model: type[BaseModel], title: str) -> str:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **{key: value for key, value in model.model_json_schema().items() if key != "title"},
    }
    return json.dumps(schema, indent=2) + "\n"
