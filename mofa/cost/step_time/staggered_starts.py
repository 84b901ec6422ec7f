"""A step of 1F1B or GPipe that stages begin one after the other, as each is done with its optimizer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import max_of_array_rows
from mofa.cost.step_time.bubble import one_f_one_b_s

ArrayN = NDArray[np.float64]


def staggered_start_saving_s(
    forward_s: ArrayN, backward_s: ArrayN, num_micro_batches: ArrayN, optimizer_s: ArrayN, *,
    before_s: ArrayN | None = None, rested_s: ArrayN | None = None, forwards_first: bool = False,
    first_forward_sooner_s: ArrayN | float = 0.0,
) -> ArrayN:  # fmt: skip
    """How much sooner a step is over than if all stages waited for the longest optimizer. (n,) [s]

    All ranks meet at the gradients' norm alone. From there on each updates its own parameters, and begins the next
    step: a stage whose optimizer takes long is often done before its first input arrives.

    Parameters
    ----------
    forward_s, backward_s, num_micro_batches, before_s, rested_s
        As for :func:`mofa.cost.step_time.bubble.one_f_one_b_s`. (n, pp) [s]
    optimizer_s
        From the norm until a stage may begin. (n, pp) [s]
    first_forward_sooner_s
        What the first stage's first forward takes less than its others, so that later stages' inputs are there sooner.
        (n,) [s]
    forwards_first
        Whether the schedule is GPipe, whose backwards begin as they do once all forwards are over.

    Examples
    --------
    The last of four stages updates for 3 s longer than the others. Its input is there after 3 s, it holds up nothing:

    >>> f, m = np.ones((1, 4)), np.array([1.0])
    >>> float(staggered_start_saving_s(f, 2 * f, m, np.array([[1.0, 1.0, 1.0, 4.0]]))[0])
    3.0

    So it is in GPipe. If it is the first, all wait for it:

    >>> float(staggered_start_saving_s(f, 2 * f, m, np.array([[1.0, 1.0, 1.0, 4.0]]), forwards_first=True)[0])
    3.0
    >>> float(staggered_start_saving_s(f, 2 * f, m, np.array([[4.0, 1.0, 1.0, 1.0]]))[0])
    0.0
    """
    gathers = np.zeros_like(forward_s) if before_s is None else before_s
    longer_s = optimizer_s - optimizer_s.min(axis=1, keepdims=True)
    arrival = np.cumsum(forward_s, axis=1) - forward_s
    arrival[:, 1:] -= np.reshape(first_forward_sooner_s, (-1, 1))
    held_up = np.zeros_like(forward_s)
    until = np.zeros(len(forward_s))
    for stage in range(forward_s.shape[1]):
        begin = np.maximum(until, longer_s[:, stage] - arrival[:, stage]) + gathers[:, stage]
        held_up[:, stage], until = begin - until, begin
    if forwards_first:
        behind = forward_s.sum(axis=1, keepdims=True) - arrival - forward_s
        until_stage = np.cumsum(held_up, axis=1)
        all_forwards = max_of_array_rows(until_stage + arrival + num_micro_batches[:, None] * forward_s + behind)
        at_once = forward_s.sum(axis=1) + (num_micro_batches - 1.0) * max_of_array_rows(forward_s)
        return np.asarray(np.maximum(at_once + longer_s.max(axis=1) - all_forwards, 0.0))
    together = one_f_one_b_s(forward_s, backward_s, num_micro_batches, gathers, rested_s)
    staggered = one_f_one_b_s(forward_s, backward_s, num_micro_batches, held_up, rested_s)
    return np.asarray(np.maximum(together + longer_s.max(axis=1) - staggered, 0.0))
