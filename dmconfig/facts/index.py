"""All class statements of an installed package, found by a pattern: parsing every file would take half a minute."""

from __future__ import annotations

import re
from pathlib import Path

from dmconfig.facts.installed import Library

Index = dict[str, list[tuple[str, str]]]
"""Class name -> (module, text between the parentheses of the class statement), for every definition."""

_STATEMENT = re.compile(r"^(?:class (\w+)(?:\(([^)]*)\))?|([A-Z]\w*) = ([A-Z]\w*)\s*$)", re.MULTILINE)
# Sources from which upstream generates others, stand-ins for missing packages, and command-line tools.
_NOT_INDEXED = ("modular_", "convert_", "dummy_", "test")


def build_index(library: Library) -> Index:
    """Return every class statement (and ``A = B``) at the top level of library's files, in path order."""
    index: Index = {}
    for path in sorted(library.folder.rglob("*.py")):
        if path.name.startswith(_NOT_INDEXED):
            continue
        module = _module_name(library, path)
        for name, bases, alias, target in _STATEMENT.findall(read_text(path)):
            index.setdefault(name or alias, []).append((module, bases or target))
    return index


def read_text(path: Path) -> str:
    """Return the text of a file; empty when it cannot be read, as a package with a broken file still has others."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _module_name(library: Library, path: Path) -> str:
    parts = path.relative_to(library.folder).with_suffix("").parts
    return ".".join((library.name, *(parts[:-1] if parts[-1] == "__init__" else parts)))
