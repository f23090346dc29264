"""What must never be printed: tokens, and the values of variables that are named like secrets.

A secret is known by the value, not by where it stands: it may come back in the message of any library. So the values
are remembered for the whole process, and whoever shows text asks here first.
"""

from __future__ import annotations

import json
import re

HIDDEN = "(secret)"
_WORDS = frozenset({
    "token", "secret", "password", "passwd", "passphrase", "credential", "credentials", "apikey", "key", "auth", "pat",
})  # fmt: skip
_ENDINGS = ("token", "secret", "password", "passwd", "apikey")
_TOKEN = re.compile(
    r"\b(?:hf_|api_org_|gh[opsu]_|github_pat_|glpat-|sk-)[A-Za-z0-9_-]{16,}|\bAKIA[A-Z0-9]{16}\b|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
"""Access tokens of the hub and of hosts of code, and the user and password in an address."""

_SHORTEST = 6
"""A shorter value is in too many words to be hidden wherever it occurs."""

_remembered: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Tell whether a variable, or a key, is named like a secret: ``HF_TOKEN``, ``api_key``, but not ``TOKENIZER``.

    Nor is the path of a module: ``text_encoder.embeddings.token_embedding``, which a device map has for a key.
    """
    if "." in name:
        return False
    words = name.lower().replace("-", "_").split("_")
    return any(word in _WORDS or word.endswith(_ENDINGS) for word in words)


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
