"""A block's allocation trace as a program: allocations and frees on numbered slots, in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mofa.blocks.frameworks.megatron.persistent import PersistentBuffer
from mofa.blocks.op import RENEWAL
from mofa.cost.allocations.block_trace import BlockTrace, NewTensor, OpTrace, order_events_of_op
from mofa.replay.allocator.pools import SMALL_SIZE, round_size
from mofa.replay.allocator.timeline import ACTIVATIONS, BUFFERS, GROUP_OF, Instruction

NEW, FREE, CLAIM, HOLD, CACHE, KEEP, DROP_CARRIED, REPLACED, PRODUCT, FREE_REDUCED, SUM, FREE_AT_END, RENEW = range(13)
FREE_SENT, LASTING, SHELVE, BORROW, GIVE_BACK = range(13, 18)
"""Allocate; free; take over what the block before held, or allocate; hand on to the next block; leave in autocast's
cache; keep as a parameter's gradient; free what the block before held and none took over; the schedule has this
micro-batch's output in place of the last one's; a product begins, its output being there; free
what tensor parallelism has summed; allocate what a gradient becomes that another stage sent, with its first summand;
free at the end of the backward; free what lingered of the block's last backward; free what a stream of NCCL's uses;
take for good, where it is the rank's first of that name; leave to PyTorch's watchdog; take until it is given back,
where it is the first of that name; give it back, if this pass took it."""

SCRATCH = "scratch of its own "
INPUT, GRADIENT = "input of a layer", "gradient of a layer's output"


Packed = tuple[tuple[Instruction, int, int, int, int], ...]
"""Instructions with their code, slot, rounded size and pool
(:meth:`mofa.replay.allocator.caching.Allocator.allocate_rounded`)."""


def pack_instructions(instructions: Iterable[Instruction]) -> Packed:
    """Instructions as the innermost loop reads them."""
    return tuple(
        (
            instruction,
            instruction.code,
            instruction.slot,
            instruction.size,
            instruction.stream << 1 | (instruction.size <= SMALL_SIZE),
        )
        for instruction in instructions
    )


@dataclass(frozen=True)
class BlockProgram:
    """A block's instructions on slots, which are numbered from 0 to ``num_slots``; -1 is none.

    ``inputs``, ``weights``, ``weights_of_last``, ``free_after_backward_by_inputs`` and ``free_above_last_weight`` are
    empty where no schedule asks for them. ``claims`` and ``holds`` name what is taken over and handed on, by slot.
    ``free_after_backward_by_inputs`` frees what a backward by inputs alone leaves at its end,
    ``free_above_last_weight`` what it lets go where it began with this block, ``free_remaining`` whatever is left.
    """

    num_slots: int
    forward: Packed
    backward: Packed
    inputs: Packed
    weights: Packed
    weights_of_last: Packed
    """The same of a chunk's last block, with no weight behind it."""
    input_slot: int
    output_slot: int
    output_gradient_slot: int
    input_gradient_slot: int
    claims: dict[int, str]
    holds: dict[int, str]
    free_after_backward_by_inputs: tuple[Instruction, ...]
    free_above_last_weight: tuple[Instruction, ...]
    free_remaining: tuple[Instruction, ...]
    logits: int = -1
    """A pipeline's output, which the schedule holds."""
    shape_inference: Packed = ()
    """The forward that stages learn shapes by."""
    retained_by_dispatcher: tuple[tuple[Instruction, int], ...] = ()
    """What lets go what lingers of a backward, and the rounded sizes of that. [B]"""


class _Slots:
    def __init__(self, trace: BlockTrace) -> None:
        self.trace = trace
        self.index: dict[str, int] = {}
        self.groups: dict[str, int] = {}
        self.claims: dict[int, str] = {}
        self.holds: dict[int, str] = {}

    def of(self, name: str) -> int:
        return self.index.setdefault(name, len(self.index))

    def shown(self, name: str) -> str:
        """What a tensor is called: what blocks hand on has one name for all of them."""
        if name and name in (self.trace.input, self.trace.output):
            return INPUT
        if name and name in (self.trace.output_gradient, self.trace.input_gradient):
            return GRADIENT
        return name.split("#")[0]

    def freeing(self, name: str) -> int:
        """How a tensor is let go."""
        if name in self.trace.all_reduced_in_place:
            return FREE_REDUCED
        if name in self.trace.recorded_on_nccl_stream:
            return FREE_SENT
        if name in self.trace.held_by_watchdog:
            return SHELVE
        return FREE_AT_END if name in self.trace.freed_at_end else FREE

    def scratch(self, code: int, number: int, op: str, item: NewTensor) -> Instruction:
        """The n-th of an op's temporaries."""
        return self.instruction(code, f"{SCRATCH}{number}", op, item, f"scratch of {op}")

    def instruction(self, code: int, name: str, op: str, item: NewTensor | None = None, shown: str = "") -> Instruction:
        shown = shown or self.shown(name)
        if shown in (INPUT, GRADIENT):
            self.groups[name] = ACTIVATIONS
        elif item is not None:
            self.groups[name] = GROUP_OF[item.kind]
        size, stream = (round_size(item.bytes), item.stream) if item is not None else (0, 0)
        expert = item.expert if item is not None else -1
        return Instruction(code, self.of(name), size, stream, self.groups.get(name, ACTIVATIONS), shown, op, expert)

    def persistent(self, buffer: PersistentBuffer, op: str) -> Instruction:
        """A buffer for good, or until it is given back; its slot says whether each block has its own."""
        code = {"stays": LASTING, "begins": BORROW, "ends": GIVE_BACK}[buffer.lifetime]
        return Instruction(code, int(buffer.per_block), round_size(buffer.bytes), 0, BUFFERS, buffer.name, op)

    def instructions(
        self, op_traces: Iterable[OpTrace], freed: frozenset[str] | None, cached: frozenset[str]
    ) -> tuple[Instruction, ...]:
        """``freed`` are the only names that may be freed; all where None. ``cached`` go to the cache instead."""
        out: list[Instruction] = []
        items: dict[str, NewTensor] = {}
        replaced = not self.trace.logits or op_traces is not self.trace.forward
        awaits_product, at_embedding = self.trace.torch_products, self.trace.name == "embedding"
        for op_trace in op_traces:
            if not replaced and op_trace.part == "loss":
                out.append(Instruction(REPLACED, 0, 0, 0, ACTIVATIONS, "", op_trace.op))
                replaced = True
            scratch = [self.scratch(NEW, i, op_trace.op, item) for i, item in enumerate(op_trace.scratch)]
            made = []
            out += [self.persistent(buffer, op_trace.op) for buffer in op_trace.persistent if not buffer.after_outputs]
            items |= {item.name: item for item in op_trace.new}
            for i, item in enumerate(op_trace.new):
                claimed = bool(op_trace.claim) and i == 0
                made.append(self.instruction(CLAIM if claimed else NEW, item.name, op_trace.op, item))
                if claimed:
                    self.claims[self.of(item.name)] = op_trace.claim
            gone = [self.scratch(FREE, i, op_trace.op, item) for i, item in enumerate(op_trace.scratch)]
            early = {
                f"-{name}": self.instruction(FREE, name, op_trace.op)
                for name in op_trace.free
                if f"-{name}" in op_trace.order and (freed is None or name in freed)
            }
            if op_trace.sums:
                out.append(
                    Instruction(SUM, self.of(self.trace.output_gradient), 0, 0, ACTIVATIONS, GRADIENT, op_trace.op)
                )
            out += order_events_of_op(op_trace, scratch, made, gone, early)
            if awaits_product and op_trace.is_product and not (at_embedding and not op_trace.role):
                out.append(Instruction(PRODUCT, 0, 0, 0, ACTIVATIONS, "", op_trace.op))
                awaits_product = False
            out += [self.persistent(buffer, op_trace.op) for buffer in op_trace.persistent if buffer.after_outputs]
            for name in op_trace.grads:
                out.append(self.instruction(KEEP, name, op_trace.op, items.get(name)))
                # it goes when a copy is there
                if name in op_trace.free and name not in self.trace.freed_at_end and (freed is None or name in freed):
                    out.append(self.instruction(FREE, name, op_trace.op))
            for name in op_trace.hold:
                out.append(self.instruction(HOLD, name, op_trace.op))
                self.holds[self.of(name)] = name
            for name in op_trace.free:
                if name in cached:
                    out.append(self.instruction(CACHE, name, op_trace.op))
                elif (freed is None or name in freed) and name != self.trace.logits:
                    out.append(self.instruction(self.freeing(name), name, op_trace.op))
            if op_trace.frees_carried:
                out.append(Instruction(DROP_CARRIED, 0, 0, 0, ACTIVATIONS, "", op_trace.op))
            if op_trace.renews:
                out.append(Instruction(RENEW, 0, 0, 0, ACTIVATIONS, "", op_trace.op))
        return tuple(out)


def program_of_trace(trace: BlockTrace) -> BlockProgram:
    """The program of a trace: its block's forward and backward, and where a schedule puts weights' gradients off the
    halves of that."""
    slots = _Slots(trace)
    forward = slots.instructions(trace.forward, None, trace.autocast_cached)
    backward = slots.instructions(trace.backward, None, frozenset())
    inputs: tuple[Instruction, ...] = ()
    weights = of_last = inputs
    left: frozenset[str] = frozenset()
    above = left
    if trace.split_backward:
        op_traces, needed = trace.input_backward_and_kept_names()
        left = frozenset(item.name for op_trace in op_traces for item in op_trace.new) | {trace.output_gradient}
        left, above = left - needed, trace.names_freed_before_last_weight()
        inputs = slots.instructions(op_traces, left, frozenset())
        weights, of_last = (
            slots.instructions(trace.weight_backward_ops(no_weight_at_end=last), None, frozenset())
            for last in (False, True)
        )
    dry = slots.instructions(trace.shape_inference, None, frozenset())

    def place(name: str) -> int:
        return slots.of(name) if name else -1

    x, out, given, back = (
        slots.of(trace.input),
        place(trace.output),
        place(trace.output_gradient),
        place(trace.input_gradient),
    )
    # in the order in which the programs come upon them
    loose = tuple(slots.instruction(FREE, name, "end") for name in list(slots.index) if name in left)
    let_go = tuple(slots.instruction(FREE, name, "end") for name in list(slots.index) if name in above)
    rest = tuple(slots.instruction(FREE, name, "end") for name in list(slots.index))
    lingers = tuple(
        (slots.instruction(FREE, name, RENEWAL), round_size(nbytes)) for name, nbytes in trace.retained_by_dispatcher
    )
    return BlockProgram(
        len(slots.index),
        pack_instructions(forward),
        pack_instructions(backward),
        pack_instructions(inputs),
        pack_instructions(weights),
        pack_instructions(of_last),
        x,
        out,
        given,
        back,
        slots.claims,
        slots.holds,
        loose,
        let_go,
        rest,
        place(trace.logits),
        pack_instructions(dry),
        lingers,
    )
