"""Tokens beyond an expert's capacity, which Megatron-Core drops, and rows that it pads to the capacity.

Read in megatron_core 0.16.1 (transformer/moe/moe_utils.py, ``apply_router_token_dropping``; token_dispatcher.py,
``drop_and_pad``) and transformer_engine 2.20.2 (pytorch/module/fp8_padding.py).
"""

from __future__ import annotations

from mofa.blocks.capacity_rows import padded_rows_over_copies
from mofa.blocks.context import Context
from mofa.blocks.elementwise import BoolK, FloatK, rounded, where
from mofa.blocks.op import Op, OpBackward, TapeBuilder
from mofa.blocks.work import MemoryBound

DROP_KERNELS = 6
"""The largest scores of each expert, zeros, their copy, the marks, their bytes, and the scores by them. [-]"""
DROP_BYTES = 30.0
"""Moved by them for each token and expert, where scores are read once to find the largest. [B]"""


def drop_tokens_beyond_capacity(b: TapeBuilder, ctx: Context, scores: str, mapped: str) -> tuple[str, str]:
    """Scores and map of the tokens that each expert takes: those of its largest scores, up to its capacity.

    Padded to the capacity, an expert takes tokens that had not chosen it, at a score of zero. Back the gradient of the
    scores is multiplied by the marks.
    """
    spec = ctx.model.moe
    assert spec is not None
    if ctx.capacity_factor is None:
        return scores, mapped
    experts = float(spec.num_experts)
    table = ctx.shard_tokens * experts
    taken_scores = b.tensor("router.taken_scores", 4.0 * table)
    taken = b.tensor("router.taken_map", table, grad=False)
    back = OpBackward(9.0 * table, 1, like="megatron router_drop_bwd", elements=table, width=experts)
    b.add(
        Op("router.drop", "memory_bound", MemoryBound(DROP_BYTES * table, "megatron router_drop_fwd", table, experts),
           (scores, mapped), (taken_scores, taken), (taken_scores, taken), launches=DROP_KERNELS, back=back,
           step="router")
    )  # fmt: skip
    return taken_scores, taken


def rows_over_chosen_copies(ctx: Context) -> FloatK:
    """Rows that a rank sends over its tokens times the experts that each chose. [-]

    Dropped tokens that are not padded are told as sent.
    """
    if not ctx.fixed_rows or ctx.capacity_factor is None:
        return 1.0
    spec = ctx.model.moe
    assert spec is not None
    return padded_rows_over_copies(ctx.shard_tokens * spec.top_k, spec.num_experts, ctx.capacity_factor)


def fills_last_pieces(ctx: Context, rows: FloatK) -> BoolK:
    """Where experts' rows end within a piece of an fp8 product.

    All experts have as many rows where these are a capacity's, and hardly ever whole pieces otherwise.
    """
    if ctx.fp8 is None or not ctx.fixed_rows:
        return True
    return rounded(rows / ctx.local_experts) % ctx.fp8.aligned_rows != 0


def rows_of_whole_pieces(ctx: Context, rows: FloatK) -> FloatK:
    """Rows of a rank's experts, all of one number, with what fills each up to whole pieces. [tokens]"""
    assert ctx.fp8 is not None
    each, piece = rounded(rows / ctx.local_experts), ctx.fp8.aligned_rows
    return where(fills_last_pieces(ctx, rows), (each // piece + 1.0) * piece * ctx.local_experts, rows)
