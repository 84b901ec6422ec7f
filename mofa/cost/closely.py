"""A closer look at what the stages of single candidates reserve: free blocks filled in order, where that is known."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from mofa.cost.filling import fills, stage_filled_bytes
from mofa.cost.rows import Rows
from mofa.cost.sequence import plays, stage_played_bytes

ArrayN = NDArray[np.float64]
MAY_BE_FULLEST = 0.03
"""How far below the fullest stage another is not looked at, as a share: nine of ten closed forms are nearer. [-]"""
ENDS_MAY_BE_FULLEST = 0.2
"""The same of torchtitan's stages with the embedding or the head. [-]"""


def look_closely(rows: Rows, allocated: ArrayN, reserved: ArrayN, workspace: int) -> None:
    """Put what the fullest stages reserve in place of the closed form's, from the fullest on while one may be it.

    torchtitan's stages with the embedding and the head may be from further off: unsharded gradients of experts or of
    the vocabulary may fit into none of the activations' blocks, by which the closed form can be a quarter off. Those
    between that hold the same layers as one with more in flight hold no more than it does.

    Parameters
    ----------
    allocated, reserved
        Of every stage, in closed form; the latter is changed. (n, R) [B]
    workspace
        What each of two threads takes for its products. [B]
    """
    if fills(rows):
        for row, closed in enumerate(reserved.copy()):
            most = 0.0
            for stage in np.argsort(-closed, kind="stable").tolist():
                if closed[stage] < (1.0 - MAY_BE_FULLEST) * most:
                    break
                filled = stage_filled_bytes(rows, row, stage, workspace)
                reserved[row, stage] = max(filled, allocated[row, stage])
                most = max(most, reserved[row, stage])
    elif plays(rows):
        for row in range(len(reserved)):
            _play(rows, row, allocated[row], reserved[row], workspace)


def _play(rows: Rows, row: int, allocated: ArrayN, reserved: ArrayN, workspace: int) -> None:
    """The same of a candidate of torchtitan's. (R,) each"""
    stages, most = rows.layout.stages, 0.0
    played = partial(stage_played_bytes, rows, row, workspace=workspace, made={})
    like: dict[object, float] = {}
    for stage in np.argsort(-reserved, kind="stable").tolist():
        rank = int(rows.layout.shown.stage[stage])
        end = rank in (0, stages.head_stage)
        key = rank if end else stages.layers[rank]
        if key in like:
            reserved[stage] = max(min(reserved[stage], like[key]), allocated[stage])
        elif reserved[stage] >= (1.0 - (ENDS_MAY_BE_FULLEST if end else MAY_BE_FULLEST)) * most:
            like[key] = reserved[stage] = max(played(stage=stage), allocated[stage])
            most = max(most, reserved[stage])
