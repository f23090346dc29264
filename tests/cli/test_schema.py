"""``dmconfig schema``: the JSON Schema of the file, as published and as a validator reads it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from dmconfig.cli import app

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
PUBLISHED = ROOT / "schemas" / "dmconfig-1.schema.json"


def test_schema_command_prints_the_published_file() -> None:
    """The command prints ``schemas/dmconfig-1.schema.json`` byte for byte, on stdout alone."""
    result = CliRunner().invoke(app, ["schema"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == PUBLISHED.read_text(encoding="utf-8")


def test_schema_is_itself_valid() -> None:
    """A validator that is not ours accepts the schema."""
    jsonschema.Draft202012Validator.check_schema(json.loads(PUBLISHED.read_text(encoding="utf-8")))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_schema_accepts_the_examples(file: Path) -> None:
    """Every example is valid by the published schema, and names it for editors in its first line."""
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=../schemas/dmconfig-1.schema.json\n")
    jsonschema.validate(yaml.safe_load(text), json.loads(PUBLISHED.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "right",
    [
        {"device_map": "cuda:0"},
        {"pipeline": {"dtype": "float16"}, "components": {"vae": None}},
        {"extends": "base.yaml", "version": 1},
        {"extends": ["base.yaml", "more.yaml"], "pipeline": {"source": "./x"}},
        {"profiles": {"prod": {"reserve": "2GiB", "device_map": {"vae": {"offload": "model"}}}, "dev": None}},
        {"low_memory": "${MODE:-none}", "calls": {"unet": "${CALLS}"}, "pipeline": {"dtype": "${DTYPE}"}},
        {"group_offload": {"use_stream": "${STREAM}", "num_blocks_per_group": "${BLOCKS:-2}"}},
    ],
    ids=["fragment", "fragment-pipeline", "extends", "extends-two", "profiles", "variables", "variables-in-groups"],
)
def test_schema_accepts_files_that_are_layers(right: dict[str, object]) -> None:
    """A part of a spec, and a variable where a number or a word stands, are no mistakes to an editor."""
    jsonschema.validate(right, json.loads(PUBLISHED.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 1},
        {"version": 2, "pipeline": {"source": "./x"}},
        {"version": 1, "pipeline": {"source": "./x", "torch_dtype": "float16"}},
        {"version": 1, "pipeline": {"source": "./x"}, "device": "cuda"},
        {"version": 1, "pipeline": {"source": "./x"}, "low_memory": "model"},
        {"version": 1, "pipeline": {"source": "./x"}, "device_map": ["cuda:0"]},
        {"version": 1, "pipeline": {"source": "./x"}, "components": {"unet": {"devise": "cuda:0"}}},
        {"pipeline": {"source": "./x"}},
        {"version": 1, "pipeline": {"dtype": "float16"}},
        {"extends": []},
        {"extends": 3},
        {"profiles": {"prod": {"extends": "base.yaml"}}},
        {"profiles": {"prod": {"version": 1}}},
        {"profiles": {"prod": {"devise_map": "cuda:0"}}},
        {"profiles": ["prod"]},
        {"version": "${VERSION}", "extends": "base.yaml"},
    ],
    ids=[
        "no-pipeline",
        "newer",
        "unknown-key",
        "unknown-top-key",
        "unknown-word",
        "list",
        "unknown-component-key",
        "no-version",
        "no-source",
        "extends-nothing",
        "extends-number",
        "profile-extends",
        "profile-version",
        "profile-unknown-key",
        "profiles-list",
        "variable-version",
    ],
)
def test_schema_refuses_what_the_command_refuses(wrong: dict[str, object]) -> None:
    """An editor with the schema marks the mistakes that the command would report."""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, json.loads(PUBLISHED.read_text(encoding="utf-8")))


def test_two_schemas_at_once_are_refused() -> None:
    """A command prints one; none of two that are asked for is left out in silence."""
    result = CliRunner().invoke(app, ["schema", "--plan", "--sweep"])
    assert result.exit_code == 2
    assert "--plan and --sweep are schemas of their own" in result.output
