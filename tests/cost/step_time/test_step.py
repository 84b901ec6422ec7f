"""From blocks to a step: the pipeline's closed form with layers that take exactly a second forward and two backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from mofa.blocks.build import BlockTapes
from mofa.cost.block.block_cost import block_costs
from mofa.cost.block.communication_beside import HIDDEN
from mofa.cost.block.costs import BlockCost, BlockCosts, BlockTimer
from mofa.cost.block.host_clock import NEVER
from mofa.cost.block.tape_clock import EXPOSED, TapeTime
from mofa.cost.breakdown import TIME_COMPONENTS, Breakdown
from mofa.cost.estimate import TableEstimator, estimate_table
from mofa.specs.model import ModelSpec
from tests.cost.toy import cluster, framework, llama, silent_host, silent_network, table, workload

FORWARD_S, BACKWARD_S = 1.0, 2.0
MACHINES = {n: silent_network(silent_host(cluster(n))) for n in (2, 4, 8, 16)}


def phase(seconds: float, num_k: int) -> TapeTime:
    exposed = np.zeros((len(EXPOSED), num_k))
    exposed[EXPOSED.index("gemm")] = seconds
    none = np.zeros(num_k)
    clocks = np.array([exposed.sum(axis=0), exposed.sum(axis=0), none + NEVER, none])
    busy, hidden = exposed.sum(axis=0), np.zeros((len(HIDDEN), num_k))
    return TapeTime(exposed, hidden, none, clocks, none, busy, none, none, none, busy)


class Given(BlockTimer):
    """Times that do not follow from tapes."""

    def __init__(self, forward: TapeTime, backward: TapeTime) -> None:
        self.times = forward, backward

    def forward_time(self, blocks: Sequence[BlockTapes]) -> TapeTime:
        return self.times[0]

    def backward_time(self, blocks: Sequence[BlockTapes]) -> TapeTime:
        return self.times[1]


def timed(block: BlockCost, forward_s: float, backward_s: float) -> BlockCost:
    num_k = len(block.autocast_cached_bytes)
    return replace(block, phases=Given(phase(forward_s, num_k), phase(backward_s, num_k)))


def in_seconds(*args: Any, **options: Any) -> BlockCosts:
    """Block costs where a layer takes 1 s and 2 s, recomputed whole 1 s and 3 s, and the ends take nothing."""
    costs = block_costs(*args, **options)
    layers = {
        spec: tuple(timed(b, FORWARD_S, BACKWARD_S + (FORWARD_S if spec.kind == "full" else 0.0)) for b in kinds)
        for spec, kinds in costs.blocks.items()
    }
    return replace(costs, blocks=layers, embedding=timed(costs.embedding, 0, 0), head=timed(costs.head, 0, 0))


def estimate(model: ModelSpec, gpus: int, strategy: str, *, batch: int = 64, name: str = "megatron") -> Breakdown:
    job, spec = workload(model, global_batch=batch), framework(name)
    row = table(job, MACHINES[gpus], spec, [strategy])
    with patch("mofa.cost.estimate.block_costs", in_seconds):
        estimator = TableEstimator(job, MACHINES[gpus], spec, row)
        estimator.rests = False  # seconds are given, whatever the clock
        return estimator.breakdown(detail=True)


def part(costed: Breakdown, name: str) -> float:
    return float(costed.exposed_s[TIME_COMPONENTS.index(name), 0])


@pytest.mark.parametrize("name", ["megatron", "megatron-local"])
@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("m", [8, 32, 64])
def test_bubble_of_1f1b(pp: int, m: int, name: str) -> None:
    """(pp - 1) / m of the ideal time: Narayanan et al. 2021, arXiv 2104.04473, section 2.2."""
    costed = estimate(llama(num_layers=2 * pp), pp, f"pp={pp} recompute=none", batch=m, name=name)
    ideal = m * 2 * (FORWARD_S + BACKWARD_S)
    assert part(costed, "gemm") == pytest.approx(ideal)
    assert part(costed, "bubble") / ideal == pytest.approx((pp - 1) / m)


def test_bubble_of_torchtitan() -> None:
    """Its ends hold a layer less: 1 2 2 1 of six layers, in 8 micro-batches. The third stage waits for the others' 1, 2
    and 1 layers, less the 2 s of one forward that it runs while its first backward is on its way."""
    costed = estimate(llama(num_layers=6), 4, "pp=4 recompute=none", batch=8, name="torchtitan")
    assert part(costed, "gemm") == pytest.approx(8 * 2 * 3.0)
    assert part(costed, "bubble") == pytest.approx((1 + 2 + 1) * 3.0 - 2.0)


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (2, 4), (4, 2), (4, 3), (8, 2)])
@pytest.mark.parametrize("rounds", [1, 4])
def test_bubble_of_interleaved_1f1b(pp: int, vpp: int, rounds: int) -> None:
    """(pp - 1) / (m vpp) of the ideal time: the same section."""
    m = rounds * pp
    costed = estimate(llama(num_layers=2 * pp * vpp), pp, f"pp={pp} vpp={vpp}", batch=m)
    ideal = m * 2 * vpp * (FORWARD_S + BACKWARD_S)
    assert part(costed, "gemm") == pytest.approx(ideal)
    assert part(costed, "bubble") / ideal == pytest.approx((pp - 1) / (m * vpp))


@pytest.mark.parametrize(("layers", "pp", "vpp"), [(7, 2, 1), (9, 4, 1), (7, 2, 2), (13, 4, 2), (10, 4, 2)])
def test_unequal_stages(layers: int, pp: int, vpp: int) -> None:
    """m max_r t_r + (sum_r t_r - max_r t_r) / vpp, from the layers that each stage holds; without interleaving less
    the forwards that the slowest stage runs while its first backward is on its way, one for each stage behind it."""
    m = 16
    costed = estimate(llama(num_layers=layers), pp, f"pp={pp} vpp={vpp}", batch=m)
    assert costed.detail is not None
    held = costed.detail.layers[0]
    assert held.sum() == layers
    per_stage = held * (FORWARD_S + BACKWARD_S)
    np.testing.assert_allclose(costed.detail.time_s[0], per_stage)
    wanted = m * per_stage.max() + (per_stage.sum() - per_stage.max()) / vpp
    if vpp == 1:
        slowest = int(np.flatnonzero(held == held.max())[-1])  # the one that has least to do meanwhile
        meanwhile = (pp - 1 - slowest) * held[slowest] * FORWARD_S
        wanted -= min(meanwhile, per_stage[slowest + 1 :].sum())
    took = part(costed, "gemm") + part(costed, "bubble")
    if vpp == 1:
        assert took == pytest.approx(wanted)
    else:  # chunks of unequal layers cost more, forwards run while the first backward is awaited less
        assert m * per_stage.max() <= took < 1.05 * wanted
    wanted = took
    assert costed.slowest_stage[0] == per_stage.argmax()
    rest = float(costed.step_s[0]) - wanted
    assert rest == pytest.approx(part(costed, "optimizer"), abs=1e-6)  # nothing else costs


def test_no_pipeline_no_bubble() -> None:
    costed = estimate(llama(num_layers=4), 2, "dp=2", batch=64)
    assert part(costed, "bubble") == 0
    assert part(costed, "pp") == 0
    assert part(costed, "gemm") == pytest.approx(32 * 4 * 3.0)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_recomputed_layers_take_their_forward_again(n: int) -> None:
    """full:n of 4 layers a stage: n seconds more per micro-batch, nothing else changes."""
    plain = estimate(llama(num_layers=8), 2, "pp=2", batch=8)
    again = estimate(llama(num_layers=8), 2, f"pp=2 recompute=full:{n}", batch=8)
    assert float(again.step_s[0] - plain.step_s[0]) == pytest.approx((8 + 1) * n)


def test_micro_batches_are_what_dp_leaves() -> None:
    """The batch over dp times the micro-batch, each as long as the other here."""
    four = estimate(llama(num_layers=4), 4, "dp=4 micro_batch=2", batch=64)
    assert part(four, "gemm") == pytest.approx(64 / 8 * 4 * 3.0)


def test_messages_between_stages() -> None:
    """The last stage, which has the head, waits for m + 1 exchanges of Megatron's 1F1B: the first input, a send with a
    receive behind every backward but the last, and the last gradient. What others hand over is bubble."""
    job, spec, machines = workload(llama(num_layers=8), global_batch=8), framework("megatron"), silent_host(cluster(8))
    rows = table(job, machines, spec, ["pp=4 dp=2 micro_batch=1", "pp=4 dp=2 micro_batch=2", "pp=8 micro_batch=1"])
    costed = estimate_table(job, machines, spec, rows)
    pp = costed.exposed_s[TIME_COMPONENTS.index("pp")]
    one = pp[0] / (4 + 1)
    assert pp[2] == pytest.approx(one * (8 + 1))
    assert 1.0 < pp[1] / (2 + 1) / one < 2.0  # twice the bytes, the same latency
