"""The shapes of every family: a grid to fit on, and held-out ones from the bundled workloads under TP 1 to 8."""

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
    expert_loads,
    log_uniform,
    split_cases,
)
from mofa.calibrate.shapes.host_ops import autograd_cases, host_cases, sequence_cases
from mofa.calibrate.shapes.routed import routed_cases
from mofa.calibrate.shapes.te_bf16 import (
    TE_BF16_FAMILIES,
    te_attention_cases,
    te_expert_cases,
    te_expert_host_cases,
    te_op_cases,
    te_wgrad_cases,
)
from mofa.calibrate.shapes.te_fp8 import FAMILIES as TE_FAMILIES
from mofa.calibrate.shapes.te_fp8 import te_cases
from mofa.calibrate.shapes.te_throttled import FAMILY as TE_THROTTLED
from mofa.calibrate.shapes.te_throttled import te_throttled_cases

FAR_GEMMS = ((2048, 202048, 2880), (65536, 1024, 4096), (131072, 2048, 2048), (8192, 53248, 16384), (48, 2048, 4096),
             (32, 7168, 2048), (4096, 128, 4096), (8192, 4096, 96))  # fmt: skip
"""Tokens, out and in features of LM heads, of weight gradients over many tokens, of one expert's few rows."""
SEQUENCES = ((512, 4), (1024, 1), (1024, 8), (2048, 1), (2048, 4), (4096, 1), (4096, 2), (6144, 1), (8192, 1),
             (12288, 1), (16384, 1), (32768, 1), (65536, 1))  # fmt: skip
LAYOUTS = ("fwd", "dgrad", "wgrad")
MIN_POINTS = 5
"""Rows of a kind that a fit needs. [-]"""
QUICK_COMPILED = ("rmsnorm_fwd", "swiglu_fwd", "residual_add")
QUICK_SUSTAINED = (("gemm", "bf16", 8192, 8192), ("gemm", "fp8", 8192, 8192), ("attention_flash", "bf16", 8192, 4096),
                   ("attention_cudnn", "bf16", 8192, 4096), ("attention_cudnn_bwd", "bf16", 8192, 4096))  # fmt: skip
ONE_GPU_FAMILIES = ("gemm", "grouped_gemm", "attention", "memory_bound", "compiled", "copy", "host", "autograd",
                    "routed", "sustained", "throttled", "sequence", "unaligned_gemm")  # fmt: skip
COLLECTIVE_FAMILIES = ("collective", "overlap", "dependent_collective")
SEVERAL_GPU_FAMILIES = (*ONE_GPU_FAMILIES, *COLLECTIVE_FAMILIES)
FAMILIES = (*SEVERAL_GPU_FAMILIES, *TE_FAMILIES, *TE_BF16_FAMILIES, TE_THROTTLED, "chunked_moe")
"""What can be named. Only where they are named are whole layers measured, as no curve comes from them, and what needs
Transformer Engine on the machine."""


def family_cases(
    family: str, *, quick: bool = False, full: bool = True, gpus: int = 1, fresh: bool = False
) -> list[Case]:
    """All cases of a family, in the order in which they are measured; ``quick`` a quarter, else half of the grid.

    ``fresh`` adds the second held-out set. ``gpus`` 0 is a host without any.
    """
    made = {
        "gemm": gemm_cases, "grouped_gemm": grouped_cases, "attention": attention_cases,
        "memory_bound": memory_cases, "compiled": compiled_cases, "copy": copy_cases, "host": host_cases,
        "autograd": autograd_cases, "routed": routed_cases, "sustained": sustained_cases, "sequence": sequence_cases,
        "unaligned_gemm": unaligned_cases, "te_experts": te_expert_cases, "te_attention": te_attention_cases,
        "te_wgrad": te_wgrad_cases, "te_expert_host": te_expert_host_cases, "te_ops": te_op_cases,
        "throttled": throttled_cases, TE_THROTTLED: te_throttled_cases,
    }  # fmt: skip
    if family == "chunked_moe":
        from mofa.calibrate.shapes.chunked import chunked_cases

        return [c for c in chunked_cases(gpus) if fresh or c.split != "fresh"]
    if family in TE_FAMILIES:
        return te_cases(family)
    if family in COLLECTIVE_FAMILIES:
        from mofa.calibrate.shapes.collective import collective_cases, dependent_cases, overlap_cases

        made_for = {"collective": collective_cases, "overlap": overlap_cases, "dependent_collective": dependent_cases}
        cases = made_for[family](gpus)
    else:
        cases = made[family]()
    cases = cases if fresh else [c for c in cases if c.split != "fresh"]
    if quick:
        return _quick(family, cases)
    if (
        family
        in (
            "host",
            "autograd",
            "sequence",
            "copy",
            "sustained",
            "throttled",
            TE_THROTTLED,
            "overlap",
            "dependent_collective",
            *TE_BF16_FAMILIES,
        )
        or full
    ):
        return cases
    return _grid(cases)[::2] + [c for c in cases if c.split != "grid"]


def _grid(all_cases: list[Case]) -> list[Case]:
    return [c for c in all_cases if c.split == "grid"]


def _quick(family: str, all_cases: list[Case]) -> list[Case]:
    """A quarter; of what is fitted op by op as many of each as a fit needs; of what takes seconds each a few."""
    if family in ("host", "copy", "overlap"):
        return all_cases
    if family in ("autograd", "sequence", "routed", "throttled", TE_THROTTLED, "unaligned_gemm", *TE_BF16_FAMILIES):
        return []
    if family == "sustained":
        return [c for c in all_cases if (c.op, c.dtype, c.size("m"), c.size("n")) in QUICK_SUSTAINED]
    if family == "compiled":
        return _thin([c for c in _grid(all_cases) if c.op in QUICK_COMPILED])
    held_out = [c for c in all_cases if c.split != "grid"][::4]
    if family == "memory_bound":
        return _thin(_grid(all_cases)) + held_out
    if family == "attention":
        return [c for c in _grid(all_cases) if c.size("q") <= 32768][::4] + held_out
    return _grid(all_cases)[::4] + held_out


def _thin(all_cases: list[Case]) -> list[Case]:
    """The fewest of each op that a fit takes, from the smallest to the largest."""
    by_op: dict[str, list[Case]] = {}
    for case in all_cases:
        by_op.setdefault(case.op, []).append(case)
    thinned = []
    for of_op in by_op.values():
        last, num = len(of_op) - 1, min(MIN_POINTS, len(of_op))
        thinned += [of_op[round(i * last / max(1, num - 1))] for i in range(num)]
    return thinned


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
            tokens = log_uniform(rng, 64, 32768, 64)
            out, inner = log_uniform(rng, 256, 32768, 64), log_uniform(rng, 256, 24576, 64)
            while tokens * out * inner > 3e12 / (40 if dtype == "fp32" else 1):
                tokens = max(64, tokens // 128 * 64)
            grid.append((layout, "cublas", dtype, gemm_shape(layout, tokens, out, inner)))
    for layout in LAYOUTS:
        for tokens, out, inner in FAR_GEMMS:
            grid.append((layout, "cublas", "bf16", gemm_shape(layout, tokens, out, inner)))
    for tokens, out, inner in ((4096, 102400, 7168), (8192, 53248, 16384), (64, 4096, 7168), (16384, 576, 7168)):
        grid.append(("fwd", "cublas", "fp8", gemm_shape("fwd", tokens, out, inner)))
    return split_cases("gemm", grid, held_out_gemms(rng), 300, held_out_gemms(random.Random(FRESH_SEED)), 150)


def unaligned_cases() -> list[Case]:
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
    return split_cases("unaligned_gemm", grid, held_out, len(held_out))


def held_out_gemms(rng: random.Random) -> list[Item]:
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


def grouped_cases() -> list[Case]:
    """Products of one expert each, balanced and skewed."""
    rng = random.Random(SEED + 1)
    grid: list[Item] = []
    for i in range(240):
        experts = rng.choice((1, 2, 4, 8, 16, 32, 64, 128))
        tokens = log_uniform(rng, 16 * experts, min(131072, 8192 * experts), 16)
        n, k = log_uniform(rng, 512, 16384, 128), log_uniform(rng, 512, 8192, 128)
        skew = rng.choice((0.0, 0.0, 0.5, 1.0))
        if experts * n * k < 8e9 and tokens * n * k < 2e12:
            loads = expert_loads(rng, tokens, experts, skew)
            grid.append((LAYOUTS[i % 3], "grouped_mm", "bf16", {"n": n, "k": k, "skew": str(skew), "loads": loads}))
    far = random.Random(SEED + 21)
    for i in range(90):  # many experts, and expert widths that tensor parallelism makes narrow
        experts = far.choice((1, 4, 16, 64, 192, 256, 384))
        tokens = log_uniform(far, 32 * experts, min(163840, 16384 * experts), 16)
        n, k = log_uniform(far, 128, 32768, 16), log_uniform(far, 176, 8192, 16)
        n, k = (k, n) if far.random() < 0.4 else (n, k)
        if experts * n * k < 9e9 and tokens * n * k < 3e12:
            loads = expert_loads(far, tokens, experts, far.choice((0.0, 0.3, 0.7)))
            grid.append((LAYOUTS[i % 3], "grouped_mm", "bf16", {"n": n, "k": k, "skew": "far", "loads": loads}))
    return split_cases(
        "grouped_gemm",
        grid,
        held_out_grouped_products(rng),
        90,
        held_out_grouped_products(random.Random(FRESH_SEED + 1)),
        80,
    )


def held_out_grouped_products(rng: random.Random) -> list[Item]:
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
        loads = expert_loads(rng, tokens, local, skew)
        held_out.append((LAYOUTS[i % 3], "grouped_mm", "bf16", {"n": n, "k": k, "skew": str(skew), "loads": loads}))
    return held_out


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
    return split_cases(
        "attention", grid, held_out_attention(rng), 140, held_out_attention(random.Random(FRESH_SEED + 2)), 100
    )


def held_out_attention(rng: random.Random) -> list[Item]:
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


ROW_OPS = ("rmsnorm_fwd", "rmsnorm_bwd", "layernorm_fwd", "layernorm_bwd", "swiglu_fwd", "swiglu_bwd", "gelu_fwd",
           "gelu_bwd", "silu", "mul", "residual_add", "dropout", "rope_complex", "rope_half", "cast_up", "cast_down",
           "accumulate", "permute", "unpermute", "embedding", "embedding_bwd", "softmax_fp32")  # fmt: skip
BIASES = ((4096, 4096), (4096, 16384), (8192, 2048), (8192, 8192), (16384, 4096), (16384, 15360), (32768, 2048),
          (32768, 6144), (32768, 10240), (65536, 1536))  # fmt: skip
"""Rows and widths of gradients that a bias's gradient sums over the rows."""
LOSS_OPS = ("cross_entropy_fwd", "cross_entropy_bwd")
OPTIMIZER_OPS = ("adam_fused", "adam_foreach", "grad_norm", "grad_clip", "zero")
ROUTER_OPS = ("router_softmax", "router_topk")
COMPILED_OPS = ("rmsnorm_fwd", "rmsnorm_bwd", "swiglu_fwd", "swiglu_bwd", "rope_half", "residual_add",
                "add_rmsnorm_fwd", "cross_entropy_fwd", "cross_entropy_bwd", "cast_up")  # fmt: skip


def memory_cases() -> list[Case]:
    """Memory-bound ops, eager."""
    rng = random.Random(SEED + 3)
    grid: list[Item] = []
    for op in ROW_OPS:
        for tokens, width in ((1024, 1024), (2048, 2048), (4096, 2048), (4096, 4096), (8192, 4096), (8192, 8192),
                              (4096, 14336), (16384, 4096), (16384, 8192), (3072, 5120), (32768, 7168), (1024, 16384),
                              (16384, 1536), (512, 28672), (65536, 512), (4096, 53248), (4096, 3072), (12288, 6144),
                              (2048, 12288)):  # fmt: skip
            grid.append((op, "eager", "bf16", {"tokens": tokens, "width": width}))
    for op in LOSS_OPS:
        for tokens, vocab in ((1024, 32000), (2048, 128256), (4096, 128256), (8192, 128256), (4096, 16032),
                              (8192, 64128), (2048, 151936), (4096, 50304), (3072, 6144), (6144, 10240), (4096, 20480),
                              (2048, 202048)):  # fmt: skip
            grid.append((op, "eager", "bf16", {"tokens": tokens, "width": vocab}))
    for op in OPTIMIZER_OPS:
        for params, tensors in (
            (2_000_000, 4),
            (10_000_000, 9),
            (60_000_000, 9),
            (250_000_000, 30),
            (800_000_000, 90),
            (130_000_000, 30),
            (1_100_000_000, 40),
        ):
            grid.append((op, "eager", "fp32", {"params": params, "tensors": tensors}))
    for tokens, width in BIASES:
        grid.append(("sum_rows", "eager", "bf16", {"tokens": tokens, "width": width}))
    for op in ROUTER_OPS:
        for tokens in (2048, 4096, 8192, 16384, 65536):
            for experts, top_k in ((8, 2), (64, 6), (128, 8), (256, 8)):
                grid.append((op, "eager", "fp32", {"tokens": tokens, "width": experts, "top_k": top_k}))
    held_out = held_out_memory(rng, ROW_OPS, "eager", optimizer=True)
    fresh = held_out_memory(random.Random(FRESH_SEED + 3), ROW_OPS, "eager", optimizer=True)
    return split_cases("memory_bound", grid, held_out, 170, fresh, 120)


def compiled_cases() -> list[Case]:
    """Compiled for each shape, as training compiles; fewer shapes, because every one costs a compilation."""
    grid: list[Item] = []
    held_out: list[Item] = []
    sizes = ((2048, 4096), (4096, 4096), (8192, 4096), (16384, 4096), (32768, 4096), (4096, 7168), (16384, 7168),
             (8192, 2048), (8192, 8192), (4096, 14336))  # fmt: skip
    held_sizes = ((4096, 5120), (12288, 4096), (8192, 6144), (8192, 16384), (16384, 2880), (2048, 12288), (8192, 3584))
    losses = ((2048, 128256), (4096, 128256), (8192, 128256), (8192, 32000), (4096, 16032))
    held_losses = ((4096, 151936), (6144, 128256), (8192, 64128), (4096, 102400))
    for op in COMPILED_OPS:
        loss = "entropy" in op
        for tokens, width in losses if loss else sizes[:: 1 if "norm" in op or "swiglu" in op else 2]:
            grid.append((op, "compiled", "bf16", {"tokens": tokens, "width": width}))
        for tokens, width in held_losses if loss else held_sizes:
            held_out.append((op, "compiled", "bf16", {"tokens": tokens, "width": width}))
    fresh = held_out_memory(random.Random(FRESH_SEED + 4), COMPILED_OPS, "compiled", optimizer=False)
    return split_cases("compiled", grid, held_out, 90, fresh, 24)


def held_out_memory(rng: random.Random, ops: tuple[str, ...], variant: str, *, optimizer: bool) -> list[Item]:
    """Held-out shapes of memory-bound ops."""
    held_out: list[Item] = []
    for _ in range(1500):
        model, tp = rng.choice(MODELS), rng.choice((1, 2, 4, 8))
        tokens = rng.choice((1, 1, 2, 4)) * model.seq_len // rng.choice((1, 1, 2, 4))
        op = rng.choice((*ops, *LOSS_OPS, *(OPTIMIZER_OPS if optimizer else ())))
        if op in OPTIMIZER_OPS:
            params = rng.choice(list(linear_shapes(model, tp)))
            count = rng.randint(4, 60)
            if 1e6 < params[0] * params[1] * count < 1.2e9:
                held_out.append((op, variant, "fp32", {"params": params[0] * params[1] * count, "tensors": count}))
            continue
        width = model.hidden
        if op in ("swiglu_fwd", "swiglu_bwd", "silu", "mul", "gelu_fwd", "gelu_bwd"):
            width = model.ffn // tp
        elif op.startswith("rope"):
            width = model.heads * model.head_dim // tp
        elif op in LOSS_OPS:
            width, tokens = model.vocab // tp, min(tokens, 8192)
        if 1e6 < tokens * width < 1.3e9:
            held_out.append((op, variant, "bf16", {"tokens": tokens, "width": width}))
    return held_out


def copy_cases() -> list[Case]:
    """Copies within the device, to and from the host, and to a file."""
    grid: list[Item] = []
    for size in (2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28, 2**30):
        for op in ("device_copy", "h2d", "d2h", "h2d_d2h"):
            grid.append((op, "pinned", "bytes", {"bytes": size}))
    grid.append(("disk_write", "fsync", "bytes", {"bytes": 2**30}))
    return split_cases("copy", grid, [], 0)


def sustained_cases() -> list[Case]:
    """Each shape in a burst at full clock, after seconds of nothing else, and between memory-bound ops."""
    grid: list[Item] = []
    for op, dtype, shape in (
        ("gemm", "bf16", (8192, 8192, 8192)), ("gemm", "bf16", (8192, 14336, 4096)),
        ("gemm", "bf16", (8192, 4096, 4096)),
        ("gemm", "bf16", (4096, 4096, 4096)), ("gemm", "bf16", (2048, 2048, 8192)), ("gemm", "fp8", (8192, 8192, 8192)),
        ("gemm", "fp8", (8192, 14336, 4096)), ("attention_flash", "bf16", (8192, 4096, 4096)),
        ("attention_cudnn", "bf16", (8192, 4096, 4096)), ("attention_cudnn_bwd", "bf16", (8192, 4096, 4096)),
    ):  # fmt: skip
        for variant in ("burst", "2s", "between_memory"):
            grid.append((op, variant, dtype, dict(zip("mnk", shape, strict=True))))
    return split_cases("sustained", grid, [], 0)


THROTTLED = {
    "eager": (
        "accumulate", "cast_down", "cast_up", "cross_entropy_bwd", "embedding_bwd", "gelu_bwd", "layernorm_bwd", "mul",
        "permute", "residual_add", "rmsnorm_bwd", "rmsnorm_fwd", "rope_complex", "rope_half", "silu", "softmax_fp32",
        "swiglu_bwd", "swiglu_fwd", "unpermute",
    ),
    "compiled": (
        "cross_entropy_bwd", "cross_entropy_fwd", "residual_add", "rmsnorm_bwd", "rmsnorm_fwd", "rope_half",
        "swiglu_bwd", "swiglu_fwd",
    ),
}  # fmt: skip
"""Memory-bound ops that are timed while products hold the clock down."""


def throttled_cases() -> list[Case]:
    """Each op at full clock, and between products that draw much and less."""
    shape: Shape = {"tokens": 8192, "width": 8192}
    grid: list[Item] = [
        (op, f"{kind}_{load}", "bf16", shape)
        for kind, ops in THROTTLED.items() for op in ops for load in ("burst", "heavy", "medium")
    ]  # fmt: skip
    return split_cases("throttled", grid, [], 0)
