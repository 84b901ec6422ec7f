"""FSDP's collectives on the clocks of the replay: each is there once, and what computing loses beside two of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import mofa
from mofa.blocks.work import Collective
from mofa.cost.estimate import TableEstimator
from mofa.cost.step_time.micro_batch import micro_batch_passes
from mofa.replay.time.kernel_runs import FAMILY, NOW, SideStreamOp, one_kernel_step
from mofa.replay.time.step import replay_step_time
from mofa.replay.time.stream_clocks import StreamClocks
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.params import layer_params


def estimator_of(
    model: dict[str, Any], framework: dict[str, Any], batch: int, workload: str = "llama3-8b"
) -> TableEstimator:
    job = mofa.load_workload(workload, overrides={"model": model, "batch": {"global_batch": batch, "seq_len": 1024}})
    machines, made = mofa.load_cluster("h200-hgx", 8), mofa.load_framework(framework)
    row = checked_strategy_row(job, machines, made, "dp=8 micro_batch=1 recompute=none")
    return TableEstimator(job, machines, made, row, routing_loads_by_ep(job, row))


def sent_by_a_micro_batch(estimator: TableEstimator) -> tuple[Counter[float], Counter[float]]:
    """Bytes of the first micro-batch's gathers and reductions, each as often as it is played."""
    played = replay_step_time(estimator, watched=frozenset({(0, 0)}))
    works = [work for op in played.ops[0] for work in op.works if isinstance(work, Collective)]
    gathers, reductions = (
        Counter(float(work.payload) for work in works if work.kind == kind) for kind in ("all_gather", "reduce_scatter")
    )
    return gathers, reductions


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_layer_is_gathered_twice_and_reduced_once(num_layers: int) -> None:
    """Once for its forward and once for its backward, as are the embedding; the head, whose backward is next, once."""
    estimator = estimator_of({"num_layers": num_layers}, {"name": "torchtitan"}, 16)
    model = estimator.workload.model
    layer = layer_params(model, False)
    params = float(layer.matrices_tp + layer.replicated)
    embedding = float(model.vocab * model.hidden)
    gathers, reductions = sent_by_a_micro_batch(estimator)
    assert gathers == {2 * params: 2 * num_layers, 2 * embedding: 2, 2 * (embedding + model.hidden): 1}
    assert reductions == {4 * params: num_layers, 4 * embedding: 1, 4 * (embedding + model.hidden): 1}


def test_a_layer_gathers_ahead_the_kind_that_comes_next() -> None:
    """A dense layer in front of two with experts, which are gathered as often as it is."""
    estimator = estimator_of({"num_layers": 3}, {"name": "torchtitan"}, 16, "deepseek-v2-lite")
    gathers, reductions = sent_by_a_micro_batch(estimator)
    by_layer = {4 * nbytes / 2: number for nbytes, number in gathers.items()}
    assert all(by_layer[nbytes] == 2 * number for nbytes, number in reductions.items() if number == 2)
    assert sum(gathers.values()) == 2 * 3 + 3 and sum(reductions.values()) == 5


def test_the_root_of_fsdp1_stays_gathered() -> None:
    """Neither the embedding nor the head is gathered for the backward."""
    estimator = estimator_of({"num_layers": 3}, {"name": "fsdp1"}, 16)
    model = estimator.workload.model
    ends = {2.0 * (model.vocab * model.hidden), 2.0 * (model.vocab * model.hidden + model.hidden)}
    gathers, _ = sent_by_a_micro_batch(estimator)
    assert all(number == 1 for nbytes, number in gathers.items() if nbytes in ends)


@pytest.mark.parametrize("num_layers", [3, 6])
def test_closed_form_counts_ends_as_the_replay_does(num_layers: int) -> None:
    """One sequence a GPU of two experts a token: gathers and reductions take longer than what is computed."""
    estimator = estimator_of({"num_layers": num_layers}, {"name": "torchtitan"}, 32, "mixtral-8x7b")
    rows = estimator.row_with_every_stage
    assert micro_batch_passes(rows).spared_at_ends_s[0] > 0.0  # type: ignore[index]
    closed = float(estimator.breakdown().step_s[0])
    assert closed == pytest.approx(replay_step_time(estimator, detail=False).step_s, rel=0.03)


def test_two_collectives_at_once_leave_what_each_leaves_of_the_other() -> None:
    """Beside one that costs half and another that does, a quarter is left: 2 s of both, then 1.5 s alone."""
    clock = StreamClocks(sync_s=0.0)
    ops = [
        SideStreamOp(stream, 2.0, 0.0, FAMILY["dp"], stream, (NOW,), (stream,), 0.5)
        for stream in ("fsdp_reduce", "dp_replicate")
    ]
    clock.play_steps([*ops, one_kernel_step("product", 2.0, 0.0, "gemm", ())])
    assert clock.compute == pytest.approx(3.5)
