"""Programs against their twins: SciPy's HiGHS, all subsets of GPUs, and each other."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from mofa.errors import SpecError
from mofa.routing.balance.communication_lp import CommunicationScheduler, TransferCosts
from mofa.routing.balance.flow import FlowScheduler
from mofa.routing.balance.flow_density import max_induced_density, max_induced_density_by_flows
from mofa.routing.balance.replica_lp import ReplicaScheduler
from mofa.routing.balance.rounding import round_replica_tokens
from mofa.routing.induced_density import induced_density
from mofa.routing.placement import Placement, plain_placement, symmetric_placement


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, np.ndarray]:
    """A few experts with one to all replicas on up to five GPUs, and three micro-batches of whole tokens."""
    num_gpus, num_experts = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    rows = [draw(st.sets(st.integers(0, num_gpus - 1), min_size=1)) for _ in range(num_experts)]
    copies = np.array([[int(g in row) for g in range(num_gpus)] for row in rows])
    loads = np.array([[draw(st.integers(0, 40)) for _ in rows] for _ in range(3)])
    loads[:, 0] += 1
    return Placement(copies), loads


def zipf(num_experts: int, s: float) -> np.ndarray:
    weights = np.arange(1.0, num_experts + 1) ** -s
    return weights / weights.sum()


def brute_force_density(hosts: np.ndarray, load: np.ndarray) -> float:
    """Equation 3 of MicroMoE as it is written: over every subset of the GPUs."""
    gpus = range(hosts.shape[1])
    subsets = [set(s) for n in range(1, hosts.shape[1] + 1) for s in combinations(gpus, n)]
    held = [set(np.flatnonzero(row)) for row in hosts]
    return max(sum(x for x, h in zip(load, held, strict=True) if h <= s) / len(s) for s in subsets)


def highs_optimum(placement: Placement, load: np.ndarray) -> float:
    """LPP 1 with all its variables, by SciPy's HiGHS."""
    experts, gpus = placement.experts_and_gpus
    num = len(experts)
    equal = (experts == np.arange(placement.num_experts)[:, None]).astype(float)
    upper = np.hstack(
        [(gpus == np.arange(placement.num_gpus)[:, None]).astype(float), -np.ones((placement.num_gpus, 1))]
    )
    found = linprog(
        np.append(np.zeros(num), 1.0), A_ub=upper, b_ub=np.zeros(placement.num_gpus),
        A_eq=np.hstack([equal, np.zeros((len(equal), 1))]), b_eq=load, method="highs",
    )  # fmt: skip
    return float(found.fun)


@given(placements())
@settings(deadline=None, max_examples=80)
def test_the_optimum_is_the_density_whoever_computes_it(case: tuple[Placement, np.ndarray]) -> None:
    placement, batches = case
    lp, flow = ReplicaScheduler(placement), FlowScheduler(placement)
    for load in batches:  # one after the other: warm
        density = brute_force_density(placement.has_replica, load)
        assert induced_density(placement.has_replica, load.astype(float)) == pytest.approx(density)
        assert max_induced_density_by_flows(placement.has_replica, load.astype(float)) == pytest.approx(density)
        assert highs_optimum(placement, load) == pytest.approx(density)
        for scheduler in (lp, flow):
            schedule = scheduler.schedule_micro_batch(load)
            whole = int(np.ceil(density - 1e-9))
            assert schedule.optimum == pytest.approx(density if scheduler is lp else whole, rel=1e-6)
            assert schedule.gpu_tokens.max() == whole
            assert schedule.tokens.min() >= 0
            assert np.array_equal(np.bincount(scheduler.experts, schedule.tokens, len(load)), load)


@given(placements())
@settings(deadline=None, max_examples=60)
def test_going_on_from_the_batch_before_changes_nothing(case: tuple[Placement, np.ndarray]) -> None:
    placement, batches = case
    warm = ReplicaScheduler(placement)
    for load in batches:
        assert warm.schedule_micro_batch(load).optimum == pytest.approx(
            ReplicaScheduler(placement).schedule_micro_batch(load).optimum, rel=1e-6
        )


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_rounding_keeps_sums_and_the_maximum_rounded_up(data: st.DataObject) -> None:
    """Of any fractional loads, not only a program's."""
    placement, batches = data.draw(placements())
    experts, gpus = placement.experts_and_gpus
    shares = np.array([data.draw(st.floats(0.01, 1)) for _ in experts])
    x = batches[0][experts] * shares / np.bincount(experts, shares)[experts]
    whole = round_replica_tokens(x, batches[0], experts, gpus, placement.num_gpus)
    assert np.array_equal(np.bincount(experts, whole, len(batches[0])), batches[0])
    most = np.bincount(gpus, x).max()
    assert np.bincount(gpus, whole).max() <= np.ceil(most - 1e-9)
    assert np.abs(whole - x).max() < 2.01


def communication_twin(placement: Placement, inputs: np.ndarray, weights: TransferCosts) -> float:
    """The communication-aware program over token flows, not over minima: source GPU to replica, by HiGHS."""
    experts, gpus = placement.experts_and_gpus
    num_gpus, num = placement.num_gpus, len(experts)
    node = np.arange(num_gpus) // weights.gpus_per_node
    flows = [(g, i) for g in range(num_gpus) for i in range(num)]
    size = len(flows) + 3  # comp, comm, cross
    equal, b_eq, upper, b_ub = [], [], [], []
    for e in range(placement.num_experts):
        for g in range(num_gpus):
            equal.append([1.0 * (s == g and experts[i] == e) for s, i in flows] + [0.0] * 3)
            b_eq.append(float(inputs[e, g]))
    for g in range(num_gpus):
        into = np.array([1.0 * (gpus[i] == g) for _, i in flows])
        stay = np.array([1.0 * (gpus[i] == g and s == g) for s, i in flows])
        out = np.array([1.0 * (s == g) for s, _ in flows])
        upper += [[*into, -1, 0, 0], [*(into - stay), 0, -1, 0], [*(out - stay), 0, -1, 0]]
    for n in range(int(node.max()) + 1):
        share = float(np.sum(node == n))
        into = np.array([1.0 * (node[gpus[i]] == n and node[s] != n) for s, i in flows])
        out = np.array([1.0 * (node[s] == n and node[gpus[i]] != n) for s, i in flows])
        upper += [[*into, 0, 0, -share], [*out, 0, 0, -share]]
    b_ub = [0.0] * len(upper)
    cost = np.append(np.zeros(len(flows)), [1.0, weights.intra, weights.inter])
    found = linprog(cost, A_ub=np.array(upper), b_ub=b_ub, A_eq=np.array(equal), b_eq=b_eq, method="highs")
    assert len(cost) == size
    return float(found.fun)


@given(placements(), st.integers(0, 5), st.sampled_from([(0.1, 1.0), (0.0, 0.0), (1.0, 0.0), (0.5, 4.0)]))
@settings(deadline=None, max_examples=60)
def test_communication_agrees_with_a_program_over_flows(
    case: tuple[Placement, np.ndarray], seed: int, costs: tuple[float, float]
) -> None:
    placement, batches = case
    weights = TransferCosts(*costs, gpus_per_node=2)
    scheduler = CommunicationScheduler(placement, weights)
    rng = np.random.default_rng(seed)
    for load in batches:
        inputs = np.array([rng.multinomial(x, np.full(placement.num_gpus, 1 / placement.num_gpus)) for x in load])
        schedule = scheduler.schedule_micro_batch(inputs)
        assert schedule.optimum == pytest.approx(communication_twin(placement, inputs, weights), rel=1e-5, abs=1e-5)
        assert np.array_equal(np.bincount(scheduler.experts, schedule.tokens, len(load)), load)


def test_without_weights_it_is_the_replica_program() -> None:
    placement = symmetric_placement(32, 8, 4)
    inputs = (
        np.random.default_rng(0).multinomial(2048, np.arange(1, 33) ** -1.2 / (np.arange(1, 33) ** -1.2).sum(), 8).T
    )
    plain = ReplicaScheduler(placement).schedule_micro_batch(inputs.sum(axis=1))
    free = CommunicationScheduler(placement, TransferCosts(0.0, 0.0)).schedule_micro_batch(inputs)
    assert free.optimum == pytest.approx(plain.optimum, rel=1e-6)
    dear = CommunicationScheduler(placement, TransferCosts(1.0, 1.0)).schedule_micro_batch(inputs)
    assert dear.gpu_tokens.max() >= free.gpu_tokens.max() and dear.sent <= free.sent


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        (np.ones(3), "are of 3 experts, the placement has 4"),
        (np.array([1, 2, -1, 0]), "expert 2 has -1 tokens"),
        (np.array([1, 2.5, 1, 0]), "expert 1 has 2.5 tokens"),
        (np.array([1, np.nan, 1, 0]), "expert 1 has nan tokens"),
        (np.zeros(4), "all are 0"),
    ],
)
def test_wrong_loads_are_named(loads: np.ndarray, message: str) -> None:
    for scheduler in (ReplicaScheduler(plain_placement(4, 4, 2)), FlowScheduler(plain_placement(4, 4, 2))):
        with pytest.raises(SpecError, match=message):
            scheduler.schedule_micro_batch(loads)


def test_wrong_inputs_are_named() -> None:
    scheduler = CommunicationScheduler(plain_placement(4, 4, 2), TransferCosts())
    with pytest.raises(SpecError, match=r"inputs: have shape \(4, 3\)"):
        scheduler.schedule_micro_batch(np.ones((4, 3)))
    with pytest.raises(SpecError, match="not finite"):
        scheduler.schedule_micro_batch(np.full((4, 4), np.nan))


def test_loads_that_are_not_the_fractions_sums_are_refused() -> None:
    with pytest.raises(SpecError, match="those of expert 0 don't sum"):
        round_replica_tokens(np.array([3.0, 3.0]), np.array([4, 2]), np.array([0, 0]), np.array([0, 1]), 2)


def test_many_gpus_take_the_flow() -> None:
    """12 GPUs: both ways to the density, and the whole of a group of 64."""
    placement = symmetric_placement(24, 12, 6)
    load = np.random.default_rng(1).integers(0, 1000, 24).astype(float)
    assert max_induced_density_by_flows(placement.has_replica, load) == pytest.approx(
        float(induced_density(placement.has_replica, load))
    )
    assert max_induced_density(placement.has_replica, np.stack([load, load])).shape == (2,)
    large = symmetric_placement(256, 64, 32)
    load = np.random.default_rng(2).multinomial(65536, np.arange(1, 257) ** -0.9 / (np.arange(1, 257) ** -0.9).sum())
    assert ReplicaScheduler(large).schedule_micro_batch(load).optimum == pytest.approx(
        float(max_induced_density(large.has_replica, load.astype(float)))
    )
    with pytest.raises(ValueError, match="num_gpus"):
        induced_density(large.has_replica, load.astype(float))
