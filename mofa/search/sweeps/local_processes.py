"""Points on the cores of this machine, a process each; those of a process that died are tried again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool

from mofa.search.sweeps.plan_point import FAILED, Result, plan_point, result_without_plan
from mofa.search.sweeps.points import PointTask
from mofa.search.workers import WorkerProcesses

DIED = "its process was killed while it was planned, perhaps for want of memory; give --jobs fewer processes"


def plan_on_this_machine(tasks: Sequence[PointTask], jobs: int) -> Iterator[tuple[str, Result]]:
    """Keys and results of tasks, in the order in which they end.

    Parameters
    ----------
    tasks
        The points.
    jobs
        Processes in all; with one, or for one point, this process plans. [-]

    Yields
    ------
    str, Result
        Each task once. A process that dies takes others with it: theirs are tried again one by one, and a point that
        its process dies of by itself has failed.
    """
    if jobs == 1 or len(tasks) < 2:
        for task in tasks:
            yield task.key, plan_point(task, jobs)
        return
    waiting, suspects = deque(tasks), deque[PointTask]()
    while waiting or suspects:
        if suspects:
            suspect = suspects.popleft()
            died: list[PointTask] = []
            yield from _plan_in_pool(deque([suspect]), 1, died)
            if died:
                yield suspect.key, result_without_plan(FAILED, DIED, is_final=False)
        else:
            died = []
            yield from _plan_in_pool(waiting, min(jobs, len(waiting)), died)
            suspects.extend(died)


def _plan_in_pool(waiting: deque[PointTask], processes: int, died: list[PointTask]) -> Iterator[tuple[str, Result]]:
    """Results until none waits, or a process dies; what ran then is added to ``died``."""
    running: dict[Future[Result], PointTask] = {}
    with WorkerProcesses(processes + 1) as workers:  # this one hands out and writes
        workers.start_processes(("mofa.search.sweeps.plan_point", "mofa.search.entry_points"))
        while (waiting and not died) or running:
            while waiting and not died and len(running) < processes:
                task = waiting.popleft()
                try:
                    running[workers.submit(plan_point, task)] = task
                except BrokenProcessPool:
                    waiting.appendleft(task)
                    if not running:
                        died.append(waiting.popleft())
                    break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                task = running.pop(future)
                try:
                    result = future.result()
                except BrokenProcessPool:
                    died.append(task)
                    continue
                yield task.key, result
