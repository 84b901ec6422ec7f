"""Rows about which the closed form's memory may be wrong: replayed where they would be among the best.

All rows of a search are weighed at once, by an estimate of reserved memory that is up to a quarter off. What it lets
pass is played, so that nothing too full is called fitting. What it rejects though no more is *allocated* than fits, or
what recomputes more layers by it than it has to, is in doubt, and its memory is played before rows are ranked. That
takes a tenth of a second to a second a row; a row that is too full is played no further than until it is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mofa.replay.garbage_collection import no_collection
from mofa.search.costing import MEMORY, Found
from mofa.search.rerank import REPLAYED
from mofa.search.to_plan.builder import Candidate
from mofa.search.workers import Workers

FloatN = NDArray[np.float64]
LOOKED_AT = REPLAYED
"""Rows in doubt that are played: as many as are ranked again. [-]"""


def borderline_rows(searched: Found, key: FloatN) -> NDArray[np.intp]:
    """Positions of costed rows whose allocated memory fits, not so what they are estimated to reserve, that would be
    among the best :data:`~mofa.search.rerank.REPLAYED` otherwise.

    Parameters
    ----------
    key
        What is made smallest; NaN of rows that cannot fit. (n,)

    Returns
    -------
    array
        The :data:`LOOKED_AT` that are least full by the estimate, the likeliest to fit, from the least full on.
    """
    costed = searched.costed
    why = searched.reason[costed.rows]
    fitting = key[why < 0]
    last = np.partition(fitting, REPLAYED - 1)[REPLAYED - 1] if len(fitting) >= REPLAYED else np.inf
    rows = np.flatnonzero((why == MEMORY) & (key < last))  # a NaN is less than nothing
    return rows[np.argsort(costed.device_bytes[rows], kind="stable")[:LOOKED_AT]]


def look_again(
    searched: Found, key: FloatN, limit_bytes: float, candidate: Callable[[int], Candidate], workers: Workers
) -> None:  # fmt: skip
    """Let the rows in doubt pass that fit when played; ``searched`` says how full these are. Where nothing else fits it
    says of all that were played how full they are: otherwise what does not fit is not played to its end.

    Parameters
    ----------
    key
        As in :func:`borderline_rows`.
    limit_bytes
        What a plan may fill. [B]
    candidate
        Gives the strategy of a costed row.
    workers
        What plays.
    """
    costed = searched.costed
    rows = borderline_rows(searched, key).tolist()
    limit = limit_bytes if np.any(searched.reason[costed.rows] < 0) else np.inf
    played = workers.map(_device_bytes, [(candidate(i), limit) for i in rows])
    for i, device in zip(rows, played, strict=True):
        if device <= limit:
            row, costed.device_bytes[i] = costed.rows[i], device
            searched.reason[row], searched.short[row] = (
                (-1, 0.0) if device <= limit_bytes else (MEMORY, device - limit_bytes)
            )


def fewer_layers(best: list[int], candidate: Callable[[int], Candidate], workers: Workers) -> dict[int, Candidate]:
    """Of the best rows those that fit with fewer recomputed layers than the search chose, with as many."""
    ones = [candidate(i) for i in best]
    numbers = workers.map(_fewest_layers, ones)
    solved = zip(best, ones, numbers, strict=True)
    return {i: candidate_row.recomputing(number) for i, candidate_row, number in solved if number is not None}


def _device_bytes(asked: tuple[Candidate, float]) -> float:
    candidate, limit = asked
    with no_collection():
        return candidate.device_bytes(limit)


def _fewest_layers(candidate: Candidate) -> int | None:
    with no_collection():
        return candidate.fewest_layers()
