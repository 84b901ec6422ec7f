"""The slowest of many GPUs: by draws, and what a step says that it waits for it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mofa
from mofa.cost.kernels.slowest_gpu import PaceSpread, expected_slowest
from mofa.errors import SpecError
from mofa.specs.fitted import expected_max_normal
from mofa.specs.hardware import ClusterSpec
from mofa.specs.overrides import parse_strategy

DRAWS = 4000
SPREADS = {
    "chips": PaceSpread(0.011, 0.0, 0.0, 8),
    "slow nodes": PaceSpread(0.0, 0.01, 0.1, 8),
    "both": PaceSpread(0.011, 0.01, 0.1, 8),
    "both, hardly slow": PaceSpread(0.011, 0.05, 0.02, 4),
    "all slow": PaceSpread(0.011, 1.0, 0.1, 8),
}
JOB = mofa.load_workload("llama3-8b", global_batch=256)
COMPUTING = ("gemm", "attention", "memory_bound", "recompute")


def drawn_slowest(spread: PaceSpread, num_gpus: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Slowest pace of products and of others in each of many jobs, every GPU and node drawn. (DRAWS,) each [-]"""
    rng = np.random.default_rng(seed)
    nodes = -(-num_gpus // spread.per_node)
    slow = spread.slowdown * (rng.random((DRAWS, nodes)) < spread.slow_share)
    gpus = np.repeat(slow, spread.per_node, axis=1)[:, :num_gpus]
    return 1.0 + (gpus + spread.chips * rng.standard_normal(gpus.shape)).max(axis=1), 1.0 + slow.max(axis=1)


@pytest.mark.parametrize("num_gpus", [4, 32, 256])
@pytest.mark.parametrize("name", SPREADS)
def test_the_slowest_is_what_draws_give(name: str, num_gpus: int) -> None:
    """Within four standard errors of the draws, and the 3 % of a deviation that Blom's approximation is off."""
    spread = SPREADS[name]
    for drawn, expected in zip(drawn_slowest(spread, num_gpus, 7), expected_slowest(spread, num_gpus), strict=True):
        error = 4.0 * drawn.std() / DRAWS**0.5 + 0.03 * spread.chips
        assert abs(drawn.mean() - expected) < error, (drawn.mean(), expected)


@given(
    st.floats(0.0, 0.05), st.floats(0.0, 1.0), st.floats(0.0, 0.5), st.sampled_from([1, 4, 8, 72]),
    st.integers(1, 200_000), st.integers(1, 200_000),
)  # fmt: skip
def test_more_gpus_are_never_faster(
    chips: float, share: float, slowdown: float, per_node: int, first: int, second: int
) -> None:
    spread = PaceSpread(chips, share, slowdown, per_node)
    few, many = (expected_slowest(spread, number) for number in sorted((first, second)))
    assert 1.0 - 1e-12 <= few.products <= many.products + 1e-6
    assert 1.0 <= few.others <= many.others <= 1.0 + slowdown + 1e-12


def cluster(num_gpus: int, **changes: object) -> ClusterSpec:
    """H100s of which the chips' spread, and that from step to step, are as said; clocks don't swing."""
    spreads = {"gpu.curves.chip_spread": 0.0, "gpu.curves.power_limit.clock_swing": 1e-6}
    return mofa.load_cluster("h100-hgx", num_gpus, {**spreads, **changes})


def parts(machines: ClusterSpec, strategy: str, *, replay: bool) -> dict[str, float]:
    """Seconds of a step by part."""
    plan = mofa.estimate(JOB, machines, parse_strategy(strategy), replay=replay)
    return {str(name): seconds for name, seconds in plan.time.exposed.items()}


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("strategy", ["micro_batch=1 recompute=full", "tp=2 micro_batch=2"])
def test_stragglers_are_what_a_step_of_equal_gpus_lacks(strategy: str, replay: bool) -> None:
    """The other parts stay those of a typical GPU, and the step is longer by what it waits."""
    equal, apart = (
        parts(cluster(64, **{"gpu.curves.chip_spread": spread}), strategy, replay=replay) for spread in (0.0, 0.01)
    )
    assert equal["stragglers"] == pytest.approx(0.0, abs=1e-6 * sum(equal.values()))
    assert apart["stragglers"] > 0.01 * sum(apart.values())
    assert sum(apart.values()) - sum(equal.values()) == pytest.approx(apart["stragglers"], rel=0.02)
    for name in COMPUTING:
        assert apart[name] == pytest.approx(equal[name], rel=1e-9)


def test_the_part_of_products_is_the_slowest_ones_lead() -> None:
    machines = cluster(64, **{"gpu.curves.chip_spread": 0.01})
    exposed = parts(machines, "micro_batch=1", replay=False)
    lead = 0.01 * expected_max_normal(64)
    most = lead * (exposed["gemm"] + exposed["attention"])
    assert 0.97 * most < exposed["stragglers"] <= most  # a few memory-bound kernels count as matrix products


def test_on_slow_nodes_all_kernels_take_longer() -> None:
    """Every node a tenth slower: a tenth of all computing is waited for."""
    slow = {"node.slow_nodes.share": 1.0, "node.slow_nodes.slowdown": 0.1}
    exposed = parts(cluster(64, **slow), "micro_batch=1 recompute=full", replay=True)
    assert exposed["stragglers"] == pytest.approx(0.1 * sum(exposed[name] for name in COMPUTING), rel=1e-6)


def test_what_differs_from_step_to_step_adds_in_squares() -> None:
    together = parts(
        cluster(64, **{"gpu.curves.chip_spread": 0.03, "gpu.curves.step_jitter": 0.04}), "tp=2 micro_batch=2",
        replay=False,
    )  # fmt: skip
    assert together == parts(cluster(64, **{"gpu.curves.chip_spread": 0.05}), "tp=2 micro_batch=2", replay=False)


def test_one_gpu_waits_for_nobody() -> None:
    job = mofa.load_workload("llama3-8b", global_batch=1)
    plan = mofa.estimate(job, mofa.load_cluster("h200-hgx", 1), {"micro_batch": 1, "recompute": "full"}, replay=False)
    assert plan.time.exposed["stragglers"] == 0.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"node.slow_nodes.share": 2, "node.slow_nodes.slowdown": 0.1}, "share.value"),
        ({"node.slow_nodes.share": 0.1}, "slow_nodes.slowdown is missing"),
        ({"node.slow_nodes.share": 0.1, "node.slow_nodes.slowdown": -0.1}, "slowdown.value"),
        ({"gpu.curves.step_jitter": -1}, "step_jitter.value"),
    ],
)
def test_spreads_that_cannot_be_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        mofa.load_cluster("h100-hgx", 8, change)
