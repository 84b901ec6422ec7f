"""A saved result's job as this version of mofa says it, for ``mofa compare`` of one result."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mofa.cli.jobs import Overrides
    from mofa.cost.model_flops import FlopsConvention
    from mofa.specs.host import HostIssueTimes


def reestimate_saved_result(
    where: str,
    result: Mapping[str, Any],
    cluster: str | None,
    overrides: Overrides,
    host_issue_s: float | HostIssueTimes | None,
    memory_limit: str | None,
    jobs: int,
) -> dict[str, Any]:
    """Estimate the strategy and job of a saved result again, by this version of mofa; the JSON of the estimate.

    Parameters
    ----------
    where
        The saved result, for errors.
    result
        One strategy with its job, as :func:`mofa.plan.comparison.single_result` gives it.
    cluster
        The node type; the bundled one of the saved name where absent.
    overrides, host_issue_s, memory_limit
        What options change of the machines, which a result does not say.
    jobs
        Processes that play. [-]

    Raises
    ------
    SpecError
        If the result does not have its job whole, or the machines are others.
    """
    import mofa
    from mofa.cli.commands.estimate import estimate_of_request
    from mofa.cli.jobs import EstimateRequest, read_cluster
    from mofa.errors import SpecError
    from mofa.plan.comparison import refuse_other_json_version
    from mofa.plan.job_facts import JobFacts
    from mofa.plan.summaries import ClusterSummary
    from mofa.specs.from_mapping import spec_from_mapping
    from mofa.specs.strategy import StrategySpec

    refuse_other_json_version(where, result)
    if not all(isinstance(result.get(name), Mapping) for name in ("job", "cluster", "strategy")):
        raise SpecError(
            f"{where}: does not have its job whole, as results of before JSON 2.10; compare it with another"
        )
    facts = spec_from_mapping(JobFacts, result["job"], where, "job.")
    strategy = spec_from_mapping(StrategySpec, result["strategy"], where, "strategy.")
    saved = spec_from_mapping(ClusterSummary, result["cluster"], where, "cluster.")
    try:
        workload, framework = facts.workload_spec(), facts.framework_spec()
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    if workload.routing.file is not None:
        raise SpecError(
            f"{where}: its routing is of a file, {Path(workload.routing.file).name}, which no result "
            "holds; estimate it again and compare the two"
        )
    num_gpus = strategy.tp * strategy.cp * strategy.pp * strategy.dp
    name = saved.name if cluster is None else cluster
    try:
        machines = read_cluster(name, num_gpus, overrides, host_issue_s, memory_limit)
    except SpecError as error:
        raise SpecError(f"{where}: {error}; --cluster names the machines of a result") from None
    _refuse_other_machines(where, saved, ClusterSummary.from_spec(machines))
    convention: FlopsConvention = "full" if result.get("flops_convention") == "full" else "causal"
    asked = EstimateRequest(None, workload, machines, strategy, framework, frozenset(StrategySpec.model_fields))
    replay = result.get("costed_by") == "replay"
    estimate: mofa.Estimate = estimate_of_request(asked, convention, None, replay, jobs, False)
    again = estimate.model_dump(mode="json")
    return {**again, "cluster": {**again["cluster"], "num_gpus": saved.num_gpus}}  # idle ones and spares counted


def _refuse_other_machines(where: str, saved: Any, now: Any) -> None:
    """Refuse machines that are not those of the saved result."""
    from mofa.errors import SpecError
    from mofa.units import format_bytes

    for field, option in (("gpu", "--cluster"), ("gpus_per_node", "--cluster"), ("gpus_per_domain", "--cluster")):
        if getattr(saved, field) != getattr(now, field):
            raise SpecError(
                f"{where}: cluster.{field} is {getattr(saved, field)}, and {now.name} has {getattr(now, field)}; name "
                f"its machines by {option}"
            )
    if saved.capacity_bytes != now.capacity_bytes and saved.capacity_provenance == "assumed":
        raise SpecError(
            f"{where}: cluster.capacity_bytes is {format_bytes(saved.capacity_bytes)}, and {now.name} has "
            f"{format_bytes(now.capacity_bytes)}; say the same --memory-limit or --set again"
        )
