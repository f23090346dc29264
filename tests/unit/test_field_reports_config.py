"""What users of other tools reported of configuration, YAML and validation, each held against ours.

The report that a test answers is named in its docstring.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from dmconfig.check import check
from dmconfig.checked import check_file
from dmconfig.errors import Code, DMConfigError, Problem
from dmconfig.load import load_from_yaml
from dmconfig.reports import problem_blocks, problem_line
from dmconfig.resolve import override_from_text
from dmconfig.spec import validate_spec
from tests.conftest import DIGITS, EXAMPLES, resolved_from

HEAD = f"version: 1\npipeline: {{source: {EXAMPLES}/digits/pipeline}}\n"


def problems_of(text: str, folder: Path, overrides: dict[str, str] | None = None) -> tuple[Problem, ...]:
    """Everything that a check of the file says; its name is spec.yaml."""
    file = folder / "spec.yaml"
    file.write_text(text, encoding="utf-8")
    claims = [override_from_text(f"{key}={value}") for key, value in (overrides or {}).items()]
    with pytest.raises(DMConfigError) as caught:
        check_file(file, claims)
    return caught.value.problems


def where(problem: Problem) -> tuple[int, int]:
    assert problem.location is not None
    return problem.location.line, problem.location.column


def test_nested_unknown_key_is_one_line_with_file_key_and_line(tmp_path: Path) -> None:
    """Pyaml issue 11: the line is lost once the model validates."""
    (problem,) = problems_of(f"{HEAD}components:\n  unet:\n    devise: cuda:0\n", tmp_path)
    assert problem_line(problem, "spec.yaml") == (
        f"{tmp_path}/spec.yaml:5:5: error DM202: components.unet.devise: unknown key 'devise'; "
        "it belongs under 'device_map.unet'"
    )


def test_wrong_type_two_levels_down_shows_the_line(tmp_path: Path) -> None:
    """Ape issue 1718: the error is right, but does not show which part of the file."""
    problems = problems_of(f"{HEAD}group_offload:\n  num_blocks_per_group: [2]   # pairs\n", tmp_path)
    (block,) = problem_blocks(problems)
    assert "    4 |   num_blocks_per_group: [2]   # pairs\n      |                         ^\n" in block
    assert "what expected a whole number, found a list" in block


def test_all_errors_at_once_each_with_a_line_a_missing_key_with_its_parents(tmp_path: Path) -> None:
    """Dagster PR 26962: path and line for each error, for a missing field the line of its parent."""
    found = problems_of("version: 1\npipeline:\n  dtype: fp17\ncomponents: 3\n", tmp_path)
    assert [(problem.code, where(problem)) for problem in found] == [
        (Code.MISSING_KEY, (2, 1)),
        (Code.BAD_DTYPE, (3, 10)),
        (Code.WRONG_TYPE, (4, 13)),
    ]


def test_unknown_top_level_key_is_refused(tmp_path: Path) -> None:
    """Quartodoc issue 116: unknown keys at the top bypass validation."""
    (problem,) = problems_of(f"{HEAD}verison: 1\n", tmp_path)
    assert (problem.code, where(problem), problem.fix) == (Code.UNKNOWN_KEY, (3, 1), "did you mean 'version'?")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("components: {unet: bug}", "expected a mapping, found the text 'bug'"),
        ("components: {scheduler: 5}", "expected a mapping, found the number 5"),
    ],
)
def test_text_where_a_mapping_is_expected_is_told_as_that(line: str, what: str, tmp_path: Path) -> None:
    """Hydra issue 231: a string where a mapping is expected gives an attribute error."""
    (problem,) = problems_of(f"{HEAD}{line}\n", tmp_path)
    assert (problem.code, problem.what, where(problem)[0]) == (Code.WRONG_TYPE, what, 3)


def test_variable_that_cannot_be_replaced_names_the_key_and_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra issue 2848: a failed interpolation does not name the key that used it."""
    monkeypatch.delenv("MODLE", raising=False)
    (problem,) = problems_of(f"{HEAD}offload_folder: ${{MODLE}}\n", tmp_path)
    assert (problem.code, problem.path, where(problem)) == (Code.UNSET_VARIABLE, ("offload_folder",), (3, 17))
    assert "MODLE" in problem.what


def test_order_of_keys_never_matters() -> None:
    """Jsonargparse issue 161: the class before or after its arguments changed the result."""
    parts = (
        "version: 1\n",
        "pipeline:\n  source: ./digits/pipeline\n",
        "components:\n  scheduler: {config: {timestep_spacing: trailing}, class: EulerDiscreteScheduler}\n",
        "device_map: {default: cpu, unet: cuda:0}\n",
        "max_memory: {cpu: 8GiB, 0: 8GiB}\n",
    )
    first = resolved_from("".join(parts))
    for order in itertools.permutations(parts):
        again = resolved_from("".join(order))
        assert validate_spec(again) == validate_spec(first)
        assert check(again, validate_spec(again)).components == check(first, validate_spec(first)).components


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("device_map: [cuda:0]", "expected a device: "),
        ("device_map: {unet: {execution: cuda:0, offload: modle}, default: cpu}", "'modle' is not accepted; one of: "),
        ("device_map: {unet: {execution: cuda0}, default: cpu}", "'cuda0' is not a device; accepted are "),
        ("reserve: {vae: lots}", "'lots' is not a size; expected "),
    ],
)
def test_union_is_answered_by_the_branch_that_was_meant(line: str, what: str, tmp_path: Path) -> None:
    """Jsonargparse issue 842: the error of a union dumps every branch."""
    (problem,) = problems_of(f"{HEAD}{line}\n", tmp_path)
    assert problem.what.startswith(what)


def test_other_class_by_override_reports_the_values_that_are_stale(tmp_path: Path) -> None:
    """Jsonargparse PR 212: overriding a class drops the old arguments with a warning."""
    text = (
        f"{HEAD}components:\n  scheduler:\n    class: EulerDiscreteScheduler\n    config: {{use_karras_sigmas: true}}\n"
    )
    (problem,) = problems_of(text, tmp_path, {"components.scheduler.class": "DDIMScheduler"})
    assert problem.path == ("components", "scheduler", "config", "use_karras_sigmas")
    assert (problem.code, where(problem)) == (Code.UNKNOWN_KEY, (6, 14))
    assert "DDIMScheduler" in problem.what


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("components:\n  unet: {}\n  vae: {}\n  unet: {}\n", ((6, 3), "line 4, column 3")),
        ("max_memory:\n  0: 20GiB\n  '0': 10GiB\n", ((5, 3), "line 4, column 3")),
        ("max_memory: {0: 20GiB, 0: 10GiB}\n", ((3, 24), "line 3, column 14")),
    ],
)
def test_duplicate_key_is_refused_with_both_places(text: str, places: Any, tmp_path: Path) -> None:
    """PyYAML issue 165: of two equal keys the last wins in silence."""
    (problem,) = problems_of(f"{HEAD}{text}", tmp_path)
    assert (problem.code, where(problem)) == (Code.DUPLICATE_KEY, places[0])
    assert problem.what.endswith(f"first at {places[1]}")


def test_bare_exponent_is_a_number() -> None:
    """LlamaFactory issue 4014: 2e-5 is text in YAML 1.1."""
    resolved = resolved_from(
        f"{DIGITS}call: {{eta: 1e-4}}\ncomponents: {{scheduler: {{config: {{beta_start: 2e-5}}}}}}\n"
    )
    spec = validate_spec(resolved)
    assert spec.call["eta"] == 1e-4
    scheduler = spec.components["scheduler"]
    assert scheduler is not None
    assert scheduler.config == {"beta_start": 2e-5}
    assert check(resolved, spec).class_name == "StableDiffusionPipeline"


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("low_memory: off", "write none"),
        ("low_memory: false", "did you mean 'none'?"),
        ("low_memory: null", "did you mean 'none'?"),
        ("device_map: {unet: {execution: 0, offload: off}, default: cpu}", "write none"),
        ("components: {vae: {variant: no}}", "quote it: 'no'"),
        ("call: {prompt: on}", "quote it if text is meant ('on'), or write true"),
    ],
)
def test_off_is_neither_false_nor_text_in_silence(line: str, fix: str, tmp_path: Path) -> None:
    """Milvus PR 33433: off becomes false; for offloading it means none, and text has to be quoted."""
    (problem,) = problems_of(f"{HEAD}{line}\n", tmp_path)
    assert problem.fix == fix


def test_version_decides_the_schema_before_anything_else(tmp_path: Path) -> None:
    """Ray issue 33577: two schemas are tried, and the error shown is from the wrong one."""
    (problem,) = problems_of("version: 2\nservices: [1]\nlow_memory: off\n", tmp_path)
    assert problem.code is Code.UNSUPPORTED_VERSION
    assert problem.what == "this file is of schema version 2; this dmconfig reads version 1"


def test_component_that_the_pipeline_has_not_is_answered_with_those_it_has(tmp_path: Path) -> None:
    """Ray issue 26206: a deployment in the config that is not in the code is a bare KeyError."""
    (problem,) = problems_of(f"{HEAD}device_map: {{transformer: cuda:0, default: cpu}}\n", tmp_path)
    assert (problem.code, where(problem)) == (Code.UNKNOWN_COMPONENT, (3, 14))
    assert problem.why.startswith("its components are: vae, text_encoder, tokenizer, unet, scheduler")


def test_source_that_is_neither_folder_nor_hub_id_names_both_readings(tmp_path: Path) -> None:
    """Ray issue 55585: a model id that is neither a repository nor a folder is an error of the engine."""
    (problem,) = problems_of("version: 1\npipeline: {source: my_alias}\n", tmp_path)
    assert (problem.code, problem.path) == (Code.SOURCE_NOT_FOUND, ("pipeline", "source"))
    assert problem.what == "'my_alias' is neither a folder nor a hub id"
    assert problem.fix == "write ./my_alias for a folder beside the file, or organisation/name for a hub id"


def test_options_beside_a_file_are_never_dropped(tmp_path: Path) -> None:
    """Ray PR 49336: options given next to a config file are dropped without a word."""
    file = tmp_path / "spec.yaml"
    file.write_text(HEAD)
    with pytest.raises(TypeError, match="device_map"):
        load_from_yaml(file, device_map="cuda:0")  # type: ignore[call-arg]
    with pytest.raises(DMConfigError) as caught:
        load_from_yaml(file, {"devise_map": "cuda:0"})
    (problem,) = caught.value.problems
    assert (problem.code, problem.origin) == (Code.UNKNOWN_KEY, "overrides['devise_map']")


def test_file_of_a_newer_version_says_what_to_do(tmp_path: Path) -> None:
    """InvokeAI issue 7550: keys of a newer release are refused as unknown by the installed one."""
    (problem,) = problems_of(f"{HEAD.replace('version: 1', 'version: 3')}device_plan: best\n", tmp_path)
    assert (problem.code, where(problem)) == (Code.UNSUPPORTED_VERSION, (1, 10))
    assert problem.fix == "upgrade dmconfig: pip install --upgrade dmconfig"


def test_old_name_of_a_key_is_answered_with_the_new_one_and_an_edit(tmp_path: Path) -> None:
    """InvokeAI issue 4098: after an upgrade an old file fails validation at start."""
    (problem,) = problems_of(f"{HEAD}offload_dir: ./offload\n", tmp_path)
    assert problem.fix == f"offload_dir -> offload_folder; dmconfig fix {tmp_path}/spec.yaml writes it"
    assert len(problem.edits) == 1
