"""Results in words: strategies, components and quantities as people read them."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from mofa.plan.summary import component_words, strategy_text
from mofa.units import format_bytes, format_seconds

__all__ = [
    "best_so_far_text",
    "component_words",
    "count_and_noun",
    "numbers_with_repeats_text",
    "quantity_text",
    "strategy_in_two_lines",
    "strategy_short",
    "strategy_text",
    "unit_of_field",
]  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mofa.plan.result import Plan
    from mofa.specs.strategy import StrategySpec


def best_so_far_text(plan: Plan, *, moe: bool = True) -> str:
    """The best plan that a search knows of while it goes on, in a line; of experts' degrees only with ``moe``."""
    memory = f"{format_bytes(plan.memory.device_bytes)} of {format_bytes(plan.memory.limit_bytes)}"
    return f"best so far: {strategy_text(plan.strategy, moe=moe)}, {format_seconds(plan.step_s)} a step, {memory}"


def strategy_short(strategy: StrategySpec) -> str:
    """A strategy in the few characters that a title has room for.

    Examples
    --------
    >>> from mofa.specs.strategy import StrategySpec
    >>> strategy_short(StrategySpec(tp=4, pp=2, dp=8, recompute="full:2"))
    'tp4 pp2 dp8 mb1 full:2'
    >>> strategy_short(StrategySpec(tp=4, cp=2, cp_kind="allgather", dp=8))
    'tp4 cp2 allgather dp8 mb1'
    """
    recompute = [] if strategy.recompute == "none" else [strategy.recompute]
    return " ".join([_degrees(strategy), *recompute])


def strategy_in_two_lines(strategy: StrategySpec) -> str:
    """A strategy in the two short lines that an axis has room for; of several recomputed modules their number.

    Examples
    --------
    >>> from mofa.specs.strategy import StrategySpec
    >>> print(strategy_in_two_lines(StrategySpec(tp=4, dp=8, recompute="selective:mlp+moe_act")))
    tp4 dp8 mb1
    recompute 2 modules
    """
    modules = strategy.recompute.count("+") + 1
    return f"{_degrees(strategy)}\nrecompute {strategy.recompute if modules == 1 else f'{modules} modules'}"


def _degrees(strategy: StrategySpec) -> str:
    degrees = {
        "tp": strategy.tp,
        "pp": strategy.pp,
        "vpp": strategy.vpp,
        "cp": strategy.cp,
        "ep": strategy.ep,
        "etp": strategy.etp,
    }
    words = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
    if strategy.cp > 1:
        words.insert(words.index(f"cp{strategy.cp}") + 1, strategy.cp_kind)
    options = [_option_word(name, value) for name, value in strategy.options.chosen_options.items()]
    return " ".join([*words, f"dp{strategy.dp}", f"mb{strategy.micro_batch}", *options])


def _option_word(name: str, value: bool | str | int) -> str:
    """An option of the framework that a strategy chooses, in a word.

    >>> _option_word("tp_overlap", True), _option_word("dispatcher", "deepep"), _option_word("dp_replicate", 4)
    ('overlap', 'deepep', 'hsdp4')
    >>> _option_word("overlap_param_gather", False)
    'gathers first'
    """
    if name == "tp_overlap":
        return "overlap" if value else "no overlap"
    if name == "overlap_param_gather":
        return "gathers beside" if value else "gathers first"
    return f"hsdp{value}" if name == "dp_replicate" else str(value)


def quantity_text(value: float, unit: str) -> str:
    """A value with its unit; bytes and seconds take a prefix.

    Examples
    --------
    >>> quantity_text(3.1 * 2**30, "B"), quantity_text(4.0, "heads"), quantity_text(450e9, "B/s")
    ('3.10 GiB', '4 heads', '450 GB/s')
    >>> quantity_text(1.0, "layers"), quantity_text(1.0, "micro-batches"), quantity_text(1.0, "tokens/s")
    ('1 layer', '1 micro-batch', '1 tokens/s')
    """
    if unit == "B":
        return format_bytes(value)
    if unit == "s":
        return format_seconds(value)
    if unit in ("B/s", "FLOP/s"):
        for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
            if abs(value) >= factor:
                return f"{value / factor:.4g} {prefix}{unit}"
    number = f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"
    if value == 1 and "/" not in unit:
        unit = unit.removesuffix("es") if unit.endswith("ches") else unit.removesuffix("s")
    return number if unit in ("", "-") else f"{number} {unit}"


def unit_of_field(name: str) -> str:
    """The SI unit that the end of a field's name says.

    Examples
    --------
    >>> [unit_of_field(name) for name in ("memory_bytes", "bandwidth_bytes_per_s", "floor_s", "fraction")]
    ['B', 'B/s', 's', '-']
    """
    ends = {"_bytes_per_s": "B/s", "_flops_per_s": "FLOP/s", "_bytes": "B", "_s": "s", "_w": "W", "_tokens": "tokens"}
    return next((unit for end, unit in ends.items() if name.endswith(end)), "-")


def count_and_noun(number: int, singular: str, plural: str | None = None) -> str:
    """A number with the noun of what it counts.

    >>> count_and_noun(1, "step"), count_and_noun(2, "step"), count_and_noun(3, "micro-batch", "micro-batches")
    ('1 step', '2 steps', '3 micro-batches')
    """
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def numbers_with_repeats_text(values: Iterable[int]) -> str:
    """Numbers in order, eight and more equal neighbours together.

    Examples
    --------
    >>> numbers_with_repeats_text([6, 5, 5, 6]), numbers_with_repeats_text([0, *[1] * 126, 0])
    ('6, 5, 5, 6', '0, 1 (126 times), 0')
    """
    runs = [(value, len(list(group))) for value, group in groupby(values)]
    return ", ".join(f"{value} ({n} times)" if n >= 8 else ", ".join([str(value)] * n) for value, n in runs)
