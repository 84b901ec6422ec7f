"""The closed form of Weibull jobs against the exponential one, the simulation and published efficiencies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mofa.errors import SpecError
from mofa.faults.closed_forms import renewal
from mofa.faults.closed_forms.weibull import weibull_ledger_shares
from mofa.faults.failures.clocks import FailureClock
from mofa.faults.ledger import PARTS, expected_ledger_shares
from mofa.faults.simulate import LongRunToSimulate, SimulatedCheckpointLevel, SimulatedFailureKind, simulate_long_runs

MIN, DAY = 60.0, 86400.0
PUBLISHED = {0.5: 0.877, 0.7: 0.861, 1.0: 0.854, 1.5: 0.850}
"""M = 185.6 min, tau = 19, delta = 1, R = 10 min; the simulation behind them is 0.0015 off at shape 1."""


def weibull_ettr(*args: float, **more: float) -> float:
    return weibull_ledger_shares(*args, **more)["productive"]


@given(
    tau=st.floats(10.0, 1e5), block=st.floats(0.0, 1e3), mtbf=st.floats(1e3, 1e7), restart=st.floats(0.0, 1e4),
    persist=st.floats(0.0, 1e3),
)  # fmt: skip
@example(tau=10.0, block=33.0, mtbf=2954979.0, restart=0.0, persist=0.0)  # most checkpoints are in the integral
@settings(max_examples=60, deadline=None)
def test_shape_one_is_the_exponential(tau: float, block: float, mtbf: float, restart: float, persist: float) -> None:
    expected = float(renewal.renewal_ettr(tau, block, mtbf, restart, persist))
    found = weibull_ledger_shares(tau, block, mtbf, restart, persist)
    assert found["productive"] == pytest.approx(expected, rel=1e-6, abs=1e-12)
    shares = expected_ledger_shares(tau, block, mtbf, restart, persist)
    assert found == pytest.approx({part: float(shares[part]) for part in PARTS}, abs=1e-6)


@pytest.mark.parametrize("shape", PUBLISHED)
def test_published_efficiencies(shape: float) -> None:
    found = weibull_ettr(19 * MIN, MIN, 185.6 * MIN, 10 * MIN, shape=shape)
    assert found == pytest.approx(PUBLISHED[shape], abs=0.0035)


@pytest.mark.parametrize(("shape", "persist"), [(0.5, 0.0), (0.7, 600.0), (1.5, 0.0), (3.0, 600.0)])
def test_the_simulation_agrees_within_its_error(shape: float, persist: float) -> None:
    """Long runs: a run begins with a fresh clock, and ends in the midst of one."""
    run = LongRunToSimulate(600 * DAY, 19 * MIN, (SimulatedCheckpointLevel(MIN, persist_s=persist),),
                            (SimulatedFailureKind(1.0, 10 * MIN),),
                            FailureClock(185.6 * MIN, shape=shape))  # fmt: skip
    found = simulate_long_runs(run, 500, seed=4)
    expected = weibull_ledger_shares(19 * MIN, MIN, 185.6 * MIN, 10 * MIN, persist, shape)
    assert abs(found.ettr - expected["productive"]) < 3.5 * found.standard_error
    ledger = found.ledger()
    for part in PARTS:
        assert getattr(ledger, part) == pytest.approx(expected[part], abs=1e-3)


@pytest.mark.parametrize("shape", [0.1, 0.15, 0.3])
def test_a_heavy_tail_is_summed_whole(shape: float) -> None:
    """Without checkpoints and restarts everything but the last part of each gap is banked."""
    found = weibull_ettr(1.0, 0.0, 1e6, 0.0, shape=shape)
    assert 0.999 < found < 1.0
    assert weibull_ettr(1.0, 0.0, 1e6, 0.0, shape=shape) > weibull_ettr(100.0, 0.0, 1e6, 0.0, shape=shape)


def test_more_clustering_loses_less_at_one_mean() -> None:
    found = [weibull_ettr(19 * MIN, MIN, 185.6 * MIN, 10 * MIN, shape=k) for k in (0.5, 0.7, 1.0, 1.5, 3.0)]
    assert np.all(np.diff(found) < 0)


def test_what_is_no_shape_is_refused() -> None:
    for change, said in (({"shape": 0.0}, "shape"), ({"mtbf_s": 0.0}, "mtbf_s"), ({"block_s": -1.0}, "block_s")):
        with pytest.raises(SpecError, match=said):
            weibull_ledger_shares(**{"interval_s": 1.0, "block_s": 1.0, "mtbf_s": 1.0, "restart_s": 1.0, **change})
