"""Sends of activations and gradients from stage to stage: what one takes, and what it costs computing beside it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.kernels.collectives import collective_s
from mofa.cost.kernels.computing_slowdown import send_slowdown
from mofa.cost.rows import GatheredRows

ArrayN = NDArray[np.float64]


def slowdown_beside_hops(rows: GatheredRows) -> ArrayN:
    """What computing loses per second of a hand-over between stages beside it. (n,) [-]"""
    return send_slowdown(rows.cluster.gpu.curves, rows.groups["pp"])[rows.grid_index]


def hop_seconds(rows: GatheredRows) -> ArrayN:
    """One hand-over between stages: the whole boundary, or a rank's part of it and its gathering over tp. (n,) [s]"""
    payload, groups = (
        rows.costs.stage_boundary_bytes[rows.k],
        {name: rows.groups[name].select_strategies(rows.grid_index) for name in ("pp", "tp")},
    )
    full_s = collective_s("send_recv", payload, groups["pp"], rows.costs.machine.network_fabric)
    if not rows.framework.scatters_pipeline_sends:
        return full_s
    tp = rows.table.tp.astype(float)
    part_s = collective_s("send_recv", payload / tp, groups["pp"], rows.costs.machine.network_fabric)
    part_s = part_s + collective_s("all_gather", payload, groups["tp"], rows.costs.machine.network_fabric)
    return np.where(rows.table.sp | (tp == 1), full_s, part_s)
