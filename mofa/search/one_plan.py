"""The plan of one strategy: its checked candidate, costed whole or in part."""

from __future__ import annotations

from contextlib import nullcontext

from mofa.cost.memory.pinned import refuse_pinned_beyond_host_memory
from mofa.cost.model_flops import FlopsConvention
from mofa.plan.result import Plan
from mofa.replay.garbage_collection import without_garbage_collection
from mofa.search.job_setup import routing_loads_by_ep, with_numerics
from mofa.search.one_strategy import checked_strategy_row
from mofa.search.request import check_constraints, checked_framework_or_default
from mofa.search.to_plan.builder import CandidatePlan
from mofa.search.workers import WorkerProcesses
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.workload import WorkloadSpec


def estimate(
    workload: WorkloadSpec,
    cluster: ClusterSpec,
    strategy: object,
    *,
    framework: FrameworkSpec | None = None,
    flops_convention: FlopsConvention = "causal",
    replay: bool = True,
    explain: bool = True,
    over_time: bool = True,
    jobs: int = 1,
) -> Plan:
    """Predict the step time and the memory of one strategy.

    Parameters
    ----------
    workload, cluster, framework
        The job, the machines, the framework; the workload's own or ``megatron`` where absent.
    strategy
        A :class:`~mofa.specs.strategy.StrategySpec`, a mapping of its fields, or text such as ``"tp=4 pp=4"``; what
        is missing takes the framework's default.
    flops_convention
        Whether TFLOP/s, MFU and HFU count causal attention half (``causal``) or whole (``full``).
    replay
        Whether the step is replayed op by op; else the search's closed forms are used, in some milliseconds.
    explain
        Whether the memory of all pipeline ranks is replayed; else that of the fullest.
    over_time
        Whether the replayed memory is also given over time.
    jobs
        Processes that play, this one counted; see :mod:`mofa.search.workers`. The result is the same. [-]

    Returns
    -------
    Plan
        Seconds and bytes by component. A strategy that is too big is returned as well: ``memory.fits`` is false.

    Raises
    ------
    StrategyError
        If the framework cannot run it on these GPUs.
    SpecError
        If the strategy or the convention cannot be read.

    Notes
    -----
    The step is the slowest rank's, the memory the fullest rank's. ``mfu`` is model FLOPs per token times
    tokens_per_s_per_gpu over the peak FLOP/s of the format that the products run in.

    References
    ----------
    MFU: Chowdhery et al. 2022, "PaLM", arXiv 2204.02311, appendix B.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> plan = mofa.estimate(job, machines, "tp=2 recompute=full", replay=False)
    >>> plan.strategy.dp, plan.memory.fits
    (4, True)
    >>> tokens = job.batch.seq_len * job.batch.global_batch
    >>> round(plan.tokens_per_s_per_gpu * 8 * plan.step_s / tokens, 9)
    1.0
    """
    with nullcontext() if replay else without_garbage_collection():  # the closed forms make no cycles
        return _estimate(workload, cluster, strategy, framework, flops_convention, replay, explain, over_time, jobs)


def step_s_of_strategy(
    workload: WorkloadSpec, cluster: ClusterSpec, strategy: object, *, framework: FrameworkSpec, replay: bool = True
) -> float:
    """The predicted step time of one strategy: that of :func:`estimate`, without a replay of memory. [s]

    Parameters
    ----------
    workload, cluster, strategy, framework
        As of :func:`estimate`.
    replay
        Whether the step is played op by op; else it is in closed form.

    Returns
    -------
    float
        [s]

    Raises
    ------
    StrategyError
        If the framework cannot run the strategy.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> megatron = mofa.load_framework("megatron")
    >>> step_s_of_strategy(job, machines, "tp=2 recompute=full", framework=megatron, replay=False) > 0.0
    True
    """
    candidate = _candidate(workload, cluster, framework, strategy)
    return (
        candidate.replayed_time.step_s
        if replay
        else float(candidate.estimator.exposed_and_hidden_seconds(every_stage=True)[0].sum(axis=0)[0])
    )


def plan_in_closed_form(
    workload: WorkloadSpec, cluster: ClusterSpec, strategy: object, framework: FrameworkSpec, *,
    closed_form_margin: bool = False,
) -> Plan:  # fmt: skip
    """The plan that :func:`estimate` gives for one strategy without a replay, but for its band, which takes longest.

    Parameters
    ----------
    workload, cluster, strategy, framework
        As of :func:`estimate`.
    closed_form_margin
        Whether it leaves free what a replay may reserve beyond closed forms, as :func:`estimate` does and
        :func:`~mofa.search.entry_points.find_plans` without a replay.

    Returns
    -------
    Plan
        Without a band.

    Raises
    ------
    StrategyError
        If the framework cannot run the strategy.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> plan_in_closed_form(job, machines, "tp=2 recompute=full", mofa.load_framework("megatron")).band is None
    True
    """
    return _candidate(workload, cluster, framework, strategy).plan_in_closed_form(
        banded=False, doubted=closed_form_margin
    )


def plan_with_replayed_time(
    workload: WorkloadSpec, cluster: ClusterSpec, strategy: object, *, framework: FrameworkSpec
) -> Plan:
    """The plan that :func:`estimate` gives for one strategy, with its memory in closed form, not replayed.

    Parameters
    ----------
    workload, cluster, strategy, framework
        As of :func:`estimate`.

    Returns
    -------
    Plan
        Its step is played, its memory is not.

    Raises
    ------
    StrategyError
        If the framework cannot run the strategy.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> short = job.model_copy(update={"batch": job.batch.model_copy(update={"global_batch": 8})})
    >>> megatron = mofa.load_framework("megatron")
    >>> plan_with_replayed_time(short, machines, "tp=2 recompute=full", framework=megatron).step_s > 0.0
    True
    """
    return _candidate(workload, cluster, framework, strategy).plan_with_replayed_time()


def _estimate(
    workload: WorkloadSpec, cluster: ClusterSpec, strategy: object, framework: FrameworkSpec | None,
    flops_convention: FlopsConvention, replay: bool, explain: bool, over_time: bool, jobs: int,
) -> Plan:  # fmt: skip
    check_constraints({}, {}, 1, flops_convention)
    candidate = _candidate(workload, cluster, framework, strategy, flops_convention)
    if candidate.job[2].offloaded_activations.offloads_any:
        refuse_pinned_beyond_host_memory(candidate.estimator.row_with_every_stage)
    with WorkerProcesses(jobs) as workers:
        return candidate.replayed_plan(replay=replay, explain=explain, over_time=over_time, workers=workers)


def _candidate(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec | None, strategy: object,
    flops_convention: FlopsConvention = "causal",
) -> CandidatePlan:  # fmt: skip
    """The strategy that was asked for, as a checked candidate."""
    framework = checked_framework_or_default(workload, cluster, framework)
    workload, cluster, framework = with_numerics(workload, cluster, framework, ())
    row = checked_strategy_row(workload, cluster, framework, strategy)
    return CandidatePlan(workload, cluster, framework, row, routing_loads_by_ep(workload, row), flops_convention)
