"""The Monte Carlo twin agrees with the closed forms within its own error, and its ledger closes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mofa.errors import SpecError
from mofa.faults import spares
from mofa.faults.closed_forms import renewal
from mofa.faults.closed_forms.two_levels import two_level_ettr
from mofa.faults.failures.clocks import FailureClock
from mofa.faults.ledger import PARTS, expected_ledger_shares
from mofa.faults.simulate import (
    LongRunToSimulate,
    SimulatedCheckpointLevel,
    SimulatedFailureKind,
    SimulatedRuns,
    simulate_long_runs,
)

MIN, HOUR, DAY = 60.0, 3600.0, 86400.0
Z = 3.5


def agrees(found: SimulatedRuns, expected: float) -> bool:
    return abs(found.ettr - expected) < Z * found.standard_error


@pytest.mark.parametrize(
    ("mtbf", "tau", "delta", "restart"),
    [(6 * HOUR, 3402.84, 300.0, 600.0), (900.0, 550.0, 300.0, 600.0), (11135.0, 1116.0, 60.0, 120.0)],
)
def test_one_level_is_the_renewal_closed_form(mtbf: float, tau: float, delta: float, restart: float) -> None:
    run = LongRunToSimulate(
        400 * tau, tau, (SimulatedCheckpointLevel(delta),), (SimulatedFailureKind(1.0, restart),), FailureClock(mtbf)
    )
    found = simulate_long_runs(run, 2000, seed=1)
    assert agrees(found, float(renewal.renewal_ettr(tau, delta, mtbf, restart)))
    expected = expected_ledger_shares(tau, delta, mtbf, restart)
    ledger = found.ledger()
    for part in PARTS:
        assert getattr(ledger, part) == pytest.approx(float(expected[part]), abs=0.004)


def test_kinds_of_failure_are_one_effective_restart() -> None:
    kinds = (SimulatedFailureKind(0.6, 60.0), SimulatedFailureKind(0.3, 1800.0), SimulatedFailureKind(0.1, 7200.0))
    run = LongRunToSimulate(20 * DAY, 1200.0, (SimulatedCheckpointLevel(30.0),), kinds, FailureClock(10_000.0))
    one = renewal.effective_restart_s([k.restart_s for k in kinds], [k.share for k in kinds], 10_000.0)
    assert agrees(simulate_long_runs(run, 2000, seed=2), float(renewal.renewal_ettr(1200.0, 30.0, 10_000.0, one)))


def test_asynchronous_checkpoints() -> None:
    """A long run: the closed form leaves out that the first segment has nothing to lose before it."""
    run = LongRunToSimulate(
        200 * DAY,
        1200.0,
        (SimulatedCheckpointLevel(5.0, persist_s=900.0),),
        (SimulatedFailureKind(1.0, 300.0),),
        FailureClock(7200.0),
    )
    assert agrees(simulate_long_runs(run, 600, seed=3), float(renewal.renewal_ettr(1200.0, 5.0, 7200.0, 300.0, 900.0)))
    plain = LongRunToSimulate(
        20 * DAY,
        1200.0,
        (SimulatedCheckpointLevel(5.0, persist_s=0.0),),
        (SimulatedFailureKind(1.0, 300.0),),
        FailureClock(7200.0),
    )
    assert agrees(simulate_long_runs(plain, 2000, seed=3), float(renewal.renewal_ettr(1200.0, 5.0, 7200.0, 300.0)))


def test_two_and_three_levels_are_the_linear_system() -> None:
    kinds = (SimulatedFailureKind(0.75, 60.0, level=0), SimulatedFailureKind(0.25, 900.0, level=1))
    run = LongRunToSimulate(
        1200 * 180.0,
        180.0,
        (SimulatedCheckpointLevel(1.0), SimulatedCheckpointLevel(60.0, every=12)),
        kinds,
        FailureClock(11135.0),
    )
    exact = renewal.levels_ettr(180.0, (1, 12), (1.0, 60.0), 11135.0, (0.75, 0.25), (60.0, 900.0))
    assert agrees(simulate_long_runs(run, 3000, seed=4), exact)
    kinds = (
        SimulatedFailureKind(0.6, 30.0, level=0),
        SimulatedFailureKind(0.3, 300.0, level=1),
        SimulatedFailureKind(0.1, 900.0, level=2),
    )
    levels = (
        SimulatedCheckpointLevel(1.0),
        SimulatedCheckpointLevel(5.0, every=3),
        SimulatedCheckpointLevel(60.0, every=12),
    )
    three = LongRunToSimulate(1200 * 180.0, 180.0, levels, kinds, FailureClock(7200.0))
    exact = renewal.levels_ettr(180.0, (1, 3, 12), (1.0, 5.0, 60.0), 7200.0, (0.6, 0.3, 0.1), (30.0, 300.0, 900.0))
    assert agrees(simulate_long_runs(three, 3000, seed=5), exact)


@pytest.mark.parametrize(
    ("interval", "every", "block", "mtbf", "p", "persist"),
    [(120.0, 10, (1.0, 2.0), 11135.0, 0.75, (20.0, 600.0)),  # kept within the next pattern
     (120.0, 4, (1.0, 60.0), 1000.0, 0.5, (0.0, 2000.0)),  # after several, half of which fail before
     (300.0, 3, (5.0, 5.0), 1500.0, 0.6, (250.0, 700.0)), (300.0, 1, (5.0, 5.0), 1500.0, 0.6, (100.0, 50.0)),
     (60.0, 1, (1.0, 1.0), 1000.0, 0.9, (0.0, 300.0)), (120.0, 4, (1.0, 60.0), 1000.0, 0.0, (0.0, 300.0))],
)  # fmt: skip
def test_two_levels_with_delays(
    interval: float, every: int, block: tuple[float, float], mtbf: float, p: float, persist: tuple[float, float]
) -> None:
    """Long runs, whose begin and end don't show: the closed form is that of an endless one."""
    kinds = (SimulatedFailureKind(p, 60.0, level=0), SimulatedFailureKind(1 - p, 300.0, level=1))
    levels = (
        SimulatedCheckpointLevel(block[0], persist_s=persist[0]),
        SimulatedCheckpointLevel(block[1], every=every, persist_s=persist[1]),
    )
    closed = float(two_level_ettr(interval, every, block, mtbf, (60.0, 300.0), p, persist))
    pattern = interval * every
    work = np.ceil(2_000 * mtbf * closed / pattern) * pattern
    found = simulate_long_runs(LongRunToSimulate(work, interval, levels, kinds, FailureClock(mtbf)), 300, seed=6)
    assert abs(found.ettr - closed) < 3.5 * found.standard_error


def test_a_run_that_ends_before_storage_keeps_anything() -> None:
    """Writing takes nine times as long as it is from one failure to the next: an endless run would hardly get on."""
    kinds, levels = (
        (SimulatedFailureKind(0.9998, 60.0), SimulatedFailureKind(2e-4, 300.0, level=1)),
        (SimulatedCheckpointLevel(0.1), SimulatedCheckpointLevel(0.1, every=600, persist_s=6e4)),
    )
    facts = (100.0, 600, (0.1, 0.1), 6700.0, (60.0, 300.0), 0.9998, (0.0, 6e4))
    assert float(two_level_ettr(*facts)) < 0.5
    for work, slack in ((4e6, 0.005), (1.2e7, 0.03)):
        played = simulate_long_runs(LongRunToSimulate(work, 100.0, levels, kinds, FailureClock(6700.0)), 400, seed=2)
        closed = float(two_level_ettr(*facts, work_s=work))
        assert closed == pytest.approx(played.ettr, abs=3.5 * played.standard_error + slack)


@pytest.mark.parametrize("num_spares", [0, 1, 3])
def test_waiting_for_spares_is_erlangs_formula(num_spares: int) -> None:
    mtbf, repair, share = 4 * HOUR, 6 * HOUR, 0.7
    kinds = (SimulatedFailureKind(share, 300.0, takes_node=True), SimulatedFailureKind(1 - share, 60.0))
    run = LongRunToSimulate(
        60 * DAY,
        1200.0,
        (SimulatedCheckpointLevel(30.0),),
        kinds,
        FailureClock(mtbf),
        num_spares=num_spares,
        repair_s=repair,
    )
    found = simulate_long_runs(run, 1500, seed=7)
    idle = float(spares.waiting_share(share / mtbf, repair, num_spares))
    assert found.ledger().waiting == pytest.approx(idle, abs=0.005)
    restart = renewal.effective_restart_s([300.0, 60.0], [share, 1 - share], mtbf)
    full = float(renewal.renewal_ettr(1200.0, 30.0, mtbf, restart))
    assert found.ettr == pytest.approx(full * (1 - idle), abs=max(Z * found.standard_error, 0.002))


def test_enough_spares_are_as_good_as_endlessly_many() -> None:
    kinds = (SimulatedFailureKind(1.0, 300.0, takes_node=True),)
    args = (20 * DAY, 1200.0, (SimulatedCheckpointLevel(30.0),), kinds, FailureClock(4 * HOUR))
    many = simulate_long_runs(LongRunToSimulate(*args, num_spares=30, repair_s=HOUR), 300, seed=8)
    oracle = simulate_long_runs(LongRunToSimulate(*args, num_spares=None), 300, seed=8)
    assert many.ledger().waiting == 0.0
    assert many.ettr == pytest.approx(oracle.ettr, abs=Z * (many.standard_error + oracle.standard_error))


WEIBULL = {0.5: 0.877, 0.7: 0.861, 1.0: 0.854, 1.5: 0.850}


@pytest.mark.parametrize("shape", WEIBULL)
def test_weibull_failures_of_a_whole_job(shape: float) -> None:
    """M = 185.6 min, tau = 19, delta = 1, R = 10 min, a fresh clock at every failure.

    The published simulation gives no error: its k = 1 is 0.0015 from the closed form, which ours must meet.
    """
    run = LongRunToSimulate(
        54 * DAY,
        19 * MIN,
        (SimulatedCheckpointLevel(MIN),),
        (SimulatedFailureKind(1.0, 10 * MIN),),
        FailureClock(185.6 * MIN, shape=shape),
    )
    found = simulate_long_runs(run, 3000, seed=9)
    assert found.ettr == pytest.approx(WEIBULL[shape], abs=0.004)
    if shape == 1.0:
        assert agrees(found, float(renewal.renewal_ettr(19.0, 1.0, 185.6, 10.0)))


def test_a_restart_that_cannot_fail() -> None:
    """(M + R) (exp(L / M) - 1) a segment."""
    clock = FailureClock(185.6 * MIN, strikes_restarts=False)
    run = LongRunToSimulate(
        54 * DAY, 19 * MIN, (SimulatedCheckpointLevel(MIN),), (SimulatedFailureKind(1.0, 10 * MIN),), clock
    )
    assert agrees(simulate_long_runs(run, 3000, seed=9), 19 / ((185.6 + 10) * np.expm1(20 / 185.6)))


def test_airesim_takes_as_long_as_it_says() -> None:
    """6144 h of work, 11,145.6 failures of 20 min each: 9865.97 h, of which 3715.2 h recovering; nothing is lost."""
    clock = FailureClock(6144 * HOUR / 11_145.6, strikes_restarts=False)
    found = simulate_long_runs(
        LongRunToSimulate(
            6144 * HOUR, 1.0, (SimulatedCheckpointLevel(0.0),), (SimulatedFailureKind(1.0, 20 * MIN),), clock
        ),
        10,
        seed=13,
    )
    assert found.wall_s.mean() / HOUR == pytest.approx(9865.97, rel=5e-3)
    assert found.seconds["restart"].mean() / HOUR == pytest.approx(3715.2, rel=0.01)
    assert found.ettr == pytest.approx(0.6228, abs=3e-3)


def test_many_weibull_nodes_fail_like_poisson_once_they_are_old() -> None:
    base = (10 * DAY, 1140.0, (SimulatedCheckpointLevel(60.0),), (SimulatedFailureKind(1.0, 600.0),))
    old = simulate_long_runs(LongRunToSimulate(*base, FailureClock(11136.0, shape=0.7, num_nodes=256)), 400, seed=10)
    expected = float(renewal.renewal_ettr(1140.0, 60.0, 11136.0, 600.0))
    assert old.ettr == pytest.approx(expected, abs=0.006)
    new = simulate_long_runs(
        LongRunToSimulate(*base, FailureClock(11136.0, shape=0.7, num_nodes=256, new_nodes=True)), 400, seed=10
    )
    assert new.ettr < old.ettr - 0.01  # infant mortality
    rate = old.failures.sum() / old.wall_s.sum()
    assert 1 / rate == pytest.approx(11136.0, rel=0.02)


def test_lemons_keep_the_mean_and_widen_the_spread() -> None:
    base = (30 * DAY, 1140.0, (SimulatedCheckpointLevel(60.0),), (SimulatedFailureKind(1.0, 600.0),))
    even = simulate_long_runs(LongRunToSimulate(*base, FailureClock(11136.0, num_nodes=64)), 3000, seed=11)
    mixed = simulate_long_runs(
        LongRunToSimulate(*base, FailureClock(11136.0, num_nodes=64, lemon_fraction=0.05, lemon_multiple=20.0)),
        3000,
        seed=11,
    )
    assert mixed.failures.mean() == pytest.approx(even.failures.mean(), rel=0.05)
    assert mixed.wall_s.std() > 2 * even.wall_s.std()


@settings(max_examples=40, deadline=None)
@given(
    tau=st.floats(60.0, 5000.0), delta=st.floats(0.0, 300.0), mtbf=st.floats(1e4, 1e6), restart=st.floats(0.0, 900.0),
    persist=st.floats(0.0, 600.0), every=st.integers(1, 5), num_spares=st.none() | st.integers(0, 3),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_every_second_is_accounted_for(
    tau: float, delta: float, mtbf: float, restart: float, persist: float, every: int, num_spares: int | None, seed: int
) -> None:
    levels = (
        SimulatedCheckpointLevel(delta, persist_s=persist),
        SimulatedCheckpointLevel(2 * delta, every=every, persist_s=2 * persist),
    )
    kinds = (SimulatedFailureKind(0.5, restart), SimulatedFailureKind(0.5, 2 * restart, level=1, takes_node=True))
    run = LongRunToSimulate(20 * tau, tau, levels, kinds, FailureClock(mtbf), num_spares=num_spares, repair_s=3600.0)
    found = simulate_long_runs(run, 20, seed=seed)
    total = np.sum([found.seconds[part] for part in PARTS], axis=0)
    assert total == pytest.approx(found.wall_s)
    assert all((found.seconds[part] >= 0).all() for part in PARTS)
    assert found.seconds["productive"] == pytest.approx(20 * tau)
    assert found.seconds["checkpoint"].min() >= (20 - 20 // every) * delta + 20 // every * 2 * delta - 1e-6
    if num_spares is None:
        assert found.seconds["waiting"].max() == 0
    found.ledger()


def test_without_failures_nothing_is_random() -> None:
    run = LongRunToSimulate(
        10_000.0, 1000.0, (SimulatedCheckpointLevel(100.0),), (SimulatedFailureKind(1.0, 50.0),), FailureClock(np.inf)
    )
    found = simulate_long_runs(run, 5)
    assert found.wall_s.tolist() == [11_000.0] * 5
    assert found.failures.sum() == 0
    assert found.standard_error == 0.0


def test_the_last_segment_is_what_is_left() -> None:
    """2500 s of work in segments of 1000 s: two whole ones and half of one, each with its checkpoint."""
    args = (2500.0, 1000.0, (SimulatedCheckpointLevel(100.0),), (SimulatedFailureKind(1.0, 50.0),))
    assert simulate_long_runs(LongRunToSimulate(*args, FailureClock(np.inf)), 5).wall_s.tolist() == [2800.0] * 5
    found = simulate_long_runs(LongRunToSimulate(*args, FailureClock(900.0)), 40_000, seed=14)
    # 900 e^(50/900) (2 (e^(1100/900) - 1) + e^(600/900) - 1) = 951.415 (2 * 2.394723 + 0.947734)
    assert abs(found.wall_s.mean() - 5458.44) < Z * found.wall_s.std() / 200
    assert found.seconds["productive"].tolist() == [2500.0] * 40_000
    assert min(found.seconds[part].min() for part in PARTS) >= 0


def test_one_segment_without_checkpoint_is_work_that_starts_over() -> None:
    run = LongRunToSimulate(
        7200.0, 1e9, (SimulatedCheckpointLevel(0.0),), (SimulatedFailureKind(1.0, 0.0),), FailureClock(7200.0)
    )
    found = simulate_long_runs(run, 40_000, seed=12)
    assert found.wall_s.mean() == pytest.approx(float(renewal.expected_uncheckpointed_work_s(7200.0, 7200.0)), rel=0.02)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"work_s": 0.0}, "work_s"), ({"interval_s": -1.0}, "interval_s"), ({"num_spares": -1}, "num_spares"),
        ({"kinds": (SimulatedFailureKind(0.4, 1.0),)}, "sum to 0.4"),
        ({"kinds": (SimulatedFailureKind(1.0, -1.0),)}, "restart_s"),
        ({"kinds": (SimulatedFailureKind(1.0, 1.0, level=1),)}, "level"),
        ({"levels": (SimulatedCheckpointLevel(-1.0),)}, "block_s"),
        ({"levels": (SimulatedCheckpointLevel(1.0, persist_s=-1.0),)}, "persist_s"),
    ],
)  # fmt: skip
def test_what_makes_no_run_is_refused(change: dict[str, object], said: str) -> None:
    sound: dict[str, object] = {
        "work_s": 1e4, "interval_s": 1e3, "levels": (SimulatedCheckpointLevel(1.0),),
        "kinds": (SimulatedFailureKind(1.0, 1.0),),
        "clock": FailureClock(1e4),
    }  # fmt: skip
    with pytest.raises(SpecError, match=said):
        LongRunToSimulate(**{**sound, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [({"mtbf_s": 0.0}, "mtbf_s"), ({"shape": 0.0}, "shape"), ({"num_nodes": 0}, "num_nodes"),
     ({"lemon_fraction": 0.1}, "num_nodes"), ({"lemon_fraction": 2.0, "num_nodes": 4}, "lemon_fraction")],
)  # fmt: skip
def test_what_makes_no_clock_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        FailureClock(**{"mtbf_s": 1e4, **change})  # type: ignore[arg-type]


def test_a_run_that_never_ends_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mofa.faults.simulate.MAX_FAILURES", 50)
    with pytest.raises(SpecError, match="hardly gets on"):
        simulate_long_runs(
            LongRunToSimulate(
                1e6, 1e5, (SimulatedCheckpointLevel(0.0),), (SimulatedFailureKind(1.0, 10.0),), FailureClock(100.0)
            ),
            3,
        )
