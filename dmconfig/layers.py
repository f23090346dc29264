"""The files of a spec as layers: what a file extends, the profile chosen, and the overlays on top.

Which layer is over which is written in ``merging.Stage``. ``extends`` and ``profiles`` are keys of files: they are
read here, and nothing after this module knows them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from dmconfig.document import Document, read_document
from dmconfig.errors import Code, DocumentError, Problem, ResolveError, nearest
from dmconfig.hints import newer_version
from dmconfig.interpolation import InterpolationError, expand
from dmconfig.merging import Layer, Node, Stage, tree_of
from dmconfig.paths import ConfigPath, Origin

EXTENDS, PROFILES, VERSION = "extends", "profiles", "version"
FILE_KEYS = (EXTENDS, PROFILES)
"""The keys of a file that are no part of the spec in it."""

FILE_VERSION = 1
"""The version of the format of specs, which every file says for itself."""
OF_VERSION = "this file is of schema version"

PROFILE_VARIABLE = "DMCONFIG_PROFILE"
"""The variable of the environment that chooses the profile where nothing else does."""

MAX_FILES = 64
Files = str | Path | Iterable[str | Path]
"""One file, or several."""

_OF_THE_FILE = (VERSION, *FILE_KEYS)


def read_files(file: str | Path, overlays: Files = ()) -> list[Document]:
    """Return the documents in the file of a spec and in the overlays over it; one overlay need not be in a list.

    Raises: DocumentError: with the problems of all of them; of one file alone, with what could be read of it.
    """
    documents: list[Document] = []
    problems: list[Problem] = []
    read: list[Document | None] = []
    over = [overlays] if isinstance(overlays, (str, Path)) else overlays
    for each in (file, *over):
        try:
            documents.append(read_document(each, tagged=True))
        except DocumentError as error:
            problems.extend(_newer(error.document) or error.problems)
            read.append(error.document)
    if problems:
        raise DocumentError(problems, None if documents or len(read) > 1 else read[0])
    return documents


class Profile(NamedTuple):
    """The name of a profile, and who chose it."""

    name: str
    words: str


class FileLayers(NamedTuple):
    """The layers of a file and its overlays, and the names of the profiles that can be chosen for them."""

    layers: tuple[Layer, ...]
    profiles: tuple[str, ...]


def chosen_profile(name: str | None, environ: Mapping[str, str]) -> Profile | None:
    """Return the profile of this name or, where it is None, the one that the environment names; None for none."""
    if name is not None:
        return Profile(name=name, words=f"profile {name}")
    name = environ.get(PROFILE_VARIABLE)
    return Profile(name=name, words=f"{PROFILE_VARIABLE}={name}") if name else None


def layers_of(
    document: Document,
    overlays: Iterable[Document] = (),
    profile: Profile | None = None,
    environ: Mapping[str, str] = os.environ,
) -> FileLayers:
    """Return the layers of a file and of the overlays over it, with all that they extend and their profiles.

    Raises: ResolveError: a file that is extended cannot be read or is not the YAML we accept, files extend one another
        in a circle, ``extends`` or ``profiles`` is not what it should be, or no file has the profile. All at once; but
        files of a newer version of the format say that, and only that.
    """
    files, over = _Family(environ), _Family(environ)
    files.add([document])
    over.add(overlays)
    members = [*files.members.values(), *over.members.values()]
    if newer := [*files.newer, *over.newer]:
        raise ResolveError(newer)  # what else they say may well be right there
    problems = [*files.problems, *over.problems, *_other_versions(members)]
    if profile is not None and not problems:
        problems.extend(_unknown(profile, members))
    if problems:
        raise ResolveError(problems)
    layers = (
        *files.layers(Stage.FILES),
        *files.profiles(Stage.PROFILE, profile),
        *over.layers(Stage.OVERLAYS),
        *over.profiles(Stage.PROFILE_OF_OVERLAYS, profile),
    )
    return FileLayers(layers=layers, profiles=_names(members))


class _Member(NamedTuple):
    """One file: what it says itself, its profiles, and all files that it extends, however far."""

    body: Node
    profiles: Mapping[str, Node]
    extends: frozenset[str]


class _Step(NamedTuple):
    """A file on the way to another that it extends, and where it says so."""

    identity: str
    name: str
    said: Origin


@dataclass(slots=True)
class _Family:
    """Files with all that they extend, each once, by their real path."""

    environ: Mapping[str, str]
    members: dict[str, _Member] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    newer: list[Problem] = field(default_factory=list)

    def add(self, documents: Iterable[Document]) -> None:
        """Take in files, and what they extend."""
        for document in documents:
            self._take(document, ())

    def layers(self, stage: Stage) -> Iterator[Layer]:
        """Yield what the files say outside their profiles."""
        for name, member in self.members.items():
            yield Layer(stage=stage, name=name, tree=member.body, extends=member.extends)

    def profiles(self, stage: Stage, profile: Profile | None) -> Iterator[Layer]:
        """Yield what the files say in a profile."""
        for name, member in self.members.items():
            if profile is not None and (tree := member.profiles.get(profile.name)) is not None:
                yield Layer(stage=stage, name=name, tree=tree, extends=member.extends)

    def _take(self, document: Document, trail: tuple[_Step, ...]) -> str:
        identity = os.path.realpath(document.folder / Path(document.name).name)
        if identity not in self.members:
            self.newer.extend(_newer(document))
            tree = tree_of(document)
            said = tree.value if isinstance(tree.value, dict) else {}
            found = [self._extended(entry, document, identity, trail) for entry in self._entries(said.get(EXTENDS))]
            direct = {name for name in found if name in self.members}
            self.members[identity] = _Member(
                body=replace(tree, value={k: v for k, v in said.items() if k not in FILE_KEYS}) if said else tree,
                profiles=self._profiles(said.get(PROFILES)),
                extends=frozenset(direct.union(*(self.members[name].extends for name in direct))),
            )
        return identity

    def _entries(self, node: Node | None) -> list[Node]:
        """The file names under ``extends``: one, or a list."""
        entries = [] if node is None else [*node.value] if node.kind is tuple else [node]
        wrong = [entry for entry in entries if not isinstance(entry.value, str)]
        if node is not None and (wrong or not entries):
            what, fix = "extends takes the name of a file, or a list of them", "write extends: base.yaml"
            self._problem(Code.BAD_EXTENDS, (EXTENDS,), (wrong or [node])[0].origin, what, fix=fix)
        return [entry for entry in entries if entry not in wrong]

    def _extended(self, entry: Node, document: Document, identity: str, trail: tuple[_Step, ...]) -> str | None:
        """Take in a file that is extended, and return its identity; None where it cannot be."""
        text = self._expanded(entry)
        if text is None:
            return None
        file = document.folder / Path(text).expanduser()
        trail = (*trail, _Step(identity, document.name, entry.origin))
        target = os.path.realpath(file)
        if any(step.identity == target for step in trail):
            self._circle(trail, target)
        elif target not in self.members and len(self.members) + len(trail) >= MAX_FILES:
            self._problem(Code.TOO_LARGE, (EXTENDS,), entry.origin, f"more than {MAX_FILES} files extend one another")
        else:
            return self._read(file, document, text, trail)
        return None

    def _expanded(self, entry: Node) -> str | None:
        try:
            return expand(entry.value, self.environ).text
        except InterpolationError as error:
            self._problem(error.code, (EXTENDS,), entry.origin, error.what, why=error.why, fix=error.fix)
            return None

    def _read(self, file: Path, document: Document, text: str, trail: tuple[_Step, ...]) -> str | None:
        """Take in a file that a document names so."""
        said, name = trail[-1], os.path.normpath(Path(document.name).parent / Path(text).expanduser())
        try:
            return self._take(read_document(file, name=name, tagged=True), trail)
        except DocumentError as error:
            self.newer.extend(_newer(error.document))
            for problem in error.problems:
                known = problem in self.problems  # a file that two others extend
                if problem.location is not None and not known:
                    self.problems.append(problem)
                elif not known:
                    fix = problem.fix if file.exists() else _other_file(file, text, trail)
                    self._problem(problem.code, (EXTENDS,), said.said, problem.what, fix=fix)
            return None

    def _circle(self, trail: tuple[_Step, ...], target: str) -> None:
        start = next(index for index, step in enumerate(trail) if step.identity == target)
        round_trip = trail[start:]
        names = [*(step.name for step in round_trip[1:]), round_trip[0].name]
        why = "; ".join(f"{step.said} extends {name}" for step, name in zip(round_trip, names, strict=True))
        what = f"{names[-1]} extends itself" + (f" by way of {', '.join(names[:-1])}" if names[:-1] else "")
        self._problem(Code.EXTENDS_CYCLE, (EXTENDS,), trail[-1].said, what, why=why, fix="remove one of these lines")

    def _profiles(self, node: Node | None) -> dict[str, Node]:
        if node is None:
            return {}
        if node.kind is not dict:
            what, fix = "profiles is a mapping from name to keys of this file", "write profiles: {prod: {...}}"
            self._problem(Code.BAD_PROFILES, (PROFILES,), node.origin, what, fix=fix)
            return {}
        for name, profile in node.value.items():
            self._check_profile(name, profile)
        return {name: replace(tree, value=tree.value or {}) for name, tree in node.value.items()}

    def _check_profile(self, name: str, profile: Node) -> None:
        path = (PROFILES, name)
        if profile.kind is not dict and profile.value is not None:
            what = f"the profile {name!r} is not a mapping"
            self._problem(Code.BAD_PROFILES, path, profile.origin, what, fix="write the keys that differ in it")
        for key in _OF_THE_FILE if profile.kind is dict else ():
            if key in profile.value:
                what = f"{key} is for the whole file, not for a profile"
                self._problem(Code.BAD_PROFILES, (*path, key), profile.value[key].key, what, fix="move it out of here")

    def _problem(
        self, code: Code, path: ConfigPath, origin: Origin, what: str, *, why: str = "", fix: str = ""
    ) -> None:
        self.problems.append(Problem(code=code, path=path, what=what, why=why, fix=fix, location=origin.location))


def _newer(document: Document | None) -> list[Problem]:
    """The problem of a document of a newer version of the format, if it is one."""
    version = document.data.get(VERSION) if document is not None and isinstance(document.data, dict) else None
    if document is None or type(version) is not int or version <= FILE_VERSION:
        return []
    what, fix = newer_version(OF_VERSION, version, FILE_VERSION)
    place = document.values[VERSION,]
    return [Problem(code=Code.UNSUPPORTED_VERSION, path=(VERSION,), what=what, fix=fix, location=place)]


def _names(members: Iterable[_Member]) -> tuple[str, ...]:
    return tuple(sorted({name for member in members for name in member.profiles}))


def _unknown(profile: Profile, members: Iterable[_Member]) -> Iterator[Problem]:
    known = _names(members)
    if profile.name not in known:
        meant = nearest(profile.name, known)
        why = f"the profiles are: {', '.join(known)}" if known else "no file has profiles"
        fix = f"did you mean {meant!r}?" if meant else "add it under profiles, or choose none"
        what = f"there is no profile {profile.name!r}"
        yield Problem(code=Code.UNKNOWN_PROFILE, what=what, why=why, fix=fix, origin=profile.words)


def _other_versions(members: Iterable[_Member]) -> Iterator[Problem]:
    """Files that say different versions of the format mean different things by the same keys."""
    said = [
        member.body.value[VERSION] for member in members if member.body.kind is dict and VERSION in member.body.value
    ]
    for node in said[1:]:
        if node.value != said[0].value:
            what = f"version is {node.value} here and {said[0].value} in {said[0].origin}"
            fix = "files that go together are of one version: write the same in both"
            place = node.origin.location
            yield Problem(code=Code.LAYER_CONFLICT, path=(VERSION,), what=what, fix=fix, location=place)


def _other_file(file: Path, text: str, trail: Sequence[_Step]) -> str:
    """Advise the file beside it that is meant: one that does not lead back here, as ``text`` names this one."""
    taken = {step.identity for step in trail}
    beside = [*file.parent.iterdir()] if file.parent.is_dir() else []
    specs = [each for each in beside if each.suffix in (".yaml", ".yml") and each.is_file()]
    known = {each.stem: each.name for each in specs if os.path.realpath(each) not in taken}
    meant = nearest(file.stem, known)  # of all names the ends are alike
    if meant is None:
        return f"check the path; it starts in the folder of {trail[-1].name}"
    return f"did you mean {text.removesuffix(file.name) + known[meant]!r}?"
