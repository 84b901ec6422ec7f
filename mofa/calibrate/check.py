"""`mofa calibrate check`: predicted against measured on held-out shapes, per family of ops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.work import GemmPass
from mofa.calibrate.cases import Split
from mofa.calibrate.fits.fit import predict_row_times
from mofa.calibrate.fits.fitted_curves import DeviceCurveFits
from mofa.calibrate.fits.folder import bundled_gpu_of_device, rows_and_curve_fits_of_folder
from mofa.calibrate.measurements import Row
from mofa.calibrate.shapes.te_bf16 import GROUPED, OPS
from mofa.cost.kernels.compute import gemm_s, unaligned_gemm_s
from mofa.errors import SpecError

BUNDLED = "unaligned_gemm"
"""The family that no folder's own curves say: it is predicted with the bundled profile of its GPU."""
FAMILY = {"compiled": "memory_bound", "routed": "memory_bound", "te_cast": "memory_bound", "te_gemm": "gemm",
          "te_grouped": GROUPED}  # fmt: skip
FLOOR_S = {"gemm": 20e-6, "attention": 20e-6, "memory_bound": 20e-6, BUNDLED: 20e-6, OPS: 20e-6}
"""Shorter kernels are not judged: they are launch, not rate. [s]"""
FLOOR_BYTES = {"collective": 2**20, "dependent_collective": 2**20}
TARGETS = {"gemm": (0.04, 0.10), "attention": (0.04, 0.10), "memory_bound": (0.04, 0.10), "grouped_gemm": (0.08, 0.15),
           "collective": (0.08, 0.20), "dependent_collective": (0.08, 0.20)}  # fmt: skip
"""Median and 90th percentile of the absolute error that a good profile stays under. [-]"""


TE_TARGETS = {GROUPED: (0.07, 0.18), OPS: (0.06, 0.10)}
"""The same of Transformer Engine's kernels, where those were measured."""


def fit_errors_on_held_out_rows(
    folders: Sequence[Path], *, by_op: bool = False, split: Split = "heldout", needed: bool = True
) -> dict[str, Any]:
    """Fit each folder's grid, predict its held-out shapes, and sum up over the folders.

    Returns
    -------
    dict
        ``families{NAME{points, median_abs_error, p90_abs_error, bias, extrapolated}}``; errors are fractions of the
        measured time, bias is the median signed one. ``by_op`` adds ``ops``, the same per op. ``split`` chooses the
        held-out set. Without ``needed`` folders may have no held-out rows. Products with unaligned widths are predicted
        with the bundled profile of their GPU.

    Raises
    ------
    SpecError
        If a folder is missing or corrupt, folders are of different GPUs, or none has held-out rows.
    """
    if not folders:
        raise SpecError("mofa calibrate check: no folder given; give one or more that `mofa calibrate run` wrote")
    errors: dict[str, list[tuple[str, float, bool]]] = {}
    gpus = {}
    for folder in folders:
        rows, curves = rows_and_curve_fits_of_folder(folder)
        gpus[curves.gpu] = folder
        if len(gpus) > 1:
            raise SpecError(
                f"mofa calibrate check: folders of different GPUs ({', '.join(gpus)}); check them one by one"
            )
        judged_rows = [r for r in rows if r.case.split == split and is_above_family_floor(r)]
        predicted, outside = _predict(curves, judged_rows, folder)
        for row, time_s, far in zip(judged_rows, predicted, outside, strict=True):
            if np.isfinite(time_s):
                family = FAMILY.get(row.case.family, row.case.family)
                name = f"{family} {row.case.variant} {row.case.op}"
                errors.setdefault(family, []).append((name, float(time_s / row.sample.median_s - 1), bool(far)))
    if not errors and needed:
        which, how = ("fresh held-out", " and with --fresh") if split == "fresh" else ("held-out", "")
        raise SpecError(
            f"{folders[0]}: no {which} rows of a fitted family; run `mofa calibrate run` without --families{how}"
        )
    report: dict[str, Any] = {"families": {name: summarise_errors(values) for name, values in sorted(errors.items())}}
    if by_op:
        ops: dict[str, list[tuple[str, float, bool]]] = {}
        for values in errors.values():
            for value in values:
                ops.setdefault(value[0], []).append(value)
        report["ops"] = {name: summarise_errors(values) for name, values in sorted(ops.items())}
    return report


def rows_with_predicted_times(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Every row that a curve can predict, grid and held-out: for plots and tables of residuals.

    Returns
    -------
    list[dict]
        ``family, op, variant, dtype, split, shape, measured_s, predicted_s, error, extrapolated`` of each row.
    """
    points = []
    for folder in folders:
        rows, curves = rows_and_curve_fits_of_folder(folder)
        for row, time_s, far in zip(rows, *_predict(curves, rows, folder), strict=True):
            if np.isfinite(time_s):
                case = row.case
                points.append(
                    {
                        "family": FAMILY.get(case.family, case.family),
                        "op": case.op,
                        "variant": case.variant,
                        "dtype": case.dtype,
                        "split": case.split,
                        "shape": case.shape_text,
                        "measured_s": row.sample.median_s,
                        "predicted_s": float(time_s),
                        "error": float(time_s / row.sample.median_s - 1),
                        "extrapolated": bool(far),
                    }
                )
    return points


def _predict(
    curves: DeviceCurveFits, rows: Sequence[Row], folder: Path
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """What a folder's curves say, and of products with unaligned widths what its GPU's profile does. [s]"""
    time_s, outside = predict_row_times(curves, rows)
    gemm_rows = [i for i, row in enumerate(rows) if row.case.family == BUNDLED]
    if gemm_rows:
        gpu = bundled_gpu_of_device(curves.gpu, folder)
        m, n, k = (np.array([[float(rows[i].case.shape_size(x))] for i in gemm_rows]) for x in "mnk")
        passes: list[GemmPass] = [rows[i].case.op for i in gemm_rows]  # type: ignore[misc]
        time_s[gemm_rows] = unaligned_gemm_s(gemm_s(m, n, k, gpu), m, n, k, np.ones_like(m), passes, gpu)[:, 0]
    return time_s, outside


def is_above_family_floor(row: Row) -> bool:
    """Whether a held-out row counts: not shorter or smaller than its family's floor."""
    family = FAMILY.get(row.case.family, row.case.family)
    if row.sample.median_s < FLOOR_S.get(family, 0.0):
        return False
    return family not in FLOOR_BYTES or row.case.shape_size("bytes") >= FLOOR_BYTES[family]


def summarise_errors(values: Sequence[tuple[str, float, bool]]) -> dict[str, float | int]:
    """Points, median and 90th percentile of the absolute error, median signed error, extrapolated points.

    Examples
    --------
    >>> summarise_errors([("a", 0.02, False), ("a", -0.04, True), ("a", 0.0, False)])
    {'points': 3, 'median_abs_error': 0.02, 'p90_abs_error': 0.036, 'bias': 0.0, 'extrapolated': 1}
    """
    error = np.array([v[1] for v in values])
    return {
        "points": len(values), "median_abs_error": float(np.median(np.abs(error))),
        "p90_abs_error": float(round(np.quantile(np.abs(error), 0.9), 12)), "bias": float(np.median(error)),
        "extrapolated": sum(v[2] for v in values),
    }  # fmt: skip
