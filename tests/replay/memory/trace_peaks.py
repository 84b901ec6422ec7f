"""What an allocation trace holds at most, by adding up: the oracle of what the replay plays."""

from __future__ import annotations

from mofa.cost.allocations.block_trace import BlockTrace, OpTrace


def _of_op(op_trace: OpTrace) -> int:
    """The most that an op's outputs and temporaries hold together, its inputs staying to its end."""
    new, scratch = {item.name: item.bytes for item in op_trace.new}, [item.bytes for item in op_trace.scratch]
    if not op_trace.order:
        return sum(new.values()) + sum(scratch)
    now = most = 0
    for step in op_trace.order:
        if isinstance(step, str):
            now += new.pop(step, 0)
        else:
            now += scratch[step] if step >= 0 else -scratch[~step]
        most = max(most, now)
    return max(most, now + sum(new.values()))


def most_alive(one: BlockTrace, x: int) -> tuple[int, int, int]:
    """Most alive in the forward and in the backward, and what stays in between but the output; every byte as it is."""
    alive: dict[str, int] = {}

    def run(op_traces: tuple[OpTrace, ...]) -> int:
        most, held = 0, []
        for op_trace in op_traces:
            most = max(most, sum(alive.values()) + _of_op(op_trace))
            alive.update({item.name: item.bytes for item in op_trace.new})
            for name in op_trace.free:
                alive.pop(name, None)
            held += op_trace.hold  # by the next block, if any
        for name in held:
            alive.pop(name, None)
        return most

    alive["x"] = x
    forward = run(one.forward)
    out = alive.pop(one.output, 0)
    saved = sum(alive.values())
    alive[one.output_gradient] = out
    return forward, run(one.backward), saved
