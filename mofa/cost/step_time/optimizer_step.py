"""The optimizer's part of a step: its kernels, the host's waits, the norm, and the lead that it gives the host."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.float8 import fp8_gathered_share
from mofa.blocks.fp8 import FP8_RECIPES, transformer_engine_recipe
from mofa.cost.host_optimizer import host_step_extra_seconds
from mofa.cost.kernels.collectives import collective_s
from mofa.cost.kernels.compute import memory_bound_bytes_per_s
from mofa.cost.optimizer import (
    fp8_first_micro_batch_saving_s,
    optimizer_device_seconds_by_part,
    optimizer_seconds,
    weight_cast_seconds,
)
from mofa.cost.optimizer_issue import SteppedTensors, host_lead_behind_optimizer_s, optimizer_waits_for_host_s
from mofa.cost.rows import GatheredRows, params_in_layers
from mofa.cost.step_time.gradient_buckets import megatron_first_chunk_buckets
from mofa.cost.step_time.micro_batch import MicroBatchPasses
from mofa.specs.params import layer_parameter_tensors

ArrayN = NDArray[np.float64]


def optimizer_and_host_wait_seconds(rows: GatheredRows, each: MicroBatchPasses) -> ArrayN:
    """The optimizer step of each stage, and its wait and the next step's for the host, but for the norm. (n, R) [s]

    torchtitan moves counts and tokens to the device at the start of a step, which waits for them (train.py,
    train_step); counts are summed over dp, tokens and positions dealt out over cp by indices made on the host
    (context_parallel.py). The optimizer's host begins as far ahead of the device as it ended the last backward.
    """
    c = rows.costs
    given = (rows.workload, rows.cluster, rows.framework, rows.shards, rows.mode.precision, rows.grids.zero[:, None])
    issue = rows.sum_layers_by_stage(rows.layers.issue_s) + rows.sum_of_end_blocks_by_stage(
        c.embedding.forward.issue + c.embedding.backward.issue, c.head.forward.issue + c.head.backward.issue,
        rows.mtp_layer_quantity("issue_s"),
    )  # fmt: skip
    lead = np.maximum(sum(each.stage_forward_and_backward_s()) - issue, 0.0)
    if each.host_bound is not None:
        lead[each.host_bound.rows] = each.host_bound.lead_behind_last_backward_s()
    parts = optimizer_device_seconds_by_part(*given)
    tensors = num_stepped_tensors(rows)
    waited = optimizer_waits_for_host_s(*given, tensors, lead, rows.grid_index, _distributed(rows), parts)
    on_hosts = host_step_extra_seconds(rows, tensors.total, parts["adam"])
    seconds = (optimizer_seconds(*given, parts) + on_hosts)[rows.grid_index] + waited
    if transformer_engine_recipe(rows.workload, rows.framework):
        linears = params_in_layers(rows.workload, rows.grids, rows.stage_layers)
        owners = np.where(rows.grids.zero[:, None] >= 1, rows.shards.dense_ranks, 1.0)
        casts = weight_cast_seconds(rows.workload, rows.cluster, rows.framework, linears, owners)
        unread = fp8_first_micro_batch_saving_s(rows.framework, linears, rows.cluster.gpu)
        issued = _weight_cast_host_seconds(rows)
        seconds = seconds + np.maximum(casts[rows.grid_index], issued - lead) - unread[rows.grid_index]
    if rows.framework.fp8_scales_ahead:
        seconds = seconds + _float8_scale_seconds(rows)[rows.grid_index]
    if rows.framework.traits.has_pytorch_modules:
        starts = np.where(rows.table.cp > 1, 8.0, np.where(rows.table.dp > 1, 3.0, 1.0))
        start_s = rows.cluster.slowest_host_factor * rows.cluster.gpu.curves.host.step_start_s.value
        seconds = seconds + (starts * start_s)[:, None]
    return np.asarray(seconds)


def _float8_scale_seconds(rows: GatheredRows) -> ArrayN:
    """The largest of each weight that torchao gathers in fp8: a pass over a rank's shards behind the step, in a kernel
    like that of the gradients' norm. (g, R) [s]

    The reduction of four bytes a weight over the ranks, and the division, are left out (torchao 0.17.0, fsdp_utils.py,
    ``precompute_float8_dynamic_scale_for_fsdp``).
    """
    ctx = rows.costs.context
    share = fp8_gathered_share(ctx.model, ctx.framework, ctx.float8)
    linears = params_in_layers(rows.workload, rows.grids, rows.stage_layers) / rows.shards.dense_ranks
    return np.asarray(4.0 * share * linears / memory_bound_bytes_per_s(rows.cluster.gpu, "grad_norm"))


def host_lead_at_step_start_s(rows: GatheredRows) -> ArrayN:
    """How far each stage's host is ahead of its device as a step begins, whose optimizer the device is still at; behind
    it where negative. (n, R) [s]"""
    given = (rows.workload, rows.cluster, rows.framework, rows.shards, rows.mode.precision, rows.grids.zero[:, None])
    parts = optimizer_device_seconds_by_part(*given)
    zero, tensors = rows.grids.zero[:, None], num_stepped_tensors(rows)
    lead_s = host_lead_behind_optimizer_s(rows.cluster, rows.framework, rows.shards, zero, tensors, parts)
    return np.asarray(lead_s[rows.grid_index])


def _distributed(rows: GatheredRows) -> NDArray[np.bool_]:
    """Whether torchtitan's parameters are distributed tensors, of each grid of ranks. (g, 1)"""
    grids = rows.grids
    sharded = (rows.shards.dense_ranks > 1) & (rows.mode.precision == "mixed")
    return np.asarray(sharded | ((grids.tp > 1) | (grids.ep > 1))[:, None])


def _weight_cast_host_seconds(rows: GatheredRows) -> ArrayN:
    """What the host takes to issue the casts of the layers' weights, once a step; parameters that are fp8 are cast by
    the optimizer, unless they are gathered in bf16. (n, R) [s]"""
    recipe = FP8_RECIPES.get(transformer_engine_recipe(rows.workload, rows.framework))
    if rows.framework.fp8_params and not (recipe is not None and recipe.gathers_params_in_bf16):
        return np.zeros((len(rows.k), len(rows.stage_layers.shown.shown_stages)))
    ends = np.zeros_like(rows.costs.embedding.forward.issue)  # neither of which is in fp8
    return np.asarray(
        rows.sum_layers_by_stage(rows.layers.weight_cast_issue_s)
        + rows.sum_of_end_blocks_by_stage(ends, ends, rows.mtp_layer_quantity("weight_cast_issue_s"))
    )


@lru_cache(maxsize=1)
def num_stepped_tensors(rows: GatheredRows) -> SteppedTensors:
    """Parameter tensors that one rank of every stage steps, of each grid of ranks. (g, R)

    The distributed optimizer deals out each bucket of a buffer in equal parts, so that a rank steps its share of the
    tensors and, of every bucket, one that it shares with another rank. One stage's first chunk has several buckets.
    """
    model, packed = rows.workload.model, not rows.framework.traits.has_pytorch_modules
    stages, shown = rows.stage_layers.stages, rows.stage_layers.shown.shown_stages
    counts = stages.layer_counts[:, shown].sum(axis=2)
    norm = 2 if model.norm == "layernorm" else 1
    shape = (len(rows.grids), len(shown))
    dense = (
        rows.is_embedding_stage + rows.is_head_stage * (norm + (0 if model.tied_embeddings else 1)) + np.zeros(shape)
    )
    experts = np.zeros(shape)
    for i, kind in enumerate(stages.kinds):
        in_layer, in_expert = layer_parameter_tensors(model, kind.moe, packed=packed)
        local = model.moe.num_experts / rows.grids.ep if model.moe else np.zeros(len(rows.grids))
        dense = dense + counts[i] * in_layer
        experts = experts + counts[i] * (in_expert * local)[:, None]
    if packed:
        dealt_out = (rows.grids.zero >= 1)[:, None]
        if (dealt_out & (np.maximum(rows.shards.dense_ranks, rows.shards.expert_ranks) > 1)).any():
            buckets = megatron_first_chunk_buckets(rows)
            dense = np.where(dealt_out, _own(dense, rows.shards.dense_ranks, buckets.dense, stages.vpp), dense)
            experts = np.where(dealt_out, _own(experts, rows.shards.expert_ranks, buckets.expert, stages.vpp), experts)
    own = packed & (rows.grids.ep[:, None] > 1)  # (optimizer/__init__.py, ChainedOptimizer)
    return SteppedTensors(np.where(own, dense, dense + experts), np.where(own, experts, 0.0))


def _own(tensors: ArrayN, ranks: ArrayN, of_first: ArrayN, chunks: int) -> ArrayN:
    """Tensors of which a rank has a part, of so many in buckets that ranks share evenly: one a chunk, but for the first
    stage's first chunk. (g, R) [-]"""
    buckets = np.full_like(tensors, chunks)
    buckets[:, 0] += of_first - 1.0
    return np.minimum(tensors, (tensors + buckets * (ranks - 1.0)) / ranks)


GRADIENT_NORM_BYTES = 4.0
"""One number in fp32. [B]"""


def gradient_norm_seconds(rows: GatheredRows) -> ArrayN:
    """The gradient norm's all-reduce over all ranks and the host's wait for it. (n,) [s]"""
    if not rows.workload.optimizer.clip_grad_norm:
        return np.zeros(len(rows.table))
    payload = np.full(len(rows.grids), GRADIENT_NORM_BYTES)
    reduce = collective_s("all_reduce", payload, rows.groups["world"], rows.costs.machine.network_fabric)
    return np.asarray(reduce[rows.grid_index] + rows.cluster.sync_s)
