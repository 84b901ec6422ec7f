"""The fullest GPU is the maximum induced density, rounded up to a token: any placement, many draws, both programs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mofa.routing.balance.flow import FlowScheduler
from mofa.routing.balance.flow_density import max_induced_density_by_flows
from mofa.routing.balance.place import asymmetric_placement
from mofa.routing.balance.replica_lp import UNLIKE, ReplicaScheduler, replicas_that_program_begins_with
from mofa.routing.balance.replica_program import ReplicaProgram
from mofa.routing.induced_density import induced_density
from mofa.routing.placement import (
    Placement,
    placement_packed_by_load,
    plain_placement,
    shuffled_placement,
    symmetric_placement,
)


def zipf(num_experts: int, s: float) -> np.ndarray:
    weights = np.arange(1.0, num_experts + 1) ** -s
    return weights / weights.sum()


PLACEMENTS: dict[str, Callable[[], Placement]] = {
    "symmetric, two replicas": lambda: symmetric_placement(32, 8, 4),
    "symmetric, four replicas": lambda: symmetric_placement(32, 16, 4),
    "no power of two": lambda: symmetric_placement(24, 12, 6),
    "shuffled": lambda: shuffled_placement(32, 16, 2, seed=3),
    "plain": lambda: plain_placement(32, 8, 4),
    "asymmetric": lambda: asymmetric_placement(zipf(32, 1.3), 8, 8),
    "packed": lambda: placement_packed_by_load(zipf(32, 1.0), 8, 8),  # may hold an expert twice on a GPU
    "everything everywhere": lambda: Placement(np.ones((12, 8), dtype=int)),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_density_within_a_token_over_many_draws(name: str) -> None:
    """Popularity of several skews that stays for a while and then moves, and batches of few tokens."""
    placement = PLACEMENTS[name]()
    rng = np.random.default_rng(7)
    lp, flow = ReplicaScheduler(placement), FlowScheduler(placement)
    for tokens, s in ((37, 0.3), (4001, 0.0), (4001, 0.5), (65_536, 0.8), (65_536, 1.0), (65_536, 1.6)):
        shares = rng.permutation(zipf(placement.num_experts, s))
        loads = rng.multinomial(tokens, shares, 8)
        density = induced_density(placement.has_replica, loads.astype(float))
        for load, least in zip(loads, density, strict=True):
            found = lp.schedule_micro_batch(load)
            assert found.optimum == pytest.approx(least, rel=1e-7)
            for schedule in (found, flow.schedule_micro_batch(load)):
                assert schedule.gpu_tokens.max() == np.ceil(least - 1e-6)
                assert schedule.gpu_tokens.sum() == tokens
                assert np.array_equal(np.bincount(lp.experts, schedule.tokens, placement.num_experts), load)


@pytest.mark.parametrize("ep", [32, 16, 8])
def test_64_gpus_and_256_experts(ep: int) -> None:
    """Two, four and eight replicas of every expert."""
    placement = symmetric_placement(256, 64, ep)
    rng = np.random.default_rng(ep)
    scheduler = ReplicaScheduler(placement)
    for s in (0.5, 0.9, 1.2):
        for load in rng.multinomial(64 * 8192, rng.permutation(zipf(256, s)), 3):
            least = max_induced_density_by_flows(placement.has_replica, load.astype(float))
            assert scheduler.schedule_micro_batch(load).gpu_tokens.max() == np.ceil(least - 1e-6)


def test_replicas_are_opened_where_prices_ask_for_them() -> None:
    """Both experts begin on GPU 0 and 1 or 2; then all tokens come to be for the first, in small steps that do not
    build the program anew, until only GPU 3 has room."""
    placement = Placement(np.array([[1, 1, 1, 1], [1, 1, 1, 0]]))
    scheduler = ReplicaScheduler(placement)
    scheduler.schedule_micro_batch(np.array([10, 990]))
    before = int(scheduler._open.sum())
    for first in range(50, 1000, 50):
        assert UNLIKE * 1000 >= 2 * 50
        load = np.array([first, 1000 - first])
        assert scheduler.schedule_micro_batch(load).gpu_tokens.max() == max(250, -(-int(load[1]) // 3))
    assert scheduler._open.sum() > before


def test_prices_prove_the_optimum() -> None:
    """LP duality, by hand: GPUs 0 and 1 hold expert 0 alone, so a token of it costs half a token of the fullest GPU."""
    placement = Placement(np.array([[1, 1, 0], [0, 0, 1]]))
    experts, gpus = placement.experts_and_gpus
    _, base = replicas_that_program_begins_with(placement, np.array([2.0, 1.0]))
    found = ReplicaProgram(experts, gpus, base, 3).solve(np.array([2.4, 0.6]))
    assert found.fullest_gpu_tokens == pytest.approx(1.2) and found.price == pytest.approx([0.5, 0.5, 0.0])
    again = ReplicaProgram(experts, gpus, base, 3)
    again.solve(np.array([1.0, 2.0]))
    warm = again.solve(np.array([2.4, 0.6]))  # the dual simplex comes to the same
    assert warm.fullest_gpu_tokens == pytest.approx(1.2) and warm.price == pytest.approx([0.5, 0.5, 0.0])
