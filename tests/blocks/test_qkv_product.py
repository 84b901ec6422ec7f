"""Queries, keys and values on more tensor-parallel ranks than key-value heads, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mofa.blocks.build import layer_params_of_rank
from mofa.blocks.recomputation import NO_RECOMPUTE
from mofa.blocks.work import Collective, Gemm
from tests.blocks.ops import moved, one
from tests.blocks.small import build, context, framework, llama

S, B, H, A, KV, D = 256, 2, 512, 8, 2, 64
WHOLE = (A + 2 * KV) * D
ELEMENT = 2.0


def _tapes(name: str, tp: int) -> Any:
    model = llama(attention={"kind": "gqa", "num_heads": A, "num_kv_heads": KV, "head_dim": D})
    ctx = context(model, framework(name), seq_len=S, micro_batch=B, tp=tp, sp=True)
    return ctx, build(ctx, NO_RECOMPUTE)


@pytest.mark.parametrize("name", ["megatron", "megatron-local"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_weights_of_the_tape_are_those_that_are_counted(name: str, tp: int) -> None:
    ctx, tapes = _tapes(name, tp)
    weights = sum(op.weight_params for op in tapes.forward.ops if op.weight)
    norms = 2 * H
    assert float(np.ravel(layer_params_of_rank(ctx, False)[0])[0]) - norms == pytest.approx(float(np.ravel(weights)[0]))


@pytest.mark.parametrize("name", ["megatron", "megatron-local"])
def test_ranks_that_share_a_head_gather_the_product(name: str) -> None:
    """Of two key-value heads on four ranks each makes 3 of 12 heads, and takes a group of 6 out of all."""
    _, tapes = _tapes(name, 4)
    whole = S * B * WHOLE * ELEMENT
    product, gather = one(tapes.forward, "qkv").work, one(tapes.forward, "qkv.gather_width").work
    assert isinstance(product, Gemm) and isinstance(gather, Collective)
    assert float(np.ravel(product.n)[0]) == 3 * D
    assert (gather.kind, gather.group, float(np.ravel(gather.payload)[0])) == ("all_gather", "tp", whole)
    assert moved(one(tapes.forward, "qkv.join")) == 2 * whole
    back = [op for op in tapes.backward.ops if op.origin.startswith("qkv")]
    (scatter,) = [op.work for op in back if op.origin == "qkv.gather_width"]
    assert isinstance(scatter, Collective)
    assert (scatter.kind, float(np.ravel(scatter.payload)[0])) == ("reduce_scatter", whole)
    # queries of the group: 4 heads of zeros, 2 copied into them; 6 heads joined; 12 of zeros, 6 copied into them
    (split,) = [op for op in back if op.origin == "qkv.split"]
    assert moved(split) == pytest.approx(S * B * D * ELEMENT * (4 + 2 * 2 + 2 * 6 + 12 + 2 * 6))


@pytest.mark.parametrize("name", ["megatron", "megatron-local"])
def test_no_rank_gathers_whole_heads(name: str) -> None:
    _, tapes = _tapes(name, 2)
    assert not [op for op in tapes.forward.ops if op.name in ("qkv.gather_width", "qkv.join")]
