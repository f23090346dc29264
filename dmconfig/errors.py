"""Every way dmconfig can fail: problems as data, and the exceptions that carry them.

A ``Problem`` is one finding, complete enough to be shown to a person or a tool; an exception carries all
the problems of one phase. Text and JSON are renderings of the same data and live in ``render``.

    DMConfigError             exit code
    ├── DocumentError         2  the file is not the YAML we accept
    ├── ResolveError          2  an override cannot be applied
    ├── SpecError             2  the spec says something wrong
    ├── SourceError           2  a pipeline's folder or a weights file is not what it should be
    ├── MachineError          2  the description of a machine cannot be read
    ├── PlanError             3  no placement satisfies the spec on this machine
    ├── BuildError            4  a component could not be loaded
    ├── DispatchError         4  a component could not be placed
    └── RunError              4  the pipeline's call failed
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from dmconfig.paths import ROOT, ConfigPath, Location, render_path
from dmconfig.secrets import redact

if TYPE_CHECKING:
    from dmconfig.document import Document
    from dmconfig.resolve import Resolved


class Code(StrEnum):
    """The stable codes. A number is never reused; the name says the kind, in words, beside it."""

    # DM1xx: reading the file
    FILE_UNREADABLE = "DM101"
    SYNTAX = "DM102"
    DUPLICATE_KEY = "DM103"
    AMBIGUOUS_SCALAR = "DM104"
    UNSUPPORTED_YAML = "DM105"
    TOO_LARGE = "DM106"
    FILE_NOT_WRITTEN = "DM107"
    # DM15x and DM16x: layers of files, and overrides
    BAD_OVERRIDE = "DM151"
    OVERRIDE_CONFLICT = "DM152"
    LAYER_CONFLICT = "DM153"
    UNSTATED_MERGE = "DM154"
    BAD_APPEND = "DM155"
    BAD_EXTENDS = "DM156"
    EXTENDS_CYCLE = "DM157"
    BAD_PROFILES = "DM158"
    UNKNOWN_PROFILE = "DM159"
    BAD_INTERPOLATION = "DM160"
    UNSET_VARIABLE = "DM161"
    # DM2xx: the shape of the spec
    UNSUPPORTED_VERSION = "DM201"
    UNKNOWN_KEY = "DM202"
    MISSING_KEY = "DM203"
    WRONG_TYPE = "DM204"
    BAD_VALUE = "DM205"
    BAD_DEVICE = "DM206"
    DUPLICATE_DEVICE = "DM207"
    BAD_SIZE = "DM208"
    BAD_DTYPE = "DM209"
    RENAMED_KEY = "DM210"
    # DM3xx: the meaning of the spec
    NOT_SUPPORTED_YET = "DM301"
    UNKNOWN_COMPONENT = "DM302"
    MISSING_COMPONENT = "DM303"
    UNKNOWN_CLASS = "DM304"
    CLASS_MISMATCH = "DM305"
    NOT_A_MODULE = "DM306"
    UNPLACED_COMPONENT = "DM307"
    CONTRADICTION = "DM308"
    UNKNOWN_CALL_ARGUMENT = "DM309"
    BAD_COMMAND_LINE = "DM310"
    UNKNOWN_MODULE = "DM311"
    MOVING_REVISION = "DM312"
    INCOMPATIBLE_PARTS = "DM313"
    INCOMPATIBLE_DTYPES = "DM314"
    CODE_NOT_TRUSTED = "DM315"
    PICKLE_NOT_TRUSTED = "DM316"
    BAD_CODE = "DM317"
    BAD_ORIGINAL_CONFIG = "DM318"
    UNFIT_FOR_MODULAR = "DM319"
    CONNECTED_NOT_TOLD = "DM320"
    # DM33x: what is put on components
    UNKNOWN_SWITCH = "DM330"
    PLACE_REFUSED = "DM331"
    BAD_ADAPTER = "DM332"
    BAD_QUANTIZATION = "DM333"
    INPUT_UNREADABLE = "DM350"
    # DM4xx: sources and weights
    SOURCE_NOT_FOUND = "DM401"
    NOT_A_PIPELINE = "DM402"
    SOURCE_CLASS_DIFFERS = "DM403"
    WEIGHTS_MISSING = "DM404"
    WEIGHTS_CORRUPT = "DM405"
    SIZES_UNKNOWN = "DM406"
    DOWNLOAD_FAILED = "DM407"
    OUTSIDE_SOURCE = "DM408"
    DOWNLOAD_DIFFERS = "DM409"
    CONFIG_NOT_FOUND = "DM410"
    # DM5xx: machine and plan
    NO_SUCH_DEVICE = "DM501"
    BAD_MACHINE = "DM502"
    DOES_NOT_FIT = "DM503"
    # DM6xx: building, placing, running
    COMPONENT_NOT_LOADED = "DM601"
    PLACEMENT_DIFFERS = "DM602"
    CALL_FAILED = "DM603"
    OUTPUT_NOT_WRITTEN = "DM604"
    BAD_OFFLOAD_FOLDER = "DM605"
    TRANSFER_FAILED = "DM606"
    # DM62x: rehearsing
    REHEARSAL_FAILED = "DM620"
    REHEARSAL_DISAGREES = "DM621"
    # DM63x: what is put on components
    ADAPTER_NOT_LOADED = "DM630"
    SWITCH_NOT_APPLIED = "DM631"
    PACKAGE_MISSING = "DM632"

    @property
    def slug(self) -> str:
        """The kind in words, e.g. ``unknown-key``."""
        return self.name.lower().replace("_", "-")


class Edit(NamedTuple):
    """A change of a file's text that mends a problem for certain: ``new`` instead of what stands at ``location``.

    ``old`` is the word it is about; in the file it may stand in quotes.
    """

    location: Location
    old: str
    new: str


class Move(NamedTuple):
    """A key at the wrong level, that mends a problem for certain when it stands at ``target`` with its value.

    The last element of ``target`` is its name there; ``value`` stands instead of its value, where that is not empty.
    """

    location: Location
    path: ConfigPath
    target: ConfigPath
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding: where it is, what is wrong, why that is a problem, and how to mend it.

    ``location`` is the place in the file, when the value came from one; ``origin`` names the override or
    command-line flag that set it otherwise (``--set device_map.unet``). ``edits`` are what ``fix`` does about it: all
    of them, or nothing.
    """

    code: Code
    what: str
    path: ConfigPath = ROOT
    why: str = ""
    fix: str = ""
    location: Location | None = None
    origin: str = ""
    edits: tuple[Edit | Move, ...] = ()


class DMConfigError(Exception):
    """Base of all expected failures. ``problems`` holds every finding of the phase once, in the order of the file."""

    exit_code: ClassVar[int] = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        told = _each_once(map(_without_secrets, problems))
        self.problems: tuple[Problem, ...] = tuple(sorted(told, key=_file_order))
        super().__init__("\n".join(render_problem(problem) for problem in self.problems))


class DocumentError(DMConfigError):
    """The file cannot be read, or is not the YAML dmconfig accepts; or it cannot be written.

    ``document`` is what could be read of it nevertheless, or None.
    """

    def __init__(self, problems: Iterable[Problem], document: Document | None = None) -> None:
        super().__init__(problems)
        self.document = document


class ResolveError(DMConfigError):
    """An override cannot be applied, layers contradict each other, or a variable is not set.

    ``resolved`` is what the layers say all the same, where only single values are wrong, or None.
    """

    def __init__(self, problems: Iterable[Problem], resolved: Resolved | None = None) -> None:
        super().__init__(problems)
        self.resolved = resolved


class SpecError(DMConfigError):
    """The spec has an unknown key, a wrong value, or names something that does not exist."""


class SourceError(DMConfigError):
    """A pipeline's folder, one of its configs, or a weights file is missing or not what it says."""


class MachineError(DMConfigError):
    """The description of a machine (``--gpus``, ``--ram``) cannot be read."""


class PlanError(DMConfigError):
    """No placement satisfies the spec on the given machine."""

    exit_code = 3


class BuildError(DMConfigError):
    """A component could not be loaded."""

    exit_code = 4


class DispatchError(DMConfigError):
    """A component could not be placed, or is not where the plan says."""

    exit_code = 4


class RunError(DMConfigError):
    """The pipeline was built and placed, but its call or the writing of its output failed."""

    exit_code = 4


def render_problem(problem: Problem) -> str:
    """Return problem as a block of text; lines with nothing to say are left out.

    ``reports`` has the other forms, with the line of the file among them.
    """
    return "\n".join([problem_head(problem), *problem_lines(problem)])


def problem_head(problem: Problem) -> str:
    """Return the first line of a problem's text: its code and its place."""
    place = str(problem.location) if problem.location else problem.origin
    head = f"error[{problem.code} {problem.code.slug}]"
    return f"{head}: {place}" if place else head


def problem_lines(problem: Problem) -> list[str]:
    """Return the other lines of a problem's text."""
    path = render_path(problem.path) if problem.path else ""
    labelled = (("at", path), ("what", problem.what), ("why", problem.why), ("fix", problem.fix))
    return [f"  {label:<5}{text}" for label, text in labelled if text]


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known word closest to word in spelling, or None when none is close (case is ignored)."""
    by_lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def _each_once(problems: Iterable[Problem]) -> Iterable[Problem]:
    """The problems, but of those that say the same of one place only the first: an alias repeats its anchor's."""
    found: dict[object, Problem] = {}
    for problem in problems:
        found.setdefault((problem.code, problem.what, problem.location or problem.path, problem.origin), problem)
    return found.values()


def _without_secrets(problem: Problem) -> Problem:
    what, why, fix, origin = (redact(text) for text in (problem.what, problem.why, problem.fix, problem.origin))
    path = tuple(redact(key) if isinstance(key, str) else key for key in problem.path)
    edits = () if any(_tells_a_secret(edit) for edit in problem.edits) else problem.edits
    return replace(problem, what=what, why=why, fix=fix, origin=origin, path=path, edits=edits)


def _tells_a_secret(edit: Edit | Move) -> bool:
    words = (edit.old, edit.new) if isinstance(edit, Edit) else (*map(str, (*edit.path, *edit.target)), edit.value)
    return any(redact(word) != word for word in words)


def _file_order(problem: Problem) -> tuple[str, int, int]:
    place = problem.location
    return (place.file, place.line, place.column) if place else ("", 0, 0)
