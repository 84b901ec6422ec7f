"""What a report shows of a search, gathered: the best plan played out with all stages, its analysis, its machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mofa.report.page.facts import HardwareRow, ReportFacts
from mofa.report.phrases import quantity_text
from mofa.specs.base import Fact

if TYPE_CHECKING:
    import pandas as pd

    from mofa.plan.result import Estimate, Plan
    from mofa.replay.time.time_replayed import ReplayedTime
    from mofa.search.search_result import Search
    from mofa.specs.fitted import FittedCurve
    from mofa.specs.hardware import ClusterSpec


def report_facts(
    search: Search,
    strategies: pd.DataFrame | None = None,
    *,
    own: Estimate | None = None,
    own_name: str = "yours",
    launch: Mapping[str, str] | None = None,
    launch_note: str = "",
    command: str = "",
    given: frozenset[str] = frozenset(),
    made_on: str = "",
    jobs: int = 1,
) -> ReportFacts:
    """The facts of a report about the best plan of a search, which must have one.

    Parameters
    ----------
    search
        What :func:`mofa.find_plans` returned.
    strategies
        Strategies that were costed; those of :meth:`~mofa.search.search_result.Search.costed_table` where absent.
    own, own_name
        The user's own configuration of the same job, and what it is called.
    launch, launch_note, command, made_on
        Files that run the plan, what they are for, what made the report, and the day.
    given
        Settings that options gave, as ``defaults`` of the search's result names them.
    jobs
        Processes that play. [-]

    Returns
    -------
    ReportFacts
        The best plan is played once more, with the memory of every stage and over time.
    """
    from mofa.search.analysis.analyse import analyse_plan

    plan = search.report.plans[0]
    cluster = cluster_of_computing_gpus(search.cluster, plan)
    explained, step = _explained(search, cluster, plan, jobs)
    return ReportFacts(
        report=search.report,
        explained=explained,
        analysed=analyse_plan(
            search.workload,
            cluster,
            search.framework,
            plan,
            search.constraints,
            search.combinations.degrees.option_sets,
        ),
        constraints_words=search.constraints.constraints_text,
        strategies=search.costed_table() if strategies is None else strategies,
        step=step,
        hardware=tuple(hardware_rows(cluster)),
        own=own,
        own_name=own_name,
        launch=launch or {},
        launch_note=launch_note,
        command=command,
        given=given,
        made_on=made_on,
    )


def closed_form_report_facts(search: Search) -> ReportFacts:
    """The facts of an answer at once about a search without replay, which has a plan; nothing is played or analysed."""
    return ReportFacts(
        report=search.report,
        explained=search.report.plans[0],
        analysed=None,
        strategies=search.costed_table(),
        step=None,
    )


def cluster_of_computing_gpus(cluster: ClusterSpec, plan: Plan) -> ClusterSpec:
    """The cluster without the GPUs that a plan leaves idle or that stand by."""
    strategy = plan.strategy
    return cluster.model_copy(update={"num_gpus": strategy.tp * strategy.cp * strategy.pp * strategy.dp})


def _explained(search: Search, cluster: ClusterSpec, plan: Plan, jobs: int) -> tuple[Plan, ReplayedTime | None]:
    """The plan with the memory of every stage, and its step; a plan of closed forms stays one, without a step."""
    from mofa.replay.time.step import replay_step_time
    from mofa.search.one_plan import estimate
    from mofa.search.strategy_estimator import strategy_estimator

    if plan.costed_by != "replay":
        return plan, None
    explained = estimate(
        search.workload, cluster, plan.strategy, framework=search.framework, flops_convention=plan.flops_convention,
        jobs=jobs,
    )  # fmt: skip
    step = replay_step_time(strategy_estimator(search.workload, cluster, search.framework, plan.strategy))
    return explained, step


def hardware_rows(cluster: ClusterSpec) -> list[HardwareRow]:
    """The facts of a GPU, its curves, its links and its host, each with its value, provenance and source."""
    gpu, node, curves = cluster.gpu, cluster.node, cluster.gpu.curves
    facts: list[tuple[str, Fact, str]] = [
        *((f"peak of {name} products", fact, "FLOP/s") for name, fact in gpu.peak_flops_per_s.items()),
        ("memory bandwidth", gpu.memory_bandwidth_bytes_per_s, "B/s"),
        ("memory that CUDA reports", gpu.capacity_bytes, "B"),
        ("CUDA context", gpu.context_bytes, "B"),
        ("power limit", gpu.tdp_w, "W"),
        (f"{node.intra.name}: bandwidth of a GPU", node.intra.bandwidth_bytes_per_s, "B/s"),
        (f"{node.intra.name}: share that collectives reach", node.intra.efficiency, "-"),
        (f"{node.nic.name}: bandwidth of each of {node.nic.num_per_node}", node.nic.bandwidth_bytes_per_s, "B/s"),
        (f"{node.nic.name}: share that collectives reach", node.nic.efficiency, "-"),
        (f"{node.nic.name}: share that all-to-alls reach", node.nic.all_to_all_efficiency, "-"),
        (f"{node.nic.name}: latency", node.nic.latency_s, "s"),
        ("host: issue of a small op", curves.host.eager_op_s, "s"),
        ("host: synchronisation", curves.host.sync_s, "s"),
        ("slowdown beside communication", curves.overlap_slowdown, "-"),
    ]
    rows = [
        HardwareRow(name, quantity_text(fact.value, unit), fact.provenance, fact.source) for name, fact, unit in facts
    ]
    families: dict[str, Mapping[Any, FittedCurve]] = {"products": curves.gemm, "experts' products": curves.grouped_gemm}
    for words, family in families.items():
        rows += [
            HardwareRow(f"curve of {name} {words}", "", curve.provenance, curve.source)
            for name, curve in family.items()
            if name in gpu.peak_flops_per_s
        ]
    rows.append(HardwareRow("curve of other memory-bound kernels", "", curves.stream["default"].provenance,
                            curves.stream["default"].source))  # fmt: skip
    return rows
