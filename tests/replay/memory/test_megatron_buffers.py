"""Megatron's buffers by hand: gradients in their own precision, fp8 copies of the layers' weights."""

from __future__ import annotations

import pytest

import mofa
from tests.blocks.small import llama

H, F, LAYERS = 512, 1536, 2
MATRICES = LAYERS * (H * (8 + 2 * 4) * 64 + 8 * 64 * H + 3 * H * F)


def played(gemm: str, cluster: str = "h200-hgx", **options: object) -> dict[str, float]:
    """What one GPU holds of the small model, by component. [B]"""
    job = mofa.load_workload("llama3-8b", seq_len=256, global_batch=4, overrides={"precision": {"gemm": gemm}})
    framework = mofa.load_framework("megatron", overrides=options)
    plan = mofa.estimate(
        job.model_copy(update={"model": llama()}), mofa.load_cluster(cluster, 1), {"micro_batch": 1},
        framework=framework,
    )  # fmt: skip
    (stage,) = plan.memory.by_stage
    assert stage.costed_by == "replay"
    return dict(stage.by_component)


def test_fp8_copies_of_the_layers_weights_stay() -> None:
    """A byte a weight in each of two layouts; norms, the embedding and the head are not linears of the layers. The
    rest of a hole that is not split off, up to 1 MiB, may differ."""
    more = played("fp8")["buffers"] - played("bf16")["buffers"]
    assert more == pytest.approx(2 * MATRICES, abs=1 << 20)


def test_fp8_parameters_take_a_byte_and_their_transposes_another() -> None:
    """Held in fp8 the layers' weights lose a byte as parameters and one of their two copies; gradients are the same."""
    copied, held = played("fp8"), played("fp8", fp8_params=True)
    for component in ("parameters", "buffers"):
        assert copied[component] - held[component] == pytest.approx(MATRICES, rel=0.002)
    assert held["gradients"] == pytest.approx(copied["gradients"], abs=2 << 20)
    with pytest.raises(mofa.SpecError, match="fp8_params"):
        mofa.load_framework("torchtitan", overrides={"fp8_params": True})


def test_a_gpu_whose_products_take_any_layout_keeps_no_transposes() -> None:
    """On a B200 one copy is both: a byte a weight beside bf16 parameters, none beside fp8 ones. Of an
    activation is a byte an element either way."""
    plain = played("bf16", "b200-hgx")["buffers"]
    assert played("fp8", "b200-hgx")["buffers"] - plain == pytest.approx(MATRICES, rel=0.002)
    assert played("fp8", "b200-hgx", fp8_params=True)["buffers"] == pytest.approx(plain, abs=2 << 20)


def test_closed_form_of_fp8_parameters_is_the_replays() -> None:
    job = mofa.load_workload("llama3-8b", seq_len=256, global_batch=4, overrides={"precision": {"gemm": "fp8"}})
    framework = mofa.load_framework("megatron", overrides={"fp8_params": True})
    job, machines = job.model_copy(update={"model": llama()}), mofa.load_cluster("h200-hgx", 1)
    closed, replayed = (
        mofa.estimate(job, machines, {"micro_batch": 1}, framework=framework, replay=replay) for replay in (False, True)
    )
    assert closed.memory.allocated_bytes == pytest.approx(replayed.memory.allocated_bytes, rel=0.02)


def test_gradients_take_what_they_are_kept_in() -> None:
    wide, narrow = (played("bf16", grads_bytes_per_param=n)["gradients"] for n in (4.0, 2.0))
    assert wide == pytest.approx(2 * narrow, abs=2 << 20)  # blocks are rounded to 2 MiB
