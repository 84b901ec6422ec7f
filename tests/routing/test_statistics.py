"""Statistics by hand, and fits that find what was drawn."""

from __future__ import annotations

import numpy as np
import pytest

from mofa.routing.fitting import fit_each_distribution
from mofa.routing.rank_load import expert_shares
from mofa.routing.statistics import expert_loads_over_mean, load_statistics, rank_loads_over_mean
from mofa.specs.routing import RoutingSpec
from tests.routing.test_rank_load import moe_model

RATIOS = np.array([[[3.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]], [[0.0, 2.0, 1.0, 1.0], [1.0, 2.0, 1.0, 0.0]]])
"""Two iterations, two layers, four experts."""


def test_by_layer() -> None:
    """Layer 0: the fullest have 3 and 2; summed 3, 3, 1, 1 of a mean of 2: MaxVio 0.5. Layer 1: 1 and 2; 2, 3, 2, 1."""
    found = load_statistics(RATIOS, "layer")
    assert found.max_over_mean.tolist() == [2.5, 1.5]
    assert found.largest.tolist() == [3.0, 2.0] and found.smallest.tolist() == [0.0, 0.0]
    assert found.max_violation.tolist() == [0.5, 0.5]
    assert found.quantiles.shape == (2, 4) and found.quantiles[0, 0] == 1.0 and found.quantiles[0, -1] == 3.0


def test_by_iteration_unit_and_all() -> None:
    assert load_statistics(RATIOS, "iteration").max_over_mean.tolist() == [2.0, 2.0]
    assert load_statistics(RATIOS, "unit").largest.tolist() == [3.0, 2.0, 1.0, 1.0]
    every = load_statistics(RATIOS, "all")
    assert every.max_over_mean.tolist() == [2.0] and every.largest.tolist() == [3.0]
    assert every.max_violation.tolist() == [0.5]


def test_published_max_violation() -> None:
    """moe.md D.6, arXiv 2408.15664, table 2: max over mean 1.72 is MaxVio 0.72."""
    load = np.ones(64)
    load[3], load[4:] = 1.72, (64 - 3 - 1.72) / 60
    assert load_statistics(load[None, None], "all").max_violation[0] == pytest.approx(0.72)


def test_ranks_hold_consecutive_experts() -> None:
    shares = np.array([[[0.5, 0.1, 0.3, 0.1]]])
    assert rank_loads_over_mean(shares, 2)[0, 0] == pytest.approx([1.2, 0.8])
    assert expert_loads_over_mean(shares)[0, 0] == pytest.approx([2.0, 0.4, 1.2, 0.4])


@pytest.mark.parametrize(
    ("routing", "field", "near"),
    [
        (RoutingSpec(kind="zipf", s=1.2, samples=64), "s", 0.01),
        (RoutingSpec(kind="dirichlet", alpha=0.7, samples=512, seed=5), "alpha", 0.1),
        (RoutingSpec(kind="lognormal", sigma=0.6, samples=512, seed=5), "sigma", 0.1),
    ],
)
def test_a_fit_finds_what_was_drawn(routing: RoutingSpec, field: str, near: float) -> None:
    best = fit_each_distribution(expert_shares(routing, moe_model(64, 6)), top_k=6)[0]
    assert best.routing.kind == routing.kind
    assert getattr(best.routing, field) == pytest.approx(getattr(routing, field), rel=near)
    assert best.max_over_mean == pytest.approx(best.trace_max_over_mean, rel=0.15)


def test_fits_are_ordered_by_distance() -> None:
    fits = fit_each_distribution(expert_shares(RoutingSpec(kind="lognormal", sigma=1.5), moe_model(32, 2)), top_k=2)
    assert [f.distance for f in fits] == sorted(f.distance for f in fits) and len(fits) == 3
