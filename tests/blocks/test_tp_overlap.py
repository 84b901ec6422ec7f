"""Tensor-parallel communication beside its products, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mofa.blocks.op import Op, Tape
from mofa.blocks.tp_overlap import user_buffer_bytes, with_tp_overlap
from mofa.blocks.work import Collective, Gemm
from mofa.cost.block.tape_clock import time_per_tape_repetition
from tests.blocks.small import build, context, framework, in_fp8, llama
from tests.cost.block.test_tape_clock import SLOWDOWN, machine, timed

S, B, H, TP = 256, 2, 512, 4
TOKENS = S * B


def one(tape: Tape, name: str) -> Op:
    (op,) = [op for op in tape.ops if op.name == name]
    return op


def number(value: Any) -> float:
    return float(np.asarray(value).reshape(-1)[0])


def payloads(tape: Tape, kind: str) -> list[float]:
    """Of the collectives of one kind over tp, in order. [B]"""
    works = [op.work for op in tape.ops if isinstance(op.work, Collective) and op.work.group == "tp"]
    return [number(work.payload) for work in works if work.kind == kind]


def tapes(tp: int = TP, gemm: str = "bf16", **options: Any) -> tuple[Tape, Tape]:
    ctx = context(llama(), framework("megatron", **options), seq_len=S, micro_batch=B, tp=tp, sp=tp > 1)
    block = build(ctx if gemm == "bf16" else in_fp8(ctx, gemm))
    return block.forward, block.backward


def test_a_gathered_product_begins_with_its_own_piece() -> None:
    """qkv reads the shard; the next op awaits the whole. Four pieces of 128 tokens; the gather fills a user buffer."""
    forward, backward = tapes(tp_overlap=True)
    names = [op.name for op in forward.ops]
    gather, product = one(forward, "qkv.all_gather"), one(forward, "qkv")
    assert names.index("qkv") == names.index("qkv.all_gather") + 1
    assert product.reads == gather.reads
    assert gather.writes[-1] in forward.ops[names.index("qkv") + 1].reads
    assert isinstance(product.work, Gemm)
    assert (number(product.work.m), number(product.work.count), number(product.launches)) == (TOKENS / TP, TP, TP)
    assert number(forward.tensors[gather.writes[0]].bytes) == 0
    # backward the gradient of a row-parallel linear's output is gathered beside the input gradient's product
    gather, product = one(backward, "proj.reduce_scatter.backward"), one(backward, "proj.dgrad")
    assert product.reads == gather.reads
    assert gather.writes[0] in one(backward, "proj.wgrad").reads
    assert isinstance(product.work, Gemm) and number(product.work.count) == TP


def test_three_of_four_pieces_are_reduced_beside_the_product() -> None:
    forward, _ = tapes(tp_overlap=True)
    names = [op.name for op in forward.ops]
    at = names.index("proj")
    assert names[at - 1 : at + 2] == ["proj.reduce_scatter.early", "proj", "proj.reduce_scatter"]
    assert payloads(forward, "reduce_scatter") == [TOKENS * H * 2 * share for share in (0.75, 0.25, 0.75, 0.25)]
    assert number(forward.tensors["proj.out"].bytes) == 0


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_as_much_is_sent_and_computed(kind: str) -> None:
    for ours, plain in zip(tapes(tp_overlap=True), tapes(), strict=True):
        assert sum(payloads(ours, kind)) == pytest.approx(sum(payloads(plain, kind)))
        flops = [sum(number(op.work.flops) for op in t.ops if isinstance(op.work, Gemm)) for t in (ours, plain)]
        assert flops[0] == pytest.approx(flops[1])


def test_user_buffers_stay() -> None:
    """Ten of 512 tokens, 512 wide, 2 bytes: 5 MiB; none without tensor parallelism."""

    def stay(tp: int, **options: Any) -> float:
        spec = framework("megatron", **options)
        ctx = context(llama(), spec, seq_len=S, micro_batch=B, tp=tp, sp=tp > 1)
        return number(user_buffer_bytes(ctx))

    assert stay(TP, tp_overlap=True) - stay(TP) == 10 * TOKENS * H * 2 == 5 * 2**20
    assert stay(1, tp_overlap=True) == stay(1)
    assert [op.name for op in tapes(1, tp_overlap=True)[0].ops] == [op.name for op in tapes(1)[0].ops]


def test_what_is_hidden() -> None:
    """A gather of 3 s hides behind a product of 8 s, which it slows by a tenth; of a reduction of 4 s, 1 s is left.

    With the next op of 1 s, 12 s become 9.3; without it, 12 s become 9.3: 3 s run beside the product each time.
    """
    ctx = context(llama(), framework("megatron", tp_overlap=True), tp=TP, sp=True)
    forward, _ = tapes()
    at = [op.name for op in forward.ops]
    gathered = replace(forward, ops=forward.ops[at.index("qkv.all_gather") : at.index("qkv") + 2])
    then = gathered.ops[-1].name
    times = {"qkv.all_gather": (3.0, 0.0), "qkv": (8.0, 0.0), then: (1.0, 0.0)}
    with timed(times):
        assert number(time_per_tape_repetition(gathered, machine(), repeat=1).total_s) == pytest.approx(12.0)
        assert number(
            time_per_tape_repetition(with_tp_overlap(gathered, ctx), machine(), repeat=1).total_s
        ) == pytest.approx(9.0 + 3.0 * SLOWDOWN)
    reduced = replace(forward, ops=forward.ops[at.index("proj") : at.index("mid.add") + 1])
    then = reduced.ops[-1].name
    alone = {"proj": (8.0, 0.0), "proj.reduce_scatter": (4.0, 0.0), then: (0.0, 0.0)}
    pieces = {**alone, "proj.reduce_scatter.early": (3.0, 0.0), "proj.reduce_scatter": (1.0, 0.0)}
    with timed(alone):
        assert number(time_per_tape_repetition(reduced, machine(), repeat=1).total_s) == pytest.approx(12.0)
    with timed(pieces):
        assert number(
            time_per_tape_repetition(with_tp_overlap(reduced, ctx), machine(), repeat=1).total_s
        ) == pytest.approx(9.0 + 3.0 * SLOWDOWN)


def test_fp8_is_gathered_as_it_is_cast() -> None:
    """A byte an element, forward and back; what is reduced has two."""
    for (ours, plain), gathers in zip(zip(tapes(gemm="delayed"), tapes(), strict=True), (2, 4), strict=True):
        assert len(payloads(plain, "all_gather")) == gathers
        assert payloads(ours, "all_gather") == [sent / 2 for sent in payloads(plain, "all_gather")]
        assert payloads(ours, "reduce_scatter") == payloads(plain, "reduce_scatter")


def test_other_frameworks_have_none() -> None:
    with pytest.raises(ValueError, match="tp_overlap is an option of megatron's"):
        framework("megatron-local", tp_overlap=True)
