"""Megatron's linear layers in fp8 by hand: what each recipe casts, keeps, gathers and makes again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mofa.blocks.build import BlockTapes
from mofa.blocks.elementwise import FloatK, value_of_combination
from mofa.blocks.frameworks.megatron.fp8 import cast_input_to_fp8
from mofa.blocks.op import Op, Tape, TapeBuilder
from mofa.blocks.work import Collective, Gemm, GroupedGemm, MemoryBound
from tests.blocks.small import EXPERTS, build, context, framework, in_fp8, kept, llama, size, together

S, B, H, F, TP = 256, 2, 512, 1536, 4
TOKENS = S * B
QKV = (8 + 2 * 4) * 64
SCALED = 1.0 + 4.0 / 128.0
"""A byte and its share of a scale of 4 bytes for 128 elements. [B]"""
MEGATRON = framework("megatron")
RECIPES = ("delayed", "tensorwise", "blockwise")


def number(quantity: FloatK, k: int = 0) -> float:
    return value_of_combination(quantity, k)


def layer(recipe: str, tp: int = 1, *, sp: bool | None = None, moe: bool = False) -> BlockTapes:
    model = llama(moe=EXPERTS) if moe else llama()
    ctx = context(model, MEGATRON, seq_len=S, micro_batch=B, tp=tp, sp=tp > 1 if sp is None else sp)
    return build(in_fp8(ctx, recipe) if recipe else ctx, moe=moe)


def one(tape: Tape, name: str) -> Op:
    (op,) = [op for op in tape.ops if op.name == name]
    return op


def moved(op: Op) -> float:
    assert isinstance(op.work, MemoryBound)
    return number(op.work.bytes)


def names(tape: Tape) -> list[str]:
    return [op.name for op in tape.ops if number(op.present)]


@pytest.mark.parametrize(
    ("recipe", "elsewhere", "alone"), [("delayed", 2.0, 4.0), ("tensorwise", 4.0, 6.0), ("blockwise", 4.0, 4.0)]
)
def test_bytes_of_casts(recipe: str, elsewhere: float, alone: float) -> None:
    """Of an input behind a norm, which casts (then it is transposed), finds the largest, or does neither; and of one
    behind nothing: 2 bytes read, once more for the largest, a byte written for each copy. The norm's output in bf16 is
    gone when it was cast."""
    forward = layer(recipe).forward
    assert moved(one(forward, "qkv.cast")) == elsewhere * TOKENS * H
    assert moved(one(forward, "mlp.fc2.cast")) == alone * TOKENS * F
    assert moved(one(forward, "attn_norm")) == (3.0 if recipe == "delayed" else 4.0) * TOKENS * H
    assert size(forward, "attn_norm.out") == 0.0
    assert number(one(forward, "qkv.cast").scratch) == (0.0 if recipe == "delayed" else 2.0 * TOKENS * H)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_outputs_are_cast_to_both_copies(recipe: str) -> None:
    """Of fc1's output twice its width: its gradient is as wide; rows for the input's product, columns for the
    weight's. The products are of the recipe's kinds."""
    backward = layer(recipe).backward
    cast, dgrad, wgrad = (one(backward, f"mlp.fc1.{end}") for end in ("dy.cast", "dgrad", "wgrad"))
    assert moved(cast) == (6.0 if recipe == "tensorwise" else 4.0) * TOKENS * 2 * F
    row, column = cast.writes
    assert dgrad.reads == (row,) and wgrad.reads[0] == column
    assert cast.reads[0] in wgrad.reads  # autograd holds it until the function returns
    each = SCALED if recipe == "blockwise" else 1.0
    assert size(backward, row) == size(backward, column) == each * TOKENS * 2 * F
    kinds = [op.work.format for op in (dgrad, wgrad) if isinstance(op.work, Gemm)]
    assert kinds == (["fp8_block", "fp8_block_rows"] if recipe == "blockwise" else ["fp8_split", "fp8_split"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_products_run_on_several_streams(recipe: str) -> None:
    """As those in bf16 do, in all three passes."""
    tapes = layer(recipe, moe=True)
    kernels = {(op.work.wgrad, op.work.kernel) for tape in (tapes.forward, tapes.backward) for op in tape.ops
               if isinstance(op.work, GroupedGemm)}  # fmt: skip
    assert kernels == {(False, "multi-stream"), (True, "multi-stream")}


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_kept_without_tensor_parallelism(recipe: str) -> None:
    """A transposed copy of each linear's input. Attention keeps its output anyway: the projection casts that again,
    where the largest is not counted from step to step."""
    each = SCALED if recipe == "blockwise" else 1.0
    found = kept(layer(recipe))
    assert found["qkv.fp8_t"] == each * TOKENS * H and found["mlp.fc2.fp8_t"] == each * TOKENS * F
    assert not any(name.endswith(".fp8") for name in found)
    assert ("proj.fp8_t" in found) == (recipe == "delayed")
    again = [op for op in layer(recipe).backward.ops if op.name == "proj.again.cast"]
    assert len(again) == (recipe != "delayed")
    if again:
        assert moved(again[0]) == {"tensorwise": 6.0, "blockwise": 3.0}[recipe] * TOKENS * H


def test_recipes_differ_in_memory_as_their_copies_do() -> None:
    """bf16 keeps most; blocks keep their scales beyond what one scale a tensor does, which drops the projection's
    input; delayed scaling keeps that as well."""
    whole = {recipe: sum(kept(layer(recipe)).values()) for recipe in ("", *RECIPES)}
    copies = TOKENS * (2 * H + F)
    assert whole["delayed"] - whole["tensorwise"] == TOKENS * H
    assert whole["blockwise"] - whole["tensorwise"] == pytest.approx(copies * (SCALED - 1.0))
    # two bytes an element of qkv's and fc1's normed inputs and of fc2's, instead of one
    assert whole[""] - whole["tensorwise"] == pytest.approx(copies)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_rows_are_gathered_and_then_transposed(recipe: str) -> None:
    """Under sequence parallelism the row-wise shard is kept; it is gathered for the product, and again backward, where
    the whole is transposed behind the input's product."""
    tapes = layer(recipe, TP)
    forward, backward = tapes.forward, tapes.backward
    shard = TOKENS * H / TP
    found = kept(tapes)
    assert found["qkv.fp8_shard"] == shard and "qkv.fp8_t" not in found
    work = one(forward, "qkv.all_gather").work
    assert isinstance(work, Collective) and number(work.payload) == TOKENS * H
    order = names(backward)
    again, turn = one(backward, "qkv.again.all_gather"), one(backward, "qkv.again.transpose")
    assert again.reads == ("qkv.fp8_shard",) and moved(turn) == 2.0 * TOKENS * H
    at = [order.index(f"qkv.{n}") for n in ("again.all_gather", "dgrad", "again.transpose", "wgrad")]
    assert at == sorted(at)
    assert turn.writes[0] in one(backward, "qkv.wgrad").reads
    # the projection's gradient comes as a shard: cast, gathered, transposed before its products
    at = [order.index(f"proj.{n}") for n in ("dy.cast", "dy.all_gather", "dy.transpose", "dgrad", "wgrad")]
    assert at == sorted(at)
    assert size(backward, "proj.dy.gathered") == size(backward, "proj.dy.transposed") == TOKENS * H
    assert ("qkv.amax" in names(forward)) == ("proj.dy.amax" in order) == (recipe == "tensorwise")


def test_columns_of_blocks_are_gathered_and_put_in_order() -> None:
    """The column-wise shard is kept; its gather fills a buffer from which the whole is written, both with scales."""
    tapes = layer("blockwise", TP)
    backward = tapes.backward
    assert kept(tapes)["qkv.fp8_t"] == SCALED * TOKENS * H / TP
    gather, order = one(backward, "qkv.again.all_gather"), one(backward, "qkv.again.order")
    assert size(backward, gather.writes[0]) == size(backward, order.writes[0]) == SCALED * TOKENS * H
    assert {gather.writes[0], "qkv.fp8_t"} == set(order.reads)
    # of the projection's gradient both copies, three buffers at once
    for name in ("proj.dy.gathered", "proj.dy.columns.gathered", "proj.dy.ordered"):
        assert size(backward, name) == SCALED * TOKENS * H
    whole = [number(op.work.payload) for op in backward.ops if isinstance(op.work, Collective)]
    assert whole.count(SCALED * TOKENS * H) == 6  # rows and columns of two gradients, columns of two inputs


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("moe", [False, True])
def test_several_combinations_at_once_are_each_alone(recipe: str, moe: bool) -> None:
    """Kept bytes and FLOPs of an array of degrees are those of its entries."""
    model = llama(moe=EXPERTS) if moe else llama()
    alone = [
        in_fp8(context(model, MEGATRON, seq_len=S, micro_batch=B, tp=tp, sp=sp), recipe)
        for tp, sp in ((1, False), (TP, True), *(() if moe else ((2, False),)))
    ]
    both = build(together(alone), moe=moe)
    for i, ctx in enumerate(alone):
        single = build(ctx, moe=moe)
        for tape, other in ((both.forward, single.forward), (both.backward, single.backward)):
            bytes_ = [
                sum(
                    number(op.work.bytes, k) * number(op.present, k) for op in t.ops if isinstance(op.work, MemoryBound)
                )
                for t, k in ((tape, i), (other, 0))
            ]
            assert bytes_[0] == pytest.approx(bytes_[1])
            sent = [
                sum(number(op.work.payload, k) * number(op.present, k) for op in t.ops
                    if isinstance(op.work, Collective))
                for t, k in ((tape, i), (other, 0))
            ]  # fmt: skip
            assert sent[0] == pytest.approx(sent[1])


@pytest.mark.parametrize(("recipe", "launches"), [("delayed", 1), ("tensorwise", 4 * 8), ("blockwise", 8)])
def test_experts_are_padded_and_cast_each(recipe: str, launches: int) -> None:
    """8 experts: 7.5 rows more each on average; one launch for all of delayed scaling, else some for each."""
    tapes = layer(recipe, moe=True)
    rows = TOKENS * 2 + 8 * 7.5
    cast = one(tapes.forward, "experts.fc1.cast")
    assert number(cast.launches) == launches
    # 7 of 8 experts' rows, padded to 16, do not fill their last block of 128: their kernel takes 1.6 times as long
    passes = 1.0 + 7.0 / 8.0 * 0.6 if recipe == "blockwise" else 1.0
    assert moved(cast) == pytest.approx((6.0 if recipe == "tensorwise" else 4.0) * rows * H * passes)
    assert moved(one(tapes.forward, "experts.pad")) == 4.0 * rows * H
    work = one(tapes.forward, "experts.fc1").work
    assert isinstance(work, GroupedGemm) and number(work.rows) == rows
    assert number(one(tapes.backward, "experts.fc2.dy.cast").launches) == launches
    unpadded = one(tapes.forward, "experts.unpad")
    assert size(tapes.forward, unpadded.writes[0]) == 2.0 * TOKENS * 2 * H


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_where_products_take_any_layout_one_copy_is_both(recipe: str) -> None:
    """On a B200 the copy that is read is the one that is kept; blocks are stored both ways there as well."""
    ctx = replace(in_fp8(context(llama(), MEGATRON), recipe), fp8_transposes=False)
    b = TapeBuilder()
    b.tensor("h", 2.0 * 100)
    operand = cast_input_to_fp8(b, ctx, "h", "x", 100.0)
    assert (operand.row, operand.saves) == ("x.fp8", ("x.fp8",))
    assert moved(b.ops[-1]) == (3.0 if recipe == "delayed" else 5.0) * 100
    blocks = cast_input_to_fp8(b, replace(ctx, fp8=in_fp8(ctx, "blockwise").fp8), "h", "y", 100.0)
    assert blocks.saves == ("y.fp8_t",)
