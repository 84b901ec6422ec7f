"""Placements: the paper's examples, slots, local indices, replicas by load, and whatever does not fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mofa.errors import SpecError
from mofa.routing.balance.flow_density import max_induced_density
from mofa.routing.balance.place import PlacementAdaptationRule, asymmetric_placement, better_placement
from mofa.routing.cayley import edges_by_color, second_eigenvalue
from mofa.routing.placement import (
    Placement,
    placement_dealt_at_random,
    placement_packed_by_load,
    plain_placement,
    replica_counts,
    shuffled_placement,
    slots_per_gpu,
    symmetric_placement,
)


def adjacency(num_experts: int, num_gpus: int) -> np.ndarray:
    """Experts that two GPUs share."""
    copies = symmetric_placement(num_experts, num_gpus, num_gpus // 2).copies
    shared = copies.T @ copies
    np.fill_diagonal(shared, 0)
    return shared


def test_the_papers_graphs() -> None:
    """moe.md C.5: 8/8 a cycle, 16/32 the 4 x 4 torus, 8/16 K_4,4, 8/32 K_8 and the edges 01, 23, 45, 67."""
    cycle = adjacency(8, 8)
    assert all(cycle[i, (i + 1) % 8] == 1 for i in range(8)) and cycle.sum() == 16
    torus = adjacency(32, 16)
    for i in range(16):
        r, c = divmod(i, 4)
        neighbours = {((r + 1) % 4) * 4 + c, ((r - 1) % 4) * 4 + c, r * 4 + (c + 1) % 4, r * 4 + (c - 1) % 4}
        assert set(np.flatnonzero(torus[i])) == neighbours
    bipartite = adjacency(16, 8)
    assert np.linalg.eigvalsh(bipartite) == pytest.approx([-4, 0, 0, 0, 0, 0, 0, 4], abs=1e-9)
    complete = adjacency(32, 8)
    pairs = np.arange(8) ^ 1
    assert all(complete[i, j] == (2 if j == pairs[i] else 1) for i in range(8) for j in range(8) if i != j)


@pytest.mark.parametrize(
    ("experts", "gpus"), [(8, 8), (32, 16), (16, 8), (32, 8), (256, 64), (256, 128), (64, 32), (4, 2)]
)
def test_every_slot_holds_all_gpus_once(experts: int, gpus: int) -> None:
    """Replicas of an expert can have the same local index: consecutive ``ep`` experts share the GPUs among them."""
    copies = symmetric_placement(experts, gpus, gpus // 2).copies
    assert np.all(copies.sum(axis=1) == 2)
    assert np.all(copies.reshape(-1, gpus // 2, gpus).sum(axis=1) == 1)


def test_second_eigenvalue_is_the_graphs() -> None:
    orders, generators = (2, 8), ((0, 1), (0, 7), (1, 2), (1, 6), (1, 0))
    graph = np.zeros((16, 16))
    for edges in edges_by_color(orders, generators):
        for a, b in edges:
            graph[a, b] += 1
            graph[b, a] += 1
    assert second_eigenvalue(orders, generators) == pytest.approx(np.linalg.eigvalsh(graph)[-2])


def test_searched_graphs_are_no_worse_than_random_ones() -> None:
    """256 experts on 64 GPUs: 8 neighbours each. Random 8-regular graphs have about 2 * sqrt(7) = 5.3."""
    graph = adjacency(256, 64)
    assert np.linalg.eigvalsh(graph)[-2] < 2 * np.sqrt(7)


def test_plain_expert_parallelism_repeats() -> None:
    copies = plain_placement(8, 8, 4).copies
    assert np.flatnonzero(copies[3]).tolist() == [1, 5]
    assert np.all(copies.sum(axis=0) == 2)


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
@settings(deadline=None, max_examples=80)
def test_dealing_fills_every_slot_and_keeps_replicas_apart(ep: int, d: int, slots: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_experts, num_gpus = ep * slots, ep * d
    assert np.all(shuffled_placement(num_experts, num_gpus, ep, seed).copies.sum(axis=0) == slots)
    load = rng.pareto(1.0, num_experts)
    counts = replica_counts(load, num_gpus * slots, num_gpus)
    assert counts.sum() == num_gpus * slots and counts.min() >= 1 and counts.max() <= num_gpus
    for placed in (
        placement_dealt_at_random(load, counts, num_gpus, rng),
        placement_packed_by_load(load, num_gpus, slots),
    ):
        assert np.all(placed.copies.sum(axis=0) == slots) and np.all(placed.copies.sum(axis=1) >= 1)
    assert placement_dealt_at_random(load, counts, num_gpus, rng).copies.max() == 1


def test_greedy_replicas_are_the_least_maximum() -> None:
    """Giving the next replica to the fullest is optimal: against all ways to give 4 experts 8 replicas."""
    load = np.array([10.0, 7.0, 2.0, 1.0])
    ways = [np.array(w) for w in np.ndindex(5, 5, 5, 5) if sum(w) == 4]
    assert (load / replica_counts(load, 8, 8)).max() == min((load / (1 + w)).max() for w in ways)


def test_asymmetric_placement_balances_what_symmetric_does_not() -> None:
    """moe.md C.7: with known loads always balanced, where the symmetric placement is not (Zipf above 1)."""
    load = np.round(65536 * np.arange(1, 33) ** -1.5 / (np.arange(1, 33) ** -1.5).sum())
    before = max_induced_density(symmetric_placement(32, 8, 4).has_replica, load) / (load.sum() / 8)
    after = max_induced_density(asymmetric_placement(load, 8, 8).has_replica, load) / (load.sum() / 8)
    assert before > 1.5 and after == pytest.approx(1.0, abs=1e-6)


def test_adaptation_moves_only_past_its_threshold() -> None:
    placed = symmetric_placement(32, 8, 4)
    even = np.full((5, 32), 100.0)
    assert better_placement(placed, even, 8, PlacementAdaptationRule()) is None
    skewed = even.copy()
    skewed[:, 0] = 5000.0
    new = better_placement(placed, skewed, 8, PlacementAdaptationRule())
    assert new is not None and new.copies[0].sum() > 2
    assert placed.num_replicas_to_receive(new).sum() > 0 and placed.num_replicas_to_receive(placed).sum() == 0
    assert better_placement(placed, skewed, 8, PlacementAdaptationRule(threshold=100.0)) is None


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(SpecError, match=r"ep \(3\) must divide experts \(32\)"):
        slots_per_gpu(32, 8, 3)
    with pytest.raises(SpecError, match=r"gpus \(6\) must be a multiple of ep \(4\)"):
        symmetric_placement(32, 6, 4)
    with pytest.raises(SpecError, match=r"gpus \(4096\): a merged group"):
        symmetric_placement(32, 4096, 4)
    with pytest.raises(SpecError, match="placement: expert 1 has no GPU"):
        Placement(np.array([[1, 1], [0, 0]]))
    with pytest.raises(SpecError, match=r"replicas \(3\): 4 experts need a slot each"):
        replica_counts(np.ones(4), 3, 8)
    with pytest.raises(SpecError, match=r"replicas \(9\): 4 experts on 2 GPUs have at most 8"):
        replica_counts(np.ones(4), 9, 2)
    with pytest.raises(SpecError, match="load: is negative"):
        asymmetric_placement(np.array([1.0, -1.0]), 2, 1)
    with pytest.raises(SpecError, match=r"samples \(0\)"):
        asymmetric_placement(np.ones(2), 2, 1, samples=0)
