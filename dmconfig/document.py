"""Strict YAML: text in, plain data and the place of every value out.

Built on PyYAML's events rather than its loaders, because a loader forgets positions, keeps the last of two equal
keys, and reads ``off``, ``0123`` and ``12:30`` as false, 83 and 750. Here scalars follow YAML 1.2, and a word that
YAML 1.1 would read as something else is refused with "quote it": the file must mean the same to every reader. (Numbers
with a bare exponent, ``1e-4``, are numbers: the models refuse them where text is meant.) Merge keys (``<<``) are
followed. What the values mean is for ``spec``; this module knows no keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import yaml
from yaml import events

from dmconfig.errors import Code, DocumentError, Edit, Problem
from dmconfig.hints import no_boolean, plain_word
from dmconfig.paths import ROOT, ConfigPath, Location, lines_of
from dmconfig.secrets import HIDDEN, is_secret_key

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 20_000
"""Values after aliases are expanded: a file of nested aliases is refused after this many, in milliseconds."""

MAX_DIGITS = 64
MERGE_KEY = "<<"

APPEND, REPLACE = "!append", "!replace"
"""The tags of ours: how a list or a mapping goes together with what a weaker layer says."""
_TAGS: Mapping[type[events.Event], tuple[str, ...]] = {
    events.SequenceStartEvent: (APPEND, REPLACE),
    events.MappingStartEvent: (REPLACE,),
}

_Parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_YAML_12 = (
    (re.compile(r"|~|null|Null|NULL"), lambda text: None),  # noqa: ARG005
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?(0|[1-9][0-9]*)"), int),
    (re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)
_SMALLER = "a spec names weights and holds none; put large values elsewhere"
_OCTAL = re.compile(r"0o[0-7]+")
_KIND_IN_YAML_11 = {
    "bool": "a boolean", "int": "a number", "float": "a number", "timestamp": "a date", "null": "empty",
    "merge": "a merge key", "value": "a default key",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A parsed file: plain data (dict, list, str, int, float, bool, None) and where each part of it stands.

    ``name`` is the file as the user named it; ``folder`` is where relative paths in it start. All keys are text,
    also those written as numbers. ``tags`` are those of ours, by the path of what they stand before; ``quoted`` are
    the paths of text that is written in quotes or as a block, and so is text whatever it looks like.
    """

    name: str
    folder: Path
    data: Any
    keys: Mapping[ConfigPath, Location] = field(repr=False)
    values: Mapping[ConfigPath, Location] = field(repr=False)
    tags: Mapping[ConfigPath, str] = field(default_factory=dict, repr=False)
    quoted: Set[ConfigPath] = field(default=frozenset(), repr=False)


def read_document(file: str | Path, *, name: str | None = None, tagged: bool = False) -> Document:
    """Return the document in a YAML file.

    Args:
        file: the file.
        name: what to call it in locations, if not as ``file`` says.
        tagged: whether it may have the tags ``!append`` and ``!replace``.

    Raises: DocumentError: every problem of the file; after a syntax error, that one alone.
    """
    name, folder = name or str(file), Path(file).absolute().parent
    return parse_document(read_text(Path(file), name), name=name, folder=folder, tagged=tagged)


def parse_document(text: str, *, name: str, folder: Path, tagged: bool = False) -> Document:
    """Return the document in text. ``name`` is used in locations; see ``read_document``.

    Raises: DocumentError: every problem of the text; after a syntax error, that one alone. Its ``document`` is what
        could be read nevertheless, or None.
    """
    builder = _Builder(name, tagged=tagged)
    try:
        data = builder.document(iter(yaml.parse(text, Loader=_Parser)))
    except yaml.MarkedYAMLError as error:
        raise DocumentError([*builder.problems, _syntax_problem(error, name, text)]) from None
    except yaml.reader.ReaderError as error:
        raise DocumentError([_forbidden_character(error, name, text)]) from None
    document = Document(
        name=name,
        folder=folder,
        data=data,
        keys=MappingProxyType(builder.keys),
        values=MappingProxyType(builder.values),
        tags=MappingProxyType(builder.tags),
        quoted=frozenset(builder.quoted),
    )
    if builder.problems:
        raise DocumentError(builder.problems, document)
    return document


def parse_scalar(text: str) -> Any:
    """Return the value of one plain YAML 1.2 scalar: None, a bool, a number or the text itself.

    Example:
        >>> [parse_scalar(text) for text in ("20", "1e9", "off", "null")]
        [20, 1000000000.0, 'off', None]
    """
    return next((convert(text) for pattern, convert in _YAML_12 if pattern.fullmatch(text)), text)


class Refusal(NamedTuple):
    """Why a scalar is not accepted."""

    code: Code
    what: str
    fix: str


def refused_scalar(text: str) -> Refusal | None:
    """Return why a plain scalar is not accepted: it is too long a number, or readers of YAML differ on what it is."""
    if len(text) > MAX_DIGITS and text.strip("+-").isdigit():
        return Refusal(Code.TOO_LARGE, f"a number of {len(text)} digits", "write a smaller one")
    kind = _other_reading(text, parse_scalar(text))
    if kind is None:
        return None
    what = f"{text} is {kind} to some YAML readers and text to others"
    fix = f"quote it if text is meant ('{text}'){_plain_form(text, kind)}"
    return Refusal(Code.AMBIGUOUS_SCALAR, what, fix)


def read_text(file: Path, name: str) -> str:
    """Return the text of a file, which is called ``name`` in what is said of it.

    Raises: DocumentError: it cannot be read, is too large, or is not UTF-8.
    """
    try:
        if file.stat().st_size > MAX_BYTES:
            what = f"{name} is larger than a spec can be ({MAX_BYTES >> 20} MiB)"
            place = Location(name, 1, 1)
            raise DocumentError([Problem(code=Code.TOO_LARGE, what=what, fix=_SMALLER, location=place)])
        return file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        what, fix = f"there is no file {name}", "check the path; it is relative to the current folder"
    except IsADirectoryError:
        what, fix = f"{name} is a folder", "name the YAML file in it"
    except UnicodeDecodeError as error:
        raise DocumentError([_not_utf8(error, name)]) from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        what, fix = f"cannot read {name}: {getattr(error, 'strerror', None) or error}", ""
    raise DocumentError([Problem(code=Code.FILE_UNREADABLE, what=what, fix=fix, origin=name)])


def _not_utf8(error: UnicodeDecodeError, name: str) -> Problem:
    """The problem of bytes that are not UTF-8, at the first that is not."""
    before = lines_of(error.object[: error.start].decode("utf-8-sig"))
    location = Location(name, len(before), len(before[-1]) + 1, 1)
    found = f"byte {error.object[error.start]:#04x} on line {location.line}"
    if error.object.startswith((b"\xff\xfe", b"\xfe\xff")):
        found = "it is UTF-16"
    what, fix = f"{name} is not UTF-8 text: {found}", "save it as UTF-8"
    return Problem(code=Code.FILE_UNREADABLE, what=what, fix=fix, location=location)


class _Node(NamedTuple):
    """One value of the event tree, before it is turned into data; aliases share it."""

    event: events.NodeEvent
    items: tuple[Any, ...] = ()  # of a sequence: nodes; of a mapping: (key node, value node)


class _Builder:
    """Builds the data of one document and gathers every problem on the way."""

    def __init__(self, name: str, *, tagged: bool) -> None:
        self.name, self.tagged = name, tagged
        self.problems: list[Problem] = []
        self.keys: dict[ConfigPath, Location] = {}
        self.values: dict[ConfigPath, Location] = {}
        self.tags: dict[ConfigPath, str] = {}
        self.quoted: set[ConfigPath] = set()
        self._anchors: dict[str, _Node] = {}
        self._nodes = 0

    def document(self, stream: Iterator[events.Event]) -> Any:
        root: _Node | None = None
        for event in stream:
            if isinstance(event, events.DocumentStartEvent) and root is not None:
                self._problem(event, Code.UNSUPPORTED_YAML, "a second document starts here", "one file is one spec")
                break
            if isinstance(event, events.NodeEvent):
                root = self._node(event, stream, depth=1)
        self.values[ROOT] = Location(self.name, 1, 1)
        return None if root is None else self._value(root, ROOT)

    # events -> nodes
    def _node(self, event: events.Event, stream: Iterator[events.Event], *, depth: int) -> _Node:
        if isinstance(event, events.AliasEvent):
            return self._alias(event)
        if depth > MAX_DEPTH:
            self._too_deep(event)
        assert isinstance(event, events.NodeEvent)  # noqa: S101 - the parser yields nothing else here
        items: list[Any] = []
        if isinstance(event, events.SequenceStartEvent):
            while not isinstance(child := next(stream), events.SequenceEndEvent):
                items.append(self._node(child, stream, depth=depth + 1))
        elif isinstance(event, events.MappingStartEvent):
            while not isinstance(child := next(stream), events.MappingEndEvent):
                key = self._node(child, stream, depth=depth + 1)
                items.append((key, self._node(next(stream), stream, depth=depth + 1)))
        node = _Node(event, tuple(items))
        if event.anchor:
            self._anchors[event.anchor] = node
        return node

    def _alias(self, event: events.AliasEvent) -> _Node:
        node = self._anchors.get(event.anchor or "")
        if node is None:
            self._problem(
                event, Code.SYNTAX, f"alias *{event.anchor} has no anchor that ends before it", "define it first"
            )
            return _Node(events.ScalarEvent(None, None, (True, False), "", event.start_mark, event.end_mark))
        return node

    # nodes -> data
    def _value(self, node: _Node, path: ConfigPath) -> Any:
        self._count(node)
        if len(path) > MAX_DEPTH:  # also through aliases, which nest without being nested in the text
            self._too_deep(node.event)
        if path:
            self.values[path] = self._location(node.event)
        event = node.event
        self._tag(event, path)
        if isinstance(event, events.SequenceStartEvent):
            return [self._value(item, (*path, index)) for index, item in enumerate(node.items)]
        if isinstance(event, events.MappingStartEvent):
            return self._mapping(node, path)
        if isinstance(event, events.ScalarEvent) and not event.implicit[0]:
            self.quoted.add(path)
        return self._scalar(event, path)

    def _tag(self, event: events.Event, path: ConfigPath) -> None:
        tag = getattr(event, "tag", None)
        if tag is None:
            return
        if self.tagged and tag in _TAGS.get(type(event), ()):
            self.tags[path] = tag
            return
        stands_before = {APPEND: "; it stands before a list", REPLACE: "; it stands before a list or a mapping"}
        what = f"tag {tag!r} is not accepted{stands_before.get(tag, '') if self.tagged else ''}"
        self._problem(event, Code.UNSUPPORTED_YAML, what, "leave the tag out", path)

    def _mapping(self, node: _Node, path: ConfigPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        merged: list[_Node] = []
        for key_node, value_node in node.items:
            if _is_merge_key(key_node):
                if merged:
                    what, fix = "a second << in one mapping", "write one, with a list: <<: [*first, *second]"
                    self._problem(key_node.event, Code.DUPLICATE_KEY, what, fix, path)
                merged.append(value_node)
                continue
            key = self._key(key_node, path)
            if key is None:
                continue
            place = (*path, key)
            if key in result:
                self._duplicate(key_node.event, place)
                continue
            self.keys[place] = self._location(key_node.event)
            result[key] = self._value(value_node, place)
        for value_node in merged[:1]:
            self._merge(value_node, path, result)
        return result

    def _merge(self, node: _Node, path: ConfigPath, result: dict[str, Any]) -> None:
        """Add the keys of a merged mapping that are not there yet; they keep the places where they were written."""
        self._count(node)
        if isinstance(node.event, events.SequenceStartEvent):
            for item in node.items:
                self._merge(item, path, result)
        elif not isinstance(node.event, events.MappingStartEvent):
            what, fix = "<< takes a mapping, or a list of mappings", "write <<: *name, with an anchor &name above it"
            self._problem(node.event, Code.UNSUPPORTED_YAML, what, fix, path)
        else:
            own = [(key, value) for key, value in node.items if not _is_merge_key(key)]
            for key_node, value_node in own:
                key = self._key(key_node, path)
                if key is not None and key not in result:
                    self.keys[*path, key] = self._location(key_node.event)
                    result[key] = self._value(value_node, (*path, key))
            for key_node, value_node in node.items:
                if _is_merge_key(key_node):
                    self._merge(value_node, path, result)

    def _key(self, node: _Node, path: ConfigPath) -> str | None:
        if not isinstance(node.event, events.ScalarEvent):
            what, fix = "a key must be a word or a number", "quote it if it is meant as text"
            self._problem(node.event, Code.UNSUPPORTED_YAML, what, fix, path)
            return None
        key: str = node.event.value
        self._scalar(node.event, (*path, key), is_key=True)
        return key

    def _duplicate(self, event: events.Event, path: ConfigPath) -> None:
        first = self.keys[path]
        what = f"key {path[-1]!r} stands here a second time; first at line {first.line}, column {first.column}"
        self._problem(event, Code.DUPLICATE_KEY, what, "keep one of the two", path)

    def _scalar(self, event: events.Event, path: ConfigPath, *, is_key: bool = False) -> Any:
        assert isinstance(event, events.ScalarEvent)  # noqa: S101 - the other node kinds are handled before
        text: str = event.value
        if not event.implicit[0]:  # quoted, or a block of text
            return text
        refusal = refused_scalar(text)
        if refusal is None:
            return parse_scalar(text)
        if is_secret_key(path) and not is_key:
            what = refusal.what.replace(text, HIDDEN, 1)
            self._problem(event, refusal.code, what, "quote it, or write it as a variable: ${NAME}", path)
            return parse_scalar("" if refusal.code is Code.TOO_LARGE else text)
        meant = None if is_key or refusal.code is Code.TOO_LARGE else plain_word(path, text)
        edits = () if meant is None else (Edit(location=self._location(event), old=text, new=meant),)
        if meant is not None:
            fix = f"{'write' if meant.isalpha() else 'quote it:'} {meant}"
        else:
            fix = (None if is_key else no_boolean(path, text)) or refusal.fix
        self._problem(event, refusal.code, refusal.what, fix, path, edits=edits)
        return None if refusal.code is Code.TOO_LARGE else parse_scalar(text)

    def _count(self, node: _Node) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            what = f"more than {MAX_NODES} values once aliases are expanded"
            self._problem(node.event, Code.TOO_LARGE, what, "write a smaller file, or fewer aliases")
            raise DocumentError(self.problems)

    def _too_deep(self, event: events.Event) -> NoReturn:
        self._problem(event, Code.TOO_LARGE, f"nested deeper than {MAX_DEPTH} levels", "flatten it")
        raise DocumentError(self.problems)

    def _location(self, event: events.Event) -> Location:
        start, end = event.start_mark, event.end_mark
        if not start:
            return Location(self.name, 1, 1)
        length = max(1, end.column - start.column) if end and end.line == start.line else 1
        return Location(self.name, start.line + 1, start.column + 1, length)

    def _problem(
        self,
        event: events.Event,
        code: Code,
        what: str,
        fix: str,
        path: ConfigPath = ROOT,
        *,
        edits: tuple[Edit, ...] = (),
    ) -> None:
        problem = Problem(code=code, path=path, what=what, fix=fix, location=self._location(event), edits=edits)
        if not any(known.code is code and known.location == problem.location for known in self.problems):
            self.problems.append(problem)  # an alias repeats its anchor's problems


def _other_reading(text: str, value: Any) -> str | None:
    """Return what a scalar is to some readers of YAML when others read it differently; None when all agree."""
    if not isinstance(value, str):
        return None
    return "a number" if _OCTAL.fullmatch(text) else _kind_in_yaml_11(text)  # 1.2 writes octal so, 1.1 has no such


def _kind_in_yaml_11(text: str) -> str | None:
    if text in ("y", "Y", "n", "N"):  # in the text of 1.1, though not in PyYAML
        return "a boolean"
    for tag, pattern in yaml.SafeLoader.yaml_implicit_resolvers.get(text[:1], ()):
        if pattern.match(text):
            return _KIND_IN_YAML_11[tag.rpartition(":")[2]]
    return None


def _plain_form(text: str, kind: str) -> str:
    """How to write the other reading, where one can tell what it would be."""
    if kind == "a boolean":
        return f", or write {'true' if text.lower() in ('yes', 'on', 'y') else 'false'}"
    sign, digits = ("-" if text.startswith("-") else ""), text.lstrip("+-").replace("_", "")
    for prefix, base in (("0x", 16), ("0o", 8), ("0b", 2)):
        if digits.lower().startswith(prefix):
            return f", or write {sign}{int(digits, base)} for a number"
    return f", or write {sign}{digits.lstrip('0')} for a number" if digits.lstrip("0").isdigit() else ""


def _is_merge_key(node: _Node) -> bool:
    event = node.event
    return isinstance(event, events.ScalarEvent) and event.implicit[0] and event.value == MERGE_KEY


_SYNTAX_FIXES = (
    ("mapping values are not allowed", "quote the value if it holds a colon and a space; else check the indentation"),
    ("expected ':'", "a key needs a colon and a space after it"),
    ("cannot start any token", "quote the value: its first character has a meaning of its own in YAML"),
    ("unexpected end of stream", "close the quote"),
    ("unknown escape", "in double quotes a backslash begins an escape: write it twice, or use single quotes"),
    ("expected ',' or", "close the bracket, or put a comma between its items"),
    ("expected key", "indent this line as the ones around it, and close the quotes and brackets above it"),
    ("expected '-'", "begin each item of a list with '- ', indented alike"),
    ("expected the node content", "write a value, or remove what asks for one"),
)
"""What the parser says -> what is usually the matter."""


def _syntax_problem(error: yaml.MarkedYAMLError, name: str, text: str) -> Problem:
    lines = lines_of(text)
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark else (0, 0)
    line = min(line, len(lines) - 1)
    indentation = re.match(r"[ \t]*", lines[line])
    if indentation and "\t" in indentation.group():
        what, fix = "a tab is in the indentation", "YAML indents with spaces; replace the tab"
        location = Location(name, line + 1, lines[line].index("\t") + 1, 1)
        return Problem(code=Code.SYNTAX, what=what, fix=fix, location=location)
    started = error.context_mark
    context = error.context or ""
    if started and started.line != line:
        context = f"{context} that starts on line {started.line + 1}".strip()
    what = ", ".join(part for part in (context, error.problem) if part)
    fix = next((fix for words, fix in _SYNTAX_FIXES if words in what), "")
    if "${" in lines[line]:
        fix = "between { } or [ ] a variable stands in quotes: '${NAME}'; for a number, write the key on its own line"
    return Problem(code=Code.SYNTAX, what=what, fix=fix, location=Location(name, line + 1, column + 1, 1))


def _forbidden_character(error: yaml.reader.ReaderError, name: str, text: str) -> Problem:
    before = lines_of(text[: error.position])
    code = error.character if isinstance(error.character, int) else ord(error.character)
    what = f"the character U+{code:04X} is not allowed in YAML"
    location = Location(name, len(before), len(before[-1]) + 1, 1)
    return Problem(code=Code.SYNTAX, what=what, fix="remove it", location=location)
