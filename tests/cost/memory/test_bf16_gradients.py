"""Megatron's gradients in bf16: half the buffer, and an fp32 copy of a rank's part from one step to the next."""

from __future__ import annotations

import pytest

import mofa
from mofa.cost.estimate import TableEstimator
from mofa.cost.optimizer import optimizer_device_seconds_by_part
from mofa.errors import SpecError
from mofa.replay.memory.rank_memory import play_memory
from mofa.replay.rank.from_estimator import describe_ranks, gathered_row_of_strategy
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.load import load_cluster, load_framework, load_workload

MIB = 2**20


def of(grads: str, strategy: str = "micro_batch=1 recompute=full", gpus: int = 2) -> TableEstimator:
    """Llama 3 8B of four layers on two GPUs."""
    job = load_workload("llama3-8b", seq_len=512, global_batch=gpus, overrides={"model.num_layers": 4})
    cluster, framework = load_cluster("h200-hgx", gpus), load_framework("megatron", {"grads": grads})
    return TableEstimator(job, cluster, framework, checked_strategy_row(job, cluster, framework, strategy))


def test_option_says_what_follows() -> None:
    narrow, wide = load_framework("megatron", {"grads": "bf16"}), load_framework("megatron")
    assert (narrow.grads_bytes_per_param, narrow.reduced_bytes_per_param, narrow.widens_gradients) == (2, 2, True)
    assert (wide.grads_bytes_per_param, wide.reduced_bytes_per_param, wide.widens_gradients) == (4, 4, False)
    with pytest.raises(SpecError, match=r"grads_bytes_per_param \(4.0\) is 2 with grads: bf16; leave one out"):
        load_framework("megatron", {"grads": "bf16", "grads_bytes_per_param": 4})
    with pytest.raises(SpecError, match="is an option of Megatron's main gradients"):
        load_framework("torchtitan", {"grads": "fp32"})


@pytest.mark.parametrize("zero", [1, 0])
def test_bytes_of_the_optimizer_step(zero: int) -> None:
    """Of a parameter: 2 of its own, 2 of its gradient, and shared by two ranks 12 of states and 4 of the copy."""
    job = load_workload("llama3-8b", seq_len=512, global_batch=2, overrides={"model.num_layers": 4})
    options = {"grads": "bf16"} if zero else {"grads": "bf16", "data_parallel": "ddp"}
    strategy = {"micro_batch": 1, "recompute": "full", "zero": zero}
    params = 4 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096) + 2 * 128256 * 4096 + 4096
    ranks = 1 + zero
    for replay in (False, True):
        plan = mofa.estimate(
            job, load_cluster("h200-hgx", 2), strategy, framework=load_framework("megatron", options), replay=replay
        )
        found = plan.memory.by_component
        assert plan.memory.by_stage[0].instant == "optimizer step"
        assert found["gradients"] == pytest.approx(2 * params, rel=0.001)
        assert found["optimizer_states"] == pytest.approx(12 * params / ranks, rel=0.001)
        assert found["temporaries"] == pytest.approx(4 * params / ranks, rel=0.001)


def test_copies_stay_to_the_next_step() -> None:
    """``shard_main_param.grad`` is let go by ``zero_grad``, in front of the next forward."""
    (rank,) = describe_ranks(of("bf16"))[:1]
    copies = sum(w.fp32_gradient_copy_bytes for w in rank.weights)
    assert copies == sum(w.main_copy_bytes for w in rank.weights) > 0
    played, without = play_memory(rank), play_memory(describe_ranks(of("fp32"))[0])
    grads = [sum(flat.grads for flat in one.flat_buffers) for one in (rank, describe_ranks(of("fp32"))[0])]
    assert played.allocated_between_steps - without.allocated_between_steps == pytest.approx(
        copies + grads[0] - grads[1], abs=64 * MIB
    )


def test_time_of_the_step() -> None:
    """Half as much to zero and scale, and 6 bytes of a rank's part to widen."""
    parts = {}
    for grads in ("fp32", "bf16"):
        e = of(grads)
        found = gathered_row_of_strategy(e)
        parts[grads] = optimizer_device_seconds_by_part(
            e.workload, e.cluster, e.framework, found.shards, found.mode.precision, found.grids.zero
        )
    wide, narrow = parts["fp32"], parts["bf16"]
    assert float(narrow["zero"][0, 0]) == pytest.approx(float(wide["zero"][0, 0]) / 2)
    assert float(narrow["scale"][0, 0]) == pytest.approx(float(wide["scale"][0, 0]) / 2)
    assert "widen" not in wide
    assert float(narrow["widen"][0, 0]) > 0
