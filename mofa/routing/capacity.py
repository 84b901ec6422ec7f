"""What bounds a load by force: capacity per expert with dropped tokens, and a budget per rank with a second run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatA = NDArray[np.float64]


def shares_under_capacity(shares: FloatA, capacity_factor: float, *, pad: bool = False) -> FloatA:
    """Rows that experts compute under a capacity factor, as shares of all copies before any was dropped.

    Parameters
    ----------
    shares
        Shares of the experts before dropping, which sum to 1. (..., E) [-]
    capacity_factor
        Capacity of an expert over an even share. [-]
    pad
        Whether experts compute on zeros up to their capacity.

    Returns
    -------
    FloatA
        ``min(share, capacity_factor / E)``, or the capacity of every expert with padding; the sum is what is computed,
        and without padding 1 less the sum what is dropped. (..., E) [-]

    Notes
    -----
    Megatron-Core gives each expert ``ceil(copies of a source rank / E * capacity_factor)`` rows of that rank and drops
    what is beyond before the exchange. Here every source rank sends alike and the capacity is not rounded up; blocks
    with padded rows round it (:mod:`mofa.blocks.capacity_rows`).

    References
    ----------
    Megatron-Core, ``megatron/core/transformer/moe/moe_utils.py``, ``get_capacity`` and ``topk_routing_with_...``.

    Examples
    --------
    >>> shares_under_capacity(np.array([0.7, 0.2, 0.1, 0.0]), 1.0)
    array([0.25, 0.2 , 0.1 , 0.  ])
    >>> shares_under_capacity(np.array([0.7, 0.2, 0.1, 0.0]), 1.2, pad=True)
    array([0.3, 0.3, 0.3, 0.3])
    """
    capacity = capacity_factor / shares.shape[-1]
    return np.full_like(shares, capacity) if pad else np.minimum(shares, capacity)


def rerun_fraction(ratios: FloatA, rank_capacity_factor: float, micro_batches: int = 1) -> float:
    """Share of steps that run twice because a rank's rows exceeded its budget.

    Parameters
    ----------
    ratios
        Rows of the ranks over their mean, per iteration and layer. (I, L, ranks) [-]
    rank_capacity_factor
        Budget of a rank over its balanced rows. [-]
    micro_batches
        Of a step; each is a draw of its own. [-]

    Returns
    -------
    float
        Between 0 and 1; a step's time grows by this share, and the second run has no bound on memory. [-]

    Notes
    -----
    A step runs again if any rank in any layer of any micro-batch is over: ``1 - (1 - p)**micro_batches`` with ``p``
    the share of iterations that have one. Assumes independent micro-batches, which makes it an upper bound where the
    same ones are always over.

    References
    ----------
    Megatron-LM, ``docs/user-guide/features/paged_stash.md``: ``--moe-expert-rank-capacity-factor``; over budget on any
    rank, the step "reruns once without capacity padding and without paged stashing".

    Examples
    --------
    >>> ratios = np.array([[[1.2, 0.8]], [[1.0, 1.0]], [[1.6, 0.4]], [[1.1, 0.9]]])
    >>> rerun_fraction(ratios, 1.5), rerun_fraction(ratios, 1.5, 2), rerun_fraction(ratios, 2.0)
    (0.25, 0.4375, 0.0)
    """
    over = np.asarray((ratios > rank_capacity_factor).any(axis=(-1, -2)).mean())
    return float(1.0 - (1.0 - over) ** micro_batches)
