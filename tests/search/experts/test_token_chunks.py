"""Chunks of a strategy: MACT on a load, the search's dimension, and the paper's differences in throughput."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mofa
from mofa.errors import SpecError, StrategyError
from mofa.search.experts.token_chunks import _Curves, _most, plan_token_chunks
from mofa.specs.routing import RoutingSpec

DOCS = (Path(__file__).parents[3] / "docs" / "moe.md").read_text(encoding="utf-8")
MEGATRON = mofa.load_framework("megatron")
UNEVEN = mofa.load_workload("memfine-model-2").model_copy(
    update={"routing": RoutingSpec.parse("memfine-iteration-7").model_copy(update={"memory_quantile": 1.0})}
)


def cluster(gigabytes: float) -> mofa.ClusterSpec:  # type: ignore[name-defined]
    return mofa.load_cluster("h100-hgx", 32, overrides={"gpu.memory_bytes": f"{gigabytes} GB"})


def test_mact_fits_where_no_chunks_do_not_and_is_faster_than_the_most() -> None:
    report = plan_token_chunks(
        UNEVEN, cluster(86), "ep=32 micro_batch=1 recompute=full", framework=MEGATRON, iterations=4
    )
    by = {p.name: p for p in report.policies}
    assert not by["fixed 1"].fits and by["fixed 8"].fits and by["mact"].fits
    assert by["fixed 8"].step_s > by["mact"].step_s > by["fixed 1"].step_s
    assert by["mact"].peak_bytes <= report.limit_bytes < by["fixed 1"].peak_bytes
    wary = plan_token_chunks(
        UNEVEN, cluster(86), "ep=32 micro_batch=1 recompute=full", framework=MEGATRON, iterations=4, headroom=10.0
    ).policies[-1]
    assert wary.name == "past" and wary.fits and wary.mean_chunks > by["mact"].mean_chunks
    assert np.shape(report.chunks) == (4, 5) and report.layers == (3, 4, 5, 6, 7)
    assert {c for row in report.chunks for c in row} <= {1, 2, 4, 8}
    most = [report.max_rows[str(c)][0] for c in report.bins]
    assert most == sorted(most) and most[-1] > most[0]
    assert most[0] < report.largest_rows == pytest.approx(most[-1])
    assert len(report.to_frame()) == 20


def test_rows_that_fit_end_at_the_first_load_that_does_not() -> None:
    grid, flat = np.array([1.0, 2.0, 3.0]), np.zeros(3)
    curve = _Curves(grid, np.array([[1.0, 3.0, 1.0], [3.0, 1.0, 1.0], [1.0, 3.0, 2.0]]), np.zeros((3, 3)), flat)
    assert _most(curve, 2.0) == pytest.approx([1.5, 0.0, 3.0], abs=1e-3)


def test_with_much_memory_nothing_is_chunked_and_with_little_nothing_fits() -> None:
    strategy = "ep=32 micro_batch=1 recompute=full"
    ample = plan_token_chunks(UNEVEN, cluster(400), strategy, framework=MEGATRON, iterations=1)
    assert {c for row in ample.chunks for c in row} == {1}
    scarce = plan_token_chunks(UNEVEN, cluster(40), strategy, framework=MEGATRON, iterations=1)
    assert {c for row in scarce.chunks for c in row} == {0}
    assert not any(p.fits for p in scarce.policies)


def test_the_papers_differences_in_sign() -> None:
    """moe.md A.8, model II: 8 chunks -5.40 % (-6.8 here), MACT (1 to 4 chunks) +4.42 % of the throughput of full
    recomputation without chunks. Both signs come out where MemFine recomputes its chunks alone and keeps
    the rest of the layer, or where neighbouring chunks overlap; otherwise chunks can only cost."""
    machines = cluster(400)

    def step_s(recompute: str, chunks: int, overlap: bool = False) -> float:
        facts = mofa.load_framework({"name": "megatron", "chunk_overlap": overlap})
        strategy = f"ep=32 micro_batch=1 recompute={recompute} token_chunks={chunks}"
        return mofa.estimate(UNEVEN, machines, strategy, framework=facts, replay=False).step_s

    whole = step_s("full", 1)
    assert whole / step_s("none", 8) < 1 < whole / step_s("none", 2)
    assert whole / step_s("full", 8, overlap=True) < 1 < whole / step_s("full", 2, overlap=True)
    assert [step_s("full", c) for c in (1, 2, 4, 8)] == sorted(step_s("full", c) for c in (1, 2, 4, 8))
    # no assumption gives both figures: where MACT gains 4.4 %, 8 chunks gain too; where those lose 5.4 %, MACT loses
    mixed = (89 * step_s("selective:moe", 1) + sum(
        n * step_s("none", c, overlap=True) for c, n in ((2, 91), (4, 60)))) / 240  # fmt: skip
    assert whole / mixed - 1 == pytest.approx(0.0442, abs=0.01)
    assert whole / step_s("none", 8, overlap=True) > 1
    assert whole / step_s("full", 8) - 1 == pytest.approx(-0.068, abs=0.004)


def test_memory_agrees_with_the_replay() -> None:
    strategy = "ep=32 micro_batch=1 recompute=full token_chunks=4"
    played, closed = (
        mofa.estimate(UNEVEN, cluster(140), strategy, framework=MEGATRON, replay=replay).memory.allocated_bytes
        for replay in (True, False)
    )
    assert played == pytest.approx(closed, rel=0.02)


def test_the_search_picks_chunks_where_nothing_else_fits() -> None:
    fixed = {"tp": 1, "pp": 1, "cp": 1, "ep": 32, "micro_batch": 1, "recompute": "full", "dispatcher": "alltoall"}
    without = mofa.find_plans(UNEVEN, cluster(86), fix=fixed, top=1, replay=False, banded=False).report
    found = mofa.find_plans(
        UNEVEN, cluster(86), fix=fixed, with_=["token_chunks"], top=9, replay=False, banded=False
    ).report
    assert not without.plans
    chunks = [plan.strategy.token_chunks for plan in found.plans]
    assert chunks and chunks == sorted(chunks) and min(chunks) > 1  # the fewest that fit are the fastest
    assert found.space == 4 * without.space
    only = mofa.find_plans(
        UNEVEN, cluster(86), fix={**fixed, "token_chunks": 8}, top=9, replay=False, banded=False
    ).report
    assert [plan.strategy.token_chunks for plan in only.plans] == [8]


ASSUMPTIONS = {
    "the whole layer is recomputed, chunks one after the other": ("full", "full", False),
    "the whole layer is recomputed, neighbouring chunks overlap": ("full", "full", True),
    "the chunks alone are recomputed, one after the other": ("selective:moe", "none", False),
    "the chunks alone are recomputed, neighbouring chunks overlap": ("selective:moe", "none", True),
}
"""Row of docs/moe.md to what is recomputed without and with chunks, and whether these overlap."""


@pytest.mark.parametrize("words", ASSUMPTIONS)
def test_the_throughputs_in_the_docs_are_those_of_today(words: str) -> None:
    alone, chunked, overlap = ASSUMPTIONS[words]
    job, facts = UNEVEN.model_copy(update={"routing": RoutingSpec.parse("memfine-iteration-7")}), {"name": "megatron"}

    def step_s(recompute: str, chunks: int, over: bool) -> float:
        framework = mofa.load_framework({**facts, "chunk_overlap": over})
        strategy = f"ep=32 micro_batch=1 recompute={recompute} token_chunks={chunks}"
        return mofa.estimate(job, cluster(400), strategy, framework=framework, replay=False).step_s

    steps = {c: step_s(alone if c == 1 else chunked, c, overlap and c > 1) for c in (1, 2, 4, 8)}
    steps[0] = (89 * steps[1] + 91 * steps[2] + 60 * steps[4]) / 240  # as figure 5 counts them
    whole = step_s("full", 1, False)
    row = next(line for line in DOCS.splitlines() if line.startswith(f"| {words} | "))
    said = [float(cell.strip(" *+%").replace("\u2212", "-")) for cell in row.split("|")[2:-1]]
    assert said == pytest.approx([100 * (whole / steps[c] - 1) for c in (1, 2, 4, 8, 0)], abs=0.15)


def test_where_chunks_cannot_be() -> None:
    for strategy, name in (("ep=8 token_chunks=2", "torchtitan"), ("tp=2 token_chunks=2", "megatron")):
        job = UNEVEN if name == "torchtitan" else mofa.load_workload("llama3-8b")
        with pytest.raises(StrategyError, match=r"token_chunks \(2\) needs experts"):
            mofa.estimate(job, cluster(80), strategy, framework=mofa.load_framework(name))
    with pytest.raises(SpecError, match="token_chunks is what is chosen here"):
        plan_token_chunks(UNEVEN, cluster(80), "ep=32 token_chunks=2", framework=MEGATRON)
    with pytest.raises(SpecError, match="has no experts"):
        plan_token_chunks(mofa.load_workload("llama3-8b"), cluster(80), "tp=2", framework=MEGATRON)
    with pytest.raises(StrategyError, match=r"ep \(3\) must divide num_experts"):
        plan_token_chunks(UNEVEN, cluster(80), "ep=3", framework=MEGATRON)
    with pytest.raises(SpecError, match="bins"):
        plan_token_chunks(UNEVEN, cluster(80), "ep=32", framework=MEGATRON, bins=[0])


def test_overlap_hides_exchanges_and_holds_two_chunks() -> None:
    both = {}
    for overlap in (False, True):
        facts = mofa.load_framework({"name": "megatron", "chunk_overlap": overlap})
        strategy = "ep=32 micro_batch=1 recompute=none token_chunks=4"
        both[overlap] = mofa.estimate(UNEVEN, cluster(400), strategy, framework=facts, replay=False)
    assert both[True].step_s < 0.98 * both[False].step_s
    assert both[True].time.hidden["ep"] > both[False].time.hidden["ep"]
    assert both[True].memory.allocated_bytes >= both[False].memory.allocated_bytes


def test_dropping_bounds_the_load_that_is_chunked() -> None:
    strategy = "ep=32 micro_batch=1 recompute=full"
    dropping = UNEVEN.routing.model_copy(update={"capacity_factor": 1.0})
    bounded = plan_token_chunks(
        UNEVEN.model_copy(update={"routing": dropping}), cluster(88), strategy, framework=MEGATRON, iterations=2
    )
    assert {c for row in bounded.chunks for c in row} == {1}
    plain = plan_token_chunks(UNEVEN, cluster(88), strategy, framework=MEGATRON, iterations=2)
    assert plain.policies[0].peak_bytes > bounded.policies[0].peak_bytes


def test_the_stage_with_the_most_uneven_layers_sets_the_pace(tmp_path: Path) -> None:
    """All of the unevenness in the last stage's two layers, or half of it in each of two stages: the same sum over
    layers, but the slowest stage runs m = 120 times a step, the others fill the pipeline once. A dense trace whose
    layers are alike gives the step of an estimate with that load."""
    strategy = "pp=4 ep=8 micro_batch=1 recompute=full"

    def step_s(uneven: set[int]) -> float:
        trace = tmp_path / "t.csv"
        rows = [
            f"0,{layer},{e},{600 if layer in uneven and e < 32 else 100}" for layer in range(3, 8) for e in range(256)
        ]
        trace.write_text("iteration,layer,expert,tokens\n" + "\n".join(rows) + "\n", encoding="utf-8")
        job = UNEVEN.model_copy(update={"routing": RoutingSpec(kind="counts", file=str(trace))})
        report = plan_token_chunks(job, cluster(400), strategy, framework=MEGATRON, bins=[1])
        assert report.policies[0].name == "fixed 1"
        return report.policies[0].step_s

    even, one, both, elsewhere, alike = (step_s(x) for x in (set(), {6}, {6, 7}, {4, 6}, set(range(3, 8))))
    assert even < one < both
    assert both - even == pytest.approx(2 * (one - even), rel=0.02)  # both are in the slowest stage
    assert elsewhere - one < 0.1 * (both - one)  # stage 2 stays faster than stage 3, which has the head
    whole = mofa.estimate(
        UNEVEN.model_copy(update={"routing": RoutingSpec()}), cluster(400), strategy, framework=MEGATRON, replay=False
    )
    assert even == pytest.approx(whole.step_s, rel=1e-6)
    # the trace is still that of the layers that are all alike; between 1 and its load lie other points of the grid
    job = UNEVEN.model_copy(update={"routing": RoutingSpec(kind="counts", file=str(tmp_path / "t.csv"))})
    uneven = mofa.estimate(job, cluster(400), strategy, framework=MEGATRON, replay=False)
    assert alike == pytest.approx(uneven.step_s, rel=0.005)


def test_chunks_hold_no_weight_twice() -> None:
    """More chunks never take more memory, in the closed form or played; static memory is the same."""
    for replay in (False, True):
        plans = [
            mofa.estimate(
                UNEVEN, cluster(400), f"ep=32 micro_batch=1 recompute=full token_chunks={c}", framework=MEGATRON,
                replay=replay,
            )
            for c in (1, 2, 8)
        ]  # fmt: skip
        device = [plan.memory.device_bytes for plan in plans]
        assert device == sorted(device, reverse=True)
        states = [plan.memory.by_component["optimizer_states"] for plan in plans]
        assert max(states) <= 1.001 * min(states)
