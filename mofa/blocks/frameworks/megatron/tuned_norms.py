"""Which norms Transformer Engine has tuned kernels for, and what its general ones take.

Read in transformer_engine 2.20 (common/normalization).
"""

from __future__ import annotations

from mofa.blocks.context import Context

TUNED_NORMS: dict[str, tuple[int, ...]] = {
    "rmsnorm": (512, 768, 1024, 2048, 4096, 8192),
    "layernorm": (768, 1024, 1536, 2048, 2304, 3072, 3840, 4096, 5120, 6144, 8192, 10240, 12288, 12800, 15360,
                  16384, 18432, 20480, 24576, 25600, 30720, 32768, 40960, 49152, 65536),
}  # fmt: skip
"""Widths that Transformer Engine has a kernel of their own for (2.20, common/normalization/*/*_fwd_cuda_kernel.cu)."""


def has_tuned_norm(ctx: Context, width: float) -> bool:
    """Whether Transformer Engine has a kernel of its own for norms of this width."""
    return width in TUNED_NORMS[str(ctx.model.norm)]


def untuned_norm_slowdown(ctx: Context, *, of_heads: bool) -> tuple[float, float]:
    """Time of Transformer Engine's general norms, forward and back, over that of tuned ones at their width. [-]"""
    kernels = ctx.kernels
    if of_heads:
        return kernels.te_head_norm_forward.value, kernels.te_head_norm_backward.value
    return kernels.te_norm_forward.value, kernels.te_norm_backward.value
