"""What must never be printed: tokens, and the values of variables that are named like secrets.

A secret is known by the value, not by where it stands: it may come back in the message of any library. So the values
are remembered for the whole process, and whoever shows text asks here first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

HIDDEN = "(secret)"
_WORDS = frozenset({
    "token", "secret", "password", "passwd", "passphrase", "credential", "credentials", "apikey", "key", "auth", "pat",
})  # fmt: skip
_ENDINGS = ("token", "secret", "password", "passwd", "apikey")
_TOKEN = re.compile(
    r"\b(?:hf_|api_org_|gh[opsu]_|github_pat_|glpat-|sk-)[A-Za-z0-9_-]{16,}|\bAKIA[A-Z0-9]{16}\b|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
"""Access tokens of the hub and of hosts of code, and the user and password in an address."""

_ENTRY = re.compile(r"""(["']?([A-Za-z][\w-]*)["']?:[ ]+)(?![|>&*!{\[$<])("[^"]*"|'[^']*'|[^\s#,}\]]+)""")
"""A key and its value on one line."""

_SHORT_WORD = 3
_SHORTEST = 6
"""A shorter value is in too many words to be hidden wherever it occurs."""

_remembered: set[str] = set()
_NO_SECRETS: tuple[tuple[str | int, ...], ...] = (("adapters", "textual_inversion", -1, "token"),)
"""Keys of a spec that are only called like a secret, by their paths; -1 stands for any item of a list."""


def is_secret_name(name: str) -> bool:
    """Tell whether a variable, or a key, is named like a secret: ``HF_TOKEN``, ``api_key``, but not ``TOKENIZER``.

    Nor is the path of a module: ``text_encoder.embeddings.token_embedding``, which a device map has for a key.
    """
    if "." in name:
        return False
    words = name.lower().replace("-", "_").split("_")
    return any(word in _WORDS or word.endswith(_ENDINGS) for word in words)


def is_secret_key(path: tuple[str | int, ...]) -> bool:
    """Tell whether what stands at a path of a file is a secret, by the name of its key."""
    known = tuple(-1 if isinstance(part, int) else part for part in path)
    return bool(path) and is_secret_name(str(path[-1])) and known not in _NO_SECRETS


def without(text: str, secrets: Iterable[str], *, is_about: bool) -> str:
    """Return text without the secrets of a file, however short they are.

    Messages quote what they show, so a short secret is looked for in quotes. In text that ``is_about`` its value it
    is also looked for as a word by itself, unless it is one that any sentence may have.
    """
    for secret in sorted({*secrets} - {""}, key=len, reverse=True):
        quoted = {repr(secret), json.dumps(secret)}
        for each in quoted:
            text = text.replace(each, HIDDEN)
        if is_about and (len(secret) > _SHORT_WORD or not secret.isalpha()):
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", HIDDEN, text)
    return text


def without_values(line: str) -> str:
    """Return a line of a YAML file without what stands in it behind a key that is named like a secret."""
    return _ENTRY.sub(lambda found: found[1] + HIDDEN if is_secret_name(found[2]) else found[0], line)


def is_token(text: str) -> bool:
    """Tell whether text has an access token in it."""
    return _TOKEN.search(text) is not None


def remember(secret: str) -> None:
    """Hide this value, as it is and as it is quoted in messages, in all text that is shown from now on."""
    if len(secret) >= _SHORTEST:
        _remembered.update({secret, repr(secret)[1:-1], json.dumps(secret)[1:-1]})


def redact(text: str) -> str:
    """Return text without the secrets in it."""
    for secret in sorted(_remembered, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _TOKEN.sub(HIDDEN, text)
