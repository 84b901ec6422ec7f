"""A step of many micro-batches from one of fewer: rounds of a steady state that take the same seconds are put in.

A pipeline's times obey a recursion of sums and maxima. Once all ranks have computed a few rounds that each began by the
same time later and left their clocks alike, the following ones do too, until forwards run out; so a step with more
micro-batches is the one with fewer and such rounds in between, whose computations begin by a round's time later each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mofa.replay.time.rank_clock import RankTimeline
from mofa.schedules import Action, Order, Schedule

ALIKE = 3
"""Rounds that are compared: as many begin by the same time after the one before them. [-]"""
BEHIND = 3
"""Interleaved rounds behind those compared: ranks are two of them apart at most. [-]"""
LONG = 20_000
"""Computations of an interleaved step that is lengthened: a fifth of a second to play. [-]"""
SAME = 1e-9
"""What times of rounds may differ by, relative to a round, and still be the same. [-]"""


@dataclass(frozen=True)
class InsertedRounds:
    """``num_played`` micro-batches stand for ``played + rounds * each``: so many rounds of ``micro_batches_per_round``
    micro-batches are put in front of forward ``before_forward``."""

    num_played: int
    before_forward: int
    num_rounds: int
    micro_batches_per_round: int = 1

    def computations_that_begin_rounds(self, order: Order, rank: int) -> tuple[int, ...]:
        """The computations in front of which rounds begin: those compared, and the one behind them."""
        first = (
            Action("F", rank, self.before_forward - k * self.micro_batches_per_round) for k in range(ALIKE, -1, -1)
        )
        return tuple(map(order.ranks[rank].index, first))


def shorter_steps_to_play(schedule: Schedule, pp: int, vpp: int, num_micro_batches: int) -> Iterator[InsertedRounds]:
    """What may stand for a step, the shortest first; nothing where it has few micro-batches.

    A round of 1F1B is a forward and a backward, interleaved those of pp micro-batches in all chunks. In front of those
    compared all ranks fill and even out: as many micro-batches as there are ranks, mostly. Behind them no rank may be
    out of forwards yet, nor any on which it waits: a round further on by rank. Other schedules are not lengthened:
    GPipe has two steady states, and zero bubbles end in weights that were put off.

    Megatron's interleaved first and last ranks launch receives ever further ahead, and none in the last tenth of the
    rounds, where computing loses nothing to them: so long steps alone are lengthened, which become up to 2e-4 longer
    by it than if they were played whole.

    Examples
    --------
    >>> from mofa.schedules.gpipe import GPIPE
    >>> from mofa.schedules.interleaved import INTERLEAVED
    >>> from mofa.schedules.one_f_one_b import ONE_F_ONE_B
    >>> next(iter(shorter_steps_to_play(ONE_F_ONE_B, 16, 1, 240)))
    InsertedRounds(num_played=38, before_forward=20, num_rounds=202, micro_batches_per_round=1)
    >>> next(iter(shorter_steps_to_play(INTERLEAVED, 16, 4, 512)))
    InsertedRounds(num_played=144, before_forward=96, num_rounds=23, micro_batches_per_round=16)
    >>> list(shorter_steps_to_play(ONE_F_ONE_B, 16, 1, 40)), list(shorter_steps_to_play(GPIPE, 16, 1, 240))
    ([], [])
    >>> list(shorter_steps_to_play(INTERLEAVED, 16, 2, 208)), list(shorter_steps_to_play(INTERLEAVED, 16, 4, 520))
    ([], [])
    """
    if schedule.steady_state_unit == "micro-batch":
        for fill in (pp, 3 * pp):
            cut = fill + ALIKE + 1
            played = cut + pp + 2
            if played <= num_micro_batches // 2:
                yield InsertedRounds(played, cut, num_micro_batches - played)
    if (
        schedule.steady_state_unit == "round"
        and num_micro_batches % pp == 0
        and 2 * num_micro_batches * pp * vpp >= LONG
    ):
        for fill in (2, 6):
            cut = fill + ALIKE + 1
            played = cut + BEHIND
            if 3 * played * pp <= 2 * num_micro_batches:
                yield InsertedRounds(played * pp, cut * pp, num_micro_batches // pp - played, pp)


def insert_rounds(inserted: InsertedRounds, ranks: Sequence[RankTimeline], spans: bool) -> bool:
    """Put the rounds in, on all ranks, with their computations where ``spans``; False, and nothing done, where they are
    not alike yet."""
    first, *_, last = ranks[0].snapshots.values()
    round_s = (last.time - first.time) / ALIKE
    if not all(_alike(rank, round_s) for rank in ranks):
        return False
    for rank in ranks:
        rank.insert_rounds(inserted.num_rounds, round_s, inserted.micro_batches_per_round, spans)
    return True


def _alike(rank: RankTimeline, round_s: float) -> bool:
    """Whether the rounds of a rank are plain ones, begin so much later each and leave its clock the same."""
    begin, *_, end = rank.snapshots
    if any(action in rank.data_parallel.by_computation for action in rank.order.ranks[rank.rank][begin:end]):
        return False
    times = np.array([(start_s, end_s) for _, _, _, start_s, end_s in rank.spans[begin:end]])
    if len(times) % ALIKE or len({len(mark.state) for mark in rank.snapshots.values()}) > 1:
        return False
    later = np.diff(times.reshape(ALIKE, -1), axis=0) - round_s
    states = np.array([mark.state for mark in rank.snapshots.values()])
    if np.min(np.diff([mark.lead for mark in rank.snapshots.values()])) < -SAME * round_s:
        return False  # a lead that is used up little by little does not last for all rounds
    return bool(np.abs(later).max() < SAME * round_s and np.ptp(states, axis=0).max() < SAME * round_s)
