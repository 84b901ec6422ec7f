"""A closer look at what the stages of one candidate reserve: their requests played in order, where that is known."""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from mofa.cost.heap import HIGHEST
from mofa.cost.held import Blocks, plays, stage_of
from mofa.cost.rows import Rows
from mofa.cost.sequence import reserved_bytes
from mofa.cost.unshard import by_chunk, gathers_whole

ArrayN = NDArray[np.float64]
MAY_BE_FULLEST = 0.03
"""How far below the fullest stage another is not looked at, as a share: nine of ten closed forms are nearer. [-]"""
ENDS_MAY_BE_FULLEST = 0.2
"""The same of stages with the embedding or the head where FSDP's pipelines make experts' gradients whole. Where those
are reduced chunk by chunk, such stages are always looked at: the closed form is up to a quarter off. [-]"""
PLAYED = HIGHEST // 2
"""Stages that hold more, 2 TiB, are not played: addresses would end. No device has a tenth. [B]"""


def look_closely(
    rows: Rows, allocated: ArrayN, reserved: ArrayN, workspace: int, limits: ArrayN | None = None
) -> None:  # fmt: skip
    """Put what the fullest stages reserve in place of the closed form's, from the fullest on while one may be it.

    Unsharded gradients of experts may fit into none of the activations' blocks, by which the closed form can be a
    quarter off. Stages between that hold the same layers as one with more in flight hold no more than it does.

    Parameters
    ----------
    allocated, reserved
        Of every stage, in closed form; the latter is changed. (1, R) [B]
    workspace
        What each of two threads takes for its products. [B]
    limits
        Of every stage, what it may reserve: the first one found above it ends the look. (R,) [B]

    Raises
    ------
    ValueError
        If there are several candidates.
    """
    if not plays(rows):
        return
    if len(reserved) != 1:
        raise ValueError(f"a closer look is at one candidate, not at {len(reserved)}: take them one by one")
    stages, most, blocks = rows.layout.stages, 0.0, Blocks(rows)
    whole_experts = gathers_whole(rows) and rows.workload.model.moe is not None
    like: dict[object, float] = {}
    for stage in np.argsort(-reserved[0], kind="stable").tolist():
        rank = int(rows.layout.shown.stage[stage])
        end = rank in (0, stages.head_stage)
        key = rank if end else stages.layers[rank]
        found = float(reserved[0, stage])
        far = ENDS_MAY_BE_FULLEST if end and whole_experts else MAY_BE_FULLEST
        if end and by_chunk(rows):
            far = 1.0
        if key in like:
            found = min(found, like[key])
        elif found >= (1.0 - far) * most and allocated[0, stage] < PLAYED:
            limit = inf if limits is None else float(limits[stage])
            found = like[key] = float(reserved_bytes(stage_of(rows, stage, workspace, blocks), limit))
            most = max(most, found)
            if found > limit:
                reserved[0, stage] = found
                return
        reserved[0, stage] = max(found, allocated[0, stage])
