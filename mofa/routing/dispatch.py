"""Which tokens go to which replica: the own GPU first, then the own node, then the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError
from mofa.routing.placement import Placement

IntA = NDArray[np.int64]


def route_tokens(placement: Placement, tokens: IntA, inputs: IntA, gpus_per_node: int) -> IntA:
    """Tokens from each GPU to each replica.

    Parameters
    ----------
    placement
        Which GPUs hold which experts.
    tokens
        Whole tokens of each replica, as scheduled. (R,) [tokens]
    inputs
        Tokens that each GPU has for each expert; over the GPUs they sum to those of the expert's replicas. (E, G)
    gpus_per_node
        GPUs of a node, numbered one after the other. [-]

    Returns
    -------
    IntA
        (source G, R) [tokens]

    Raises
    ------
    SpecError
        If an expert's inputs are not its replicas' tokens.

    Notes
    -----
    First ``min(input, replica)`` stays on the GPU. What is left is matched in order within each node and then over all
    GPUs: sources and replicas are lined up and cut at the same places, so that every GPU that knows all inputs finds
    the same ranges without exchanging more.

    References
    ----------
    MicroMoE, arXiv 2511.16947, algorithm 1 and appendix A.1 (own GPU, own node, others).

    Examples
    --------
    One expert on both GPUs; the first has 5 tokens and takes 3: 3 stay, 2 go.

    >>> route_tokens(Placement(np.array([[1, 1]])), np.array([3, 3]), np.array([[5, 1]]), 2).tolist()
    [[3, 2], [0, 1]]
    """
    experts, gpus = placement.experts_and_gpus
    total = np.bincount(experts, tokens, placement.num_experts).astype(np.int64)
    wrong = np.flatnonzero(total != inputs.sum(axis=1))
    if wrong.size:
        e, has, takes = wrong[0], inputs[wrong[0]].sum(), total[wrong[0]]
        raise SpecError(f"tokens: expert {e} has {has} tokens and replicas for {takes}; give as many")
    # replicas of an expert side by side, padded with none: few columns where there are many GPUs
    count = np.bincount(experts)
    column = np.arange(len(experts)) - np.repeat(np.cumsum(count) - count, count)
    capacity = np.zeros((placement.num_experts, int(count.max())), dtype=np.int64)
    capacity[experts, column] = tokens
    node = np.full(capacity.shape, -1)
    node[experts, column] = gpus // gpus_per_node
    flow = np.zeros((placement.num_experts, placement.num_gpus, capacity.shape[1]), dtype=np.int64)
    local = np.minimum(tokens, inputs[experts, gpus])
    flow[experts, gpus, column] = local
    left = inputs.copy()
    left[experts, gpus] -= local
    capacity[experts, column] -= local
    for start in range(0, placement.num_gpus, gpus_per_node):
        node_gpus = slice(start, start + gpus_per_node)
        on_node = node == start // gpus_per_node
        some = np.flatnonzero(on_node.any(axis=1))  # experts with a replica on the node
        matched = _in_order(left[some, node_gpus], np.where(on_node[some], capacity[some], 0))
        flow[some, node_gpus] += matched
        left[some, node_gpus] -= matched.sum(axis=2)
        capacity[some] -= matched.sum(axis=1)
    flow += _in_order(left, capacity)
    return np.asarray(flow[experts, :, column].T)


def gpu_to_gpu_tokens(placement: Placement, flow: IntA) -> IntA:
    """Tokens from each GPU to each GPU, of those to each replica. (G, R) -> (G, G) [tokens]"""
    out = np.zeros((placement.num_gpus, placement.num_gpus), dtype=np.int64)
    np.add.at(out.T, placement.experts_and_gpus[1], flow.T)
    return out


def _in_order(supply: IntA, demand: IntA) -> IntA:
    """Match supplies to demands in their order as far as both go. (E, n), (E, m) -> (E, n, m)"""
    s, d = np.cumsum(supply, axis=1), np.cumsum(demand, axis=1)
    ends = np.minimum(s[:, :, None], d[:, None, :])
    starts = np.maximum((s - supply)[:, :, None], (d - demand)[:, None, :])
    return np.asarray(np.maximum(ends - starts, 0))
