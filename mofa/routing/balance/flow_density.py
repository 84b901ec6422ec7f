"""The maximum induced density of groups of any size, by maximum flows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.routing.induced_density import MAX_GPUS, induced_density

FloatA = NDArray[np.float64]
_SCALE = 2**20
"""Capacities are whole numbers: a token is so many units."""


def max_induced_density(hosts: NDArray[np.bool_], loads: FloatA) -> FloatA:
    """The maximum induced density, by all subsets of few GPUs or by flows. (..., E) -> (...) [tokens]

    >>> max_induced_density(np.array([[True, True, False], [False, False, True]]), np.array([[6.0, 2.0], [2.0, 3.0]]))
    array([3., 3.])
    """
    if hosts.shape[1] <= MAX_GPUS // 2:  # beyond, a table of all subsets takes longer than a few flows
        return induced_density(hosts, loads)
    flat = loads.reshape(-1, hosts.shape[0])
    return np.array([max_induced_density_by_flows(hosts, load) for load in flat]).reshape(loads.shape[:-1])


def max_induced_density_by_flows(hosts: NDArray[np.bool_], load: FloatA) -> float:
    """The maximum induced density by Dinkelbach's iteration over minimum cuts.

    Parameters
    ----------
    hosts
        Which GPUs hold which experts. (E, G)
    load
        Whole tokens of the experts. (E,) [tokens]

    Notes
    -----
    GPUs of capacity ``m`` take all tokens unless ``m`` is below the density; then the GPUs that a minimum cut leaves on
    the source's side are a subset whose own density is larger, and becomes the next ``m``. A handful of rounds.

    References
    ----------
    Dinkelbach 1967, "On nonlinear fractional programming", doi:10.1287/mnsc.13.7.492; Goldberg 1984, "Finding a maximum
    density subgraph".

    Examples
    --------
    >>> max_induced_density_by_flows(np.array([[True, True, False], [False, False, True]]), np.array([6.0, 2.0]))
    3.0
    """
    from ortools.graph.python.max_flow import SimpleMaxFlow

    num_experts, num_gpus = hosts.shape
    experts, gpus = np.nonzero(hosts)
    source, sink = num_experts + num_gpus, num_experts + num_gpus + 1
    total = float(load.sum())
    density = total / num_gpus
    units = np.round(load * _SCALE).astype(np.int64)
    tails = np.concatenate([np.full(num_experts, source), experts, num_experts + np.arange(num_gpus)])
    heads = np.concatenate([np.arange(num_experts), num_experts + gpus, np.full(num_gpus, sink)])
    while True:
        capacity = np.full(num_gpus, int(np.ceil(density * _SCALE)))
        flow = SimpleMaxFlow()
        flow.add_arcs_with_capacity(tails, heads, np.concatenate([units, np.full(len(experts), units.sum()), capacity]))
        flow.solve(source, sink)
        side = np.zeros(num_experts + num_gpus + 2, dtype=bool)
        side[flow.get_source_side_min_cut()] = True
        subset = side[num_experts:-2]
        if flow.optimal_flow() >= int(units.sum()) or not subset.any():
            return float(density)
        within = ~(hosts & ~subset).any(axis=1)
        larger = float(load[within].sum()) / int(subset.sum())
        if larger <= density:
            return float(density)
        density = larger
