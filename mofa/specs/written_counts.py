"""Counts as people write them: ``1K`` GPUs, ``256..1K`` for several, a batch of ``4M tokens``."""

from __future__ import annotations

import re
from collections.abc import Callable

from mofa.errors import SpecError

_PREFIXES = {"": 1, "k": 2**10, "m": 2**20}
_COUNT = re.compile(r"(\d{1,3}(?:[,_]\d{3})+|\d{1,12})(?:\.(\d{1,6}))?\s*([kKmM]?)i?")
MOST = 2**40


def parse_count(text: str, example: str) -> int:
    """A whole number of at least 1; K is 1024 and M 1024 K, as of GPUs, sequences and batches.

    Raises
    ------
    ValueError
        If it is none.

    Examples
    --------
    >>> parse_count("1K", "64"), parse_count("8k", "8K"), parse_count("1,024", "64"), parse_count("1.5K", "64")
    (1024, 8192, 1024, 1536)
    >>> parse_count("0", "64 or 1K")
    Traceback (most recent call last):
    ValueError: must be at least 1; write it as 64 or 1K
    """
    match = _COUNT.fullmatch(text.strip().removeprefix("-"))
    if match is not None and text.strip().startswith("-"):
        raise ValueError(f"must be at least 1; write it as {example}")
    if match is None and re.fullmatch(r"\d{13,}", text.strip()):
        raise ValueError(f"must be at most {MOST:,}; write it as {example}")
    if match is None:
        raise ValueError(f"{text[:20]!r} is no whole number; write it as {example}")
    digits, decimals, prefix = match.groups()
    scale, places = _PREFIXES[prefix.lower()], len(decimals or "")
    written = int(re.sub("[,_]", "", digits) + (decimals or ""))
    number, rest = divmod(written * scale, int(10**places))
    if rest:
        raise ValueError(f"{text[:20]!r} is no whole number; write it as {example}")
    if not 1 <= number <= MOST:
        raise ValueError(f"must be at {'least 1' if number < 1 else f'most {MOST:,}'}; write it as {example}")
    return number


MOST_DOUBLINGS = 11
"""Steps of a range of GPUs at most: from 64 to 131,072. [-]"""


def doubled_counts(text: str, parse: Callable[[str], int] | None = None) -> tuple[int, ...]:
    """One count, or all from the first to the last, each twice the one before.

    Parameters
    ----------
    text
        ``64``, ``1K`` or ``256..1K``.
    parse
        Reads the ends of a range; :func:`parse_count` where absent.

    Raises
    ------
    ValueError
        If it is neither.

    Examples
    --------
    >>> doubled_counts("64"), doubled_counts("256..1K")
    ((64,), (256, 512, 1024))
    """
    read = parse or (lambda part: parse_count(part, "256..1K"))
    first, dots, last = text.partition("..")
    if not dots:
        return (read(text),)
    low, high = read(first), read(last)
    numbers = [low]
    while numbers[-1] * 2 <= high and len(numbers) <= MOST_DOUBLINGS:
        numbers.append(numbers[-1] * 2)
    if numbers[-1] != high:
        raise ValueError(
            f"{text}: {high:,} is not {low:,} times a power of two up to {2**MOST_DOUBLINGS:,}; "
            f"write {low}..{numbers[-1] if len(numbers) > 1 else 2 * low}"
        )
    return tuple(numbers)


def batch_in_sequences(text: str | int, seq_len: int, where: str = "--global-batch") -> int:
    """A global batch in sequences.

    Raises
    ------
    SpecError
        If it is in tokens and no whole number of sequences.

    Examples
    --------
    >>> batch_in_sequences("4M tokens", 8192), batch_in_sequences("1K", 8192), batch_in_sequences(8, 8192)
    (512, 1024, 8)
    """
    number, *unit = str(text).split()
    size = parse_count(number, "1024")
    if not unit or unit[0].startswith("seq"):
        return size
    sequences, rest = divmod(size, seq_len)
    if rest or not sequences:
        near = max(round(size / seq_len), 1)
        raise SpecError(
            f"{where}: {size:,} tokens are {size / seq_len:,.2f} sequences of {seq_len:,}; "
            f'write {near} (or "{near * seq_len} tokens"; M is 1024 x 1024)'
        )
    return sequences
