"""The pages that are made from the code are those in ``docs/``, and what they show is right."""

from __future__ import annotations

import re
from pathlib import Path

from dmconfig.errors import Code
from dmconfig.reference import key_docs
from tools.reference import error_reference, spec_reference

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_of_keys_is_the_models() -> None:
    """``make reference`` has been run after the last change of the models."""
    assert (DOCS / "spec-reference.md").read_text(encoding="utf-8") == spec_reference()


def test_the_page_of_errors_is_the_explanations() -> None:
    """``make reference`` has been run after the last change of the codes or their explanations."""
    assert (DOCS / "errors.md").read_text(encoding="utf-8") == error_reference()


def test_the_pages_have_every_key_and_every_code_and_no_broken_link() -> None:
    """A heading for each, and each link of the table leads to one."""
    page = spec_reference()
    assert re.findall(r"^## `(.+)`$", page, re.MULTILINE) == [doc.path for doc in key_docs()]
    assert re.findall(r"^## (DM\d+)", error_reference(), re.MULTILINE) == sorted(Code)
    headings = {re.sub(r"[^\w\- ]", "", doc.path.lower()).replace(" ", "-") for doc in key_docs()}
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) == headings
