"""Starting the ranks of runs on this machine's GPUs, side by side where they fit, and gathering what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mofa.errors import SpecError

POLL_S = 0.1
GRACE_S = 5.0
"""After one rank has failed, how long the others get to fail or finish by themselves."""


@dataclass(frozen=True)
class RunTask:
    """One run to start: its runner, what it is told, and for how long it may run."""

    id: str
    module: str
    num_gpus: int
    job: Mapping[str, Any]
    environment: Mapping[str, str]
    timeout_s: float


@dataclass(frozen=True)
class TaskOutcome:
    """What the ranks of a task left: their results, or the line that says why there are none."""

    task: RunTask
    ranks: list[dict[str, Any]]
    error: str | None
    gpus: tuple[int, ...]
    side_by_side: bool
    folder: Path


@dataclass
class _Started:
    task: RunTask
    folder: Path
    processes: list[subprocess.Popen[bytes]]
    gpus: tuple[int, ...] = ()
    deadline: float = float("inf")
    failed_at: float | None = None
    company: bool = False
    logs: list[Any] = field(default_factory=list)


def next_task_and_gpus(waiting: list[RunTask], free: list[int], alone: bool) -> tuple[RunTask, tuple[int, ...]] | None:
    """The next task and its GPUs: the first that fits the free ones, None where none does.

    >>> next_task_and_gpus([], [0], alone=True) is None
    True
    """
    if alone and waiting:
        waiting = waiting[:1]
    for task in waiting:
        if task.num_gpus <= len(free):
            return task, tuple(free[: task.num_gpus])
    return None


def _free_port() -> int:
    """A port below those that the system hands out by itself, so that none is taken between here and its use."""
    for port in random.SystemRandom().sample(range(15_000, 30_000), k=100):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise SpecError("mofa measure: no free port between 15000 and 30000; end what uses them")


def _start(task: RunTask, folder: Path) -> _Started:
    """Start every rank; each imports its framework and waits for the word."""
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job.json"
    job.write_text(json.dumps(task.job))
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(task.num_gpus),
        "LOCAL_WORLD_SIZE": str(task.num_gpus),
        "PYTHONUNBUFFERED": "1",
        **task.environment,
    }
    started = _Started(task, folder, [])
    for rank in range(task.num_gpus):
        log = (folder / f"rank{rank}.log").open("wb")
        started.logs.append(log)
        started.processes.append(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", task.module, str(job), str(folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**shared, "RANK": str(rank)},
                start_new_session=True,
            )
        )
    return started


def _go(started: _Started, gpus: tuple[int, ...]) -> None:
    started.gpus = gpus
    started.deadline = time.monotonic() + started.task.timeout_s
    port = _free_port()
    for process, gpu in zip(started.processes, gpus, strict=True):
        assert process.stdin is not None
        try:
            process.stdin.write(f"go {gpu} {port}\n".encode())
            process.stdin.close()
        except BrokenPipeError:
            continue


def _stop(started: _Started) -> None:
    for process in started.processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
    for log in started.logs:
        log.close()


def _results(started: _Started) -> list[dict[str, Any]]:
    paths = (started.folder / f"rank{rank}.json" for rank in range(started.task.num_gpus))
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def _done(started: _Started) -> str | None:
    """None while a task runs, else '' or why it was cut short."""
    now = time.monotonic()
    if all(p.poll() is not None for p in started.processes):
        return ""
    if now > started.deadline:
        return f"no end after {started.task.timeout_s:.0f} s"
    failed = any(p.poll() not in (None, 0) for p in started.processes)
    failed = failed or any(r["outcome"] != "ok" for r in _results(started))
    if failed and started.failed_at is None:
        started.failed_at = now
    if started.failed_at is not None and now > started.failed_at + GRACE_S:
        return ""
    return None


def _outcome(started: _Started, cut: str) -> TaskOutcome:
    ranks = _results(started)
    out_of_memory = any(r["outcome"] == "oom" for r in ranks)
    error: str | None = None
    if not out_of_memory and (len(ranks) < started.task.num_gpus or any(r["outcome"] != "ok" for r in ranks)):
        said = [r["error"] for r in ranks if r.get("error") and r["outcome"] != "ok"]
        error = cut or (said[0] if said else _last_line(started.folder))
    return TaskOutcome(started.task, ranks, error, started.gpus, started.company, started.folder)


def _last_line(folder: Path) -> str:
    lines = [
        line
        for log in sorted(folder.glob("rank*.log"))
        for line in log.read_text(errors="replace").splitlines()
        if "Error" in line
    ]
    return lines[-1].strip()[:300] if lines else "a rank ended without a word"


def run_tasks(
    tasks: list[RunTask], gpus: list[int], folder: Path, *, parallel: bool, progress: Callable[[str], None]
) -> Generator[TaskOutcome, None, None]:
    """Run tasks, one at a time or side by side on disjoint GPUs, and yield each as it ends.

    The next task's processes are started early: they import while another is measured and touch no GPU before the
    word. Larger tasks go first, so that the small ones fill what is left.
    """
    waiting = sorted(tasks, key=lambda task: -task.num_gpus) if parallel else list(tasks)
    ready: dict[str, _Started] = {}
    running: list[_Started] = []
    free = list(gpus)
    ahead = len(gpus) if parallel else 1
    try:
        while waiting or running:
            for task in waiting[:ahead]:
                if task.id not in ready:
                    ready[task.id] = _start(task, folder / task.id)
            while (parallel or not running) and (turn := next_task_and_gpus(waiting, free, alone=not parallel)):
                task, taken = turn
                waiting.remove(task)
                if task.id not in ready:
                    ready[task.id] = _start(task, folder / task.id)
                started = ready.pop(task.id)
                free = [g for g in free if g not in taken]
                _go(started, taken)
                running.append(started)
                for beside in running if len(running) > 1 else ():
                    beside.company = True
                progress(f"{task.id}: started on {len(taken)} GPU{'s' * (len(taken) > 1)}")
            for started in list(running):
                if (cut := _done(started)) is not None:
                    _stop(started)
                    running.remove(started)
                    free = sorted([*free, *started.gpus])
                    yield _outcome(started, cut)
            time.sleep(POLL_S)
    finally:
        for started in [*running, *ready.values()]:
            _stop(started)
