"""A progress bar on standard error for work that takes longer than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE_S = 1.0


class ProgressCallback(Protocol):
    """Called with what is done, of how much, and, where it changes, what is being done."""

    def __call__(self, done: int, total: int, what: str = "", /) -> None: ...


class ProgressBar:
    """A bar on standard error that appears once the work has taken longer than a second."""

    def __init__(self, title: str, enabled: bool) -> None:
        self.title, self.enabled = title, enabled and sys.stderr.isatty()
        self.started = time.monotonic()
        self.bar: Progress | None = None

    def __call__(self, done: int, total: int, what: str = "", /) -> None:
        """Draw how much is done."""
        if not self.enabled or (self.bar is None and time.monotonic() - self.started < PATIENCE_S):
            return
        if self.bar is None:
            self.bar = _new_bar()
            self.bar.start()
            self.bar.add_task(self.title, total=total)
        task = self.bar.tasks[0]
        if what and task.description != what:  # another piece of work: its time left is its own
            self.bar.reset(task.id, total=total, description=what)
        self.bar.update(task.id, completed=done, total=total, description=what or self.title)

    def print_above_bar(self, text: str) -> None:
        """Print a line above the bar; nothing where no bar may be drawn."""
        if not self.enabled:
            return
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr)


@contextmanager
def progress_bar(title: str, *, enabled: bool = True) -> Iterator[ProgressBar]:
    """Give a function of (done, total, what) that draws a bar once the work has taken longer than a second.

    Parameters
    ----------
    title
        What is being done, until a call says it closer.
    enabled
        Off, or where standard error is no terminal, nothing is drawn.
    """
    report = ProgressBar(title, enabled)
    try:
        yield report
    finally:
        if report.bar is not None:
            report.bar.stop()


def _new_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)
