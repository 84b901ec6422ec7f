"""What Megatron's embedding takes where its table is the head's weight as well."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mofa.blocks.build import embedding_tapes
from mofa.blocks.frameworks.megatron import transformer_engine as megatron
from tests.blocks.small import context, framework, llama, primitives


@pytest.mark.parametrize(
    ("tied", "whole", "tables"), [(True, True, 1.0), (True, False, 0.0), (False, True, 0.0)]
)  # fmt: skip
def test_tied_gradients_are_added_up_in_new_memory(tied: bool, whole: bool, tables: float) -> None:
    """Where a rank has both ends: the head's gradient is a dummy that stays. 0.23 GB of 118 million parameters."""
    model = llama(hidden=2304, vocab=51200, tied_embeddings=tied)
    ctx = replace(context(model, framework("megatron")), has_all_layers=whole)
    tapes = embedding_tapes(ctx, primitives(ctx))
    (op,) = [op for op in tapes.backward.ops if op.name == "embedding.backward"]
    (params,) = np.ravel(megatron.padded_vocab_per_rank(ctx)) * 2304
    assert float(np.ravel(op.scratch)[0]) == pytest.approx(tables * 2 * params)
