"""How Megatron-Core's local spec brings tokens to experts and back: router, permutation and sorting, all unfused.

Read in megatron_core 0.16.1 (router.py, moe_utils.py, token_dispatcher.py); kernels counted in profiles.
"""

from __future__ import annotations

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import any_true
from mofa.blocks.frameworks.megatron import linear as base
from mofa.blocks.op import FloatK, Op, OpBackward, TapeBuilder
from mofa.blocks.parts import linear, mark_dispatcher_renewal
from mofa.blocks.work import Collective, HostSync, MemoryBound


def router(b: TapeBuilder, ctx: Context, h: str) -> str:
    """Gating product, 16-bit scores, top-k, and the map of tokens to experts: top-k and its sort, a softmax between two
    casts, and the scores and the choice scattered into zeros that are copied first (12 kernels in a profile of
    mc1-qwen30b-2l-traced)."""
    since = len(b.ops)
    moe = ctx.model.moe
    assert moe is not None
    s, experts = ctx.shard_tokens, float(moe.num_experts)
    logits = linear(
        b, ctx, h, "router.gate", m=s, n=experts, k=ctx.model.hidden, saves=(h,), format_="bf16",
        grad_bytes_per_param=2.0, accumulate_bytes_per_param=ctx.framework.accumulation_bytes_per_param,
    )  # fmt: skip
    scores = b.tensor("router.scores", s * experts * 4.0)
    chosen = b.tensor("router.chosen", s * (experts * 1.0 + moe.top_k * 8.0), grad=False)
    launches = 14 if moe.score == "sigmoid" else 12
    if moe.num_groups > 1:
        launches += 7
    b.add(
        Op("router.topk", "memory_bound",
        MemoryBound(launches * s * experts * 4.0, "router_topk", s * experts, experts),
           (logits,), (scores, chosen),
           (scores, chosen), launches=launches,
           back=OpBackward(4 * s * experts * 4.0, 7, autograd_nodes=7.0),
        )  # back through scatter, casts, softmax and gather
    )  # fmt: skip
    base.mark_python_autograd_function_counts(b, since, "router.gate", 1.0)  # RouterGatingLinearFunction
    return scores


def gather_expert_counts(b: TapeBuilder, ctx: Context) -> tuple[str, ...]:
    """All ranks' numbers of tokens for each expert, gathered where experts are split (``preprocess``); with the sums
    around it six kernels."""
    spec = ctx.model.moe
    assert spec is not None
    ranks = ctx.ep * ctx.etp
    if not any_true(ranks > 1):
        return ()
    nbytes = 8.0 * spec.num_experts * ranks
    counts = b.tensor("moe.counts", nbytes, grad=False)
    b.add(
        Op("moe.counts", "ep", Collective("all_gather", "ep", nbytes), (), (counts,), launches=6,
        autograd_functions=1.0,
           present=ranks > 1, stream="ep", back=OpBackward(0.0, 0))
    )  # fmt: skip
    return (counts,)


def permute(
    b: TapeBuilder, ctx: Context, x: str, scores: str, tokens: ArrayK, copies: FloatK, memory_rows: FloatK,
    counted: tuple[str, ...] = (),
) -> str:  # fmt: skip
    """Select the rows for the experts: the masked selections wait for their sizes; ``tokens`` rows in.

    Keeps the 8-byte row indices and the mask; backward adds the rows' gradients onto zeros by index (moe_utils.py,
    permute: ``index_select``) and scatters those of the probabilities, two and five kernels of four nodes.
    Kernels as in a profile of mc1-qwen30b-2l-traced. Up to the first selection's size: counts and masks with their
    copies to the host. Up to the second's: the selection of rows. Up to the rows themselves: that of probabilities.
    """
    spec = ctx.model.moe
    assert spec is not None
    row, table = float(ctx.model.hidden) * ctx.activation_element_bytes, tokens * spec.num_experts
    sent = b.tensor("moe.sent", memory_rows * row)
    rows = b.tensor("moe.row_ids", memory_rows * 8.0, grad=False)
    mask = b.tensor("moe.mask", table, grad=False)
    mark_dispatcher_renewal(b)
    b.add(
        Op(
            "moe.select",
            "memory_bound",
            MemoryBound(30.0 * table),
            (scores, *counted),
            (rows, mask),
            launches=10,
            back=OpBackward(0.0, 0),
        )
    )
    for i, kernels in enumerate((8, 4)[: max(ctx.framework.dispatch_syncs - 1, 0)]):
        b.add(Op(f"moe.sync{i}", "host", HostSync()))
        b.add(Op(f"moe.select{i}", "memory_bound", MemoryBound(0.0), (), (), launches=kernels, back=OpBackward(0.0, 0)))
    b.add(
        Op("moe.permute", "memory_bound", MemoryBound(2 * copies * row, "permute"), (x, scores), (sent,), (rows, mask),
           launches=1, back=OpBackward(3 * copies * row + 8.0 * table, 7, like="index_add", autograd_nodes=4.0),
           routing="permute")
    )  # fmt: skip
    if ctx.framework.dispatch_syncs:
        b.add(Op("moe.sync", "host", HostSync()))
    return sent


def unpermute(b: TapeBuilder, ctx: Context, y: str, tokens: ArrayK, copies: FloatK) -> str:
    """Add the rows back to their tokens, onto zeros; backward gathers them (moe_utils.py, unpermute)."""
    row = float(ctx.model.hidden) * ctx.activation_element_bytes
    out = b.tensor("moe.summed", tokens * row)
    b.add(
        Op("moe.unpermute", "memory_bound", MemoryBound((3 * copies + tokens) * row, "unpermute"), (y,), (out,),
           ("moe.row_ids",), launches=2, back=OpBackward(2 * copies * row, 1, like="permute"), routing="unpermute")
    )  # fmt: skip
    return out


def reorder_expert_chunks(b: TapeBuilder, ctx: Context, x: str, name: str, rows: FloatK, memory_rows: FloatK) -> str:
    """Split into chunks, one for each expert here and rank that sends to it, and concatenate in another order; nothing
    kept. On the way to the experts their probabilities as well (moe_utils.py, sort_chunks_by_idxs)."""
    row = float(ctx.model.hidden) * ctx.activation_element_bytes
    chunks = ctx.local_experts * ctx.ep * ctx.etp
    out = b.tensor(f"moe.{name}ed", memory_rows * row)
    return b.add(
        Op(f"moe.{name}", "memory_bound", MemoryBound(2 * rows * row, "copy"), (x,), (out,), launches=2,
           present=ctx.local_experts > 1, back=OpBackward(2 * rows * row, 2, like="copy"),
           split_views=(2.0 if name == "sort" else 1.0) * chunks)
    )  # fmt: skip
