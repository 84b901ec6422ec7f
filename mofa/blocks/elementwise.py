"""Functions of a number or an array of them: one formula for a single candidate and for all K at once.

NumPy takes about a microsecond a call, whatever the size. A tape of one candidate therefore holds plain floats and
bools, and what its formulas need beyond operators is here: the floats' answer for floats, NumPy's for arrays.
``not x`` and ``~x`` are each wrong for one of the two; ``logical_not`` is right for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatK = NDArray[np.float64] | float
BoolK = NDArray[np.bool_] | bool
PLAIN = (float, int)  # bool is one of the latter
FEW = 16
"""Rows up to which NumPy's reductions are not slower than going column by column. [-]"""


def value_of_combination(quantity: FloatK | BoolK, combination: int = 0) -> float:
    """The value of one combination, of an array of all or of the one number that holds for all.

    Examples
    --------
    >>> [value_of_combination(value, 1) for value in (np.array([1.0, 3.0]), np.array([2.0]), 4.0)]
    [3.0, 2.0, 4.0]
    """
    return float(quantity[combination if quantity.size > 1 else 0] if isinstance(quantity, np.ndarray) else quantity)


def where(condition: BoolK, yes: FloatK, no: FloatK) -> FloatK:
    """One or the other, entry by entry.

    Examples
    --------
    >>> where(True, 1.0, 2.0), where(np.array([True, False]), 1.0, 2.0)
    (1.0, array([1., 2.]))
    """
    if condition is True:
        return yes
    if condition is False:
        return no
    return np.where(condition, yes, no)


def rounded(x: FloatK, *, up: bool = False) -> FloatK:
    """The nearest whole number, or the next one above, entry by entry.

    Examples
    --------
    >>> rounded(2.2), rounded(2.2, up=True), rounded(np.array([1.9, 3.0]), up=True)
    (2.0, 3.0, array([2., 3.]))
    """
    number: FloatK = np.ceil(x) if up else np.round(x)
    return number if isinstance(x, np.ndarray) else float(number)


def maximum(x: FloatK, y: FloatK) -> FloatK:
    """The larger, entry by entry.

    Examples
    --------
    >>> maximum(1.0, 2.0), maximum(np.array([1.0, 3.0]), 2.0)
    (2.0, array([2., 3.]))
    """
    if type(x) is float and type(y) is float:
        return x if x >= y else y
    larger: FloatK = np.maximum(x, y)
    return larger


def minimum(x: FloatK, y: FloatK) -> FloatK:
    """The smaller, entry by entry.

    Examples
    --------
    >>> minimum(1.0, 2.0), minimum(np.array([1.0, 3.0]), 2.0)
    (1.0, array([1., 2.]))
    """
    if type(x) is float and type(y) is float:
        return x if x <= y else y
    smaller: FloatK = np.minimum(x, y)
    return smaller


def ceil(x: FloatK) -> FloatK:
    """The next whole number, entry by entry.

    Examples
    --------
    >>> ceil(1.5), ceil(np.array([1.5, 2.0]))
    (2.0, array([2., 2.]))
    """
    if type(x) is float:
        return float(math.ceil(x))
    rounded: FloatK = np.ceil(x)
    return rounded


def logical_not(x: BoolK) -> BoolK:
    """Not, entry by entry.

    Examples
    --------
    >>> logical_not(True), logical_not(np.array([True, False]))
    (False, array([False,  True]))
    """
    return not x if isinstance(x, bool) else np.logical_not(x)


def any_true(x: BoolK | FloatK) -> bool:
    """Whether any entry is true, or not 0.

    Examples
    --------
    >>> any_true(0.0), any_true(np.array([False, True]))
    (False, True)
    """
    if x is True or x is False:
        return x
    if type(x) is float:
        return x != 0.0
    return bool(x) if isinstance(x, PLAIN) else bool(x.any())


def all_true(x: BoolK) -> bool:
    """Whether all entries are true.

    Examples
    --------
    >>> all_true(True), all_true(np.array([False, True]))
    (True, False)
    """
    return x if isinstance(x, bool) else bool(x.all())


def stack_rows(values: Sequence[FloatK], num_k: int) -> NDArray[np.float64]:
    """Numbers or arrays as the rows of one array. (len(values), num_k)

    Examples
    --------
    >>> stack_rows([1.0, np.array([2.0, 3.0])], 2)
    array([[1., 1.],
           [2., 3.]])
    """
    if num_k == 1:
        try:
            return np.array(values, dtype=float).reshape(-1, 1)
        except ValueError:  # an array of one entry among plain numbers
            return np.array([v if isinstance(v, PLAIN) else v.item() for v in values], dtype=float)[:, None]
    out = np.empty((len(values), num_k))
    for row, value in zip(out, values, strict=True):
        row[:] = value
    return out


def broadcast_to_combinations(x: FloatK, num_k: int) -> NDArray[np.float64]:
    """A number or an array as an array, for what is not of one candidate alone. (num_k,)

    Examples
    --------
    >>> broadcast_to_combinations(1.0, 2)
    array([1., 1.])
    """
    return np.full(num_k, x) if isinstance(x, PLAIN) else np.asarray(np.broadcast_to(x, (num_k,)))


def first_largest_index(array: NDArray[np.float64]) -> NDArray[np.intp]:
    """Where the largest entry of each row is; of those that only rounding tells apart, the first. (n, R) -> (n,)

    Sums of the same numbers differ in their last bits with the number of candidates that are summed at once.

    Examples
    --------
    >>> first_largest_index(np.array([[1.0, 3.0, 3.0 + 1e-15]]))
    array([1])
    """
    enough = array >= _about(max_of_array_rows(array))[:, None]
    if len(array) > FEW:  # one column after the other: rows are short
        first = np.zeros(len(array), dtype=np.intp)
        for column in reversed(range(array.shape[1])):
            first[enough[:, column]] = column
        return first
    return np.asarray(np.argmax(enough, axis=1))


def largest_in_each_part(
    array: NDArray[np.float64], begins: NDArray[np.intp]
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """The largest entry of each column in each part of the rows, and its row as :func:`first_largest_index` says.
    (parts, K)

    Examples
    --------
    >>> rows = np.array([[1.0], [3.0], [3.0 + 1e-15], [2.0], [0.0]])
    >>> [found.tolist() for found in largest_in_each_part(rows, np.array([0, 3]))]
    [[[3.000000000000001], [2.0]], [[1], [3]]]
    """
    largest = np.maximum.reduceat(array, begins, axis=0)
    part = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(array)))
    rows = np.where(array >= _about(largest)[part], np.arange(len(array))[:, None], len(array))
    return largest, np.minimum.reduceat(rows, begins, axis=0)


def _about(largest: NDArray[np.float64]) -> NDArray[np.float64]:
    """From where on numbers are as large as these but for rounding."""
    return np.asarray(largest - 1e-12 * np.abs(largest))


def max_of_array_rows(array: NDArray[np.float64]) -> NDArray[np.float64]:
    """The largest entry of each row, column by column: NumPy goes row by row, slow for short ones. (n, R) -> (n,)

    Examples
    --------
    >>> max_of_array_rows(np.array([[1.0, 3.0], [2.0, 0.0]]))
    array([3., 2.])
    """
    if array.shape[1] > 16 or len(array) <= FEW:
        return np.asarray(array.max(axis=1))
    largest = array[:, 0].copy()
    for column in range(1, array.shape[1]):
        np.maximum(largest, array[:, column], out=largest)
    return largest
