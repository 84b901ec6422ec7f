"""What a block's ops allocate and free, and what a schedule asks of it: the records of an allocation trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from mofa.blocks.frameworks.megatron.persistent import PersistentBuffer
from mofa.blocks.roles import PRODUCT_ROLES, Part, Purpose, Role, TensorUse
from mofa.cost.allocations.parameter_tensors import BlockWeight


class NewTensor(NamedTuple):
    """A tensor that an op allocates. [B]"""

    name: str
    bytes: int
    stream: int
    kind: int
    expert: int = -1
    """Whose tokens alone it holds, of a rank's experts; -1: of all."""
    use: TensorUse = ""
    """As of its :class:`mofa.blocks.op.Tensor`."""


class OpTrace(NamedTuple):
    """One op's allocations, scratch and frees; ``hold`` goes on to the next block, ``claim`` comes from the last one.

    ``grads`` are the gradients that the op adds to the parameters'; the first ones become them.
    """

    op: str
    new: tuple[NewTensor, ...] = ()
    scratch: tuple[NewTensor, ...] = ()
    scratch_last: bool = False
    """Whether scratch comes after the outputs: fused attention; else outputs are made from it."""
    order: tuple[int | str, ...] = ()
    """Where scratch comes and goes in between: n allocates the n-th, ~n frees it, a name is the output allocated,
    behind a minus the input that is let go."""
    free: tuple[str, ...] = ()
    hold: tuple[str, ...] = ()
    claim: str = ""
    grads: tuple[str, ...] = ()
    frees_carried: bool = False
    """Whether what an earlier block of the pass let live goes here (``hold``)."""
    weight: bool = False
    """Whether it makes or adds a weight's gradient, which zero-bubble schedules put off."""
    reads: tuple[str, ...] = ()
    """What such an op reads."""
    sums: bool = False
    """Whether something is added to the gradient that the block is given, in its place."""
    expert_loops: int = 1
    """Experts that the op runs for one after the other (:mod:`mofa.cost.allocations.sequential_experts`). [-]"""
    renews: bool = False
    """Whether what lingered of the block's last backward goes here."""
    persistent: tuple[PersistentBuffer, ...] = ()
    """What the first such op of a rank takes for good."""
    role: Role = ""
    repeated: bool = False
    part: Part = ""
    origin: str = ""
    purpose: Purpose = ""
    """As of its :class:`mofa.blocks.op.Op`."""
    is_product: bool = False
    """Whether it is a linear layer, one of its two products on the way back, or what is gathered for them."""


@dataclass(frozen=True)
class BlockTrace:
    """Forward and backward of one block, op by op. ``output`` and ``input_gradient`` name what each hands on, empty for
    nothing.

    ``autocast_cached`` are weight copies that autocast's cache holds until the loss is there; ``weights`` the
    parameters of each weight, before data parallelism shards them. [params]
    """

    name: str
    forward: tuple[OpTrace, ...]
    backward: tuple[OpTrace, ...]
    output: str
    input_gradient: str
    output_gradient: str
    autocast_cached: frozenset[str]
    weights: tuple[BlockWeight, ...]
    logits: str = ""
    """Of a pipeline's head: what the stage gave, which the schedule holds until its backward is through."""
    launches: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Kernels of the forward, of the backward by inputs and of that by weights. [-]"""
    shape_inference: tuple[OpTrace, ...] = ()
    """A pipeline's forward without a backward and without a loss, by which stages learn what they hand on."""
    all_reduced_in_place: frozenset[str] = frozenset()
    """What tensor parallelism sums over its ranks, in place, on NCCL's stream."""
    recorded_on_nccl_stream: frozenset[str] = frozenset()
    """What else a stream of NCCL's uses that the allocator is told of (:class:`mofa.blocks.op.Tensor`)."""
    held_by_watchdog: frozenset[str] = frozenset()
    """What PyTorch's watchdog lets go (:mod:`mofa.cost.allocations.watchdog`)."""
    freed_at_end: frozenset[str] = frozenset()
    """What is let go at the end of the backward alone: of shard groups that are replicated the reduced gradients, until
    the sum over replicas is waited for (_fsdp_param_group.py, ``AllReduceState``); of a tied head the gradient."""
    split_backward: tuple[OpTrace, ...] = ()
    """The backward by inputs and behind it that by weights, where a checkpoint makes the block again in both."""
    split_backward_of_last: tuple[OpTrace, ...] = ()
    """The same of a chunk's last block."""
    retained_by_dispatcher: tuple[tuple[str, int], ...] = ()
    """What is alive beyond the backward's end, until an op that renews it, as it goes then. [B]"""
    torch_products: bool = True
    """Whether its products are PyTorch's, which have a workspace for each thread."""
    input: str = "x"
    """What its forward is given, empty for nothing."""

    def input_backward_and_kept_names(self) -> tuple[tuple[OpTrace, ...], frozenset[str]]:
        """The backward by inputs alone, and what the weights' gradients need of it."""
        both = self.split_backward or self.backward
        needed = frozenset(name for op_trace in both if op_trace.weight for name in op_trace.reads)
        return tuple(op_trace for op_trace in both if not op_trace.weight), needed

    def names_freed_before_last_weight(self) -> frozenset[str]:
        """What the forward kept and the backward reads only before it comes to the block's last weight.

        Where a backward by inputs began at the loss or at a stage's output, PyTorch detaches that at its end: the graph
        down to the last weight goes, and what it had saved with it (torch.distributed.pipelining,
        ``stage_backward_input``).
        """
        made = {item.name for op_trace in self.forward for item in op_trace.new}
        out: set[str] = set()
        for op_trace in self.backward:
            if op_trace.role in PRODUCT_ROLES:
                return frozenset(out - self.input_backward_and_kept_names()[1])
            out.update(name for name in op_trace.free if name in made)
        return frozenset()

    def weight_backward_ops(self, *, no_weight_at_end: bool = False) -> tuple[OpTrace, ...]:
        """The weights' gradients alone; ``no_weight_at_end`` of a chunk whose end has no weight behind it.

        What a checkpoint keeps to the end of the chunk's is not let go here.
        """
        both = (self.split_backward_of_last if no_weight_at_end else self.split_backward) or self.backward
        return tuple(
            op_trace._replace(free=()) if op_trace.purpose == "checkpoint_end" else op_trace
            for op_trace in both if op_trace.weight
        )  # fmt: skip


T = TypeVar("T")


def order_events_of_op(
    op_trace: OpTrace, scratch: Sequence[T], made: Sequence[T], gone: Sequence[T], early: Mapping[str, T]
) -> list[T]:  # fmt: skip
    """What an op does, one after the other: its temporaries come (``scratch``) and go, its outputs are ``made``.

    Where it has an order of its own, inputs are let go ``early``, by their names behind a minus.
    """
    if not op_trace.order:
        return [*made, *scratch, *gone] if op_trace.scratch_last else [*scratch, *made, *gone]
    outputs = {item.name: output for item, output in zip(op_trace.new, made, strict=True)}
    out: list[T] = []
    for step in op_trace.order:
        if not isinstance(step, str):
            out.append(scratch[step] if step >= 0 else gone[~step])
        elif step in early:
            out.append(early[step])
        elif step in outputs:
            out.append(outputs.pop(step))
    return [*out, *outputs.values()]
