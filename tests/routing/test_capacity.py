"""Dropping and budgets by hand, and what holds for all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mofa.routing.capacity import rerun_fraction, shares_under_capacity
from mofa.routing.rank_load import expert_shares, routing_loads
from mofa.specs.routing import RoutingSpec
from tests.routing.test_rank_load import moe_model


def test_loads_under_a_capacity_by_hand() -> None:
    """Zipf s = 1 over 4 experts, top 1: 12, 6, 4 and 3 of 25. A capacity of 1 keeps 6.25, 6, 4, 3: the slowest rank of
    one expert has 1.0 of the mean instead of 1.92, and 5.75 of 25 are dropped."""
    model = moe_model(4, 1)
    dropped = RoutingSpec(kind="zipf", s=1, capacity_factor=1.0)
    assert routing_loads(dropped, model, [4]).slowest_rows_over_mean[4] == pytest.approx(1.0)
    kept = shares_under_capacity(expert_shares(dropped, model, 1), 1.0)
    assert 1 - kept.sum(axis=-1) == pytest.approx(np.full((1, 4), 5.75 / 25))
    # everything on one rank: what is dropped is not computed
    assert routing_loads(dropped, model, [1]).slowest_rows_over_mean[1] == pytest.approx(19.25 / 25)


def test_padding_computes_the_capacity_on_every_rank() -> None:
    padded = RoutingSpec(kind="zipf", s=1, capacity_factor=1.5, pad_to_capacity=True)
    assert routing_loads(padded, moe_model(8, 2), [1, 8]).slowest_rows_over_mean == pytest.approx({1: 1.5, 8: 1.5})
    assert routing_loads(padded, moe_model(8, 2), [2]).quantile_rows_over_mean == pytest.approx({2: 1.5})


def test_a_balanced_load_is_padded_too() -> None:
    padded = RoutingSpec(capacity_factor=1.25, pad_to_capacity=True)
    assert routing_loads(padded, moe_model(8, 2), [4]).slowest_rows_over_mean == pytest.approx({4: 1.25})


@given(st.floats(0.1, 4), st.floats(0, 3))
def test_a_larger_capacity_drops_less(capacity: float, s: float) -> None:
    shares = expert_shares(RoutingSpec(kind="zipf", s=s, samples=4), moe_model(8, 2))
    kept, more = shares_under_capacity(shares, capacity), shares_under_capacity(shares, 2 * capacity)
    assert np.all(kept <= more) and np.all(more <= shares)
    assert kept.max() <= capacity / 8 * (1 + 1e-12)


def test_reruns_by_hand() -> None:
    ratios = np.array([[[1.0, 1.0], [1.4, 0.6]], [[1.1, 0.9], [1.0, 1.0]]])
    assert rerun_fraction(ratios, 1.2) == 0.5
    assert rerun_fraction(ratios, 1.2, micro_batches=3) == pytest.approx(1 - 0.5**3)
    assert rerun_fraction(ratios, 1.4) == 0.0
    assert rerun_fraction(ratios, 1.05) == 1.0


def test_padding_needs_a_capacity() -> None:
    with pytest.raises(ValidationError, match="pad_to_capacity needs capacity_factor"):
        RoutingSpec(pad_to_capacity=True)
    with pytest.raises(ValidationError):
        RoutingSpec(capacity_factor=0)
