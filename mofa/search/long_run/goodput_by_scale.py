"""Goodput against scale: one plan replicated, or a new plan at each scale, under several checkpoint modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mofa.errors import MofaError, NothingFits, SpecError, StrategyError
from mofa.faults.ledger import PARTS, Ledger
from mofa.plan.goodput_by_scale import GoodputReport, ScalePoint, VariantPoint
from mofa.plan.result import Plan
from mofa.plan.summaries import FrameworkSummary, WorkloadSummary
from mofa.search.entry_points import find_plans
from mofa.search.goodput import LongRunObjective
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.long_run.fewer_nodes import (
    FewerNodesOfPlan,
    FewerNodesReplanned,
    PlanWithSpares,
    long_runs_on_computing_nodes,
)
from mofa.search.long_run.sensitivity import ettr_sensitivities
from mofa.search.one_plan import plan_in_closed_form
from mofa.search.search_result import Search
from mofa.search.space import FEWER_GPUS
from mofa.specs.faults import CheckpointMode, FaultSpec
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import StrategySpec
from mofa.specs.workload import WorkloadSpec

VARIANTS: tuple[tuple[str, CheckpointMode, bool], ...] = (
    ("blocking", "blocking", False), ("async", "async", False), ("async, spares", "async", True),
    ("peer replicas", "peer", False), ("peer replicas, spares", "peer", True),
)  # fmt: skip
"""Name, checkpoint mode, and whether there are spare nodes: as many as the profile says, or as pays most."""
GOES_ON = "replicas go on"
"""Name of the variant of ``recovery: replica``, as the profile keeps checkpoints."""


def fault_tolerance_variants(faults: FaultSpec) -> list[tuple[str, FaultSpec, bool]]:
    """Variants for a profile: the usual ones, the profile's own checkpoint mode if it is another, and its recovery.

    Examples
    --------
    >>> from mofa.specs.load import load_faults
    >>> profile = load_faults("llama3", {"checkpoint.mode": "two-level"})
    >>> [name for name, _, _ in fault_tolerance_variants(profile)][-2:]
    ['peer replicas, spares', 'two-level']
    """
    own, plain = faults.checkpoint.mode, faults.model_copy(update={"recovery": "checkpoint"})
    more: list[tuple[str, CheckpointMode, bool]] = []
    if own not in [mode for _, mode, _ in VARIANTS]:
        more = [(own, own, False)]
    out = []
    for name, mode, stands_by in (*VARIANTS, *more):
        checkpoint = faults.checkpoint.model_copy(update={"mode": mode})
        out.append((name, plain.model_copy(update={"checkpoint": checkpoint}), stands_by))
    if faults.recovery == "replica":
        out += [(GOES_ON, faults, False), (f"{GOES_ON}, spares", faults, True)]
    return out


Progress = Callable[[int, int], None]


def goodput_by_scale(
    workload: WorkloadSpec, cluster: ClusterSpec, faults: FaultSpec, numbers: Sequence[int], framework: FrameworkSpec,
    *, strategy: object | None = None, weak: bool = False, replan: bool = False, progress: Progress | None = None,
) -> GoodputReport:  # fmt: skip
    """ETTR and effective throughput of a job at several numbers of GPUs.

    Parameters
    ----------
    cluster
        The nodes; the number of GPUs is replaced by ``numbers``.
    faults
        Needs reliability, restarts and storage. Sensitivities use its checkpoint mode and spares; the variants have
        their own.
    numbers
        GPUs of the cluster, spares included, rising. [-]
    strategy
        The plan at the first number that it fits. Where absent: the best at the first that any plan fits, among those
        that replicate to the most GPUs.
    weak
        Whether the global batch grows with the GPUs; else it is fixed.
    replan
        Whether to search a plan at every number; else the first plan's dp is multiplied.

    Raises
    ------
    SpecError
        If the profile lacks what is needed.
    StrategyError
        If the framework runs the strategy at no number.
    NothingFits
        If no number has a plan.
    """
    lacks = LongRunObjective(workload, cluster, framework, faults).unknown_figures()
    if "ettr" in lacks:
        raise SpecError(f"{faults.name}: {lacks['ettr']}")
    points, stands = [], []
    base: tuple[StrategySpec, int] | None = None
    jobs = [_job_at(workload, cluster, number, numbers[0], weak) for number in numbers]
    why: MofaError | None = None
    for i, (job, machines) in enumerate(jobs):
        stand: FewerNodesOfPlan | FewerNodesReplanned | None
        if replan:
            stand, why = _planned_anew(job, machines, framework)
        else:
            if base is None and strategy is None:
                plan, why = _replicable(jobs[i:], framework)
            else:
                plan, why = _plan(job, machines, framework, base, strategy)
            if plan is not None and base is None:
                base = plan.strategy, machines.num_gpus
            stand = None if plan is None else FewerNodesOfPlan(PlanWithSpares(plan, machines), job, framework)
        points.append(_point(job, machines, framework, faults, stand, None if why is None else str(why)))
        if stand is not None:
            stands.append((stand, job, machines))
        if progress is not None:
            progress(i + 1, len(numbers))
    if not stands:
        if isinstance(why, StrategyError):  # it says what to do
            raise why
        raise NothingFits(f"{workload.name}: {why}; give more GPUs{'' if replan else ', or --replan'}")
    stand, job, machines = stands[-1]
    runs = LongRunObjective(job, machines, framework, faults)
    left = stand.plan_on_all_nodes(runs)
    if faults.spares:
        fewer = stand.best_plan_with_spares(runs, faults.spares, _most_spares(runs))
        if fewer is None:
            raise SpecError(f"--spares: {_no_spares(stand, job, machines, faults.spares)}; take fewer, or more GPUs")
        left = fewer
    factors, ettr = ettr_sensitivities(long_runs_on_computing_nodes(runs, left), left.plan)
    return GoodputReport(
        workload=WorkloadSummary.from_spec(workload), node=cluster.node.name,
        framework=FrameworkSummary.from_spec(framework),
        faults=faults.name, weak=weak, replan=replan, points=tuple(points), sensitivity=factors,
        sensitivity_num_gpus=machines.num_gpus, sensitivity_ettr=ettr,
    )  # fmt: skip


def _job_at(
    workload: WorkloadSpec, cluster: ClusterSpec, number: int, first: int, weak: bool
) -> tuple[WorkloadSpec, ClusterSpec]:
    """The job and the machines at one scale."""
    machines = cluster.model_copy(update={"num_gpus": number})
    if not weak:
        return workload, machines
    batch = workload.batch.model_copy(update={"global_batch": workload.batch.global_batch * number // first})
    return workload.model_copy(update={"batch": batch}), machines


def _gpus(machines: ClusterSpec) -> str:
    return f"{machines.num_gpus:,} GPU{'s' if machines.num_gpus > 1 else ''}"


def _replicable(
    job_at: Sequence[tuple[WorkloadSpec, ClusterSpec]], framework: FrameworkSpec
) -> tuple[Plan | None, MofaError | None]:
    """The best plan at the first scale, of those that the framework can replicate to the most GPUs.

    Mostly that is the best plan of all. Only if it is not, every strategy is costed to find it.
    """
    job, machines = job_at[0]
    for every_row in (False, True):
        try:
            search = _search_on_all(job, machines, framework, every_row=every_row)
        except StrategyError as error:
            return None, error
        if not search.report.plans:
            return None, NothingFits(f"nothing fits {_gpus(machines)}")
        if len(job_at) == 1:
            break
        fits = np.flatnonzero(search.reasons[search.costed.rows] < 0)
        best_s = search.costed.step_s[fits].min()
        number, row = next(_replicable_rows(search, fits, job_at, framework), (0, 0))
        is_best = number == len(job_at) - 1 and search.costed.step_s[row] == best_s
        if is_best or (every_row and number):
            strategy = search.costed.table.row(row, framework.name)
            return plan_in_closed_form(job, machines, strategy, framework=framework), None
    return search.report.plans[0], None


def _replicable_rows(
    search: Search, fits: NDArray[np.intp], job_at: Sequence[tuple[WorkloadSpec, ClusterSpec]],
    framework: FrameworkSpec,
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """Of each scale beyond the first, the largest first, the fastest fitting row that runs on it, if any does."""
    table, machines = search.costed.table.select_rows(fits), job_at[0][1]
    for number, (larger_job, larger) in reversed([*enumerate(job_at)][1:]):
        wider = replace(table, dp=table.dp * larger.num_gpus // machines.num_gpus)
        runs = fits[check_strategies(JobAndMachines(larger_job, larger, framework), wider).reason < 0]
        if len(runs):
            fastest = runs[search.costed.step_s[runs] == search.costed.step_s[runs].min()]
            yield number, int(fastest[np.argmin(search.costed.rows[fastest])])


def _plan(
    job: WorkloadSpec, machines: ClusterSpec, framework: FrameworkSpec, base: tuple[StrategySpec, int] | None,
    strategy: object | None,
) -> tuple[Plan | None, MofaError | None]:  # fmt: skip
    """The replicated plan at one scale, or why there is none; ``base`` is what is replicated, and on how many GPUs."""
    wanted = strategy
    if base is not None:
        plan, num_gpus = base
        wanted = plan.model_copy(update={"dp": plan.dp * machines.num_gpus // num_gpus})
    try:
        costed = plan_in_closed_form(job, machines, wanted, framework=framework)
    except StrategyError as error:
        return None, error
    if not costed.memory.fits:
        return None, NothingFits(f"the plan does not fit {_gpus(machines)}")
    return costed, None


def _planned_anew(
    job: WorkloadSpec, machines: ClusterSpec, framework: FrameworkSpec
) -> tuple[FewerNodesReplanned | None, MofaError | None]:
    """A search at one scale, or why it finds nothing."""
    try:
        search = _search_on_all(job, machines, framework)
    except StrategyError as error:
        return None, error
    if not search.report.plans:
        return None, NothingFits(f"nothing fits {_gpus(machines)}")
    return FewerNodesReplanned(search, machines), None


def _search_on_all(
    job: WorkloadSpec, machines: ClusterSpec, framework: FrameworkSpec, *, every_row: bool = True
) -> Search:
    """A search in closed form in which all GPUs compute: those of other scales are points of their own."""
    return find_plans(
        job, machines, framework=framework, top=1, replay=False, banded=False, every_row=every_row,
        without=(FEWER_GPUS,), closed_form_margin=False,
    )  # fmt: skip


def _most_spares(runs: LongRunObjective) -> int:
    """Most spare nodes: checkpoints' copies need a least number of computing nodes. [nodes]"""
    return runs.num_nodes - runs.faults.checkpoint.least_nodes_for_copies


def _no_spares(
    stand: FewerNodesOfPlan | FewerNodesReplanned, job: WorkloadSpec, machines: ClusterSpec, asked: int | None
) -> str:
    """Why no plan runs beside so many spare nodes."""
    nodes = max(machines.num_gpus // machines.node.gpus_per_node, 1)
    by = f"{asked} of {nodes} nodes" if asked else "any node"
    batch = f"global_batch ({job.batch.global_batch})"
    if isinstance(stand, FewerNodesReplanned):
        return f"with {by} standing by no plan is left whose replicas divide {batch} and that fits"
    s = stand.all_nodes.plan.strategy
    return (f"with {by} standing by no replicas of the plan (tp {s.tp}, cp {s.cp}, micro_batch {s.micro_batch}) are "
            f"left that divide {batch} and fit")  # fmt: skip


def _point(
    job: WorkloadSpec, machines: ClusterSpec, framework: FrameworkSpec, faults: FaultSpec,
    stand: FewerNodesOfPlan | FewerNodesReplanned | None, why: str | None,
) -> ScalePoint:  # fmt: skip
    variants: dict[str, VariantPoint] = {}
    mtbf: float | None = None
    plan: Plan | None = None
    if stand is not None:
        plan = stand.plan
        for name, asked, stands_by in fault_tolerance_variants(faults):
            runs = LongRunObjective(job, machines, framework, asked)
            most = _most_spares(runs)
            if most < 0:
                why = f"{asked.checkpoint.copies} copies need as many nodes, not {runs.num_nodes}"
                continue
            left: PlanWithSpares | None = stand.plan_on_all_nodes(runs)
            if stands_by and faults.spares != 0:
                left = stand.best_plan_with_spares(runs, faults.spares or 0, most)
            if left is None:
                why = _no_spares(stand, job, machines, faults.spares)
                continue
            variants[name] = _variant(long_runs_on_computing_nodes(runs, left), left)
            if not stands_by:
                reference = runs.outlook_of_plan(plan)
                mtbf = None if np.isinf(reference.mtbf_s[0]) else float(reference.mtbf_s[0])
    return ScalePoint(
        num_gpus=machines.num_gpus, global_batch=job.batch.global_batch,
        strategy=None if plan is None else plan.strategy, step_s=None if plan is None else plan.step_s,
        tokens_per_s_per_gpu=None if plan is None else plan.tokens_per_s_per_gpu, mtbf_s=mtbf, why=why,
        variants=variants,
    )  # fmt: skip


def _variant(runs: LongRunObjective, left: PlanWithSpares) -> VariantPoint:
    plan, bytes_ = left.plan, np.array([left.plan.checkpoint_bytes or 0.0])
    outlook = runs.outlook_of_plan(plan)
    ettr, interval = float(outlook.ettr[0]), float(outlook.interval_s[0])
    all_gpus = runs.cluster.num_gpus + runs.spare_gpus
    return VariantPoint(
        mode=runs.faults.checkpoint.mode,
        recovery=runs.faults.recovery,
        spares=runs.spares,
        num_gpus=runs.cluster.num_gpus,
        global_batch=runs.workload.batch.global_batch,
        strategy=plan.strategy,
        step_s=plan.step_s,
        ettr=ettr,
        checkpoint_interval_s=None if np.isinf(interval) else interval,
        effective_tokens_per_s_per_gpu=plan.tokens_per_s_per_gpu * ettr * runs.cluster.num_gpus / all_gpus,
        host_memory_fits=bool(runs.checkpoint_times(bytes_).host_bytes[0] <= runs.cluster.node.host_memory_bytes.value),
        ledger=Ledger(**{part: float(outlook.parts[part][0]) for part in PARTS}),
    )
