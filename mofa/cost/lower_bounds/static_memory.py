"""A lower bound on the device memory of every candidate: what the optimizer's step holds, without any activation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import max_of_array_rows
from mofa.cost.amax_reductions import reduces_amaxes
from mofa.cost.block.block_cost import PrecisionMode, process_groups_of_rows, unique_rows
from mofa.cost.kernels.topology import ProcessGroup
from mofa.cost.memory.communicators import communicator_bytes, pipeline_links
from mofa.cost.optimizer import torchtitan_optimizer_element_bytes
from mofa.cost.option_sets import without_param_gather_choice
from mofa.cost.precision_modes import rows_by_precision_mode
from mofa.cost.rows import columns_that_rank_grids_read, params_and_static_bytes_of_grids
from mofa.cost.stage_layers import StageLayers, count_stage_layers
from mofa.cost.stages import stages_of_row
from mofa.schedules import SCHEDULE_NAMES, SCHEDULES
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.shared_facts import load_shared_facts
from mofa.specs.strategy import StrategyTable
from mofa.specs.workload import WorkloadSpec

ArrayN = NDArray[np.float64]


class MemoryBounds(NamedTuple):
    """Memory that no row of the same name in :class:`mofa.cost.memory.row_memory.RowMemory` is below. (n,) each [B]"""

    least_bytes: ArrayN
    device_bytes: ArrayN


def memory_lower_bounds(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, table: StrategyTable
) -> MemoryBounds:
    """What the memory of every row is at least, however it recomputes. (n,) each [B]

    ``framework`` is as it is but for the options that rows choose, in which they may differ.

    Notes
    -----
    Behind the last backward a rank holds its parameters, its gradients, its optimizer's states, and what the step of
    the optimizer needs besides. Then come the context and the communicators. FSDP under pipelines has its gradients
    reduced by then, and its gathered weights gone. No block is costed for it. The allocator holds no less than that:
    the device's memory is bounded by all of it, the least by what the closed form may be off less.
    """
    bounds, table = np.empty((2, len(table))), without_param_gather_choice(table)
    for rows, mode in rows_by_precision_mode(workload, framework, table) if len(table) else ():
        some = table if len(rows) == len(table) else table.select_rows(rows)
        pipeline = [some.pp, some.vpp, some.schedule, some.layout]
        first, grid = unique_rows([*pipeline, *columns_that_rank_grids_read(some)])
        grids = some.select_rows(first)
        plain = replace(grids, recompute=np.zeros_like(first), recompute_layers=np.full(len(first), -1))
        _, code = unique_rows([column[first] for column in pipeline])
        order, of_grids = np.argsort(code, kind="stable"), np.empty((2, len(first)))
        begins = [0, *(np.flatnonzero(np.diff(code[order])) + 1).tolist(), len(order)]
        for chosen in (order[begin:end] for begin, end in pairwise(begins)):
            of_grids[:, chosen] = _of_grids(workload, cluster, framework, plain.select_rows(chosen), mode)
        bounds[:, rows] = of_grids[:, grid]
    return MemoryBounds(*bounds)


def _of_grids(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, grids: StrategyTable, mode: PrecisionMode
) -> ArrayN:
    """The bounds of grids of ranks of one pp x vpp. (2, g) [B]"""
    stages = stages_of_row(workload, framework, grids, 0)
    schedule = SCHEDULE_NAMES[int(grids.schedule[0])]
    lay = count_stage_layers(grids, stages, schedule, np.full(len(grids), stages.pp), every_stage=False)
    groups = process_groups_of_rows(cluster, framework, grids)
    _, shards, static = params_and_static_bytes_of_grids(workload, cluster, framework, grids, groups, lay, mode)
    resident = static.params + static.grads + static.states + static.buffers + static.step_scratch
    if framework.shards_params and mode.precision == "mixed" and mode.pipelined:
        each = framework.grads_bytes_per_param * torchtitan_optimizer_element_bytes(workload, mode.precision) / 4.0
        resident = resident - static.grads + shards.sharded_bytes(each) - shards.unsharded_bytes(2.0)
    communicators = np.empty_like(resident)
    for options, some in grids.rows_by_options():  # nothing else of it reads what strategies choose
        of_options = framework.with_options(options)
        communicators[some] = _communicators(workload, cluster, of_options, grids, groups, lay, schedule)[some]
    outside = cluster.gpu.context_bytes.value + communicators
    surely = 1.0 - load_shared_facts().tolerances.allocated.value
    return np.array([max_of_array_rows(outside + surely * resident), max_of_array_rows(outside + resident)])


def _communicators(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, grids: StrategyTable,
    groups: dict[str, ProcessGroup], lay: StageLayers, schedule: str,
) -> ArrayN:  # fmt: skip
    """Device memory of communicators. (g, R) [B]"""
    stages = lay.stages
    pipeline = pipeline_links(
        SCHEDULES[schedule].wraps_around, stages.pp, stages.rank_with_head, lay.shown.shown_stages
    )
    experts = workload.model.moe is not None
    return communicator_bytes(
        groups, cluster, framework, experts, grids.zero, pipeline, grids.cp_kind, reduces_amaxes(workload)
    )
