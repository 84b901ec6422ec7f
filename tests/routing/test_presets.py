"""MemFine's seventh iteration, reconstructed: what was printed comes back out, and nothing else is claimed."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from mofa.routing.presets import MEMFINE_ITERATION_7, memfine_iteration_7_shares
from mofa.routing.rank_load import expert_shares, rank_loads, routing_loads
from mofa.specs.load import load_workload
from mofa.specs.routing import RoutingSpec
from tests.routing.test_rank_load import V3

PRESET = RoutingSpec.parse("memfine-iteration-7")


def test_the_printed_statistics_of_every_layer() -> None:
    """moe.md A.8, figure 2: p99, max and min of layers 4 to 15; the mean is 32 * 4096 * 8 / 256 = 4096 tokens."""
    counts = memfine_iteration_7_shares(12, 256) * 4096 * 256
    assert np.percentile(counts, 99, axis=-1) == pytest.approx(MEMFINE_ITERATION_7[:, 0])
    assert counts.max(axis=-1) == pytest.approx(MEMFINE_ITERATION_7[:, 1])
    assert counts.min(axis=-1) == pytest.approx(MEMFINE_ITERATION_7[:, 2])
    assert counts.mean(axis=-1) == pytest.approx(np.full(12, 4096.0))
    assert np.all(np.diff(counts, axis=-1) <= 0)


def test_layers_become_more_uneven_with_depth_and_no_expert_exceeds_all_tokens() -> None:
    """moe.md A.8: max over mean 7.7 in layer 4, 31.5 in layer 15; the cap is 32 * 4096 tokens, 32 times the mean."""
    shares = expert_shares(PRESET, load_workload("memfine-model-1").model, iterations=2)
    ratios = 256 * shares.max(axis=-1)
    assert shares.shape == (2, 13, 256)
    assert ratios[:, 0] == pytest.approx(7.74, abs=0.01) and ratios[:, -1] == pytest.approx(31.54, abs=0.01)
    assert not np.array_equal(shares[0].argmax(axis=-1), shares[1].argmax(axis=-1))
    assert ratios.max() <= 32


def test_other_numbers_of_experts_and_layers() -> None:
    for layers, experts in ((1, 8), (58, 64), (12, 512)):
        shares = memfine_iteration_7_shares(layers, experts)
        assert shares.shape == (layers, experts)
        assert shares.sum(axis=-1) == pytest.approx(np.ones(layers)) and shares.min() >= 0


def test_the_preset_reaches_memory_and_time() -> None:
    """On 32 ranks the straggler has several times the mean: below MemFine's implied 18 (moe.md D.6), a run's worst."""
    loads = routing_loads(PRESET, load_workload("memfine-model-1").model, [1, 32])
    assert loads.slowest_rows_over_mean[1] == 1.0
    assert 2.5 < loads.slowest_rows_over_mean[32] < loads.quantile_rows_over_mean[32] < 12
    assert rank_loads(PRESET, V3, 32, 4096, iterations=1).shape == (1, 58, 32)


@pytest.mark.parametrize(
    "text", ["zipf:-1", "zipf", "zipf:nan", "zipf:inf", "zipf:x", "uniform", "", "balanced:1", "memfine-iteration-8"]
)
def test_texts_that_are_no_routing(text: str) -> None:
    with pytest.raises((ValueError, ValidationError)):
        RoutingSpec.parse(text)


@pytest.mark.parametrize("text", ["balanced", "zipf:0.9", "dirichlet:0.5", "lognormal:1", "memfine-iteration-7"])
def test_text_and_back(text: str) -> None:
    assert str(RoutingSpec.parse(text)) == text
