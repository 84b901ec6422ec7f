"""Switches that recipes of Megatron-Core on Transformer Engine set: attention's library, biases, fused functions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mofa.blocks.build import BlockTapes
from mofa.blocks.work import Attention, MemoryBound
from mofa.specs.model import ModelSpec
from tests.blocks.small import build, context, framework, kept, llama

S, B, H, A, F = 256, 2, 512, 8, 1536
TOKENS = S * B


def layer(model: ModelSpec, **options: bool) -> BlockTapes:
    return build(context(model, framework("megatron", **options), seq_len=S, micro_batch=B))


def test_flash_attention_runs_where_it_is_asked_for() -> None:
    """``NVTE_FUSED_ATTN=0``: every product of attention is FlashAttention's, in a ring's steps too."""
    for cp in (1, 2):
        ctx = context(llama(), framework("megatron", attention="flash"), seq_len=S, micro_batch=B)
        ctx = replace(ctx, cp=np.array([float(cp)]), cp_ring=np.array([cp > 1]))
        works = [op.work for op in build(ctx).forward.ops if isinstance(op.work, Attention)]
        assert works and {work.backend for work in works} == {"flash"}


def test_dense_biases_cost_a_sum_of_rows_each() -> None:
    """Those of the output projection and of both linears of the MLP: backward reads each gradient once more."""
    biased = llama(mlp={"activation": "gelu", "ffn_hidden": F, "bias": True}, attention={
        "kind": "gqa", "num_heads": A, "num_kv_heads": A, "head_dim": H // A, "out_bias": True,
    })  # fmt: skip
    sums = {
        op.name: op.work.bytes for op in layer(biased).backward.ops
        if isinstance(op.work, MemoryBound) and op.work.like == "sum_rows"
    }  # fmt: skip
    assert sums == {
        "mlp.fc2.bias.backward": TOKENS * H * 2, "mlp.fc1.bias.backward": TOKENS * F * 2,
        "proj.bias.backward": TOKENS * H * 2,
    }  # fmt: skip
    plain = [
        op for op in layer(llama()).backward.ops if isinstance(op.work, MemoryBound) and op.work.like == "sum_rows"
    ]
    assert plain == []


def test_unfused_functions_are_eager_kernels_under_transformer_engine() -> None:
    """``apply_rope_fusion`` and ``bias_activation_fusion`` off, as Megatron's configuration has them: SwiGLU as
    Megatron's own layers run it, and cosine and sine kept for the backward."""
    model = llama(positions="rope")
    unfused = {op.name for op in layer(model, fused_rope=False, fused_swiglu=False).forward.ops}
    fused = {op.name for op in layer(model).forward.ops}
    assert {"mlp.silu", "mlp.offset", "mlp.product"} <= unfused - fused and "mlp.activation" in fused - unfused
    kept_more = kept(layer(model, fused_rope=False))
    assert {"q.cos", "q.sin", "k.cos", "k.sin"} <= set(kept_more) - set(kept(layer(model)))
