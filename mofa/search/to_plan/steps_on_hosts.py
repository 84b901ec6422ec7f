"""Plans of several candidates whose bands ask for steps on a typical, a fast and a slow host: costed together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from mofa.cost.estimate import TableEstimator
from mofa.plan.result import Plan
from mofa.search.to_plan.builder import CandidatePlan
from mofa.search.to_plan.step_band import cluster_with_fast_and_slow_host
from mofa.specs.strategy import StrategyTable


def plans_in_closed_form(candidates: Sequence[CandidatePlan], *, banded: bool, doubted: bool = False) -> Iterator[Plan]:
    """Plans without any replay, made as they are asked for; steps for the bands of all but the first come together.

    ``doubted``: they leave free what a replay may reserve beyond closed forms.
    """
    for n, candidate in enumerate(candidates):
        if n == 1 and banded:
            cost_on_all_hosts(candidates[1:])
        yield candidate.plan_in_closed_form(banded=banded, doubted=doubted)


def cost_on_all_hosts(candidates: Sequence[CandidatePlan]) -> None:
    """Tell candidates of one search what their steps take on each host, those that choose the same options in one go.

    A candidate that is asked for its band costs these steps by itself otherwise, each a whole composition.
    """
    by_options: dict[Hashable, list[CandidatePlan]] = {}
    for candidate in candidates:
        by_options.setdefault(candidate.options_key, []).append(candidate)
    for alike in by_options.values():
        if len(alike) > 1:
            _cost_together(alike)


def _cost_together(alike: Sequence[CandidatePlan]) -> None:
    workload, cluster, framework, _ = alike[0].job
    hosts = cluster_with_fast_and_slow_host(cluster)
    if hosts is None:  # the host is known
        return
    table = StrategyTable.concatenated([candidate.job[3] for candidate in alike])
    estimator = TableEstimator(workload, cluster, framework, table, alike[0].loads)
    for machines in (cluster, *hosts):
        own = estimator if machines is cluster else estimator.on_hosts_of(machines)
        exposed, _ = own.exposed_and_hidden_seconds()
        for candidate, step_s in zip(alike, exposed.sum(axis=0).tolist(), strict=True):
            candidate.steps_on_hosts_s[machines.gpu.curves.host.eager_op_s.value] = step_s
