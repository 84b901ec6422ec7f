"""Kernels that other people timed, without the clock that they ran at: which of them ran at full clock is told by time.

A published efficiency is one number a shape. Back-to-back calls of a short product end before the power limit acts;
those of a long one run in the limited state from the first timed call on. In between the clock fell while they were
timed, so that nothing is learned from those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mofa.calibrate.fits.fit import fit_curves
from mofa.calibrate.fits.fitted_curves import DeviceCurveFits
from mofa.calibrate.measurements import Row

FULL_CLOCK_S = 100e-6
"""Products up to this length were timed at full clock. [s]"""
LIMITED_S = 1e-3
"""Products from this length on were timed under the power limit. [s]"""
LONG_CONTEXT = 131072
"""Queries from which attention, with a pause after each call, heats up within one call. [tokens]"""
RESULT = "te"
"""Variant of products whose result is in 16 bits; others add to an fp32 one."""


def fit_published_kernel_curves(
    rows: Sequence[Row], *, num_sms: int, power_shares: Mapping[str, float]
) -> DeviceCurveFits:
    """Curves at full clock of rows that hold no clock, and what the power limit leaves of them.

    Parameters
    ----------
    rows
        Of ``gemm`` (variant ``te`` is used), ``grouped_gemm`` and ``attention``.
    num_sms
        Multiprocessors of the GPU. [-]
    power_shares
        Of the GPU whose two limited states are known: the rate between memory-bound kernels over the rate of a long
        run of nothing else, per family. [-]

    Returns
    -------
    Curves
        ``sustained`` holds the measured state of nothing else, and the other one by ``power_shares``.

    Notes
    -----
    Large products reach the same share of the peak at any clock: the limited rate over the full one is the median of
    the long products over the best of the others; attention's that of its longest context over a quarter of it. Power
    that grows with the square of the clock is on average the limit in both states (as in
    :func:`mofa.specs.power.clock_at_power_draw`). The clock of one over that of the other depends on the share of the
    time and on what part of the limit memory-bound kernels draw at that clock, not on how far it falls. That part, and
    so the ratio of the rates, is taken to be the other GPU's.
    """
    products = [r for r in rows if r.case.family == "gemm" and r.case.variant == RESULT]
    alone = _rate(r for r in products if r.sample.median_s >= LIMITED_S) / float(
        np.quantile([_flops_per_s(r) for r in products if r.sample.median_s < LIMITED_S], 0.95)
    )
    shares = {"gemm bf16": alone}
    clocked = [r for r in products if r.sample.median_s <= FULL_CLOCK_S]
    clocked += [_faster(r, alone) for r in products if r.sample.median_s >= LIMITED_S]
    grouped = [r for r in rows if r.case.family == "grouped_gemm" and r.case.op != "wgrad"]  # those add to fp32
    clocked += [_faster(r, alone) if r.sample.median_s >= LIMITED_S else r for r in grouped]
    for direction in ("fwd", "bwd"):
        own = [r for r in rows if r.case.family == "attention" and r.case.op == direction]
        share = min(_attention_share(own), 1.0)
        shares[f"attention_cudnn_{direction} bf16"] = share
        clocked += [_faster(r, share) if r.case.shape_size("q") >= LONG_CONTEXT else r for r in own]
    sustained = {}
    for name, share in shares.items():
        sustained[f"{name} alone"] = share
        sustained[f"{name} between_memory"] = min(share * power_shares[name], 1.0)
    return replace(fit_curves(clocked, num_sms=num_sms, gpu=rows[0].gpu), sustained=sustained)


def _flops_per_s(row: Row) -> float:
    size = row.case.shape_size
    return 2.0 * size("m") * size("n") * size("k") / row.sample.median_s


def _rate(rows: object) -> float:
    return float(np.median([_flops_per_s(r) for r in rows]))  # type: ignore[attr-defined]


def _attention_share(rows: Sequence[Row]) -> float:
    """Rate of the longest context over that of a quarter of it, of the same heads: the median."""
    of = {(r.case.shape_size("q"), r.case.shape_size("hq"), r.case.shape_size("dqk")): r.sample.median_s for r in rows}
    ratios = [
        16.0 * of[q // 4, heads, size] / time_s
        for (q, heads, size), time_s in of.items()
        if q >= LONG_CONTEXT and (q // 4, heads, size) in of
    ]
    return float(np.median(ratios)) if ratios else 1.0


def _faster(row: Row, share: float) -> Row:
    """The row as it would be at full clock."""
    sample = row.sample
    scaled = replace(
        sample, median_s=sample.median_s * share, low_s=sample.low_s * share, high_s=sample.high_s * share
    )  # fmt: skip
    return replace(row, sample=scaled)
