"""Bytes and seconds of checkpoints: against published sizes, and by hand."""

from __future__ import annotations

import numpy as np
import pytest

import mofa
from mofa.cost.checkpoint import checkpoint_bytes, checkpoint_bytes_per_param, checkpoint_times
from mofa.cost.estimate import estimate_table
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.faults import CheckpointSpec
from mofa.specs.load import load_faults
from mofa.specs.params import num_params


@pytest.mark.parametrize(("name", "published"), [("llama3-8b", 105e9), ("llama3-70b", 912e9), ("llama3-405b", 5.29e12)])
def test_sizes_of_mlperf_storage(name: str, published: float) -> None:
    """MLPerf Storage v2.0 counts 13 bytes a parameter, between torchtitan's 12 and Megatron's 14."""
    job = mofa.load_workload(name)
    low = checkpoint_bytes(job, mofa.load_framework("torchtitan"))
    high = checkpoint_bytes(job, mofa.load_framework("megatron"))
    assert (low / num_params(job.model), high / num_params(job.model)) == (12.0, 14.0)
    assert 0.99 * low < published < 1.01 * high


def test_bf16_moments_are_smaller() -> None:
    job = mofa.load_workload("llama3-8b", overrides={"precision.moments": "bf16"})
    assert checkpoint_bytes_per_param(job, mofa.load_framework("megatron")) == 10.0


@pytest.mark.parametrize(
    ("name", "gpus", "strategy", "framework"),
    [
        ("llama3-8b", 16, "tp=2 pp=2", "megatron"),
        ("llama3-8b", 8, "", "torchtitan"),
        ("mixtral-8x7b", 16, "tp=1 ep=8", "megatron"),
        ("deepseek-v3", 512, "tp=1 pp=8 ep=64", "megatron"),
    ],
)
def test_ranks_save_every_parameter_once(name: str, gpus: int, strategy: str, framework: str) -> None:
    """The heaviest rank's share times the ranks is the whole, and more by what stages are uneven and tp repeats."""
    job, cluster, facts = mofa.load_workload(name), mofa.load_cluster("h200-hgx", gpus), mofa.load_framework(framework)
    row = checked_strategy_row(job, cluster, facts, strategy or {})
    per_rank = estimate_table(job, cluster, facts, row).checkpoint_bytes
    whole = checkpoint_bytes(job, facts)
    assert per_rank.shape == (1,)
    assert 0.999 * whole < float(per_rank[0]) * gpus < 1.35 * whole


def test_the_slowest_link_decides() -> None:
    cluster, facts = mofa.load_cluster("h100-hgx", 16), load_faults("llama3")
    assert facts.storage is not None
    per_rank = np.array([1e9, 64e9])
    slow = facts.storage.model_copy(update={"write_bytes_per_s": facts.storage.write_bytes_per_s.model_copy(
        update={"value": 1e9})})  # fmt: skip
    shared = checkpoint_times(per_rank, 16e9, cluster, slow, CheckpointSpec())
    assert shared.write_s[0] == 16.0
    link = cluster.gpu.host_link_bytes_per_s.value
    assert shared.copy_s.tolist() == [1e9 / link, 64e9 / link]
    assert shared.blocking_s[0] == 16.0
    fast = checkpoint_times(per_rank, 16e9, cluster, facts.storage, CheckpointSpec())
    nics = (
        cluster.node.nic.num_per_node * cluster.node.nic.bandwidth_bytes_per_s.value * cluster.node.nic.efficiency.value
    )
    assert fast.write_s[1] == pytest.approx(8 * 64e9 / nics)
    assert fast.peer_s[1] == pytest.approx(8 * 64e9 / nics)


@pytest.mark.parametrize(("mode", "copies"), [("blocking", 0), ("async", 1), ("memory", 2), ("peer", 4)])
def test_host_memory(mode: str, copies: int) -> None:
    cluster, facts = mofa.load_cluster("h100-hgx", 16), load_faults("llama3")
    assert facts.storage is not None
    found = checkpoint_times(np.array([1e9]), 16e9, cluster, facts.storage, CheckpointSpec(mode=mode))  # type: ignore[arg-type]
    assert float(found.host_bytes[0]) == copies * 8e9
