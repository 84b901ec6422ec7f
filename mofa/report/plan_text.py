"""Results as text: plans and estimates, where their time and memory go, and what was looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mofa.report.layout_text import layout_lines
from mofa.report.long_run import print_long_runs
from mofa.report.phrases import component_words, numbers_with_repeats_text, strategy_text
from mofa.report.search_text import (
    has_experts,
    idle_gpus_lines,
    numerics_offers_line,
    print_export_hint,
    print_min_gpus,
    print_planned_job,
    print_provenance,
    print_search_counts,
    print_taken_defaults,
    ties_line,
)
from mofa.report.tables import print_paragraph, print_table
from mofa.schedules import SCHEDULES
from mofa.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from mofa.plan.memory import LiveTensors, Memory
    from mofa.plan.result import Estimate, Plan, PlanReport
    from mofa.plan.step_parts import Time

MAX_STAGE_ROWS = 16
PLAN_COLUMNS_LEAVE = ("TFLOP/s/GPU", "limit GiB", "MFU", "days without failures", "tokens/s/GPU", "peak GiB")
"""What a narrow terminal leaves out of the table of plans, first things first; number and step stay."""


def print_plan_report(report: PlanReport, console: Console, *, quiet: bool = False) -> None:
    """Print what a search found: the best plans, where the best one's time and memory go, and why others fell.

    Parameters
    ----------
    report
        What the search found.
    console
        Where to.
    quiet
        Only the table of plans, or the reasons where there are none.
    """
    if not quiet:
        print_planned_job(console, report.workload, report.cluster, report.framework)
    if report.plans:
        title = f"The {len(report.plans)} best plans" if len(report.plans) > 1 else "Best plan"
        print_plans(console, report.plans, title, moe=has_experts(report.workload), with_usd=quiet)
        for line in idle_gpus_lines(report):
            print_paragraph(console, line)
        if quiet:
            return
        if report.num_tied > 1:
            print_paragraph(console, ties_line(report))
        if report.numerics_offers:
            print_paragraph(console, numerics_offers_line(report))
        best = report.plans[0]
        _print_split(console, best, " of the best plan")
        _print_layouts(console, report.plans)
        print_long_runs(console, report.plans, asked="fault profile" in report.defaults)
        print_step_parts(console, best.time, "Where the step of the best plan goes")
        print_memory(console, best.memory, "What fills the memory of its fullest rank")
    else:
        print_paragraph(console, "Nothing fits.", "bold red")
        print_min_gpus(console, report)
    print_search_counts(console, report)
    if quiet:
        return
    for plan in report.plans[:1]:
        print_provenance(console, plan)
    print_taken_defaults(console, report.defaults)
    if report.plans:
        print_export_hint(console, "plan", report.framework.name)


def print_estimate(estimate: Estimate, console: Console, *, quiet: bool = False) -> None:
    """Print one costed strategy and where its time and memory go.

    Parameters
    ----------
    estimate
        The strategy, costed.
    console
        Where to.
    quiet
        Only the line of the strategy.
    """
    title = estimate.id or "Estimate"
    if quiet:
        print_plans(console, [estimate], title, moe=has_experts(estimate.workload), with_usd=True)
        return
    print_planned_job(console, estimate.workload, estimate.cluster, estimate.framework)
    print_plans(console, [estimate], title, moe=has_experts(estimate.workload))
    _print_split(console, estimate)
    _print_layouts(console, [estimate])
    if not estimate.memory.fits:
        short = format_bytes(-estimate.memory.free_bytes)
        print_paragraph(console, f"Does not fit: {short} over the limit.\n", "bold red")
    from mofa.plan.long_run import NO_FAULTS

    if set(estimate.unknown.values()) != {NO_FAULTS} or estimate.usd is not None:
        print_long_runs(console, [estimate], asked=True)
    print_step_parts(console, estimate.time, "Where the step goes")
    if len(estimate.time.by_stage) > 1:
        print_stage_times(console, estimate.time)
    print_memory(console, estimate.memory, "What fills the memory of the fullest rank")
    if len(estimate.memory.by_stage) > 1:
        print_stage_memory(console, estimate.memory)
    print_expert_rank_memory(console, estimate.memory)
    print_live_tensors_at_peak(console, estimate.memory)
    print_provenance(console, estimate)
    print_taken_defaults(console, estimate.defaults)
    print_export_hint(console, "estimate", estimate.framework.name)


def print_plans(
    console: Console, plans: Sequence[Plan], title: str, *, moe: bool = True, with_usd: bool = False
) -> None:
    """Print one line per plan: strategy, speed, memory and, where tokens are given, days; dollars if they are asked for
    and known."""
    with_days = any(plan.days_without_failures is not None for plan in plans)
    columns = [
        ("#", "right"),
        ("strategy", "left"),
        ("step", "right"),
        ("tokens/s/GPU", "right"),
        ("TFLOP/s/GPU", "right"),
        ("MFU", "right"),
        ("peak GiB", "right"),
        ("limit GiB", "right"),
    ]
    rows = []
    for i, plan in enumerate(plans, start=1):
        memory = plan.memory
        row = [
            str(i),
            strategy_text(plan.strategy, moe=moe),
            format_seconds(plan.step_s),
            f"{plan.tokens_per_s_per_gpu:,.1f}",
            f"{plan.tflops_per_gpu:.1f}",
            f"{plan.mfu:.1%}",
            f"{memory.device_bytes / GIB:.2f}",
            f"{memory.limit_bytes / GIB:.2f}",
        ]
        rows.append(row)
    if not all(plan.memory.fits for plan in plans):
        columns.append(("fits", "right"))
        for row, plan in zip(rows, plans, strict=True):
            over = format_bytes(-plan.memory.free_bytes)
            row.append("yes" if plan.memory.fits else f"NO, {over} over")
    if with_days:
        columns.append(("days without failures", "right"))
        for row, plan in zip(rows, plans, strict=True):
            days = plan.days_without_failures
            row.append("" if days is None else f"{days:,.1f}")
    if with_usd and any(plan.usd is not None for plan in plans):
        columns.append(("dollars", "right"))
        for row, plan in zip(rows, plans, strict=True):
            row.append("" if plan.usd is None else f"{plan.usd:,.0f}")
    print_table(console, title, columns, rows, leaves=PLAN_COLUMNS_LEAVE, under="strategy")


def print_step_parts(console: Console, time: Time, title: str) -> None:
    """Print the parts of a step, exposed and hidden."""
    exposed: dict[str, float] = {str(name): value for name, value in time.exposed.items()}
    step_s = math.fsum(exposed.values())
    names = [*exposed, *(name for name in time.hidden if name not in exposed)]
    rows = [
        [
            component_words(name),
            _seconds(exposed.get(name, 0.0)),
            _share(exposed.get(name, 0.0), step_s),
            _seconds(time.hidden.get(name, 0.0)),
        ]
        for name in names
        if exposed.get(name, 0.0) or time.hidden.get(name, 0.0)
    ]
    rows.append(["step", format_seconds(step_s), "100.0%", _seconds(math.fsum(time.hidden.values()))])
    columns = [("part", "left"), ("exposed", "right"), ("of step", "right"), ("hidden", "right")]
    print_table(console, title, columns, rows)


def print_stage_times(console: Console, time: Time) -> None:
    """Print what each pipeline stage's rank computes, waits for and steps; of many stages, some evenly spread."""
    stages = time.by_stage
    shown = stages
    if len(stages) > MAX_STAGE_ROWS:
        shown = tuple(stages[round(i * (len(stages) - 1) / (MAX_STAGE_ROWS - 1))] for i in range(MAX_STAGE_ROWS))
    groups = {
        "computes": ("gemm", "grouped_gemm", "attention", "memory_bound", "recompute"),
        "host": ("host_idle",), "tp, cp, ep": ("tp", "cp", "ep"), "dp": ("dp",), "pp": ("pp",), "bubble": ("bubble",),
        "stragglers": ("stragglers",), "optimizer": ("optimizer",),
    }  # fmt: skip
    rows = []
    for stage in shown:
        exposed: dict[str, float] = {str(name): value for name, value in stage.exposed.items()}
        parts = [_seconds(math.fsum(exposed[name] for name in names)) for names in groups.values()]
        most = max(stage.idle, key=lambda cause: stage.idle[cause], default="")
        rows.append([str(stage.stage), *parts, f"{most}: {format_seconds(stage.idle[most])}" if most else ""])
    columns = [("stage", "right"), *((name, "right") for name in groups), ("waits most for", "left")]
    cut = "" if len(shown) == len(stages) else f" ({len(shown)} of {len(stages)} shown)"
    leaves = ("optimizer", "stragglers", "dp", "host", "pp", "tp, cp, ep")
    print_table(console, f"Time per pipeline stage{cut}", columns, rows, leaves=leaves, under="waits most for",
                names_under=True)  # fmt: skip


def print_memory(console: Console, memory: Memory, title: str) -> None:
    """Print the parts of a rank's memory and how they compare with the capacity."""
    rows = [
        [component_words(k), format_bytes(v), _share(v, memory.capacity_bytes)]
        for k, v in memory.by_component.items()
        if v
    ]
    for name, value in (("peak", memory.peak_bytes), ("margin", memory.margin_bytes), ("free", memory.free_bytes)):
        rows.append([name, format_bytes(value), _share(value, memory.capacity_bytes)])
    rows.append(["capacity", format_bytes(memory.capacity_bytes), "100.0%"])
    print_table(console, title, [("part", "left"), ("bytes", "right"), ("of capacity", "right")], rows)


def print_stage_memory(console: Console, memory: Memory) -> None:
    """Print the memory of each pipeline stage; of many stages, the first and the fullest."""
    stages = memory.by_stage
    shown = stages
    if len(stages) > MAX_STAGE_ROWS:
        fullest = max(stages, key=lambda stage: stage.device_bytes)
        head = (*stages[: MAX_STAGE_ROWS - 2], stages[-1])
        shown = head if fullest in head else tuple(sorted((*head, fullest), key=lambda stage: stage.stage))
    rows = [
        [
            str(stage.stage),
            str(stage.num_layers),
            str(stage.recomputed_layers),
            format_bytes(stage.allocated_bytes),
            format_bytes(stage.reserved_bytes),
            format_bytes(stage.device_bytes),
            stage.instant or "",
        ]
        for stage in shown
    ]
    columns = [
        ("stage", "right"),
        ("layers", "right"),
        ("recomputed", "right"),
        ("allocated", "right"),
        ("reserved", "right"),
        ("device", "right"),
        ("peaks at", "left"),
    ]
    cut = "" if len(shown) == len(stages) else f" ({len(shown)} of {len(stages)} shown)"
    leaves = ("recomputed", "reserved", "layers", "allocated")
    print_table(console, f"Memory per pipeline stage{cut}", columns, rows, leaves=leaves, under="peaks at",
                names_under=True)  # fmt: skip


def print_expert_rank_memory(console: Console, memory: Memory) -> None:
    """Print the ranks with the fewest and the most tokens of each stage where they differ; of many, the fullest."""
    uneven = [stage for stage in memory.by_stage if stage.ranks is not None]
    shown = sorted(sorted(uneven, key=lambda stage: -stage.device_bytes)[:MAX_STAGE_ROWS], key=lambda item: item.stage)
    rows = [
        [
            str(stage.stage), name, f"{rank.tokens_over_mean:.2f}", format_bytes(rank.allocated_bytes),
            format_bytes(rank.reserved_bytes), format_bytes(rank.device_bytes),
        ]
        for stage in shown if stage.ranks is not None
        for name, rank in (("emptiest", stage.ranks.emptiest), ("fullest", stage.ranks.fullest))
    ]  # fmt: skip
    if not rows:
        return
    columns = [
        ("stage", "right"), ("rank", "left"), ("tokens / mean", "right"), ("allocated", "right"),
        ("reserved", "right"), ("device", "right"),
    ]  # fmt: skip
    cut = "" if len(shown) == len(uneven) else f" ({len(shown)} of {len(uneven)} stages shown)"
    title = f"Ranks with the fewest and the most tokens{cut}"
    print_table(console, title, columns, rows, leaves=("reserved", "allocated"))


def print_live_tensors_at_peak(console: Console, memory: Memory) -> None:
    """Print what is alive at the peak of the fullest rank, and of the first rank whose device is full, what then."""
    if not memory.by_stage:
        return
    fullest = max(memory.by_stage, key=lambda stage: stage.device_bytes)
    columns = [
        ("tensors", "left"),
        ("kind", "left"),
        ("number", "right"),
        ("bytes", "right"),
        ("of allocated", "right"),
    ]
    leaves = ("number", "of allocated", "kind")

    def rows(tensors: Sequence[LiveTensors], total_bytes: float) -> list[list[str]]:
        return [
            [t.name, component_words(t.kind), f"{t.count:,}", format_bytes(t.bytes), _share(t.bytes, total_bytes)]
            for t in tensors
        ]

    if fullest.tensors:
        totals = f"{format_bytes(fullest.allocated_bytes)} allocated of {format_bytes(fullest.reserved_bytes)} reserved"
        title = f"Alive at the peak of stage {fullest.stage}: {fullest.instant} ({totals})"
        print_table(console, title, columns, rows(fullest.tensors, fullest.allocated_bytes), leaves=leaves)
    full = [stage for stage in memory.by_stage if stage.out_of_memory is not None]
    for stage in full[:1]:
        first = stage.out_of_memory
        assert first is not None
        others = f" ({len(full)} of {len(memory.by_stage)} stages run out of memory)" if len(full) > 1 else ""
        print_paragraph(
            console,
            f"Stage {stage.stage} runs out of memory in step {first.step}, {first.where}: "
            f"{format_bytes(first.missing_bytes)} are missing beside {format_bytes(first.allocated_bytes)} allocated "
            f"of {format_bytes(first.reserved_bytes)} reserved{others}.",
            "bold red",
        )
        print_table(console, "Alive then", columns, rows(first.tensors, first.allocated_bytes), leaves=leaves)


def _print_split(console: Console, plan: Plan, of: str = "") -> None:
    """Where the layers are, unless every stage has as many in one piece."""
    layers, vpp = plan.layers_by_chunk, plan.strategy.vpp
    if not layers or (vpp == 1 and len(set(layers)) == 1):
        return
    order = (
        "over the stages and back"
        if SCHEDULES[plan.strategy.schedule].placement == "v"
        else f"{vpp} times over the stages"
    )
    what = f"chunk{of}, in a micro-batch's order ({order})" if vpp > 1 else f"stage{of}"
    print_paragraph(console, f"Layers per {what}: {numbers_with_repeats_text(layers)}.\n")


def _print_layouts(console: Console, plans: Sequence[Plan]) -> None:
    """The layouts to launch with, whose each is, and what searches found."""
    if lines := layout_lines(plans):
        for line in lines:
            print_paragraph(console, line)
        print_paragraph(console, "")


def _seconds(value_s: float) -> str:
    return format_seconds(value_s) if value_s else ""


def _share(part: float, total: float) -> str:
    return f"{part / total:.1%}" if part else ""
