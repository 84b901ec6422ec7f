"""Bytes of the inputs that Megatron-Core's pipelines hold beside their passes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.rank_rules import held_inputs_of_stages
from mofa.cost.rows import Rows


def held_bytes(rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bytes of :func:`mofa.cost.rank_rules.held_inputs`: all the time, and more between two steps. (n, R) each [B]"""
    throughout, at_end = np.array(held_inputs_of_stages(rows), dtype=float).T
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
