"""Time what people wait for before anything loads: each verb that only looks, as a whole process, and the import.

Every run is a process of its own, so that start-up counts, with compiled modules, as an installed package has them.
Each command is run once to warm the caches, then ``--rounds`` times. The median of the wall time counts; where a
machine is shared, that says little, so a command is also fine when the median of its processor time is below the limit.
One more run tells whether a heavy package was imported. ``validate`` of 100 files in one run has a limit of its own.
The exit code is 1 when a limit is broken or a command fails.

    python benchmarks/startup.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from processes import DMCONFIG, ROOT, Took, heavy_imports, installed_environment, medians, run_process

VALIDATE_LIMIT_S, LIMIT_S, MANY_LIMIT_S = 0.15, 0.2, 1.0
MANY = 100
EXAMPLE = "examples/digits.yaml"
LIBRARIES = "import os, typer._adapters, yaml; from pydantic import TypeAdapter; TypeAdapter(int); os._exit(0)"
"""What every verb but the quickest needs before any module of dmconfig: how fast this machine is today."""
PLANNED_OR_NOT = (0, 2, 3)
"""How a plan of an example may end: 3 where this machine lacks the devices or the memory that it asks for, and 2 where
sizes are on the hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one command takes, and what is wrong with it."""

    subject: str
    took: Took
    limit_s: float
    complaints: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """``ok``, or everything that is wrong."""
        slow = [] if min(self.took.clock_s, self.took.processor_s) < self.limit_s else ["too slow"]
        return ", ".join([*self.complaints, *slow]) or "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """How commands are timed: in which environment, and how often."""

    environment: Mapping[str, str]
    rounds: int

    def of_command(
        self, arguments: Sequence[str], limit_s: float = LIMIT_S, *, subject: str = "", exits: Collection[int] = (0,)
    ) -> Measurement:
        """Return how long ``dmconfig ARGUMENTS`` takes once the caches are warm."""
        return self.of([*DMCONFIG, *arguments], subject or f"dmconfig {' '.join(arguments)}", limit_s, exits)

    def of(
        self, command: Sequence[str], subject: str, limit_s: float = LIMIT_S, exits: Collection[int] = (0,)
    ) -> Measurement:
        """Return how long a command takes once the caches are warm."""
        _, exit_code = run_process(command, self.environment)
        complaints = [f"imports {name}" for name in heavy_imports(command)]
        runs = [run_process(command, self.environment)[0] for _ in range(self.rounds)]
        return Measurement(
            subject=subject,
            took=medians(runs),
            limit_s=limit_s,
            complaints=tuple([f"exit code {exit_code}"] * (exit_code not in exits) + complaints),
        )


def measurements(stopwatch: Stopwatch) -> Iterator[Measurement]:
    """Yield the measurement of every verb that only looks, and of the two that look at every example."""
    yield stopwatch.of([sys.executable, "-c", LIBRARIES], "for scale: import typer, pydantic, yaml", inf)
    yield stopwatch.of([sys.executable, "-c", "import dmconfig"], "import dmconfig")
    yield stopwatch.of_command(["--version"], VALIDATE_LIMIT_S)
    for arguments in (
        ["config", EXAMPLE],
        ["explain", "max_memory"],
        ["explain", "DM202"],
        ["schema"],
        ["fix", "--check", EXAMPLE],
        ["plan", EXAMPLE, "--gpus", "24GiB", "--ram", "64GiB"],
    ):
        yield stopwatch.of_command(arguments)
    for example in sorted(str(file.relative_to(ROOT)) for file in (ROOT / "examples").glob("*.yaml")):
        yield stopwatch.of_command(["validate", example], VALIDATE_LIMIT_S)
        yield stopwatch.of_command(["plan", example], exits=PLANNED_OR_NOT)
    with tempfile.TemporaryDirectory() as folder:
        text = (ROOT / EXAMPLE).read_text(encoding="utf-8").replace("./digits", str(ROOT / "examples" / "digits"))
        files = [Path(folder, f"{number}.yaml") for number in range(MANY)]
        for file in files:
            file.write_text(text, encoding="utf-8")
        subject = f"dmconfig validate, {MANY} files"
        yield stopwatch.of_command(["validate", *map(str, files)], MANY_LIMIT_S, subject=subject)


def main() -> None:
    """Measure everything, print the table, and exit 1 when something is not as it should be."""
    parser = argparse.ArgumentParser(description="Time the start of dmconfig's commands.")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    width = min(shutil.get_terminal_size().columns - 40, 56)
    print(f"{'median of whole processes':<{width}}  {'wall s':>7}  {'cpu s':>6}  {'limit':>5}")
    is_fine = True
    with tempfile.TemporaryDirectory() as cache:
        for row in measurements(Stopwatch(environment=installed_environment(Path(cache)), rounds=rounds)):
            took = f"{row.took.clock_s:7.3f}  {row.took.processor_s:6.3f}"
            print(f"{row.subject:<{width}}  {took}  {row.limit_s:5.2f}  {row.verdict}")
            is_fine = is_fine and row.verdict == "ok"
    sys.exit(not is_fine)


if __name__ == "__main__":
    main()
