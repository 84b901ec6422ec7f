"""Pipeline schedules as orders: a file for each, and what the frameworks send and receive around them."""

from __future__ import annotations

from functools import lru_cache

from mofa.schedules.gpipe import gpipe
from mofa.schedules.interleaved import megatron, torch
from mofa.schedules.interleaved_zero_bubble import interleaved_zero_bubble
from mofa.schedules.one_f_one_b import one_f_one_b
from mofa.schedules.order import Action, Exchange, Item, Order, Program
from mofa.schedules.point_to_point import (
    megatron_one_f_one_b,
    overlapped,
    plain,
    torch_one_f_one_b,
    torch_runtime,
)
from mofa.schedules.zbv import zbv

__all__ = ["Action", "Exchange", "Item", "Order", "Program", "order_of", "program_of"]


@lru_cache(maxsize=8)
def order_of(schedule: str, framework: str, pp: int, vpp: int, num_micro_batches: int) -> Order:
    """The order in which a framework's ranks compute.

    Raises
    ------
    ValueError
        If the schedule can't be with this vpp or these micro-batches.
    """
    if schedule in ("gpipe", "1f1b") and vpp != 1:
        raise ValueError(f"schedule {schedule} has one chunk a rank, not vpp {vpp}; take interleaved")
    if schedule == "zbv" and vpp != 2:
        raise ValueError(f"schedule zbv has two chunks a rank, not vpp {vpp}; take vpp 2")
    if num_micro_batches < 1:
        raise ValueError(f"schedule {schedule} with {num_micro_batches} micro-batches; take at least 1")
    m = num_micro_batches
    if schedule == "gpipe":
        return gpipe(pp, m)
    if schedule == "1f1b":
        return one_f_one_b(pp, m)
    if schedule == "zbv":
        return zbv(pp, m)
    if schedule == "interleaved-zb":
        return interleaved_zero_bubble(pp, vpp, m)
    if schedule == "interleaved":
        return torch(pp, vpp, m) if framework == "torchtitan" else megatron(pp, vpp, m)
    raise ValueError(f"there is no schedule {schedule}")


def program_of(order: Order, schedule: str, framework: str) -> Program:
    """An order with the framework's sends and receives."""
    if schedule == "gpipe":
        return plain(order)
    if schedule == "1f1b":
        return torch_one_f_one_b(order) if framework == "torchtitan" else megatron_one_f_one_b(order)
    return torch_runtime(order) if framework == "torchtitan" else overlapped(order)
