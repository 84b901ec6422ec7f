"""What a rank holds and does is described once: by hand, against a slow twin, and as closed form and replay read it."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

import mofa
from mofa.blocks.build import layer_kind
from mofa.cost.estimate import TableEstimator
from mofa.cost.memory.persistent_buffers import PYTORCH_WORKSPACE, persistent_buffer_bytes
from mofa.cost.memory.stage_inputs import held_input_bytes
from mofa.cost.rank_spec import RankSpec
from mofa.cost.step_time.data_parallel import tied_embedding_all_reduce_s
from mofa.replay.rank.from_estimator import describe_ranks
from mofa.replay.time.step import replay_step_time
from mofa.search.strategy_estimator import strategy_estimator

REPLAY = Path(mofa.__file__).parent / "replay"
CASES = (
    ("llama3-8b", 8, "megatron", "tp=2 pp=2 micro_batch=1 recompute=full:3"),
    ("llama3-8b", 8, "megatron", "tp=2 pp=2 vpp=4 micro_batch=1 recompute=selective"),
    ("llama3-8b", 8, "megatron-2022", "pp=4 micro_batch=1 recompute=full"),
    ("llama3-8b", 8, "torchtitan", "pp=2 vpp=2 micro_batch=1 recompute=every:3"),
    ("llama3-8b", 8, "torchtitan", "pp=4 vpp=2 schedule=zbv micro_batch=1 recompute=full"),
    ("llama3-8b", 8, "torchtitan", "pp=2 vpp=2 schedule=interleaved-zb micro_batch=1 recompute=none"),
    ("llama3-8b", 8, "torchtitan", "micro_batch=1 recompute=ops"),
    ("llama3-8b", 8, "fsdp1", "micro_batch=1 recompute=full"),
    ("deepseek-v2-lite", 16, "megatron", "pp=2 ep=8 micro_batch=1 recompute=full:2"),
    ("deepseek-v3", 256, "megatron", "tp=2 pp=8 ep=16 micro_batch=1 recompute=full"),
    ("deepseek-v3", 256, "megatron", "tp=2 pp=8 ep=16 micro_batch=1 recompute=selective:mlp"),
    ("mixtral-8x7b", 16, "megatron", "pp=2 ep=8 micro_batch=1 recompute=none"),
    ("llama3-8b", 8, "megatron", "pp=4 layout=Et|(t*5|)*6tL micro_batch=1 recompute=full:3"),
    ("llama3-8b", 8, "torchtitan", "pp=2 layout=E|t*20|t*12|L micro_batch=1 recompute=every:3"),
    ("deepseek-v3", 256, "megatron", "tp=2 pp=8 ep=16 layout=Et*9|(t*4|)*13m|L micro_batch=1 recompute=full"),
)
named = pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))


@lru_cache
def estimator(case: tuple[str, int, str, str], tied: bool = False) -> TableEstimator:
    name, gpus, framework, strategy = case
    changes = {"model": {"tied_embeddings": True}} if tied else None
    workload = mofa.load_workload(name, global_batch=gpus * 8, overrides=changes)
    return strategy_estimator(workload, mofa.load_cluster("h200-hgx", gpus), mofa.load_framework(framework), strategy)


def _chunk(spec: RankSpec, c: int) -> list[str]:
    return [block.name for block in spec.chunks[c].blocks]


def test_a_v_of_two_ranks_by_hand() -> None:
    """32 layers in eight chunks: of 34 with the ends two chunks have five, and each end takes one. Rank 0 has both ends
    of the model, the last rank hands its first chunk's output to its second."""
    specs = estimator(CASES[4]).rank_specs
    first, last = specs[0], specs[-1]
    assert [chunk.position for chunk in first.chunks] == [0, 7]
    assert _chunk(first, 0) == ["embedding", "block 0", "block 1", "block 2", "block 3"]
    assert _chunk(first, 1) == ["block 29", "block 30", "block 31", "head"]
    assert (first.place.has_embedding, first.place.has_head, last.place.has_model_end) == (True, True, False)
    assert [(c.receives, c.sends, c.feeds_own_chunk) for c in first.chunks] == [
        (False, True, False),
        (True, False, False),
    ]
    assert [(c.receives, c.sends, c.feeds_own_chunk) for c in last.chunks] == [
        (True, False, True),
        (False, True, False),
    ]


def test_blocks_of_a_prediction_by_hand() -> None:
    """DeepSeek-V3's head stage: its last layers, then the prediction's entry, a layer like the last and a head."""
    last = estimator(CASES[9]).rank_specs[-1]
    assert [block.role for block in last.chunks[0].blocks][-4:] == [
        "prediction",
        "prediction layer",
        "prediction head",
        "head",
    ]
    assert last.chunks[0].blocks[-3].tapes == last.chunks[0].blocks[-5].tapes  # recomputed as all layers are
    assert last.chunks[0].blocks[-5].name_with_article == "block 60"
    assert last.chunks[0].blocks[-3].name_with_article == "the layer of prediction 0"
    assert not last.place.has_embedding


def test_predictions_by_themselves_by_hand() -> None:
    """A layout puts them on the last rank but one: entry and layer there, with an embedding's copy; the heads stay."""
    apart, together = estimator(CASES[14]).rank_specs, estimator(CASES[9]).rank_specs
    assert [block.role for block in apart[6].chunks[1].blocks] == ["prediction", "prediction layer"]
    assert [block.role for block in apart[7].chunks[1].blocks] == ["prediction head", "head"]
    assert [block.name for block in apart[7].chunks[0].blocks] == [f"block {i}" for i in range(33, 37)]
    totals = [sum(spec.parameters.total for spec in specs) for specs in (apart, together)]
    assert totals[0] == pytest.approx(totals[1], rel=1e-12)


def test_recomputed_layers_by_hand() -> None:
    """Megatron's block method takes the first three of every chunk, torchtitan's every third of a rank."""
    blocks = estimator(CASES[0]).rank_specs[1].chunks[0].blocks
    assert [b.number for b in blocks if b.mode.kind == "full"] == [16, 17, 18]
    spec = estimator(CASES[3]).rank_specs[0]  # layers 0..7 and 16..24
    recomputed = [b.number for chunk in spec.chunks for b in chunk.blocks if b.mode.kind == "full"]
    assert recomputed == list(spec.layer_numbers[2::3])


@named
def test_ranks_hold_the_model_once(case: tuple[str, int, str, str]) -> None:
    """Slow twin: chunk after chunk along the model layers count up, with the embedding ahead and the head behind."""
    own = estimator(case)
    model, specs = own.workload.model, own.rank_specs
    along = sorted((chunk for spec in specs for chunk in spec.chunks), key=lambda chunk: chunk.position)
    assert [chunk.position for chunk in along] == list(range(len(along)))
    blocks = [block for chunk in along for block in chunk.blocks]
    assert [b.number for b in blocks if b.role == "layer"] == list(range(model.num_layers))
    assert (blocks[0].role, blocks[-1].role) == ("embedding", "head")
    assert Counter(b.role for b in blocks)["prediction layer"] == model.num_mtp_layers
    for block in blocks:
        if block.is_layer:
            layer = block.number if block.role == "layer" else model.num_layers - 1
            assert block.tapes.startswith(layer_kind(model, layer).name)
            assert block.tapes in own.row_with_every_stage.costs.tapes


@named
def test_the_order_hands_over_where_chunks_say_so(case: tuple[str, int, str, str]) -> None:
    """Slow twin: the schedule's own order places chunks on the same ranks."""
    for r, spec in enumerate(estimator(case).rank_specs):
        order = spec.schedule.order
        for c, chunk in enumerate(spec.chunks):
            assert (order.rank_of(chunk.position), order.chunk_of(chunk.position)) == (r, c)
            assert chunk.sends == order.sends_to_other_rank[chunk.position]
            assert chunk.receives == (chunk.position > 0 and order.sends_to_other_rank[chunk.position - 1])
        assert {c for _, c, _ in spec.computations} == set(range(len(spec.chunks)))


@named
def test_the_closed_form_reads_it(case: tuple[str, int, str, str]) -> None:
    """Its arrays count the same layers, kinds and modes, and have the same bytes."""
    own = estimator(case)
    rows, specs = own.row_with_every_stage, own.rank_specs
    lay, kinds = rows.stage_layers, len(rows.stage_layers.stages.kinds)
    held = np.zeros((kinds, len(specs)))
    recomputed = np.zeros((kinds, len(specs)))
    for r, spec in enumerate(specs):
        for block in (b for chunk in spec.chunks for b in chunk.blocks if b.role == "layer"):
            held[block.kind, r] += 1
            recomputed[block.kind, r] += (
                block.mode == tuple(rows.costs.blocks)[rows.full_mode_index[0]] and lay.any_fully_recomputed
            )
    assert np.array_equal(held, lay.layer_counts[0])
    assert np.array_equal(recomputed, lay.fully_recomputed[0])
    assert [spec.place.has_embedding for spec in specs] == (rows.is_embedding_stage > 0).tolist()
    assert [spec.place.has_head for spec in specs] == (rows.is_head_stage > 0).tolist()
    throughout, at_end = (held_input_bytes(rows)[i][0].tolist() for i in (0, 1))
    workspaces = 2 * PYTORCH_WORKSPACE * (rows.is_head_stage if rows.framework.library else np.ones(len(specs)))
    for r, spec in enumerate(specs):
        buffers = spec.buffers
        assert buffers.stage_boundary_bytes * buffers.held_inputs.throughout == throughout[r]
        assert buffers.stage_boundary_bytes * buffers.held_inputs.at_end == at_end[r]
        tables = buffers.num_rotary_tables * (buffers.rotary_table_bytes + sum(buffers.rotary_tables_from_start))
        assert persistent_buffer_bytes(rows)[0, r] == buffers.framework_buffer_bytes + tables + workspaces[r]
        assert spec.parameters.total == rows.params[:, 0, r].sum()
        assert spec.parameters.params_bytes == rows.static.params[0, r]


@named
def test_the_replay_reads_it(case: tuple[str, int, str, str]) -> None:
    """Its ranks have the same blocks, run the same computations and take the same bytes."""
    own = estimator(case)
    for spec, rank in zip(own.rank_specs, describe_ranks(own), strict=True):
        blocks = [[block.name_with_article for block in chunk.blocks] for chunk in spec.chunks]
        assert [[piece.name for piece in chunk] for chunk in rank.chunks] == blocks
        assert (rank.computations, rank.stage_boundary_bytes) == (
            spec.computations,
            int(spec.buffers.stage_boundary_bytes),
        )
        assert rank.inputs_at_end == spec.buffers.held_inputs.at_end
        assert rank.reduces_by_chunk == spec.gradients.reduces_by_chunk
        assert (rank.gathered_params is not None) == spec.gradients.keeps_params_gathered
    played = replay_step_time(own, detail=False)
    for spec, spans in zip(own.rank_specs, played.spans, strict=True):
        assert [(s.kind, s.chunk, s.micro_batch) for s in spans[:-1]] == list(spec.computations)


@named
def test_one_row_is_described_as_among_others(case: tuple[str, int, str, str]) -> None:
    """Arrays over stages that stand for others have the entries of the ranks that they stand for."""
    own = estimator(case)
    ((_, shown),) = own._composed(np.arange(1), own.table.recompute_layers, every_stage=False)
    of = shown.stage_layers.shown.shown_index
    for r, spec in enumerate(own.rank_specs):
        assert shown.stage_layers.chunks_that_receive[of[r]].tolist() == [chunk.receives for chunk in spec.chunks]
        assert shown.stage_layers.chunks_that_send[of[r]].tolist() == [chunk.sends for chunk in spec.chunks]
        assert (shown.stage_layers.head_stage_index == of[r]) == spec.place.has_head


@pytest.mark.parametrize(
    ("framework", "pp", "waits"), [("megatron-local", 1, True), ("megatron-local", 2, False), ("megatron", 1, False)]
)
def test_tied_ends(framework: str, pp: int, waits: bool) -> None:
    """On one rank the embedding and the head are one weight; over two each has it, and they sum its gradients. The
    head's gradient waits for the embedding's but where products add to it by themselves."""
    own = estimator(("llama3-8b", 8, framework, f"pp={pp} micro_batch=1 recompute=none"), tied=True)
    for spec in own.rank_specs:
        assert spec.gradients.ties_ends == (pp == 1)
        assert spec.gradients.head_gradient_waits_for_embedding == waits
    assert (tied_embedding_all_reduce_s(own.row_with_every_stage)[0] > 0) == (pp > 1)


DERIVED = (
    "recompute_modes",
    "recompute_layers",
    "rank_with_head",
    ".shards.",
    ".static.",
    "stages.layers",
    "full_mode(",
    "base_mode(",
)


@pytest.mark.parametrize("path", sorted(REPLAY.rglob("*.py")), ids=lambda path: str(path.relative_to(REPLAY)))
def test_the_replay_derives_nothing_of_it(path: Path) -> None:
    """What these names say of a rank is in its spec."""
    text = path.read_text()
    assert [name for name in DERIVED if name in text] == []


def test_buckets_grow_with_data_parallelism_alone() -> None:
    """1e6 parameters for each of 64 ranks (dp 64, cp 2), not of the 128 that share gradients."""
    spec = estimator(("llama3-8b", 512, "megatron", "tp=2 pp=2 cp=2 micro_batch=1")).rank_specs[0]
    assert (spec.place.data_ranks, spec.place.dense_ranks) == (64, 128)
    assert spec.gradients.bucket_params == 64e6
