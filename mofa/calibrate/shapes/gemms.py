"""Matrix products: a linear layer's three, an expert's, and those whose widths 16 bytes do not divide."""

from __future__ import annotations

import random
from collections.abc import Iterator

from mofa.calibrate.cases import (
    FRESH_SEED,
    MODELS,
    SEED,
    Case,
    Item,
    Shape,
    WorkloadDims,
    grid_and_held_out_cases,
    log_uniform_multiple,
    random_expert_loads_text,
)

FAR_GEMMS = ((2048, 202048, 2880), (65536, 1024, 4096), (131072, 2048, 2048), (8192, 53248, 16384), (48, 2048, 4096),
             (32, 7168, 2048), (4096, 128, 4096), (8192, 4096, 96))  # fmt: skip
"""Tokens, out and in features of LM heads, of weight gradients over many tokens, of one expert's few rows."""
LAYOUTS = ("fwd", "dgrad", "wgrad")


def linear_shapes(model: WorkloadDims, tp: int) -> Iterator[tuple[int, int]]:
    """(out, in) features of each weight matrix of a block on one of ``tp`` ranks, and of the LM head."""
    h, f, t = model.hidden, model.ffn, tp
    if model.mla:
        yield from ((1536, h), (model.heads * 192 // t, 1536), (576, h), (model.heads * 256 // t, 512))
        yield h, model.heads * 128 // t
    else:
        yield (model.heads + 2 * max(model.kv_heads, t)) * model.head_dim // t, h
        yield h, model.heads * model.head_dim // t
    yield from ((f // t, h), (2 * f // t, h), (h, f // t), (-(-model.vocab // (16 * t)) * 16, h))
    if model.experts:
        yield from ((model.expert_hidden, h), (2 * model.expert_hidden, h), (h, model.expert_hidden))


def gemm_shape(layout: str, tokens: int, out: int, inner: int) -> Shape:
    """The product's own (m, n, k) in each of a linear layer's three products."""
    shapes: dict[str, Shape] = {
        "fwd": {"m": tokens, "n": out, "k": inner},
        "dgrad": {"m": tokens, "n": inner, "k": out},
        "wgrad": {"m": out, "n": inner, "k": tokens},
    }
    return shapes[layout]


def gemm_cases() -> list[Case]:
    """Dense products: a lattice, random shapes, the far ends."""
    rng = random.Random(SEED)
    grid: list[Item] = []
    for layout in LAYOUTS:
        for tokens in (128, 512, 2048, 4096, 8192, 16384):
            for out, inner in ((1024, 4096), (4096, 1024), (4096, 4096), (14336, 4096), (4096, 14336), (2048, 8192)):
                grid.append((layout, "cublas", "bf16", gemm_shape(layout, tokens, out, inner)))
        for tokens in (1024, 4096):
            grid.append((layout, "cublas", "bf16", gemm_shape(layout, tokens, 128256, 4096)))
            grid.append((layout, "cublas", "bf16", gemm_shape(layout, tokens, 16032, 8192)))
    for dtype, num in (("bf16", 200), ("fp8", 160), ("fp32", 12)):
        for i in range(num * (3 if dtype == "bf16" else 1)):
            layout = LAYOUTS[i % 3] if dtype == "bf16" else "fwd"
            tokens = log_uniform_multiple(rng, 64, 32768, 64)
            out, inner = log_uniform_multiple(rng, 256, 32768, 64), log_uniform_multiple(rng, 256, 24576, 64)
            while tokens * out * inner > 3e12 / (40 if dtype == "fp32" else 1):
                tokens = max(64, tokens // 128 * 64)
            grid.append((layout, "cublas", dtype, gemm_shape(layout, tokens, out, inner)))
    for layout in LAYOUTS:
        for tokens, out, inner in FAR_GEMMS:
            grid.append((layout, "cublas", "bf16", gemm_shape(layout, tokens, out, inner)))
    for tokens, out, inner in ((4096, 102400, 7168), (8192, 53248, 16384), (64, 4096, 7168), (16384, 576, 7168)):
        grid.append(("fwd", "cublas", "fp8", gemm_shape("fwd", tokens, out, inner)))
    return grid_and_held_out_cases(
        "gemm", grid, held_out_gemm_cases(rng), 300, held_out_gemm_cases(random.Random(FRESH_SEED)), 150
    )


def unaligned_product_cases() -> list[Case]:
    """Products of a linear layer one of whose widths is 1, 2 or 4 elements beside what 16 bytes hold; as held-out ones
    the LM heads of vocabularies that are published so (Granite 49,155, GPT-2 50,257, Vicuna 32,001, Qwen2's tokens
    151,646, ChatGLM's 130,044 and a router of 60 experts)."""
    grid: list[Item] = []
    for layout in LAYOUTS:
        for beside in (1, 2, 4):
            for tokens in (1024, 4096, 16384):
                for out, inner in ((4096, 1536), (16384, 4096)):
                    grid.append((layout, "cublas", "bf16", gemm_shape(layout, tokens, out + beside, inner)))
                grid.append((layout, "cublas", "bf16", gemm_shape(layout, tokens, 4096, 2048 + beside)))
            for tokens, out, inner in (
                (4096, 50256 + beside, 2048),
                (2048, 2048, 8192 + beside),
                (8192, 56 + beside, 2048),
            ):
                grid.append((layout, "cublas", "bf16", gemm_shape(layout, tokens, out, inner)))
    held_out: list[Item] = [
        (layout, "cublas", "bf16", gemm_shape(layout, tokens, out, inner))
        for out, inner in ((49155, 1536), (50257, 1600), (32001, 4096), (151646, 1024), (130044, 2048), (60, 1024))
        for tokens in (2048, 8192)
        for layout in LAYOUTS
    ]
    return grid_and_held_out_cases("unaligned_gemm", grid, held_out, len(held_out))


def held_out_gemm_cases(rng: random.Random) -> list[Item]:
    """Dense products of the bundled workloads."""
    held_out: list[Item] = []
    for i in range(3000):
        model, tp = rng.choice(MODELS), rng.choice((1, 2, 4, 8))
        out, inner = rng.choice(list(linear_shapes(model, tp)))
        tokens = rng.choice((1, 1, 2, 4)) * model.seq_len // rng.choice((1, 1, 2, 4, 8))
        if model.experts and model.expert_hidden in (out, out // 2, inner):
            tokens = max(64, tokens * model.top_k // model.experts // 16 * 16)
        dtype = "fp8" if i % 5 == 4 else "bf16"
        layout = LAYOUTS[i % 3] if dtype == "bf16" else "fwd"
        shape = gemm_shape(layout, tokens, out, inner)
        aligned = all(int(v) % 16 == 0 for v in shape.values()) or dtype == "bf16"
        if aligned and tokens * out * inner < 6e12:
            held_out.append((layout, "cublas", dtype, shape))
    return held_out


def grouped_product_cases() -> list[Case]:
    """Products of one expert each, balanced and skewed."""
    rng = random.Random(SEED + 1)
    grid: list[Item] = []
    for i in range(240):
        experts = rng.choice((1, 2, 4, 8, 16, 32, 64, 128))
        tokens = log_uniform_multiple(rng, 16 * experts, min(131072, 8192 * experts), 16)
        n, k = log_uniform_multiple(rng, 512, 16384, 128), log_uniform_multiple(rng, 512, 8192, 128)
        skew = rng.choice((0.0, 0.0, 0.5, 1.0))
        if experts * n * k < 8e9 and tokens * n * k < 2e12:
            loads = random_expert_loads_text(rng, tokens, experts, skew)
            grid.append((LAYOUTS[i % 3], "grouped_mm", "bf16", {"n": n, "k": k, "skew": str(skew), "loads": loads}))
    far = random.Random(SEED + 21)
    for i in range(90):  # many experts, and expert widths that tensor parallelism makes narrow
        experts = far.choice((1, 4, 16, 64, 192, 256, 384))
        tokens = log_uniform_multiple(far, 32 * experts, min(163840, 16384 * experts), 16)
        n, k = log_uniform_multiple(far, 128, 32768, 16), log_uniform_multiple(far, 176, 8192, 16)
        n, k = (k, n) if far.random() < 0.4 else (n, k)
        if experts * n * k < 9e9 and tokens * n * k < 3e12:
            loads = random_expert_loads_text(far, tokens, experts, far.choice((0.0, 0.3, 0.7)))
            grid.append((LAYOUTS[i % 3], "grouped_mm", "bf16", {"n": n, "k": k, "skew": "far", "loads": loads}))
    return grid_and_held_out_cases(
        "grouped_gemm",
        grid,
        held_out_grouped_product_cases(rng),
        90,
        held_out_grouped_product_cases(random.Random(FRESH_SEED + 1)),
        80,
    )


def held_out_grouped_product_cases(rng: random.Random) -> list[Item]:
    """Products of the bundled workloads' experts, under expert and tensor parallelism."""
    held_out: list[Item] = []
    moes = [m for m in MODELS if m.experts]
    for i in range(1000):
        model, tp = rng.choice(moes), rng.choice((1, 1, 2, 4, 8))
        local = max(1, model.experts // rng.choice((1, 2, 4, 8, 16, 32, 64)))
        tokens = model.seq_len * rng.choice((1, 2, 4)) * model.top_k * local // model.experts
        tokens *= rng.choice((1, 2, 4, 8))
        f, h = model.expert_hidden // tp, model.hidden
        n, k = rng.choice(((f, h), (2 * f, h), (h, f)))
        skew = rng.choice((0.0, 0.0, 0.3, 0.7))
        if n % 16 or k % 16 or tokens < 16 * local or local * n * k > 8e9 or tokens * n * k > 3e12 or tokens > 200000:
            continue
        loads = random_expert_loads_text(rng, tokens, local, skew)
        held_out.append((LAYOUTS[i % 3], "grouped_mm", "bf16", {"n": n, "k": k, "skew": str(skew), "loads": loads}))
    return held_out
