"""What is read off measured rows without a fit: ratios of times of the same kernel, and copies' rates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import isotonic_regression

from mofa.calibrate.measurements import Row
from mofa.calibrate.shapes.collective import TIMED_BESIDE_HELD


def sustained_rate_ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Per op and format: the median over shapes of burst over sustained time, alone and between memory-bound ops."""
    burst = {(r.case.op, r.case.dtype, r.case.shape_text): r.sample.median_s for r in rows if r.case.variant == "burst"}
    ratios: dict[str, list[float]] = {}
    for r in rows:
        key = r.case.op, r.case.dtype, r.case.shape_text
        if r.case.variant != "burst" and key in burst:
            name = f"{r.case.op} {r.case.dtype} {'alone' if r.case.variant == '2s' else r.case.variant}"
            ratios.setdefault(name, []).append(burst[key] / r.sample.median_s)
    return {name: float(np.median(values)) for name, values in sorted(ratios.items())}


def copy_bandwidths(rows: Sequence[Row]) -> dict[str, float]:
    """Rate of the largest copy of each kind; a copy on the device counts bytes read and written. [B/s]"""
    rates: dict[str, float] = {}
    for r in sorted(rows, key=lambda r: r.case.shape_size("bytes")):
        factor = 2 if r.case.op in ("device_copy", "h2d_d2h") else 1
        rates[r.case.op] = factor * r.case.shape_size("bytes") / r.sample.median_s
    return rates


def overlapped_over_alone_time(rows: Sequence[Row]) -> dict[str, float]:
    """Time of a collective or product beside the other over its time alone, by op: the median over sizes. [-]"""
    times = {(r.case.op, r.case.shape_text, r.case.variant): r.sample.median_s for r in rows}
    ratios: dict[str, list[float]] = {}
    for (op, shape, variant), time_s in times.items():
        alone = times.get((op, shape, variant.replace("overlapped", "alone")))
        if "overlapped" in variant and alone:
            ratios.setdefault(f"{op} {variant.replace('_overlapped', '')}", []).append(time_s / alone)
    return {name: float(np.median(values)) for name, values in sorted(ratios.items())}


def overlap_slowdown(rows: Sequence[Row]) -> float:
    """Seconds that computing loses per second that a collective beside it takes alone. [-]

    Layers beside a collective each (``layer``) say it directly: what all of them lose over what all collectives take.
    Without them the median of kernels in a loop does: the share of its rate that computing loses, times what the
    collective takes beside it over what it takes alone. Only kernels that the collective outlasts count: beside a
    longer kernel, how long both ran together was not recorded.
    """
    times = {(r.case.op, r.case.shape_text, r.case.variant): r.sample.median_s for r in rows}
    lost_s = collectives_s = 0.0
    by_kernels = []
    for (op, shape, variant), beside in times.items():
        kind = variant.removesuffix("_overlapped")
        alone = times.get((op, shape, f"{kind}_alone"))
        other = [times.get((op, shape, f"collective_{state}_{kind}")) for state in ("overlapped", "alone")]
        if kind == variant or not alone or not other[1]:
            continue
        if kind == "layer":
            lost_s, collectives_s = lost_s + beside - alone, collectives_s + other[1]
        elif other[0] and other[0] >= beside:
            by_kernels.append((1.0 - alone / beside) * other[0] / other[1])
    if collectives_s:
        return max(0.0, lost_s / collectives_s)
    return float(np.median(by_kernels)) if by_kernels else 0.0


def slowdown_by_held_multiprocessors(rows: Sequence[Row]) -> dict[int, float]:
    """Seconds that layers lose per second that so many multiprocessors are held by a kernel that waits. [-]

    Parameters
    ----------
    rows
        Of the family ``held_multiprocessors``. Those beside a kernel that copies are not looked at.

    Returns
    -------
    dict[int, float]
        By the number of multiprocessors: what all layers lose over how long all were held. It does not fall as more
        are held, which can give computing nothing back: its least-squares monotone fit stands for it. Empty without
        such rows.
    """
    times: dict[tuple[int, str], dict[str, float]] = {}
    for row in rows:
        if row.case.op == "spin":
            key = row.case.shape_size("multiprocessors"), row.case.shape_text
            times.setdefault(key, {})[row.case.variant] = row.sample.median_s
    lost_s: dict[int, float] = {}
    held_s: dict[int, float] = {}
    for (number, _), by_variant in sorted(times.items()):
        if by_variant.keys() >= set(TIMED_BESIDE_HELD):
            alone_s, overlapped_s, took_s = (by_variant[variant] for variant in TIMED_BESIDE_HELD)
            lost_s[number] = lost_s.get(number, 0.0) + overlapped_s - alone_s
            held_s[number] = held_s.get(number, 0.0) + took_s
    if not lost_s:
        return {}
    seconds = np.array(list(held_s.values()))
    fitted = isotonic_regression(np.maximum(list(lost_s.values()), 0.0) / seconds, weights=seconds).x
    return dict(zip(lost_s, fitted.tolist(), strict=True))
