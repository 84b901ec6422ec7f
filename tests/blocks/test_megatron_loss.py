"""Megatron's three losses by hand: bytes of a logit that are kept, and that are there at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mofa
from mofa.blocks.build import BlockTapes, head_tapes
from mofa.blocks.op import Op, Tape
from mofa.blocks.work import MemoryBound
from mofa.cost.allocations.allocation_trace import block_allocation_trace
from mofa.cost.block.liveness import block_memory
from mofa.errors import SpecError
from mofa.specs.load import load_framework
from tests.blocks.small import context, framework, kept, llama, primitives, size

TOKENS, VOCAB = 512, 32000
LOGITS = TOKENS * VOCAB


def of(fusion: str, *, tp: int = 1, **options: Any) -> BlockTapes:
    """The head with its loss."""
    spec = framework("megatron", cross_entropy_fusion=fusion, **options)
    ctx = context(llama(), spec, seq_len=TOKENS, micro_batch=1, tp=tp, sp=tp > 1)
    return head_tapes(ctx, primitives(ctx))


def one(tape: Tape, name: str) -> Op:
    (op,) = [op for op in tape.ops if op.name == name]
    return op


def moved(block: BlockTapes) -> tuple[float, float]:
    """Bytes that the kernels of the loss move for each logit, forward and back. [B]"""
    ops = one(block.forward, "loss.cross_entropy"), one(block.backward, "loss.cross_entropy.backward")
    both = []
    for op in ops:
        assert isinstance(op.work, MemoryBound)
        both.append(float(np.asarray(op.work.bytes).item()) / LOGITS)
    return both[0], both[1]


@pytest.mark.parametrize(
    ("fusion", "options", "bytes_moved", "held"),
    [
        ("none", {}, (38, 14), 4),
        ("native", {}, (22, 18), 4),
        ("te", {}, (4, 4), 2),
        ("te", {"loss_copies_logits": False}, (6, 4), 2),
    ],
)
def test_bytes_of_a_logit(fusion: str, options: dict[str, Any], bytes_moved: tuple[float, float], held: float) -> None:
    """Sums of what each kernel reads and writes; the fp32 softmax or bf16 logits alone are kept."""
    block = of(fusion, **options)
    assert moved(block) == pytest.approx(bytes_moved)
    large = {name: n for name, n in kept(block).items() if n >= LOGITS}
    assert sum(large.values()) == pytest.approx(held * LOGITS)


@pytest.mark.parametrize(
    ("fusion", "options", "forward", "backward"),
    [
        ("none", {}, 2 + 4, 4 + 2),
        # forward what exp writes before it is the softmax; back the softmax, its copy with the targets' terms, the
        # bf16 gradient
        ("native", {}, 2 + 4 + 4, 4 + 4 + 2),
        # the logits and their copy; the gradient is in the copy's memory
        ("te", {}, 2 + 2, 2),
        ("te", {"loss_copies_logits": False}, 2, 2),
    ],
)
def test_bytes_of_a_logit_at_once(fusion: str, options: dict[str, Any], forward: float, backward: float) -> None:
    """In closed form and played: the most there is of tensors as large as the logits."""
    block = of(fusion, **options)
    deeds = block_allocation_trace(block)
    sizes: dict[str, int] = {}
    for tape, most in ((deeds.forward, forward), (deeds.backward, backward)):
        peak = 0
        for deed in tape:
            sizes.update({item.name: item.bytes for item in deed.new if item.bytes >= LOGITS})
            peak = max(peak, sum(sizes.values()) + sum(item.bytes for item in deed.scratch if item.bytes >= LOGITS))
            for name in deed.free:
                sizes.pop(name, None)
        assert peak == pytest.approx(most * LOGITS)
    assert not sizes
    found = block_memory(block, 1)
    beside = {"none": 6, "native": 10, "te": 2}[fusion] * LOGITS
    assert found.backward_peak[0] == pytest.approx(beside, rel=0.1)  # the rest is the norm's and the weight's


def test_transformer_engine_gathers_four_numbers_a_token() -> None:
    """te/pytorch/triton/cross_entropy.py: maximum, sum, the target's logit and a place for the sum of logits, fp32."""
    split, whole = of("te", tp=4), of("te")
    assert size(split.forward, "loss.gathered") == 4 * 4 * 4 * TOKENS
    assert one(split.forward, "loss.all_gather").work.payload == 4 * 4 * 4 * TOKENS  # type: ignore[union-attr]
    assert not any(op.name in ("loss.all_gather", "loss.all_reduce") for op in whole.forward.ops)


def test_old_spelling() -> None:
    """True was the only fused loss that there was."""
    assert load_framework("megatron", {"cross_entropy_fusion": True}).cross_entropy_fusion == "native"
    assert load_framework("megatron", {"cross_entropy_fusion": False}).cross_entropy_fusion == "none"
    with pytest.raises(SpecError, match="is not offered by torchtitan"):
        load_framework("torchtitan", {"cross_entropy_fusion": "te"})
    with pytest.raises(SpecError, match="leave it out"):
        load_framework("megatron", {"loss_copies_logits": False})


def test_a_loss_that_decides_what_fits() -> None:
    """Megatron-Bridge pull request 3880: Qwen3 30B-A3B on 16 H100 with Transformer Engine's loss, expandable segments
    and bf16 gradients: peak allocated 57.1 GiB, before the loss copied its logits."""
    options = {
        "allocator": "expandable", "cross_entropy_fusion": "te", "loss_copies_logits": False, "grads": "bf16",
    }  # fmt: skip
    job = mofa.load_workload("qwen3-30b-a3b", seq_len=4096, global_batch=1024)
    plan = mofa.estimate(
        job, mofa.load_cluster("h100-hgx", 16), {"ep": 16, "micro_batch": 1},
        framework=mofa.load_framework("megatron", options), replay=False,
    )  # fmt: skip
    assert plan.memory.allocated_bytes / 2**30 == pytest.approx(57.1, rel=0.01)
