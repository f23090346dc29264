"""What is a secret, and that it is not shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dmconfig import secrets
from dmconfig.checked import check_file
from dmconfig.errors import Code, DMConfigError, Edit, Move, Problem, ResolveError, SpecError
from dmconfig.paths import Location
from dmconfig.render import problem_data
from dmconfig.reports import github_annotation, problem_blocks, problem_line
from dmconfig.resolve import override_from_text
from dmconfig.sarif import sarif_log
from dmconfig.secrets import is_secret_key, is_secret_name, is_token, redact, remember

TOKEN = "hf_" + "abcDEF0123456789xyz"


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_remembered", set())


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "token", "API_KEY", "APIKEY", "aws-secret-access-key", "DB_PASSWORD",
     "HFTOKEN", "MY_SECRET", "GITHUB_PAT", "BASIC_AUTH", "CREDENTIALS", "passphrase"],
)  # fmt: skip
def test_secret_names(name: str) -> None:
    """Variables and keys as people name their secrets."""
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["TOKENIZER", "TOKENIZER_PATH", "MODEL", "STEPS", "KEYBOARD", "PATH", "AUTHOR", "HOME", "max_tokens", "PATTERN",
     "text_encoder.embeddings.token_embedding", "transformer.blocks.0.attn.key"],
)  # fmt: skip
def test_names_that_only_look_like_it(name: str) -> None:
    """A tokenizer is no token."""
    assert not is_secret_name(name)


def test_tokens_are_hidden_wherever_they_are() -> None:
    """Known forms need not be remembered."""
    assert is_token(f"a {TOKEN}")
    assert redact(f"from {TOKEN}, and https://me:pass@host/x") == "from (secret), and https://(secret)@host/x"
    assert redact("hf_short and sk-learn and https://host/a@b") == "hf_short and sk-learn and https://host/a@b"


def test_remembered_values_are_hidden_also_as_python_and_json_quote_them() -> None:
    """A message may quote what it shows."""
    value = 'pass"wo\nrd\\é'
    remember(value)
    for shown in (value, repr(value), json.dumps(value), str([value])):
        assert "wo" not in redact(shown)
    assert "(secret)" in redact(value)


def test_a_short_value_is_not_hidden() -> None:
    """It would be in half of all words."""
    remember("on")
    assert redact("one on one") == "one on one"


def test_errors_hold_no_secret() -> None:
    """Neither their text nor their data, whichever field it was in."""
    remember("hunter2!")
    fields = dict.fromkeys(("what", "why", "fix", "origin"), "x hunter2! y")
    error = SpecError([Problem(code=Code.BAD_VALUE, **fields)])  # type: ignore[arg-type]
    assert "hunter2" not in str(error) + repr(error.problems)
    assert error.problems[0].what == "x (secret) y"


def test_errors_hold_no_edit_with_a_secret() -> None:
    """What ``fix`` would do is printed too, in SARIF: an edit that tells a secret is not carried on."""
    remember("hunter2!")
    place = Location("spec.yaml", 1, 1, 3)
    plain = Edit(location=place, old="gpu", new="device_map")
    secret = Edit(location=place, old="hunter2!", new="'hunter2!'")
    move = Move(location=place, path=("hunter2!",), target=("call", "hunter2!"))
    problems = [Problem(code=Code.BAD_VALUE, what=str(n), edits=(e,)) for n, e in enumerate((plain, secret, move))]
    assert [problem.edits for problem in SpecError(problems).problems] == [(plain,), (), ()]


SHORT = "q7x"
SHORT_SECRETS = {
    "a device": ("device_map: ${MY_TOKEN}\n", "device_map"),
    "a size": ("reserve: ${MY_TOKEN}\n", "reserve"),
    "a part of a value": ("device_map: x-${MY_TOKEN}-y\n", "device_map"),
    "a number where text belongs": ("offload_folder: ${NUMBER_KEY}\n", "offload_folder"),
    "under a key": ("api_key: q7x\n", "api_key"),
    "a word under a key": ("call: {api_key: 0q7}\ndevice_map: x\n", "device_map"),
}


@pytest.mark.parametrize("case", SHORT_SECRETS)
def test_a_short_secret_is_in_no_report_of_its_file(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known by where it stands, so nothing else that looks like it is hidden; in every form of a report."""
    monkeypatch.setenv("MY_TOKEN", SHORT)
    monkeypatch.setenv("NUMBER_KEY", "4711")
    line, path = SHORT_SECRETS[case]
    file = tmp_path / "spec.yaml"
    file.write_text(f"version: 1\npipeline: {{source: ./q7xyz}}\n{line}", encoding="utf-8")
    with pytest.raises(DMConfigError) as caught:
        check_file(file)
    problems = caught.value.problems
    assert path in {str(problem.path[0]) for problem in problems}
    told = "\n".join([
        *problem_blocks(problems), *(problem_line(each, "x") for each in problems),
        *(github_annotation(each, "x") for each in problems), json.dumps([problem_data(each) for each in problems]),
        json.dumps(sarif_log([("x", problems)])), str(caught.value),
    ])  # fmt: skip
    for secret in (SHORT, "4711", "0q7"):
        assert secret not in told.replace("q7xyz", "")


def test_a_short_secret_given_by_hand_is_not_in_its_origin() -> None:
    """The words of an override are shown as its place."""
    assert override_from_text("call.api_key=q7x").origin == "--set call.api_key=(secret)"
    assert override_from_text("call.prompt=q7x").origin == "--set call.prompt=q7x"
    for assignment in ("call.api_key=0777", "call.api_key=[q7x", "call..api_key=q7x"):
        with pytest.raises(ResolveError) as caught:
            override_from_text(assignment)
        assert not {"0777", "q7x"} & {*re.findall(r"\w+", str(caught.value))}


def test_the_word_of_a_textual_inversion_is_no_secret() -> None:
    """Its key is called token; it is the word that prompts use."""
    assert not is_secret_key(("adapters", "textual_inversion", 0, "token"))
    assert is_secret_key(("call", "token"))
