"""Time of a tape: a host clock beside one clock per stream, over all K candidates at once.

An op starts when its stream is free, the host has issued it and its inputs are there. The host runs ahead of the
device; its lead carries over ops and is lost at every host synchronisation. Between two waits the compute stream is
evaluated in one go: op i ends at ``max(clock, max_j<=i (issued_j - busy_before_j)) + busy_to_i``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.op import Collective, HostSync, Op, Stream, Tape
from mofa.cost.durations import Machine, issue_seconds, op_seconds

ArrayK = NDArray[np.float64]

EXPOSED = (
    "gemm", "grouped_gemm", "attention", "memory_bound", "recompute", "host_idle", "tp", "cp", "ep", "pp", "dp",
    "optimizer",
)  # fmt: skip
HIDDEN = ("tp", "cp", "ep", "pp", "dp")
OWN_ORDER = ("fsdp_gather",)
"""Streams whose collectives wait for nothing but their inputs; any other waits for all that was launched before it on
the stream that launches it (PyTorch 2.11, ProcessGroupNCCL.cpp, ``syncStream``)."""
_E = {name: i for i, name in enumerate(EXPOSED)}
_H = {name: i for i, name in enumerate(HIDDEN)}


@dataclass(frozen=True)
class PhaseTime:
    """Time of one tape in its steady state.

    ``exposed`` (len(EXPOSED), K) sums to the time on the compute stream; ``hidden`` (len(HIDDEN), K) is communication
    that ran beside it; ``issue`` (K,) is what the host spent issuing. [s]
    """

    exposed: ArrayK
    hidden: ArrayK
    issue: ArrayK

    @property
    def total(self) -> ArrayK:
        return np.asarray(self.exposed.sum(axis=0))


_Ready = tuple[tuple[ArrayK, str], ...]
"""When a tensor is there, by the family that makes it: several where an absent op of one hands on what another's made;
"" is the compute stream itself."""


def _through(present: object, made: _Ready, handed_on: _Ready) -> _Ready:
    """What an op makes where it is present, and what it hands on where it is not."""
    here = np.asarray(present, dtype=bool)
    families = dict.fromkeys(family for _, family in (*made, *handed_on))
    return tuple(
        (
            np.maximum(
                np.where(here, _latest(made, family), -np.inf), np.where(here, -np.inf, _latest(handed_on, family))
            ),
            family,
        )
        for family in families
    )


def _latest(ready: _Ready, family: str | None = None) -> ArrayK | float:
    """When the last of its parts is there, of one family or of all."""
    parts = [at for at, of in ready if family is None or of == family]
    return np.maximum.reduce(parts) if parts else -np.inf


@dataclass
class _State:
    host: ArrayK
    compute: ArrayK
    streams: dict[str, ArrayK] = field(default_factory=dict)
    communicators: dict[str, ArrayK] = field(default_factory=dict)
    ready: dict[str, _Ready] = field(default_factory=dict)


def scan(tape: Tape, machine: Machine, repeat: int = 2) -> PhaseTime:
    """Time of one repetition of a tape that is repeated back to back; ``repeat`` 1 starts from rest. [s]"""
    num_k = machine.num_k
    if not tape.ops:
        return PhaseTime(np.zeros((len(EXPOSED), num_k)), np.zeros((len(HIDDEN), num_k)), np.zeros(num_k))
    seconds = op_seconds(tape.ops, machine)
    issue = issue_seconds(tape.ops, machine)
    plan = _plan(tape)
    if repeat > 1 and not _carries(tape):
        # nothing but the host's lead goes from one repetition to the next: let it run ahead, then see who is slower
        state = _State(np.full(num_k, -1e9), np.zeros(num_k))
        exposed = _pass(tape, plan, seconds, issue, state, machine)
        exposed[_E["host_idle"]] += np.maximum(issue.sum(axis=0) - exposed.sum(axis=0), 0.0)
    else:
        state = _State(np.zeros(num_k), np.zeros(num_k))
        for _ in range(repeat):
            exposed = _pass(tape, plan, seconds, issue, state, machine)
    busy = np.zeros((len(HIDDEN), num_k))
    for i, op in enumerate(tape.ops):
        if op.family in _H:
            busy[_H[op.family]] += seconds[i]
    rows = [_E[name] for name in HIDDEN]
    hidden = busy - exposed[rows]
    hidden = np.where(hidden > 1e-9 * busy, hidden, 0.0)  # rounding is no overlap
    exposed[rows] += _slowdown(tape, seconds, machine) * hidden
    return PhaseTime(exposed, hidden, issue.sum(axis=0))


def _slowdown(tape: Tape, seconds: ArrayK, machine: Machine) -> ArrayK:
    """What computing loses per second that each family runs beside it. (len(HIDDEN), K) [-]

    A collective takes a few multiprocessors and some bandwidth: the measured share. A memory-bound kernel on another
    stream takes all of both: what it does, computing does not.
    """
    share = machine.cluster.gpu.curves.overlap_slowdown.value
    copies, beside = np.zeros((len(HIDDEN), machine.num_k)), np.zeros((len(HIDDEN), machine.num_k))
    for i, op in enumerate(tape.ops):
        if op.family in _H and op.stream != "compute":
            beside[_H[op.family]] += seconds[i]
            if isinstance(op.work, Stream):
                copies[_H[op.family]] += seconds[i]
    return np.asarray(share + (1.0 - share) * copies / np.maximum(beside, 1e-12))


def _carries(tape: Tape) -> bool:
    """Whether a repetition depends on the one before: by a host synchronisation, or a tensor read before it is
    written."""
    written: set[str] = set()
    later = {w for op in tape.ops for w in op.writes}
    for op in tape.ops:
        if isinstance(op.work, HostSync) or any(r in later and r not in written for r in op.reads):
            return True
        written.update(op.writes)
    return False


@dataclass(frozen=True)
class _Step:
    """What happens at one op: ``wait`` names tensors of other streams, ``record`` those that another stream awaits;
    ``flush`` ends a run of compute ops."""

    index: int
    kind: str
    wait: tuple[str, ...]
    flush: bool
    record: tuple[str, ...] = ()
    passes: bool = False
    """Whether the op passes its first input on as it is, for some candidates at least."""


def _plan(tape: Tape) -> tuple[_Step, ...]:
    """Which ops wait for another stream, and where a run of compute ops must be evaluated."""
    stream_of = {w: op.stream for op in tape.ops for w in op.writes}
    watched = {r for op in tape.ops if op.stream != "compute" for r in op.reads if stream_of.get(r) == "compute"}
    for op in reversed(tape.ops):  # what passes through a view or an absent op is ready when its source is
        if op.stream == "compute" and watched.intersection(op.writes) and _may_pass(op):
            watched.add(op.reads[0])
    # what such an op passes on from another stream is awaited by whoever reads it, not by the op
    passed: set[str] = set()
    steps = []
    for i, op in enumerate(tape.ops):
        if isinstance(op.work, HostSync):
            steps.append(_Step(i, "sync", (), True))
        elif op.stream != "compute":
            # same-stream inputs too: where their producer is absent they are ready when its input is
            steps.append(_Step(i, "async", tuple(r for r in op.reads if r in stream_of), True))
        else:
            waits = tuple(r for r in op.reads if r in passed or (r in stream_of and stream_of[r] != "compute"))
            passes = bool(waits) and _may_pass(op)
            if passes:
                passed.update(op.writes)
            record = tuple(w for w in op.writes if w in watched)
            steps.append(_Step(i, "compute", waits, bool(waits), record, passes))
    return tuple(steps)


def _may_pass(op: Op) -> bool:
    """Whether the op's output may be its input as it is: a view, or an op that some candidates don't have."""
    return bool(op.reads) and (op.work is None or op.present is not True)


def _communicator_free(state: _State, group: str, machine: Machine) -> ArrayK:
    """When the communicator of a group has done what was issued to it: NCCL runs one operation after the other."""
    own, world = (state.communicators.get(name, np.zeros(machine.num_k)) for name in (group, "world"))
    return np.where(machine.shares_world(group), world, own)


def _occupy(state: _State, group: str, until: ArrayK, machine: Machine) -> None:
    whole = machine.shares_world(group)
    for name, here in ((group, ~whole), ("world", whole)):
        if np.any(here):
            before = state.communicators.get(name, np.zeros(machine.num_k))
            state.communicators[name] = np.where(here, np.maximum(until, before), before)


def _pass(
    tape: Tape, plan: tuple[_Step, ...], seconds: ArrayK, issue: ArrayK, state: _State, machine: Machine
) -> ArrayK:
    num_k = machine.num_k
    exposed = np.zeros((len(EXPOSED), num_k))
    sync_s = machine.cluster.gpu.curves.host.sync_s.value
    run: list[_Step] = []

    def flush() -> None:
        if not run:
            return
        rows = [step.index for step in run]
        d = seconds[rows]
        busy = np.cumsum(d, axis=0)
        issued = state.host + np.cumsum(issue[rows], axis=0)
        lag = np.where(d > 0, issued - busy + d, 0.0)
        if any(step.record for step in run):
            ends = np.maximum(state.compute, np.maximum.accumulate(lag, axis=0)) + busy
            for row, step in enumerate(run):
                op = tape.ops[step.index]
                made: _Ready = ((ends[row], ""),)
                if step.record and _may_pass(op) and op.reads[0] in state.ready:
                    made = _through(op.present if op.work is not None else False, made, state.ready[op.reads[0]])
                for name in step.record:
                    state.ready[name] = made
            end = ends[-1]
        else:
            end = np.maximum(state.compute, lag.max(axis=0)) + busy[-1]
        idle = end - state.compute - busy[-1]
        exposed[_E["host_idle"]] += np.where(idle > 1e-12, idle, 0.0)
        state.compute = end
        state.host = issued[-1]
        run.clear()

    def wait(step: _Step, op: Op) -> None:
        for name in step.wait:
            if name not in state.ready:
                continue  # of a repetition before the first
            for at, family in state.ready[name]:
                if not family:
                    continue  # computed on the stream itself
                late = np.maximum(at - state.compute, 0.0)
                if step.passes:
                    late = np.where(op.present, late, 0.0) if op.work is not None else np.zeros(num_k)
                exposed[_E[family]] += late
                state.compute = state.compute + late

    for step in plan:
        op = tape.ops[step.index]
        if step.flush:
            flush()
        if step.kind == "compute":
            wait(step, op)
            run.append(step)
            if step.passes:
                source = state.ready.get(op.reads[0], ())
                for name in op.writes:
                    state.ready[name] = _through(op.present if op.work is not None else False, (), source)
        elif step.kind == "sync":
            state.host = np.where(op.present, np.maximum(state.host, state.compute) + sync_s, state.host)
        else:
            state.host = state.host + issue[step.index]
            start = np.maximum(state.host, state.streams.get(op.stream, np.zeros(num_k)))
            if isinstance(op.work, Collective):
                start = np.maximum(start, _communicator_free(state, op.work.group, machine))
            inputs = np.zeros(num_k) if op.stream in OWN_ORDER else state.compute
            for name in step.wait:
                if name in state.ready:
                    inputs = np.maximum(inputs, _latest(state.ready[name]))
            end = np.maximum(start, inputs) + seconds[step.index]
            busy_until = np.where(op.present, end, 0.0)
            state.streams[op.stream] = np.maximum(busy_until, state.streams.get(op.stream, np.zeros(num_k)))
            if isinstance(op.work, Collective):
                _occupy(state, op.work.group, busy_until, machine)
            made: _Ready = ((end, op.family),)
            if op.present is not True and op.reads:  # where it does not run, its output is ready when its input is
                made = _through(op.present, made, state.ready.get(op.reads[0], ()))
            for name in op.writes:
                state.ready[name] = made
    flush()
    for i, op in enumerate(tape.ops):
        if op.stream == "compute" and not isinstance(op.work, HostSync) and op.work is not None:
            exposed[_E[op.family]] += seconds[i]
    return exposed
