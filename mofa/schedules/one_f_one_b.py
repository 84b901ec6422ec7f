"""1F1B: a rank runs ``pp - r - 1`` forwards ahead, then a forward and a backward in turn.

Narayanan et al. 2019 (PipeDream-Flush), arXiv 2006.09503, and 2021, arXiv 2104.04473, section 2.2. Megatron's
``forward_backward_pipelining_without_interleaving`` and torch's ``Schedule1F1B`` compute in the same order. They differ
in what they send when (:mod:`mofa.schedules.point_to_point`).
"""

from __future__ import annotations

from mofa.schedules.order import Action, Order, Program, Runtime, one_f_one_b_after_warmup
from mofa.schedules.point_to_point import megatron_one_f_one_b_exchanges, torch_one_f_one_b_exchanges
from mofa.schedules.record import Schedule


def one_f_one_b_order(pp: int, num_micro_batches: int) -> Order:
    """The order of every rank under 1F1B: forwards up to its depth, then a backward and a forward in turn.

    Examples
    --------
    >>> [f"{a.kind}{a.micro_batch}" for a in one_f_one_b_order(2, 3).ranks[0]]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    m = num_micro_batches
    ranks = []
    for r in range(pp):

        def forward(micro_batch: int, rank: int = r) -> Action:
            return Action("F", rank, micro_batch)

        def backward(micro_batch: int, rank: int = r) -> Action:
            return Action("B", rank, micro_batch)

        ranks.append(tuple(one_f_one_b_after_warmup(min(pp - r - 1, m), m, forward, backward)))
    return Order(pp, 1, m, tuple(ranks))


def _order(runtime: Runtime, pp: int, vpp: int, num_micro_batches: int) -> Order:
    return one_f_one_b_order(pp, num_micro_batches)


def _program(order: Order, runtime: Runtime) -> Program:
    return torch_one_f_one_b_exchanges(order) if runtime == "pytorch" else megatron_one_f_one_b_exchanges(order)


def _in_flight(pp: int, vpp: int, num_micro_batches: int) -> list[list[int]]:
    return [[min(num_micro_batches, pp - rank)] * vpp for rank in range(pp)]


ONE_F_ONE_B = Schedule(
    "1f1b", _order, _program, _in_flight, "1F1B", chunks_per_rank=1, runs_in_megatron=True, is_searched=True,
    joins_send_and_receive=True, has_closed_form=True, steady_state_unit="micro-batch",
    # in a forward the input of the backward before it, which hangs on the output's graph, and that one's gradient; in a
    # backward the gradient alone (mofa/replay/memory/received_inputs.py)
    num_held_stage_inputs=2,
)  # fmt: skip
