"""Layers over stages and micro-batches in flight: by hand, by brute force, and by running the schedules."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from mofa.blocks.build import CostedLayerKind
from mofa.cost.layer_split import active_params_of_layer
from mofa.cost.stages import in_flight_at_first_backward, split_layers
from mofa.specs.load import load_workload
from mofa.specs.model import ModelSpec
from mofa.specs.strategy import RecomputeSpec
from tests.cost.toy import llama, mla_moe, moe_llama, windowed

FRAMEWORKS = ("megatron", "megatron-local", "torchtitan")


def sizes(model: ModelSpec, pp: int, vpp: int, framework: str) -> list[int]:
    """Layers of each chunk in forward order: chunk c is on stage c mod pp."""
    found = split_layers(model, pp, vpp, framework).layers
    return [len(found[c % pp][c // pp]) for c in range(pp * vpp)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "model", [llama(num_layers=13), moe_llama(num_layers=12), mla_moe(num_layers=15), windowed(num_layers=14)]
)
@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (3, 2)])
def test_every_layer_is_held_once_in_order(model: ModelSpec, framework: str, pp: int, vpp: int) -> None:
    stages = split_layers(model, pp, vpp, framework)
    in_order = [i for c in range(pp * vpp) for i in stages.layers[c % pp][c // pp]]
    wanted = [CostedLayerKind(model.is_moe_layer(i), model.is_windowed_layer(i)) for i in range(model.num_layers)]
    assert [stages.kinds[i] for i in in_order] == wanted
    assert stages.layer_counts.sum() == model.num_layers
    assert np.all(stages.layer_counts.sum(axis=0) >= (1 if framework != "torchtitan" else 0))
    assert stages.rank_with_head == pp - 1
    assert stages.most_layers_of_chunk == max(sizes(model, pp, vpp, framework))


@pytest.mark.parametrize("framework", ["megatron", "megatron-local"])
def test_layers_that_divide_are_split_evenly(framework: str) -> None:
    assert sizes(llama(num_layers=12), 2, 3, framework) == [2] * 6


@pytest.mark.parametrize("layers", [7, 10, 11])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_of_splits_that_are_as_light_the_earliest_cuts_are_taken(layers: int, chunks: int) -> None:
    """By brute force, from the last cut on; the embedding and the head all but weightless."""
    model = llama(num_layers=layers, vocab=8)
    weight, head = active_params_of_layer(model, False), float(model.vocab * model.hidden)
    ends = [0.1 * head, *[0.0] * (chunks - 2), head]

    def heaviest(cuts: tuple[int, ...]) -> float:
        loads = [(b - a) * weight for a, b in pairwise((0, *cuts, layers))]
        return max(load + end for load, end in zip(loads, ends, strict=True))

    every = list(combinations(range(1, layers), chunks - 1))
    least = min(map(heaviest, every))
    first = min((cuts for cuts in every if heaviest(cuts) == least), key=lambda cuts: cuts[::-1])
    if layers % chunks:
        assert sizes(model, chunks, 1, "megatron") == [b - a for a, b in pairwise((0, *first, layers))]


@pytest.mark.parametrize(
    "model", [llama(num_layers=7), llama(num_layers=11, vocab=400_000), mla_moe(num_layers=8), moe_llama(num_layers=7)]
)
@pytest.mark.parametrize("chunks", [3, 5, 6])
def test_the_heaviest_chunk_is_as_light_as_can_be(model: ModelSpec, chunks: int) -> None:
    """Over all contiguous splits, the head and the prediction layers on the last chunk."""
    weights = [active_params_of_layer(model, model.is_moe_layer(i)) for i in range(model.num_layers)]
    head = model.vocab * model.hidden
    tail = head + model.num_mtp_layers * (weights[-1] + head)

    def heaviest(cuts: tuple[int, ...]) -> float:
        edges = (0, *cuts, model.num_layers)
        loads = [sum(weights[a:b]) for a, b in pairwise(edges)]
        return max([*loads[:-1], loads[-1] + tail])

    best = min(heaviest(cuts) for cuts in combinations(range(1, model.num_layers), chunks - 1))
    ours = tuple(np.cumsum(sizes(model, chunks, 1, "megatron"))[:-1].tolist())
    assert heaviest(ours) == pytest.approx(best)


def test_weight_of_a_layer_counts_active_experts() -> None:
    """Of 8 experts 2 run: hidden 512, 3 products of 256 columns each."""
    model = moe_llama()
    dense = 512 * (8 + 4 + 4) * 64 + 8 * 64 * 512 + 2 * 512  # attention and two norms
    assert active_params_of_layer(model, True) == dense + 512 * 8 + 2 * 3 * 512 * 256


@pytest.mark.parametrize(
    ("layers", "chunks", "wanted"),
    [
        (32, 1, [32]),
        (32, 4, [8, 9, 8, 7]),  # 34 over 4: 9 9 8 8, less one at either end
        (32, 8, [4, 5, 4, 4, 4, 4, 4, 3]),  # 34 over 8: 5 5 4 ...
        (30, 4, [7, 8, 8, 7]),  # 32 over 4
        (6, 8, [0, 1, 1, 1, 1, 1, 1, 0]),  # embedding and head alone on their chunks
        (9, 8, [1, 2, 2, 1, 1, 1, 1, 0]),  # 11 over 8: 2 2 2 1 ...
        (5, 8, None),  # 7 over 8
    ],
)
def test_torchtitans_rule(layers: int, chunks: int, wanted: list[int] | None) -> None:
    """torchtitan 0.2, distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part: embedding and head weigh as a
    layer each, what is left over goes to the first chunks."""
    if wanted is None:
        with pytest.raises(ValueError, match="leave a chunk empty"):
            split_layers(llama(num_layers=layers), chunks, 1, "torchtitan")
        return
    assert sizes(llama(num_layers=layers), chunks, 1, "torchtitan") == wanted


def test_dense_layers_come_first() -> None:
    """DeepSeek-V3: 61 layers over 16 stages; its three dense layers are on stage 0, the head on the last."""
    stages = split_layers(load_workload("deepseek-v3").model, 16, 1, "megatron")
    dense = stages.kinds.index(CostedLayerKind(moe=False))
    assert stages.layer_counts[dense].sum() == 3
    assert stages.layer_counts[dense, 0, 0] == 3
    assert stages.layer_counts.sum() == 61
    assert stages.rank_with_head == 15
    assert stages.layer_counts[:, 15].sum() == min(
        stages.layer_counts.sum(axis=(0, 2))
    )  # head and prediction layer weigh


def test_a_v_puts_the_last_chunk_beside_the_first() -> None:
    stages = split_layers(llama(num_layers=8), 2, 2, "torchtitan", "v")
    assert stages.rank_with_head == 0
    assert [[len(c) for c in stage] for stage in stages.layers] == [[2, 1], [3, 2]]
    assert stages.first_layers == ((0, 7), (2, 5))
    assert stages.rank_of_each_layer.tolist() == [0, 0, 1, 1, 1, 1, 1, 0]


def test_recomputed_layers() -> None:
    """Megatron's block method: the first n of every chunk. torchtitan's: each n-th of a rank, over its chunks."""
    stages = split_layers(mla_moe(num_layers=12), 2, 2, "megatron")
    full, every_other, every_one = (RecomputeSpec.parse(text) for text in ("full", "every:2", "every:1"))
    first = stages.num_recomputed_layers(full, 2)
    assert first.sum(axis=0).tolist() == [[2, 2], [2, 2]]
    assert first[stages.kinds.index(CostedLayerKind(moe=False))].tolist() == [[1, 0], [0, 0]]
    assert np.array_equal(stages.num_recomputed_layers(full, 3), stages.layer_counts)
    every = stages.num_recomputed_layers(every_other, -1)
    assert every.sum(axis=0).tolist() == [[1, 2], [1, 2]]  # of 3 and 3: the 2nd; the 4th and 6th
    assert np.array_equal(stages.num_recomputed_layers(every_one, -1), stages.layer_counts)


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 3, 4, 8, 64])
def test_in_flight(pp: int, m: int) -> None:
    """1F1B holds min(m, pp - r), GPipe all (Narayanan et al. 2021, section 2.2)."""
    assert in_flight_at_first_backward(pp, 1, "1f1b", m)[:, 0].tolist() == [min(m, pp - r) for r in range(pp)]
    assert in_flight_at_first_backward(pp, 1, "gpipe", m)[:, 0].tolist() == [m] * pp


def interleaved_peak(pp: int, vpp: int, m: int, rank: int) -> tuple[int, list[int]]:
    """Megatron's forward_backward_pipelining_with_interleaving, forward and backward one after the other: the most
    chunk activations that a rank holds, and of which chunks."""
    order = [(i // pp) % vpp for i in range(m * vpp)]  # pp micro-batches of a chunk, then of the next
    warmup = min((pp - rank - 1) * 2 + (vpp - 1) * pp, m * vpp)
    held = [0] * vpp
    most, at = 0, [0] * vpp
    backward = 0
    for i, chunk in enumerate(order):
        held[chunk] += 1
        if sum(held) > most:
            most, at = sum(held), list(held)
        if i >= warmup:
            held[vpp - 1 - order[backward]] -= 1
            backward += 1
    return most, at


@pytest.mark.parametrize(("pp", "m"), [(4, 7), (4, 2), (4, 10), (4, 15), (8, 9), (16, 85)])
def test_in_flight_in_rounds_of_another_length(pp: int, m: int) -> None:
    """PyTorch's rounds are longer than pp where pp does not divide the micro-batches, or shorter where there are fewer:
    what its own order holds."""
    from mofa.replay.time.pipeline import most_micro_batches_in_flight as played
    from mofa.schedules import computation_order_of

    found = in_flight_at_first_backward(pp, 2, "interleaved", m).astype(int)
    assert found.tolist() == played(computation_order_of("interleaved", "pytorch", pp, 2, m))


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (2, 4), (4, 2), (4, 3), (8, 2)])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_interleaved_in_flight(pp: int, vpp: int, rounds: int) -> None:
    m = pp * rounds
    found = in_flight_at_first_backward(pp, vpp, "interleaved", m)
    for rank in range(pp):
        most, at = interleaved_peak(pp, vpp, m, rank)
        assert found[rank].sum() == most
        assert found[rank].tolist() == at
        assert most == min(2 * (pp - rank - 1) + (vpp - 1) * pp + 1, m * vpp)
