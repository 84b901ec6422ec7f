"""Results beside each other: parts sum to their totals, and what differs is what was asked for otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest

import mofa
from mofa.errors import SpecError
from mofa.plan.comparison import MOST_RESULTS, Comparison, compare, compare_results, single_result
from mofa.plan.result import Plan

JOB = mofa.load_workload("llama3-8b", global_batch=64)
MACHINES = mofa.load_cluster("h100-hgx", 8)


def estimated(strategy: str, gpus: int = 8, batch: int = 64) -> Plan:
    job = JOB if batch == 64 else mofa.load_workload("llama3-8b", global_batch=batch)
    return mofa.estimate(job, mofa.load_cluster("h100-hgx", gpus), strategy, replay=False)


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return [estimated("tp=2 sp=true"), estimated("tp=8 sp=true recompute=full"), estimated("pp=2 micro_batch=1")]


def test_parts_sum_to_steps_and_memory(plans: list[Plan]) -> None:
    comparison = compare(*plans)
    assert comparison.time_unit == "s"
    for i, (plan, result) in enumerate(zip(plans, comparison.results, strict=True)):
        assert sum(part.by_result[i] for part in comparison.time) == pytest.approx(plan.step_s)
        assert sum(part.by_result[i] for part in comparison.memory) == pytest.approx(plan.memory.device_bytes)
        assert result.tokens_per_step == 64 * JOB.batch.seq_len
        assert sum(part.differences[i] for part in comparison.time) == pytest.approx(plan.step_s - plans[0].step_s)
    assert {"strategy.tp", "strategy.pp", "strategy.recompute"} <= set(comparison.differs)
    assert comparison.differs["strategy.tp"] == (2, 8, 1)
    assert "strategy.cp" not in comparison.differs
    assert Comparison.model_validate_json(comparison.model_dump_json()) == comparison


@pytest.mark.parametrize(("gpus", "batch"), [(16, 64), (8, 128), (16, 128)])
def test_other_batches_or_gpus_are_compared_by_tokens(plans: list[Plan], gpus: int, batch: int) -> None:
    other = estimated("tp=2 sp=true", gpus, batch)
    comparison = compare(plans[0], other)
    assert comparison.time_unit == "GPU s per million tokens"
    for i, plan in enumerate((plans[0], other)):
        gpu_s = plan.step_s * (8, gpus)[i] / ((64, batch)[i] * JOB.batch.seq_len) * 1e6
        assert sum(part.by_result[i] for part in comparison.time) == pytest.approx(gpu_s)
        assert comparison.results[i].gpu_s_per_million_tokens == pytest.approx(gpu_s)


def test_a_search_gives_its_best_plan_or_another() -> None:
    report = mofa.find_plans(JOB, MACHINES, fix={"pp": 1, "cp": 1}, top=2, replay=False).report
    raw = json.loads(report.model_dump_json())
    assert single_result(raw)["strategy"] == raw["plans"][0]["strategy"]
    second = single_result(raw, 2)
    assert second["strategy"] == raw["plans"][1]["strategy"] and second["cluster"] == raw["cluster"]
    assert compare(report, report.plans[1]).results[0].step_s == report.plans[0].step_s
    with pytest.raises(SpecError, match="plan 3: is not there, the search has 2"):
        single_result(raw, 3)
    with pytest.raises(SpecError, match="plan 2: is not there, the result is of one strategy"):
        single_result(second, 2)


def test_results_of_other_versions_are_compared_by_what_both_say(plans: list[Plan]) -> None:
    """Versions of mofa: a component that one does not know is nothing in it, and its contract is named."""
    now = plans[0].model_dump(mode="json") | {"schema_version": "2.15"}
    later: dict[str, Any] = json.loads(json.dumps(now))
    later |= {"schema_version": "2.9", "something_new": 1, "step_s": now["step_s"] + 1.0}
    later["time"]["exposed"]["straggler"] = 1.0
    later["tokens_per_s_per_gpu"] *= now["step_s"] / later["step_s"]
    comparison = compare_results({"now": now, "later": later})
    assert comparison.differs["schema_version"] == ("2.15", "2.9")
    assert next(part for part in comparison.time if part.name == "straggler").by_result == (0.0, 1.0)
    assert comparison.time_unit == "s"


def test_what_cannot_be_compared_is_named(plans: list[Plan]) -> None:
    with pytest.raises(SpecError, match=f"results: 1 cannot be compared; give 2 to {MOST_RESULTS}"):
        compare(plans[0])
    with pytest.raises(SpecError, match="results: 13 cannot be compared"):
        compare(*plans[:1] * 13)
    with pytest.raises(SpecError, match=r"names: 1 are not as many as the results \(2\)"):
        compare(*plans[:2], names=["a"])
    broken = plans[0].model_dump(mode="json")
    broken["memory"].pop("by_component")
    with pytest.raises(SpecError, match="broken: is no whole result"):
        compare_results({"whole": plans[1].model_dump(mode="json"), "broken": broken})
    broken = plans[0].model_dump(mode="json") | {"step_s": "soon"}
    with pytest.raises(SpecError, match="broken: is no whole result"):
        compare_results({"whole": plans[1].model_dump(mode="json"), "broken": broken})


def test_equal_results_get_names_of_their_own(plans: list[Plan]) -> None:
    comparison = compare(plans[0], plans[0], plans[0])
    assert len({result.name for result in comparison.results}) == 3
    assert comparison.differs == {}
    assert all(more == 0.0 for part in comparison.time for more in part.differences)
