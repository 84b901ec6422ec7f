"""Bytes per element that each memory-bound op really moves, kernel by kernel, as frameworks run it.

An element is one of the op's main tensor (bf16; fp32 in the optimizer and the router). Counted from the kernels that
PyTorch launches: every input read once and every output written once per kernel.
"""

from __future__ import annotations

from mofa.calibrate.shapes.routed import BYTES as ROUTED_BYTES
from mofa.calibrate.shapes.te_bf16 import TE_BYTES
from mofa.calibrate.shapes.te_fp8 import BYTES as FP8_BYTES

EAGER_BYTES: dict[str, float] = {
    "rmsnorm_fwd": 4, "rmsnorm_bwd": 6, "layernorm_fwd": 4, "layernorm_bwd": 10, "swiglu_fwd": 10, "swiglu_bwd": 16,
    "gelu_fwd": 4, "gelu_bwd": 6, "silu": 4, "mul": 6, "residual_add": 6, "dropout": 5, "rope_complex": 26,
    "rope_half": 22, "cast_up": 6, "cast_down": 6, "accumulate": 10, "permute": 4, "unpermute": 8, "embedding": 4,
    "embedding_bwd": 4, "softmax_fp32": 8, "cross_entropy_fwd": 14, "cross_entropy_bwd": 18, "adam_fused": 28,
    "adam_foreach": 56, "grad_norm": 4, "grad_clip": 8, "zero": 4, "router_softmax": 8, "router_topk": 4,
    "sum_rows": 2, **ROUTED_BYTES, **FP8_BYTES,
}  # fmt: skip
COMPILED_BYTES: dict[str, float] = {
    "rmsnorm_fwd": 4, "rmsnorm_bwd": 6, "swiglu_fwd": 6, "swiglu_bwd": 10, "rope_half": 4, "residual_add": 6,
    "add_rmsnorm_fwd": 8, "cross_entropy_fwd": 2, "cross_entropy_bwd": 4, "cast_up": 6,
}  # fmt: skip
TABLES = {"compiled": COMPILED_BYTES, "te": TE_BYTES, "megatron": TE_BYTES}
"""By variant; others are eager."""


def bytes_moved_per_element(op: str, variant: str) -> float:
    """Bytes read and written per element; 4 for an op that is not listed. [B]

    Examples
    --------
    Eager SwiGLU runs two kernels of 2 + 3 passes over bf16, compiled one of 3:

    >>> bytes_moved_per_element("swiglu_fwd", "eager"), bytes_moved_per_element("swiglu_fwd", "compiled")
    (10, 6)
    """
    return TABLES.get(variant, EAGER_BYTES).get(op, 4.0)
