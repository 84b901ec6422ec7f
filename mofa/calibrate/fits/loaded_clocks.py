"""What the power limit makes of clocks, and a lower clock of kernels: read off rows of kernels under load."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.calibrate.fits.fitted_curves import CurveFit
from mofa.calibrate.measurements import Row
from mofa.calibrate.shapes.te_bf16 import ATTENTION, GROUPED
from mofa.calibrate.shapes.te_throttled import FAMILY, unthrottled_case_of_same_kernel
from mofa.cost.kernels.fitted_forms import memory_bound_s

BETWEEN, BETWEEN_WIDTH = ("eager silu", "eager mul", "eager rmsnorm_fwd"), 8192.0
"""What ``sustained`` runs between products, on as many rows as they have, and its width."""
MEMORY_DRAWS = (0.05, 2.0)
"""Power of memory-bound kernels at full clock over the limit, between which it is sought. [-]"""
CLEARLY_BELOW = 0.97
"""Clocks over the full one above which a state says too little of what a lower clock does. [-]"""
FULL_CLOCK = 0.99
"""Share of the highest clock read from which on a row's counts as full: a step of the clock is 0.8 %. [-]"""
SCATTERED = 1.5
"""Slowest over fastest sample of a kernel at full clock beyond which its row is no use. [-]"""
POWER_DRAWING = {f"{ATTENTION}.fwd": "attention_cudnn_fwd", f"{ATTENTION}.bwd": "attention_cudnn_bwd"}
"""Of Transformer Engine's kernels timed behind products, those that draw power themselves, and their names here."""
UNREAD = ("te_gemm", GROUPED)
"""Products behind products: fp8's law comes from products alone, and experts' have the kernels of others. Timed here,
experts' powers of the clock scatter from 0.17 to 1.7."""


def sustained_clock_ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Clock of an op that runs alone under the power limit, over the full clock: the median over shapes. [-]

    By op and format.
    """
    clock_ratios: dict[str, list[float]] = {}
    for name, states in _loaded(rows).items():
        clock_ratios.setdefault(f"{name[0]} {name[1]}", []).append(states["2s"].clock)
    return {name: float(np.median(values)) for name, values in sorted(clock_ratios.items())}


def full_clock_product_rates(rows: Sequence[Row]) -> dict[str, float]:
    """Rate at full clock of the products of :func:`sustained_clock_ratios`: the median over shapes. [FLOP/s]

    By op and format.
    """
    rates: dict[str, list[float]] = {}
    for row in rows:
        case = row.case
        if case.op == "gemm" and case.variant == "burst":
            flops = 2.0 * case.shape_size("m") * case.shape_size("n") * case.shape_size("k")
            rates.setdefault(f"{case.op} {case.dtype}", []).append(flops / row.sample.median_s)
    return {name: float(np.median(values)) for name, values in sorted(rates.items())}


def memory_bound_clock_ratio(rows: Sequence[Row], between_s: Callable[[float], float]) -> float | None:
    """Clock at which memory-bound kernels alone draw the power limit over the full clock; above 1 where they never do.

    Solved by least squares from the clocks of all that ran alone and between memory-bound kernels, which
    :func:`mofa.specs.power.clock_at_power_draw` says of their mean draw. None without such rows.

    Parameters
    ----------
    between_s
        Time of the kernels between products of so many rows. [s]
    """
    mixes = [
        (states["between_memory"], states["2s"].clock, between_s(rows_of_product))
        for (_, _, rows_of_product, _), states in _loaded(rows).items() if "between_memory" in states
    ]  # fmt: skip
    if not mixes:
        return None
    from scipy.optimize import minimize_scalar  # a third of a second to load

    shares = np.array([mixed.seconds / (mixed.seconds + other_s) for mixed, _, other_s in mixes])
    alone, clock = (np.array(values) for values in ([a for _, a, _ in mixes], [mixed.clock for mixed, _, _ in mixes]))

    def distance(draw: float) -> float:
        mixed = np.minimum((shares * alone**-2 + (1.0 - shares) * draw) ** -0.5, 1.0)
        return float(np.sum(np.log(mixed / clock) ** 2))

    draw = minimize_scalar(distance, bounds=MEMORY_DRAWS, method="bounded").x
    return float(draw**-0.5)


def memory_time_between_products_s(streams: Mapping[str, CurveFit], rows: float) -> float:
    """Time of the memory-bound kernels between products of so many rows, by their own curves. [s]"""
    forms = [streams[key].form for key in BETWEEN if key in streams]
    return sum(float(memory_bound_s(rows * BETWEEN_WIDTH, rows, BETWEEN_WIDTH, form)) for form in forms)


def clock_exponents(rows: Sequence[Row]) -> dict[str, float]:
    """Exponent ``p`` of rate ~ clock^p, by op and format: the median over shapes and loaded states. [-]"""
    powers: dict[str, list[float]] = {}
    for (op, dtype, _, _), states in _loaded(rows).items():
        full = states["burst"].seconds
        powers.setdefault(f"{op} {dtype}", []).extend(
            math.log(full / state.seconds) / math.log(state.clock)
            for variant, state in states.items()
            if variant != "burst" and state.clock < CLEARLY_BELOW
        )
    return {name: max(float(np.median(values)), 0.0) for name, values in sorted(powers.items()) if values}


def clock_dependent_time_shares(rows: Sequence[Row]) -> dict[str, float]:
    """By stream curve: the share of its time at full clock that grows as the clock falls, behind products.

    The median over an op's shapes of the least squares over its loads.
    """
    shares: dict[str, list[float]] = {}
    for name, points in _behind_products(rows):
        if name not in POWER_DRAWING.values():
            grown = [(1.0 / clock - 1.0, times - 1.0) for clock, times in points]
            shares.setdefault(name, []).append(min(max(_slope(grown), 0.0), 1.0))
    return {name: float(np.median(values)) for name, values in sorted(shares.items())}


def attention_clock_exponents(rows: Sequence[Row]) -> dict[str, float]:
    """As :func:`clock_exponents`, of attention behind products that hold the clock down."""
    powers: dict[str, list[float]] = {}
    for name, points in _behind_products(rows):
        if name in POWER_DRAWING.values():
            powers.setdefault(f"{name} bf16", []).extend(-math.log(times) / math.log(clock) for clock, times in points)
    return {name: float(np.median(values)) for name, values in sorted(powers.items())}


def _behind_products(rows: Sequence[Row]) -> list[tuple[str, list[tuple[float, float]]]]:
    """By kernel and shape: clocks over the full one, and times over that at full clock, behind products."""
    times: dict[tuple[str, str], dict[str, Row]] = {}
    full_mhz = max((row.sample.sm_mhz or 0.0 for row in rows), default=0.0)
    for row in rows:
        name, load = _kernel(row)
        times.setdefault((name, row.case.shape_text), {})[load] = row
    behind = []
    for (name, _), by_load in times.items():
        full = by_load.pop("burst", None)
        if not name or full is None or full.sample.high_s > SCATTERED * full.sample.low_s:
            continue
        points = [
            (row.sample.sm_mhz / full_mhz, row.sample.median_s / full.sample.median_s)
            for row in by_load.values() if row.sample.sm_mhz and row.sample.sm_mhz < CLEARLY_BELOW * full_mhz
        ]  # fmt: skip
        if points:
            behind.append((name, points))
    return behind


def _kernel(row: Row) -> tuple[str, str]:
    """The curve of a kernel that was timed behind products, empty where it has none, and its load."""
    if row.case.family != FAMILY:
        kind, load = row.case.variant.split("_")
        return f"{kind} {row.case.op}", load
    timed = unthrottled_case_of_same_kernel(row.case)
    if timed.family == ATTENTION:
        return POWER_DRAWING[row.case.op], row.case.variant
    return ("" if timed.family in UNREAD else f"{timed.variant} {timed.op}"), row.case.variant


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line through the origin that is nearest in y."""
    return sum(x * y for x, y in points) / sum(x * x for x, _ in points)


class _State(NamedTuple):
    seconds: float
    clock: float
    """Over the full one. [-]"""


def _loaded(rows: Sequence[Row]) -> dict[tuple[str, str, float, str], dict[str, _State]]:
    """By op, format, rows of the product and shape: time and clock in each state, ``burst`` at full clock among them.

    Where seconds of products drew no more power than the first milliseconds, another GPU of the machine was read, which
    says nothing.
    """
    read: dict[tuple[str, str, float, str], dict[str, Row]] = {}
    for row in rows:
        case = row.case
        read.setdefault((case.op, case.dtype, float(case.shape_size("m")), case.shape_text), {})[case.variant] = row
    states = {}
    for key, by_variant in read.items():
        full, alone = by_variant.get("burst"), by_variant.get("2s")
        if full is None or alone is None or not full.sample.sm_mhz or not alone.sample.sm_mhz:
            continue
        if full.sample.power_w and alone.sample.power_w and alone.sample.power_w <= full.sample.power_w:
            continue
        states[key] = {
            variant: _State(row.sample.median_s, row.sample.sm_mhz / full.sample.sm_mhz)
            for variant, row in by_variant.items() if row.sample.sm_mhz
        }  # fmt: skip
    return states


def is_at_full_clock(rows: Sequence[Row]) -> NDArray[np.float64]:
    """1 of rows whose clock was the highest of all, or of which none was read, else 0. (n,) [-]

    Examples
    --------
    >>> from mofa.calibrate.cases import Case, Sample
    >>> case = Case("gemm", "fwd", "x", "bf16", "grid", {"m": 64, "n": 64, "k": 64})
    >>> samples = [Sample(1e-5, 1e-5, 1e-5, 7, mhz) for mhz in (1980.0, 1965.0, 1905.0, None)]
    >>> is_at_full_clock([Row(case, sample, "G", "h") for sample in samples])
    array([1., 1., 0., 1.])
    """
    clocks = np.array([row.sample.sm_mhz or np.nan for row in rows])
    if np.isnan(clocks).all():
        return np.ones(len(rows))
    return np.where(clocks < FULL_CLOCK * np.nanmax(clocks), 0.0, 1.0)
