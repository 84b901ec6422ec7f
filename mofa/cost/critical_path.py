"""The longest path through an interleaved pipeline's own order of computations and hand-overs, for many plans at once.

The replay's clock, without a host: a computation starts when the one before it on its rank is done and its input has
come; a hand-over takes ``hop_s`` from when both sides have launched it and their streams are free. What can start
once so many others are done forms a level, and a level is one pass over arrays. Rounds of a steady state take equally
long, so that only :data:`ROUNDS` of them are walked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.cost.levels import Levels, levels_of
from mofa.orders.interleaved import rounds
from mofa.specs.framework import PYTORCH_MODULES

ArrayN = NDArray[np.float64]
IntA = NDArray[np.intp]
IntN = NDArray[np.int64]

ROUNDS = 3
"""Rounds of micro-batches that are walked at most; those behind take as long as the last of the steady state. [-]"""
_AT_ONCE = 1 << 20
"""Entries of the array of ends that are held at once: what stays in the cache. [-]"""


@dataclass(frozen=True)
class OncePerStep:
    """What data parallelism does once a step for each chunk of a rank, on a stream beside computing. (n, pp, vpp) [s]

    ``gather_s`` of parameters, ``held_s`` what of it comes before anything of the first forward, ``reduce_s`` of
    gradients.
    """

    gather_s: ArrayN
    held_s: ArrayN
    reduce_s: ArrayN


def critical_path_s(
    framework: str, forward_s: ArrayN, backward_s: ArrayN, num_micro_batches: IntN, hop_s: ArrayN, slowdown: float,
    once: OncePerStep | None = None, of: IntA | None = None,
) -> ArrayN:  # fmt: skip
    """Time of an interleaved schedule, from the first forward to the end of the last backward.

    Parameters
    ----------
    forward_s, backward_s
        Of one micro-batch on each chunk of each rank, or of those that differ. (n, R, vpp) [s]
    num_micro_batches
        (n,) [-]
    hop_s
        One hand-over. (n,) [s]
    slowdown
        What computing loses of its rate beside a hand-over. [-]
    once
        Gathers and reductions: the time then goes from the first gather to the last reduction. Megatron's, which all
        ranks launch at once: a chunk's gather when the first forward of the chunk before begins on rank 0, the first
        two at the start; a reduction as many backwards behind the chunk's last as the rank counts.
    of
        Which of the ranks that are given each one is like; all are given where absent. (pp,)

    Returns
    -------
    ArrayN
        (n,) [s]

    Notes
    -----
    Assumes that the clocks of all ranks have found their common period before the last of :data:`ROUNDS` rounds.

    Examples
    --------
    Even chunks: ``m t + (pp - 1) t / vpp`` (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), with m of 8 and 800:

    >>> f = np.ones((2, 4, 2))
    >>> critical_path_s("megatron", f, 2 * f, np.array([8, 800]), np.zeros(2), 0.0)
    array([  57., 4809.])
    """
    shown, vpp = forward_s.shape[1:]
    like = np.arange(shown) if of is None else of
    pp = len(like)
    # where the durations of each of all ranks' chunks are among the given
    place = (np.arange(7)[:, None, None] * shown + like[:, None]) * vpp + np.arange(vpp)
    rows = np.concatenate([[0], 1 + place.ravel()])
    both = np.stack([forward_s, backward_s], axis=1).reshape(len(forward_s), -1).T
    parts = [hop_s[None], both, both + slowdown * np.minimum(hop_s, both)]
    if once is not None:
        parts += [part.reshape(len(part), -1).T for part in (once.gather_s, once.held_s, once.reduce_s)]
    durations = np.concatenate(parts)
    total, runtime = np.empty(len(forward_s)), framework in PYTORCH_MODULES
    nums, inverse = np.unique(num_micro_batches, return_inverse=True)
    per_round = np.array([rounds(pp, num) if runtime else pp for num in nums.tolist()])
    # plans of one order are walked together, however many rounds each leaves out
    kinds, kind = np.unique(np.stack([np.minimum(nums, ROUNDS * per_round), per_round]), axis=1, return_inverse=True)
    kind_of = kind.ravel()[inverse]
    for which, (walked, each) in enumerate(kinds.T.tolist()):
        mine = np.flatnonzero(kind_of == which)
        walk = levels_of(framework, pp, vpp, walked, each, once is not None)
        step = max(1, _AT_ONCE // walk.size)
        for start in range(0, len(mine), step):
            some = mine[start : start + step]
            given = np.ascontiguousarray(durations[:, some])
            total[some], period = _walk(walk, rows, given)
            behind = (num_micro_batches[some] - walked) / each
            if runtime and np.any(behind):  # on one stream for all its sends and receives a rank's own rounds differ
                fewer = levels_of(framework, pp, vpp, walked - each, each, once is not None)
                period = total[some] - _walk(fewer, rows, given)[0]
            total[some] += behind * period
    return total


def _walk(walk: Levels, place: IntA, durations: ArrayN) -> tuple[ArrayN, ArrayN]:
    """When the last computation ends, and the longest of all last rounds; durations are at ``place``. (n,) each [s]"""
    done = np.empty((walk.size, durations.shape[1]))
    done[0] = 0.0
    for first, waits, sent, which in walk.levels:
        latest = _latest(done, waits)
        if len(sent):
            handed = _latest(done, sent)
            handed += durations[0]
            np.maximum(latest, handed, out=latest)
        np.add(latest, durations[place[which]], out=done[first : first + len(which)])
    return done[walk.ends].max(axis=0), (done[walk.late] - done[walk.early]).max(axis=0)


def _latest(done: ArrayN, waits: IntA) -> ArrayN:
    """The last of the ends that each node waits for."""
    latest: ArrayN = done[waits[0]]
    for wait in waits[1:]:
        np.maximum(latest, done[wait], out=latest)
    return latest
