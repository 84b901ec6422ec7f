"""The smallest number of GPUs, of one node or over whole nodes, on which some strategy fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mofa.cost.estimate import TableEstimator
from mofa.schedules import default_schedule
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.space import MAX_PP, StrategySpace, combinations_table, default_space, divisors, max_pipeline_stages
from mofa.search.to_plan.builder import CandidatePlan, device_bytes_to_fit, memory_limit_bytes
from mofa.specs.hardware import ClusterSpec
from mofa.specs.params import num_mtp_params, num_params
from mofa.specs.strategy import StrategyTable
from mofa.specs.strategy_defaults import default_zero_stage

if TYPE_CHECKING:
    from mofa.search.goodput import LongRunObjective

MOST_GPUS = 131_072
PLAYED = 8
"""Strategies replayed for one number of GPUs to see whether any fits: those of the least memory. [-]"""
FIRST_ROWS, MOST_ROWS = 512, 32_768
"""Rows costed at first, and at most; four times as many each time that none fits. [-]"""


def fewest_fitting_gpus_and_note(
    job: JobAndMachines, constrained: Callable[[StrategySpace], StrategySpace], dp: int | None = None, *,
    replay: bool = False,
    judge: LongRunObjective | None = None,
) -> tuple[int | None, str]:  # fmt: skip
    """The fewest GPUs on which a strategy of the constrained space fits, and a sentence that says so.

    Numbers of GPUs are tried from the smallest on. A number counts if it is part of a node or whole nodes, and a
    product of the space's tp, cp, pp and a dp that divides the batch. The space is narrowed to what needs the least
    memory: micro_batch 1 and full recomputation where it has them, vpp 1. With ``replay``, a strategy fits only if its
    replayed memory does.

    Parameters
    ----------
    constrained
        Applies the user's constraints to a space.
    dp
        Data parallelism that the user wants; any where absent.
    judge
        Whose checkpoints must fit the hosts' memory, and have as many nodes as they need.
    """
    limit = memory_limit_bytes(job.cluster, job.framework)
    table = legal_rows_by_num_gpus(job, replace(_leanest(constrained(_any_number(job))), dp=dp))
    for rows in _growing(_num_gpus(table)):
        some = table.select_rows(rows)
        estimator = TableEstimator(
            job.workload, job.cluster, job.framework, some, routing_loads_by_ep(job.workload, some)
        )
        weighed = estimator.memory_of_rows(np.arange(len(some)), some.recompute_layers)
        device, num_gpus = weighed.device_bytes, _num_gpus(some)
        to_fit = device_bytes_to_fit(job.framework, some.pp, weighed, in_closed_form=job.is_judged_in_closed_form)
        fits = (weighed.least_bytes if replay else to_fit) <= limit
        if judge is not None:
            fits = _keeps(replace(judge, cluster=_most(job)), weighed.checkpoint_bytes, fits, num_gpus)
        for number in np.unique(num_gpus[fits]).tolist():
            fitting = np.flatnonzero(fits & (num_gpus == number))
            lean = fitting[np.argsort(device[fitting], kind="stable")][:PLAYED]
            if not replay or _plays(job, some.select_rows(lean), number):
                node = job.cluster.node.gpus_per_node
                few = f"whole nodes of {node} GPUs" if number >= node else f"of the {node} GPUs of a node"
                return number, f"the fewest {few} on which a strategy fits"
    return None, f"no number of GPUs up to {MOST_GPUS:,} would do"


def _keeps(
    judge: LongRunObjective, checkpoint_bytes: NDArray[np.float64], fits: NDArray[np.bool_], num_gpus: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which fitting rows have enough nodes, with enough host memory, for what checkpoints keep there. (n,)"""
    spec, node = judge.faults.checkpoint, judge.cluster.node.gpus_per_node
    if spec.mode == "blocking":
        return fits
    rows = np.flatnonzero(fits & (num_gpus >= spec.least_nodes_for_copies * node))
    keeps = np.zeros_like(fits)
    if len(rows):
        keeps[rows] = judge.missing_host_bytes(checkpoint_bytes[rows]) <= 0
    return keeps


def legal_rows_by_num_gpus(job: JobAndMachines, space: StrategySpace) -> StrategyTable:
    """Legal strategies of a space on part of a node or whole nodes, by rising number of GPUs, tp x cp x pp x dp."""
    node, capacity = job.cluster.node.gpus_per_node, job.cluster.gpu.capacity_bytes.value
    least = 2.0 * (num_params(job.workload.model) + num_mtp_params(job.workload.model)) / max(capacity, 1.0)
    degrees = combinations_table(replace(space, dp=None), _most(job), job.framework)
    ranks = degrees.tp * degrees.cp * degrees.pp
    tables = []
    for dp in divisors(job.workload.batch.global_batch, MOST_GPUS) if space.dp is None else (space.dp,):
        number = ranks * dp
        rows = np.flatnonzero(((number % node == 0) | (number < node)) & (number <= MOST_GPUS) & (number >= least))
        table = replace(degrees.select_rows(rows), dp=np.full(len(rows), dp))
        if space.zero is None:
            framework = job.framework.with_options(table.common_options)
            table = replace(table, zero=default_zero_stage(framework, table.dp, table.cp, table.pp))
        tables.append(table.select_rows(check_strategies(job, table, except_checks=("gpus",)).reason < 0))
    table = StrategyTable.concatenated(tables)
    return table.select_rows(np.argsort(_num_gpus(table), kind="stable"))


def _any_number(job: JobAndMachines) -> StrategySpace:
    """The default space without values that belong to one number of GPUs."""
    space = default_space(job.workload, _most(job), job.framework)
    return replace(space, pp=tuple(range(1, min(MAX_PP, max_pipeline_stages(job.workload.model.num_layers)) + 1)))


def _leanest(space: StrategySpace) -> StrategySpace:
    """The part of a space that needs the least memory."""
    # of full recomputation the one in the most token chunks, which comes last
    modes = tuple((m, n) for m, n in space.recompute if m.kind == "full" and n == -1)[-1:] or space.recompute[-1:]
    if default_schedule(1) in space.schedule:
        space = replace(space, vpp=space.vpp[:1])
    return replace(space, micro_batch=space.micro_batch[:1], recompute=modes, options=space.options[:1])


def _most(job: JobAndMachines) -> ClusterSpec:
    return job.cluster.model_copy(update={"num_gpus": MOST_GPUS})


def _num_gpus(table: StrategyTable) -> NDArray[np.int64]:
    return table.tp * table.cp * table.pp * table.dp


def _growing(num_gpus: NDArray[np.int64]) -> Iterator[slice]:
    """Parts of rows that grow in size; all rows of a number of GPUs are in one part. ``num_gpus`` rises. (n,)"""
    start, size = 0, FIRST_ROWS
    while start < len(num_gpus):
        end = int(np.searchsorted(num_gpus, num_gpus[min(start + size, len(num_gpus)) - 1], side="right"))
        yield slice(start, end)
        start, size = end, min(4 * size, MOST_ROWS)


def _plays(job: JobAndMachines, table: StrategyTable, num_gpus: int) -> bool:
    """Whether one of these strategies fits by replay."""
    cluster, loads = job.cluster.model_copy(update={"num_gpus": num_gpus}), routing_loads_by_ep(job.workload, table)
    rows = (table.select_rows(slice(i, i + 1)) for i in range(len(table)))
    limit = memory_limit_bytes(cluster, job.framework)
    return any(
        CandidatePlan(job.workload, cluster, job.framework, row, loads, "causal").replayed_device_bytes(limit) <= limit
        for row in rows
    )
