"""What recomputed layers of experts were given stays until their dispatchers are renewed: recorded and by hand."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import mofa
from mofa.blocks.build import BlockTapes, CostedLayerKind, layer_forward_tape, layer_tapes
from mofa.blocks.chunks import split_into_token_chunks
from mofa.blocks.frameworks.recompute import recompute_of_layer
from mofa.blocks.op import RENEWAL
from mofa.blocks.recomputation import NO_RECOMPUTE, Recompute
from mofa.cost.estimate import TableEstimator
from mofa.cost.memory.dispatcher_retention import RetainedBytesAtPeakCandidates
from mofa.cost.memory.peak import stage_peak_bytes
from mofa.replay.memory.rank_memory import ReplayedRankMemory, play_memory
from mofa.replay.memory.shared_recordings import SharedRecordings
from mofa.replay.memory.skipped_rounds import RoundSkipper
from mofa.replay.rank.from_estimator import describe_ranks, gathered_row_of_strategy
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.strategy import RecomputeSpec, StrategyTable
from tests.blocks.small import EXPERTS, context, framework, llama, primitives
from tests.replay.runs import load

MIB = 1 << 20
BEGINNINGS = Path(__file__).parents[3] / "reference_runs" / "beginnings"
TRACED = "mc2-ep2-dsmoe16b-4l-full-skewed-traced-beginning"
INPUT, GRADIENT = "input of a layer", "gradient of a layer's output"


def _large(played: ReplayedRankMemory) -> Counter[tuple[str, int]]:
    """Activations of a MiB and more at the end of a play, and how many of each. [B]"""
    end = played.journal.instant_at(played.journal.num_events - 1, 0)
    kept = [one for one in end.tensors if one.group == "activations" and one.bytes >= MIB]
    return Counter({(one.name, one.bytes // one.count): one.count for one in kept})


def test_between_two_steps_there_is_what_was_recorded() -> None:
    """Of four layers recomputed whole three have experts: three inputs of 4 x 4096 x 2048 in bf16 and as many gradients
    are alive when the second recorded step ends (and the routers' small tensors, which are not played)."""
    with gzip.open(BEGINNINGS / f"{TRACED}.0.json.gz", "rt") as file:
        found = json.load(file)
    alive: dict[tuple[int, int], tuple[int, int]] = {}
    for i, (action, nbytes, address, stream) in enumerate(
        zip(found["action"], found["bytes"], found["address"], found["stream"], strict=True)
    ):
        if found["actions"][action] == "alloc":
            alive[address, stream] = i, nbytes
        elif found["actions"][action] == "free_requested":
            alive.pop((address, stream), None)
    recorded = Counter(n for i, n in alive.values() if i >= found["step_starts"][1] and n >= 4 * MIB)
    (rank,) = describe_ranks(load(TRACED).estimator)
    played = _large(play_memory(rank))
    assert recorded == {4 * 4096 * 2048 * 2: 6}
    assert played == {(INPUT, 4 * 4096 * 2048 * 2): 3, (GRADIENT, 4 * 4096 * 2048 * 2): 3}


@pytest.mark.parametrize(
    "name",
    [
        "h100-mc1-mixtral-1l-full-skewed", "mc1-phimoe-2l-full-skewed", "mc2-ep2-mixtral-3l-full-accumulate",
        "mc2-ep2-mixtral-3l-moe", "mc2-tp2-ep2-qwen30b-4l-full",
    ],
)  # fmt: skip
def test_measured_peaks_hold_what_lingers(name: str) -> None:
    """Optimizer steps of runs that may be learned from, 0.4 to 0.9 % too little without."""
    run = load(name)
    assert play_memory(describe_ranks(run.estimator)[0]).allocated == pytest.approx(run.allocated, rel=5e-4)


def test_a_checkpoint_of_the_experts_alone_leaves_the_norms_output() -> None:
    """Three layers of 4096 x 4096 (or what the run has) in bf16: what went in behind the norm, and its gradient."""
    run = load("mc2-ep2-mixtral-3l-moe")
    batch, model = run.estimator.workload.batch, run.estimator.workload.model
    nbytes = int(run.estimator.table.micro_batch[0]) * batch.seq_len * model.hidden * 2
    (rank,) = describe_ranks(run.estimator)
    assert _large(play_memory(rank)) == {("mlp_norm.out", nbytes): 3, ("d:mlp_norm.out", nbytes): 3}


FULL = Recompute(kind="full", reentrant=True)
EXPERTS_ALONE = recompute_of_layer(
    framework("megatron"), RecomputeSpec.parse("selective:moe"), None, llama(moe=EXPERTS)
)


def _tapes(dispatcher: str, recompute: Recompute, *, moe: bool = True, chunks: int = 1) -> BlockTapes:
    ctx = context(llama(moe=EXPERTS), framework("megatron", dispatcher=dispatcher), ep=2)
    p = primitives(ctx)
    return layer_tapes(
        ctx,
        p,
        CostedLayerKind(moe),
        recompute,
        split_into_token_chunks(layer_forward_tape(ctx, p, CostedLayerKind(moe)), chunks),
    )


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "deepep"])
def test_dispatchers_are_renewed_with_what_they_keep(dispatcher: str) -> None:
    """The all-to-all one keeps the router's probabilities, the others those that came with the tokens, forward and
    again (token_dispatcher.py: ``self.probs``, ``self.local_probs``, ``self.dispatched_probs``)."""
    tapes = _tapes(dispatcher, FULL)
    for tape, again in ((tapes.forward, ""), (tapes.backward, "~")):
        names = [op.name for op in tape.ops]
        sent, renewed = names.index(f"moe.dispatch{again}"), names.index(RENEWAL + again)
        assert names.index(f"router.topk{again}") < renewed
        assert (renewed < sent) == (dispatcher == "alltoall")
    assert tapes.backward.retained_by_dispatcher == (tapes.backward.outputs[0], "x")


def test_what_lingers_is_what_the_checkpoint_around_the_router_was_given() -> None:
    assert _tapes("alltoall", EXPERTS_ALONE).backward.retained_by_dispatcher[1] == "mlp_norm.out"
    discarded = recompute_of_layer(
        framework("megatron"), RecomputeSpec.parse("selective:moe+layernorm"), None, llama(moe=EXPERTS)
    )
    assert _tapes("alltoall", discarded).backward.retained_by_dispatcher[1] == "mlp_norm.out restored"
    for none in (
        _tapes("alltoall", NO_RECOMPUTE), _tapes("alltoall", FULL, moe=False), _tapes("alltoall", FULL, chunks=2),
        _tapes("alltoall", recompute_of_layer(framework("megatron"), RecomputeSpec.parse("selective"), None,
        llama(moe=EXPERTS))),
    ):  # fmt: skip
        assert not none.backward.retained_by_dispatcher


def _estimator(pp: int, vpp: int, m: int, *recompute: str, layers: int = 16) -> TableEstimator:
    """A narrow model with few parameters, whose activations are most of its memory; a row for each recomputation."""
    job = mofa.load_workload("mixtral-8x7b", seq_len=4096, global_batch=4 * m)
    job = job.model_copy(update={"model": llama(moe=EXPERTS, num_layers=layers)})
    cluster, fw = mofa.load_cluster("h200-hgx", pp), framework("megatron")
    plan = {"tp": 1, "pp": pp, "vpp": vpp, "ep": 1, "micro_batch": 4}
    rows = [checked_strategy_row(job, cluster, fw, {**plan, "recompute": one}) for one in recompute]
    modes_ = tuple(mode for row in rows for mode in row.recompute_modes)
    rows = [replace(row, recompute=np.array([n]), recompute_modes=modes_) for n, row in enumerate(rows)]
    table = StrategyTable.concatenated(rows)
    return TableEstimator(job, cluster, fw, table, routing_loads_by_ep(job, table))


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (4, 1), (2, 2), (2, 4)])
def test_the_closed_form_is_the_replays(pp: int, vpp: int) -> None:
    """In backwards of stages without the head 62 tensors of 16 MiB linger of 32 layers, and more of several chunks;
    what is sent and received is there in both."""
    estimator = _estimator(pp, vpp, 8, "full", layers=32 * pp)
    rows, ranks = gathered_row_of_strategy(estimator), describe_ranks(estimator)
    closed = stage_peak_bytes(rows)
    for r, rank in enumerate(ranks):
        played = play_memory(rank)
        assert float(closed.allocated[0, r]) == pytest.approx(played.allocated, rel=0.001), r


def test_at_the_optimizers_step_all_of_it_is_there() -> None:
    """A micro-batch of 4 x 4096 tokens, 512 wide: two tensors in bf16 of each layer, in every chunk."""
    for pp, vpp in ((1, 1), (2, 4)):
        rows = gathered_row_of_strategy(_estimator(pp, vpp, 8, "full"))
        assert RetainedBytesAtPeakCandidates(rows).between_steps_bytes.tolist() == [
            [2 * 16 / pp * 4 * 4096 * 512 * 2] * pp
        ]
    assert not RetainedBytesAtPeakCandidates(gathered_row_of_strategy(_estimator(1, 1, 8, "selective")))


def test_rows_without_anything_that_lingers_stay_as_they_are() -> None:
    """Beside one that has it in the same table: on two stages of two chunks."""
    which = ("selective", "selective:moe")
    both = _estimator(2, 2, 8, *which, layers=8).breakdown().allocated_bytes
    alone = [_estimator(2, 2, 8, one, layers=8).breakdown().allocated_bytes for one in which]
    assert both.tolist() == pytest.approx([float(one[0]) for one in alone], rel=1e-12)


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (2, 2)])
def test_repeating_what_lingers_is_playing_it(pp: int, vpp: int) -> None:
    """Every event, forwards and backwards in turn and of a tail, and of a rank that knows another's notes."""
    ranks, known = describe_ranks(_estimator(pp, vpp, 12, "full", layers=8)), SharedRecordings()
    for rank in (*ranks, *ranks):
        whole = play_memory(rank, skip_rounds=False)
        with mock.patch.object(RoundSkipper, "is_round_end", return_value=False):
            for short in (play_memory(rank), play_memory(rank, recordings=known)):
                for field in ("instructions", "sizes", "passages", "computations", "grown", "steps"):
                    assert getattr(short.journal, field) == getattr(whole.journal, field), field
                assert len(short.journal.repetitions) > len(
                    rank.computations
                )  # of two steps more than half are repeated
        assert play_memory(rank).peak_reserved == whole.peak_reserved
