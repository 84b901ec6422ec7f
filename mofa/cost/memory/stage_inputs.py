"""Tensors of the size of what stages hand on that Megatron-Core's pipelines hold beside their passes.

Read in megatron_core 0.16.1, pipeline_parallel/schedules.py and transformer/transformer_block.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.cost.rows import Rows
from mofa.schedules import Schedule
from mofa.specs.framework import FrameworkSpec


class HeldInputs(NamedTuple):
    """Numbers of such tensors: all the time, and more between a step's last backward and the next step. [-]"""

    throughout: int = 0
    at_end: int = 0


def held_beside(framework: FrameworkSpec, schedule: Schedule, pp: int, receiving: int) -> HeldInputs:
    """What a rank holds whose chunks receive their input from another one, ``receiving`` of them.

    A chunk keeps the last input that it was set (``set_input_tensor``), whose gradient hangs on it, until its next
    forward: two a chunk at the end of a step, when both are of a micro-batch that is through.

    Examples
    --------
    Two ranks of two chunks each: three tensors on both while they compute; the last one ends a step with four.

    >>> from mofa.schedules.interleaved import INTERLEAVED
    >>> from mofa.schedules.one_f_one_b import ONE_F_ONE_B
    >>> from mofa.specs.load import load_framework
    >>> megatron = load_framework("megatron")
    >>> [held_beside(megatron, INTERLEAVED, 2, chunks) for chunks in (1, 2)]
    [HeldInputs(throughout=3, at_end=0), HeldInputs(throughout=3, at_end=1)]
    >>> [held_beside(megatron, ONE_F_ONE_B, 2, chunks) for chunks in (0, 1)]
    [HeldInputs(throughout=0, at_end=0), HeldInputs(throughout=2, at_end=0)]
    """
    if not framework.traits.is_megatron_core or pp == 1:
        return HeldInputs()
    steady = schedule.handed_on_tensors if receiving else 0
    return HeldInputs(steady, max(2 * receiving - steady, 0))


def held_bytes(rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of :func:`held_beside` the bytes of each candidate on each stage that is shown. (n, R) each [B]"""
    stages = rows.layout.stages
    numbers = [
        held_beside(rows.framework, rows.schedule_record, stages.pp, stages.vpp - int(stage == 0))
        for stage in rows.layout.shown.stage
    ]
    throughout, at_end = np.array(numbers, dtype=float).T
    boundary = rows.costs.boundary[rows.k][:, None]
    return boundary * throughout, boundary * at_end


def let_go_bytes(rows: Rows) -> tuple[NDArray[np.float64] | float, NDArray[np.float64] | float]:
    """What is not there of the first of these in a 1F1B's forwards, and in its backwards. (n, R) each [B]

    In a forward both are, in a backward the gradient alone; neither where as many micro-batches are in flight as the
    step has, so that no backward was before.
    """
    if rows.layout.stages.vpp > 1:
        return 0.0, 0.0
    throughout = held_bytes(rows)[0]
    earlier = rows.num_micro_batches[:, None] > rows.layout.last_in_flight
    return np.where(earlier, 0.0, throughout), np.where(earlier, 0.5, 1.0) * throughout
