"""Load of the ranks under token scheduling, per expert-parallel degree, for the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.routing_loads import LoadsWithTokenScheduling, RoutingLoads
from mofa.errors import SpecError
from mofa.routing.rank_load import expert_shares
from mofa.specs.model import ModelSpec
from mofa.specs.routing import RoutingSpec
from mofa.specs.shared_facts import load_shared_facts
from mofa.specs.strategy import MERGED_GROUPS

FloatA = NDArray[np.float64]
DRAWS = 64
"""Draws of a layer that the load under scheduling is the mean of."""
_UNITS = 1e6
"""Shares are counted in so many parts, for flows of whole numbers."""


def loads_with_token_scheduling(
    loads: RoutingLoads, routing: RoutingSpec, model: ModelSpec, degrees: Sequence[int]
) -> RoutingLoads:
    """Loads with those of token scheduling added.

    Parameters
    ----------
    loads
        Without scheduling.
    routing, model
        How tokens fall on the experts of which model.
    degrees
        Expert-parallel degrees; those that leave a rank fewer than two experts are left out. [ranks]

    Raises
    ------
    SpecError
        If the routing drops tokens.

    Notes
    -----
    Two expert-parallel groups merge, on the symmetric placement. The fullest GPU has the maximum induced density;
    every GPU is taken to be that full for memory, of which the routing's quantile over draws is held. Of a GPU's own
    tokens those for experts that it holds stay: it sends ``1 - s_g`` and receives at most ``density - s_g`` of the
    mean, with ``s_g`` the share of all tokens that its experts get, as every GPU's tokens are spread alike. Like
    :func:`~mofa.routing.rank_load.routing_loads` without the scatter of finitely many tokens. Prediction of the loads,
    migration and dropped tokens are left out.

    Examples
    --------
    >>> from mofa.specs.load import load_workload
    >>> model = load_workload("mixtral-8x7b").model
    >>> plain = RoutingLoads({4: 1.5}, {4: 2.0})
    >>> loads = loads_with_token_scheduling(plain, RoutingSpec(kind="zipf", s=0.5), model, [4])
    >>> load = loads.scheduled_over_replicas[4]
    >>> round(load.slowest_rows_over_mean, 2), round(load.sent_bytes_over_mean, 2), round(load.host_s, 6)
    (1.02, 0.96, 0.000344)
    """
    if routing.rank_capacity_factor is not None:
        raise SpecError("balancing micro_moe pads no rows; leave routing.rank_capacity_factor out")
    if routing.capacity_factor is not None:
        raise SpecError("balancing micro_moe drops no tokens; leave routing.capacity_factor out")
    scheduled = {
        ep: _scheduled(routing, model, ep)
        for ep in degrees
        if model.moe is not None and ep > 1 and model.moe.num_experts >= 2 * ep
    }
    return replace(loads, scheduled_over_replicas=scheduled)


def _scheduled(routing: RoutingSpec, model: ModelSpec, ep: int) -> LoadsWithTokenScheduling:
    # the solvers' library loads only where something is scheduled
    from mofa.routing.balance.flow_density import max_induced_density
    from mofa.routing.placement import symmetric_placement

    assert model.moe is not None
    num_experts, gpus = model.moe.num_experts, MERGED_GROUPS * ep
    shares = expert_shares(routing, model).reshape(-1, num_experts)
    if routing.kind == "balanced":
        shares = shares[:1]
    shares = shares[np.linspace(0, len(shares) - 1, min(len(shares), DRAWS)).astype(int)]
    placement = symmetric_placement(num_experts, gpus, ep)
    density = np.maximum(max_induced_density(placement.has_replica, np.round(shares * _UNITS)) / _UNITS * gpus, 1.0)
    hosted = shares @ placement.has_replica
    busiest = (np.maximum(density, 1.0)[:, None] - hosted).max(axis=-1)
    return LoadsWithTokenScheduling(
        slowest_rows_over_mean=float(density.mean()),
        quantile_rows_over_mean=float(np.quantile(density, routing.memory_quantile, method="inverted_cdf")),
        sent_bytes_over_mean=float(busiest.mean()) / (1.0 - 1.0 / gpus),
        host_s=token_scheduling_host_s(num_experts),
    )


def token_scheduling_host_s(num_experts: int, merged: int = MERGED_GROUPS) -> float:
    """Host time that scheduling adds to one layer and micro-batch, without the all-gather of the loads. [s]

    >>> round(token_scheduling_host_s(256) * 1e3, 3)
    0.468
    """
    facts = load_shared_facts().routing
    return facts.solve.value + facts.solve_per_replica.value * num_experts * merged + facts.scheduled_dispatch.value
