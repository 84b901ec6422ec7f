"""Options of the framework that a plan's strategy chooses are said to it, and read back as its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import mofa
from mofa.export.read_job import read_job


@pytest.mark.parametrize(
    ("framework", "workload", "strategy", "file", "said"),
    [
        ("megatron", "llama3-8b", "tp=2 tp_overlap=true", "megatron.sh", "--tp-comm-overlap"),
        ("megatron", "qwen3-30b-a3b", "ep=4 dispatcher=allgather", "megatron.sh",
         "--moe-token-dispatcher-type allgather"),
        ("megatron", "llama3-8b", "pp=2 overlap_param_gather=false", "megatron.sh", "--overlap-grad-reduce"),
        ("torchtitan", "llama3-8b", "dp_replicate=2", "torchtitan.toml", "data_parallel_replicate_degree = 2"),
    ],
)  # fmt: skip
def test_chosen_options_go_out_and_come_back(
    framework: str, workload: str, strategy: str, file: str, said: str, tmp_path: Path
) -> None:
    job, machines = mofa.load_workload(workload, seq_len=4096, global_batch=64), mofa.load_cluster("h100-hgx", 8)
    facts = mofa.load_framework(framework)
    plan = mofa.estimate(job, machines, strategy, framework=facts, replay=False)
    exported = mofa.export(plan, to=framework, workload=job, cluster=machines, framework=facts)
    assert said in exported.files[file]
    exported.write(tmp_path)
    back = read_job(framework, tmp_path / file)
    assert (
        plan.strategy.options.chosen_options.items()
        <= {name: getattr(back.framework, name) for name in plan.strategy.options._fields}.items()
    )
    again = mofa.estimate(
        back.workload, back.cluster_as_job_uses_it(machines), back.strategy, framework=back.framework, replay=False
    )
    assert (again.step_s, again.memory.device_bytes) == (plan.step_s, plan.memory.device_bytes)
