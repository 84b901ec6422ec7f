"""Interleaved 1F1B: every rank holds ``vpp`` chunks and works through them in groups of micro-batches.

Narayanan et al. 2021, arXiv 2104.04473, section 2.2: bubble over ideal time ``(pp - 1) / (m vpp)`` for equal stages.
"""

from __future__ import annotations

from collections.abc import Callable

from mofa.schedules.order import Action, Compute, Order, Program, Runtime, one_f_one_b_after_warmup
from mofa.schedules.point_to_point import overlapped_exchanges, torch_multi_stage_exchanges
from mofa.schedules.record import Schedule


def megatron_interleaved_order(pp: int, vpp: int, num_micro_batches: int, group: int | None = None) -> Order:
    """The interleaved order of Megatron-Core 0.16.1: groups of ``microbatch_group_size_per_vp_stage`` micro-batches, pp
    if ``group`` is absent.

    The last group is smaller if the group does not divide the micro-batches (``schedules.get_schedule_table``). Rank r
    runs ``2 (pp - r - 1) + (vpp - 1) group`` chunk forwards ahead; one more precedes its first backward.

    Raises
    ------
    ValueError
        If Megatron refuses the group's size or the last group's (schedules.py:996-1015).

    Examples
    --------
    >>> [f"{a.kind}{a.stage}.{a.micro_batch}" for a in megatron_interleaved_order(2, 2, 2).ranks[1]]
    ['F1.0', 'F1.1', 'F3.0', 'B3.0', 'F3.1', 'B3.1', 'B1.0', 'B1.1']
    """
    m, group = num_micro_batches, group or pp
    if not pp <= group <= m:
        raise ValueError(f"interleaved: groups of {group} micro-batches; take from pp ({pp}) to all of them ({m})")
    if 0 < m % group < pp:
        raise ValueError(
            f"interleaved: {m} micro-batches in groups of {group} leave {m % group} for the last; "
            f"take a number that leaves none or at least pp ({pp})"
        )
    table = [
        (i, chunk) for start in range(0, m, group) for chunk in range(vpp) for i in range(start, min(start + group, m))
    ]
    ranks = []
    for r in range(pp):

        def forward(position: int, rank: int = r) -> Action:
            return Action("F", table[position][1] * pp + rank, table[position][0])

        def backward(position: int, rank: int = r) -> Action:
            return Action("B", (vpp - 1 - table[position][1]) * pp + rank, table[position][0])

        warmup = min((pp - r - 1) * 2 + (vpp - 1) * group, m * vpp)
        ranks.append(tuple(one_f_one_b_after_warmup(warmup, m * vpp, forward, backward)))
    return Order(pp, vpp, m, tuple(ranks))


def micro_batches_per_round(pp: int, num_micro_batches: int) -> int:
    """Micro-batches of a round of PyTorch's multi-stage schedules.

    Raises
    ------
    ValueError
        If the micro-batches are no multiple of the number of rounds, ``m // pp``.
    """
    count = max(1, num_micro_batches // pp)
    if num_micro_batches % count:
        raise ValueError(
            f"{num_micro_batches} micro-batches in {count} rounds; take a multiple of the rounds, such as of pp ({pp})"
        )
    return num_micro_batches // count


def torch_interleaved_order(pp: int, vpp: int, num_micro_batches: int) -> Order:
    """The order of PyTorch 2.11's ``ScheduleInterleaved1F1B``: rounds of about pp micro-batches.

    Examples
    --------
    >>> torch_interleaved_order(4, 2, 8) == megatron_interleaved_order(4, 2, 8)
    True
    """
    m, each = num_micro_batches, micro_batches_per_round(pp, num_micro_batches)
    ranks = []
    for r in range(pp):
        ranks.append(tuple(one_f_one_b_after_warmup(
            min((vpp - 1) * each + 2 * (pp - 1 - r), m * vpp), m * vpp, *kth_forward_and_backward(pp, vpp, each, r, "B")
        )))  # fmt: skip
    return Order(pp, vpp, m, tuple(ranks))


def kth_forward_and_backward(
    pp: int, vpp: int, each: int, rank: int, kind: Compute
) -> tuple[Callable[[int], Action], Callable[[int], Action]]:  # fmt: skip
    """The k-th forward and the k-th backward of a rank in rounds of ``each`` micro-batches."""

    def forward(position: int) -> Action:
        turn, i = divmod(position, each * vpp)
        return Action("F", i // each * pp + rank, turn * each + i % each)

    def backward(position: int) -> Action:
        turn, i = divmod(position, each * vpp)
        return Action(kind, (vpp - 1 - i // each) * pp + rank, turn * each + i % each)

    return forward, backward


def interleaved_program(order: Order, runtime: Runtime) -> Program:
    """An order of several chunks a rank with a runtime's sends and receives."""
    return torch_multi_stage_exchanges(order) if runtime == "pytorch" else overlapped_exchanges(order)


def interleaved_in_flight_micro_batches(pp: int, vpp: int, num_micro_batches: int) -> list[list[int]]:
    """Micro-batches that each chunk of each rank holds when the first backward begins: by rank and chunk.

    Rank r runs ``2 (pp - r - 1) + (vpp - 1) pp`` chunk forwards ahead; one more precedes its first backward.

    Examples
    --------
    >>> interleaved_in_flight_micro_batches(2, 2, 8)
    [[3, 2], [2, 1]]
    """
    if vpp == 1:
        return [[min(num_micro_batches, pp - rank)] for rank in range(pp)]
    each, out = micro_batches_per_round(pp, num_micro_batches), [[0] * vpp for _ in range(pp)]
    for rank, chunks in enumerate(out):
        for i in range(min((pp - rank - 1) * 2 + (vpp - 1) * each + 1, num_micro_batches * vpp)):
            chunks[(i // each) % vpp] += 1
    return out


def _order(runtime: Runtime, pp: int, vpp: int, num_micro_batches: int) -> Order:
    return (
        torch_interleaved_order(pp, vpp, num_micro_batches)
        if runtime == "pytorch"
        else megatron_interleaved_order(pp, vpp, num_micro_batches)
    )


INTERLEAVED = Schedule(
    "interleaved", _order, interleaved_program, interleaved_in_flight_micro_batches, "Interleaved1F1B",
    chunks_per_rank=None, runs_in_megatron=True, is_searched=True, gathers_by_chunk=True, runs_in_equal_rounds=True,
    steady_state_unit="round",
    # in a backward: the output that was sent, the next input that is received meanwhile, and the gradient that the
    # backward before sent
    num_held_stage_inputs=3,
)  # fmt: skip
