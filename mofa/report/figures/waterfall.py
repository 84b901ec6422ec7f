"""How one total becomes another, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mofa.report.figures.style import INK, given_or_new_axes, remove_clutter
from mofa.report.phrases import component_words
from mofa.specs.shown_text import escape_invisible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mofa.plan.comparison import ComparedPart

TOTAL, MORE, LESS = "#636363", "#e6550d", "#3182bd"


def plot_waterfall(
    parts: Sequence[ComparedPart], other: int, names: tuple[str, str], unit: str, *, ax: Axes | None = None
) -> Axes:
    """Plot the first result's total, what each part adds or takes, and the other result's total.

    Parameters
    ----------
    parts
        Values by result. [unit]
    other
        Which result is compared with the first, counted from 0.
    names
        Of the first and of the other.
    unit
        Of the values.
    ax
        Axes to draw on; new ones where absent.
    """
    steps = [(component_words(part.name), part.differences[other]) for part in parts if part.differences[other]]
    steps.sort(key=lambda step: -abs(step[1]))
    return draw_waterfall(sum(part.by_result[0] for part in parts), steps, names, unit, ax=ax)


def draw_waterfall(
    begin: float, steps: Sequence[tuple[str, float]], names: tuple[str, str], unit: str, *, title: str = "",
    ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """Draw a total, what each step adds or takes, and the total behind them.

    Parameters
    ----------
    begin
        The first total. [unit]
    steps
        Names, and what each adds. [unit]
    names
        Of the first and of the last total.
    unit
        Of the values.
    title
        Above it; from one name to the other where absent.
    ax
        Axes to draw on; new ones where absent.
    """
    reached = begin + np.cumsum([0.0, *(more for _, more in steps)])
    ax = given_or_new_axes(ax, 8.0, 1.4 + 0.34 * (len(steps) + 2))
    rows = np.arange(len(steps) + 2, dtype=np.float64)
    ax.barh(rows[[0, -1]], [begin, reached[-1]], 0.6, color=TOTAL)
    for row, (_, more), left in zip(rows[1:-1], steps, reached[:-1], strict=True):
        ax.barh(row, more, 0.6, left, color=MORE if more > 0 else LESS, hatch="////" if more > 0 else "",
                edgecolor="white")  # fmt: skip
        ax.annotate(f"{more:+.3g}", (max(left, left + more), row), xytext=(3, 0), textcoords="offset points",
                    va="center", fontsize=8, color=INK)  # fmt: skip
    ends = [value for value in (begin, *reached) if value > 0]
    spread = max(ends) - min(ends)
    ax.set_xlim(max(min(ends) - 2.0 * spread, 0.0) if spread else 0.0, max(ends) + 0.15 * max(spread, 0.05 * max(ends)))
    first, last = map(escape_invisible, names)
    ax.set_yticks(rows, [first, *(name for name, _ in steps), last], fontsize=9)
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.set_title(title or f"From {first} to {last}", loc="left")
    remove_clutter(ax, grid_axis="x")
    return ax
