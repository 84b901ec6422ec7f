"""Megatron's product for queries, keys and values, and its split into heads, on more ranks than key-value heads too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import BoolK, FloatK, any_true, where
from mofa.blocks.op import Op, OpBackward, TapeBuilder
from mofa.blocks.work import Collective, MemoryBound

if TYPE_CHECKING:
    from mofa.specs.attention.record import Heads


def qkv_width(ctx: Context) -> ArrayK:
    """Width of the product on one rank: its share of all queries, keys and values, part of a head or not. (K,)"""
    return _whole_width(ctx) / ctx.tp


def _whole_width(ctx: Context) -> float:
    a = ctx.model.attention
    return float((a.num_heads + a.num_kv_heads) * a.d_qk + a.num_kv_heads * a.d_v)


def _ranks_share_heads(ctx: Context) -> BoolK:
    """Where there are more tensor-parallel ranks than key-value heads."""
    return ctx.tp > float(ctx.model.attention.num_kv_heads)


def gather_qkv_of_shared_heads(b: TapeBuilder, ctx: Context, product: str) -> str:
    """The product of all ranks where there are more ranks than key-value heads: a rank's part is no whole head there.

    The weight is cut evenly over ranks, whatever its heads. All parts are gathered and joined along their width
    (attention.py, get_query_key_value_tensors; mappings.py, _gather_along_last_dim), and sums go back.
    """
    shared = _ranks_share_heads(ctx)
    if not any_true(shared):
        return product
    whole_bytes = ctx.tokens * _whole_width(ctx) * ctx.activation_element_bytes
    held_bytes = where(shared, whole_bytes, b.tensors[product].bytes)  # where nothing is gathered they are the product
    gathered, joined = b.tensor("qkv.gathered", held_bytes), b.tensor("qkv.joined", held_bytes)
    work = Collective("all_gather", "tp", whole_bytes)
    y = b.add(Op("qkv.gather_width", "tp", work, (product,), (gathered,), present=shared, stream="tp"))
    return b.add(
        Op("qkv.join", "memory_bound", MemoryBound(2.0 * whole_bytes), (y,), (joined,), present=shared,
           back=OpBackward(2.0 * whole_bytes, 1))
    )  # fmt: skip


def split_qkv_into_heads(b: TapeBuilder, ctx: Context, product: str, value_name: str) -> Heads:
    """Queries, keys and values as views of what the product made; backward concatenates their gradients.

    Where ranks share heads, a view is of a rank's group: one key-value head, and those of the group's queries that are
    the rank's own. Backward lays the queries' gradients into zeros of the group, and the group's into zeros of all.
    """
    a, t, e = ctx.model.attention, ctx.tokens, ctx.activation_element_bytes
    sizes = [t * width * e for width in (ctx.heads * a.d_qk, ctx.kv_heads * a.d_qk, ctx.kv_heads * a.d_v)]
    q, k, v = (b.tensor(name, nbytes) for name, nbytes in zip(("q", "k", value_name), sizes, strict=True))
    moved: FloatK = 2.0 * sum(sizes)
    launches: FloatK = 1.0
    scratch: FloatK = 0.0
    shared = _ranks_share_heads(ctx)
    if any_true(shared):
        queries = t * (a.num_heads // a.num_kv_heads) * a.d_qk * e
        group = queries + t * (a.d_qk + a.d_v) * e
        laid_out = queries + 2.0 * sizes[0] + 2.0 * group + t * _whole_width(ctx) * e + 2.0 * group
        moved, launches = where(shared, laid_out, moved), where(shared, 5.0, 1.0)
        scratch = where(shared, group, 0.0)
    back = OpBackward(moved, launches, scratch, like="copy")
    b.add(Op("qkv.split", "memory_bound", None, (product,), (q, k, v), view=True, launches=0, back=back))
    return q, k, v
