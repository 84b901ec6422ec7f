"""``mofa serve`` as a process: how it begins, and that nothing is left of it, however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import mofa
from mofa.cli.main import main
from mofa.serve.address import listening_socket
from mofa.serve.question import Question
from mofa.serve.served_job import ServedJob
from mofa.serve.server_process import run_server

pytest.importorskip("flask", reason="NOT TESTED: mofa serve, as flask is not installed (pip install 'mofa[serve]')")

COMMAND = ("serve", "llama3-70b", "h100-hgx", "--gpus", "512", "--no-browser", "--port", "0", "--jobs", "2")


@contextmanager
def server(temporary: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and where it is."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mofa", *COMMAND], stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job may ignore it
    )  # fmt: skip
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/", said)
        assert found is not None, said
        yield process, found[0]
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def ask(url: str, body: object) -> dict[str, object]:
    """The answer to a question."""
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as response:
        return dict(json.load(response))


def descendants(pid: int) -> list[int]:
    """Processes that a process started, and that these did."""
    pids = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            pids += [int(child), *descendants(int(child))]
    return pids


def runs(pid: int) -> bool:
    """Whether a process is still there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs the processes of Linux")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_an_ended_server_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    with server(tmp_path) as (process, url):
        ask(f"{url}report", {"gpus": 512})
        until = time.monotonic() + 30.0
        while not (workers := descendants(process.pid)):
            assert time.monotonic() < until, "no process searches behind the answer"
            time.sleep(0.05)
        os.kill(process.pid, number)  # to the server alone, as systemd and kill do
        assert process.wait(timeout=20) == (-number if number == signal.SIGKILL else 128 + number)
        until = time.monotonic() + 10.0
        while any(runs(pid) for pid in workers):
            assert time.monotonic() < until, "workers are left"
            time.sleep(0.05)
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert number == signal.SIGKILL or not list(tmp_path.iterdir())


def test_a_port_in_use_is_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with listening_socket("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "llama3-8b", "h100-hgx", "--gpus", "8", "--no-browser", "--port", port]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"--port {port}: is in use by another program" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--address", "0.0.0.0"), "other machines may reach it"),
        (("--port", "70000"), "must be at most 65535"),
        (("--fix", "tp=0"), "tp"), (("--max", "recompute=1"), "--max"), (("--with", "nonsense"), "nonsense"),
        (("--without", "nonsense"), "nonsense"), (("--memory-limit", "900GB"), "--memory-limit"),
        (("--gpus", "12"), "whole nodes"), (("--framework", "nonsense"), "nonsense"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_before(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "llama3-8b", "h100-hgx", "--gpus", "8", "--no-browser", "--port", "0", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error


def test_options_are_those_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server was started with stands in the command that writes its reports, sliders aside."""
    from mofa.serve import server_process

    served = []
    monkeypatch.setattr(server_process, "run_server", lambda job, start, listening, **rest: served.append((job, start)))
    arguments = "serve llama3-8b h100-hgx --nodes 2 --global-batch 256 --tokens 1T --fix tp=2,4 --fix pp=2 --max cp=2"
    more = "--with bf16_grads --without zbv --memory-limit 70GB --set framework.rank_order=tp-cp-ep-pp-dp --port 0"
    assert main([*arguments.split(), *more.split()]) == 0
    ((job, start),) = served
    assert start.gpus == 16 and start.memory_gb == 70.0 and start.degrees.given_degrees() == {"pp": 2}
    assert job.cluster.gpu.capacity_bytes.value > 80e9
    assert job.report_command(start) == (
        "mofa report llama3-8b h100-hgx --global-batch 256 --tokens 1T --fix tp=2,4 --max cp=2 --with bf16_grads "
        "--without zbv --set framework.rank_order=tp-cp-ep-pp-dp --gpus 16 --fix pp=2 --memory-limit 70GB "
        "--refine-seconds 0 --out report"
    )
    assert job.search_options(start)["fix"] == {"tp": (2, 4), "pp": 2}


def test_the_browser_check_says_that_it_did_not_run_without_a_browser(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "serve_in_browser.py"
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(script.parents[1])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.startswith("serve_in_browser: NOT RUN, ") and done.stderr == ""


def test_an_interrupted_server_ends_its_thread_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    machines = mofa.load_cluster("h100-hgx", 8)
    job = ServedJob(mofa.load_workload("llama3-8b"), machines, mofa.load_framework("megatron"))

    def interrupt(url: str) -> None:
        with urllib.request.urlopen(f"{url}first", timeout=60) as response:
            assert response.status == 200
        raise KeyboardInterrupt

    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            run_server(job, Question(gpus=8), listening_socket("127.0.0.1", 0), say=interrupt, open_browser=False)
    assert not raised
    assert "mofa-serve" not in {thread.name for thread in threading.enumerate()}


def test_the_first_answer_imports_hardly_anything() -> None:
    """A server has imported pandas and jinja2 before it says where it is; an answer would take half as long again."""
    program = """
import sys, mofa
from mofa.serve.answer import answer_at_once, import_ahead
from mofa.serve.question import Question
from mofa.serve.served_job import ServedJob
job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
served = ServedJob(job, machines, mofa.load_framework("megatron"), {"fix": {"tp": 2, "pp": 1, "cp": 1}})
import_ahead()
known = set(sys.modules)
assert answer_at_once(served, Question(gpus=8))["html"]
print(len(set(sys.modules) - known))
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(told) < 20
