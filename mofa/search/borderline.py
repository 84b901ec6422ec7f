"""Borderline rows: the closed form may be wrong about their memory, so that it is replayed before rows are ranked.

A search estimates the reserved memory of all rows at once, up to a quarter off. Rows that pass are replayed later, so
that none which is too full is said to fit. Two kinds of rows are borderline, if they would be among the best: those
that are rejected although what they *allocate* fits, and those that recompute more layers than they may have to.

A replay takes a tenth of a second to a second a row. It ends as soon as a row is known to be too full.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mofa.replay.garbage_collection import without_garbage_collection
from mofa.search.costing import MEMORY, CostedSpace
from mofa.search.rerank import DISAGREEMENT, REPLAYED
from mofa.search.to_plan.builder import CandidatePlan
from mofa.search.workers import WorkerProcesses

FloatN = NDArray[np.float64]
LOOKED_AT = REPLAYED
"""Borderline rows that are replayed: as many as are ranked again. [-]"""


def borderline_rows(searched: CostedSpace, key: FloatN, wanted: int = REPLAYED) -> NDArray[np.intp]:
    """Positions of costed rows whose allocated memory fits and whose estimated reserved memory does not.

    Only rows that would otherwise be among the best :data:`~mofa.search.rerank.REPLAYED`, and that a replay may find
    among the wanted ones.

    Parameters
    ----------
    key
        What is made smallest; NaN of rows that cannot fit. (n,)
    wanted
        How many plans are wanted: rows beyond the last of as many by more than closed forms are off are left out. [-]

    Returns
    -------
    array
        At most :data:`LOOKED_AT`: half of them the least full by the estimate, which are the likeliest to fit, then
        those with the smallest keys of the others, which would gain most.
    """
    costed = searched.costed
    why = searched.reason[costed.rows]
    fitting = key[why < 0]
    last = np.inf
    for number, slower in ((REPLAYED, 1.0), (min(wanted, REPLAYED), 1.0 / (1.0 - DISAGREEMENT))):
        if len(fitting) >= number:
            last = min(last, float(np.partition(fitting, number - 1)[number - 1]) * slower)
    rows = np.flatnonzero((why == MEMORY) & (key < last))  # a NaN is less than nothing
    least_full = rows[np.argsort(costed.device_bytes[rows], kind="stable")]
    if len(rows) <= LOOKED_AT:
        return least_full
    first, others = least_full[: LOOKED_AT // 2], least_full[LOOKED_AT // 2 :]
    return np.concatenate([first, others[np.argsort(key[others], kind="stable")][: LOOKED_AT - len(first)]])


def admit_borderline_rows(
    searched: CostedSpace, key: FloatN, limit_bytes: float, candidate: Callable[[int], CandidatePlan],
    workers: WorkerProcesses, wanted: int = REPLAYED,
) -> None:  # fmt: skip
    """Let borderline rows pass that fit by replay, and note their memory in ``searched``.

    If no other row fits, the memory of all replayed rows is noted. Otherwise the replay of a row that does not fit ends
    early.

    Parameters
    ----------
    key, wanted
        As in :func:`borderline_rows`.
    limit_bytes
        What a plan may fill. [B]
    candidate
        Gives the strategy of a costed row.
    workers
        What plays.
    """
    costed = searched.costed
    rows = borderline_rows(searched, key, wanted).tolist()
    limit = limit_bytes if np.any(searched.reason[costed.rows] < 0) else np.inf
    played = workers.map(_device_bytes, [(candidate(i), limit) for i in rows])
    for i, device in zip(rows, played, strict=True):
        if device <= limit:
            row, costed.device_bytes[i] = costed.rows[i], device
            searched.reason[row], searched.shortfall[row] = (
                (-1, 0.0) if device <= limit_bytes else (MEMORY, device - limit_bytes)
            )


def best_rows_with_fewer_recomputed_layers(
    best: list[int], candidate: Callable[[int], CandidatePlan], workers: WorkerProcesses
) -> dict[int, CandidatePlan]:
    """Those of the best rows that fit with fewer recomputed layers than the search chose, with that number."""
    ones = [candidate(i) for i in best]
    numbers = workers.map(_fewest_layers, ones)
    solved = zip(best, ones, numbers, strict=True)
    return {i: candidate_row.with_recompute_layers(number) for i, candidate_row, number in solved if number is not None}


def _device_bytes(asked: tuple[CandidatePlan, float]) -> float:
    candidate, limit = asked
    with without_garbage_collection():
        return candidate.replayed_device_bytes(limit)


def _fewest_layers(candidate: CandidatePlan) -> int | None:
    with without_garbage_collection():
        return candidate.fewest_recomputed_layers()
