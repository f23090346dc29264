"""Time what people wait for before anything loads: each verb that only looks, as a whole process, and the import.

Every run is a process of its own, so that start-up counts, with compiled modules, as an installed package has them.
Each command is run once to warm the caches, then ``--rounds`` times, all of them in turn. The median of the wall time
counts; where a machine is shared, that says little, so a command is also fine when the median of its processor time is
below the limit. One more run tells whether a heavy package was imported. ``validate`` of 100 files in one run has a
limit of its own.
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
class Subject:
    """A command that is timed: what it is called, its limit, and how it may end."""

    name: str
    command: Sequence[str]
    limit_s: float
    exits: Collection[int] = (0,)

    def complaints(self, environment: Mapping[str, str]) -> list[str]:
        """Return what is wrong with it beside the time it takes. The run fills the caches."""
        _, exit_code = run_process(self.command, environment)
        wrong_end = [] if exit_code in self.exits else [f"exit code {exit_code}"]
        return wrong_end + [f"imports {name}" for name in heavy_imports(self.command)]

    def verdict(self, took: Took, complaints: Sequence[str]) -> str:
        """Return ``ok``, or everything that is wrong."""
        slow = [] if min(took.clock_s, took.processor_s) < self.limit_s else ["too slow"]
        return ", ".join([*complaints, *slow]) or "ok"


def verb(
    arguments: Sequence[str], limit_s: float = LIMIT_S, *, name: str = "", exits: Collection[int] = (0,)
) -> Subject:
    """Return ``dmconfig ARGUMENTS`` as what is timed."""
    name = name or f"dmconfig {' '.join(arguments)}"
    return Subject(name=name, command=[*DMCONFIG, *arguments], limit_s=limit_s, exits=exits)


def subjects(folder: Path) -> Iterator[Subject]:
    """Yield every verb that only looks, and the two that look at every example; folder is for files of ours."""
    yield Subject(
        name="for scale: import typer, pydantic, yaml", command=[sys.executable, "-c", LIBRARIES], limit_s=inf
    )
    yield Subject(name="import dmconfig", command=[sys.executable, "-c", "import dmconfig"], limit_s=LIMIT_S)
    yield verb(["--version"], VALIDATE_LIMIT_S)
    yield verb(["config", EXAMPLE])
    yield verb(["explain", "max_memory"])
    yield verb(["explain", "DM202"])
    yield verb(["schema"])
    yield verb(["fix", "--check", EXAMPLE])
    yield verb(["plan", EXAMPLE, "--gpus", "24GiB", "--ram", "64GiB"])
    for example in sorted(str(file.relative_to(ROOT)) for file in (ROOT / "examples").glob("*.yaml")):
        yield verb(["validate", example], VALIDATE_LIMIT_S)
        yield verb(["plan", example], exits=PLANNED_OR_NOT)
    text = (ROOT / EXAMPLE).read_text(encoding="utf-8").replace("./digits", str(ROOT / "examples" / "digits"))
    files = [folder / f"{number}.yaml" for number in range(MANY)]
    for file in files:
        file.write_text(text, encoding="utf-8")
    yield verb(["validate", *map(str, files)], MANY_LIMIT_S, name=f"dmconfig validate, {MANY} files")


def main() -> None:
    """Measure everything, print the table, and exit 1 when something is not as it should be."""
    parser = argparse.ArgumentParser(description="Time the start of dmconfig's commands.")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    width = min(shutil.get_terminal_size().columns - 40, 56)
    print(f"{'median of whole processes':<{width}}  {'wall s':>7}  {'cpu s':>6}  {'limit':>5}")
    is_fine = True
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as folder:
        environment = installed_environment(Path(cache))
        timed = [*subjects(Path(folder))]
        complaints = [subject.complaints(environment) for subject in timed]
        # in turn, so that a moment in which the machine is slow falls on none alone
        runs = [[run_process(subject.command, environment)[0] for subject in timed] for _ in range(rounds)]
        for subject, wrong, each in zip(timed, complaints, zip(*runs, strict=True), strict=True):
            took = medians(each)
            verdict = subject.verdict(took, wrong)
            figures = f"{took.clock_s:7.3f}  {took.processor_s:6.3f}  {subject.limit_s:5.2f}"
            print(f"{subject.name:<{width}}  {figures}  {verdict}")
            is_fine = is_fine and verdict == "ok"
    sys.exit(not is_fine)


if __name__ == "__main__":
    main()
