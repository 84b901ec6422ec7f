"""Quantities with units, by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mofa.units import format_bytes, parse_quantity


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("80 GiB", "B", 80 * 1024**3),
        ("80GB", "B", 80e9),
        ("3.35 TB/s", "B/s", 3.35e12),
        ("400 Gbit/s", "B/s", 50e9),  # eight bits a byte
        ("989.4 TFLOP/s", "FLOP/s", 989.4e12),
        ("4.5 us", "s", 4.5e-6),
        ("2 h", "s", 7200.0),
        ("700 W", "W", 700.0),
        ("1.98 GHz", "Hz", 1.98e9),
        ("15T", "tokens", 15e12),
        ("300B", "tokens", 300e9),
        (1000, "tokens", 1000.0),
        ("1_000 B", "B", 1000.0),
        ("2e3 B", "B", 2000.0),
        ("400 Gbps", "B/s", 50e9),
        ("10 minutes", "s", 600.0),
        ("15T tokens", "tokens", 15e12),
        ("2Btokens", "tokens", 2e9),
    ],
)
def test_known_quantities(text: object, unit: str, value: float) -> None:
    assert math.isclose(parse_quantity(text, unit), value, rel_tol=1e-12)


@pytest.mark.parametrize(
    ("text", "unit", "message"),
    [
        ("GiB", "B", "no quantity"),  # a unit without a number
        ("80", "B", "has no unit"),  # a number without a unit
        (80, "B", "has no unit"),
        (True, "tokens", "no quantity"),
        (None, "B", "no quantity"),
        ("80 GB/s", "B", "no unit of this field"),
        ("80 gigabytes", "B", "no unit of this field"),
        ("nan GB", "B", "no quantity"),
        ("1e400 GB", "B", "not finite"),
        ("", "B", "no quantity"),
        (float("inf"), "tokens", "is not finite"),
        ([1], "B", "no quantity"),
        ("70gb", "B", "did you mean GB?"),
        ("6 H", "s", "did you mean h?"),
    ],
)
def test_what_is_no_quantity_is_refused(text: object, unit: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_quantity(text, unit)


@given(st.floats(min_value=1e-3, max_value=1e6))
def test_binary_and_decimal_prefixes_differ_by_their_ratio(x: float) -> None:
    ratio = parse_quantity(f"{x} GiB", "B") / parse_quantity(f"{x} GB", "B")
    assert math.isclose(ratio, 1.073741824, rel_tol=1e-12)


def test_bytes_are_shown_in_binary_units() -> None:
    assert format_bytes(1536 * 1024) == "1.50 MiB"
