"""What is done about uneven loads without scheduling tokens: nothing, dropping, replicas by past loads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.routing.balance.place import is_placement_check_due
from mofa.routing.balance.setup import BalanceSetup
from mofa.routing.placement import Placement, placement_packed_by_load

FloatA = NDArray[np.float64]
IntA = NDArray[np.int64]


def tokens_per_gpu_without_balancing(inputs: IntA, setup: BalanceSetup) -> IntA:
    """Tokens of all GPUs where every expert-parallel group keeps to itself. (I, L, E, G) -> (I, L, G)

    >>> inputs = np.array([[[[7, 0, 0, 0], [0, 0, 2, 0], [0, 0, 0, 2], [0, 1, 0, 0]]]])
    >>> tokens_per_gpu_without_balancing(inputs, BalanceSetup(4, 4, 2)).tolist()
    [[[7, 1, 2, 2]]]
    """
    shape = inputs.shape
    groups = inputs.reshape(*shape[:3], setup.num_merged_ep_groups, setup.ep).sum(axis=-1)
    ranks = groups.reshape(*shape[:2], setup.ep, setup.experts_per_gpu, setup.num_merged_ep_groups).sum(axis=3)
    return np.asarray(np.swapaxes(ranks, 2, 3).reshape(*shape[:2], setup.num_gpus))


def token_flow_without_balancing(inputs: IntA, placement: Placement, ep: int) -> IntA:
    """Tokens from each GPU to each GPU under plain expert parallelism. (E, G) -> (G, G)"""
    gpus = np.arange(placement.num_gpus)
    same = gpus[:, None] // ep == gpus // ep
    moves = inputs.T.astype(np.float64) @ placement.copies.astype(np.float64)  # BLAS has no whole numbers
    return np.asarray(moves * same, dtype=np.int64)


def drop_tokens_beyond_capacity(inputs: IntA, factor: float) -> IntA:
    """Tokens that are left where every GPU drops what is beyond ``ceil(tokens / E * factor)`` for an expert.

    >>> drop_tokens_beyond_capacity(np.array([[[[5], [3], [0], [0]]]]), 1.0).ravel().tolist()
    [2, 2, 0, 0]
    """
    most = np.ceil(inputs.sum(axis=2, keepdims=True) / inputs.shape[2] * factor)
    return np.asarray(np.minimum(inputs, most), dtype=np.int64)


def eplb_fullest_gpu_tokens(loads: IntA, plain_rows: IntA, setup: BalanceSetup) -> FloatA:
    """Tokens of the fullest GPU with replicas packed by the mean load of the past, each with an equal part.

    Parameters
    ----------
    loads
        Tokens of the experts of one layer. (I, E) [tokens]
    plain_rows
        Tokens of the GPUs under plain expert parallelism, which the first micro-batch has. (I, G) [tokens]
    setup
        The group; its GPUs have as many slots as without replicas.

    Returns
    -------
    FloatA
        (I,) [tokens]
    """
    every = setup.adaptation.interval
    fullest = plain_rows.max(axis=-1).astype(np.float64)
    placed: Placement | None = None
    for i, load in enumerate(loads):
        if is_placement_check_due(i, every):
            placed = placement_packed_by_load(
                loads[max(i - every, 0) : i].mean(axis=0), setup.num_gpus, setup.experts_per_gpu
            )
        if placed is not None:
            fullest[i] = (load / placed.copies.sum(axis=1) @ placed.copies).max()
    return np.asarray(fullest)
