"""From a file to a checked spec: read, resolve, validate, and check every rule that needs no machine and no weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dmconfig.assembly import PIPELINE, Assembly
from dmconfig.check import check
from dmconfig.checkpoint import FileHeaders
from dmconfig.errors import BuildError, Code, DMConfigError, DocumentError, Problem, ResolveError, SpecError, nearest
from dmconfig.inputs import Argument
from dmconfig.layers import Files, read_files
from dmconfig.phases import Rules, told_with_rest, told_with_shape, told_with_values
from dmconfig.resolve import Override, Resolved, resolve
from dmconfig.source import Source
from dmconfig.spec import Spec, validate_spec
from dmconfig.trust import moving_revisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A spec that passed every rule, and what its pipeline is made of; ``notes`` are to be told with its plan."""

    resolved: Resolved
    spec: Spec
    assembly: Assembly
    notes: tuple[str, ...] = ()

    def call_of(self, pipeline: str) -> dict[str, Argument]:
        """Return the arguments that the file gives to the call of one of its pipelines: see ``Assembly.call_of``."""
        return self.assembly.call_of(self.spec, pipeline)

    def pipeline_named(self, name: str | None) -> str:
        """Return the pipeline that ``--pipeline`` asks for, of those in the file; None is the first.

        Raises: SpecError: there is none of that name.
        """
        known = [PIPELINE, *self.spec.pipelines]
        if name is None or name in known:
            return name or PIPELINE
        meant = nearest(name, known)
        fix = f"did you mean {meant!r}?" if meant else f"it has: {', '.join(known)}"
        what = f"the file has no pipeline {name!r}"
        raise SpecError([Problem(code=Code.BAD_COMMAND_LINE, what=what, fix=fix, origin="--pipeline")])


def resolve_file(
    file: str | Path,
    overrides: Iterable[Override] = (),
    *,
    overlays: Files = (),
    profile: str | None = None,
) -> Resolved:
    """Return what file says, with all that it extends, a profile, overlays and overrides, each over those before it.

    Raises: DocumentError, ResolveError: all problems of the first phase that has any.
    """
    document, *over = read_files(file, overlays)
    return resolve(document, overrides, overlays=over, profile=profile)


def check_file(
    file: str | Path,
    overrides: Iterable[Override] = (),
    *,
    overlays: Files = (),
    profile: str | None = None,
    ask_hub: bool = False,
    with_configs: bool = False,
) -> Checked:
    """Return the spec in file with all of its layers, after every rule that needs no machine and no weights.

    Args:
        file: the YAML spec.
        overrides: values from outside all files.
        overlays: files over the file.
        profile: the profile to use; None: the one that ``DMCONFIG_PROFILE`` names, if any.
        ask_hub: whether the hub may be asked what a pipeline is made of that nothing is known of here.
        with_configs: whether it is also asked for the configs of all components, for a rehearsal.

    Raises: DocumentError, ResolveError, SpecError: all problems of the first phase that has any, and those of later
        ones that do not follow from them.
        BuildError: the hub was to be asked, and a download failed.
    """
    resolved = _resolved(file, tuple(overrides), overlays, profile, check)
    spec = _validated(resolved, check)
    if ask_hub:
        from dmconfig.fetch import fetch_indexes, file_headers

        if problems := [*moving_revisions(resolved, spec)]:
            raise SpecError(problems)  # before anything is fetched at one
        headers = file_headers()
        fetch_indexes(resolved, spec, headers, with_configs=with_configs)
        return Checked(resolved=resolved, spec=spec, assembly=check(resolved, spec, _if_answered(headers)))
    return Checked(resolved=resolved, spec=spec, assembly=check(resolved, spec))


def problems_of_file(
    file: str | Path, overrides: Iterable[Override] = (), *, overlays: Files = (), profile: str | None = None
) -> tuple[Problem, ...]:
    """Return everything that is wrong with the spec in file: what ``check_file`` finds, weights that are not there, and
    what is wrong with its other profiles, as ``check_profiles`` tells it.
    """
    claims = tuple(overrides)
    rules = functools.partial(check, with_weights=True)
    try:
        resolved = _resolved(file, claims, overlays, profile, rules)
    except DMConfigError as error:
        return error.problems
    found: list[Problem] = []
    try:
        rules(resolved, _validated(resolved, rules))
    except DMConfigError as error:
        found += error.problems
    try:
        if resolved.profiles:
            check_profiles(resolved.profiles, file, claims, overlays=overlays, told=found)
    except DMConfigError as error:
        found += error.problems
    return tuple(found)


def _resolved(
    file: str | Path, claims: tuple[Override, ...], overlays: Files, profile: str | None, rules: Rules
) -> Resolved:
    try:
        return resolve_file(file, claims, overlays=overlays, profile=profile)
    except DocumentError as error:
        raise told_with_shape(error, lambda document: resolve(document, claims, profile=profile), rules) from None
    except ResolveError as error:
        raise told_with_values(error, rules) from None


def _validated(resolved: Resolved, rules: Rules) -> Spec:
    try:
        return validate_spec(resolved)
    except SpecError as error:
        raise told_with_rest(error, resolved, rules) from None


def _if_answered(headers: FileHeaders) -> FileHeaders:
    """Headers that are not known where the hub does not give them: measuring, or fetching, tells why."""

    def of(source: Source) -> Any:
        with contextlib.suppress(BuildError):
            return headers(source)

    return of


def check_profiles(
    profiles: Iterable[str],
    file: str | Path,
    overrides: Iterable[Override] = (),
    *,
    overlays: Files = (),
    told: Collection[Problem] = (),
) -> None:
    """Check the shape of a spec with each of these profiles: what can be known on a machine that they are not for.

    A profile with variables that are not set here is checked where they are. What is ``told`` already, of the spec
    without them, is not told again.

    Raises: SpecError: what is wrong with any of them, each problem once, with the name of the profile.
    """
    document, *over = read_files(file, overlays)
    claims = tuple(overrides)
    problems: dict[Problem, str] = {}
    for profile in profiles:
        try:
            validate_spec(resolve(document, claims, overlays=over, profile=profile))
        except DMConfigError as error:
            for problem in error.problems:
                if problem.code is not Code.UNSET_VARIABLE and problem not in told:
                    problems.setdefault(problem, profile)
    if problems:
        raise SpecError(replace(each, what=f"with profile {name}: {each.what}") for each, name in problems.items())
