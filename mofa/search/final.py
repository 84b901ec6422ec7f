"""The last word on the best rows of a search: each is played out, dropped where it does not fit, and ranked again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mofa.search.result import Plan

REPLAYED = 30
"""Plans that fit and are ranked again by their replay. [-]"""
PATIENCE = 4 * REPLAYED
"""Rows looked at for them, as long as one has been found to fit. [-]"""


@dataclass
class Final:
    """The plans, best first; which of the ``seen`` first rows do not fit, with the bytes that they lack. [B]"""

    plans: list[Plan] = field(default_factory=list)
    too_big: dict[int, float] = field(default_factory=dict)
    seen: int = 0


def replay_best(
    rows: Sequence[int], played: Callable[[int], Plan], progress: Callable[[int, int], None] | None = None,
    order: Callable[[Plan], float] | None = None,
) -> Final:  # fmt: skip
    """Play rows in order until :data:`REPLAYED` of them fit, and rank those by what their replay says.

    Parameters
    ----------
    rows
        From the best on, as the closed forms rank them.
    played
        Gives the replayed plan of a row.
    progress
        Told how many are played and how many there are to play.
    order
        What is made smallest; the time of a step where absent.

    Examples
    --------
    >>> replay_best([], lambda row: None).plans
    []
    """
    out = Final()
    while out.seen < len(rows) and len(out.plans) < REPLAYED and (out.seen < PATIENCE or not out.plans):
        row = rows[out.seen]
        plan = played(row)
        if plan.memory.fits:
            out.plans.append(plan)
        else:
            out.too_big[row] = -plan.memory.free_bytes
        out.seen += 1
        if progress is not None:
            progress(out.seen, min(len(rows), REPLAYED + len(out.too_big)))
    value = order or (lambda plan: plan.step_s)
    out.plans.sort(key=lambda plan: (round(value(plan), 12), plan.memory.device_bytes))
    return out
