"""The curves of one GPU for another by what their files say: peaks, bandwidths, multiprocessors and power."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mofa.specs.scaling import UNSCALED, gpu_curves_transferred_to_other
from mofa.units import parse_quantity

POWERED = ("gemm", "grouped_gemm", "multi_stream")
"""Families of curves by format whose kernels the power limit slows down; attention is one more."""


def fact_ratio(new: Mapping[str, Any], old: Mapping[str, Any], unit: str, *path: str) -> float | None:
    """One fact of a GPU's mapping over that of another; None where either lacks it or holds no positive quantity. [-]

    Examples
    --------
    >>> fact_ratio({"tdp_w": {"value": "350 W"}}, {"tdp_w": {"value": "700 W"}}, "W", "tdp_w")
    0.5
    """
    values = []
    for facts in (new, old):
        fact: Any = facts
        for key in path:
            fact = fact.get(key) if isinstance(fact, Mapping) else None
        try:
            values.append(parse_quantity(fact["value"], unit) if unit else float(fact["value"]))
        except (KeyError, TypeError, ValueError):
            return None
    return values[0] / values[1] if min(values) > 0 else None


def curves_scaled_by_ratios(
    gpu: Mapping[str, Any], like: Mapping[str, Any], rates_over_like: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The curves of ``like`` for another GPU, by the ratios of what their files say.

    Parameters
    ----------
    gpu, like
        Mappings of two GPUs' files; ``like`` has curves.
    rates_over_like
        Rates of large products by format, and of ``attention``, over those of ``like`` where somebody measured them on
        both; peaks and powers say them elsewhere. [-]

    Returns
    -------
    dict
        ``like``'s own curves where nothing differs, else curves that are all ``assumed``.

    Notes
    -----
    Products and attention go by peaks, memory-bound kernels by bandwidth and multiprocessors
    (:func:`mofa.specs.scaling.gpu_curves_transferred_to_other`). The clock that the power limit leaves them goes with
    the root of
    power over peak: as :func:`mofa.specs.power.clock_at_power_draw` has it, draws grow with the square of the clock,
    and at full clock they are taken to go with the peak. A rate that was measured on both has its clock in it.
    """
    measured = dict(rates_over_like or {})
    peaks = {f: fact_ratio(gpu, like, "FLOP/s", "peak_flops_per_s", f) for f in gpu.get("peak_flops_per_s", {})}
    rates = {f: measured.get(f, ratio) for f, ratio in peaks.items() if ratio is not None}
    bandwidth = fact_ratio(gpu, like, "B/s", "memory_bandwidth_bytes_per_s") or 1.0
    sms, power = fact_ratio(gpu, like, "", "num_sms") or 1.0, fact_ratio(gpu, like, "W", "tdp_w") or 1.0
    curves: dict[str, Any] = like["curves"]
    if "bf16" not in rates or (
        set(rates) == set(like["peak_flops_per_s"])
        and all(ratio == 1.0 for ratio in (*rates.values(), *measured.values(), bandwidth, sms, power))
    ):
        return curves
    words = _words(str(like.get("name")), rates, bandwidth, sms, power)
    made = gpu_curves_transferred_to_other(
        curves, rates=rates, bandwidth=bandwidth, sms=sms, provenance="assumed", source=words, exact=False
    )
    draws = {f: power / ratio for f, ratio in rates.items() if f not in measured}
    for family in POWERED:
        for format_, curve in made.get(family, {}).items():
            made[family][format_] = curve_at_power_ratio(curve, draws.get(_peak_format(format_), 1.0))
    attention = measured.get("attention", rates["bf16"]) / rates["bf16"]
    made["attention"] = {
        key: _faster(curve_at_power_ratio(curve, 1.0 if "attention" in measured else draws.get("bf16", 1.0)), attention)
        for key, curve in made["attention"].items()
    }
    return {**made, **{name: curves[name] for name in UNSCALED if name in curves}}


def curve_at_power_ratio(curve: Mapping[str, Any], power_over_draw: float) -> dict[str, Any]:
    """A curve whose kernels have ``power_over_draw`` times the power for what they draw at full clock. [-]

    The clock goes with its root, at most to the full clock, and the rate with the clock as before
    (:meth:`mofa.specs.fitted.PowerLimitedCurve.relative_rate_at_clock`). A curve whose clock was never held down stays.

    Examples
    --------
    >>> made = curve_at_power_ratio({"sustained": 0.9, "alone": 0.85, "clock": 0.75, "clock_power": 0.5}, 0.64)
    >>> {name: round(value, 4) for name, value in made.items()}
    {'sustained': 0.805, 'alone': 0.7603, 'clock': 0.6, 'clock_power': 0.5}
    """
    clock, alone = float(curve.get("clock", 1.0)), float(curve.get("alone", 1.0))
    if power_over_draw == 1.0 or clock >= 1.0:
        return dict(curve)
    at_limit = min(clock * math.sqrt(power_over_draw), 1.0)
    exponent = curve.get("clock_power")
    if exponent is None:
        exponent = math.log(alone) / math.log(clock)
    change = (at_limit / clock) ** float(exponent)
    rates = {name: min(_digits(float(curve.get(name, 1.0)) * change), 1.0) for name in ("sustained", "alone")}
    return {**curve, **rates, "clock": _digits(at_limit)}


def _faster(curve: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """An attention curve whose units take so many times less."""
    form = curve["form"]
    return {**curve, "form": {**form, "unit_s": _digits(form["unit_s"] / rate)}} if rate != 1.0 else dict(curve)


def _peak_format(format_: str) -> str:
    return format_.split("_")[0]


def _words(like: str, rates: Mapping[str, float], bandwidth: float, sms: float, power: float) -> str:
    products = ", ".join(f"{format_} x {ratio:.3g}" for format_, ratio in rates.items())
    return (
        f"the {like}'s by the ratios of both files: {products}, memory bandwidth x {bandwidth:.3g}, "
        f"multiprocessors x {sms:.3g}, power x {power:.3g}"
    )


def _digits(value: float) -> float:
    return float(f"{value:.5g}")
