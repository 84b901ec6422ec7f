"""Long runs on a terminal: what of the wall clock is productive, how long, what it costs, and what is not known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mofa.report.tables import print_paragraph, print_table
from mofa.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from mofa.faults.ledger import Ledger
    from mofa.plan.long_run import CheckpointLevel, Days, LongRunDetail
    from mofa.plan.result import Plan

LEDGER_WORDS = {
    "productive": "productive steps",
    "checkpoint": "blocked by checkpoints",
    "lost": "steps lost to failures",
    "restart": "restarting",
    "waiting": "waiting for nodes",
}


def print_long_runs(console: Console, plans: Sequence[Plan], *, asked: bool) -> None:
    """Print a line per plan of what a long run of it takes, and where the best one's wall clock goes.

    Parameters
    ----------
    plans
        The plans, best first.
    asked
        Whether the user gave anything about failures; if not, nothing is printed.
    """
    if not asked or not plans:
        return
    if plans[0].ettr is not None or plans[0].usd is not None:
        columns = [
            "#",
            "ETTR",
            "checkpoint every",
            "effective tokens/s/GPU",
            "days (10-90 % of failures)",
            "GPU-hours",
            "USD",
            "kWh",
        ]
        rows = [[str(i), *_figures(plan)] for i, plan in enumerate(plans, 1)]
        keep = [0, *(c for c in range(1, len(columns)) if any(row[c] for row in rows))]
        print_table(
            console,
            "A long run of each" if plans[0].ettr is not None else "A run of each without failures",
            [(columns[c], "right") for c in keep],
            [[row[c] for c in keep] for row in rows],
            leaves=("kWh", "checkpoint every", "GPU-hours", "effective tokens/s/GPU"),
        )
    best = plans[0]
    if best.long_run is not None:
        print_ledger(console, best.long_run.ledger, "Where the wall clock of the best plan goes")
        _print_detail(console, best.long_run)
    _print_unknown(console, {str(figure): reason for figure, reason in best.unknown.items()})


def _figures(plan: Plan) -> list[str]:
    days = plan.days
    every, rate = plan.checkpoint_interval_s, plan.effective_tokens_per_s_per_gpu
    return [
        "" if plan.ettr is None else f"{plan.ettr:.2%}",
        "" if every is None else format_seconds(every),
        "" if rate is None else f"{rate:,.1f}",
        "" if days is None else format_days_and_band(days),
        "" if plan.gpu_hours is None else f"{plan.gpu_hours:,.0f}",
        "" if plan.usd is None else f"{plan.usd:,.0f}",
        "" if plan.kwh is None else f"{plan.kwh:,.0f}",
    ]


def format_days_and_band(days: Days) -> str:
    """Median and band with as many decimals as show two digits of the band's width, one to four.

    >>> from mofa.plan.long_run import Days
    >>> [format_days_and_band(Days(p10=a, p50=b, p90=c)) for a, b, c in ((21.2216, 21.2467, 21.2782), (90, 100, 120))]
    ['21.247 (21.222-21.278)', '100.0 (90.0-120.0)']
    """
    width = days.p90 - days.p10
    decimals = min(max(1 - math.floor(math.log10(width)), 1), 4) if width > 0 else 1
    return f"{days.p50:,.{decimals}f} ({days.p10:,.{decimals}f}-{days.p90:,.{decimals}f})"


def print_ledger(console: Console, ledger: Ledger, title: str) -> None:
    """Print the shares of the wall clock."""
    rows = [[words, f"{getattr(ledger, part):.2%}"] for part, words in LEDGER_WORDS.items()]
    print_table(console, title, [("part", "left"), ("of wall clock", "right")], [*rows, ["wall clock", "100.00%"]])


def _print_detail(console: Console, run: LongRunDetail) -> None:
    fails = "no failure" if run.mtbf_s is None else f"a failure every {format_seconds(run.mtbf_s)}"
    nodes = "spare node" if run.spares == 1 else "spare nodes"
    spares = f"{run.spares} {nodes}" if run.spares else "no spare nodes, the scheduler replaces"
    levels = "; ".join(_level(level) for level in run.levels)
    lines = [
        f"{run.faults}: {fails}, {format_seconds(run.restart_s)} to restart, {spares}.",
        f"Checkpoints ({run.mode}): {format_bytes(run.whole_checkpoint_bytes)}; {levels}.",
        *([_goes_on(run.num_replicas)] if run.recovery == "replica" else []),
        f"Power is a model: {run.watts_per_gpu:,.0f} W a GPU on average, spares, nodes and building included.",
    ]
    for line in lines:
        print_paragraph(console, line)
    console.print()


def _goes_on(num_replicas: int) -> str:
    if num_replicas == 1:
        return "Recovery from replicas: this plan has one, and all restart from a checkpoint."
    return f"Recovery: of {num_replicas} replicas the others go on; a checkpoint is read where all fail."


def _level(level: CheckpointLevel) -> str:
    where = {"host": "host memory", "peers": "peers' memory", "storage": "storage"}[level.where]
    every = f" every {level.every}." if level.every > 1 else ""
    later = f", there {format_seconds(level.persist_s)} later" if level.persist_s else ""
    return f"{where}{every}, blocking {format_seconds(level.block_s)}{later}"


def _print_unknown(console: Console, unknown: Mapping[str, str]) -> None:
    reasons: dict[str, list[str]] = {}
    for figure, reason in unknown.items():
        reasons.setdefault(reason, []).append(figure)
    for reason, figures in reasons.items():
        print_paragraph(console, f"Not known ({reason}): {', '.join(figures)}.")
    if reasons:
        console.print()
