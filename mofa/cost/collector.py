"""What groups of rows cost, put back into the order of their table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.breakdown import HIDDEN_COMPONENTS, MEMORY_COMPONENTS, TIME_COMPONENTS, Breakdown, StageDetail
from mofa.cost.checkpoint import checkpoint_bytes_of_rank
from mofa.cost.memory.peak import StagePeaks, stage_peaks
from mofa.cost.rows import GatheredRows
from mofa.cost.step_time.step import StepTime, step_time
from mofa.specs.strategy import StrategyTable


class TableCollector:
    """Puts the results of groups of rows back into the order of the table."""

    def __init__(self, table: StrategyTable, n: int, detail: bool) -> None:
        self.table, self.n, self.keep = table, n, detail
        self.exposed = np.zeros((len(TIME_COMPONENTS), n))
        self.hidden = np.zeros((len(HIDDEN_COMPONENTS), n))
        self.memory = np.zeros((len(MEMORY_COMPONENTS), n))
        self.allocated, self.reserved, self.device, self.flops, self.saved = (np.zeros(n) for _ in range(5))
        self.named_last_s = np.zeros((3, n))
        self.instant = np.zeros(n, dtype=np.int64)
        self.fullest = np.zeros(n, dtype=np.int64)
        self.slowest = np.zeros(n, dtype=np.int64)
        self.names: tuple[str, ...] = ()
        self.detail: StageDetail | None = None

    def put_times_and_memory(self, places: NDArray[np.intp], rows: GatheredRows) -> None:
        """Put times and memory of a group of rows into their places of the table."""
        time = step_time(rows)
        self.put_memory(places, rows, stage_peaks(rows), time)

    def put_memory(self, places: NDArray[np.intp], rows: GatheredRows, peak: StagePeaks, time: StepTime | None) -> None:
        """Put what is known of rows; NaN for a time that is not."""
        most, row_index = peak.stages, np.arange(len(places))
        if time is None:
            nothing = np.full((1, len(places)), np.nan)
            slowest = np.zeros(len(places), dtype=np.intp)
            time = StepTime(nothing, nothing, np.full(most.device.shape, np.nan), slowest, np.zeros(len(places)))
        self.exposed[:, places], self.hidden[:, places] = time.exposed, time.hidden
        self.named_last_s[:, places] = time.named_last_s
        self.allocated[places] = most.allocated[row_index, peak.fullest]
        self.reserved[places] = most.reserved[row_index, peak.fullest]
        self.device[places] = most.device[row_index, peak.fullest]
        self.fullest[places], self.slowest[places] = rows.stage_layers.shown.shown_stages[peak.fullest], time.slowest
        # what is alive on every stage, or on the fullest alone
        pp = most.allocated.shape[1]
        row, stage = (
            (np.repeat(row_index, pp), np.tile(np.arange(pp), len(places))) if self.keep else (row_index, peak.fullest)
        )
        live = most.candidates.live_components_at_peaks(row, most.instant[row, stage], stage)
        of_fullest = live[:, row_index * pp + peak.fullest] if self.keep else live
        communicators = most.communicators[row_index, peak.fullest]
        self.memory[:, places] = _components(
            rows, of_fullest, self.allocated[places], self.reserved[places], communicators
        )
        base = len(self.names)
        self.names = (*self.names, *peak.names)
        self.instant[places] = base + most.instant[row_index, peak.fullest]
        self.flops[places] = hardware_flops_of_rows(rows)
        self.saved[places] = checkpoint_bytes_of_heaviest_rank(rows)
        if self.keep:
            parts = _components(rows, live, most.allocated[row, stage], most.reserved[row, stage],
                                most.communicators[row, stage])  # fmt: skip
            counts = rows.stage_layers.layer_counts.sum(axis=1)
            flight = rows.stage_layers.base_mode_in_flight.sum(
                axis=1
            ) + rows.stage_layers.fully_recomputed_in_flight.sum(axis=1)
            self._keep(places, StageDetail(
                time.stage_s, most.allocated, most.reserved, most.device, parts.reshape(-1, len(places), pp),
                base + most.instant, flight / np.maximum(counts, 1), counts.astype(np.int64),
                rows.stage_layers.fully_recomputed.sum(axis=1).astype(np.int64),
            ))  # fmt: skip

    def _keep(self, places: NDArray[np.intp], some: StageDetail) -> None:
        """The stages of these rows beside those of others; all of one pp."""
        if len(places) == self.n:
            places = np.argsort(places)
            self.detail = StageDetail(*(array[..., places, :] for array in vars(some).values()))
            return
        if self.detail is None:
            shapes = ((array, (*array.shape[:-2], self.n, array.shape[-1])) for array in vars(some).values())
            self.detail = StageDetail(*(np.zeros(shape, array.dtype) for array, shape in shapes))
        for name, array in vars(some).items():
            getattr(self.detail, name)[..., places, :] = array

    def breakdown(self) -> Breakdown:
        """The breakdown of all rows that were collected."""
        return Breakdown(
            self.table, self.exposed.sum(axis=0), self.exposed, self.hidden, self.allocated, self.reserved,
            self.device, self.memory, self.flops, self.instant, self.fullest, self.slowest, self.names, self.saved,
            self.detail,
        )  # fmt: skip


def _components(
    rows: GatheredRows, live: NDArray[np.float64], allocated: NDArray[np.float64], reserved: NDArray[np.float64],
    communicators: NDArray[np.float64],
) -> NDArray[np.float64]:  # fmt: skip
    """The parts of the device memory, in the order of MEMORY_COMPONENTS."""
    total = live.sum(axis=0)
    context = np.full(len(allocated), rows.cluster.gpu.context_bytes.value)
    return np.concatenate(
        [live * (allocated / total), (reserved - allocated)[None], context[None], communicators[None]]
    )


def checkpoint_bytes_of_heaviest_rank(rows: GatheredRows) -> NDArray[np.float64]:
    """What a rank of the heaviest stage saves in a checkpoint. (n,) [B]"""
    return checkpoint_bytes_of_rank(rows.workload, rows.framework, rows.shards)[rows.grid_index]


def hardware_flops_of_rows(rows: GatheredRows) -> NDArray[np.float64]:
    """FLOPs that all ranks run in one step, recomputation and padding included. (n,) [FLOP]"""
    c, table = rows.costs, rows.table
    per_rank = rows.sum_layers_by_stage(rows.layers.layer_flops) + rows.sum_of_end_blocks_by_stage(
        c.embedding.forward_flops + c.embedding.backward_flops, c.head.forward_flops + c.head.backward_flops,
        rows.mtp_layer_quantity("layer_flops"),
    )  # fmt: skip
    return np.asarray(rows.sum_over_stages(per_rank) * rows.num_micro_batches * table.tp * table.cp * table.dp)
