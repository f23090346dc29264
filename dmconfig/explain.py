"""``dmconfig explain``: one key of the file, or one error code, in full; as text and as data."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dmconfig.errors import Code, Problem, SpecError, nearest
from dmconfig.explanations import EXPLANATIONS
from dmconfig.hints import key_hint

if TYPE_CHECKING:
    from dmconfig.reference import KeyDoc

WIDTH = 100


def explained(word: str) -> Code | tuple[KeyDoc, ...]:
    """Return what a word is: an error code, by number (``DM202``) or name (``unknown-key``), or keys of the file.

    A name that is used elsewhere for keys of ours (``torch_dtype``) stands for them.

    Raises: SpecError: nothing is called so; it says what was most likely meant.
    """
    code = next((code for code in Code if word.upper() == code or word.lower() == code.slug), None)
    if code is not None:
        return code
    from dmconfig.reference import called_otherwise, find_keys  # the models, which codes have no need of

    docs = find_keys(word) or called_otherwise(word)
    if not docs:
        raise SpecError([_unknown(word)])
    return docs


def explanation_text(word: str) -> str:
    """Return what is to be known of a key or a code, as text.

    Raises: SpecError: see ``explained``.
    """
    what = explained(word)
    if isinstance(what, Code):
        return _code_text(what)
    from dmconfig.reference import find_keys

    renamed = "" if find_keys(word) else f"{word} is called so here:\n\n"
    return renamed + "\n".join(key_text(doc) for doc in what)


def explanation_data(word: str) -> dict[str, Any]:
    """Return what is to be known of a key or a code, as JSON data.

    Raises: SpecError: see ``explained``.
    """
    what = explained(word)
    if not isinstance(what, Code):
        return {"keys": [key_data(doc) for doc in what]}
    explanation = EXPLANATIONS[what]
    return {
        "code": str(what),
        "name": what.slug,
        "cause": explanation.cause,
        "example": explanation.example,
        "command": explanation.command,
        "remedy": explanation.remedy,
    }


def overview_text() -> str:
    """Return the keys of the file, each with what it takes, as one table."""
    from dmconfig.reference import key_docs

    docs = key_docs()
    width = max(len(doc.path) for doc in docs)
    return "".join(f"{doc.path:<{width}}  {_takes(doc)}\n" for doc in docs)


def overview_data() -> dict[str, Any]:
    """Return all keys of the file, with all that is to be known of them, as JSON data."""
    from dmconfig.reference import key_docs

    return {"keys": [key_data(doc) for doc in key_docs()]}


def key_text(doc: KeyDoc) -> str:
    """Return one key's documentation as text."""
    lines = [doc.path, f"  {'takes':<9}{_takes(doc)}", *_filled(doc.description, 2)]
    lines += [f"    {word:<26}{meaning}" for word, meaning in doc.words.items()]
    lines += ["  example", *textwrap.indent(example_text(doc.example), "    ").splitlines()]
    lines += [f"  {'inside' if index == 0 else '':<9}{path}" for index, path in enumerate(doc.below)]
    return "\n".join(lines) + "\n"


def key_data(doc: KeyDoc) -> dict[str, Any]:
    """Return one key's documentation as JSON data."""
    return {
        "key": doc.path,
        "type": doc.type,
        "required": doc.default is None,
        "default": doc.default or None,
        "description": doc.description,
        "values": dict(doc.words),
        "example": example_text(doc.example),
        "inside": [*doc.below],
    }


def example_text(example: Mapping[str, Any]) -> str:
    """Return a fragment of a file as YAML."""
    import yaml

    return str(yaml.safe_dump(dict(example), sort_keys=False, default_flow_style=False))


def _takes(doc: KeyDoc) -> str:
    if doc.default is None:
        return f"{doc.type}; has to be there"
    return f"{doc.type}; default: {doc.default}" if doc.default else doc.type


def _code_text(code: Code) -> str:
    explanation = EXPLANATIONS[code]
    lines = [f"{code} {code.slug}", *_filled(explanation.cause, 2), "  example"]
    lines += _example_lines(explanation.example, explanation.command)
    return "\n".join([*lines, "  remedy", *_filled(explanation.remedy, 4)]) + "\n"


def _example_lines(example: str, command: str | None) -> Iterator[str]:
    if command is None:
        yield from _filled(example, 4)
        return
    yield from textwrap.indent(example, "    ").splitlines()
    yield f"    $ {command}"


def _filled(text: str, indent: int) -> Sequence[str]:
    """A paragraph in lines that fit a terminal; a word is never broken, for it may be something to type."""
    margin = " " * indent
    wrapper = textwrap.TextWrapper(
        WIDTH, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text)


def _unknown(word: str) -> Problem:
    from dmconfig.reference import key_docs

    known = {doc.path: doc.path for doc in key_docs()} | {doc.name: doc.path for doc in reversed(key_docs())}
    meant = nearest(word, [*known, *(code.slug for code in Code)])
    fix = key_hint((word,)) or (f"did you mean {known.get(meant, meant)!r}?" if meant else "")
    what = f"no key of the file and no error code is called {word!r}"
    return Problem(code=Code.UNKNOWN_KEY, what=what, fix=fix or "dmconfig explain, alone, lists the keys", origin=word)
