"""Traces follow the rules of the trace-event format, and hold what was played."""

from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache
from typing import Any

import pytest

import mofa
from mofa.replay.time.perfetto import trace_events
from mofa.replay.time.step import replay_step_time
from mofa.replay.time.time_replayed import ReplayedTime
from mofa.search.strategy_estimator import strategy_estimator
from tests.replay.importer import imported

# framework, model, strategy, jitter
PLANS = {
    "megatron": ("megatron", "llama3-8b", "tp=2 pp=2 vpp=2 dp=2 micro_batch=1", 0.0),
    "torchtitan": ("torchtitan", "llama3-8b", "pp=4 vpp=2 dp=2 schedule=zbv micro_batch=1 recompute=none", 0.0),
    "gathers ahead": ("torchtitan", "llama3-8b", "dp=8 micro_batch=1", 0.0),
    "experts, jitter": ("torchtitan", "qwen3-30b-a3b", "pp=2 ep=4 dp=4 micro_batch=1", 0.05),
    "interleaved, jitter": ("megatron", "llama3-8b", "tp=2 pp=2 vpp=2 dp=2 micro_batch=1", 0.05),
}
FRAMEWORKS = ("megatron", "torchtitan")


@lru_cache
def played(plan: str) -> ReplayedTime:
    framework, model, strategy, jitter = PLANS[plan]
    job, machines = mofa.load_workload(model, global_batch=16), mofa.load_cluster("h100-hgx", 8)
    estimator = strategy_estimator(job, machines, mofa.load_framework(framework), strategy)
    ranks = int(estimator.table.pp[0])
    return replay_step_time(estimator, watched=frozenset((r, i) for r in range(ranks) for i in (0, 1)), jitter=jitter)


def events(plan: str, ranks: list[int] | None = None) -> list[dict[str, Any]]:
    step = played(plan)
    counts = [(0.0, 1, 2), (step.step_s, 3, 4)]
    return trace_events(step, ranks if ranks is not None else list(range(len(step.spans))), lambda rank: counts)


@pytest.mark.parametrize("plan", PLANS)
def test_perfetto_drops_nothing(plan: str) -> None:
    """Its importer's rules, in its whole nanoseconds: all slices nest or follow, both ends of every arrow are inside
    one, every track has a name, and no statistic of an error counts."""
    given = events(plan)
    out = imported(json.dumps({"traceEvents": given}, allow_nan=False))
    assert not +out.stats
    phases = Counter(event["ph"] for event in given)
    assert sum(map(len, out.slices.values())) == phases["X"] > 100
    assert len(out.flows) == phases["s"] == phases["f"]
    assert bool(out.flows) == (len(played(plan).spans) > 1)
    assert all(sent.replace("send", "receive") == received for sent, received in out.flows)
    assert set(out.slices) <= set(out.threads)
    assert set(out.processes) == {pid for pid, _ in out.threads}
    assert all(values == sorted(values) for values in out.counters.values())
    assert set(out.counters) == {(pid, f"{name} bytes") for pid in out.processes for name in ("allocated", "reserved")}


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({"ts": -1.0}, "json_parser_failure"),
        ({"dur": -2.0}, "slice_negative_duration"),
        ({"tid": "a"}, "json_parser_failure"),
        ({"name": ""}, "json_tokenizer_failure"),
        ({"ph": "Q"}, "json_parser_failure"),
        ({"dur": 5.0}, "slice_drop_overlapping_complete_event"),
    ],
)
def test_the_importer_counts_what_is_wrong(change: dict[str, Any], counts: str) -> None:
    """Two slices that touch are fine; each of these changes to the first is not. Arrows need slices, too."""
    base = {"ph": "X", "name": "a", "pid": 0, "tid": 0, "dur": 2.0, "args": {}}
    good = [{**base, "ts": 1.0}, {**base, "ts": 3.0, "dur": 4.0}]
    assert not +imported(json.dumps(good)).stats
    assert imported(json.dumps([{**good[0], **change}, good[1]])).stats[counts] == 1
    arrow = {"ph": "s", "name": "x", "cat": "c", "id": 1, "pid": 0, "tid": 0}
    assert imported(json.dumps([*good, {**arrow, "ts": 9.0}])).stats["flow_no_enclosing_slice"] == 1
    assert imported(json.dumps([*good, {**arrow, "ts": 2.0}])).stats["flow_without_end"] == 1
    assert imported(json.dumps([*good, {**arrow, "ph": "f", "ts": 2.0}])).stats["flow_end_without_start"] == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_trace_holds_what_was_played(framework: str) -> None:
    step = played(framework)
    slices = [event for event in events(framework) if event["ph"] == "X"]
    computed = [event for event in slices if "chunk" in event["args"]]
    assert len(computed) == sum(map(len, step.spans))
    whole = max(event["ts"] + event["dur"] for event in computed)
    assert whole == pytest.approx(1e6 * max(spans[-1].end_s for spans in step.spans), abs=0.01)
    ops = sum(event["dur"] for event in slices if event["args"].get("family") == "gemm")
    assert ops == pytest.approx(1e6 * sum(op.end_s - op.start_s for rank in step.ops for op in rank
                                          if op.family == "gemm"), rel=1e-3)  # fmt: skip
    sends = [t for rank in step.transfers for t in rank if t.kind.startswith("SEND")]
    assert len([event for event in events(framework) if event["ph"] == "s"]) == len(sends)
    assert {event["name"] for event in events(framework) if event["ph"] == "C"} == {"allocated", "reserved"}


def test_only_ranks_that_are_shown() -> None:
    some = events("torchtitan", [0, 3])
    assert {event["pid"] for event in some} == {0, 3}
    assert not [event for event in some if event["ph"] in "sf"]  # neighbours are not shown: no arrow has two ends
