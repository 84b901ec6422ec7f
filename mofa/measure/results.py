"""What the ranks of a run left, made into its record."""

from __future__ import annotations

import math
import statistics
from datetime import UTC, datetime
from typing import Any

from mofa.measure.expand import ExpandedRun
from mofa.measure.launch import TaskOutcome
from mofa.measure.records import MeasuredResult, RankMeasurement, RunEnvironment, RunRecord, Split

PACES = (
    "host_issues_s", "host_backs_s", "cpu_ops_at_issues_s", "layer_issues_s", "layer_backs_s", "layer_ops_s",
    "layer_back_ops_s", "cpu_ops_s", "step_ops_s", "step_back_ops_s",
)  # fmt: skip
"""What a rank's host took for small ops, as the rank and its record name it."""


def interquartile_range_s(times: list[float]) -> float:
    """From the first to the third quartile of step times; 0 of fewer than two. [s]"""
    if len(times) < 2:
        return 0.0
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return third - first


def _rank_memory(rank: dict[str, Any]) -> RankMeasurement:
    memory, whole_run, ready = rank["memory"], rank.get("memory_whole", {}), rank.get("memory_ready", {})
    return RankMeasurement(
        rank=rank["rank"],
        peak_allocated_bytes=memory["peak_allocated_bytes"],
        peak_reserved_bytes=memory["peak_reserved_bytes"],
        whole_peak_allocated_bytes=whole_run.get("peak_allocated_bytes"),
        whole_peak_reserved_bytes=whole_run.get("peak_reserved_bytes"),
        ready_allocated_bytes=ready.get("allocated_bytes"),
        between_steps_bytes=memory["allocated_bytes"] if rank["outcome"] == "ok" else None,
        device_bytes=memory["device_bytes"],
        outside_allocator_bytes=memory["device_bytes"] - memory["reserved_bytes"],
        device_total_bytes=memory["device_total_bytes"],
        alloc_retries=memory["alloc_retries"],
        device_busy_s=rank.get("device_busy_s"),
        device_computing_s=rank.get("device_computing_s"),
        **{name: [round(s, 9) for s in rank.get(name, [])] for name in PACES},
    )


def merge_rank_results(ranks: list[dict[str, Any]]) -> MeasuredResult:
    """What the ranks of a run found, as one result; the slowest rank's times are the run's."""
    with_memory = [r for r in ranks if "memory" in r]
    facts = dict(ranks[0].get("facts", {}))
    facts["layers"] = [r.get("facts", {}).get("layers") for r in ranks]
    short = [r for r in ranks if r["outcome"] == "oom"]
    if short:
        return MeasuredResult(
            outcome="oom",
            ranks=[_rank_memory(r) for r in with_memory],
            facts=facts,
            oom_phase=short[0]["phase_of_end"],
            oom_tried_bytes=short[0].get("tried_bytes"),
            error=short[0]["error"],
        )
    slowest = max(ranks, key=lambda r: statistics.median(r["step_times_s"]))
    times = [round(t, 7) for t in slowest["step_times_s"]]
    counts = [r["tokens_per_expert"] for r in ranks if "tokens_per_expert" in r]
    return MeasuredResult(
        outcome="ok",
        step_time_s=statistics.median(times),
        step_time_spread_s=round(interquartile_range_s(times), 7),
        step_times_s=times,
        warmup_times_s=[round(t, 6) for t in slowest["warmup_times_s"]],
        ranks=[_rank_memory(r) for r in ranks],
        tokens_per_expert=counts or None,
        grad_norms=[float(f"{norm:.4g}") for norm in ranks[0].get("grad_norms", []) if math.isfinite(norm)],
        facts=facts,
    )


def record_of_result(run: ExpandedRun, outcome: TaskOutcome, split: Split) -> RunRecord:
    """The record of a run that gave a result."""
    of_rank = dict(outcome.ranks[0]["environment"])
    issues = [rank.get("host_issues_s") or [] for rank in outcome.ranks]
    if all(issues):
        of_rank["host_issues_s"] = [round(s, 9) for s in max(issues, key=statistics.fmean)]
        of_rank["host_issue_s"] = round(statistics.fmean(of_rank["host_issues_s"]), 9)
    environment = RunEnvironment(num_gpus=len(outcome.gpus), side_by_side=outcome.side_by_side, **of_rank)
    gpus = f"{environment.num_gpus} {environment.gpu}"
    source = (
        f"measured on {gpus}, PyTorch {environment.torch}, {run.framework.name} {environment.framework}, "
        f"{datetime.now(tz=UTC):%Y-%m-%d}"
    )
    return RunRecord(
        run=run.run_with_full_specs(),
        measured=merge_rank_results(outcome.ranks),
        environment=environment,
        source=source,
        split=split,
    )
