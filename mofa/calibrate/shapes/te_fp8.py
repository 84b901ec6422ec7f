"""The shapes of Transformer Engine's fp8 kernels: products and casts of each recipe, experts' products one by one.

They need Transformer Engine on the machine and are measured only where their families are named.
"""

from __future__ import annotations

import random

from mofa.calibrate.cases import SEED, Case, Item, Shape, grid_and_held_out_cases, random_expert_loads_text

FAMILIES = ("te_gemm", "te_grouped", "te_cast", "te_sustained")
FAST, SPLIT, BLOCK, BLOCK_ROWS = "fp8_fast", "fp8_split", "fp8_block", "fp8_block_rows"
"""Kinds of products, by the names of their curves (:data:`mofa.specs.curves.GemmFormat`)."""
TO_FP32 = "te_fp32"
"""Variant of a weight gradient that the product adds to an fp32 one; others write bf16."""
PRODUCTS = (("fwd", "te", FAST), ("dgrad", "te", SPLIT), ("wgrad", "te", SPLIT), ("wgrad", TO_FP32, SPLIT),
            ("fwd", "te", BLOCK), ("dgrad", "te", BLOCK), ("wgrad", "te", BLOCK_ROWS),
            ("wgrad", TO_FP32, BLOCK_ROWS))  # fmt: skip
"""A linear layer's three products as its recipes run them."""
LINEARS = (
    (2048, 3072, 2048), (4096, 2048, 2048), (4096, 16384, 2048), (4096, 2048, 8192), (4096, 6144, 4096),
    (8192, 6144, 4096), (8192, 4096, 4096), (4096, 28672, 4096), (8192, 28672, 4096), (8192, 4096, 14336),
    (4096, 4096, 14336), (8192, 14336, 4096), (8192, 4096, 7168), (8192, 7168, 4096), (8192, 4096, 3584),
    (8192, 1536, 4096), (8192, 4096, 1024), (4096, 10240, 8192), (4096, 8192, 8192), (4096, 57344, 8192),
    (4096, 8192, 28672), (8192, 1280, 8192), (8192, 8192, 1024), (8192, 7168, 8192), (8192, 8192, 3584),
    (1024, 1024, 1024), (512, 2048, 2048), (256, 4096, 2048), (1024, 4096, 4096), (128, 2048, 1408),
    (16384, 5120, 5120), (16384, 4096, 2048),
)  # fmt: skip
"""Tokens, out and in features: linears of models of 1B to 70B parameters, whole and split by tensor parallelism."""
HELD_LINEARS = ((4096, 27648, 5120), (4096, 5120, 13824), (8192, 7168, 5120), (2048, 5120, 5120), (8192, 3840, 3072),
                (6144, 12288, 3072), (768, 1536, 2048), (16384, 3072, 1536))  # fmt: skip
EXPERTS = ((8, 28672, 4096), (8, 4096, 14336), (32, 4096, 2048), (32, 2048, 2048), (64, 2816, 2048), (64, 2048, 1408))
"""Experts of a rank, and the out and in features of each."""
ROWS = ((128, 0.0), (512, 0.0), (1024, 0.7))
"""Mean rows of an expert, and the exponent of their Zipf law."""
HELD_EXPERTS = ((16, 3072, 4096, 768, 0.0), (48, 1536, 2048, 256, 0.5), (16, 4096, 1536, 384, 0.3))
ROW_CASTS = ("fp8_cast_delayed", "fp8_cast_tensorwise", "fp8_cast_block")
"""Row-wise copies alone."""
BOTH_CASTS = ("fp8_cast_both_delayed", "fp8_cast_both_tensorwise", "fp8_cast_both_block")
"""The row-wise copy and the transposed one."""
WEIGHT_CAST, COLUMN_CAST = "fp8_cast_weight_block", "fp8_cast_column_block"
"""Both copies of a weight in blocks of 128 x 128; the transposed copy alone, as gathered gradients are cast."""
TRANSPOSE = "fp8_transpose"
MAIN_CAST = "fp8_cast_main"
"""The bf16 copy of a shard of main parameters cast to fp8 ones: one row of many elements, with the transposed copy that
nobody reads (tensor/utils.py, ``_cast_master_weights_to_fp8_delayed_scaling`` and ``..._current_scaling``)."""
MAIN_SIZES, HELD_MAIN_SIZES = (2**20, 2**22, 2**24, 2**25, 2**26, 117440512), (58720256,)
NORM_CASTS = ("fp8_norm_delayed", "fp8_norm_tensorwise", "fp8_norm_block")
"""A norm that hands its output on in fp8, both copies."""
NORMS = ("te_rmsnorm_fwd", "te_rmsnorm_bwd")
CASTS = (*ROW_CASTS, *BOTH_CASTS, WEIGHT_CAST, COLUMN_CAST, TRANSPOSE, *NORM_CASTS, *NORMS)
"""Ops on the rows and widths of :data:`CAST_SHAPES`."""
CHECKS = (*NORM_CASTS, *NORMS)
"""Measured to see that a norm and a cast add up to a norm that casts; no curve comes from them, as their kernels differ
with the width."""
BYTES = {
    "fp8_cast_delayed": 3.0, "fp8_cast_tensorwise": 5.0, "fp8_cast_block": 3.0,
    "fp8_cast_both_delayed": 4.0, "fp8_cast_both_tensorwise": 6.0, "fp8_cast_both_block": 4.0,
    WEIGHT_CAST: 4.0, COLUMN_CAST: 3.0, TRANSPOSE: 2.0, MAIN_CAST: 4.0,
    "fp8_norm_delayed": 5.0, "fp8_norm_tensorwise": 8.0, "fp8_norm_block": 8.0,
    "te_rmsnorm_fwd": 4.0, "te_rmsnorm_bwd": 6.0,
}  # fmt: skip
"""Bytes moved per element, kernel by kernel: bf16 in, a byte out for each copy, bf16 once more where a kernel of its
own looks for the largest (current scaling); a norm writes bf16 between where the cast is not its own (current and block
scaling), and its fp8 output is transposed by a kernel of its own under delayed scaling. Scales are left out. [B]"""
CAST_SHAPES = ((512, 2048), (1024, 1024), (2048, 2048), (4096, 2048), (4096, 4096), (8192, 4096), (8192, 8192),
               (4096, 14336), (2048, 28672), (16384, 4096), (16384, 8192), (1024, 8192))  # fmt: skip
HELD_CASTS = ((6144, 5120), (3072, 3072), (8192, 13824), (12288, 2048))


def te_fp8_cases(family: str) -> list[Case]:
    """All cases of one of the fp8 families."""
    made = {
        "te_gemm": te_fp8_gemm_cases,
        "te_grouped": te_fp8_grouped_product_cases,
        "te_cast": te_fp8_cast_cases,
        "te_sustained": te_fp8_sustained_cases,
    }
    return made[family]()


def te_fp8_gemm_cases() -> list[Case]:
    """Dense products in fp8: each of each linear, by each kind of kernel."""
    grid, held_out = (
        [
            (product, variant, kind, product_shape(product, *linear))
            for linear in linears
            for product, variant, kind in PRODUCTS
        ]
        for linears in (LINEARS, HELD_LINEARS)
    )  # fmt: skip
    return grid_and_held_out_cases("te_gemm", grid, held_out, len(held_out))


def product_shape(product: str, tokens: int, out: int, inner: int) -> Shape:
    """The product's own (m, n, k).

    Examples
    --------
    >>> product_shape("wgrad", 4096, 1024, 512)
    {'m': 1024, 'n': 512, 'k': 4096}
    """
    m, n, k = {"fwd": (tokens, out, inner), "dgrad": (tokens, inner, out), "wgrad": (out, inner, tokens)}[product]
    return {"m": m, "n": n, "k": k}


def te_fp8_grouped_product_cases() -> list[Case]:
    """Experts' products as GroupedLinear runs them, a product after the other on several streams."""
    rng = random.Random(SEED + 40)
    grid: list[Item] = []
    for experts, n, k in EXPERTS:
        for rows, skew in ROWS:
            grid += _expert_products(rng, experts, n, k, rows, skew)
    held_out: list[Item] = []
    for experts, n, k, rows, skew in HELD_EXPERTS:
        held_out += _expert_products(rng, experts, n, k, rows, skew)
    return grid_and_held_out_cases("te_grouped", grid, held_out, len(held_out))


def _expert_products(rng: random.Random, experts: int, n: int, k: int, rows: int, skew: float) -> list[Item]:
    loads = random_expert_loads_text(rng, experts * rows, experts, skew, 128)
    shape: Shape = {"n": n, "k": k, "skew": str(skew), "loads": loads}
    return [
        (product, variant, kind, shape) for product, variant, kind in PRODUCTS if (product, variant) != ("wgrad", "te")
    ]


def te_fp8_cast_cases() -> list[Case]:
    """Casts with their search for the largest, transposes, norms that end in a cast."""
    grid: list[Item] = [(op, "eager", "bf16", {"tokens": t, "width": w}) for op in CASTS for t, w in CAST_SHAPES]
    held_out: list[Item] = [(op, "eager", "bf16", {"tokens": t, "width": w}) for op in CASTS for t, w in HELD_CASTS]
    grid += [(MAIN_CAST, "eager", "bf16", {"tokens": 1, "width": size}) for size in MAIN_SIZES]
    held_out += [(MAIN_CAST, "eager", "bf16", {"tokens": 1, "width": size}) for size in HELD_MAIN_SIZES]
    return grid_and_held_out_cases("te_cast", grid, held_out, len(held_out))


def te_fp8_sustained_cases() -> list[Case]:
    """Products of each kind in a burst, after seconds of nothing else, and between memory-bound ops."""
    grid: list[Item] = [
        ("gemm", variant, kind, dict(zip("mnk", sizes, strict=True)))
        for sizes in ((8192, 8192, 8192), (8192, 14336, 4096), (8192, 4096, 4096))
        for kind in (FAST, SPLIT, BLOCK, BLOCK_ROWS)
        for variant in ("burst", "2s", "between_memory")
    ]
    return grid_and_held_out_cases("te_sustained", grid, [], 0)
