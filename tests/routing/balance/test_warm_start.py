"""What makes a solve take less than a millisecond: few steps of the simplex. benchmarks/balance_speed.py has times."""

from __future__ import annotations

import numpy as np
import pytest

from mofa.routing.balance.replica_lp import ReplicaScheduler
from mofa.routing.balance.replica_program import FloatA, ReplicaProgram, ReplicaSolution
from mofa.routing.placement import symmetric_placement


@pytest.mark.parametrize("ep", [32, 8])
@pytest.mark.parametrize("s", [0.5, 0.9])
def test_a_micro_batch_goes_on_from_the_one_before(ep: int, s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Popular experts stay and tokens are drawn anew: a tenth of the steps that a solve takes by itself."""
    num_pivots = 0
    solve = ReplicaProgram.solve

    def counted(self: ReplicaProgram, loads: FloatA) -> ReplicaSolution:
        nonlocal num_pivots
        solution = solve(self, loads)
        num_pivots += solution.num_pivots
        return solution

    monkeypatch.setattr(ReplicaProgram, "solve", counted)
    shares = np.arange(1.0, 257) ** -s
    loads = np.random.default_rng(0).multinomial(64 * 8192, shares / shares.sum(), 31)
    warm, placement = ReplicaScheduler(symmetric_placement(256, 64, ep)), symmetric_placement(256, 64, ep)
    warm_pivots, cold_pivots = [], []
    for load in loads:
        for scheduler, pivots in ((warm, warm_pivots), (ReplicaScheduler(placement), cold_pivots)):
            num_pivots = 0
            scheduler.schedule_micro_batch(load)
            pivots.append(num_pivots)
    assert warm_pivots[0] == cold_pivots[0] > 0
    assert np.median(warm_pivots[1:]) < np.median(cold_pivots) / 10
    assert max(warm_pivots[1:]) < min(cold_pivots)
