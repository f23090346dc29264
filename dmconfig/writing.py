"""Plain data as the YAML that ``document`` reads: what is read back is the same data, to the type.

Text stands without quotes only where every reader of YAML takes it for that text. A ``$`` is doubled, because files
of specs replace variables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmconfig.document import parse_document
from dmconfig.errors import DocumentError
from dmconfig.interpolation import escape
from dmconfig.paths import ROOT, ConfigPath

_INDENT = "  "
_JSON_TOKEN = re.compile(r'(\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\x7f)|\\.|"|(?<![\d.])(-?\d+e[-+]?\d+)')
"""What JSON and YAML write differently: characters of two escapes, and numbers with an exponent and no dot."""
_COMMENT_COLUMN = 48
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Text as a file has it, with its variables; ``is_text``: it was quoted there, and has to be."""

    text: str
    is_text: bool


def json_text(data: Any) -> str:
    """Return data as JSON that is YAML too: every reader, of either version, sees the same text and numbers.

    Raises: ValueError: a number is infinite, or none, which JSON cannot say.
    """
    inside = False

    def rewritten(token: re.Match[str]) -> str:
        nonlocal inside
        inside ^= token[0] == '"'
        if token[1] is not None:
            return "\\u007f" if token[1] == "\x7f" else str(json.loads(f'"{token[1]}"'))
        return token[0] if token[2] is None or inside else _float(float(token[2]))

    return _JSON_TOKEN.sub(rewritten, json.dumps(data, indent=2, allow_nan=False))


def as_yaml(data: Mapping[str, Any], comments: Mapping[ConfigPath, str] | None = None) -> str:
    """Return data as YAML in block style; a comment stands on the line of the value at its path."""
    lines = [*_mapping(data, ROOT, "")]
    width = min(max((len(text) for text, _ in lines), default=0), _COMMENT_COLUMN)
    return "".join(f"{_with_comment(text, path, comments or {}, width)}\n" for text, path in lines)


def _with_comment(text: str, path: ConfigPath, comments: Mapping[ConfigPath, str], width: int) -> str:
    comment = " ".join(comments.get(path, "").split())
    return f"{text:<{width}}  # {comment}" if comment else text


def _mapping(data: Mapping[str, Any], path: ConfigPath, indent: str) -> Iterator[tuple[str, ConfigPath]]:
    for key, value in data.items():
        yield from _entry(f"{indent}{_key(key)}:", value, (*path, key), indent)


def _entry(head: str, value: Any, path: ConfigPath, indent: str) -> Iterator[tuple[str, ConfigPath]]:
    """A key or the dash of a list, and its value: on the same line, or as a block below."""
    if isinstance(value, Mapping) and value:
        yield head, path
        yield from _mapping(value, path, indent + _INDENT)
    elif isinstance(value, (list, tuple)) and value:
        yield head, path
        for index, item in enumerate(value):
            yield from _entry(f"{indent}{_INDENT}-", item, (*path, index), indent + _INDENT)
    else:
        yield f"{head} {_scalar(value)}", path


def _scalar(value: Any) -> str:
    match value:
        case Mapping():
            return "{}"
        case list() | tuple():
            return "[]"
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case float():
            return _float(value)
        case Verbatim(text=text, is_text=is_text):
            is_plain = not is_text and _is_plain(text, f"- {text}\n", [text])
            return text if is_plain else _quoted(text)
        case _:
            return _text(str(value))


def _float(value: float) -> str:
    """With a dot before any exponent: without it, YAML 1.1 reads text."""
    text = repr(value)
    if text.lstrip("-") in ("inf", "nan"):
        return text.replace("inf", ".inf").replace("nan", ".nan")
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}.0e{exponent}" if e and "." not in mantissa else text


def _text(value: str) -> str:
    text = escape(value)
    return text if _is_plain(text, f"- {text}\n", [text]) else _quoted(text)


def _key(key: str) -> str:
    return key if _is_plain(key, f"{key}: 0\n", {key: 0}) else _quoted(key)


def _quoted(text: str) -> str:
    return f'"{"".join(_ESCAPES.get(c) or (c if c.isprintable() else _escaped(c)) for c in text)}"'


def _escaped(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _is_plain(text: str, document: str, data: Any) -> bool:
    """Whether text needs no quotes: a document with it as it is reads as the data that is meant.

    A tab within is fine to libyaml, and not to the parser that is written in Python.
    """
    try:
        return text.isprintable() and bool(parse_document(document, name="", folder=Path()).data == data)
    except DocumentError:
        return False
