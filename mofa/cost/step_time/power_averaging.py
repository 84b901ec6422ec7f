"""What a wait in a pipeline, and an optimizer, give back: the power limit holds for means over a time.

A rank that waits for its neighbours draws little, so that it computes at a higher clock before and behind the wait.
So it does behind an optimizer, whose kernels draw less than products.
Waits for the host and for collectives are left out: steps with much of either are not predicted slower than others
(reference_runs/measured: no trend of the error with their share), and what they hide hides the clock as well.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.specs.power import PowerLimit

ArrayN = NDArray[np.float64]
RESTED = 0.3
"""Share of a step beyond which more waiting gives nothing back: by then hardly any kernel is slowed. Table rows are
costed without a wait and with this one, and lie between by their share. [-]"""
HARDLY = 0.01
"""Share of a step below which waits are left out: a step is some 0.2 % shorter with them. [-]"""


def power_averaged_idle_share(
    limit: PowerLimit | None, bubble_s: ArrayN, optimizer_s: ArrayN, step_s: ArrayN, passes_s: ArrayN
) -> ArrayN:  # fmt: skip
    """Share of a step in which its slowest rank waits, or as good as waits, and the power limit makes up. (n,) [-]

    Parameters
    ----------
    limit
        Of the GPU; None where it is not known.
    bubble_s, optimizer_s, step_s, passes_s
        What the slowest rank waits for others in a step, its optimizer, the step, and the step but for the optimizer.
        (n,) each [s]

    Notes
    -----
    ``min(bubble, window) / step + RESTED * min(1, full / passes)``: of a wait longer than what the limit is a mean
    over only so much counts, and passes are as behind a wait of ``RESTED`` for the seconds ``full`` of
    :meth:`~mofa.specs.power.PowerLimit.full_clock_behind_optimizer_s`. Assumes one such wait a step, as of 1F1B's first
    rank between its last forward and the first gradient; of waits that lie more than a window apart each would count.
    The bubble is that of a step without rest: the whole step is shorter by about the same factor.

    Examples
    --------
    >>> from mofa.specs.base import Fact
    >>> share, window = (Fact(value=value, provenance="assumed", source="an example") for value in (0.2, 0.3))
    >>> limit, step = PowerLimit(idle_draw=share, window_s=window), np.array([1.0, 10.0, 1.0])
    >>> power_averaged_idle_share(limit, np.array([0.1, 2.0, 0.001]), np.zeros(3), step, step)
    array([0.1 , 0.03, 0.  ])
    """
    if limit is None:
        return np.zeros(len(step_s))
    at_full_clock = np.minimum(limit.full_clock_behind_optimizer_s(optimizer_s) / np.maximum(passes_s, 1e-12), 1.0)
    share = np.minimum(bubble_s, limit.window_s.value) / step_s + RESTED * at_full_clock
    return np.where(share >= HARDLY, np.minimum(share, RESTED), 0.0)
