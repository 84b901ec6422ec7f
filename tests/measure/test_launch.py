"""The launcher: gates, side by side, failures; with runners that need no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from mofa.measure.launch import RunTask, TaskOutcome, next_task_and_gpus, run_tasks


def task(id: str, num_gpus: int = 1, does: str = "ok", seconds: float = 0.2, timeout_s: float = 30.0) -> RunTask:
    environment = {"PYTORCH_ALLOC_CONF": "", "PYTHONPATH": str(Path(__file__).parent)}
    return RunTask(id, "fake_runner", num_gpus, {"does": does, "seconds": seconds}, environment, timeout_s)


def run(tasks: list[RunTask], folder: Path, num_gpus: int = 4, parallel: bool = False) -> dict[str, TaskOutcome]:
    done = run_tasks(tasks, list(range(num_gpus)), folder, parallel=parallel, progress=lambda _: None)
    return {outcome.task.id: outcome for outcome in done}


def test_one_at_a_time_uses_the_first_gpus(tmp_path: Path) -> None:
    outcomes = run([task("a", 2), task("b")], tmp_path)
    assert outcomes["a"].gpus == (0, 1)
    assert outcomes["b"].gpus == (0,)
    assert not any(o.side_by_side or o.error for o in outcomes.values())
    assert [r["rank"] for r in outcomes["a"].ranks] == [0, 1]


def test_parallel_puts_small_runs_side_by_side_on_their_own_gpus(tmp_path: Path) -> None:
    outcomes = run([task(str(i), seconds=1.0) for i in range(4)], tmp_path, parallel=True)
    assert {o.gpus for o in outcomes.values()} == {(0,), (1,), (2,), (3,)}
    assert all(o.side_by_side for o in outcomes.values())


def test_the_largest_run_goes_first_and_the_rest_fill_up(tmp_path: Path) -> None:
    outcomes = run([task("small"), task("large", 4)], tmp_path, parallel=True)
    assert list(outcomes) == ["large", "small"]
    assert outcomes["large"].gpus == (0, 1, 2, 3)


def test_turns() -> None:
    small, large = task("small"), task("large", 4)
    assert next_task_and_gpus([large, small], [0, 1], alone=False) == (small, (0,))
    assert next_task_and_gpus([large, small], [0, 1], alone=True) is None


def test_out_of_memory_on_one_rank_is_a_result_and_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mofa.measure.launch.GRACE_S", 0.2)
    outcome = run([task("a", 2, "oom")], tmp_path)["a"]
    assert outcome.error is None
    assert [r["outcome"] for r in outcome.ranks] == ["oom"]


def test_a_crash_is_one_line(tmp_path: Path) -> None:
    outcome = run([task("a", does="crash")], tmp_path)["a"]
    assert outcome.error == "RuntimeError: broken on purpose"


def test_a_hang_is_ended_at_its_limit(tmp_path: Path) -> None:
    outcome = run([task("a", does="hang", timeout_s=1.0)], tmp_path)["a"]
    assert outcome.error == "no end after 1 s"
