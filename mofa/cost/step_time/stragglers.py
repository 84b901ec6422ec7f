"""What a pipeline's step takes less than at the pace of the slowest GPU: only one of its stages has that GPU.

Predictions take all stages to be as slow as the slowest of all GPUs. Drawn GPU by GPU, the slowest sets the pace of the
stage that it is in. Other stages, through which the pipeline fills and drains, are faster; and a stage that computes
longer than the others has only its own GPUs to be slow.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from mofa.cost.kernels.slowest_gpu import PaceSpread, expected_slowest

FloatArray = NDArray[np.float64]
POINTS = 801
"""Points of the quadrature over a stage's time, of which 1601 change the result by less than 1e-5. [-]"""


def pipeline_lead_over_slowest_s(
    stage_s: FloatArray, by_pace_s: FloatArray, bubble_s: float, num_micro_batches: int, spread: PaceSpread,
    num_gpus: int, num_meeting: int,
) -> float:  # fmt: skip
    """What a pipeline's step takes less, in the mean of drawn jobs, than with all stages at the slowest GPU's pace. [s]

    Parameters
    ----------
    stage_s
        What a micro-batch takes on each stage at the expected pace of the slowest of all GPUs. (pp,) [s]
    by_pace_s
        What of it goes with that pace: seconds on a typical GPU. (pp,) [s]
    bubble_s
        What the slowest stage waits for the others in a step. [s]
    num_micro_batches
        Of a step. [-]
    spread
        How GPUs differ; its slow nodes are left out.
    num_gpus
        Of all stages together. [-]
    num_meeting
        GPUs of a stage that meet in every layer. [-]

    Returns
    -------
    float
        0 of a single stage.

    Notes
    -----
    ``m (max_s T_s(E_n) - E[max_s max_i T_s(x_i)])`` over the micro-batches, where stage s has ``n / pp`` GPUs of pace
    ``x_i`` and takes ``T_s(x) = stage_s + by_pace_s (x - E_n)``; the distribution of the largest is the product of all
    stages'. In the bubble other stages go at the pace of the slowest of those that meet there, and not at ``E_n``.
    Assumes that the bubble is the computing of other stages, and takes all of them alike. Of 1F1B and GPipe: stages
    that are interleaved wait for hand-overs within the steady state, too, and gain more there.

    Examples
    --------
    Two equal stages: the slowest of 16 GPUs is in one of them, and only the bubble is shorter, by 1.8 - 0.6 deviations
    of a hundredth. Where the second stage takes half as long it has no part in being slow.

    >>> spread, equal = PaceSpread(0.01, 0.0, 0.0, 8), np.ones(2)
    >>> round(pipeline_lead_over_slowest_s(equal, equal, 1.0, 8, spread, 16, 2), 3)
    0.013
    >>> uneven = np.array([1.0, 0.5])
    >>> round(pipeline_lead_over_slowest_s(uneven, uneven, 0.0, 1, spread, 16, 2), 3)
    0.004
    """
    pp = len(stage_s)
    if pp == 1 or not spread.chips:
        return 0.0
    chips = spread._replace(slow_share=0.0)
    slowest, of_meeting = (expected_slowest(chips, number).products for number in (num_gpus, num_meeting))
    of_stage = num_gpus // pp
    ends = stage_s + by_pace_s * (np.array([[-4.0], [8.0]]) * spread.chips + 1.0 - slowest)
    times = np.linspace(ends.min(), ends.max(), POINTS)
    normal = NormalDist(0.0, spread.chips)
    below = np.ones(POINTS)
    for at_slowest_s, typical_s in zip(stage_s.tolist(), by_pace_s.tolist(), strict=True):
        deviations = slowest - 1.0 + (times - at_slowest_s) / max(typical_s, 1e-30)
        below *= np.array([normal.cdf(x) for x in deviations.tolist()]) ** of_stage
    expected_s = float(times[-1] - below.sum() * (times[1] - times[0]))
    of_bubble = float(np.mean(by_pace_s / stage_s)) * (slowest - of_meeting)
    return num_micro_batches * max(float(stage_s.max()) - expected_s, 0.0) + bubble_s * of_bubble
