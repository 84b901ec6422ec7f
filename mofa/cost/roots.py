"""FSDP's root where it holds the model's ends, as in torchtitan until July 2025 (``ends_apart: false``)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.rows import Rows

ArrayN = NDArray[np.float64]


def root_holds_ends(rows: Rows) -> bool:
    """Whether the embedding and the head stay gathered from the lookup to its backward."""
    return not rows.framework.ends_apart and rows.mode.precision == "mixed" and not rows.mode.pipelined


def gathers_ends(rows: Rows) -> bool:
    """Whether FSDP gathers the embedding and the head as groups of their own, anew for a backward."""
    fw = rows.framework
    return rows.mode.precision == "mixed" and not rows.mode.pipelined and fw.shards_params and fw.ends_apart


def root_saved(rows: Rows) -> ArrayN | float:
    """What the root has gathered, there while the layers keep what they do. (n, R) [B]"""
    if not root_holds_ends(rows):
        return 0.0
    return np.asarray(rows.costs.embedding.memory.saved[rows.k][:, None] * rows.is_first)


def head_grads(rows: Rows) -> ArrayN | float:
    """The head's 16-bit gradients, which wait for the root's reduction while the layers go back. (n, 1) [B]"""
    if not root_holds_ends(rows):
        return 0.0
    model = rows.workload.model
    return np.asarray(2.0 * model.vocab * model.hidden / rows.table.tp)[:, None]
