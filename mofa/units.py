"""SI constants, quantities with units in and out of text.

Inside mofa every number is SI (bytes, seconds, FLOP/s, bytes/s); units with prefixes live only in YAML and in reports.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

KIB, MIB, GIB, TIB = 2.0**10, 2.0**20, 2.0**30, 2.0**40
KILO, MEGA, GIGA, TERA, PETA = 1e3, 1e6, 1e9, 1e12, 1e15
SECONDS_PER_DAY = 86400.0

_DECIMAL = {"": 1.0, "k": KILO, "K": KILO, "M": MEGA, "G": GIGA, "T": TERA, "P": PETA}
_BINARY = {"Ki": KIB, "Mi": MIB, "Gi": GIB, "Ti": TIB}
_SMALL = {"": 1.0, "m": 1e-3, "u": 1e-6, "µ": 1e-6, "n": 1e-9}
_DURATIONS = {
    "nanosecond": 1e-9, "microsecond": 1e-6, "millisecond": 1e-3, "second": 1.0, "minute": 60.0, "hour": 3600.0,
    "day": SECONDS_PER_DAY, "week": 7 * SECONDS_PER_DAY,
}  # fmt: skip

_UNITS: dict[str, dict[str, float]] = {
    "B": {f"{p}B": f for p, f in {**_DECIMAL, **_BINARY}.items()},
    "B/s": {
        **{f"{p}B/s": f for p, f in {**_DECIMAL, **_BINARY}.items()},
        **{f"{p}bit/s": f / 8 for p, f in _DECIMAL.items()},
        **{f"{p}b/s": f / 8 for p, f in _DECIMAL.items()},
        **{f"{p}bps": f / 8 for p, f in _DECIMAL.items()},
        **{f"{p}Bps": f for p, f in {**_DECIMAL, **_BINARY}.items()},
    },
    "FLOP/s": {f"{p}FLOP{s}": f for p, f in _DECIMAL.items() for s in ("/s", "S")},
    "s": {
        **{f"{p}s": f for p, f in _SMALL.items()}, "min": 60.0, "h": 3600.0, "d": SECONDS_PER_DAY,
        **{f"{word}{s}": f for word, f in _DURATIONS.items() for s in ("", "s")},
    },
    "W": {f"{p}W": f for p, f in _DECIMAL.items()},
    "Hz": {f"{p}Hz": f for p, f in _DECIMAL.items()},
    "tokens": {
        f"{p}{s}": f
        for p, f in {**_DECIMAL, "B": GIGA}.items()
        for s in ("", "tokens", " tokens", "token", " token")
        if p or s
    },
}  # fmt: skip
_NUMBER = re.compile(r"\s*([-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([^\s\d].*?)?\s*")


def parse_quantity(text: object, unit: str) -> float:
    """Read a quantity such as ``"4.8 TB/s"`` into SI.

    Parameters
    ----------
    text
        A string of a number and a unit. A bare number is refused, because it hides its unit; ``tokens`` may be bare.
    unit
        The dimension wanted: one of ``B``, ``B/s``, ``FLOP/s``, ``s``, ``W``, ``Hz``, ``tokens``.

    Returns
    -------
    float
        In SI, of that dimension. [B], [s], [FLOP/s], ...

    Raises
    ------
    ValueError
        If the text is no number with a unit of that dimension, or is not finite.

    Examples
    --------
    >>> parse_quantity("4.8 TB/s", "B/s")
    4800000000000.0
    >>> parse_quantity("400 Gbit/s", "B/s")
    50000000000.0
    >>> parse_quantity("15T", "tokens")
    15000000000000.0
    """
    names = _UNITS[unit]
    if isinstance(text, bool) or text is None:
        raise ValueError(f"{text!r} is no quantity; write a number and a unit, such as {_example(unit)}")
    if isinstance(text, (int, float)):
        if unit == "tokens":
            return _finite_count(text)
        raise ValueError(f"{text!r} has no unit; write a number and a unit, such as {_example(unit)}")
    match = _NUMBER.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{str(text)[:60]!r} is no quantity; write a number and a unit, such as {_example(unit)}")
    number, name = float(match.group(1).replace("_", "")), match.group(2) or ""
    if not name and unit != "tokens":
        raise ValueError(f"{str(text)[:60]!r} has no unit; write a number and a unit, such as {_example(unit)}")
    if name and name not in names:
        raise ValueError(f"{name[:30]!r} is no unit of this field; {_unit_hint(name, unit, match.group(1))}")
    value = number * (names[name] if name else 1.0)
    if not math.isfinite(value):
        raise ValueError(f"{str(text)[:60]!r} is not finite")
    return value


def _finite_count(number: float) -> float:
    """A bare number of tokens; raises ValueError where a float cannot hold it."""
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError("is not finite; write a number")
    return value


def _unit_hint(name: str, unit: str, number: str = "") -> str:
    """What to write for a word that is no unit of a dimension: another one only where it is the same number.

    >>> _unit_hint("tflops", "FLOP/s"), _unit_hint("mw", "W")
    ('did you mean TFLOPS?', "use one such as '700 W'")
    >>> _unit_hint("gb/s", "B/s"), _unit_hint("Gb", "B")
    ('write GB/s for bytes or Gb/s for bits', "b is bits, of which 8 are a byte; use one such as '80 GiB'")
    >>> _unit_hint("Gb", "B/s", "80"), _unit_hint("TFLOP", "FLOP/s", "989")
    ('it is a rate; write 80 Gb/s', 'it is a rate; write 989 TFLOP/s')
    """
    if f"{name}/s" in _UNITS[unit]:
        return f"it is a rate; write {number} {name}/s"
    known = [other for other in _UNITS[unit] if other.casefold() == name.casefold()]
    same = [other for other in known if not _is_other_prefix(name, other, _UNITS[unit])]
    if len({_UNITS[unit][other] for other in same}) > 1:
        largest, smallest = (pick(same, key=_UNITS[unit].__getitem__) for pick in (max, min))
        return f"write {largest} for bytes or {smallest} for bits"
    is_bits = unit in ("B", "B/s") and re.fullmatch(r"([kKMGTP]i?)?b(its?)?(/s|ps)?", name)
    if is_bits and (name != name.lower() or name[0] in "kb"):
        return f"b is bits, of which 8 are a byte; use one such as {_example(unit)}"
    return f"did you mean {same[0]}?" if same else f"use one such as {_example(unit)}"


def _is_other_prefix(name: str, known: str, names: Mapping[str, float]) -> bool:
    """Whether two words of the same letters differ in a prefix whose case is its size: m is 1e-3 and M 1e6.

    >>> _is_other_prefix("mW", "MW", _UNITS["W"]), _is_other_prefix("kw", "kW", _UNITS["W"])
    (True, False)
    """
    return name[0] != known[0] and name[0] in "mMpP" and known[1:] in names


def _example(unit: str) -> str:
    return {
        "B": "'80 GiB'", "B/s": "'450 GB/s'", "FLOP/s": "'989 TFLOP/s'", "s": "'5 us' or '6 h'", "W": "'700 W'",
        "Hz": "'1.98 GHz'", "tokens": "'15T'",
    }[unit]  # fmt: skip


def _reader(unit: str) -> BeforeValidator:
    def read(value: Any) -> float:
        return parse_quantity(value, unit)

    return BeforeValidator(read)


MOST_DIGITS = 15
"""Of a whole number in a file or an option: a float holds so many exactly."""


def is_whole_number(text: str) -> bool:
    """Whether a text is a whole number of at most :data:`MOST_DIGITS` ASCII digits.

    :meth:`str.isdigit` takes superscripts too, of which ``int`` makes no number.

    Parameters
    ----------
    text
        What was written.

    Returns
    -------
    bool
        Whether ``int`` reads it.

    Examples
    --------
    >>> is_whole_number("15000"), is_whole_number("²"), is_whole_number("-1")
    (True, False, False)
    """
    return text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS


Bytes = Annotated[float, _reader("B")]
Seconds = Annotated[float, _reader("s")]
Tokens = Annotated[float, _reader("tokens")]


def format_bytes(value_bytes: float) -> str:
    """Bytes as people read them.

    Parameters
    ----------
    value_bytes
        [B]

    Returns
    -------
    str
        Two decimals and a binary unit.

    Examples
    --------
    >>> format_bytes(80 * GIB)
    '80.00 GiB'
    """
    for factor, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(value_bytes) >= factor:
            return f"{value_bytes / factor:.2f} {name}"
    return f"{value_bytes:.0f} B"


def format_seconds(value_s: float) -> str:
    """Seconds as people read them.

    Parameters
    ----------
    value_s
        [s]

    Returns
    -------
    str
        Two decimals and a unit.

    Examples
    --------
    >>> format_seconds(0.0123), format_seconds(4.5e-5), format_seconds(7200.0)
    ('12.30 ms', '45.00 us', '2.00 h')
    """
    if abs(value_s) >= 2 * SECONDS_PER_DAY:
        return f"{value_s / SECONDS_PER_DAY:.1f} d"
    for factor, name in ((3600.0, "h"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value_s) >= factor:
            return f"{value_s / factor:.2f} {name}"
    return f"{value_s:.3g} s"


def format_count(value: float) -> str:
    """A large count as people read it.

    Parameters
    ----------
    value
        Of parameters, tokens or FLOP. [-]

    Returns
    -------
    str
        Two decimals and a letter.

    Examples
    --------
    >>> format_count(671.03e9), format_count(14.8e12)
    ('671.03B', '14.80T')
    """
    for factor, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= factor:
            return f"{value / factor:.2f}{name}"
    return f"{value:g}"
