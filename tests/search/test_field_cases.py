"""Configurations that people ran, with what they say of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import mofa
from mofa.search.find import _candidate
from mofa.specs.build import build
from mofa.specs.load import resolve_run
from mofa.specs.run import RunSpec
from mofa.units import MIB

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


MIXTRAL = {
    "id": "mixtral-16xh100", "model": "mixtral-8x7b", "hardware": "h100-hgx", "gpus": 16,
    "framework": {"name": "megatron"}, "strategy": {"tp": 2, "ep": 8, "etp": 2},
    "batch": {"seq_len": 2048, "micro": 1, "global": 128},
}  # fmt: skip
STEP_S, TFLOPS = 5.4106, 241.4
"""What NVIDIA/Megatron-LM, issue 756, prints in its third iteration."""


def test_mixtral_on_16_h100_reserves_what_was_printed(tmp_path: Path) -> None:
    """61,480 MiB behind its first iteration, 54,251 of them allocated: parameters, gradients and states.

    The issue gives no sequence length; what Megatron counts of 2048 tokens (query, key and output projections,
    attention, two experts of three matrices, the output layer) makes the printed rate of the printed time.
    """
    hidden, layers, seq = 4096, 32, 2048
    counted = 1 + 8 / 32 + seq / hidden + 2 * 1.5 * 14336 / hidden + 32000 / (2 * layers * hidden)
    flops = 12 * 128 * seq * layers * hidden**2 * counted
    assert flops / 16 / STEP_S / 1e12 == pytest.approx(TFLOPS, abs=0.05)
    workload, cluster, framework, strategy = resolve_run(build(RunSpec, MIXTRAL, "case"), tmp_path)
    memory = mofa.estimate(workload, cluster, strategy, framework=framework, over_time=False).memory
    states = sum(memory.by_component[name] for name in ("parameters", "gradients", "optimizer_states"))
    assert states == pytest.approx(54251 * MIB, rel=0.003)
    assert memory.reserved_bytes == pytest.approx(61480 * MIB, rel=0.03)
    assert memory.fits
