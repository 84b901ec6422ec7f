"""Time of products of one expert each that are dealt to several streams in turn, a kernel each.

Transformer Engine's ``GroupedLinear`` on Hopper: cuBLAS chooses each product's kernel as if it had the GPU to itself,
and kernels of different streams share the multiprocessors (transformer_engine 2.20, common/gemm/cublaslt_gemm.cu,
``multi_stream_cublas_gemm``). Experts without rows get none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mofa.cost.kernels.fitted_forms import expected_pieces_of_poisson_count, p_norm_of_times
from mofa.specs.curves import GemmForm
from mofa.specs.multi_stream import MultiStreamForm
from mofa.specs.shared_facts import load_shared_facts

FloatN = NDArray[np.float64]
STEP = 64.0
"""Length in k that a tile takes at once. [-]"""
AT_ONCE = 4096
"""Products whose tiles are tried together: keeps the temporaries in the cache."""


class ChosenTiles(NamedTuple):
    """The tiles that the library chooses for each product. Arrays of one shape."""

    tile_m: FloatN
    """Rows of the tile. [-]"""
    tile_n: FloatN
    """Columns of the tile. [-]"""
    rate: FloatN
    """What all multiprocessors compute in such tiles. [FLOP/s]"""
    split: FloatN
    """Parts of the inner dimension. [-]"""


def chosen_tiles(
    loads: ArrayLike, n: ArrayLike, k: ArrayLike, layout: ArrayLike, single: GemmForm, *, num_sms: float
) -> ChosenTiles:
    """The tile and the splits of each expert's product, whatever the streams; arguments as of
    :func:`multi_stream_products_s`.

    Returns
    -------
    ChosenTiles
        (rows, experts)

    Examples
    --------
    >>> single = GemmForm(((128, 128, 6e14),), 200.0, 3e-6, 3e12, 3.0, splits=(1,))
    >>> chosen_tiles([[1024, 0]], 2048, 4096, 0, single, num_sms=132).tile_m
    array([[128., 128.]])
    """
    rows, columns, length, _ = _products(*_by_row(loads, n, k, layout))
    return _tile(rows, columns, length, single, num_sms)


def _by_row(
    loads: ArrayLike, n: ArrayLike, k: ArrayLike, layout: ArrayLike
) -> tuple[FloatN, FloatN, FloatN, FloatN]:  # fmt: skip
    """The same as arrays: loads (rows, experts), the others (rows, 1)."""
    loads = np.atleast_2d(np.asarray(loads, dtype=np.float64))
    n, k, layout = (np.broadcast_to(np.asarray(x, dtype=np.float64), len(loads))[:, None] for x in (n, k, layout))
    return loads, n, k, layout


def _products(
    loads: FloatN, n: FloatN, k: FloatN, layout: FloatN
) -> tuple[FloatN, FloatN, FloatN, NDArray[np.bool_]]:  # fmt: skip
    """Rows, columns and length of each expert's product, and which are gradients of weights."""
    wgrad = layout == 2
    columns = np.broadcast_to(np.where(layout == 0, n, k), loads.shape)
    return np.where(wgrad, n, loads), columns, np.where(wgrad, loads, np.where(layout == 0, k, n)), wgrad


def multi_stream_products_s(
    loads: ArrayLike, n: ArrayLike, k: ArrayLike, layout: ArrayLike, form: MultiStreamForm, single: GemmForm, *,
    num_sms: float, element_bytes: float = 2.0, added_bytes: float = 0.0, sustained: float = 1.0,
    chosen: ChosenTiles | None = None,
) -> FloatN:  # fmt: skip
    """Time from the first product's start to the last one's end.

    Parameters
    ----------
    loads
        Tokens of each expert, padded with zeros. (rows, experts) [tokens]
    n, k
        Out and in features of an expert. (rows,) [-]
    layout
        0 forward, 1 input gradient, 2 weight gradient. (rows,)
    single
        Tiles and splits of single products, of which the library takes one that is as good as each product's fastest.
    added_bytes
        What a weight gradient moves beyond writing 16 bits an element, as it adds to the main one. [B]
    chosen
        What :func:`chosen_tiles` gives, where it is known: it depends on nothing of ``form``.

    Notes
    -----
    ``floor + (compute^p + bytes^p)^(1/p)``. Computing is the tiles of all products over all multiprocessors, as streams
    fill what one product's last wave leaves empty, and ``start_s`` for each product; never under one product's waves.
    On 245 shapes in bf16 of an H100 neither what waves leave empty nor which stream takes which product was seen.

    Examples
    --------
    A product of 33 tiles of 10 us takes a quarter of 132 multiprocessors. Eight of them fill two waves, and start 1 us
    apart; one alone takes its 10 us:

    >>> single = GemmForm(((128, 128, 132 * 128 * 128 * 2 * 1024 / 10e-6),), 0.0, 0.0, 1e30, 8.0, splits=(1,))
    >>> form = MultiStreamForm(0.0, 1e-6, 1.0, 1e30, 1e30, 8.0)
    >>> rows = [[33 * 128] * 8, [33 * 128, *[0] * 7]]
    >>> multi_stream_products_s(rows, 128, 1024, 0, form, single, num_sms=132).round(9)
    array([2.8e-05, 1.0e-05])
    """
    loads, n, k, layout = _by_row(loads, n, k, layout)
    rows, columns, length, wgrad = _products(loads, n, k, layout)
    present = loads > 0
    tile_m, tile_n, rate, split = chosen or _tile(rows, columns, length, single, num_sms)
    tiles = np.ceil(rows / tile_m) * np.ceil(columns / tile_n) * split
    steps = np.ceil(length / (STEP * split)) * STEP + single.k_overhead
    tile_s = tile_m * tile_n * 2.0 * steps * num_sms / (rate * sustained)
    shared = np.where(present, form.slower * tiles / num_sms * tile_s + form.start_s, 0.0).sum(axis=1)
    alone = np.where(present, form.slower * np.ceil(tiles / num_sms) * tile_s, 0.0).max(axis=1)
    weights = present.sum(axis=1) * (n * k)[:, 0]
    moved = element_bytes * (loads.sum(axis=1) * (n + k)[:, 0] + weights)
    added = np.where(wgrad[:, 0], added_bytes * weights, 0.0)
    return _joined(np.maximum(shared, alone), moved, added, form)


def balanced_multi_stream_products_s(
    rows: ArrayLike, groups: ArrayLike, n: ArrayLike, k: ArrayLike, form: MultiStreamForm, single: GemmForm, *,
    num_sms: float, wgrad: bool = False, sustained: float = 1.0, element_bytes: float = 2.0,
    added_bytes: ArrayLike = 0.0,
) -> FloatN:  # fmt: skip
    """As :func:`multi_stream_products_s` for ``rows`` tokens of ``groups`` equally popular experts, in closed form.

    Counts scatter as those of tokens routed one by one.

    Examples
    --------
    >>> single = GemmForm(((128, 128, 6e14),), 200.0, 3e-6, 3e12, 3.0, splits=(1,))
    >>> form = MultiStreamForm(1e-5, 2e-6, 1.0, 3e12, 2e12, 2.4)
    >>> even = multi_stream_products_s([[1024] * 8], 2048, 4096, 2, form, single, num_sms=132)
    >>> closed = balanced_multi_stream_products_s(8192, 8, 2048, 4096, form, single, num_sms=132, wgrad=True)
    >>> bool(abs(closed / even[0] - 1) < 0.03)
    True
    """
    rows, groups, n, k, added = (
        np.asarray(x, dtype=np.float64) for x in np.broadcast_arrays(rows, groups, n, k, added_bytes)
    )
    each = rows / groups
    columns = k if wgrad else n
    tall, length = (n, each) if wgrad else (each, k)
    tile_m, tile_n, rate, split = _tile(tall, columns, length, single, num_sms)
    across = np.ceil(columns / tile_n) * split
    tiles = across * (np.ceil(tall / tile_m) if wgrad else expected_pieces_of_poisson_count(each, tile_m))
    per_split = length / split
    steps = (per_split + STEP / 2 if wgrad else np.ceil(per_split / STEP) * STEP) + single.k_overhead
    tile_s = tile_m * tile_n * 2.0 * steps * num_sms / (rate * sustained)
    shared = groups * (form.slower * tiles / num_sms * tile_s + form.start_s)
    computing = np.maximum(shared, form.slower * np.ceil(tiles / num_sms) * tile_s)
    moved = element_bytes * (rows * (n + k) + groups * n * k)
    return _joined(computing, moved, added * groups * n * k if wgrad else np.zeros(moved.shape), form)


def _tile(rows: FloatN, columns: FloatN, length: FloatN, single: GemmForm, num_sms: float) -> ChosenTiles:
    """Rows, columns and rate of the tile, and the splits, that a product alone is given; see `forms.gemm_s`.

    Of those that are as good as the fastest (``equal_tile_time_ratio``) the one with the least work: what it leaves
    free of the multiprocessors other products take.
    """
    tall, wide, rate = (np.repeat(axis, len(single.splits)) for axis in np.array(single.tiles, dtype=np.float64).T)
    split = np.tile(np.array(single.splits, dtype=np.float64), len(single.tiles))
    flat = np.stack(np.broadcast_arrays(rows, columns, length)).reshape(3, -1)
    as_good = load_shared_facts().libraries.equal_tile_time_ratio.value
    chosen = np.empty(flat.shape[1], dtype=np.intp)
    for start in range(0, flat.shape[1], AT_ONCE):
        m, n, k = flat[:, None, start : start + AT_ONCE]
        t, w, r, s = (axis[:, None] for axis in (tall, wide, rate, split))
        filled = np.maximum(np.ceil(m / t) * np.ceil(n / w), 1.0) * s / num_sms
        wave_s = t * w * 2.0 * num_sms / r * (np.ceil(k / (STEP * s)) * STEP + single.k_overhead)
        joined_s = np.where(s > 1, s * m * n * single.split_bytes / single.bytes_per_s + single.split_s, 0.0)
        took = np.ceil(filled) * wave_s + joined_s
        work = np.where(took <= took.min(axis=0) * as_good, filled * wave_s + joined_s, np.inf)
        chosen[start : start + AT_ONCE] = work.argmin(axis=0)
    shape = np.broadcast_shapes(rows.shape, columns.shape, length.shape)
    return ChosenTiles(*(np.asarray(axis[chosen].reshape(shape)) for axis in (tall, wide, rate, split)))


def _joined(computing: FloatN, moved: FloatN, added: FloatN, form: MultiStreamForm) -> FloatN:
    moving = moved / form.bytes_per_s + added / form.added_bytes_per_s
    return form.floor_s + p_norm_of_times(computing, moving, form.sharpness)
