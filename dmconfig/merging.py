"""Layers of values, and the one function that merges them.

A layer is a tree in which every value knows where it came from. ``merge`` collects what all layers say of a key,
leaves out what a stronger layer covers, and looks for contradictions in the rest; so the order in which layers are
given never matters. Which layers there are, and where they come from, is for ``layers`` and ``resolve``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, NamedTuple

from dmconfig.document import APPEND, REPLACE, Document
from dmconfig.errors import Code, Problem, ResolveError
from dmconfig.paths import ROOT, ConfigPath, Origin, render_path
from dmconfig.secrets import HIDDEN, is_secret_key


class Stage(IntEnum):
    """The precedence, weakest first: a layer of a later stage is over every layer of an earlier one.

    Below them all are the defaults of the models. Within a stage a file is over the files that it extends, and over
    nothing else.
    """

    FILES = 1
    PROFILE = 2
    OVERLAYS = 3
    PROFILE_OF_OVERLAYS = 4
    OVERRIDES = 5


class Mode(Enum):
    """How a list or a mapping goes together with what weaker layers say."""

    UNSAID = "unsaid"
    """A mapping is merged key by key; a list over another list has to say how."""
    APPEND = APPEND
    REPLACE = REPLACE
    INTO = "into"
    """A mapping that only leads to a key of an override: there has to be a mapping, or nothing."""


class Style(Enum):
    """What becomes of ``${NAME}`` in text."""

    GIVEN = "given"
    """It comes from outside all files, and is taken as it is."""
    PLAIN = "plain"
    """What is there after variables are replaced is read like any plain scalar."""
    QUOTED = "quoted"
    """It stays text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A value and where it came from: a dict or tuple of nodes, or a scalar. ``key`` is where its key stands."""

    value: Any
    origin: Origin
    key: Origin
    mode: Mode = Mode.UNSAID
    style: Style = Style.GIVEN

    @property
    def kind(self) -> type:
        """``dict``, ``tuple``, or ``object`` for all scalars."""
        return type(self.value) if isinstance(self.value, (dict, tuple)) else object

    @property
    def plain(self) -> Any:
        """The value as plain data, its variables as they are written."""
        if isinstance(self.value, dict):
            return {key: node.plain for key, node in self.value.items()}
        return [node.plain for node in self.value] if isinstance(self.value, tuple) else self.value


class Layer(NamedTuple):
    """A tree and its strength: ``extends`` are the names of layers of the same stage that it is over."""

    stage: Stage
    name: str
    tree: Node
    extends: frozenset[str] = frozenset()

    def is_over(self, other: Layer) -> bool:
        """Tell whether this layer is the stronger one."""
        return self.stage > other.stage or (self.stage is other.stage and other.name in self.extends)


def tree_of(document: Document) -> Node:
    """Return what a document says, with its places."""
    return _node_of(document, ROOT, document.data)


def tree_from(value: Any, origin: Origin, mode: Mode = Mode.REPLACE) -> Node:
    """Return plain data as a tree of which all has one origin; ``mode`` is that of its root."""
    if isinstance(value, dict):
        value = {key: tree_from(item, origin, Mode.UNSAID) for key, item in value.items()}
    elif isinstance(value, list):
        value = tuple(tree_from(item, origin, Mode.UNSAID) for item in value)
    return Node(value=value, origin=origin, key=origin, mode=mode)


def merge(layers: Iterable[Layer]) -> Node:
    """Return what the layers say together. Their order does not matter, and they are not changed.

    Of each key the strongest layer decides; mappings are merged key by key, ``!append`` adds to the list below, and
    ``!replace`` puts a list or a mapping in the place of what is below.

    Raises: ResolveError: with every contradiction: layers of which neither is over the other say different things; a
        list is over a list and does not say how; something is appended to what is no list; an override leads into
        what is no mapping.
    """
    merger = _Merger()
    ordered = sorted(layers, key=lambda layer: (layer.stage, len(layer.extends), layer.name))
    merged = merger.settled(ROOT, [_Claim(layer, layer.tree) for layer in ordered])
    if merger.problems:
        raise ResolveError(merger.problems)
    return merged


def _node_of(document: Document, path: ConfigPath, value: Any) -> Node:
    origin = Origin(document.folder, document.values[path])
    style = Style.QUOTED if path in document.quoted else Style.PLAIN
    if isinstance(value, dict):
        value = {key: _node_of(document, (*path, key), item) for key, item in value.items()}
    elif isinstance(value, list):
        value = tuple(_node_of(document, (*path, index), item) for index, item in enumerate(value))
    key = Origin(document.folder, document.keys.get(path, origin.location))
    return Node(value=value, origin=origin, key=key, mode=Mode(document.tags.get(path, "unsaid")), style=style)


class _Claim(NamedTuple):
    """What one layer says of a key."""

    layer: Layer
    node: Node

    def is_beside(self, other: _Claim) -> bool:
        """Tell whether neither of the two is the stronger."""
        return not self.layer.is_over(other.layer) and not other.layer.is_over(self.layer)

    def covers(self, other: _Claim) -> bool:
        """Tell whether nothing of what the other says is left beside this."""
        if not self.layer.is_over(other.layer):
            return False
        match self.node.mode:
            case Mode.REPLACE:
                return True
            case Mode.APPEND:
                return False
            case Mode.INTO:
                return other.node.value is None
            case Mode.UNSAID:
                return self.node.kind is object or self.node.kind is not other.node.kind


@dataclass(slots=True)
class _Merger:
    """Settles keys one by one, from the root down, and gathers the contradictions."""

    problems: list[Problem] = field(default_factory=list)

    def settled(self, path: ConfigPath, claims: Sequence[_Claim]) -> Node:
        """Return what is left of the claims on a key, which come weakest first."""
        left = [claim for claim in claims if not any(other.covers(claim) for other in claims)]
        kinds = {claim.node.kind for claim in left}
        if kinds == {dict}:
            return self._mapping(path, left)
        if kinds == {tuple}:
            return self._list(path, left)
        if kinds != {object} or not _agree(left):
            self.problems.extend(_contradictions(path, left))
        return left[0].node

    def _mapping(self, path: ConfigPath, claims: Sequence[_Claim]) -> Node:
        self.problems.extend(_whole_beside_others(path, claims))
        names = dict.fromkeys(name for claim in claims for name in claim.node.value)
        value = {name: self.settled((*path, name), _below(claims, name)) for name in names}
        said = _speaker(claims).node
        return Node(value=value, origin=said.origin, key=said.key)

    def _list(self, path: ConfigPath, claims: Sequence[_Claim]) -> Node:
        self.problems.extend(_unlike_lists(path, claims))
        added = [claim for claim in claims[1:] if claim.node.mode is Mode.APPEND]  # others say the same as the first
        items = [_Claim(claim.layer, item) for claim in (claims[0], *added) for item in claim.node.value]
        value = tuple(self.settled((*path, index), [item]) for index, item in enumerate(items))
        last = claims[-1].node
        return Node(value=value, origin=last.origin, key=last.key)


def _speaker(claims: Sequence[_Claim]) -> _Claim:
    """Which of the mappings that were merged stands for all: of the file itself, else the strongest."""
    said = [claim for claim in claims if claim.node.mode is not Mode.INTO] or [claims[0]]
    return next((claim for claim in reversed(said) if claim.layer.stage is Stage.FILES), said[-1])


def _below(claims: Iterable[_Claim], name: str) -> list[_Claim]:
    return [_Claim(claim.layer, claim.node.value[name]) for claim in claims if name in claim.node.value]


def _agree(claims: Sequence[_Claim]) -> bool:
    """Whether all say the same, to the letter: ``1`` and ``true`` differ, and so do ``${X}`` and ``"${X}"``."""
    return len({_letter(claim.node) for claim in claims}) == 1


def _letter(node: Node) -> str:
    if isinstance(node.value, dict):
        return f"{{{', '.join(f'{key!r}: {_letter(node.value[key])}' for key in sorted(node.value))}}}"
    if isinstance(node.value, tuple):
        return f"[{', '.join(map(_letter, node.value))}]"
    has_variable = isinstance(node.value, str) and "$" in node.value
    return f"{node.style if has_variable else ''}{node.value!r}"


# ---------------------------------------------------------------- what contradicts


def _whole_beside_others(path: ConfigPath, claims: Sequence[_Claim]) -> Iterator[Problem]:
    """A mapping that is to be the whole, and one beside it that has more, or something else."""
    for claim in claims:
        if claim.node.mode is Mode.REPLACE:
            more = [other for other in claims if claim.is_beside(other) and not _is_within(other.node, claim.node)]
            if more:
                yield _disagreement(path, sorted([claim, *more], key=claims.index))
                return


def _is_within(node: Node, whole: Node) -> bool:
    """Whether all that a mapping says is said in another too."""
    if node.kind is dict and whole.kind is dict and node.mode is not Mode.REPLACE:
        return all(key in whole.value and _is_within(item, whole.value[key]) for key, item in node.value.items())
    return _letter(node) == _letter(whole)


def _unlike_lists(path: ConfigPath, claims: Sequence[_Claim]) -> Iterator[Problem]:
    """Lists go together when each over another says that it is appended, and those side by side say the same."""
    if claims[0].node.mode is Mode.APPEND:
        what = f"there is no list under {render_path(path)} to append to"
        yield _problem(Code.BAD_APPEND, path, claims[0], what, fix="leave out !append")
    for index, claim in enumerate(claims):
        below = [other for other in claims[:index] if claim.layer.is_over(other.layer)]
        beside = [other for other in claims[:index] if not claim.layer.is_over(other.layer)]
        if below and claim.node.mode is not Mode.APPEND:
            what = f"{render_path(path)} is a list here and in {below[-1].node.origin}"
            fix = "write !replace before it to put it in the other's place, or !append to add to the other"
            yield _problem(Code.UNSTATED_MERGE, path, claim, what, fix=fix)
        modes = {other.node.mode for other in (claim, *beside)}
        if beside and (Mode.APPEND in modes or not _agree([claim, *beside])):
            yield _disagreement(path, [*beside, claim])


def _contradictions(path: ConfigPath, claims: Sequence[_Claim]) -> Iterator[Problem]:
    """Claims that are not all lists, not all mappings, and not all the same scalar."""
    whole = [claim for claim in claims if claim.node.mode not in (Mode.INTO, Mode.APPEND)]
    if len(whole) > 1 and not _agree(whole):
        yield _disagreement(path, whole)
        return
    for claim in claims:
        if claim.node.mode is Mode.INTO:
            yield _no_mapping(path, whole[0], claim)
        elif claim.node.mode is Mode.APPEND:
            below = next((other for other in claims if other.node.kind is not tuple), whole[0])
            what = f"{render_path(path)} is {_shown(below.node, path)} in {below.node.origin}, not a list to append to"
            yield _problem(Code.BAD_APPEND, path, claim, what, fix="write the whole list, with !replace")


def _disagreement(path: ConfigPath, claims: Sequence[_Claim]) -> Problem:
    said = " and ".join(f"{_shown(claim.node, path)} in {claim.node.origin}" for claim in claims)
    fixes = {
        Stage.FILES: "decide in the file that extends both",
        Stage.PROFILE: "decide in the profile of the file that extends both",
    }
    fix = fixes.get(claims[0].layer.stage, "keep one, let one overlay extend the other, or decide with --set")
    why = "neither of them extends the other, so neither is the stronger"
    return _problem(Code.LAYER_CONFLICT, path, claims[0], f"{render_path(path)} is {said}", why=why, fix=fix)


def _no_mapping(path: ConfigPath, below: _Claim, claim: _Claim) -> Problem:
    """An override of a key in something that has no keys."""
    inside, leaf, steps = path, claim.node, []
    while leaf.mode is Mode.INTO:
        ((name, leaf),) = leaf.value.items()
        steps.append(name)
        inside = (*inside, name)
    whole = HIDDEN if is_secret_key(inside) else str(leaf.plain)
    shown = HIDDEN if is_secret_key(path) else repr(below.node.plain)
    for name in reversed(steps):
        whole = f"{{{name}: {whole}}}"
    what = f"{render_path(path)} is {shown}, not a mapping, so {render_path(inside)} cannot be set in it"
    fix = f"set the whole of it: {render_path(path)}={whole.removesuffix('}')}, ...}}"
    return _problem(Code.BAD_OVERRIDE, inside, claim, what, fix=fix)


def _shown(node: Node, path: ConfigPath) -> str:
    if node.kind is object and is_secret_key(path):
        return HIDDEN
    if node.kind is object:
        is_word = node.value is None or isinstance(node.value, bool)
        return str(node.value).lower().replace("none", "null") if is_word else repr(node.value)
    return "a mapping" if node.kind is dict else f"a list of {len(node.value)}"


def _problem(code: Code, path: ConfigPath, claim: _Claim, what: str, *, why: str = "", fix: str = "") -> Problem:
    origin = claim.node.origin
    return Problem(code=code, path=path, what=what, why=why, fix=fix, location=origin.location, origin=origin.words)
