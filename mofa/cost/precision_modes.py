"""Which candidates can be costed at once: those that mix precision alike, pipeline or accumulate alike, and wait for
the same collectives of tensor parallelism."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.block_cost import PrecisionMode
from mofa.cost.option_sets import dp_replicate_of_rows
from mofa.specs.framework import FrameworkSpec
from mofa.specs.strategy import StrategyTable
from mofa.specs.workload import WorkloadSpec


def rows_by_precision_mode(
    workload: WorkloadSpec, framework: FrameworkSpec, table: StrategyTable
) -> list[tuple[NDArray[np.intp], PrecisionMode]]:
    """Rows of each precision mode: those that share how the framework mixes precision, whether it pipelines or
    accumulates, and whether tensor parallelism is without sequence parallelism.

    torchtitan: FSDP's mixed precision where dp_shard * cp > 1, else training.dtype everywhere under tp or pp, else
    autocast (distributed/utils.py), which finds nothing to cast where training.dtype is bf16 itself.

    Parameters
    ----------
    workload, framework
        The job, the framework.
    table
        Strategies. (n,)

    Returns
    -------
    list of (array, PrecisionMode)
        Positions of rows, (m,) each, and the mode that they share.

    Examples
    --------
    >>> import mofa
    >>> from mofa.search.one_strategy import checked_strategy_row
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> megatron = mofa.load_framework("megatron")
    >>> table = checked_strategy_row(job, machines, megatron, "tp=2")
    >>> [rows.tolist() for rows, _ in rows_by_precision_mode(job, megatron, table)]
    [[0]]
    """
    rows = np.arange(len(table))
    if not framework.traits.has_pytorch_modules:
        # in a tape with sequence parallelism's collectives a backward would wait where these stand for all-reduces
        unsplit = (table.tp > 1) & ~table.sp
        return [(rows[some], PrecisionMode()) for some in (~unsplit, unsplit) if some.any()]
    shard = table.dp // np.maximum(np.minimum(dp_replicate_of_rows(framework, table), table.dp), 1)
    if framework.data_parallel == "ddp":
        shard = np.ones_like(shard)
    mixed = shard * table.cp > 1
    bare = ~mixed & (table.tp == 1) & (table.pp == 1)
    uniform = ~mixed & (~bare | (workload.precision.params == "bf16"))
    precision = np.where(mixed, 0, np.where(uniform, 1, 2))
    # op-level recomputation keeps the outputs of collectives: whether there are any is not an array either
    code = ((precision * 2 + (table.pp > 1)) * 2 + (table.tp > 1)) * 2 + (table.ep > 1)
    code = code * 2 + (table.tp * table.cp * shard > table.ep * table.etp)  # whether experts are sharded besides
    out = []
    for value in np.unique(code):
        chosen = np.flatnonzero(code == value)
        name = ("mixed", "uniform", "autocast")[int(precision[chosen[0]])]
        out.append((chosen, PrecisionMode(name, bool(table.pp[chosen[0]] > 1), amp=bool(bare[chosen[0]]))))
    return out
