"""What computing loses in the last backwards of Megatron's later stages, beside the reduction of experts' gradients.

A stage but the first reduces all gradients of its dense parameters at once, and all of its experts' (megatron_core
0.16.1, ``distributed/distributed_data_parallel.py``: buffers of a later stage are one bucket). The last of the experts'
is there before the attention ahead of them is backward, so that this runs beside their reduction.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.work import CollectiveKind
from mofa.cost.kernels.collectives import collective_s
from mofa.cost.rank_rules import reduce_scatters_gradients, reduced_bytes_per_param
from mofa.cost.rows import GatheredRows
from mofa.cost.step_time.slowdown_of_stages import slowdown_of_always_computing_stage

ArrayN = NDArray[np.float64]


def lost_and_hidden_beside_expert_reductions_s(rows: GatheredRows) -> tuple[ArrayN, ArrayN]:
    """What last backwards of all stages but the first lose, one behind the other as the pipeline drains, and how much
    of each stage's reduction is beside its backward; nothing under interleaving, where all ranks begin to reduce at
    once. (n,) and (n, R) [s]"""
    expert, stages = rows.params[1].sum(axis=2), rows.stage_layers.stages  # (g, R)
    if stages.pp == 1 or stages.vpp > 1 or not np.any(expert):
        return np.zeros(len(rows.table)), np.zeros((len(rows.table), expert.shape[1]))
    group, scatters = rows.groups["efsdp"].with_indexed_arrays(np.s_[:, None]), reduce_scatters_gradients(rows)
    fabric, nbytes = rows.costs.machine.network_fabric, expert * reduced_bytes_per_param(rows)

    def seconds(kind: CollectiveKind) -> ArrayN:
        return np.asarray(collective_s(kind, nbytes, group, fabric))

    reduce_s = np.where(scatters[:, None], seconds("reduce_scatter"), seconds("all_reduce"))[rows.grid_index]
    slowdown = slowdown_of_always_computing_stage(rows, "efsdp")[:, None]
    behind_s = _computed_behind_experts_s(rows) / (1.0 - slowdown)
    hidden_s = np.minimum(reduce_s, behind_s) * (1.0 - rows.is_embedding_stage)
    return np.asarray(rows.sum_over_stages(slowdown * hidden_s)), hidden_s


def _computed_behind_experts_s(rows: GatheredRows) -> ArrayN:
    """What a stage's backward computes behind that of its first experts: the attention ahead of them, and dense layers
    ahead of that. (n, R) [s]"""
    lay, layers = rows.stage_layers, rows.layers
    behind_s = np.zeros((len(rows.table), len(lay.shown.shown_stages)))
    for place, stage in enumerate(lay.shown.shown_stages):
        for kind in lay.stages.layers[stage][0]:
            full = lay.fully_recomputed[:, kind, place] > 0
            mode = np.where(full, rows.full_mode_index, rows.base_mode_index)
            if lay.stages.kinds[kind].moe:
                behind_s[:, place] += layers.backward_behind_experts_s[mode, rows.k, kind]
                break
            behind_s[:, place] += layers.backward_s[mode, rows.k, kind]
    return behind_s
