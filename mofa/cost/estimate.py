"""Seconds and bytes of every candidate: the composition of blocks, stages, data parallelism and the optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import broadcast_to_combinations, first_largest_index, max_of_array_rows
from mofa.cost.block.block_cost import PrecisionMode, block_costs, recomputes_layers_whole, unique_rows
from mofa.cost.block.costs import BlockCosts
from mofa.cost.block.routing_loads import BALANCED, RoutingLoads
from mofa.cost.breakdown import HIDDEN_COMPONENTS, TIME_COMPONENTS, Breakdown
from mofa.cost.collector import TableCollector, checkpoint_bytes_of_heaviest_rank
from mofa.cost.kernels.lazy_loading import share_of_passes_with_kernel_load as drained_share
from mofa.cost.kernels.slowest_gpu import PaceFactors
from mofa.cost.layer_arrays import LayerArrays
from mofa.cost.memory.peak import StagePeakBytes, peaks_with_fullest_stage, stage_peak_bytes
from mofa.cost.memory.pinned import pinned_excess_bytes
from mofa.cost.memory.row_memory import RowMemory
from mofa.cost.option_sets import options_common_to_rows
from mofa.cost.physical_steps import refuse_unphysical_steps
from mofa.cost.precision_modes import rows_by_precision_mode
from mofa.cost.rank_spec import RankSpec, rank_specs
from mofa.cost.rows import GatheredRows, gather_rows, recompute_mode_indices
from mofa.cost.stages import Stages, stages_of_row
from mofa.cost.step_time.power_averaging import RESTED, power_averaged_idle_share
from mofa.cost.step_time.step import StepTime, name_waits_of_slowest_stage, step_time
from mofa.schedules import SCHEDULE_NAMES, combined_schedule_name
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.shared_facts import load_shared_facts
from mofa.specs.strategy import RecomputeSpec, StrategyTable
from mofa.specs.workload import WorkloadSpec

CHUNK_STAGES = 200_000
"""Stage rows composed at once: bounds the memory of the search to some hundred MiB."""
FEW_ROWS = 2_000
"""Rows of one pp and vpp up to which a call for each takes longer than working out both modes of layers for all. [-]"""


class TableEstimator:
    """The blocks of a table of legal strategies, costed once; :meth:`rows` composes any of its rows to steps.

    Parameters
    ----------
    table
        Candidates that the framework can run, with sets of its options that share blocks; (n,).
    loads
        How unevenly experts are loaded.
    drop
        Families of ops to leave out.
    counts_gpus_by_row
        Whether the slowest chip is that of as many GPUs as each row's degrees make, not that of the cluster's.
    """

    def __init__(
        self, workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, table: StrategyTable,
        loads: RoutingLoads = BALANCED, *, drop: frozenset[str] = frozenset(), counts_gpus_by_row: bool = False,
    ) -> None:  # fmt: skip
        framework = framework.with_options(options_common_to_rows(table))
        self.workload, self.cluster, self.framework, self.table = workload, cluster, framework, table
        self.loads, self.drop = loads, drop
        self.drains = np.zeros(len(table))
        """Share of passes in which kernels that are loaded take the host's lead. (n,) [-]"""
        self.rests = True
        """Whether pipelines' waits give back some of the clock that the power limit takes."""
        self.shared_rows: tuple[SharedRows, ...] = ()
        """The estimators whose blocks the rows share, where these have none of their own."""
        self.of = np.zeros(len(table), dtype=np.int64)
        self.place = np.zeros(len(table), dtype=np.intp)
        self.parts: list[PrecisionModeCosts] = []
        for chosen, mode in rows_by_precision_mode(workload, framework, table):
            self.of[chosen] = len(self.parts)
            some = table if len(chosen) == len(table) else table.select_rows(chosen)
            given = (workload, cluster, framework, some, loads, mode, drop)
            costs = block_costs(*given, counts_gpus_by_row=counts_gpus_by_row)
            self.place[chosen] = costs.index
            drains = broadcast_to_combinations(drained_share(costs.context), costs.machine.num_k)
            self.drains[chosen] = drains[costs.index]
            self.parts.append(PrecisionModeCosts.from_costs(mode, costs))

    def stages_of_row(self, row: int = 0) -> Stages:
        """Where the layers of a row of the table are."""
        return stages_of_row(self.workload, self.framework, self.table, row)

    def breakdown(
        self, which: NDArray[np.intp] | None = None, *, recompute_layers: NDArray[np.int64] | None = None,
        detail: bool = False, progress: Callable[[int], None] | None = None,
    ) -> Breakdown:  # fmt: skip
        """Cost rows of the table.

        Parameters
        ----------
        which
            Their positions; all where absent.
        recompute_layers
            Numbers of recomputed layers that replace the table's. (len(which),)
        detail
            Whether per-stage arrays are kept; for few rows of one pp.
        progress
            Told the number of rows done.

        Returns
        -------
        Breakdown
            Arrays in the order of ``which``.
        """
        which = np.arange(len(self.table)) if which is None else which
        layers = self.table.recompute_layers[which] if recompute_layers is None else recompute_layers
        table = replace(self.table.select_rows(which), recompute_layers=layers)
        out = TableCollector(table, len(table), detail)
        done = 0
        for chosen, rows in self._composed(which, layers, every_stage=detail):
            out.put_times_and_memory(chosen, rows)
            done += len(chosen)
            if progress is not None:
                progress(done)
        self._as_they_run(out.exposed, out.hidden, which, layers)
        # last: the clock goes by waits, whatever they are named
        name_waits_of_slowest_stage(out.exposed, out.named_last_s)
        breakdown = out.breakdown()
        refuse_unphysical_steps(breakdown, self.cluster)
        return breakdown

    def exposed_and_hidden_seconds(
        self, which: NDArray[np.intp] | None = None, *, recompute_layers: NDArray[np.int64] | None = None,
        every_stage: bool = False,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:  # fmt: skip
        """Exposed and hidden seconds of rows of the table by component, as :meth:`rows` says them, without memory.

        Shapes are (TIME_COMPONENTS, len(which)) and (HIDDEN_COMPONENTS, len(which)). [s]
        """
        which = np.arange(len(self.table)) if which is None else which
        layers = self.table.recompute_layers[which] if recompute_layers is None else recompute_layers
        exposed, hidden, named_last_s = self._component_seconds(which, layers, every_stage=every_stage)
        name_waits_of_slowest_stage(exposed, named_last_s)
        return exposed, hidden

    def _component_seconds(
        self, which: NDArray[np.intp], layers: NDArray[np.int64], *, every_stage: bool = False
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Exposed and hidden seconds, and :attr:`StepTime.named_last_s`, by which none of them is named yet. [s]"""
        exposed = np.zeros((len(TIME_COMPONENTS), len(which)))
        hidden = np.zeros((len(HIDDEN_COMPONENTS), len(which)))
        named_last_s = np.zeros((3, len(which)))
        for chosen, time in self._plain_steps(which, layers, every_stage):
            exposed[:, chosen], hidden[:, chosen] = time.exposed, time.hidden
            named_last_s[:, chosen] = time.named_last_s
        self._as_they_run(exposed, hidden, which, layers)
        return exposed, hidden, named_last_s

    def _plain_steps(
        self, which: NDArray[np.intp], layers: NDArray[np.int64], every_stage: bool
    ) -> Iterator[tuple[NDArray[np.intp], StepTime]]:
        """Steps of rows that compose together, as positions in ``which``: one plain run of each."""
        if every_stage and len(which) == len(self.table) == 1 and layers[0] == self.table.recompute_layers[0]:
            yield np.arange(1), self._step_with_every_stage
            return
        for chosen, rows in self._composed(which, layers, every_stage=every_stage):
            yield chosen, step_time(rows)

    def _as_they_run(
        self, exposed: NDArray[np.float64], hidden: NDArray[np.float64], which: NDArray[np.intp],
        layers: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """Change the seconds of one plain run of each row to those of all its runs, kernels loaded, at its clock."""
        runs = np.ones(len(which))
        if self.loads.over_budget_fraction:
            runs = self.runs_per_step(self.table.select_rows(which))
        exposed *= runs
        hidden *= runs
        share = self.drains[which]
        if share.any():
            drained_exposed, drained_hidden, _ = self.without_host_lead._component_seconds(which, layers)
            exposed += share * (drained_exposed - exposed)
            hidden += share * (drained_hidden - hidden)
        if self.rests:
            self._rest(exposed, hidden, which, layers, runs)

    def _rest(
        self, exposed: NDArray[np.float64], hidden: NDArray[np.float64], which: NDArray[np.intp],
        layers: NDArray[np.int64], runs: NDArray[np.float64],
    ) -> None:  # fmt: skip
        """Put rows at the clock that their pipeline's waits leave them, in each of a step's runs."""
        idle = self._idle(exposed / runs)
        waiting = np.flatnonzero(idle)
        if len(waiting):
            share = idle[waiting] / RESTED
            rested = self.at_clock_of_longest_waits._component_seconds(which[waiting], layers[waiting])
            exposed[:, waiting] += share * (rested[0] - exposed[:, waiting])
            hidden[:, waiting] += share * (rested[1] - hidden[:, waiting])

    def _idle(self, exposed: NDArray[np.float64]) -> NDArray[np.float64]:
        """What waits for other stages and the optimizer count, as a share of the step. (n,) [-]"""
        bubble_s, optimizer_s = (exposed[TIME_COMPONENTS.index(name)] for name in ("bubble", "optimizer"))
        limit, step_s = self.cluster.gpu.curves.power_limit, exposed.sum(axis=0)
        return power_averaged_idle_share(limit, bubble_s, optimizer_s, step_s, step_s - optimizer_s)

    @cached_property
    def without_host_lead(self) -> TableEstimator:
        """The estimator where loads have taken the host's lead in all passes."""
        if self.shared_rows:
            return self.from_shared_rows(
                self.table, [(of.without_host_lead, rows, places) for of, rows, places in self.shared_rows]
            )
        other = self._costed_as(BlockCosts.without_host_lead)
        other.drains = np.zeros(len(self.table))
        return other

    @cached_property
    def at_clock_of_longest_waits(self) -> TableEstimator:
        """The estimator at the clock that the power limit leaves a rank which waits for ``RESTED`` of its step: more
        waiting gives nothing."""
        if self.shared_rows:
            return self.from_shared_rows(
                self.table, [(of.at_clock_of_longest_waits, rows, places) for of, rows, places in self.shared_rows]
            )
        return self._rested_by(RESTED)

    @cached_property
    def at_power_limited_clock(self) -> TableEstimator:
        """The estimator for the table's only row, at the clock that its own waits leave: what is played."""
        if not self.rests:
            return self
        idle = float(self._idle(self._step_with_every_stage.exposed)[0])
        return self._rested_by(idle) if idle else self

    def _rested_by(self, idle: float) -> TableEstimator:
        other = self._costed_as(lambda costs: costs.with_idle_fraction(idle))
        other.rests = False
        return other

    def at_pace(self, pace: PaceFactors) -> TableEstimator:
        """The estimator on GPUs of a pace of their own, at the clock that it has."""
        other = self._costed_as(lambda costs: costs.at_pace(pace))
        other.rests = False
        return other

    def on_hosts_of(self, cluster: ClusterSpec) -> TableEstimator:
        """The estimator on a cluster whose hosts alone differ."""
        other = self._costed_as(lambda costs: costs.on_hosts_of(cluster))
        other.cluster = cluster
        return other

    def with_recompute_layers(self, number: int) -> TableEstimator:
        """The estimator for its table's only row with another number of recomputed layers: some, in both."""
        assert number > 0 < int(self.table.recompute_layers[0]), "all or none recomputed: other modes"
        other = self._costed_as(lambda costs: costs)
        other.table = replace(self.table, recompute_layers=np.array([number], dtype=np.int64))
        return other

    def with_layout(self, layout: str, recompute_layers: int) -> TableEstimator:
        """The estimator for its table's only row with another layout, and another number of recomputed layers."""
        other, only, number = self._copy(), np.zeros(1, dtype=np.int64), np.array([recompute_layers], dtype=np.int64)
        other.table = replace(self.table, layouts=(layout,), layout=only, recompute_layers=number)
        if isinstance(rested := self.__dict__.get("at_clock_of_longest_waits"), TableEstimator):  # its blocks are known
            other.__dict__["at_clock_of_longest_waits"] = rested.with_layout(layout, recompute_layers)
        return other

    @staticmethod
    def from_shared_rows(table: StrategyTable, shared_rows: Sequence[SharedRows]) -> TableEstimator:
        """An estimator of a table that shares the blocks of other estimators, some of each, all its rows in all."""
        first, begin = shared_rows[0][0], 0
        other = first._copy()
        other.table, other.shared_rows = table, tuple(shared_rows)
        other.framework = first.framework.with_options(options_common_to_rows(table))
        other.parts = [part for estimator, _, _ in shared_rows for part in estimator.parts]
        other.of, other.place = np.empty(len(table), first.of.dtype), np.empty(len(table), first.place.dtype)
        other.drains = np.empty(len(table))
        for estimator, rows, places in shared_rows:
            other.of[places] = begin + estimator.of[rows]
            other.place[places], other.drains[places] = estimator.place[rows], estimator.drains[rows]
            begin += len(estimator.parts)
        return other

    def _costed_as(self, changed: Callable[[BlockCosts], BlockCosts]) -> TableEstimator:
        """The estimator with other times of its blocks."""
        other = self._copy()
        other.parts = [PrecisionModeCosts.from_costs(part.mode, changed(part.costs)) for part in self.parts]
        return other

    def _copy(self) -> TableEstimator:
        """The estimator without what follows from its table and its blocks."""
        other = copy.copy(self)
        other.shared_rows = ()
        for name in (
            "row_with_every_stage", "_step_with_every_stage", "rank_specs", "_row_bytes", "without_host_lead",
            "at_clock_of_longest_waits", "at_power_limited_clock",
        ):  # fmt: skip
            other.__dict__.pop(name, None)
        return other

    @cached_property
    def row_with_every_stage(self) -> GatheredRows:
        """The table's only row with every stage, composed."""
        only = np.arange(len(self.table))
        ((_, rows),) = self._composed(only, self.table.recompute_layers, every_stage=True)
        return rows

    @cached_property
    def _step_with_every_stage(self) -> StepTime:
        """One plain run of the table's only row."""
        return step_time(self.row_with_every_stage)

    @cached_property
    def rank_specs(self) -> tuple[RankSpec, ...]:
        """What each of its pipeline ranks holds and does. (pp,)"""
        return rank_specs(self.row_with_every_stage)

    @cached_property
    def _row_bytes(self) -> StagePeakBytes:
        """Peaks of its stages, in closed form."""
        return stage_peak_bytes(self.row_with_every_stage)

    def only_row_without_time(self) -> Breakdown:
        """The table's only row in detail, but for its time."""
        only = np.arange(1)
        out = TableCollector(self.table, 1, True)
        out.put_memory(only, self.row_with_every_stage, peaks_with_fullest_stage(self._row_bytes), None)
        return out.breakdown()

    def stage_device_bytes(self) -> list[float]:
        """Device bytes of every stage of the table's only row. [B]"""
        device_bytes: list[float] = self._row_bytes.device[0].tolist()
        return device_bytes

    def runs_per_step(self, table: StrategyTable) -> NDArray[np.float64]:
        """How often the steps of a table run, on average: again where a rank's rows are over its budget. (n,) [-]"""
        groups = np.maximum(table.tp * table.cp * table.dp // np.maximum(table.ep * table.etp, 1), 1)
        micro_batches = np.maximum(self.workload.batch.global_batch // np.maximum(table.dp * table.micro_batch, 1), 1)
        return self.loads.runs_per_step(table.ep, (groups * micro_batches).astype(np.float64))

    def device_bytes_of_rows(self, which: NDArray[np.intp], recompute_layers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Memory alone of rows of the table with these numbers of recomputed layers. (len(which),) [B]"""
        return self.memory_of_rows(which, recompute_layers).device_bytes

    def memory_of_rows(
        self, which: NDArray[np.intp], recompute_layers: NDArray[np.int64],
        progress: Callable[[int], None] | None = None,
    ) -> RowMemory:  # fmt: skip
        """All of memory that a search asks for, of rows of the table with these numbers of recomputed layers.

        ``progress`` is told the number of rows done.
        """
        weighed = RowMemory(*np.empty((5, len(which))))
        done = 0
        for chosen, rows in self._composed(which, recompute_layers, every_stage=False):
            stages = stage_peak_bytes(rows)
            fullest = first_largest_index(stages.device)
            # what hosts cannot hold does not fit either, whatever the devices have
            excess = pinned_excess_bytes(rows)
            least = np.where(excess > 0.0, self.cluster.gpu.capacity_bytes.value + excess, 0.0)
            weighed.device_bytes[chosen] = np.maximum(max_of_array_rows(stages.device), least)
            certain = 1.0 - load_shared_facts().tolerances.allocated.value
            weighed.least_bytes[chosen] = max_of_array_rows(
                stages.device - stages.reserved + certain * stages.allocated
            )
            weighed.least_bytes[chosen] = np.maximum(weighed.least_bytes[chosen], least)
            weighed.allocated_bytes[chosen] = stages.allocated[np.arange(len(chosen)), fullest]
            weighed.reserved_bytes[chosen] = stages.reserved[np.arange(len(chosen)), fullest]
            weighed.checkpoint_bytes[chosen] = checkpoint_bytes_of_heaviest_rank(rows)
            done += len(chosen)
            if progress is not None:
                progress(done)
        return weighed

    def _composed(
        self, which: NDArray[np.intp], layers: NDArray[np.int64], *, every_stage: bool
    ) -> Iterator[tuple[NDArray[np.intp], GatheredRows]]:
        """Rows that compose together, as positions in ``which``, and what each gathers; ``layers`` are recomputed."""
        stacked = [
            part.layer_arrays_of_rows(self.table, which[self.of[which] == number])
            for number, part in enumerate(self.parts)
        ]
        for chosen, schedule in _groups(self.table, which, layers, self.of[which]):
            table_rows = which[chosen]
            number = int(self.of[table_rows[0]])
            part, (of_layers, of_mtp) = self.parts[number], stacked[number]
            some = replace(self.table.select_rows(table_rows), recompute_layers=layers[chosen])
            framework = self.framework.with_options(some.common_options)
            stages = stages_of_row(self.workload, framework, some, 0)
            if framework.expert_overlap == "combined":
                schedule = combined_schedule_name(schedule)
            yield chosen, gather_rows(
                self.workload, self.cluster, framework, some, part.costs, self.place[table_rows], stages, schedule,
                part.mode, of_layers, of_mtp, part.modes, every_stage=every_stage,
            )  # fmt: skip


SharedRows = tuple[TableEstimator, NDArray[np.intp], NDArray[np.intp]]
"""An estimator, some rows of its table, and which rows they are of another table."""


@dataclass(frozen=True)
class PrecisionModeCosts:
    """Costs of rows of one precision mode, which share what is not an array: their blocks, stacked for gathering."""

    mode: PrecisionMode
    costs: BlockCosts
    modes: list[RecomputeSpec]
    layers: LayerArrays
    mtp: LayerArrays | None

    @classmethod
    def from_costs(cls, mode: PrecisionMode, costs: BlockCosts) -> PrecisionModeCosts:
        """The costs of a precision mode, with its layers' as arrays."""
        modes = list(costs.blocks)
        return cls(
            mode, costs, modes, LayerArrays([costs.blocks[spec] for spec in modes]),
            LayerArrays([(costs.mtp[spec],) for spec in modes]) if costs.mtp is not None else None,
        )  # fmt: skip

    def layer_arrays_of_rows(
        self, table: StrategyTable, which: NDArray[np.intp]
    ) -> tuple[LayerArrays, LayerArrays | None]:
        """Layers and predictions as these rows read them: those in modes of none of them are not costed."""
        used = np.unique(recompute_mode_indices(self.modes, table.select_rows(which))).tolist()
        if len(used) in (0, len(self.modes)):
            return self.layers, self.mtp
        known, key = self._of_modes, tuple(used)
        if key not in known:
            known[key] = self.layers.only_in_modes(used), None if self.mtp is None else self.mtp.only_in_modes(used)
        return known[key]

    @cached_property
    def _of_modes(self) -> dict[tuple[int, ...], tuple[LayerArrays, LayerArrays | None]]:
        return {}


def estimate_table(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, table: StrategyTable,
    loads: RoutingLoads = BALANCED, *, detail: bool = False, drop: frozenset[str] = frozenset(),
) -> Breakdown:  # fmt: skip
    """Cost every row of a table of legal strategies; see :class:`TableEstimator`.

    Parameters
    ----------
    workload, cluster, framework
        The job, the machines, the framework.
    table
        Legal strategies. (n,)
    loads
        Tokens of the fullest rank; even where absent.
    detail
        Whether with parts by component.
    drop
        Families of ops that are left out.

    Returns
    -------
    Breakdown
        Seconds and bytes. (n,)

    Examples
    --------
    >>> import mofa
    >>> from mofa.search.one_strategy import checked_strategy_row
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> megatron = mofa.load_framework("megatron")
    >>> table = checked_strategy_row(job, machines, megatron, "tp=2 recompute=full")
    >>> estimate_table(job, machines, megatron, table).step_s.shape
    (1,)
    """
    return TableEstimator(workload, cluster, framework, table, loads, drop=drop).breakdown(detail=detail)


def _groups(
    table: StrategyTable, which: NDArray[np.intp], layers: NDArray[np.int64], part: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.intp], str]]:
    """Positions of rows of one part, pp, vpp, schedule, layout and set of options, in chunks.

    Where they are many, those that recompute no layer whole, all, or some are apart.
    """
    if len(which) == 0:
        return
    pp, schedule = table.pp[which], table.schedule[which]
    _, code = unique_rows([part, pp, table.vpp[which], schedule, table.layout[which], table.options[which]])
    recomputes_layers = np.array([recomputes_layers_whole(mode) for mode in table.recompute_modes])
    kind = np.where(recomputes_layers[table.recompute[which]], np.where(layers < 0, 1, 2), 0)
    _, code = unique_rows([code, np.where(np.bincount(code)[code] > FEW_ROWS, kind, 0)])
    order = np.argsort(code.astype(np.int16) if code.max() < 2**15 else code, kind="stable")  # small ones by digits
    bounds = [0, *(np.flatnonzero(np.diff(code[order])) + 1).tolist(), len(order)]
    for begin, end in pairwise(bounds):
        rows = order[begin:end]
        size = max(1, CHUNK_STAGES // int(pp[rows[0]]))
        for start in range(0, len(rows), size):
            yield rows[start : start + size], SCHEDULE_NAMES[int(schedule[rows[0]])]
