"""Spares, waiting and peer copies against published counts and counted cases."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mofa.errors import SpecError
from mofa.faults import spares
from mofa.faults.failures import rates


@pytest.mark.parametrize("probability", [0.001165, 0.0012, 0.00125])
def test_standby_machines_of_byterobust(probability: float) -> None:
    found = spares.binomial_spares(np.array([128, 256, 512, 1024]), probability)
    assert found.tolist() == [2, 2, 3, 4]


@pytest.mark.parametrize("probability", [0.00116, 0.00126])
def test_no_other_probability_gives_byterobusts_counts(probability: float) -> None:
    assert spares.binomial_spares(np.array([128, 256, 512, 1024]), probability).tolist() != [2, 2, 3, 4]


@pytest.mark.parametrize(("nodes", "copies", "failed"), [(16, 2, 2), (16, 2, 3), (12, 3, 4), (12, 3, 7), (8, 2, 5)])
def test_peer_copies_by_counting(nodes: int, copies: int, failed: int) -> None:
    groups = [set(range(i, i + copies)) for i in range(0, nodes, copies)]
    draws = list(combinations(range(nodes), failed))
    kept = sum(not any(group <= set(draw) for group in groups) for draw in draws)
    assert spares.all_states_survive_probability(nodes, copies, failed) == pytest.approx(
        kept / len(draws), rel=1e-9, abs=1e-12
    )


def test_peer_copies_published() -> None:
    assert spares.all_states_survive_probability(16, 2, 2) == pytest.approx(0.9333, abs=5e-5)
    assert spares.all_states_survive_probability(4096, 2, 1) == 1.0
    assert spares.all_states_survive_probability(16, 2, 16) == 0.0


@given(load=st.floats(1e-3, 50.0), num_spares=st.integers(0, 60))
def test_waiting_falls_with_spares(load: float, num_spares: int) -> None:
    more = spares.waiting_share(load, 1.0, np.array([num_spares, num_spares + 1]))
    assert 0 <= more[1] < more[0] < 1
    if num_spares == 0:
        assert more[0] == pytest.approx(load / (1 + load), rel=1e-9)


def test_waiting_at_its_limits() -> None:
    assert float(spares.waiting_share(1.0, 100.0, np.inf)) == 0.0
    assert float(spares.waiting_share(0.0, 100.0, 0)) == 0.0
    assert float(spares.waiting_share(1.0, 1e6, 3)) == pytest.approx(1 - 4e-6, rel=1e-6)
    assert float(spares.waiting_share(1.0, 1.0, 500)) < 1e-300


def test_poisson_spares_suffice() -> None:
    enough = int(spares.poisson_spares(1 / 11135, 86400.0, 0.99))
    below = sum(np.exp(-86400 / 11135) * (86400 / 11135) ** k / float(np.prod(range(1, k + 1))) for k in range(enough))
    assert below < 0.99


def test_delta_needs_fewer_spares_where_it_recovers_faster() -> None:
    """Delta's study has 31 and 2 % of 608; its rate of job-ending failures is not given, so only the order is held."""
    slow, fast = (int(spares.poisson_spares(1 / (1.9 * 3600), t, 0.999)) for t in (2.2 * 3600, 300.0))
    assert slow > fast >= 1


def test_one_replica_is_a_checkpoint_restart() -> None:
    assert float(spares.ettr_of_continuing_replicas(3600.0, 1, 10.0, 600.0, 4.0, 0.83)) == 0.83


@pytest.mark.parametrize(("replicas", "mtbf", "back"), [(8, 3600.0, 1800.0), (32, 900.0, 600.0), (64, 300.0, 1200.0)])
def test_replicas_that_go_on_are_as_fast_as_simulated_ones(replicas: int, mtbf: float, back: float) -> None:
    """Every replica fails and comes back by itself; each failure stops all for a stall and half a step."""
    stall, step, horizon, runs = 25.0, 6.0, 40 * 86400.0, 12
    rng = np.random.default_rng(2)
    found = []
    for _ in range(runs):
        up = rng.exponential(replicas * mtbf, (replicas, int(2 * horizon / (replicas * mtbf + back)) + 40))
        ends = np.cumsum(up + back, axis=1)  # of each repair
        fails = ends - back
        computed = np.clip(horizon - (ends - back - up), 0.0, up).sum() / replicas
        found.append(computed / (horizon + (stall + step / 2) * (fails < horizon).sum()))
    expected = float(spares.ettr_of_continuing_replicas(mtbf, replicas, stall, back, step, 0.5))
    assert abs(np.mean(found) - expected) < 3.5 * np.std(found, ddof=1) / np.sqrt(runs)


@given(
    mtbf=st.floats(600.0, 1e7), replicas=st.integers(2, 512), stall=st.floats(0.0, 300.0), back=st.floats(0.0, 7200.0)
)
def test_replicas_at_their_limits(mtbf: float, replicas: int, stall: float, back: float) -> None:
    found = float(spares.ettr_of_continuing_replicas(mtbf, replicas, stall, back, 0.0, 0.5))
    assert 0 <= found <= 1
    assert float(spares.ettr_of_continuing_replicas(np.inf, replicas, stall, back, 0.0, 0.5)) == 1.0
    assert float(spares.ettr_of_continuing_replicas(mtbf / 2, replicas, stall, back, 0.0, 0.5)) <= found + 1e-9
    up = replicas * mtbf / (replicas * mtbf + back)
    assert found <= up + 1e-9


def test_rates_out_of_components_and_counts() -> None:
    rate = rates.failures_per_node_day_of_components([(8, 50_000 * 3600.0), (2, 100_000 * 3600.0)])
    assert rate == pytest.approx(24 * (8 / 50_000 + 2 / 100_000))
    found = rates.estimate_failure_rate(0, 100.0, 0.9)
    assert (found.rate_per_node_day, found.low_per_node_day) == (0.0, 0.0)
    assert found.high_per_node_day == pytest.approx(-np.log(0.05) / 100)


def test_the_interval_of_a_rate_covers_it_as_often_as_it_says() -> None:
    counts = np.random.default_rng(0).poisson(7.0, 2000)
    inside = [
        r.low_per_node_day <= 0.07 <= r.high_per_node_day
        for r in (rates.estimate_failure_rate(int(c), 100.0) for c in counts)
    ]
    assert 0.9 <= np.mean(inside) < 0.97


def test_a_weibull_shape_is_found_again_beside_censored_times() -> None:
    rng = np.random.default_rng(1)
    gaps = rng.weibull(0.7, 6000) * float(rates.weibull_scale_s(1e6, 0.7))
    end = 8e5
    assert rates.fit_weibull_shape(gaps[gaps < end], np.full((gaps >= end).sum(), end)) == pytest.approx(0.7, abs=0.03)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rates.job_mtbf_s(-1e-3, 8), "failures_per_node_day"),
        (lambda: rates.job_mtbf_s(1e-3, 0), "num_nodes"),
        (lambda: rates.failures_per_node_day_of_components([(8, 0.0)]), "mttf_s"),
        (lambda: rates.estimate_failure_rate(-1, 10.0), "failures"),
        (lambda: rates.estimate_failure_rate(1, 0.0), "node_days"),
        (lambda: rates.estimate_failure_rate(1, 1.0, 1.0), "confidence"),
        (lambda: rates.fit_weibull_shape(np.array([1.0]), np.zeros(0)), "at least two"),
        (lambda: spares.poisson_spares(1.0, 1.0, 1.0), "quantile"),
        (lambda: spares.all_states_survive_probability(10, 3, 1), "divide"),
        (lambda: spares.all_states_survive_probability(10, 2, 11), "0 to 10"),
        (lambda: spares.ettr_of_continuing_replicas(1.0, 0, 1.0, 1.0, 1.0, 0.5), "num_replicas"),
        (lambda: spares.binomial_spares(10, 1.5), "faulty"),
    ],
)
def test_what_makes_no_sense_is_refused(call: object, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        call()  # type: ignore[operator]
