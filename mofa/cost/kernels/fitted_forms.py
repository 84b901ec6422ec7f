"""The functional forms of kernels and collectives: pure functions of a shape and a few fitted parameters.

All are vectorised: shapes are arrays, times come back in their shape, in seconds. Rates are absolute, at full clock;
``sustained`` is the share of them that the power limit leaves in long runs. `mofa.calibrate` fits the parameters with
these same functions, and the planner's times are theirs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mofa.specs.curves import AttentionForm, CollectiveForm, GemmForm, GroupedGemmForm, MemoryBoundForm

FloatN = NDArray[np.float64]
AT_ONCE = 2048
"""Shapes whose tiles are tried together: keeps the temporaries in the cache."""
BUSIEST = 1.3
"""Load of the busiest multiprocessor above the mean, over the standard deviation among them, where tiles of uneven
length go round: of random orders of Zipf loads (s 0.5 and 1.2, 8 to 128 experts, 16 to 224 pairs of tiles each) the
mean; single settings give near 0, where tiles almost fill whole rounds, to 2.0. [-]"""


def gemm_s(
    m: ArrayLike, n: ArrayLike, k: ArrayLike, form: GemmForm, *, element_bytes: float, num_sms: float,
    count: ArrayLike = 1.0, sustained: float | FloatN = 1.0, output_bytes: ArrayLike = 2.0,
) -> FloatN:  # fmt: skip
    """Time of ``count`` equal dense products (m, k) x (k, n) in one kernel, at ``sustained`` of the full clock's rate,
    one share for all or one each. ``output_bytes`` of an element: 2 of bf16 written, 8 of fp32 read, added to, written.

    Notes
    -----
    ``floor + (compute^p + bytes^p)^(1/p)``, where compute is the least over tiles and splits of k of
    ``rounds * tile_m * tile_n * 2 * (k / split + k_overhead) * SMs / rate``, k in steps of 64. There are
    ``count * tiles * split / SMs`` rounds, rounded up less ``partial_round_saving`` of what was added: multiprocessors
    are faster beside idle ones. Computing that takes t grows by ``1 + slowdown * t / (t + slowdown_after_s)``: long
    products of H100 and H200 do so, at full clock and under the limit alike (docs/evidence/calibration.md), and no
    batches. Assumes one tile at a time on a multiprocessor and a library that takes the fastest of its tiles.

    Examples
    --------
    132 tiles fill 132 multiprocessors; the 133rd needs a second wave:

    >>> form = GemmForm(((128, 128, 132e12),), 0.0, 0.0, 1e30, 8.0, splits=(1,))
    >>> gemm_s([128 * 132, 128 * 133], 128, 6400, form, element_bytes=2, num_sms=132) * 1e6
    array([209.7152, 419.4304])
    """
    m, n, k, count = (np.asarray(x, dtype=np.float64) for x in np.broadcast_arrays(m, n, k, count))
    compute_s = np.empty(m.shape)
    flat, out = np.stack([m, n, k, count]).reshape(4, -1), compute_s.reshape(-1)
    for start in range(0, out.size, AT_ONCE):
        part = slice(start, start + AT_ONCE)
        sustained_part = sustained[part] if isinstance(sustained, np.ndarray) else sustained
        out[part] = _tiled_s(flat[:, part], form, num_sms, sustained_part)
    if form.slowdown:
        compute_s *= 1.0 + form.slowdown * compute_s / (compute_s + form.slowdown_after_s) * (count == 1.0)
    bytes_s = count * ((m + n) * k * element_bytes + np.asarray(output_bytes) * m * n) / form.bytes_per_s
    return form.floor_s + p_norm_of_times(compute_s, bytes_s, form.sharpness)


def _tiled_s(shapes: FloatN, form: GemmForm, num_sms: float, sustained: float | FloatN) -> FloatN:
    """Computing alone: the fastest of the form's tiles and splits. Axes: tiles, splits, shapes."""
    m, n, k, count = shapes
    rows, columns, rate = np.array(form.tiles, dtype=np.float64).T[:, :, None, None]
    split = np.array(form.splits, dtype=np.float64)[:, None]
    each = rows * columns * (2.0 * num_sms / sustained) / rate
    length = np.ceil(k / (64 * split)) * 64 + form.k_overhead
    compute = np.ceil(m / rows) * np.ceil(n / columns) * (count / num_sms) * split
    if form.partial_round_saving:
        saved = form.partial_round_saving
        compute = (1.0 - saved) * np.ceil(compute) + saved * compute
    else:
        np.ceil(compute, out=compute)
    compute *= length
    compute *= each
    moved = np.where(split > 1, split * (count * m * n * (form.split_bytes / form.bytes_per_s)) + form.split_s, 0.0)
    best: FloatN = (compute.min(axis=0) + moved).min(axis=0)
    return best


def p_norm_of_times(first: FloatN, other: FloatN, sharpness: float) -> FloatN:
    """Two times that overlap in part: ``(a^p + b^p)^(1/p)``.

    Examples
    --------
    >>> p_norm_of_times(np.array([3.0]), np.array([4.0]), 2.0)
    array([5.])
    """
    larger = np.maximum(np.maximum(first, other), 1e-30)
    joined: FloatN = larger * ((first / larger) ** sharpness + (other / larger) ** sharpness) ** (1 / sharpness)
    return joined


def grouped_gemm_s(
    loads: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    layout: ArrayLike,
    form: GroupedGemmForm,
    *,
    num_sms: float,
    groups: ArrayLike,
    sustained: float = 1.0,
    element_bytes: float = 2.0,
    added_bytes: ArrayLike = 0.0,
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
    added_bytes
        What a weight gradient moves beyond one element, where it is added to a wider one. [B]

    Notes
    -----
    As `gemm_s`, with tiles counted expert by expert: each expert's rows are padded to whole clusters of tiles, and a
    weight gradient reduces over that expert's tokens. Never under the longest single tile. The kernel's scheduler is
    static (CUTLASS's persistent one for groups: a pair of multiprocessors takes every 66th pair of tiles, expert after
    expert), so that the tiles of a weight gradient, as long as an expert has tokens, end on the busiest pair.

    Examples
    --------
    One token more than a cluster of tiles costs an expert a whole further one:

    >>> form = GroupedGemmForm(small_limit=0, large_k_overhead=0.0, floor_s=0.0, per_group_s=0.0, bytes_per_s=1e30)
    >>> t = grouped_gemm_s([[256], [257]], 256, 64, 0, form, num_sms=1, groups=1)
    >>> float(t[1] / t[0])
    2.0
    """
    loads = np.atleast_2d(np.asarray(loads, dtype=np.float64))
    shape = loads.shape[0]
    n, k, layout, groups = (np.broadcast_to(np.asarray(x, dtype=np.float64), shape) for x in (n, k, layout, groups))
    wgrad = (layout == 2)[:, None]
    tokens = loads.sum(axis=1)
    columns, reduce = np.where(layout == 0, n, k), np.where(layout == 0, k, n)
    small, tile_m, tile_n = _grouped_tile(tokens / groups, n, columns, layout == 2, form)
    row_tiles = _clustered(np.where(wgrad, n[:, None], loads), tile_m[:, None], form)
    present = np.arange(loads.shape[1]) < groups[:, None]
    tiles = np.where(present, row_tiles * np.ceil(columns / tile_n)[:, None], 0.0)
    length = np.where(wgrad, _whole_steps(loads, small[:, None]), reduce[:, None])
    longest = np.where(tiles > 0, length, 0.0).max(axis=1)
    steps = _grouped_steps(tiles.sum(axis=1), (tiles * length).sum(axis=1), longest, small, form, num_sms)
    if (is_wgrad := layout == 2).any():
        overhead = np.where(small, form.small_k_overhead, form.large_k_overhead)[is_wgrad]
        steps[is_wgrad] = _round_robin(
            tiles[is_wgrad] / form.cluster, length[is_wgrad] + overhead[:, None], max(int(num_sms // form.cluster), 1)
        )
    moved = _grouped_bytes(tokens, groups, n, k, element_bytes, np.where(layout == 2, added_bytes, 0.0))
    return _grouped_total(steps, moved, groups, small, tile_m * tile_n, form, num_sms, sustained)


def balanced_grouped_gemm_s(
    tokens: ArrayLike, groups: ArrayLike, n: ArrayLike, k: ArrayLike, form: GroupedGemmForm, *, num_sms: float,
    wgrad: bool = False, sustained: float = 1.0, element_bytes: float = 2.0, scattered: bool = False,
    uneven: ArrayLike = 0.0, added_bytes: ArrayLike = 0.0,
) -> FloatN:  # fmt: skip
    """As :func:`grouped_gemm_s` with the same tokens for every expert, in closed form; ``wgrad`` is layout 2.

    ``scattered``: the tokens are the mean of what experts get; each gets a Poisson count, as tokens that are routed one
    by one give, and its last cluster of tiles is half empty on average where the counts scatter wider than it.
    ``uneven`` is the standard deviation of the experts' tokens over their mean [-]: tiles of a weight gradient are as
    long as an expert has tokens, and what one multiprocessor gets of them is a draw of those tiles beyond whole rounds.

    Examples
    --------
    >>> form = GroupedGemmForm()
    >>> one = grouped_gemm_s([[512] * 8], 2048, 4096, 0, form, num_sms=132, groups=8)
    >>> bool(np.isclose(balanced_grouped_gemm_s(4096, 8, 2048, 4096, form, num_sms=132), one[0]))
    True
    """
    tokens, groups, n, k = (np.asarray(x, dtype=np.float64) for x in np.broadcast_arrays(tokens, groups, n, k))
    each = tokens / groups
    columns = k if wgrad else n
    small, tile_m, tile_n = _grouped_tile(each, n, columns, np.asarray(wgrad), form)
    if scattered and not wgrad:
        row_tiles = form.cluster * expected_pieces_of_poisson_count(each, tile_m * form.cluster)
    else:
        row_tiles = _clustered(n if wgrad else each, tile_m, form)
    tiles = groups * row_tiles * np.ceil(columns / tile_n)
    length = _whole_steps(each, small, scattered) if wgrad else k
    steps = _grouped_steps(tiles, tiles * length, length, small, form, num_sms)
    if wgrad:
        part = np.mod(tiles / (groups * num_sms), 1.0)
        steps = steps + BUSIEST * np.sqrt(groups * part * (1.0 - part)) * np.asarray(uneven) * each
    moved = _grouped_bytes(tokens, groups, n, k, element_bytes, added_bytes if wgrad else 0.0)
    return _grouped_total(steps, moved, groups, small, tile_m * tile_n, form, num_sms, sustained)


def _grouped_bytes(
    tokens: FloatN, groups: FloatN, n: FloatN, k: FloatN, element_bytes: float, added_bytes: ArrayLike
) -> FloatN:
    """Bytes of an operand's rows, the result's and the weights or their gradients. [B]"""
    moved: FloatN = element_bytes * tokens * (n + k) + (element_bytes + np.asarray(added_bytes)) * groups * n * k
    return moved


def _grouped_tile(
    each: FloatN, n: FloatN, columns: FloatN, wgrad: NDArray[np.bool_], form: GroupedGemmForm
) -> tuple[NDArray[np.bool_], FloatN, FloatN]:
    """Whether the small tile is taken, and the tile's rows and columns."""
    small = (np.where(wgrad, n, each) <= form.small_limit) | (columns <= form.small_limit)
    tiles = zip(form.small_tile, form.large_tile, strict=True)
    tile_m, tile_n = (np.where(small, float(little), float(large)) for little, large in tiles)
    return small, tile_m, tile_n


def expected_pieces_of_poisson_count(mean: FloatN, size: FloatN) -> FloatN:
    """Expected number of pieces of a size that a Poisson count takes, the last one begun counted whole. [-]

    Notes
    -----
    ``sum_k P(X > k size)`` by the normal distribution with continuity correction, over the pieces that the count may
    reach; ``mean / size + 1 / 2`` where it scatters wider than a piece. The normal distribution is that by a hyperbolic
    tangent, within 0.0003.

    Examples
    --------
    Exactly four pieces on average take four or five; half of one on average takes one; nothing takes none:

    >>> expected_pieces_of_poisson_count(np.array([1024.0, 128.0, 0.0]), np.array([256.0, 256.0, 256.0])).round(3)
    array([4.494, 1.   , 0.   ])
    """
    spread = np.sqrt(np.maximum(mean, 1e-12))
    base = np.maximum(np.floor(mean / size) - 3.0, 0.0)
    pieces = base[..., None] + np.arange(8.0)
    z = np.clip((mean[..., None] - pieces * size[..., None] - 0.5) / spread[..., None], -9.0, 9.0)
    beyond = 0.5 + 0.5 * np.tanh(np.sqrt(2.0 / np.pi) * (z + 0.044715 * z**3))
    some = np.where(pieces > 0, beyond, -np.expm1(-mean)[..., None])  # P(X > 0) exactly, as counts may be small
    counted = base + some.sum(axis=-1)
    expected: FloatN = np.where(spread > size / 2.0, mean / size + 0.5, counted)
    return expected


def _clustered(rows: FloatN, tile_m: FloatN, form: GroupedGemmForm) -> FloatN:
    """Tiles along the rows, in whole clusters."""
    tiles: FloatN = np.ceil(np.ceil(rows / tile_m) / form.cluster) * form.cluster
    return tiles


def _whole_steps(tokens: FloatN, small: NDArray[np.bool_], scattered: bool = False) -> FloatN:
    """Reduction over an expert's tokens in whole steps of the tile along k; of scattered counts the expected one."""
    step = np.where(small, 128.0, 64.0)
    reduced: FloatN = np.where(tokens > 0, tokens + step / 2, 0.0) if scattered else np.ceil(tokens / step) * step
    return reduced


def _round_robin(tiles: FloatN, length: FloatN, units: int) -> FloatN:
    """Steps of the busiest of ``units`` that take tiles in turn, all of one group before the next. (rows, groups)

    Examples
    --------
    Three tiles of 10 steps and one of 40 for two units, that come as 10, 10 | 10, 40:

    >>> _round_robin(np.array([[3.0, 1.0]]), np.array([[10.0, 40.0]]), 2)
    array([50.])
    """
    first = (np.cumsum(tiles, axis=1) - tiles) % units
    full_cycles, left = np.divmod(tiles, units)
    # what is left goes to `left` units from the first on, round the end: marked where it begins and where it ends
    marks = np.zeros((len(tiles), 2 * units + 1))
    row = np.arange(len(tiles))[:, None]
    np.add.at(marks, (row, first.astype(np.intp)), length)
    np.add.at(marks, (row, (first + left).astype(np.intp)), -length)
    left_length = np.cumsum(marks, axis=1)
    each = (
        left_length[:, :units] + left_length[:, units : 2 * units] + (full_cycles * length).sum(axis=1, keepdims=True)
    )
    busiest: FloatN = each.max(axis=1)
    return busiest


def _grouped_steps(
    tiles: FloatN, work: FloatN, longest: FloatN, small: NDArray[np.bool_], form: GroupedGemmForm, num_sms: float
) -> FloatN:
    """Steps along k of the busiest multiprocessor."""
    overhead = np.where(small, form.small_k_overhead, form.large_k_overhead)
    filled = np.maximum(tiles / num_sms, 1e-12)
    return np.maximum((work + tiles * overhead) / num_sms * np.ceil(filled) / filled, longest + overhead)


def _grouped_total(
    steps: FloatN, moved_bytes: FloatN, groups: FloatN, small: NDArray[np.bool_], tile: FloatN, form: GroupedGemmForm,
    num_sms: float, sustained: float,
) -> FloatN:  # fmt: skip
    rate = np.where(small, form.small_rate, form.large_rate) * (sustained / num_sms)
    compute_s = steps * tile * 2 / rate
    bytes_s = moved_bytes / form.bytes_per_s
    return form.floor_s + form.per_group_s * groups + p_norm_of_times(compute_s, bytes_s, form.sharpness)


def attention_s(
    b: ArrayLike, hq: ArrayLike, hkv: ArrayLike, q: ArrayLike, kv: ArrayLike, d_qk: ArrayLike, d_v: ArrayLike,
    causal: ArrayLike, form: AttentionForm, *, backward: bool, sustained: float = 1.0,
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
    split_length, other = (kv, q) if backward else (q, kv)
    rows, columns = (128, form.block) if backward else (form.block, 128)
    num_units = b * hq * np.ceil(split_length / rows)
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
    time_s: FloatN = form.floor_s + form.unit_s / sustained * units + moved / form.bytes_per_s
    return time_s


def l2_miss_bytes(moved: ArrayLike, source: ArrayLike, l2_bytes: float) -> FloatN:
    """Bytes of random repeated reads that miss the L2. [B]

    Half of ``moved`` is reads. The share that misses is that of ``source`` beyond half of the L2.

    Either half of a GH100's L2 holds what its side of the chip reads, so that rows that all multiprocessors read are in
    it twice.

    Examples
    --------
    Of rows that the L2 holds none is missed; of 100 MB beside one of 50 MB, three quarters are:

    >>> l2_miss_bytes(1.6e9, [1e7, 1e8], 50e6) / 1e6
    array([  0., 600.])
    """
    source = np.maximum(np.asarray(source, dtype=np.float64), 1.0)
    missed: FloatN = np.asarray(moved) / 2.0 * np.maximum(1.0 - l2_bytes / 2.0 / source, 0.0)
    return missed


def memory_bound_s(
    elements: ArrayLike, rows: ArrayLike, columns: ArrayLike, form: MemoryBoundForm, missed: ArrayLike = 0.0
) -> FloatN:
    """Time of a memory-bound op: launches, bytes over bandwidth, what each row (token) and column costs, and ``missed``
    bytes that come from memory again.

    Examples
    --------
    >>> round(float(memory_bound_s(1e9, 1e5, 1e4, MemoryBoundForm(2e-6, 4.0, 4e12))) * 1e6, 3)
    1002.0
    """
    elements, rows, columns = (np.asarray(x, dtype=np.float64) for x in (elements, rows, columns))
    moved_s = elements * form.bytes_per_element / form.bytes_per_s
    time_s: FloatN = np.asarray(form.launch_s + moved_s + rows * form.per_row_s + columns * form.per_column_s)
    if form.missed_bytes_per_s:
        time_s = time_s + np.asarray(missed, dtype=np.float64) / form.missed_bytes_per_s
    return time_s


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
    share = bus_bytes_per_payload_byte(op, p)
    start, rate = (np.array(x) for x in zip(*form.protocols, strict=True))
    start = start * (max(p - 1, 1) / max(form.group - 1, 1) if p != form.group else 1.0)
    time_s: FloatN = (start + np.asarray(payload_bytes, dtype=np.float64)[..., None] * share / rate).min(axis=-1)
    return time_s


def bus_bytes_per_payload_byte(op: str, group: int) -> float:
    """Bytes that cross the busiest link per byte of payload (the convention of nccl-tests).

    Examples
    --------
    >>> tuple(bus_bytes_per_payload_byte(*case) for case in (("all_reduce", 4), ("all_gather", 4), ("send_recv", 2)))
    (1.5, 0.75, 1.0)
    """
    if op == "send_recv":
        return 1.0
    return (2.0 if op == "all_reduce" else 1.0) * (group - 1) / group
