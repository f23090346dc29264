"""Values set in the text of a YAML file, with every comment, quote and empty line of it as it was.

The text is edited, not written anew from data: what is replaced or put in is a scalar, at a place that PyYAML's node
tree tells. Writing the file is for ``files``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dmconfig.document import parse_document, parse_scalar
from dmconfig.errors import Code, DocumentError, Problem
from dmconfig.paths import ConfigPath, render_path


@dataclass(frozen=True, slots=True)
class _Edit:
    """Text to stand in the place of what is between two positions."""

    start: int
    end: int
    text: str


def set_beside(text: str, values: Mapping[ConfigPath, str], *, after: Mapping[ConfigPath, str]) -> str:
    """Return YAML text with scalars set; a key that is not there yet is put in after another of its mapping.

    Args:
        text: of a document that ``read_document`` accepts.
        values: by path; text without line ends, such as a commit.
        after: by path, the key of the same mapping after which a new key is put.

    Raises: DocumentError: the text would mean something else than asked, as where an anchor shares the mapping; or the
        mapping is not in this text.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    # what an anchor shares is in several places of the data, and in one of the text
    edits = {_edit(text, root, path, value, after[path]) for path, value in values.items()}
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    for path, value in values.items():
        if _value_at(text, path) != value:
            raise DocumentError([_not_editable(path)])
    return text


def differs_elsewhere(before: str, after: str, paths: Mapping[ConfigPath, Any]) -> bool:
    """Tell whether two texts mean something else beside what is at some paths."""
    return bool(_without(before, paths) != _without(after, paths))


def _edit(text: str, root: Any, path: ConfigPath, value: str, after: str) -> _Edit:
    mapping = _node_at(root, path[:-1])
    if not isinstance(mapping, yaml.MappingNode):
        raise DocumentError([_not_editable(path)])
    pairs = {key.value: (key, node) for key, node in mapping.value}
    if path[-1] in pairs:
        old = pairs[str(path[-1])][1]
        return _Edit(old.start_mark.index, old.end_mark.index, _spelled(value))
    if after not in pairs:
        raise DocumentError([_not_editable(path)])
    key, node = pairs[after]
    end = node.end_mark.index
    if mapping.flow_style:
        return _Edit(end, end, f", {path[-1]}: {_spelled(value)}")
    return _new_line(text, key, end, f"{path[-1]}: {_spelled(value)}")


def _spelled(value: str) -> str:
    """Text as YAML; quoted where it would read as a number, as a commit of digits alone does."""
    return value if isinstance(parse_scalar(value), str) else json.dumps(value)


def _new_line(text: str, key: Any, end: int, entry: str) -> _Edit:
    """A line of its own after the one in which a value ends, as deep as the value's key."""
    line = re.compile(r"[^\r\n]*").match(text, end)
    at = line.end() if line else end
    ending = "\r\n" if text[at : at + 2] == "\r\n" else "\n"
    return _Edit(at, at, f"{ending}{' ' * key.start_mark.column}{entry}")


def _node_at(node: Any, path: ConfigPath) -> Any:
    for part in path:
        if not isinstance(node, yaml.MappingNode):
            return None
        node = next((value for key, value in node.value if key.value == part), None)
    return node


def _value_at(text: str, path: ConfigPath) -> Any:
    data = parse_document(text, name="edited", folder=Path()).data
    for part in path:
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _without(text: str, paths: Mapping[ConfigPath, Any]) -> Any:
    data = parse_document(text, name="edited", folder=Path()).data

    def pruned(value: Any, here: ConfigPath) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: pruned(item, (*here, key)) for key, item in value.items() if (*here, key) not in paths}

    return pruned(data, ())


def _not_editable(path: ConfigPath) -> Problem:
    what = f"{render_path(path)} cannot be written into this file by itself"
    return Problem(code=Code.UNSUPPORTED_YAML, what=what, path=path, fix="write it by hand, without an anchor")
