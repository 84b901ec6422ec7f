"""One family of kernels or collectives: measured dots, what the fitted curve says, and the residuals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mofa.report.figures.style import ACCENT, INK, MUTED, remove_clutter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WORK = {
    "gemm": ("work of the product [FLOP]", "rate [TFLOP/s]", 1e12),
    "grouped_gemm": ("work of all groups [FLOP]", "rate [TFLOP/s]", 1e12),
    "attention": ("work of the two products, causal halved [FLOP]", "rate [TFLOP/s]", 1e12),
    "memory_bound": ("elements", "rate [billion elements/s]", 1e9),
    "collective": ("payload [B]", "payload over time [GB/s]", 1e9),
}
"""Family to the words for its work and its rate, and the unit of the rate."""
_COLOURS = {"grid": MUTED, "heldout": "#08519c", "fresh": "#e6550d"}
_SPLIT_WORDS = {"grid": "fitted", "heldout": "held out", "fresh": "held out, fresh"}
_CLIP = 0.4
"""Errors beyond are drawn at the edge. [-]"""


def work_size(family: str, shape: str) -> float:
    """Size of a row's work: FLOPs, elements or bytes; what the rate is counted in.

    Examples
    --------
    >>> work_size("gemm", "m=4096 n=512 k=64")
    268435456.0
    >>> work_size("grouped_gemm", "n=10 k=10 skew=0.0 loads=3,2")
    1000.0
    >>> work_size("attention", "b=1 hq=2 hkv=1 q=8 kv=8 dqk=4 dv=4 causal=1")
    1024.0
    >>> work_size("memory_bound", "tokens=8 width=4 top_k=2")
    32.0
    """
    texts = dict(part.split("=", 1) for part in shape.split())
    if family in ("gemm", "grouped_gemm"):
        rows = sum(float(x) for x in texts["loads"].split(",")) if "loads" in texts else float(texts["m"])
        return 2.0 * rows * float(texts["n"]) * float(texts["k"])
    if family == "attention":
        b, heads, q, kv, d_qk, d_v = (float(texts[name]) for name in ("b", "hq", "q", "kv", "dqk", "dv"))
        return 2.0 * b * heads * q * kv * (d_qk + d_v) / (2.0 if texts.get("causal") == "1" else 1.0)
    if family == "collective":
        return float(texts["bytes"])
    if "params" in texts:
        return float(texts["params"])
    return float(texts.get("tokens", 1)) * float(texts.get("width", 1))


def plot_calibration(
    points: Sequence[Mapping[str, Any]], family: str, *, axes: tuple[Axes, Axes] | None = None
) -> Axes:
    """Plot a family: rates measured and predicted above, signed errors over the measured time below.

    Parameters
    ----------
    points
        Rows as :func:`mofa.calibrate.check.rows_with_predicted_times` gives them; those of other families are left out.
    family
        Such as gemm or collective.
    axes
        Axes for the rates and for the residuals; new ones where absent.

    Returns
    -------
    Axes
        Those of the rates.
    """
    top, bottom = axes or _new_pair()
    chosen = [point for point in points if point["family"] == family]
    _plot_rates(top, chosen, family)
    _plot_residuals(bottom, chosen)
    return top


def _new_pair() -> tuple[Axes, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 8.0), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, height_ratios=(3, 2))
    return top, bottom


def _plot_rates(ax: Axes, points: Sequence[Mapping[str, Any]], family: str) -> None:
    work_label, rate_label, unit = _WORK.get(family, ("work", "rate", 1.0))
    work = np.array([work_size(family, point["shape"]) for point in points])
    for split, colour in _COLOURS.items():
        of_split = np.array([point["split"] == split for point in points], dtype=bool)
        rate = work[of_split] / np.array([p["measured_s"] for p in points if p["split"] == split]) / unit
        if not of_split.any():
            continue
        label = f"measured, {_SPLIT_WORDS[split]} ({int(of_split.sum()):,})"
        ax.scatter(work[of_split], rate, s=12, color=colour, linewidths=0, rasterized=True, label=label)
    predicted = work / np.array([point["predicted_s"] for point in points]) / unit
    if family == "collective":  # one curve per collective and group: the shape is its payload
        _plot_lines(ax, points, work, predicted)
    else:
        ax.scatter(
            work, predicted, s=22, marker="_", color=INK, linewidths=0.7, rasterized=True, label="fitted curve, there"
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel(work_label)
    ax.set_ylabel(rate_label)
    ax.set_title(f"{family.replace('_', ' ')}: measured and fitted", loc="left")
    remove_clutter(ax, grid_axis="both")
    ax.legend(loc="lower right", frameon=False, fontsize=8)


def _plot_lines(ax: Axes, points: Sequence[Mapping[str, Any]], work: Any, predicted: Any) -> None:
    curves: dict[str, list[int]] = {}
    for i, point in enumerate(points):
        rest = [part for part in str(point["shape"]).split() if not part.startswith("bytes=")]
        curves.setdefault(" ".join([str(point["op"]), *rest]), []).append(i)
    for number, points_of_curve in enumerate(curves.values()):
        order = sorted(points_of_curve, key=lambda i: float(work[i]))
        label = f"fitted curves ({len(curves)})" if number == 0 else None
        ax.plot(work[order], predicted[order], color=INK, linewidth=0.7, label=label)


def _plot_residuals(ax: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    for split, colour in _COLOURS.items():
        for far, face, edge in ((False, colour, "none"), (True, "none", colour)):
            rows = [p for p in points if p["split"] == split and bool(p["extrapolated"]) == far]
            if not rows:
                continue
            error = np.clip([p["error"] for p in rows], -_CLIP, _CLIP)
            words = f"{_SPLIT_WORDS[split]}{', extrapolated' if far else ''}"
            time_us = np.array([p["measured_s"] for p in rows]) * 1e6
            ax.scatter(time_us, 100 * error, s=12, facecolors=face, edgecolors=edge, rasterized=True, label=words)
    errors = [abs(p["error"]) for p in points if p["split"] != "grid" and math.isfinite(p["error"])]
    if errors:
        median = 100 * float(np.median(errors))
        for side in (-median, median):
            label = f"median error of all held out, {median:.1f} %" if side > 0 else None
            ax.axhline(side, color=ACCENT, linewidth=0.8, linestyle="--", label=label)
    ax.axhline(0.0, color=INK, linewidth=0.8)
    ax.set_xscale("log")
    ax.set_ylim(-102 * _CLIP, 102 * _CLIP)
    ax.set_xlabel("measured time [µs]")
    ax.set_ylabel(f"predicted / measured − 1 [%], cut at {100 * _CLIP:.0f}")
    remove_clutter(ax, grid_axis="both")
    ax.legend(loc="upper right", frameon=False, fontsize=8, ncols=2)
