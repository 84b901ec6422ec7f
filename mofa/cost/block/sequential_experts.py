"""Time of experts that run one after the other, of which the tape has each kind of op together.

A tape has one op for the first products of all experts, one for their activations and one for their second products.
They are issued and run expert by expert: the device begins once the first expert's first product is issued, not the
last one's, and ends behind the last expert's last op.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from mofa.blocks.elementwise import FloatK, any_true, maximum, minimum, where
from mofa.blocks.op import Op, Tape
from mofa.blocks.work import GroupedGemm, MemoryBound
from mofa.cost.kernels.launch_queue import QUEUE, num_queued_kernels

BETWEEN = 0.5826
"""How far beyond a level steps of a standard deviation of 1 are found that go on in time: -zeta(1/2) / sqrt(2 pi)
(Chernoff 1965; Siegmund 1979, doi:10.2307/1426934). [-]"""


def expert_loop_issue_seconds(ops: Sequence[Op], seconds: Sequence[FloatK], issue: Sequence[FloatK]) -> list[FloatK]:
    """Issue of each op such that a loop's ops make the device wait as long as they do expert by expert. [s]

    Notes
    -----
    ``R`` equal loops are issued in ``H`` and run for ``D``; the first op is issued in ``h``, the last one runs for
    ``d``, all loops together. The device begins ``h / R`` behind the host. It ends no sooner than the last loop's last
    op, ``d / R`` long, behind the end of the issue. Both hold if all that is issued ahead of the first op takes ``max(h
    / R, H + d / R - D)``; the rest of ``H`` comes behind the last op. Where the loops' products differ
    (``GroupedGemm.uneven``), :func:`extra_wait_of_uneven_expert_loops_s` comes on top: after some small ones the device
    has caught up with the host, even where the loop as a whole is bound by the device.

    Examples
    --------
    Two products of 4 ms in four rounds, issued in 2 ms each: the first one is issued after half a millisecond. Where
    issue takes 6 ms each the device still computes the last millisecond's when all 12 are issued.

    >>> from mofa.blocks.op import MemoryBound
    >>> loops = {"a": 4.0, "b": 4.0, "cat": 1.0}
    >>> ops = [Op(name, "grouped_gemm", MemoryBound(1.0), expert_loops=n) for name, n in loops.items()]
    >>> expert_loop_issue_seconds(ops, [4.0, 4.0, 1.0], [2.0, 2.0, 1.0])
    [0.5, 0.0, 4.5]
    >>> expert_loop_issue_seconds(ops, [4.0, 4.0, 1.0], [6.0, 6.0, 1.0])
    [5.0, 0.0, 8.0]
    """
    out, behind = issue_seconds_around_loops(ops, seconds, issue)
    for last, rest_s in behind.items():
        end = next(i for i in range(last, len(ops)) if not any_true(ops[i].expert_loops > 1.0))
        out[end] = out[end] + rest_s
    return out


def issue_seconds_around_loops(
    ops: Sequence[Op], seconds: Sequence[FloatK], issue: Sequence[FloatK]
) -> tuple[list[FloatK], dict[int, FloatK]]:
    """Host time to issue each op with loops over experts, and the rest of a loop's issue by the index of its last op:
    the host issues that before it goes on, and the device does not wait for it. [s]

    Examples
    --------
    >>> from mofa.blocks.work import MemoryBound
    >>> loops = {"a": 4.0, "b": 4.0, "c": 1.0}
    >>> ops = [Op(name, "grouped_gemm", MemoryBound(1.0), expert_loops=n) for name, n in loops.items()]
    >>> issue_seconds_around_loops(ops, [4.0, 4.0, 1.0], [6.0, 6.0, 1.0])
    ([5.0, 0.0, 1.0], {1: 7.0})
    """
    out, behind = list(issue), dict[int, FloatK]()
    for running in _loops(ops):
        behind[running[-1]] = _one_loop(ops, ops[running[0]].expert_loops, running, seconds, out)
    return out, behind


def tape_with_full_queue_waits(
    tape: Tape, seconds: Sequence[FloatK], issue: Sequence[FloatK]
) -> tuple[Tape, list[FloatK], list[FloatK]]:
    """A tape with what the device waits in loops of more launches than its queue takes, and its ops' seconds.

    Notes
    -----
    However early the host comes to a loop of ``N`` launches, no more than :data:`QUEUE` are there when the device
    begins it. The others are issued meanwhile: the loop takes the device no less than ``(1 - QUEUE / N) H + d / R``, in
    the terms of :func:`expert_loop_issue_seconds`.

    Examples
    --------
    Two ops of 1,024 launches each, in four rounds. They are issued in 40 s and computed in 8: half of the issue is left
    when the device begins, and a second's op behind it.

    >>> ops = tuple(Op(name, "grouped_gemm", MemoryBound(1.0), launches=1024, expert_loops=4.0) for name in ("a", "b"))
    >>> behind = Op("c", "gemm", MemoryBound(1.0))
    >>> tape = Tape((*ops, behind), {}, (), ())
    >>> tape, took, issued = tape_with_full_queue_waits(tape, [4.0, 4.0, 1.0], [20.0, 20.0, 1.0])
    >>> [op.name for op in tape.ops], took, issued
    (['a', 'a.queue', 'b', 'c'], [4.0, 13.0, 4.0, 1.0], [20.0, 0.0, 20.0, 1.0])
    """
    waits: dict[int, tuple[Op, FloatK]] = {}
    for running in _loops(tape.ops):
        launches = sum([where(tape.ops[i].present, num_queued_kernels(tape.ops[i]), 0.0) for i in running], 0.0)
        if any_true(launches > QUEUE):
            first, loops = tape.ops[running[0]], tape.ops[running[0]].expert_loops
            issued, busy = sum([issue[i] for i in running], 0.0), sum([seconds[i] for i in running], 0.0)
            rest_s = (1.0 - QUEUE / maximum(launches, QUEUE)) * issued + seconds[running[-1]] / loops
            idle_s = where(launches > QUEUE, maximum(rest_s - busy, 0.0), 0.0)
            wait = Op(f"{first.name}.queue", "host_idle", MemoryBound(0.0), launches=0, expert_loops=loops)
            waits[running[0]] = wait, idle_s
    if not waits:
        return tape, list(seconds), list(issue)
    out: list[tuple[Op, FloatK, FloatK]] = []
    for i, given in enumerate(zip(tape.ops, seconds, issue, strict=True)):
        out.append(given)
        if i in waits:
            out.append((*waits[i], 0.0))
    ops, took, issued_s = zip(*out, strict=True)
    return replace(tape, ops=ops), list(took), list(issued_s)


def _loops(ops: Sequence[Op]) -> Iterator[list[int]]:
    """Of each loop over experts that something comes behind, the indices of the ops that run."""
    if {1.0}.issuperset([op.expert_loops if type(op.expert_loops) is float else 0.0 for op in ops]):  # nearly always
        return
    start = 0
    while start < len(ops):
        end = start
        while end < len(ops) and any_true(ops[end].expert_loops > 1.0):
            end += 1
        running = [i for i in range(start, end) if ops[i].work is not None]
        if running and end < len(ops):
            yield running
        start = max(end, start + 1)


def extra_wait_of_uneven_expert_loops_s(behind: FloatK, deviation: FloatK, loops: FloatK) -> FloatK:
    """How much longer the device waits for unequal loops than for equal ones, in any order. [s]

    Parameters
    ----------
    behind
        What issuing the loop takes longer than computing it, negative where it is the shorter. [s]
    deviation
        Standard deviation of the loops' seconds on the device. [s]
    loops
        How many there are. [-]

    Notes
    -----
    The device waits for the largest sum of ``issue - computing`` over the first loops, in the mean over their orders.
    The sums go from 0 to ``m = behind`` like a Brownian bridge of variance ``S = R deviation^2``. It exceeds ``b`` with
    probability ``exp(-2 b (b - m) / S)``; steps in discrete time as one that is higher by :data:`BETWEEN` of a step.
    Within 0.1 rounds of orders drawn at random where issue and computing are equal. ``exp(z^2) erfc(z)`` is Abramowitz
    and Stegun's 7.1.25.

    Examples
    --------
    16 rounds of 1 +- 0.6 ms, issued in as long: one round more. Where issue takes three times as long there is nothing
    to wait for that is not waited for anyway:

    >>> [round(float(extra_wait_of_uneven_expert_loops_s(m, 0.6, 16.0)), 2) for m in (0.0, -1.6, 32.0)]
    [1.16, 0.63, 0.0]
    """
    scale: FloatK = np.sqrt(2.0 * loops)
    root = maximum(deviation * scale, 1e-30)
    level: FloatK = maximum(behind, -behind) / root
    shifted = level + 2.0 * BETWEEN * deviation / root
    t = 1.0 / (1.0 + 0.47047 * shifted)
    tail = t * (0.3480242 + t * (0.7478556 * t - 0.0958798))
    nearer: FloatK = np.exp((level - shifted) * (level + shifted))
    return 0.25 * float(np.sqrt(np.pi)) * deviation * scale * nearer * tail


def _one_loop(
    ops: Sequence[Op], loops: FloatK, running: list[int], seconds: Sequence[FloatK], out: list[FloatK]
) -> FloatK:
    """Move the issue of one loop's ops ahead of the first; what comes behind the last. [s]"""
    first, last, several = running[0], running[-1], loops > 1.0
    issued, busy = sum((out[i] for i in running), 0.0), sum((seconds[i] for i in running), 0.0)
    ahead = maximum(out[first] / loops, issued + seconds[last] / loops - busy)
    uneven: FloatK = 0.0
    for i in running:
        if type(work := ops[i].work) is GroupedGemm and any_true(work.uneven):
            uneven = uneven + work.uneven * seconds[i]
    if any_true(uneven):
        ahead = minimum(ahead + extra_wait_of_uneven_expert_loops_s(issued - busy, uneven / loops, loops), issued)
    for i in running:
        out[i] = where(several, ahead if i == first else 0.0, out[i])
    return where(several, issued - ahead, 0.0)
