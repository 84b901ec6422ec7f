"""Plays: the paper's smaller group, schemes by hand, and the order between them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mofa.errors import SpecError
from mofa.routing.balance.baselines import eplb_fullest_gpu_tokens
from mofa.routing.balance.inputs import (
    deal_tokens_to_gpus,
    draw_tokens_per_gpu,
    token_shares_of_source_counts,
    tokens_per_gpu_of_source_counts,
)
from mofa.routing.balance.place import PlacementAdaptationRule
from mofa.routing.balance.setup import BalanceSetup
from mofa.routing.balance.token_scheduling import SCHEMES, play_micro_batches
from mofa.routing.placement import Placement
from mofa.search.experts.balance import expert_shares_by_popularity
from mofa.specs.routing import RoutingSpec


def zipf_inputs(s: float, setup: BalanceSetup, micro_batches: int = 20, assignments: int = 65_536) -> np.ndarray:
    shares = expert_shares_by_popularity(RoutingSpec(kind="zipf", s=s), setup.num_experts)
    every = np.broadcast_to(shares, (micro_batches, *shares.shape))
    return draw_tokens_per_gpu(every, assignments // setup.num_gpus, setup.num_gpus)


def test_the_papers_smaller_group_balances_perfectly_at_zipf_one_half() -> None:
    """moe.md C.7: 8 GPUs, 32 experts, symmetric placement, s below 1; 65,536 tokens over 8 GPUs leave no remainder."""
    setup = BalanceSetup(32, 8, 4)
    played = play_micro_batches(zipf_inputs(0.5, setup), setup)
    assert np.all(played.max_over_mean["micro_moe"] == 1.0)
    assert np.all(played.max_over_mean["plain"] > 1.7)


@pytest.mark.parametrize("solver", ["lp", "flow", "communication"])
def test_the_fullest_gpu_is_the_density_within_a_token(solver: str) -> None:
    setup = BalanceSetup(32, 8, 4, solver=solver)  # type: ignore[arg-type]
    played = play_micro_batches(zipf_inputs(1.3, setup), setup)
    if solver == "communication":  # it may trade balance for what is sent
        assert played.gap_tokens.min() >= 0
        return
    assert played.gap_tokens.min() >= 0 and played.gap_tokens.max() < 1
    assert np.all(played.max_over_mean["lower_bound"] > 1.2)


def test_plain_by_hand() -> None:
    """Two groups of two GPUs with one expert a GPU each pair; group 0 sends 7 + 1, group 1 sends 2 + 2."""
    setup = BalanceSetup(4, 4, 2)
    inputs = np.zeros((1, 1, 4, 4), dtype=int)
    inputs[0, 0, 0, 0], inputs[0, 0, 3, 1] = 7, 1  # GPUs 0 and 1: seven for expert 0, one for expert 3
    inputs[0, 0, 1, 2], inputs[0, 0, 2, 3] = 2, 2
    played = play_micro_batches(inputs, setup)
    assert played.rank_ratios["plain"][0, 0] == pytest.approx(np.array([7, 1, 2, 2]) / 3)
    # GPU 0 keeps its seven; GPU 1's one is for its own expert; GPU 2 keeps two; GPU 3's two are its own
    assert played.sent["plain"][0, 0] == 0.0


def test_what_plain_sends_by_hand() -> None:
    setup = BalanceSetup(4, 4, 2, gpus_per_node=1)
    inputs = np.zeros((1, 1, 4, 4), dtype=int)
    inputs[0, 0, 2, 0] = 8  # GPU 0's tokens are for the experts of GPU 1, in its group
    played = play_micro_batches(inputs, setup)
    assert played.sent["plain"][0, 0] == played.crossing["plain"][0, 0] == 8 / 2


def test_capacity_drops_per_source_gpu_by_hand() -> None:
    """4 experts, 8 tokens a GPU, factor 1: two of each expert are kept of (5, 3, 0, 0): 2 + 2 of 8."""
    setup = BalanceSetup(4, 4, 2, capacity_factor=1.0)
    inputs = np.zeros((1, 1, 4, 4), dtype=int)
    inputs[0, 0, 0], inputs[0, 0, 1] = 5, 3
    played = play_micro_batches(inputs, setup)
    assert played.dropped_fraction == pytest.approx(0.5)
    assert played.max_over_mean["capacity"][0, 0] == pytest.approx(2 * 4 / 8)


def test_adaptive_placement_settles_at_the_mean_where_symmetric_cannot() -> None:
    """moe.md C.7: always balanced with adaptive re-placement, beyond Zipf 1."""
    setup = BalanceSetup(32, 8, 4, adaptation=PlacementAdaptationRule(interval=5))
    played = play_micro_batches(zipf_inputs(1.5, setup), setup)
    assert played.max_over_mean["micro_moe"].mean() > 1.5
    assert played.settled is not None and played.settled < 1.005
    assert len(played.moved) >= 1 and max(played.moved) <= setup.experts_per_gpu


def test_eplb_follows_the_past() -> None:
    setup = BalanceSetup(32, 8, 4, adaptation=PlacementAdaptationRule(interval=5))
    played = play_micro_batches(zipf_inputs(1.0, setup), setup)
    eplb, plain = played.max_over_mean["eplb"], played.max_over_mean["plain"]
    assert np.array_equal(eplb[0], plain[0]) and np.all(eplb[1:] < plain[1:])


def test_eplb_by_hand() -> None:
    """4 experts on 4 GPUs of two slots; the past has (80, 20, 20, 0): counts 4, 2, 1, 1 by 20, 10, 20, 0 a replica.

    Packed from the heaviest: 20 of expert 0 on each GPU, then 20 of expert 2, 10 and 10 of expert 1, 0 of expert 3.
    With (40, 40, 20, 20) the parts are 10, 20, 20, 20, and every GPU has 10 + 20 tokens.
    """
    setup = BalanceSetup(4, 4, 2)
    loads = np.array([[80, 20, 20, 0], [40, 40, 20, 20]])
    plain = np.array([[50, 10, 50, 10], [40, 20, 40, 20]])
    assert eplb_fullest_gpu_tokens(loads, plain, setup).tolist() == [50.0, 30.0]


def test_own_placement_by_hand() -> None:
    """Two experts of 60 and 20 tokens, both replicas of each on the same two GPUs: nothing can flow between pairs."""
    apart = Placement(np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]))
    inputs = np.zeros((1, 1, 4, 4), dtype=int)
    inputs[0, 0, 0], inputs[0, 0, 1] = 15, 5
    found = play_micro_batches(inputs, BalanceSetup(4, 4, 2, placement=apart))
    assert found.max_over_mean["micro_moe"][0, 0] == found.max_over_mean["lower_bound"][0, 0] == 30 / 20
    with pytest.raises(SpecError, match="placement: is of 4 experts on 4 GPUs, the group has 32 on 8"):
        BalanceSetup(32, 8, 4, placement=apart)
    with pytest.raises(SpecError, match="placement: GPU 0 has 4 replicas, and a GPU holds 2"):
        BalanceSetup(4, 4, 2, placement=Placement(np.ones((4, 4), dtype=int)))


def test_source_ranks_become_gpus() -> None:
    by_source = np.arange(2 * 3 * 4).reshape(1, 2, 3, 4)
    assert np.array_equal(tokens_per_gpu_of_source_counts(by_source, 4), by_source)
    folded = tokens_per_gpu_of_source_counts(by_source, 2)
    assert folded[0, 0, 0].tolist() == [0 + 1, 2 + 3]
    dealt = tokens_per_gpu_of_source_counts(by_source, 8)
    assert np.array_equal(dealt.reshape(1, 2, 3, 4, 2).sum(axis=-1), by_source)
    shares = token_shares_of_source_counts(by_source.astype(float), 8)
    assert np.array_equal(shares[..., 0::2], shares[..., 1::2]) and shares.sum(axis=2) == pytest.approx(
        np.ones((1, 2, 8))
    )
    idle = token_shares_of_source_counts(np.array([[[[3.0, 0.0], [1.0, 0.0]]]]), 2)
    assert idle[0, 0, :, 1].tolist() == [0.75, 0.25]
    for wrong in (tokens_per_gpu_of_source_counts, token_shares_of_source_counts):
        with pytest.raises(SpecError, match=r"column source_rank: 4 ranks are no multiple and no part .* 6 GPUs"):
            wrong(by_source, 6)


@given(st.floats(0, 2), st.integers(0, 99), st.sampled_from([(8, 4, 2), (12, 6, 3), (16, 8, 2)]))
@settings(deadline=None, max_examples=20)
def test_scheduling_is_never_worse_than_not(s: float, seed: int, size: tuple[int, int, int]) -> None:
    """Nor better than the mean; sums of tokens stay."""
    experts, gpus, ep = size
    setup = BalanceSetup(experts, gpus, ep, seed=seed)
    shares = np.broadcast_to(expert_shares_by_popularity(RoutingSpec(kind="zipf", s=s), experts), (3, 1, experts))
    played = play_micro_batches(draw_tokens_per_gpu(shares, 100, gpus, seed), setup)
    assert set(played.max_over_mean) == set(SCHEMES)
    assert np.all(played.max_over_mean["micro_moe"] >= 1.0)
    assert played.rank_ratios["micro_moe"].sum(axis=-1) == pytest.approx(np.full((3, 1), gpus))
    assert played.rank_ratios["plain"].sum(axis=-1) == pytest.approx(np.full((3, 1), gpus))
    assert np.all(played.gap_tokens < 1)


def test_a_trace_is_played_as_counted() -> None:
    loads = np.array([[[10, 5, 1, 0]], [[4, 4, 4, 4]]])
    assert np.array_equal(deal_tokens_to_gpus(loads, 4).sum(axis=-1), loads)


def test_groups_that_cannot_be_scheduled() -> None:
    for wrong, message in (
        ({"num_gpus": 4}, r"gpus \(4\) must be above ep"),
        ({"num_experts": 4}, "a GPU holds one of 4 experts"),
        ({"capacity_factor": 0.0}, "capacity factor"),
        ({"num_experts": 10**9}, "are not scheduled"),
    ):
        with pytest.raises(SpecError, match=message):
            BalanceSetup(**{"num_experts": 32, "num_gpus": 8, "ep": 4, **wrong})  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"interval \(0\)"):
        PlacementAdaptationRule(interval=0)
    with pytest.raises(SpecError, match="threshold"):
        PlacementAdaptationRule(threshold=float("nan"))
    with pytest.raises(SpecError, match="tokens of 4 experts and 4 GPUs"):
        play_micro_batches(np.ones((1, 1, 4, 4), dtype=int), BalanceSetup(32, 8, 4))
    with pytest.raises(SpecError, match="micro-batch 0, layer 0: has no tokens"):
        play_micro_batches(np.zeros((1, 1, 4, 4), dtype=int), BalanceSetup(4, 4, 2))
    with pytest.raises(SpecError, match="play fewer micro-batches"):
        draw_tokens_per_gpu(np.full((1000, 60, 256), 1 / 256), 10, 64)
    with pytest.raises(SpecError, match=r"tokens \(0\)"):
        draw_tokens_per_gpu(np.full((1, 1, 4), 0.25), 0, 4)
