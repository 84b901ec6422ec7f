"""What validation does over many runs, spread over processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import ParamSpec, TypeVar

from mofa.errors import SpecError
from mofa.search.workers import exit_when_parent_exits

Item = TypeVar("Item")
Result = TypeVar("Result")
Args = ParamSpec("Args")
BATCH = 4
"""Items for each process below which it takes longer to start than it saves. [-]"""


class RunProcesses:
    """So many processes, by default one a core, that are started when there is enough to do for two.

    Functions are a module's; they, what they are given and what they return are pickled. A process that dies is a
    ``SpecError`` that says so.

    Examples
    --------
    >>> with RunProcesses(1) as processes:
    ...     list(processes.map(abs, [-1, 2])), processes.submit(max, 3, 4)()
    ([1, 2], 4)
    """

    def __init__(self, processes: int | None = None) -> None:
        self.processes = processes or os.cpu_count() or 1
        self._pool: ProcessPoolExecutor | None = None
        self._others: set[BaseProcess] = set()

    def __enter__(self) -> RunProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            if kind is not None:  # what they do is wanted no more
                for process in set(multiprocessing.active_children()) - self._others:
                    process.terminate()
            self._pool.shutdown(wait=True, cancel_futures=kind is not None)
            self._pool = None

    def map(self, function: Callable[[Item], Result], items: Sequence[Item], *, chunk: int = 1) -> Iterable[Result]:
        """Results in the order of the items, begun at once; here and one by one where the items are few."""
        if min(self.processes, len(items) // BATCH) < 2:
            return map(function, items)
        if self._pool is None:
            self._others = set(multiprocessing.active_children())
            self._pool = ProcessPoolExecutor(min(self.processes, len(items)), initializer=_begin)
        with _deaths_told():
            results = self._pool.map(function, items, chunksize=chunk)
        return _results(results)

    def submit(self, function: Callable[Args, Result], *args: Args.args, **more: Args.kwargs) -> Callable[[], Result]:
        """What gives a function's result: begun at once where there are processes already, else when asked."""
        if self._pool is None:
            return lambda: function(*args, **more)
        with _deaths_told():
            future = self._pool.submit(function, *args, **more)

        def result() -> Result:
            with _deaths_told():
                return future.result()

        return result


def _begin() -> None:
    """Ctrl-C is the first process's to answer; other signals end this one at once, as does that process's end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("SIGTERM", "SIGHUP"):
        if (number := getattr(signal, name, None)) is not None:
            signal.signal(number, signal.SIG_DFL)
    exit_when_parent_exits()


def _results(results: Iterator[Result]) -> Iterator[Result]:
    with _deaths_told():
        yield from results


@contextmanager
def _deaths_told() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise SpecError(
            "a process that predicts runs was ended from outside, as the system does where memory is short; "
            "try fewer --processes"
        ) from None
