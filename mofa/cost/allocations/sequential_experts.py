"""Allocations of experts that run one after the other: a block for each expert's rows in place of one for all.

What an expert's product, activation and output take is let go or kept before the next expert's come, in the sizes of
its own tokens: holes are filled by many small blocks, and torn by them, as one block for all would never show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from mofa.blocks.op import KINDS
from mofa.cost.allocations.allocation_trace import Deed, Life, New

COPY = KINDS.index("weight_copy")


def one_by_one(life: Life, shares: Sequence[float] = ()) -> Life:
    """A life with its experts one by one; the same where none run in turn.

    Parameters
    ----------
    shares
        What each of the rank's experts gets of its rows; equal where absent. Sums to 1. [-]

    Notes
    -----
    Forward, and where that is done again, every expert's product, activation and second product come one after the
    other (megatron_core/transformer/moe/experts.py, ``SequentialMLP.forward``). Backward autograd runs what came last
    first: all of the last expert, then the one before it. What all experts share goes with the last of them.

    Examples
    --------
    >>> from mofa.cost.allocations.allocation_trace import Deed, Life, New
    >>> up = Deed("fc1", (New("h", 12, 0, 0),), rounds=2)
    >>> down = Deed("fc2", (New("y", 4, 0, 0),), free=("h", "x"), rounds=2)
    >>> cat = Deed("cat", (New("out", 4, 0, 0),), free=("y",))
    >>> one = Life("moe", (up, down, cat), (), "out", "", "", frozenset(), ())
    >>> for deed in one_by_one(one, [0.75, 0.25]).forward:
    ...     print(deed.op, *(f"{item.name} {item.bytes}" for item in deed.new), "free", *deed.free)
    fc1 h#0 9 free
    fc2 y#0 3 free h#0
    fc1 h#1 3 free
    fc2 y#1 1 free h#1 x
    cat out 4 free y#0 y#1
    """
    deeds = (*life.forward, *life.backward)
    num = max((deed.rounds for deed in deeds), default=0)
    if num < 2:
        return life
    each = list(shares) or [1.0 / num] * num
    cut = {item.name for deed in deeds if deed.rounds > 1 and not deed.weight for item in deed.new}
    return replace(life, forward=tuple(_all(life.forward, each, cut)), backward=tuple(_all(life.backward, each, cut)))


def _all(deeds: Sequence[Deed], shares: Sequence[float], cut: set[str]) -> Iterator[Deed]:
    for (loop, again), group in groupby(deeds, lambda deed: (deed.rounds > 1, deed.repeated)):
        found = list(group)
        if not loop:
            yield from (_whole(deed, len(shares), cut) for deed in found)
            continue
        back = not again and any(deed.weight for deed in found)
        order = range(len(shares))[:: -1 if back else 1]
        freed = {name for deed in found for name in deed.free}
        each = cut | {item.name for deed in found if deed.weight for item in deed.new if item.name in freed}
        for expert in order:
            shared, first = expert == order[-1], expert == order[0]
            for deed in found:
                one = _of_one(deed, expert, shares, cut, each, shared=shared)
                one = one if first else one._replace(lasting=())
                yield _of_sum(one, deed, first=first) if deed.role == "whole" else one


def _whole(deed: Deed, num: int, cut: set[str]) -> Deed:
    """An op outside the loop, which lets go or reads all experts' blocks."""

    def names(group: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(n for name in group for n in ([f"{name}#{j}" for j in range(num)] if name in cut else [name]))

    if cut.isdisjoint((*deed.free, *deed.hold, *deed.reads)):
        return deed
    order = tuple(step for step in deed.order if not (isinstance(step, str) and step[:1] == "-" and step[1:] in cut))
    return deed._replace(free=names(deed.free), hold=names(deed.hold), reads=names(deed.reads), order=order)


def _of_sum(one: Deed, whole: Deed, *, first: bool) -> Deed:
    """A gradient of all experts' weight, of which the ``first`` one's is the sum, and later ones' are added to it."""
    return one._replace(new=whole.new if first else (), scratch=() if first else whole.scratch)


def _of_one(
    deed: Deed, expert: int, shares: Sequence[float], cut: set[str], each: set[str], *, shared: bool
) -> Deed:  # fmt: skip
    """An op of the loop for one expert, in which ``each`` comes or goes, and what is ``shared``. A weight's gradient is
    one expert's already; copies of weights are as large for each."""

    def name_of(name: str) -> str:
        return f"{name}#{expert}" if name.removeprefix("-") in cut else name

    def sized(items: tuple[New, ...]) -> tuple[New, ...]:
        if deed.weight:
            return tuple(item for item in items if shared or item.name in each)
        return tuple(
            New(name_of(item.name), int(item.bytes / len(shares)), item.stream, item.kind, item.expert)
            if item.kind == COPY
            else New(name_of(item.name), int(item.bytes * shares[expert]), item.stream, item.kind, expert)
            for item in items
        )

    return deed._replace(
        new=sized(deed.new), scratch=sized(deed.scratch),
        free=tuple(name_of(name) for name in deed.free if shared or name in each),
        order=tuple(name_of(step) if isinstance(step, str) else step for step in deed.order),
        reads=tuple(name_of(name) for name in deed.reads), grads=tuple(name_of(name) for name in deed.grads),
    )  # fmt: skip
