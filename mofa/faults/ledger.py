"""Where the wall-clock time of a long run goes: shares that sum to 1, or no ledger."""

from __future__ import annotations

import math
from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, model_validator

from mofa.faults.checks import FloatN, check_above_zero, check_at_least_zero, checked_share
from mofa.faults.closed_forms.renewal import renewal_ettr
from mofa.specs.base import Spec

PARTS = ("productive", "checkpoint", "lost", "restart", "waiting")


class Ledger(Spec):
    """Shares of the wall-clock time; they sum to 1, and none is negative.

    Examples
    --------
    >>> Ledger(productive=0.9, checkpoint=0.02, lost=0.05, restart=0.03, waiting=0.0).productive
    0.9
    """

    productive: float = Field(ge=0, description="Steps that count: the ETTR. [-]")
    checkpoint: float = Field(ge=0, description="Computing is blocked by a checkpoint. [-]")
    lost: float = Field(ge=0, description="Steps that a failure undid, with unfinished ones. [-]")
    restart: float = Field(ge=0, description="From a failure to computing again, without waiting for nodes. [-]")
    waiting: float = Field(ge=0, description="No spare is left, and the job waits for a node. [-]")

    @model_validator(mode="after")
    def _check(self) -> Self:
        total = math.fsum(getattr(self, part) for part in PARTS)
        if not math.isclose(total, 1.0, rel_tol=0, abs_tol=1e-9):
            raise ValueError(f"the ledger's parts sum to {total:.12g}, not to 1; account for every second once")
        return self

    @classmethod
    def of_seconds(cls, seconds: dict[str, float], wall_s: float) -> Self:
        """The ledger of seconds per part against the wall clock, which they must sum to within rounding."""
        total = math.fsum(seconds.values())
        if not math.isclose(total, wall_s, rel_tol=1e-9, abs_tol=1e-6):
            raise ValueError(f"the ledger's parts sum to {total:.9g} s, not to {wall_s:.9g} s of wall clock")
        return cls(**{part: seconds[part] / total for part in PARTS})


def expected_ledger_shares(
    interval_s: ArrayLike, block_s: ArrayLike, mtbf_s: ArrayLike, restart_s: ArrayLike, persist_s: ArrayLike = 0.0,
    waiting: ArrayLike = 0.0,
) -> dict[str, FloatN]:  # fmt: skip
    """Expected shares of the wall clock per part of the ledger, for arrays that broadcast. [-]

    Parameters
    ----------
    interval_s, block_s, mtbf_s, restart_s, persist_s
        As in :func:`mofa.faults.closed_forms.renewal.expected_segment_s`. [s]
    waiting
        Share of time that the job waits for a node, :func:`mofa.faults.spares.waiting_share`. [-]

    Notes
    -----
    Without waiting: restarting takes ``1 - A`` of the time, ``A = exp(-R / M)``, because every failure is followed by
    an attempt of ``M (1 - A)`` on average. Of the rest, an age u since the last restart has the density
    ``exp(-u / M) / M``, of which checkpoints take ``(exp(-tau / M) - exp(-L / M)) / (1 - exp(-L / M))``. What is
    neither that nor productive is lost. Waiting dilutes them all.

    Examples
    --------
    >>> parts = expected_ledger_shares(1140.0, 60.0, 11136.0, 600.0)
    >>> round(float(sum(parts.values())), 12), round(float(parts["restart"]), 4)
    (1.0, 0.0525)
    """
    interval, block = (
        check_at_least_zero("interval_s", interval_s, finite=False),
        check_at_least_zero("block_s", block_s),
    )
    mtbf = check_above_zero("mtbf_s", mtbf_s, finite=False)
    productive = renewal_ettr(interval, block, mtbf, restart_s, persist_s)
    with np.errstate(invalid="ignore", divide="ignore"):
        up = np.exp(-np.asarray(restart_s, dtype=np.float64) / mtbf)
        length = interval + block
        writing = np.exp(-interval / mtbf) * np.expm1(-block / mtbf) / np.expm1(-length / mtbf)
        writing = np.where(np.isinf(mtbf), block / length, writing)
    checkpoint = up * np.where(block == 0, 0.0, np.where(np.isinf(interval), 0.0, writing))
    idle = checked_share("waiting", waiting)
    parts = {
        "productive": productive,
        "checkpoint": checkpoint,
        "lost": np.maximum(up - productive - checkpoint, 0.0),
        "restart": 1 - up,
    }
    return {**{name: value * (1 - idle) for name, value in parts.items()}, "waiting": idle + 0.0 * productive}
