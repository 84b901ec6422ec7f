"""What a runner of PyTorch's first FSDP is told, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mofa.errors import SpecError
from mofa.measure.expand import ExpandedRun, expand_run
from mofa.measure.fsdp1_job import fsdp1_job
from mofa.measure.runs import task_of_run
from mofa.specs.run_files import load_runs

ATTENTION: dict[str, Any] = {
    "kind": "gqa", "num_heads": 32, "num_kv_heads": 32, "head_dim": 128, "qkv_bias": True, "out_bias": True,
}  # fmt: skip
MODEL: dict[str, Any] = {
    "name": "MPT", "source": "own", "num_layers": 8, "hidden": 4096, "vocab": 50368, "norm": "layernorm",
    "positions": "learned", "max_positions": 2048, "tied_embeddings": True, "attention": ATTENTION,
    "mlp": {"activation": "gelu", "ffn_hidden": 16384, "bias": True},
}  # fmt: skip
OPTIONS: dict[str, Any] = {"name": "fsdp1", "attention": "sdpa", "fused_qkv": True}


def run_of(folder: Path, **changes: Any) -> ExpandedRun:
    raw = {
        "id": "a", "model": MODEL, "framework": OPTIONS, "hardware": "h200-hgx", "gpus": 2,
        "batch": {"seq_len": 2048, "micro": 8, "global": 32}, **changes,
    }  # fmt: skip
    path = folder / "runs.yaml"
    path.write_text(yaml.safe_dump({"runs": [raw]}))
    (run,) = load_runs(path)
    return expand_run(run)


def test_a_job_says_sizes_and_options(tmp_path: Path) -> None:
    job = fsdp1_job(run_of(tmp_path, strategy={"recompute": "full"}))
    assert (job["hidden"], job["ffn_hidden"], job["num_heads"], job["norm"]) == (4096, 16384, 32, "LayerNorm")
    assert (job["recompute"], job["early_stop"], job["tied"], job["optimizer"]) == ("full", True, True, "foreach")
    assert (job["micro_batch"], job["num_micro_batches"]) == (8, 2)
    assert job["reshard_after_forward"] and not job["reduces_in_fp32"]
    task = task_of_run(run_of(tmp_path), timeout_s=60.0)
    assert task.module == "mofa.measure.runners.fsdp1" and task.job["fsdp1"]["recompute"] == "none"


def test_options_reach_the_wrapper(tmp_path: Path) -> None:
    options = {**OPTIONS, "reshard_after_forward": False, "reduced_bytes_per_param": 4, "optimizer": "for-loop"}
    job = fsdp1_job(run_of(tmp_path, framework=options))
    assert not job["reshard_after_forward"] and job["reduces_in_fp32"] and job["optimizer"] == "for-loop"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model": "llama3-8b"}, "learned positions and a GELU with biases only"),
        ({"model": "mixtral-8x7b"}, "use a dense model"),
        ({"model": {**MODEL, "attention": {**ATTENTION, "out_bias": False}}}, "set qkv_bias and out_bias"),
        ({"model": {**MODEL, "dropout": 0.1}}, "set num_mtp_layers and dropout to 0"),
        ({"gpus": 1, "batch": {"seq_len": 2048, "micro": 8, "global": 16}}, "use dp alone, on 2 GPUs or more"),
        ({"framework": {**OPTIONS, "fused_qkv": False}}, "use attention: sdpa and fused_qkv: true"),
        ({"framework": {**OPTIONS, "attention": "flash"}}, "use attention: sdpa and fused_qkv: true"),
        ({"framework": {**OPTIONS, "compile": True}}, "compile: false"),
        ({"framework": {**OPTIONS, "loss_metrics": 2}}, "leave cross_entropy_fusion and loss_metrics out"),
        ({"framework": {**OPTIONS, "data_parallel": "hsdp", "dp_replicate": 2}}, "use fsdp"),
        ({"strategy": {"recompute": "every:2"}}, "use none or full"),
        ({"strategy": {"zero": 2}}, "use zero: 3"),
        ({"precision": {"params": "bf16"}}, "leave precision.params and precision.moments out"),
        ({"precision": {"moments": "bf16"}}, "leave precision.params and precision.moments out"),
        ({"precision": {"gemm": "fp8-delayed"}}, "use precision.gemm: bf16"),
        ({"batch": {"seq_len": 4096, "micro": 4, "global": 16}}, "max_positions is 2048; use no more"),
        ({"model": {**MODEL, "embedding_norm": True}}, "leave embedding_norm out"),
    ],
)
def test_what_is_not_built_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(SpecError, match=line) as error:
        fsdp1_job(run_of(tmp_path, **changes))
    assert "\n" not in str(error.value)
