"""Refusals that the functions of this room share: a time must be a time, a share a share."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mofa.errors import SpecError

FloatN = NDArray[np.float64]


def check_at_least_zero(name: str, value: ArrayLike, unit: str = "s", *, finite: bool = True) -> FloatN:
    """The value as floats, refused where it is negative, NaN or, unless ``finite`` is off, infinite.

    Examples
    --------
    >>> check_at_least_zero("restart_s", -1.0)
    Traceback (most recent call last):
    mofa.errors.SpecError: restart_s: is -1 s; give a number of at least 0 s
    """
    values = np.asarray(value, dtype=np.float64)
    _refuse(name, values, (values < 0) | ~_known(values, finite), f"at least 0 {unit}".rstrip(), unit)
    return values


def check_above_zero(name: str, value: ArrayLike, unit: str = "s", *, finite: bool = True) -> FloatN:
    """The value as floats, refused where it is zero, negative, NaN or, unless ``finite`` is off, infinite."""
    values = np.asarray(value, dtype=np.float64)
    _refuse(name, values, (values <= 0) | ~_known(values, finite), f"above 0 {unit}".rstrip(), unit)
    return values


def checked_share(name: str, value: ArrayLike) -> FloatN:
    """The value as floats, refused outside of 0 to 1. [-]"""
    values = np.asarray(value, dtype=np.float64)
    _refuse(name, values, (values < 0) | (values > 1) | ~_known(values, True), "0 to 1", "")
    return values


LEAST_TIME_S, MOST_TIME_S = 1e-9, 1e21
"""Of a time of a calculation: shorter and longer ones are none of a run. [s]"""


def check_plausible_s(name: str, value: float, *, zero: bool = False) -> float:
    """A time that a run can have, or 0 where that may be. [s]

    Examples
    --------
    >>> check_plausible_s("restart_s", 0.0, zero=True), check_plausible_s("mtbf_s", 3600.0)
    (0.0, 3600.0)
    """
    number = float(check_at_least_zero(name, value) if zero else check_above_zero(name, value))
    if number != 0.0 and not LEAST_TIME_S <= number <= MOST_TIME_S:
        raise SpecError(f"{name}: is {number:g} s; give a time from {LEAST_TIME_S:g} to {MOST_TIME_S:g} s")
    return number


def _known(values: FloatN, finite: bool) -> NDArray[np.bool_]:
    return np.isfinite(values) if finite else ~np.isnan(values)


def _refuse(name: str, values: FloatN, wrong: NDArray[np.bool_], want: str, unit: str) -> None:
    if np.any(wrong):
        first = float(values[wrong].flat[0]) if values.ndim else float(values)
        raise SpecError(f"{name}: is {f'{first:g} {unit}'.strip()}; give a number of {want}")
