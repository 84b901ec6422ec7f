"""What goes on beside the compute stream: streams, communicators, and when their tensors are there.

Every clock is a plain number for one candidate and an array for K (:mod:`mofa.blocks.elementwise`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mofa.blocks.elementwise import BoolK, FloatK, any_true, logical_not, maximum, minimum, where
from mofa.blocks.op import EXPERT_STREAM, Op
from mofa.blocks.work import Collective
from mofa.cost.block.durations import OpTimingMachine

OWN_ORDER = ("fsdp_gather", EXPERT_STREAM)
"""Streams whose collectives wait for nothing but their inputs; any other waits for all that was launched before it on
the stream that launches it (PyTorch 2.11, ProcessGroupNCCL.cpp, ``syncStream``)."""

NEVER = -np.inf
Ready = dict[str, FloatK]
"""When a tensor is there, by the family that makes it: several where an absent op of one hands on what another's made;
"" is the compute stream itself."""
Until = tuple[FloatK, FloatK]
"""Until when something is taken, and the ``loss`` from which on that does not move, however late computing is."""
FREE: Until = (0.0, 0.0)
NOTHING: Ready = {}
MOVES = np.inf
"""Of what moves with all that computing loses."""


def output_ready_times(present: BoolK, made: Ready, handed_on: Ready) -> Ready:
    """When the output of an op is ready, by family: what it makes where it is present, else what it hands on."""
    out = {family: where(present, ready_s, NEVER) for family, ready_s in made.items()}
    for family, ready_s in handed_on.items():
        out[family] = maximum(where(present, NEVER, ready_s), out.get(family, NEVER))
    return out


@dataclass(slots=True)
class TapeStreamClocks:
    """The clocks of the host, of the compute stream and of all beside it.

    Communication slows computing beside it, which these clocks don't have. ``loss`` is what computing would have lost
    by now with communication, and its share of copies, beside all of it, less what waits gave back: who computes
    longer beside what he then waits for, waits the shorter. ``regained`` is what they gave back in this repetition,
    by family. [s]
    """

    host: FloatK
    compute: FloatK = 0.0
    streams: dict[str, Until] = field(default_factory=dict)
    communicators: dict[str, Until] = field(default_factory=dict)
    ready: dict[str, Ready] = field(default_factory=dict)
    since: dict[str, FloatK] = field(default_factory=dict)
    """The ``loss`` from which on it does not move when a tensor of another stream is there."""
    loss: FloatK = 0.0
    regained: dict[str, FloatK] = field(default_factory=dict)
    issue_delay_s: FloatK = 0.0
    """How much later anything is issued than computed in this repetition, from a common beginning: what the device
    waits for a host that has no lead. [s]"""

    def with_host_ahead(self, ahead_s: float) -> TapeStreamClocks:
        """The clocks with the host so far ahead of the device (negative). [s]"""
        return TapeStreamClocks(
            self.compute + ahead_s, self.compute, dict(self.streams), dict(self.communicators), dict(self.ready),
            dict(self.since), self.loss,
        )  # fmt: skip

    def wait_for_tensor(self, name: str, family: str, wait_s: FloatK) -> None:
        """The compute stream waits so long for a tensor that a family makes. [s]"""
        regained = maximum(minimum(wait_s, self.loss - self.since.get(name, MOVES)), 0.0)
        self.regained[family] = self.regained.get(family, 0.0) + regained
        self.loss = self.loss - regained
        self.compute = self.compute + wait_s

    def pass_on_ready_time(self, op: Op, runs: BoolK) -> None:
        """Where an op of the compute stream does not run, its output is there when its input is."""
        handed_on = output_ready_times(runs, NOTHING, self.ready.get(op.reads[0], NOTHING))
        since = where(runs, MOVES, self.since.get(op.reads[0], MOVES))
        for name in op.writes:
            self.ready[name], self.since[name] = handed_on, since

    def play_side_stream_op(self, op: Op, took: FloatK, machine: OpTimingMachine) -> None:
        """An op of another stream: it starts once it is issued, its stream and its communicator are free and its inputs
        are there, those of its own stream too: where their producer is absent they are ready when its input is."""
        launch = maximum(self.host, 0.0 if op.stream in OWN_ORDER else self.compute)
        start, since = launch, self.loss
        ready, fixed_from = self.ready, self.since
        inputs = [name for name in op.reads if name in ready]
        awaited = [(ready_s, fixed_from.get(name, MOVES)) for name in inputs for ready_s in ready[name].values()]
        awaited.append(self.streams.get(op.stream, FREE))
        collective = op.work if type(op.work) is Collective else None
        if collective is not None:
            on_world = machine.uses_world_communicator(collective.group)
            awaited.append(self._communicator(collective.group, on_world))
        for ready_s, fixed in awaited:
            later = ready_s > start
            if later is not False:
                start, since = maximum(start, ready_s), where(later, fixed, since)
        # where computing is later than it waits in the queue, it moves as well
        since = maximum(minimum(since, self.loss), self.loss - (start - launch))
        end = start + took
        _take(self.streams, op.stream, op.present, (end, since))
        if collective is not None:
            self._occupy(collective.group, on_world, op.present, (end, since))
        made: Ready = {op.family: end}
        if op.reads:
            if op.present is not True:  # where it does not run, its output is ready when its input is
                made = output_ready_times(op.present, made, ready.get(op.reads[0], NOTHING))
            runs = op.present if op.work is not None else False
            if runs is not True:
                since = where(runs, since, fixed_from.get(op.reads[0], MOVES))
        for name in op.writes:
            ready[name], fixed_from[name] = made, since

    def _communicator(self, group: str, on_world: BoolK) -> Until:
        """Until when a group's communicator is taken, the world's where ``on_world``.

        NCCL runs one operation after the other.
        """
        own = self.communicators.get(group, FREE)
        if on_world is False:
            return own
        world = self.communicators.get("world", FREE)
        return where(on_world, world[0], own[0]), where(on_world, world[1], own[1])

    def _occupy(self, group: str, on_world: BoolK, present: BoolK, until: Until) -> None:
        if on_world is False:
            _take(self.communicators, group, present, until)
            return
        for name, where_taken in ((group, logical_not(on_world)), ("world", on_world)):
            if any_true(where_taken):
                _take(self.communicators, name, present & where_taken, until)


def _take(queues: dict[str, Until], name: str, present: BoolK, until: Until) -> None:
    """Where an op is present it takes something until its end, which is never before what was launched ahead of it."""
    before = queues.get(name, FREE)
    end, since = until
    if present is True:
        queues[name] = maximum(end, before[0]), since
        return
    queues[name] = where(present, maximum(end, before[0]), before[0]), where(present, since, before[1])
