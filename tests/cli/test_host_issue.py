"""``--host-issue``: the pace of the host that a step is predicted on, as a measured record's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mofa
from mofa.validate.reference import measured_reference_runs
from tests.cli.conftest import Cli

RECORD = Path(__file__).parents[2] / "reference_runs" / "measured" / "tt1-qwen06b-host-bound.yaml"
JOB = ("llama3-8b", "h100-hgx", "--gpus", "8")
ESTIMATE = ("estimate", *JOB, "--strategy", "tp=2 micro_batch=1", "--no-replay", "--json")


def told(cli: Cli, *arguments: str) -> dict[str, Any]:
    done = cli(*arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_it_is_the_pace_of_the_cluster_s_host(cli: Cli) -> None:
    plan = told(cli, *ESTIMATE, "--host-issue", "40us", "--framework", "torchtitan")
    cluster = mofa.load_cluster("h100-hgx", 8).with_host_speed(40e-6)
    framework = mofa.load_framework("torchtitan")
    own = mofa.estimate(
        mofa.load_workload("llama3-8b"), cluster, "tp=2 micro_batch=1", framework=framework, replay=False
    )
    assert plan["step_s"] == pytest.approx(own.step_s, rel=1e-12)
    assert plan["time"]["exposed"]["host_idle"] > 0
    assert plan["band"]["hosts_s"] is None


def test_it_narrows_the_band(cli: Cli) -> None:
    typical = told(cli, *ESTIMATE, "--framework", "torchtitan")
    curves = mofa.load_cluster("h100-hgx", 8).gpu.curves
    assert curves.hosts is not None
    own_us = curves.hosts.fast.value * curves.host.eager_op_s.value * 1e6
    known = told(cli, *ESTIMATE, "--framework", "torchtitan", "--host-issue", f"{own_us} us")
    assert known["step_s"] == pytest.approx(typical["step_s"])
    low, high = typical["step_s_band"]
    known_low, known_high = known["step_s_band"]
    assert low * (1.0 - 1e-9) <= known_low and known_high <= high * (1.0 + 1e-9)  # the fast host is the known one


def test_a_record_s_host_is_replaced(cli: Cli, tmp_path: Path) -> None:
    """Its own pace, given again, changes nothing but what the notes say of it."""
    folder = tmp_path / "measured"
    folder.mkdir()
    (folder / RECORD.name).write_bytes(RECORD.read_bytes())
    (tmp_path / "hosts.yaml").write_bytes((RECORD.parents[1] / "hosts.yaml").read_bytes())
    (reference,), _ = measured_reference_runs(folder, tmp_path)
    assert reference.host_op_s is not None
    own = told(cli, "estimate", str(folder / RECORD.name), "--no-replay", "--json")
    said = ("estimate", str(folder / RECORD.name), "--no-replay", "--json", "--host-issue")
    again = told(cli, *said, f"{reference.host_op_s * 1e6!r} us")
    slow = told(cli, *said, f"{reference.host_op_s * 2e6!r} us")
    assert again["step_s"] == pytest.approx(own["step_s"], rel=1e-9)
    assert slow["step_s"] > 1.5 * own["step_s"]
    assert "as --host-issue says" in again["notes"][0] and "as --host-issue says" not in own["notes"][0]


def test_plans_and_traces_take_it(cli: Cli, tmp_path: Path) -> None:
    plan = told(cli, "plan", *JOB, "--fix", "tp=2 micro_batch=1 cp=1 pp=1 recompute=none", "--top", "1", "--no-replay",
                "--framework", "torchtitan", "--host-issue", "100us", "--json")["plans"]  # fmt: skip
    assert plan == [] or plan[0]["band"]["hosts_s"] is None
    steps = []
    for pace in ("5us", "200us"):
        out = tmp_path / f"{pace}.json"
        done = cli("trace", *JOB, "--global-batch", "8", "--strategy", "tp=2 micro_batch=1", "--host-issue", pace,
                   "--out", str(out))  # fmt: skip
        assert done.returncode == 0, done.stderr
        steps.append(json.loads(out.read_text())["otherData"]["step_s"])
    assert steps[1] > 1.1 * steps[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("6.6", "has no unit"), ("fast", "is no quantity"), ("", "is no quantity"), ("0us", "is no time of one small"),
        ("-3us", "is no time of one small op"), ("5s", "0.1 us to 1 ms"), ("6 GB", "is no unit"),
        ("nan", "is no quantity"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", [ESTIMATE, ("plan", *JOB), ("trace", *JOB, "--strategy", "tp=8", "--out", "x")])
def test_what_is_no_pace_is_one_line_and_status_2(cli: Cli, command: tuple[str, ...], text: str, says: str) -> None:
    done = cli(*command, "--host-issue", text)
    assert done.returncode == 2
    assert done.stderr.startswith("mofa: --host-issue: ") and says in done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout


def test_it_is_said_once(cli: Cli) -> None:
    done = cli(*ESTIMATE, "--host-issue", "6us", "--set", "hardware.gpu.curves.host.eager_op_s=6us")
    assert done.returncode == 2
    assert "--set hardware.gpu.curves.host.eager_op_s sets the host too; keep one" in done.stderr
