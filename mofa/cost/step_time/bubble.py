"""How long a pipeline takes from its first forward to its last backward, by schedule, for stages that may differ."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import max_of_array_rows
from mofa.schedules import Schedule

ArrayN = NDArray[np.float64]


def pipeline_s(
    schedule: Schedule, forward_s: ArrayN, backward_s: ArrayN, num_micro_batches: ArrayN, *,
    before_s: ArrayN | None = None, rested_s: ArrayN | None = None, exchanged_s: ArrayN | float = 0.0,
) -> ArrayN:  # fmt: skip
    """Time of the forwards and backwards of all micro-batches, without the hand-overs that fill the pipeline.

    Parameters
    ----------
    forward_s, backward_s
        Of one micro-batch on each stage. (n, pp) [s]
    before_s
        What holds up the first forward of each stage once its input is there, in 1F1B. (n, pp) [s]
    rested_s
        Forward and backward of each stage where it had to wait, in 1F1B: its host got ahead meanwhile. As they are
        where absent. (n, pp) [s]
    exchanged_s
        What each stage sends and receives between two passes while it does not compute, in GPipe. (n, pp) [s]

    Returns
    -------
    ArrayN
        (n,) [s]

    Notes
    -----
    GPipe: ``sum F + (m - 1) max (F + exchanged)``, and the same for B. 1F1B: the longest of the paths of
    :func:`one_f_one_b_s`.
    Interleaved 1F1B, ZB-V and interleaved zero bubble are walked:
    :func:`mofa.cost.step_time.critical_path.critical_path_s`.

    Examples
    --------
    Two stages of 1 + 2 s, four micro-batches: 12 s and a bubble of 3 s.

    >>> from mofa.schedules.gpipe import GPIPE
    >>> from mofa.schedules.one_f_one_b import ONE_F_ONE_B
    >>> f, b, m = np.ones((1, 2)), 2 * np.ones((1, 2)), np.array([4.0])
    >>> [float(pipeline_s(schedule, f, b, m)[0]) for schedule in (ONE_F_ONE_B, GPIPE)]
    [15.0, 15.0]
    """
    pp = forward_s.shape[1]
    m = num_micro_batches
    stage = forward_s + backward_s
    if pp == 1:
        return np.asarray(m * stage[:, 0])
    if schedule.forwards_first:
        slowest_s = max_of_array_rows(forward_s + exchanged_s) + max_of_array_rows(backward_s + exchanged_s)
        return np.asarray(stage.sum(axis=1) + (m - 1) * slowest_s)
    assert schedule.has_closed_form, f"{schedule.name} is walked"
    return one_f_one_b_s(forward_s, backward_s, m, before_s, rested_s)


def one_f_one_b_s(
    forward_s: ArrayN, backward_s: ArrayN, num_micro_batches: ArrayN, before_s: ArrayN | None = None,
    rested_s: ArrayN | None = None,
) -> ArrayN:  # fmt: skip
    """The longest of four paths through each stage of 1F1B. (n,) [s]

    Stage s runs ``w = min(pp - 1 - s, m - 1)`` forwards beyond the first ahead of its first backward. With t = F + B,
    A and C the sums of t before and behind the stage, a path is

    - ``A + m t_s``: the stage never waits;
    - ``A + C + m t_s - w F_s``: it waits for its first backward, with w forwards done meanwhile;
    - ``A + C + m t_s - w B_s``: its last forward goes to the end and back, with w backwards left meanwhile;
    - ``A + 2 C + (m - w) t_s``: both.

    A stage that others are waited for on a path has waited itself, and takes ``rested_s`` there. Equal stages:
    ``(m + pp - 1) t``. What holds up first forwards is passed by every path that goes through them.

    Examples
    --------
    A stage in front that is half again as slow waits for nobody but at its ends: 8 x 4.5 s and its 3 forwards' wait.

    >>> f = np.array([[1.5, 1.0, 1.0, 1.0]])
    >>> one_f_one_b_s(f, 2 * f, np.array([8.0]))
    array([40.5])
    """
    m = num_micro_batches[:, None]
    pp = forward_s.shape[1]
    t = forward_s + backward_s
    ahead_s = np.zeros_like(t) if before_s is None else before_s
    until, every = np.cumsum(ahead_s, axis=1), ahead_s.sum(axis=1, keepdims=True)
    rested = t if rested_s is None else rested_s
    before = np.cumsum(rested, axis=1) - rested
    behind = rested.sum(axis=1, keepdims=True) - before - rested
    ahead = np.minimum(np.arange(pp - 1, -1, -1)[None], m - 1)
    paths = [
        until + before + m * t,
        every + before + behind + m * t - ahead * forward_s,
        until + before + behind + m * t - ahead * backward_s,
        np.where(m > ahead + 1, every + before + 2 * behind + (m - ahead) * t, 0.0),
    ]
    return np.asarray(np.max([max_of_array_rows(path) for path in paths], axis=0))


def num_exchanges_waited_for(pp: int, stage: NDArray[np.intp], num_micro_batches: ArrayN) -> ArrayN:
    """Exchanges of a step that a stage of Megatron's 1F1B waits for; the hops of other stages are bubble.

    A stage runs ``w`` forwards ahead of its first backward (schedules.py, forward_backward_pipelining_without_
    interleaving). It receives and sends each of these by itself, and as many gradients behind the steady state. In
    between a send and a receive are one exchange. The first stage receives no input and sends no gradient, the last
    sends no output and receives no gradient.

    Parameters
    ----------
    pp
        Stages. [-]
    stage
        Which one it is. (n,) [-]
    num_micro_batches
        (n,) [-]

    Returns
    -------
    array
        (n,) [-]

    Examples
    --------
    >>> num_exchanges_waited_for(4, np.array([0, 1, 3]), np.array([8.0, 8.0, 8.0])).tolist()
    [11.0, 21.0, 9.0]
    """
    m = num_micro_batches
    warm = np.minimum(pp - 1 - stage, m)
    steady = m - warm
    between = np.where(stage == 0, steady, np.where(stage == pp - 1, steady + (steady > 0), 2 * steady + (steady > 0)))
    return np.asarray(warm * np.where(stage == 0, 2.0, 4.0) + between, dtype=float)
