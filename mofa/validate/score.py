"""Predicted against measured, run by run and group by group: signed errors, verdicts, what the predictions rest on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median

from mofa.plan.result import Plan
from mofa.replay.garbage_collection import collect_garbage_at_end
from mofa.schedules import default_schedule
from mofa.search.one_plan import estimate, step_s_of_strategy
from mofa.search.to_plan.step_band import num_cluster_nodes
from mofa.specs.base import PROVENANCES, Provenance
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import StrategySpec
from mofa.specs.workload import WorkloadSpec
from mofa.validate.reference import ReferenceRun, UnpredictedReferenceRun
from mofa.validate.run_processes import RunProcesses
from mofa.validate.validation_report import (
    ComparedQuantity,
    GroupScore,
    QuantityErrors,
    RepeatScore,
    RunNotScored,
    RunScore,
    compare_with_measured,
)

WEAK: tuple[Provenance, ...] = ("assumed", "extrapolated")
"""What a prediction had better not rest on."""
MAX_PLAYED = 100_000
"""Forward and backward passes of all stages in one step up to which a run is played out. A rule on its configuration:
beyond it a step takes some seconds to play, and closed forms say its time and memory instead. [-]"""
ALL_RANKS = 4
"""Pipeline ranks up to which all are played; of deeper pipelines, and where no memory was measured, the fullest, unless
every rank was. [-]"""


def score_run(reference: ReferenceRun) -> RunScore:
    """Predict one run with :func:`mofa.estimate` and compare.

    Raises
    ------
    SpecError
        If the run cannot be expressed.
    """
    return next(score_configuration([reference]))


def score_configuration(references: Sequence[ReferenceRun]) -> Iterator[RunScore]:
    """Predict one configuration once and compare it with every run of it."""
    first = references[0]
    workload, cluster, framework, strategy = first.resolved_specs()
    played_out = num_passes_per_step(strategy, workload) <= MAX_PLAYED
    some = any(r.outcome.oom or r.outcome.known_peaks_bytes for r in references)
    every = (some and strategy.pp <= ALL_RANKS) or any(r.outcome.ranks_allocated_bytes for r in references)
    plan = estimate(
        workload, cluster, strategy, framework=framework, replay=played_out, explain=played_out and every,
        over_time=False,
    )  # fmt: skip
    for reference in references:
        yield _scored(reference, plan, workload, cluster, framework, played_out)


def _scored(
    reference: ReferenceRun, plan: Plan, workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec,
    played_out: bool,
) -> RunScore:  # fmt: skip
    outcome = reference.outcome
    stages = [stage for stage in plan.memory.by_stage if stage.costed_by == plan.costed_by]
    repeats = _repeats(reference, plan, played_out)
    step = compared_median_of_repeats([r.step_time for r in repeats if r.step_time is not None])
    step = step or compare_with_measured(outcome.step_s, plan.step_s)
    return RunScore(
        id=reference.id,
        group=reference.group,
        model=reference.model,
        gpu=cluster.gpu.name,
        num_gpus=cluster.num_gpus,
        framework=" ".join([framework.name, *(["compile"] if framework.compile else []), *_fp8(workload)]),
        strategy=_strategy_text(plan),
        step_time=step,
        peak_allocated=compare_with_measured(outcome.allocated_bytes, max(stage.allocated_bytes for stage in stages)),
        peak_reserved=compare_with_measured(outcome.reserved_bytes, max(stage.reserved_bytes for stage in stages)),
        peak_device=compare_with_measured(outcome.device_bytes, plan.memory.device_bytes),
        ranks_allocated_errors=_ranks(reference, plan),
        predicted_step_s=step.predicted if step else plan.step_s,
        predicted_device_bytes=plan.memory.device_bytes,
        fits=plan.memory.fits,
        out_of_memory=outcome.oom,
        denied_by=outcome.oom_denied_by,
        provenance=plan.provenance,
        weak_fraction=sum(plan.provenance.get(p, 0.0) for p in WEAK),
        exposed={str(name): value for name, value in plan.time.exposed.items() if value > 0},
        played_out=played_out,
        source=reference.source,
        notes=reference.notes,
        host_op_s=reference.host_op_s,
        repeats=repeats,
        skewed=reference.skewed,
        split=reference.split,
        num_nodes=num_cluster_nodes(cluster),
        band=plan.band,
        switches=reference.switches,
        gemm=workload.precision.gemm,
        has_experts=workload.model.moe is not None,
        library=framework.library,
    )


def compared_median_of_repeats(repeats: Sequence[ComparedQuantity]) -> ComparedQuantity | None:
    """Repeats as one: the median of what was measured, and what is off from it by the median of their errors.

    Examples
    --------
    >>> pairs = (1.0, 1.1), (2.0, 2.0), (4.0, 3.0)
    >>> one = compared_median_of_repeats([compare_with_measured(*pair) for pair in pairs])
    >>> one.measured, one.predicted, one.error
    (2.0, 2.0, 0.0)
    """
    if not repeats:
        return None
    measured = median(repeat.measured for repeat in repeats)
    return compare_with_measured(measured, measured * (1 + median(repeat.error for repeat in repeats)))


def _repeats(reference: ReferenceRun, own: Plan, played_out: bool) -> tuple[RepeatScore, ...]:
    """Every measurement of a configuration beside a prediction on its own host, with its tokens."""
    steps = {reference.configuration_hash: own.step_s}
    out = []
    for repeat in reference.repeats:
        step = None
        if repeat.step_s is not None:
            other = reference.run_of_repeat(repeat)
            if other.configuration_hash not in steps:
                workload, cluster, framework, strategy = other.resolved_specs()
                steps[other.configuration_hash] = step_s_of_strategy(
                    workload, cluster, strategy, framework=framework, replay=played_out
                )
            step = compare_with_measured(repeat.step_s, steps[other.configuration_hash])
        out.append(RepeatScore(id=repeat.id, host_op_s=repeat.host_op_s, step_time=step, notes=repeat.notes))
    return tuple(out)


def num_passes_per_step(strategy: StrategySpec, workload: WorkloadSpec) -> int:
    """Forward and backward passes of all stages in one step. [-]"""
    return (
        2
        * strategy.pp
        * strategy.vpp
        * (workload.batch.global_batch // (strategy.dp * strategy.micro_batch) if strategy.pp > 1 else 1)
    )


def _fp8(workload: WorkloadSpec) -> list[str]:
    return [] if workload.precision.gemm == "bf16" else [workload.precision.gemm]


def _ranks(reference: ReferenceRun, plan: Plan) -> tuple[float, ...]:
    """Errors of all ranks. Both frameworks number ranks with the pipeline outermost: a stage is a run of ranks.

    Within it those of an expert-parallel group follow on each other, over what splits an expert. Where tokens are
    uneven and their counts known, each rank is predicted with its own.
    """
    measured = reference.outcome.ranks_allocated_bytes
    if not measured:
        return ()
    per_stage = len(measured) // plan.strategy.pp
    s = plan.strategy

    def predicted(rank: int) -> float:
        stage = plan.memory.by_stage[rank // per_stage]
        if stage.ranks is None or not stage.ranks.tokens_over_mean:
            return stage.allocated_bytes
        return stage.ranks.allocated_bytes_of_ep_rank(rank % per_stage // s.etp % s.ep)

    return tuple(predicted(rank) / m - 1 for rank, m in enumerate(measured))


def _strategy_text(plan: Plan) -> str:
    s = plan.strategy
    degrees = [f"{name}{getattr(s, name)}" for name in ("tp", "pp", "vpp", "cp", "ep", "dp") if getattr(s, name) > 1]
    extra = [s.recompute] if s.recompute != "none" else []
    extra += [s.schedule] if s.schedule != default_schedule(s.vpp) else []
    return " ".join([*degrees, f"mbs{s.micro_batch}", *extra])


def summarise_errors(errors: Sequence[tuple[str, str, float]]) -> QuantityErrors:
    """Errors of one quantity, each with its run and its source and model.

    Examples
    --------
    >>> e = summarise_errors([("a", "x", 0.1), ("b", "x", -0.3), ("c", "y", 0.0)])
    >>> round(e.mean_abs_error, 4), e.worst_run, round(e.bias, 4), round(e.mean_abs_error_by_model, 4)
    (0.1333, 'b', -0.0667, 0.1)
    """
    if not errors:
        return QuantityErrors(runs=0)
    sizes = [abs(error) for _, _, error in errors]
    cells: dict[str, list[float]] = {}
    for _, cell, error in errors:
        cells.setdefault(cell, []).append(abs(error))
    return QuantityErrors(
        runs=len(errors),
        mean_abs_error=fmean(sizes),
        median_abs_error=median(sizes),
        worst_abs_error=max(sizes),
        worst_run=max(errors, key=lambda item: abs(item[2]))[0],
        bias=fmean(error for _, _, error in errors),
        models=len(cells),
        mean_abs_error_by_model=fmean(fmean(values) for values in cells.values()),
    )


def group_score(runs: Sequence[RunScore]) -> GroupScore:
    """The score of a group: a summary of its runs' errors."""

    def errors(field: str) -> QuantityErrors:
        pairs = [(run, getattr(run, field)) for run in runs]
        return summarise_errors([(run.id, _cell(run), value.error) for run, value in pairs if value is not None])

    with_ranks = [run for run in runs if run.ranks_allocated_errors]
    ranks = summarise_errors(
        [(r.id, _cell(r), fmean(abs(e) for e in r.ranks_allocated_errors)) for r in with_ranks]
    ).model_copy(update={"bias": fmean(fmean(r.ranks_allocated_errors) for r in with_ranks) if with_ranks else None})
    if with_ranks:
        worst = max(with_ranks, key=lambda r: max(abs(e) for e in r.ranks_allocated_errors))
        size = max(abs(e) for e in worst.ranks_allocated_errors)
        ranks = ranks.model_copy(update={"worst_abs_error": size, "worst_run": worst.id})
    return GroupScore(
        runs=len(runs),
        step_time=errors("step_time"),
        peak_allocated=errors("peak_allocated"),
        peak_allocated_ranks=ranks,
        peak_reserved=errors("peak_reserved"),
        peak_device=errors("peak_device"),
        out_of_memory=sum(run.out_of_memory and run.denied_by is None for run in runs),
        denied=sum(run.denied_by is not None for run in runs),
        false_fits=sum(run.false_fit for run in runs),
        false_misses=sum(run.false_miss for run in runs),
        weak_fraction=fmean(run.weak_fraction for run in runs),
        provenance={p: fmean(run.provenance.get(p, 0.0) for run in runs) for p in PROVENANCES},
    )


def _cell(run: RunScore) -> str:
    return f"{run.group} {run.model}"


def score_reference_runs(
    references: Sequence[ReferenceRun],
    left_out: Sequence[UnpredictedReferenceRun] = (),
    *,
    spread: RunProcesses | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[RunScore], list[RunNotScored]]:
    """Predict every run, here or ``spread``; ``progress`` is told how many are done and to do.

    Runs of one configuration are predicted once, the longest first, so that no process is left with one at the end.
    """
    alike: dict[str, list[int]] = {}
    for i, reference in enumerate(references):
        alike.setdefault(reference.configuration_hash, []).append(i)
    groups = sorted(alike.values(), key=lambda members: _expected(references[members[0]]), reverse=True)
    runs: dict[int, RunScore] = {}
    predicted = (spread or RunProcesses(1)).map(_all_alike, [[references[i] for i in g] for g in groups])
    for members, predictions in zip(groups, predicted, strict=True):
        runs |= dict(zip(members, predictions, strict=True))
        if progress is not None:
            progress(len(runs), len(references))
    ordered = [runs[i] for i in range(len(references))]
    return ordered, [RunNotScored(id=x.id, group=x.group, reason=x.reason, gpu=x.gpu) for x in left_out]


def _expected(reference: ReferenceRun) -> tuple[int, ...]:
    """What a prediction's time grows with: passes of blocks, what alike pipelines share beside each other. [-]"""
    workload, _, _, s = reference.resolved_specs()
    num_micro_batches = workload.batch.global_batch // (s.dp * s.micro_batch)
    passes = num_micro_batches * (s.pp * s.vpp if s.pp > 1 else 1)
    return passes * (1 + workload.model.num_layers // 16), s.pp, s.vpp, num_micro_batches


def _all_alike(references: Sequence[ReferenceRun]) -> list[RunScore]:
    with collect_garbage_at_end():
        return list(score_configuration(references))
