"""Options as text into what the Python API takes; strategies and ``--set`` are read by :mod:`mofa.specs.overrides`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mofa.errors import SpecError
from mofa.specs.overrides import parse_set, parse_strategy


def split_words(texts: Iterable[str] | None) -> list[str]:
    """Words of a repeatable option, of which each may hold several.

    Examples
    --------
    >>> split_words(["fp8", "a b,c"]), split_words(None)
    (['fp8', 'a', 'b', 'c'], [])
    """
    return list(dict.fromkeys(word for text in texts or () for word in text.replace(",", " ").split()))


def parse_fixed(texts: Sequence[str] | None, overrides: Mapping[str, object] | None = None) -> dict[str, object]:
    """Values of ``--fix``, typed by column, with those of ``--set strategy.``.

    Examples
    --------
    >>> parse_fixed(["tp=8 sp=true", "recompute=selective"])
    {'tp': 8, 'sp': True, 'recompute': 'selective'}
    """
    fixed = parse_strategy(" ".join(texts), "--fix") if texts else {}
    for name, value in (overrides or {}).items():
        if fixed.setdefault(name, value) != value:
            raise SpecError(f"--set strategy.{name}: is {value}, but --fix says {fixed[name]}; keep one")
    return fixed


def parse_maximum(texts: Sequence[str] | None) -> dict[str, int]:
    """Values of ``--max``.

    Examples
    --------
    >>> parse_maximum(["pp=8 tp=4"])
    {'pp': 8, 'tp': 4}
    """
    from mofa.search.asked import BOUNDED

    bounds: dict[str, int] = {}
    for name, value in (parse_strategy(" ".join(texts), "--max") if texts else {}).items():
        if name not in BOUNDED or not isinstance(value, int):
            raise SpecError(f"--max: {name} is no degree; use one of {', '.join(BOUNDED)}")
        bounds[name] = value
    return bounds


def parse_overrides(items: Sequence[str] | None) -> dict[str, dict[str, object]]:
    """Values of ``--set`` below each of workload, hardware, framework and strategy."""
    return parse_set(list(items or ()))
