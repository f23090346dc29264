"""What is a secret, and that it is not shown."""

from __future__ import annotations

import json

import pytest

from dmconfig import secrets
from dmconfig.errors import Code, Problem, SpecError
from dmconfig.secrets import is_secret_name, is_token, redact, remember

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
