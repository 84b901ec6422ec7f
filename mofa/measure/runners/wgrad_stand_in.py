"""A stand-in for Apex's one kernel that Megatron-Core asks for: a weight gradient added to the main one by its product.

``fused_weight_gradient_mlp_cuda`` of Apex calls cuBLAS with the main gradient as input and output. Transformer
Engine's ``general_gemm`` with ``accumulate`` calls it alike. Megatron-Core's output layer alone needs it: Transformer
Engine's own linears do this by themselves. Importing this module puts it under Apex's name, and must come first.
"""

from __future__ import annotations

import sys
import types
from typing import Any

NAME = "fused_weight_gradient_mlp_cuda"


def accumulate_weight_gradient(total_input: Any, grad_output: Any, main_grad: Any) -> None:
    """Add ``grad_output^T total_input`` to the main gradient, in its own format.

    Parameters
    ----------
    total_input
        (tokens, in), 16 bit.
    grad_output
        (tokens, out), 16 bit.
    main_grad
        (out, in), fp32 or 16 bit.
    """
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    general_gemm(
        total_input,
        grad_output,
        out_dtype=main_grad.dtype,
        layout="NT",
        out=main_grad,
        accumulate=True,
        grad=True,
        use_split_accumulator=False,
    )


def install_wgrad_stand_in() -> None:
    """Put the stand-in where Megatron-Core imports Apex's from, unless that is there."""
    if NAME in sys.modules:
        return
    module = types.ModuleType(NAME)
    module.wgrad_gemm_accum_fp32 = accumulate_weight_gradient  # type: ignore[attr-defined]
    module.wgrad_gemm_accum_fp16 = accumulate_weight_gradient  # type: ignore[attr-defined]
    sys.modules[NAME] = module


install_wgrad_stand_in()
