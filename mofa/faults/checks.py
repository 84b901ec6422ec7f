"""Refusals that the functions of this room share: a time must be a time, a share a share."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mofa.errors import SpecError

FloatN = NDArray[np.float64]


def at_least_zero(name: str, value: ArrayLike, unit: str = "s", *, finite: bool = True) -> FloatN:
    """The value as floats, refused where it is negative, NaN or, unless ``finite`` is off, infinite.

    Examples
    --------
    >>> at_least_zero("restart_s", -1.0)
    Traceback (most recent call last):
    mofa.errors.SpecError: restart_s: is -1 s; give a number of at least 0 s
    """
    found = np.asarray(value, dtype=np.float64)
    _refuse(name, found, (found < 0) | ~_known(found, finite), f"at least 0 {unit}".rstrip(), unit)
    return found


def above_zero(name: str, value: ArrayLike, unit: str = "s", *, finite: bool = True) -> FloatN:
    """The value as floats, refused where it is zero, negative, NaN or, unless ``finite`` is off, infinite."""
    found = np.asarray(value, dtype=np.float64)
    _refuse(name, found, (found <= 0) | ~_known(found, finite), f"above 0 {unit}".rstrip(), unit)
    return found


def share(name: str, value: ArrayLike) -> FloatN:
    """The value as floats, refused outside of 0 to 1. [-]"""
    found = np.asarray(value, dtype=np.float64)
    _refuse(name, found, (found < 0) | (found > 1) | ~_known(found, True), "0 to 1", "")
    return found


def _known(found: FloatN, finite: bool) -> NDArray[np.bool_]:
    return np.isfinite(found) if finite else ~np.isnan(found)


def _refuse(name: str, found: FloatN, wrong: NDArray[np.bool_], want: str, unit: str) -> None:
    if np.any(wrong):
        first = float(found[wrong].flat[0]) if found.ndim else float(found)
        raise SpecError(f"{name}: is {f'{first:g} {unit}'.strip()}; give a number of {want}")
