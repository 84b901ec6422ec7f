"""Largest elements under delayed scaling: a communicator of a stage's ranks, and a reduction behind every pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mofa
from mofa.cost.kernels.collectives import collective_s
from mofa.cost.kernels.topology import process_groups
from mofa.measure.records import read_record
from mofa.plan.result import Plan
from mofa.replay.rank.from_estimator import outside_allocator_bytes
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.run import RunSpec
from mofa.specs.run_files import resolve_run
from mofa.units import MIB
from tests.replay.runs import MEASURED, load


def estimate(folder: Path, gemm: str, *, gpus: int = 16, replay: bool = True, **strategy: Any) -> Plan:
    run = {"id": "run", "model": "llama3-8b", "hardware": "h100-hgx", "gpus": gpus, "framework": {"name": "megatron"},
           "strategy": {"tp": 2, "pp": 2, **strategy}, "precision": {"gemm": gemm},
           "batch": {"seq_len": 4096, "micro": 1, "global": 32}}  # fmt: skip
    workload, cluster, framework, strategy_ = resolve_run(spec_from_mapping(RunSpec, run, "case"), folder)
    return mofa.estimate(workload, cluster, strategy_, framework=framework, over_time=False, replay=replay)


def test_a_stage_reduces_behind_each_pass_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """m + pp - 1 forwards and as many backwards, by hand: 4 bytes for three tensors of four products in 16 layers."""
    cluster = mofa.load_cluster("h100-hgx", 16)
    groups = process_groups(2, 1, 2, 4, 1, 1, cluster.node)
    each = float(collective_s("all_reduce", np.array([4.0 * 3 * 4 * 16]), groups["tp_dp_cp"], cluster)[0])
    times = {}
    for replay in (True, False):
        plan = estimate(tmp_path, "fp8-delayed", replay=replay)
        with monkeypatch.context() as patched:
            for module in ("mofa.cost.step_time.step", "mofa.replay.time.step"):
                patched.setattr(f"{module}.amax_reduction_seconds", lambda rows: np.zeros(len(rows.table)))
            times[replay] = plan.step_s - estimate(tmp_path, "fp8-delayed", replay=replay).step_s
    assert times[False] == pytest.approx(2.0 * (8 + 2 - 1) * each, rel=0.01)
    assert times[True] == pytest.approx(times[False], rel=0.01)


def test_a_run_under_delayed_scaling_has_a_communicator_more() -> None:
    """Device minus reserved memory of a run of the fitting half; of its ranks' own group, which nothing else uses."""
    (measured, *_) = read_record(MEASURED / "te2-tp2-nemo12b-8l-delayed.yaml").measured.ranks
    context, (communicators, *_) = outside_allocator_bytes(load("te2-tp2-nemo12b-8l-delayed").estimator)
    assert (context + communicators) / MIB == pytest.approx((measured.outside_allocator_bytes or 0) / MIB, abs=20)
    context, (blocks, *_) = outside_allocator_bytes(load("te2-tp2-llama8b-10l-blockwise").estimator)
    assert communicators - blocks == pytest.approx(486 * MIB, abs=20 * MIB)


@pytest.mark.parametrize(("gpus", "strategy"), [(1, {"tp": 1, "pp": 1}), (2, {"tp": 1, "pp": 2})])
def test_a_rank_alone_in_its_stage_reduces_nothing(tmp_path: Path, gpus: int, strategy: dict[str, Any]) -> None:
    times = [estimate(tmp_path, gemm, gpus=gpus, replay=False, **strategy).time.exposed["dp"]
             for gemm in ("fp8-delayed", "fp8-tensorwise")]  # fmt: skip
    assert times[0] == times[1]
