"""FSDP2 around torchtitan's blocks: gathers with prefetch, copies, fp32 reduce-scatter, accumulation.

Read in torch/distributed/fsdp/_fully_shard of PyTorch 2.11. A block's tape stands for one of many repetitions: a
tensor read before it is written is that of the previous repetition. Ops without work mark when memory of another
stream's tensor is held or released. Groups: the embedding, each block, [norm, output] together; experts are a group of
their own under expert parallelism, prefetched explicitly.
"""

from __future__ import annotations

from collections.abc import Mapping

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import BoolK, FloatK, any_true, logical_not, where
from mofa.blocks.frameworks.torchtitan.expert_loop import (
    with_full_size_expert_gradients,
    with_parameter_nodes_behind_loop,
)
from mofa.blocks.frameworks.torchtitan.float8 import casts_weight_gradient
from mofa.blocks.frameworks.torchtitan.fsdp_ops import (
    GATHER,
    REDUCE,
    FsdpOpList,
    block_and_expert_params,
    copy_out_gathered_weights,
    gather_weights,
    gathers_weights_for_each_use,
    gradient_accumulation_launches,
    keeps_weights_for_backward,
    layer_gathered_bytes_per_param,
    params_of_first_and_last_layer,
    reduce_gradients,
    weight_gradient_names,
)
from mofa.blocks.frameworks.torchtitan.fsdp_root_group import (
    ROOT,
    add_root_group_ops_to_backward,
    gather_root_around_model_end,
    root_group_has_model_ends,
)
from mofa.blocks.frameworks.torchtitan.linear import (
    CAST,
    casts_linear_inputs,
    compile_and_dtensor_marker,
    partial_weight_gradient_all_reduces,
)
from mofa.blocks.op import Op, Tape, TapeBuilder, Tensor
from mofa.blocks.recomputation import OUTSIDE
from mofa.blocks.roles import BlockRole, RoutingStep
from mofa.blocks.work import MemoryBound
from mofa.specs.framework import PythonFunctionCounts


def python_function_counts_of_profile(ctx: Context) -> PythonFunctionCounts:
    """How many Python functions a call of each of torchtitan's modules runs beside its launches, by the profile."""
    functions = ctx.framework.python_functions
    assert functions is not None, f"{ctx.framework.name} needs python_functions in its profile"
    return functions


def num_python_functions_of_block_call(ctx: Context) -> float:
    """Python functions of a block's own call, where no gather's hooks (``shard_hook_s``) hold it already."""
    hooked = ctx.precision_mode == "mixed" and ctx.pipelined
    return python_function_counts_of_profile(ctx).module_call.value if hooked else 0.0


# -- forward


def begin_block(b: TapeBuilder, ctx: Context, block: BlockRole, dense_params: ArrayK, expert_params: ArrayK) -> None:
    """Gather the block's weights before it: by the host running ahead, or where ep is on by an explicit prefetch."""
    b.block = block
    b.mark = compile_and_dtensor_marker(ctx, block)
    if not gathers_weights_for_each_use(ctx):
        return
    own, experts = block_and_expert_params(ctx, dense_params, expert_params)
    if root_group_has_model_ends(ctx) and block in ("embedding", "head"):
        gather_root_around_model_end(b, ctx, block, own)
        return
    ahead = (ctx.ep > 1) & (block not in ("embedding", "head"))
    p = FsdpOpList()
    each = layer_gathered_bytes_per_param(ctx) if block == "dense" else 2.0
    reads: list[str] = []
    if any_true(logical_not(ahead)):
        gathered = gather_weights(
            p,
            ctx,
            "fsdp.gathered",
            "fsdp",
            own,
            ctx.fsdp,
            logical_not(ahead),
            of_block=True,
            each=each,
            purpose="gather_ahead",
        )
        reads.append(gathered)
        p.declare_tensor("fsdp.weights", 0.0)
        p.add_memory_mark(
            "fsdp.gather_after", ("fsdp.weights",)
        )  # a gather waits for the copy of the one before the last
    if any_true(ahead):
        p.declare_tensor("fsdp.next", 0.0)
        p.declare_tensor("fsdp.prefetched", where(ahead & (ctx.fsdp > 1), 2.0 * own, 0.0))
        p.add_memory_mark("fsdp.turn", ("fsdp.next",), ("fsdp.prefetched",), claims="fsdp.next")
        reads.append("fsdp.prefetched")
        if any_true(experts > 0):
            p.declare_tensor("efsdp.next", 0.0)
            p.declare_tensor("efsdp.prefetched", where(ctx.efsdp > 1, 2.0 * experts, 0.0))
            p.add_memory_mark("efsdp.turn", ("efsdp.next",), ("efsdp.prefetched",), claims="efsdp.next")
    copy_out_gathered_weights(p, ctx, tuple(reads), "fsdp.weights", own, ctx.fsdp, experts=False, each=each)
    if any_true(ahead):
        gather_weights(p, ctx, "fsdp.next", "fsdp", own, ctx.fsdp, ahead)
        if any_true(experts > 0):
            gather_weights(p, ctx, "efsdp.next", "efsdp", experts, ctx.efsdp, experts > 0)
            p.declare_tensor("efsdp.params", experts)
    p.append_to_tape(b)


def copy_out_expert_weights(b: TapeBuilder, ctx: Context) -> tuple[str, ...]:
    """The experts' weights, copied out of their gathered buffer; read by their last product, then let go."""
    if "efsdp.params" not in b.tensors:
        return ()
    params = b.tensors.pop("efsdp.params").bytes
    p = FsdpOpList()
    reads = tuple(n for n in ("efsdp.prefetched", "fsdp.prefetched") if n in b.tensors)
    copy_out_gathered_weights(p, ctx, reads, "efsdp.weights", params, ctx.efsdp, experts=True)
    p.append_to_tape(b)
    return ("efsdp.weights",)


def release_block_weights(b: TapeBuilder) -> tuple[str, ...]:
    """At the end of a block its weights are let go; gathered buffers are held until the next block's copy."""
    names = ("fsdp.gathered", ROOT, "fsdp.next", "efsdp.next", "efsdp.prefetched")
    released = [n for n in names if n in b.tensors]
    if "efsdp.weights" not in b.tensors and "fsdp.prefetched" in b.tensors:
        released.append("fsdp.prefetched")
    if released:
        p = FsdpOpList()
        p.add_memory_hold("fsdp.hold", tuple(released))
        p.append_to_tape(b)
    return tuple(n for n in ("fsdp.weights",) if n in b.tensors)


def gather_and_await_first_block(b: TapeBuilder, ctx: Context) -> None:
    """Behind the embedding, the first block's gather: issued behind the embedding's, with little to run beside it."""
    if not gathers_weights_for_each_use(ctx):
        return
    p = FsdpOpList()
    p.add_wait("fsdp.first_block", (p.add_neighbours_collective("fsdp.first_gather", "all_gather",
    params_of_first_and_last_layer(ctx, "embedding")[0],
                                            ctx.fsdp, layer_gathered_bytes_per_param(ctx), GATHER),))  # fmt: skip
    p.append_to_tape(b)


# -- backward


def with_fsdp_in_backward(
    tape: Tape, ctx: Context, block: BlockRole, dense_params: ArrayK, expert_params: ArrayK
) -> Tape:
    """A backward tape with what FSDP does in it: gathers of weights, reductions of their gradients, by precision
    mode."""
    ops = [op if block == "head" else _without_forward_weights(op, tape) for op in tape.ops]
    p = FsdpOpList(tensors=dict(tape.tensors))
    mark = compile_and_dtensor_marker(ctx, block)
    in_turn = ctx.framework.experts == "sequential" and block == "experts"
    if in_turn:
        ops = with_full_size_expert_gradients(ops, p.tensors, ctx)
    if ctx.framework.compile:
        ops = _compiled_graphs(ops, tape, block)
    ops = [mark(op) for op in ops]
    if casts_linear_inputs(ctx):
        p.ops = _autocast_weights(p, ops, ctx)
    elif ctx.precision_mode == "uniform":
        p.ops = _plain_gradients(p, ops, ctx)
    elif ctx.pipelined:
        p.ops = _unsharded_gradients(p, ops, ctx, *block_and_expert_params(ctx, dense_params, expert_params))
    elif root_group_has_model_ends(ctx) and block in ("embedding", "head"):
        add_root_group_ops_to_backward(p, ops, ctx, block, block_and_expert_params(ctx, dense_params, expert_params)[0])
    else:
        _fsdp(p, ops, ctx, block, *block_and_expert_params(ctx, dense_params, expert_params))
    if in_turn:
        p.ops = with_parameter_nodes_behind_loop(p.ops)
    return Tape(tuple(p.ops), p.tensors, tape.inputs, tape.outputs)


def _without_forward_weights(op: Op, tape: Tape) -> Op:
    """Recomputed ops read the weights gathered for the backward pass, which the tape holds throughout."""
    if not any(tape.tensors[r].is_of_fsdp for r in op.reads):
        return op
    return op._replace(reads=tuple(r for r in op.reads if not tape.tensors[r].is_of_fsdp))


def _compiled_graphs(ops: list[Op], tape: Tape, block: BlockRole) -> list[Op]:
    """What comes into a compiled graph's backward stays until its end: the call holds its arguments.

    (torch/_functorch/_aot_autograd/runtime_wrappers.py, ``CompiledFunction.backward``: ``*flat_args``.) A dense block
    is one graph; of those in a block with experts only theirs is large.
    """
    if block == "dense":
        ops = [_fused_sum(op) for op in ops]
        return [*ops[:-1], ops[-1]._replace(reads=(*ops[-1].reads, *tape.inputs))]
    # of what it is given autograd makes the sums (tt1-hunyuana13b-3l-compile-skewed-traced)
    ops = [_fused_sum(op) if op.sum_of == "cast_once" else op for op in ops]
    given = tuple(n for n in ("d:experts.out.fp32", "d:experts.w2.out") if n in tape.tensors)[:1]
    inside = [i for i, op in enumerate(ops) if _is_of_experts(op)]
    if given and inside:
        last = ops[inside[-1]]
        ops[inside[-1]] = last._replace(reads=(*last.reads, *given))
    return ops


def _is_of_experts(op: Op) -> bool:
    """Whether experts compute it; marks of what their call holds do not count."""
    return op.part == "experts" and not op.frame


def _fused_sum(op: Op) -> Op:
    """Inductor adds gradients inside the next kernel: one more read."""
    if op.role == "sum" and isinstance(op.work, MemoryBound):
        return op._replace(work=MemoryBound(op.work.bytes / 3.0, "compiled residual_add"), launches=0)
    return op


def _after_experts(ops: list[Op]) -> int:
    """Index behind the exchange of the experts' input gradients, where their parameters' backward hook runs."""
    return (
        max((i for i, op in enumerate(ops) if _is_of_experts(op) or _is_back_through(op, "dispatch")), default=-1) + 1
    )


def _is_back_through(op: Op, routing: RoutingStep) -> bool:
    """Whether it is the backward of an exchange of rows."""
    return op.routing == routing and op.role == "backward"


def _autocast_weights(fsdp: FsdpOpList, ops: list[Op], ctx: Context) -> list[Op]:
    """The kept (or repeated) bf16 weight is read by the input gradient; the bf16 weight gradient is cast to fp32.

    Compiled too: the input gradient's product reads the copy from memory, and what a backward kernel that cannot be
    fused reads is not computed again (torch/_functorch/partitioners.py, ban_if_materialized_backward).
    """
    out: list[Op] = []
    pending: list[Op] = []  # what is made of a weight's gradient: the input's is cast back before, being cast after it
    for op in ops:
        copy = f"{op.origin}.weight16"
        cast = op.role in ("backward", "sum") and op.casts_for
        if pending and cast != pending[0].origin:
            out += pending
            pending = []
        if op.role == "dgrad" and copy in fsdp.tensors:
            if f"{copy}~" in fsdp.tensors:
                copy = f"{copy}~"
            op = op._replace(reads=(*op.reads, copy))
        out.append(op)
        for grad in (w for w in op.writes if fsdp.tensors[w].weight):
            params = fsdp.tensors[grad].bytes / 2.0
            last = grad
            if op.role == "wgrad":
                last = fsdp.declare_tensor(f"{grad}.fp32", 4.0 * params if ctx.accumulating else 0.0, "grad")
                is_cast = casts_weight_gradient(ctx, op.origin)
                moved = MemoryBound(CAST * params, "cast_up") if is_cast else None
                pending.append(Op(f"{op.origin}.grad_cast", "memory_bound", moved, (grad,), (last,),
                              launches=float(is_cast), present=op.present, compiled=op.compiled, role="grad_cast",
                              origin=op.origin, part=op.part))  # fmt: skip
            else:  # the embedding's gradient is fp32
                params = params / 2.0
            if ctx.accumulating:
                moved = MemoryBound(12.0 * params * ctx.accumulates, "mul")
                pending.append(Op(f"{op.origin}.accumulate", "memory_bound", moved, (last,), (),
                              launches=gradient_accumulation_launches(ctx), present=op.present, role="accumulate",
                              origin=op.origin, part=op.part))  # fmt: skip
    return [*out, *pending]


def _plain_gradients(fsdp: FsdpOpList, ops: list[Op], ctx: Context) -> list[Op]:
    """Gradients in the parameters' dtype, added from the second micro-batch on: behind the sum of input gradients, for
    which autograd turns the folded input before the transposed weight."""
    out: list[Op] = []
    pending: list[Op] = []
    for op in ops:
        if pending and op.role != "sum":
            out += pending
            pending = []
        out.append(op)
        for grad in (w for w in op.writes if fsdp.tensors[w].weight):
            if ctx.accumulating:
                moved = MemoryBound(3.0 * fsdp.tensors[grad].bytes * ctx.accumulates)
                pending.append(Op(f"{grad}.accumulate", "memory_bound", moved, (grad,), (),
                launches=gradient_accumulation_launches(ctx),
                               present=op.present, role="accumulate", part=op.part))  # fmt: skip
    return [*out, *pending]


def _unsharded_gradients(fsdp: FsdpOpList, ops: list[Op], ctx: Context, own: ArrayK, experts: ArrayK) -> list[Op]:
    """Under pp each block's bf16 gradients are added to unsharded fp32 ones (to_accumulated_grad_if_needed)."""
    per_param = CAST + (4.0 if ctx.accumulating else 0.0) * ctx.accumulates
    result = list(ops)
    dense_grads = weight_gradient_names(fsdp, ops, experts=False)
    expert_grads = weight_gradient_names(fsdp, ops, experts=True)
    own_group = experts > 0
    if any_true(own_group) and expert_grads:
        add = Op(
            "efsdp.accumulate",
            "dp",
            MemoryBound(per_param * experts, "accumulate"),
            expert_grads,
            (),
            launches=3,
            present=own_group,
            role="accumulate",
            part="fsdp",
        )
        post = FsdpOpList(ops=[add], tensors=fsdp.tensors)
        expert_grads = _kept_where_together(post, expert_grads, own_group)
        index = _after_experts(ops)
        result[index:index] = post.ops
    tail = (*dense_grads, *expert_grads)
    result.append(Op("fsdp.accumulate", "dp", MemoryBound(per_param * own, "accumulate"), tail, (),
                     launches=len(dense_grads) + 2, role="accumulate", part="fsdp"))  # fmt: skip
    return result


def _kept_where_together(fsdp: FsdpOpList, grads: tuple[str, ...], own_group: BoolK) -> tuple[str, ...]:
    """The experts' gradients as the block's own group sees them: alive on only where it is their group too."""
    names = []
    for grad in grads:
        name = fsdp.declare_tensor(f"{grad}.together", 0.0, "grad")
        fsdp.ops.append(
            Op(f"fsdp.{grad}", "dp", None, (grad,), (name,), view=logical_not(own_group), launches=0, region=OUTSIDE,
               part="fsdp")
        )  # fmt: skip
        names.append(name)
    return tuple(names)


def _fsdp(fsdp: FsdpOpList, ops: list[Op], ctx: Context, block: BlockRole, own: ArrayK, experts: ArrayK) -> None:
    zero, own_group, width = 0.0 * ctx.tp, experts > 0, ctx.framework.reduced_bytes_per_param
    block_own, _ = params_of_first_and_last_layer(ctx, block)
    following, previous = own, own
    of_layer = layer_gathered_bytes_per_param(ctx) if ctx.float8 is not None else 2.0
    each = of_layer if block == "dense" else 2.0
    if block == "embedding":
        following, previous = zero, block_own
    elif block == "head":
        following, previous = block_own, zero
    begin = FsdpOpList(tensors=fsdp.tensors)
    weights = "fsdp.weights"
    gathers_again = not keeps_weights_for_backward(ctx)
    if block == "embedding":  # the first block's gradients are still on their way
        begin.add_neighbours_collective("fsdp.first_reduction", "reduce_scatter", block_own, ctx.fsdp, width, REDUCE)
    if block != "head" and gathers_again:
        begin.declare_tensor("fsdp.next@", 0.0)
        begin.declare_tensor("fsdp.arrived", where(ctx.fsdp > 1, each * own, 0.0))
        begin.add_memory_mark("fsdp.turn@", ("fsdp.next@",), ("fsdp.arrived",), claims="fsdp.next@")
        weights = copy_out_gathered_weights(
            begin, ctx, ("fsdp.arrived",), "fsdp.weights@", own, ctx.fsdp, experts=False, each=each
        )
    gathered = []
    if block != "embedding" and gathers_again:
        gathered.append(
            gather_weights(
                begin,
                ctx,
                "fsdp.next@",
                "fsdp",
                following,
                ctx.fsdp,
                following > 0,
                of_block=True,
                each=of_layer,
                purpose="gather_ahead",
            )
        )
    if any_true(own_group):
        begin.declare_tensor("efsdp.next@", 0.0)
        begin.declare_tensor("efsdp.arrived", where(ctx.efsdp > 1, 2.0 * experts, 0.0))
        begin.add_memory_mark("efsdp.turn@", ("efsdp.next@",), ("efsdp.arrived",), claims="efsdp.next@")
        gathered.append(gather_weights(begin, ctx, "efsdp.next@", "efsdp", experts, ctx.efsdp, own_group))
    begin.declare_tensor("fsdp.previous.experts", where(own_group, width * previous, 0.0))
    begin.declare_tensor("fsdp.previous", where(own_group, 0.0, width * previous))
    begin.add_memory_mark(
        "fsdp.previous", (), ("fsdp.previous", "fsdp.previous.experts"), REDUCE, claims="fsdp.reduce_input"
    )
    body = list(ops)
    dense_grads = weight_gradient_names(fsdp, ops, experts=False)
    expert_grads = weight_gradient_names(fsdp, ops, experts=True)
    if any_true(own_group):
        post = FsdpOpList(tensors=fsdp.tensors)
        post.declare_tensor("fsdp.reduced", 0.0, use="reduced")
        post.add_wait("efsdp.reshard", ("efsdp.weights@", "fsdp.previous.experts", "fsdp.reduced"))
        reduce_gradients(post, ctx, "efsdp", experts, ctx.efsdp, expert_grads, 3)
        together = FsdpOpList(tensors=fsdp.tensors)
        expert_grads = _kept_where_together(together, expert_grads, own_group)
        # behind the copy-in, in front of the reduction's output (foreach_reduce: unsharded_grads.clear())
        copied = next(i for i, op in enumerate(post.ops) if _copies_into_reduction(op, post.tensors)) + 1
        post.ops[copied:copied] = together.ops
        index = _after_experts(body)
        body[index:index] = post.ops
        own_ops = [i for i, op in enumerate(body) if _is_of_experts(op) or _is_back_through(op, "combine")]
        first = own_ops[0]
        if body[first].repeated:
            index = next(i for i in own_ops if not body[i].repeated)
            body[index:index] = _experts_again(fsdp, ctx, experts)
        pre = FsdpOpList(tensors=fsdp.tensors)
        copy_out_gathered_weights(pre, ctx, ("efsdp.arrived",), "efsdp.weights@", experts, ctx.efsdp, experts=True)
        body[first:first] = pre.ops
    if block == "head":  # hooks run behind the loss, in front of the output layer
        index = next((i for i, op in enumerate(body) if op.role == "dgrad"), 0)
        body[index:index] = begin.ops
    else:
        body[:0] = begin.ops
    end = FsdpOpList(tensors=fsdp.tensors)
    if block not in ("embedding", "head"):
        end.ops += partial_weight_gradient_all_reduces(ctx)
    wait = "efsdp.reduced" if any_true(own_group) else "fsdp.reduced"
    freed = ("efsdp.reduce_input",) if any_true(own_group) else ()
    end.declare_tensor("fsdp.reduced", 0.0, use="reduced")
    end.declare_tensor("fsdp.done", 0.0)
    end.add_wait("fsdp.reshard", (weights, "fsdp.previous", wait, *freed))
    reduce_gradients(end, ctx, "fsdp", own, ctx.fsdp, (*dense_grads, *expert_grads), len(dense_grads) + 2)
    if gathered:
        end.add_memory_hold("fsdp.hold@", tuple(gathered))
    end.add_memory_hold("fsdp.hold_reduce", ("fsdp.reduce_input",), REDUCE)
    if block == "embedding":  # the last reduction of a micro-batch: nothing is left to run beside it
        end.add_memory_mark("fsdp.last", (), ("fsdp.done",), REDUCE)
        end.add_wait("fsdp.finish", ("fsdp.done",))
    fsdp.ops = body + end.ops


def _copies_into_reduction(op: Op, tensors: Mapping[str, Tensor]) -> bool:
    """Whether an op writes what is reduced: gradients are copied into it."""
    return any(tensors[name].use == "reduce_input" for name in op.writes)


def _experts_again(fsdp: FsdpOpList, ctx: Context, experts: FloatK) -> list[Op]:
    """The experts' second gather where their layer is computed again: its hooks let them go behind the repetition.

    The block's own hook has its weights there already, the experts' has not (_fsdp_state.py, _pre_forward). The tape
    holds the first ones throughout.
    """
    again = FsdpOpList(tensors=fsdp.tensors)
    arrived = gather_weights(again, ctx, "efsdp.again", "efsdp", experts, ctx.efsdp, ctx.efsdp > 1)
    for name in (arrived, f"{arrived}.in"):
        again.tensors[name] = again.tensors[name]._replace(bytes=0.0)
    copy_out_gathered_weights(
        again, ctx, ("efsdp.weights@", arrived), "efsdp.weights@@", experts, ctx.efsdp, experts=True
    )
    again.tensors["efsdp.weights@@"] = again.tensors["efsdp.weights@@"]._replace(bytes=0.0)
    return [op._replace(scratch=0.0) for op in again.ops]
