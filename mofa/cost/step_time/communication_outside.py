"""What of a step's communication is outside the tapes: its seconds, and where in the step it is waited for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.host_clock import ClockAdvance
from mofa.cost.step_time.critical_path import DataParallelOncePerStep

ArrayN = NDArray[np.float64]


@dataclass(frozen=True)
class CommunicationOutsideBlocks:
    """Communication outside the tapes: its exposed and hidden seconds in a step, and what holds up each stage's first
    forward. (n,), (n,), (n, R) [s]

    ``once`` is what the pipeline's own path goes through, ``exposed_on_path`` about how much of it is exposed there;
    through ``exposed_while_host_issues`` of ``exposed`` the host issues on. (n,)
    """

    exposed: ArrayN
    hidden: ArrayN
    before_forward: ArrayN
    once: DataParallelOncePerStep | None = None
    """Where a schedule has a closed form, of the rows whose host is late alone."""
    first_forward: ClockAdvance | None = None
    """Of these rows' first forwards, which gather. (late rows, R, 1)"""
    exposed_on_path: ArrayN | float = 0.0
    exposed_while_host_issues: ArrayN | float = 0.0
    after_each_backward_s: ArrayN | float = 0.0
    """What of it is behind each backward: the device waits, and the host goes on. (n,)"""
    after_late_backward_s: ArrayN | None = None
    """The same behind a backward whose device waits for its host all along, where it differs. (late rows,)"""
    after_optimizer_s: ArrayN | float = 0.0
    """Of it each stage's gathers between its optimizer and its next step; ``exposed`` has the longest. (n, R)"""
    issued_beside_s: ArrayN | float = 0.0
    """Seconds of each stage's gather beside a late host's issue of its first forward, in front of it. (n, R)"""
    slower_first_forward_s: ArrayN | float = 0.0
    """What computing loses in the first stage's first forward beside its gathers; ``exposed`` has it too. (n,)"""
    waited_ahead_s: ArrayN | float = 0.0
    """What gathers would hold up a single stage beyond ``before_forward``, were no host late; may be below 0. (n,)"""
    beyond_path_s: ArrayN | float = 0.0
    """What each stage's own reductions take beyond what ``exposed`` has of the awaited stage; may be below 0. (n, R)"""
