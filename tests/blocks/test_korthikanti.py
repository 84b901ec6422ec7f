"""Activation bytes of a GPT layer by hand: Korthikanti et al. 2022, arXiv 2205.05198, section 4 and table 2.

``s`` sequence, ``b`` micro-batch, ``h`` hidden, ``a`` heads, ``t`` tensor-parallel ranks. The framework is the one of
that time: LayerNorm, GELU, dropout with masks of a byte, unfused attention whose fused softmax keeps 16 bits. The
paper leaves out what is small: here the mean and the inverse deviation of each LayerNorm row, 16 bytes a token for
the two norms, are counted and added to its formulas. Fused bias and GELU keep the product's output alone, as the
paper's 8sbh does.
"""

from __future__ import annotations

import numpy as np
import pytest

from mofa.blocks.build import embedding_tapes
from mofa.blocks.frameworks.megatron.local import persistent_buffer_bytes
from mofa.blocks.recomputation import NO_RECOMPUTE, Recompute
from tests.blocks.small import build, context, framework, gpt, kept, primitives

CORE_ATTENTION = Recompute(kind="regions", checkpoint=frozenset({"core_attn"}))
FULL = Recompute(kind="full")
# GPT-3 22B and 175B of the paper's table 3, and a small one
SHAPES = [(2048, 4, 6144, 64), (2048, 1, 12288, 96), (256, 2, 512, 8)]


def layer_bytes(s: int, b: int, h: int, a: int, t: int, *, sp: bool, recompute: Recompute = NO_RECOMPUTE) -> float:
    spec = framework("megatron-local", attention="unfused", fused_softmax=True)
    ctx = context(gpt(a, h), spec, seq_len=s, micro_batch=b, tp=t, sp=sp)
    return sum(kept(build(ctx, recompute)).values())


@pytest.mark.parametrize(("s", "b", "h", "a"), SHAPES)
def test_one_gpu(s: int, b: int, h: int, a: int) -> None:
    """Equation 1: sbh (34 + 5 as/h)."""
    assert layer_bytes(s, b, h, a, 1, sp=False) == pytest.approx(s * b * h * (34 + 5 * a * s / h) + 16 * s * b)


@pytest.mark.parametrize(("s", "b", "h", "a"), SHAPES)
@pytest.mark.parametrize("t", [2, 8])
def test_tensor_parallel(s: int, b: int, h: int, a: int, t: int) -> None:
    """Equation 2: sbh (10 + 24/t + 5 as/(ht))."""
    paper = s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert layer_bytes(s, b, h, a, t, sp=False) == pytest.approx(paper + 16 * s * b)


@pytest.mark.parametrize(("s", "b", "h", "a"), SHAPES)
@pytest.mark.parametrize("t", [2, 8])
def test_sequence_parallel(s: int, b: int, h: int, a: int, t: int) -> None:
    """Equation 4: sbh/t (34 + 5 as/h)."""
    paper = s * b * h / t * (34 + 5 * a * s / h)
    assert layer_bytes(s, b, h, a, t, sp=True) == pytest.approx(paper + 16 * s * b / t)


@pytest.mark.parametrize(("s", "b", "h", "a"), SHAPES)
@pytest.mark.parametrize("t", [2, 8])
def test_selective_recomputation(s: int, b: int, h: int, a: int, t: int) -> None:
    """Table 2: sbh (10 + 24/t) with tensor parallelism, 34 sbh/t with sequence parallelism too."""
    without = layer_bytes(s, b, h, a, t, sp=False, recompute=CORE_ATTENTION)
    assert without == pytest.approx(s * b * h * (10 + 24 / t) + 16 * s * b)
    with_sp = layer_bytes(s, b, h, a, t, sp=True, recompute=CORE_ATTENTION)
    assert with_sp == pytest.approx(34 * s * b * h / t + 16 * s * b / t)


@pytest.mark.parametrize("t", [1, 8])
def test_full_recomputation(t: int) -> None:
    """Table 2: 2 sbh, the layer's input; under sequence parallelism the input is a shard."""
    s, b, h, a = SHAPES[0]
    assert layer_bytes(s, b, h, a, t, sp=False, recompute=FULL) == 2 * s * b * h
    if t > 1:
        assert layer_bytes(s, b, h, a, t, sp=True, recompute=FULL) == 2 * s * b * h / t


@pytest.mark.parametrize("t", [1, 8])
def test_the_embedding_keeps_its_dropout_mask(t: int) -> None:
    """Section 4.3: sbh/t."""
    s, b, h, a = SHAPES[2]
    ctx = context(gpt(a, h), framework("megatron-local"), seq_len=s, micro_batch=b, tp=t, sp=t > 1)
    assert kept(embedding_tapes(ctx, primitives(ctx))) == {"embedding.mask": s * b * h / t}


def test_the_fp32_softmax_of_today_keeps_more() -> None:
    """PyTorch's softmax keeps 4 + mask of s^2, dropout 1 + 2 bytes a score: 7 P instead of 5 P."""
    s, b, h, a = SHAPES[2]
    spec = framework("megatron-local", attention="unfused")
    today = kept(build(context(gpt(a, h), spec, seq_len=s, micro_batch=b)))
    scores = b * a * s * s
    attention = {
        k: v for k, v in today.items() if k in ("attn.softmax", "attn.mask", "attn.dropout_mask", "attn.dropped")
    }
    assert attention == {
        "attn.softmax": 4 * scores, "attn.mask": s * s, "attn.dropout_mask": scores, "attn.dropped": 2 * scores,
    }  # fmt: skip
    assert sum(today.values()) == pytest.approx(s * b * h * 34 + 16 * s * b + 7 * scores + s * s)


def test_without_dropout_six_bytes_a_score() -> None:
    """dot_product_attention.py: the fp32 softmax (4 P) and its 16-bit copy (2 P) are kept."""
    s, b, h, a = SHAPES[2]
    spec = framework("megatron-local", attention="unfused")
    found = kept(build(context(gpt(a, h, dropout=0.0), spec, seq_len=s, micro_batch=b)))
    assert found["attn.softmax"] + found["attn.probs"] == 6 * b * a * s * s


def test_the_gathered_input_and_the_score_buffer_are_outside_the_tape() -> None:
    """utils.py, GlobalMemoryBuffer: one "mpu" buffer of the larger of 2sbh and 2 b a/t s^2."""
    s, b, h, a, t = 1024, 2, 512, 8, 4
    spec = framework("megatron-local", attention="unfused")
    assert (
        persistent_buffer_bytes(context(gpt(a, h), spec, seq_len=s, micro_batch=b, tp=t, sp=True))
        == 2 * b * a / t * s * s
    )
    flash = framework("megatron-local")
    assert persistent_buffer_bytes(context(gpt(a, h), flash, seq_len=s, micro_batch=b, tp=t, sp=True)) == 2 * s * b * h
    assert np.all(persistent_buffer_bytes(context(gpt(a, h), flash, seq_len=s, micro_batch=b, tp=t)) == 0)
