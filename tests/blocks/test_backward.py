"""The derived backward pass: FLOPs, gradients, sharing, recomputation."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from mofa.blocks.backward import derived_backward_tape
from mofa.blocks.build import BlockTapes
from mofa.blocks.frameworks.recompute import recompute_of_layer
from mofa.blocks.op import Op, OpBackward, TapeBuilder
from mofa.blocks.recomputation import NO_RECOMPUTE, Recompute
from mofa.blocks.work import Gemm, MemoryBound
from mofa.cost.allocations.allocation_trace import block_allocation_trace
from mofa.cost.block.liveness import block_memory
from mofa.specs.model import ModelSpec
from mofa.specs.strategy import RecomputeSpec
from tests.blocks.small import (
    EXPERTS,
    LATENT,
    build,
    context,
    flops,
    framework,
    gpt,
    kept,
    llama,
    shares,
    storage,
    together,
)

FULL = Recompute(kind="full")
DENSE, MOE, MLA = llama(), llama(moe=EXPERTS), llama(attention=LATENT)
MLA_MOE = llama(attention=LATENT, moe={**EXPERTS, "shared_hidden": 256, "score": "sigmoid"})
CASES = [
    pytest.param(
        model, name, tp, id=f"{model.name}-{'moe' if model.moe else 'dense'}-{model.attention.kind}-{name}-{tp}"
    )
    for model in (DENSE, MOE, MLA, MLA_MOE)
    for name in ("megatron", "megatron-local")
    for tp in (1, 4)
]


def tapes(model: ModelSpec, name: str, tp: int, recompute: Recompute = NO_RECOMPUTE) -> BlockTapes:
    ctx = context(model, framework(name), tp=tp, sp=tp > 1, ep=2 if model.moe else 1)
    return build(ctx, recompute, moe=model.moe is not None)


@pytest.mark.parametrize(("model", "name", "tp"), CASES)
def test_backward_products_are_twice_the_forward(model: ModelSpec, name: str, tp: int) -> None:
    found = tapes(model, name, tp)
    assert flops(found.backward) == pytest.approx(2 * flops(found.forward))
    assert flops(found.backward, (".dgrad",)) == pytest.approx(flops(found.backward, (".wgrad",)))


def test_forward_products_by_hand() -> None:
    """2 FLOPs a token and parameter of the matrices; attention apart."""
    ctx = context(DENSE, framework("megatron"), seq_len=256, micro_batch=2)
    matrices = 512 * (8 + 2 * 4) * 64 + 512 * 512 + 3 * 512 * 1536
    assert flops(build(ctx).forward) == 2 * 512 * matrices


@pytest.mark.parametrize(("model", "name", "tp"), CASES)
@pytest.mark.parametrize("recompute", [NO_RECOMPUTE, FULL], ids=["kept", "full"])
def test_every_tensor_is_written_once_and_before_it_is_read(
    model: ModelSpec, name: str, tp: int, recompute: Recompute
) -> None:
    found = tapes(model, name, tp, recompute)
    written = Counter(w for op in (*found.forward.ops, *found.backward.ops) for w in op.writes)
    assert max(written.values()) == 1
    alive = {*found.forward.inputs, *found.backward.inputs}
    for op in (*found.forward.ops, *found.backward.ops):
        assert set(op.reads) <= alive, op.name
        alive |= set(op.writes)
    assert set(found.backward.outputs) <= alive


@pytest.mark.parametrize(("model", "name", "tp"), CASES)
def test_the_gradient_of_each_input_and_weight_appears_once(model: ModelSpec, name: str, tp: int) -> None:
    found = tapes(model, name, tp)
    assert len(found.backward.outputs) == len(found.forward.inputs) == 1
    weights = [op.weight for op in found.forward.ops if op.weight]
    gradients = [op.name for op in found.backward.ops if op.name.endswith(".wgrad")]
    assert sorted(gradients) == sorted(f"{w}.wgrad" for w in weights)
    # each reader of a tensor gives one part of its gradient, and each part after the first is added once
    readers = Counter(
        r
        for op in found.forward.ops
        for r in set(op.reads)
        if found.forward.tensors[r].grad and _has_gradient(found, op)
    )
    sums = Counter(op.name.split()[1] for op in found.backward.ops if op.name.startswith("accumulate "))
    assert sums == Counter({name: n - 1 for name, n in readers.items() if n > 1})


def _has_gradient(found: BlockTapes, op: Op) -> bool:
    return any(f"d:{w}" in found.backward.tensors for w in op.writes)


@pytest.mark.parametrize(("model", "name", "tp"), CASES)
def test_full_recomputation_keeps_the_input_and_repeats_each_op_once(model: ModelSpec, name: str, tp: int) -> None:
    found = tapes(model, name, tp, FULL)
    tokens, t = 512, tp
    assert kept(found) == {"x": 2 * tokens * 512 / t}
    repeated = [op.name for op in found.backward.ops if op.name.endswith("~")]
    assert repeated == [f"{op.name}~" for op in found.forward.ops]
    once = flops(tapes(model, name, tp).backward) + flops(found.forward)
    again = sum(
        float(np.asarray(op.work.flops).reshape(-1)[0])
        for op in found.backward.ops
        if isinstance(op.work, Gemm) or hasattr(op.work, "rows")
    )  # fmt: skip
    assert again == pytest.approx(once)


def test_a_tensor_kept_by_two_ops_counts_once() -> None:
    """The latent projections of q and kv read one normalised input."""
    found = tapes(MLA, "megatron", 1)
    savers = [op.name for op in found.forward.ops if "attn_norm.out" in op.saves]
    assert savers == ["q_down", "kv_down"]
    assert list(kept(found)).count("attn_norm.out") == 1


def test_views_are_not_counted_but_keep_their_source() -> None:
    """q, k and v of a GPT layer are views of one product; attention keeps all of it, once."""
    spec = framework("megatron-local")
    found = build(context(gpt(dropout=0.0), spec, seq_len=256, micro_batch=1))
    held = kept(found)
    assert held["qkv.biased"] == 2 * 256 * 3 * 512
    assert not {"q", "k", "v"} & set(held)
    root = storage(found.forward.ops)
    assert {root[x] for x in "qkv"} == {"qkv.biased"}


def test_only_what_backward_reads_is_kept() -> None:
    """An add keeps nothing, an exponential its output; a chain of the two keeps one tensor."""
    b = TapeBuilder()
    x, y, z = b.tensor("x", 8.0), b.tensor("y", 8.0), b.tensor("z", 8.0)
    b.add(Op("exp", "memory_bound", MemoryBound(16.0), (x,), (y,), (y,), back=OpBackward(24.0, 1)))
    b.add(Op("add", "memory_bound", MemoryBound(24.0), (y, x), (z,)))
    forward = b.tape((x,), (z,))
    found = BlockTapes("toy", forward, derived_backward_tape(forward))
    assert kept(found) == {"y": 8.0}
    # dz goes to y and x as it is; x gets a second gradient through exp: one addition, of 3 x 8 bytes
    adds = [op for op in found.backward.ops if op.name.startswith("accumulate")]
    assert [op.work for op in adds] == [MemoryBound(24.0, "residual_add")]


def test_a_product_of_two_activations_has_two_gradients() -> None:
    b = TapeBuilder()
    q, k, s = b.tensor("q", 2.0 * 3 * 5), b.tensor("k", 2.0 * 7 * 5), b.tensor("s", 2.0 * 3 * 7)
    b.add(Op("qk", "gemm", Gemm(3, 7, 5, count=2), (q, k), (s,), (q, k)))
    forward = b.tape((q, k), (s,))
    back = derived_backward_tape(forward)
    assert back.outputs == ("d:q", "d:k")
    products = [op.work for op in back.ops if isinstance(op.work, Gemm)]
    assert [(p.m, p.n, p.k, p.count) for p in products] == [(3, 5, 7, 2), (5, 7, 3, 2)]
    assert flops(back) == 2 * flops(forward)


def test_a_discarded_output_is_made_again_and_a_checkpoint_keeps_it() -> None:
    """A norm between two products: its output is the second's kept input."""
    b = TapeBuilder()
    x, n, y = b.tensor("x", 8.0), b.tensor("n", 8.0), b.tensor("y", 8.0)
    b.add(Op("norm", "memory_bound", MemoryBound(16.0), (x,), (n,), (x,), region="norm", back=OpBackward(24.0, 2)))
    b.add(Op("linear", "gemm", Gemm(1, 4, 4), (n,), (y,), (n,), weight="w"))
    forward = b.tape((x,), (y,))

    def of(recompute: Recompute) -> BlockTapes:
        return BlockTapes("toy", forward, derived_backward_tape(forward, recompute))

    checkpoint = of(Recompute(kind="regions", checkpoint=frozenset({"norm"})))
    discard = of(Recompute(kind="regions", discard=frozenset({"norm"})))
    assert kept(of(NO_RECOMPUTE)) == kept(checkpoint) == {"n": 8.0, "x": 8.0}
    assert kept(discard) == {"x": 8.0}
    assert [op.name for op in discard.backward.ops if op.name.endswith("~")] == ["norm~"]


def test_a_checkpoint_that_is_a_function_holds_what_it_has_to_its_end() -> None:
    """Its input, what it made again and the gradient it was given; to which nothing can be added in place."""
    b = TapeBuilder()
    x, n, y, z = (b.tensor(name, 8.0) for name in "xnyz")
    b.add(Op("norm", "memory_bound", MemoryBound(16.0), (x,), (n,), (n,), region="part", back=OpBackward(24.0, 2)))
    b.add(Op("add", "memory_bound", MemoryBound(24.0), (x, n), (y,), region="part", view=True, back=OpBackward(0.0, 0)))
    b.add(Op("linear", "gemm", Gemm(1, 4, 4), (y,), (z,), (y,), weight="w"))
    forward = b.tape((x,), (z,))

    def of(reentrant: bool) -> dict[str, Op]:
        part = Recompute(kind="regions", checkpoint=frozenset({"part"}), reentrant=reentrant)
        return {op.name: op for op in derived_backward_tape(forward, part).ops}

    held, free = of(True), of(False)
    assert list(held)[-1] == "part returns"
    assert set(held["part returns"].reads) == {"x", "y~", "d:y"}
    assert not held["accumulate x at norm"].view
    assert free["accumulate x at norm"].view
    assert "part returns" not in free


def test_a_checkpoint_that_is_a_function_begins_with_all_it_makes_again() -> None:
    """The scores are there again before the gradient of the dropped-out ones; the mask is written before these."""
    ctx = context(gpt(), framework("megatron-local", attention="unfused"))
    tapes = build(ctx, recompute_of_layer(ctx.framework, RecomputeSpec.parse("selective"), None, ctx.model))
    names = [op.name for op in tapes.backward.ops]
    assert names.index("attn.qk~") < names.index("attn.dropout~") < names.index("attn.pv.dleft")
    dropout = next(deed for deed in block_allocation_trace(tapes).forward if deed.op == "attn.dropout")
    assert dropout.order == ("attn.dropout_mask", "attn.dropped")
    assert "attn.probs" in dropout.free  # its name in the frame is the output's from here on


@pytest.mark.parametrize("family", ["memory_bound", "attention", "tp", "gemm", "grouped_gemm", "ep", "host"])
def test_dropping_a_family_loses_exactly_its_bytes(family: str) -> None:
    """What the family's ops wrote and backward kept is what the tape no longer holds."""
    found = tapes(MOE, "megatron", 4)
    rest = BlockTapes(found.name, found.forward.without_families([family]), found.backward)
    gone = {w for op in found.forward.ops if op.family == family for w in op.writes if not shares(op)}
    before, after = kept(found), kept(rest)
    views = {w for op in found.forward.ops if op.family == family for w in op.writes} - gone
    assert {k: v for k, v in before.items() if k not in gone} == {k: v for k, v in after.items() if k not in views}


MODES = ["none", "selective", "full", "selective:mlp", "selective:layernorm+core_attn", "selective:core_attn+moe"]


@pytest.mark.parametrize("name", ["megatron", "megatron-local"])
@pytest.mark.parametrize("text", MODES)
@pytest.mark.parametrize("model", [DENSE, MLA_MOE, gpt()], ids=["dense", "mla-moe", "gpt"])
def test_lifetimes_find_what_the_slow_twin_finds(model: ModelSpec, text: str, name: str) -> None:
    """All combinations at once against one by one, with and without tensor and sequence parallelism."""
    spec = framework(name)
    mode = recompute_of_layer(spec, RecomputeSpec.parse(text), None, model)
    degrees = [(1, False), (2, True), (4, False), (8, True)]
    contexts = [context(model, spec, tp=tp, sp=sp, ep=2 if model.moe else 1) for tp, sp in degrees]
    by_one = [sum(kept(build(c, mode, moe=model.moe is not None)).values()) for c in contexts]
    ctx = together(contexts)
    memory = block_memory(build(ctx, mode, moe=model.moe is not None), len(contexts))
    assert memory.saved == pytest.approx(by_one)
    alone = [block_memory(build(c, mode, moe=model.moe is not None), 1) for c in contexts]
    assert memory.forward_peak == pytest.approx([float(m.forward_peak[0]) for m in alone])
    assert memory.backward_peak == pytest.approx([float(m.backward_peak[0]) for m in alone])


def test_peaks_of_the_fp32_softmax() -> None:
    """Forward 12 bytes a score at once, backward 16, beside the layer's other tensors (fused_softmax.py)."""
    spec = framework("megatron-local", attention="unfused")
    found = build(context(gpt(dropout=0.0), spec, seq_len=1024, micro_batch=2))
    memory = block_memory(found, 1)
    scores = 2 * 8 * 1024**2
    ops = (*found.forward.ops, *found.backward.ops)
    assert ops[memory.forward_op[0]].name == "attn.softmax"
    assert ops[memory.backward_op[0]].name == "attn.softmax.backward"
    # before it: the input, the norm's output, q, k and v, the norm's scales, the mask
    before = 2 * 2 * 1024 * 512 * (1 + 1 + 3) + 8 * 2 * 1024 + 1024**2
    assert memory.forward_peak[0] == 12 * scores + before
    assert 16 * scores < memory.backward_peak[0] < 17 * scores


def test_a_fused_accumulation_takes_its_bytes_and_no_launch() -> None:
    """6 bytes a weight: the result is read and written in fp32 instead of written in bf16, in the product's family."""
    fused = build(context(DENSE, framework("megatron"))).backward.ops
    made = [op for op in fused if op.name.endswith(".accumulate") and op.family == "gemm"]
    weights = {op.name.removesuffix(".wgrad"): op for op in fused if op.name.endswith(".wgrad")}
    assert made and all(op.launches == 0 for op in made)
    for op in made:
        product = weights[op.name.removesuffix(".accumulate").removesuffix(".wgrad")]
        assert isinstance(op.work, MemoryBound) and isinstance(product.work, Gemm)
        assert op.work.bytes == pytest.approx(6 * product.work.n * product.work.m)
