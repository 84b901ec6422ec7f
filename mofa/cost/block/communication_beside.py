"""What computing and communication beside it cost each other in a tape, over all K candidates at once.

Computing loses a share of its rate by a collective beside it. What it waits for later gives back what it lost. In the
long run no communicator takes less than all that is sent on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from mofa.blocks.elementwise import BoolK, FloatK, any_true, maximum, minimum, where
from mofa.blocks.op import COMPUTING_FAMILIES, Op, Tape
from mofa.blocks.work import Collective, HostCopy, HostSync, MemoryBound
from mofa.cost.block.durations import OpTimingMachine
from mofa.cost.kernels.computing_slowdown import collective_slowdown

ROUNDING = 1e-9
"""By how much of them two sums of the same seconds may be apart. [-]"""
HIDDEN = ("tp", "cp", "ep", "pp", "dp")


class CommunicationOfFamily(NamedTuple):
    """A family that communicates: its seconds, what computing loses per second that it runs beside, its seconds on
    other streams than computing's, and those of its copies on computing's, which lose as much. (K,) [s, -, s, s]"""

    sent_s: FloatK
    slowdown: FloatK
    aside_s: FloatK
    copied_s: FloatK


def exposed_and_hidden_with_loss(
    alone: dict[str, FloatK], sent: Mapping[str, CommunicationOfFamily], regained: dict[str, FloatK]
) -> tuple[dict[str, FloatK], dict[str, FloatK]]:
    """What is exposed, with what computing loses by communication beside it, and what is hidden. (K,) each [s]"""
    exposed = dict(alone)
    hidden: dict[str, FloatK] = dict.fromkeys(HIDDEN, 0.0)
    computing, alone_s = sum((alone[name] for name in COMPUTING_FAMILIES), 0.0), sum(alone.values(), 0.0)
    left_s: FloatK = 0.0  # of what waits give back more than their own family makes computing lose
    lost_s: dict[str, FloatK] = {}
    for name, (took, slowdown, *_) in sent.items():
        beside = took - alone[name]
        hidden[name] = where(beside > 1e-9 * took, beside, 0.0)  # rounding is no overlap
        # what runs beside another wait costs nothing, nor does what makes a wait the shorter
        share = computing / maximum(alone_s - alone[name], 1e-12)
        more_s = slowdown * share * hidden[name] - regained.get(name, 0.0)
        lost_s[name] = maximum(more_s, 0.0)
        left_s = left_s + maximum(-more_s, 0.0)
    for name, family_lost_s in lost_s.items():
        exposed[name] = exposed[name] + maximum(family_lost_s - left_s, 0.0)
        left_s = maximum(left_s - family_lost_s, 0.0)
    return exposed, hidden


def communication_by_family(
    tape: Tape, seconds: list[FloatK], machine: OpTimingMachine
) -> dict[str, CommunicationOfFamily]:
    """Seconds of each family of ops that communicates, and what computing loses beside it.

    A collective takes a few multiprocessors and some bandwidth
    (:func:`mofa.cost.kernels.computing_slowdown.collective_slowdown`). A memory-bound kernel on another stream takes
    all of both: what it does, computing does not.
    """
    sent: dict[str, FloatK] = dict.fromkeys(HIDDEN, 0.0)
    aside, lost, copied = sent.copy(), sent.copy(), sent.copy()
    for op, took in zip(tape.ops, seconds, strict=True):
        if op.family in sent and not is_neighbouring_tapes_collective(op):
            sent[op.family] = sent[op.family] + took
            if op.stream != "compute":
                aside[op.family] = aside[op.family] + took
                lost[op.family] = lost[op.family] + computing_slowdown(op, machine) * took
            elif type(op.work) is MemoryBound:
                copied[op.family] = copied[op.family] + took
    return {
        name: CommunicationOfFamily(sent_s, lost[name] / maximum(aside[name], 1e-12), aside[name], copied[name])
        for name, sent_s in sent.items()
        if any_true(sent_s)
    }


def computing_slowdown(op: Op, machine: OpTimingMachine) -> FloatK:
    """What computing loses per second of an op on another stream. (K,) [-]"""
    if isinstance(op.work, Collective):
        group = machine.groups[op.work.group]
        return collective_slowdown(machine.cluster.gpu.curves, group, machine.network_fabric, op.work.kind)
    if isinstance(op.work, HostCopy):
        return 0.0
    return 1.0 if isinstance(op.work, MemoryBound) else machine.cluster.gpu.curves.overlap_slowdown.value


def largest_slowdown(sent: Mapping[str, CommunicationOfFamily]) -> FloatK:
    """What computing loses per second beside the family that slows it down most. (K,) or of all [-]"""
    largest: FloatK = 0.0
    for family in sent.values():
        largest = maximum(largest, family.slowdown)
    return largest


class BusiestQueue(NamedTuple):
    """The communicator or stream beside computing that takes longest for a repetition. (K,) each"""

    seconds: FloatK
    """In the long run no repetition is shorter, however many it takes for what waits in the queue to hold up computing.
    [s]"""
    families: dict[str, BoolK]
    """Where each family that communicates is in that queue."""


def busiest_queue(ops: tuple[Op, ...], seconds: list[FloatK], machine: OpTimingMachine) -> BusiestQueue:
    """What the busiest communicator or stream beside computing takes for a repetition, and whose ops are in it."""
    queues: dict[str, FloatK] = {}
    families: dict[str, set[str]] = {}

    def queue(name: str, family: str, took: FloatK) -> None:
        queues[name] = queues.get(name, 0.0) + took
        families.setdefault(name, set()).add(family)

    for op, took in zip(ops, seconds, strict=True):
        if op.stream == "compute" or type(op.work) is HostSync or is_neighbouring_tapes_collective(op):
            continue
        queue(op.stream, op.family, took)
        if type(op.work) is Collective:
            on_world = machine.uses_world_communicator(op.work.group)
            queue("communicator of all", op.family, where(on_world, took, 0.0))
            queue(f"communicator of {op.work.group}", op.family, where(on_world, 0.0, took))
    busiest_s: FloatK = 0.0
    for busy_s in queues.values():
        busiest_s = maximum(busiest_s, busy_s)
    inside: dict[str, BoolK] = {}
    for name, busy_s in queues.items():
        for family in families[name]:
            inside[family] = inside.get(family, False) | (busy_s >= busiest_s * (1.0 - ROUNDING))
    return BusiestQueue(busiest_s, inside)


def lengthen_by_busy_communicator(
    ops: tuple[Op, ...], queue: BusiestQueue,
    of_compute: tuple[dict[str, FloatK], dict[str, FloatK], dict[str, FloatK]],
    sent: Mapping[str, CommunicationOfFamily],
) -> FloatK:  # fmt: skip
    """Lengthen a repetition to what it takes in the long run, where a communicator is busy for so much of it.

    Where all of its queue is beside computing, computing loses by all of it: a repetition takes what the compute
    stream does, waits for others and loses. If the queue takes longer, it is never idle, and sets the time alone: what
    is waited for it gives back what computing lost. The family that sends last has what is added.

    Parameters
    ----------
    of_compute
        What the compute stream does and waits for, the same with what computing loses by communication, and what is
        hidden. The last two are changed in place. (K,) each [s]

    Returns
    -------
    array or float
        What computing may lose besides with nothing later. (K,) [s]
    """
    alone, exposed, hidden = of_compute
    families = [op.family for op in ops if type(op.work) is Collective and op.stream != "compute"]
    family = families[-1] if families else "memory_bound"
    alone_s, total_s = sum(alone.values(), 0.0), sum(exposed.values(), 0.0)
    queued = queue.seconds
    computed_s, lost_s = _computed_and_lost_s(queue, alone, sent)
    # a queue that is shorter than computing has ends: what is lost beside it was counted
    beside_s = where(queued >= computed_s, computed_s + lost_s, total_s)
    is_full = (beside_s <= queued) & (alone_s <= queued)
    lasts_s = where(is_full, queued, maximum(maximum(total_s, beside_s), queued))
    more_s = where(queued > 0.0, lasts_s - total_s, 0.0)
    exposed[family] = exposed[family] + more_s
    if family in hidden:
        hidden[family] = maximum(hidden[family] - more_s, 0.0)
    # computing loses while it computes, and then waits: beside a queue that is never empty it takes so much longer
    share_s = lost_s / maximum(queued, 1e-12)
    return where(is_full, queued - computed_s / maximum(1.0 - share_s, 1e-12), 0.0)


def _computed_and_lost_s(
    queue: BusiestQueue, alone: dict[str, FloatK], sent: Mapping[str, CommunicationOfFamily]
) -> tuple[FloatK, FloatK]:
    """What a compute stream takes that never waits for a queue, and what it loses beside all of the queue and what is
    hidden of others. (K,) each [s]

    It loses while it computes alone, which is the larger part of the time the more it loses. Of losses of T s beside a
    stream that takes B s, of which it computes b, that is L in ``L = T (b + L) / (B + L)``.
    """
    computed_s: FloatK = sum(alone.values(), 0.0)
    slowed_s: FloatK = 0.0
    for name, family in sent.items():
        waits_s = maximum(alone[name] - (family.sent_s - family.aside_s), 0.0)
        in_queue = queue.families.get(name, False)
        computed_s = computed_s - where(in_queue, waits_s, 0.0)
        beside_s = where(in_queue, family.aside_s, maximum(family.aside_s - waits_s, 0.0))
        slowed_s = slowed_s + family.slowdown * beside_s
    computing_s = minimum(_computing_s(alone, sent), computed_s)
    beyond_s = computed_s - slowed_s
    return computed_s, (np.sqrt(beyond_s * beyond_s + 4.0 * slowed_s * computing_s) - beyond_s) / 2.0


def _computing_s(alone: Mapping[str, FloatK], sent: Mapping[str, CommunicationOfFamily]) -> FloatK:
    """What the compute stream does that loses by communication beside it: computing, and families' copies. (K,) [s]"""
    computing: FloatK = sum((alone[name] for name in COMPUTING_FAMILIES), 0.0)
    return computing + sum((family.copied_s for family in sent.values()), 0.0)


def is_neighbouring_tapes_collective(op: Op) -> bool:
    """Whether it is another tape's collective that this one waits for: launched, and counted, there."""
    return isinstance(op.work, Collective) and not any_true(op.launches)
