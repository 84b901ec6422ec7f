"""Drawn plans as jobs to export."""

from __future__ import annotations

from mofa.export.job import Job
from mofa.plan.job_facts import JobFacts
from mofa.plan.result import ClusterSummary
from tests.export.random_plans import Drawn


def job_of(drawn: Drawn, to: str) -> Job:
    """A plan with its job, as ``mofa.export`` makes it."""
    facts = JobFacts.from_specs(drawn.workload, drawn.framework, drawn.cluster)
    return Job(
        facts.workload_spec(),
        facts.framework_spec(),
        drawn.plan,
        ClusterSummary.from_spec(drawn.cluster),
        facts.nvls,
        to,
    )
