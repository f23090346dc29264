"""Every recipe in the docs, and every example, is a file that dmconfig accepts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dmconfig.check import check
from dmconfig.spec import validate_spec
from tests.conftest import document_from, resolve

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "recipes.md"
_BLOCK = re.compile(r"^## (.+?)$.*?^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = dict(_BLOCK.findall(RECIPES.read_text(encoding="utf-8")))
EXAMPLES = {file.name: file for file in sorted((ROOT / "examples").glob("*.yaml"))}


def test_every_section_of_the_recipes_has_a_file() -> None:
    """None is left out by the way the page is read here."""
    text = RECIPES.read_text(encoding="utf-8")
    assert len(FILES) == text.count("\n## ") == text.count("```yaml")


@pytest.mark.parametrize("title", FILES)
def test_recipe_is_accepted(title: str) -> None:
    """A reader can copy it: every key, class, component and argument is known, and the pictures are there."""
    resolved = resolve(document_from(FILES[title], name="recipe.yaml", folder=RECIPES.parent))
    assert check(resolved, validate_spec(resolved)).modules


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_accepted(name: str) -> None:
    """Also those that this machine could not load."""
    file = EXAMPLES[name]
    resolved = resolve(document_from(file.read_text(encoding="utf-8"), name=name, folder=file.parent))
    assert check(resolved, validate_spec(resolved)).modules
