"""How many layers of each chunk to recompute whole: as few as fit in closed form, and more or fewer after a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mofa.cost.estimate import TableEstimator
from mofa.cost.stages import split_layers
from mofa.search.legality.masks import JobAndMachines
from mofa.search.space import SpaceCombinations
from mofa.specs.framework import FrameworkSpec
from mofa.specs.workload import WorkloadSpec

COST_AT_ONCE = 200_000
"""Rows costed in one call. [-]"""
FEW_NUMBERS = 10_000
"""Numbers of layers of all rows up to which all are costed in one go: a call takes as long as some hundred. [-]"""


@dataclass(frozen=True)
class RowsWithOpenRecomputation:
    """Rows of a space whose number of recomputed layers of each chunk is to be solved for.

    With ``none`` and ``all_layers`` go the rows of the same degrees that recompute no layer and all; None of a space
    without. ``largest`` are the layers of each row's largest chunk. (n,) each
    """

    rows: NDArray[np.intp]
    none: NDArray[np.intp] | None
    all_layers: NDArray[np.intp] | None
    largest: NDArray[np.int64]

    @classmethod
    def of_space(
        cls, job: JobAndMachines, space: SpaceCombinations, rows: NDArray[np.intp]
    ) -> RowsWithOpenRecomputation:
        """Those of the ``rows`` of a space."""
        none, all_layers = rows_recomputing_none_and_all(space, rows) if len(rows) else (rows, rows)
        table, num_modes = space.degrees, len(space.recompute)
        largest = np.zeros(len(rows), dtype=np.int64)
        pp, vpp = table.pp[rows // num_modes], table.vpp[rows // num_modes]
        code = pp * 4096 + vpp
        for value in np.unique(code):
            same = code == value
            first = int(np.argmax(same))
            layout = table.layout_text_of_row(int(rows[first]) // num_modes)
            largest[same] = _largest_chunk(job.workload, job.framework, int(pp[first]), int(vpp[first]), layout)
        return cls(rows, none, all_layers, largest)

    @cached_property
    def rows_with_every_number_of_layers(self) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Each of the rows with every number that is between none and all: its place among them, and the number.

        Nothing where they are more than :data:`FEW_NUMBERS`. (numbers,) each
        """
        if self.none is None or self.all_layers is None:
            return np.arange(len(self.rows)), np.ones(len(self.rows), dtype=np.int64)
        if self.largest.sum() > FEW_NUMBERS:
            return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.int64)
        numbers = np.arange(int(self.largest.max(initial=1)))
        of, number = np.nonzero((numbers < self.largest[:, None]) & (numbers > 0))
        return of, number


def solve_recomputed_layers(
    open_rows: RowsWithOpenRecomputation, device_bytes: NDArray[np.float64], of_every_number: NDArray[np.float64],
    cost: Callable[[NDArray[np.intp], NDArray[np.int64]], NDArray[np.float64]], limit: float,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:  # fmt: skip
    """Choose how many layers of each chunk to recompute: as few as fit, between none and all of them.

    Parameters
    ----------
    open_rows
        Rows of a space.
    device_bytes
        Of the space's rows; known of those that recompute none and all. [B]
    of_every_number
        Of the open rows with :attr:`RowsWithOpenRecomputation.rows_with_every_number_of_layers`. [B]
    cost
        Gives the device memory of some of the open rows, by their places, with these numbers. [B]
    limit
        What a row may have. [B]

    Returns
    -------
    tuple of arrays
        The number of each row: 0 or -1 where none or all fit as they are, or where all are too few. And the bytes that
        all lack there, 0 elsewhere. (n,) each
    """
    if open_rows.none is None or open_rows.all_layers is None:
        return np.ones(len(open_rows.rows), dtype=np.int64), np.zeros(len(open_rows.rows))
    none, all_layers = device_bytes[open_rows.none], device_bytes[open_rows.all_layers]
    unneeded, fits = none <= limit, all_layers <= limit
    number = np.where(unneeded, 0, -1)
    between = np.flatnonzero(~unneeded & fits)
    largest = open_rows.largest[between]
    of_each = None
    if len(of_every_number) or not largest.sum():
        of_each = np.full((len(open_rows.rows), int(open_rows.largest.max(initial=1))), np.nan)
        of_each[open_rows.rows_with_every_number_of_layers] = of_every_number
        of_each = of_each[between]
    fewest = _fewest_layers(
        lambda some, tried: cost(between[some], tried), of_each, none[between], all_layers[between], largest, limit
    )
    number[between] = np.where(fewest >= largest, -1, fewest)
    return number, np.where(~unneeded & ~fits, all_layers - limit, 0.0)


def rows_recomputing_none_and_all(
    space: SpaceCombinations, rows: NDArray[np.intp]
) -> tuple[NDArray[np.intp] | None, NDArray[np.intp] | None]:
    """The rows of the same degrees that recompute no layer, and those that recompute all; None of a space without.

    ``rows`` are those whose number of layers is to be solved for.
    """
    kinds = [
        (space.degrees.recompute_modes[of].kind, n)
        for of, n in zip(space.recompute.tolist(), space.recompute_layers[: len(space.recompute)].tolist(), strict=True)
    ]
    open_mode = int(rows[0]) % len(kinds)
    none, all_layers = (
        rows + (kinds.index(mode) - open_mode) if mode in kinds else None for mode in (("none", -1), ("full", -1))
    )
    return none, all_layers


def more_recomputed_layers(
    workload: WorkloadSpec, framework: FrameworkSpec, estimator: TableEstimator, lacking_bytes: float
) -> int | None:
    """More recomputed layers of a chunk, for a strategy that lacks so much memory when replayed.

    At least one more, and at most as many as save the missing bytes in closed form: no number that fits is skipped.

    Parameters
    ----------
    estimator
        Of this strategy alone, a table of one row.

    Returns
    -------
    int or None
        None where one more is all of them.
    """
    table = estimator.table
    fewest = int(table.recompute_layers[0]) + 1
    largest = _largest_chunk(workload, framework, int(table.pp[0]), int(table.vpp[0]), table.layout_text_of_row(0))
    numbers = np.arange(fewest - 1, largest)
    if len(numbers) < 2:
        return None
    device = estimator.device_bytes_of_rows(np.zeros(len(numbers), dtype=np.intp), numbers)
    too_few = numbers[device[0] - device <= lacking_bytes]
    return max(fewest, int(too_few[-1]))


def fewest_recomputed_layers(estimator: TableEstimator, replay_free_bytes: float) -> int:
    """The fewest layers of a chunk to recompute, for a strategy that leaves so much memory free when replayed.

    One at least; the strategy's own number if no fewer do. Assumes that each layer takes its bytes in closed form.
    ``estimator`` as in :func:`more_recomputed_layers`.
    """
    numbers = np.arange(1, int(estimator.table.recompute_layers[0]) + 1)
    device = estimator.device_bytes_of_rows(np.zeros(len(numbers), dtype=np.intp), numbers)
    return int(numbers[device - device[-1] <= max(replay_free_bytes, 0.0)][0])


def _largest_chunk(workload: WorkloadSpec, framework: FrameworkSpec, pp: int, vpp: int, layout: str) -> int:
    """Layers of the largest chunk. [-]"""
    splits = framework.splits_layers
    return split_layers(workload.model, pp, vpp, framework.name, splits=splits, layout=layout).most_layers_of_chunk


def _fewest_layers(
    cost: Callable[[NDArray[np.intp], NDArray[np.int64]], NDArray[np.float64]], of_each: NDArray[np.float64] | None,
    none: NDArray[np.float64], all_: NDArray[np.float64], largest: NDArray[np.int64], limit: float,
) -> NDArray[np.int64]:  # fmt: skip
    """The fewest recomputed layers of a chunk that fit, of ``largest``, where ``none`` does not fit and ``all_`` does.

    Every layer saves about equally much memory, so that a straight line between two known numbers says which to try
    next. It ends where a number fits and the one before it does not. ``of_each`` has the memory of each row with each
    number, where it is known; else ``cost`` gives it.
    """
    low, high = np.zeros(len(none), dtype=np.int64), largest.copy()
    over, under = none - limit, all_ - limit
    while len(active := np.flatnonzero(high - low > 1)):
        o, u, width = over[active], under[active], (high - low)[active]
        guess = np.ceil(o / np.maximum(o - u, 1.0) * width)
        # once the line has been tried, the number before the one that fits is the likeliest to tell
        guess = np.where((high < largest)[active], width - 1, guess)
        tried = low[active] + np.clip(guess, 1, width - 1).astype(np.int64)
        fewest = np.empty(len(active))
        for start in range(0, len(active) if of_each is None else 0, COST_AT_ONCE):
            part = slice(start, start + COST_AT_ONCE)
            fewest[part] = cost(active[part], tried[part]) - limit
        if of_each is not None:
            fewest = of_each[active, tried] - limit
        ok = fewest <= 0
        high[active[ok]], under[active[ok]] = tried[ok], fewest[ok]
        low[active[~ok]], over[active[~ok]] = tried[~ok], fewest[~ok]
    return high
