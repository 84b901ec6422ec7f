"""Fused attention: lengths, heads and head sizes."""

from __future__ import annotations

import random

from mofa.calibrate.cases import FRESH_SEED, MODELS, SEED, Case, Item, Shape, grid_and_held_out_cases

SEQUENCES = ((512, 4), (1024, 1), (1024, 8), (2048, 1), (2048, 4), (4096, 1), (4096, 2), (6144, 1), (8192, 1),
             (12288, 1), (16384, 1), (32768, 1), (65536, 1))  # fmt: skip


def attention_cases() -> list[Case]:
    """Fused attention by backend, way, head sizes, grouped queries, lengths."""
    rng = random.Random(SEED + 2)
    grid: list[Item] = []
    sizes = (
        (64, 64, 64, 8),
        (128, 128, 32, 8),
        (128, 128, 32, 32),
        (128, 128, 8, 8),
        (128, 128, 4, 1),
        (192, 128, 16, 16),
    )
    for op in ("fwd", "bwd"):
        for variant in ("flash", "cudnn"):
            for d_qk, d_v, heads, kv_heads in sizes:
                for q_len, batch in SEQUENCES:
                    if heads * batch * q_len * q_len * (d_qk + d_v) > 5e13:
                        continue
                    for causal in (1, 0):
                        if not causal and q_len not in (1024, 2048, 8192, 16384):
                            continue
                        # what a rank of ring context parallelism meets: half of the keys, or of its own rows
                        kv_lens = [q_len] if causal else [q_len, 2 * q_len]
                        if not causal and q_len >= 8192:
                            kv_lens.append(q_len // 2)
                        for kv_len in kv_lens:
                            shape = attention_shape(batch, heads, kv_heads, q_len, kv_len, d_qk, d_v, causal)
                            grid.append((op, variant, "bf16", shape))
    return grid_and_held_out_cases(
        "attention",
        grid,
        held_out_attention_cases(rng),
        140,
        held_out_attention_cases(random.Random(FRESH_SEED + 2)),
        100,
    )


def held_out_attention_cases(rng: random.Random) -> list[Item]:
    """Attention of the bundled workloads over other lengths and batches."""
    held_out: list[Item] = []
    for _ in range(1000):
        model, tp = rng.choice(MODELS), rng.choice((1, 2, 4, 8))
        q_len = rng.choice((1024, 2048, 3072, 4096, 5120, 8192, 10240, 16384, 24576, 32768))
        causal = rng.choice((1, 1, 1, 0))
        batch = rng.choice((1, 1, 2, 4))
        heads, kv_heads = model.heads // tp, max(1, model.kv_heads // tp)
        d_v = 128 if model.mla else model.head_dim
        if heads * batch * q_len * q_len * (model.head_dim + d_v) > 4e13:
            continue
        shape = attention_shape(batch, heads, kv_heads, q_len, q_len, model.head_dim, d_v, causal)
        held_out.append((rng.choice(("fwd", "bwd")), rng.choice(("flash", "cudnn")), "bf16", shape))
    return held_out


def attention_shape(b: int, heads: int, kv_heads: int, q: int, kv: int, d_qk: int, d_v: int, causal: int) -> Shape:
    """Attention's sizes by their names in the CSV."""
    return {"b": b, "hq": heads, "hkv": kv_heads, "q": q, "kv": kv, "dqk": d_qk, "dv": d_v, "causal": causal}
