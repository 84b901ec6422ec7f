"""A progress bar on standard error for work that takes longer than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE_S = 1.0


@contextmanager
def progress_bar(title: str, *, enabled: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Give a function of (done, total) that draws a bar once the work has taken longer than a second.

    Parameters
    ----------
    title
        What is being done.
    enabled
        Off, or where standard error is no terminal, nothing is drawn.
    """
    started = time.monotonic()
    bar: Progress | None = None
    enabled = enabled and sys.stderr.isatty()

    def report(done: int, total: int) -> None:
        nonlocal bar
        if not enabled or (bar is None and time.monotonic() - started < PATIENCE_S):
            return
        if bar is None:
            from rich.console import Console
            from rich.progress import Progress

            bar = Progress(console=Console(stderr=True), transient=True)
            bar.start()
            bar.add_task(title, total=total)
        bar.update(bar.task_ids[0], completed=done, total=total)

    try:
        yield report
    finally:
        if bar is not None:
            bar.stop()
