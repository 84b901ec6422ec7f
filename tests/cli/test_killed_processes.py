"""Processes that are killed or interrupted: no worker is left, and ends are clean and silent."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def test_killed_validation_leaves_no_worker(tmp_path: Path) -> None:
    code = (
        "import multiprocessing, time\n"
        "from mofa.validate.run_processes import RunProcesses\n"
        "with RunProcesses(2) as processes:\n"
        "    asked = processes.map(time.sleep, [300.0] * 8)\n"
        "    time.sleep(0.3)\n"
        "    print(*(p.pid for p in multiprocessing.active_children()), flush=True)\n"
        "    list(asked)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert children
    until = time.monotonic() + 10.0
    while any(_runs(pid) for pid in children):
        assert time.monotonic() < until, "workers are left"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_signals_while_modules_are_imported_are_silent(number: signal.Signals) -> None:
    """A module that mofa imports stands for the half second that imports take."""
    code = (
        "import os, sys, signal\n"
        "sys.argv = ['mofa', '--help']\n"
        "import mofa.cli\n"
        f"os.kill(os.getpid(), {int(number)})\n"
        "import time; time.sleep(5)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=20,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a job in the background may ignore it
    )  # fmt: skip
    assert run.stdout + run.stderr == ""
    assert run.returncode in (130, -number)


def test_ctrl_c_behind_a_search_for_layouts_unwinds() -> None:
    """CP-SAT catches Ctrl-C while it solves, and leaves the system's own answer to it: an end without cleaning up."""
    code = (
        "import os, signal, mofa\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may ignore it\n"
        "job, machines = mofa.load_workload('llama3-8b'), mofa.load_cluster('h100-hgx', 8)\n"
        "mofa.find_layout(job, machines, 'tp=2 pp=4 recompute=full', replay=False, work=0.01)\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    signal.pause()\n"
        "except KeyboardInterrupt:\n"
        "    print('unwound')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "unwound\n"), ran.stderr


def test_the_next_run_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    """A process that is killed before it renames its file; files of others, and of one that runs, stay."""
    code = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from mofa.specs import write_files\n"
        "write_files._rename = lambda staged: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"write_files.write_file_atomically(Path({str(tmp_path / 'a.json')!r}), b'1')\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    space = left.name.split("-")[2]
    names = (f".mofa-1-{space}-0.tmp", ".mofa-999999999-00000000-0.tmp", ".mofa-1.tmp")
    others = [tmp_path / name for name in names]
    for other in others:
        other.write_bytes(b"2")
    link = left.with_name(left.name.replace("-0.tmp", "-7.tmp"))
    link.symlink_to(others[0])
    again = code.replace("write_files._rename = lambda staged: os.kill(os.getpid(), signal.SIGKILL)\n", "")
    subprocess.run([sys.executable, "-c", again], check=True)
    assert sorted(tmp_path.iterdir()) == sorted([*others, link, tmp_path / "a.json"])
