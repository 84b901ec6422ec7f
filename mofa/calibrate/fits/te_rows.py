"""What is made of rows of Transformer Engine's kernels beside the fits that all kernels have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mofa.blocks.frameworks.megatron.tuned_norms import TUNED_NORMS
from mofa.calibrate.measurements import Row
from mofa.cost.kernels.fitted_forms import gemm_s
from mofa.specs.curves import GemmForm, MemoryBoundForm

ADDED_BYTES = 6.0
"""What adding to an fp32 gradient moves beyond writing a 16-bit one: 4 read, 4 written. [B]"""
LONG_S = 100e-6
"""Shorter products say little of what adding costs. [s]"""


def has_own_curve(row: Row) -> bool:
    """Whether a memory-bound row is one of a curve: not the router's products, which are fp32 ones with casts, nor
    norms of widths without a kernel of their own (`mofa.specs.gpu_facts.LayerKernelRatios`)."""
    kind = row.case.op.partition("_")[0]
    if row.case.op.startswith("router_gate"):
        return False
    return row.case.variant != "te" or kind not in TUNED_NORMS or row.case.shape_size("width") in TUNED_NORMS[kind]


def is_row_of_short_kernels(row: Row) -> bool:
    """Whether a memory-bound row is one of several short kernels, which tell no row's or column's cost from bytes."""
    return row.case.variant == "megatron" and row.case.op.endswith("_bwd")


def gradient_accumulation_form(rows: Sequence[Row], single: GemmForm, num_sms: int) -> MemoryBoundForm | None:
    """Bandwidth of the extra traffic when a product accumulates into an fp32 gradient: the median over long products.

    Examples
    --------
    >>> gradient_accumulation_form([], GemmForm(((128, 128, 6e14),), 0.0, 0.0, 1e12, 4.0), 132) is None
    True
    """
    long = [r for r in rows if r.sample.median_s > LONG_S]
    if not long:
        return None
    m, n, k = (np.array([float(r.case.shape_size(x)) for r in long]) for x in "mnk")
    alone_s = gemm_s(m, n, k, single, element_bytes=2.0, num_sms=num_sms)
    each_s = float(np.median((np.array([r.sample.median_s for r in long]) - alone_s) / (m * n)))
    return MemoryBoundForm(0.0, ADDED_BYTES, ADDED_BYTES / each_s) if each_s > 0 else None
