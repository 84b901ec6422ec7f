"""Forwards beside backwards are said to Megatron-LM and Megatron-Bridge, and read back."""

from __future__ import annotations

from pathlib import Path

import mofa
from mofa.export.read_job import read_job

OPTIONS = {"expert_overlap": "combined", "delay_wgrad": True}


def test_the_overlap_goes_out_and_comes_back(tmp_path: Path) -> None:
    job, machines = mofa.load_workload("qwen3-30b-a3b", global_batch=64), mofa.load_cluster("h100-hgx", 16)
    facts = mofa.load_framework("megatron", OPTIONS)
    plan = mofa.estimate(job, machines, "ep=8 micro_batch=1", framework=facts, replay=False)
    exported = mofa.export(plan, to="megatron", workload=job, cluster=machines, framework=facts)
    said = exported.files["megatron.sh"]
    assert "--overlap-moe-expert-parallel-comm" in said and "--delay-wgrad-compute" in said
    exported.write(tmp_path)
    back = read_job("megatron", tmp_path / "megatron.sh")
    assert (back.framework.expert_overlap, back.framework.delay_wgrad) == ("combined", True)
    again = mofa.estimate(
        back.workload, back.cluster_as_job_uses_it(machines), back.strategy, framework=back.framework, replay=False
    )
    assert (again.step_s, again.memory.device_bytes) == (plan.step_s, plan.memory.device_bytes)


def test_bridge_has_it_too() -> None:
    job, machines = mofa.load_workload("qwen3-30b-a3b", global_batch=64), mofa.load_cluster("h100-hgx", 16)
    facts = mofa.load_framework("megatron", OPTIONS)
    plan = mofa.estimate(job, machines, "ep=8 micro_batch=1", framework=facts, replay=False)
    said = "\n".join(
        mofa.export(plan, to="megatron-bridge", workload=job, cluster=machines, framework=facts).files.values()
    )
    assert said.count("overlap_moe_expert_parallel_comm=True") == 1
    assert said.count("delay_wgrad_compute=True") == 2  # of the model and of its data-parallel wrapper


def test_shared_experts_go_out_and_come_back(tmp_path: Path) -> None:
    job, machines = mofa.load_workload("deepseek-v2-lite", global_batch=64), mofa.load_cluster("h100-hgx", 16)
    facts = mofa.load_framework("megatron", {"shared_expert_overlap": True})
    plan = mofa.estimate(job, machines, "ep=8 micro_batch=1", framework=facts, replay=False)
    exported = mofa.export(plan, to="megatron", workload=job, cluster=machines, framework=facts)
    assert "--moe-shared-expert-overlap" in exported.files["megatron.sh"]
    exported.write(tmp_path)
    assert read_job("megatron", tmp_path / "megatron.sh").framework.shared_expert_overlap
