"""The last word on the best rows of a search: each is played out, dropped where it does not fit, and ranked again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mofa.search.plan import Candidate
from mofa.search.result import Plan

REPLAYED = 30
"""Plans that fit and are ranked again by their replay. [-]"""
PATIENCE = 2 * REPLAYED
"""Rows looked at for them, as long as one has been found to fit. [-]"""


@dataclass
class Final:
    """The plans, best first; which of the ``seen`` first rows do not fit, with the bytes that they lack. [B]"""

    plans: list[Plan] = field(default_factory=list)
    too_big: dict[int, float] = field(default_factory=dict)
    seen: int = 0


def replay_best(
    rows: Sequence[int],
    candidate: Callable[[int], Candidate],
    top: int,
    progress: Callable[[int, int], None] | None = None,
    order: Callable[[Plan], float] | None = None,
) -> Final:
    """Play rows in order until :data:`REPLAYED` of them fit, and rank those by what their replay says.

    Parameters
    ----------
    rows
        From the best on, as the closed forms rank them.
    candidate
        Gives the strategy of a row.
    top
        How many plans are wanted. Of the best all ranks are played, of the others the fullest.
    progress
        Told how many are played and how many there are to play.
    order
        What is made smallest; the time of a step where absent.

    Examples
    --------
    >>> replay_best([], lambda row: None, 10).plans
    []
    """
    out = Final()
    fit: list[tuple[float, float, int, Candidate]] = []
    while out.seen < len(rows) and len(fit) < REPLAYED and (out.seen < PATIENCE or not fit):
        row = rows[out.seen]
        one = candidate(row)
        lacks = one.lacks()
        if lacks > 0:
            out.too_big[row] = lacks
        else:
            value = one.replayer.time.step_s if order is None else order(one.plan(replay=True, explain=False))
            fit.append((round(value, 12), lacks, row, one))
        out.seen += 1
        if progress is not None:
            progress(out.seen, min(len(rows), REPLAYED + len(out.too_big)))
    for _, _, row, one in sorted(fit, key=lambda item: item[:3]):
        if len(out.plans) == top:
            break
        plan = one.plan(replay=True, explain=not out.plans)
        if plan.memory.fits:
            out.plans.append(plan)
        else:
            out.too_big[row] = -plan.memory.free_bytes
    return out
