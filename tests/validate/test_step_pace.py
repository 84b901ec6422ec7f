"""The slowest host of a run whose ranks timed small additions within its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mofa.measure.records import RunRecord
from mofa.validate.reference import measured_reference_runs
from mofa.validate.step_pace import (
    PassTimesOfRanks,
    has_pace_samples,
    layer_time_over_small_op,
    small_layer_time_of_slowest_host,
    small_op_s_of_slowest_host,
    theil_sen_line,
    work_seconds_at_pace,
)
from tests.committed import MEASURED, measured_records


@pytest.fixture(scope="module")
def paced() -> dict[str, RunRecord]:
    return {record.run.id: record for record in measured_records() if has_pace_samples(record)}


LINE = ([2e-6, 4e-6], [1e-3, 2e-3])
"""A layer takes half a millisecond for each microsecond of an addition."""


def of_ranks(record: RunRecord, *ranks: tuple[list[float], list[float]]) -> RunRecord:
    """A record whose ranks' additions within steps were these forward and back."""
    ops_s, layers_s = LINE
    between: dict[str, Any] = {
        "layer_ops_s": ops_s, "layer_issues_s": layers_s, "layer_back_ops_s": ops_s, "layer_backs_s": layers_s,
        "cpu_ops_at_issues_s": ops_s, "host_issues_s": [8e-6, 16e-6],
    }  # fmt: skip
    first = record.measured.ranks[0]
    made = [
        first.model_copy(update={"rank": i, **between, "step_ops_s": ahead, "step_back_ops_s": back})
        for i, (ahead, back) in enumerate(ranks)
    ]
    return record.model_copy(update={"measured": record.measured.model_copy(update={"ranks": made})})


def test_ranks_catch_up_until_a_step_ends(paced: dict[str, RunRecord]) -> None:
    """Of 3 + 2 and 2 + 4 ms the second rank's step is the slowest, each way as it is; an op is the slowest forward."""
    run = of_ranks(paced["te2-tp2-nosp-phi3mini-16l-quiet"], ([6e-6] * 3, [4e-6] * 3), ([4e-6] * 3, [8e-6] * 3))
    assert small_layer_time_of_slowest_host(run) == pytest.approx((2e-3, 4e-3))
    assert small_op_s_of_slowest_host(run) == pytest.approx(24e-6)


def test_ranks_with_experts_of_a_layer_wait_for_the_slowest_of_each_pass(paced: dict[str, RunRecord]) -> None:
    """Two hosts that are busy in half of their passes: in three of four one of them is."""
    quiet, busy = 1.2 * 2e-6, 2.1 * 2e-6
    half, half_back = (quiet + busy) / 2, (1.1 + 1.95) * 2e-6 / 2
    run = of_ranks(paced["te2-ep2-olmoe-10l-quiet"], *[([half] * 3, [half_back] * 3)] * 2)
    most, most_back = quiet + 0.75 * (busy - quiet), 1e-6 * (2.2 + 0.75 * 1.7)
    assert small_layer_time_of_slowest_host(run) == pytest.approx((500 * most, 500 * most_back))
    alone = of_ranks(paced["te2-ep2-olmoe-10l-quiet"], ([half] * 3, [half_back] * 3))
    assert small_layer_time_of_slowest_host(alone) == pytest.approx((500 * half, 500 * half_back))


def test_a_pass_is_never_faster_than_a_rank_s_mean() -> None:
    """Beyond a busy neighbour's pace, and where all are quiet, ranks' own means count."""
    way = PassTimesOfRanks(*LINE, [[9e-6, 2e-6], [3e-6, 2.2e-6]])
    assert way.work_s_of_steps_waiting_for_slowest() == pytest.approx([4.5e-3, 1.1e-3])


def test_lines_that_fall_give_way_to_a_ratio() -> None:
    assert work_seconds_at_pace([2e-6, 4e-6], [2e-3, 1e-3], [3e-6]) == pytest.approx([3e-6 * (1e3 + 250) / 2])


def test_a_layer_is_so_many_small_ops_on_quiet_cores(paced: dict[str, RunRecord]) -> None:
    """Readings at 4 us are of a core whose neighbour is busy: 1 ms over 8 us is left."""
    run = of_ranks(paced["te2-ep2-olmoe-10l-quiet"], ([3e-6] * 3, [3e-6] * 3))
    assert layer_time_over_small_op([run]) == pytest.approx((125.0, 125.0))
    with pytest.raises(ValueError, match="no run"):
        layer_time_over_small_op([])


def test_each_machine_counts_once_however_many_marks_it_has(paced: dict[str, RunRecord]) -> None:
    """Three starts on two GPUs each of one machine say 125 small ops, one elsewhere 250, another 500."""
    run = of_ranks(paced["te2-ep2-olmoe-10l-quiet"], ([3e-6] * 3, [3e-6] * 3))

    def there(mark: str, times: float) -> RunRecord:
        ranks = [
            rank.model_copy(update={
                "layer_issues_s": [times * s for s in rank.layer_issues_s],
                "layer_backs_s": [times * s for s in rank.layer_backs_s],
            }) for rank in run.measured.ranks
        ]  # fmt: skip
        environment = run.environment.model_copy(update={"host": mark})
        measured = run.measured.model_copy(update={"ranks": ranks})
        return run.model_copy(update={"environment": environment, "measured": measured})

    starts = [there("a", 1.0), there("b", 1.0), there("c", 1.0), there("d", 2.0), there("e", 4.0)]
    assert layer_time_over_small_op(starts) == pytest.approx((125.0, 125.0))
    assert layer_time_over_small_op(starts, [("a", "b", "c")]) == pytest.approx((250.0, 250.0))


def test_no_spread_is_added_to_a_slowest_host_that_is_known(tmp_path: Path) -> None:
    """A run over two GPUs that was paced within its steps, and a start of it that was not."""
    folder = tmp_path / "measured"
    folder.mkdir()
    for name in ("te2-ep2-olmoe-10l", "te2-ep2-olmoe-10l-quiet"):
        (folder / f"{name}.yaml").symlink_to(MEASURED / f"{name}.yaml")
    scratch = tmp_path / "counts"
    scratch.mkdir()
    (run,) = measured_reference_runs(folder, scratch)[0]
    slowest = {
        run.run_of_repeat(repeat).resolved_specs()[1].slowest_host_factor
        for repeat in run.repeats
        if repeat.id.endswith("quiet")
    }
    assert slowest == {1.0}
    others = [run.run_of_repeat(repeat) for repeat in run.repeats if not repeat.id.endswith("quiet")]
    assert all(other.resolved_specs()[1].slowest_host_factor > 1.1 for other in others)


@pytest.mark.parametrize("seed", range(6))
def test_a_theil_sen_line_is_scipys(seed: int) -> None:
    """To the last bit, readings of one pace among them."""
    from scipy.stats import theilslopes

    rng = np.random.default_rng(seed)
    x = rng.integers(1, 9, 12).astype(float) if seed % 2 else rng.random(11)
    y = 3.0 * x + rng.random(len(x))
    line = theilslopes(y, x)
    assert theil_sen_line(x.tolist(), y.tolist()) == (float(line.slope), float(line.intercept))
