"""Ops at full clock, and while products hold the clock down."""

from __future__ import annotations

from mofa.calibrate.cases import Case, Item, Shape, grid_and_held_out_cases


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
    return grid_and_held_out_cases("sustained", grid, [], 0)


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
    return grid_and_held_out_cases("throttled", grid, [], 0)
