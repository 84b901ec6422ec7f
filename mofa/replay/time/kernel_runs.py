"""A tape of one strategy as a scalar clock reads it: runs of kernels, what other streams do, where the host waits.

The same ops, seconds and issue times as :mod:`mofa.cost.block.tape_clock` has them (:mod:`mofa.cost.block.durations`),
op by op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mofa.blocks.elementwise import FloatK, any_true
from mofa.blocks.op import COMM_FAMILIES, Op, Tape
from mofa.blocks.work import Collective, HostSync, Work
from mofa.cost.block.communication_beside import computing_slowdown, is_neighbouring_tapes_collective
from mofa.cost.block.durations import OpTimingMachine, device_seconds_and_stragglers
from mofa.cost.block.host_issue import issue_seconds_array
from mofa.cost.block.launch_blocking import moved_to_computing_stream, waits_after_kernels
from mofa.cost.block.sequential_experts import issue_seconds_around_loops
from mofa.cost.block.streams import OWN_ORDER
from mofa.cost.block.tape_clock import EXPOSED
from mofa.cost.kernels.launch_queue import num_queued_kernels
from mofa.cost.kernels.lazy_loading import tape_with_kernel_loads

FAMILY = {name: i for i, name in enumerate(EXPOSED)}
STRAGGLERS = FAMILY["stragglers"]
NOW = "@now"
"""Read by an op of another stream that starts when the computing one gets there."""


class KernelInRun(NamedTuple):
    """An op on the computing stream: device and issue seconds. [s]"""

    name: str
    seconds: float
    issue: float
    family: int
    launches: float = 1.0
    is_in_loop: bool = False
    """Whether it is of a loop over experts, in which the kernels of all ops take turns."""
    issue_behind: float = 0.0
    """Behind the last op of such a loop the issue of all that the device need not wait for. [s]"""
    works: tuple[Work, ...] = ()
    """What it computes."""
    waited_s: float = 0.0
    """Of ``seconds`` what a typical GPU waits for the slowest. [s]"""


class KernelRun(NamedTuple):
    """Kernels one after the other. ``waits`` are tensors of other streams, ``records`` what other streams await.

    ``lead`` is the most by which issuing is behind computing anywhere in the run: a host that is as far ahead at its
    beginning never makes the device wait. [s]
    """

    kernels: tuple[KernelInRun, ...]
    waits: tuple[str, ...]
    records: tuple[str, ...]
    busy: float
    issue: float
    lead: float
    parts: tuple[tuple[int, float], ...]
    launches: float = 0.0


class SideStreamOp(NamedTuple):
    """An op on another stream; it starts after what it reads, and what it writes is there at its end. [s]"""

    name: str
    seconds: float
    issue: float
    family: int
    stream: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    computing_slowdown: float
    """What computing loses meanwhile: the measured share beside a collective, all beside a memory-bound kernel. [-]"""
    communicator: str = ""
    """What it queues on besides its stream."""
    launches: float = 1.0
    works: tuple[Work, ...] = ()
    """What it sends, or computes."""


class HostSyncStep(NamedTuple):
    """The host waits for the device, or for ``reads`` of other streams alone, and then computes for ``host_s``. [s]"""

    name: str
    host_s: float
    reads: tuple[str, ...] = ()


class TensorAlias(NamedTuple):
    """A tensor that is there when another is."""

    name: str
    source: str


Step = KernelRun | SideStreamOp | HostSyncStep | TensorAlias


@dataclass(frozen=True)
class TapeSteps:
    """A tape's steps. ``input_tensor`` and ``output_tensor`` name what it takes from the tape before it and hands on,
    empty for nothing.

    ``horizon_s`` is the time after which nothing from before the tape can matter but what is still under way. [s]
    """

    name: str
    steps: tuple[Step, ...]
    input_tensor: str
    output_tensor: str
    horizon_s: float
    launches: float = 0.0


class _Line(NamedTuple):
    """An op of one strategy with its names resolved: what is not present or a view has become its source."""

    op: Op | None
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    seconds: float
    issue: float
    launches: float = 0.0
    extra: Step | None = None
    slows: float = 0.0
    communicator: str = ""
    blocks: HostSyncStep | None = None
    """The host's wait behind it, where launches block."""
    is_in_loop: bool = False
    issue_behind: float = 0.0
    waited_s: float = 0.0
    """Of ``seconds`` what a typical GPU waits for the slowest. [s]"""


@dataclass(frozen=True)
class ResolvedTape:
    """A tape of one strategy before its steps are joined to runs."""

    name: str
    lines: tuple[_Line, ...]
    input_tensor: str
    output_tensor: str


def only_entry(value: object) -> float:
    """The entry of an array of one combination."""
    if type(value) is float or type(value) is bool:
        return float(value)
    return float(np.asarray(value, dtype=float).reshape(-1)[0])


def resolve_tape(name: str, tape: Tape, machine: OpTimingMachine) -> ResolvedTape:
    """Times and order of the ops of a tape that one strategy has; absent ops and views are what they hand on."""
    root: dict[str, str] = {}

    def of(tensor: str) -> str:
        return root.get(tensor, tensor)

    blocks = machine.framework.launch_blocking
    seconds, stragglers = device_seconds_and_stragglers(tape.ops, machine)
    issue: list[FloatK] = issue_seconds_array(tape.ops, machine)[:, 0].tolist() if tape.ops else []
    load_s = machine.cluster.slowest_host_factor * machine.cluster.gpu.curves.host.kernel_load_s.value
    tape, seconds, issue = tape_with_kernel_loads(tape, seconds, issue, load_s, machine.host_lead_lost)
    issue, behind_loops = issue_seconds_around_loops(tape.ops, seconds, issue)
    lines: list[_Line] = []
    for n, (op, device_s, host_s) in enumerate(
        zip(tape.ops, map(only_entry, seconds), map(only_entry, issue), strict=True)
    ):
        op = moved_to_computing_stream(op) if blocks else op
        if not only_entry(op.present):
            shared = op.writes[:1] if op.reads else ()
            lines.append(_Line(None, (), (), 0.0, 0.0))
        elif is_neighbouring_tapes_collective(op):  # played with that one
            shared = ()
            lines.append(_Line(None, (), (), 0.0, 0.0))
        elif op.work is None and op.stream == "compute":
            shared = op.writes if op.reads else ()
            lines.append(_Line(None, (), (), 0.0, host_s))
        else:
            shared = ()
            communicator, slows = "", only_entry(computing_slowdown(op, machine))
            if isinstance(op.work, Collective):
                communicator = "world" if any_true(machine.uses_world_communicator(op.work.group)) else op.work.group
            wait = waits_after_kernels(op, machine) if blocks else None
            behind = None if wait is None else HostSyncStep(f"{op.name}.blocks", only_entry(wait.host_s))
            lines.append(
                _Line(
                    op, tuple(map(of, op.reads)), op.writes, device_s, host_s, only_entry(num_queued_kernels(op)), None,
                    slows, communicator, behind, only_entry(op.expert_loops) > 1.0,
                    only_entry(behind_loops.get(n, 0.0)), device_s * only_entry(stragglers.of_op(op)),
                )
            )  # fmt: skip
        for tensor in shared:
            root[tensor] = of(op.reads[0])
            lines[-1] = lines[-1]._replace(extra=TensorAlias(tensor, of(op.reads[0])))
    given = tape.inputs[0] if tape.inputs else ""
    out = of(tape.outputs[0]) if tape.outputs else ""
    return ResolvedTape(name, tuple(lines), given, out)


@dataclass(frozen=True)
class CrossStreamTensors:
    """Which tensors cross streams: those that other streams make, and those of the computing one that they await."""

    made_by_side_streams: frozenset[str]
    awaited_by_side_streams: frozenset[str]

    @classmethod
    def from_tapes(cls, drafts: Iterable[ResolvedTape]) -> CrossStreamTensors:
        """Over all tapes of a plan, as what one leaves under way another awaits."""
        beside: set[str] = set()
        awaited: set[str] = set()
        drafts = tuple(drafts)
        for part in drafts:
            for line in part.lines:
                if line.op is not None and line.op.stream != "compute" and not isinstance(line.op.work, HostSync):
                    beside.update(line.writes)
                    awaited.update(line.reads)
        if any(part.output_tensor in beside for part in drafts):
            beside.update(part.input_tensor for part in drafts)
        return cls(frozenset(beside), frozenset(awaited - beside))


def join_kernels_to_steps(
    part: ResolvedTape, crossing: CrossStreamTensors, inserted: Mapping[int, Sequence[Step]] | None = None
) -> TapeSteps:
    """Join a draft's lines to steps; ``inserted`` are steps that follow a line, by its index, or -1 the beginning."""
    inserted = inserted or {}
    steps: list[Step] = list(inserted.get(-1, ()))
    run: list[KernelInRun] = []
    waits: list[str] = []
    seen: set[str] = set()
    host_only = 0.0

    def flush(records: tuple[str, ...] = ()) -> None:
        nonlocal host_only
        if host_only:  # what launches nothing takes the host its time all the same
            run.append(KernelInRun("host", 0.0, host_only, FAMILY["host_idle"], 0.0))
            host_only = 0.0
        if run or waits:
            steps.append(_run(tuple(run), tuple(waits), records))
        run.clear()
        waits.clear()

    for i, line in enumerate(part.lines):
        op = line.op
        if op is None:
            host_only += line.issue
            if line.extra is not None and isinstance(line.extra, TensorAlias):
                source = line.extra.source
                if source in crossing.made_by_side_streams or source in crossing.awaited_by_side_streams:
                    flush()
                    steps.append(line.extra)
        elif isinstance(op.work, HostSync):
            flush()
            steps.append(HostSyncStep(op.name, only_entry(op.work.host_s), line.reads))
        elif op.stream != "compute":
            flush()
            family = FAMILY[op.family]
            reads = line.reads if op.stream in OWN_ORDER else (*line.reads, NOW)
            steps.append(
                SideStreamOp(op.name, line.seconds, line.issue, family, op.stream, reads, line.writes, line.slows,
                       line.communicator, line.launches, () if op.work is None else (op.work,))
            )  # fmt: skip
            seen.difference_update(line.writes)
        else:
            fresh = [name for name in line.reads if name in crossing.made_by_side_streams and name not in seen]
            if fresh:
                flush()
                waits.extend(fresh)
                seen.update(fresh)
            issue_s = line.issue + host_only
            run.append(
                KernelInRun(
                    op.name,
                    line.seconds,
                    issue_s,
                    FAMILY[op.family],
                    line.launches,
                    line.is_in_loop,
                    line.issue_behind,
                    () if op.work is None else (op.work,),
                    line.waited_s,
                )
            )
            host_only = 0.0
            made = tuple(
                name
                for name in line.writes
                if name in crossing.awaited_by_side_streams or name in crossing.made_by_side_streams
            )
            if made:
                flush(made)
            if line.blocks is not None:
                flush()
                steps.append(line.blocks)
        if i in inserted:
            flush()
            steps += inserted[i]
    flush()
    longest = sum(map(_most, steps))
    launches = sum([step.launches for step in steps if isinstance(step, KernelRun | SideStreamOp)])
    return TapeSteps(part.name, tuple(steps), part.input_tensor, part.output_tensor, longest, launches)


def _most(step: Step) -> float:
    """The longest that a step can take. [s]"""
    if isinstance(step, KernelRun):
        return step.issue + step.busy
    if isinstance(step, SideStreamOp):
        return step.issue + step.seconds
    return step.host_s if isinstance(step, HostSyncStep) else 0.0


def waiting_step(names: tuple[str, ...]) -> KernelRun:
    """A step that waits for tensors of other streams and computes nothing."""
    return KernelRun((), names, (), 0.0, 0.0, -np.inf, ())


def one_kernel_step(name: str, seconds: float, issue_s: float, family: str, waits: tuple[str, ...]) -> KernelRun:
    """A step of one kernel on the computing stream, behind tensors of other streams."""
    return _run((KernelInRun(name, seconds, issue_s, FAMILY[family]),), waits, ())


def is_communication_family(family: int) -> bool:
    """Whether a family's time beside computing is reported as hidden."""
    return EXPOSED[family] in COMM_FAMILIES


def _run(kernels: tuple[KernelInRun, ...], waits: tuple[str, ...], records: tuple[str, ...]) -> KernelRun:
    busy = issued = launches = 0.0
    lead = -np.inf
    parts: dict[int, float] = {}
    for kernel in kernels:
        issued += kernel.issue
        if kernel.seconds > 0:
            lead = max(lead, issued - busy)
        issued += kernel.issue_behind
        busy += kernel.seconds
        launches += kernel.launches
        parts[kernel.family] = parts.get(kernel.family, 0.0) + kernel.seconds - kernel.waited_s
        if kernel.waited_s:
            parts[STRAGGLERS] = parts.get(STRAGGLERS, 0.0) + kernel.waited_s
    return KernelRun(kernels, waits, records, busy, issued, float(lead), tuple(parts.items()), launches)
