"""What FSDP2 does for one group of parameters, in ops: gather, copy out, copy in, reduce-scatter, add."""

from __future__ import annotations

from dataclasses import dataclass, field

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import BoolK, FloatK, any_true, logical_not, where
from mofa.blocks.float8 import fp8_gathered_share
from mofa.blocks.op import Op, TapeBuilder, Tensor
from mofa.blocks.recomputation import OUTSIDE
from mofa.blocks.roles import BlockRole, Purpose, Role, TensorUse
from mofa.blocks.work import Collective, CollectiveKind, MemoryBound
from mofa.specs.params import layer_params

GATHER, REDUCE = "fsdp_gather", "fsdp_reduce"


def gathers_weights_for_each_use(ctx: Context) -> bool:
    """Whether blocks are gathered before and reduced after each use; under pp their weights stay."""
    return ctx.precision_mode == "mixed" and not ctx.pipelined


def keeps_weights_for_backward(ctx: Context) -> bool:
    """Whether what is gathered for a block's forward is there for its backward (``reshard_after_forward``; FSDP1's
    SHARD_GRAD_OP: torch/distributed/fsdp/_runtime_utils.py of PyTorch 2.1, ``_post_forward_reshard`` and
    ``_should_free_in_backward``)."""
    return gathers_weights_for_each_use(ctx) and not ctx.framework.reshard_after_forward


def block_and_expert_params(ctx: Context, dense: ArrayK, experts: ArrayK) -> tuple[ArrayK, ArrayK]:
    """Parameters of a block's own group and of its experts' group, which is apart only under ep. [params]"""
    own_group = ctx.ep > 1
    return dense + where(own_group, 0.0, experts), where(own_group, experts, 0.0)


def shards_experts_by_row(ctx: Context) -> BoolK:
    """Where the experts are too few to be sharded by expert and are sharded by rows, which costs copies."""
    moe = ctx.model.moe
    return False if moe is None else ctx.efsdp * ctx.ep > moe.num_experts


def layer_gathered_bytes_per_param(ctx: Context) -> float:
    """Of a layer's parameters as they come out of a gather: bf16, but for weights that torchao gathers in fp8.
    [B/param]"""
    return 2.0 - fp8_gathered_share(ctx.model, ctx.framework, ctx.float8)


CAST_SHARD_BYTES = 21.0
"""Of an element of a weight that is cast to fp8 in front of its gather, in eager kernels: times the scale, clamped from
both sides, cast (torchao 0.17.0, float8_training_tensor.py, ``_ToFloat8ConstrFunc``; float8_utils.py,
``to_fp8_saturated``). [B]"""
AMAX_SHARD_BYTES = 12.0
"""To find its largest there, where no scale is known ahead: the absolute values of fp32, and their largest. [B]"""


def _cast_shard_to_fp8(fsdp: FsdpOpList, ctx: Context, out: str, group: str, params: ArrayK, ranks: ArrayK,
                       runs: BoolK) -> None:  # fmt: skip
    """What comes in front of a gather in fp8, weight by weight: the cast, by a scale that is known or is looked for and
    reduced over the ranks (torchao 0.17.0, fsdp_utils.py, ``fsdp_pre_all_gather``)."""
    share = fp8_gathered_share(ctx.model, ctx.framework, ctx.float8)
    assert ctx.float8 is not None
    shard, number = share * params / ranks, float(len(ctx.float8.linears))
    ahead = ctx.framework.fp8_scales_ahead
    moved = (CAST_SHARD_BYTES + (0.0 if ahead else AMAX_SHARD_BYTES)) * shard
    fsdp.ops.append(
        Op(f"{out}.cast_shard", "dp", MemoryBound(where(runs, moved, 0.0), "mul"),
           launches=number * (3 if ahead else 9), present=runs, stream=GATHER, region=OUTSIDE, part="fsdp")
    )  # fmt: skip
    for i in range(0 if ahead else int(number)):
        fsdp.ops.append(
            Op(f"{out}.amax.{i}", "dp", Collective("all_reduce", group, 4.0), present=runs, stream=GATHER,
               region=OUTSIDE, part="fsdp")
        )  # fmt: skip


@dataclass
class FsdpOpList:
    """A list of FSDP's ops, with the tensors that they declare, to add to a tape."""

    ops: list[Op] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def declare_tensor(self, name: str, nbytes: ArrayK | float, kind: str = "buffer", use: TensorUse = "") -> str:
        """Declare a tensor and return its name."""
        self.tensors[name] = Tensor(name, nbytes, kind, grad=False, use=use or "fsdp")  # type: ignore[arg-type]
        return name

    def add_memory_mark(
        self, name: str, reads: tuple[str, ...], writes: tuple[str, ...] = (), stream: str = GATHER, role: Role = "",
        claims: str = "", purpose: Purpose = "",
    ) -> None:  # fmt: skip
        """An op without work: memory is held or let go."""
        self.ops.append(
            Op(name, "dp", None, reads, writes, launches=0, stream=stream, region=OUTSIDE, role=role, part="fsdp",
               claims=claims, purpose=purpose)
        )  # fmt: skip

    def add_memory_hold(self, name: str, reads: tuple[str, ...], stream: str = GATHER) -> None:
        """A mark up to which these are held for the next block."""
        self.add_memory_mark(name, reads, (), stream, purpose="hold")

    def add_wait(self, name: str, reads: tuple[str, ...]) -> None:
        """The compute stream waits until these are there."""
        self.ops.append(Op(name, "dp", MemoryBound(0.0), reads, (), launches=0, region=OUTSIDE, part="fsdp"))

    def add_neighbours_collective(
        self, name: str, kind: CollectiveKind, params: FloatK, ranks: FloatK, bytes_: float, stream: str
    ) -> str:
        """A collective of the block before or behind, which its own tape launches and counts; none for one rank."""
        payload = where(ranks > 1.0, bytes_ * params, 0.0)
        self.declare_tensor(name, 0.0)
        self.ops.append(
            Op(
                name,
                "dp",
                Collective(kind, "fsdp", payload),
                (),
                (name,),
                launches=0,
                stream=stream,
                region=OUTSIDE,
                part="fsdp",
            )
        )
        return name

    def append_to_tape(self, b: TapeBuilder) -> None:
        """Put them behind what a block's tape has."""
        b.tensors.update(self.tensors)
        for op in self.ops:
            b.add(op)


def gather_weights(
    fsdp: FsdpOpList, ctx: Context, out: str, group: str, params: ArrayK, ranks: ArrayK, present: BoolK, *,
    of_block: bool = False, each: float = 2.0, purpose: Purpose = "",
) -> str:  # fmt: skip
    """Cast and copy the shard in, a bf16 one copied alone, gather in place: ``each`` bytes a parameter come out;
    nothing for a group of one rank. ``of_block``: the parameters are a block's own."""
    runs = present & (ranks > 1)
    fsdp.declare_tensor(f"{out}.in", where(runs, each * params / ranks, 0.0), use="gathered_shard" if of_block else "")
    fsdp.declare_tensor(out, where(runs, each * params, 0.0), use="gathered" if of_block else "")
    if not any_true(runs):
        return out
    if each < 2.0:
        _cast_shard_to_fp8(fsdp, ctx, out, group, params, ranks, runs)
    fsdp.ops.append(
        Op(f"{out}.copy_in", "dp", MemoryBound(where(runs, (ctx.stored_bytes_per_param + 2.0) * params / ranks, 0.0),
        "foreach_cast"), (),
           (f"{out}.in",), launches=2, present=runs, stream=GATHER, region=OUTSIDE, part="fsdp", purpose=purpose)
    )  # fmt: skip
    fsdp.ops.append(
        Op(f"{out}.all_gather", "dp", Collective("all_gather", group, each * params), (f"{out}.in",), (out,),
           present=runs, stream=GATHER, region=OUTSIDE, part="fsdp", purpose=purpose)
    )  # fmt: skip
    return out


def copy_out_gathered_weights(
    fsdp: FsdpOpList, ctx: Context, reads: tuple[str, ...], weights: str, params: ArrayK, ranks: ArrayK, *,
    experts: bool, each: float = 2.0,
) -> str:  # fmt: skip
    """Split the gathered buffer into parameters; a group of one rank casts and copies each from its shard.

    FSDP1's parameters are views of the gathered buffer: nothing moves, and what is held is taken to be FSDP2's.
    """
    by_rows = shards_experts_by_row(ctx) & experts & (ranks > 1)
    moved = where(ranks > 1, 2.0 * each, ctx.stored_bytes_per_param + 6.0) * params + where(by_rows, 4.0 * params, 0.0)
    launches = where(ranks == 1, 6.0, 1.0) if experts else 1.0
    if ctx.framework.flat_params:
        moved, launches = where(ranks > 1, 0.0, (ctx.stored_bytes_per_param + 2.0) * params), where(ranks > 1, 0.0, 1.0)
    scratch = where(ranks > 1, where(by_rows, 2.0 * params, 0.0), 2.0 * params / 3.0)
    fsdp.declare_tensor(weights, where(ranks > 1, each, 2.0) * params, "weight_copy")
    fsdp.ops.append(
        Op(f"{weights}.copy_out", "dp", MemoryBound(moved, "copy"), reads, (weights,), scratch=scratch,
        launches=launches,
           present=params > 0, region=OUTSIDE, part="fsdp",
           purpose="experts_copy_out" if experts else "copy_out")
    )  # fmt: skip
    return weights


def reduce_gradients(
    fsdp: FsdpOpList, ctx: Context, name: str, params: ArrayK, ranks: ArrayK, grads: tuple[str, ...], num_weights: int
) -> None:
    """Copy bf16 gradients into an fp32 buffer, reduce-scatter it, add the shard to the gradient.

    The buffer, 4 bytes a parameter, lives until the next group's reduction. A group of one rank divides by a factor of
    one into a temporary and copies: 12 bytes a parameter. Where the sum is in 16 bits, the buffer is as well; where the
    parameters are, the sum is cast to them (``_to_dtype_if_needed(reduce_output, orig_dtype)``). In FSDP1 the
    parameters are pieces of one tensor: autograd concatenates their gradients, and the result is divided in front of
    the sum (_runtime_utils.py, _reduce_grad: ``_gradient_predivide_factor``). FSDP2 leaves that to NCCL.

    Behind the copy gradients are let go, but for that of the parameter registered last where there are ranks to reduce
    over: the variable of a loop over them holds it until ``foreach_reduce`` returns, beside what is reduced.
    """
    present = params > 0
    if not any_true(present):
        fsdp.declare_tensor(f"{name}.reduced", 0.0, use="reduced")
        fsdp.declare_tensor(f"{name}.reduce_input", 0.0, use="reduce_input")
        return
    alone = present & (ranks <= 1)
    by_rows = shards_experts_by_row(ctx) & (ranks > 1) & (name == "efsdp")
    width = ctx.framework.reduced_bytes_per_param
    fsdp.declare_tensor(f"{name}.reduce_input", width * params, use="reduce_input")
    fsdp.ops.append(
        Op(f"{name}.reduce_copy_in", "dp", MemoryBound((2.0 + width + where(by_rows, 4.0, 0.0)) * params, "cast_up"),
        grads,
           (f"{name}.reduce_input",), scratch=where(by_rows, 2.0 * params / 3.0, 0.0), present=present,
           listed_elements=params / ranks, region=OUTSIDE, part="fsdp")
    )  # fmt: skip
    in_loop: tuple[str, ...] = ()
    last = gradient_registered_last(grads, ctx, experts=name == "efsdp")
    if last and not ctx.framework.flat_params and any_true(present & logical_not(alone)):
        in_loop = (fsdp.declare_tensor(f"{name}.in_loop", 0.0, "grad"),)
        fsdp.ops.append(
            Op(
                f"{name}.loop",
                "dp",
                None,
                last,
                in_loop,
                launches=0,
                view=present & logical_not(alone),
                region=OUTSIDE,
                part="fsdp",
            )
        )
    result_bytes = where(ctx.accumulating & present, ctx.stored_bytes_per_param * params / ranks, 0.0)
    fsdp.declare_tensor(f"{name}.reduced", result_bytes, "grad", "reduced")
    out, kind = f"{name}.reduced", "grad"
    casts = ctx.stored_bytes_per_param < width
    if casts:
        result_bytes, kind = where(present, width * params / ranks, 0.0), "buffer"
        out = fsdp.declare_tensor(f"{name}.summed", result_bytes)
    if any_true(present & logical_not(alone)):
        payload = Collective("reduce_scatter", name, width * params)
        if ctx.framework.flat_params:
            fsdp.ops.append(
                Op(f"{name}.predivide", "dp", MemoryBound(where(alone, 0.0, 2.0 * width * params), "mul"),
                   (f"{name}.reduce_input",), (), launches=where(alone, 0.0, 1.0), present=present, stream=REDUCE,
                   region=OUTSIDE, part="fsdp")
            )  # fmt: skip
        writes = (f"{name}.scattered",) if any_true(alone) else (out,)
        if any_true(alone):
            fsdp.declare_tensor(writes[0], where(alone, 0.0, result_bytes), kind)
        fsdp.ops.append(
            Op(f"{name}.reduce_scatter", "dp", payload, (f"{name}.reduce_input",), writes,
               present=present & logical_not(alone), stream=REDUCE, region=OUTSIDE, part="fsdp")
        )  # fmt: skip
    if any_true(alone):
        reads = (f"{name}.scattered" if any_true(present & logical_not(alone)) else f"{name}.reduce_input",)
        fsdp.ops.append(
            Op(f"{name}.reduce_copy", "dp", MemoryBound(where(alone, 16.0 * params, 0.0), "copy"), reads, (out,),
               scratch=where(alone, 4.0 * params + (0.0 if ctx.accumulating else 4.0 * params), 0.0), launches=2,
               present=alone, stream=REDUCE, region=OUTSIDE, part="fsdp")
        )  # fmt: skip
    if casts:
        moved = where(present, (width + ctx.stored_bytes_per_param) * params / ranks, 0.0)
        fsdp.ops.append(
            Op(f"{name}.reduced_cast", "dp", MemoryBound(moved, "cast_down"), (out,), (f"{name}.reduced",),
            present=present,
               stream=REDUCE, region=OUTSIDE, part="fsdp")
        )  # fmt: skip
        out = f"{name}.reduced"
    if ctx.accumulating:
        added = 3.0 * ctx.stored_bytes_per_param * params / ranks * ctx.accumulates
        fsdp.ops.append(
            Op(f"{name}.accumulate", "dp", MemoryBound(added, "mul"), (out,), (),
               launches=gradient_accumulation_launches(ctx, float(num_weights)), present=present, stream=REDUCE,
               region=OUTSIDE, role="accumulate", part="fsdp")
        )  # fmt: skip
    if in_loop:
        fsdp.ops.append(Op(f"{name}.reduce_returns", "dp", None, in_loop, (), launches=0, region=OUTSIDE, part="fsdp"))


def gradient_registered_last(grads: tuple[str, ...], ctx: Context, *, experts: bool = False) -> tuple[str, ...]:
    """Of a group's gradients that of the parameter registered last; none where that is a norm's or the router's.

    A block with grouped queries registers its norms behind its MLP or experts. One with latent attention has them ahead
    of these, and shared experts behind all others. Of an MLP ``w3`` is last (torchtitan 0.2.2, models/*/model/model.py
    and moe.py).
    """
    if experts:
        ends: tuple[str, ...] = ("experts.w3",)
    elif ctx.model.attention_kind.torchtitan.registers_norms_first:
        ends = "output", "embedding", "shared.w3", "mlp.w3"
    else:
        ends = "output", "embedding"
    return tuple(grad for grad in (f"dW:{name}" for name in ends) if grad in grads)


def gradient_accumulation_launches(ctx: Context, num: float = 1.0) -> FloatK:
    """Launches of the additions to earlier gradients: none where a step has one micro-batch."""
    return where(ctx.accumulates > 0.0, num, 0.0)


def weight_gradient_names(fsdp: FsdpOpList, ops: list[Op], *, experts: bool) -> tuple[str, ...]:
    """The gradients of weights that these ops write, of the experts or of the others."""
    own = (op for op in ops if (op.part == "experts") == experts)
    return tuple(w for op in own for w in op.writes if fsdp.tensors[w].weight)


def params_of_first_and_last_layer(ctx: Context, block: BlockRole) -> tuple[ArrayK, ArrayK]:
    """Parameters of the first layer behind the embedding, of the last in front of the head. [params]"""
    index = 0 if block == "embedding" else ctx.model.num_layers - 1
    layer = layer_params(ctx.model, ctx.model.is_moe_layer(index))
    dense = (layer.matrices_tp + layer.shared) / ctx.tp + layer.replicated
    return block_and_expert_params(ctx, dense, layer.routed / (ctx.ep * ctx.etp))
