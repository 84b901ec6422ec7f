"""Intervals against published numbers, against a numeric minimum, and their invariants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize

from mofa.errors import SpecError
from mofa.faults.closed_forms import intervals, renewal
from mofa.faults.closed_forms.two_levels import two_level_ettr

MIN, HOUR = 60.0, 3600.0
seconds = st.floats(1e-2, 1e7)


@pytest.mark.parametrize(
    ("mtbf_s", "young", "daly", "higher", "exact", "hours"),
    [
        (24 * HOUR, 120.0, 115.0, 116.690, 116.690, 547.88),
        (6 * HOUR, 60.0, 55.0, 56.713, 56.714, 610.22),
        (15 * MIN, 12.247, 7.247, 9.1409, 9.1665, 2504.2),
    ],
)
def test_dalys_three_cases(mtbf_s: float, young: float, daly: float, higher: float, exact: float, hours: float) -> None:
    """Daly 2006, figures 3 to 5: 500 h, R = 10 min, delta = 5 min; captions give 117, 57 and 9.1 min."""
    block, restart = 5 * MIN, 10 * MIN
    assert intervals.young_interval_s(block, mtbf_s) / MIN == pytest.approx(young, abs=5e-4)
    assert intervals.daly_interval_s(block, mtbf_s) / MIN == pytest.approx(daly, abs=5e-4)
    assert intervals.daly_higher_order_interval_s(block, mtbf_s) / MIN == pytest.approx(higher, abs=5e-4)
    tau = float(intervals.exact_interval_s(block, mtbf_s))
    assert tau / MIN == pytest.approx(exact, abs=5e-4)
    total = 500 * HOUR / tau * renewal.expected_segment_s(tau, block, mtbf_s, restart) / HOUR
    assert total == pytest.approx(hours, rel=2e-5)


ERRORS = {  # of tau against the exact one, percent, at delta / M: Bougeret et al. 2011 print them rounded
    0.001: (1.51, -0.76, 0.0),
    0.01: (4.88, -2.53, -0.001),
    0.1: (16.7, -9.39, -0.04),
    0.5: (43.2, -28.4, -0.55),
    1.0: (68.1, -50.8, -1.82),
}


@pytest.mark.parametrize("ratio", ERRORS)
def test_errors_of_young_and_daly(ratio: float) -> None:
    exact = intervals.exact_interval_s(ratio, 1.0)
    found = [
        f(ratio, 1.0) / exact - 1
        for f in (intervals.young_interval_s, intervals.daly_interval_s, intervals.daly_higher_order_interval_s)
    ]
    assert [100 * float(x) for x in found] == pytest.approx(ERRORS[ratio], abs=0.051)
    assert 100 * found[2] == pytest.approx(ERRORS[ratio][2], abs=0.0051)


MINIMUM_WASTE = {
    0.001: 0.045013, 0.01: 0.143443, 0.05: 0.318740, 0.1: 0.441881, 0.25: 0.650488, 0.5: 0.817004, 1.0: 0.941656,
}  # fmt: skip


@pytest.mark.parametrize("ratio", MINIMUM_WASTE)
def test_minimum_waste_with_a_restart_as_long_as_a_checkpoint(ratio: float) -> None:
    tau = intervals.exact_interval_s(ratio, 1.0)
    assert 1 - renewal.renewal_ettr(tau, ratio, 1.0, ratio) == pytest.approx(MINIMUM_WASTE[ratio], abs=6e-7)


@given(block=seconds, ratio=st.floats(1e-10, 50.0), restart=st.floats(0, 1e4))
def test_the_exact_interval_is_where_the_expected_time_is_least(block: float, ratio: float, restart: float) -> None:
    mtbf = block / ratio
    tau = float(intervals.exact_interval_s(block, mtbf))

    def log_time(log_tau: float) -> float:
        x, d = np.exp(log_tau) / mtbf, block / mtbf
        return float(x + d + np.log(-np.expm1(-x - d)) - log_tau)

    found = optimize.minimize_scalar(log_time, bounds=(np.log(tau) - 3, np.log(tau) + 3), method="bounded")
    assert log_time(np.log(tau)) <= found.fun + 1e-9 * abs(found.fun)
    if ratio > 1e-4:
        assert tau == pytest.approx(np.exp(found.x), rel=1e-2)
    near = renewal.renewal_ettr(tau * np.array([0.9, 1.0, 1.1]), block, mtbf, min(restart, 100 * mtbf))
    assert near[1] >= near.max() * (1 - 1e-12)


@given(x=st.floats(1e-12, 1e-3))
def test_the_series_near_the_branch_point_solves_the_equation(x: float) -> None:
    y = float(intervals.exact_interval_s(x, 1.0))  # y + ln(1 - y) = -x; its second-order part, free of cancellation
    assert -(y + np.log1p(-y)) == pytest.approx(x, rel=1e-6, abs=4e-16 / x**0)
    assert float(intervals.exact_interval_s(0.99999e-4, 1.0)) == pytest.approx(
        float(intervals.exact_interval_s(1.00001e-4, 1.0)), rel=2e-5
    )


@given(block=seconds, mtbf=seconds, scale=st.floats(1e-3, 1e3))
def test_intervals_scale_with_time(block: float, mtbf: float, scale: float) -> None:
    for form in (
        intervals.young_interval_s,
        intervals.daly_interval_s,
        intervals.daly_higher_order_interval_s,
        intervals.exact_interval_s,
    ):
        one, other = float(form(block, mtbf)), float(form(block * scale, mtbf * scale))
        assert other == pytest.approx(one * scale, rel=1e-6, abs=1e-9 * block * scale)


def test_limits() -> None:
    assert float(intervals.exact_interval_s(0.0, HOUR)) == 0.0
    assert np.isinf(intervals.exact_interval_s(60.0, np.inf))
    assert np.isinf(intervals.young_interval_s(60.0, np.inf))
    assert float(intervals.young_interval_s(0.0, np.inf)) == 0.0
    assert float(intervals.daly_higher_order_interval_s(500.0, 100.0)) == 100.0  # delta >= 2M
    many = intervals.exact_interval_s(np.array([[1.0, 2.0]]), np.array([[100.0], [200.0]]))
    assert many.shape == (2, 2)


def test_two_levels_by_hand() -> None:
    fast, safe = intervals.two_level_intervals_s((1.0, 60.0), 3.093 * HOUR, 0.75)
    assert float(fast) == pytest.approx(172, abs=0.5)
    assert float(safe) == pytest.approx(2312, abs=0.5)
    only, never = intervals.two_level_intervals_s((1.0, 60.0), HOUR, 1.0)
    assert float(only) == pytest.approx(float(intervals.young_interval_s(1.0, HOUR)))
    assert np.isinf(never)


@given(p=st.floats(0.5, 0.95), fast=st.floats(0.1, 1.0), safe=st.floats(50.0, 200.0))
def test_two_levels_are_near_the_best(p: float, fast: float, safe: float) -> None:
    """No other pair of intervals is noticeably better than the first-order one where failures are rare."""
    mtbf, restart = 2e5, (60.0, 600.0)
    tau, between = (float(t) for t in intervals.two_level_intervals_s((fast, safe), mtbf, p))
    by = np.array([0.5, 0.7, 0.9, 1.0, 1.1, 1.4, 2.0])
    taus, numbers = np.meshgrid(tau * by, np.maximum(np.round(between / tau * by), 1.0))
    # a safe checkpoint takes the place of a fast one, so that it costs what both would apart
    found = two_level_ettr(taus, numbers, (fast, safe + fast), mtbf, restart, p)
    assert float(found[3, 3]) >= float(found.max()) - 5e-4


def test_storage_bounds_the_interval() -> None:
    assert float(intervals.least_interval_s(1e12, 1e10, 5.0)) == 95.0
    assert float(intervals.least_interval_s(1e12, 1e10, 100.0)) == 0.0  # a blocking checkpoint
    assert float(intervals.least_interval_s(1e12, 1e10, 5.0, in_flight=2)) == 45.0


@pytest.mark.parametrize(("block", "mtbf"), [(-1.0, 10.0), (1.0, 0.0), (1.0, -5.0), (float("nan"), 1.0), (np.inf, 1.0)])
def test_what_is_no_time_is_refused(block: float, mtbf: float) -> None:
    with pytest.raises(SpecError, match=r"give a number"):
        intervals.exact_interval_s(block, mtbf)
