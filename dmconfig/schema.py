"""The JSON Schema of the file, made from the models: what editors complete and check with."""

from __future__ import annotations

import json

from dmconfig.spec import SCHEMA_VERSION, Spec


def schema_text() -> str:
    """Return the JSON Schema of the current file format, as the text of ``schemas/dmconfig-1.schema.json``."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"dmconfig spec, version {SCHEMA_VERSION}",
        **{key: value for key, value in Spec.model_json_schema().items() if key != "title"},
    }
    return json.dumps(schema, indent=2) + "\n"
