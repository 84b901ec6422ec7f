"""Worker processes that share tasks with this one.

How to use it::

    with WorkerProcesses(jobs) as workers:          # jobs: processes in all, this one counted; 1 starts none
        workers.start()                     # optional: let them import while this process does something else
        for result in workers.map(function, tasks):
            ...                             # in the order of the tasks, whoever did them

``function`` is defined in a module, or a ``functools.partial`` of such. It, its tasks and results are pickled: pass
facts and return numbers, not estimators. It must give the same result in every process. What many tasks need is made in
the function and kept by ``lru_cache``.

This process works as well: it starts with the last task, the others with the first. So nothing waits for processes to
start, and short work is done before they have.

Processes are spawned, never forked from one that may have threads. A script that asks for more than one must therefore
guard its code by ``if __name__ == "__main__"``. An error of a task is raised here. Any exception, Ctrl-C among them,
ends the processes. The tasks of one that dies, perhaps out of memory, are done here.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from mofa.errors import SpecError

if TYPE_CHECKING:  # one process needs none of these
    from concurrent.futures import Future, ProcessPoolExecutor
    from multiprocessing.process import BaseProcess

Task = TypeVar("Task")
Result = TypeVar("Result")

MOST = 4
"""Default number of processes: each takes some 150 MiB. [-]"""

TASKS_AHEAD = 2
"""Tasks given to another process at once: one runs and one waits, while many are open. [-]"""


def usable_cores(most: int = MOST) -> int:
    """The cores that this process may use, up to a number. [-]"""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, most))


class WorkerProcesses:
    """A number of processes, this one counted.

    Examples
    --------
    >>> with WorkerProcesses(1) as workers:
    ...     list(workers.map(abs, [-1, 2, -3]))
    [1, 2, 3]
    """

    def __init__(self, jobs: int = 1) -> None:
        if type(jobs) is not int or jobs < 1:
            raise SpecError(f"jobs ({jobs!r}) must be a whole number of at least 1; correct it")
        self.jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._processes: list[BaseProcess] = []
        self._asked = False

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        if kind is not None or not self._asked:  # which may not be up yet
            for process in self._processes:
                process.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None

    def start_processes(self, modules: Sequence[str] = ()) -> None:
        """Start the processes without waiting for them; they import the modules that were named."""
        if self.jobs == 1 or self._pool is not None:
            return
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        before = set(multiprocessing.active_children())
        self._pool = ProcessPoolExecutor(
            self.jobs - 1, mp_context=multiprocessing.get_context("spawn"), initializer=_begin
        )
        for _ in range(self.jobs - 1):  # a process each, as none is up before the last one is asked for
            self._pool.submit(_load, tuple(modules))
        self._processes = [child for child in multiprocessing.active_children() if child not in before]

    def map(
        self, function: Callable[[Task], Result], tasks: Sequence[Task],
        local: Callable[[Task], Result] | None = None,
    ) -> Iterator[Result]:  # fmt: skip
        """Results of a function for all tasks, in the tasks' order.

        Parameters
        ----------
        function
            The function that other processes call.
        tasks
            Its arguments, one each.
        local
            The function that this process calls instead, with the same results; it may report progress.

        Raises
        ------
        Exception
            The error of the first task, in their order, that raised one.
        """
        own_function = local or function
        if self.jobs == 1 or len(tasks) < 2:
            yield from map(own_function, tasks)
            return
        self.start_processes()
        shared = _Shared(self.submit, function, tasks, self.jobs - 1)
        for i in range(len(tasks)):
            while not shared.known(i) and (n := shared.taken()) >= 0:
                shared.futures[n] = _done(own_function, tasks[n])
            yield _result(shared.futures[i], own_function, tasks[i])

    def submit(self, function: Callable[[Task], Result], task: Task) -> Future[Result]:
        """Give a task to another process."""
        assert self._pool is not None
        self._asked = True
        return self._pool.submit(function, task)


class _Shared(Generic[Task, Result]):
    """Tasks shared between processes: this one takes the last open task, others get the first whenever they are done.

    While many are open, each other process has a waiting task too. The last tasks go to whichever process is free.
    """

    def __init__(
        self, submit: Callable[[Callable[[Task], Result], Task], Future[Result]], function: Callable[[Task], Result],
        tasks: Sequence[Task], others: int,
    ) -> None:  # fmt: skip
        self.submit, self.function, self.tasks, self.others = submit, function, tasks, others
        self.futures: dict[int, Future[Result]] = {}
        self.open = deque(range(len(tasks)))
        self.away = 0
        self.lock = threading.RLock()  # what is done at once calls back at once
        self.feed()

    def known(self, i: int) -> bool:
        """Whether a task is done."""
        return i in self.futures and self.futures[i].done()

    def taken(self) -> int:
        """The task that this process does next; -1 for none."""
        with self.lock:
            return self.open.pop() if self.open else -1

    def feed(self) -> None:
        """Give tasks to the other processes, as many as they can take."""
        from concurrent.futures.process import BrokenProcessPool

        with self.lock:
            while self.open and self.away < self.others * (
                TASKS_AHEAD if len(self.open) > TASKS_AHEAD * self.others else 1
            ):
                try:
                    future = self.submit(self.function, self.tasks[self.open[0]])
                except (BrokenProcessPool, RuntimeError):  # dead, or ended with this process
                    return
                self.away += 1
                self.futures[self.open.popleft()] = future
                future.add_done_callback(self.back)

    def back(self, future: Future[Result]) -> None:
        """Handle the end of a task that another process had, or that process's death."""
        from concurrent.futures.process import BrokenProcessPool

        with self.lock:
            self.away -= 1
        if not future.cancelled() and not isinstance(future.exception(), BrokenProcessPool):
            self.feed()


def _done(function: Callable[[Task], Result], task: Task) -> Future[Result]:
    """The outcome of a task done here; an error is raised at the task's turn."""
    from concurrent.futures import Future

    future: Future[Result] = Future()
    try:
        future.set_result(function(task))
    except Exception as error:
        future.set_exception(error)
    return future


def _result(future: Future[Result], function: Callable[[Task], Result], task: Task) -> Result:
    from concurrent.futures.process import BrokenProcessPool

    try:
        return future.result()
    except BrokenProcessPool:
        return function(task)


def _load(modules: Sequence[str]) -> None:
    """In a worker process: import the modules that will be needed."""
    for name in modules:
        importlib.import_module(name)


def _begin() -> None:
    """In a worker process: end quietly at Ctrl-C, which reaches all of them, or when the parent process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    exit_when_parent_exits()


def exit_when_parent_exits() -> None:
    """In a worker process: end as soon as the process that started it is gone, however that ended."""
    import multiprocessing
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
