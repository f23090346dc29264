"""Time what people wait for before anything loads: each verb that only looks, as a whole process, and its imports.

Every run is a process of its own, so that start-up counts. Each command is run once to warm the caches, then
``--rounds`` times. The median of the wall time counts; where a machine is shared, that says little, so a command is
also fine when the median of its processor time is below the limit. One more run tells whether a heavy package was
imported. ``validate`` of 100 files in one run has a limit of its own. The exit code is 1 when a limit is broken or a
command fails.

    python benchmarks/startup.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from commands import heavy_imports

ROOT = Path(__file__).resolve().parent.parent
DMCONFIG = (sys.executable, "-m", "dmconfig")
VALIDATE_LIMIT_S, LIMIT_S, MANY_LIMIT_S = 0.15, 0.2, 1.0
MANY = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The median wall time and processor time of one command, and what is wrong with it."""

    subject: str
    wall_s: float
    processor_s: float
    limit_s: float
    complaints: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """``ok``, or everything that is wrong."""
        slow = [] if min(self.wall_s, self.processor_s) < self.limit_s else ["too slow"]
        return ", ".join([*self.complaints, *slow]) or "ok"


def timed(command: Sequence[str]) -> tuple[float, float, int]:
    """Return (wall seconds, processor seconds, exit code) of a command as a whole process; its output is dropped."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.returncode


def measure(arguments: Sequence[str], limit_s: float, rounds: int, subject: str = "") -> Measurement:
    """Return how long a command takes once the caches are warm."""
    command = [*DMCONFIG, *arguments]
    _, _, exit_code = timed(command)
    complaints = [f"imports {name}" for name in heavy_imports(command)]
    walls, processors, _ = zip(*(timed(command) for _ in range(rounds)), strict=True)
    return Measurement(
        subject=subject or f"dmconfig {' '.join(arguments)}",
        wall_s=statistics.median(walls),
        processor_s=statistics.median(processors),
        limit_s=limit_s,
        complaints=tuple([f"exit code {exit_code}"] * bool(exit_code) + complaints),
    )


def measurements(rounds: int) -> Iterator[Measurement]:
    """Yield the measurement of every verb that only looks."""
    example = "examples/digits.yaml"
    yield measure(["--version"], VALIDATE_LIMIT_S, rounds)
    yield measure(["validate", example], VALIDATE_LIMIT_S, rounds)
    yield measure(["config", example], LIMIT_S, rounds)
    yield measure(["explain", "max_memory"], LIMIT_S, rounds)
    yield measure(["explain", "DM202"], LIMIT_S, rounds)
    yield measure(["schema"], LIMIT_S, rounds)
    yield measure(["fix", "--check", example], LIMIT_S, rounds)
    yield measure(["plan", example, "--gpus", "24GiB", "--ram", "64GiB"], LIMIT_S, rounds)
    with tempfile.TemporaryDirectory() as folder:
        text = (ROOT / example).read_text(encoding="utf-8").replace("./digits", str(ROOT / "examples" / "digits"))
        files = [Path(folder, f"{number}.yaml") for number in range(MANY)]
        for file in files:
            file.write_text(text, encoding="utf-8")
        yield measure(["validate", *map(str, files)], MANY_LIMIT_S, rounds, f"dmconfig validate, {MANY} files")


def main() -> None:
    """Measure everything, print the table, and exit 1 when something is not as it should be."""
    parser = argparse.ArgumentParser(description="Time the start of dmconfig's commands.")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    width = min(shutil.get_terminal_size().columns - 40, 56)
    print(f"{'median of whole processes':<{width}}  {'wall s':>7}  {'cpu s':>6}  {'limit':>5}")
    is_fine = True
    for row in measurements(rounds):
        print(f"{row.subject:<{width}}  {row.wall_s:7.3f}  {row.processor_s:6.3f}  {row.limit_s:5.2f}  {row.verdict}")
        is_fine = is_fine and row.verdict == "ok"
    sys.exit(not is_fine)


if __name__ == "__main__":
    main()
