"""What a later phase finds in a file that an earlier one refuses, so that one run tells everything that is wrong.

Phases build on one another: a spec is read, then held against its models, then against its pipeline. What follows from
an earlier problem is not told; what a later phase says of other lines is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from dmconfig.document import Document
from dmconfig.errors import Code, DMConfigError, DocumentError, Move, Problem, ResolveError, SpecError, nearest
from dmconfig.hints import renamed_key
from dmconfig.paths import ConfigPath
from dmconfig.resolve import Resolved
from dmconfig.spec import PipelineSpec, Spec, validate_spec
from dmconfig.validation import keys

Rules = Callable[[Resolved, Spec], object]
"""What holds a spec against its pipeline, and raises a DMConfigError with all that is wrong: ``check``."""

_PIPELINE = frozenset({"pipeline", "pipelines"})
_PARTS = _PIPELINE | {"components"}
_NOT_PLACED = frozenset({"reserve", "calls", "execution_device"})
"""Sections that say nothing of what there is and of how it is brought."""
_DEPENDS: Mapping[Code, frozenset[str]] = {
    Code.SOURCE_NOT_FOUND: frozenset(),
    Code.BAD_DEVICE: frozenset(),
    Code.UNKNOWN_COMPONENT: _PIPELINE,
    Code.UNKNOWN_CALL_ARGUMENT: _PIPELINE,
    Code.INPUT_UNREADABLE: _PIPELINE,
    Code.WRONG_TYPE: _PIPELINE,
    Code.UNKNOWN_CLASS: _PIPELINE,
    Code.CLASS_MISMATCH: _PIPELINE,
    Code.UNKNOWN_SWITCH: _PIPELINE,
    Code.MOVING_REVISION: frozenset({"allow_moving_revision"}),
    Code.NOT_A_MODULE: _PARTS,
    Code.UNKNOWN_MODULE: _PARTS,
    Code.BAD_ADAPTER: _PARTS,
    Code.BAD_QUANTIZATION: _PARTS,
    Code.BAD_DTYPE: _PARTS,
    Code.CODE_NOT_TRUSTED: _PARTS,
    Code.PICKLE_NOT_TRUSTED: _PARTS,
    Code.WEIGHTS_MISSING: _PARTS | {"variant", "variant_missing", "allow_pickle"},
}
"""What a rule complains of -> the sections that can make it wrong, beside the entry that it stands in.

Rules that are not here look at several places, or at what is not there: they speak where only ``_NOT_PLACED`` is wrong.
"""


def told_with_shape(error: DocumentError, resolve: Callable[[Document], Resolved], rules: Rules) -> DMConfigError:
    """Return an error of reading with what is wrong with the shape of the rest of the file.

    A file of a newer version of the format says only that.
    """
    if error.document is None:
        return error
    problems, resolved = [*error.problems], None
    try:
        resolved = resolve(error.document)
    except ResolveError as later:
        problems += _elsewhere(later.problems, problems)
        resolved = later.resolved
    found = problems if resolved is None else _with_later(problems, resolved, rules)
    return found if isinstance(found, SpecError) else DocumentError(found, error.document)


def told_with_values(error: ResolveError, rules: Rules) -> DMConfigError:
    """Return an error of layers with what is wrong with the rest, where only single values could not be told."""
    if error.resolved is None:
        return error
    found = _with_later(error.problems, error.resolved, rules)
    return found if isinstance(found, SpecError) else ResolveError(found, error.resolved)


def told_with_rest(error: SpecError, resolved: Resolved, rules: Rules) -> SpecError:
    """Return an error of a spec's shape with what the rules say of the rest of the file."""
    return SpecError([*error.problems, *_of_the_rest(resolved, error.problems, rules)])


def _with_later(problems: Sequence[Problem], resolved: Resolved, rules: Rules) -> list[Problem] | SpecError:
    """Problems with those of the shape and of the rules that are elsewhere; of a newer version, only that."""
    known = [*problems]
    try:
        validate_spec(resolved)
    except SpecError as shape:
        if [problem.code for problem in shape.problems] == [Code.UNSUPPORTED_VERSION]:
            return shape
        # what could not be read is no key, and not a missing one either
        unread = Code.UNSUPPORTED_YAML in {problem.code for problem in problems}
        found = [each for each in shape.problems if not (unread and each.code is Code.MISSING_KEY)]
        known += _elsewhere(found, problems)
    return [*known, *_of_the_rest(resolved, known, rules)]


def _of_the_rest(resolved: Resolved, known: Sequence[Problem], rules: Rules) -> list[Problem]:
    """What the rules say of a spec without what is known to be wrong in it; nothing where that is no spec.

    A problem that may come of what was left out is not told.
    """
    data = resolved.data
    for path in sorted((problem.path for problem in known), key=len, reverse=True):
        data = _without(data, path)
    rest = replace(resolved, data=data)
    try:
        rules(rest, validate_spec(rest))
    except DMConfigError as error:
        wrong = {_section_of(problem) for problem in known}
        told = (each for each in error.problems if _is_independent(each, wrong))
        return [each for each in _elsewhere(told, known) if not _shares_its_entry(each, known)]
    return []


_ANY = "*"
_OF_WEIGHTS = ("dtype", "variant", "variant_missing", "allow_pickle", "local_files_only")
"""Keys of the pipeline that do not tell which one it is."""


def _section_of(problem: Problem) -> str:
    """The section that a problem is of: of an unknown key, the one that it may have meant; ``_ANY`` where none is near.

    Keys of the pipeline that do not tell which one it is are sections by themselves.
    """
    path = problem.path
    if target := next((edit.target for edit in problem.edits if isinstance(edit, Move)), None):
        path = target
    elif problem.code in (Code.UNKNOWN_KEY, Code.RENAMED_KEY):
        known = [*keys(PipelineSpec if path[:-1] == ("pipeline",) else Spec)]
        meant = renamed_key(path) or nearest(str(path[-1]), known)
        path = path if len(path) > 1 and path[0] != "pipeline" else (*path[:-1], meant or _ANY)
    if path[:1] == ("pipeline",) and len(path) > 1 and path[1] in _OF_WEIGHTS:
        return str(path[1])
    return str(path[0]) if path else _ANY


def _is_independent(problem: Problem, wrong: Set[str]) -> bool:
    """Whether what a problem says does not depend on any section with something wrong."""
    depends = _DEPENDS.get(problem.code)
    return wrong <= _NOT_PLACED if depends is None else not wrong & depends


def _shares_its_entry(problem: Problem, known: Sequence[Problem]) -> bool:
    """Whether something else in the same entry of a section (a component, a place, an adapter) is wrong."""
    return (
        len(problem.path) > 1
        and problem.path[0] != "call"
        and any(each.path[:2] == problem.path[:2] or each.path == problem.path[:1] for each in known)
    )


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
