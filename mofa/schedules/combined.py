"""1F1B whose forwards run beside backwards of other micro-batches, layer by layer, to hide experts' exchanges.

Megatron-Core 0.16.1 with ``overlap_moe_expert_parallel_comm``: pipeline_parallel/combined_1f1b.py runs a steady state's
backward and forward as one. On a single stage a micro-batch's backward runs beside the next one's forward. Interleaved,
one more forward precedes the first pair, so that both of a pair are independent (schedules.py,
``get_pp_rank_microbatches``).

An order has a pair's backward right in front of its forward: what either gives is there when the forward is through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from mofa.schedules.interleaved import INTERLEAVED
from mofa.schedules.one_f_one_b import ONE_F_ONE_B
from mofa.schedules.order import Action, Exchange, Item, Order, Program, Runtime
from mofa.schedules.point_to_point import overlapped_exchanges

COMBINED = " combined"
"""Ends the name of a schedule that runs forwards beside backwards."""


def combined_interleaved_order(pp: int, vpp: int, num_micro_batches: int) -> Order:
    """The interleaved order of every rank, with one forward more ahead than
    :func:`mofa.schedules.interleaved.megatron_interleaved_order` has.

    Examples
    --------
    >>> [f"{a.kind}{a.stage}.{a.micro_batch}" for a in combined_interleaved_order(2, 2, 2).ranks[1]]
    ['F1.0', 'F1.1', 'F3.0', 'B3.0', 'F3.1', 'B3.1', 'B1.0', 'B1.1']
    """
    usual = INTERLEAVED.order("megatron", pp, vpp, num_micro_batches)
    ranks = []
    for r, actions in enumerate(usual.ranks):
        forwards = [action for action in actions if action.kind == "F"]
        backwards = [action for action in actions if action.kind == "B"]
        warmup = min((pp - r - 1) * 2 + (vpp - 1) * pp + 1, len(forwards))
        pairs = [action for pair in zip(backwards, forwards[warmup:], strict=False) for action in pair]
        ranks.append((*forwards[:warmup], *pairs, *backwards[len(forwards) - warmup :]))
    return Order(pp, vpp, num_micro_batches, tuple(ranks))


def backward_beside_each_forward(actions: Sequence[Action]) -> dict[Action, Action]:
    """The backward beside which each forward of a rank runs, by the forward; those that run alone are left out.

    Examples
    --------
    >>> order = ONE_F_ONE_B.order("megatron", 1, 1, 3)
    >>> pairs = backward_beside_each_forward(order.ranks[0])
    >>> {forward.micro_batch: backward.micro_batch for forward, backward in pairs.items()}
    {1: 0, 2: 1}
    """
    return {
        forward: backward for backward, forward in pairwise(actions) if backward.kind == "B" and forward.kind == "F"
    }


def _program(order: Order, runtime: Runtime) -> Program:
    """Sends and receives beside computing; a pair's backward sends and receives with its forward, behind it."""
    ranks: list[tuple[Item, ...]] = []
    for actions, items in zip(order.ranks, overlapped_exchanges(order).ranks, strict=True):
        first_of_pair = set(backward_beside_each_forward(actions).values())
        out: list[Item] = []
        later: list[Item] = []
        for i, item in enumerate(items):
            if isinstance(item, Exchange):
                behind = _computation_before(items, i)
                (later if behind in first_of_pair else out).append(item)
                continue
            out.append(item)
            if item not in first_of_pair:
                out += later
                later = []
        ranks.append((*out, *later))
    return Program(order, tuple(ranks))


def _computation_before(items: Sequence[Item], i: int) -> Action | None:
    """The computation ahead of an item."""
    for item in reversed(items[:i]):
        if isinstance(item, Action):
            return item
    return None


ONE_STAGE_COMBINED = replace(
    ONE_F_ONE_B, name=ONE_F_ONE_B.name + COMBINED, runs_in_megatron=False, is_searched=False, pytorch_name="",
    pairs_passes=True,
)  # fmt: skip
INTERLEAVED_COMBINED = replace(
    INTERLEAVED, name=INTERLEAVED.name + COMBINED, runs_in_megatron=False, is_searched=False, pytorch_name="",
    order=lambda runtime, pp, vpp, num: combined_interleaved_order(pp, vpp, num), program=_program, pairs_passes=True,
)  # fmt: skip
