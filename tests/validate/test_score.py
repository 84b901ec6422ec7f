"""Scores: errors by hand, verdicts, groups, and the rules for our own records."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mofa.errors import SpecError
from mofa.measure.records import RunRecord, write_record
from mofa.validate.all_runs import group_scores, validate_runs
from mofa.validate.published import published_reference_runs
from mofa.validate.reference import measured_reference_runs, why_step_time_not_scored
from mofa.validate.run_processes import BATCH, RunProcesses
from mofa.validate.score import group_score, score_reference_runs, score_run
from mofa.validate.validation_report import RunScore, compare_with_measured
from tests.committed import MEASURED, measured_records


@pytest.fixture(scope="module")
def records() -> dict[str, RunRecord]:
    return {record.run.id: record for record in measured_records()}


def scored(run_id: str = "a", *, group: str = "g", model: str = "m", step: tuple[float, float] | None = None,
           fits: bool = True, oom: bool = False, ranks: tuple[float, ...] = ()) -> RunScore:  # fmt: skip
    return RunScore(
        id=run_id, group=group, model=model, gpu="h100-sxm", num_gpus=8, framework="megatron", strategy="tp8",
        step_time=compare_with_measured(*step) if step else None, ranks_allocated_errors=ranks, predicted_step_s=1.0,
        predicted_device_bytes=1e9, fits=fits, out_of_memory=oom, provenance={"measured": 0.75, "assumed": 0.25},
        weak_fraction=0.25, exposed={"gemm": 1.0}, played_out=True, source="by hand",
    )  # fmt: skip


def test_errors_of_a_group_by_hand() -> None:
    """Errors +10 %, -20 %, 0: mean 10 %, median 10 %, worst 20 %, bias -3.3 %; by model (15 % + 0) / 2."""
    runs = [scored("a", step=(1.0, 1.1)), scored("b", step=(1.0, 0.8)), scored("c", model="n", step=(2.0, 2.0))]
    errors = group_score(runs).step_time
    assert errors.mean_abs_error == pytest.approx(0.1)
    assert errors.median_abs_error == pytest.approx(0.1)
    assert (errors.worst_abs_error, errors.worst_run) == (pytest.approx(0.2), "b")
    assert errors.bias == pytest.approx(-0.1 / 3)
    assert (errors.models, errors.mean_abs_error_by_model) == (2, pytest.approx(0.075))


def test_every_rank_counts() -> None:
    """Ranks off by 1 and 3 % in one run, by 2 % in another: mean 2 %, worst 3 %."""
    errors = group_score([scored("a", ranks=(0.01, -0.03)), scored("b", ranks=(0.02,))]).peak_allocated_ranks
    assert errors.mean_abs_error == pytest.approx(0.02)
    assert (errors.worst_abs_error, errors.worst_run) == (pytest.approx(0.03), "a")


def test_verdicts() -> None:
    runs = [scored("a", oom=True), scored("b", oom=True, fits=False), scored("c", fits=False), scored("d")]
    group = group_score(runs)
    assert (group.out_of_memory, group.false_fits, group.false_misses) == (2, 1, 1)


def test_a_verdict_that_the_source_denies_is_none() -> None:
    runs = [scored("a", oom=True), scored("b", oom=True).model_copy(update={"denied_by": "c"})]
    group = group_score(runs)
    assert (group.out_of_memory, group.denied, group.false_fits, group.false_misses) == (1, 1, 1, 0)


def test_groups_over_sources_gather_published_runs_alone() -> None:
    runs = [
        scored("a", group="measured-judging"), scored("b", group="published-x", step=(1.0, 1.1)),
        scored("c", group="published-x-default-recompute", step=(1.0, 2.0)),
    ]  # fmt: skip
    groups = group_scores(runs)
    assert groups["all-published"].runs == 2
    assert groups["all-published-hopper-bf16"].runs == 1


def changed(record: RunRecord, **measured: Any) -> RunRecord:
    return record.model_copy(update={"measured": record.measured.model_copy(update=measured)})


def test_what_a_record_says_of_time(records: dict[str, RunRecord]) -> None:
    """Quartiles a tenth apart are the limit; an allocator that retried and a run out of memory say nothing."""
    record = records["tt1-llama-8l"]
    assert why_step_time_not_scored(record) is None
    step = record.measured.step_time_s
    assert step is not None
    assert why_step_time_not_scored(changed(record, step_time_spread_s=0.099 * step)) is None
    assert "11%" in str(why_step_time_not_scored(changed(record, step_time_spread_s=0.11 * step)))
    ranks = [rank.model_copy(update={"alloc_retries": 3}) for rank in record.measured.ranks]
    assert "cache" in str(why_step_time_not_scored(changed(record, ranks=ranks)))
    assert why_step_time_not_scored(records["tt1-llama-32l-full-oom"]) == "out of memory"


def test_steadiness_is_that_of_all_steps_on_one_machine(records: dict[str, RunRecord]) -> None:
    """Two starts, each of them steady, may lie far apart; one that is not, among others that are, may not matter."""
    one, other = (records[name] for name in ("mc1-qwen30b-2l", "mc1-qwen30b-2l-again"))
    environment = one.environment
    here, there = (
        changed(r, step_times_s=times, step_time_spread_s=0.0).model_copy(update={"environment": environment})
        for r, times in ((one, [1.0] * 4), (other, [1.3] * 4))
    )
    assert why_step_time_not_scored(here) is None
    assert "26% apart over 2 runs" in str(why_step_time_not_scored(here, (here, there)))
    elsewhere = there.model_copy(update={"environment": environment.model_copy(update={"host": "host-0"})})
    assert why_step_time_not_scored(here, (here, elsewhere)) is None
    unsteady = changed(one, step_times_s=[1.0, 1.0, 1.2, 1.2], step_time_spread_s=0.2)
    assert why_step_time_not_scored(unsteady) is not None
    steady = changed(here, step_times_s=[1.0] * 20)
    assert why_step_time_not_scored(unsteady, (unsteady, steady)) is None


def test_repeats_are_one_run_with_the_median(records: dict[str, RunRecord], tmp_path: Path) -> None:
    folder = tmp_path / "records"
    for name in ("mc1-qwen30b-2l", "mc1-qwen30b-2l-again", "mc1-qwen30b-2l-third", "tt1-llama-8l"):
        write_record(records[name], folder)
    references, left_out = measured_reference_runs(folder, tmp_path)
    assert [r.id for r in references] == ["mc1-qwen30b-2l", "tt1-llama-8l"]
    assert [item.id for item in left_out] == ["mc1-qwen30b-2l-again", "mc1-qwen30b-2l-third"]
    times = sorted(float(records[n].measured.step_time_s or 0) for n in records if n.startswith("mc1-qwen30b-2l"))
    assert references[0].outcome.step_s == times[1]


def test_counts_of_routers_become_the_routing(records: dict[str, RunRecord], tmp_path: Path) -> None:
    """A pipeline: every rank's layers by their place in the model, dense ones skipped."""
    folder = tmp_path / "records"
    write_record(records["tt2-pp2-dsv2lite-8l"], folder)
    (reference,), _ = measured_reference_runs(folder, tmp_path)
    assert reference.run.routing.kind == "counts"
    rows = Path(str(reference.run.routing.file)).read_text().splitlines()[1:]
    assert sorted({int(row.split(",")[1]) for row in rows}) == list(range(1, 8))
    assert len(rows) == 7 * 64
    measured = records["tt2-pp2-dsv2lite-8l"].measured
    before = len(measured.warmup_times_s) + len(measured.step_times_s) // 2
    assert reference.run.routing.steps_before == before > 4


def test_switch_reduction_is_off_where_the_run_had_it_off(records: dict[str, RunRecord], tmp_path: Path) -> None:
    folder = tmp_path / "records"
    write_record(records["mc2-tp2-llama-12l"], folder)
    (reference,), _ = measured_reference_runs(folder, tmp_path)
    assert reference.resolved_specs()[1].node.nvls_factor.value == 1.0


BROKEN: tuple[tuple[str, str, str, Any, str], ...] = (
    ("tt1-llama-8l", "environment", "gpu", "NVIDIA", "names no GPU"),
    ("tt1-llama-8l", "measured", "ranks", [], "measured.ranks is empty"),
    ("mc1-qwen30b-2l", "measured", "tokens_per_expert", [[[1]]], "do not name layers"),
    ("mc1-qwen30b-2l", "measured", "tokens_per_expert", [[[0] * 128] * 2], "tokens_per_expert: iteration 0, layer 0"),
    ("mc1-qwen30b-2l", "measured", "tokens_per_expert", [[[-5] * 128] * 2], r"\[0\]\[0\]\[0\] \(-5\) must be"),
    ("mc1-qwen30b-2l", "measured", "facts", {"layers": []}, "do not name layers"),
    ("mc1-qwen30b-2l", "measured", "facts", {"layers": [[["a"]]]}, "do not name layers"),
)


@pytest.mark.parametrize(("name", "part", "field", "value", "says"), BROKEN)
def test_a_record_that_contradicts_itself_is_named(
    name: str, part: str, field: str, value: Any, says: str, records: dict[str, RunRecord], tmp_path: Path
) -> None:
    record = records[name]
    record = record.model_copy(update={part: getattr(record, part).model_copy(update={field: value})})
    folder = tmp_path / "records"
    write_record(record, folder)
    with pytest.raises(SpecError, match=f"{name}.*{says}") as error:
        measured_reference_runs(folder, tmp_path)
    assert ".csv" not in str(error.value)


def test_records_of_one_name_are_refused(records: dict[str, RunRecord], tmp_path: Path) -> None:
    """What is written down of their routing goes by the name."""
    write_record(records["tt1-llama-8l"], tmp_path)
    shutil.copy(tmp_path / "tt1-llama-8l.yaml", tmp_path / "zz.yaml")
    with pytest.raises(SpecError, match=r"zz.yaml: run.id 'tt1-llama-8l' is that of tt1-llama-8l.yaml too"):
        measured_reference_runs(tmp_path, tmp_path)


@pytest.mark.parametrize(("gpu", "group"), [("NVIDIA GH200 480GB", "measured-gh200"), ("H100", "measured-h100")])
def test_other_gpus_only_judge(gpu: str, group: str, records: dict[str, RunRecord], tmp_path: Path) -> None:
    record = records["mc1-llama-12l-full-accumulate"]
    record = record.model_copy(update={"environment": record.environment.model_copy(update={"gpu": gpu})})
    folder = tmp_path / "records"
    write_record(record, folder)
    (reference,), _ = measured_reference_runs(folder, tmp_path)
    assert reference.group == group and record.fitting_or_judging_half == "judging"


def test_no_more_processes_than_items() -> None:
    others = set(multiprocessing.active_children())
    with RunProcesses(10_000) as spread:
        assert list(spread.map(abs, range(-8, 0))) == list(range(8, 0, -1))
        assert 1 < len(set(multiprocessing.active_children()) - others) <= 8


def test_a_process_that_dies_is_no_bug() -> None:
    with RunProcesses(2) as spread:
        assert len(list(spread.map(abs, range(8)))) == 8
        ended = spread.submit(os._exit, 1)
        with pytest.raises(SpecError, match="ended from outside"):
            ended()
    with RunProcesses(2) as spread, pytest.raises(SpecError, match="ended from outside"):
        list(spread.map(os._exit, range(1, 9)))


def test_a_folder_without_runs_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no folder of reference runs"):
        validate_runs(tmp_path / "nowhere")
    (tmp_path / "measured").mkdir()
    with pytest.raises(SpecError, match="holds no records"):
        validate_runs(tmp_path, group="measured")


def test_processes_predict_what_one_does() -> None:
    """Runs keep their order; progress counts to the end."""
    found, _ = published_reference_runs(MEASURED.parent / "published")
    few = [reference for reference in found if reference.group in ("published-korth", "published-simumax")]
    few = sorted(few, key=lambda reference: (reference.run.gpus, reference.id))[: 2 * BATCH + 1]  # the quickest
    told: list[tuple[int, int]] = []
    with RunProcesses(2) as spread:
        beside, _ = score_reference_runs(few, spread=spread, progress=lambda done, all_: told.append((done, all_)))
    alone, _ = score_reference_runs(few)
    assert beside == alone
    assert told == [(i + 1, len(few)) for i in range(len(few))]


def test_only_longer_steps_are_told_by_closed_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Korthikanti's 1T is played: 64 stages of 512 micro-batches, forward and backward."""
    found, _ = published_reference_runs(MEASURED.parent / "published")
    (longest,) = (r for r in found if r.id == "korth-008")
    played = score_run(longest)
    assert played.played_out
    monkeypatch.setattr("mofa.validate.score.MAX_PLAYED", 2 * 64 * 512 - 1)
    told = score_run(longest)
    assert not told.played_out
    assert told.predicted_step_s == pytest.approx(played.predicted_step_s, rel=0.02)


def test_skewed_runs_are_a_group_over_both_halves(tmp_path: Path) -> None:
    """Those whose tokens were made to fall unevenly; runs told what their own routers counted are not among them."""
    names = ("tt1-qwen30b-2l-skewed", "mc4-ep4-mixtral-4l-skewed", "tt1-dsv2lite-6l", "mc1-qwen30b-2l", "tt1-llama-8l")
    for name in names:
        shutil.copy(MEASURED / f"{name}.yaml", tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found, _ = measured_reference_runs(tmp_path, scratch)
    assert len(found) == len(names)
    skewed = {r.id for r in found if r.skewed}
    assert {"tt1-qwen30b-2l-skewed", "mc4-ep4-mixtral-4l-skewed"} <= skewed
    assert not skewed & {"tt1-dsv2lite-6l", "mc1-qwen30b-2l", "tt1-llama-8l"}
    halves = {"a": "measured-fitting", "b": "measured-judging", "c": "published-x"}
    runs = [scored(name, group=group) for name, group in halves.items()]
    groups = group_scores([run.model_copy(update={"skewed": run.id != "a"}) for run in runs])
    assert groups["measured-skewed"].runs == 1
