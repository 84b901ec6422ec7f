"""The functional forms of kernels and collectives: pure functions of a shape and a few fitted parameters.

All are vectorised: shapes are arrays (n,), times come back as (n,) in seconds. Rates are absolute, at full clock; see
`sustained` of `mofa.calibrate.fit` for what the power limit takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatN = NDArray[np.float64]


@dataclass(frozen=True)
class GemmForm:
    """Parameters of `gemm_s`."""

    tiles: tuple[tuple[int, int, float], ...]
    """Rows and columns of each output tile that the library may choose, and the rate it reaches. [-, -, FLOP/s]"""
    k_overhead: float
    """Prologue and epilogue of a tile, as a length in k. [elements]"""
    floor_s: float
    bytes_per_s: float
    sharpness: float
    """Exponent that joins computing and moving: 1 adds them, infinity takes the larger."""
    split_s: float = 1.5e-6
    """Launch of the reduction over split k."""
    split_bytes: float = 4.0
    """Bytes moved per output element and split."""
    splits: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 16)


def gemm_s(m: ArrayLike, n: ArrayLike, k: ArrayLike, form: GemmForm, *, element_bytes: float, num_sms: int) -> FloatN:
    """Time of one dense product (m, k) x (k, n).

    Notes
    -----
    ``floor + (compute^p + bytes^p)^(1/p)``, where compute is the least over tiles and splits of k of
    ``ceil(tiles * split / SMs) * tile_m * tile_n * 2 * (k / split + k_overhead) * SMs / rate``, k in steps of 64.
    Assumes one tile at a time on a multiprocessor and a library that takes the fastest of its tiles.

    Examples
    --------
    132 tiles fill 132 multiprocessors; the 133rd needs a second wave:

    >>> form = GemmForm(((128, 128, 132e12),), 0.0, 0.0, 1e30, 8.0, splits=(1,))
    >>> gemm_s([128 * 132, 128 * 133], 128, 6400, form, element_bytes=2, num_sms=132) * 1e6
    array([209.7152, 419.4304])
    """
    m, n, k = (np.asarray(x, dtype=np.float64)[..., None, None] for x in np.broadcast_arrays(m, n, k))
    rows, columns, rate = (np.array(x, dtype=np.float64)[:, None] for x in zip(*form.tiles, strict=True))
    split = np.array(form.splits, dtype=np.float64)
    waves = np.ceil(np.ceil(m / rows) * np.ceil(n / columns) * split / num_sms)
    length = np.ceil(k / split / 64) * 64 + form.k_overhead
    compute = waves * rows * columns * 2 * length / (rate / num_sms)
    reduction = np.where(split > 1, split * m * n * form.split_bytes / form.bytes_per_s + form.split_s, 0.0)
    compute_s = (compute + reduction).min(axis=(-2, -1))
    m, n, k = (x[..., 0, 0] for x in (m, n, k))
    bytes_s = ((m + n) * k * element_bytes + 2 * m * n) / form.bytes_per_s
    return form.floor_s + join(compute_s, bytes_s, form.sharpness)


def join(one: FloatN, other: FloatN, sharpness: float) -> FloatN:
    """Two times that overlap in part: ``(a^p + b^p)^(1/p)``.

    Examples
    --------
    >>> join(np.array([3.0]), np.array([4.0]), 2.0)
    array([5.])
    """
    larger = np.maximum(np.maximum(one, other), 1e-30)
    joined: FloatN = larger * ((one / larger) ** sharpness + (other / larger) ** sharpness) ** (1 / sharpness)
    return joined


@dataclass(frozen=True)
class GroupedForm:
    """Parameters of `grouped_gemm_s`."""

    small_tile: tuple[int, int] = (64, 128)
    large_tile: tuple[int, int] = (128, 256)
    small_rate: float = 6e14
    large_rate: float = 8e14
    small_k_overhead: float = 200.0
    large_k_overhead: float = 200.0
    small_limit: int = 128
    """Products with at most so many rows or columns per group take the small tile."""
    cluster: int = 2
    """Tiles along the rows that run together."""
    floor_s: float = 8e-6
    per_group_s: float = 1e-7
    bytes_per_s: float = 4e12
    sharpness: float = 2.7


def grouped_gemm_s(
    loads: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    layout: ArrayLike,
    form: GroupedForm,
    *,
    num_sms: int,
    groups: ArrayLike,
) -> FloatN:
    """Time of the products of all experts in one kernel.

    Parameters
    ----------
    loads
        Tokens of each expert, shape (rows, experts), padded with zeros. [tokens]
    n, k
        Out and in features of an expert. [-]
    layout
        0 forward, 1 input gradient, 2 weight gradient.
    groups
        Experts of each row; their zeros count as groups too.

    Notes
    -----
    As `gemm_s`, with tiles counted expert by expert: each expert's rows are padded to whole clusters of tiles, and a
    weight gradient reduces over that expert's tokens. Never under the longest single tile.

    Examples
    --------
    One token more than a cluster of tiles costs an expert a whole further one:

    >>> form = GroupedForm(small_limit=0, large_k_overhead=0.0, floor_s=0.0, per_group_s=0.0, bytes_per_s=1e30)
    >>> t = grouped_gemm_s([[256], [257]], 256, 64, 0, form, num_sms=1, groups=1)
    >>> float(t[1] / t[0])
    2.0
    """
    loads = np.atleast_2d(np.asarray(loads, dtype=np.float64))
    shape = loads.shape[0]
    n, k, layout, groups = (np.broadcast_to(np.asarray(x, dtype=np.float64), shape) for x in (n, k, layout, groups))
    wgrad = layout == 2
    tokens = loads.sum(axis=1)
    columns = np.where(layout == 0, n, k)
    reduce = np.where(layout == 0, k, n)
    rows_per_group = np.where(wgrad, n, tokens / groups)
    small = (rows_per_group <= form.small_limit) | (columns <= form.small_limit)
    tile_m = np.where(small, form.small_tile[0], form.large_tile[0])
    tile_n = np.where(small, form.small_tile[1], form.large_tile[1])
    row_tiles = np.where(wgrad, n, 0.0)[:, None] + np.where(wgrad[:, None], 0.0, loads)
    row_tiles = np.ceil(np.ceil(row_tiles / tile_m[:, None]) / form.cluster) * form.cluster
    present = np.arange(loads.shape[1]) < groups[:, None]
    tiles = np.where(present, row_tiles * np.ceil(columns / tile_n)[:, None], 0.0)
    length = np.where(wgrad[:, None], loads, reduce[:, None])
    num_tiles, work = tiles.sum(axis=1), (tiles * length).sum(axis=1)
    longest = np.where(tiles > 0, length, 0.0).max(axis=1)
    overhead = np.where(small, form.small_k_overhead, form.large_k_overhead)
    filled = np.maximum(num_tiles / num_sms, 1e-12)
    steps = np.maximum((work + num_tiles * overhead) / num_sms * np.ceil(filled) / filled, longest + overhead)
    rate = np.where(small, form.small_rate, form.large_rate) / num_sms
    compute_s = steps * tile_m * tile_n * 2 / rate
    bytes_s = 2 * (tokens * (n + k) + groups * n * k) / form.bytes_per_s
    return form.floor_s + form.per_group_s * groups + join(compute_s, bytes_s, form.sharpness)


@dataclass(frozen=True)
class AttentionForm:
    """Parameters of `attention_s`, of one kernel: a backend, a way (forward, backward) and head sizes."""

    block: int
    """Rows that one unit of work holds. [tokens]"""
    slots: int
    """Units that run at the same time."""
    unit_s: float
    """Time of one unit against 128 tokens of the other side."""
    floor_s: float
    tail: float
    """Share of a causal kernel's longest unit that runs alone at the end."""
    wave: float
    """How much of the last, partly filled wave of a full kernel counts as a whole one."""
    causal: float
    """Time of a causal kernel's blocks over a full one's."""
    bytes_per_s: float


def attention_s(
    b: ArrayLike, hq: ArrayLike, hkv: ArrayLike, q: ArrayLike, kv: ArrayLike, d_qk: ArrayLike, d_v: ArrayLike,
    causal: ArrayLike, form: AttentionForm, *, backward: bool,
) -> FloatN:  # fmt: skip
    """Time of fused attention.

    Notes
    -----
    A unit is a block of query rows (backward: of key rows) of one head; it meets the other side in blocks of 128.
    Full: ``unit * L * W`` with waves W over the slots; causal: the units' triangle over the slots plus a tail, never
    under the longest unit. The bytes of the preparation and, in the backward pass of grouped queries, of the
    expanded key and value gradients come on top.

    Examples
    --------
    Twice the sequence is four times the work, causal half of it:

    >>> form = AttentionForm(128, 1, 1e-6, 0.0, 0.0, 1.0, 1.0, 1e30)
    >>> attention_s(1, 1, 1, [4096, 8192, 8192], [4096, 8192, 8192], 128, 128, [0, 0, 1], form, backward=False) * 1e3
    array([1.024, 4.096, 2.08 ])
    """
    b, hq, hkv, q, kv, d_qk, d_v = (np.asarray(x, dtype=np.float64) for x in (b, hq, hkv, q, kv, d_qk, d_v))
    mine, other = (kv, q) if backward else (q, kv)
    rows, columns = (128, form.block) if backward else (form.block, 128)
    num_units = b * hq * np.ceil(mine / rows)
    length = np.ceil(other / columns)
    ratio = max(1.0, rows / columns)
    filled = num_units / form.slots
    full = np.maximum(length, length * filled * (1 + form.wave * (np.ceil(filled) / filled - 1)))
    work = num_units * (length + ratio) / 2
    triangle = np.maximum(length, work / form.slots + form.tail * length * np.minimum(1, filled) * 0.5)
    moved = 2 * b * (q * hq + kv * hkv) * (d_qk + d_v)
    if backward:
        expanded = np.where(hq != hkv, 4 * b * kv * hq * (d_qk + d_v), 0.0)
        moved = 2 * moved + expanded + 8 * b * q * hq * d_qk
    units = np.where(np.asarray(causal) > 0, form.causal * triangle, full)
    time_s: FloatN = form.floor_s + form.unit_s * units + moved / form.bytes_per_s
    return time_s


@dataclass(frozen=True)
class StreamForm:
    """Parameters of `stream_s`, of one memory-bound op as one framework style runs it."""

    launch_s: float
    bytes_per_element: float
    """What its kernels read and write per element. [B]"""
    bytes_per_s: float
    per_row_s: float = 0.0
    per_column_s: float = 0.0


def stream_s(elements: ArrayLike, rows: ArrayLike, columns: ArrayLike, form: StreamForm) -> FloatN:
    """Time of a memory-bound op: launches, bytes over bandwidth, and what each row (token) and column costs.

    Examples
    --------
    >>> round(float(stream_s(1e9, 1e5, 1e4, StreamForm(2e-6, 4.0, 4e12))) * 1e6, 3)
    1002.0
    """
    elements, rows, columns = (np.asarray(x, dtype=np.float64) for x in (elements, rows, columns))
    moved_s = elements * form.bytes_per_element / form.bytes_per_s
    time_s: FloatN = np.asarray(form.launch_s + moved_s + rows * form.per_row_s + columns * form.per_column_s)
    return time_s


@dataclass(frozen=True)
class CollectiveForm:
    """Parameters of `collective_s`: one (start, rate) per protocol, of one collective over one group size."""

    protocols: tuple[tuple[float, float], ...]
    """Start and bus bandwidth of each. [s, B/s]"""
    group: int


def collective_s(payload_bytes: ArrayLike, op: str, form: CollectiveForm, *, group: int | None = None) -> FloatN:
    """Time of a collective: the fastest of a few protocols, ``start + bus bytes / bandwidth`` each.

    Notes
    -----
    ``payload_bytes`` is the whole tensor; of all-to-all and send/receive what one rank sends. Bus bytes are that times
    ``2 (p - 1) / p`` (all-reduce), 1 (send/receive) or ``(p - 1) / p``. In a group of another size than the measured
    one the start grows with the ring's steps, ``p - 1``: an extrapolation.

    Examples
    --------
    The low-latency protocol up to its switch point, the bandwidth one beyond:

    >>> form = CollectiveForm(((1e-6, 100e9), (11e-6, 300e9)), 2)
    >>> collective_s([2e4, 6e7], "all_gather", form) * 1e6
    array([  1.1, 111. ])
    """
    p = group or form.group
    share = bus_share(op, p)
    start, rate = (np.array(x) for x in zip(*form.protocols, strict=True))
    start = start * (max(p - 1, 1) / max(form.group - 1, 1) if p != form.group else 1.0)
    time_s: FloatN = (start + np.asarray(payload_bytes, dtype=np.float64)[..., None] * share / rate).min(axis=-1)
    return time_s


def bus_share(op: str, group: int) -> float:
    """Bytes that cross the busiest link per byte of payload (the convention of nccl-tests).

    Examples
    --------
    >>> bus_share("all_reduce", 4), bus_share("all_gather", 4), bus_share("send_recv", 2)
    (1.5, 0.75, 1.0)
    """
    if op == "send_recv":
        return 1.0
    return (2.0 if op == "all_reduce" else 1.0) * (group - 1) / group
