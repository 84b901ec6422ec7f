"""How Megatron's dispatchers put token rows in order around an exchange: by Transformer Engine's kernels or PyTorch's.

Read in megatron_core 0.16.1 (transformer/moe/moe_utils.py, token_dispatcher.py) and transformer_engine 2.20
(pytorch/permutation.py). A framework's ``permute_fusion`` chooses; PyTorch's wait for the host, and sum by atomics.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import BoolK, where
from mofa.blocks.frameworks.megatron.calls import timed_module_call
from mofa.blocks.frameworks.megatron.expert_capacity import rows_over_chosen_copies
from mofa.blocks.op import FloatK, Op, OpBackward, TapeBuilder
from mofa.blocks.work import HostSync, MemoryBound

WEIGHT = 4.0
"""Bytes of a row's probability, fp32 as the router computes. [B]"""
INDEX = 8.0
"""Of a row's place in PyTorch's ops. [B]"""
PAD_KERNELS = 9
"""Sum, negation, remainder, zeros, their cast, their ranks, the comparison, and the marks (``pad_routing_map``). [-]"""
PAD_BYTES = 32.0
"""Moved by them for each entry of the map: ranks are counted in 32 bits and summed up in 64. [B]"""


def expert_rows_sent_by_rank(ctx: Context) -> FloatK:
    """Rows that a rank sends, with those that fill up each expert's rows, or its capacity. [tokens]"""
    spec = ctx.model.moe
    assert spec is not None
    return ctx.shard_tokens * spec.top_k * rows_over_chosen_copies(ctx) + _filled(ctx)


def context_with_padded_rows(ctx: Context) -> Context:
    """The context with the rows that every sending rank adds to each expert's, where the router's map is padded."""
    more = _filled(ctx)
    if not more:
        return ctx
    return replace(ctx, rows_time=ctx.rows_time + more, rows_memory=ctx.rows_memory + more)


def _filled(ctx: Context) -> float:
    """Rows that fill up those of all experts on one rank: as many as come to an expert rank of all. [tokens]"""
    spec = ctx.model.moe
    assert spec is not None
    return (
        ctx.fp8.mean_padding_rows_per_expert * spec.num_experts
        if ctx.fp8 is not None and pads_routing_map(ctx)
        else 0.0
    )


def pads_routing_map(ctx: Context) -> bool:
    """Whether the router's map is padded to whole blocks of rows; rows padded to a capacity are that already."""
    return ctx.framework.router_padding and ctx.fp8 is not None and not ctx.fixed_rows


def pad_routing_map(b: TapeBuilder, ctx: Context, mapped: str) -> str:
    """Mark tokens that an expert did not get until its rows are whole blocks (``pad_routing_map``, eager kernels)."""
    if not pads_routing_map(ctx):
        return mapped
    spec = ctx.model.moe
    assert spec is not None
    table = ctx.shard_tokens * float(spec.num_experts)
    out = b.tensor("moe.padded_map", 0.0 * table, grad=False)
    return b.add(
        Op("moe.pad_map", "memory_bound", MemoryBound(PAD_BYTES * table), (mapped,), (out,), scratch=14.0 * table,
        view=True,
           launches=PAD_KERNELS, back=OpBackward(0.0, 0))
    )  # fmt: skip


def permute(b: TapeBuilder, ctx: Context, h: str, scores: str, mapped: str) -> tuple[str, str]:
    """Copies of rows by expert with their probabilities: (rows, probabilities)."""
    permutation = _fused_permute if ctx.framework.permute_fusion else _eager_permute
    return permutation(b, ctx, h, scores, mapped)


def _fused_permute(b: TapeBuilder, ctx: Context, h: str, scores: str, mapped: str) -> tuple[str, str]:
    """By a map of rows that is made in three kernels and kept (``moe_permute_with_probs``)."""
    spec = ctx.model.moe
    assert spec is not None
    experts, hidden, copies = float(spec.num_experts), float(ctx.model.hidden), expert_rows_sent_by_rank(ctx)
    row_ids = b.tensor("moe.row_ids", ctx.shard_tokens * (2.0 * experts + 1.0) * 4.0, grad=False)
    table = ctx.shard_tokens * experts
    b.add(
        Op("moe.row_map", "memory_bound", MemoryBound(21.0 * table, "te row_map", table, experts), (mapped,),
        (row_ids,),
           launches=3, back=OpBackward(0.0, 0), routing="row_map", step="dispatch_preprocess")
    )  # fmt: skip
    row = hidden * ctx.activation_element_bytes
    sent, weights = b.tensor("moe.sent", copies * row), b.tensor("moe.weights", copies * WEIGHT)
    elements, moved = copies * hidden, (copies + ctx.shard_tokens) * row
    back = OpBackward(moved, 1, like="te permute_bwd", elements=elements, width=hidden)
    b.add(
        Op("moe.permute", "memory_bound", MemoryBound(moved, "te permute_fwd", elements, hidden), (h, scores, row_ids),
           (sent, weights), (row_ids,), back=back, routing="permute", step="dispatch_preprocess")
    )  # fmt: skip
    return sent, weights


def _eager_permute(b: TapeBuilder, ctx: Context, h: str, scores: str, mapped: str) -> tuple[str, str]:
    """By masked selections, the rows' places and the probabilities, whose sizes the host waits for, and one by index.
    Rows padded to a capacity, whose sizes are known, are taken alike but for the waits.

    Kept are the places, the mask and the probabilities as they were selected from, in the experts' order; backward adds
    gradients of rows onto zeros by index, by atomics, and puts those of probabilities back in five kernels.
    """
    spec = ctx.model.moe
    assert spec is not None
    row, table, copies = (
        float(ctx.model.hidden) * ctx.activation_element_bytes,
        ctx.shard_tokens * float(spec.num_experts),
        expert_rows_sent_by_rank(ctx),
    )
    places = b.tensor("moe.row_ids", copies * INDEX, grad=False)
    mask = b.tensor("moe.mask", table, grad=False)
    turned = b.tensor("moe.turned_scores", table * WEIGHT, grad=False)
    sent, weights = b.tensor("moe.sent", copies * row), b.tensor("moe.weights", copies * WEIGHT)
    b.add(
        Op(
            "moe.mask",
            "memory_bound",
            MemoryBound(4.0 * table),
            (mapped,),
            (mask,),
            launches=4,
            back=OpBackward(0.0, 0),
        )
    )  # the mask by expert, the tokens' numbers, and how many are chosen
    if not ctx.fixed_rows:
        b.add(Op("moe.rows_sync", "host", HostSync()))
    b.add(
        Op("moe.select_rows", "memory_bound", MemoryBound(12.0 * table + 3.0 * INDEX * copies), (mask, scores),
           (places, turned), scratch=2.0 * INDEX * copies, launches=6, back=OpBackward(0.0, 0))
    )  # fmt: skip
    if not ctx.fixed_rows:
        b.add(Op("moe.weights_sync", "host", HostSync()))
    b.add(
        Op("moe.select_weights", "memory_bound", MemoryBound(table + (3.0 * INDEX + WEIGHT) * copies), (scores, mask),
           (weights,), (mask, turned), scratch=2.0 * INDEX * copies, launches=3,
           back=OpBackward((2.0 * WEIGHT + 2.0) * table, 5, autograd_nodes=3.0))
    )  # fmt: skip
    b.add(
        Op("moe.permute", "memory_bound", MemoryBound(2.0 * copies * row, "permute"), (h, places), (sent,), (places,),
           back=OpBackward(3.0 * copies * row, 2, like="index_add"), routing="permute", step="dispatch_preprocess")
    )  # fmt: skip
    return sent, weights


def unpermute(b: TapeBuilder, ctx: Context, y: str) -> str:
    """Rows added to their tokens; by PyTorch onto zeros, and back gathered by index."""
    row, hidden, copies = (
        float(ctx.model.hidden) * ctx.activation_element_bytes,
        float(ctx.model.hidden),
        expert_rows_sent_by_rank(ctx),
    )
    out = b.tensor("moe.out", ctx.shard_tokens * row)
    if not ctx.framework.permute_fusion:
        work = MemoryBound((3.0 * copies + ctx.shard_tokens) * row, "unpermute")
        back = OpBackward(2.0 * copies * row, 1, like="permute")
        return b.add(
            Op("moe.unpermute", "memory_bound", work, (y,), (out,), ("moe.row_ids",), launches=2, back=back,
               routing="unpermute")
        )  # fmt: skip
    elements = copies * hidden
    back = OpBackward((copies + ctx.shard_tokens) * row, 1, like="te unpermute_bwd", elements=elements, width=hidden)
    work = MemoryBound((copies + ctx.shard_tokens) * row, "te unpermute_fwd", elements, hidden)
    by = timed_module_call(ctx, "unpermute")
    return b.add(
        Op("moe.unpermute", "memory_bound", work, (y,), (out,), ("moe.row_ids",), back=back, module_call=by,
           routing="unpermute")
    )  # fmt: skip


def sort_by_expert(
    b: TapeBuilder, ctx: Context, x: str, weights: str, rows: ArrayK, memory_rows: ArrayK
) -> tuple[str, str]:
    """Rows and probabilities in the order of the experts."""
    out = _by_chunks(b, ctx, x, "sort", "moe.sorted", rows, memory_rows)
    by_expert = b.tensor("moe.sorted_weights", memory_rows * WEIGHT)
    eager = not ctx.framework.permute_fusion or ctx.fixed_rows
    moved = 2.0 * rows * WEIGHT if eager else 0.0
    views = _chunks(ctx) if eager and not ctx.fixed_rows else 0.0
    weights = b.add(
        Op("moe.sort_weights", "memory_bound", MemoryBound(moved, "copy" if eager else ""), (weights,), (by_expert,),
           launches=1 if eager else 0, present=_sorts(ctx), split_views=views,
           back=OpBackward(moved, 1, like="copy") if eager else OpBackward(0.0, 0), routing="sort")
    )  # fmt: skip
    return out, weights


def sort_by_source_rank(b: TapeBuilder, ctx: Context, y: str, rows: ArrayK, memory_rows: ArrayK) -> str:
    """The experts' results in the order in which they are sent back."""
    return _by_chunks(b, ctx, y, "unsort", "moe.unsorted", rows, memory_rows)


def _by_chunks(
    b: TapeBuilder, ctx: Context, x: str, routing: Literal["sort", "unsort"], out: str, rows: ArrayK,
    memory_rows: ArrayK,
) -> str:  # fmt: skip
    """Chunks of an expert and a sender in another order: by a map of rows, which is kept, or cut and joined, which
    keeps nothing (``sort_chunks_by_idxs``)."""
    if ctx.fixed_rows:
        return _turned_around(b, ctx, x, routing, out, rows, memory_rows)
    name, hidden = f"moe.{routing}", float(ctx.model.hidden)
    moved, elements = 2 * rows * hidden * ctx.activation_element_bytes, rows * hidden
    y = b.tensor(out, memory_rows * hidden * ctx.activation_element_bytes)
    if not ctx.framework.permute_fusion:
        back = OpBackward(moved, 2, like="copy")
        return b.add(
            Op(name, "memory_bound", MemoryBound(moved, "copy"), (x,), (y,), launches=2, present=_sorts(ctx), back=back,
               split_views=_chunks(ctx), routing=routing)
        )  # fmt: skip
    place = b.tensor(f"{name}_map", where(_sorts(ctx), memory_rows * 4.0, 0.0), grad=False)
    back = OpBackward(moved, 1, like="te sort_bwd", elements=elements, width=hidden)
    work = MemoryBound(moved, "te sort_fwd", elements, hidden)
    by = timed_module_call(ctx, "sort_chunks")
    return b.add(
        Op(name, "memory_bound", work, (x,), (y, place), (place,), launches=2, present=_sorts(ctx), back=back,
        module_call=by,
           routing=routing)
    )  # fmt: skip


def _turned_around(
    b: TapeBuilder, ctx: Context, x: str, routing: Literal["sort", "unsort"], out: str, rows: ArrayK,
    memory_rows: ArrayK,
) -> str:  # fmt: skip
    """Chunks of one number of rows each, whose two first dimensions change places, in a copy (``drop_and_pad``); rows
    of one sender lie in the experts' order already."""
    each = float(ctx.model.hidden) * ctx.activation_element_bytes
    y = b.tensor(out, memory_rows * each)
    work, back = MemoryBound(2 * rows * each, "copy"), OpBackward(2 * rows * each, 1, like="copy")
    return b.add(
        Op(f"moe.{routing}", "memory_bound", work, (x,), (y,), present=_sorts(ctx), back=back, routing=routing)
    )


def _chunks(ctx: Context) -> FloatK:
    """Of an expert and a rank that sends to it. [-]"""
    return ctx.local_experts * ctx.ep * ctx.etp


def _sorts(ctx: Context) -> BoolK:
    """Where a rank sorts rows by expert: with several experts; other dispatchers only where several ranks send."""
    several = ctx.local_experts > 1
    if ctx.fixed_rows:
        return several & (ctx.ep * ctx.etp > 1)
    return several if ctx.framework.dispatcher == "alltoall" else several & (ctx.ep > 1)
