"""Drawn plans as jobs to export."""

from __future__ import annotations

from typing import Any

import mofa
from mofa.export.job import ExportJob
from mofa.export.job_file import JobOfFile
from mofa.plan.job_facts import JobFacts
from mofa.plan.summaries import ClusterSummary
from mofa.search.one_plan import plan_in_closed_form
from tests.export.random_plans import Drawn


def assert_comes_back(job: JobOfFile, drawn: Drawn) -> None:
    """A plan that was exported and read, estimated anew: the same strategy, layout, step and memory."""
    plan = drawn.plan
    assert job.num_gpus == drawn.cluster.num_gpus
    again = plan_in_closed_form(
        job.workload, job.cluster_as_job_uses_it(drawn.cluster), dict(job.strategy), job.framework
    )
    assert again.strategy.model_dump(exclude={"layout"}) == plan.strategy.model_dump(exclude={"layout"})
    assert (again.layout and again.layout.text) == (plan.layout and plan.layout.text)
    assert again.step_s == plan.step_s
    assert again.memory.by_component == plan.memory.by_component
    assert job.workload.batch == drawn.workload.batch


def job_of(drawn: Drawn, to: str) -> ExportJob:
    """A plan with its job, as ``mofa.export`` makes it."""
    facts = JobFacts.from_specs(drawn.workload, drawn.framework, drawn.cluster)
    return ExportJob(
        facts.workload_spec(),
        facts.framework_spec(),
        drawn.plan,
        ClusterSummary.from_spec(drawn.cluster),
        facts.nvls,
        to,
    )


def megatron_job(to: str = "megatron", **options: Any) -> ExportJob:
    """Llama 3 8B on a node of H100s, two ranks of it tensor-parallel, under these options of Megatron's."""
    workload, cluster = mofa.load_workload("llama3-8b", global_batch=64), mofa.load_cluster("h100-hgx", 8)
    framework = mofa.load_framework({"name": "megatron", **options})
    plan = plan_in_closed_form(workload, cluster, {"tp": 2, "sp": True}, framework)
    return job_of(Drawn(workload, cluster, framework, plan), to)
