"""The result types: parts that don't sum cannot be built, and the JSON is what the contract says."""

from __future__ import annotations

import json
import math

import pytest
from pydantic import ValidationError

import mofa
from mofa.plan.memory import Memory, StageMemory
from mofa.plan.result import Plan, PlanReport, plans_to_frame
from mofa.plan.schema import json_output_schema
from mofa.plan.step_band import Band
from mofa.plan.step_parts import TIME_COMPONENTS
from mofa.plan.summary import USUAL_COLUMNS
from mofa.report.search_text import idle_gpus_lines, ties_line
from mofa.specs.residuals import Circumstances
from tests.report.fake import make_estimate, make_memory, make_plan, make_report


def test_a_step_that_its_parts_do_not_sum_to_is_refused() -> None:
    plan = make_plan().model_dump()
    with pytest.raises(ValidationError, match=r"time.exposed sum to 8 s, not to 8\.1 s"):
        Plan.model_validate({**plan, "step_s": 8.1})


def test_an_exposed_part_that_is_missing_is_refused() -> None:
    plan = make_plan().model_dump()
    del plan["time"]["exposed"]["bubble"]
    with pytest.raises(ValidationError, match=r"time.exposed lacks bubble"):
        Plan.model_validate(plan)


def test_memory_that_its_parts_do_not_sum_to_is_refused() -> None:
    memory = make_memory().model_dump()
    memory["by_component"]["optimizer_states"] *= 2
    with pytest.raises(ValidationError, match=r"memory.by_component sum to"):
        Memory.model_validate(memory)


def test_layers_of_chunks_that_are_not_the_stages_are_refused() -> None:
    stage = make_memory().by_stage[0].model_dump()
    with pytest.raises(
        ValidationError, match=r"by_stage\[0\].layers_by_chunk sum to 7 layers, not to num_layers \(8\)"
    ):
        StageMemory.model_validate({**stage, "layers_by_chunk": (3, 4)})


def test_layers_of_chunks_are_told_in_the_order_of_a_micro_batch() -> None:
    """Of a V the second chunks are passed from the last stage back."""
    memory = make_memory()
    held = ((3, 5), (2, 6), (2, 6), (2, 6))
    stages = tuple(s.model_copy(update={"layers_by_chunk": c}) for s, c in zip(memory.by_stage, held, strict=True))
    memory = memory.model_copy(update={"by_stage": stages})
    plan = make_plan(vpp=2, schedule="interleaved").model_copy(update={"memory": memory})
    assert plan.layers_by_chunk == (3, 2, 2, 2, 5, 6, 6, 6)  # by hand: over the stages, twice
    back = make_plan(vpp=2, schedule="zbv").model_copy(update={"memory": memory})
    assert back.layers_by_chunk == (3, 2, 2, 2, 6, 6, 6, 5)
    assert list(memory.stages_to_frame()["layers_by_chunk"]) == ["3 5", "2 6", "2 6", "2 6"]
    assert make_plan().layers_by_chunk == ()


def test_a_false_fits_is_refused() -> None:
    memory = make_memory(100.0).model_dump()
    assert memory["fits"] is False
    with pytest.raises(ValidationError, match="fits must say"):
        Memory.model_validate({**memory, "fits": True})


def test_allocated_above_reserved_is_refused() -> None:
    memory = make_memory().model_dump()
    with pytest.raises(ValidationError, match="allocated_bytes"):
        Memory.model_validate({**memory, "allocated_bytes": memory["reserved_bytes"] * 1.01})


def test_a_plan_for_other_gpus_is_refused() -> None:
    report = make_report().model_dump()
    report["plans"][0]["strategy"]["dp"] = 4
    with pytest.raises(ValidationError, match=r"tp \* cp \* pp \* dp \(32\) must be the GPUs \(64\)"):
        PlanReport.model_validate(report)


def test_each_strategy_has_at_most_one_reason() -> None:
    report = make_report().model_dump()
    with pytest.raises(ValidationError, match="must be at most space"):
        PlanReport.model_validate({**report, "rejected": {"memory": 1001}, "nearest_miss": {}})


def test_json_goes_there_and_back() -> None:
    report = make_report()
    assert PlanReport.model_validate_json(report.model_dump_json()) == report


def test_json_keys_are_the_contract() -> None:
    report = json.loads(make_report().model_dump_json())
    assert report["schema_version"] == "2.15"
    assert {
        "workload",
        "cluster",
        "objective",
        "space",
        "searched",
        "rejected",
        "nearest_miss",
        "min_gpus",
        "elapsed_s",
        "plans",
    } <= set(report)
    assert {"num_params", "num_active_params"} <= set(report["workload"])
    assert set(report["nearest_miss"]["memory"]) == {"strategy", "short_by", "unit"}
    plan = report["plans"][0]
    assert {
        "strategy",
        "step_s",
        "tokens_per_s_per_gpu",
        "tflops_per_gpu",
        "mfu",
        "hfu",
        "memory",
        "time",
        "provenance",
        "costed_by",
    } <= set(plan)
    assert {
        "tp",
        "sp",
        "pp",
        "vpp",
        "cp",
        "ep",
        "etp",
        "dp",
        "micro_batch",
        "zero",
        "recompute",
        "schedule",
        "framework",
    } <= set(plan["strategy"])
    assert set(plan["memory"]) == {
        "allocated_bytes",
        "reserved_bytes",
        "device_bytes",
        "margin_bytes",
        "peak_bytes",
        "capacity_bytes",
        "fits",
        "by_component",
        "by_stage",
    }
    assert set(plan["time"]["exposed"]) == set(TIME_COMPONENTS)


def test_tables_hold_the_same_numbers() -> None:
    report = make_report()
    frame = report.to_frame(all=True)
    assert list(frame["step_s"]) == [8.0, 9.0, 10.0]
    exposed = [column for column in frame.columns if column.startswith("exposed_")]
    assert len(exposed) == len(TIME_COMPONENTS)
    assert frame[exposed].sum(axis=1).to_list() == pytest.approx([8.0, 9.0, 10.0])
    memory = [column for column in frame.columns if column.startswith("memory_")]
    assert frame[memory].sum(axis=1).to_list() == pytest.approx(frame["device_bytes"].to_list())
    best = report.plans[0]
    assert math.isclose(best.time.to_frame()["fraction"].sum(), 1.0)
    assert math.isclose(best.memory.to_frame()["fraction"].sum(), 1.0)
    assert len(best.memory.stages_to_frame()) == 4
    assert list(report.rejected_to_frame()["count"]) == [400, 597]
    assert make_plan().to_frame().shape[0] == 1
    assert plans_to_frame([]).empty


def tied_report(*step_s: float, tie_margin: float | None = 0.02) -> PlanReport:
    circumstances = Circumstances(
        nodes="one node", layers="pytorch", products="bf16", experts="dense", pace="device-bound"
    )
    band = Band(
        low_s=0.9, high_s=9.0, circumstances=circumstances, group=(), runs=9, families=9, few=False, unmeasured=(),
        tie_margin=tie_margin, hosts_s=None,
    )  # fmt: skip
    plans = tuple(make_plan(step_s=seconds).model_copy(update={"band": band}) for seconds in step_s)
    return make_report().model_copy(update={"plans": plans})


def test_plans_within_the_margin_of_the_best_are_tied() -> None:
    report = tied_report(1.0, 1.01, 1.019, 1.03, 1.005)
    assert report.num_tied == 3  # the last, out of order, is behind one that is not tied
    assert ties_line(report).startswith("Plans 1 to 3 are equally good")
    assert ties_line(tied_report(1.0, 1.01)).startswith("Plans 1 and 2 are equally good")
    assert "2.0%" in ties_line(report)
    assert tied_report(1.0, 1.021).num_tied == 1
    assert tied_report(1.0, 1.0, tie_margin=None).num_tied == 1
    assert tied_report().num_tied == 0


def test_ties_go_by_what_is_ranked() -> None:
    report = tied_report(1.0, 1.01, 1.015)
    plans = tuple(
        plan.model_copy(update={"usd": usd}) for plan, usd in zip(report.plans, (5.0, 5.05, 5.5), strict=True)
    )
    assert report.model_copy(update={"plans": plans, "objective": "usd"}).num_tied == 2


def test_every_field_of_the_schema_is_described() -> None:
    own = {
        "ClusterSummary",
        "Estimate",
        "FrameworkSummary",
        "Memory",
        "NearestMiss",
        "Plan",
        "PlanReport",
        "StageMemory",
        "Time",
        "WorkloadSummary",
    }
    for name in own:
        for field, schema in json_output_schema()["$defs"][name]["properties"].items():
            assert "description" in schema or "$ref" in schema, f"{name}.{field}"


def test_an_estimate_is_a_plan_that_says_what_it_is_for() -> None:
    estimate = json.loads(make_estimate("a-run").model_dump_json())
    assert estimate["id"] == "a-run"
    assert {*Plan.model_fields, "schema_version", "workload", "cluster", "framework"} <= set(estimate)


def test_results_are_printed_for_people() -> None:
    """One line as repr, a few as text; no field's name, no nested record."""
    plan, report = make_plan(device_gib=100.0), make_report(2)
    assert repr(plan).startswith("Plan(tp=2 sp=true pp=4 ep=8 etp=1 dp=8 micro_batch=1")
    assert "8.00 s a step, MFU 12.5%, 100.00 of 76.73 GiB, does not fit" in repr(plan)
    assert len(str(plan).splitlines()) == 5
    assert "tensor-parallel communication" in str(make_plan()) or "matrix products" in str(make_plan())
    assert repr(report).startswith("PlanReport(toy-moe on 64 x toy: 2 plans, best tp=2")
    assert len(str(report).splitlines()) == 3
    assert "128 GPUs would do" in str(make_report(0))
    assert repr(mofa.load_cluster("h100-hgx", 64)) == "ClusterSpec(64 x h100-sxm in h100-hgx)"
    assert "llama3-8b" in repr(mofa.load_workload("llama3-8b")) and "\n" not in repr(mofa.load_workload("llama3-8b"))


def test_a_table_has_twenty_columns_or_all() -> None:
    report = make_report(2)
    assert list(report.to_frame().columns) == list(USUAL_COLUMNS)
    assert len(USUAL_COLUMNS) == 20
    assert list(report.to_frame(all=True).columns) == list(report.plans[0].to_row())
    assert make_plan().to_frame(all=True).shape[1] > make_plan().to_frame().shape[1] == 20


def test_the_package_shows_its_public_names_alone() -> None:
    shown = [name for name in dir(mofa) if not name.startswith("__")]
    assert shown == sorted(mofa.__all__)


@pytest.mark.parametrize(
    ("num_gpus", "batch", "degrees", "says"),
    [
        (512, 7, {"tp": 8, "cp": 8}, "keeps 64 GPUs idle: all 512 hold 8 replicas of plan 1 (64 GPUs each"),
        (16384, 7, {"tp": 8, "cp": 8}, "keeps most of the GPUs idle: all 16,384 hold 256 replicas"),
        (496, 1024, {"tp": 2, "pp": 7}, "no factor 31 as the 496 GPUs have; 992 or 1,488 would divide over them."),
        (512, 1024, {"tp": 8, "cp": 8}, ""),
    ],
)
def test_a_batch_that_keeps_gpus_idle_is_said_with_one_that_would_not(
    num_gpus: int, batch: int, degrees: dict[str, int], says: str
) -> None:
    report = make_report()
    strategy = make_plan().strategy.model_copy(update={"tp": 1, "pp": 1, "cp": 1, "micro_batch": 1, **degrees})
    idle = num_gpus - 14 if num_gpus == 16384 else 64
    note = f"uses some of {num_gpus} GPUs"
    plan = make_plan().model_copy(update={"strategy": strategy, "idle_gpus": idle, "notes": (note,)})
    report = report.model_copy(
        update={
            "plans": (plan,),
            "cluster": report.cluster.model_copy(update={"num_gpus": num_gpus}),
            "workload": report.workload.model_copy(update={"global_batch": batch}),
        }
    )
    lines = idle_gpus_lines(report)
    left_over = "a batch of 1,024 has no factor 7; 1,008 would divide"
    assert idle_gpus_lines(report.model_copy(update={"defaults": {"batch": left_over}}))[-1] == f"A{left_over[1:]}."
    assert lines[0] == f"Plan 1 {note}."
    assert says in lines[-1] and len(lines) == 1 + bool(says)
