"""Whole processes for benchmarks, started as an installed package starts: what they take, and what they import."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DMCONFIG = (sys.executable, "-m", "dmconfig")
HEAVY = {"torch", "diffusers", "transformers", "accelerate"}


@dataclass(frozen=True, slots=True)
class Took:
    """What something took, by the processor and by the clock."""

    processor_s: float
    clock_s: float


def installed_environment(cache: Path) -> dict[str, str]:
    """Return an environment whose processes keep compiled modules in cache: an installed package has them beside it."""
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def run_process(command: Sequence[str], environment: Mapping[str, str]) -> tuple[Took, int]:
    """Return what command takes as a whole process, and its exit code; its output is thrown away."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    )
    clock_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Took(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, clock_s), done.returncode


def medians(runs: Sequence[Took]) -> Took:
    """Return the median processor time and the median time by the clock."""
    return Took(statistics.median(run.processor_s for run in runs), statistics.median(run.clock_s for run in runs))


def heavy_imports(command: Sequence[str]) -> list[str]:
    """Return the heavy packages that command, a Python program, imports, by name."""
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    if not lines:
        raise RuntimeError(f"{command} says nothing of its imports; is it a Python program?")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    return sorted(HEAVY & imported)
