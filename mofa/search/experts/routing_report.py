"""Statistics of a routing load and the nearest distributions, as ``mofa show routing`` prints them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mofa.errors import SpecError
from mofa.routing.capacity import rerun_fraction, shares_under_capacity
from mofa.routing.counts import moe_layer_indices
from mofa.routing.fitting import fit_each_distribution
from mofa.routing.rank_load import expert_shares
from mofa.routing.statistics import QUANTILES, expert_loads_over_mean, load_statistics, rank_loads_over_mean
from mofa.specs.base import Spec
from mofa.specs.workload import WorkloadSpec


class LoadStatistics(Spec):
    """Loads over their mean of one layer, one iteration, one rank, or of everything. [-]"""

    group: int = Field(ge=0, description="Index of the layer in the model, of the iteration or of the rank, from 0.")
    max_over_mean: float = Field(description="The fullest, averaged over the rest. [-]")
    largest: float = Field(description="The largest that occurred. [-]")
    smallest: float = Field(description="The smallest that occurred. [-]")
    max_violation: float = Field(description="MaxVio of the load summed over iterations. [-]")
    quantiles: dict[str, float] = Field(description="Quantiles over everything else. [-]")


class FittedDistribution(Spec):
    """A distribution fitted to the load."""

    routing: str = Field(description="As --routing reads it.")
    distance: float = Field(ge=0, description="Mean difference of the ordered loads, over the mean load. [-]")
    max_over_mean: float = Field(description="Its fullest expert. [-]")
    given_max_over_mean: float = Field(description="The load's own. [-]")


class CapacityFigures(Spec):
    """Copies that a bound on experts would drop, and micro-batches that a budget of ranks would run twice."""

    factor: float = Field(gt=0, description="Multiple of an even share. [-]")
    dropped_fraction: float = Field(ge=0, le=1, description="Copies dropped by a capacity per expert. [-]")
    rerun_fraction: float = Field(ge=0, le=1, description="Micro-batches run twice under a budget per rank. [-]")


class RoutingReport(Spec):
    """The statistics of a routing load."""

    workload: str = Field(description="Name of the job.")
    routing: str = Field(description="How tokens fall on experts.")
    ep: int = Field(gt=0, description="Expert-parallel degree of the ranks. [ranks]")
    iterations: int = Field(gt=0, description="Iterations looked at. [-]")
    experts: LoadStatistics
    ranks: LoadStatistics
    by_layer: tuple[LoadStatistics, ...] = Field(description="Of ranks.")
    by_iteration: tuple[LoadStatistics, ...] = Field(description="Of ranks.")
    by_rank: tuple[LoadStatistics, ...]
    fits: tuple[FittedDistribution, ...] = Field(description="Nearest first.")
    capacity: tuple[CapacityFigures, ...]


FACTORS = (1.0, 1.25, 1.5, 2.0)


def describe_routing(workload: WorkloadSpec, ep: int, iterations: int | None = None) -> RoutingReport:
    """Statistics of a workload's routing load by layer, iteration and rank; the nearest distributions; capacities.

    Parameters
    ----------
    workload
        The job with its routing.
    ep
        Expert-parallel degree, a divisor of the experts. [ranks]
    iterations
        How many; all of a trace, or enough for the routing's samples.

    Raises
    ------
    SpecError
        If the model has no experts, or ep does not divide them.
    """
    moe = workload.model.moe
    if moe is None:
        raise SpecError(f"{workload.name}: has no experts; name a model that has")
    if ep < 1 or moe.num_experts % ep:
        raise SpecError(f"ep ({ep}) must divide num_experts ({moe.num_experts}); every rank holds equally many")
    shares = expert_shares(workload.routing, workload.model, iterations)
    experts, ranks = expert_loads_over_mean(shares), rank_loads_over_mean(shares, ep)
    fits = fit_each_distribution(shares, moe.top_k, workload.routing.seed)
    layers = moe_layer_indices(workload.model)
    by_layer = (row.model_copy(update={"group": int(layers[row.group])}) for row in _rows(ranks, "layer"))
    return RoutingReport(
        workload=workload.name, routing=str(workload.routing), ep=ep, iterations=len(shares),
        experts=_rows(experts, "all")[0], ranks=_rows(ranks, "all")[0], by_layer=tuple(by_layer),
        by_iteration=_rows(ranks, "iteration"), by_rank=_rows(ranks, "unit"),
        fits=tuple(
            FittedDistribution(
                routing=str(fit.routing), distance=fit.distance, max_over_mean=fit.max_over_mean,
                given_max_over_mean=fit.trace_max_over_mean,
            )
            for fit in fits
        ),
        capacity=tuple(
            CapacityFigures(
                factor=factor,
                dropped_fraction=min(
                    max(1.0 - float(shares_under_capacity(shares, factor).sum(axis=-1).mean()), 0.0), 1.0
                ),
                rerun_fraction=rerun_fraction(ranks, factor),
            )
            for factor in FACTORS
        ),
    )  # fmt: skip


def _rows(ratios: NDArray[np.float64], group_by: str) -> tuple[LoadStatistics, ...]:
    s = load_statistics(ratios, group_by)
    return tuple(
        LoadStatistics(
            group=int(s.group[i]), max_over_mean=float(s.max_over_mean[i]), largest=float(s.largest[i]),
            smallest=float(s.smallest[i]), max_violation=float(s.max_violation[i]),
            quantiles={f"{q:g}": float(x) for q, x in zip(QUANTILES, s.quantiles[i], strict=True)},
        )
        for i in range(len(s.group))
    )  # fmt: skip
