"""PyTorch's first FSDP around plain modules: torchtitan's launches, MPT's fused QKV and biases.

Read in mosaicml/llm-foundry llmfoundry/models/layers/{attention,ffn}.py. A bias is added in the product's epilogue;
its gradient is a sum over the rows of the output's gradient, a kernel of its own. In fp8 the linears are Transformer
Engine's, the norms and the activation stay PyTorch's (composer 0.17, ``amp_fp8``: delayed scaling).
"""

from __future__ import annotations

from dataclasses import replace

from mofa.blocks.context import ArrayK, Context, Primitives
from mofa.blocks.frameworks.torchtitan import layer as torchtitan
from mofa.blocks.frameworks.torchtitan.linear import linear
from mofa.blocks.op import Op, OpBackward, TapeBuilder
from mofa.blocks.parts import add_bias
from mofa.blocks.work import MemoryBound


def qkv(b: TapeBuilder, ctx: Context, h: str) -> tuple[str, str, str]:
    """One product for q, k and v and views of it; backward concatenates their gradients."""
    if not ctx.framework.fused_qkv:
        return torchtitan.qkv(b, ctx, h)
    a, t, e = ctx.model.attention, ctx.tokens, ctx.activation_element_bytes
    q_width, k_width, v_width = ctx.heads * a.d_qk, ctx.kv_heads * a.d_qk, ctx.kv_heads * a.d_v
    fused = linear(b, ctx, h, "wqkv", m=t, n=q_width + k_width + v_width, k=float(ctx.model.hidden), wide_input=True)
    if a.qkv_bias:
        fused = _bias(b, ctx, fused, "wqkv", float((a.num_heads + a.num_kv_heads) * a.d_qk + a.num_kv_heads * a.d_v))
    q, k, v = (b.tensor(name, t * width * e) for name, width in (("q", q_width), ("k", k_width), ("v", v_width)))
    moved = 2 * t * (q_width + k_width + v_width) * e
    b.add(Op("wqkv.chunk", "memory_bound", None, (fused,), (q, k, v), view=True, launches=0,
             back=OpBackward(moved, 1, like="copy")))  # fmt: skip
    return q, k, v


def row_linear(b: TapeBuilder, ctx: Context, x: str, name: str, n: float, k: ArrayK) -> str:
    """The output projection, with its bias."""
    y = torchtitan.row_linear(b, ctx, x, name, n, k)
    return _bias(b, ctx, y, name, n) if ctx.model.attention.out_bias else y


def mlp(b: TapeBuilder, ctx: Context, h: str, name: str, width: float) -> str:
    """Two products and a GELU where they have biases, else torchtitan's feed-forward layer."""
    spec = ctx.model.mlp
    if spec is None or not spec.bias or spec.gated:
        return torchtitan.mlp(b, ctx, h, name, width)
    t, e, hidden = ctx.tokens, ctx.activation_element_bytes, float(ctx.model.hidden)
    up = linear(b, ctx, h, f"{name}.up", m=t, n=width, k=hidden, wide_input=True)
    up = _bias(b, ctx, up, f"{name}.up", width)
    act = b.tensor(f"{name}.gelu", t * width * e)
    moved = t * width * e
    b.add(Op(f"{name}.act", "memory_bound", MemoryBound(2 * moved, "gelu_fwd"), (up,), (act,), (up,),
             back=OpBackward(3 * moved, 1, like="gelu_bwd")))  # fmt: skip
    return _bias(b, ctx, linear(b, ctx, act, f"{name}.down", m=t, n=hidden, k=width), f"{name}.down", hidden)


def _bias(b: TapeBuilder, ctx: Context, x: str, name: str, width: float) -> str:
    """A bias, whose gradient Transformer Engine sums where it casts the output's."""
    return add_bias(b, x, name, width) if ctx.fp8 is None else x


PRIMITIVES: Primitives = replace(torchtitan.PRIMITIVES, qkv=qkv, row_linear=row_linear, mlp=mlp)
