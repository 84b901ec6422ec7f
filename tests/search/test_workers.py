"""Processes that share work: the same results, errors and interruptions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mofa.errors import SpecError
from mofa.search.workers import WorkerProcesses, usable_cores


def _square(x: int) -> tuple[int, int]:
    time.sleep(0.02)
    return x * x, os.getpid()


def _fail_from_three(x: int) -> int:
    if x >= 3:
        raise SpecError(f"here: {x}; do this")
    return x


def _die_elsewhere(task: tuple[int, int]) -> int:
    number, home = task
    if os.getpid() != home:
        os._exit(1)
    return number


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_results_come_in_order(jobs: int) -> None:
    with WorkerProcesses(jobs) as workers:
        found = list(workers.map(_square, range(200)))
        again = list(workers.map(_square, range(3)))
    assert [x for x, _ in found] == [x * x for x in range(200)]
    assert [x for x, _ in again] == [0, 1, 4]
    pids = {pid for _, pid in found}
    assert os.getpid() in pids
    assert len(pids) == jobs or (jobs > 1 and 1 < len(pids) <= jobs)


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_is_the_same_one_line(jobs: int) -> None:
    with WorkerProcesses(jobs) as workers, pytest.raises(SpecError, match=r"^here: 3; do this$"):
        list(workers.map(_fail_from_three, range(30)))


def test_what_a_dead_process_leaves_is_done_here() -> None:
    with WorkerProcesses(2) as workers:
        workers.start_processes()
        time.sleep(1.0)  # so that it is up and takes the first tasks
        assert list(workers.map(_die_elsewhere, [(i, os.getpid()) for i in range(20)])) == list(range(20))


def test_cores() -> None:
    assert 1 <= usable_cores() <= 4
    assert usable_cores(1) == 1


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_interruption_ends_all(tmp_path: Path) -> None:
    """Ctrl-C reaches the whole group: no process is left, none prints anything of its own."""
    script = tmp_path / "busy.py"
    script.write_text(
        "import os, time\n"
        "from mofa.search.workers import WorkerProcesses\n"
        "def nap(x):\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    try:\n"
        "        with WorkerProcesses(2) as workers:\n"
        "            list(workers.map(nap, range(8)))\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    pids = {int(process.stdout.readline()) for _ in range(2)}
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=30)
    assert out.strip() == "interrupted"
    assert "Traceback" not in error
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_is_done_here_may_be_done_by_another_function(jobs: int) -> None:
    mine: list[int] = []

    def here(x: int) -> tuple[int, int]:
        mine.append(x)
        return x * x, os.getpid()

    with WorkerProcesses(jobs) as workers:
        found = list(workers.map(_square, range(50), local=here))
    assert [x for x, _ in found] == [x * x for x in range(50)]
    assert sorted(mine) == [i for i, (_, pid) in enumerate(found) if pid == os.getpid()]
    assert len(mine) > 0


def test_processes_that_were_asked_for_nothing_are_not_waited_for() -> None:
    with WorkerProcesses(2) as workers:
        workers.start_processes(["mofa.search.entry_points", "mofa.replay.replayer"])
        [process] = workers._processes
    assert not process.is_alive()
    assert process.exitcode != 0  # ended, not run to its end
