"""A key with its value moved to another mapping of a YAML text, with its comments; all other text stays as it is.

Only what can be moved for certain is: the result is read again, and where it says anything else than the same under
the other key, or where a comment is not in it any more, nothing is moved.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dmconfig.document import parse_document
from dmconfig.errors import DocumentError
from dmconfig.paths import ConfigPath

_INDENT = 2
_COMMENT = re.compile(r"#[^\r\n]*")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)?")


def moved(text: str, path: ConfigPath, target: ConfigPath, value: str = "") -> str | None:
    """Return a text in which the key at path stands at target, whose last element is its name there.

    ``value`` is what stands for its value there; empty: what stands there now. None where this cannot be done without
    touching more: the target is there, it is to be in what is no mapping, or the key shares its line in a way that
    only its author can take apart.
    """
    try:
        root, before = yaml.compose(text, Loader=yaml.SafeLoader), _data(text)
    except (yaml.YAMLError, DocumentError):
        return None
    expected = _expected(before, path, target, value)
    if expected is None or target[: len(path)] == path or not isinstance(root, yaml.MappingNode) or root.flow_style:
        return None
    there = _mapping_at(root, target[:-1])
    entry = _entry_at(text, root, path, takes_comments=there is None or not there.flow_style or not there.value)
    if entry is None:
        return None
    after = _put(entry, root, target, entry.lines_for(str(target[-1]), value))
    return after if after is not None and _is_same(text, after, expected) else None


def comments_in(text: str) -> Counter[str]:
    """Return the comments of a YAML text, each with how often it is there."""
    found: Counter[str] = Counter()
    end = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        found.update(each.rstrip() for each in _COMMENT.findall(text[end : token.start_mark.index]))
        end = max(end, token.end_mark.index)
    found.update(each.rstrip() for each in _COMMENT.findall(text[end:]))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A key and its value in a text: from ``start`` to ``end``, whole lines in a block, else what is between commas.

    ``parent`` is the mapping that they are in, ``path`` leads to them.
    """

    text: str
    path: ConfigPath
    start: int
    end: int
    key: Any
    value: Any
    parent: Any

    def lines_for(self, name: str, value: str) -> list[str]:
        """The lines of the entry with another name, and another value if one is given, without indentation."""
        key, old = self.key, self.value
        if self.parent.flow_style:
            return [f"{name}: {value or self.text[old.start_mark.index : old.end_mark.index]}"]
        parts = [self.text[self.start : key.start_mark.index], name]
        if value:
            between = self.text[key.end_mark.index : old.start_mark.index]
            parts += [between, value, self.text[old.end_mark.index : self.end]]
        else:
            parts.append(self.text[key.end_mark.index : self.end])
        return [_shifted(line, -key.start_mark.column) for line in "".join(parts).splitlines()]


_Change = tuple[int, int, str]
"""Where text is left out, and what stands there instead."""


def _entry_at(text: str, root: Any, path: ConfigPath, *, takes_comments: bool) -> _Entry | None:
    """The entry at a path, in a block with the comments over it if they are to go with it."""
    parent = _mapping_at(root, path[:-1])
    found = [pair for pair in (parent.value if parent is not None else ()) if pair[0].value == path[-1]]
    if len(found) != 1:
        return None
    ((key, value),) = found
    if parent.flow_style:
        start, end = key.start_mark.index, value.end_mark.index
        is_line = parent.start_mark.line == parent.end_mark.line
        return (
            _Entry(text=text, path=path, start=start, end=end, key=key, value=value, parent=parent) if is_line else None
        )
    start, end = key.start_mark.index - key.start_mark.column, _end_of_block(text, key, value)
    if text[start : key.start_mark.index].strip(" "):
        return None  # in an item of a list, on the line of its dash
    if takes_comments and (len(path) > 1 or key is not parent.value[0][0]):  # what is over the first key is of the file
        start = _with_comments_above(text, start, key.start_mark.column)
    return _Entry(text=text, path=path, start=start, end=end, key=key, value=value, parent=parent)


def _put(entry: _Entry, root: Any, target: ConfigPath, lines: list[str]) -> str | None:
    """The text with the entry out of its place, and lines in the mapping of the target, or in a new one for them."""
    text, left, where = entry.text, "", target[:-1]
    there = _mapping_at(root, where)
    if there is None:
        lines, where = [f"{where[-1]}:", *(_shifted(line, _INDENT) for line in lines)], where[:-1]
        there = _mapping_at(root, where)
    if there is None:
        return None
    if not there.flow_style:
        beside = entry.path[len(where)] if entry.path[: len(where)] == where else None
        changes = [_into_block(text, there, lines, beside)]
    elif len(lines) == 1:
        line, comment = _apart(lines[0])
        left = f"{' ' * entry.key.start_mark.column}{comment}{_ending(text)}" if comment else ""
        changes = [_into_flow(there, line)]
    else:
        changes = [*_instead_of_empty(text, root, where, lines)]
    changes.append(_out(entry, left))
    if len(entry.parent.value) == 1 and not entry.parent.flow_style and entry.parent is not there:
        changes.append(_emptied(text, root, entry.path[:-1]))
    for start, end, new in sorted(changes, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _out(entry: _Entry, left: str) -> _Change:
    """Leave an entry out, but for what is left of its line."""
    if not entry.parent.flow_style:
        return (entry.start, entry.end, left)
    return (*_with_comma(entry.text, entry.start, entry.end, entry.parent), "")


def _into_flow(there: Any, line: str) -> _Change:
    if not there.value:
        return (there.start_mark.index + 1, there.end_mark.index - 1, line)
    end = there.value[-1][1].end_mark.index
    return (end, end, f", {line}")


def _into_block(text: str, there: Any, lines: list[str], beside: object) -> _Change:
    """Put lines into a mapping: after the entry of it that they come from, else after its last."""
    entries = {key.value: (key, value) for key, value in there.value}
    key, value = entries.get(beside, there.value[-1])
    return _lines_at(text, _end_of_block(text, key, value), lines, key.start_mark.column)


def _instead_of_empty(text: str, root: Any, path: ConfigPath, lines: list[str]) -> Iterator[_Change]:
    """Put lines below the key of a mapping that is ``{}``; where it has entries, its author has to."""
    there, parent = _mapping_at(root, path), _mapping_at(root, path[:-1])
    if not there.value and not parent.flow_style:
        key = next(key for key, value in parent.value if value is there)
        start, end = there.start_mark.index, there.end_mark.index
        yield (start - 1 if text[start - 1] == " " else start, end, "")
        yield _lines_at(text, _line_at(text, end), lines, key.start_mark.column + _INDENT)


def _lines_at(text: str, at: int, lines: list[str], column: int) -> _Change:
    ending = _ending(text)
    new = ending.join(_shifted(line, column) for line in lines)
    return (at, at, f"{new}{ending}" if text[at - 1] in "\r\n" else f"{ending}{new}")


def _emptied(text: str, root: Any, path: ConfigPath) -> _Change:
    """The ``{}`` of a mapping that has lost its only key: without it, it would be null."""
    parent = _mapping_at(root, path[:-1])
    key = next(key for key, _ in parent.value if key.value == path[-1])
    colon = text.index(":", key.end_mark.index) + 1
    return (colon, colon, " {}")


def _end_of_block(text: str, key: Any, value: Any) -> int:
    """The end of the last line of an entry, and of the comments below it that are deeper than its key."""
    last = max(_ends(value), default=key.end_mark.index)
    end = last if last and text[last - 1] in "\r\n" else _line_at(text, last)
    return _with_comments_below(text, end, key.start_mark.column)


def _ends(node: Any) -> Iterator[int]:
    """The ends of what is written in a node: a block collection ends before the next token, so its parts tell."""
    if isinstance(node, yaml.ScalarNode) or node.flow_style:
        yield node.end_mark.index
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key.end_mark.index
            yield from _ends(value)
    else:
        for item in node.value:
            yield from _ends(item)


def _with_comments_above(text: str, line: int, column: int) -> int:
    while line:
        end = line - (2 if text[line - 2 : line] == "\r\n" else 1)
        start = max(text.rfind("\n", 0, end), text.rfind("\r", 0, end)) + 1
        above = text[start:end]
        if not above.startswith(" " * column + "#"):
            break
        line = start
    return line


def _with_comments_below(text: str, end: int, column: int) -> int:
    while end < len(text):
        after = _line_at(text, end)
        below = text[end:after].rstrip("\r\n")
        indent = len(below) - len(below.lstrip(" "))
        if indent <= column or not below.lstrip(" ").startswith("#"):
            break
        end = after
    return end


def _with_comma(text: str, start: int, end: int, parent: Any) -> tuple[int, int]:
    """The range of an entry of a flow mapping with the comma that goes with it."""
    after = re.compile(r"[ \t]*,[ \t]*").match(text, end)
    if after:
        return start, after.end()
    before = re.compile(r"[ \t]*,[ \t]*$").search(text, parent.start_mark.index, start)
    return (before.start() if before else start), end


def _apart(line: str) -> tuple[str, str]:
    """A line without the comment at its end, and that."""
    for match in re.finditer(r"[ \t]+(#.*)$", line):
        rest = line[: match.start()]
        if not comments_in(rest + "\n") and comments_in(line + "\n"):
            return rest, match.group(1)
    return line, ""


def _line_at(text: str, index: int) -> int:
    match = _LINE.match(text, index)
    return match.end() if match else index


def _ending(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _shifted(line: str, by: int) -> str:
    if by >= 0:
        return " " * by + line if line.strip() else line
    return line[min(-by, len(line) - len(line.lstrip(" "))) :]


def _mapping_at(node: Any, path: ConfigPath) -> Any:
    for part in path:
        if not isinstance(node, yaml.MappingNode):
            return None
        node = next((value for key, value in node.value if key.value == part), None)
    return node if isinstance(node, yaml.MappingNode) else None


def _data(text: str) -> Any:
    try:
        return parse_document(text, name="", folder=Path(), tagged=True).data
    except DocumentError as error:
        if error.document is None:
            raise
        return error.document.data


def _expected(data: Any, path: ConfigPath, target: ConfigPath, value: str) -> Any:
    """The data in which what is at path is at target; None where it cannot be."""
    inner = data
    for key in path[:-1]:
        inner = inner.get(key) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or path[-1] not in inner:
        return None
    return _with(_less(data, path), target, _data(value) if value else inner[path[-1]])


def _less(data: Any, path: ConfigPath) -> Any:
    if len(path) == 1:
        return {key: value for key, value in data.items() if key != path[0]}
    return {key: _less(value, path[1:]) if key == path[0] else value for key, value in data.items()}


def _with(data: Any, path: ConfigPath, value: Any) -> Any:
    if not isinstance(data, dict):
        return None
    if len(path) == 1:
        return None if path[0] in data else {**data, path[0]: value}
    inner = _with(data.get(path[0], {}), path[1:], value)
    return None if inner is None else {**data, path[0]: inner}


def _is_same(before: str, after: str, expected: Any) -> bool:
    """Whether a text says what it should, and has every comment that it had."""
    try:
        return bool(_data(after) == expected) and comments_in(after) == comments_in(before)
    except (yaml.YAMLError, DocumentError):
        return False
