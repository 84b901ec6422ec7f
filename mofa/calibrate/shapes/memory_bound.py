"""Memory-bound ops, eager and compiled, and copies."""

from __future__ import annotations

import random

from mofa.calibrate.cases import FRESH_SEED, MODELS, SEED, Case, Item, grid_and_held_out_cases
from mofa.calibrate.shapes.gemms import linear_shapes

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


def eager_memory_bound_cases() -> list[Case]:
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
    held_out = held_out_memory_bound_cases(rng, ROW_OPS, "eager", optimizer=True)
    fresh = held_out_memory_bound_cases(random.Random(FRESH_SEED + 3), ROW_OPS, "eager", optimizer=True)
    return grid_and_held_out_cases("memory_bound", grid, held_out, 170, fresh, 120)


def compiled_memory_bound_cases() -> list[Case]:
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
    fresh = held_out_memory_bound_cases(random.Random(FRESH_SEED + 4), COMPILED_OPS, "compiled", optimizer=False)
    return grid_and_held_out_cases("compiled", grid, held_out, 90, fresh, 24)


def held_out_memory_bound_cases(
    rng: random.Random, ops: tuple[str, ...], variant: str, *, optimizer: bool
) -> list[Item]:
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
    return grid_and_held_out_cases("copy", grid, [], 0)
