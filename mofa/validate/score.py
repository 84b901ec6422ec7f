"""Predicted against measured, run by run and group by group: signed errors, verdicts, what the predictions rest on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final, Literal

from pydantic import Field

from mofa.calibrate.cases import Split
from mofa.measure.records import Split as HalfName
from mofa.plan.result import Plan
from mofa.plan.step_band import Band
from mofa.replay.garbage_collection import collected_at_the_end
from mofa.schedules import default_schedule
from mofa.search.entry_points import estimate, step_s
from mofa.search.to_plan.step_band import num_nodes
from mofa.specs.base import PROVENANCES, Library, Provenance, Spec
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import StrategySpec
from mofa.specs.workload import WorkloadSpec
from mofa.validate.attribute import Attribution
from mofa.validate.coverage import Coverage
from mofa.validate.reference import LeftOut, Reference, Switch
from mofa.validate.spread import RunProcesses

SCHEMA_VERSION: Final = "1.5"
WEAK: tuple[Provenance, ...] = ("assumed", "extrapolated")
"""What a prediction had better not rest on."""
MAX_PLAYED = 100_000
"""Forward and backward passes of all stages in one step up to which a run is played out. A rule on its configuration:
beyond it a step takes some seconds to play, and closed forms say its time and memory instead. [-]"""
ALL_RANKS = 4
"""Pipeline ranks up to which all are played; of deeper pipelines, and where no memory was measured, the fullest, unless
every rank was. [-]"""


TRACED = "-traced"
"""What the names of profiled runs end in."""


class Compared(Spec):
    """One quantity, measured and predicted. [s] or [B]"""

    measured: float = Field(gt=0)
    predicted: float = Field(gt=0)
    error: float = Field(description="predicted / measured - 1. [-]")


class RepeatScore(Spec):
    """One measurement of a configuration that was measured several times, predicted on its host and with its tokens."""

    id: str
    host_op_s: float | None = Field(
        default=None, description="Issue of one small op on its host; null: the profile's. [s]"
    )
    step_time: Compared | None = Field(default=None, description="Time of one step; null where it says nothing. [s]")
    notes: tuple[str, ...] = ()


class RunScore(Spec):
    """One configuration, predicted."""

    id: str
    group: str
    model: str
    gpu: str
    num_gpus: int
    framework: str
    strategy: str
    step_time: Compared | None = Field(
        default=None, description="Time of one step; of repeats the median, and what is off by their median error. [s]"
    )
    peak_allocated: Compared | None = Field(default=None, description="Peak of the live tensors, fullest rank. [B]")
    peak_reserved: Compared | None = Field(default=None, description="Peak of the allocator's segments. [B]")
    peak_device: Compared | None = Field(default=None, description="Reserved, context and communicators. [B]")
    skewed: bool = Field(default=False, description="Whether tokens fall unevenly on experts.")
    ranks_allocated_errors: tuple[float, ...] = Field(
        default=(), description="Error of the peak allocated memory of every rank, by rank. [-]"
    )
    predicted_step_s: float = Field(gt=0)
    predicted_device_bytes: float = Field(gt=0)
    fits: bool = Field(description="Whether the prediction says that it fits.")
    out_of_memory: bool = Field(description="Whether the run went out of memory.")
    denied_by: str | None = Field(
        default=None,
        description="Run of the same source by whose reading it cannot have gone out of memory by itself: no verdict.",
    )
    provenance: dict[Provenance, float] = Field(description="Shares of the predicted step. [-]")
    weak_fraction: float = Field(description="Share that rests on assumed or extrapolated numbers. [-]")
    exposed: dict[str, float] = Field(description="Where the predicted step goes. [s]")
    played_out: bool = Field(description="Whether steps were played out, or closed forms were taken for a long one.")
    source: str
    notes: tuple[str, ...] = ()
    host_op_s: float | None = Field(
        default=None, description="Issue of one small op on the run's host; null: the profile's. [s]"
    )
    repeats: tuple[RepeatScore, ...] = Field(default=(), description="Every measurement, where there are several.")
    split: HalfName = Field(default="judging", description="Whether bands of steps may be learned from it.")
    num_nodes: int = Field(default=1, ge=1, description="Nodes that it ran on. [-]")
    band: Band | None = Field(default=None, description="The band of the step as predicted.")
    switches: tuple[Switch, ...] = Field(
        default=(), description="Switches that nothing was learned from on Transformer Engine."
    )
    gemm: str = Field(default="bf16", description="Precision of its products, as a workload writes it.")
    has_experts: bool = Field(default=False, description="Whether its model has experts.")
    library: Library | None = Field(default=None, description="The library of layers that its framework runs.")

    @property
    def false_fit(self) -> bool:
        """Went out of memory, which nothing denies, and was said to fit."""
        return self.fits and self.out_of_memory and self.denied_by is None

    @property
    def false_miss(self) -> bool:
        """Ran and was said not to fit."""
        return not self.fits and not self.out_of_memory

    @property
    def source_name(self) -> str:
        """Its source: where published, whose table; else ``measured``."""
        return self.group.removesuffix("-default-recompute") if self.group.startswith("published-") else "measured"

    @property
    def family(self) -> str:
        """Runs that hang together, of one source and model."""
        return f"{self.source_name} {self.model}"

    @property
    def framework_name(self) -> str:
        """The framework without its options."""
        return self.framework.split()[0]

    @property
    def is_traced(self) -> bool:
        """Whether a profiler ran beside it, which takes time and memory."""
        return self.id.endswith(TRACED)


class Errors(Spec):
    """Errors of one quantity over the runs of a group; null where no run says anything of it."""

    runs: int = Field(ge=0, description="Runs that say something of it. [-]")
    mean_abs_error: float | None = Field(default=None, description="Mean of the absolute errors. [-]")
    median_abs_error: float | None = Field(default=None, description="Their median. [-]")
    worst_abs_error: float | None = Field(default=None, description="The largest. [-]")
    worst_run: str | None = Field(default=None, description="Whose it is.")
    bias: float | None = Field(default=None, description="Mean of the signed errors. [-]")
    models: int | None = Field(default=None, description="Sources and models, where runs are averaged within first.")
    mean_abs_error_by_model: float | None = Field(
        default=None, description="Mean over sources and models of the mean within each. [-]"
    )


class GroupScore(Spec):
    """All runs of one group."""

    runs: int
    step_time: Errors
    peak_allocated: Errors
    peak_allocated_ranks: Errors = Field(description="Of every rank; the runs' means over ranks are averaged.")
    peak_reserved: Errors
    peak_device: Errors
    out_of_memory: int = Field(description="Runs that went out of memory, less those of which that is denied. [-]")
    denied: int = Field(description="Runs of which another one's reading denies that they went out of memory. [-]")
    false_fits: int = Field(description="Those of them that were said to fit. [-]")
    false_misses: int = Field(description="Runs that ran and were said not to fit. [-]")
    weak_fraction: float = Field(description="Mean share of the steps on assumed or extrapolated numbers. [-]")
    provenance: dict[Provenance, float] = Field(description="Mean shares of the predicted steps. [-]")


class NotScored(Spec):
    """A run that was not predicted."""

    id: str
    group: str
    reason: str
    gpu: str | None = Field(default=None, description="As its source names it; null of measured runs.")


class LayerComparison(Spec):
    """A MoE layer in token chunks, measured alone and predicted with the bundled profile."""

    shape: dict[str, int | str] = Field(description="Sizes by their names in the measurements.")
    folder: str = Field(description="Folder of measurements.")
    split: Split = Field(default="heldout", description="Its set of shapes; a second one is called fresh.")
    step_time: Compared = Field(description="Forward and backward. [s]")
    peak_allocated: Compared | None = Field(default=None, description="Of the fullest rank. [B]")
    peak_reserved: Compared | None = Field(default=None, description="Of the allocator's segments. [B]")


class ValidationReport(Spec):
    """What ``mofa validate --json`` prints."""

    schema_version: Literal["1.5"] = SCHEMA_VERSION
    groups: dict[str, GroupScore]
    false_fits: int = Field(description="Runs that went out of memory and were said to fit. [-]")
    runs: tuple[RunScore, ...]
    not_scored: tuple[NotScored, ...] = ()
    layers: tuple[LayerComparison, ...] = Field(default=(), description="MoE layers in token chunks, measured alone.")
    families: dict[str, Attribution] = Field(
        default={}, description="Profiled steps beside their predictions, per family of kernels, by run; rank 0."
    )
    bands: tuple[Coverage, ...] = Field(
        default=(), description="How often the bands of steps held what the judging halves measured, by group."
    )
    elapsed_s: float = Field(ge=0)


@dataclass(frozen=True)
class Quantity:
    """One quantity of the summary: its field and how errors and words name it."""

    field: str
    name: str


QUANTITIES = (
    Quantity("step_time", "step time"),
    Quantity("peak_allocated", "peak allocated"),
    Quantity("peak_reserved", "peak reserved"),
    Quantity("peak_device", "peak device"),
)


def compared(measured: float | None, predicted: float) -> Compared | None:
    """A prediction beside its measurement; None without one.

    Examples
    --------
    >>> round(compared(2.0, 2.1).error, 6)
    0.05
    """
    if measured is None:
        return None
    return Compared(measured=measured, predicted=predicted, error=predicted / measured - 1)


def score_run(reference: Reference) -> RunScore:
    """Predict one run with :func:`mofa.estimate` and compare.

    Raises
    ------
    SpecError
        If the run cannot be expressed.
    """
    return next(score_configuration([reference]))


def score_configuration(references: Sequence[Reference]) -> Iterator[RunScore]:
    """Predict one configuration once and compare it with every run of it."""
    first = references[0]
    workload, cluster, framework, strategy = first.resolve()
    played_out = num_passes(strategy, workload) <= MAX_PLAYED
    some = any(r.outcome.oom or r.outcome.peaks for r in references)
    every = (some and strategy.pp <= ALL_RANKS) or any(r.outcome.ranks_allocated_bytes for r in references)
    plan = estimate(
        workload, cluster, strategy, framework=framework, replay=played_out, explain=played_out and every,
        over_time=False,
    )  # fmt: skip
    for reference in references:
        yield _scored(reference, plan, workload, cluster, framework, played_out)


def _scored(
    reference: Reference, plan: Plan, workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec,
    played_out: bool,
) -> RunScore:  # fmt: skip
    outcome = reference.outcome
    stages = [stage for stage in plan.memory.by_stage if stage.costed_by == plan.costed_by]
    repeats = _repeats(reference, plan, played_out)
    step = median_of_repeats([r.step_time for r in repeats if r.step_time is not None])
    step = step or compared(outcome.step_s, plan.step_s)
    return RunScore(
        id=reference.id,
        group=reference.group,
        model=reference.model,
        gpu=cluster.gpu.name,
        num_gpus=cluster.num_gpus,
        framework=" ".join([framework.name, *(["compile"] if framework.compile else []), *_fp8(workload)]),
        strategy=_strategy_text(plan),
        step_time=step,
        peak_allocated=compared(outcome.allocated_bytes, max(stage.allocated_bytes for stage in stages)),
        peak_reserved=compared(outcome.reserved_bytes, max(stage.reserved_bytes for stage in stages)),
        peak_device=compared(outcome.device_bytes, plan.memory.device_bytes),
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
        num_nodes=num_nodes(cluster),
        band=plan.band,
        switches=reference.switches,
        gemm=workload.precision.gemm,
        has_experts=workload.model.moe is not None,
        library=framework.library,
    )


def median_of_repeats(repeats: Sequence[Compared]) -> Compared | None:
    """Repeats as one: the median of what was measured, and what is off from it by the median of their errors.

    Examples
    --------
    >>> one = median_of_repeats([compared(1.0, 1.1), compared(2.0, 2.0), compared(4.0, 3.0)])
    >>> one.measured, one.predicted, one.error
    (2.0, 2.0, 0.0)
    """
    if not repeats:
        return None
    measured = median(repeat.measured for repeat in repeats)
    return compared(measured, measured * (1 + median(repeat.error for repeat in repeats)))


def _repeats(reference: Reference, own: Plan, played_out: bool) -> tuple[RepeatScore, ...]:
    """Every measurement of a configuration beside a prediction on its own host, with its tokens."""
    steps = {reference.configuration: own.step_s}
    out = []
    for repeat in reference.repeats:
        step = None
        if repeat.step_s is not None:
            other = reference.for_repeat(repeat)
            if other.configuration not in steps:
                workload, cluster, framework, strategy = other.resolve()
                steps[other.configuration] = step_s(workload, cluster, strategy, framework=framework, replay=played_out)
            step = compared(repeat.step_s, steps[other.configuration])
        out.append(RepeatScore(id=repeat.id, host_op_s=repeat.host_op_s, step_time=step, notes=repeat.notes))
    return tuple(out)


def num_passes(s: StrategySpec, workload: WorkloadSpec) -> int:
    """Forward and backward passes of all stages in one step. [-]"""
    return 2 * s.pp * s.vpp * (workload.batch.global_batch // (s.dp * s.micro_batch) if s.pp > 1 else 1)


def _fp8(workload: WorkloadSpec) -> list[str]:
    return [] if workload.precision.gemm == "bf16" else [workload.precision.gemm]


def _ranks(reference: Reference, plan: Plan) -> tuple[float, ...]:
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
        return stage.ranks.allocated_bytes(rank % per_stage // s.etp % s.ep)

    return tuple(predicted(rank) / m - 1 for rank, m in enumerate(measured))


def _strategy_text(plan: Plan) -> str:
    s = plan.strategy
    degrees = [f"{name}{getattr(s, name)}" for name in ("tp", "pp", "vpp", "cp", "ep", "dp") if getattr(s, name) > 1]
    extra = [s.recompute] if s.recompute != "none" else []
    extra += [s.schedule] if s.schedule != default_schedule(s.vpp) else []
    return " ".join([*degrees, f"mbs{s.micro_batch}", *extra])


def summarise(errors: Sequence[tuple[str, str, float]]) -> Errors:
    """Errors of one quantity, each with its run and its source and model.

    Examples
    --------
    >>> e = summarise([("a", "x", 0.1), ("b", "x", -0.3), ("c", "y", 0.0)])
    >>> round(e.mean_abs_error, 4), e.worst_run, round(e.bias, 4), round(e.mean_abs_error_by_model, 4)
    (0.1333, 'b', -0.0667, 0.1)
    """
    if not errors:
        return Errors(runs=0)
    sizes = [abs(error) for _, _, error in errors]
    cells: dict[str, list[float]] = {}
    for _, cell, error in errors:
        cells.setdefault(cell, []).append(abs(error))
    return Errors(
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
    """The summary of runs."""

    def errors(field: str) -> Errors:
        pairs = [(run, getattr(run, field)) for run in runs]
        return summarise([(run.id, _cell(run), value.error) for run, value in pairs if value is not None])

    with_ranks = [run for run in runs if run.ranks_allocated_errors]
    ranks = summarise(
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


def score_references(
    references: Sequence[Reference],
    left_out: Sequence[LeftOut] = (),
    *,
    spread: RunProcesses | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[RunScore], list[NotScored]]:
    """Predict every run, here or ``spread``; ``progress`` is told how many are done and to do.

    Runs of one configuration are predicted once, the longest first, so that no process is left with one at the end.
    """
    alike: dict[str, list[int]] = {}
    for i, reference in enumerate(references):
        alike.setdefault(reference.configuration, []).append(i)
    groups = sorted(alike.values(), key=lambda members: _expected(references[members[0]]), reverse=True)
    runs: dict[int, RunScore] = {}
    predicted = (spread or RunProcesses(1)).map(_all_alike, [[references[i] for i in g] for g in groups])
    for members, predictions in zip(groups, predicted, strict=True):
        runs |= dict(zip(members, predictions, strict=True))
        if progress is not None:
            progress(len(runs), len(references))
    ordered = [runs[i] for i in range(len(references))]
    return ordered, [NotScored(id=x.id, group=x.group, reason=x.reason, gpu=x.gpu) for x in left_out]


def _expected(reference: Reference) -> tuple[int, ...]:
    """What a prediction's time grows with: passes of blocks, what alike pipelines share beside each other. [-]"""
    workload, _, _, s = reference.resolve()
    num_micro_batches = workload.batch.global_batch // (s.dp * s.micro_batch)
    passes = num_micro_batches * (s.pp * s.vpp if s.pp > 1 else 1)
    return passes * (1 + workload.model.num_layers // 16), s.pp, s.vpp, num_micro_batches


def _all_alike(references: Sequence[Reference]) -> list[RunScore]:
    with collected_at_the_end():
        return list(score_configuration(references))
