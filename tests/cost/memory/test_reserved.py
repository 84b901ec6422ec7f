"""Reserved memory's closed form: pieces that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

import mofa
from mofa.cost.memory.reserved import (
    LivePeaks,
    _beside_holes,
    _unfitting_gradients,
    _with_loss,
    fsdp_shard_waste_bytes,
    megatron_start_holes_bytes,
    segment_bytes_per_block,
    weight_bytes_at_megatron_start,
    whole_segment_bytes,
)
from mofa.cost.rows import GatheredRows
from mofa.replay.rank.from_estimator import gathered_row_of_strategy
from mofa.search.strategy_estimator import strategy_estimator


def rows(framework: str, strategy: str, gpus: int) -> GatheredRows:
    job = mofa.load_workload("llama3-70b", global_batch=64)
    machines = mofa.load_cluster("h200-hgx", gpus)
    return gathered_row_of_strategy(strategy_estimator(job, machines, mofa.load_framework(framework), strategy))


@pytest.mark.parametrize(("micro_batch", "expected"), [(1, 0.8235), (4, 0.8235), (16, 0.0)])
def test_gradients_larger_than_any_activation(micro_batch: int, expected: float) -> None:
    """Llama 3 70B on cp 4, 2048 tokens a sequence and rank: an activation of the MLP's width has 117 MB a sequence.

    Of a layer's 855 M parameters the MLP's three weights have 705 M, in fp32 blocks of 940 MB; query and output 134 M,
    of 268 MB; key and value 17 M, of 34 MB. The largest bf16 gradient has 470 MB, whatever the tokens.
    """
    share = _unfitting_gradients(rows("torchtitan", f"pp=4 cp=4 dp=2 micro_batch={micro_batch}", 32))
    assert share[0, 1] == pytest.approx(expected, abs=1e-4)
    assert np.all((share >= 0.0) & (share <= 1.0))


def test_pieces_of_holes_are_at_most_the_holes() -> None:
    """A layer's forward of one short sequence holds less than what the parameters left, of many more."""
    for micro_batch in (1, 16):
        some = rows("megatron", f"tp=2 pp=4 cp=4 dp=2 micro_batch={micro_batch} recompute=full", 64)
        held = float(np.max(some.layers.forward_peak_bytes))
        holes = float(some.static.params[0, 1])
        # so much is alive that nothing else matters
        lost = megatron_start_holes_bytes(some, weight_bytes_at_megatron_start(some), np.full((1, 4), 1e15))[1][0, 1]
        assert lost == pytest.approx(min(held, holes), rel=0.02)


def alive_of(loss: float, layers: float) -> LivePeaks:
    """Four stages, of which the last has the loss."""
    of_all = np.full((1, 4), layers)
    with_loss = np.array([[-np.inf, -np.inf, -np.inf, loss]])
    most = np.maximum(of_all, with_loss)
    zero = np.zeros((1, 4))
    return LivePeaks(of_all, of_all, with_loss, most, of_all, most, zero, zero)


def test_what_displaced_tensors_take_of_the_loss() -> None:
    """Llama 3 70B, tp 2, 4 sequences of 8192 tokens: 64,128 words a rank, logits of 3.9 GiB in bf16 and 7.8 GiB in
    fp32, both larger than a layer's largest tensor, the MLP's two halves of 1.75 GiB.

    What layers hold before the loss (20 GiB) and the logits' 11.7 GiB are reserved. Of a GiB more beside the loss in
    later steps one more of its largest is taken, of 8 GiB two.
    """
    some = rows("megatron", "tp=2 pp=4 dp=8 micro_batch=4 recompute=full", 64)
    tokens, words, gib = 4 * 8192, 128256 // 2, 2.0**30
    logits = 6.0 * tokens * words
    for more, again in ((0.0, 0), (gib, 1), (8 * gib, 2)):
        alive = alive_of(20 * gib + logits + more, 25 * gib)
        found = _with_loss(some, alive, np.full((1, 4), 20 * gib), 0.0)
        assert np.all(found[0, :3] == -np.inf)
        assert found[0, 3] == pytest.approx(20 * gib + logits + again * 4.0 * tokens * words, rel=1e-3)


def test_holes_are_there_beside_what_is_larger() -> None:
    """Of Megatron's start all parameters' segments stay beside its buffers: 2 bytes a parameter beside 6.

    Each of 8 ranks owns an eighth of the tensors whole. A state of the MLP's first weight has 896 MiB and fits into no
    hole of 448: three of 4 bytes for every eighth of its parameters, 448 in 816 of all.
    """
    some = rows("megatron", "tp=2 pp=4 cp=4 dp=2 micro_batch=1 recompute=full", 64)
    most, ahead = _beside_holes(some, weight_bytes_at_megatron_start(some), np.zeros((1, 4)))
    params = float(some.static.params[0, 1])
    assert most[0, 1] == pytest.approx((4.0 + 3.0 * 2.0 / 8.0 * 448.0 / 816.0) * params, rel=0.002)
    assert np.all(ahead <= most)
    alive = alive_of(5.0 * params, 4.5 * params)
    assert np.all(whole_segment_bytes(some, alive) >= alive.overall)
    assert float(segment_bytes_per_block(np.array([11.0 * 2**20]))[0]) == 12 * 2**20


def test_sizes_of_weights_are_those_of_most_parameters() -> None:
    """Llama 3 70B without tensor parallelism: gate and up together, the vocabulary's two tables, down, query and output
    of a width of 8192; key and value are smaller. Together with it, ahead of them, a layer's largest."""
    sizes = rows("megatron", "pp=4 dp=8 micro_batch=1", 32).costs.weights.largest_and_commonest_weight_params[:, 0]
    assert sizes[0] == 2 * 8192 * 28672
    assert set(sizes[1:]) >= {2 * 8192 * 28672, 8192 * 128256, 8192 * 28672}


def test_what_segments_of_shards_take_beyond_them() -> None:
    """Llama 3 70B, tp 2, shared by 32 ranks, in fp32: 240 shards of the MLP have 14 MiB and a bit, segments of 16; 160
    of query and output have 4, four to a segment of 20; 160 of key and value half a MiB, three to one of 2; the two of
    the vocabulary 62.6, in 64."""
    waste = float(fsdp_shard_waste_bytes(rows("torchtitan", "tp=2 dp=32", 64))[0, 0]) / 2**20
    by_hand = 240 * 2.0 + 160 * 1.0 + 160 * (2.0 / 3.0 - 0.5) + 2 * (64.0 - 128256 * 8192 * 4 / 64 / 2**20)
    assert waste == pytest.approx(by_hand, rel=1e-3)


def test_fp8_copies_lie_in_the_holes_of_their_weights() -> None:
    """Two of a byte each in one of two bytes: GPT-3 over tp 8 and pp 4 has 10.8 GB of both, counted beside each other
    once (16 % too much)."""
    job = mofa.load_workload("gpt3-175b", overrides={"precision.gemm": "fp8"}, global_batch=256)
    machines, line = mofa.load_cluster("h100-hgx", 256), "tp=8 pp=4 micro_batch=1 recompute=full"
    closed, played = (mofa.estimate(job, machines, line, replay=replay).memory.by_stage for replay in (False, True))
    for form, real in zip(closed, played, strict=True):
        assert form.reserved_bytes == pytest.approx(real.reserved_bytes, rel=0.03)


def test_gradients_have_a_pool_of_their_own() -> None:
    """FSDP1 with two replicas: gradients and what waits for its sum fill one stream's pool at a backward's end, states
    and the optimizer's temporaries the other one later. At one instant there is 12 % less."""
    job = mofa.load_workload("llama3-8b", overrides={"model.num_layers": 8}, global_batch=16)
    framework = mofa.load_framework("fsdp1", {"data_parallel": "hsdp", "dp_replicate": 2})
    machines = mofa.load_cluster("h200-hgx", 4)
    closed, played = (
        mofa.estimate(job, machines, "micro_batch=1", framework=framework, replay=replay).memory
        for replay in (False, True)
    )
    assert closed.allocated_bytes == pytest.approx(played.allocated_bytes, rel=1e-3)
    assert closed.reserved_bytes == pytest.approx(played.reserved_bytes, rel=0.03)
    assert closed.reserved_bytes > 1.1 * closed.allocated_bytes
