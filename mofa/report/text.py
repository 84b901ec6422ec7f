"""Results as text: plans and estimates, where their time and memory go, and what was looked at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mofa.report.layout_text import layout_lines
from mofa.report.long_run import print_long_runs
from mofa.report.tables import print_table, say
from mofa.report.words import component_name, equal_runs_text, quantity_text, strategy_text
from mofa.schedules import SCHEDULES
from mofa.specs.framework_traits import TRAITS
from mofa.units import GIB, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from mofa.plan.memory import LiveTensors, Memory
    from mofa.plan.result import Estimate, Plan, PlanReport
    from mofa.plan.step_band import Band
    from mofa.plan.step_parts import Time
    from mofa.plan.summaries import ClusterSummary, FrameworkSummary, WorkloadSummary

MAX_STAGE_ROWS = 16
PLAN_COLUMNS_LEAVE = ("TFLOP/s/GPU", "limit GiB", "MFU", "days without failures", "tokens/s/GPU", "peak GiB")
"""What a narrow terminal leaves out of the table of plans, first things first; number and step stay."""


def print_report(report: PlanReport, console: Console, *, quiet: bool = False) -> None:
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
        _print_job(console, report.workload, report.cluster, report.framework)
    if report.plans:
        title = f"The {len(report.plans)} best plans" if len(report.plans) > 1 else "Best plan"
        print_plans(console, report.plans, title, moe=_has_experts(report.workload))
        if quiet:
            return
        if report.num_tied > 1:
            say(console, ties_line(report))
        if report.numerics_offers:
            say(console, offers_line(report))
        best = report.plans[0]
        _print_split(console, best, " of the best plan")
        _print_layouts(console, report.plans)
        print_long_runs(console, report.plans, asked="fault profile" in report.defaults)
        print_time(console, best.time, "Where the step of the best plan goes")
        print_memory(console, best.memory, "What fills the memory of its fullest rank")
    else:
        say(console, "Nothing fits.", "bold red")
        _print_min_gpus(console, report)
    _print_search(console, report)
    if quiet:
        return
    for plan in report.plans[:1]:
        _print_grounds(console, plan)
    _print_defaults(console, report.defaults)
    if report.plans:
        _print_export(console, "plan", report.framework.name)


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
        print_plans(console, [estimate], title, moe=_has_experts(estimate.workload))
        return
    _print_job(console, estimate.workload, estimate.cluster, estimate.framework)
    print_plans(console, [estimate], title, moe=_has_experts(estimate.workload))
    _print_split(console, estimate)
    _print_layouts(console, [estimate])
    if not estimate.memory.fits:
        short = format_bytes(-estimate.memory.free_bytes)
        say(console, f"Does not fit: {short} over the limit.\n", "bold red")
    from mofa.plan.long_run import NO_FAULTS

    if set(estimate.unknown.values()) != {NO_FAULTS} or estimate.usd is not None:
        print_long_runs(console, [estimate], asked=True)
    print_time(console, estimate.time, "Where the step goes")
    if len(estimate.time.by_stage) > 1:
        print_stage_times(console, estimate.time)
    print_memory(console, estimate.memory, "What fills the memory of the fullest rank")
    if len(estimate.memory.by_stage) > 1:
        print_stages(console, estimate.memory)
    print_ranks(console, estimate.memory)
    print_peak(console, estimate.memory)
    _print_grounds(console, estimate)
    _print_defaults(console, estimate.defaults)
    _print_export(console, "estimate", estimate.framework.name)


def print_plans(console: Console, plans: Sequence[Plan], title: str, *, moe: bool = True) -> None:
    """Print one line per plan: strategy, speed, memory and, where tokens are given, days."""
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
    print_table(console, title, columns, rows, leaves=PLAN_COLUMNS_LEAVE, under="strategy")


def print_time(console: Console, time: Time, title: str) -> None:
    """Print the parts of a step, exposed and hidden."""
    exposed: dict[str, float] = {str(name): value for name, value in time.exposed.items()}
    step_s = math.fsum(exposed.values())
    names = [*exposed, *(name for name in time.hidden if name not in exposed)]
    rows = [
        [
            component_name(name),
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
        "optimizer": ("optimizer",),
    }  # fmt: skip
    rows = []
    for stage in shown:
        exposed: dict[str, float] = {str(name): value for name, value in stage.exposed.items()}
        parts = [_seconds(math.fsum(exposed[name] for name in names)) for names in groups.values()]
        most = max(stage.idle, key=lambda cause: stage.idle[cause], default="")
        rows.append([str(stage.stage), *parts, f"{most}: {format_seconds(stage.idle[most])}" if most else ""])
    columns = [("stage", "right"), *((name, "right") for name in groups), ("waits most for", "left")]
    cut = "" if len(shown) == len(stages) else f" ({len(shown)} of {len(stages)} shown)"
    leaves = ("optimizer", "dp", "host", "pp", "tp, cp, ep")
    print_table(console, f"Time per pipeline stage{cut}", columns, rows, leaves=leaves, under="waits most for")


def print_memory(console: Console, memory: Memory, title: str) -> None:
    """Print the parts of a rank's memory and how they compare with the capacity."""
    rows = [
        [component_name(k), format_bytes(v), _share(v, memory.capacity_bytes)]
        for k, v in memory.by_component.items()
        if v
    ]
    for name, value in (("peak", memory.peak_bytes), ("margin", memory.margin_bytes), ("free", memory.free_bytes)):
        rows.append([name, format_bytes(value), _share(value, memory.capacity_bytes)])
    rows.append(["capacity", format_bytes(memory.capacity_bytes), "100.0%"])
    print_table(console, title, [("part", "left"), ("bytes", "right"), ("of capacity", "right")], rows)


def print_stages(console: Console, memory: Memory) -> None:
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
    print_table(console, f"Memory per pipeline stage{cut}", columns, rows, leaves=leaves, under="peaks at")


def print_ranks(console: Console, memory: Memory) -> None:
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


def print_peak(console: Console, memory: Memory) -> None:
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
            [t.name, component_name(t.kind), f"{t.count:,}", format_bytes(t.bytes), _share(t.bytes, total_bytes)]
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
        say(
            console,
            f"Stage {stage.stage} runs out of memory in step {first.step}, {first.where}: "
            f"{format_bytes(first.missing_bytes)} are missing beside {format_bytes(first.allocated_bytes)} allocated "
            f"of {format_bytes(first.reserved_bytes)} reserved{others}.",
            "bold red",
        )
        print_table(console, "Alive then", columns, rows(first.tensors, first.allocated_bytes), leaves=leaves)


def shares_text(fractions: Mapping[Any, float]) -> str:
    """Fractions as a phrase, largest first.

    Examples
    --------
    >>> shares_text({"datasheet": 0.25, "assumed": 0.75, "measured": 0.0})
    'assumed 75.0 %, datasheet 25.0 %'
    """
    ordered = sorted(fractions.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {fraction * 100:.1f} %" for name, fraction in ordered if fraction > 0)


def _print_job(console: Console, job: WorkloadSummary, cluster: ClusterSummary, framework: FrameworkSummary) -> None:
    size = f"{format_count(job.num_params)} parameters"
    if job.num_active_params != job.num_params:
        size += f" ({format_count(job.num_active_params)} active)"
    if job.num_mtp_params:
        size += f" + {format_count(job.num_mtp_params)} multi-token prediction"
    tokens = f", {format_count(job.tokens)} tokens" if job.tokens else ""
    numerics = f"{job.gemm_format} matrix products, {job.moments_format} moments, {job.routing} routing"
    batch = f"sequence {job.seq_len:,}, global batch {job.global_batch:,}{tokens}"
    say(console, f"{job.name}: {size}; {batch}; {numerics}", "bold")
    nodes = f"{cluster.gpus_per_node} a node, fast domain of {cluster.gpus_per_domain}"
    capacity = f"capacity {format_bytes(cluster.capacity_bytes)} ({cluster.capacity_provenance})"
    say(console, f"{cluster.name}: {cluster.num_gpus:,} x {cluster.gpu}, {nodes}, {capacity}")
    how = "compiled" if framework.compile else "not compiled"
    replicas = f" in {framework.dp_replicate} replicas" if framework.dp_replicate > 1 else ""
    shards = f"{framework.data_parallel}{replicas}"
    options = f"{how}, {shards}, {framework.allocator} allocator, {framework.dispatcher} dispatcher"
    say(console, f"framework: {framework.name} {framework.version}, {options} (facts {framework.provenance})\n")


_IN_WORDS = {"slower": "slower: cannot be among the best"}
"""Reasons for rejection whose names do not say enough."""


def _print_search(console: Console, report: PlanReport) -> None:
    costed = f"costed {report.searched:,}, in full the {report.feasible:,} that fit"
    counts = f"Looked at {report.space:,} strategies, {costed}"
    say(console, f"{counts}; {format_seconds(report.elapsed_s)}.\n")
    rows = []
    for reason, count in report.rejected.items():
        miss = report.nearest_miss.get(reason)
        near = (
            ("", "")
            if miss is None
            else (
                quantity_text(miss.short_by, miss.unit),
                strategy_text(miss.strategy, moe=_has_experts(report.workload)),
            )
        )
        rows.append([_IN_WORDS.get(reason, reason), f"{count:,}", *near])
    if rows:
        columns = [("reason", "left"), ("rejected", "right"), ("closest is short by", "right"), ("closest", "left")]
        print_table(console, "Why the others were rejected", columns, rows, under="closest")


def _print_defaults(console: Console, defaults: Mapping[str, str]) -> None:
    if defaults:
        print_table(console, "Defaults", [("", "left"), ("", "left")], [[k, v] for k, v in defaults.items() if v])


def _print_export(console: Console, command: str, framework: str) -> None:
    """How to make a job of the plan, where a framework of today runs it."""
    if targets := TRAITS[framework].exported_to:
        to = " (or ".join(targets) + ")" * (len(targets) - 1)
        say(console, f"To run it: mofa {command} ... --json-file plan.json, then mofa export plan.json --to {to}.\n")


def _print_min_gpus(console: Console, report: PlanReport) -> None:
    if report.min_gpus is not None:
        note = f" ({report.min_gpus_note})" if report.min_gpus_note else ""
        say(console, f"The smallest number of GPUs that would do: {report.min_gpus:,}{note}.\n")
    elif report.min_gpus_note:
        say(console, f"{report.min_gpus_note}\n")


def _print_grounds(console: Console, plan: Plan) -> None:
    """What the prediction rests on."""
    halved = "causal attention halved" if plan.flops_convention == "causal" else "causal attention counted in full"
    if plan.band is not None:
        for line in band_lines(plan.band):
            say(console, line)
    say(console, f"The step rests on numbers that are: {shares_text(plan.provenance)}.")
    if plan.library_fraction is not None:
        say(console, library_line(plan.library_fraction))
    costed = f"Costed by {plan.costed_by.replace('_', ' ')}"
    say(console, f"{costed}; MFU {plan.mfu:.1%} and HFU {plan.hfu:.1%} with {halved}.")
    for note in plan.notes:
        say(console, f"- {note}", indent=2)
    console.print()


def library_line(shares: Mapping[str, float]) -> str:
    """What share of a step rests on what was measured under Transformer Engine, in words.

    Examples
    --------
    >>> library_line({"gemm": 0.5, "host_idle": 0.06})
    'Measured under Transformer Engine: 56.0 % of the step (matrix products 50.0 %, waiting for the host 6.0 %).'
    """
    if not shares:
        return "Nothing of the step rests on kernels or hosts that were measured under Transformer Engine."
    parts = ", ".join(f"{component_name(name)} {share * 100:.1f} %" for name, share in shares.items())
    return f"Measured under Transformer Engine: {sum(shares.values()) * 100:.1f} % of the step ({parts})."


def ties_line(report: PlanReport) -> str:
    """Which of the best plans the model cannot tell apart, in words; there must be some."""
    band = report.plans[0].band
    assert band is not None and band.tie_margin is not None
    tied = f"Plans 1 to {report.num_tied}" if report.num_tied > 2 else "Plans 1 and 2"
    why = f"errors of two {band.circumstances.pace} runs of one model differ by {band.tie_margin:.1%} in the median"
    return f"{tied} are tied, mofa cannot tell which is best: {why}.\n"


def offers_line(report: PlanReport) -> str:
    """What other numerics would bring to the best plan, in words; there must be some."""
    changes = ", ".join(
        f"{offer.word} step {offer.step_change:+.1%}, memory {offer.device_bytes_change / GIB:+.1f} GiB"
        for offer in report.numerics_offers
    )
    return f"Other numerics would bring the best plan's strategy, by --with: {changes}.\n"


def band_lines(band: Band) -> list[str]:
    """Where 8 in 10 steps would lie, and what says so, in words."""
    from mofa.specs.residuals import path_text

    ends = f"{format_seconds(band.low_s)} to {format_seconds(band.high_s)}"
    of = f"{band.runs} measured and published runs of {band.families} families (source and model)"
    few = ", too few for tenths: runs less like it say much of the band" if band.few else ""
    lines = [f"8 in 10 such steps would take {ends}, by {of}: {path_text(band.group)}{few}."]
    if band.unmeasured:
        never = "; ".join(band.unmeasured)
        lines = [f"Never measured: {never}. The band is all that {of} were off by: {ends} a step."]
    if band.hosts_s is not None and band.circumstances.pace == "host-bound":
        fast, slow = map(format_seconds, band.hosts_s)
        of_hosts = f"It covers hosts that are not known: {fast} on a fast one, {slow} on a slow one"
        lines.append(f"{of_hosts}; --host-issue says yours.")
    return lines


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
    say(console, f"Layers per {what}: {equal_runs_text(layers)}.\n")


def _print_layouts(console: Console, plans: Sequence[Plan]) -> None:
    """The layouts to launch with, whose each is, and what searches found."""
    if lines := layout_lines(plans):
        for line in lines:
            say(console, line)
        say(console, "")


def _has_experts(job: WorkloadSummary) -> bool:
    return job.num_active_params != job.num_params


def _seconds(value_s: float) -> str:
    return format_seconds(value_s) if value_s else ""


def _share(part: float, total: float) -> str:
    return f"{part / total:.1%}" if part else ""
