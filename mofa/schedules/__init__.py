"""Pipeline schedules: the list of them, a file for each, and what frameworks send and receive around them.

A schedule's file has its order and its record (:class:`mofa.schedules.record.Schedule`), which says what it does. Other
rooms ask the record and never compare names.
"""

from __future__ import annotations

from functools import lru_cache

from mofa.schedules.combined import COMBINED, INTERLEAVED_COMBINED, ONE_STAGE_COMBINED
from mofa.schedules.gpipe import GPIPE
from mofa.schedules.interleaved import INTERLEAVED
from mofa.schedules.interleaved_zero_bubble import INTERLEAVED_ZERO_BUBBLE
from mofa.schedules.one_f_one_b import ONE_F_ONE_B
from mofa.schedules.order import Action, Exchange, Item, Order, Placement, Program, Runtime
from mofa.schedules.record import Schedule
from mofa.schedules.zbv import ZBV

__all__ = [
    "Action", "Exchange", "Item", "Order", "Placement", "Program", "Runtime", "Schedule",
    "combined_schedule_name", "computation_order_of", "default_schedule", "program_with_exchanges",
]  # fmt: skip

_NAMED = (ONE_F_ONE_B, INTERLEAVED, GPIPE, ZBV, INTERLEAVED_ZERO_BUBBLE)
SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule for schedule in (*_NAMED, ONE_STAGE_COMBINED, INTERLEAVED_COMBINED)
}
"""All schedules by name. Tables of strategies hold the position in this list."""
SCHEDULE_NAMES = tuple(schedule.name for schedule in _NAMED)
"""Those that a strategy names. The others are what an option of the framework makes of one
(:func:`combined_schedule_name`)."""


def combined_schedule_name(schedule: str) -> str:
    """The schedule whose forwards run beside backwards, of one that Megatron-Core runs so.

    Examples
    --------
    >>> combined_schedule_name("interleaved")
    'interleaved combined'
    """
    return schedule + COMBINED


def default_schedule(vpp: int) -> str:
    """The schedule of a strategy that names none.

    Examples
    --------
    >>> default_schedule(1), default_schedule(2)
    ('1f1b', 'interleaved')
    """
    return (ONE_F_ONE_B if vpp == 1 else INTERLEAVED).name


@lru_cache(maxsize=8)
def computation_order_of(schedule: str, runtime: Runtime, pp: int, vpp: int, num_micro_batches: int) -> Order:
    """The order in which a runtime's ranks compute.

    Raises
    ------
    ValueError
        If the schedule does not exist with this vpp or these micro-batches.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"there is no schedule {schedule}")
    record = SCHEDULES[schedule]
    if record.chunks_per_rank is not None and record.chunks_per_rank != vpp:
        number = record.chunks_per_rank
        chunks = {1: "one chunk", 2: "two chunks"}.get(number, f"{number} chunks")
        instead = INTERLEAVED.name if number == 1 else f"vpp {number}"
        raise ValueError(f"schedule {schedule} has {chunks} a rank, not vpp {vpp}; take {instead}")
    if num_micro_batches < 1:
        raise ValueError(f"schedule {schedule} with {num_micro_batches} micro-batches; take at least 1")
    return record.order(runtime, pp, vpp, num_micro_batches)


def program_with_exchanges(order: Order, schedule: str, runtime: Runtime) -> Program:
    """An order with the runtime's sends and receives."""
    return SCHEDULES[schedule].program(order, runtime)
