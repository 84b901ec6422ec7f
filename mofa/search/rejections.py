"""Why a search rejected strategies: how many each check did, and which came closest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mofa.errors import StrategyError
from mofa.plan.result import NearestMiss
from mofa.search.legality.masks import CHECKS, JobAndMachines
from mofa.search.legality.named_check import Verdicts
from mofa.search.objective import SearchObjective
from mofa.search.space import SOLVED, SpaceCombinations
from mofa.specs.framework import FrameworkSpec
from mofa.specs.strategy import StrategySpec, StrategyTable


def rejections_and_nearest_misses(
    reason: Verdicts,
    shortfall: NDArray[np.float64],
    space: SpaceCombinations,
    framework: FrameworkSpec,
    objective: SearchObjective,
) -> tuple[dict[str, int], dict[str, NearestMiss]]:
    """How many candidates each check rejected, and the nearest miss of each."""
    names = [*(c.reason for c in CHECKS), "needless", "memory", "host_memory", "slower"]
    units = [*(c.unit for c in CHECKS), "layers", "B", "B", objective.key_unit]
    rejected, nearest = {}, {}
    for i, name in enumerate(names):
        rows = np.flatnonzero(reason == i)
        if len(rows):
            rejected[name] = len(rows)
            closest = rows[np.argmin(shortfall[rows])]
            nearest[name] = NearestMiss(
                strategy=_as_strategy(space, int(closest), framework),
                short_by=float(shortfall[closest]),
                unit=units[i],
            )
    return rejected, nearest


def _as_strategy(table: SpaceCombinations, i: int, framework: FrameworkSpec) -> StrategySpec:
    row = table.select_rows(np.array([i]))
    if int(row.dp[0]) < 1:
        row = replace(row, dp=np.maximum(row.dp, 1))
    if int(row.recompute_layers[0]) == SOLVED:
        row = replace(row, recompute_layers=np.array([-1]))
    return row.row(0, framework.name)


def refuse_indivisible_batch(job: JobAndMachines, degrees: StrategyTable) -> None:
    """Refuse a global batch that no product of degrees over these GPUs divides."""
    batch, num_gpus = job.workload.batch.global_batch, job.cluster.num_gpus
    dp = degrees.dp[degrees.tp * degrees.cp * degrees.pp * degrees.dp == num_gpus]
    if len(dp) and np.all(batch % dp > 0):
        raise StrategyError(
            f"{job.workload.name}: global_batch ({batch:,}) is a multiple of no dp that {num_gpus:,} GPUs leave, of "
            f"which {int(dp.min()):,} is the least; use a multiple of that or other GPUs"
        )
