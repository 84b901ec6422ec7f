"""Sizes of linear layers that fp8 products demand, on each tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mofa.blocks.float8 import UNIT
from mofa.blocks.fp8 import FP8_RECIPES
from mofa.search.legality.named_check import FloatN, JobAndMachines, degrees_text
from mofa.specs.strategy import StrategyTable
from mofa.specs.workload import WorkloadSpec


def _sizes(workload: WorkloadSpec, table: StrategyTable) -> Iterator[tuple[str, FloatN, int]]:
    """Name, size on a rank, and unit to be a multiple of, for every dimension of the layers' products. (n,)
    [elements]"""
    model, a = workload.model, workload.model.attention
    recipe = FP8_RECIPES.get(workload.precision.fp8_recipe)
    inner, outer = (recipe.column_multiple, recipe.row_multiple) if recipe else (1, 1)
    tokens = table.micro_batch * workload.batch.seq_len / table.cp
    yield "tokens of a micro-batch on a rank", tokens, outer
    yield "tokens of a sequence shard", np.where(table.sp, tokens / table.tp, tokens), outer
    yield "hidden", np.full(len(table), float(model.hidden)), inner
    yield "heads times their size", a.num_heads * a.d_v / table.tp, inner
    for width in model.attention_kind.low_rank_widths(a):
        yield width.name, np.full(len(table), float(width.elements)), inner if width.is_input else outer
    if model.num_dense_layers:
        yield "ffn_hidden", (model.mlp.ffn_hidden or 0) / table.tp, inner
    if model.moe is not None:
        yield "expert_hidden", model.moe.expert_hidden / table.etp, inner
        if model.moe.shared_hidden:
            yield "shared_hidden", model.moe.shared_hidden / table.tp, inner


def _torchao_sizes(job: JobAndMachines, table: StrategyTable) -> Iterator[tuple[str, FloatN, int]]:
    """As :func:`_sizes` of torchao's linears: weights' gradients sum over the tokens, whose number PyTorch wants a
    multiple of (aten/src/ATen/native/cuda/ScaledBlas.cpp of PyTorch 2.11); other widths are those of weights, which are
    left in bf16 where they are none."""
    yield "tokens of a micro-batch on a rank", table.micro_batch * job.workload.batch.seq_len / table.cp, UNIT


def _sizes_of_job(job: JobAndMachines, table: StrategyTable) -> Iterator[tuple[str, FloatN, int]]:
    return _sizes(job.workload, table) if not job.framework.traits.has_torchao else _torchao_sizes(job, table)


def float8_degrees_excess(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """Ranks beyond those with which torchtitan's fp8 is modelled: its linears are not split, and what is gathered in
    fp8 is gathered for each use. (n,)"""
    if not job.workload.precision.fp8_recipe or not job.framework.traits.has_torchao:
        return np.zeros(len(table))
    stages = table.pp - 1.0 if job.framework.fp8_all_gather else np.zeros(len(table))
    return np.asarray(np.maximum(table.tp - 1.0, stages))


def float8_degrees_message(job: JobAndMachines, table: StrategyTable) -> str:
    """Message for a table of one row."""
    gathered = " or in pipelines with fp8_all_gather" if job.framework.fp8_all_gather else ""
    return (
        f"{job.framework.name}: {job.workload.precision.gemm} is not modelled for linears that tensor parallelism "
        f"splits{gathered} ({degrees_text(table, 'tp', 'pp')}); set both to 1 or use bf16"
    )


def fp8_shortfall(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """Elements that the worst dimension lacks to a multiple of its unit; 0 where fp8 runs or is not asked for. (n,)"""
    short = np.zeros(len(table))
    if not job.workload.precision.fp8_recipe:
        return short
    for _, size, unit in _sizes_of_job(job, table):
        short = np.maximum(short, np.ceil(-size % unit))
    return short


def fp8_message(job: JobAndMachines, table: StrategyTable) -> str:
    """Message for a table of one row: the dimension that misses its unit by most, and what to do."""
    sizes = [(name, float(size[0]), unit) for name, size, unit in _sizes_of_job(job, table)]
    name, size, unit = max(sizes, key=lambda size: -size[1] % size[2])
    return (
        f"precision.gemm ({job.workload.precision.gemm}): {name} ({size:g} with {degrees_text(table, 'tp', 'cp')}) "
        f"must be a multiple of {unit}; change the degrees or use bf16"
    )
