"""Configurations that people ran, with what they say of them."""

from __future__ import annotations

from pathlib import Path

from mofa.search.find import _candidate
from mofa.specs.build import build
from mofa.specs.load import resolve_run
from mofa.specs.run import RunSpec

QWEN_235B = {
    "id": "qwen3-235b-256xh800", "model": "qwen3-235b-a22b", "hardware": "h800-hgx", "gpus": 256,
    "framework": {"name": "megatron", "allocator": "expandable", "cross_entropy_fusion": True},
    "strategy": {"tp": 2, "pp": 32, "vpp": 3, "ep": 8, "etp": 1, "recompute": "selective:moe_act+layernorm"},
    "batch": {"seq_len": 4096, "micro": 1, "global": 2048},
}  # fmt: skip


def test_qwen3_235b_fits_256_h800_with_activations_and_norms_recomputed(tmp_path: Path) -> None:
    """alibaba/Pai-Megatron-Patch, issue 658: the third of its four runs, 22.42 s."""
    workload, cluster, framework, strategy = resolve_run(build(RunSpec, QWEN_235B, "case"), tmp_path)
    assert _candidate(workload, cluster, framework, strategy).lacks() < 0
