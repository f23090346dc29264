"""Write ``docs/spec-reference.md`` and ``docs/errors.md`` anew, from the models and from the explanations of errors.

python tools/reference.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dmconfig.errors import Code
from dmconfig.explain import example_text
from dmconfig.explanations import EXPLANATIONS
from dmconfig.reference import KeyDoc, key_docs

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTE = "<!-- Made by `make reference` from the code; changes belong there. -->"


def spec_reference() -> str:
    """Return the page that documents every key of the file."""
    lines = [
        "# The keys of a spec",
        "",
        NOTE,
        "",
        "Every key of the file, version 1. `dmconfig explain KEY` prints the same, and so do editors that know the",
        "[schema](../schemas/dmconfig-1.schema.json). A size is a whole number of bytes, or a number and a unit",
        "(`20GiB`, `24GB`, `512MiB`); a budget is a size, `80%` of the device, or `free-2GiB`. Wherever one value",
        "stands, a variable may: `${NAME}`, `${NAME:-default}`.",
        "",
        "| key | takes | default |",
        "| --- | --- | --- |",
        *(f"| [`{doc.path}`](#{_anchor(doc)}) | {_cell(doc.type)} | {_default(doc)} |" for doc in key_docs()),
        "",
    ]
    return "\n".join([*lines, *(line for doc in key_docs() for line in _key(doc))])


def error_reference() -> str:
    """Return the page that explains every error code."""
    lines = [
        "# Error codes",
        "",
        NOTE,
        "",
        "A code is stable, and is never used again for something else. `dmconfig explain DM202` prints one of these.",
        "",
    ]
    return "\n".join([*lines, *(line for code in sorted(Code) for line in _code(code))])


def _key(doc: KeyDoc) -> Iterator[str]:
    yield from (
        f"## `{doc.path}`",
        "",
        f"Takes {doc.type}. {_sentence_of_default(doc)}".rstrip(),
        "",
        doc.description,
        "",
    )
    if doc.words:
        yield from (f"- `{word}`: {meaning}" for word, meaning in doc.words.items())
        yield ""
    yield from ("```yaml", example_text(doc.example).rstrip("\n"), "```", "")


def _code(code: Code) -> Iterator[str]:
    explanation = EXPLANATIONS[code]
    yield from (f"## {code} {code.slug}", "", explanation.cause, "")
    if explanation.command is None:
        yield from (f"For example: {explanation.example}", "")
    else:
        yield from ("```yaml", explanation.example.rstrip("\n"), "```", "", f"`{explanation.command}` reports it.", "")
    yield from (f"What to do: {explanation.remedy}", "")


def _anchor(doc: KeyDoc) -> str:
    """What GitHub makes of a heading: small letters, and of other characters only digits, ``_`` and ``-``."""
    kept = (character for character in doc.path.lower() if character.isalnum() or character in "_- ")
    return "".join(kept).replace(" ", "-")


def _cell(text: str) -> str:
    return text.replace("<", "&lt;").replace(">", "&gt;")


def _default(doc: KeyDoc) -> str:
    return "has to be there" if doc.default is None else f"`{doc.default}`" if doc.default else ""


def _sentence_of_default(doc: KeyDoc) -> str:
    return "It has to be there." if doc.default is None else f"Default: `{doc.default}`." if doc.default else ""


def main() -> None:
    """Write both pages."""
    (DOCS / "spec-reference.md").write_text(spec_reference(), encoding="utf-8")
    (DOCS / "errors.md").write_text(error_reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
