"""Megatron's two variants by hand: bytes kept per layer, what recomputation gives back, where they differ."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from mofa.blocks.build import BlockTapes, CostedLayerKind, head_tapes, layer_tapes
from mofa.blocks.frameworks.megatron import transformer_engine as megatron
from mofa.blocks.frameworks.megatron.persistent import WORKSPACE
from mofa.blocks.frameworks.recompute import recompute_of_layer, why_recomputation_unsupported
from mofa.blocks.op import Op, Tape
from mofa.blocks.recomputation import NO_RECOMPUTE, Recompute
from mofa.blocks.work import Collective, Gemm, GroupedGemm, HostSync, MemoryBound
from mofa.cost.allocations.allocation_trace import block_allocation_trace
from mofa.errors import SpecError
from mofa.specs.load import load_framework
from mofa.specs.model import ModelSpec
from mofa.specs.strategy import RecomputeSpec
from tests.blocks.small import EXPERTS, LATENT, build, context, framework, in_fp8, kept, llama, primitives, size

S, B, H, A, K, D, F = 256, 2, 512, 8, 4, 64, 1536
TOKENS = S * B
MOE = llama(moe=EXPERTS)
MLA = llama(attention=LATENT)
BIASED = llama(mlp={"activation": "swiglu", "ffn_hidden": 1536, "bias": True})


def layer(
    name: str, model: ModelSpec | None = None, recompute: str = "none", *, tp: int = 1, sp: bool = False, ep: int = 1,
    **options: Any,
) -> BlockTapes:  # fmt: skip
    """One layer of a model under a strategy's recomputation."""
    model = model or llama()
    spec = framework(name, **options)
    mode = recompute_of_layer(spec, RecomputeSpec.parse(recompute), None, model)
    ctx = context(model, spec, seq_len=S, micro_batch=B, tp=tp, sp=sp, ep=ep)
    return build(ctx, mode, moe=model.moe is not None)


def given_back(name: str, recompute: str, model: ModelSpec | None = None, **options: Any) -> float:
    """Bytes that recomputation does not keep. [B]"""
    before, after = layer(name, model, **options), layer(name, model, recompute, **options)
    return sum(kept(before).values()) - sum(kept(after).values())


def one(tape: Tape, name: str) -> Op:
    (op,) = [op for op in tape.ops if op.name == name]
    return op


def first(value: Any) -> float:
    return float(np.asarray(value).reshape(-1)[0])


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (4, False), (4, True)])
def test_dense_layer_with_transformer_engine(tp: int, sp: bool) -> None:
    """Both norms' inputs and outputs (8 h), q, k, v, output and log-sum-exp, 2F + F of SwiGLU, 8 bytes of scales.

    Megatron-Core 0.16.1 and Transformer Engine 2.20: te/module/layernorm_linear.py:526-536, fused_bias_swiglu.py.
    """
    shard = TOKENS / tp if sp else TOKENS
    by_hand = (
        8 * shard * H + 8 * shard + 2 * TOKENS * (2 * A + 2 * K) * D / tp + 4 * TOKENS * A / tp + 6 * TOKENS * F / tp
    )
    assert sum(kept(layer("megatron", tp=tp, sp=sp)).values()) == pytest.approx(by_hand)


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, True)])
def test_dense_layer_of_the_local_spec(tp: int, sp: bool) -> None:
    """SDPA keeps the whole of qkv through the view v beside the turned q and k; each turn keeps cosine and sine.

    The queries of several groups are copied to heads before they are turned, which keeps nothing (attention.py).
    """
    shard = TOKENS / tp if sp else TOKENS
    by_hand = (
        8 * shard * H + 8 * shard + 2 * TOKENS * (A + 2 * K) * D / tp + 2 * TOKENS * (A + K) * D / tp + 8 * S * D
        + 2 * TOKENS * A * D / tp + 4 * TOKENS * A / tp + 6 * TOKENS * F / tp
    )  # fmt: skip
    assert sum(kept(layer("megatron-local", tp=tp, sp=sp)).values()) == pytest.approx(by_hand)


def test_norms_over_heads_keep_their_inputs_and_let_go_of_the_product() -> None:
    """Eight query and four key heads of 64. The norms' inputs are copies of parts of the product, as the values are;
    their outputs are read by the rotation alone, which keeps nothing."""
    heads = {"kind": "gqa", "num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
    plain, normed = (kept(layer("megatron", llama(attention={**heads, "qk_norm": given}))) for given in (False, True))
    assert "qkv.out" not in normed
    more = {name: nbytes for name, nbytes in normed.items() if name not in plain}
    assert more == {
        "q.heads": TOKENS * 8 * 64 * 2, "k_norm.together": TOKENS * 4 * 64 * 2,
        "q_norm.rstd": TOKENS * 8 * 4, "k_norm.rstd": TOKENS * 4 * 4,
    }  # fmt: skip


def test_unfused_swiglu_keeps_three_more() -> None:
    """mlp.py:218-226: the product's two factors are tensors of their own: silu's output and the shifted half."""
    fused = sum(kept(layer("megatron-local")).values())
    assert sum(kept(layer("megatron-local", fused_swiglu=False)).values()) - fused == 4 * TOKENS * F


def test_unfused_attention_with_grouped_queries_keeps_the_expanded_heads() -> None:
    """dot_product_attention.py: 6 bytes a score, keys and values for every query head, the turned q, the mask.

    Nothing reads the turned k or the whole of qkv again; q turned is a fresh tensor.
    """
    held = kept(layer("megatron-local", attention="unfused"))
    scores = B * A * S * S
    attention = {
        "attn.softmax": 4 * scores, "attn.probs": 2 * scores, "attn.mask": S * S,
        "attn.k_expanded": 2 * TOKENS * A * D, "attn.v_expanded": 2 * TOKENS * A * D, "q.rope": 2 * TOKENS * A * D,
    }  # fmt: skip
    assert {k: v for k, v in held.items() if k in attention} == attention
    assert "qkv.out" not in held and "k.rope" not in held


def test_unfused_attention_moves_and_computes_the_full_square() -> None:
    """Two products of 2 s^2 d a head and sequence, four backward; 28 bytes a score forward and 44 backward."""
    found = layer("megatron-local", attention="unfused")
    products = [op.work for op in found.forward.ops if op.family == "attention"]
    assert sum(first(w.flops) for w in products if isinstance(w, Gemm)) == 2 * (2 * S * S * D) * A * B
    again = [op.work for op in found.backward.ops if op.family == "attention"]
    assert sum(first(w.flops) for w in again if isinstance(w, Gemm)) == 4 * (2 * S * S * D) * A * B
    scores = B * A * S * S
    softmax = one(found.backward, "attn.softmax.backward").work
    assert isinstance(softmax, MemoryBound) and first(softmax.bytes) == 44 * scores


def test_selective_recomputation_of_unfused_attention_keeps_q_k_v() -> None:
    """attention.py:381: q and k turned, v, which is a view of the whole of qkv, and the output stay."""
    held = kept(layer("megatron-local", recompute="selective", attention="unfused"))
    assert {"q.rope", "k.rope", "qkv.out", "attn.out"} <= set(held)
    assert not {"attn.softmax", "attn.probs", "attn.mask", "attn.k_expanded", "attn.v_expanded"} & set(held)


@pytest.mark.parametrize("name", ["megatron", "megatron-local"])
def test_selective_recomputation_of_flash_attention_saves_the_log_sum_exp_alone(name: str) -> None:
    """The projection keeps the attention's output, q, k and v enter the checkpoint."""
    assert given_back(name, "selective") == 4 * TOKENS * A


def test_mlp_recomputation_takes_the_fused_norm_with_it() -> None:
    """transformer_layer.py, _forward_mlp: with Transformer Engine the norm is inside of the module, locally before."""
    inside = 6 * TOKENS * F
    assert given_back("megatron-local", "selective:mlp") == inside
    assert given_back("megatron", "selective:mlp") == inside + 2 * TOKENS * H + 4 * TOKENS


def test_layernorm_recomputation_finds_only_norms_that_are_modules() -> None:
    """gpt_layer_specs.py: none in a dense layer, the one before experts, the one before latent attention."""
    out = 2 * TOKENS * H + 4 * TOKENS  # with the scale of each row, made again
    assert given_back("megatron", "selective:layernorm") == 0
    assert given_back("megatron", "selective:layernorm", MOE) == out
    assert given_back("megatron", "selective:layernorm", MLA) == out
    found = layer("megatron", llama(attention=LATENT, moe=EXPERTS), "selective:layernorm")
    again = [op.name for op in found.backward.ops if op.name.endswith("norm~")]
    assert again == ["mlp_norm~", "attn_norm~"]  # each when its own reader needs it


def test_moe_recomputation() -> None:
    """moe_layer.py:432 keeps the norm's output and repeats dispatch, collectives and host synchronisation."""
    rows = TOKENS * 2
    assert given_back("megatron", "selective:moe_act", MOE) == 2 * rows * 256
    found = layer("megatron", MOE, "selective:moe", ep=4)
    assert not any(name.startswith(("moe.", "experts.", "router.")) for name in kept(found))
    again = [op.name for op in found.backward.ops if op.name.endswith("~") and op.family in ("ep", "host")]
    assert again == ["moe.counts~", "moe.sync0~", "moe.dispatch~", "moe.dispatch_weights~", "moe.combine~"]


def test_heads_of_latent_attention_are_joined_by_slow_kernels() -> None:
    """mc1-dsv2lite-8l-16e: rows of 64 and 128 elements, 0.94 TB/s; the even and odd elements before they are turned."""
    found = layer("megatron-local", MLA)
    slow = {op.name for op in (*found.forward.ops, *found.backward.ops) if getattr(op.work, "like", "") == "join_heads"}
    assert slow == {"q.cat", "k.cat", "q_pe.pairs", "k_pe.pairs", "q.split.backward", "kv_up.split.backward"}
    assert one(found.forward, "q_pe.rope").launches + one(found.forward, "q_pe.pairs").launches == 13
    launches = [one(found.backward, f"q_pe.{name}.backward").launches for name in ("rope", "pairs")]
    assert launches == [7, 5]


def test_up_projection_recomputation_of_latent_attention() -> None:
    """multi_latent_attention.py:840: q, k and v are made again from the latents."""
    q, v = 2 * TOKENS * A * (32 + 16), 2 * TOKENS * A * 32
    assert given_back("megatron-local", "selective:mla_up_proj", MLA) >= 2 * q + v
    held = kept(layer("megatron", MLA, "selective:mla_up_proj"))
    assert not {"q", "k", "v", "q_up.out", "kv_up.out"} & set(held)
    ops = layer("megatron-local", MLA, "selective:mla_up_proj").backward.ops
    restored = {op.name: op for op in ops if op.name.endswith(" restored")}  # copied to where they were (random.py)
    assert set(restored) == {"q restored", "k restored", "v restored"}
    assert first(restored["v restored"].work.bytes) == 2 * v  # type: ignore[union-attr]
    (end,) = [op for op in ops if op.name == "mla_up returns"]
    assert {"q~", "k~", "v~", "d:q"} <= set(end.reads)
    whole = llama(attention=LATENT | {"q_lora_rank": None})
    for name in ("megatron", "megatron-local"):  # queries that are not compressed are projected in there too
        found = layer(name, whole, "selective:mla_up_proj")
        assert "q_proj~" in [op.name for op in found.backward.ops]
        assert not {"q", "q_proj.out"} & set(kept(found))


@pytest.mark.parametrize("model", [MLA, llama(attention=LATENT, moe=EXPERTS)], ids=["dense", "experts"])
def test_recomputing_more_modules_never_keeps_more(model: ModelSpec) -> None:
    """A checkpoint around attention holds q, k and v; not where they were discarded and are made again."""
    modules = ["core_attn", "layernorm", "mla_up_proj", *(["moe", "moe_act"] if model.moe else ["mlp"])]
    sets = [c for n in range(1, len(modules) + 1) for c in combinations(modules, n)]
    held = {c: kept(layer("megatron", model, f"selective:{'+'.join(c)}")) for c in sets}
    for more, fewer in product(sets, sets):
        if set(more) > set(fewer):
            assert sum(held[more].values()) <= sum(held[fewer].values()), (more, fewer)


@pytest.mark.parametrize("name", ["megatron", "megatron-local"])
def test_swiglu_of_two_widths_is_compiled_for_any(name: str) -> None:
    """Shared experts beside dense layers on one rank: 7.5 passes over their output forward, 38 back, and so the dense
    layers'; else 3 and 8: of one width, without dense layers, in a pipeline where these are the first ones, in the
    routed experts' own function."""
    shared = {**EXPERTS, "shared_hidden": 512}

    def passes(model: ModelSpec, module: str = "shared", *, has_all_layers: bool = True) -> list[float]:
        ctx = replace(context(model, framework(name), seq_len=S, micro_batch=B), has_all_layers=has_all_layers)
        tapes = build(ctx, moe=module != "mlp")
        out = size(tapes.forward, f"{module}.act")
        found = one(tapes.forward, f"{module}.activation"), one(tapes.backward, f"{module}.activation.backward")
        return [first(op.work.bytes) / out for op in found]  # type: ignore[union-attr]

    both = llama(moe={**shared, "first_k_dense": 1})
    assert passes(both) == passes(both, "mlp") == [7.5, 38.0]
    assert passes(llama(moe={**shared, "every": 2}), has_all_layers=False) == [7.5, 38.0]
    assert passes(llama(moe=shared)) == passes(both, has_all_layers=False) == [3.0, 8.0]
    assert passes(llama(moe={**shared, "shared_hidden": F, "first_k_dense": 1})) == [3.0, 8.0]
    assert passes(both, "experts") == [3.0, 11.0]


def test_experts_one_after_the_other() -> None:
    """experts.py, SequentialMLP: a kernel set and a weight gradient an expert; outputs are concatenated."""
    local, grouped = layer("megatron-local", MOE, ep=2), layer("megatron", MOE, ep=2)
    fc1 = one(local.forward, "experts.fc1")
    assert isinstance(fc1.work, GroupedGemm) and fc1.work.sequential and fc1.launches == 4
    assert one(grouped.forward, "experts.fc1").launches == 1
    assert size(local.backward, "dW:experts.fc1") == 2 * H * 2 * 256
    assert size(grouped.backward, "dW:experts.fc1") == 0
    assert first(one(local.forward, "experts.cat").work.bytes) == 2 * 2 * TOKENS * 2 * H  # type: ignore[union-attr]
    turns = {op.name for op in (*local.forward.ops, *local.backward.ops) if first(op.expert_loops) == 4}
    assert {"experts.fc1", "experts.activation", "experts.fc2.dgrad", "experts.fc1.accumulate"} <= turns
    assert not turns & {"experts.cat", "experts.split.backward", "moe.permute", "qkv.dgrad"}
    rows = TOKENS * 2
    expert_bytes = 2 * rows * H + 4 * rows * 256 + 2 * rows * 256
    for found in (local, grouped):
        held = kept(found)
        assert sum(v for k, v in held.items() if k in ("moe.sorted", "experts.fc1", "experts.act")) == expert_bytes


@pytest.mark.parametrize(("name", "syncs"), [("megatron", 1), ("megatron-local", 3)])
def test_host_synchronisation_of_the_dispatch(name: str, syncs: int) -> None:
    """Unfused permutation selects by mask twice, each a wait; the splits of the all-to-all one more; none backward."""
    found = layer(name, MOE, ep=4)
    assert sum(isinstance(op.work, HostSync) for op in found.forward.ops) == syncs
    assert not any(isinstance(op.work, HostSync) for op in found.backward.ops)
    names = [op.name for op in found.forward.ops]
    assert max(i for i, n in enumerate(names) if n.startswith("moe.sync")) < names.index("moe.dispatch")


def test_the_allgather_dispatcher_exchanges_every_token() -> None:
    """token_dispatcher.py:245-345: all tokens of the group into the global buffer, sums scattered back."""
    found = layer("megatron-local", MOE, ep=4, dispatcher="allgather")
    sent = one(found.forward, "moe.dispatch").work
    assert isinstance(sent, Collective) and sent.kind == "all_gather" and first(sent.payload) == 4 * 2 * TOKENS * H
    assert size(found.forward, "moe.full") == 0
    assert size(found.backward, "d:moe.full") == 4 * 2 * TOKENS * H


@pytest.mark.parametrize(("name", "bytes_"), [("megatron", 0), ("megatron-local", 2)])
def test_weight_gradients_apart_or_added_by_the_product(name: str, bytes_: int) -> None:
    """distributed_data_parallel.py:425: bf16 gradient, then main_grad.add_: 10 bytes; a fused result 6."""
    found = layer(name)
    assert size(found.backward, "dW:mlp.fc1") == bytes_ * H * 2 * F
    moved = [op.work for op in found.backward.ops if op.name == "mlp.fc1.accumulate"]
    assert [first(w.bytes) for w in moved if isinstance(w, MemoryBound)] == [(10 if bytes_ else 6) * H * 2 * F]


@pytest.mark.parametrize("name", ["megatron", "megatron-local"])
def test_collectives_of_a_dense_layer(name: str) -> None:
    """Sequence parallelism: gather and scatter twice each way, the kept shards gathered again; else all-reduces."""

    def count(tape: Tape) -> dict[str, int]:
        kinds = [op.work.kind for op in tape.ops if isinstance(op.work, Collective) and np.all(op.present)]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}

    found = layer(name, tp=4, sp=True)
    assert count(found.forward) == {"all_gather": 2, "reduce_scatter": 2}
    assert count(found.backward) == {"all_gather": 4, "reduce_scatter": 2}
    found = layer(name, tp=4)
    assert count(found.forward) == count(found.backward) == {"all_reduce": 2}
    found = layer(name)
    assert count(found.forward) == count(found.backward) == {}


def test_unfused_rotary_embedding_by_hand() -> None:
    """rope_utils.py:94-133: 12 times the bytes of q, and the table's 44 bytes an element; 24 kernels for q and k."""
    found = layer("megatron-local")
    q = one(found.forward, "q.rope")
    assert first(q.work.bytes) == 12 * 2 * TOKENS * A * D + 44 * S * D  # type: ignore[union-attr]
    assert q.launches + one(found.forward, "k.rope").launches == 24
    fused = layer("megatron")
    assert first(one(fused.forward, "q.rope").work.bytes) == 2 * 2 * TOKENS * A * D  # type: ignore[union-attr]


def test_latent_attention_keeps_latents_and_heads() -> None:
    """Transformer Engine: norm in and out of each latent, q, k, v, output, log-sum-exp; the dense rest as ever.

    The latent of k and v is a strided slice, which the norm copies and keeps, so that the whole is let go.
    """
    held = sum(kept(layer("megatron", MLA)).values())
    latents = 2 * TOKENS * 2 * 128 + 2 * TOKENS * 2 * 64 + 8 * TOKENS
    heads = 2 * TOKENS * A * (2 * 48 + 2 * 32) + 4 * TOKENS * A
    dense = 8 * TOKENS * H + 8 * TOKENS + 6 * TOKENS * F
    assert held == pytest.approx(latents + heads + dense)


def test_the_head_works_in_place_on_one_fp32_copy() -> None:
    """cross_entropy.py: bf16 logits and their fp32 copy at once, six bytes a logit; four are kept."""
    for name in ("megatron", "megatron-local"):
        ctx = context(llama(), framework(name), seq_len=S, micro_batch=B)
        found = head_tapes(ctx, primitives(ctx))
        vocab = 32000  # a multiple of 128
        assert kept(found)["loss.softmax"] == 4 * TOKENS * vocab
        assert "output.out" not in kept(found)
        assert size(found.backward, "d:output.out") == 2 * TOKENS * vocab


def test_dummy_weight_gradients_persist() -> None:
    """te/module/base.py:134: 2 bytes a parameter for each distinct shape of weight, never freed, beside a workspace."""
    ctx = context(llama(), framework("megatron"), seq_len=S, micro_batch=B)
    shapes = H * (A + 2 * K) * D + H * H + H * 2 * F + H * F + H * 32000
    ops = layer_tapes(ctx, primitives(ctx), CostedLayerKind(moe=False)).forward.ops
    assert first(megatron.persistent_buffer_bytes(ctx, ops)) == 2 * shapes + WORKSPACE


@pytest.mark.parametrize(
    ("name", "text", "model", "word"),
    [
        ("megatron", "ops", llama(), "torchtitan"),
        ("megatron", "every:2", llama(), "torchtitan"),
        ("torchtitan", "selective", llama(), "Megatron"),
        ("torchtitan", "full:2", llama(), "Megatron"),
        ("megatron", "selective:moe", llama(), "experts"),
        ("megatron", "selective:moe_act", llama(), "experts"),
        ("megatron", "selective:mla_up_proj", MOE, "latent"),
        ("megatron-local", "selective:layernorm", llama(), "Transformer Engine"),
        ("megatron-local", "selective:moe_act", MOE, "grouped"),
        ("megatron", "selective:mlp", MOE, "dense"),
        ("megatron", "selective:mlp", BIASED, "biases"),
        ("megatron-local", "selective:core_attn+mlp", BIASED, "biases"),
        ("megatron-2022", "selective:mlp", llama(), "newer"),
        ("megatron-2022", "selective", BIASED, None),
        ("megatron-local", "full", BIASED, None),
        ("megatron", "full:2", llama(), None),
        ("megatron", "selective:core_attn+layernorm+mlp", llama(), None),
        ("megatron-local", "selective:core_attn+moe", MOE, None),
        ("torchtitan", "ops", llama(), None),
        ("torchtitan", "every:2", llama(), None),
    ],
)
def test_what_a_framework_refuses(name: str, text: str, model: ModelSpec, word: str | None) -> None:
    reason = why_recomputation_unsupported(framework(name), RecomputeSpec.parse(text), model)
    assert reason is None if word is None else reason is not None and word in reason


def test_modes() -> None:
    spec = framework("megatron")
    assert recompute_of_layer(spec, RecomputeSpec.parse("none"), None, llama()) == NO_RECOMPUTE
    full = recompute_of_layer(spec, RecomputeSpec.parse("full:3"), None, llama())
    assert full == Recompute(kind="full", reentrant=True) and not full.early_stop
    titan = recompute_of_layer(framework("torchtitan"), RecomputeSpec.parse("full"), None, llama())
    assert titan.kind == "full" and not titan.early_stop
    several = recompute_of_layer(spec, RecomputeSpec.parse("selective:core_attn+moe_act"), None, MOE)
    assert several.checkpoint == {"core_attn"} and several.discard == {"moe.moe_act"}


@pytest.mark.parametrize("sp", [False, True])
def test_the_reduction_of_an_input_gradient_is_launched_before_the_weight_gradient(sp: bool) -> None:
    """LinearWithGradAccumulationAndAsyncCommunication: dgrad, the collective, wgrad; the full gradient stays."""
    ops = layer("megatron", tp=4, sp=sp).backward.ops
    names = [op.name for op in ops]
    reduced = next(op for op in ops if op.name.startswith("mlp.fc1.") and op.stream == "tp" and "again" not in op.name)
    assert names.index("mlp.fc1.dgrad") < names.index(reduced.name) < names.index("mlp.fc1.wgrad")
    assert reduced.reads[0] in ops[names.index("mlp.fc1.wgrad")].reads


def test_without_overlap_the_reduction_waits_for_both_products() -> None:
    """Before LinearWithGradAccumulationAndAsyncCommunication: the copy's backward, behind the linear's whole one."""
    ctx = context(llama(), framework("megatron-local", overlap_input_grads=False), tp=4, sp=False)
    ops = build(ctx).backward.ops
    names = [op.name for op in ops]
    (reduced,) = (op for op in ops if op.name.startswith("mlp.fc1.") and isinstance(op.work, Collective))
    assert reduced.stream == "compute" and reduced.family == "tp"
    assert names.index("mlp.fc1.dgrad") < names.index("mlp.fc1.wgrad") < names.index(reduced.name)
    with pytest.raises(SpecError, match="overlap_input_grads"):
        load_framework("torchtitan", overrides={"overlap_input_grads": False})


@pytest.mark.parametrize(("tp", "sp", "row", "column"), [(1, False, 1, 1), (2, True, 2, 1), (2, False, 2, 2)])
def test_functions_of_python_around_linears(tp: int, sp: bool, row: int, column: int) -> None:
    """tensor_parallel/layers.py: the product itself; a copy before a column where nothing else communicates there, a
    sum behind a row; back the same functions again. The gated activation is one function around a compiled one, and
    every residual sum is compiled by itself."""
    tapes = layer("megatron-local", tp=tp, sp=sp)
    for name, functions in (("qkv", column), ("mlp.fc1", column), ("proj", row), ("mlp.fc2", row)):
        assert first(one(tapes.forward, name).autograd_functions) == functions
        assert first(one(tapes.backward, f"{name}.dgrad").autograd_functions) == functions
    for tape, name in ((tapes.forward, "mlp.activation"), (tapes.backward, "mlp.activation.backward")):
        assert (first(one(tape, name).autograd_functions), first(one(tape, name).guarded_calls)) == (1, 1)
    assert [first(one(tapes.forward, f"{name}.add").guarded_calls) for name in ("mid", "out")] == [1, 1]
    assert all(not np.any(op.autograd_functions) for op in layer("megatron").forward.ops)


def test_every_expert_has_its_functions() -> None:
    """Two linears and an activation each (experts.py, SequentialMLP)."""
    tapes = layer("megatron-local", llama(moe=EXPERTS))
    local = EXPERTS["num_experts"]
    names = ("experts.fc1", "experts.activation", "experts.fc2")
    assert [first(one(tapes.forward, name).autograd_functions) for name in names] == [local] * 3
    assert first(one(tapes.forward, "experts.activation").guarded_calls) == local


@pytest.mark.parametrize("name", ["megatron", "megatron-local"])
def test_the_probabilities_of_gelu_experts_are_multiplied_apart(name: str) -> None:
    """mlp.py, experts.py: SwiGLU's fused function has them; behind GELU the activation is kept for their gradient."""
    plain = llama(moe=EXPERTS)
    gelu = plain.model_copy(update={"mlp": plain.mlp.model_copy(update={"activation": "gelu"})})
    fused, eager = (build(context(model, framework(name)), moe=True) for model in (plain, gelu))
    assert "experts.weight" not in {op.name for op in fused.forward.ops}
    held = kept(eager)
    assert held["experts.act"] == held["experts.weighted"] == held["experts.fc1"] == 2 * 2 * 2 * 256 * 256


def test_biases_of_experts_are_added_in_eager_ops_expert_by_expert() -> None:
    """TEGroupedMLP._apply_bias: three ops an expert and their concatenation, 12 bytes an element forward, 16 back."""
    local = EXPERTS["num_experts"]
    found = layer("megatron", llama(moe={**EXPERTS, "expert_bias": True}))
    forward = next(op for op in found.forward.ops if op.name == "experts.bias")
    back = next(op for op in found.backward.ops if op.name == "experts.bias.backward")
    assert (forward.launches, back.launches) == (3 * local + 1, 5 * local + 1)
    assert isinstance(forward.work, MemoryBound) and isinstance(back.work, MemoryBound)
    rows = TOKENS * EXPERTS["top_k"]
    assert (first(forward.work.bytes), first(back.work.bytes)) == (12 * rows * H, 16 * rows * H)
    assert all(op.name != "experts.bias" for op in layer("megatron", MOE).forward.ops)


def test_gradients_in_bf16_move_fewer_bytes() -> None:
    """grad_reduce_in_fp32 = False: the product reads and writes 2 bytes of the main gradient, not 4."""
    found = layer("megatron", grads_bytes_per_param=2)
    moved = [op.work for op in found.backward.ops if op.name == "mlp.fc1.accumulate"]
    assert [first(w.bytes) for w in moved if isinstance(w, MemoryBound)] == [2 * H * 2 * F]


def test_scaled_cosines_take_the_eager_rotation() -> None:
    """rope_utils.py:279: Transformer Engine's kernel takes no scale. Over q and k 12 times their bytes and 44 times the
    table of cosines, where the fused kernel reads and writes once."""
    plain, scaled = (layer("megatron", llama(rope_scale=s)).forward for s in (1.0, 1.3466))
    fused, eager = (next(op for op in tape.ops if op.name == "q.rope") for tape in (plain, scaled))
    assert isinstance(fused.work, MemoryBound)
    assert isinstance(eager.work, MemoryBound)
    nbytes = plain.tensors["q.rope"].bytes
    table = scaled.tensors["q.cos"].bytes / 2  # 2 bytes each
    assert fused.work.bytes == 2 * nbytes
    assert eager.work.bytes == pytest.approx(12 * nbytes + 44 * table)
    assert eager.launches == 12


def test_frames_and_fused_nodes_hold_what_they_have() -> None:
    """As te1-llama8b-4l-first-traced has it: queries in heads, and the product for q, k and v, go behind attention's
    output projection; values are copied behind the rotary embedding; the gradient of a linear's output goes with the
    norm's, whose linear it is."""
    ctx = context(llama(), framework("megatron"), seq_len=4096, micro_batch=1)
    tapes = build(ctx)
    names = [op.name for op in tapes.forward.ops]
    assert names.index("k.rope") < names.index("v.copy") < names.index("attn.core") < names.index("proj")
    deeds = {
        name: deed.op
        for part in (block_allocation_trace(tapes).forward, block_allocation_trace(tapes).backward)
        for deed in part
        for name in deed.free
    }
    assert deeds["q.heads"] == deeds["qkv.out"] == "attention returns"
    assert deeds["d:qkv.out"] == "attn_norm.backward"
    assert deeds["d:mlp.fc1.out"] == "mlp_norm.backward"


def test_a_dense_layer_has_what_its_second_linear_casts() -> None:
    """``intermediate_parallel`` of MLP.forward, which only a cast of it is kept of."""
    ctx = in_fp8(context(llama(), framework("megatron"), seq_len=4096, micro_batch=1), "blockwise")
    (gone,) = [deed.op for deed in block_allocation_trace(build(ctx)).forward if "mlp.act" in deed.free]
    assert gone == "mlp returns"
