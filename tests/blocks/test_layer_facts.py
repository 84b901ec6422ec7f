"""Layers that are no Llama's: where norms stand, parallel branches, soft caps, multipliers, other activations."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import mofa
from mofa.blocks.build import BlockTapes, CostedLayerKind, distinct_layer_kinds, head_tapes, layer_tapes
from mofa.blocks.frameworks import primitives_of
from mofa.blocks.frameworks.megatron.transformer_engine import persistent_buffer_bytes
from mofa.blocks.op import Tape
from mofa.blocks.work import Collective, MemoryBound
from mofa.plan.result import Plan
from mofa.search.one_plan import estimate
from mofa.specs.model import ModelSpec
from mofa.specs.workload import WorkloadSpec
from tests.blocks.ops import moved, one
from tests.blocks.small import build, context, framework, kept, llama

S, B, H, F, HEADS, KV, D = 256, 2, 512, 1536, 8, 4, 64
TOKENS = S * B
ROW = TOKENS * H * 2
FRAMEWORKS = ("megatron", "megatron-local", "torchtitan", "fsdp1")


def attention(**changes: Any) -> dict[str, Any]:
    return {"kind": "gqa", "num_heads": HEADS, "num_kv_heads": KV, "head_dim": D, **changes}


def layer(model: ModelSpec, name: str = "megatron", kind: CostedLayerKind | None = None, tp: int = 1) -> BlockTapes:
    facts = mofa.load_framework(name)
    ctx = context(model, facts, seq_len=S, micro_batch=B, tp=tp, sp=tp > 1)
    return layer_tapes(ctx, primitives_of(facts), kind or CostedLayerKind(False))


def norms(tape: Tape) -> list[str]:
    return [op.name for op in tape.ops if op.name.endswith("_norm")]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_norms_stand_where_the_model_has_them(name: str) -> None:
    assert norms(layer(llama(), name).forward) == ["attn_norm", "mlp_norm"]
    behind = layer(llama(norm_placement="after"), name).forward
    assert norms(behind) == ["attn_post_norm", "mlp_post_norm"]
    both = layer(llama(norm_placement="both"), name).forward
    assert norms(both) == ["attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm"]
    names = [op.name for op in both.ops]
    assert names.index("attn_post_norm") < names.index("mid.add") < names.index("mlp_norm")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_parallel_branches_read_one_stream(name: str) -> None:
    """The feed-forward layer reads the layer's input, not the sum behind attention; with one norm, its output."""
    serial, own, shared = (
        layer(llama(**facts), name)
        for facts in ({}, {"parallel_branches": True}, {"parallel_branches": True, "shared_branch_norm": True})
    )
    assert one(serial.forward, "mlp_norm").reads == ("mid",)
    assert one(own.forward, "mlp_norm").reads == ("x",)
    assert norms(shared.forward) == ["attn_norm"]
    assert sum(kept(own).values()) == sum(kept(serial).values()) - ROW  # the sum in the middle is nobody's input
    assert kept(shared)["attn_norm.out"] and "mlp_norm.out" not in kept(shared)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_gated_gelu_is_as_large_as_swiglu(name: str) -> None:
    gated, swish = (layer(llama(mlp={"activation": a, "ffn_hidden": F}), name) for a in ("geglu", "swiglu"))
    assert kept(gated) == kept(swish)
    squared, relu = (layer(llama(mlp={"activation": a, "ffn_hidden": F}), name) for a in ("relu2", "relu"))
    width = TOKENS * F * 2
    eager = {"torchtitan": 2, "fsdp1": 2}  # the activated half is kept as well, beside the other
    assert sum(kept(swish).values()) - sum(kept(squared).values()) == eager.get(name, 1) * width
    assert sum(kept(squared).values()) - sum(kept(relu).values()) == width  # ReLU keeps its result, which w2 keeps too


def test_experts_with_gated_gelu_are_not_fused() -> None:
    """moe/experts.py fuses SwiGLU and the quick GELU alone."""
    moe = {"num_experts": 8, "top_k": 2, "expert_hidden": 256}
    names = {
        a: {op.name for op in layer(llama(mlp={"activation": a}, moe=moe), kind=CostedLayerKind(True)).forward.ops}
        for a in ("swiglu", "geglu")
    }
    assert "experts.activation" in names["swiglu"] - names["geglu"]
    assert {"experts.silu", "experts.product"} <= names["geglu"] - names["swiglu"]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_layers_without_a_rotation_are_a_kind(name: str) -> None:
    model = llama(attention=attention(nope_every=2))
    rotated, unrotated = distinct_layer_kinds(model)
    assert (rotated.unrotated, unrotated.unrotated) == (False, True)
    assert unrotated.name == "dense_unrotated"
    ropes = [
        [op.name for op in layer(model, name, kind).forward.ops if "rope" in op.name] for kind in (rotated, unrotated)
    ]
    assert ropes[0] and not ropes[1]


def test_keys_are_copied_where_nothing_turned_them() -> None:
    """Views of qkv beside queries that were copied (te1-smollm3-12l-nope); with norms of heads values alone
    (te1-llama4dense-6l-l2norm); of one group or as many as queries none, as all three lie interleaved."""
    unrotated = CostedLayerKind(False, unrotated=True)

    def copies(**facts: Any) -> list[str]:
        tape = layer(llama(attention=attention(nope_every=2, **facts)), kind=unrotated).forward
        return [op.name for op in tape.ops if op.name in ("k.copy", "v.copy", "q.reshape") and np.all(op.present)]

    assert copies() == ["q.reshape", "k.copy", "v.copy"]
    assert copies(qk_norm=True) == ["q.reshape", "v.copy"]
    assert copies(num_kv_heads=HEADS) == []


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("tp", [1, 2])
def test_norms_of_all_heads_add_up_over_ranks(name: str, tp: int) -> None:
    """A row is all heads of a token: ranks add up their sums of squares, four bytes a token, for queries and keys."""
    tape = layer(llama(attention=attention(qk_norm=True, qk_norm_kind="full")), name, tp=tp).forward
    sums = [op for op in tape.ops if op.name.endswith("sum_squares")]
    assert len(sums) == (2 if tp > 1 else 0)
    for op in sums:
        assert isinstance(op.work, Collective) and op.work.kind == "all_reduce"
        assert float(np.asarray(op.work.payload).reshape(-1)[0]) == 4.0 * TOKENS
    widths = [op.work.width for op in tape.ops if op.name in ("q_norm", "k_norm") and isinstance(op.work, MemoryBound)]
    assert widths == [HEADS * D, KV * D]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_logits_are_capped_and_multiplied(name: str) -> None:
    """A cap is three kernels that move six times the logits; it keeps tanh's output."""
    facts = mofa.load_framework(name)
    plain, capped, multiplied = (
        head_tapes(context(llama(**facts_of_model), facts, seq_len=S, micro_batch=B), primitives_of(facts))
        for facts_of_model in ({}, {"logit_softcap": True}, {"multipliers": ["logits"]})
    )
    logits = TOKENS * 32000 * 2.0
    op = one(capped.forward, "logits.softcap")
    assert (moved(op), op.launches) == (6.0 * logits, 3)
    assert sum(kept(capped).values()) - sum(kept(plain).values()) == logits
    assert moved(one(multiplied.forward, "logits.multiply")) == 2.0 * logits
    assert kept(multiplied) == kept(plain)


def test_branches_and_embedded_tokens_are_multiplied() -> None:
    tape = layer(llama(multipliers=["branches"])).forward
    assert [op.name for op in tape.ops if op.name.endswith("multiply")] == ["attn.multiply", "mlp.multiply"]
    assert moved(one(tape, "attn.multiply")) == 2.0 * ROW


def test_chunks_attend_to_themselves() -> None:
    """Llama 4: whole chunks and a rest; never more pairs than a sliding window of that length."""
    model = llama(attention=attention(window=64, chunked=True))
    assert model.attended_pairs(200, windowed=True) == 3 * 64 * 65 / 2 + 8 * 9 / 2
    sliding = llama(attention=attention(window=64))
    assert model.attended_pairs(200, windowed=True) < sliding.attended_pairs(200, windowed=True)
    assert model.attended_pairs(200, windowed=False) == 200 * 201 / 2


def test_a_dummy_gradient_is_kept_for_each_shape() -> None:
    """Not for each size: without a gate both linears of a layer have as many parameters (te1-nemotron8b-6l-relu2)."""
    facts = framework("megatron")
    model = llama(mlp={"activation": "relu2", "ffn_hidden": 4 * H}, attention=attention(num_kv_heads=HEADS))
    ctx = context(model, facts, seq_len=S, micro_batch=B)
    forward = build(ctx).forward.ops
    shapes = {(3 * H, H), (H, H), (4 * H, H), (H, 4 * H)}
    workspace = persistent_buffer_bytes(ctx, [op for op in forward if not op.weight], with_head=False)
    total = persistent_buffer_bytes(ctx, forward, with_head=False) - workspace
    assert float(np.asarray(total).reshape(-1)[0]) == 2.0 * sum(rows * columns for rows, columns in shapes)


ODD: dict[str, dict[str, Any]] = {
    "olmo2": {"norm_placement": "after", "attention": {"qk_norm": True, "qk_norm_kind": "full"}},
    "gemma2": {"norm_placement": "both", "logit_softcap": True, "multipliers": ("embedding",),
               "mlp": {"activation": "geglu"}, "attention": {"window": 1024, "window_every": 2, "softcap": True}},
    "gpt-neox": {"parallel_branches": True, "norm": "layernorm", "attention": {"rotary_dim": 32},
                 "mlp": {"activation": "gelu"}},
    "command-r": {"parallel_branches": True, "shared_branch_norm": True, "norm": "layernorm", "norm_bias": False,
                  "multipliers": ("logits",)},
    "llama4": {"attention": {"qk_norm": True, "qk_norm_kind": "unweighted", "window": 1024, "window_every": 4,
                             "chunked": True, "nope_every": 4}},
    "granite": {"multipliers": ("embedding", "branches", "logits")},
    "nemotron": {"norm": "layernorm", "mlp": {"activation": "relu2"}, "attention": {"rotary_dim": 64}},
}  # fmt: skip


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("odd", ODD)
def test_closed_form_and_replay_agree(name: str, odd: str) -> None:
    """Allocated memory within 0.2 %, and steps as near each other, within half a percent, as those of a Llama of these
    sizes are."""
    workload, facts = eight_layers()
    nested = {part: facts[part] | ODD[odd].get(part, {}) for part in ("attention", "mlp")}
    closed, played = both_ways(workload, name, facts | ODD[odd] | nested)
    assert closed.memory.allocated_bytes == pytest.approx(played.memory.allocated_bytes, rel=0.002)
    llama_closed, llama_played = llama_both_ways(name)
    assert closed.step_s / played.step_s == pytest.approx(llama_closed.step_s / llama_played.step_s, rel=0.005)
    assert any("not shown by a run of ours" in note for note in played.notes) == (
        odd != "nemotron" or name != "megatron"  # te1-nemotron8b-6l-relu2
    )


def eight_layers() -> tuple[WorkloadSpec, dict[str, Any]]:
    """A job of Llama 3 8B with eight layers, and the model's facts."""
    workload = mofa.load_workload("llama3-8b", seq_len=4096, global_batch=32)
    return workload, workload.model.model_dump() | {"num_layers": 8}


@cache
def llama_both_ways(name: str) -> tuple[Plan, Plan]:
    """The eight layers as they are, estimated once for all models that differ from them."""
    workload, facts = eight_layers()
    return both_ways(workload, name, facts)


def both_ways(workload: WorkloadSpec, name: str, facts: dict[str, Any]) -> tuple[Plan, Plan]:
    """A model's estimate in closed form, and replayed."""
    workload = workload.model_copy(update={"model": ModelSpec.model_validate(facts)})
    closed, played = (
        estimate(workload, mofa.load_cluster("h100-hgx", 8), "tp=1 pp=1 micro_batch=1 recompute=none",
                 framework=mofa.load_framework(name), replay=replay, explain=False, over_time=False)
        for replay in (False, True)
    )  # fmt: skip
    return closed, played
