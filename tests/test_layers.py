"""The shape of the package: who may import whom, what start-up loads, and what is published in step with the code."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

import dmconfig
from dmconfig.schema import machine_schema_text, plan_schema_text, schema_text

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dmconfig"
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
MACHINES = sorted((ROOT / "examples" / "machines").glob("*.yaml"))
PACKAGED_MACHINES = sorted((PACKAGE / "data" / "machines").glob("*.yaml"))
SCHEMA = ROOT / "schemas" / "dmconfig-1.schema.json"
MACHINE_SCHEMA = ROOT / "schemas" / "machine-1.schema.json"
PLAN_SCHEMA = ROOT / "schemas" / "plan-1.schema.json"
HEAVY = ("torch", "diffusers", "transformers", "accelerate")

LAYERS = (
    {"version", "paths", "units", "devices", "files", "garbage", "progress", "secrets"},
    {"errors", "hints", "rates"},
    {"explanations", "reports"},
    {"document", "interpolation", "weights", "facts", "virtual"},
    {"merging", "footprint", "cards", "sarif"},
    {"layers"},
    {"resolve"},
    {"validation", "gguf"},
    {"catalog", "spec", "editing", "rearranging", "inventory", "transfers", "layout", "offload", "inputs"},
    {"machine", "configs", "layouts"},
    {"source"},
    {"checkpoint"},
    {"adapters", "original_config", "quantization", "remote_code", "switches"},
    {"importing"},
    {"assembly"},
    {"pipelines"},
    {"components"},
    {"assembling"},
    {"stored"},
    {"measure", "trust", "compatibility"},
    {"check"},
    {"plan", "phases"},
    {"fetch", "render", "output", "console", "writing"},
    {"loaders", "pinning"},
    {"provenance", "build", "dispatch", "doctor", "picture", "schema"},
    {"rehearse", "reference"},
    {"condition", "explain", "fixing", "export"},
    {"checked"},
    {"load"},
    {"starter", "staging"},
    {"cli"},
    {"__init__", "__main__"},
)
"""Each layer imports only from those before it; a package is one module here."""

TORCH_ALLOWED = {
    "footprint",
    "adapters",
    "quantization",
    "switches",
    "inventory",
    "build",
    "loaders",
    "dispatch",
    "virtual",
    "fetch",
    "output",
    "transfers",
    "offload",
    "rehearse",
    "doctor",
    "condition",
    "export",
}
"""Where torch and the libraries on it may be imported; at the top of a file in ``dispatch``,
``export``, ``rehearse`` and ``virtual`` only."""


def module_name(file: Path) -> str:
    """Return the layer's word for a file: its module, or the package of ours that it is in."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(file: Path, *, top_only: bool = False) -> set[str]:
    """Return the dotted names that a file imports, those for type checking left out."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    guarded = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    names: set[str] = set()
    for node in tree.body if top_only else ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


FILES = sorted(file for file in PACKAGE.rglob("*.py"))


def test_every_module_is_in_a_layer() -> None:
    """A new module has to say where it belongs."""
    assert {module_name(file) for file in FILES} == set().union(*LAYERS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_modules_import_only_from_layers_before_them(file: Path) -> None:
    """Imports point one way, so a module can be understood with those before it."""
    level = next(index for index, layer in enumerate(LAYERS) if module_name(file) in layer)
    allowed = set().union(*LAYERS[:level]) | {module_name(file)}
    ours = {name.split(".")[1] for name in imports(file) if name.startswith("dmconfig.")}
    assert ours <= allowed


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_heavy_libraries_are_imported_where_they_are_needed(file: Path) -> None:
    """Torch and its family appear in few modules, and at the top of a file only where everything needs them."""
    module = module_name(file)
    heavy = {name for name in imports(file) if name.split(".")[0] in HEAVY}
    assert not heavy or module in TORCH_ALLOWED
    at_top = {name for name in imports(file, top_only=True) if name.split(".")[0] in HEAVY}
    assert not at_top or module in {"dispatch", "export", "rehearse", "virtual"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate", *map(str, EXAMPLES)],
        ["plan", str(ROOT / "examples" / "digits.yaml")],
        ["plan", str(ROOT / "tests" / "cases" / "valid" / "custom-pipeline.yaml")],
        ["plan", str(ROOT / "examples" / "flux-24gib.yaml"), "--gpus", "24GiB", "--ram", "64GiB"],
        ["plan", str(ROOT / "examples" / "flux-24gib.yaml"), "--machine", "rtx-4090"],
        ["machine"],
        ["schema"],
        ["--version"],
    ],
    ids=[
        "validate",
        "plan weights on disk",
        "plan code of its own",
        "plan from the catalogue",
        "plan for a machine",
        "machine",
        "schema",
        "version",
    ],
)
def test_commands_that_only_look_load_no_torch(arguments: list[str]) -> None:
    """Checking and planning import none of the heavy libraries, in a process of their own."""
    code = (
        "import sys\n"
        "from dmconfig.cli import app\n"
        f"app({arguments!r}, standalone_mode=False)\n"
        f"heavy = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "print(heavy, file=sys.stderr)\n"
        "raise SystemExit(bool(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_no_torch() -> None:
    """``import dmconfig`` costs nothing; its public names are imported on first use."""
    code = f"import sys, dmconfig; raise SystemExit(len(set({HEAVY!r}) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_these() -> None:
    """What the package exports is decided here, and every name is there."""
    assert dmconfig.__all__ == [
        "DMConfigError", "__version__", "derive", "execution_device_of", "load_from_yaml", "load_pipelines", "loaded",
        "plan_from_yaml", "report", "swap", "to_spec", "unload",
    ]  # fmt: skip
    assert all(getattr(dmconfig, name) for name in dmconfig.__all__)
    with pytest.raises(AttributeError):
        dmconfig.no_such_name  # noqa: B018


def test_the_published_schema_is_the_models() -> None:
    """``make schema`` has been run after the last change of the models."""
    assert SCHEMA.read_text(encoding="utf-8") == schema_text()


def test_the_published_schema_of_machines_is_the_models() -> None:
    """``dmconfig machine --schema`` has been written to its file after the last change of the models."""
    assert MACHINE_SCHEMA.read_text(encoding="utf-8") == machine_schema_text()
    jsonschema.Draft202012Validator.check_schema(json.loads(machine_schema_text()))


def test_the_published_schema_of_plans_is_the_records() -> None:
    """``dmconfig schema --plan`` has been written to its file after the last change of the records."""
    assert PLAN_SCHEMA.read_text(encoding="utf-8") == plan_schema_text()
    jsonschema.Draft202012Validator.check_schema(json.loads(plan_schema_text()))


def test_the_published_schema_of_plans_names_and_describes_every_key() -> None:
    """No object takes a key that is not named; every key is described, and a size or time says its unit."""
    for name, record in json.loads(plan_schema_text())["$defs"].items():
        if record["type"] != "object":
            continue
        assert record["additionalProperties"] is False, name
        for key, value in record["properties"].items():
            described = value.get("description", "")
            assert described or "$ref" in value or "const" in value or value["type"] in ("boolean", "array"), (
                name,
                key,
            )
            assert not key.endswith("bytes") or "in bytes" in described, (name, key)
            assert not key.endswith("seconds") or "seconds" in described, (name, key)


@pytest.mark.parametrize("file", MACHINES + PACKAGED_MACHINES, ids=lambda file: file.name)
def test_machines_match_the_schema(file: Path) -> None:
    """An independent validator accepts each machine file of ours; those of the examples name the schema for editors."""
    text = file.read_text(encoding="utf-8")
    jsonschema.validate(yaml.safe_load(text), json.loads(machine_schema_text()))
    head = "# yaml-language-server: $schema=../../schemas/machine-1.schema.json\n"
    assert text.startswith(head) or file in PACKAGED_MACHINES


def test_data_files_are_installed() -> None:
    """Every data file of the package is one that the build is told of."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["dmconfig"]
    installed = {file for pattern in told for file in PACKAGE.glob(pattern)}
    assert {file for file in (PACKAGE / "data").rglob("*") if file.is_file()} <= installed


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_examples_match_the_schema_and_begin_as_agreed(file: Path) -> None:
    """An independent validator accepts each example; each begins with its schema, its purpose, memory and command."""
    text = file.read_text(encoding="utf-8")
    jsonschema.validate(yaml.safe_load(text), json.loads(schema_text()))
    head = text[: text.index("version:")]
    assert head.startswith("# yaml-language-server: $schema=../schemas/dmconfig-1.schema.json\n")
    assert "# Memory:" in head
    assert f"#   dmconfig run examples/{file.name} --prompt" in head


def test_all_promised_examples_are_there() -> None:
    """The examples a newcomer is pointed to exist."""
    promised = {"digits", "digits-two-gpus", "digits-low-memory", "sdxl-two-gpus", "flux-24gib", "wan-2x24"}
    assert {file.stem for file in EXAMPLES} >= promised


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_named_tuples_have_no_default_of_a_dataclass(file: Path) -> None:
    """``field(...)`` is no default there, and no type checker says so: the value would be the description of one."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases):
            defaults = [ast.unparse(each.value) for each in node.body if isinstance(each, ast.AnnAssign) and each.value]
            assert not [default for default in defaults if default.startswith("field(")], node.name
