"""All that a report says of one plan besides, gathered from its closed form."""

from __future__ import annotations

from collections.abc import Sequence

from mofa.cost.roofline import kernel_totals_by_kind
from mofa.plan.plan_analysis import PlanAnalysis, ResourceChange, Roofline, RooflinePoint
from mofa.plan.result import Plan
from mofa.search.analysis.near_runs import nearest_measured_runs
from mofa.search.analysis.strategy_changes import strategy_changes
from mofa.search.one_plan import step_s_of_strategy
from mofa.search.space_constraints import SpaceConstraints
from mofa.search.strategy_estimator import strategy_estimator
from mofa.search.to_plan.builder import margin_bytes
from mofa.specs.changed_resources import RESOURCES, cluster_with_resource
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import FrameworkOptions
from mofa.specs.workload import WorkloadSpec

LESS, MORE = 0.9, 1.1
"""A tenth less and a tenth more of a resource. [-]"""


def analyse_plan(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, plan: Plan,
    constraints: SpaceConstraints | None = None, option_sets: Sequence[FrameworkOptions] | None = None,
) -> PlanAnalysis:  # fmt: skip
    """The roofline, neighbours, resources and nearest runs of a plan.

    Parameters
    ----------
    workload, cluster, framework
        The job, the GPUs that compute, the framework of the plan.
    plan
        Its numbers.
    constraints, option_sets
        As of :func:`~mofa.search.analysis.strategy_changes.strategy_changes`.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> megatron = mofa.load_framework("megatron")
    >>> plan = mofa.estimate(job, machines, "tp=2 recompute=full", framework=megatron, replay=False)
    >>> analysis = analyse_plan(job, machines, megatron, plan)
    >>> analysis.resources[0].resource, analysis.resources[0].step_change_more < 0
    ('matrix products and attention', True)
    """
    costs = strategy_estimator(workload, cluster, framework, plan.strategy).parts[0].costs
    totals = kernel_totals_by_kind(costs, workload.model)
    points = tuple(RooflinePoint.model_validate({"kind": kind, **vars(total)}) for kind, total in totals.items())
    roofline = Roofline(points=points, memory_bandwidth_bytes_per_s=cluster.gpu.memory_bandwidth_bytes_per_s.value)
    return PlanAnalysis(
        roofline=roofline,
        resources=resource_changes(workload, cluster, framework, plan),
        changes=strategy_changes(workload, cluster, framework, plan.strategy, constraints, option_sets),
        near_runs=nearest_measured_runs(workload, cluster, framework, plan.time.exposed["host_idle"] / plan.step_s),
    )


def resource_changes(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, plan: Plan
) -> tuple[ResourceChange, ...]:
    """The step of a plan's strategy with a tenth less and a tenth more of each resource, the strongest first.

    Parameters
    ----------
    workload, cluster, framework
        The job, the GPUs that compute, the framework of the plan.
    plan
        Its strategy is costed anew, in closed form; no other is searched for
        (:func:`~mofa.search.key_factors.changed_machines.resource_sensitivities` searches). Whether it fits is said by
        its own memory and the margin of the changed machines.
    """

    def step_s(machines: ClusterSpec) -> float:
        return step_s_of_strategy(workload, machines, plan.strategy, framework=framework, replay=False)

    base_s, base_margin = step_s(cluster), margin_bytes(cluster, framework)
    needed = plan.memory.device_bytes + plan.memory.margin_bytes - base_margin

    def fits(machines: ClusterSpec) -> bool:
        return needed + margin_bytes(machines, framework) <= machines.gpu.capacity_bytes.value

    changes = []
    for name in RESOURCES:
        less, more = (cluster_with_resource(cluster, name, factor) for factor in (LESS, MORE))
        changes.append(
            ResourceChange(
                resource=name,
                step_change_less=step_s(less) / base_s - 1.0,
                step_change_more=step_s(more) / base_s - 1.0,
                fits_less=fits(less),
                fits_more=fits(more),
            )
        )
    return tuple(sorted(changes, key=lambda change: -change.swing))
