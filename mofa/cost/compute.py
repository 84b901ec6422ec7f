"""Time of one op's work on one GPU, from its efficiency curves: pure functions, arrays in, seconds out."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mofa.specs.hardware import AttentionCurve, GemmFormat, GpuSpec, GroupedGemmCurve

FloatN = NDArray[np.float64]

ELEMENT_BYTES: dict[str, float] = {"bf16": 2.0, "fp8": 1.0, "fp32": 4.0}
# Output tiles that matrix libraries choose from, rows by columns; smaller ones lose efficiency by their shorter reuse.
TILES: tuple[tuple[int, int, float], ...] = ((128, 256, 1.0), (128, 128, 0.92), (64, 128, 0.72), (64, 64, 0.5))


def gemm_s(
    m: ArrayLike, n: ArrayLike, k: ArrayLike, gpu: GpuSpec, format_: GemmFormat = "bf16", count: ArrayLike = 1.0
) -> FloatN:
    """Time of ``count`` equal matrix products (m, k) x (k, n) in one kernel.

    Parameters
    ----------
    m, n, k
        Rows, columns and reduction length. [-]
    gpu
        Peak rates and the curve of the format.
    format_
        Number format of the operands.
    count
        Products in the batch. [-]

    Returns
    -------
    FloatN
        Time of one kernel; 0 where a dimension is 0. [s]

    Notes
    -----
    Output tiles run in whole waves over the multiprocessors, each for ``k + k_overhead`` steps at the sustained rate;
    the library takes the tile that ends first. Never under the time that its bytes take.

    Examples
    --------
    A product that fills the waves takes its FLOPs over the sustained rate:

    >>> from mofa.cost.examples import toy_gpu
    >>> float(np.round(gemm_s(8192, 8192, 8192, toy_gpu())[()] * 1e3, 3))
    1.374
    """
    m, n, k, count = (np.asarray(v, dtype=float) for v in (m, n, k, count))
    curve = gpu.curves.gemm[format_]
    num_sms = gpu.num_sms.value
    sm_rate = gpu.peak_flops_per_s[format_].value * curve.fraction.value / num_sms
    best: FloatN | float = np.inf
    for rows, columns, share in TILES:
        tiles = np.ceil(m / rows) * np.ceil(n / columns) * count
        waves = np.ceil(tiles / num_sms)
        best = np.minimum(best, waves * rows * columns * 2.0 / share)
    math_s = best * (k + curve.k_overhead.value) / sm_rate
    element = ELEMENT_BYTES[format_]
    moved = count * ((m * k + k * n) * element + 2.0 * m * n)
    time_s = curve.floor_s.value + np.maximum(math_s, moved / stream_rate(gpu))
    return np.where(m * n * k * count > 0, time_s, 0.0)


def grouped_gemm_s(
    rows: ArrayLike, groups: ArrayLike, n: ArrayLike, k: ArrayLike, gpu: GpuSpec, format_: GemmFormat = "bf16",
    *, wgrad: bool = False, sequential: bool = False,
) -> FloatN:  # fmt: skip
    """Time of the products of ``groups`` experts over ``rows`` token rows in all, spread evenly over them.

    Forward and input gradient pad each expert's rows to whole tiles; the weight gradient has groups x k x n output
    tiles and reduces over the rows of an expert. ``sequential`` runs one kernel per expert. [s]

    Examples
    --------
    No rows, no time:

    >>> from mofa.cost.examples import toy_gpu
    >>> float(grouped_gemm_s(0, 8, 4096, 4096, toy_gpu())[()])
    0.0
    """
    rows, groups, n, k = (np.asarray(v, dtype=float) for v in (rows, groups, n, k))
    each = rows / groups
    if sequential:
        one = gemm_s(n, k, each, gpu, format_) if wgrad else gemm_s(each, n, k, gpu, format_)
        return groups * one
    curve: GroupedGemmCurve = gpu.curves.grouped_gemm[format_]
    num_sms = gpu.num_sms.value
    sm_rate = gpu.peak_flops_per_s[format_].value * curve.fraction.value / num_sms
    tile = float(curve.tile_m * curve.tile_n)
    if wgrad:
        tiles = groups * np.ceil(k / curve.tile_m) * np.ceil(n / curve.tile_n)
        depth = each
    else:
        tiles = groups * np.ceil(each / curve.tile_m) * np.ceil(n / curve.tile_n)
        depth = k
    # a persistent kernel lets tiles of different experts share a wave: only the last wave is ragged
    waves = np.maximum(np.ceil(tiles / num_sms), tiles / num_sms)
    math_s = waves * tile * 2.0 * (depth + curve.k_overhead.value) / sm_rate
    element = ELEMENT_BYTES[format_]
    moved = rows * (k + n) * element + groups * n * k * element
    time_s = curve.floor_s.value + groups * curve.per_group_s.value + np.maximum(math_s, moved / stream_rate(gpu))
    return np.where(rows > 0, time_s, 0.0)


def attention_s(flops: ArrayLike, q_len: ArrayLike, gpu: GpuSpec, *, backward: bool, d_qk: float = 128.0) -> FloatN:
    """Time of fused attention: its FLOPs over the share of the bf16 peak that long sequences reach. [s]

    ``q_half`` is the length at which half of that share is reached; heads narrower than 128 lose in proportion to
    half their width, because the softmax's work per score does not shrink with the head.

    Examples
    --------
    >>> from mofa.cost.examples import toy_gpu
    >>> long, short = attention_s([1e12, 1e12], [1e9, 1024.0], toy_gpu(), backward=False)
    >>> bool(short > long)
    True
    """
    flops, q_len = np.asarray(flops, dtype=float), np.asarray(q_len, dtype=float)
    curve: AttentionCurve = gpu.curves.attention
    fraction = (curve.backward_fraction if backward else curve.forward_fraction).value
    narrow = 2.0 * d_qk / (d_qk + 128.0) if d_qk < 128 else 1.0
    rate = gpu.peak_flops_per_s["bf16"].value * fraction * narrow
    time_s = curve.floor_s.value + flops / rate * (1.0 + curve.q_half.value / np.maximum(q_len, 1.0))
    return np.where(flops > 0, time_s, 0.0)


def stream_rate(gpu: GpuSpec) -> float:
    """Rate of a memory-bound kernel, reads and writes counted. [B/s]"""
    return gpu.memory_bandwidth_bytes_per_s.value * gpu.curves.stream.fraction.value


def stream_s(moved_bytes: ArrayLike, gpu: GpuSpec, kernels: ArrayLike = 1.0) -> FloatN:
    """Time of memory-bound kernels: a floor for each and their bytes over the effective bandwidth. [s]

    Examples
    --------
    >>> from mofa.cost.examples import toy_gpu
    >>> float(stream_s(4e9, toy_gpu())[()])
    0.001002
    """
    moved, kernels = np.asarray(moved_bytes, dtype=float), np.asarray(kernels, dtype=float)
    return kernels * gpu.curves.stream.floor_s.value + moved / stream_rate(gpu)
