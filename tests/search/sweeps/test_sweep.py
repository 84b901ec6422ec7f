"""``mofa.sweep``: every point once, equal to a search of its own, and on where it was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import mofa
from mofa.errors import SpecError
from mofa.search.sweeps import local_processes
from mofa.search.sweeps.local_processes import plan_on_this_machine
from mofa.search.sweeps.plan_point import plan_point
from mofa.search.sweeps.points import PointTask, sweep_points
from mofa.specs.fault_changes import fact_of_user, storage_of_text
from mofa.specs.faults import PriceSpec
from mofa.specs.sweep_lists import MOST_POINTS, SweepSearch, SweepSpec, load_sweep
from tests.search.sweeps.small_sweep import SMALL


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the points that are planned from here on."""
    planned: list[str] = []

    def plan(task: PointTask, jobs: int = 1) -> dict[str, Any]:
        planned.append(task.key)
        return plan_point(task, jobs)

    monkeypatch.setattr(local_processes, "plan_point", plan)
    return planned


def test_a_point_is_what_a_search_finds() -> None:
    table = mofa.sweep({**SMALL, "gpus": 8, "global_batch": 64})
    job = mofa.load_workload("llama3-8b", global_batch=64, tokens="1T")
    report = mofa.find_plans(job, mofa.load_cluster("h100-hgx", 8), fix=SMALL["search"]["fix"], replay=False).report
    plan, row = report.plans[0], table.iloc[0]
    assert row["step_s"] == plan.step_s and row["days"] == plan.days_without_failures
    assert row["gpu_hours"] == plan.days_without_failures * 24.0 * 8
    assert row["usd"] == row["gpu_hours"] * 2.5


def test_a_price_gives_what_a_long_run_with_it_costs() -> None:
    table = mofa.sweep({**SMALL, "gpus": 16, "global_batch": 64, "faults": "llama3", "storage": "2 TB/s"})
    extra = {"storage": storage_of_text("2 TB/s", "storage"), "price": PriceSpec(usd_per_gpu_hour=fact_of_user(2.5))}
    faults = mofa.load_faults("llama3").model_copy(update=extra)
    job = mofa.load_workload("llama3-8b", global_batch=64, tokens="1T")
    fix = SMALL["search"]["fix"]
    report = mofa.find_long_runs(job, mofa.load_cluster("h100-hgx", 16), faults, fix=fix, top=1, replay=False).report
    assert table["usd"].tolist() == pytest.approx([report.plans[0].usd], rel=1e-12)
    assert table["days_p50"].tolist() == [report.plans[0].days.p50]


def test_every_combination_is_a_row_and_a_price_plans_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = counted(monkeypatch)
    table = mofa.sweep({**SMALL, "prices": [2, 3]})
    assert len(table) == 8 and len(planned) == len(set(planned)) == 4
    hours = [group["gpu_hours"].tolist() for _, group in table.groupby("price_case")]
    assert hours[0] == hours[1]


def test_a_batch_for_each_gpu_that_is_there_already_is_one_point() -> None:
    points = sweep_points(load_sweep({**SMALL, "global_batch": [64, "4 per gpu", "512K tokens"]}))
    batches = [(point.labels["num_gpus"], point.labels["global_batch"]) for point in points]
    assert batches == [(8, 64), (8, 32), (16, 64)]


def test_a_batch_that_some_sequences_do_not_divide_fails_its_points_alone() -> None:
    points = sweep_points(load_sweep({**SMALL, "gpus": 8, "global_batch": "480K tokens", "seq_len": ["8K", "6K"]}))
    assert [point.error[:12] for point in points] == ["", ""]
    points = sweep_points(load_sweep({**SMALL, "gpus": 8, "global_batch": "96K tokens", "seq_len": [7000, "8K"]}))
    assert [point.error[:12] for point in points] == ["global_batch", ""]


def test_a_changed_sweep_plans_new_points_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = counted(monkeypatch)
    first = mofa.sweep(SMALL, out=tmp_path)
    assert len(planned) == 4
    again = mofa.sweep(SMALL, out=tmp_path)
    assert len(planned) == 4
    pd.testing.assert_frame_equal(first, again)
    more = mofa.sweep({**SMALL, "gpus": [8, 16, 32]}, out=tmp_path)
    assert len(planned) == 6 and len(more) == 6


def test_a_file_that_is_broken_is_planned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = mofa.sweep(SMALL, out=tmp_path)
    broken = sorted((tmp_path / "points").iterdir())[:3]
    broken[0].write_bytes(broken[0].read_bytes()[:100])
    broken[1].write_text("[]")
    broken[2].write_text('{"status": "planned"}')
    planned = counted(monkeypatch)
    pd.testing.assert_frame_equal(first, mofa.sweep(SMALL, out=tmp_path))
    assert len(planned) == 3


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mofa.sweep(SMALL, out=tmp_path, progress=interrupt)
    planned = counted(monkeypatch)
    pd.testing.assert_frame_equal(mofa.sweep(SMALL, out=tmp_path), mofa.sweep(SMALL))
    assert len(planned) == 2 + 4


def test_points_that_fail_say_why_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = {**SMALL, "models": ["llama3-8b", "llama3-70b"], "gpus": [8, 12], "global_batch": [32, 64]}
    table = mofa.sweep(asked, out=tmp_path).set_index(["model", "num_gpus", "global_batch"])
    assert table.loc[("llama3-8b", 8, 64), "status"] == "planned"
    assert "not whole nodes" in table.loc[("llama3-8b", 12, 64), "reason"]
    assert table.loc[("llama3-70b", 8, 64), "reason"].startswith("nothing fits; ")
    assert not table["reason"].str.contains("\n").any()

    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError("no\nmemory")

    monkeypatch.setattr("mofa.search.entry_points.find_plans", no_memory)
    failed = mofa.sweep(SMALL, out=tmp_path / "other")
    assert set(failed["reason"]) == {"internal error: MemoryError: no memory"}
    monkeypatch.undo()
    assert set(mofa.sweep(SMALL, out=tmp_path / "other")["status"]) == {"planned"}  # it is tried again


def die_at_16_gpus(task: PointTask) -> dict[str, Any]:
    """Stands in for a search whose process is ended for want of memory."""
    if task.cluster.num_gpus == 16:
        os.kill(os.getpid(), signal.SIGKILL)
    return plan_point(task)


def test_a_point_that_its_process_dies_of_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_processes, "plan_point", die_at_16_gpus)
    points = sweep_points(load_sweep({**SMALL, "global_batch": 64, "gpus": [8, 16, 32]}))
    tasks = [point.task for point in points if point.task is not None]
    results = list(plan_on_this_machine(tasks, 2))
    assert sorted(key for key, _ in results) == sorted(task.key for task in tasks)
    status = dict(results)
    assert [status[task.key]["status"] for task in tasks] == ["planned", "failed", "planned"]
    assert "killed" in status[tasks[1].key]["reason"] and not status[tasks[1].key]["final"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"modls": "x"}, "sweep: modls is no field here; did you mean models?"),
        ({"models": "lama3-8b"}, "models[0]: "),
        ({"clusters": ["h100-hgx", "h100-hgz"]}, "clusters[1]: "),
        ({"frameworks": "megatrom"}, "frameworks[0]: "),
        ({"faults": "lama3"}, "faults[0]: "),
        ({"faults": "llama3", "storage": "2 TB"}, "storage: 'TB' is no unit"),
        ({"faults": "llama3", "storage": "0.5 B/s"}, "storage: is 0.5 B/s; give 1 to 1e+33 B/s"),
        ({"faults": "llama3", "storage": "1e20 PB/s"}, "storage: is 1e+35 B/s; give 1 to 1e+33 B/s"),
        ({"gpus": "8..20"}, "gpus: 8..20: 20 is not 8 times a power of two"),
        ({"gpus": list(range(1, MOST_POINTS + 2))}, f"{MOST_POINTS:,} are the most"),
        ({"global_batch": "4 for each"}, "global_batch: '4 for each' is no batch; "),
        ({"prices": {"h100": 2}}, "prices: h100 is none of the clusters; did you mean h100-hgx?"),
        ({"prices": -1}, "prices: -1 USD must be at least 0"),
        ({"clusters": ["h100-hgx", "h800-hgx"], "prices": {"h100-hgx": 2}}, "prices: h800-hgx has none; add it"),
        ({"routing": "zip:1"}, "did you mean zipf:S?"),
        ({"models": {"model.num_layers": 4}}, "models[0]: base is missing"),
        ({"search": {"objective": "usd"}}, "search.objective"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_is_planned(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        mofa.sweep({**SMALL, **change})
    assert said in str(error.value) and "\n" not in str(error.value)


def test_entries_change_what_they_name_and_files_are_beside_the_sweep(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "own.yaml").write_text("like: h100-hgx\nname: own\n")
    text = """
models: [{base: llama3-8b, model.num_layers: 16}]
clusters: [own.yaml, {base: h100-hgx, gpu.memory_bytes: 60 GiB}]
gpus: 8
routing: balanced
search: {fast: true, fix: {tp: 2, pp: [1, 2], vpp: 1, cp: 1}}
"""
    (folder / "sweep.yaml").write_text(text)
    table = mofa.sweep(folder / "sweep.yaml")
    assert table["model"].tolist() == ["llama3-8b model.num_layers=16"] * 2
    assert table["cluster"].tolist() == ["own.yaml", "h100-hgx gpu.memory_bytes=60 GiB"]
    assert set(table["status"]) == {"planned"}, table["reason"].tolist()
    assert (table["capacity_bytes"].diff().dropna() < 0).all()


def test_the_docs_have_every_field() -> None:
    page = (Path(mofa.__file__).parents[1] / "docs" / "sweep.md").read_text(encoding="utf-8")
    names = [field.alias or name for spec in (SweepSpec, SweepSearch) for name, field in spec.model_fields.items()]
    assert [name for name in names if f"`{name}`" not in page] == []
