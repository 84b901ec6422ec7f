"""GPUs of a job drawn one by one: how fast each is in a step, and which pipeline the others wait for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.estimate import TableEstimator
from mofa.cost.kernels.slowest_gpu import PaceFactors, PaceSpread, expected_slowest
from mofa.cost.rows import GatheredRows
from mofa.cost.step_time.micro_batch import micro_batch_passes
from mofa.cost.step_time.stragglers import pipeline_lead_over_slowest_s
from mofa.replay.rank.from_estimator import gathered_row_of_strategy
from mofa.replay.time.time_replayed import ReplayedTime

FloatArray = NDArray[np.float64]


def draw_paces(spread: PaceSpread, num_gpus: int, seed: int) -> FloatArray:
    """How much longer kernels take on each GPU than on a typical one, in one step of one job. (2, num_gpus) [-]

    Parameters
    ----------
    spread
        How GPUs and nodes differ; a chip and its step are drawn as one, as their squares add.
    num_gpus
        GPUs in order of their ranks, node after node.
    seed
        Of the draw.

    Returns
    -------
    array
        Of products and of other kernels.

    Examples
    --------
    >>> draw_paces(PaceSpread(0.0, 1.0, 0.1, 8), 2, 0)
    array([[1.1, 1.1],
           [1.1, 1.1]])
    """
    rng = np.random.default_rng(seed)
    nodes = -(-num_gpus // spread.per_node)
    of_nodes = 1.0 + spread.slowdown * (rng.random(nodes) < spread.slow_share)
    others = np.repeat(of_nodes, spread.per_node)[:num_gpus]
    return np.array([others + spread.chips * rng.standard_normal(num_gpus), others])


def pipeline_waited_for(paces: FloatArray, stage_s: FloatArray, num_meeting: int) -> FloatArray:
    """Paces of the stages of the pipeline for which all others wait. (2, pp) [-]

    Parameters
    ----------
    paces
        Of every GPU of each stage. (2, pp, GPUs of a stage) [-]
    stage_s
        What a micro-batch takes on each stage. (pp,) [s]
    num_meeting
        GPUs of a stage, one behind the other, that meet in every layer and so go at the pace of their slowest. [-]

    Notes
    -----
    All pipelines meet at the end of a step. The slowest is taken to be that whose slowest stage takes longest.

    Examples
    --------
    Two stages of two replicas each; the second replica's first stage is the slowest of all.

    >>> paces = np.array([[[1.0, 1.3], [1.2, 1.1]], [[1.0, 1.0], [1.0, 1.0]]])
    >>> pipeline_waited_for(paces, np.ones(2), 1)
    array([[1.3, 1.1],
           [1. , 1. ]])
    """
    slowest = paces.reshape(*paces.shape[:2], -1, num_meeting).max(axis=3)
    position = int((slowest[0] * stage_s[:, None]).max(axis=0).argmax())
    return np.asarray(slowest[:, :, position])


def estimators_at_drawn_paces(estimator: TableEstimator, seed: int) -> tuple[TableEstimator, ...]:
    """A strategy on the GPUs of each stage of the pipeline that all others wait for, drawn from a seed. (pp,)

    Chips, what a GPU varies from step to step, and slow nodes are drawn; what clocks swing within a step is waited for
    on average.

    Parameters
    ----------
    estimator
        Of one strategy.
    seed
        Of the draw.
    """
    estimator = estimator.at_power_limited_clock
    rows = gathered_row_of_strategy(estimator)
    pp, inner = int(rows.table.pp[0]), int(rows.table.tp[0] * rows.table.cp[0])
    num_gpus = _num_gpus(rows)
    paces = draw_paces(PaceSpread.from_cluster(rows.cluster), num_gpus, seed)
    if rows.framework.rank_order == "tp-cp-ep-dp-pp":
        of_stages = paces.reshape(2, pp, -1)
    else:
        of_stages = paces.reshape(2, -1, pp, inner).swapaxes(1, 2).reshape(2, pp, -1)
    waited_for = pipeline_waited_for(of_stages, _stage_seconds(estimator), _num_meeting(rows))
    return tuple(estimator.at_pace(PaceFactors(*pace)) for pace in waited_for.T.tolist())


def expected_step_of_draws_s(estimator: TableEstimator, at_slowest: ReplayedTime) -> float | None:
    """The mean of a step over draws, by that whose stages are all at the expected pace of the slowest GPU. [s]

    None of schedules that are walked: their stages wait for each other within the steady state, too.

    Parameters
    ----------
    estimator
        Of one strategy.
    at_slowest
        Its step as it is played by default.
    """
    estimator = estimator.at_power_limited_clock
    rows = gathered_row_of_strategy(estimator)
    if not rows.schedule_record.has_closed_form and rows.stage_layers.stages.pp > 1:
        return None
    spread, num_gpus = PaceSpread.from_cluster(rows.cluster), _num_gpus(rows)
    slowest = expected_slowest(spread._replace(slow_share=0.0), num_gpus).products
    if slowest <= 1.0:
        return at_slowest.step_s
    stage_s, typical_s = (
        _stage_seconds(estimator.at_pace(PaceFactors(products, 1.0))) for products in (slowest, 1.0)
    )  # fmt: skip
    return at_slowest.step_s - pipeline_lead_over_slowest_s(
        stage_s, (stage_s - typical_s) / (slowest - 1.0), at_slowest.exposed["bubble"],
        int(rows.num_micro_batches[0]), spread, num_gpus, _num_meeting(rows),
    )  # fmt: skip


def _stage_seconds(estimator: TableEstimator) -> FloatArray:
    """What a micro-batch takes on each stage. (pp,) [s]"""
    forward_s, backward_s = micro_batch_passes(gathered_row_of_strategy(estimator)).stage_forward_and_backward_s()
    return np.asarray((forward_s + backward_s)[0])


def _num_gpus(rows: GatheredRows) -> int:
    return int(rows.table.pp[0] * rows.table.tp[0] * rows.table.cp[0] * rows.table.dp[0])


def _num_meeting(rows: GatheredRows) -> int:
    """GPUs of a stage that meet in every layer. [-]"""
    meeting = rows.costs.machine.meeting_gpus
    return 1 if meeting is None else min(int(meeting[0]), _num_gpus(rows) // int(rows.table.pp[0]))
