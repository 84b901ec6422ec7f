"""Kernels that are used for the first time: the driver loads them, and the host's lead is gone.

A load takes the host a while and then waits until all that was launched has ended (NVIDIA, CUDA programming guide,
"Lazy Loading", on concurrent execution: to load a kernel the context may have to be synchronised). Behind 0.1 s of work
in the queue the first product that needs a new kernel takes the host 98 to 127 ms in each of the 12 series that have
one in measurements/h200-host-second/products.json, most of the next ones 2 to 4 ms, as the queue is empty by then; in
mc4-tp2-pp2-etp2-mixtral-4l-traced two of the backward pass take 8.0 and 18.7 ms, in which the device idles for the last
0.3 and 0.5, and two of the forward pass 2.4 ms, of which it idles for 1.4 and 2.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mofa.blocks.context import Context
from mofa.blocks.elementwise import FloatK, any_true, maximum, where
from mofa.blocks.op import Op, Tape
from mofa.blocks.work import HostSync, MemoryBound


def share_of_passes_with_kernel_load(ctx: Context) -> FloatK:
    """Probability that a layer's pass loads at least one kernel, the mean over the layers. (K,) [-]

    Counts are Poisson's. Each way needs half of a token count's kernels.
    """
    if ctx.model.moe is None:
        return 0.0
    share: FloatK = 1.0 - np.exp(-0.5 * ctx.local_experts * ctx.expected_first_use_kernels * ctx.mean_loops_before)
    return share


def tape_with_kernel_loads(
    tape: Tape, seconds: Sequence[FloatK], issue: Sequence[FloatK], load_s: float, drained: bool = False
) -> tuple[Tape, list[FloatK], list[FloatK]]:
    """A tape with what loads take ahead of the loops over experts that need them, and its ops' seconds.

    Parameters
    ----------
    tape
        With the kernels expected of each op (``Op.kernel_loads``).
    seconds, issue
        Device and host time of each op, without loads. (K,) each [s]
    load_s
        One load. [s]
    drained
        Whether a load has taken the lead that the host brought along.

    Notes
    -----
    A load anywhere in a loop finds the host ahead by ``u X``, ``u`` the share of the loop behind it and ``X`` what
    computing the loop takes longer than issuing it, and the device idles for ``max(load_s - u X, 0)``: in the mean over
    ``u`` for ``load_s - X / 2``, or ``load_s^2 / (2 X)`` where ``X`` is above ``load_s``. ``n`` expected loads put the
    device off by ``n`` times that and the host by ``n load_s``, however small ``n`` is: a mean over steps. A pass that
    has loaded one has no lead from before either, such as that of the head over the backward pass: steps are costed
    both ways and take the mean, by the share of passes (:func:`share_of_passes_with_kernel_load`) of which that holds.
    Assumes no such lead for the mean, that loads don't follow each other closely, and that what is computed again was
    loaded the first time; what the device idles while a drained load ends (above) is left out.

    Examples
    --------
    Two products in a loop that takes the device 8 ms and the host 4, and a kernel loaded in 2 ms: it costs the device
    half a millisecond, and nothing of the host's time is the device's.

    >>> ops = tuple(
    ...     Op(name, "grouped_gemm", MemoryBound(1.0), expert_loops=4.0, kernel_loads=0.5) for name in ("a", "b")
    ... )
    >>> tape, took, issued = tape_with_kernel_loads(Tape(ops, {}, (), ()), [4.0, 4.0], [2.0, 2.0], 2.0, drained=True)
    >>> [op.name for op in tape.ops]
    ['a.waits', 'a.loads', 'a.loaded', 'a', 'b']
    >>> took, issued
    ([0.0, 0.5, 0.0, 4.0, 4.0], [0.0, 0.0, 2.0, 2.0, 2.0])
    """
    some = [loads for op in tape.ops if type(loads := op.kernel_loads) is not float or loads != 0.0]
    if load_s == 0.0 or not (some and any(map(any_true, some))):  # nearly always
        return tape, list(seconds), list(issue)
    out: list[tuple[Op, FloatK, FloatK]] = []
    begin = 0
    while begin < len(tape.ops):
        end = _end(tape.ops, begin)
        loop = list(zip(tape.ops[begin:end], seconds[begin:end], issue[begin:end], strict=True))
        first = [op for op, *_ in loop if not op.repeated]
        loads = sum((where(op.present, op.kernel_loads, 0.0) for op in first), 0.0)
        if any_true(loads):
            ahead = maximum(sum((s - i for _, s, i in loop), 0.0), 0.0)
            idle = where(ahead < load_s, load_s - ahead / 2.0, load_s**2 / (2.0 * maximum(ahead, load_s)))
            name = tape.ops[begin].name
            if drained:
                out.append((Op(f"{name}.waits", "host", HostSync(), launches=0, present=loads > 0.0), 0.0, 0.0))
            out.append((Op(f"{name}.loads", "host_idle", MemoryBound(0.0), launches=0), loads * idle, 0.0))
            out.append((Op(f"{name}.loaded", "host", None, launches=0), 0.0, loads * load_s))
        out += loop
        begin = end
    ops, took, issued = zip(*out, strict=True)
    return replace(tape, ops=ops), list(took), list(issued)


def kernel_load_idle_s(tape: Tape, seconds: Sequence[FloatK]) -> FloatK:
    """What loads keep the device waiting in a tape of :func:`tape_with_kernel_loads`. (K,) [s]"""
    return sum([took for op, took in zip(tape.ops, seconds, strict=True) if op.family == "host_idle"], 0.0)


def _end(ops: tuple[Op, ...], begin: int) -> int:
    """Where the loop ends that begins at an op; behind it where it is in none."""
    end = begin + 1
    while any_true(ops[begin].expert_loops > 1.0) and end < len(ops) and any_true(ops[end].expert_loops > 1.0):
        end += 1
    return end
