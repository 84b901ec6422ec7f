"""``mofa trace``: a file that is whole, and errors in one line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.cli.conftest import Cli
from tests.replay.importer import imported

JOB = ("llama3-8b", "h100-hgx", "--gpus", "8", "--global-batch", "16")


def test_trace_of_options(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    done = cli("trace", *JOB, "--strategy", "tp=2 pp=4 micro_batch=1", "--ranks", "0,3", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "2 of 4 pipeline ranks; every computation of 16 micro-batches, every op of the first 2" in done.stderr
    assert list(tmp_path.iterdir()) == [out]
    trace = json.loads(out.read_text())
    assert not +imported(out.read_text()).stats  # as Perfetto reads the file
    kinds = Counter(event["ph"] for event in trace["traceEvents"])
    assert kinds["X"] > 100
    assert kinds["C"] > 10
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 3}
    # allocated never above reserved
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    allocated = [e["args"]["bytes"] for e in counters if e["name"] == "allocated"]
    reserved = [e["args"]["bytes"] for e in counters if e["name"] == "reserved"]
    assert all(a <= r for a, r in zip(allocated, reserved, strict=True))


def test_errors_are_a_line(cli: Cli, tmp_path: Path) -> None:
    out = str(tmp_path / "trace.json")
    for words, says in (
        ((*JOB, "--strategy", "tp=2 pp=4", "--ranks", "4"), "--ranks: 4 is outside 0 to 3"),
        ((*JOB, "--strategy", "tp=2 pp=4", "--ranks", "a"), "no list of numbers"),
        ((*JOB, "--strategy", "tp=2 pp=4", "--run", "first"), "llama3-8b is a workload"),
        ((*JOB, "--strategy", "tp=2 pp=4 vpp=64"), "strategy:"),
        (JOB, "--strategy: is missing"),
    ):
        done = cli("trace", *words, "--out", out)
        assert done.returncode == 2
        assert says in done.stderr
        assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
    done = cli("trace", *JOB, "--strategy", "tp=8", "--out", str(tmp_path / "no" / "trace.json"))
    assert done.returncode == 2
    assert "does not exist" in done.stderr


def test_more_micro_batches_than_a_step_has_are_all_of_them(cli: Cli, tmp_path: Path) -> None:
    """A count without bound was looped over."""
    out, number = tmp_path / "trace.json", "9" * 30
    done = cli("trace", *JOB, "--strategy", "tp=4 pp=2", "--micro-batches", number, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "every op of the first 16" in done.stderr
