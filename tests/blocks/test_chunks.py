"""Token chunks: the same work in pieces, the forward again, one piece of memory at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mofa.blocks.backward import derived_backward_tape
from mofa.blocks.build import BlockTapes, CostedLayerKind, layer_forward_tape
from mofa.blocks.chunks import split_into_token_chunks, without_module_locals
from mofa.blocks.op import Tape
from mofa.blocks.recomputation import NO_RECOMPUTE, Recompute
from mofa.blocks.work import Collective, GroupedGemm
from mofa.cost.block.liveness import block_memory
from tests.blocks.small import EXPERTS, context, framework, llama, primitives

FULL = Recompute(kind="full")
CTX = context(llama(moe=EXPERTS), framework("megatron"), seq_len=1024, ep=4)
SKEWED = replace(CTX, rows_memory=20 * CTX.rows_memory)
FORWARD = layer_forward_tape(CTX, primitives(CTX), CostedLayerKind(True))


def expert_flops(tape: Tape, *, again: bool | None = None) -> float:
    return sum(
        float(np.sum(op.work.flops)) for op in tape.ops
        if isinstance(op.work, GroupedGemm) and again in (None, op.name.endswith("~"))
    )  # fmt: skip


def exchanged(tape: Tape) -> list[float]:
    return [float(np.sum(op.work.payload)) for op in tape.ops
            if isinstance(op.work, Collective) and op.work.kind == "all_to_all"]  # fmt: skip


@pytest.mark.parametrize("chunks", [2, 3, 8])
@pytest.mark.parametrize("recompute", [NO_RECOMPUTE, FULL])
def test_the_same_products_and_bytes_in_pieces_and_the_forward_again(chunks: int, recompute: Recompute) -> None:
    plain, pieces = FORWARD, split_into_token_chunks(FORWARD, chunks)
    assert expert_flops(pieces) == pytest.approx(expert_flops(plain))
    assert sum(exchanged(pieces)) == pytest.approx(sum(exchanged(plain)))
    assert len(exchanged(pieces)) == 3 * chunks  # rows there and back, their probabilities there
    back = derived_backward_tape(pieces, recompute)
    # the experts' backward as without, and their forward once more, whatever else is recomputed
    assert expert_flops(back, again=False) == pytest.approx(2 * expert_flops(plain))
    assert expert_flops(back, again=True) == pytest.approx(expert_flops(plain))
    # three exchanges more a chunk: dispatch and combine again beside their duals
    assert len(exchanged(back)) == 6 * chunks
    assert sum(exchanged(back)) == pytest.approx(2 * sum(exchanged(plain)))


def test_a_weight_gets_a_gradient_from_each_chunk() -> None:
    back = derived_backward_tape(split_into_token_chunks(FORWARD, 4))
    assert sum(op.name.startswith("experts.fc1#") and op.name.endswith(".wgrad") for op in back.ops) == 4


def test_chunks_run_one_after_the_other_and_each_right_before_its_gradients() -> None:
    names = [op.name for op in derived_backward_tape(split_into_token_chunks(FORWARD, 3), FULL).ops]
    order = [names.index(f"experts.fc2#{i}{end}") for i in (2, 1, 0) for end in ("~", ".dgrad")]
    assert order == sorted(order)


def test_full_recomputation_does_not_repeat_what_follows_the_chunks() -> None:
    back = derived_backward_tape(split_into_token_chunks(FORWARD, 2), FULL)
    again = {op.name for op in back.ops if op.name.endswith("~")}
    assert "moe.concat~" not in again and "out.add~" not in again
    assert any(name.startswith("attn.core") for name in again)
    # nothing of the experts is kept from the forward pass
    made = {
        w for op in split_into_token_chunks(FORWARD, 2).ops for w in op.writes if "#" in w and not w.startswith("x")
    }
    assert not made & {r for op in back.ops for r in op.reads}


@pytest.mark.parametrize("recompute", [NO_RECOMPUTE, FULL])
def test_memory_is_a_part_that_stays_and_a_part_over_the_chunks(recompute: Recompute) -> None:
    """MemFine's A + B / c (moe.md A.9) out of lifetimes, where the experts' rows dominate."""
    forward = without_module_locals(layer_forward_tape(SKEWED, primitives(SKEWED), CostedLayerKind(True)))
    peak = {}
    for c in (1, 2, 4, 8):
        tape = split_into_token_chunks(forward, c)
        peak[c] = float(
            block_memory(BlockTapes("moe", tape, derived_backward_tape(tape, recompute)), 1).backward_peak[0]
        )
    assert peak[2] - peak[4] == pytest.approx(2 * (peak[4] - peak[8]), rel=0.02)
    part = (peak[2] - peak[4]) * 4  # B
    assert peak[1] == pytest.approx(peak[8] + 7 / 8 * part, rel=0.15)

    def saved(chunks: int) -> float:
        tape = split_into_token_chunks(forward, chunks)
        return block_memory(BlockTapes("moe", tape, derived_backward_tape(tape, recompute)), 1).saved[0]

    kept = {c: saved(c) for c in (1, 4)}
    if recompute is FULL:
        assert kept[1] == kept[4]
    else:
        assert kept[4] < 0.5 * kept[1]  # the experts' tensors are no longer kept


def test_without_chunks_or_experts_nothing_changes() -> None:
    assert split_into_token_chunks(FORWARD, 1) is FORWARD
    dense = layer_forward_tape(CTX, primitives(CTX), CostedLayerKind(False))
    assert split_into_token_chunks(dense, 4) is dense


def test_overlap_dispatches_the_next_chunk_before_the_experts_of_this_one() -> None:
    names = [op.name for op in split_into_token_chunks(FORWARD, 3, overlap=True).ops]
    order = [names.index(n) for n in ("moe.dispatch#0", "moe.dispatch#1", "experts.fc1#0", "moe.combine#0",
                                      "moe.dispatch#2", "experts.fc1#1", "experts.fc1#2", "moe.combine#2")]  # fmt: skip
    assert order == sorted(order)
    plain, beside = split_into_token_chunks(FORWARD, 3), split_into_token_chunks(FORWARD, 3, overlap=True)
    assert sorted(op.name for op in plain.ops) == sorted(names)
    for recompute in (NO_RECOMPUTE, FULL):
        back = derived_backward_tape(beside, recompute)
        assert expert_flops(back) == pytest.approx(expert_flops(derived_backward_tape(plain, recompute)))
        assert sum(exchanged(back)) == pytest.approx(sum(exchanged(derived_backward_tape(plain, recompute))))
