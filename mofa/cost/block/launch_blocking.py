"""Launches that the host waits for, one by one: ``CUDA_LAUNCH_BLOCKING=1`` (CUDA C programming guide, environment).

Nothing runs beside anything then: what was on another stream is done before the host goes on, and the device waits
while the host issues the next kernel. Of a tape only its time changes; what it allocates, and for which stream, stays.
"""

from __future__ import annotations

from dataclasses import replace

from mofa.blocks.elementwise import FloatK, any_true
from mofa.blocks.op import Op, Tape
from mofa.blocks.work import HostSync
from mofa.cost.block.durations import OpTimingMachine


def moved_to_computing_stream(op: Op) -> Op:
    """An op as one of the computing stream, as nothing is launched before it has ended."""
    return op if op.stream == "compute" else op._replace(stream="compute")


def waits_after_kernels(op: Op, machine: OpTimingMachine) -> HostSync | None:
    """What the host does behind an op: a wait for each kernel that it launches; None where it launches none.

    Each costs ``sync_s``, measured as a synchronisation behind a kernel; that of the last is every wait's own.
    """
    if op.work is None or isinstance(op.work, HostSync) or not any_true(op.launches):
        return None
    before: FloatK = (op.launches - 1.0) * machine.cluster.sync_s
    return HostSync(before)


def with_launch_blocking(
    tape: Tape, seconds: list[FloatK], issue: list[FloatK], machine: OpTimingMachine
) -> tuple[Tape, list[FloatK], list[FloatK]]:  # fmt: skip
    """A tape on one stream in which the host waits behind every op that launches something, and its ops' seconds."""
    ops: list[Op] = []
    took: list[FloatK] = []
    issued: list[FloatK] = []
    for op, device_s, host_s in zip(tape.ops, seconds, issue, strict=True):
        ops.append(moved_to_computing_stream(op))
        took.append(device_s)
        issued.append(host_s)
        if (wait := waits_after_kernels(op, machine)) is not None:
            ops.append(Op(f"{op.name}.blocks", "host", wait, launches=0, present=op.present))
            took.append(0.0)
            issued.append(0.0)
    return replace(tape, ops=tuple(ops)), took, issued
