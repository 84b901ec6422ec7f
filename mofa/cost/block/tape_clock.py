"""Time of a tape: a host clock beside one clock per stream, over all K candidates at once.

An op starts when its stream is free, the host has issued it and its inputs are there. The host runs ahead of the
device; its lead carries over ops and is lost at every host synchronisation. Every clock is a plain number for one
candidate and an array for K (:mod:`mofa.blocks.elementwise`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import BlockTapes
from mofa.blocks.elementwise import BoolK, FloatK, any_true, maximum, minimum, stack_rows, where
from mofa.blocks.op import COMPUTING_FAMILIES, Op, Tape
from mofa.blocks.roles import WEIGHT_ROLES
from mofa.blocks.work import HostSync
from mofa.cost.block.communication_beside import (
    HIDDEN,
    BusiestQueue,
    busiest_queue,
    communication_by_family,
    exposed_and_hidden_with_loss,
    largest_slowdown,
    lengthen_by_busy_communicator,
)
from mofa.cost.block.compiled_clock import MOST, CompiledStreamClocks, CompiledTape, c_library
from mofa.cost.block.durations import OpTimingMachine, Timed, device_seconds_and_stragglers
from mofa.cost.block.host_clock import NEVER as NO_WAIT
from mofa.cost.block.host_issue import issue_seconds
from mofa.cost.block.launch_blocking import with_launch_blocking
from mofa.cost.block.sequential_experts import expert_loop_issue_seconds, tape_with_full_queue_waits
from mofa.cost.block.streams import NOTHING, Ready, TapeStreamClocks, output_ready_times
from mofa.cost.kernels.launch_queue import num_queued_kernels
from mofa.cost.kernels.lazy_loading import kernel_load_idle_s, tape_with_kernel_loads
from mofa.cost.kernels.slowest_gpu import StragglerFractions

ArrayK = NDArray[np.float64]

EXPOSED = (
    "gemm", "grouped_gemm", "attention", "memory_bound", "recompute", "host_idle", "tp", "cp", "ep", "pp", "dp",
    "stragglers", "optimizer",
)  # fmt: skip
COMPUTED = [EXPOSED.index(name) for name in (*COMPUTING_FAMILIES, "stragglers", "dp")]
"""Places of what is computed on the slowest GPU, copies of weights and gradients included."""
MANY = 1000
"""Candidates from which NumPy's loops over them are as fast as the compiled part's. [-]"""
HOST_AHEAD = -1e9
"""The clock of a host that is ahead of all that a tape takes. [s]"""


@dataclass(frozen=True)
class TapeTime:
    """Time of one tape in its steady state.

    ``exposed`` (len(EXPOSED), K) sums to the time on the compute stream; ``hidden`` (len(HIDDEN), K) is communication
    that ran beside it; ``issue`` (K,) is what the host spent issuing. ``clocks`` (5, K) are the rows of
    :class:`mofa.cost.block.host_clock.ClockAdvance`, ``weights`` (K,) is the part that makes weights' gradients,
    ``busy`` (K,) what the compute stream does itself, waits left out, and ``slack`` (K,) what it may lose besides with
    nothing later, where a communicator that is never idle sets the time. ``aside`` (K,) is what communicates on other
    streams, and ``lost_aside`` (K,) what computing loses if it runs beside all of that. ``behind_experts`` (K,) is what
    of ``busy`` follows the last gradient of experts' weights; all of it where there is none. [s]
    """

    exposed: ArrayK
    hidden: ArrayK
    issue: ArrayK
    clocks: ArrayK
    weights: ArrayK
    busy: ArrayK
    slack: ArrayK
    aside: ArrayK
    lost_aside: ArrayK
    behind_experts: ArrayK

    @property
    def total_s(self) -> ArrayK:
        """Seconds of the tape: the sum of what each family exposes. (K,) [s]"""
        return np.asarray(self.exposed.sum(axis=0))

    @property
    def beyond_computing_s(self) -> ArrayK:
        """What the tape takes longer than its computing: what that loses by communication, or waits for it. (K,) [s]"""
        return np.asarray(np.maximum(self.total_s - self.busy - self.exposed[EXPOSED.index("host_idle")], 0.0))

    @property
    def exposed_with_host_far_ahead_s(self) -> ArrayK:
        """What is exposed under a host that begins far ahead: what it waits for inside the tape is left to wait for.
        (len(EXPOSED), K) [s]"""
        exposed, host = self.exposed.copy(), EXPOSED.index("host_idle")
        exposed[host] = 0.0
        exposed[host] = np.maximum(self.clocks[0] - exposed.sum(axis=0), 0.0)
        return exposed


def time_per_tape_repetition(
    tape: Tape, machine: OpTimingMachine, repeat: int = 2, timed: Timed | None = None
) -> TapeTime:
    """Time of one repetition of a tape that is repeated back to back; ``repeat`` 1 starts from rest. [s]

    ``timed`` as :func:`mofa.cost.block.durations.device_seconds` takes it.
    """
    return _scanned(*_read(tape, machine, timed), machine, repeat)


def times_of_backward_halves(block: BlockTapes, machine: OpTimingMachine) -> tuple[TapeTime, TapeTime]:
    """The halves of a backward as zero-bubble schedules run them: by inputs and by weights, each back to back. [s]"""
    tape, seconds, issue, stragglers = _read(block.backward, machine, None)
    rest = [n for n, op in enumerate(tape.ops) if op.role not in WEIGHT_ROLES]
    inputs = replace(tape, ops=tuple([tape.ops[n] for n in rest]))
    by_inputs = _scanned(inputs, [seconds[n] for n in rest], [issue[n] for n in rest], stragglers, machine, 2)
    return by_inputs, _scanned(*_read(block.split_backward.by_weights, machine, None), machine, 2)


def _read(
    tape: Tape, machine: OpTimingMachine, timed: Timed | None
) -> tuple[Tape, list[FloatK], list[FloatK], StragglerFractions]:
    """A tape with its ops' device and host seconds, and what of those of the device is waited for the slowest."""
    seconds, stragglers = device_seconds_and_stragglers(tape.ops, machine, timed)
    load_s = machine.slowest_host_factor * machine.cluster.gpu.curves.host.kernel_load_s.value
    tape, seconds, issue = tape_with_kernel_loads(
        tape, seconds, issue_seconds(tape.ops, machine), load_s, machine.host_lead_lost
    )
    tape, seconds, issue = tape_with_full_queue_waits(tape, seconds, issue)
    issue = expert_loop_issue_seconds(tape.ops, seconds, issue)
    if machine.framework.launch_blocking:
        tape, seconds, issue = with_launch_blocking(tape, seconds, issue, machine)
    return tape, seconds, issue, stragglers


def _scanned(
    tape: Tape, seconds: list[FloatK], issue: list[FloatK], stragglers: StragglerFractions, machine: OpTimingMachine,
    repeat: int,
) -> TapeTime:  # fmt: skip
    issued: FloatK = sum(issue, 0.0)
    ops = tape.ops
    sent = communication_by_family(tape, seconds, machine)
    begin = _clocks(ops, seconds, issue, machine, largest_slowdown(sent))
    clocks: tuple[FloatK, FloatK, FloatK, FloatK] | None = None
    device_s: FloatK | None = None
    queue = BusiestQueue(0.0, {})
    synchronises = HostSync in {type(op.work) for op in ops}  # the host waits for the device
    if repeat > 1 and not synchronises and not _carries(ops):
        # nothing but the host's lead goes from one repetition to the next: let it run ahead, then see who is slower
        state = begin(HOST_AHEAD)
        exposed = state.play_tape()
        rested, regained, issue_delay_s = exposed.copy(), state.regained, state.issue_delay_s
        exposed["host_idle"] = exposed["host_idle"] + maximum(issued - sum(exposed.values(), 0.0), 0.0)
    else:
        state = begin(0.0)
        if repeat > 1:
            queue = busiest_queue(ops, seconds, machine)
        for _ in range(repeat - 1):
            exposed = state.play_tape()
        starts = [state.with_host_ahead(NO_WAIT), state.with_host_ahead(-NO_WAIT)] if synchronises else []
        exposed = state.play_tape()
        regained = state.regained
        ahead = begin(HOST_AHEAD)
        for _ in range(repeat if _carries(ops) else 1):
            rested = ahead.play_tape()
        if starts:  # from a host far ahead and from one far behind
            begun = starts[0].compute, starts[1].host
            for start in starts:
                start.play_tape()
            ends = [(start.compute - since, start.host - since) for start, since in zip(starts, begun, strict=True)]
            clocks = ends[0][0], ends[1][0], ends[0][1], ends[1][1]
        else:  # what waits for a late launch is no device's time: nothing holds the host, let it run ahead
            issue_delay_s = ahead.issue_delay_s
            slowed_rested = exposed_and_hidden_with_loss(rested, sent, ahead.regained)[0]
            lengthen_by_busy_communicator(ops, queue, (rested, slowed_rested, {}), sent)
            device_s = sum(slowed_rested.values(), 0.0) + kernel_load_idle_s(tape, seconds)
    alone_s = sum(exposed.values(), 0.0)
    alone = exposed
    exposed, hidden = exposed_and_hidden_with_loss(alone, sent, regained)
    slack_s: FloatK = 0.0
    if any_true(queue.seconds > 0.0):
        slack_s = lengthen_by_busy_communicator(ops, queue, (alone, exposed, hidden), sent)
    slowed = sum(exposed.values(), 0.0) - alone_s
    if clocks is None:
        if device_s is None:
            device_s = alone_s - exposed["host_idle"] + kernel_load_idle_s(tape, seconds) + slowed
        clocks = device_s - slowed, device_s - slowed + issue_delay_s, NO_WAIT, issued
    more_s = {name: alone[name] - rested[name] for name in sent}
    _name_waits_for_host(exposed, hidden, more_s, {name: sent[name][0] - alone[name] for name in sent})
    _name_waits_for_slowest_gpu(exposed, ops, seconds, stragglers)
    weights = sum([took for op, took in zip(tape.ops, seconds, strict=True) if op.role in WEIGHT_ROLES], 0.0)
    busy = sum([took for op, took in zip(ops, seconds, strict=True) if op.stream == "compute"], 0.0)
    kernels: FloatK = sum([where(op.present, num_queued_kernels(op), 0.0) for op in ops], 0.0)
    slowed_clocks = *(part + slowed for part in clocks[:3]), clocks[3], kernels
    aside = sum([family.aside_s for family in sent.values()], 0.0)
    lost_aside = sum([family.slowdown * family.aside_s for family in sent.values()], 0.0)
    of_experts = [n for n, op in enumerate(ops) if op.part == "experts" and op.role in WEIGHT_ROLES]
    first = of_experts[-1] + 1 if of_experts else 0
    behind = sum([took for op, took in zip(ops[first:], seconds[first:], strict=True) if op.stream == "compute"], 0.0)
    others = issued, weights, busy, slack_s, aside, lost_aside, behind
    of_parts = stack_rows([*exposed.values(), *hidden.values(), *slowed_clocks, *others], machine.num_k)
    first, second = len(EXPOSED), len(EXPOSED) + len(HIDDEN)
    return TapeTime(of_parts[:first], of_parts[first:second], of_parts[-7], of_parts[second:-7], *of_parts[-6:])


class _Clocks(Protocol):
    """What a tape is passed on; the clocks are those of :class:`mofa.cost.block.streams.TapeStreamClocks`."""

    @property
    def host(self) -> FloatK: ...
    @property
    def compute(self) -> FloatK: ...
    @property
    def issue_delay_s(self) -> FloatK: ...
    @property
    def regained(self) -> dict[str, FloatK]: ...
    def with_host_ahead(self, ahead_s: float) -> _Clocks: ...
    def play_tape(self) -> dict[str, FloatK]: ...


@dataclass(frozen=True)
class _StepClocks:
    """Those on which a tape is passed here."""

    tape: _Steps
    machine: OpTimingMachine
    streams: TapeStreamClocks

    @property
    def host(self) -> FloatK:
        return self.streams.host

    @property
    def compute(self) -> FloatK:
        return self.streams.compute

    @property
    def issue_delay_s(self) -> FloatK:
        return self.streams.issue_delay_s

    @property
    def regained(self) -> dict[str, FloatK]:
        return self.streams.regained

    def with_host_ahead(self, ahead_s: float) -> _StepClocks:
        return replace(self, streams=self.streams.with_host_ahead(ahead_s))

    def play_tape(self) -> dict[str, FloatK]:
        return _pass(self.tape, self.streams, self.machine)


def _clocks(
    ops: tuple[Op, ...], seconds: list[FloatK], issue: list[FloatK], machine: OpTimingMachine, slowdown: FloatK
) -> Callable[[float], _Clocks]:
    """Gives the clocks to pass a tape, by the host's clock at its beginning; of several candidates compiled ones."""
    if 1 < machine.num_k <= MANY and (compiled := c_library()) is not None:
        tape = CompiledTape(ops, seconds, issue, machine, EXPOSED, _watched(ops), _communicates(ops), slowdown)
        if tape.most <= MOST:
            return lambda host_s: CompiledStreamClocks(compiled, tape, host_s, is_ahead=host_s is HOST_AHEAD)
    steps = _Steps.of(ops, seconds, issue, slowdown)
    return lambda host_s: _StepClocks(steps, machine, TapeStreamClocks(host_s))


def _name_waits_for_host(
    exposed: dict[str, FloatK], hidden: dict[str, FloatK], more_s: Mapping[str, FloatK], beside_s: Mapping[str, FloatK]
) -> None:
    """Call a family's what computing would wait for it under a host far ahead, and host idle all that is left, as the
    replay does.

    Both are changed in place, and the sum of what is exposed stays. (K,) each [s]

    Parameters
    ----------
    more_s
        By family, what is waited for its collectives more than under such a host; less where below 0.
    beside_s
        By family, what its collectives take beyond what is waited for them.
    """
    for family, late_s in more_s.items():
        moved_s = maximum(minimum(late_s, exposed[family]), -exposed["host_idle"])
        exposed[family] = exposed[family] - moved_s
        exposed["host_idle"] = exposed["host_idle"] + moved_s
        before_s = beside_s[family]
        hidden[family] = maximum(hidden[family] + maximum(before_s + moved_s, 0.0) - maximum(before_s, 0.0), 0.0)


def _name_waits_for_slowest_gpu(
    exposed: dict[str, FloatK], ops: tuple[Op, ...], seconds: list[FloatK], stragglers: StragglerFractions
) -> None:
    """Call what a typical GPU does not compute, but waits for the slowest, stragglers. Changed in place. (K,) [s]"""
    for op, took in zip(ops, seconds, strict=True):
        fraction = stragglers.of_op(op)
        if type(fraction) is float and fraction == 0.0:
            continue
        waited_s = took * fraction
        exposed[op.family] = exposed[op.family] - waited_s
        exposed["stragglers"] = exposed["stragglers"] + waited_s


def _carries(ops: tuple[Op, ...]) -> bool:
    """Whether a repetition depends on the one before: a tensor is read before it is written."""
    ahead = {name for op in ops for name in op.writes}
    for op in ops:  # of all that is written, what is not there yet
        if not ahead.isdisjoint(op.reads):
            return True
        ahead.difference_update(op.writes)
    return False


def _watched(ops: tuple[Op, ...]) -> set[str]:
    """Tensors of which other streams ask when they are there."""
    watched = {r for op in ops if op.stream != "compute" for r in op.reads}
    for op in reversed(ops) if watched else ():  # what passes through is ready when its source is
        if op.stream == "compute" and not watched.isdisjoint(op.writes) and _may_pass(op):
            watched.add(op.reads[0])
    return watched


def _communicates(ops: tuple[Op, ...]) -> bool:
    """Whether any op is on another stream."""
    return any(op.stream != "compute" and type(op.work) is not HostSync for op in ops)


def _may_pass(op: Op) -> bool:
    """Whether the op's output may be its input as it is: a view, or an op that some candidates don't have."""
    return bool(op.reads) and (op.work is None or op.present is not True)


def _runs(op: Op) -> BoolK:
    """Where an op is more than a name for its input."""
    return op.present if op.work is not None else False


class _Step(NamedTuple):
    """An op of a tape, with what is the same whenever the tape is passed. (K,) or of all [s]

    ``runs`` says where it takes time, ``issued_s`` is what has been issued with it and since the tape began, and
    ``loss_s`` what computing would lose by communication beside it.
    """

    op: Op
    took: FloatK
    issue: FloatK
    runs: BoolK
    issued_s: FloatK
    loss_s: FloatK
    may_pass: bool
    is_watched: bool


class _Steps(NamedTuple):
    """A tape's ops, the tensors of which other streams ask, and whether any op is on another stream."""

    steps: list[_Step]
    watched: set[str]
    communicates: bool

    @classmethod
    def of(cls, ops: tuple[Op, ...], seconds: list[FloatK], issue: list[FloatK], slowdown: FloatK) -> _Steps:
        """Of ops with their device and host seconds, and what computing loses beside what other streams do. [-]"""
        watched = _watched(ops)
        communicates = _communicates(ops)
        issued_s: FloatK = 0.0
        steps = []
        for op, took, issued in zip(ops, seconds, issue, strict=True):
            runs: BoolK = took > 0.0
            if isinstance(runs, np.ndarray) and (runs.all() or not runs.any()):
                runs = bool(runs[0])
            if type(op.work) is not HostSync:
                issued_s = issued_s + issued
            loss_s = slowdown * took if communicates else 0.0
            is_watched = bool(watched) and not watched.isdisjoint(op.writes)
            steps.append(_Step(op, took, issued, runs, issued_s, loss_s, _may_pass(op), is_watched))
        return cls(steps, watched, communicates)


def _pass(tape: _Steps, state: TapeStreamClocks, machine: OpTimingMachine) -> dict[str, FloatK]:
    """Play a tape once; what the compute stream did and waited for, by :data:`EXPOSED`. (K,) each [s]

    A host that began at :data:`HOST_AHEAD` stays there: nobody waits for it, and it waits for nothing.
    """
    exposed: dict[str, FloatK] = dict.fromkeys(EXPOSED, 0.0)
    state.regained, state.issue_delay_s = {}, 0.0
    begun, is_ahead, ready = state.compute, state.host is HOST_AHEAD, state.ready
    for op, took, issue, runs, issued_s, loss_s, may_pass, is_watched in tape.steps:
        if type(op.work) is HostSync:
            if is_ahead:
                continue
            sync_s = machine.cluster.sync_s + op.work.host_s
            state.host = where(op.present, maximum(state.host, _awaited(op, state)) + sync_s, state.host)
            continue
        if not is_ahead:
            state.host = state.host + issue
        if op.stream != "compute":
            state.play_side_stream_op(op, took, machine)
            continue
        waits = ready and not ready.keys().isdisjoint(op.reads)
        if waits:
            _wait(op, state, exposed)
        if runs is not False:  # a view takes nothing and awaits nobody
            start = state.compute
            if not is_ahead:
                idle = where(runs, maximum(state.host - start, 0.0), 0.0)
                exposed["host_idle"] = exposed["host_idle"] + idle
                start = start + idle
            state.issue_delay_s = where(
                runs, maximum(state.issue_delay_s, issued_s - (start - begun)), state.issue_delay_s
            )
            state.compute = start + took
            if tape.communicates:
                state.loss = state.loss + loss_s
            exposed[op.family] = exposed[op.family] + took
        if waits and may_pass:  # what it passes on from another stream is awaited by whoever reads it
            state.pass_on_ready_time(op, _runs(op))
        if is_watched:
            _record(op, tape.watched, state)
    return exposed


def _awaited(op: Op, state: TapeStreamClocks) -> FloatK:
    """Until when a host synchronisation waits: for all that is queued, or for what it reads of other streams. [s]"""
    until: FloatK = state.compute if not op.reads else -np.inf
    for name in op.reads:
        for ready_s in state.ready.get(name, NOTHING).values():
            until = maximum(until, ready_s)
    return until


def _wait(op: Op, state: TapeStreamClocks, exposed: dict[str, FloatK]) -> None:
    """An op of the compute stream waits for what other streams make of its inputs, unless it passes it on as it is."""
    runs = _runs(op) if _may_pass(op) else True
    for name in op.reads:
        ready = state.ready.get(name, NOTHING)  # of a repetition before the first there is nothing
        for family, ready_s in ready.items():
            if family:  # else computed on the stream itself
                wait_s = where(runs, maximum(ready_s - state.compute, 0.0), 0.0)
                exposed[family] = exposed[family] + wait_s
                state.wait_for_tensor(name, family, wait_s)


def _record(op: Op, watched: set[str], state: TapeStreamClocks) -> None:
    """An op of the compute stream says when what other streams ask for is there."""
    ready = state.ready
    made: Ready = {"": state.compute}
    if _may_pass(op) and op.reads[0] in ready:
        made = output_ready_times(_runs(op), made, ready[op.reads[0]])
    for name in op.writes:
        if name in watched:
            ready[name] = made
