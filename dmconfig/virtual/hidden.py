"""Running on a host with real accelerators: in a process of its own, to which they are invisible."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

HIDING: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "-1",
    "ONEAPI_DEVICE_SELECTOR": "*:cpu",
}
"""What tells the runtimes of CUDA, ROCm and XPU to show no accelerator."""


def sees_cuda() -> bool:
    """Return whether this process sees real CUDA devices, with which virtual ones would be mixed up."""
    import torch

    return torch.cuda.is_available()


def run_hidden(
    arguments: Sequence[str], *, capture_output: bool = False, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run this Python interpreter with arguments in a new process that sees no real accelerator, and wait for it.

    A ``VirtualMachine`` cannot be entered where CUDA is real, and a process that has looked at its devices cannot
    hide them any more. A line on stderr says that they are hidden. The result has the exit code, and the output if it
    was to be captured; nothing is raised when the code is not zero.

    The tests run this on builds without CUDA, with an imitation of a real device; on a CUDA build it was tried on a
    host without a GPU. The variables for ROCm and XPU are what their documentation says, and have not been tried.

    Raises: subprocess.TimeoutExpired: when it took longer than timeout_s.

    Example:
        >>> run_hidden(["-m", "pytest", "tests/unit/virtual"]).returncode  # doctest: +SKIP
        0
    """
    settings = " ".join(f'{name}="{value}"' for name, value in HIDING.items())
    print(f"dmconfig.virtual: a process of its own, real accelerators hidden ({settings})", file=sys.stderr, flush=True)
    return subprocess.run(  # noqa: S603 - the caller's own command
        [sys.executable, *arguments],
        env={**os.environ, **HIDING},
        capture_output=capture_output,
        timeout=timeout_s,
        text=True,
        check=False,
    )
