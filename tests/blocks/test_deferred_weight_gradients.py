"""A backward in halves, by inputs and by weights, as PyTorch's zero-bubble schedules run it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mofa.blocks.build import BlockTapes, CostedLayerKind, layer_tapes
from mofa.blocks.deferred_weight_gradients import CHECKPOINT_KEEPS
from mofa.blocks.elementwise import value_of_combination
from mofa.blocks.frameworks.torchtitan.layer import PRIMITIVES
from mofa.blocks.recomputation import NO_RECOMPUTE, Recompute
from mofa.cost.block.deferred_weight_gradients import split_backward_memory
from tests.blocks.small import LATENT, context, framework, llama

FULL = Recompute(kind="full")
WEIGHTS = ["wq", "wk", "wv", "wo", "mlp.w1", "mlp.w2", "mlp.w3", "attn_norm", "mlp_norm"]


def layer(recompute: Recompute, model: Any = None) -> BlockTapes:
    ctx = context(model or llama(), framework("torchtitan"), tp=1)
    return layer_tapes(replace(ctx, pipelined=True), PRIMITIVES, CostedLayerKind(False), recompute)


@pytest.mark.parametrize("recompute", [NO_RECOMPUTE, FULL])
def test_weight_after_weight_in_the_order_of_the_modules(recompute: Recompute) -> None:
    """llama3/model/model.py registers both norms last; each gradient is added to 0 before."""
    ops = layer(recompute).split_backward.by_weights.ops
    made = [op.name.removesuffix(".wgrad") for op in ops if op.name.endswith(".wgrad")]
    assert made == WEIGHTS
    assert sum(op.name.startswith("sum d:") for op in ops) == len(WEIGHTS)


def test_a_checkpoint_makes_the_block_again_for_each_weight() -> None:
    """All of it: torchtitan's checkpoints don't stop early; by inputs once, as in a whole backward."""
    tapes = layer(FULL)
    once = [op.name for op in tapes.backward.ops if op.name.endswith("~")]
    assert [op.name for op in tapes.split_backward.by_inputs.ops if op.name.endswith("~")] == once
    assert [op.name for op in tapes.split_backward.by_weights.ops if op.name.endswith("~")] == once * len(WEIGHTS)


def test_what_no_weight_takes_is_kept_to_the_end_of_the_chunk() -> None:
    """Attention's inputs and output, once for each of the weights; an input of a product only until its last one."""
    tapes = layer(FULL)
    kept = next(op for op in tapes.split_backward.by_weights.ops if op.name == CHECKPOINT_KEEPS).reads
    assert {name for name in kept if name.startswith("attn.out~")} == {f"attn.out~{i}" for i in range(len(WEIGHTS))}
    assert not any(name.startswith("mlp_norm.out~") for name in kept)
    assert kept[0] == "x"


def test_of_the_last_block_what_no_weight_is_behind_goes() -> None:
    """Its graph is let go from its end: what the activation saved goes behind the second matrix, the sixth weight."""
    tapes = layer(FULL)
    assert next(
        op for op in tapes.split_backward.by_weights_of_last_block.ops if op.name == CHECKPOINT_KEEPS
    ).reads == ("x",)
    gone = next(
        op for op in tapes.split_backward.by_weights_of_last_block.ops if op.name == "checkpoint lets go behind mlp.w2"
    ).reads
    assert {name for name in gone if name.startswith("mlp.w1.out~")} == {f"mlp.w1.out~{i}" for i in range(5)}


def test_norms_between_latent_attention_and_the_rest() -> None:
    """deepseek_v3/model/model.py registers norms ahead of the feed-forward."""
    ops = layer(NO_RECOMPUTE, llama(attention=LATENT)).split_backward.by_weights.ops
    made = [op.name.removesuffix(".wgrad") for op in ops if op.name.endswith(".wgrad")]
    assert made.index("attn_norm") == made.index("wo") + 1
    assert made.index("mlp.w1") == made.index("mlp_norm") + 1


def test_memory_of_both_halves() -> None:
    """Nothing is made again without a checkpoint: what is left is at most what was saved and held."""
    plain, again = (split_backward_memory(layer(recompute), 1) for recompute in (NO_RECOMPUTE, FULL))
    saved = value_of_combination(layer(NO_RECOMPUTE).forward.tensors["attn.out"].bytes)
    assert again.left_until_chunk_end[0] > 9 * saved > 0
    assert again.peak_by_weights[0] > again.peak_by_weights_of_last[0] > plain.peak_by_weights[0]
    assert again.between_halves[0] == pytest.approx(plain.between_halves[0])
    assert float(again.peak_by_weights_kinds.sum()) == pytest.approx(float(again.peak_by_weights[0]))
