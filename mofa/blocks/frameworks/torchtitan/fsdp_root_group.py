"""torchtitan until July 2025: the embedding, the last norm and the output layer are one group of FSDP, the root's.

Read in torchtitan 0.1.0 (models/llama3/infra/parallelize.py) and PyTorch 2.7 (fsdp/_fully_shard/_fsdp_state.py).
"""

from __future__ import annotations

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import where
from mofa.blocks.frameworks.torchtitan.fsdp_ops import (
    REDUCE,
    FsdpOpList,
    copy_out_gathered_weights,
    gather_weights,
    gathers_weights_for_each_use,
    layer_gathered_bytes_per_param,
    params_of_first_and_last_layer,
    reduce_gradients,
    weight_gradient_names,
)
from mofa.blocks.op import Op, TapeBuilder
from mofa.blocks.roles import BlockRole

ROOT, LAST = "fsdp.root", "fsdp.last_block"
"""What the root gathers, and the last block's weights, where the ends of the model are the root's."""


def root_group_has_model_ends(ctx: Context) -> bool:
    """Whether the embedding, the last norm and the output layer are the root's one group (``ends_apart``)."""
    return gathers_weights_for_each_use(ctx) and not ctx.framework.ends_apart


def last_norm_and_head_params(ctx: Context) -> ArrayK:
    """Parameters of the last norm, and of an output layer that is not the embedding. [params]"""
    hidden = float(ctx.model.hidden)
    return where(ctx.model.tied_embeddings, 0.0, ctx.model.vocab * hidden) / ctx.tp + hidden


def gather_root_around_model_end(b: TapeBuilder, ctx: Context, block: BlockRole, own: ArrayK) -> None:
    """The root is gathered in front of the embedding. The last block stays gathered until its backward, through the
    head and the loss (``reshard_after_forward=int(layer_id) < len(model.layers) - 1``)."""
    p = FsdpOpList()
    if block == "embedding":
        all_params = own + last_norm_and_head_params(ctx)
        reads = (gather_weights(p, ctx, ROOT, "fsdp", all_params, ctx.fsdp, all_params > 0),)
        copy_out_gathered_weights(p, ctx, reads, "fsdp.weights", all_params, ctx.fsdp, experts=False)
    else:
        block_params, _ = params_of_first_and_last_layer(ctx, block)
        each = layer_gathered_bytes_per_param(ctx)
        p.add_memory_mark(
            "fsdp.keep_last", (), (p.declare_tensor(LAST, each * block_params, "weight_copy"),), "compute"
        )
    p.append_to_tape(b)


def add_root_group_ops_to_backward(
    fsdp: FsdpOpList, ops: list[Op], ctx: Context, block: BlockRole, own: ArrayK
) -> None:
    """Set ``fsdp.ops`` to the backward of the embedding or the head with what FSDP does for the root's group around it:
    nothing is gathered, and the root's hook runs at the end, as tokens need no gradient (_fsdp_state.py,
    ``_root_post_backward_final_callback``).

    The head's gradients wait for it among the parameters' gradients and are let go with those, behind the optimizer's
    step: of several micro-batches the later ones find 2 bytes a head parameter too many.
    """
    width = ctx.framework.reduced_bytes_per_param
    own_grads = weight_gradient_names(fsdp, ops, experts=False)
    fsdp.ops = list(ops)
    if block == "head":
        fsdp.add_memory_mark("fsdp.turn_last", (LAST,), (), "compute")
        fsdp.add_memory_mark("fsdp.root.accumulate", own_grads, (), "compute", "accumulate")
        fsdp.declare_tensor(
            "fsdp.reduce_input", 4.0, use="reduce_input"
        )  # stands for what the last block finds on its way: nothing
        fsdp.add_memory_mark("fsdp.none", (), ("fsdp.reduce_input",), "compute")
        fsdp.add_memory_hold("fsdp.hold_reduce", ("fsdp.reduce_input",), REDUCE)
        return
    all_params, (block_own, expert_params) = (
        own + last_norm_and_head_params(ctx),
        params_of_first_and_last_layer(ctx, block),
    )
    begin = FsdpOpList(tensors=fsdp.tensors)
    begin.declare_tensor("fsdp.previous", where(expert_params > 0, 0.0, width * block_own))
    begin.add_neighbours_collective("fsdp.first_reduction", "reduce_scatter", block_own, ctx.fsdp, width, REDUCE)
    begin.add_memory_mark("fsdp.previous", (), ("fsdp.previous",), REDUCE, claims="fsdp.reduce_input")
    end = FsdpOpList(tensors=fsdp.tensors)
    end.declare_tensor("fsdp.reduced", 0.0, use="reduced")
    end.declare_tensor("fsdp.done", 0.0)
    end.add_wait("fsdp.reshard", ("fsdp.weights", "fsdp.previous", "fsdp.reduced"))
    reduce_gradients(end, ctx, "fsdp", all_params, ctx.fsdp, own_grads, 3)
    end.add_memory_hold("fsdp.hold_reduce", ("fsdp.reduce_input",), REDUCE)
    end.add_memory_mark("fsdp.last", (), ("fsdp.done",), REDUCE)
    end.add_wait("fsdp.finish", ("fsdp.done",))
    fsdp.ops = begin.ops + fsdp.ops + end.ops
