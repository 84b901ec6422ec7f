"""The blocks of a model as tapes: each described once, over one framework's primitives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from mofa.blocks.activation_offload import with_activation_offload
from mofa.blocks.backward import derived_backward_tape
from mofa.blocks.combined_passes import (
    with_delayed_weight_gradients,
    with_schedule_nodes,
    with_token_exchange_stream,
)
from mofa.blocks.context import ArrayK, Context, Primitives
from mofa.blocks.deferred_weight_gradients import SplitBackward, split_backward
from mofa.blocks.elementwise import any_true
from mofa.blocks.hooks import mark_saved_tensor_hooks
from mofa.blocks.lifetimes import BlockLifetimes
from mofa.blocks.moeblaze import with_dispatch_by_index
from mofa.blocks.op import Op, OpBackward, Tape, TapeBuilder, Tensor
from mofa.blocks.parts import linear, memory_bound_op
from mofa.blocks.recomputation import NO_RECOMPUTE, Recompute
from mofa.blocks.roles import BlockRole
from mofa.blocks.shared_expert_overlap import with_shared_expert_overlap, with_shared_expert_overlap_backward
from mofa.blocks.tp_overlap import with_tp_overlap
from mofa.blocks.work import Collective
from mofa.specs.attention.mla import MlaSpec
from mofa.specs.attention.record import Heads
from mofa.specs.model import ModelSpec
from mofa.specs.params import embedding_params, layer_params


@dataclass(frozen=True)
class CostedLayerKind:
    """One kind of layer: dense or with experts, full or windowed attention, with the model's rotation or without."""

    moe: bool
    windowed: bool = False
    unrotated: bool = False
    """Whether it leaves out the rotary embedding that the model's other layers have."""

    @property
    def name(self) -> str:
        """What tapes call this kind of layer: dense or moe, windowed and unrotated where it is."""
        return (
            ("moe" if self.moe else "dense")
            + ("_windowed" if self.windowed else "")
            + ("_unrotated" if self.unrotated else "")
        )

    @property
    def block_role(self) -> BlockRole:
        """What a framework asks of such a layer: whether it has experts."""
        return "experts" if self.moe else "dense"


@lru_cache(maxsize=64)
def distinct_layer_kinds(model: ModelSpec) -> tuple[CostedLayerKind, ...]:
    """The kinds of layer of a model, in order of first appearance."""
    return tuple(dict.fromkeys(kind_of_each_layer(model)))


@lru_cache(maxsize=64)
def kind_of_each_layer(model: ModelSpec) -> tuple[CostedLayerKind, ...]:
    """The kind of every layer of a model. (layers,)"""
    return tuple(layer_kind(model, i) for i in range(model.num_layers))


def layer_kind(model: ModelSpec, layer: int) -> CostedLayerKind:
    """The kind of the layer with this index, from 0."""
    unrotated = model.positions == "rope" and not model.is_rotated_layer(layer)
    return CostedLayerKind(model.is_moe_layer(layer), model.is_windowed_layer(layer), unrotated)


@dataclass(frozen=True)
class BlockTapes:
    """Forward and backward of one block under one recomputation."""

    name: str
    forward: Tape
    backward: Tape
    checkpointed: bool = False
    """Whether one checkpoint of PyTorch's is around the whole block."""

    @property
    def recomputed_op_names(self) -> frozenset[str]:
        """The forward's ops that run again in the backward."""
        return frozenset(op.origin for op in self.backward.ops if op.repeated)

    @cached_property
    def split_backward(self) -> SplitBackward:
        """The backward by inputs and by weights, for schedules that put the latter off."""
        return split_backward(self.forward, self.backward, self.checkpointed)

    @cached_property
    def lifetimes(self) -> BlockLifetimes:
        """What the block allocates, from which op to which."""
        return BlockLifetimes.from_tapes(self.forward, self.backward)


def layer_params_of_rank(ctx: Context, moe: bool) -> tuple[ArrayK, ArrayK]:
    """Parameters of one layer on one rank before data parallelism shards them: dense, routed experts. [params]"""
    layer = layer_params(ctx.model, moe)
    dense = (layer.matrices_tp + layer.shared) / ctx.tp + layer.replicated
    return dense, layer.routed / (ctx.ep * ctx.etp)


@dataclass(frozen=True)
class AttentionPrimitives:
    """A framework's primitives on one tape, by which an attention kind writes its queries, keys and values."""

    b: TapeBuilder
    ctx: Context
    p: Primitives

    def qkv(self, h: str) -> Heads:
        """Queries, keys and values of an input."""
        return self.p.qkv(self.b, self.ctx, h)

    def norm_heads(self, q: str, k: str, over_all: bool) -> tuple[str, str]:
        """Queries and keys behind a norm over each head, or over all heads of a token at once."""
        ctx, a = self.ctx, self.ctx.model.attention
        if not over_all:
            q = self.p.head_norm(self.b, ctx, q, "q_norm", ctx.heads, a.d_qk)
            return q, self.p.head_norm(self.b, ctx, k, "k_norm", ctx.kv_heads, a.d_qk)
        return (
            self._norm_over_all(q, "q_norm", ctx.heads, a.num_heads),
            self._norm_over_all(k, "k_norm", ctx.kv_heads, a.num_kv_heads),
        )

    def _norm_over_all(self, x: str, name: str, heads: ArrayK, num_heads: int) -> str:
        """A norm of a row of all heads, of which a rank has its own: the ranks' sums of squares are added up."""
        ctx, b = self.ctx, self.b
        if any_true(ctx.has_tp):
            row = b.tensors[x]
            summed = b.tensor(f"{name}.summed", row.bytes)
            work = Collective("all_reduce", "tp", 4.0 * ctx.tokens)
            x = b.add(
                Op(f"{name}.sum_squares", "tp", work, (x,), (summed,), present=ctx.has_tp, view=True, stream="tp",
                   back=OpBackward(work=work, family="tp", present=ctx.has_tp, view=True, stream="tp"))
            )  # fmt: skip
        return self.p.head_norm(b, ctx, x, name, heads / num_heads, float(num_heads * ctx.model.attention.d_qk))

    def rotate(self, q: str, k: str) -> tuple[str, str]:
        """Queries and keys turned by their positions, as they are where positions are no rotary ones."""
        return self.p.rope(self.b, self.ctx, q, k) if self.ctx.model.positions == "rope" else (q, k)

    def mla(self, attention: MlaSpec, h: str) -> Heads:
        """Queries, keys and values by low-rank projections of an input, rotated."""
        return self.p.mla(self.b, self.ctx, attention, h)


def attention_half(b: TapeBuilder, ctx: Context, primitives: Primitives, x: str, windowed: bool) -> tuple[str, str]:
    """Norm, attention, residual: the stream behind it, and what attention read."""
    a, hidden = ctx.model.attention, float(ctx.model.hidden)
    h = x if ctx.model.norm_placement == "after" else primitives.norm(b, ctx, x, "attn_norm", hidden)
    q, k, v = ctx.model.attention_kind.project(a, AttentionPrimitives(b, ctx, primitives), h)
    out = primitives.attend(b, ctx, q, k, v, windowed)
    since = len(b.ops)
    y = primitives.row_linear(b, ctx, out, "proj", hidden, ctx.heads * a.d_v)
    for i, op in enumerate(b.ops[since:], since):
        if op.weight:
            b.ops[i] = op._replace(purpose="attention_output")
    return primitives.residual(b, ctx, x, _finish_branch(b, ctx, primitives, y, "attn"), "mid"), h


def _finish_branch(b: TapeBuilder, ctx: Context, primitives: Primitives, y: str, name: str) -> str:
    """What attention or feed-forward made, behind its norm and its multiplier where the model has them."""
    if ctx.model.norm_placement != "before":
        y = primitives.norm(b, ctx, y, f"{name}_post_norm", float(ctx.model.hidden))
    return _multiplied(b, ctx, y, name) if "branches" in ctx.model.multipliers else y


def _multiplied(b: TapeBuilder, ctx: Context, x: str, name: str) -> str:
    """A tensor times a constant, one kernel each way that keeps nothing."""
    nbytes = b.tensors[x].bytes
    out = b.tensor(f"{name}.multiplied", nbytes)
    return memory_bound_op(
        b, f"{name}.multiply", (x,), out, bytes_=2.0 * nbytes, back_bytes=2.0 * nbytes, like="silu", back_like="silu"
    )


def _embedded(b: TapeBuilder, ctx: Context, primitives: Primitives) -> str:
    """Tokens' rows of the embedding, times their multiplier where the model has one."""
    rows = primitives.embedding(b, ctx)
    return _multiplied(b, ctx, rows, "embedding") if "embedding" in ctx.model.multipliers else rows


def layer_tapes(
    ctx: Context,
    primitives: Primitives,
    kind: CostedLayerKind,
    recompute: Recompute = NO_RECOMPUTE,
    forward: Tape | None = None,
    *,
    keeps_activations: bool = False,
) -> BlockTapes:
    """Tapes of one transformer layer, forward and backward; ``forward`` where its forward tape is already there.

    With ``keeps_activations`` the layer leaves on the device what other layers offload.
    """
    forward = forward or layer_forward_tape(ctx, primitives, kind)
    params = layer_params_of_rank(ctx, kind.moe)
    checkpointed = recompute.kind == "full" and not recompute.reentrant
    if checkpointed and not recompute.early_stop:  # which stops within one compiled graph
        forward = mark_saved_tensor_hooks(forward, mode=bool(recompute.keep_outputs))
    if ctx.framework.expert_overlap == "combined":
        forward = with_token_exchange_stream(forward)
    if ctx.framework.shared_expert_overlap:
        forward = with_shared_expert_overlap(forward)
    back = _wrapped(derived_backward_tape(forward, recompute), ctx, primitives, kind.block_role, *params)
    if ctx.framework.delay_wgrad:
        back = with_delayed_weight_gradients(forward, back)
    if ctx.framework.expert_overlap == "combined":
        back = with_schedule_nodes(forward, back, delays=ctx.framework.delay_wgrad)
    if ctx.framework.shared_expert_overlap:
        back = with_shared_expert_overlap_backward(forward, back)
    if ctx.framework.offloaded_activations.offloads_any:
        forward, back = with_activation_offload(forward, back, ctx, keeps=keeps_activations)
    checkpointed = checkpointed and not recompute.keep_outputs
    return BlockTapes(kind.name, with_tp_overlap(forward, ctx), with_tp_overlap(back, ctx), checkpointed)


Halves = dict[tuple[bool, bool], tuple[list[Op], dict[str, Tensor], str, str]]
"""Attention halves that kinds of layer share: ops, tensors, the output and what attention read, by whether attention is
windowed and whether it is unrotated."""


def layer_forward_tape(
    ctx: Context, primitives: Primitives, kind: CostedLayerKind, halves: Halves | None = None
) -> Tape:
    """The forward pass of one transformer layer, the same whatever is recomputed.

    ``halves`` keeps the attention half for the next kind of layer, where data parallelism does nothing ahead of it.
    """
    b = TapeBuilder()
    ctx = _without_rotation(ctx) if kind.unrotated else ctx
    hidden = float(ctx.model.hidden)
    x = b.tensor("x", ctx.shard_tokens * hidden * ctx.residual_element_bytes, use="residual")
    primitives.begin_block(b, ctx, kind.block_role, *layer_params_of_rank(ctx, kind.moe))
    shared = halves if halves is not None and not b.ops and b.mark is None else {}
    half = (kind.windowed, kind.unrotated)
    if half in shared:
        ops, tensors, mid, h = shared[half]
        b.ops, b.tensors = list(ops), dict(tensors)
    else:
        mid, h = attention_half(b, ctx, primitives, x, kind.windowed)
        shared[half] = list(b.ops), dict(b.tensors), mid, h
    if not ctx.model.shared_branch_norm:
        source = x if ctx.model.parallel_branches else mid
        h = source if ctx.model.norm_placement == "after" else primitives.norm(b, ctx, source, "mlp_norm", hidden)
    y = (
        primitives.moe(b, ctx, h)
        if kind.moe
        else primitives.mlp(b, ctx, h, "mlp", float(ctx.model.mlp.ffn_hidden or 0))
    )
    tape = b.tape((x,), (primitives.residual(b, ctx, mid, _finish_branch(b, ctx, primitives, y, "mlp"), "out"),))
    return tape if ctx.framework.routed_copies == "materialised" else with_dispatch_by_index(tape, ctx)


def _without_rotation(ctx: Context) -> Context:
    """The context of a layer that leaves the model's rotary embedding out."""
    return replace(ctx, model=ctx.model.model_copy(update={"positions": "none"}))


def _wrapped(
    tape: Tape, ctx: Context, primitives: Primitives, block: BlockRole, dense: ArrayK, experts: ArrayK
) -> Tape:  # fmt: skip
    return tape if primitives.wrap_backward is None else primitives.wrap_backward(tape, ctx, block, dense, experts)


def mtp_entry_tapes(ctx: Context, primitives: Primitives) -> BlockTapes:
    """Tapes of what a multi-token-prediction layer does before its transformer layer, which is like the model's last.

    Embedding of the next token beside the hidden state, two norms, a concatenation to 2h and a projection back to h
    (DeepSeek-V3, section 2.2). Its pass through the head is costed with the main one.
    """
    b = TapeBuilder()
    hidden = float(ctx.model.hidden)
    x = b.tensor("x", ctx.shard_tokens * hidden * ctx.residual_element_bytes, use="residual")
    token = primitives.norm(b, ctx, _embedded(b, ctx, primitives), "mtp.enorm", hidden)
    state = primitives.norm(b, ctx, x, "mtp.hnorm", hidden)
    joined = b.tensor("mtp.joined", 2 * ctx.shard_tokens * hidden * ctx.activation_element_bytes)
    moved = 4 * ctx.shard_tokens * hidden * ctx.activation_element_bytes
    memory_bound_op(b, "mtp.concat", (token, state), joined, bytes_=moved, back_bytes=moved)
    out = linear(b, ctx, joined, "mtp.project", m=ctx.shard_tokens, n=hidden, k=2 * hidden, saves=(joined,))
    forward = b.tape((x,), (out,))
    return BlockTapes("mtp", forward, derived_backward_tape(forward))


def embedding_tapes(ctx: Context, primitives: Primitives) -> BlockTapes:
    """Tapes of the token embedding, with the position embedding where it is learned."""
    b = TapeBuilder()
    out = _embedded(b, ctx, primitives)
    forward = b.tape((), (out,))
    params = embedding_params(ctx.model) / ctx.tp
    return BlockTapes(
        "embedding", forward, _wrapped(derived_backward_tape(forward), ctx, primitives, "embedding", params, 0 * params)
    )


def head_tapes(ctx: Context, primitives: Primitives) -> BlockTapes:
    """Tapes of the head: final norm, output layer, loss."""
    b = TapeBuilder()
    x = b.tensor("x", ctx.shard_tokens * float(ctx.model.hidden) * ctx.residual_element_bytes, use="residual")
    loss = primitives.head(b, ctx, x)
    forward = b.tape((x,), (loss,))
    # a tied output layer is gathered and reduced like one of its own
    params = ctx.model.vocab * ctx.model.hidden / ctx.tp + ctx.model.hidden
    return BlockTapes(
        "head", forward, _wrapped(derived_backward_tape(forward), ctx, primitives, "head", params, 0 * params)
    )
