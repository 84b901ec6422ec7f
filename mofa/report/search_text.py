"""What stands around plans: the job, what a search looked at, and what its numbers rest on, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mofa.report.phrases import component_words, quantity_text, strategy_text
from mofa.report.tables import print_paragraph, print_table
from mofa.specs.framework_traits import TRAITS
from mofa.units import GIB, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from mofa.plan.result import Plan, PlanReport
    from mofa.plan.step_band import Band
    from mofa.plan.summaries import ClusterSummary, FrameworkSummary, WorkloadSummary
    from mofa.specs.strategy import StrategySpec


def print_planned_job(
    console: Console, job: WorkloadSummary, cluster: ClusterSummary, framework: FrameworkSummary
) -> None:
    """Print the model, the cluster and the framework that were planned for."""
    size = f"{format_count(job.num_params)} parameters"
    if job.num_active_params != job.num_params:
        size += f" ({format_count(job.num_active_params)} active)"
    if job.num_mtp_params:
        size += f" + {format_count(job.num_mtp_params)} multi-token prediction"
    tokens = f", {format_count(job.tokens)} tokens" if job.tokens else ""
    numerics = f"{job.gemm_format} matrix products, {job.moments_format} moments, {job.routing} routing"
    batch = f"sequence {job.seq_len:,}, global batch {job.global_batch:,}{tokens}"
    print_paragraph(console, f"{job.name}: {size}; {batch}; {numerics}", "bold")
    nodes = f"{cluster.gpus_per_node} a node"
    if cluster.gpus_per_domain > cluster.gpus_per_node:
        nodes += f", fast domain of {cluster.gpus_per_domain}"
    capacity = f"capacity {format_bytes(cluster.capacity_bytes)} ({cluster.capacity_provenance})"
    print_paragraph(console, f"{cluster.name}: {cluster.num_gpus:,} x {cluster.gpu}, {nodes}, {capacity}")
    how = "compiled" if framework.compile else "not compiled"
    replicas = f" in {framework.dp_replicate} replicas" if framework.dp_replicate > 1 else ""
    shards = f"{framework.data_parallel}{replicas}"
    options = f"{how}, {shards}, {framework.allocator} allocator, {framework.dispatcher} dispatcher"
    print_paragraph(
        console, f"framework: {framework.name} {framework.version}, {options} (facts {framework.provenance})\n"
    )


REASONS_IN_WORDS = {"slower": "slower: cannot be among the best"}
"""Reasons for rejection whose names do not say enough."""


def print_search_counts(console: Console, report: PlanReport) -> None:
    """Print how many strategies were looked at, and why others were rejected with the nearest miss of each reason."""
    fit = f"in full the {report.feasible:,} that fit" if report.feasible else "none fits"
    costed = f"costed {report.searched:,}, {fit}"
    counts = f"Looked at {report.space:,} strategies, {costed}"
    print_paragraph(console, f"{counts}; {format_seconds(report.elapsed_s)}.\n")
    rows = []
    for reason, count in report.rejected.items():
        miss = report.nearest_miss.get(reason)
        near = (
            ("", "")
            if miss is None
            else (
                quantity_text(miss.short_by, miss.unit),
                strategy_text(miss.strategy, moe=has_experts(report.workload)),
            )
        )
        rows.append([REASONS_IN_WORDS.get(reason, reason), f"{count:,}", *near])
    if rows:
        columns = [("reason", "left"), ("rejected", "right"), ("closest is short by", "right"), ("closest", "left")]
        print_table(console, "Why the others were rejected", columns, rows, under="closest")


def print_min_gpus(console: Console, report: PlanReport) -> None:
    """Print the smallest number of GPUs that would do, where it is known."""
    if report.min_gpus is not None:
        note = f" ({report.min_gpus_note})" if report.min_gpus_note else ""
        print_paragraph(console, f"The smallest number of GPUs that would do: {report.min_gpus:,}{note}.\n")
    elif report.min_gpus_note:
        print_paragraph(console, f"{report.min_gpus_note}\n")


def print_taken_defaults(console: Console, defaults: Mapping[str, str]) -> None:
    """Print what was not given and was taken by default."""
    if defaults:
        print_table(console, "Defaults", [("", "left"), ("", "left")], [[k, v] for k, v in defaults.items() if v])


def print_export_hint(console: Console, command: str, framework: str) -> None:
    """Print how to make a job of the plan, where a framework of today runs it."""
    if targets := TRAITS[framework].exported_to:
        to = " (or ".join(targets) + ")" * (len(targets) - 1)
        print_paragraph(
            console, f"To run it: mofa {command} ... --json-file plan.json, then mofa export plan.json --to {to}.\n"
        )


def print_provenance(console: Console, plan: Plan) -> None:
    """Print what the prediction rests on."""
    halved = "causal attention halved" if plan.flops_convention == "causal" else "causal attention counted in full"
    if plan.band is not None:
        for line in step_band_lines(plan.band):
            print_paragraph(console, line)
    print_paragraph(console, f"The step rests on numbers that are: {shares_text(plan.provenance)}.")
    if plan.library_fraction is not None:
        print_paragraph(console, library_share_line(plan.library_fraction))
    costed = f"Costed by {plan.costed_by.replace('_', ' ')}"
    print_paragraph(console, f"{costed}; MFU {plan.mfu:.1%} and HFU {plan.hfu:.1%} with {halved}.")
    for note in plan.notes:
        print_paragraph(console, f"- {note}", indent=2)
    console.print()


def shares_text(fractions: Mapping[Any, float]) -> str:
    """Fractions as a phrase, largest first.

    Examples
    --------
    >>> shares_text({"datasheet": 0.25, "assumed": 0.75, "measured": 0.0})
    'assumed 75.0 %, datasheet 25.0 %'
    """
    ordered = sorted(fractions.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {fraction * 100:.1f} %" for name, fraction in ordered if fraction > 0)


def library_share_line(shares: Mapping[str, float]) -> str:
    """What share of a step rests on what was measured under Transformer Engine, in words.

    Examples
    --------
    >>> library_share_line({"gemm": 0.5, "host_idle": 0.06})
    'Measured under Transformer Engine: 56.0 % of the step (matrix products 50.0 %, waiting for the host 6.0 %).'
    """
    if not shares:
        return "Nothing of the step rests on kernels or hosts that were measured under Transformer Engine."
    parts = ", ".join(f"{component_words(name)} {share * 100:.1f} %" for name, share in shares.items())
    return f"Measured under Transformer Engine: {sum(shares.values()) * 100:.1f} % of the step ({parts})."


def idle_gpus_lines(report: PlanReport) -> list[str]:
    """Which plans leave GPUs idle and why, in words: a line for each number of GPUs that they use; that a batch does
    not divide over the GPUs that spares leave; and which fixed values run nowhere."""
    numbers: dict[int, list[int]] = {}
    for number, plan in enumerate(report.plans, start=1):
        if plan.idle_gpus:
            numbers.setdefault(plan.idle_gpus, []).append(number)
    lines = []
    for some in numbers.values():
        named = f"Plan {some[0]}" if len(some) == 1 else f"Plans {', '.join(map(str, some[:-1]))} and {some[-1]}"
        says = report.plans[some[0] - 1].notes[0]
        lines.append(f"{named} {says if len(some) == 1 else says.replace('uses', 'use', 1)}.")
    best = next((number for number, plan in enumerate(report.plans, start=1) if plan.idle_gpus), None)
    if best is not None:
        plan, num_gpus, batch = report.plans[best - 1], report.cluster.num_gpus, report.workload.global_batch
        if line := divisible_batch_line(plan.strategy, plan.idle_gpus, num_gpus, batch, f"plan {best}"):
            lines.append(line)
    for name in ("batch", "fixed values"):
        if said := report.defaults.get(name):
            lines.append(f"{said[0].upper()}{said[1:]}.")
    return lines


def divisible_batch_line(strategy: StrategySpec, idle: int, num_gpus: int, batch: int, which: str) -> str:
    """Which batch near the job's would keep all GPUs busy with replicas of a plan; empty where none has to be.

    Parameters
    ----------
    strategy, idle, num_gpus
        Of the plan; GPUs that it leaves idle, and those with the others. [-]
    batch
        The job's. [sequences]
    which
        The plan, for the sentence.

    Returns
    -------
    str
        The sentence, or nothing.
    """
    from mofa.search.long_run.spare_nodes import indivisible_batch_note

    replica = strategy.tp * strategy.cp * strategy.pp
    replicas = num_gpus // replica
    at_a_time = replicas * strategy.micro_batch
    if num_gpus % replica:  # such replicas do not fill the GPUs, others might
        note = indivisible_batch_note(batch, num_gpus, "GPUs")
        return f"{note[0].upper()}{note[1:]}." if note else ""
    if batch % at_a_time == 0:
        return ""
    less = batch // at_a_time * at_a_time
    would = f"{less:,} or {less + at_a_time:,}" if less else f"{at_a_time:,}"
    share = "most of the GPUs" if idle * 2 > num_gpus else f"{idle:,} GPUs"
    size = f"{replica:,} GPUs each, micro_batch={strategy.micro_batch}"
    return (
        f"The batch of {batch:,} keeps {share} idle: all {num_gpus:,} hold {replicas:,} replicas of {which} "
        f"({size}) and need a multiple of {at_a_time:,} sequences; {would} would use all."
    )


def ties_line(report: PlanReport) -> str:
    """Which of the best plans the model cannot tell apart, in words; there must be some."""
    band = report.plans[0].band
    assert band is not None and band.tie_margin is not None
    tied = f"Plans 1 to {report.num_tied}" if report.num_tied > 2 else "Plans 1 and 2"
    error = f"its median error between two {band.circumstances.pace} runs of one model"
    equal = f"{tied} are equally good as far as mofa can tell; choose any"
    return f"{equal}. They differ by no more than {band.tie_margin:.1%}, {error}.\n"


def numerics_offers_line(report: PlanReport) -> str:
    """What other numerics would bring to the best plan, in words; there must be some."""

    intro = {
        "cuda_graphs": "Its device waits for the host; the same numerics in CUDA graphs, by --with",
        "early_stop": "The same numerics, with checkpoints that end once all that they must give is there, by --with",
    }
    changes: dict[str, list[str]] = {}
    for offer in report.numerics_offers:
        said = f"{offer.word} step {offer.step_change:+.1%}, memory {offer.device_bytes_change / GIB:+.1f} GiB"
        what = intro.get(offer.word, "Other numerics would bring the best plan's strategy, by --with")
        changes.setdefault(what, []).append(said)
    return "".join(f"{what}: {', '.join(said)}.\n" for what, said in changes.items())


def step_band_lines(band: Band) -> list[str]:
    """Where 8 in 10 steps would lie, and what says so, in words."""
    from mofa.specs.residuals import residual_group_text

    ends = f"{format_seconds(band.low_s)} to {format_seconds(band.high_s)}"
    runs = "1 measured or published run" if band.runs == 1 else f"{band.runs} measured and published runs"
    families = "1 family" if band.families == 1 else f"{band.families} families"
    of = f"{runs} of {families} (source and model)"
    few = ", too few for tenths: runs less like it say much of the band" if band.few else ""
    lines = [f"8 in 10 such steps would take {ends}, by {of}: {residual_group_text(band.group)}{few}."]
    if band.unmeasured:
        never = "; ".join(band.unmeasured)
        lines = [f"Never measured: {never}. The band is all that {of} were off by: {ends} a step."]
    if band.hosts_s is not None and band.circumstances.pace == "host-bound":
        fast, slow = map(format_seconds, band.hosts_s)
        of_hosts = f"It covers hosts that are not known: {fast} on a fast one, {slow} on a slow one"
        lines.append(f"{of_hosts}; --host-issue says yours.")
    return lines


def has_experts(job: WorkloadSummary) -> bool:
    """Whether the model is a mixture of experts."""
    return job.num_active_params != job.num_params
