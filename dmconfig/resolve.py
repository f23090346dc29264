"""From layers to one tree of plain data that remembers where each value came from.

Overrides are the last layer: collected, checked against one another, and merged with the files. After merging, what is
left of ``${NAME}`` is replaced, so a variable that nothing uses need not be set. This module knows trees and paths, not
what the keys mean; an override of a key that does not exist is found by ``spec``, at its origin.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from dmconfig.document import Document, parse_document, parse_scalar, refused_scalar
from dmconfig.errors import Code, DocumentError, Problem, ResolveError
from dmconfig.interpolation import InterpolationError, expand
from dmconfig.layers import FILE_KEYS, chosen_profile, layers_of
from dmconfig.merging import Layer, Mode, Node, Stage, Style, merge, tree_from, tree_of
from dmconfig.paths import ROOT, ConfigPath, Location, Origin, render_path
from dmconfig.secrets import HIDDEN, is_secret_key, is_secret_name, remember, without

DOTTED_KEYS = {"device_map": ("execution", "offload", "storage")}
"""Mappings whose keys may hold dots (module paths), and the keys of their entries.

What follows their name in an override is one key, but for a key of an entry at its end.
"""


class Override(NamedTuple):
    """A value set from outside the file. ``origin`` is how its author wrote it; relative paths start in ``folder``."""

    path: ConfigPath
    value: Any
    origin: str
    folder: Path


class Template(NamedTuple):
    """The text of a value as the file has it, before its variables were replaced; ``variables`` gave it something.

    ``is_text``: it is quoted, and stays text.
    """

    text: str
    variables: tuple[str, ...]
    is_text: bool

    @property
    def is_secret(self) -> bool:
        """Whether one of its variables is named like a secret."""
        return any(map(is_secret_name, self.variables))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What all layers say together, as plain data, and where each value, and each key, came from.

    ``templates`` are the values that were written with variables; ``profiles`` are those that could be chosen;
    ``secrets`` are the texts that must not be shown, by the paths of the values that they are, or are in.
    """

    data: Any
    values: Mapping[ConfigPath, Origin] = field(repr=False)
    keys: Mapping[ConfigPath, Origin] = field(repr=False)
    templates: Mapping[ConfigPath, Template] = field(default_factory=dict, repr=False)
    profiles: tuple[str, ...] = ()
    secrets: Mapping[ConfigPath, tuple[str, ...]] = field(default_factory=dict, repr=False)

    def origin(self, path: ConfigPath, *, key: bool = False) -> Origin:
        """Return where path's value (or its key) came from; of a path that is nowhere, its nearest ancestor."""
        table = self.keys if key else self.values
        while path and path not in table:
            path, table = path[:-1], self.keys
        return table.get(path, self.values[ROOT])

    def folder_of(self, path: ConfigPath) -> Path:
        """Return the folder in which a relative file name at path starts."""
        return self.origin(path).folder

    def place(self, path: ConfigPath, *, key: bool = False) -> tuple[Location | None, str]:
        """Return (location in a file, "") or, for a value from outside all files, (None, the words that set it).

        A mapping that exists only because an override set something inside it is from outside too.
        """
        origin = self.origin(path, key=key)
        return origin.location, origin.words

    def problem(
        self, code: Code, path: ConfigPath, what: str, *, why: str = "", fix: str = "", key: bool = False
    ) -> Problem:
        """Return a problem placed where path was set; ``key`` points at the key rather than its value."""
        location, origin = self.place(path, key=key)
        problem = Problem(code=code, path=path, what=what, why=why, fix=fix, location=location, origin=origin)
        return self._without_secrets(problem)

    def located(self, problems: Iterable[Problem], path: ConfigPath | None = None) -> list[Problem]:
        """Return problems found without the file, each at the place of path, or, for None, of its own path."""
        return [self._located(problem, problem.path if path is None else path) for problem in problems]

    def _located(self, problem: Problem, path: ConfigPath) -> Problem:
        location, origin = self.place(path)
        return self._without_secrets(replace(problem, path=path, location=location, origin=origin))

    def _without_secrets(self, problem: Problem) -> Problem:
        for path, texts in self.secrets.items():
            is_about = path[: len(problem.path)] == problem.path or problem.path[: len(path)] == path
            what, why, fix = (
                without(text, texts, is_about=is_about) for text in (problem.what, problem.why, problem.fix)
            )
            problem = replace(problem, what=what, why=why, fix=fix)
        return problem


def resolve(
    document: Document,
    overrides: Iterable[Override] = (),
    *,
    overlays: Iterable[Document] = (),
    profile: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Resolved:
    """Return what a file says, with all that it extends, the overlays over it, and overrides; none of them is changed.

    Args:
        document: the file.
        overrides: values from outside all files; their order does not matter.
        overlays: files over the file; their order does not matter.
        profile: the profile to use; None: the one that ``DMCONFIG_PROFILE`` names, if any.
        environ: the variables for ``${NAME}``.

    Raises: ResolveError: all problems of the first step that has any: what the files extend, and their profiles;
        overrides that contradict each other; layers that do; variables.
    """
    files = layers_of(document, overlays, chosen_profile(profile, environ), environ)
    claims = tuple(overrides)
    problems = [*_conflicts(claims), *_keys_of_files(claims)]
    try:
        tree = merge([*files.layers, *(_layer(claim) for claim in claims)])
    except ResolveError as error:
        problems.extend(each for each in error.problems if each.code is not Code.LAYER_CONFLICT or each.location)
        raise ResolveError(problems) from None  # what overrides say against each other is told by _conflicts
    if problems:
        raise ResolveError(problems)
    return _resolved(tree, environ, files.profiles)


def as_read(document: Document) -> Resolved:
    """Return a document as it is: one layer, in which ``$`` means nothing."""
    return _resolved(tree_of(document), None)


def _layer(claim: Override) -> Layer:
    """An override as a layer: mappings that lead to one value."""
    origin = Origin(claim.folder, words=claim.origin)
    tree = tree_from(claim.value, origin)
    for key in reversed(claim.path):
        tree = Node(value={str(key): tree}, origin=origin, key=origin, mode=Mode.INTO)
    return Layer(stage=Stage.OVERRIDES, name=claim.origin, tree=tree)


def _keys_of_files(claims: Iterable[Override]) -> Iterator[Problem]:
    for claim in claims:
        if claim.path[0] in FILE_KEYS:
            what = f"{claim.path[0]} is read from files only"
            yield _bad(what, claim.origin, "lay a file over this one with -f, or choose a profile with --profile")


# ---------------------------------------------------------------- a tree, as data with places


def _resolved(tree: Node, environ: Mapping[str, str] | None, profiles: tuple[str, ...] = ()) -> Resolved:
    flattening = _Flattening(environ)
    data = flattening.data(tree, ROOT)
    values, keys, templates = flattening.values, flattening.keys, flattening.templates
    resolved = Resolved(
        data=data, values=values, keys=keys, templates=templates, profiles=profiles, secrets=flattening.secrets
    )
    if flattening.problems:
        raise ResolveError(flattening.problems, resolved)
    return resolved


@dataclass(slots=True)
class _Flattening:
    """Takes a tree apart into plain data and places; ``environ`` is None where ``$`` means nothing."""

    environ: Mapping[str, str] | None
    values: dict[ConfigPath, Origin] = field(default_factory=dict)
    keys: dict[ConfigPath, Origin] = field(default_factory=dict)
    templates: dict[ConfigPath, Template] = field(default_factory=dict)
    secrets: dict[ConfigPath, tuple[str, ...]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def data(self, node: Node, path: ConfigPath) -> Any:
        """Return the plain data of a node, and note its places."""
        self.values[path], self.keys[path] = node.origin, node.key
        if isinstance(node.value, dict):
            return {self._key(item, (*path, key)): self.data(item, (*path, key)) for key, item in node.value.items()}
        if isinstance(node.value, tuple):
            return [self.data(item, (*path, index)) for index, item in enumerate(node.value)]
        value = node.value
        if isinstance(value, str) and "$" in value and node.style is not Style.GIVEN and self.environ is not None:
            value = self._expanded(node, path, self.environ)
        if is_secret_key(path) and value is not None and not isinstance(value, bool):
            self._hide(path, str(value))
        return value

    def _hide(self, path: ConfigPath, *secrets: str) -> None:
        """Keep texts out of all that is said from now on."""
        self.secrets[path] = (*self.secrets.get(path, ()), *secrets)
        for secret in secrets:
            remember(secret)

    def _key(self, node: Node, path: ConfigPath) -> str:
        key = str(path[-1])
        if "${" in key and node.style is not Style.GIVEN and self.environ is not None:
            what, fix = f"variables are for values, not for keys: {key!r}", "write the key out"
            self._problem(Code.BAD_INTERPOLATION, node.key, path, what, fix=fix)
        return key

    def _expanded(self, node: Node, path: ConfigPath, environ: Mapping[str, str]) -> Any:
        try:
            expansion = expand(node.value, environ)
        except InterpolationError as error:
            self._problem(error.code, node.origin, path, error.what, why=error.why, fix=error.fix)
            return node.value
        template = self.templates[path] = Template(
            text=node.value, variables=expansion.variables, is_text=node.style is Style.QUOTED
        )
        secrets = [environ[name] for name in expansion.variables if is_secret_name(name)]
        if secrets:
            self._hide(path, *secrets, expansion.text)
        return expansion.text if template.is_text else self._read(expansion.text, template, node, path)

    def _read(self, text: str, template: Template, node: Node, path: ConfigPath) -> Any:
        """The value that text would have if it stood in the file."""
        refusal = refused_scalar(text)
        if refusal is None:
            return parse_scalar(text)
        fix = f"quote it if text is meant: '{template.text}'"
        self._problem(refusal.code, node.origin, path, refusal.what, why=f"it comes from {template.text}", fix=fix)
        return None

    def _problem(
        self, code: Code, origin: Origin, path: ConfigPath, what: str, *, why: str = "", fix: str = ""
    ) -> None:
        texts = (without(text, self.secrets.get(path, ()), is_about=True) for text in (what, why, fix))
        what, why, fix = texts
        problem = Problem(
            code=code, path=path, what=what, why=why, fix=fix, location=origin.location, origin=origin.words
        )
        self.problems.append(problem)


# ---------------------------------------------------------------- overrides


def override_from_text(assignment: str, flag: str = "--set") -> Override:
    """Return the override in ``key.path=value``; the value is YAML, and relative paths start in the current folder.

    Raises: ResolveError: no ``=``, an empty part of the key, or a value that is not YAML.
    """
    key, separator, text = assignment.partition("=")
    shown = f"{key}={HIDDEN}" if separator and is_secret_key(_split(key.strip())) else assignment
    origin = f"{flag} {shown}"
    if not separator or not all(part.strip() for part in key.split(".")):
        fix = f"write {flag} device_map.unet=cuda:0"
        raise ResolveError([_bad(f"{shown!r} is not of the form key.path=value", origin, fix)])
    try:
        value = parse_document(text, name=origin, folder=Path.cwd()).data
    except DocumentError as error:
        told = [(each.what, each.fix) for each in error.problems]
        if shown != assignment:
            told = [("its value cannot be read as YAML", f"quote it: {flag} \"{key}='...'\"")]
        raise ResolveError([_bad(what, origin, fix) for what, fix in told]) from None
    return Override(path=_split(key.strip()), value=value, origin=origin, folder=Path.cwd())


def overrides_from_mapping(overrides: Mapping[str, Any]) -> tuple[Override, ...]:
    """Return the overrides of a Python mapping from dotted key to value.

    Values may be Python objects: numbers, text, None, paths, enums, ``torch.dtype``, ``torch.device``, and lists or
    mappings of those. Relative paths start in the current folder.

    Raises: ResolveError: for a value of any other type, naming it.
    """
    problems: list[Problem] = []
    result: list[Override] = []
    for key, value in overrides.items():
        origin = f"overrides[{key!r}]"
        try:
            plain = _plain(value)
        except TypeError as error:
            problems.append(_bad(str(error), origin, "give text, a number, a path, a torch.dtype or a torch.device"))
            continue
        result.append(Override(path=_split(str(key)), value=plain, origin=origin, folder=Path.cwd()))
    if problems:
        raise ResolveError(problems)
    return tuple(result)


def _is_in(path: ConfigPath, parent: ConfigPath) -> bool:
    """Tell whether path is parent or lies below it."""
    return path[: len(parent)] == parent


def _split(key: str) -> ConfigPath:
    first, _, rest = key.partition(".")
    if first in DOTTED_KEYS and rest:
        entry, _, last = rest.rpartition(".")
        return (first, entry, last) if entry and last in DOTTED_KEYS[first] else (first, rest)
    return tuple(key.split("."))


def _plain(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, os.PathLike):
        return _path_text(os.fspath(value))
    if isinstance(value, Mapping):
        plain = {str(name): _plain(item) for name, item in value.items()}
        if len(plain) < len(value):
            raise TypeError(f"two of the keys {', '.join(map(repr, value))} are the same in a spec")
        return plain
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return [_plain(item) for item in value]
    raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__} cannot be written in a spec")


def _path_text(path: str | bytes) -> str:
    """A path object is certainly a path; the ``./`` keeps a relative one from reading as a hub id."""
    text = os.fsdecode(path)
    return text if text.startswith((".", "/", "~")) else f"./{text}"


def _conflicts(claims: Sequence[Override]) -> Iterable[Problem]:
    for index, claim in enumerate(claims):
        for earlier in claims[:index]:
            shorter, longer = sorted((earlier.path, claim.path), key=len)
            if _is_in(longer, shorter):
                what = f"{claim.origin} and {earlier.origin} both set {render_path(shorter)}"
                yield Problem(
                    code=Code.OVERRIDE_CONFLICT, path=claim.path, what=what, fix="keep one", origin=claim.origin
                )


def _bad(what: str, origin: str, fix: str, path: ConfigPath = ROOT) -> Problem:
    return Problem(code=Code.BAD_OVERRIDE, path=path, what=what, fix=fix, origin=origin)
