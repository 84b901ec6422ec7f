"""Megatron's buffers by hand: gradients in their own precision, fp8 copies of the layers' weights."""

from __future__ import annotations

import pytest

import mofa
from tests.blocks.small import llama

H, F, LAYERS = 512, 1536, 2
MATRICES = LAYERS * (H * (8 + 2 * 4) * 64 + 8 * 64 * H + 3 * H * F)


def played(gemm: str, **options: object) -> dict[str, float]:
    """What one H200 holds of the small model, by component. [B]"""
    job = mofa.load_workload("llama3-8b", seq_len=256, global_batch=4, overrides={"precision": {"gemm": gemm}})
    framework = mofa.load_framework("megatron", overrides=options)
    plan = mofa.estimate(
        job.model_copy(update={"model": llama()}), mofa.load_cluster("h200-hgx", 1), {"micro_batch": 1},
        framework=framework,
    )  # fmt: skip
    (stage,) = plan.memory.by_stage
    assert stage.costed_by == "replay"
    return dict(stage.by_component)


def test_fp8_copies_of_the_layers_weights_stay() -> None:
    """A byte a weight in each of two layouts; norms, the embedding and the head are not linears of the layers."""
    more = played("fp8")["buffers"] - played("bf16")["buffers"]
    assert more == pytest.approx(2 * MATRICES, rel=0.001)


def test_gradients_take_what_they_are_kept_in() -> None:
    wide, narrow = (played("bf16", grads_bytes_per_param=n)["gradients"] for n in (4.0, 2.0))
    assert wide == pytest.approx(2 * narrow, abs=2 << 20)  # blocks are rounded to 2 MiB
