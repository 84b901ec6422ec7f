"""Loads under uneven routing: numbers by hand, and what holds for every distribution."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import ValidationError

from mofa.cost.block.routing_loads import RoutingLoads
from mofa.cost.estimate import TableEstimator
from mofa.errors import SpecError
from mofa.replay.replayer import Replayer
from mofa.routing.rank_load import (
    cap_and_redistribute_shares,
    expert_shares,
    max_rank_rows_over_mean,
    rank_loads,
    rank_shares,
    routing_loads,
)
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.attention.gqa import GqaSpec
from mofa.specs.load import load_cluster, load_framework, load_workload
from mofa.specs.model import MlpSpec, ModelSpec, MoeSpec
from mofa.specs.overrides import parse_strategy
from mofa.specs.routing import RoutingSpec
from mofa.specs.strategy_defaults import complete_strategy


def moe_model(num_experts: int = 8, top_k: int = 2, num_layers: int = 4, dense: int = 0) -> ModelSpec:
    return ModelSpec(
        name="small", source="a test", num_layers=num_layers, hidden=64, vocab=128,
        attention=GqaSpec(num_heads=4, num_kv_heads=4, head_dim=16), mlp=MlpSpec(ffn_hidden=64),
        moe=MoeSpec(num_experts=num_experts, top_k=top_k, expert_hidden=32, first_k_dense=dense),
    )  # fmt: skip


DEGREES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
V3 = load_workload("deepseek-v3").model
UNEVEN = [
    RoutingSpec(kind="zipf", s=0.8),
    RoutingSpec(kind="zipf", s=10),
    RoutingSpec(kind="dirichlet", alpha=0.3),
    RoutingSpec(kind="dirichlet", alpha=1e-6),
    RoutingSpec(kind="lognormal", sigma=1),
    RoutingSpec(kind="lognormal", sigma=10),
]
routings = st.one_of(
    st.builds(RoutingSpec, kind=st.just("zipf"), s=st.floats(0, 10), seed=st.integers(0, 9), samples=st.just(16)),
    st.builds(RoutingSpec, kind=st.just("dirichlet"), alpha=st.floats(1e-6, 1e6), samples=st.just(16)),
    st.builds(RoutingSpec, kind=st.just("lognormal"), sigma=st.floats(0, 10), samples=st.just(16)),
)
models = st.sampled_from([(8, 2), (8, 1), (8, 8), (12, 5), (64, 6), (1, 1)]).map(lambda em: moe_model(*em))


def test_balanced_is_exactly_even() -> None:
    loads = routing_loads(RoutingSpec(), V3, DEGREES)
    assert loads.slowest_rows_over_mean == loads.quantile_rows_over_mean == dict.fromkeys(DEGREES, 1.0)
    assert np.all(rank_loads(RoutingSpec(), V3, 64, 4096, iterations=2) == 4096 * 8)


@pytest.mark.parametrize("routing", [RoutingSpec(kind="zipf", s=0), RoutingSpec(kind="lognormal", sigma=0)])
def test_no_skew_is_balanced(routing: RoutingSpec) -> None:
    loads = routing_loads(routing, V3, DEGREES)
    assert list(loads.slowest_rows_over_mean.values()) == pytest.approx([1.0] * 9, rel=1e-12)
    assert list(loads.quantile_rows_over_mean.values()) == pytest.approx([1.0] * 9, rel=1e-12)


@pytest.mark.parametrize("routing", UNEVEN, ids=lambda r: f"{r.kind} {r.s} {r.alpha} {r.sigma}")
def test_more_ranks_are_never_more_even(routing: RoutingSpec) -> None:
    """All experts on one rank are even; each rank that is split in two has a half with at least half of its tokens."""
    time = list(routing_loads(routing, V3, DEGREES).slowest_rows_over_mean.values())
    assert time[0] == pytest.approx(1.0)
    assert all(fewer <= more * (1 + 1e-9) for fewer, more in pairwise(time))


def test_zipf_by_hand_one_expert_a_rank() -> None:
    """s = 1 over 4 experts: 12/25, 6/25, 4/25, 3/25; top 1 has no cap below 1. The slowest rank has 4 * 12/25."""
    loads = routing_loads(RoutingSpec(kind="zipf", s=1), moe_model(4, 1), [1, 4])
    assert loads.slowest_rows_over_mean == pytest.approx({1: 1.0, 4: 1.92})
    assert loads.quantile_rows_over_mean == pytest.approx({1: 1.0, 4: 1.92})


def test_zipf_by_hand_two_experts_a_rank() -> None:
    """The first shares its rank with the second, third or fourth, each a third of the time: 18, 16 or 15 of 25 rows."""
    routing = RoutingSpec(kind="zipf", s=1, samples=30_000)
    assert routing_loads(routing, moe_model(4, 1), [2]).slowest_rows_over_mean[2] == pytest.approx(
        2 * (18 + 16 + 15) / 3 / 25, rel=0.003
    )


def test_zipf_by_hand_at_the_cap() -> None:
    """Top 3 cuts 12/25 to 1/3, and 6, 4 and 3 of 13 share the 2/3 left; top 2 leaves 12/25, which is below 1/2."""
    shares = expert_shares(RoutingSpec(kind="zipf", s=1), moe_model(4, 3), iterations=1)
    assert np.sort(shares[0, 0]) == pytest.approx([2 / 3 * 3 / 13, 2 / 3 * 4 / 13, 2 / 3 * 6 / 13, 1 / 3])
    shares = expert_shares(RoutingSpec(kind="zipf", s=1), moe_model(4, 2), iterations=1)
    assert np.sort(shares[0, 0]) == pytest.approx([0.12, 0.16, 0.24, 0.48])


def test_dirichlet_moments() -> None:
    """Variance of one share of Dirichlet(a, ..., a) over E: (E - 1) / (E**2 * (E * a + 1))."""
    shares = expert_shares(RoutingSpec(kind="dirichlet", alpha=0.5, samples=20_000), moe_model(8, 1))
    assert shares.var() == pytest.approx(7 / (64 * 5), rel=0.02)


def test_dirichlet_with_little_concentration_gives_all_to_one() -> None:
    """As alpha goes to 0 one expert gets everything: all at the cap, which top 1 doesn't lower."""
    shares = expert_shares(RoutingSpec(kind="dirichlet", alpha=1e-6), moe_model(8, 1))
    assert np.mean(shares.max(axis=-1)) == pytest.approx(1.0, abs=1e-3)


def test_lognormal_ratio_of_two_shares() -> None:
    """The log of the ratio of two shares is normal with standard deviation sigma * sqrt(2)."""
    shares = expert_shares(RoutingSpec(kind="lognormal", sigma=0.7, samples=20_000), moe_model(8, 1))
    assert np.log(shares[..., 0] / shares[..., 1]).std() == pytest.approx(0.7 * np.sqrt(2), rel=0.02)


def test_cap_of_memfine() -> None:
    """moe.md A.9: 32 ranks of 8 experts, top 8: e*s*min(8, 8) = 1,048,576 rows against a mean of 32,768."""
    moe = load_workload("deepseek-v3").model.moe
    assert moe is not None
    assert max_rank_rows_over_mean(moe, 32) * 4096 * 8 == 1_048_576
    assert max_rank_rows_over_mean(moe, 256) * 4096 * 8 == 4096 * 256  # one expert: all tokens of the group


def test_degrees_that_do_not_divide_are_named() -> None:
    with pytest.raises(SpecError, match=r"ep \(3\) must divide num_experts \(256\) of deepseek-v3"):
        routing_loads(RoutingSpec(), V3, [1, 3])
    with pytest.raises(SpecError, match=r"ep \(0\)"):
        rank_loads(RoutingSpec(), V3, 0, 4096)


def test_a_dense_model_has_no_uneven_routing() -> None:
    dense = load_workload("llama3-8b").model
    assert routing_loads(RoutingSpec(), dense, [1]).slowest_rows_over_mean == {1: 1.0}
    for call in (
        lambda: routing_loads(RoutingSpec(kind="zipf", s=1), dense, [1]),
        lambda: rank_loads(RoutingSpec(), dense, 1, 4096),
        lambda: expert_shares(RoutingSpec(), moe_model(dense=4)),
    ):
        with pytest.raises(SpecError, match="has no layer with experts"):
            call()


def test_too_many_draws_are_refused() -> None:
    with pytest.raises(SpecError, match=r"routing.samples \(100000\)"):
        routing_loads(RoutingSpec(kind="zipf", s=1, samples=100_000), moe_model(1024), [2])
    with pytest.raises(SpecError, match=r"iterations \(0\)"):
        rank_loads(RoutingSpec(), V3, 8, 4096, iterations=0)


def test_loads_are_the_statistics_of_rank_loads() -> None:
    routing = RoutingSpec(kind="lognormal", sigma=1, memory_quantile=0.99)
    ratios = rank_loads(routing, V3, 32, 4096) / (4096 * 8)
    loads = routing_loads(routing, V3, [32])
    assert ratios.shape == (5, 58, 32)  # 256 samples of 58 layers: 5 iterations
    assert loads.slowest_rows_over_mean[32] == pytest.approx(ratios.max(axis=-1).mean())
    assert np.mean(ratios <= loads.quantile_rows_over_mean[32] * (1 + 1e-12)) >= 0.99
    assert np.mean(ratios < loads.quantile_rows_over_mean[32] * (1 - 1e-12)) < 0.99


def test_every_layer_and_iteration_differs_and_the_seed_repeats() -> None:
    routing = RoutingSpec(kind="zipf", s=1)
    first = rank_loads(routing, V3, 256, 1, iterations=2)
    assert np.array_equal(first, rank_loads(routing, V3, 256, 1, iterations=2))
    assert not np.array_equal(first, rank_loads(RoutingSpec(kind="zipf", s=1, seed=1), V3, 256, 1, iterations=2))
    assert len(np.unique(first.reshape(-1, 256), axis=0)) == 2 * 58


@given(routings, models)
@settings(deadline=None, max_examples=60)
def test_totals_caps_and_order_of_degrees(routing: RoutingSpec, model: ModelSpec) -> None:
    moe = model.moe
    assert moe is not None
    num, k = moe.num_experts, moe.top_k
    degrees = [d for d in range(1, num + 1) if num % d == 0]
    loads = routing_loads(routing, model, degrees)
    assert loads.slowest_rows_over_mean[1] == loads.quantile_rows_over_mean[1] == 1.0
    for ep in degrees:
        rows = rank_loads(routing, model, ep, 100.0)
        assert rows.sum(axis=-1) == pytest.approx(np.full(rows.shape[:-1], ep * 100.0 * k), rel=1e-9)
        assert rows.min() >= 0
        assert rows.max() <= ep * 100.0 * min(k, num // ep) * (1 + 1e-9)
        assert 1.0 <= loads.slowest_rows_over_mean[ep] <= max_rank_rows_over_mean(moe, ep)
        assert 1.0 <= loads.quantile_rows_over_mean[ep] <= max_rank_rows_over_mean(moe, ep)
        for divisor in (d for d in degrees if ep % d == 0):
            assert loads.slowest_rows_over_mean[divisor] <= loads.slowest_rows_over_mean[ep] * (1 + 1e-9)
    if k == num:
        assert list(loads.slowest_rows_over_mean.values()) == pytest.approx([1.0] * len(degrees))


@given(st.floats(0, 5), st.floats(0, 5), st.sampled_from(["zipf", "lognormal"]))
@settings(deadline=None, max_examples=40)
def test_skew_grows_with_its_parameter(a: float, b: float, kind: str) -> None:
    """With one expert a rank the draws are the same but for the skew; with more, sums average it."""
    low, high = sorted((a, b))
    name = {"zipf": "s", "lognormal": "sigma"}[kind]
    less, more = (routing_loads(RoutingSpec.model_validate({"kind": kind, name: x}), V3, [8, 256]) for x in (low, high))
    assert less.slowest_rows_over_mean[256] <= more.slowest_rows_over_mean[256] * (1 + 1e-9)
    assert less.slowest_rows_over_mean[8] <= more.slowest_rows_over_mean[8] * (1 + 1e-3)


def test_dirichlet_grows_even_with_alpha() -> None:
    ratios = [
        routing_loads(RoutingSpec(kind="dirichlet", alpha=alpha), V3, [64]).slowest_rows_over_mean[64]
        for alpha in (0.01, 0.1, 1, 10)
    ]
    assert ratios == sorted(ratios, reverse=True)


shares_of_8 = arrays(float, (3, 8), elements=st.floats(0, 1)).map(
    lambda x: np.where(x.sum(-1, keepdims=True) > 0, x, 1.0) / np.where(x.sum(-1) > 0, x.sum(-1), 8.0)[:, None]
)


def test_capping_of_shares_too_small_for_the_reciprocal() -> None:
    tiny = np.array([1.0, 2e-311, 2e-311, 2e-311])
    assert cap_and_redistribute_shares(tiny, 0.5) == pytest.approx([0.5, 1 / 6, 1 / 6, 1 / 6])


@given(shares_of_8, st.integers(1, 8), st.permutations(range(8)))
@settings(deadline=None)
def test_capping_keeps_total_order_and_names(shares: np.ndarray, top_k: int, order: list[int]) -> None:
    capped = cap_and_redistribute_shares(shares, 1 / top_k)
    assert capped.max() <= 1 / top_k * (1 + 1e-12) and capped.min() >= 0
    assert capped.sum(axis=-1) == pytest.approx(np.ones(3), abs=1e-9)
    for before, after in zip(shares, capped, strict=True):
        assert np.all(np.diff(after[np.argsort(before, kind="stable")]) >= -1e-12)
        if before.max() <= 1 / top_k:
            assert np.array_equal(before, after)
    assert cap_and_redistribute_shares(shares[:, order], 1 / top_k) == pytest.approx(capped[:, order], abs=1e-9)
    assert cap_and_redistribute_shares(capped, 1 / top_k) == pytest.approx(capped, abs=1e-9)


@given(shares_of_8, st.integers(1, 8))
@settings(deadline=None)
def test_capping_agrees_with_its_slow_twin(shares: np.ndarray, top_k: int) -> None:
    """Cut what is above, hand the excess to the rest in proportion, repeat."""
    cap = 1 / top_k
    for before, after in zip(shares, cap_and_redistribute_shares(shares, cap), strict=True):
        slow, free = before.copy(), np.ones(8, dtype=bool)
        while (slow[free] > cap * (1 + 1e-12)).any():
            free &= slow <= cap * (1 + 1e-12)
            slow[~free] = cap
            left, rest = 1 - cap * (~free).sum(), before[free].sum()
            slow[free] = left * (before[free] / rest) if rest > 0 else left / max(free.sum(), 1)
        assert after == pytest.approx(slow, abs=1e-9)


def test_consecutive_experts_share_a_rank() -> None:
    assert rank_shares(np.arange(8.0), 4).tolist() == [1.0, 5.0, 9.0, 13.0]


def test_a_budget_per_rank_pads_rows_and_runs_steps_again() -> None:
    """Balanced: 1.5 times the rows, never again. Where 1 % of the micro-batches of a group are over the budget, a step
    of m of them runs again with 1 - 0.99^m, in the closed form and played; memory stays."""
    job = load_workload("mixtral-8x7b")
    even = routing_loads(RoutingSpec(rank_capacity_factor=1.5), job.model, [1, 4])
    assert (even.slowest_rows_over_mean, even.quantile_rows_over_mean) == ({1: 1.0, 4: 1.5}, {1: 1.0, 4: 1.5})
    assert (even.sent_bytes_over_mean[4], even.over_budget_fraction[4]) == (1.0, 0.0)
    machines, facts = load_cluster("h200-hgx", 8), load_framework("megatron")
    spec = complete_strategy(parse_strategy("pp=2 ep=4 micro_batch=1"), 8, facts, moe=True)
    row = checked_strategy_row(job, machines, facts, spec)
    draws = job.batch.global_batch // int(row.dp[0])  # of the one group that the 4 ranks of a stage make
    once, more = (
        TableEstimator(job, machines, facts, row, RoutingLoads({4: 1.5}, {4: 1.5}, over_budget_fraction=over))
        for over in ({}, {4: 0.01})
    )
    runs = 2.0 - 0.99**draws
    assert 1.1 < runs < 2.0
    assert more.breakdown().step_s[0] == pytest.approx(runs * once.breakdown().step_s[0])
    assert more.breakdown().device_bytes[0] == once.breakdown().device_bytes[0]
    played, again = Replayer(once).replayed_time, Replayer(more).replayed_time
    assert again.step_s == pytest.approx(runs * played.step_s)
    assert sum(again.exposed.values()) == pytest.approx(again.step_s)


def test_a_budget_per_rank_counts_the_draws_that_exceed_it(tmp_path: Path) -> None:
    """Two iterations of every layer, in one of them two of eight experts get all: ranks of 4 hold 2 experts each."""
    model = load_workload("mixtral-8x7b").model
    rows = [
        f"{i},{layer},{e},{100 if i == 0 else 400 * (e < 2)}" for i in (0, 1) for layer in range(32) for e in range(8)
    ]
    (tmp_path / "t.csv").write_text("iteration,layer,expert,tokens\n" + "\n".join(rows) + "\n")
    counts = {"kind": "counts", "file": str(tmp_path / "t.csv")}
    for budget, over in ((2.0, 0.5), (4.0, 0.0)):
        loads = routing_loads(RoutingSpec.model_validate({**counts, "rank_capacity_factor": budget}), model, [4])
        assert loads.over_budget_fraction[4] == over
        assert loads.slowest_rows_over_mean[4] == budget
        assert loads.quantile_rows_over_mean[4] == 4.0  # what runs again has no budget


def test_a_budget_per_rank_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(ValidationError, match="rank_capacity_factor drops nothing"):
        RoutingSpec(rank_capacity_factor=2.0, capacity_factor=2.0)
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        RoutingSpec(rank_capacity_factor=0.5)
