"""Ops that run in turn: experts one after the other, each with all its ops, which the tape has together.

A tape has one op for the first products of all experts, one for their activations and one for their second products.
They are issued and run expert by expert: the device begins once the first expert's first product is issued, not the
last one's, and ends behind the last expert's last op.
"""

from __future__ import annotations

from collections.abc import Sequence

from mofa.blocks.elementwise import FloatK, anywhere, maximum, where
from mofa.blocks.op import Op


def in_turn(ops: Sequence[Op], seconds: Sequence[FloatK], issue: Sequence[FloatK]) -> list[FloatK]:
    """Issue of each op such that ops that run in turn make the device wait as long as they do round by round. [s]

    Notes
    -----
    Of ``R`` equal rounds that are issued in ``H`` and run for ``D``, the device begins ``h / R`` behind the host, ``h``
    the issue of the first op, and ends no sooner than the last round's last op, ``d / R`` long, behind the end of the
    issue. Both hold if all that is issued ahead of the first op takes ``max(h / R, H + d / R - D)``; the rest of ``H``
    comes behind the last op. Assumes rounds that are alike.

    Examples
    --------
    Two products of 4 ms in four rounds, issued in 2 ms each: the first one is issued after half a millisecond. Where
    issue takes 6 ms each the device still computes the last millisecond's when all 12 are issued.

    >>> from mofa.blocks.op import Stream
    >>> ops = [Op(name, "grouped_gemm", Stream(1.0), rounds=r) for name, r in (("a", 4.0), ("b", 4.0), ("cat", 1.0))]
    >>> in_turn(ops, [4.0, 4.0, 1.0], [2.0, 2.0, 1.0])
    [0.5, 0.0, 4.5]
    >>> in_turn(ops, [4.0, 4.0, 1.0], [6.0, 6.0, 1.0])
    [5.0, 0.0, 8.0]
    """
    out = list(issue)
    at = 0
    while at < len(ops):
        rounds = ops[at].rounds
        if not anywhere(rounds > 1.0):
            at += 1
            continue
        end = at
        while end < len(ops) and anywhere(ops[end].rounds > 1.0):
            end += 1
        running = [i for i in range(at, end) if ops[i].work is not None]
        if running and end < len(ops):
            _one_loop(rounds, running, end, seconds, out)
        at = end
    return out


def _one_loop(rounds: FloatK, running: list[int], end: int, seconds: Sequence[FloatK], out: list[FloatK]) -> None:
    """Move the issue of one loop's ops ahead of the first and behind the last."""
    first, last, several = running[0], running[-1], rounds > 1.0
    issued, busy = sum((out[i] for i in running), 0.0), sum((seconds[i] for i in running), 0.0)
    ahead = maximum(out[first] / rounds, issued + seconds[last] / rounds - busy)
    for i in running:
        out[i] = where(several, ahead if i == first else 0.0, out[i])
    out[end] = out[end] + where(several, issued - ahead, 0.0)
