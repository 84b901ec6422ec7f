"""From measured rows to the parameters of `mofa.cost.kernels.fitted_forms`, with residuals and ranges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mofa.calibrate.cases import Case, Sample
from mofa.calibrate.fits.fitted_curves import CurveFit, DeviceCurveFits
from mofa.calibrate.fits.host_optimizer import host_optimizer_rates
from mofa.calibrate.fits.loaded_clocks import (
    attention_clock_exponents,
    clock_dependent_time_shares,
    clock_exponents,
    full_clock_product_rates,
    is_at_full_clock,
    memory_bound_clock_ratio,
    memory_time_between_products_s,
    sustained_clock_ratios,
)
from mofa.calibrate.fits.ratios import (
    copy_bandwidths,
    overlap_slowdown,
    overlapped_over_alone_time,
    slowdown_by_held_multiprocessors,
    sustained_rate_ratios,
)
from mofa.calibrate.fits.te_host_facts import layer_time_over_small_op, module_times_over_small_layer
from mofa.calibrate.fits.te_relative_host_times import HostTimesOverSmallLayer
from mofa.calibrate.fits.te_rows import ADDED_BYTES, gradient_accumulation_form, has_own_curve, is_row_of_short_kernels
from mofa.calibrate.measurements import Row
from mofa.calibrate.shapes.bytes_moved import bytes_moved_per_element
from mofa.calibrate.shapes.collective import HELD_MULTIPROCESSORS
from mofa.calibrate.shapes.families import MIN_POINTS
from mofa.calibrate.shapes.host_ops import HOST_OPTIMIZER
from mofa.calibrate.shapes.routed import BY_BYTES, READ_AGAIN
from mofa.calibrate.shapes.te_bf16 import ATTENTION, GROUPED, LOSSES, OPS, WGRAD
from mofa.calibrate.shapes.te_fp8 import CASTS, CHECKS, TO_FP32
from mofa.cost.kernels.fitted_forms import (
    attention_s,
    bus_bytes_per_payload_byte,
    collective_s,
    gemm_s,
    grouped_gemm_s,
    l2_miss_bytes,
    memory_bound_s,
)
from mofa.cost.kernels.multi_stream import ChosenTiles, chosen_tiles, multi_stream_products_s
from mofa.specs.curves import AttentionForm, CollectiveForm, GemmForm, GroupedGemmForm, MemoryBoundForm
from mofa.specs.multi_stream import MultiStreamForm
from mofa.specs.products import ELEMENT_BYTES

FloatN = NDArray[np.float64]
TILES = (
    (64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (256, 64), (192, 128), (128, 192), (256, 128), (128, 256),
)  # fmt: skip
LONG_PRODUCTS = (0.5, 0.06, 1e-3)
"""Where the fit of a product's partial round [-], slowdown [-] and the length that it comes with [s] begins."""
TILE_SHARES = (0.5, 0.65, 0.7, 0.85, 0.8, 0.7, 0.85, 0.85, 0.9, 0.9)
LAYOUT = {"fwd": 0, "dgrad": 1, "wgrad": 2}
BACKEND = {"te": "cudnn"}


def fit_curves(
    rows: Sequence[Row], *, num_sms: int, gpu: str, l2_bytes: float = 0.0, single: GemmForm | None = None
) -> DeviceCurveFits:
    """Fit every family that has rows; held-out rows are never looked at. ``l2_bytes`` 0 is an L2 of unknown size.

    ``single`` are the bf16 products that experts' on several streams are built on, where the rows hold none.
    """
    grid = [r for r in rows if r.case.split == "grid"]
    by = {name: [r for r in grid if r.case.family == name] for name in {r.case.family for r in grid}}

    def rows_of(*families: str) -> list[Row]:
        return [row for family in families for row in by.get(family, [])]

    copy_rates = copy_bandwidths(by.get("copy", []))
    copy_rate = copy_rates.get("device_copy", 0.0)
    memory = [r for r in rows_of("memory_bound", "compiled", "routed", OPS) if has_own_curve(r)]
    memory += [row for row in rows_of("te_cast") if row.case.op not in CHECKS]
    gemm = _each(rows_of("gemm", "te_gemm"), lambda r: r.case.dtype, lambda x: _fit_gemm(x, num_sms, copy_rate))
    product = gemm["bf16"].form if "bf16" in gemm else single
    streamed = rows_of(GROUPED) if product is not None else []
    streams = _each(memory, memory_bound_curve_key, lambda x: _fit_stream(x, l2_bytes))
    loaded, behind = rows_of("sustained", "te_sustained"), rows_of("throttled", "te_throttled")
    return DeviceCurveFits(
        gpu=gpu, num_sms=num_sms, l2_bytes=l2_bytes, gemm=gemm, single=product,
        grouped_gemm=_each(rows_of("grouped_gemm"), lambda r: r.case.dtype, lambda x: _fit_grouped(x, num_sms)),
        multi_stream=_each(streamed, lambda r: r.case.dtype, lambda x: _fit_multi_stream(x, num_sms, product))
        | _each(
            [row for row in rows_of("te_grouped") if row.case.dtype in gemm],
            lambda r: r.case.dtype, lambda x: _fit_multi_stream(x, num_sms, gemm[x[0].case.dtype].form),
        ),
        attention=_each(by.get("attention", []), attention_curve_key, lambda x: _fit_attention(x, num_sms)),
        memory_bound=streams | _adding(by.get(WGRAD, []), product, num_sms),
        collective=_each(by.get("collective", []), collective_curve_key, _fit_collective),
        sustained=sustained_rate_ratios(rows_of("sustained", "te_sustained")),
        clocks=sustained_clock_ratios(loaded), full_load_flops=full_clock_product_rates(loaded),
        memory_clock=memory_bound_clock_ratio(rows_of("sustained"), partial(memory_time_between_products_s, streams)),
        clock_powers=clock_exponents(loaded) | attention_clock_exponents(behind),
        clock_shares=clock_dependent_time_shares(behind), overlap=overlapped_over_alone_time(by.get("overlap", [])),
        host_s={r.case.op: r.sample.median_s for r in by.get("host", [])},
        modules=module_times_over_small_layer(HostTimesOverSmallLayer.from_rows(by.get("te_host", []))),
        layer_in_small_ops=layer_time_over_small_op(by.get("te_host", [])),
        copy_bytes_per_s=copy_rates, host_optimizer=host_optimizer_rates(by.get(HOST_OPTIMIZER, [])),
        overlap_slowdown=overlap_slowdown(by.get("overlap", [])),
        slowdown_by_held_multiprocessors=slowdown_by_held_multiprocessors(by.get(HELD_MULTIPROCESSORS, [])),
    )  # fmt: skip


def attention_curve_key(row: Row) -> str:
    """Key of an attention's curve: backend, way, head sizes. Transformer Engine's is cuDNN's, measured apart."""
    case = row.case
    return f"{BACKEND.get(case.variant, case.variant)} {case.op} {case.shape_size('dqk')}/{case.shape_size('dv')}"


def memory_bound_curve_key(row: Row) -> str:
    """Key of a memory-bound op's curve: eager or compiled, and the op."""
    return f"{row.case.variant} {row.case.op}"


def collective_curve_key(row: Row) -> str:
    """Key of a collective's curve: its kind and its group size."""
    return f"{row.case.op} {row.case.shape_size('group')}"


def predict_row_times(curves: DeviceCurveFits, rows: Sequence[Row]) -> tuple[FloatN, NDArray[np.bool_]]:
    """Predicted times, NaN where no curve is, and whether a row lies outside the measured range. [s]"""
    time_s, outside = np.full(len(rows), np.nan), np.zeros(len(rows), bool)

    def streamed_in_fp8(of: Sequence[Row], form: MultiStreamForm) -> FloatN:
        return _multi_stream_times(of, form, curves.gemm[of[0].case.dtype].form, curves.num_sms)

    stream = partial(_stream_times, l2_bytes=curves.l2_bytes)
    predictors: dict[str, tuple[dict[str, CurveFit], Callable[[Row], str], Callable[..., FloatN]]] = {
        "gemm": (curves.gemm, lambda r: r.case.dtype, partial(_gemm_times, num_sms=curves.num_sms)),
        "grouped_gemm": (curves.grouped_gemm, lambda r: r.case.dtype, partial(_grouped_times, num_sms=curves.num_sms)),
        "te_gemm": (curves.gemm, lambda r: r.case.dtype, partial(_gemm_times, num_sms=curves.num_sms)),
        "te_grouped": (curves.multi_stream, lambda r: r.case.dtype, streamed_in_fp8),
        GROUPED: (
            curves.multi_stream,
            lambda r: r.case.dtype,
            partial(_multi_stream_times, single=curves.single, num_sms=curves.num_sms),
        ),
        "attention": (curves.attention, attention_curve_key, _attention_times),
        ATTENTION: (curves.attention, attention_curve_key, _attention_times),
        "memory_bound": (curves.memory_bound, memory_bound_curve_key, stream),
        "compiled": (curves.memory_bound, memory_bound_curve_key, stream),
        "routed": (curves.memory_bound, memory_bound_curve_key, stream),
        "te_cast": (curves.memory_bound, memory_bound_curve_key, stream),
        OPS: (curves.memory_bound, memory_bound_curve_key, stream),
        "collective": (curves.collective, collective_curve_key, _collective_times),
        "dependent_collective": (curves.collective, collective_curve_key, _collective_times),
    }  # fmt: skip
    for family, (fitted_forms, key, times) in predictors.items():
        for name, fitted in fitted_forms.items():
            indices = [i for i, r in enumerate(rows) if r.case.family == family and key(r) == name and has_own_curve(r)]
            if indices:
                chosen = [rows[i] for i in indices]
                time_s[indices] = times(chosen, fitted.form)
                outside[indices] = _outside(chosen, fitted.ranges)
    return time_s, outside


class _RowsOfKind(tuple[Row, ...]):
    """Rows that one form is fitted to: each column is read once, not at every evaluation of the form."""

    def column(self, name: str, read: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """What ``read`` gives of the rows, by its name."""
        known: dict[str, NDArray[Any]] = self.__dict__.setdefault("known", {})
        if name not in known:
            known[name] = read()
        return known[name]


def _once(rows: Sequence[Row], name: str, read: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    return rows.column(name, read) if isinstance(rows, _RowsOfKind) else read()


def _each(rows: Sequence[Row], key: Callable[[Row], str], fit: Callable[[_RowsOfKind], Any]) -> dict[str, CurveFit]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return {name: fit(_RowsOfKind(members)) for name, members in sorted(groups.items()) if len(members) >= MIN_POINTS}


def _fitted(rows: Sequence[Row], form: Any, times: FloatN, names: Sequence[str]) -> CurveFit:
    error = np.abs(times / _measured(rows) - 1)
    ranges = {n: (float(v.min()), float(v.max())) for n in names if (v := _column(rows, n)).size}
    return CurveFit(form, len(rows), float(np.median(error)), float(np.quantile(error, 0.9)), ranges)


def _outside(rows: Sequence[Row], ranges: dict[str, tuple[float, float]]) -> NDArray[np.bool_]:
    outside = np.zeros(len(rows), bool)
    for name, (low, high) in ranges.items():
        values = _column(rows, name)
        outside |= (values < low) | (values > high)
    return outside


def _measured(rows: Sequence[Row]) -> FloatN:
    return np.array([r.sample.median_s for r in rows])


def _column(rows: Sequence[Row], name: str) -> FloatN:
    """A number of each row's shape; of an expert load, ``tokens`` and ``groups`` are derived."""
    if name in ("tokens", "groups") and rows and "loads" in rows[0].case.shape:
        return _once(rows, name, lambda: _loads(rows).sum(axis=1) if name == "tokens" else _groups(rows))
    return _once(rows, name, lambda: np.array([float(r.case.shape.get(name, 0)) for r in rows]))


def _robust(
    residual: Callable[[FloatN], FloatN], start: Sequence[float], *, max_evaluations: int = 60
) -> tuple[FloatN, float]:
    """Least squares in the logarithms of positive parameters, outliers damped, drawn weakly to their start."""
    from scipy.optimize import least_squares  # a third of a second to load

    origin = np.log(np.array(start, dtype=np.float64))

    def with_prior(x: FloatN) -> FloatN:
        return np.concatenate([residual(np.exp(x)), 0.01 * (x - origin)])

    bounds = (origin - 4.0, origin + 4.0)
    solution = least_squares(
        with_prior,
        origin,
        loss="soft_l1",
        f_scale=0.05,
        diff_step=[1e-3] * len(origin),
        max_nfev=max_evaluations,
        bounds=bounds,
    )
    return np.exp(solution.x), float(solution.cost)


def _gemm_times(rows: Sequence[Row], form: GemmForm, num_sms: int) -> FloatN:
    m, n, k = (_column(rows, x) for x in "mnk")
    return gemm_s(m, n, k, form, element_bytes=ELEMENT_BYTES[rows[0].case.dtype], num_sms=num_sms,
                  output_bytes=_output_bytes(rows))  # fmt: skip


def _output_bytes(rows: Sequence[Row]) -> FloatN:
    """Written per element of a product's result; read as well where it is added to an fp32 one. [B]"""
    return _once(rows, "output bytes", lambda: np.array([8.0 if r.case.variant == TO_FP32 else 2.0 for r in rows]))


def _fit_gemm(rows: Sequence[Row], num_sms: int, copy_bytes_per_s: float) -> CurveFit:
    """The byte rate starts at the copy's, where one was measured: few products are bound by bytes.

    Rows behind which the clock was not full are told, and not fitted to.
    """
    measured, weight = _measured(rows), is_at_full_clock(rows)
    m, n, k = (_column(rows, x) for x in "mnk")
    best = float(np.quantile(2 * m * n * k / measured, 0.99))
    moved = copy_bytes_per_s or float(
        np.quantile(((m + n) * k * ELEMENT_BYTES[rows[0].case.dtype] + _output_bytes(rows) * m * n) / measured, 0.99)
    )

    def form(x: FloatN) -> GemmForm:
        tiles = tuple((a, b, float(rate)) for (a, b), rate in zip(TILES, x[9:], strict=True))
        overhead, floor_s, rate, sharpness, split_bytes, split_s, saving, slowdown, after_s = (float(v) for v in x[:9])
        return GemmForm(
            tiles, overhead, floor_s, rate, sharpness, split_s, split_bytes, partial_round_saving=min(saving, 1.0),
            slowdown=min(slowdown, 1.0), slowdown_after_s=after_s,
        )  # fmt: skip

    joined = [200.0, 0.8 * float(measured.min()), moved, 3.0, 4.0, 1.5e-6, *LONG_PRODUCTS]
    start = [*joined, *(best * 1.1 * share for share in TILE_SHARES)]
    x, _ = _robust(lambda p: weight * np.log(_gemm_times(rows, form(p), num_sms) / measured), start)
    return _fitted(rows, form(x), _gemm_times(rows, form(x), num_sms), "mnk")


def _loads(rows: Sequence[Row]) -> FloatN:
    loads = [[float(x) for x in str(r.case.shape["loads"]).split(",")] for r in rows]
    padded = np.zeros((len(rows), max(map(len, loads))))
    for i, load in enumerate(loads):
        padded[i, : len(load)] = load
    return padded


def _groups(rows: Sequence[Row]) -> FloatN:
    return _once(rows, "groups", lambda: np.array([str(r.case.shape["loads"]).count(",") + 1.0 for r in rows]))


def _layout(rows: Sequence[Row]) -> NDArray[Any]:
    return _once(rows, "layout", lambda: np.array([LAYOUT[r.case.op] for r in rows]))


def _grouped_times(rows: Sequence[Row], form: GroupedGemmForm, num_sms: int, loads: FloatN | None = None) -> FloatN:
    loads = _loads(rows) if loads is None else loads
    return grouped_gemm_s(
        loads, _column(rows, "n"), _column(rows, "k"), _layout(rows), form, num_sms=num_sms, groups=_groups(rows),
        element_bytes=ELEMENT_BYTES[rows[0].case.dtype],
        added_bytes=_once(
            rows, "added bytes", lambda: np.array([ADDED_BYTES if r.case.variant == TO_FP32 else 0.0 for r in rows])
        ),
    )  # fmt: skip


def _fit_grouped(rows: Sequence[Row], num_sms: int) -> CurveFit:
    measured, loads = _measured(rows), _loads(rows)
    best = float(np.quantile(2 * loads.sum(axis=1) * _column(rows, "n") * _column(rows, "k") / measured, 0.99))
    names = [f.name for f in fields(GroupedGemmForm) if isinstance(f.default, float)]
    start = [0.75 * best, 1.1 * best, 200.0, 200.0, 8e-6, 1e-7, 4e12, 2.7]

    def form(x: FloatN) -> GroupedGemmForm:
        return replace(GroupedGemmForm(), **dict(zip(names, map(float, x), strict=True)))  # type: ignore[arg-type]

    x, _ = _robust(lambda p: np.log(_grouped_times(rows, form(p), num_sms, loads) / measured), start)
    return _fitted(rows, form(x), _grouped_times(rows, form(x), num_sms, loads), ("tokens", "groups", "n", "k"))


def _adding(rows: Sequence[Row], single: GemmForm | None, num_sms: int) -> dict[str, CurveFit]:
    """What a product moves more that adds to an fp32 gradient, as a memory-bound op; its error is the products'."""
    form = gradient_accumulation_form(rows, single, num_sms) if single is not None else None
    if form is None or single is None:
        return {}
    m, n, k = (_column(rows, x) for x in "mnk")
    times = gemm_s(m, n, k, single, element_bytes=2.0, num_sms=num_sms) + ADDED_BYTES * m * n / form.bytes_per_s
    return {"te wgrad_add": _fitted(rows, form, times, ())}


def _multi_stream_times(
    rows: Sequence[Row], form: MultiStreamForm, single: GemmForm | None, num_sms: int, loads: FloatN | None = None,
    chosen: ChosenTiles | None = None,
) -> FloatN:  # fmt: skip
    """Weights' gradients add to fp32 ones: 6 bytes an element more than 16 bits."""
    layout = _layout(rows)
    loads = _loads(rows) if loads is None else loads
    n, k = _column(rows, "n"), _column(rows, "k")
    assert single is not None
    return multi_stream_products_s(
        loads, n, k, layout, form, single, num_sms=num_sms, added_bytes=ADDED_BYTES,
        element_bytes=ELEMENT_BYTES[rows[0].case.dtype], chosen=chosen,
    )  # fmt: skip


def _fit_multi_stream(rows: Sequence[Row], num_sms: int, single: GemmForm | None) -> CurveFit:
    assert single is not None
    measured, loads = _measured(rows), _loads(rows)
    chosen = chosen_tiles(loads, _column(rows, "n"), _column(rows, "k"), _layout(rows), single, num_sms=num_sms)
    start = [6e-6, 1e-6, 1.0, single.bytes_per_s, single.bytes_per_s / 1.5, 4.0]

    def form(x: FloatN) -> MultiStreamForm:
        return MultiStreamForm(*(float(v) for v in x))

    def times(x: FloatN) -> FloatN:
        return _multi_stream_times(rows, form(x), single, num_sms, loads, chosen)

    x, _ = _robust(lambda p: np.log(times(p) / measured), start)
    return _fitted(rows, form(x), times(x), ("tokens", "groups", "n", "k"))


ATTENTION_SIZES = ("b", "hq", "hkv", "q", "kv", "dqk", "dv", "causal")


def _attention_times(rows: Sequence[Row], form: AttentionForm, sizes: Any = None) -> FloatN:
    sizes = [_column(rows, x) for x in ATTENTION_SIZES] if sizes is None else sizes
    b, hq, hkv, q, kv, d_qk, d_v, causal = sizes
    return attention_s(b, hq, hkv, q, kv, d_qk, d_v, causal, form, backward=rows[0].case.op == "bwd")


def _fit_attention(rows: Sequence[Row], num_sms: int) -> CurveFit:
    """The block and the slots are whole numbers: tried one after the other, the best kept."""
    measured = _measured(rows)
    sizes = [_column(rows, x) for x in ATTENTION_SIZES]
    b, hq, _, q, kv, _, _, causal = sizes
    per_pair = float(np.median(measured / (b * hq * q * kv / np.where(causal > 0, 2, 1))))
    best: tuple[float, AttentionForm] | None = None
    for slots in (num_sms // 2, num_sms, 2 * num_sms):
        for block in (128, 192, 256):

            def form(x: FloatN, block: int = block, slots: int = slots) -> AttentionForm:
                return AttentionForm(block, slots, *(float(v) for v in x))

            start = [per_pair * block * 128 * slots, 8e-6, 1.0, 0.7, 1.0, 6e12]
            x, cost = _robust(lambda p, form=form: np.log(_attention_times(rows, form(p), sizes) / measured),  # type: ignore[misc]
                              start, max_evaluations=30)  # fmt: skip
            if best is None or cost < best[0]:
                best = cost, form(x)
    assert best is not None
    return _fitted(rows, best[1], _attention_times(rows, best[1]), ("q", "kv"))


def _stream_columns(rows: Sequence[Row]) -> FloatN:
    """Elements, rows and columns of each case."""
    shape = rows[0].case.shape
    if "params" in shape:
        return np.stack([_column(rows, "params"), _column(rows, "tensors"), np.zeros(len(rows))])
    tokens, width = _column(rows, "tokens"), _column(rows, "width")
    return np.stack([tokens * width, tokens, width])


def _missed(rows: Sequence[Row], l2_bytes: float) -> FloatN | None:
    """Bytes that ops that read rows again miss in the L2; None of other ops, or where its size is not known."""
    op = rows[0].case.op
    if op not in READ_AGAIN or not l2_bytes:
        return None
    elements = _stream_columns(rows)[0]
    moved = elements * bytes_moved_per_element(op, rows[0].case.variant)
    return l2_miss_bytes(moved, elements * READ_AGAIN[op], l2_bytes)


def _stream_times(rows: Sequence[Row], form: MemoryBoundForm, l2_bytes: float) -> FloatN:
    elements, counted_rows, columns = _stream_columns(rows)
    missed = _missed(rows, l2_bytes)
    return memory_bound_s(elements, counted_rows, columns, form, 0.0 if missed is None else missed)


def _fit_stream(rows: Sequence[Row], l2_bytes: float = 0.0) -> CurveFit:
    """Non-negative least squares of relative errors, reweighted to the sum of absolute ones.

    Of ops that read rows again, what the L2 misses stands in for what a row and a column cost.
    """
    from scipy.optimize import nnls  # a third of a second to load

    measured, missed = _measured(rows), _missed(rows, l2_bytes)
    columns = _stream_columns(rows) if missed is None else np.stack([_stream_columns(rows)[0], missed])
    if bare := rows[0].case.op in (*BY_BYTES, *LOSSES, *CASTS) or is_row_of_short_kernels(rows[0]):
        columns = columns[:1]
    features = np.vstack([np.ones(len(rows)), columns]).T / measured[:, None]
    scale = np.maximum(np.abs(features).mean(axis=0), 1e-300)
    weight = np.ones(len(rows))
    for _ in range(30):
        x = nnls(features / scale * weight[:, None], weight)[0] / scale
        weight = 1 / np.sqrt(np.maximum(np.abs(features @ x - 1), 0.01))
    moved = bytes_moved_per_element(rows[0].case.op, rows[0].case.variant)
    form = MemoryBoundForm(float(x[0]), moved, moved / max(float(x[1]), 1e-30))
    if missed is None and not bare:
        form = replace(form, per_row_s=float(x[2]), per_column_s=float(x[3]))
    elif missed is not None and x[2] > 0:
        form = replace(form, missed_bytes_per_s=1.0 / float(x[2]))
    names = ("params",) if "params" in rows[0].case.shape else ("tokens", "width")
    return _fitted(rows, form, _stream_times(rows, form, l2_bytes), names)


def _collective_times(rows: Sequence[Row], form: CollectiveForm) -> FloatN:
    return collective_s(_column(rows, "bytes"), rows[0].case.op, form)


def fit_collective_curve(op: str, group: int, sizes: Sequence[float], times_s: Sequence[float]) -> CurveFit:
    """The curve of one collective over one group size, from payloads [B] and times [s]."""
    return _fit_collective(
        [
            Row(
                Case("collective", op, "nccl", "bytes", "grid", {"bytes": round(size), "group": group}),
                Sample(time_s, time_s, time_s, 1),
                "",
                "",
            )
            for size, time_s in zip(sizes, times_s, strict=True)
        ]
    )


OF_THREE_LINES = tuple(
    ((1.0, middle, last), (8.0, 2.7, 1 / 0.98)) for middle, last in ((1.3, 3.0), (1.3, 6.0), (1.6, 4.0))
)
OF_FOUR_LINES = (
    ((1.0, 1.3, 3.0, 10.0), (8.0, 2.7, 1.2, 1 / 0.98)), ((1.0, 1.3, 6.0, 20.0), (8.0, 2.7, 1.2, 1 / 0.98)),
    ((1.0, 1.6, 4.0, 8.0), (8.0, 2.7, 1.1, 1 / 0.98)), ((1.0, 1.3, 2.5, 5.0), (8.0, 3.0, 1.5, 1 / 0.98)),
    ((1.0, 1.5, 3.0, 6.0), (16.0, 6.0, 1.5, 1 / 0.98)),
)  # fmt: skip
"""Where searches for a collective's lines begin: starts over the shortest time, the highest rate over theirs. [-]"""
ROWS_OF_FOUR_LINES = 16
"""Rows from which four lines are fitted. [-]"""


def _fit_collective(rows: Sequence[Row]) -> CurveFit:
    """A line for each way that NCCL sends; of several starting points of the search the best is kept.

    Two of its protocols, and of the one for large payloads slopes that fall by steps up to 1 GiB: four lines, three
    where the rows are few.
    """
    measured, size = _measured(rows), _column(rows, "bytes")
    op, group = rows[0].case.op, rows[0].case.shape_size("group")
    fast = float(np.max(size / measured)) * bus_bytes_per_payload_byte(op, group)
    least = float(measured.min())
    best: tuple[float, CollectiveForm] | None = None
    starts = OF_FOUR_LINES if len(rows) >= ROWS_OF_FOUR_LINES else OF_THREE_LINES

    def form(x: FloatN) -> CollectiveForm:
        half = len(x) // 2
        pairs = sorted(zip(map(float, x[:half]), map(float, x[half:]), strict=True))
        return CollectiveForm(tuple(pairs), group)

    for later, slower in starts:
        start = [*(least * times for times in later), *(fast / times for times in slower)]
        x, cost = _robust(
            lambda p: np.log(_collective_times(rows, form(p)) / measured), start, max_evaluations=60 * len(later) - 120
        )
        if best is None or cost < best[0]:
            best = cost, form(x)
    assert best is not None
    return _fitted(rows, best[1], _collective_times(rows, best[1]), ("bytes",))
