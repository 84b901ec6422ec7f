"""GPU-seconds that a step takes at least, by what its blocks depend on: the same on any number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import distinct_layer_kinds
from mofa.blocks.frameworks.recompute import largest_step_share_saved_by_recomputing
from mofa.cost.estimate import TableEstimator
from mofa.cost.lower_bounds.steps import micro_batch_lower_bounds_s
from mofa.cost.option_sets import options_that_blocks_read
from mofa.cost.stages import stages_of_row
from mofa.schedules import SCHEDULES, default_schedule
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.space import StrategySpace, combinations_of_space
from mofa.specs.strategy import RecomputeSpec, StrategyTable

FloatN = NDArray[np.float64]
OF_SIZE = (
    "gpus", "expert_grid", "layers", "layout", "batch", "step_length", "schedule", "interleaving", "zero", "balancing",
    "tied_embeddings",
)  # fmt: skip
"""Checks that depend on the number of GPUs, of stages or of micro-batches."""
MANY = 65_536
"""Data parallelism of rows that stand for any. [-]"""


@dataclass(frozen=True)
class LeastStepGpuSeconds:
    """The least GPU-seconds of a step, for each combination of degrees that blocks depend on: a row each.

    Attributes
    ----------
    table
        Legal rows without a pipeline; their dp stands for any. (g,)
    gpu_s
        GPU-seconds of a step, whatever is recomputed. (g,) [s]
    layer_gpu_s
        Those of a layer of each kind. (kinds, g) [s]
    num_layers
        Layers of each kind. (kinds,)
    """

    table: StrategyTable
    gpu_s: FloatN
    layer_gpu_s: FloatN
    num_layers: NDArray[np.int64]


def may_defer_weight_gradients(schedule: str) -> bool:
    """Whether a schedule may run backwards in two halves."""
    return SCHEDULES[schedule].defers_weight_gradients


def least_block_gpu_seconds(job: JobAndMachines, space: StrategySpace) -> dict[bool, LeastStepGpuSeconds]:
    """The least GPU seconds that all blocks of a space take: of schedules that defer weight gradients (``True``), and
    of the others.

    Parameters
    ----------
    job
        On the smallest number of GPUs: the slowest of fewer is faster.
    space
        Of the largest.
    """
    table = _blocks(job, space)
    least = {}
    kinds = {may_defer_weight_gradients(schedule) for schedule in space.schedule}
    layers = stages_of_row(job.workload, job.framework, table, 0).layer_counts.sum((1, 2))
    for halved in sorted(kinds):
        each = np.full((1 + len(layers), len(table)), np.inf)
        for number in sorted({mode.token_chunks for mode, _ in space.recompute}):
            for some, of in _stand_ins(job, table):
                some = replace(some, recompute_modes=(RecomputeSpec(token_chunks=number),))
                each[:, of] = np.minimum(each[:, of], _seconds(job, some, halved))
        share = 1.0 - largest_step_share_saved_by_recomputing(job.framework)
        gpus = table.tp * table.cp * job.workload.batch.global_batch / table.micro_batch * share
        least[halved] = LeastStepGpuSeconds(table, each[0] * gpus, each[1:] * gpus, layers)
    return least


def _blocks(job: JobAndMachines, space: StrategySpace) -> StrategyTable:
    """A row for all that blocks may depend on but the number of GPUs and stages."""
    alone = replace(
        space, pp=(1,), vpp=(1,), schedule=(default_schedule(1),), layout="", dp=None, zero=None,
        recompute=((RecomputeSpec(), -1),), options=tuple(dict.fromkeys(map(options_that_blocks_read, space.options))),
    )  # fmt: skip
    table = combinations_of_space(alone, job.cluster, job.framework).degrees
    table = replace(table, dp=np.full(len(table), MANY))
    return table.select_rows(np.flatnonzero(check_strategies(job, table, except_checks=OF_SIZE).reason < 0))


def _stand_ins(job: JobAndMachines, table: StrategyTable) -> list[tuple[StrategyTable, NDArray[np.intp]]]:
    """Rows whose blocks are those of any number of GPUs and stages, and which row of the table each stands for.

    Sharded weights depend on it, in ways that a rank alone or a pipeline change. Gathering them is left out.
    """
    rows = np.arange(len(table))
    sizes = [(MANY, 1)]
    if job.framework.shards_params:
        sizes = [(dp, pp) for dp in (1, MANY) for pp in (1, 2)]
    elif job.workload.model.gates_in_two_widths or job.workload.model.tied_embeddings:
        sizes = [(MANY, 1), (MANY, 2)]
    ranks = [np.full(len(table), dp) for dp, _ in sizes]
    grids = [(dp * table.tp * table.cp) % (table.ep * table.etp) == 0 for dp in ranks]
    return [
        (replace(table, dp=dp, pp=np.full(len(table), pp)).select_rows(rows[grid]), rows[grid])
        for (_, pp), dp, grid in zip(sizes, ranks, grids, strict=True)
        if grid.any()
    ]


def _seconds(job: JobAndMachines, table: StrategyTable, halved: bool) -> FloatN:
    """Of a micro-batch on all ranks together, and of a layer of each kind. (1 + kinds, n) [s]"""
    out = np.empty((1 + len(distinct_layer_kinds(job.workload.model)), len(table)))
    loads = routing_loads_by_ep(job.workload, table)
    for _, rows in table.rows_by_options():
        some = table.select_rows(rows)
        estimator = TableEstimator(job.workload, job.cluster, job.framework, some, loads, drop=frozenset({"dp"}))
        all_s, layers_s = micro_batch_lower_bounds_s(estimator, halved=halved)
        out[:, rows] = np.concatenate([all_s[None], layers_s])
    return out
