"""One strategy as an estimator, ready for a replay."""

from __future__ import annotations

from mofa.cost.estimate import TableEstimator
from mofa.search.job_setup import routing_loads_by_ep, with_numerics
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.workload import WorkloadSpec


def strategy_estimator(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, strategy: object
) -> TableEstimator:  # fmt: skip
    """The estimator of one strategy, as :func:`mofa.search.one_plan.estimate` costs it.

    Raises
    ------
    StrategyError
        If the framework cannot run it on these GPUs.
    """
    workload, cluster, framework = with_numerics(workload, cluster, framework, ())
    row = checked_strategy_row(workload, cluster, framework, strategy)
    return TableEstimator(workload, cluster, framework, row, routing_loads_by_ep(workload, row))
