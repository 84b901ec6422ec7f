"""Options as text into what the Python API takes; strategies and ``--set`` are read by :mod:`mofa.specs.overrides`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mofa.errors import SpecError
from mofa.specs.files import did_you_mean, shown_value
from mofa.specs.framework_names import RANK_ORDERS
from mofa.specs.overrides import STRATEGY_KEYS, parse_set_options, parse_strategy
from mofa.units import parse_quantity

if TYPE_CHECKING:
    from mofa.specs.host import HostIssueTimes

PLAUSIBLE_ISSUE_S = (1e-7, 1e-3)
"""Between which a host issues a small op: a launch alone takes 2 us, a debugger's host some hundred. [s]"""


def split_words(texts: Iterable[str] | None) -> list[str]:
    """Words of a repeatable option, of which each may hold several.

    Examples
    --------
    >>> split_words(["fp8", "a b,c"]), split_words(None)
    (['fp8', 'a', 'b', 'c'], [])
    """
    words = list(dict.fromkeys(word for text in texts or () for word in text.replace(",", " ").split()))
    if texts and not words:
        raise SpecError("--with, --without: a word is missing; write it, or leave the option out")
    return words


def parse_fixed(texts: Sequence[str] | None, overrides: Mapping[str, object] | None = None) -> dict[str, object]:
    """Fixed values of fields, those of ``--fix``, typed by column, with those of ``--set strategy.``.

    Examples
    --------
    >>> parse_fixed(["tp=8 sp=true", "recompute=selective"])
    {'tp': 8, 'sp': True, 'recompute': 'selective'}
    >>> parse_fixed(["tp=4,8"])
    {'tp': (4, 8)}
    """
    text, others = _first_values(" ".join(texts or ()))
    fixed = parse_strategy(text, "--fix") if text else {}
    for name, more in others.items():
        fixed[name] = (fixed[name], *(parse_strategy(f"{name}={value}", "--fix")[name] for value in more))
    for name, value in (overrides or {}).items():
        if fixed.setdefault(name, value) != value:
            raise SpecError(f"--set strategy.{name}: is {value}, but --fix says {fixed[name]}; keep one")
    return fixed


def _first_values(text: str) -> tuple[str, dict[str, list[str]]]:
    """Fields with their first values, as text, and what follows these after commas.

    >>> _first_values("tp=4,8 pp=2")
    ('tp=4 pp=2', {'tp': ['8']})
    """
    first, others = [], {}
    for item in text.split():
        name, equals, values = item.partition("=")
        value, *more = values.split(",")
        if equals and name != "layout" and "" in more:
            raise SpecError(f"--fix: {shown_value(item)} has a comma too many; write it like tp=4,8")
        if more and equals and name != "layout" and not any("=" in part for part in more):
            first.append(f"{name}={value}")
            others[name] = more
        else:
            first.append(item)
    return " ".join(first), others


def parse_degree_limits(texts: Sequence[str] | None) -> dict[str, int]:
    """Limits of degrees, the values of ``--max``.

    Examples
    --------
    >>> parse_degree_limits(["pp=8 tp=4"])
    {'pp': 8, 'tp': 4}
    """
    from mofa.search.request import BOUNDED

    bounds: dict[str, int] = {}
    for item in " ".join(texts or ()).replace(",", " ").split():
        if (named := item.partition("=")[0]) in STRATEGY_KEYS and named not in BOUNDED:
            raise SpecError(f"--max: {named} is no degree; use one of {', '.join(BOUNDED)}")
    for name, value in (parse_strategy(" ".join(texts), "--max") if texts else {}).items():
        if name not in BOUNDED or not isinstance(value, int):
            raise SpecError(f"--max: {name} is no degree; {did_you_mean(name, BOUNDED)}")
        bounds[name] = value
    return bounds


def parse_overrides(items: Sequence[str] | None) -> dict[str, dict[str, object]]:
    """Overrides of facts, the values of ``--set`` below each of workload, hardware, framework and strategy."""
    return parse_set_options(list(items or ()))


def settings_with_rank_order(items: Sequence[str] | None, rank_order: str | None) -> list[str] | None:
    """What ``--set`` says, and ``--rank-order`` as a setting of the framework.

    Raises
    ------
    SpecError
        If there is no such order, or both say one.

    Examples
    --------
    >>> settings_with_rank_order(["framework.compile=true"], "tp-cp-ep-pp-dp")
    ['framework.compile=true', 'framework.rank_order=tp-cp-ep-pp-dp']
    """
    if rank_order is None:
        return None if items is None else list(items)
    if rank_order not in RANK_ORDERS:
        raise SpecError(f"--rank-order {rank_order}: is no order; {did_you_mean(rank_order, RANK_ORDERS)}")
    if any(item.partition("=")[0].strip() == "framework.rank_order" for item in items or ()):
        raise SpecError("--rank-order: --set framework.rank_order says it too; keep one")
    return [*(items or ()), f"framework.rank_order={rank_order}"]


def parse_host_issue(
    text: str | None, overrides: Mapping[str, Mapping[str, object]], host: str | None = None
) -> float | HostIssueTimes | None:
    """Time of one small op on the host, of ``--host-issue``, or the profile of ``--host``; None where absent. [s]

    Raises
    ------
    SpecError
        If it is no such time or profile, or if two options say what the host takes.

    Examples
    --------
    >>> float(f"{parse_host_issue('6.6us', {}):.9f}"), parse_host_issue(None, {})
    (6.6e-06, None)
    """
    also = next((path for path in overrides.get("hardware", {}) if path.startswith("gpu.curves.host.")), None)
    if host is not None:
        from mofa.specs.host_profiles import load_host_profile

        if text is not None or also is not None:
            other = "--host-issue" if text is not None else f"--set hardware.{also}"
            raise SpecError(f"--host: {other} sets the host too; keep one")
        return load_host_profile(host)
    if text is None:
        return None
    try:
        issue_s = parse_quantity(text, "s")
    except ValueError as error:
        raise SpecError(f"--host-issue: {error}") from None
    low, high = PLAUSIBLE_ISSUE_S
    if not low <= issue_s <= high:
        raise SpecError(
            f"--host-issue: {text} is no time of one small op on a host ({low * 1e6:g} us to {high * 1e3:g} ms); "
            "`mofa calibrate run --families host` times yours"
        )
    if also is not None:
        raise SpecError(f"--host-issue: --set hardware.{also} sets the host too; keep one")
    return issue_s
