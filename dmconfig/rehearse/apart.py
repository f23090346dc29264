"""Rehearsing where real accelerators are: in a process of its own, to which they are invisible.

That process reads a function and its arguments from one file, and writes what came of it to another.
"""

from __future__ import annotations

import io
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from dmconfig.errors import Code, DMConfigError, Problem, RunError
from dmconfig.virtual.hidden import run_hidden, sees_cuda

Result = TypeVar("Result")
_PROCESS = "import sys; from dmconfig.rehearse.apart import answer; answer(*sys.argv[1:])"


def apart(function: Callable[..., Result], *arguments: Any) -> Result:
    """Return what a function returns, called where no real accelerator is visible: here if that is so.

    Function, arguments and result must be picklable.

    Raises: DMConfigError: what the function raises. RunError: the other process ended without a result.
    """
    if not sees_cuda():
        return function(*arguments)
    with tempfile.TemporaryDirectory() as folder:
        call, result = Path(folder, "call"), Path(folder, "result")
        call.write_bytes(pickled((function, arguments)))
        code = run_hidden(["-c", _PROCESS, str(call), str(result)]).returncode
        if code or not result.is_file():
            what = f"the process that rehearses, without this machine's accelerators, ended with code {code}"
            raise RunError([Problem(code=Code.REHEARSAL_FAILED, what=what, fix="see what it printed above")])
        value, failed = pickle.loads(result.read_bytes())  # noqa: S301 - written by our own process a moment ago
    if failed is not None:
        kind, problems = failed
        raise kind(problems)
    returned: Result = value
    return returned


def pickled(value: Any) -> bytes:
    """Return a value as bytes, the read-only mappings in it too, which Python does not pickle by itself."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return (read_only, (dict(value),)) if type(value) is MappingProxyType else NotImplemented


def read_only(values: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    """Return a read-only mapping of values: by a name that can be pickled, which its own class has not."""
    return MappingProxyType(values)


def answer(call: str, result: str) -> None:
    """Call what is in one file, and write what it returns or raises to another: what the other process does."""
    function, arguments = pickle.loads(Path(call).read_bytes())  # noqa: S301 - as above
    try:
        outcome: Any = (function(*arguments), None)
    except DMConfigError as error:
        outcome = (None, (type(error), error.problems))
    Path(result).write_bytes(pickled(outcome))
