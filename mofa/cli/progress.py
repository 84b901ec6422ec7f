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


@contextmanager
def progress_bar(title: str, *, enabled: bool = True) -> Iterator[ProgressCallback]:
    """Give a function of (done, total, what) that draws a bar once the work has taken longer than a second.

    Parameters
    ----------
    title
        What is being done, until a call says it closer.
    enabled
        Off, or where standard error is no terminal, nothing is drawn.
    """
    started = time.monotonic()
    bar: Progress | None = None
    enabled = enabled and sys.stderr.isatty()

    def report(done: int, total: int, what: str = "", /) -> None:
        nonlocal bar
        if not enabled or (bar is None and time.monotonic() - started < PATIENCE_S):
            return
        if bar is None:
            bar = _new_bar()
            bar.start()
            bar.add_task(title, total=total)
        bar.update(bar.task_ids[0], completed=done, total=total, description=what or title)

    try:
        yield report
    finally:
        if bar is not None:
            bar.stop()


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
