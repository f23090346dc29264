"""What a later phase finds in a file that an earlier one refuses, so that one run tells everything that is wrong.

Phases build on one another: a spec is read, then held against its models, then against its pipeline. What follows from
an earlier problem is not told; what a later phase says of other lines is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from dmconfig.check import check
from dmconfig.document import Document
from dmconfig.errors import Code, DMConfigError, DocumentError, Problem, SpecError
from dmconfig.paths import ConfigPath
from dmconfig.resolve import Resolved
from dmconfig.spec import validate_spec

_OF_NAMES = {Code.UNKNOWN_COMPONENT, Code.UNKNOWN_CALL_ARGUMENT, Code.UNKNOWN_CLASS, Code.SOURCE_NOT_FOUND}
"""What is wrong with a name in the file whatever else the file says."""


def told_with_shape(error: DocumentError, resolve: Callable[[Document], Resolved]) -> DMConfigError:
    """Return an error of reading with what is wrong with the shape of the rest of the file.

    A file of a newer version of the format says only that.
    """
    if error.document is None:
        return error
    later = _later_problems(error.document, resolve)
    if [problem.code for problem in later] == [Code.UNSUPPORTED_VERSION]:
        return SpecError(later)
    unread = Code.UNSUPPORTED_YAML in {problem.code for problem in error.problems}
    independent = [each for each in later if not (unread and each.code is Code.MISSING_KEY)]
    return DocumentError([*error.problems, *_elsewhere(independent, error.problems)], error.document)


def told_with_names(error: SpecError, resolved: Resolved) -> SpecError:
    """Return an error of a spec's shape with what is wrong with the names in the rest of the file."""
    data = resolved.data
    for path in sorted((problem.path for problem in error.problems), key=len, reverse=True):
        data = _without(data, path)
    return SpecError([*error.problems, *_elsewhere(_wrong_names(replace(resolved, data=data)), error.problems)])


def _later_problems(document: Document, resolve: Callable[[Document], Resolved]) -> Sequence[Problem]:
    """What phases after reading say of a document that could be read in part."""
    try:
        resolved = resolve(document)
    except DMConfigError as error:
        return error.problems
    try:
        validate_spec(resolved)
    except SpecError as error:
        return told_with_names(error, resolved).problems
    return _wrong_names(resolved)


def _wrong_names(resolved: Resolved) -> list[Problem]:
    """What is wrong with the names in a spec; nothing where it is not one."""
    try:
        check(resolved, validate_spec(resolved))
    except DMConfigError as error:
        return [problem for problem in error.problems if problem.code in _OF_NAMES]
    return []


def _elsewhere(problems: Iterable[Problem], known: Sequence[Problem]) -> list[Problem]:
    """The problems that are neither at nor below a place that is known to be wrong."""
    paths = [problem.path for problem in known if problem.path]
    return [each for each in problems if not any(each.path[: len(path)] == path for path in paths)]


def _without(data: Any, path: ConfigPath) -> Any:
    """Data without what is at a path; a list is left out whole, for its items have no names."""
    if not path or not isinstance(data, dict) or path[0] not in data:
        return data
    rest = {key: value for key, value in data.items() if key != path[0]}
    inner = data[path[0]]
    return rest | {path[0]: _without(inner, path[1:])} if len(path) > 1 and isinstance(inner, dict) else rest
