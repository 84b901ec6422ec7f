"""Time of one op's work on one GPU, from its fitted curves: pure functions, arrays in, seconds out.

The forms are those that `mofa calibrate` fits and checks (:mod:`mofa.cost.kernels.fitted_forms`). All times are of the
sustained state: training runs under the power limit, where products and attention keep some nine tenths of their rate
at full clock (measured between memory-bound kernels, as a block runs them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mofa.blocks.elementwise import BoolK
from mofa.blocks.work import Gemm, GemmPass, GroupedKernel
from mofa.cost.kernels import fitted_forms
from mofa.cost.kernels.multi_stream import balanced_multi_stream_products_s
from mofa.specs.curves import GemmForm
from mofa.specs.gpu_facts import UnalignedProductRates
from mofa.specs.hardware import GpuSpec
from mofa.specs.products import ELEMENT_BYTES, GemmFormat

FloatN = NDArray[np.float64]

AT_ONCE, SLOT_BITS, ODD = 1 << 13, 14, np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
"""Shapes that are told apart together and the slots of their table, which stay in the cache; the factor of
multiplicative hashing (Knuth, The Art of Computer Programming, volume 3, section 6.4), 2^64 over the golden ratio. [-]
"""
ALIGNED_WIDTH = 8.0
"""Elements of bf16 in 16 bytes. [-]"""
VECTOR_BYTES = 16.0
"""What a thread loads at once of rows that begin at its multiples, as most kernels for tensor cores need it
(NVIDIA/cutlass issue 75; NVIDIA, Matrix Multiplication Background, section 2.2). [B]"""


def gemm_s(
    m: ArrayLike, n: ArrayLike, k: ArrayLike, gpu: GpuSpec, format_: GemmFormat = "bf16", count: ArrayLike = 1.0
) -> FloatN:
    """Time of ``count`` equal matrix products (m, k) x (k, n) in one kernel.

    Parameters
    ----------
    m, n, k
        Rows, columns and reduction length. [-]
    gpu
        The curve of the format and the number of multiprocessors.
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
    See :func:`mofa.cost.kernels.fitted_forms.gemm_s`. Equal shapes, of which a search has many, are timed once. Of
    several products in one kernel, as unfused attention has them, those of unaligned widths take as much longer as
    measured.

    Examples
    --------
    A product that fills the waves takes its FLOPs over the sustained rate:

    >>> from mofa.cost.kernels.toy_gpu import toy_gpu
    >>> float(np.round(gemm_s(8192, 8192, 8192, toy_gpu())[()] * 1e3, 3))
    1.374
    """
    shapes = np.array(_alike(m, n, k, count))
    shape = shapes.shape[1:]
    unique, inverse = _distinct(shapes.reshape(4, -1))
    curve = gpu.curves.gemm_curve(format_)
    rows, columns, length, each = unique
    timed = partial(
        fitted_forms.gemm_s, rows, columns, length, element_bytes=ELEMENT_BYTES[format_], num_sms=gpu.num_sms.value,
        count=each, sustained=curve.sustained,
    )  # fmt: skip
    time_s = timed(curve.form)
    if (each > 1.0).any():
        rates = gpu.curves.unaligned_products
        time_s = np.where(each > 1.0, timed(_of_batches(curve.form, rates.batched_overhead.value)), time_s)
        time_s = time_s / _batched_rate(rows, columns, length, each, ELEMENT_BYTES[format_], rates)
    return np.asarray(np.where((unique > 0).all(axis=0), time_s, 0.0)[inverse].reshape(shape))


def _batched_rate(
    m: FloatN, n: FloatN, k: FloatN, count: FloatN, element_bytes: float, rates: UnalignedProductRates
) -> FloatN:
    """Rate of products over that of aligned ones: their rows are slices of a wider one and begin at multiples of it.

    A gradient of keys has the width of a head as ``m``.
    """
    rate = np.ones(n.shape)
    width = rates.batched_width_8_bytes.value, rates.batched_width_4_bytes.value
    depth = rates.batched_depth_8_bytes.value, rates.batched_depth_4_bytes.value
    for size, (eight, four) in ((m, width), (n, width), (k, depth)):
        over = (size * element_bytes) % VECTOR_BYTES
        rate = np.where(over == 0.0, rate, np.where(over % 8.0 == 0.0, eight, four))
    return np.where(count > 1.0, rate, 1.0)


def is_aligned_product(product: Gemm) -> BoolK:
    """Whether rows of what a product multiplies are read in whole pieces of 16 bytes of bf16. (K,)

    Examples
    --------
    >>> [bool(is_aligned_product(Gemm(8192.0, vocab, 4096.0))) for vocab in (50304.0, 50257.0)]
    [True, False]
    """
    widths = np.ceil(product.n), np.ceil(product.m if product.product == "wgrad" else product.k)
    aligned = (widths[0] % ALIGNED_WIDTH == 0.0) & (widths[1] % ALIGNED_WIDTH == 0.0)
    return bool(aligned) if np.ndim(aligned) == 0 else aligned


def unaligned_gemm_s(
    aligned_s: FloatN, m: FloatN, n: FloatN, k: FloatN, count: FloatN, products: Sequence[GemmPass], gpu: GpuSpec
) -> FloatN:
    """Times of bf16 products, of those with widths that 16 bytes do not divide in place of what aligned ones take.

    Parameters
    ----------
    aligned_s
        What :func:`gemm_s` says. (P, K) [s]
    m, n, k, count
        Their shapes; of weights' gradients ``k`` are tokens, of the others ``m``. (P, K) [-]
    products
        Which of a linear layer's products each row is. (P)

    Examples
    --------
    GPT-2's vocabulary of 50,257 against 50,304:

    >>> from mofa.cost.kernels.toy_gpu import toy_gpu
    >>> n = np.array([[50257.0], [50304.0]])
    >>> m, k, one = np.full((2, 1), 8192.0), np.full((2, 1), 1024.0), np.ones((2, 1))
    >>> aligned_s = gemm_s(m, n, k, toy_gpu())
    >>> slow, fast = unaligned_gemm_s(aligned_s, m, n, k, one, ["fwd", "fwd"], toy_gpu())[:, 0]
    >>> bool(8.0 < slow / fast < 8.5), bool(fast == aligned_s[1, 0])
    (True, True)
    """
    n, other = np.ceil(n), np.ceil(np.where([[product == "wgrad"] for product in products], m, k))
    beside = (n % ALIGNED_WIDTH + other % ALIGNED_WIDTH > 0.0) & (count == 1.0)
    if not beside.any():
        return aligned_s
    odd = ((n % 2.0 == 1.0) | (other % 2.0 == 1.0))[beside]
    unaligned = np.nonzero(beside)[0]
    rates = gpu.curves.unaligned_products
    even_rate, odd_rate = np.array([rates.single_product_rates(product) for product in products])[unaligned].T
    depth_alone = np.array([product == "fwd" for product in products])[unaligned] & (n[beside] % 2.0 == 0.0)
    odd_rate = np.where(depth_alone, rates.forward_odd_depth.value, odd_rate)
    time_s = aligned_s.copy()
    form = _without_slowdown(gpu.curves.gemm["bf16"].form)
    time_s[beside] = fitted_forms.gemm_s(
        m[beside], n[beside], k[beside], form, element_bytes=ELEMENT_BYTES["bf16"], num_sms=gpu.num_sms.value,
        sustained=np.where(odd, odd_rate, even_rate),
    )  # fmt: skip
    return np.where(aligned_s > 0.0, time_s, 0.0)


@lru_cache(maxsize=64)
def _of_batches(form: GemmForm, overhead: float) -> GemmForm:
    """Of several products in one kernel, whose tiles overlap their prologues; measured on heads of 96 to 456 alone."""
    return replace(form, k_overhead=overhead * form.k_overhead)


@lru_cache(maxsize=64)
def _without_slowdown(form: GemmForm) -> GemmForm:
    """Of kernels that are slow for another reason than their length."""
    return replace(form, slowdown=0.0)


def _alike(*values: ArrayLike) -> Sequence[FloatN]:
    """Numbers and arrays as arrays of one shape."""
    arrays = [np.asarray(value, dtype=float) for value in values]
    return arrays if len({array.shape for array in arrays}) == 1 else np.broadcast_arrays(*arrays)


def _distinct(columns: FloatN) -> tuple[FloatN, NDArray[np.intp]]:
    """The different columns of a matrix, and which of them each column is. Few columns are not worth the search.

    A search has a million columns of some thousand kinds: first those of each block are told apart, then what is left
    of all blocks.
    """
    total = columns.shape[1]
    if total < 64:
        return columns, np.arange(total)
    bits = np.ascontiguousarray(columns).view(np.uint64)
    kind, first, known = np.empty(total, dtype=np.intp), [], 0
    for start in range(0, total, AT_ONCE):
        first_of_block, of = _distinguished(bits[:, start : start + AT_ONCE])
        kind[start : start + AT_ONCE] = known + of
        first.append(start + first_of_block)
        known += len(first_of_block)
    candidates = np.concatenate(first)
    again, of = _distinguished(bits[:, candidates])
    return columns[:, candidates[again]], of[kind]


def _distinguished(bits: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """One of each different column of a matrix, and which of them each column is; by a table of their hashes.

    One column in a slot speaks for all that are like it, those that are not go on to another table.
    """
    total = bits.shape[1]
    kind, number, speaker = (np.empty(size, dtype=np.intp) for size in (total, total, 1 << SLOT_BITS))
    left, first, known, factor = np.arange(total), [], 0, np.array(ODD)
    while len(left):
        rows = bits if len(left) == total else bits[:, left]
        code = rows[0] * factor
        for row in rows[1:]:
            code = (code ^ row) * factor
        slot = (code >> np.uint64(64 - SLOT_BITS)).astype(np.intp)
        speaker[slot] = left
        of = speaker[slot]
        same = (bits[:, of] == rows).all(axis=0)
        new = left[of == left]
        number[new] = known + np.arange(len(new))
        kind[left[same]] = number[of[same]]
        first.append(new)
        left, known, factor = left[~same], known + len(new), factor * ODD
    return np.concatenate(first), kind


def grouped_gemm_s(
    rows: ArrayLike, groups: ArrayLike, n: ArrayLike, k: ArrayLike, gpu: GpuSpec, format_: GemmFormat = "bf16",
    *, wgrad: bool = False, sequential: bool = False, uneven: ArrayLike = 0.0, kernel: GroupedKernel = "one",
    added_bytes: ArrayLike = 0.0,
) -> FloatN:  # fmt: skip
    """Time of the products of ``groups`` experts over ``rows`` token rows in all, spread evenly over them.

    ``rows`` are those of the slowest rank; within it the experts are taken as equally popular, their counts scatter as
    those of tokens routed one by one. ``wgrad`` is the weight gradient, which reduces over the rows of an expert: it
    takes the longer, the more they are ``uneven`` (their standard deviation over their mean [-]). ``sequential`` runs
    one kernel per expert, ``kernel`` says how others run, ``added_bytes`` what a weight gradient moves beyond one
    element (:class:`mofa.blocks.work.GroupedGemm`). Equal products are timed once. [s]

    Examples
    --------
    No rows, no time:

    >>> from mofa.cost.kernels.toy_gpu import toy_gpu
    >>> float(grouped_gemm_s(0, 8, 4096, 4096, toy_gpu())[()])
    0.0
    """
    shapes = np.array(_alike(rows, groups, n, k, uneven, added_bytes))
    unique, inverse = _distinct(shapes.reshape(6, -1))
    time_s = _different_grouped_gemm_s(unique, gpu, format_, wgrad=wgrad, sequential=sequential, kernel=kernel)
    return np.asarray(time_s[inverse].reshape(shapes.shape[1:]))


def _different_grouped_gemm_s(
    shapes: FloatN, gpu: GpuSpec, format_: GemmFormat, *, wgrad: bool, sequential: bool, kernel: GroupedKernel
) -> FloatN:
    """As :func:`grouped_gemm_s`, of the columns of a matrix whose rows are its array arguments in order. (6, P) [s]"""
    rows, groups, n, k, uneven, added_bytes = shapes
    if sequential:
        each = rows / groups
        expert_s = gemm_s(n, k, each, gpu, format_) if wgrad else gemm_s(each, n, k, gpu, format_)
        return np.asarray(groups * expert_s)
    if kernel == "multi-stream":
        streamed = gpu.curves.multi_stream_curve(format_)
        time_s = balanced_multi_stream_products_s(
            rows, groups, n, k, streamed.form, gpu.curves.gemm_curve(format_).form, num_sms=gpu.num_sms.value,
            wgrad=wgrad, sustained=streamed.sustained, element_bytes=ELEMENT_BYTES[format_], added_bytes=added_bytes,
        )  # fmt: skip
        return np.where(rows > 0, time_s, 0.0)
    curve = gpu.curves.grouped_gemm_curve(format_)
    time_s = fitted_forms.balanced_grouped_gemm_s(
        rows, groups, n, k, curve.form, num_sms=gpu.num_sms.value, wgrad=wgrad, sustained=curve.sustained,
        element_bytes=ELEMENT_BYTES[format_], scattered=True, uneven=uneven, added_bytes=added_bytes,
    )  # fmt: skip
    return np.where(rows > 0, time_s, 0.0)


KERNEL_WIDTHS = {
    "cudnn": (64, 128, 192, 256), "flash": (32, 64, 96, 128, 192, 256), "flash1": (32, 64, 128),
}  # fmt: skip
"""Head sizes that each backend has kernels for; others are computed as the next larger, in zeros. cuDNN: heads of 96
and 112 ran the kernels of 128 (``..._64x128x128``, ``..._64x64x128``), those of 192 their own, in traces of the fitting
half and of a run of 112 on an H200; FlashAttention: flash_api.cpp, ``round_multiple``; its first version: fmha_api.cpp.
[-]"""


def attention_kernel_head_size(head: float, backend: str) -> float:
    """The head size that a kernel computes; beyond the largest, the next multiple of 64. [-]

    Examples
    --------
    >>> [attention_kernel_head_size(head, "cudnn") for head in (64, 80, 112, 192)]
    [64, 128, 128, 192]
    >>> attention_kernel_head_size(80, "flash")
    96
    """
    widths = KERNEL_WIDTHS[backend]
    return next((width for width in widths if width >= head), math.ceil(head / 64) * 64)


def attention_s(
    batch: ArrayLike, heads: ArrayLike, kv_heads: ArrayLike, q_len: ArrayLike, pairs: ArrayLike, d_qk: float,
    d_v: float, gpu: GpuSpec, *, backward: bool, backend: str = "cudnn",
) -> FloatN:  # fmt: skip
    """Time of fused attention over ``pairs`` query-key pairs of each head and sequence.

    Parameters
    ----------
    batch, heads, kv_heads, q_len
        Sequences, query heads, key-value heads, queries of a sequence on this rank. [-]
    pairs
        Query-key pairs of one head and sequence: ``q (q + 1) / 2`` is a causal kernel; more (context parallelism) a
        full one over ``pairs / q`` keys; fewer (a window, a part of a ring) the causal kernel's share.
    d_qk, d_v
        Head sizes; computed is what a kernel has (:func:`attention_kernel_head_size`), and kernels that were not
        measured take the nearest one's time by FLOPs.
    backend
        ``cudnn``, ``flash`` or ``flash1``.

    Returns
    -------
    FloatN
        Time of one call; 0 without pairs. [s]

    Examples
    --------
    >>> from mofa.cost.kernels.toy_gpu import toy_gpu
    >>> s = np.array([8192.0, 16384.0])
    >>> short, long = attention_s(1, 32, 8, s, s * (s + 1) / 2, 128, 128, toy_gpu(), backward=False)
    >>> bool(3.5 < long / short < 4)
    True
    """
    batch, heads, kv_heads, q, pairs = _alike(batch, heads, kv_heads, q_len, pairs)
    wide_qk, wide_v = attention_kernel_head_size(d_qk, backend), attention_kernel_head_size(d_v, backend)
    direction = "bwd" if backward else "fwd"
    (_, _, near_qk, near_v), curve = gpu.curves.nearest_attention_curve((backend, direction, wide_qk, wide_v))
    form, wider = curve.form, (wide_qk + wide_v) / (near_qk + near_v)
    rows = np.maximum(q, 1.0)
    triangle = rows * (rows + 1.0) / 2.0
    full = pairs > triangle * 1.001
    keys = np.where(full, pairs / rows, rows)
    time_s = fitted_forms.attention_s(
        batch, heads, kv_heads, rows, keys, d_qk, d_v, ~full, form, backward=backward, sustained=curve.sustained / wider
    )
    band = np.minimum(pairs / triangle, 1.0)
    time_s = form.floor_s + (time_s - form.floor_s) * np.where(full, 1.0, band)
    return np.where(batch * heads * pairs > 0, time_s, 0.0)


def memory_bound_bytes_per_s(gpu: GpuSpec, like: str = "", *, compiled: bool = False) -> float:
    """Rate of a memory-bound kernel, reads and writes counted. [B/s]"""
    return gpu.curves.memory_bound_curve_like(like, compiled).form.bytes_per_s


def memory_bound_s(moved_bytes: ArrayLike, gpu: GpuSpec, kernels: ArrayLike = 1.0, like: str = "") -> FloatN:
    """Time of memory-bound kernels: a launch for each and their bytes over the rate of the op they are like. [s]

    Examples
    --------
    >>> from mofa.cost.kernels.toy_gpu import toy_gpu
    >>> float(memory_bound_s(4e9, toy_gpu())[()])
    0.001002
    """
    moved, kernels = np.asarray(moved_bytes, dtype=float), np.asarray(kernels, dtype=float)
    launch_s = gpu.curves.memory_bound_curve_like("", False).form.launch_s
    return kernels * launch_s + moved / memory_bound_bytes_per_s(gpu, like)
