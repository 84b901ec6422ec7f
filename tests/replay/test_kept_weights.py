"""FSDP that keeps parameters gathered, and linears in fp8: closed form and replay say the same."""

from __future__ import annotations

from typing import Any

import pytest

import mofa


@pytest.mark.parametrize(
    ("options", "gemm"),
    [
        ({"name": "fsdp1", "reshard_after_forward": False}, "bf16"),
        ({"name": "torchtitan", "reshard_after_forward": False}, "bf16"),
        ({"name": "fsdp1"}, "fp8-delayed"),
        ({"name": "torchtitan", "compile": True}, "fp8-tensorwise"),
        ({"name": "torchtitan", "compile": True, "fp8_all_gather": True}, "fp8-tensorwise"),
        ({"name": "torchtitan", "compile": True}, "fp8-rowwise"),
    ],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_both_readings_agree(options: dict[str, Any], gemm: str, recompute: str) -> None:
    job, cluster = mofa.load_workload("llama3-8b", global_batch=16), mofa.load_cluster("h200-hgx", 8)
    model = job.model.model_copy(update={"num_layers": 4})
    precision = job.precision.model_copy(update={"gemm": gemm})
    job = job.model_copy(update={"model": model, "precision": precision})
    framework = mofa.load_framework(options)
    closed, played = (
        mofa.estimate(job, cluster, f"recompute={recompute}", framework=framework, replay=replay, explain=False)
        for replay in (False, True)
    )
    assert played.memory.allocated_bytes == pytest.approx(closed.memory.allocated_bytes, rel=0.005)
    assert played.step_s == pytest.approx(closed.step_s, rel=0.03)
