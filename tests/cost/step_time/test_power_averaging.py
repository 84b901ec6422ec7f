"""What a pipeline's wait gives back of the clock that the power limit takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mofa.cost.estimate import TableEstimator
from mofa.cost.step_time.power_averaging import HARDLY, RESTED, power_averaged_idle_share
from mofa.measure.records import read_record
from mofa.replay.time.step import replay_step_time
from mofa.search.strategy_estimator import strategy_estimator
from mofa.specs.base import Fact
from mofa.specs.power import PowerLimit, clock_at_power_draw
from mofa.validate.hosts import read_machine_hosts
from mofa.validate.reference import reference_of_record
from tests.cost.toy import cluster

RUNS = Path(__file__).resolve().parents[3] / "reference_runs"


def fact(value: float) -> Fact:
    return Fact(value=value, provenance="assumed", source="an example")


def limit(draw: float = 0.2, window_s: float = 0.3) -> PowerLimit:
    return PowerLimit(idle_draw=fact(draw), window_s=fact(window_s))


def test_a_device_that_waits_half_of_the_time_computes_at_full_clock() -> None:
    """Read on an H200: a product that alone keeps 1475 of 1980 MHz runs at 1980 where the device idles for 0.52 of the
    time (docs/calibration.md, what draws power)."""
    alone, power = 1475 / 1980, cluster(node="h200-hgx").gpu.curves.power_limit
    assert power is not None
    assert clock_at_power_draw(alone**-2) == pytest.approx(alone)
    assert clock_at_power_draw(power.mix_weight_beside_idle(0.52) * alone**-2) == 1.0
    assert alone < clock_at_power_draw(power.mix_weight_beside_idle(0.2) * alone**-2) < 1.0


def test_draws_of_work_and_of_waiting_add_up_to_the_limit() -> None:
    power = limit(draw=0.25)
    clock = clock_at_power_draw(power.mix_weight_beside_idle(0.2) * 0.7**-2)
    assert 0.8 * (float(clock) / 0.7) ** 2 + 0.2 * 0.25 == pytest.approx(1.0)


def test_of_a_long_wait_one_window_counts() -> None:
    bubble, step = np.array([0.2, 0.5, 5.0, 0.9 * HARDLY, 1.0]), np.array([1.0, 5.0, 20.0, 1.0, 1.1])
    none = np.zeros(5)
    assert power_averaged_idle_share(limit(), bubble, none, step, step) == pytest.approx(
        [0.2, 0.06, 0.015, 0.0, 0.3 / 1.1]
    )
    assert power_averaged_idle_share(limit(window_s=1.0), bubble, none, step, step)[-1] == RESTED
    assert not power_averaged_idle_share(None, bubble, none, step, step).any()


def of(name: str, *, rests: bool) -> tuple[TableEstimator, float]:
    record = read_record(RUNS / "measured" / f"{name}.yaml")
    reference = reference_of_record(record, RUNS / "measured", read_machine_hosts(RUNS / "measured"), Path())
    workload, machines, framework, strategy = reference.resolved_specs()
    estimator = strategy_estimator(workload, machines, framework, strategy)
    estimator.rests = rests
    assert record.measured.step_time_s is not None
    return estimator, record.measured.step_time_s


BUBBLES = (
    "mc4-pp4-vpp2-llama13b-16l", "tt2-pp2-gpipe-llama-8l", "tt2-pp2-llama-6l-traced", "tt2-pp2-yi9b-12l-2k",
    "tt4-pp4-zbv-llama-14l-2k",
)  # fmt: skip
"""Steps of 0.14 to 0.69 s in which even the slowest rank waits for 9 to 14 %; without rest 2.5 to 6.0 % too slow."""


@pytest.mark.parametrize("name", BUBBLES)
def test_short_steps_with_a_large_bubble_are_met_by_the_clock_that_rest_gives_back(name: str) -> None:
    errors = []
    for rests in (False, True):
        estimator, measured_s = of(name, rests=rests)
        played, closed = replay_step_time(estimator, detail=False).step_s, float(estimator.breakdown().step_s[0])
        assert closed == pytest.approx(played, rel=0.01)
        errors.append(played / measured_s - 1.0)
    assert errors[0] > 0.025
    assert abs(errors[1]) < min(0.65 * errors[0], 0.042)


def test_rows_lie_between_a_step_without_a_wait_and_one_that_rested() -> None:
    estimator, _ = of("tt2-pp2-yi9b-12l-2k", rests=True)
    mixed, rested = (float(one.breakdown().step_s[0]) for one in (estimator, estimator.at_clock_of_longest_waits))
    exact = float(estimator.at_power_limited_clock.breakdown().step_s[0])
    estimator.rests = False
    plain = float(estimator.breakdown().step_s[0])
    assert rested < mixed < plain
    assert mixed == pytest.approx(exact, rel=0.003)


def test_passes_are_rested_for_as_long_as_the_full_clock_lasts_behind_an_optimizer() -> None:
    """Adam of 50 ms: the full clock for 60 ms (1 - e^-2), 51.9 ms, of passes of 100 ms; beside a wait of 5 ms of 150;
    and shorter passes are rested whole."""
    settling = PowerLimit(idle_draw=fact(0.2), window_s=fact(0.3), settles_s=fact(0.025), full_clock_s=fact(0.06))
    optimizer, passes = np.full(3, 0.05), np.array([0.1, 0.1, 0.02])
    share = power_averaged_idle_share(settling, np.array([0.0, 0.005, 0.0]), optimizer, passes + 0.05, passes)
    assert share == pytest.approx([0.519 * RESTED, 0.519 * RESTED + 0.0333, RESTED], abs=1e-3)
    one = np.ones(1)
    assert not power_averaged_idle_share(limit(), np.zeros(1), one, one, one).any()  # of a file without them


def test_one_stage_gains_by_its_optimizer_alone() -> None:
    """Of a long step it is less than a hundredth, and left out."""
    short, long = (of(name, rests=True)[0] for name in ("mc1-llama-21l-fits", "tt1-llama-2l-traced"))
    for estimator in (short, long):
        played, closed = replay_step_time(estimator, detail=False).step_s, float(estimator.breakdown().step_s[0])
        assert closed == pytest.approx(played, rel=0.003)
        plain = replace_rests(estimator)
        assert closed < plain


def replace_rests(estimator: TableEstimator) -> float:
    """Its step at the clock that its passes alone leave. [s]"""
    estimator.rests = False
    return float(estimator.breakdown().step_s[0])
