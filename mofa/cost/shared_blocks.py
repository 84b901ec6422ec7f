"""Estimators of tables that choose different options, which share the blocks that read none of these."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.block_cost import columns_that_blocks_read, layer_recompute_modes, unique_rows
from mofa.cost.block.routing_loads import RoutingLoads
from mofa.cost.estimate import SharedRows, TableEstimator
from mofa.cost.option_sets import option_set_groups_sharing_blocks
from mofa.cost.precision_modes import rows_by_precision_mode
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import StrategyTable
from mofa.specs.workload import WorkloadSpec


def estimators_sharing_blocks(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, tables: Sequence[StrategyTable],
    loads: RoutingLoads, *, counts_gpus_by_row: bool = False,
) -> list[TableEstimator]:  # fmt: skip
    """An estimator of each table; blocks that several tables have are costed once.

    Parameters
    ----------
    framework
        As it is but for the options that strategies choose.
    tables
        Legal strategies; each has one set of options, all the same modes of recomputation and layouts.
    loads
        How unevenly experts are loaded.
    counts_gpus_by_row
        As in :class:`mofa.cost.estimate.TableEstimator`.

    Notes
    -----
    Each costs its rows to the last bit as an estimator of its table alone does. So a single combination of a table is
    costed by itself, as sums of one come in another order than those of several, and so are layers of a table that has
    not all the modes of the others.
    """
    estimator_of = partial(
        TableEstimator, workload, cluster, framework, loads=loads, counts_gpus_by_row=counts_gpus_by_row
    )
    out: dict[int, TableEstimator] = {}
    for some in option_set_groups_sharing_blocks([table.common_options for table in tables]):
        own = [tables[i] for i in some]
        joined, table_of = StrategyTable.concatenated(own), np.repeat(np.arange(len(own)), list(map(len, own)))
        shares = _shares(workload, framework, joined, table_of)
        shared = estimator_of(joined.select_rows(shares)) if shares.any() else None
        for n, i in enumerate(some):
            shared_rows: list[SharedRows] = []
            if shared is not None and len(places := np.flatnonzero(shares[table_of == n])):
                shared_rows.append((shared, np.flatnonzero(table_of[shares] == n), places))
            if len(places := np.flatnonzero(~shares[table_of == n])):
                alone = estimator_of(own[n].select_rows(places))
                shared_rows.append((alone, np.arange(len(places)), places))
            out[i] = TableEstimator.from_shared_rows(own[n], shared_rows)
    return [out[i] for i in range(len(tables))]


def _shares(
    workload: WorkloadSpec, framework: FrameworkSpec, joined: StrategyTable, table_of: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """Which rows of several tables share their blocks with other tables' rows. (n,)"""
    shares = np.ones(len(joined), dtype=bool)
    for rows, _ in rows_by_precision_mode(workload, framework, joined):
        modes, tables = layer_recompute_modes(joined.select_rows(rows)), np.unique(table_of[rows]).tolist()
        for number in tables:
            own_rows = rows[table_of[rows] == number]
            own = joined.select_rows(own_rows)
            first, _ = unique_rows(columns_that_blocks_read(workload, framework, own))
            shares[own_rows] = len(tables) > 1 and len(first) > 1 and layer_recompute_modes(own) == modes
    return shares
