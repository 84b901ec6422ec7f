"""A rank as a graph: its ops fill the step to the last nanosecond, and nothing begins before what it waits for."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from itertools import pairwise

import pytest

import mofa
from mofa.blocks.work import Collective
from mofa.cost.estimate import TableEstimator
from mofa.replay.rank.from_estimator import gathered_row_of_strategy
from mofa.replay.time.step import replay_step_time
from mofa.replay.time.time_replayed import ReplayedTime
from mofa.replay.time.trace_graph import UNRECORDED, GraphNode, rank_graph
from mofa.search.strategy_estimator import strategy_estimator

# framework, model, strategy
PLANS = {
    "interleaved": ("megatron", "llama3-8b", "tp=2 pp=2 vpp=2 dp=2 micro_batch=1"),
    "1f1b": ("megatron", "llama3-8b", "tp=2 pp=4 micro_batch=1"),
    "context": ("megatron", "llama3-8b", "cp=2 tp=2 dp=2 micro_batch=1 overlap_param_gather=false"),
    "experts": ("megatron", "mixtral-8x7b", "tp=2 ep=4 etp=1 pp=2 micro_batch=1 recompute=full dispatcher=alltoall"),
    "zbv": ("torchtitan", "llama3-8b", "pp=4 vpp=2 dp=2 schedule=zbv micro_batch=1 recompute=none"),
    "fsdp": ("torchtitan", "llama3-8b", "dp=8 micro_batch=1"),
    "hsdp": ("torchtitan", "llama3-8b", "dp=8 dp_replicate=2 micro_batch=1"),
    "experts of torchtitan": ("torchtitan", "qwen3-30b-a3b", "pp=2 ep=4 dp=4 micro_batch=1"),
}
NANOSECOND = 1e-9
"""Times closer than that are one: the replay's own cache counts tenths of it. [s]"""


@lru_cache
def estimator_of(plan: str) -> TableEstimator:
    framework, model, strategy = PLANS[plan]
    job, machines = mofa.load_workload(model, global_batch=16), mofa.load_cluster("h100-hgx", 8)
    return strategy_estimator(job, machines, mofa.load_framework(framework), strategy)


def played(plan: str, micro_batches: int = 16) -> ReplayedTime:
    estimator = estimator_of(plan)
    ranks = int(estimator.table.pp[0])
    return replay_step_time(estimator, watched=frozenset((r, i) for r in range(ranks) for i in range(micro_batches)))


def graphs(plan: str, step: ReplayedTime) -> list[list[GraphNode]]:
    ranks = gathered_row_of_strategy(estimator_of(plan)).stage_layers.stages.rank_of_each_chunk
    return [rank_graph(step, rank, ranks) for rank in range(len(step.spans))]


@pytest.mark.parametrize("plan", PLANS)
def test_ops_and_waits_fill_the_step(plan: str) -> None:
    """What the computing stream does and what it waits for, which the replay counts by itself, are the step."""
    step = played(plan)
    for rank, graph in enumerate(graphs(plan, step)):
        computing_s = sum(node.end_s - node.start_s for node in graph if node.stream == "compute")
        assert computing_s + sum(step.idle[rank].values()) == pytest.approx(step.step_s, rel=1e-9)
        assert not any(node.family == UNRECORDED for node in graph)


@pytest.mark.parametrize("plan", PLANS)
def test_computations_without_ops_are_a_node_each(plan: str) -> None:
    step = played(plan, 1)
    for rank, graph in enumerate(graphs(plan, step)):
        unrecorded = sorted((node.start_s, node.end_s) for node in graph if node.family == UNRECORDED)
        spans = [span for span in step.spans[rank] if span.kind == "O" or span.micro_batch >= 1]
        assert unrecorded == sorted((span.start_s, span.end_s) for span in spans if span.end_s > span.start_s)
        assert all(other < number for number, node in enumerate(graph) for other in node.after)


@pytest.mark.parametrize("plan", PLANS)
def test_nothing_begins_before_what_it_waits_for(plan: str) -> None:
    for graph in graphs(plan, played(plan)):
        for number, node in enumerate(graph):
            for other in node.after:
                assert other < number, (node.name, graph[other].name)
                assert graph[other].end_s <= node.start_s + NANOSECOND, (node.name, graph[other].name)
        streams: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for node in graph:
            if node.kind == "op":
                streams[node.stream].append((node.start_s, node.end_s))
        for name, busy in streams.items():
            assert all(a[1] <= b[0] + NANOSECOND for a, b in pairwise(sorted(busy))), name


@pytest.mark.parametrize("plan", PLANS)
def test_an_op_begins_when_the_last_that_it_waits_for_ends_or_its_host_launches_it(plan: str) -> None:
    """Of ops of the computing stream that begin later, the device waited for its host, as far as the replay says."""
    step = played(plan)
    for rank, graph in enumerate(graphs(plan, step)):
        late_s = 0.0
        for node in graph:
            if node.stream == "compute" and node.after:
                late_s += max(node.start_s - max(graph[other].end_s for other in node.after), 0.0)
        allowed = sum(step.idle[rank].get(name, 0.0) for name in ("host_idle", "exchange", "drain"))
        assert late_s <= allowed + 1e-6 * step.step_s


@pytest.mark.parametrize("plan", ["interleaved", "1f1b", "experts", "zbv", "experts of torchtitan"])
def test_both_ends_of_a_hand_over_share_a_tag(plan: str) -> None:
    every = graphs(plan, played(plan))
    sends = {(rank, node.peer, node.tag) for rank, graph in enumerate(every) for node in graph if node.kind == "send"}
    receives = [
        (node.peer, rank, node.tag) for rank, graph in enumerate(every) for node in graph if node.kind == "receive"
    ]
    assert sends == set(receives) and len(receives) == len(sends) > 0
    for graph in every:
        users = {other for node in graph for other in node.after}
        for number, node in enumerate(graph):
            assert node.kind != "receive" or number in users
            assert node.kind != "send" or any(graph[other].kind == "op" for other in node.after)


def test_collectives_say_what_they_send() -> None:
    """By hand: a sequence-parallel boundary of Llama 3 8B has 8,192 tokens of 4,096 numbers in bf16."""
    (graph, *_) = graphs("1f1b", played("1f1b"))
    of_tp = [work for node in graph if node.stream == "tp" for work in node.works]
    assert {work.payload for work in of_tp if isinstance(work, Collective)} >= {8192 * 4096 * 2.0}
    (graph,) = graphs("fsdp", played("fsdp"))
    gathers = [node for node in graph if node.stream == "fsdp_gather"]
    assert all(node.works for node in gathers) and any(isinstance(node.works[0], Collective) for node in gathers)
    unknown = [node for node in graph if node.family in ("tp", "ep", "dp", "cp") and not node.works]
    assert all("slowed beside" in node.name for node in unknown)


def test_a_rank_that_nobody_watched_has_no_graph() -> None:
    step = replay_step_time(estimator_of("1f1b"), watched=frozenset({(0, 0)}))
    with pytest.raises(ValueError, match="rank 1"):
        rank_graph(step, 1, (0, 1, 2, 3))
