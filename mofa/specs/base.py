"""What every fact shares: frozen models that refuse unknown keys, and numbers that say where they come from."""

from __future__ import annotations

import inspect
import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from mofa.specs.ranges import (
    LEAST_CLOCK,
    LEAST_FACTOR,
    LEAST_RATE,
    LEAST_RATIO,
    LEAST_SECONDS,
    LEAST_SHARE,
    MOST_BYTES,
    MOST_CLOCK,
    MOST_FACTOR,
    MOST_IN_SWITCH,
    MOST_RATE,
    MOST_RATIO,
    MOST_SECONDS,
    MOST_SLOWDOWN,
    MOST_USD,
    MOST_WATTS,
)
from mofa.units import parse_quantity

Provenance = Literal["measured", "interpolated", "transferred", "extrapolated", "datasheet", "read", "assumed"]
PROVENANCES: tuple[Provenance, ...] = (
    "measured", "interpolated", "transferred", "extrapolated", "datasheet", "read", "assumed",
)  # fmt: skip


Library = Literal["transformer-engine"]
"""A library of layers, under whose modules something was measured."""


_SECTION = re.compile(r"^\w[\w ]*\n-{3,}$", re.MULTILINE)
"""Begins a section of a docstring."""


def split_docstring_sections(doc: str) -> tuple[str, str]:
    """A docstring's text, and its sections.

    >>> split_docstring_sections("A batch.\\n\\nRaises\\n------\\nValueError\\n    If it is empty.")
    ('A batch.', 'Raises\\n------\\nValueError\\n    If it is empty.')
    """
    section = _SECTION.search(doc)
    start = section.start() if section else len(doc)
    return doc[:start].rstrip(), doc[start:]


def _with_attributes(doc: str, described: dict[str, str]) -> str:
    """A docstring with an Attributes section, before its other sections.

    >>> print(_with_attributes("A batch.", {"seq_len": "Sequence length. [tokens]"}))
    A batch.
    <BLANKLINE>
    Attributes
    ----------
    seq_len
        Sequence length. [tokens]
    """
    fields = "\n".join(f"{name}\n    {says}" for name, says in described.items())
    text, sections = split_docstring_sections(doc)
    return "\n\n".join(part for part in (text, f"Attributes\n----------\n{fields}", sections) if part)


class Spec(BaseModel):
    """A frozen record of facts; an unknown key is an error."""

    # protected_namespaces: pydantic before 2.10 keeps all names that begin with model_ to itself
    model_config = ConfigDict(
        defer_build=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Show the fields' descriptions in the docstring, and so in ``help``."""
        described = {name: field.description for name, field in cls.model_fields.items() if field.description}
        if described and cls.__doc__:
            cls.__doc__ = _with_attributes(inspect.cleandoc(cls.__doc__), described)


class Fact(Spec):
    """One number with its provenance and the page, table or measurement it came from.

    ``value`` is SI. ``provenance`` says how it was got: ``measured`` on the device, ``interpolated`` between
    measurements, ``transferred`` from the measurement of a related device, ``extrapolated`` beyond them, from a
    ``datasheet``, ``read`` in a framework's source, or ``assumed``.
    """

    value: float
    provenance: Provenance
    source: str = Field(min_length=3)
    library: Library | None = None
    """Whose modules ran when it was measured; absent where they were PyTorch's own, or none."""

    def __float__(self) -> float:
        return self.value


def _fact_reader(unit: str) -> BeforeValidator:
    """Convert the ``value`` of a mapping from a quantity with unit to SI before the Fact is built."""

    def read(raw: Any) -> Any:
        if isinstance(raw, dict) and "value" in raw:
            return {**raw, "value": parse_quantity(raw["value"], unit)}
        if isinstance(raw, Fact):
            return raw
        raise ValueError("needs a mapping with value, provenance and source")

    return BeforeValidator(read)


def _bounded(low: float, high: float, *, above: bool = False) -> AfterValidator:
    """Refuse a Fact outside of bounds; ``above`` excludes the lower one."""

    def check(fact: Fact) -> Fact:
        if fact.value < low or fact.value > high or (above and fact.value == low):
            raise ValueError(f"value ({fact.value:g}) must be {'above' if above else 'at least'} {low:g}"
                             + (f" and at most {high:g}" if high != math.inf else ""))  # fmt: skip
        return fact

    return AfterValidator(check)


BytesFact = Annotated[Fact, _fact_reader("B"), _bounded(0.0, MOST_BYTES)]
SizeFact = Annotated[Fact, _fact_reader("B"), _bounded(1.0, MOST_BYTES)]
BytesPerSFact = Annotated[Fact, _fact_reader("B/s"), _bounded(LEAST_RATE, MOST_RATE)]
FlopsPerSFact = Annotated[Fact, _fact_reader("FLOP/s"), _bounded(LEAST_RATE, MOST_RATE)]
SecondsFact = Annotated[Fact, _fact_reader("s"), _bounded(0.0, MOST_SECONDS)]
PositiveSecondsFact = Annotated[Fact, _fact_reader("s"), _bounded(LEAST_SECONDS, MOST_SECONDS)]
WattsFact = Annotated[Fact, _fact_reader("W"), _bounded(LEAST_FACTOR, MOST_WATTS)]
ShareFact = Annotated[Fact, _bounded(LEAST_SHARE, 1.0)]
"""A share of a rate: above 0, at most 1. [-]"""
ShareOrNoneFact = Annotated[Fact, _bounded(0.0, 1.0)]
"""A share of something, or a spread over its mean, or nothing of it. [-]"""
RatioFact = Annotated[Fact, _bounded(LEAST_RATIO, MOST_RATIO)]
"""Of two times or rates of one kind. [-]"""
ClockFact = Annotated[Fact, _bounded(LEAST_CLOCK, MOST_CLOCK)]
"""A clock over the full one. [-]"""
InSwitchFact = Annotated[Fact, _bounded(1.0, MOST_IN_SWITCH)]
"""Speed-up by reduction in the switch: 1 without. [-]"""
SlowdownFact = Annotated[Fact, _bounded(0.0, MOST_SLOWDOWN)]
"""How much longer something takes; 0 where it takes no longer. [-]"""
PositiveFact = Annotated[Fact, _bounded(LEAST_FACTOR, MOST_FACTOR)]
CountFact = Annotated[Fact, _bounded(1.0, 1e6)]
UsdFact = Annotated[Fact, _bounded(0.0, MOST_USD)]
NotNegativeFact = Annotated[Fact, _bounded(0.0, MOST_FACTOR)]
Positive = Annotated[int, Field(ge=1, le=10**9, strict=True)]
Count = Annotated[int, Field(ge=0, le=10**9, strict=True)]
