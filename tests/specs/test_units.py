"""Quantities with units, by hand."""

from __future__ import annotations

import itertools
import math
import re

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
        ("300 GBps", "B/s", 300e9),
        ("1 hour", "s", 3600.0),
        ("1 day", "s", 86400.0),
        ("2 weeks", "s", 14 * 86400.0),
        ("5 microseconds", "s", 5e-6),
        ("1 token", "tokens", 1.0),
        ("4M token", "tokens", 4e6),
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
        ("80 Gb", "B", "b is bits, of which 8 are a byte"),
        ("450 gb/s", "B/s", "write GB/s for bytes or Gb/s for bits"),
        ("300 GBPS", "B/s", "write GBps for bytes or Gbps for bits"),
        ("80 Gb", "B/s", "it is a rate; write 80 Gb/s"),
        ("450 GB", "B/s", "it is a rate; write 450 GB/s"),
        ("989 TFLOP", "FLOP/s", "it is a rate; write 989 TFLOP/s"),
        ("700 mw", "W", "use one such as '700 W'"),
        ("5 MS", "s", "use one such as '5 us'"),
    ],
)
def test_what_is_no_quantity_is_refused(text: object, unit: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_quantity(text, unit)


PREFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
            "p": 1e-12, "g": 1e9, "t": 1e12, "N": 1e-9, "U": 1e-6}  # fmt: skip
"""Powers of ten of the SI, and of letters that are no prefix in this case those of the other case."""


@pytest.mark.parametrize("unit", ["B", "B/s", "W", "Hz", "s", "FLOP/s"])
def test_a_hint_is_the_same_number(unit: str) -> None:
    """Every known word in every mix of large and small letters: a hint moves neither 8 nor a power of ten."""
    base = {"B": "B", "B/s": "B/s", "W": "W", "Hz": "Hz", "s": "s", "FLOP/s": "FLOP/s"}[unit]
    for known in (f"{prefix}{base}" for prefix in ("", "k", "M", "G", "T", "P", "n", "u", "m")):
        for letters in itertools.product(*({c.lower(), c.upper()} for c in known)):
            word = "".join(letters)
            try:
                parse_quantity(f"1 {word}", unit)
            except ValueError as error:
                meant = re.search(r"did you mean (\S+)\?", str(error))
            else:
                continue
            if meant is None:
                continue
            prefix = word[: len(known) - len(base)]
            is_bits = unit in ("B", "B/s") and "b" in word and word != word.lower()
            assert math.isclose(
                parse_quantity(f"1 {meant[1]}", unit), PREFIXES.get(prefix, 0.0) * (1 / 8 if is_bits else 1)
            ), (word, meant[1])


@given(st.floats(min_value=1e-3, max_value=1e6))
def test_binary_and_decimal_prefixes_differ_by_their_ratio(x: float) -> None:
    ratio = parse_quantity(f"{x} GiB", "B") / parse_quantity(f"{x} GB", "B")
    assert math.isclose(ratio, 1.073741824, rel_tol=1e-12)


def test_bytes_are_shown_in_binary_units() -> None:
    assert format_bytes(1536 * 1024) == "1.50 MiB"
