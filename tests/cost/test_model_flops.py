"""Model FLOPs against the formulas and figures of papers."""

from __future__ import annotations

import pytest

from mofa.cost.model_flops import attention_flops_per_token, matmul_params, model_flops_per_token
from mofa.specs.load import load_workload
from tests.cost.toy import llama, moe_llama, windowed


def model(name: str):  # type: ignore[no-untyped-def]
    return load_workload(name).model


def test_llama3_8b_by_hand() -> None:
    """Layers: 4096 x (4096 + 2 x 1024) + 4096 x 4096 and 3 x 4096 x 14336; the head once, the embedding not."""
    n = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128256
    assert n == 7_504_658_432
    assert matmul_params(model("llama3-8b")) == pytest.approx(n, rel=1e-4)  # norms are counted besides
    attention = 3 * 32 * 4 * 4096  # forward and backward, two products of 2 x 4096 per position
    assert model_flops_per_token(model("llama3-8b"), 8192) == pytest.approx(6 * n + attention * 4096.5, rel=1e-4)
    assert model_flops_per_token(model("llama3-8b"), 8192, "full") == pytest.approx(6 * n + attention * 8192, rel=1e-4)


@pytest.mark.parametrize(("name", "layers", "hidden", "vocab"), [("gpt3-175b", 96, 12288, 51200)])
def test_gpt3_by_the_formula_of_korthikanti(name: str, layers: int, hidden: int, vocab: int) -> None:
    """72 B L s h^2 (1 + s / 6h + V / 12 h L): Korthikanti et al. 2022, arXiv 2205.05198, appendix A; the 96 of
    Narayanan et al. 2021, arXiv 2104.04473, section 3, counts the forward pass twice."""
    gpt = model(name)
    assert (gpt.num_layers, gpt.hidden) == (layers, hidden)
    s, v = 2048, gpt.vocab
    assert v == pytest.approx(vocab, rel=0.02)
    per_token = 72 * layers * hidden**2 * (1 + s / (6 * hidden) + v / (12 * hidden * layers))
    ours = model_flops_per_token(gpt, s, "full")
    assert ours == pytest.approx(per_token, rel=1e-3)  # biases and norms
    with_recomputation = 96 * layers * hidden**2 * (1 + s / (6 * hidden) + v / (16 * hidden * layers))
    head = 6 * v * hidden
    assert ours + (ours - head) / 3 == pytest.approx(with_recomputation, rel=1e-3)  # the head is not run again


def test_deepseek_v3() -> None:
    """260.7 GFLOP a token at sequence 4096, prediction layer included, causal: stable over published throughputs."""
    assert model_flops_per_token(model("deepseek-v3"), 4096) == pytest.approx(260.7e9, rel=0.02)


def test_qwen3_235b() -> None:
    """148 GFLOP a token: published tokens/s and TFLOP/s agree on it."""
    assert model_flops_per_token(model("qwen3-235b-a22b"), 4096) == pytest.approx(148e9, rel=0.02)


def test_only_active_experts_count() -> None:
    """2 of 8 experts of 3 x 512 x 256, beside the router, in each of 4 layers."""
    with_experts = matmul_params(moe_llama())
    more = matmul_params(moe_llama(moe={"num_experts": 8, "top_k": 3, "expert_hidden": 256}))
    assert more - with_experts == 4 * 3 * 512 * 256
    wider = matmul_params(moe_llama(moe={"num_experts": 16, "top_k": 2, "expert_hidden": 256}))
    assert wider - with_experts == 4 * 512 * 8


def test_a_window_limits_attention() -> None:
    """Of four layers two see 128 positions at most: per position two products of 8 heads of 64."""
    per_position = 2 * 8 * (64 + 64)
    full = per_position * 2 * (1024 + 128)
    assert attention_flops_per_token(windowed(), 1024, "full") == full
    seen = (128 * 129 / 2 + (1024 - 128) * 128) / 1024
    assert attention_flops_per_token(windowed(), 1024, "causal") == pytest.approx(per_position * 2 * (512.5 + seen))
    assert attention_flops_per_token(windowed(), 128, "causal") == per_position * 4 * 64.5


def test_causal_attention_by_counting_pairs() -> None:
    s, per_position = 37, 2 * 8 * (64 + 64)
    pairs = sum(1 for q in range(s) for k in range(s) if k <= q)
    two_layers = attention_flops_per_token(llama(), s, "causal") * s
    assert two_layers == pytest.approx(2 * per_position * pairs)
    pairs = sum(1 for q in range(1024) for k in range(1024) if q - 128 < k <= q)
    whole = sum(range(1025))
    assert attention_flops_per_token(windowed(), 1024, "causal") * 1024 == pytest.approx(
        per_position * 2 * (pairs + whole)
    )


def test_conventions_differ_by_the_mask_alone() -> None:
    job = llama()
    long = model_flops_per_token(job, 4096, "full") - model_flops_per_token(job, 4096, "causal")
    assert long == pytest.approx(3 * 2 * 2 * 8 * 128 * (4096 - 4097 / 2))
