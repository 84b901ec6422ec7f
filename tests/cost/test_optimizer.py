"""Bytes a parameter, by hand: ZeRO, Megatron's distributed optimizer, torchtitan's FSDP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mofa.cost.breakdown import MEMORY_COMPONENTS, Breakdown
from mofa.cost.checkpoint import checkpoint_bytes_per_param
from mofa.cost.estimate import estimate_table
from mofa.cost.kernels.compute import memory_bound_bytes_per_s
from mofa.cost.optimizer import (
    ParameterShards,
    StaticBytes,
    optimizer_device_seconds_by_part,
    optimizer_seconds,
    static_bytes,
)
from mofa.cost.step_time.data_parallel import num_gathers_after_optimizer
from mofa.specs.load import load_cluster, load_workload
from mofa.specs.optimizers import OptimizerTraits
from mofa.specs.params import layer_params, num_params
from mofa.specs.workload import WorkloadSpec
from tests.cost.toy import cluster, framework, llama, moe_llama, table, workload

STATIC = ("parameters", "gradients", "optimizer_states")
JOB = workload(llama(vocab=32768))


def static(
    name: str = "megatron", *, dense: float = 1e9, expert: float = 0.0, ranks: int = 1, expert_ranks: int = 1,
    zero: int = 1, precision: str = "mixed", pipelined: bool = False, job: WorkloadSpec = JOB, **options: Any,
) -> StaticBytes:  # fmt: skip
    shards = ParameterShards(*(np.array([[float(v)]]) for v in (dense, expert, ranks, expert_ranks)))
    return static_bytes(job, framework(name, **options), shards, precision, pipelined, np.array([[zero]]))


def total(held: StaticBytes) -> float:
    return float((held.params + held.grads + held.states)[0, 0])


def test_sixteen_bytes_a_parameter() -> None:
    """Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1: 2 + 2 + 12 in mixed precision with Adam. Megatron keeps
    the gradient in fp32, two bytes more; torchtitan under autocast 4 + 4 + 8."""
    held = static(zero=0)
    assert [float(v[0, 0]) / 1e9 for v in (held.params, held.grads, held.states)] == [2, 4, 12]
    assert total(held) / 1e9 == 16 + 2
    assert total(static("torchtitan", precision="autocast")) / 1e9 == 16


@pytest.mark.parametrize("dp", [1, 2, 8, 64])
def test_distributed_optimizer(dp: int) -> None:
    """6 + 12/dp; ZeRO's stage 1 with Adam's K = 12: 4 psi + 12 psi / N, two more for fp32 gradients."""
    assert total(static(ranks=dp)) / 1e9 == pytest.approx(6 + 12 / dp)
    assert total(static(ranks=dp)) / 1e9 == pytest.approx(4 + 12 / dp + 2)
    assert total(static(ranks=dp, zero=0)) / 1e9 == 18


@pytest.mark.parametrize(("ep", "temporaries"), [(1, 4 * 3e9), (2, 4 * 2e9)])
def test_temporaries_of_two_optimizers(ep: int, temporaries: float) -> None:
    """Adam by separate kernels takes 4 bytes a parameter; under ep the experts' 2e9 step behind the others' 1e9."""
    shards = ParameterShards(*(np.array([[v]]) for v in (1e9, 2e9, 1.0, 1.0)))
    held = static_bytes(
        JOB, framework("megatron", optimizer="foreach"), shards, "mixed", False, np.array([[1]]), ep=np.array([[ep]])
    )
    assert held.step_scratch[0, 0] == temporaries


def test_fp8_copies_are_of_the_layers_alone() -> None:
    """Row-wise and transposed, a byte each: 2 GB of 1e9 parameters in layers, however large embedding and head are."""
    job = JOB.model_copy(update={"precision": JOB.precision.model_copy(update={"gemm": "fp8"})})
    shards = ParameterShards(*(np.array([[v]]) for v in (3e9, 0.0, 1.0, 1.0)))
    held = static_bytes(
        job, framework("megatron"), shards, "mixed", False, np.array([[1]]), in_layers=np.array([[1e9]])
    )
    assert held.buffers[0, 0] == 2e9


def test_zero_of_7_5_billion_parameters_on_64_gpus() -> None:
    """Figure 1 of the paper: 31.4 GB for stage 1 with 16-bit gradients; stage 3 1.88 GB, which 16 bytes over 64 are."""
    stage_1 = total(static(dense=7.5e9, ranks=64)) - 2 * 7.5e9
    assert stage_1 / 1e9 == pytest.approx(31.4, abs=0.01)
    assert total(static("torchtitan", dense=7.5e9, ranks=64)) / 1e9 == pytest.approx(1.88, abs=0.01)


def test_experts_shard_over_their_own_ranks() -> None:
    held = static(dense=1e9, expert=3e9, ranks=16, expert_ranks=2)
    assert total(held) / 1e9 == pytest.approx((6 + 12 / 16) + 3 * (6 + 12 / 2))
    fsdp = static("torchtitan", dense=1e9, expert=3e9, ranks=16, expert_ranks=2)
    assert total(fsdp) / 1e9 == pytest.approx(16 / 16 + 3 * 16 / 2)


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_fsdp(n: int) -> None:
    """fp32 parameters, gradients and moments, sharded; pipelines keep bf16 weights and fp32 gradients whole, and shard
    the gradients only when the whole ones go."""
    held = static("torchtitan", ranks=n, zero=3)
    assert [float(v[0, 0]) / 1e9 for v in (held.params, held.grads, held.states)] == pytest.approx(
        [4 / n, 4 / n, 8 / n]
    )
    piped = static("torchtitan", ranks=n, zero=2, pipelined=True)
    assert [float(v[0, 0]) / 1e9 for v in (piped.params, piped.grads, piped.states)] == pytest.approx(
        [4 / n + 2, 4, 8 / n]
    )


def test_ddp_keeps_buckets_beside_the_gradients() -> None:
    held = static("torchtitan", precision="autocast", zero=0, data_parallel="ddp")
    assert total(held) / 1e9 == 16
    assert float(held.buffers[0, 0]) / 1e9 == 4


def test_when_gradients_exist() -> None:
    """Megatron's buffers are there from the start, torchtitan's gradients from the first backward on."""
    assert static().grads_always
    assert not static("torchtitan").grads_always


def test_bf16_moments_take_half() -> None:
    job = workload(llama(), precision={"moments": "bf16"})
    assert total(static(ranks=4, job=job)) / 1e9 == pytest.approx(6 + 8 / 4)
    assert total(static("torchtitan", ranks=4, job=job)) / 1e9 == pytest.approx(12 / 4)


def test_an_optimizer_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lion's record names one moment: 4 bytes a parameter less in states and in checkpoints, half of it in bf16."""
    spec, narrow = framework("megatron"), JOB.model_copy(
        update={"precision": JOB.precision.model_copy(update={"moments": "bf16"})}
    )  # fmt: skip
    assert [checkpoint_bytes_per_param(job, spec) for job in (JOB, narrow)] == [14, 10]
    monkeypatch.setattr("mofa.specs.workload.OPTIMIZERS", {"adamw": OptimizerTraits(("moments",))})
    assert [float(static(zero=0, job=job).states[0, 0]) / 1e9 for job in (JOB, narrow)] == [4 + 4, 4 + 2]
    assert float(static("torchtitan", precision="autocast").states[0, 0]) / 1e9 == 4
    assert [checkpoint_bytes_per_param(job, spec) for job in (JOB, narrow)] == [2 + 4 + 4, 2 + 4 + 2]


def test_the_replay_has_the_moments_that_the_record_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed form and replay of a rank agree on the states of an optimizer of one moment."""
    from mofa.search.one_plan import estimate

    monkeypatch.setattr("mofa.specs.workload.OPTIMIZERS", {"adamw": OptimizerTraits(("Lion's moments",))})
    job, machines = load_workload("llama3-8b", overrides={"batch.global_batch": 8}), load_cluster("h100-hgx", 8)
    played, closed = (estimate(job, machines, "tp=2 recompute=full", replay=replay).memory for replay in (True, False))
    states = [memory.by_component["optimizer_states"] for memory in (played, closed)]
    assert states[0] == pytest.approx(states[1], rel=1e-3) == 8 * num_params(job.model) / 8
    names = {tensors.name for tensors in played.by_stage[0].tensors if tensors.kind == "optimizer_states"}
    assert "Lion's moments" in names and not any("Adam" in name for name in names)


def test_foreach_needs_a_copy_while_it_steps() -> None:
    assert float(static("torchtitan", ranks=4, optimizer="foreach").step_scratch[0, 0]) / 1e9 == 1
    assert float(static("torchtitan", ranks=4).step_scratch[0, 0]) == 0


def test_everything_in_bf16() -> None:
    """2 + 2 + 4 bytes a parameter, DDP's buckets 2 more; the step takes what 16-bit kernels do."""
    job = workload(llama(vocab=32768), precision={"params": "bf16"})
    shards = ParameterShards(*(np.array([[v]]) for v in (1e9, 0.0, 1.0, 1.0)))
    spec, zero = framework("torchtitan", data_parallel="ddp"), np.array([[0]])
    held = static_bytes(job, spec, shards, "uniform", False, zero, amp=True)
    assert total(held) / 1e9 == 8 and float(held.buffers[0, 0]) / 1e9 == 2
    plain, half = (optimizer_device_seconds_by_part(j, cluster(), spec, shards, "autocast", zero) for j in (JOB, job))
    for name, share in (("adam", 0.75), ("norm", 0.75), ("clip", 0.85)):
        assert half[name] == pytest.approx(plain[name] / 2 / share)


def step_seconds(
    job: WorkloadSpec = JOB, ranks: int = 1, zero: int = 1, name: str = "megatron", **options: Any
) -> float:
    shards = ParameterShards(*(np.array([[float(v)]]) for v in (1e9, 0, ranks, 1)))
    machines = cluster()
    spec = framework(name, **options)
    return float(optimizer_seconds(job, machines, spec, shards, "mixed", np.array([[zero]]))[0, 0])


def test_gradients_are_scaled_in_the_share_of_steps_that_clip() -> None:
    """A billion parameters: 8 GB read and written where the norm exceeds the limit; torchtitan always multiplies."""
    scaled = 8e9 / memory_bound_bytes_per_s(cluster().gpu, "grad_clip")
    never, half = (step_seconds(clipped_steps=share) for share in (0.0, 0.5))
    assert half - never == pytest.approx(scaled / 2)
    assert never - step_seconds(workload(llama(), optimizer={"clip_grad_norm": False})) == pytest.approx(
        4e9 / memory_bound_bytes_per_s(cluster().gpu, "grad_norm")
    )
    with pytest.raises(ValueError, match="clipped_steps"):
        framework("torchtitan", clipped_steps=0.5)


def test_step_time_relations() -> None:
    """Sharding saves time, clipping, fp32 moments and separate kernels cost it."""
    assert step_seconds(ranks=8) < step_seconds(ranks=2) < step_seconds(ranks=2, zero=0)
    assert step_seconds(workload(llama(), optimizer={"clip_grad_norm": False})) < step_seconds()
    assert step_seconds(workload(llama(), precision={"moments": "bf16"})) < step_seconds()
    titan = {"name": "torchtitan", "ranks": 4, "zero": 3}
    assert step_seconds(**titan) < step_seconds(**titan, optimizer="foreach")


def parts(costed: Breakdown, *names: str) -> np.ndarray[Any, Any]:
    return costed.memory_bytes[[MEMORY_COMPONENTS.index(n) for n in names]]


def test_a_models_parameters_on_one_rank() -> None:
    """All of them, at 6 + 12/dp: the vocabulary divides by 128, so that nothing is padded."""
    machines, spec = cluster(8), framework("megatron", allocator="expandable")  # which leaves no rests
    costed = estimate_table(JOB, machines, spec, table(JOB, machines, spec, ["dp=8", "cp=2", "cp=8"]))
    params = num_params(JOB.model)
    assert parts(costed, "parameters", "optimizer_states").sum(axis=0) == pytest.approx([params * (2 + 12 / 8)] * 3)
    # the largest one may peak while the embedding's own gradient waits to be added
    assert parts(costed, "gradients")[0].tolist() == pytest.approx(
        [4 * params, 4 * params, 4 * params + 2 * 32768 * 512]
    )


def test_tensor_parallelism_splits_matrices_and_not_norms() -> None:
    machines, spec = cluster(4), framework("megatron")
    costed = estimate_table(JOB, machines, spec, table(JOB, machines, spec, ["tp=4"]))
    whole = 5 * 512  # two norms a layer, the last one
    on_rank = (num_params(JOB.model) - whole) / 4 + whole
    assert parts(costed, *STATIC)[:, 0].sum() == pytest.approx(18 * on_rank)


def test_a_vocabulary_is_padded() -> None:
    """50257 to a multiple of 128 x tp = 512: 50688, in the embedding and in the head."""
    job, machines, spec = workload(llama(vocab=50257)), cluster(4), framework("megatron")
    costed = estimate_table(job, machines, spec, table(job, machines, spec, ["tp=4"]))
    matrices = num_params(job.model) - 5 * 512 + 2 * 512 * (50688 - 50257)
    assert parts(costed, "parameters")[0, 0] == pytest.approx(2 * (matrices / 4 + 5 * 512))


def test_experts_of_a_model_over_their_own_data_parallel_ranks() -> None:
    """ep 4 of dp 8: a rank holds 2 of 8 experts, whose states two ranks share; the rest is shared by 8."""
    job, machines, spec = workload(moe_llama(vocab=32768)), cluster(8), framework("megatron")
    costed = estimate_table(job, machines, spec, table(job, machines, spec, ["ep=4 etp=1"]))
    routed = 4 * layer_params(job.model, True).routed
    rest = num_params(job.model) - routed
    assert parts(costed, *STATIC)[:, 0].sum() == pytest.approx(rest * (6 + 12 / 8) + routed / 4 * (6 + 12 / 2))


def test_fsdp_of_a_model() -> None:
    job, machines, spec = JOB, cluster(8), framework("torchtitan")
    costed = estimate_table(job, machines, spec, table(job, machines, spec, ["dp=8", "cp=2"]))
    held = parts(costed, "parameters", "optimizer_states").sum(axis=0)
    assert held == pytest.approx([num_params(job.model) * 12 / 8] * 2)
    one = cluster(1)
    alone = estimate_table(job, one, spec, table(job, one, spec, ["recompute=none"]))
    assert parts(alone, "parameters", "optimizer_states").sum() == pytest.approx(num_params(job.model) * 12)


def test_experts_that_are_split_gather_all_parameters_once_more() -> None:
    """Their own optimizer gathers what the other has gathered; not on a stage without experts."""
    shards = ParameterShards(
        np.full((2, 2), 9.0), np.array([[4.0, 4.0], [4.0, 0.0]]), np.full((2, 1), 2.0), np.ones((2, 1))
    )
    rows = SimpleNamespace(grids=SimpleNamespace(ep=np.array([1, 2])), framework=framework("megatron"), shards=shards)
    assert num_gathers_after_optimizer(rows).tolist() == [[1.0, 1.0], [2.0, 1.0]]  # type: ignore[arg-type]
