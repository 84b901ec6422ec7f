"""How many layers of each chunk to recompute whole: as few as fit in closed form, and more or fewer after a replay."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.estimate import Estimator
from mofa.cost.stages import split_layers
from mofa.search.legality.masks import Job
from mofa.search.space import Combinations
from mofa.specs.framework import FrameworkSpec
from mofa.specs.workload import WorkloadSpec

COST_AT_ONCE = 200_000
"""Rows costed in one call. [-]"""
FEW_NUMBERS = 10_000
"""Numbers of layers of all rows up to which all are costed in one go: a call takes as long as some hundred. [-]"""


def solve_recomputed_layers(
    job: Job, estimator: Estimator, position: NDArray[np.intp], space: Combinations, rows: NDArray[np.intp],
    device: NDArray[np.float64], limit: float, reason: NDArray[np.int64], shortfall: NDArray[np.float64],
    codes: tuple[int, int],
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:  # fmt: skip
    """Choose how many layers of each chunk to recompute: as few as fit, between none and all of them.

    Rows that need none, or all, equal the rows of these modes and are marked needless. Returns the rows that remain,
    and the number of recomputed layers of every row of the space.
    """
    needless, memory = codes
    if len(rows) == 0:
        return rows, space.recompute_layers
    table, layers = space.degrees, space.recompute_layers.copy()
    num_modes = len(space.recompute)
    plain, all_layers = rows_recomputing_none_and_all(space, rows)
    if plain is None or all_layers is None:
        layers[rows] = 1
        return rows, layers
    largest = np.zeros(len(rows), dtype=np.int64)
    pp, vpp = table.pp[rows // num_modes], table.vpp[rows // num_modes]
    code = pp * 4096 + vpp
    for value in np.unique(code):
        same = code == value
        first = int(np.argmax(same))
        layout = table.layout_of(int(rows[first]) // num_modes)
        largest[same] = _largest_chunk(job.workload, job.framework, int(pp[first]), int(vpp[first]), layout)
    unneeded, fits = device[plain] <= limit, device[all_layers] <= limit
    drop, keep = np.zeros(len(rows), dtype=bool), np.flatnonzero(~unneeded & fits)
    number = _fewest_layers(
        estimator, position[rows[keep]], device[plain[keep]], device[all_layers[keep]], largest[keep], limit
    )
    everything = number >= largest[keep]
    drop[unneeded] = True
    drop[keep[everything]] = True
    reason[rows[drop]] = needless
    shortfall[rows[drop]] = 1.0
    never = ~unneeded & ~fits
    reason[rows[never]] = memory
    shortfall[rows[never]] = (device[all_layers] - limit)[never]
    solved_rows = rows[keep[~everything]]
    layers[solved_rows] = number[~everything]
    return solved_rows, layers


def rows_recomputing_none_and_all(
    space: Combinations, rows: NDArray[np.intp]
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


def next_num_recomputed(
    workload: WorkloadSpec, framework: FrameworkSpec, estimator: Estimator, lacking_bytes: float
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
    largest = _largest_chunk(workload, framework, int(table.pp[0]), int(table.vpp[0]), table.layout_of(0))
    numbers = np.arange(fewest - 1, largest)
    if len(numbers) < 2:
        return None
    device = estimator.device_bytes(np.zeros(len(numbers), dtype=np.intp), numbers)
    too_few = numbers[device[0] - device <= lacking_bytes]
    return max(fewest, int(too_few[-1]))


def fewest_recomputed_layers(estimator: Estimator, replay_free_bytes: float) -> int:
    """The fewest layers of a chunk to recompute, for a strategy that leaves so much memory free when replayed.

    One at least; the strategy's own number if no fewer do. Assumes that each layer takes its bytes in closed form.
    ``estimator`` as in :func:`next_num_recomputed`.
    """
    numbers = np.arange(1, int(estimator.table.recompute_layers[0]) + 1)
    device = estimator.device_bytes(np.zeros(len(numbers), dtype=np.intp), numbers)
    return int(numbers[device - device[-1] <= max(replay_free_bytes, 0.0)][0])


def _largest_chunk(workload: WorkloadSpec, framework: FrameworkSpec, pp: int, vpp: int, layout: str) -> int:
    """Layers of the largest chunk. [-]"""
    splits = framework.splits_layers
    return split_layers(workload.model, pp, vpp, framework.name, splits=splits, layout=layout).largest_chunk


def _fewest_layers(
    estimator: Estimator, rows: NDArray[np.intp], none: NDArray[np.float64], all_: NDArray[np.float64],
    largest: NDArray[np.int64], limit: float,
) -> NDArray[np.int64]:  # fmt: skip
    """The fewest recomputed layers of a chunk that fit, of ``largest``, where ``none`` does not fit and ``all_`` does.

    Every layer saves about equally much memory, so that a straight line between two known numbers says which to try
    next. It ends where a number fits and the one before it does not.
    """
    low, high = np.zeros(len(rows), dtype=np.int64), largest.copy()
    over, under = none - limit, all_ - limit
    of_each = _of_each_number(estimator, rows, largest) if largest.sum() <= FEW_NUMBERS else None
    while len(active := np.flatnonzero(high - low > 1)):
        o, u, width = over[active], under[active], (high - low)[active]
        guess = np.ceil(o / np.maximum(o - u, 1.0) * width)
        # once the line has been tried, the number before the one that fits is the likeliest to tell
        guess = np.where((high < largest)[active], width - 1, guess)
        tried = low[active] + np.clip(guess, 1, width - 1).astype(np.int64)
        fewest = np.empty(len(active))
        for start in range(0, len(active) if of_each is None else 0, COST_AT_ONCE):
            part = slice(start, start + COST_AT_ONCE)
            fewest[part] = estimator.device_bytes(rows[active[part]], tried[part]) - limit
        if of_each is not None:
            fewest = of_each[active, tried] - limit
        ok = fewest <= 0
        high[active[ok]], under[active[ok]] = tried[ok], fewest[ok]
        low[active[~ok]], over[active[~ok]] = tried[~ok], fewest[~ok]
    return high


def _of_each_number(estimator: Estimator, rows: NDArray[np.intp], largest: NDArray[np.int64]) -> NDArray[np.float64]:
    """Device memory of rows with every number of recomputed layers of a chunk from 1 to below the ``largest``.

    NaN for other numbers. (n, most) [B]
    """
    device = np.full((len(rows), int(largest.max(initial=1))), np.nan)
    of, number = np.nonzero((np.arange(device.shape[1]) < largest[:, None]) & (np.arange(device.shape[1]) > 0))
    if len(of):
        device[of, number] = estimator.device_bytes(rows[of], number)
    return device
