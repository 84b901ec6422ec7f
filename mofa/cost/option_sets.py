"""Which of the options that strategies choose their blocks read: strategies that differ in others share blocks.

Replicas of a shard group (HSDP) are read through process groups alone, which are columns. When Megatron gathers
parameters is read outside blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mofa.specs.framework import FrameworkSpec
from mofa.specs.strategy import FrameworkOptions, StrategyTable


def options_that_blocks_read(options: FrameworkOptions) -> FrameworkOptions:
    """The options without those that blocks read as columns or not at all.

    Examples
    --------
    >>> options_that_blocks_read(FrameworkOptions(dispatcher="deepep", dp_replicate=4))
    FrameworkOptions(tp_overlap=None, dispatcher='deepep', dp_replicate=None, overlap_param_gather=None)
    """
    return options._replace(dp_replicate=None, overlap_param_gather=None)


def options_common_to_rows(table: StrategyTable) -> FrameworkOptions:
    """The options that all rows choose; as the framework has them those in which rows may differ.

    Raises
    ------
    ValueError
        If rows differ in options that their blocks read.
    """
    sets = [table.option_sets[number] for number in np.unique(table.options).tolist()]
    if len(sets) < 2:
        return table.common_options
    if len(set(map(options_that_blocks_read, sets))) > 1:
        raise ValueError("rows differ in options that blocks read; cut the table by rows_by_options first")
    return options_that_blocks_read(sets[0])


def without_param_gather_choice(table: StrategyTable) -> StrategyTable:
    """The table as what reads no ``overlap_param_gather`` may see it: sets that differ in it alone are one."""
    alike = [options._replace(overlap_param_gather=None) for options in table.option_sets]
    first = [alike.index(options) for options in alike]
    return table if len(set(first)) == len(first) else replace(table, options=np.array(first)[table.options])


def dp_replicate_of_rows(framework: FrameworkSpec, table: StrategyTable) -> NDArray[np.int64]:
    """Replicas of each row's shard group: its own choice, else the framework's. (n,) [-]"""
    each = [framework.dp_replicate if n is None else n for n in (options.dp_replicate for options in table.option_sets)]
    return np.array(each, dtype=np.int64)[table.options]


def option_set_groups_sharing_blocks(sets: Sequence[FrameworkOptions]) -> list[list[int]]:
    """Positions of sets of options that share blocks, together.

    Examples
    --------
    >>> sets = [FrameworkOptions(dp_replicate=2), FrameworkOptions(dispatcher="deepep"), FrameworkOptions()]
    >>> option_set_groups_sharing_blocks(sets)
    [[0, 2], [1]]
    """
    together: dict[FrameworkOptions, list[int]] = {}
    for position, options in enumerate(sets):
        together.setdefault(options_that_blocks_read(options), []).append(position)
    return list(together.values())
