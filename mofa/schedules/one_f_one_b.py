"""1F1B: a rank runs ``pp - r - 1`` forwards ahead, then a forward and a backward in turn.

Narayanan et al. 2019 (PipeDream-Flush), arXiv 2006.09503, and 2021, arXiv 2104.04473, section 2.2. Megatron's
``forward_backward_pipelining_without_interleaving`` and torch's ``Schedule1F1B`` compute in the same order; what they
send when differs (:mod:`mofa.schedules.point_to_point`).
"""

from __future__ import annotations

from mofa.schedules.order import Action, Order, one_forward_one_backward


def one_f_one_b(pp: int, num_micro_batches: int) -> Order:
    """The order of every rank.

    Examples
    --------
    >>> [f"{a.kind}{a.micro_batch}" for a in one_f_one_b(2, 3).ranks[0]]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    m = num_micro_batches
    ranks = []
    for r in range(pp):

        def forward(i: int, r: int = r) -> Action:
            return Action("F", r, i)

        def backward(i: int, r: int = r) -> Action:
            return Action("B", r, i)

        ranks.append(tuple(one_forward_one_backward(min(pp - r - 1, m), m, forward, backward)))
    return Order(pp, 1, m, tuple(ranks))
