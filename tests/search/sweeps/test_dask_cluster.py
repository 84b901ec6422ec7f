"""``mofa.sweep(scheduler=...)`` on a Dask cluster of several processes, one of which is killed midway."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

import mofa
from mofa.errors import SpecError
from tests.search.sweeps.small_sweep import SMALL

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("distributed") is None,
        reason="NOT TESTED: sweeps on a Dask cluster, as Dask is not installed (pip install 'mofa[distributed]')",
    ),
    pytest.mark.filterwarnings("ignore"),  # of Dask and what it uses
]
START_S = 60.0
"""How long a scheduler may take to be there. [s]"""


@contextlib.contextmanager
def dask(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Dask's command line, ended at the end."""
    path = os.pathsep.join([str(Path(mofa.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a scheduler without workers."""
    file = tmp_path / "scheduler.json"
    options = ("--port", "0", "--host", "127.0.0.1", "--no-dashboard", "--scheduler-file", str(file))
    with dask("distributed.cli.dask_scheduler", *options) as process:
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError, ValueError, KeyError):
                place = json.loads(file.read_text())["address"]
                break
            assert process.poll() is None and time.monotonic() < end, "the scheduler did not start"
            time.sleep(0.05)
        yield place


def worker(address: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """A worker of one thread, which nothing starts again."""
    return dask("distributed.cli.dask_worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard")


def test_a_worker_that_is_killed_loses_no_point_and_repeats_none(address: str, tmp_path: Path) -> None:
    asked = {**SMALL, "gpus": [8, 16], "global_batch": [32, 64, 96, 128]}
    seen: list[int] = []
    with worker(address) as first, worker(address) as second, worker(address):

        def kill_midway(done: int, total: int) -> None:
            seen.append(done)
            if done == 2:
                first.send_signal(signal.SIGKILL)
            if done == 4:
                second.send_signal(signal.SIGKILL)

        table = mofa.sweep(asked, out=tmp_path / "out", scheduler=address, progress=kill_midway)
        assert first.wait() == second.wait() == -signal.SIGKILL
    assert seen == list(range(9))  # each point once
    assert len(table) == table["key"].nunique() == len(list((tmp_path / "out" / "points").iterdir())) == 8
    pd.testing.assert_frame_equal(table, mofa.sweep(asked))


def test_clusters_that_cannot_plan_are_one_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mofa.search.sweeps import dask_cluster

    monkeypatch.setattr(dask_cluster, "FIRST_WORKER_S", 0.1)
    with pytest.raises(SpecError, match="has no worker; start some by: dask worker tcp://"):
        mofa.sweep(SMALL, scheduler=address)
    monkeypatch.undo()
    with worker(address):
        monkeypatch.setattr(dask_cluster, "digest_of_code", lambda: str(os.getpid()))  # differs by process
        with pytest.raises(SpecError, match="has another mofa than this machine; install the same there"):
            mofa.sweep(SMALL, scheduler=address)
    monkeypatch.setattr(dask_cluster, "ANSWER_S", 1.0)
    for nowhere in ("tcp://127.0.0.1:1", "nonsense://x", ""):
        with pytest.raises(SpecError, match="--scheduler"):
            mofa.sweep(SMALL, scheduler=nowhere)
