"""torchtitan's tapes by hand: bytes kept per token in each precision mode, what FSDP2 holds, which ops repeat.

Counted in torchtitan 0.2.2 and PyTorch 2.11 (models/llama3/model/model.py, models/moe/moe.py, fsdp/_fully_shard).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mofa.blocks.build import BlockTapes, CostedLayerKind, embedding_tapes, head_tapes, layer_tapes
from mofa.blocks.context import Context
from mofa.blocks.frameworks.torchtitan.layer import PRIMITIVES, ops_with_saved_outputs
from mofa.blocks.op import Op
from mofa.blocks.recomputation import NO_RECOMPUTE, Recompute
from mofa.blocks.work import Collective, Gemm, HostSync, MemoryBound
from mofa.cost.block.block_cost import autocast_cached_bytes
from mofa.cost.block.liveness import block_memory
from mofa.specs.model import ModelSpec
from mofa.specs.params import layer_params
from tests.blocks.small import EXPERTS, LATENT, framework, gpt, llama
from tests.blocks.small import context as small_context

SEQ, BATCH = 256, 2
TOKENS = SEQ * BATCH
D, HQ, HKV, DH, F, V = 512, 8, 4, 64, 1536, 32000
Q, KV = HQ * DH, HKV * DH
GQA = {"kind": "gqa", "num_heads": HQ, "num_kv_heads": HKV, "head_dim": DH}
LINEARS = 2 * D * Q + 2 * D * KV + 3 * D * F
MODES: dict[str, dict[str, Any]] = {
    "mixed": {},
    "autocast": {"precision_mode": "autocast", "residual_element_bytes": 4},
    "bf16": {"precision_mode": "uniform"},
    "fp32": {"precision_mode": "uniform", "weight_element_bytes": 4,
             "activation_element_bytes": 4, "residual_element_bytes": 4},
}  # fmt: skip


def context(
    model: ModelSpec | None = None, mode: str = "mixed", *, tp: int = 1, ep: int = 1, etp: int = 1, ranks: int = 4,
    expert_ranks: int = 4, compile_: bool = False, micro_batch: int = BATCH, **changes: Any,
) -> Context:  # fmt: skip
    model = model or llama()
    spec = framework("torchtitan", compile=compile_)
    ctx = small_context(model, spec, seq_len=SEQ, micro_batch=micro_batch, tp=tp, sp=tp > 1, ep=ep, etp=etp)
    known: dict[str, Any] = {
        "accumulating": False, "fsdp": np.array([float(ranks)]), "efsdp": np.array([float(expert_ranks)]),
        **MODES[mode],
    }  # fmt: skip
    return replace(ctx, **{**known, **changes})


def layer(ctx: Context, recompute: Recompute = NO_RECOMPUTE) -> BlockTapes:
    return layer_tapes(ctx, PRIMITIVES, CostedLayerKind(ctx.model.moe is not None), recompute)


def selective(ctx: Context) -> Recompute:
    return Recompute("full", keep_outputs=ops_with_saved_outputs(layer(ctx).forward, ctx.model))


def saved(tapes: BlockTapes) -> float:
    return float(block_memory(tapes, 1).saved[0])


def per_token(tapes: BlockTapes) -> float:
    return saved(tapes) / TOKENS


def ops_named(ops: tuple[Op, ...], name: str) -> list[Op]:
    return [op for op in ops if op.name == name]


def size(tapes: BlockTapes, name: str) -> float:
    tensors = {**tapes.forward.tensors, **tapes.backward.tensors}
    return float(np.asarray(tensors[name].bytes).reshape(-1)[0])


def moved(op: Op) -> float:
    assert isinstance(op.work, MemoryBound)
    return float(np.asarray(op.work.bytes).reshape(-1)[0])


def test_llama_block_under_fsdp() -> None:
    """Input, two norm outputs and the sum between (4 D), q, attention's output, k, v, four tensors of SwiGLU, in bf16;
    fp32 log-sum-exp and two scales."""
    by_hand = 2 * (4 * D + 2 * Q + 2 * KV + 4 * F) + 4 * HQ + 8
    assert per_token(layer(context())) == by_hand


def test_llama_block_under_autocast() -> None:
    """fp32 residual stream: 8 D for input and sum; each of five linears its bf16 input copy (10 D); bf16 weights."""
    tapes = layer(context(mode="autocast"))
    by_hand = TOKENS * (18 * D + 2 * (2 * Q + 2 * KV + 4 * F) + 4 * HQ + 8) + 2 * LINEARS
    assert saved(tapes) == by_hand
    assert autocast_cached_bytes(tapes, 1) == 0  # all of the cache's copies are the graph's too


def test_autocast_weight_copies_go_where_the_block_is_checkpointed() -> None:
    checkpointed = layer(context(mode="autocast"), Recompute("full"))
    assert saved(checkpointed) == TOKENS * 4 * D
    assert autocast_cached_bytes(checkpointed, 1) == 2 * LINEARS  # the cache alone has them, until the loss


def test_autocast_casts_weight_gradients_to_fp32_and_adds_them() -> None:
    for accumulating, casts, adds in ((False, 7, 0), (True, 7, 7)):
        ops = layer(context(mode="autocast", accumulating=accumulating)).backward.ops
        assert sum(op.name.endswith(".grad_cast") for op in ops) == casts
        added = [op for op in ops if op.name.endswith(".accumulate")]
        assert len(added) == adds
        assert sum(moved(op) for op in added) == 12 * LINEARS * (adds > 0)


def test_training_dtype_everywhere() -> None:
    """TP or PP without FSDP: bf16 is the tape of FSDP without its ops; fp32 doubles and keeps the probabilities."""
    assert per_token(layer(context(mode="bf16"))) == per_token(layer(context()))
    wide = layer(context(mode="fp32"))
    # scaled q and k, repeated v, output at 4 bytes; probabilities S a head; no fp32 copies in the rotation
    attention = 4 * (4 * Q + HQ * SEQ)
    assert per_token(wide) == 4 * (4 * D + 4 * F) + attention + 8
    assert not any("cast" in op.name for op in wide.forward.ops)


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_keeps_gathered_inputs(tp: int) -> None:
    """Input and sum are shards; the gathered inputs of both sublayers are kept whole, all else is split."""
    tapes = layer(context(tp=tp))
    by_hand = 2 * (2 * D / tp + 2 * D + (2 * Q + 2 * KV + 4 * F) / tp) + 4 * HQ / tp + 8 / tp
    assert per_token(tapes) == by_hand


def test_tensor_parallel_communication() -> None:
    """Two gathers and two scatters each way; a scatter copies its chunks first, a gather unless the batch is one."""
    for micro_batch in (1, 2):
        tapes = layer(context(tp=2, micro_batch=micro_batch))
        for ops in (tapes.forward.ops, tapes.backward.ops):
            kinds = [op.work.kind for op in ops if isinstance(op.work, Collective) and op.work.group == "tp"]
            assert kinds.count("all_gather") == kinds.count("reduce_scatter") == 2
        (copy,) = ops_named(tapes.forward.ops, "attn.gather_copy")
        assert bool(np.all(copy.view)) == (micro_batch == 1)
        (before_scatter,) = ops_named(tapes.forward.ops, "wo.scatter_copy")
        assert moved(before_scatter) == 2 * SEQ * micro_batch * D * 2


def test_qwen_keeps_raw_q_and_k_and_a_table() -> None:
    """Head norms keep their inputs and scales; FSDP casts the cosines and sines for every block."""
    qwen = llama(attention={**GQA, "qk_norm": True})
    extra = 2 * (Q + KV) + 4 * (HQ + HKV)
    table = SEQ * 2 * DH * 2
    tapes = layer(context(qwen))
    assert saved(tapes) == saved(layer(context())) + TOKENS * extra + table
    (rope,) = ops_named(tapes.forward.ops, "rope")
    assert (rope.launches, ops_named(layer(context()).forward.ops, "rope")[0].launches) == (10, 6)
    assert saved(layer(context(qwen), Recompute("full"))) == TOKENS * 2 * D + table


def test_qwen_head_norms_are_composite_under_autocast() -> None:
    """bf16 heads meet fp32 weights: eight kernels that keep two fp32 copies."""
    qwen = llama(attention={**GQA, "qk_norm": True})
    ctx = context(qwen, "autocast")
    more = saved(layer(ctx)) - saved(layer(context(mode="autocast")))
    assert more == TOKENS * (8 * (Q + KV) + 4 * (HQ + HKV)) + SEQ * 2 * DH * 2
    (norm,) = ops_named(layer(ctx).forward.ops, "q_norm")
    assert norm.launches == 8


def test_full_checkpoint_keeps_the_input_alone_and_repeats_everything() -> None:
    tapes = layer(context(tp=2), Recompute("full"))
    assert per_token(tapes) == 2 * D / 2
    again = {op.name for op in tapes.backward.ops if op.name.endswith("~")}
    assert {"mlp.w2~", "mlp.w2.reduce_scatter~", "attn.core~"} <= again
    assert not any(name.startswith("fsdp") for name in again)


def test_selective_checkpoint_by_op() -> None:
    """Every other product from the first: wq, wv, w1, w2 of wq wk wv wo w1 w3 w2; attention; the input."""
    ctx = context()
    assert ops_with_saved_outputs(layer(ctx).forward, ctx.model) == {"wq", "wv", "mlp.w1", "mlp.w2", "attn.core"}
    before_2026 = ops_with_saved_outputs(layer(ctx).forward, ctx.model, attention=False)
    assert before_2026 == {"wq", "wv", "mlp.w1", "mlp.w2"}
    assert per_token(layer(ctx, selective(ctx))) == 2 * (2 * D + Q + KV + Q + F) + 4 * HQ
    with_tp = context(tp=2)
    assert {"wo.reduce_scatter", "mlp.w2.reduce_scatter"} <= ops_with_saved_outputs(layer(with_tp).forward, ctx.model)


def test_selective_checkpoint_of_latent_attention_and_experts() -> None:
    """wq_a, wkv_a and wo of five products, then w3 of the shared experts' three; the gate does not count."""
    model = llama(attention=LATENT, moe={**EXPERTS, "shared_hidden": 256})
    ctx = context(model, ep=2)
    kept = ops_with_saved_outputs(layer(ctx).forward, model)
    in_parts = ops_with_saved_outputs(layer(ctx).forward, model, products=False)  # compiled: mm.out is not in the list
    assert "attn.core" in in_parts and in_parts < kept
    assert {"wq_a", "wkv_a", "wo", "shared.w3"} == {n for n in kept if n.startswith(("w", "shared"))}
    assert {"moe.dispatch", "moe.combine"} <= kept
    for more, exchanges in (({}, False), ({"qk_norm": True}, False), ({"sinks": True}, True)):
        other = llama(attention={**GQA, **more}, moe=EXPERTS)  # run as qwen3, whose list lacks exchanges; as gpt_oss
        kept = ops_with_saved_outputs(layer(context(other, ep=2)).forward, other)
        assert ({"moe.dispatch", "moe.combine"} <= kept) is exchanges


# -- data parallelism


def params(model: ModelSpec | None = None) -> float:
    return layer_params(model or llama(), False).total_params


def test_fsdp_holds_ten_bytes_a_parameter_in_backward() -> None:
    """Weights 2, the next block's gather 2, own gradients 2, the previous block's fp32 reduce-scatter input 4."""
    ctx = context()
    tapes = layer(ctx)
    assert size(tapes, "fsdp.weights@") == size(tapes, "fsdp.next@") == 2 * params()
    assert size(tapes, "fsdp.previous") == size(tapes, "fsdp.reduce_input") == 4 * params()
    gradients = [n for n in tapes.backward.tensors if n.startswith("dW:")]
    assert sum(size(tapes, n) for n in gradients) == 2 * LINEARS
    memory = block_memory(tapes, 1)
    assert memory.backward_peak[0] >= 8 * params()
    bare = block_memory(layer(context(mode="bf16")), 1)
    assert memory.backward_peak[0] - bare.backward_peak[0] <= 10 * params()


def test_fsdp_ops_of_a_block() -> None:
    """One gather each way, prefetched beside the backward; one fp32 reduce-scatter; no gradient to add at first."""
    tapes = layer(context())
    forward = [op.name for op in tapes.forward.ops if isinstance(op.work, Collective)]
    assert forward == ["fsdp.gathered.all_gather"]
    back = {op.name: op for op in tapes.backward.ops if isinstance(op.work, Collective)}
    assert set(back) == {"fsdp.next@.all_gather", "fsdp.reduce_scatter"}
    payload = {name: float(np.asarray(op.work.payload).reshape(-1)[0]) for name, op in back.items()}  # type: ignore[union-attr]
    assert payload == {"fsdp.next@.all_gather": 2 * params(), "fsdp.reduce_scatter": 4 * params()}
    assert {op.stream for op in back.values()} == {"fsdp_gather", "fsdp_reduce"}
    assert not ops_named(tapes.backward.ops, "fsdp.accumulate")
    added = ops_named(layer(context(accumulating=True)).backward.ops, "fsdp.accumulate")
    assert [moved(op) for op in added] == [12 * params() / 4]


def test_fsdp_under_a_pipeline_only_accumulates() -> None:
    """Weights stay gathered; bf16 gradients are added to unsharded fp32 ones: read 2 and 4, write 4."""
    tapes = layer(context(pipelined=True, accumulating=True))
    assert not any(isinstance(op.work, Collective) for op in tapes.forward.ops + tapes.backward.ops)
    (add,) = ops_named(tapes.backward.ops, "fsdp.accumulate")
    assert moved(add) == 10 * params()


def test_experts_are_a_group_of_their_own_under_ep() -> None:
    """Their gradients are reduced behind the experts; a group of one rank copies instead, 12 bytes a parameter."""
    model = llama(moe=EXPERTS)
    routed = layer_params(model, True).routed
    tapes = layer(context(model, ep=2, expert_ranks=2))
    names = [op.name for op in tapes.backward.ops]
    assert names.index("efsdp.reduce_scatter") < names.index("wq.dgrad") < names.index("fsdp.reduce_scatter")
    assert size(tapes, "efsdp.weights@") == 2 * routed / 2
    alone = layer(context(model, ep=4, expert_ranks=1))
    kinds = [op.name for op in alone.backward.ops if isinstance(op.work, Collective) and op.work.group == "efsdp"]
    assert kinds == []
    (copy,) = ops_named(alone.backward.ops, "efsdp.reduce_copy")
    together = size(alone, "efsdp.reduce_input") + float(np.asarray(copy.scratch).reshape(-1)[0])
    assert together == 12 * routed / 4


def test_same_columns_as_one_by_one() -> None:
    """A tape over several degrees gives what each degree alone does."""
    model = llama(moe=EXPERTS)
    one = [context(model), context(model, ep=2, expert_ranks=2), context(model, ep=4, expert_ranks=1)]
    fields = ("tp", "sp", "cp", "cp_ring", "ep", "etp", "micro_batch", "fsdp", "efsdp", "rows_time", "rows_memory",
              "imbalance")  # fmt: skip
    joined: dict[str, Any] = {f: np.concatenate([getattr(c, f) for c in one]) for f in fields}
    many = replace(one[0], **joined)
    together = block_memory(layer(many), 3)
    for i, ctx in enumerate(one):
        alone = block_memory(layer(ctx), 1)
        assert together.saved[i] == pytest.approx(alone.saved[0])
        assert together.backward_peak[i] == pytest.approx(alone.backward_peak[0])


# -- experts


def test_experts_keep_an_fp32_copy_of_every_row() -> None:
    """Padded rows: input and four of SwiGLU in bf16; fp32 operand of the weighted sum; scores and orders."""
    model = llama(moe=EXPERTS)
    tapes = layer(context(model, ep=2))
    n, fm, e = TOKENS * 2, 256, 8
    padded = n + 8 * e / 2
    attention = TOKENS * (2 * (3 * D + 2 * Q + 2 * KV) + 4 * HQ + 8)
    routed = 2 * padded * (D + 4 * fm) + 4 * n * D
    router = TOKENS * (4 * e + 2 * (4 + 8 + 8)) + 8 * n  # scores, chosen, ids, sums; order
    indices = 8 * n + 4 * padded
    table = 2 * SEQ * 2 * DH  # of cosines and sines, cast to bf16: its model with experts is qwen3
    assert saved(tapes) == attention + table + TOKENS * 2 * D + routed + router + indices


def test_host_waits_once_a_dispatch_and_again_when_repeated() -> None:
    model = llama(moe=EXPERTS)

    def waits(recompute: Recompute, ep: int) -> int:
        tapes = layer(context(model, ep=ep), recompute)
        return sum(isinstance(op.work, HostSync) for op in tapes.forward.ops + tapes.backward.ops)

    assert (waits(NO_RECOMPUTE, 1), waits(NO_RECOMPUTE, 2), waits(Recompute("full"), 2)) == (0, 1, 2)


def test_experts_without_fsdp_multiply_in_bf16() -> None:
    """Autocast: both products up keep a copy of their rows, every weight a bf16 copy; the operand is bf16."""
    model = llama(moe=EXPERTS)
    tapes = layer(context(model, "autocast"))
    names = {op.name for op in tapes.forward.ops}
    assert {"experts.w1.cast", "experts.w3.cast", "experts.w2.weight_cast", "moe.operand.cast"} <= names
    assert size(tapes, "moe.operand.bf16") == 2 * TOKENS * 2 * D


def test_etp_and_borrowed_tp() -> None:
    """Split experts: all tokens' rows on every rank; whole ones: each tp rank sends its share, sums all tokens'."""
    model = llama(moe=EXPERTS)
    for etp, share in ((1, 2), (2, 1)):
        tapes = layer(context(model, tp=2, ep=2, etp=etp))
        assert size(tapes, "moe.routed") == 2 * D * TOKENS * 2 / share
        assert size(tapes, "moe.operand.fp32") == 4 * D * TOKENS * 2


# -- ends of the model


def test_eager_loss_holds_three_fp32_tensors() -> None:
    """Forward: bf16 logits, fp32 copy, log-softmax (10 V); kept: the last (4 V); backward: three fp32 (12 V)."""
    tapes = head_tapes(context(mode="bf16"), PRIMITIVES)
    memory = block_memory(tapes, 1)
    ends = TOKENS * 2 * 2 * D + TOKENS * 8
    assert memory.forward_peak[0] == pytest.approx(10 * V * TOKENS + ends, rel=1e-4)
    assert memory.backward_peak[0] == pytest.approx(12 * V * TOKENS + ends, rel=1e-4)
    assert memory.saved[0] == pytest.approx(4 * V * TOKENS + ends, rel=1e-4)


def test_loss_split_by_tp_holds_four() -> None:
    tapes = head_tapes(context(mode="bf16", tp=2), PRIMITIVES)
    memory = block_memory(tapes, 1)
    ends = TOKENS * (2 * D / 2 + 2 * D)
    assert memory.forward_peak[0] == pytest.approx(14 * V * TOKENS / 2 + ends, rel=1e-3)
    assert memory.backward_peak[0] == pytest.approx(16 * V * TOKENS / 2 + ends, rel=1e-3)


def test_gradient_of_the_embedding_sums_in_pieces() -> None:
    """Above 3072 tokens: fp32 rows for every ten tokens and for every token. 8192 tokens of a width of 4096 took
    140.8 MiB on an H200."""
    wide = llama(hidden=4096, vocab=128256)
    (op,) = ops_named(
        embedding_tapes(context(wide, micro_batch=8192 // SEQ), PRIMITIVES).backward.ops, "embedding.backward"
    )
    assert number(op.scratch) / 2**20 == pytest.approx(140.8, abs=0.01)
    (few,) = ops_named(embedding_tapes(context(wide, micro_batch=12), PRIMITIVES).backward.ops, "embedding.backward")
    assert number(few.scratch) == 0


def test_ring_attention_holds_sums_in_fp32() -> None:
    """Merging: four fp32 tensors of the output's size; backward beside a kernel: its own fp32 sum, the queries'
    gradient, three fp32 and one bf16 of keys and values, all ranks' keys and values, a step's gradients."""
    tapes = layer(context(cp=np.array([2.0]), cp_ring=np.array([False])))
    merging = [t for t in tapes.forward.tensors.values() if t.name.startswith("attn.merge.")]
    assert sum(number(t.bytes) for t in merging) == 4 * 4 * TOKENS / 2 * Q
    (core,) = ops_named(tapes.backward.ops, "attn.core.backward")
    held = sum(size(tapes, name) for name in core.reads if name.startswith("d:attn.ring."))
    assert held == TOKENS / 2 * ((4 + 2) * Q + (3 * 4 + 2 * 2 + 2 + 2) * 2 * KV)


def test_a_rank_that_merges_a_half_keeps_a_copy_of_what_attention_gave() -> None:
    """All ranks but the last join two halves, and the output projection reads a contiguous copy: 0.375 GiB more on the
    first of two ranks than on the last in tt2-cp2-llama-6l-16k-every2-traced, of three layers kept whole."""

    with_ring = layer(context(cp=np.array([2.0]), cp_ring=np.array([False])))
    (wo,) = ops_named(with_ring.forward.ops, "wo")
    (core,) = ops_named(with_ring.backward.ops, "attn.core.backward")
    assert wo.reads[0] == "attn.contiguous"
    assert "attn.out" in core.reads
    assert size(with_ring, "attn.contiguous") == size(with_ring, "attn.out") == 2 * TOKENS / 2 * Q
    alone = layer(context(cp=np.array([1.0])))
    assert not ops_named(alone.forward.ops, "attn.contiguous")


def test_head_stays_gathered_and_reduces() -> None:
    """Norm and output layer: 2 V D from forward to backward, their fp32 reduce-scatter input 4 V D."""
    tapes = head_tapes(context(), PRIMITIVES)
    group = V * D + D
    assert float(block_memory(tapes, 1).saved_kinds[1, 0]) == 2 * group
    assert size(tapes, "fsdp.reduce_input") == 4 * group
    assert size(tapes, "fsdp.next@") == 2 * params()
    table = embedding_tapes(context(), PRIMITIVES)
    assert size(table, "fsdp.reduce_input") == 4 * V * D
    assert size(table, "dW:embedding") == 2 * V * D
    assert size(table, "fsdp.previous") == 4 * params()


def test_other_models_build_in_every_mode() -> None:
    """GELU and LayerNorm with learned positions, latent attention, experts with a shared one: both compile settings."""
    models = (gpt(), llama(attention=LATENT), llama(attention=LATENT, moe={**EXPERTS, "shared_hidden": 256}))
    for model in models:
        for mode in MODES:
            for compile_ in (False, True):
                ctx = context(model, mode, compile_=compile_)
                for recompute in (NO_RECOMPUTE, Recompute("full"), selective(ctx)):
                    memory = block_memory(layer(ctx, recompute), 1)
                    assert memory.backward_peak[0] >= memory.saved[0] > 0
                for tapes in (embedding_tapes(ctx, PRIMITIVES), head_tapes(ctx, PRIMITIVES)):
                    assert block_memory(tapes, 1).backward_peak[0] > 0


def test_latent_attention_keeps_values_inside_their_projection() -> None:
    """x, norm out, both q latents, kv latent with rope, its norm, q, k, the whole of kv, output, log-sum-exp."""
    model = llama(attention=LATENT)
    heads, nope, turn, dv, low_q, low_kv = 8, 32, 16, 32, 128, 64
    attention = 2 * (2 * D + 2 * low_q + low_kv + turn + low_kv + heads * (2 * (nope + turn) + nope + dv + dv))
    rest = 2 * (2 * D + 4 * F)
    scales = 4 * 4 + 4 * heads
    assert per_token(layer(context(model))) == attention + rest + scales


def test_work_is_the_same_in_every_mode() -> None:
    def flops(ctx: Context) -> float:
        ops = layer(ctx).forward.ops + layer(ctx).backward.ops
        return sum(float(np.asarray(op.work.flops).sum()) for op in ops if isinstance(op.work, Gemm))

    assert flops(context()) == flops(context(mode="autocast")) == flops(context(compile_=True)) == 6 * TOKENS * LINEARS


def number(value: Any) -> float:
    return float(np.asarray(value, dtype=float).reshape(-1)[0])


def test_gradients_are_added_from_the_second_micro_batch_on() -> None:
    """One micro-batch adds nothing; of four, three do, each with the launches of all."""
    ops = layer(context(mode="autocast", accumulating=True, accumulates=0.0)).backward.ops
    added = [op for op in ops if op.name.endswith(".accumulate")]
    assert len(added) == 7 and all(moved(op) == 0 and not np.any(op.launches) for op in added)
    whole = layer(context(mode="autocast", accumulating=True)).backward.ops
    most = layer(context(mode="autocast", accumulating=True, accumulates=0.75)).backward.ops
    for name in (op.name for op in added):
        (all_of_it,), (part,) = ops_named(whole, name), ops_named(most, name)
        assert moved(part) == pytest.approx(0.75 * moved(all_of_it))
        assert part.launches == all_of_it.launches


def test_what_waits_around_the_embedding() -> None:
    """The first block's gather behind the lookup, its reduction and the embedding's own behind the backward pass:
    awaited here, launched and counted in the block's tape."""
    ctx = context()
    tapes = embedding_tapes(ctx, PRIMITIVES)
    (gather,), (reduction,) = (
        ops_named(tape.ops, name)
        for tape, name in ((tapes.forward, "fsdp.first_gather"), (tapes.backward, "fsdp.first_reduction"))
    )
    own = LINEARS + 2 * D
    assert isinstance(gather.work, Collective) and isinstance(reduction.work, Collective)
    assert (number(gather.work.payload), number(reduction.work.payload)) == (2.0 * own, 4.0 * own)
    assert not np.any(gather.launches) and not np.any(reduction.launches)
    assert tapes.forward.ops[-1].name == "fsdp.first_block" and tapes.backward.ops[-1].name == "fsdp.finish"
    alone = embedding_tapes(replace(ctx, fsdp=np.array([1.0])), PRIMITIVES)
    (gather,) = ops_named(alone.forward.ops, "fsdp.first_gather")
    assert isinstance(gather.work, Collective) and number(gather.work.payload) == 0.0


def test_order_of_the_hooks_around_experts() -> None:
    """distribute_module's hooks are the module's own, FSDP's come before them and behind: the experts' weights are
    copied before the tokens go, and reduced when the input's gradients have gone back (expert_parallel.py)."""
    tapes = layer(context(llama(moe=EXPERTS), ep=2, expert_ranks=2))
    forward = [op.name for op in tapes.forward.ops]
    assert forward.index("efsdp.weights.copy_out") < forward.index("moe.counts") < forward.index("moe.dispatch")
    assert sum(isinstance(op.work, HostSync) for op in tapes.forward.ops) == 1
    backward = [op.name for op in tapes.backward.ops]
    assert backward.index("efsdp.weights@.copy_out") < backward.index("moe.combine.backward")
    assert backward.index("moe.dispatch.backward") < backward.index("efsdp.reduce_copy_in")


def test_experts_are_gathered_twice_where_the_layer_is_computed_again() -> None:
    """The block's pre-backward hook has gathered its own weights; the experts' hooks run with the repetition and let
    them go behind it (_fsdp_state.py, _pre_forward)."""
    full = Recompute("full")
    once = [op.name for op in layer(context(llama(moe=EXPERTS), ep=2, expert_ranks=2)).backward.ops]
    again = [op.name for op in layer(context(llama(moe=EXPERTS), ep=2, expert_ranks=2), full).backward.ops]
    copies = [sum(name.startswith("efsdp.weights@") and name.endswith("copy_out") for name in names)
              for names in (once, again)]  # fmt: skip
    gathers = [sum(name.startswith("efsdp") and name.endswith("all_gather") for name in names)
               for names in (once, again)]  # fmt: skip
    assert (copies, gathers) == ([1, 2], [1, 2])


def test_padded_rows_are_added_one_after_the_other() -> None:
    """Backward of the permutation: every padded place took the same row of zeros (moe/utils.py, _permute)."""
    ctx = context(llama(moe=EXPERTS))
    (op,) = ops_named(layer(ctx).backward.ops, "moe.extend.backward")
    assert isinstance(op.work, MemoryBound)
    padding = ctx.framework.grouped_alignment * number(ctx.local_experts)
    assert number(op.work.elements) / op.work.width == padding


def test_gradient_of_the_embedding_is_whole_under_tensor_parallelism() -> None:
    """Rows of the table are split, its gradient has all of them on every rank."""
    for tp in (1, 2, 4):
        tapes = embedding_tapes(context(mode="bf16", tp=tp, accumulating=True), PRIMITIVES)
        assert size(tapes, "dW:embedding") == 2 * V * D
