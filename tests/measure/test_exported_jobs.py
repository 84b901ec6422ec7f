"""Records of exported jobs: what a job's script, its log and its ranks' files make of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mofa
from mofa.errors import SpecError
from mofa.measure.records import read_records
from mofa.measure.runners.watch_trainer import _Device
from mofa.validate.reference import measured_reference_runs
from scripts.exported_jobs import megatron_steps, record_of_job, torchtitan_steps

EXPORTED = Path(__file__).parents[2] / "reference_runs" / "exported"
DRAWN = Path(__file__).parents[2] / "reference_runs" / "drawn" / "measured"


def rank_file(rank: int) -> dict[str, Any]:
    memory = {
        "allocated_bytes": 5, "reserved_bytes": 9, "peak_allocated_bytes": 7 + rank, "peak_reserved_bytes": 9,
        "device_bytes": 12, "device_total_bytes": 80, "alloc_retries": 0,
    }  # fmt: skip
    environment = {
        "gpu": "NVIDIA H100 80GB HBM3", "cpu": "a", "cpu_cores": 2, "python": "3.12", "torch": "2.11", "cuda": "13.0",
        "cudnn": 1, "nccl": "2", "driver": None, "host": "host-1", "framework": "", "allocator": "", "settings": {},
    }  # fmt: skip
    return {"rank": rank, "outcome": "ok", "memory": memory, "memory_whole": memory, "environment": environment,
            "host_issues_s": [1e-5 * (1 + rank)] * 3}  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with an exported job, its ranks' files and a log of fifty steps, written every tenth."""
    work = mofa.load_workload("llama3-8b", seq_len=4096, global_batch=8, overrides={"model.num_layers": 2})
    plan = mofa.find_plans(
        work, mofa.load_cluster("h100-hgx", 2), replay=False, top=1,
        fix={"tp": 2, "pp": 1, "cp": 1, "micro_batch": 1, "recompute": "full"}, without=("tp_overlap",),
    )  # fmt: skip
    mofa.export(plan, to="megatron", out=tmp_path)
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        (tmp_path / "ranks" / f"rank{rank}.json").write_text(json.dumps(rank_file(rank)))
    lines = [f" iteration {n:8}/      50 | elapsed time per iteration (ms): {1000.0 + n} |" for n in range(10, 60, 10)]
    (tmp_path / "log").write_text("\n".join(lines))
    return tmp_path


def read(job: Path) -> Any:
    return record_of_job("x", "megatron", job / "megatron.sh", job / "log", job / "ranks", "0.16.1", "h100-hgx")


def test_a_record_says_the_job_its_steps_and_its_ranks(job: Path) -> None:
    record = read(job)
    assert record.run.strategy["tp"] == 2 and record.run.strategy["recompute"] == "full"
    assert (record.run.batch.seq_len, record.run.batch.micro, record.run.batch.global_) == (4096, 1, 8)
    assert record.measured.warmup_times_s == [1.01]  # the first line has the first steps
    assert record.measured.step_times_s == [1.02, 1.03, 1.04, 1.05]
    assert [rank.peak_allocated_bytes for rank in record.measured.ranks] == [7, 8]
    assert record.environment.host_issue_s == 2e-5  # the slower rank's
    assert (record.trainer, record.fitting_or_judging_half) == ("Megatron-LM's pretrain_gpt.py", "judging")


def test_what_is_missing_is_said(job: Path) -> None:
    (job / "log").write_text("\n".join((job / "log").read_text().splitlines()[:3]))
    with pytest.raises(SpecError, match="has 2 lines of steps behind warm-up, 4 are needed"):
        read(job)
    for file in (job / "ranks").iterdir():
        file.unlink()
    with pytest.raises(SpecError, match="MOFA_WATCHED"):
        read(job)


def test_steps_of_logs() -> None:
    assert megatron_steps(" iteration        2/      14 | x | elapsed time per iteration (ms): 662.2 | y") == {
        2: 0.6622
    }
    coloured = "\x1b[31mstep:  4  \x1b[32mloss: 1  memory: 2GiB(3%)  \x1b[34mtps: 8,000  x"
    assert torchtitan_steps(coloured, 4000.0) == {4: 0.5}


def test_peaks_are_read_ahead_of_each_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that resets PyTorch's peaks after each step loses none of them."""
    now = {"allocated": 30, "free": 50}
    cuda = SimpleNamespace(
        is_initialized=lambda: True, mem_get_info=lambda index: (now["free"], 80),
        max_memory_allocated=lambda index: now["allocated"],
        reset_peak_memory_stats=lambda: now.update(allocated=0),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    device = _Device(0)
    device.look()
    cuda.reset_peak_memory_stats()
    now["free"] = 60
    device.look()
    assert (device.most_allocated_bytes, now["allocated"], device.most_bytes) == (30, 0, 30)


def test_exported_jobs_only_judge(tmp_path: Path) -> None:
    references, _ = measured_reference_runs(EXPORTED, tmp_path)
    starts = [start for reference in references for start in reference.repeats or (reference,)]
    assert len(starts) == len(read_records(EXPORTED)) == 21
    assert len(references) == 18  # three jobs ran twice on one kind of GPU
    assert {(reference.group, reference.split) for reference in references} == {("measured-exported", "judging")}


def test_drawn_runs_only_judge(tmp_path: Path) -> None:
    """Ten of their records are of the half that would be learned from, had somebody chosen them."""
    references, left_out = measured_reference_runs(DRAWN, tmp_path)
    assert "fitting" in {record.split for record in read_records(DRAWN)}
    assert {(reference.group, reference.split) for reference in references} == {("measured-drawn", "judging")}
    assert len(references) == 99
    assert len(read_records(DRAWN)) == 125 == len(references) + len(left_out)
