"""Strategies on fewer GPUs that all GPUs run too, with more data parallelism: what these took says what they take."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.block_cost import unique_rows
from mofa.cost.breakdown import TIME_COMPONENTS
from mofa.search.costing import CostedRows
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.legality.named_check import Verdicts
from mofa.search.space import SOLVED, SpaceCombinations
from mofa.specs.strategy import StrategyTable

FloatN = NDArray[np.float64]
ONCE_A_STEP = [TIME_COMPONENTS.index(name) for name in ("dp", "optimizer")]
COLUMNS = (
    "tp", "sp", "cp", "cp_kind", "pp", "vpp", "ep", "etp", "micro_batch", "zero", "recompute", "schedule", "balancing",
    "options",
)  # fmt: skip
"""What a strategy and its sibling have alike."""


@dataclass(frozen=True)
class RowsOnAllGpus:
    """What a search on all GPUs costed.

    Rows that it was free to leave out are slower than ``limit`` or too big.
    """

    job: JobAndMachines
    costed: CostedRows
    reasons: Verdicts
    is_solved: NDArray[np.bool_]
    """Modes whose number of recomputed layers is solved for. (M,)"""

    def step_bounds_from_siblings_s(self, rows: SpaceCombinations, gpu_s: FloatN) -> FloatN:
        """A time below the steps of rows on fewer GPUs. (c * M,) [s]

        Parameters
        ----------
        rows
            Degrees of one number of GPUs in all modes of the search.
        gpu_s
            What their blocks take in a step at least, on all GPUs together. (c,) [s]

        Returns
        -------
        array
            0 where all GPUs do not run the strategy. Infinite where it was not among those costed, or did not fit: with
            less data parallelism it has no more memory left and does more micro-batches, each of which takes the
            fullest rank at least ``gpu_s / GPUs`` of all micro-batches.

        Notes
        -----
        What comes once a step, the exchange of gradients and the optimizer, may be less with fewer ranks: it counts
        nothing. Weights sharded over the ranks of data parallelism (FSDP) make blocks depend on it: no bound.
        """
        bound_s, num_modes = np.zeros(len(rows)), len(rows.recompute)
        degrees, num_gpus = rows.degrees, self.job.cluster.num_gpus
        ranks = degrees.tp * degrees.cp * degrees.pp
        some = np.flatnonzero(num_gpus % ranks == 0)
        if self.job.framework.shards_params or not len(some):
            return bound_s
        siblings = rows.rows_of_degrees(some)
        siblings = replace(siblings, degrees=replace(siblings.degrees, dp=num_gpus // ranks[some]))
        legal = np.flatnonzero(check_strategies(self.job, siblings).reason < 0)
        if not len(legal):
            return bound_s
        of, mode = np.divmod(legal, num_modes)
        computed_s = self._computed_s(siblings.select_rows(legal), self.is_solved[mode])
        fewest = degrees.dp[some] * ranks[some]
        more_s = gpu_s[some] * (1.0 / fewest - 1.0 / num_gpus)
        bound_s[some[of] * num_modes + mode] = computed_s + more_s[of]
        return bound_s

    def _computed_s(self, table: StrategyTable, solved: NDArray[np.bool_]) -> FloatN:
        """The costed steps of rows but for what comes once a step; infinite of others. (n,) [s]"""
        on_all, own_solved = self.costed.table, self.is_solved[self.costed.rows % len(self.is_solved)]
        columns = [np.concatenate([getattr(on_all, name), getattr(table, name)]).astype(np.int64) for name in COLUMNS]
        layers = [
            np.where(own_solved, SOLVED, on_all.recompute_layers),
            np.where(solved, SOLVED, table.recompute_layers),
        ]
        first, which = unique_rows([*columns, np.concatenate(layers)])
        fits = self.reasons[self.costed.rows] < 0
        computed_s = self.costed.step_s - self.costed.exposed_s[ONCE_A_STEP].sum(axis=0)
        of_each = np.full(len(first), np.inf)
        of_each[which[: len(on_all)]] = np.where(fits, computed_s, np.inf)
        return of_each[which[len(on_all) :]]
