"""Traces follow the rules of the trace-event format, and hold what was played."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest

import mofa
from mofa.replay.step import time_of
from mofa.replay.timed import TimeReplayed
from mofa.replay.trace import trace_events
from mofa.search.playing import estimator_of

STRATEGIES = {
    "megatron": "tp=2 pp=2 vpp=2 dp=2 micro_batch=1",
    "torchtitan": "pp=4 vpp=2 dp=2 schedule=zbv micro_batch=1",
}


@lru_cache
def played(framework: str) -> TimeReplayed:
    job, machines = mofa.load_workload("llama3-8b", global_batch=16), mofa.load_cluster("h100-hgx", 8)
    estimator = estimator_of(job, machines, mofa.load_framework(framework), STRATEGIES[framework])
    ranks = int(estimator.table.pp[0])
    return time_of(estimator, watched=frozenset((r, i) for r in range(ranks) for i in (0, 1)))


def events(framework: str, ranks: list[int] | None = None) -> list[dict[str, Any]]:
    step = played(framework)
    counts = [(0.0, 1, 2), (step.step_s, 3, 4)]
    return trace_events(step, ranks if ranks is not None else list(range(len(step.spans))), lambda rank: counts)


@pytest.mark.parametrize("framework", STRATEGIES)
def test_rules_of_the_format(framework: str) -> None:
    """Every event has its phase's fields; slices of a track nest or follow; a flow begins and ends inside slices."""
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    names: set[tuple[int, int]] = set()
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events(framework):
        assert event["ph"] in "XMCsf"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                names.add((event["pid"], event["tid"]))
            continue
        assert event["ts"] >= 0.0
        if event["ph"] == "X":
            assert event["dur"] >= 0.0
            tracks[event["pid"], event["tid"]].append(event)
        elif event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        else:
            flows[event["id"]].append(event)
    assert set(tracks) <= names
    for track in tracks.values():
        for before, after in pairwise(track):
            assert before["ts"] <= after["ts"]
            end = before["ts"] + before["dur"]
            assert after["ts"] >= end - 0.002 or after["ts"] + after["dur"] <= end + 0.002, (before, after)
    assert flows
    for pair in flows.values():
        start, finish = pair
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert start["ts"] <= finish["ts"]
        for end in pair:
            assert any(
                s["ts"] - 0.002 <= end["ts"] <= s["ts"] + s["dur"] + 0.002 for s in tracks[end["pid"], end["tid"]]
            )


@pytest.mark.parametrize("framework", STRATEGIES)
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
