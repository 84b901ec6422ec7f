"""Whole tokens from fractional replica loads."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError

FloatA = NDArray[np.float64]
IntA = NDArray[np.int64]
_NOISE = 1e-3
"""How far a solver's replica load may be from the exact one. [tokens]"""


def round_replica_tokens(x: FloatA, loads: IntA, experts: IntA, gpus: IntA, num_gpus: int) -> IntA:
    """Whole tokens of every replica: each expert's sum stays, no GPU exceeds the fractional maximum, rounded up.

    Parameters
    ----------
    x
        Fractional tokens of each replica. (R,) [tokens]
    loads
        Whole tokens of each expert, the sums of x. (E,) [tokens]
    experts, gpus
        Expert and GPU of each replica. (R,)
    num_gpus
        GPUs of the group.

    Returns
    -------
    IntA
        Tokens of each replica, each within two of x. (R,) [tokens]

    Notes
    -----
    Every replica keeps ``floor(x)``; what is left of each expert goes to its replicas as a maximum flow through GPUs
    whose room is the rounded-up maximum less what they have. The fractions are such a flow, and a flow with whole
    capacities has a whole solution, so there is always one.

    Examples
    --------
    >>> a = np.array
    >>> round_replica_tokens(a([1.5, 1.5, 1.5, 1.5]), a([3, 3]), a([0, 0, 1, 1]), a([0, 1, 1, 2]), 3).tolist()
    [2, 1, 2, 1]
    """
    from ortools.graph.python.max_flow import SimpleMaxFlow

    num_experts = len(loads)
    off = np.abs(np.bincount(experts, x, num_experts) - loads)
    if off.max() > num_gpus * _NOISE:
        raise SpecError(f"replica loads: those of expert {int(np.argmax(off))} don't sum to its tokens; pass its own")
    base = np.floor(np.maximum(x - _NOISE, 0.0)).astype(np.int64)
    left = loads - np.bincount(experts, base, num_experts).astype(np.int64)
    if not left.any():
        return base
    filled = np.bincount(gpus, base, num_gpus).astype(np.int64)
    most = float(np.bincount(gpus, x, num_gpus).max())
    source, sink = num_experts + num_gpus, num_experts + num_gpus + 1
    tails = np.concatenate([np.full(num_experts, source), experts, num_experts + np.arange(num_gpus)])
    heads = np.concatenate([np.arange(num_experts), num_experts + gpus, np.full(num_gpus, sink)])
    limit = math.ceil(most - num_gpus * _NOISE)
    while True:  # one token more only where the solver's noise hid it
        spare_tokens = np.maximum(limit - filled, 0)
        flow = SimpleMaxFlow()
        arcs = flow.add_arcs_with_capacity(tails, heads, np.concatenate([left, np.full(len(x), 2), spare_tokens]))
        flow.solve(source, sink)
        if flow.optimal_flow() == int(left.sum()):
            return np.asarray(base + flow.flows(arcs[num_experts : num_experts + len(x)]), dtype=np.int64)
        limit += 1
        assert limit <= math.ceil(most) + 1
