"""Rehearsing where real accelerators are: in a process of its own, to which they are invisible.

``python -m dmconfig.rehearse.apart CALL RESULT`` is that process: it reads a function and its arguments from one file
and writes what came of it to another.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dmconfig.errors import Code, DMConfigError, Problem, RunError
from dmconfig.virtual.hidden import run_hidden, sees_cuda

Result = TypeVar("Result")


def apart(function: Callable[..., Result], *arguments: Any) -> Result:
    """Return what a function returns, called where no real accelerator is visible: here if that is so.

    Function, arguments and result must be picklable.

    Raises: DMConfigError: what the function raises. RunError: the other process ended without a result.
    """
    if not sees_cuda():
        return function(*arguments)
    with tempfile.TemporaryDirectory() as folder:
        call, result = Path(folder, "call"), Path(folder, "result")
        call.write_bytes(pickle.dumps((function, arguments)))
        code = run_hidden(["-m", "dmconfig.rehearse.apart", str(call), str(result)]).returncode
        if code or not result.is_file():
            what = f"the process that rehearses, without this machine's accelerators, ended with code {code}"
            raise RunError([Problem(code=Code.REHEARSAL_FAILED, what=what, fix="see what it printed above")])
        value, failed = pickle.loads(result.read_bytes())  # noqa: S301 - written by our own process a moment ago
    if failed is not None:
        kind, problems = failed
        raise kind(problems)
    returned: Result = value
    return returned


def _main(call: str, result: str) -> None:
    function, arguments = pickle.loads(Path(call).read_bytes())  # noqa: S301 - as above
    try:
        outcome: Any = (function(*arguments), None)
    except DMConfigError as error:
        outcome = (None, (type(error), error.problems))
    Path(result).write_bytes(pickle.dumps(outcome))


if __name__ == "__main__":
    _main(*sys.argv[1:])
