"""GPipe: all forwards, then all backwards, both in the order of the micro-batches (torch ``ScheduleGPipe``).

Huang et al. 2019, arXiv 1811.06965. Bubble over ideal time ``(pp - 1) / m`` for equal stages.
"""

from __future__ import annotations

from mofa.schedules.order import Action, Order, Program, Runtime
from mofa.schedules.point_to_point import exchanges_before_and_after_computations
from mofa.schedules.record import Schedule


def gpipe_order(pp: int, num_micro_batches: int) -> Order:
    """The order of every rank under GPipe: all forwards, then all backwards.

    Examples
    --------
    >>> [f"{a.kind}{a.micro_batch}" for a in gpipe_order(2, 2).ranks[0]]
    ['F0', 'F1', 'B0', 'B1']
    """
    m = range(num_micro_batches)
    ranks = tuple(
        (*(Action("F", r, i) for i in m), *(Action("B", r, i) for i in m)) for r in range(pp)
    )  # fmt: skip
    return Order(pp, 1, num_micro_batches, ranks)


def _order(runtime: Runtime, pp: int, vpp: int, num_micro_batches: int) -> Order:
    return gpipe_order(pp, num_micro_batches)


def _program(order: Order, runtime: Runtime) -> Program:
    return exchanges_before_and_after_computations(order)


def _in_flight(pp: int, vpp: int, num_micro_batches: int) -> list[list[int]]:
    return [[num_micro_batches] * vpp for _ in range(pp)]


GPIPE = Schedule(
    "gpipe", _order, _program, _in_flight, "GPipe", chunks_per_rank=1, forwards_first=True, has_closed_form=True
)
