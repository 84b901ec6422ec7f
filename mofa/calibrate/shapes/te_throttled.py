"""Transformer Engine's kernels that are timed at full clock and while products hold the clock down."""

from __future__ import annotations

from mofa.calibrate.cases import Case, Item, Shape, grid_and_held_out_cases
from mofa.calibrate.shapes.te_bf16 import LOSSES, OTHER_ACTIVATIONS

FAMILY = "te_throttled"
LOADS = ("burst", "heavy", "medium")
"""At full clock; behind products that draw much, and less (:data:`mofa.calibrate.bench.torch_host.LOADS`)."""
VARIANT_OF = {"te_ops": "te", "te_cast": "eager", "te_gemm": "te", "te_attention": "te", "te_experts": "multi_stream"}
"""Families whose kernels are timed, and the variant by which each makes its calls."""

ROWS: Shape = {"tokens": 8192, "width": 4096}
COPIES: Shape = {"tokens": 32768, "width": 2048, "experts": 64, "top_k": 8}
EXPERT_ROWS: Shape = {"tokens": 32768, "width": 2048}
HEADS_128: Shape = {"b": 2, "hq": 32, "hkv": 8, "q": 4096, "kv": 4096, "dqk": 128, "dv": 128, "causal": 1}
HEADS_MLA: Shape = {"b": 2, "hq": 16, "hkv": 16, "q": 4096, "kv": 4096, "dqk": 192, "dv": 128, "causal": 1}
SQUARE: Shape = {"m": 8192, "n": 4096, "k": 4096}
SHORT_ROWS: Shape = {"tokens": 8192, "width": 3072}
WIDE_ROWS: Shape = {"tokens": 8192, "width": 8192}
LOGITS: Shape = {"tokens": 256, "width": 128256}
PARAMS: Shape = {"params": 10**8, "tensors": 12}
EXPERTS: Shape = {"n": 2048, "k": 2048, "loads": ",".join(["1024"] * 32)}
NORMS = ("rmsnorm_fwd", "rmsnorm_bwd")
TIMED: tuple[tuple[str, tuple[str, ...], str, tuple[Shape, ...]], ...] = (
    ("te_ops", (*NORMS, "layernorm_fwd", "layernorm_bwd", "rope_fwd", "rope_bwd"), "bf16", (ROWS,)),
    ("te_ops", NORMS, "bf16", (SHORT_ROWS,)),
    ("te_ops", ("swiglu_fwd", "swiglu_bwd"), "bf16", (WIDE_ROWS,)),
    ("te_ops", tuple(f"{name}_{direction}" for name in OTHER_ACTIVATIONS for direction in ("fwd", "bwd")), "bf16",
     (WIDE_ROWS,)),
    ("te_ops", ("weighted_swiglu_fwd", "weighted_swiglu_bwd"), "bf16", (EXPERT_ROWS,)),
    ("te_ops", ("permute_fwd", "permute_bwd", "unpermute_fwd", "unpermute_bwd", "sort_fwd", "sort_bwd"), "bf16",
     (COPIES,)),
    ("te_ops", ("adam", "grad_norm", "grad_clip"), "fp32", (PARAMS,)), ("te_ops", LOSSES, "bf16", (LOGITS,)),
    ("te_cast", (
        "fp8_cast_delayed", "fp8_cast_tensorwise", "fp8_cast_block", "fp8_cast_both_delayed",
        "fp8_cast_both_tensorwise", "fp8_cast_both_block", "fp8_cast_weight_block", "fp8_cast_column_block",
        "fp8_transpose", "fp8_norm_delayed", "fp8_norm_tensorwise", "fp8_norm_block",
    ), "bf16", (ROWS,)),
    ("te_attention", ("fwd", "bwd"), "bf16", (HEADS_128, HEADS_MLA)),
    ("te_gemm", ("fwd",), "fp8_fast", (SQUARE,)), ("te_gemm", ("dgrad",), "fp8_split", (SQUARE,)),
    ("te_gemm", ("fwd",), "fp8_block", (SQUARE,)), ("te_gemm", ("wgrad",), "fp8_block_rows", (SQUARE,)),
    ("te_experts", ("fwd", "dgrad", "wgrad"), "bf16", (EXPERTS,)),
)  # fmt: skip
"""Family, ops, format and shapes."""


def te_throttled_cases() -> list[Case]:
    """Each kernel under each load; its op is written ``family.op``."""
    grid: list[Item] = [
        (f"{family}.{op}", load, dtype, shape)
        for family, ops, dtype, shapes in TIMED for shape in shapes for op in ops for load in LOADS
    ]  # fmt: skip
    return grid_and_held_out_cases(FAMILY, grid, [], 0)


def unthrottled_case_of_same_kernel(case: Case) -> Case:
    """The case of the family whose kernel a case of this one times.

    Examples
    --------
    >>> case = unthrottled_case_of_same_kernel(te_throttled_cases()[1])
    >>> case.family, case.op
    ('te_ops', 'rmsnorm_fwd')
    """
    family, _, op = case.op.partition(".")
    return Case(family, op, "megatron" if op in LOSSES else VARIANT_OF[family], case.dtype, case.split, case.shape)
