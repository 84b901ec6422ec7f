"""The clock of every rank of a replay, in the form of the JSON contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mofa.cost.breakdown import TIME_COMPONENTS
from mofa.plan.step_parts import StageTime

if TYPE_CHECKING:
    from mofa.replay.time.time_replayed import ReplayedTime


DUST = 1e-9
"""Share of a step below which a time is a rounding error. [-]"""


def exposed_times_by_stage(played: ReplayedTime | None) -> tuple[StageTime, ...]:
    """Exposed and idle seconds per pipeline stage; none without a clock."""
    if played is None:
        return ()
    return tuple(
        StageTime(
            stage=r, exposed={name: exposed[name] for name in TIME_COMPONENTS},
            idle={cause: seconds for cause, seconds in idle.items() if seconds > DUST * played.step_s},
        )
        for r, (exposed, idle) in enumerate(zip(played.ranks, played.idle, strict=True))
    )  # fmt: skip
