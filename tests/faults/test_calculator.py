"""The calculator's simulation is of the interval asked for, and its exact interval is the best."""

from __future__ import annotations

import math

import pytest

from mofa.faults.calculator import calculate_goodput
from mofa.faults.closed_forms.weibull import weibull_ledger_shares

MIN, HOUR = 60.0, 3600.0


@pytest.mark.parametrize(
    ("mtbf", "interval", "days", "by_hand"),
    [
        (6 * HOUR, 30 * HOUR, 54.0, 0.0325),  # 5 e^(-1/36) / (e^(5 + 1/72) - 1)
        (6 * HOUR, 26 * HOUR, 54.0, 0.0553),  # 13/3 e^(-1/36) / (e^(13/3 + 1/72) - 1)
        (24 * HOUR, 30 * HOUR, 2.0, 0.4960),  # 5/4 e^(-1/144) / (e^(5/4 + 1/288) - 1)
    ],
)
def test_the_interval_asked_for_is_simulated(mtbf: float, interval: float, days: float, by_hand: float) -> None:
    found = calculate_goodput(mtbf, 5 * MIN, 10 * MIN, interval_s=interval, days=days)
    mc = found.ettr_monte_carlo
    assert mc is not None
    assert found.ettr == pytest.approx(by_hand, abs=5e-5)
    assert abs(mc.mean - found.ettr) < 3 * mc.standard_error
    assert mc.productive_days * 24 * HOUR / interval == pytest.approx(round(mc.productive_days * 24 * HOUR / interval))


@pytest.mark.parametrize(
    ("times", "persist", "shape"),
    [
        (0.2, 0.0, 0.7), (0.2, 20 * MIN, 2.0), (1.7, 20 * MIN, 0.7), (1.7, 0.0, 2.0), (3.1, 20 * MIN, 1.0),
        (6.0, 0.0, 1.0), (6.0, 0.0, 2.0),
    ],
)  # fmt: skip
def test_intervals_of_many_mtbf(times: float, persist: float, shape: float) -> None:
    found = calculate_goodput(6 * HOUR, 5 * MIN, 10 * MIN, interval_s=times * 6 * HOUR, persist_s=persist, shape=shape,
                      days=15.0, num_runs=1000, seed=1)  # fmt: skip
    mc = found.ettr_monte_carlo
    if shape == 2 and times == 6:  # of what fails this regularly nothing gets through
        assert mc is None and found.ettr < 1e-3
        return
    assert mc is not None
    assert abs(mc.mean - found.ettr) < 3.5 * mc.standard_error


def test_what_a_run_of_few_segments_cannot_say_is_left_out() -> None:
    """With checkpoints restorable an MTBF later, a run of 6 MTBF a segment would end before it shows."""
    assert calculate_goodput(6 * HOUR, 300.0, 600.0, interval_s=36 * HOUR, persist_s=6 * HOUR).ettr_monte_carlo is None


@pytest.mark.parametrize(("shape", "persist"), [(0.3, 0.0), (0.7, 0.0), (2.0, 20 * MIN), (10.0, 0.0), (1.0, 20 * MIN)])
def test_exact_is_the_best_interval(shape: float, persist: float) -> None:
    found = calculate_goodput(6 * HOUR, 5 * MIN, 10 * MIN, shape=shape, persist_s=persist, num_runs=2, days=1.0)
    best = found.ettr_by_formula.exact
    assert found.ettr == best
    assert best >= max(found.ettr_by_formula.young, found.ettr_by_formula.daly, found.ettr_by_formula.daly_higher_order)
    around = [found.interval_s.exact * 1.02**k for k in range(-60, 61, 5) if k]
    args = (5 * MIN, 6 * HOUR, 10 * MIN, persist, shape)
    assert best > max(weibull_ledger_shares(tau, *args)["productive"] for tau in around)


def test_of_regular_failures_the_best_interval_ends_before_them() -> None:
    """Shape 10: few fail before 0.7 M; for a checkpoint of M / 4 one segment a failure is best, well above Daly's."""
    found = calculate_goodput(6 * HOUR, 1.5 * HOUR, 0.0, shape=10.0, num_runs=2, days=1.0)
    assert 0.4 * 6 * HOUR < found.interval_s.exact < 0.75 * 6 * HOUR
    assert found.interval_s.daly == pytest.approx(6 * HOUR * (math.sqrt(0.5) - 0.25))
