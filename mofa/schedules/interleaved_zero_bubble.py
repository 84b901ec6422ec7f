"""Interleaved 1F1B with deferred weight gradients: PyTorch 2.11's ``ScheduleInterleavedZeroBubble`` (ZB-1P in rounds).

Qi et al. 2024, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2: the backward by inputs runs at once;
the weight gradients follow ``r`` backwards later and fill the bubble at the end.
"""

from __future__ import annotations

from mofa.schedules.interleaved import (
    interleaved_in_flight_micro_batches,
    interleaved_program,
    kth_forward_and_backward,
    micro_batches_per_round,
)
from mofa.schedules.order import Order, Runtime
from mofa.schedules.record import Schedule


def interleaved_zero_bubble_order(pp: int, vpp: int, num_micro_batches: int) -> Order:
    """The order of every rank under the interleaved zero-bubble schedule.

    Raises
    ------
    ValueError
        If the micro-batches do not fill whole rounds.

    Examples
    --------
    >>> [f"{a.kind}{a.micro_batch}" for a in interleaved_zero_bubble_order(2, 1, 3).ranks[1]]
    ['F0', 'I0', 'F1', 'I1', 'W0', 'F2', 'I2', 'W1', 'W2']
    """
    m, each = num_micro_batches, micro_batches_per_round(pp, num_micro_batches)
    total = m * vpp
    ranks = []
    for r in range(pp):
        forward, backward = kth_forward_and_backward(pp, vpp, each, r, "I")
        warmup = min((vpp - 1) * each + (pp - 1 - r), total)
        out = [forward(k) for k in range(warmup)]
        done = weights = 0
        for k in range(warmup, warmup + total):
            if k < total:
                out.append(forward(k))
            out.append(backward(done))
            done += 1
            if k - warmup >= r:
                out.append(backward(weights)._replace(kind="W"))
                weights += 1
        out += [backward(k)._replace(kind="W") for k in range(weights, done)]
        ranks.append(tuple(out))
    return Order(pp, vpp, m, tuple(ranks))


def _order(runtime: Runtime, pp: int, vpp: int, num_micro_batches: int) -> Order:
    return interleaved_zero_bubble_order(pp, vpp, num_micro_batches)


INTERLEAVED_ZERO_BUBBLE = Schedule(
    "interleaved-zb", _order, interleaved_program, interleaved_in_flight_micro_batches, "InterleavedZeroBubble",
    chunks_per_rank=None, defers_weight_gradients=True, gathers_by_chunk=True, runs_in_equal_rounds=True,
)  # fmt: skip
