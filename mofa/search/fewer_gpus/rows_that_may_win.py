"""Strategies on a number of GPUs whose steps may be below a limit, by what their blocks take at least."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.cost.lower_bounds.steps import power_averaged_lower_bound_s
from mofa.cost.option_sets import options_that_blocks_read
from mofa.search.fewer_gpus.block_work import LeastStepGpuSeconds, may_defer_weight_gradients
from mofa.search.legality.masks import JobAndMachines
from mofa.search.space import (
    SpaceCombinations,
    StrategySpace,
    combinations_of_space,
    gathers_at_once_without_gain,
    with_derived_degrees,
)
from mofa.specs.strategy import StrategyTable

FloatN = NDArray[np.float64]
IntN = NDArray[np.int64]
Rows = NDArray[np.intp]
TIED = 1e-9
"""Bounds that are above a limit by less, as a share, are kept. [-]"""


class _Grid(NamedTuple):
    """A tp x cp x pp of the GPUs, the blocks that it can have, and the least that their steps take. (b,) [s]"""

    pp: int
    dp: int
    blocks: Rows
    bound_s: FloatN


@dataclass(frozen=True)
class SpaceOnFewerGpus:
    """The strategies of a space on a number of GPUs.

    Attributes
    ----------
    job
        On these GPUs alone.
    space
        Of these GPUs.
    work
        Of blocks, by whether backwards are halved (:func:`mofa.search.fewer_gpus.block_work.least_block_gpu_seconds`).
    """

    job: JobAndMachines
    space: StrategySpace
    work: Mapping[bool, LeastStepGpuSeconds]

    def least_step_s(self, limit_s: float) -> float:
        """The least that any step takes; infinite where that is not below the limit. [s]"""
        grids = (grid for halved in self.work for grid in self._grids(halved, limit_s))
        return min((float(grid.bound_s.min()) for grid in grids), default=np.inf)

    def rows_below_step_limit(self, limit_s: float) -> tuple[SpaceCombinations, FloatN] | None:
        """The strategies whose steps may take less than the limit, and GPU-seconds of their degrees; None without any.

        The GPU-seconds, (c,), are what the degrees' blocks take in a step at least. [s]
        """
        tables = [some for halved in self.work if (some := self._degrees(halved, limit_s)) is not None]
        if not tables:
            return None
        degrees, recompute = StrategyTable.concatenated([table for table, _ in tables]), self.space.recompute
        number = np.array([degrees.recompute_modes.index(mode) for mode, _ in recompute], dtype=np.int64)
        layers = np.array([n for _, n in recompute], dtype=np.int32)
        rows = SpaceCombinations(degrees, number, np.tile(layers, len(degrees)))
        return rows, np.concatenate([gpu_s for _, gpu_s in tables])

    def _grids(self, halved: bool, limit_s: float) -> Iterator[_Grid]:
        """Grids whose steps may take less than the limit, those that halve backwards or the others."""
        work, batch = self.work[halved], self.job.workload.batch.global_batch
        table, num_gpus = work.table, self.job.cluster.num_gpus
        few = ~(work.gpu_s / num_gpus > limit_s * (1.0 + TIED))
        for tp, cp, pp in self._degrees_of_grids:
            dp = num_gpus // (tp * cp * pp)
            fits = few & (table.tp == tp) & (table.cp == cp) & (batch % (dp * table.micro_batch) == 0)
            fits &= (tp * cp * dp) % (table.ep * table.etp) == 0
            blocks = np.flatnonzero(fits)
            if len(blocks):
                bound_s = self._bound_s(work, blocks, pp, dp, halved)
                below = ~(bound_s > limit_s * (1.0 + TIED))
                if below.any():
                    yield _Grid(pp, dp, blocks[below], bound_s[below])

    @cached_property
    def _degrees_of_grids(self) -> list[tuple[int, int, int]]:
        """tp, cp and pp that the GPUs are a multiple of, with a dp that divides the batch."""
        space, num_gpus, batch = self.space, self.job.cluster.num_gpus, self.job.workload.batch.global_batch
        return [
            (tp, cp, pp)
            for tp in space.tp for cp in space.cp for pp in space.pp
            if num_gpus % (tp * cp * pp) == 0 and batch % (num_gpus // (tp * cp * pp)) == 0
            and space.dp in (None, num_gpus // (tp * cp * pp))
        ]  # fmt: skip

    def _bound_s(self, work: LeastStepGpuSeconds, blocks: Rows, pp: int, dp: int, halved: bool) -> FloatN:
        """What the steps of blocks take at least on pp x dp. (b,) [s]

        Notes
        -----
        The fullest rank computes a pp-th of all, and one has ``ceil(layers / pp)`` of each kind of layers. Where
        Megatron has one chunk a rank, rank r waits for the forwards of those ahead of it, and the last gradient goes
        back through them: ``max over r of (m T_r + sum of T_q over q < r)``. That is least where it is the same for
        all r, ``sum of T / (1 - (1 - 1/m)^pp)``.
        """
        num_gpus, batch = self.job.cluster.num_gpus, self.job.workload.batch.global_batch
        m = batch // (dp * work.table.micro_batch[blocks])
        of_kinds = (-(-work.num_layers // pp) * pp)[:, None] * work.layer_gpu_s[:, blocks]
        bound_s = np.maximum(work.gpu_s[blocks], of_kinds.max(axis=0)) / num_gpus
        if not halved and not self.job.framework.traits.has_pytorch_pipelines:
            alone_s = work.gpu_s[blocks] / num_gpus * pp / m / (1.0 - (1.0 - 1.0 / m) ** pp)
            bound_s = np.where(m % pp > 0, np.maximum(bound_s, alone_s), bound_s)
        return power_averaged_lower_bound_s(self.job.cluster, bound_s) if pp > 1 else bound_s

    def _degrees(self, halved: bool, limit_s: float) -> tuple[StrategyTable, FloatN] | None:
        """The rows of all grids below the limit, in every vpp, schedule and option, and what their blocks take. [s]"""
        grids, table = list(self._grids(halved, limit_s)), self.work[halved].table
        vpp, schedule = self._chunks(halved)
        if not grids or not len(vpp):
            return None
        blocks = np.concatenate([grid.blocks for grid in grids])
        pp = np.repeat([grid.pp for grid in grids], [len(grid.blocks) for grid in grids])
        base = [options_that_blocks_read(options) for options in self.space.options]
        numbers = [np.flatnonzero([own == options for own in base]) for options in table.option_sets]
        each = np.array([len(number) for number in numbers])[table.options[blocks]]
        options = np.concatenate([np.empty(0, np.intp), *(numbers[n] for n in table.options[blocks].tolist())])
        blocks, pp = np.repeat(blocks, each), np.repeat(pp, each)
        kinds, rows = len(vpp), np.repeat(blocks, len(vpp))
        of_blocks = {
            name: getattr(table, name)[rows] for name in ("tp", "sp", "cp", "ep", "etp", "micro_batch", "cp_kind")
        }
        columns = [
            of_blocks["tp"], of_blocks["cp"], np.repeat(pp, kinds), np.tile(vpp, len(blocks)), of_blocks["ep"],
            of_blocks["etp"], of_blocks["micro_batch"], of_blocks["cp_kind"], np.tile(schedule, len(blocks)),
            table.balancing[rows], np.repeat(options, kinds), of_blocks["sp"],
        ]  # fmt: skip
        several = (columns[2] > 1) | (columns[3] == 1)  # without a pipeline there is one chunk
        num_gpus = self.job.cluster.num_gpus
        several &= ~gathers_at_once_without_gain(self.space, columns[10], columns[0], columns[2], columns[3], num_gpus)
        columns = [column[several] for column in columns]
        modes = tuple(dict.fromkeys(mode for mode, _ in self.space.recompute))
        degrees = with_derived_degrees(columns, self.space, modes, self.job.cluster, self.job.framework)
        return degrees, self.work[halved].gpu_s[rows][several]

    def _chunks(self, halved: bool) -> tuple[IntN, IntN]:
        """Each vpp with each schedule that has it, of those that halve backwards or the others. (k,) each"""
        chosen = tuple(name for name in self.space.schedule if may_defer_weight_gradients(name) == halved)
        alone = replace(
            self.space, tp=(1,), cp=(1,), pp=(1,), ep=(1,), etp=(1,), micro_batch=(1,), dp=None, zero=0,
            cp_kind=self.space.cp_kind[:1], balancing=self.space.balancing[:1], options=self.space.options[:1],
            schedule=chosen,
        )  # fmt: skip
        if not chosen:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        table = combinations_of_space(alone, self.job.cluster, self.job.framework).degrees
        return table.vpp, table.schedule
