"""The best plans of several numbers of GPUs beside each other: which is cheapest, which is fastest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mofa.plan.run_costs import days_of_run, gpu_hours_of_run, gpu_seconds_per_million_tokens
from mofa.report.phrases import strategy_text
from mofa.report.search_text import has_experts, print_planned_job, print_taken_defaults
from mofa.report.tables import print_paragraph, print_table
from mofa.units import GIB, format_seconds

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from mofa.plan.result import PlanReport


def print_scales(reports: Sequence[PlanReport], console: Console, *, quiet: bool = False) -> None:
    """Print a line for each number of GPUs, and which of them is cheapest and which fastest.

    Parameters
    ----------
    reports
        What a search found at each number, the smallest first.
    console
        Where to.
    quiet
        Only the table and the verdict.
    """
    first = reports[0]
    if not quiet:
        print_planned_job(console, first.workload, first.cluster, first.framework)
    columns = [
        ("GPUs", "right"), ("strategy", "left"), ("step", "right"), ("tokens/s/GPU", "right"), ("MFU", "right"),
        ("peak GiB", "right"), ("GPU s per M tokens", "right"), ("days", "right"), ("GPU-hours", "right"),
        ("USD", "right"),
    ]  # fmt: skip
    rows = [_cells(report) for report in reports]
    shown = [c for c in range(len(columns)) if any(row[c] for row in rows)]
    print_table(
        console, "The best plan of each number of GPUs", [columns[c] for c in shown],
        [[row[c] for c in shown] for row in rows], leaves=("peak GiB", "MFU", "GPU-hours"), under="strategy",
    )  # fmt: skip
    for line in verdict_lines(reports):
        print_paragraph(console, line)
    if not quiet:
        console.print()
        print_taken_defaults(console, first.defaults)


def _cells(report: PlanReport) -> list[str]:
    gpus = report.cluster.num_gpus
    if not report.plans:
        least = f"; {report.min_gpus:,} GPUs would do" if report.min_gpus else ""
        return [f"{gpus:,}", f"nothing fits{least}", *[""] * 8]
    plan = report.plans[0]
    days, hours = days_of_run(plan), gpu_hours_of_run(plan, gpus)
    return [
        f"{gpus:,}", strategy_text(plan.strategy, moe=has_experts(report.workload)), format_seconds(plan.step_s),
        f"{plan.tokens_per_s_per_gpu:,.1f}", f"{plan.mfu:.1%}", f"{plan.memory.device_bytes / GIB:.2f}",
        f"{gpu_seconds_per_million_tokens(plan):,.1f}", "" if days is None else f"{days:,.1f}",
        "" if hours is None else f"{hours:,.0f}", "" if plan.usd is None else f"{plan.usd:,.0f}",
    ]  # fmt: skip


def verdict_lines(reports: Sequence[PlanReport]) -> list[str]:
    """Which number of GPUs is cheapest and which fastest, in words; empty where nothing fits anywhere.

    Cheapest by dollars where there is a price, else by GPU-hours, which go as what a million tokens take.
    """
    fitting = [report for report in reports if report.plans]
    if not fitting:
        return []

    def cost(report: PlanReport) -> float:
        plan, gpus = report.plans[0], report.cluster.num_gpus
        hours = gpu_hours_of_run(plan, gpus)
        busy = gpus - plan.idle_gpus
        return plan.usd or hours or gpu_seconds_per_million_tokens(plan) * gpus / busy

    def seconds(report: PlanReport) -> float:
        plan = report.plans[0]
        return days_of_run(plan) or plan.step_s

    cheapest, fastest = min(fitting, key=cost), min(fitting, key=seconds)
    lines = [f"Cheapest: {cheapest.cluster.num_gpus:,} GPUs{_price(cheapest)}."]
    if fastest is cheapest:
        return [f"Cheapest and fastest: {cheapest.cluster.num_gpus:,} GPUs{_price(cheapest)}."]
    sooner, dearer = seconds(cheapest) / seconds(fastest), cost(fastest) / cost(cheapest) - 1.0
    more = f"{sooner:.2f} times as fast for {dearer:.1%} more"
    lines.append(f"Fastest: {fastest.cluster.num_gpus:,} GPUs{_price(fastest)}: {more}.")
    return lines


def _price(report: PlanReport) -> str:
    plan = report.plans[0]
    days, hours = days_of_run(plan), gpu_hours_of_run(plan, report.cluster.num_gpus)
    words = [] if days is None else [f"{days:,.1f} days"]
    words += [] if hours is None else [f"{hours:,.0f} GPU-hours"]
    words += [] if plan.usd is None else [f"{plan.usd:,.0f} USD"]
    return f", {', '.join(words)}" if words else ""


def scales_to_frame(reports: Sequence[PlanReport]) -> pd.DataFrame:
    """The plans of every number of GPUs as a table, with that number in front."""
    import pandas as pd

    frames = [report.to_frame(all=True) for report in reports if report.plans]
    for frame, report in zip(frames, (report for report in reports if report.plans), strict=True):
        frame.insert(0, "num_gpus", report.cluster.num_gpus)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
