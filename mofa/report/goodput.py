"""Goodput as text: the calculator, a rate out of a log, and a job against scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mofa.report.long_run import print_ledger
from mofa.report.tables import print_paragraph, print_table
from mofa.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from mofa.faults.calculator import GoodputCalculation, MonteCarlo
    from mofa.faults.failures.events import LogStatistics
    from mofa.faults.level_calculator import LevelCalculation
    from mofa.plan.goodput_by_scale import GoodputReport

LEAST_ETTR = 1e-3
"""Below it nothing is simulated, as in mofa.faults.calculator. [-]"""
FORMULAS = {"young": "Young", "daly": "Daly, first order", "daly_higher_order": "Daly, higher order", "exact": "exact"}


def print_goodput_calculation(console: Console, calculation: GoodputCalculation, *, quiet: bool = False) -> None:
    """Print the interval of each formula with its ETTR, the simulation and where the time goes."""
    rows = [
        [
            words,
            format_seconds(getattr(calculation.interval_s, name)),
            f"{getattr(calculation.ettr_by_formula, name):.4f}",
        ]
        for name, words in FORMULAS.items()
    ]
    print_table(console, "Checkpoint intervals", [("formula", "left"), ("interval", "right"), ("ETTR", "right")], rows)
    print_paragraph(
        console, f"ETTR {calculation.ettr:.4f} at an interval of {format_seconds(calculation.at_interval_s)}"
    )
    if calculation.ettr_monte_carlo is None:
        reason = "so few intervals say nothing of checkpoints that are restorable so late"
        print_paragraph(
            console, f"Not simulated: {'the run all but stands still' if calculation.ettr < LEAST_ETTR else reason}."
        )
    else:
        _print_simulated(console, calculation.ettr_monte_carlo)
    if calculation.meta_ettr is not None and not quiet:
        print_paragraph(console, f"Meta's approximation {calculation.meta_ettr:.4f}")
    console.print()
    if not quiet:
        print_ledger(console, calculation.ledger, "Where the wall clock goes")


def _print_simulated(console: Console, mc: MonteCarlo) -> None:
    what = f"{mc.runs:,} runs of {mc.productive_days:.3g} productive days"
    # the rule of three: what was never seen in n runs has a rate below 3 / n
    unseen = f"none failed, below {3 / mc.runs:.2g} failures a run with 95 % confidence"
    sure = unseen if mc.standard_error is None else f"+- {mc.standard_error:.5f}"
    print_paragraph(console, f"Simulated {mc.mean:.5f} {sure} ({what})")


def print_checkpoint_levels(console: Console, calculation: LevelCalculation, *, quiet: bool = False) -> None:
    """Print how often each level is written, the ETTR, the simulation and where the time goes."""
    rows = [
        [f"{k + 1}", format_seconds(x.checkpoint_s), format_seconds(x.restart_s), f"{x.share:.1%}",
         "never" if x.first_order_s is None else format_seconds(x.first_order_s),
         format_seconds(x.every * calculation.at_interval_s), f"{x.every:,}"]
        for k, x in enumerate(calculation.levels)
    ]  # fmt: skip
    heads = ("level", "blocks", "restart", "of failures", "first order", "best interval", "every")
    print_table(
        console, "Levels of checkpoints", [(head, "right") for head in heads], rows, leaves=("first order", "restart")
    )
    print_paragraph(
        console, f"ETTR {calculation.ettr:.4f} at an interval of {format_seconds(calculation.at_interval_s)}"
    )
    if calculation.ettr_monte_carlo is None:
        print_paragraph(console, "Not simulated: the run all but stands still.")
    else:
        _print_simulated(console, calculation.ettr_monte_carlo)
    console.print()
    if not quiet:
        print_ledger(console, calculation.ledger, "Where the wall clock goes")


def print_failure_rate(console: Console, rate: LogStatistics) -> None:
    """Print a failure rate with its interval, the kinds of failures and how they cluster."""
    per = 1000.0
    low, high = rate.low_per_node_day * per, rate.high_per_node_day * per
    text = (
        f"{rate.failures:,} failures in {rate.node_days:,.1f} node-days: {rate.rate_per_node_day * per:.3g} per 1000 "
    )
    print_paragraph(console, f"{text}node-days, {rate.confidence:.0%} interval {low:.3g} to {high:.3g}")
    kinds = ", ".join(f"{kind} {share:.1%}" for kind, share in rate.kinds.items())
    print_paragraph(console, f"Kinds: {kinds}")
    if rate.weibull_shape is None:
        print_paragraph(console, "Too few failures of one and the same node for a Weibull shape: taken as exponential")
    else:
        words = "below 1: they cluster" if rate.weibull_shape < 1 else "1 is exponential"
        print_paragraph(console, f"Weibull shape of a node's time between failures {rate.weibull_shape:.2f} ({words})")


def variant_names(report: GoodputReport) -> list[str]:
    """Names of the variants that some scale has, in their order."""
    order: dict[str, None] = {}
    for point in sorted(report.points, key=lambda point: -len(point.variants)):
        order |= dict.fromkeys(point.variants)
    return list(order)


def print_goodput_by_scale(console: Console, report: GoodputReport, *, quiet: bool = False) -> None:
    """Print ETTR and effective throughput against scale, and the key factors."""
    names = variant_names(report)
    if not quiet:
        batch = "the global batch grows with the GPUs" if report.weak else "the global batch is fixed"
        how = "planned anew at every scale" if report.replan else "dp of one plan replicated"
        title = f"{report.workload.name} on {report.node}, {report.framework.name}, failures of {report.faults}"
        print_paragraph(console, title, "bold")
        fewer = "are a plan's own" if report.replan else "have replicas and pipeline stages that leave them over"
        of_spares = f"spares are nodes of these GPUs, and the rest computes the same batch: its degrees {fewer}"
        print_paragraph(console, f"{how}; {batch}; {of_spares}\n")
    columns = [("GPUs", "right"), ("MTBF", "right"), ("step", "right"), ("tokens/s/GPU", "right"), ("spares", "right")]
    columns += [(name, "right") for name in names]
    for title, cell in (("ETTR", "{0.ettr:.2%}"), ("Effective tokens/s/GPU, spares included",
                        "{0.effective_tokens_per_s_per_gpu:,.1f}")):  # fmt: skip
        rows = []
        for point in report.points:
            if point.step_s is None or point.tokens_per_s_per_gpu is None:
                rows.append([f"{point.num_gpus:,}", "", "", "", "", *[""] * len(names)])
                continue
            mtbf = "never" if point.mtbf_s is None else format_seconds(point.mtbf_s)
            head = [f"{point.num_gpus:,}", mtbf, format_seconds(point.step_s), f"{point.tokens_per_s_per_gpu:,.1f}"]
            outcomes = [point.variants.get(name) for name in names]
            cells = ["" if v is None else cell.format(v) + ("" if v.host_memory_fits else " *") for v in outcomes]
            spares = list(dict.fromkeys(f"{v.spares:,}" for v in point.variants.values() if v.spares))
            rows.append([*head, " or ".join(spares), *cells])
        print_table(console, title, columns, rows, leaves=("spares", "step", "MTBF", "tokens/s/GPU"))
    if any(not v.host_memory_fits for point in report.points for v in point.variants.values()):
        print_paragraph(console, "* needs more host memory than a node has\n")
    for point in report.points:
        if point.why is not None:
            print_paragraph(console, f"{point.num_gpus:,} GPU{'s' if point.num_gpus > 1 else ''}: {point.why}")
    if quiet:
        return
    rows = [
        [item.factor, f"{item.ettr_halved:.2%}", f"{item.ettr_doubled:.2%}", f"{100 * item.swing:.2f}"]
        for item in report.sensitivity
    ]
    title = f"Key factors at {report.sensitivity_num_gpus:,} GPUs (ETTR {report.sensitivity_ettr:.2%})"
    columns = [("factor", "left"), ("halved", "right"), ("doubled", "right"), ("points between", "right")]
    print_table(console, title, columns, rows)
