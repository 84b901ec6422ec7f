"""The best plans of several numbers of GPUs beside each other: which is cheapest, which is fastest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

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
    for line in gpu_count_verdict_lines(reports):
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


class ComparedChoice(NamedTuple):
    """A number of GPUs, or a point of a sweep, as it is compared with others that do the same job."""

    name: str
    """Such as ``512 GPUs``."""
    price: str
    """What its run takes, in words behind the name."""
    cost: float
    """USD, GPU-hours or GPU seconds, of one kind for all that are compared."""
    seconds: float
    """Of the run, or of a step: of one kind too."""


def verdict_of_choices(choices: Sequence[ComparedChoice]) -> list[str]:
    """Which of several choices is cheapest and which fastest, in words; empty where there is none.

    Examples
    --------
    >>> few, many = ComparedChoice("8 GPUs", ", 4 days", 1.0, 4.0), ComparedChoice("16 GPUs", ", 2 days", 1.1, 2.0)
    >>> verdict_of_choices([few, many])
    ['Cheapest: 8 GPUs, 4 days.', 'Fastest: 16 GPUs, 2 days: 2.00 times as fast for 10.0% more.']
    """
    if not choices:
        return []
    cheapest = min(choices, key=lambda choice: choice.cost)
    fastest = min(choices, key=lambda choice: choice.seconds)
    if fastest is cheapest:
        return [f"Cheapest and fastest: {cheapest.name}{cheapest.price}."]
    more = f"{cheapest.seconds / fastest.seconds:.2f} times as fast"
    more += f" for {fastest.cost / cheapest.cost - 1.0:.1%} more" if cheapest.cost else ""
    return [f"Cheapest: {cheapest.name}{cheapest.price}.", f"Fastest: {fastest.name}{fastest.price}: {more}."]


def gpu_count_verdict_lines(reports: Sequence[PlanReport]) -> list[str]:
    """Which number of GPUs is cheapest and which fastest, in words; empty where nothing fits anywhere.

    Cheapest by dollars where there is a price, else by GPU-hours, which go as what a million tokens take.
    """
    return verdict_of_choices([_choice(report) for report in reports if report.plans])


def _choice(report: PlanReport) -> ComparedChoice:
    plan, gpus = report.plans[0], report.cluster.num_gpus
    days, hours = days_of_run(plan), gpu_hours_of_run(plan, gpus)
    cost = plan.usd or hours or gpu_seconds_per_million_tokens(plan) * gpus / (gpus - plan.idle_gpus)
    return ComparedChoice(f"{gpus:,} GPUs", run_price_text(days, hours, plan.usd), cost, days or plan.step_s)


def run_price_text(days: float | None, hours: float | None, usd: float | None) -> str:
    """What a run takes, in words that follow a name; empty where nothing is known.

    Examples
    --------
    >>> run_price_text(2.0, 384.0, None)
    ', 2.0 days, 384 GPU-hours'
    """
    words = [] if days is None else [f"{days:,.1f} days"]
    words += [] if hours is None else [f"{hours:,.0f} GPU-hours"]
    words += [] if usd is None else [f"{usd:,.0f} USD"]
    return f", {', '.join(words)}" if words else ""


def scales_to_frame(reports: Sequence[PlanReport]) -> pd.DataFrame:
    """The plans of every number of GPUs as a table, with that number in front."""
    import pandas as pd

    frames = [report.to_frame(all=True) for report in reports if report.plans]
    for frame, report in zip(frames, (report for report in reports if report.plans), strict=True):
        frame.insert(0, "num_gpus", report.cluster.num_gpus)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
