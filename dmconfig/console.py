"""What the command line shows while it works: a bar on a terminal, quiet lines otherwise, and how long things took."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console

Item = TypeVar("Item")

WIDE = 240
"""Columns of a console that is no terminal: wide enough that no line is broken for a tool that reads it."""


def make_console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr: the terminal's own width, or wide and plain when it is none."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=WIDE, color_system=None)


class ConsoleProgress:
    """Progress on stderr. ``seconds`` holds how long each phase took, in order."""

    def __init__(self) -> None:
        self.console = make_console(stderr=True)
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase and, without a terminal, say that it begins."""
        if not self.console.is_terminal:
            self.console.print(f"{name} ...")
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def track(self, phase: str, items: Sequence[Item], label: Callable[[Item], str]) -> Iterator[Item]:
        """Yield items; a bar names the one being worked on, or a line does where there is no terminal."""
        if not self.console.is_terminal:
            for item in items:
                self.console.print(f"  {phase} {label(item)}")
                yield item
            return
        from rich.progress import Progress as Bar

        with Bar(console=self.console, transient=True) as bar:
            task = bar.add_task(phase, total=len(items))
            for item in items:
                bar.update(task, description=f"{phase} {label(item)}")
                yield item
                bar.advance(task)

    def transfer(
        self, phase: str, items: Sequence[Item], label: Callable[[Item], str], arrived: Callable[[], int], total: int
    ) -> Iterator[Item]:
        """Yield items; one bar shows the bytes of all of them, or a line names each where there is no terminal."""
        if not self.console.is_terminal:
            yield from self.track(phase, items, label)
            return
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(phase, total=total)
            with _every_moment(lambda: bar.update(task, completed=arrived())):
                for item in items:
                    bar.update(task, description=f"{phase} {label(item)}")
                    yield item

    def timings(self) -> str:
        """Return the phases and their times on one line."""
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())


@contextlib.contextmanager
def _every_moment(look: Callable[[], None], seconds: float = 0.2) -> Iterator[None]:
    """Call look again and again, in a thread of its own, for the length of a block, and once at its end."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(seconds):
            look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        look()
