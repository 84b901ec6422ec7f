"""Which tokens go to which replica: the own GPU first, then the own node, then the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError
from mofa.routing.placement import Placement

IntA = NDArray[np.int64]


def route_tokens(placement: Placement, tokens: IntA, inputs: IntA, gpus_per_node: int) -> IntA:
    """Tokens of each expert from each GPU to each GPU.

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
        (E, source G, target G) [tokens]

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
    [[[3, 2], [0, 1]]]
    """
    experts, gpus = placement.pairs
    room = np.zeros_like(inputs)
    room[experts, gpus] = tokens
    wrong = np.flatnonzero(room.sum(axis=1) != inputs.sum(axis=1))
    if wrong.size:
        e, has, takes = wrong[0], inputs[wrong[0]].sum(), room[wrong[0]].sum()
        raise SpecError(f"tokens: expert {e} has {has} tokens and replicas for {takes}; give as many")
    num_gpus = placement.num_gpus
    local = np.minimum(room, inputs)
    flow = np.zeros((len(inputs), num_gpus, num_gpus), dtype=np.int64)
    flow[:, np.arange(num_gpus), np.arange(num_gpus)] = local
    left, room = inputs - local, room - local
    for start in range(0, num_gpus, gpus_per_node):
        here = slice(start, start + gpus_per_node)
        matched = _in_order(left[:, here], room[:, here])
        flow[:, here, here] += matched
        left[:, here] -= matched.sum(axis=2)
        room[:, here] -= matched.sum(axis=1)
    return flow + _in_order(left, room)


def _in_order(supply: IntA, demand: IntA) -> IntA:
    """Match supplies to demands in their order as far as both go. (E, n), (E, n) -> (E, n, n)"""
    s, d = np.cumsum(supply, axis=1), np.cumsum(demand, axis=1)
    ends = np.minimum(s[:, :, None], d[:, None, :])
    starts = np.maximum((s - supply)[:, :, None], (d - demand)[:, None, :])
    return np.asarray(np.maximum(ends - starts, 0))
