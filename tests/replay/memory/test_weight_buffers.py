"""A rank's parameter tensors and what its optimizers keep of them, beside recorded allocations and reserved memory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import mofa
from mofa.cost.allocations.parameter_tensors import BucketedBuffer, ParameterTensor, _places, optimizer_owned_fractions
from mofa.replay.memory.fsdp_and_optimizer import weights_in_step_order
from mofa.replay.memory.rank_memory import play_memory, ranks_that_may_be_fullest
from mofa.replay.rank.description import Rank
from mofa.replay.rank.from_estimator import allocator_capacity_bytes, describe_ranks, describers_of_end_data_ranks
from mofa.replay.replayer import Replayer
from mofa.search.strategy_estimator import strategy_estimator
from mofa.specs.load import load_cluster, load_framework, load_workload
from mofa.specs.shared_facts import load_shared_facts
from tests.committed import MEASURED, measured_record
from tests.replay.runs import load

MIB = 1 << 20
TRACES = MEASURED.parent / "traces"


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("mc1-qwen30b-2l-traced", 0),
        ("mc2-tp2-llama-6l-traced", 0),
        ("mc2-ep2-qwen30b-4l-traced", 0),
        ("mc4-tp2-pp2-etp2-mixtral-4l-traced", 0),
        ("mc4-tp2-pp2-etp2-mixtral-4l-traced", 1),
    ],
)
def test_the_optimizer_steps_as_recorded(name: str, rank: int) -> None:
    """foreach AdamW roots its second moments into a temporary each: sizes and order of all of a MiB or more."""
    run = load(name)
    mine = [w.temporary_bytes for w in weights_in_step_order(describe_ranks(run.estimator)[rank])]
    with gzip.open(TRACES / f"{name}.{2 * rank}.json.gz") as file:
        rows = json.load(file)["allocations"]
    recorded = [
        size for action, size, _, _, where in rows
        if action == "alloc" and where.startswith("optimizer.py:step_with_ready_grads")
    ]  # fmt: skip
    assert [n for n in mine if n >= MIB] == [n for n in recorded if n >= MIB]
    assert sum(mine) == pytest.approx(sum(recorded), rel=1e-3)


def test_a_rank_owns_a_part_of_each_bucket() -> None:
    """Three tensors of 100 from the last to the first, 64 to a line: 0, 128 and 256; two ranks of 256 after padding."""
    params = tuple(ParameterTensor(f"w{i}", 100.0, 0) for i in range(3))
    places, buckets = _places(list(params[::-1]), float("inf"), 2)
    assert places == ((0, 100), (128, 228), (256, 356))
    assert buckets == (0, 384)
    buffer = BucketedBuffer(False, 0, (2, 1, 0), places, buckets)
    assert optimizer_owned_fractions(buffer, 2, 0) == {2: 100.0, 1: 64.0, 0: 0.0}
    assert optimizer_owned_fractions(buffer, 2, 1) == {2: 0.0, 1: 36.0, 0: 100.0}
    _, two = _places(list(params[::-1]), 150, 2)
    assert two == (0, 256, 384)


def test_each_data_parallel_rank_has_another_part() -> None:
    """Megatron's distributed optimizer: the two ranks of a run reserved 46.7 and 50.0 GiB, each met within 0.3 %."""
    name = "mc2-dp2-qwen25-7b-8l-overlapped-full4"
    run = load(name)
    ranks = measured_record(name).measured.ranks
    capacity_bytes = allocator_capacity_bytes(run.estimator)
    for d, measured in enumerate(ranks):
        (rank,) = describe_ranks(run.estimator, d)
        assert play_memory(rank, capacity_bytes=capacity_bytes).peak_reserved == pytest.approx(
            measured.peak_reserved_bytes, rel=3e-3
        )
    assert Replayer(run.estimator).rank_memory(0).peak_reserved == pytest.approx(run.reserved, rel=3e-3)


def test_of_a_long_step_the_fuller_end_of_the_shards_is_known_early() -> None:
    """DeepSeek-V3 on 16 stages, 240 micro-batches: stage 6 is decided by short steps, the last has to be played."""
    strategy = "tp=2 sp=true pp=16 ep=16 micro_batch=1 recompute=selective:core_attn+layernorm+mlp"
    job = load_workload("deepseek-v3", global_batch=3840)
    estimator = strategy_estimator(job, load_cluster("h200-hgx", 512), load_framework("megatron"), strategy)
    makers = describers_of_end_data_ranks(estimator)
    ends, last = (tuple(replace(make(r), routing_drift=None) for make in makers) for r in (6, 15))
    assert len(ends) == 2 and ranks_that_may_be_fullest(last) == last
    (fuller,) = ranks_that_may_be_fullest(ends)
    other = next(rank for rank in ends if rank is not fuller)
    assert play_memory(fuller).peak_reserved > play_memory(other).peak_reserved
    short = tuple(replace(rank, computations=rank.computations[:40]) for rank in ends)
    assert ranks_that_may_be_fullest(short) == short
    assert ranks_that_may_be_fullest(ends, capacity_bytes=20 << 30) == ends


def test_near_the_limit_both_ends_of_the_shards_are_played() -> None:
    """The stage of above, as though the rule took the emptier end: found out where it may not fit, and only there."""
    strategy = "tp=2 sp=true pp=16 ep=16 micro_batch=1 recompute=selective:core_attn+layernorm+mlp"
    job, megatron = load_workload("deepseek-v3", global_batch=3840), load_framework("megatron")
    nodes = load_cluster("h200-hgx", 512)
    reserved = [
        play_memory(make(14)).peak_reserved
        for make in describers_of_end_data_ranks(strategy_estimator(job, nodes, megatron, strategy))
    ]

    def wrong(ranks: Sequence[Rank], **_: object) -> Sequence[Rank]:
        return (ranks[int(np.argmin(reserved))],)

    capacity = nodes.gpu.capacity_bytes.value
    for share, found in ((0.94, max(reserved)), (0.5, min(reserved))):
        one = Replayer(strategy_estimator(job, nodes, megatron, strategy))
        one.context_bytes = capacity * share - one.communicator_bytes[14] - min(reserved)
        with mock.patch("mofa.replay.replayer.ranks_that_may_be_fullest", wrong):
            assert one.rank_memory(14).peak_reserved == found
    assert min(reserved) < max(reserved) < min(reserved) + load_shared_facts().tolerances.shard_ends.value * capacity


@pytest.mark.parametrize(
    "name", ["tt1-qwen06b-host-bound", "mc1-qwen06b-host-bound", "tt1-llama-8l", "tt2-fsdp-llama-8l", "tt4-ep4-kimi-2l"]
)
def test_tensors_are_as_large_as_they_are(name: str) -> None:
    """A matrix of 12 MiB takes a segment of 12, with a norm's weight in it one of 14: reserved within 0.5 %."""
    run = load(name)
    assert Replayer(run.estimator).rank_memory(0).peak_reserved == pytest.approx(run.reserved, rel=5e-3)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_predictions_embedding_and_output_are_the_models(pp: int) -> None:
    """Megatron builds one output layer, and one embedding, a rank for the model and its predictions (gpt_model.py)."""
    job = mofa.load_workload("deepseek-v3", overrides={"model.num_layers": 5, "model.num_mtp_layers": 1})
    nodes, megatron = mofa.load_cluster("h200-hgx", 64), mofa.load_framework("megatron")
    played, closed = (
        mofa.estimate(job, nodes, f"tp=1 pp={pp} ep=8", framework=megatron, replay=replay).memory.allocated_bytes
        for replay in (True, False)
    )
    assert played == pytest.approx(closed, rel=0.02)
