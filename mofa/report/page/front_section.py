"""The Pareto front: throughput against memory of what was costed, to be pointed at and filtered by degree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mofa.report.figures.pareto import pareto_front
from mofa.report.page.document_parts import Chart, DataTable, Piece, Section, paragraph
from mofa.report.page.facts import ReportFacts, gib_text
from mofa.report.page.looks import ACCENT, QUIET, STRONG, plotly_figure
from mofa.units import GIB, format_seconds

if TYPE_CHECKING:
    import pandas as pd

MOST_DOTS = 1500
"""Strategies that the chart shows: more hide each other. [-]"""
MOST_ROWS = 12
FILTERS = ("tp", "pp", "vpp", "cp", "ep", "dp", "micro_batch", "recompute")
SHOWN = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "micro_batch", "zero", "recompute", "schedule")


def front_section(facts: ReportFacts) -> Section:
    """Every dot a strategy that was costed and fits, the front among them, the plans beside it."""
    fits = facts.strategies[facts.strategies["fits"].astype(bool)].reset_index(drop=True)
    front = pareto_front(
        fits["device_bytes"].to_numpy(dtype=np.float64), fits["tokens_per_s_per_gpu"].to_numpy(dtype=np.float64)
    )
    dots = fits.iloc[_thinned(fits, front)]
    some = f"Shown are {len(dots):,} of {len(fits):,} strategies that fit, of {len(facts.strategies):,} costed"
    space = f" The search looked at {facts.report.space:,}; checks and lower bounds left the others out."
    shown = f" {some}: the front, and the fastest of each kind." if len(dots) < len(fits) else f" {some}."
    less = len(fits) - facts.report.feasible
    slower = f" {less:,} of them cannot be among the best: they were costed for tables and charts." if less > 0 else ""
    point = f"Point at a dot to see its strategy; choose degrees to filter. {_costed_words(facts)}"
    text = paragraph(point, shown, slower, space)
    return Section(
        "front", "Memory against throughput", (text, _chart(facts, dots, fits.iloc[front]), _table(fits, front))
    )


def _costed_words(facts: ReportFacts) -> str:
    """How dots and plans were costed."""
    played = sum(plan.costed_by == "replay" for plan in facts.plans)
    if not played:
        return "Dots and plans are closed forms: nothing was played out."
    which = "plans" if played == len(facts.plans) else f"{played} of {len(facts.plans)} plans"
    return f"Dots are closed forms; {which} were played out."


def _thinned(fits: pd.DataFrame, front: np.ndarray[Any, Any]) -> list[int]:
    """Rows to show: the front, the fastest of every combination of degrees, and then the fastest of all."""
    order = fits.sort_values("step_s", kind="stable")
    first = order.drop_duplicates([name for name in FILTERS if name in fits])
    shown = dict.fromkeys([*front.tolist(), *first.index.tolist(), *order.index[:MOST_DOTS].tolist()])
    return list(shown)[:MOST_DOTS]


def _chart(facts: ReportFacts, dots: pd.DataFrame, front: pd.DataFrame) -> Chart:
    memory = facts.report.plans[0].memory
    names = [name for name in FILTERS if len(set(dots[name].tolist())) > 1]
    played = facts.plans
    plans = [plan.strategy.model_dump() for plan in played]
    traces = [
        _dots("fit, closed form", dots, names, {"size": 6, "color": QUIET, "opacity": 0.75}),
        _dots("front, closed form", front, names, {"size": 8, "color": STRONG}, line={"color": STRONG, "shape": "hv"}),
        {
            "type": "scatter", "mode": "markers", "name": "the plans", "customdata": [
                [str(plan[name]) for name in names] for plan in plans
            ],
            "x": [plan.memory.device_bytes / GIB for plan in played],
            "y": [plan.tokens_per_s_per_gpu for plan in played],
            "text": [f"plan {i}: {_words(plan)}" for i, plan in enumerate(plans, start=1)],
            "marker": {
                "size": [16, *[9] * (len(plans) - 1)], "symbol": ["star", *["circle"] * (len(plans) - 1)],
                "color": ACCENT,
            },
            "hovertemplate": HOVER,
        },
    ]  # fmt: skip
    limit_gib = memory.limit_bytes / GIB
    limit = {
        "type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": limit_gib, "x1": limit_gib,
        "line": {"color": ACCENT, "dash": "dash", "width": 2},
    }  # fmt: skip
    chart = plotly_figure(
        traces,
        "memory of the fullest GPU [GiB]",
        "tokens/s/GPU",
        shapes=[limit],
        hovermode="closest",
        yaxis={"tickformat": ",d"},
    )
    choices = {name: [str(value) for value in sorted(set(dots[name].tolist()), key=_order)] for name in names}
    caption = "Throughput against memory; star: the plan, dashed: the limit"
    return Chart("front", caption, chart, 480, choices, "pareto.png")


HOVER = "%{text}<br>%{x:.2f} GiB, %{y:,.1f} tokens/s/GPU<extra></extra>"


def _dots(
    name: str, rows: pd.DataFrame, names: list[str], marker: dict[str, Any], line: dict[str, Any] | None = None
) -> dict[str, Any]:
    records = rows.to_dict("records")
    trace: dict[str, Any] = {
        "type": "scatter", "mode": "markers" if line is None else "lines+markers", "name": name,
        "x": [round(row["device_bytes"] / GIB, 3) for row in records],
        "y": [round(row["tokens_per_s_per_gpu"], 2) for row in records],
        "text": [_words(row) for row in records], "marker": marker, "hovertemplate": HOVER,
        "customdata": [[str(row[column]) for column in names] for row in records],
    }  # fmt: skip
    return trace if line is None else {**trace, "line": line}


def _words(strategy: dict[Any, Any]) -> str:
    """A strategy in the words that differ from 1 and none."""
    usual = (1, "none", False, "", None)
    return " ".join(f"{name}={strategy[name]}" for name in SHOWN if name in strategy and strategy[name] not in usual)


def _order(value: object) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, int | float) else (0.0, str(value))


def _table(fits: pd.DataFrame, front: np.ndarray[Any, Any]) -> DataTable:
    rows: list[tuple[Piece, ...]] = []
    for row in fits.iloc[front[::-1][:MOST_ROWS]].to_dict("records"):
        rows.append((
            _words(row), format_seconds(row["step_s"]), f"{row['tokens_per_s_per_gpu']:,.1f}", f"{row['mfu']:.1%}",
            gib_text(row["device_bytes"]),
        ))  # fmt: skip
    of = f", {len(rows)} of {len(front)}" if len(rows) < len(front) else ""
    columns = (
        ("strategy", "left"),
        ("step", "right"),
        ("tokens/s/GPU", "right"),
        ("MFU", "right"),
        ("memory", "right"),
    )
    return DataTable(columns, rows, folded=f"The front as a table{of}, the fastest first; closed forms")
