"""``dmconfig fix``: the edits that problems carry, made in the text of a file, which stays as it is everywhere else."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dmconfig.document import Document, parse_document, read_text
from dmconfig.errors import Code, DMConfigError, DocumentError, Edit, Move, Problem
from dmconfig.files import write_whole
from dmconfig.layers import PROFILES
from dmconfig.paths import ConfigPath, offset_of
from dmconfig.rearranging import moved
from dmconfig.resolve import as_read
from dmconfig.spec import validate_spec

_ROUNDS = 64
"""What is below a renamed key is seen once it has its name, so one round may bring up the next; a move is a round."""
_MARK = "\N{BYTE ORDER MARK}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A file's text as it is and as it should be; ``edits`` lead from the one to the other."""

    file: Path
    before: str
    after: str
    edits: tuple[Edit | Move, ...]

    def diff(self) -> str:
        """Return the difference as a patch; empty when there is none."""
        before, after = self.before.splitlines(keepends=True), self.after.splitlines(keepends=True)
        return "".join(_with_end(line) for line in difflib.unified_diff(before, after, str(self.file), str(self.file)))

    def write(self) -> None:
        """Write the text to the file, whole or not at all; a file that needs no change is not touched.

        Raises: DocumentError: it cannot be written, or is not any more what was read.
        """
        if self.before == self.after:
            return
        try:
            if self.file.read_bytes() != self.before.encode():
                raise _not_written(self.file, "it was changed meanwhile", "run the command again")
            write_whole(self.file, self.after.encode())
        except OSError as error:
            raise _not_written(self.file, str(error.strerror or error), "") from error


def fixed(file: Path) -> Fixed:
    """Return what a file becomes when every edit that its problems carry is made. The file is only read.

    Raises: DocumentError: it cannot be read, or has a syntax error.
    """
    read_text(file, str(file))  # tells what is wrong with a file that is no text
    before = after = file.read_bytes().decode()
    made: list[Edit | Move] = []
    for _ in range(_ROUNDS):
        after, edits = _next(after, file)
        if not edits:
            break
        made += edits
    return Fixed(file=file, before=before, after=after, edits=tuple(made))


def without_offers(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yield the problems that are left of a file, without the sentence that this command mends them: it could not."""
    for problem in problems:
        fix, _, _ = problem.fix.partition("; dmconfig fix ")
        yield replace(problem, fix=fix if problem.edits else problem.fix)


def _next(text: str, file: Path) -> tuple[str, list[Edit | Move]]:
    """The text after one round, and what was done: words in the places that problems name, else one key moved."""
    problems = [*_problems_of(text, file)]
    words = [edit for each in problems for edit in _words_of(each, text)]
    if words:
        found = [*dict.fromkeys(words)]
        return _edited(text, found), [*found]
    for move in (edit for each in problems for edit in each.edits if isinstance(edit, Move)):
        mark = _MARK if text.startswith(_MARK) else ""
        after = moved(text.removeprefix(_MARK), move.path, move.target, move.value)
        if after is not None:
            return mark + after, [move]
    return text, []


def _words_of(problem: Problem, text: str) -> tuple[Edit, ...]:
    """The words that a problem has others for: all of its edits, where each is still about what the text has there."""
    edits = tuple(edit for edit in problem.edits if isinstance(edit, Edit) and _is_there(text, edit))
    return edits if len(edits) == len(problem.edits) else ()


def _problems_of(text: str, file: Path) -> Iterator[Problem]:
    """What is wrong with what a file says itself and in its profiles; what it extends is fixed by itself."""
    document, problems = _parsed(text, file)
    yield from problems
    profiles = document.data.get(PROFILES) if isinstance(document.data, dict) else None
    for path in ((), *((PROFILES, name) for name in (profiles if isinstance(profiles, dict) else ()))):
        for problem in _problems_in(document, path):
            yield replace(problem, edits=tuple(_from_the_root(edit, path) for edit in problem.edits))


def _from_the_root(edit: Edit | Move, path: ConfigPath) -> Edit | Move:
    """An edit of a part of a document that is at a path, as one of the document."""
    if isinstance(edit, Edit):
        return edit
    return edit._replace(path=(*path, *edit.path), target=(*path, *edit.target))


def _parsed(text: str, file: Path) -> tuple[Document, tuple[Problem, ...]]:
    body = text.removeprefix(_MARK)
    try:
        return parse_document(body, name=str(file), folder=file.absolute().parent, tagged=True), ()
    except DocumentError as error:
        if error.document is None:
            raise
        return error.document, error.problems


def _problems_in(document: Document, root: ConfigPath) -> tuple[Problem, ...]:
    """What is wrong with a part of a document when it is read as a spec of its own; not all of that need be wrong."""
    data: Any = document.data
    for key in root:
        data = data[key]
    size = len(root)
    part = replace(
        document,
        data=data,
        keys={path[size:]: place for path, place in document.keys.items() if path[:size] == root},
        values={path[size:]: place for path, place in document.values.items() if path[:size] == root},
        tags={path[size:]: tag for path, tag in document.tags.items() if path[:size] == root},
        quoted={path[size:] for path in document.quoted if path[:size] == root},
    )
    try:
        validate_spec(as_read(part))
    except DMConfigError as error:
        return error.problems
    return ()


def _is_there(text: str, edit: Edit) -> bool:
    """Whether the text has at an edit's place what the edit is about, plain or in quotes."""
    return _standing(text, edit).strip("'\"") == edit.old


def _standing(text: str, edit: Edit) -> str:
    start = _start_of(text, edit)
    return text[start : start + edit.location.length]


def _start_of(text: str, edit: Edit) -> int:
    """Where an edit starts in a text; a byte order mark is in the text, and in no column."""
    return offset_of(text, edit.location) + (text.startswith(_MARK) and edit.location.line == 1)


def _edited(text: str, edits: list[Edit]) -> str:
    """The text with all edits made, the last first, so that no place moves before its turn."""
    for edit in sorted(edits, key=lambda edit: (edit.location.line, edit.location.column), reverse=True):
        start, standing = _start_of(text, edit), _standing(text, edit)
        text = text[:start] + standing.replace(edit.old, edit.new) + text[start + len(standing) :]
    return text


def _with_end(line: str) -> str:
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _not_written(file: Path, reason: str, fix: str) -> DocumentError:
    what = f"{file} cannot be written: {reason}"
    return DocumentError([Problem(code=Code.FILE_NOT_WRITTEN, what=what, fix=fix, origin=str(file))])
