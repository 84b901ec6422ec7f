"""Facts of long runs as people write them in a few words: the rates of shared storage."""

from __future__ import annotations

from mofa.errors import SpecError
from mofa.specs.base import Fact
from mofa.specs.faults import StorageSpec
from mofa.specs.ranges import LEAST_RATE, MOST_RATE, number_within
from mofa.units import parse_quantity


def fact_of_user(value: float) -> Fact:
    """A number that the user set."""
    return Fact(value=value, provenance="assumed", source="set by the user")


def storage_of_text(text: str, where: str) -> StorageSpec:
    """Storage of one rate such as ``2 TB/s``, or of a write and a read rate.

    Parameters
    ----------
    text
        The rates, with a comma between them.
    where
        The option or field, which begins the error message.

    Raises
    ------
    SpecError
        If one of them is no rate, or none that storage can have.

    Examples
    --------
    >>> storage_of_text("2 TB/s, 4 TB/s", "--storage").read_bytes_per_s.value
    4000000000000.0
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 2:
        raise SpecError(f"{where}: {text[:40]!r} has {len(parts)} rates; give one, or the write and the read rate")
    rates = []
    for part in parts:
        try:
            rate = parse_quantity(part, "B/s")
        except ValueError as error:
            raise SpecError(f"{where}: {error}") from None
        rates.append(fact_of_user(number_within(where, rate, "B/s", LEAST_RATE, MOST_RATE)))
    return StorageSpec(write_bytes_per_s=rates[0], read_bytes_per_s=rates[-1])
