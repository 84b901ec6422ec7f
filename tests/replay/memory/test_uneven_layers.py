"""Layers whose experts get different numbers of tokens, played in their own sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from mofa.cost.allocations.block_trace import BlockTrace
from mofa.cost.block.routing_loads import RoutingLoads
from mofa.cost.estimate import TableEstimator
from mofa.replay.memory.rank_memory import play_memory
from mofa.replay.rank.description import Rank
from mofa.replay.rank.from_estimator import describer_of_rank
from mofa.replay.replayer import Replayer
from tests.cost.toy import cluster, framework, mla_moe, table, workload
from tests.replay.runs import load

MODEL = mla_moe(num_layers=6).model_copy(update={"num_mtp_layers": 0})
ROUTED = [layer for layer in range(6) if MODEL.is_moe_layer(layer)]


def estimator(rows: NDArray[np.float64] | None, held: float = 1.5, name: str = "torchtitan") -> TableEstimator:
    """Experts over four ranks; every rank's rows over the mean, by layer with experts."""
    job, machines, spec = workload(MODEL, global_batch=8), cluster(8), framework(name)
    strategy = table(job, machines, spec, ["pp=1 dp=8 ep=4 micro_batch=1"])
    return TableEstimator(
        job, machines, spec, strategy, RoutingLoads({4: held}, {4: held}, by_layer={} if rows is None else {4: rows})
    )


def uneven(*of_rank: float) -> NDArray[np.float64]:
    return np.tile(np.array(of_rank), (len(ROUTED), 1))


def sizes(life: BlockTrace) -> list[int]:
    return [item.bytes for deed in (*life.forward, *life.backward) for item in (*deed.new, *deed.scratch)]


def layers(rank: Rank) -> list[BlockTrace]:
    return [p.trace for chunk in rank.chunks for p in chunk if p.name.startswith("block ")]


@pytest.mark.parametrize("name", ["torchtitan", "megatron"])
def test_a_layer_is_as_one_costed_with_its_tokens(name: str) -> None:
    """Against an estimator whose memory holds just these: linear in the tokens, within a byte of rounding down."""
    found = layers(describer_of_rank(estimator(uneven(0.4, 1.25, 1.2, 1.15), name=name))(0))
    oracle = layers(describer_of_rank(estimator(None, held=1.25, name=name))(0))
    alone = layers(describer_of_rank(estimator(None, name=name))(0))
    for mine, theirs in zip(found, oracle, strict=True):
        assert np.abs(np.array(sizes(mine)) - np.array(sizes(theirs))).max() <= 1
    routed = ROUTED[0]
    assert sum(sizes(found[routed])) < sum(sizes(alone[routed]))


def test_the_fullest_and_the_emptiest_rank_are_those_of_all_its_layers() -> None:
    rows = uneven(0.4, 1.25, 1.2, 1.15)
    rows[0] = [0.1, 1.0, 1.9, 1.0]  # here another one has most
    most, least = (layers(describer_of_rank(estimator(rows), emptiest=way)(0)) for way in (False, True))
    full = layers(describer_of_rank(estimator(uneven(1.9, 1.9, 1.9, 1.9)))(0))
    assert sizes(most[ROUTED[0]]) == sizes(full[ROUTED[0]])
    assert all(sum(sizes(least[i])) < sum(sizes(most[i])) for i in ROUTED)


def test_layers_without_experts_stay() -> None:
    one = estimator(uneven(0.4, 1.25, 1.2, 1.15))
    plain = estimator(None)
    dense = [i for i in range(6) if i not in ROUTED]
    assert dense
    for mine, theirs in zip(layers(describer_of_rank(one)(0)), layers(describer_of_rank(plain)(0)), strict=True):
        assert mine.weights == theirs.weights
    assert all(
        sizes(layers(describer_of_rank(one)(0))[i]) == sizes(layers(describer_of_rank(plain)(0))[i]) for i in dense
    )


def test_layers_of_their_own_sizes_reserve_as_measured() -> None:
    """A run over two ranks of which one gets 1.41 to 1.43 of the mean, by layer: 54.9 GiB."""
    run = load("tt2-ep2-qwen30b-4l-skewed")
    assert Replayer(run.estimator).rank_memory(0).peak_reserved == pytest.approx(run.reserved, rel=0.002)


def test_the_replayer_keeps_what_reserves_most() -> None:
    rows = uneven(0.4, 1.25, 1.2, 1.15)
    one = estimator(rows)
    both = [play_memory(describer_of_rank(one, emptiest=way)(0)).peak_reserved for way in (False, True)]
    assert Replayer(one).rank_memory(0).peak_reserved == max(both)


def test_scheduled_tokens_have_no_layers_of_their_own() -> None:
    one = estimator(uneven(0.4, 1.25, 1.2, 1.15))
    one.table = replace(one.table, balancing=np.array([1]))
    plain = estimator(None)
    assert sizes(layers(describer_of_rank(one)(0))[ROUTED[0]]) == sizes(layers(describer_of_rank(plain)(0))[ROUTED[0]])
