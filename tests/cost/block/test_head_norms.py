"""Norms over heads and rotary embeddings as profiled steps ran them on an H200, kernels summed by hand.

Qwen3-30B-A3B's attention (32 query heads, 4 key-value heads of 128): tt2-ep2-qwen30b-4l-skewed-traced, 8192 tokens, and
tt2-ep2-qwen30b-2l-traced, 4096, under FSDP's mixed precision; mc1-qwen30b-2l-traced, 4096, on Megatron's local layers.
Medians of their blocks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from mofa.blocks.build import CostedLayerKind, layer_tapes
from mofa.blocks.context import Primitives
from mofa.blocks.frameworks.megatron.local import PRIMITIVES as LOCAL
from mofa.blocks.frameworks.torchtitan.layer import PRIMITIVES
from mofa.cost.block.durations import OpTimingMachine, device_seconds_array
from mofa.specs.load import load_cluster
from tests.blocks.small import context, framework, llama

MODEL = llama(hidden=2048, attention={"kind": "gqa", "num_heads": 32, "num_kv_heads": 4, "head_dim": 128,
                                      "qk_norm": True})  # fmt: skip


def microseconds(
    micro_batch: int, autocast: bool = False, name: str = "torchtitan", primitives: Primitives = PRIMITIVES
) -> dict[str, float]:
    spec = framework(name, compile=False)
    ctx = context(MODEL, spec, seq_len=4096, micro_batch=micro_batch)
    if autocast:
        ctx = replace(ctx, precision_mode="autocast", residual_element_bytes=4)
    tapes = layer_tapes(ctx, primitives, CostedLayerKind(False))
    ops = tuple(
        op
        for op in (*tapes.forward.ops, *tapes.backward.ops)
        if "norm" in op.name or "rope" in op.name or op.name == "q.reshape"
    )
    found = device_seconds_array(ops, OpTimingMachine(load_cluster("h200-hgx", num_gpus=2), {}, spec, 1))[:, 0]
    return {op.name: 1e6 * float(s) for op, s in zip(ops, found, strict=True)}


@pytest.mark.parametrize(
    ("micro_batch", "traced"),
    [
        (2, {"q_norm": 170, "k_norm": 23, "q_norm.backward": 249, "k_norm.backward": 103, "rope": 497,
             "rope.backward": 547}),
        (1, {"q_norm": 86, "k_norm": 12.7, "q_norm.backward": 131, "k_norm.backward": 52, "rope": 246,
             "rope.backward": 265}),
    ],
)  # fmt: skip
def test_fused_norms_are_bound_by_blocks_of_threads_and_rotations_by_issue(
    micro_batch: int, traced: dict[str, float]
) -> None:
    """Rows of 128 take 0.65 ns whatever their bytes; keys' rows are too few for their weight's sum to be split."""
    found = microseconds(micro_batch)
    for name, took in traced.items():
        assert found[name] == pytest.approx(took, rel=0.07), name


def test_a_chain_of_kernels_takes_several_times_a_fused_norm() -> None:
    """An element of fp32 14.7 ps forward and 36.5 back, eight and seventeen launches of 1.5 us."""
    chain, count = microseconds(2, autocast=True), 8192 * 32 * 128
    assert chain["q_norm"] == pytest.approx(14.73e-6 * count + 12, rel=0.01)
    assert chain["q_norm.backward"] == pytest.approx(36.47e-6 * count + 25.5, rel=0.01)


def test_megatrons_local_norm_copies_keys_together() -> None:
    """Queries of several groups were copied before the norm, and are contiguous; copies of strided heads are slow."""
    found = microseconds(1, name="megatron-local", primitives=LOCAL)
    traced = {"q.reshape": 39.4, "q_norm": 86, "k_norm.copy": 7.0, "k_norm": 12, "q_norm.backward": 130,
              "k_norm.backward": 51, "k_norm.copy.backward": 7.8}  # fmt: skip
    for name, took in traced.items():
        assert found[name] == pytest.approx(took, rel=0.2 if "copy" in name else 0.07), name
    assert "q_norm.copy" not in found
