"""Commits in the place of branches: what every hub id of a spec names today, written into its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dmconfig.editing import differs_elsewhere, set_beside
from dmconfig.errors import Code, DMConfigError, DocumentError, Problem, SpecError
from dmconfig.fetch import commits_of
from dmconfig.files import write_whole
from dmconfig.layers import read_files
from dmconfig.paths import ConfigPath
from dmconfig.resolve import Resolved, resolve
from dmconfig.source import is_commit, locate_source, repository_of
from dmconfig.spec import Spec, validate_spec
from dmconfig.trust import hub_references, revision_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A hub id, and the commit that the revision beside it names today; ``revision`` None is the main branch."""

    path: ConfigPath
    hub_id: str
    revision: str | None
    commit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """The pins of a file, and its text with them in it."""

    file: Path
    pins: tuple[Pin, ...]
    text: str

    def write(self) -> None:
        """Replace the file, in one step.

        Raises: DocumentError: it cannot be written.
        """
        try:
            write_whole(self.file, self.text.encode())
        except OSError as error:
            what = f"{self.file} cannot be written: {error.strerror or error}"
            raise DocumentError([Problem(code=Code.FILE_UNREADABLE, what=what, origin=str(self.file))]) from error


def pin(file: Path) -> Pinned:
    """Return a spec's text with a commit beside every hub id that has none; all else of it stays, comments too.

    Asks the hub; where downloads are forbidden, the local cache tells what was downloaded last. Hub ids that have a
    commit are left alone, and so are those in files that this one extends: they are pinned there.

    Raises: DocumentError, SpecError: what is wrong with the file. BuildError: the hub cannot be asked.
    """
    document, *over = read_files(file, ())
    resolved = resolve(document, overlays=over)
    spec = validate_spec(resolved)
    moving = [each for each in _moving(resolved, spec) if _is_in(file, resolved, each[0])]
    commits = commits_of(resolved, moving)
    pins = tuple(
        Pin(path=path, hub_id=hub_id, revision=revision, commit=commits[hub_id, revision])
        for path, hub_id, revision in moving
    )
    return Pinned(file=file, pins=pins, text=_edited(file, pins))


def _is_in(file: Path, resolved: Resolved, path: ConfigPath) -> bool:
    location, _ = resolved.place(path)
    return location is not None and location.file == str(file)


def _moving(resolved: Resolved, spec: Spec) -> Iterator[tuple[ConfigPath, str, str | None]]:
    """Yield every hub id of a spec that is at no commit: its path, the id without a file behind it, its revision."""
    for path, text, revision in hub_references(spec):
        if is_commit(revision):
            continue
        if (hub_id := repository_of(text)) is not None:
            yield path, hub_id, revision
            continue
        try:
            source = locate_source(text, folder=resolved.folder_of(path), revision=revision)
        except DMConfigError as error:
            problems = (resolved.problem(each.code, path, each.what, fix=each.fix) for each in error.problems)
            raise SpecError(problems) from None
        yield path, source.hub_id or text, revision


def _edited(file: Path, pins: tuple[Pin, ...]) -> str:
    with file.open(encoding="utf-8", newline="") as stream:  # line ends as they are
        text = stream.read()
    mark, text = ("\ufeff", text[1:]) if text.startswith("\ufeff") else ("", text)
    values: Mapping[ConfigPath, str] = {revision_path(pin.path): pin.commit for pin in pins}
    after = {revision_path(pin.path): str(pin.path[-1]) for pin in pins}
    edited = set_beside(text, values, after=after) if values else text
    if differs_elsewhere(text, edited, values):
        what = "commits cannot be written into this file by themselves: an anchor shares what they would stand in"
        raise DocumentError([Problem(code=Code.UNSUPPORTED_YAML, what=what, fix="write it out", origin=str(file))])
    return mark + edited
