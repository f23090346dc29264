"""Time what people wait for before anything loads: ``dmconfig validate`` and ``plan``, and ``import dmconfig``.

Every run is a process of its own, so that start-up counts. Each example is validated and planned once to warm the
caches, then ``--rounds`` times; the median counts. One more run under ``PYTHONPROFILEIMPORTTIME`` tells whether a heavy
package was imported. The exit code is 1 when a limit is broken or a command fails.

    python benchmarks/commands.py [FILE ...] [--rounds 9]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DMCONFIG = Path(sys.executable).with_name("dmconfig")
COMMAND_LIMIT_S = 0.25
IMPORT_LIMIT_S = 0.2
HEAVY = {"torch", "diffusers", "transformers", "accelerate"}
EXPECTED_EXITS = {"validate": {0}, "plan": {0, 3}}  # 3: this machine lacks the devices or the memory asked for
TIMED_IMPORT = "import time; start = time.perf_counter(); import dmconfig; print(time.perf_counter() - start)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The median wall time of one command, and what is wrong with it."""

    subject: str
    seconds: float
    limit_s: float
    exit_code: int = 0
    complaints: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """``ok``, or everything that is wrong."""
        slow = [] if self.seconds < self.limit_s else ["too slow"]
        return ", ".join([*self.complaints, *slow]) or "ok"


def timed_run(command: Sequence[str]) -> tuple[float, int]:
    """Return (wall seconds, exit code) of command as a whole process; its output is thrown away."""
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return time.perf_counter() - start, done.returncode


def heavy_imports(command: Sequence[str]) -> list[str]:
    """Return the heavy packages that command, a Python program, imports, by name."""
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    if not lines:
        raise RuntimeError(f"{command} says nothing of its imports; is it a Python program?")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    return sorted(HEAVY & imported)


def measure_command(verb: str, file: Path, rounds: int) -> Measurement:
    """Return how long ``dmconfig VERB FILE`` takes once the caches are warm."""
    command = [str(DMCONFIG), verb, str(file)]
    _, exit_code = timed_run(command)
    complaints = [f"imports {name}" for name in heavy_imports(command)]
    if exit_code not in EXPECTED_EXITS[verb]:
        complaints.insert(0, "failed")
    return Measurement(
        subject=f"dmconfig {verb} {os.path.relpath(file, ROOT)}",
        seconds=statistics.median(timed_run(command)[0] for _ in range(rounds)),
        limit_s=COMMAND_LIMIT_S,
        exit_code=exit_code,
        complaints=tuple(complaints),
    )


def measure_import(rounds: int) -> Measurement:
    """Return how long ``import dmconfig`` takes in a fresh interpreter, whose own start does not count."""
    command = [sys.executable, "-c", TIMED_IMPORT]
    outputs = [subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout for _ in range(rounds + 1)]
    return Measurement(
        subject="import dmconfig",
        seconds=statistics.median(float(output) for output in outputs[1:]),
        limit_s=IMPORT_LIMIT_S,
        complaints=tuple(f"imports {name}" for name in heavy_imports(command)),
    )


def print_table(measurements: Sequence[Measurement]) -> None:
    """Print one line per measurement."""
    width = max(len(measurement.subject) for measurement in measurements)
    print(f"{'median of whole processes':<{width}}  {'seconds':>7}  {'limit':>5}  {'exit':>4}")
    for row in measurements:
        print(f"{row.subject:<{width}}  {row.seconds:7.3f}  {row.limit_s:5.2f}  {row.exit_code:4d}  {row.verdict}")


def main() -> None:
    """Measure everything, print the table, and exit 1 when something is not as it should be."""
    parser = argparse.ArgumentParser(description="Time dmconfig's validate and plan on files, and its import.")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: examples/*.yaml")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    files = [file.resolve() for file in args.files] or sorted((ROOT / "examples").glob("*.yaml"))
    if not files:
        parser.error("there is no examples/*.yaml")
    measurements = [measure_import(args.rounds)]
    measurements += [measure_command(verb, file, args.rounds) for file in files for verb in EXPECTED_EXITS]
    print_table(measurements)
    sys.exit(any(measurement.verdict != "ok" for measurement in measurements))


if __name__ == "__main__":
    main()
